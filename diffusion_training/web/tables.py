"""Find tables of URLs and captions, copy them to parquet, and read ranges of their rows."""

import contextlib
import hashlib
import json
import os
import re
from argparse import Namespace
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import datasets
import fsspec
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
from fsspec import AbstractFileSystem

from diffusion_training.csv_files import (
    MAX_ROW,
    UTF_16,
    find_compression,
    find_csv_fault,
    get_suffix,
)
from diffusion_training.errors.printing import print_once
from diffusion_training.errors.sentences import explained, fail
from diffusion_training.remote import expand, has_file, open_folder, writing
from diffusion_training.web.filters import TEXT, find_columns, find_non_number, make_filter

SUFFIXES = (
    ".parquet", ".csv", ".tsv", ".jsonl", ".ndjson", ".json",
    ".csv.gz", ".tsv.gz", ".jsonl.gz", ".ndjson.gz", ".json.gz",
)  # fmt: skip


def list_tables(args: Namespace) -> tuple[AbstractFileSystem, list[str]]:
    """Find the tables of --input or --dataset_name, except for files in --output_dir.

    Returns (file system, sorted paths).
    """
    if args.input is None:
        return list_split(args)
    try:
        fs, pattern = fsspec.url_to_fs(args.input)
        output_dir = f"{open_folder(args.output_dir)[2]}/"
        tables = set()
        for path in expand(pattern):
            for file in find_tables(fs, path):
                location = fs.unstrip_protocol(file).removeprefix("file://")
                if not location.startswith(output_dir):
                    tables.add(file)
        if not tables:
            raise FileNotFoundError(f"there is no file that ends in {', '.join(SUFFIXES)}")
    except Exception as error:  # file systems raise errors of any type, such as for credentials
        fail(f"--input {args.input} can't be read: {error}")
    return fs, sorted(tables)


def find_tables(fs: AbstractFileSystem, path: str) -> list[str]:
    """The tables that a path names: a file, a folder, or a pattern with * that matches both.

    Hidden files and folders are left out (.ipynb_checkpoints, _metadata, __download__), unless
    the path names them itself.
    """
    if fs.isfile(path):
        if get_suffix(path) not in SUFFIXES:
            raise ValueError(f"its name does not end in {', '.join(SUFFIXES)}")
        return [path]
    folder = path
    if fs.isdir(path):
        found = fs.find(path, detail=True)
    else:
        if not (match := re.search(r"[*\[]|\?(?!\w+=)", path)):  # not ?download=true
            if has_file(fs, path):  # reading a pipe might never end
                raise ValueError("it is neither a file nor a folder")
            raise FileNotFoundError("it does not exist")
        found = fs.glob(path, detail=True)
        folder = path[: match.start()].rpartition("/")[0]
    is_named = re.search(r"/[._]", path[len(folder) :])
    return [
        file
        for file, info in found.items()
        if (info["type"] == "file" or fs.isfile(file))  # it may be a link
        and get_suffix(file) in SUFFIXES
        and (is_named or not re.search(r"/(\.|__)|/_[^/]*$", file[len(folder) :]))
    ]


def list_split(args: Namespace) -> tuple[AbstractFileSystem, list[str]]:
    """`list_tables` for --dataset_name: the files that `datasets` lists for --dataset_split.

    Nothing is loaded.
    """
    with explained(f"--dataset_name {args.dataset_name} can't be read"):
        builder = datasets.load_dataset_builder(args.dataset_name, args.dataset_config_name)
        files = builder.config.data_files or {}
        if args.dataset_split not in files:
            splits = ", ".join(map(str, files)) or "none"
            raise ValueError(f"it has no split {args.dataset_split!r}; its splits: {splits}")
        urls = list(map(str, files[args.dataset_split]))
        for url in urls:
            if get_suffix(url) not in SUFFIXES:
                raise ValueError(
                    f"{url} is not a table of URLs, whose name ends in {', '.join(SUFFIXES)}"
                )
        fs, _ = fsspec.url_to_fs(urls[0])
        return fs, [fs._strip_protocol(url) for url in urls]


def digest_table(fs: AbstractFileSystem, path: str) -> str:
    """SHA-256 of a table file.

    For parquet only the footer is hashed. It has the sizes and statistics of all data in the file.
    """
    with explained(f"{path} can't be used"), fs.open(path) as file:
        if get_suffix(path) != ".parquet":
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
            copied = copy_table(*table, **options, max_rows=rows)
            yield copied
            rows -= copied["rows"]


