"""On an imitated GPU, no script mixes devices, and no steady step waits for the GPU.

See tests/fake_device.py. A step is steady after the first two, if it writes no record, checkpoint
or sample. The waits that remain are listed with each run, with a reason. In a steady step, matrices
are multiplied in the precision of --mixed_precision.

Not on this device: --compile, because torch.compile traces no wrapper tensors (benchmarks/gpu.py
has a row for it), and --shard, because fully_shard sets a parameter's data from another kind of
tensor (`Attempted to call variable.set_data(tensor)`).
"""

import importlib.util
import json
import os
import sys
from collections import Counter, defaultdict, namedtuple

import accelerate
import fake_device
import pytest
import tiny_pipelines
import torch
from conftest import (
    MODELS,
    ROOT,
    Script,
    finish,
    make_captioned,
    make_clip,
    make_dino,
    make_images,
    make_klein,
    make_models,
    make_prx,
    make_qwen_image,
    make_sdxl,
    make_unet_config,
    make_z_image,
    reset,
    start,
)
from diffusers import UNet2DConditionModel, UNet2DModel
from test_flow_families import MAKE, describe_data
from test_flow_families import make_images as make_masked

from diffusion_training.models import DTYPES
from diffusion_training.training.lora import quantization

NAMES = ("train_unconditional", "train_text_to_image", "train_flow", "precompute_latents")
SCRIPTS = {name: Script(name) for name in NAMES}
UNCONDITIONAL, TEXT, FLOW, PRECOMPUTE = NAMES
# is_always: whether it waits in each step, or only in some
Known = namedtuple("Known", "operator path function count reason is_always", defaults=[True])
# known: the waits in each steady step, or of a whole run of `PRECOMPUTE`; None if no step is steady
Run = namedtuple("Run", "script flags known", defaults=[()])

STEPS = ("--max_train_steps=4", "--logging_steps=100")
TRAIN = (*STEPS, "--use_ema", "--holdout=2")
SAMPLES = ("--validation_prompts", "a digit zero", "--num_validation_images=1")
PLAIN = ("--resolution=16", "--dataloader_num_workers=0")
BF16 = ("--mixed_precision=bf16", "--gradient_checkpointing")
LORA = ("--rank=2", "--mixed_precision=bf16")
METRICS = ("kid", "clip-t", "clip-i", "dino-i", "copy")
PRIOR = ("--preserve_prior", "--class_prompt", "a digit", "a")
# Functions in which `PRECOMPUTE` waits only at the start
ONCE = {"make_launch", "place_encoders", "put_on_device", "place_scale", "describe_scale"}
# Functions that compute in float32 on purpose: the range of the first images is measured exactly,
# and SDXL's VAE overflows in 16 bits (force_upcast)
IN_FLOAT32 = {"measure_images"}
OF_SDXL = {"encode_images"}
# of `CheckpointCopy` and `PosthocEma`: the thread that writes a checkpoint waits, not the training
ASIDE = {"models", "list_copied"}


# -------------------------------------------------------------------------------------------------
# the waits that remain


def wait_for_scaler(path):
    reason = "the scaler of fp16 looks for an overflow: a skipped step does not count"
    return Known("_local_scalar_dense", path, "train_step", 1, reason)


def wait_for_padding(module, calls=1):
    reason = "the text encoder in transformers looks twice whether captions are padded"
    path = f"diffusion_training/families/{module}.py"
    return Known("_local_scalar_dense", path, "encode", 2 * calls, reason)


def wait_for_new_sizes():
    reason = "diffusers' transformer of Qwen-Image makes places of new sizes on the CPU"
    path = "diffusion_training/families/recorded/calls.py"
    return Known("copy from the CPU", path, "predict", 1, reason, is_always=False)


def wait_for_loss():
    reason = "each loss decides whether the range test goes on"
    path = "diffusion_training/training/tuning.py"
    return Known("tolist", path, "find_learning_rate", 1, reason)


def wait_for_record():
    reason = "a record reads the sums of its steps, all at once, and so does a checkpoint"
    return Known("tolist", "diffusion_training/training/records.py", "gather", 1, reason)


