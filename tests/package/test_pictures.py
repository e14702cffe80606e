"""Downloaded files become complete images, resized as in the trainers if asked."""

import contextlib
import hashlib
import io

import numpy as np
import pytest
import torch
from PIL import Image, ImageFile

from diffusion_training.data.images import decode_image, shrink
from diffusion_training.web import pictures as module

script = pytest.importorskip("download_images", reason="needs requirements-ray.txt")


def make_args(*flags):
    return script.parse_args(["--input", "x", "--output_dir", "y", *map(str, flags)])


def encode(image, kind="PNG", **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def photograph(mode="RGB", size=(300, 200)):
    y, x = np.mgrid[: size[1], : size[0]]
    pixels = np.stack([x * 255 / size[0], y * 255 / size[1], 128 + 120 * np.sin(x / 9)], -1)
    image = Image.fromarray(pixels.astype(np.uint8))
    if mode == "I;16":
        return Image.fromarray((pixels[..., 2] * 256).astype(np.uint16))
    image = image.convert(mode)
    if mode in ("RGBA", "LA"):
        image.putalpha(Image.fromarray(pixels[..., 0].astype(np.uint8)))
    return image


def compare(pixels, expected):
    """Compare the brightness, because colour is stored at half the resolution."""
    grey = torch.tensor([0.299, 0.587, 0.114])[:, None, None]
    return ((pixels.float() - expected.float()) * grey).sum(0).abs()


@pytest.mark.parametrize("mode", ["RGB", "L", "P", "1", "CMYK", "RGBA", "LA", "I;16"])
def test_resized_images_equal_those_of_the_trainers(mode):
    data = encode(photograph(mode), "JPEG" if mode == "CMYK" else "PNG")
    stored, width, height = module.check_image(
        data, make_args("--resize_to", 64, "--jpeg_quality", 100)
    )
    expected = shrink(decode_image({"bytes": data, "path": None}, 3), 64)
    assert (height, width) == tuple(expected.shape[1:]) == (64, 96)
    pixels = decode_image({"bytes": stored, "path": None}, 3)
    assert pixels.shape == expected.shape
    difference = compare(pixels, expected)
    assert difference.mean() < (4 if mode == "1" else 1) and difference.max() < 16  # "1": dots


def test_resizing_fine_rings_causes_no_aliasing():
    y, x = np.mgrid[:200, :300]
    rings = Image.fromarray(
        (127.5 + 127.5 * np.cos(((x - 150) ** 2 + (y - 100) ** 2) / 95)).astype(np.uint8)
    )
    data = encode(rings)
    stored = module.check_image(data, make_args("--resize_to", 64, "--jpeg_quality", 100))[0]
    expected = shrink(decode_image({"bytes": data, "path": None}, 3), 64)
    difference = compare(decode_image({"bytes": stored, "path": None}, 3), expected)
    # averaging only each pixel's own area gives 12, the nearest pixel 70
    assert difference.mean() < 8 and difference.max() < 40


@pytest.mark.parametrize("orientation", [1, 2, 6])
def test_large_jpegs_are_decoded_at_reduced_size_and_look_the_same(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encode(photograph(size=(1500, 1000)), "JPEG", exif=exif, quality=95)
    stored, *size = module.check_image(data, make_args("--resize_to", 100, "--jpeg_quality", 100))
    assert size == ([150, 100] if orientation < 5 else [100, 150])
    expected = shrink(decode_image({"bytes": data, "path": None}, 3), 100)
    difference = compare(decode_image({"bytes": stored, "path": None}, 3), expected)
    assert difference.mean() < 1 and difference.max() < 12
    with pytest.MonkeyPatch.context() as m:
        sizes, resize = [], Image.Image.resize
        m.setattr(
            Image.Image,
            "resize",
            lambda self, *args: sizes.append(self.size) or resize(self, *args),
        )
        module.check_image(data, make_args("--resize_to", 100))
    # decoded at a quarter, still at least twice the final size
    assert sizes[0] == ((375, 250) if orientation < 5 else (250, 375))


def test_resize_to_applies_exif_and_never_enlarges():
    exif = Image.Exif()
    exif[0x0112] = 6
    data = encode(photograph(), "JPEG", exif=exif)
    assert module.check_image(data, make_args()) == (data, 200, 300)
    stored, width, height = module.check_image(data, make_args("--resize_to", 100))
    assert (width, height) == (100, 150) == Image.open(io.BytesIO(stored)).size
    assert not Image.open(io.BytesIO(stored)).getexif()
    assert module.check_image(data, make_args("--resize_to", 200)) == (data, 200, 300)
    small = module.check_image(data, make_args("--resize_to", 100, "--jpeg_quality", 20))[0]
    assert len(small) < len(stored)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "GIF", "WEBP", "BMP", "TIFF", "AVIF"])
