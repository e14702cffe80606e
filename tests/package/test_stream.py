"""Caches of any size: their order, and which shards are opened, fetched and kept."""

import argparse
import hashlib
import json
import math
import threading
import time
from dataclasses import fields
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import xxhash
from conftest import wait_until
from fsspec.implementations.memory import MemoryFileSystem
from test_cache import make_cache

from diffusion_training import remote
from diffusion_training.arguments import size
from diffusion_training.data.captioned_data import Data
from diffusion_training.latents import fetch, reader, source, stream
from diffusion_training.latents.reader import CachedLatents, load_cache
from diffusion_training.order import Order, step_batches
from diffusion_training.training.progress import Progress

NUM_ROWS = 6  # of `make_cache`, in shards of 3, 2 and 1


@pytest.fixture
def cache(tmp_path):
    make_cache(tmp_path / "cache")
    return tmp_path / "cache"


@pytest.fixture
def address(cache):
    """The cache at an address in memory, without a server or fsspec's thread."""
    MemoryFileSystem.store.clear()
    for path in cache.iterdir():
        if path.is_file():
            MemoryFileSystem().pipe(f"/bucket/cache/{path.name}", path.read_bytes())
    return "memory://bucket/cache"


@pytest.fixture(autouse=True)
def few_threads(monkeypatch):
    monkeypatch.setattr(fetch, "THREADS", 2)
    monkeypatch.setattr(remote, "WAITS", (0.01, 0.01))


def accelerator(rank=0, num_processes=1):
    printed = []
    return SimpleNamespace(
        process_index=rank,
        num_processes=num_processes,
        local_process_index=rank,
        print=printed.append,
        printed=printed,
    )


def open_caches(*folders, state=None, processes=(0, 1), follow=None, **flags):
    """The data set that `open_stored` opens. `state`: a checkpoint's settings."""
    flags = {"shards_dir": None, "shards_size": 10**11, "shuffle_shards": 1} | flags
    storage = stream.Storage(flags["shards_dir"], flags["shards_size"], flags["shuffle_shards"])
    rank, num_processes = processes
    launch = SimpleNamespace(
        accelerator=accelerator(rank, num_processes), rank=rank, num_processes=num_processes
    )
    caches = {folder: load_cache(folder, follow=follow) for folder in folders}
    checkpoint, order = (None, None) if state is None else ("checkpoint-2", state.get("order"))
    most = source.MOST_PERMUTED
    return stream.open_stored(launch, caches, (0, False), storage, None, checkpoint, order, most)


def list_settings(dataset):
    """What a checkpoint records of a data set."""
    return Data(
        **dict.fromkeys(field.name for field in fields(Data)) | {"dataset": dataset}
    ).settings()


def use_ranges(monkeypatch, ranges=2):
    monkeypatch.setattr(source, "MOST_PERMUTED", 0)
    monkeypatch.setattr(stream, "LEAST_RANGES", ranges)


def read(dataset, rows):
    return dataset[[(0, row, 1.0) for row in rows]]["latents"]


def take_epochs(dataset, rows, epochs=2):
    """All rows of some epochs as a run takes them, one per step."""
    progress = Progress({"global_step": 0, "data_step": 0, "images_seen": 0}, len(rows), 1, 1)
    batches = step_batches(Order(rows, 0), progress, 0, 1)
    for _ in range(epochs * len(rows)):
        keys = next(batches)
        yield keys[0][1], dataset[keys]


# ------------------------------------------------------------------- the order of rows


def test_small_caches_are_permuted_and_large_ones_ordered_in_ranges(cache, monkeypatch):
    dataset = open_caches(cache)
    assert dataset.order is None and "order" not in list_settings(dataset)
    monkeypatch.setattr(source, "MOST_PERMUTED", NUM_ROWS - 1)
    dataset = open_caches(cache, processes=(0, 3))
    kept = {
        "kind": "ranges",
        "num_ranges": 66,
        "shuffle_shards": 1,
        "rows": 6,
        "shards": dataset.order["shards"],
    }
    assert dataset.order == list_settings(dataset)["order"] == kept
    settings = list_settings(open_caches(cache, state={"order": kept}, shuffle_shards=7))
    # the checkpoint's order wins over flags and processes
    assert settings["order"] == kept and settings["shuffle_shards"] == 1
    monkeypatch.setattr(source, "MOST_PERMUTED", NUM_ROWS)
    assert open_caches(cache, state={"order": kept}).order == kept
    monkeypatch.setattr(source, "MOST_PERMUTED", 0)
    # a checkpoint from before the order `ranges`
    assert open_caches(cache, state={}).order is None