def name_copy(
    source: str,
    digest: str,
    columns: list[str],
    rows_per_group: int,
    folder: str,
    where: str | None = None,
    max_rows: int | None = None,
) -> str:
    """The path of the copy of a table. It depends on everything that determines the content."""
    limits = (where, max_rows) if where or max_rows else ()
    described = (source, digest, columns, rows_per_group, *limits)
    name = hashlib.sha256(repr(described).encode()).hexdigest()[:24]
    return open_folder(f"{folder}/__download__/tables/{name}.parquet")[2]


def plan_copies(tables: Iterable[tuple[str, str]], **options: Any) -> list[dict]:
    """Find what `copy_table` will return for each parquet table (source, digest), by its footer.

    Each result also has the "digest", because its copy is not made yet. The tables must be copied
    completely, without `where` and `max_rows`.
    """

    def plan_copy(table: tuple[str, str]) -> dict[str, Any]:
        source, digest = table
        with explained(f"{source} can't be used"), fsspec.open(source) as file:
            parquet = pq.ParquetFile(file)
            schema = select_columns(parquet.schema_arrow, options["columns"])
            rows = parquet.metadata.num_rows
        copy = name_copy(source, digest, **options)
        return {"source": source, "digest": digest, "copy": copy, "rows": rows, "schema": schema}

    with ThreadPoolExecutor(16) as pool:
        return list(pool.map(plan_copy, tables))


def copy_table(source: str, digest: str, **options: Any) -> dict[str, Any]:
    """Copy `columns` of a table to parquet, with a row group for each work item.

    An existing copy is kept. Only rows that match the expression `where` are copied, and only the
    first `max_rows` of them. `options`: see `name_copy`. Returns {"source", "copy", "rows",
    "schema"}. Ends the program if the table can't be used.
    """
    copy = name_copy(source, digest, **options)
    columns, where = options["columns"], options.get("where")
    fs, _ = fsspec.url_to_fs(copy)
    with explained(f"{source} can't be used"):
        if not has_file(fs, copy):
            needed = list(dict.fromkeys([*columns, *find_columns(where)]))
            with open_table(source, needed) as (schema, batches), writing(copy) as file:
                batches = filter_rows(batches, schema, where, columns, options.get("max_rows"))
                schema = pa.schema([schema.field(name) for name in columns])
                with pq.ParquetWriter(file, schema, write_statistics=False) as writer:
                    for group in cut_groups(batches, options["rows_per_group"]):
                        writer.write_table(group, len(group))
        with fs.open(copy) as file:
            parquet = pq.ParquetFile(file)
            schema = parquet.schema_arrow.remove_metadata()
            rows = parquet.metadata.num_rows
            return {"source": source, "copy": copy, "rows": rows, "schema": schema}


def select_columns(schema: pa.Schema, columns: list[str]) -> pa.Schema:
    """The schema of some columns. Raises ValueError if one is missing or occurs twice.

    string_view becomes string, since pyarrow can't filter or pick rows of it.
    """
    for name in columns:
        if schema.names.count(name) != 1:
            count = "two columns" if name in schema.names else "no column"
            flags = "--url_column, --caption_column, --keep_columns and --where"
            known = ", ".join(map(repr, schema.names))  # quoted: a name may begin with a space
            raise ValueError(f"{count} {name!r} among {known}: see {flags}")
    fields = [schema.field(name).remove_metadata() for name in columns]
    for number, field in enumerate(fields):
        if "string_view" in str(field.type):
            fields[number] = field.with_type(simplify_type(field.type))
    return pa.schema(fields)


def simplify_type(kind: pa.DataType) -> pa.DataType:
    """string for large_string, string_view and categories of text, also in lists."""
    if pa.types.is_dictionary(kind) and kind.value_type in TEXT:
        return pa.string()
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return pa.list_(simplify_type(kind.value_type))
    return pa.string() if kind in TEXT else kind


