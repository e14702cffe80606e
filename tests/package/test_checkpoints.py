"""Checkpoints: complete or absent, loaded bit for bit, and any fault ends in one sentence."""

import argparse
import json
import os
import re
import shutil
import sys
import zipfile
from pathlib import Path

import pytest
import torch
import xxhash
from accelerate import Accelerator
from conftest import make_unet_config, patch
from diffusers import UNet2DModel

from diffusion_training import __version__
from diffusion_training.models import list_parameters
from diffusion_training.training.keeping import checkpoints
from diffusion_training.training.keeping.checkpoints import (
    check_start,
    find_checkpoint,
    find_checkpoints,
    find_start,
    get_scale,
    load_checkpoint,
    load_start,
    prune_checkpoints,
    read_start,
    read_state,
    save_checkpoint,
)

SETTINGS = {
    "num_images": 6,
    "seed": 0,
    "use_ema": True,
    "optimizer": "adamw",
    "resume_from_checkpoint": None,
    "holdout": 0.0,
    "held_out": None,
    "held_out_below": 0,
}


def holding_out(images, of="images", **others):
    """Settings of a run that holds images out."""
    held_out = {"held_out": {"of": of, "digest": images}, "held_out_below": 9}
    return SETTINGS | {"holdout": 2.0} | held_out | others


@pytest.fixture
def accelerator():
    return Accelerator(cpu=True)


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return UNet2DModel.load_config(make_unet_config(tmp_path_factory.mktemp("model")))


@pytest.fixture
def make(config):
    """make(seed) returns (models, their optimizer after one step).

    The models are a U-Net, a second module, and the averages of both.
    """

    def make(seed, ema=True):
        torch.manual_seed(seed)
        models = {"unet": UNet2DModel.from_config(config), "projection": torch.nn.Linear(3, 2)}
        optimizer = torch.optim.AdamW(list_parameters(models), lr=10.0**-seed)
        for parameter in list_parameters(models):
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        averaged = {
            "unet_ema": UNet2DModel.from_config(config),
            "projection_ema": torch.nn.Linear(3, 2),
        }
        return models | averaged if ema else models, optimizer

    return make


@pytest.fixture
def save(tmp_path, accelerator, make):
    """Save checkpoints at steps."""

    def save(*steps, limit=None, ema=True, settings=SETTINGS, **more):
        models, optimizer = make(1, ema)
        (tmp_path / "out").mkdir(exist_ok=True)
        for step in steps:
            state = {
                "global_step": step,
                "data_step": step,
                "images_seen": 2 * step,
                "settings": settings,
                **more,
            }
            path = tmp_path / f"out/checkpoint-{step}"
            scale = get_scale(accelerator)
            save_checkpoint(path, state, models.items(), optimizer.state_dict, scale, {})
            prune_checkpoints(path, limit)
        return models, optimizer

    return save


@pytest.fixture
def load(tmp_path, accelerator, make):
    """Load a checkpoint into models of another seed."""

    def load(path, ema=True, settings=SETTINGS):
        models, optimizer = make(2, ema)
        state = read_state(path, settings["num_images"])
        load_checkpoint(accelerator, path, models, optimizer, state, settings)
        return models, optimizer, state

    return load


def test_a_loaded_checkpoint_equals_the_saved_one_bit_for_bit(tmp_path, save, load):
    models, optimizer = save(3)
    found, loaded, state = load(tmp_path / "out/checkpoint-3")
    assert (state["global_step"], state["data_step"], state["images_seen"]) == (3, 3, 6)
    assert state["version"] == __version__ and state["settings"] == SETTINGS
    for name, model in models.items():
        one, other = model.state_dict(), found[name].state_dict()
        assert one.keys() == other.keys() and all(
            torch.equal(one[key], other[key]) for key in one
        ), name
    one, other = optimizer.state_dict(), loaded.state_dict()
    assert one["state"].keys() == other["state"].keys() and len(one["state"]) > 10
    for number, moments in one["state"].items():
        for name in ("step", "exp_avg", "exp_avg_sq"):
            assert torch.equal(moments[name], other["state"][number][name])
    # this run's flags win
    assert other["param_groups"][0]["lr"] == 0.01 != one["param_groups"][0]["lr"]
    folders = {path.name for path in (tmp_path / "out/checkpoint-3").iterdir() if path.is_dir()}
    assert folders == {"unet", "unet_ema", "projection", "projection_ema"}
    assert UNet2DModel.from_pretrained(tmp_path / "out/checkpoint-3/unet")  # as users load it


