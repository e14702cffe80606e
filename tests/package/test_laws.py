"""Properties that hold for any input, tested with examples from hypothesis (the same each time)."""

import argparse
import collections
import io
import itertools
import json
import math
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from diffusion_training.arguments import SWITCH, format_args, make_parser, number
from diffusion_training.data.images import decode_image, shrink
from diffusion_training.draws import draw_choices
from diffusion_training.files import check_output_dir, find_differences
from diffusion_training.order import Order, step_batches
from diffusion_training.training.progress import Progress


def law(count):
    """Test with `count` examples, the same each time.

    Nothing is written to disk, and a slow machine does not fail.
    """
    checks = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
    return settings(
        max_examples=count, derandomize=True, database=None, deadline=None,
        suppress_health_check=checks,
    )  # fmt: skip


# ------------------------------------------------------------------- order and progress

# batch, accumulation, processes
LAUNCH = st.tuples(st.integers(1, 9), st.integers(1, 5), st.integers(1, 5))


def check_epochs(parts, make_order, rows, num_epochs, sizes=None):
    """Check that each row comes once per epoch, with any number of resumes.

    `parts` are launches in sequence, each killed after some steps; the last runs to the end. A
    micro-batch has one of the images' `sizes` on all processes.
    """
    num_images, end = len(rows), num_epochs * len(rows)
    state, seen = {"global_step": 0, "data_step": 0, "images_seen": 0}, []
    for (batch_size, accumulation, num_processes), steps in [*parts, (parts[-1][0], math.inf)]:
        order, state = make_order(), json.loads(json.dumps(state))
        progress = Progress(state, num_images, batch_size * num_processes, accumulation, order)
        ranks = [
            step_batches(order, progress, rank, num_processes) for rank in range(num_processes)
        ]
        last_step = progress.last_step(num_epochs)
        while progress.images_seen < end and steps > 0:
            epoch, steps = progress.epoch, steps - 1
            _, _, images, micro_batches = progress.next_step()
            step = [[next(batches) for _ in range(micro_batches)] for batches in ranks]
            keys = [key for batches in step for batch in batches for key in batch]
            used = [key[:2] for key in keys if key[2]]
            assert len(used) == images and all(key[0] == epoch for key in keys)
            assert math.isclose(sum(key[2] for key in keys), num_processes, rel_tol=1e-9)
            assert all(1 <= len(batch) <= batch_size for batches in step for batch in batches)
            for batches in zip(*step, strict=True):  # all have about the same number
                counts = [sum(key[2] > 0 for key in batch) for batch in batches]
                assert max(counts) - min(counts) <= 1
                drawn = [row for keys in batches for _, row, _ in keys]
                assert sizes is None or len({tuple(sizes[row]) for row in drawn}) == 1
            seen += used
            progress.advance(images, stepped=True)
            assert len(seen) == progress.images_seen
        if progress.images_seen == end:
            assert progress.global_step == progress.data_step == last_step
        state = progress.state()
    expected = itertools.product(range(num_epochs), rows)
    assert collections.Counter(seen) == collections.Counter(expected)


@law(150)
@given(
    st.integers(1, 60), st.integers(0, 2**63 - 1), st.integers(1, 3),
    st.lists(st.tuples(LAUNCH, st.integers(1, 15)), min_size=1, max_size=8), st.integers(0, 5),
)  # fmt: skip
@example(30, 0, 1, [((4, 2, 2), 1), ((3, 1, 1), 99)], 13)  # almost all rows are left over
def test_every_row_comes_once_per_epoch_with_any_number_of_resumes(
    num_images, seed, num_epochs, parts, kinds
):
    """The images have up to `kinds` sizes per side."""
    rows = [3 * i + 1 for i in range(num_images)]
    sizes = np.random.default_rng(seed).integers(0, kinds, (3 * num_images, 2)) if kinds else None
    check_epochs(parts, lambda: Order(rows, seed, sizes), rows, num_epochs, sizes)


def take_rows(rows, num_images, images_seen, batch_size, accumulation, num_processes):
    """The keys of two epochs that a launch draws after so many images."""
    state = {"global_step": 0, "data_step": 0, "images_seen": images_seen}
    progress = Progress(state, num_images, batch_size * num_processes, accumulation, rows)
    ranks = [step_batches(rows, progress, rank, num_processes) for rank in range(num_processes)]
    taken = []
    while len(taken) < 2 * num_images:
        _, _, images, micro_batches = progress.next_step()
        for _ in range(micro_batches):
            turns = itertools.zip_longest(*[next(batches) for batches in ranks])
            taken += [key[:2] for keys in turns for key in keys if key and key[2]]
        progress.advance(images, stepped=True)
    return taken[: 2 * num_images]


@law(60)
@given(st.integers(1, 40), st.integers(0, 99), st.integers(0, 120), LAUNCH, LAUNCH)
def test_order_depends_on_seed_and_epoch_not_on_batches_or_processes(
    num_images, seed, images_seen, one, other
):
    def take(*launch):
        return take_rows(Order(range(num_images), seed), num_images, images_seen, *launch)

    assert take(*one) == take(*other)


