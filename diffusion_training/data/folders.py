"""Captions of a folder of images: from files beside them, folder names, or one for all images."""

import functools
import os
import re
import zipfile
from argparse import Namespace
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from PIL import Image

from diffusion_training.errors.faults import suppressing_row_errors
from diffusion_training.errors.printing import print_once, printable
from diffusion_training.errors.sentences import fail
from diffusion_training.files import hash_values

TABLES = (".parquet", ".arrow", ".csv", ".tsv", ".json", ".jsonl", ".tar", ".zip")
HEIC = (".heic", ".heif")  # photographs of iPhones
CAPTIONS = (".txt", ".caption")  # caption files of sd-scripts and others
MASK = ".mask"  # photo.mask.png beside photo.jpg
REFERENCE = ".control"  # photo.control.png beside photo.jpg
# cached, because realpath looks at each folder of a path and is called for every row
resolve = functools.cache(os.path.realpath)
REPEATED = r"(\d+)_(.+)"  # the name of a folder in sd-scripts: repeats, caption


def get_source(args: Namespace) -> str:
    """The data set's name, or the path of a local folder with its links resolved.

    `datasets` resolves them too, and the keys of rows are paths relative to the folder.
    """
    source = args.dataset_name or args.train_data_dir
    return resolve(os.path.join(os.getcwd(), source)) if os.path.isdir(source) else source


def name_shared_folder(kind: str, cache_dir: str | None) -> Path:
    """The folder of --cache_images or --cache_latents, which all runs share."""
    return Path(cache_dir or datasets.config.HF_DATASETS_CACHE, "diffusion_training", kind)


def is_shared(folder: str) -> bool:
    """Whether a folder is one of --cache_latents."""
    shared = name_shared_folder("latents", None).parts[-2:]
    # one of several sizes is in a folder of its own
    return any(parent.parts[-2:] == shared for parent in [*Path(folder).parents][:2])


def list_paths(folder: str) -> list[str]:
    """The paths of all files and folders in a local folder; none if it is not a folder."""
    return [str(path) for path in Path(folder).rglob("*")]


def check_files(paths: Sequence[str]) -> None:
    """Raise ValueError for files in a folder that `datasets` can't read, or would wait for.

    It skips a whole archive that holds such a file, and blocks on pipes.
    """
    photographs = [path for path in paths if path.lower().endswith(HEIC)]
    if photographs and not any(is_image(path) or path.lower().endswith(TABLES) for path in paths):
        raise ValueError(
            f"its {len(photographs)} images are HEIC files: convert them to JPEG (docs/data.md)"
        )
    for path in paths:
        if path.lower().endswith(TABLES) and Path(path).is_fifo():
            raise ValueError(f"{path} is a pipe: write a file")
        if path.lower().endswith(".zip") and zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                names = archive.namelist()
            for name in names:
                if "[" in name or ".." in name.split("/"):
                    raise ValueError(f"{path} holds the name {name!r}: unpack it, and rename that")


def split_suffix(path: str | None) -> tuple[str, str]:
    """Split a path into (the path without the suffix of its file, the suffix).

    The path may lead into an archive: zip://photo.jpg::photos.zip.
    """
    file, *archives = (path or "").split("::")
    stem, suffix = os.path.splitext(file)
    return "::".join([stem, *archives]), suffix


def is_image(path: str | None) -> bool:
    """Whether a path has the suffix of an image."""
    return split_suffix(path)[1].lower() in Image.registered_extensions()


def find_owner(path: str | None, ending: str) -> str | None:
    """The image that a mask or reference belongs to, as a path without suffix; None for others.

    With the ending .mask, this is a/photo for a/photo.mask.png, and zip://photo::a.zip for a mask
    in an archive.
    """
    owner, end = split_suffix(split_suffix(path)[0])
    return owner if end.lower() == ending and is_image(path) else None


def find_partners(paths: Iterable[str | None], ending: str, what: str) -> dict[str, str]:
    """{an image, as a path without suffix: its file with an ending}. what: a word for the files."""
    found: dict[str, str] = {}
    for path in sorted({*paths}, key=str):
        owner = find_owner(path, ending)
        if path and owner and found.setdefault(owner, path) != path:
            fail(f"{found[owner]} and {path} are {what} of the same image: delete one")
    return found


def count_references(args: Namespace) -> int:
    """How many references the rows have, by the flags and the names of files."""
    flags = vars(args)
    named = flags.get("conditioning_image_column") or flags.get("conditioning_data_dir")
    if named:
        return len(named)
    return int(has_reference_files(list_paths(get_source(args))))


def has_reference_files(paths: Iterable[str]) -> bool:
    """Whether an image of a folder has a reference beside it. paths: see `list_paths`."""
    return any(find_owner(path, REFERENCE) for path in paths)


