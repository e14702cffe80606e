"""--cache_latents: a latent cache in a folder that all runs with the same data share."""

import argparse
import contextlib
import io
import json
import os
import shlex
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

from filelock import FileLock

from diffusion_training import __version__
from diffusion_training.arguments import Flags, format_args, list_values, make_parser
from diffusion_training.data.flags import add_stream_flags
from diffusion_training.data.folders import count_references, name_shared_folder
from diffusion_training.data.references import add_references
from diffusion_training.data.rows import load_rows
from diffusion_training.errors.printing import amount, print_once
from diffusion_training.errors.sentences import fail
from diffusion_training.files import find_differences, hash_values
from diffusion_training.latents.cache_flags import add_cache_flags
from diffusion_training.latents.reader import load_cache
from diffusion_training.launch import Launch
from diffusion_training.memory import is_gpu

# Flags that change nothing in the cache
WITHOUT_EFFECT = ("cache_dir", "dataloader_num_workers")
# What launchers tell a process of its group; the process that encodes is alone
LAUNCHERS = ("ACCELERATE_", "MASTER_", "TORCHELASTIC_", "GROUP_", "ROLE_")
RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def cache_latents_once(
    launch: Launch, args: Namespace, script: str, before: dict[str, Any] | None = None
) -> Namespace:
    """With --cache_latents and images, or --data, return the flags for caches, else `args`.

    Each folder of --data and each --resolution has a cache. before: the settings of the checkpoint,
    whose --data must be the same. script: the file that is run.
    """
    if args.latents_dir or not (args.cache_latents or args.data):
        return args
    folders = [(1, {})]
    if args.data:
        from diffusion_training.latents.data_file import read_data_file

        folders = read_data_file(args.data)
    found: dict[str, Any] = {"dataset_name": None, "train_data_dir": None, "latents_dir": []}
    weights = []
    sides: list[int | None] = []
    flips = False
    about = {}
    owns = []
    for repeats, flags in folders:
        owns.append(own := Flags(args.given, args.typed, **vars(args) | flags))
        if args.data:
            about[own.train_data_dir] = flags | {"num_repeats": repeats}
        flips |= own.random_flip
        sides += (own_sides := list_values(own.resolution))
        odds = [1.0] * len(own_sides)
        if args.latents_weights and len(args.latents_weights) == len(odds):
            odds = args.latents_weights
        weights += [repeats * each / sum(odds) for each in odds]
    if before and (changed := find_differences(before.get("folders") or {}, about)):
        fail(
            f"--data {args.data} has changed since the checkpoint ({', '.join(changed)}): keep it "
            "as it was, or choose a new --output_dir"
        )
    for own in owns:
        found["latents_dir"] += cache_folder(launch, own, script)
    if args.data or len(weights) > 1:  # an image counts once an epoch, in one of the sizes
        found["latents_weights"] = weights
        found |= {"folders": about, "random_flip": flips}
        found["resolution"] = None if None in sides else [*dict.fromkeys(sides)]
    return Flags(args.given, args.typed, **vars(args) | found)


