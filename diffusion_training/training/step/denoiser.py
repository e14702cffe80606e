"""The denoiser of a text-to-image pipeline: loaded or new, checked, with a LoRA added."""

import contextlib
from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import init_empty_weights

from diffusion_training.batches import Models, Predict
from diffusion_training.blocks import chooses_plan, list_segments
from diffusion_training.data.captioned_data import Data
from diffusion_training.errors.sentences import CHECKS, explained, fail
from diffusion_training.families.base import Base, Family, Prompts, catch_inputs
from diffusion_training.families.lora_layers import COMMON, LAYER_SETS, LAYERS
from diffusion_training.files import is_old_hash
from diffusion_training.launch import Launch
from diffusion_training.memory import is_gpu
from diffusion_training.models import (
    cast_weights,
    hash_weights,
    load_weights,
    read_precision,
    take_shapes,
)
from diffusion_training.shapes import check_shapes
from diffusion_training.training.lora.lora import (
    Merge,
    add_lora,
    list_further_layers,
    load_network_weights,
)
from diffusion_training.training.lora.lora_files import read_lora_file
from diffusion_training.training.lora.lora_flags import read_settings

# entries of a U-Net's config with which it takes more inputs than captions
FURTHER = ("class_embed_type", "num_class_embeds", "encoder_hid_dim_type")


def load_denoiser(
    kind: Any,
    base: Base,
    config_source: Path | None,
    configs: Path | None,
    launch: Launch,
    args: Namespace,
) -> tuple[torch.nn.Module, str, str]:
    """Load the pretrained pipeline's denoiser, or make a new one.

    With --rank it is loaded in the precision of the launch or quantized, with --full_bf16 in
    bfloat16.

    kind: its class. config_source: the config of a new one, as a flag names it. configs:
    with --init_from, the checkpoint whose config is used; its weights are loaded later.

    Returns (the denoiser, where it is from, the hash of its weights if --rank is given).
    """
    folder = base.family.folder
    with_old = is_old_hash(read_begun(configs, folder).get("base_sha256"))
    if configs and not config_source and not args.rank:
        config_source = configs / folder
    source = str(config_source or base.transformer or base.source)
    options = {"cache_dir": args.cache_dir}
    with explained(f"{source} holds no {kind.__name__}"):
        if not config_source:
            _, options = base.locate(base.transformer, folder, launch.has_weights)
        if config_source or not launch.has_weights:
            config = kind.load_config(source, **options)
            if config.get("_class_name", kind.__name__) != kind.__name__:
                raise ValueError(f"it is a {config['_class_name']}")
            without_weights = init_empty_weights(include_buffers=False)
            with contextlib.nullcontext() if launch.has_weights else without_weights:
                model = kind.from_config(config)
            if args.full_bf16:
                cast_weights(model, torch.bfloat16, trained=True)
            return model, source, ""
        if args.rank:
            swaps = args.blocks_to_swap or may_swap(launch, args)
            if args.blocks_to_swap or (is_gpu(launch.device) and not swaps):
                from diffusion_training.training.lora.block_swap import check_memory

                check_memory(
                    kind, source, launch, args.base_precision, args.blocks_to_swap, **options
                )
            # of a quantized base; what is not swapped is moved later
            device = torch.device("cpu") if swaps else launch.device
            merge = None
            if args.training_adapter:
                from diffusion_training.training.lora.training_adapter import read_training_adapter

                merge = read_training_adapter(
                    args.training_adapter, kind, source, base.family, **options
                )
            model, base_hash = load_base(
                kind, source, args.base_precision, device, launch.dtype, merge, with_old, **options
            )
            return model, source, base_hash
        dtype = torch.bfloat16 if args.full_bf16 else None
        return load_weights(kind, source, dtype, **options), source, ""


def read_begun(configs: Path | None, folder: str) -> dict[str, Any]:
    """The settings of the LoRA in a checkpoint, {} without one. Stops if they are damaged."""
    if configs is None:
        return {}
    with explained(f"{configs} is damaged; resume from another or choose a new --output_dir"):
        return read_settings(configs / folder)