def describe_files(paths: Iterable[str | None]) -> list[str]:
    """Path, time and size of each file, for a fingerprint; none of those in archives."""
    content = []
    for path in paths:
        if path and os.path.isfile(path):
            stat = os.stat(path)
            content.append(f"{path} {stat.st_mtime_ns} {stat.st_size}")
    return content


def has_caption_files(paths: Iterable[str], extension: str) -> bool:
    """Whether an image of a folder has a caption file beside it: photo.txt for photo.jpg."""
    known = set(paths)
    return any(is_image(path) and split_suffix(path)[0] + extension in known for path in known)


def advise_captions(paths: Sequence[str], extension: str) -> str:
    """What to do about images without captions, for an error. paths: those in the folder."""
    images = {split_suffix(path)[0] for path in paths if is_image(path)}
    there = ""
    for suffix in CAPTIONS:
        parts = (split_suffix(path) for path in paths if path.endswith(suffix))
        if count := sum(stem in images for stem, _ in parts):
            there = f"read the {count} files {suffix} with --caption_extension {suffix}, "
    return (
        f"{there}choose with --caption_column, put captions beside the images "
        f"(photo{extension} for photo.jpg), or give one for all with --instance_prompt"
    )


def add_captions(rows: datasets.Dataset, column: str, extension: str) -> datasets.Dataset:
    """Add the captions from files beside a folder's images, None where there is no file.

    The fingerprint of the rows covers these captions.
    """

    def read(path: Path) -> str | None:
        with suppressing_row_errors():
            # reading a pipe might never end
            return path.read_text(encoding="utf-8-sig").strip() if path.is_file() else None
        return None

    images = rows.cast_column("image", datasets.Image(decode=False))["image"][:]
    paths = [Path(image["path"]).with_suffix(extension) for image in images]
    captions = [read(path) for path in paths]
    pairs = [*zip(paths, captions, strict=True)]
    unread = [path for path, text in pairs if text is None and path.is_file()]
    if unread:
        print_once(f"{len(unread)} captions can't be read, such as {unread[0]}: are they UTF-8?")
    several = [path for path, text in pairs if text and len(text.splitlines()) > 1]
    if several:
        print_once(
            f"{len(several)} captions have several lines, such as {several[0]}: all lines are "
            "used (sd-scripts uses only the first)"
        )
    fingerprint = hash_values([rows._fingerprint, captions])
    return rows.add_column(column, captions, new_fingerprint=fingerprint)


def note_repeats(source: str) -> None:
    """Tell users of sd-scripts that the numbers in its folders' names are not read here."""
    if os.path.isdir(source):
        names = sorted(name for name in os.listdir(source) if re.fullmatch(REPEATED, name))
        if names:
            print_once(
                f"Each image of {printable(names[0])} counts once an epoch: --folder_repeats takes "
                "the number as repeats, and the rest as the caption"
            )


def apply_folder_flags(rows: datasets.Dataset, column: str, args: Namespace) -> datasets.Dataset:
    """Apply --folder_repeats and --instance_prompt.

    With --folder_repeats, images in a folder `10_name` are repeated 10 times, and `name` is the
    caption of those that have none. --instance_prompt is the caption of all other images without
    one. The fingerprint of the rows depends on both.
    """
    prompt = args.instance_prompt
    repeats = [1] * len(rows)
    captions = [prompt] * len(rows)
    source = get_source(args)
    if args.folder_repeats:
        paths: list[Any] = [None]
        if os.path.isdir(source) and "image" in rows.features:
            images = rows.cast_column("image", datasets.Image(decode=False))["image"][:]
            paths = [image["path"] for image in images]
        if None in paths:  # for example, images in parquet files
            fail(
                "--folder_repeats needs folders of images such as 10_name, and "
                f"{source} is not a local folder of images"
            )
        folders = [os.path.relpath(path, source).split(os.sep)[0] for path in paths]
        matches = [re.fullmatch(REPEATED, folder) for folder in folders]
        if not any(matches):
            fail(f"--folder_repeats: {source} has no folder with a name like 10_name")
        repeats = [int(match[1]) if match else 1 for match in matches]
        if 0 in repeats:
            never = folders[repeats.index(0)]
            print(printable(f"{repeats.count(0)} images are unused: folder {never} sets 0 repeats"))
        captions = [match[2] if match else prompt for match in matches]
    else:
        note_repeats(source)
        if prompt is None:
            return rows
    if column in rows.features:
        pairs = zip(captions, rows[column][:], strict=True)
        captions = [other if caption is None else caption for other, caption in pairs]
    if prompt is not None and prompt not in captions:
        fail(f"--instance_prompt does nothing: all images of {source} have captions")
    rows = rows.remove_columns([column] if column in rows.features else [])
    fingerprint = hash_values([rows._fingerprint, captions, repeats])
    rows = rows.add_column(column, captions, new_fingerprint=fingerprint)
    return rows.select(np.repeat(np.arange(len(rows)), repeats), new_fingerprint=fingerprint)
