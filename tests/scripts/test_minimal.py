"""minimal/: each twin trains to the same bits as its big script, and stays short and readable."""

import ast
import io
import math
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
import tokenize
import tomllib
import zlib

import datasets
import numpy as np
import pytest
import torch
from conftest import (
    MODELS,
    ROOT,
    Script,
    finish,
    kill,
    make_models,
    make_prx,
    make_unet_config,
    start,
    wait_until,
)
from diffusers import DiffusionPipeline, UNet2DConditionModel, UNet2DModel
from PIL import Image
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from diffusion_training.data import captions

pytestmark = pytest.mark.usefixtures("without_figures")
BIG = {name: Script(name) for name in ("train_unconditional", "train_text_to_image", "train_flow")}
precompute = Script("precompute_latents")
LORAS = ["train_lora", "train_lora_sdxl"]
TWINS = [*BIG, *LORAS, "precompute_latents"]
PATHS = {name: ROOT / "minimal" / f"{name}.py" for name in TWINS}
# Flags of the big scripts that change no weights
FASTER = {
    "train_unconditional": ["--eval_batch_size=1", "--ddpm_num_inference_steps=1"],
    "train_text_to_image": ["--num_inference_steps=1"],
    "train_flow": ["--num_inference_steps=1"],
}
WORDS = "a handwritten digit zero one two three".split()


def make_pictures(folder):
    """21 pictures of noise: RGB and grey, PNG and JPEG, upright and wide, with captions.

    The captions have different lengths. 21 is 1 more than 2 steps of 10 images or 1 step of 20. One
    name has a word that `datasets` takes for a split, and val/ holds another split.
    """
    folder.mkdir()
    rng = np.random.default_rng(0)
    for i in range(21):
        channels = [] if i % 4 > 1 else [3]
        pixels = rng.integers(0, 256, [20 + i % 7, 23, *channels], np.uint8)
        name = f"{i:02}{' train' * (i == 14)}.{'png' if i % 2 else 'jpg'}"
        Image.fromarray(pixels).save(folder / name)
    names = sorted(path.name for path in folder.iterdir())
    captions = [" ".join(WORDS[: 1 + i % 7]) for i in range(len(names))]
    rows = [f"{name},{caption}" for name, caption in zip(names, captions, strict=True)]
    (folder / "metadata.csv").write_text("\n".join(["file_name,text", *rows]))
    (folder / "val").mkdir()
    shutil.copy(folder / "01.png", folder / "val")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """Pictures, a cache of them for each family, and models of 10,000 weights with dropout."""
    folder = tmp_path_factory.mktemp("inputs")
    make_pictures(folder / "images")
    make_unets(folder)
    make_prx(folder / "prx")
    with pytest.MonkeyPatch.context() as m:
        m.setattr(datasets.config, "HF_DATASETS_CACHE", str(folder / "datasets-cache"))
        for family in ("sd", "prx"):
            flags = [f"--train_data_dir={folder / 'images'}", "--resolution=16", "--random_flip"]
            flags += [f"--pretrained_model_name_or_path={MODELS}", f"--model_family={family}"]
            flags += [f"--output_dir={folder / f'cache-{family}'}", "--dataloader_num_workers=0"]
            precompute(*flags)
    return folder


def make_unets(folder):
    """Models of 10,000 weights with dropout: sd/, and configs of U-Nets."""
    make_models(folder)
    make_unet_config(folder)  # tiny-unet, for RGB
    grey = UNet2DModel.load_config(folder / "tiny-unet")
    UNet2DModel.from_config(grey, in_channels=1, out_channels=1).save_config(folder / "grey-unet")
    conditional = UNet2DConditionModel.load_config(folder / "sd/unet")
    UNet2DConditionModel.from_config(conditional, norm_num_groups=2).save_config(folder / "unet")


