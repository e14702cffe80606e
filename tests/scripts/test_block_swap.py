"""--blocks_to_swap: the same LoRA, bit for bit, with at most two blocks on the device."""

import argparse
import weakref

import pytest
import tiny_pipelines
import torch
from conftest import Script, make_captioned, make_models, make_sdxl, metrics
from diffusers import FluxTransformer2DModel, UNet2DConditionModel
from safetensors.torch import load_file
from test_edits import MAKE as MAKE_EDITING
from test_edits import SIDE, make_pairs

from diffusion_training.blocks import checkpoint_gradients, list_checkpointed, list_segments
from diffusion_training.models import copy_trained, put_on_device, start_average
from diffusion_training.training.lora import block_swap, quantization
from diffusion_training.training.lora.block_swap import BlockSwap
from diffusion_training.training.lora.lora import add_lora, list_lora_b
from diffusion_training.training.step import denoiser
from diffusion_training.training.step.costs import count_memory

pytestmark = [
    pytest.mark.usefixtures("without_figures"),
    # of NumPy, at a tensor that ERNIE-Image's pipeline gives its scheduler
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]
precompute = Script("precompute_latents")
FLOW, TEXT = Script("train_flow"), Script("train_text_to_image")
FILE = "pytorch_lora_weights.safetensors"
CPU = torch.device("cpu")
OWN = {"sd": make_models, "sdxl": make_sdxl}
BLOCKS = {name: make for name, make in tiny_pipelines.BLOCKS.items() if "distilled" not in name}
EDITS = {f"edits of {name}": make for name, make in MAKE_EDITING.items()}
MAKE = OWN | tiny_pipelines.MAKE | BLOCKS | EDITS  # a distilled one is refused
SIDES = tiny_pipelines.SIDES
KINDS = {"float32": [], "bf16": ["--mixed_precision=bf16"]}
KINDS["int8"] = ["--mixed_precision=bf16", "--base_precision=int8"]


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """make(name) -> (the trainer, its flags for a base and its cache)."""
    made = {}

    def make(name):
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            base = [f"--pretrained_model_name_or_path={MAKE[name](folder / 'base')}"]
            if name in EDITS:
                make_pairs(folder / "images", 7)
            else:
                make_captioned(folder / "images", 7)
            side = SIDE if name in EDITS else SIDES.get(name, 16)
            data = [f"--train_data_dir={folder / 'images'}", f"--resolution={side}"]
            data += ["--center_crop", "--dataloader_num_workers=0"]
            precompute(*base, *data, f"--output_dir={folder / 'cache'}")
            trainer = TEXT if name in ("sd", "sdxl") else FLOW
            made[name] = trainer, [*base, f"--latents_dir={folder / 'cache'}"]
        return made[name]

    return make


def list_flags(trainer, base, *more):
    flags = trainer.flags("none", *base, "--rank=2", "--train_batch_size=2", "--learning_rate=0.01")
    flags += ["--max_train_steps=6", "--checkpointing_steps=3", "--num_validation_images=1"]
    return [*flags, "--caption_dropout=0.3", *more]


@pytest.fixture(autouse=True)
def aligned(monkeypatch):
    """Weights begin at multiples of 64 bytes, as on a GPU, and as copies do.

    A CPU rounds some products by where their numbers begin, and a loaded file may lie anywhere.
    """

    def load(*args, load_base=denoiser.load_base, **options):
        model, base_hash = load_base(*args, **options)
        for weight in model.parameters():
            weight.data = weight.data.clone()
        return model, base_hash

    monkeypatch.setattr(denoiser, "load_base", load)


@pytest.fixture
def most(monkeypatch):
    """The numbers of blocks whose copies are alive whenever one more is copied."""
    alive, found = [], []
    copy = BlockSwap.copy

    def watch(self, number):
        copies = copy(self, number)
        alive.append([weakref.ref(each) for each in copies.values()])
        alive[:] = [refs for refs in alive if any(ref() is not None for ref in refs)]
        found.append(len(alive))
        assert len(alive) <= 2, f"{len(alive)} blocks are on the device"
        return copies

    monkeypatch.setattr(BlockSwap, "copy", watch)
    return found


