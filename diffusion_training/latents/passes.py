"""One pass over the source for several caches, one per --resolution, each as if made alone."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pyarrow as pa
import torch
from accelerate import Accelerator

from diffusion_training.errors.sentences import fail
from diffusion_training.families.base import Encoders
from diffusion_training.loading import load_batches
from diffusion_training.memory import find_largest


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
