"""minimal/train_lora.py and train_lora_sdxl.py: the LoRA of their big script, to the same bits.

These are train_flow.py and train_text_to_image.py, with --rank --cache_latents.
"""

import ast
import json
import re
import shutil
import time
from types import SimpleNamespace

import diffusers
import numpy as np
import pytest
import torch
from conftest import Script, finish, kill, make_models, make_sdxl, start, wait_until
from diffusers import DiffusionPipeline
from PIL import Image
from safetensors.torch import load_file
from test_minimal import PATHS, flatten_moments, run_twin, train
from tiny_pipelines import MAKE as MAKE_FLOW

from diffusion_training.data.encoders import load_encoders
from diffusion_training.families.lora_layers import LAYERS
from diffusion_training.families.opening import open_base
from diffusion_training.families.recording import record_family
from diffusion_training.training.lora.lora_files import (
    KOHYA_FILE,
    LORA_FILE,
    PEFT_FILE,
    PEFT_PREFIX,
)

pytestmark = pytest.mark.usefixtures("without_figures", "forked")
FLOW, SDXL = "train_lora", "train_lora_sdxl"
BIG = {FLOW: Script("train_flow"), SDXL: Script("train_text_to_image")}
MODEL = {FLOW: "transformer", SDXL: "unet"}
# the tiny pipelines of the models of FLOW, and for each its class
FAMILIES = {
    "z_image": "ZImage",
    "flux": "Flux",
    "flux_dev": "Flux",
    "klein": "Flux2Klein",
    "qwen_image": "QwenImage",
    "sd3": "StableDiffusion3",
}
UNETS = "sd", "sdxl"  # those of SDXL


def make_sd(folder):
    path = make_models(folder.parent) / "model_index.json"
    parts = {"unet": "UNet2DConditionModel", "scheduler": "DDIMScheduler"}
    parts = {name: ["diffusers", kind] for name, kind in parts.items()}
    path.write_text(json.dumps(json.loads(path.read_text()) | parts))


MAKE = MAKE_FLOW | {
    "sd": make_sd,
    "sdxl": lambda folder: make_sdxl(folder.parent / "of-sdxl").rename(folder),
}
WORDS = "a handwritten digit zero one two three".split()


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """7 photographs of noise: PNG and JPEG, upright, wide, transparent, with captions beside them.

    The captions have several lengths. 7 is 1 more than 2 steps of 3 images, or 1 of 6.
    """
    folder = tmp_path_factory.mktemp("lora")
    (folder / "photos").mkdir()
    rng = np.random.default_rng(0)
    for i in range(7):
        channels = [4] if i == 5 else [3]
        pixels = rng.integers(0, 256, [66 + i % 3, 64 + 4 * (i % 2), *channels], np.uint8)
        # `datasets` would take the word in a name for a split
        name = f"{i:02}{' train' * (i == 4)}.{'png' if i % 2 else 'jpg'}"
        path = folder / "photos" / name
        Image.fromarray(pixels).save(path)
        path.with_suffix(".txt").write_text(" ".join(WORDS[: 1 + i]) + "\n")
    return folder


def make_base(inputs, family, dtype=None):
    """The folder of a tiny pipeline; dtype: of its files, if it is not float32."""
    base = inputs / family
    if not base.exists():
        MAKE[family](base)
    if dtype is None:
        return base
    other = inputs / f"{family}-{dtype}"
    if not other.exists():
        DiffusionPipeline.from_pretrained(base).to(dtype).save_pretrained(other)
    return other


def name_twin(family):
    return SDXL if family in UNETS else FLOW


def list_flags(inputs, base, *more):
    return [
        f"--train_data_dir={inputs / 'photos'}", f"--pretrained_model_name_or_path={base}",
        "--resolution=64", "--rank=4", "--learning_rate=1e-2", "--lr_warmup_steps=2",
        "--max_train_steps=5", "--checkpointing_steps=2", "--logging_steps=2",
        "--report_to=none", "--caption_dropout=0.4", *more,
    ]  # fmt: skip


SHOWN = ["--validation_prompts", "a digit", "a one two", "--num_validation_images=1",
         "--num_inference_steps=1", "--validation_steps=3"]  # fmt: skip


def train_big(name, inputs, folder, flags, num_processes=1):
    cached = ["--cache_latents", f"--cache_dir={inputs / 'cached'}"]
    if num_processes > 1:  # one process makes the cache
        train(run_big, name, folder.with_name("alone"), [*flags, *cached, "--max_train_steps=1"])
    train(run_big, name, folder, [*flags, *cached], num_processes)


