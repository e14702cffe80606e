"""What all three trainers promise: exact resume, signals, shares of processes, flags, errors."""

import json
import os
import re
import shlex
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import datasets
import pytest
import torch
from conftest import (
    MODELS,
    Script,
    assert_same_weights,
    checkpoints,
    finish,
    make_captioned,
    make_images,
    make_models,
    make_prx,
    make_unet_config,
    metrics,
    patch,
    start,
    wait_until,
)

from diffusion_training.data import captions
from diffusion_training.training.keeping.checkpoints import find_checkpoints

pytestmark = pytest.mark.usefixtures("without_figures")
precompute = Script("precompute_latents")
CAPTIONS = ["a digit zero", "a handwritten digit one", "digit", "a handwritten digit seven",
            "one", "a digit two", "one", "a digit"]  # fmt: skip
RESUME = "--resume_from_checkpoint=latest"


@dataclass(frozen=True)
class Trainer:
    """A trainer and tiny inputs: `models(folder)` makes models and returns the flags for them."""

    script: Script
    models: Callable
    denoiser: str  # its folder in a pipeline
    epochs: str  # the flag of their number
    num_images: int  # after which a resumed run has had short steps and batches
    exact: str  # flags of a run with everything that is drawn at random
    family: str = ""  # flags of its cache; without them it trains on images
    samples: str = ""  # flags of a run that draws samples

    def prepare(self, folder, num_images=6, cache=(), from_images=False):
        """Make models and data; returns the flags of a run of a second in `folder`/out."""
        flags = self.script.flags(folder / "out", *self.models(folder))
        images = f"--train_data_dir={folder / 'images'}"
        if not self.family:
            make_images(folder / "images", num_images)
            return [*flags, images, "--num_epochs=1", "--eval_batch_size=3"]
        make_captioned(folder / "images", num_images, CAPTIONS[:num_images])
        flags += ["--num_validation_images=2"]
        if from_images:
            return [*flags, images, "--resolution=16", "--dataloader_num_workers=1"]
        base = f"--pretrained_model_name_or_path={MODELS}"
        shards = ["--rows_per_shard=4", "--batch_size=3"]
        precompute(*precompute.flags(folder / "cache", images, base, self.family, *shards, *cache))
        return [*flags, f"--latents_dir={folder / 'cache'}"]


TRAINERS = {
    "unconditional": Trainer(
        script=Script("train_unconditional"),
        models=lambda folder: [f"--model_config_name_or_path={make_unet_config(folder)}"],
        denoiser="unet",
        epochs="--num_epochs",
        num_images=11,
        exact="--random_flip --train_batch_size=2 --checkpointing_steps=1 --save_model_epochs=1 "
        "--dataloader_num_workers=1",
    ),
    "text_to_image": Trainer(
        script=Script("train_text_to_image"),
        models=lambda folder: [f"--pretrained_model_name_or_path={make_models(folder)}"],
        denoiser="unet",
        epochs="--num_train_epochs",
        num_images=7,
        exact="--random_flip --train_batch_size=2 --checkpointing_steps=2 --lr_scheduler=cosine "
        "--caption_dropout=0.3 --noise_offset=0.1 --input_perturbation=0.1 --lr_warmup_steps=2",
        family="--model_family=sd",
        samples="--validation_prompts=a digit one",
    ),
    "flow": Trainer(
        script=Script("train_flow"),
        models=lambda folder: [
            f"--pretrained_model_name_or_path={MODELS}",
            f"--transformer_config_name_or_path={make_prx(folder / 'config')}",
        ],
        denoiser="transformer",
        epochs="--num_train_epochs",
        num_images=8,
        exact="--random_flip --train_batch_size=2 --checkpointing_steps=2 --lr_scheduler=cosine "
        "--caption_dropout=0.3 --holdout=1",
        family="--model_family=prx",
        samples="--validation_prompts=a digit one",
    ),
}


@pytest.fixture(params=TRAINERS)
def trainer(request):
    return TRAINERS[request.param]