def wait_for_rows(batches):
    reason = "rows are written when they have arrived, while the next ones are computed"
    return Known("Event.synchronize", "precompute_latents.py", "collect", batches, reason)


# -------------------------------------------------------------------------------------------------
# the runs


def list_unconditional(folder):
    make_images(folder / "images", 8)
    config = make_unet_config(folder)
    base = [f"--model_config_name_or_path={config}", f"--train_data_dir={folder / 'images'}"]
    path = f"{UNCONDITIONAL}.py"
    return {
        "plain": Run(UNCONDITIONAL, [*base, *TRAIN]),
        "cached": Run(
            UNCONDITIONAL,
            [*base, *STEPS, "--cache_images", "--mixed_precision=bf16"]
            + ["--optimizer=prodigy", "--learning_rate=1"],
        ),
        "records and checkpoints": Run(
            UNCONDITIONAL,
            [*base, *STEPS, "--use_ema", "--logging_steps=1", "--checkpointing_steps=1"]
            + ["--posthoc_ema", "0.05", "0.1"],
            [wait_for_record()],
        ),
        "workers": Run(
            UNCONDITIONAL,
            [*base, *STEPS, "--dataloader_num_workers=1", "--gradient_accumulation_steps=2"]
            + ["--optimizer=adafactor"],
        ),
        "fp16": Run(
            UNCONDITIONAL, [*base, *STEPS, "--mixed_precision=fp16"], [wait_for_scaler(path)]
        ),
    }


def list_searches(folder):
    base = list_unconditional(folder)["fp16"].flags[:-1]
    return {
        "range": Run(UNCONDITIONAL, [*base, "--find_lr", "--find_lr_steps=10"], [wait_for_loss()]),
        "auto": Run(UNCONDITIONAL, [*base, "--train_batch_size=auto"], None),
    }


def describe_images(folder):
    make_captioned(folder / "data", 8)
    return [f"--train_data_dir={folder / 'data'}", *PLAIN]


def describe_masked(folder):
    """Images of several sizes, with masks and two captions each."""
    (folder / "data").mkdir()
    make_masked(folder / "data/images")
    return [flag for flag in describe_data(folder / "data") if not flag.startswith("--pretrained")]


def list_stable_diffusion(folder):
    base = [f"--pretrained_model_name_or_path={make_models(folder)}"]
    data = describe_images(folder)
    cache = [*base, f"--latents_dir={folder / 'cache'}"]
    loss = ["--snr_gamma=5", "--noise_offset=0.1", "--caption_dropout=0.2"]
    return {
        "cache": Run(PRECOMPUTE, [*base, *data], [wait_for_rows(4)]),
        "cached": Run(TEXT, [*cache, *TRAIN, *SAMPLES]),
        "images": Run(TEXT, [*base, *data, *STEPS, *BF16, *loss]),
        "lora": Run(TEXT, [*base, *data, *STEPS, *LORA, *SAMPLES]),
        "dora": Run(
            TEXT, [*cache, *STEPS, *LORA, *PRIOR, "--use_dora", "--gradient_checkpointing"]
        ),
        "auto": Run(TEXT, [*cache, *STEPS, "--train_batch_size=auto"], None),
        "resumed": Run(
            TEXT,
            [*cache, *TRAIN, "--max_train_steps=8", "--resume_from_checkpoint=latest"]
            + [f"--output_dir={folder / 'cached'}"],
        ),
    }


def list_sdxl(folder):
    base = [f"--pretrained_model_name_or_path={make_sdxl(folder)}"]
    data = describe_masked(folder)
    cache = [*base, f"--latents_dir={folder / 'cache'}", "--train_batch_size=2"]
    return {
        "cache": Run(PRECOMPUTE, [*base, *data, "--text_cache=ids"], [wait_for_rows(2)]),
        "cached": Run(TEXT, [*cache, *TRAIN, *SAMPLES, *LORA]),
        "images": Run(TEXT, [*base, *data, *STEPS, *BF16, "--train_batch_size=2"]),
    }


