"""LoRA: an adapter beside frozen layers, saved for resuming and in formats of other programs."""

import json
from argparse import Namespace
from pathlib import Path

import torch
from diffusers import StableDiffusionPipeline, StableDiffusionXLPipeline
from diffusers.utils.state_dict_utils import (
    convert_state_dict_to_kohya,
    convert_unet_state_dict_to_peft,
)
from safetensors.torch import load_file, save, save_file

from diffusion_training.errors import explained, fail
from diffusion_training.files import find_differences

# How the names of modules end, for the words that --lora_layers accepts.
LORA_LAYERS = {"attention": ["to_k", "to_q", "to_v", "to_out.0"]}
LORA_LAYERS["all"] = [*LORA_LAYERS["attention"], "ff.net.0.proj", "ff.net.2", "proj_in", "proj_out"]
LORA_LAYERS["all"] += ["conv1", "conv2", "conv_shortcut"]


def add_lora(model: torch.nn.Module, base: str, dtype: torch.dtype, args: Namespace) -> None:
    """Freeze a model and put an adapter of --rank beside each of --lora_layers.

    Only the adapters are trained, in float32. The model must be in float32, and `base` is the hash
    of its weights: DoRA's magnitudes (arXiv:2402.09353) are computed from the exact weights, and a
    run resumed in another precision still has the same base. Then the frozen weights are cast to
    `dtype`. A is drawn from torch's generator, B starts at 0 (arXiv:2106.09685).

    Stops with an error if a layer does not exist, does not support adapters, or is smaller than
    the rank.
    """
    from peft import LoraConfig  # imported here and below, because it takes a second

    names = [name.strip() for name in args.lora_layers.split(",")]
    if args.lora_layers in LORA_LAYERS:  # a model need not have all of these
        ends = [f".{name}" for name, _ in model.named_modules()]
        names = [
            name
            for name in LORA_LAYERS[args.lora_layers]
            if any(end.endswith(f".{name}") for end in ends)
        ]
    config = {"r": args.rank, "lora_alpha": args.lora_alpha or args.rank, "use_dora": args.use_dora}
    config |= {"target_modules": sorted(names), "lora_dropout": args.lora_dropout}
    model.requires_grad_(False)
    with explained(f"--lora_layers {args.lora_layers}: no adapter of rank {args.rank} goes there"):
        model.add_adapter(LoraConfig(**config, init_lora_weights="gaussian"))
        layers = {
            name: module.base_layer
            for name, module in model.named_modules()
            if hasattr(module, "base_layer")
        }
        for name in names:
            if not any(f".{layer}".endswith(f".{name}") for layer in layers):
                raise ValueError(f"the model has no {name}")
        for name, layer in layers.items():
            if args.rank > (most := min(layer.weight.flatten(1).shape)):
                raise ValueError(f"{name} has a rank of {most} itself")
    exact = getattr(model, "_keep_in_fp32_modules", None) or ()
    for name, weight in model.named_parameters():
        if not weight.requires_grad and not any(part in exact for part in name.split(".")):
            weight.data = weight.data.to(dtype)
    # a checkpoint must agree with this
    model.adapter = {"peft_type": "LORA", **config, "base_sha256": base}


def load_network_weights(model: torch.nn.Module, path: str | Path, name: str = "unet") -> None:
    """Load a LoRA file into the adapter of `add_lora`, with the same effect on the model.

    The file may be from diffusers, kohya's scripts or this package. Its weights for text encoders
    are ignored. Stops with an error if it has other layers or another rank.

    name: what the file calls the model.
    """
    kind = (
        StableDiffusionXLPipeline
        if name_base(model).startswith("sdxl")
        else StableDiffusionPipeline
    )
    own = {name: layer for name, layer in model.named_modules() if getattr(layer, "lora_A", None)}
    with explained(
        f"--network_weights {path} does not fit; choose --rank and --lora_layers as it was trained"
    ):
        file = {
            "pretrained_model_name_or_path_or_dict": str(Path(path).parent),
            "weight_name": Path(path).name,
        }
        given = kind.lora_state_dict(**file, unet_config=model.config, return_lora_metadata=True)
        weights, alphas, about = ({**(part or {})} for part in given)
        weights, alphas, about = (
            {
                key.removeprefix(f"{name}."): value
                for key, value in part.items()
                if key.startswith(f"{name}.")
            }
            for part in (weights, alphas, about)
        )
        if not any(".lora_A." in key for key in weights):  # kohya's, with alphas beside them
            weights, alphas = map(convert_unet_state_dict_to_peft, (weights, alphas))
        alphas = {
            key.split(".lora_A.")[0].removesuffix(".alpha"): alpha for key, alpha in alphas.items()
        }
        found = {
            key.removesuffix(".lora_A.weight"): a
            for key, a in weights.items()
            if key.endswith(".lora_A.weight")
        }
        for layer in sorted(found.keys() ^ own.keys()):
            raise ValueError(f"it has {'an' if layer in found else 'no'} adapter at {layer}")
        for layer, a in found.items():
            mine, scale = (
                own[layer].lora_A["default"].weight,
                about.get("lora_alpha", len(a)) / about.get("r", len(a)),
            )
            if a.shape != mine.shape:
                raise ValueError(
                    f"its rank is {len(a)}" if len(a) != len(mine) else f"{layer} has another width"
                )
            scale = alphas[layer] / len(a) if layer in alphas else scale
            mine.data.copy_(a)
            b = weights[f"{layer}.lora_B.weight"].float() * (
                float(scale) / own[layer].scaling["default"]
            )
            own[layer].lora_B["default"].weight.data.copy_(b)


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

    return {name: value.contiguous() for name, value in get_peft_model_state_dict(model).items()}