def data_flags(name, inputs, pretrained=False):
    """The flags for data and model of a small run."""
    if name == "train_unconditional":
        config = f"--model_config_name_or_path={inputs / 'tiny-unet'}"
        few = ["--eval_batch_size=1", "--validation_steps=1000"]
        return [f"--train_data_dir={inputs / 'images'}", "--resolution=16", config, *few]
    family, model, config = (
        ("prx", "transformer", "prx") if name == "train_flow" else ("sd", "unet", "unet")
    )
    flags = [f"--latents_dir={inputs / f'cache-{family}'}"]
    flags += [f"--pretrained_model_name_or_path={inputs / 'sd'}"]
    return flags + ([] if pretrained else [f"--{model}_config_name_or_path={inputs / config}"])


# Flags with which a twin draws samples and logs to a tracker
SHOWN = {
    "train_unconditional": ["--eval_batch_size=6"],
    **dict.fromkeys(
        ("train_text_to_image", "train_flow"),
        [*FASTER["train_flow"], "--validation_prompts", "a digit", "a one"]
        + ["--num_validation_images=2"],
    ),
}


def run_big(name, *flags):
    BIG[name](*flags, "--report_to=none", *FASTER[name])


def run_twin(name, *flags, text=None):
    """Run a twin as a script in this process, which is a fork; `text` replaces its source."""
    sys.argv = [str(PATHS[name]), *flags]
    try:
        if text is None:
            runpy.run_path(str(PATHS[name]), run_name="__main__")
        else:
            exec(compile(text, PATHS[name], "exec"), {"__file__": str(PATHS[name])})
    except SystemExit as stop:
        if isinstance(stop.code, str):
            print(stop.code)
        sys.exit(1 if isinstance(stop.code, str) else stop.code)


def train(run, name, folder, flags, num_processes=1, **options):
    """Run a script in forks, to its end."""
    flags = [*flags, f"--output_dir={folder}"]
    log = folder.with_suffix(".log")
    pids = start(lambda: run(name, *flags, **options), num_processes, log)
    assert set(finish(pids)) == {0}, log.read_text()


def train_big(name, inputs, flags, num_processes=1):
    """Train with the big script, once with the same flags; returns the folder."""
    folder = inputs / f"big-{zlib.crc32(repr((name, flags, num_processes)).encode())}"
    if not folder.exists():
        train(run_big, name, folder, flags, num_processes)
    return folder


def saved_by_big(folder, step):
    """{name: tensor} of everything that a checkpoint of a big script trains."""
    tensors = {}
    for path in sorted((folder / f"checkpoint-{step}").glob("*/*.safetensors")):
        key = "ema" if path.parent.name.endswith("_ema") else path.parent.name
        tensors |= {f"{key} {name}": value for name, value in load_file(path).items()}
    optimizer = torch.load(folder / f"checkpoint-{step}/optimizer.bin", weights_only=True)
    return tensors | flatten_moments(optimizer)


def saved_by_twin(folder, step):
    (path,) = (folder / f"checkpoint-{step}").iterdir()
    state = torch.load(path, weights_only=True)
    tensors = {}
    for key, own in state["trained"].items():  # unet.conv_in.weight
        model, name = key.split(".", 1)
        tensors |= {f"{model} {name}": own, f"ema {name}": state["ema"][key]}
    return tensors | flatten_moments(state["optimizer"])


def flatten_moments(optimizer):
    return {
        f"optimizer {number} {name}": value
        for number, state in optimizer["state"].items()
        for name, value in state.items()
    }


def assert_same_bits(big, twin, step):
    expected, found = saved_by_big(big, step), saved_by_twin(twin, step)
    assert expected.keys() == found.keys() and any(key.startswith("ema ") for key in found)
    different = [key for key in expected if not torch.equal(expected[key], found[key])]
    assert not different, f"{len(different)} of {len(expected)} differ, such as {different[0]}"


# -------------------------------------------------------------------------------- the same bits

EXACT = ["--learning_rate=1e-3", "--lr_warmup_steps=2", "--max_train_steps=5",
         "--checkpointing_steps=2", "--logging_steps=2", "--report_to=none"]  # fmt: skip