def list_prx(folder):
    base = [f"--pretrained_model_name_or_path={MODELS}", "--model_family=prx"]
    base += [f"--transformer_config_name_or_path={make_prx(folder / 'prx')}"]
    data = describe_masked(folder)
    return {
        "cache": Run(
            PRECOMPUTE, [*base[:2], *data], [wait_for_rows(2), wait_for_padding("prx", 4)]
        ),
        "cached": Run(
            FLOW,
            [*base, *TRAIN, *SAMPLES, f"--latents_dir={folder / 'cache'}"]
            + ["--optimizer=muon", "--mixed_precision=bf16", "--caption_dropout=0.3"],
        ),
        "images": Run(FLOW, [*base, *data, *STEPS, *BF16], [wait_for_padding("prx")]),
    }


def list_family(name, *known):
    """Runs with a published model, whose steps wait for what is known."""

    def list_runs(folder):
        base = [f"--pretrained_model_name_or_path={MAKE[name](folder / 'base')}"]
        data = describe_masked(folder)
        run = [*base, "--train_batch_size=2", "--caption_dropout=0.3"]
        cache = f"--latents_dir={folder / 'cache'}"
        make_clip(folder / "clip")
        make_dino(folder / "dino")
        metrics = [f"--metric_clip_model={folder / 'clip'}", "--num_metric_images=2"]
        metrics += [f"--metric_image_model={folder / 'dino'}", "--validation_metrics", *METRICS]
        return {
            "cache": Run(PRECOMPUTE, [*base, *data], None),
            "cached": Run(FLOW, [*run, *TRAIN, *SAMPLES, *BF16, cache, *metrics], known),
            # captions are encoded one by one, from their text
            "images": Run(FLOW, [*run, *data, *STEPS, *LORA, *PRIOR], None),
        }

    return list_runs


def list_recorded(folder):
    """A pipeline without a family of its own, whose mask is made of the caption's."""
    base = [f"--pretrained_model_name_or_path={tiny_pipelines.MAKE['chroma'](folder / 'base')}"]
    Script(PRECOMPUTE)(*base, *describe_images(folder), f"--output_dir={folder / 'cache'}")
    flags = [*base, *STEPS, *BF16, f"--latents_dir={folder / 'cache'}", "--caption_dropout=0.3"]
    path = "diffusion_training/families/recorded/calls.py"
    reason = "diffusers' transformer of Chroma makes its guidance on the CPU"
    known = [Known("copy from the CPU", path, "predict", 1, reason)]
    return {
        "cached": Run(FLOW, [*flags, "--train_batch_size=2", "--holdout=2"], known),
        "lora": Run(FLOW, [*flags, "--train_batch_size=2", "--rank=2"], known),
    }


def list_twins(folder):
    data = describe_images(folder)
    base = make_models(folder)
    cache = [*data, f"--output_dir={folder}/prx-cache", "--model_family=prx"]
    Script(PRECOMPUTE)(f"--pretrained_model_name_or_path={base}", *cache)
    config = make_unet_config(folder)
    make_prx(folder / "prx-config")
    flags = ["--train_batch_size=2", "--lr_warmup_steps=2", *STEPS]
    text = [*flags, f"--pretrained_model_name_or_path={base}", *SAMPLES, "--num_inference_steps=1"]
    models = {
        UNCONDITIONAL: [f"--train_data_dir={folder / 'data'}", "--resolution=16", *flags]
        + [f"--model_config_name_or_path={config}"],
        TEXT: [*text, f"--latents_dir={folder}/sd-cache"],  # of the first run
        FLOW: [*text, f"--latents_dir={folder}/prx-cache"]
        + [f"--transformer_config_name_or_path={folder / 'prx-config'}"],
    }
    encoding = [f"--train_data_dir={folder / 'data'}", "--resolution=16", "--random_flip"]
    encoding.append(f"--pretrained_model_name_or_path={base}")
    runs = {"sd-cache": Run(f"minimal/{PRECOMPUTE}.py", encoding, None)}
    return runs | {name: Run(f"minimal/{name}.py", more) for name, more in models.items()}


