"""Open a data set as rows, with images left undecoded."""

import collections
import contextlib
import functools
import hashlib
import json
import os
from argparse import Namespace
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import datasets
import fsspec
import pyarrow.compute as pc
import torch
import xxhash
from fsspec.implementations.local import LocalFileSystem

from diffusion_training.arguments import list_values
from diffusion_training.data.folders import (
    add_captions,
    find_source,
    has_caption_files,
    take_folders,
)
from diffusion_training.data.images import name_image
from diffusion_training.data.streams import identify_stream
from diffusion_training.errors import explained, fail, passing_rows_faults, printable

Rows: TypeAlias = datasets.Dataset | datasets.IterableDataset


def load_rows(
    args: Namespace, streaming: bool = False, others: Iterable[str] = ()
) -> tuple[Rows, str]:
    """Open the data set. Returns (its rows, the name of the column of images).

    Images are left undecoded, as {"bytes", "path"}. `others` are further columns to read, or lists
    of them. All other columns are not read, since they may be images too.
    """
    source = find_source(args)
    if getattr(args, "bucket_no_upscale", False) and not args.bucket_step:
        fail("--bucket_no_upscale is for images of several sizes: give --bucket_step as well")
    extension = "." + getattr(args, "caption_extension", "txt").lstrip(".")
    captions = has_caption_files(source, extension)
    with explained(f"{source} can't be loaded as a data set"):
        with listed_once():
            # "imagefolder", or the lines of the captions might be loaded as a data set of text
            builder = datasets.load_dataset_builder(
                "imagefolder" if captions else source,
                args.dataset_config_name,
                data_dir=source if captions else None,
                cache_dir=args.cache_dir,
            )
        if not streaming:
            builder.download_and_prepare()
        rows = (builder.as_streaming_dataset if streaming else builder.as_dataset)(
            split=args.dataset_split
        )
    rows = put_masks_beside(rows, args)
    masks = [args.mask_column] if getattr(args, "mask_column", None) else []
    caption_column = getattr(args, "caption_column", None)
    others = [*dict.fromkeys([*(name for one in others for name in list_values(one)), *masks])]
    if captions and caption_column in others and caption_column not in rows.features:
        if streaming:
            fail(
                f"{source} has captions in files beside the images, which a stream passes by: "
                "leave --streaming out"
            )
        rows = add_captions(rows, caption_column, extension)
    if caption_column in others and not streaming:
        rows = take_folders(rows, caption_column, args)
    features = rows.features or {}
    columns = [name for name, feature in features.items() if isinstance(feature, datasets.Image)]
    column = args.image_column or (
        "image" if "image" in features or len(columns) != 1 else columns[0]
    )
    if column not in features:
        fail(
            f"{source} has no column {column!r} but {', '.join(features)}: "
            "choose with --image_column"
        )
    if found := [
        name for name in list_values(caption_column) if name in others and name in columns
    ]:
        fail(f"column {found[0]!r} of {source} holds images: choose another --caption_column")
    for name in others:
        if name not in features:
            beside = "choose with --caption_column, put captions beside the images "
            beside += f"(photo{extension} for photo.jpg), or give all one with --instance_prompt"
            turn = "choose with --mask_column" if name in masks else beside
            fail(f"{source} has no column {name!r} but {', '.join(features)}: {turn}")
    with explained(f"column {column!r} of {source} can't be read as images"):
        for name in dict.fromkeys([column, *masks, *(name for name in others if name in columns)]):
            # Plain bytes and paths become images too. This must not change the fingerprint, because
            # existing caches refer to it.
            same = {} if streaming or name in columns else {"new_fingerprint": rows._fingerprint}
            rows = rows.cast_column(name, datasets.Image(decode=False), **same)
    if os.path.isdir(source) and os.environ.get("RANK", "0") == "0":
        say_unused(source, builder, rows, args.dataset_split)
    if streaming:
        # otherwise the device waits 5 s after each pass
        datasets.config.SLEEP_TIME_ON_THREADS_SHUTDOWN = 0
    if args.max_train_samples is not None and streaming:
        # the first ones: a shuffled stream would give others in each epoch
        rows = rows.take(args.max_train_samples)
    elif args.max_train_samples is not None:
        rows = rows.shuffle(seed=args.seed).take(min(args.max_train_samples, len(rows)))
    rows = rows.select_columns([column, *others])
    if streaming:
        rows._fingerprint = identify_stream(
            builder, args.dataset_split, column, others, args.max_train_samples
        )
    elif len(rows) == 0:
        fail(f"{source} holds no images in split {args.dataset_split!r}")
    return rows, column