@law(100)
@given(st.integers(0, 2**63 - 1), *[st.tuples(st.integers(0, 99), st.integers(0, 10**9))] * 2)
@example(0, (0, 3), (1, 3))
def test_draw_choices_differ_between_rows_and_epochs(seed, one, other):
    assume(one != other)
    assert not set(draw_choices(seed, *one)) & set(draw_choices(seed, *other))
    assert list(draw_choices(seed, None, one[1])) == [
        0.5,
        0.5,
        1.0,
        draw_choices(seed, 0, one[1])[3],
    ]


# ------------------------------------------------------------------- flags

TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)
ODD = st.text("ab \t\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029'\"\\#@=-$`*~", max_size=12)
FLAGS = {
    "name": st.one_of(TEXT, ODD),
    "prompts": st.lists(st.one_of(TEXT, ODD), min_size=1, max_size=4),
    "weights": st.lists(st.floats(0, 1e9), min_size=1, max_size=4),
    "rate": st.floats(-1e30, 1e30),
    "size": st.integers(-(10**18), 10**18),
    "batch": st.one_of(st.just("auto"), st.integers(1, 9)),
    "flip": st.booleans(),
}


@pytest.fixture(scope="module")
def parser():
    parser = make_parser("paint.py", "Paint.")
    parser.add_argument("--name")
    parser.add_argument("--prompts", nargs="+")
    parser.add_argument("--weights", nargs="+", type=number(0, 1e9))
    parser.add_argument("--rate", type=number(-1e30, 1e30))
    parser.add_argument("--size", type=number(-(10**18), 10**18, int))
    parser.add_argument("--batch", type=number(1, 9, int, "auto"))
    parser.add_argument("--flip", **SWITCH)
    return parser


@law(400)
@given(st.fixed_dictionaries({}, optional=FLAGS))
@example({"name": "a\nb"})
@example({"name": "\u2028", "prompts": ["a\x85b", "c\rd"]})
def test_run_args_are_read_back_for_any_text(parser, flags):
    """Any text that argparse accepts.

    It does not accept list items that begin with "-" or "@" (a file of flags), nor a value "--".
    """
    assume(
        not any(text.startswith(("-", "@")) for text in flags.get("prompts", ()))
        and flags.get("name") != "--"
    )
    values = {**dict.fromkeys(FLAGS), "flip": False, **flags}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "run.args").write_bytes(format_args(values, "python paint.py").encode())
        assert vars(parser.parse_args([f"@{folder}/run.args"])) == values


@law(300)
@given(
    st.floats(),
    st.floats(),
    st.one_of(st.floats().map(repr), st.integers().map(str)),
    st.sampled_from([int, float]),
)
def test_number_accepts_exactly_the_values_within_its_bounds(low, high, text, kind):
    try:
        value = kind(text)
        expected = low <= value <= high  # nan is never within bounds
    except ValueError:
        expected = False
    try:
        assert number(low, high, kind)(text) == value and expected
    except (argparse.ArgumentTypeError, ValueError):
        assert not expected
    assert number(low, high, kind, text)(text) == text  # a named word is allowed


# ------------------------------------------------------------------- files


@law(30)
@given(st.text(max_size=3), st.characters(categories=["Cs"]), st.text(max_size=3))
@example("", "\ud800", "")
@example("", "\udfff", "")
def test_lone_surrogates_are_refused_in_any_flag(before, odd, after):
    for flags in ({"name": before + odd + after}, {"prompts": ["a", before + odd + after]}):
        with pytest.raises(SystemExit, match="can't be read as text"):
            check_output_dir({"output_dir": "out", **flags})


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-3, 3), st.text("ab", max_size=2)),
    lambda inner: st.dictionaries(st.text("abc", min_size=1, max_size=1), inner, max_size=3),
)
DICTS = st.dictionaries(st.text("abc", min_size=1, max_size=1), JSON, max_size=3)


@law(300)
@given(DICTS, DICTS)
def test_find_differences_is_empty_for_equal_settings_and_symmetric(before, now):
    assert find_differences(before, before) == []
    there, back = find_differences(before, now), find_differences(now, before)
    swapped = [
        text.split(" ", 1)[0] + " {2} -> {0}".format(*text.split(" ", 1)[1].partition(" -> "))
        for text in back
    ]
    assert sorted(there) == sorted(swapped)

    def differs(one, other):
        if isinstance(one, dict) and isinstance(other, dict):
            return any(differs(one.get(key), other.get(key)) for key in {**one, **other})
        return one != other

    assert bool(there) == differs(before, now)


# ------------------------------------------------------------------- images


