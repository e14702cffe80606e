"""Rows: every kind of data set, what is read from it, and what is reported."""

import argparse
import io
import json
import os
import re
import resource
import shutil
import tarfile
import zipfile
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from conftest import MODELS, Script, finish, make_captioned, make_images, start
from fsspec.implementations.local import LocalFileSystem

from diffusion_training.data.folders import check_files, get_source
from diffusion_training.data.images import decode_image
from diffusion_training.data.references import add_references
from diffusion_training.data.rows import RowDataset, load_rows, name_rows, read_items
from diffusion_training.data.transform_settings import make_transform
from diffusion_training.data.transforms import transform_row
from diffusion_training.errors.sentences import in_one_sentence
from diffusion_training.library_fixes import print_first
from diffusion_training.loading import load_batches

precompute = Script("precompute_latents")


@pytest.fixture
def load(tmp_path):
    """`load_rows` of a folder, with flags."""

    def load(folder, streaming=False, others=(), **flags):
        none = [
            "dataset_name",
            "train_data_dir",
            "dataset_config_name",
            "image_column",
            "max_train_samples",
        ]
        args = dict.fromkeys(none) | {
            "dataset_split": "train",
            "seed": 0,
            "cache_dir": str(tmp_path / "cached"),
            "caption_extension": "txt",  # this and the next two are read with --caption_column
            "instance_prompt": None,
            "folder_repeats": False,
        }
        return load_rows(
            argparse.Namespace(**args | {"train_data_dir": str(folder)} | flags), streaming, others
        )

    return load


def add_member(tar, name, content):
    info = tarfile.TarInfo(name)
    info.size = len(content)
    tar.addfile(info, io.BytesIO(content))


def test_a_datasets_cache_that_is_not_writable_is_reported(tmp_path, load, monkeypatch):
    """By default the cache of `datasets` is in the home folder."""
    make_images(tmp_path / "images", 2)
    (tmp_path / "home").touch()
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", f"{tmp_path}/home/datasets")
    error = "home/datasets can't be written to: give another folder with --cache_dir .*Not a dir"
    with pytest.raises(SystemExit, match=error):
        load(tmp_path / "images", cache_dir=None)


def test_load_rows_reads_every_kind_of_folder(tmp_path, load):
    """Sub-folders, metadata.jsonl, parquet of images and of plain bytes, webdataset.

    The image column may have another name.
    """
    make_images(tmp_path / "images", 6)
    png = [(tmp_path / f"images/{i}.png").read_bytes() for i in range(6)]
    for i in range(6):
        path = tmp_path / f"classes/{i % 2}/{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png[i])
    make_captioned(tmp_path / "captions", 6)
    for name in ("parquet", "plain", "tars"):
        (tmp_path / name).mkdir()
    kinds = datasets.Features({"img": datasets.Image(), "label": datasets.Value("int64")})
    data = {"img": [{"bytes": data, "path": None} for data in png], "label": [0] * 6}
    datasets.Dataset.from_dict(data, features=kinds).to_parquet(tmp_path / "parquet/train.parquet")
    datasets.Dataset.from_dict({"image": png}).to_parquet(tmp_path / "plain/train.parquet")
    with tarfile.open(tmp_path / "tars/train.tar", "w") as tar:
        for i, data in enumerate(png):
            add_member(tar, f"{i:03d}.png", data)
            add_member(tar, f"{i:03d}.txt", b"a caption")
    reference = sorted(
        decode_image({"bytes": data, "path": None}, 3).float().mean().item() for data in png
    )
    for name in ("images", "classes", "captions", "parquet", "plain", "tars"):
        rows, column, *_ = load(tmp_path / name)
        assert len(rows) == 6 and rows.column_names == [column], name
        assert (
            sorted(decode_image(row[column], 3).float().mean().item() for row in rows) == reference
        ), name
    assert load(None, dataset_name=str(tmp_path / "parquet"), image_column="img").column == "img"
    assert load(tmp_path / "parquet", others=["label"]).rows.column_names == ["img", "label"]


def test_max_train_samples_draws_by_seed_or_takes_the_first_of_a_stream(tmp_path, load):
    make_images(tmp_path / "images", 6)
    drawn = [
        load(tmp_path / "images", max_train_samples=4, seed=seed).rows["image"][:]
        for seed in (0, 0, 1)
    ]
    assert len(drawn[0]) == 4 and drawn[0] == drawn[1] != drawn[2]
    assert len(load(tmp_path / "images", max_train_samples=99).rows) == 6
    rows, column, *_ = load(tmp_path / "images", streaming=True, max_train_samples=3)
    assert [Path(row[column]["path"]).name for row in rows] == ["0.png", "1.png", "2.png"]


