"""Aspect-ratio buckets: images keep nearly their own ratio, and those of a batch have one size."""

import argparse
import functools
import io
import math

import datasets
import fsspec
import numpy as np
from accelerate import Accelerator

from diffusion_training.data.images import open_image
from diffusion_training.errors import is_machines_fault
from diffusion_training.pillow import read_orientation

SIZES = datasets.Features({"size": datasets.List(datasets.Value("int32"), length=2)})


@functools.lru_cache
def list_buckets(resolution: int, step: int, max_ratio: float) -> list[tuple[int, int]]:
    """Sizes (height, width) in pixels, multiples of `step`: for each height the widest that fits, and the mirrored.

    None has more pixels than the square, or a longer side of more than `max_ratio` times the shorter one: 5 sizes at
    512 px, 13 at 1024, with steps of 64 and a ratio of 2.
    """
    found = set()
    for height in range(step, int(resolution * max_ratio) + 1, step):
        width = resolution**2 // height // step * step
        if width and max(height, width) <= max_ratio * min(height, width):
            found |= {(height, width), (width, height)}
    return sorted(found)


def choose_size(height: int, width: int, args: argparse.Namespace) -> tuple[int, int]:
    """What an image of a size is cropped and resized to: (height, width), the bucket whose ratio is nearest.

    Without --bucket_step a square. Of two that are as near it is the larger one. With --bucket_no_upscale sides are no
    longer than the image's, but for the step: what is smaller than a bucket has a size of its own.
    """
    if args.bucket_step is None:
        return args.resolution, args.resolution
    buckets = list_buckets(args.resolution, args.bucket_step, args.bucket_max_ratio)
    off = lambda size: round(abs(math.log(size[0] / size[1] * width / height)), 9)  # noqa: E731
    size = min(buckets, key=lambda size: (off(size), -size[0] * size[1], size))
    if not getattr(args, "bucket_no_upscale", False):
        return size
    step = args.bucket_step
    return tuple(max(step, min(side, most) // step * step) for side, most in zip((height, width), size, strict=True))


def read_sizes(batch: dict[str, list], column: str) -> dict[str, list]:
    """Height and width as they are shown of a batch's images, from their headers; (1, 1) of those that have none."""
    sizes = []
    for source in batch[column]:
        try:
            with fsspec.open(source["path"]) if source["bytes"] is None else io.BytesIO(source["bytes"]) as file:
                image = open_image(file)
                sizes.append(image.size if read_orientation(image) > 4 else image.size[::-1])  # turned by a quarter
        except Exception as error:
            if is_machines_fault(error):
                raise
            sizes.append((1, 1))  # its decoding says why
    return {"size": sizes}


def size_rows(
    accelerator: Accelerator, rows: datasets.Dataset, column: str, args: argparse.Namespace
) -> np.ndarray | None:
    """The size that each row is cropped and resized to, int [rows, 2]; None if that is the same square for all.

    Images are opened once: `datasets` keeps what was found.
    """
    if args.bucket_step is None:
        return None
    workers = args.dataloader_num_workers
    with accelerator.local_main_process_first():
        sizes = rows.map(
            read_sizes, batched=True, batch_size=64, fn_kwargs={"column": column}, desc="Reading sizes",
            remove_columns=rows.column_names, features=SIZES, num_proc=workers if workers > 1 else None,
        )  # fmt: skip
    return np.array([choose_size(height, width, args) for height, width in sizes["size"][:]])
