"""Shards of images: a range of a table's rows in one file, with its record beside it."""

import base64
import collections
import itertools
import json
import os
import zlib
from argparse import Namespace
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from fsspec import AbstractFileSystem

from diffusion_training.errors import explained, fail
from diffusion_training.files import digest_file, fits
from diffusion_training.remote import remove, writing
from diffusion_training.web.tables import find_invalid

# Temporary failures, by the start of their reason: --retry_failed tries them again.
PASSING = ("timed out", "connection", "broken off", "host not found", "HTTP 429", "HTTP 5")
RECORD = {"images": int, "bytes": int, "sha256": str, "table": str,
          "failures": [{"row": int, "reason": str, "tries": int}]}  # fmt: skip

Item = dict[str, Any]  # see `list_items`
Images = dict[int, dict[str, Any]]  # {row: result of `store_image`}


def read_shard(path: str | Path, item: Item, spool: IO[bytes]) -> Images | None:
    """Copy the images of a shard into `spool`.

    Returns {row: image}, or None if the shard is damaged or missing.
    """
    first, count = item["first"], item["last"] - item["first"]
    try:
        parquet = pq.ParquetFile(path, page_checksum_verification=True)
        bits = np.frombuffer(
            zlib.decompress(base64.b64decode(parquet.metadata.metadata[b"held"])), np.uint8
        )
        rows, images = (np.flatnonzero(np.unpackbits(bits, count=count)) + first).tolist(), {}
        if len(bits) != (count + 7) // 8 or len(rows) != parquet.metadata.num_rows:
            return None
        for batch in parquet.iter_batches(64, columns=["image", "width", "height", "sha256"]):
            for image in batch.to_pylist():
                start = spool.tell()
                spool.write(image.pop("image")["bytes"])
                images[rows[len(images)]] = {"first": start, "last": spool.tell(), **image}
        return images
    except (OSError, ValueError, KeyError, TypeError, zlib.error):
        # If the cause is a full disk, writing the new shard reports it.
        return None


def choose_urls(
    table: pa.Table, first: int, images: Images, failures: dict[int, dict], args: Namespace
) -> dict[int, str]:
    """Choose the rows to download, {row: URL}; rows without a usable URL are added to `failures`.

    Rows that have an image or a recorded failure are not downloaded again, except for temporary
    failures with --retry_failed. A row without a caption fails as well.
    """
    urls, invalid = {}, find_invalid(table, first)
    for row, url, text in zip(itertools.count(first), table["url"], table["text"], strict=False):
        known = failures.get(row)
        if row in images or (
            known and not (args.retry_failed and known["reason"].startswith(PASSING))
        ):
            continue
        url, text = (None, None) if row in invalid else (url.as_py(), text.as_py())
        if not url or text is None:
            reason = "not UTF-8" if row in invalid else "no caption" if url else "no URL"
            failures[row] = {"row": row, "url": url, "reason": reason, "tries": 0}
        else:
            urls[row] = url
    return urls


def describe_shard(path: str | Path) -> dict[str, Any]:
    """The size and hash of a shard for its record: {"bytes", "sha256"}."""
    return {"sha256": digest_file(Path(path)), "bytes": os.path.getsize(path)}


def write_images(
    path: str | Path,
    table: pa.Table,
    first: int,
    images: Images,
    spool: IO[bytes],
    schema: pa.Schema,
) -> None:
    """Write a shard: the rows of `table` that have an image in `spool`.

    `first` is the number of the first row of `table`. The footer has a bit for each row of `table`
    that tells whether the shard holds it, so the shard can be read without its record.
    """
    bits, groups, size = np.zeros(len(table), bool), [], 0
    # A row group has at most 100 images or 32 MB, whichever comes first, but at least one image.
    for row in sorted(images):
        length = images[row]["last"] - images[row]["first"]
        if not groups or len(groups[-1]) == 100 or size + length > 32_000_000:
            groups, size = [*groups, []], 0
        groups[-1].append(row)
        size, bits[row - first] = size + length, True
    with pq.ParquetWriter(
        path,
        schema,
        compression="zstd",
        use_dictionary=False,
        write_statistics=False,
        write_page_checksum=True,
    ) as writer:
        for rows in groups:
            part = table.take(pa.array([row - first for row in rows], pa.int64()))
            columns = {
                f.name: part[f.name].cast(f.type) for f in schema if f.name in part.column_names
            }
            columns |= {
                key: [images[row][key] for row in rows] for key in ("width", "height", "sha256")
            }
            columns["image"] = []
            for row in rows:
                spool.seek(images[row]["first"])
                file = spool.read(images[row]["last"] - images[row]["first"])
                columns["image"].append({"bytes": file, "path": None})
            writer.write_table(pa.table({f.name: columns[f.name] for f in schema}, schema=schema))
        writer.add_key_value_metadata(
            {"held": base64.b64encode(zlib.compress(np.packbits(bits).tobytes())).decode()}
        )


def name_record(folder: str, name: str) -> str:
    """The path of a shard's record."""
    return f"{folder}/__download__/records/{name.removesuffix('.parquet')}.json"


