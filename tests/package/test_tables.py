"""Tables of URLs and captions of every kind: found, copied to parquet, read in ranges, refused in a sentence."""

import argparse
import gzip
import json
import shutil
from pathlib import Path

import datasets
import fsspec
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from diffusion_training.web import tables as module

COLUMNS = ["url", "text", "id"]
LOCAL = fsspec.filesystem("file")


def make_table(path, count=25, **columns):
    urls = [f"http://a/{i}" if i != 3 else None for i in range(count)]
    captions = [f'caption {i}, "quoted"\nand on' for i in range(count)]
    table = pa.table({"url": urls, "text": captions, "id": range(count), **columns})
    pq.write_table(table, path, row_group_size=7)
    return table


def list_tables(source):
    _, paths = module.list_tables(argparse.Namespace(input=str(source)))
    return paths


def open_table(path, tmp_path, columns=COLUMNS):
    (tmp_path / "out/__download__/tables").mkdir(parents=True, exist_ok=True)
    (tmp_path / "scratch").mkdir(exist_ok=True)
    return module.open_table(LOCAL, str(path), columns, f"file://{tmp_path / 'out'}", str(tmp_path / "scratch"))


def test_tables_of_any_kind_hold_the_same(tmp_path):
    table = make_table(tmp_path / "a.parquet")
    pa.csv.write_csv(table, tmp_path / "a.csv")
    lines = "".join(json.dumps(row) + "\n" for row in table.to_pylist())
    for suffix in ("jsonl", "ndjson", "json"):
        (tmp_path / f"a.{suffix}").write_text(lines)
    for name in ("a.csv", "a.jsonl"):
        with gzip.open(tmp_path / f"{name}.gz", "wb") as file:
            file.write((tmp_path / name).read_bytes())
    found = {path.split("/")[-1]: open_table(path, tmp_path) for path in list_tables(tmp_path)}
    assert list(found) == ["a.csv", "a.csv.gz", "a.json", "a.jsonl", "a.jsonl.gz", "a.ndjson", "a.parquet"]
    for name, opened in found.items():
        assert opened["rows"] == 25 and opened["schema"].names == COLUMNS, name
        for first, last in ((0, 25), (3, 4), (6, 15), (24, 25), (7, 14)):
            rows = module.read_rows(opened["url"], first, last, COLUMNS)
            assert rows.to_pylist() == table.slice(first, last - first).to_pylist(), name
    # The copy is made once; another content has another one
    copies = sorted((tmp_path / "out/__download__/tables").iterdir())
    assert len(copies) == 4  # lines of JSON are the same whatever they are called
    again = open_table(tmp_path / "a.csv", tmp_path)
    assert again == found["a.csv"] and sorted((tmp_path / "out/__download__/tables").iterdir()) == copies
    assert len({found[name]["digest"] for name in ("a.csv", "a.csv.gz", "a.jsonl", "a.parquet")}) == 4
    make_table(tmp_path / "a.parquet", 24)
    assert open_table(tmp_path / "a.parquet", tmp_path)["digest"] != found["a.parquet"]["digest"]


def test_types_hold_for_all_rows_of_a_long_csv(tmp_path):
    """Those of captions also where all of the first megabyte are numbers."""
    rows = [f"http://a/{i},{i if i < 60_000 else 'a word'},{i}\n" for i in range(60_001)]
    (tmp_path / "a.csv").write_text("url,text,id\n" + "".join(rows))
    opened = open_table(tmp_path / "a.csv", tmp_path)
    assert opened["schema"].types == [pa.string(), pa.string(), pa.int64()] and opened["rows"] == 60_001
    assert module.read_rows(opened["url"], 59_999, 60_001, COLUMNS)["text"].to_pylist() == ["59999", "a word"]


def test_tables_are_found_by_file_folder_and_glob_in_order(tmp_path):
    for name in ("b.parquet", "a.csv", "sub/c.jsonl", ".hidden.parquet", "_metadata.parquet", "notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert [path.removeprefix(f"{tmp_path}/") for path in list_tables(tmp_path)] == [
        "a.csv",
        "b.parquet",
        "sub/c.jsonl",
    ]
    assert list_tables(tmp_path / "*.csv") == list_tables(tmp_path / "a.csv") == [str(tmp_path / "a.csv")]
    for source in ("none.parquet", "*.ndjson", "notes.txt", "nowhere"):
        with pytest.raises(SystemExit, match="can't be read: there is no file that ends in .parquet, .csv"):
            list_tables(tmp_path / source)
    with pytest.raises(SystemExit, match="--input nowhere://x can't be read"):
        list_tables("nowhere://x")


