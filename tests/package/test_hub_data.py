"""Data sets by their ids on a hub: each form that people publish, whole and as a stream."""

import io
import json
import os
import re
import shlex
import subprocess
import sys
import tarfile
import zipfile

import datasets
import numpy as np
import pytest
from conftest import (
    MODELS,
    ROOT,
    Script,
    assert_same_weights,
    make_klein,
    make_models,
    make_sdxl,
    make_unet_config,
)
from huggingface_hub import constants
from PIL import Image

import precompute_latents
from diffusion_training.data.images import decode_image
from diffusion_training.data.references import add_references
from diffusion_training.data.rows import load_rows
from diffusion_training.errors.sentences import Refused
from diffusion_training.latents.reader import load_cache

NAMES = [f"{number}.png" for number in range(5)]
CARD = """---
configs:
- config_name: whole
  data_files:
  - split: train
    path: all/train-*
- config_name: first
  data_files:
  - split: train
    path: all/train-00000*
---
"""


def draw(seed, side=24):
    """A PNG of random colours."""
    pixels = np.random.default_rng(seed).integers(0, 255, (8, 8, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).resize((side, side), Image.NEAREST).save(file, "PNG")
    return file.getvalue()


IMAGES = {name: draw(number) for number, name in enumerate(NAMES)}
BEFORE = {name: draw(number + 10) for number, name in enumerate(NAMES)}
CAPTIONS = {name: f"digit {number}" for number, name in enumerate(NAMES)}


def describe(**columns):
    """metadata.jsonl. columns: {column: a function of an image's name}."""
    columns = {"file_name": str, "text": CAPTIONS.get, **columns}
    rows = [{column: get(name) for column, get in columns.items()} for name in NAMES]
    return {"metadata.jsonl": "\n".join(map(json.dumps, rows)).encode()}


def pack(folder="data", **columns):
    """Two parquet files, as `push_to_hub` of `datasets` writes them."""
    rows = datasets.Dataset.from_dict({"image": [*IMAGES.values()], "text": [*CAPTIONS.values()]})
    for name, images in columns.items():
        rows = rows.add_column(name, [*images.values()])
    for name in ("image", *columns):
        rows = rows.cast_column(name, datasets.Image())
    files = {}
    for number in range(2):
        file = io.BytesIO()
        rows.shard(2, number, contiguous=True).to_parquet(file)
        files[f"{folder}/train-0000{number}-of-00002.parquet"] = file.getvalue()
    return files


def archive(**endings):
    """Two tars of a webdataset. endings: {ending of further files: {name: content}}."""
    files = {}
    for number in range(2):
        file = io.BytesIO()
        with tarfile.open(fileobj=file, mode="w") as tar:
            for name in NAMES[number * 3 : number * 3 + 3]:
                parts = {".png": IMAGES[name], ".txt": CAPTIONS[name].encode()}
                for ending, content in endings.items():
                    parts[f".{ending}.png"] = content[name]
                for end, content in parts.items():
                    about = tarfile.TarInfo(name.replace(".png", end))
                    about.size = len(content)
                    tar.addfile(about, io.BytesIO(content))
        files[f"{number:05d}.tar"] = file.getvalue()
    return files


def compress():
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archived:
        for name, content in {**IMAGES, **describe()}.items():
            archived.writestr(name, content)
    return {"images.zip": file.getvalue()}


def put_beside(ending, contents):
    return {name.replace(".png", ending): content for name, content in contents.items()}


FORMS = {  # name -> (its files, flags)
    "metadata": (IMAGES | describe(), []),
    "split": ({f"train/{name}": data for name, data in (IMAGES | describe()).items()}, []),
    "parquet": (pack(), []),
    "configs": (pack("all") | {"README.md": CARD.encode()}, ["--dataset_config_name=whole"]),
    "tars": (archive(), ["--caption_column=txt"]),
    "zip": (compress(), []),
    "edits in parquet": (pack(before=BEFORE), ["--conditioning_image_column=before"]),
    "edits in a folder": (
        IMAGES
        | {f"before/{name}": content for name, content in BEFORE.items()}
        | describe(before_file_name=lambda name: f"before/{name}"),
        ["--conditioning_image_column=before"],
    ),
    "edits in tars": (
        archive(control=BEFORE),
        ["--caption_column=txt", "--image_column=png", "--conditioning_image_column=control.png"],
    ),
}


def write(folder, files):
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def read(*flags):
    """The rows of a data set as a script reads them, with images as pixels, in any order."""
    args = precompute_latents.parse_args([f"--pretrained_model_name_or_path={MODELS}", *flags])
    opened = load_rows(args, args.streaming, [args.caption_column], add_references=add_references)
    found = []
    for item in opened.rows:
        images = (each for each in item.values() if isinstance(each, dict))
        decoded = (decode_image(each, 3, allowed=opened.allowed) for each in images)
        found.append((item[args.caption_column], [image.numpy().tobytes() for image in decoded]))
    return sorted(found)


@pytest.mark.parametrize(
    "form",
    [form if form == "parquet" else pytest.param(form, marks=pytest.mark.long) for form in FORMS],
)
def test_a_data_set_of_the_hub_has_the_rows_of_its_folder(hub, tmp_path, monkeypatch, form):
    files, flags = FORMS[form]
    hub.add("org/data", files, kind="datasets")
    folder = write(tmp_path / "folder", files)
    expected = read(f"--dataset_name={folder}", *flags)
    assert [caption for caption, _ in expected] == [*CAPTIONS.values()]
    assert {len(pixels) for _, pixels in expected} == {2 if "edits" in form else 1}
    by_id = ["--dataset_name=org/data", *flags, f"--cache_dir={tmp_path / 'cache'}"]
    assert read(*by_id) == expected
    if "edits" not in form:  # refused by parse_args
        assert read(*by_id, "--streaming") == expected
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    hub.requests.clear()
    assert read(*by_id) == expected and not hub.requests


CIFAR = """---
configs:
- config_name: plain_text
  data_files:
  - split: train
    path: plain_text/train-*
  - split: test
    path: plain_text/test-*
  default: true
---
"""


@pytest.mark.long
def test_the_command_for_cifar10_trains_by_its_id(hub, tmp_path, monkeypatch, capsys):
    """The README's command, on five images in the columns and files of `uoft-cs/cifar10`."""
    names = datasets.ClassLabel(names=["airplane", "automobile", "bird", "cat", "deer"])
    features = datasets.Features({"img": datasets.Image(), "label": names})
    files = {"README.md": CIFAR.encode()}
    for split, start in {"train": 0, "test": 50}.items():
        images = [draw(start + number, side=32) for number in range(5)]
        rows = datasets.Dataset.from_dict({"img": images, "label": [*range(5)]}, features)
        file = io.BytesIO()
        rows.to_parquet(file)
        files[f"plain_text/{split}-00000-of-00001.parquet"] = file.getvalue()
    hub.add("uoft-cs/cifar10", files, kind="datasets")
    page = (ROOT / "README.md").read_text()
    (written,) = re.findall(r"`(--dataset_name uoft-cs/cifar10 [^`]*)`", page)
    monkeypatch.chdir(ROOT)  # for @recipes
    command = ["@recipes/unet_64_8gb.args", *shlex.split(written)]
    assert command[1] in page and (ROOT / "configs/unet_32.json").is_file()
    curves = "diffusion_training.training.showing.report.draw_curves"
    monkeypatch.setattr(curves, lambda *args, **more: None)
    train = Script("train_unconditional")
    small = [f"--model_config_name_or_path={make_unet_config(tmp_path)}", "--max_train_steps=1"]
    small += ["--lr_warmup_steps=0", "--total_batch_size=2", "--ddpm_num_inference_steps=1"]
    small += ["--train_batch_size=1", "--mixed_precision=no"]
    train(*command, *small, "--dataloader_num_workers=0", f"--output_dir={tmp_path / 'out'}")
    assert (tmp_path / "out/model_index.json").is_file()
    assert "Epoch: 5 images" in capsys.readouterr().out  # not those of the other split
    read_by_id = datasets.load_dataset("uoft-cs/cifar10", split="train")
    assert read_by_id["label"][:] == [*range(5)] and read_by_id.column_names == ["img", "label"]


@pytest.mark.long
@pytest.mark.usefixtures("without_figures")
def test_the_command_for_a_captioned_data_set_trains_by_its_id(hub, tmp_path, capsys, monkeypatch):
    """That of data.md, on a tiny SDXL and five images in the columns of diffusers' example."""
    hub.add("lambdalabs/naruto-blip-captions", FORMS["parquet"][0], kind="datasets")
    page = (ROOT / "docs/data.md").read_text().partition("### A captioned data set of the hub")[2]
    command = page.partition("python train_text_to_image.py")[2].partition("```")[0]
    command = shlex.split(command.replace("\\\n", " "))
    assert "lambdalabs/naruto-blip-captions" in command
    monkeypatch.chdir(ROOT)  # for @recipes
    make_sdxl(tmp_path)
    small = [f"--pretrained_model_name_or_path={tmp_path / 'sdxl'}", "--resolution=16"]
    small += ["--bucket_step=8", "--max_train_steps=2", "--num_validation_images=1"]
    small += ["--checkpointing_steps=2", "--validation_steps=2", "--dataloader_num_workers=0"]
    small += [f"--cache_dir={tmp_path / 'cache'}", f"--output_dir={tmp_path / 'out'}"]
    small += ["--mixed_precision=no", "--rank=2", "--num_inference_steps=1"]
    Script("train_text_to_image")(*command, *small)
    assert (tmp_path / "out/pytorch_lora_weights.safetensors").is_file()
    assert "5 images" in capsys.readouterr().out


@pytest.mark.parametrize(
    "files, what",
    [
        (put_beside(".txt", {name: b"one" for name in NAMES}), "captions in files"),
        (put_beside(".mask.png", BEFORE) | describe(), "masks"),
        (put_beside(".control.png", BEFORE) | describe(), "references"),
    ],
)
def test_files_beside_the_images_of_the_hub_are_never_left_out_silently(hub, files, what):
    hub.add("org/data", IMAGES | files, kind="datasets")
    with pytest.raises(Refused) as stop:
        read("--dataset_name=org/data")
    assert str(stop.value) == (
        f"org/data has {what} beside the images, which are read from a folder: run `hf download "
        "org/data --repo-type dataset --local-dir FOLDER`, then give --dataset_name FOLDER"
    )
    assert not hub.downloads()


def read_latents(folder):
    """The latents and embeddings of a cache, by their captions."""
    columns = ["text", "latents", "prompt_embeds"]
    rows = datasets.load_from_disk(str(folder)).select_columns(columns)
    return sorted(map(repr, rows))


@pytest.mark.long
@pytest.mark.parametrize("form", ["metadata", "parquet", "tars"])
def test_caches_and_training_from_the_hub_are_those_of_a_folder(hub, tmp_path, form):
    files, flags = FORMS[form]
    hub.add("org/data", files, kind="datasets")
    folder = write(tmp_path / "folder", files)
    base = [f"--pretrained_model_name_or_path={make_models(tmp_path)}", "--resolution=16"]
    precompute, train = Script("precompute_latents"), Script("train_text_to_image")
    encode = [*base, *flags, "--dataloader_num_workers=0", "--batch_size=1"]
    precompute(*encode, f"--dataset_name={folder}", f"--output_dir={tmp_path / 'disk'}")
    for name, more in {"whole": [], "stream": ["--streaming"]}.items():
        by_id = ["--dataset_name=org/data", *more]
        precompute(*encode, *by_id, f"--output_dir={tmp_path / name}")
        assert read_latents(tmp_path / name) == read_latents(tmp_path / "disk")
    by_step = train.flags(tmp_path / "of-disk", *base, *flags, "--max_train_steps=2")
    by_step += ["--dataloader_num_workers=0"]
    train(*by_step, f"--dataset_name={folder}")
    train(*by_step, "--dataset_name=org/data", f"--output_dir={tmp_path / 'of-hub'}")
    if form != "metadata":  # whose images have other names, which decide their order
        assert_same_weights(tmp_path / "of-disk/unet", tmp_path / "of-hub/unet")
    train(*by_step, "--dataset_name=org/data", "--streaming", f"--output_dir={tmp_path / 's'}")
    assert (tmp_path / "s/unet").is_dir()


@pytest.mark.long
def test_edits_of_the_hub_are_encoded(hub, tmp_path):
    pairs = {name: draw(number, side=64) for number, name in enumerate(NAMES)}
    hub.add("org/data", pack(before=pairs), kind="datasets")
    base = f"--pretrained_model_name_or_path={make_klein(tmp_path / 'base')}"
    flags = [base, "--dataset_name=org/data", "--conditioning_image_column=before"]
    flags += ["--resolution=64", "--dataloader_num_workers=0", f"--output_dir={tmp_path / 'out'}"]
    Script("precompute_latents")(*flags)
    settings = load_cache(tmp_path / "out").settings
    assert settings["rows"] == len(NAMES) and settings["references"]["count"] == 1


@pytest.mark.long
def test_ray_encodes_a_data_set_and_models_of_the_hub(hub, tmp_path):
    pytest.importorskip("ray", reason="Ray is not installed: pip install -r requirements-ray.txt")
    hub.add("org/base", make_models(tmp_path))
    hub.add("org/data", pack(), kind="datasets")
    environment = {**os.environ, **hub.env, "RAY_AUTH_MODE": "disabled"}
    environment = {name: value for name, value in environment.items() if value is not None}
    outputs = {}
    for script in ("precompute_latents", "precompute_latents_ray"):
        command = [sys.executable, ROOT / f"{script}.py", "--dataset_name=org/data"]
        command += ["--pretrained_model_name_or_path=org/base", "--resolution=16"]
        command += ["--batch_size=2", f"--output_dir={tmp_path / script}"]
        subprocess.run(command, env=environment, check=True, cwd=tmp_path)
        outputs[script] = (tmp_path / script / "cache.json").read_text()
    assert outputs["precompute_latents"] == outputs["precompute_latents_ray"]
    counts = {path: hub.downloads().count(path) for path in hub.files("org/base")}
    assert max(counts.values()) == 1 and counts["vae/diffusion_pytorch_model.safetensors"]