def test_use_ema_can_begin_at_a_checkpoint_without_ema(tmp_path, save, load, capsys):
    models, _ = save(3, ema=False, settings={**SETTINGS, "use_ema": False})
    found, _, _ = load(tmp_path / "out/checkpoint-3")
    assert torch.equal(found["projection_ema"].weight, models["projection"].weight)
    assert (
        f"Resuming from {tmp_path}/out/checkpoint-3, use_ema False -> True\n"
        in capsys.readouterr().out
    )


def test_resuming_prints_the_settings_that_changed(tmp_path, save, load, capsys):
    save(3)
    load(
        tmp_path / "out/checkpoint-3",
        settings={**SETTINGS, "resume_from_checkpoint": "latest", "new": 1},
    )
    assert capsys.readouterr().out == f"Resuming from {tmp_path}/out/checkpoint-3\n"
    load(tmp_path / "out/checkpoint-3", settings={**SETTINGS, "seed": 7, "num_images": 9})
    assert "checkpoint-3, num_images 6 -> 9, seed 0 -> 7\n" in capsys.readouterr().out


@pytest.mark.parametrize("part", [
    "unet/diffusion_pytorch_model.safetensors", "unet_ema/config.json",
    "projection/model.safetensors", "optimizer.bin", "scaler.bin",
])  # fmt: skip
@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "gone", "swap"])
def test_a_checkpoint_with_a_changed_file_is_refused(tmp_path, save, load, part, damage):
    save(1, 2)
    path = tmp_path / "out/checkpoint-2" / part
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    {
        "flip": lambda: path.write_bytes(data),
        "cut": lambda: path.write_bytes(data[:-10]),
        "empty": lambda: path.write_bytes(b""),
        "gone": path.unlink,
        "swap": lambda: path.write_bytes(
            (tmp_path / "out/checkpoint-1" / part).read_bytes() + b" "
        ),
    }[damage]()
    sentence = (
        rf"checkpoint-2 is damaged or from another model \({part} has changed since it was written"
        r"\); resume from"
    )
    with pytest.raises(SystemExit, match=sentence):
        load(tmp_path / "out/checkpoint-2")


def test_moments_have_no_second_checksum(tmp_path, save):
    save(2)
    with zipfile.ZipFile(tmp_path / "out/checkpoint-2/optimizer.bin") as file:
        assert file.testzip()  # the first file whose checksum is wrong
    torch.save({"number": torch.ones(9)}, tmp_path / "other.bin")  # other files keep theirs
    with zipfile.ZipFile(tmp_path / "other.bin") as file:
        assert not file.testzip()


def test_extra_files_in_a_checkpoint_are_ignored(tmp_path, save, load):
    save(2)
    shutil.copytree(tmp_path / "out/checkpoint-2/unet", tmp_path / "out/checkpoint-2/other")
    for name in (".DS_Store", "unet/.nfs0001", "preview.png"):
        (tmp_path / "out/checkpoint-2" / name).write_bytes(b"\0")
    load(tmp_path / "out/checkpoint-2")


def test_a_checkpoint_of_another_model_is_refused(tmp_path, save, load, config):
    save(2)
    config["block_out_channels"] = (8, 24)
    try:
        with pytest.raises(
            SystemExit, match="checkpoint-2 is damaged or from another model"
        ) as stop:
            load(tmp_path / "out/checkpoint-2")
        assert "\n" not in str(stop.value)
    finally:
        config["block_out_channels"] = (8, 16)


