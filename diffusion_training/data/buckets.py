"""Aspect-ratio buckets: images nearly keep their own ratio, and a batch has one size."""

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
    """The sizes of buckets, (height, width) in pixels, all multiples of `step`.

    For each height there is the largest width that fits, and the same size turned by 90 degrees. No
    bucket has more pixels than the square, or a longer side of more than `max_ratio` times the
    shorter one. With steps of 64 and a ratio of 2 there are 5 sizes at 512 px and 13 at 1024 px.
    """
    found = set()
    for height in range(step, int(resolution * max_ratio) + 1, step):
        width = resolution**2 // height // step * step
        if width and max(height, width) <= max_ratio * min(height, width):
            found |= {(height, width), (width, height)}
    return sorted(found)


def choose_size(height: int, width: int, args: argparse.Namespace) -> tuple[int, int]:
    """The size (height, width) to which an image is cropped and resized: the nearest bucket.

    This is the bucket with the nearest ratio, the larger one of two that are equally near. Without
    --bucket_step it is a square. With --bucket_no_upscale an image smaller than its bucket gets a
    size of its own: no side is longer than the image's, rounded down to the step, but one step at
    least.
    """
    if args.bucket_step is None:
        return args.resolution, args.resolution
    buckets = list_buckets(args.resolution, args.bucket_step, args.bucket_max_ratio)
    off = lambda size: round(abs(math.log(size[0] / size[1] * width / height)), 9)  # noqa: E731
    size = min(buckets, key=lambda size: (off(size), -size[0] * size[1], size))
    if not getattr(args, "bucket_no_upscale", False):
        return size
    step = args.bucket_step
    return tuple(
        max(step, min(side, most) // step * step)
        for side, most in zip((height, width), size, strict=True)
    )


def read_sizes(batch: dict[str, list], column: str) -> dict[str, list]:
    """The displayed height and width of a batch's images, from their headers.

    An image that can't be read gets (1, 1).
    """
    sizes = []
    for source in batch[column]:
        try:
            with (
                fsspec.open(source["path"])
                if source["bytes"] is None
                else io.BytesIO(source["bytes"]) as file
            ):
                image = open_image(file)
                # above 4: turned by 90 degrees
                sizes.append(image.size if read_orientation(image) > 4 else image.size[::-1])
        except Exception as error:
            if is_machines_fault(error):
                raise
            sizes.append((1, 1))  # decoding it reports why
    return {"size": sizes}


def size_rows(
    accelerator: Accelerator, rows: datasets.Dataset, column: str, args: argparse.Namespace
) -> np.ndarray | None:
    """The size to which each row is cropped and resized, int [rows, 2].

    None if all rows get the same square. Each image is opened only once, because `datasets` caches
    the result.
    """
    if args.bucket_step is None:
        return None
    workers = args.dataloader_num_workers
    with accelerator.local_main_process_first():
        sizes = rows.map(
            read_sizes,
            batched=True,
            batch_size=64,
            fn_kwargs={"column": column},
            desc="Reading sizes",
            remove_columns=rows.column_names,
            features=SIZES,
            num_proc=workers if workers > 1 else None,
        )
    return np.array([choose_size(height, width, args) for height, width in sizes["size"][:]])
