"""Order: every image comes once per epoch and steps are means.

This holds for any batch size, any number of processes and any kill.
"""

import collections
import functools
import itertools
import json
import random
import tracemalloc

import datasets
import numpy as np
import pytest
import torch

from diffusion_training.draws import draw_choices, seed_generators, step_seed
from diffusion_training.order import Order, Stream, step_batches, stream_batches
from diffusion_training.training.progress import Progress

START = {"global_step": 0, "data_step": 0, "images_seen": 0}


def progress_at(images_seen, num_images, batch_size, accumulation=1, num_processes=1):
    return Progress(
        {**START, "images_seen": images_seen}, num_images, batch_size * num_processes, accumulation
    )


def take_step(ranks, progress):
    """The keys of the next step, a list per process. All have the same number of micro-batches."""
    _, _, images, micro_batches = progress.next_step()
    step = [[key for _ in range(micro_batches) for key in next(batches)] for batches in ranks]
    progress.advance(images, stepped=True)
    return images, step


def test_resuming_with_another_batch_size_repeats_and_skips_no_image():
    """Resume repeatedly with other batch sizes, accumulations and numbers of processes."""
    rng = random.Random(0)
    for trial in range(200):
        num_images, num_epochs, seed = rng.randint(1, 40), rng.randint(1, 4), rng.randint(0, 9)
        rows = np.array(rng.sample(range(1000), num_images))
        state, seen = START, collections.defaultdict(list)
        while state["images_seen"] < num_epochs * num_images:
            batch_size, accumulation, num_processes = (
                rng.randint(1, 7),
                rng.randint(1, 4),
                rng.randint(1, 4),
            )
            reproduction = (trial, state, num_images, batch_size, accumulation, num_processes)
            progress = Progress(
                json.loads(json.dumps(state)), num_images, batch_size * num_processes, accumulation
            )
            ranks = [
                step_batches(Order(rows, seed), progress, rank, num_processes)
                for rank in range(num_processes)
            ]
            last_step, kill = (
                progress.last_step(num_epochs),
                progress.global_step + rng.randint(1, 12),
            )
            while progress.images_seen < num_epochs * num_images and progress.global_step < kill:
                epoch = progress.epoch
                images, step = take_step(ranks, progress)
                keys = [key for mine in step for key in mine]
                used = [key for key in keys if key[2] > 0]
                assert len(used) == images <= batch_size * accumulation * num_processes, (
                    reproduction
                )
                assert {key[0] for key in keys} == {epoch}, reproduction
                assert len({key[2] for key in used}) == 1, reproduction
                assert sum(key[2] for key in keys) / num_processes == pytest.approx(1, abs=1e-12), (
                    reproduction
                )
                assert (
                    max(sum(key[2] > 0 for key in mine) for mine in step)
                    <= batch_size * accumulation
                ), reproduction
                seen[epoch] += [key[1] for key in used]
            if progress.images_seen == num_epochs * num_images:
                assert progress.global_step == last_step, reproduction
            state = progress.state()
        assert len(seen) == num_epochs and state["images_seen"] == num_epochs * num_images
        for epoch, found in seen.items():
            assert sorted(found) == sorted(rows.tolist()), (trial, epoch)


def test_micro_batches_are_full_and_shared_in_turns_by_processes():
    """11 images in steps of 2 micro-batches of 2 on 2 processes: first 8, then 3."""
    progress = progress_at(0, 11, 2, accumulation=2, num_processes=2)
    ranks = [step_batches(Order(range(11), 0), progress, rank, 2) for rank in range(2)]
    first = [[next(batches) for _ in range(2)] for batches in ranks]
    assert [[len(batch) for batch in mine] for mine in first] == [[2, 2], [2, 2]]
    assert {key[2] for mine in first for batch in mine for key in batch} == {2 / 8}
    second = [next(batches) for batches in ranks]
    assert [len(batch) for batch in second] == [2, 1] and {
        key[2] for batch in second for key in batch
    } == {2 / 3}
    order = np.random.default_rng(step_seed("epoch", 0, 0)).permutation(11).tolist()
    both = zip(*[[key[1] for batch in mine for key in batch] for mine in first], strict=True)
    assert [row for pair in both for row in pair] == order[:8]
    # A process with nothing left gets an image of weight 0: all must take part.
    progress = progress_at(0, 1, 4, num_processes=2)
    assert [next(step_batches(Order(range(1), 0), progress, rank, 2)) for rank in range(2)] == [
        [(0, 0, 2.0)],
        [(0, 0, 0.0)],
    ]