# 5 steps of 10, 10 and 1 images
ONE = (1, ["--train_batch_size=10"])
# 5 steps of 2 x 2 x 5 images and, at an epoch's end, of 1, which the second process does not get
TWO = (2, ["--train_batch_size=5", "--gradient_accumulation_steps=2"])
V_PREDICTION = ["--prediction_type=v_prediction", "--snr_gamma=5"]
EPSILON = ["--prediction_type=epsilon", "--snr_gamma=5"]
BF16 = ["--mixed_precision=bf16"]
DROPOUT = ["--caption_dropout=0.4", "--random_flip"]
UNCONDITIONAL, TEXT, FLOW = BIG
QUICK = [
    (
        UNCONDITIONAL,
        ONE,
        [*V_PREDICTION, "--random_flip", "--ddpm_beta_schedule=squaredcos_cap_v2"],
    ),
    (TEXT, ONE, [*DROPOUT, *EPSILON]),
    (FLOW, ONE, DROPOUT),
]
SLOW = [
    (TEXT, TWO, [*DROPOUT, *V_PREDICTION, "--lr_scheduler=cosine"]),
    (TEXT, ONE, ["pretrained"]),
    (FLOW, TWO, [*DROPOUT, "--shift=3", "--lr_scheduler=cosine"]),
]  # fmt: skip
SLOWER = [
    (UNCONDITIONAL, TWO, ["--random_flip"]),
    (UNCONDITIONAL, ONE, [*BF16, *EPSILON, "--lr_scheduler=linear"]),
    (UNCONDITIONAL, ONE, ["grey"]),
    (TEXT, ONE, [*DROPOUT, *BF16, "--seed=3"]),
    (FLOW, ONE, [*DROPOUT, *BF16, "--shift=1.7"]),
]  # fmt: skip


@pytest.mark.parametrize(
    "name, batches, flags",
    [
        *QUICK,
        *(pytest.param(*case, marks=pytest.mark.ci) for case in SLOW),
        *(pytest.param(*case, marks=pytest.mark.long) for case in SLOWER),
    ],
)
def test_minimal_twin_trains_to_the_same_bits_as_its_big_script(
    tmp_path, inputs, name, batches, flags, monkeypatch
):
    num_processes, sizes = batches
    text = PATHS[name].read_text()
    if name == FLOW:  # captions have at most 8 tokens, so pad them to multiples of 2
        monkeypatch.setattr(captions, "MULTIPLE", 2)
        text = text.replace("+ 31) // 32 * 32", "+ 1) // 2 * 2")
        assert text != PATHS[name].read_text()
    if name == UNCONDITIONAL:  # 2 denoising steps a sample in place of 50
        assert text.count("generator=generator)") == 1
        text = text.replace("generator=generator)", "generator=generator, num_inference_steps=2)")
    data = data_flags(name, inputs, pretrained="pretrained" in flags)
    if "grey" in flags:  # a U-Net with one channel: JPEGs give their own brightness
        data.append(f"--model_config_name_or_path={inputs / 'grey-unet'}")
    flags = [*data, *EXACT, *sizes, *(flag for flag in flags if flag.startswith("--"))]
    big = train_big(name, inputs, flags, num_processes)
    shown = [*SHOWN[name], "--validation_steps=3", "--report_to=tensorboard"]
    train(run_twin, name, tmp_path / "twin", [*flags, *shown], num_processes, text=text)
    for step in (2, 4, 5):
        assert_same_bits(big, tmp_path / "twin", step)
    assert_pipeline_has_the_average(tmp_path / "twin")
    first = [] if name == UNCONDITIONAL else [0]
    assert_samples_are_shown(tmp_path / "twin", [*first, 3, 5], name)