def list_swapped(folder):
    """Runs with --blocks_to_swap: copies of blocks neither wait nor mix devices."""
    data = describe_images(folder)
    unet = [f"--pretrained_model_name_or_path={make_models(folder)}", *data]
    flux = [f"--pretrained_model_name_or_path={tiny_pipelines.MAKE['flux'](folder / 'base')}"]
    Script(PRECOMPUTE)(*flux, *data, f"--output_dir={folder / 'latents'}")
    flux.append(f"--latents_dir={folder / 'latents'}")
    all_blocks = [*LORA, "--blocks_to_swap=all"]
    return {
        "dora": Run(TEXT, [*unet, *STEPS, *PRIOR, *SAMPLES, *all_blocks, "--use_dora"]),
        "int8": Run(FLOW, [*flux, *TRAIN, *SAMPLES, *all_blocks, "--base_precision=int8"]),
        "one": Run(FLOW, [*flux, *STEPS, *LORA, "--blocks_to_swap=1", "--logging_steps=1"], None),
    }


def list_full_bf16(folder):
    """Runs whose weights are updated in the backward pass, and rounded at random."""
    data = describe_images(folder)
    unet = [f"--pretrained_model_name_or_path={make_models(folder)}", *data]
    prx = [f"--pretrained_model_name_or_path={MODELS}", "--model_family=prx"]
    Script(PRECOMPUTE)(*prx, *data, f"--output_dir={folder / 'latents'}")
    prx += [f"--transformer_config_name_or_path={make_prx(folder / 'prx')}"]
    whole = ["--full_bf16", "--optimizer=adafactor", "--no-use_ema", "--max_grad_norm=0"]
    whole += [*BF16, *SAMPLES, "--holdout=2"]
    return {
        "u-net": Run(TEXT, [*unet, *STEPS, *whole]),
        "transformer": Run(FLOW, [*prx, *STEPS, *whole, f"--latents_dir={folder / 'latents'}"]),
    }


def list_nf4(folder):
    base = make_models(folder)
    config = UNet2DConditionModel.load_config(base / "unet") | {"block_out_channels": [64, 64]}
    unet = UNet2DConditionModel.from_config(config | {"attention_head_dim": 16})
    unet.save_pretrained(base / "unet")
    base = [f"--pretrained_model_name_or_path={base}"]
    flags = [*base, *describe_images(folder), *STEPS, *LORA, *PRIOR, "--base_precision=nf4"]
    return {"lora": Run(TEXT, flags)}


def list_kinds(folder):
    """A run of each kind of model, mostly a LoRA from a cache, as people train it."""
    data = describe_images(folder)
    copied = {("copy from the CPU", "predict"): 1}  # see `list_recorded`
    make_prx(folder / "prx-config")
    in_prx = [
        f"--transformer_config_name_or_path={folder / 'prx-config'}",
        "--mixed_precision=bf16",
    ]
    kinds = {
        "stable diffusion": (make_models, TEXT, [*BF16, "--use_ema"], {}),
        "sdxl": (make_sdxl, TEXT, LORA, {}),
        "prx": (None, FLOW, [*in_prx, "--optimizer=muon", "--caption_dropout=0.3"], {}),
        "z-image": (make_z_image, FLOW, LORA, {}),
        "flux2-klein": (make_klein, FLOW, LORA, {}),
        "qwen-image": (make_qwen_image, FLOW, [*LORA, "--gradient_checkpointing"], {}),
        "chroma": (tiny_pipelines.MAKE["chroma"], FLOW, LORA, copied),
    }
    runs = {}
    for name, (make, script, flags, known) in kinds.items():
        source = make(folder / "models" / name) if make else MODELS
        base = [f"--pretrained_model_name_or_path={source}", *["--model_family=prx"] * (not make)]
        cache = folder / "caches" / name
        Script(PRECOMPUTE)(*base, *data, f"--output_dir={cache}")
        runs[name] = Run(script, [*base, *STEPS, *flags, f"--latents_dir={cache}"], known)
    if importlib.util.find_spec("bitsandbytes"):
        (folder / "nf4-base").mkdir()
        runs["nf4"] = list_nf4(folder / "nf4-base")["lora"]._replace(known={})
    return runs


