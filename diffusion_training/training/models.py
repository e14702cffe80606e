"""Models: loaded whole, moved, compiled, averaged, saved."""

import argparse
import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import DynamoBackend, TorchDynamoPlugin
from safetensors.torch import load_file, save_file
from torch.optim.swa_utils import get_ema_multi_avg_fn

from diffusion_training.errors import explained
from diffusion_training.training.lora import is_adapted, load_adapter, save_adapter

Models = dict[str, torch.nn.Module]
# images, condition, loss_inputs
Prepared = tuple[torch.Tensor, dict[str, torch.Tensor], dict[str, torch.Tensor]]


def load_weights(kind: Any, source: str | None, **options: Any) -> torch.nn.Module:
    """`kind.from_pretrained`, but raise ValueError if weights are missing or have other shapes.

    Such weights would be random, or not there at all.
    """
    model, info = kind.from_pretrained(source, output_loading_info=True, **options)
    for what in ("missing_keys", "mismatched_keys"):
        if info[what]:
            raise ValueError(
                f"{len(info[what])} {what.replace('_', ' ')}, such as "
                f"{sorted(map(str, info[what]))[0]}"
            )
    return model


def call_unet(
    unet: torch.nn.Module,
    noisy_images: torch.Tensor,
    timesteps: torch.Tensor,
    condition: dict[str, torch.Tensor],
) -> torch.Tensor:
    """Return the prediction of a U-Net, float32 [N, C, H, W].

    condition: {name: tensor [N, ...]}, its other inputs. SDXL's inputs besides embeddings are
    passed as one dict, as diffusers requires.
    """
    added = {name: condition[name] for name in ("text_embeds", "time_ids") if name in condition}
    others = {name: value for name, value in condition.items() if name not in added}
    others |= {"added_cond_kwargs": added} if added else {}
    return unet(noisy_images, timesteps, **others).sample.float()


def try_shapes(
    unet: torch.nn.Module, source: str | None, shape: Sequence[int], **condition: Sequence[int]
) -> None:
    """Call a U-Net, built from its config without numbers, on images of a shape [C, H, W].

    Stops with an error if that fails.

    condition: {name: shape for one image}; an empty shape is a label.
    """
    with (
        torch.device("meta"),
        torch.no_grad(),
        explained(f"the U-Net of {source} can't be trained here"),
    ):
        given = {
            name: torch.zeros(1, *of, dtype=None if of else torch.long)
            for name, of in condition.items()
        }
        found = call_unet(
            type(unet).from_config(unet.config), torch.zeros(1, *shape), torch.zeros(1), given
        )
        if list(found.shape[1:]) != list(shape):
            raise ValueError(f"it gives {list(found.shape[1:])} for {list(shape)}")


def put_on_device(model: torch.nn.Module, device: torch.device) -> torch.nn.Module:
    """Move a model; on CUDA, also use the memory layout that is fastest for convolutions."""
    return model.to(
        device,
        memory_format=torch.channels_last if device.type == "cuda" else torch.preserve_format,
    )


def compile_model(model: torch.nn.Module, backend: str, num_sizes: int = 1) -> None:
    """Compile a model in place, with the options that `accelerate config` set.

    In place, the weights keep their names. With several image sizes, each is compiled separately:
    code that handles all of them is slower.
    """
    options, dynamo = {}, TorchDynamoPlugin()
    if dynamo.backend != DynamoBackend.NO:  # else nobody asked for the launcher's dynamic=False
        options = {"mode": dynamo.mode, "fullgraph": dynamo.fullgraph, "dynamic": dynamo.dynamic}
    if num_sizes > 1:
        options["dynamic"] = False
        # beyond this limit, torch silently stops compiling
        torch._dynamo.config.recompile_limit = 8 * num_sizes
    with explained(f"torch.compile with {backend} is not possible"):
        if dynamo.use_regional_compilation and dynamo.backend != DynamoBackend.NO:
            model.compile_repeated_blocks(backend=backend, **options)
        else:
            model.compile(backend=backend, **options)


def list_parameters(models: Models) -> list[torch.nn.Parameter]:
    """Return the trained parameters of all of {name: model}, in order."""
    return [
        parameter
        for model in models.values()
        for parameter in model.parameters()
        if parameter.requires_grad
    ]


def is_block_matrix(name: str, weight: torch.Tensor) -> bool:
    """Return whether a parameter is a matrix in a transformer's `blocks`: Muon is for these."""
    return weight.dim() == 2 and ".blocks." in f".{name}"


def copy_trained(model: torch.nn.Module) -> torch.nn.Module:
    """Return a copy that shares the frozen weights, which are gigabytes when a LoRA is trained."""
    return copy.deepcopy(
        model, {id(weight): weight for weight in model.parameters() if not weight.requires_grad}
    )


def start_average(models: Models) -> Models:
    """Return copies of the models for `update_ema`, with nothing trainable."""
    return {
        name: copy_trained(model).eval().requires_grad_(False) for name, model in models.items()
    }


def update_ema(averaged: Models, models: Models, step: int, args: argparse.Namespace) -> None:
    """Move the averaged weights towards the trained ones after `step` optimizer steps.

    The decay warms up as in diffusers' EMAModel (after @crowsonkb); the first step copies.
    """
    decay = min(args.ema_max_decay, 1 - (1 + (step - 1) / args.ema_inv_gamma) ** -args.ema_power)
    pairs = [
        zip(averaged[name].parameters(), models[name].parameters(), strict=True) for name in models
    ]
    means, weights = zip(
        *(pair for each in pairs for pair in each if pair[1].requires_grad), strict=True
    )
    get_ema_multi_avg_fn(decay)(means, weights, None)


def save_weights(model: torch.nn.Module, folder: Path) -> None:
    """Save a model for `from_pretrained`, a LoRA as its adapter, other modules as their weights."""
    if is_adapted(model):
        save_adapter(model, folder)
    elif hasattr(model, "save_pretrained"):
        model.save_pretrained(folder)
    else:
        folder.mkdir(parents=True)
        save_file(model.state_dict(), folder / "model.safetensors")


def read_weights(model: torch.nn.Module, folder: Path) -> None:
    """Load what `save_weights` has written."""
    if is_adapted(model) or (folder / "adapter_config.json").is_file():
        load_adapter(model, folder)
    elif hasattr(model, "save_pretrained"):
        model.load_state_dict(type(model).from_pretrained(folder).state_dict())
    else:
        model.load_state_dict(load_file(folder / "model.safetensors"))
