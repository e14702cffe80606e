"""recipes/: one for each model and method, which trains on a tiny model; --cache_latents."""

import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
import tomllib
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import tiny_pipelines
import torch
from conftest import (
    ROOT,
    Script,
    assert_same_weights,
    checkpoints,
    finish,
    make_captioned,
    make_klein,
    make_models,
    make_prx,
    make_qwen_image,
    make_sdxl,
    make_unet_config,
    make_z_image,
    metrics,
    open_pipeline,
    start,
    wait_until,
)
from filelock import FileLock
from PIL import Image

from diffusion_training.data.folders import name_shared_folder
from diffusion_training.errors.sentences import in_one_sentence
from diffusion_training.families.lora_settings import SETTINGS
from diffusion_training.latents import shared
from diffusion_training.latents.data_file import read_data_file
from diffusion_training.latents.reader import CachedLatents, choose_rows, load_cache

RECIPES = {path.stem: path for path in sorted(ROOT.glob("recipes/*.args"))}
IN_CI = {"sdxl_lora", "unet_64_8gb"}
# whole models in bfloat16 add up no gradients, and new models need many images
LARGER = {"sdxl_full_bf16", "klein_4b_full_bf16", "z_image_full_bf16", "prx_163m"}
SCRIPTS = {
    f"{name}.py": Script(name)
    for name in ("precompute_latents", "train_flow", "train_text_to_image", "train_unconditional")
}
train = SCRIPTS["train_text_to_image.py"]


def make_sd(folder):
    open_pipeline(make_models(folder / "parts")).save_pretrained(folder / "pipeline")
    return folder / "pipeline"


MAKE = {
    "stable-diffusion-v1-5/stable-diffusion-v1-5": make_sd,
    "stabilityai/stable-diffusion-xl-base-1.0": make_sdxl,
    "Tongyi-MAI/Z-Image": make_z_image,
    "black-forest-labs/FLUX.2-klein-base-4B": make_klein,
    "black-forest-labs/FLUX.2-klein-base-9B": make_klein,
    "Qwen/Qwen-Image": make_qwen_image,
    "black-forest-labs/FLUX.1-dev": tiny_pipelines.MAKE["flux_dev"],
    "black-forest-labs/flux-3-image-klein-base": tiny_pipelines.BLOCKS["flux3"],
    "krea/Krea-2-Raw": tiny_pipelines.MAKE["krea2"],
    "Qwen/Qwen-Image-2.1": tiny_pipelines.MAKE["qwen_image_2_1"],
    "stabilityai/stable-diffusion-3.5-medium": tiny_pipelines.MAKE["sd3"],
    "stabilityai/stable-diffusion-3.5-large": tiny_pipelines.MAKE["sd3"],
    "Wan-AI/Wan2.1-T2V-1.3B-Diffusers": tiny_pipelines.MAKE["wan"],
    "Wan-AI/Wan2.1-T2V-14B-Diffusers": tiny_pipelines.MAKE["wan"],
    "Wan-AI/Wan2.2-TI2V-5B-Diffusers": tiny_pipelines.MAKE["wan_5b"],
    "circlestone-labs/Anima-Base-v1.0-Diffusers": tiny_pipelines.BLOCKS["anima"],
    "Photoroom/prx-256-t2i": make_sd,
}
# Sizes and steps in place of a recipe's
SMALL = ["--resolution=16", "--max_train_steps=1", "--logging_steps=1", "--lr_warmup_steps=0"]
SMALL += ["--train_batch_size=1", "--gradient_accumulation_steps=1", "--report_to=none"]


def read_recipe(name):
    """(script, words) of a recipe."""
    text = RECIPES[name].read_text()
    return re.search(r"train_\w+\.py", text)[0], shlex.split(text, comments=True)


def find_flag(words, flag):
    return words[words.index(flag) + 1] if flag in words else None


