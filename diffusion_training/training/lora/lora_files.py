"""Read LoRA files of other programs: weights, settings and scales."""

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers.utils.state_dict_utils import convert_unet_state_dict_to_peft
from safetensors import safe_open
from safetensors.torch import load_file

from diffusion_training.errors.sentences import is_local_main
from diffusion_training.families.base import MAGNITUDE, Family, leave_out_adapter
from diffusion_training.models import NOT_FINITE, is_finite, raise_for_keys

# (weights, alphas, settings) of a LoRA file; see `Family.convert_lora`
ReadLora = Callable[[Path, torch.nn.Module], tuple[dict, dict, dict]]

LORA_FILE = "pytorch_lora_weights.safetensors"  # as diffusers names it
KOHYA_FILE = "pytorch_lora_weights_kohya.safetensors"  # a U-Net's, without --output_name
PEFT_FILE = "adapter_model.safetensors"  # of a PeftModel, with adapter_config.json beside it
PEFT_PREFIX = "base_model.model."
LORA_A = "lora_A.weight"
LORA_B = "lora_B.weight"
DORA_SCALE = "dora_scale"  # the same, as kohya's LyCORIS names it
# The factors of a LoKr, as all programs name them. w2 is a product of two matrices, or whole.
LOKR_W1 = "lokr_w1"
LOKR_W2 = "lokr_w2"
LOKR_W2_A = "lokr_w2_a"
LOKR_W2_B = "lokr_w2_b"
LOKR_PARTS = (LOKR_W1, LOKR_W2, LOKR_W2_A, LOKR_W2_B)
# PEFT's settings that are read, or that do not change what the file does. All others must have
# their defaults.
KNOWN_SETTINGS = {
    "alpha_pattern", "auto_mapping", "base_model_name_or_path", "base_sha256", "eva_config",
    "exclude_modules", "fan_in_fan_out", "inference_mode", "layers_pattern", "layers_to_transform",
    "lora_alpha", "lora_dropout", "peft_version", "quantization", "r", "rank_pattern", "revision",
    "target_modules", "task_type", "use_dora", "use_rslora",
}  # fmt: skip
# Other initializations (PiSSA, OLoRA, LoftQ, ...) change the base, too.
KNOWN_INITIALIZATIONS = (True, False, "gaussian", "eva", "orthogonal")


@dataclass(frozen=True)
class LoraFile:
    """What a LoRA file does to a model.

    layers: {layer: {LORA_A, LORA_B and, in a DoRA, MAGNITUDE or DORA_SCALE: tensor}}; in a LoKr
    {layer: {LOKR_W1, and LOKR_W2 or its two factors: tensor}}.
    """

    layers: dict[str, dict[str, torch.Tensor]]
    scales: dict[str, float]  # {layer: factor of B @ A, or of a LoKr's product}
    is_relative: bool  # whether dora_scale is relative to the base, see `convert_to_kohya`
    num_left_out: int  # weights for text encoders, which are skipped
    header: dict[str, str]


def split_name(name: str) -> tuple[str, str]:
    """Split the name of a weight: (layer, one of the parts). Raises ValueError for others."""
    for part in (LORA_A, LORA_B, MAGNITUDE, DORA_SCALE, *LOKR_PARTS):
        if name.endswith(f".{part}"):
            return name.removesuffix(f".{part}"), part
    raise ValueError(f"it holds {name}, which is not used here")


def read_lora_file(
    path: str | Path, model: torch.nn.Module, name: str, convert_lora: ReadLora
) -> LoraFile:
    """Read a LoRA file of diffusers, PEFT, kohya's scripts or this package.

    path: the file, or the output folder of a run. name: what the file calls the model. Raises
    ValueError for weights and settings that are not used, except weights for text encoders.
    """
    path = Path(path)
    if path.is_dir():
        path /= LORA_FILE
    if path.exists() and not path.is_file():  # a pipe might never end
        raise ValueError("it is not a file")
    with safe_open(path, "pt") as opened:
        names = list(opened.keys())
        header = opened.metadata() or {}
    is_lokr = any(".lokr_" in key for key in names)
    if path.name == PEFT_FILE or any(key.startswith(PEFT_PREFIX) for key in names):
        weights, alphas, settings = read_peft_file(path, name)
    elif is_lokr and all(key.startswith(f"{name}.") for key in names):  # ours
        weights, alphas, settings = load_file(path), {}, {}
    else:
        weights, alphas, settings = convert_lora(path, model)
    named = {key: value for key, value in weights.items() if not key.startswith("text_encoder")}
    for key in named:
        if not key.startswith(f"{name}."):
            raise ValueError(f"it holds {key}, which is not used here")
    own = {leave_out_adapter(key): value for key, value in strip(named, name).items()}
    alphas = strip(alphas, name)
    settings = strip(settings, name)
    if not is_lokr and not any(f".{LORA_A}" in key for key in own):  # of diffusers before PEFT
        own = convert_unet_state_dict_to_peft(own)
        alphas = convert_unet_state_dict_to_peft(alphas)
    alphas = {key.split(".lora_A.")[0].removesuffix(".alpha"): x for key, x in alphas.items()}
    check_settings(settings)
    layers = group_by_layer(own)
    if not layers:
        raise ValueError(f"it holds no LoRA for {name}")
    check_layers(layers, model)
    if unused := alphas.keys() - layers.keys():
        raise ValueError(f"it holds {min(unused)}.alpha, which is not used here")
    scales = {}
    for layer, parts in layers.items():
        inner = parts.get(LORA_A, parts.get(LOKR_W2_B))  # [rank, ...]
        if inner is None:  # LyCORIS ignores alpha if w2 is whole
            scales[layer] = 1.0
        elif layer in alphas:
            scales[layer] = float(alphas[layer]) / len(inner)
        else:
            scales[layer] = read_scale(settings, layer, len(inner))
        if not math.isfinite(scales[layer]):
            raise ValueError(f"the alpha of its {layer} is NaN or infinity")
    return LoraFile(
        layers=layers,
        scales=scales,
        is_relative="diffusion_training.dora_scale" in header,
        num_left_out=sum(key.startswith(("text_encoder", "lora_te")) for key in names),
        header=header,
    )


