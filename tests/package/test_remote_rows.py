"""Parquet at an address: the same rows as on a disk, never mixed when the files change."""

import os
import pickle

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import make_captioned, replace, save_as_parquet

import precompute_latents
from diffusion_training.cluster import remote_rows as module
from diffusion_training.data.rows import load_rows, name_rows

COUNT = 26


@pytest.fixture
def folder(tmp_path):
    """Three files of parquet in row groups of three, as download_images.py writes them."""
    make_captioned(tmp_path / "images", COUNT, [f"No. {i} \U0001f600" for i in range(COUNT)])
    names = ("data-0", "data-1", "sub/data-2")
    folder = save_as_parquet(tmp_path / "images", tmp_path / "parquet", names)
    (folder / "__download__").mkdir()
    for name in ("__download__/urls.parquet", ".hidden.parquet", "notes.txt"):  # no data
        (folder / name).write_bytes(b"nothing to read")
    return folder


def open_rows(folder, *argv):
    args = precompute_latents.parse_args(
        ["--train_data_dir=.", "--pretrained_model_name_or_path=sd", *argv]
    )
    module.open_parquet.cache_clear(), module.read_group.cache_clear()
    return module.RemoteRows(replace(args, train_data_dir=f"file://{folder}/"))


def test_remote_rows_equal_rows_on_a_disk(folder, tmp_path):
    rows = open_rows(folder)
    for name in ("__download__/urls.parquet", ".hidden.parquet", "notes.txt"):
        (folder / name).unlink()
    argv = [
        f"--train_data_dir={folder}",
        "--pretrained_model_name_or_path=sd",
        f"--cache_dir={tmp_path / 'hub'}",
    ]
    local, column, *_ = load_rows(precompute_latents.parse_args(argv), others=["text"])
    assert len(rows) == len(local) == COUNT and rows.column_names == (column, "text") == (
        "image",
        "text",
    )
    for numbers in ([0], [25, 0, 9, 10, 11], list(range(COUNT)), [3, 3]):
        assert rows[numbers] == local[numbers]
    assert rows[[9, 10]]["text"][1].startswith("No. 1")
    for numbers in (range(COUNT), range(9, 21), range(3, 3)):
        assert rows.name_rows(numbers) == name_rows(local, column, str(folder), numbers)
    assert rows.name_rows(range(1)) == ["row 0"]


@pytest.mark.parametrize("kind", ["struct", "path", "bytes"])
def test_names_of_remote_rows_are_read_without_the_images(tmp_path, kind, monkeypatch):
    paths = [f"{row}.png" for row in range(7)]
    images = {
        "struct": [{"bytes": b"png", "path": path} for path in paths],
        "path": paths,
        "bytes": [b"png"] * 7,
    }[kind]
    (tmp_path / "table").mkdir()
    table = pa.table({"image": images, "text": paths})
    pq.write_table(table, tmp_path / "table/data.parquet", row_group_size=2)
    rows = open_rows(tmp_path / "table", "--max_train_samples=5", "--image_column=image")
    read = []
    read_row_group = pq.ParquetFile.read_row_group

    def note(*args):
        read.append(read_row_group(*args))
        return read[-1]

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", note)
    expected = [f"row {row}" for row in range(5)] if kind == "bytes" else paths[:5]
    assert rows.name_rows(range(5)) == expected and rows.name_rows(range(3, 5)) == expected[3:]
    assert "png" not in {str(value) for table in read for value in table.to_pylist()}
    assert all("bytes" not in str(table.schema) for table in read)


def test_pickled_remote_rows_are_small_and_read_only_needed_columns(folder, monkeypatch):
    rows, read = open_rows(folder), []
    pickled = pickle.dumps(rows)
    assert len(pickled) < 5000
    again = pickle.loads(pickled)
    read_row_group = pq.ParquetFile.read_row_group
    monkeypatch.setattr(
        pq.ParquetFile,
        "read_row_group",
        lambda file, *args: (
            read.append((file.metadata.num_rows, *args)) or read_row_group(file, *args)
        ),
    )
    # no other column is read
    assert again[[12, 10, 11]] == rows[[12, 10, 11]] and read == [(10, 0, ("image", "text"))]
    again[[25]]
    assert read[1:] == [(6, 1, ("image", "text"))]


def test_remote_rows_refuse_files_that_changed(folder):
    rows = open_rows(folder)
    module.open_parquet.cache_clear(), module.read_group.cache_clear()  # another process
    path = folder / "data-0.parquet"
    was = path.stat()
    path.write_bytes((folder / "data-1.parquet").read_bytes())
    os.utime(path, (was.st_atime, was.st_mtime + 1))
    rows[[25]]
    with pytest.raises(ValueError, match="data-0.parquet: it has changed"):
        rows[[0]]
    assert (
        open_rows(folder)._fingerprint
        != rows._fingerprint
        == pickle.loads(pickle.dumps(rows))._fingerprint
    )
    path.unlink()
    module.open_parquet.cache_clear(), module.read_group.cache_clear()
    with pytest.raises(ValueError, match="data-0.parquet: .*No such file"):
        rows[[0]]


def test_remote_rows_read_the_columns_of_the_flags(folder):
    table = pq.read_table(folder / "data-0.parquet")
    for path in folder.rglob("*.parquet"):
        path.unlink()
    pq.write_table(table.rename_columns(["picture", "caption", "other"]), folder / "a.parquet")
    rows = open_rows(folder, "--caption_column=caption", "--image_column=picture")
    assert (
        rows.column_names == ("picture", "caption") and len(rows[[3]]["picture"][0]["bytes"]) > 100
    )
    several = "--caption_column", "caption", "other", "--image_column=picture"
    row = open_rows(folder, *several)[[3, 4]]
    assert (
        row["caption"][0].startswith("No. 3")
        and row["other"] == [0, 0]
        and row["picture"][1]["bytes"]
    )
    pq.write_table(
        table.rename_columns(["picture", "caption", "mask"]).set_column(2, "mask", table["image"]),
        folder / "a.parquet",
    )
    row = open_rows(
        folder, "--caption_column=caption", "--image_column=picture", "--mask_column=mask"
    )[[3]]
    assert row["mask"] == row["picture"] and row["caption"][0].startswith("No. 3")


def test_unusable_remote_parquet_files_are_refused_in_one_sentence(folder, tmp_path):
    def refused(said, *argv, of=folder):
        with pytest.raises(SystemExit) as stop:
            open_rows(of, *argv)
        assert said in str(stop.value) and "\n" not in str(stop.value), stop.value

    refused(
        f"file://{folder} has no column 'caption', only image, text, other: choose",
        "--caption_column=caption",
    )
    refused(
        "has no column 'x', only image, text, other: choose with --image_column", "--image_column=x"
    )
    (tmp_path / "empty").mkdir()
    refused("can't be read (it holds no parquet files)", of=tmp_path / "empty")
    refused("can't be read (it holds no parquet files)", of=tmp_path / "nowhere")
    pq.write_table(
        pq.read_table(folder / "data-0.parquet").slice(0, 0), tmp_path / "empty/none.parquet"
    )
    refused("holds no images", of=tmp_path / "empty")
    pq.write_table(pa.table({"text": ["a"], "image": ["b"]}), folder / "sub/zzz.parquet")
    refused("sub/zzz.parquet has other columns than data-0.parquet")
    (folder / "sub/zzz.parquet").write_bytes(b"no parquet")
    refused("sub/zzz.parquet: ")
