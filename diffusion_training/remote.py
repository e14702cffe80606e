"""Files on a disk or at an address (s3://, gs://): each is whole or not there."""

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import fsspec
from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem

from diffusion_training.errors import explain, fail, is_a
from diffusion_training.files import name_unfinished, write_out

Done = TypeVar("Done")
WAITS = (0.5, 1, 2, 4, 8, 16, 32)  # seconds between tries: a bucket that is out for a minute ends no run


def is_address(path: str | Path) -> bool:
    """Whether a path is one of fsspec's, such as s3://bucket/latents, and not on a disk."""
    return "://" in str(path)


def remove(path: str | Path) -> None:
    """Delete a file, if it is there."""
    fs, path = fsspec.url_to_fs(str(path))
    with contextlib.suppress(FileNotFoundError):
        fs.rm_file(path)


def list_files(folder: str | Path) -> list[str]:
    """Names of all files in a folder, also in folders in it."""
    fs, root = fsspec.url_to_fs(str(folder).rstrip("/"))
    fs.invalidate_cache()
    return sorted(path[len(root) + 1 :] for path in fs.find(root))


def upload(source: str | Path, path: str | Path) -> None:
    """Send a file of this disk to an address, in one piece."""
    fs, path = fsspec.url_to_fs(str(path))
    fs.put_file(str(source), path)


@contextlib.contextmanager
def writing(path: str | Path) -> Iterator[Path]:
    """A file on this disk to write, which then is `path`, whole or not at all: renamed, or by one upload."""
    with tempfile.TemporaryDirectory() if is_address(path) else contextlib.nullcontext() as work:
        unfinished = Path(work, "file") if work else name_unfinished(Path(path))
        try:
            yield unfinished
            if work:
                return upload(unfinished, path)
            write_out(unfinished)
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)


@contextlib.contextmanager
def reading(path: str) -> Iterator[Path]:
    """The file `path` on this disk: itself, or a copy if it is at an address. There is none if there is none there."""
    with tempfile.TemporaryDirectory() if is_address(path) else contextlib.nullcontext() as work:
        if work:
            fs, there = fsspec.url_to_fs(path)
            path = f"{work}/{path.rsplit('/', 1)[1]}"
            with contextlib.suppress(FileNotFoundError):
                fs.get_file(there, path)
        yield Path(path)


def open_folder(url: str | Path) -> tuple[AbstractFileSystem, str, str]:
    """(fsspec file system, path in it, folder as `writing` takes it: that path on a disk, else the address)."""
    fs, path = fsspec.url_to_fs(str(url))
    path = path.rstrip("/")
    return fs, path, path if isinstance(fs, LocalFileSystem) else fs.unstrip_protocol(path)


def read_bytes(path: str) -> bytes:
    """What a small file holds, on a disk or at an address, which is tried again and again."""
    if not is_address(path):
        return Path(path).read_bytes()

    def read(fs: AbstractFileSystem, there: str) -> bytes:
        return fs.cat_file(there)

    # What is not there, or not ours to read, is not so for a moment only: at the start it is said at once
    return persist(path, read, ("FileNotFoundError", "PermissionError", "NoCredentialsError", "ValueError"))


def persist(path: str, action: Callable[[AbstractFileSystem, str], Done], hopeless: Sequence[str] = ()) -> Done:
    """Do `action(file system, path in it)` until it succeeds, for about a minute; then end with a sentence.

    Each time with another connection and credentials read anew, since these may have expired. What is of a class that
    `hopeless` names is not tried again; of these FileNotFoundError is raised.
    """
    for wait in (*WAITS, None):
        try:
            return action(*fsspec.url_to_fs(path, skip_instance_cache=wait != WAITS[0]))
        except Exception as error:
            if "FileNotFoundError" in hopeless and isinstance(error, FileNotFoundError):
                raise FileNotFoundError(None, "no such file", path) from error
            if wait is None or is_a(error, "ImportError", *hopeless):
                turn = "the same command goes on when it can be read"
                fail(f"{path} can't be read ({explain(error)}): what was saved is whole, and {turn}", alone=True)
            time.sleep(wait)
    raise AssertionError("the last try returns or ends the program")
