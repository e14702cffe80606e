"""LoRA: an adapter beside frozen layers, saved for resuming and in formats of other programs."""

import json
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import torch
from diffusers.utils.state_dict_utils import (
    convert_state_dict_to_kohya,
    convert_unet_state_dict_to_peft,
)
from safetensors.torch import load_file, save, save_file

from diffusion_training.batches import Models
from diffusion_training.errors import explained, fail
from diffusion_training.files import find_differences
from diffusion_training.models import list_quantized

# (weights, alphas, metadata) of a LoRA file; see `Family.read_lora`
ReadLora = Callable[[Path, torch.nn.Module], tuple[dict, dict, dict]]


def add_lora(
    model: torch.nn.Module, layers: list[str], base: str, dtype: torch.dtype, args: Namespace
) -> None:
    """Freeze a model and put an adapter of --rank beside each of some layers.

    Only the adapters are trained, in float32. A is drawn from torch's generator, B starts at 0
    (arXiv:2106.09685). Then the frozen weights are cast to `dtype`, except for those in 4 bits.

    layers: ends of their names. base: hash of the weights. Stops with an error if a layer does not
    exist, does not support adapters, or is smaller than the rank.
    """
    from peft import LoraConfig  # imported here and below, because it takes a second

    config = {
        "r": args.rank,
        "lora_alpha": args.lora_alpha or args.rank,
        "use_dora": args.use_dora,
        "target_modules": sorted(layers),
        "lora_dropout": args.lora_dropout,
    }
    model.requires_grad_(False)
    # In float32 whatever the file has: peft gives an adapter its layer's precision, and computes
    # DoRA's magnitudes (arXiv:2402.09353) from its weights.
    for name, module in model.named_modules():
        if any(f".{name}".endswith(f".{layer}") for layer in layers):
            module.float()
    with explained(f"--lora_layers {args.lora_layers}: no adapter of rank {args.rank} goes there"):
        model.add_adapter(LoraConfig(**config, init_lora_weights="gaussian"))
        adapted = {
            name: module.base_layer
            for name, module in model.named_modules()
            if hasattr(module, "base_layer")
        }
        for layer in layers:
            if not any(f".{name}".endswith(f".{layer}") for name in adapted):
                raise ValueError(f"the model has no {layer}")
        for name, module in adapted.items():
            if isinstance(module, torch.nn.Linear):  # in 4 bits its weight has another shape
                own_rank = min(module.in_features, module.out_features)
            else:
                own_rank = min(module.weight.flatten(1).shape)
            if args.rank > own_rank:
                raise ValueError(f"{name} has a rank of {own_rank} itself")
    exact = getattr(model, "_keep_in_fp32_modules", None) or ()
    for name, weight in model.named_parameters():
        is_exact = weight.requires_grad or any(part in exact for part in name.split("."))
        if weight.is_floating_point() and not is_exact:
            weight.data = weight.data.to(dtype)
    quantized = list_quantized(model)
    for layer in quantized:
        layer.compute_dtype = dtype
    # a checkpoint must agree with this
    model.adapter = {"peft_type": "LORA", **config, "base_sha256": base}
    if quantized:
        model.adapter["quantization"] = "nf4"


def load_network_weights(
    model: torch.nn.Module, path: str | Path, name: str, read_lora: ReadLora
) -> None:
    """Load a LoRA file into the adapter of `add_lora`, with the same effect on the model.

    The file may be from diffusers, kohya's scripts or this package. Its weights for text encoders
    are ignored. Stops with an error if it has other layers or another rank.

    name: what the file calls the model.
    """
    own = {key: layer for key, layer in model.named_modules() if getattr(layer, "lora_A", None)}
    with explained(
        f"--network_weights {path} does not fit; choose --rank and --lora_layers as it was trained"
    ):
        weights, alphas, metadata = (
            {
                key.removeprefix(f"{name}."): value
                for key, value in part.items()
                if key.startswith(f"{name}.")
            }
            for part in read_lora(Path(path), model)
        )
        if not any(".lora_A." in key for key in weights):  # kohya's, with alphas beside them
            weights, alphas = map(convert_unet_state_dict_to_peft, (weights, alphas))
        alphas = {
            key.split(".lora_A.")[0].removesuffix(".alpha"): alpha for key, alpha in alphas.items()
        }
        end = ".lora_A.weight"
        given = {key.removesuffix(end): a for key, a in weights.items() if key.endswith(end)}
        for layer in sorted(given.keys() ^ own.keys()):
            raise ValueError(f"it has {'an' if layer in given else 'no'} adapter at {layer}")
        for layer, a in given.items():
            own_a = own[layer].lora_A["default"].weight
            own_b = own[layer].lora_B["default"].weight
            rank = len(a)
            if rank != len(own_a):
                raise ValueError(f"its rank is {rank}")
            if a.shape != own_a.shape:
                raise ValueError(f"{layer} has another width")
            scale = metadata.get("lora_alpha", rank) / metadata.get("r", rank)
            if layer in alphas:
                scale = float(alphas[layer] / rank)
            own_a.data.copy_(a)
            b = weights[f"{layer}.lora_B.weight"].float()
            own_b.data.copy_(b * (float(scale) / own[layer].scaling["default"]))


