"""`Prodigy` computes what its paper and its authors' package do, and goes on from its state."""

import copy
import math

import pytest
import torch

from diffusion_training.training.step.optimizers import load_optimizer
from diffusion_training.training.step.prodigy import Prodigy

OPTIONS = {"lr": 1.0, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}


def take_reference_steps(weights, gradients, lr, betas, eps, weight_decay):
    """Algorithm 4 of the paper as prodigyopt 1.1.2 has it; returns (the weights, each d).

    With its options decouple, use_bias_correction and safeguard_warmup.
    """
    weights = [weight.clone() for weight in weights]
    start = [weight.clone() for weight in weights]
    mean, square, s = ([torch.zeros_like(weight) for weight in weights] for _ in range(3))
    d = d0 = 1e-6
    numerator = 0.0
    found = []
    beta1, beta2 = betas
    beta3 = math.sqrt(beta2)
    for k, of_step in enumerate(gradients, 1):
        rate = d * lr * math.sqrt(1 - beta2**k) / (1 - beta1**k)
        numerator *= beta3
        denominator = 0.0
        for i, gradient in enumerate(of_step):
            distance = (gradient * (start[i] - weights[i])).sum().item()
            numerator += d / d0 * rate * distance
            mean[i] = beta1 * mean[i] + (1 - beta1) * d * gradient
            square[i] = beta2 * square[i] + (1 - beta2) * d * d * gradient**2
            s[i] = beta3 * s[i] + d / d0 * d * gradient
            denominator += s[i].abs().sum().item()
        if denominator:
            d = max(d, numerator / denominator)
        for i, weight in enumerate(weights):
            weight *= 1 - weight_decay * rate
            weight -= rate * mean[i] / (square[i].sqrt() + d * eps)
        found.append(d)
    return weights, found


def make_problem(steps=60):
    """In float64, since the rounding of float32 grows from step to step, in the package as well."""
    torch.manual_seed(0)
    weights = [torch.randn(5, 3).double(), torch.zeros(4).double()]
    goal = [torch.randn_like(weight) for weight in weights]
    return weights, goal, [[torch.randn_like(weight) for weight in weights] for _ in range(steps)]


def test_prodigy_computes_what_the_authors_package_does():
    weights, goal, noise = make_problem()
    trained = [weight.clone().requires_grad_() for weight in weights]
    optimizer = Prodigy(trained, **OPTIONS)
    gradients, found = [], []
    for of_step in noise:
        for weight, end, x in zip(trained, goal, of_step, strict=True):
            weight.grad = weight.detach() - end + 0.1 * x
        gradients.append([weight.grad.clone() for weight in trained])
        optimizer.step()
        found.append(optimizer.state[trained[0]]["d"].item())
    expected, expected_d = take_reference_steps(weights, gradients, **OPTIONS)
    assert expected_d[-1] > 1e3 * expected_d[0]  # it has found a rate
    assert found == pytest.approx(expected_d, rel=1e-8)
    for weight, value in zip(trained, expected, strict=True):
        torch.testing.assert_close(weight.detach(), value, rtol=1e-8, atol=1e-8)


def test_prodigy_goes_on_from_its_state_with_the_same_bits():
    weights, goal, noise = make_problem(8)

    def train(trained, optimizer, of_steps):
        for of_step in of_steps:
            for weight, end, x in zip(trained, goal, of_step, strict=True):
                weight.grad = weight.detach() - end + x
            optimizer.step()

    one = [weight.clone().requires_grad_() for weight in weights]
    whole = Prodigy(one, **OPTIONS)
    train(one, whole, noise[:4])
    other = [weight.detach().clone().requires_grad_() for weight in one]
    rest = Prodigy(other, **OPTIONS)
    rest.load_state_dict(copy.deepcopy(whole.state_dict()))
    train(one, whole, noise[4:])
    train(other, rest, noise[4:])
    assert all(torch.equal(*pair) for pair in zip(one, other, strict=True))
    assert torch.equal(whole.state[one[0]]["d"], rest.state[other[0]]["d"])


def test_a_resumed_rate_does_not_change_what_prodigy_has_found(tmp_path):
    weights, _, _ = make_problem(0)
    trained = [weight.clone().requires_grad_() for weight in weights]
    before, now = (Prodigy(trained, **OPTIONS | {"lr": lr}) for lr in (1.0, 0.5))
    for weight in trained:
        weight.grad = torch.ones_like(weight)
    for _ in range(40):
        before.step()
    load_optimizer(now, before.state_dict())
    assert now.param_groups[0]["lr"] == 0.5 and now.param_groups[0]["k"] == 40
    found = [optimizer.state[trained[0]]["d"] for optimizer in (before, now)]
    assert torch.equal(*found) and found[0] > 1e-6


def test_prodigy_without_gradients_changes_nothing():
    weights, _, _ = make_problem(0)
    trained = [weight.clone().requires_grad_() for weight in weights]
    optimizer = Prodigy(trained, **OPTIONS | {"weight_decay": 0})
    for weight in trained:
        weight.grad = torch.zeros_like(weight)
    optimizer.step()
    assert all(torch.equal(*pair) for pair in zip(trained, weights, strict=True))
    assert optimizer.state[trained[0]]["d"].item() == pytest.approx(1e-6)
