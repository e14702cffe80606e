"""An image file -> a tensor: decoding, cropping, resizing."""

import contextlib
import importlib.metadata
import io
import os
import re
from collections.abc import Sequence
from pathlib import PurePath
from typing import IO, Any

import numpy as np
import torch
import torch.nn.functional as F
import torchvision.transforms.v2.functional as TF
from PIL import Image, ImageOps

from diffusion_training.errors.faults import explain
from diffusion_training.errors.printing import hide_secrets, name_address, printable
from diffusion_training.pillow import (
    check_scans,
    is_deep_grey,
    lay_on_white,
    read_deep_grey,
    read_orientation,
)

try:
    from torchcodec.decoders import decode_jpeg  # up to twice as fast as Pillow
except (ImportError, OSError, RuntimeError):  # not installed, or not made for this torch
    decode_jpeg = None

# A picture as text, which is no path
BASE64 = re.compile(r"data:.*|[A-Za-z0-9+/\r\n]{256,}={0,2}\s*", re.DOTALL)


def describe_decoder() -> str:
    """The name and version of the library that decodes JPEGs here."""
    name = "torchcodec" if decode_jpeg else "pillow"
    return f"{name} {importlib.metadata.version(name)}"


def open_image(file: IO[bytes]) -> Image.Image:
    """Open an image with Pillow, reading only its header. Decompression bombs raise an error."""
    Image.init()  # registers all formats
    # The formats that are allowed, in the order in which they are tried. EPS is not, because Pillow
    # passes it to a program that executes it. TGA is last, because it has no signature.
    formats = "JPEG PNG WEBP AVIF BMP GIF JPEG2000 PPM QOI TIFF TGA".split()
    return Image.open(file, formats=[name for name in formats if name in Image.OPEN])


def open_file(path: str, allowed: Sequence[str]) -> contextlib.AbstractContextManager[IO[bytes]]:
    """Open the file that a row names. allowed: see `list_allowed`.

    Raises ValueError if a row may not name it.
    """
    if "://" in path:
        from diffusion_training.addresses import opening  # here: few data sets have addresses

        return opening(path, allowed)
    if os.path.exists(path) and not os.path.isfile(path):
        raise ValueError("it is not a file")  # a pipe or a device might never end
    return open(path, "rb")


def decode_image(
    source: dict[str, Any] | None,
    channels: int,
    keep_precision: bool = False,
    min_size: int = 0,
    allowed: Sequence[str] = (),
) -> torch.Tensor:
    """Decode an image to a tensor [channels, height, width].

    The tensor is uint8, or float32 in [0, 1] with `keep_precision`. `source` is the {"bytes",
    "path"} of an undecoded `datasets.Image`. If it has a "size" too, the bytes are those of such a
    tensor; if it has "pixels", they are the tensor. `channels` is 1 or 3. `allowed`: the addresses
    that "path" may be, see `list_allowed`.

    EXIF rotation is applied, transparent images are put on white, 16 bits are scaled to 8, and the
    first frame of an animation is taken. Raises ValueError if a side has less than `min_size`
    pixels, and Pillow's error if the file can't be read completely.
    """
    if source is None or source["bytes"] is source["path"] is None:
        raise ValueError("there is no image")
    if "pixels" in source:
        return source["pixels"]
    data = source["bytes"]
    if "size" in source:
        return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(source["size"])
    if data is None:
        if BASE64.fullmatch(source["path"]):
            raise ValueError("it is text, such as base64: store the bytes of the image")
        with open_file(source["path"], allowed) as file:
            data = file.read(2**30 + 1)
    if len(data) > 2**30:
        raise ValueError("it has more than 1 GiB")
    image = open_image(io.BytesIO(data))
    if min(image.size) < min_size:
        raise ValueError(
            f"{image.width} x {image.height} pixels: a side is below --min_size {min_size}"
        )
    check_scans(image, data)
    orientation = read_orientation(image)  # only Pillow decides what is rotated
    is_jpeg = image.format in ("JPEG", "MPO") and image.mode in ("L", "RGB")
    if decode_jpeg and is_jpeg and orientation == 1 and not keep_precision:
        # torchcodec would also rotate by APP1 data that Pillow does not accept as EXIF. So all APP1
        # markers before the tables are changed to APP13.
        head, mark, rest = data.partition(b"\xff\xdb")
        plain = head.replace(b"\xff\xe1", b"\xff\xed") + mark + rest
        # Pillow reads some files that torchcodec can't, and names the fault of the others
        with contextlib.suppress(RuntimeError):
            return decode_jpeg(plain, mode="GRAY" if channels == 1 else "RGB")
    if orientation != 1:
        ImageOps.exif_transpose(image, in_place=True)
    if is_deep_grey(image):
        pixels = torch.from_numpy(read_deep_grey(image)).expand(channels, -1, -1)
        return pixels.contiguous() if keep_precision else (pixels * 255).round().byte()
    image = lay_on_white(image)
    mode = "L" if channels == 1 else "RGB"
    if image.mode != mode:  # else `convert` would copy the image needlessly
        image = image.convert(mode)
    values = np.array(image).reshape(image.height, image.width, channels)
    pixels = torch.from_numpy(values).permute(2, 0, 1)
    return pixels.float() / 255 if keep_precision else pixels