def assert_samples_are_shown(folder, steps, name):
    """Pictures of 6 or 2 x 2 samples of 16 x 16 pixels, in samples/ and in the tracker."""
    size = (48, 32) if name == UNCONDITIONAL else (32, 32)
    paths = sorted((folder / "samples").iterdir())
    assert [path.name for path in paths] == [f"step-{step:07d}.png" for step in steps]
    pictures = [np.asarray(Image.open(path).convert("RGB")) for path in paths]
    assert all(picture.shape[1::-1] == size for picture in pictures)
    assert (pictures[-2] != pictures[-1]).any()  # the model has changed
    (path,) = (folder / f"logs/{name}").glob("events.*")
    events = EventAccumulator(str(path.parent)).Reload()
    assert [event.step for event in events.Scalars("loss")] == [2, 4]
    assert [event.step for event in events.Images("samples")] == steps
    logged = Image.open(io.BytesIO(events.Images("samples")[-1].encoded_image_string))
    assert np.array_equal(np.asarray(logged), pictures[-1])


def assert_pipeline_has_the_average(folder):
    pipeline = DiffusionPipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    model = getattr(pipeline, "unet", None) or pipeline.transformer
    average = {
        key.removeprefix("ema "): value
        for key, value in saved_by_twin(folder, 5).items()
        if key.startswith("ema ")
    }
    assert all(torch.equal(average[key], value) for key, value in model.state_dict().items())
    options = {"num_inference_steps": 1, "output_type": "np"}
    if "tokenizer" in pipeline.components:
        options["prompt"] = "a digit one"
    if "transformer" in pipeline.components:
        options["use_resolution_binning"] = False
    assert pipeline(**options).images.shape[1:3] == (16, 16)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("train_unconditional", marks=pytest.mark.long),
        pytest.param("train_text_to_image", marks=pytest.mark.long),
        pytest.param("train_flow", marks=pytest.mark.long),
    ],
)
def test_minimal_demo_trains_like_the_big_scripts_demo(tmp_path, name, monkeypatch):
    """The demos run without flags for data and model, and with few steps."""
    (tmp_path / "demo").symlink_to(ROOT / "demo")
    monkeypatch.chdir(tmp_path)
    if name != UNCONDITIONAL:
        family = "prx" if name == FLOW else "sd"
        flags = ["--max_train_samples=70", f"--model_family={family}", "--dataloader_num_workers=0"]
        precompute(*flags)
    flags = ["--max_train_steps=3", "--lr_warmup_steps=2"]
    train(run_big, name, tmp_path / "big", flags)
    train(run_twin, name, tmp_path / "twin", flags)
    assert_same_bits(tmp_path / "big", tmp_path / "twin", 3)


def test_minimal_demo_has_as_many_steps_as_the_big_scripts():
    images = {UNCONDITIONAL: 1797, TEXT: 240}
    for name, script in BIG.items():
        demo = script.module.parse_args([])
        steps = demo.max_train_steps
        if not steps:
            steps = demo.num_train_epochs * math.ceil(images[name] / demo.train_batch_size)
        assert re.findall(r"\bmax_train_steps=(\d+)", PATHS[name].read_text()) == [str(steps)]


def test_bit_comparison_detects_a_change_in_the_last_bits(tmp_path, inputs):
    """weight * (clamp / snr) differs from weight * clamp / snr in the last bits only."""
    flags = [*data_flags(TEXT, inputs), *EXACT, *ONE[1], *DROPOUT, *EPSILON]
    right = "weight * snr.clamp(max=args.snr_gamma) / snr"
    wrong = "weight * (snr.clamp(max=args.snr_gamma) / snr)"
    text = PATHS[TEXT].read_text()
    assert text.count(right) == 1
    train(run_twin, TEXT, tmp_path / "twin", flags, text=text.replace(right, wrong))
    with pytest.raises(AssertionError, match="differ"):
        assert_same_bits(train_big(TEXT, inputs, flags), tmp_path / "twin", 5)


# --------------------------------------------------------------------- kills, signals and resume


def kill_and_resume(name, folder, flags, num_processes, moments):
    """Kill a twin some time after each new checkpoint, then let it run to its end."""
    flags = [*flags, f"--output_dir={folder}"]
    log = folder.with_suffix(".log")
    for moment in moments:
        if (folder / "model_index.json").exists():
            break
        before = set(folder.glob("checkpoint-*"))
        pids = start(lambda: run_twin(name, *flags), num_processes, log)
        wait_until(
            lambda before=before: (
                (folder / "model_index.json").exists() or set(folder.glob("checkpoint-*")) - before
            )
        )
        time.sleep(moment)
        kill(pids)
    assert set(finish(start(lambda: run_twin(name, *flags), num_processes, log))) == {0}
    assert "Resuming from" in log.read_text() and not list(folder.glob(".unfinished-*"))


