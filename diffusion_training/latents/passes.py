"""One pass over the source for several caches, one per --resolution, each as if made alone."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import pyarrow as pa
import torch
from accelerate import Accelerator

from diffusion_training.data.images import decode_image
from diffusion_training.data.transform_settings import Transform
from diffusion_training.errors.sentences import fail
from diffusion_training.families.base import Encoders
from diffusion_training.loading import load_batches
from diffusion_training.memory import find_largest, is_gpu

Ahead = TypeVar("Ahead")


class LatentRows(NamedTuple):
    """A batch of rows to be written into a cache."""

    cache_index: int  # which of the caches of the pass
    numbers: Sequence[int]  # of all rows in the source, those in `rows` and those in `skipped`
    rows: pa.RecordBatch  # the rows that could be used
    skipped: list[dict[str, Any]]  # {"row", "key", "reason"} of the others
    counts: dict[str, int]  # {"encoded_again", "captions_cut"}


def try_batch_sizes(
    accelerator: Accelerator,
    device: torch.device,
    dataset: Any,
    encoders: Encoders,
    encode: Callable[..., Any],
) -> int:
    """--batch_size auto: return how many images of the largest --resolution fit on a device.

    The result is at most the number of rows in a shard.

    dataset: a `TransformedRows`, whose first row is repeated.
    encode: as in precompute_latents.py.
    """
    cache = max(dataset.caches, key=lambda cache: cache.transform.resolution)

    def prepare_trial(size: int) -> Callable[[int], Any]:
        trial = cache.with_batch_size(size)
        keys = [([0], [(0, 0)] * trial.rows_per_batch)]
        (loaded,) = load_batches(replace(dataset, caches=[trial]), keys, 0, device)
        return lambda step: encode(loaded["batches"][0], encoders, trial)

    most = min(cache.rows_per_shard, len(dataset.rows))
    return find_largest(accelerator, device, prepare_trial, most) or fail(
        "not even one image fits: try --mixed_precision bf16 or a smaller --resolution"
    )


def decode_ahead(item: dict, transform: Transform) -> dict:
    """Decode a row's image and mask once, before `transform_row` makes several sizes of them."""
    images = [(transform.image_column, transform.channels, transform.min_size)]
    if transform.mask_column:
        images.append((transform.mask_column, 1, 0))
    decoded = {}
    for name, channels, min_size in images:
        # `transform_row` will get the same error, and handles it
        with contextlib.suppress(Exception):
            pixels = decode_image(
                item[name], channels, min_size=min_size, allowed=transform.allowed
            )
            decoded[name] = {**item[name], "pixels": pixels}
    return item | decoded


def work_ahead(items: Iterator[Ahead], count: int, device: torch.device) -> Iterator[Ahead]:
    """Yield the items of a generator, made up to `count` ahead in a thread.

    So the device works while files are written. On the CPU, the main thread makes the items.
    """
    if device.type == "cpu":  # `keep_memory` helps only the main thread
        yield from items
        return
    # in this thread, because the first item starts loader processes, and a thread should not fork
    item = next(items, None)

    def make() -> Ahead | None:
        # each thread has its own current device
        gpu = torch.get_device_module(device) if is_gpu(device) else None
        with gpu.device(device) if gpu else contextlib.nullcontext():
            return next(items, None)

    with ThreadPoolExecutor(1) as thread:
        ahead = [thread.submit(make) for _ in range(count)]
        try:
            while item is not None:
                yield item
                item = ahead.pop(0).result()
                ahead.append(thread.submit(make))
        finally:
            thread.shutdown(wait=False, cancel_futures=True)
