"""Buckets: their sizes, the bucket of an image, and the order of the buckets."""

import argparse
import collections
import io

import datasets
import numpy as np
import pytest
from accelerate import Accelerator
from PIL import Image

from diffusion_training.data import buckets as module
from diffusion_training.data.images import decode_image
from diffusion_training.data.transform_settings import make_transform
from diffusion_training.order import Order
from diffusion_training.training.progress import Progress


def settings(resolution=512, step=64, ratio=2.0, **more):
    options = {"bucket_step": step, "bucket_max_ratio": ratio}
    flags = {"dataset_name": None, "train_data_dir": ".", **options, **more}
    return make_transform(argparse.Namespace(**flags), "photo", None, None, 3, resolution)


def test_list_buckets_gives_the_widest_sizes_within_limits():
    five = [(384, 640), (448, 576), (512, 512), (576, 448), (640, 384)]
    assert module.list_buckets(512, 64, 2.0) == five
    found = module.list_buckets(1024, 64, 2.0)
    assert len(found) == 13 and {(1024, 1024), (832, 1216), (704, 1408), (1408, 704)} < set(found)
    for resolution, step, ratio in ((512, 8, 4.0), (96, 16, 1.5), (64, 64, 16.0)):
        found = module.list_buckets(resolution, step, ratio)
        assert (resolution, resolution) in found and {size[::-1] for size in found} == set(found)
        for height, width in found:
            assert height % step == width % step == 0 and height * width <= resolution**2
            assert max(height, width) <= ratio * min(height, width)
    assert module.list_buckets(512, 64, 1.0) == [(512, 512)]


@pytest.mark.parametrize("size, bucket", [
    ((100, 100), (512, 512)), ((1, 1), (512, 512)),
    ((480, 640), (448, 576)), ((640, 480), (576, 448)),
    ((10, 1000), (384, 640)), ((1000, 10), (640, 384)),
    ((1080, 1920), (384, 640)), ((500, 520), (512, 512)),
])  # fmt: skip
def test_choose_size_takes_the_nearest_aspect_ratio(size, bucket):
    assert module.choose_size(*size, settings()) == bucket
    assert module.choose_size(*size, settings(step=None)) == (512, 512)


@pytest.mark.parametrize("size, bucket", [
    ((1080, 1920), (384, 640)), ((512, 512), (512, 512)),  # large enough: no change
    ((500, 520), (448, 512)), ((100, 700), (64, 640)),
    ((300, 4000), (256, 640)), ((40, 30), (64, 64)),
])  # fmt: skip
def test_bucket_no_upscale_never_enlarges_a_side(size, bucket):
    assert module.choose_size(*size, settings(bucket_no_upscale=True)) == bucket
    whole = settings(step=None, bucket_no_upscale=True)
    assert module.choose_size(*size, whole) == (512, 512)


def test_choose_size_takes_the_larger_of_two_equal_ratios(monkeypatch):
    monkeypatch.setattr(
        module, "list_buckets", lambda *settings: [(8, 4), (16, 8), (8, 16), (4, 8)]
    )
    assert module.choose_size(200, 100, settings()) == (16, 8) and module.choose_size(
        1, 2, settings()
    ) == (8, 16)


