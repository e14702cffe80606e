"""Reference images: the images that an edit starts from, one or several for each row."""

import math
import os
from argparse import Namespace
from collections.abc import Sequence

import datasets
import pyarrow.compute as pc
import torch
import torchvision.transforms.v2.functional as TF
from PIL import Image

from diffusion_training.data.buckets import list_buckets
from diffusion_training.data.folders import (
    REFERENCE,
    describe_files,
    find_partners,
    get_source,
    has_reference_files,
    is_image,
    list_paths,
    split_suffix,
)
from diffusion_training.data.images import decode_image
from diffusion_training.data.rows import Rows, pick
from diffusion_training.errors.sentences import explained, fail
from diffusion_training.files import hash_values

COLUMN = "conditioning_image"  # the column of the references that were found in files
LEAST = 64  # pixels of a reference's side, which FLUX.2's pipelines need
STEPS = 16  # of the side of a square result
MAX_RATIO = 4.0  # of the longer side of a result to the shorter one


def add_references(rows: Rows, listed: Sequence[str], args: Namespace) -> tuple[Rows, list[str]]:
    """Add columns for references that are files. Returns (the rows, the columns of references).

    The files are photo.control.png beside photo.png, or have the image's name in the folders of
    --conditioning_data_dir. The fingerprint of the rows depends on them.

    listed: the paths in a local folder.
    """
    source = get_source(args)
    if args.conditioning_image_column:
        return rows, args.conditioning_image_column
    folders = args.conditioning_data_dir or []
    for folder in folders:
        if f"{os.path.realpath(folder)}/".startswith(f"{source}/"):
            fail(f"--conditioning_data_dir {folder} lies in {source}, whose images are the results")
    if not folders and not has_reference_files(listed):
        return rows, []
    if isinstance(rows, datasets.IterableDataset):
        fail(f"{source} has references in files, which --streaming can't read: leave it out")
    paths = list_image_paths(rows, args.image_column or "image")
    if folders:
        if None in paths:
            fail("--conditioning_data_dir needs images with names, such as a folder of images")
        names = [path for path in paths if path]
        owners = [split_suffix(os.path.relpath(path, source))[0] for path in names]
        found = [index_folder(folder, owners) for folder in folders]
    else:
        owners = [split_suffix(path)[0] for path in paths]
        found = [find_partners(listed, REFERENCE, "references")]
    columns = [COLUMN, *(f"{COLUMN}_{number}" for number in range(2, len(found) + 1))]
    for name, files in zip(columns, found, strict=True):
        column = [files.get(owner) for owner in owners]
        fingerprint = hash_values([rows._fingerprint, name, *describe_files(column)])
        rows = rows.add_column(name, column, new_fingerprint=fingerprint)
    return rows, columns


def list_reference_columns(rows: Rows, args: Namespace) -> list[str]:
    """The columns of references in the rows of `load_rows`."""
    known = rows.column_names or []
    if args.conditioning_image_column:
        return [name for name in args.conditioning_image_column if name in known]
    return [name for name in known if name.startswith(COLUMN)]


def list_image_paths(rows: datasets.Dataset, column: str) -> list[str | None]:
    """The path of each row's image, None without one."""
    if not isinstance(rows.features.get(column), datasets.Image):
        return [None] * len(rows)
    paths = pc.struct_field(rows.data[column], "path").to_pylist()
    return pick(rows, paths)


def index_folder(folder: str, owners: Sequence[str]) -> dict[str, str]:
    """{path of an image in a folder, relative and without suffix: the path}."""
    if not os.path.isdir(folder):
        fail(f"--conditioning_data_dir {folder} is not a folder")
    found: dict[str, str] = {}
    for path in sorted(filter(is_image, list_paths(folder))):
        stem = split_suffix(os.path.relpath(path, folder))[0]
        if found.setdefault(stem, path) != path:
            fail(f"{found[stem]} and {path} are references of the same image: delete one")
    if not found.keys() & set(owners):
        fail(
            f"no file in --conditioning_data_dir {folder} has the name of an image, such as "
            f"{owners[0]}.png: references have the names of their images"
        )
    return found


def resize_reference(pixels: torch.Tensor, side: int, interpolation: str) -> torch.Tensor:
    """A reference [3, H, W] of its own ratio, with at most as many pixels as a square of this side.

    A smaller one stays as it is, because the pipeline enlarges it, or takes it so. The pipeline's
    code rounds its sides, by less than it would those of the stored image.
    """
    height, width = pixels.shape[-2:]
    scale = side / math.sqrt(height * width)
    if scale > 1:
        scale = min(scale, max(1.0, LEAST / min(height, width)))
    size = [max(1, round(scale * height)), max(1, round(scale * width))]
    mode = TF.InterpolationMode(interpolation)
    return TF.resize(pixels, size, interpolation=mode, antialias=True)


def choose_result_size(height: int, width: int, side: int, multiple: int) -> list[int]:
    """The size of an edit's result: the nearest ratio to a reference's, of at most side x side.

    multiple: of which its sides are.
    """
    step = max(multiple, side // STEPS // multiple * multiple)

    def rank(size: tuple[int, int]) -> tuple[float, int]:
        return round(abs(math.log(size[0] / size[1] * width / height)), 9), -size[0]

    buckets: list[tuple[int, int]] = list_buckets(side, step, MAX_RATIO)
    return [*min(buckets, key=rank)]


def read_reference(path: str, side: int, interpolation: str) -> Image.Image:
    """A file as a reference that is only resized. Stops with an error if it can't be decoded."""
    with explained(f"--validation_images: {path} can't be used"):
        pixels = decode_image({"bytes": None, "path": path}, 3, allowed=[path])
    pixels = resize_reference(pixels, side, interpolation)
    return Image.fromarray(pixels.permute(1, 2, 0).numpy())
