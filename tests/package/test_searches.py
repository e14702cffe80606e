"""Searches for a batch size and a learning rate, with steps whose memory and loss are known."""

import argparse
import json
import math

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from conftest import finish, start
from PIL import Image
from transformers.optimization import Adafactor

import train_unconditional
from diffusion_training.launch import Launch
from diffusion_training.order import Order
from diffusion_training.training.progress import Progress
from diffusion_training.training.tuning import (
    choose_batch_size,
    find_learning_rate,
    largest_batch,
    plan_run,
    scale_learning_rate,
)

START = {"global_step": 0, "data_step": 0, "images_seen": 0}


def make_launch(accelerator=None, accumulation=1):
    return Launch(accelerator or Accelerator(cpu=True), 1, "no", None, accumulation)


@pytest.mark.parametrize("scale_lr, base, images, factor", [
    ("linear", 1, 8, 8), ("linear", 64, 256, 4), ("sqrt", 1, 64, 8), ("sqrt", 64, 256, 2),
    ("auto", 1, 512, 512), (False, 1, 512, 1), (False, 64, 512, 1), ("auto", 64, 2048, 16),
    ("auto", 2048, 512, 0.5),
])  # fmt: skip
def test_scale_lr_scales_the_learning_rate_by_batch_size(scale_lr, base, images, factor, capsys):
    args = argparse.Namespace(scale_lr=scale_lr, base_batch_size=base, learning_rate=1e-4)
    rate = scale_learning_rate(Accelerator(cpu=True), images, args)
    assert rate == pytest.approx(1e-4 * factor)
    said = f"Learning rate ({scale_lr}, {images:,} images per step): 1e-4 x {factor:g} = "
    assert (said in capsys.readouterr().out) == bool(scale_lr)


# ------------------------------------------------------------------- a learning rate


def find(tmp_path, loss_at, steps=200, low=1e-7, high=1.0):
    """The result of a range test with steps of three images whose loss is `loss_at(rate)`."""
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=9.0)
    seen, batches, accelerator = [], (i for i in range(10**9)), Accelerator(cpu=True)

    def take_step(*given):
        *given, step, seed, max_grad_norm = given
        assert given == [accelerator, "objective", {"unet": model}, optimizer, batches]
        assert (seed, max_grad_norm) == (5, 0.5)
        seen.append((optimizer.param_groups[0]["lr"], step.micro_batches, step.number))
        loss, weight = loss_at(seen[-1][0]) if callable(loss_at) else loss_at[len(seen) - 1]
        sums = {"loss": loss * weight, "weight": weight, "grad_norm": 0.0}
        return {name: torch.tensor(float(value)) for name, value in sums.items()}

    args = argparse.Namespace(
        find_lr_min=low, find_lr_max=high, find_lr_steps=steps, output_dir=str(tmp_path),
        seed=5, max_grad_norm=0.5,
    )  # fmt: skip
    progress = Progress(START, 7, 2, 2)  # steps of 2 and 2, of 2 and 1
    said = find_learning_rate(
        accelerator, "objective", take_step, {"unet": model}, optimizer, batches, progress, args
    )
    with pytest.raises(StopIteration):
        next(batches)  # closed, so the loader's processes have ended
    return json.loads((tmp_path / "find_lr.json").read_text()), seen, said


def test_find_lr_raises_the_rate_by_a_constant_factor(tmp_path):
    losses = [(1 + i / 10, 0.5) for i in range(10)]
    found, seen, said = find(tmp_path, losses, steps=10, high=1e-2)
    rates = [10 ** (-7 + 5 * i / 9) for i in range(10)]
    assert found["rates"] == [rate for rate, *_ in seen] == pytest.approx(rates)
    assert [rest for _, *rest in seen] == [[2, i] for i in range(10)]
    assert found["losses"] == pytest.approx([loss for loss, _ in losses])
    average = smoothed = 0.0
    for i, (loss, _) in enumerate(losses):
        average = 0.9 * average + 0.1 * loss
        smoothed = average / (1 - 0.9 ** (i + 1))
        assert found["smoothed"][i] == pytest.approx(smoothed)
    assert found["suggestion"] == pytest.approx(1e-8)  # the lowest is the first
    assert said == (
        f"--learning_rate {found['suggestion']:.2g}: {found['reason']}; see {tmp_path}/find_lr.png"
    )
    assert Image.open(tmp_path / "find_lr.png").size[0] > 300