def run_big(name, *flags):
    BIG[name](*flags)


def saved_by_big(name, folder, step):
    """{name: tensor} of weights and averages in a checkpoint, and the moments in their order."""
    tensors = {}
    for of, part in (("weights", MODEL[name]), ("ema", f"{MODEL[name]}_ema")):
        for key, value in load_file(folder / f"checkpoint-{step}/{part}/{PEFT_FILE}").items():
            tensors[f"{of} {key.removeprefix(PEFT_PREFIX)}"] = value
    optimizer = torch.load(folder / f"checkpoint-{step}/optimizer.bin", weights_only=True)
    return tensors | number_moments(optimizer)


def read_state(name, folder, step):
    return torch.load(folder / f"checkpoint-{step}/minimal_{name}.pt", weights_only=True)


def saved_by_twin(name, folder, step):
    state = read_state(name, folder, step)
    tensors = {}
    for of in ("weights", "ema"):
        for key, value in state[of].items():
            short = key.removeprefix(f"{MODEL[name]}.").replace(".default.", ".")
            tensors[f"{of} {short}"] = value
    return tensors | number_moments(state["optimizer"])


def number_moments(optimizer):
    """The moments. Weights without a gradient, which the big script leaves out, have none."""
    known = enumerate(sorted(optimizer["state"]))
    return flatten_moments({"state": {new: optimizer["state"][old] for new, old in known}})


def assert_same_bits(name, big, twin, steps=(2, 4, 5)):
    for step in steps:
        expected, found = saved_by_big(name, big, step), saved_by_twin(name, twin, step)
        assert expected.keys() == found.keys() and len(expected) > 60
        different = [key for key in expected if not torch.equal(expected[key], found[key])]
        assert not different, f"{len(different)} of {len(expected)} differ, such as {different[0]}"
    last = twin / f"checkpoint-{steps[-1]}"
    for file in (LORA_FILE, KOHYA_FILE) if name == SDXL else (LORA_FILE,):
        expected, found, kept = (load_file(folder / file) for folder in (big, twin, last))
        assert expected.keys() == found.keys() == kept.keys()
        assert all(torch.equal(expected[key], found[key]) for key in expected)
        assert all(torch.equal(kept[key], found[key]) for key in found)


ONE = (1, ["--train_batch_size=3"])
# 5 steps of 2 x 2 x 2 images at most: of an epoch's 7, one process has 3
TWO = (2, ["--train_batch_size=2", "--gradient_accumulation_steps=2"])
BF16 = ["--mixed_precision=bf16"]
long, ci = pytest.mark.long, pytest.mark.ci


@pytest.mark.parametrize(
    "family, batches, more",
    [
        ("z_image", ONE, []),
        ("sdxl", ONE, []),
        pytest.param("sdxl", TWO, ["--snr_gamma=5"], marks=ci),
        pytest.param("sdxl", ONE, [*BF16, "--center_crop", "--seed=3"], marks=long),
        pytest.param("sd", ONE, ["--prediction_type=v_prediction", "--snr_gamma=5"], marks=long),
        pytest.param("sd", TWO, [*BF16, "--lr_scheduler=cosine"], marks=long),
        pytest.param("qwen_image", TWO, [], marks=ci),
        pytest.param("flux_dev", ONE, BF16, marks=ci),
        *(pytest.param(each, ONE, [], marks=long) for each in FAMILIES if each != "z_image"),
        *(pytest.param(each, ONE, BF16, marks=long) for each in FAMILIES if each != "flux_dev"),
        *(pytest.param(each, TWO, [], marks=long) for each in FAMILIES if each != "qwen_image"),
        pytest.param(
            "klein", ONE, ["--shift=2", "--center_crop", "--lr_scheduler=cosine"], marks=long
        ),
        pytest.param("sd3", TWO, [*BF16, "--seed=3"], marks=long),
    ],
)
def test_minimal_lora_trains_to_the_same_bits_as_the_big_script(
    tmp_path, inputs, family, batches, more
):
    """In bf16 too, for Stable Diffusion 3 from files in bf16: it keeps a buffer as it is stored."""
    num_processes, sizes = batches
    name = name_twin(family)
    stored = torch.bfloat16 if family == "sd3" and "--mixed_precision=bf16" in more else None
    flags = list_flags(inputs, make_base(inputs, family, stored), *sizes, *more)
    train_big(name, inputs, tmp_path / "big", flags, num_processes)
    train(run_twin, name, tmp_path / "twin", [*flags, *SHOWN], num_processes)
    assert_same_bits(name, tmp_path / "big", tmp_path / "twin")
    pictures = sorted((tmp_path / "twin/samples").iterdir())
    assert [path.name for path in pictures] == [f"step-{n:07}.png" for n in (0, 3, 5)]
    first, *_, last = [np.asarray(Image.open(path)) for path in pictures]
    assert first.shape == (128, 64, 3)
    assert family == "qwen_image" or (first != last).any()  # its tiny samples are not finite
    assert_diffusers_has_the_average(name, tmp_path / "twin", make_base(inputs, family))


