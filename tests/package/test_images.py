"""Images: every kind is decoded correctly, faults have a reason, and keys determine the crops."""

import argparse
import contextlib
import io
import ntpath
import os
import random
import struct
import zlib
from pathlib import PureWindowsPath

import fsspec
import numpy as np
import pytest
import torch
from PIL import Image, ImageOps
from PIL.PngImagePlugin import PngInfo

from diffusion_training.data import images
from diffusion_training.data.images import (
    decode_image,
    describe_decoder,
    name_image,
    plan_crop,
    shrink,
)
from diffusion_training.latents.batch_inputs import make_time_ids
from diffusion_training.pillow import read_orientation
from diffusion_training.web.pictures import FORMATS, Failure, check_image


def encoded(image, format, **options):
    """An image as in an undecoded column."""
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return {"bytes": buffer.getvalue(), "path": None}


def photo(mode="RGB"):
    """A 12 x 8 image, red on the left and blue on the right.

    PNG stores it without loss, JPEG nearly so.
    """
    pixels = np.zeros((8, 12, 3), np.uint8)
    pixels[:, :6, 0] = 200
    pixels[:, 6:, 2] = 100
    return Image.fromarray(pixels).convert(mode)


def test_decode_image_reads_every_format_and_mode():
    rgb = torch.from_numpy(np.array(photo())).permute(2, 0, 1)
    grey = torch.from_numpy(np.array(photo("L")))[None]

    def close(image, expected, tolerance):
        assert image.dtype == torch.uint8 and image.shape == expected.shape
        assert (image.int() - expected.int()).abs().max() <= tolerance

    for name, data, tolerance in (
        ("png", encoded(photo(), "PNG"), 0),
        ("palette", encoded(photo().quantize(4), "PNG"), 2),
        ("jpeg", encoded(photo(), "JPEG", quality=100, subsampling=0), 8),
        ("cmyk", encoded(photo("CMYK"), "JPEG", quality=100, subsampling=0), 12),
        ("webp", encoded(photo(), "WEBP", lossless=True), 0),
        ("bmp", encoded(photo(), "BMP"), 0),
        ("rgba", encoded(photo("RGBA"), "PNG"), 0),
    ):
        close(decode_image(data, 3), rgb, tolerance)
        close(decode_image({**data, "path": name}, 1), grey, max(tolerance, 1))
    for data in (
        encoded(photo("L"), "PNG"),
        encoded(photo("L"), "JPEG", quality=100),
        encoded(photo("LA"), "PNG"),
    ):
        close(decode_image(data, 3), grey.expand(3, -1, -1), 2)
        close(decode_image(data, 1), grey, 2)
    close(
        decode_image(encoded(photo("1"), "PNG"), 1),
        torch.from_numpy(np.array(photo("1")))[None] * 255,
        0,
    )
    frames = [photo(), Image.new("RGB", (12, 8), "green")]
    close(
        decode_image(encoded(frames[0], "GIF", save_all=True, append_images=frames[1:]), 3), rgb, 2
    )


@pytest.mark.parametrize("format", ["JPEG", "PNG"])
def test_decode_image_applies_exif_orientation(format):
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was upright: rotate by 90 degrees to the right
    image = decode_image(encoded(photo(), format, exif=exif), 3)
    assert image.shape == (3, 12, 8) and image[0, 2, 4] > 180 and image[2, 9, 4] > 80


