"""A cache that is still being made: what is there, and an order that does not depend on it."""

import json
import shutil
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_cache import make_cache
from test_laws import LAUNCH, check_epochs, law, take_rows
from test_ranges import ORDER
from test_stream import accelerator, list_settings, open_caches

from diffusion_training.latents import follow as module
from diffusion_training.latents import stream
from diffusion_training.latents.reader import load_cache
from diffusion_training.latents.settings import RECORD
from diffusion_training.order import Order, step_batches
from diffusion_training.training.progress import Progress

PLACES = [3, 3, 1]  # of `make_cache`, whose row 4 was skipped
NAMES = [f"data-0000{number}-of-00003.arrow" for number in range(3)]


@pytest.fixture
def finished(tmp_path):
    make_cache(tmp_path / "finished")
    return tmp_path / "finished"


@pytest.fixture
def begun(tmp_path, finished, monkeypatch):
    """The same cache when it has no shard yet, and looks for shards without a pause."""
    monkeypatch.setattr(module, "POLL", 0.0)
    folder = tmp_path / "begun"
    (folder / "unfinished").mkdir(parents=True)
    for name in ("cache.json", "empty_prompt.npy"):
        shutil.copy(finished / name, folder)
    return folder


def deliver(begun, finished, number, **record):
    """Add a shard and its record, which has the entries `record`."""
    cache = json.loads((finished / "cache.json").read_text())
    found = {name: values[number] for name, values in cache["shards"].items() if name != "name"}
    shutil.copy(finished / NAMES[number], begun)
    skipped = [{"row": 4, "key": "4.png", "reason": "broken"}] * (PLACES[number] - found["rows"])
    text = json.dumps({**found, "skipped": skipped, **record})
    (begun / "unfinished" / f"{NAMES[number]}.json").write_text(text)


def open_shards(folder, minutes=5.0):
    return module.FollowedShards(
        str(folder), json.loads((folder / "cache.json").read_text()), minutes
    )


def order_places(places, seed, num_ranges, shuffle_shards, held_out=()):
    shards = SimpleNamespace(places=np.array(places), find=lambda number: True, find_all=bool)
    reach = lambda *where: None
    return module.FollowedRanges(shards, seed, num_ranges, shuffle_shards, held_out, reach)


# ------------------------------------------------------------------- the order


@law(100)
@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=30),
    ORDER,
    st.data(),
    st.lists(st.tuples(LAUNCH, st.integers(1, 15)), min_size=1, max_size=6),
)
def test_every_place_comes_once_per_epoch_with_any_number_of_resumes(places, order, data, parts):
    total = sum(places)
    held_out = data.draw(st.sets(st.integers(0, total - 1), max_size=total - 1))
    make_order = lambda: Order(order_places(places, *order, sorted(held_out)), order[0])
    check_epochs(parts, make_order, [row for row in range(total) if row not in held_out], 2)


