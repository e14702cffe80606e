"""LoRA and LoKr: adapters beside frozen layers, saved for resuming and for other programs."""

import json
import math
import os
import shutil
from argparse import Namespace
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from diffusers.loaders.lora_base import LORA_ADAPTER_METADATA_KEY
from safetensors.torch import load_file, save_file

from diffusion_training.batches import Models
from diffusion_training.errors.sentences import explained, fail
from diffusion_training.families.base import MAGNITUDE
from diffusion_training.files import find_differences, sort_header
from diffusion_training.models import KEEP, cast_weights, is_adapted, is_finite, list_quantized
from diffusion_training.training.lora.lora_files import (
    DORA_SCALE,
    KOHYA_FILE,
    LOKR_PARTS,
    LOKR_W1,
    LOKR_W2,
    LOKR_W2_B,
    LORA_A,
    LORA_B,
    LORA_FILE,
    PEFT_FILE,
    PEFT_PREFIX,
    LoraFile,
    ReadLora,
    read_lora_file,
    split_name,
    tell_left_out,
)
from diffusion_training.training.lora.lora_flags import ADAPTER_CONFIG, read_settings

# (name, weight of the base) -> the weight with a LoRA in it, in float32
Merge: TypeAlias = Callable[[str, torch.Tensor], torch.Tensor]
# {name of a file: (its weights, its header)}
LoraFiles: TypeAlias = dict[str, tuple[dict[str, torch.Tensor], dict[str, str]]]


class Adapter(dict[str, Any]):
    """The settings of an adapter, as `model.adapter`, and the functions that know such models.

    Code that all trainers share calls them here, so that it imports nothing of LoRAs.
    """

    def save(self, model: torch.nn.Module, folder: Path) -> None:
        save_adapter(model, folder)

    def load(self, model: torch.nn.Module, folder: Path) -> None:
        load_adapter(model, folder)

    def list_b(self, models: Models) -> list[torch.Tensor]:
        return list_lora_b(models)

    def prepare_files(
        self,
        models: Models,
        copies: Models,
        metadata: dict[str, str] | None,
        name: str | None = None,
    ) -> Callable[[Path], None]:
        """Return a function that writes the files for other programs into a folder.

        copies: of `models`, whole when the function is called. Their modules are those of the
            training (see `hold_weights`), and a DoRA reads its norms from modules; so the files of
            a DoRA are made now. name: see `write_lora_files`.
        """
        if self.get("use_dora") and metadata is not None:
            return partial(write_lora_files, make_lora_files(models, metadata), name=name)
        return partial(save_lora, copies, metadata=metadata, name=name)