def test_read_sizes_respects_exif_rotation_and_bad_images_count_as_square(tmp_path):
    """An image with an EXIF rotation counts as it is shown.

    One that can't be read counts as a square, and is skipped when it is decoded.
    """
    sources = []
    for i, (size, orientation) in enumerate(
        [((30, 20), 1), ((30, 20), 6), ((20, 30), 4), ((40, 20), 5)]
    ):
        exif, file = Image.Exif(), io.BytesIO()
        exif[0x0112] = orientation
        Image.new("RGB", size).save(file, "JPEG", exif=exif)
        (tmp_path / f"{i}.jpg").write_bytes(file.getvalue())
        sources.append(
            {"bytes": file.getvalue() if i % 2 else None, "path": str(tmp_path / f"{i}.jpg")}
        )
    sources += [
        {"bytes": b"no image", "path": None},
        {"bytes": None, "path": str(tmp_path / "gone.jpg")},
    ]
    rows = datasets.Dataset.from_dict({"photo": sources}).cast_column(
        "photo", datasets.Image(decode=False)
    )
    found = module.choose_sizes(Accelerator(cpu=True), rows, settings(48, 16), 0)
    assert module.list_buckets(48, 16, 2.0) == [(32, 64), (48, 48), (64, 32)]
    assert found.tolist() == [[32, 64], [64, 32], [64, 32], [64, 32], [48, 48], [48, 48]]
    assert module.read_sizes({"photo": sources}, "photo")["size"][:4] == [
        (20, 30),
        (30, 20),
        (30, 20),
        (40, 20),
    ]
    assert module.choose_sizes(None, rows, settings(48, None), 0) is None


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP", "AVIF", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_read_sizes_gives_the_size_of_the_decoded_image(orientation, format):
    exif, file = Image.Exif(), io.BytesIO()
    exif[0x0112] = orientation
    Image.new("RGB", (30, 20)).save(file, format, exif=exif)
    source = {"bytes": file.getvalue(), "path": None}
    (size,) = module.read_sizes({"photo": [source]}, "photo")["size"]
    assert size == tuple(decode_image(source, 3).shape[1:])


def test_read_sizes_raises_memory_errors(monkeypatch):
    def fail(file):
        raise MemoryError

    monkeypatch.setattr(module, "open_image", fail)
    with pytest.raises(MemoryError):
        module.read_sizes({"image": [{"bytes": b"x", "path": None}]}, "image")


def walk(num_rows, sizes, batch_size, accumulation):
    """The steps of an epoch, as lists of micro-batches."""
    order = Order(range(num_rows), 0, sizes)
    start = {"global_step": 0, "data_step": 0, "images_seen": 0}
    progress, steps = Progress(start, num_rows, batch_size, accumulation, order), []
    while progress.images_seen < num_rows:
        step = progress.next_step()
        rows = order.arrange(0, *progress.cuts)[progress.images_seen :][: step.images]
        steps.append(order.cut(rows, batch_size))
        assert len(steps[-1]) == step.micro_batches
        progress.advance(len(rows), stepped=True)
    return steps


def test_most_steps_have_one_bucket_and_few_extra_micro_batches():
    sizes = np.random.default_rng(0).integers(0, 5, (2000, 1)).repeat(2, axis=1)
    steps = walk(2000, sizes, 8, 4)
    assert (
        sum(len({sizes[row][0] for rows in step for row in rows}) == 1 for step in steps)
        >= len(steps) - 5
    )
    assert 2000 / 8 <= sum(map(len, steps)) <= 2000 / 8 + 25
    first = [sizes[step[0][0]][0] for step in steps[:30]]
    assert max(collections.Counter(first).values()) < 15  # the sizes come in no order


def test_micro_batches_never_mix_two_sizes():
    sizes = np.array([(8, 8), (8, 16)] * 9)
    steps = walk(18, sizes, 4, 2)
    assert all(len({row % 2 for row in rows}) == 1 for step in steps for rows in step)
    assert sorted(row for step in steps for rows in step for row in rows) == list(range(18))


def test_leftover_images_of_many_sizes_are_shuffled():
    """All 30 images are left over, in 13 sizes, which must not come in numerical order."""
    sizes = np.random.default_rng(0).integers(0, 13, (30, 1)).repeat(2, axis=1)
    seen = [sizes[rows[0]][0] for step in walk(30, sizes, 4, 1) for rows in step]
    assert seen != sorted(seen) and seen != sorted(seen, reverse=True)


def test_images_of_one_size_are_ordered_as_without_buckets():
    plain, one_size = Order(range(20), 3), Order(range(20), 3, np.full((20, 2), 8))
    assert plain.arrange(1, 4, 2).tolist() != plain.arrange(2, 4, 2).tolist()
    assert one_size.arrange(1, 4, 2).tolist() == plain.arrange(1, 9, 9).tolist()
    assert plain.num_sizes == one_size.num_sizes == 1
