"""train_unconditional.py from end to end: its commands, their output, and bit-exact resume."""

import copy
import json
import math
import os
import re
import shutil
import signal
import threading
import time
from pathlib import Path

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from conftest import (
    Script,
    assert_same_weights,
    checkpoints,
    launch,
    make_images,
    metrics,
    patch,
    replace,
    reset,
    weights,
)
from diffusers import DDIMScheduler, DDPMScheduler, DiffusionPipeline, UNet2DModel
from PIL import Image
from tqdm.auto import tqdm

import train_unconditional as script
from diffusion_training.data.rows import load_rows
from diffusion_training.draws import step_seed
from diffusion_training.models import update_ema
from diffusion_training.stopping import StopSignal
from diffusion_training.training import held_out
from diffusion_training.training.keeping.checkpoints import get_scale
from diffusion_training.training.showing import hub, pipelines
from diffusion_training.training.showing.report import draw_curves

pytestmark = pytest.mark.usefixtures("without_figures")
train = Script("train_unconditional")


@pytest.fixture
def flags(tmp_path, unet_config):
    """A run of 6 steps on 6 images that takes a second; later flags override these."""
    make_images(tmp_path / "images", 6)
    return train.flags(
        tmp_path / "out",
        f"--train_data_dir={tmp_path / 'images'}",
        f"--model_config_name_or_path={unet_config}",
        "--num_epochs=1",
        "--eval_batch_size=3",
    )


# ------------------------------------------------------------------- commands and their output


def test_diffusers_unconditional_commands_save_the_same_checkpoints(tmp_path, flags, unet_config):
    """The command lines of diffusers' example test, with local paths."""
    shared = f"""
        --dataset_name {tmp_path / "images"}
        --model_config_name_or_path {unet_config}
        --resolution 64
        --num_epochs 1
        --gradient_accumulation_steps 1
        --learning_rate 1e-3
        --lr_warmup_steps 5
        """.split()
    plain, several = (
        [*shared, "--output_dir", str(tmp_path / name)] for name in ("plain", "several")
    )
    train(*plain, *"--train_batch_size 2 --ddpm_num_inference_steps 2".split())
    assert (tmp_path / "plain/unet/diffusion_pytorch_model.safetensors").is_file()
    assert (tmp_path / "plain/scheduler/scheduler_config.json").is_file()
    one = "--train_batch_size 1 --ddpm_num_inference_steps 1 --checkpointing_steps=2".split()
    train(*several, *one)
    assert checkpoints(tmp_path / "several") == {"checkpoint-2", "checkpoint-4", "checkpoint-6"}
    again = (
        "--num_epochs 2 --resume_from_checkpoint=checkpoint-6 --checkpoints_total_limit=2".split()
    )
    train(*several, *one, *again)
    assert checkpoints(tmp_path / "several") == {"checkpoint-10", "checkpoint-12"}


def test_checkpoints_of_whole_epochs_are_reported_when_they_are_whole(
    tmp_path, flags, unet_config, capsys
):
    """An epoch of 6 images has 2 steps of 4 and 2 images, also in a resumed run."""
    argv = [f"--model_config_name_or_path={unet_config}", "--num_epochs=4", "--use_ema"]
    argv += ["--train_batch_size=4", "--checkpointing_epochs=2", "--posthoc_ema", "0.05", "0.1"]
    argv += [f"--dataset_name={tmp_path / 'images'}", "--ddpm_num_inference_steps=1"]
    argv += [f"--output_dir={tmp_path / 'out'}", "--save_images_epochs=9", "--resolution=16"]
    train(*argv)
    assert checkpoints(tmp_path / "out") == {"checkpoint-4", "checkpoint-8"}
    assert len([*(tmp_path / "out/posthoc_ema").iterdir()]) == 2  # as often
    said = capsys.readouterr().out
    first = "after an interruption, the same command with --resume_from_checkpoint latest continues"
    assert f"Saved checkpoint-4: {first} from it" in said and "Saved checkpoint-8\n" in said
    assert 0.1 < metrics(tmp_path / "out")[-1]["host_gb"] < 100
    train(*argv, "--num_epochs=5", "--resume_from_checkpoint=latest", "--train_batch_size=6")
    assert checkpoints(tmp_path / "out") == {"checkpoint-4", "checkpoint-8", "checkpoint-9"}
    stream = ["--streaming", "--max_train_steps=3", "--checkpointing_epochs=2"]
    said = train.refused(f"--train_data_dir={tmp_path / 'images'}", *stream, status=2)
    assert "a stream has no epochs: give --checkpointing_steps instead" in said


# Flags and defaults of diffusers' train_unconditional.py, autumn 2026. docs/from-diffusers.md
# explains those that differ or do not exist here.
DIFFUSERS = {
    "dataset_name": None,
    "dataset_config_name": None,
    "model_config_name_or_path": None,
    "cache_dir": None,
    "output_dir": "ddpm-model-64",
    "resolution": 64,
    "center_crop": False,
    "random_flip": False,
    "train_batch_size": 16,
    "eval_batch_size": 16,
    "num_epochs": 100,
    "save_images_epochs": 10,
    "save_model_epochs": 10,
    "gradient_accumulation_steps": 1,
    "learning_rate": 1e-4,
    "lr_scheduler": "cosine",
    "lr_warmup_steps": None,  # 500, or 0 if the rate is constant
    "adam_beta1": 0.95,
    "adam_beta2": 0.999,
    "adam_weight_decay": 1e-6,
    "adam_epsilon": 1e-8,
    "ema_inv_gamma": 1.0,
    "ema_power": 0.75,
    "ema_max_decay": 0.9999,
    "push_to_hub": False,
    "hub_model_id": None,
    "hub_private_repo": False,
    "logger": "tensorboard",
    "logging_dir": "logs",
    "checkpointing_steps": 500,
    "checkpoints_total_limit": None,
    "resume_from_checkpoint": None,
    "preserve_input_precision": False,
    "prediction_type": "epsilon",
    "ddpm_num_steps": 1000,
    "ddpm_beta_schedule": "linear",
}


