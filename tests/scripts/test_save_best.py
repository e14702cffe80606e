"""--save_best: best/ holds the model of the step with the lowest held-out loss, after any kill."""

import json
import math
import os

import diffusers
import pytest
from conftest import (
    Script,
    assert_same_weights,
    list_unconditional_flags,
    make_captioned,
    make_models,
    patch,
)

import train_unconditional as script
from diffusion_training.training.keeping import best
from diffusion_training.training.keeping.best import read_best

pytestmark = pytest.mark.usefixtures("without_figures")
train, train_text_to_image = Script("train_unconditional"), Script("train_text_to_image")
LOSSES = [0.9, 0.4, 0.3, 0.6, 0.35, 0.7]  # of the steps 1 to 6


@pytest.fixture
def flags(tmp_path):
    """6 steps, all measured, with a checkpoint at every second one."""
    return list_unconditional_flags(
        tmp_path,
        12,
        *"--train_batch_size=2 --max_train_steps=6 --holdout=4 --validation_steps=1".split(),
        *"--save_best --checkpointing_steps=2 --resume_from_checkpoint=latest".split(),
    )


@pytest.fixture
def losses(monkeypatch):
    """The held-out losses of the EMA weights are those of the list.

    Checkpoints are written at once: when a thread has written one, best-before/ is deleted.
    """

    def measure(accelerator, records, *rest):
        if records.held_out.get("step") != rest[-1]:
            records.held_out = {
                "step": rest[-1],
                "held_out_loss": 1.0,
                "held_out_loss_ema": said[rest[-1] - 1],
            }
            records.write(records.held_out)

    said = [*LOSSES]
    patch(monkeypatch, "log_held_out_loss", measure)
    patch(monkeypatch, "make_checkpoint_copy", lambda *args: None)
    return said


def run_until_killed(flags, monkeypatch, name, at):
    """Run with these flags, and die in the function `name` at step `at`."""
    holder = script if hasattr(script, name) else best
    real = getattr(holder, name)

    def die(*args):
        values = [arg for arg in args if isinstance(arg, int)]
        if (values and values[0] == at) or (
            not values and read_best(args[1]) == {} and "best" in str(args[1])
        ):
            os._exit(9)
        return real(*args)

    with monkeypatch.context() as m:
        patch(m, name, die)
        train.fork(*flags, status=9)


def test_save_best_never_replaces_a_folder_of_the_user(tmp_path, flags):
    for name in ("best", "best-before"):
        folder = tmp_path / "out" / name
        folder.mkdir(parents=True)
        (tmp_path / "out/run.args").write_text("# python train.py @run.args")
        assert f"out/{name}, which is not from a run: rename that" in train.refused(*flags)
        best.restore_best(tmp_path / "out", -1)
        folder.rmdir()  # the folder still exists


def test_read_best_ignores_a_damaged_record(tmp_path):
    for content in ("", "{", "[]", '{"step": 1}', "[" * 10**5):
        (tmp_path / "held_out.json").write_text(content)
        assert read_best(tmp_path) == {}
    (tmp_path / "held_out.json").unlink()
    os.mkfifo(tmp_path / "held_out.json")
    assert read_best(tmp_path) == {}


def steps(folder):
    return [read_best(folder / name).get("step") for name in ("best", "best-before")]


def test_best_is_the_ema_model_of_the_lowest_held_out_loss(tmp_path, flags, losses):
    losses[:] = [math.nan, 0.4, 0.5, 0.6, 0.45, math.nan]
    train(*flags, "--checkpoints_total_limit=9")
    out = tmp_path / "out"
    assert json.loads((out / "best/held_out.json").read_text()) == {"step": 2, "held_out_loss": 0.4}
    assert_same_weights(out / "best/unet", out / "checkpoint-2/unet_ema")
    assert not (out / "best-before").exists()
    names = {path.name for path in (out / "best").iterdir()}
    assert names == {"unet", "scheduler", "model_index.json", "held_out.json"}
    assert isinstance(
        diffusers.DiffusionPipeline.from_pretrained(out / "best"), diffusers.DDPMPipeline
    )
    assert (
        "`best/` holds step 2, which has the lowest held-out loss: 0.4."
        in (out / "README.md").read_text()
    )
    assert (
        "best/ holds step 2, which has the lowest held-out loss: 0.4."
        in (out / "report.html").read_text()
    )