# -------------------------------------------------------------------------------------------------


class WithScaler(accelerate.Accelerator):
    """An Accelerator for fp16, which the usual one refuses on an unknown device."""

    def __init__(self, mixed_precision, **options):
        precision = "no" if mixed_precision == "fp16" else mixed_precision
        super().__init__(mixed_precision=precision, **options)
        if mixed_precision == "fp16":
            self.state._mixed_precision = mixed_precision
            self.native_amp = True
            self.scaler = torch.amp.GradScaler(fake_device.NAME)


class OfSeveral(accelerate.Accelerator):
    """An Accelerator for several processes on the imitated GPU, which exchange over gloo."""

    def __init__(self, **options):
        super().__init__(**options)
        del os.environ["ACCELERATE_USE_CPU"]  # else it wants the device of later objects to be one


def quantize(layer, weight, dtype, quantize_on_cpu=quantization.quantize):
    """Quantize on the CPU, then move: a weight of bitsandbytes can't be a tensor like the device's.

    The moved one has its attributes.
    """
    if isinstance(layer, quantization.Int8Linear):
        return quantize_on_cpu(layer, weight, dtype)
    quantize_on_cpu(layer, weight.cpu(), dtype)
    exact = layer.weight
    exact.quant_state.to(fake_device.DEVICE)
    moved = exact.data.to(fake_device.DEVICE)
    layer.weight = torch.nn.Parameter(moved, requires_grad=False)
    vars(layer.weight).update(vars(exact))


def run_all(runs, folder, accelerator=WithScaler, num_processes=1, is_cuda=True):
    """Run scripts in forks on the imitated GPU; returns {run: (waits, products)} of the last."""
    log = folder / "log"

    def child():
        fake_device.switch_on(is_cuda)
        SCRIPTS[UNCONDITIONAL].module.Accelerator = accelerator
        quantization.quantize = quantize
        found = {}
        for name, run in runs.items():
            print(f"\n---- {name}", flush=True)
            fake_device.forget_counts()
            if run.script in SCRIPTS:
                script = SCRIPTS[run.script]
                script(*script.flags(folder / name, *run.flags))
            else:
                run_twin(run.script, *run.flags, f"--output_dir={folder / name}")
            found[name] = [
                [[*key, count] for key, count in counts.items()]
                for counts in (fake_device.WAITS, fake_device.PRODUCTS)
            ]
        if os.environ.get("RANK", "0") == str(num_processes - 1):
            (folder / "found.json").write_text(json.dumps(found))

    codes = finish(start(child, num_processes, str(log)), timeout=300)
    assert set(codes) == {0}, log.read_text()
    return json.loads((folder / "found.json").read_text())


def run_twin(path, *flags):
    """Run a twin, which has to take the imitated GPU for one with CUDA."""
    reset()
    sys.argv = [path, *map(str, flags)]
    text = (ROOT / path).read_text().replace('"cuda"', f'"{fake_device.NAME}"')
    try:
        exec(compile(text, ROOT / path, "exec"), {"__file__": path, "__name__": "__main__"})
    except SystemExit as stop:
        assert stop.code == 0, stop.code


def count_waits(waits, step):
    """{(operator, path, function): how often} in a step."""
    found = Counter()
    for steps, operator, path, _, function, count in waits:
        if steps == step and function not in ASIDE:
            found[operator, path, function] += count
    return found


def find_precision(flags):
    """The type in which a run's products are computed."""
    for flag in flags:
        if str(flag).startswith("--mixed_precision="):
            return DTYPES[flag.partition("=")[2]]
    return "float32"


def find_products(products, left_out=IN_FLOAT32):
    """{type: where steady steps multiply in it}. left_out: names of functions."""
    found = defaultdict(set)
    for steps, operator, dtype, path, line, function, _ in products:
        if steps in (2, 3) and function not in left_out:
            found[dtype].add(f"{path}:{line} {operator}")
    return found