def is_adapted(model: torch.nn.Module) -> bool:
    """Return whether `add_lora` has added an adapter to a model."""
    return hasattr(model, "adapter")


def list_lora_b(models: dict[str, torch.nn.Module]) -> list[torch.Tensor]:
    """Return B of all adapters of {name: model}: 0 until something is learned."""
    return [
        weight
        for model in models.values()
        for name, weight in model.named_parameters()
        if ".lora_B." in name
    ]


def list_adapter(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return {name: tensor} of an adapter; `save_pretrained` would write the frozen weights too."""
    from peft import get_peft_model_state_dict

    adapter = get_peft_model_state_dict(model)
    return {name: value.contiguous() for name, value in adapter.items()}


def save_adapter(model: torch.nn.Module, folder: Path) -> None:
    """Write an adapter as it is trained, in float32, and the settings and base it belongs to."""
    folder.mkdir(parents=True)
    save_file(list_adapter(model), folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(model.adapter, indent=2))


def load_adapter(model: torch.nn.Module, folder: Path) -> None:
    """Load what `save_adapter` wrote; stop with an error if base or settings differ."""
    from peft import set_peft_model_state_dict

    advice = "keep base and flags as they were, or choose a new --output_dir"
    if not (folder / "adapter_config.json").is_file():
        fail(f"{folder} is a whole model, and --rank trains a LoRA: {advice}")
    if not is_adapted(model):
        fail(f"{folder} is a LoRA, and without --rank the whole model would be trained: {advice}")
    before = json.loads((folder / "adapter_config.json").read_text())
    before["lora_dropout"] = model.adapter["lora_dropout"]  # which may change
    differences = [
        "other weights of the base" if "sha256" in difference else difference
        for difference in find_differences(before, model.adapter)
    ]
    if before["target_modules"] != model.adapter["target_modules"]:
        layers = ",".join(before["target_modules"])
        advice = advice.replace("were", f"were (--lora_layers {layers})")
    if differences:
        fail(f"{folder} is of another LoRA ({', '.join(differences)}): {advice}")
    weights = load_file(folder / "adapter_model.safetensors")
    if weights.keys() != list_adapter(model).keys():
        raise ValueError("adapter_model.safetensors has other layers")
    set_peft_model_state_dict(model, weights)


def save_lora(models: Models, folder: Path, kohya_base: str | None) -> None:
    """Write the adapters among {name: model}, averaged if possible, in files for other programs.

    Some programs read alpha from the header, some from each layer, and some assume that it is the
    rank. So B is stored multiplied by alpha / rank, and all of them reproduce the trained model at
    strength 1. The files are float16, as is usual.

    kohya_base: sd-scripts' name of the base, for a second file with kohya's keys; None: without it.
    """
    weights = {}
    metadata = {"ss_network_module": "networks.lora"}
    for name, model in models.items():
        if not is_adapted(model) or name.endswith("_ema"):
            continue
        rank = model.adapter["r"]
        scale = model.adapter["lora_alpha"] / rank
        for key, value in list_adapter(models.get(f"{name}_ema", model)).items():
            scaled = value * scale if ".lora_B." in key else value
            weights[f"{name}.{key}"] = scaled.half().cpu()
        metadata |= {"ss_network_dim": str(rank), "ss_network_alpha": str(rank)}
    if not all(value.isfinite().all() for value in weights.values()):
        raise ValueError("the weights of the adapter are not finite in float16")
    save_file(weights, folder / "pytorch_lora_weights.safetensors", {"format": "pt"})
    if kohya_base is not None:  # the keys that ComfyUI and A1111 know
        metadata["ss_base_model_version"] = kohya_base
        data = save(convert_state_dict_to_kohya(weights), metadata)
        (folder / "pytorch_lora_weights_kohya.safetensors").write_bytes(sort_header(data))


def sort_header(data: bytes) -> bytes:
    """Sort the metadata of a safetensors file: the library's order differs each time."""
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data[start:]