# ------------------------------------------------------------------- the recipes


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_says_why_for_each_of_its_flags(name):
    script, _ = read_recipe(name)
    lines = RECIPES[name].read_text().splitlines()
    assert all(line.startswith("#") or re.match(r"--\S.*  # \w", line) for line in lines)
    assert f"python {script} @recipes/{name}.args" in lines[1]
    args = SCRIPTS[script].module.parse_args([f"@{RECIPES[name]}", f"--train_data_dir={ROOT}"])
    if script == "train_unconditional.py":  # it has no --fit
        assert args.cache_images
    else:
        assert args.cache_latents and args.fit == "auto" and args.mixed_precision == "bf16"
        assert args.resolution and (args.train_batch_size == 1) == (name not in LARGER)


@pytest.mark.parametrize("name", [x for x in RECIPES if x.removesuffix("_lora") in SETTINGS])
def test_a_recipe_of_a_lora_has_the_settings_of_its_model(name):
    script, _ = read_recipe(name)
    args = SCRIPTS[script].module.parse_args([f"@{RECIPES[name]}", f"--train_data_dir={ROOT}"])
    settings = SETTINGS[name.removesuffix("_lora")]
    # the default layers are those of the settings
    assert (args.rank, args.lora_layers) == (settings.rank, None)
    assert args.lora_alpha == settings.alpha
    assert args.learning_rate == settings.learning_rate
    assert args.adam_weight_decay == settings.weight_decay
    assert args.max_train_steps == settings.steps
    assert args.total_batch_size == settings.images
    assert args.caption_dropout == settings.caption_dropout
    assert args.resolution == settings.resolution and args.base_precision is None
    if script == "train_flow.py":
        assert (args.weighting_scheme, args.shift) == (settings.timesteps, settings.shift)


def test_the_pages_name_every_recipe():
    pages = "".join((ROOT / f"docs/{name}.md").read_text() for name in ("memory", "models"))
    assert {name for name in RECIPES if f"recipes/{name}.args" not in pages} == {"unet_64_8gb"}


def read_tables(page):
    """{first cell of a table's head: {first cell of a row: {column: cell}}}, without links."""
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", (ROOT / page).read_text())
    found = {}
    for table in re.findall(r"(?:^\|.*\n)+", text, flags=re.M):
        head, _, *rows = (
            [cell.strip() for cell in row.split("|")[1:-1]] for row in table.split("\n")[:-1]
        )
        found.setdefault(head[0], []).append(
            {row[0]: dict(zip(head, row, strict=True)) for row in rows}
        )
    return found


def test_what_the_table_of_cards_names_fits_by_the_steps_of_each_model():
    _, steps, further, *_ = read_tables("benchmarks/memory.md")["model"]
    page = read_tables("docs/memory.md")
    (cards,) = page["a LoRA of"]
    (host,) = (x for x in page["model"] if "base of a LoRA, 16 bits" in next(iter(x.values())))
    assert len(cards) == 15
    for title, row in cards.items():
        model = title.removesuffix(" (edits)")
        more = float(further[model]["LoRA, GC"]) if title != model else 0
        for card, cell in list(row.items())[1:]:
            if cell == "no":
                continue
            way, _, other = re.sub("(, half the side)?(, E)?( \\*)?$", "", cell).partition(" or ")
            half = ", half the side" if "half the side" in cell else ""
            way, held = re.subn(r"swap (\d+) GB", "swap", way)
            if held:
                base = float(host[model]["base of a LoRA, 16 bits"])
                assert float(re.search(r"swap (\d+) GB", cell)[1]) <= base
            way = re.sub(r"^GC \d+ %", "GC", way)
            names = {"plain": "bf16", "int8": "bf16, GC, int8", "nf4": "bf16, GC, nf4"}
            for each in filter(None, (way, other)):
                column = names.get(each, f"bf16, {each}") + half
                needed = float(steps[model][column]) + (more / 4 if half else more)
                assert needed <= 0.9 * int(card.split()[0]) * 2**30 / 1e9 + 0.1, (title, card, each)


