"""--posthoc_ema: snapshots that a killed run repeats bit for bit, and pipelines of any width."""

import json
import os
import shutil
import signal
from argparse import Namespace

import numpy as np
import pytest
import torch
from conftest import (
    Script,
    assert_same_weights,
    make_images,
    make_unet_config,
    metrics,
    wait_until,
    weights,
)
from diffusers import DDPMPipeline, UNet2DModel
from safetensors.torch import load_file, save_file

from diffusion_training.training import saver
from diffusion_training.training.keeping import posthoc
from diffusion_training.training.saver import check_free_space

train = Script("train_unconditional")
reconstruct = Script("reconstruct_ema")
WIDTHS = ("0.05", "0.1")
STEPS = tuple(f"step-000000{step}" for step in (1, 2, 3, 4))


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    make_images(folder / "images", 9)
    make_unet_config(folder)
    return folder


def list_flags(inputs, output_dir, *more):
    return train.flags(
        output_dir, f"--train_data_dir={inputs / 'images'}",
        f"--model_config_name_or_path={inputs / 'tiny-unet'}", "--resolution=16",
        "--train_batch_size=2", "--max_train_steps=4", "--checkpointing_steps=2", "--holdout=2",
        "--ddpm_num_inference_steps=1", "--posthoc_ema", *WIDTHS, "--posthoc_ema_steps=1", *more,
    )  # fmt: skip


@pytest.fixture(scope="module")
def whole(inputs):
    train(*list_flags(inputs, inputs / "whole"))
    return inputs / "whole"


def read_snapshots(folder):
    paths = sorted((folder / "posthoc_ema").glob("*/*.safetensors"))
    return {f"{path.parent.name}/{path.name}": path.read_bytes() for path in paths}


def test_a_run_keeps_snapshots_and_measures_widths(tmp_path, inputs, whole):
    names = [f"{step}/unet-{width}.safetensors" for step in STEPS for width in WIDTHS]
    assert sorted(read_snapshots(whole)) == names
    plain = [flag for flag in list_flags(inputs, tmp_path / "plain") if flag not in WIDTHS]
    train(*[flag for flag in plain if "posthoc" not in flag])
    assert_same_weights(whole / "checkpoint-4/unet", tmp_path / "plain/checkpoint-4/unet")
    assert_same_weights(whole / "checkpoint-4/unet_ema", tmp_path / "plain/checkpoint-4/unet_ema")
    # the last snapshot is what the last checkpoint goes on with
    kept = weights(whole / "checkpoint-4/unet_posthoc_0.05")
    snapshot = load_file(whole / "posthoc_ema/step-0000004/unet-0.05.safetensors")
    assert all(torch.equal(kept[name].half(), snapshot[name]) for name in snapshot)
    losses = json.loads((whole / "posthoc_ema/held_out.json").read_text())
    assert len(losses["held_out_loss"]) == 8 and losses["step"] == 4
    best = min(losses["held_out_loss"].items(), key=lambda item: item[1])[0]
    assert f"{losses['best']:g}" == best


def test_a_checkpoint_does_not_wait_for_the_snapshot_of_its_step(tmp_path, inputs, monkeypatch):
    """The run would never end if it did."""
    write, take_step = saver.write_snapshot, train.module.train_step
    begun = []

    def write_in_step_3(*args):
        wait_until(lambda: len(begun) == 3)
        write(*args)

    def note(*args):
        begun.append(0)
        return take_step(*args)

    monkeypatch.setattr(saver, "write_snapshot", write_in_step_3)
    monkeypatch.setattr(train.module, "train_step", note)
    flags = list_flags(inputs, tmp_path / "out", "--posthoc_ema_steps=2", "--logging_steps=1")
    train(*flags, "--max_train_steps=3")
    pauses = [record.get("checkpoint_seconds", 0) for record in metrics(tmp_path / "out")]
    assert pauses[2] > 0  # that of step 2
    assert (tmp_path / "out/posthoc_ema/step-0000002").exists()


def test_a_resumed_run_keeps_its_widths(tmp_path, inputs, whole):
    flags = list_flags(inputs, tmp_path / "other", "--posthoc_ema", "0.05", "0.2")
    refused = train.refused(*flags, f"--resume_from_checkpoint={whole / 'checkpoint-2'}")
    assert "has other averages of --posthoc_ema: keep the flag as it was" in refused


