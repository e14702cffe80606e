"""The folder of a latent cache that is made on Ray, on a disk or at an address (s3://, gs://)."""

import contextlib
import functools
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
from accelerate import Accelerator
from filelock import BaseFileLock
from tqdm.auto import tqdm

from diffusion_training.arguments import is_address
from diffusion_training.cluster.connection import run_tasks
from diffusion_training.errors.sentences import explained, fail
from diffusion_training.latents.cache import (
    check_skipped,
    describe_damage,
    finish_cache,
    open_cache,
    writing_shard,
)
from diffusion_training.latents.plan import PlannedCache
from diffusion_training.remote import list_files, reading, remove, send, upload


@contextlib.contextmanager
def writing_shard_to(
    path: str, numbers: range
) -> Iterator[tuple[dict[str, Any], Callable[..., None]]]:
    """`writing_shard`, for a path on a disk or at an address.

    For an address, the shard is written to this disk first; then both its files are uploaded.
    """
    if not is_address(path):
        with writing_shard(Path(path), numbers) as shard:
            yield shard
        return
    folder, name = path.rsplit("/", 1)
    with tempfile.TemporaryDirectory() as work:
        Path(work, "unfinished").mkdir()
        with writing_shard(Path(work, name), numbers) as shard:
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
            send(f"{folder}/cache.json", fs, f"{root}/cache.json", mode="create")
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


def check_shards(
    paths: dict[str, range], records: dict[str, dict], name_rows: Callable[[range], list[str]]
) -> list[str | None]:
    """Call `describe_damage` on shards that have a record. paths: {shard: its rows}."""
    damages = []
    for path, numbers in paths.items():
        with reading(path) as copy:
            names = functools.partial(name_rows, numbers)
            damages.append(describe_damage(copy, records, names))
    return damages


def find_damaged(
    folder: str,
    shards: dict[str, range],
    records: dict[str, dict],
    name_rows: Callable[[range], list[str]],
) -> dict[str, str]:
    """Check the shards that have a record, on all nodes; returns {name: damage}.

    shards: {name: its rows}. name_rows: gives the names of rows, on any node.
    """
    import ray

    options = {"num_cpus": 0.5, "scheduling_strategy": "SPREAD", "max_retries": 0}
    task = ray.remote(**options)(check_shards)
    names = [name for name in shards if name in records]
    groups = [names[i : i + 16] for i in range(0, len(names), 16)]

    def check(group: list[str]) -> Any:
        paths = {f"{folder}/{name}": shards[name] for name in group}
        return task.remote(paths, {name: records[name] for name in group}, name_rows)

    damages = {}
    checked = run_tasks(groups, check, lambda: 1000)
    bar = tqdm(checked, total=len(groups), desc="Checking", disable=not names, leave=False)
    for group, of_group, reason in bar:
        if reason:
            fail(f"{group[0]} could not be checked: {reason}; run the same command to resume")
        for name, damage in zip(group, of_group, strict=True):
            if damage:
                damages[name] = damage
    return damages


class Destination:
    """The folder of one cache, on a disk or at an address, with a local copy of its small files."""

    def __init__(self, planned: PlannedCache) -> None:
        self.planned = planned
        self.is_remote = is_address(planned.output_dir)
        self.copy = tempfile.TemporaryDirectory() if self.is_remote else None
        if self.copy:
            self.folder = planned.output_dir.rstrip("/")
            self.local = Path(self.copy.name)
            self.is_begun = fetch_cache(self.folder, self.local)
        else:
            self.folder = os.path.abspath(planned.output_dir)
            self.local = Path(self.folder)
            self.is_begun = True
        self.lock: BaseFileLock | None = None
        self.skipped = 0

    def open(
        self,
        accelerator: Accelerator,
        planned: PlannedCache,
        empty_prompt: dict[str, np.ndarray],
        name_rows: Callable[[range], list[str]],
    ) -> list[int]:
        """Lock and open the cache. Returns the numbers of its missing shards."""
        self.planned = planned
        local = self.local if self.is_remote else None
        self.lock, _, records = open_cache(accelerator, planned, empty_prompt, local)
        if self.is_remote:
            begin_cache(self.local, self.folder, self.is_begun)
        shards = planned.list_shards()
        for name, damage in find_damaged(self.folder, shards, records, name_rows).items():
            print(f"{self.folder}/{name} {damage}: making it again", flush=True)
            del records[name]
        missing = [number for number, name in enumerate(shards) if name not in records]
        if missing:
            remove(f"{self.folder}/state.json")  # an unfinished cache does not open
        self.skipped = sum(record["skipped"] for record in records.values())
        return missing

    def add(self, shard: str, record: dict[str, Any], num_rows: int, max_skipped: float) -> None:
        """Add the record of a new shard, and stop if too many rows are skipped."""
        if self.is_remote:
            (self.local / "unfinished" / f"{shard}.json").write_text(json.dumps(record))
        new_skipped = record["skipped"]
        self.skipped += len(new_skipped)
        check_skipped(self.skipped, (new_skipped or [None])[-1], num_rows, max_skipped)

    def finish(self, empty_prompt: dict[str, np.ndarray], max_skipped: float) -> None:
        """Write the records into one cache.json."""
        reason = "its shards are complete: run the same command to resume"
        with explained(f"{self.folder} could not be finished; {reason}"):
            cache = finish_cache(self.local, empty_prompt, max_skipped)
            if self.is_remote:
                upload_finished(self.local, self.folder)
        self.planned.report_done(cache)

    def close(self) -> None:
        if self.lock:
            for leftover in self.local.rglob(".tmp-*"):  # of workers that were stopped
                leftover.unlink(missing_ok=True)
            self.lock.release(force=True)