def list_cases():
    quick = {("flux", "int8", 1), ("sd", "float32", 2)}
    for name in MAKE:
        for kind in KINDS:
            # whose norms need a GPU for that
            if name in ("hunyuan_image", "lumina") and kind != "float32":
                continue
            for processes in (1, 2):
                case = name, kind, processes
                yield pytest.param(*case, marks=[] if case in quick else pytest.mark.long)


@pytest.mark.parametrize("name, kind, num_processes", [*list_cases()])
def test_a_killed_run_with_swapped_blocks_ends_with_the_same_lora(
    tmp_path, monkeypatch, bases, most, name, kind, num_processes
):
    monkeypatch.setattr(quantization, "BLOCK", 8)  # so that layers of tiny models are quantized
    tiny_pipelines.make_small(monkeypatch)  # references of edits
    trainer, base = bases(name)
    flags = list_flags(trainer, base, *KINDS[kind], "--lora_layers=all", "--lora_dropout=0.1")
    flags += ["--caption_dropout=0"] * (name in EDITS)
    trainer.fork(*flags, f"--output_dir={tmp_path / 'plain'}", num_processes=num_processes)
    flags += ["--blocks_to_swap=all", "--resume_from_checkpoint=latest"]
    said = trainer.kill_after_checkpoint(tmp_path / "swapped", *flags, num_processes=num_processes)
    assert "Block swap: all of" in said
    trainer.fork(*flags, f"--output_dir={tmp_path / 'swapped'}", num_processes=num_processes)
    for path in (FILE, "checkpoint-6/optimizer.bin"):
        one, other = (tmp_path / folder / path for folder in ("plain", "swapped"))
        assert one.read_bytes() == other.read_bytes(), path
    assert any(value.any() for key, value in load_file(tmp_path / "plain" / FILE).items())


@pytest.mark.parametrize("name, more", [
    pytest.param(
        "flux", ["--use_dora", "--preserve_prior", "--class_prompt", "a digit"],
        marks=pytest.mark.long,
    ),
    pytest.param(
        "sd",
        ["--preserve_prior", "--class_prompt", "a digit", "--gradient_accumulation_steps=2",
         "--lora_type=lokr", "--lokr_factor=2", "--lora_layers=all", "--gradient_checkpointing"],
        marks=pytest.mark.long,
    ),
])  # fmt: skip
def test_all_that_calls_the_model_is_the_same_with_swapped_blocks(
    tmp_path, bases, most, name, more
):
    """Samples, held-out loss, copies of checkpoints, and a smaller number of blocks."""
    trainer, base = bases(name)
    flags = list_flags(trainer, base, *more, "--holdout=2", "--validation_prompts=a digit one")
    runs = {"plain": [], "all": ["--blocks_to_swap=99"], "one": ["--blocks_to_swap=1"]}
    for run, swap in runs.items():
        copies = [f"--checkpoints_to=memory://{name}"] * (run == "all")
        trainer(*flags, f"--output_dir={tmp_path / run}", *swap, *copies)
    numbers = [
        [
            {key: record[key] for key in record if "loss" in key}
            for record in metrics(tmp_path / run)
        ]
        for run in runs
    ]
    assert numbers[0] == numbers[1] == numbers[2]
    assert {"held_out_loss", "held_out_loss_ema", "prior_loss"} <= set().union(*numbers[0])
    for path in (FILE, "samples/step-0000000.png", "samples/step-0000006.png"):
        one, *others = [(tmp_path / run / path).read_bytes() for run in runs]
        assert others == [one, one], path
    # once each pass is known, the next block has been copied when it is called
    assert max(most) == 2