@pytest.mark.parametrize(
    "num_images, batch_size, accumulation, num_processes",
    [(6, 1, 1, 1), (10, 4, 3, 1), (10, 4, 3, 2), (5, 1, 2, 2), (1, 4, 1, 2), (33, 2, 3, 4)],
)
def test_step_batches_cover_each_epoch_once_from_any_start(
    num_images, batch_size, accumulation, num_processes
):
    """The order depends only on seed and epoch, at whichever image a run resumes."""
    orders = {
        (seed, e): np.random.default_rng(step_seed("epoch", seed, e))
        .permutation(num_images)
        .tolist()
        for seed in range(2)
        for e in range(3)
    }
    assert num_images < 5 or len({tuple(order) for order in orders.values()}) == 6
    for seed, seen in itertools.product(range(2), range(2 * num_images)):
        progress = progress_at(seen, num_images, batch_size, accumulation, num_processes)
        ranks = [
            step_batches(Order(range(num_images), seed), progress, rank, num_processes)
            for rank in range(num_processes)
        ]
        while progress.images_seen < 3 * num_images:
            epoch, begin = divmod(progress.images_seen, num_images)
            images, step = take_step(ranks, progress)
            keys = [key for mine in step for key in mine if key[2]]
            assert sorted(row for _, row, _ in keys) == sorted(
                orders[seed, epoch][begin : begin + images]
            )
            assert {key[2] for key in keys} == {num_processes / images} and {
                key[0] for key in keys
            } == {epoch}


def test_an_order_may_choose_other_rows_in_each_epoch():
    choose = lambda epoch: np.array([[3, 4], [5, 6], [7, 8]][epoch])
    batches = step_batches(Order(choose, 0), progress_at(1, 2, 2), 0, 1)
    assert [sorted(key[:2] for key in next(batches)) for _ in range(3)][1:] == [
        [(1, 5), (1, 6)],
        [(2, 7), (2, 8)],
    ]


def test_the_order_of_many_rows_takes_nine_bytes_per_row():
    rows = np.arange(10**6)
    tracemalloc.start()
    first = next(step_batches(Order(rows, 0), progress_at(0, len(rows), 4), 0, 1))
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(first) == 4 and most < 9 * len(rows)  # bytes; a list of them takes 40


def test_seeds_and_choices_stay_the_same_in_every_version():
    """They never change: a run that resumes with another version must draw the same."""
    assert step_seed("step", 0, 1, 2, 3) == 3475452031678130806
    keys = [
        key
        for length in range(1, 5)
        for key in itertools.product([0, 1, 2, 11, 2**32, 2**63 - 1], repeat=length)
    ]
    keys = [(purpose, *key) for purpose in ("step", "sample") for key in keys]
    # keys of different lengths and beyond 32 bits have different seeds too
    assert len({step_seed(*key) for key in keys}) == len(keys)
    assert step_seed("step", np.int64(7), 1) == step_seed("step", 7, 1)
    assert draw_choices(0, 1, 2).tolist() == pytest.approx(
        [0.7288652230, 0.6749360100, 0.2133681938, 0.9351100200]
    )
    assert next(step_batches(Order(range(9), 0), progress_at(4, 9, 4), 0, 1)) == [
        (0, row, 0.25) for row in (8, 3, 5, 2)
    ]
    assert (
        draw_choices(0, 1, 2).tolist()
        != draw_choices(0, 1, 3).tolist()
        != draw_choices(0, 2, 3).tolist()
    )
    # held-out images: centre crop, not mirrored, the caption of a cache (epoch 0)
    y, x, flip, caption = draw_choices(5, None, 7)
    assert (y, x, flip, caption) == (0.5, 0.5, 1.0, draw_choices(5, 0, 7)[3])


