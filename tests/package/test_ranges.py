"""The order of many shards: each row once per epoch, the same everywhere, few shards open."""

import collections
import itertools
import math
import time

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from test_laws import LAUNCH, check_epochs, law, take_rows

from diffusion_training.latents.ranges import Ranges
from diffusion_training.order import Order, step_batches
from diffusion_training.training.progress import Progress

SHARDS = st.lists(st.integers(0, 9), min_size=1, max_size=30).filter(sum)
# seed, ranges, shuffle_shards
ORDER = st.tuples(st.integers(0, 2**63 - 1), st.integers(1, 20), st.integers(1, 5))


def lay_out(ranges, epoch):
    return ranges.arrange(epoch)[: len(ranges)].tolist()


def plan_until(end, ranges, *where):
    return list(itertools.takewhile(lambda window: window[0] < end, ranges.plan(*where)))


@law(150)
@given(
    SHARDS,
    ORDER,
    st.data(),
    st.lists(st.tuples(LAUNCH, st.integers(1, 15)), min_size=1, max_size=6),
)
@example([3], (0, 8, 1), None, [((4, 2, 2), 1), ((3, 1, 1), 99)])  # fewer rows than ranges
def test_ranges_give_every_row_once_per_epoch_with_any_number_of_resumes(
    shards, order, data, parts
):
    total = sum(shards)
    held_out = data.draw(st.sets(st.integers(0, total - 1), max_size=total - 1)) if data else set()
    make_order = lambda: Order(Ranges(shards, *order, sorted(held_out)), order[0])
    check_epochs(parts, make_order, [row for row in range(total) if row not in held_out], 2)


@law(100)
@given(SHARDS, ORDER, st.integers(0, 200), LAUNCH, LAUNCH)
def test_order_of_ranges_depends_on_seed_and_epoch_not_on_processes(
    shards, order, images_seen, one, other
):
    def take(*launch):
        ranges = Ranges(shards, *order)
        return take_rows(Order(ranges, order[0]), len(ranges), images_seen, *launch)

    assert take(*one) == take(*other)


@law(100)
@given(SHARDS, ORDER, st.integers(0, 3))
def test_ranges_are_interleaved_and_cut_into_shuffled_windows(shards, order, epoch):
    """Compute the order again from its description: place p is row p // G of range p % G."""
    seed, num_ranges, window = order
    ranges = Ranges(shards, *order)
    rows, all_rows = lay_out(ranges, epoch), lay_out(ranges, epoch + 1)
    shard_of = np.repeat(np.arange(len(shards)), shards)
    laid = [rows[number::num_ranges] for number in range(num_ranges)]
    assert max(map(len, laid)) - min(map(len, laid)) <= 1 and sorted(
        map(len, laid), reverse=True
    ) == [*map(len, laid)]
    for number, mine in enumerate(laid):
        assert sorted(mine) == sorted(all_rows[number::num_ranges])  # a range keeps its rows
        pieces, bounds, ends = ranges.cut_windows(epoch, number)
        assert (
            np.array_equal(np.diff(bounds)[1:-1], [window] * (len(bounds) - 3))
            if len(bounds) > 3
            else True
        )
        for i in range(len(bounds) - 1):
            of_window = mine[ends[i] : ends[i + 1]]
            assert {*shard_of[of_window]} == {
                *ranges.shards[pieces[bounds[i] : bounds[i + 1]]].tolist()
            }


