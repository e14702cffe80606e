"""Load, check, move, compile and average models."""

import argparse
import contextlib
import copy
import hashlib
import inspect
import itertools
import math
import os
import re
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import DynamoBackend, TorchDynamoPlugin
from diffusers import ModelMixin
from safetensors import safe_open
from torch.nn import Linear
from torch.nn.functional import group_norm
from torch.optim.swa_utils import get_ema_multi_avg_fn
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves

from diffusion_training.batches import Models
from diffusion_training.errors.sentences import explained
from diffusion_training.files import NARROW, read_shard_names
from diffusion_training.library_fixes import raise_recompile_limit
from diffusion_training.memory import is_gpu

# The argument of `from_pretrained` for the precision of weights. diffusers 0.40 renamed it, and 1.0
# drops the old name; transformers has both.
IS_RENAMED = tuple(map(int, version("diffusers").split(".")[:2])) >= (0, 40)
DTYPE = "dtype" if IS_RENAMED else "torch_dtype"
# For `load_weights`, in place of a dtype: weights in the precision of their files, with which the
# model computes what it would compute with float32 weights, bit for bit; see blocks.py.
EXACT: Any = "exact"
NOT_FINITE = "weights with NaN or infinity"  # for `raise_for_keys`
DTYPES = {"no": "float32", "fp16": "float16", "bf16": "bfloat16"}  # of --mixed_precision


def load_weights(
    kind: Any, source: str | None, torch_dtype: torch.dtype | None = None, **options: Any
) -> torch.nn.Module:
    """Call `kind.from_pretrained`; raise ValueError if weights are missing or have other shapes.

    Such weights would be random, or not loaded at all. It also raises ValueError for weights with
    NaN or infinity, which can't be trained. torch_dtype: may be EXACT.
    """
    is_exact = torch_dtype is EXACT
    dtype = read_precision(source, kind=kind, **options) if is_exact else torch_dtype
    own = {} if dtype is None else {DTYPE: dtype}
    model, info = kind.from_pretrained(source, output_loading_info=True, **options, **own)
    for what in ("missing_keys", "mismatched_keys"):
        raise_for_keys(what.replace("_", " "), info[what])
    broken = [name for name, weight in model.named_parameters() if not is_finite(weight)]
    raise_for_keys(NOT_FINITE, broken)
    if is_exact and dtype != torch.float32:
        from diffusion_training.blocks import compute_in_float32

        if not compute_in_float32(model):
            del model
            return load_weights(kind, source, torch.float32, **options)
    return model


def cast_weights(model: torch.nn.Module, dtype: torch.dtype, trained: bool) -> None:
    """Cast weights in place, except those that diffusers wants in float32.

    trained: whether those that are trained are cast too.
    """
    exact = getattr(model, "_keep_in_fp32_modules", None) or ()
    for name, weight in model.named_parameters():
        is_exact = any(part in exact for part in name.split("."))
        if weight.is_floating_point() and not is_exact and (trained or not weight.requires_grad):
            weight.data = weight.data.to(dtype)


def is_finite(weight: torch.Tensor) -> bool:
    """Whether all numbers of a tensor are finite, in one pass and without a copy."""
    return weight.numel() == 0 or all(map(math.isfinite, weight.detach().aminmax()))


def raise_for_keys(what: str, keys: Collection[Any]) -> None:
    """Raise ValueError if there are any `keys`. what: such as "missing keys"."""
    if keys:
        raise ValueError(f"{len(keys)} {what}, such as {sorted(map(str, keys))[0]}")


def find_weight_files(
    source: str, subfolder: str, variant: str | None = None, stem: str = "diffusion_pytorch_model"
) -> list[str]:
    """List the .safetensors files that `from_pretrained` reads, several for a sharded model.

    Raises FileNotFoundError if there are none. stem: of their names, "model" for transformers.
    """
    end = f".{variant}" if variant else ""
    names = {f"{stem}{end}.safetensors"}
    index = os.path.join(source, subfolder, f"{stem}.safetensors.index{end}.json")
    if os.path.isfile(index):
        names = read_shard_names(index)
    for name in sorted(names):
        if not os.path.isfile(os.path.join(source, subfolder, name)):
            raise FileNotFoundError(f"{source}/{subfolder} has no {name}")
    return [os.path.join(source, subfolder, name) for name in sorted(names)]


