import argparse
import io
import json
import math
import os
import platform
import re
import resource
import shutil
import signal
import tarfile
import threading
import time
import tracemalloc
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from conftest import (
    assert_same_weights,
    checkpoints,
    finish,
    kill,
    launch,
    make_images,
    metrics,
    start,
    wait_until,
    weights,
)
from diffusers import DDIMScheduler, DDPMScheduler, DiffusionPipeline, UNet2DModel
from diffusers.training_utils import EMAModel
from filelock import FileLock
from fsspec.implementations.local import LocalFileSystem
from PIL import Image

import train_unconditional as script


@pytest.fixture
def flags(tmp_path, unet_config):
    """A run of 6 steps on 6 images that takes a second; later flags win over these."""
    make_images(tmp_path / "images", 6)
    return [
        f"--train_data_dir={tmp_path / 'images'}", f"--model_config_name_or_path={unet_config}", "--resolution=16",
        f"--output_dir={tmp_path / 'out'}", "--train_batch_size=1", "--num_epochs=1", "--ddpm_num_inference_steps=2",
        "--eval_batch_size=3", "--learning_rate=1e-3", "--lr_warmup_steps=2", "--logging_steps=1", "--report_to=none",
        "--dataloader_num_workers=0",
    ]  # fmt: skip


def train(*argv):
    script.main(script.parse_args([str(arg) for arg in argv]))


def refused(capfd, flags, *argv):
    """What a run that ends with status 1 says."""
    try:
        train(*flags, *argv)
    except SystemExit as stop:
        assert stop.code == 1
        return capfd.readouterr().err
    pytest.fail("the run was not refused")


# ------------------------------------------------------------------- commands and what they leave


def test_diffusers_commands_leave_the_same_checkpoints(tmp_path, flags, unet_config):
    """The command lines of diffusers' example test, but for local paths."""
    shared = f"""
        --dataset_name {tmp_path / "images"}
        --model_config_name_or_path {unet_config}
        --resolution 64
        --num_epochs 1
        --gradient_accumulation_steps 1
        --learning_rate 1e-3
        --lr_warmup_steps 5
        """.split()
    plain, limited, several = (
        [*shared, "--output_dir", str(tmp_path / name)] for name in ("plain", "limited", "several")
    )
    train(*plain, *"--train_batch_size 2 --ddpm_num_inference_steps 2".split())
    assert (tmp_path / "plain/unet/diffusion_pytorch_model.safetensors").is_file()
    assert (tmp_path / "plain/scheduler/scheduler_config.json").is_file()
    one = "--train_batch_size 1 --ddpm_num_inference_steps 1 --checkpointing_steps=2".split()
    train(*limited, *one, "--checkpoints_total_limit=2")
    assert checkpoints(tmp_path / "limited") == {"checkpoint-4", "checkpoint-6"}
    train(*several, *one)
    assert checkpoints(tmp_path / "several") == {"checkpoint-2", "checkpoint-4", "checkpoint-6"}
    again = "--num_epochs 2 --resume_from_checkpoint=checkpoint-6 --checkpoints_total_limit=2".split()
    train(*several, *one, *again)
    assert checkpoints(tmp_path / "several") == {"checkpoint-10", "checkpoint-12"}


def test_output_opens_as_a_pipeline_and_has_card_samples_and_curve(tmp_path, flags):
    train(*flags, "--save_images_epochs=1", "--num_epochs=2", "--checkpointing_steps=12")
    out = tmp_path / "out"
    pipeline = DiffusionPipeline.from_pretrained(out)
    assert pipeline(num_inference_steps=2).images[0].size == (16, 16)
    assert_same_weights(out / "unet", out / "checkpoint-12/unet_ema")  # what is saved is the average
    assert UNet2DModel.from_pretrained(out / "checkpoint-12/unet").config.sample_size == 16
    assert sorted(path.name for path in (out / "samples").iterdir()) == ["step-0000006.png", "step-0000012.png"]
    assert Image.open(out / "loss.png").size[0] > 300
    card = (out / "README.md").read_text()
    assert card.startswith("---\n") and "samples/step-0000012.png" in card and "| learning_rate | 0.001 |" in card
    records = metrics(out)
    assert [record["step"] for record in records] == list(range(1, 13))
    assert [record["epoch"] for record in records] == [0] * 6 + [1] * 6
    names = "step epoch loss lr grad_norm clipped images_per_second data_wait skipped_images"
    assert all(list(record) == names.split() and math.isfinite(sum(record.values())) for record in records)
    assert not list(out.glob(".tmp-*"))


def test_ddim_and_v_prediction_and_zero_snr_are_saved_as_trained(tmp_path, flags):
    train(*flags, "--prediction_type=v_prediction", "--rescale_betas_zero_snr", "--ddpm_beta_schedule=scaled_linear",
          "--validation_scheduler=ddim", "--snr_gamma=5")  # fmt: skip
    scheduler = DiffusionPipeline.from_pretrained(tmp_path / "out").scheduler
    assert isinstance(scheduler, DDIMScheduler) and scheduler.alphas_cumprod[-1] == 0
    assert scheduler.config.prediction_type == "v_prediction" and scheduler.config.beta_schedule == "scaled_linear"
    scheduler.set_timesteps(2)
    assert scheduler.timesteps[0] == 999
    # Going on from that pipeline keeps its objective; a flag that is given wins.
    again = [flag for flag in flags if "model_config" not in flag] + [f"--output_dir={tmp_path / 'again'}"]
    train(*again, f"--pretrained_model_name_or_path={tmp_path / 'out'}", "--learning_rate=0")
    config = DiffusionPipeline.from_pretrained(tmp_path / "again").scheduler.config
    assert config.prediction_type == "v_prediction" and config.rescale_betas_zero_snr
    assert_same_weights(tmp_path / "out/unet", tmp_path / "again/unet")


@pytest.mark.parametrize("name", ["cpu", "single_gpu", "multi_gpu"])
def test_accelerate_configs_launch(name, tmp_path, flags):
    """Each YAML, really launched; without a GPU, multi_gpu runs its two processes over gloo."""
    env = {"ACCELERATE_USE_CPU": "true"} if name == "multi_gpu" else {}
    config = ["--config_file", f"accelerate_configs/{name}.yaml"]
    config += ["--num_processes", "2", "--main_process_port", "0"] if name == "multi_gpu" else []
    run = launch(*config, "train_unconditional.py", *flags, "--checkpointing_steps=2", env=env)
    assert run.returncode == 0, run.stderr
    state = json.loads((tmp_path / "out/checkpoint-2/trainer_state.json").read_text())
    assert state["settings"]["num_processes"] == (2 if name == "multi_gpu" else 1)
    assert len(metrics(tmp_path / "out")) == (3 if name == "multi_gpu" else 6)


def test_launch_without_configuration_and_with_bf16(tmp_path, flags):
    run = launch("train_unconditional.py", *flags, "--mixed_precision=bf16")
    assert run.returncode == 0, run.stderr
    assert "waiting for data" in run.stderr and "img/s" in run.stderr
    assert DiffusionPipeline.from_pretrained(tmp_path / "out").unet.dtype == torch.float32


# diffusers' train_unconditional.py, autumn 2026; the README explains the ones that differ or are gone.
DIFFUSERS = {
    "dataset_name": None, "dataset_config_name": None, "model_config_name_or_path": None, "cache_dir": None,
    "output_dir": "ddpm-model-64", "resolution": 64, "center_crop": False, "random_flip": False,
    "train_batch_size": 16,
    "eval_batch_size": 16, "num_epochs": 100, "save_images_epochs": 10, "save_model_epochs": 10,
    "gradient_accumulation_steps": 1, "learning_rate": 1e-4, "lr_scheduler": "cosine", "lr_warmup_steps": 500,
    "adam_beta1": 0.95, "adam_beta2": 0.999, "adam_weight_decay": 1e-6, "adam_epsilon": 1e-8, "ema_inv_gamma": 1.0,
    "ema_power": 0.75, "ema_max_decay": 0.9999, "push_to_hub": False, "hub_model_id": None, "hub_private_repo": False,
    "logger": "tensorboard", "logging_dir": "logs", "ddpm_num_inference_steps": 1000, "checkpointing_steps": 500,
    "checkpoints_total_limit": None, "resume_from_checkpoint": None, "preserve_input_precision": False,
    "prediction_type": "epsilon", "ddpm_num_steps": 1000, "ddpm_beta_schedule": "linear",
}  # fmt: skip


def test_every_flag_of_diffusers_has_its_default(tmp_path, capsys):
    args = script.parse_args(["--train_data_dir", str(tmp_path)])
    scheduler = script.make_noise_scheduler(args).config  # where the unset objective flags take effect
    values = {**vars(args), "num_epochs": args.num_train_epochs, "logger": args.report_to}
    values.update(prediction_type=scheduler.prediction_type, ddpm_num_steps=scheduler.num_train_timesteps)
    values.update(ddpm_beta_schedule=scheduler.beta_schedule)
    assert {name: values[name] for name in DIFFUSERS} == DIFFUSERS
    with pytest.raises(SystemExit):
        script.parse_args(["--help"])
    printed = capsys.readouterr().out
    for flag in (*DIFFUSERS, "train_data_dir", "use_ema", "dataloader_num_workers", "mixed_precision"):
        assert f"--{flag}" in printed, flag


def test_demo_prints_its_command_and_any_flag_wins(tmp_path, capsys):
    args = script.parse_args(["--num_epochs", "3", "--output_dir", str(tmp_path)])
    printed = capsys.readouterr().out.strip().split("\n")[-1]
    assert args.num_train_epochs == 3 and args.train_batch_size == 64
    same = script.parse_args(printed.split("train_unconditional.py ")[1].split())
    assert vars(same) == vars(args)
    assert len(datasets.load_dataset(args.train_data_dir, split="train")) == 1797


def test_run_args_are_the_command_again(tmp_path, flags, capsys, monkeypatch):
    train(
        *flags,
        "--random_flip",
        "--no-use_ema",
        "--tracker_project_name=it's a # test",
        "--lr_power=0.30000000000000004",
    )
    again = [f"@{tmp_path / 'out/run.args'}"]
    first = script.parse_args([*flags, "--random_flip", "--no-use_ema", "--tracker_project_name=it's a # test",
                               "--lr_power=0.30000000000000004", "--mixed_precision=no"])  # fmt: skip
    assert vars(script.parse_args(again)) == vars(first)
    later = script.parse_args([*again, "--no-random_flip", "--seed=3"])
    assert (later.random_flip, later.use_ema, later.seed) == (False, False, 3)
    (tmp_path / "own.args").write_text("# mine\n--resolution 32  # small\n\n--train_data_dir 'a b'\n--center_crop\n")
    (tmp_path / "a b").mkdir()
    monkeypatch.chdir(tmp_path)
    args = script.parse_args(["@own.args", "--lr_warmup_steps=7"])
    assert (args.resolution, args.train_data_dir, args.center_crop, args.lr_warmup_steps) == (32, "a b", True, 7)
    with pytest.raises(SystemExit) as stop:
        script.parse_args(["@nowhere.args"])
    assert stop.value.code == 2 and "nowhere.args" in capsys.readouterr().err


# ------------------------------------------------------------------- exactness

