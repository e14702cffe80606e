"""The data of text-to-image trainers: rows of latent caches, or images that each step encodes."""

from argparse import Namespace
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from accelerate.utils import broadcast_object_list

from diffusion_training.batches import Batch, Models, Predict, Prepared
from diffusion_training.data.buckets import choose_sizes
from diffusion_training.data.captions import (
    are_cut,
    report_cut,
    report_emptied,
    report_equal,
    sample_captions,
    tokenize_batch,
    transform_row,
)
from diffusion_training.data.images import make_time_ids, shrink_masks
from diffusion_training.data.rows import ImageRows, RowDataset, load_rows, read_items
from diffusion_training.data.texts import CaptionChoice, weigh_captions
from diffusion_training.data.transforms import Transform, make_transform
from diffusion_training.errors import fail
from diffusion_training.families.base import Base, Encoders, Family, Prompts, Tokenizers
from diffusion_training.files import find_differences
from diffusion_training.latents.encoders import (
    Latents,
    check_sides,
    describe_latents,
    describe_models,
    encode_images,
    load_encoders,
    place_scale,
    try_encoders,
)
from diffusion_training.latents.reader import Cache, load_cache
from diffusion_training.latents.shards import Shards
from diffusion_training.latents.stream import Storage, StoredLatents, open_latents
from diffusion_training.latents.text_encoders import (
    describe_prompts,
    encode_caption,
    encode_empty_prompt,
    encode_prompts,
    load_text_encoders,
)
from diffusion_training.launch import Launch
from diffusion_training.models import check_shapes, put_on_device
from diffusion_training.order import Key, draw_choices
from diffusion_training.remote import is_address


@dataclass(frozen=True)
class ValidationPrompts:
    """--validation_prompts, encoded once at the start, in float32 on the CPU."""

    prompts: list[Prompts]  # each [1, ...]
    empty: Prompts  # [1, ...], for guidance

    def choose(self, numbers: Sequence[int], device: torch.device) -> tuple[Prompts, Prompts]:
        """Return (the prompts with these numbers, the empty prompt), on the device."""
        prompts: list[dict[str, Any]] = [dict(self.prompts[number]) for number in numbers]
        chosen = {}
        empty = {}
        for name, value in dict[str, Any](self.empty).items():
            chosen[name] = torch.cat([prompt[name] for prompt in prompts]).to(device)
            empty[name] = value.to(device)
        return cast(Prompts, chosen), cast(Prompts, empty)


@dataclass(frozen=True)
class Data:
    """The opened data of a run."""

    dataset: Any  # `CaptionedImages` or `StoredLatents`
    family: Family
    latents: Latents
    empty_prompt: dict[str, torch.Tensor]  # for one image, float32, on the device
    empty_length: int  # in tokens
    # on the device; a cache of tokens needs no VAE, and one of embeddings none of them
    encoders: Encoders | None
    validation: ValidationPrompts | None
    resolution: int
    bucket_step: int | None
    clip_skip: int | None
    caption_weights: list[float] | None
    mask_column: str | None
    num_workers: int  # processes that load the data
    # for the tags in a LoRA's header: at most 10,000, on the first process, none from an address
    captions: Sequence[str] = ()

    def modules(self) -> list[torch.nn.Module]:
        """The encoders on the device."""
        return self.encoders.modules() if self.encoders else []

    def settings(self) -> dict[str, Any]:
        """The values that a checkpoint records, under the names of the flags."""
        settings = {
            "resolution": self.resolution,
            "clip_skip": self.clip_skip,
            "caption_weights": self.caption_weights,
            "mask_column": self.mask_column,
            "dataloader_num_workers": self.num_workers,
        }
        if order := getattr(self.dataset, "order", None):
            settings |= {"order": order, "shuffle_shards": order["shuffle_shards"]}
        return settings


