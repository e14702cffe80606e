"""Read image files with Pillow alone, in workers without torch: limits, orientation, deep grey."""

import struct
from typing import IO

import numpy as np
from PIL import Image

# A progressive JPEG has about ten. Thousands of empty ones fit in 1 MB and take minutes to decode.
MAX_SCANS = 100


def check_scans(image: Image.Image, data: bytes | bytearray) -> None:
    """Raise ValueError for a JPEG with so many scans that decoding it takes minutes."""
    if image.format in ("JPEG", "MPO") and (scans := data.count(b"\xff\xda")) > MAX_SCANS:
        raise ValueError(f"it has {scans} scans, too many to decode")


def read_orientation(image: Image.Image) -> int:
    """Return the EXIF orientation in which an image has to be turned, 1 (upright) to 8.

    It is 1 if the EXIF is missing or broken. For a TIFF it is 1 too, because Pillow turns these
    itself, and their `size` is that of the turned image. The pixels are decoded only for a PNG that
    has its EXIF after them; then Pillow's error is raised if they are damaged.
    """
    if image.format == "TIFF":
        return 1
    if image.format == "PNG" and image.fp and has_late_exif(image.fp):
        image.load()
    try:
        # `PngImageFile.getexif` would decode the pixels. Its error would be lost here, and a second
        # `load` of the same image raises none.
        orientation = Image.Image.getexif(image).get(0x0112, 1)
    except Exception:  # the image itself may be good
        return 1
    return orientation if orientation in range(1, 9) else 1


def has_late_exif(file: IO[bytes]) -> bool:
    """Whether a PNG has EXIF or XMP after its pixels. The position in the file stays."""
    position = file.tell()
    place = 8  # of the first chunk
    is_after = is_late = False
    file.seek(place)
    while not is_late and len(head := file.read(8)) == 8:
        length, kind = struct.unpack(">I4s", head)
        if is_after and kind in (b"tEXt", b"zTXt", b"iTXt"):
            is_late = file.read(21).startswith((b"Raw profile type exif", b"XML:com.adobe.xmp"))
        is_late |= is_after and kind == b"eXIf"
        is_after |= kind == b"IDAT"
        place += length + 12
        file.seek(place)
    file.seek(position)
    return is_late


def is_deep_grey(image: Image.Image) -> bool:
    """Whether an image is grey with 16 bits or more, or float.

    Pillow's own conversion would clip its values at 255.
    """
    return image.mode.startswith("I") or image.mode == "F"


def read_deep_grey(image: Image.Image) -> np.ndarray:
    """Return the values of a deep grey image as float32 [H, W] in [0, 1].

    Raises ValueError if the file's values are not from 0 to 65535 (float images: 0 to 1).
    """
    highest = 1 if image.mode == "F" else 65535
    values = np.asarray(image, dtype=np.float32) / highest
    if not (values.min() >= 0 and values.max() <= 1):  # nan fails as well
        raise ValueError(f"its values are not from 0 to {highest}")
    return values


def lay_on_white(image: Image.Image) -> Image.Image:
    """Put a transparent image on white; other images are returned unchanged."""
    if not image.has_transparency_data:
        return image
    image = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
