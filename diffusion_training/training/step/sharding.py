"""--shard: each process holds a part of every weight, average and moment, by torch's fully_shard.

The results are the same as with DDP. A block of the model is whole only while it is used. Functions
with "on every process" in their docstrings wait until all processes call them.
"""

import warnings
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from diffusion_training.batches import Models
from diffusion_training.models import DTYPE


def is_sharded(model: torch.nn.Module) -> bool:
    return isinstance(model, FSDPModule)


def list_gathered(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The parts of a model that are gathered one at a time, inner ones before outer ones.

    diffusers names their classes, or the model has `blocks`.
    """
    names = {*(getattr(model, "_no_split_modules", None) or ())}
    # sharding makes a subclass of a module's class
    named = [x for x in model.modules() if names & {kind.__name__ for kind in type(x).__mro__}]
    return named[::-1] or [*getattr(model, "blocks", ())]


def shard(model: torch.nn.Module, device: torch.device) -> None:
    """Split a model over the devices, in place. Call it on every process.

    The weights come from the first process; others may have a model without numbers.
    """
    weights = model.state_dict()
    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    for module in (*list_gathered(model), model):
        # Also the model itself: otherwise its own weights would stay whole after sampling.
        part = fully_shard(module, mesh=mesh, reshard_after_forward=True)
        part.set_force_sum_reduction_for_comms(True)  # older versions of gloo have no mean
    scatter_weights(model, weights)


def scatter_weights(model: torch.nn.Module, weights: dict[str, Any]) -> None:
    """Load weights into a sharded model. Call it on every process.

    weights: {name: whole tensor}; only those of the first process are read.
    """
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    with warnings.catch_warnings(action="ignore"):  # torch warns about a function of its own
        set_model_state_dict(model, weights, options=options)


def copy_empty(model: torch.nn.Module) -> torch.nn.Module:
    """A model like a sharded one, on the meta device."""
    with torch.device("meta"):
        return type(model).from_config(model.config)


def load_weights_of(model: torch.nn.Module, folder: Path) -> None:
    """Load what `save_pretrained` wrote. Call it on every process; only the first one reads."""
    if not is_sharded(model):
        dtype = {DTYPE: next(model.parameters()).dtype}  # float32 would take twice the memory
        model.load_state_dict(type(model).from_pretrained(folder, **dtype).state_dict())
        return
    whole = copy_empty(model)
    if torch.distributed.get_rank() == 0:  # fails if the weights are of another model
        whole.load_state_dict(type(whole).from_pretrained(folder).state_dict(), assign=True)
    scatter_weights(model, whole.state_dict())


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Gather a tensor's parts on all processes. Call it on every process."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gather_state(source: torch.nn.Module | torch.optim.Optimizer) -> dict[str, Any]:
    """Gather the state of a model or an optimizer, tensor by tensor, on the first process's CPU.

    Call it on every process. The others get sharded tensors without their numbers.
    """

    def gather_tensor(part: DTensor) -> torch.Tensor:
        return part.full_tensor().to("meta" if torch.distributed.get_rank() else "cpu")

    return tree_map_only(DTensor, gather_tensor, source.state_dict())


def gather_model(model: torch.nn.Module) -> torch.nn.Module:
    """Gather a sharded model on the first process; return other models unchanged.

    Call it on every process. The others get a model without numbers.
    """
    if not is_sharded(model):
        return model
    whole = copy_empty(model)
    whole.load_state_dict(gather_state(model), assign=True)
    return whole


def share_memory(
    sizes: dict[str, int], models: Models, num_processes: int, copied: float
) -> dict[str, int]:
    """{kind: bytes} that one process holds of sharded models.

    "whole blocks" are the weights outside the blocks and their gradients, and for the largest block
    its weights, those of the next block, its gradients, and the buffer in which they are sent.

    sizes: those without sharding, see `count_memory`.
    copied: the share of the weights with 16-bit copies from the forward to the backward pass.
    """
    whole = kept = 0
    for model in models.values():
        counted: set[torch.Tensor] = set()
        counts = []
        for module in (*list_gathered(model), model):
            own = {*module.parameters()} - counted
            counted |= own
            counts.append(sum(weight.numel() for weight in own))
        *blocks, outside = counts
        whole += 4 * (2 * outside + 4 * max(blocks, default=0))
        kept += int(copied * 2 * sum(counts))
    shared = ("weights", "averaged", "gradients", "moments")
    parts = {what: sizes[what] // num_processes for what in shared}
    return sizes | parts | {"exchanged gradients": 0, "whole blocks": whole, "copies in bf16": kept}
