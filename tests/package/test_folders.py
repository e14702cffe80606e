"""Folders of images: captions, repeats, masks, archives, and files of other programs."""

import argparse
import errno
import json
import os
import shutil
from pathlib import Path

import datasets
import numpy as np
import pytest
from conftest import make_captioned, make_images
from PIL import Image

from diffusion_training.data.rows import RowDataset, load_rows


def read(folder, captions=False, streaming=False, **flags):
    """`load_rows` of a folder, with flags, and captions in a column `text` if it has them."""
    none = ["dataset_name", "dataset_config_name", "image_column", "max_train_samples"]
    none += ["mask_column", "instance_prompt"]
    args = dict.fromkeys(none) | {"train_data_dir": str(folder), "dataset_split": "train"}
    args |= {"caption_column": "text", "caption_extension": "txt", "folder_repeats": False}
    args |= {"cache_dir": str(folder.parent / "kept"), "seed": 0} | flags
    return load_rows(argparse.Namespace(**args), streaming, ["text"] if captions else [])


def load(folder, **flags):
    """(names and captions of the rows, their fingerprint)."""
    rows, column, *_ = read(folder, captions=True, **flags)
    assert rows[column][:] == [rows[i][column] for i in range(len(rows))]
    names = [image["path"].removeprefix(f"{folder}/") for image in rows[column][:]]
    return list(zip(names, rows["text"][:], strict=True)), rows._fingerprint


def picture(path):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.zeros((4, 4, 3), np.uint8)).save(path)


def test_too_many_open_files_raise_instead_of_losing_captions(tmp_path, monkeypatch):
    make_images(tmp_path / "images", 2)
    for i in range(2):
        (tmp_path / f"images/{i}.txt").write_text("a dog")
    for error in (PermissionError(errno.EACCES, "not for you"), OSError(errno.EMFILE, "many")):

        def read_text(path, encoding, error=error):
            raise error

        monkeypatch.setattr(Path, "read_text", read_text)
        if error.errno == errno.EACCES:
            assert [text for _, text in load(tmp_path / "images")[0]] == [None, None]
        else:
            with pytest.raises(OSError, match="many"):
                load(tmp_path / "images")


def test_a_caption_extension_may_have_two_parts(tmp_path):
    make_images(tmp_path / "images", 2)
    (tmp_path / "images/0.caption.txt").write_text("a dog")
    captions, _ = load(tmp_path / "images", caption_extension="caption.txt")
    assert captions == [("0.png", "a dog"), ("1.png", None)]


def test_instance_prompt_is_used_for_images_without_caption(tmp_path):
    folder = tmp_path / "images"
    make_images(folder, 3)
    with pytest.raises(SystemExit, match="no column 'text'"):
        load(folder)
    found, one = load(folder, instance_prompt="a sks dog")
    assert found == [(f"{i}.png", "a sks dog") for i in range(3)]
    assert (
        load(folder, instance_prompt="a sks dog")[1]
        == one
        != load(folder, instance_prompt="a cat")[1]
    )
    (folder / "1.txt").write_text("my own")
    (folder / "2.txt").write_text("")
    assert [text for _, text in load(folder, instance_prompt="a sks dog")[0]] == [
        "a sks dog",
        "my own",
        "",
    ]
    assert [text for _, text in load(folder)[0]] == [None, "my own", ""]
    (folder / "0.txt").write_text("another")
    with pytest.raises(
        SystemExit, match="--instance_prompt does nothing: all images of .* have captions"
    ):
        load(folder, instance_prompt="a sks dog")