def test_unreadable_data_sets_and_columns_end_in_one_sentence(tmp_path, load):
    make_captioned(tmp_path / "images", 2)
    (tmp_path / "empty").mkdir()
    with pytest.raises(SystemExit, match="empty can't be loaded as a data set"):
        load(tmp_path / "empty")
    with pytest.raises(SystemExit, match="can't be loaded as a data set"):
        load(tmp_path / "images", dataset_split="test")
    with pytest.raises(
        SystemExit, match="no column 'photo', only image, text: choose with --image_column"
    ):
        load(tmp_path / "images", image_column="photo")
    with pytest.raises(
        SystemExit, match=r"no column 'caption', only image, text: .*\(photo.txt for photo.jpg\)"
    ):
        load(tmp_path / "images", others=["caption"])
    with pytest.raises(SystemExit, match="column 'text' of .* can't be read as images"):
        datasets.Dataset.from_dict({"text": [1, 2]}).to_parquet(tmp_path / "empty/train.parquet")
        load(tmp_path / "empty", image_column="text")
    (tmp_path / "none").mkdir()
    datasets.Dataset.from_dict({"image": [b"x"]}).select([]).to_parquet(
        tmp_path / "none/train.parquet"
    )
    with pytest.raises(SystemExit):
        load(tmp_path / "none")


def test_caption_files_beside_images_equal_metadata(tmp_path, load, capsys):
    make_captioned(tmp_path / "images", 6)
    make_images(tmp_path / "beside", 6)
    for line in (tmp_path / "images/metadata.jsonl").read_text().splitlines():
        row = json.loads(line)
        (tmp_path / "beside" / row["file_name"]).with_suffix(".cap").write_text(
            f"\ufeff{row['text']}\n"
        )
    flags = {"others": ["text"], "caption_column": "text", "caption_extension": "cap"}
    one, other = (load(tmp_path / name, **flags).rows for name in ("images", "beside"))
    assert one["text"][:] == other["text"][:] and one["text"][3] == "a digit zero"
    before = other._fingerprint
    (tmp_path / "beside/2.cap").write_text("another\n\nline")
    (tmp_path / "beside/4.cap").unlink()
    changed = load(tmp_path / "beside", **flags).rows
    assert (
        changed["text"][2:5] == ["another\n\nline", "a digit zero", None]
        and changed._fingerprint != before
    )
    assert "1 captions have several lines, such as" in capsys.readouterr().out


def test_load_rows_lists_a_folder_only_once(tmp_path, load, monkeypatch):
    (tmp_path / "images/deep").mkdir(parents=True)
    table = tmp_path / "images/deep/one.parquet"
    datasets.Dataset.from_dict({"image": [b"x", b"y"]}).to_parquet(table)
    listed, listing = [], LocalFileSystem.ls
    monkeypatch.setattr(
        LocalFileSystem, "ls", lambda fs, path, **k: listed.append(path) or listing(fs, path, **k)
    )
    rows = load(tmp_path / "images").rows
    assert len(rows) == 2 and 0 < sum(Path(path).name == "deep" for path in listed) < 4
    shutil.copy(table, tmp_path / "images/two.parquet")
    assert len(load(tmp_path / "images").rows) == 4  # the next call reads it again


def test_unused_files_are_counted_and_one_is_named(tmp_path, load, capsys, monkeypatch):
    make_captioned(tmp_path / "images", 3)
    for name in (".hidden", "raw.cr2", "more/notes", "more/b.cr2"):
        (tmp_path / "images" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "images" / name).touch()
    # an image that is missing in the metadata
    shutil.copy(tmp_path / "images/0.png", tmp_path / "images/left.png")
    # a link to a folder is not followed
    (tmp_path / "images/linked").symlink_to(tmp_path / "images/more")
    (tmp_path / "images/shut").mkdir()  # not accessible
    access = os.access
    monkeypatch.setattr(
        os, "access", lambda path, *how, **more: "shut" not in f"{path}" and access(path, *how)
    )
    load(tmp_path / "images")
    said = "6 of 10 files are not used (3 no suffix, 2 .cr2, 1 .png), such as left.png"
    assert capsys.readouterr().out == f"{tmp_path / 'images'}: {said}\n"
    monkeypatch.setenv("RANK", "1")
    load(tmp_path / "images")
    make_images(tmp_path / "all", 2)
    monkeypatch.delenv("RANK")
    load(tmp_path / "all")
    assert capsys.readouterr().out == ""
    (tmp_path / "all/README.md").write_text("about these images")  # no image, and not meant as one
    for name in ("0.txt", "other.txt", "IMG.HEIC"):  # with captions, the builder lists any file
        (tmp_path / "all" / name).write_text("a dog")
    load(tmp_path / "all")
    said = "2 of 6 files are not used (1 .heic, 1 .txt), such as IMG.HEIC"
    assert capsys.readouterr().out == f"{tmp_path / 'all'}: {said}\n"