def test_an_old_name_of_a_recipe_ends_with_its_new_flags(monkeypatch):
    """Recipes were for one GPU each."""
    monkeypatch.chdir(ROOT)
    rows = [row.split("\t") for row in (ROOT / "recipes/renamed.tsv").read_text().splitlines()]
    assert len(rows) == 58 and not {Path(old).stem for old, _ in rows} & RECIPES.keys()
    for old, new in rows:
        name, *more = new.split(" ")
        script, _ = read_recipe(Path(name).stem)
        said = SCRIPTS[script].refused(f"@recipes/{old}", "--train_data_dir=photos", status=2)
        assert said.endswith(f"@recipes/{old} can't be read: its flags are now @recipes/{new}\n")
        flags = [f"@recipes/{name}", *more, "--train_data_dir=demo"]
        assert SCRIPTS[script].module.parse_args(flags).fit == "auto"


def make_references(folder):
    """Add a reference to each image. FLUX.2 klein takes none below 64 x 64 pixels."""
    for path in [*folder.glob("*.png")]:
        Image.open(path).resize((64, 64)).save(path.with_suffix(".control.png"))


@pytest.mark.usefixtures("without_figures")
@pytest.mark.parametrize(
    "name",
    [name if name in IN_CI else pytest.param(name, marks=pytest.mark.long) for name in RECIPES],
)
def test_a_recipe_trains_on_a_tiny_model(name, tmp_path, monkeypatch, forked):
    script, words = read_recipe(name)
    if "adamw8bit" in words:
        pytest.importorskip("bitsandbytes")
    monkeypatch.chdir(tmp_path)
    make_captioned(tmp_path / "photos", 3)
    flags = [f"@{RECIPES[name]}", "--train_data_dir=photos", *SMALL]
    if script == "train_unconditional.py":
        flags += [f"--model_config_name_or_path={make_unet_config(tmp_path)}"]
        flags += ["--eval_batch_size=1", "--ddpm_num_inference_steps=1"]
    else:
        model = find_flag(words, "--pretrained_model_name_or_path")
        flags += [f"--pretrained_model_name_or_path={MAKE[model](tmp_path / 'model')}"]
        flags += ["--validation_prompts", "a digit", "--num_inference_steps=1"]
        flags += ["--num_validation_images=1", *["--rank=2"] * ("--rank" in words)]
        flags += ["--bucket_step=4"] * ("--bucket_step" in words)
        if "edit" in name:
            make_references(tmp_path / "photos")
            tiny_pipelines.make_small(monkeypatch)
            flags += ["--resolution=64", "--validation_images", "photos/0.control.png"]
        if "anima" in name:  # sides are multiples of 16 pixels
            flags += ["--bucket_step=16"]
        if "wan" in name:
            flags += ["--resolution=64", "--bucket_step=32"]
        if "2_1" in name:  # of 32
            flags += ["--resolution=64", "--bucket_step=32"]
    if "--transformer_config_name_or_path" in words:
        # the real base is a pipeline of PRX, the tiny one of Stable Diffusion
        flags += [f"--transformer_config_name_or_path={make_prx(tmp_path / 'prx')}"]
        flags += ["--model_family=prx"]
    SCRIPTS[script](*flags)
    args = SCRIPTS[script].module.parse_args(flags)
    output = tmp_path / args.output_dir
    is_lora = "--rank" in words
    result = "pytorch_lora_weights.safetensors" if is_lora else "model_index.json"
    assert (output / result).is_file() and metrics(output)[-1]["step"] == 1
    assert list((output / "samples").iterdir())
    assert len(forked) == (script != "train_unconditional.py")
    kind = "latents" if forked else "images"
    assert len([path for path in name_shared_folder(kind, None).iterdir() if path.is_dir()]) == 1


# ------------------------------------------------------------------- --cache_latents


@pytest.fixture
def flags(tmp_path):
    make_captioned(tmp_path / "photos", 6)
    models = make_models(tmp_path)
    return train.flags(
        tmp_path / "out",
        f"--train_data_dir={tmp_path / 'photos'}",
        f"--pretrained_model_name_or_path={models}",
        f"--cache_dir={tmp_path / 'cached'}",
        "--resolution=16",
        "--center_crop",
        "--cache_latents",
    )


def list_caches(folder):
    return sorted((folder / "cached/diffusion_training/latents").glob("*/state.json"))