@law(60)
@given(SHARDS, ORDER, st.integers(0, 60), LAUNCH, st.integers(1, 5))
@example([5] * 12, (0, 4, 1), 0, (2, 1, 1), 4)  # each process has a range of its own
def test_rows_of_a_process_come_from_the_shards_of_its_plan(
    shards, order, images_seen, launch, num_processes
):
    """Each row's shard is in a window that overlaps the row's step."""
    batch_size, accumulation, _ = launch
    shard_of = np.repeat(np.arange(len(shards)), shards)
    for rank in range(num_processes):
        ranges = Ranges(shards, *order)
        rows, at = Order(ranges, order[0]), divmod(images_seen, len(ranges))
        state = {"global_step": 0, "data_step": 0, "images_seen": images_seen}
        progress = Progress(state, len(ranges), batch_size * num_processes, accumulation, rows)
        reached, batches = [], step_batches(rows, progress, rank, num_processes)
        ranges.reach = lambda _, epoch, place, reached=reached: reached.append((epoch, place))
        end = images_seen + 2 * len(ranges)
        windows = plan_until(end + len(ranges), ranges, *at, rank, num_processes)
        assert [window[0] for window in windows] == sorted(window[0] for window in windows)
        met = collections.defaultdict(set)
        while progress.images_seen < end:
            first = progress.images_seen
            _, _, images, micro_batches = progress.next_step()
            for batch in [next(batches) for _ in range(micro_batches)]:
                for _, row, weight in batch:
                    if weight:  # a placeholder may be another process's row
                        met[first, first + images].add(shard_of[row])
            assert reached[-1] == divmod(first, len(ranges))
            progress.advance(images, stepped=True)
        for (begin, stop), shards_met in met.items():
            open_shards = {
                shard
                for window in windows
                if window[0] < stop and window[1] > begin
                for shard in window[2]
            }
            assert shards_met <= open_shards
        if math.gcd(num_processes, order[1]) == num_processes:  # its own ranges only
            counts = collections.Counter(number % num_processes for number in range(order[1]))
            assert len({*counts.values()}) == 1


def test_shards_are_opened_about_once_per_epoch():
    """With 1,000 shards on 8 processes, whose 64 ranges cut some shards in two."""
    ranges = Ranges([50] * 1000, 0, 64, 2)
    end = len(ranges)
    plans = [plan_until(end, ranges, 0, 0, rank, 8) for rank in range(8)]
    opened = [shard for plan in plans for _, _, shards in plan for shard in shards]
    assert {*opened} == set(range(1000)) and len(opened) <= 1070


@pytest.mark.parametrize("num_processes", [pytest.param(1, marks=pytest.mark.long), 64])
def test_a_position_in_a_million_shards_is_found_in_seconds(num_processes):
    shards = np.full(10**6, 2000)
    ranges = Ranges(shards, 0, 64, 2)
    assert len(ranges) == 2 * 10**9
    start = time.process_time()
    seen = 3 * len(ranges) + 1_234_567_890
    progress = Progress(
        {"global_step": 0, "data_step": 0, "images_seen": seen}, len(ranges), 256, 1
    )
    batch = next(step_batches(Order(ranges, 0), progress, 0, num_processes))
    next(ranges.plan(*divmod(seen, len(ranges)), 0, num_processes))
    assert time.process_time() - start < 5
    assert len({row for _, row, _ in batch}) == 256 // num_processes and {
        key[0] for key in batch
    } == {3}


def test_neighbouring_rows_come_from_distant_shards():
    """In a data set sorted by class, batches hold all classes, as with a full shuffle."""
    ranges = Ranges([100] * 640, 0, 64, 2)
    labels = np.arange(len(ranges)) * 10 // len(ranges)  # ten classes, one after the other
    batches = labels[lay_out(ranges, 0)].reshape(-1, 64)
    counts = np.stack([np.bincount(batch, minlength=10) for batch in batches])
    spread = counts.std() / math.sqrt(64 * 0.1 * 0.9)  # 1 for random rows
    assert 0.5 < spread < 1.5
    drawn = labels[lay_out(ranges, 0)]
    assert abs(np.corrcoef(drawn[:-1], drawn[1:])[0, 1]) < 0.05


def test_order_of_ranges_stays_the_same_in_every_version():
    """A run that resumes with another version must keep the order."""
    ranges = Ranges([3, 4, 5], 7, 3, 2, held_out=[4])
    expected = [5, 1, 10, 3, 2, 9, 6, 7, 11, 0, 8]
    assert lay_out(ranges, 0) == expected and ranges[5] == expected[5]


def test_windows_change_in_turns_and_end_with_their_last_image():
    ranges = Ranges([10] * 64, 0, 4, 4)
    for number in range(4):
        pieces, bounds, rows = ranges.cut_windows(0, number)
        assert bounds[1] == 1 + number and len(pieces) == 16 and rows[-1] == 160
        windows = list(ranges.plan_range(0, number, 0))
        assert [begin for begin, _, _ in windows] == (rows[:-1] * 4 + number).tolist()
        assert [end for _, end, _ in windows] == ((rows[1:] - 1) * 4 + number + 1).tolist()