def test_find_lr_suggests_a_tenth_of_the_best_rate_and_stops_at_divergence(tmp_path):
    found, seen, _ = find(tmp_path, lambda rate: (1 + (math.log10(rate) + 3) ** 2, 8), steps=700)
    assert found["suggestion"] == pytest.approx(1e-4, rel=0.3)
    assert 0.054 < found["rates"][-1] < 0.1 and found["smoothed"][-1] > 4 * min(found["smoothed"])
    assert len(seen) == len(found["rates"]) < 700


def test_find_lr_ignores_broken_images_and_infinite_losses(tmp_path):
    found, _, _ = find(tmp_path, [(1, 1), (9, 0), (1, 1), (math.inf, 1)], steps=10)
    assert len(found["rates"]) == 2
    (tmp_path / "find_lr.json").unlink()
    with pytest.raises(
        SystemExit, match="the loss is not finite from the start: there is no learning rate to find"
    ):
        find(tmp_path, [(math.nan, 1)])
    assert not (tmp_path / "find_lr.json").exists()


# ------------------------------------------------------------------- a batch size


ADAMW = {
    "optimizer": "adamw",
    "learning_rate": 1e-3,
    "adam_weight_decay": 0.01,
    "adam_epsilon": 1e-8,
}
ADAMW |= {"adam_beta1": 0.9, "adam_beta2": 0.999}
STEP = {**ADAMW, "seed": 0, "max_grad_norm": 1.0, "posthoc_ema": None}
STEP |= {"gradient_checkpointing": False, "checkpoint_blocks": None, "keep_attention": False}


class Device:
    """Out of memory at steps of more than `most` images."""

    def __init__(self, most, error=None):
        self.most, self.tried, self.error = most, [], error
        self.error = error or torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 20.00 MiB."
        )
        self.model = torch.nn.Linear(3, 1)

    def take_step(self, accelerator, objective, models, optimizer, batches, step, *more):
        (batch,) = batches
        self.tried.append(len(batch["weight"]))
        assert models["unet"] is not self.model and step.micro_batches == 1
        if len(batch["weight"]) > self.most:
            raise self.error
        models["unet"](batch["pixel_values"]).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        self.optimizer = type(optimizer.optimizer)

    def search(self, limit, **flags):
        batch = {"pixel_values": torch.ones(1, 3), "weight": torch.ones(1), "skipped": []}
        args = argparse.Namespace(use_ema=True, **(STEP | flags))
        models = {"unet": self.model}
        return largest_batch(make_launch(), models, None, self.take_step, batch, limit, args)


@pytest.mark.parametrize("most, limit, tried", [
    (5, 12, [1, 2, 4, 8, 6, 5]), (12, 12, [1, 2, 4, 8, 12]),
    (99, 12, [1, 2, 4, 8, 12]), (1, 12, [1, 2]),
    (99, 1000, [1, 2, 4, 8, 16, 32, 64]),  # a CPU never runs out of memory here
    (7, 7, [1, 2, 4, 7]), (6, 7, [1, 2, 4, 7, 5, 6]),
])  # fmt: skip
def test_largest_batch_doubles_then_bisects_and_trains_nothing(most, limit, tried):
    device, draw = Device(most), torch.get_rng_state()
    before = [parameter.clone() for parameter in device.model.parameters()]
    assert device.search(limit) == min(most, limit, 64)
    sizes = [size for i, size in enumerate(device.tried) if i == 0 or device.tried[i - 1] != size]
    assert sizes == tried and all(
        device.tried.count(size) == (2 if size <= most else 1) for size in tried
    )
    assert all(
        torch.equal(one, other)
        for one, other in zip(before, device.model.parameters(), strict=True)
    )
    assert torch.equal(draw, torch.get_rng_state())
    assert all(parameter.grad is None for parameter in device.model.parameters())


def test_batch_size_search_uses_the_optimizer_of_the_run():
    device = Device(1)
    device.search(2, optimizer="adafactor")
    assert issubclass(device.optimizer, Adafactor)


