"""--blocks_to_swap: frozen weights wait in the host's memory, and visit the device to compute."""

import contextlib
import functools
import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._python_dispatch import _disable_current_modes

from diffusion_training.blocks import Checkpointed, list_segments
from diffusion_training.errors.sentences import fail
from diffusion_training.host_memory import BLOCK, HostMemory, measure_free
from diffusion_training.launch import Launch
from diffusion_training.memory import is_gpu
from diffusion_training.models import choose_layout, read_precision
from diffusion_training.training.lora.quantization import list_quantizable

# of one block: {name in it: weight}
Weights = dict[str, torch.Tensor]


class BlockSwap:
    """Keeps frozen weights of a model's blocks in the host's memory, and copies them when needed.

    Each call of a block gets copies of its own. All blocks are checkpointed: the forward pass keeps
    only their inputs, and the backward pass calls them again and frees the copies. While a block
    computes, the one that followed it last time is copied ahead, so that at most two are on the
    device.

    Copies of the model (`copy_trained`), which have the same frozen weights, share this object.

    weights: of each block those on the host; none for a block that stays on the device.
    device: where the blocks compute.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        number: int | str,
        device: torch.device,
        is_pinned: bool = True,
    ) -> None:
        """Call it when the adapters have been added, before the model is moved.

        number: of blocks to swap, the first ones; all if it is larger, or "all". is_pinned: False
            until `keep` is called.
        """
        blocks = list_segments(model)
        if not blocks:
            fail(f"--blocks_to_swap: {type(model).__name__} has no repeated blocks: leave it out")
        names = list(blocks)[: None if number == "all" else int(number)]
        inside = tuple(f"{name}." for name in names)
        own = list(model.named_parameters(remove_duplicate=False))
        # Weights that other modules use too stay on the device. So does the first one, because
        # diffusers takes its device for the model's.
        staying = {id(own[0][1])} | {id(x) for name, x in own if not name.startswith(inside)}
        self.device = device
        self.weights: list[Weights] = []
        self.ahead: dict[int, Weights] = {}  # {number of a block: its copies, for its next call}
        self.called: tuple[int, ...] = ()  # the last call, see `take`
        self.following: dict[tuple[int, ...], int] = {}  # {a call: the block that came next}
        for name, block in blocks.items():
            weights = {
                key: weight
                for key, weight in block.named_parameters(remove_duplicate=False)
                if name in names and not weight.requires_grad and id(weight) not in staying
            }
            block.forward = Checkpointed(partial(self.compute, block, len(self.weights)))
            self.weights.append(weights)
        model.block_swap = self
        if is_pinned:
            self.keep(model, len(blocks))

    def keep(self, model: torch.nn.Module, number: int) -> None:
        """Keep only the first blocks on the host, 0 for none; call it before the model is moved."""
        self.weights[number:] = [{} for _ in self.weights[number:]]
        self.ahead = {}
        pin(self.list_weights(), self.device)
        ids = {id(weight) for weight in self.list_weights()}
        own = model.named_parameters(remove_duplicate=False)
        # DDP can't have weights on several devices; each process loads the same ones
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(
            model, [name for name, weight in own if id(weight) in ids]
        )
        if number == 0:
            del model.block_swap
            for block in list_segments(model).values():
                del block.forward

    def __deepcopy__(self, memo: dict[int, Any]) -> "BlockSwap":
        return self

    def list_weights(self) -> list[torch.Tensor]:
        """All weights on the host, each once."""
        found = {id(weight): weight for block in self.weights for weight in block.values()}
        return list(found.values())

    def list_sizes(self) -> list[int]:
        """The bytes that each block has on the host."""
        return [sum(weight.nbytes for weight in block.values()) for block in self.weights]

    def describe(self) -> str:
        swapped = [size for size in self.list_sizes() if size]
        count = len(swapped) if len(swapped) < len(self.weights) else "all"
        processes = " in each process" if int(os.environ.get("WORLD_SIZE", 1)) > 1 else ""
        return (
            f"Block swap: {count} of {len(self.weights)} blocks stay in the host's memory, "
            f"{sum(swapped) / 1e9:.3g} GB{processes}; blocks use gradient checkpointing"
        )

    @contextlib.contextmanager
    def hiding(self, model: torch.nn.Module) -> Iterator[None]:
        """Hide the weights on the host in the block, such as from model.to(device)."""
        ids = {id(weight) for weight in self.list_weights()}
        hidden = [
            (module._parameters, name, weight)
            for module in model.modules()
            for name, weight in module._parameters.items()
            if id(weight) in ids
        ]
        for parameters, name, _ in hidden:
            parameters[name] = None
        yield
        for parameters, name, weight in hidden:
            parameters[name] = weight

    def compute(self, block: torch.nn.Module, number: int, *args: Any, **kwargs: Any) -> Any:
        """Call the block with copies of its weights."""
        with _disable_current_modes():  # --keep_attention's counts operators, and copies vary
            copies = self.take(number) if self.weights[number] else {}
        with _reparametrize_module(block, copies):
            return type(block).forward(block, *args, **kwargs)

    def take(self, number: int) -> Weights:
        """The copies of a block for a call that begins now; the next block's are begun.

        The next one is that of last time: the forward pass, the backward pass and samples each have
        an order, which repeats. The block at its turn is kept.
        """
        self.wait()  # also for copies that are not used, before their memory is
        copies = self.ahead.get(number)
        self.ahead = {}
        if copies is None:
            copies = self.copy(number)
            self.wait()
        if self.called:
            self.following[self.called] = number
        self.called = (*self.called[-2:-1], number, torch.is_grad_enabled())
        following = self.following.get(self.called)
        if following is not None:
            self.ahead[following] = copies if following == number else self.copy(following)
        return copies

    def copy(self, number: int) -> Weights:
        """Begin to copy a block to the device; `wait` before the copies are used or freed.

        Their memory is that of the stream that computes. It was in use by what was queued there so
        far, but not by the block that is called next: the two streams run at the same time.
        """
        weights = self.weights[number]
        copies = {key: torch.empty_like(x, device=self.device) for key, x in weights.items()}
        with contextlib.ExitStack() as stack:
            if is_gpu(self.device):
                gpu, stream = torch.get_device_module(self.device), get_stream(self.device)
                stream.wait_stream(gpu.current_stream(self.device))
                stack.enter_context(gpu.stream(stream))
            for key, weight in weights.items():
                copies[key].copy_(weight, non_blocking=True)
        return copies

    def wait(self) -> None:
        """Let the device, not the host, finish all copies before what is queued from now on."""
        if is_gpu(self.device):
            gpu = torch.get_device_module(self.device)
            gpu.current_stream(self.device).wait_stream(get_stream(self.device))


@functools.cache
def get_stream(device: torch.device) -> Any:
    """The stream of copies to a device."""
    return torch.get_device_module(device).Stream(device)


def pin(weights: list[torch.Tensor], device: torch.device) -> None:
    """Move weights to pinned memory if the device is a GPU, about a gigabyte at a time."""
    group: list[torch.Tensor] = []
    of_convolutions = choose_layout(device)
    for number, weight in enumerate(weights if is_gpu(device) else [], 1):
        group.append(weight)
        size = sum(each.nbytes for each in group)
        if number == len(weights) or size + weights[number].nbytes > 0.9 * BLOCK:
            memory = HostMemory(size, device)
            for each in group:
                # as `put_on_device` does
                layout = of_convolutions if each.dim() == 4 else torch.preserve_format
                value = each.detach().to(memory_format=layout)
                each.data = memory.cut(value).copy_(value)
            group = []


def check_memory(
    kind: Any,
    source: str,
    launch: Launch,
    base_precision: str | None,
    number: int | str | None,
    subfolder: str = "",
    variant: str | None = None,
) -> None:
    """Before the base of a LoRA is loaded, compare its size with the memory.

    Stops with an error if the host has too little for --blocks_to_swap. Without the flag, prints
    the number of blocks with which the base fits on the GPU, if it does not.

    kind, source: the model's class, and where it is. number: of --blocks_to_swap.
    """
    config = kind.load_config(source, subfolder=subfolder)
    with torch.device("meta"):  # draws no random numbers, which would change the LoRA's
        model = kind.from_config(config)
    layers = list_quantizable(model) if base_precision else set()
    exact = launch.dtype.itemsize  # bytes per weight
    if number is not None:  # it is loaded as it is
        stored = read_precision(source, subfolder, variant=variant)
        exact = max(exact, stored.itemsize)
    quantized = {"int8": 1, "nf4": 0.56}.get(base_precision or "", exact)

    def measure(module: torch.nn.Module, prefix: str = "") -> float:
        return sum(
            weight.numel() * (quantized if name.removesuffix(".weight") in layers else exact)
            for name, weight in module.named_parameters(prefix=prefix)
        )

    needed = measure(model)
    if number is not None:
        processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        free = measure_free()
        if processes * needed > free:
            each = f" in each of {processes} processes" if processes > 1 else ""
            advice = "" if base_precision else ", or add --base_precision int8"
            fail(
                f"--blocks_to_swap keeps the base in the host's memory, {needed / 1e9:.3g} GB{each}"
                f", and only {free / 1e9:.3g} GB are free: make room{advice}"
            )
    elif is_gpu(launch.device) and base_precision != "nf4":
        gpu = torch.get_device_module(launch.device)
        total = gpu.get_device_properties(launch.device).total_memory
        sizes = [measure(block, name) for name, block in list_segments(model).items()]
        if needed < 0.9 * total or not sizes:
            return
        rest = needed + sum(sorted(sizes)[-2:])
        count = 0
        while count < len(sizes) and rest > total / 2:  # the other half is for a step
            rest -= sizes[count]
            count += 1
        launch.accelerator.print(
            f"The base takes {needed / 1e9:.3g} GB, too much for this GPU with {total / 1e9:.3g}: "
            f"with --blocks_to_swap {count} it takes {rest / 1e9:.3g}"
        )