def hash_weights(model: torch.nn.Module, with_old: bool = False) -> str:
    """SHA-256 of the values and shapes of a model's weights, without their names.

    with_old: with the hash of older versions, as a second word.
    """
    weights = [*model.parameters()]
    # gigabytes, and hashing releases the GIL; a task for each of the small ones takes longer
    parts = [weights[start::64] for start in range(64)]
    with ThreadPoolExecutor() as pool:
        hashes = pool.map(lambda part: [hash_weight(each, with_old) for each in part], parts)
        return combine_hashes(itertools.chain(*hashes))


def hash_weight(weight: torch.Tensor, with_old: bool = False) -> list[str]:
    """The hash of a weight and, `with_old`, that of older versions, which is of float32.

    A weight is hashed in the first of three precisions that holds its values. So 16-bit weights are
    hashed as they are stored, and have the same hash if they are loaded as float32.
    """
    flat = weight.detach().flatten()
    # A few numbers show that a precision is too low. A copy of all would take memory.
    parts = [flat[:1024], *flat[1024:].split(2**19)]
    shape = str(tuple(weight.shape))
    kinds = (torch.bfloat16, torch.float16, torch.float32)
    digests = [next(filter(None, (hash_as(kind, parts, f"{kind} {shape}") for kind in kinds)))]
    if with_old:
        digests.append(hash_as(torch.float32, parts, shape))
    return digests


def hash_as(dtype: torch.dtype, parts: list[torch.Tensor], start: str) -> str:
    """The hash of numbers in a precision; "" if it would round them. float32 always has one."""
    digest = hashlib.sha256(start.encode())
    for part in parts:
        cast = part.to(dtype)
        if dtype not in (part.dtype, torch.float32) and not torch.equal(cast.float(), part.float()):
            return ""
        digest.update(cast.cpu().view(torch.uint8).numpy())
    return digest.hexdigest()


def combine_hashes(digests: Iterable[list[str]]) -> str:
    """Return the hash of a model from those of its weights, in any order; see `hash_weight`."""
    columns = ["".join(sorted(column)) for column in zip(*digests, strict=True)]
    return NARROW + " ".join(hashlib.sha256(each.encode()).hexdigest() for each in columns)