@pytest.mark.long
def test_a_run_resumed_without_the_flag_must_not_end_after_its_snapshots(tmp_path, inputs, whole):
    """A later pipeline of these snapshots would be of another step than the run's result."""
    shutil.copytree(whole, tmp_path / "out")
    flags = list_flags(inputs, tmp_path / "out", "--max_train_steps=6", "--checkpointing_steps=5")
    plain = [flag for flag in flags if flag not in WIDTHS and "posthoc" not in flag]
    latest = "--resume_from_checkpoint=latest"
    refused = train.refused(*plain, latest)
    assert "has snapshots of --posthoc_ema, which would end at step 4: give this flag" in refused
    assert read_snapshots(tmp_path / "out") == read_snapshots(whole)
    (tmp_path / "out/posthoc_ema").rename(tmp_path / "elsewhere")
    train(*plain, latest)
    assert (tmp_path / "out/checkpoint-6").exists()


@pytest.mark.long
def test_a_checkpoint_of_another_folder_is_not_mixed_with_snapshots_here(tmp_path, inputs, whole):
    """They may be of another run, which was killed before its first checkpoint."""
    out = tmp_path / "out"
    for step in STEPS[:2]:
        shutil.copytree(whole / "posthoc_ema" / step, out / "posthoc_ema" / step)
    shutil.copy(whole / "run.args", out)
    before = read_snapshots(out)
    other = whole / "checkpoint-2"
    flags = list_flags(inputs, out)
    refused = train.refused(*flags, f"--resume_from_checkpoint={other}")
    assert f"{out} has snapshots of --posthoc_ema, and the checkpoint is of another" in refused
    assert read_snapshots(out) == before
    shutil.copytree(other, out / "checkpoint-2")
    train(*flags, "--resume_from_checkpoint=latest")
    assert read_snapshots(out) == read_snapshots(whole)


def test_a_kill_between_two_files_of_a_snapshot_leaves_none_and_a_resumed_run_the_same(
    tmp_path, inputs, whole, monkeypatch
):
    save_file = posthoc.save_file

    def save_or_die(data, path, header):
        if path.parent.name == STEPS[2] and WIDTHS[1] in path.name:
            os.kill(os.getpid(), signal.SIGKILL)
        save_file(data, path, header)

    with monkeypatch.context() as patched:
        patched.setattr(posthoc, "save_file", save_or_die)
        train.fork(*list_flags(inputs, tmp_path), status=-signal.SIGKILL)
    assert len(read_snapshots(tmp_path)) == 4
    train(*list_flags(inputs, tmp_path, "--resume_from_checkpoint=latest"))
    assert read_snapshots(tmp_path) == read_snapshots(whole)
    for width in WIDTHS:
        name = f"checkpoint-4/unet_posthoc_{width}"
        assert_same_weights(tmp_path / name, whole / name)


def test_pipelines_of_any_width_are_written(tmp_path, whole, capsys):
    reconstruct(whole, "--sigma_rel", "0.05", "0.2", "--output_dir", tmp_path)
    assert "average of sigma_rel 0.2 at step 4 is in" in capsys.readouterr().out
    reconstruct(whole, "--output_dir", tmp_path / "best")
    best = json.loads((whole / "posthoc_ema/held_out.json").read_text())["best"]
    assert [path.name for path in (tmp_path / "best").iterdir()] == [f"sigma_rel-{best:g}"]
    # an average that was kept
    snapshot = load_file(whole / "posthoc_ema/step-0000004/unet-0.05.safetensors")
    for name, weight in weights(tmp_path / "sigma_rel-0.05/unet").items():
        torch.testing.assert_close(weight, snapshot[name].float(), rtol=1e-3, atol=1e-5)
    drawn = []
    for width in ("0.05", "0.2"):
        pipeline = DDPMPipeline.from_pretrained(tmp_path / f"sigma_rel-{width}")
        pipeline.set_progress_bar_config(disable=True)
        seeded = torch.Generator().manual_seed(0)
        drawn.append(pipeline(num_inference_steps=2, output_type="np", generator=seeded).images)
    assert not np.array_equal(*drawn)


