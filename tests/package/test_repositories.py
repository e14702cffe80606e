"""Models by their ids on a hub: what is asked for, and what is fetched."""

import collections
import hashlib
import io
import json
import os
import re
import shutil
import sys
from dataclasses import replace

import diffusers
import pytest
import tiny_pipelines
import torch
from conftest import (
    TRAINING,
    Script,
    assert_same_weights,
    finish,
    make_captioned,
    make_dino,
    make_images,
    make_models,
    make_sdxl,
    start,
)
from huggingface_hub import constants
from safetensors.torch import load, load_file, save

import precompute_latents
from diffusion_training import repositories
from diffusion_training.errors.sentences import Refused
from diffusion_training.families.base import Base, Family
from diffusion_training.families.opening import open_base
from diffusion_training.repositories import open_repository

FIRST = ("model_index.json",)
JUNK = b"these are no weights"


def open_base_repository(revision=None):
    return open_repository("org/base", FIRST, revision, None)


def count_requests(hub):
    """{(method, path): how often} of what was asked of the hub, not of the storage."""
    asked = ((each.method, each.path) for each in hub.requests if each.host == "hub")
    return collections.Counter(asked)


def name_files(*names):
    files = {name: name.encode() for name in ("model_index.json", *names)}
    shards = ["model-00001-of-00002", "model-00002-of-00002"]
    for name in names:
        if ".index." in name:
            kind = "bin" if ".bin." in name else "safetensors"
            weights = {"a": f"{shards[0]}.{kind}", "b": f"{shards[1]}.{kind}"}
            files[name] = json.dumps({"weight_map": weights}).encode()
    return files


def slow_except_first(cases):
    return [cases[0], *(pytest.param(*case, marks=pytest.mark.long) for case in cases[1:])]


@pytest.mark.parametrize(
    "held, variant, weights",
    slow_except_first([
        ("model.safetensors.index.json model-00001-of-00002.safetensors model.fp16.safetensors "
         "model-00002-of-00002.safetensors pytorch_model.bin model.onnx flax_model.msgpack", None,
         "model-00001-of-00002.safetensors model-00002-of-00002.safetensors"),
        ("model.safetensors model.fp16.safetensors", None, "model.safetensors"),
        ("model.safetensors model.fp16.safetensors", "fp16", "model.fp16.safetensors"),
        ("diffusion_pytorch_model.bin diffusion_pytorch_model.fp16.bin", "fp16",
         "diffusion_pytorch_model.fp16.bin"),
        ("pytorch_model.bin.index.json model-00001-of-00002.bin model-00002-of-00002.bin "
         "model-00001-of-00003.bin tf_model.h5", None,
         "model-00001-of-00002.bin model-00002-of-00002.bin"),
        ("model.safetensors", "fp16", ""),
        ("", None, ""),
    ]),
)  # fmt: skip
def test_one_set_of_weights_is_fetched_without_other_files(hub, held, variant, weights):
    here = [f"part/{name}" for name in ("config.json", "merges.txt", *held.split())]
    others = ["sd.safetensors", "README.md", "picture.png", "other/config.json"]
    others += ["part/picture.png", "part/nested/config.json", "other/model.safetensors"]
    others += ["part2/config.json"]
    hub.add("org/base", name_files(*here, *others))
    repository = open_base_repository()
    repository.fetch("part", variant, with_weights=False)
    small = {"model_index.json", *(name for name in here if name.endswith((".json", ".txt")))}
    assert set(hub.downloads()) == small
    repository.fetch("part", variant)
    fetched = small | {f"part/{name}" for name in weights.split()}
    assert sorted(hub.downloads()) == sorted(fetched)  # each once
    asked = count_requests(hub)
    repository.fetch("part", variant)
    assert count_requests(hub) == asked
    assert (repository.folder / "part/config.json").read_bytes() == b"part/config.json"


def test_weights_of_another_digest_than_the_hub_lists_are_deleted(hub):
    """A mirror may give another file of the same size."""
    content = bytes(1000)
    hub.add("org/base", {"model_index.json": b"{}", "unet/model.safetensors": content})
    stored = {hashlib.sha256(content).hexdigest(): b"\1" + content[1:]}
    hub.fail("/lfs/*", method="GET", times=2, then=lambda: hub.stored.update(stored))
    repository = open_base_repository()
    path = repository.folder / "unet/model.safetensors"
    for _ in range(2):
        with pytest.raises(SystemExit, match="unet/model.safetensors of org/base has another SHA"):
            repository.fetch("unet")
        assert not path.exists() and not os.path.lexists(path)
    repository.fetch("unet")
    assert path.read_bytes() == content