QUICK = {"unconditional": list_unconditional}
SLOW = {  # marked `ci`
    "searches": list_searches,
    "block swap": list_swapped,
    "full bf16": list_full_bf16,
    "twins": list_twins,
}
SLOWER = {  # marked `long`
    "prx": list_prx,
    "qwen-image": list_family("qwen-image", wait_for_new_sizes()),
    "sdxl": list_sdxl,
    "stable diffusion": list_stable_diffusion,
    "recorded": list_recorded,
    "z-image": list_family("z-image"),
    "flux2-klein": list_family("flux2-klein"),
}


@pytest.mark.usefixtures("without_figures")
@pytest.mark.parametrize(
    "name",
    [
        *QUICK,
        *(pytest.param(name, marks=pytest.mark.ci) for name in SLOW),
        *(pytest.param(name, marks=pytest.mark.long) for name in SLOWER),
    ],
)
def test_no_run_mixes_devices_or_waits_in_a_steady_step(tmp_path, name):
    runs = (QUICK | SLOW | SLOWER)[name](tmp_path)
    for run, (waits, products) in run_all(runs, tmp_path).items():
        if runs[run].script not in (PRECOMPUTE, f"minimal/{PRECOMPUTE}.py"):
            places = find_products(products, IN_FLOAT32 | (OF_SDXL if name == "sdxl" else set()))
            assert places.keys() == {find_precision(runs[run].flags)}, (run, places)
        if runs[run].known is None:
            continue
        known = {each[:3]: each.count for each in runs[run].known}
        if runs[run].script == PRECOMPUTE:
            waits = [wait for wait in waits if wait[4] not in ONCE]
            found = [count_waits(waits, 0)]
        else:
            found = [count_waits(waits, step) for step in (2, 3)]
        for each in runs[run].known:
            for counts in found if not each.is_always else ():
                counts[each[:3]] = max(counts[each[:3]], each.count)
        lines = "\n".join(
            f"{path}:{line} {operator}, {count} times, after {steps} steps"
            for steps, operator, path, line, _, count in waits
        )
        assert found == [known] * len(found), f"{run}:\n{lines}"


@pytest.mark.usefixtures("without_figures")
def test_no_kind_of_model_mixes_devices_or_waits_in_a_steady_step(tmp_path):
    """All runs share a process. It asks for no file of ours, so any code may train a kind."""
    runs = list_kinds(tmp_path)
    for run, (waits, products) in run_all(runs, tmp_path).items():
        assert find_products(products).keys() == {"bfloat16"}, run
        for step in (2, 3):
            found = Counter()
            for (operator, _, function), count in count_waits(waits, step).items():
                found[operator, function] += count
            assert found == runs[run].known, (run, waits)


@pytest.mark.long
@pytest.mark.usefixtures("without_figures")
def test_ddp_neither_mixes_devices_nor_waits_in_a_steady_step(tmp_path):
    run = list_unconditional(tmp_path)["cached"]
    found = run_all({"two": run}, tmp_path, OfSeveral, num_processes=2)
    waits, products = found["two"]
    config = UNet2DModel.load_config(tmp_path / "tiny-unet")
    num_weights = len([*UNet2DModel.from_config(config).parameters()])
    # gloo exchanges the numbers, which are on the CPU, and DDP copies each gradient from there
    known = {("copy from the CPU", f"{UNCONDITIONAL}.py", "train_step"): num_weights}
    assert [count_waits(waits, step) for step in (2, 3)] == [known, known]
    assert find_products(products).keys() == {"bfloat16"}


@pytest.mark.long
@pytest.mark.usefixtures("without_figures")
@pytest.mark.parametrize(
    "name",
    ["unconditional", "searches", "stable diffusion", "sdxl", "prx", "z-image", "qwen-image"],
)
def test_every_run_ends_on_a_device_like_a_macs(tmp_path, name):
    runs = (QUICK | SLOW | SLOWER)[name](tmp_path)
    runs = {run: about for run, about in runs.items() if run not in ("fp16", "auto")}
    assert run_all(runs, tmp_path, is_cuda=False).keys() == runs.keys()
