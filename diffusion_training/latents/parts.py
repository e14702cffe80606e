"""A cache by many machines: parts of shards, whose names say which rows they hold."""

import argparse
import contextlib
import json
import socket
import tempfile
from collections.abc import Callable, Container, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import fsspec
import pyarrow as pa
import torch

from diffusion_training.errors import Refused, explain, explained, fail
from diffusion_training.latents.cache import Encoded, writing_shard
from diffusion_training.latents.columns import count_rows
from diffusion_training.remote import is_address, list_files, reading, remove, upload, writing

PART_BYTES = 2**26  # of pixels in a part: enough to keep a GPU busy, and a node's memory holds many of them
TRIES = 4  # of a part, if the process that makes it dies or raises

Made = TypeVar("Made")
Part = tuple[int, int]  # first row, row after the last


def plan_parts(start: int, end: int, args: argparse.Namespace, pixels: int | None = None) -> list[Part]:
    """Cut the rows of a shard into parts: [(first row, row after the last)]. Batches begin where they always do.

    pixels: of a row in all caches that are made of it, None: of --resolution.
    """
    many = count_rows(args)
    step = many * max(1, PART_BYTES // (3 * (pixels or args.resolution**2) * many))
    return [(first, min(first + step, end)) for first in range(start, end, step)]


def name_part(first: int, end: int, args: argparse.Namespace) -> str:
    """The file of a part. Its name holds all that may differ between two runs on one cache."""
    return f"rows-{first}-{end}-by-{args.batch_size}.part"


def find_missing(
    shards: list[str],
    records: Container[str],
    num_rows: int,
    there: Iterable[str],
    args: argparse.Namespace,
    pixels: int | None = None,
) -> tuple[dict[str, list[Part]], dict[str, int], list[Part]]:
    """What has to be made: ({shard: [its parts]}, {shard: number of its parts that have no file}, those parts).

    `there`: names of files, among them those of parts that are whole. pixels: of `plan_parts`.
    """
    missing, left, parts, there = {}, {}, [], set(there)
    for number, name in enumerate(shards):
        if name not in records:
            start = number * args.rows_per_shard
            of_shard = plan_parts(start, min(num_rows, start + args.rows_per_shard), args, pixels)
            todo = [part for part in of_shard if name_part(*part, args) not in there] if there else of_shard
            missing[name], left[name] = of_shard, len(todo)
            parts += todo
    return missing, left, parts


def attempt(work: Callable[[], Made]) -> tuple[Made | None, str | None]:
    """Call `work` up to TRIES times. Returns (its result, None), or (None, why it failed the last time)."""
    for _ in range(TRIES):
        try:
            return work(), None
        except Refused as refused:  # its sentence is what counts, and this process goes on
            reason = str(refused)
        except Exception as error:
            reason = f"{type(error).__name__}: {explain(error)}"
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
    return None, f"{reason} (on {socket.gethostname()})"


@contextlib.contextmanager
def writing_part(path: str | Path) -> Iterator[tuple[None, Callable[..., None]]]:
    """As `writing_shard`, of a part, which has no record: its rows batch by batch, and with each the rest of it."""
    with writing(path) as unfinished, contextlib.ExitStack() as stack:
        file, writer = stack.enter_context(unfinished.open("wb")), None

        def add(first: int, rows: pa.RecordBatch, skipped: list[dict], counts: dict) -> None:
            nonlocal writer
            writer = writer or stack.enter_context(pa.ipc.new_stream(file, rows.schema))
            about = {"first": first, "skipped": skipped, "counts": counts}
            writer.write_batch(rows, custom_metadata={"about": json.dumps(about)})

        yield None, add


def read_parts(paths: Iterable[str], count: int) -> Iterator[Encoded]:
    """Yield what was written for a shard of `count` rows; a part that can't be read is deleted, to be made again."""
    for path in paths:
        try:
            with reading(path) as copy, pa.memory_map(str(copy)) as file, pa.ipc.open_stream(file) as reader:
                for rows, metadata in reader.iter_batches_with_custom_metadata():
                    about = json.loads(metadata[b"about"])
                    count -= len(rows) + len(about["skipped"])
                    yield about["first"], rows, about["skipped"], about["counts"]
        except (pa.ArrowInvalid, KeyError, ValueError, FileNotFoundError) as error:
            remove(path)
            raise ValueError(f"{path} is damaged or gone; the same command makes it again") from error
    if count:
        raise ValueError(f"the parts hold {count} rows too few")


def write_shard(path: Path, encoded: Iterable[Encoded]) -> dict[str, Any]:
    """Write the rows of one shard, as they are read back from parts, whole or not at all, and then its record."""
    with writing_shard(path) as (record, add):
        for item in encoded:
            add(*item)
    return record


def write_shard_to(path: str, encoded: Iterable[Encoded]) -> dict:
    """Write a shard to a folder, or for an address on this disk first, and then an upload each of both files."""
    if not is_address(path):
        return write_shard(Path(path), encoded)
    folder, name = path.rsplit("/", 1)
    with tempfile.TemporaryDirectory() as work:
        Path(work, "unfinished").mkdir()
        record = write_shard(Path(work, name), encoded)
        upload(f"{work}/{name}", path)
        upload(f"{work}/unfinished/{name}.json", f"{folder}/unfinished/{name}.json")
    return record


def fetch_cache(url: str, folder: str | Path) -> bool:
    """Copy what there is of a cache at an address, but for its shards and parts, into a folder on this disk.

    Returns whether there is one.
    """
    with explained(f"--output_dir {url} can't be read"):
        names = list_files(url)
        if names and "cache.json" not in names:
            fail(f"--output_dir {url} holds {names[0]} and no latent cache: choose another address")
        fs, root = fsspec.url_to_fs(url)
        small = [name for name in names if not name.endswith((".arrow", ".part"))]
        fs.get([f"{root}/{name}" for name in small], [f"{folder}/{name}" for name in small])
    return "cache.json" in names


def begin_cache(folder: str | Path, url: str) -> None:
    """Send what `open_cache` has begun to an address, unless another run has just begun there."""
    with explained(f"--output_dir {url} can't be written to, or another run has just begun there"):
        fs, root = fsspec.url_to_fs(url)
        fs.put_file(f"{folder}/cache.json", f"{root}/cache.json", mode="create")
        upload(f"{folder}/run.args", f"{url}/run.args")


def upload_finished(folder: str | Path, url: str) -> None:
    """Send what `finish_cache` has written to an address, in its order."""
    empty = sorted(path.name for path in Path(folder).glob("empty_*.npy"))
    for name in ("run.args", "skipped.jsonl", *empty, "cache.json", "dataset_info.json", "state.json"):
        upload(f"{folder}/{name}", f"{url}/{name}")
    fs, root = fsspec.url_to_fs(url)
    fs.invalidate_cache()
    if fs.exists(f"{root}/unfinished"):
        fs.rm(f"{root}/unfinished", recursive=True)
