"""Reference images: the images that an edit starts from, one or several for each row."""

import math
import os
from argparse import Namespace
from collections.abc import Sequence
from typing import Any, TypeAlias

import datasets
import numpy as np
import pyarrow.compute as pc
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
from diffusion_training.data.images import decode_image, shrink
from diffusion_training.data.transforms import Transform
from diffusion_training.errors.faults import explain, is_machines_fault
from diffusion_training.errors.printing import amount, print_once
from diffusion_training.errors.sentences import explained, fail
from diffusion_training.files import hash_values

Rows: TypeAlias = datasets.Dataset | datasets.IterableDataset

COLUMN = "conditioning_image"  # the column of the references that were found in files
STEPS = 16  # of the side of a square reference
MAX_RATIO = 4.0  # of the longer side of a reference to the shorter one


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


def pick(rows: datasets.Dataset, values: list[Any]) -> list[Any]:
    """The values of the rows that are chosen, by their positions in the table."""
    if rows._indices is None:
        return values
    return [values[i] for i in rows._indices.column(0).to_pylist()]


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


def leave_out_missing(
    rows: datasets.Dataset, names: Sequence[str], source: str
) -> datasets.Dataset:
    """The rows that have all references; prints how many have not."""
    is_whole = np.ones(len(rows), bool)
    for name in names:
        column = rows.data[name]
        parts = [pc.is_null(pc.struct_field(column, part)) for part in ("bytes", "path")]
        is_missing = pc.and_(*parts).to_pylist()
        is_whole &= ~np.array(pick(rows, is_missing), bool)
    if not is_whole.any():
        fail(f"{source}: no image has a reference in {', '.join(names)}")
    if not is_whole.all():
        print_once(
            f"{source}: {amount(int((~is_whole).sum()), 'image')} of {len(rows)} without a "
            "reference left out; --allow_missing_conditioning trains them as text to image"
        )
        rows = rows.select(np.flatnonzero(is_whole))
    return rows


def transform_references(
    item: dict,
    transform: Transform,
    original_size: Sequence[int],
    target: Sequence[int],
    position: tuple[float, float],
) -> tuple[list[Image.Image], bool]:
    """The references of a row, and whether they are mirrored with its image.

    If all have the image's size, they get its crop and are mirrored with it. Otherwise they are
    only resized, to the nearest of a few ratios, and neither they nor the image are mirrored.
    Raises ValueError for one that can't be decoded.

    original_size, target: (height, width) of the stored image, and of the resized one.
    """
    pixels = []
    for name in transform.reference_columns:
        source = item[name]
        if source is None or source["bytes"] is source["path"] is None:
            continue
        try:
            pixels.append(decode_image(source, 3, min_size=transform.min_size))
        except Exception as error:
            if is_machines_fault(error):
                raise
            raise ValueError(f"its reference can't be used: {explain(error)}") from error
    is_aligned = all(tuple(each.shape[-2:]) == tuple(original_size) for each in pixels)
    resized = []
    for each in pixels:
        if is_aligned:
            multiple = transform.reference_multiple
            scale = transform.reference_side / transform.resolution / multiple
            size = [multiple * max(1, round(side * scale)) for side in target]
            each = shrink(each, size, position, transform.image_interpolation_mode)
        else:
            height, width = each.shape[-2:]
            size = choose_reference_size(
                height, width, transform.reference_side, transform.reference_multiple
            )
            mode = TF.InterpolationMode(transform.image_interpolation_mode)
            each = TF.resize(each, size, interpolation=mode, antialias=True)
        resized.append(Image.fromarray(each.permute(1, 2, 0).numpy()))
    return resized, is_aligned


def choose_reference_size(height: int, width: int, side: int, multiple: int) -> list[int]:
    """The size of the nearest ratio for a reference, with at most side x side pixels.

    There are few sizes, so that some rows have the same. multiple: of which its sides are.
    """
    step = max(multiple, side // STEPS // multiple * multiple)

    def rank(size: tuple[int, int]) -> tuple[float, int]:
        return round(abs(math.log(size[0] / size[1] * width / height)), 9), -size[0]

    buckets: list[tuple[int, int]] = list_buckets(side, step, MAX_RATIO)
    return [*min(buckets, key=rank)]


def make_placeholders(transform: Transform) -> list[Image.Image]:
    """References for a row that can't be used, which keep its batch in shape."""
    side = transform.reference_side
    return [Image.new("RGB", (side, side)) for _ in transform.reference_columns]


def read_reference(path: str, side: int, multiple: int, interpolation: str) -> Image.Image:
    """A file as a reference that is only resized. Stops with an error if it can't be decoded."""
    with explained(f"--validation_images: {path} can't be used"):
        pixels = decode_image({"bytes": None, "path": path}, 3)
    height, width = pixels.shape[-2:]
    size = choose_reference_size(height, width, side, multiple)
    mode = TF.InterpolationMode(interpolation)
    pixels = TF.resize(pixels, size, interpolation=mode, antialias=True)
    return Image.fromarray(pixels.permute(1, 2, 0).numpy())
