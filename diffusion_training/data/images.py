"""An image file -> a tensor: decoding, cropping, resizing."""

import contextlib
import importlib.metadata
import io
import os
from collections.abc import Sequence
from typing import IO, Any

import fsspec
import numpy as np
import torch
import torch.nn.functional as F
import torchvision.transforms.v2.functional as TF
from PIL import Image, ImageOps

from diffusion_training.errors import printable
from diffusion_training.pillow import check_scans, is_deep_grey, lay_on_white, read_deep_grey, read_orientation

try:
    from torchcodec.decoders import decode_jpeg  # up to twice as fast as Pillow
except (ImportError, OSError, RuntimeError):  # not installed, or not made for this torch
    decode_jpeg = None


def describe_decoder() -> str:
    """What decodes JPEGs here, with its version."""
    name = "torchcodec" if decode_jpeg else "pillow"
    return f"{name} {importlib.metadata.version(name)}"


def open_image(file: IO[bytes]) -> Image.Image:
    """A Pillow image of a file, of which only the header is read; decompression bombs are refused."""
    Image.init()  # knows all formats from here on; not all are meant: Pillow hands EPS to a program that executes it
    formats = "JPEG PNG WEBP AVIF BMP GIF JPEG2000 PPM QOI TIFF TGA".split()  # as they are tried; TGA has no mark
    return Image.open(file, formats=[name for name in formats if name in Image.OPEN])


def decode_image(
    source: dict[str, Any] | None, channels: int, keep_precision: bool = False, min_size: int = 0
) -> torch.Tensor:
    """Decode an image to a tensor [channels, height, width]: uint8, or float32 in [0, 1] with `keep_precision`.

    `source` is the {"bytes", "path"} of an undecoded `datasets.Image`; a "size" beside them says that the bytes are
    those of such a tensor, "pixels" is the tensor. `channels` is 1 or 3.
    EXIF rotation is applied, transparency laid onto white, of an animation the first frame taken, 16 bits scaled to 8.
    Raises ValueError for less than `min_size` pixels on a side, and what Pillow raises for what it can't read whole.
    """
    if source is None or source["bytes"] is source["path"] is None:
        raise ValueError("there is no image")
    if "pixels" in source:
        return source["pixels"]
    data = source["bytes"]
    if "size" in source:
        return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(source["size"])
    if data is None:
        if os.path.exists(source["path"]) and not os.path.isfile(source["path"]):
            raise ValueError("it is no file")  # but a pipe or a device, which might never end
        with fsspec.open(source["path"]) as file:
            data = file.read(2**30 + 1)
    if len(data) > 2**30:
        raise ValueError("it has more than 1 GiB")
    image = open_image(io.BytesIO(data))
    if min(image.size) < min_size:
        raise ValueError(f"{image.width} x {image.height} pixels are less than --min_size {min_size}")
    check_scans(image, data)
    orientation = read_orientation(image)  # Pillow alone decides what is turned
    if decode_jpeg and image.format in ("JPEG", "MPO") and image.mode in ("L", "RGB") and not keep_precision:
        if orientation == 1:
            # torchcodec would turn it also by what Pillow takes for no EXIF: APP1 becomes APP13, before the tables
            head, mark, rest = data.partition(b"\xff\xdb")
            with contextlib.suppress(RuntimeError):  # some of what torchcodec can't read Pillow can, and names faults
                plain = head.replace(b"\xff\xe1", b"\xff\xed") + mark + rest
                return decode_jpeg(plain, mode="GRAY" if channels == 1 else "RGB")
    if orientation != 1:
        ImageOps.exif_transpose(image, in_place=True)
    if is_deep_grey(image):
        pixels = torch.from_numpy(read_deep_grey(image)).expand(channels, -1, -1)
        return pixels.contiguous() if keep_precision else (pixels * 255).round().byte()
    image, mode = lay_on_white(image), "L" if channels == 1 else "RGB"
    image = image if image.mode == mode else image.convert(mode)  # it would copy
    pixels = torch.from_numpy(np.array(image).reshape(image.height, image.width, channels)).permute(2, 0, 1)
    return pixels.float() / 255 if keep_precision else pixels


def plan_crop(height: int, width: int, target: Sequence[int], place: tuple[float, float]) -> tuple[int, int, int, int]:
    """The largest part of an image that has the ratio of a `target` (height, width): (top, left, height, width).

    `place` is (y, x) of the crop in [0, 1], (0.5, 0.5) the centre.
    """
    rows = min(height, max(1, round(width * target[0] / target[1])))
    columns = min(width, max(1, round(height * target[1] / target[0])))
    return round((height - rows) * place[0]), round((width - columns) * place[1]), rows, columns


def shrink(
    image: torch.Tensor,
    target: int | Sequence[int],
    place: tuple[float, float] | None = None,
    interpolation: str = "bicubic",
) -> torch.Tensor:
    """Crop [C, H, W] as `plan_crop` says and resize it to `target` (height, width): antialiased, in its own dtype.

    A number is the side of a square; without a `place` it is the short side, and only strips are cropped, to 4 : 1.
    Cropped first, because a long strip that is resized whole may not fit into memory.
    """
    height, width = image.shape[-2:]
    size = [target, target] if isinstance(target, int) else list(target)
    if place is None:
        size = size[:1]
        image = TF.center_crop(image, [min(height, 4 * width), min(width, 4 * height)])
    else:
        image = TF.crop(image, *plan_crop(height, width, size, place))
    image = TF.resize(image, size, interpolation=TF.InterpolationMode(interpolation), antialias=True)
    return image.clamp(0, 1) if image.is_floating_point() else image


def shrink_masks(masks: torch.Tensor, factor: int) -> torch.Tensor:
    """Masks uint8 [N, 1, H, W] of images -> of their latents: the mean of the pixels that a latent stands for."""
    return F.avg_pool2d(masks.float(), factor).round().byte()


def make_time_ids(
    original_size: torch.Tensor, crop_top_left: torch.Tensor, target_size: Sequence[int], flipped: torch.Tensor
) -> torch.Tensor:
    """What SDXL is told of sizes, float32 [N, 6]: the stored image's, the crop's corner, what it was resized to.

    original_size, crop_top_left: int [N, 2], the corner in pixels of the image as it is resized (arXiv:2307.01952,
    algorithm 1); target_size: (height, width). Of images `flipped` [N] the corner is that of the mirrored image.
    Numbers like 1365 are no bfloat16 numbers, so whatever the precision, these are float32.
    """
    height, width = original_size.double().unbind(1)
    columns = torch.minimum(width, (height * target_size[1] / target_size[0]).round().clamp(min=1))  # of the crop
    beyond = (width * target_size[1] / columns).round() - target_size[1] - crop_top_left[:, 1]
    left = torch.where(flipped, beyond.clamp(min=0), crop_top_left[:, 1])
    target = [torch.full_like(left, side) for side in target_size]  # filled there: a list would have to be sent
    return torch.stack([height, width, crop_top_left[:, 0], left, *target], dim=1).float()


def name_image(row: int, source: dict[str, Any] | None) -> str:
    """What the reader knows an image by."""
    return printable((source and source["path"]) or f"row {row}")