def test_a_changed_digit_in_trainer_state_json_is_refused(tmp_path, save):
    save(2)
    path = tmp_path / "out/checkpoint-2/trainer_state.json"
    content, state = path.read_text(), read_state(path.parent, 6)
    assert state["global_step"] == 2
    for i, character in enumerate(content):
        if character.isdigit():
            path.write_text(content[:i] + str((int(character) + 1) % 10) + content[i + 1 :])
            with pytest.raises(
                SystemExit, match="is damaged; .*trainer_state.json has changed since"
            ):
                read_state(path.parent, 6)
    path.write_text(re.sub('"use_ema": true', '"use_ema": false', content))
    with pytest.raises(SystemExit, match="is damaged"):
        read_state(path.parent, 6)
    path.write_text(json.dumps(json.loads(content)))  # the same in another layout
    assert read_state(path.parent, 6) == state
    for other in ({"data_step": None}, {"images_seen": ""}, {"settings": {"num_images": 6}}):
        other = {**json.loads(content), **other, "checksums": {}}
        own = xxhash.xxh3_128_hexdigest(json.dumps(other).encode())
        path.write_text(json.dumps({**other, "checksums": {"trainer_state.json": own}}))
        with pytest.raises(SystemExit, match="does not have the fields of a checkpoint"):
            read_state(path.parent, 6)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(SystemExit, match="is damaged; .*trainer_state.json is not a file"):
        read_state(path.parent, 6)


@pytest.mark.parametrize("content", [
    "", "[]", "{}", '{"global_step": 1}', "null", "\x00", "{", '{"checksums": []}',
    '{"global_step": 1, "data_step": 1, "images_seen": 1, "settings": {"num_images": 6}}',
    '{"global_step": 1, "data_step": 1, "images_seen": 1, "settings": {"num_images": 6}, '
    '"checksums": {}}',
])  # fmt: skip
def test_a_damaged_trainer_state_ends_in_one_sentence(tmp_path, content):
    (tmp_path / "checkpoint-1").mkdir()
    (tmp_path / "checkpoint-1/trainer_state.json").write_text(content)
    with pytest.raises(
        SystemExit,
        match="checkpoint-1 is damaged; resume from another or choose a new --output_dir",
    ):
        read_state(tmp_path / "checkpoint-1", 6)


def test_read_state_starts_at_zero_without_a_checkpoint():
    assert read_state(None, 6) == {
        "global_step": 0,
        "data_step": 0,
        "images_seen": 0,
        "settings": {},
    }


def test_a_changed_number_of_images_restarts_the_epoch(tmp_path, save):
    save(5)  # 10 images, with 6 per epoch
    assert read_state(tmp_path / "out/checkpoint-5", 6)["images_seen"] == 10
    assert read_state(tmp_path / "out/checkpoint-5", 7)["images_seen"] == 7


def test_a_checkpoint_trained_on_the_held_out_images_is_refused(tmp_path, save, load):
    save(2)
    with pytest.raises(SystemExit, match="checkpoint-2 held out no images, so it was trained on"):
        load(tmp_path / "out/checkpoint-2", settings=holding_out("these"))
    save(2, settings=holding_out("these"))
    advice = "keep images, --holdout and --seed as they were, or remove --holdout"
    with pytest.raises(SystemExit, match=advice):
        load(tmp_path / "out/checkpoint-2", settings=holding_out("others"))
    with pytest.raises(SystemExit, match="was trained on images, this run on latents, so the held"):
        load(tmp_path / "out/checkpoint-2", settings=holding_out("these", of="latents"))
    load(tmp_path / "out/checkpoint-2", settings=holding_out("these"))
    load(tmp_path / "out/checkpoint-2")  # without --holdout no trained image is measured