def test_truncated_image_files_are_refused(kind):
    data = encode(photograph(), kind)
    assert module.check_image(data, make_args()) == (data, 300, 200)
    for flags in ([], ["--resize_to", 64]):
        with pytest.raises(module.Failure, match="not an image"):
            module.check_image(data[: len(data) * 2 // 3], make_args(*flags))


@pytest.mark.parametrize("flags, reason", [
    (["--min_size", 201], "too small: 300 x 200"),
    (["--max_aspect_ratio", 1.4], "aspect ratio: 300 x 200"),
    (["--min_size", 200, "--max_aspect_ratio", 1.5], None),
])  # fmt: skip
def test_min_size_and_max_aspect_ratio_are_enforced(flags, reason):
    with pytest.raises(module.Failure, match=reason) if reason else contextlib.nullcontext():
        module.check_image(encode(photograph()), make_args(*flags))


def test_decompression_bombs_are_not_decoded(monkeypatch):
    for size, where in (
        ((13_000, 7_000), "too many pixels: 13000 x 7000"),
        ((20_000, 20_000), "too many pixels"),
    ):
        data = encode(Image.new("1", size))
        with monkeypatch.context() as m, pytest.raises(module.Failure, match=where):
            m.setattr(ImageFile.ImageFile, "load", None)
            module.check_image(data, make_args())


def test_16_bit_grey_counts_four_times_in_the_pixel_limit(monkeypatch):
    """It is decoded to float32, and again for its values."""
    data = encode(photograph("I;16", (30, 20)))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 4 * 30 * 20)
    assert module.check_image(data, make_args()) == (data, 30, 20)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 4 * 30 * 20 - 1)
    with pytest.raises(module.Failure, match="too many pixels: 30 x 20"):
        module.check_image(data, make_args())


def test_large_images_are_decoded_one_at_a_time():
    for size, times in (((4096, 4096), 0), ((4097, 4096), 1)):
        held = []
        alone = contextlib.ExitStack()
        alone.callback(held.append, size)  # when the memory is released
        module.check_image(encode(Image.new("1", size)), make_args(), alone)
        assert len(held) == times


def test_jpegs_kept_unchanged_are_checked_at_an_eighth_of_their_size(monkeypatch):
    sizes, load = [], Image.Image.load
    monkeypatch.setattr(Image.Image, "load", lambda self: sizes.append(self.size) or load(self))
    data = encode(photograph(size=(1500, 1000)), "JPEG", progressive=True)
    assert module.check_image(data, make_args()) == (data, 1500, 1000) and sizes[-1] == (188, 125)
    scan = data.rindex(b"\xff\xda")
    with pytest.raises(module.Failure, match="not an image: it has 5[0-9]{3} scans"):
        module.check_image(data[:scan] + data[scan:-2] * 5000 + data[-2:], make_args())


def test_formats_that_start_programs_are_not_opened():
    for data in (
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 40 40\nshowpage\n",
        encode(photograph(), "PPM"),
        b"",
    ):
        with pytest.raises(
            module.Failure, match="not an image: cannot identify image file"
        ) as caught:
            module.check_image(data, make_args())
        # no wait: it is not tried again
        assert caught.value.wait is None and "BytesIO" not in str(caught.value)


def test_store_image_records_its_place_and_raises_on_a_full_disk():
    spool, files = io.BytesIO(), [encode(photograph(size=(40 + i, 30))) for i in range(3)]
    stored = [module.store_image(data, spool, make_args()) for data in files]
    for i, (image, data) in enumerate(zip(stored, files, strict=True)):
        assert spool.getvalue()[image["first"] : image["last"]] == data
        assert (image["width"], image["height"]) == (40 + i, 30)
        assert image["sha256"] == hashlib.sha256(data).hexdigest()
    assert [image["first"] for image in stored] == [0, *[image["last"] for image in stored[:-1]]]
    shrunk = module.store_image(files[0], spool, make_args("--resize_to", 10))
    # the hash of the original file
    assert shrunk["sha256"] == stored[0]["sha256"] and shrunk["height"] == 10

    class Full(io.BytesIO):
        def write(self, data):
            raise OSError("No space left on device")

    with pytest.raises(OSError, match="No space left"):
        module.store_image(files[0], Full(), make_args())


@pytest.mark.parametrize(
    "error", [MemoryError(), OSError(5, "Input/output error"), OSError("broken data stream")]
)
def test_check_image_raises_machine_faults_instead_of_failing_the_image(monkeypatch, error):
    def fail(self):
        raise error

    data = encode(photograph())
    monkeypatch.setattr(Image.Image, "load", fail)
    with pytest.raises(module.Failure if error.args == ("broken data stream",) else type(error)):
        module.check_image(data, make_args())


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "AVIF", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_images_are_measured_and_shrunk_as_exif_displays_them(orientation, kind):
    """Pillow turns a TIFF by itself; of the others it gives the stored size."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encode(photograph(), kind, exif=exif)
    width, height = (300, 200) if orientation < 5 else (200, 300)
    assert module.check_image(data, make_args())[1:] == (width, height)
    stored, *size = module.check_image(data, make_args("--resize_to", 100, "--jpeg_quality", 100))
    assert size == [width // 2, height // 2]
    pixels = decode_image({"bytes": stored, "path": None}, 3)
    expected = shrink(decode_image({"bytes": data, "path": None}, 3), 100)
    assert pixels.shape == expected.shape
    difference = compare(pixels, expected)
    assert difference.mean() < 1 and difference.max() < 16


def test_resized_grey_images_stay_grey_and_white_stays_white():
    for image in (photograph("L"), Image.fromarray(np.full((200, 300), 65535, np.uint16))):
        stored = Image.open(
            io.BytesIO(module.check_image(encode(image), make_args("--resize_to", 64))[0])
        )
        assert stored.mode == "L" and (image.mode == "L" or stored.getextrema() == (255, 255))


def test_images_with_exactly_the_pixel_limit_are_decoded(monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 300 * 200)
    assert module.check_image(encode(photograph()), make_args())[1:] == (300, 200)
