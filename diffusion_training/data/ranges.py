"""An order of rows for streaming: few shards are needed at a time, and every row once an epoch."""

import heapq
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from diffusion_training.order import step_seed

Window = tuple[int, int, tuple[int, ...]]  # begin, end, shards


class Ranges:
    """The rows of many shards and their order in any epoch, in memory that grows with shards only.

    The shards, permuted by seed, are laid end to end and cut into `num_ranges` ranges of equal
    length (+-1 row, the longer first). Place p of an epoch is row p // num_ranges of range p %
    num_ranges. A range's pieces of shards are permuted anew in each epoch, and rows are shuffled
    within windows of `shuffle_shards` pieces. So the order is the same for any number of processes.
    If that number divides `num_ranges`, a process needs only the shards of its own ranges, because
    row r of a micro-batch goes to process r % processes.

    lengths: rows of each shard. held_out: numbers of rows that no epoch takes. reach: called with
    (epoch, place) of a step's first row, before the step's rows are read and after all earlier rows
    were read.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        seed: int,
        num_ranges: int,
        shuffle_shards: int,
        held_out: Sequence[int] = (),
    ) -> None:
        self.seed, self.num_ranges, self.shuffle_shards = seed, num_ranges, shuffle_shards
        self.reach: Callable[[int, int], None] | None = None
        lengths = np.array(lengths, np.int64)
        self.starts, self.kept, held_out = (
            lengths.cumsum() - lengths,
            {},
            np.sort(np.array(held_out, np.int64)),
        )
        for shard in np.unique(np.searchsorted(self.starts, held_out, side="right") - 1).tolist():
            rows = self.starts[shard] + np.arange(lengths[shard])
            self.kept[shard] = np.setdiff1d(rows, held_out)
            lengths[shard] = len(self.kept[shard])
        order = np.random.default_rng(step_seed("shards", seed)).permutation(len(lengths))
        ends = lengths[order].cumsum()
        self.length, ranges = int(ends[-1]), np.arange(num_ranges)
        each, more = divmod(self.length, num_ranges)
        # Pieces begin and end where shards or ranges do, counted along all shards
        cuts = np.unique(
            np.concatenate([[0], ends, first := ranges * each + np.minimum(ranges, more)])
        )
        # index in `order`; "right" skips empty shards
        place = np.searchsorted(ends, cuts[:-1], side="right")
        self.shards, self.lengths = order[place], np.diff(cuts)
        self.offsets = cuts[:-1] - (ends - lengths[order])[place]  # of a piece in its shard
        # range r has the pieces from pieces[r] up to pieces[r + 1]
        self.pieces = np.searchsorted(cuts, [*first, self.length])

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, place: int) -> int:
        """A row by its place in epoch 0."""
        return int(
            Arrangement(self, 0).take(place % self.num_ranges, place // self.num_ranges, 1)[0]
        )

    def arrange(self, epoch: int) -> "Arrangement":
        """The rows of an epoch, to be sliced."""
        return Arrangement(self, epoch)

    def cut_windows(self, epoch: int, number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The windows of a range in an epoch.

        Returns (the range's pieces in order, the bounds of windows among these pieces, the bounds
        of windows among the range's rows). The first windows of the ranges differ in length, so
        that not all of them change at the same time.
        """
        (first, end), size = self.pieces[number : number + 2].tolist(), self.shuffle_shards
        rng = np.random.default_rng(step_seed("pieces", self.seed, epoch, number))
        pieces = first + rng.permutation(end - first)
        starts = range(1 + number * size // self.num_ranges, len(pieces), size)
        bounds = np.array([0, *starts, len(pieces)] if len(pieces) else [0])
        return pieces, bounds, np.concatenate([[0], self.lengths[pieces].cumsum()])[bounds]

    def list_rows(self, pieces: np.ndarray) -> np.ndarray:
        """The numbers of all rows of some pieces."""
        found = []
        for piece in pieces.tolist():
            shard, start = int(self.shards[piece]), self.offsets[piece]
            rows, kept = np.arange(start, start + self.lengths[piece]), self.kept.get(shard)
            found.append(self.starts[shard] + rows if kept is None else kept[rows])
        return np.concatenate(found)

    def plan(self, epoch: int, place: int, rank: int, num_processes: int) -> Iterator[Window]:
        """Yield the windows that a process needs from a place of an epoch on, without end.

        They come as (begin, end, shards), in the order in which they begin, counted in images of
        all epochs. A window's last image comes before its end.
        """
        step = int(np.gcd(num_processes, self.num_ranges))
        # otherwise there are fewer rows than ranges, and none for this process
        while place or rank % step < self.length:
            mine = range((place + rank) % step, self.num_ranges, step)
            for begin, end, shards in heapq.merge(
                *(self.plan_range(epoch, number, place) for number in mine)
            ):
                yield epoch * self.length + begin, epoch * self.length + end, shards
            epoch, place = epoch + 1, 0

    def plan_range(self, epoch: int, number: int, place: int) -> Iterator[Window]:
        """Yield a range's windows from `place` on: (begin, end, shards), in the epoch's images."""
        pieces, bounds, rows = self.cut_windows(epoch, number)
        # the range's first row at that place or after it
        row = max(0, -((number - place) // self.num_ranges))
        for i in range(int(np.searchsorted(rows, row, side="right")) - 1, len(bounds) - 1):
            begin, end = (int(row) * self.num_ranges + number for row in (rows[i], rows[i + 1] - 1))
            yield begin, end + 1, tuple(self.shards[pieces[bounds[i] : bounds[i + 1]]].tolist())


class Arrangement:
    """The rows of an epoch in the order of `Ranges`; a slice is an array.

    It holds one window of each range in memory.
    """

    def __init__(self, ranges: Ranges, epoch: int) -> None:
        self.ranges, self.epoch, self.windows, self.held = ranges, epoch, {}, {}

    def __len__(self) -> int:
        return len(self.ranges)

    def __getitem__(self, part: slice) -> np.ndarray:
        start, stop, _ = part.indices(len(self))
        if self.ranges.reach:
            self.ranges.reach(self.epoch, start)
        rows, step = np.empty(max(0, stop - start), np.int64), self.ranges.num_ranges
        for i in range(min(step, len(rows))):
            row, number = divmod(start + i, step)
            rows[i::step] = self.take(number, row, len(rows[i::step]))
        return rows

    def take(self, number: int, row: int, count: int) -> np.ndarray:
        """Take `count` rows of a range, beginning with its row number `row`."""
        if number not in self.windows:
            self.windows[number] = self.ranges.cut_windows(self.epoch, number)
        pieces, bounds, ends = self.windows[number]
        found, end = [], row + count
        while row < end:
            i = int(np.searchsorted(ends, row, side="right")) - 1
            if self.held.get(number, (None, None))[0] != i:
                rng = np.random.default_rng(
                    step_seed("window", self.ranges.seed, self.epoch, number, i)
                )
                self.held[number] = (
                    i,
                    rng.permutation(self.ranges.list_rows(pieces[bounds[i] : bounds[i + 1]])),
                )
            found.append(self.held[number][1][row - ends[i] : end - ends[i]])
            row += len(found[-1])
        return np.concatenate(found)