def make_dataset(images, folder):
    args = argparse.Namespace(train_data_dir=str(folder), dataset_name=None)
    return RowDataset(images, get_source(args))


def test_names_of_rows_are_file_paths_or_row_numbers(tmp_path, load):
    make_images(tmp_path / "images/a", 3)
    assert make_dataset(load(tmp_path / "images"), tmp_path / "images").names() == [
        "a/0.png",
        "a/1.png",
        "a/2.png",
    ]
    (tmp_path / "link").symlink_to("images")
    assert make_dataset(load(tmp_path / "link"), tmp_path / "link").names() == [
        "a/0.png",
        "a/1.png",
        "a/2.png",
    ]
    drawn = load(tmp_path / "images", max_train_samples=2, seed=1)
    expected = [Path(row[drawn.column]["path"]).name for row in drawn.rows]
    data = make_dataset(drawn, tmp_path / "images")
    found = data.names()
    assert name_rows(data.rows, data.column, data.source, range(1, 2)) == found[1:]
    assert [Path(name).name for name in found] == expected
    (tmp_path / "table").mkdir()
    png = (tmp_path / "images/a/0.png").read_bytes()
    datasets.Dataset.from_dict({"image": [png, png]}).to_parquet(tmp_path / "table/train.parquet")
    assert make_dataset(load(tmp_path / "table"), tmp_path / "table").names() == ["row 0", "row 1"]


def test_digests_of_rows_depend_only_on_the_image(tmp_path, load):
    make_captioned(tmp_path / "images", 3, ["a", "b", "c"])
    rows = make_dataset(load(tmp_path / "images", others=["text"]), tmp_path / "images")
    digests = [rows.digest(row) for row in range(3)]
    assert len({*digests}) == 3
    pictures = [(tmp_path / f"images/{i}.png").read_bytes() for i in range(3)]
    (tmp_path / "table").mkdir()
    # another order, and a corrected caption
    table = datasets.Dataset.from_dict({"image": pictures[::-1], "text": list("cbx")})
    table.to_parquet(tmp_path / "table/train.parquet")
    of_table = make_dataset(load(tmp_path / "table", others=["text"]), tmp_path / "table")
    assert [of_table.digest(row) for row in range(3)] == digests[::-1]
    (tmp_path / "images/1.png").unlink()
    assert rows.digest(1) not in digests and rows.digest(0) == digests[0]
    full = resource.getrlimit(resource.RLIMIT_NOFILE)
    # no further file can be opened
    resource.setrlimit(resource.RLIMIT_NOFILE, (os.dup(0) + 1, full[1]))
    try:
        with pytest.raises(OSError, match="Too many open files"):
            rows.digest(0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, full)


def test_read_items_keeps_the_order_of_the_keys(tmp_path, load):
    make_captioned(tmp_path / "images", 4, list("abcd"))
    rows = load(tmp_path / "images", others=["text"]).rows
    items = read_items(rows, [(0, row, 1.0) for row in (2, 0, 2)])
    assert [item["text"] for item in items] == ["c", "a", "c"] and items[0] == rows[2]
    # in a stream, the key contains the item
    assert read_items(rows, [(0, 5, 1.0, {"text": "it"})]) == [{"text": "it"}]


@pytest.mark.parametrize("end", ["between two files", "in a header"])
def test_a_truncated_tar_is_refused_not_read_as_a_shorter_one(tmp_path, load, end):
    """tarfile reads these without an error."""
    make_images(tmp_path / "images", 8)
    (tmp_path / "tars").mkdir()
    path = tmp_path / "tars/train.tar"
    with tarfile.open(path, "w") as tar:
        begins = []
        for i in range(8):
            begins.append(tar.offset)
            tar.add(tmp_path / f"images/{i}.png", f"{i}.png")
    cut = begins[6] + (0 if end == "between two files" else 100)
    assert len(load(tmp_path / "tars", image_column="png").rows) == 8
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(SystemExit, match="train.tar was cut off or is damaged at byte"):
        load(tmp_path / "tars", image_column="png")
    with pytest.raises(tarfile.ReadError, match="train.tar was cut off or is damaged at byte"):
        list(load(tmp_path / "tars", streaming=True, image_column="png").rows)


