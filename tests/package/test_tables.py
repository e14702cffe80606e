"""Tables of URLs and captions: found, copied to parquet and read in ranges, or refused."""

import argparse
import functools
import gzip
import hashlib
import http.server
import io
import json
import os
import re
import threading

import datasets
import fsspec
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from diffusion_training import csv_files
from diffusion_training.web import tables as module
from diffusion_training.web.image_shards import write_images

COLUMNS = ["url", "text", "id"]
COPIES = "__download__/tables"
LOCAL = fsspec.filesystem("file")


def make_table(path, count=25, **columns):
    urls = [f"http://a/{i}" if i != 3 else None for i in range(count)]
    captions = [f'caption {i}, "quoted"\nand on' for i in range(count)]
    table = pa.table({"url": urls, "text": captions, "id": range(count), **columns})
    pq.write_table(table, path, row_group_size=7)
    return table


def list_tables(source):
    _, paths = module.list_tables(argparse.Namespace(input=str(source), output_dir="/nowhere"))
    return paths


def copy_table(path, tmp_path, columns=COLUMNS, rows=10):
    """Copy the table as the download does, named by its digest."""
    (tmp_path / COPIES).mkdir(parents=True, exist_ok=True)
    digest = module.digest_table(LOCAL, str(path))
    options = {"columns": columns, "rows_per_group": rows, "folder": str(tmp_path)}
    return module.copy_table(f"file://{path}", digest, **options) | {"digest": digest}


def read_copy(table, rows=10):
    items = module.list_items([table], rows)
    return [row for item in items for row in module.read_rows(item).to_pylist()], items


def test_tables_of_all_formats_give_the_same_rows(tmp_path):
    table = make_table(tmp_path / "a.parquet")
    pa.csv.write_csv(table, tmp_path / "a.csv")
    pa.csv.write_csv(table, tmp_path / "a.tsv", pa.csv.WriteOptions(delimiter="\t"))
    lines = "".join(json.dumps(row) + "\n" for row in table.to_pylist())
    for suffix in ("jsonl", "ndjson", "json"):
        (tmp_path / f"a.{suffix}").write_text(lines)
    for name in ("a.csv", "a.jsonl"):
        with gzip.open(tmp_path / f"{name}.gz", "wb") as file:
            file.write((tmp_path / name).read_bytes())
    names = "a.csv a.csv.gz a.json a.jsonl a.jsonl.gz a.ndjson a.parquet a.tsv".split()
    assert [path.split("/")[-1] for path in list_tables(tmp_path)] == names
    found = {name: copy_table(tmp_path / name, tmp_path) for name in names}
    for name, opened in found.items():
        assert opened["rows"] == 25 and opened["schema"].names == COLUMNS, name
        text = lambda x: str(x) if "sv" in name else x
        rows, items = read_copy(opened)
        assert (
            rows == [row | {"id": text(row["id"])} for row in table.to_pylist()] and len(items) == 3
        ), name
        assert (
            items[2]["table"] == opened["source"] == f"file://{tmp_path / name}"
            and items[2]["group"] == 2
        )
    # a copy is made once; changed content gets a new copy
    copies = {path: path.stat().st_ino for path in (tmp_path / COPIES).iterdir()}
    assert len(copies) == len(names)
    again = copy_table(tmp_path / "a.csv", tmp_path)
    assert (
        again == found["a.csv"]
        and {path: path.stat().st_ino for path in (tmp_path / COPIES).iterdir()} == copies
    )
    assert (
        len(
            {
                found[name]["digest"]
                for name in ("a.csv", "a.csv.gz", "a.jsonl", "a.parquet", "a.tsv")
            }
        )
        == 5
    )
    make_table(tmp_path / "a.parquet", 24)
    assert copy_table(tmp_path / "a.parquet", tmp_path)["digest"] != found["a.parquet"]["digest"]
    data = (tmp_path / "a.parquet").read_bytes()
    footer = data[-8 - int.from_bytes(data[-8:-4], "little") : -8]
    assert (
        module.digest_table(LOCAL, str(tmp_path / "a.parquet"))
        == hashlib.sha256(footer).hexdigest()
    )
    # other columns or row counts get a copy of their own
    other = copy_table(tmp_path / "a.csv", tmp_path, ["text", "url"], 4)
    assert other["schema"].names == ["text", "url"] and len(read_copy(other, 4)[1]) == 7


