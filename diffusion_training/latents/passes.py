"""Several caches in one pass over the source: one of each --resolution, the same as if each were made alone."""

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
CacheEncoded = tuple[int, int, pa.RecordBatch, list[dict], dict]  # of `encode_all`: the place of a cache, `Encoded`


def take_resolutions(args: argparse.Namespace) -> list[int]:
    """All sides of --resolution. `args` has the first from here on, with which models are loaded and described."""
    sides = list_values(args.resolution or (1024 if is_sdxl(args) else 512))
    args.resolution = sides[0]
    return sides


def split_caches(
    vae: torch.nn.Module, settings: dict[str, Any], sides: list[int], args: argparse.Namespace
) -> list[tuple[argparse.Namespace, dict[str, Any]]]:
    """(flags, settings) of each cache: as they are given, or of several sides those that would make each alone, in a
    folder of --output_dir that is named by its side."""
    if len(sides) == 1:
        return [(args, settings)]
    out, name = args.output_dir.rstrip("/"), f"--output_dir {args.output_dir}"
    with explained(f"{name} can't be read"):
        fs, root = fsspec.url_to_fs(out) if is_address(out) else (os.path, out)
        if fs.exists(f"{root}/cache.json"):
            fail(f"{name} is a cache itself: of several --resolution each gets a folder there, so choose another")
    made = [argparse.Namespace(**vars(args) | {"resolution": side, "output_dir": f"{out}/{side}"}) for side in sides]
    for each in made:
        check_sides(vae, each)
    return [(each, settings | describe_latents(vae, each.resolution, each.latents)) for each in made]


def write_each(
    writing: Callable[[Any], AbstractContextManager[tuple[Record, Callable[..., None]]]],
    paths: dict[int, Any],
    encoded: Iterable[CacheEncoded],
) -> dict[int, Record]:
    """Write what `encode_all` yields, each cache's to its own of `paths` {place: file}, at once. Returns the records.

    writing: `writing_shard` or `writing_part`.
    """
    with contextlib.ExitStack() as stack:
        files = {place: stack.enter_context(writing(path)) for place, path in paths.items()}
        for place, *item in encoded:
            files[place][1](*item)
    return {place: record for place, (record, _) in files.items()}


def find_begun(folders: Iterable[Path]) -> int | None:
    """--batch_size that the first of some caches was begun with, None if there is none."""
    for folder in folders:
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):  # what is damaged is said later
            return int(json.loads((folder / "cache.json").read_text())["made_with"]["batch_size"])
    return None


def find_batch_size(
    accelerator: Accelerator,
    device: torch.device,
    dataset: Any,
    models: tuple[torch.nn.Module, ...],
    encode: Callable[..., Any],
) -> int:
    """--batch_size auto: for how many images of the largest --resolution a device has memory, up to a shard's.

    dataset: a `TransformedRows`, whose first row is taken so many times; encode: as precompute_latents.py has it.
    """
    args = max(dataset.caches, key=lambda each: each.resolution)

    def prepare(size: int) -> Callable[[int], Any]:
        rows, trial = copy.copy(dataset), argparse.Namespace(**vars(args) | {"batch_size": size})
        rows.caches = [trial]
        (made,) = load_batches(rows, [([0], [(0, 0)] * count_rows(trial))], 0, device)
        return lambda step: encode(made["batches"][0], *models, trial)

    size = find_largest(accelerator, device, prepare, min(args.rows_per_shard, len(dataset.rows)))
    return size or fail("not even one image fits: try --mixed_precision bf16 or a smaller --resolution")


def set_batch_size(size: int, *caches: argparse.Namespace) -> None:
    """Put what --batch_size auto has come to into all flags, which are kept with the caches."""
    for each in caches:
        each.batch_size = size
    if int(os.environ.get("RANK", "0")) == 0:
        print(f"Batch size: {size}", flush=True)