def make_model(number, is_shared=False):
    """A FLUX transformer of four blocks with a LoRA, and the same one with swapped blocks."""
    torch.manual_seed(0)
    model = FluxTransformer2DModel(
        in_channels=16,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 6, 6),
    )
    if is_shared:
        one, other = model.single_transformer_blocks
        other.proj_out.weight = one.proj_out.weight
        model.transformer_blocks[0].norm1.linear.weight = model.transformer_blocks[
            1
        ].norm1.linear.weight
        model.time_text_embed.text_embedder.linear_1.bias = one.proj_out.bias
        model.proj_out.bias = one.attn.norm_k.weight
    flags = {"rank": 4, "lora_alpha": None, "lora_layers": "attention", "lora_dropout": 0.0}
    args = argparse.Namespace(**flags, use_dora=False, lora_type="lora")
    add_lora(model, ["to_q", "to_k", "to_v"], "", torch.float32, args)
    with torch.no_grad():
        for weight in list_lora_b({"transformer": model}):
            weight.normal_(std=0.3)
    swapped = copy_trained(model)
    BlockSwap(swapped, number, CPU)
    return model, swapped


def call(model):
    torch.manual_seed(1)
    text, image = torch.randn(2, 5, 32), torch.randn(2, 9, 16)
    places = torch.zeros(9, 3), torch.zeros(5, 3)
    return model(
        image, text, torch.randn(2, 32), torch.tensor([0.3, 0.6]), img_ids=places[0],
        txt_ids=places[1],
    ).sample  # fmt: skip


@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("number", ["all", 3, 1])
def test_gradients_are_the_same_also_of_shared_weights(most, number, is_shared):
    models = make_model(number, is_shared)
    for _ in range(3):
        for model in models:
            call(model).square().sum().backward()
    found = [
        {name: weight.grad for name, weight in model.named_parameters() if weight.requires_grad}
        for model in models
    ]
    assert found[0].keys() == found[1].keys() and all(x.any() for x in found[0].values())
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    # The first steps learn the order. Then each pass copies each block, but the one at its turn.
    swapped = 4 if number == "all" else number
    assert len(most) == 2 * swapped + (2 * swapped - 1) + (2 * swapped - 2)
    assert max(most) == min(2, swapped)


def test_weights_of_other_modules_and_small_ones_stay_on_the_device():
    model, swapped = make_model("all", is_shared=True)
    ids = {id(weight) for weight in swapped.block_swap.list_weights()}
    assert id(swapped.time_text_embed.text_embedder.linear_1.bias) not in ids
    assert id(swapped.proj_out.bias) not in ids  # the model lists it as the block's
    assert id(next(swapped.parameters())) not in ids
    assert id(swapped.single_transformer_blocks[0].proj_out.weight) in ids
    assert not any(weight.requires_grad for weight in swapped.block_swap.list_weights())
    before = sum(weight.nbytes for weight in swapped.parameters())
    with swapped.block_swap.hiding(swapped):
        on_device = sum(weight.nbytes for weight in swapped.parameters())
    assert 0 < on_device < 0.5 * before
    assert sum(weight.nbytes for weight in swapped.parameters()) == before
    sizes = [
        count_memory({"one": each}, start_average({"one": each}), [], 1, "adamw")
        for each in (model, swapped)
    ]
    assert sizes[1].pop("weights") == on_device < sizes[0].pop("weights") == before
    blocks = swapped.block_swap.list_sizes()
    assert sizes[0].pop("two swapped blocks") == 0
    assert sizes[1].pop("two swapped blocks") == sum(sorted(blocks)[-2:])
    assert sizes[0] == sizes[1]


def test_an_average_calls_its_own_blocks():
    _, swapped = make_model("all")
    average = start_average({"one": swapped})["one"]
    before = call(average)
    with torch.no_grad():
        for weight in swapped.parameters():
            if weight.requires_grad:
                weight.zero_()
    assert torch.equal(call(average), before) and not torch.equal(call(swapped), before)
    assert put_on_device(average, CPU) is average