def test_csv_columns_stay_unchanged_text(tmp_path):
    """This holds even if the first megabyte has only numbers. Unused columns may hold anything."""
    rows = [
        f"http://a/{i},{i if i < 60_000 else 'a word'},{i:07d},{i % 60_000 or 'x'}\n"
        for i in range(60_001)
    ]
    (tmp_path / "a.csv").write_text("url,text,id,other\n" + "".join(rows))
    opened = copy_table(tmp_path / "a.csv", tmp_path, rows=50_000)
    assert opened["schema"].types == [pa.string()] * 3 and opened["rows"] == 60_001
    assert read_copy(opened, 50_000)[0][-2:] == [
        {"url": "http://a/59999", "text": "59999", "id": "0059999"},
        {"url": "http://a/60000", "text": "a word", "id": "0060000"},
    ]


def test_csv_words_like_null_and_nan_stay_words(tmp_path):
    words = ["NA", "null", "nan", "N/A", ""]
    (tmp_path / "a.csv").write_text("url,text,id\n" + "".join(f"u,{word},1\n" for word in words))
    rows, _ = read_copy(copy_table(tmp_path / "a.csv", tmp_path))
    assert [row["text"] for row in rows] == [*words[:-1], None]


def test_find_invalid_lists_rows_that_are_not_utf_8(tmp_path):
    (tmp_path / "a.csv").write_bytes(
        b"url,text,id\n"
        + b"".join(
            b"u%d,caption \xff,1\n" % i if i in (0, 17) else b"u%d,good,1\n" % i for i in range(20)
        )
    )
    data = pa.array([b"good", b"\xff"] * 10)
    text = pa.Array.from_buffers(pa.string(), 20, data.buffers())
    pq.write_table(
        pa.table({"url": text, "text": ["a"] * 20, "id": [[["b"]]] * 20}), tmp_path / "a.parquet"
    )
    for name, expected in {"a.csv": {0, 17}, "a.parquet": set(range(1, 20, 2))}.items():
        (item,) = module.list_items([copy_table(tmp_path / name, tmp_path, rows=100)], 100)
        assert module.find_invalid(module.read_rows(item)) == expected
        assert module.find_invalid(module.read_rows(item), 1000) == {1000 + row for row in expected}


def test_list_tables_accepts_a_file_a_folder_or_a_glob(tmp_path):
    named = "b.parquet a.csv sub/c.jsonl .hidden.parquet _metadata.parquet d.parquet.gz".split()
    for name in (*named, "sub/.ipynb_checkpoints/c.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert [path.removeprefix(f"{tmp_path}/") for path in list_tables(tmp_path)] == [
        "a.csv",
        "b.parquet",
        "sub/c.jsonl",
    ]
    assert (
        list_tables(tmp_path / "*.csv")
        == list_tables(tmp_path / "a.csv")
        == [str(tmp_path / "a.csv")]
    )
    (tmp_path / "a.csv").rename(tmp_path / "a[1].csv")
    os.mkfifo(tmp_path / "pipe.parquet")
    assert list_tables(tmp_path / "a[1].csv") == [str(tmp_path / "a[1].csv")]
    for source, said in {
        "none.parquet": "it does not exist",
        "nowhere": "it does not exist",
        "{b,none}.parquet": "it does not exist",
        "*.ndjson": "there is no file that ends in .parquet, .csv",
        "d.parquet.gz": "its name does not end in .parquet, .csv",
        "pipe.parquet": "it is neither a file nor a folder",
    }.items():
        with pytest.raises(SystemExit, match=f"can't be read: {said}"):
            list_tables(tmp_path / source)
    both = [str(tmp_path / name) for name in ("a[1].csv", "b.parquet")]
    assert list_tables(tmp_path / "{b.parquet,a[[]1].csv}") == both
    (tmp_path / "sub/link.parquet").symlink_to(tmp_path / "b.parquet")
    assert list_tables(tmp_path / "**/link*") == [str(tmp_path / "sub/link.parquet")]
    (tmp_path / "sub/link.parquet").unlink()
    # neither a glob nor a folder reads hidden folders
    (tmp_path / "sub/__download__/tables").mkdir(parents=True)
    (tmp_path / "sub/__download__/tables/1.parquet").touch()
    (tmp_path / "sub/_metadata.parquet").touch()
    every = [*both, str(tmp_path / "sub/c.jsonl")]
    assert list_tables(tmp_path / "**") == list_tables(tmp_path) == every
    hidden = tmp_path / "sub/.ipynb_checkpoints/c.jsonl"
    assert list_tables(tmp_path / "*/.ipynb*/*.jsonl") == [str(hidden)]
    (tmp_path / ".kept").mkdir()
    (tmp_path / ".kept/a1.csv").touch()
    assert (
        list_tables(tmp_path / ".kept")
        == list_tables(tmp_path / ".kept/a?.csv")
        == [str(tmp_path / ".kept/a1.csv")]
    )
    with pytest.raises(SystemExit, match="--input nowhere://x can't be read"):
        list_tables("nowhere://x")
    # The download's own files there are not tables
    args = argparse.Namespace(input=str(tmp_path), output_dir=str(tmp_path / "sub"))
    assert [path.split("/")[-1] for path in module.list_tables(args)[1]] == [
        "a[1].csv",
        "b.parquet",
    ]