def test_a_checkpoint_with_other_random_keys_or_no_stream_is_refused(tmp_path, save, monkeypatch):
    save(2)
    with pytest.raises(SystemExit, match="checkpoint-2 was made without --streaming: resume"):
        read_state(tmp_path / "out/checkpoint-2", sys.maxsize)
    monkeypatch.setattr(checkpoints, "KEYS", 1)
    save(3)
    monkeypatch.undo()
    with pytest.raises(
        SystemExit, match="checkpoint-3 was made by version .*, which draws other noise and another"
    ):
        read_state(tmp_path / "out/checkpoint-3", 6)


# ------------------------------------------------------------------- saving, pruning and finding


def test_pruning_deletes_the_oldest_and_never_the_new_checkpoint(tmp_path, save):
    save(1, 2, 10, limit=2)
    out = tmp_path / "out"
    # sorted by number
    assert [path.name for path in find_checkpoints(out)] == ["checkpoint-2", "checkpoint-10"]
    save(5, limit=1)  # resumed earlier, in a folder with a newer one
    assert [path.name for path in find_checkpoints(out)] == ["checkpoint-5"]
    save(6)
    assert len(find_checkpoints(out)) == 2 and not list(out.glob(".tmp*"))
    prune_checkpoints(out / "checkpoint-6", None)
    assert len(find_checkpoints(out)) == 2
    prune_checkpoints(out / "checkpoint-6", 1)
    assert [path.name for path in find_checkpoints(out)] == ["checkpoint-6"]


def test_pruning_a_linked_checkpoint_removes_only_the_link(tmp_path, save):
    save(1)
    (tmp_path / "out/checkpoint-1").rename(tmp_path / "moved")
    (tmp_path / "out/checkpoint-1").symlink_to(tmp_path / "moved")
    save(2, limit=1)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["checkpoint-2"]
    assert (tmp_path / "moved/trainer_state.json").exists()


def test_a_failed_save_ends_in_one_sentence_and_keeps_earlier_checkpoints(
    tmp_path, save, load, monkeypatch
):
    save(2)

    def full(*args):
        raise OSError(28, "No space left on device")

    sentence = "checkpoint-4 could not be saved .*No space left on device"
    with monkeypatch.context() as broken, pytest.raises(SystemExit, match=sentence):
        broken.setattr(torch, "save", full)
        save(4, limit=1)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["checkpoint-2"]
    load(tmp_path / "out/checkpoint-2")


def test_a_folder_of_the_user_is_not_replaced_by_a_checkpoint(tmp_path, save):
    (tmp_path / "out/checkpoint-2").mkdir(parents=True)
    (tmp_path / "out/checkpoint-2/notes.txt").write_text("mine")
    with pytest.raises(SystemExit, match="it exists and is not a checkpoint: move it away"):
        save(2)
    assert (tmp_path / "out/checkpoint-2/notes.txt").read_text() == "mine"


def test_find_checkpoint_ignores_incomplete_checkpoints(
    tmp_path, accelerator, save, capsys, monkeypatch
):
    out = tmp_path / "out"
    out.mkdir()
    assert find_checkpoint(None, str(out)) is None and find_checkpoint("latest", str(out)) is None
    assert f"No checkpoint in {out} yet: starting afresh" in capsys.readouterr().out
    save(4, 6)
    (out / "checkpoint-500").mkdir()  # an incomplete one
    for name in ("checkpoint_backup", "checkpoint-6-backup", "checkpoint-x", ".tmp-checkpoint-7"):
        shutil.copytree(out / "checkpoint-4", out / name)
    assert find_checkpoint("latest", str(out)) == out / "checkpoint-6"
    for given in ("checkpoint-500", "checkpoint-5", str(tmp_path)):
        with pytest.raises(SystemExit, match="is not a complete checkpoint, neither as a path"):
            find_checkpoint(given, str(out))
    with pytest.raises(
        SystemExit, match="holds checkpoint-6 of an earlier run: resume it with --resume_from"
    ):
        find_checkpoint(None, str(out))
    # By name: a folder of the same name in the working directory is ignored. By path: from any
    # folder.
    monkeypatch.chdir(out.parent)
    shutil.copytree(out / "checkpoint-4", tmp_path / "checkpoint-6")
    assert find_checkpoint("checkpoint-6", str(out)) == out / "checkpoint-6"
    assert find_checkpoint(f"{out}/checkpoint-4/", str(tmp_path / "new")) == out / "checkpoint-4"
    assert find_checkpoint("out/checkpoint-4", str(tmp_path / "new")) == Path("out/checkpoint-4")