@pytest.mark.parametrize(
    "name, num_processes, kills",
    [
        pytest.param(FLOW, 1, 2, marks=pytest.mark.ci),
        *(pytest.param(name, n, 20, marks=pytest.mark.long) for name in BIG for n in (1, 2)),
    ],
)
def test_minimal_twin_killed_at_random_ends_with_the_same_bits(
    tmp_path, inputs, name, num_processes, kills
):
    steps = 8 * kills
    sizes = [
        "--train_batch_size=3",
        "--gradient_accumulation_steps=2",
        f"--max_train_steps={steps}",
    ]
    every = "--checkpointing_steps=4" if kills < 10 else "--checkpointing_steps=1"
    flags = [*data_flags(name, inputs), *EXACT, *sizes, every]
    moments = np.random.default_rng(num_processes if kills < 10 else None).uniform(0, 0.1, kills)
    kill_and_resume(name, tmp_path / "twin", flags, num_processes, moments)
    big = train_big(name, inputs, flags, num_processes)
    assert_same_bits(big, tmp_path / "twin", steps)


@pytest.mark.parametrize(
    "name, number",
    [
        pytest.param(TEXT, signal.SIGTERM, marks=pytest.mark.long),
        pytest.param(UNCONDITIONAL, signal.SIGINT, marks=pytest.mark.ci),
    ],
)
def test_signal_to_one_process_ends_a_minimal_run_with_a_checkpoint(tmp_path, inputs, name, number):
    """One of two processes gets the signal. The run then resumes to the same bits."""
    flags = [*data_flags(name, inputs), *EXACT, "--train_batch_size=3", "--lr_scheduler=constant"]
    argv = [*flags, "--max_train_steps=10000", f"--output_dir={tmp_path / 'twin'}"]
    log = tmp_path / "log"
    pids = start(lambda: run_twin(name, *argv), 2, log)
    wait_until(lambda: (tmp_path / "twin/checkpoint-2").is_dir())
    os.kill(pids[1], number)
    assert set(finish(pids)) == {128 + number}, log.read_text()
    step = max(int(path.name[11:]) for path in (tmp_path / "twin").glob("checkpoint-*"))
    assert "Stopped: the same command resumes" in log.read_text()
    assert not (tmp_path / "twin/model_index.json").exists()
    flags += [f"--max_train_steps={step + 3}"]
    train(run_big, name, tmp_path / "big", flags, 2)
    train(run_twin, name, tmp_path / "twin", flags, 2)
    assert_same_bits(tmp_path / "big", tmp_path / "twin", step + 3)


# ------------------------------------------------------------------------------------- errors