def test_the_query_of_a_url_is_no_part_of_a_tables_name(tmp_path):
    for name, suffix in {
        "https://host/a.Parquet?download=true": ".parquet",
        "https://host/a.csv.gz?sig=x.tsv": ".csv.gz",
        str(tmp_path / "what?.tsv"): ".tsv",
    }.items():
        assert csv_files.get_suffix(name) == suffix
    table = make_table(tmp_path / "a.parquet")
    pa.csv.write_csv(table, tmp_path / "a.csv")
    (tmp_path / "a.csv.gz").write_bytes(gzip.compress((tmp_path / "a.csv").read_bytes()))
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=tmp_path)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        for name in ("a.parquet", "a.csv.gz"):
            url = f"{address}/{name}?download=true"
            assert list_tables(url) == [url]
            with module.open_table(url, COLUMNS) as (_, batches):
                assert sum(map(len, batches)) == 25
        with pytest.raises(SystemExit, match="no.parquet.download=true can't be read: it does no"):
            list_tables(f"{address}/no.parquet?download=true")
        server.shutdown()


def read_lines(tmp_path, lines, name="a.jsonl"):
    """The rows of JSON lines, and their types, or the error."""
    (tmp_path / name).write_text("".join(line + "\n" for line in lines))
    table = copy_table(tmp_path / name, tmp_path, rows=10**6)
    rows, _ = read_copy(table, 10**6)
    return rows, dict(zip(COLUMNS, map(str, table["schema"].types), strict=True))


def test_json_lines_have_the_types_of_all_their_rows(tmp_path):
    """Not those of the first megabyte."""
    few = ['{"url": "u", "text": "a caption", "id": 1}'] * 10_001
    for last, kind, value in (
        ('"id": 2.5, "more": "x"', "double", 2.5),
        ('"id": null', "int64", None),
        ('"other": [1]', "int64", None),
    ):
        rows, types = read_lines(tmp_path, [*few, "", f'{{"url": "v", "text": "b", {last}}}'])
        assert types == {"url": "string", "text": "string", "id": kind}
        assert rows[-1] == {"url": "v", "text": "b", "id": value} and len(rows) == 10_002
    first = '{"url": "u", "text": [], "id": null}'
    rows, types = read_lines(tmp_path, [first] * 10_001 + [first.replace("[]", '["a", null]')])
    assert types["text"].startswith("list<") and rows[-1]["text"] == ["a", None]
    rows, types = read_lines(tmp_path, ['{"url": "u", "text": "2020-01-01", "id": "x"}'])
    assert types["text"] == "string" and rows[0]["text"] == "2020-01-01"


@pytest.mark.parametrize("lines, said", [
    (["[", '{"url": "u"},'], "it holds a list: write one object a line"),
    (["{", '"url": "u"}'], "line 1 is not one JSON object"),
    (['{"url": "u"}', "", "3"], "line 3 is not a JSON object, but b'3"),
    (['{"url": "u", "text": "a", "id": 1}', '{"url": "u", "text": "a", "id": "x"}'],
     "the values of 'id' have several types, or one that can't be stored, from line 1 on"),
    (['{"url": "u", "text": "a", "id": 1}'] * 10_000 + ['{"id": "x"}'],
     "the values of 'id' have several types, or one that can't be stored, from line 10,001 on"),
    (['{"url": "u", "text": "a", "id": 1%s}' % ("0" * 30)], "or one that can't be stored"),
])  # fmt: skip
def test_json_lines_that_are_no_table_end_in_a_sentence(tmp_path, lines, said):
    with pytest.raises(SystemExit, match=re.escape(said)) as stop:
        read_lines(tmp_path, lines)
    assert "a.jsonl can't be used" in str(stop.value)


