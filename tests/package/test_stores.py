"""A folder at an address or on a disk: its files are whole, and its lock is held by one run."""

import os
from pathlib import Path

import pytest
from conftest import patch
from fsspec.implementations.memory import MemoryFileSystem

from diffusion_training.stores import LOCK, LostLockError, Store, StoreLock, try_store


@pytest.fixture(params=["disk", "memory"])
def url(request, tmp_path, monkeypatch):
    patch(monkeypatch, "LOCK_BEAT", 0.02)
    MemoryFileSystem.store.clear()
    return str(tmp_path / "a/store") if request.param == "disk" else "memory://bucket/store"


def test_files_are_written_sent_read_listed_and_deleted(url, tmp_path, monkeypatch):
    store = Store(f"{url}/")
    assert store.list() == set() and store.read("b") is None
    (tmp_path / "source").write_bytes(b"1" * 10**5)
    store.send(tmp_path / "source", "folder/deep/a")
    store.write("folder/b", b"2")
    store.write("b", b"3")
    store.write("b", b"4")
    assert store.list() == {"folder/deep/a", "folder/b", "b"}
    assert store.read("folder/deep/a") == b"1" * 10**5 and store.read("b") == b"4"
    store.delete_folder("folder")
    store.delete_folder("folder")
    store.delete("b")
    store.delete("b")
    assert store.list() == set()
    if store.is_local:  # a kill leaves a name that no reader takes for the file's
        half = lambda source, target: Path(target).write_bytes(b"1") and os._exit(9)
        monkeypatch.setattr("shutil.copyfile", half)
        pid = os.fork()
        if pid == 0:
            store.send(tmp_path / "source", "folder/a")
        assert os.waitpid(pid, 0)[1] >> 8 == 9
        assert "folder/a" not in store.list()


def test_a_lock_is_held_by_one_until_it_is_released_or_its_holder_dies(url):
    first, second, third = (StoreLock(url) for _ in range(3))
    first.acquire(0)
    with pytest.raises(SystemExit, match="another run, on .*, writes to .*: end it, or wait"):
        second.acquire(0)
    first.check(Store(url))
    first.release()
    assert Store(url).list() == set()
    second.acquire(0)
    second.ended.set()
    second.thread.join()
    Store(url).write(LOCK, second.text(3))  # as a kill leaves it
    third.acquire(0)
    with pytest.raises(LostLockError):
        second.check(Store(url))
    second.release()
    third.check(Store(url))  # it releases its own lock alone
    third.release()


def test_one_that_is_waited_for_passes_the_lock_on(url, monkeypatch):
    first, second = StoreLock(url), StoreLock(url)
    first.acquire(0)
    read, answers = Store.read, []

    def end_soon(store, name):
        answers.append(read(store, name))
        if len(answers) == 5:
            first.release()
        return answers[-1]

    patch(monkeypatch, "SILENT_BEATS", 100)
    monkeypatch.setattr(Store, "read", end_soon)
    second.acquire(100)
    monkeypatch.undo()
    second.release()


def test_a_store_that_cannot_be_used_is_one_sentence(tmp_path):
    (tmp_path / "file").touch()
    for bad in (tmp_path / "file/folder", "nowhere://bucket/run"):
        with pytest.raises(SystemExit, match=f"--checkpoints_to {bad} can't be written to"):
            try_store(str(bad), "--checkpoints_to")
