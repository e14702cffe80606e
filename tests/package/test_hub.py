"""Models and data by their ids on a hub, with the real client."""

import contextlib
import functools
import importlib
import json
import re
import shutil

import datasets
import diffusers
import huggingface_hub
import numpy as np
import pytest
import torch
from conftest import (
    MODELS,
    TRAINING,
    Script,
    assert_same_weights,
    make_captioned,
    make_images,
    make_models,
    make_unet_config,
)
from hub import Token
from huggingface_hub import constants
from huggingface_hub.errors import HfHubHTTPError
from PIL import Image
from safetensors.torch import load_file

import train_unconditional
from diffusion_training import repositories
from diffusion_training.data.images import decode_image
from diffusion_training.data.rows import load_rows
from diffusion_training.errors.faults import explain, is_machines_fault
from diffusion_training.families import opening
from diffusion_training.latents.reader import load_cache
from diffusion_training.training.showing import hub as module
from diffusion_training.training.showing.hub import upload_run

UNCONDITIONAL = [
    *TRAINING,
    "--resolution=16",
    "--ddpm_num_inference_steps=2",
    "--eval_batch_size=1",
    "--dataloader_num_workers=0",
    "--max_train_steps=2",
]


def download(name, path="model_index.json", **options):
    return huggingface_hub.hf_hub_download(name, path, **options)


def fault_of(function, *args, **options):
    """(what is said of the error that a call raises, whether it is a fault of the machine)."""
    try:
        function(*args, **options)
    except Exception as error:
        return explain(error), is_machines_fault(error)
    raise AssertionError("there is no error")


def test_errors_of_the_hub_are_told_apart(hub, monkeypatch):
    hub.tokens |= {"hf_me": Token("me"), "hf_org": Token("org", gates={"org/gated"})}
    hub.add("org/gated", MODELS, gated=True)
    hub.add("org/private", MODELS, private=True)
    hub.add("org/open", MODELS)
    gated = "org/gated is gated: accept its terms on its page, then run `hf auth login`"
    assert fault_of(download, "org/gated") == (gated, True)
    said, _ = fault_of(download, "org/gated", token="hf_me")
    assert said.startswith("org/gated is gated, and your token has no access to it: accept")
    assert download("org/gated", token="hf_org")
    for name in ("org/private", "org/opne"):  # nobody else can tell them apart
        for token in (False, "hf_me"):
            said, _ = fault_of(download, name, token=token)
            assert said.startswith(f"the hub has no {name}, or it is private and your token may")
    assert download("org/private", token="hf_org")
    said, _ = fault_of(download, "org/open", token="hf_old")
    assert said.startswith("the hub refuses your token (Invalid credentials in Authorization hea")
    said, _ = fault_of(download, "org/open", revision="v2")
    assert said.startswith("org/open has no such revision")
    hub.fail("*", status=429, times=100, headers={"Retry-After": "7"})
    limited = "the hub allows no more requests for now (429): run it again in 7 s"
    assert fault_of(download, "org/open") == (limited, True)
    hub.faults.clear()
    hub.fail("*", status=503, times=100)
    broken = "the hub has a fault (503 Service Unavailable): run it again later"
    assert fault_of(download, "org/open") == (broken, True)
    hub.faults.clear()
    hub.fail("*", status=418, times=100, headers={"X-Error-Message": "no coffee" + "!" * 3000})
    said, is_machines = fault_of(download, "org/open")
    assert said.startswith("127.0.0.1 refuses the request (418 no coffee!") and len(said) < 300
    assert is_machines
    hub.faults.clear()
    hub.fail("*", status=200)  # in place of JSON a page, here an empty one
    page = "the hub's answer is not JSON; perhaps it is the login page of a proxy: open the hub in"
    said, is_machines = fault_of(huggingface_hub.repo_info, "org/open")
    assert said.startswith(page) and is_machines
    assert fault_of(json.loads, "") == ("Expecting value: line 1 column 1 (char 0)", False)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    said, _ = fault_of(download, "org/open", "vae/config.json")
    assert said.startswith("vae/config.json of org/open is neither in a folder here nor in the ")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    # nothing listens at this port
    said, is_machines = fault_of(download, "org/open", endpoint="http://127.0.0.1:9")
    assert re.fullmatch(r"the hub can't be reached \(.*\): check the network.*", said)
    assert is_machines


