"""Gradient checkpointing: the same loss and gradients to the bit, and each block computed twice."""

import copy
import json
import re
from argparse import Namespace

import pytest
import tiny_pipelines
import torch
from conftest import ROOT, Script, make_captioned, make_models, make_sdxl
from diffusers import UNet2DConditionModel, UNet2DModel
from fake_device import DEVICE, forked
from test_edits import make_pairs
from test_model_lists import EDITS, PAGE, list_classes, read_lists
from torch.utils._python_dispatch import TorchDispatchMode

from diffusion_training.blocks import (
    ATTENTION,
    Checkpointed,
    checkpoint_gradients,
    list_checkpointed,
    list_segments,
)

pytestmark = [
    pytest.mark.usefixtures("without_figures"),
    # of NumPy, at a tensor that ERNIE-Image's pipeline gives its scheduler
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),  # of deprecated pipelines
]
precompute = Script("precompute_latents")
FLOW, TEXT = Script("train_flow"), Script("train_text_to_image")
U_NETS = {"sd": make_models, "sdxl": make_sdxl}
NONE = {"gradient_checkpointing": False, "checkpoint_blocks": None, "keep_attention": False}
ALL = Namespace(**NONE | {"gradient_checkpointing": True})
ONE = Namespace(**NONE | {"checkpoint_blocks": 1})
KEPT = Namespace(**NONE | {"gradient_checkpointing": True, "keep_attention": True})
OTHERS = ("BLOCKS", "OTHER_BLOCKS", "EDIT", "OTHERS")


attentions = []  # calls of attention's kernels in a forward pass, of each model


class Compared(BaseException):
    """Ends a trainer after its first batch."""


def differentiate(objective, models, batch):
    """Loss and gradients of all weights, with the same dropout each time."""
    torch.manual_seed(0)
    prepared = objective.prepare(batch)
    loss = objective.loss(models, prepared, batch["weight"])
    loss.backward()
    found = {"loss": loss.detach()}
    for model in models.values():
        for name, weight in model.named_parameters():
            if weight.grad is not None:
                found[name] = weight.grad
                weight.grad = None
    return found


def compare(accelerator, objective, models, optimizer, batches, *others):
    """In place of a trainer's `train_step`."""
    batch = next(batches)
    (model,) = models.values()
    for name, weight in model.named_parameters():
        if weight.is_floating_point():
            weight.requires_grad_()
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.1)
    segments = list_segments(model)
    inside = [name for name in segments if any(name.startswith(f"{each}.") for each in segments)]
    assert segments and not inside
    plain = {}
    kinds = {"float32": torch.float32, "bf16": torch.bfloat16}
    for kind, dtype in kinds.items():
        with torch.autocast("cpu", dtype, enabled=kind != "float32"), Attentions() as once:
            plain[kind] = differentiate(objective, models, batch)
    attentions.append(once.count)
    assert any(value.any() for name, value in plain["float32"].items() if "lora_A" in name)
    for kind, dtype in kinds.items():
        for plan in (ALL, ONE, KEPT):
            checkpoint_gradients(models, plan)
            calls = count_calls(segments)
            with torch.autocast("cpu", dtype, enabled=kind != "float32"), Attentions() as counter:
                found = differentiate(objective, models, batch)
            assert found.keys() == plain[kind].keys()
            differing = [name for name in found if not torch.equal(found[name], plain[kind][name])]
            assert not differing, f"{len(differing)} of {len(found)} in {kind}, {plan}: {differing}"
            # FLUX.3 has blocks that only references reach
            counts = [len(each) for name, each in calls.items() if "image_cond" not in name]
            assert all(count and count % 2 == 0 for count in counts), calls
            assert len(calls) == (1 if plan is ONE else len(segments))
            if plan is not ONE:
                assert (counter.count > once.count) == (plan is ALL and once.count > 0)
            for segment in list_checkpointed(model):
                del segment.forward
    raise Compared


class Attentions(TorchDispatchMode):
    """Counts calls of attention's kernels, also those in the backward pass."""

    count = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.count += operator in ATTENTION
        return operator(*args, **(kwargs or {}))


def count_calls(segments):
    """{name: a list that grows with each call of the segment's own `forward`}."""
    calls = {}
    checkpointed = {name: x for name, x in segments.items() if isinstance(x.forward, Checkpointed)}
    for name, segment in checkpointed.items():
        calls[name] = called = []

        def forward(*args, own=segment.forward.forward, called=called, **kwargs):
            called.append(1)
            return own(*args, **kwargs)

        segment.forward.forward = forward
    return calls


