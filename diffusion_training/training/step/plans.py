"""The memory of a training step as a function of which blocks are checkpointed and swapped.

One step is computed block by block, and the bytes that each block keeps are counted. They give the
memory of every plan, so that --fit can choose one before step 1.
"""

import sys
import weakref
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from operator import sub
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import flop_registry

from diffusion_training.batches import Models
from diffusion_training.blocks import ATTENTION, Checkpointed, describe_memory_plan, list_segments
from diffusion_training.models import list_tensors


@dataclass(frozen=True)
class MemoryPlan:
    """Which segments (see `list_segments`) of each model are computed twice, and which are swapped.

    All plans give the same bits.
    """

    checkpointed: int = 0  # the first ones; sys.maxsize: all
    keeps_attention: bool = False
    swapped: int = 0  # the first ones, on the host

    def flags(self) -> Namespace:
        """For `checkpoint_gradients`."""
        return Namespace(
            gradient_checkpointing=self.checkpointed > 0,
            checkpoint_blocks=self.checkpointed % sys.maxsize or None,
            keep_attention=self.keeps_attention and self.checkpointed > 0,
        )

    def describe(self) -> str:
        """The flags with which a run without --fit has the plan."""
        flags = vars(self.flags())
        if self.swapped:  # includes the checkpointing of all
            flags = {"blocks_to_swap": self.swapped, "keep_attention": flags["keep_attention"]}
        elif flags["checkpoint_blocks"]:
            del flags["gradient_checkpointing"]
        return describe_memory_plan(flags)


ALL = MemoryPlan(sys.maxsize)


@dataclass(frozen=True)
class Segment:
    """What a call of a segment adds to the memory, in bytes, and its operations."""

    place: int  # in its model's list of segments
    between: int  # since the call before
    result: int  # kept with gradient checkpointing, besides the inputs
    copies: int  # of weights, by autocast, which stay until the forward pass ends
    attention: int  # results of attention's kernels
    graph: int  # kept without gradient checkpointing, with result and copies
    forward: int  # at the most in the forward pass
    backward: int  # at the most in the backward pass, with what is computed a second time
    gradients: int  # of its weights
    operations: int  # of its forward pass
    attention_operations: int


@dataclass(frozen=True)
class StepMemory:
    """What a forward and a backward pass add to the memory."""

    segments: Sequence[Segment]
    end: int  # at the most after the last segment, with the loss and the first gradients
    released: int  # since the last segment, when the backward pass comes to it
    gradients: int  # of all weights; 0 if they are freed as soon as they are used
    operations: int  # of both passes; a LoRA's backward pass has as few as its frozen base allows
    adds_up: bool = False  # the gradients of several micro-batches

    def count(self, plan: MemoryPlan) -> int:
        """Return the most bytes of activations and gradients at one time.

        A checkpointed segment needs most in the backward pass, when it has a graph. From the second
        micro-batch on, all gradients are there in the forward pass too.
        """
        in_forward = most = 0
        in_backward = -self.released
        later = sum(each.gradients for each in self.segments)
        for each in self.segments:
            is_checkpointed = each.place < plan.checkpointed
            in_forward += each.between
            in_backward += each.between
            # the gradients of the segments behind it, and its own within `backward`
            later -= each.gradients
            behind = later if self.gradients and not self.adds_up else 0
            most = max(most, in_backward + each.backward + behind)
            if is_checkpointed:
                kept = each.result + each.attention * plan.keeps_attention
                in_backward -= each.copies
            else:
                kept = each.graph
                most = max(most, in_forward + each.forward)
            in_forward += kept
            in_backward += kept
        most = max(most, in_forward + self.end)
        return most + self.gradients if self.adds_up else max(most, self.gradients)

    def share_repeated(self, plan: MemoryPlan) -> float:
        """Return the operations that are computed twice, as a share of the whole step."""
        repeated = sum(
            each.operations - each.attention_operations * plan.keeps_attention
            for each in self.segments
            if each.place < plan.checkpointed
        )
        return repeated / max(1, self.operations + repeated)


