"""Latents that others have published, in LightningDiT's form: safetensors files with class labels.

A file holds `latents` and `latents_flip` (of the mirrored images), [N, channels, height, width] as
the VAE gives them, and `labels`, [N].
"""

import math
import os
from argparse import Namespace
from pathlib import Path
from typing import Any

import datasets
import torch
from safetensors import safe_open

from diffusion_training.arguments import list_values
from diffusion_training.data.encoders import describe_latents, encode_images
from diffusion_training.data.folders import describe_files, get_source
from diffusion_training.data.rows import ImageRows, limit_rows
from diffusion_training.data.transform_settings import Transform
from diffusion_training.errors.sentences import explained, fail
from diffusion_training.families.base import Encoders
from diffusion_training.files import hash_values

NAMES = ("latents", "latents_flip")
FLOATS = {"F64", "F32", "F16", "BF16"}  # types in safetensors
TRIED = 8  # images that the VAE decodes and encodes again, of up to as many files


def open_published(args: Namespace) -> ImageRows:
    """The rows of all files of a folder: the file, the number in it, and the class."""
    source = get_source(args)
    columns: dict[str, list] = {"file": [], "number": [], args.class_column: []}
    for path in sorted(map(str, Path(source).glob("[!.]*.safetensors"))):
        with explained(f"{path} can't be read as published latents"):
            if os.path.exists(path) and not os.path.isfile(path):
                raise ValueError("it is not a file")  # a pipe might never end
            labels = safe_open(path, "pt").get_tensor(args.class_column)
            if labels.ndim != 1:
                raise ValueError(f"{args.class_column} has the shape {[*labels.shape]}, not [N]")
        columns["file"] += [path] * len(labels)
        columns["number"] += range(len(labels))
        columns[args.class_column] += labels.tolist()
    if not columns["file"]:
        fail(f"{source} holds no published latents (.safetensors)")
    rows = datasets.Dataset.from_dict(columns)
    rows._fingerprint = hash_values(describe_files(rows.unique("file")))
    return ImageRows(limit_rows(rows, args), "file")


@torch.no_grad()
def check_published(rows: Any, encoders: Encoders, args: Namespace) -> None:
    """Stop with an error if this VAE did not make the latents, at this --resolution."""
    family, vae = encoders.family, encoders.vae
    sides = list_values(args.resolution or family.resolution)
    shapes = [describe_latents(family, vae, side, "sample").shape for side in sides]
    for path in rows.unique("file"):
        with explained(f"{path} can't be read as published latents"):
            file = safe_open(path, "pt")
            names = (*NAMES, args.class_column)
            first, mirrored, labels = (file.get_slice(name).get_shape() for name in names)
            if wrong := {file.get_slice(name).get_dtype() for name in NAMES} - FLOATS:
                raise ValueError(f"its latents are numbers of the type {min(wrong)}")
        for shape in shapes:
            expected = [*labels, *shape]
            if not first == mirrored == expected:
                fail(
                    f"{path}: {NAMES[0]} and {NAMES[1]} have the shapes {first} and {mirrored}, "
                    f"but its labels, this VAE and --resolution give {expected}"
                )
    paths = rows.unique("file")
    chosen = dict.fromkeys(paths[number * len(paths) // TRIED] for number in range(TRIED))
    for path in chosen:
        file = safe_open(path, "pt")
        count = math.ceil(TRIED / len(chosen))
        columns = [file.get_slice(name) for name in NAMES]
        total = columns[0].get_shape()[0]
        # all over the file, because it may have been joined of several
        numbers = dict.fromkeys(number * total // count for number in range(count))
        read = (torch.stack([each[n].float() for n in numbers]) for each in columns)
        pairs = torch.stack([*read], dim=1)
        # other rows will be skipped
        latents, mirrored = pairs[pairs.isfinite().flatten(1).all(dim=1)].unbind(dim=1)
        if not len(latents):
            continue
        decoded = (vae.decode(latents).sample.clamp(-1, 1) + 1) * 127.5
        for name, images, expected in zip(
            NAMES, (decoded, decoded.flip(-1)), (latents, mirrored), strict=True
        ):
            again = encode_images(encoders, images)[:, : expected.shape[1]]
            errors = (again - expected).square().mean(dim=(1, 2, 3))
            error = errors.max() / expected.var(dim=(0, 2, 3)).mean()
            if not error < 0.5:
                fail(
                    f"the VAE does not reproduce the {name} of {path}: after decoding and "
                    f"encoding, the error is {error:.2g} of their variance: give the VAE that made "
                    "them"
                )


def name_latents(path: str, number: int) -> str:
    """The name of a row: its file, and its number in the file."""
    return f"{Path(path).name}/{number}"


def name_published(rows: datasets.Dataset, numbers: range) -> list[str]:
    """The names of consecutive rows."""
    columns = rows[numbers.start : numbers.stop]
    return [*map(name_latents, columns["file"], columns["number"])]


def read_row(row: int, epoch: int | None, item: dict, transform: Transform) -> dict[str, Any]:
    """As `transform_row`; "pixel_values" are the latents and the mirrored ones, [2, C, h, w]."""
    path, number = item["file"], item["number"]
    file = safe_open(path, "pt")
    text = item[transform.caption_column]
    return {
        "row": row,
        "key": name_latents(path, number),
        "text": text or "",
        "pixel_values": torch.stack([file.get_slice(name)[number] for name in NAMES]),
        "skipped": None if text else "it has no class",
        "original_size": (0, 0),
        "crop_top_left": (0, 0),
    }
