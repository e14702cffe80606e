"""--full_bf16: weights in bfloat16, each updated in the backward pass, by Adafactor.

A gradient is freed as soon as its weight has been updated, so that one is there at a time.
"""

import math
import weakref
from functools import partial
from inspect import unwrap
from typing import Any

import torch
from transformers.optimization import Adafactor

from diffusion_training.batches import Models
from diffusion_training.draws import step_seed


class FullBf16Adafactor(Adafactor):
    """Adafactor that updates a weight when its gradient is complete, by a hook.

    An update is computed in float32 and added to the weight, also in float32. The sum is rounded to
    bfloat16 up or down at random, so that its mean is exact: rounded to the nearest, updates below
    1/512 of a weight would be lost. The random bits have the key (seed, update, name of the
    weight). Weights that diffusers keeps in float32 are not rounded.

    Its state is Adafactor's.

    grad_norm: of the last step, before updates are clipped (by `clip_threshold`, each by itself).
    """

    def __init__(self, models: Models, seed: int, **options: Any) -> None:
        named = {
            f"{model}.{name}": weight
            for model, module in models.items()
            for name, weight in module.named_parameters()
            if weight.requires_grad
        }
        super().__init__(named.values(), **options)
        self.seed = seed
        device = next(iter(named.values())).device
        self.generator = torch.Generator(device)
        self.squares = torch.zeros((), device=device)  # of all gradients since the last step
        self.grad_norm = self.squares
        update = weakref.WeakMethod(self.update)  # else torch would never free the weights
        for name, weight in named.items():
            self.state[weight] = {}  # else their order would be that of the updates
            weight.register_post_accumulate_grad_hook(partial(call, update, name))

    @torch.no_grad()
    def update(self, name: str, weight: torch.Tensor) -> None:
        """Update one weight, and free its gradient."""
        exact = weight.detach().float()  # of a weight in float32: the same memory
        exact.grad = weight.grad.float()
        weight.grad = None
        self.squares += exact.grad.square().sum()
        (group,) = self.param_groups
        weights = group["params"]
        group["params"] = [exact]
        self.state[exact] = self.state[weight]
        unwrap(Adafactor.step)(self)  # without torch's hooks, which are for whole steps
        del self.state[exact]
        group["params"] = weights
        exact.grad = None
        if weight.dtype == torch.bfloat16:
            key = step_seed(f"rounding {name}", self.seed, self.state[weight]["step"])
            weight.copy_(round_randomly(exact, self.generator.manual_seed(key)))

    def step(self, closure: Any = None) -> None:
        """End a step, whose backward pass has updated the weights."""
        self.grad_norm = self.squares.sqrt()
        self.squares.zero_()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        # torch rounds the moments to the bfloat16 of the weights
        for number, weight in enumerate(self.param_groups[0]["params"]):
            for name, value in state_dict["state"].get(number, {}).items():
                if torch.is_tensor(value):
                    self.state[weight][name] = value.to(weight.device)


def call(update: Any, name: str, weight: torch.Tensor) -> None:
    """The hook of a weight. update: a weak reference to the optimizer's method."""
    update()(name, weight)


def round_randomly(exact: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Round float32 numbers to those of bfloat16, up or down, in place; the mean is the number.

    bfloat16 has the first 16 bits of a float32. A random number is added to the other 16, which are
    then dropped: it carries into the first ones with the probability that the others stand for.
    """
    noise = torch.randint(
        2**16, exact.shape, generator=generator, dtype=torch.int32, device=exact.device
    )
    # the bits of other NaNs, as those that GPUs compute, would overflow
    bits = exact.masked_fill_(exact.isnan(), math.nan).view(torch.int32)
    bits.add_(noise).bitwise_and_(-(2**16))
    return exact