def test_a_storage_that_refuses_once_is_asked_again(hub, monkeypatch):
    """The address of a file in the storage expires; the hub makes another one."""
    monkeypatch.setattr(repositories, "WAITS", (0, 0, 0))
    hub.add("org/base", {"model_index.json": b"{}", "unet/model.safetensors": bytes(1000)})
    repository = repositories.open_repository("org/base", ("model_index.json",), None, None)
    for times, is_fetched in ((4, False), (3, True)):
        hub.fail("/lfs/*", method="GET", status=403, times=times)
        with contextlib.nullcontext() if is_fetched else pytest.raises(HfHubHTTPError):
            repository.fetch("unet")
        assert (repository.folder / "unet/model.safetensors").exists() == is_fetched


def test_a_storage_that_refuses_is_not_taken_for_a_token_without_rights(hub):
    hub.add("org/big", {"model.safetensors": b"0" * 1000})
    hub.fail("/lfs/*", status=403, times=100)
    said, is_machines = fault_of(download, "org/big", "model.safetensors")
    assert said.startswith("localhost refuses the request (Forbidden), because of a firewall or of")
    assert is_machines
    hub.faults.clear()
    hub.fail("*", status=401, times=100)
    said, _ = fault_of(download, "org/big", "config.json", token=False)
    assert said.endswith("): run `hf auth login`") and said.startswith("the hub needs your token (")


@pytest.mark.parametrize("address, reason", [
    ("hf://datasets/org/latents", "the hub has no org/latents, or it is private and your token"),
    ("hf://datasets/org/unknown/part", "the hub has no org/unknown, or it is private and your tok"),
    ("hf://datasets/org/open@v2", "org/open has no such revision: see the branches"),
    ("hf://datasets/org/open", None),
])  # fmt: skip
def test_a_cache_on_the_hub_that_can_not_be_read_is_not_called_missing(hub, address, reason):
    hub.tokens["hf_org"] = Token("org")
    hub.add("org/latents", {"cache.json": b"{}"}, kind="datasets", private=True)
    hub.add("org/open", {"other.json": b"{}"}, kind="datasets")
    with pytest.raises(SystemExit) as refused:
        load_cache(address)
    expected = f"{address} can't be read ({reason}" if reason else "is missing: make the cache"
    assert expected in str(refused.value)


@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
def test_a_push_is_tried_again_where_the_hub_has_a_fault(hub, tmp_path, monkeypatch):
    hub.tokens["hf_me"] = Token("me")
    monkeypatch.setenv("HF_TOKEN", "hf_me")
    monkeypatch.setattr(module, "WAITS", (0, 0, 0))
    (tmp_path / "README.md").write_text("card")
    hub.add("me/run", {})
    for step, status in enumerate((503, 412, 500)):
        (tmp_path / "loss.png").write_text(f"step {step}")
        hub.fail("*/commit/*", method="POST", status=status, times=2)
        upload_run("me/run", str(tmp_path), [])
        assert hub.files("me/run")["loss.png"] == f"step {step}".encode()
    for status in (408, 504, 200):  # before anything is uploaded; 200: a page, which is not JSON
        (tmp_path / "loss.png").write_text(f"{status}")
        hub.fail("*/paths-info/*", method="POST", status=status, times=3)
        upload_run("me/run", str(tmp_path), [])
        assert hub.files("me/run")["loss.png"] == f"{status}".encode()
    for status, tries in ((403, 1), (503, 4)):
        hub.requests.clear()
        (tmp_path / "loss.png").write_text(f"{status}")
        hub.fail("*/commit/*", method="POST", status=status, times=tries)
        with pytest.raises(SystemExit, match="the upload to me/run failed; everything is in"):
            upload_run("me/run", str(tmp_path), [])
        assert len([each for each in hub.requests if "/commit/" in each.path]) == tries
        hub.faults.clear()


