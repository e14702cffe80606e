"""Captions of a folder: from names of folders, one for all images, and errors."""

import argparse
import errno
from pathlib import Path

import datasets
import numpy as np
import pytest
from conftest import make_images
from PIL import Image

from diffusion_training.data.rows import load_rows


def read(folder, **flags):
    """Call `load_rows` with flags."""
    flags = {
        "caption_column": "text",
        "caption_extension": ".txt",
        "instance_prompt": None,
        **flags,
    }
    flags = {"folder_repeats": False, "dataset_name": None, "train_data_dir": str(folder), **flags}
    flags |= {
        "dataset_config_name": None,
        "dataset_split": "train",
        "cache_dir": str(folder.parent / "kept"),
    }
    args = argparse.Namespace(**flags, image_column=None, max_train_samples=None, mask_column=None)
    return load_rows(args, others=["text"])


def load(folder, **flags):
    """(names and captions of the rows, their fingerprint)."""
    rows, column, _ = read(folder, **flags)
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
        read(tmp_path / place / "images", folder_repeats=True).rows for place in ("disk", "data")
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
