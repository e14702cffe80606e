"""Check a model's shapes, and which weights it uses, without computing anything."""

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from diffusers.models.modeling_utils import no_init_weights

from diffusion_training.batches import Models, Predict
from diffusion_training.blocks import list_blocks
from diffusion_training.errors.sentences import explained
from diffusion_training.models import name_inputs, take_shapes


class CheckedCall(NamedTuple):
    """What `check_shapes` has seen."""

    unreached: list[str]  # the names of the weights that the prediction does not depend on
    inputs: set[str]  # see `name_inputs`


def check_shapes(
    models: Models,
    predict: Predict,
    name: str,
    shape: Sequence[int],
    condition: dict[str, torch.Tensor],
) -> CheckedCall:
    """Check that models predict an image of `shape` [C, H, W] from one of the same shape.

    It calls them on the meta device, without weights. name: the model's name in messages.
    condition: that of one image; only shapes are used. Stops with an error if the call fails, or
    the shapes differ.
    """
    with (
        torch.device("meta"),
        torch.enable_grad(),
        no_init_weights(),
        explained(f"{name} can't be trained here"),
    ):
        # torch computes shapes on the meta device in Python: 60 equal blocks take a second
        with contextlib.suppress(Exception):  # of a model that needs all of its blocks
            return call_on_meta(models, predict, shape, condition, with_all=False)
        return call_on_meta(models, predict, shape, condition)


def call_on_meta(
    models: Models,
    predict: Predict,
    shape: Sequence[int],
    condition: dict[str, torch.Tensor],
    with_all: bool = True,
) -> CheckedCall:
    """See `check_shapes`. with_all: False leaves out blocks between equal ones."""
    inputs: set[str] = set()

    def note(model: torch.nn.Module, args: Any, options: Any) -> None:
        inputs.update(name_inputs(model, args, options))

    empty = {key: type(model).from_config(model.config) for key, model in models.items()}
    dropped = {} if with_all else {key: drop_equal_blocks(model) for key, model in empty.items()}
    for model in empty.values():
        model.register_forward_pre_hook(note, with_kwargs=True)
    prediction = predict(empty, torch.zeros(1, *shape), torch.zeros(1), take_shapes(condition))
    if list(prediction.shape[1:]) != list(shape):
        raise ValueError(
            f"its prediction has the shape {list(prediction.shape[1:])}, not {list(shape)}"
        )
    reached = list_reached(prediction)
    unreached = []
    for key, model in empty.items():
        found = [name for name, weight in model.named_parameters() if weight not in reached]
        unreached += found
        for block, first in dropped.get(key, {}).items():
            own = [name for name in found if name.startswith(f"{first}.")]
            unreached += [name.replace(first, block, 1) for name in own]
    return CheckedCall(unreached, inputs)


def drop_equal_blocks(model: torch.nn.Module) -> dict[str, str]:
    """Take repeated blocks out of their lists, except for the first and the last of equal ones.

    The others keep their names. Returns {name of a block that was taken out: that of the first}.
    """
    blocks = list_blocks(model)
    kinds = {
        name: [name.rpartition(".")[0], type(block)]
        + [(key, weight.shape) for key, weight in block.named_parameters()]
        for name, block in blocks.items()
    }
    dropped: dict[str, str] = {}
    for before, name, after in zip(blocks, [*blocks][1:], [*blocks][2:], strict=False):
        if kinds[before] == kinds[name] == kinds[after]:
            parent, _, number = name.rpartition(".")
            delattr(model.get_submodule(parent), number)
            dropped[name] = dropped.get(before, before)
    return dropped


def list_reached(tensor: torch.Tensor) -> set[torch.Tensor]:
    """The parameters that a tensor was computed from, by its graph, without a backward pass."""
    nodes = [tensor.grad_fn]
    seen = {None, *nodes}
    for node in nodes:
        following = {each for each, _ in node.next_functions} - seen
        seen |= following
        nodes += following
    return {node.variable for node in nodes if hasattr(node, "variable")}
