"""--follow: a latent cache that is still being made, and an order in which a run can begin on it.

An epoch has a place for each row of the source, so its order is known before any shard is there. A
row that could not be used leaves the last place of its shard empty, which counts as an image of
weight 0, as in training on images. The first epoch takes the shards by their numbers. So nothing
depends on when a shard comes, and the finished cache gives the same run.
"""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from diffusion_training.errors.printing import print_once
from diffusion_training.errors.sentences import fail, name_command
from diffusion_training.files import fits, parse_json
from diffusion_training.latents.ranges import Arrangement, Ranges, Window
from diffusion_training.latents.settings import (
    RECORD,
    compare_settings,
    count_places,
    count_skipped,
    fingerprint_cache,
    name_shard,
)
from diffusion_training.latents.shards import Shards
from diffusion_training.remote import read_bytes

POLL = 1.0  # seconds between two looks for what is not there yet
SAY_EVERY = 600.0  # seconds between two lines that the run waits
# what is known of a shard from its record or from a finished cache.json
FOUND = ("rows", "sha256", "checksums")
# entries of cache.json that the end, or another run of the script, may change
CHANGING = ("rows", "encoded_again", "captions_cut", "skipped", "shards", "made_with", "decoder",
            "version")  # fmt: skip


def read_when_there(path: str, minutes: float) -> bytes:
    """`read_bytes`, which waits up to so many minutes until the file is there."""
    begin, has_printed = time.monotonic(), False
    while True:
        try:
            return read_bytes(path)
        except FileNotFoundError:
            folder, _, name = path.rpartition("/")
            if time.monotonic() - begin > 60 * minutes:
                fail(describe_silence(folder, name, minutes))
            if not has_printed:
                print_once(f"Waiting for {name} of {folder}")
                has_printed = True
            time.sleep(POLL)


def describe_silence(folder: str, name: str, minutes: float) -> str:
    """Why a run ends that has waited for its cache."""
    return (
        f"no shard has come to {folder} for {minutes:g} minutes (--follow), and {name} is missing: "
        f"look at the script that makes the cache; when it runs again, {name_command()} continues"
    )


def describe_plan(folder: str, cache: dict[str, Any]) -> dict[str, Any]:
    """A begun or finished cache.json, with what is known from the start in place of counts."""
    source = cache["source"]
    if source["rows"] is None:
        fail(f"--follow: {folder} is made from a stream, whose number of rows is not known yet")
    plan = {"source": source, "rows_per_shard": cache["rows_per_shard"]}
    return {**cache, "rows": source["rows"], "captions_cut": 0, "shards": plan}


class FollowedShards(Shards):
    """The shards of a cache that is being made. One is known when its record is there.

    Until then, its `rows` are its places, and its checksums are blank.
    """

    is_followed = True

    def __init__(self, folder: str, cache: dict[str, Any], minutes: float) -> None:
        """cache: cache.json. minutes: how long to wait for a shard before the run ends."""
        total, per_shard = cache["source"]["rows"], cache["rows_per_shard"]
        rows = count_places(total, per_shard)
        shards = {
            "name": [name_shard(number, cache) for number in range(len(rows))],
            "rows": rows,
            "checksums": ["0" * 32] * len(rows),
            "sha256": ["0" * 64] * len(rows),
        }
        super().__init__(folder, cache | {"shards": shards})
        self.places = self.rows.copy()
        self.settings = {
            name: value
            for name, value in cache.items()
            if name not in CHANGING and not name.endswith("_sha256")
        }
        self.minutes = minutes
        self.found = np.zeros(len(rows), bool)
        self.all_found = False
        self.next_look = 0.0  # when to look again for what was not there
        self.say_at = 0.0  # when to say again that the run waits

    def read(self, name: str) -> Any:
        """Read a JSON file of the cache; None if it is not there."""
        try:
            return parse_json(read_bytes(f"{self.folder}/{name}"))
        except (FileNotFoundError, ValueError):
            return None

    def find(self, number: int) -> bool:
        """Whether a shard is there. Looks at most once a `POLL`."""
        if not self.found[number] and time.monotonic() >= self.next_look:
            record = self.read(f"unfinished/{self.names[number].decode()}.json")
            # one that lacks rows, or has some to be read again, will be made again by the next run
            # of the script
            is_whole = fits(record, RECORD) and (
                record["rows"] + len(record["skipped"]) == self.places[number]
            )
            if is_whole and not count_skipped(record["skipped"])["not_read"]:
                self.take([number], {name: [record[name]] for name in FOUND})
            elif not self.find_end():
                self.next_look = time.monotonic() + POLL
        return bool(self.found[number])

    def find_all(self) -> bool:
        """Whether all shards are there."""
        if not self.all_found and time.monotonic() >= self.next_look:
            self.all_found = bool(self.found.all()) or self.find_end()
            self.next_look = time.monotonic() + POLL
        return self.all_found

    def find_end(self) -> bool:
        """Take all shards from cache.json if the cache is finished."""
        state = self.read("state.json")
        cache = self.read("cache.json") if state else None
        if not cache or state["_fingerprint"] != fingerprint_cache(cache):
            return False  # it is being finished
        names = [name.decode() for name in self.names.tolist()]
        if cache["shards"]["name"] != names or compare_settings(cache, self.settings):
            fail(f"{self.folder} holds another cache than when the run began: begin a new run")
        self.take(range(len(self)), cache["shards"])
        self.all_found = True
        return True

    def take(self, numbers: Any, records: dict[str, list]) -> None:
        """Note what the records of shards say. records: {name: values of the shards}."""
        self.rows[numbers] = records["rows"]
        self.checksums[numbers] = np.array(records["checksums"], "S")
        self.sha256[numbers] = np.array(records["sha256"], "S")
        self.found[numbers] = True  # last, because another thread may look

    def wait_for(self, number: int) -> None:
        """Wait until a shard is there. Ends the program if none comes for too long."""
        begin = time.monotonic()
        name = self.names[number].decode()
        if not self.find(number):
            print_once(f"Waiting for {name} of {self.folder}")
        while not self.find(number):
            if time.monotonic() - begin > 60 * self.minutes:
                fail(describe_silence(self.folder, name, self.minutes), alone=True)
            time.sleep(POLL)

    def open(self, number: int, path: Path | None = None, alone: bool = False) -> Any:
        self.wait_for(number)
        return super().open(number, path, alone)


