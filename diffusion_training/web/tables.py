"""Tables of URLs and captions: found, copied to parquet, read in ranges."""

import glob
import hashlib
import os
from pathlib import PurePosixPath

import datasets
import fsspec
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.json as pa_json
import pyarrow.parquet as pq

from diffusion_training.errors import fail
from diffusion_training.remote import open_folder, publish


def list_tables(args):
    """The tables that --input names. Returns (file system, their paths in order)."""
    suffixes = (".parquet", ".csv", ".csv.gz", ".jsonl", ".jsonl.gz", ".ndjson", ".json")
    try:
        fs, path = fsspec.core.url_to_fs(args.input)
        if glob.has_magic(path):
            paths = fs.glob(path)
        else:
            paths = fs.find(path) if fs.isdir(path) else [path]
        paths = [p for p in sorted(paths) if p.endswith(suffixes) and not PurePosixPath(p).name.startswith((".", "_"))]
        if not paths or not fs.exists(paths[0]):
            raise FileNotFoundError(f"there is no file that ends in {', '.join(suffixes)}")
    except Exception as error:  # of the file system's own kinds, such as missing credentials
        fail(f"--input {args.input} can't be read: {error}")
    return fs, paths


def open_table(fs, path, columns, output_dir, scratch):
    """What a table holds: {"url" of it as parquet, "rows", "digest", "schema" of `columns`}.

    CSV and JSON lines are read once, in a stream, and copied to parquet beside the records: whoever takes a range of
    rows finds it there without reading all before it. Ends the program if the table can't be used.
    """
    try:
        source, digest = fs.unstrip_protocol(path), None
        if not path.endswith(".parquet"):
            with fs.open(path) as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            fs, folder, _ = open_folder(output_dir)
            path = f"{folder}/__download__/tables/{digest}.parquet"
            if not fs.exists(path):
                copy_table(source, columns, f"{scratch}/{digest}")
                publish(fs, f"{scratch}/{digest}", path)
        with fs.open(path) as file:
            parquet = pq.ParquetFile(file)
            names = parquet.schema_arrow.names
            if missing := [name for name in columns if name not in names]:
                raise ValueError(f"no column {missing[0]!r} but {', '.join(names)}")
            if digest is None:  # of the footer, which has sizes and statistics of all that the file holds
                file.seek(-8, os.SEEK_END)
                length = int.from_bytes(file.read(4), "little")
                file.seek(-8 - length, os.SEEK_END)
                digest = hashlib.sha256(file.read(length)).hexdigest()
            schema = pa.schema([parquet.schema_arrow.field(name).remove_metadata() for name in columns])
            rows = parquet.metadata.num_rows
        return {"url": fs.unstrip_protocol(path), "rows": rows, "digest": digest, "schema": schema}
    except (OSError, ValueError, pa.ArrowException) as error:
        fail(f"{source} can't be used ({error}): see --url_column, --caption_column and --keep_columns")


def copy_table(url, columns, path):
    """Copy `columns` of CSV or JSON lines to a local parquet file; types are those that the first megabyte shows."""
    with fsspec.open(url, compression="infer") as file:
        if ".csv" in PurePosixPath(url).suffixes:
            types = dict.fromkeys(columns[:2], pa.string())  # also if all captions of the first megabyte are numbers
            convert = pa_csv.ConvertOptions(column_types=types, null_values=[""], strings_can_be_null=True)
            parse = pa_csv.ParseOptions(newlines_in_values=True)
            reader = pa_csv.open_csv(file, parse_options=parse, convert_options=convert)
        else:
            reader = pa_json.open_json(file)
        if missing := [name for name in columns if name not in reader.schema.names]:
            raise ValueError(f"no column {missing[0]!r} but {', '.join(reader.schema.names)}")
        schema = pa.schema([reader.schema.field(name) for name in columns])
        with pq.ParquetWriter(path, schema) as writer:
            for batch in reader:
                writer.write_batch(batch.select(columns))


def make_schema(tables, args):
    """The columns of the shards, as `datasets` writes them, so that `image` is one of images and not of structs."""
    schema = tables[0]["schema"]
    for table in tables[1:]:
        if table["schema"] != schema:
            fail(f"{table['url']} has other types of columns than {tables[0]['url']}: make them the same")
    url, text, *kept = schema
    if not (pa.types.is_string(url.type) or pa.types.is_large_string(url.type)):
        fail(f"--url_column {args.url_column} holds {url.type}, not text")
    inner = text.type.value_type if pa.types.is_list(text.type) else text.type
    if not (pa.types.is_string(inner) or pa.types.is_large_string(inner)):
        fail(f"--caption_column {args.caption_column} holds {text.type}, neither text nor lists of text")
    own = {"text": text.type, "url": pa.string(), "width": pa.int32(), "height": pa.int32(), "sha256": pa.string()}
    columns = pa.schema([*own.items(), *((field.name, field.type) for field in kept)])
    try:
        kinds = datasets.Features.from_arrow_schema(columns)
    except ValueError as error:
        fail(f"--keep_columns {' '.join(args.keep_columns)}: `datasets` has no such column ({error})")
    return datasets.Features({"image": datasets.Image(), **kinds}).arrow_schema


def list_items(tables, rows_per_shard):
    """All pieces of work, in order: [{"name" of the shard, "table": URL, "first", "last" (excluded): rows of it}]."""
    ranges = [
        {"table": table["url"], "first": first, "last": min(table["rows"], first + rows_per_shard)}
        for table in tables
        for first in range(0, table["rows"], rows_per_shard)
    ]
    digits = max(5, len(str(len(ranges))))  # as many for all, since `datasets` sorts by name
    return [
        {"name": f"data-{number:0{digits}d}-of-{len(ranges):0{digits}d}.parquet", **item}
        for number, item in enumerate(ranges)
    ]


def read_rows(url, first, last, columns):
    """Rows `first` to `last` (excluded) of a parquet file, a table of `columns`. Raises OSError if there are fewer."""
    parts, start = [], 0  # `start`: row of the file that comes next
    with fsspec.open(url) as file:
        parquet = pq.ParquetFile(file)
        for group in range(parquet.num_row_groups):
            length = parquet.metadata.row_group(group).num_rows
            if start + length <= first or start >= last:
                start += length
                continue
            for batch in parquet.iter_batches(10_000, [group], columns):  # a group may be larger than the memory
                parts.append(batch.slice(max(0, first - start), max(0, last - max(first, start))))
                start += len(batch)
                if start >= last:
                    break
    if sum(map(len, parts)) != last - first:
        raise OSError(f"{url} has not as many rows as when it was listed")
    return pa.Table.from_batches(parts).select(columns)
