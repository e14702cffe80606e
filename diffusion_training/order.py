"""The order of rows, which depends only on the seed and the position in the run."""

import itertools
import math
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import xxhash
from datasets.distributed import split_dataset_by_node

from diffusion_training.draws import Key, step_seed
from diffusion_training.errors.sentences import explained, fail


def hash_names(names: Iterable[str], seed: int) -> np.ndarray:
    """A 64-bit hash of the seed and each name, by which names are held out."""
    hashes = (xxhash.xxh3_64_intdigest(f"{seed} {name}".encode()) for name in names)
    return np.fromiter(hashes, np.uint64)


class Stream:
    """The rows of a stream of unknown length, shuffled within a buffer of `window` rows."""

    def __init__(self, rows: Any, window: int) -> None:
        self.rows = rows
        self.window = window

    def __len__(self) -> int:
        return sys.maxsize  # so that the first epoch never ends


class Order:
    """The order of an epoch's rows, and the split of a step's rows into micro-batches of one size.

    `rows` are row numbers, a function that returns equally many of them for each epoch, a `Stream`,
    or `Ranges`, which have their own order. `sizes` holds (height, width) of each row, None if all
    are equal. The order depends only on (seed, epoch), so a run can resume at any image, also with
    another batch size or number of processes.
    """

    def __init__(self, rows: Any, seed: int, sizes: np.ndarray | None = None) -> None:
        self.rows = rows if callable(rows) else lambda epoch: rows
        self.seed = seed
        self.num_sizes = 1
        self.buckets = None
        if sizes is not None:
            distinct, buckets = np.unique(sizes, axis=0, return_inverse=True)
            if len(distinct) > 1:
                self.num_sizes = len(distinct)
                self.buckets = buckets.reshape(-1)

    def arrange(self, epoch: int, block: int, unit: int) -> Any:
        """Return the rows of an epoch, each once.

        If there are several sizes, blocks of `block` rows of one size come first. `block` is the
        number of images per step at the start of the run, which checkpoints store. The remaining
        rows of each size come last, in shuffled groups of `unit` rows: if they were mixed, a step
        would need a micro-batch for each size.
        """
        rows = self.rows(epoch)
        if hasattr(rows, "arrange"):
            return rows.arrange(epoch)
        rng = np.random.default_rng(step_seed("epoch", self.seed, epoch))
        order = rng.permutation(rows)
        if self.buckets is None:
            return order
        # repeated rows have higher numbers, see `choose_rows`
        bucket_of = self.buckets[order % len(self.buckets)]
        blocks = []
        units = []
        for bucket in np.unique(bucket_of):
            rows = order[bucket_of == bucket]
            end = len(rows) // block * block
            blocks += [rows[i : i + block] for i in range(0, end, block)]
            units += [rows[i : i + unit] for i in range(end, len(rows), unit)]
        parts = [blocks[i] for i in rng.permutation(len(blocks))]
        parts += [units[i] for i in rng.permutation(len(units))]
        return np.concatenate(parts)

    def cut(self, rows: np.ndarray, most: int) -> list[list[int]]:
        """Split the rows of a step into micro-batches: lists of up to `most` rows of one size."""
        groups = [rows]
        if self.buckets is not None:
            bucket_of = self.buckets[rows % len(self.buckets)]
            groups = [rows[bucket_of == bucket] for bucket in dict.fromkeys(bucket_of.tolist())]
        return [
            group[i : i + most].tolist() for group in groups for i in range(0, len(group), most)
        ]


def step_batches(order: Order, progress: Any, rank: int, num_processes: int) -> Iterator[list[Key]]:
    """Yield one process's micro-batches of keys (epoch, row, weight) without end.

    They start at `progress`. A step takes the next images of the `order`. The last step of an epoch
    takes the rest, so each row comes exactly once per epoch: none is dropped or repeated. The
    weights turn the sum of loss * weight over a step's micro-batches, averaged over the processes
    as DDP does, into the mean over the step's images. A process without an image gets one of weight
    0, because DDP needs all processes to take part. For a `Stream` see `stream_batches`.
    """
    if progress.num_images == sys.maxsize:
        yield from stream_batches(order, progress, rank, num_processes)
        return
    per_step = progress.images_per_step
    first_epoch, image = divmod(progress.images_seen, progress.num_images)
    for epoch in itertools.count(first_epoch):
        rows = order.arrange(epoch, *progress.cuts)
        for start in range(image, len(rows), per_step):
            step = rows[start : start + per_step]
            weight = num_processes / len(step)
            for micro_batch in order.cut(step, progress.images_per_micro_batch):
                share = micro_batch[rank::num_processes]  # about equally many for each process
                batch = [(epoch, row, weight) for row in share]
                yield batch or [(epoch, micro_batch[0], 0.0)]
        image = 0


def stream_batches(
    order: Order, progress: Any, rank: int, num_processes: int
) -> Iterator[list[tuple]]:
    """Yield batches like `step_batches` from a `Stream`. A key's fourth part is the item itself.

    Each process reads its own share of the stream, shuffled, again and again. A resumed run reads
    the stream from its start, because it can't be opened in the middle.
    """
    stream = order.rows(0)
    shuffled = stream.rows.shuffle(seed=order.seed, buffer_size=stream.window)
    share = split_dataset_by_node(shuffled, rank, num_processes)
    weight = num_processes / progress.images_per_step
    start = math.ceil(progress.images_seen / num_processes)

    def items() -> Iterator[tuple[int, int, float, dict]]:
        for epoch in itertools.count():
            share.set_epoch(epoch)  # a new order in each epoch
            row = None
            with explained("reading the stream failed", alone=True):
                for row, item in enumerate(share):
                    yield epoch, row, weight, item
            if row is None:
                fail(
                    f"process {rank} finds no image in the stream: launch no more processes than "
                    "it has images",
                    alone=True,
                )

    rest = itertools.islice(items(), start, None)
    per_process = progress.images_per_micro_batch // num_processes
    return (list(itertools.islice(rest, per_process)) for _ in itertools.count())
