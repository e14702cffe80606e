"""Searches for a learning rate and a batch size, in runs of the trainers."""

import json

import pytest
import torch
from conftest import (
    MODELS,
    Script,
    assert_same_weights,
    list_unconditional_flags,
    make_captioned,
    make_tiny_unet,
    metrics,
)

import train_unconditional as script

pytestmark = pytest.mark.usefixtures("without_figures")
train = Script("train_unconditional")


@pytest.fixture
def flags(tmp_path):
    return list_unconditional_flags(
        tmp_path,
        12,
        *"--train_batch_size=2 --max_train_steps=2 --learning_rate=1e-4".split(),
        *"--lr_warmup_steps=0 --lr_scheduler=constant".split(),
    )


def test_scale_lr_prints_and_uses_the_scaled_learning_rate(tmp_path, flags, capsys):
    argv = ["--scale_lr", "--gradient_accumulation_steps=4"]
    train(*flags, *argv)
    assert "Learning rate (linear, 8 images per step): 1e-4 x 8 = 8e-4\n" in capsys.readouterr().out
    assert {record["lr"] for record in metrics(tmp_path / "out")} == {8e-4}
    # The command's file contains the given rate, so that it is not scaled twice.
    again = script.parse_args([f"@{tmp_path / 'out/run.args'}"])
    assert (again.learning_rate, again.scale_lr, again.base_batch_size) == (1e-4, "linear", 1)


def tree(folder):
    files = [path for path in folder.rglob("*") if path.is_file() and "find_lr" not in path.name]
    return {path: path.read_bytes() for path in files}


def test_find_lr_leaves_the_run_unchanged(tmp_path, flags):
    """Before a run on two processes, and in the middle of a run: the training stays the same."""
    test = [
        "--find_lr",
        "--find_lr_steps=12",
        "--gradient_accumulation_steps=2",
        "--train_batch_size=3",
    ]
    train.fork(*flags, *test, num_processes=2)
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        ".lock",
        "find_lr.json",
        "find_lr.png",
    }
    train(*flags)
    before = tree(tmp_path / "out")
    train(*flags, *test, "--resume_from_checkpoint=latest", "--max_train_steps=3", "--push_to_hub")
    assert tree(tmp_path / "out") == before
    train(*flags, "--max_train_steps=3", "--resume_from_checkpoint=latest")
    train(*flags, "--max_train_steps=3", f"--output_dir={tmp_path / 'other'}")
    assert_same_weights(tmp_path / "out/unet", tmp_path / "other/unet")


def test_find_lr_trains_at_growing_learning_rates(tmp_path, flags, monkeypatch, capsys):
    """The test uses the real optimizer and real steps, and its weights move."""
    seen, train_step = [], script.train_step

    def record(accelerator, objective, models, optimizer, *rest):
        norm = sum(
            weight.detach().double().square().sum() for weight in models["unet"].parameters()
        ).item()
        sums = train_step(accelerator, objective, models, optimizer, *rest)
        mean_loss = (sums["loss"] / sums["weight"]).item()
        seen.append((optimizer.param_groups[0]["lr"], mean_loss, norm))
        return sums

    monkeypatch.setattr(script, "train_step", record)
    train(*flags, "--find_lr", "--find_lr_steps=10", "--find_lr_max=1e-2", "--train_batch_size=5")
    found = json.loads((tmp_path / "out/find_lr.json").read_text())
    rates, losses, norms = map(list, zip(*seen, strict=True))
    assert found["rates"] == rates == pytest.approx([10 ** (-7 + 5 * i / 9) for i in range(10)])
    assert (
        found["losses"] == pytest.approx(losses) and norms[-1] != norms[0] and len(set(norms)) == 10
    )
    assert (
        f"--learning_rate {found['suggestion']:.2g}: {found['reason']}" in capsys.readouterr().out
    )


class FullMemory:
    """A device that runs out of memory in a step of more than `most` images.

    `trials` are the batch sizes that were tried.
    """

    def __init__(self, monkeypatch, most, script=script):
        self.trials, self.compute_loss, self.most = [], script.compute_loss, most
        monkeypatch.setattr(script, "compute_loss", self)

    def __call__(self, args, noise_scheduler, objective, models, prepared, weight):
        count = len(prepared.clean)
        self.trials.append(count)
        if count > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        return self.compute_loss(args, noise_scheduler, objective, models, prepared, weight)


def settings(folder):
    (path,) = folder.glob("checkpoint-*/trainer_state.json")
    return json.loads(path.read_text())["settings"]


def test_auto_batch_size_trains_like_the_same_size_given(tmp_path, flags, monkeypatch, capsys):
    """The trials do not change the training. Here in fp32, with EMA, on one process."""
    memory = FullMemory(monkeypatch, 5)
    train(*flags, "--train_batch_size=auto", "--max_train_steps=1")
    sizes = [size for i, size in enumerate(memory.trials) if i == 0 or memory.trials[i - 1] != size]
    assert sizes == [1, 2, 4, 8, 6, 5] and settings(tmp_path / "out")["train_batch_size"] == 5
    assert "Batch size: 5 x 1 accumulated x 1 process " in capsys.readouterr().out
    train(
        *flags, "--train_batch_size=5", "--max_train_steps=1", f"--output_dir={tmp_path / 'given'}"
    )
    assert_same_weights(tmp_path / "out/unet", tmp_path / "given/unet")


def test_total_batch_size_sets_accumulation_and_resume_keeps_auto_size(
    tmp_path, flags, monkeypatch
):
    memory = FullMemory(monkeypatch, 5)
    auto = [*flags, "--train_batch_size=auto", "--total_batch_size=8"]
    train(*auto)
    found = settings(tmp_path / "out")
    assert (found["train_batch_size"], found["gradient_accumulation_steps"]) == (4, 2)
    memory.trials.clear()
    train(
        *auto,
        "--max_train_steps=4",
        "--resume_from_checkpoint=latest",
        f"@{tmp_path / 'out/run.args'}",
    )
    train(*auto, "--max_train_steps=4", "--resume_from_checkpoint=latest")
    # 12 images: one step of 8 in two micro-batches, and one step of the other 4
    assert memory.trials == [4, 4, 4]
    assert [record["step"] for record in metrics(tmp_path / "out")] == [1, 2, 3, 4]


def test_auto_batch_size_works_with_captions(tmp_path, monkeypatch):
    make_captioned(tmp_path / "images", 12)
    make_tiny_unet().save_config(tmp_path / "unet")
    train = Script("train_text_to_image")
    memory = FullMemory(monkeypatch, 3, train.module)
    train(
        *train.flags(
            tmp_path / "out",
            f"--pretrained_model_name_or_path={MODELS}",
            f"--train_data_dir={tmp_path / 'images'}",
            f"--unet_config_name_or_path={tmp_path / 'unet'}",
            *"--resolution=16 --dataloader_num_workers=0 --train_batch_size=auto".split(),
            "--max_train_steps=1",
        )
    )
    assert settings(tmp_path / "out")["train_batch_size"] == 3 and memory.trials[-1] == 3