def refused(name, *flags, path=None):
    """The last line of a twin that ends with status 2 before it imports torch.

    path: of a copy of the twin.
    """
    command = [sys.executable, "-X", "importtime", str(path or PATHS[name]), *map(str, flags)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and "Traceback" not in done.stderr and "torch" not in done.stderr
    return done.stderr.splitlines()[-1]


def test_minimal_help_does_not_import_torch():
    for path in PATHS.values():
        command = [sys.executable, "-X", "importtime", str(path), "--help"]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0 and "--output_dir" in done.stdout
        assert "torch" not in done.stderr


def test_minimal_mistakes_end_in_a_sentence_before_importing_torch(tmp_path, inputs):
    said = refused(UNCONDITIONAL, "--train_data_dir", tmp_path / "no")
    assert said.endswith(f"--train_data_dir {tmp_path / 'no'} is not a folder")
    said = refused(UNCONDITIONAL, "--train_data_dir", tmp_path)
    assert said.endswith("--model_config_name_or_path and --max_train_steps are needed")
    for name in BIG:  # no abbreviations, which would take a typo for another flag
        assert "unrecognized arguments: --learning_rat 1" in refused(name, "--learning_rat", "1")
    base = ["--pretrained_model_name_or_path=base", "--max_train_steps=1"]
    for name, command in {TEXT: "", FLOW: " --model_family prx"}.items():
        said = refused(name, "--latents_dir", tmp_path / "no", *base)
        command = f"precompute_latents.py{command}"
        assert said.endswith(f"no cache in {tmp_path / 'no'}: run {command}")
    caches = inputs / "cache-sd", inputs / "cache-prx"
    said = refused(TEXT, "--latents_dir", caches[1], *base)
    assert said.endswith("is no plain cache of embeddings: use the big script")
    said = refused(FLOW, "--latents_dir", caches[0], *base)
    assert said.endswith("is no plain cache of PRX: use the big script")
    for name in BIG:  # nothing would be trained, or something else
        given = [*data_flags(name, inputs), "--max_train_steps=1", "--seed=0"]
        for flag in ("train_batch_size -1", "gradient_accumulation_steps 0", "learning_rate nan"):
            said = refused(name, *given, *f"--{flag}".split())
            assert said.endswith(f"--{flag} is out of range")
    said = refused(TEXT, "--latents_dir", caches[0], *base, "--resolution=32")
    assert said.endswith("was not made with this --random_flip and --resolution")


def test_minimal_copy_without_flags_says_where_the_demo_is_and_what_to_give(tmp_path):
    models = "--pretrained_model_name_or_path"
    needed = {
        UNCONDITIONAL: "--train_data_dir, --model_config_name_or_path and --max_train_steps",
        TEXT: f"--latents_dir, {models} and --max_train_steps",
        FLOW: f"--latents_dir, {models} and --max_train_steps",
        "precompute_latents": f"--train_data_dir and {models}",
    }
    assert {*needed} == {*TWINS} - {*LORAS}  # which have no demo
    for name, flags in needed.items():
        said = refused(name, path=shutil.copy(PATHS[name], tmp_path))
        assert said.endswith(
            "without flags this runs a demo, which is only in the script's repository: "
            f"give {flags}"
        )


@pytest.mark.parametrize("name", BIG)
def test_minimal_refuses_checkpoints_of_another_script(tmp_path, inputs, name):
    """They are never resumed, even if the folder also has newer checkpoints of the twin.

    Nor is a pipeline replaced, such as the one that training starts from.
    """
    flags = [*data_flags(name, inputs), "--max_train_steps=1", f"--output_dir={tmp_path}"]
    sentence = f"{tmp_path} holds what another script saved: choose another folder"
    (tmp_path / "model_index.json").touch()
    assert refused(name, *flags).endswith(sentence)
    (tmp_path / "checkpoint-5").mkdir()
    for file in ("trainer_state.json", "minimal_other.pt"):
        (tmp_path / "checkpoint-5" / file).touch()
        said = refused(name, *flags)
        assert said.endswith(sentence)


def test_minimal_refuses_a_checkpoint_of_another_unet(tmp_path, inputs):
    flags = [*data_flags(UNCONDITIONAL, inputs), "--max_train_steps=1"]
    train(run_twin, UNCONDITIONAL, tmp_path / "out", flags)
    for change in (f"--model_config_name_or_path={inputs / 'grey-unet'}",
                   "--prediction_type=v_prediction"):  # fmt: skip
        argv = [*flags, f"--output_dir={tmp_path / 'out'}", change]
        log = tmp_path / "log"
        pids = start(lambda argv=argv: run_twin(UNCONDITIONAL, *argv), log=log)
        assert finish(pids) == [1], log.read_text()
        assert "is of another U-Net or objective: choose another --output_dir" in log.read_text()


def test_minimal_refuses_a_folder_without_images(tmp_path, inputs):
    (tmp_path / "images").mkdir()
    flags = [*data_flags(UNCONDITIONAL, inputs), f"--train_data_dir={tmp_path / 'images'}"]
    flags += ["--max_train_steps=1", f"--output_dir={tmp_path / 'out'}"]
    log = tmp_path / "log"
    assert finish(start(lambda: run_twin(UNCONDITIONAL, *flags), log=log)) == [1]
    said = log.read_text()
    assert f"{tmp_path / 'images'} can't be read as images or parquet files alone" in said
    assert "Traceback" not in said and not (tmp_path / "out").exists()


# ------------------------------------------------------------------------------------- the files


def count_comments(text):
    """The number of lines with a comment, without the header for uv."""
    _, body = text.split("# ///\n", 1)
    tokens = tokenize.generate_tokens(io.StringIO(body).readline)
    return len({token.start[0] for token in tokens if token.type == tokenize.COMMENT})


def list_imports(text):
    names = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module.split(".")[0])
    return names - sys.stdlib_module_names