def test_a_run_without_what_a_pipeline_needs_is_refused(tmp_path, whole):
    output_dir = f"--output_dir={tmp_path / 'out'}"
    said = reconstruct.refused(tmp_path, output_dir)
    assert f"{tmp_path} has no snapshots: train it with --posthoc_ema" in said
    run = tmp_path / "run"
    shutil.copytree(whole / "posthoc_ema", run / "posthoc_ema")
    assert f"{run} holds no pipeline yet: finish the run first" in reconstruct.refused(
        run, output_dir
    )
    shutil.copytree(whole, run, dirs_exist_ok=True)
    assert "is not a path on a disk" in reconstruct.refused(run, "--output_dir=s3://bucket/x")
    (run / "posthoc_ema/held_out.json").unlink()
    said = reconstruct.refused(run, output_dir)
    assert f"{run} has no held-out loss of any width: give --sigma_rel" in said
    assert not (tmp_path / "out").exists()
    config = json.loads((run / "unet/config.json").read_text())
    other = UNet2DModel.from_config(config | {"center_input_sample": True, "mid_block_type": None})
    other.save_pretrained(run / "unet")
    said = reconstruct.refused(run, output_dir, "--sigma_rel", "0.1")
    assert "the snapshots are of another unet" in said


def test_damaged_parts_of_a_run_are_not_copied(tmp_path, inputs, whole):
    run, out = tmp_path / "run", tmp_path / "out"
    shutil.copytree(whole, run)
    path = run / "scheduler/scheduler_config.json"
    for text in path.read_text()[:40], "{}x", "[]":
        path.write_text(text)
        said = reconstruct.refused(run, f"--output_dir={out}", "--sigma_rel=0.06")
        assert f"{run}/scheduler is damaged: the run's command with --resume_from" in said
    shutil.rmtree(path.parent)
    said = reconstruct.refused(run, f"--output_dir={out}", "--sigma_rel=0.06")
    assert f"{run}/scheduler is damaged" in said and "(it is not a folder)" in said
    assert not [*out.iterdir()]
    train(*list_flags(inputs, run, "--resume_from_checkpoint=latest"))
    reconstruct(run, f"--output_dir={out}", "--sigma_rel=0.06")
    name = "scheduler/scheduler_config.json"
    assert (out / "sigma_rel-0.06" / name).read_bytes() == (whole / name).read_bytes()


def test_no_name_in_a_runs_model_index_leads_out_of_its_folder(tmp_path, whole):
    run = tmp_path / "run"
    shutil.copytree(whole, run)
    (tmp_path / "payload").mkdir()
    (run / "link").symlink_to(run / "unet")
    index = json.loads((run / "model_index.json").read_text())
    index |= dict.fromkeys(
        ["../payload", "link/../../payload", str(tmp_path / "payload")], ["a", "b"]
    )
    (run / "model_index.json").write_text(json.dumps(index))
    Script("reconstruct_ema")(str(run), f"--output_dir={tmp_path / 'out/deep'}", "--sigma_rel=0.06")
    written = {path.name for path in (tmp_path / "out/deep/sigma_rel-0.06").iterdir()}
    assert written == {"model_index.json", "unet", "scheduler"}
    assert {path.name for path in tmp_path.iterdir()} == {"run", "payload", "out"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"deep"}


def test_a_pipeline_without_averages_and_folders_of_the_user_are_refused(tmp_path, whole):
    run, out = tmp_path / "run", tmp_path / "out"
    shutil.copytree(whole, run)
    flags = (run, f"--output_dir={out}", "--sigma_rel=0.1")
    (out / "sigma_rel-0.1").mkdir(parents=True)
    (out / "sigma_rel-0.1/own.txt").touch()
    said = reconstruct.refused(*flags)
    assert f"{out}/sigma_rel-0.1 is not a pipeline, and would be replaced" in said
    assert (out / "sigma_rel-0.1/own.txt").exists()
    shutil.rmtree(out)
    own = run / "posthoc_ema/step-0000002 (copy)"
    shutil.copytree(run / "posthoc_ema/step-0000002", own)
    assert len(posthoc.list_snapshots(run)) == 8
    posthoc.prune_snapshots(run, 1)
    assert own.exists() and len(posthoc.list_snapshots(run)) == 2
    (run / "posthoc_ema/held_out.json").write_text("{")
    said = reconstruct.refused(*flags[:2])
    assert "held_out.json can't be read: give --sigma_rel" in said
    (run / "posthoc_ema/held_out.json").write_text('{"best": 7}')
    said = reconstruct.refused(*flags[:2])
    assert "held_out.json can't be read: give --sigma_rel (7 is not between 0.005 and" in said
    path = run / "posthoc_ema/step-0000001/unet-0.05.safetensors"
    for sigma_rel, images in ("0.05", "0"), ("-1", "2"), ("1e309", "2"), ("x", "2"):
        forged = {"model": "unet", "sigma_rel": sigma_rel, "images": images}
        save_file(load_file(path), path, forged)
        assert "step-0000001/unet-0.05.safetensors can't be read (" in reconstruct.refused(*flags)
    weights = {name: weight.fill_(torch.inf) for name, weight in load_file(path).items()}
    save_file(weights, path, {"model": "unet", "sigma_rel": "0.05", "images": "2"})
    assert "weights with NaN or infinity, such as conv_in.bias" in reconstruct.refused(*flags)
    shutil.rmtree(run / "unet")
    said = reconstruct.refused(*flags)
    assert "has snapshots of unet, and its pipeline has none of these" in said
    for text in "{", "[1]":
        (run / "model_index.json").write_text(text)
        assert "model_index.json can't be read" in reconstruct.refused(*flags)