def test_the_client_reads_on_after_a_cut_and_sends_no_token_to_the_storage(hub):
    hub.tokens["hf_org"] = Token("org")
    content = np.random.default_rng(0).bytes(300_000)
    hub.add("org/big", {"model.safetensors": content}, private=True)
    hub.fail("/lfs/*", method="GET", cut=True, times=2)
    path = download("org/big", "model.safetensors", token="hf_org")
    assert open(path, "rb").read() == content
    asked = [each for each in hub.requests if each.host == "storage" and each.method == "GET"]
    assert len(asked) == 3
    assert {each.token for each in asked} == {None}
    assert {each.token for each in hub.requests if "resolve" in each.path} == {"hf_org"}


def test_a_gated_or_misspelled_base_ends_in_its_sentence(hub, tmp_path, recwarn):
    importlib.reload(opening)  # it hides a warning of diffusers, and pytest has reset the filters
    hub.add("org/gated", MODELS, gated=True)
    make_images(tmp_path / "images", 2)
    train = Script("train_text_to_image")
    flags = train.flags(tmp_path / "out", f"--train_data_dir={tmp_path}/images")
    flags += ["--instance_prompt=a", "--max_train_steps=1"]
    said = train.refused(*flags, "--pretrained_model_name_or_path=org/gated")
    assert "org/gated is gated: accept its terms on its page, then run `hf auth login`" in said
    said = train.refused(*flags, "--pretrained_model_name_or_path=org/gatde")
    assert "the hub has no org/gatde, or it is private" in said
    assert not (tmp_path / "out").exists()
    assert not [each for each in recwarn if "symlinks" in str(each.message)]
    train = Script("train_unconditional")
    hub.add("org/images", tmp_path / "images", kind="datasets", gated=True)
    flags = [*UNCONDITIONAL, "--resolution=32", "--dataset_name=org/images"]
    said = train.refused(*flags, f"--output_dir={tmp_path}/out")
    assert "org/images is gated: accept its terms on its page" in said
    flags[-1] = "--dataset_name=org/imgaes"
    said = train.refused(*flags, f"--output_dir={tmp_path}/out")
    assert "the hub has no org/imgaes, or it is private" in said


def make_data(folder, kind):
    make_images(folder / "images", 4)
    images = folder / "images"
    names = sorted(path.name for path in images.iterdir())
    if kind == "metadata":
        lines = [json.dumps({"file_name": name, "text": name}) for name in names]
        (images / "metadata.jsonl").write_text("\n".join(lines))
    if kind == "classes":
        for i, name in enumerate(names):
            (images / f"train/{i % 2}").mkdir(parents=True, exist_ok=True)
            (images / name).rename(images / f"train/{i % 2}/{name}")
    if kind == "parquet":
        rows = datasets.Dataset.from_dict({"image": [(images / x).read_bytes() for x in names]})
        rows = rows.cast_column("image", datasets.Image())
        shutil.rmtree(images)
        images.mkdir()
        rows.to_parquet(images / "train.parquet")
    return images


@pytest.mark.long
@pytest.mark.parametrize("kind", ["folder", "classes", "metadata", "parquet"])
def test_a_data_set_on_the_hub_trains_like_its_folder(hub, tmp_path, kind):
    images = make_data(tmp_path, kind)
    hub.add("org/images", images, kind="datasets")
    train = Script("train_unconditional")
    flags = [*UNCONDITIONAL, f"--model_config_name_or_path={make_unet_config(tmp_path)}"]
    train(*flags, f"--train_data_dir={images}", f"--output_dir={tmp_path}/disk")
    flags += ["--dataset_name=org/images"]
    train(*flags, f"--output_dir={tmp_path}/hub")
    assert_same_weights(tmp_path / "hub/unet", tmp_path / "disk/unet")
    train(*flags, "--streaming", f"--output_dir={tmp_path}/stream")
    assert (tmp_path / "stream/unet").is_dir()