def adapt_denoiser(
    model: torch.nn.Module,
    base: Base,
    base_hash: str,
    configs: Path | None,
    launch: Launch,
    args: Namespace,
) -> None:
    """Freeze the denoiser and add the LoRA of --rank, with the weights of --network_weights.

    With --blocks_to_swap, most of its frozen weights stay in the host's memory from now on.

    configs: the checkpoint from which the LoRA is resumed.
    """
    family = base.family
    network = args.network_weights
    which = args.lora_layers or LAYERS.get(type(model).__name__, COMMON).default
    before = read_begun(configs, family.folder)
    begun: list[str] = before.get("target_modules", [])
    if network and not before and (which == "all" or not args.lora_layers):
        with explained(f"--network_weights {network} can't be used"):
            begun = [*read_lora_file(network, model, family.folder, family.convert_lora).layers]
    layers = choose_lora_layers(model, family, which, begun, launch, args)
    alpha = args.lora_alpha or before.get("lora_alpha", before.get("alpha"))
    if alpha not in (None, args.lora_alpha, args.rank):
        launch.accelerator.print(f"The LoRA keeps its --lora_alpha {alpha:g}")
    flags = Namespace(**vars(args) | {"lora_layers": which, "lora_alpha": alpha})
    add_lora(model, layers, base_hash, launch.dtype, flags)
    if network:
        load_network_weights(model, network, family.folder, family.convert_lora)
    if args.blocks_to_swap or may_swap(launch, args):
        from diffusion_training.training.lora.block_swap import BlockSwap

        if args.blocks_to_swap:
            swap = BlockSwap(model, args.blocks_to_swap, launch.device)
            launch.accelerator.print(swap.describe())
        elif list_segments(model):  # until --fit has chosen
            BlockSwap(model, "all", launch.device, is_pinned=False)


def choose_lora_layers(
    model: torch.nn.Module,
    family: Family,
    which: str,
    begun: list[str],
    launch: Launch,
    args: Namespace,
) -> list[str]:
    """The layers that get adapters: ends of their names, or the whole names in an earlier LoRA.

    which: --lora_layers, or the model's own. begun: the layers of a checkpoint or of
    --network_weights; [] for a new LoRA. Without --lora_layers such a LoRA keeps them. With
    `all` it does too if they are a part of all, because `all` was less in older versions.
    """
    layers = family.choose_layers(model, which)
    if args.network_weights and which == "all":
        layers += list_further_layers(layers, begun)
    sets = {name: {*family.choose_layers(model, name)} for name in LAYER_SETS}
    if args.lora_layers:
        keeps = which == "all" and {*begun} < {*layers} and not {*begun} <= sets["attention"]
    else:
        ends = tuple(f".{end}" for end in layers)
        names = {name for name, _ in model.named_modules() if f".{name}".endswith(ends)}
        keeps = bool(begun) and {*begun} not in ({*layers}, names)
    if not keeps:
        return layers
    own = [name for name in sets if sets[name] == {*begun}] or [f"{len(begun)} layers"]
    launch.accelerator.print(
        f"The LoRA keeps what it was begun with ({own[0]}), not --lora_layers {which}"
    )
    return begun


def may_swap(launch: Launch, args: Namespace) -> bool:
    """Whether --fit may keep blocks of a LoRA's base in the host's memory."""
    can_swap = args.base_precision != "nf4" and not launch.compile
    return can_swap and chooses_plan(launch.device, args)


def fit_denoiser(*given: Any) -> str | None:
    """Choose the plan of --fit; see `fit_models`."""
    from diffusion_training.training.step.fit import fit_models

    return fit_models(*given)