def test_a_step_seeds_the_generators_of_its_device_and_asks_no_other(monkeypatch):
    asked = []
    for name in ("cuda", "xpu", "mtia"):
        for function in ("manual_seed", "manual_seed_all"):
            add = functools.partial(lambda name, seed: asked.append((name, seed)), name)
            monkeypatch.setattr(getattr(torch, name), function, add)
    key = step_seed("step", 0, 1, 2, 3)
    torch.manual_seed(key)
    draws = torch.randn(5)
    asked.clear()
    for device, seeded in (("cpu", []), ("cuda", [("cuda", key)])):
        seed_generators(key, torch.device(device))
        assert torch.equal(torch.randn(5), draws) and asked == seeded


# ------------------------------------------------------------------- streams


def stream(count):
    return datasets.Dataset.from_dict({"number": range(count)}).to_iterable_dataset(num_shards=2)


def take(rows, images_seen, batch_size, count, rank=0, num_processes=1):
    progress = progress_at(images_seen, 10**9, batch_size, num_processes=num_processes)
    batches = stream_batches(Order(Stream(rows, 1000), 0), progress, rank, num_processes)
    return [key for _ in range(count) for key in next(batches)]


def test_a_stream_gives_every_image_once_per_pass_and_resumes():
    keys = take(stream(6), 0, 4, 3)
    numbers = [key[3]["number"] for key in keys]
    assert (
        sorted(numbers[:6]) == sorted(numbers[6:]) == list(range(6)) and numbers[:6] != numbers[6:]
    )
    assert [key[:3] for key in keys] == [(i // 6, i % 6, 0.25) for i in range(12)]
    assert take(stream(6), 8, 4, 1) == keys[8:]
    assert [take(stream(6), 8, 2, 1), take(stream(6), 10, 2, 1)] == [
        [(*key[:2], 0.5, key[3]) for key in part] for part in (keys[8:10], keys[10:])
    ]


def test_processes_read_their_own_share_of_a_stream():
    shares = [take(stream(8), 0, 2, 4, rank, 2) for rank in range(2)]
    numbers = [[key[3]["number"] for key in share] for share in shares]
    for part in (slice(0, 4), slice(4, 8)):
        assert sorted(numbers[0][part] + numbers[1][part]) == list(range(8))
    assert {key[2] for share in shares for key in share} == {0.5}  # steps of 4, averaged over 2
    assert [take(stream(8), 8, 2, 2, rank, 2) for rank in range(2)] == [
        share[4:] for share in shares
    ]


def test_a_stream_without_images_for_a_process_is_refused():
    with pytest.raises(SystemExit, match="process 1 finds no image in the stream") as stop:
        take(
            datasets.Dataset.from_dict({"number": [1]}).to_iterable_dataset(),
            0,
            1,
            1,
            rank=1,
            num_processes=2,
        )
    assert stop.value.alone  # the process with an image prints nothing


def test_a_limited_stream_gives_the_same_images_in_each_pass():
    numbers = [key[3]["number"] for key in take(stream(20).take(3), 0, 3, 4)]
    assert {tuple(sorted(numbers[start : start + 3])) for start in range(0, 12, 3)} == {(0, 1, 2)}


def test_a_stream_is_shuffled_only_within_its_window():
    progress, rows = (
        progress_at(0, 10**9, 1),
        datasets.Dataset.from_dict({"number": range(50)}).to_iterable_dataset(),
    )
    for window in (1, 5, 50):
        batches = stream_batches(Order(Stream(rows, window), 0), progress, 0, 1)
        numbers = [next(batches)[0][3]["number"] for _ in range(50)]
        early = max(i - number for number, i in zip(numbers, range(50), strict=True))
        late = max(number - i for number, i in zip(numbers, range(50), strict=True))
        assert sorted(numbers) == list(range(50)) and late < window and (early > 0) == (window > 1)


def test_a_stream_error_is_reported_by_the_process_that_meets_it():
    def read():
        yield {"number": 0}
        raise OSError("cut off")

    with pytest.raises(SystemExit, match=r"reading the stream failed \(cut off\)") as stop:
        take(datasets.IterableDataset.from_generator(read), 0, 1, 2)
    assert stop.value.alone  # the other processes print nothing