EXACT = ["--train_batch_size=2", "--num_epochs=3", "--random_flip", "--checkpointing_steps=1",
         "--checkpoints_total_limit=2", "--dataloader_num_workers=1", "--save_model_epochs=1"]  # fmt: skip


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("num_processes", [1, 2])
def test_killed_at_any_moment_and_resumed_is_bit_identical(tmp_path, flags, accumulation, num_processes):
    """SIGKILL again and again, at moments that also fall into saving; 11 images leave short steps and batches."""
    make_images(tmp_path / "images", 11)
    flags = [*flags, *EXACT, f"--gradient_accumulation_steps={accumulation}"]
    whole, killed = [f"--output_dir={tmp_path / name}" for name in ("whole", "killed")]
    assert set(finish(start(lambda: train(*flags, whole), num_processes, tmp_path / "whole.log"))) == {0}, (
        tmp_path / "whole.log"
    ).read_text()
    for attempt, moment in enumerate(np.random.default_rng(accumulation).uniform(0.0, 1.5, 6)):
        pids = start(lambda: train(*flags, killed, "--resume_from_checkpoint=latest"), num_processes)
        if attempt >= 3:  # at the latest now it is killed with something to lose
            wait_until(lambda: (tmp_path / "killed").is_dir() and checkpoints(tmp_path / "killed"))
        time.sleep(moment)
        kill(pids)
    resumed = start(
        lambda: train(*flags, killed, "--resume_from_checkpoint=latest"), num_processes, tmp_path / "killed.log"
    )
    codes = finish(resumed)
    assert set(codes) == {0}, (tmp_path / "killed.log").read_text()
    assert checkpoints(tmp_path / "whole") == checkpoints(tmp_path / "killed") != set()
    last = max(checkpoints(tmp_path / "whole"), key=lambda name: int(name.split("-")[1]))
    for part in ("unet", "unet_ema"):
        assert_same_weights(tmp_path / "whole" / last / part, tmp_path / "killed" / last / part)
    assert_same_weights(tmp_path / "whole/unet", tmp_path / "killed/unet")
    shown = [[(r["step"], r["epoch"], r["loss"], r["lr"], r["grad_norm"]) for r in metrics(tmp_path / name)]
             for name in ("whole", "killed")]  # fmt: skip
    assert shown[0] == shown[1]
    assert not list((tmp_path / "killed").glob(".tmp-*"))


@pytest.mark.parametrize("number, code", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.parametrize("num_processes", [1, 2])
def test_signal_finishes_the_step_saves_and_says_how_to_resume(tmp_path, flags, number, code, num_processes):
    """One process gets the signal; all of them stop after the same step."""
    flags = [*flags, "--num_epochs=400", "--dataloader_num_workers=1", f"--output_dir={tmp_path / 'stopped'}"]
    pids = start(lambda: train(*flags), num_processes, tmp_path / "log")
    metrics_path = tmp_path / "stopped/metrics.jsonl"
    wait_until(lambda: metrics_path.is_file() and len(metrics_path.read_text().splitlines()) > 3)
    os.kill(pids[-1], number)
    assert set(finish(pids)) == {code}, (tmp_path / "log").read_text()
    (checkpoint,) = checkpoints(tmp_path / "stopped")
    log = (tmp_path / "log").read_text()
    step = checkpoint.split("-")[1]
    assert re.search(
        rf"Stopped by {signal.Signals(number).name} after step {step} of .*--resume_from_checkpoint latest", log
    )


def test_what_a_kill_left_half_moved_is_put_back(tmp_path):
    for name in (".tmp-old-metrics.jsonl", ".tmp-old-run.args"):
        (tmp_path / name).write_text("old")
    (tmp_path / "run.args").write_text("new")
    (tmp_path / ".tmp-saving").mkdir()
    script.clean(tmp_path)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"metrics.jsonl": "old", "run.args": "new"}


def test_samples_that_a_kill_kept_from_a_checkpoint_come_when_it_is_resumed(tmp_path, flags, monkeypatch):
    """The checkpoint is written first, because samples may take minutes; what it says is done is done in the end."""
    flags = [*flags, "--checkpointing_steps=2", "--validation_steps=2"]
    train(*flags, f"--output_dir={tmp_path / 'whole'}")
    with monkeypatch.context() as killed:
        killed.setattr(script, "log_validation", lambda *args: os._exit(9))
        assert finish(start(lambda: train(*flags), log=tmp_path / "log")) == [9], (tmp_path / "log").read_text()
    assert checkpoints(tmp_path / "out") == {"checkpoint-2"} and not (tmp_path / "out/samples").exists()
    log_validation = script.log_validation

    def stopped(*args):
        os.kill(os.getpid(), signal.SIGTERM)
        log_validation(*args)

    with monkeypatch.context() as killed:  # once more, in what is to be made good: no step may lead past it
        killed.setattr(script, "log_validation", stopped)
        resumed = start(lambda: train(*flags, "--resume_from_checkpoint=latest"), log=tmp_path / "log")
        assert finish(resumed) == [143], (tmp_path / "log").read_text()
    assert checkpoints(tmp_path / "out") == {"checkpoint-2"} and not (tmp_path / "out/samples").exists()
    train(*flags, "--resume_from_checkpoint=latest")
    for path in (tmp_path / "whole/samples").iterdir():
        assert path.read_bytes() == (tmp_path / "out/samples" / path.name).read_bytes()
    assert len(list((tmp_path / "out/samples").iterdir())) == 3


@pytest.mark.parametrize("change, processes", [("--train_batch_size=3", 1), ("--gradient_accumulation_steps=3", 1),
                                               ("--seed=0", 2)])  # fmt: skip
def test_resuming_with_another_batch_repeats_and_skips_no_image(tmp_path, flags, change, processes):
    """7 images, 2 epochs: 4 of them in steps of 2, and then the rest in other steps."""
    make_images(tmp_path / "images", 7)
    flags = [*flags, "--train_batch_size=2", "--num_epochs=2", "--center_crop", "--checkpointing_steps=2"]
    compute_loss = script.compute_loss

    def run(*argv):
        def recording(unet, noise_scheduler, images, weight, args):
            levels = ((images.mean(dim=(1, 2, 3)) + 1) * 127.5 / 20).floor()[weight > 0].tolist()
            with (tmp_path / "seen").open("a") as file:
                file.write("".join(f"{level}\n" for level in levels))
            return compute_loss(unet, noise_scheduler, images, weight, args)

        script.compute_loss = recording
        train(*flags, *argv)

    assert finish(start(lambda: run("--max_train_steps=2"), log=tmp_path / "log")) == [0]
    pids = start(lambda: run(change, "--resume_from_checkpoint=latest"), processes, log=tmp_path / "log")
    assert set(finish(pids)) == {0}, (tmp_path / "log").read_text()
    seen = [float(line) for line in (tmp_path / "seen").read_text().split()]
    assert sorted(seen[:7]) == sorted(seen[7:]) == list(range(7))
    step = max(int(name.split("-")[1]) for name in checkpoints(tmp_path / "out"))
    per_step = {"--train_batch_size=3": 3, "--gradient_accumulation_steps=3": 6, "--seed=0": 4}[change]
    assert step == 2 + math.ceil(3 / per_step) + math.ceil(7 / per_step)
    state = json.loads((tmp_path / f"out/checkpoint-{step}/trainer_state.json").read_text())
    assert state["images_seen"] == 14 and state["settings"]["max_train_steps"] == step


def test_more_epochs_go_on_from_the_end_and_less_change_nothing(tmp_path, flags, capsys):
    train(*flags, "--num_epochs=2")
    assert checkpoints(tmp_path / "out") == {"checkpoint-12"}  # at the end there always is one
    train(*flags, "--num_epochs=3", f"--output_dir={tmp_path / 'whole'}", "--lr_scheduler=constant")
    before = {path: path.read_bytes() for path in (tmp_path / "out").rglob("*.safetensors")}
    train(*flags, "--num_epochs=1", "--resume_from_checkpoint=latest")
    assert "checkpoint-12 is beyond step 6: there is nothing left to train" in capsys.readouterr().out
    assert {path: path.read_bytes() for path in (tmp_path / "out").rglob("*.safetensors")} == before
    assert len(metrics(tmp_path / "out")) == 12
    train(*flags, "--num_epochs=3", "--resume_from_checkpoint=latest")
    assert len(metrics(tmp_path / "out")) == 18 and "checkpoint-18" in checkpoints(tmp_path / "out")


@pytest.mark.parametrize("folder", [".", "samples"])
def test_what_a_kill_left_of_a_save_is_in_nobodys_way(tmp_path, flags, folder):
    """Wherever it came: half a folder is written over, and does not make each later save fail."""
    train(*flags, "--max_train_steps=2")
    (tmp_path / "out" / folder / ".tmp-saving/unet").mkdir(parents=True)
    (tmp_path / "out" / folder / ".tmp-saving/half.png").write_bytes(b"half")
    train(*flags, "--max_train_steps=4", "--validation_steps=3", "--resume_from_checkpoint=latest")
    names = sorted(path.name for path in (tmp_path / "out/samples").iterdir())
    assert names == ["step-0000002.png", "step-0000003.png", "step-0000004.png"]
    assert not list((tmp_path / "out").rglob(".tmp-*")) and not (tmp_path / "out/half.png").exists()


def test_what_was_moved_to_another_disk_and_linked_back_is_replaced_and_stays_there(tmp_path, flags):
    flags = [*flags, "--checkpointing_steps=2", "--checkpoints_total_limit=1", "--resume_from_checkpoint=latest"]
    train(*flags, "--max_train_steps=2")
    for name in ("checkpoint-2", "unet"):
        (tmp_path / "out" / name).rename(tmp_path / name)
        (tmp_path / "out" / name).symlink_to(tmp_path / name)
    (tmp_path / "out/.tmp-link").symlink_to(tmp_path / "images")
    train(*flags, "--max_train_steps=4")
    assert checkpoints(tmp_path / "out") == {"checkpoint-4"} and not (tmp_path / "out/unet").is_symlink()
    assert (tmp_path / "checkpoint-2/trainer_state.json").exists() and (tmp_path / "unet/config.json").exists()
    assert len(list((tmp_path / "images").iterdir())) == 6 and not list((tmp_path / "out").glob(".tmp-*"))


def test_a_loader_process_that_can_not_hand_over_ends_the_run(tmp_path, flags, monkeypatch):
    """As in a container whose /dev/shm is full: torch's own thread would drop the batch, and the run wait for ever."""

    class NoRoom:
        def __reduce__(self):
            raise RuntimeError("unable to write to file </torch_1>: No space left on device (28)")

    monkeypatch.setattr(script.ImageDataset, "__getitem__", lambda self, keys: {"pixel_values": NoRoom()})
    run = start(lambda: train(*flags, "--dataloader_num_workers=1"), log=tmp_path / "log")
    assert finish(run, timeout=30) == [1]
    assert "out of memory or /dev/shm?" in (tmp_path / "log").read_text()


