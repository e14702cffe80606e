"""Folders of images from other programs, with other files and archives."""

import argparse
import json
import os
import shutil
from pathlib import Path

import pytest
from conftest import make_captioned, make_images

from diffusion_training.data.rows import RowDataset, load_rows


@pytest.fixture
def load(tmp_path):
    """`load_rows` of a folder, with flags, and captions in a column `text` if it has them."""

    def load(folder, captions=False, streaming=False, **flags):
        none = ["dataset_name", "dataset_config_name", "image_column", "max_train_samples"]
        args = dict.fromkeys(none) | {"dataset_split": "train", "seed": 0, "mask_column": None}
        args |= {"cache_dir": str(tmp_path / "cached"), "train_data_dir": str(folder)}
        args |= {"caption_column": "text", "caption_extension": "txt"}
        args |= {"instance_prompt": None, "folder_repeats": False} | flags
        return load_rows(argparse.Namespace(**args), streaming, ["text"] if captions else [])

    return load


@pytest.mark.parametrize("suffix", ["json", "csv", "xml", "wav", "mp4", "pdf", "txt", "md"])
def test_files_of_other_programs_beside_images_are_ignored(tmp_path, load, suffix):
    folder = Path(make_images(tmp_path / "images", 3))
    for i in range(4):
        (folder / f"photo-{i}.{suffix}").write_text('{"tags": 1}')
    assert len(load(folder).rows) == 3


def test_a_caption_extension_without_files_is_named(tmp_path, load):
    folder = Path(make_images(tmp_path / "images", 3))
    for i in range(3):
        (folder / f"{i}.txt").write_text("a dog")
    with pytest.raises(SystemExit, match=r"no column 'text', only image: .*photo\.caption for"):
        load(folder, captions=True, caption_extension="caption")


def test_special_characters_in_folder_paths_are_taken_literally(tmp_path, load):
    folder = Path(make_images(tmp_path / "by [artist] *", 2))
    assert len(load(folder).rows) == 2
    (folder / "0.txt").write_text("a dog")
    assert load(folder, captions=True).rows["text"][:] == ["a dog", None]
    with pytest.raises(SystemExit, match="rename the folder"):
        load(make_images(tmp_path / "a::b", 2))


def test_captions_in_both_metadata_and_text_files_are_refused(tmp_path, load):
    make_captioned(tmp_path / "images", 3)
    (tmp_path / "images/0.txt").write_text("a dog")
    with pytest.raises(SystemExit, match="a metadata file and in .txt files"):
        load(tmp_path / "images", captions=True)
    assert len(load(tmp_path / "images").rows) == 3  # without captions


def test_an_image_named_in_two_metadata_files_is_refused(tmp_path, load):
    make_captioned(tmp_path / "images/sub", 2)
    lines = [json.dumps({"file_name": "sub/1.png", "text": text}) for text in ("one", "two")]
    (tmp_path / "images/metadata.jsonl").write_text("\n".join(lines))
    sentence = r"images/metadata.jsonl and .*sub/metadata.jsonl\) names .*sub/1.png 3 times"
    with pytest.raises(SystemExit, match=sentence):
        load(tmp_path / "images")
    (tmp_path / "images/sub/metadata.jsonl").unlink()
    assert load(tmp_path / "images", captions=True).rows["text"][:] == ["one", "two"]


def test_an_unreadable_metadata_file_is_named(tmp_path, load):
    folder = Path(make_images(tmp_path / "images", 2))
    (folder / "metadata.csv").write_bytes("file_name,text\n0.png,café\n".encode("latin1"))
    with pytest.raises(SystemExit, match=r"\(with .*images/metadata.csv\) can't be loaded"):
        load(folder)


@pytest.mark.parametrize("suffix", ["png", "PNG", "jpg", "webp"])
@pytest.mark.parametrize("archived", [False, True])
def test_masks_may_be_any_image_format_and_in_archives(tmp_path, load, suffix, archived):
    folder = Path(make_images(tmp_path / "images", 3))
    shutil.copy(folder / "0.png", folder / f"1.mask.{suffix}")
    if archived:
        (tmp_path / "archive").mkdir()
        shutil.make_archive(str(tmp_path / "archive/photos"), "zip", folder)
        folder = tmp_path / "archive"
    rows, column, mask_column = load(folder)
    assert len(rows) == 3 and mask_column == "mask"
    name = f"1.mask.{suffix}"
    path = f"zip://{name}::{folder}/photos.zip" if archived else f"{folder}/{name}"
    assert [mask and mask["path"] for mask in rows["mask"][:]] == [None, path, None]
    names = RowDataset(load(folder), str(folder)).names()
    assert names == [f"zip://{i}.png::photos.zip" if archived else f"{i}.png" for i in range(3)]