@pytest.mark.parametrize("is_hub", [True, False])
def test_weights_that_are_there_only_as_a_variant_are_named(hub, tmp_path, is_hub):
    held = ["config.json", "model.fp16-00001-of-00002.safetensors", "model.fp32.safetensors"]
    said = "its weights are there only as fp16: give --variant fp16"
    if is_hub:
        hub.add("org/base", name_files(*(f"part/{name}" for name in held)))
        with pytest.raises(FileNotFoundError, match=said):
            open_base_repository().fetch("part")
        return
    (tmp_path / "part").mkdir()
    for name in held:
        (tmp_path / "part" / name).write_bytes(b"")
    base = Base(Family(), "x", str(tmp_path), {})
    with pytest.raises(FileNotFoundError, match=said):
        base.locate(None, "part")
    base.locate(None, "part", with_weights=False)
    replace(base, variant="fp16").locate(None, "part")


def test_a_repository_of_single_files_is_named_as_one(hub):
    hub.add("org/base", {"README.md": b"", "a.safetensors": b"", "x/b.safetensors": b""})
    said = "it has no model_index.json, but 1 single file such as a.safetensors: download one and"
    with pytest.raises(FileNotFoundError, match=said):
        open_base_repository()


def test_a_warm_start_asks_twice_and_all_files_are_of_one_commit(hub):
    files = name_files("unet/config.json", "unet/model.safetensors", "vae/config.json")
    hub.add("org/base", files)
    hub.add("org/base", files, revision="v1")
    first = open_base_repository("v1")
    first.fetch("unet")
    # the branch moves during the run
    changed = {name: b"{}" + content for name, content in files.items()}
    hub.add("org/base", changed, revision="v1")
    first.fetch("vae")
    assert (first.folder / "vae/config.json").read_bytes() == files["vae/config.json"]
    assert open_base_repository("v1") is first  # asked once in a process
    open_repository.cache_clear()
    second = open_base_repository("v1")
    second.fetch("vae")
    assert (second.folder / "vae/config.json").read_bytes() == changed["vae/config.json"]
    hub.requests.clear()
    open_repository.cache_clear()
    open_base_repository("v1").fetch("vae")
    assert [each.path for each in hub.requests] == [
        "/org/base/resolve/v1/model_index.json",
        f"/api/models/org/base/revision/{second.folder.name}",
    ]


def test_without_a_network_the_cache_is_used(hub, monkeypatch, capsys):
    hub.add("org/base", name_files("unet/config.json", "unet/model.safetensors", "vae/config.json"))
    open_base_repository().fetch("unet")
    open_repository.cache_clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.requests.clear()
    repository = open_base_repository()
    repository.fetch("unet")
    repository.fetch("vae")  # `from_pretrained` says that it is missing
    assert not hub.requests
    assert "org/base is read from the local cache, because the hub" in capsys.readouterr().out
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    open_repository.cache_clear()
    hub.fail("*", status=503, times=100)
    open_base_repository().fetch("unet")
    open_repository.cache_clear()
    hub.faults.clear()
    hub.add("org/base", hub.files("org/base"))  # of which nothing is in the cache
    hub.fail("/api/*", status=429, times=100)
    with pytest.raises(Exception, match="429"):
        open_base_repository()


