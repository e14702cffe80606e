"""Aspect-ratio buckets: images nearly keep their own ratio, and a batch has one size."""

import functools
import io
import math
from collections.abc import Sequence
from typing import Any

import datasets
import numpy as np
from accelerate import Accelerator

from diffusion_training.data.images import open_file, open_image
from diffusion_training.data.transform_settings import Transform
from diffusion_training.errors.faults import is_machines_fault
from diffusion_training.pillow import read_orientation

SIZES = datasets.Features({"size": datasets.List(datasets.Value("int32"), length=2)})


@functools.lru_cache
def list_buckets(resolution: int, step: int, max_ratio: float) -> list[tuple[int, int]]:
    """The sizes of buckets, (height, width) in pixels, all multiples of `step`.

    For each height there is the largest width that fits, and the same size turned by 90 degrees. No
    bucket has more pixels than the square, or a longer side of more than `max_ratio` times the
    shorter one. With steps of 64 and a ratio of 2 there are 5 sizes at 512 px and 13 at 1024 px.
    """
    buckets = set()
    for height in range(step, int(resolution * max_ratio) + 1, step):
        width = resolution**2 // height // step * step
        if width and max(height, width) <= max_ratio * min(height, width):
            buckets |= {(height, width), (width, height)}
    return sorted(buckets)


def choose_size(height: int, width: int, transform: Transform) -> tuple[int, ...]:
    """The size (height, width) to which an image is cropped and resized: the nearest bucket.

    This is the bucket with the nearest ratio, the larger one of two that are equally near. Without
    --bucket_step it is a square. With --bucket_no_upscale an image smaller than its bucket gets its
    own size: each side is at most the image's, rounded down to the step, and at least one step.
    """
    step = transform.bucket_step
    if step is None:
        return transform.resolution, transform.resolution

    def rank(size: tuple[int, int]) -> tuple:
        distance = abs(math.log(size[0] / size[1] * width / height))
        return round(distance, 9), -size[0] * size[1], size

    size = min(list_buckets(transform.resolution, step, transform.bucket_max_ratio), key=rank)
    if not transform.bucket_no_upscale:
        return size
    return tuple(
        max(step, min(side, most) // step * step)
        for side, most in zip((height, width), size, strict=True)
    )


def read_sizes(batch: dict[str, list], column: str, allowed: Sequence[str] = ()) -> dict[str, list]:
    """The displayed height and width of a batch's images, from their headers.

    An image that can't be read gets (1, 1).
    """
    sizes = []
    for source in batch[column]:
        data = source["bytes"]
        try:
            with open_file(source["path"], allowed) if data is None else io.BytesIO(data) as file:
                image = open_image(file)
                # orientations above 4 are turned by 90 degrees
                sizes.append(image.size if read_orientation(image) > 4 else image.size[::-1])
        except Exception as error:
            if is_machines_fault(error):
                raise
            sizes.append((1, 1))  # the reason is reported when it is decoded
    return {"size": sizes}


def choose_sizes(
    accelerator: Accelerator, rows: Any, transform: Transform, num_workers: int
) -> np.ndarray | None:
    """The size to which each row is cropped and resized, int [rows, 2].

    None if all rows get the same square. Each image is opened only once, because `datasets` caches
    the result.
    """
    if transform.bucket_step is None:
        return None
    with accelerator.local_main_process_first():
        sizes = rows.map(
            read_sizes,
            batched=True,
            batch_size=64,
            fn_kwargs={"column": transform.image_column, "allowed": transform.allowed},
            desc="Reading sizes",
            remove_columns=rows.column_names,
            features=SIZES,
            num_proc=num_workers if num_workers > 1 else None,
        )
    return np.array([choose_size(height, width, transform) for height, width in sizes["size"][:]])
