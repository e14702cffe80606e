"""The data of text-to-image trainers: rows of latent caches, or images that each step encodes."""

import functools
import itertools
import math
from argparse import Namespace
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from accelerate.utils import broadcast_object_list

from diffusion_training.arguments import is_address
from diffusion_training.data.buckets import choose_sizes
from diffusion_training.data.captioned_images import CaptionedImages
from diffusion_training.data.captions import (
    are_cut,
    count_lengths,
    report_cut,
    report_emptied,
    report_equal,
    sample_captions,
)
from diffusion_training.data.flags import weigh_captions
from diffusion_training.data.folders import count_references, is_shared
from diffusion_training.data.references import list_reference_columns, read_reference
from diffusion_training.data.rows import load_rows
from diffusion_training.data.texts import CaptionChoice
from diffusion_training.data.transforms import make_transform
from diffusion_training.errors.printing import amount
from diffusion_training.errors.sentences import explained, fail
from diffusion_training.families.base import Base, Encoders, Family, Prompts
from diffusion_training.families.names import FACTS
from diffusion_training.families.opening import refuse_references
from diffusion_training.latents.encoders import (
    Latents,
    check_sides,
    describe_latents,
    describe_models,
    describe_prompts,
    encode_caption,
    encode_empty_prompt,
    load_encoders,
    place_scale,
    try_encoders,
)
from diffusion_training.latents.plan import compare_settings
from diffusion_training.latents.reader import Cache, load_cache
from diffusion_training.latents.shards import Shards, name_repair
from diffusion_training.latents.stream import FOLLOWED, Storage, StoredLatents, open_latents
from diffusion_training.launch import Launch
from diffusion_training.memory import move
from diffusion_training.models import EXACT, put_on_device

MOST_CLASS_PROMPTS = 32


@dataclass(frozen=True)
class PromptEmbeds:
    """Prompts of a flag, encoded once at the start, in float32 on the CPU."""

    prompts: list[Prompts]  # each [1, ...]
    empty: Prompts  # [1, ...], for guidance
    images: Sequence[list[Any]] = ()  # the references of each prompt, as Pillow's images
    # for each prompt an empty one, if the text encoder sees the references
    empties: Sequence[Prompts] = ()

    def choose(self, numbers: Sequence[int], device: torch.device) -> tuple[Prompts, Prompts]:
        """Return (the prompts with these numbers, the empty prompt), on the device."""
        chosen = {name: self.stack(name, numbers, device) for name in self.empty}
        own = self.empties[numbers[0]] if self.empties else self.empty
        empty = {name: move(value, device) for name, value in dict[str, Any](own).items()}
        return cast(Prompts, chosen), cast(Prompts, empty)

    def choose_condition(
        self, numbers: Sequence[int], device: torch.device, like: Collection[str]
    ) -> dict[str, torch.Tensor]:
        """Return the prompts with these numbers as parts of a condition `like` a batch's."""
        chosen = {name: self.stack(name, numbers, device) for name in self.empty}
        if "prompt_lengths" in like:
            masks = self.stack("prompt_mask", numbers, torch.device("cpu"))
            chosen["prompt_lengths"] = masks.sum(dim=1)
        return chosen

    def stack(self, name: str, numbers: Sequence[int], device: torch.device) -> torch.Tensor:
        prompts = [dict[str, Any](self.prompts[number]) for number in numbers]
        return move(torch.cat([prompt[name] for prompt in prompts]), device)


