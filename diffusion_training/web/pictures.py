"""Check a downloaded image and shrink it if asked.

This uses Pillow, because torch would take 0.8 GB of memory in each worker.
"""

import contextlib
import hashlib
import io
import os
from argparse import Namespace
from typing import IO, Any

import numpy as np
from PIL import Image, ImageOps

from diffusion_training.errors.faults import is_machines_fault
from diffusion_training.pillow import (
    check_scans,
    is_deep_grey,
    lay_on_white,
    read_deep_grey,
    read_orientation,
)

# EPS is left out because Pillow would start Ghostscript for it.
FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "PNG", "TIFF", "WEBP")
THREADS = min(4, os.cpu_count() or 1)  # decoding threads of a task
# Pixels. Only one larger image is decoded at a time, to limit the memory.
LARGE = 2**24
Lock = contextlib.AbstractContextManager[Any]
NO_LOCK: Lock = contextlib.nullcontext()


class Failure(Exception):
    """The reason why a row has no image.

    `wait` is the number of seconds after which a retry may help, or None if it can't help.
    """

    def __init__(self, reason: str, wait: float | None = None) -> None:
        super().__init__(reason)
        self.wait = wait


def store_image(
    data: bytes | bytearray,
    spool: IO[bytes],
    args: Namespace,
    alone: Lock = NO_LOCK,
    writes: Lock = NO_LOCK,
) -> dict[str, Any]:
    """Check an image, shrink it if asked, and append it to the file `spool`.

    With several threads, the lock `alone` is held to decode a large image, and `writes` to write.
    Returns {"first": first byte in the file, "last": byte after the last, "width", "height": size
    as displayed, "sha256": hash of the downloaded file}. Raises Failure if the data is not a usable
    image, and OSError if it can't be written.
    """
    stored, width, height = check_image(data, args, alone)
    sha256 = hashlib.sha256(data).hexdigest()
    with writes:
        first = spool.seek(0, os.SEEK_END)
        spool.write(stored)
        return {
            "first": first,
            "last": spool.tell(),
            "width": width,
            "height": height,
            "sha256": sha256,
        }


def check_image(
    data: bytes | bytearray, args: Namespace, alone: Lock = NO_LOCK
) -> tuple[bytes | bytearray, int, int]:
    """Decode an image file to check it; returns (bytes to store, width, height). Raises Failure.

    It is decoded to the end, because a truncated file still has a good header. A JPEG is decoded at
    an eighth of its size.
    """
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
        width, height = image.size
        # Deep grey images count four times: they are decoded to float32, and once more for their
        # values.
        weight = 4 if is_deep_grey(image) else 1
        if width * height * weight > Image.MAX_IMAGE_PIXELS:
            raise Failure(f"too many pixels: {width} x {height}")
        check_scans(image, data)
        with alone if width * height > LARGE else NO_LOCK:
            if read_orientation(image) >= 5:  # EXIF: rotated by 90 degrees
                width, height = height, width
            short_side, long_side = sorted(image.size)
            if short_side < args.min_size:
                raise Failure(f"too small: {width} x {height}")
            if long_side > (args.max_aspect_ratio or float("inf")) * short_side:
                raise Failure(f"aspect ratio: {width} x {height}")
            if args.resize_to is not None and short_side > args.resize_to:
                return shrink_file(image, width, height, args)
            image.draft(image.mode, (max(1, width // 8), max(1, height // 8)))
            image.load()
    except Image.DecompressionBombError as error:
        raise Failure(f"too many pixels: {error}") from None
    except Failure:
        raise
    except Exception as error:
        if is_machines_fault(error):
            raise
        raise Failure(f"not an image: {str(error).split(' <_io')[0]}"[:200]) from None
    return data, width, height


def shrink_file(
    image: Image.Image, width: int, height: int, args: Namespace
) -> tuple[bytes | bytearray, int, int]:
    """Shrink an image to args.resize_to; returns (JPEG file, width, height).

    `width` and `height` are those of the image as displayed. The result is close to that of
    `decode_image` and `shrink` in the other scripts, which need torch. A large JPEG is decoded at
    a reduced size, at least twice that of the result. A bicubic filter would take 1.7 times as
    long.
    """
    side, short_side = args.resize_to, min(width, height)
    size = int(side * width / short_side), int(side * height / short_side)
    stored_size = size if image.size == (width, height) else size[::-1]
    image.draft(image.mode, [2 * length for length in stored_size])
    if read_orientation(image) != 1:
        image = ImageOps.exif_transpose(image)
    if is_deep_grey(image):
        image = Image.fromarray((read_deep_grey(image) * 255).round().astype(np.uint8))
    image = lay_on_white(image)
    if image.mode not in ("L", "RGB"):  # else `convert` would copy the image needlessly
        image = image.convert("RGB")
    file = io.BytesIO()
    image.resize(size, Image.Resampling.HAMMING).save(file, "JPEG", quality=args.jpeg_quality)
    return file.getvalue(), *size