class CaptionedImages(RowDataset):
    """Turns keys of `step_batches` into a `Batch` of images and tokens: `dataset[keys]`.

    A row that can't be used has weight 0. sizes: see `choose_sizes`.
    """

    def __init__(
        self,
        images: ImageRows,
        source: str,
        transform: Transform,
        tokenizers: Tokenizers,
        choice: CaptionChoice,
        sizes: np.ndarray | None,
        shuffle_buffer: int,
    ) -> None:
        super().__init__(images, source, shuffle_buffer)
        self.transform = transform
        self.tokenizers = tokenizers
        self.choice = choice
        self.sizes = sizes

    def __getitem__(self, keys: list[Key]) -> Batch:
        targets: Sequence[Any] = [None] * len(keys)
        if self.sizes is not None:
            targets = self.sizes[[key[1] for key in keys]].tolist()
        items = []
        flips = []
        weights = []
        for key, row, target in zip(keys, read_items(self.rows, keys), targets, strict=True):
            epoch, number, weight = key[:3]
            item = transform_row(number, epoch, row, self.transform, target)
            flip = draw_choices(self.transform.seed, epoch, number)[2] < 0.5
            flips.append(bool(self.transform.random_flip and flip))
            for name in item.keys() & {"pixel_values", "mask"} if flips[-1] else ():
                item[name] = item[name].flip(-1)
            weights.append(0.0 if item["skipped"] else weight)
            items.append(item)
        batch: dict[str, Any] = {}
        for name in items[0].keys() & {"pixel_values", "mask"}:
            batch[name] = torch.stack([item[name] for item in items])
        texts = [item["text"] for item in items]
        batch |= tokenize_batch(self.tokenizers, self.choice, texts, keys)
        for name in ("original_size", "crop_top_left"):
            batch[name] = torch.tensor([item[name] for item in items])
        batch["flipped"] = torch.tensor(flips)
        batch["weight"] = torch.tensor(weights)
        batch["skipped"] = [(item["key"], item["skipped"]) for item in items if item["skipped"]]
        return cast(Batch, batch)


def open_data(
    launch: Launch,
    base: Base,
    checkpoint: Path | None,
    before: dict[str, Any],
    args: Namespace,
    optional_columns: Collection[str] = (),
) -> Data:
    """The data of --latents_dir, or else images, with the encoders that each step needs.

    before: the settings of the checkpoint, whose order of the rows is kept. optional_columns: names
    of columns to read from a cache besides the default ones.
    """
    if args.latents_dir:
        return open_caches(launch, base, checkpoint, before, args, optional_columns)
    return open_images(launch, base, args)


def open_caches(
    launch: Launch,
    base: Base,
    checkpoint: Path | None,
    before: dict[str, Any],
    args: Namespace,
    optional_columns: Collection[str] = (),
) -> Data:
    """The data of latent caches. Text encoders are loaded if a cache holds only tokens."""
    maker = "precompute_latents.py"
    if base.family.named_in_cache:  # sd and sdxl need no flag
        maker += f" --model_family {base.family.name}"
    caches = {folder: load_cache(folder, maker) for folder in args.latents_dir}
    first = caches[args.latents_dir[0]]
    text_cache = first.settings["text_cache"]
    transform = first.settings["transform"]
    base = replace(
        base, clip_skip=base.clip_skip or first.settings["text_encoder"].get("clip_skip")
    )
    caption_weights = args.caption_weights or transform.get("caption_weights")
    resolution = args.resolution or transform["resolution"]
    wants_tags = args.rank and args.output_kohya_format
    exact = None
    if launch.is_main:
        exact = check_caches(caches, base, caption_weights, args)
    launch.accelerator.wait_for_everyone()
    validation = encode_validation(launch, base, exact, args.validation_prompts)
    del exact
    encoders = reads = None
    if text_cache == "ids":
        text_encoders, tokenizers = load_text_encoders(base, launch.dtype)
        text_encoders.requires_grad_(False).to(launch.device)
        encoders = Encoders(base.family, None, text_encoders, tokenizers, base.clip_skip or 0)
        choice = choose_captions(args, caption_weights)
        reads = (tokenizers, choice) if choice.shuffle else None
    empty_prompt = {
        name: (embeds if embeds.dtype == torch.bool else embeds.float()).to(launch.device)
        for name, embeds in first.empty_prompt.items()
    }
    shape = tuple(first.settings["latents_shape"])
    latents = Latents(
        kind=first.settings["latents"],
        shape=shape,
        shift=place_scale(first.settings["vae"].get("shift_factor", 0.0), launch.device),
        factor=place_scale(first.settings["vae"]["scaling_factor"], launch.device),
        downscale=resolution // shape[-1],
    )
    dataset = StoredLatents(
        caches,
        args.seed,
        args.random_flip,
        caption_weights,
        reads,
        optional_columns,
        rank=launch.rank,
        num_processes=launch.num_processes,
    )
    storage = Storage(args.shards_dir, args.shards_size, args.shuffle_shards)
    order = before.get("order")
    open_latents(launch, caches, dataset, storage, args.latents_weights, checkpoint, order)
    return Data(
        dataset=dataset,
        family=base.family,
        latents=latents,
        empty_prompt=empty_prompt,
        empty_length=count_length(empty_prompt),
        encoders=encoders,
        validation=validation,
        resolution=resolution,
        bucket_step=transform.get("bucket_step"),
        clip_skip=base.clip_skip,
        caption_weights=caption_weights,
        mask_column=args.mask_column,
        num_workers=0,  # a thread is faster than processes, which would have to send their batches
        captions=sample_cached_captions(first.shards) if launch.is_main and wants_tags else [],
    )