def test_the_first_epoch_takes_windows_of_neighbours_and_later_ones_are_those_of_ranges():
    ranges = order_places([4] * 9, 7, 3, 2)
    first = ranges.arrange(0)[:36]
    assert [sorted({*first[a:b] // 4}) for a, b in ((0, 4), (4, 12), (12, 20))] == [
        [0],
        [1, 2],
        [3, 4],
    ]
    assert (np.diff(first[4:12]) < 0).any()  # shuffled
    later = stream.Ranges([4] * 9, 7, 3, 2)
    assert ranges.arrange(1)[:36].tolist() == later.arrange(1)[:36].tolist()
    one, other = (take_rows(Order(ranges, 7), 36, 9, *launch) for launch in ((1, 4, 1), (2, 2, 1)))
    assert one == other


def test_windows_are_planned_when_their_shards_are_there(begun, finished):
    shards = open_shards(begun)
    ranges = module.FollowedRanges(shards, 0, 2, 1, [], lambda *where: None)
    plan = ranges.plan(0, 0, 0, 1)
    assert next(plan) is next(plan) is None
    deliver(begun, finished, 0)
    assert next(plan) == (0, 3, (0,)) and next(plan) is None
    assert ranges.find_missing(0, 0, 3) is None
    # the next step's images, and those that are loaded ahead
    assert ranges.find_missing(0, 0, 4) == ranges.find_missing(0, 3, 1) == NAMES[1]
    deliver(begun, finished, 2)
    assert ranges.find_missing(0, 6, 1) is None and next(plan) is None
    assert ranges.find_missing(0, 6, 2) == ranges.find_missing(1, 0, 1) == NAMES[1]
    deliver(begun, finished, 1)
    assert [next(plan)[2] for _ in range(2)] == [(1,), (2,)]
    assert ranges.find_missing(1, 0, 1) is None
    begin, end, _ = next(plan)
    assert 7 <= begin < end <= 14


# ------------------------------------------------------------------- what is there


def test_a_shard_is_there_with_its_record_and_all_are_with_the_end(begun, finished):
    shards = open_shards(begun)
    assert len(shards) == 3 and shards.places.tolist() == shards.rows.tolist() == PLACES
    assert not shards.find(1) and not shards.find_all()
    deliver(begun, finished, 1)
    assert shards.find(1) and not shards.find(0) and not shards.find_all()
    assert shards.rows.tolist() == [3, 2, 1] and len(shards.open(1).unchecked) == 2
    (begun / "unfinished" / f"{NAMES[0]}.json").write_text('{"rows": 3}')  # not whole
    assert not shards.find(0)
    # another run of the script makes this one again
    skipped = [{"row": 0, "key": "0.png", "reason": "not read: gone"}]
    deliver(begun, finished, 0, rows=2, skipped=skipped)
    assert not shards.find(0)
    deliver(begun, finished, 0, rows=2)  # lacks a row
    assert not shards.find(0)
    shutil.copytree(finished, begun, dirs_exist_ok=True)
    shutil.rmtree(begun / "unfinished")
    assert shards.find(0) and shards.find_all()
    whole = load_cache(finished).shards
    for name in ("rows", "sha256", "checksums", "names"):
        assert getattr(shards, name).tolist() == getattr(whole, name).tolist()
    assert shards.places.tolist() == PLACES
    assert {*module.FOUND} < {*RECORD}


def test_shards_are_looked_for_once_in_a_while(begun, finished, monkeypatch):
    monkeypatch.setattr(module, "POLL", 1000.0)
    shards = open_shards(begun)
    assert not shards.find(0)
    deliver(begun, finished, 0)
    assert not shards.find(0)
    shards.next_look = 0.0
    assert shards.find(0)


def test_another_cache_in_the_folder_ends_the_run(begun, finished, tmp_path):
    shards = open_shards(begun)
    make_cache(tmp_path / "other", "--center_crop")
    shutil.copytree(tmp_path / "other", begun, dirs_exist_ok=True)
    with pytest.raises(SystemExit, match="begun holds another cache than when the run began"):
        shards.find(0)


def test_a_cache_that_stands_still_ends_the_run(begun, finished, capsys):
    shards = open_shards(begun, minutes=0.001)
    with pytest.raises(
        SystemExit,
        match=rf"no shard has come to {begun} for 0.001 minutes \(--follow\), and {NAMES[0]} is "
        "missing: look at the script that makes the cache; .* the same command continues",
    ):
        shards.open(0)
    assert capsys.readouterr().out == f"Waiting for {NAMES[0]} of {begun}\n"
    (begun / "cache.json").unlink()
    with pytest.raises(SystemExit, match="no shard .* and cache.json is missing"):
        load_cache(begun, follow=0.001)


def test_a_cache_from_a_stream_is_refused(begun):
    cache = json.loads((begun / "cache.json").read_text())
    cache["source"]["rows"] = None
    (begun / "cache.json").write_text(json.dumps(cache))
    with pytest.raises(SystemExit, match="is made from a stream, whose number of rows is not"):
        load_cache(begun, follow=5.0)


# ------------------------------------------------------------------- the rows


def open_followed(folder, **flags):
    """The data set, and its rows to train on."""
    dataset = open_caches(folder, follow=5.0, **flags)
    rows, _ = dataset.hold_out(accelerator(), 0, 0)
    return dataset, rows


def test_skipped_rows_keep_a_place_of_weight_0(begun, finished):
    for number in range(3):
        deliver(begun, finished, number)
    taken = {}
    for folder in (begun, finished):
        dataset, rows = open_followed(folder)
        assert len(rows) == len(dataset) == 7 and dataset.order["kind"] == "followed"
        progress = Progress({"global_step": 0, "data_step": 0, "images_seen": 0}, 7, 2, 1)
        batches = step_batches(Order(rows, 0), progress, 0, 1)
        taken[folder] = [dataset[next(batches)] for _ in range(8)]  # two epochs
        for epoch in (taken[folder][:4], taken[folder][4:]):
            rows = np.concatenate([batch["latents"].numpy() for batch in epoch])
            weights = np.concatenate([batch["weight"].numpy() for batch in epoch])
            assert len(rows) == 7 and (weights == 0).sum() == 1
            assert len(np.unique(rows[weights > 0], axis=0)) == 6
    for one, other in zip(*taken.values(), strict=True):
        assert torch.equal(one["latents"], other["latents"])
        assert torch.equal(one["weight"], other["weight"])
    one, other = (open_followed(folder)[0] for folder in (begun, finished))
    assert one.fingerprint == other.fingerprint
    assert list_settings(one) == list_settings(other)


@pytest.mark.parametrize("empty", [[0], [1], [0, 1]])
def test_places_of_a_shard_without_rows_hold_rows_of_another(tmp_path, empty, monkeypatch):
    import test_cache

    skipped = {row: "broken" for row in range(6) if row // 3 in empty}
    monkeypatch.setattr(test_cache.encode_rows, "__defaults__", (0, "embeddings", skipped))
    finish_cache = test_cache.module.finish_cache
    monkeypatch.setattr(test_cache.module, "finish_cache", lambda *args: finish_cache(*args[:2], 1))
    make_cache(tmp_path / "cache")
    dataset, _ = open_followed(tmp_path / "cache")
    batch = dataset[[(0, row, 1.0) for row in range(7)]]
    assert batch["weight"].tolist() == [0.0 if row in skipped else 1.0 for row in range(7)]
    own = batch["latents"][batch["weight"] > 0]
    assert len(own.unique(dim=0)) == len(own) == len(batch["latents"].unique(dim=0))


def test_held_out_rows_are_of_the_first_shards(begun, finished):
    deliver(begun, finished, 0)
    dataset = open_caches(begun, follow=5.0)
    rows, held_out = dataset.hold_out(accelerator(), 2, 0)
    assert len(rows) == 5 and {*held_out} < {0, 1, 2}
    later, again = open_caches(finished, follow=5.0).hold_out(accelerator(), 2, 0)
    assert again == held_out and later.arrange(0)[:5].tolist() == rows.arrange(0)[:5].tolist()


def test_the_wait_counts_and_ends_with_the_shard_a_signal_or_in_a_sentence(begun, finished):
    dataset, _ = open_followed(begun)
    said = []
    records = SimpleNamespace(waits=[], bar=SimpleNamespace(write=said.append))
    progress = Progress({"global_step": 0, "data_step": 0, "images_seen": 0}, 7, 1, 1)

    def wait(agree):
        signal = SimpleNamespace(find_highest=lambda *values: values, agree=agree)
        return dataset.wait_for_images(progress, signal, records)

    def send():
        time.sleep(0.05)
        deliver(begun, finished, 0)
        return 0

    assert wait(send) == ""
    assert said == [f"Waiting for {NAMES[0]} of {begun}"]
    ((begin, end),) = records.waits
    assert 0.05 < end - begin < 5
    assert wait(lambda: pytest.fail("nothing is missing")) == "" and len(records.waits) == 1
    progress.images_seen = 3
    assert wait(lambda: 15) == "" and len(records.waits) == 2
    dataset.parts[0].minutes = 0.0
    assert wait(lambda: 0).startswith(f"no shard has come to {begun} for 0 minutes")
