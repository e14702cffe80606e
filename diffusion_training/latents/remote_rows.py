"""Parquet files at an address as a data set, whose row groups are read when needed."""

import argparse
import bisect
import contextlib
import functools
import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import datasets
import fsspec
import pyarrow.parquet as pq

from diffusion_training.arguments import list_values
from diffusion_training.errors import explain, explained, fail


class RemoteRows:
    """All rows of the parquet files in a folder at an address, in the order of the file names.

    It works like what `load_rows` returns for a copy on a disk, but holds only names and counts,
    and reads rows when asked for them.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        url, schema, self.starts = args.train_data_dir.rstrip("/"), None, [0]
        with explained(f"--train_data_dir {url} can't be read"):
            fs, root = fsspec.url_to_fs(url)
            fs.invalidate_cache()
            found = {
                path[len(root) + 1 :]: describe_object(info)
                for path, info in fs.find(root, detail=True).items()
            }
            names = [name for name in sorted(found) if name.endswith(".parquet")]
            # `datasets` ignores such files on a disk, for example the tables of download_images.py
            names = [
                name
                for name in names
                if not any(part.startswith((".", "__")) for part in name.split("/"))
            ]
            if not names:
                raise FileNotFoundError("it holds no parquet files")
            self.files = [(f"{url}/{name}", found[name]) for name in names]
            with ThreadPoolExecutor(32) as pool:
                for parquet, rows in pool.map(lambda file: open_parquet(*file), self.files):
                    if (
                        schema
                        and parquet.schema_arrow.remove_metadata() != schema.remove_metadata()
                    ):
                        raise ValueError(
                            f"{names[len(self.starts) - 1]} has other columns than {names[0]}"
                        )
                    schema = schema or parquet.schema_arrow
                    self.starts.append(self.starts[-1] + rows[-1])
        described = json.dumps([(name, found[name]) for name in names]).encode()
        self._fingerprint = hashlib.sha256(described).hexdigest()[:16]
        features = datasets.Features.from_arrow_schema(schema)
        images = [name for name, feature in features.items() if isinstance(feature, datasets.Image)]
        column = args.image_column or (
            "image" if "image" in features or len(images) != 1 else images[0]
        )
        for name in ("instance_prompt", "folder_repeats"):
            if getattr(args, name, None):
                fail(
                    f"--{name} is for images on a disk, and {url} is an address: write "
                    "captions into a column"
                )
        self.images = (column, *[args.mask_column] * (args.mask_column is not None))
        self.columns = (*self.images, *list_values(args.caption_column))
        if missing := [name for name in self.columns if name not in features]:
            choose = "choose with --image_column, --caption_column and --mask_column"
            fail(f"{url} has no column {missing[0]!r} but {', '.join(features)}: {choose}")
        if not len(self):
            fail(f"{url} holds no images")

    def __len__(self) -> int:
        return self.starts[-1]

    def __getitem__(self, rows: Iterable[int]) -> dict[str, list]:
        """Return {column: values} of a list of rows."""
        values = {name: [] for name in self.columns}
        for row in rows:
            number = bisect.bisect_right(self.starts, row) - 1
            row -= self.starts[number]
            _, starts = open_parquet(*self.files[number])
            group = bisect.bisect_right(starts, row) - 1
            for name, column in read_group(
                *self.files[number], group, self.columns, self.images
            ).items():
                values[name].append(column[row - starts[group]].as_py())
        return values


def describe_object(info: dict) -> tuple[str, ...]:
    """Return what identifies an object among others of the same name, without reading it."""
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
        return parquet, [
            0,
            *itertools.accumulate(parquet.metadata.row_group(i).num_rows for i in groups),
        ]


@functools.lru_cache(2)  # consecutive parts need neighbouring rows
def read_group(
    url: str,
    described: tuple[str, ...],
    group: int,
    columns: tuple[str, ...],
    images: tuple[str, ...],
) -> dict[str, Any]:
    """Return {column: array} of a row group; images: those of `columns` to keep undecoded."""
    with named(url):
        table = open_parquet(url, described)[0].read_row_group(group, columns).combine_chunks()
        arrays = {name: table[name].chunk(0) for name in columns}
        return arrays | {
            name: datasets.Image(decode=False).cast_storage(arrays[name]) for name in images
        }