def assert_diffusers_has_the_average(name, folder, base):
    """diffusers adds B @ A of the average to each adapted layer, at strength 1."""
    pipeline = DiffusionPipeline.from_pretrained(base)
    model = getattr(pipeline, MODEL[name])
    before = {key: x.clone() for key, x in model.state_dict().items()}
    pipeline.load_lora_weights(folder)
    pipeline.fuse_lora()
    pipeline.unload_lora_weights()
    ema = read_state(name, folder, 5)["ema"]
    layers = {key.rpartition(".lora_")[0] for key in ema}
    moved = 0.0
    for layer in layers:
        a, b = (ema[f"{layer}.lora_{part}.default.weight"] for part in "AB")
        key = f"{layer.removeprefix(f'{MODEL[name]}.')}.weight"
        change = model.state_dict()[key] - before[key]
        torch.testing.assert_close(change, b @ a, rtol=0, atol=1e-3)
        moved = max(moved, float((b @ a).abs().max()))
    assert moved > 0.01


@pytest.mark.parametrize(
    "family, num_processes, kills",
    [
        pytest.param("sdxl", 1, 2, marks=ci),
        pytest.param("z_image", 1, 2, marks=ci),
        pytest.param("sdxl", 2, 6, marks=long),
        pytest.param("z_image", 2, 6, marks=long),
    ],
)
def test_minimal_lora_killed_and_resumed_ends_with_the_same_bits(
    tmp_path, inputs, family, num_processes, kills
):
    """Killed by SIGKILL while it encodes, and some time after new checkpoints."""
    _, sizes = ONE
    name = name_twin(family)
    steps = 4 * kills
    flags = list_flags(inputs, make_base(inputs, family), *sizes, f"--max_train_steps={steps}")
    train_big(name, inputs, tmp_path / "big", flags, num_processes)
    twin = tmp_path / "twin"
    argv = [*flags, f"--output_dir={twin}"]
    text = PATHS[name].read_text()
    right = "    for start in range(0, len(files), 4):"
    assert text.count(right) == 1
    stuck = text.replace(right, f"    time = __import__('time'); time.sleep(60)\n{right}")
    pids = start(lambda: run_twin(name, *argv, text=stuck), num_processes, tmp_path / "log")
    wait_until(twin.is_dir)
    kill(pids)
    for moment in np.random.default_rng(0).uniform(0, 0.1, kills):
        before = set(twin.glob("checkpoint-*"))
        pids = start(lambda: run_twin(name, *argv), num_processes, tmp_path / "log")
        wait_until(
            lambda before=before: (
                (twin / LORA_FILE).exists() or set(twin.glob("checkpoint-*")) - before
            )
        )
        time.sleep(moment)
        kill(pids)
    train(run_twin, name, twin, flags, num_processes)
    assert "Resuming from" in twin.with_suffix(".log").read_text()
    assert not list(twin.glob(".unfinished-*")) and not list(twin.glob("*.tmp"))
    assert_same_bits(name, tmp_path / "big", twin, [steps])