@pytest.mark.usefixtures("without_figures")
def test_cache_latents_trains_like_a_cache_and_is_made_once(tmp_path, flags, forked, capsys):
    train(*flags)
    (state,) = list_caches(tmp_path)
    said = capsys.readouterr().out
    assert f"Encoding the images, once for all runs, into {state.parent}" in said
    assert f"Latents: {state.parent}" in said and "Next: accelerate" not in said
    assert "--cache_latents=device" in (tmp_path / "out/run.args").read_text()
    before = state.stat().st_mtime_ns
    train(*flags, "--learning_rate=2e-3", f"--output_dir={tmp_path / 'other'}")
    assert len(forked) == 1 and list_caches(tmp_path) == [state]
    assert state.stat().st_mtime_ns == before
    own = [flag for flag in flags if "train_data_dir" not in flag and flag != "--center_crop"]
    own = [flag for flag in own if flag != "--cache_latents"]
    train(*own, f"--latents_dir={state.parent}", f"--output_dir={tmp_path / 'own'}")
    (name,) = checkpoints(tmp_path / "own")
    assert_same_weights(tmp_path / f"own/{name}/unet", tmp_path / f"out/{name}/unet")


def test_cache_latents_has_a_folder_for_each_content(tmp_path, flags, monkeypatch):
    commands = []

    def note(command, environment):
        commands.append(command)

    monkeypatch.setattr(shared, "make_cache", note)
    monkeypatch.setattr(shared, "load_cache", lambda folder: Namespace(settings={"skipped": 0}))
    launch = Namespace(mixed_precision="no", device=Namespace(type="cpu"))

    def share(*more, precision="no"):
        launch.mixed_precision = precision
        args = train.module.parse_args([*flags, *more])
        return shared.cache_latents_once(launch, args, train.module.__file__).latents_dir

    first = share()
    assert share("--dataloader_num_workers=3", "--learning_rate=1", "--caption_dropout=0") == first
    others = [share(precision="bf16"), share("--random_flip"), share("--seed=1")]
    others.append(share("--shuffle_caption"))
    assert ["--text_cache=ids" in command for command in commands[-2:]] == [False, True]
    others += [share("--resolution=8"), share("--bucket_step=4")]
    (tmp_path / "sd/vae/config.json").touch()  # perhaps another model
    others.append(share())
    (tmp_path / "photos/0.png").write_bytes((tmp_path / "photos/1.png").read_bytes())
    others.append(share())
    assert len({*map(tuple, [first, *others])}) == len(others) + 1
    assert commands[0][-1] == f"--output_dir={first[0]}"
    # a CPU encodes in float32, whatever the run computes in
    assert share("--cache_latents=cpu", precision="bf16") == share("--cache_latents=cpu")
    assert "--mixed_precision=no" in commands[-1]


def test_cache_latents_starts_a_process_without_the_launchers_variables(monkeypatch):
    kept = {"HF_HOME": "/hub", "CUDA_VISIBLE_DEVICES": "1", "ACCELERATE_USE_CPU": "true"}
    for name in [*shared.RANKS, "MASTER_PORT", "ACCELERATE_MIXED_PRECISION", "GROUP_RANK", *kept]:
        monkeypatch.setenv(name, kept.get(name, "1"))
    environment = shared.list_environment("device")
    assert kept.items() <= environment.items()
    assert {*os.environ} - {*environment} == {
        *shared.RANKS, "MASTER_PORT", "ACCELERATE_MIXED_PRECISION", "GROUP_RANK"
    }  # fmt: skip
    monkeypatch.delenv("ACCELERATE_USE_CPU")
    assert "ACCELERATE_USE_CPU" not in shared.list_environment("device")
    assert shared.list_environment("cpu")["ACCELERATE_USE_CPU"] == "true"