def test_a_folder_of_images_on_the_hub_is_streamed_undecoded(hub, tmp_path):
    images = make_data(tmp_path, "folder")
    hub.add("org/images", images, kind="datasets")
    flags = ["--dataset_name=org/images", "--streaming", f"--output_dir={tmp_path}/out"]
    args = train_unconditional.parse_args([*UNCONDITIONAL, *flags])
    opened = load_rows(args, streaming=True)
    found = [item[opened.column] for item in opened.rows]
    assert {type(image) for image in found} == {dict}
    decode = functools.partial(decode_image, channels=3, allowed=opened.allowed)
    pixels = {decode(image).permute(1, 2, 0).numpy().tobytes() for image in found}
    assert pixels == {np.asarray(Image.open(path)).tobytes() for path in images.iterdir()}
    hub.fail("*.png", status=503, times=100)
    _, is_machines = fault_of(decode, found[0])
    assert is_machines  # the row is not skipped as a bad one


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")  # huggingface_hub's upload
def test_a_run_that_is_pushed_opens_by_its_id(hub, tmp_path, monkeypatch):
    hub.tokens["hf_me"] = Token("me")
    monkeypatch.setenv("HF_TOKEN", "hf_me")
    make_images(tmp_path / "images", 2)
    flags = [*UNCONDITIONAL, f"--model_config_name_or_path={make_unet_config(tmp_path)}"]
    flags += [f"--train_data_dir={tmp_path}/images", f"--output_dir={tmp_path}/out"]
    Script("train_unconditional")(*flags, "--push_to_hub", "--hub_private_repo")
    assert hub.repositories["models", "me/out"].private
    assert {"README.md", "model_index.json"} < set(hub.files("me/out"))
    pipeline = diffusers.DDPMPipeline.from_pretrained("me/out")
    trained = load_file(tmp_path / "out/unet/diffusion_pytorch_model.safetensors")
    loaded = pipeline.unet.state_dict()
    assert all(torch.equal(loaded[name], weight) for name, weight in trained.items())


@pytest.mark.long
def test_a_cache_on_the_hub_trains_to_the_bits_of_one_on_disk(hub, tmp_path):
    base = [f"--pretrained_model_name_or_path={make_models(tmp_path)}"]
    data, cache = tmp_path / "data", tmp_path / "latents"
    make_captioned(data, 8)
    flags = ["--resolution=16", "--center_crop", "--rows_per_shard=3"]
    Script("precompute_latents")(*base, *flags, f"--train_data_dir={data}", f"--output_dir={cache}")
    hub.add("me/latents", cache, kind="datasets")
    train = Script("train_text_to_image")
    flags = [*base, "--max_train_steps=2", "--train_batch_size=2"]
    train(*flags, f"--latents_dir={cache}", f"--output_dir={tmp_path / 'disk'}")
    flags += ["--latents_dir=hf://datasets/me/latents", f"--shards_dir={tmp_path / 'shards'}"]
    train(*flags, f"--output_dir={tmp_path / 'hub'}")
    assert_same_weights(tmp_path / "disk/unet", tmp_path / "hub/unet")


@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
def test_a_card_that_was_edited_on_the_hub_is_kept(hub, tmp_path, monkeypatch, capsys):
    hub.tokens["hf_me"] = Token("me")
    monkeypatch.setenv("HF_TOKEN", "hf_me")
    hub.add("me/run", {})
    write_card = (tmp_path / "README.md").write_text
    for text, at, expected in (
        ("first", "step 1", b"first"),
        ("second", "step 2", b"second"),  # a run that is continued writes its card again
    ):
        write_card(text)
        (tmp_path / "loss.png").write_text(at)
        upload_run("me/run", str(tmp_path), [])
        assert hub.files("me/run")["README.md"] == expected and not capsys.readouterr().out
    edited = hub.files("me/run") | {"README.md": b"by hand"}
    hub.add("me/run", edited)
    write_card("third")
    (tmp_path / "loss.png").write_text("step 3")
    upload_run("me/run", str(tmp_path), [])
    assert hub.files("me/run") == {"README.md": b"by hand", "loss.png": b"step 3"}
    assert "me/run keeps its README.md, because it was changed there: the card of this run is " in (
        capsys.readouterr().out
    )
