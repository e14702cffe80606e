"""Samples and checkpoints besides those that are due change nothing else.

--validate_first measures and draws a pretrained model at step 0; files in --output_dir ask for
samples or a checkpoint.
"""

import os
import re
import signal

import pytest
from conftest import Script, checkpoints, list_sd_flags, metrics, patch

import train_text_to_image as script
from diffusion_training.draws import step_seed
from diffusion_training.training import run_folder
from diffusion_training.training.keeping.best import read_best
from diffusion_training.training.records import Records

pytestmark = pytest.mark.usefixtures("without_figures")
train, precompute = Script("train_text_to_image"), Script("precompute_latents")
train_unconditional = Script("train_unconditional")
FIRST = "samples/step-0000000.png"


@pytest.fixture(scope="module")
def inputs(sd_inputs):
    return sd_inputs(6)


@pytest.fixture
def flags(tmp_path, inputs):
    """4 steps on 3 images; 3 more are held out."""
    return list_sd_flags(
        inputs,
        tmp_path / "out",
        *"--rank=2 --holdout=3 --validation_prompts=a --validation_steps=2".split(),
        *"--checkpointing_steps=2 --max_train_steps=4 --lr_warmup_steps=0".split(),
        "--num_validation_images=2",
    )


def outcome(folder):
    """The parts that must be equal in two runs: bytes of files, and records without times."""
    kinds = (".safetensors", ".bin", ".png")
    files = {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.name.endswith(kinds) and path.name != "loss.png"
    }
    times = ("images_per_second", "data_wait", "tflops", "memory_gb", "host_gb")
    records = [
        {
            key: value
            for key, value in record.items()
            if key not in times and not key.endswith("_seconds")
        }
        for record in metrics(folder)
    ]
    return files, records


def test_validate_first_adds_a_record_and_samples_and_nothing_else(tmp_path, flags, monkeypatch):
    """Step 0 is not a result of the run, so it is never the best, even with the lowest loss."""

    def measure(accelerator, records, *rest):
        step = rest[-1]
        if records.held_out.get("step") != step:
            records.add_held_out(step, {"held_out_loss": 0.5, "held_out_loss_ema": 0.1 + step / 10})

    patch(monkeypatch, "log_held_out_loss", measure)
    # the same name, because the header of a LoRA for sd-scripts contains it
    with_it, without = tmp_path / "with/out", tmp_path / "without/out"
    flags = [*flags, "--save_best"]
    train(*flags, f"--output_dir={with_it}")
    train(*flags, f"--output_dir={without}", "--no-validate_first")
    files, records = outcome(with_it)
    assert files.pop(FIRST) and (files, records[1:]) == outcome(without)
    assert records[0] == {"step": 0, "held_out_loss": 0.5, "held_out_loss_ema": 0.1}
    assert read_best(with_it / "best")["step"] == 2
    page = (with_it / "report.html").read_text()
    steps = r"<figcaption>step (.*?)</figcaption>"
    assert re.findall(steps, page) == ["0, before training", "4", "2"]
    assert re.findall(steps, (without / "report.html").read_text()) == ["4", "2"]


def test_validate_first_measures_the_pretrained_model(tmp_path, flags):
    """With a learning rate of 0 the model of step 2 is still the pretrained one."""
    train(*flags, "--learning_rate=0", "--lr_scheduler=constant", "--max_train_steps=2")
    files, records = outcome(tmp_path / "out")
    assert files[FIRST] == files["samples/step-0000002.png"]
    first, last = (record for record in records if "held_out_loss" in record)
    assert {**first, "step": 2} == last


