"""--data FILE: several folders, each with its own flags, as musubi-tuner and sd-scripts have.

A folder becomes a cache of --cache_latents, which counts num_repeats times in an epoch.
"""

import json
import math
import os
import tomllib
from collections.abc import Callable
from typing import Any, NamedTuple

# {key: (flag, type)}; a key without a flag here is read below
KEYS: dict[str, tuple[str, type]] = {
    "image_directory": ("train_data_dir", str),  # of musubi-tuner
    "image_dir": ("train_data_dir", str),  # of sd-scripts
    "caption_extension": ("caption_extension", str),
    "caption_prefix": ("caption_prefix", str),
    "class_tokens": ("instance_prompt", str),
    "control_directory": ("conditioning_data_dir", str),
    "flip_aug": ("random_flip", bool),
    "center_crop": ("center_crop", bool),
    "resolution": ("resolution", int),
    "num_repeats": ("", int),
    "enable_bucket": ("", bool),
    "bucket_reso_steps": ("", int),
    "bucket_no_upscale": ("bucket_no_upscale", bool),
}


class Folder(NamedTuple):
    """A folder of images."""

    repeats: int  # how often an epoch takes each image
    flags: dict[str, Any]  # {flag of a trainer: value}


def read_data_file(path: str, advise: Callable[[str], str | None] | None = None) -> list[Folder]:
    """The folders in a file. Raises ValueError, with a sentence, for what can't be used.

    advise: see `Parser.advise`; None if the keys were checked before.
    """
    with open(path, "rb") as file:
        content = json.load(file) if path.endswith(".json") else tomllib.load(file)
    if not isinstance(content, dict):
        raise ValueError("it is no table of datasets")
    datasets = list_sections(content, "datasets")
    general = content.get("general", {})
    if not isinstance(general, dict):
        raise ValueError(f"its general is {general!r:.100}, not a table")
    if unknown := content.keys() - {"datasets", "general"}:
        raise ValueError(f"it has {min(unknown)}, but only general and datasets are read")
    entries = []
    for dataset in datasets:
        own = general | {key: value for key, value in dataset.items() if key != "subsets"}
        subsets = list_sections(dataset, "subsets") if "subsets" in dataset else [{}]
        entries += [own | subset for subset in subsets]
    if not entries:
        raise ValueError("it has no [[datasets]]")
    if advise:
        check_keys(entries, advise)
    folders = [*map(read_folder, entries)]
    places = [os.path.realpath(folder.flags["train_data_dir"]) for folder in folders]
    for place in places:
        if places.count(place) > 1:
            raise ValueError(
                f"it names {place} twice: give it once, with num_repeats, and several sizes as "
                "--resolution 512 768"
            )
    return folders


def list_sections(table: dict[str, Any], name: str) -> list[dict[str, Any]]:
    """The tables of a list in a table, none without it. Raises ValueError for another value."""
    tables = table.get(name, [])
    if not isinstance(tables, list) or not all(isinstance(each, dict) for each in tables):
        raise ValueError(f"its {name} is {tables!r:.100}, not a list of tables")
    return tables


def check_keys(entries: list[dict[str, Any]], advise: Callable[[str], str | None]) -> None:
    """Raise ValueError if entries have keys that have no meaning here, and say what replaces them.

    What other programs know may be there if it switches something off.
    """
    others = {key for entry in entries for key in entry} - KEYS.keys()
    wanted = {key for entry in entries for key, value in entry.items() if value}
    faults = []
    for key in sorted(others):
        advice = advise(f"--{key}")
        if key in wanted or not advice:
            faults.append(f"{key} ({advice or 'not one of ' + ', '.join(KEYS)})")
    if faults:
        raise ValueError(f"remove {', '.join(faults)}")


def read_folder(entry: dict[str, Any]) -> Folder:
    """A folder, from what holds for it in the file."""
    entry = {key: value for key, value in entry.items() if key in KEYS}
    match entry.get("resolution"):
        case [int(width), int(height)] if min(width, height) > 0:
            if width != height:
                side = math.isqrt(width * height) // 16 * 16
                raise ValueError(
                    f"its resolution is {width} x {height}: give the side of a square of this "
                    f"area, {side}; with enable_bucket, images keep their shape"
                )
            entry["resolution"] = width
    for key, value in entry.items():
        kind = KEYS[key][1].__name__
        if type(value).__name__ != kind:
            raise ValueError(f"its {key} is {value!r:.100}, not one {kind}")
        if kind == "int" and value < 1:
            raise ValueError(f"its {key} is {value}: it must be at least 1")
    found = {KEYS[key][0]: value for key, value in entry.items() if KEYS[key][0]}
    if entry.get("enable_bucket"):
        found["bucket_step"] = entry.get("bucket_reso_steps", 64)
    folder = found.get("train_data_dir")
    if folder is None:
        raise ValueError("one of its [[datasets]] has no image_directory")
    if not os.path.isdir(folder):
        raise ValueError(f"its image_directory {folder} is not a folder")
    return Folder(entry.get("num_repeats", 1), found)
