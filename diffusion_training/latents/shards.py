"""The shards of a latent cache, opened and checked when they are first needed."""

import bisect
import itertools
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from diffusion_training.data.captions import tokenize
from diffusion_training.data.folders import is_shared
from diffusion_training.data.texts import Text
from diffusion_training.errors.printing import amount
from diffusion_training.errors.sentences import fail
from diffusion_training.families.base import Tokenizers
from diffusion_training.latents.columns import (
    Column,
    checksum_row,
    group_by_checksum,
    list_columns,
    view_rows,
)

FOLLOWED = "followed"  # the kind of the order of rows with --follow


def name_repair(folder: str) -> str:
    """What to do about a damaged cache."""
    if is_shared(folder):
        return f"delete {folder}, and the next run with --cache_latents makes it again"
    return "to repair it, run the command that made the cache"


class Shards:
    """The shards of one cache, unopened: name, rows and checksums, about 200 bytes per shard.

    Iterating opens all of them and yields their record batches.

    places: how many rows an epoch counts for each; see `FollowedShards`.
    """

    is_followed = False

    def __init__(self, folder: str | Path, cache: dict) -> None:
        records = cache["shards"]
        self.folder = str(folder)
        self.names = np.array(records["name"], "S")
        self.places = self.rows = np.array(records["rows"], int)
        self.checksums = np.array(records["checksums"], "S")
        self.sha256 = np.array(records["sha256"], "S")
        if b"/" in self.names.tobytes():
            raise ValueError("it names shards outside the folder")
        self.all_columns = list_columns(cache)
        self.select_columns(())

    def select_columns(self, optional: Collection[str]) -> None:
        """Choose the columns to read: the usual ones, and those named in `optional`."""
        self.columns = [
            column
            for column in self.all_columns
            if not column.is_optional or column.name in optional
        ]

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        for number in range(len(self)):
            yield from self.open(number).batches

    def wait_for(self, number: int) -> None:
        """Wait until a shard is there; see `FollowedShards`."""

    def locate(self, number: int) -> str:
        """Return where a shard is: a path or an address."""
        return f"{self.folder.rstrip('/')}/{self.names[number].decode()}"

    def open(self, number: int, path: Path | None = None, alone: bool = False) -> "OpenShard":
        """Map a shard, or its copy at `path`, without reading its rows.

        Rows are checked when they are first read. alone: see `fail`.
        """
        remedy = name_repair(self.folder)
        if path:
            remedy = "delete it to fetch it again"
        path = Path(path or self.locate(number))
        digest = xxhash.xxh3_128()
        try:
            if path.exists() and not path.is_file():
                raise ValueError("it is not a file")  # a pipe might never end
            batches = [
                batch for batch in pa.ipc.open_stream(pa.memory_map(str(path))) if len(batch)
            ]
            rows = sum(map(len, batches))
            if rows != self.rows[number]:
                raise ValueError(f"{rows} rows instead of {self.rows[number]}")
            for batch in batches:
                for column in self.columns:
                    kind = column.arrow_type
                    array = batch[column.name]
                    if array.type != kind or array.flatten().null_count:
                        size = getattr(kind, "list_size", "some")
                        raise ValueError(f"{column.name} does not have {size} numbers in each row")
                digest.update(batch["checksum"].to_numpy())
            if digest.hexdigest() != self.checksums[number].decode():
                raise ValueError("it has changed since it was written")
            known = {name for each in self.all_columns for name in (each.name, each.checksum)}
            names = batches[0].schema.names if batches else []
            if further := [name for name in names if name not in known | {"text", "key"}]:
                remedy = (
                    f"it has a further column {', '.join(further)}, which the checksum of a row "
                    "must not cover, or which belongs in `EXTRA_COLUMNS` (docs/changing.md)"
                )
            return OpenShard(path, batches, self.columns, remedy)
        except FileNotFoundError:
            fail(f"{path} is missing: {name_repair(self.folder)}", alone)
        except Exception as error:
            if "Memory mapping file failed" in str(error):
                fail(
                    f"{path} can't be mapped into memory: raise `ulimit -v` or vm.max_map_count, "
                    "or make caches with more --rows_per_shard",
                    alone,
                )
            fail(f"{path} is damaged ({error}): {remedy}", alone)