@pytest.mark.parametrize(
    "moment, number, num_processes, code",
    [
        pytest.param("held out", signal.SIGTERM, 2, 143, marks=pytest.mark.long),
        ("sample", signal.SIGINT, 1, 130),
        # right before step 1
        pytest.param("step", signal.SIGKILL, 1, -signal.SIGKILL, marks=pytest.mark.long),
    ],
)
def test_run_stopped_during_validate_first_starts_over(
    tmp_path, flags, monkeypatch, moment, number, num_processes, code
):
    sent = []
    whole, out = tmp_path / "whole/out", tmp_path / "out"  # the same name, as above
    train(*flags, f"--output_dir={whole}")

    def send_once(*key):
        if key[0] == moment and os.environ.get("RANK", "0") == "0" and not sent:
            sent.append(os.kill(os.getpid(), number))
        return step_seed(*key)

    again = [*flags, "--resume_from_checkpoint=latest"]
    with monkeypatch.context() as stopped:
        patch(stopped, "step_seed", send_once)
        train.fork(*again, num_processes=num_processes, status=code)
    assert checkpoints(out) == set() and not list(out.glob("*.safetensors"))
    assert (out / FIRST).exists() == (moment == "step")
    assert [record["step"] for record in metrics(out)] == [0] * (moment != "held out")
    train(*again)
    assert outcome(out) == outcome(whole)


def test_resumed_run_does_not_repeat_validate_first(tmp_path, flags, monkeypatch):
    drawn = []
    log_validation = script.log_validation

    def record_step(launch, pipeline, data, bases, step, *rest):
        drawn.append(step)
        return log_validation(launch, pipeline, data, bases, step, *rest)

    monkeypatch.setattr(script, "log_validation", record_step)
    train(*flags, "--max_train_steps=2")
    train(*flags, "--resume_from_checkpoint=latest")
    assert drawn == [0, 2, 4]
    assert [r["step"] for r in metrics(tmp_path / "out") if "held_out_loss" in r] == [0, 2, 4]


def test_validate_first_applies_to_pretrained_models_only(tmp_path, inputs, unet_config):
    new, pretrained = tmp_path / "new", tmp_path / "pretrained"
    for folder, model in (
        (new, f"--model_config_name_or_path={unet_config}"),
        (pretrained, f"--pretrained_model_name_or_path={new}"),
    ):
        train_unconditional(
            *train_unconditional.flags(
                folder,
                model,
                f"--train_data_dir={inputs / 'images'}",
                *"--holdout=2 --train_batch_size=2 --max_train_steps=1".split(),
                "--lr_warmup_steps=0",
            )
        )
    for folder, steps in ((new, [1]), (pretrained, [0, 1])):
        assert [r["step"] for r in metrics(folder) if "held_out_loss" in r] == steps
        assert (folder / FIRST).exists() == (0 in steps)
    # where the first run ended
    assert metrics(pretrained)[0]["held_out_loss_ema"] == metrics(new)[-1]["held_out_loss_ema"]


def list_asked(folder):
    """{file: request} of a run's folder that a request has added, for `outcome`."""
    kinds = {"samples/step-0000003.png": "sample-now", "checkpoint-1": "save-now"}
    return {
        name: kind
        for name in outcome(folder)[0]
        for begin, kind in kinds.items()
        if name.startswith(begin)
    }


def test_files_ask_for_samples_and_a_checkpoint(tmp_path, flags, monkeypatch):
    """A request of before the first step is ignored."""
    with_it, without = tmp_path / "with/out", tmp_path / "without/out"
    flags = [*flags, "--logging_steps=1", "--no-validate_first", "--checkpointing_steps=4"]
    train.fork(*flags, f"--output_dir={without}", num_processes=2)
    log, open_run = Records.log, run_folder.open_run

    def open_and_ask(launch, *rest):
        opened = open_run(launch, *rest)
        (with_it / "sample-now").touch()
        return opened

    def log_and_ask(records):
        log(records)
        name = {1: "save-now", 3: "sample-now"}.get(records.progress.global_step)
        if name and records.accelerator.is_main_process:
            (with_it / name).touch()

    patch(monkeypatch, "open_run", open_and_ask)
    monkeypatch.setattr(Records, "log", log_and_ask)
    train.fork(*flags, f"--output_dir={with_it}", num_processes=2)
    assert set(list_asked(with_it).values()) == {"sample-now", "save-now"}
    assert not list_asked(without) and not [*with_it.glob("*-now")]
    files, records = outcome(with_it)
    files = {name: files[name] for name in files.keys() - list_asked(with_it)}
    records = [record for record in records if record["step"] != 3 or "loss" in record]
    assert (files, records) == outcome(without)