@dataclass(frozen=True)
class Data:
    """The opened data of a run."""

    dataset: Any  # `CaptionedImages` or `StoredLatents`
    family: Family
    latents: Latents
    empty_prompt: dict[str, torch.Tensor]  # for one image, float32, on the device
    # on the device; a cache of tokens needs no VAE, and one of embeddings none of them
    encoders: Encoders | None
    validation: PromptEmbeds | None
    resolution: int
    bucket_step: int | None
    clip_skip: int | None
    caption_weights: list[float] | None
    mask_column: str | None
    num_workers: int  # processes that load the data
    # for the tags in a LoRA's header: at most 10,000, on the first process, none from an address
    captions: Sequence[str] = ()
    class_prompts: PromptEmbeds | None = None  # of --preserve_prior
    classes: tuple[str, ...] = ()  # of a cache made with --class_column
    # references of any values, for one image, as `read_references` adds them to the condition
    references: dict[str, torch.Tensor] = field(default_factory=dict)

    @functools.cached_property
    def empty_length(self) -> int:
        """How many tokens the empty prompt has."""
        embeds = self.empty_prompt["prompt_embeds"]
        return int(self.empty_prompt.get("prompt_mask", torch.ones(len(embeds))).sum())

    @property
    def num_lengths(self) -> int:
        """How many lengths `choose_length` gives to the captions of a batch.

        1 if the model sees all padding, or is called with captions of any length.
        """
        if self.family.needs_lengths or "prompt_mask" not in self.empty_prompt:
            return 1
        return count_lengths(len(self.empty_prompt["prompt_embeds"]))

    @property
    def is_followed(self) -> bool:
        """Whether the cache may still be in the making (--follow)."""
        return getattr(self.dataset, "wait_for_images", None) is not None

    @property
    def num_references(self) -> int:
        """How many images an edit starts from."""
        return len(self.references) // 2  # each has an entry for its size

    @property
    def loaded_encoders(self) -> Encoders:
        """The encoders, for a batch of pixels or tokens."""
        assert self.encoders
        return self.encoders

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


def open_data(
    launch: Launch,
    base: Base,
    checkpoint: Path | None,
    before: dict[str, Any],
    args: Namespace,
    optional_columns: Collection[str] = (),
    with_references: bool = False,
) -> Data:
    """The data of --latents_dir, or else images, with the encoders that each step needs.

    Text encoders are loaded if a cache holds only tokens. before: the settings of the checkpoint,
    whose order of the rows is kept. optional_columns: names of columns to read from a cache besides
    the default ones. with_references: read the columns of `add_reference_flags` beside the images,
    as conditioning_pixel_values.
    """
    if not args.latents_dir:
        if count_references(args) and not with_references:
            if not base.family.takes_references:
                refuse_references(base.family, args)
            fail("references (photo.control.png) are read from a cache: add --cache_latents")
        return open_images(launch, base, args, with_references)
    maker = "precompute_latents.py"
    if base.family.name in FACTS:
        maker += f" --model_family {base.family.name}"
    follow = choose_follow(checkpoint, before, args)
    caches = {folder: load_cache(folder, maker, follow) for folder in args.latents_dir}
    first = caches[args.latents_dir[0]]
    settings = first.settings
    check_family(args.latents_dir[0], settings, base.family)
    transform = settings["transform"]
    clip_skip = base.clip_skip or settings["text_encoder"].get("clip_skip")
    classes = tuple(settings.get("classes", ()))
    with explained(f"{args.latents_dir[0]}/cache.json is damaged: make the cache again"):
        family = base.family.restore_findings(settings)
    base = replace(base, clip_skip=clip_skip, family=family, classes=classes)
    caption_weights = args.caption_weights or transform["caption_weights"]
    resolution = args.resolution or transform["resolution"]
    wants_tags = launch.is_main and args.rank and vars(args).get("output_kohya_format")
    exact = load_matching_encoders(caches, base, caption_weights, args) if launch.is_main else None
    launch.accelerator.wait_for_everyone()
    references = open_references(base.family, settings, args)
    images = group_images(settings, args)
    validation = encode_for_all(launch, base, exact, args.validation_prompts, images)
    texts: list[str] = []
    if launch.is_main and args.trigger:
        texts = sum((sample_cached_captions(cache.shards) for cache in caches.values()), [])
    class_prompts = encode_class_prompts(launch, base, exact, texts, args)
    del exact
    encoders = reads = None
    if settings["text_cache"] == "ids":
        encoders = load_encoders(base, launch.dtype, with_vae=False)
        encoders.text_encoders.requires_grad_(False).to(launch.device)
        if args.shuffle_caption:
            reads = encoders.tokenizers, choose_captions(args, caption_weights)
    empty_prompt = {
        name: (embeds.float() if embeds.is_floating_point() else embeds).to(launch.device)
        for name, embeds in first.empty_prompt.items()
    }
    shape = tuple(settings["latents_shape"])
    latents = Latents(
        kind=settings["latents"],
        shape=shape,
        shift=place_scale(settings["vae"]["shift_factor"], launch.device),
        factor=place_scale(settings["vae"]["scaling_factor"], launch.device),
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
        encoders=encoders,
        validation=validation,
        class_prompts=class_prompts,
        references=references,
        resolution=resolution,
        bucket_step=transform["bucket_step"],
        clip_skip=base.clip_skip,
        caption_weights=caption_weights,
        mask_column=args.mask_column,
        num_workers=0,  # a thread is faster than processes, which would have to send their batches
        captions=sample_cached_captions(first.shards) if wants_tags else [],
        classes=classes,
    )


