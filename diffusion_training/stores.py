"""Write complete files to a folder at an address or on a disk, which one run at a time owns."""

import contextlib
import shutil
import uuid
from pathlib import Path

import fsspec
from fsspec.implementations.local import LocalFileSystem

from diffusion_training.errors import explained
from diffusion_training.files import write_file
from diffusion_training.remote import writing

OWNER = "checkpoints_to.owner"


class Store:
    """A folder at an fsspec address or on a disk. Each file appears complete or not at all.

    A new Store makes new connections and reads the credentials again, since these may expire.
    """

    def __init__(self, url: str) -> None:
        self.fs, root = fsspec.url_to_fs(url, skip_instance_cache=True)
        self.root = root.rstrip("/")
        self.is_local = isinstance(self.fs, LocalFileSystem)

    def path(self, name: str) -> str:
        return f"{self.root}/{name}"

    def list(self) -> set[str]:
        """Return the names of all files, also of those in subfolders."""
        self.fs.invalidate_cache()
        names = {path[len(self.root) + 1 :] for path in self.fs.find(self.root)}
        return names - {""}  # some stores have an empty file for the folder itself

    def read(self, name: str) -> bytes | None:
        """Return the content of a small file; None if it does not exist."""
        try:
            return self.fs.cat_file(self.path(name))
        except FileNotFoundError:
            return None

    def write(self, name: str, content: bytes) -> None:
        if self.is_local:
            Path(self.path(name)).parent.mkdir(parents=True, exist_ok=True)
            write_file(Path(self.path(name)), content)
        else:
            self.fs.pipe_file(self.path(name), content)

    def send(self, source: Path, name: str) -> None:
        """Copy a file of this disk into the store."""
        if self.is_local:
            Path(self.path(name)).parent.mkdir(parents=True, exist_ok=True)
            with writing(self.path(name)) as unfinished:
                shutil.copyfile(source, unfinished)
        else:
            self.fs.put_file(str(source), self.path(name))

    def delete(self, name: str) -> None:
        """Delete a file, if it exists."""
        with contextlib.suppress(FileNotFoundError):
            self.fs.rm_file(self.path(name))

    def delete_folder(self, name: str) -> None:
        """Delete a folder and its content, if it exists."""
        self.fs.invalidate_cache()
        with contextlib.suppress(FileNotFoundError):
            self.fs.rm(self.path(name), recursive=True)


class TakenOverError(Exception):
    """Another run has begun to write to the store."""


class Owner:
    """The run that writes to a store: the last one that took it. Other runs then stop copying.

    For example, a machine that seemed dead may still copy when its successor has begun.
    """

    def __init__(self) -> None:
        self.key = uuid.uuid4().hex.encode()

    def take(self, store: Store) -> None:
        store.write(OWNER, self.key)

    def check(self, store: Store) -> None:
        """Raise TakenOverError if another run has taken the store.

        If the file was deleted, for example with the whole folder or by a bucket's rule for old
        objects, take the store again. What was being copied may be gone too, so this is an error.
        """
        key = store.read(OWNER)
        if key is None:
            self.take(store)
            raise FileNotFoundError(f"{OWNER} was deleted there")
        if key != self.key:
            raise TakenOverError


def try_store(url: str, flag: str) -> None:
    """Stop with an error if a store does not exist, or can't be read or written to."""
    with explained(f"{flag} {url} can't be written to"):
        store = Store(url)
        name = f".tmp-{uuid.uuid4().hex[:12]}"
        store.write(name, b"")
        store.list()
        store.delete(name)
