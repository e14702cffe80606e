"""Shards of images: a range of a table's rows in one file, with its record beside it."""

import collections
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import PurePosixPath

import pyarrow as pa
import pyarrow.parquet as pq

from diffusion_training.errors import fail
from diffusion_training.remote import publish

# What another day may mend, by the start of the reason: --retry_failed asks for these again.
PASSING = ("timed out", "connection", "broken off", "host not found", "HTTP 429", "HTTP 5")


def read_shard(path, first, last, spool):
    """Copy the images of a shard into `spool`. Returns ({row: image}, {row: failure}); nothing if it is damaged."""
    try:
        parquet = pq.ParquetFile(path)
        failures = {f["row"]: f for f in json.loads(parquet.metadata.metadata[b"failures"])}
        images, rows = {}, (row for row in range(first, last) if row not in failures)
        for batch in parquet.iter_batches(64, columns=["image", "width", "height", "sha256"]):
            for item in batch.to_pylist():
                start = spool.tell()
                spool.write(item.pop("image")["bytes"])
                images[next(rows)] = {"first": start, "last": spool.tell(), **item}
        return images, failures
    except (OSError, ValueError, KeyError, TypeError, StopIteration):  # a disk that is full says so again
        return {}, {}


def write_images(path, table, first, images, failures, spool, schema):
    """Write a shard: the rows of `table`, the first of which is row `first`, that have an image in `spool`."""
    groups, size = [], 0
    for row in sorted(images):  # row groups of at most 100 images or 32 MB, whichever comes first; never an empty one
        length = images[row]["last"] - images[row]["first"]
        if not groups or len(groups[-1]) == 100 or size + length > 32_000_000:
            groups, size = [*groups, []], 0
        groups[-1].append(row)
        size += length
    with pq.ParquetWriter(path, schema, compression="zstd", use_dictionary=False, write_statistics=False) as writer:
        for rows in groups:
            part = table.take(pa.array([row - first for row in rows], pa.int64()))
            columns = {name: part[name] for name in part.column_names}
            columns |= {key: [images[row][key] for row in rows] for key in ("width", "height", "sha256")}
            columns["image"] = []
            for row in rows:
                spool.seek(images[row]["first"])
                file = spool.read(images[row]["last"] - images[row]["first"])
                columns["image"].append({"bytes": file, "path": None})
            arrays = [pa.array(columns[f.name], f.type) if isinstance(columns[f.name], list) else
                      columns[f.name].cast(f.type) for f in schema]  # fmt: skip
            writer.write_table(pa.Table.from_arrays(arrays, schema=schema))
        writer.add_key_value_metadata({"failures": json.dumps(list(failures.values()))})


def name_record(folder, name):
    """The record of a shard."""
    return f"{folder}/__download__/records/{name.removesuffix('.parquet')}.json"


def list_sizes(fs, folder):
    """{name: bytes} of the files in a folder."""
    fs.invalidate_cache()
    try:
        return {PurePosixPath(entry["name"]).name: entry["size"] for entry in fs.ls(folder, detail=True)}
    except FileNotFoundError:  # object storage has no empty folders
        return {}


def read_json(data):
    """What a file of ours says; nothing if it is damaged."""
    try:
        return json.loads(data)
    except ValueError:
        return {}


def read_records(fs, folder, items):
    """Yield (item, its record) in order, by many requests at a time: object storage is quick only so."""
    with ThreadPoolExecutor(32) as pool:
        for first in range(0, len(items), 1000):
            some = items[first : first + 1000]
            paths = [name_record(folder, item["name"]) for item in some]
            yield from zip(some, map(read_json, pool.map(fs.cat_file, paths)), strict=True)


def choose_items(fs, folder, items, retry_failed):
    """The pieces of work without a record or a shard, and with `retry_failed` those with failures that may pass."""
    records, shards = list_sizes(fs, f"{folder}/__download__/records"), list_sizes(fs, folder)
    done = [item for item in items if PurePosixPath(name_record("", item["name"])).name in records]
    done = [item for item in done if item["name"] in shards]
    if retry_failed:
        records = read_records(fs, folder, done)
        done = [item for item, r in records if r and not any(f["reason"].startswith(PASSING) for f in r["failures"])]
    done = {item["name"] for item in done}
    return [item for item in items if item["name"] not in done]


def gather(fs, folder, items, scratch):
    """Write failures.jsonl from the records of all shards. Returns (images, bytes of shards, Counter of reasons)."""
    names, reasons, images = list_sizes(fs, f"{folder}/__download__/records"), collections.Counter(), 0
    if missing := sum(name_record("", item["name"]).split("/")[-1] not in names for item in items):
        fail(f"{missing} of {len(items)} shards are not in {folder}: on several machines all must share it")
    sizes = list_sizes(fs, folder)
    with open(f"{scratch}/failures", "w") as file:
        for item, record in read_records(fs, folder, items):
            path, size = f"{folder}/{item['name']}", sizes.get(item["name"])
            if size != record.get("bytes"):
                fs.rm_file(name_record(folder, item["name"]))
                fail(f"{path} has {size} bytes and should have {record.get('bytes')}: the same command mends it")
            for failure in record["failures"]:
                file.write(json.dumps({"table": record["table"], **failure}) + "\n")
                reasons[failure["reason"].split(":")[0]] += 1
            images += record["images"]
    publish(fs, f"{scratch}/failures", f"{folder}/__download__/failures.jsonl")
    return images, sum(sizes[item["name"]] for item in items), reasons