def add_lora(
    model: torch.nn.Module, layers: list[str], base: str, dtype: torch.dtype, args: Namespace
) -> None:
    """Freeze a model and put an adapter of --rank beside some of its layers.

    Only the adapters are trained, in float32. A is drawn from torch's generator, B starts at 0
    (arXiv:2106.09685). Of a LoKr, w1 is drawn, and w2 starts at 0 (arXiv:2309.14859). Then the
    frozen weights are cast to `dtype`, except for quantized ones.

    layers: ends of the layers' names. base: hash of the weights. Stops with an error if a layer
    does not exist, does not support adapters, or is smaller than the rank.
    """
    # here and below, because the import takes a second
    from peft import LoKrConfig, LoraConfig, inject_adapter_in_model
    from peft.tuners.tuners_utils import BaseTunerLayer

    is_lokr = args.lora_type == "lokr"
    config = {"r": args.rank}
    if is_lokr:
        config |= {
            "alpha": args.lora_alpha or args.rank,
            "decompose_factor": args.lokr_factor,
            "target_modules": sorted(layers),
            "init_weights": "lycoris",
        }
    else:
        config |= {
            "lora_alpha": args.lora_alpha or args.rank,
            "use_dora": args.use_dora,
            "target_modules": sorted(layers),
            "lora_dropout": args.lora_dropout,
        }
        if vars(args).get("use_rslora"):  # only then, as in checkpoints of older versions
            config["use_rslora"] = True
    model.requires_grad_(False)
    # In float32, whatever the file has: peft gives an adapter its layer's precision, and computes
    # DoRA's magnitudes (arXiv:2402.09353) from its weights.
    ends = tuple(f".{layer}" for layer in layers)
    for name, module in model.named_modules():
        if f".{name}".endswith(ends):
            module.float()
    with explained(f"--lora_layers {args.lora_layers}: can't add adapters of rank {args.rank}"):
        if is_lokr:
            from diffusion_training.training.lora.lokr import simplify_lokr

            inject_adapter_in_model(LoKrConfig(**config), model)
            simplify_lokr(model)
        else:
            inject_adapter_in_model(LoraConfig(**config, init_lora_weights="gaussian"), model)
        adapted = {
            name: module.base_layer
            for name, module in model.named_modules()
            if isinstance(module, BaseTunerLayer)
        }
        for layer in layers:
            if not any(f".{name}".endswith(f".{layer}") for name in adapted):
                raise ValueError(f"the model has no {layer}")
        for name, module in adapted.items():
            if isinstance(module, torch.nn.Linear):  # in 4 bits its weight has another shape
                own_rank = min(module.in_features, module.out_features)
            else:
                own_rank = min(module.weight.flatten(1).shape)
            if args.rank > own_rank and not is_lokr:
                raise ValueError(f"the full rank of {name} is only {own_rank}")
    cast_weights(model, dtype, trained=False)
    quantized = list_quantized(model)
    for layer in quantized:
        layer.compute_dtype = dtype
    # a checkpoint must agree with this
    model.adapter = Adapter(peft_type=args.lora_type.upper(), **config, base_sha256=base)
    if quantized:
        model.adapter["quantization"] = quantized[0].quantization


def list_further_layers(layers: list[str], of_file: Collection[str]) -> list[str]:
    """The layers of a LoRA file that none of `layers`, ends of names, matches.

    For example, kohya's files with conv_dim also have the convolutions that change the size.
    """
    ends = tuple(f".{end}" for end in layers)
    return [layer for layer in of_file if not f".{layer}".endswith(ends)]


def load_network_weights(
    model: torch.nn.Module, path: str | Path, name: str, convert_lora: ReadLora
) -> None:
    """Load a LoRA file into the adapter of `add_lora`, with the same effect on the model.

    The file may be from diffusers, PEFT, kohya's scripts or this package. Weights for text encoders
    are skipped, which is printed. Stops with an error if it has other layers or another rank, or
    if it holds anything that is not used.

    path: the file, or the output folder of a run. name: what the file calls the model.
    """
    with explained(f"--network_weights {path} can't be used"):
        file = read_lora_file(path, model, name, convert_lora)
    own = {key: layer for key, layer in model.named_modules() if hasattr(layer, "base_layer")}
    advice = "pass the --rank and --lora_layers that it was trained with"
    with explained(f"--network_weights {path} does not fit; {advice}"), torch.no_grad():
        for layer in sorted(file.layers.keys() ^ own.keys()):
            article = "an" if layer in file.layers else "no"
            raise ValueError(f"it has {article} adapter at {layer}")
        is_lokr = any(LOKR_W1 in weights for weights in file.layers.values())
        if is_lokr != (model.adapter["peft_type"] == "LOKR"):
            fitting = "LoKr: add --lora_type lokr" if is_lokr else "LoRA: leave out --lora_type"
            raise ValueError(f"it is a {fitting}")
        if not is_lokr:
            rank = max(len(weights[LORA_A]) for weights in file.layers.values())
            if rank != model.adapter["r"]:
                raise ValueError(f"its rank is {rank}")
        for layer, module in own.items():
            (load_lokr_layer if is_lokr else load_layer)(module, layer, file)
    tell_left_out(file, "--network_weights")


