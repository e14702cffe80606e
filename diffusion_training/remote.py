"""Files on a disk or at an address (s3://, gs://): each is whole or not there."""

import contextlib
import tempfile
from pathlib import Path

import fsspec
from fsspec.implementations.local import LocalFileSystem

from diffusion_training.files import name_unfinished, write_out


def is_address(path):
    """Whether a path is one of fsspec's, such as s3://bucket/latents, and not on a disk."""
    return "://" in str(path)


def remove(path):
    """Delete a file, if it is there."""
    fs, path = fsspec.url_to_fs(str(path))
    with contextlib.suppress(FileNotFoundError):
        fs.rm_file(path)


def list_files(folder):
    """Names of all files in a folder, also in folders in it."""
    fs, root = fsspec.url_to_fs(str(folder).rstrip("/"))
    fs.invalidate_cache()
    return sorted(path[len(root) + 1 :] for path in fs.find(root))


def upload(source, path):
    """Send a file of this disk to an address, in one piece."""
    fs, path = fsspec.url_to_fs(path)
    fs.put_file(str(source), path)


@contextlib.contextmanager
def writing(path):
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
def reading(path):
    """The file `path` on this disk: itself, or a copy if it is at an address. There is none if there is none there."""
    with tempfile.TemporaryDirectory() if is_address(path) else contextlib.nullcontext() as work:
        if work:
            fs, there = fsspec.url_to_fs(path)
            path = f"{work}/{path.rsplit('/', 1)[1]}"
            with contextlib.suppress(FileNotFoundError):
                fs.get_file(there, path)
        yield Path(path)


def open_folder(url):
    """(fsspec file system, path in it, folder as `writing` takes it: that path on a disk, else the address)."""
    fs, path = fsspec.url_to_fs(str(url))
    path = path.rstrip("/")
    return fs, path, path if isinstance(fs, LocalFileSystem) else fs.unstrip_protocol(path)
