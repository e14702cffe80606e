"""Find tables of URLs and captions, copy them to parquet, and read ranges of their rows."""

import contextlib
import hashlib
import os
from argparse import Namespace
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import PurePosixPath
from typing import Any

import datasets
import fsspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import pyarrow.json as pa_json
import pyarrow.parquet as pq
from fsspec import AbstractFileSystem

from diffusion_training.errors import explained, fail
from diffusion_training.remote import open_folder, writing
from diffusion_training.web.filters import find_columns, make_filter

SUFFIXES = (".parquet", ".csv", ".tsv", ".jsonl", ".ndjson", ".json")


def list_tables(args: Namespace) -> tuple[AbstractFileSystem, list[str]]:
    """Find the tables of --input or --dataset_name, except for files in --output_dir.

    Returns (file system, sorted paths).
    """
    suffixes = (*SUFFIXES, *(f"{suffix}.gz" for suffix in SUFFIXES[1:]))
    if args.input is None:
        return list_split(args, suffixes)
    try:
        fs, path = fsspec.url_to_fs(args.input)
        visible = [p for p in fs.find(path) if "/." not in p[len(path) :]] if fs.isdir(path) else []
        paths = visible or ([path] if fs.exists(path) else fs.glob(path))
        own = f"{open_folder(args.output_dir)[2]}/"
        paths = [
            p
            for p in sorted(paths)
            if p.endswith(suffixes) and not PurePosixPath(p).name.startswith((".", "_"))
        ]
        paths = [
            p for p in paths if not fs.unstrip_protocol(p).removeprefix("file://").startswith(own)
        ]
        if not paths:
            raise FileNotFoundError(f"there is no file that ends in {', '.join(suffixes)}")
    except Exception as error:  # file systems have errors of their own, as for credentials
        fail(f"--input {args.input} can't be read: {error}")
    return fs, paths


def list_split(args: Namespace, suffixes: tuple[str, ...]) -> tuple[AbstractFileSystem, list[str]]:
    """`list_tables` for --dataset_name: the files that `datasets` lists for --dataset_split.

    Nothing is loaded.
    """
    with explained(f"--dataset_name {args.dataset_name} can't be read"):
        files = (
            datasets.load_dataset_builder(
                args.dataset_name, args.dataset_config_name
            ).config.data_files
            or {}
        )
        if args.dataset_split not in files:
            raise ValueError(
                f"it has no split {args.dataset_split!r}, "
                f"but {', '.join(map(str, files)) or 'none'}"
            )
        urls = list(map(str, files[args.dataset_split]))
        if others := [url for url in urls if not url.endswith(suffixes)]:
            raise ValueError(f"{others[0]} is no table of URLs: that ends in {', '.join(suffixes)}")
        fs = fsspec.url_to_fs(urls[0])[0]
        return fs, [fs._strip_protocol(url) for url in urls]


def digest_table(fs: AbstractFileSystem, path: str) -> str:
    """SHA-256 of a table file.

    For parquet only the footer is hashed. It has the sizes and statistics of all data in the file.
    """
    with explained(f"{path} can't be used"), fs.open(path) as file:
        if not path.endswith(".parquet"):
            return hashlib.file_digest(file, "sha256").hexdigest()
        length = pq.read_metadata(file).serialized_size
        file.seek(-8 - length, os.SEEK_END)
        return hashlib.sha256(file.read(length)).hexdigest()


def copy_tables(
    tables: Iterable[tuple[str, str]], rows: int | None, **options: Any
) -> Iterator[dict]:
    """Yield the result of `copy_table` for each (source, digest).

    Several tables are copied at the same time. With a limit of `rows` in total, they are copied one
    by one.
    """
    if rows is None:
        with ThreadPoolExecutor(16) as pool:
            yield from pool.map(lambda table: copy_table(*table, **options), tables)
        return
    for table in tables:
        if rows > 0:
            yield (copied := copy_table(*table, **options, most=rows))
            rows -= copied["rows"]