def take_shapes(condition: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors on the meta device like those of the first image's condition.

    prompt_lengths has a value, the longest possible one, because models read it on the CPU. The
    values of masks, which some models read, are added as NAME_values, on the CPU.
    """
    shapes = {name: torch.empty_like(value[:1], device="meta") for name, value in condition.items()}
    if "prompt_lengths" in shapes:
        longest = condition["prompt_embeds"].shape[1]
        shapes["prompt_lengths"] = torch.tensor([longest], device="cpu")
    masks = {name: value for name, value in condition.items() if value.dtype == torch.uint8}
    shapes |= {f"{name}_values": value[:1].cpu() for name, value in masks.items()}
    return shapes


def name_inputs(model: torch.nn.Module, args: Sequence[Any], options: dict[str, Any]) -> set[str]:
    """The names of the tensors in a call of a model, such as added_cond_kwargs['time_ids']."""
    names = [*inspect.signature(type(model).forward).parameters][1:]
    leaves, _ = tree_flatten_with_path(dict(zip(names, args, strict=False)) | options)
    named = ((str(first.key) + keystr(tuple(rest)), leaf) for (first, *rest), leaf in leaves)
    return {name for name, leaf in named if isinstance(leaf, torch.Tensor)}


def list_tensors(values: Any) -> list[torch.Tensor]:
    """The tensors in nested lists, tuples and dicts."""
    return [each for each in tree_leaves(values) if isinstance(each, torch.Tensor)]


def freeze_unreached(model: torch.nn.Module, names: Collection[str]) -> None:
    """Freeze weights that no loss can change, and their adapters: DDP would wait for them.

    names: see `CheckedCall`. For example, a transformer drops the text output of its last block.
    """
    for name, weight in model.named_parameters():
        layer, *adapter = re.split(r"\.lo(?:ra|kr)_", name)
        if (f"{layer}.weight" if adapter else name) in names:
            weight.requires_grad_(False)


def choose_layout(device: torch.device) -> torch.memory_format:
    """Return the memory layout of convolutions' weights for a device.

    channels_last is the fastest on CUDA, but only if group norms keep it, which the device is asked
    here. Those of torch before 2.15 return a contiguous tensor (pytorch issue 111824), so that each
    norm and the convolution after it would copy their inputs. The twins in minimal/ ask the same.
    """
    if not is_gpu(device):
        return torch.preserve_format
    image = torch.empty(1, 64, 2, 2, device=device, memory_format=torch.channels_last)
    keeps_it = group_norm(image, 32).is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if keeps_it else torch.preserve_format


def put_on_device(model: torch.nn.Module, device: torch.device) -> torch.nn.Module:
    """Move a model, and change its memory layout to the device's, see `choose_layout`.

    A video VAE keeps its layout, because torch has no layout for both kinds of its convolutions.
    What --blocks_to_swap keeps in the host's memory stays there.
    """
    layout = choose_layout(device)
    if layout == torch.channels_last and any(weight.dim() == 5 for weight in model.parameters()):
        layout = torch.preserve_format
    with model.block_swap.hiding(model) if is_swapped(model) else contextlib.nullcontext():
        return model.to(device, memory_format=layout)


def freeze_on_device(models: Models, accelerator: Accelerator) -> Models:
    """Freeze models that are not trained, and move them. Returns them.

    Like the trained ones they compute in the precision of --mixed_precision, by autocast.
    """
    for model in models.values():
        put_on_device(model.eval().requires_grad_(False), accelerator.device)
        accelerator.prepare_model(model, device_placement=False, evaluation_mode=True)
    return models


def compile_model(model: torch.nn.Module, backend: str, num_shapes: int = 1) -> None:
    """Compile a model in place, with the options that `accelerate config` set.

    In place, the weights keep their names. If repeated blocks hold nearly all of the model, they
    are compiled one for all. Each of several shapes of the inputs is compiled separately. Code for
    all of them would be slower, and torch would make it only after the second shape, so that a
    resumed run would end with other bits.
    """
    from diffusion_training.blocks import list_compiled

    options = {}
    dynamo = TorchDynamoPlugin()
    if dynamo.backend != DynamoBackend.NO:  # else dynamic=False is only the plugin's default
        options = {"mode": dynamo.mode, "fullgraph": dynamo.fullgraph, "dynamic": dynamo.dynamic}
    if num_shapes > 1:
        options["dynamic"] = False
    with explained(f"torch.compile with {backend} is not possible"):
        if dynamo.use_regional_compilation and dynamo.backend != DynamoBackend.NO:
            model.compile_repeated_blocks(backend=backend, **options)
            return
        parts = list_compiled(model) or [model]
        # torch counts the code of all blocks of a class together, which may differ, as in a LoRA
        if num_shapes * len(parts) > 1:
            raise_recompile_limit(num_shapes * len(parts))
        for part in parts:
            part.compile(backend=backend, **options)


def is_component(entry: Any) -> bool:
    """Whether an entry of model_index.json is a part of the pipeline, as (library, class)."""
    return isinstance(entry, list) and len(entry) == 2 and all(isinstance(x, str) for x in entry)


def list_parameters(models: Models) -> list[torch.nn.Parameter]:
    """Return the trained parameters of all of {name: model}, in order."""
    return [
        parameter
        for model in models.values()
        for parameter in model.parameters()
        if parameter.requires_grad
    ]


def is_block_matrix(name: str, weight: torch.Tensor) -> bool:
    """Return whether a parameter is a matrix in a transformer's blocks, for Muon."""
    blocks = r"(^|\.)(layers|((single_)?transformer_)?blocks)\.\d+\."  # diffusers' names for them
    return weight.dim() == 2 and re.search(blocks, name) is not None


def list_quantized(model: torch.nn.Module) -> list[Any]:
    """Return the layers that `load_quantized` keeps in 8 or 4 bits."""
    if is_adapted(model) and "quantization" not in model.adapter:
        return []
    modules = model.modules()
    return [each for each in modules if isinstance(each, Linear) and hasattr(each, "quantization")]


def list_scales(model: torch.nn.Module) -> list[Any]:
    """Return the scales of quantized layers: tensors, or for nf4 bitsandbytes' objects."""
    layers = list_quantized(model)
    return [x.scale if x.quantization == "int8" else x.quant_state for x in layers]


def copy_trained(model: torch.nn.Module) -> torch.nn.Module:
    """Return a copy that shares the frozen weights, which are gigabytes when a LoRA is trained."""
    frozen = [weight for weight in model.parameters() if not weight.requires_grad]
    scales = list_scales(model)
    return copy.deepcopy(model, {id(shared): shared for shared in [*frozen, *scales]})


def start_average(models: Models) -> Models:
    """Return copies of the models for `update_ema`, with all weights frozen."""
    return {
        name: copy_trained(model).eval().requires_grad_(False) for name, model in models.items()
    }


class AveragedWeights(NamedTuple):
    """Averages and their trained weights, in the same order.

    They are listed once, because a walk through the modules of SDXL takes 5 ms.
    """

    means: list[torch.nn.Parameter]
    weights: list[torch.nn.Parameter]

    @classmethod
    def of(cls, averaged: Models, models: Models) -> "AveragedWeights":
        pairs = [
            pair
            for name, model in models.items()
            for pair in zip(averaged[name].parameters(), model.parameters(), strict=True)
            if pair[1].requires_grad
        ]
        return cls([mean for mean, _ in pairs], [weight for _, weight in pairs])

    def move(self, decay: float) -> None:
        """Move the averages towards the weights, which get the share 1 - decay."""
        get_ema_multi_avg_fn(decay)(self.means, self.weights, None)


def update_ema(averages: AveragedWeights, step: int, args: argparse.Namespace) -> None:
    """Move the averaged weights towards the trained ones after `step` optimizer steps.

    The decay warms up as in diffusers' EMAModel (after @crowsonkb); the first step copies.
    """
    decay = min(args.ema_max_decay, 1 - (1 + (step - 1) / args.ema_inv_gamma) ** -args.ema_power)
    averages.move(decay)


def read_precision(
    source: str | None,
    subfolder: str = "",
    variant: str | None = None,
    kind: Any = None,
    **others: Any,
) -> torch.dtype:
    """Return the precision of a model's safetensors files; float32 if it is mixed or unknown.

    By default, diffusers would load 16-bit weights as float32.

    kind: the model's class, of diffusers if it is None. The rest is as for `from_pretrained`.
    """
    is_diffusers = kind is None or issubclass(kind, ModelMixin)
    stem = "diffusion_pytorch_model" if is_diffusers else "model"
    kinds = set()
    with contextlib.suppress(Exception):  # other kinds of files
        for path in find_weight_files(str(source), subfolder, variant, stem):
            with safe_open(path, "pt") as file:
                kinds |= {file.get_slice(name).get_dtype() for name in file.keys()}
    kinds = {each for each in kinds if "F" in each}  # also integers, such as numbers of positions
    if kinds in ({"F16"}, {"BF16"}):
        return torch.float16 if kinds == {"F16"} else torch.bfloat16
    return torch.float32


# what to do if a checkpoint is of another base or adapter
KEEP = "keep base and flags as they were, or choose a new --output_dir"


def is_adapted(model: torch.nn.Module) -> bool:
    """Return whether `add_lora` has added an adapter to a model."""
    return hasattr(model, "adapter")


def is_swapped(model: torch.nn.Module) -> bool:
    """Return whether --blocks_to_swap keeps weights of a model in the host's memory."""
    return hasattr(model, "block_swap")
