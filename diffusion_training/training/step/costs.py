"""The costs of a run: memory (estimated, then measured), FLOP/s and their share of the peak."""

import copy
import math
import re
import sys
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from diffusion_training.batches import Models, Objective, Prepared
from diffusion_training.blocks import list_checkpointed, list_segments
from diffusion_training.errors.faults import explain
from diffusion_training.launch import Launch
from diffusion_training.memory import is_gpu, measure_memory
from diffusion_training.models import (
    is_adapted,
    is_block_matrix,
    is_swapped,
    list_parameters,
    list_quantized,
    list_scales,
    take_shapes,
)
from diffusion_training.training.step.sharding import copy_empty, is_sharded, share_memory

Copied = TypeVar("Copied")
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
# {operator of torch: the kernel of attention}. The softmax is of separate products, which torch
# computes if no kernel takes the shapes, the mask or the precision.
ATTENTION = {
    "_scaled_dot_product_cudnn_attention": "cuDNN",
    "_scaled_dot_product_flash_attention": "FlashAttention",
    "_scaled_dot_product_efficient_attention": "memory-efficient attention",
    "_safe_softmax": "separate products, slow and with more memory",
}


class Costs:
    """Estimates and measures what a run costs.

    Its constructor, before step 1, prints the memory that is needed. `Records` calls the rest.

    models: {name: model} that are trained, before `prepare`.
    averaged: see `start_average`.
    """

    total_gb: float | None = None  # memory of the device; None for a CPU
    peak: float | None = None  # TFLOP/s of the device; None if unknown
    flops = 0  # per image; 0 if unknown
    attention: dict[str, int] = {}  # calls of each kernel in the first forward pass

    def __init__(
        self,
        launch: Launch,
        models: Models,
        averaged: Models,
        objective: Objective,
        optimizer: str,
        allow_tf32: bool,
    ) -> None:
        self.device = launch.device
        self.num_processes = launch.num_processes
        launch.accelerator.print(f"Trains: {describe_trained(models)}")
        others = [*objective.frozen.values(), *objective.encoders]
        sizes = count_memory(models, averaged, others, launch.num_processes, optimizer)
        if launch.shard:
            copied = 0.0
            if launch.mixed_precision == "bf16":
                checkpointed = sum(len(list_checkpointed(model)) for model in models.values())
                segments = sum(len(list_segments(model)) for model in models.values())
                copied = 1 - checkpointed / segments if checkpointed else 1
            sizes = share_memory(sizes, models, launch.num_processes, copied)
        self.most = 0.0
        held = sum(sizes.values())
        unit, factor = ("GB", 1e9) if held > 1e8 else ("MB", 1e6)
        parts = " + ".join(f"{count / factor:.3g} {what}" for what, count in sizes.items() if count)
        launch.accelerator.print(
            f"Memory needed: {held / factor:.3g} {unit} = {parts}, plus activations"
        )
        self.copies: tuple[Models, Objective] | None = None
        if launch.compile:  # torch does not use compiled code while `Counter` looks on
            # not the data, which `prepare` holds
            parts = ("compute_loss", "predict", "frozen")
            used = {name: getattr(objective, name) for name in parts}
            copies, used = copy_shapes((models, used), models, others, with_norms=False)
            self.copies = copies, replace(objective, **used)
        if is_gpu(self.device):
            gpu = torch.get_device_module(self.device)
            gpu.reset_peak_memory_stats(self.device)  # so that trials before the run do not count
            self.total_gb = gpu.get_device_properties(self.device).total_memory / 1e9
            name = gpu.get_device_name(self.device)
            self.peak = find_peak(name, launch.mixed_precision, allow_tf32)

    def count_first(self, objective: Objective) -> Objective:
        """Return the same objective, whose first loss also counts the operations of one image.

        Only a compiled model is called once more, without values: see `count_flops`.
        """
        is_counted = False

        def compute_loss(
            own: Objective, models: Models, prepared: Prepared, weight: torch.Tensor
        ) -> torch.Tensor:
            nonlocal is_counted
            # without gradients, only the inputs of --preserve_prior are drawn
            if is_counted or not torch.is_grad_enabled():
                return objective.compute_loss(own, models, prepared, weight)
            is_counted = True
            if self.copies:
                try:
                    self.flops = count_flops(*self.copies, prepared)
                except Exception as error:  # nothing else needs the figure
                    report_uncounted(error)
                self.copies = None
                return objective.compute_loss(own, models, prepared, weight)
            with Counter() as counter:
                loss = objective.compute_loss(own, models, prepared, weight)
            self.attention = counter.attention
            if counter.error:
                report_uncounted(counter.error)
            else:
                self.flops = counter.total // len(prepared.clean)
            return loss

        return replace(objective, compute_loss=compute_loss)

    def measure(self, images_per_second: float) -> dict[str, float]:
        """Return {"memory_gb": at its peak, "host_gb", "tflops": per device, "mfu": share of peak}.

        host_gb: what this process and its loader's processes hold of the host's memory now.
        """
        self.most = max(self.most, measure_memory(self.device)[0] / 1e9)
        host, _ = measure_memory(torch.device("cpu"))
        measured = {"memory_gb": self.most, "host_gb": host / 1e9}
        if self.flops:
            measured["tflops"] = images_per_second / self.num_processes * self.flops / 1e12
            if self.peak:
                measured["mfu"] = measured["tflops"] / self.peak
        return measured

    def describe(self) -> str:
        """Return a sentence with the measured peak."""
        most, reserved = (count / 1e9 for count in measure_memory(self.device))
        if self.total_gb:
            return (
                f"Memory in use: {most:.3g} GB at the peak, {reserved:.3g} reserved, of "
                f"{self.total_gb:.3g}"
            )
        return f"Memory in use: {most:.3g} GB, of this process and its data loader"

    def describe_attention(self) -> str:
        """Return a sentence with the kernels of attention; "" on a CPU, or if none was seen."""
        calls = ", ".join(f"{name} ({count} x)" for name, count in self.attention.items())
        return f"Attention: {calls}" if self.total_gb and calls else ""


