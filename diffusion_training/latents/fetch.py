"""Fetch shards from an address ahead of use, into a folder of limited size, and verify them."""

import atexit
import collections
import contextlib
import errno
import heapq
import json
import math
import re
import shutil
import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path

from filelock import FileLock, Timeout
from fsspec import AbstractFileSystem

from diffusion_training.errors.sentences import explained, fail
from diffusion_training.files import digest_file, name_unfinished
from diffusion_training.latents.ranges import Window
from diffusion_training.remote import persist

# shard -> (address, SHA-256, approximate bytes)
Describe = Callable[[int], tuple[str, str, int]]
# a disk that is full, over its quota or read-only: trying again does not help
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
THREADS = 8  # per process, each with its own connection


class Fetcher:
    """Copies of shards on this machine: those of open windows, and others up to `max_bytes`.

    The others are for later windows or, while there is room, left from windows that have passed.

    `describe(shard)` returns (address, SHA-256, approximate bytes), with 0 bytes for a shard on a
    disk. A shard that is requested but in no window is fetched too. If a shard can't be
    fetched, or its bytes are wrong, it is tried again for about a minute. After that, the program
    ends with an error when the shard is requested.
    """

    def __init__(self, describe: Describe, folder: Path | None, max_bytes: float) -> None:
        self.describe = describe
        self.folder = folder or Path()
        self.max_bytes = max_bytes
        self.jobs = collections.deque()
        self.files = {}  # the Future of each shard's path
        self.bytes = {}  # of each shard
        self.total = 0  # bytes
        self.held = collections.Counter()
        self.loose: set[int] = set()  # shards that were requested outside of a window
        # bytes of the shards in no window, in the order of their last use; all are here
        self.passed: collections.OrderedDict[int, int] = collections.OrderedDict()
        self.passed_total = 0  # bytes
        self.windows = []  # a heap of (end, shards)
        self.plan: Iterator[Window | None] = iter(())
        self.next: Window | None = None
        self.changed = threading.Condition()
        for _ in range(THREADS if folder else 0):
            # daemons, so that the program can end without waiting for the network
            threading.Thread(target=self.work, daemon=True).start()

    def work(self) -> None:
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.jobs)
                shard, future = self.jobs.popleft()
            try:
                path = self.fetch(shard)
            except BaseException as error:
                future.set_exception(error)
                continue
            with self.changed:
                if self.files.get(shard) is future:
                    self.set_bytes(shard, path.stat().st_size)
                elif shard not in self.files:  # its window has passed meanwhile
                    path.unlink()
            future.set_result(path)

    def name(self, shard: int) -> str:
        """The file name of a shard's copy, which depends on its bytes."""
        return f"{shard}-{self.describe(shard)[1][:16]}.arrow"

    def fetch(self, shard: int) -> Path:
        """Copy a shard, completely or not at all, unless another process here has copied it."""
        address, digest, _ = self.describe(shard)
        path = self.folder / self.name(shard)

        def copy(fs: AbstractFileSystem, location: str) -> None:
            unfinished = name_unfinished(path)
            try:
                fs.get_file(location, str(unfinished))
                if digest_file(unfinished) != digest:
                    raise ValueError("its SHA-256 is not the one in cache.json")
                unfinished.replace(path)
            except OSError as error:
                if error.errno in DISK_ERRORS or error.filename == str(unfinished):
                    fail(f"--shards_dir {self.folder} can't be written to ({error})", alone=True)
                check_not_replaced(fs, location, digest)
                raise
            except ValueError:
                check_not_replaced(fs, location, digest)
                raise
            finally:
                unfinished.unlink(missing_ok=True)

        with explained(f"--shards_dir {self.folder} can't be written to", alone=True):
            with FileLock(self.folder / f".{shard}.lock"):
                if not path.exists():
                    persist(address, copy)
        return path

    def request(self, shard: int, now: bool = False) -> Future:
        """Request a shard. Returns a Future of its path.

        `now`: fetch it before all shards that are fetched ahead.
        """
        with self.changed:
            if shard not in self.files:
                _, _, size = self.describe(shard)
                self.make_room(size)
                self.set_bytes(shard, size)
                self.loose.add(shard)
                self.files[shard] = Future()
                self.jobs.append((shard, self.files[shard]))
                self.changed.notify()
            job = shard, self.files[shard]
            if now and job in self.jobs:
                self.jobs.remove(job)
                self.jobs.appendleft(job)
            return self.files[shard]

    def path(self, shard: int) -> Path:
        """Wait for a shard's copy, and return its path."""
        return self.request(shard, now=True).result()

    def follow(self, plan: Iterator[Window | None]) -> None:
        """Replace the windows with those of a `Ranges.plan`.

        None: the next window can't be fetched yet.
        """
        self.pass_windows(math.inf)
        self.plan = plan
        self.next = None

    def reach(self, position: int) -> set[int]:
        """Fetch ahead. To make room, delete copies that no window after `position` needs.

        Returns the shards that are no longer needed. Copies of some may be kept.

        This runs in every step, so its time must not grow with the number of copies.
        """
        self.pass_windows(position)
        with self.changed:
            loose, self.loose = self.loose, set()
        gone = {shard for shard in loose if self.held[shard] <= 0}
        for shard in sorted(gone & self.files.keys()):
            future = self.files[shard]
            if future.done() and not future.exception():
                self.passed[shard] = self.bytes[shard]
                self.passed_total += self.bytes[shard]
            else:
                self.forget(shard)
        self.make_room(0)
        while window := self.next or next(self.plan, None):
            self.next = window
            begin, end, shards = window
            sizes = {  # of the shards to fetch; those on a disk have 0
                shard: size
                for shard in shards
                if shard not in self.files and (size := self.describe(shard)[2])
            }
            needed = sum(sizes.values())
            kept = self.passed_total - sum(self.passed.get(shard, 0) for shard in {*shards})
            total = self.total - kept + needed
            is_new = bool(sizes) or not self.passed.keys().isdisjoint(shards)
            if begin > position and (not is_new or total > self.max_bytes):
                break
            self.next = None
            if end > position:
                heapq.heappush(self.windows, (end, shards))
                self.held.update(shards)
                for shard in shards:
                    self.passed_total -= self.passed.pop(shard, 0)
                for shard in sizes:
                    self.request(shard)
        return gone

    def pass_windows(self, position: float) -> None:
        """Remove the windows that end at `position` or before."""
        while self.windows and self.windows[0][0] <= position:
            _, shards = heapq.heappop(self.windows)
            self.held.subtract(shards)
            with self.changed:
                self.loose.update(shards)

    def make_room(self, needed: int) -> None:
        """Delete copies that no window needs, the oldest first, until `needed` bytes fit."""
        while self.passed and self.total + needed > self.max_bytes:
            self.forget(next(iter(self.passed)))

    def set_bytes(self, shard: int, size: int) -> None:
        self.total += size - self.bytes.get(shard, 0)
        self.bytes[shard] = size

    def forget(self, shard: int) -> None:
        """Delete the copy of a shard, or cancel its request if it is not here yet."""
        with self.changed:
            future = self.files.pop(shard)
            self.total -= self.bytes.pop(shard)
            self.passed_total -= self.passed.pop(shard, 0)
            self.held.pop(shard, None)
            if (shard, future) in self.jobs:
                self.jobs.remove((shard, future))
            elif future.done() and not future.exception():
                future.result().unlink(missing_ok=True)


