"""Shards of images: written in order, read again, counted. A shard records its rows."""

import argparse
import hashlib
import io
import json

import datasets
import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from diffusion_training.web import image_shards as module

SCHEMA = datasets.Features({
    "image": datasets.Image(), "text": datasets.Value("string"), "url": datasets.Value("string"),
    "width": datasets.Value("int32"), "height": datasets.Value("int32"),
    "sha256": datasets.Value("string"), "id": datasets.Value("int64"),
}).arrow_schema  # fmt: skip
FIRST, LAST = 40, 52  # rows of the table


def body(row, size=20):
    return np.random.default_rng(row).bytes(size + row % 3)


def make_shard(path, failed=(41, 45), first=FIRST, last=LAST, size=20):
    """Write a shard of these rows, whose images arrive in any order. Returns the images."""
    spool, images = io.BytesIO(), {}
    for row in np.random.default_rng(0).permutation(np.arange(first, last)).tolist():
        if row not in failed:
            start = spool.tell()
            spool.write(body(row, size))
            sha256 = hashlib.sha256(body(row, size)).hexdigest()
            images[row] = {
                "first": start,
                "last": spool.tell(),
                "width": row,
                "height": 2 * row,
                "sha256": sha256,
            }
    rows = range(first, last)
    table = pa.table(
        {"url": [f"u{row}" for row in rows], "text": [f"t{row}" for row in rows], "id": rows}
    )
    module.write_images(str(path), table, first, images, spool, SCHEMA)
    return images


def read_shard(path, spool=None, first=FIRST, last=LAST):
    return module.read_shard(str(path), {"first": first, "last": last}, spool or io.BytesIO())


def test_a_shard_holds_its_images_in_the_order_of_the_table(tmp_path):
    make_shard(tmp_path / "data.parquet")
    rows = pq.read_table(tmp_path / "data.parquet").to_pylist()
    assert rows == [
        {"image": {"bytes": body(row), "path": None}, "text": f"t{row}", "url": f"u{row}",
         "width": row, "height": 2 * row,
         "sha256": hashlib.sha256(body(row)).hexdigest(), "id": row}
        for row in range(FIRST, LAST) if row not in (41, 45)
    ]  # fmt: skip
    make_shard(tmp_path / "again.parquet")
    assert (tmp_path / "again.parquet").read_bytes() == (tmp_path / "data.parquet").read_bytes()
    features = datasets.Dataset.from_parquet(
        str(tmp_path / "data.parquet"), cache_dir=str(tmp_path / "hub")
    ).features
    assert isinstance(features["image"], datasets.Image)


def test_read_shard_returns_what_was_written(tmp_path):
    images, spool = make_shard(tmp_path / "data.parquet"), io.BytesIO(b"before")
    spool.seek(6)
    again = read_shard(tmp_path / "data.parquet", spool)
    assert list(again) == sorted(images)
    for row, image in again.items():
        assert spool.getvalue()[image.pop("first") : image.pop("last")] == body(row)
        assert image == {name: images[row][name] for name in ("width", "height", "sha256")}


@pytest.mark.parametrize("failed", [range(FIRST, LAST), (), range(FIRST, LAST - 1)])
def test_shards_with_no_images_or_no_failures_are_read_back(tmp_path, failed):
    make_shard(tmp_path / "data.parquet", failed)
    images = read_shard(tmp_path / "data.parquet")
    assert list(images) == [row for row in range(FIRST, LAST) if row not in failed]
    parquet = pq.ParquetFile(tmp_path / "data.parquet")
    assert parquet.num_row_groups == bool(images)  # never an empty one, which readers reject


def test_the_footer_of_a_shard_stays_small_with_many_failures(tmp_path):
    make_shard(tmp_path / "few.parquet", range(2), 0, 3)
    few = pq.ParquetFile(tmp_path / "few.parquet").metadata.serialized_size
    make_shard(tmp_path / "many.parquet", range(1, 100_000), 0, 100_000)
    assert pq.ParquetFile(tmp_path / "many.parquet").metadata.serialized_size < few + 500
    assert list(read_shard(tmp_path / "many.parquet", first=0, last=100_000)) == [0]


def test_row_groups_have_at_most_100_rows_and_limited_bytes(tmp_path):
    make_shard(tmp_path / "many.parquet", (), 0, 250)
    make_shard(tmp_path / "large.parquet", (), 0, 5, size=15_000_000)
    for name, expected in {"many": [100, 100, 50], "large": [2, 2, 1]}.items():
        parquet = pq.ParquetFile(tmp_path / f"{name}.parquet")
        assert [
            parquet.metadata.row_group(i).num_rows for i in range(parquet.num_row_groups)
        ] == expected