def check(monkeypatch, folder, trainer, base, images):
    """Cache `images`, and compare at a LoRA's first batch. base: the folder of a pipeline."""
    flags = [f"--pretrained_model_name_or_path={base}"]
    data = [f"--train_data_dir={folder / images}", "--resolution=64", "--dataloader_num_workers=0"]
    cache = f"{base}-{images}"
    precompute(*flags, *data, f"--output_dir={cache}")
    flags += [f"--latents_dir={cache}", f"--output_dir={cache}-out", "--report_to=none"]
    flags += ["--rank=2", "--lora_layers=all", "--lora_dropout=0.3", "--caption_dropout=0"]
    with monkeypatch.context() as m:
        m.setattr(trainer.module, "train_step", compare)
        with pytest.raises(Compared):
            trainer(*flags, "--train_batch_size=2", "--max_train_steps=1")


# Chroma: diffusers' own switch leaves out its mask. Z-Image: lists of tensors. Qwen-Image: named
# arguments, tuples. Stable Diffusion: ResNets.
@pytest.mark.parametrize(
    "name", ["chroma", "z_image", "qwen_image", "sd", pytest.param("sdxl", marks=pytest.mark.long)]
)
def test_loss_and_gradients_have_the_same_bits(tmp_path, monkeypatch, name):
    make_captioned(tmp_path / "images", 2, ["a digit zero", "one"])
    base = (U_NETS | tiny_pipelines.MAKE)[name](tmp_path / "base")
    check(monkeypatch, tmp_path, TEXT if name in U_NETS else FLOW, base, "images")
    assert attentions[-1] > 0


@pytest.mark.long
def test_loss_and_gradients_of_all_pipelines_have_the_same_bits(tmp_path, monkeypatch):
    """All that docs/models.md lists as trained, and as edits."""
    make_captioned(tmp_path / "images", 2, ["a digit zero", "one"])
    make_pairs(tmp_path / "pairs", 2)
    tiny_pipelines.make_small(monkeypatch)
    listed = {
        (name, "pairs" if title == EDITS else "images")
        for name, titles in read_lists(PAGE.read_text()).items()
        for title in titles
        if title == EDITS or title.startswith("Trained")
    }
    tried, kinds = set(), list_classes()
    groups = {among: getattr(tiny_pipelines, among) for among in ("MAKE", *OTHERS)}
    for among, made in groups.items():
        for name, make in made.items():
            base = make(tmp_path / f"{among}-{name}")
            index = json.loads(next(base.glob("*index.json")).read_text())
            for images in ("images", "pairs"):
                kind = index.get("_blocks_class_name") or index["_class_name"]
                case = kinds[kind].__name__, images
                if case in listed - tried:
                    check(monkeypatch, tmp_path, FLOW, base, images)
                    tried.add(case)
    assert tried == listed and len(tried) > 50


