"""Data that is read while it is needed, and kept nowhere: its flags, what it is known by, its rows for a cache."""

import argparse
import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets

from diffusion_training.arguments import COUNT, SWITCH
from diffusion_training.errors import explain, fail
from diffusion_training.files import write_file


def add_stream_flags(add: Callable[..., Any], trains: bool = True) -> None:
    """Data that the disk does not hold: what `load_rows` and `hold_out` read."""
    add("--streaming", **SWITCH, help="read the data while it is needed; who trains gives --max_train_steps")
    if trains:
        add("--shuffle_buffer", type=COUNT, default=1000, help="images that a stream is shuffled among")


def check_stream_args(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Refuse what can't be had of a stream, whose images come one by one, and are counted when it has ended."""
    given = vars(args) if vars(args).get("streaming") else {}
    if given.get("max_train_steps", 1) is None:
        parser.error("--streaming needs --max_train_steps: a stream has no length to count epochs by")
    if given.get("holdout"):
        parser.error("--holdout needs the images on a disk: of a stream none can be set aside")
    for name in ("train_batch_size", "batch_size"):
        if given.get(name) == "auto":
            parser.error(f"--{name} auto needs the images on a disk, to try some of them: give a number")
    if isinstance(given.get("resolution"), list):
        parser.error("--streaming makes one cache in a pass: give one --resolution, or data on a disk")
    if given.get("bucket_step") and "max_train_steps" in given:
        parser.error("--bucket_step needs all sizes at the start: make a cache with precompute_latents.py --streaming")
    for name in ("instance_prompt", "folder_repeats"):
        if given.get(name):
            parser.error(f"--{name} needs the images on a disk: a stream has captions in a column of its own")


def identify_stream(builder: datasets.DatasetBuilder, *taken: Any) -> str:
    """What a stream is known by: its files, the revision of each (on a disk the time), and what is `taken` of them."""
    files = {
        str(name): [list(paths), paths.origin_metadata] for name, paths in (builder.config.data_files or {}).items()
    }
    return hashlib.sha256(json.dumps([files, taken]).encode()).hexdigest()[:16]


class StreamedRows:
    """The rows of a stream for the shards of a cache, which are counted when it has been read to its end.

    count: rows, as far as shards tell of them that are there; ended: whether these are all. cache, records: what
    `open_cache` returns.
    """

    def __init__(
        self, rows: datasets.IterableDataset, output_dir: Path, cache: dict[str, Any], records: dict[str, Any]
    ) -> None:
        self.rows, self.folder, self.per_shard = rows, output_dir / "unfinished", cache["rows_per_shard"]
        self.total = cache["rows"] + cache["skipped"] if "rows" in cache else None  # of a cache that was whole once
        self.places: dict[int, dict] = {}
        numbers = [int(name.removeprefix("data-").removesuffix(".arrow")) + 1 for name in records]
        total = self.find_total()
        self.count, self.ended = total or self.per_shard * max(numbers, default=0), total is not None

    def find_total(self) -> int | None:
        """How many rows there are, if a process has read to the end."""
        return next(self.read_all("rows.json"), None) if self.total is None else self.total

    def read_all(self, names: str) -> Iterator[Any]:
        """What stands in small files; one that can't be read is as good as none."""
        for path in self.folder.glob(names):
            with contextlib.suppress(ValueError):
                yield json.loads(path.read_text())

    def keys(
        self, missing: dict[int, int], many: int, rank: int, num_processes: int
    ) -> Iterator[list[tuple[int, int, None, dict]]]:
        """Batches of keys (0, row, None, item), of `many` rows or what a shard has left: those that are to be made.

        These are the `missing` shards, {first row: row after the last}, and every so many of those that are beyond
        `count`. All others are passed over, from the last place before them that was kept.
        """
        if self.ended and not missing:
            return
        first = min([*missing] if self.ended else [*missing, self.count])
        start, last = self.find_place(first), max(missing.values(), default=0)
        row, batch = start - 1, []
        try:
            for row, item in enumerate(self.rows, start):
                shard, place = divmod(row, self.per_shard)
                beyond = row >= self.count and not self.ended and shard % num_processes == rank
                if beyond or row - place in missing:
                    batch.append((0, row, None, item))
                    if len(batch) == many or place == self.per_shard - 1:
                        if place == self.per_shard - 1:  # before who takes the batch can be done with the shard
                            self.places[shard] = self.rows.state_dict()
                        yield batch
                        batch = []
                if self.ended and row + 1 == last:
                    break
        except Exception as error:
            fail(f"the stream can't be read on ({explain(error)}); the same command goes on", alone=True)
        if batch:
            yield batch
        if self.ended and row + 1 == last:
            return
        if row < 0:
            fail("the stream holds no images")
        if self.find_total() not in (None, row + 1):
            fail(f"the stream has {row + 1} rows, and had {self.find_total()}: its data has changed", alone=True)
        write_file(self.folder / "rows.json", json.dumps(row + 1))

    def find_place(self, first: int) -> int:
        """Enter the stream at the last place up to row `first` that was kept. Returns the row that comes next."""
        version, places = datasets.__version__, self.read_all("place-*.json")  # only it knows what a state means
        places = [place for place in places if place["row"] <= first and place["datasets"] == version]
        if not places:
            return 0
        place = max(places, key=lambda place: place["row"])
        self.rows.load_state_dict(place["state"])
        return place["row"]

    def keep_place(self, shard: int, rank: int) -> int:
        """When a shard is written, keep the place where it ends: a run that goes on from there reads no file before.

        Returns of how many rows those that are skipped are a share: of all, or if that is not known of those so far,
        but never of few, since the first ones may be the worst.
        """
        if state := self.places.pop(shard, None):
            place = {"row": (shard + 1) * self.per_shard, "datasets": datasets.__version__, "state": state}
            write_file(self.folder / f"place-{rank}.json", json.dumps(place), lasting=False)
        return self.count if self.ended else max((shard + 1) * self.per_shard, 10_000)