# ------------------------------------------------------------------- exact resume


def list_resumed_runs():
    """A trainer's name, further flags, whether it reads images, and the number of processes."""
    run, long = pytest.param, pytest.mark.long
    yield run("unconditional", "--gradient_accumulation_steps=3", True, 1, marks=long)
    yield run("unconditional", "--gradient_accumulation_steps=1", True, 2)
    yield run("text_to_image", "", True, 1, marks=long)
    yield run("text_to_image", "", False, 2)
    yield run("flow", "--optimizer=adamw", True, 1)
    yield run("flow", "--optimizer=muon", False, 2)


@pytest.mark.parametrize("name, more, from_images, num_processes", [*list_resumed_runs()])
def test_run_killed_and_resumed_is_bit_identical(
    tmp_path, monkeypatch, name, more, from_images, num_processes
):
    """Some steps and batches are short, and batches of captions differ in their length."""
    monkeypatch.setattr(captions, "MULTIPLE", 2)
    trainer = TRAINERS[name]
    flags = trainer.prepare(tmp_path, trainer.num_images, ["--random_flip"], from_images)
    flags += [*trainer.exact.split(), *more.split(), f"{trainer.epochs}=3"]
    resuming = [*flags, "--checkpoints_total_limit=2", RESUME]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run = {"num_processes": num_processes}
    trainer.script.fork(*flags, "--checkpoints_total_limit=2", f"--output_dir={whole}", **run)
    for _ in range(2 if "accumulation_steps=3" in more else 1):
        trainer.script.kill_after_checkpoint(killed, *resuming, **run)
    trainer.script.fork(*resuming, f"--output_dir={killed}", **run)
    assert checkpoints(whole) == checkpoints(killed) != set()
    last = find_checkpoints(whole)[-1].name
    for part in (f"{last}/{trainer.denoiser}", f"{last}/{trainer.denoiser}_ema", trainer.denoiser):
        assert_same_weights(whole / part, killed / part)
    moments = [(folder / last / "optimizer.bin").read_bytes() for folder in (whole, killed)]
    assert moments[0] == moments[1]
    names = ("step", "epoch", "loss", "lr", "grad_norm")
    shown = [
        [[record[name] for name in names] for record in metrics(folder) if "loss" in record]
        for folder in (whole, killed)
    ]
    assert shown[0] == shown[1] and len(shown[0]) == int(last.split("-")[1])
    rows_per_step = 2 * num_processes * (3 if "accumulation_steps=3" in more else 1)
    num_rows = trainer.num_images - ("--holdout=1" in flags)
    assert len(shown[0]) == 3 * -(-num_rows // rows_per_step)
    assert not list(killed.glob(".tmp-*"))


def test_resume_draws_samples_that_a_kill_prevented(tmp_path, trainer, monkeypatch):
    """The checkpoint is written meanwhile, because samples may take minutes.

    Samples that are missing then are drawn when the run is resumed.
    """
    train, script, out = trainer.script, trainer.script.module, tmp_path / "out"
    flags = [*trainer.prepare(tmp_path), "--checkpointing_steps=2", "--validation_steps=2"]
    flags += [trainer.samples, "--no-validate_first"] if trainer.samples else []
    train(*flags, f"--output_dir={tmp_path / 'whole'}")

    def die(*args):
        wait_until(lambda: checkpoints(out) == {"checkpoint-2"})  # without the writer's own folder
        os._exit(9)

    log_validation, train_step, begun = script.log_validation, script.train_step, []

    def count(*args):
        begun.append(0)
        return train_step(*args)

    def die_while_saving(*args):
        """Samples are saved while the next steps are trained, and before the next checkpoint."""
        wait_until(lambda: len(begun) >= 2)
        time.sleep(0.1)
        os._exit(9)

    def stop_and_draw(*args):
        os.kill(os.getpid(), signal.SIGTERM)
        log_validation(*args)

    # Killed again while the missing samples are drawn: no step may be trained before them
    kills = [("log_validation", die, 9, ()), ("log_validation", stop_and_draw, 143, [RESUME])]
    for name, draw, status, more in [*kills, ("save_samples", die_while_saving, 9, [RESUME])]:
        with monkeypatch.context() as killed:
            killed.setattr(script, "train_step", count)
            patch(killed, name, draw)
            train.fork(*flags, *more, status=status)
        assert checkpoints(out) == {"checkpoint-2"} and not (out / "samples").exists()
    train(*flags, RESUME)
    for path in (tmp_path / "whole/samples").iterdir():
        assert path.read_bytes() == (out / "samples" / path.name).read_bytes()
    assert len(list((out / "samples").iterdir())) == 3


@pytest.mark.parametrize(
    "name, num_processes, number, code",
    [
        ("unconditional", 1, signal.SIGINT, 130),
        ("unconditional", 2, signal.SIGTERM, 143),
        ("text_to_image", 1, signal.SIGTERM, 143),
        ("flow", 1, signal.SIGTERM, 143),
    ],
)
def test_signal_finishes_the_step_saves_and_prints_how_to_resume(
    tmp_path, name, num_processes, number, code
):
    """One process gets the signal; all of them stop after the same step."""
    trainer = TRAINERS[name]
    flags = [*trainer.prepare(tmp_path), f"{trainer.epochs}=400"]
    flags += [] if trainer.family else ["--dataloader_num_workers=1"]
    pids = start(lambda: trainer.script(*flags), num_processes, tmp_path / "log")
    path = tmp_path / "out/metrics.jsonl"
    wait_until(lambda: path.is_file() and len(path.read_text().splitlines()) > 3)
    os.kill(pids[-1], number)
    said = Path(tmp_path / "log")
    assert set(finish(pids)) == {code}, said.read_text()
    step = find_checkpoints(tmp_path / "out")[-1].name.split("-")[1]
    stopped = rf"Stopped by {signal.Signals(number).name} after step {step} of .*{RESUME[:20]}"
    assert re.search(stopped, said.read_text())


# ------------------------------------------------------------------- steps


def test_two_processes_split_the_rows_and_draw_different_noise(tmp_path, trainer, monkeypatch):
    """The batches record the rows of each process, in steps of 2 x 2 for two epochs.

    One of the images that are read without a cache is broken.
    """
    script, num_rows, rows = trainer.script.module, 6 if trainer.family else 7, []
    flags = trainer.prepare(tmp_path, num_rows)
    if not trainer.family:
        (tmp_path / "images/7.png").write_bytes(b"not an image")
    compute_loss, prepare_batch = script.compute_loss, script.prepare_batch

    def record_rows(*given):
        batch = given[-1]
        values = batch["latents"] if trainer.family else batch["pixel_values"]
        rows[:] = values.double().flatten(1).mean(1).tolist()
        return prepare_batch(*given)

    def record(*given):
        weight = given[-1].tolist()
        kept = [row for row, share in zip(rows, weight, strict=True) if share]
        with (tmp_path / f"rank{os.environ['RANK']}").open("a") as file:
            file.write(json.dumps([kept, weight, torch.initial_seed()]) + "\n")
        return compute_loss(*given)

    monkeypatch.setattr(script, "prepare_batch", record_rows)
    monkeypatch.setattr(script, "compute_loss", record)
    flags += ["--train_batch_size=2", f"{trainer.epochs}=2", "--scale_lr", "--learning_rate=1e-4"]
    said = trainer.script.fork(*flags, "--lr_scheduler=constant", num_processes=2)
    ranks = [
        [json.loads(line) for line in (tmp_path / f"rank{r}").read_text().splitlines()]
        for r in range(2)
    ]
    assert len(ranks[0]) == len(ranks[1]) == 4  # two steps per epoch
    orders = [
        [row for rank in ranks for kept, _, _ in rank[epoch : epoch + 2] for row in kept]
        for epoch in (0, 2)
    ]
    assert all(len(order) == len(set(order)) == num_rows for order in orders)
    assert orders[0] != orders[1]
    seeds = [seed for rank in ranks for _, _, seed in rank]
    assert len(set(seeds)) == len(seeds) == 8
    # Scaled by 2 processes and 2 rows
    assert metrics(tmp_path / "out")[-1]["lr"] == pytest.approx(4e-4)
    if trainer.family:  # steps of 4 rows and of 2, averaged over two processes
        given = [weight for rank in ranks for _, found, _ in rank for weight in found]
        assert sorted(set(given)) == [0.5, 1.0]
    else:  # the broken image is reported once
        assert said.count("images/7.png") == 1
        assert metrics(tmp_path / "out")[-1]["skipped_images"] == 1


def test_training_keeps_dropout_after_sampling(tmp_path, trainer, monkeypatch):
    script, training = trainer.script.module, []
    compute_loss = script.compute_loss

    def record_mode(args, scheduler, objective, models, *others):
        training.append(models[trainer.denoiser].training)
        return compute_loss(args, scheduler, objective, models, *others)

    monkeypatch.setattr(script, "compute_loss", record_mode)
    flags = [*trainer.prepare(tmp_path), "--no-use_ema", "--validation_steps=1"]
    flags += [trainer.samples] if trainer.samples else []
    trainer.script(*flags, "--max_train_steps=3")
    assert training == [True] * 3


# ------------------------------------------------------------------- flags


def test_demo_prints_its_command_and_flags_override_it(tmp_path, trainer, capsys):
    parse_args = trainer.script.module.parse_args
    args = parse_args([trainer.epochs, "3", "--output_dir", str(tmp_path)])
    lines = capsys.readouterr().out.strip().split("\n")
    printed = next(line for line in lines[::-1] if not line.startswith("Flags that do nothing"))
    assert args.num_train_epochs == 3
    assert vars(parse_args(shlex.split(printed)[2:])) == vars(args)
    if trainer.family:
        assert len(args.validation_prompts) == (10 if trainer.denoiser == "transformer" else 8)
    else:
        assert args.train_batch_size == 64
        assert len(datasets.load_dataset(args.train_data_dir, split="train")) == 1797


IMAGES, LATENTS, STREAM = "--train_data_dir=.", "--latents_dir=a", "--streaming --max_train_steps=1"
REFUSED = {  # flags: words of the sentence
    "all": {
        "--train_data_dir=nowhere": "--train_data_dir nowhere is not a folder",
        "--dataset_name=a --train_data_dir=.": "--dataset_name and --train_data_dir can't be",
        f"{IMAGES} --total_batch_size=8 --gradient_accumulation_steps=2": "remove one of them",
        "--xformers": "PyTorch's fused attention is always used",
    },
    "unconditional": {
        "--resolution=0": "argument --resolution: 0 is not between 2 and 16384",
        "--streaming": "--streaming needs --max_train_steps",
        f"{STREAM} --cache_images": "--cache_images",
        f"{STREAM} --holdout=2": "leave --holdout or --streaming out",
        f"{STREAM} --train_batch_size=auto": "give a number",
        "--cache_images --preserve_input_precision": "--cache_images can't be combined",
        "--lr_scheduler=piecewise_constant": "needs --lr_step_rules",
        "--dataloader_num_workers=2147483648": "2147483648 is not between 0 and 1024",
        "--model_config_name_or_path=a --pretrained_model_name_or_path=b": "can't be combined",
    },
    "text_to_image": {
        f"{LATENTS} --max_train_samples=3": "--max_train_samples does nothing with --latents_dir",
        f"{LATENTS} --center_crop": "--center_crop does nothing with",
        f"{LATENTS} --min_size=19": "--min_size does nothing with --latents_dir",
        "--latents_dir=s3://b/c": "give --shards_dir, a local folder for copies of its shards",
        f"{LATENTS} {IMAGES}": "--latents_dir can't be combined",
        f"{LATENTS} --latents_weights 1 2": "for each --latents_dir: 1, not 2",
        "--latents_dir a b ./a --latents_weights 1 2 3": "--latents_dir names a cache twice",
        f"{IMAGES} --latents_weights=1": "needs a value for each --latents_dir: 0, not 1",
        f"{LATENTS} --output_name=a": "--output_name does nothing without --rank",
        f"{LATENTS} --rank=2 --output_name=a --no-output_kohya_format": "without --output_kohya_f",
        f"{LATENTS} --rank=2 --output_name=a/b": "--output_name: a/b is no name for a file in",
        f"{LATENTS} --rank=2 --output_name=.a": "--output_name: .a is no name for a file in",
        f"{LATENTS} --rank=2 --output_name=pytorch_lora_weights": "choose another name",
        f"{LATENTS} --latents_weights=0": "0 is not between 0.001 and",
        f"{LATENTS} --latents_weights=nan": "nan is not between 0.001",
        f"{IMAGES} --caption_dropout=2": "2 is not between 0 and 1",
        f"{IMAGES} --train_batch_size=0": "0 is not between 1 and",
        f"{LATENTS} --lr_scheduler=piecewise_constant": "needs --lr_step_rules",
        f"{LATENTS} --allow_addresses=s3://a": "--allow_addresses does nothing with --latents_dir",
        f"{IMAGES} --cache_latents --prefetch_factor=3": "nothing with --cache_latents: leave it",
        f"{IMAGES} --checkpointing_epochs=1 --checkpointing_steps=9": "_steps does nothing with",
        f"{IMAGES} --optimizer=adafactor --adam_beta1=0.5": "nothing with --optimizer adafactor: l",
    },
    "flow": {
        f"{LATENTS} --output_kohya_format": "there is no flag --output_kohya_format",
        f"{LATENTS} --logit_std=0": "--logit_std",
        f"{LATENTS} --min_timestep=500 --max_timestep=500": "must be below --max_timestep 500",
        f"{LATENTS} --resolution=8 --center_crop": "does nothing with",
    },
}
INCOMPLETE = {  # without --pretrained_model_name_or_path
    "text_to_image": {LATENTS: "--pretrained_model_name_or_path is needed"},
    "flow": {
        LATENTS: "give --pretrained_model_name_or_path, or both --vae_name_or_path and",
        f"{LATENTS} --vae_name_or_path=v --text_encoder_name_or_path=t": "--transformer_config_na",
    },
}


def test_a_flag_that_another_one_replaces_is_printed(capsys):
    replaced = {
        "--num_train_epochs=3": "--max_train_steps=9",
        "--validation_epochs=2": "--validation_steps=3",
        "--gradient_checkpointing": "--checkpoint_blocks=3",
    }
    needed = [*shlex.split(IMAGES), "--pretrained_model_name_or_path=sd", "--holdout=2"]
    parse_args = TRAINERS["text_to_image"].script.module.parse_args
    parse_args([*needed, *replaced, "--logging_dir=a"])
    assert "do nothing" not in capsys.readouterr().out
    parse_args([*needed, *replaced, *replaced.values(), "--logging_dir=a", "--report_to=wandb"])
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("Flags that do nothing in this run: ")
    for flag, other in (replaced | {"--logging_dir": ""}).items():
        name, wins = flag.split("=")[0], other.split("=")[0]
        why = f"with {wins}" if wins else "without --report_to tensorboard|aim|all"
        assert f"{name} ({why})" in line


def list_refused():
    for name, trainer in TRAINERS.items():
        base = " --pretrained_model_name_or_path=sd" if trainer.family else ""
        for flags, words in (REFUSED["all"] | REFUSED[name]).items():
            yield name, flags + base, words
        for flags, words in INCOMPLETE.get(name, {}).items():
            yield name, flags, words


@pytest.mark.parametrize("name, flags, words", [*list_refused()])
def test_bad_arguments_end_in_one_line_and_write_nothing(tmp_path, name, flags, words):
    out = tmp_path / "out"
    error = TRAINERS[name].script.refused(f"--output_dir={out}", *flags.split(), status=2)
    assert words in error.splitlines()[-1] and not out.exists()