def open_images(launch: Launch, base: Base, args: Namespace) -> Data:
    """The data of images and captions, with the encoders that each step needs, on the device."""
    resolution = args.resolution or base.family.resolution
    num_workers = launch.choose_workers(args.dataloader_num_workers)
    caption_weights = weigh_captions(args)
    images = load_rows(args, args.streaming, [args.caption_column])
    texts: list[str] = []
    encoders = load_encoders(base, launch.dtype)
    check_sides(base.family.downscale(encoders.vae), resolution, args.bucket_step)
    validation = encode_validation(launch, base, encoders, args.validation_prompts)
    put_on_device(encoders.vae.requires_grad_(False), launch.device)
    encoders.text_encoders.requires_grad_(False).to(launch.device)
    try_encoders(encoders)
    if launch.is_main:
        texts = sample_captions(images.rows, args.caption_column)
        report_equal(texts, args)
        report_emptied(encoders.tokenizers, texts)
        cut = are_cut(encoders.tokenizers, texts or [""])
        report_cut(sum(cut), len(cut), encoders.tokenizers[0].model_max_length)
    channels, _ = base.family.count_channels(encoders.vae)
    transform = make_transform(
        args, images.column, images.mask_column, caption_weights, channels, resolution
    )
    sizes = choose_sizes(launch.accelerator, images.rows, transform, num_workers)
    kind = "moments" if base.family.has_moments(encoders.vae) else "sample"
    dataset = CaptionedImages(
        images,
        transform.source,
        transform,
        encoders.tokenizers,
        choose_captions(args, caption_weights),
        sizes,
        args.shuffle_buffer,
    )
    empty_prompt = encode_empty_prompt(encoders, base)
    return Data(
        dataset=dataset,
        family=base.family,
        latents=describe_latents(base.family, encoders.vae, resolution, kind),
        empty_prompt=empty_prompt,
        empty_length=count_length(empty_prompt),
        encoders=encoders,
        validation=validation,
        resolution=resolution,
        bucket_step=args.bucket_step,
        clip_skip=base.clip_skip,
        caption_weights=caption_weights,
        mask_column=images.mask_column,
        num_workers=num_workers,
        captions=texts,
    )


def sample_cached_captions(shards: Shards) -> list[str]:
    """The first caption of each of the first 10,000 rows of a cache."""
    captions: list[str] = []
    if is_address(shards.folder):  # its shards are not fetched yet
        return captions
    for _, batch in shards:
        rows = batch["text"].slice(0, 10**4 - len(captions)).to_pylist()
        captions += [text[0] if isinstance(text, list) else text for text in rows]
        if len(captions) == 10**4:
            break
    return [text for text in captions if isinstance(text, str)]


def count_length(empty_prompt: dict[str, torch.Tensor]) -> int:
    """How many tokens the empty prompt has."""
    embeds = empty_prompt["prompt_embeds"]
    return int(empty_prompt.get("prompt_mask", torch.ones(len(embeds))).sum())


def choose_captions(args: Namespace, weights: list[float] | None) -> CaptionChoice:
    return CaptionChoice(args.seed, weights, args.shuffle_caption, args.keep_tokens)