def check_not_replaced(fs: AbstractFileSystem, location: str, digest: str) -> None:
    """End the program if the cache at an address no longer has a shard with this SHA-256."""
    folder = location.rpartition("/")[0]
    try:
        shards = json.loads(fs.cat_file(f"{folder}/cache.json"))["shards"]
    except Exception:  # the address may fail for all files
        return
    if digest not in shards["sha256"]:
        fail(
            f"{fs.unstrip_protocol(folder)} holds another cache than when the run began: put the "
            "old one back to resume, or begin a new run",
            alone=True,
        )


def make_fetch_folder(folder: Path) -> Path:
    """Make a folder in `folder` for this process's copies; delete those of killed processes.

    Other folders, such as run-3 of the user, stay.
    """
    folder.mkdir(parents=True, exist_ok=True)
    names = {path.name.partition(".")[0] for path in folder.glob("run-*")}
    for old in filter(re.compile("run-[0-9a-f]{12}").fullmatch, names):
        with contextlib.suppress(Timeout, OSError), FileLock(folder / f"{old}.lock", timeout=0):
            shutil.rmtree(folder / old, ignore_errors=True)
            for lock_file in folder.glob(f"{old}.lock*"):
                lock_file.unlink()
    run_folder = folder / f"run-{uuid.uuid4().hex[:12]}"
    # locked before the folder exists, or another process would delete it as abandoned
    lock = FileLock(f"{run_folder}.lock")
    lock.acquire()
    run_folder.mkdir()

    def leave() -> None:
        shutil.rmtree(run_folder, ignore_errors=True)
        lock.release()
        Path(f"{run_folder}.lock").unlink(missing_ok=True)

    atexit.register(leave)
    return run_folder
