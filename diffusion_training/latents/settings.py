"""cache.json, which the scripts that make a cache and those that read one have to agree on."""

import math
from typing import Any

import numpy as np
import torch

from diffusion_training.families.base import Encoders
from diffusion_training.files import find_differences, fits, hash_values
from diffusion_training.latents.columns import EMPTY

# the record of a shard, which is in unfinished/ until the cache is finished
RECORD = {"rows": int, "sha256": str, "checksums": str, "encoded_again": int, "captions_cut": int,
          "skipped": [{"row": int, "key": str, "reason": str}]}  # fmt: skip


# What cache.json of any cache holds, and of one that is finished. Others are compared with what the
# models give, and so refused if they have another form.
SETTINGS = {
    "features": [str],
    "latents": str,
    "latents_shape": [int],
    "text_cache": str,
    "vae": dict,
    "text_encoder": dict,
    "tokenizer": {"model_max_length": int},
    "tokenizer_rules": {"libraries": str},
    "transform": {
        "resolution": int,
        "random_flip": bool,
        "bucket_step": (int, None),
        "caption_weights": (None, [(int, float)]),
    },
    "source": {"rows": (int, None)},
    "rows_per_shard": int,
}
FINISHED = {
    "rows": int,
    "skipped": int,
    "captions_cut": int,
    "shards": {"name": [str], "rows": [int], "sha256": [str], "checksums": [str]},
}


def check_form(cache: Any, form: dict[str, Any]) -> None:
    """Raise ValueError if cache.json lacks an entry, or has one of another type than in `form`."""
    if not isinstance(cache, dict):
        raise ValueError("cache.json is no JSON object")
    if wrong := [name for name in form if name not in cache or not fits(cache[name], form[name])]:
        raise ValueError(f"cache.json has no valid {', '.join(wrong)}")


def fingerprint_cache(cache: dict) -> str:
    """The fingerprint of a cache for `datasets`: a hash of cache.json.

    It also shows whether cache.json has been changed.
    """
    return hash_values(cache)


def compare_settings(cache: dict[str, Any], settings: dict[str, Any]) -> list[str]:
    """The differences of cache.json and the settings that it should have, as sentences.

    "tokenizer_rules" are compared only if the same versions of the libraries wrote them, because
    another version may write equal rules in another form.
    """
    before, now = (each["tokenizer_rules"]["libraries"] for each in (cache, settings))
    known = dict(settings)
    if before != now:
        del known["tokenizer_rules"]
    return find_differences({name: cache.get(name) for name in known}, known)


def describe_prompts(encoders: Encoders, empty_prompt: dict[str, torch.Tensor]) -> dict[str, Any]:
    """The settings of captions in cache.json. empty_prompt: see `encode_empty_prompt`."""
    shapes = {
        f"{name}_shape": list(embeds.shape)
        for name, embeds in empty_prompt.items()
        if name in EMPTY
    }
    return shapes | encoders.family.describe_empty(empty_prompt)


def count_places(total: int, per_shard: int) -> np.ndarray:
    """How many rows of the source each shard is made of."""
    return np.minimum(per_shard, total - np.arange(0, total, per_shard))


def find_gap(cache: dict[str, Any]) -> str | None:
    """Why the shards of a finished cache can't hold each row of the source once, by their numbers.

    None if they can. It does not read the shards.
    """
    names, rows = cache["shards"]["name"], np.array(cache["shards"]["rows"], int)
    total, per_shard = cache["source"]["rows"], cache["rows_per_shard"]
    if total is None:  # a stream
        total = int(rows.sum()) + cache["skipped"]
    places = count_places(total, per_shard)
    if len(names) != len(places) or len(set(names)) != len(names):
        return f"it has {len({*names})} shards in place of {len(places)}"
    if (rows > places).any():
        number = int((rows > places).argmax())
        return f"{names[number]} has {rows[number]} rows in place of {places[number]}"
    if (rows.sum() + cache["skipped"]) != total:
        return f"its shards hold {rows.sum()} rows, and {cache['skipped']} were skipped, of {total}"
    return None


def name_shard(number: int, cache: dict[str, Any]) -> str:
    """Return a shard's file name; it includes the number of shards, except for a stream."""
    if cache["source"]["rows"] is None:
        return f"data-{number:05d}.arrow"
    count = math.ceil(cache["source"]["rows"] / cache["rows_per_shard"])
    digits = max(5, len(str(count)))  # the same for all shards, since they are sorted by name
    return f"data-{number:0{digits}d}-of-{count:0{digits}d}.arrow"


def count_skipped(entries: list[dict[str, Any]]) -> dict[str, Any]:
    """What is kept of a shard's skipped rows."""
    not_read = any(entry["reason"].startswith("not read") for entry in entries)
    return {"skipped": len(entries), "not_read": not_read}