def test_train_unconditional_has_diffusers_flags_and_defaults(tmp_path, capsys):
    args = script.parse_args(["--train_data_dir", str(tmp_path)])
    # Objective flags that are not set get their values here
    scheduler = script.make_noise_scheduler(args).config
    values = {**vars(args), "num_epochs": args.num_train_epochs, "logger": args.report_to}
    values.update(
        prediction_type=scheduler.prediction_type, ddpm_num_steps=scheduler.num_train_timesteps
    )
    values.update(ddpm_beta_schedule=scheduler.beta_schedule)
    assert {name: values[name] for name in DIFFUSERS} == DIFFUSERS
    with pytest.raises(SystemExit):
        script.parse_args(["--help"])
    printed = capsys.readouterr().out
    for flag in (
        *DIFFUSERS,
        "train_data_dir",
        "use_ema",
        "dataloader_num_workers",
        "mixed_precision",
    ):
        assert f"--{flag}" in printed, flag


def test_unconditional_output_has_pipeline_card_samples_and_curve(tmp_path, flags, monkeypatch):
    patch(monkeypatch, "draw_curves", draw_curves)
    argv = [
        *flags,
        "--save_images_epochs=1",
        "--num_epochs=2",
        "--checkpointing_steps=12",
        "--random_flip",
    ]
    train(*argv, "--no-random_flip", "--scale_lr=sqrt", "--tracker_project_name=it's a # test")
    out = tmp_path / "out"
    pipeline = DiffusionPipeline.from_pretrained(out)
    assert pipeline(num_inference_steps=2).images[0].size == (16, 16)
    # The EMA weights are saved
    assert_same_weights(out / "unet", out / "checkpoint-12/unet_ema")
    assert UNet2DModel.from_pretrained(out / "checkpoint-12/unet").config.sample_size == 16
    assert sorted(path.name for path in (out / "samples").iterdir()) == [
        "step-0000006.png",
        "step-0000012.png",
    ]
    assert Image.open(out / "loss.png").size[0] > 300 and (out / "report.html").is_file()
    card = (out / "README.md").read_text()
    assert (
        card.startswith("---\n")
        and "samples/step-0000012.png" in card
        and "| learning_rate | 0.001 |" in card
    )
    records = metrics(out)
    assert [record["step"] for record in records] == list(range(1, 13))
    assert [record["epoch"] for record in records] == [1] * 6 + [2] * 6
    names = (
        "step epoch loss lr grad_norm clipped images_per_second data_wait skipped_images memory_gb "
        "host_gb tflops"
    )
    for record in records:  # the record after an epoch's end also has its mean
        others = [name for name in record if not name.endswith("_seconds")]
        assert [name for name in others if name != "epoch_loss"] == names.split()
        assert ("epoch_loss" in record) == (record["step"] in (7, 12))
        assert math.isfinite(sum(record.values()))
    assert not list(out.glob(".tmp-*"))
    again = vars(script.parse_args([f"@{out / 'run.args'}"]))  # the same command again
    given = script.parse_args(
        [*argv, "--no-random_flip", "--scale_lr=sqrt", "--tracker_project_name=it's a # test"]
    )
    assert again == {**vars(given), "mixed_precision": "no"}


@pytest.mark.parametrize("argv, sampler", [
    ("", ("ddim", 50)),
    ("--ddpm_num_inference_steps=1000", ("ddpm", 1000)),  # a command of diffusers' script
    ("--validation_scheduler=ddpm", ("ddpm", 1000)),
    ("--validation_scheduler=ddim --ddpm_num_inference_steps=20", ("ddim", 20)),
    ("--ddpm_num_steps=10", ("ddim", 10)),
])  # fmt: skip
def test_samples_take_50_steps_of_ddim_by_default(tmp_path, argv, sampler):
    args = script.parse_args([f"--train_data_dir={tmp_path}", *argv.split()])
    assert (args.validation_scheduler, args.ddpm_num_inference_steps) == sampler