def test_one_process_alone_speaks_whatever_its_rank_is_said_to_be(tmp_path, flags, capfd, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert "the processes can't be set up as they were launched" in refused(capfd, flags)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_disk_that_goes_away_ends_the_run_and_a_file_that_is_gone_does_not(tmp_path, flags, workers):
    flags = [*flags, f"--dataloader_num_workers={workers}", "--num_epochs=1", "--checkpointing_steps=2"]
    whole = [*flags, f"--output_dir={tmp_path / 'whole'}"]
    train(*whole)

    def run():
        train_step, steps = script.train_step, []

        def away(*args):
            steps.append(1)
            if len(steps) == 2:
                (tmp_path / "images").rename(tmp_path / "away")
            return train_step(*args)

        script.train_step = away
        script.decode_image = slow(script.decode_image)
        train(*flags)

    def slow(decode_image):
        return lambda *args, **options: (time.sleep(0.1), decode_image(*args, **options))[1]

    assert finish(start(run, log=tmp_path / "log"), timeout=60) == [1]
    log = (tmp_path / "log").read_text()
    assert "[Errno 2] No such file or directory" in log and "what was saved before is whole" in log, log
    assert "Traceback" not in log and len(log.splitlines()[-1]) < 400
    (tmp_path / "away").rename(tmp_path / "images")
    train(*flags, "--resume_from_checkpoint=latest")
    assert_same_weights(tmp_path / "whole/unet", tmp_path / "out/unet")
    rows = datasets.Dataset.from_dict({"image": [str(tmp_path / f"images/{i}.png") for i in range(7)]})
    (tmp_path / "table").mkdir()
    rows.to_parquet(tmp_path / "table/rows.parquet")  # of seven files there are six
    train(*flags, f"--train_data_dir={tmp_path / 'table'}", f"--output_dir={tmp_path / 'b'}", "--image_column=image")
    assert metrics(tmp_path / "b")[-1]["skipped_images"] == 1


@pytest.mark.parametrize("argv", ["--output_dir=out\udce4", "--logging_dir=\udce4", "--train_data_dir=\udce4"])
def test_what_is_no_text_is_refused(tmp_path, flags, capfd, argv):
    (tmp_path / "\udce4").mkdir()
    argv = argv.replace("=", f"={tmp_path}/") if "train" in argv else argv
    assert "can't be read as text" in refused(capfd, flags, argv)


def test_an_output_dir_that_is_moved_ends_the_run(tmp_path, flags, capfd, monkeypatch):
    save_checkpoint = script.save_checkpoint

    def moved(*args):
        (tmp_path / "out").rename(tmp_path / "elsewhere")
        save_checkpoint(*args)

    monkeypatch.setattr(script, "save_checkpoint", moved)
    assert "could not be saved ([Errno 2]" in refused(capfd, flags) and not (tmp_path / "out").exists()


def test_an_error_inside_a_loader_process_keeps_its_traceback(tmp_path, flags, monkeypatch):
    def broken(self, keys):
        raise RuntimeError("a bug of mine")

    monkeypatch.setattr(script.ImageDataset, "__getitem__", broken)
    with pytest.raises(RuntimeError, match="(?s)DataLoader worker process 0.*a bug of mine"):
        train(*flags, "--dataloader_num_workers=1")


def test_averaging_can_begin_at_a_checkpoint_without(tmp_path, flags, capsys):
    train(*flags, "--no-use_ema", "--checkpointing_steps=3")
    train(*flags, "--checkpointing_steps=3", "--resume_from_checkpoint=latest", "--num_epochs=2")
    assert "use_ema False -> True" in capsys.readouterr().out
    assert (tmp_path / "out/checkpoint-12/unet_ema").is_dir()


@pytest.mark.parametrize("moment", ["first sample", "last sample"])
@pytest.mark.parametrize("num_processes", [1, 2])
def test_a_signal_does_not_wait_for_samples(tmp_path, flags, moment, num_processes):
    """1,000 sampling steps of 50 ms: the signal comes in the first; one process gets it, all end."""
    step = DDPMScheduler.step
    steps = ["--max_train_steps=4", "--validation_steps=2"] if moment == "first sample" else ["--max_train_steps=2"]
    flags = [*flags, *steps, "--ddpm_num_inference_steps=1000", "--eval_batch_size=2", "--checkpointing_steps=3"]

    def run():
        def slow(*args, **options):
            (tmp_path / "sampling").touch()
            time.sleep(0.05 if os.environ.get("RANK", "0") == str(num_processes - 1) else 0)
            return step(*args, **options)

        DDPMScheduler.step = slow
        train(*flags)

    begin = time.time()
    pids = start(run, num_processes, tmp_path / "log")
    wait_until((tmp_path / "sampling").is_file)
    os.kill(pids[-1], signal.SIGTERM)
    assert set(finish(pids)) == {143} and time.time() - begin < 30, (tmp_path / "log").read_text()
    assert "checkpoint-2" in checkpoints(tmp_path / "out") and not (tmp_path / "out/samples").exists()
    quick = [*flags, "--ddpm_num_inference_steps=2", "--resume_from_checkpoint=latest"]
    assert set(finish(start(lambda: train(*quick), num_processes, tmp_path / "log"))) == {0}
    drawn = sorted(path.name[-5:-4] for path in (tmp_path / "out/samples").iterdir())
    assert drawn == (["2", "4"] if moment == "first sample" else ["2"])


def test_same_seed_same_weights_and_another_seed_others(tmp_path, flags):
    for name, seed in (("a", 7), ("b", 7), ("c", 8)):
        train(*flags, "--random_flip", f"--seed={seed}", f"--output_dir={tmp_path / name}")
    assert_same_weights(tmp_path / "a/unet", tmp_path / "b/unet")
    with pytest.raises(AssertionError):
        assert_same_weights(tmp_path / "a/unet", tmp_path / "c/unet")


def test_two_processes_share_the_images_and_draw_their_own_noise(tmp_path, flags):
    """7 images in steps of 2 x 2, two epochs: what each process really trained on, from inside the loss."""
    make_images(tmp_path / "images", 7)
    compute_loss = script.compute_loss

    def recording(unet, noise_scheduler, images, weight, args):
        levels = ((images.mean(dim=(1, 2, 3)) + 1) * 127.5 / 20).floor().tolist()
        with (tmp_path / f"rank{os.environ['RANK']}").open("a") as file:
            file.write(json.dumps([levels, weight.tolist(), torch.initial_seed()]) + "\n")
        return compute_loss(unet, noise_scheduler, images, weight, args)

    def run():
        script.compute_loss = recording
        train(*flags, "--train_batch_size=2", "--num_epochs=2")

    assert finish(start(run, 2, tmp_path / "log")) == [0, 0], (tmp_path / "log").read_text()
    ranks = [[json.loads(line) for line in (tmp_path / f"rank{r}").read_text().splitlines()] for r in range(2)]
    assert len(ranks[0]) == len(ranks[1]) == 4  # two steps an epoch
    for epoch in (0, 2):
        seen = [level for rank in ranks for levels, _, _ in rank[epoch : epoch + 2] for level in levels]
        assert sorted(seen) == [0, 1, 2, 3, 4, 5, 6]
    assert [batch[0] for batch in ranks[0][:2]] != [batch[0] for batch in ranks[0][2:]]  # another order
    seeds = [seed for rank in ranks for _, _, seed in rank]
    assert len(set(seeds)) == len(seeds)


@pytest.mark.parametrize(
    "num_images, batch_size, accumulation, num_processes",
    [(6, 1, 1, 1), (10, 4, 3, 1), (10, 4, 3, 2), (5, 1, 2, 2), (1, 4, 1, 2), (33, 2, 3, 4)],
)
def test_sampler_covers_each_epoch_once_weighs_exactly_and_starts_anywhere(
    num_images, batch_size, accumulation, num_processes
):
    argv = ["--train_data_dir=.", f"--train_batch_size={batch_size}", f"--gradient_accumulation_steps={accumulation}"]
    args = script.parse_args(argv)
    per_step = batch_size * accumulation * num_processes
    steps = math.ceil(num_images / per_step)
    micro = [math.ceil(min(per_step, num_images - s * per_step) / (batch_size * num_processes)) for s in range(steps)]

    def take(rank, images_seen, count):
        batches = script.step_batches(range(num_images), args, rank, num_processes, images_seen)
        return [next(batches) for _ in range(count)]

    epochs = [take(rank, 0, 2 * sum(micro)) for rank in range(num_processes)]
    for epoch in (0, 1):
        mine = [batches[epoch * sum(micro) : (epoch + 1) * sum(micro)] for batches in epochs]
        keys = [key for batches in mine for batch in batches for key in batch if key[2] > 0]
        assert sorted(row for _, row, _ in keys) == list(range(num_images)) and {e for e, _, _ in keys} == {epoch}
        done = 0
        for count in micro:  # averaged over processes, a step's weights add up to one and are all equal
            step = [key[2] for batches in mine for batch in batches[done : done + count] for key in batch if key[2]]
            assert sum(step) / num_processes == pytest.approx(1) and len(set(step)) == 1
            done += count
    first = 1 if steps > 1 else 0
    assert take(0, first * per_step, 3) == take(0, 0, sum(micro) + 3)[sum(micro[:first]) :][:3]
    # From any image, as after a run with another batch size: what is left of the epoch, each once.
    for seen in range(num_images):
        count = math.ceil((num_images - seen) / per_step)
        taken = [take(rank, num_images + seen, 3 * sum(micro)) for rank in range(num_processes)]
        left = [[key for batch in batches for key in batch if key[0] == 1 and key[2]] for batches in taken]
        order = np.random.default_rng([0, 1]).permutation(num_images).tolist()
        assert sorted(row for keys in left for _, row, _ in keys) == sorted(order[seen:]) and count >= 1


@pytest.mark.parametrize("num_processes, accumulation", [(1, 1), (1, 2), (2, 1)])
def test_learning_rate_follows_the_curve_in_optimizer_steps(tmp_path, flags, num_processes, accumulation):
    make_images(tmp_path / "images", 8)
    argv = [*flags, f"--gradient_accumulation_steps={accumulation}", "--lr_warmup_steps=3", "--max_train_steps=7"]
    assert set(finish(start(lambda: train(*argv), num_processes))) == {0}
    # By hand: thirds up to 1e-3, then half a cosine over the remaining steps and one, so that none is wasted on 0.
    cosine = [0.5 * (1 + math.cos(math.pi * k / 5)) for k in (1, 2, 3, 4)]
    expected = [1e-3 * factor for factor in (1 / 3, 2 / 3, 1.0, *cosine)]
    assert [record["lr"] for record in metrics(tmp_path / "out")] == pytest.approx(expected)


@pytest.mark.parametrize("flag", ["--gradient_checkpointing", "--compile=eager"])
def test_memory_and_compile_flags_do_not_change_the_training(tmp_path, flags, unet_config, flag):
    config = json.loads(Path(unet_config, "config.json").read_text())
    Path(unet_config, "config.json").write_text(json.dumps({**config, "dropout": 0.0}))
    train(*flags, "--max_train_steps=2", f"--output_dir={tmp_path / 'plain'}")
    train(*flags, "--max_train_steps=2", flag)
    plain, other = weights(tmp_path / "plain/unet"), weights(tmp_path / "out/unet")
    assert plain.keys() == other.keys()
    assert all(torch.allclose(plain[name], other[name], atol=1e-5) for name in plain)


def test_accumulation_is_a_larger_batch(tmp_path, flags, monkeypatch):
    """One step of 5 images in micro-batches of 2, 2 and 1 has the gradient of one batch of 5."""
    make_images(tmp_path / "images", 5)
    monkeypatch.setattr(
        script, "compute_loss", lambda unet, s, images, w, args: (w * unet(images, 5).sample.mean((1, 2, 3))).sum()
    )
    shared = [*flags, "--center_crop", "--num_epochs=1", "--max_grad_norm=0"]
    config = tmp_path / "tiny-unet/config.json"
    config.write_text(config.read_text().replace('"dropout": 0.1', '"dropout": 0.0'))
    (tmp_path / "images/5.png").unlink()
    train(*shared, "--train_batch_size=5", f"--output_dir={tmp_path / 'one'}")
    train(*shared, "--train_batch_size=2", "--gradient_accumulation_steps=3", f"--output_dir={tmp_path / 'three'}")
    one, three = metrics(tmp_path / "one"), metrics(tmp_path / "three")
    assert len(one) == len(three) == 1
    assert one[0]["grad_norm"] == pytest.approx(three[0]["grad_norm"], rel=1e-4)
    assert one[0]["loss"] == pytest.approx(three[0]["loss"], rel=1e-4)


def test_skipped_fp16_steps_advance_neither_step_nor_ema(tmp_path, flags, monkeypatch):
    from accelerate.optimizer import AcceleratedOptimizer

    calls, ema_steps, step, update_ema = [], [], AcceleratedOptimizer.step, script.update_ema

    def overflowing(self, closure=None):
        calls.append(1)
        self._is_overflow = len(calls) in (2, 3)
        if not self._is_overflow:
            step(self, closure)

    monkeypatch.setattr(AcceleratedOptimizer, "step", overflowing)
    monkeypatch.setattr(
        script, "update_ema", lambda ema, unet, step, args: (ema_steps.append(step), update_ema(ema, unet, step, args))
    )
    train(*flags, "--max_train_steps=4", "--checkpointing_steps=4")
    assert len(calls) == 6 and ema_steps == [1, 2, 3, 4]
    state = json.loads((tmp_path / "out/checkpoint-4/trainer_state.json").read_text())
    assert (state["global_step"], state["data_step"]) == (4, 6)
    monkeypatch.setattr(AcceleratedOptimizer, "step", lambda self, closure=None: setattr(self, "_is_overflow", True))
    with pytest.raises(SystemExit):
        train(*flags, f"--output_dir={tmp_path / 'never'}")


def test_without_ema_samples_come_from_the_weights_without_dropout(tmp_path, flags, monkeypatch):
    states, drawn, pipelines = [], DDPMScheduler.step, []
    made = script.DDPMPipeline
    monkeypatch.setattr(script, "DDPMPipeline", lambda *parts: (pipelines.append(made(*parts)), pipelines[-1])[1])
    monkeypatch.setattr(
        DDPMScheduler, "step", lambda *a, **k: (states.append(pipelines[-1].unet.training), drawn(*a, **k))[1]
    )
    train(*flags, "--no-use_ema", "--validation_steps=2", "--checkpointing_steps=6")
    assert sorted(path.name[-6:-4] for path in (tmp_path / "out/samples").iterdir()) == ["02", "04", "06"]
    assert states == [False] * 6 and not (tmp_path / "out/checkpoint-6/unet_ema").exists()
    assert_same_weights(tmp_path / "out/unet", tmp_path / "out/checkpoint-6/unet")


def test_flags_win_over_a_pretrained_scheduler_that_lacks_their_keys(tmp_path, flags):
    train(*flags)
    config = tmp_path / "out/scheduler/scheduler_config.json"
    kept = {"_class_name": "DDPMScheduler", "num_train_timesteps": 1000, "beta_schedule": "linear"}
    config.write_text(json.dumps(kept))  # as google/ddpm-cat-256 has it
    argv = [flag for flag in flags if "model_config" not in flag] + [f"--output_dir={tmp_path / 'next'}"]
    argv += [f"--pretrained_model_name_or_path={tmp_path / 'out'}", "--prediction_type=v_prediction"]
    train(*argv, "--rescale_betas_zero_snr")
    config = DiffusionPipeline.from_pretrained(tmp_path / "next").scheduler.config
    assert config.prediction_type == "v_prediction" and config.rescale_betas_zero_snr


def test_ema_is_that_of_diffusers():
    torch.manual_seed(0)
    unet = torch.nn.Linear(5, 5)
    averaged = torch.nn.Linear(5, 5)
    averaged.load_state_dict(unet.state_dict())
    args = script.parse_args(["--train_data_dir=.", "--ema_power=0.6", "--ema_inv_gamma=2", "--ema_max_decay=0.7"])
    reference = EMAModel(unet.parameters(), decay=0.7, use_ema_warmup=True, inv_gamma=2, power=0.6)
    for step in range(1, 20):
        with torch.no_grad():
            for parameter in unet.parameters():
                parameter.add_(torch.randn_like(parameter))
        script.update_ema(averaged, unet, step, args)
        reference.step(unet.parameters())
        for mine, theirs in zip(averaged.parameters(), reference.shadow_params, strict=True):
            torch.testing.assert_close(mine.detach(), theirs)


# ------------------------------------------------------------------- loss


def objective(**flags):
    return argparse.Namespace(**{"snr_gamma": None, "noise_offset": 0.0, "input_perturbation": 0.0, **flags})


@pytest.mark.parametrize("prediction_type", ["epsilon", "sample", "v_prediction"])
@pytest.mark.parametrize("snr_gamma", [None, 5.0])
def test_loss_matches_the_formulas(prediction_type, snr_gamma):
    scheduler = DDPMScheduler(prediction_type=prediction_type)
    images, weight = torch.rand(4, 3, 8, 8) * 2 - 1, torch.tensor([0.5, 0.25, 0.25, 0.0])
    inputs = {}

    class Model(torch.nn.Module):
        def forward(self, noisy, timesteps):
            inputs.update(noisy=noisy, timesteps=timesteps)
            return type("Output", (), {"sample": torch.full_like(noisy, 0.1)})

    torch.manual_seed(3)
    loss = script.compute_loss(Model(), scheduler, images, weight, objective(snr_gamma=snr_gamma))
    torch.manual_seed(3)
    noise = torch.randn_like(images)
    alpha_bar = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000), 0)[inputs["timesteps"]].view(-1, 1, 1, 1)
    noisy = alpha_bar.sqrt() * images + (1 - alpha_bar).sqrt() * noise
    torch.testing.assert_close(inputs["noisy"], noisy)
    velocity = alpha_bar.sqrt() * noise - (1 - alpha_bar).sqrt() * images
    target = {"epsilon": noise, "sample": images, "v_prediction": velocity}[prediction_type]
    snr = (alpha_bar / (1 - alpha_bar)).flatten()
    factor = {
        "epsilon": snr.clamp(max=5) / snr,
        "sample": snr.clamp(max=5),
        "v_prediction": (snr + 1).clamp(max=5) / (snr + 1),
    }[prediction_type]
    expected = ((0.1 - target) ** 2).mean((1, 2, 3)) * weight * (1 if snr_gamma is None else factor)
    torch.testing.assert_close(loss, expected.sum())