def load_layer(module: torch.nn.Module, layer: str, file: LoraFile) -> None:
    """Load one layer of a LoRA file. Raises ValueError if it does not fit.

    If its rank is lower than the adapter's, B is 0 for the rest, which changes nothing.
    """
    weights = file.layers[layer]
    own_a = module.lora_A["default"].weight
    own_b = module.lora_B["default"].weight
    rank = len(weights[LORA_A])
    shape_a = (rank, *own_a.shape[1:])
    shape_b = (len(own_b), rank, *own_b.shape[2:])
    for part, shape in ((LORA_A, shape_a), (LORA_B, shape_b)):
        if weights[part].numel() != math.prod(shape):
            raise ValueError(f"{layer} has another width")
    own_a[:rank] = weights[LORA_A].reshape(shape_a).float()
    scale = file.scales[layer] / module.scaling["default"]
    own_b.zero_()
    own_b[:, :rank] = weights[LORA_B].reshape(shape_b).float() * scale
    if "default" in module.lora_magnitude_vector:
        magnitude = module.lora_magnitude_vector["default"].weight
        magnitude.copy_(read_magnitude(module, layer, file).reshape(magnitude.shape))
    elif weights.keys() & {MAGNITUDE, DORA_SCALE}:
        raise ValueError("it is a DoRA: add --use_dora")


def load_lokr_layer(module: torch.nn.Module, layer: str, file: LoraFile) -> None:
    """Load one layer of a LoKr file. Raises ValueError if it does not fit."""
    weights = file.layers[layer]
    factors = {part: getattr(module, part) for part in LOKR_PARTS}
    own = {part: factor["default"] for part, factor in factors.items() if "default" in factor}
    if {part: x.shape for part, x in own.items()} != {part: x.shape for part, x in weights.items()}:
        raise ValueError(f"{layer} has factors of other sizes: pass its --lokr_factor, too")
    for part, factor in own.items():
        factor.copy_(weights[part])
    last = LOKR_W2 if LOKR_W2 in own else LOKR_W2_B
    own[last] *= file.scales[layer] / module.scaling["default"]


def read_magnitude(module: torch.nn.Module, layer: str, file: LoraFile) -> torch.Tensor:
    """The magnitudes of a layer, float32 [out]. For a plain LoRA, they change nothing.

    Raises ValueError if there is not one for each output.
    """
    weights = file.layers[layer]
    norms = norm_rows(module, adapted=True)
    if MAGNITUDE in weights:
        if weights[MAGNITUDE].numel() != len(norms):
            raise ValueError(f"{layer} has another width")
        return weights[MAGNITUDE].flatten().float()
    if DORA_SCALE not in weights:
        return norms
    scale = weights[DORA_SCALE]
    if len(scale) != len(norms) or scale.numel() != len(norms):
        raise ValueError(
            f"{layer} has a {DORA_SCALE} for each input, but PEFT's DoRA has one for each output"
        )
    scale = scale.flatten().float()
    return scale * norms / norm_rows(module, adapted=False) if file.is_relative else scale


def norm_rows(module: torch.nn.Module, adapted: bool) -> torch.Tensor:
    """The norm of a layer's weights for each output, float32 [out]. adapted: with the adapter."""
    device = module.lora_A["default"].weight.device  # with --blocks_to_swap, not that of the base
    weight = module.base_layer.weight.to(device).float()
    if adapted:
        a = module.lora_A["default"].weight.flatten(1)
        b = module.lora_B["default"].weight.flatten(1)
        weight = weight + module.scaling["default"] * (b @ a).view_as(weight)
    return weight.flatten(1).norm(dim=1)


def list_lora_b(models: dict[str, torch.nn.Module]) -> list[torch.Tensor]:
    """B of all adapters of {name: model}, of a LoKr w2 or its B: 0 until something is learned."""
    parts = (".lora_B.", f".{LOKR_W2}.", f".{LOKR_W2_B}.")
    return [
        weight
        for model in models.values()
        for name, weight in model.named_parameters()
        if any(part in name for part in parts)
    ]