def test_flags_that_do_not_fit_are_refused(tmp_path, inputs):
    flags = list_flags(inputs, tmp_path)
    needs = "--posthoc_ema needs two different widths"
    assert needs in train.refused(*flags, "--posthoc_ema", "0.05", status=2)
    for script, flag in (("train_flow", "--shard"), ("train_text_to_image", "--rank=4")):
        said = Script(script).refused(
            "--posthoc_ema", *WIDTHS, flag, f"--output_dir={tmp_path}", status=2
        )
        assert f"--posthoc_ema can't be combined with {flag[:6]}" in said
    flags = [flag for flag in flags if flag not in ("--posthoc_ema", *WIDTHS)]
    assert "--posthoc_ema_steps does nothing without" in train.refused(*flags, status=2)


@pytest.mark.long
def test_two_processes_resume_to_the_same_snapshots_and_measure_as_one(tmp_path, inputs):
    flags = list_flags(inputs, tmp_path / "two", "--train_batch_size=1")
    train.fork(*flags, num_processes=2)
    two = read_losses(tmp_path / "two")
    resumed = f"--resume_from_checkpoint={tmp_path / 'two/checkpoint-2'}"
    train.fork(*flags, f"--output_dir={tmp_path / 'again'}", resumed, num_processes=2)
    found = read_snapshots(tmp_path / "two")
    rest = {name: data for name, data in found.items() if name[:12] in STEPS[2:]}
    again = read_snapshots(tmp_path / "again")
    # without the headers, which name the snapshot before: in this folder, the first one has none
    values = lambda snapshots: {
        name: data[8 + int.from_bytes(data[:8], "little") :] for name, data in snapshots.items()
    }
    assert values(again) == values(rest) and len(rest) == 4
    # a finished run that is resumed measures again
    train(*flags, "--train_batch_size=2", "--resume_from_checkpoint=latest")
    assert read_snapshots(tmp_path / "two") == found
    assert read_losses(tmp_path / "two") == pytest.approx(two, rel=1e-5)


def read_losses(folder):
    losses = json.loads((folder / "posthoc_ema/held_out.json").read_text())["held_out_loss"]
    return [losses[name] for name in sorted(losses)]


def test_snapshots_on_the_disk_need_no_more_room(tmp_path, monkeypatch, capsys):
    """A run near its end has written most of them."""
    models = {"unet": torch.nn.Linear(1000, 1000, bias=False)}
    args = Namespace(
        output_dir=str(tmp_path),
        optimizer="adamw",
        use_ema=False,
        find_lr=False,
        posthoc_ema=[0.05, 0.1],
        posthoc_ema_steps=None,
        checkpointing_steps=10,
        checkpoints_to=None,
        max_train_steps=100,
    )
    weights = 4 * 1000**2
    # checkpoint: weights, two averages and two moments; result; two float16 averages a snapshot
    room = 2 * 5 * weights + weights + 3 * weights
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Namespace(free=room))
    with pytest.raises(SystemExit, match="two checkpoints and the result take 0.084 GB"):
        check_free_space(Namespace(is_main=True), models, args)
    for step in range(10, 80, 10):
        (tmp_path / f"posthoc_ema/step-{step:07d}").mkdir(parents=True)
    check_free_space(Namespace(is_main=True), models, args)
    said = capsys.readouterr().out.splitlines()
    assert [line.partition(": ")[2] for line in said] == [
        "0.04 GB for 10 snapshots",
        "0.012 GB for 3 more snapshots",
    ]
