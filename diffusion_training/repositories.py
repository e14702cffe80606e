"""Models on the hub: a repository is asked once for its commit and files, and read as a folder.

Only the files that a run needs are fetched, into the cache of huggingface_hub. All are of one
commit, also if the branch moves meanwhile.
"""

import functools
import os
import re
import shutil
import time
from collections.abc import Collection
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from typing import Any, NamedTuple

from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from filelock import FileLock
from huggingface_hub import (
    constants,
    hf_hub_download,
    list_repo_files,
    model_info,
    snapshot_download,
)
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from tqdm.auto import tqdm

from diffusion_training.errors.faults import is_refused_by_storage
from diffusion_training.errors.printing import amount
from diffusion_training.errors.sentences import fail
from diffusion_training.files import digest_file, read_shard_names

# at the root of a repository with a pipeline, a model or a tokenizer is one of them
MODEL_FILES = ("model_index.json", "config.json", "tokenizer_config.json")
# (stem, type) of weights, in the order in which diffusers and transformers look for them
WEIGHTS = (
    ("diffusion_pytorch_model", "safetensors"),
    ("model", "safetensors"),
    ("diffusion_pytorch_model", "bin"),
    ("pytorch_model", "bin"),
)
# e.g. model.fp16.safetensors, and model.fp16-00001-of-00002.safetensors
VARIANT = re.compile(r"(?:diffusion_pytorch_)?model\.(\w+)(?:-\d+-of-\d+)?\.safetensors")
# configs and vocabularies; what else a repository may hold are weights, pictures and code
SMALL = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".bpe", ".vocab", ".spm")
SHA256 = 64  # digits; small files have a digest of git
WAITS = (1, 4, 16)  # seconds between tries of a storage that refuses
SHOWN = 10**8  # bytes from which on a download is announced, with a bar


class HubFile(NamedTuple):
    size: int  # bytes
    digest: str  # its name among the cache's blobs


SINGLE = re.compile(r"[^/]+\.safetensors")  # at the root of a repository
UNKNOWN = HubFile(0, "-")


@dataclass(frozen=True)
class Repository:
    """A repository at one commit, and its folder in the cache, which holds what was fetched."""

    name: str
    folder: Path
    cache_dir: str | None
    files: dict[str, HubFile] | None  # None: the hub can't be reached, and the cache must do

    def fetch(
        self, subfolder: str = "", variant: str | None = None, with_weights: bool = True
    ) -> None:
        """Fetch a part of a pipeline, or the model at the root, as `from_pretrained` reads it.

        with_weights: otherwise only configs and vocabularies. Several processes may call it at
        once, and each file is downloaded only once per machine.
        """
        prefix = f"{subfolder}/" if subfolder else ""
        names = self.files
        if names is None:
            found = (path for path in (self.folder / subfolder).rglob("*") if path.is_file())
            names = dict.fromkeys(path.relative_to(self.folder).as_posix() for path in found)
        small = [name for name in names if is_small(name, prefix)]
        self.download(small)
        if with_weights:
            check_variant(self.folder, names, prefix, variant)
            self.download(choose_weights(self.folder, names, prefix, variant))

    def download(self, paths: Collection[str]) -> None:
        """Download those files that the cache lacks, several at a time."""
        if not self.list_missing(paths):
            return
        repository = self.folder.parent.parent
        locks = repository.parent / ".locks" / repository.name
        locks.mkdir(parents=True, exist_ok=True)
        # The other processes of the machine wait, and find the files. The client's own locks, one
        # for each file, would let them measure the room while the first process fills it.
        with FileLock(locks / "diffusion-training.lock"):
            missing = self.list_missing(paths)
            if not missing:
                return
            size = sum(self.measure(path) for path in missing)
            self.check_room(size)
            is_shown = size >= SHOWN
            if is_shown:
                print(f"Downloading {size / 1e9:.3g} GB of {self.name} to {repository}", flush=True)
            for wait in (*WAITS, None):
                try:
                    snapshot_download(
                        self.name,
                        revision=self.folder.name,
                        cache_dir=self.cache_dir,
                        allow_patterns=[escape(path) for path in missing],
                        tqdm_class=make_bars(is_shown),
                    )
                    break
                except Exception as error:  # the client asks an address that has expired only once
                    if wait is None or not is_refused_by_storage(error):
                        raise
                    time.sleep(wait)
            for path in missing:
                self.check_digest(path, self.folder / path)

    def check_digest(self, path: str, fetched: Path) -> None:
        """Delete a large file that is not the one which the hub lists, and stop with an error.

        The client compares sizes only. A mirror or a proxy may give another file.
        """
        expected = (self.files or {}).get(path, UNKNOWN).digest
        if len(expected) == SHA256 and digest_file(fetched) != expected:
            fetched.resolve().unlink()
            fetched.unlink(missing_ok=True)
            fail(
                f"{path} of {self.name} has another SHA-256 than the hub lists, so it was deleted: "
                "run the command again; if that does not help, look at HF_ENDPOINT and the proxy",
                alone=True,
            )

    def list_missing(self, paths: Collection[str]) -> list[str]:
        return [path for path in paths if not (self.folder / path).exists()]

    def measure(self, path: str) -> int:
        """How many bytes of a file are to be downloaded; 0 if another commit had the same file."""
        file = (self.files or {}).get(path, UNKNOWN)
        is_stored = (self.folder.parent.parent / "blobs" / file.digest).is_file()
        return 0 if is_stored else file.size

    def check_room(self, size: int) -> None:
        """Stop with an error if the disk of the cache has no room for so many bytes."""
        free = shutil.disk_usage(self.folder).free
        if size > free:
            fail(
                f"{self.name} needs {size / 1e9:.3g} GB in {self.folder.parent.parent}, and the "
                f"disk has only {free / 1e9:.3g} GB free: make room, or give --cache_dir on "
                "another disk",
                alone=True,
            )


