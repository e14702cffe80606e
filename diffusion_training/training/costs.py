"""What a run costs: memory, counted before and measured after, operations a second and their share of the peak."""

import contextlib
import copy
import math
import multiprocessing
import re
import sys
from argparse import Namespace
from collections.abc import Callable, Container, Iterable

import psutil
import torch
from accelerate import Accelerator
from torch.utils.flop_counter import FlopCounterMode

from diffusion_training.errors import explain
from diffusion_training.training.models import Models, is_block_matrix

# The prediction of a model: it, images, timesteps and what it is given besides
Call = Callable[[torch.nn.Module, torch.Tensor, torch.Tensor, dict[str, torch.Tensor]], torch.Tensor]
# How a GPU's name begins: its dense operations a second in 16 bits and in TF32, 1e12, by NVIDIA's data sheets (which
# name twice as many, of sparse matrices). None: has no TF32, and no bfloat16 either.
PEAKS = {
    "B200": (2250, 1125), "H200": (989, 495), "H100 PCIe": (756, 378), "H100 NVL": (835, 418), "H100": (989, 495),
    "A100": (312, 156), "A40": (150, 75), "A10": (125, 62.5), "L40S": (362, 183), "L4": (121, 60), "V100": (125, None),
    "T4": (65, None), "GeForce RTX 4090$": (165, 83), "GeForce RTX 3090$": (71, 36),
}  # fmt: skip


class Costs:
    """What a run costs. Made before step 1, it says what memory will hold; `Records` asks it for the rest.

    models: {name: model} of what is trained, before `prepare`. averaged: of `start_average`. call(model, images,
    timesteps, condition): the prediction of one of `models`, as `call_unet`. frozen: modules that lie on the device
    besides, or None.
    """

    total_gb: float | None = None  # that the device has, and what it can do: None of a CPU
    peak: float | None = None
    flops: int | None = None  # of an image

    def __init__(
        self, accelerator: Accelerator, models: Models, averaged: Models, call: Call, args: Namespace,
        frozen: Iterable[torch.nn.Module | None] = (),
    ) -> None:  # fmt: skip
        self.device, self.call, self.num_processes = accelerator.device, call, accelerator.num_processes
        held = count_memory(models, averaged, filter(None, frozen), accelerator.num_processes, args.optimizer)
        self.held, self.most = sum(held.values()) / 1e9, 0.0
        parts = " + ".join(f"{count / 1e9:.3g} {what}" for what, count in held.items() if count)
        accelerator.print(f"Memory: {self.held:.3g} GB = {parts}; what a forward pass keeps comes to it")
        self.copies = {name: copy_shapes(model) for name, model in models.items()}
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)  # what was tried before the run is no part of it
            self.total_gb = torch.cuda.get_device_properties(self.device).total_memory / 1e9
            self.peak = find_peak(torch.cuda.get_device_name(self.device), args.mixed_precision, args.allow_tf32)

    def look(self, images: torch.Tensor, condition: dict[str, torch.Tensor]) -> None:
        """Count the operations of an image, of the first ones [N, ...] that the models are given; once."""
        if self.flops is None:
            try:
                self.flops = count_flops(self.copies, self.call, images, condition)
            except Exception as error:  # nothing else needs the figure
                print(f"\ntflops are not recorded, a model's can't be counted ({explain(error)})", file=sys.stderr)
                self.flops = 0
            self.copies = {}

    def measure(self, images_per_second: float) -> dict[str, float]:
        """For a record: {"memory_gb": at its peak, "tflops": of one device, "mfu": their share of its peak}."""
        self.most = max(self.most, measure_memory(self.device)[0] / 1e9)
        found, tflops = {"memory_gb": self.most}, images_per_second / self.num_processes * (self.flops or 0) / 1e12
        found |= {"tflops": tflops} if self.flops else {}
        return found | ({"mfu": tflops / self.peak} if self.flops and self.peak else {})

    def describe(self) -> str:
        """The peak that was measured, in a sentence."""
        most, reserved = (count / 1e9 for count in measure_memory(self.device))
        if self.total_gb:
            return f"Memory: {most:.3g} GB at the peak, {reserved:.3g} reserved, of {self.total_gb:.3g}"
        return f"Memory: {most:.3g} GB, of this process and its loader's"


