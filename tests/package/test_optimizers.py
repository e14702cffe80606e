"""Optimizers: each resumes from a checkpoint bit for bit, with the resumed run's learning rate."""

import argparse
import itertools

import pytest
import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from conftest import copy_state, needs, reset

from diffusion_training.training.step.optimizers import make_lr_scheduler, make_optimizer

KINDS = ["adamw", pytest.param("adamw8bit", marks=needs("bitsandbytes")), "adafactor"]


def make(kind, seed=0, **flags):
    """Return ({name: model}, its optimizer).

    bitsandbytes keeps 8-bit moments for the weight of 4,900 numbers, full ones for small weights.
    """
    torch.manual_seed(seed)
    models = {"unet": torch.nn.Sequential(torch.nn.Conv2d(70, 70, 1), torch.nn.Linear(5, 3))}
    models["unet"].append(torch.nn.Linear(9, 9).requires_grad_(False))
    flags = {
        "learning_rate": 1e-2,
        "adam_beta1": 0.9,
        "adam_beta2": 0.99,
        "adam_epsilon": 1e-7,
    } | flags
    args = argparse.Namespace(optimizer=kind, adam_weight_decay=0.1, **flags)
    return models, make_optimizer(models, args)


def train(models, optimizer, steps, scale=1.0):
    for step in steps:
        torch.manual_seed(step)
        for parameter in models["unet"].parameters():
            grad = scale * torch.randn_like(parameter)
            parameter.grad = grad if parameter.requires_grad else None
        optimizer.step()
        optimizer.zero_grad()


def tensors(optimizer):
    return [
        value
        for state in optimizer.state.values()
        for value in state.values()
        if torch.is_tensor(value)
    ]


def test_muon_needs_no_weights_besides_matrices_of_blocks():
    """A LoRA of attention has no others."""
    lora = torch.nn.ModuleDict({"transformer_blocks": torch.nn.ModuleList([torch.nn.Linear(5, 3)])})
    lora["transformer_blocks"][0].bias.requires_grad_(False)
    weight = lora["transformer_blocks"][0].weight
    before = weight.clone()
    flags = {"learning_rate": 1e-2, "adam_beta1": 0.9, "adam_beta2": 0.99, "adam_epsilon": 1e-7}
    args = argparse.Namespace(optimizer="muon", adam_weight_decay=0.1, **flags)
    optimizer = make_optimizer({"unet": lora}, args)
    weight.grad = torch.randn_like(weight)
    optimizer.step()
    assert (weight - before).abs().max() > 1e-3
    assert len(optimizer.state_dict()["param_groups"]) == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_optimizer_continues_bit_for_bit(kind):
    models, optimizer = make(kind)
    train(models, optimizer, range(3))
    others, other = make(kind, seed=1)
    others["unet"].load_state_dict(models["unet"].state_dict())
    copy_state(optimizer, other)
    for one, copied in ((models, optimizer), (others, other)):
        train(one, copied, range(3, 6))
    pairs = zip(models["unet"].parameters(), others["unet"].parameters(), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)
    assert all(torch.equal(*pair) for pair in zip(tensors(optimizer), tensors(other), strict=True))
    assert (torch.uint8 in {value.dtype for value in tensors(other)}) == (kind == "adamw8bit")
    assert len(optimizer.state) == 4  # nothing for frozen weights
    fresh = [weight for weight in make(kind)[0]["unet"].parameters() if weight.requires_grad]
    assert not any(
        torch.equal(weight, moved) for weight, moved in zip(fresh, optimizer.state, strict=True)
    )


@pytest.mark.parametrize("kind", KINDS)
def test_load_optimizer_takes_this_runs_flags_and_the_saved_state(kind):
    models, optimizer = make(kind)
    train(models, optimizer, range(1))
    optimizer.param_groups[0]["d_of_prodigy"] = 0.7  # an optimizer's own value
    flags = {"learning_rate": 3e-4, "adam_beta1": 0.5, "adam_epsilon": 1e-3}
    _, other = make(kind, **flags)
    copy_state(optimizer, other)
    (group,) = other.param_groups
    assert group["lr"] == 3e-4 and group["weight_decay"] == 0.1
    assert group["d_of_prodigy"] == 0.7
    if kind != "adafactor":
        assert tuple(group["betas"]) == (0.5, 0.99) and group["eps"] == 1e-3


