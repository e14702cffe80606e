"""Files that hold a model's weights alone are unpacked once into a folder of --cache_dir.

Everything that reads a pipeline's folder then works as it does with one.
"""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import torch
import xxhash
from filelock import FileLock
from huggingface_hub.constants import HF_HOME
from safetensors import safe_open
from safetensors.torch import save_file

from diffusion_training.errors.sentences import explained, fail
from diffusion_training.families.known import load_family
from diffusion_training.families.names import FACTS
from diffusion_training.files import clean, delete, saving


def unpack_pipeline(source: str, config: str | None, cache_dir: str | None) -> str:
    """Unpack a base in one file into a pipeline folder. Returns it.

    config: --single_file_config, or None for the configs of the hub. Everything else then works as
    with a folder: a cache that fits the file fits the folder too.
    """
    with explained(f"{source} can't be read"), safe_open(source, "pt") as file:
        names = set(file.keys())
        header = file.metadata() or {}
    families = map(load_family, FACTS)
    family = next((each for each in families if each.recognizes_file(names)), None)
    if family is None:
        fail(
            f"{source} is not Stable Diffusion 1, 2 or XL in its published layout, with U-Net, VAE "
            "and text encoders"
        )
    objective = family.guess_objective(names, header)
    key: list[Any] = [objective]
    key += [path.read_text() for path in sorted(Path(config or os.devnull).rglob("*.json"))]

    def read() -> Callable[[Path], None]:
        kind = getattr(diffusers, family.pipeline)
        pipeline = kind.from_single_file(source, config=config, cache_dir=cache_dir)
        check_whole(pipeline)
        if objective:
            scheduler = pipeline.scheduler
            pipeline.scheduler = scheduler.from_config(scheduler.config, **objective)
        return partial(save_unpacked, pipeline)

    with explained(
        f"{source} can't be unpacked; if its configs are missing, give --single_file_config"
    ):
        return unpack_once(source, config, key, cache_dir, read)


def unpack_once(
    source: str,
    config: str | None,
    key: list[Any],
    cache_dir: str | None,
    read: Callable[[], Callable[[Path], None]],
) -> str:
    """Unpack a file into a folder in --cache_dir, if that has not been done. Returns the folder.

    config: where its configs come from; with others it gets another folder. key: what else decides
    the content. read: reads the file, and returns a function that writes the folder.
    """
    about = os.stat(source)
    place = xxhash.xxh3_64_hexdigest(repr([os.path.realpath(source), config]).encode())
    key = [about.st_size, about.st_mtime_ns, diffusers.__version__, *key]
    root = Path(cache_dir or HF_HOME) / "single_files"
    prefix = f"{Path(source).stem}-{place}-"
    folder = root / f"{prefix}{xxhash.xxh3_64_hexdigest(repr(key).encode())}"
    root.mkdir(parents=True, exist_ok=True)
    with FileLock(root / ".lock"):  # the first process unpacks it, the others wait and find it
        if not folder.exists():
            print(f"Unpacking {source} into {folder}, once for all runs")
            clean(root)
            write = read()
            with saving(root, folder) as unfinished:
                write(unfinished / folder.name)
            for other in root.iterdir():  # unpacked from older versions of the file
                if other.name.startswith(prefix) and other != folder:
                    delete(other)
    return str(folder)


def list_modules(pipeline: diffusers.DiffusionPipeline) -> dict[str, torch.nn.Module]:
    return {
        name: part
        for name, part in pipeline.components.items()
        if isinstance(part, torch.nn.Module)
    }


def check_whole(pipeline: diffusers.DiffusionPipeline) -> None:
    """Raise ValueError if the file lacked a weight, which diffusers leaves on the meta device."""
    for module in list_modules(pipeline).values():
        for name, weight in module.named_parameters():
            if weight.is_meta:
                raise ValueError(f"the {type(module).__name__} has no {name}")


def save_unpacked(pipeline: diffusers.DiffusionPipeline, folder: Path) -> None:
    """Write a pipeline folder."""
    pipeline.save_pretrained(folder)
    for name, module in list_modules(pipeline).items():
        # transformers writes weights on the first process only
        if not list((folder / name).glob("*.safetensors")):
            module.config.save_pretrained(folder / name)
            weights = {key: value.contiguous() for key, value in module.state_dict().items()}
            save_file(weights, folder / name / "model.safetensors", {"format": "pt"})