def test_archives_may_hold_folders_and_files_other_than_images(tmp_path, load, capsys):
    for name in ("cat", "dog"):
        folder = Path(make_images(tmp_path / "animals" / name, 2))
        (folder / "0.txt").write_text("a caption")
    (tmp_path / "archive").mkdir()
    shutil.make_archive(str(tmp_path / "archive/animals"), "zip", tmp_path / "animals")
    rows = load(tmp_path / "archive")
    names = {f"zip://{kind}/{i}.png::animals.zip" for kind in ("cat", "dog") for i in range(2)}
    assert {*RowDataset(rows, str(tmp_path / "archive")).names()} == names
    said = "not used: 2 files in archives, such as zip://cat/0.txt::animals.zip"
    assert said in capsys.readouterr().out
    assert len([*load(tmp_path / "archive", streaming=True).rows]) == 4


@pytest.mark.parametrize("path", ["photo_test_1.png", "red train.png", "trains/test-2.png"])
@pytest.mark.parametrize("captions", [False, True])
def test_words_in_names_choose_no_split(tmp_path, load, path, captions):
    """`datasets` would take such a file for a split, and leave out files without such a word."""
    folder = Path(make_images(tmp_path / "images", 2))
    (folder / path).parent.mkdir(exist_ok=True)
    shutil.copy(folder / "0.png", folder / path)
    for name in ("test.txt", "captions_train.json", *(["0.txt"] if captions else [])):
        (folder / name).write_text("a dog")
    assert len(load(folder, captions).rows) == len([*load(folder, streaming=True).rows]) == 3
    with pytest.raises(SystemExit, match="can't be loaded as a data set .*[Uu]nknown split .test"):
        load(folder, captions, dataset_split="test")


@pytest.mark.parametrize("name", ["val", "deep/val"])
def test_a_folder_named_like_a_split_holds_it(tmp_path, load, capsys, name):
    folder = Path(make_images(tmp_path / "images", 2))
    make_images(folder / name, 1)
    assert RowDataset(load(folder), str(folder)).names() == ["0.png", "1.png"]
    said = f"not used: 1 file of other splits (validation), such as {name}/0.png"
    assert capsys.readouterr().out == f"{folder}: {said}\n"
    rows = load(folder, dataset_split="validation")
    assert RowDataset(rows, str(folder)).names() == [f"{name}/0.png"]
    make_images(folder / "train", 3)  # then other files are in no split
    capsys.readouterr()
    assert len(load(folder).rows) == 3
    assert "2 of 6 files are not used (2 .png), such as 0.png" in capsys.readouterr().out


def test_a_readme_may_name_the_images(tmp_path, load):
    folder = Path(make_images(tmp_path / "images", 3))
    (folder / "README.md").write_text("---\nlicense: mit\n---\n")
    assert len(load(folder).rows) == 3
    card = "---\nconfigs:\n- config_name: default\n  data_files: '0*'\n---\n"
    (folder / "README.md").write_text(card)
    assert len(load(folder).rows) == 1
    (folder / "2.txt").write_text("a dog")  # with captions in files, no README.md is read
    assert len(load(folder).rows) == 3


def test_a_changed_image_is_read_again(tmp_path, load):
    folder = Path(make_images(tmp_path / "images", 2))
    before = load(folder).rows._fingerprint
    assert load(folder).rows._fingerprint == before
    os.utime(folder / "0.png", (1, 1))
    assert load(folder).rows._fingerprint != before


def test_files_of_other_splits_are_counted(tmp_path, load, capsys):
    for name in ("train", "test"):
        make_images(tmp_path / "images" / name, 2)
    folder = tmp_path / "images"
    assert len(load(folder).rows) == len(load(folder, dataset_split="test[:1]+train[:1]").rows) == 2
    said = "not used: 2 files of other splits (test), such as test/0.png"
    assert capsys.readouterr().out == f"{folder}: {said}\n"


def test_two_masks_for_one_image_are_refused(tmp_path, load):
    folder = Path(make_images(tmp_path / "images", 2))
    for suffix in ("png", "jpg"):
        shutil.copy(folder / "0.png", folder / f"1.mask.{suffix}")
    with pytest.raises(SystemExit, match="are masks of the same image: delete one"):
        load(folder)


def test_images_in_folders_with_zero_repeats_are_counted(tmp_path, load, capsys):
    for name in ("0_later", "2_cat"):
        make_images(tmp_path / "images" / name, 2)
    assert len(load(tmp_path / "images", captions=True, folder_repeats=True).rows) == 4
    assert "2 images are unused: folder 0_later sets 0 repeats" in capsys.readouterr().out
