"""A downloaded file -> an image that is whole, maybe shrunk. By Pillow: torch would take 0.8 GB of each worker."""

import contextlib
import hashlib
import io
import os
from argparse import Namespace
from typing import IO, Any

import numpy as np
from PIL import Image, ImageOps

from diffusion_training.errors import is_machines_fault
from diffusion_training.pillow import check_scans, is_deep_grey, lay_on_white, read_deep_grey, read_orientation

FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "PNG", "TIFF", "WEBP")  # no EPS: Pillow would start Ghostscript
THREADS = min(4, os.cpu_count() or 1)  # that decode in a task
LARGE = 2**24  # pixels: of larger images one is decoded at a time, or memory would be several times as much
Lock = contextlib.AbstractContextManager[Any]
ANY: Lock = contextlib.nullcontext()


class Failure(Exception):
    """Why a row has no image. `wait`: seconds after which a retry may help, None if it can't."""

    def __init__(self, reason: str, wait: float | None = None) -> None:
        super().__init__(reason)
        self.wait = wait


def store_image(
    data: bytes | bytearray, spool: IO[bytes], args: Namespace, alone: Lock = ANY, writes: Lock = ANY
) -> dict[str, Any]:
    """Check an image and add it to the file `spool`, maybe shrunk. `alone`, `writes`: locks, for several threads.

    Returns {"first", "last" byte (excluded) of it there, "width", "height" as it is displayed, "sha256" of the file as
    it came}. Raises Failure if it is none, and OSError if it can't be written.
    """
    stored, width, height = check_image(data, args, alone)
    sha256 = hashlib.sha256(data).hexdigest()
    with writes:
        first = spool.seek(0, os.SEEK_END)
        spool.write(stored)
        return {"first": first, "last": spool.tell(), "width": width, "height": height, "sha256": sha256}


def check_image(data: bytes | bytearray, args: Namespace, alone: Lock = ANY) -> tuple[bytes | bytearray, int, int]:
    """Decode a file to be sure of it. Returns (bytes to store, width, height). Raises Failure.

    It is decoded to the end, because a body that was cut off has a good header; of a JPEG at an eighth of its size.
    """
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
        width, height = image.size
        # Deep grey is decoded to float32, and again for its values
        if width * height * (4 if is_deep_grey(image) else 1) > Image.MAX_IMAGE_PIXELS:
            raise Failure(f"too many pixels: {width} x {height}")
        check_scans(image, data)
        if read_orientation(image) >= 5:  # EXIF: lies on its side
            width, height = height, width
        if min(width, height) < args.min_size:
            raise Failure(f"too small: {width} x {height}")
        if max(width, height) > (args.max_aspect_ratio or float("inf")) * min(width, height):
            raise Failure(f"aspect ratio: {width} x {height}")
        with alone if width * height > LARGE else ANY:
            if args.resize_to is not None and min(width, height) > args.resize_to:
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


def shrink_file(image: Image.Image, width: int, height: int, args: Namespace) -> tuple[bytes | bytearray, int, int]:
    """Shrink an image that is displayed as width x height to args.resize_to: returns (a JPEG of it, width, height).

    Much as `decode_image` and `shrink` of the other scripts do, but by Pillow: torch would take 0.8 GB of each worker.
    A large JPEG is decoded to a fraction, still twice as large as what comes out. Bicubic would take 1.7 x the time.
    """
    side = args.resize_to
    size = (side, int(side * height / width)) if width <= height else (int(side * width / height), side)
    image.draft(image.mode, [2 * x for x in (size if image.size == (width, height) else size[::-1])])
    if read_orientation(image) != 1:
        image = ImageOps.exif_transpose(image)
    if is_deep_grey(image):
        image = Image.fromarray((read_deep_grey(image) * 255).round().astype(np.uint8))
    image = lay_on_white(image)
    if image.mode not in ("L", "RGB"):  # or it would be a copy, and memory that goes to and fro
        image = image.convert("RGB")
    file = io.BytesIO()
    image.resize(size, Image.Resampling.HAMMING).save(file, "JPEG", quality=args.jpeg_quality)
    return file.getvalue(), *size
