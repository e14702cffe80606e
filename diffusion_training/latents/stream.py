"""Latent caches of any size, on a disk or at an address: their order, and which shards are here."""

import hashlib
import math
import os
from argparse import Namespace
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from accelerate import Accelerator
from tqdm.auto import tqdm

from diffusion_training.data.ranges import Ranges
from diffusion_training.errors import fail
from diffusion_training.latents.fetch import Describe, Fetcher, take_folder_of_run
from diffusion_training.latents.reader import Cache, CachedLatents
from diffusion_training.latents.shards import Shards
from diffusion_training.remote import is_address, persist
from diffusion_training.training.checkpoints import read_state

MOST_PERMUTED = 16_000_000  # rows; each process holds a permutation of them, 128 MB
LEAST_RANGES = 64  # so that neighbours come from shards far apart, even with one process


def open_latents(
    accelerator: Accelerator, caches: dict[str, Cache], checkpoint: Path | None, args: Namespace
) -> "StoredLatents":
    """Return the data set of some caches, {folder: what `load_cache` returns}.

    The order is the permutation `full` if they have at most 16 M rows and are on a disk or fit into
    --shards_size. Otherwise it is that of `Ranges`, which is stored in args.order. A checkpoint's
    order is kept in any case.
    """
    dataset = StoredLatents(caches, args.seed, args.random_flip)
    for cache, _, _ in caches.values():
        del cache["shards"]  # half a gigabyte for a million shards; `Shards` has what is needed
    bytes_of = dataset.lengths * np.repeat(
        [weigh_rows(shards) for shards in dataset.parts], np.diff(dataset.firsts)
    )
    total, fits = (
        int(bytes_of.sum()),
        len(dataset) <= MOST_PERMUTED and bytes_of.sum() <= args.shards_size,
    )
    kept = read_state(checkpoint, 0)["settings"].get("order") if checkpoint else None
    dataset.process = accelerator.process_index, accelerator.num_processes
    if not kept and (checkpoint or fits):
        if total > args.shards_size:
            fail(
                f"{checkpoint} was begun with all shards at hand: it goes on with "
                f"--shards_size {show(total)}"
            )
        if total:
            folder = Path(args.shards_dir, f"whole-{dataset.fingerprint}")
            folder.mkdir(parents=True, exist_ok=True)
            dataset.fetcher = Fetcher(dataset.describe(bytes_of), folder, math.inf)
            remote = np.flatnonzero(bytes_of)
            for shard in np.roll(
                remote, -len(remote) * accelerator.local_process_index // count_local()
            ).tolist():
                dataset.fetcher.want(shard)  # each process of this machine begins at another shard
        return dataset

    for unfit, what in (
        (args.latents_weights, "--latents_weights"),
        (dataset.ragged, "images of several sizes"),
    ):
        if unfit:
            fail(
                f"{what} need all rows at hand: at most {MOST_PERMUTED:,}, and --shards_size "
                f"{show(total)}"
            )
    args.order = dataset.order = choose_ranges(dataset, kept, checkpoint, args)
    args.shuffle_shards = args.order["shuffle_shards"]
    dataset.bytes_of, dataset.most = bytes_of, args.shards_size
    dataset.check_size()
    folder = take_folder_of_run(args.shards_dir) if total else None
    dataset.fetcher = Fetcher(dataset.describe(bytes_of), folder, args.shards_size / count_local())
    return dataset


def choose_ranges(
    dataset: "StoredLatents", kept: dict | None, checkpoint: Path | None, args: Namespace
) -> dict[str, Any]:
    """Return what a checkpoint stores of the order `ranges`, with the values of `kept` if any.

    Stops with an error if the caches have as many rows as before but other shards.
    """
    shards = hashlib.sha256(dataset.lengths.tobytes()).hexdigest()[:16]
    if kept and kept["rows"] == len(dataset) and kept["shards"] != shards:
        fail(
            f"{checkpoint} is in the midst of other shards of as many rows: go on with the "
            "caches as they were"
        )
    _, num_processes = dataset.process
    num_ranges = num_processes * math.ceil(LEAST_RANGES / num_processes)
    chosen = {
        "kind": "ranges",
        "num_ranges": num_ranges,
        "shuffle_shards": args.shuffle_shards,
        **(kept or {}),
    }
    return {**chosen, "rows": len(dataset), "shards": shards}