def test_resuming_from_another_run_is_refused_beside_own_checkpoints(tmp_path, accelerator, save):
    """Otherwise `latest` and pruning, which use the number, would mix the two runs."""
    save(2, 4)
    (tmp_path / "out").rename(tmp_path / "another")
    for steps in ((1,), (2,), (9,)):
        save(*steps)
        with pytest.raises(
            SystemExit, match="or of another run: delete the newer ones, or choose another"
        ):
            find_checkpoint(str(tmp_path / "another/checkpoint-4"), str(tmp_path / "out"))
        shutil.rmtree(tmp_path / "out")


def test_resuming_from_an_older_checkpoint_is_refused_beside_newer_ones(
    tmp_path, accelerator, save
):
    save(2, 4)
    for given in ("checkpoint-2", str(tmp_path / "out/checkpoint-2")):
        with pytest.raises(
            SystemExit, match="checkpoint-4 is newer than .*checkpoint-2, or of another run: delete"
        ):
            find_checkpoint(given, str(tmp_path / "out"))
    assert find_checkpoint("checkpoint-4", str(tmp_path / "out")) == tmp_path / "out/checkpoint-4"


def test_machines_that_find_different_checkpoints_are_refused(
    tmp_path, accelerator, save, monkeypatch
):
    save(2, 4)
    # the other machine finds checkpoint-2
    patch(monkeypatch, "gather_object", lambda found: [*found, "checkpoint-2"])
    with pytest.raises(
        SystemExit,
        match="machines found different checkpoints: choose an --output_dir that they share",
    ):
        find_checkpoint("latest", str(tmp_path / "out"))


def test_the_fp16_loss_scale_is_restored(tmp_path, accelerator, save, load):
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    save(3)
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    load(tmp_path / "out/checkpoint-3")
    assert accelerator.scaler.get_scale() == 8.0


def test_init_from_keeps_the_step_and_needs_the_same_held_out_images(tmp_path, save):
    assert find_start(None) is None
    with pytest.raises(SystemExit, match="--init_from .* is neither a complete checkpoint nor"):
        find_start(str(tmp_path))
    (tmp_path / "model_index.json").touch()  # of best/, for example
    with pytest.raises(SystemExit, match="pipeline, not a checkpoint: pass it as --pretrained_mod"):
        find_start(str(tmp_path))
    save(2, 3)
    start = find_start(str(tmp_path / "out"))
    assert start == find_start(str(start)) == tmp_path / "out/checkpoint-3"
    args = argparse.Namespace(holdout=2.0, seed=0, max_train_steps=4)
    state = read_start(start, args)
    assert (state["global_step"], state["data_step"], state["images_seen"], state["settings"]) == (
        3,
        3,
        0,
        {},
    )
    # both phases must hold out the same part of all images, known by its threshold
    before = holding_out("these")
    check_start(start, before, holding_out("others"))
    check_start(start, SETTINGS, SETTINGS)
    changed = [{"held_out_below": 8}, {"held_out_below": None}, {"seed": 1}, {"holdout": 0.5}]
    for settings in [SETTINGS, *(holding_out("these", **change) for change in changed)]:
        with pytest.raises(SystemExit, match="pass --holdout 2 --seed 0, and keep the images"):
            check_start(start, before, settings)
    with pytest.raises(SystemExit, match="checkpoint-3 held out no images, so it may have been"):
        check_start(start, SETTINGS, before)
    with pytest.raises(SystemExit, match="--max_train_steps 3 must be above 3: this run counts"):
        read_start(start, argparse.Namespace(**vars(args) | {"max_train_steps": 3}))
    # a U-Net's run, in train_flow.py, which has no such flag
    save(5, settings=SETTINGS | {"rescale_betas_zero_snr": False})
    with pytest.raises(SystemExit, match="another trainer: this one has no --rescale_betas_zero"):
        read_start(tmp_path / "out/checkpoint-5", args)