@pytest.mark.ci
@pytest.mark.parametrize("family, blocks", [("sd3", 2), ("sdxl", 12)])
def test_minimal_lora_with_gradient_checkpointing_has_the_same_bits(
    tmp_path, inputs, family, blocks
):
    """Each block is computed twice in a step, and its forward pass keeps its inputs alone."""
    name = name_twin(family)
    flags = list_flags(inputs, make_base(inputs, family), *ONE[1], "--max_train_steps=2")
    train(run_twin, name, tmp_path / "plain", flags)
    text = PATHS[name].read_text()
    right = "functools.partial(checkpoint, block.forward"
    assert text.count(right) == 1
    counted = "functools.partial(lambda *args, **more: print('kept') or checkpoint(*args, **more), block.forward"  # noqa: E501
    train(
        run_twin, name, tmp_path / "less", [*flags, "--gradient_checkpointing"],
        text=text.replace(right, counted),
    )  # fmt: skip
    said = (tmp_path / "less.log").read_text()
    assert said.count("kept") == 2 * blocks  # in two steps
    plain, less = (saved_by_twin(name, tmp_path / each, 2) for each in ("plain", "less"))
    assert plain.keys() == less.keys()
    assert all(torch.equal(plain[key], less[key]) for key in plain)


# What a copy may change, as {line of both twins: what is put in its place}
CHANGES = {
    # other data: each image twice, with another brightness
    "\n\n# An image file -> uint8": "files *= 2\ncaptions *= 2\n\n\n# An image file -> uint8",
    "    height, width = pixels.shape[1:]\n": """    height, width = pixels.shape[1:]
    gain = np.random.default_rng(key_seed("gain", args.seed, row)).random()
    pixels = TF.adjust_brightness(pixels, 0.8 + 0.4 * gain)
""",
    # two groups, as in LoRA+ (arXiv:2402.12354): B learns faster
    "optimizer = torch.optim.AdamW(weights.values(), ": """\
b = [name for name in weights if ".lora_B." in name]
groups = [{"params": [weights[name] for name in weights if name not in b]}]
groups.append({"params": [weights[name] for name in b], "lr": 4 * args.learning_rate})
optimizer = torch.optim.AdamW(groups, """,
    # a further trained module, which has a loss of its own
    "weights = {\n": """trained["projection"] = torch.nn.LazyConv2d(1, 1)
trained["projection"](encoded_latents()[:1, 0].float())
weights = {
""",
    "            loss = (weight * loss).sum()\n": """\
            brightness = models["projection"](latents).float()
            loss = loss + (brightness - latents[:, :1]).square().mean(dim=(1, 2, 3))
            loss = (weight * loss).sum()
""",
}  # fmt: skip


@pytest.mark.parametrize(
    "family", [pytest.param("sdxl", marks=ci), pytest.param("z_image", marks=long)]
)
def test_changed_minimal_lora_trains_and_resumes_to_the_same_bits(tmp_path, inputs, family):
    """On two processes: augmented images, two groups of weights, a trained module."""
    name = name_twin(family)
    text = PATHS[name].read_text()
    own = {FLOW: 'torch.stack(encoded["latents"])', SDXL: 'encoded["rows"]["latents"]'}[name]
    for right, changed in CHANGES.items():
        assert text.count(right) == 1, right
        text = text.replace(right, changed.replace("encoded_latents()", own))
    flags = list_flags(inputs, make_base(inputs, family), "--train_batch_size=2", *SHOWN)
    for run, ends in {"whole": [4], "parts": [2, 4]}.items():
        for end in ends:
            more = [f"--max_train_steps={end}", "--gradient_accumulation_steps=2"]
            train(run_twin, name, tmp_path / run, [*flags, *more], 2, text=text)
    (encoded,) = (tmp_path / "parts").glob("encoded-*.pt")
    encoded = torch.load(encoded, weights_only=True)
    latents = encoded["latents"] if name == FLOW else encoded["rows"]["latents"]
    assert len(latents) == 14 and not torch.equal(latents[0], latents[7])
    whole, parts = (read_state(name, tmp_path / run, 4) for run in ("whole", "parts"))
    for of in ("weights", "ema"):
        assert whole[of].keys() == parts[of].keys()
        assert all(torch.equal(whole[of][key], parts[of][key]) for key in whole[of])
    moments = flatten_moments(whole["optimizer"]), flatten_moments(parts["optimizer"])
    assert all(torch.equal(moments[0][key], moments[1][key]) for key in moments[0])
    rates = [group["initial_lr"] for group in parts["optimizer"]["param_groups"]]
    assert rates == [1e-2, 4e-2]
    new = [key for key in whole["weights"] if key.startswith("projection.")]
    first = read_state(name, tmp_path / "whole", 2)["weights"]
    assert len(new) == 2 and all((first[key] != whole["weights"][key]).any() for key in new)
    for file in (tmp_path / "parts").glob("*.safetensors"):
        assert all("lora" in key for key in load_file(file))


# ---------------------------------------------------------------------- what stands in the twin


