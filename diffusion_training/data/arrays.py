"""Images in one .npy file, memory-mapped: each process reads the rows that it needs."""

from argparse import Namespace
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch

from diffusion_training.data.flags import is_array
from diffusion_training.data.folders import get_source
from diffusion_training.data.rows import ImageRows, limit_rows, load_rows
from diffusion_training.errors.sentences import explained, fail
from diffusion_training.files import hash_values


@dataclass
class ArrayReader:
    """A transform of `datasets` that turns row numbers into images.

    An image is {"bytes": None, "path": its name, "pixels": uint8 [C, H, W], or float32 in [0, 1]
    with `keep_precision`}. Loader processes get the path, not the array.
    """

    path: str
    is_last: bool  # whether the channels are the last axis
    span: list[float] | None  # (black, white), for floats
    keep_precision: bool
    size: int  # bytes of the file
    array: np.ndarray | None = None

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"array": None}

    def __call__(self, batch: dict[str, list[int]]) -> dict[str, list[dict]]:
        return {
            "image": [
                {"bytes": None, "path": f"row {row}", "pixels": self.read(row)}
                for row in batch["image"]
            ]
        }

    def read(self, row: int) -> torch.Tensor:
        size = Path(self.path).stat().st_size
        if size != self.size:  # reading beyond the end would kill the process
            fail(
                f"{self.path} has {size} bytes, and had {self.size} when the run began: do not "
                "write to it during a run",
                alone=True,
            )
        if self.array is None:
            self.array = np.lib.format.open_memmap(self.path, mode="r")
        values = self.array[row]
        if values.ndim == 2:
            values = values[None]
        elif self.is_last:
            values = values.transpose(2, 0, 1)
        if self.span is None:
            pixels = torch.from_numpy(np.array(values))
            return pixels.float() / 255 if self.keep_precision else pixels
        black, white = self.span
        lowest, highest = values.min(), values.max()
        if not black <= lowest <= highest <= white:  # an error for nan, too
            fail(
                f"{self.path}: image {row} has values from {lowest:g} to {highest:g}, "
                f"outside --array_range {black:g} {white:g}",
                alone=True,
            )
        pixels = (torch.from_numpy(np.array(values, np.float32)) - black) / (white - black)
        return pixels if self.keep_precision else (pixels * 255).round().byte()


def load_images(
    args: Namespace, streaming: bool = False, others: Iterable[Any] = (), channels: int = 3
) -> ImageRows:
    """Open an array, or else a data set, see `load_rows`. channels: of the model's images."""
    source = get_source(args)
    if is_array(source):
        return ImageRows(limit_rows(open_array(source, channels, args), args), "image")
    return load_rows(args, streaming, others)


def open_array(path: str, channels: int, args: Namespace) -> datasets.Dataset:
    """Open an .npy file as rows with a column "image", for a model with `channels` channels."""
    with explained(f"{path} can't be read as an array"):
        array = np.lib.format.open_memmap(path, mode="r")  # an error for a pickle or an archive
    shape = f"{path} has the shape {list(array.shape)}"
    if array.ndim not in (3, 4) or 0 in array.shape:
        fail(f"{shape}, but images need [N, C, H, W], [N, H, W, C] or [N, H, W]")
    is_float = array.dtype.kind == "f"
    if not is_float and array.dtype != np.uint8:
        fail(f"{path} holds {array.dtype}: convert it to uint8, or to floats with --array_range")
    if is_float != bool(args.array_range):
        advice = "give its values of black and white with --array_range 0 1 or -1 1"
        fail(f"{path} holds {array.dtype}: {advice if is_float else 'leave --array_range out'}")
    if args.array_range not in (None, [0, 1], [-1, 1]):
        fail("--array_range must be 0 1 or -1 1")
    layouts = [
        name
        for name, axis in {"nchw": 1, "nhwc": 3}.items()
        if channels == (1 if array.ndim == 3 else array.shape[axis])
        and args.array_layout in (None, name)
    ]
    if not layouts:
        given = f" with --array_layout {args.array_layout}" if args.array_layout else ""
        fail(f"{shape}{given}, but the model takes {channels} channels")
    if len(layouts) > 1 and array.ndim == 4:
        fail(f"{shape}: choose the axis of the channels with --array_layout nchw or nhwc")
    stat = Path(path).stat()
    rows = datasets.Dataset.from_dict({"image": range(len(array))})
    rows._fingerprint = hash_values(
        [str(Path(path).resolve()), stat.st_size, stat.st_mtime_ns, layouts]
    )
    reader = ArrayReader(
        path, layouts[0] == "nhwc", args.array_range, args.preserve_input_precision, stat.st_size
    )
    return rows.with_transform(reader)
