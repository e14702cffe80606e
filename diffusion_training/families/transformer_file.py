"""--transformer_file, and files of a VAE or a text encoder: weights as ComfyUI reads them.

diffusers and transformers convert the names of the weights. They are unpacked once into a folder
like that of a pipeline's part.
"""

import collections
import contextlib
import importlib.util
import json
import re
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import safe_open
from safetensors.torch import save_file

from diffusion_training.errors.sentences import explained, fail
from diffusion_training.families.base import Base
from diffusion_training.families.single_file import unpack_once
from diffusion_training.models import NOT_FINITE, is_finite, raise_for_keys

PREFIX = "model.diffusion_model."  # of the denoiser's weights in a file with other models
PRECISIONS = {"F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "I64"}  # the last one counts batches
FP8 = {"F8_E4M3", "F8_E5M2"}
# The weights of some files are products of fp8 and scales, by one of these names: a scale for a
# weight, for each of its rows, or for each block of 128 x 128 numbers.
SCALES = re.compile(r"(.+\.)(scale_weight|weight_scale|weight_scale_inv)$")
BLOCK = 128
# what such files also hold: marks, and scales of inputs, for those who multiply in fp8; a tokenizer
MARKS = re.compile(r"(^|\.)(scaled_fp8|scale_input|input_scale|spiece_model)$")
FORMAT = "comfy_quant"  # JSON on a weight's format, of which only fp8 is read
SHARD = "5GB"  # written at a time
# {class: the class whose names it has}, besides those of its own
NAMED_LIKE = {"AutoencoderKLFlux2": "AutoencoderKL"}
OF_HALVES = re.compile(r"^(en|de)coder\.((post_)?quant_conv\.)")  # in files of FLUX.2's VAE


class Checkpoint(dict[str, torch.Tensor]):
    """The weights of a file, for diffusers' conversion, which takes them out one by one.

    missing: the names that it asked for and did not find. It gets empty tensors for them, so that
    the first missing name does not end it.
    """

    def __init__(self, weights: dict[str, torch.Tensor]) -> None:
        super().__init__(weights)
        self.missing: list[str] = []

    def __missing__(self, name: str) -> torch.Tensor:
        self.missing.append(name)
        return torch.empty(0)

    def pop(self, name: str, *default: Any) -> Any:
        return super().pop(name, *default) if default or name in self else self[name]


def unpack_transformer(path: str, base: Base, cache_dir: str | None, part: str = "") -> str:
    """Unpack the denoiser's weights in `path` into a folder in --cache_dir. Returns the folder.

    Its config is that of the base. part: "vae" to unpack a VAE instead. Stops with an error if the
    file does not fit it.
    """
    source, options = base.locate(None, part or base.family.folder, with_weights=False)
    options.pop("variant", None)
    with explained(f"{source} holds no {part or base.family.model}"):
        config = diffusers.AutoencoderKL.load_config(source, **options)
        kind = getattr(diffusers, config["_class_name"] if part else base.family.model)
    known = SINGLE_FILE_LOADABLE_CLASSES.get(NAMED_LIKE.get(kind.__name__, kind.__name__))
    if known is None:
        fail(
            f"{path} can't be used: diffusers {diffusers.__version__} reads no {kind.__name__} "
            "from one file: leave it out"
        )
    names, scales = check_header(path)
    with torch.device("meta"):
        expected = kind.from_config(config).state_dict()
    shapes = {name: tuple(weight.shape) for name, weight in expected.items()}

    def convert(weights: Checkpoint) -> dict[str, torch.Tensor]:
        """The same weights with diffusers' names; what it does not use stays in `weights`."""
        found = {**weights}
        if weights.keys() != shapes.keys():  # else they have diffusers' names
            found = {**known["checkpoint_mapping_fn"](config=config, checkpoint=weights)}
            found = {name: weights[name] for name in weights.keys() & shapes.keys()} | found
        # the conversion of a VAE takes nothing out; it returns weights, or views of them
        used = {id(weight if weight._base is None else weight._base) for weight in found.values()}
        for name in [*weights]:
            if name in found or id(weights[name]) in used:
                weights.pop(name)
        return found

    misfit = f"{path} does not fit the {kind.__name__} of {source}"
    check_weights(misfit, names, shapes, convert)

    def read() -> Callable[[Path], None]:
        found = convert(Checkpoint(read_tensors(path, names, scales)))
        broken = [name for name in shapes if not is_finite(fp8_as_bfloat16(found[name]))]
        raise_for_keys(NOT_FINITE, broken)
        return partial(save_denoiser, {name: found[name] for name in shapes}, config)

    with explained(f"{path} can't be unpacked"):
        key = [json.dumps(dict(config), sort_keys=True, default=str)]
        return unpack_once(path, source, key, cache_dir, read)


def unpack_text_encoder(path: str, base: Base, cache_dir: str | None) -> dict[str, str]:
    """Unpack the weights of a text encoder. Returns {its name in the pipeline: the folder}.

    It is the one whose weights have the shapes of those in the file, with the config of the base.
    """
    import transformers

    names, scales = check_header(path)
    there = collections.Counter(tuple(shape) for _, shape in names.values())
    found: list[Any] = []  # (share of its weights that the file lacks, the part, its class, config)
    for part, entry in base.index.items():
        if not part.startswith("text_encoder") or entry[0] != "transformers":
            continue
        source, options = base.locate(None, part, with_weights=False)
        options.pop("variant", None)
        kind = getattr(transformers, entry[1])
        with explained(f"{source} holds no {part}"), torch.device("meta"):
            model = kind(transformers.AutoConfig.from_pretrained(source, **options))
            text = Path(str(source), part, "config.json").read_text()
        shapes = collections.Counter(tuple(weight.shape) for weight in model.parameters())
        found.append(((shapes - there).total() / shapes.total(), part, kind, text))
    best: Any = min(found, key=lambda each: each[0], default=(1, "", None, ""))
    missing, part, kind, text = best
    if missing > 0.5:
        fail(f"{path} does not fit {base.source}: it is none of its text encoders")
    misfit = f"{path} does not fit the {kind.__name__} of {base.source}"

    def read() -> Callable[[Path], None]:
        return partial(save_text_encoder, read_tensors(path, names, scales), text, kind, misfit)

    with explained(misfit):
        return {part: unpack_once(path, base.source, [part, text], cache_dir, read)}


def open_gguf(path: str) -> dict[str, Any]:
    """{name: quantized tensor} of a GGUF file. Stops with an error without its package."""
    if importlib.util.find_spec("gguf") is None:
        fail(
            f"{path} needs the package gguf: pip install gguf, or give the .safetensors file in "
            "bf16 or fp8"
        )
    import gguf

    with explained(f"{path} can't be read"):
        return {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}


def read_gguf(tensor: Any) -> torch.Tensor:
    """A tensor of a GGUF file; in bfloat16 if it is quantized."""
    import gguf

    weight = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
    return weight if tensor.tensor_type.name in ("F32", "F16") else weight.bfloat16()


def read_tensors(
    path: str, names: dict[str, tuple[str, list[int]]], scales: dict[str, str]
) -> dict[str, torch.Tensor]:
    """The weights in a file, multiplied by their scales. names, scales: see `check_header`."""
    if path.endswith(".gguf"):
        tensors = open_gguf(path)
        return {name: read_gguf(tensors[key]) for name, (key, _) in names.items()}
    with safe_open(path, "pt") as file:  # in memory are only the weights that are changed
        weights = {name: file.get_tensor(key) for name, (key, _) in names.items()}
        for name, key in scales.items():
            weights[name] = multiply(weights[name], file.get_tensor(key), key)
    return weights


def write_loading(kind: str, path: str, name: str, source: str, dtype: str) -> list[str]:
    """Code that loads the file as `transformer`, in the precision `dtype`, with diffusers alone.

    kind: its class. name: how the file is called in the code. source: the pipeline. dtype: the
    name of the argument.
    """
    lines: list[str] = []
    if path.endswith(".gguf"):  # its quantized weights are not those that were trained on
        return lines
    weights = json.dumps(name)
    with contextlib.suppress(Exception):  # the run is over, and the file may be too
        with safe_open(path, "pt") as file:
            keys = list(file.keys())
        if any(map(SCALES.match, keys)):  # diffusers can't read it: the pipeline's own weights draw
            return lines
        if any(key.startswith(PREFIX) for key in keys):  # for some classes diffusers expects none
            lines.append(f"weights = load_file({weights})")
            weights = f'{{name.removeprefix("{PREFIX}"): x for name, x in weights.items()}}'
            lines.append(f"weights = {weights}")
            weights = "weights"
    options = f'config={json.dumps(source)}, subfolder="transformer", {dtype}=dtype'
    return [*lines, f"transformer = {kind}.from_single_file({weights}, {options})"]


def multiply(weight: torch.Tensor, scale: torch.Tensor, key: str) -> torch.Tensor:
    """A weight in fp8 times its scale, in bfloat16. Raises ValueError if the shapes do not fit.

    key: the name of the scale.
    """
    factor = scale.float()
    if scale.numel() == 1:
        factor = factor.reshape(())
    elif [*scale.shape] in ([len(weight)], [len(weight), *[1] * (weight.dim() - 1)]):
        factor = factor.view(-1, *[1] * (weight.dim() - 1))
    elif [*scale.shape] == [-(-side // BLOCK) for side in weight.shape]:
        for dim, side in enumerate(weight.shape):
            factor = factor.repeat_interleave(BLOCK, dim).narrow(dim, 0, side)
    else:
        raise ValueError(f"{key} of shape {[*scale.shape]} scales a weight of {[*weight.shape]}")
    return (weight.float() * factor).bfloat16()


def check_header(path: str) -> tuple[dict[str, tuple[str, list[int]]], dict[str, str]]:
    """The denoiser in a file.

    Stops with an error if it can't be read, or has weights in a precision that can't be trained on.

    Returns ({name of a weight: (its name in the file, its shape)}, {name of a weight in fp8: the
    name of its scale in the file}).
    """
    found = {}
    scales = {}
    precisions: dict[str, str] = {}
    others = []
    if path.endswith(".gguf"):
        return {
            name.removeprefix(PREFIX): (name, tensor.shape[::-1].tolist())
            for name, tensor in open_gguf(path).items()
        }, {}
    with explained(f"{path} can't be read"), safe_open(path, "pt") as file:
        keys = list(file.keys())
        start = PREFIX if any(key.startswith(PREFIX) for key in keys) else ""
        for key in filter(lambda key: key.startswith(start), keys):
            part = file.get_slice(key)
            name = key.removeprefix(start)
            if match := SCALES.match(name):
                scales[f"{match[1]}weight"] = key
            elif name.endswith(f".{FORMAT}"):
                text = bytes(file.get_tensor(key).tolist())
                if not str(json.loads(text).get("format")).startswith("float8"):
                    others.append(f"{key}: {text.decode()}")
            elif not MARKS.search(name) and 0 not in part.get_shape():
                name = OF_HALVES.sub(r"\2", name)
                found[name] = key, part.get_shape()
                precisions[name] = part.get_dtype()
    others += {*precisions.values()} - PRECISIONS
    others += [key for name, key in scales.items() if precisions.get(name) not in FP8]
    if others:
        fail(
            f"{path} holds quantized weights ({others[0]}) in a form that is not read here: give "
            "the file in bf16 or fp8, and --base_precision int8 or nf4 to save memory"
        )
    return found, scales


def check_weights(
    misfit: str,
    names: dict[str, tuple[str, list[int]]],
    shapes: dict[str, tuple[int, ...]],
    convert: Callable[[Checkpoint], dict[str, torch.Tensor]],
) -> None:
    """Convert weights on the meta device, and stop with an error if they do not fit the model.

    misfit: the beginning of the sentence. names: see `check_header`. shapes: those of the model.
    """
    with torch.device("meta"):
        rest = Checkpoint({name: torch.empty(shape) for name, (_, shape) in names.items()})
        try:
            found = convert(rest)
        except Exception:  # a missing weight is not divided, or no name gives a number of blocks
            missing = f"lacks {name_three(rest.missing)}" if rest.missing else ""
            fail(f"{misfit}: it {missing or f'holds {name_three(names)}'}")
    if rest.missing:
        fail(f"{misfit}: it lacks {name_three(rest.missing)}")
    if foreign := [*rest, *(name for name in found if name not in shapes)]:
        fail(f"{misfit}, which has no {name_three(foreign)}")
    if missing := [name for name in shapes if name not in found]:
        fail(f"{misfit}: it lacks {name_three(missing)}")
    if others := [name for name, shape in shapes.items() if found[name].shape != shape]:
        fail(f"{misfit}, which has other shapes of {name_three(others)}")


def name_three(names: Iterable[str]) -> str:
    """The first three of some names, and the number of the others."""
    first = [*names]
    more = f" and {len(first) - 3} more weights" if len(first) > 3 else ""
    return ", ".join(first[:3]) + more


def fp8_as_bfloat16(weight: torch.Tensor) -> torch.Tensor:
    """A weight in fp8 in bfloat16, which has all its numbers; another one as it is."""
    return weight.bfloat16() if weight.dtype.itemsize == 1 else weight


def save_denoiser(weights: dict[str, torch.Tensor], config: dict[str, Any], folder: Path) -> None:
    """Write a denoiser's folder, in the form of `save_pretrained`, with some weights at a time."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    pattern = "diffusion_pytorch_model{suffix}.safetensors"
    split = split_torch_state_dict_into_shards(
        weights, filename_pattern=pattern, max_shard_size=SHARD
    )
    for file, names in split.filename_to_tensors.items():
        part = {name: fp8_as_bfloat16(weights[name]) for name in names}
        save_file({key: x.contiguous() for key, x in part.items()}, folder / file, {"format": "pt"})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        path = folder / "diffusion_pytorch_model.safetensors.index.json"
        path.write_text(json.dumps(index, indent=2) + "\n")


def save_text_encoder(
    weights: dict[str, torch.Tensor], config: str, kind: Any, misfit: str, folder: Path
) -> None:
    """Write a text encoder's folder. Stops with an error if these are not all weights of `kind`.

    config: the content of config.json. kind: the class. misfit: the beginning of the sentence.
    """
    folder.mkdir()
    (folder / "config.json").write_text(config)
    weights = {name: fp8_as_bfloat16(weight).contiguous() for name, weight in weights.items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with explained(misfit):
        _, info = kind.from_pretrained(folder, output_loading_info=True)
        for what in ("missing_keys", "mismatched_keys", "unexpected_keys"):
            raise_for_keys(what.replace("_", " "), info[what])