def test_batch_size_search_stops_at_errors_other_than_out_of_memory():
    with pytest.raises(SystemExit, match="not even one image fits: try --gradient_checkpointing"):
        Device(0).search(12)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        Device(0, RuntimeError("mat1 and mat2 shapes cannot be multiplied")).search(12)


def test_all_processes_take_the_batch_size_of_the_smallest_device(tmp_path):
    def run():
        rank = Accelerator(cpu=True).process_index
        (tmp_path / f"rank{rank}").write_text(str(Device(5 - 2 * rank).search(12)))

    assert finish(start(run, 2, tmp_path / "log")) == [0, 0], (tmp_path / "log").read_text()
    assert [(tmp_path / f"rank{rank}").read_text() for rank in range(2)] == ["3", "3"]


class Rows(torch.utils.data.Dataset):
    sizes = None

    def longest(self, row):
        assert row == 4
        return {"pixel_values": torch.ones(1, 3), "weight": torch.ones(1), "skipped": []}


def choose(train_batch_size, total, accumulation=1, before=None, most=5, num_processes=1):
    """The (batch size, accumulation) chosen for 12 rows, and the device."""
    device, accelerator = Device(most), Accelerator(cpu=True)
    if num_processes > 1:
        accelerator = argparse.Namespace(num_processes=num_processes, print=accelerator.print)
    args = argparse.Namespace(
        train_batch_size=train_batch_size, total_batch_size=total,
        use_ema=True, **STEP,
    )  # fmt: skip
    models, rows = {"unet": device.model}, np.arange(4, 16)
    launch, step = make_launch(accelerator, accumulation), device.take_step
    found = choose_batch_size(launch, models, None, step, Rows(), rows, before or {}, args)
    return found, device


def test_total_batch_size_sets_accumulation_and_a_found_size_is_kept(capsys):
    assert choose(2, None, 3)[0] == (2, 3)
    assert (
        capsys.readouterr().out == "Batch size: 2 x 3 accumulated x 1 process = 6 images per step\n"
    )
    assert choose("auto", None)[0] == (5, 1)
    assert "Batch size: 5 x 1 accumulated x 1 process " in capsys.readouterr().out
    assert choose("auto", None, most=99)[0] == (12, 1)  # not more than there are rows
    assert choose("auto", None, 3)[0] == (5, 3)
    assert choose("auto", 8)[0] == (4, 2)  # 5 fit; 4 is the largest that divides 8
    assert choose(2, 8)[0] == (2, 4) and choose(2, 8, num_processes=2)[0] == (2, 2)
    # a recipe with 2 images at once, and a step of 4, on four GPUs
    assert choose(2, 4, num_processes=4)[0] == (1, 1) and choose(16, 8)[0] == (8, 1)
    found, device = choose("auto", 8, before={"train_batch_size": 2})
    assert found == (2, 4) and device.tried == []  # a resumed run keeps its batch size
    with pytest.raises(SystemExit, match="--total_batch_size 9 is not a multiple of --train"):
        choose(2, 9)
    for size, total, count in ((2, 2, 4), (16, 7, 2)):  # the sentence names no size that none gave
        said = f"--total_batch_size {total} is not a multiple of {count} processes: choose another"
        with pytest.raises(SystemExit, match=said):
            choose(size, total, num_processes=count)
    with pytest.raises(SystemExit, match="multiple of --train_batch_size 2 x 2 processes: choose"):
        choose(2, 6, num_processes=2)
    with pytest.raises(
        SystemExit, match="--total_batch_size sets --gradient_accumulation_steps itself: remove"
    ):
        choose(2, 8, 2)


def plan(*argv, steps=100, seen=0, before=None):
    """Steps of warm-up + 1, or 0 if the run is done, with a million images, one per step."""
    planned = make_plan(*argv, steps=steps, seen=seen, before=before)
    return 0 if planned.is_done else planned.lr_warmup_steps + 1