def test_text_in_utf_16_and_long_rows_end_in_a_sentence(tmp_path):
    for name, text in {"a.csv": "url,text,id\nu,t,1\n", "a.jsonl": '{"url": "u"}\n'}.items():
        (tmp_path / name).write_text(text, encoding="utf-16")
        with pytest.raises(SystemExit, match=r"a.(csv|jsonl) can't be used .it is in UTF-16: save"):
            copy_table(tmp_path / name, tmp_path)
    part = "x" * 700_000
    (tmp_path / "a.csv").write_text(f"url,text,id\n{part},{part},1\n" * 3)
    assert len(read_copy(copy_table(tmp_path / "a.csv", tmp_path))[0]) == 5  # two are like headers
    (tmp_path / "a.csv").write_text("url,text,id" + ",more" * 6 + f"\nu,t,1{f',{part}' * 6}\n")
    with pytest.raises(SystemExit, match="begins in line 2 can't .*more than 4,194,304 characters"):
        copy_table(tmp_path / "a.csv", tmp_path)


def list_dataset_tables(name, split="train", config=None):
    args = argparse.Namespace(
        input=None, dataset_name=str(name), dataset_config_name=config, dataset_split=split
    )
    return module.list_tables(args)


def test_list_tables_takes_the_split_and_config_of_a_data_set(tmp_path):
    for name in (
        "data/train-0.parquet",
        "data/train-1.parquet",
        "data/test-0.parquet",
        "more/train.csv",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        make_table(tmp_path / name)
    (tmp_path / "more/train.csv").write_text("url,text\n")
    paths = lambda *more: [
        path.removeprefix(f"{tmp_path}/") for path in list_dataset_tables(*more)[1]
    ]
    assert paths(tmp_path / "data") == ["data/train-0.parquet", "data/train-1.parquet"]
    assert paths(tmp_path / "data", "test") == ["data/test-0.parquet"]
    configs = (
        "configs:\n- {config_name: one, data_files: data/test-*}\n"
        "- {config_name: two, data_files: more/*}\n"
    )
    (tmp_path / "README.md").write_text(f"---\n{configs}---\n")
    assert paths(tmp_path, "train", "two") == ["more/train.csv"]
    with pytest.raises(
        SystemExit,
        match="--dataset_name .* can't be read .it has no split 'dev'; its splits: train",
    ):
        list_dataset_tables(tmp_path / "data", "dev")
    with pytest.raises(SystemExit, match="can't be read .*Config name is missing"):
        list_dataset_tables(tmp_path)
    (tmp_path / "text").mkdir()
    (tmp_path / "text/a.txt").write_text("no table")
    with pytest.raises(
        SystemExit, match="a.txt is not a table of URLs, whose name ends in .parquet"
    ):
        list_dataset_tables(tmp_path / "text")


def test_hub_data_sets_are_read_at_one_commit(monkeypatch):
    """The listing names the commit. Workers open the files without loading the data set."""
    urls = [f"hf://datasets/a/b@0123abc/data/{i}.parquet" for i in range(2)]
    said = argparse.Namespace(config=argparse.Namespace(data_files={"train": urls}))
    monkeypatch.setattr(module.datasets, "load_dataset_builder", lambda name, config: said)
    fs, paths = list_dataset_tables("a/b")
    assert [fs.unstrip_protocol(path) for path in paths] == urls and type(
        fs
    ).__name__ == "HfFileSystem"


@pytest.mark.parametrize("name, content, said", [
    ("a.parquet", b"no parquet at all", "a.parquet can't be used"),
    ("a.csv", b"url,text,id\nhttp://a\nhttp://b,c,d\n", "a.csv can't be used"),
    ("a.jsonl", b'{"url": "a", "text"\n', "a.jsonl can't be used"),
    ("a.csv.gz", b"url,text,id\n", "a.csv.gz can't be used"),
    ("a.csv", b"URL,text,id\na,b,1\n", "no column 'url' among 'URL', 'text', 'id'"),
    ("a.csv", b"url, text,id\na,b,1\n", "no column 'text' among 'url', ' text', 'id'"),
    ("a.csv", b'url,text,id\na,b,1\na,"b,1\na,b,1\n', "the row that begins in line 3 can't be"),
    ("a.jsonl", b'{"url": "a", "text": "b"}\n', "no column 'id' among 'url', 'text'"),
    ("a.csv", b"", "a.csv can't be used"),
    ("a.csv.gz", gzip.compress(b"url,text,id\n" + bytes(range(256)) * 99, mtime=0)[:-9],
     "a.csv.gz can't be used"),
    ("a.csv", b"url,text,id,text\na,b,1,c\n", "two columns 'text' among 'url', 'text', 'id', 'te"),
])  # fmt: skip
def test_bad_tables_end_in_one_sentence(tmp_path, name, content, said):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SystemExit) as stop:
        copy_table(tmp_path / name, tmp_path)
    assert said in str(stop.value)
    assert (
        "see --url_column, --caption_column, --keep_columns and --where" in str(stop.value)
    ) == ("column" in said)
    assert not list((tmp_path / COPIES).iterdir())


