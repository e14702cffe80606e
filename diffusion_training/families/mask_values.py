"""Values of masks on the meta device, which models read to cut padding or to index."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

MOST = 2**22  # numbers in a tensor whose values are known
aten = torch.ops.aten


class MaskValues(TorchDispatchMode):
    """Computes the values of tensors that depend only on `known` ones, beside the meta device."""

    def __init__(self, known: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """known: tensors on the meta device, with their values."""
        super().__init__()
        self.values = {id(tensor): value for tensor, value in known}
        self.kept = [tensor for tensor, _ in known]  # so that no other tensor gets their ids

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if operation is aten.index.Tensor:
            args = (args[0], self.as_positions(args[1]))
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        is_known = all(id(x) in self.values or x.device.type == "cpu" for x in tensors)
        is_small = sum(x.numel() for x in tensors) < MOST
        if not (is_known and is_small) or (not tensors and not is_meta(kwargs.get("device"))):
            return operation(*args, **kwargs)
        values = operation(*tree_map(self.look_up, args), **tree_map(self.look_up, kwargs))
        is_on_cpu = tensors and all(x.device.type == "cpu" for x in tensors)
        if is_on_cpu and kwargs.get("device") is None:
            return values
        if not all(isinstance(x, torch.Tensor) for x in tree_leaves(values)):
            return values  # it was read
        try:
            results = operation(*args, **kwargs)
        except RuntimeError:  # its shape depends on values
            results = tree_map(lambda x: torch.empty_like(x, device="meta"), values)
        for result, value in zip(tree_leaves(results), tree_leaves(values), strict=True):
            self.note(result, value)
        return results

    def look_up(self, x: Any) -> Any:
        if isinstance(x, torch.device):
            return torch.device("cpu")
        return self.values.get(id(x), x) if isinstance(x, torch.Tensor) else x

    def note(self, tensor: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        self.values[id(tensor)] = value
        self.kept.append(tensor)
        return tensor

    def as_positions(self, indices: list[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """The indices of a tensor, with the positions where a mask is true in its place."""
        positions: list[torch.Tensor | None] = []
        for index in indices:
            value = self.values.get(id(index))
            if value is None or value.dtype != torch.bool:
                positions.append(index)
            else:
                for each in value.nonzero(as_tuple=True):
                    positions.append(self.note(torch.empty_like(each, device="meta"), each))
        return positions


def is_meta(device: Any) -> bool:
    return device is not None and torch.device(device).type == "meta"


class ReadLists(TorchFunctionMode):
    """`tolist`, which torch does not dispatch, of tensors whose values are known."""

    def __init__(self, modes: MaskValues) -> None:
        super().__init__()
        self.values = modes.values

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is torch.Tensor.tolist and id(args[0]) in self.values:
            return self.values[id(args[0])].tolist()
        return function(*args, **(kwargs or {}))


@contextlib.contextmanager
def knowing(known: list[tuple[torch.Tensor, torch.Tensor]]) -> Iterator[None]:
    """Let a model on the meta device read the values of these tensors: see `MaskValues`."""
    values = MaskValues(known)
    with values, ReadLists(values):
        yield
