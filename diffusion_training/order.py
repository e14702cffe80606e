"""What comes when, and all that is random: every draw has a key, so that a resumed run draws the same."""

import itertools
import math
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import xxhash
from datasets.distributed import split_dataset_by_node

from diffusion_training.errors import explained, fail

Key = tuple[int | None, int, float]  # epoch, None of what is held out; row; weight
KEYS = 2  # of which version the keys are: a checkpoint or a cache that was begun with others can't be gone on with


def step_seed(purpose: str, *key: int) -> int:
    """A 64-bit seed from what is drawn and integers, such as ("step", seed, step, micro-batch, process).

    A hash of its text, since numpy's SeedSequence fills keys up with zeros: (0, 1) would draw as (0, 1, 0) does.
    """
    return xxhash.xxh3_64_intdigest(" ".join([purpose, *(str(int(number)) for number in key)]).encode())


def draw_choices(seed: int, epoch: int | None, row: int) -> np.ndarray:
    """Four numbers in [0, 1) for a row in an epoch: place of the crop (y, x), mirroring, caption.

    Keyed by what they are for, not drawn from a worker's generator: a resumed run draws as the first one did. Epoch
    None, for a row that is held out: the centre, not mirrored, the caption of epoch 0, which is the one of a cache.
    """
    choices = np.random.default_rng(step_seed("image", seed, epoch or 0, row)).random(4)
    return choices if epoch is not None else np.array([0.5, 0.5, 1.0, choices[3]])


def draw_caption(
    seed: int, epoch: int | None, row: int, weights: Sequence[float], there: Sequence[bool] | np.ndarray
) -> int:
    """Which of a row's captions an epoch takes: by the weights of those that are there. Epoch None: the first."""
    ends = np.where(there, weights, 0.0).cumsum()
    choice = draw_choices(seed, epoch, row)[3] if epoch is not None else 0.0
    return int(np.searchsorted(ends / ends[-1], choice, side="right"))


class Stream:
    """The rows of a stream: without an end, so far as is known, and shuffled among a `window` of them."""

    def __init__(self, rows: Any, window: int) -> None:
        self.rows, self.window = rows, window

    def __len__(self) -> int:
        return sys.maxsize  # it never ends its first epoch


class Order:
    """The order in which an epoch takes its rows, and how those of a step are cut into micro-batches of one size.

    `rows` are numbers, or a function of the epoch that gives always as many, or a `Stream`, or `Ranges`, which have an
    order of their own; `sizes` (height, width) of each row, None if all have the same. (seed, epoch) alone fixes the
    order, so a run can go on at any image, also with another batch size or number of processes.
    """

    def __init__(self, rows: Any, seed: int, sizes: np.ndarray | None = None) -> None:
        self.rows, self.seed = rows if callable(rows) else lambda epoch: rows, seed
        found, buckets = ((), np.empty(0)) if sizes is None else np.unique(sizes, axis=0, return_inverse=True)
        self.num_sizes = max(1, len(found))
        self.buckets = buckets.reshape(-1) if self.num_sizes > 1 else None

    def arrange(self, epoch: int, block: int, unit: int) -> Any:
        """The rows of an epoch, each once.

        Of several sizes, as many as there are come in blocks of `block` rows of one size: what a step takes if its
        size is still that of the run's start, as a checkpoint keeps it. What is left of each size comes last, `unit`
        by `unit`, since a step of all of it would have a micro-batch of each size.
        """
        rows = self.rows(epoch)
        if hasattr(rows, "arrange"):
            return rows.arrange(epoch)
        rng = np.random.default_rng(step_seed("epoch", self.seed, epoch))
        order = rng.permutation(rows)
        if self.buckets is None:
            return order
        bucket_of, blocks, units = self.buckets[order % len(self.buckets)], [], []  # %: see `choose_rows`
        for bucket in np.unique(bucket_of):
            rows = order[bucket_of == bucket]
            end = len(rows) // block * block
            blocks += [rows[i : i + block] for i in range(0, end, block)]
            units += [rows[i : i + unit] for i in range(end, len(rows), unit)]
        return np.concatenate([parts[i] for parts in (blocks, units) for i in rng.permutation(len(parts))])

    def cut(self, rows: np.ndarray, most: int) -> list[list[int]]:
        """The rows of a step -> its micro-batches, lists of up to `most` rows of one size."""
        groups = [rows]
        if self.buckets is not None:
            bucket_of = self.buckets[rows % len(self.buckets)]
            groups = [rows[bucket_of == bucket] for bucket in dict.fromkeys(bucket_of.tolist())]
        return [group[i : i + most].tolist() for group in groups for i in range(0, len(group), most)]


def step_batches(order: Order, progress: Any, rank: int, num_processes: int) -> Iterator[list[Key]]:
    """Yield without end one process's micro-batches of keys (epoch, row, weight), from where `progress` is on.

    A step takes the next images of the `order`; the last one of an epoch takes what is left, so every number comes
    exactly once an epoch: none is dropped or repeated. The weights make the sum of loss * weight over a step's
    micro-batches, averaged over the processes as DDP does, the mean over the step's images. A process with no image
    left gets one of weight 0, because DDP needs all to take part. For a `Stream` see `stream_batches`.
    """
    if progress.num_images == sys.maxsize:
        return stream_batches(order, progress, rank, num_processes)
    per_micro, per_step = progress.images_per_micro_batch, progress.images_per_step
    first_epoch, image = divmod(progress.images_seen, progress.num_images)

    def keys(image: int) -> Iterator[list[Key]]:
        for epoch in itertools.count(first_epoch):
            rows = order.arrange(epoch, *progress.cuts)
            for start in range(image, len(rows), per_step):
                step = rows[start : start + per_step]
                for micro_batch in order.cut(step, per_micro):
                    mine = micro_batch[rank::num_processes]  # in turns: all have about as many
                    yield [(epoch, row, num_processes / len(step)) for row in mine] or [(epoch, micro_batch[0], 0.0)]
            image = 0  # the next epoch is whole

    return keys(image)


def stream_batches(order: Order, progress: Any, rank: int, num_processes: int) -> Iterator[list[tuple]]:
    """Like `step_batches` for a `Stream`, with the item itself as fourth part of a key.

    Each process reads its own share of the stream, shuffled, again and again; resuming reads up to where the run was,
    because a stream can't be entered in the middle.
    """
    stream = order.rows(0)
    shuffled = stream.rows.shuffle(seed=order.seed, buffer_size=stream.window)
    share = split_dataset_by_node(shuffled, rank, num_processes)
    weight, start = num_processes / progress.images_per_step, math.ceil(progress.images_seen / num_processes)

    def items() -> Iterator[tuple[int, int, float, dict]]:
        for epoch in itertools.count():
            share.set_epoch(epoch)  # another order in each
            row = None
            with explained("the stream can't be read on", alone=True):
                for row, item in enumerate(share):
                    yield epoch, row, weight, item
            if row is None:
                fail(f"process {rank} finds nothing in the stream: it has fewer images than processes", alone=True)

    def keys(endless: Iterator[tuple]) -> Iterator[list[tuple]]:
        while True:
            yield list(itertools.islice(endless, progress.images_per_micro_batch // num_processes))

    return keys(itertools.islice(items(), start, None))