def test_broken_parquet_files_are_named(tmp_path):
    pq.write_table(pa.table({"url": ["a"] * 99}), tmp_path / "a.parquet")
    whole = (tmp_path / "a.parquet").read_bytes()
    for content in (whole[:-9], whole[:9], b"version https://git-lfs.github.com/spec/v1"):
        (tmp_path / "a.parquet").write_bytes(content)
        with pytest.raises(
            SystemExit, match="a.parquet can't be used .*(magic bytes|footer).*parquet"
        ):
            module.digest_table(fsspec.filesystem("file"), str(tmp_path / "a.parquet"))


def make_schema(tables, keep=("id",)):
    args = argparse.Namespace(url_column="url", caption_column="text", keep_columns=list(keep))
    return module.make_schema(
        [{"source": f"file:///{i}", "schema": schema} for i, schema in enumerate(tables)], args
    )


def test_make_schema_gives_columns_that_datasets_reads():
    table = pa.schema({"url": pa.string(), "text": pa.list_(pa.string()), "id": pa.int64()})
    features = datasets.Features.from_arrow_schema(make_schema([table, table]))
    assert isinstance(features["image"], datasets.Image)
    assert list(features) == ["image", "text", "url", "width", "height", "sha256", "id"]
    category = pa.dictionary(pa.int8(), pa.string())
    assert "url" in make_schema([table.set(0, pa.field("url", category))]).names
    for text in (
        pa.large_string(),
        pa.list_(pa.large_string()),
        pa.large_list(pa.large_string()),
        category,
    ):
        assert (
            "text"
            in make_schema(
                [pa.schema({"url": pa.large_string(), "text": text, "id": pa.int64()})]
            ).names
        )
    for change, said in {
        "other": "column 'id' has the type int64 in file:///0, but string in file:///1: make them",
        "url": "--url_column url holds int64, not text",
        "text": "--caption_column text holds list<item: int64>, neither text nor lists of text",
        "id": r"--keep_columns id: `datasets` has no such type",
        "view": "--keep_columns view holds list<item: string_view>: convert it, for example to str",
    }.items():
        kind = {
            "url": pa.int64(),
            "text": pa.list_(pa.int64()),
            "id": pa.map_(pa.string(), pa.int8()),
            "other": pa.string(),
        }.get(change)
        place = "id" if change == "other" else change
        changed = table
        if kind:
            changed = table.set(table.get_field_index(place), pa.field(place, kind))
        if change == "view":
            changed = table.append(pa.field("view", pa.list_(pa.string_view())))
        with pytest.raises(SystemExit, match=said):
            make_schema([table, changed] if change == "other" else [changed])


TEXTS = {
    "plain": pa.string(),
    "large": pa.large_string(),
    "view": pa.string_view(),
    "category": pa.dictionary(pa.int8(), pa.string()),
    "large_category": pa.dictionary(pa.int32(), pa.large_string()),
    "empty": pa.null(),
}


