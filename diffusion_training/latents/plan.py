"""The plan of a latent cache: the settings that decide its content, its shards, its size."""

import math
from argparse import Namespace
from typing import Any

import datasets

from diffusion_training.latents.columns import describe_size


def name_shard(number: int, cache: dict) -> str:
    """Return a shard's file name; it includes the number of shards, except for a stream."""
    if cache["source"]["rows"] is None:
        return f"data-{number:05d}.arrow"
    count = math.ceil(cache["source"]["rows"] / cache["rows_per_shard"])
    digits = max(5, len(str(count)))  # the same for all shards, since they are sorted by name
    return f"data-{number:0{digits}d}-of-{count:0{digits}d}.arrow"


def plan_cache(
    rows: Any, settings: dict, tokens: float | None, args: Namespace
) -> tuple[list[str], str]:
    """Complete `settings`, and describe how big the cache will be.

    Returns (names of its shards, the description). A stream has no names, since its number of
    shards is unknown.

    tokens: average tokens of a caption where padding is left out; None if unknown, or if padding is
    kept.
    """
    flags = (
        "resolution center_crop image_interpolation_mode random_flip seed min_size "
        "skip_empty_captions"
    ).split()
    # stored only where they are used, so that other caches stay as older versions wrote them
    flags += ["bucket_step", "bucket_max_ratio"] if args.bucket_step else []
    flags += ["bucket_no_upscale"] if getattr(args, "bucket_no_upscale", False) else []
    flags += ["caption_weights"] if getattr(args, "caption_weights", None) else []
    settings["transform"] = {name: getattr(args, name) for name in flags}
    features = {
        "sdxl": "text_encoder_2" in settings,
        "ragged latents": args.bucket_step,
        "masks": args.mask_column,
    }
    features |= {
        "ragged embeddings": "model_family" in settings,
        "captions": "caption_weights" in flags,
    }
    if features := [name for name, there in features.items() if there]:
        # so that a reader of format 2 does not overlook them
        settings |= {"format_version": 3, "features": features}
    num_rows = None if isinstance(rows, datasets.IterableDataset) else len(rows)
    settings["source"] = {"fingerprint": rows._fingerprint, "rows": num_rows}
    settings["rows_per_shard"] = args.rows_per_shard
    shards = [
        name_shard(i, settings) for i in range(math.ceil((num_rows or 0) / args.rows_per_shard))
    ]
    return shards, describe_size(num_rows, len(shards), settings, tokens, args)