def test_a_base_is_read_with_its_revision_and_variant_from_its_cache(hub, tmp_path):
    index = json.dumps({"_class_name": "PRXPipeline"}).encode()
    files = {
        "model_index.json": index,
        "vae/model.v.safetensors": b"1",
        "vae/model.safetensors": JUNK,
    }
    hub.add("some/base", {"model_index.json": JUNK})
    hub.add("some/base", files, revision="r")
    hub.add("own/vae", {"config.json": b"{}", "model.safetensors": b"2"})
    flags = ["--pretrained_model_name_or_path=some/base", "--dataset_name=some/data"]
    flags += ["--revision=r", "--variant=v", f"--cache_dir={tmp_path / 'own'}"]
    args = precompute_latents.parse_args([*flags, "--vae_name_or_path=own/vae"])
    base = open_base(args)
    source, options = base.locate(None, "vae")
    assert options == {"subfolder": "vae", "variant": "v"}
    assert source.startswith(f"{tmp_path / 'own'}/models--some--base/snapshots/{base.commit}")
    own, options = base.locate(base.vae, "vae")
    assert own.startswith(f"{tmp_path / 'own'}/models--own--vae/snapshots/") and options == {}
    fetched = ["model_index.json", "config.json", "vae/model.v.safetensors", "model.safetensors"]
    assert hub.downloads() == fetched


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_large_download_has_a_bar_and_says_where_it_goes(hub, monkeypatch, capsys):
    monkeypatch.setattr(repositories, "SHOWN", 1000)
    hub.add("org/base", name_files("unet/config.json") | {"unet/model.safetensors": b"0" * 5000})
    repository = open_base_repository()
    place = str(repository.folder.parent.parent)
    free = shutil.disk_usage(place)._replace(free=4000)
    with monkeypatch.context() as context, pytest.raises(Refused) as stop:
        context.setattr(shutil, "disk_usage", lambda path: free)
        repository.fetch("unet")
    assert re.fullmatch(
        rf"org/base needs 5e-06 GB in {place}, and the disk has only 4e-06 GB free: make room, "
        "or give --cache_dir on another disk",
        str(stop.value),
    )
    assert "unet/model.safetensors" not in hub.downloads() and not capsys.readouterr().out
    terminal = Terminal()
    with monkeypatch.context() as context:
        context.setattr(sys, "stderr", terminal)
        repository.fetch("unet")
    assert capsys.readouterr().out == f"Downloading 5e-06 GB of org/base to {place}\n"
    bars = terminal.getvalue().split("\r")
    assert any(re.search(r"\b5\.00kB? ?/ ?5\.00kB?\b", bar) for bar in bars), bars
    # a commit that has the same file
    hub.add("org/base", hub.files("org/base") | {"unet/config.json": b"{}"})
    open_repository.cache_clear()
    open_base_repository().fetch("unet")
    assert not capsys.readouterr().out


def test_an_error_names_a_repository_by_its_id():
    folder = f"/home/me/hf/models--org--my.base/snapshots/{'0a' * 20}"
    said = str(Refused(f"{folder}/vae is damaged (it is in '{folder}')"))
    assert said == "org/my.base/vae is damaged (it is in 'org/my.base')"


@pytest.mark.long
def test_two_processes_on_an_empty_cache_fetch_each_file_once(hub, tmp_path):
    names = [f"part{number}/model.safetensors" for number in range(20)]
    hub.add("org/base", name_files(*names) | {name: name.encode() * 5000 for name in names})

    def fetch():
        repository = open_base_repository()
        for name in names:
            repository.fetch(name.split("/")[0])

    pids = start(fetch, 1, str(tmp_path / "1")) + start(fetch, 1, str(tmp_path / "2"))
    assert finish(pids) == [0, 0]
    assert sorted(x for x in hub.downloads() if x != FIRST[0]) == sorted(names)


# ------------------------------------------------------------------------------------- scripts


def make(function):
    def make_base(folder):
        function(folder / "base")
        return folder / "base"

    return make_base


MAKE = {  # name -> (a function that makes a pipeline in a folder, its trainer)
    "sd": (make_models, "train_text_to_image"),
    "sdxl": (make_sdxl, "train_text_to_image"),
    "z-image": (make(tiny_pipelines.make_z_image), "train_flow"),
    "recorded": (make(tiny_pipelines.MAKE["flux"]), "train_flow"),
    "modular": (make(tiny_pipelines.BLOCKS["flux3"]), "train_flow"),
}


def add_decoys(files):
    """Add what repositories hold besides: other formats, single files, pictures."""
    decoys = {"README.md", "picture.png", "whole.safetensors", "onnx/config.json"}
    for name in files:
        folder, _, file = name.rpartition("/")
        if file.endswith(".safetensors"):
            decoys |= {f"{folder}/{stem}" for stem in ("pytorch_model.bin", "model.onnx")}
            decoys.add(f"{folder}/diffusion_pytorch_model.bin")
            decoys |= {
                f"{name.removesuffix('.safetensors')}.{x}.safetensors" for x in ("fp16", "x")
            }
    return dict.fromkeys(decoys, JUNK) | files


def shard(files):
    """Split each file of weights in two, with an index, as large models have it."""
    sharded = {}
    for name, content in files.items():
        folder, _, file = name.rpartition("/")
        if not file.endswith(".safetensors"):
            sharded[name] = content
            continue
        weights = sorted(load(content).items())
        stem = file.removesuffix(".safetensors")
        index = {}
        for number in (1, 2):
            part = dict(weights[number - 1 :: 2])
            path = f"{stem}-{number:05d}-of-00002.safetensors"
            sharded[f"{folder}/{path}"] = save(part)
            index |= dict.fromkeys(part, path)
        content = json.dumps({"metadata": {}, "weight_map": index}).encode()
        sharded[f"{folder}/{file}.index.json"] = content
    return sharded