def copy_table(
    source: str,
    digest: str,
    columns: list[str],
    rows_per_group: int,
    folder: str,
    where: str | None = None,
    most: int | None = None,
) -> dict[str, Any]:
    """Copy `columns` of a table to parquet, with a row group for each work item.

    An existing copy is kept. Only rows that match the expression `where` are copied, and only the
    first `most` of them. Returns {"source", "copy", "rows", "schema"}. Ends the program if the
    table can't be used.
    """
    described = (source, digest, columns, rows_per_group, *((where, most) if where or most else ()))
    name = hashlib.sha256(repr(described).encode()).hexdigest()[:24]
    fs, _, copy = open_folder(f"{folder}/__download__/tables/{name}.parquet")
    with explained(f"{source} can't be used"):
        if not fs.exists(copy):
            more = [name for name in find_columns(where) if name not in columns]
            with open_table(source, [*columns, *more]) as (schema, batches), writing(copy) as file:
                chosen = choose(batches, where and make_filter(where, schema), columns, most)
                schema = pa.schema([schema.field(name) for name in columns])
                with pq.ParquetWriter(file, schema, write_statistics=False) as writer:
                    for group in cut_groups(chosen, rows_per_group):
                        writer.write_table(group, len(group))
        with fs.open(copy) as file:
            parquet = pq.ParquetFile(file)
            schema = parquet.schema_arrow.remove_metadata()
            return {
                "source": source,
                "copy": copy,
                "rows": parquet.metadata.num_rows,
                "schema": schema,
            }


@contextlib.contextmanager
def open_table(
    url: str, columns: list[str]
) -> Iterator[tuple[pa.Schema, Iterator[pa.RecordBatch]]]:
    """Open a table; yields (schema of `columns`, iterator of record batches).

    All CSV columns are read as text. The types of JSON lines are taken from the first megabyte.
    Raises ValueError if a column is missing or occurs twice.
    """
    with fsspec.open(url, compression="infer") as file:
        suffix = PurePosixPath(url.removesuffix(".gz")).suffix
        if suffix == ".parquet":
            # With pre_buffer, the whole file would be read into memory.
            parquet = pq.ParquetFile(file, pre_buffer=False)
            schema, batches = parquet.schema_arrow, parquet.iter_batches(10_000, columns=columns)
        elif suffix in (".csv", ".tsv"):
            parse = pa_csv.ParseOptions(
                delimiter="," if suffix == ".csv" else "\t", newlines_in_values=True
            )
            with fsspec.open(url, compression="infer") as begin:
                names = pa_csv.open_csv(begin, parse_options=parse).schema.names
            convert = pa_csv.ConvertOptions(
                column_types=dict.fromkeys(names, pa.string()),
                null_values=[""],
                strings_can_be_null=True,
                check_utf8=False,
            )
            batches = pa_csv.open_csv(file, parse_options=parse, convert_options=convert)
        else:
            batches = pa_json.open_json(file)
        schema = batches.schema if suffix != ".parquet" else schema
        for name in columns:
            if schema.names.count(name) != 1:
                many = "two columns" if name in schema.names else "no column"
                turn = "see --url_column, --caption_column, --keep_columns and --where"
                raise ValueError(f"{many} {name!r} but {', '.join(schema.names)}: {turn}")
        schema = pa.schema([schema.field(name).remove_metadata() for name in columns])
        yield schema, (batch.select(columns) for batch in batches)


def choose(
    batches: Iterator[pa.RecordBatch],
    expression: pc.Expression | None,
    columns: list[str],
    most: int | None,
) -> Iterator[pa.RecordBatch]:
    """Yield `columns` of the rows that match `expression`, at most `most` rows; None: no limit."""
    if expression is None and most is None:
        yield from batches
        return
    for batch in batches:
        table = pa.Table.from_batches([batch])
        table = (table if expression is None else table.filter(expression)).select(columns)
        yield from table.to_batches() if most is None else table[:most].to_batches()
        if most is not None and (most := most - len(table)) <= 0:
            return