def list_adapter(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return {name: tensor} of an adapter; `save_pretrained` would write the frozen weights too.

    The names are those of peft's `get_peft_model_state_dict`, which takes a tenth of a second for
    SDXL, because it visits all modules for each of them.
    """
    return {
        name.replace(".default.weight", "" if MAGNITUDE in name else ".weight").replace(
            ".default", ""
        ): weight.detach().contiguous()
        for name, weight in model.named_parameters()
        if ".lora_" in name or ".lokr_" in name
    }


def save_adapter(model: torch.nn.Module, folder: Path) -> None:
    """Write an adapter in float32, as it is trained, with its settings and its base's hash.

    `PeftModel.from_pretrained` opens the folder.
    """
    folder.mkdir(parents=True)
    weights = {f"{PEFT_PREFIX}{name}": value for name, value in list_adapter(model).items()}
    save_file(weights, folder / PEFT_FILE)
    (folder / ADAPTER_CONFIG).write_text(json.dumps(model.adapter, indent=2))


def load_adapter(model: torch.nn.Module, folder: Path) -> None:
    """Load what `save_adapter` wrote; stop with an error if base or settings differ."""
    from peft import set_peft_model_state_dict

    advice = KEEP
    before = read_settings(folder)
    if not before:
        fail(f"{folder} is a whole model, but --rank trains a LoRA: {advice}")
    kind = before["peft_type"]
    if kind != model.adapter["peft_type"]:  # their other settings have other names
        fail(f"{folder} was trained with --lora_type {kind.lower()}: {advice}")
    if "lora_dropout" in model.adapter:
        before["lora_dropout"] = model.adapter["lora_dropout"]  # a resumed run may change it
    differences = [
        "another base" if "sha256" in difference else difference
        for difference in find_differences(before, model.adapter)
    ]
    if before["target_modules"] != model.adapter["target_modules"]:
        layers = ",".join(before["target_modules"])
        advice = advice.replace("were", f"were (--lora_layers {layers})")
    if differences:
        fail(f"{folder} is of another LoRA ({', '.join(differences)}): {advice}")
    weights = {
        name.removeprefix(PEFT_PREFIX): value
        for name, value in load_file(folder / PEFT_FILE).items()
    }
    if weights.keys() != list_adapter(model).keys():
        raise ValueError(f"{PEFT_FILE} has other layers")
    set_peft_model_state_dict(model, weights)


def save_lora(
    models: Models, folder: Path, metadata: dict[str, str] | None, name: str | None = None
) -> None:
    """Write the adapters among {name: model} in files for other programs; see `make_lora_files`."""
    write_lora_files(make_lora_files(models, metadata), folder, name)


def make_lora_files(models: Models, metadata: dict[str, str] | None) -> LoraFiles:
    """Make files for other programs of the adapters among {name: model}, averaged if possible.

    Returns {name of the file: (weights on the CPU, header)}, empty without adapters.

    Some programs read alpha from the header, some from each layer, and some assume that it is the
    rank. So alpha / rank, or that of rsLoRA, is multiplied into the weights, and all of them
    reproduce the trained model at strength 1. The files are float16, as is usual.

    metadata: the header of a second file, with kohya's names; None for no such file. The first
        file of a LoKr has in its header what diffusers can't read from the weights.
    """
    if not any(map(is_adapted, models.values())):
        return {}
    weights = {}
    kohya = {}
    header = dict(metadata or {})
    about = {"format": "pt"}
    for name, model in models.items():
        if not is_adapted(model) or name.endswith("_ema"):
            continue
        averaged = models.get(f"{name}_ema", model)
        settings = model.adapter
        rank = settings["r"]
        is_lokr = settings["peft_type"] == "LOKR"
        alpha = settings["alpha" if is_lokr else "lora_alpha"]
        divisor = math.sqrt(rank) if settings.get("use_rslora") else rank
        adapter = fold_scale(list_adapter(averaged), alpha / divisor)
        adapter = {key: value.half().cpu() for key, value in adapter.items()}
        weights |= {f"{name}.{key}": value for key, value in adapter.items()}
        if metadata is not None:
            kohya |= convert_to_kohya(adapter, averaged, f"lora_{name}_")
        header |= {"ss_network_dim": str(rank), "ss_network_alpha": str(rank)}
        if is_lokr:
            header["ss_network_module"] = "lycoris.kohya"
            config = {"r": rank, "alpha": rank, "decompose_factor": settings["decompose_factor"]}
            config["target_modules"] = settings["target_modules"]
            named = {f"{name}.{key}": value for key, value in config.items()}
            about[LORA_ADAPTER_METADATA_KEY] = json.dumps(named)
        elif settings["use_dora"]:
            header["diffusion_training.dora_scale"] = "relative to the base"
        else:
            header["ss_network_module"] = "networks.lora"
    files: LoraFiles = {LORA_FILE: (weights, about)}
    if metadata is not None:
        files[KOHYA_FILE] = kohya, header
    return files


def write_lora_files(files: LoraFiles, folder: Path, name: str | None) -> None:
    """Write what `make_lora_files` made. Raises ValueError if float16 has too small a range.

    name: what the second file is called, without .safetensors. If there is none, because ComfyUI
        reads the first one, this is a second name of the first one.
    """
    for weights, _ in files.values():
        if not all(map(is_finite, weights.values())):
            raise ValueError("the weights of the adapter are not finite in float16")
    for file, (weights, header) in files.items():
        save_file(weights, folder / file, header)
        sort_header(folder / file)
    if name is None:
        return
    named = folder / f"{name}.safetensors"
    if KOHYA_FILE in files:
        (folder / KOHYA_FILE).rename(named)
        return
    try:
        os.link(folder / LORA_FILE, named)
    except OSError:  # some file systems, such as exFAT, have no hard links
        shutil.copyfile(folder / LORA_FILE, named)


def fold_scale(adapter: dict[str, torch.Tensor], scale: float) -> dict[str, torch.Tensor]:
    """Multiply a scale into the weights of an adapter.

    A scale below 1 is shared by A and B, so that the largest numbers of both are equal. B alone
    would become so small that it loses bits in float16. In a LoKr, w1 has the place of A.
    """
    folded = dict(adapter)
    others = {LORA_B: LORA_A, LOKR_W2: LOKR_W1, LOKR_W2_B: LOKR_W1}
    for name, b in adapter.items():
        layer, part = split_name(name)
        if part not in others:
            continue
        other = f"{layer}.{others[part]}"
        a = adapter[other]
        share = torch.tensor(1.0)
        if scale < 1 and a.any() and b.any():
            share = (scale * b.abs().max() / a.abs().max()).sqrt()
        folded[other] = a * share
        folded[name] = b * (scale / share)
    return folded


def convert_to_kohya(
    adapter: dict[str, torch.Tensor], model: torch.nn.Module, prefix: str
) -> dict[str, torch.Tensor]:
    """Give weights the names of kohya's scripts, which ComfyUI and A1111 know too.

    Magnitudes of DoRA become dora_scale, [out, 1, ...]. A program multiplies the adapted weights
    by dora_scale / norm. ComfyUI takes the norm of the base, not of the adapted weights (see its
    pull request 15458), so the magnitudes are multiplied by the quotient of the two norms.
    """
    converted = {}
    for name, value in adapter.items():
        layer, part = split_name(name)
        kohya = prefix + layer.replace(".", "_")
        if part == LORA_A:
            converted[f"{kohya}.lora_down.weight"] = value
            converted[f"{kohya}.alpha"] = torch.tensor(len(value))
        elif part == LORA_B:
            converted[f"{kohya}.lora_up.weight"] = value
        elif part in LOKR_PARTS:
            converted[f"{kohya}.{part}"] = value
            if part in (LOKR_W2, LOKR_W2_B):  # LyCORIS ignores it if w2 is whole
                converted[f"{kohya}.alpha"] = torch.tensor(len(value) if part == LOKR_W2_B else 1)
        else:
            module = model.get_submodule(layer)
            quotient = norm_rows(module, adapted=False) / norm_rows(module, adapted=True)
            scale = value.flatten().float() * quotient.detach().cpu()
            ones = [1] * (module.base_layer.weight.dim() - 1)
            converted[f"{kohya}.{DORA_SCALE}"] = scale.half().view(-1, *ones)
    return converted