@pytest.mark.parametrize("orientation", range(1, 9))
def test_torchcodec_and_pillow_decode_jpegs_alike(orientation, monkeypatch):
    """torchcodec if it is installed, else Pillow. Both rotate as Pillow reads the EXIF."""
    rng, exif = np.random.default_rng(orientation), Image.Exif()
    noise = rng.integers(0, 255, (9, 13, 3)).astype(np.uint8)
    picture = Image.fromarray(noise).resize((130, 90), Image.BICUBIC)
    xmp = b"http://ns.adobe.com/xap/1.0/\0<x:xmpmeta xmlns:x='adobe:ns:meta/'></x:xmpmeta>"
    exif[0x0112] = orientation
    plain, turned = encoded(picture, "JPEG", quality=90)["bytes"], exif.tobytes()
    segment = lambda content: b"\xff\xe1" + (len(content) + 2).to_bytes(2, "big") + content
    files = {
        "exif": encoded(picture, "JPEG", quality=90, exif=turned)["bytes"],
        "xmp before exif": plain[:2]
        + segment(xmp)
        + segment(b"Exif\0\0" + turned.removeprefix(b"Exif\0\0"))
        + plain[2:],
        "damaged exif": plain[:2]
        + segment(b"Exif\0\0II*\0" + bytes([orientation] * 20))
        + plain[2:],
        "grey": encoded(picture.convert("L"), "JPEG", quality=90, exif=turned)["bytes"],
    }
    assert images.decode_jpeg is not None and describe_decoder().startswith("torchcodec ")
    for name, data in files.items():
        for channels in (1, 3):
            with monkeypatch.context() as fallback:
                one = decode_image({"bytes": data, "path": None}, channels)
                fallback.setattr(images, "decode_jpeg", None)
                other = decode_image({"bytes": data, "path": None}, channels)
                assert describe_decoder().startswith("pillow ")
            assert one.shape == other.shape, name
            # One decoder gives grey, the other colours that are then made grey; they differ by
            # some levels where colours are clipped.
            assert (one.int() - other.int()).abs().max() <= (
                0 if channels == 3 or name == "grey" else 8
            ), name
            assert one.shape[1:] == (
                (130, 90) if orientation > 4 and name != "damaged exif" else (90, 130)
            ), name


def test_eps_files_are_not_decoded():
    eps = io.BytesIO()
    photo().save(eps, "EPS")
    with pytest.raises(Image.UnidentifiedImageError):
        decode_image({"bytes": eps.getvalue(), "path": "cat.png"}, 3)


def test_transparent_pixels_become_white():
    image = photo("RGBA")
    image.putalpha(
        Image.fromarray(np.tile(np.repeat([[255, 0]], [6, 6], axis=1), (8, 1)).astype(np.uint8))
    )
    for data in (encoded(image, "PNG"), encoded(image, "WEBP", lossless=True)):
        decoded = decode_image(data, 3)
        assert decoded[:, 4, 2].tolist() == [200, 0, 0] and decoded[:, 4, 9].tolist() == [
            255,
            255,
            255,
        ]
    palette = photo().quantize(4)
    transparent = palette.getpixel((9, 4))
    decoded = decode_image(encoded(palette, "GIF", transparency=transparent), 3)
    assert decoded[:, 4, 9].tolist() == [255, 255, 255] and decoded[0, 4, 2] > 195


@pytest.mark.parametrize(
    "format, dtype", [("PNG", "<u2"), ("TIFF", "<u2"), ("TIFF", "<i4"), ("TIFF", "<f4")]
)
def test_16_bit_grey_is_scaled_to_8_bits_unless_precision_is_kept(format, dtype):
    values = np.linspace(0, 1, 12 * 8).reshape(8, 12)
    scale = 1.0 if dtype == "<f4" else 65535
    data = encoded(Image.fromarray((values * scale).astype(dtype)), format)
    eight = decode_image(data, 3)
    assert eight.shape == (3, 8, 12) and np.abs(eight[1].numpy() - values * 255).max() <= 0.51
    exact = decode_image(data, 1, keep_precision=True)
    assert exact.dtype == torch.float32 and np.abs(exact[0].numpy() - values).max() < 2e-5
    plain = decode_image(encoded(photo(), "PNG"), 3, keep_precision=True)
    assert plain.dtype == torch.float32 and plain[0, 0, 0] == pytest.approx(200 / 255)


@pytest.mark.parametrize(
    "dtype, value", [("<f4", 250.0), ("<f4", -0.1), ("<f4", np.nan), ("<i4", 70000), ("<i4", -1)]
)
def test_grey_values_out_of_range_are_refused_and_not_clipped(dtype, value):
    values = np.zeros((8, 12), dtype)
    values[2, 3] = value
    with pytest.raises(ValueError, match="its values are not from 0 to"):
        decode_image(encoded(Image.fromarray(values), "TIFF"), 1)