def test_a_csv_file_with_a_stray_quote_loses_no_rows(tmp_path, load, capsys):
    make_images(tmp_path / "images", 6)
    captions = ["a", '"red cat', "b", '"blue', "c", "d"]
    for name, column in {"metadata.csv": "file_name", "train.csv": "image"}.items():
        folder = tmp_path / ("images" if column == "file_name" else "tables")
        folder.mkdir(exist_ok=True)
        files = [
            f"{'' if column == 'file_name' else tmp_path / 'images/'}{i}.png" for i in range(6)
        ]
        lines = [f"{file},{text}" for file, text in zip(files, captions, strict=True)]
        for quoted, said in {"": "row that begins in line 3", '"': "span several lines"}.items():
            text = "\n".join([f"{column},text", *lines]).replace("blue", f"blue{quoted}")
            text = text.replace("red cat", f"red cat\nb{quoted}")
            (folder / name).write_text(text + "\n")
            if quoted:
                assert len(load(folder, others=["text"], image_column="image").rows) == 6
                assert f"{folder / name}: 1 rows span several lines" in capsys.readouterr().out
                continue
            with pytest.raises(
                SystemExit, match=f"{name} can't be loaded as a data set .the {said}"
            ):
                load(folder)


def test_captions_in_tars_are_those_of_files_beside_images(tmp_path, load, capsys):
    """Without the mark at a file's start and the line break at its end; not UTF-8 is no caption."""
    make_images(tmp_path / "images", 3)
    texts = [b"\xef\xbb\xbfa cat\n", b"a dog\r\n", "café".encode("latin-1")]
    (tmp_path / "tars").mkdir()
    with tarfile.open(tmp_path / "tars/train.tar", "w") as tar:
        for i, text in enumerate(texts):
            (tmp_path / f"images/{i}.txt").write_bytes(text)
            tar.add(tmp_path / f"images/{i}.png", f"{i}.png")
            tar.add(tmp_path / f"images/{i}.txt", f"{i}.txt")
    seen = {}
    print_first.cache_clear()  # other tests may have printed the sentence
    for folder, column in {"images": "text", "tars": "txt"}.items():
        flags = ["--output_dir=none", f"--train_data_dir={tmp_path / folder}"]
        flags += [f"--pretrained_model_name_or_path={MODELS}", "--resolution=16"]
        args = precompute.module.parse_args([*flags, f"--caption_column={column}"])
        images = load(folder=tmp_path / folder, others=[column], caption_column=column)
        transform = make_transform(args, images.column, None, None, 3, 16)
        made = [transform_row(i, None, images.rows[i], transform) for i in range(3)]
        seen[folder] = [(row["text"], row["skipped"]) for row in made]
    assert seen["tars"] == seen["images"]
    assert seen["tars"] == [("a cat", None), ("a dog", None), ("", "it has no caption")]
    assert capsys.readouterr().out.count("Captions in tars that are not UTF-8 are not used") == 1


def test_files_that_datasets_never_reads_to_the_end_are_refused(tmp_path, load):
    make_images(tmp_path / "images", 2)
    os.mkfifo(tmp_path / "images/x.parquet")
    with pytest.raises(SystemExit, match="images/x.parquet is a pipe: write a file"):
        load(tmp_path / "images")
    (tmp_path / "images/x.parquet").unlink()
    for name in ("[a].png", "../b.png", ".."):
        with zipfile.ZipFile(tmp_path / "images/a.zip", "w") as archive:
            archive.write(tmp_path / "images/0.png", "0.png")
            archive.writestr(name, b"")
        with pytest.raises(SystemExit, match=re.escape(f"images/a.zip holds the name {name!r}: ")):
            load(tmp_path / "images")
    (tmp_path / "images/a.zip").write_bytes(b"PK, cut short")
    check_files([str(tmp_path / "images/a.zip")])  # an error of `datasets` names it


def test_an_image_that_a_metadata_file_names_twice_is_reported(tmp_path, load, capsys):
    make_captioned(tmp_path / "images", 2, ["a", "b"])
    path = tmp_path / "images/metadata.jsonl"
    path.write_text(f'{path.read_text()}\n{{"file_name": "1.png", "text": "c"}}')
    assert len(load(tmp_path / "images", others=["text"]).rows) == 3
    assert "images/1.png 2 times; each time counts as an image" in capsys.readouterr().out