class Meter(TorchDispatchMode):
    """Counts the bytes of a device's tensors, and operations. peak: the most at one time.

    Tensors that it has not seen being made, such as weights and copies of swapped ones, do not
    count, nor do views of them.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.kind = device.type
        self.held = self.peak = 0
        self.attention = 0  # bytes of results of attention
        self.operations = self.attention_operations = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        before = self.held
        # a view of an argument, such as of a weight, takes no memory
        given = {each.untyped_storage()._cdata for each in list_tensors((args, kwargs))}
        for value in list_tensors(result):
            storage = value.untyped_storage()
            if value.device.type == self.kind and storage._cdata not in given:
                self.note(storage)
        formula = flop_registry.get(func.overloadpacket)
        count = formula(*args, **(kwargs or {}), out_val=result) if formula else 0
        self.operations += count
        if func in ATTENTION:
            self.attention += self.held - before
            self.attention_operations += count
        return result

    def note(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self.known:
            self.known.add(key)
            self.held += storage.nbytes()
            self.peak = max(self.peak, self.held)
            weakref.finalize(storage, self.free, key, storage.nbytes())

    def free(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.held -= size


class Recorder:
    """Calls the segments of models, one after another, and notes what each adds to the memory.

    Each is called and differentiated alone: only its inputs stay. So a step needs no more memory
    here than with gradient checkpointing of all blocks.
    """

    def __init__(self, models: Models, meter: Meter) -> None:
        self.models = models
        self.meter = meter
        self.segments: list[Segment] = []
        self.inputs: list[Any] = []
        self.last = 0  # bytes after the last segment

    @contextmanager
    def calling(self) -> Iterator[None]:
        """Let the models call their segments by this object in the block."""
        with ExitStack() as stack:
            for model in self.models.values():
                for place, segment in enumerate(list_segments(model).values()):
                    forward = segment.forward
                    if isinstance(forward, Checkpointed):  # of a swapped segment
                        forward = forward.forward
                    call = partial(self.call, segment, place, forward)
                    stack.enter_context(patch.object(segment, "forward", call))
            yield

    def call(
        self,
        segment: torch.nn.Module,
        place: int,
        forward: Callable[..., Any],
        *args: Any,
        **options: Any,
    ) -> Any:
        meter = self.meter
        self.inputs.append((args, options))  # with the graph before them
        # of their own, so that the backward pass ends here
        args, options = tree_map_only(torch.Tensor, copy_leaf, (args, options))
        before = meter.held
        between, meter.peak = meter.peak, before
        counted = meter.attention, meter.operations, meter.attention_operations
        graph = forward(*args, **options)
        in_forward, with_graph = meter.peak - before, meter.held - before
        now = meter.attention, meter.operations, meter.attention_operations
        attention, operations, of_attention = map(sub, now, counted)
        result = tree_map_only(torch.Tensor, copy_leaf, graph)
        results = list_tensors(graph)
        of_results = sum(each.nbytes for each in results if each.requires_grad)
        del graph
        differentiate(results)
        # a segment that is called a second time has the gradients of its results already
        in_backward = max(meter.peak - before, in_forward + of_results)
        gradients = forget_gradients(segment)
        for each in list_tensors((args, options)):
            each.grad = None
        stays = meter.held - before
        given = {each.untyped_storage()._cdata for each in list_tensors((args, options))}
        own = [each.untyped_storage() for each in list_tensors(result)]
        new = {each._cdata: each.nbytes() for each in own if each._cdata not in given}
        self.segments.append(
            Segment(
                place,
                before - self.last,
                stays,
                max(0, stays - sum(new.values())),
                attention,
                with_graph,
                max(in_forward, between - before),
                in_backward,
                gradients,
                operations,
                of_attention,
            )  # fmt: skip
        )
        self.last = meter.peak = meter.held
        return result


def copy_leaf(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers without the graph behind them."""
    return tensor.detach().requires_grad_(tensor.requires_grad)


class Gradients(torch.autograd.Function):
    """Gives results some gradients, which exist no longer than those of a step."""

    @staticmethod
    def forward(ctx: Any, *results: torch.Tensor) -> torch.Tensor:
        ctx.shapes = [(each.shape, each.dtype, each.device) for each in results]
        return results[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return tuple(
            torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.shapes
        )


def differentiate(results: list[torch.Tensor]) -> None:
    """Compute a backward pass from results, each with some gradient. The list is emptied."""
    results[:] = [each for each in results if each.requires_grad]
    if results:
        # autocast is not for the backward pass
        with torch.autocast(results[0].device.type, enabled=False):
            total = Gradients.apply(*results)
            results.clear()
            total.backward()


def forget_gradients(module: torch.nn.Module) -> int:
    """Free the gradients of a module's weights. Returns their bytes."""
    count = 0
    for weight in module.parameters():
        if weight.grad is not None:
            count += weight.grad.nbytes
            weight.grad = None
    return count


def record_step(
    models: Models, compute: Callable[[], torch.Tensor], meter: Meter, frees_gradients: bool = False
) -> StepMemory:
    """Compute a step block by block, and count its memory. It changes nothing.

    compute: returns the loss; the models compute under autocast, as `prepare` wraps them. meter: it
    looks on. frees_gradients: whether each gradient is used and freed at once, as with --full_bf16.
    """
    recorder = Recorder(models, meter)
    recorder.last = meter.peak = meter.held
    before = meter.operations
    with recorder.calling():
        results = [compute()]
    differentiate(results)
    operations = meter.operations - before
    end = meter.peak - recorder.last
    for model in models.values():
        forget_gradients(model)
    # autocast has freed its copies
    freed = [each.copies for each in recorder.segments]
    freed += [each.result - each.copies for each in recorder.segments[-1:]]
    released = recorder.last - sum(freed) - meter.held
    weights = [weight for model in models.values() for weight in model.parameters()]
    gradients = sum(weight.nbytes for weight in weights if weight.requires_grad)
    return StepMemory(
        recorder.segments, end, released, 0 if frees_gradients else gradients, operations
    )