def check_caches(
    caches: dict[str, Cache], base: Base, caption_weights: list[float] | None, args: Namespace
) -> Encoders:
    """Stop with an error if caches are of other models, or lack data that the flags need.

    Returns the encoders used for the comparison, in float32 on the CPU.
    """
    first = next(iter(caches.values())).settings
    encoders = load_encoders(base, torch.float32)
    check_sides(base.family.downscale(encoders.vae), args.resolution, args.bucket_step)
    try_encoders(encoders)
    compared = encoders
    # --clip_skip does not change a cache of ids, which the trainer encodes
    if first["text_cache"] == "ids":
        compared = replace(encoders, clip_skip=0)
    described = describe_models(compared)
    resolution = first["transform"]["resolution"]
    latents = describe_latents(base.family, encoders.vae, resolution, first["latents"])
    described |= {"latents": latents.kind, "latents_shape": list(latents.shape)}
    described |= describe_prompts(encoders, encode_empty_prompt(encoders, base))
    described |= {"text_cache": first["text_cache"], "features": first.get("features")}
    for folder, cache in caches.items():
        check_cache(folder, cache.settings, described, caption_weights, args)
    return encoders


def check_cache(
    folder: str,
    cache: dict[str, Any],
    described: dict[str, Any],
    caption_weights: Collection[float] | None,
    args: Namespace,
) -> None:
    """Stop with an error if a cache is not as `described`, or lacks data that the flags need."""
    known = {name: cache.get(name) for name in described}
    if differences := find_differences(known, described):
        fail(
            f"{folder} does not fit these models or the first cache ({', '.join(differences)}): "
            "give the models that it was made with"
        )
    if args.shuffle_caption and cache["text_cache"] != "ids":
        fail(
            f"--shuffle_caption needs captions, but {folder} holds embeddings: make it with "
            "--text_cache ids"
        )
    length = cache["tokenizer"]["model_max_length"]
    report_cut(cache["captions_cut"], cache["rows"], length, f"{folder}: ")
    num_weights = len(caption_weights or [])
    num_captions = len(cache["transform"].get("caption_weights") or [])
    if num_weights != num_captions:
        fail(
            f"--caption_weights has {num_weights} values, but {folder} was made with {num_captions}"
        )
    if args.random_flip and not cache["transform"]["random_flip"]:
        fail(f"--random_flip needs a cache made with --random_flip, unlike {folder}")
    if args.resolution not in (None, cache["transform"]["resolution"]):
        held = cache["transform"]["resolution"]
        fail(f"--resolution {args.resolution} differs from the {held} px of {folder}: leave it out")


def encode_validation(
    launch: Launch, base: Base, encoders: Encoders | None, prompts: list[str] | None
) -> ValidationPrompts | None:
    """Encode --validation_prompts in float32 on the first process, and send them to all.

    encoders: used if they are loaded, and in float32. Prompts are encoded one by one, so that the
    samples of one do not depend on the others.
    """
    if not prompts:
        return None
    sent: list[ValidationPrompts | None] = [None]
    if launch.is_main:
        if encoders is None or encoders.text_encoders[0].dtype != torch.float32:
            text_encoders, tokenizers = load_text_encoders(base, torch.float32)
            encoders = Encoders(base.family, None, text_encoders, tokenizers, base.clip_skip or 0)
        empty = {name: embeds[None] for name, embeds in encode_empty_prompt(encoders, base).items()}
        encoded = [encode_caption(encoders, prompt) for prompt in prompts]
        sent = [ValidationPrompts(encoded, cast(Prompts, empty))]
    if launch.num_processes > 1:
        broadcast_object_list(sent)
    return sent[0]