def test_a_metadata_file_with_a_column_named_image_is_refused(tmp_path, load):
    """`datasets` takes it for the images."""
    make_images(tmp_path / "images", 1)
    (tmp_path / "images/metadata.csv").write_text("file_name,image\n0.png,x\n")
    with pytest.raises(SystemExit, match=r"metadata.csv\) has a column 'image', which hides the"):
        load(tmp_path / "images")


@pytest.mark.parametrize("workers", [0, 1])
def test_a_truncated_stream_ends_in_one_sentence(tmp_path, load, workers):
    make_images(tmp_path / "images", 12)
    (tmp_path / "tars").mkdir()
    with tarfile.open(tmp_path / "tars/train.tar", "w") as tar:
        for i in range(12):  # `datasets` infers the columns from the first ones
            tar.add(tmp_path / f"images/{i}.png", f"{i}.png")
    data = (tmp_path / "tars/train.tar").read_bytes()
    (tmp_path / "tars/train.tar").write_bytes(data[: data.index(b"9.png") + 700])
    rows = load(tmp_path / "tars", streaming=True, image_column="png").rows

    class Items(torch.utils.data.Dataset):
        def __getitem__(self, key):
            return {"path": key["png"]["path"]}

    main = in_one_sentence(
        lambda args: list(load_batches(Items(), rows, workers, torch.device("cpu")))
    )
    assert finish(start(lambda: main(argparse.Namespace()), log=tmp_path / "log")) == [1]
    log = (tmp_path / "log").read_text()
    assert (
        "unexpected end of data; files saved before are complete" in log and "Traceback" not in log
    )


def test_caption_column_refuses_images_and_rows_may_lack_a_file(tmp_path, load):
    make_captioned(tmp_path / "images", 3, ["a", "b", "c"])
    with pytest.raises(
        SystemExit, match="column 'image' of .* holds images: choose another --caption_column"
    ):
        load(tmp_path / "images", others=["image"], caption_column="image")
    lines = [{"file_name": "0.png", "text": "a"}, {"file_name": None, "text": "b"}]
    (tmp_path / "images/metadata.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines)
    )
    assert len(load(tmp_path / "images").rows) == 2  # the second is skipped when it is read


def make_table(folder, **columns):
    """A parquet file without what `datasets` writes of its features."""
    folder.mkdir()
    pq.write_table(pa.table(columns), folder / "train.parquet")
    return folder


@pytest.mark.parametrize("column, flags, advice", [
    ("text", {"image_column": "text"}, "--image_column or --caption_column"),
    ("image", {"caption_column": "image"}, "--caption_column"),
    ("image", {"class_column": "image"}, "--class_column"),
    ("text", {"mask_column": "text"}, "--caption_column or --mask_column"),
    ("image", {"mask_column": "image"}, "--mask_column"),
    ("mask", {"conditioning_image_column": ["mask"], "mask_column": "mask"},
     "--mask_column or --conditioning_image_column"),
    ("image", {"conditioning_image_column": ["image"]}, "--conditioning_image_column"),
])  # fmt: skip
def test_a_column_has_one_role(tmp_path, column, flags, advice):
    make_images(tmp_path / "images", 2)
    png = [path.read_bytes() for path in sorted((tmp_path / "images").iterdir())]
    folder = make_table(tmp_path / "table", image=png, text=["a", "b"], mask=png)
    args = argparse.Namespace(
        **dict.fromkeys(["dataset_name", "dataset_config_name", "max_train_samples"]),
        **{"train_data_dir": str(folder), "dataset_split": "train", "seed": 0},
        **{"cache_dir": str(tmp_path / "cached"), "caption_extension": "txt"},
        **{"instance_prompt": None, "folder_repeats": False, "allow_missing_conditioning": True},
        **{"image_column": None, "caption_column": "text", "mask_column": None}
        | {"conditioning_image_column": None, "conditioning_data_dir": None}
        | flags,
    )
    others = [flags.get("class_column") or args.caption_column]
    with pytest.raises(SystemExit) as refused:
        load_rows(args, others=others, add_references=add_references)
    assert f"column {column!r} of {folder} can't have two roles: choose another with {advice}" in (
        f"{refused.value}\n"
    )


@pytest.mark.parametrize("streaming", [False, True])
def test_files_as_lists_of_numbers_are_no_pixels(tmp_path, load, streaming):
    make_images(tmp_path / "images", 2)
    files = [list(path.read_bytes()) for path in sorted((tmp_path / "images").iterdir())]
    folder = make_table(tmp_path / "table", image=pa.array(files, pa.list_(pa.uint8())))
    with pytest.raises(SystemExit, match="can't be read as images .it has lists of numbers: store"):
        load(folder, streaming)