def test_saved_scheduler_keeps_ddim_v_prediction_and_zero_snr(tmp_path, flags):
    train(
        *flags,
        "--prediction_type=v_prediction",
        "--rescale_betas_zero_snr",
        "--ddpm_beta_schedule=scaled_linear",
        "--validation_scheduler=ddim",
        "--snr_gamma=5",
    )
    scheduler = DiffusionPipeline.from_pretrained(tmp_path / "out").scheduler
    assert isinstance(scheduler, DDIMScheduler) and scheduler.alphas_cumprod[-1] == 0
    assert (
        scheduler.config.prediction_type == "v_prediction"
        and scheduler.config.beta_schedule == "scaled_linear"
    )
    scheduler.set_timesteps(2)
    assert scheduler.timesteps[0] == 999
    # Training from that pipeline keeps its objective; flags override it.
    again = [flag for flag in flags if "model_config" not in flag] + [
        f"--output_dir={tmp_path / 'again'}"
    ]
    again += [f"--pretrained_model_name_or_path={tmp_path / 'out'}", "--learning_rate=0"]
    train(*again)
    config = DiffusionPipeline.from_pretrained(tmp_path / "again").scheduler.config
    assert config.prediction_type == "v_prediction" and config.rescale_betas_zero_snr
    assert_same_weights(tmp_path / "out/unet", tmp_path / "again/unet")
    (tmp_path / "out/scheduler/scheduler_config.json").write_text(  # like google/ddpm-cat-256
        json.dumps(
            {"_class_name": "DDPMScheduler", "num_train_timesteps": 1000, "beta_schedule": "linear"}
        )
    )
    assert script.make_noise_scheduler(script.parse_args(again)).config.prediction_type == "epsilon"
    args = script.parse_args([*again, "--prediction_type=v_prediction", "--rescale_betas_zero_snr"])
    config = script.make_noise_scheduler(args).config
    assert config.prediction_type == "v_prediction" and config.rescale_betas_zero_snr


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("single_gpu", marks=pytest.mark.long),
        pytest.param("multi_gpu", marks=pytest.mark.ci),
    ],
)
def test_accelerate_configs_launch(name, tmp_path, flags):
    """Launched in a separate process. Without a GPU, multi_gpu runs its two processes over gloo.

    single_gpu starts and ends without what tests/children changes.
    """
    env = {"ACCELERATE_USE_CPU": "true"} if name == "multi_gpu" else {"PYTHONPATH": None}
    config = ["--config_file", f"accelerate_configs/{name}.yaml"]
    config += ["--num_processes", "2", "--main_process_port", "0"] if name == "multi_gpu" else []
    run = launch(*config, "train_unconditional.py", *flags, "--checkpointing_steps=2", env=env)
    assert run.returncode == 0, run.stderr
    assert re.search(r"Step \d of \d: .*, loss [\d.]+, waiting \d+%, [\d.]+ img/s", run.stdout)
    state = json.loads((tmp_path / "out/checkpoint-2/trainer_state.json").read_text())
    assert state["settings"]["num_processes"] == (2 if name == "multi_gpu" else 1)
    assert len(metrics(tmp_path / "out")) == (3 if name == "multi_gpu" else 6)


def test_tensorboard_and_hub_get_the_pipeline_and_no_secrets(tmp_path, flags, monkeypatch):
    from huggingface_hub.utils import filter_repo_objects
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    calls = {}
    for name in ("HF_TOKEN", "WANDB_API_KEY"):
        monkeypatch.setenv(name, "secret-3141592653")
    monkeypatch.setattr(
        hub, "create_repo", lambda name, **options: type("Url", (), {"repo_id": f"me/{name}"})
    )
    monkeypatch.setattr(hub, "get_paths_info", lambda *args, **options: [])
    monkeypatch.setattr(hub, "upload_folder", lambda **options: calls.update(options))
    patch(monkeypatch, "draw_curves", draw_curves)
    train(*flags, "--report_to=tensorboard", "--checkpointing_steps=3", "--push_to_hub")
    # resumed at step 3, so later steps are repeated
    shutil.rmtree(tmp_path / "out/checkpoint-6")
    again = ["--report_to=tensorboard", "--resume_from_checkpoint=latest", "--push_to_hub"]
    train(*flags, *again)
    events = EventAccumulator(str(tmp_path / "out/logs/train_unconditional"))
    events.Reload()
    assert [event.step for event in events.Scalars("loss")] == [1, 2, 3, 4, 5, 6]
    assert len(events.Images("samples")) == 1
    files = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert all(b"secret-3141592653" not in path.read_bytes() for path in files)
    names = [str(path.relative_to(tmp_path / "out")) for path in files]
    uploaded = set(filter_repo_objects(names, allow_patterns=calls["allow_patterns"]))
    pipeline = {"model_index.json", "scheduler/scheduler_config.json", "unet/config.json"}
    pipeline.add("unet/diffusion_pytorch_model.safetensors")
    assert uploaded == pipeline | {"README.md", "samples/step-0000006.png", "loss.png"}
    assert (
        calls["repo_id"] == "me/out"
        and 'from_pretrained("me/out")' in (tmp_path / "out/README.md").read_text()
    )


# ------------------------------------------------------------------- exactness


def test_signal_before_the_first_step_keeps_files_of_an_earlier_run(tmp_path, flags, monkeypatch):
    train(*flags)
    for name in checkpoints(tmp_path / "out"):
        shutil.rmtree(tmp_path / "out" / name)
    files = ["samples/step-0000006.png", "metrics.jsonl", "unet/config.json"]
    before = [(tmp_path / "out" / name).read_bytes() for name in files]
    agree = StopSignal.agree

    def send_and_agree(stop_signal):
        os.kill(os.getpid(), signal.SIGTERM)
        return agree(stop_signal)

    monkeypatch.setattr(StopSignal, "agree", send_and_agree)
    with pytest.raises(SystemExit) as stopped:
        train(*flags, "--seed=1")
    assert stopped.value.code == 143 and not checkpoints(tmp_path / "out")
    assert [(tmp_path / "out" / name).read_bytes() for name in files] == before


def test_progress_bar_closes_before_samples_if_no_step_is_left(tmp_path, flags, monkeypatch):
    train(*flags)
    shown, log_validation = [], script.log_validation

    def record_bars(*given):
        shown.extend(bar.desc.rstrip(": ") for bar in tqdm._instances)
        return log_validation(*given)

    monkeypatch.setattr(script, "log_validation", record_bars)
    tqdm._instances.clear()  # runs of other tests that failed on purpose
    train(*flags, "--resume_from_checkpoint=latest")
    assert "Steps" not in shown


