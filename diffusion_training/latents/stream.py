"""Latent caches of any size, on a disk or at an address: their order and fetched shards."""

import hashlib
import json
import math
import os
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
from accelerate import Accelerator
from tqdm.auto import tqdm

from diffusion_training.arguments import is_address
from diffusion_training.errors.sentences import explained, fail
from diffusion_training.latents.fetch import Fetcher, make_fetch_folder
from diffusion_training.latents.ranges import Ranges
from diffusion_training.latents.reader import Cache, CachedLatents
from diffusion_training.latents.shards import FOLLOWED, OpenShard, Shards
from diffusion_training.launch import Launch
from diffusion_training.order import hash_names
from diffusion_training.remote import persist

LEAST_RANGES = 64  # so that neighbours come from shards far apart, even with one process


@dataclass(frozen=True)
class Storage:
    """The flags that decide where fetched shards are kept, and how they are shuffled."""

    folder: Any  # --shards_dir; None if no cache is at an address
    size: int  # --shards_size, bytes
    shuffle_shards: int


def open_stored(
    launch: Launch,
    caches: dict[str, Cache],
    options: tuple[Any, ...],
    storage: Storage,
    latents_weights: list[float] | None,
    checkpoint: Path | None,
    kept_order: dict[str, Any] | None,
    most_permuted: int,
) -> "StoredLatents":
    """Open the data set, choose the order of its rows, and fetch shards that are at an address.

    The order is `full`, a permutation, if there are at most `most_permuted` rows, on a disk or
    within --shards_size. Otherwise it is that of `Ranges`, or of `FollowedRanges` with --follow.

    options: those of `CachedLatents`. kept_order: the order of the checkpoint, which is always
    kept; None for `full`.
    """
    dataset = StoredLatents(caches, *options, rank=launch.rank, num_processes=launch.num_processes)
    total = int(dataset.bytes_of.sum())
    fits = len(dataset) <= most_permuted and total <= storage.size and not dataset.is_followed
    if not kept_order and (checkpoint or fits):
        if total > storage.size:
            fail(
                f"to resume {checkpoint}, --shards_size must be at least {format_size(total)}, "
                "so that all shards fit"
            )
        if total:
            dataset.fetch_all(storage, launch.accelerator.local_process_index)
        return dataset
    reasons = {
        "--latents_weights": latents_weights,
        "images of several sizes": dataset.size_columns,
    }
    for reason, is_given in reasons.items():
        if is_given:
            limit = (
                f"with at most {most_permuted:,} rows, and with --shards_size {format_size(total)} "
                "or more"
            )
            fail(f"{reason} can only be used {'without --follow' * dataset.is_followed or limit}")
    order = choose_ranges(dataset, kept_order, checkpoint, storage.shuffle_shards)
    dataset.fetch_by_ranges(storage, order)
    return dataset


def choose_ranges(
    dataset: "StoredLatents",
    kept_order: dict[str, Any] | None,
    checkpoint: Path | None,
    shuffle_shards: int,
) -> dict[str, Any]:
    """Return the settings of the order `ranges`, with the values of `kept_order`.

    Stops with an error if the caches have the same number of rows as before in other shards.
    """
    shards = hashlib.sha256(dataset.lengths.tobytes()).hexdigest()[:16]
    if kept_order and kept_order["rows"] == len(dataset) and kept_order["shards"] != shards:
        fail(
            f"the shards of the caches have changed since {checkpoint} was saved: restore them to "
            "resume"
        )
    num_ranges = dataset.num_processes * math.ceil(LEAST_RANGES / dataset.num_processes)
    kind = FOLLOWED if dataset.is_followed else "ranges"
    order = {"kind": kind, "num_ranges": num_ranges, "shuffle_shards": shuffle_shards}
    return order | (kept_order or {}) | {"rows": len(dataset), "shards": shards}


