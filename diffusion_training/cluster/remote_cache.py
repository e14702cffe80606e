"""A latent cache at an address (s3://, gs://): started, written and finished as on a disk."""

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec

from diffusion_training.arguments import is_address
from diffusion_training.errors.sentences import explained, fail
from diffusion_training.latents.cache import writing_shard
from diffusion_training.remote import list_files, upload


@contextlib.contextmanager
def writing_shard_to(path: str) -> Iterator[tuple[dict[str, Any], Callable[..., None]]]:
    """`writing_shard`, for a path on a disk or at an address.

    For an address, the shard is written to this disk first; then both its files are uploaded.
    """
    if not is_address(path):
        with writing_shard(Path(path)) as shard:
            yield shard
        return
    folder, name = path.rsplit("/", 1)
    with tempfile.TemporaryDirectory() as work:
        Path(work, "unfinished").mkdir()
        with writing_shard(Path(work, name)) as shard:
            yield shard
        upload(f"{work}/{name}", path)
        upload(f"{work}/unfinished/{name}.json", f"{folder}/unfinished/{name}.json")


def fetch_cache(url: str, folder: str | Path) -> bool:
    """Copy a cache at an address, without its shards, into a folder on this disk.

    Returns whether there is a cache.
    """
    with explained(f"--output_dir {url} can't be read"):
        names = list_files(url)
        if names and "cache.json" not in names:
            fail(f"--output_dir {url} holds {names[0]} and no latent cache: choose another address")
        fs, root = fsspec.url_to_fs(url)
        small = [name for name in names if name.endswith((".json", ".jsonl", ".npy", ".args"))]
        fs.get([f"{root}/{name}" for name in small], [f"{folder}/{name}" for name in small])
    return "cache.json" in names


def begin_cache(folder: str | Path, url: str, is_begun: bool = False) -> None:
    """Upload what `open_cache` has written. Stops if another run has just begun there.

    is_begun: whether the cache is there already, perhaps without what belongs to it.
    """
    with explained(f"--output_dir {url} can't be written to, or another run has just begun there"):
        fs, root = fsspec.url_to_fs(url)
        if not is_begun:
            fs.put_file(f"{folder}/cache.json", f"{root}/cache.json", mode="create")
            upload(f"{folder}/run.args", f"{url}/run.args")
        for path in Path(folder).glob("empty_*.npy"):
            upload(path, f"{url}/{path.name}")


def upload_finished(folder: str | Path, url: str) -> None:
    """Upload what `finish_cache` has written, in the same order."""
    empty = sorted(path.name for path in Path(folder).glob("empty_*.npy"))
    names = ["run.args", "skipped.jsonl", *empty, "cache.json", "dataset_info.json", "state.json"]
    for name in names:
        upload(f"{folder}/{name}", f"{url}/{name}")
    fs, root = fsspec.url_to_fs(url)
    fs.invalidate_cache()
    # not `fs.exists`, which takes any error for "no"
    with contextlib.suppress(FileNotFoundError):
        fs.rm(f"{root}/unfinished", recursive=True)