def save_adapter(model: torch.nn.Module, folder: Path) -> None:
    """Write an adapter as it is trained, in float32, and the settings and base it belongs to."""
    folder.mkdir(parents=True)
    save_file(list_adapter(model), folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(model.adapter, indent=2))


def load_adapter(model: torch.nn.Module, folder: Path) -> None:
    """Load what `save_adapter` wrote; stop with an error if base or settings differ."""
    from peft import set_peft_model_state_dict

    turn = "keep base and flags as they were, or choose a new --output_dir"
    if not (folder / "adapter_config.json").is_file():
        fail(f"{folder} is a whole model, and --rank trains a LoRA: {turn}")
    if not is_adapted(model):
        fail(f"{folder} is a LoRA, and without --rank the whole model would be trained: {turn}")
    before = json.loads((folder / "adapter_config.json").read_text())
    before["lora_dropout"] = model.adapter["lora_dropout"]  # which may change
    if found := find_differences(before, model.adapter):
        found = [
            "other weights of the base" if "sha256" in difference else difference
            for difference in found
        ]
        fail(f"{folder} is of another LoRA ({', '.join(found)}): {turn}")
    weights = load_file(folder / "adapter_model.safetensors")
    if weights.keys() != list_adapter(model).keys():
        raise ValueError("adapter_model.safetensors has other layers")
    set_peft_model_state_dict(model, weights)


def save_lora(models: dict[str, torch.nn.Module], folder: Path, args: Namespace) -> None:
    """Write the adapters among {name: model}, averaged if possible, in files for other programs.

    Some programs read alpha from the header, some from each layer, and some assume that it is the
    rank. So B is stored multiplied by alpha / rank, and all of them reproduce the trained model at
    strength 1. The files are float16, as is usual.
    """
    weights, about = {}, {"ss_network_module": "networks.lora"}
    for name, model in models.items():
        if is_adapted(model) and not name.endswith("_ema"):
            rank, scale = str(model.adapter["r"]), model.adapter["lora_alpha"] / model.adapter["r"]
            for key, value in list_adapter(models.get(f"{name}_ema", model)).items():
                weights[f"{name}.{key}"] = (
                    (value * scale if ".lora_B." in key else value).half().cpu()
                )
            about |= {
                "ss_network_dim": rank,
                "ss_network_alpha": rank,
                "ss_base_model_version": name_base(model),
            }
    if not all(value.isfinite().all() for value in weights.values()):
        raise ValueError("the weights of the adapter are not finite in float16")
    save_file(weights, folder / "pytorch_lora_weights.safetensors", {"format": "pt"})
    if args.output_kohya_format:  # the keys that ComfyUI and A1111 know
        data = save(convert_state_dict_to_kohya(weights), about)
        (folder / "pytorch_lora_weights_kohya.safetensors").write_bytes(sort_header(data))


def sort_header(data: bytes) -> bytes:
    """Sort the metadata of a safetensors file: the library's order differs each time."""
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data[start:]


def name_base(model: torch.nn.Module) -> str:
    """Return sd-scripts' name for the family of a U-Net."""
    if model.config.get("addition_embed_type") == "text_time":
        return "sdxl_base_v1-0"
    return "sd_v2" if model.config.get("cross_attention_dim") == 1024 else "sd_v1"
