"""Read image files with Pillow alone, in workers without torch: limits, orientation, deep grey."""

import numpy as np
from PIL import Image

# A progressive JPEG has about ten. Thousands of empty ones fit in 1 MB and take minutes to decode.
MAX_SCANS = 100


def check_scans(image: Image.Image, data: bytes | bytearray) -> None:
    """Raise ValueError for a JPEG with so many scans that decoding it takes minutes."""
    if image.format in ("JPEG", "MPO") and (scans := data.count(b"\xff\xda")) > MAX_SCANS:
        raise ValueError(f"it has {scans} scans, too many to decode")


def read_orientation(image: Image.Image) -> int:
    """Return an image's EXIF orientation, 1 (upright) to 8; 1 if it is missing or broken."""
    try:
        orientation = image.getexif().get(0x0112, 1)
    except Exception:  # the image itself may be good
        return 1
    return orientation if orientation in range(1, 9) else 1


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