def count_moments(parameter: torch.Tensor, optimizer: str, in_block: bool = False) -> int:
    """Bytes that --optimizer keeps of a parameter, but for its count of steps; in_block: of `is_block_matrix`."""
    numbers, shape = parameter.numel(), parameter.shape
    if optimizer == "adafactor":
        return 4 * (numbers // shape[-1] + numbers // shape[-2] if len(shape) > 1 else numbers)
    if optimizer == "adamw8bit" and numbers >= 4096:  # two moments, and a float32 for each 256 of their numbers
        return 2 * numbers + 2 * 4 * math.ceil(numbers / 256)
    return (1 if optimizer == "muon" and in_block else 2) * 4 * numbers


def count_memory(
    models: Models, averaged: Models, frozen: Iterable[torch.nn.Module], num_processes: int, optimizer: str
) -> dict[str, int]:
    """{what: bytes} that a training holds in a step, but for what its forward pass keeps; see `Costs`."""

    def count(modules: Iterable[torch.nn.Module], but: Container[int] = ()) -> int:
        tensors = {id(each): each for module in modules for each in (*module.parameters(), *module.buffers())}
        return sum(each.numel() * each.element_size() for key, each in tensors.items() if key not in but)

    named = [pair for model in models.values() for pair in model.named_parameters()]
    own, trained = {id(weight) for _, weight in named}, [pair for pair in named if pair[1].requires_grad]
    gradients = sum(weight.numel() * weight.element_size() for _, weight in trained)
    return {
        "weights": count(models.values()), "averaged": count(averaged.values(), but=own), "gradients": gradients,
        "moments": sum(count_moments(weight, optimizer, is_block_matrix(name, weight)) for name, weight in trained),
        "encoders": count(frozen),
        "exchanged gradients": gradients * (num_processes > 1),
    }  # fmt: skip


def measure_memory(device: torch.device) -> tuple[int, int]:
    """Bytes (in use, held by torch), each at its peak, of a CUDA device; else what this process and its workers hold
    now, twice."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    held = 0
    for process in (None, *(worker.pid for worker in multiprocessing.active_children())):
        with contextlib.suppress(psutil.Error):  # one that has just ended
            held += psutil.Process(process).memory_info().rss
    return held, held


def find_peak(name: str, mixed_precision: str, allow_tf32: bool) -> float | None:
    """TFLOP/s that a GPU of a name can do in a precision, None where no data sheet says so."""
    found = [PEAKS[kind] for kind in PEAKS if re.search(rf"\b{kind}(?!\w)", name) and "MIG" not in name]
    sixteen, tf32 = found[0] if found else (None, None)
    if mixed_precision == "no":
        return tf32 if allow_tf32 else None
    return None if mixed_precision == "bf16" and tf32 is None else sixteen


def copy_shapes(model: torch.nn.Module) -> torch.nn.Module:
    """A copy of a model without its numbers, and without gradient checkpointing."""
    bare = {
        id(x): torch.nn.Parameter(torch.empty(x.shape, device="meta"), x.requires_grad) for x in model.parameters()
    }
    copied = copy.deepcopy(model, bare | {id(x): torch.empty_like(x, device="meta") for x in model.buffers()})
    if getattr(copied, "is_gradient_checkpointing", False):  # its second forward pass is no work of the model's
        copied.disable_gradient_checkpointing()
    return copied


def count_flops(copies: Models, call: Call, images: torch.Tensor, condition: dict[str, torch.Tensor]) -> int:
    """Floating point operations of a forward and a backward pass of `copy_shapes`' models on one of images [N, ...].

    A multiplication and an addition are two; those of elements alone (activations, norms) are not counted, as is
    usual. call, condition {name: tensor [N, ...]}: see `Costs`. It takes shapes only, and no device.
    """
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        one = lambda value: torch.empty(1, *value.shape[1:], dtype=value.dtype)  # noqa: E731
        given = {name: one(value) for name, value in condition.items()}
        for model in copies.values():
            call(model, one(images), torch.zeros(1), given).sum().backward()
    return counter.get_total_flops()