def cache_folder(launch: Launch, args: Namespace, script: str) -> list[str]:
    """The caches of some images, one for each --resolution.

    If there is no such cache yet, precompute_latents.py makes it, in a process of its own. Call
    this before any model is loaded, so that the other process has the whole device. The first
    process makes the cache. The others wait for its lock, as long as it takes, and so does a run
    that is started meanwhile.
    """
    device = args.cache_latents or "device"
    flags = choose_flags(args, launch.mixed_precision)
    folder = name_shared_folder("latents", args.cache_dir) / hash_values(describe(flags, args))
    folder.mkdir(parents=True, exist_ok=True)
    sides = list_values(args.resolution)
    places = [folder / str(side) for side in sides] if len(sides) > 1 else [folder]
    with FileLock(f"{folder}.lock"):
        # A killed run may have left a process that still encodes. It has this lock.
        with FileLock(folder / ".lock"):
            pass
        if not all((place / "state.json").exists() for place in places):
            print_once(f"Encoding the images, once for all runs, into {folder}")
            on_gpu = is_gpu(launch.device) and device != "cpu"
            flags |= {name: vars(args)[name] for name in WITHOUT_EFFECT}
            flags |= {"batch_size": "auto" if on_gpu else 4, "output_dir": str(folder)}
            path = str(Path(script).with_name("precompute_latents.py"))
            words = shlex.split(format_args(flags, start=""), comments=True)
            make_cache([path, *words], list_environment(device))
    print_once(f"Latents: {folder}, for all runs with these images and models")
    skipped = load_cache(places[0]).settings["skipped"]
    if skipped:
        listed = places[0] / "skipped.jsonl"
        print_once(f"{amount(skipped, 'image')} could not be used: {listed} says why")
    return [*map(str, places)]


def choose_flags(args: Namespace, mixed_precision: str) -> dict[str, Any]:
    """The flags of precompute_latents.py that decide what the cache holds, except for defaults."""
    parser = make_parser("precompute_latents.py", None)
    add_cache_flags(parser)
    add_stream_flags(parser.add_argument, trains=False)
    defaults = vars(parser.parse_args([]))
    for name in (*WITHOUT_EFFECT, "output_dir", "compile"):
        del defaults[name]
    flags = {name: value for name, value in vars(args).items() if name in defaults}
    # a step skips images that can't be used, and so does the cache
    flags |= {"mixed_precision": mixed_precision, "max_skipped": 1.0}
    if args.cache_latents == "cpu":
        # most CPUs multiply in bfloat16 more slowly, and weights keep their 16 bits: see `EXACT`
        flags["mixed_precision"] = "no"
    if args.shuffle_caption:  # the trainer has to encode the captions
        flags |= {"text_cache": "ids", "clip_skip": None}
    idle = {each.dest for each in parser.find_idle(argparse.Namespace(**defaults | flags))}
    return {
        name: value for name, value in flags.items() if value != defaults[name] and name not in idle
    }


def describe(flags: dict[str, Any], args: Namespace) -> list:
    """What decides the content of the cache, as far as it is known before models are loaded."""
    # a trainer without the flags of references leaves it to precompute_latents.py to refuse them
    with_references = "conditioning_image_column" in args and count_references(args) > 0
    with contextlib.redirect_stdout(io.StringIO()):  # precompute_latents.py prints it
        references = add_references if with_references else None
        images = load_rows(args, others=[args.caption_column], add_references=references)
    models = []
    for name, value in sorted(flags.items()):
        if name.endswith("_name_or_path") and os.path.exists(value):
            files = [path for path in (Path(value), *Path(value).rglob("*")) if path.is_file()]
            stats = [(str(path), path.stat()) for path in sorted(files)]
            models += [[path, stat.st_size, stat.st_mtime_ns] for path, stat in stats]
    version = __version__.split(".")[:2]
    return [version, images.rows._fingerprint, json.dumps(flags, sort_keys=True), models]


def list_environment(device: str) -> dict[str, str]:
    """The environment of the process that encodes: this one's, without what launchers add.

    device: "cpu", or "device" for the device of the run.
    """
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(LAUNCHERS) and name not in RANKS
    }
    cpu = "true" if device == "cpu" else os.environ.get("ACCELERATE_USE_CPU")
    return environment | ({"ACCELERATE_USE_CPU": cpu} if cpu else {})


def make_cache(command: list[str], environment: dict[str, str]) -> None:
    """Run precompute_latents.py, and end this program with it.

    A signal that ends this program is sent on. The next start finishes the cache.
    """
    child = subprocess.Popen([sys.executable, *command], env=environment)
    try:
        status = child.wait()
    except BaseException:
        child.terminate()
        child.wait()
        raise
    if status:
        fail("precompute_latents.py could not encode the images, see its message", alone=True)