def test_min_snr_keeps_the_pure_noise_of_a_zero_terminal_snr():
    scheduler = DDPMScheduler(prediction_type="v_prediction", rescale_betas_zero_snr=True, num_train_timesteps=1)
    scheduler.alphas_cumprod = torch.zeros(1)
    model = lambda noisy, timesteps: type("Output", (), {"sample": torch.zeros_like(noisy)})  # noqa: E731
    loss = script.compute_loss(model, scheduler, torch.ones(2, 1, 4, 4), torch.ones(2), objective(snr_gamma=5.0))
    assert torch.isfinite(loss) and loss > 0


# ------------------------------------------------------------------- images


def encoded(image, format, **options):
    """An image as an undecoded column has it."""
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return {"bytes": buffer.getvalue(), "path": None}


def photo(mode="RGB"):
    """A 12 x 8 image whose left half is red, right half blue; saved without loss by PNG, nearly by JPEG."""
    pixels = np.zeros((8, 12, 3), np.uint8)
    pixels[:, :6, 0] = 200
    pixels[:, 6:, 2] = 100
    return Image.fromarray(pixels).convert(mode)


def test_every_kind_of_image_decodes_right():
    rgb = torch.from_numpy(np.array(photo())).permute(2, 0, 1)
    grey = torch.from_numpy(np.array(photo("L")))[None]

    def close(image, expected, tolerance):
        assert image.dtype == torch.uint8 and image.shape == expected.shape
        assert (image.int() - expected.int()).abs().max() <= tolerance

    for name, data, tolerance in (
        ("png", encoded(photo(), "PNG"), 0),
        ("palette", encoded(photo().quantize(4), "PNG"), 2),
        ("jpeg", encoded(photo(), "JPEG", quality=100, subsampling=0), 8),
        ("cmyk", encoded(photo("CMYK"), "JPEG", quality=100, subsampling=0), 12),
        ("webp", encoded(photo(), "WEBP", lossless=True), 0),
        ("bmp", encoded(photo(), "BMP"), 0),
        ("rgba", encoded(photo("RGBA"), "PNG"), 0),
    ):
        close(script.decode_image(data, 3), rgb, tolerance)
        close(script.decode_image({**data, "path": name}, 1), grey, max(tolerance, 1))
    for data in (encoded(photo("L"), "PNG"), encoded(photo("L"), "JPEG", quality=100), encoded(photo("LA"), "PNG")):
        close(script.decode_image(data, 3), grey.expand(3, -1, -1), 2)
        close(script.decode_image(data, 1), grey, 2)
    close(script.decode_image(encoded(photo("1"), "PNG"), 1), torch.from_numpy(np.array(photo("1")))[None] * 255, 0)
    frames = [photo(), Image.new("RGB", (12, 8), "green")]
    close(script.decode_image(encoded(frames[0], "GIF", save_all=True, append_images=frames[1:]), 3), rgb, 2)


@pytest.mark.parametrize("format", ["JPEG", "PNG"])
def test_exif_orientation_is_applied(format):
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was held upright: turn right by 90 degrees
    image = script.decode_image(encoded(photo(), format, exif=exif), 3)
    assert image.shape == (3, 12, 8) and image[0, 2, 4] > 180 and image[2, 9, 4] > 80


def exif(orientation, damage=b""):
    data = Image.Exif()
    data[0x0112] = orientation
    return damage + data.tobytes()


@pytest.mark.parametrize("orientation", range(1, 9))
def test_jpegs_are_the_same_from_both_decoders(orientation, monkeypatch):
    """torchcodec where it is installed, else Pillow; both turned as Pillow understands the EXIF."""
    rng = np.random.default_rng(orientation)
    noise = rng.integers(0, 255, (9, 13, 3)).astype(np.uint8)
    picture = Image.fromarray(noise).resize((130, 90), Image.BICUBIC)
    xmp = b"http://ns.adobe.com/xap/1.0/\0<x:xmpmeta xmlns:x='adobe:ns:meta/'></x:xmpmeta>"
    plain, turned = encoded(picture, "JPEG", quality=90)["bytes"], exif(orientation)
    segment = lambda content: b"\xff\xe1" + (len(content) + 2).to_bytes(2, "big") + content  # noqa: E731
    files = {
        "exif": encoded(picture, "JPEG", quality=90, exif=turned)["bytes"],
        "xmp before exif": plain[:2]
        + segment(xmp)
        + segment(b"Exif\0\0" + turned.removeprefix(b"Exif\0\0"))
        + plain[2:],
        "damaged exif": plain[:2] + segment(b"Exif\0\0II*\0" + bytes([orientation] * 20)) + plain[2:],
        "grey": encoded(picture.convert("L"), "JPEG", quality=90, exif=turned)["bytes"],
    }
    assert script.decode_jpeg is not None
    for name, data in files.items():
        for channels in (1, 3):
            with monkeypatch.context() as fallback:
                one = script.decode_image({"bytes": data, "path": None}, channels)
                fallback.setattr(script, "decode_jpeg", None)
                other = script.decode_image({"bytes": data, "path": None}, channels)
            assert one.shape == other.shape, name
            # One decodes to grey, the other to colours and those to grey: some levels apart where colours are clipped.
            assert (one.int() - other.int()).abs().max() <= (0 if channels == 3 or name == "grey" else 8), name
            assert one.shape[1:] == ((130, 90) if orientation > 4 and name != "damaged exif" else (90, 130)), name


