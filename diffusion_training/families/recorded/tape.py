"""Keep the operations on some tensors, to repeat them on others, on any device."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from diffusion_training.memory import move


class Unrecordable(Exception):
    """Raised for a pipeline that can't be recorded, with the reason."""


@dataclass(frozen=True)
class Slot:
    """A tensor that depends on the inputs."""

    number: int


@dataclass(frozen=True)
class Constant:
    """A tensor that does not depend on the inputs."""

    number: int


@dataclass(frozen=True)
class Step:
    """An operation, its arguments, and the slots of its results."""

    operation: Any
    leaves: list[Any]
    spec: TreeSpec
    results: list[Slot]


class Tape(TorchDispatchMode):
    """The operations of a function of tensors on which its results depend.

    Calling it repeats them. A tensor that does not depend on the inputs is a constant, which is
    copied to each device once. So are values that the function reads: whether they are the same
    for other inputs is for the caller to check.
    """

    def __init__(self, function: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> None:
        """Only the tensors among the results of the function are repeated."""
        super().__init__()
        # the second has no changes in place, but can't make lists of tensors
        for variant in (function, torch.func.functionalize(function)):
            self.slots = {id(tensor): Slot(i) for i, tensor in enumerate(inputs)}
            self.kept = list(inputs)  # so that no other tensor gets their ids
            self.steps: list[Step] = []
            self.constants: list[torch.Tensor] = []
            self.has_changes = False
            with torch.inference_mode(False), torch.no_grad(), self:
                results = variant(*inputs)
            if not self.has_changes:
                break
        tensors = [leaf for leaf in tree_leaves(results) if isinstance(leaf, torch.Tensor)]
        self.results = [self.refer(tensor) for tensor in tensors]
        needed = set(self.results)
        for step in reversed(self.steps):
            if not needed.isdisjoint(step.results):
                needed |= {leaf for leaf in step.leaves if isinstance(leaf, Slot)}
        self.steps = [step for step in self.steps if not needed.isdisjoint(step.results)]
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
        self.has_changes |= operation._schema.is_mutable
        tensors = tree_leaves(result)
        if not all(isinstance(tensor, torch.Tensor) for tensor in tensors):
            return result
        if operation is torch.ops.aten.view.default:  # other tensors may have another layout
            operation = torch.ops.aten.reshape.default
        # on the device of its inputs
        leaves = [None if isinstance(x, torch.device) else self.refer(x) for x in given]
        slots = [Slot(len(self.kept) + i) for i in range(len(tensors))]
        self.slots |= zip(map(id, tensors), slots, strict=True)
        self.kept += tensors
        self.steps.append(Step(operation, leaves, spec, slots))
        return result

    def __call__(self, *inputs: torch.Tensor) -> list[torch.Tensor]:
        device = inputs[0].device
        if device not in self.on_devices:
            self.on_devices[device] = [move(constant, device) for constant in self.constants]
        constants = self.on_devices[device]
        made = {Slot(number): tensor for number, tensor in enumerate(inputs)}

        def look_up(leaf: Any) -> Any:
            if isinstance(leaf, Constant):
                return constants[leaf.number]
            return made[leaf] if isinstance(leaf, Slot) else leaf

        for step in self.steps:
            args, kwargs = tree_unflatten([look_up(leaf) for leaf in step.leaves], step.spec)
            made |= zip(step.results, tree_leaves(step.operation(*args, **kwargs)), strict=True)
        return [look_up(result) for result in self.results]