def test_read_shard_rejects_damaged_files(tmp_path):
    """Missing, cut off or changed files, another range of rows, and files that are not shards."""
    path = tmp_path / "data.parquet"
    assert read_shard(path) is None
    make_shard(path)
    whole = path.read_bytes()
    for changed in (
        whole[:-1], whole[:100], b"",
        whole[:-40] + bytes(36) + whole[-4:], b"PAR1" + bytes(400) + b"PAR1",
        *(whole[:i] + bytes(4) + whole[i + 4 :] for i in (100, 140, 180)),  # of images
    ):  # fmt: skip
        path.write_bytes(changed)
        assert read_shard(path) is None
    path.write_bytes(whole)
    assert len(read_shard(path)) == 10
    assert read_shard(path, last=FIRST + 4) is None and read_shard(path, last=LAST + 10) is None
    pq.write_table(pa.table({"image": [1]}), path)
    assert read_shard(path) is None


# ------------------------------------------------------------------- records


@pytest.fixture(params=["disk", "address"])
def folder(request, tmp_path):
    """(file system, folder, items) of a finished download of four shards."""
    MemoryFileSystem.store.clear()
    url = f"file://{tmp_path}" if request.param == "disk" else "memory://bucket/out"
    fs, root = fsspec.core.url_to_fs(url)
    items = [
        {"name": f"data-{i:05d}-of-00004.parquet", "table": "t", "first": i, "last": i + 1}
        for i in range(4)
    ]
    fs.makedirs(f"{root}/__download__/records", exist_ok=True)
    for i, item in enumerate(items):
        fs.pipe_file(f"{root}/{item['name']}", bytes(100 + i))
        failures = [{"row": i, "url": "u", "reason": reason, "tries": 1} for reason in REASONS[i]]
        record = {
            "images": 3 * i,
            "bytes": 100 + i,
            "sha256": "",
            "table": "t",
            "failures": failures,
        }
        fs.pipe_file(module.name_record(root, item["name"]), json.dumps(record).encode())
    return fs, root, items


REASONS = [
    ["HTTP 404"],
    [],
    ["opted out: noai", "not an image: cannot identify"],
    ["HTTP 404", "timed out"],
]


def test_choose_items_lists_shards_without_record_or_file(folder):
    fs, root, items = folder
    choose = lambda retry=False: [
        items.index(item) for item in module.choose_items(fs, root, items, retry)
    ]
    assert choose() == [] and choose(True) == [3]  # failures that may be temporary
    fs.rm_file(f"{root}/{items[0]['name']}")
    fs.rm_file(module.name_record(root, items[2]["name"]))
    assert choose() == [0, 2] and choose(True) == [0, 2, 3]
    path = module.name_record(root, items[1]["name"])
    record, cut = json.loads(fs.cat_file(path)), {"row": 1, "reason": "HTTP 404"}
    for data in ("damaged", "[]", "{}", *(json.dumps(record | change) for change in (
        {"failures": None}, {"failures": ["x"]}, {"failures": [cut]},
        {"sha256": 3}, {"images": "3"},
    ))):  # fmt: skip
        fs.pipe_file(path, data.encode())
        assert (
            choose() == [0, 2]
            and choose(True) == [0, 1, 2, 3]
            and module.read_record(fs, path) == {}
        )
    assert module.choose_items(fs, f"{root}/new", items, False) == items


@pytest.mark.parametrize("reason", [
    "timed out", "connection: OSError x", "broken off", "host not found", "HTTP 429", "HTTP 503",
])  # fmt: skip
def test_temporary_failures_are_told_from_permanent_ones(reason):
    assert reason.startswith(module.TEMPORARY)
    assert not any(
        reason.startswith(module.TEMPORARY)
        for reason in ("HTTP 404", "private address", "opted out: noai")
    )


def gather(fs, root, items):
    return module.gather(
        fs, root if type(fs).protocol != "memory" else fs.unstrip_protocol(root), items
    )


def test_gather_lists_failures_in_order_and_counts_images(folder):
    fs, root, items = folder
    expected = {"HTTP 404": 2, "opted out": 1, "not an image": 1, "timed out": 1}
    assert gather(fs, root, items) == {"images": 18, "bytes": 406, "failures": expected}
    lines = [
        json.loads(line) for line in fs.cat_file(f"{root}/__download__/failures.jsonl").splitlines()
    ]
    assert [(line["row"], line["reason"]) for line in lines] == [
        (i, x) for i, xs in enumerate(REASONS) for x in xs
    ]
    assert lines[0] == {"table": "t", "row": 0, "url": "u", "reason": "HTTP 404", "tries": 1}


def test_gather_does_not_read_records_twice(folder, monkeypatch):
    fs, root, items = folder
    first = gather(fs, root, items)
    with monkeypatch.context() as m:
        m.setattr(module, "read_records", None)
        assert gather(fs, root, items) == first
    fs.pipe_file(f"{root}/__download__/summary.json", b"[]")
    assert gather(fs, root, items) == first