class Block(torch.nn.Module):
    """It takes all kinds of arguments."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, hidden, /, pair, *, mask=None, scale=1.0, **others):
        given.append((pair, mask, scale, others))
        hidden = torch.nn.functional.dropout(self.layer(hidden + pair[0] + others["more"]["deep"]))
        return {"hidden": hidden, "pair": (pair[1], None)}


class Blocks(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList([Block(), Block()])

    def forward(self, hidden):
        pair = hidden.detach() + 1, "text"
        for block in self.blocks:
            hidden = block(hidden, pair, mask=None, more={"deep": hidden}, function=len)["hidden"]
        return hidden


given = []  # arguments of `Block`


def test_arguments_reach_a_block_unchanged():
    torch.manual_seed(0)
    model = Blocks()
    other = copy.deepcopy(model)
    checkpoint_gradients({"model": other}, ALL)
    assert len(list_checkpointed(other)) == 2 and not list_checkpointed(model)
    copied = copy.deepcopy(other)  # which calls its own blocks
    with torch.no_grad():
        for weight in other.parameters():
            weight += 1
    found = []
    for each in (model, copied):
        given.clear()
        torch.manual_seed(1)
        hidden = torch.ones(2, 4, requires_grad=True)
        each(hidden).square().sum().backward()
        (_, text), mask, scale, others = given[0]
        assert (text, mask, scale, others["function"]) == ("text", None, 1.0, len)
        assert len(given) == (2 if each is model else 4)
        found.append([hidden.grad, *(weight.grad for weight in each.parameters())])
    assert all(map(torch.equal, *found))
    given.clear()
    with torch.no_grad():
        copied(torch.ones(2, 4))
    assert len(given) == 2
    checkpoint_gradients({"model": copied}, ALL)  # nothing is checkpointed twice
    assert not isinstance(copied.blocks[0].forward.forward, Checkpointed)


@forked
def test_dropout_on_a_device_is_repeated_also_if_all_arguments_are_named():
    """torch keeps the random state of the devices that it finds among positional arguments."""
    kept = []

    def note(*args):
        devices = {x.device for x in torch.utils._pytree.tree_leaves(args) if torch.is_tensor(x)}
        kept.append(devices)
        return get(*args)

    get = torch.utils.checkpoint.get_device_states
    torch.utils.checkpoint.get_device_states = note
    torch.get_device_module(DEVICE)._initialized = True  # as torch.cuda is when it was used
    layer = torch.nn.Linear(3, 3).to(DEVICE)
    called = Checkpointed(lambda *, hidden: layer(hidden))
    called(hidden=torch.ones(1, 3, device=DEVICE)).sum().backward()
    assert kept == [{torch.device(DEVICE)}]


def test_a_u_net_is_checkpointed_by_its_resnets_and_attentions(tmp_path):
    base = make_models(tmp_path)
    unet = UNet2DConditionModel.from_pretrained(base, subfolder="unet")
    kinds = [type(each).__name__ for each in list_segments(unet).values()]
    assert {*kinds} == {"ResnetBlock2D", "Transformer2DModel"}
    assert "mid_block.resnets.0" in list_segments(unet)
    deep = {**unet.config, "transformer_layers_per_block": (2, 1)}  # as SDXL has
    names = list_segments(UNet2DConditionModel.from_config(deep))
    assert "down_blocks.0.attentions.0.transformer_blocks.1" in names
    assert "down_blocks.0.attentions.0" not in names
    options = {"block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4}
    down, up = ("DownBlock2D", "AttnDownBlock2D"), ("AttnUpBlock2D", "UpBlock2D")
    plain = UNet2DModel(down_block_types=down, up_block_types=up, **options)
    kinds = [type(each).__name__ for each in list_segments(plain).values()]
    assert kinds.count("Attention") == 4 and kinds.count("ResnetBlock2D") == 8


def test_a_sharded_model_has_the_same_segments(tmp_path):
    """torch gives each part that is gathered a class of its own."""
    unet = UNet2DConditionModel.from_config(
        {
            **UNet2DConditionModel.load_config(make_models(tmp_path), subfolder="unet"),
            "transformer_layers_per_block": 2,
        }
    )
    before = [*list_segments(unet)]
    for module in unet.modules():
        if type(module).__name__ in unet._no_split_modules:
            kind = type(module)
            module.__class__ = type(f"FSDP{kind.__name__}", (kind,), {})
    assert [*list_segments(unet)] == before


def test_a_model_without_blocks_ends_in_a_sentence():
    said = "^gradient checkpointing: Linear has no repeated blocks: leave the flag out$"
    for plan in (ALL, ONE):
        with pytest.raises(SystemExit, match=said):
            checkpoint_gradients({"unet": torch.nn.Linear(1, 1)}, plan)
    checkpoint_gradients({"unet": torch.nn.Linear(1, 1)}, Namespace(**NONE))
    # a small network beside a model, such as REPA's
    checkpoint_gradients({"projector": torch.nn.Linear(1, 1), "model": Blocks()}, ALL)


def test_keeping_attention_without_checkpointing_ends_in_a_sentence():
    flags = FLOW.flags("none", "--pretrained_model_name_or_path=none", "--latents_dir=none")
    flags += ["--keep_attention"]
    said = "--keep_attention does nothing without --gradient_checkpointing, --checkpoint_blocks or"
    assert said in FLOW.refused(*flags, status=2)
    for bad in ("0", "-1", "all"):
        assert "--checkpoint_blocks: " in FLOW.refused(f"--checkpoint_blocks={bad}", status=2)


def test_no_code_uses_the_switch_of_the_models():
    """Theirs may leave out arguments of a block."""
    switch = re.compile("enable_gradient_" + "checkpointing")
    folders = ("diffusion_training", "minimal", "patches", "examples", "benchmarks", "tests")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.*")]
    files += ROOT.glob("*.py")
    kinds = (".py", ".diff", ".ipynb")
    texts = {path: path.read_text() for path in files if path.suffix in kinds}
    assert len(texts) > 300
    assert not [path for path, text in texts.items() if switch.search(text)]