def test_a_program_is_never_handed_to_another():
    eps = io.BytesIO()
    photo().save(eps, "EPS")
    with pytest.raises(Image.UnidentifiedImageError):
        script.decode_image({"bytes": eps.getvalue(), "path": "cat.png"}, 3)


def test_transparency_is_laid_onto_white():
    image = photo("RGBA")
    image.putalpha(Image.fromarray(np.tile(np.repeat([[255, 0]], [6, 6], axis=1), (8, 1)).astype(np.uint8)))
    for data in (encoded(image, "PNG"), encoded(image, "WEBP", lossless=True)):
        decoded = script.decode_image(data, 3)
        assert decoded[:, 4, 2].tolist() == [200, 0, 0] and decoded[:, 4, 9].tolist() == [255, 255, 255]
    palette = photo().quantize(4)
    transparent = palette.getpixel((9, 4))
    decoded = script.decode_image(encoded(palette, "GIF", transparency=transparent), 3)
    assert decoded[:, 4, 9].tolist() == [255, 255, 255] and decoded[0, 4, 2] > 195


@pytest.mark.parametrize("format, dtype", [("PNG", "<u2"), ("TIFF", "<u2"), ("TIFF", "<i4"), ("TIFF", "<f4")])
def test_deep_grey_is_scaled_and_kept_on_demand(format, dtype):
    values = np.linspace(0, 1, 12 * 8).reshape(8, 12)
    scale = 1.0 if dtype == "<f4" else 65535
    data = encoded(Image.fromarray((values * scale).astype(dtype)), format)
    eight = script.decode_image(data, 3)
    assert eight.shape == (3, 8, 12) and np.abs(eight[1].numpy() - values * 255).max() <= 0.51
    exact = script.decode_image(data, 1, keep_precision=True)
    assert exact.dtype == torch.float32 and np.abs(exact[0].numpy() - values).max() < 2e-5
    plain = script.decode_image(encoded(photo(), "PNG"), 3, keep_precision=True)
    assert plain.dtype == torch.float32 and plain[0, 0, 0] == pytest.approx(200 / 255)


@pytest.mark.parametrize("dtype, value", [("<f4", 250.0), ("<f4", -0.1), ("<f4", np.nan), ("<i4", 70000), ("<i4", -1)])
def test_deep_grey_beyond_its_range_is_refused_and_not_bleached(dtype, value):
    values = np.zeros((8, 12), dtype)
    values[2, 3] = value
    with pytest.raises(ValueError, match="its values are not from 0 to"):
        script.decode_image(encoded(Image.fromarray(values), "TIFF"), 1)


def test_names_can_not_command_a_terminal():
    assert script.name_image(3, {"bytes": b"", "path": "a\x1b[31mb\nc\u202ed é.png"}) == "a?[31mb?c?d é.png"
    assert script.name_image(3, {"bytes": b"", "path": None}) == script.name_image(3, None) == "row 3"


def test_crops_are_square_in_place_and_keyed(tmp_path):
    ramp = torch.arange(30, dtype=torch.uint8).expand(3, 10, 30)
    assert script.shrink(ramp, 10, (0.5, 0.5))[0, 0].tolist() == list(range(10, 20))
    assert script.shrink(ramp, 10, (0, 1))[0, 0].tolist() == list(range(20, 30))
    make_images(tmp_path / "images", 2, size=(60, 20))
    args = script.parse_args([f"--train_data_dir={tmp_path / 'images'}", "--resolution=16"])
    rows, column = script.load_rows(args)
    data = script.ImageDataset(rows, column, 3, args)
    crops = [data[[(epoch, 1, 1.0)]]["pixel_values"][0] for epoch in (0, 0, 1, 2)]
    assert crops[0].shape == (3, 16, 16) and torch.equal(crops[0], crops[1])
    assert not torch.equal(crops[0], crops[2]) and not torch.equal(crops[2], crops[3])
    args.center_crop = True
    data = script.ImageDataset(rows, column, 3, args)
    assert torch.equal(data[[(0, 1, 1.0)]]["pixel_values"], data[[(1, 1, 1.0)]]["pixel_values"])


def test_a_batch_in_any_order_is_its_rows(tmp_path):
    make_images(tmp_path / "images", 6, size=(60, 20))
    args = script.parse_args([f"--train_data_dir={tmp_path / 'images'}", "--resolution=16", "--random_flip"])
    data = script.ImageDataset(*script.load_rows(args), 3, args)
    keys = [(1, row, row / 10) for row in (4, 0, 5, 2, 2, 1)]
    batch, alone = data[keys], [data[[key]] for key in keys]
    for name in ("pixel_values", "weight"):
        assert torch.equal(batch[name], torch.cat([one[name] for one in alone])), name


def test_images_are_scaled_to_one_and_half_of_them_mirrored(tmp_path):
    images = torch.tensor([0, 255], dtype=torch.uint8).expand(200, 3, 4, 2)
    for pixel_values in (images, images / 255):
        prepared, condition = script.prepare_batch({"pixel_values": pixel_values}, None, None)
        assert prepared[0, 0, 0].tolist() == [-1, 1] and prepared.dtype == torch.float32 and condition == {}
    (tmp_path / "images").mkdir()
    Image.fromarray(np.tile(np.repeat([0, 255], 8), (16, 1)).astype(np.uint8)).save(tmp_path / "images/0.png")
    args = script.parse_args([f"--train_data_dir={tmp_path / 'images'}", "--resolution=16", "--random_flip"])
    rows, column = script.load_rows(args)
    keys = [(epoch, 0, 1.0) for epoch in range(200)]

    def left():
        return script.ImageDataset(rows, column, 1, args)[keys]["pixel_values"][:, 0, 0, 0].tolist()

    once = left()
    assert once == left() and 70 < once.count(255) < 130  # keyed by epoch and row: the same again
    args.random_flip = False
    assert set(left()) == {0}


def test_a_strip_of_pixels_does_not_fill_the_memory(tmp_path):
    Image.new("L", (40000, 2)).save(tmp_path / "strip.png")
    source = {"bytes": (tmp_path / "strip.png").read_bytes(), "path": None}
    for center_crop in (True, False):
        size = script.cache_batch({"image": [source]}, [0], "image", 64, center_crop, 3, 0)["image"][0]["size"]
        assert size == [3, 64, 64] if center_crop else size == [3, 64, 256]


# ------------------------------------------------------------------- data sets


def test_every_kind_of_folder_trains(tmp_path, flags, monkeypatch):
    """Sub-folders, metadata.jsonl, parquet of images and of plain bytes, webdataset; and a column by another name."""
    png = [(tmp_path / f"images/{i}.png").read_bytes() for i in range(6)]
    for i in range(6):
        path = tmp_path / f"classes/{i % 2}/{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png[i])
        (tmp_path / "captions").mkdir(exist_ok=True)
        (tmp_path / f"captions/{i}.png").write_bytes(png[i])
    lines = [json.dumps({"file_name": f"{i}.png", "text": f"image {i}"}) for i in range(6)]
    (tmp_path / "captions/metadata.jsonl").write_text("\n".join(lines))
    for name in ("parquet", "plain", "tars"):
        (tmp_path / name).mkdir()
    kinds = datasets.Features({"img": datasets.Image(), "label": datasets.Value("int64")})
    data = {"img": [{"bytes": data, "path": None} for data in png], "label": [0] * 6}
    datasets.Dataset.from_dict(data, features=kinds).to_parquet(tmp_path / "parquet/train.parquet")
    datasets.Dataset.from_dict({"image": png}).to_parquet(tmp_path / "plain/train.parquet")
    with tarfile.open(tmp_path / "tars/train.tar", "w") as tar:
        for i, data in enumerate(png):
            for suffix, content in (("png", data), ("txt", b"a caption")):
                info = tarfile.TarInfo(f"{i:03d}.{suffix}")
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    reference = None
    for name in ("images", "classes", "captions", "parquet", "plain", "tars"):
        rows, column = script.load_rows(script.parse_args([f"--train_data_dir={tmp_path / name}"]))
        assert len(rows) == 6 and column in rows.column_names, name
        decoded = sorted(script.decode_image(row[column], 3).float().mean().item() for row in rows)
        reference = reference or decoded
        assert decoded == reference, name
    rows, column = script.load_rows(
        script.parse_args([f"--dataset_name={tmp_path / 'parquet'}", "--image_column=img"])
    )
    assert column == "img"
    rows, _ = script.load_rows(script.parse_args([f"--dataset_name={tmp_path / 'images'}", "--max_train_samples=4"]))
    assert len(rows) == 4
    rows, _ = script.load_rows(script.parse_args([f"--dataset_name={tmp_path / 'images'}", "--max_train_samples=99"]))
    assert len(rows) == 6


@pytest.mark.parametrize("num_processes", [1, 2])
def test_stream_trains_and_resumes_exactly(tmp_path, flags, num_processes):
    (tmp_path / "parquet").mkdir()
    png = [(tmp_path / f"images/{i}.png").read_bytes() for i in range(6)]
    kinds = datasets.Features({"image": datasets.Image()})
    for shard in range(2):
        rows = {"image": [{"bytes": data, "path": None} for data in png[shard * 3 : shard * 3 + 3]]}
        datasets.Dataset.from_dict(rows, features=kinds).to_parquet(tmp_path / f"parquet/train-{shard}.parquet")
    argv = [*flags, f"--train_data_dir={tmp_path / 'parquet'}", "--streaming", "--max_train_steps=6",
            "--train_batch_size=2", "--checkpointing_steps=2", "--random_flip"]  # fmt: skip
    assert set(finish(start(lambda: train(*argv), num_processes, tmp_path / "log"))) == {0}, (
        tmp_path / "log"
    ).read_text()
    resumed = [
        *argv,
        f"--output_dir={tmp_path / 'resumed'}",
        f"--resume_from_checkpoint={tmp_path / 'out/checkpoint-4'}",
    ]
    assert set(finish(start(lambda: train(*resumed), num_processes))) == {0}
    assert_same_weights(tmp_path / "out/unet", tmp_path / "resumed/unet")


def test_stream_of_the_first_images_is_the_same_every_pass(tmp_path, flags):
    args = script.parse_args([*flags, "--streaming", "--max_train_steps=1", "--max_train_samples=3"])
    rows, column = script.load_rows(args, streaming=True)
    batches = script.stream_batches(rows, args, 0, 1, 0)
    paths = [next(batches)[0][3][column]["path"] for _ in range(6)]
    assert sorted(paths[:3]) == sorted(paths[3:]) and len(set(paths)) == 3