class FollowedRanges:
    """`Ranges` whose first epoch takes the shards by their numbers, in windows of neighbours."""

    def __init__(
        self,
        shards: FollowedShards,
        seed: int,
        num_ranges: int,
        shuffle_shards: int,
        held_out: list[int],
        reach: Callable[[Any, int, int], None],
    ) -> None:
        """As for `Ranges`. shards: those of the cache."""

        def reach_own(_: Ranges, epoch: int, position: int) -> None:
            reach(self, epoch, position)

        self.cache = shards
        lengths = shards.places
        self.first = Ranges(lengths, seed, 1, shuffle_shards, held_out, reach_own, by_number=True)
        self.later = Ranges(lengths, seed, num_ranges, shuffle_shards, held_out, reach_own)
        self.windows = self.first.cut_windows(0, 0)

    def __len__(self) -> int:
        return len(self.first)

    def __getitem__(self, position: int) -> int:
        return self.first[position]

    def arrange(self, epoch: int) -> Arrangement:
        return (self.later if epoch else self.first).arrange(epoch)

    def plan(
        self, epoch: int, position: int, rank: int, num_processes: int
    ) -> Iterator[Window | None]:
        """As `Ranges.plan`; None, again and again, while a shard of the next window is missing."""
        if epoch == 0:
            for window in self.first.plan(0, position, rank, num_processes):
                if window[0] >= len(self):
                    break
                while not all(map(self.cache.find, window[2])):
                    yield None
                yield window
            epoch, position = 1, 0
        while not self.cache.find_all():
            yield None
        yield from self.later.plan(epoch, position, rank, num_processes)

    def find_missing(self, epoch: int, position: int, count: int) -> str | None:
        """The name of a missing shard that `count` images from a position need; None without."""
        end = position + count
        if epoch or end > len(self):
            if not self.cache.find_all():
                return self.cache.names[int(self.cache.found.argmin())].decode()
            return None
        pieces, bounds, rows = self.windows
        first = np.searchsorted(rows, position, side="right") - 1
        last = np.searchsorted(rows, end, side="left")
        for number in self.first.shards[pieces[bounds[first] : bounds[last]]].tolist():
            if not self.cache.find(number):
                return self.cache.names[number].decode()
        return None


def wait_for_images(ranges: FollowedRanges, progress: Any, stop_signal: Any, records: Any) -> str:
    """Wait until the cache has the images of the next step, on all processes together.

    The time counts as waiting for data. Returns why the run must end: no shard has come for too
    long. Otherwise it returns "", also after a signal.
    """
    cache = ranges.cache
    epoch, position = divmod(progress.images_seen, progress.num_images)
    # two micro-batches are loaded ahead, by a thread which should never wait
    count = progress.images_per_step + 2 * progress.images_per_micro_batch
    begin = since = time.perf_counter()
    name = missing = ranges.find_missing(epoch, position, count)
    reason = ""
    while not reason:
        is_late = time.perf_counter() - since > 60 * cache.minutes
        waits, late = stop_signal.find_highest(missing is not None, is_late)
        if not waits or stop_signal.agree():
            break
        name = missing or name or "a shard for another process"
        if late:
            reason = describe_silence(cache.folder, name, cache.minutes)
        if missing and time.perf_counter() >= cache.say_at:
            cache.say_at = time.perf_counter() + SAY_EVERY
            records.bar.write(f"Waiting for {missing} of {cache.folder}")
        time.sleep(POLL)
        before, missing = missing, ranges.find_missing(epoch, position, count)
        if missing != before:
            since = time.perf_counter()
    if name:
        records.waits.append((begin, time.perf_counter()))
    return reason
