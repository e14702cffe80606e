"""--cache_images: every image is decoded once, and the stored pixels are checked."""

import argparse
import math
import resource
import time

import pytest
import torch
from conftest import make_images, patch

from diffusion_training.data import image_cache
from diffusion_training.data.image_cache import cache_batch, cache_images
from diffusion_training.data.images import decode_image, shrink
from diffusion_training.data.rows import load_rows


@pytest.fixture
def args(tmp_path, monkeypatch):
    monkeypatch.setattr(image_cache, "BEGUN", math.inf)  # like a new process in each call
    make_images(tmp_path / "images", 6)
    names = ["dataset_name", "dataset_config_name", "image_column", "max_train_samples"]
    return argparse.Namespace(
        **dict.fromkeys(names), train_data_dir=str(tmp_path / "images"), dataset_split="train",
        seed=0, cache_dir=str(tmp_path / "cached"), output_dir=str(tmp_path / "out"),
        resolution=16, center_crop=True, min_size=0,
    )  # fmt: skip


def make(args, channels=3, num_workers=1):
    rows, column, *_ = load_rows(args)
    cached, left_out = cache_images(rows, column, channels, num_workers, args)
    return [decode_image(row[column], channels) for row in cached], left_out


def test_cached_images_equal_decoded_images(args, tmp_path):
    rows, column, *_ = load_rows(args)
    expected = [shrink(decode_image(row[column], 3), 16, (0.5, 0.5)) for row in rows]
    pixels, left_out = make(args)
    assert left_out == 0 and all(
        torch.equal(one, other) for one, other in zip(pixels, expected, strict=True)
    )
    args.center_crop = False  # randomly cropped images keep their long side
    assert [tuple(image.shape) for image in make(args)[0]] == [(3, 16, 19)] * 6


def test_the_image_cache_is_reused_for_the_same_data_and_transform(args, tmp_path, monkeypatch):
    calls = []
    patch(
        monkeypatch,
        "decode_image",
        lambda *args, **options: (calls.append(1), decode_image(*args, **options))[1],
    )

    def count(**options):
        calls.clear()
        make(args, **options)
        return len(calls)

    assert count() == 6 and count() == 0
    args.resolution = 32
    assert count() == 6 and count() == 0
    assert count(channels=1) == 6
    args.min_size = 1
    assert count() == 6
    make_images(tmp_path / "images", 7)
    assert count() == 7 and count() == 0


def test_several_processes_make_the_same_image_cache(args):
    alone, _ = make(args)
    args.cache_dir += "-other"
    many, _ = make(args, num_workers=2)
    assert all(torch.equal(one, other) for one, other in zip(alone, many, strict=True))


@pytest.mark.parametrize("damage", [
    lambda path: path.write_bytes(path.read_bytes()[:-900]),
    lambda path: path.write_bytes(b""),
    lambda path: path.write_bytes(path.read_bytes()[:3000] + b"x" * 10 + path.read_bytes()[3010:]),
    lambda path: path.with_name("more.arrow").write_bytes(b"more"),
    lambda path: path.parent.with_suffix(".json").write_text("{}"),
    lambda path: path.parent.with_suffix(".json").write_text(""),
    lambda path: path.parent.with_suffix(".json").unlink(),
    lambda path: path.unlink(),
])  # fmt: skip
def test_a_damaged_or_unfinished_image_cache_is_made_again(args, tmp_path, damage):
    pixels, _ = make(args)
    path = next((tmp_path / "cached/diffusion_training/images").glob("*/*.arrow"))
    whole = path.read_bytes()
    damage(path)
    again, _ = make(args)
    assert path.read_bytes() == whole and [file.name for file in path.parent.iterdir()] == [
        path.name
    ]
    assert all(torch.equal(one, other) for one, other in zip(pixels, again, strict=True))


def test_of_several_processes_one_reads_the_image_cache(args, monkeypatch):
    """The first after they began. A change in between is noticed at the next start."""
    whole, _ = make(args)
    read = []
    checksum = image_cache.checksum_files
    monkeypatch.setattr(
        image_cache, "checksum_files", lambda folder: read.append(folder) or checksum(folder)
    )
    now = time.time()
    for begun, times in ((now + 0.01, 1), (now + 0.01, 1), (now + 0.01, 1), (math.inf, 2)):
        time.sleep(0.02)
        monkeypatch.setattr(image_cache, "BEGUN", begun)
        again, _ = make(args)
        assert len(read) == times
        assert all(torch.equal(one, other) for one, other in zip(whole, again, strict=True))


def test_cache_images_names_and_skips_images_that_can_not_be_decoded(args, tmp_path, capfd):
    (tmp_path / "images/2.png").write_bytes(b"no image")
    (tmp_path / "images/4.png").write_bytes(b"no image")
    pixels, left_out = make(args)
    assert (len(pixels), left_out) == (4, 2) and capfd.readouterr().err.count(
        "2.png (cannot identify"
    ) == 1
    assert make(args)[1] == 2 and "2.png" not in capfd.readouterr().err  # only reported once
    for i in range(6):
        (tmp_path / f"images/{i}.png").write_bytes(b"none at all")
    with pytest.raises(SystemExit, match="none of the 6 images could be used"):
        make(args)


def test_cache_batch_names_and_skips_rows_without_an_image(capfd):
    rows = {"image": [None, {"bytes": None, "path": None}]}
    assert cache_batch(rows, [5, 6], "image", 16, True, 3, 0) == {"image": []}
    said = capfd.readouterr().err
    assert (
        "Skipped row 5 (there is no image)" in said and "Skipped row 6 (there is no image)" in said
    )


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_disk_that_takes_no_more_ends_in_a_sentence(args, num_workers):
    rows, column, *_ = load_rows(args)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limit[1]))  # bytes of a file
    try:
        with pytest.raises(
            SystemExit, match="can't be cached in .* is its disk or the memory full"
        ):
            cache_images(rows, column, 3, num_workers, args)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert len(make(args)[0]) == 6