CHILD = """
import pathlib, signal, sys, time
def end(number, frame):
    pathlib.Path(sys.argv[1], "ended").touch()
    sys.exit(143)
signal.signal(signal.SIGTERM, end)
pathlib.Path(sys.argv[1], "began").touch()
time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_reaches_the_process_that_encodes(tmp_path, number):
    (tmp_path / "child.py").write_text(CHILD)
    command = [str(tmp_path / "child.py"), str(tmp_path)]
    main = in_one_sentence(lambda args: shared.make_cache(command, dict(os.environ)))
    pids = start(lambda: main(Namespace()))
    wait_until((tmp_path / "began").exists)
    os.kill(pids[0], number)
    assert finish(pids) == [128 + number] and (tmp_path / "ended").exists()


def test_a_process_that_can_not_encode_ends_the_run_in_a_sentence():
    said = "precompute_latents.py could not encode the images"
    with pytest.raises(SystemExit, match=said) as stop:
        shared.make_cache(["-c", "raise SystemExit(3)"], dict(os.environ))
    assert stop.value.alone  # another than the first process may have got the lock


def test_cache_latents_waits_for_a_process_that_makes_the_cache(tmp_path, flags, monkeypatch):
    """Another run that encodes, or a process of a killed run that still does."""
    launch = Namespace(mixed_precision="no", device=Namespace(type="cpu"))
    args = train.module.parse_args(flags)
    calls = []

    def note(command, environment):
        calls.append(command)

    monkeypatch.setattr(shared, "make_cache", note)
    monkeypatch.setattr(shared, "load_cache", lambda folder: Namespace(settings={"skipped": 0}))
    share = lambda: shared.cache_latents_once(launch, args, train.module.__file__)
    (folder,) = map(Path, share().latents_dir)
    for path in (f"{folder}.lock", folder / ".lock"):
        calls.clear()
        with FileLock(path):
            waiting = threading.Thread(target=share)
            waiting.start()
            time.sleep(0.3)
            assert waiting.is_alive() and not calls
            (folder / "state.json").touch()  # now it is complete
        waiting.join()
        assert not calls
        (folder / "state.json").unlink()


def test_cache_latents_names_the_images_that_it_lacks(tmp_path, flags, forked, capsys):
    (tmp_path / "photos/0.png").write_bytes(b"no image")
    train(*flags)
    (state,) = list_caches(tmp_path)
    skipped = state.with_name("skipped.jsonl")
    assert f"1 image could not be used: {skipped} says why" in capsys.readouterr().out
    assert "0.png" in skipped.read_text()


DATA = """
[general]
flip_aug = true
caption_extension = ".txt"

[[datasets]]
resolution = [16, 16]
image_directory = "{0}/photos"
num_repeats = 3

[[datasets]]
resolution = 8
  [[datasets.subsets]]
  image_dir = "{0}/others"
  flip_aug = false
  caption_prefix = "sks,"