def test_stream_gives_every_image_once_a_pass(tmp_path, flags):
    args = script.parse_args([*flags, "--streaming", "--max_train_steps=1", "--train_batch_size=4"])
    rows, column = script.load_rows(args, streaming=True)
    batches = script.stream_batches(rows, args, 0, 1, 0)
    keys = [key for _ in range(3) for key in next(batches)]
    paths = [key[3][column]["path"] for key in keys]
    assert len(set(paths[:6])) == 6 and sorted(paths[:6]) == sorted(paths[6:]) and paths[:6] != paths[6:]
    again = script.stream_batches(rows, args, 0, 1, 8)
    assert [key[:3] for key in next(again)] == [key[:3] for key in keys[8:]]


def test_cached_images_train_the_same(tmp_path, flags, capfd):
    (tmp_path / "images/broken.png").write_bytes(b"not an image")
    flags = [*flags, "--center_crop", "--random_flip", "--num_epochs=2"]
    train(*flags, "--cache_images")
    assert capfd.readouterr().err.count("broken.png") == 1
    assert metrics(tmp_path / "out")[-1]["skipped_images"] == 1
    (tmp_path / "images/broken.png").unlink()
    train(*flags, f"--output_dir={tmp_path / 'plain'}")
    assert_same_weights(tmp_path / "plain/unet", tmp_path / "out/unet")


@pytest.mark.parametrize("damage", [
    lambda path: path.write_bytes(path.read_bytes()[:-900]),
    lambda path: path.write_bytes(b""),
    lambda path: path.write_bytes(path.read_bytes()[:3000] + b"x" * 10 + path.read_bytes()[3010:]),
    lambda path: path.with_name(f"{path.parent.name}.json").write_text("{}"),
    lambda path: path.unlink(),
])  # fmt: skip
def test_a_cache_of_images_that_is_damaged_is_made_again(tmp_path, flags, damage):
    flags = [*flags, "--center_crop", "--cache_images"]
    train(*flags)
    path = next((tmp_path / "out/image_cache").glob("*/*.arrow"))
    whole = path.read_bytes()
    damage(path)
    shutil.copytree(tmp_path / "out/image_cache", tmp_path / "b/image_cache")
    (tmp_path / "b/metrics.jsonl").touch()
    train(*flags, f"--output_dir={tmp_path / 'b'}")
    assert (tmp_path / "b" / path.relative_to(tmp_path / "out")).read_bytes() == whole
    assert_same_weights(tmp_path / "b/unet", tmp_path / "out/unet")


def test_cache_is_reused_for_the_same_data_and_transform_only(tmp_path, flags, monkeypatch):
    calls, decode_image = [], script.decode_image
    monkeypatch.setattr(
        script, "decode_image", lambda *args, **options: (calls.append(1), decode_image(*args, **options))[1]
    )
    args = script.parse_args([*flags, "--cache_images"])

    def cache():
        calls.clear()
        rows, column = script.load_rows(args)
        cached, left_out = script.cache_images(rows, column, 3, 1, args)
        assert left_out == 0
        count = len(calls)
        item = script.ImageDataset(cached, column, 3, args)[[(0, 2, 1.0)]]
        assert item["pixel_values"].shape == (1, 3, args.resolution, args.resolution)
        return count

    assert cache() == 6 and cache() == 0
    args.resolution = 32
    assert cache() == 6
    make_images(tmp_path / "images", 7)
    assert cache() == 7
    left_by_many = script.cache_images(*script.load_rows(args), 1, 2, args)[0]  # decoded in forked processes
    assert len(left_by_many) == 7 and left_by_many[6]["image"]["size"] == [1, 32, 38]


# ------------------------------------------------------------------- things that go wrong


@pytest.mark.parametrize("workers", [0, 1])
def test_a_bad_image_is_named_once_skipped_and_counted(tmp_path, flags, capfd, workers):
    whole = (tmp_path / "images/2.png").read_bytes()
    (tmp_path / "images/2.png").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "images/3.png").write_bytes(b"not an image")
    train(*flags, "--num_epochs=3", f"--dataloader_num_workers={workers}")
    printed = capfd.readouterr().err
    assert printed.count("images/2.png") == printed.count("images/3.png") == 1
    records = metrics(tmp_path / "out")
    assert len(records) == 12 and records[-1]["skipped_images"] == 2  # a step without any image has no loss to record
    assert all(math.isfinite(record["loss"]) for record in records)


@pytest.mark.parametrize("cache", [[], ["--cache_images"]])
def test_a_row_without_an_image_is_skipped_and_named(tmp_path, flags, capfd, cache):
    (tmp_path / "parquet").mkdir()
    png = [(tmp_path / f"images/{i}.png").read_bytes() for i in range(6)]
    kinds = datasets.Features({"image": datasets.Image()})
    rows = {"image": [{"bytes": data, "path": None} for data in png[:5]] + [None]}
    datasets.Dataset.from_dict(rows, features=kinds).to_parquet(tmp_path / "parquet/train.parquet")
    train(*flags, f"--train_data_dir={tmp_path / 'parquet'}", *cache)
    assert capfd.readouterr().err.count("Skipped row 5 (there is no image)") == 1
    assert metrics(tmp_path / "out")[-1]["skipped_images"] == 1


@pytest.mark.parametrize("cache", [[], ["--cache_images"]])
def test_when_nothing_decodes_one_sentence_ends_the_run(tmp_path, flags, capfd, cache):
    for path in (tmp_path / "images").iterdir():
        path.write_bytes(b"no image at all")
    with pytest.raises(SystemExit) as stop:
        train(*flags, "--logging_steps=10", *cache)
    assert stop.value.code == 1 and "images could be decoded" in capfd.readouterr().err
    assert not (tmp_path / "out/unet").exists()


def test_two_processes_name_a_bad_image_once(tmp_path, flags):
    (tmp_path / "images/3.png").write_bytes(b"not an image")
    assert finish(start(lambda: train(*flags, "--num_epochs=6"), 2, tmp_path / "log")) == [0, 0]
    assert (tmp_path / "log").read_text().count("images/3.png") == 1
    assert metrics(tmp_path / "out")[-1]["skipped_images"] == 1


def test_decompression_bomb_is_skipped():
    bomb = io.BytesIO()
    Image.new("1", (50000, 50000)).save(bomb, "PNG")
    with pytest.raises(Image.DecompressionBombError):
        script.decode_image({"bytes": bomb.getvalue(), "path": None}, 3)


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_last_good_checkpoint(
    tmp_path, flags, capfd, monkeypatch
):
    compute_loss, calls = script.compute_loss, []

    def breaking(*args):
        calls.append(1)
        return compute_loss(*args) * (float("nan") if len(calls) == 4 else 1)

    monkeypatch.setattr(script, "compute_loss", breaking)
    with pytest.raises(SystemExit) as stop:
        train(*flags, "--logging_steps=100", "--checkpointing_steps=1")
    assert stop.value.code == 1 and checkpoints(tmp_path / "out") == {"checkpoint-1", "checkpoint-2", "checkpoint-3"}
    message = capfd.readouterr().err
    assert "not finite at step 4" in message and "checkpoint-3" in message


def test_a_broken_model_never_replaces_a_good_pipeline(tmp_path, flags, monkeypatch):
    compute_loss, calls = script.compute_loss, []

    def breaking(*args):
        calls.append(1)
        return compute_loss(*args) * (float("nan") if len(calls) == 8 else 1)

    monkeypatch.setattr(script, "compute_loss", breaking)
    with pytest.raises(SystemExit):
        train(*flags, "--num_epochs=3", "--logging_steps=100", "--save_model_epochs=1", "--save_images_epochs=100")
    assert all(tensor.isfinite().all() for tensor in weights(tmp_path / "out/unet").values())


def test_an_error_ends_the_process_though_its_workers_ignore_signals(tmp_path, flags):
    def run():
        script.compute_loss = lambda *args: torch.tensor(float("nan"), requires_grad=True)
        train(*flags, "--dataloader_num_workers=2")

    assert finish(start(run, log=tmp_path / "log"), timeout=30) == [1]
    assert "not finite" in (tmp_path / "log").read_text()


