"""--preserve_prior: a loss that keeps a LoRA from changing what it is not taught.

Other programs call it differential output preservation. It takes the place of class images.
"""

import contextlib
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from accelerate import Accelerator

from diffusion_training.batches import Models, Objective, Prepared
from diffusion_training.data.captioned_data import Data
from diffusion_training.data.prompts import PromptEmbeds


@dataclass(frozen=True)
class Prior:
    """The loss of --preserve_prior: how far the LoRA changes predictions for --class_prompt."""

    prompts: PromptEmbeds
    weight: float
    every: int  # steps

    def is_due(self, step: int) -> bool:
        """Whether a step adds this loss. step: its number."""
        return step % self.every == 0

    def backward(
        self,
        accelerator: Accelerator,
        objective: Objective,
        models: Models,
        prepared: Prepared,
        weight: torch.Tensor,
    ) -> torch.Tensor:
        """Add the gradients of this loss for a micro-batch, in a backward pass of its own.

        So the activations of two losses are never in memory together. DDP exchanges the gradients
        with those of the loss of `compute_loss`, which must follow. Nothing waits for the device.

        models: as wrapped by Accelerate. weight: see `compute_loss`.

        Returns the sum over images of weight * mean squared difference of the two predictions.
        """
        noisy, times, condition = capture_inputs(objective, models, prepared, weight)
        # on the CPU, where the prompts are
        numbers = torch.randint(len(self.prompts.prompts), [len(noisy)], device="cpu").tolist()
        condition = condition | self.prompts.choose_condition(numbers, noisy.device, condition)
        with contextlib.ExitStack() as stack:
            for model in models.values():
                stack.enter_context(accelerator.no_sync(model))
                model.eval()  # dropout would count as a change
            with torch.no_grad(), without_adapters(models):
                base = objective.predict(models, noisy, times, condition)
            change = objective.predict(models, noisy, times, condition) - base
            loss = (weight * change.square().mean(dim=(1, 2, 3))).sum()
            accelerator.backward(self.weight * self.every * loss)
        for model in models.values():
            model.train()
        return loss.detach()


def make_prior(data: Data, args: Namespace) -> Prior | None:
    """The loss of --preserve_prior; None without the flag."""
    if data.class_prompts is None:
        return None
    return Prior(data.class_prompts, args.prior_loss_weight, args.prior_every)


def capture_inputs(
    objective: Objective, models: Models, prepared: Prepared, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """The (noisy images, times, condition) that `compute_loss` passes to the model, drawn anew."""
    found: list[Any] = []

    def note(models: Models, noisy: torch.Tensor, *others: Any) -> torch.Tensor:
        found.append((noisy, *others))
        return torch.zeros_like(noisy)

    with torch.no_grad():
        replace(objective, predict=note).loss(models, prepared, weight)
    return found[0]


@contextlib.contextmanager
def without_adapters(models: Models) -> Iterator[None]:
    """Let models with a LoRA predict what their bases predict.

    peft's own switch, `enable_adapters`, would also unfreeze weights that `freeze_unreached` has
    frozen. So this sets the attribute that the layers read.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer  # takes a second

    modules = [module for model in models.values() for module in model.modules()]
    layers = [module for module in modules if isinstance(module, BaseTunerLayer)]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False
