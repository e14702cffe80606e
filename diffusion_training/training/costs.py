"""The costs of a run: memory (estimated, then measured), FLOP/s and their share of the peak."""

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

# (model, images, timesteps, the model's other inputs) -> its prediction
Call = Callable[
    [torch.nn.Module, torch.Tensor, torch.Tensor, dict[str, torch.Tensor]], torch.Tensor
]
# {beginning of a GPU's name: (TFLOP/s in 16 bits, TFLOP/s in TF32)}, for dense matrices, from
# NVIDIA's data sheets, which state twice as much for sparse ones. None: the GPU has neither TF32
# nor bfloat16.
PEAKS = {
    "B200": (2250, 1125),
    "H200": (989, 495),
    "H100 PCIe": (756, 378),
    "H100 NVL": (835, 418),
    "H100": (989, 495),
    "A100": (312, 156),
    "A40": (150, 75),
    "A10": (125, 62.5),
    "L40S": (362, 183),
    "L4": (121, 60),
    "V100": (125, None),
    "T4": (65, None),
    "GeForce RTX 4090$": (165, 83),
    "GeForce RTX 3090$": (71, 36),
}


class Costs:
    """Estimates and measures what a run costs.

    Made before step 1, it prints what memory will hold; `Records` asks it for the rest.

    models: {name: model} of what is trained, before `prepare`.
    averaged: see `start_average`.
    call(model, images, timesteps, condition): returns the prediction of one of `models`, like
    `call_unet`.
    frozen: other modules on the device, or None.
    """

    total_gb: float | None = None  # memory of the device; None for a CPU
    peak: float | None = None  # TFLOP/s of the device; None if unknown
    flops: int | None = None  # per image

    def __init__(
        self,
        accelerator: Accelerator,
        models: Models,
        averaged: Models,
        call: Call,
        args: Namespace,
        frozen: Iterable[torch.nn.Module | None] = (),
    ) -> None:
        self.device, self.call, self.num_processes = (
            accelerator.device,
            call,
            accelerator.num_processes,
        )
        held = count_memory(
            models, averaged, filter(None, frozen), accelerator.num_processes, args.optimizer
        )
        self.held, self.most = sum(held.values()) / 1e9, 0.0
        parts = " + ".join(f"{count / 1e9:.3g} {what}" for what, count in held.items() if count)
        accelerator.print(
            f"Memory: {self.held:.3g} GB = {parts}; what a forward pass keeps comes to it"
        )
        self.copies = {name: copy_shapes(model) for name, model in models.items()}
        if self.device.type == "cuda":
            # so that trials before the run do not count
            torch.cuda.reset_peak_memory_stats(self.device)
            self.total_gb = torch.cuda.get_device_properties(self.device).total_memory / 1e9
            self.peak = find_peak(
                torch.cuda.get_device_name(self.device), args.mixed_precision, args.allow_tf32
            )

    def look(self, images: torch.Tensor, condition: dict[str, torch.Tensor]) -> None:
        """Count the operations per image, once, from the first images [N, ...] that models get."""
        if self.flops is None:
            try:
                self.flops = count_flops(self.copies, self.call, images, condition)
            except Exception as error:  # nothing else needs the figure
                print(
                    f"\ntflops are not recorded, a model's can't be counted ({explain(error)})",
                    file=sys.stderr,
                )
                self.flops = 0
            self.copies = {}

    def measure(self, images_per_second: float) -> dict[str, float]:
        """Return {"memory_gb": at its peak, "tflops": per device, "mfu": share of the peak}."""
        self.most = max(self.most, measure_memory(self.device)[0] / 1e9)
        found, tflops = (
            {"memory_gb": self.most},
            images_per_second / self.num_processes * (self.flops or 0) / 1e12,
        )
        found |= {"tflops": tflops} if self.flops else {}
        return found | ({"mfu": tflops / self.peak} if self.flops and self.peak else {})

    def describe(self) -> str:
        """Return a sentence with the measured peak."""
        most, reserved = (count / 1e9 for count in measure_memory(self.device))
        if self.total_gb:
            return (
                f"Memory: {most:.3g} GB at the peak, {reserved:.3g} reserved, of "
                f"{self.total_gb:.3g}"
            )
        return f"Memory: {most:.3g} GB, of this process and its loader's"