def read_classes():
    """The classes of the models of FLOW, {name: class}."""
    _, found = PATHS[FLOW].read_text().split("class StableDiffusion3:", 1)
    source, _ = found.split("\nindex = ", 1)
    known = {"args": SimpleNamespace(guidance_scale=4.0), "torch": torch, "diffusers": diffusers}
    exec("class StableDiffusion3:" + source, known)
    return {name: known[name] for name in FAMILIES.values()}


def parse_big(inputs, family):
    base = make_base(inputs, family)
    flags = [f"--train_data_dir={inputs}", f"--pretrained_model_name_or_path={base}", "--rank=4"]
    return BIG[name_twin(family)].module.parse_args(flags)


@pytest.mark.parametrize("family", [*FAMILIES, *UNETS])
def test_minimal_lora_has_the_layers_of_the_big_scripts_default(inputs, family):
    args = parse_big(inputs, family)
    twin = name_twin(family)
    model = getattr(DiffusionPipeline.from_pretrained(make_base(inputs, family)), MODEL[twin])
    chosen = open_base(args, record=record_family).family.choose_layers(
        model, LAYERS[type(model).__name__].default
    )
    if twin == SDXL:
        (layers,) = re.findall("^adapted = (.*?)  #", PATHS[SDXL].read_text(), re.M)
        layers = ast.literal_eval(layers)
        assert [*layers] == chosen
        return
    layers = read_classes()[FAMILIES[family]].layers
    own = [
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and name.endswith(layers)
    ]
    assert own == chosen and len(own) >= 8


def test_minimal_lora_scales_latents_as_a_cache_does(inputs):
    """With the same bits, for any statistics of a VAE's channels."""
    encoders = load_encoders(
        open_base(parse_big(inputs, "klein"), record=record_family), torch.float32
    )
    torch.manual_seed(0)
    for _ in range(8):
        encoders.vae.bn.running_mean.normal_()
        encoders.vae.bn.running_var.uniform_(0.1, 4)
        encoders.family.own_calls.layouts.clear()
        expected = encoders.family.describe_scale(encoders.vae)
        shift, factor = read_classes()["Flux2Klein"].scale(encoders.vae)
        assert torch.equal(shift.flatten(), torch.tensor(expected["shift_factor"]))
        assert torch.equal(factor.flatten(), torch.tensor(expected["scaling_factor"]))


@pytest.mark.parametrize(
    "family, other", [("sdxl", "z_image"), pytest.param("z_image", "sdxl", marks=ci)]
)
def test_minimal_lora_names_what_it_cannot_use(tmp_path, inputs, family, other):
    """An image without caption, a file that is no image, another model, a checkpoint of another."""
    twin = name_twin(family)
    shutil.copytree(inputs / "photos", tmp_path / "photos")
    flags = [*list_flags(inputs, make_base(inputs, family), *ONE[1], "--max_train_steps=1")]

    def fail(name, *more):
        log = tmp_path / f"{name}.log"
        argv = [*flags, f"--train_data_dir={tmp_path / 'photos'}", *more]
        argv.append(f"--output_dir={tmp_path / name}")
        assert finish(start(lambda: run_twin(twin, *argv), log=log)) == [1], log.read_text()
        assert "Traceback" not in log.read_text() and not list(tmp_path.glob(f"{name}/*"))
        return log.read_text()

    (tmp_path / "photos/02.txt").unlink()
    assert "02.jpg has no caption: write " in fail("a")
    (tmp_path / "photos/03.png").write_bytes(b"no image" * 100)
    said = fail("b", "--instance_prompt=a digit")
    assert f"{tmp_path / 'photos/03.png'} can't be read as an image: cannot identify" in said
    wrong = make_base(inputs, other)
    said = fail("c", f"--pretrained_model_name_or_path={wrong}", "--instance_prompt=a digit")
    assert {
        FLOW: "not one of StableDiffusion3Pipeline, ZImagePipeline, FluxPipeline, Flux2Klein",
        SDXL: "is a ZImagePipeline, not a StableDiffusion(XL)Pipeline",
    }[twin] in said
    train(run_twin, twin, tmp_path / "d", flags)
    argv = [*flags, "--rank=2", "--max_train_steps=2", f"--output_dir={tmp_path / 'd'}"]
    log = tmp_path / "d.log"
    assert finish(start(lambda: run_twin(twin, *argv), log=log)) == [1]
    assert "is of another LoRA: choose another --output_dir" in log.read_text()