def count_local() -> int:
    """Return how many processes run on this machine and share its disk."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def format_size(size: float) -> str:
    """Format a number of bytes, rounded up, as a value of --shards_size."""
    return tqdm.format_sizeof(size * 1.01, divisor=1000) + "B"


def estimate_row_bytes(shards: Shards) -> float:
    """Estimate how many bytes of a shard each row takes; 0 for a cache on a disk."""
    if not is_address(shards.folder):
        return 0.0
    number = int(shards.places.argmax())
    shards.wait_for(number)
    size = persist(
        shards.locate(number), lambda fs, path: fs.info(path)["size"] or len(fs.cat_file(path))
    )
    return 1.05 * size / int(shards.rows[number])  # captions differ in length


class StoredLatents(CachedLatents):
    """`CachedLatents` whose shards may be at an address.

    With the order `ranges`, its windows decide which shards are fetched and dropped.
    """

    fetcher: Fetcher
    order: Any = None  # see `choose_ranges`; None: `full`
    following: Any = None  # the `Ranges` whose windows are fetched
    # with --follow: waits for the next step's images, see `wait_for_images`
    wait_for_images: Callable[[Any, Any, Any], str] | None = None

    def __init__(
        self, caches: dict[str, Cache], *options: Any, rank: int = 0, num_processes: int = 1
    ) -> None:
        """options: see `CachedLatents`. rank, num_processes: of the launch."""
        super().__init__(caches, *options)
        self.rank = rank
        self.num_processes = num_processes
        bytes_of_a_row = [estimate_row_bytes(shards) for shards in self.parts]
        self.is_followed = self.parts[0].is_followed
        # about how many bytes each fetched shard takes here; 0 if it is on a disk
        self.bytes_of = self.lengths * np.repeat(bytes_of_a_row, np.diff(self.firsts))

    def find_copy(self, shard: int) -> Path | None:
        return self.fetcher.path(shard) if is_address(self.locate_row(shard)[0].folder) else None

    def find_row(self, shard: int, index: int) -> tuple[OpenShard, int, bool]:
        """It is another row, of a shard near by, if the cache is followed and `index` is the place
        of a row that could not be used.
        """
        opened = self.open(shard)
        if index < opened.starts[-1]:
            return opened, index, True
        for near in (*range(shard, -1, -1), *range(shard + 1, len(self.lengths))):
            opened = self.open(near)
            if count := opened.starts[-1]:
                return opened, index % count, False
        raise AssertionError("`finish_cache` refuses a cache without rows")

    def describe(self, shard: int) -> tuple[str, str, int]:
        """Return a shard's address, SHA-256 and approximate bytes, for `Fetcher`."""
        shards, number = self.locate_row(shard)
        shards.wait_for(number)  # its SHA-256 is known when it is there
        return shards.locate(number), shards.sha256[number].decode(), int(self.bytes_of[shard])

    def fetch_all(self, storage: Storage, local_rank: int) -> None:
        """Fetch all shards into --shards_dir; each process of a machine begins with another one."""
        remote = np.flatnonzero(self.bytes_of)
        addresses = json.dumps(self.folders)
        digest = hashlib.sha256(addresses.encode()).hexdigest()[:16]
        folder = Path(storage.folder, f"whole-{digest}")
        with explained(f"--shards_dir {storage.folder} can't be written to"):
            folder.mkdir(parents=True, exist_ok=True)
        self.fetcher = Fetcher(self.describe, folder, math.inf)
        names = {self.fetcher.name(shard) for shard in remote.tolist()}
        for path in folder.glob("*.arrow"):
            if path.name not in names:  # from an older cache at this address
                path.unlink(missing_ok=True)
        for shard in np.roll(remote, -len(remote) * local_rank // count_local()).tolist():
            self.fetcher.request(shard)

    def fetch_by_ranges(self, storage: Storage, order: dict[str, Any]) -> None:
        """Read in the order `ranges`, with as many shards on this disk as --shards_size allows."""
        self.order = order
        self.most_bytes = storage.size
        self.check_size()
        folder = None
        if self.bytes_of.any():
            with explained(f"--shards_dir {storage.folder} can't be written to"):
                folder = make_fetch_folder(Path(storage.folder))
        self.fetcher = Fetcher(self.describe, folder, storage.size / count_local())

    def check_size(self, kept_shards: Collection[int] = ()) -> None:
        """Stop with an error if --shards_size is too small.

        It must hold the open window and the next one of each range, and the shards that are kept.
        """
        num_ranges = self.order["num_ranges"]
        shuffle_shards = self.order["shuffle_shards"]
        own_ranges = num_ranges // math.gcd(self.num_processes, num_ranges)
        need = 2 * shuffle_shards * own_ranges * self.bytes_of.max()
        need += sum(self.bytes_of[shard] for shard in kept_shards)
        need = min(need, self.bytes_of.sum()) * count_local()
        if need > self.most_bytes:
            windows = f"{own_ranges * count_local()} ranges with windows of {shuffle_shards} shards"
            windows += f" and {len(kept_shards)} shards of --holdout" if kept_shards else ""
            advice = f"give --shards_size {format_size(need)}, or fewer --shuffle_shards"
            fail(f"--shards_size {self.most_bytes:,} is too small for {windows}: {advice}")

    def hold_out(
        self, accelerator: Accelerator, holdout: float, seed: int
    ) -> tuple[Any, dict[int, int]]:
        """Return (`Ranges` of the rows to train on, {number: hash} of those for the held-out loss).

        Held-out rows are from the few shards whose names have the lowest hashes (with --follow: the
        first shards): all their rows, but in the last shard only those with the lowest hashes.
        These shards are kept on this disk, so no others have to be read.
        """
        count = int(holdout) if holdout >= 1 else round(holdout * len(self))
        held_out: dict[int, int] = {}
        if holdout and not 0 < count < len(self):
            fail(
                f"--holdout {holdout:g} sets {count} of {len(self)} images aside: choose "
                "another share or number"
            )
        if count:
            names = (name.decode() for shards in self.parts for name in shards.names.tolist())
            shards = hash_names(names, seed).argsort(kind="stable")
            if self.is_followed:
                shards.sort()
            for shard in shards.tolist():
                if len(held_out) == count:
                    break
                of_rows = hash_names(self.names([shard]), seed)
                order = of_rows.argsort(kind="stable")[: count - len(held_out)]
                rows = (self.starts[shard] + order).tolist()
                held_out |= zip(rows, of_rows[order].tolist(), strict=True)
                self.fetcher.held[shard] += 1
            self.check_size(self.fetcher.held)
            accelerator.print(f"Held out: {count} of {len(self)} images")
        size = self.order["num_ranges"], self.order["shuffle_shards"]
        if self.is_followed:
            from diffusion_training.latents.follow import (  # here: few runs need it
                FollowedRanges,
                wait_for_images,
            )

            followed = FollowedRanges(
                cast(Any, self.parts[0]), seed, *size, sorted(held_out), self.reach
            )
            self.wait_for_images = partial(wait_for_images, followed)
            return followed, held_out
        return Ranges(self.lengths, seed, *size, sorted(held_out), self.reach), held_out

    def reach(self, ranges: Any, epoch: int, index: int) -> None:
        """Drop shards that are no longer needed, and fetch ahead.

        Called for each step, before its rows are read.
        """
        if self.following is not ranges:
            self.fetcher.follow(ranges.plan(epoch, index, self.rank, self.num_processes))
            self.following = ranges
        for shard in self.fetcher.reach(epoch * len(ranges) + index):
            self.opened.pop(shard, None)