def make_plan(*argv, steps=100, seen=0, before=None):
    args = train_unconditional.parse_args(
        ["--train_data_dir=.", "--train_batch_size=1", f"--max_train_steps={steps}", *argv]
    )
    state = {"global_step": seen, "data_step": seen, "images_seen": seen, "settings": before or {}}
    rows = range(10**6)
    run = argparse.Namespace(read_state=lambda num_images, args: state)
    order = Order(rows, 0)
    planned = plan_run(make_launch(), run, {}, None, None, None, rows, order, args)
    progress = planned.progress
    assert planned.max_train_steps == steps and planned.learning_rate == args.learning_rate
    assert progress.global_step == seen and progress.num_images == 10**6
    assert planned.settings()["lr_warmup_steps"] == planned.lr_warmup_steps
    return planned


@pytest.mark.parametrize("argv, schedule, warmup", [
    ([], "cosine", 500),
    (["--lr_scheduler=constant"], "constant", 0),
    (["--lr_scheduler=constant", "--lr_warmup_steps=0"], "constant", 0),
    (["--lr_scheduler=constant", "--lr_warmup_steps=7"], "constant_with_warmup", 7),
    (["--lr_scheduler=constant", "--lr_warmup_steps=0.05"], "constant_with_warmup", 5),
    (["--lr_scheduler=constant_with_warmup"], "constant_with_warmup", 500),
    (["--lr_scheduler=piecewise_constant", "--lr_step_rules=1"], "piecewise_constant", 0),
])  # fmt: skip
def test_a_constant_rate_has_a_warm_up_if_it_is_asked_for(argv, schedule, warmup):
    planned = make_plan(*argv)
    assert planned.settings()["lr_scheduler"] == planned.lr_scheduler == schedule
    assert planned.lr_warmup_steps == warmup


def test_lr_warmup_steps_may_be_a_share_that_stays_fixed_on_resume(capsys):
    """1 is one step, also written as 1.0."""
    for flag, steps in (("0.05", 5), ("0.004", 0), ("1", 1), ("1.0", 1), ("0", 0), ("7", 7)):
        assert plan(f"--lr_warmup_steps={flag}") == steps + 1
        said = f"Warm-up: {steps} steps, {flag} of 100\n" if 0 < float(flag) < 1 else "Warm-up"
        assert (said in capsys.readouterr().out) == (said != "Warm-up")
    before = {"lr_warmup_steps": 5}
    assert plan("--lr_warmup_steps=0.05", steps=1000, seen=100, before=before) == 6
    assert "Warm-up: 5 steps, as when the run began" in capsys.readouterr().out
    assert plan("--lr_warmup_steps=9", steps=1000, seen=100, before=before) == 10
    for wrong in ("1.5", "-0.1", "nan"):
        with pytest.raises(SystemExit) as stop:
            plan(f"--lr_warmup_steps={wrong}")
        assert stop.value.code == 2 and f"{wrong} is n" in capsys.readouterr().err


def test_plan_run_warns_of_a_long_warm_up_and_a_finished_run(capsys):
    assert plan("--lr_warmup_steps=11")
    advice = "As a rule it takes a twentieth of a run: --lr_warmup_steps 0.05\n"
    assert f"takes 11 of 100 steps. {advice}" in capsys.readouterr().out
    assert plan("--lr_warmup_steps=101")
    said = f"of 101 steps is longer than the run of 100, so the rate only rises. {advice}"
    assert said in capsys.readouterr().out
    assert plan("--lr_warmup_steps=10", seen=20)
    said = "The warm-up of the learning rate ended at step 10, and this run begins at step 20: its "
    assert said in capsys.readouterr().out
    assert plan("--lr_warmup_steps=10", seen=20, before={"seed": 0})  # the same run goes on
    assert "warm-up" not in capsys.readouterr().out
    assert plan("--lr_warmup_steps=10") and plan("--lr_scheduler=constant")
    said = "Batch size: 1 x 1 accumulated x 1 process = 1 image per step\n"
    said += "Epoch: 1,000,000 images, 1,000,000 steps; the run: 100 steps, 0.0001 epochs\n"
    assert capsys.readouterr().out == 2 * said
    with pytest.raises(
        SystemExit, match="polynomial ends at a learning rate of 1e-7: begin above it, not at 1e-08"
    ):
        plan("--lr_scheduler=polynomial", "--learning_rate=1e-8")
    assert (
        not plan(seen=101)
        and "beyond step 100: there is nothing left to train" in capsys.readouterr().out
    )
    assert plan("--find_lr", seen=101)  # also after the end of the run