@pytest.mark.parametrize("error, sentence", [
    (torch.OutOfMemoryError("CUDA out of memory. Tried to"), "there is not enough memory (CUDA out of memory"),
    (MemoryError(), "there is not enough memory (MemoryError)"),
    (RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you"), "enough memory"),
    (RuntimeError("Too many open files. Communication with the workers"), "raise the limit (ulimit -n)"),
    (ValueError("class_labels should be provided when doing class"), "the U-Net wants class labels"),
    (OSError(28, "No space left on device"), "[Errno 28] No space left on device; what was saved before is whole"),
    (RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed."), "a process that loads data was killed"),
])  # fmt: skip
def test_what_happens_to_any_run_is_one_sentence(tmp_path, flags, capfd, monkeypatch, error, sentence):
    def failing(*args):
        raise error

    monkeypatch.setattr(script, "train_step", failing)
    said = refused(capfd, flags)
    assert sentence in said and "Traceback" not in said
    monkeypatch.setattr(script, "train_step", lambda *args: [][1])
    with pytest.raises(IndexError):  # what is not foreseen keeps its traceback
        train(*flags, f"--output_dir={tmp_path / 'b'}")


@pytest.mark.parametrize("workers", [1, 2])
def test_a_killed_loader_process_ends_the_run(tmp_path, flags, workers):
    """What the kernel does when memory runs out: one sentence and status 1, no hang, no orphan."""
    make_images(tmp_path / "images", 40)

    def run():
        train(*flags, f"--dataloader_num_workers={workers}", "--num_epochs=1000")

    (pid,) = start(run, log=tmp_path / "log")
    children = lambda: Path(f"/proc/{pid}/task/{pid}/children").read_text().split()  # noqa: E731
    wait_until(lambda: (tmp_path / "out/metrics.jsonl").is_file() and len(children()) == workers)
    alive = children()
    os.kill(int(alive[0]), signal.SIGKILL)
    assert finish([pid], timeout=30) == [1], (tmp_path / "log").read_text()
    log = (tmp_path / "log").read_text()
    assert "a process that loads data was killed" in log and "Traceback" not in log
    wait_until(lambda: not any(Path(f"/proc/{child}").exists() for child in alive), timeout=10)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stream_that_breaks_off_ends_the_run(tmp_path, flags, workers):
    (tmp_path / "tars").mkdir()
    make_images(tmp_path / "images", 12)
    with tarfile.open(tmp_path / "tars/train.tar", "w") as tar:
        for i in range(12):  # the first of them tell `datasets` what is in it
            tar.add(tmp_path / f"images/{i}.png", f"{i}.png")
    data = (tmp_path / "tars/train.tar").read_bytes()
    (tmp_path / "tars/train.tar").write_bytes(data[: data.index(b"9.png") + 700])
    argv = [*flags, f"--train_data_dir={tmp_path / 'tars'}", "--image_column=png", "--streaming"]
    argv += ["--max_train_steps=20", f"--dataloader_num_workers={workers}"]
    assert finish(start(lambda: train(*argv), log=tmp_path / "log"), timeout=30) == [1]
    log = (tmp_path / "log").read_text()
    assert "unexpected end of data; what was saved before is whole" in log and "Traceback" not in log


def test_weights_that_are_not_finite_are_not_saved(tmp_path, flags, capfd, monkeypatch):
    """The averaged ones may be so while the loss is fine."""
    train(*flags)
    update_ema = script.update_ema

    def spoil(ema_unet, *rest):
        update_ema(ema_unet, *rest)
        with torch.no_grad():
            next(ema_unet.parameters()).view(-1)[0] = float("nan")

    monkeypatch.setattr(script, "update_ema", spoil)
    error = refused(capfd, flags, "--num_epochs=2", "--resume_from_checkpoint=latest")
    assert "the weights are not finite" in error
    assert all(tensor.isfinite().all() for tensor in weights(tmp_path / "out/unet").values())


def test_a_failed_save_is_one_sentence_and_leaves_earlier_checkpoints(tmp_path, flags, capfd, monkeypatch):
    save, calls = torch.save, []

    def full(*args):
        calls.append(1)
        if len(calls) > 2:
            raise OSError(28, "No space left on device")
        save(*args)

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(SystemExit) as stop:
        train(*flags, "--checkpointing_steps=2")
    assert stop.value.code == 1 and "No space left on device" in capfd.readouterr().err
    assert checkpoints(tmp_path / "out") == {"checkpoint-2"} and not list((tmp_path / "out").glob(".tmp-*"))


def test_resume_ignores_what_is_no_whole_checkpoint(tmp_path, flags, capsys):
    flags = [*flags, "--checkpointing_steps=2"]
    train(*flags, "--resume_from_checkpoint=latest")
    assert "starting afresh" in capsys.readouterr().out
    (tmp_path / "out/checkpoint-500").mkdir()
    (tmp_path / "out/checkpoint_backup").mkdir()
    (tmp_path / "out/.tmp-saving").mkdir()
    train(*flags, "--resume_from_checkpoint=latest", "--num_epochs=2")
    printed = capsys.readouterr().out
    assert "Resuming from" in printed and "checkpoint-6" in printed and "max_train_steps 6 -> 12" in printed
    assert "checkpoint-12" in checkpoints(tmp_path / "out") and not (tmp_path / "out/.tmp-saving").exists()
    elsewhere = [
        *flags,
        f"--output_dir={tmp_path / 'elsewhere'}",
        f"--resume_from_checkpoint={tmp_path}/out/checkpoint-4/",
    ]
    train(*elsewhere)
    assert [record["step"] for record in metrics(tmp_path / "elsewhere")] == [5, 6]
    assert_same_weights(tmp_path / "out/checkpoint-6/unet", tmp_path / "elsewhere/checkpoint-6/unet")


def test_going_back_does_not_leave_newer_checkpoints_to_latest(tmp_path, flags, capfd):
    train(*flags, "--checkpointing_steps=2")
    flags = [*flags, "--checkpointing_steps=2", "--resume_from_checkpoint=checkpoint-2"]
    assert "checkpoint-6 is newer than" in refused(capfd, flags)
    train(*flags, f"--output_dir={tmp_path / 'new'}", f"--resume_from_checkpoint={tmp_path / 'out/checkpoint-2'}")
    assert checkpoints(tmp_path / "new") == {"checkpoint-4", "checkpoint-6"}


@pytest.mark.parametrize("part", ["unet/diffusion_pytorch_model.safetensors", "unet_ema/config.json", "optimizer.bin",
                                  "scaler.bin"])  # fmt: skip
@pytest.mark.parametrize("damage", ["flip", "cut", "gone", "swap"])
def test_a_checkpoint_knows_its_content(tmp_path, flags, capfd, part, damage, monkeypatch):
    monkeypatch.setattr(script, "log_validation", lambda *args: None)
    train(*flags, "--max_train_steps=2", "--checkpointing_steps=1")
    path = tmp_path / "out/checkpoint-2" / part
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    {
        "flip": lambda: path.write_bytes(data),
        "cut": lambda: path.write_bytes(data[:-10]),
        "gone": path.unlink,
        "swap": lambda: path.write_bytes((tmp_path / "out/checkpoint-1" / part).read_bytes() + b" "),
    }[damage]()
    error = refused(capfd, flags, "--max_train_steps=3", "--resume_from_checkpoint=latest")
    assert f"checkpoint-2 is damaged or from another model ({part} is not as it was written)" in error


def test_a_digit_of_the_state_that_changed_is_seen(tmp_path, flags, capfd, monkeypatch):
    monkeypatch.setattr(script, "log_validation", lambda *args: None)
    train(*flags, "--max_train_steps=2")
    path = tmp_path / "out/checkpoint-2/trainer_state.json"
    content = path.read_text()
    for key in ("global_step", "images_seen", "num_images", "seed"):
        path.write_text(re.sub(rf'("{key}": )\d+', r"\g<1>7", content))
        assert path.read_text() != content
        error = refused(capfd, flags, "--max_train_steps=3", "--resume_from_checkpoint=latest")
        assert "checkpoint-2 is damaged" in error and "trainer_state.json is not as it was written" in error
    path.write_text(content)
    train(*flags, "--max_train_steps=3", "--resume_from_checkpoint=latest")


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"global_step": 1}', "null", "\x00",
    '{"global_step": -1, "data_step": 1, "images_seen": 1, "settings": {"num_images": 6}}',
    '{"global_step": 1.5, "data_step": 1, "images_seen": 1, "settings": {"num_images": 6}}',
    '{"global_step": 1, "data_step": 1, "images_seen": 1}'])  # fmt: skip
def test_a_damaged_state_is_one_sentence(tmp_path, flags, capfd, content):
    train(*flags, "--max_train_steps=1")
    (tmp_path / "out/checkpoint-1/trainer_state.json").write_text(content)
    assert "checkpoint-1 is damaged" in refused(capfd, flags, "--resume_from_checkpoint=latest")