@pytest.mark.parametrize("moment, num_processes", [("first sample", 2), ("last sample", 1)])
def test_signal_interrupts_sampling_in_all_processes(
    tmp_path, flags, moment, num_processes, monkeypatch
):
    """One process gets a signal in its first sampling step, and all processes end.

    The missing samples are drawn when the run is resumed.
    """
    step, count = DDPMScheduler.step, []
    steps = (
        ["--max_train_steps=4", "--validation_steps=2"]
        if moment == "first sample"
        else ["--max_train_steps=2"]
    )
    flags = [*flags, *steps, "--eval_batch_size=2", "--checkpointing_steps=3"]

    def send_and_step(*args, **options):
        if os.environ.get("RANK", "0") == str(num_processes - 1):
            count.append(1)
            if len(count) == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            assert len(count) < 3
        return step(*args, **options)

    with monkeypatch.context() as sampling:
        sampling.setattr(DDPMScheduler, "step", send_and_step)
        many = [*flags, "--ddpm_num_inference_steps=30"]
        train.fork(*many, num_processes=num_processes, status=143)
    assert (
        "checkpoint-2" in checkpoints(tmp_path / "out") and not (tmp_path / "out/samples").exists()
    )
    train.fork(*flags, "--resume_from_checkpoint=latest", num_processes=num_processes)
    drawn = sorted(path.name[-5:-4] for path in (tmp_path / "out/samples").iterdir())
    assert drawn == (["2", "4"] if moment == "first sample" else ["2"])


def test_more_epochs_continue_a_finished_run_and_fewer_change_nothing(tmp_path, flags, capfd):
    train(*flags, "--num_epochs=2", "--resume_from_checkpoint=latest")
    assert "starting afresh" in capfd.readouterr().out
    assert checkpoints(tmp_path / "out") == {"checkpoint-12"}  # a run always ends with a checkpoint
    before = {path: path.read_bytes() for path in (tmp_path / "out").rglob("*.safetensors")}
    train(*flags, "--num_epochs=1", "--resume_from_checkpoint=latest")
    assert (
        "The checkpoint is beyond step 6: there is nothing left to train" in capfd.readouterr().out
    )
    assert {path: path.read_bytes() for path in (tmp_path / "out").rglob("*.safetensors")} == before
    assert len(metrics(tmp_path / "out")) == 12
    train(*flags, "--num_epochs=3", "--train_batch_size=4", "--resume_from_checkpoint=latest")
    said = capfd.readouterr().out
    assert (
        "checkpoint-12, train_batch_size 1 -> 4, num_train_epochs 2 -> 3, max_train_steps 12 -> 14"
        in said
    )
    assert len(metrics(tmp_path / "out")) == 14 and "checkpoint-14" in checkpoints(tmp_path / "out")
    assert "holds checkpoint-14 of an earlier run" in train.refused(*flags)
    elsewhere = ["--num_epochs=3", f"--output_dir={tmp_path / 'new'}", "--resume_from_checkpoint"]
    train(*flags, "--train_batch_size=4", *elsewhere, tmp_path / "out/checkpoint-12")
    assert [record["step"] for record in metrics(tmp_path / "new")] == [*range(1, 15)]
    assert_same_weights(tmp_path / "out/unet", tmp_path / "new/unet")


def test_another_seed_gives_other_weights(tmp_path, flags):
    for seed in (7, 8):
        train(
            *flags,
            "--random_flip",
            f"--seed={seed}",
            f"--output_dir={tmp_path / str(seed)}",
            "--max_train_steps=1",
        )
    with pytest.raises(AssertionError):
        assert_same_weights(tmp_path / "7/unet", tmp_path / "8/unet")


@pytest.mark.parametrize("num_processes, accumulation", [(1, 2), (2, 1)])
def test_learning_rate_schedule_counts_optimizer_steps(
    tmp_path, flags, num_processes, accumulation
):
    make_images(tmp_path / "images", 8)
    argv = [
        *flags,
        f"--gradient_accumulation_steps={accumulation}",
        "--lr_warmup_steps=3",
        "--max_train_steps=7",
    ]
    train.fork(*argv, num_processes=num_processes)
    # By hand: thirds up to 1e-3, then half a cosine over one more than the remaining steps, so that
    # no step has a rate of 0.
    cosine = [0.5 * (1 + math.cos(math.pi * k / 5)) for k in (1, 2, 3, 4)]
    expected = [1e-3 * factor for factor in (1 / 3, 2 / 3, 1.0, *cosine)]
    assert [record["lr"] for record in metrics(tmp_path / "out")] == pytest.approx(expected)


def test_gradient_accumulation_equals_a_larger_batch(tmp_path, flags, monkeypatch):
    """One step of 5 images in micro-batches of 2, 2 and 1 has the gradient of one batch of 5."""

    def mean_output(args, noise_scheduler, objective, models, prepared, weight):
        return (weight * models["unet"](prepared.clean, 5).sample.mean((1, 2, 3))).sum()

    monkeypatch.setattr(script, "compute_loss", mean_output)
    shared = [*flags, "--center_crop", "--num_epochs=1", "--max_grad_norm=0"]
    config = tmp_path / "tiny-unet/config.json"
    config.write_text(config.read_text().replace('"dropout": 0.1', '"dropout": 0.0'))
    (tmp_path / "images/5.png").unlink()
    train(*shared, "--train_batch_size=5", f"--output_dir={tmp_path / 'one'}")
    train(
        *shared,
        "--train_batch_size=2",
        "--gradient_accumulation_steps=3",
        f"--output_dir={tmp_path / 'three'}",
    )
    one, three = metrics(tmp_path / "one"), metrics(tmp_path / "three")
    assert len(one) == len(three) == 1
    assert one[0]["grad_norm"] == pytest.approx(three[0]["grad_norm"], rel=1e-4)
    assert one[0]["loss"] == pytest.approx(three[0]["loss"], rel=1e-4)