def count_moments(parameter: torch.Tensor, optimizer: str, in_block: bool = False) -> int:
    """Return the bytes that --optimizer keeps for a parameter, except for its step count.

    in_block: see `is_block_matrix`.
    """
    numbers, shape = parameter.numel(), parameter.shape
    if optimizer == "adafactor":
        return 4 * (numbers // shape[-1] + numbers // shape[-2] if len(shape) > 1 else numbers)
    # two moments in 8 bits, each with a float32 per 256 numbers
    if optimizer == "adamw8bit" and numbers >= 4096:
        return 2 * numbers + 2 * 4 * math.ceil(numbers / 256)
    return (1 if optimizer == "muon" and in_block else 2) * 4 * numbers


def count_memory(
    models: Models,
    averaged: Models,
    frozen: Iterable[torch.nn.Module],
    num_processes: int,
    optimizer: str,
) -> dict[str, int]:
    """Return {what: bytes} that a training step holds, without activations; see `Costs`."""

    def count(modules: Iterable[torch.nn.Module], but: Container[int] = ()) -> int:
        tensors = {
            id(each): each
            for module in modules
            for each in (*module.parameters(), *module.buffers())
        }
        return sum(
            each.numel() * each.element_size() for key, each in tensors.items() if key not in but
        )

    named = [pair for model in models.values() for pair in model.named_parameters()]
    own, trained = (
        {id(weight) for _, weight in named},
        [pair for pair in named if pair[1].requires_grad],
    )
    gradients = sum(weight.numel() * weight.element_size() for _, weight in trained)
    return {
        "weights": count(models.values()),
        "averaged": count(averaged.values(), but=own),
        "gradients": gradients,
        "moments": sum(
            count_moments(weight, optimizer, is_block_matrix(name, weight))
            for name, weight in trained
        ),
        "encoders": count(frozen),
        "exchanged gradients": gradients * (num_processes > 1),
    }


def measure_memory(device: torch.device) -> tuple[int, int]:
    """Return bytes (in use, reserved by torch), each at its peak, of a CUDA device.

    On other devices both are what this process and its workers hold now.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)
    held = 0
    for process in (None, *(worker.pid for worker in multiprocessing.active_children())):
        with contextlib.suppress(psutil.Error):  # one that has just ended
            held += psutil.Process(process).memory_info().rss
    return held, held


def find_peak(name: str, mixed_precision: str, allow_tf32: bool) -> float | None:
    """Return the TFLOP/s of a GPU by its name, or None where no data sheet gives a number."""
    found = [
        PEAKS[kind] for kind in PEAKS if re.search(rf"\b{kind}(?!\w)", name) and "MIG" not in name
    ]
    sixteen, tf32 = found[0] if found else (None, None)
    if mixed_precision == "no":
        return tf32 if allow_tf32 else None
    return None if mixed_precision == "bf16" and tf32 is None else sixteen


def copy_shapes(model: torch.nn.Module) -> torch.nn.Module:
    """Return a copy of a model without its numbers, and without gradient checkpointing."""
    bare = {
        id(x): torch.nn.Parameter(torch.empty(x.shape, device="meta"), x.requires_grad)
        for x in model.parameters()
    }
    copied = copy.deepcopy(
        model, bare | {id(x): torch.empty_like(x, device="meta") for x in model.buffers()}
    )
    # checkpointing repeats the forward pass, which is not counted as work of the model
    if getattr(copied, "is_gradient_checkpointing", False):
        copied.disable_gradient_checkpointing()
    return copied


def count_flops(
    copies: Models, call: Call, images: torch.Tensor, condition: dict[str, torch.Tensor]
) -> int:
    """Count the floating point operations of a forward and a backward pass on one image.

    A multiplication and an addition count as two. Elementwise operations (activations, norms) are
    not counted, as is usual. Only shapes are used, and no device.

    copies: models from `copy_shapes`.
    images: [N, ...].
    call, condition {name: tensor [N, ...]}: see `Costs`.
    """
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        one = lambda value: torch.empty(1, *value.shape[1:], dtype=value.dtype)  # noqa: E731
        given = {name: one(value) for name, value in condition.items()}
        for model in copies.values():
            call(model, one(images), torch.zeros(1), given).sum().backward()
    return counter.get_total_flops()
