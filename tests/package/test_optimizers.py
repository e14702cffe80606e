"""Optimizers: each resumes from a checkpoint bit for bit, with the resumed run's learning rate."""

import argparse
import copy
import io

import pytest
import torch
from conftest import needs

from diffusion_training.training import optimizers
from diffusion_training.training.optimizers import load_optimizer, make_lr_scheduler, make_optimizer

KINDS = ["adamw", pytest.param("adamw8bit", marks=needs("bitsandbytes")), "adafactor"]


def make(kind, seed=0, scaler=None, **flags):
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
    return models, make_optimizer(models, scaler, args)


def train(models, optimizer, steps, scale=1.0):
    for step in steps:
        torch.manual_seed(step)
        for parameter in models["unet"].parameters():
            grad = scale * torch.randn_like(parameter)
            parameter.grad = grad if parameter.requires_grad else None
        optimizer.step()
        optimizer.zero_grad()


def copy_state(optimizer, other):
    """Load the state into `other` through a file, without unpickling."""
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    load_optimizer(other, torch.load(file, weights_only=True))


def tensors(optimizer):
    return [
        value
        for state in optimizer.state.values()
        for value in state.values()
        if torch.is_tensor(value)
    ]


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


@pytest.mark.parametrize("part", [1, 5000, optimizers.PART])
@pytest.mark.parametrize("scale", [1.0, 1e-7])
def test_adafactor_computes_like_torchs_and_resumes_its_state(monkeypatch, part, scale):
    """Also if the weights are in several parts, or one had no gradient in some step.

    scale: of the gradients. Small ones are below the smallest variance.
    """
    monkeypatch.setattr(optimizers, "PART", part)
    models, _ = make("adafactor")
    models["unet"].append(torch.nn.Conv2d(3, 8, 3))
    with torch.no_grad():
        models["unet"][0].bias.mul_(1e-4)  # below the smallest norm
    others = copy.deepcopy(models)
    ours = optimizers.Adafactor(trained(models), lr=1e-2, weight_decay=0.1)
    theirs = torch.optim.Adafactor(trained(others), lr=1e-2, weight_decay=0.1)
    for optimizer, each in ((ours, models), (theirs, others)):
        train(each, optimizer, range(4), scale)
        each["unet"][1].requires_grad_(False)  # no gradient in this step
        train(each, optimizer, range(4, 5), scale)
        each["unet"][1].requires_grad_(True)
    for step in range(5, 9):
        if step == 7:  # each continues from the other's state
            states = [copy.deepcopy(optimizer.state_dict()) for optimizer in (ours, theirs)]
            ours.load_state_dict(states[1])
            theirs.load_state_dict(states[0])
        train(models, ours, [step], scale)
        train(others, theirs, [step], scale)
        for weight, expected in zip(trained(models), trained(others), strict=True):
            torch.testing.assert_close(weight, expected, rtol=1e-6, atol=1e-7)
    for one, other in zip(trained(models), trained(others), strict=True):
        state, expected = ours.state[one], theirs.state[other]
        assert state.keys() == expected.keys() and state["step"] == expected["step"]
        for name, value in state.items():
            torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=0)


def trained(models):
    return [weight for weight in models["unet"].parameters() if weight.requires_grad]


def test_adamw_is_not_fused_with_a_scaler_even_if_saved_so():
    models, optimizer = make("adamw")
    train(models, optimizer, range(1))
    _, other = make("adamw", scaler="one")
    copy_state(optimizer, other)
    assert optimizer.param_groups[0]["fused"] and not other.param_groups[0]["fused"]


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
    optimizer, weight = make_optimizer(models, None, flags), models["unet"][0].weight
    assert weight.is_contiguous() == (kind == "adamw8bit")
    before = weight.stride()
    train(models, optimizer, range(2))
    assert weight.stride() == before
    other = {"unet": torch.nn.Sequential(torch.nn.Conv2d(70, 70, 3), *models["unet"][1:])}
    copied = make_optimizer(other, None, flags)
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