def test_only_large_remote_or_followed_caches_are_read_by_the_code_for_them(
    cache, address, tmp_path, monkeypatch
):
    """Other runs don't import it. A checkpoint keeps its order, whatever the size."""
    flags = {"shards_dir": str(tmp_path / "dir"), "shards_size": 10**9, "shuffle_shards": 1}
    args = argparse.Namespace(**flags, latents_weights=None)
    launch = SimpleNamespace(accelerator=accelerator(), rank=0, num_processes=1)

    def open_one(folder, checkpoint=None, order=None, follow=None):
        caches = {str(folder): load_cache(folder, follow=follow)}
        opened = source.open_latents(launch, caches, (0, False), checkpoint, order, args)
        assert "shards" not in caches[str(folder)].settings
        return opened

    known = open_one(cache)
    assert type(known) is CachedLatents
    assert type(open_one(cache, follow=1.0)) is stream.StoredLatents
    assert type(open_one(address)) is stream.StoredLatents
    monkeypatch.setattr(source, "MOST_PERMUTED", NUM_ROWS - 1)
    use_ranges(monkeypatch)
    large = open_one(cache)
    assert large.order["kind"] == "ranges"
    assert open_one(cache, "checkpoint-2", large.order).order == large.order
    assert type(open_one(cache, "checkpoint-2")) is CachedLatents
    assert torch.equal(read(known, range(6)), read(large, range(6)))


def test_changed_shards_are_refused_in_the_middle_of_an_epoch(cache, monkeypatch):
    use_ranges(monkeypatch)
    kept = open_caches(cache).order
    changed = {"order": {**kept, "shards": "0" * 16}}
    with pytest.raises(
        SystemExit, match="the shards of the caches have changed since .* was saved: restore them"
    ):
        open_caches(cache, state=changed)
    changed["order"]["rows"] += 1  # then `read_state` begins the epoch again
    assert open_caches(cache, state=changed).order == kept