def choose_follow(checkpoint: Path | None, before: dict[str, Any], args: Namespace) -> float | None:
    """How many minutes to wait for shards (--follow); None for the order of a finished cache.

    A checkpoint keeps its order.
    """
    kind = (before.get("order") or {}).get("kind")
    if checkpoint and args.follow and kind != FOLLOWED:
        fail(f"--follow: {checkpoint} was trained in another order: leave it out, or begin anew")
    return args.follow or (0.0 if kind == FOLLOWED else None)


def open_images(launch: Launch, base: Base, args: Namespace, with_references: bool) -> Data:
    """The data of images and captions, with the encoders that each step needs, on the device."""
    resolution = args.resolution or base.family.resolution
    num_workers = launch.choose_workers(args.dataloader_num_workers)
    caption_weights = weigh_captions(args)
    images = load_rows(args, args.streaming, [args.caption_column], with_references=with_references)
    references = list_reference_columns(images.rows, args) if with_references else ()
    texts = sample_captions(images.rows, args.caption_column) if launch.is_main else []
    in_float32 = launch.dtype == torch.float32
    encoders = None
    if in_float32:
        encoders = load_encoders(base, launch.dtype)
    elif launch.is_main and (args.validation_prompts or args.class_prompt):
        encoders = load_encoders(base, EXACT, with_vae=False)
    validation = encode_for_all(launch, base, encoders, args.validation_prompts)
    class_prompts = encode_class_prompts(launch, base, encoders, texts, args)
    if encoders:
        base = replace(base, family=encoders.family)  # it has found out what it needs
    if not in_float32:
        encoders = None  # free them before the same models are loaded in 16 bits
    encoders = encoders or load_encoders(base, launch.dtype)
    base = replace(base, family=encoders.family)
    check_sides(base.family.downscale(encoders.vae), resolution, args.bucket_step)
    put_on_device(encoders.vae.requires_grad_(False), launch.device)
    encoders.text_encoders.requires_grad_(False).to(launch.device)
    try_encoders(encoders)
    if launch.is_main:
        if not references:
            report_equal(texts, args)
        report_emptied(encoders.tokenizers, texts)
        cut = are_cut(encoders.tokenizers, texts or [""])
        limit = encoders.tokenizers[0].model_max_length
        report_cut(sum(cut), len(cut), limit, base.family.caption_unit)
    channels, _ = base.family.count_channels(encoders.vae)
    transform = make_transform(
        args,
        images.column,
        images.mask_column,
        caption_weights,
        channels,
        resolution,
        references,
        reference_side=resolution,
    )
    sizes = choose_sizes(launch.accelerator, images.rows, transform, num_workers)
    kind = "moments" if base.family.has_moments(encoders.vae) else "sample"
    dataset = CaptionedImages(
        images,
        transform,
        encoders.tokenizers,
        choose_captions(args, caption_weights),
        sizes,
        args.shuffle_buffer,
    )
    return Data(
        dataset=dataset,
        family=base.family,
        latents=describe_latents(base.family, encoders.vae, resolution, kind),
        empty_prompt=encode_empty_prompt(encoders, base),
        encoders=encoders,
        validation=validation,
        class_prompts=class_prompts,
        resolution=resolution,
        bucket_step=args.bucket_step,
        clip_skip=base.clip_skip,
        caption_weights=caption_weights,
        mask_column=images.mask_column,
        num_workers=num_workers,
        captions=texts,
    )