def describe_repeats(shards: Shards, opened: list[list[pa.RecordBatch]]) -> str | None:
    """A sentence on rows that two shards have, with the same name and numbers; None without any.

    The data may list an image twice, so this is not an error. opened: the batches of each shard.
    """
    batches = sum(opened, [])
    checksums = np.concatenate([batch["checksum"].to_numpy() for batch in batches])
    order = checksums.argsort()
    repeated = np.flatnonzero(np.diff(checksums[order]) == 0)
    rows = np.unique(order[[*repeated, *repeated + 1]])
    if not len(rows):
        return None
    owners = np.repeat(range(len(opened)), [sum(map(len, each)) for each in opened])[rows]
    keys = pa.chunked_array([batch["key"] for batch in batches]).take(rows).to_pylist()
    firsts: dict[tuple[str, int], int] = {}
    pairs: dict[tuple[int, int], list[str]] = {}
    for key, checksum, owner in zip(keys, checksums[rows].tolist(), owners.tolist(), strict=True):
        first = firsts.setdefault((key, checksum), owner)
        if first != owner:
            pairs.setdefault((first, owner), []).append(key)
    if not pairs:
        return None
    count = sum(map(len, pairs.values()))
    names = [[shards.names[number].decode() for number in pair] for pair in sorted(pairs)]
    listed = ", ".join(map(" and ".join, names[:3])) + ", ..." * (len(names) > 3)
    return (
        f"{shards.folder}: {amount(count, 'row')} are in two shards ({listed}), such as "
        f"{pairs[min(pairs)][0]}: unless the data lists them twice, the cache is wrong; "
        f"{name_repair(shards.folder)}"
    )


class OpenShard:
    """A shard, with columns as views of the memory-mapped file, and a note of unchecked rows."""

    def __init__(
        self, path: Path, batches: list[pa.RecordBatch], columns: list[Column], remedy: str
    ) -> None:
        self.path = path
        self.batches = batches
        self.remedy = remedy
        self.groups = group_by_checksum(columns)
        self.starts = [*itertools.accumulate(map(len, batches), initial=0)]
        self.views = [
            {column.name: view_rows(batch[column.name]) for column in columns} for batch in batches
        ]
        self.checksums = {
            name: [batch[name].to_numpy() for batch in batches] for name in self.groups
        }
        self.unchecked = np.ones(self.starts[-1], bool)

    def locate(self, row: int) -> tuple[int, int]:
        """Return (record batch, index in it) for a row of the shard."""
        chunk = bisect.bisect_right(self.starts, row) - 1
        return chunk, row - self.starts[chunk]

    def view(self, row: int) -> tuple[dict[str, Any], int]:
        """Return ({column: its view in the row's record batch}, the row's index in them).

        A row is checked when it is first read.
        """
        chunk, index = self.locate(row)
        if self.unchecked[row]:
            self.check(row, chunk, index)
        return self.views[chunk], index

    def read_text(self, row: int, tokenizers: Tokenizers) -> Text:
        """Return the caption of a row, or the list of its captions. Call it before `view`.

        Raises OSError if the row is read for the first time and its tokens are not the caption's.
        """
        chunk, index = self.locate(row)
        text = self.batches[chunk]["text"][index].as_py()
        if self.unchecked[row]:
            tokens = tokenize(tokenizers, [text])
            ids = tokens["input_ids"][tokens.get("prompt_mask", ...)].flatten()
            if not np.array_equal(ids, self.views[chunk]["input_ids"][index]):
                raise OSError(f"{self.path} is damaged: {self.remedy}")
        return text

    def check(self, row: int, chunk: int, index: int) -> None:
        """Raise OSError if a row has changed: the disk failed, or something wrote to it."""
        views = self.views[chunk]
        for checksum, names in self.groups.items():
            numbers = {name: views[name][index] for name in names}
            if self.checksums[checksum][chunk][index] != checksum_row(numbers):
                raise OSError(f"{self.path} is damaged: {self.remedy}")
        self.unchecked[row] = False
