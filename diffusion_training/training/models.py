"""Models: loaded whole, moved, compiled, averaged, saved."""

import copy

import torch
from accelerate.utils import DynamoBackend, TorchDynamoPlugin
from safetensors.torch import load_file, save_file
from torch.optim.swa_utils import get_ema_multi_avg_fn

from diffusion_training.errors import explained


def load_weights(kind, source, **options):
    """`kind.from_pretrained`, but all weights must be there: others would be random, or not there at all."""
    model, info = kind.from_pretrained(source, output_loading_info=True, **options)
    for what in ("missing_keys", "mismatched_keys"):
        if info[what]:
            raise ValueError(f"{len(info[what])} {what.replace('_', ' ')}, such as {sorted(map(str, info[what]))[0]}")
    return model


def try_shapes(unet, source, shape, **condition):
    """Call a U-Net's config with images of a shape [C, H, W], without numbers, and end the program if that fails.

    condition: {name: shape of one image's}; what has none is a label.
    """
    with torch.device("meta"), torch.no_grad(), explained(f"the U-Net of {source} can't be trained here"):
        given = {name: torch.zeros(1, *of, dtype=None if of else torch.long) for name, of in condition.items()}
        found = type(unet).from_config(unet.config)(torch.zeros(1, *shape), torch.zeros(1), **given).sample.shape[1:]
        if list(found) != list(shape):
            raise ValueError(f"it gives {list(found)} for {list(shape)}")


def put_on_device(model, device):
    """Move a model; on CUDA its convolutions get the memory layout that they are fastest in."""
    return model.to(device, memory_format=torch.channels_last if device.type == "cuda" else torch.preserve_format)


def compile_model(model, backend):
    """torch.compile in place, which keeps the names of the weights, with the options that `accelerate config` set."""
    options, dynamo = {}, TorchDynamoPlugin()
    if dynamo.backend != DynamoBackend.NO:  # else the launcher's dynamic=False is nobody's wish
        options = {"mode": dynamo.mode, "fullgraph": dynamo.fullgraph, "dynamic": dynamo.dynamic}
    with explained(f"torch.compile with {backend} is not possible"):
        if options and dynamo.use_regional_compilation:
            model.compile_repeated_blocks(backend=backend, **options)
        else:
            model.compile(backend=backend, **options)


def list_parameters(models):
    """The parameters of all of {name: model}, in order."""
    return [parameter for model in models.values() for parameter in model.parameters()]


def start_average(models):
    """Copies of the models for `update_ema`, of which nothing is trained."""
    return {name: copy.deepcopy(model).eval().requires_grad_(False) for name, model in models.items()}


def update_ema(averaged, models, step, args):
    """Move the averaged weights towards the trained ones after optimizer step `step`, counted from 1.

    The decay warms up as in diffusers' EMAModel (after @crowsonkb); the first step copies.
    """
    decay = min(args.ema_max_decay, 1 - (1 + (step - 1) / args.ema_inv_gamma) ** -args.ema_power)
    get_ema_multi_avg_fn(decay)(list_parameters(averaged), list_parameters(models), None)


def save_weights(model, folder):
    """Save a model as `from_pretrained` reads it, or any other module as its weights alone."""
    if hasattr(model, "save_pretrained"):
        model.save_pretrained(folder)
    else:
        folder.mkdir(parents=True)
        save_file(model.state_dict(), folder / "model.safetensors")


def read_weights(model, folder):
    """Load what `save_weights` has written."""
    if hasattr(model, "save_pretrained"):
        model.load_state_dict(type(model).from_pretrained(folder).state_dict())
    else:
        model.load_state_dict(load_file(folder / "model.safetensors"))