@pytest.mark.parametrize("name, content, said", [
    ("a.parquet", b"no parquet at all", "a.parquet can't be used"),
    ("a.csv", b"url,text,id\nhttp://a\nhttp://b,c,d\n", "a.csv can't be used"),
    ("a.jsonl", b'{"url": "a", "text"\n', "a.jsonl can't be used"),
    ("a.csv.gz", b"url,text,id\n", "a.csv.gz can't be used"),
    ("a.csv", b"URL,text,id\na,b,1\n", "no column 'url' but URL, text, id"),
    ("a.jsonl", b'{"url": "a", "text": "b"}\n', "no column 'id' but url, text"),
    ("a.csv", b"", "a.csv can't be used"),
])  # fmt: skip
def test_bad_tables_end_in_a_sentence(tmp_path, name, content, said):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SystemExit) as stop:
        open_table(tmp_path / name, tmp_path)
    assert said in str(stop.value) and "see --url_column, --caption_column and --keep_columns" in str(stop.value)
    assert not list((tmp_path / "out/__download__/tables").iterdir())


def make_schema(tables, keep=("id",)):
    args = argparse.Namespace(url_column="url", caption_column="text", keep_columns=list(keep))
    return module.make_schema([{"url": f"file:///{i}", "schema": schema} for i, schema in enumerate(tables)], args)


def test_columns_of_shards_are_images_to_datasets():
    table = pa.schema({"url": pa.string(), "text": pa.list_(pa.string()), "id": pa.int64()})
    features = datasets.Features.from_arrow_schema(make_schema([table, table]))
    assert isinstance(features["image"], datasets.Image)
    assert list(features) == ["image", "text", "url", "width", "height", "sha256", "id"]
    for change, said in {
        "other": "file:///1 has other types of columns than file:///0: make them the same",
        "url": "--url_column url holds int64, not text",
        "text": "--caption_column text holds list<item: int64>, neither text nor lists of text",
        "id": r"--keep_columns id: `datasets` has no such column",
    }.items():
        kind = {"url": pa.int64(), "text": pa.list_(pa.int64()), "id": pa.map_(pa.string(), pa.int8())}.get(change)
        changed = table.set(table.get_field_index(change), pa.field(change, kind)) if kind else table.remove(2)
        with pytest.raises(SystemExit, match=said):
            make_schema([table, changed] if change == "other" else [changed])


def test_every_row_is_in_one_piece_of_work(tmp_path):
    tables = [{"url": "a", "rows": 10}, {"url": "b", "rows": 0}, {"url": "c", "rows": 7}]
    items = module.list_items(tables, 4)
    assert [(item["table"], item["first"], item["last"]) for item in items] == [
        ("a", 0, 4), ("a", 4, 8), ("a", 8, 10), ("c", 0, 4), ("c", 4, 7),
    ]  # fmt: skip
    assert [item["name"] for item in items] == [f"data-{i:05d}-of-00005.parquet" for i in range(5)]
    names = [item["name"] for item in module.list_items([{"url": "a", "rows": 200_000}], 1)]
    assert names == sorted(names) and names[-1] == "data-199999-of-200000.parquet"


def test_a_table_that_became_shorter_is_noticed(tmp_path):
    make_table(tmp_path / "a.parquet", 10)
    for first, last in ((8, 12), (12, 14)):
        with pytest.raises(OSError, match="a.parquet has not as many rows as when it was listed"):
            module.read_rows(str(tmp_path / "a.parquet"), first, last, COLUMNS)


def test_a_range_is_read_without_what_stands_before_it(tmp_path, monkeypatch):
    make_table(tmp_path / "a.parquet", 70)  # in groups of seven
    read, iter_batches = [], pq.ParquetFile.iter_batches
    monkeypatch.setattr(
        pq.ParquetFile,
        "iter_batches",
        lambda file, size, groups, columns: (
            read.append((groups, columns)) or iter_batches(file, size, groups, columns)
        ),
    )
    assert module.read_rows(str(tmp_path / "a.parquet"), 20, 22, ["text"])["text"][0].as_py().startswith("caption 20")
    assert read == [([2], ["text"]), ([3], ["text"])]


def test_a_half_made_copy_is_none(tmp_path, monkeypatch):
    pa.csv.write_csv(make_table(tmp_path / "a.parquet"), tmp_path / "a.csv")
    write_batch = pq.ParquetWriter.write_batch

    def killed(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as first, pytest.raises(KeyboardInterrupt):
        first.setattr(pq.ParquetWriter, "write_batch", killed)
        open_table(tmp_path / "a.csv", tmp_path)
    assert not list(Path(tmp_path / "out/__download__/tables").iterdir())
    shutil.rmtree(tmp_path / "scratch")
    assert open_table(tmp_path / "a.csv", tmp_path)["rows"] == 25 and pq.ParquetWriter.write_batch is write_batch
