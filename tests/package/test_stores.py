"""A folder at an address or on a disk: its files are complete, and only one run writes to it."""

import os
from pathlib import Path

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from diffusion_training.training.copies import Address, Copies, TakenOverError


@pytest.fixture(params=["disk", "memory"])
def url(request, tmp_path):
    MemoryFileSystem.store.clear()
    return str(tmp_path / "a/store") if request.param == "disk" else "memory://bucket/store"


def test_store_writes_sends_lists_and_deletes_files(url, tmp_path, monkeypatch):
    store = Address(f"{url}/")
    assert store.list() == set()
    (tmp_path / "source").write_bytes(b"1" * 10**5)
    store.send(tmp_path / "source", "folder/deep/a")
    store.write("folder/b", b"2")
    store.write("b", b"3")
    store.write("b", b"4")
    assert store.list() == {"folder/deep/a", "folder/b", "b"}
    read = lambda name: store.fs.cat_file(f"{store.root}/{name}")
    assert read("folder/deep/a") == b"1" * 10**5 and read("b") == b"4"
    store.delete("folder")
    store.delete("folder")
    store.delete("b")
    store.delete("b")
    assert store.list() == set()
    if "memory" not in url:  # a kill leaves a temporary name, which readers ignore
        half = lambda source, target: Path(target).write_bytes(b"1") and os._exit(9)
        monkeypatch.setattr("shutil.copyfile", half)
        pid = os.fork()
        if pid == 0:
            store.send(tmp_path / "source", "folder/a")
        assert os.waitpid(pid, 0)[1] >> 8 == 9
        assert "folder/a" not in store.list()


def test_the_run_that_took_an_address_last_owns_it(url, tmp_path):
    assert Address(url).fs is not Address(url).fs  # which reads the credentials again
    first, second = Copies(url, tmp_path / "out", None), Copies(url, tmp_path / "out", None)
    for copies in (first, second):
        copies.open()
        copies.take(-1)
        copies.check()
    with pytest.raises(TakenOverError):
        first.check()


def test_an_unusable_address_stops_with_one_error_sentence(tmp_path):
    (tmp_path / "file").touch()
    for bad in (tmp_path / "file/folder", "nowhere://bucket/run"):
        with pytest.raises(SystemExit, match=f"--checkpoints_to {bad} can't be written to"):
            Copies(str(bad), tmp_path / "out", None).open()