@pytest.mark.parametrize("first", TEXTS)
def test_tables_with_text_of_any_kind_are_one_download(tmp_path, first):
    """pandas 2, pandas 3 and polars write different types; a column may also have no value."""
    if first == "empty":  # of all columns only those that are kept
        pytest.raises(SystemExit, make_schema, [pa.schema({"url": pa.null(), "text": pa.null()})])
    tables = []
    for name in dict.fromkeys([first, *TEXTS]):
        texts = pa.array(["a", None, "c"])
        text = pa.nulls(3) if name == "empty" else texts.cast(TEXTS[name])
        columns = {"url": texts if name == "empty" else text, "text": text, "id": text}
        pq.write_table(pa.table(columns), tmp_path / f"{name}.parquet")
        tables.append(copy_table(tmp_path / f"{name}.parquet", tmp_path))
    args = argparse.Namespace(url_column="url", caption_column="text", keep_columns=["id"])
    schema = module.make_schema(tables, args)
    for name in ("url", "text", "id"):
        assert schema.field(name).type == pa.string()
    spool = io.BytesIO(b"image")
    images = {row: {"first": 0, "last": 5, "width": 1, "height": 1, "sha256": ""} for row in (0, 2)}
    for table in tables:
        (item,) = module.list_items([table], 10)
        rows = module.read_rows(item)
        write_images(tmp_path / "shard.parquet", rows, 0, images, spool, schema)
        found = pq.read_table(tmp_path / "shard.parquet")
        expected = [None, None] if table["source"].endswith("/empty.parquet") else ["a", "c"]
        assert found["text"].to_pylist() == found["id"].to_pylist() == expected
        assert found.schema.field("text").type == pa.string()


def test_tables_of_one_kind_of_text_keep_it():
    """So that the shards of older downloads have the same bytes."""
    for kind in (pa.large_string(), pa.list_(pa.large_string()), pa.list_(pa.string())):
        table = pa.schema({"url": pa.string(), "text": kind, "id": pa.int64()})
        assert make_schema([table, table]).field("text").type == kind
    lists = [pa.list_(pa.string()), pa.large_list(pa.large_string())]  # of pandas and polars
    tables = [pa.schema({"url": pa.string(), "text": kind, "id": pa.int64()}) for kind in lists]
    assert make_schema(tables).field("text").type == pa.list_(pa.string())


def test_where_reads_text_of_any_kind(tmp_path):
    (tmp_path / COPIES).mkdir(parents=True)
    for name in ("plain", "large", "view", "category"):
        texts = pa.array(["a", None, "c"]).cast(TEXTS[name])
        table = pa.table({"url": texts, "text": texts, "kind": texts})
        pq.write_table(table, tmp_path / f"{name}.parquet")
        copied = module.copy_table(
            f"file://{tmp_path}/{name}.parquet", "0", columns=["url", "text"], rows_per_group=9,
            folder=str(tmp_path), where="kind == 'c'",
        )  # fmt: skip
        assert read_copy(copied)[0] == [{"url": "c", "text": "c"}]


def test_list_items_covers_every_row_once():
    tables = [
        {"source": name, "copy": f"copy-{name}", "rows": rows}
        for name, rows in {"a": 10, "b": 0, "c": 7}.items()
    ]
    items = module.list_items(tables, 4)
    assert [(item["table"], item["first"], item["last"]) for item in items] == [
        ("a", 0, 4), ("a", 4, 8), ("a", 8, 10), ("c", 0, 4), ("c", 4, 7),
    ]  # fmt: skip
    assert [item["name"] for item in items] == [f"data-{i:05d}-of-00005.parquet" for i in range(5)]
    items = module.list_items([tables[0] | {"rows": 200_000}], 1)
    names = [item["name"] for item in items]
    assert names == sorted(names) and names[-1] == "data-199999-of-200000.parquet"
    assert (items[256]["copy"], items[256]["group"]) == ("copy-a", 256)


def test_a_changed_table_copy_is_named(tmp_path):
    make_table(tmp_path / "a.parquet", 10)
    (item,) = module.list_items([copy_table(tmp_path / "a.parquet", tmp_path)], 10)
    with pytest.raises(OSError, match=".parquet has changed since it was written: delete it"):
        module.read_rows(item | {"last": 12})