def test_files_that_can_not_be_decoded_have_a_reason(tmp_path):
    whole = encoded(photo(), "PNG")["bytes"]
    header = b"IHDR" + struct.pack(">II", 50000, 50000) + whole[24:29]
    bomb = whole[:12] + header + struct.pack(">I", zlib.crc32(header)) + whole[33:]
    with pytest.raises(Image.DecompressionBombError):
        decode_image({"bytes": bomb, "path": None}, 3)
    with pytest.raises(OSError, match="truncated"):
        decode_image({"bytes": whole[: len(whole) // 2], "path": None}, 3)
    with pytest.raises(Image.UnidentifiedImageError):
        decode_image({"bytes": b"no image", "path": None}, 3)
    for nothing in (None, {"bytes": None, "path": None}):
        with pytest.raises(ValueError, match="there is no image"):
            decode_image(nothing, 3)
    with pytest.raises(ValueError, match="it is not a file"):
        decode_image({"bytes": None, "path": str(tmp_path)}, 3)
    with pytest.raises(ValueError, match="12 x 8 pixels: a side is below --min_size 9"):
        decode_image({"bytes": whole, "path": None}, 3, min_size=9)
    assert decode_image({"bytes": whole, "path": None}, 3, min_size=8).shape == (3, 8, 12)


def test_decode_image_reads_fsspec_paths_and_raises_for_missing_files(tmp_path):
    fsspec.filesystem("memory").pipe("/there.png", encoded(photo(), "PNG")["bytes"])
    there = {"bytes": None, "path": "memory://there.png"}
    assert decode_image(there, 3, allowed=["memory://there.png"]).shape == (3, 8, 12)
    with pytest.raises(FileNotFoundError):
        decode_image({"bytes": None, "path": str(tmp_path / "gone.png")}, 3)


def test_decode_image_returns_stored_pixels_unchanged():
    pixels = decode_image(encoded(photo(), "PNG"), 3)
    kept = {"bytes": pixels.numpy().tobytes(), "path": None, "size": (3, 8, 12)}
    assert torch.equal(decode_image(kept, 3), pixels)


def test_image_files_above_one_gibibyte_are_refused(tmp_path, monkeypatch):
    class Large(bytes):
        def __len__(self):
            return 2**30 + 1

    class File:
        def read(self, count):
            assert count == 2**30 + 1
            return Large()

    monkeypatch.setattr(images, "open_file", lambda path, _: contextlib.nullcontext(File()))
    (tmp_path / "large.png").touch()
    for source in (
        {"bytes": Large(), "path": None},
        {"bytes": None, "path": str(tmp_path / "large.png")},
    ):
        with pytest.raises(ValueError, match="it has more than 1 GiB"):
            decode_image(source, 3)


def test_names_of_images_are_the_same_on_windows(monkeypatch):
    """They choose what is held out, and caches keep them."""
    for name in ("isabs", "relpath"):
        monkeypatch.setattr(os.path, name, getattr(ntpath, name))
    monkeypatch.setattr("diffusion_training.data.images.PurePath", PureWindowsPath)
    image = {"bytes": b"", "path": r"C:\photos\dogs\one.png"}
    assert name_image(3, image, r"C:\photos") == "dogs/one.png"


def test_name_image_gives_the_file_or_the_row_number():
    assert name_image(3, {"bytes": b"", "path": "a\x1b[31mb.png"}) == "a?[31mb.png"
    assert name_image(3, {"bytes": b"", "path": None}) == name_image(3, None) == "row 3"


def test_shrink_crops_a_square_at_the_given_place():
    ramp = torch.arange(30, dtype=torch.uint8).expand(3, 10, 30)
    assert shrink(ramp, 10, (0.5, 0.5))[0, 0].tolist() == list(range(10, 20))
    assert shrink(ramp, 10, (0, 1))[0, 0].tolist() == list(range(20, 30))
    assert shrink(ramp.mT, 10, (1, 0))[0, :, 0].tolist() == list(range(20, 30))
    assert shrink(ramp, 5, (0.5, 0.5)).shape == (3, 5, 5) and shrink(ramp, 20, None).shape == (
        3,
        20,
        60,
    )
    sharp = torch.tensor([0.0, 1.0]).repeat(8).expand(1, 16, 16)
    assert shrink(sharp, 40, (0, 0)).aminmax() == (0, 1)  # bicubic overshoots
    few = shrink(ramp, 3, (0, 0), "nearest-exact")
    assert set(few.flatten().tolist()) <= set(range(10))


def test_plan_crop_keeps_at_least_one_pixel():
    assert plan_crop(1, 5, (256, 64), (0, 0)) == plan_crop(5, 1, (64, 256), (0, 0)) == (0, 0, 1, 1)


def test_make_time_ids_gives_sizes_and_crops_of_mirrored_images():
    """20 x 30 pixels become 8 x 12; an 8 x 8 crop that begins at 1 begins at 3 when mirrored.

    The crop of a square begins at 0.
    """
    sizes, corners = (
        torch.tensor([[20, 30], [20, 30], [30, 30]]),
        torch.tensor([[0, 1], [0, 1], [0, 0]]),
    )
    told = make_time_ids(sizes, corners, (8, 8), torch.tensor([False, True, True]))
    assert told.tolist() == [[20, 30, 0, 1, 8, 8], [20, 30, 0, 3, 8, 8], [30, 30, 0, 0, 8, 8]]
    (told,) = make_time_ids(
        torch.tensor([[30, 20]]), torch.tensor([[2, 0]]), (8, 16), torch.tensor([True])
    )
    assert told.tolist() == [30, 20, 2, 0, 8, 16]
    wide, strip = torch.tensor([[20, 40]]), torch.tensor([[1, 5]])
    (told,) = make_time_ids(wide, torch.tensor([[0, 1]]), (8, 12), torch.tensor([True]))
    assert told.tolist() == [20, 40, 0, 3, 8, 12]
    (told,) = make_time_ids(strip, torch.tensor([[0, 0]]), (256, 64), torch.tensor([True]))
    assert told.tolist() == [1, 5, 0, 256, 256, 64]  # the crop is one pixel


def test_shrink_limits_the_length_of_very_narrow_images():
    strip = torch.zeros(3, 2, 40000, dtype=torch.uint8)
    assert shrink(strip, 64, None).shape == (3, 64, 256) and shrink(
        strip, 64, (0.5, 0.5)
    ).shape == (3, 64, 64)


@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
def test_shrink_averages_stripes_that_are_too_fine_to_grey(interpolation):
    stripes = torch.tensor([0, 255], dtype=torch.uint8).repeat(24).expand(3, 48, 48)
    assert (shrink(stripes, 16, (0.5, 0.5), interpolation)[..., 1:-1].int() - 127).abs().max() < 30


@pytest.mark.skipif(images.decode_jpeg is None, reason="needs torchcodec")
@pytest.mark.parametrize("mark", [b"Exif\0\0", b"Exif\0\xff", b"xxxx\0\0"])
def test_malformed_exif_does_not_rotate_jpegs(mark):
    """torchcodec would rotate the image for each of these."""
    exif = Image.Exif()
    exif[0x0112] = 6
    buffer = io.BytesIO()
    Image.linear_gradient("L").resize((24, 16)).convert("RGB").save(buffer, "JPEG", exif=exif)
    data = buffer.getvalue().replace(b"Exif\0\0", mark, 1)
    turned = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    pixels = decode_image({"bytes": data, "path": None}, 3)
    assert pixels.shape == (3, turned.height, turned.width)
    assert (
        pixels.permute(1, 2, 0).float() - torch.from_numpy(np.array(turned)).float()
    ).abs().max() < 4


def test_jpegs_with_thousands_of_scans_are_refused():
    buffer = io.BytesIO()
    Image.new("RGB", (64, 64)).save(buffer, "JPEG", progressive=True)
    data = buffer.getvalue()
    assert decode_image({"bytes": data, "path": None}, 3).shape == (3, 64, 64)
    scan = data.rindex(b"\xff\xda")
    with pytest.raises(ValueError, match="it has 5[0-9]{3} scans"):
        decode_image({"bytes": data[:scan] + data[scan:-2] * 5000 + data[-2:], "path": None}, 3)


@pytest.mark.parametrize("format, options", [
    ("PNG", {}), ("PNG", {"bits": 2}), ("JPEG", {}), ("JPEG", {"progressive": True}), ("WEBP", {}),
    ("WEBP", {"lossless": True}), ("AVIF", {}), ("GIF", {}), ("BMP", {}), ("TIFF", {}),
    ("TIFF", {"compression": "tiff_adobe_deflate"}), ("JPEG2000", {}), ("QOI", {}), ("TGA", {}),
])  # fmt: skip
def test_files_with_a_flipped_bit_are_refused_if_pillow_refuses_them(format, options):
    """By trainers and by downloads, whether these keep the file or shrink it."""
    picture = Image.linear_gradient("L").resize((64, 48)).rotate(30).convert("RGB")
    if "bits" in options:
        picture = picture.quantize(4)
    data = encoded(picture, format, **options)["bytes"]
    flags = {"min_size": 0, "max_aspect_ratio": None, "jpeg_quality": 95}
    downloads = [argparse.Namespace(**flags, resize_to=side) for side in (None, 16)]
    rng = random.Random(0)
    refused = 0
    for _ in range(60):
        damaged = bytearray(data)
        damaged[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        try:
            Image.open(io.BytesIO(damaged)).load()
        except Exception:
            is_good = False
            refused += 1
        else:
            is_good = True
        with contextlib.nullcontext() if is_good else pytest.raises(Exception):
            decode_image({"bytes": bytes(damaged), "path": None}, 3)
        for args in downloads if format in FORMATS else ():
            with contextlib.nullcontext() if is_good else pytest.raises(Failure):
                check_image(damaged, args)
    assert refused > 40 or format != "PNG"


def test_a_png_with_a_block_of_zeros_is_refused():
    """As a failing disk leaves it. Its header, its length and its end are good."""
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    data = bytearray(encoded(Image.fromarray(noise), "PNG")["bytes"])
    data[4096:8192] = bytes(4096)
    with pytest.raises(OSError):
        decode_image({"bytes": bytes(data), "path": None}, 3)


def move_to_end(data, kind):
    """A PNG with its chunks of a kind after the pixels."""
    chunks, place = [], 8
    while place < len(data):
        end = place + 12 + struct.unpack(">I", data[place : place + 4])[0]
        chunks.append(data[place:end])
        place = end
    late = [chunk for chunk in chunks if chunk[4:8] == kind]
    assert late
    rest = [chunk for chunk in chunks if chunk[4:8] != kind]
    return data[:8] + b"".join([*rest[:-1], *late, rest[-1]])


@pytest.mark.parametrize("kind", [b"eXIf", b"zTXt", b"iTXt"])
def test_pngs_are_rotated_by_exif_and_xmp_after_the_pixels(kind):
    """As some programs write it. Other texts there cause no decoding of the pixels."""
    exif, texts = Image.Exif(), PngInfo()
    exif[0x0112] = 6
    if kind == b"zTXt":
        raw = exif.tobytes()
        text = f"\nexif\n{len(raw):8}\n{raw.hex()}\n"
        texts.add_text("Raw profile type exif", text, zip=True)
    elif kind == b"iTXt":
        texts.add_itxt("XML:com.adobe.xmp", '<x tiff:Orientation="6"/>')
    options = {"exif": exif} if kind == b"eXIf" else {"pnginfo": texts}
    early = encoded(photo(), "PNG", **options)["bytes"]
    for data in (early, move_to_end(early, kind)):
        image = Image.open(io.BytesIO(data))
        assert read_orientation(image) == 6
        expected = np.array(ImageOps.exif_transpose(Image.open(io.BytesIO(data))))
        pixels = decode_image({"bytes": data, "path": None}, 3)
        assert expected.shape == (12, 8, 3)
        assert pixels.permute(1, 2, 0).numpy().tolist() == expected.tolist()


@pytest.mark.parametrize("format", ["PNG", "JPEG", "WEBP", "TIFF"])
def test_read_orientation_decodes_no_pixels(format, monkeypatch):
    data = encoded(photo(), format)["bytes"]
    if format == "PNG":
        texts = PngInfo()
        texts.add_text("date:create", "2026-11-26")  # as ImageMagick writes it
        data = move_to_end(encoded(photo(), "PNG", pnginfo=texts)["bytes"], b"tEXt")
    image = Image.open(io.BytesIO(data))
    loads = []
    for kind in (Image.Image, type(image)):
        monkeypatch.setattr(kind, "load", lambda self: loads.append(self))
    assert read_orientation(image) == 1 and not loads