def check_denoiser(
    models: Models,
    predict: Predict,
    what: str,
    source: str,
    data: Data,
    further: dict[str, torch.Tensor] | None = None,
    is_own: bool = False,
) -> list[str]:
    """Stop with an error if the model to be trained does not fit the data.

    models: {its name: the model}. what: a word for it, such as U-Net. source: where it is from.
    further: additions of the script's `prepare_batch` to the condition, for one image, with any
        values. An entry [1, C, h, w] of the latents' size counts as C more channels.
    is_own: whether it is the pipeline's own model, which should fit. Then the call on the meta
        device, which takes 0.3 s for SDXL, is only made if the run fails.

    Returns the names of the weights that the prediction does not depend on, [] with `is_own`.
    """
    family = data.family
    (model,) = models.values()
    name = f"the {what} of {source}"
    embeds_width = data.empty_prompt["prompt_embeds"].shape[-1]
    further = further or {}
    shape = [data.latents.channels, *data.latents.shape[1:]]
    maps = [value for value in further.values() if value.dim() == 4]
    channels = sum(value.shape[1] for value in maps if [*value.shape[2:]] == shape[1:]) + shape[0]
    if data.classes and model.config[family.embeds_width] != embeds_width:
        fail(
            f"{name} takes embeddings of {model.config[family.embeds_width]}, but the cache has "
            f"{embeds_width} classes: set {family.embeds_width} to {embeds_width} in its config"
        )
    sentence = family.find_input_fault(model.config, channels, embeds_width)
    if sentence := sentence or family.find_model_fault(model.config):
        fail(f"{name} {sentence}")
    multiple = family.patch_size(model) * data.latents.downscale
    side = data.bucket_step or data.resolution
    if not multiple or side % multiple:
        fail(f"{name} needs sides that are multiples of {multiple} pixels, not {side}")
    family.try_model(model, data.resolution)
    condition = {key: embeds[None] for key, embeds in data.empty_prompt.items()}
    if family.needs_lengths:
        condition["prompt_lengths"] = torch.tensor([data.empty_length])
    if family.needs_sizes:
        condition["time_ids"] = torch.zeros(1, 6)
    condition |= data.references
    check = partial(check_shapes, models, predict, name, shape, condition | further)
    inputs: set[str] = set()
    unreached: list[str] = []
    takes_more = any(model.config.get(name) for name in FURTHER)
    # the loss would broadcast a prediction of one channel, and the run would not fail
    if is_own and not takes_more and model.config.out_channels == shape[0]:
        with torch.device("meta"), contextlib.suppress(Exception):  # `check` explains it
            given = torch.zeros(1, *shape), torch.zeros(1), take_shapes(condition | further)
            inputs = catch_inputs(model, partial(predict, models, *given))
            CHECKS.append(check)
    if not inputs:
        unreached, inputs = check()
    if left_out := family.list_inputs(model, cast(Prompts, condition)) - inputs:
        names = ", ".join(sorted(left_out))
        fail(
            f"{name} can't be trained here: its pipeline also gives it {names}, which training "
            "does not"
        )
    return unreached


def load_base(
    model_class: Any,
    source: str,
    base_precision: str | None,
    device: torch.device,
    dtype: torch.dtype,
    merge: Merge | None = None,
    with_old: bool = False,
    hashed: bool = True,
    **options: Any,
) -> tuple[torch.nn.Module, str]:
    """Load the base of a LoRA. Returns (model, `hash_weights` of it, "" if it is not `hashed`).

    base_precision: "int8" or "nf4", or None for the precision of the files. device: the place of
    quantized layers. dtype: that of the computation. merge: changes the weights, see
    `read_training_adapter`. with_old: see `hash_weights`. options: subfolder and variant.
    """
    if base_precision:
        from diffusion_training.training.lora.quantization import load_quantized

        return load_quantized(
            model_class, source, base_precision, device, dtype, merge=merge, with_old=with_old,
            hashed=hashed, **options,
        )  # fmt: skip
    precision = read_precision(source, **options)
    model = load_weights(model_class, source, **options, torch_dtype=precision)
    if merge:
        for name, weight in model.named_parameters():
            weight.data = merge(name, weight.data).to(weight.dtype)
    return model, hash_weights(model, with_old) if hashed else ""