def test_folders_of_others_are_left_alone(tmp_path, flags, capfd):
    """An output folder is empty, or has a run of the script in it."""
    for name in ("README.md", "unet/notes.txt", "photo.jpg"):
        folder = tmp_path / name.split(".")[0]
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("mine")
        assert "and no run of this script: choose another folder" in refused(capfd, flags, f"--output_dir={folder}")
        assert [path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"] == [folder / name]
    for inside in ("images", "images/out"):  # what is written would be trained on next time
        assert "lies in --train_data_dir" in refused(capfd, flags, f"--output_dir={tmp_path / inside}")
    for address in ("s3://bucket/x", "a\0b"):
        assert "is no path on a disk" in refused(capfd, flags, f"--output_dir={address}")
    train(*flags)
    train(*flags, "--resume_from_checkpoint=latest")


def test_bad_checkpoints_are_refused_in_one_sentence(tmp_path, flags, capfd):
    flags = [*flags, "--checkpointing_steps=2"]
    train(*flags)

    assert "holds checkpoint-6 of an earlier run" in refused(capfd, flags)
    assert "no whole checkpoint" in refused(capfd, flags, "--resume_from_checkpoint=checkpoint-5")
    path = tmp_path / "out/checkpoint-6/optimizer.bin"
    path.write_bytes(path.read_bytes()[:100])
    assert "checkpoint-6 is damaged" in refused(capfd, flags, "--resume_from_checkpoint=latest")
    shutil.rmtree(tmp_path / "out/checkpoint-6")
    config = Path(tmp_path, "tiny-unet/config.json")
    config.write_text(config.read_text().replace("16\n", "24\n"))
    assert "checkpoint-4 is damaged or from another model" in refused(
        capfd, flags, "--resume_from_checkpoint=checkpoint-4"
    )


@pytest.mark.parametrize("argv, sentence", [
    (["--train_data_dir=nowhere"], "--train_data_dir nowhere is not a folder"),
    (["--resolution=0"], "argument --resolution: 0 is not between 1 and 16384"),
    (["--streaming"], "--streaming needs --max_train_steps"),
    (["--streaming", "--max_train_steps=1", "--cache_images"], "--cache_images"),
    (["--seed=-1"], "argument --seed: -1 is not between 0 and"),
    (["--lr_scheduler=piecewise_constant"], "needs --lr_step_rules"),
    (["--lr_scheduler=piecewise_constant", "--lr_step_rules=1:x,0.1"], "needs --lr_step_rules"),
    (["--lr_scheduler=piecewise_constant", "--lr_step_rules=nan:5,0.1"], "needs --lr_step_rules"),
    (["--lr_scheduler=polynomial", "--learning_rate=1e-8"], "must be larger"),
    (["--learning_rate=nan"], "argument --learning_rate: nan is not between 0 and 100"),
    (["--dataloader_num_workers=2147483648"], "--dataloader_num_workers: 2147483648 is not between 0 and 1024"),
    (["--model_config_name_or_path=a", "--pretrained_model_name_or_path=b"], "exclude each other"),
])  # fmt: skip
def test_bad_arguments_end_with_one_line_before_anything_is_written(argv, sentence, tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        script.parse_args(["--output_dir", str(tmp_path / "out"), *argv])
    assert stop.value.code == 2 and sentence in capsys.readouterr().err.strip().split("\n")[-1]
    assert not (tmp_path / "out").exists()


def test_bad_data_and_models_end_with_one_sentence(tmp_path, flags, capfd):
    (tmp_path / "empty").mkdir()
    assert "can't be loaded as a data set" in refused(capfd, flags, f"--train_data_dir={tmp_path / 'empty'}")
    assert "no column 'photo' but image" in refused(capfd, flags, "--image_column=photo")
    assert "can't be loaded as a data set" in refused(capfd, flags, "--dataset_split=test")
    assert "--prediction_type v_prediction" in refused(capfd, flags, "--rescale_betas_zero_snr")
    assert "3 exceeds the 2 training" in refused(capfd, flags, "--ddpm_num_steps=2", "--ddpm_num_inference_steps=3")
    assert "not a multiple of 2" in refused(capfd, flags, "--resolution=15")
    assert "holds no UNet2DModel" in refused(capfd, flags, f"--model_config_name_or_path={tmp_path / 'empty'}")
    for change in ({"freq_shift": []}, {"norm_num_groups": -1}, {"mid_block_scale_factor": "x"}):
        config = json.loads((tmp_path / "tiny-unet/config.json").read_text())
        (tmp_path / "odd.json").write_text(json.dumps({**config, **change}))
        error = refused(capfd, flags, f"--model_config_name_or_path={tmp_path / 'odd.json'}")
        assert f"the U-Net of {tmp_path / 'odd.json'} can't be trained here (" in error
    (tmp_path / "file").write_text("")
    assert "can't be written to" in refused(capfd, flags, f"--output_dir={tmp_path / 'file'}")


def test_fp16_on_a_cpu_is_refused(flags, capfd):
    assert "fp16 does nothing on a CPU" in refused(capfd, flags, "--mixed_precision=fp16")


def test_wrong_launches_are_refused(tmp_path, flags, capfd, monkeypatch):
    pids = start(lambda: train(*flags, "--num_epochs=1000"))
    wait_until((tmp_path / "out/metrics.jsonl").is_file)
    with pytest.raises(SystemExit):
        train(*flags)
    kill(pids)
    assert "another process is training into" in capfd.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit):
        train(*flags, f"--output_dir={tmp_path / 'two'}")
    assert "2 processes were launched but each sees 1" in capfd.readouterr().err


# ------------------------------------------------------------------- watching


@pytest.mark.parametrize(
    "argv, images, record, found",
    [
        ([], {}, {}, set()),
        (["--max_train_steps=200", "--lr_warmup_steps=0"], {}, {}, set()),
        (["--lr_scheduler=constant"], {}, {}, set()),  # with averaged weights that is what most people do
        (["--no-use_ema"], {}, {"lr": 1e-6}, set()),
        (["--no-use_ema"], {}, {}, {"lr"}),
        ([], {"low": 0.0}, {}, {"range"}),
        ([], {"high": 255.0}, {}, {"range"}),
        ([], {"flat": 0.2}, {}, {"colour"}),
        ([], {}, {"clipped": 0.6}, {"clipped"}),
        (["--max_train_steps=20", "--lr_warmup_steps=0"], {}, {"clipped": 0.6, "data_wait": 0.6}, set()),  # too soon
        ([], {}, {"data_wait": 0.06}, {"waiting"}),
        (["--ema_power=1"], {}, {}, {"ema"}),
        (["--max_train_steps=2000", "--ema_max_decay=0.9999", "--ema_inv_gamma=0.01"], {}, {}, {"ema"}),
    ],
)
def test_signs_are_told_apart_and_a_sane_run_has_none(tmp_path, argv, images, record, found):
    args = script.parse_args([f"--train_data_dir={tmp_path}", "--max_train_steps=10000", *argv])
    steps = np.linspace(0, args.max_train_steps, 11).astype(int)[1:]
    start = {"loss": 1, "lr": args.learning_rate, "data_wait": 0.01, "clipped": 0.1}
    records = [{"step": 1, **start, "clipped": 1, "data_wait": 1}]  # before the warm-up ends all is allowed
    records += [{"step": int(step), **start, **record} for step in steps]
    images = {"low": -0.9, "high": 0.8, "square": 0.3, "flat": 0.01, **images}
    signs = script.find_signs(records, list(images.values()), args)
    assert signs.keys() == found
    assert all("\n" not in text and len(text) < 160 for text in signs.values())


def test_a_sign_is_told_once_and_recorded_also_when_the_run_goes_on(tmp_path, flags, capfd, monkeypatch):
    monkeypatch.setattr(script, "prepare_batch", lambda batch, *_: (batch["pixel_values"] / 255, {}))
    Image.new("RGB", (20, 20)).save(tmp_path / "images/black.png")
    more = ["--max_grad_norm=1e-4", "--train_batch_size=4", "--gradient_accumulation_steps=2"]
    for num_epochs in (4, 6):
        train(*flags, *more, f"--num_epochs={num_epochs}", "--resume_from_checkpoint=latest")
        records = metrics(tmp_path / "out")
        assert all(record["clipped"] == 1.0 for record in records)
        signs = {kind: text for record in records for kind, text in record.get("signs", {}).items()}
        assert signs.keys() == {"range", "colour"} and signs["colour"].startswith("14%")  # one of seven
        assert signs["range"].startswith("images go from 0.") and sum("signs" in record for record in records) == 1
        said = [line for line in capfd.readouterr().err.splitlines() if "Worth a look" in line]
        assert len(said) == (2 if num_epochs == 4 else 0)


def test_batches_come_ahead_with_the_wait_for_them_and_errors_pass(tmp_path):
    class Slow(torch.utils.data.Dataset):
        def __getitem__(self, key):
            time.sleep(key)
            if key > 1:
                raise ValueError("bad row")
            return {"pixel_values": torch.full((1,), key), "skipped": []}

    threads = threading.active_count()
    for delay, low, high in ((0.1, 0.35, 10.0), (0.0, 0.0, 0.3)):
        batches = script.load_batches(Slow(), [delay] * 5 + [2] + [0.0] * 3, 0, torch.device("cpu"))
        waits = []
        for _ in range(5):
            batch = next(batches)
            assert batch["pixel_values"].item() == pytest.approx(delay)
            waits.append(script.seconds_between(*batch["waited"]))
        assert low <= sum(waits) <= high
        with pytest.raises(ValueError, match="bad row"):
            next(batches)
        batches.close()
    assert threading.active_count() == threads
    assert len(list(script.load_batches(Slow(), [0.0] * 3, 0, torch.device("cpu")))) == 3  # keys may have an end
    slow = script.load_batches(Slow(), [0.2] * 4, 0, torch.device("cpu"))
    next(slow)
    begin = time.perf_counter()
    time.sleep(0.5)  # the device computes; meanwhile two more are read
    next(slow), next(slow)
    assert time.perf_counter() - begin < 0.6


@pytest.mark.parametrize("num_processes", [1, 2])
def test_samples_do_not_depend_on_the_number_of_processes(tmp_path, flags, num_processes):
    argv = [*flags, "--learning_rate=0", "--max_train_steps=1", "--eval_batch_size=5"]
    assert set(finish(start(lambda: train(*argv), num_processes))) == {0}
    grid = np.array(Image.open(tmp_path / "out/samples/step-0000001.png")).astype(int)
    grid = grid[:: grid.shape[1] // 52, :: grid.shape[1] // 52]  # small grids are enlarged
    assert grid.shape == (2 * 17 + 1, 3 * 17 + 1, 3)
    pipeline = DiffusionPipeline.from_pretrained(tmp_path / "out")
    for i in range(5):
        generator = torch.Generator().manual_seed(script.step_seed(0, i))
        image = np.array(pipeline(generator=[generator], num_inference_steps=2).images[0]).astype(int)
        y, x = 17 * (i // 3) + 1, 17 * (i % 3) + 1
        assert np.abs(grid[y : y + 16, x : x + 16] - image).max() <= 1


def test_tensorboard_gets_scalars_and_samples_but_no_secret(tmp_path, flags, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for name in ("HF_TOKEN", "WANDB_API_KEY"):
        monkeypatch.setenv(name, "secret-3141592653")
    train(*flags, "--report_to=tensorboard", "--checkpointing_steps=3")
    events = EventAccumulator(str(tmp_path / "out/logs/train_unconditional"))
    events.Reload()
    assert [event.step for event in events.Scalars("loss")] == [1, 2, 3, 4, 5, 6]
    assert len(events.Images("samples")) == 1
    assert all(
        b"secret-3141592653" not in path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file()
    )


@pytest.mark.parametrize("name", script.LOGGER_TYPE_TO_CLASS)
def test_every_tracker_of_accelerate_is_taken_and_named_when_missing(tmp_path, name, capsys, monkeypatch):
    argv = [f"--train_data_dir={tmp_path}", f"--report_to={name}"]
    monkeypatch.setattr(script.importlib.util, "find_spec", lambda module: None)
    with pytest.raises(SystemExit):
        script.parse_args(argv)
    assert f"--report_to {name}: `pip install {name}` first" in capsys.readouterr().err
    monkeypatch.setattr(script.importlib.util, "find_spec", lambda module: module == name)
    assert script.parse_args(argv).report_to == name


def test_wandb_offline_and_without_a_login(tmp_path, flags):
    """Really run, as its own process: wandb starts a service that would outlive an in-process test."""
    run = launch("train_unconditional.py", *flags, "--report_to=wandb", env={"WANDB_MODE": "offline"})
    assert run.returncode == 0, run.stderr
    assert list((tmp_path / "out/wandb").glob("offline-run-*/run-*.wandb"))
    environment = {"HOME": str(tmp_path), "NETRC": str(tmp_path / "none"), "WANDB_API_KEY": ""}
    argv = [*flags, "--report_to=wandb", f"--output_dir={tmp_path / 'login'}"]
    run = launch("train_unconditional.py", *argv, env=environment)
    assert run.returncode != 0 and "`wandb login`" in run.stderr


def test_push_to_hub_uploads_the_pipeline_only_and_honours_private(tmp_path, flags, monkeypatch, capfd):
    calls = {}
    monkeypatch.setattr(
        script,
        "create_repo",
        lambda repo_id, **options: (calls.update(options), type("Url", (), {"repo_id": f"me/{repo_id}"}))[1],
    )
    monkeypatch.setattr(script, "upload_folder", lambda **options: calls.update(options))
    monkeypatch.setattr(script, "repo_info", lambda repo_id: type("Info", (), {"private": "public" not in repo_id}))
    train(*flags, "--push_to_hub", "--hub_private_repo", "--checkpointing_steps=2")
    assert calls["private"] is True and calls["repo_id"] == "me/out"
    from huggingface_hub.utils import filter_repo_objects

    files = [str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*") if path.is_file()]
    uploaded = set(filter_repo_objects(files, allow_patterns=calls["allow_patterns"]))
    pipeline = {"model_index.json", "scheduler/scheduler_config.json", "unet/config.json"}
    pipeline.add("unet/diffusion_pytorch_model.safetensors")
    assert uploaded == pipeline | {"README.md", "samples/step-0000006.png", "loss.png"}

    assert 'from_pretrained("me/out")' in (tmp_path / "out/README.md").read_text()
    other = ["--push_to_hub", f"--output_dir={tmp_path / 'other'}"]
    assert "exists and is public" in refused(capfd, flags, *other, "--hub_private_repo", "--hub_model_id=public")

    def no_login(*args, **options):
        raise ValueError("401 Unauthorized")

    monkeypatch.setattr(script, "create_repo", no_login)
    assert "hf auth login" in refused(capfd, flags, *other)


def test_a_failure_that_is_looked_at_in_a_notebook_does_not_lock_the_folder(tmp_path, flags, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(script, "compute_loss", lambda *args, **condition: 1 / 0)
        with pytest.raises(ZeroDivisionError) as failure:  # which holds all that `main` has made
            train(*flags)
    train(*flags)
    with FileLock(tmp_path / "out/.lock", timeout=0):
        assert "main" in [entry.name for entry in failure.traceback]


def test_the_order_of_many_rows_is_held_as_numbers():
    rows, args = np.arange(10**6), argparse.Namespace(seed=0, train_batch_size=4, gradient_accumulation_steps=1)
    tracemalloc.start()
    first = next(script.step_batches(rows, args, 0, 1, 0))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(first) == 4 and most < 9 * len(rows)  # bytes; a list of them takes 40


def test_a_folder_is_listed_once_however_many_names_a_split_may_have(tmp_path, monkeypatch):
    make_images(tmp_path / "images" / "deep", 2)
    listed, listing = [], LocalFileSystem.ls
    monkeypatch.setattr(LocalFileSystem, "ls", lambda fs, path, **k: listed.append(path) or listing(fs, path, **k))
    args = script.parse_args([f"--train_data_dir={tmp_path / 'images'}", f"--cache_dir={tmp_path / 'datasets'}"])
    rows, _ = script.load_rows(args)
    assert len(rows) == 2 and 0 < sum(Path(path).name == "deep" for path in listed) < 4
    shutil.copy(tmp_path / "images/deep/0.png", tmp_path / "images/new.png")
    assert len(script.load_rows(args)[0]) == 3  # and anew by the next who asks


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators have their own ways")
def test_memory_that_a_step_frees_is_there_for_the_next():
    def touched(megabytes=64):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        b"x" * (megabytes << 20)
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before  # pages of 4 KiB asked for

    script.keep_memory()
    touched()
    assert touched() < 100