def test_a_too_small_shards_size_is_refused_with_the_needed_size(tmp_path, address):
    flags = {"shards_dir": tmp_path / "shards"}
    assert open_caches(address, **flags).order is None  # all of it fits
    total = sum(
        MemoryFileSystem().size(path) for path in MemoryFileSystem().glob("/bucket/cache/*.arrow")
    )
    with pytest.raises(SystemExit) as stop:
        open_caches(address, **flags, shards_size=total // 2)
    said = str(stop.value)
    assert "is too small for 64 ranges with windows of 1 shards: give --shards_size" in said
    needed = size(1, 10**18)(said.split("give --shards_size ")[1].split(",")[0])
    assert open_caches(address, **flags, shards_size=needed).order is None
    with pytest.raises(
        SystemExit, match="to resume .*, --shards_size must be at least .*, so that all shards fit"
    ):
        open_caches(address, **flags, shards_size=total // 2, state={})


# ------------------------------------------------------------------- open shards


def test_shards_are_opened_on_demand_and_damage_is_found_then(cache, monkeypatch):
    monkeypatch.setattr(reader, "FEW_SHARDS", 2)
    (cache / "data-00002-of-00003.arrow").write_bytes(b"0" * 1000)
    dataset = CachedLatents({cache: load_cache(cache)}, 0, False)
    assert not dataset.opened
    assert len(read(dataset, [0, 4])) == 2 and set(dataset.opened) == {0, 1}
    with pytest.raises(SystemExit, match="data-00002-of-00003.arrow is damaged") as stop:
        read(dataset, [5])
    assert stop.value.alone


def test_a_damaged_local_copy_is_named_and_fetched_again_once_deleted(tmp_path, address):
    expected = read(open_caches(address, shards_dir=tmp_path), range(6))
    (copy,) = tmp_path.glob("whole-*/0-*.arrow")
    whole = copy.read_bytes()
    numbers = expected[0].numpy().tobytes()
    copy.write_bytes(whole.replace(numbers, bytes(len(numbers))))
    with pytest.raises(OSError, match=f"{copy} is damaged: delete it to fetch it again"):
        read(open_caches(address, shards_dir=tmp_path), range(6))
    copy.write_bytes(whole[:-500])
    with pytest.raises(SystemExit, match="is damaged .*: delete it to fetch it again"):
        read(open_caches(address, shards_dir=tmp_path), range(6))
    copy.unlink()
    assert torch.equal(read(open_caches(address, shards_dir=tmp_path), range(6)), expected)


def test_open_shards_are_limited_by_most_open(cache, monkeypatch):
    expected = read(CachedLatents({cache: load_cache(cache)}, 0, False), range(6))
    monkeypatch.setattr(reader, "MOST_OPEN", 1)
    dataset = CachedLatents({cache: load_cache(cache)}, 0, False)
    for row in (0, 5, 3, 1, 4, 2):
        assert torch.equal(read(dataset, [row])[0], expected[row]) and len(dataset.opened) == 1


@pytest.mark.parametrize("where", ["disk", "address"])
def test_with_ranges_a_shard_is_open_only_during_its_window(
    tmp_path, cache, address, monkeypatch, where
):
    use_ranges(monkeypatch)
    expected = read(CachedLatents({cache: load_cache(cache)}, 0, False), range(6))
    folder = cache if where == "disk" else address
    dataset = open_caches(folder, shards_dir=tmp_path / "shards")
    rows, held_out = dataset.hold_out(accelerator(), 0, 0)
    assert len(rows) == 6 and not held_out
    for row, batch in take_epochs(dataset, rows):
        assert torch.equal(batch["latents"][0], expected[row])
        held = dataset.fetcher.held
        assert {*dataset.opened} <= {shard for shard in held if held[shard] > 0} | {
            *dataset.fetcher.files
        }
        assert len(dataset.opened) <= 3


def test_with_ranges_held_out_rows_come_from_shards_of_lowest_hash(
    tmp_path, cache, address, monkeypatch
):
    use_ranges(monkeypatch)
    found = {}
    for folder in (cache, address):
        dataset = open_caches(folder, shards_dir=tmp_path / "shards", shards_size=10**9)
        fake = accelerator()
        rows, found[folder] = dataset.hold_out(fake, 2, 7)
        assert fake.printed == ["Held out: 2 of 6 images"] and len(rows) == 4
        opened = {*dataset.opened}
        trained = {row for row, _ in take_epochs(dataset, rows)}
        assert trained == set(range(6)) - found[folder].keys()
        assert opened <= {*dataset.opened}  # they stay
        hashes = [
            xxhash.xxh3_64_intdigest(f"7 data-0000{i}-of-00003.arrow".encode()) for i in range(3)
        ]
        assert opened <= {*np.argsort(hashes)[:2].tolist()}
    assert found[cache] == found[address]
    monkeypatch.setattr(dataset, "most_bytes", 10)
    with pytest.raises(
        SystemExit, match=r"2 ranges with windows of 1 shards and \d shards of --holdout: give"
    ):
        dataset.hold_out(accelerator(), 1, 7)
    for count in (6, 1e-9):
        with pytest.raises(SystemExit, match="images aside: choose another share or number"):
            dataset.hold_out(accelerator(), count, 7)


# ------------------------------------------------------------------- fetched shards


class Bucket:
    """Shards of 100 bytes at an address, and a fetcher of them."""

    def __init__(self, folder, count, most):
        MemoryFileSystem.store.clear()
        folder.mkdir()
        self.data = [bytes([i]) * 100 for i in range(count)]
        for i, data in enumerate(self.data):
            MemoryFileSystem().pipe(f"/bucket/{i}", data)
        digests = [hashlib.sha256(data).hexdigest() for data in self.data]
        describe = lambda shard: (f"memory://bucket/{shard}", digests[shard], 100)
        self.fetcher, self.folder = fetch.Fetcher(describe, folder, most), folder

    def here(self):
        return {int(path.name.split("-")[0]) for path in self.folder.glob("[0-9]*.arrow")}


def test_shards_are_fetched_ahead_within_shards_size_and_then_deleted(tmp_path):
    bucket = Bucket(tmp_path / "shards", 12, 400)  # four shards to the byte
    fetcher = bucket.fetcher
    fetcher.follow(iter([(2 * i, 2 * i + 4, (i,)) for i in range(10)]))
    assert fetcher.reach(0) == set()
    wait_until(lambda: bucket.here() == {0, 1, 2, 3})
    assert fetcher.path(0).read_bytes() == bucket.data[0]
    assert fetcher.path(11).read_bytes() == bucket.data[11]  # in no window
    assert fetcher.reach(3) == {11}
    assert fetcher.reach(4) == {0}
    wait_until(lambda: bucket.here() == {1, 2, 3, 4})
    assert fetcher.reach(40) == {1, 2, 3, 4}
    assert fetcher.path(9).read_bytes() == bucket.data[9]
    assert bucket.here() == {2, 3, 4, 9}  # passed shards stay while there is room


def test_fetcher_prefers_needed_shards_and_skips_passed_ones(tmp_path, monkeypatch):
    bucket, gate, order = Bucket(tmp_path / "shards", 8, 10**6), threading.Event(), []
    whole = fetch.persist

    def wait(address, copy):
        order.append(int(address[-1]))
        gate.wait(10)
        return whole(address, copy)

    monkeypatch.setattr(fetch, "persist", wait)
    bucket.fetcher.follow(iter([(i, i + 1, (i,)) for i in range(6)]))
    bucket.fetcher.reach(0)
    wait_until(lambda: len(order) == 2)  # two threads; the others wait
    needed = bucket.fetcher.request(7, now=True)
    assert bucket.fetcher.reach(4) == {0, 1, 2, 3, 7}
    gate.set()
    assert bucket.fetcher.path(5).read_bytes() == bucket.data[5]
    wait_until(lambda: bucket.here() == {4, 5})  # 0 and 1, which were being fetched, are deleted
    assert order[2:] in ([5, 4], [4, 5]) and not needed.done()


def test_a_step_with_many_shards_on_the_disk_takes_less_than_a_millisecond(tmp_path):
    """Whether they are for later windows, or their windows have passed."""
    for wanted in (0, 5000):
        fetcher = fetch.Fetcher(lambda shard: ("", "", 1), None, math.inf)
        fetcher.follow(iter([(i, i + 1, (2 * i, 2 * i + 1)) for i in range(5000)]))
        fetcher.reach(0)
        for _, future in fetcher.jobs:
            future.set_result(tmp_path / "none")
        fetcher.reach(5000 - wanted)
        assert len(fetcher.files) == 10_000 and len(fetcher.passed) == 10_000 - 2 * wanted
        begin = time.process_time()
        for position in range(100):
            fetcher.reach(5000 - wanted + position)
        assert time.process_time() - begin < 0.1


def test_make_fetch_folder_deletes_only_folders_of_killed_runs(tmp_path):
    dead, gone = "run-0123456789ab", "run-ba9876543210"
    (tmp_path / dead).mkdir()
    (tmp_path / dead / "0.arrow").write_bytes(b"0")
    for name in (f"{dead}.lock", f"{dead}.lock.lock", f"{gone}.lock"):
        (tmp_path / name).touch()
    own = {"photos", "run-3", "run-3.old", "run-2026-11-24"}  # the user's
    for name in own:
        (tmp_path / name).mkdir()
    mine = fetch.make_fetch_folder(tmp_path)
    other = fetch.make_fetch_folder(tmp_path)
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {mine.name, f"{mine.name}.lock", other.name, f"{other.name}.lock", *own}


def test_a_fetch_folder_is_locked_during_the_run_and_deleted_at_its_end(tmp_path, monkeypatch):
    leave = []
    monkeypatch.setattr(fetch.atexit, "register", leave.append)
    mine = fetch.make_fetch_folder(tmp_path / "not/yet")
    (mine / "0.arrow").write_bytes(b"0")
    with pytest.raises(fetch.Timeout), fetch.FileLock(f"{mine}.lock", timeout=0):
        pass
    leave[0]()
    assert not list((tmp_path / "not/yet").iterdir())
    with fetch.FileLock(f"{mine}.lock", timeout=0):
        pass


def test_fetcher_replaces_its_plan_by_a_new_one(tmp_path):
    bucket = Bucket(tmp_path / "shards", 6, 10**6)
    bucket.fetcher.follow(iter([(0, 9, (0, 1)), (0, 9, (2,))]))
    bucket.fetcher.reach(0)
    wait_until(lambda: bucket.here() == {0, 1, 2})
    bucket.fetcher.follow(iter([(0, 9, (1, 3))]))
    assert {0, 2} <= bucket.fetcher.reach(0)
    wait_until(lambda: bucket.here() == {0, 1, 2, 3})
    bucket.fetcher.follow(iter([(0, 4, (4,)), (2, 6, (5,))]))  # one of them has passed
    bucket.fetcher.reach(4)
    assert 5 in bucket.fetcher.files and 4 not in bucket.fetcher.files


def test_a_failed_fetch_of_a_passed_shard_ends_no_thread(tmp_path, monkeypatch):
    others = {*threading.enumerate()}
    bucket, gate, begun = Bucket(tmp_path / "shards", 4, 10**6), threading.Event(), []
    # daemon threads: others would keep the process alive
    assert [thread.daemon for thread in {*threading.enumerate()} - others] == [True] * 2
    whole = fetch.persist

    def fail(address, copy):
        begun.append(address)
        gate.wait(10)
        raise SystemExit("it stays away")

    monkeypatch.setattr(fetch, "persist", fail)
    failed = [bucket.fetcher.request(shard) for shard in (0, 1)]  # one per thread
    wait_until(lambda: len(begun) == 2)
    assert bucket.fetcher.reach(0) == {0, 1}
    gate.set()
    for future in failed:
        with pytest.raises(SystemExit, match="it stays away"):
            future.result(10)
    monkeypatch.setattr(fetch, "persist", whole)
    assert bucket.fetcher.request(2).result(10).read_bytes() == bucket.data[2]


def test_processes_on_one_machine_share_shards_size(tmp_path, address, monkeypatch):
    use_ranges(monkeypatch)

    def needs(num_processes):
        with pytest.raises(SystemExit) as stop:
            open_caches(address, shards_dir=tmp_path, shards_size=10, processes=(0, num_processes))
        return size(1, 10**18)(str(stop.value).split("give --shards_size ")[1].split(",")[0])

    alone = needs(1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert needs(2) == pytest.approx(2 * alone, rel=0.02)
    dataset = open_caches(address, shards_dir=tmp_path, processes=(0, 2))
    assert dataset.fetcher.max_bytes == 10**11 / 2


def test_a_cache_that_fits_is_fetched_whole_in_advance(tmp_path, address):
    dataset = open_caches(address, shards_dir=tmp_path)
    wait_until(lambda: len(list(tmp_path.glob("whole-*/*.arrow"))) == 3)
    assert not dataset.opened
    largest = MemoryFileSystem().size("/bucket/cache/data-00000-of-00003.arrow")
    assert stream.estimate_row_bytes(dataset.parts[0]) == pytest.approx(1.05 * largest / 3)


def test_a_remade_cache_replaces_the_fetched_copies(tmp_path, address, cache):
    open_caches(address, shards_dir=tmp_path / "shards")
    here = lambda: {path.name for path in (tmp_path / "shards").glob("whole-*/*.arrow")}
    wait_until(lambda: len(here()) == 3)
    before = here()
    make_cache(tmp_path / "other", seed=1)
    for path in (tmp_path / "other").glob("*.*"):
        MemoryFileSystem().pipe(f"/bucket/cache/{path.name}", path.read_bytes())
    open_caches(address, shards_dir=tmp_path / "shards")
    wait_until(lambda: len(here()) == 3 and not here() & before)


def test_with_ranges_shards_that_all_fit_are_fetched_once(tmp_path, address, monkeypatch):
    use_ranges(monkeypatch)
    got, get_file = [], MemoryFileSystem.get_file
    monkeypatch.setattr(
        MemoryFileSystem, "get_file", lambda fs, *args: got.append(args[0]) or get_file(fs, *args)
    )
    dataset = open_caches(address, shards_dir=tmp_path)
    rows, _ = dataset.hold_out(accelerator(), 0, 0)
    assert len(list(take_epochs(dataset, rows, 3))) == 3 * NUM_ROWS
    assert len(got) == len({*got}) == 3


def test_a_shards_dir_that_is_not_writable_is_named(tmp_path, address, monkeypatch):
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit, match="--shards_dir .*file can't be written to"):
        open_caches(address, shards_dir=tmp_path / "file")
    monkeypatch.setattr(remote, "WAITS", (10**9,))  # a full disk is not retried

    def full(fs, source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(MemoryFileSystem, "get_file", full)
    dataset = open_caches(address, shards_dir=tmp_path)
    with pytest.raises(SystemExit, match="--shards_dir .* can't be written to .*No space left"):
        read(dataset, [0])


def test_a_shard_with_a_wrong_hash_leaves_no_partial_file(tmp_path):
    bucket = Bucket(tmp_path / "shards", 1, 10**6)
    MemoryFileSystem().pipe("/bucket/0", b"other bytes")
    with pytest.raises(SystemExit, match="can't be read .its SHA-256 is not the one in cache.json"):
        bucket.fetcher.path(0)
    assert {path.name for path in bucket.folder.iterdir()} <= {".0.lock"}


@pytest.mark.parametrize("is_gone", [False, True])
def test_a_cache_that_was_replaced_ends_the_run_at_once(tmp_path, monkeypatch, is_gone):
    """With a sentence of its own: the same command would not continue with another cache."""
    monkeypatch.setattr(remote, "WAITS", (600,))
    bucket = Bucket(tmp_path / "shards", 2, 10**6)
    if is_gone:
        MemoryFileSystem().rm("/bucket/0")
    else:
        MemoryFileSystem().pipe("/bucket/0", b"other bytes")
    manifest = {"shards": {"sha256": [hashlib.sha256(b"other bytes").hexdigest()]}}
    MemoryFileSystem().pipe("/bucket/cache.json", json.dumps(manifest).encode())
    with pytest.raises(SystemExit, match="memory://.*bucket holds another cache than when the run"):
        bucket.fetcher.path(0)


def test_shard_sizes_are_estimated_if_the_server_gives_none(address, monkeypatch, tmp_path):
    known, info = open_caches(address, shards_dir=tmp_path / "a"), MemoryFileSystem.info
    monkeypatch.setattr(
        MemoryFileSystem, "info", lambda *args, **options: {**info(*args, **options), "size": None}
    )
    assert stream.estimate_row_bytes(known.parts[0]) > 0
    assert len(open_caches(address, shards_dir=tmp_path / "b")) == NUM_ROWS


def test_shards_size_must_hold_two_windows_per_range_and_held_out_shards(monkeypatch):
    dataset = stream.StoredLatents.__new__(stream.StoredLatents)
    dataset.order = {"num_ranges": 4, "shuffle_shards": 3}
    dataset.num_processes, dataset.bytes_of = 2, np.full(99, 1000)
    for most, stay in ((12_000, ()), (14_000, (0, 1))):  # 2 ranges, 2 windows of 3 shards each
        dataset.most_bytes = most
        dataset.check_size(stay)
        dataset.most_bytes -= 1
        with pytest.raises(
            SystemExit,
            match=f"for 2 ranges with windows of 3 shards.*: give --shards_size {most / 990:.1f}",
        ):
            dataset.check_size(stay)


def test_with_ranges_holdout_may_be_a_share(cache, monkeypatch):
    use_ranges(monkeypatch)
    assert len(open_caches(cache).hold_out(accelerator(), 0.3, 7)[1]) == 2
