"""Files on a disk or at an address (s3://, gs://), written completely or not at all."""

import contextlib
import fnmatch
import os
import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import fsspec
from fsspec import AbstractFileSystem
from fsspec.asyn import AsyncFileSystem
from fsspec.exceptions import FSTimeoutError
from fsspec.implementations.local import LocalFileSystem

from diffusion_training.arguments import is_address
from diffusion_training.errors.faults import explain, is_a, is_web_page
from diffusion_training.errors.sentences import fail, name_command
from diffusion_training.files import name_unfinished, write_out

Result = TypeVar("Result")
# seconds between tries: a run survives if a bucket is unavailable for a minute
WAITS = (0.5, 1, 2, 4, 8, 16, 32)
PATIENCE = 300.0  # seconds that a store has to take a file, and more by the file's size
SLOWEST = 2**17  # bytes per second
SILENCE = 10.0  # seconds until a run prints which address it waits for


@contextlib.contextmanager
def naming_silence(address: str) -> Iterator[None]:
    """Print that the run waits for an address if the block takes long.

    The libraries of some stores try for many minutes before they raise an error.
    """
    sentence = f"Waiting for {address}, which has not answered for {SILENCE:g} s"
    timer = threading.Timer(SILENCE, print, [sentence], {"file": sys.stderr, "flush": True})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def remove(path: str) -> None:
    """Delete a file, if it exists."""
    fs, path = fsspec.url_to_fs(path)
    with contextlib.suppress(FileNotFoundError):
        fs.rm_file(path)


def has_file(fs: AbstractFileSystem, path: str) -> bool:
    """Whether a path exists. Raises an error if that is unknown, where `fs.exists` says no.

    For example without permission, or when the network fails.
    """
    try:
        fs.info(path)
    except FileNotFoundError:
        return False
    return True


def list_files(folder: str) -> list[str]:
    """Return the names of all files in a folder and its subfolders."""
    fs, root = fsspec.url_to_fs(folder.rstrip("/"))
    fs.invalidate_cache()
    return sorted(path[len(root) + 1 :] for path in fs.find(root))


def expand(pattern: str) -> list[str]:
    """Return the names of a range or a list in braces.

    For example, a{08..10} -> a08, a09, a10, and {a,b}.tar -> a.tar, b.tar.
    """
    match = re.search(r"\{(?:(\d+)\.\.(\d+)|([^{}]*,[^{}]*))\}", pattern)
    if match is None:
        return [pattern]
    first, last, listed = match.groups()
    if listed is not None:
        parts = listed.split(",")
    else:
        parts = [f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]
    head, tail = pattern[: match.start()], pattern[match.end() :]
    return [name for part in parts for name in expand(head + part + tail)]


def list_data(url: str, suffixes: tuple[str, ...]) -> tuple[str, dict[str, Any]]:
    """Find data files at an address. Returns (the folder, {name in it: fsspec's info}).

    `url` is a folder, or ends in names with * or with a range such as {00000..00999}. It skips
    names that begin with a dot or with __, as `datasets` does on a disk: for example the tables of
    download_images.py. Raises FileNotFoundError if a name has no file.
    """
    folder, names = url.rstrip("/"), None
    if match := re.search(r"[{*?\[]", folder):
        end = folder.rindex("/", 0, match.start())
        folder, names = folder[:end], expand(folder[end + 1 :])
    fs, root = fsspec.url_to_fs(folder)
    fs.invalidate_cache()
    found = {}
    for path, info in sorted(fs.find(root, detail=True).items()):
        name = path[len(root) + 1 :]
        is_ignored = any(part.startswith((".", "__")) for part in name.split("/"))
        if name.lower().endswith(suffixes) and not is_ignored:
            found[name] = info
    if names is None:
        return folder, found
    chosen = {}
    for name in names:
        matches = [name] if name in found else fnmatch.filter(found, name)
        matches = [match for match in matches if match.count("/") == name.count("/")]
        if not matches:
            raise FileNotFoundError(f"there is no {folder}/{name}")
        chosen |= {match: found[match] for match in matches}
    return folder, chosen