@contextlib.contextmanager
def open_table(
    url: str, columns: list[str]
) -> Iterator[tuple[pa.Schema, Iterator[pa.RecordBatch]]]:
    """Open a table; yields (schema of `columns`, iterator of record batches).

    All CSV columns are read as text. Raises ValueError if a column is missing or occurs twice.
    """
    compression = find_compression(url)
    suffix = get_suffix(url).removesuffix(".gz")
    if suffix not in (".parquet", ".csv", ".tsv"):
        schema = infer_schema(url, columns)
        yield select_columns(schema, columns), read_json_lines(url, schema, columns)
        return
    with fsspec.open(url, compression=compression) as file:
        if suffix == ".parquet":
            # With pre_buffer, the whole file would be read into memory.
            parquet = pq.ParquetFile(file, pre_buffer=False)
            schema = parquet.schema_arrow
            batches = parquet.iter_batches(10_000, columns=columns)
        else:
            parse = pa_csv.ParseOptions(
                delimiter="," if suffix == ".csv" else "\t", newlines_in_values=True
            )
            print_once(find_csv_fault(url))
            # a block holds the longest row, even with doubled quotes
            read = pa_csv.ReadOptions(block_size=2 * MAX_ROW)
            with fsspec.open(url, compression=compression) as begin:
                names = pa_csv.open_csv(begin, read, parse).schema.names
            convert = pa_csv.ConvertOptions(
                column_types=dict.fromkeys(names, pa.string()),
                null_values=[""],
                strings_can_be_null=True,
                check_utf8=False,
            )
            batches = pa_csv.open_csv(file, read, parse, convert)
            schema = batches.schema
        schema = select_columns(schema, columns)
        yield schema, (batch.select(columns).cast(schema) for batch in batches)


def list_json_rows(url: str) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """Yield the rows of JSON lines, some 10,000 at a time: (number of the first line, rows).

    Raises ValueError with the line that is not an object.
    """
    rows: list[dict[str, Any]] = []
    first = number = 1
    with fsspec.open(url, compression=find_compression(url)) as file:
        for number, line in enumerate(file, 1):
            if number == 1 and line[:2] in UTF_16:
                raise ValueError("it is in UTF-16: save it as UTF-8")
            if number == 1 and line.lstrip(b"\xef\xbb\xbf \t").startswith(b"["):
                raise ValueError("it holds a list: write one object a line, without [ and commas")
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:  # also for text that is not UTF-8
                raise ValueError(f"line {number:,} is not one JSON object: {error}") from None
            if not isinstance(row, dict):
                raise ValueError(f"line {number:,} is not a JSON object, but {line[:40]!r}")
            rows.append(row)
            if len(rows) == 10_000:
                yield first, rows
                first, rows = number + 1, []
    if rows:
        yield first, rows


def infer_schema(url: str, columns: list[str]) -> pa.Schema:
    """Read JSON lines once to find the types of `columns`; other columns have the type null.

    Dates are text, and a column of integers and fractions holds floats. Raises ValueError if the
    values of a column have several types.
    """
    types: dict[str, pa.DataType] = {}
    for first, rows in list_json_rows(url):
        types |= {name: pa.null() for row in rows for name in row if name not in types}
        for name in columns:
            try:
                new = pa.array([row.get(name) for row in rows]).type
                schemas = [pa.schema({name: kind}) for kind in (types.get(name, new), new)]
                merged = pa.unify_schemas(schemas, promote_options="permissive")
            except (pa.ArrowException, OverflowError) as error:
                raise ValueError(
                    f"the values of {name!r} have several types, or one that can't be stored, "
                    f"from line {first:,} on ({error}): make all of them text, or all numbers"
                ) from None
            if name in types:
                types[name] = merged.field(name).type
    return pa.schema(types)


def read_json_lines(url: str, schema: pa.Schema, columns: list[str]) -> Iterator[pa.RecordBatch]:
    """Read `columns` of JSON lines with the types of `infer_schema`."""
    for _, rows in list_json_rows(url):
        arrays = [
            pa.array([row.get(name) for row in rows], schema.field(name).type) for name in columns
        ]
        yield pa.RecordBatch.from_arrays(arrays, columns)


def filter_rows(
    batches: Iterator[pa.RecordBatch],
    schema: pa.Schema,
    where: str | None,
    columns: list[str],
    max_rows: int | None,
) -> Iterator[pa.RecordBatch]:
    """Yield `columns` of the rows that match `where`, at most `max_rows`; None: no limit."""
    expression = None if where is None else make_filter(where, schema)
    for batch in batches:
        table = pa.Table.from_batches([batch])
        if where is not None:
            try:
                table = table.filter(expression)
            except pa.ArrowInvalid as error:
                raise ValueError(f"--where: {find_non_number(where, table) or error}") from None
        table = table.select(columns)
        if max_rows is not None:
            table = table[:max_rows]
            max_rows -= len(table)
        yield from table.to_batches()
        if max_rows == 0:
            return


