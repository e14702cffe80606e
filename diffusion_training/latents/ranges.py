"""An order of rows for streaming: few shards are needed at a time, and every row once an epoch."""

import heapq
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from diffusion_training.draws import step_seed

Window = tuple[int, int, tuple[int, ...]]  # begin, end, shards


class Ranges:
    """The order of the rows of many shards in any epoch. Memory grows only with the shards.

    The shards, permuted by seed, are laid end to end and cut into `num_ranges` ranges of equal
    length (+-1 row, the longer first). Position p of an epoch is row p // num_ranges of range p %
    num_ranges. A range's pieces of shards are permuted anew in each epoch, and rows are shuffled
    within windows of `shuffle_shards` pieces. So the order is the same for any number of processes.
    If that number divides `num_ranges`, a process needs only the shards of its own ranges, because
    row r of a micro-batch goes to process r % processes.

    lengths: rows of each shard. held_out: numbers of rows that no epoch takes. reach: called with
    (these ranges, epoch, position) of a step's first row, before the step's rows are read and after
    all earlier rows were read. by_number: take the shards by their numbers, in every epoch.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        seed: int,
        num_ranges: int,
        shuffle_shards: int,
        held_out: Sequence[int] = (),
        reach: Callable[["Ranges", int, int], None] | None = None,
        by_number: bool = False,
    ) -> None:
        self.seed = seed
        self.num_ranges = num_ranges
        self.shuffle_shards = shuffle_shards
        self.reach = reach
        self.by_number = by_number
        lengths = np.array(lengths, np.int64)
        self.starts = lengths.cumsum() - lengths
        self.kept = {}
        held_out = np.array(held_out, np.int64)
        for shard in np.unique(np.searchsorted(self.starts, held_out, side="right") - 1):
            rows = self.starts[shard] + np.arange(lengths[shard])
            self.kept[shard] = np.setdiff1d(rows, held_out)
            lengths[shard] = len(self.kept[shard])
        order = np.arange(len(lengths))
        if not by_number:
            order = np.random.default_rng(step_seed("shards", seed)).permutation(order)
        ends = lengths[order].cumsum()
        self.length = int(ends[-1])
        length, rest = divmod(self.length, num_ranges)
        ranges = np.arange(num_ranges)
        first = ranges * length + np.minimum(ranges, rest)
        # pieces begin and end where shards or ranges do, counted along all shards
        cuts = np.unique(np.concatenate([ends, first]))
        # in `order`; "right" skips empty shards
        index = np.searchsorted(ends, cuts[:-1], side="right")
        self.shards = order[index]
        self.lengths = np.diff(cuts)
        self.offsets = cuts[:-1] - (ends - lengths[order])[index]  # of each piece in its shard
        # range r has the pieces from pieces[r] up to pieces[r + 1]
        self.pieces = np.searchsorted(cuts, [*first, self.length])

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, position: int) -> int:
        """A row by its position in epoch 0."""
        row, number = divmod(position, self.num_ranges)
        return int(Arrangement(self, 0).take(number, row, 1)[0])

    def arrange(self, epoch: int) -> "Arrangement":
        """The rows of an epoch, to be sliced."""
        return Arrangement(self, epoch)

    def cut_windows(self, epoch: int, number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The windows of a range in an epoch.

        Returns (the range's pieces in order, the bounds of windows among these pieces, the bounds
        of windows among the range's rows). The first windows of the ranges differ in length, so
        that not all of them change at the same time.
        """
        first, end = self.pieces[number : number + 2].tolist()
        size = self.shuffle_shards
        pieces = np.arange(first, end)
        if not self.by_number:
            rng = np.random.default_rng(step_seed("pieces", self.seed, epoch, number))
            pieces = rng.permutation(pieces)
        starts = range(1 + number * size // self.num_ranges, len(pieces), size)
        bounds = np.unique([0, *starts, len(pieces)])  # [0] for a range without rows
        rows = np.concatenate([[0], self.lengths[pieces].cumsum()])
        return pieces, bounds, rows[bounds]

    def list_rows(self, pieces: np.ndarray) -> np.ndarray:
        """The numbers of all rows of some pieces."""
        parts = []
        for piece in pieces.tolist():
            shard = self.shards[piece]
            start = self.offsets[piece]
            end = start + self.lengths[piece]
            kept = self.kept.get(shard)
            rows = np.arange(start, end) + self.starts[shard] if kept is None else kept[start:end]
            parts.append(rows)
        return np.concatenate(parts)

    def plan(self, epoch: int, position: int, rank: int, num_processes: int) -> Iterator[Window]:
        """Yield, without end, the windows that a process needs from a position in an epoch.

        They are (begin, end, shards), in order of `begin`. `begin` and `end` count the images of
        all epochs; the last image of a window is the one before `end`.
        """
        step = np.gcd(num_processes, self.num_ranges)
        # with fewer rows than ranges, this process may have none
        while position or rank % step < self.length:
            numbers = range((position + rank) % step, self.num_ranges, step)
            windows = [self.plan_range(epoch, number, position) for number in numbers]
            start = epoch * self.length
            for begin, end, shards in heapq.merge(*windows):
                yield start + begin, start + end, shards
            epoch += 1
            position = 0

    def plan_range(self, epoch: int, number: int, position: int) -> Iterator[Window]:
        """Yield a range's windows from `position` on: (begin, end, shards), in images."""
        pieces, bounds, rows = self.cut_windows(epoch, number)
        images = (rows * self.num_ranges + number).tolist()
        # the range's first row at that position or after it
        row = max(0, -((number - position) // self.num_ranges))
        first = np.searchsorted(rows, row, side="right") - 1
        for i in range(first, len(bounds) - 1):
            end = images[i + 1] - self.num_ranges + 1
            shards = self.shards[pieces[bounds[i] : bounds[i + 1]]].tolist()
            yield images[i], end, tuple(shards)


class Arrangement:
    """The rows of an epoch in the order of `Ranges`; a slice is an array.

    It holds one window of each range in memory.
    """

    def __init__(self, ranges: Ranges, epoch: int) -> None:
        self.ranges = ranges
        self.epoch = epoch
        self.windows = {}
        self.held = {}

    def __len__(self) -> int:
        return len(self.ranges)

    def __getitem__(self, part: slice) -> np.ndarray:
        start, stop, _ = part.indices(len(self))
        ranges = self.ranges
        if ranges.reach:
            ranges.reach(ranges, self.epoch, start)
        rows = np.empty(max(0, stop - start), np.int64)
        step = ranges.num_ranges
        for i in range(min(step, len(rows))):
            row, number = divmod(start + i, step)
            rows[i::step] = self.take(number, row, len(rows[i::step]))
        return rows

    def take(self, number: int, row: int, count: int) -> np.ndarray:
        """Take `count` rows of a range, beginning with its row number `row`."""
        if number not in self.windows:
            self.windows[number] = self.ranges.cut_windows(self.epoch, number)
        pieces, bounds, ends = self.windows[number]
        parts = []
        end = row + count
        while row < end:
            i = np.searchsorted(ends, row, side="right") - 1
            window, rows = self.held.get(number, (None, None))
            if window != i:
                seed = step_seed("window", self.ranges.seed, self.epoch, number, i)
                rows = self.ranges.list_rows(pieces[bounds[i] : bounds[i + 1]])
                rows = np.random.default_rng(seed).permutation(rows)
                self.held[number] = i, rows
            parts.append(rows[row - ends[i] : end - ends[i]])
            row += len(parts[-1])
        return np.concatenate(parts)