def upload(source: str | Path, path: str | Path) -> None:
    """Send a local file to an address, in one piece."""
    send(source, *fsspec.url_to_fs(str(path)))


def send(source: str | Path, fs: AbstractFileSystem, path: str, **options: Any) -> None:
    """Send a local file to a path in a store, in one piece. Raises TimeoutError if it hangs.

    s3fs waits without a time limit until a store says that it is ready for a file.

    options: of `put_file`.
    """
    seconds = PATIENCE + os.path.getsize(source) / SLOWEST
    if isinstance(fs, AsyncFileSystem):
        options |= {"timeout": seconds}
    try:
        fs.put_file(str(source), path, **options)
    except FSTimeoutError:
        raise TimeoutError(f"{path} was not received within {seconds:.0f} s") from None


@contextlib.contextmanager
def writing(path: str | Path) -> Iterator[Path]:
    """Yield a local file to write, which then becomes `path`, completely or not at all.

    If `path` is on a disk, the file is renamed. Otherwise it is uploaded in one piece.
    """
    if is_address(path):
        with tempfile.TemporaryDirectory() as folder:
            yield Path(folder, "file")
            upload(f"{folder}/file", path)
        return
    unfinished = name_unfinished(Path(path))
    try:
        yield unfinished
        write_out(unfinished)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


@contextlib.contextmanager
def reading(path: str) -> Iterator[Path]:
    """Yield `path` as a local file: itself, or a copy if it is an address.

    If there is no file at the address, the copy does not exist either.
    """
    if not is_address(path):
        yield Path(path)
        return
    with tempfile.TemporaryDirectory() as folder:
        fs, source = fsspec.url_to_fs(path)
        copy = f"{folder}/{path.rsplit('/', 1)[1]}"
        with contextlib.suppress(FileNotFoundError):
            fs.get_file(source, copy)
        yield Path(copy)


def open_folder(url: str | Path) -> tuple[AbstractFileSystem, str, str]:
    """Open a folder. Returns (fsspec file system, path in it, the folder for `writing`).

    The last value is the path if the folder is on a disk, else the address.
    """
    fs, path = fsspec.url_to_fs(str(url))
    path = path.rstrip("/")
    folder = path if isinstance(fs, LocalFileSystem) else fs.unstrip_protocol(path)
    return fs, path, folder


def read_bytes(path: str) -> bytes:
    """Return the content of a small file. At an address, reading is retried."""
    if not is_address(path):
        if os.path.exists(path) and not os.path.isfile(path):
            raise ValueError(f"{path} is not a file")  # a pipe might never end
        return Path(path).read_bytes()
    # a retry does not help against these errors
    hopeless = ("FileNotFoundError", "PermissionError", "NoCredentialsError", "ValueError")
    with naming_silence(path):
        return persist(path, lambda fs, location: fs.cat_file(location), hopeless)


def persist(
    path: str, action: Callable[[AbstractFileSystem, str], Result], hopeless: Sequence[str] = ()
) -> Result:
    """Call `action(file system, path in it)` until it succeeds, for about a minute.

    Then the program ends with an error. Each retry makes a new connection and reads the
    credentials again, since these may have expired. `hopeless` names the classes of errors that are
    not retried. If FileNotFoundError is among them, it is raised.
    """
    for wait in (*WAITS, None):
        try:
            return action(*fsspec.url_to_fs(path, skip_instance_cache=wait != WAITS[0]))
        except Exception as error:
            if "FileNotFoundError" in hopeless and isinstance(error, FileNotFoundError):
                raise FileNotFoundError(None, "no such file", path) from error
            is_hopeless = is_a(error, "ImportError", *hopeless) and not is_web_page(error)
            if wait is None or is_hopeless:
                fail(
                    f"{path} can't be read ({explain(error)}): saved files are complete; when it "
                    f"can be read, {name_command()} continues",
                    alone=True,
                )
            time.sleep(wait)
    raise AssertionError("the last try returns or ends the program")
