"""Check a model's shapes, and which weights it uses, without computing anything."""

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from diffusers.models.modeling_utils import no_init_weights
from torch.overrides import TorchFunctionMode

from diffusion_training.batches import Models, Predict
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
) -> "CheckedCall":
    """Check that models predict an image of `shape` [C, H, W] from one of the same shape.

    It calls them on the meta device, without weights. name: the model's name in messages.
    condition: that of one image; only shapes are used. Stops with an error if the call fails, or
    the shapes differ.
    """
    inputs: set[str] = set()

    def note(model: torch.nn.Module, args: Any, options: Any) -> None:
        inputs.update(name_inputs(model, args, options))

    on_meta = torch.device("meta"), QuickShapes(), torch.enable_grad(), no_init_weights()
    with contextlib.ExitStack() as stack:
        for context in (*on_meta, explained(f"{name} can't be trained here")):
            stack.enter_context(context)
        empty = {key: type(model).from_config(model.config) for key, model in models.items()}
        for model in empty.values():
            model.register_forward_pre_hook(note, with_kwargs=True)
        prediction = predict(empty, torch.zeros(1, *shape), torch.zeros(1), take_shapes(condition))
        if list(prediction.shape[1:]) != list(shape):
            raise ValueError(
                f"its prediction has the shape {list(prediction.shape[1:])}, not {list(shape)}"
            )
        reached = list_reached(prediction)
    unreached = [
        name
        for model in empty.values()
        for name, weight in model.named_parameters()
        if weight not in reached
    ]
    return CheckedCall(unreached, inputs)


def list_reached(tensor: torch.Tensor) -> set[torch.Tensor]:
    """The parameters that a tensor was computed from, by its graph, without a backward pass."""
    nodes = [tensor.grad_fn]
    seen = {None, *nodes}
    for node in nodes:
        following = {each for each, _ in node.next_functions} - seen
        seen |= following
        nodes += following
    return {node.variable for node in nodes if hasattr(node, "variable")}


class QuickShapes(TorchFunctionMode):
    """Computes only the shapes of some operations, and what their results depend on.

    torch computes shapes of norms, of sums and of attention on the meta device in Python, which
    takes up to a millisecond each. A call that is unusual or wrong goes to torch, which may raise.
    """

    def __torch_function__(
        self, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        options = kwargs or {}
        if function in ELEMENTWISE:
            tensors = [each for each in args if isinstance(each, torch.Tensor)]
            kinds = {(each.shape, each.dtype) for each in tensors}
            if len(kinds) == 1 and tensors[0].is_floating_point():
                return Result.apply(tensors[0].shape, *tensors)
        elif function in QUICK:
            result = QUICK[function](*args, **options)
            if result is not None:
                return result
        return function(*args, **options)


class Result(torch.autograd.Function):
    """A tensor without values that depends on the inputs."""

    @staticmethod
    def forward(ctx: Any, shape: Sequence[int], *inputs: torch.Tensor | None) -> torch.Tensor:
        return inputs[0].new_empty(shape)  # type: ignore[union-attr]


def shape_linear(
    inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor | None:
    if inputs.shape[-1] != weight.shape[1] or inputs.dtype != weight.dtype:
        return None
    return Result.apply([*inputs.shape[:-1], len(weight)], inputs, weight, bias)


def shape_layer_norm(
    inputs: torch.Tensor, shape: Sequence[int], *others: Any, **options: Any
) -> torch.Tensor | None:
    if [*inputs.shape[-len(shape) :]] != [*shape]:
        return None
    tensors = [each for each in (*others, *options.values()) if isinstance(each, torch.Tensor)]
    return Result.apply(inputs.shape, inputs, *tensors)


def shape_group_norm(
    inputs: torch.Tensor,
    num_groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> torch.Tensor | None:
    channels = inputs.shape[1]
    if channels % num_groups or (weight is not None and len(weight) != channels):
        return None
    return Result.apply(inputs.shape, inputs, weight, bias)


def shape_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    *others: Any,
    **options: Any,
) -> torch.Tensor | None:
    heads, tokens = query.shape[:-2], key.shape[-2]
    fits = heads == key.shape[:-2] == value.shape[:-2] and tokens == value.shape[-2]
    if attn_mask is not None or not fits or query.shape[-1] != key.shape[-1]:
        return None
    return Result.apply([*query.shape[:-1], value.shape[-1]], query, key, value)


ELEMENTWISE = {torch.Tensor.add, torch.Tensor.div, torch.Tensor.mul, F.gelu, F.silu}
QUICK: dict[Any, Any] = {
    F.linear: shape_linear,
    F.layer_norm: shape_layer_norm,
    F.group_norm: shape_group_norm,
    F.scaled_dot_product_attention: shape_attention,
}
