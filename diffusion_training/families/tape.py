"""Keep the operations on some tensors, to repeat them on others, on any device."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten


class Unrecordable(ValueError):
    """Raised for a pipeline that can't be recorded, with the reason."""


class Unrepeatable(RuntimeError):
    """Raised for an operation that reads values of a tensor, or changes it in place."""


@dataclass(frozen=True)
class Slot:
    """A tensor that depends on the inputs."""

    number: int


@dataclass(frozen=True)
class Constant:
    """A tensor that does not depend on the inputs."""

    number: int


class Tape(TorchDispatchMode):
    """The operations of a function of tensors, without those that do not depend on its inputs.

    Calling it repeats them. A tensor that does not depend on the inputs is a constant, which is
    copied to each device once.
    """

    def __init__(
        self, function: Callable[..., Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor]
    ) -> None:
        super().__init__()
        self.slots = {id(tensor): Slot(i) for i, tensor in enumerate(inputs)}
        self.kept = list(inputs)  # so that no other tensor gets their ids
        self.steps: list[tuple[Any, list[Any], Any]] = []  # operation, arguments
        self.constants: list[torch.Tensor] = []
        with torch.inference_mode(False), torch.no_grad(), self:
            results = function(*inputs)
        self.results = [self.refer(tensor) for tensor in results]
        self.on_devices: dict[torch.device, list[torch.Tensor]] = {}
        self.kept.clear()

    def refer(self, value: Any) -> Any:
        """A tensor as its slot, or as the index of a constant."""
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) in self.slots:
            return self.slots[id(value)]
        self.constants.append(value)
        return Constant(len(self.constants) - 1)

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given, spec = tree_flatten((args, kwargs or {}))
        result = operation(*args, **(kwargs or {}))
        if not any(isinstance(x, torch.Tensor) and id(x) in self.slots for x in given):
            return result
        tensors, _ = tree_flatten(result)
        if not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
            raise Unrepeatable(f"{operation} reads values of a tensor")
        if operation._schema.is_mutable:
            raise Unrepeatable(f"{operation} changes a tensor in place")
        if operation is torch.ops.aten.view.default:  # other tensors may have another layout
            operation = torch.ops.aten.reshape.default
        # on the device of its inputs
        leaves = [None if isinstance(x, torch.device) else self.refer(x) for x in given]
        for tensor in tensors:
            self.slots[id(tensor)] = Slot(len(self.kept))
            self.kept.append(tensor)
        self.steps.append((operation, leaves, spec))
        return result

    def __call__(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        device = inputs[0].device
        if device not in self.on_devices:
            self.on_devices[device] = [constant.to(device) for constant in self.constants]
        constants = self.on_devices[device]
        made = list(inputs)

        def look_up(leaf: Any) -> Any:
            if isinstance(leaf, Constant):
                return constants[leaf.number]
            return made[leaf.number] if isinstance(leaf, Slot) else leaf

        for operation, leaves, spec in self.steps:
            args, kwargs = tree_unflatten([look_up(leaf) for leaf in leaves], spec)
            made += tree_flatten(operation(*args, **kwargs))[0]
        return [look_up(result) for result in self.results]

    def equals(self, other: "Tape") -> bool:
        """Whether both have the same operations and constants."""
        alike = (self.steps, self.results) == (other.steps, other.results)
        pairs = zip(self.constants, other.constants, strict=False)
        return alike and all(x.shape == y.shape and torch.equal(x, y) for x, y in pairs)
