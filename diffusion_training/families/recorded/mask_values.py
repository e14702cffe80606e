"""Values of masks in a model on the meta device, which some models read to cut padding."""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

MAX_NUMBERS = 2**22  # numbers in tensors whose values are known
aten = torch.ops.aten


def is_whole_numbers(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and not (value.is_floating_point() or value.is_complex())


class MaskValues(TorchDispatchMode):
    """Keeps masks and positions on the CPU, with their values, beside the meta device.

    A tensor of whole numbers that was computed from others is on the CPU. All others are on the
    meta device.
    """

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if operation is aten.index.Tensor:
            args = (args[0], as_positions(args[1]))
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        is_known = all(x.device.type == "cpu" for x in tensors)
        is_known = is_known and sum(x.numel() for x in tensors) < MAX_NUMBERS
        device = torch.device("cpu" if is_known else "meta")

        def move(x: Any) -> Any:
            if isinstance(x, torch.device):
                return device
            return x.to(device) if isinstance(x, torch.Tensor) else x

        args, kwargs = tree_map(move, (args, kwargs or {}))
        results = operation(*args, **kwargs)
        return tree_map_only(
            torch.Tensor, lambda x: x if is_whole_numbers(x) else x.to("meta"), results
        )


def as_positions(indices: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """The indices of a tensor, with the positions where a mask is true in its place."""
    positions: list[torch.Tensor | None] = []
    for index in indices:
        if index is not None and index.dtype == torch.bool and not index.is_meta:
            positions += index.nonzero(as_tuple=True)
        else:
            positions.append(index)
    return positions


@contextlib.contextmanager
def on_meta() -> Iterator[None]:
    """Call a model on the meta device, with `MaskValues`. torch has no autocast for this device."""
    autocast = torch.autocast

    def skip(device_type: str, *args: Any, **options: Any) -> Any:
        if device_type == "meta":
            return contextlib.nullcontext()
        return autocast(device_type, *args, **options)

    with MaskValues(), patch.object(torch, "autocast", skip):
        yield