def cut_groups(batches: Iterable[pa.RecordBatch], size: int) -> Iterator[pa.Table]:
    """Cut record batches into tables of `size` rows; the last one has the rest."""
    parts, count = [], 0
    for batch in batches:
        while len(batch):
            parts.append(batch.slice(0, size - count))
            batch = batch.slice(len(parts[-1]))
            count += len(parts[-1])
            if count == size:
                yield pa.Table.from_batches(parts)
                parts, count = [], 0
    if parts:
        yield pa.Table.from_batches(parts)


def make_schema(tables: list[dict], args: Namespace) -> pa.Schema:
    """The schema of the shards.

    It has the metadata of `datasets`, which then reads the column `image` as images, not as
    structs. Ends the program if the columns can't be used.
    """
    schema = tables[0]["schema"]
    for table in tables[1:]:
        if table["schema"] != schema:
            fail(
                f"{table['source']} has other types of columns than {tables[0]['source']}: "
                "make them the same"
            )
    url, text, *kept = schema
    if not (pa.types.is_string(url.type) or pa.types.is_large_string(url.type)):
        fail(f"--url_column {args.url_column} holds {url.type}, not text")
    inner = getattr(text.type, "value_type", text.type)  # of lists and dictionary-encoded columns
    if not (pa.types.is_string(inner) or pa.types.is_large_string(inner)):
        fail(
            f"--caption_column {args.caption_column} holds {text.type}, "
            "neither text nor lists of text"
        )
    own = {
        "text": text.type,
        "url": pa.string(),
        "width": pa.int32(),
        "height": pa.int32(),
        "sha256": pa.string(),
    }
    columns = pa.schema([*own.items(), *((field.name, field.type) for field in kept)])
    try:
        kinds = datasets.Features.from_arrow_schema(columns)
    except ValueError as error:
        fail(
            f"--keep_columns {' '.join(args.keep_columns)}: `datasets` has no such column ({error})"
        )
    return datasets.Features({"image": datasets.Image(), **kinds}).arrow_schema


def list_items(tables: list[dict], rows_per_shard: int) -> list[dict]:
    """List all work items in order, one for each row group of the copied tables.

    An item is {"name": file of the shard, "table": source, "copy": its parquet copy, "group": row
    group, "first": first row, "last": row after the last}. Rows are counted within the table.
    """
    items = [
        {
            "table": table["source"],
            "copy": table["copy"],
            "group": group,
            "first": group * rows_per_shard,
            "last": min(table["rows"], (group + 1) * rows_per_shard),
        }
        for table in tables
        for group in range(-(-table["rows"] // rows_per_shard))
    ]
    # All names have equally many digits, because `datasets` sorts by name.
    digits = max(5, len(str(len(items))))
    for number, item in enumerate(items):
        item["name"] = f"data-{number:0{digits}d}-of-{len(items):0{digits}d}.parquet"
    return items


def read_rows(item: dict) -> pa.Table:
    """Read the rows of a work item. Raises OSError if the copy of the table has changed."""
    with fsspec.open(item["copy"]) as file:
        table = pq.ParquetFile(file).read_row_group(item["group"])
    if len(table) != item["last"] - item["first"]:
        raise OSError(f"{item['copy']} is not as it was written: delete it")
    return table


def find_invalid(table: pa.Table, first: int = 0) -> set[int]:
    """The rows with text that is not UTF-8; the first row of the table has the number `first`."""
    try:
        table.validate(full=True)
    except pa.ArrowInvalid:
        half = len(table) // 2
        if not half:
            return {first}
        return find_invalid(table.slice(0, half), first) | find_invalid(
            table.slice(half), first + half
        )
    return set()