def put_masks_beside(rows: Rows, args: Namespace) -> Rows:
    """Take masks (photo.mask.png beside photo.jpg) out of a folder's rows.

    They are added as a column "mask" if the script has --mask_column and it is not set, or set to
    "mask"; args.mask_column is then "mask". The fingerprint of the rows depends on them.
    """
    is_mask = lambda name: (name or "").endswith(".mask.png")  # noqa: E731
    source = find_source(args)
    if not isinstance((rows.features or {}).get("image"), datasets.Image):
        return rows
    if isinstance(rows, datasets.IterableDataset):
        if getattr(args, "mask_column", "") is None and any(Path(source).rglob("*.mask.png")):
            fail(
                f"{source} has masks beside the images, which a stream passes by: "
                "leave --streaming out"
            )
        rows = rows.cast_column("image", datasets.Image(decode=False))
        return rows.filter(lambda item: not is_mask(item["image"]["path"])).cast_column(
            "image", datasets.Image()
        )
    paths = pc.struct_field(rows.data["image"], "path").to_pylist()
    if any(map(is_mask, paths)):  # there are none if a metadata file names the images
        rows = rows.select([row for row, path in enumerate(paths) if not is_mask(path)])
    if getattr(args, "mask_column", "") not in (None, "mask") or "mask" in rows.features:
        return rows
    if masks := {os.path.abspath(path): path.stat() for path in Path(source).rglob("*.mask.png")}:
        beside = [
            os.path.splitext(os.path.abspath(path))[0] + ".mask.png"
            for path in paths
            if not is_mask(path)
        ]
        content = [
            rows._fingerprint,
            *(f"{path} {stat.st_mtime_ns} {stat.st_size}" for path, stat in masks.items()),
        ]
        fingerprint = hashlib.sha256(json.dumps(sorted(content)).encode()).hexdigest()[:16]
        found = [path if path in masks else None for path in beside]
        rows, args.mask_column = rows.add_column("mask", found, new_fingerprint=fingerprint), "mask"
    return rows


@contextlib.contextmanager
def listed_once() -> Iterator[None]:
    """List a local folder only once.

    `datasets` would list it for each of the 66 patterns that a split's files may match.
    """
    find = LocalFileSystem.find
    LocalFileSystem.find = functools.cache(find)
    try:
        yield
    finally:
        LocalFileSystem.find = find


def say_unused(folder: str, builder: datasets.DatasetBuilder, rows: Rows, split: str) -> None:
    """Print which files of a folder are not in the data set; `datasets` omits them silently."""
    # only the builder of image folders has extensions
    used, images = [], getattr(builder, "EXTENSIONS", ())
    # the rows of a stream are not known in advance
    images = () if isinstance(rows, datasets.IterableDataset) else images
    for name, paths in (builder.config.data_files or {}).items():
        used += [path for path in paths if name != split or Path(path).suffix.lower() not in images]
    for name in rows.features if images else ():  # images that metadata names, or all, and masks
        if isinstance(rows.features[name], datasets.Image):
            used += filter(None, pc.struct_field(rows.data[name], "path").to_pylist())
    real = functools.cache(os.path.realpath)
    used = {os.path.join(real(os.path.dirname(path)), os.path.basename(path)) for path in used}
    # whether os.walk does not enter a folder
    shut = lambda path: os.path.islink(path) or not os.access(path, os.R_OK | os.X_OK)  # noqa: E731
    walk = os.walk(real(folder))
    walk = (
        (place, names + [name for name in folders if shut(f"{place}/{name}")])
        for place, folders, names in walk
    )
    found = [os.path.join(place, name) for place, names in walk for name in names]
    meant = ("/.", "/__download__/")  # hidden files, and what download_images.py keeps for itself
    found = [
        path for path in found if not any(part in path.removeprefix(real(folder)) for part in meant)
    ]
    unused = sorted(path for path in found if path not in used)
    if unused:
        kinds = collections.Counter(
            Path(path).suffix.lower() or "no suffix" for path in unused
        ).most_common(5)
        kinds = ", ".join(f"{count} {kind}" for kind, count in kinds)
        named = os.path.relpath(unused[0], real(folder))
        print(
            printable(
                f"{folder}: {len(unused)} of {len(found)} files are not used ({kinds}), "
                f"such as {named}"
            )
        )


def read_items(rows: Rows, keys: list[tuple]) -> list[dict]:
    """The rows of some keys (epoch, row, ...), as dicts.

    They are read together, because reading rows singly costs more than decoding a small image.
    """
    if len(keys[0]) == 4:  # streamed: the key holds the row itself
        return [item for _, _, _, item in keys]
    columns = rows[[key[1] for key in keys]]
    return [
        dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)
    ]


class RowDataset(torch.utils.data.Dataset):
    """The rows of `load_rows` and their names; a script's subclass defines the batches."""

    sizes: Any = None  # of each row, int [rows, 2], if they differ

    def __init__(self, rows: Rows, column: str, args: Namespace) -> None:
        self.rows, self.column, self.args = rows, column, args
        self.fingerprint = getattr(rows, "_fingerprint", "a stream")

    def __len__(self) -> int:
        return len(self.rows)

    def names(self) -> list[str]:
        """The name of each row, as in a cache: its file in the folder, or its number.

        No image is read.
        """
        paths = pc.struct_field(self.rows.data[self.column], "path").to_pylist()
        if self.rows._indices is not None:  # drawn by --max_train_samples
            paths = [paths[i] for i in self.rows._indices.column(0).to_pylist()]
        names = [name_image(row, {"path": path}) for row, path in enumerate(paths)]
        folder = find_source(self.args)
        return [os.path.relpath(name, folder) if os.path.isabs(name) else name for name in names]

    def digest(self, row: int) -> str:
        """A hash of a row's content: its text, and the bytes of its images.

        If the row has only the path of an image, the file is read.
        """
        digest = xxhash.xxh3_128()
        for value in self.rows[row].values():
            if isinstance(value, dict):
                data, path = value["bytes"], value["path"]
                # the file may be gone, or the path may be only a name for the bytes
                with passing_rows_faults():
                    if data is None or "size" in value:
                        with fsspec.open(path) as file:
                            data = file.read()
                value = data or path
            digest.update(value if isinstance(value, bytes) else repr(value).encode())
        return digest.hexdigest()
