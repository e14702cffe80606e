"""What a latent cache will be: what decides its content, its shards, its size."""

import math
from argparse import Namespace
from typing import Any

import datasets

from diffusion_training.latents.columns import describe_size


def name_shard(number: int, cache: dict) -> str:
    """The file of a shard; of a stream it does not say how many there are."""
    if cache["source"]["rows"] is None:
        return f"data-{number:05d}.arrow"
    count = math.ceil(cache["source"]["rows"] / cache["rows_per_shard"])
    digits = max(5, len(str(count)))  # as many for all, since they are sorted by name
    return f"data-{number:0{digits}d}-of-{count:0{digits}d}.arrow"


def plan_cache(rows: Any, settings: dict, tokens: float | None, args: Namespace) -> tuple[list[str], str]:
    """Complete `settings`, and say how big the cache will be. Returns (names of its shards, that sentence).

    tokens: of a caption, on average, where padding is left out; None if that is not known, or padding is kept. Of a
    stream there are no names, since nobody knows how many shards it will be.
    """
    flags = "resolution center_crop image_interpolation_mode random_flip seed min_size skip_empty_captions".split()
    flags += ["bucket_step", "bucket_max_ratio"] if args.bucket_step else []  # absent from others, as from old ones
    flags += ["bucket_no_upscale"] if getattr(args, "bucket_no_upscale", False) else []
    flags += ["caption_weights"] if getattr(args, "caption_weights", None) else []
    settings["transform"] = {name: getattr(args, name) for name in flags}
    features = {"sdxl": "text_encoder_2" in settings, "ragged latents": args.bucket_step, "masks": args.mask_column}
    features |= {"ragged embeddings": "model_family" in settings, "captions": "caption_weights" in flags}
    if features := [name for name, there in features.items() if there]:
        settings |= {"format_version": 3, "features": features}  # which a reader of 2 must not overlook
    num_rows = None if isinstance(rows, datasets.IterableDataset) else len(rows)
    settings["source"] = {"fingerprint": rows._fingerprint, "rows": num_rows}
    settings["rows_per_shard"] = args.rows_per_shard
    shards = [name_shard(i, settings) for i in range(math.ceil((num_rows or 0) / args.rows_per_shard))]
    return shards, describe_size(num_rows, len(shards), settings, tokens, args)