"""


@pytest.mark.ci
@pytest.mark.usefixtures("without_figures")
def test_a_data_file_becomes_a_cache_for_each_folder(tmp_path, flags, forked, monkeypatch, capsys):
    make_captioned(tmp_path / "others", 4)
    file = tmp_path / "data.toml"
    file.write_text(DATA.format(tmp_path))
    own = [flag for flag in flags if not flag.startswith(("--train_data_dir", "--resolution"))]
    content = tomllib.loads(file.read_text())
    (tmp_path / "data.json").write_text(json.dumps(content))
    assert read_data_file(str(tmp_path / "data.json")) == read_data_file(str(file))
    # a tracker takes numbers and texts, and the settings have a dict of folders
    own = [*own, f"--data={file}", "--train_batch_size=8", "--report_to=tensorboard"]
    getitem, choose = CachedLatents.__getitem__, train.module.choose_rows

    def spy(self, keys):
        batch = getitem(self, keys)
        for (_, row, _), flipped in zip(keys, batch["flipped"].tolist(), strict=True):
            mirrored[row % 10] += flipped
        return batch

    def note(*given):
        rows = choose(*given)
        counts.append(np.bincount(rows % 10).tolist())
        return rows

    counts, mirrored = [], np.zeros(10, int)
    monkeypatch.setattr(CachedLatents, "__getitem__", spy)
    monkeypatch.setattr(train.module, "choose_rows", note)
    train(*own)
    assert counts and all(each == [3] * 6 + [1] * 4 for each in counts)
    assert sum(mirrored[:6]) > 3 and not sum(mirrored[6:])  # others have no mirrored images
    commands = [" ".join(command) for command in forked]
    assert ["--random_flip" in command for command in commands] == [True, False]
    assert ["--caption_prefix=sks," in command for command in commands] == [False, True]
    assert ["--resolution=16" in command for command in commands] == [True, False]
    assert f"--data={file}\n" in (tmp_path / "out/run.args").read_text()
    report = json.loads((tmp_path / "out/report.json").read_text())
    assert "data.toml" in json.dumps(report)
    # the same command resumes, with a changed file it does not
    own += ["--resume_from_checkpoint=latest"]
    train(*own, "--num_train_epochs=2")
    capsys.readouterr()
    file.write_text(DATA.format(tmp_path).replace("num_repeats = 3", "num_repeats = 2"))
    said = train.refused(*own, "--num_train_epochs=3")
    assert (
        f"--data {file} has changed since the checkpoint ({tmp_path}/photos.num_repeats 3 -> 2)"
        in (said)
    )
    assert len(forked) == 2


@pytest.mark.ci
@pytest.mark.usefixtures("without_figures", "forked")
def test_images_of_a_folder_without_masks_count_everywhere(tmp_path, flags, monkeypatch):
    make_captioned(tmp_path / "others", 4)
    width, height = Image.open(tmp_path / "photos/0.png").size
    mask = Image.new("L", (width, height))
    mask.paste(255, (0, 0, width // 2, height))
    mask.save(tmp_path / "photos/0.mask.png")
    file = tmp_path / "data.toml"
    file.write_text(DATA.format(tmp_path))
    own = [flag for flag in flags if not flag.startswith(("--train_data_dir", "--resolution"))]
    own = [*own, f"--data={file}", "--train_batch_size=8", "--max_train_steps=4"]
    getitem = CachedLatents.__getitem__

    def spy(self, keys):
        batch = getitem(self, keys)
        assert (batch["mask"].dtype, batch["mask"].shape) == (
            torch.uint8,
            (len(keys), math.prod(batch["latents_shape"][1:])),
        )
        for (_, row, _), mask in zip(keys, batch["mask"], strict=True):
            masks.setdefault(row % 10, []).append(mask.unique().tolist())
        return batch

    masks = {}
    monkeypatch.setattr(CachedLatents, "__getitem__", spy)
    train(*own, "--checkpointing_steps=2")
    assert {*masks} == {*range(10)} and all(min(mask) == 0 for mask in masks.pop(0))
    assert all(mask == [255] for mask in sum(masks.values(), []))
    shutil.rmtree(tmp_path / "out/checkpoint-4")
    resumed = tmp_path / "resumed"
    shutil.copytree(tmp_path / "out", resumed)
    train(*own, f"--output_dir={resumed}", "--resume_from_checkpoint=latest")
    # the same bits as with a mask that is white
    white = Image.new("L", Image.open(tmp_path / "others/0.png").size, 255)
    white.save(tmp_path / "others/0.mask.png")
    train(*own, f"--output_dir={tmp_path / 'white'}")
    for folder in (resumed, tmp_path / "white"):
        assert_same_weights(tmp_path / "out/unet", folder / "unet")


@pytest.mark.usefixtures("without_figures", "forked")
def test_folders_with_and_without_buckets_do_not_mix(tmp_path, flags):
    make_captioned(tmp_path / "others", 4)
    file = tmp_path / "data.toml"
    file.write_text(DATA.format(tmp_path) + "enable_bucket = true\nbucket_reso_steps = 4\n")
    own = [flag for flag in flags if not flag.startswith(("--train_data_dir", "--resolution"))]
    said = train.refused(*own, f"--data={file}")
    assert "give all of them --bucket_step (in --data: enable_bucket), or none" in said


@pytest.mark.parametrize("old, new, sentence", [
    ("flip_aug = true", "flip = false", "remove flip (not one of image_directory, image_dir, cap"),
    ("flip_aug = true", "keep_tokens = 1\nis_reg = false\nbatch_size = 4", "remove batch_size (it "
     "is one of many guides; here: --train_batch_size), keep_tokens (give --keep_tokens)"),
    ("/others", "/photos", "photos twice: give it once, with num_repeats"),
    ("/others", "/none", "/none is not a folder"),
    ("num_repeats = 3", "num_repeats = 0", "its num_repeats is 0: it must be at least 1"),
    ("num_repeats = 3", "num_repeats = true", "its num_repeats is True, not one int"),
    ("[16, 16]", "[960, 544]", "its resolution is 960 x 544: give the side of a square of this are"
     "a, 720"),
    ("[16, 16]", "[16]", "its resolution is [16], not one int"),
    ("[general]", "[generally]", "it has generally, but only general and datasets are read"),
    ("[general]", "[general", "can't be used: "),
    ("[16, 16]", "[-1, 16]", "its resolution is [-1, 16], not one int"),
    ('image_dir = "{0}/others"', "", "one of its [[datasets]] has no image_directory"),
])  # fmt: skip
def test_a_data_file_that_can_not_be_used_ends_in_a_sentence(tmp_path, flags, old, new, sentence):
    (tmp_path / "others").mkdir()
    file = tmp_path / "data.toml"
    assert old in DATA
    file.write_text(DATA.replace(old, new).format(tmp_path))
    own = [flag for flag in flags if not flag.startswith("--train_data_dir")]
    assert sentence in train.refused(*own, f"--data={file}", status=2)


@pytest.mark.parametrize("content, sentence", [
    ("datasets = 1", "its datasets is 1, not a list of tables"),
    ("[datasets]", "its datasets is {}, not a list of tables"),
    ("datasets = [1]", "its datasets is [1], not a list of tables"),
    ("general = 1", "its general is 1, not a table"),
    ("[[general]]", "its general is [{}], not a table"),
    ("[[datasets]]\nsubsets = 1", "its subsets is 1, not a list of tables"),
    ("[[datasets]]\nsubsets = ['x']", "its subsets is ['x'], not a list of tables"),
    (f"datasets = {'[' * 10**5}", "recursion depth exceeded"),
    (f"[[datasets]]\nresolution = '{'a' * 5000}'", f"its resolution is '{'a' * 99}, not one int\n"),
])  # fmt: skip
def test_a_data_file_of_another_form_ends_in_a_short_sentence(tmp_path, flags, content, sentence):
    file = tmp_path / "data.toml"
    file.write_text(content)
    own = [flag for flag in flags if not flag.startswith("--train_data_dir")]
    assert sentence in train.refused(*own, f"--data={file}", status=2)


def test_a_data_file_is_the_only_source_of_images(tmp_path, flags):
    said = train.refused(*flags, "--data=none.toml", status=2)
    assert "--train_data_dir can't be combined with --data" in said
    own = [flag for flag in flags if not flag.startswith("--train_data_dir")]
    said = train.refused(*own, "--data=none.toml", status=2)
    assert "--data none.toml can't be used: [Errno 2]" in said
    (tmp_path / "data.json").write_text("[]")
    said = train.refused(*own, f"--data={tmp_path / 'data.json'}", status=2)
    assert "it is no table of datasets" in said


@pytest.mark.ci
@pytest.mark.usefixtures("without_figures")
def test_several_resolutions_train_each_image_once_an_epoch_and_resume(
    tmp_path, flags, forked, monkeypatch, capsys
):
    """The size of an image is drawn anew in each epoch; the held-out loss has the first size."""
    shapes = {True: [], False: []}  # in training, and otherwise
    predict = train.module.predict_noise

    def spy(models, noisy, *given):
        if not noisy.is_meta:
            shapes[models["unet"].training].append((len(noisy), noisy.shape[-1]))
        return predict(models, noisy, *given)

    monkeypatch.setattr(train.module, "predict_noise", spy)
    flags = [*flags, "--resolution", "8", "16", "--holdout=2", "--train_batch_size=2"]
    flags += ["--max_train_steps=12", "--checkpointing_steps=4"]
    train(*flags)
    assert "Held out: 2 of 6 images" in capsys.readouterr().out
    states = sorted((tmp_path / "cached/diffusion_training/latents").glob("*/*/state.json"))
    assert [state.parent.name for state in states] == ["16", "8"] and len(forked) == 1
    trained = [shape for shape in shapes[True] if shape[0] <= 2]
    assert {side for _, side in trained} == {4, 8}
    held_out = [side for count, side in shapes[False] if count == 9]
    assert held_out and {*held_out} == {4}  # 8 px: the first size
    assert ["8", "16"] == shlex.split(
        (tmp_path / "out/run.args").read_text().split("--resolution ")[1].split("\n")[0]
    )
    shutil.copytree(tmp_path / "out", tmp_path / "killed")
    for name in ("checkpoint-8", "checkpoint-12"):
        shutil.rmtree(tmp_path / "killed" / name)
    resumed = [*flags, f"--output_dir={tmp_path / 'killed'}", "--resume_from_checkpoint=latest"]
    train(*resumed)
    assert_same_weights(
        *(tmp_path / f"{folder}/checkpoint-12/unet" for folder in ("out", "killed"))
    )
    # which rows epochs take
    caches = {str(side): load_cache(states[i].parent) for i, side in ((1, 8), (0, 16))}
    dataset = CachedLatents(caches, 0, False)
    names = [*dataset.names()]
    assert dataset.groups == [[0, 1]] and names[:6] == names[6:]
    own = np.array([0, 1, 2, 4, 5, 6, 7, 8, 10, 11])  # image 3 is held out
    drawn = np.zeros(12)
    for epoch in range(300):
        rows = choose_rows(own, dataset, [0.75, 0.25], epoch)
        assert sorted(rows % 6) == [0, 1, 2, 4, 5] and np.array_equal(
            rows, choose_rows(own, dataset, [0.75, 0.25], epoch)
        )
        drawn[rows] += 1
    assert drawn.sum() == 1500 and 0.7 < drawn[:6].sum() / 1500 < 0.8
    assert (drawn[[0, 1, 2, 4, 5, 6, 7, 8, 10, 11]] > 40).all()
    twice = choose_rows(own, dataset, [1.0, 1.0], 0)
    assert sorted(twice % 6) == sorted([0, 1, 2, 4, 5] * 2)
    assert len({*twice}) == 10


@pytest.mark.parametrize(
    "more, sentence",
    [
        (["--resolution", "8", "16", "--no-cache_latents"], "several values of --resolution need"),
        (["--resolution", "8", "8"], "gives a value twice"),
        (
            ["--resolution", "8", "16", "--latents_weights", "1"],
            "--latents_weights needs a value for each --resolution: 2, not 1",
        ),
        (["--streaming", "--max_train_steps=1"], "--cache_latents stores the latents of all"),
        (["--latents_dir=x"], "--latents_dir can't be combined with"),
    ],
)
def test_cache_latents_refuses_flags_that_do_not_fit(flags, more, sentence):
    assert sentence in train.refused(*flags, *more, status=2)


def test_a_recipe_without_images_asks_for_them_and_takes_an_own_cache(tmp_path):
    recipe = f"@{RECIPES['sdxl_lora']}"
    assert "give images: --train_data_dir FOLDER" in train.refused(recipe, status=2)
    args = train.module.parse_args([recipe, f"--latents_dir={tmp_path}"])
    assert args.latents_dir == [str(tmp_path)] and args.rank == 16


@pytest.mark.long
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_killed_runs_of_two_processes_finish_the_cache(tmp_path, flags, number):
    """Real processes: the launcher is stopped or killed while precompute_latents.py encodes."""
    make_captioned(tmp_path / "photos", 200)
    words = ["accelerate.commands.launch", "--multi_gpu", "--num_processes=2"]
    command = [sys.executable, "-m", *words, "--main_process_port=0", "train_text_to_image.py"]
    command += [*flags, "--max_train_steps=2", "--dataloader_num_workers=0"]
    env = os.environ | {"ACCELERATE_USE_CPU": "true"}
    run = lambda: subprocess.Popen(command, cwd=ROOT, env=env, start_new_session=True)
    caches = tmp_path / "cached/diffusion_training/latents"
    first = run()
    wait_until(lambda: list(caches.glob("*/cache.json")), 200)
    os.killpg(first.pid, number) if number == signal.SIGKILL else os.kill(first.pid, number)
    assert first.wait() != 0
    second = run()
    assert second.wait() == 0
    (state,) = list_caches(tmp_path)
    assert load_cache(str(state.parent)).settings["rows"] == 200
    (name,) = checkpoints(tmp_path / "out")
    assert name == "checkpoint-2"