def cut_groups(batches: Iterable[pa.RecordBatch], size: int) -> Iterator[pa.Table]:
    """Cut record batches into tables of `size` rows; the last one has the rest."""
    parts = []
    count = 0
    for batch in batches:
        while len(batch):
            part = batch.slice(0, size - count)
            parts.append(part)
            batch = batch.slice(len(part))
            count += len(part)
            if count == size:
                yield pa.Table.from_batches(parts)
                parts = []
                count = 0
    if parts:
        yield pa.Table.from_batches(parts)


def make_schema(tables: list[dict], args: Namespace) -> pa.Schema:
    """The schema of the shards.

    It has the metadata of `datasets`, which then reads the column `image` as images, not as
    structs. Ends the program if the columns can't be used.
    """
    sources = {table["schema"]: table["source"] for table in tables}
    url, text, *kept = [unify_field(sources, place) for place in range(len(tables[0]["schema"]))]
    # categories (dictionary-encoded columns) of text are text
    if (url.type.value_type if pa.types.is_dictionary(url.type) else url.type) not in TEXT:
        fail(f"--url_column {args.url_column} holds {url.type}, not text")
    inner = getattr(text.type, "value_type", text.type)  # of lists and dictionary-encoded columns
    if inner not in TEXT:
        fail(
            f"--caption_column {args.caption_column} holds {text.type}, "
            "neither text nor lists of text"
        )
    for field in kept:
        if re.search(r"_view\b", str(field.type)):  # `datasets` accepts these, and can't write them
            fail(
                f"--keep_columns {field.name} holds {field.type}: convert it, for example to string"
            )
    columns = {
        "text": text.type,
        "url": pa.string(),
        "width": pa.int32(),
        "height": pa.int32(),
        "sha256": pa.string(),
        **{field.name: field.type for field in kept},
    }
    try:
        features = datasets.Features.from_arrow_schema(pa.schema(columns))
    except ValueError as error:
        fail(f"--keep_columns {' '.join(args.keep_columns)}: `datasets` has no such type ({error})")
    return datasets.Features({"image": datasets.Image(), **features}).arrow_schema


def unify_field(sources: dict[pa.Schema, str], place: int) -> pa.Field:
    """The field at a place in tables with several schemas. sources: {schema: a table with it}.

    Text of any kind is one type, and columns without any value fit all types. Ends the program if
    types differ otherwise.
    """
    name = next(iter(sources)).names[place]
    kinds = {schema.field(place).type: source for schema, source in sources.items()}
    if len(kinds) > 1:
        kinds.pop(pa.null(), None)
    simplified = {simplify_type(kind): (kind, source) for kind, source in kinds.items()}
    if len(simplified) > 1:
        (kind, source), (other, other_source), *_ = simplified.values()
        fail(
            f"column {name!r} has the type {kind} in {source}, but {other} in {other_source}: make "
            "them the same"
        )
    return pa.field(name, next(iter(kinds if len(kinds) == 1 else simplified)))


def list_items(tables: list[dict], rows_per_shard: int) -> list[dict]:
    """List all work items in order, one for each row group of the copied tables.

    An item is {"name": file of the shard, "table": source, "digest": of the source if the copy is
    still to be made, else None, "copy": its parquet copy, "group": row group, "first": first row,
    "last": row after the last}. Rows are counted within the table.
    """
    items = []
    for table in tables:
        for group, first in enumerate(range(0, table["rows"], rows_per_shard)):
            items.append(
                {
                    "table": table["source"],
                    "digest": table.get("digest"),
                    "copy": table["copy"],
                    "group": group,
                    "first": first,
                    "last": min(table["rows"], first + rows_per_shard),
                }
            )
    # All names have the same number of digits, because `datasets` sorts by name.
    digits = max(5, len(str(len(items))))
    for number, item in enumerate(items):
        item["name"] = f"data-{number:0{digits}d}-of-{len(items):0{digits}d}.parquet"
    return items


def read_rows(item: dict) -> pa.Table:
    """Read the rows of a work item. Raises OSError if the copy of the table has changed."""
    with fsspec.open(item["copy"]) as file:
        table = pq.ParquetFile(file).read_row_group(item["group"])
    if len(table) != item["last"] - item["first"]:
        raise OSError(f"{item['copy']} has changed since it was written: delete it")
    return table


def find_invalid(table: pa.Table, first: int = 0) -> set[int]:
    """The rows with text that is not UTF-8; the first row of the table has the number `first`."""
    try:
        table.validate(full=True)
    except pa.ArrowInvalid:
        half = len(table) // 2
        if half == 0:
            return {first}
        invalid = find_invalid(table.slice(0, half), first)
        return invalid | find_invalid(table.slice(half), first + half)
    return set()