@functools.cache
def open_repository(
    name: str, first: tuple[str, ...], revision: str | None, cache_dir: str | None
) -> Repository:
    """Find the commit of a repository, on all processes the same one, once in a process.

    first: names of files at the root, of which it must hold one. It is fetched. Raises the client's
    errors, or FileNotFoundError if there is no such file.
    """
    state = PartialState()
    found: list[Any] = [None]
    if state.is_main_process:
        path = fetch_first(name, first, revision, cache_dir)
        files = list_repository_files(name, path.parent)
        if files is None:
            print(f"{name} is read from the local cache, because the hub can't be reached")
        found = [(path.name, path.parent.name, files)]
    if state.num_processes > 1:
        broadcast_object_list(found)
    marker, commit, files = found[0]
    path = Path(hf_hub_download(name, marker, revision=commit, cache_dir=cache_dir))
    return Repository(name, path.parent, cache_dir, files)


def fetch_model(name: str, cache_dir: str | None, subfolders: Collection[str] = ("",)) -> str:
    """The folder of a model: `name` itself, or a repository's, with these parts of it."""
    if os.path.exists(name):
        return name
    repository = open_repository(name, MODEL_FILES, None, cache_dir)
    for subfolder in subfolders:
        repository.fetch(subfolder)
    return str(repository.folder)


def fetch_first(
    name: str, paths: Collection[str], revision: str | None, cache_dir: str | None
) -> Path:
    """Fetch the first of these files that a repository has."""
    errors = []
    for path in paths:
        try:
            return Path(hf_hub_download(name, path, revision=revision, cache_dir=cache_dir))
        except EntryNotFoundError as error:
            errors.append(error)
    unknown = next((error for error in errors if isinstance(error, LocalEntryNotFoundError)), None)
    if unknown:
        raise unknown
    single = [each for each in list_repo_files(name, revision=revision) if SINGLE.fullmatch(each)]
    advice = ""
    if single:
        advice = (
            f", but {amount(len(single), 'single file')} such as {single[0]}: download one and "
            "give its path (a U-Net with its other models), or as --transformer_file beside the "
            "repository of its pipeline"
        )
    raise FileNotFoundError(f"it has no {' or '.join(paths)}{advice}")


def list_repository_files(name: str, folder: Path) -> dict[str, HubFile] | None:
    """The files of a commit, or None if the hub does not list them and the cache has some.

    folder: of the commit in the cache. Raises the client's errors if it has only one file.
    """
    try:
        found = model_info(name, revision=folder.name, files_metadata=True).siblings or []
    except Exception:
        if len(os.listdir(folder)) > 1:
            return None
        raise
    return {
        each.rfilename: HubFile(each.size or 0, each.lfs.sha256 if each.lfs else each.blob_id or "")
        for each in found
    }


def is_small(path: str, prefix: str) -> bool:
    """Whether a file of a part, whose paths begin with `prefix`, is a config or a vocabulary."""
    folder, name = os.path.split(path.removeprefix(prefix))
    is_of_part = path.startswith(prefix) and folder in ("", "additional_chat_templates")
    return is_of_part and name.endswith(SMALL)


def choose_weights(
    folder: Path, names: Collection[str], prefix: str, variant: str | None
) -> list[str]:
    """The weights that `from_pretrained` reads, in one format, among the files of a repository.

    They are those of an index, which is in `folder`, or one file; [] if there are none.
    """
    end = f".{variant}" if variant else ""
    for stem, kind in WEIGHTS:
        index = f"{prefix}{stem}.{kind}.index{end}.json"
        if index in names:
            return sorted(f"{prefix}{shard}" for shard in read_shard_names(folder / index))
        if (path := f"{prefix}{stem}{end}.{kind}") in names:
            return [path]
    return []


def check_variant(folder: Path, names: Collection[str], prefix: str, variant: str | None) -> None:
    """Raise FileNotFoundError if a part has its weights only as a variant that is not asked for.

    See `choose_weights`.
    """
    if variant or choose_weights(folder, names, prefix, None):
        return
    found = {match[1] for name in names if (match := VARIANT.fullmatch(name.removeprefix(prefix)))}
    if found:
        one = min(found)
        raise FileNotFoundError(f"its weights are there only as {one}: give --variant {one}")


def make_bars(are_shown: bool) -> type[tqdm]:
    """A class for the client's bars, since transformers' `disable_progress_bar` ends its own."""
    off = constants.HF_HUB_DISABLE_PROGRESS_BARS or (None if are_shown else True)

    class Bars(tqdm):
        def __init__(self, *args: Any, name: str | None = None, **options: Any) -> None:
            super().__init__(*args, **options | {"disable": off})

    return Bars