@pytest.mark.parametrize(
    "flag", ["--gradient_checkpointing", pytest.param("--compile=eager", marks=pytest.mark.ci)]
)
def test_gradient_checkpointing_and_compile_do_not_change_weights(
    tmp_path, flags, unet_config, flag
):
    config = json.loads(Path(unet_config, "config.json").read_text())
    Path(unet_config, "config.json").write_text(json.dumps({**config, "dropout": 0.0}))
    train(*flags, "--max_train_steps=2", f"--output_dir={tmp_path / 'plain'}")
    train(*flags, "--max_train_steps=2", flag)
    plain, other = weights(tmp_path / "plain/unet"), weights(tmp_path / "out/unet")
    assert plain.keys() == other.keys()
    assert all(torch.allclose(plain[name], other[name], atol=1e-5) for name in plain)


def test_skipped_fp16_steps_advance_neither_step_nor_ema(tmp_path, flags, monkeypatch):
    from accelerate.optimizer import AcceleratedOptimizer

    calls, ema_steps, step = [], [], AcceleratedOptimizer.step

    def overflow_twice(self, closure=None):
        calls.append(1)
        self._is_overflow = len(calls) in (2, 3)
        if not self._is_overflow:
            step(self, closure)

    def record_ema(averages, step, args):
        ema_steps.append(step)
        update_ema(averages, step, args)

    monkeypatch.setattr(AcceleratedOptimizer, "step", overflow_twice)
    patch(monkeypatch, "update_ema", record_ema)
    train(*flags, "--max_train_steps=4", "--checkpointing_steps=4")
    assert len(calls) == 6 and ema_steps == [1, 2, 3, 4]
    state = json.loads((tmp_path / "out/checkpoint-4/trainer_state.json").read_text())
    assert (state["global_step"], state["data_step"], state["images_seen"]) == (4, 6, 6)
    monkeypatch.setattr(
        AcceleratedOptimizer, "step", lambda self, closure=None: setattr(self, "_is_overflow", True)
    )
    with pytest.raises(SystemExit):
        train(*flags, f"--output_dir={tmp_path / 'never'}")


def test_no_use_ema_samples_from_trained_weights_without_dropout(tmp_path, flags, monkeypatch):
    states, drawn, pipelines, made = [], DDPMScheduler.step, [], script.DDPMPipeline
    monkeypatch.setattr(
        script, "DDPMPipeline", lambda *parts: (pipelines.append(made(*parts)), pipelines[-1])[1]
    )
    monkeypatch.setattr(
        DDPMScheduler,
        "step",
        lambda *a, **k: (states.append(pipelines[-1].unet.training), drawn(*a, **k))[1],
    )
    train(*flags, "--no-use_ema", "--validation_steps=2", "--checkpointing_steps=6")
    assert sorted(path.name[-6:-4] for path in (tmp_path / "out/samples").iterdir()) == [
        "02",
        "04",
        "06",
    ]
    assert states == [False] * 6 and not (tmp_path / "out/checkpoint-6/unet_ema").exists()
    assert_same_weights(tmp_path / "out/unet", tmp_path / "out/checkpoint-6/unet")