def rename(files, variant):
    return {
        name.replace(".safetensors", f".{variant}.safetensors"): content
        for name, content in files.items()
    }


def take_requests(hub):
    """What one run has asked: (downloaded files, how often for the list of a repository)."""
    counts = count_requests(hub)
    assert set(counts.values()) <= {1}, counts
    lists = [path for _, path in counts if "/api/models/" in path]
    downloaded = hub.downloads()
    hub.requests.clear()
    open_repository.cache_clear()  # as in another process
    return {name.rpartition("/")[0] for name in downloaded}, downloaded, len(lists)


@pytest.mark.usefixtures("without_figures")
@pytest.mark.parametrize(
    "kind, form",
    slow_except_first([
        ("sd", "fp16"), ("recorded", "fp16"), *((kind, "plain") for kind in MAKE),
        *((kind, "sharded") for kind in ("sdxl", "z-image", "modular")),
    ]),
)  # fmt: skip
def test_a_run_by_id_fetches_what_it_needs_and_has_the_bits_of_a_folder(
    hub, tmp_path, monkeypatch, kind, form
):
    make_base, trainer = MAKE[kind]
    folder = make_base(tmp_path)
    files = {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }
    needed = {"plain": files, "sharded": shard(files), "fp16": rename(files, "fp16")}[form]
    held = add_decoys(needed) if form != "fp16" else dict.fromkeys(files, JUNK) | needed
    hub.add("org/base", {"model_index.json": JUNK})
    hub.add("org/base", held, revision="v1")
    make_captioned(tmp_path / "data", 4)
    cache_dir = tmp_path / "models"
    by_id = ["--pretrained_model_name_or_path=org/base", "--revision=v1"]
    by_id += [f"--cache_dir={cache_dir}", *["--variant=fp16"] * (form == "fp16")]
    if form == "sharded":  # a CPU rounds by where a weight lies in memory, thus in its file
        for path, content in needed.items():
            place = tmp_path / "sharded" / path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(content)
        folder = tmp_path / "sharded"
    by_folder = [f"--pretrained_model_name_or_path={folder}"]
    data = ["--resolution=16", "--center_crop", f"--train_data_dir={tmp_path}/data"]
    precompute, train = Script("precompute_latents"), Script(trainer)
    denoiser = "unet" if kind.startswith("sd") else "transformer"

    precompute(*by_id, *data, f"--output_dir={tmp_path}/latents", "--dataloader_num_workers=0")
    _, fetched, lists = take_requests(hub)
    weights = (".safetensors", ".bin")
    assert {x for x in fetched if x.endswith(weights)} == {
        x for x in needed if x.endswith(weights) and not x.startswith(f"{denoiser}/")
    }
    assert set(fetched) <= set(needed)
    assert lists <= 2  # ours, and the client's before its first download

    flags = train.flags(tmp_path / "out", f"--latents_dir={tmp_path}/latents")
    flags += ["--max_train_steps=2", "--validation_prompts=one", "--num_inference_steps=2"]
    train(*by_id, *flags)
    folders, fetched, lists = take_requests(hub)
    assert lists <= 1 and set(fetched) <= set(needed)
    assert {x for x in fetched if x.endswith(weights)} == {
        x for x in needed if x.endswith(weights) and x.startswith(f"{denoiser}/")
    }
    assert folders <= {"", denoiser, "scheduler"}
    assert not (tmp_path / "hf/hub").exists()  # --cache_dir has all of it
    train(*by_folder, *flags, f"--output_dir={tmp_path}/from_folder")
    assert_same_weights(tmp_path / f"out/{denoiser}", tmp_path / f"from_folder/{denoiser}")
    assert not hub.requests

    # again, and without a network
    for name in ("again", "offline"):
        train(*by_id, *flags, "--rank=2", f"--output_dir={tmp_path / name}")
        _, fetched, lists = take_requests(hub)
        assert not fetched and lists == (name == "again")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    lora = "pytorch_lora_weights.safetensors"
    again, offline = (load_file(tmp_path / name / lora) for name in ("again", "offline"))
    assert all(torch.equal(offline[name], weight) for name, weight in again.items())
    card = (tmp_path / "again/README.md").read_text()
    assert "org/base" in card and "models--" not in card
    for path in (tmp_path / "out").glob("*/*.json"):  # of the pipeline
        assert "models--" not in path.read_text(), path