def check_denoiser(
    models: Models,
    predict: Predict,
    what: str,
    source: str,
    data: Data,
    further: dict[str, torch.Tensor] | None = None,
) -> list[str]:
    """Stop with an error if the model to be trained does not fit the data.

    models: {its name: the model}. what: a word for it, such as U-Net. source: where it is from.
    further: additions of the script's `prepare_batch` to the condition, for one image, with any
        values. An entry [1, C, h, w] counts as C more channels.

    Returns the names of the weights that the prediction does not depend on.
    """
    family = data.family
    (model,) = models.values()
    name = f"the {what} of {source}"
    embeds_width = data.empty_prompt["prompt_embeds"].shape[-1]
    own_width = model.config[family.embeds_width]
    further = further or {}
    channels = sum(value.shape[1] for value in further.values() if value.dim() == 4)
    channels += data.latents.channels
    if (model.config.in_channels, own_width) != (channels, embeds_width):
        fail(
            f"{name} takes {model.config.in_channels} channels and embeddings of {own_width}, but "
            f"the data has {channels} and {embeds_width}: use the VAE and text encoder of this "
            "model"
        )
    if sentence := family.check_model(model.config):
        fail(f"{name} {sentence}")
    multiple = family.patch_size(model) * data.latents.downscale
    side = data.bucket_step or data.resolution
    if side % multiple:
        fail(f"{name} needs sides that are multiples of {multiple} pixels, not {side}")
    condition = {key: embeds[None] for key, embeds in data.empty_prompt.items()}
    if family.needs_lengths:
        condition["prompt_lengths"] = torch.tensor([data.empty_length])
    if family.needs_sizes:
        condition["time_ids"] = torch.zeros(1, 6)
    shape = [data.latents.channels, *data.latents.shape[1:]]
    return check_shapes(models, predict, name, shape, condition | further)


def encode_batch(batch: Batch, data: Data, caption_dropout: float) -> Prepared:
    """A loaded batch -> latents [N, C, h, w], prompts, and the mask of the loss.

    Each time, other latents are drawn from the VAE's distribution. The empty prompt replaces a
    share `caption_dropout` of the captions. The mask is in [0, 1], [N, 1, h, w].
    """
    if "latents" in batch:  # from a cache
        latents = batch["latents"].float().unflatten(1, batch["latents_shape"])
    else:
        latents = encode_images(cast(Encoders, data.encoders), batch["pixel_values"])
    if "prompt_embeds" in batch:
        embeds = dict[str, Any](batch)
        prompts = {
            name: embeds[name].to(empty.dtype).unflatten(1, empty.shape)
            for name, empty in data.empty_prompt.items()
        }
    else:
        prompts = dict(encode_prompts(cast(Encoders, data.encoders), cast(Any, batch)))
    if data.latents.kind == "moments":
        mean, std = latents.chunk(2, dim=1)
        # By shape, not `randn_like`: a VAE's strides must not decide which number goes where.
        latents = mean + std * torch.randn(mean.shape, device=mean.device)
    # Contiguous, as a cache has them: a VAE's memory layout must not decide how the model computes.
    latents = ((latents - data.latents.shift) * data.latents.factor).contiguous()
    drop_captions(batch, prompts, data, caption_dropout, latents.device)
    size = latents.shape[-2:]
    if data.family.needs_sizes:
        target = [data.latents.downscale * side for side in size]
        prompts["time_ids"] = make_time_ids(
            batch["original_size"], batch["crop_top_left"], target, batch["flipped"]
        )
    loss_inputs = {}
    if "mask" in batch:
        if "latents" in batch:
            mask = batch["mask"].unflatten(1, (1, *size))
        else:
            mask = shrink_masks(batch["mask"], data.latents.downscale)
        loss_inputs["mask"] = mask / 255
    return Prepared(latents, prompts, loss_inputs)


def drop_captions(
    batch: Batch, prompts: dict[str, torch.Tensor], data: Data, share: float, device: torch.device
) -> None:
    """Replace a share of the captions with the empty prompt.

    This trains the unconditional prediction that guidance needs (arXiv:2207.12598).
    """
    count = len(prompts["prompt_embeds"])
    if data.family.needs_lengths:  # drawn on the CPU, where lengths are read, so nothing waits
        dropped = torch.rand(count) < share
        lengths = torch.tensor(batch["prompt_lengths"]).expand(count)  # one length, in a search
        if "input_ids" in batch:  # these lengths include a template
            lengths = lengths - data.family.dropped_tokens
        prompts["prompt_lengths"] = torch.where(dropped, data.empty_length, lengths)
        dropped = dropped.to(device, non_blocking=True)
    else:
        dropped = torch.rand(count, device=device) < share
    for name, empty in data.empty_prompt.items():
        shape = [-1] + [1] * empty.dim()
        prompts[name] = torch.where(dropped.view(shape), empty, prompts[name])