@pytest.mark.parametrize("num_processes", [1, 2])
def test_samples_do_not_depend_on_the_number_of_processes(tmp_path, flags, num_processes):
    argv = [*flags, "--learning_rate=0", "--max_train_steps=1", "--eval_batch_size=5"]
    train.fork(*argv, num_processes=num_processes)
    grid = np.array(Image.open(tmp_path / "out/samples/step-0000001.png")).astype(int)
    grid = grid[:: grid.shape[1] // 52, :: grid.shape[1] // 52]  # small grids are enlarged
    assert grid.shape == (2 * 17 + 1, 3 * 17 + 1, 3)
    pipeline = DiffusionPipeline.from_pretrained(tmp_path / "out")
    for i in range(5):
        generator = torch.Generator().manual_seed(step_seed("sample", 0, i))
        image = np.array(pipeline(generator=[generator], num_inference_steps=2).images[0]).astype(
            int
        )
        y, x = 17 * (i // 3) + 1, 17 * (i % 3) + 1
        assert np.abs(grid[y : y + 16, x : x + 16] - image).max() <= 1


# ------------------------------------------------------------------- data


def test_unconditional_streaming_run_resumes_exactly(tmp_path, flags):
    (tmp_path / "parquet").mkdir()
    png = [(tmp_path / f"images/{i}.png").read_bytes() for i in range(6)]
    kinds = datasets.Features({"image": datasets.Image()})
    for shard in range(2):
        rows = {"image": [{"bytes": data, "path": None} for data in png[shard * 3 : shard * 3 + 3]]}
        datasets.Dataset.from_dict(rows, features=kinds).to_parquet(
            tmp_path / f"parquet/train-{shard}.parquet"
        )
    argv = [
        *flags,
        f"--train_data_dir={tmp_path / 'parquet'}",
        "--streaming",
        "--max_train_steps=6",
        "--train_batch_size=2",
        "--checkpointing_steps=2",
        "--random_flip",
    ]
    train.fork(*argv, num_processes=2)
    resumed = [
        *argv,
        f"--output_dir={tmp_path / 'again'}",
        f"--resume_from_checkpoint={tmp_path}/out/checkpoint-4",
    ]
    train.fork(*resumed, num_processes=2)
    assert_same_weights(tmp_path / "out/unet", tmp_path / "again/unet")


def test_cache_images_flag_does_not_change_the_training(tmp_path, flags, capfd):
    (tmp_path / "images/broken.png").write_bytes(b"not an image")
    flags = [*flags, "--center_crop", "--random_flip", "--num_epochs=2"]
    train(*flags, "--cache_images")
    assert capfd.readouterr().err.count("broken.png") == 1
    assert metrics(tmp_path / "out")[-1]["skipped_images"] == 1
    (tmp_path / "images/broken.png").unlink()
    train(*flags, f"--output_dir={tmp_path / 'plain'}")
    assert_same_weights(tmp_path / "plain/unet", tmp_path / "out/unet")


@pytest.fixture
def images_of(tmp_path):
    """The trainer's data set of a folder."""

    def images_of(*argv, folder="images", channels=3):
        args = script.parse_args(
            [f"--train_data_dir={tmp_path / folder}", "--resolution=16", *argv]
        )
        return script.ImageDataset(load_rows(args), channels, 0, args)

    return images_of


def test_random_crops_depend_on_epoch_and_row(tmp_path, images_of):
    make_images(tmp_path / "images", 2, size=(60, 20))
    data = images_of()
    crops = [data[[(epoch, 1, 1.0)]]["pixel_values"][0] for epoch in (0, 0, 1, 2)]
    assert crops[0].shape == (3, 16, 16) and torch.equal(crops[0], crops[1])
    assert not torch.equal(crops[0], crops[2]) and not torch.equal(crops[2], crops[3])
    data = images_of("--center_crop")
    assert torch.equal(data[[(0, 1, 1.0)]]["pixel_values"], data[[(1, 1, 1.0)]]["pixel_values"])


def test_image_dataset_batch_equals_its_rows_in_any_order(tmp_path, images_of):
    make_images(tmp_path / "images", 6, size=(60, 20))
    data, keys = images_of("--random_flip"), [(1, row, row / 10) for row in (4, 0, 5, 2, 2, 1)]
    batch, alone = data[keys], [data[[key]] for key in keys]
    for name in ("pixel_values", "weight"):
        assert torch.equal(batch[name], torch.cat([one[name] for one in alone])), name


def test_pixels_are_scaled_to_1_and_random_flip_mirrors_half(tmp_path, images_of):
    images = torch.tensor([0, 255], dtype=torch.uint8).expand(200, 3, 4, 2)
    for pixel_values in (images, images / 255):
        prepared, condition, loss_inputs = script.prepare_batch({"pixel_values": pixel_values})
        assert prepared[0, 0, 0].tolist() == [-1, 1] and prepared.dtype == torch.float32
        assert condition == loss_inputs == {}
    (tmp_path / "images").mkdir()
    Image.fromarray(np.tile(np.repeat([0, 255], 8), (16, 1)).astype(np.uint8)).save(
        tmp_path / "images/0.png"
    )
    keys = [(epoch, 0, 1.0) for epoch in range(200)]
    left = lambda *argv: images_of(*argv, channels=1)[keys]["pixel_values"][:, 0, 0, 0].tolist()
    once = left("--random_flip")
    # Flips are keyed by epoch and row, so they are the same again
    assert once == left("--random_flip") and 70 < once.count(255) < 130
    assert set(left()) == {0}


def test_undecodable_images_become_black_with_weight_0_and_are_named(
    tmp_path, images_of, monkeypatch
):
    make_images(tmp_path / "images", 2)
    png = (tmp_path / "images/1.png").read_bytes()
    kinds = datasets.Features({"image": datasets.Image()})
    rows = {"image": [{"bytes": data, "path": None} for data in (png, png[:300], b"none")] + [None]}
    (tmp_path / "table").mkdir()
    datasets.Dataset.from_dict(rows, features=kinds).to_parquet(tmp_path / "table/train.parquet")
    batch = images_of(folder="table")[[(0, row, 0.25) for row in (3, 0, 1, 2)]]
    assert (
        batch["weight"].tolist() == [0, 0.25, 0, 0] and batch["pixel_values"][[0, 2, 3]].max() == 0
    )
    named = [
        ("row 3", "there is no image"),
        ("row 1", "image file is truncated"),
        ("row 2", "cannot identify image"),
    ]
    for (name, reason), (expected, why) in zip(batch["skipped"], named, strict=True):
        assert name == expected and reason.startswith(why)
    data = images_of()
    (tmp_path / "images/0.png").unlink()  # deleted from the folder
    assert data[[(0, 0, 1.0)]]["weight"] == 0
    monkeypatch.setattr(
        script,
        "decode_image",
        lambda *args: (_ for _ in ()).throw(OSError(5, "Input/output error")),
    )
    with pytest.raises(OSError, match="Input/output"):  # a failing disk
        data[[(0, 1, 1.0)]]


def test_broken_image_is_skipped_counted_and_reported_once(tmp_path, flags, capfd):
    (tmp_path / "images/3.png").write_bytes(b"not an image")
    train(*flags, "--num_epochs=3", "--dataloader_num_workers=1")
    assert capfd.readouterr().err.count("images/3.png") == 1
    records = metrics(tmp_path / "out")
    # A step without any image has no loss to record
    assert len(records) == 15 and records[-1]["skipped_images"] == 1
    assert all(math.isfinite(record["loss"]) for record in records)
    for path in (tmp_path / "images").iterdir():
        path.write_bytes(b"no image at all")
    none = [*flags, "--logging_steps=10", f"--output_dir={tmp_path / 'none'}"]
    assert "none of the last 6 images could be used, for example " in train.refused(*none)
    assert not (tmp_path / "none/unet").exists()


# ------------------------------------------------------------------- errors


@pytest.mark.parametrize("saves", ["checkpoints", "pipelines"])
def test_nonfinite_loss_stops_the_run_before_saving(tmp_path, flags, monkeypatch, saves):
    compute_loss, calls, at = script.compute_loss, [], 4 if saves == "checkpoints" else 8

    def break_one_loss(*args):
        calls.append(1)
        return compute_loss(*args) * (float("nan") if len(calls) == at else 1)

    monkeypatch.setattr(script, "compute_loss", break_one_loss)
    flags = [*flags, "--logging_steps=100", "--save_images_epochs=100"]
    if saves == "checkpoints":
        error = train.refused(*flags, "--checkpointing_steps=1")
        assert "not finite at step 4" in error and "checkpoint-3" in error
        assert checkpoints(tmp_path / "out") == {"checkpoint-1", "checkpoint-2", "checkpoint-3"}
    else:
        assert "not finite at step 12" in train.refused(
            *flags, "--num_epochs=3", "--save_model_epochs=1"
        )
        assert all(tensor.isfinite().all() for tensor in weights(tmp_path / "out/unet").values())


def test_unusable_unet_or_scheduler_gives_a_one_sentence_error(tmp_path, flags, unet_config):
    def make(*argv, of=script.make_unet):
        return of(script.parse_args([*flags, *map(str, argv)]))

    assert make().config.sample_size == 16
    (tmp_path / "empty").mkdir()
    with pytest.raises(SystemExit, match="holds no UNet2DModel"):
        make(f"--model_config_name_or_path={tmp_path / 'empty'}")
    with pytest.raises(SystemExit, match="--resolution 15 is not a multiple of 2"):
        make("--resolution=15")
    config = json.loads(Path(unet_config, "config.json").read_text())
    for change, sentence in (
        ({"freq_shift": []}, r"the U-Net of .*odd.json can't be trained here \("),
        ({"norm_num_groups": -1}, "odd.json can't be trained here|holds no UNet2DModel"),
        ({"mid_block_scale_factor": "x"}, r"the U-Net of .*odd.json can't be trained here \("),
        ({"in_channels": 4}, "odd.json has 4 input and 3 output channels; images have 1 or 3"),
        ({"num_class_embeds": 3}, r"can't be trained here \(class_labels should be provided"),
    ):
        (tmp_path / "odd.json").write_text(json.dumps({**config, **change}))
        with pytest.raises(SystemExit, match=sentence):
            make(f"--model_config_name_or_path={tmp_path / 'odd.json'}")
    scheduler = script.make_noise_scheduler
    with pytest.raises(SystemExit, match="needs --prediction_type v_prediction or sample"):
        make("--rescale_betas_zero_snr", of=scheduler)
    with pytest.raises(SystemExit, match="3 exceeds the 2 training timesteps"):
        make("--ddpm_num_steps=2", "--ddpm_num_inference_steps=3", of=scheduler)
    (tmp_path / "pipeline/scheduler").mkdir(parents=True)
    flags = [flag for flag in flags if "model_config" not in flag]
    with pytest.raises(SystemExit, match="pipeline holds no scheduler"):
        make(f"--pretrained_model_name_or_path={tmp_path / 'pipeline'}", of=scheduler)
    # Otherwise it would train with betas that the base never had
    config = {"_class_name": "ScoreSdeVeScheduler", "_diffusers_version": "0.42.1"}
    (tmp_path / "pipeline/scheduler/scheduler_config.json").write_text(json.dumps(config))
    base = f"--pretrained_model_name_or_path={tmp_path / 'pipeline'}"
    with pytest.raises(SystemExit, match="has a ScoreSdeVeScheduler, which has no betas"):
        make(base, of=scheduler)
    # DDIM does not know this schedule
    script.DDPMScheduler(beta_schedule="sigmoid").save_pretrained(tmp_path / "pipeline/scheduler")
    make(base, "--validation_scheduler=ddpm", of=scheduler)
    with pytest.raises(SystemExit, match="pipeline can't draw samples .sigmoid is not implemented"):
        make(base, "--validation_scheduler=ddim", of=scheduler)


def test_unconditional_records_have_the_seconds_of_pauses(tmp_path, flags, monkeypatch):
    late, clock = [0], time.perf_counter
    monkeypatch.setattr(time, "perf_counter", lambda: clock() + late[0])

    def slow(function, seconds):
        def wrapper(*args, **options):
            late[0] += seconds
            return function(*args, **options)

        return wrapper

    monkeypatch.setattr(script, "log_validation", slow(script.log_validation, 10_000))
    patch(monkeypatch, "get_scale", slow(get_scale, 1_000))
    patch(monkeypatch, "save_pipeline", slow(pipelines.save_pipeline, 100_000))
    patch(monkeypatch, "log_held_out_loss", slow(held_out.log_held_out_loss, 1_000_000))
    flags += ["--validation_steps=2", "--checkpointing_steps=2", "--holdout=1", "--save_best"]
    train(*flags, "--max_train_steps=3")
    records = [record for record in metrics(tmp_path / "out") if "loss" in record]
    names = ("checkpoint", "samples", "best", "held_out")
    seconds = [
        [round(record.get(f"{name}_seconds", 0), -3) for name in names] for record in records
    ]
    assert seconds == [[0] * 4, [0] * 4, [1_000, 10_000, 100_000, 1_000_000]]
    assert records[2]["images_per_second"] < 1e-6 < records[1]["images_per_second"]


def test_resumed_run_uses_the_optimizer_flags_of_its_command(tmp_path, flags):
    given = {
        "adam_beta1": 0.5,
        "adam_beta2": 0.75,
        "adam_weight_decay": 0.25,
        "adam_epsilon": 0.125,
    }
    flags = [*flags, "--lr_warmup_steps=0"]
    train(*flags, "--max_train_steps=2", "--checkpointing_steps=2", "--lr_scheduler=constant")
    train(
        *flags,
        "--max_train_steps=4",
        "--checkpointing_steps=4",
        "--lr_scheduler=constant",
        "--learning_rate=1e-5",
        "--resume_from_checkpoint=latest",
        *(f"--{name}={value}" for name, value in given.items()),
    )
    assert [record["lr"] for record in metrics(tmp_path / "out")] == [1e-3, 1e-3, 1e-5, 1e-5]
    (group,) = torch.load(tmp_path / "out/checkpoint-4/optimizer.bin", weights_only=True)[
        "param_groups"
    ]
    assert (*group["betas"], group["weight_decay"], group["eps"]) == tuple(given.values())


def test_bf16_keeps_noise_weights_and_optimizer_state_in_float32(tmp_path, flags, monkeypatch):
    noised, computed, add_noise, conv2d = (
        set(),
        set(),
        DDPMScheduler.add_noise,
        torch.nn.Conv2d.forward,
    )

    def record_noise(self, images, noise, timesteps):
        noisy = add_noise(self, images, noise, timesteps)
        noised.update({images.dtype, noise.dtype, noisy.dtype})
        return noisy

    def record_output(self, x):
        out = conv2d(self, x)
        computed.add(out.dtype)
        return out

    monkeypatch.setattr(DDPMScheduler, "add_noise", record_noise)
    monkeypatch.setattr(torch.nn.Conv2d, "forward", record_output)
    train(*flags, "--mixed_precision=bf16", "--max_train_steps=2", "--checkpointing_steps=2")
    assert noised == {torch.float32} and torch.bfloat16 in computed
    checkpoint = tmp_path / "out/checkpoint-2"
    state = torch.load(checkpoint / "optimizer.bin", weights_only=True)["state"].values()
    held = [*weights(checkpoint / "unet").values(), *weights(checkpoint / "unet_ema").values()]
    held += [moments[name] for moments in state for name in ("exp_avg", "exp_avg_sq")]
    assert {tensor.dtype for tensor in held} == {torch.float32}


def test_main_runs_in_a_thread_and_leaves_its_arguments_unchanged(tmp_path, flags):
    args = script.parse_args([*flags, "--scale_lr", "--max_train_steps=1"])
    rates = []
    for name in ("one", "two"):
        args = replace(args, output_dir=str(tmp_path / name))
        before = copy.deepcopy(args)
        reset()
        thread = threading.Thread(target=script.main, args=(args,))
        thread.start()
        thread.join()
        assert args == before
        rates += [record["lr"] for record in metrics(tmp_path / name)]
    assert len(rates) == 2 and rates[0] == rates[1]


def test_failed_model_loading_removes_only_a_new_output_folder(tmp_path, flags):
    wrong = [*flags, "--model_config_name_or_path=nowhere"]
    assert "nowhere holds no UNet2DModel" in train.refused(*wrong)
    assert not (tmp_path / "out").exists()
    (tmp_path / "out").mkdir()
    train.refused(*wrong)
    assert (tmp_path / "out/run.args").exists()


def test_new_run_deletes_samples_of_a_run_without_checkpoints(tmp_path, flags):
    train(*flags, "--max_train_steps=2", "--validation_steps=1")
    shutil.rmtree(tmp_path / "out/checkpoint-2")
    assert len(list((tmp_path / "out/samples").iterdir())) == 2
    train(*flags, "--max_train_steps=1")
    assert [path.name for path in (tmp_path / "out/samples").iterdir()] == ["step-0000001.png"]
    assert [record["step"] for record in metrics(tmp_path / "out")] == [1]


@pytest.mark.parametrize("damage", ["empty", "broken", "schema"])
def test_damaged_shard_of_a_stream_gives_a_one_sentence_error(tmp_path, flags, damage):
    (tmp_path / "shards").mkdir()
    images = [(tmp_path / f"images/{i}.png").read_bytes() for i in range(4)]
    for i in range(2):
        rows = datasets.Dataset.from_dict({"image": images}).cast_column(
            "image", datasets.Image(decode=False)
        )
        rows.to_parquet(tmp_path / f"shards/{i}.parquet")
    stream = [
        *flags,
        f"--train_data_dir={tmp_path / 'shards'}",
        "--streaming",
        "--max_train_steps=12",
    ]
    path = tmp_path / "shards/1.parquet"
    if damage == "empty":
        pq.write_table(pq.read_table(path).slice(0, 0), path)
    elif damage == "broken":
        path.write_bytes(path.read_bytes()[:-30])
    else:
        pq.write_table(pa.table({"other": [1, 2]}), path)
    assert "reading the stream failed (" in train.refused(*stream)
    train(*flags, "--max_train_steps=1", f"--output_dir={tmp_path / 'counted'}")
    said = train.refused(
        *flags,
        "--streaming",
        "--max_train_steps=9",
        f"--resume_from_checkpoint={tmp_path / 'counted/checkpoint-1'}",
    )
    assert "checkpoint-1 was made without --streaming: resume it without --streaming" in said
