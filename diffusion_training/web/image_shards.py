"""Shards of images: files with a range of a table's rows, and a record of each."""

import base64
import collections
import functools
import json
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

from diffusion_training.errors.faults import explain
from diffusion_training.errors.sentences import fail
from diffusion_training.files import digest_file, fits, parse_json
from diffusion_training.remote import open_folder, remove, writing
from diffusion_training.web.tables import find_invalid

# Temporary failures, by the start of their reason: --retry_failed tries them again.
TEMPORARY = ("timed out", "connection", "broken off", "host not found", "HTTP 429", "HTTP 5")
RECORD = {"images": int, "bytes": int, "sha256": str, "table": str,
          "failures": [{"row": int, "reason": str, "tries": int}]}  # fmt: skip

# The first half of the sha256 of an image's file, and the image: (number of its shard << 32) + its
# position in the shard
DIGESTS = np.dtype([("sha256", "S16"), ("image", np.int64)])

Item = dict[str, Any]  # see `list_items`
Images = dict[int, dict[str, Any]]  # {row: result of `store_image`}


def read_shard(path: str | Path, item: Item, spool: IO[bytes]) -> Images | None:
    """Copy the images of a shard into `spool`.

    Returns {row: image}, or None if the shard is damaged or missing.
    """
    count = item["last"] - item["first"]
    try:
        parquet = pq.ParquetFile(path, page_checksum_verification=True)
        held = zlib.decompress(base64.b64decode(parquet.metadata.metadata[b"held"]))
        bits = np.frombuffer(held, np.uint8)
        rows = (np.flatnonzero(np.unpackbits(bits, count=count)) + item["first"]).tolist()
        images = {}
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
    urls = {}
    invalid = find_invalid(table, first)
    for row, (url, text) in enumerate(zip(table["url"], table["text"], strict=True), first):
        failure = failures.get(row)
        retried = failure and args.retry_failed and failure["reason"].startswith(TEMPORARY)
        if row in images or (failure and not retried):
            continue
        url = None if row in invalid else url.as_py()
        if row in invalid:
            reason = "not UTF-8"
        elif not url or not url.strip():
            reason = "no URL"
        elif text.as_py() is None:
            reason = "no caption"
        else:
            urls[row] = url.strip()  # a blank at the end would be a part of the path
            continue
        failures[row] = {"row": row, "url": url, "reason": reason, "tries": 0}
    return urls


def describe_shard(path: Path) -> dict[str, Any]:
    """The size and hash of a shard for its record: {"bytes", "sha256"}."""
    return {"sha256": digest_file(path), "bytes": path.stat().st_size}


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
    bits = np.zeros(len(table), bool)
    groups = []
    size = 0
    # A row group has at most 100 images or 32 MB, whichever comes first, but at least one image.
    for row in sorted(images):
        length = images[row]["last"] - images[row]["first"]
        if not groups or len(groups[-1]) == 100 or size + length > 32_000_000:
            groups.append([])
            size = 0
        groups[-1].append(row)
        size += length
        bits[row - first] = True
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
            columns = {name: part[name] for name in part.column_names}
            for name in ("width", "height", "sha256"):
                columns[name] = [images[row][name] for row in rows]
            columns["image"] = []
            for row in rows:
                spool.seek(images[row]["first"])
                file = spool.read(images[row]["last"] - images[row]["first"])
                columns["image"].append({"bytes": file, "path": None})
            writer.write_table(pa.table(columns, schema=schema))
        held = base64.b64encode(zlib.compress(np.packbits(bits).tobytes()))
        writer.add_key_value_metadata({"held": held.decode()})


def name_record(folder: str, name: str) -> str:
    """The path of a shard's record."""
    return f"{folder}/__download__/records/{name.removesuffix('.parquet')}.json"


def list_sizes(fs: AbstractFileSystem, folder: str) -> dict[str, int]:
    """{name: bytes} of the files in a folder."""
    fs.invalidate_cache()
    try:
        entries = fs.ls(folder, detail=True)
    except FileNotFoundError:  # object storage has no empty folders
        return {}
    return {PurePosixPath(entry["name"]).name: entry["size"] for entry in entries}