def test_updates_of_adafactor_are_as_large_as_the_learning_rate():
    """Whatever the size of a weight and of its gradient: the rate is that of --learning_rate."""
    models, optimizer = make("adafactor", learning_rate=1e-3)
    weight, bias = models["unet"][0].weight, models["unet"][0].bias
    with torch.no_grad():
        weight.mul_(100)
        bias.zero_()
    before = weight.clone()
    train(models, optimizer, range(1), scale=1e-4)
    moved = weight - before * (1 - 1e-3 * 0.1)  # less what --adam_weight_decay takes
    assert (moved.norm() / weight.numel() ** 0.5).item() == pytest.approx(1e-3, rel=0.02)
    torch.testing.assert_close(bias.abs(), torch.full_like(bias, 1e-3))


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_that_overflows_in_fp16_is_left_out_and_noticed(monkeypatch, kind):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    reset()
    models, optimizer = make(kind)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    Accelerator()  # whose state the wrapped optimizer reads
    wrapped = AcceleratedOptimizer(optimizer, scaler=scaler)
    weight = models["unet"][0].weight
    before, skipped = [weight.clone()], []
    for factor in (1.0, float("inf"), 1.0):
        scaler.scale(factor * weight.square().sum()).backward()
        wrapped.step()
        wrapped.zero_grad()
        before.append(weight.clone())
        skipped.append(wrapped.step_was_skipped)
    assert skipped == [False, True, False] and scaler.get_scale() == 4.0
    equal = [torch.equal(one, other) for one, other in itertools.pairwise(before)]
    assert equal == skipped
    assert kind != "adamw" or optimizer.param_groups[0]["fused"]
    reset()


@pytest.mark.parametrize("kind", KINDS)
def test_moments_get_the_layout_of_their_parameters(kind):
    """Moments saved as channels_last (on CUDA) load into a contiguous model.

    bitsandbytes makes weights contiguous at its first step, so they are so from the start.
    """
    models, _ = make(kind)
    models["unet"][0] = torch.nn.Conv2d(70, 70, 3).to(memory_format=torch.channels_last)
    flags = argparse.Namespace(
        optimizer=kind, adam_weight_decay=0.1, learning_rate=1e-2, adam_beta1=0.9
    )
    flags.adam_beta2, flags.adam_epsilon = 0.99, 1e-7
    optimizer, weight = make_optimizer(models, flags), models["unet"][0].weight
    assert weight.is_contiguous() == (kind == "adamw8bit")
    before = weight.stride()
    train(models, optimizer, range(2))
    assert weight.stride() == before
    other = {"unet": torch.nn.Sequential(torch.nn.Conv2d(70, 70, 3), *models["unet"][1:])}
    copied = make_optimizer(other, flags)
    copy_state(optimizer, copied)
    for name, value in copied.state[other["unet"][0].weight].items():
        if torch.is_tensor(value) and value.shape == weight.shape:
            assert value.is_contiguous() and torch.equal(value, optimizer.state[weight][name])


def test_load_optimizer_refuses_another_model():
    _, optimizer = make("adamw")
    other = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))])
    with pytest.raises(ValueError):
        copy_state(optimizer, other)


def test_any_torch_optimizer_works_with_the_lr_schedule_and_resumes():
    args = argparse.Namespace(
        lr_scheduler="linear", lr_warmup_steps=0, max_train_steps=9, lr_step_rules=None
    )
    args.lr_num_cycles, args.lr_power = 1, 1.0
    weight, rates = torch.nn.Parameter(torch.ones(2)), []
    optimizer = torch.optim.SGD([weight], lr=1.0)
    lr_scheduler = make_lr_scheduler(optimizer, 0, args)
    for _ in range(4):
        rates += lr_scheduler.get_last_lr()
        optimizer.step()
        lr_scheduler.step()
    assert rates == pytest.approx([0.9, 0.8, 0.7, 0.6])
    other = torch.optim.SGD([weight], lr=2.0)
    copy_state(optimizer, other)
    assert make_lr_scheduler(other, 2, args).get_last_lr() == pytest.approx([1.4])