def plan_crop(
    height: int, width: int, target: Sequence[int], position: tuple[float, float]
) -> tuple[int, int, int, int]:
    """The largest part of an image with the aspect ratio of a `target` (height, width).

    `position`: where the crop lies, (y, x) in [0, 1]; (0.5, 0.5) is the centre. Returns (top, left,
    height, width).
    """
    rows = min(height, max(1, round(width * target[0] / target[1])))
    columns = min(width, max(1, round(height * target[1] / target[0])))
    top = round((height - rows) * position[0])
    left = round((width - columns) * position[1])
    return top, left, rows, columns


def shrink(
    image: torch.Tensor,
    target: int | Sequence[int],
    position: tuple[float, float] | None = None,
    interpolation: str = "bicubic",
) -> torch.Tensor:
    """Crop an image [C, H, W] with `plan_crop` and resize it to `target` (height, width).

    It is antialiased and keeps its dtype. If `target` is a number, it is the side of a square.
    Without a `position` the number is the short side, and the image is cropped only to a ratio of
    4 : 1. The crop comes first, because resizing a long strip may take too much memory.
    """
    height, width = image.shape[-2:]
    size = [target, target] if isinstance(target, int) else list(target)
    if position is None:
        size = size[:1]
        image = TF.center_crop(image, [min(height, 4 * width), min(width, 4 * height)])
    else:
        image = TF.crop(image, *plan_crop(height, width, size, position))
    mode = TF.InterpolationMode(interpolation)
    image = TF.resize(image, size, interpolation=mode, antialias=True)
    return image.clamp(0, 1) if image.is_floating_point() else image


def shrink_masks(masks: torch.Tensor, factor: int) -> torch.Tensor:
    """Masks of images, uint8 [N, 1, H, W] -> masks of their latents, uint8 [N, 1, h, w].

    A value is the mean of the `factor` x `factor` pixels that a latent covers.
    """
    return F.avg_pool2d(masks.float(), factor).round().byte()


def name_image(row: int, image: dict[str, Any] | None, source: str = "") -> str:
    """The name of an image in messages and records: its path, or the number of its row.

    In a local folder `source`, paths are relative to it, also those of archives, so that the name
    is the same wherever the folder is, and on each system. A name has no secrets of an address: see
    `name_address`.
    """
    name = (image and image["path"]) or ""
    if not name or BASE64.fullmatch(name):
        return f"row {row}"
    if os.path.isabs(source):
        if os.path.isabs(name):
            name = PurePath(os.path.relpath(name, source)).as_posix()
        name = name.replace(f"::{source}{os.sep}", "::")  # zip://photo.jpg::photos.zip
    return printable(name_address(name))


def explain_row(error: Exception, *images: dict[str, Any] | None) -> str:
    """Describe an error of a row in one line, without the secrets in addresses of its images."""
    reason = explain(error)
    for image in images:
        reason = hide_secrets(reason, address=(image and image["path"]) or "")
    return reason
