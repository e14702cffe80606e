"""The shards of a latent cache, which are opened and checked when they are first needed."""

import bisect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import xxhash

from diffusion_training.data.captions import tokenize
from diffusion_training.data.families import Tokenizers
from diffusion_training.data.texts import Text
from diffusion_training.errors import fail
from diffusion_training.latents.columns import BY_COLUMNS, checksum_row, describe_columns, view_rows


def list_shards(cache: dict) -> dict[str, np.ndarray]:
    """Return {"name", "rows", "sha256", ...: array over all shards} of a finished cache.

    Strings are bytes.
    """
    shards = cache["shards"]
    if BY_COLUMNS not in cache.get("features", []):
        fields = next(iter(shards.values()), ("rows", "sha256", "checksums"))
        columns = {"name": list(shards)} | {
            name: [record[name] for record in shards.values()] for name in fields
        }
        return {
            name: np.array(x, "S" if x and isinstance(x[0], str) else int)
            for name, x in columns.items()
        }
    count, columns = len(shards["rows"]), {}
    for name, column in shards.items():  # strings of a column are stored as one
        text = column.encode() if isinstance(column, str) else None
        columns[name] = (
            np.array(column) if text is None else np.frombuffer(text, f"S{len(text) // count}")
        )
    return columns


def list_by_columns(cache: dict) -> dict:
    """Return a finished cache.json with its records by column; strings of a column are joined."""
    columns = list_shards(cache).items()
    shards = {
        name: x.tobytes().decode() if x.dtype.kind == "S" else x.tolist() for name, x in columns
    }
    return {
        **cache,
        "shards": shards,
        "format_version": 3,
        "features": [*cache.get("features", []), BY_COLUMNS],
    }


def list_by_names(cache: dict) -> dict:
    """Return a finished cache.json with {name: record} of the shards, as small caches have it."""
    features = [name for name in cache.get("features", []) if name != BY_COLUMNS]
    if features == cache.get("features", []):
        return cache
    names, *columns = (
        (x.astype(str) if x.dtype.kind == "S" else x).tolist() for x in list_shards(cache).values()
    )
    _, *fields = cache["shards"]
    shards = {
        name: dict(zip(fields, row, strict=True))
        for name, *row in zip(names, *columns, strict=True)
    }
    cache = {**cache, "shards": shards, "features": features}
    if not features:
        del cache["features"]
        cache["format_version"] = 2
    return cache


class Shards:
    """The shards of one cache, unopened: name, rows and checksums, about 200 bytes per shard.

    Iterating opens all of them and yields (path, record batch).
    """

    def __init__(self, folder: str | Path, cache: dict) -> None:
        columns = list_shards(cache)
        self.folder, self.kinds = str(folder), describe_columns(cache)
        self.names, self.rows = columns["name"], columns["rows"]
        self.checksums, self.sha256 = columns["checksums"], columns["sha256"]
        if b"/" in self.names.tobytes():
            raise ValueError("it names shards outside of the folder")

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[tuple[Path, pa.RecordBatch]]:
        for number in range(len(self)):
            opened = self.open(number)
            for batch in opened.batches:
                yield opened.path, batch

    def locate(self, number: int) -> str:
        """Return where a shard is: a path or an address."""
        return f"{self.folder.rstrip('/')}/{self.names[number].decode()}"

    def open(self, number: int, path: Path | None = None, alone: bool = False) -> "OpenShard":
        """Map a shard, or its copy at `path`, without reading its rows.

        Rows are checked when they are first read. alone: see `fail`.
        """
        mend = (
            "delete it, and it is fetched again"
            if path
            else "run the command that made the cache again, it mends it"
        )
        path, digest = Path(path or self.locate(number)), xxhash.xxh3_128()
        try:
            batches = [
                batch for batch in pa.ipc.open_stream(pa.memory_map(str(path))) if len(batch)
            ]
            if (rows := sum(map(len, batches))) != self.rows[number]:
                raise ValueError(f"{rows} rows instead of {self.rows[number]}")
            for batch in batches:
                for column, kind in self.kinds.items():
                    if batch[column].type != kind or batch[column].flatten().null_count:
                        raise ValueError(
                            f"{column} is not {getattr(kind, 'list_size', 'some')} numbers in "
                            "each row"
                        )
                digest.update(batch["checksum"].to_numpy())
            if digest.hexdigest() != self.checksums[number].decode():
                raise ValueError("it is not as it was written")
            return OpenShard(path, batches, self.kinds, mend)
        except FileNotFoundError:
            fail(f"{path} is missing: make the cache with precompute_latents.py", alone)
        except Exception as error:
            if "Memory mapping file failed" in str(error):
                turn = (
                    "raise `ulimit -v` or vm.max_map_count, or make caches with more "
                    "--rows_per_shard"
                )
                fail(f"{path} can't be mapped into memory: {turn}", alone)
            fail(f"{path} is damaged ({error}): {mend}", alone)


class OpenShard:
    """A shard whose columns are views of the memory-mapped file; notes which rows are checked."""

    def __init__(
        self, path: Path, batches: list[pa.RecordBatch], kinds: dict[str, pa.DataType], mend: str
    ) -> None:
        self.path, self.batches, self.mend = path, batches, mend
        self.ends = np.cumsum([len(batch) for batch in batches]).tolist()
        self.views = [
            {
                name: view_rows(batch[name])
                for name in batch.schema.names
                if name in kinds or name == "latents_flipped"
            }
            for batch in batches
        ]
        self.checksums = [batch["checksum"].to_numpy() for batch in batches]
        self.unchecked = np.ones(sum(map(len, batches)), bool)

    def find(self, row: int) -> tuple[int, int]:
        """Return (record batch, place in it counted from its end) for a row of the shard."""
        chunk = bisect.bisect_right(self.ends, row)
        return chunk, row - self.ends[chunk]

    def view(self, row: int) -> tuple[dict[str, Any], int]:
        """Return ({column: its view in the row's record batch}, the row's place in them).

        A row is checked when it is first read.
        """
        chunk, place = self.find(row)
        if self.unchecked[row]:
            self.check(row, chunk, place)
        return self.views[chunk], place

    def read_text(self, row: int, tokenizers: Tokenizers) -> Text:
        """Return the caption of a row, or the list of its captions; to be called before `view`.

        Raises OSError if the row is read for the first time and has other tokens than the caption.
        """
        chunk, place = self.find(row)
        text = self.batches[chunk]["text"][place + len(self.batches[chunk])].as_py()
        if self.unchecked[row]:
            tokens = tokenize(tokenizers, [text])
            ids = tokens["input_ids"][tokens.get("prompt_mask", ...)].flatten()
            if not np.array_equal(ids, self.views[chunk]["input_ids"][place]):
                raise OSError(f"{self.path} is damaged: {self.mend}")
        return text

    def check(self, row: int, chunk: int, i: int) -> None:
        """Raise OSError if a row has changed: the disk failed, or something wrote to it."""
        if self.checksums[chunk][i] != checksum_row(
            {name: view[i] for name, view in self.views[chunk].items()}
        ):
            raise OSError(f"{self.path} is damaged: {self.mend}")
        self.unchecked[row] = False