def paint(mode, size, seed):
    """Noise in a mode. In a palette, every second seed makes one colour transparent."""
    rng, (width, height) = np.random.default_rng(seed), size
    if mode == "I;16":
        return Image.fromarray(rng.integers(0, 2**16, (height, width), dtype=np.uint16))
    pixels = rng.integers(0, 256, (height, width, 4), dtype=np.uint8)
    if mode == "P":
        image = Image.fromarray(pixels[..., 0] // 64, "L").convert("P")
        image.putpalette(rng.integers(0, 256, 12, dtype=np.uint8).tolist())
        if seed % 2:
            image.info["transparency"] = 1
        return image
    if mode == "LA":
        return Image.merge(
            "LA", [Image.fromarray(np.ascontiguousarray(pixels[..., i])) for i in range(2)]
        )
    return (
        Image.fromarray(pixels, "RGBA").convert(mode)
        if mode != "RGBA"
        else Image.fromarray(pixels, "RGBA")
    )


def expect(data, channels):
    """Decode a file with Pillow alone, on a white background: int [channels, H, W]."""
    image = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    if image.mode.startswith("I"):
        grey = np.rint(np.asarray(image) / 257)
        return np.broadcast_to(grey, (channels, *grey.shape)).astype(int)
    rgba = np.asarray(image.convert("RGBA")).astype(float)
    alpha = rgba[..., 3:] / 255
    rgb = Image.fromarray(np.rint(rgba[..., :3] * alpha + 255 * (1 - alpha)).astype(np.uint8))
    pixels = np.asarray(rgb if channels == 3 else rgb.convert("L")).astype(int)
    return pixels.reshape(*pixels.shape[:2], channels).transpose(2, 0, 1)


KINDS = {  # the modes that a format keeps
    "PNG": ["L", "RGB", "RGBA", "P", "LA", "I;16", "1"],
    "WEBP": ["L", "RGB", "RGBA"],
    "TIFF": ["L", "RGB", "RGBA", "P", "LA", "I;16", "1"],
    "BMP": ["L", "RGB", "P", "1"],
    "GIF": ["L", "P", "1"],
    "JPEG": ["L", "RGB", "CMYK"],
}


@law(300)
@given(
    st.sampled_from([(kind, mode) for kind, modes in KINDS.items() for mode in modes]),
    st.tuples(st.integers(1, 40), st.integers(1, 40)), st.integers(0, 99), st.integers(1, 8),
    st.sampled_from([1, 3]),
)  # fmt: skip
def test_decode_image_equals_pillow_for_any_image(kind, size, seed, orientation, channels):
    (format, mode), buffer, exif = kind, io.BytesIO(), Image.Exif()
    exif[0x0112] = orientation
    options = {"exif": exif} if format in ("PNG", "WEBP", "TIFF", "JPEG") else {}
    options |= {"lossless": True, "exact": True} if format == "WEBP" else {}
    options |= {"quality": 95, "subsampling": 0} if format == "JPEG" else {}
    paint(mode, size, seed).save(buffer, format, **options)
    found, expected = (
        decode_image({"bytes": buffer.getvalue(), "path": None}, channels),
        expect(buffer.getvalue(), channels),
    )
    turned = orientation > 4 and "exif" in options
    assert found.dtype == torch.uint8 and found.shape == expected.shape == (
        channels,
        *(size if turned else size[::-1]),
    )
    # For JPEG, one decoder takes grey from the file's luma, the other from colours that are clipped
    # to 0 and 255.
    tolerance = 1 if mode in ("RGBA", "LA", "P") else 0  # mixed with white
    tolerance = (2 if channels == 3 or mode == "L" else 60) if format == "JPEG" else tolerance
    assert np.abs(found.numpy().astype(int) - expected).max() <= tolerance


@law(200)
@given(
    st.integers(1, 300), st.integers(1, 300), st.integers(1, 3), st.integers(2, 40), st.booleans(),
    st.one_of(st.none(), st.tuples(st.floats(0, 1), st.floats(0, 1))),
    st.sampled_from(["bicubic", "bilinear", "nearest-exact"]),
)  # fmt: skip
def test_shrink_gives_the_size_and_keeps_dtype_and_value_range(
    height, width, channels, resolution, floating, place, interpolation
):
    """From 2 pixels on, because torch 2.15 can't resize three channels to one pixel."""
    image = torch.randint(60, 200, (channels, height, width), dtype=torch.uint8)
    image = image / 255 if floating else image
    found, short = shrink(image, resolution, place, interpolation), min(height, width)
    assert found.dtype == image.dtype and found.shape[0] == channels
    if place is not None:
        assert found.shape[1:] == (resolution, resolution)
    else:  # the long side is in proportion, but at most four times the short one
        sides = [int(resolution * min(side, 4 * short) / short) for side in (height, width)]
        assert list(found.shape[1:]) == sides and min(sides) == resolution
    if interpolation != "bicubic":  # which overshoots
        assert found.min() >= image.min() - 1e-6 and found.max() <= image.max() + 1e-6
    flat = shrink(
        torch.full_like(image, image.flatten()[0].item()), resolution, place, interpolation
    )
    assert torch.allclose(flat.float(), image.flatten()[0].float(), atol=1e-5)