def count_local() -> int:
    """Return how many processes run on this machine and share its disk."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def show(size: float) -> str:
    """Format bytes as --shards_size reads them, rounded up."""
    return tqdm.format_sizeof(size * 1.01, divisor=1000) + "B"


def weigh_rows(shards: Shards) -> float:
    """Estimate how many bytes of a shard each row takes; 0 for a cache on a disk."""
    if not is_address(shards.folder):
        return 0.0
    number = int(shards.rows.argmax())
    size = persist(
        shards.locate(number), lambda fs, path: fs.info(path)["size"] or len(fs.cat_file(path))
    )
    return 1.05 * size / int(shards.rows[number])  # captions differ in length


class StoredLatents(CachedLatents):
    """`CachedLatents` whose shards may be at an address.

    With the order `ranges`, shards are fetched and dropped as its windows move on.
    """

    order: Any = None  # see `choose_ranges`; None: `full`
    following: Ranges | None = None

    def describe(self, bytes_of: np.ndarray) -> Describe:
        """Return a function that describes a shard to a `Fetcher`; bytes_of: estimated sizes."""

        def describe(shard: int) -> tuple[str, str, int]:
            shards, number = self.find_shard(shard)
            address = shards.locate(number) if is_address(shards.folder) else ""
            return address, shards.sha256[number].decode(), int(bytes_of[shard])

        return describe

    def check_size(self, stay: Collection[int] = ()) -> None:
        """Stop with an error if --shards_size is too small.

        It must hold the open window and the next one of each range, and the shards that `stay`.
        """
        num_ranges, shuffle_shards = self.order["num_ranges"], self.order["shuffle_shards"]
        mine = num_ranges // math.gcd(self.process[1], num_ranges)
        need = 2 * shuffle_shards * mine * self.bytes_of.max() + sum(
            self.bytes_of[shard] for shard in stay
        )
        need = min(need, self.bytes_of.sum()) * count_local()
        if need > self.most:
            windows = f"{mine * count_local()} ranges with windows of {shuffle_shards} shards"
            windows += f" and {len(stay)} of --holdout" if stay else ""
            turn = f"give --shards_size {show(need)}, or fewer --shuffle_shards"
            fail(f"--shards_size {self.most:,} is too small for {windows}: {turn}")

    def hold_out(
        self, accelerator: Accelerator, holdout: float, seed: int
    ) -> tuple[Ranges, dict[int, int]]:
        """Return (`Ranges` of the rows to train on, {number: hash} of those for the held-out loss).

        Held-out rows come from the few shards whose names have the lowest hashes: all rows of
        these, except that the last shard gives only those with the lowest hashes. These shards stay
        on this disk, so no others have to be read.
        """
        count, held_out = int(holdout) if holdout >= 1 else round(holdout * len(self)), {}
        if holdout and not 0 < count < len(self):
            fail(
                f"--holdout {holdout:g} sets {count} of {len(self)} images aside: choose "
                "another share or number"
            )
        names = (name.decode() for shards in self.parts for name in shards.names.tolist())
        hashes = (
            [xxhash.xxh3_64_intdigest(f"{seed} {name}".encode()) for name in names] if count else []
        )
        for shard in np.argsort(hashes, kind="stable").tolist():
            if len(held_out) == count:
                break
            found = [
                xxhash.xxh3_64_intdigest(f"{seed} {name}".encode()) for name in self.names([shard])
            ]
            first = int(self.ends[shard] - self.lengths[shard])
            lowest = np.argsort(np.array(found, np.uint64), kind="stable")[
                : count - len(held_out)
            ].tolist()
            held_out |= {first + place: found[place] for place in lowest}
            self.fetcher.held[shard] += 1
        if count:
            self.check_size(self.fetcher.held)
            accelerator.print(f"Held out: {count} of {len(self)} images")
        size = self.order["num_ranges"], self.order["shuffle_shards"]
        ranges = Ranges(self.lengths, seed, *size, sorted(held_out))
        ranges.reach = lambda epoch, place: self.reach(ranges, epoch, place)
        return ranges, held_out

    def reach(self, ranges: Ranges, epoch: int, place: int) -> None:
        """Drop shards that are no longer needed, and fetch ahead.

        Called where the rows of a step are taken, before they are read.
        """
        if self.following is not ranges:
            self.fetcher.follow(ranges.plan(epoch, place, *self.process))
            self.following = ranges
        for shard in self.fetcher.reach(epoch * len(ranges) + place):
            self.opened.pop(shard, None)
