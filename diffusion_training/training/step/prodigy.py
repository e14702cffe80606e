"""Prodigy (arXiv:2306.06101): AdamW that finds its rate, and never waits for the device."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch


class Prodigy(torch.optim.Optimizer):
    """Prodigy with the safeguard for a warm-up and Adam's bias correction, as diffusers uses it.

    The rate is lr x d. The estimate d only grows, from 1e-6: it compares how far the weights have
    moved along the gradients with the size of these gradients. It is a tensor beside the moments,
    so no step waits for it.
    """

    def __init__(
        self,
        parameters: Iterable[torch.Tensor],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
    ) -> None:
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(parameters, options | {"d0": 1e-6, "k": 0})

    @torch.no_grad()
    def step(self, closure: Callable | None = None) -> None:
        (group,) = self.param_groups
        if not group["lr"]:
            return
        weights = [weight for weight in group["params"] if weight.grad is not None]
        gradients = [weight.grad for weight in weights]
        for weight in weights:
            if not self.state[weight]:
                zeros = {name: torch.zeros_like(weight) for name in ("exp_avg", "exp_avg_sq", "s")}
                self.state[weight] |= zeros | {"p0": weight.clone()}
        states = [self.state[weight] for weight in weights]
        shared: dict[str, Any] = self.state[group["params"][0]]
        d0 = group["d0"]
        if "d" not in shared:
            shared["d"] = weights[0].new_full((), d0)
            shared["d_numerator"] = torch.zeros_like(shared["d"])
        d = shared["d"]
        exp_avg, exp_avg_sq, s, p0 = (
            [state[name] for state in states] for name in ("exp_avg", "exp_avg_sq", "s", "p0")
        )
        beta1, beta2 = group["betas"]
        beta3 = math.sqrt(beta2)
        steps = group["k"] + 1
        lr = group["lr"] * math.sqrt(1 - beta2**steps) / (1 - beta1**steps)

        moved = torch._foreach_sub(p0, weights)
        dots = [torch.dot(g.flatten(), x.flatten()) for g, x in zip(gradients, moved, strict=True)]
        shared["d_numerator"] *= beta3
        shared["d_numerator"] += d / d0 * d * lr * torch.stack(dots).sum()
        scaled = torch._foreach_mul(gradients, d)
        torch._foreach_lerp_(exp_avg, scaled, 1 - beta1)
        torch._foreach_mul_(exp_avg_sq, beta2)
        torch._foreach_addcmul_(exp_avg_sq, scaled, scaled, 1 - beta2)
        torch._foreach_mul_(s, beta3)
        torch._foreach_add_(s, torch._foreach_mul(scaled, d / d0))
        denominator = torch.stack(torch._foreach_norm(s, 1)).sum()
        # `fmax`, because it is 0 / 0 as long as all gradients were 0
        shared["d"] = torch.fmax(d, shared["d_numerator"] / denominator)

        torch._foreach_mul_(weights, 1 - group["weight_decay"] * lr * d)
        roots = torch._foreach_sqrt(exp_avg_sq)
        # both sides of the quotient by the new d: epsilon times a tensor would wait for the device
        torch._foreach_mul_(roots, 1 / shared["d"])
        torch._foreach_add_(roots, group["eps"])
        updates = torch._foreach_div(exp_avg, roots)
        torch._foreach_mul_(updates, -lr * d / shared["d"])
        torch._foreach_add_(weights, updates)
        group["k"] = steps
