"""Open the data of a text-to-image trainer: the rows of latent caches, or else images."""

import itertools
from argparse import Namespace
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from diffusion_training.arguments import is_address, list_values
from diffusion_training.data.captioned_data import Data
from diffusion_training.data.captioned_images import open_images
from diffusion_training.data.captions import report_cut
from diffusion_training.data.encoders import (
    Latents,
    check_sides,
    describe_latents,
    describe_models,
    encode_empty_prompt,
    load_encoders,
    place_scale,
    try_encoders,
)
from diffusion_training.data.folders import count_references, is_shared
from diffusion_training.data.prompts import encode_class_prompts, encode_validation_prompts
from diffusion_training.data.references import read_reference
from diffusion_training.data.texts import choose_captions
from diffusion_training.errors.printing import amount
from diffusion_training.errors.sentences import explained, fail
from diffusion_training.families.base import Base, Encoders, Family
from diffusion_training.families.names import FACTS
from diffusion_training.families.opening import refuse_references
from diffusion_training.files import is_old_hash
from diffusion_training.latents.reader import Cache, CachedLatents, load_cache
from diffusion_training.latents.settings import compare_settings, describe_prompts
from diffusion_training.latents.shards import FOLLOWED, Shards, name_repair
from diffusion_training.launch import Launch
from diffusion_training.models import EXACT

MOST_PERMUTED = 16_000_000  # rows; each process holds a permutation of them: 128 MB


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
    resolution = transform["resolution"]
    wants_tags = launch.is_main and args.rank and vars(args).get("output_kohya_format")
    exact = load_matching_encoders(caches, base, caption_weights, args) if launch.is_main else None
    launch.accelerator.wait_for_everyone()
    references = open_references(base.family, settings, args)
    images = group_images(settings, args)
    validation = encode_validation_prompts(launch, base, exact, args, images)
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
            transforms = [cache.settings["transform"] for cache in caches.values()]
            prefixes = [each.get("caption_prefix") for each in transforms]
            reads = encoders.tokenizers, choose_captions(args, caption_weights, prefixes)
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
    options = (args.seed, args.random_flip, caption_weights, reads, optional_columns)
    dataset = open_latents(launch, caches, options, checkpoint, before.get("order"), args)
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
        folders=vars(args).get("folders", {}),
        classes=classes,
    )


def open_latents(
    launch: Launch,
    caches: dict[str, Cache],
    options: tuple[Any, ...],
    checkpoint: Path | None,
    order: dict[str, Any] | None,
    args: Namespace,
) -> CachedLatents:
    """The rows of caches. options: those of `CachedLatents`. order: that of the checkpoint."""
    is_finished = not any(cache.shards.is_followed for cache in caches.values())
    num_rows = sum(cache.settings["rows"] for cache in caches.values())
    # a checkpoint without an order is one of a permutation
    is_permuted = not order and (bool(checkpoint) or num_rows <= MOST_PERMUTED)
    if is_permuted and is_finished and not any(map(is_address, caches)):
        dataset = CachedLatents(caches, *options)
    else:
        if len({tuple(cache.settings["latents_shape"]) for cache in caches.values()}) > 1:
            fail("caches of several sizes can only be read from a disk, in the usual order")
        # here, because few runs read from a bucket, or billions of rows, or what is being made
        from diffusion_training.latents.stream import Storage, open_stored

        dataset = open_stored(
            launch,
            caches,
            options,
            Storage(args.shards_dir, args.shards_size, args.shuffle_shards),
            args.latents_weights,
            checkpoint,
            order,
            MOST_PERMUTED,
        )
    for cache in caches.values():
        del cache.settings["shards"]  # 0.5 GB for a million; `Shards` keeps the rest
    return dataset


def choose_follow(checkpoint: Path | None, before: dict[str, Any], args: Namespace) -> float | None:
    """How many minutes to wait for shards (--follow); None for the order of a finished cache.

    A checkpoint keeps its order.
    """
    kind = (before.get("order") or {}).get("kind")
    if checkpoint and args.follow and kind != FOLLOWED:
        fail(f"--follow: {checkpoint} was trained in another order: leave it out, or begin anew")
    return args.follow or (0.0 if kind == FOLLOWED else None)


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
    interpolation = transform["image_interpolation_mode"]
    images = [read_reference(path, side, interpolation) for path in given]
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
    for side in list_values(args.resolution):
        # a recipe's --bucket_step does nothing beside a cache
        check_sides(base.family.downscale(encoders.vae), side, None)
    try_encoders(encoders)
    # --clip_skip does not change a cache of ids, which the trainer encodes
    compared = replace(encoders, clip_skip=0) if first["text_cache"] == "ids" else encoders
    with_old = any(is_old_hash(cache.settings["vae"].get("sha256")) for cache in caches.values())
    described = describe_models(compared, with_old)
    resolution = first["transform"]["resolution"]
    latents = describe_latents(base.family, encoders.vae, resolution, first["latents"])
    described["latents"] = latents.kind
    described |= describe_prompts(encoders, encode_empty_prompt(encoders, base))
    described |= {name: first.get(name) for name in ("text_cache", "features", "references")}
    for folder, cache in caches.items():
        settings = cache.settings
        side = settings["transform"]["resolution"]
        shape = describe_latents(base.family, encoders.vae, side, first["latents"]).shape
        described["latents_shape"] = list(shape)
        # some may lack masks
        differs_in = {*settings["features"]} ^ {*first["features"]}
        described["features"] = (settings if differs_in <= {"masks"} else first)["features"]
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
        if "ragged latents" in {*cache["features"]} ^ {*described["features"]}:
            advice = "give all of them --bucket_step (in --data: enable_bucket), or none"
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
    if args.random_flip and not transform["random_flip"] and "folders" not in args:
        fail(f"--random_flip needs a cache made with --random_flip, unlike {folder}")
    side = transform["resolution"]
    if args.resolution and side not in (sides := list_values(args.resolution)):
        said = " ".join(map(str, sides))
        fail(f"--resolution {said} differs from the {side} px of {folder}: leave it out")