def test_folder_repeats_reads_repeats_and_captions_from_folder_names(tmp_path, capsys):
    folder = tmp_path / "images"
    for name in ("3_sks dog/a.png", "3_sks dog/deep/b.png", "1_cat/c.png", "plain/d.png"):
        picture(folder / name)
    (folder / "3_sks dog/a.txt").write_text("a dog runs")
    dogs = [("3_sks dog/a.png", "a dog runs")] * 3 + [("3_sks dog/deep/b.png", "sks dog")] * 3
    found, one = load(folder, folder_repeats=True)
    assert sorted(found[:-1]) == sorted([*dogs, ("1_cat/c.png", "cat")]) and found[-1] == (
        "plain/d.png",
        None,
    )
    other, two = load(folder, folder_repeats=True, instance_prompt="a photo")
    assert other[:-1] == found[:-1] and other[-1] == ("plain/d.png", "a photo") and one != two
    assert load(folder, folder_repeats=True) == (found, one)
    assert "counts once" not in capsys.readouterr().out
    assert len(load(folder)[0]) == 4  # without the flag it is an ordinary name
    assert "Each image of 1_cat counts once an epoch: --folder_repeats" in capsys.readouterr().out
    (folder / "3_sks dog").rename(folder / "2_sks dog")
    again, three = load(folder, folder_repeats=True)
    assert len(again) == 6 and three != one


def test_folder_repeats_without_numbered_folders_is_refused(tmp_path):
    make_images(tmp_path / "images", 2)
    with pytest.raises(SystemExit, match="images has no folder with a name like 10_name"):
        load(tmp_path / "images", folder_repeats=True)


def test_folder_repeats_of_parquet_files_is_refused(tmp_path):
    make_images(tmp_path / "images", 2)
    paths = [str(tmp_path / "images" / f"{i}.png") for i in range(2)]
    rows = [{"image": {"bytes": Path(path).read_bytes(), "path": None}} for path in paths]
    features = datasets.Features({"image": datasets.Image()})
    (tmp_path / "tables").mkdir()
    rows = datasets.Dataset.from_list(rows, features)
    rows.to_parquet(tmp_path / "tables/train.parquet")
    with pytest.raises(SystemExit, match="tables is not a local folder of images"):
        load(tmp_path / "tables", folder_repeats=True)


def test_a_linked_folder_has_the_same_rows_captions_and_masks(tmp_path):
    for name in ("2_cat/a.png", "2_cat/a.mask.png", "2_cat/b.png"):
        picture(tmp_path / "disk/images" / name)
    (tmp_path / "data").symlink_to("disk")
    rows = [
        read(tmp_path / place / "images", captions=True, folder_repeats=True).rows
        for place in ("disk", "data")
    ]
    assert rows[0]["text"][:] == rows[1]["text"][:] == ["cat"] * 4
    assert [Path(mask["path"]).name for mask in rows[1]["mask"][:] if mask] == ["a.mask.png"] * 2
    assert rows[0]._fingerprint == rows[1]._fingerprint


def test_captions_that_are_not_utf_8_are_reported(tmp_path, capsys):
    make_images(tmp_path / "images", 3)
    for i, text in enumerate((b"a dog", "a café".encode("latin1"))):
        (tmp_path / f"images/{i}.txt").write_bytes(text)
    assert [text for _, text in load(tmp_path / "images")[0]] == ["a dog", None, None]
    assert (
        f"1 captions can't be read, such as {tmp_path}/images/1.txt: are they UTF-8?"
        in capsys.readouterr().out
    )


# ------------------------------------------------------------------- other files, and archives


@pytest.mark.parametrize("suffix", ["json", "csv", "xml", "wav", "mp4", "pdf", "txt", "md"])
def test_files_of_other_programs_beside_images_are_ignored(tmp_path, suffix):
    folder = Path(make_images(tmp_path / "images", 3))
    for i in range(4):
        (folder / f"photo-{i}.{suffix}").write_text('{"tags": 1}')
    assert len(read(folder).rows) == 3


def test_a_caption_extension_without_files_is_named(tmp_path):
    folder = Path(make_images(tmp_path / "images", 3))
    for i in range(3):
        (folder / f"{i}.txt").write_text("a dog")
    with pytest.raises(SystemExit, match=r"no column 'text', only image: .*photo\.caption for"):
        read(folder, captions=True, caption_extension="caption")


