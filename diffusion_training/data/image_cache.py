"""--cache_images: every image decoded and resized once, into a memory-mapped file."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import datasets
import psutil
import torch
from filelock import FileLock
from tqdm.auto import tqdm

from diffusion_training.data.flags import list_allowed
from diffusion_training.data.folders import name_shared_folder
from diffusion_training.data.images import decode_image, explain_row, name_image, shrink
from diffusion_training.errors.faults import is_machines_fault
from diffusion_training.errors.sentences import explained, fail
from diffusion_training.files import checksum_files, delete, hash_values, parse_json, saving

BEGUN = psutil.Process().create_time()  # of this process, in seconds


def cache_batch(
    batch: dict[str, list],
    indices: list[int],
    column: str,
    resolution: int,
    center_crop: bool,
    channels: int,
    min_size: int,
    allowed: Sequence[str] = (),
) -> dict[str, list]:
    """Decode and resize a batch of rows for `cache_images`.

    Rows that can't be decoded are printed and left out.
    """
    images = []
    threads = torch.get_num_threads()
    # OpenMP does not survive the fork of `map`, and there is one process per core
    torch.set_num_threads(1)
    for row, source in zip(indices, batch[column], strict=True):
        try:
            image = decode_image(source, channels, min_size=min_size, allowed=allowed)
            image = shrink(image, resolution, (0.5, 0.5) if center_crop else None)
        except Exception as error:
            if is_machines_fault(error):
                raise
            reason = explain_row(error, source)
            tqdm.write(f"Skipped {name_image(row, source)} ({reason})", file=sys.stderr)
            continue
        images.append(
            {"bytes": image.numpy().tobytes(), "path": source["path"], "size": list(image.shape)}
        )
    torch.set_num_threads(threads)
    return {column: images}


def is_intact(record: Path, folder: Path) -> bool:
    """Whether the files of a cache are complete and unchanged, by the checksums in `record`.

    They are not read again if another process has done so since this one began.
    """
    if not record.exists():
        return False
    if record.stat().st_mtime > BEGUN:
        return True
    try:
        known = parse_json(record.read_text())
    except ValueError:  # it is damaged itself
        return False
    return known == checksum_files(folder)


def cache_images(
    rows: datasets.Dataset, column: str, channels: int, num_workers: int, args: argparse.Namespace
) -> tuple[datasets.Dataset, int]:
    """Decode and resize every image once, into memory-mapped Arrow files.

    All runs with the same data and transform share the folder, which is named by a hash of both. A
    file beside it holds the checksums. Returns (the same rows, with pixels in place of files, as
    `decode_image` takes them; the number of images left out).
    """
    settings = {
        "column": column,
        "resolution": args.resolution,
        "center_crop": args.center_crop,
        "channels": channels,
        "min_size": args.min_size,
    }
    key = hash_values([3, rows._fingerprint, settings])  # 3: the version of this layout
    parent = name_shared_folder("images", args.cache_dir)
    folder = parent / key
    folder.mkdir(parents=True, exist_ok=True)
    image = {
        "bytes": datasets.Value("large_binary"),
        "path": datasets.Value("string"),
        "size": datasets.List(datasets.Value("int32"), length=3),
    }
    # the first process to get the lock writes or checks the cache, the others find it so
    with FileLock(parent / f"{key}.lock"):
        record = parent / f"{key}.json"  # the checksums; it exists once the cache is complete
        if not is_intact(record, folder):
            record.unlink(missing_ok=True)
            delete(folder)  # left by a killed run, or changed since it was written
            folder.mkdir()
        # datasets hides the error of a full disk behind another one
        with explained(f"the images can't be cached in {folder}: is its disk or the memory full?"):
            cached = rows.map(
                cache_batch,
                with_indices=True,
                batched=True,
                batch_size=64,
                writer_batch_size=64,
                fn_kwargs=settings | {"allowed": list_allowed(args)},
                features=datasets.Features({column: image}),
                cache_file_name=str(folder / "rows.arrow"),
                new_fingerprint=key,
                num_proc=num_workers if num_workers > 1 else None,
                desc="Caching images",
            )
        if not record.exists():
            with saving(parent, "the cache of images") as unfinished:
                (unfinished / record.name).write_text(json.dumps(checksum_files(folder)))
        os.utime(record)  # for `is_intact` in the other processes
    if not len(cached):
        fail(f"none of the {len(rows)} images could be used: is --image_column right?")
    return cached, len(rows) - len(cached)