def test_gather_names_shards_that_differ_from_their_records(folder):
    fs, root, items = folder
    gather(fs, root, items)
    fs.rm_file(f"{root}/__download__/failures.jsonl")
    fs.pipe_file(f"{root}/{items[1]['name']}", bytes(50))
    fs.pipe_file(module.name_record(root, items[3]["name"]), b"{}")
    said = f"2 shards, such as {items[1]['name']}, differ from their records: run the same command"
    with pytest.raises(SystemExit, match=said):
        gather(fs, root, items)
    # the records of both shards were removed
    assert module.choose_items(fs, root, items, False) == [items[1], items[3]]
    fs.rm_file(f"{root}/{items[1]['name']}")
    with pytest.raises(
        SystemExit, match="1 of 4 shards are not in .*: all machines must share this folder"
    ):
        gather(fs, root, items)
    assert not fs.exists(f"{root}/__download__/failures.jsonl")


def test_choose_urls_skips_unusable_rows_and_retries_failed_ones():
    args = argparse.Namespace(retry_failed=False)
    table = pa.table({"url": ["u0", None, "u2", "u3", "u4"], "text": ["a", "b", None, "d", "e"]})
    failures = {3: {"row": 3, "url": "u3", "reason": "timed out", "tries": 3}}
    failures[4] = {"row": 4, "url": "u4", "reason": "HTTP 404", "tries": 1}
    assert module.choose_urls(table, 0, {}, failures, args) == {0: "u0"}
    assert [failures[row]["reason"] for row in range(1, 5)] == [
        "no URL",
        "no caption",
        "timed out",
        "HTTP 404",
    ]
    args.retry_failed = True
    assert module.choose_urls(table, 0, {0: {}}, failures, args) == {3: "u3"}
    bad = pa.Array.from_buffers(pa.string(), 2, pa.array([b"u", b"\xff"]).buffers())
    failures = {}
    assert module.choose_urls(
        pa.table({"url": bad, "text": ["a", "b"]}), 7, {}, failures, args
    ) == {7: "u"}
    assert failures == {8: {"row": 8, "url": None, "reason": "not UTF-8", "tries": 0}}


@pytest.mark.parametrize("parts", [1, 3, 7])
def test_repeated_files_are_found_by_parts_of_their_hashes(tmp_path, parts):
    shards = {"a": "xyx", "b": "zyx", "c": "", "d": "w", "e": "wvw"}
    items = [{"name": f"{name}.parquet", "table": "t"} for name in shards]
    for name, files in shards.items():
        digests = [hashlib.sha256(file.encode()).hexdigest() for file in files]
        pq.write_table(
            pa.table({"sha256": pa.array(digests, pa.string())}), tmp_path / f"{name}.parquet"
        )
    names = {number: item["name"] for number, item in enumerate(items)}
    groups = [{number: names[number] for number in group} for group in ([0, 1, 2], [3, 4])]
    split = [module.split_digests(str(tmp_path), group, parts) for group in groups]
    by_part = zip(*split, strict=True)
    images = [module.find_repeats(*digests) for digests in by_part]
    assert len(images) == parts
    found = module.list_repeated(items, np.concatenate(images))
    assert [item | {"repeated": item["repeated"].tolist()} for item in found] == [
        items[0] | {"repeated": [2]},
        items[1] | {"repeated": [1, 2]},
        items[4] | {"repeated": [0, 2]},
    ]
    assert module.list_repeated(items, np.empty(0, np.int64)) == []
    (tmp_path / "d.parquet").write_bytes(b"")
    said = "d.parquet is damaged: delete it, and run the same command again"
    with pytest.raises(ValueError, match=said):
        module.split_digests(str(tmp_path), names, parts)


def test_describe_shard_gives_size_and_hash_of_the_file(tmp_path):
    (tmp_path / "a").write_bytes(b"12")
    assert module.describe_shard(tmp_path / "a") == {
        "bytes": 2,
        "sha256": hashlib.sha256(b"12").hexdigest(),
    }


def test_list_sizes_sees_files_written_by_other_machines(folder, monkeypatch):
    """fsspec caches listings of object storage."""
    fs, root, _ = folder
    if type(fs).protocol != "memory":
        return
    listed, ls = {}, MemoryFileSystem.ls
    monkeypatch.setattr(
        MemoryFileSystem, "ls", lambda self, path, **how: listed.get(path) or ls(self, path, **how)
    )
    monkeypatch.setattr(MemoryFileSystem, "invalidate_cache", lambda self: listed.clear())
    listed[root] = ls(fs, root, detail=True)
    fs.store[f"{root}/new"] = fs.store[next(iter(fs.store))]
    assert "new" in module.list_sizes(fs, root)