def test_caption_files_with_another_extension_are_named(tmp_path):
    folder = Path(make_images(tmp_path / "images", 3))
    for i in range(2):
        (folder / f"{i}.caption").write_text("a dog")
    (folder / "notes.txt").write_text("beside no image")
    with pytest.raises(SystemExit, match=r"read the 2 files \.caption with --caption_extension"):
        read(folder, captions=True)


def test_a_folder_of_heic_photographs_is_named(tmp_path):
    (tmp_path / "IMG_1.HEIC").write_bytes(b"1")
    (tmp_path / "IMG_2.heic").write_bytes(b"2")
    with pytest.raises(SystemExit, match="its 2 images are HEIC files: convert them to JPEG"):
        read(tmp_path)


def test_special_characters_in_folder_paths_are_taken_literally(tmp_path):
    folder = Path(make_images(tmp_path / "by [artist] *", 2))
    assert len(read(folder).rows) == 2
    (folder / "0.txt").write_text("a dog")
    assert read(folder, captions=True).rows["text"][:] == ["a dog", None]
    with pytest.raises(SystemExit, match="rename the folder"):
        read(Path(make_images(tmp_path / "a::b", 2)))


def test_captions_in_both_metadata_and_text_files_are_refused(tmp_path):
    make_captioned(tmp_path / "images", 3)
    (tmp_path / "images/0.txt").write_text("a dog")
    with pytest.raises(SystemExit, match="a metadata file and in .txt files"):
        read(tmp_path / "images", captions=True)
    assert len(read(tmp_path / "images").rows) == 3  # without captions


def test_an_image_named_in_two_metadata_files_is_refused(tmp_path):
    make_captioned(tmp_path / "images/sub", 2)
    lines = [json.dumps({"file_name": "sub/1.png", "text": text}) for text in ("one", "two")]
    (tmp_path / "images/metadata.jsonl").write_text("\n".join(lines))
    sentence = r"images/metadata.jsonl and .*sub/metadata.jsonl\) names .*sub/1.png 3 times"
    with pytest.raises(SystemExit, match=sentence):
        read(tmp_path / "images")
    (tmp_path / "images/sub/metadata.jsonl").unlink()
    assert read(tmp_path / "images", captions=True).rows["text"][:] == ["one", "two"]


def test_an_unreadable_metadata_file_is_named(tmp_path):
    folder = Path(make_images(tmp_path / "images", 2))
    (folder / "metadata.csv").write_bytes("file_name,text\n0.png,café\n".encode("latin1"))
    with pytest.raises(SystemExit, match=r"\(with .*images/metadata.csv\) can't be loaded"):
        read(folder)


@pytest.mark.parametrize("suffix", ["png", "PNG", "jpg", "webp"])
@pytest.mark.parametrize("archived", [False, True])
def test_masks_may_be_any_image_format_and_in_archives(tmp_path, suffix, archived):
    folder = Path(make_images(tmp_path / "images", 3))
    shutil.copy(folder / "0.png", folder / f"1.mask.{suffix}")
    if archived:
        (tmp_path / "archive").mkdir()
        shutil.make_archive(str(tmp_path / "archive/photos"), "zip", folder)
        folder = tmp_path / "archive"
    rows, column, mask_column, _ = read(folder)
    assert len(rows) == 3 and mask_column == "mask"
    name = f"1.mask.{suffix}"
    path = f"zip://{name}::{folder}/photos.zip" if archived else f"{folder}/{name}"
    assert [mask and mask["path"] for mask in rows["mask"][:]] == [None, path, None]
    names = RowDataset(read(folder), str(folder)).names()
    assert names == [f"zip://{i}.png::photos.zip" if archived else f"{i}.png" for i in range(3)]


def test_archives_may_hold_folders_and_files_other_than_images(tmp_path, capsys):
    for name in ("cat", "dog"):
        folder = Path(make_images(tmp_path / "animals" / name, 2))
        (folder / "0.txt").write_text("a caption")
    (tmp_path / "archive").mkdir()
    shutil.make_archive(str(tmp_path / "archive/animals"), "zip", tmp_path / "animals")
    rows = read(tmp_path / "archive")
    names = {f"zip://{kind}/{i}.png::animals.zip" for kind in ("cat", "dog") for i in range(2)}
    assert {*RowDataset(rows, str(tmp_path / "archive")).names()} == names
    said = "not used: 2 files in archives, such as zip://cat/0.txt::animals.zip"
    assert said in capsys.readouterr().out
    assert len([*read(tmp_path / "archive", streaming=True).rows]) == 4


