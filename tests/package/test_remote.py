"""Files on a disk or at an address: each is whole or not there. The address lies in memory: no server, no thread."""

import os

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from diffusion_training import remote as module


@pytest.fixture(params=["disk", "address"])
def folder(request, tmp_path):
    """An empty folder, and what lies in it: files() -> {name: bytes}."""
    url = str(tmp_path / "folder")
    (tmp_path / "folder").mkdir()
    if request.param == "address":
        MemoryFileSystem.store.clear()
        url = "memory://bucket/folder"

    def files():
        fs, root = module.fsspec.url_to_fs(url)
        fs.invalidate_cache()
        return {path.removeprefix(f"{root}/"): fs.cat_file(path) for path in fs.find(root)}

    return url, files


def test_what_is_an_address():
    assert module.is_address("s3://a/b") and module.is_address("file:///a") and not module.is_address("/a/s3:/b")


def test_files_are_written_read_listed_and_removed(folder, tmp_path):
    url, files = folder
    for name, data in {"b": b"2", "a": b"1", "x.part": b"3"}.items():
        with module.writing(f"{url}/{name}") as path:
            path.write_bytes(data)
            assert name not in files()  # until it is whole
    with module.writing(f"{url}/a") as path:
        path.write_bytes(b"another")
    assert files() == {"a": b"another", "b": b"2", "x.part": b"3"}
    assert module.list_files(url) == module.list_files(url + "/") == ["a", "b", "x.part"]
    with module.reading(f"{url}/x.part") as path:
        assert path.read_bytes() == b"3"
    with module.reading(f"{url}/gone") as path:
        assert not path.exists()
    module.remove(f"{url}/a"), module.remove(f"{url}/a")
    assert module.list_files(url) == ["b", "x.part"]
    assert module.list_files(f"{url}/none") == []


def test_what_could_not_be_written_leaves_what_was_there(folder):
    url, files = folder
    with module.writing(f"{url}/a") as path:
        path.write_bytes(b"before")
    for error in (OSError, KeyboardInterrupt):
        with pytest.raises(error), module.writing(f"{url}/a") as path:
            path.write_bytes(b"half")
            raise error
    with pytest.raises(OSError), module.writing(f"{url}/a"):
        pass  # nothing was written at all
    assert files() == {"a": b"before"}


def test_a_folder_is_named_as_files_in_it_are_written(folder, tmp_path, monkeypatch):
    url, files = folder
    fs, path, name = module.open_folder(url + "/")
    assert (
        name.replace(":///", "://") == url and (path == url) == (not module.is_address(url)) and not path.endswith("/")
    )
    if name == path:
        assert module.open_folder(f"file://{url}/")[1:] == (path, path)
        monkeypatch.chdir(tmp_path)
        assert module.open_folder("folder")[1:] == (path, path)
    with module.writing(f"{name}/text") as file:
        file.write_text("ä")
    assert files() == {"text": "ä".encode()} and fs.cat_file(f"{name}/text") == fs.cat_file(f"{path}/text")


def test_files_are_written_beside_their_place_and_synced(tmp_path, monkeypatch):
    """The folder for temporary files may lie on another disk."""
    monkeypatch.setattr(module.tempfile, "TemporaryDirectory", None)
    synced, fsync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (synced.append(file), fsync(file)))
    with module.writing(f"{tmp_path}/data") as path:
        assert path.parent == tmp_path
        path.write_bytes(b"1")
    assert (tmp_path / "data").read_bytes() == b"1" and len(synced) == 1


def test_an_address_of_no_kind_is_refused_at_once(monkeypatch):
    monkeypatch.setattr(module.time, "sleep", None)
    with pytest.raises(SystemExit, match="nowhere://x can't be read .*Protocol not known"):
        module.read_bytes("nowhere://x")