def test_resuming_at_an_earlier_checkpoint_restores_its_best(tmp_path, flags, losses, monkeypatch):
    run_until_killed(flags, monkeypatch, "log_validation", 3)
    assert steps(tmp_path / "out") == [3, 2]  # newer than the checkpoint of step 2
    losses[2:] = [0.5] * 4  # the same steps have other losses, as with other flags
    train(*flags)
    assert steps(tmp_path / "out") == [2, None]
    assert_same_weights(tmp_path / "out/best/unet", tmp_path / "out/checkpoint-2/unet_ema")


@pytest.mark.parametrize(
    "name, at",
    [
        ("log_validation", 3),
        ("save_pipeline", None),
        pytest.param("keep_best", 2, marks=pytest.mark.long),
    ],
)
def test_save_best_after_a_kill_equals_an_uninterrupted_run(
    tmp_path, flags, losses, monkeypatch, name, at
):
    train(*flags, f"--output_dir={tmp_path / 'whole'}")
    run_until_killed(flags, monkeypatch, name, at)
    train(*flags)
    assert steps(tmp_path / "out") == steps(tmp_path / "whole") == [3, None]
    assert_same_weights(tmp_path / "out/best/unet", tmp_path / "whole/best/unet")
    assert not list((tmp_path / "out").glob(".tmp-*"))


def test_new_run_forgets_the_best_of_an_earlier_run(tmp_path, flags, losses, monkeypatch):
    run_until_killed([*flags, "--checkpointing_steps=99"], monkeypatch, "log_validation", 3)
    assert steps(tmp_path / "out") == [3, None]
    losses[:] = [0.95] * 6
    train(*flags, "--max_train_steps=1")
    assert steps(tmp_path / "out") == [1, None]


def test_best_of_a_lora_is_the_adapter_file(tmp_path, losses):
    make_models(tmp_path)
    make_captioned(tmp_path / "images", 6)
    train_text_to_image(
        *train_text_to_image.flags(
            tmp_path / "out",
            f"--pretrained_model_name_or_path={tmp_path / 'sd'}",
            f"--train_data_dir={tmp_path / 'images'}",
            *"--rank=2 --resolution=16 --train_batch_size=2 --max_train_steps=4".split(),
            *"--validation_steps=1 --holdout=2 --checkpointing_steps=1".split(),
            *"--dataloader_num_workers=0 --learning_rate=1e-2 --save_best".split(),
        )
    )
    file = "pytorch_lora_weights.safetensors"
    names = {path.name for path in (tmp_path / "out/best").iterdir()}
    assert steps(tmp_path / "out") == [3, None]
    assert names == {file, "pytorch_lora_weights_kohya.safetensors", "held_out.json"}
    files = [
        (tmp_path / "out" / name / file).read_bytes()
        for name in ("best", "checkpoint-3", "checkpoint-4")
    ]
    assert files[0] == files[1] != files[2]


def test_save_best_needs_holdout(flags):
    error = train.refused(*flags, "--holdout=0", status=2)
    assert "--save_best needs --holdout: the best weights" in error


@pytest.mark.parametrize("best", [2, 3])
def test_save_best_resumes_from_a_renamed_checkpoint(
    tmp_path, flags, losses, without_figures, best
):
    """The step is read from the checkpoint, so a best model of a later step is dropped."""
    train(*flags, "--max_train_steps=2", "--validation_steps=2")
    kept = (tmp_path / "out/checkpoint-2").rename(tmp_path / "kept")
    (tmp_path / "out/best/held_out.json").write_text(
        json.dumps({"step": best, "held_out_loss": 0.1})
    )
    train(*flags, "--max_train_steps=3", f"--resume_from_checkpoint={kept}")
    assert steps(tmp_path / "out") == [best, None]
    assert read_best(tmp_path / "out/best")["held_out_loss"] == (0.1 if best == 2 else losses[2])