def check_layers(layers: dict[str, dict[str, torch.Tensor]], model: torch.nn.Module) -> None:
    """Raise ValueError for layers that the model lacks, and for factors that do not fit together.

    diffusers misreads the names of some files. layers: see `LoraFile`. model: with or without
    adapters.
    """
    modules = dict(model.named_modules())
    broken = []
    for layer, parts in layers.items():
        module: Any = modules.get(layer)
        if not hasattr(getattr(module, "base_layer", module), "weight"):
            raise ValueError(
                f"the model has no layer {layer}: the file is of another model, or diffusers "
                "misreads its names"
            )
        broken += [f"{layer}.{part}" for part, x in parts.items() if not is_finite(x.float())]
        for inner, outer in ((LORA_A, LORA_B), (LOKR_W2_B, LOKR_W2_A)):
            if inner not in parts or outer not in parts:
                continue
            if min(parts[inner].dim(), parts[outer].dim()) < 2:
                raise ValueError(f"its {layer}.{inner} or {outer} is no matrix")
            ranks = len(parts[inner]), parts[outer].flatten(1).shape[1]
            if ranks[0] != ranks[1] or ranks[0] == 0:
                raise ValueError(
                    f"the rank of its {layer}.{inner} is {ranks[0]}, and that of {outer} {ranks[1]}"
                )
    raise_for_keys(NOT_FINITE, broken)


def tell_left_out(file: LoraFile, flag: str) -> None:
    """Print that weights for text encoders are skipped. flag: that names the file."""
    if file.num_left_out and is_local_main():
        print(
            f"{flag}: {file.num_left_out} weights for text encoders are skipped, because text "
            "encoders are not trained"
        )


def read_plain_lora(path: str, model: torch.nn.Module, family: Family) -> LoraFile:
    """Read a LoRA file for a model without adapters. Raises ValueError if it does not fit."""
    file = read_lora_file(path, model, family.folder, family.convert_lora)
    modules = dict(model.named_modules())
    for layer, parts in file.layers.items():
        if parts.keys() != {LORA_A, LORA_B}:
            raise ValueError(f"its layer {layer} is of a DoRA or LoKr, and only LoRAs can be used")
        weight = modules[layer].weight.flatten(1)
        shapes = (parts[LORA_B].flatten(1).shape[0], parts[LORA_A].flatten(1).shape[1])
        if shapes != tuple(weight.shape):
            raise ValueError(f"{layer} has another width")
    return file


def strip(named: dict[str, Any], name: str) -> dict[str, Any]:
    """The entries that belong to a model, without its name."""
    prefix = f"{name}."
    return {k.removeprefix(prefix): v for k, v in named.items() if k.startswith(prefix)}


def group_by_layer(weights: dict[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    """Group {name: weight} as {layer: {part: weight}}. Raises ValueError for other or no parts."""
    layers: dict[str, dict[str, torch.Tensor]] = {}
    for key, value in weights.items():
        layer, part = split_name(key)
        layers.setdefault(layer, {})[part] = value
    whole = ({LORA_A, LORA_B}, {LOKR_W1, LOKR_W2}, {LOKR_W1, LOKR_W2_A, LOKR_W2_B})
    for layer, parts in layers.items():
        if not any(needed <= parts.keys() for needed in whole):
            raise ValueError(f"its layer {layer} has only {' and '.join(parts)}")
    return layers


def read_peft_file(path: Path, name: str) -> tuple[dict, dict, dict]:
    """Read (weights, no alphas, settings) of a PeftModel's file or a checkpoint's adapter."""
    weights = {
        f"{name}.{key.removeprefix(PEFT_PREFIX)}": value for key, value in load_file(path).items()
    }
    config = path.with_name("adapter_config.json")
    if not config.is_file():
        raise ValueError(f"{config.name}, which has its alpha, is not beside it")
    settings = json.loads(config.read_text())
    return weights, {}, {f"{name}.{key}": value for key, value in settings.items()}


def check_settings(settings: dict[str, Any]) -> None:
    """Raise ValueError for a setting of PEFT that is not used, such as lora_bias."""
    from peft import LoraConfig  # here, because the import takes a second

    defaults = LoraConfig().to_dict()
    for key, value in settings.items():
        if key == "init_lora_weights":
            is_known = value in KNOWN_INITIALIZATIONS
        else:
            is_known = key in KNOWN_SETTINGS or not value or value == defaults.get(key)
        if not is_known:
            raise ValueError(f"its setting {key} is {value!r}, which is not used here")


def read_scale(settings: dict[str, Any], layer: str, rank: int) -> float:
    """The scale of a layer as PEFT computes it; 1 without settings."""
    alpha = settings.get("lora_alpha", rank)
    for pattern, other in (settings.get("alpha_pattern") or {}).items():
        if re.fullmatch(rf"(.*\.)?({pattern})", layer):
            alpha = other
    return alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)
