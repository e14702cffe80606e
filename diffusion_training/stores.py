"""A folder at an address or on a disk: whole files, and a lock that survives its holder's death."""

import contextlib
import shutil
import socket
import threading
import time
import uuid
from pathlib import Path

import fsspec
from fsspec.implementations.local import LocalFileSystem

from diffusion_training.errors import explained, fail
from diffusion_training.files import write_file
from diffusion_training.remote import writing

LOCK = "checkpoints_to.lock"
LOCK_BEAT = 5.0  # seconds
SILENT_BEATS = 4  # after so many the holder of a lock is taken for dead


class Store:
    """A folder at an address of fsspec, or on a disk. Each file appears whole or not at all.

    A new Store makes new connections and reads the credentials again, since these may expire.
    """

    def __init__(self, url: str) -> None:
        self.fs, root = fsspec.url_to_fs(url, skip_instance_cache=True)
        self.root = root.rstrip("/")
        self.is_local = isinstance(self.fs, LocalFileSystem)

    def path(self, name: str) -> str:
        return f"{self.root}/{name}"

    def list(self) -> set[str]:
        """The names of all files, also of those in subfolders."""
        self.fs.invalidate_cache()
        names = {path[len(self.root) + 1 :] for path in self.fs.find(self.root)}
        return names - {""}  # some stores have an empty file in the place of the folder itself

    def read(self, name: str) -> bytes | None:
        """The content of a small file; None if it does not exist."""
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
        """Delete a folder with all that is in it, if it exists."""
        self.fs.invalidate_cache()
        with contextlib.suppress(FileNotFoundError):
            self.fs.rm(self.path(name), recursive=True)


class LostLockError(Exception):
    """Another run has taken the lock, because it heard nothing of this one."""


class StoreLock:
    """A lock in a store: a file that its holder writes anew with each beat.

    Its holder is taken for dead if the file has not changed for SILENT_BEATS. The one that waits
    counts them, because the clocks of two machines differ.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.key = uuid.uuid4().hex
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self.beat, daemon=True)

    def text(self, number: int) -> bytes:
        return f"{self.key} {number} {socket.gethostname()}".encode()

    def acquire(self, patience: float) -> None:
        """Wait for a holder that still writes, `patience` seconds at most, and take the lock.

        For example, a spot machine may still copy its last checkpoint when the next one starts.
        """
        store = Store(self.url)
        begin = time.monotonic()
        silent = 0
        found = store.read(LOCK)
        if found:
            host = found.decode().split(" ")[-1]
            wait = SILENT_BEATS * LOCK_BEAT
            print(f"{host} has written to {self.url}: waiting {wait:g} s to see if it still does")
        while found and silent < SILENT_BEATS:
            time.sleep(LOCK_BEAT)
            latest = store.read(LOCK)
            silent = silent + 1 if latest == found else 0
            found = latest
            if silent == 0 and found and time.monotonic() - begin > patience:
                fail(f"another run, on {host}, writes to {self.url}: end it, or wait for it")
        store.write(LOCK, self.text(0))
        if store.read(LOCK) != self.text(0):
            fail(f"another run has just begun to write to {self.url}: choose another address")
        self.thread.start()

    def check(self, store: Store) -> None:
        """Raise LostLockError if this run does not hold the lock any more."""
        content = store.read(LOCK) or b""
        if not content.startswith(self.key.encode()):
            raise LostLockError

    def beat(self) -> None:
        number = 0
        store = None
        while not self.ended.wait(LOCK_BEAT):
            try:
                store = store or Store(self.url)
                self.check(store)
                number += 1
                store.write(LOCK, self.text(number))
            except LostLockError:
                return
            except Exception:  # the store can't be reached: try again with a new connection
                store = None
        with contextlib.suppress(Exception):
            store = store or Store(self.url)
            self.check(store)
            store.delete(LOCK)

    def release(self) -> None:
        self.ended.set()
        if self.thread.is_alive():
            self.thread.join(2 * LOCK_BEAT)  # the store may not answer


def try_store(url: str, flag: str) -> None:
    """Stop with an error if a store can't be read and written to, or does not exist."""
    with explained(f"{flag} {url} can't be written to"):
        store = Store(url)
        name = f".tmp-{uuid.uuid4().hex[:12]}"
        store.write(name, b"")
        store.list()
        store.delete(name)
