"""Shards of images: written in order, read again, counted; a shard knows which of its rows failed."""

import collections
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

from diffusion_training.web import shards as module

SCHEMA = datasets.Features({
    "image": datasets.Image(), "text": datasets.Value("string"), "url": datasets.Value("string"),
    "width": datasets.Value("int32"), "height": datasets.Value("int32"), "sha256": datasets.Value("string"),
    "id": datasets.Value("int64"),
}).arrow_schema  # fmt: skip
FIRST, LAST = 40, 52  # rows of the table


def body(row, size=20):
    return np.random.default_rng(row).bytes(size + row % 3)


def make_shard(path, failed=(41, 45), first=FIRST, last=LAST, size=20):
    """A shard of these rows, whose images came in any order. Returns (table, images, failures)."""
    spool, images = io.BytesIO(), {}
    for row in np.random.default_rng(0).permutation(np.arange(first, last)).tolist():
        if row not in failed:
            start = spool.tell()
            spool.write(body(row, size))
            sha256 = hashlib.sha256(body(row, size)).hexdigest()
            images[row] = {"first": start, "last": spool.tell(), "width": row, "height": 2 * row, "sha256": sha256}
    failures = {row: {"row": row, "url": f"u{row}", "reason": "HTTP 404", "tries": 1} for row in failed}
    rows = range(first, last)
    table = pa.table({"url": [f"u{row}" for row in rows], "text": [f"t{row}" for row in rows], "id": rows})
    module.write_images(str(path), table, first, images, failures, spool, SCHEMA)
    return table, images, failures


def test_a_shard_holds_its_images_in_the_order_of_the_table(tmp_path):
    make_shard(tmp_path / "data.parquet")
    rows = pq.read_table(tmp_path / "data.parquet").to_pylist()
    assert rows == [
        {"image": {"bytes": body(row), "path": None}, "text": f"t{row}", "url": f"u{row}", "width": row,
         "height": 2 * row, "sha256": hashlib.sha256(body(row)).hexdigest(), "id": row}
        for row in range(FIRST, LAST) if row not in (41, 45)
    ]  # fmt: skip
    make_shard(tmp_path / "again.parquet")
    assert (tmp_path / "again.parquet").read_bytes() == (tmp_path / "data.parquet").read_bytes()
    features = datasets.Dataset.from_parquet(str(tmp_path / "data.parquet"), cache_dir=str(tmp_path / "hub")).features
    assert isinstance(features["image"], datasets.Image)


def test_a_shard_is_read_as_it_was_written(tmp_path):
    _, images, failures = make_shard(tmp_path / "data.parquet")
    spool = io.BytesIO(b"before")
    spool.seek(6)
    again, failed = module.read_shard(str(tmp_path / "data.parquet"), FIRST, LAST, spool)
    assert failed == failures and list(again) == sorted(images)
    for row, image in again.items():
        assert spool.getvalue()[image.pop("first") : image.pop("last")] == body(row)
        assert image == {name: images[row][name] for name in ("width", "height", "sha256")}


@pytest.mark.parametrize("failed", [range(FIRST, LAST), (), range(FIRST, LAST - 1)])
def test_shards_without_an_image_and_without_a_failure(tmp_path, failed):
    make_shard(tmp_path / "data.parquet", failed)
    images, failures = module.read_shard(str(tmp_path / "data.parquet"), FIRST, LAST, io.BytesIO())
    assert list(failures) == list(failed) and len(images) == LAST - FIRST - len(failed)
    parquet = pq.ParquetFile(tmp_path / "data.parquet")
    assert parquet.num_row_groups == bool(images)  # never an empty one, which readers stumble over


def test_row_groups_are_small_enough_for_who_reads_one(tmp_path):
    make_shard(tmp_path / "many.parquet", (), 0, 250)
    make_shard(tmp_path / "large.parquet", (), 0, 5, size=15_000_000)
    for name, expected in {"many": [100, 100, 50], "large": [2, 2, 1]}.items():
        parquet = pq.ParquetFile(tmp_path / f"{name}.parquet")
        assert [parquet.metadata.row_group(i).num_rows for i in range(parquet.num_row_groups)] == expected