def open_references(
    family: Family, settings: dict[str, Any], args: Namespace
) -> dict[str, torch.Tensor]:
    """References for a trial of the model, if a cache has some; see `Data.references`.

    Stops with an error if flags can't be used with references. settings: of the cache.
    """
    about = settings.get("references")
    given = vars(args).get("validation_images")
    if about is None:
        if given:
            fail("--validation_images needs a cache with references: leave it out")
        return {}
    if not family.takes_references:
        fail(f"the cache has references, which can't be trained with a {family.pipeline}")
    if args.validation_metrics:
        fail("--validation_metrics can't draw edits yet: leave it out")
    advice = {"caption_dropout": "give --caption_dropout 0", "preserve_prior": "leave it out"}
    for name, what in advice.items():
        if family.reads_references and vars(args)[name]:
            fail(
                f"--{name} can't be used here, because the text encoder of a {family.pipeline} "
                f"sees the references: {what}"
            )
    prompts = args.validation_prompts or []
    if len(given or []) != about["count"] * len(prompts):
        fail(
            f"--validation_images needs {amount(about['count'], 'image')} for each of "
            f"{amount(len(prompts), 'prompt')} of --validation_prompts, not {len(given or [])}"
        )
    shapes = {}
    for number in range(about["count"]):
        shapes[f"reference_{number}"] = torch.zeros(1, *about["shape"])
        shapes[f"reference_{number}_size"] = torch.zeros(1, 0, about["side"], about["side"])
    return shapes


def group_images(settings: dict[str, Any], args: Namespace) -> list[list[Any]]:
    """The images of --validation_images, for each prompt. settings: of the cache."""
    given = vars(args).get("validation_images") or []
    if not given:
        return []
    count, side = settings["references"]["count"], settings["references"]["side"]
    transform = settings["transform"]
    multiple = transform["resolution"] // settings["latents_shape"][-1]
    interpolation = transform["image_interpolation_mode"]
    images = [read_reference(path, side, multiple, interpolation) for path in given]
    return [images[start : start + count] for start in range(0, len(images), count)]


def sample_cached_captions(shards: Shards) -> list[str]:
    """The first caption of each of the first 10,000 rows of a cache."""
    if is_address(shards.folder):  # its shards are not fetched yet
        return []
    texts = (text for batch in shards for text in batch["text"].to_pylist())
    with explained(f"{shards.folder} is damaged: {name_repair(shards.folder)}"):
        first = list(itertools.islice(texts, 10**4))
    captions = [text[0] if isinstance(text, list) else text for text in first]
    return [text for text in captions if isinstance(text, str)]


def choose_captions(args: Namespace, weights: list[float] | None) -> CaptionChoice:
    return CaptionChoice(args.seed, weights, args.shuffle_caption, args.keep_tokens)


def check_family(folder: str, cache: dict[str, Any], family: Family) -> None:
    """Stop with an error if a cache is of another family."""
    if cache["model_family"] != family.name:
        fail(
            f"{folder} does not fit these models or the first cache (model_family "
            f"{cache['model_family']} -> {family.name}): give the models that it was made with"
        )


def load_matching_encoders(
    caches: dict[str, Cache], base: Base, caption_weights: list[float] | None, args: Namespace
) -> Encoders:
    """Stop with an error if caches are of other models, or lack data that the flags need.

    Returns the encoders used for the comparison, `EXACT` ones on the CPU.
    """
    first = next(iter(caches.values())).settings
    encoders = load_encoders(base, EXACT)
    check_sides(base.family.downscale(encoders.vae), args.resolution, args.bucket_step)
    try_encoders(encoders)
    # --clip_skip does not change a cache of ids, which the trainer encodes
    compared = replace(encoders, clip_skip=0) if first["text_cache"] == "ids" else encoders
    described = describe_models(compared)
    resolution = first["transform"]["resolution"]
    latents = describe_latents(base.family, encoders.vae, resolution, first["latents"])
    described |= {"latents": latents.kind, "latents_shape": list(latents.shape)}
    described |= describe_prompts(encoders, encode_empty_prompt(encoders, base))
    described |= {name: first.get(name) for name in ("text_cache", "features", "references")}
    for folder, cache in caches.items():
        settings = cache.settings
        check_cache(folder, settings, described, caption_weights, args)
        limit, unit = settings["tokenizer"]["model_max_length"], base.family.caption_unit
        report_cut(settings["captions_cut"], settings["rows"], limit, unit, f"{folder}: ")
    return encoders