def list_sizes(fs: AbstractFileSystem, folder: str) -> dict[str, int]:
    """{name: bytes} of the files in a folder."""
    fs.invalidate_cache()
    try:
        return {
            PurePosixPath(entry["name"]).name: entry["size"] for entry in fs.ls(folder, detail=True)
        }
    except FileNotFoundError:  # object storage has no empty folders
        return {}


def read_json(fs: AbstractFileSystem, path: str) -> dict[str, Any]:
    """Read a dict from a JSON file; returns an empty one if the file is damaged or missing."""
    try:
        data = json.loads(fs.cat_file(path))
        return data if isinstance(data, dict) else {}
    except (ValueError, FileNotFoundError):
        return {}


def read_record(fs: AbstractFileSystem, path: str) -> dict[str, Any]:
    """Read the record of a shard; returns an empty dict if it is damaged or missing."""
    record = read_json(fs, path)
    return record if fits(record, RECORD) else {}


def read_records(
    fs: AbstractFileSystem, folder: str, items: list[Item]
) -> Iterator[tuple[Item, dict[str, Any]]]:
    """Yield (item, its record) in order.

    Many records are read at the same time, because each read from object storage is slow.
    """
    with ThreadPoolExecutor(32) as pool:
        for first in range(0, len(items), 1000):
            some = items[first : first + 1000]
            yield from zip(
                some,
                pool.map(lambda x: read_record(fs, name_record(folder, x["name"])), some),
                strict=True,
            )


def find_repeated(fs: AbstractFileSystem, folder: str, items: list[Item]) -> list[Item]:
    """Find the shards with files that an earlier row has too, byte for byte.

    Returns their work items, with "repeated": positions of these files in the shard. The first row
    in the order of the tables keeps the file, so the order in which shards were made does not
    matter. Needs about 100 bytes of memory per image.
    """

    def read(item: Item) -> np.ndarray:
        path = f"{folder}/{item['name']}"
        with (
            explained(f"{path} is damaged: delete it, and the same command mends it"),
            fs.open(path) as file,
        ):
            texts = pq.read_table(file, columns=["sha256"])["sha256"].to_pylist()
            return np.frombuffer(bytes.fromhex("".join(text[:32] for text in texts)), "S16")

    fs.invalidate_cache()  # the cached file sizes may be outdated
    with ThreadPoolExecutor(16) as pool:
        digests = list(pool.map(read, items))
    _, first = np.unique(np.concatenate(digests), return_index=True)
    again, ends = np.ones(sum(map(len, digests)), bool), np.cumsum([len(part) for part in digests])
    again[first] = False
    places = (np.flatnonzero(part).tolist() for part in np.split(again, ends[:-1]))
    return [{**item, "repeated": some} for item, some in zip(items, places, strict=True) if some]


def choose_items(
    fs: AbstractFileSystem, folder: str, items: list[Item], retry_failed: bool
) -> list[Item]:
    """The work items that lack a record or a shard.

    With `retry_failed`, also those with temporary failures.
    """
    records, shards = list_sizes(fs, f"{folder}/__download__/records"), list_sizes(fs, folder)
    done = [item for item in items if item["name"] in shards]
    done = [item for item in done if item["name"].replace(".parquet", ".json") in records]
    if retry_failed:
        records = read_records(fs, folder, done)
        done = [
            item
            for item, r in records
            if r and not any(f["reason"].startswith(PASSING) for f in r["failures"])
        ]
    done = {item["name"] for item in done}
    return [item for item in items if item["name"] not in done]


def gather(fs: AbstractFileSystem, folder: str, items: list[Item]) -> dict[str, Any]:
    """Write failures.jsonl and summary.json from the records of all shards.

    Does nothing if the shards have not changed since. Returns {"images", "bytes" of the shards,
    "failures": {reason: count}}. The program ends with an error if a shard is missing or its size
    differs from its record. `folder` is a path or an address, as for `writing`.
    """
    summary_path, sizes = f"{folder}/__download__/summary.json", list_sizes(fs, folder)
    if missing := sum(item["name"] not in sizes for item in items):
        fail(
            f"{missing} of {len(items)} shards are not in {folder}: "
            "on several machines all must share it"
        )
    size = sum(sizes[item["name"]] for item in items)
    if (summary := read_json(fs, summary_path)).get("bytes") == size:
        return summary
    reasons, images, damaged = collections.Counter(), 0, []
    with writing(f"{folder}/__download__/failures.jsonl") as path, open(path, "w") as file:
        for item, record in read_records(fs, folder, items):
            if sizes[item["name"]] != record.get("bytes"):
                damaged.append(item["name"])
                remove(name_record(folder, item["name"]))
                continue
            for failure in record["failures"]:
                file.write(json.dumps({"table": record["table"], **failure}) + "\n")
                reasons[failure["reason"].split(":")[0]] += 1
            images += record["images"]
        if damaged:
            fail(
                f"{len(damaged)} shards, such as {damaged[0]}, are not as recorded: "
                "the same command mends it"
            )
    summary = {"images": images, "bytes": size, "failures": dict(reasons)}
    with writing(summary_path) as path:
        path.write_text(json.dumps(summary))
    return summary