def test_all_blocks_of_a_u_net_are_swapped(bases):
    _, base = bases("sd")
    unet = UNet2DConditionModel.from_pretrained(base[0].partition("=")[2], subfolder="unet")
    blocks = list_segments(unet)
    names = {type(block).__name__ for block in blocks.values()}
    assert names == {"Transformer2DModel", "ResnetBlock2D"}
    inside = sum(weight.numel() for block in blocks.values() for weight in block.parameters())
    assert inside > 0.6 * sum(weight.numel() for weight in unet.parameters())


def test_bad_numbers_of_blocks_and_too_little_memory_end_in_a_sentence(
    tmp_path, monkeypatch, bases, capsys
):
    trainer, base = bases("flux")
    out = tmp_path / "out"
    flags = [*list_flags(trainer, base), f"--output_dir={out}"]
    swap = [*flags, "--blocks_to_swap=all"]
    whole = [flag for flag in swap if flag != "--rank=2"]
    for argv, sentence in (
        ([*flags, "--blocks_to_swap=0"], "argument --blocks_to_swap: 0 is not between 1 and"),
        ([*flags, "--blocks_to_swap=-1"], "argument --blocks_to_swap: -1 is not between 1 and"),
        ([*flags, "--blocks_to_swap=most"], "argument --blocks_to_swap: invalid int value"),
        (whole, "--blocks_to_swap does nothing without --rank"),
        ([*swap, "--base_precision=nf4"], "--blocks_to_swap can't be combined with"),
        ([*swap, "--compile"], "--blocks_to_swap can't be compiled: leave --compile out"),
    ):
        assert sentence in trainer.refused(*argv, status=2)
    with monkeypatch.context() as m:
        m.setattr(block_swap, "measure_free", lambda: 10**5)
        m.setattr(denoiser, "load_base", None)  # before anything is loaded
        said = trainer.refused(*swap)
        assert "in the host's memory, 0.001 GB, and only 0.0001 GB are free" in said
        m.setenv("LOCAL_WORLD_SIZE", "2")
        assert "0.001 GB in each of 2 processes" in trainer.refused(*swap)
    with monkeypatch.context() as m:
        m.setattr(block_swap, "list_segments", lambda model: {})
        said = trainer.refused(*swap)
        assert "FluxTransformer2DModel has no repeated blocks: leave it out" in said
    with monkeypatch.context() as m:
        m.setenv("ACCELERATE_DYNAMO_BACKEND", "EAGER")
        assert "--blocks_to_swap can't be compiled: add --no-compile" in trainer.refused(*swap)
    assert not [*out.glob("*")]


def test_a_run_that_does_not_fit_names_the_number_of_blocks(bases, monkeypatch, capsys):
    _, base = bases("flux")
    capsys.readouterr()  # of the cache, if no other test has made it
    source = base[0].partition("=")[2]
    found = argparse.Namespace()
    gpu = argparse.Namespace(get_device_properties=lambda device: found)
    monkeypatch.setattr(block_swap, "is_gpu", lambda device: True)
    monkeypatch.setattr(torch, "get_device_module", lambda device: gpu)
    launch = argparse.Namespace(
        device=CPU, dtype=torch.bfloat16, accelerator=argparse.Namespace(print=print)
    )
    said = []
    for found.total_memory in (10**6, 10**5):
        block_swap.check_memory(
            FluxTransformer2DModel, source, launch, None, None, subfolder="transformer"
        )
        said.append(capsys.readouterr().out)
    assert said[0] == ""
    assert "too much for this GPU" in said[1] and "with --blocks_to_swap 2" in said[1]