def read_json(fs: AbstractFileSystem, path: str) -> dict[str, Any]:
    """Read a dict from a JSON file; returns an empty one if the file is damaged or missing."""
    try:
        data = parse_json(fs.cat_file(path))
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
            batch = items[first : first + 1000]
            paths = [name_record(folder, item["name"]) for item in batch]
            records = pool.map(functools.partial(read_record, fs), paths)
            yield from zip(batch, records, strict=True)


def split_digests(folder: str, names: dict[int, str], parts: int) -> list[np.ndarray]:
    """The hashes of all images of some shards, split into `parts` by their first bytes.

    names: {number of a shard: its file}. Each part is an array of `DIGESTS` in the order of the
    images. Raises ValueError if a shard can't be read.
    """
    fs, root, _ = open_folder(folder)
    fs.invalidate_cache()  # the cached file sizes may be outdated
    digests = []
    for number, name in names.items():
        try:
            with fs.open(f"{root}/{name}") as file:
                texts = pq.read_table(file, columns=["sha256"])["sha256"].to_pylist()
        except Exception as error:
            advice = "delete it, and run the same command again"
            raise ValueError(f"{folder}/{name} is damaged: {advice} ({explain(error)})") from None
        of_shard = np.empty(len(texts), DIGESTS)
        halves = bytes.fromhex("".join(text[:32] for text in texts))
        of_shard["sha256"] = np.frombuffer(halves, "S16")
        of_shard["image"] = (number << 32) + np.arange(len(texts))
        digests.append(of_shard)
    joined = np.concatenate(digests)
    starts = joined["sha256"].astype("S2").view(">u2").astype(np.int64)
    return [joined[starts * parts >> 16 == part] for part in range(parts)]


def find_repeats(*digests: np.ndarray) -> np.ndarray:
    """The images, see `DIGESTS`, that repeat an earlier one. digests: in their order."""
    joined = np.concatenate(digests)
    is_repeated = np.ones(len(joined), bool)
    is_repeated[np.unique(joined["sha256"], return_index=True)[1]] = False
    return joined["image"][is_repeated]


def list_repeated(items: list[Item], images: np.ndarray) -> list[Item]:
    """The work items of images from `find_repeats`, with "repeated": positions in the shard."""
    images = np.sort(images)
    numbers, starts = np.unique(images >> 32, return_index=True)
    positions = np.split((images & 0xFFFFFFFF).astype(np.uint32), starts)[1:]
    return [
        {**items[number], "repeated": part} for number, part in zip(numbers, positions, strict=True)
    ]


def choose_items(
    fs: AbstractFileSystem, folder: str, items: list[Item], retry_failed: bool
) -> list[Item]:
    """The work items that lack a record or a shard.

    With `retry_failed`, also those with temporary failures.
    """
    records = list_sizes(fs, f"{folder}/__download__/records")
    shards = list_sizes(fs, folder)
    complete = [
        item
        for item in items
        if item["name"] in shards and item["name"].replace(".parquet", ".json") in records
    ]
    if retry_failed:
        complete = [
            item
            for item, record in read_records(fs, folder, complete)
            if record
            and not any(failure["reason"].startswith(TEMPORARY) for failure in record["failures"])
        ]
    names = {item["name"] for item in complete}
    return [item for item in items if item["name"] not in names]


def gather(fs: AbstractFileSystem, folder: str, items: list[Item]) -> dict[str, Any]:
    """Write failures.jsonl and summary.json from the records of all shards.

    Does nothing if the shards have not changed since. Returns {"images", "bytes" of the shards,
    "failures": {reason: count}}. Ends the program with an error if a shard is missing or its size
    differs from its record. `folder` is a path or an address, as for `writing`.
    """
    summary_path = f"{folder}/__download__/summary.json"
    sizes = list_sizes(fs, folder)
    missing = sum(item["name"] not in sizes for item in items)
    if missing:
        fail(
            f"{missing} of {len(items)} shards are not in {folder}: "
            "all machines must share this folder"
        )
    size = sum(sizes[item["name"]] for item in items)
    summary = read_json(fs, summary_path)
    if summary.get("bytes") == size:
        return summary
    reasons = collections.Counter()
    images = 0
    damaged = []
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
                f"{len(damaged)} shards, such as {damaged[0]}, differ from their records: "
                "run the same command again to repair them"
            )
    summary = {"images": images, "bytes": size, "failures": dict(reasons)}
    with writing(summary_path) as path:
        path.write_text(json.dumps(summary))
    return summary
