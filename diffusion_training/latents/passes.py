"""Several caches made in one pass over the source, one for each --resolution.

Each is the same as if it were made alone.
"""

import argparse
import contextlib
import copy
import json
import os
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar

import fsspec
import pyarrow as pa
import torch
from accelerate import Accelerator

from diffusion_training.arguments import list_values
from diffusion_training.errors import explained, fail
from diffusion_training.latents.columns import count_rows
from diffusion_training.latents.encoders import check_sides, describe_latents
from diffusion_training.latents.text_encoders import is_sdxl
from diffusion_training.loading import load_batches
from diffusion_training.remote import is_address
from diffusion_training.training.tuning import find_largest

Record = TypeVar("Record")
# yielded by `encode_all`: index of the cache, first row, record batch, skipped rows, counts
CacheEncoded = tuple[int, int, pa.RecordBatch, list[dict], dict]


def take_resolutions(args: argparse.Namespace) -> list[int]:
    """Return all sides of --resolution.

    `args.resolution` becomes the first of them, with which models are loaded and described.
    """
    sides = list_values(args.resolution or (1024 if is_sdxl(args) else 512))
    args.resolution = sides[0]
    return sides


def split_caches(
    vae: torch.nn.Module, settings: dict[str, Any], sides: list[int], args: argparse.Namespace
) -> list[tuple[argparse.Namespace, dict[str, Any]]]:
    """Return (flags, settings) of each cache.

    With one side they are returned unchanged. With several, each cache gets those that would make
    it alone, and its folder is a subfolder of --output_dir named after its side.
    """
    if len(sides) == 1:
        return [(args, settings)]
    out, name = args.output_dir.rstrip("/"), f"--output_dir {args.output_dir}"
    with explained(f"{name} can't be read"):
        fs, root = fsspec.url_to_fs(out) if is_address(out) else (os.path, out)
        if fs.exists(f"{root}/cache.json"):
            fail(
                f"{name} is a cache itself: of several --resolution each gets a folder there, "
                "so choose another"
            )
    made = [
        argparse.Namespace(**vars(args) | {"resolution": side, "output_dir": f"{out}/{side}"})
        for side in sides
    ]
    for each in made:
        check_sides(vae, each)
    return [
        (each, settings | describe_latents(vae, each.resolution, each.latents)) for each in made
    ]


def write_each(
    writing: Callable[[Any], AbstractContextManager[tuple[Record, Callable[..., None]]]],
    paths: dict[int, Any],
    encoded: Iterable[CacheEncoded],
) -> dict[int, Record]:
    """Write what `encode_all` yields, each cache to its own file, in one go. Return the records.

    writing: `writing_shard` or `writing_part`.
    paths: {index of the cache: file}.
    """
    with contextlib.ExitStack() as stack:
        files = {place: stack.enter_context(writing(path)) for place, path in paths.items()}
        for place, *item in encoded:
            files[place][1](*item)
    return {place: record for place, (record, _) in files.items()}


def find_begun(folders: Iterable[Path]) -> int | None:
    """Return the --batch_size that the first existing cache was begun with, None without any."""
    for folder in folders:
        # a damaged cache is reported later
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            return int(json.loads((folder / "cache.json").read_text())["made_with"]["batch_size"])
    return None


def find_batch_size(
    accelerator: Accelerator,
    device: torch.device,
    dataset: Any,
    models: tuple[torch.nn.Module, ...],
    encode: Callable[..., Any],
) -> int:
    """--batch_size auto: return how many images of the largest --resolution fit on a device.

    The result is at most the number of rows in a shard.

    dataset: a `TransformedRows`, whose first row is repeated.
    encode: as in precompute_latents.py.
    """
    args = max(dataset.caches, key=lambda each: each.resolution)

    def prepare(size: int) -> Callable[[int], Any]:
        rows, trial = copy.copy(dataset), argparse.Namespace(**vars(args) | {"batch_size": size})
        rows.caches = [trial]
        (made,) = load_batches(rows, [([0], [(0, 0)] * count_rows(trial))], 0, device)
        return lambda step: encode(made["batches"][0], *models, trial)

    size = find_largest(accelerator, device, prepare, min(args.rows_per_shard, len(dataset.rows)))
    return size or fail(
        "not even one image fits: try --mixed_precision bf16 or a smaller --resolution"
    )


def set_batch_size(size: int, *caches: argparse.Namespace) -> None:
    """Put the result of --batch_size auto into all flags, which are stored with the caches."""
    for each in caches:
        each.batch_size = size
    if int(os.environ.get("RANK", "0")) == 0:
        print(f"Batch size: {size}", flush=True)