def test_of_a_damaged_shard_nothing_is_taken(tmp_path):
    """What is gone, cut, of another range, or no shard; that bytes have changed in the middle is for the checksum."""
    path = tmp_path / "data.parquet"
    assert module.read_shard(str(path), FIRST, LAST, io.BytesIO()) == ({}, {})
    make_shard(path)
    whole = path.read_bytes()
    for changed in (
        whole[:-1],
        whole[:100],
        b"",
        whole[:-40] + bytes(36) + whole[-4:],
        b"PAR1" + bytes(400) + b"PAR1",
    ):
        path.write_bytes(changed)
        assert module.read_shard(str(path), FIRST, LAST, io.BytesIO()) == ({}, {})
    path.write_bytes(whole)
    assert module.read_shard(str(path), FIRST, FIRST + 4, io.BytesIO()) == ({}, {})
    pq.write_table(pa.table({"image": [1]}), path)
    assert module.read_shard(str(path), FIRST, LAST, io.BytesIO()) == ({}, {})


# ------------------------------------------------------------------------------------------------- records


@pytest.fixture(params=["disk", "address"])
def folder(request, tmp_path):
    """(file system, folder, pieces of work) of a download of four shards, whole."""
    MemoryFileSystem.store.clear()
    url = f"file://{tmp_path}" if request.param == "disk" else "memory://bucket/out"
    fs, root = fsspec.core.url_to_fs(url)
    items = [{"name": f"data-{i:05d}-of-00004.parquet", "table": "t", "first": i, "last": i + 1} for i in range(4)]
    fs.makedirs(f"{root}/__download__/records", exist_ok=True)
    for i, item in enumerate(items):
        fs.pipe_file(f"{root}/{item['name']}", bytes(100 + i))
        failures = [{"row": i, "url": "u", "reason": reason, "tries": 1} for reason in REASONS[i]]
        record = {"images": 3 * i, "bytes": 100 + i, "sha256": "", "table": "t", "failures": failures}
        fs.pipe_file(module.name_record(root, item["name"]), json.dumps(record).encode())
    return fs, root, items


REASONS = [["HTTP 404"], [], ["opted out: noai", "not an image: cannot identify"], ["HTTP 404", "timed out"]]


def test_what_is_missing_is_what_has_no_record_or_no_shard(folder):
    fs, root, items = folder
    choose = lambda retry=False: [items.index(item) for item in module.choose_items(fs, root, items, retry)]  # noqa: E731
    assert choose() == [] and choose(True) == [3]  # what another day may mend
    fs.rm_file(f"{root}/{items[0]['name']}")
    fs.rm_file(module.name_record(root, items[2]["name"]))
    assert choose() == [0, 2] and choose(True) == [0, 2, 3]
    fs.pipe_file(module.name_record(root, items[1]["name"]), b"damaged")
    assert choose() == [0, 2] and choose(True) == [0, 1, 2, 3]
    assert module.choose_items(fs, f"{root}/new", items, False) == items


@pytest.mark.parametrize("reason", ["timed out", "connection: OSError x", "broken off", "host not found", "HTTP 429",
                                    "HTTP 503"])  # fmt: skip
def test_what_may_pass_is_tried_again(reason):
    assert reason.startswith(module.PASSING)
    assert not any(reason.startswith(module.PASSING) for reason in ("HTTP 404", "private address", "opted out: noai"))


def test_failures_are_gathered_in_order_and_everything_is_counted(folder, tmp_path):
    fs, root, items = folder
    images, size, reasons = module.gather(fs, root, items, tmp_path)
    assert (images, size) == (18, 406)
    expected = {"HTTP 404": 2, "opted out": 1, "not an image": 1, "timed out": 1}
    assert reasons == collections.Counter(expected)
    lines = [json.loads(line) for line in fs.cat_file(f"{root}/__download__/failures.jsonl").splitlines()]
    assert [(line["row"], line["reason"]) for line in lines] == [(i, x) for i, xs in enumerate(REASONS) for x in xs]
    assert lines[0] == {"table": "t", "row": 0, "url": "u", "reason": "HTTP 404", "tries": 1}


def test_a_shard_that_is_not_as_recorded_is_named_to_be_mended(folder, tmp_path):
    fs, root, items = folder
    fs.pipe_file(f"{root}/{items[1]['name']}", bytes(50))
    with pytest.raises(
        SystemExit, match=f"{items[1]['name']} has 50 bytes and should have 101: the same command mends"
    ):
        module.gather(fs, root, items, tmp_path)
    assert module.choose_items(fs, root, items, False) == [items[1]]  # its record is gone
    with pytest.raises(SystemExit, match="1 of 4 shards are not in .*: on several machines all must share it"):
        module.gather(fs, root, items, tmp_path)
    assert not fs.exists(f"{root}/__download__/failures.jsonl")


def test_what_can_not_be_read_as_json_says_nothing():
    assert module.read_json(b'{"a": 1}') == {"a": 1} and module.read_json(b'{"a"') == module.read_json(b"\xff") == {}