@pytest.mark.parametrize("number", [1, 3, None])
def test_swapped_blocks_stay_checkpointed(number):
    """The others as --checkpoint_blocks says."""
    plain, swapped = make_model("all" if number is None else 2)
    plan = {"gradient_checkpointing": False, "checkpoint_blocks": number, "keep_attention": True}
    checkpoint_gradients({"transformer": swapped}, argparse.Namespace(**plan))
    assert len(list_checkpointed(swapped)) == {1: 2, 3: 3, None: 4}[number]
    for _ in range(3):  # the first rounds learn the order
        for model in (plain, swapped):
            call(model).square().sum().backward()
    found = [
        {name: weight.grad for name, weight in model.named_parameters() if weight.requires_grad}
        for model in (plain, swapped)
    ]
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


@pytest.mark.long
def test_checkpointing_inside_compiled_blocks_changes_no_gradient():
    """With a backend that computes as without compiling."""
    found = []
    flags = {"gradient_checkpointing": True, "checkpoint_blocks": None}
    for keeps in (None, False, True):
        model, _ = make_model(1)
        if keeps is not None:
            plan = argparse.Namespace(**flags, keep_attention=keeps)
            checkpoint_gradients({"transformer": model}, plan)
            for block in list_segments(model).values():
                block.compile(backend="aot_eager", fullgraph=True)
        call(model).square().sum().backward()
        found.append([weight.grad for weight in model.parameters() if weight.requires_grad])
        torch._dynamo.reset()
    assert all(map(torch.equal, found[0], found[1])) and all(map(torch.equal, found[0], found[2]))


LORA = ("--lora_layers=all", "--lora_dropout=0.1")
WHOLE = ("--train_batch_size=2", "--learning_rate=0.01", "--max_train_steps=6")
FULL = (*WHOLE, *KINDS["bf16"], "--full_bf16", "--optimizer=adafactor", "--no-use_ema")
FULL += ("--max_grad_norm=0",)


@pytest.mark.long
@pytest.mark.parametrize("name, more, num_processes", [
    ("sd", ["--lora_layers=all", "--lora_type=lokr", "--lokr_factor=2"], 1),
    ("sdxl", LORA, 2),
    ("z_image", [*LORA, "--use_dora", "--preserve_prior", "--class_prompt", "a digit"], 1),
    ("flux", [*LORA, "--blocks_to_swap=1"], 1),
    ("edits of kontext", [*LORA, "--blocks_to_swap=all", "--caption_dropout=0"], 1),
    ("klein", FULL, 1),
    ("qwen_image", [*WHOLE, "--shard"], 2),
])  # fmt: skip
def test_a_run_killed_and_resumed_with_another_plan_ends_with_the_same_bits(
    tmp_path, monkeypatch, bases, name, more, num_processes
):
    tiny_pipelines.make_small(monkeypatch)  # references of edits
    trainer, base = bases(name)
    is_lora = more[0] in LORA
    flags = [*base, "--checkpointing_steps=3"]
    flags = list_flags(trainer, base, *more) if is_lora else trainer.flags("none", *flags, *more)
    trainer.fork(*flags, f"--output_dir={tmp_path / 'plain'}", num_processes=num_processes)
    flags += ["--resume_from_checkpoint=latest"]
    one = [*flags, "--checkpoint_blocks=1", "--keep_attention"]
    trainer.kill_after_checkpoint(tmp_path / "other", *one, num_processes=num_processes)
    other = [*flags, f"--output_dir={tmp_path / 'other'}", "--gradient_checkpointing"]
    said = trainer.fork(*other, num_processes=num_processes)
    assert "gradient_checkpointing False -> True, checkpoint_blocks 1 -> None" in said
    files = [FILE] if is_lora else ["transformer/diffusion_pytorch_model.safetensors"]
    for path in (*files, "checkpoint-6/optimizer.bin"):
        one, other = (tmp_path / folder / path for folder in ("plain", "other"))
        assert one.read_bytes() == other.read_bytes(), path