@pytest.mark.parametrize("name", TWINS)
def test_minimal_twin_is_short_and_has_comments(name):
    """It is read in one sitting. The comments do not count the docstring and the header for uv."""
    text = PATHS[name].read_text()
    num_lines = len(text.splitlines())
    # Those of LoRAs encode images, too, and train_lora.py has the lines of five models.
    most = {"precompute_latents": 450, "train_lora": 600, "train_lora_sdxl": 505}
    assert num_lines < most.get(name, 400)
    assert 0.1 <= count_comments(text) / num_lines <= 0.25


@pytest.mark.parametrize("name", TWINS)
def test_minimal_header_lists_its_imports_with_required_versions(name):
    text = PATHS[name].read_text()
    header = re.match(r"# /// script\n((?:#.*\n)+?)# ///\n", text)[1]
    header = tomllib.loads(re.sub(r"^# ?", "", header, flags=re.M))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert header["requires-python"] == project["requires-python"]
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    assert set(header["dependencies"]) <= {line.partition("#")[0].strip() for line in lines}
    named = {re.match(r"\w+", line)[0] for line in header["dependencies"]}
    imported = {"pillow" if each == "PIL" else each for each in list_imports(text)}
    # Accelerate imports the tracker, and diffusers what a pipeline needs for its prompts
    by_others = {"tensorboard"} if name != "precompute_latents" else set()
    by_others |= {"transformers"} if name in (TEXT, FLOW, *LORAS) else set()
    by_others |= {"ftfy"} if name == FLOW else set()
    assert by_others.isdisjoint(imported) and named == imported | by_others


@pytest.mark.parametrize("name", TWINS)
def test_minimal_flags_have_the_defaults_of_the_big_script(name, tmp_path):
    for path in ("state.json", "cache.json"):
        (tmp_path / path).touch()
    base = ["--pretrained_model_name_or_path=base"]
    data = "--latents_dir" if name in (TEXT, FLOW) else "--train_data_dir"
    of_loras = dict(zip(LORAS, (BIG[FLOW], BIG[TEXT]), strict=True))
    script = (BIG | of_loras).get(name, precompute)
    args = vars(
        script.module.parse_args([data, str(tmp_path), *(base if name != UNCONDITIONAL else [])])
    )
    flags = {}
    for node in ast.walk(ast.parse(PATHS[name].read_text())):
        if isinstance(node, ast.Call) and getattr(node.func, "id", None) == "add":
            options = {option.arg: option.value for option in node.keywords}
            default = options.get("default")
            is_switch = "action" in options
            flags[node.args[0].value.removeprefix("--")] = (
                ast.literal_eval(default) if default else (False if is_switch else None)
            )
    assert len(flags) >= 13 and flags.keys() <= args.keys()
    for flag, default in flags.items():
        if flag in ("prediction_type", "ddpm_beta_schedule"):
            assert args[flag] is None  # DDPMScheduler's own default, or the pipeline's
        elif flag == "resolution" and default == 512:
            assert args[flag] is None  # that of Stable Diffusion
        elif name in LORAS and flag in ("rank", "output_dir"):
            assert default != args[flag]  # by default, the big script trains no LoRA
        elif f"--{flag}" != data and flag != "pretrained_model_name_or_path":
            assert args[flag] == default, flag
