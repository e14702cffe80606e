"""Copy what a checkpoint holds, so that it can be written while the training goes on."""

import copy
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import torch
from diffusers import ModelMixin
from torch.utils._pytree import tree_map_only

from diffusion_training.batches import Models
from diffusion_training.errors.faults import explain
from diffusion_training.host_memory import HostMemory, measure_free
from diffusion_training.launch import Launch
from diffusion_training.memory import is_gpu
from diffusion_training.models import is_adapted
from diffusion_training.training.step.costs import copy_shapes, count_trained
from diffusion_training.training.step.sharding import is_sharded, whole


class CheckpointCopy:
    """Copies of models and of their optimizer's state, on the first process.

    Their memory is allocated once, so no later checkpoint can run out of memory.

    saved: {name: model} of a checkpoint, before Accelerate wraps them. memory: for `count_copy`.
    """

    def __init__(self, saved: Models, memory: HostMemory, device: torch.device) -> None:
        self.device = device
        self.memory = memory
        self.copies: Models = {}
        # (dict of a module that holds a value, its key there, the copy), listed once: all modules
        # of SDXL are visited in 40 ms. A module may replace a value, but not the dict.
        self.places: list[tuple[dict[str, Any], str, torch.Tensor]] = []
        for name, model in saved.items():
            weights = {}
            for key, value in list_saved(model).items():
                module_name, _, attribute = key.rpartition(".")
                module = model.get_submodule(module_name)
                is_weight = attribute in module._parameters
                holder: Any = module._parameters if is_weight else module._buffers
                shape = torch.empty(value.shape, dtype=value.dtype, device="meta")  # contiguous
                weights[key] = self.memory.cut(shape)
                self.places.append((holder, attribute, weights[key]))
            self.copies[name] = hold_weights(model, weights)
        self.state: dict[str, Any] = {}  # of the optimizer
        # its tensors, in the order of `state_dict`: to cut them takes a third of a LoRA's pause
        self.state_copies: list[torch.Tensor] = []

    def take(self, optimizer: torch.optim.Optimizer) -> None:
        """Copy the values as they are now. The host does not wait for a GPU.

        With --shard, the other processes call `give_parts` at the same time.
        """
        is_async = is_gpu(self.device)
        for holder, key, place in self.places:
            # contiguous, as safetensors needs it; a GPU is faster at this than the host
            place.copy_(whole(holder[key].detach()).contiguous(), non_blocking=is_async)
        copies: dict[int, torch.Tensor] = {}  # parameters may share a tensor, as in bitsandbytes

        def copy_once(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) not in copies:
                value = whole(tensor).detach()
                place = len(copies)
                if place == len(self.state_copies) or not is_alike(self.state_copies[place], value):
                    self.state_copies[place:] = [self.memory.cut(value)]
                copy = self.state_copies[place].copy_(value, non_blocking=is_async)
                copies[id(tensor)] = copy
            return copies[id(tensor)]

        self.state = tree_map_only(torch.Tensor, copy_once, optimizer.state_dict())
        if is_async:
            stream = torch.get_device_module(self.device).current_stream()
            self.copied = stream.record_event()

    def models(self) -> Iterator[tuple[str, torch.nn.Module]]:
        """Each name and copy, when they are complete. See `hold_weights`."""
        if is_gpu(self.device):
            self.copied.synchronize()
        yield from self.copies.items()

    def moments(self) -> dict[str, Any]:
        """The optimizer's state. Call it after `models`."""
        return self.state


def is_alike(copy: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether a copy has the shape and type of a value. Optimizers may add tensors later."""
    return copy.shape == value.shape and copy.dtype == value.dtype


def list_saved(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The weights and buffers that `save_weights` writes, by their names in the model."""
    if is_adapted(model):
        weights = model.named_parameters()
        return {name: x for name, x in weights if ".lora_" in name or ".lokr_" in name}
    return model.state_dict()


def hold_weights(model: torch.nn.Module, weights: dict[str, torch.Tensor]) -> torch.nn.Module:
    """A model that is saved like another one, but with these weights.

    LoRAs and diffusers' models are saved by `named_parameters` and `state_dict` alone, so the
    modules of these copies are those of the training. Other models may read their modules.
    """
    if is_adapted(model) or (isinstance(model, ModelMixin) and not is_sharded(model)):
        held: Any = copy.copy(model)
        held.state_dict = lambda: weights
        held.named_parameters = weights.items
    else:
        held = copy_shapes(model, {"": model})
        held.load_state_dict(weights, strict=False, assign=True)
    return held


def count_copy(saved: Models, moments: int) -> int:
    """Return the bytes of a `CheckpointCopy`. moments: bytes of the optimizer's."""
    weights = [value.nbytes for model in saved.values() for value in list_saved(model).values()]
    return sum(weights) + moments


def make_checkpoint_copy(
    launch: Launch, saved: Models, models: Models, step: int, args: Namespace
) -> CheckpointCopy | None:
    """Take the memory for copies, on the first process; None if the training waits for checkpoints.

    It waits if only the last step saves one, or if there is not enough memory, which is printed.
    A tenth of the free memory stays free.
    """
    due = (step // args.checkpointing_steps + 1) * args.checkpointing_steps
    if not launch.is_main or args.find_lr or due >= args.max_train_steps:
        return None
    gradients, moments = count_trained(models, args.optimizer)  # gradients are as large as weights
    needed = count_copy(saved, moments)
    free = measure_free()
    if launch.device.type == "cpu":  # the first step will take gradients and moments from the same
        free -= gradients + moments
    reason = f"{max(0, free) / 1e9:.3g} GB are free"
    if needed < 0.9 * free:
        try:
            return CheckpointCopy(saved, HostMemory(needed, launch.device), launch.device)
        except RuntimeError as error:  # another limit, such as that of pinned memory
            reason = explain(error)
    print(
        "The training waits while a checkpoint is written: there is no memory for a copy of "
        f"{needed / 1e9:.3g} GB ({reason})"
    )
    return None
