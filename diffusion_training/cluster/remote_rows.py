"""Parquet files at an address as a data set that reads row groups when they are needed."""

import argparse
import bisect
import contextlib
import functools
import itertools
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import datasets
import fsspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from diffusion_training.arguments import list_values
from diffusion_training.data.images import name_image
from diffusion_training.errors.faults import explain
from diffusion_training.errors.sentences import explained, fail
from diffusion_training.files import hash_values
from diffusion_training.remote import list_data


class RemoteRows:
    """All rows of the parquet files at an address, in the order of the file names.

    It works like the rows of `load_rows` for a copy on a disk, but holds only names and counts, and
    reads rows on request. With --max_train_samples it has only the first rows, and opens only their
    files.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        url = args.train_data_dir.rstrip("/")
        schema = None
        self.starts = [0]
        with explained(f"--train_data_dir {url} can't be read"):
            folder, found = list_data(url, (".parquet",))
            objects = [(name, describe_object(info)) for name, info in found.items()]
            if not objects:
                raise FileNotFoundError("it holds no parquet files")
            self.files = [(f"{folder}/{name}", described) for name, described in objects]
            limit = args.max_train_samples or 2**63
            with ThreadPoolExecutor(32) as pool:
                opened = pool.map(lambda file: open_parquet(*file), self.files)
                for (name, _), (parquet, starts) in zip(objects, opened, strict=False):
                    schema = schema or parquet.schema_arrow
                    if parquet.schema_arrow.remove_metadata() != schema.remove_metadata():
                        raise ValueError(f"{name} has other columns than {objects[0][0]}")
                    self.starts.append(min(limit, self.starts[-1] + starts[-1]))
                    if self.starts[-1] == limit:
                        pool.shutdown(cancel_futures=True)
                        break
        self._fingerprint = hash_values(objects)
        features = datasets.Features.from_arrow_schema(schema)
        images = [name for name, feature in features.items() if isinstance(feature, datasets.Image)]
        column = args.image_column
        if not column:
            column = images[0] if "image" not in features and len(images) == 1 else "image"
        for name in ("instance_prompt", "folder_repeats"):
            if vars(args).get(name):
                fail(
                    f"--{name} is for images on a disk, but {url} is an address: write "
                    "captions into a column"
                )
        self.images = (column,) if args.mask_column is None else (column, args.mask_column)
        self.column_names = (*self.images, *list_values(args.caption_column))
        for name in self.column_names:
            if name not in features:
                fail(
                    f"{url} has no column {name!r}, only {', '.join(features)}: "
                    "choose with --image_column, --caption_column and --mask_column"
                )
        if not len(self):
            fail(f"{url} holds no images")

    def __len__(self) -> int:
        return self.starts[-1]

    def __getitem__(self, rows: Iterable[int]) -> dict[str, list]:
        """Return {column: values} of a list of rows."""
        values = {name: [] for name in self.column_names}
        for row in rows:
            number = bisect.bisect_right(self.starts, row) - 1
            row -= self.starts[number]
            file = self.files[number]
            _, starts = open_parquet(*file)
            group = bisect.bisect_right(starts, row) - 1
            columns = read_group(*file, group, self.column_names, self.images)
            for name, column in columns.items():
                values[name].append(column[row - starts[group]].as_py())
        return values

    def name_rows(self, numbers: range) -> list[str]:
        """The names of consecutive rows, as in a cache: see `name_image`. No image is read."""
        names: list[str] = []
        while left := numbers[len(names) :]:
            number = bisect.bisect_right(self.starts, left[0]) - 1
            row = left[0] - self.starts[number]
            file = self.files[number]
            _, starts = open_parquet(*file)
            group = bisect.bisect_right(starts, row) - 1
            paths = read_paths(*file, group, self.images[0])[row - starts[group] :]
            # a file may have more rows than --max_train_samples takes
            pairs = zip(left[: self.starts[number + 1] - left[0]], paths, strict=False)
            names += [name_image(row, {"path": path}) for row, path in pairs]
        return names


def describe_object(info: dict) -> tuple[str, ...]:
    """Return values that change if an object is replaced, without reading it."""
    return tuple(str(info.get(name)) for name in ("size", "ETag", "etag", "mtime"))


@contextlib.contextmanager
def named(url: str) -> Iterator[None]:
    """Put the address before the message of an error that is raised inside."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"{url}: {explain(error)}") from error


@functools.lru_cache(2)
def open_parquet(url: str, described: tuple[str, ...]) -> tuple[pq.ParquetFile, list[int]]:
    """Return (parquet file, first row of each group and, at the end, the number of rows).

    Raises ValueError if the file is no longer as `described`.
    """
    with named(url):
        fs, path = fsspec.url_to_fs(url)
        if describe_object(fs.info(path)) != described:
            raise ValueError("it has changed")
        parquet = pq.ParquetFile(fs.open(path, cache_type="none"))
        groups = range(parquet.num_row_groups)
        counts = [parquet.metadata.row_group(group).num_rows for group in groups]
        return parquet, list(itertools.accumulate(counts, initial=0))


def read_paths(url: str, described: tuple[str, ...], group: int, column: str) -> list[str | None]:
    """The paths of the images of a row group, without their bytes."""
    with named(url):
        parquet, starts = open_parquet(url, described)
        kind = parquet.schema_arrow.field(column).type
        if pa.types.is_binary(kind):
            return [None] * (starts[group + 1] - starts[group])
        is_struct = pa.types.is_struct(kind)
        table = parquet.read_row_group(group, [f"{column}.path" if is_struct else column])
        return (pc.struct_field(table[column], "path") if is_struct else table[column]).to_pylist()


@functools.lru_cache(2)  # consecutive parts need neighbouring rows
def read_group(
    url: str,
    described: tuple[str, ...],
    group: int,
    columns: tuple[str, ...],
    images: tuple[str, ...],
) -> dict[str, Any]:
    """Return {column: array} of a row group; images: the `columns` of images, left undecoded."""
    with named(url):
        table = open_parquet(url, described)[0].read_row_group(group, columns).combine_chunks()
        arrays = {name: table[name].chunk(0) for name in columns}
        for name in images:
            arrays[name] = datasets.Image(decode=False).cast_storage(arrays[name])
        return arrays
