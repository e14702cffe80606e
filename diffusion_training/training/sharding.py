"""--shard: each process holds a part of every weight, average and moment, by torch's fully_shard.

The results are the same as with DDP. A block of the model is whole only while it is used. Functions
with "on every process" in their docstrings wait until all processes call them.
"""

from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from diffusion_training.batches import Models


def is_sharded(model: torch.nn.Module) -> bool:
    return isinstance(model, FSDPModule)


def list_blocks(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The parts of a model that are gathered one at a time, inner ones before outer ones.

    diffusers names their classes, or the model has `blocks`.
    """
    names = {*(getattr(model, "_no_split_modules", None) or ())}
    named = []
    for part in model.modules():
        if names & {kind.__name__ for kind in type(part).__mro__}:  # sharding makes a subclass
            named.append(part)
    return named[::-1] or [*getattr(model, "blocks", ())]


def shard(model: torch.nn.Module, device: torch.device) -> None:
    """Split a model over the devices, in place. Call it on every process.

    The weights come from the first process; others may have a model without numbers.
    """
    weights = model.state_dict()
    mesh = init_device_mesh(device.type, (torch.distributed.get_world_size(),))
    for module in (*list_blocks(model), model):
        # Also the model itself: otherwise its own weights would stay whole after sampling.
        part = fully_shard(module, mesh=mesh, reshard_after_forward=True)
        part.set_force_sum_reduction_for_comms(True)  # older versions of gloo have no mean
    scatter_weights(model, weights, assign=True)


def scatter_weights(model: torch.nn.Module, weights: dict[str, Any], assign: bool = False) -> None:
    """Load weights into a sharded model. Call it on every process.

    weights: {name: whole tensor}; only those of the first process are read.
    assign: whether the model gets new tensors, because it has none yet.
    """
    parts = {}
    for name, own in model.state_dict().items():
        if isinstance(own, DTensor):
            device: Any = own.device_mesh.device_type
        else:
            device = own.device
        if torch.distributed.get_rank() == 0:
            whole = weights[name].to(device)
        else:
            whole = torch.empty(own.shape, dtype=own.dtype, device=device)
        if isinstance(own, DTensor):
            parts[name] = distribute_tensor(whole, own.device_mesh, own.placements)
        else:  # a buffer
            torch.distributed.broadcast(whole, 0)
            parts[name] = whole
    model.load_state_dict(parts, assign=assign)


def copy_empty(model: torch.nn.Module) -> torch.nn.Module:
    """A model like a sharded one, on the meta device."""
    with torch.device("meta"):
        return type(model).from_config(model.config)


def load_weights_of(model: torch.nn.Module, folder: Path) -> None:
    """Load what `save_pretrained` wrote. Call it on every process; only the first one reads."""
    if not is_sharded(model):
        model.load_state_dict(type(model).from_pretrained(folder).state_dict())
        return
    whole = copy_empty(model)
    if torch.distributed.get_rank() == 0:  # fails if the weights are of another model
        whole.load_state_dict(type(whole).from_pretrained(folder).state_dict(), assign=True)
    scatter_weights(model, whole.state_dict())


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Gather a tensor's parts on all processes. Call it on every process."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def gather_tensor(value: Any) -> Any:
    """Gather a sharded tensor on the first process's CPU; return other values unchanged.

    Call it on every process. The others get None for a sharded tensor.
    """
    if not isinstance(value, DTensor):
        return value
    gathered = whole(value)
    return gathered.cpu() if torch.distributed.get_rank() == 0 else None


def gather_model(model: torch.nn.Module) -> torch.nn.Module:
    """Gather a sharded model on the first process; return other models unchanged.

    Call it on every process.
    """
    if not is_sharded(model):
        return model
    weights = {name: gather_tensor(value) for name, value in model.state_dict().items()}
    whole = copy_empty(model)
    if torch.distributed.get_rank() == 0:
        whole.load_state_dict(weights, assign=True)
    return whole


def gather_state(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Gather an optimizer's state on the first process. Call it on every process."""
    saved = optimizer.state_dict()
    saved["state"] = {
        index: {name: gather_tensor(value) for name, value in state.items()}
        for index, state in saved["state"].items()
    }
    return saved


def take_part(value: Any, parameter: torch.Tensor) -> Any:
    """This process's part of an entry of the optimizer's state for `parameter`."""
    if not isinstance(parameter, DTensor) or not torch.is_tensor(value) or value.dim() == 0:
        return value
    mesh, placements = parameter.device_mesh, parameter.placements
    return distribute_tensor(value, mesh, placements, src_data_rank=None)


def share_memory(
    sizes: dict[str, int], models: Models, num_processes: int, keeps_copies: bool
) -> dict[str, int]:
    """{kind: bytes} that one process holds of sharded models.

    "whole blocks" are the weights outside the blocks and their gradients, and for the largest block
    its weights, those of the next block, its gradients, and the buffer in which they are sent.

    sizes: those without sharding, see `count_memory`.
    keeps_copies: whether all weights have 16-bit copies from the forward to the backward pass.
    """
    shared = ("weights", "averaged", "gradients", "moments")
    whole = kept = 0
    for model in models.values():
        largest = 0
        counted: set[int] = set()
        for module in (*list_blocks(model), model):
            own = {id(x): x.numel() for x in module.parameters() if id(x) not in counted}
            counted |= own.keys()
            if module is not model:
                largest = max(largest, sum(own.values()))
        whole += 4 * (2 * sum(own.values()) + 4 * largest)
        kept += keeps_copies * 2 * sum(weight.numel() for weight in model.parameters())
    parts = {what: sizes[what] // num_processes for what in shared}
    whole_ones = {"exchanged gradients": 0, "whole blocks": whole, "copies in bf16": kept}
    return sizes | parts | whole_ones