@pytest.mark.long
@pytest.mark.usefixtures("without_figures")
def test_two_processes_of_a_run_fetch_each_file_once(hub, tmp_path):
    hub.add("org/base", make_sdxl(tmp_path))
    make_captioned(tmp_path / "data", 4)
    train = Script("train_text_to_image")
    flags = train.flags(tmp_path / "out", f"--train_data_dir={tmp_path}/data", "--rank=2")
    flags += ["--dataloader_num_workers=0", "--resolution=16"]
    flags += ["--pretrained_model_name_or_path=org/base", "--max_train_steps=1"]
    train.fork(*flags, num_processes=2)
    fetched, files = hub.downloads(), hub.files("org/base")
    assert len(fetched) == len({files[name] for name in files})  # equal files only once
    assert set(fetched) <= set(files)
    counts = count_requests(hub)
    assert sum(n for (_, path), n in counts.items() if "/revision/" in path) == 1


@pytest.mark.long
@pytest.mark.usefixtures("without_figures")
def test_parts_by_their_own_ids_train_as_from_folders(hub, tmp_path):
    folder = make_models(tmp_path)
    hub.add("org/base", folder)
    for name in ("vae", "text_encoder", "tokenizer"):
        own = {path.name: path.read_bytes() for path in (folder / name).iterdir()}
        decoys = {"pytorch_model.bin": JUNK, "whole.safetensors": JUNK, "part/config.json": JUNK}
        hub.add(f"own/{name}", own | decoys)
    make_captioned(tmp_path / "data", 4)
    train = Script("train_text_to_image")
    flags = train.flags(tmp_path / "by_id", f"--train_data_dir={tmp_path}/data", "--rank=2")
    flags += ["--dataloader_num_workers=0", "--resolution=16"]
    own = [f"--{name}_name_or_path=own/{name}" for name in ("vae", "text_encoder", "tokenizer")]
    base = ["--pretrained_model_name_or_path=org/base", "--max_train_steps=1"]
    train(*flags, *base, *own)
    folders, fetched, _ = take_requests(hub)
    assert folders == {"", "scheduler", "unet"}
    assert "model.safetensors" in fetched and not {"whole.safetensors", "pytorch_model.bin"} & {
        *fetched
    }
    base[0] = f"--pretrained_model_name_or_path={folder}"
    train(*flags, *base, f"--output_dir={tmp_path}/by_folder")
    lora = "pytorch_lora_weights.safetensors"
    one, other = (load_file(tmp_path / name / lora) for name in ("by_id", "by_folder"))
    assert all(torch.equal(other[name], weight) for name, weight in one.items())


@pytest.mark.long
@pytest.mark.usefixtures("without_figures")
def test_an_unconditional_pipeline_and_a_network_by_id(hub, tmp_path):
    torch.manual_seed(0)
    unet = diffusers.UNet2DModel(
        sample_size=16, block_out_channels=(8, 16), norm_num_groups=4, layers_per_block=1,
        down_block_types=("DownBlock2D",) * 2, up_block_types=("UpBlock2D",) * 2,
    )  # fmt: skip
    pipeline = diffusers.DDPMPipeline(unet, diffusers.DDPMScheduler())
    pipeline.save_pretrained(tmp_path / "base")
    files = {"unet/diffusion_pytorch_model.bin": JUNK, "README.md": JUNK}
    hub.add("org/base", tmp_path / "base")
    hub.add("org/base", hub.files("org/base") | files)
    make_dino(tmp_path / "dino")
    hub.add("org/dino", tmp_path / "dino")
    hub.add("org/dino", hub.files("org/dino") | {"pytorch_model.bin": JUNK})
    make_images(tmp_path / "images", 6)
    train = Script("train_unconditional")
    flags = [*TRAINING, *train.flags(tmp_path / "out", f"--train_data_dir={tmp_path}/images")]
    flags += ["--pretrained_model_name_or_path=org/base", "--max_train_steps=1"]
    flags += ["--validation_metrics=kid", "--metric_image_model=org/dino", "--holdout=2"]
    train(*flags, "--num_metric_images=2")
    folders, fetched, lists = take_requests(hub)
    assert folders == {"", "unet", "scheduler"} and lists <= 4
    assert not any(name.endswith((".bin", ".md")) for name in fetched)
