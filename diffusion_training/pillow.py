"""What Pillow is asked of an image file, in workers without torch as well: bounds, orientation, deep grey, white."""

import numpy as np
from PIL import Image

MAX_SCANS = 100  # a progressive JPEG has about ten; thousands of empty ones fit in a megabyte, and take minutes


def check_scans(image: Image.Image, data: bytes | bytearray) -> None:
    """Refuse a JPEG of so many scans that decoding it takes minutes; ValueError says how many there are."""
    if image.format in ("JPEG", "MPO") and (scans := data.count(b"\xff\xda")) > MAX_SCANS:
        raise ValueError(f"it has {scans} scans")


def read_orientation(image: Image.Image) -> int:
    """How EXIF says that an image lies, 1 (upright) to 8; 1 if it says nothing, or nothing that can be read."""
    try:
        orientation = image.getexif().get(0x0112, 1)
    except Exception:  # of whatever kind: what is broken is beside the image
        return 1
    return orientation if orientation in range(1, 9) else 1


def is_deep_grey(image: Image.Image) -> bool:
    """Whether pixels are grey of 16 bits or more, or of float, which Pillow's own conversion would clip at 255."""
    return image.mode.startswith("I") or image.mode == "F"


def read_deep_grey(image: Image.Image) -> np.ndarray:
    """The values of a deep grey image, float32 [H, W] in [0, 1]. Raises ValueError if they have another range."""
    values = np.asarray(image, dtype=np.float32) / (1.0 if image.mode == "F" else 65535.0)
    if not (values.min() >= 0 and values.max() <= 1):  # nor nan
        raise ValueError(f"its values are not from 0 to {'1' if image.mode == 'F' else '65535'}")
    return values


def lay_on_white(image: Image.Image) -> Image.Image:
    """What is transparent becomes white; other images are returned as they are."""
    if not image.has_transparency_data:
        return image
    image = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