def test_a_half_written_table_copy_is_made_again(tmp_path, monkeypatch):
    pa.csv.write_csv(make_table(tmp_path / "a.parquet"), tmp_path / "a.csv")

    def killed(self, group, size, write=pq.ParquetWriter.write_table):
        if group["url"][0].as_py() == "http://a/10":
            raise KeyboardInterrupt
        return write(self, group, size)

    with monkeypatch.context() as first, pytest.raises(KeyboardInterrupt):
        first.setattr(pq.ParquetWriter, "write_table", killed)
        copy_table(tmp_path / "a.csv", tmp_path)
    assert not list((tmp_path / COPIES).iterdir())
    assert len(read_copy(copy_table(tmp_path / "a.csv", tmp_path))[0]) == 25


def test_copy_tables_applies_where_and_the_row_limit(tmp_path):
    (tmp_path / COPIES).mkdir(parents=True)
    for name in ("a", "b", "c"):
        make_table(tmp_path / f"{name}.parquet", 10)
    tables = [(f"file://{tmp_path}/{name}.parquet", "digest") for name in ("a", "b", "c")]

    def copy(rows=None, where=None, columns=("url", "text")):
        options = {
            "columns": [*columns],
            "rows_per_group": 4,
            "folder": str(tmp_path),
            "where": where,
        }
        copies = list(module.copy_tables(tables, rows, **options))
        assert [table["source"] for table in copies] == [source for source, _ in tables][
            : len(copies)
        ]
        groups = [pq.ParquetFile(table["copy"]).metadata for table in copies]
        assert {metadata.row_group(0).num_rows for metadata in groups} <= {1, 2, 3, 4}
        found = [read_copy(table, 4)[0] for table in copies]
        assert [len(rows) for rows in found] == [table["rows"] for table in copies]
        assert all(list(row) == [*columns] for rows in found for row in rows)
        return [[int(row["text"].split()[1][:-1]) for row in rows] for rows in found]

    whole = list(range(10))
    assert copy() == [whole] * 3
    assert copy(12) == [whole, [0, 1]] and copy(10) == [whole] and copy(1) == [[0]]
    assert copy(where="id >= 4") == [whole[4:]] * 3  # by a dropped column
    assert copy(where="id >= 4", columns=COLUMNS) == [whole[4:]] * 3  # and by a kept one
    assert copy(9, "id >= 4") == [whole[4:], [4, 5, 6]] and copy(8, "id in [1, 9]") == [[1, 9]] * 3
    # each choice has its own copy
    assert len(list((tmp_path / COPIES).iterdir())) == 3 + 3 + 1 + 3 + 3 + 2 + 3


def test_list_tables_ignores_the_downloads_own_files_at_an_address():
    fs = fsspec.filesystem("memory")
    for name in (
        "a.parquet",
        "out/data-00000-of-00001.parquet",
        "out/__download__/tables/1.parquet",
        "other/b.csv",
    ):
        fs.pipe_file(f"/tables/{name}", b"")
    args = argparse.Namespace(input="memory://tables", output_dir="memory://tables/out/")
    assert module.list_tables(args)[1] == ["/tables/a.parquet", "/tables/other/b.csv"]


def test_filter_rows_takes_a_number_of_rows_from_any_batches():
    table = pa.table({"id": range(7), "url": range(7)})
    batches = table.to_batches(max_chunksize=2)
    for where, whole in ((None, [*range(7)]), ("id != 2", [0, 1, 3, 4, 5, 6])):
        for most in (None, *range(1, 9)):
            rows = module.filter_rows(iter(batches), table.schema, where, ["id"], most)
            groups = list(module.cut_groups(rows, 3))
            assert [row for group in groups for row in group["id"].to_pylist()] == whole[:most]
            assert all(len(group) == 3 for group in groups[:-1]) and len(groups[-1]) in (1, 2, 3)


def test_captions_with_newlines_are_kept_in_large_csv_tables(tmp_path):
    captions = [f"{i}: " + "a line\n" * 100 for i in range(3000)]
    pa.csv.write_csv(
        pa.table({"url": captions, "text": captions, "id": captions}), tmp_path / "a.csv"
    )
    assert [
        row["text"]
        for row in read_copy(copy_table(tmp_path / "a.csv", tmp_path, rows=3000), 3000)[0]
    ] == captions