def check_cache(
    folder: str,
    cache: dict[str, Any],
    described: dict[str, Any],
    caption_weights: Collection[float] | None,
    args: Namespace,
) -> None:
    """Stop with an error if a cache is not as `described`, or lacks data that the flags need."""
    if differences := compare_settings(cache, described):
        advice = "give the models, and the --max_sequence_length, that it was made with"
        if is_shared(folder):  # models of the same name have changed
            advice = name_repair(folder)
        fail(
            f"{folder} does not fit these models or the first cache ({', '.join(differences)}): "
            f"{advice}"
        )
    if args.shuffle_caption and cache["text_cache"] != "ids":
        fail(
            f"--shuffle_caption needs captions, but {folder} holds embeddings: make it with "
            "--text_cache ids"
        )
    transform = cache["transform"]
    num_weights = len(caption_weights or [])
    num_captions = len(transform["caption_weights"] or [])
    if num_weights != num_captions:
        fail(
            f"--caption_weights has {num_weights} values, but {folder} was made with {num_captions}"
        )
    if args.random_flip and not transform["random_flip"]:
        fail(f"--random_flip needs a cache made with --random_flip, unlike {folder}")
    if args.resolution not in (None, side := transform["resolution"]):
        fail(f"--resolution {args.resolution} differs from the {side} px of {folder}: leave it out")


def encode_class_prompts(
    launch: Launch, base: Base, encoders: Encoders | None, captions: Sequence[str], args: Namespace
) -> PromptEmbeds | None:
    """Encode --class_prompt or, with --trigger, the captions in which it replaces the trigger.

    They are at most `MOST_CLASS_PROMPTS`, evenly chosen, since T5 takes seconds for one on a CPU.

    captions: of some or all images, on the first process.
    """
    prompts = args.class_prompt
    if args.trigger and launch.is_main:
        with_class = {
            text.replace(args.trigger, prompts[0]) for text in captions if args.trigger in text
        }
        if not with_class:
            fail(
                f"--trigger {args.trigger!r} is in none of {len(captions)} captions: correct it, "
                "or leave it out and give whole prompts as --class_prompt"
            )
        found = sorted(with_class)
        prompts = found[:: math.ceil(len(found) / MOST_CLASS_PROMPTS)]
    return encode_for_all(launch, base, encoders, prompts)


def encode_for_all(
    launch: Launch,
    base: Base,
    encoders: Encoders | None,
    prompts: list[str] | None,
    images: Sequence[list[Any]] = (),
) -> PromptEmbeds | None:
    """Encode the prompts of a flag in float32 on the first process, and send them to all.

    images: the references of each prompt. encoders: `EXACT` or in float32; None: loaded here.
    Prompts are encoded one by one, so that the samples of one do not depend on the others.
    """
    if not prompts:
        return None
    sent: list[PromptEmbeds | None] = [None]
    if launch.is_main:
        encoders = encoders or load_encoders(base, EXACT, with_vae=False)

        def encode_empty(references: list[Any] | None = None) -> Any:
            empty = encode_empty_prompt(encoders, base, references)
            return {name: embeds[None] for name, embeds in empty.items()}

        pairs = zip(prompts, images or [[]] * len(prompts), strict=True)
        encoded = [encode_caption(encoders, *pair) for pair in pairs]
        empties = map(encode_empty, images) if encoders.family.reads_references else ()
        sent = [PromptEmbeds(encoded, encode_empty(), images, [*empties])]
    if launch.num_processes > 1:
        broadcast_object_list(sent)
    return sent[0]
