"""The rows of a stream, a data set that is not stored, for the shards of a cache."""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets

from diffusion_training.errors.faults import explain
from diffusion_training.errors.sentences import fail
from diffusion_training.files import parse_json, write_file


class StreamedRows:
    """The rows of a stream, for the shards of a cache.

    The number of rows is known when the stream has been read to its end.
    count: number of rows in the stream; before its end is known, only those of existing shards.
    ended: whether the end is known.
    cache, records: see `open_cache`.
    """

    def __init__(
        self,
        rows: datasets.IterableDataset,
        output_dir: Path,
        cache: dict[str, Any],
        records: dict[str, Any],
    ) -> None:
        self.rows = rows
        self.folder = output_dir / "unfinished"
        self.per_shard = cache["rows_per_shard"]
        # known if the cache was complete before
        self.total = cache["rows"] + cache["skipped"] if "rows" in cache else None
        self.states = {}  # {shard: state of the stream at its end}
        numbers = [int(name.removeprefix("data-").removesuffix(".arrow")) + 1 for name in records]
        total = self.find_total()
        self.ended = total is not None
        self.count = total or self.per_shard * max(numbers, default=0)

    def find_total(self) -> int | None:
        """Return the number of rows, or None if no process has read the stream to its end."""
        if self.total is not None:
            return self.total
        return next(self.read_all("rows.json"), None)

    def read_all(self, names: str) -> Iterator[Any]:
        """Yield the contents of small JSON files; damaged ones are skipped."""
        for path in self.folder.glob(names):
            with contextlib.suppress(ValueError):
                yield parse_json(path.read_text())

    def keys(
        self, missing: dict[int, int], batch_size: int, rank: int, num_processes: int
    ) -> Iterator[list[tuple[int, int, None, dict]]]:
        """Yield batches of keys (0, row, None, item) for the rows that this process must encode.

        A batch has `batch_size` rows, or fewer at the end of a shard. The rows are those of the
        `missing` shards, {first row: row after the last}, and those of every `num_processes`-th
        shard beyond `count`. It skips other rows, and starts at the last saved position before the
        first row.
        """
        if self.ended and not missing:
            return
        start = self.seek(min(missing if self.ended else [*missing, self.count]))
        last = max(missing.values(), default=0)
        row = start - 1
        batch = []
        try:
            for row, item in enumerate(self.rows, start):
                shard, offset = divmod(row, self.per_shard)
                beyond = row >= self.count and not self.ended and shard % num_processes == rank
                is_last = self.ended and row + 1 == last
                if beyond or row - offset in missing:
                    batch.append((0, row, None, item))
                    ends_shard = offset == self.per_shard - 1
                    if ends_shard:
                        # before the yield: the caller may finish the shard right after it
                        self.states[shard] = self.rows.state_dict()
                    if ends_shard or is_last or len(batch) == batch_size:
                        yield batch
                        batch = []
                if is_last:
                    return
        except Exception as error:
            fail(
                f"reading the stream failed ({explain(error)}); run the same command to resume",
                alone=True,
            )
        if batch:
            yield batch
        if row < 0:
            fail("the stream holds no images")
        if self.find_total() not in (None, row + 1):
            fail(
                f"the stream has {row + 1} rows, and had {self.find_total()} before: its data has "
                "changed, so make the cache again",
                alone=True,
            )
        write_file(self.folder / "rows.json", json.dumps(row + 1))

    def seek(self, first: int) -> int:
        """Move the stream to the last saved position that is not beyond row `first`.

        Returns the number of the next row.
        """
        row = 0
        state = None
        for saved in self.read_all("place-*.json"):
            # a state is only valid for the version of `datasets` that saved it
            if saved["datasets"] == datasets.__version__ and row < saved["row"] <= first:
                row = saved["row"]
                state = saved["state"]
        if row:
            self.rows.load_state_dict(state)
        return row

    def save_position(self, shard: int, rank: int) -> int:
        """Save where a finished shard ends, so that a resumed run skips earlier files.

        Returns the number of rows to which skipped rows are compared: all rows, or if their number
        is not known, the rows so far. In that case it is at least 10,000, because the first rows
        may be the worst.
        """
        row = (shard + 1) * self.per_shard
        if state := self.states.pop(shard, None):
            position = {"row": row, "datasets": datasets.__version__, "state": state}
            write_file(self.folder / f"place-{rank}.json", json.dumps(position), lasting=False)
        return self.count if self.ended else max(row, 10_000)