def describe_trained(models: Models) -> str:
    """Describe what is trained, such as "LoRA of rank 16: 86,016 of 1.14 M weights"."""
    weights = [weight for model in models.values() for weight in model.parameters()]
    # a stored number of a 4-bit layer holds two weights
    packed = {
        id(layer.weight): layer.in_features * layer.out_features
        for model in models.values()
        for layer in list_quantized(model)
    }
    total = sum(packed.get(id(weight), weight.numel()) for weight in weights)
    count = sum(weight.numel() for weight in weights if weight.requires_grad)
    kinds = {"LORA": "LoRA", "LOKR": "LoKr"}
    adapters = [model.adapter for model in models.values() if is_adapted(model)]
    names = {f"{kinds[each['peft_type']]} of rank {each['r']}: " for each in adapters}
    what = "".join(sorted(names))
    of_all = f" of {format_count(total)}" if count < total else ""
    return f"{what}{format_count(count)}{of_all} weights"


def format_count(number: int) -> str:
    """Format a number, such as 86,016, 1.14 M, 2.57 B."""
    if number < 10**6:
        return f"{number:,}"
    return f"{number / 1e9:.3g} B" if number >= 10**9 else f"{number / 1e6:.3g} M"


def count_moments(parameter: torch.Tensor, optimizer: str, in_block: bool = False) -> int:
    """Return the bytes that --optimizer keeps for a parameter, except for single numbers.

    in_block: see `is_block_matrix`.
    """
    numbers = parameter.numel()
    shape = parameter.shape
    if optimizer == "adafactor":
        return 4 * (numbers // shape[-1] + numbers // shape[-2] if len(shape) > 1 else numbers)
    # two moments in 8 bits, each with a float32 per 256 numbers
    if optimizer == "adamw8bit" and numbers >= 4096:
        return 2 * numbers + 2 * 4 * math.ceil(numbers / 256)
    if optimizer == "prodigy":
        return 4 * 4 * numbers
    return (1 if optimizer == "muon" and in_block else 2) * 4 * numbers


def count_trained(models: Models, optimizer: str) -> tuple[int, int]:
    """Return the bytes of (the trained weights, their moments)."""
    weights = moments = 0
    for model in models.values():
        for name, weight in model.named_parameters():
            if weight.requires_grad:
                weights += weight.nbytes
                moments += count_moments(weight, optimizer, is_block_matrix(name, weight))
    return weights, moments


def count_memory(
    models: Models,
    averaged: Models,
    others: Iterable[torch.nn.Module],
    num_processes: int,
    optimizer: str,
) -> dict[str, int]:
    """Return {kind: bytes} that a training step holds, without activations; see `Costs`."""

    swaps = [model.block_swap for model in models.values() if is_swapped(model)]
    on_host = {id(weight) for swap in swaps for weight in swap.list_weights()}

    def measure(modules: Iterable[torch.nn.Module]) -> dict[int, int]:
        sizes = {}  # by id, because modules share tensors
        for module in modules:
            scales = [getattr(each, "absmax", each) for each in list_scales(module)]
            for tensor in (*module.parameters(), *module.buffers(), *scales):
                if id(tensor) not in on_host:
                    sizes[id(tensor)] = tensor.nbytes
        return sizes

    own = measure(models.values())
    gradients, moments = count_trained(models, optimizer)
    trained = list_parameters(models)
    if any(weight.dtype == torch.bfloat16 for weight in trained):  # --full_bf16
        # one at a time, whose update holds four numbers in float32 for each of the weight's
        gradients = max(4 * 4 * weight.numel() for weight in trained)
    return {
        "weights": sum(own.values()),
        "two swapped blocks": sum(sum(sorted(swap.list_sizes())[-2:]) for swap in swaps),
        "averaged": sum((own | measure(averaged.values())).values()) - sum(own.values()),
        "gradients": gradients,
        "moments": moments,
        "encoders": sum(measure(others).values()),
        "exchanged gradients": gradients * (num_processes > 1),
    }


def count_disk(models: Models, num_averages: int, optimizer: str) -> tuple[int, int]:
    """Return the bytes of (a checkpoint, the result).

    Untrained parts of the result, such as a pipeline's VAE, do not count.
    """
    weights, moments = count_trained(models, optimizer)
    checkpoint = weights * (1 + num_averages) + moments
    if any(map(is_adapted, models.values())):
        checkpoint += weights  # two float16 files for other programs are as large
    return checkpoint, weights


def find_peak(name: str, mixed_precision: str, allow_tf32: bool) -> float | None:
    """Return the TFLOP/s of a GPU by its name, or None if no data sheet gives a number."""
    kinds = [kind for kind in PEAKS if re.search(rf"\b{kind}(?!\w)", name)]
    if not kinds or "MIG" in name:
        return None
    sixteen, tf32 = PEAKS[kinds[0]]
    if mixed_precision == "no":
        return tf32 if allow_tf32 else None
    return None if mixed_precision == "bf16" and tf32 is None else sixteen


def copy_shapes(
    value: Copied, models: Models, others: Iterable[torch.nn.Module] = (), with_norms: bool = True
) -> Copied:
    """Copy an object that holds models, without their values and gradient checkpointing.

    models, others: those whose weights become empty tensors on the meta device. with_norms: False
        leaves out the norms: `count_flops` counts none of their operations, and takes half as long
        without them.
    """
    empty: dict[int, Any] = {}
    for module in (*models.values(), *others):
        for weight in module.parameters():
            shape = torch.empty(weight.shape, device="meta")
            empty[id(weight)] = torch.nn.Parameter(shape, weight.requires_grad)
        for buffer in module.buffers():
            empty[id(buffer)] = torch.empty_like(buffer, device="meta")
        if is_sharded(module):
            empty[id(module)] = copy_empty(module)
        for layer in () if with_norms else module.modules():
            if isinstance(layer, (torch.nn.GroupNorm, torch.nn.LayerNorm)):
                empty[id(layer)] = torch.nn.Identity()
        for layer in list_quantized(module):  # their products would not be counted
            bias = layer.bias is not None
            whole = torch.nn.Linear(layer.in_features, layer.out_features, bias, "meta")
            empty[id(layer)] = whole.requires_grad_(False)
    copied = {name: copy.deepcopy(model, empty) for name, model in models.items()}
    for model in copied.values():
        # checkpointing repeats the forward pass, which is not counted as work of the model
        for segment in list_checkpointed(model):
            del segment.forward
    return copy.deepcopy(value, empty)  # `empty` holds the copies that were made above


def count_flops(copies: Models, objective: Objective, prepared: Prepared) -> int:
    """Count the floating point operations of a forward and a backward pass on one image.

    A multiplication and an addition count as two. Elementwise operations (activations, norms) are
    not counted, as is usual. No device computes anything.

    copies, objective: from `copy_shapes`. prepared: a batch; only its shapes are used.
    """

    with torch.device("meta"), Counter() as counter:
        image = torch.empty_like(prepared.clean[:1], device="meta")
        condition = take_shapes(prepared.condition)
        prepared = Prepared(image, condition, take_shapes(prepared.loss_inputs))
        objective.loss(copies, prepared, torch.ones(1))
    if counter.error:
        raise counter.error
    return counter.total


def report_uncounted(error: Exception) -> None:
    reason = f"the model's operations can't be counted ({explain(error)})"
    print(f"\ntflops are not recorded: {reason}", file=sys.stderr)


class Counter(TorchDispatchMode):
    """Counts the operations of a forward pass, and those that its backward pass will have.

    The backward pass of a product has one product for each factor that needs a gradient. Counted
    in this way, gradient checkpointing changes nothing, and the backward pass need not run.
    """

    total = 0
    error: Exception | None = None  # the first one of torch's formulas

    def __init__(self) -> None:
        super().__init__()
        self.attention: dict[str, int] = {}  # calls of the kernels in `ATTENTION`
        self.counted: dict[Any, int] = {}  # {an operator and its shapes: operations}

    def __torch_dispatch__(
        self, operator: Any, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        result = operator(*args, **(kwargs or {}))
        name = operator.overloadpacket.__name__
        if name in ATTENTION:
            kernel = ATTENTION[name]
            self.attention[kernel] = self.attention.get(kernel, 0) + 1
        formula = flop_registry.get(operator.overloadpacket)
        if formula:
            # torch takes 40 us to apply a formula, which SDXL with a LoRA would need 2,600 times
            key = operator, *(getattr(each, "shape", None) for each in (*args, result))
            try:
                if key not in self.counted:
                    self.counted[key] = formula(*args, **(kwargs or {}), out_val=result)
                forward = self.counted[key]
            except Exception as error:  # of a new version of torch, for example
                self.error = self.error or error
                return result
            if "attention" in name:  # the products of queries and keys, and of weights and values
                query, key, value = (each.requires_grad for each in args[:3])
                passes = 1 + (query + key + (query or key) + value) / 2
            else:
                first = name in ("addmm", "baddbmm")  # their first argument is added
                passes = 1 + sum(each.requires_grad for each in args[first : first + 2])
            self.total += int(forward * passes)
        return result