def test_init_from_loads_weights_but_not_the_batches_of_the_other_run(
    tmp_path, accelerator, make, save, capsys
):
    models, _ = save(3, cuts=[4, 2])
    start, args = (
        tmp_path / "out/checkpoint-3",
        argparse.Namespace(holdout=0.0, seed=1, max_train_steps=None),
    )
    state, (found, _) = read_start(start, args), make(2)
    assert "cuts" not in state
    load_start(accelerator, start, found, state, SETTINGS)
    for name, model in models.items():
        one, other = model.state_dict(), found[name].state_dict()
        assert all(torch.equal(one[key], other[key]) for key in one), name
    assert capsys.readouterr().out == f"Starting from the weights of {start}, at step 3\n"
    state["before"] = SETTINGS | {"shift": 3.0, "logit_mean": 0.0, "max_train_steps": 3}
    now = SETTINGS | {"shift": None, "logit_mean": 0.0, "max_train_steps": 6}
    load_start(accelerator, start, found, state, now)
    said = f"Starting from the weights of {start}, at step 3, shift 3.0 -> None\n"
    assert capsys.readouterr().out == said
    # a newly trained module starts afresh; a resumed run can't add one
    added = {name: torch.nn.Linear(2, 2) for name in ("added", "added_ema")}
    fresh = added["added"].weight.clone()
    load_start(accelerator, start, found | added, state, SETTINGS)
    assert torch.equal(added["added"].weight, fresh)
    assert f"Not in {start}, so these start anew: added, added_ema" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="checkpoint-3 has no weights of added, added_ema: a mod"):
        resumed = read_state(start, 4)
        load_checkpoint(accelerator, start, found | added, None, resumed, SETTINGS)
    (start / "unet/config.json").write_text("{}")
    with pytest.raises(
        SystemExit, match=r"checkpoint-3 is damaged or from another model \(unet/config.json has"
    ):
        load_start(accelerator, start, found, state, SETTINGS)


class Harm:
    """An object that writes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize("name", ["optimizer.bin", "scaler.bin"])
def test_a_malicious_checkpoint_runs_no_code(tmp_path, accelerator, save, load, monkeypatch, name):
    accelerator.scaler, dump, harm = (
        torch.amp.GradScaler("cpu"),
        torch.save,
        Harm(tmp_path / "harm"),
    )
    with monkeypatch.context() as m:
        m.setattr(
            torch, "save", lambda saved, path: dump(harm if path.name == name else saved, path)
        )
        save(2)
    with pytest.raises(SystemExit, match="checkpoint-2 is damaged or from another model"):
        load(tmp_path / "out/checkpoint-2")
    assert not (tmp_path / "harm").exists()


def test_a_checkpoint_with_another_optimizer_is_refused(tmp_path, save, load):
    save(2)
    load(tmp_path / "out/checkpoint-2")
    with pytest.raises(
        SystemExit, match="checkpoint-2 was trained with --optimizer adamw, not prodigy: keep --o"
    ):
        load(tmp_path / "out/checkpoint-2", settings={**SETTINGS, "optimizer": "prodigy"})
    save(3, settings={**SETTINGS, "optimizer": "prodigy"})
    with pytest.raises(
        SystemExit, match="checkpoint-3 was trained with --optimizer prodigy, not adamw"
    ):
        load(tmp_path / "out/checkpoint-3")


def test_only_the_first_process_prints_that_there_is_no_checkpoint(
    tmp_path, accelerator, capsys, monkeypatch
):
    monkeypatch.setenv("RANK", "1")
    assert find_checkpoint("latest", str(tmp_path)) is None and not capsys.readouterr().out
