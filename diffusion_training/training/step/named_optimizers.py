"""--optimizer module.Class: any optimizer of torch's form, tried before a run begins with it."""

import ast
import importlib
import io
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch

from diffusion_training.errors.sentences import explained, fail


def make_named_optimizer(parameters: list[torch.Tensor], args: Namespace) -> torch.optim.Optimizer:
    """Make the optimizer that --optimizer names in Python, with --learning_rate.

    --optimizer_args are its other arguments. It is tried on a small weight first: a copy whose
    state was saved and loaded must take the same step, bit for bit.
    """
    flag = f"--optimizer {args.optimizer}"
    module, _, name = args.optimizer.rpartition(".")
    with explained(f"{flag} can't be imported: install its package, or choose another"):
        kind = getattr(importlib.import_module(module), name)
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        fail(f"{flag} is no optimizer of torch's form: name a class such as torch.optim.RAdam")
    if hasattr(kind, "eval"):
        fail(
            f"{flag} has other weights for samples than for training (as schedule-free ones do), "
            "which is not possible here: choose another"
        )
    options = dict(map(read_argument, args.optimizer_args or []))

    def make(weights: list[torch.Tensor]) -> torch.optim.Optimizer:
        return kind(weights, lr=args.learning_rate, **options)

    with explained(f"{flag} can't be used with {options}"):
        try_steps(flag, make, parameters[0].device)
    optimizer: Any = make(parameters)
    optimizer.flags = ("lr", *options)  # what a resumed run takes from its own flags
    return optimizer


def read_argument(word: str) -> tuple[str, Any]:
    """Read one of --optimizer_args, such as momentum=0.9, betas=0.9,0.99 or nesterov=True."""
    name, _, text = word.partition("=")
    try:
        return name, ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return name, text


def try_steps(flag: str, make: Callable, device: torch.device) -> None:
    """Stop unless an optimizer takes the same step again after its state was saved and loaded."""
    weight = torch.nn.Parameter(torch.ones(8, 8, device=device))
    optimizer = make([weight])

    def step(weight: torch.Tensor, optimizer: torch.optim.Optimizer, scale: float) -> None:
        weight.grad = scale * torch.arange(64.0, device=device).view(8, 8)
        optimizer.step()

    for scale in (1.0, -0.5, 0.25):
        step(weight, optimizer, scale)
    file = io.BytesIO()
    try:
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        state = torch.load(file, weights_only=True)
    except Exception:
        fail(
            f"{flag} keeps more than tensors, numbers and texts in its state, which a checkpoint "
            "can't hold: choose another"
        )
    other = torch.nn.Parameter(weight.detach().clone())
    again = make([other])
    again.load_state_dict(state)
    step(weight, optimizer, 0.75)
    step(other, again, 0.75)
    if not torch.equal(weight, other):
        fail(
            f"{flag} keeps more than it saves, so that a resumed run would end with other "
            "weights: choose another"
        )
