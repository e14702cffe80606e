"""Prints what ComfyUI's own loader finds of LoRA files; a program of its own, for its imports.

python tests/comfyui_loader.py COMFYUI FOLDER, where each folder in FOLDER holds a LoRA and
model.json, which describes its transformer: {"shapes": of its weights, "config": ComfyUI's config
of the model, or null}. Without a config, ComfyUI finds it out from the weights. Prints
{name: [ComfyUI's class, the LoRA's keys that it leaves out, those that do not fit the model]}.
"""

import json
import logging
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from unittest.mock import MagicMock

import torch
from safetensors.torch import load_file

# packages with which ComfyUI computes, which nothing here does
UNUSED = (
    "av comfy_aimdo comfy_api comfy_kitchen einops kornia scipy sentencepiece spandrel torchsde"
)


class Unused:
    """Imports each of these packages as an object that does nothing."""

    def find_spec(self, name, path=None, target=None):
        is_unused = name.partition(".")[0] in UNUSED.split()
        return ModuleSpec(name, self, is_package=True) if is_unused else None

    def create_module(self, spec):
        module = MagicMock(name=spec.name, __spec__=spec)
        module.__path__ = []
        module.Rearrange = torch.nn.Identity  # einops' layer
        return module

    def exec_module(self, module):
        pass


comfyui, folder = Path(sys.argv[1]), Path(sys.argv[2])
sys.path.insert(0, str(comfyui))
sys.meta_path.append(Unused())
sys.argv[1:] = ["--cpu"]
logging.disable(logging.CRITICAL)

import comfy.options  # noqa: E402

comfy.options.enable_args_parsing()

import comfy.lora  # noqa: E402
from comfy.model_detection import (  # noqa: E402
    convert_diffusers_mmdit,
    model_config_from_unet,
    model_config_from_unet_config,
)


def find_config(shapes):
    """ComfyUI's config of the model with these weights, which may have diffusers' names."""
    weights = {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    if config := model_config_from_unet(weights, ""):
        return config
    return model_config_from_unet(convert_diffusers_mmdit(weights, ""), "")


def fits(target, adapter, own):
    """Whether a LoRA's product has the shape of the weight that it is added to."""
    name, (dim, _, length) = target if isinstance(target, tuple) else (target, (0, 0, None))
    if name not in own:
        return False
    shape = [*own[name].shape]
    shape[dim] = length or shape[dim]
    up, down = adapter.weights[:2]
    return [up.shape[0], down.shape[1]] == shape


results = {}
for each in sorted(folder.iterdir()):
    about = json.loads((each / "model.json").read_text())
    config = about["config"]
    config = model_config_from_unet_config(config) if config else find_config(about["shapes"])
    model = config.get_model({}, device="meta")
    lora = load_file(each / "pytorch_lora_weights.safetensors")
    names = comfy.lora.model_lora_keys_unet(model, {})
    found = comfy.lora.load_lora(lora, names, log_missing=False)
    own = model.state_dict()
    read = set().union(*(adapter.loaded_keys for adapter in found.values()))
    misfits = [str(target) for target, adapter in found.items() if not fits(target, adapter, own)]
    results[each.name] = [type(model).__name__, sorted(lora.keys() - read), misfits]
print(json.dumps(results))