@pytest.mark.parametrize("path", ["photo_test_1.png", "red train.png", "trains/test-2.png"])
@pytest.mark.parametrize("captions", [False, True])
def test_words_in_names_choose_no_split(tmp_path, path, captions):
    """`datasets` would take such a file for a split, and leave out files without such a word."""
    folder = Path(make_images(tmp_path / "images", 2))
    (folder / path).parent.mkdir(exist_ok=True)
    shutil.copy(folder / "0.png", folder / path)
    for name in ("test.txt", "captions_train.json", *(["0.txt"] if captions else [])):
        (folder / name).write_text("a dog")
    assert len(read(folder, captions).rows) == len([*read(folder, streaming=True).rows]) == 3
    with pytest.raises(SystemExit, match="can't be loaded as a data set .*[Uu]nknown split .test"):
        read(folder, captions, dataset_split="test")


@pytest.mark.parametrize("name", ["val", "deep/val"])
def test_a_folder_named_like_a_split_holds_it(tmp_path, capsys, name):
    folder = Path(make_images(tmp_path / "images", 2))
    make_images(folder / name, 1)
    assert RowDataset(read(folder), str(folder)).names() == ["0.png", "1.png"]
    said = f"not used: 1 file of other splits (validation), such as {name}/0.png"
    assert capsys.readouterr().out == f"{folder}: {said}\n"
    rows = read(folder, dataset_split="validation")
    assert RowDataset(rows, str(folder)).names() == [f"{name}/0.png"]
    make_images(folder / "train", 3)  # then other files are in no split
    capsys.readouterr()
    assert len(read(folder).rows) == 3
    assert "2 of 6 files are not used (2 .png), such as 0.png" in capsys.readouterr().out


def test_a_readme_may_name_the_images(tmp_path):
    folder = Path(make_images(tmp_path / "images", 3))
    (folder / "README.md").write_text("---\nlicense: mit\n---\n")
    assert len(read(folder).rows) == 3
    card = "---\nconfigs:\n- config_name: default\n  data_files: '0*'\n---\n"
    (folder / "README.md").write_text(card)
    assert len(read(folder).rows) == 1
    (folder / "2.txt").write_text("a dog")  # with captions in files, no README.md is read
    assert len(read(folder).rows) == 3


def test_a_changed_image_is_read_again(tmp_path):
    folder = Path(make_images(tmp_path / "images", 2))
    before = read(folder).rows._fingerprint
    assert read(folder).rows._fingerprint == before
    os.utime(folder / "0.png", (1, 1))
    assert read(folder).rows._fingerprint != before


def test_files_of_other_splits_are_counted(tmp_path, capsys):
    for name in ("train", "test"):
        make_images(tmp_path / "images" / name, 2)
    folder = tmp_path / "images"
    assert len(read(folder).rows) == len(read(folder, dataset_split="test[:1]+train[:1]").rows) == 2
    said = "not used: 2 files of other splits (test), such as test/0.png"
    assert capsys.readouterr().out == f"{folder}: {said}\n"


def test_two_masks_for_one_image_are_refused(tmp_path):
    folder = Path(make_images(tmp_path / "images", 2))
    for suffix in ("png", "jpg"):
        shutil.copy(folder / "0.png", folder / f"1.mask.{suffix}")
    with pytest.raises(SystemExit, match="are masks of the same image: delete one"):
        read(folder)


def test_images_in_folders_with_zero_repeats_are_counted(tmp_path, capsys):
    for name in ("0_later", "2_cat"):
        make_images(tmp_path / "images" / name, 2)
    assert len(read(tmp_path / "images", captions=True, folder_repeats=True).rows) == 4
    assert "2 images are unused: folder 0_later sets 0 repeats" in capsys.readouterr().out
