"""Files on a disk or at an address: each is complete or absent.

The address is in memory, so there is no server and no thread.
"""

import argparse
import asyncio
import json
import os
from types import SimpleNamespace

import fsspec
import pytest
from fsspec.asyn import AsyncFileSystem
from fsspec.implementations.memory import MemoryFileSystem

from diffusion_training import remote as module
from diffusion_training.latents.plan import check_not_cache, find_old_hashes
from diffusion_training.web.tables import list_tables


@pytest.fixture(params=["disk", "address"])
def folder(request, tmp_path):
    """An empty folder, and its contents: files() -> {name: bytes}."""
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


def test_is_address_recognizes_urls():
    assert (
        module.is_address("s3://a/b")
        and module.is_address("file:///a")
        and not module.is_address("/a/s3:/b")
    )


def test_remote_files_are_written_read_listed_and_removed(folder, tmp_path):
    url, files = folder
    for name, data in {"b": b"2", "a": b"1", "x.part": b"3"}.items():
        with module.writing(f"{url}/{name}") as path:
            path.write_bytes(data)
            assert name not in files()  # until it is complete
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


def test_a_failed_write_leaves_the_earlier_file(folder):
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


class SilentStore(AsyncFileSystem):
    """A store that never says that it is ready for a file."""

    async def _put_file(self, source, path):
        await asyncio.sleep(60)


def test_sending_to_a_store_that_does_not_answer_has_an_end(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "PATIENCE", 0.1)
    (tmp_path / "file").write_bytes(bytes(2**14))
    with pytest.raises(TimeoutError, match="bucket/file was not received within 0 s"):
        module.send(tmp_path / "file", SilentStore(), "bucket/file")
    monkeypatch.setattr(fsspec, "url_to_fs", lambda path: (SilentStore(), path))
    with pytest.raises(TimeoutError):
        module.upload(tmp_path / "file", "bucket/file")


def test_braces_name_ranges_and_lists():
    """A range includes its last number, and keeps the zeros."""
    assert module.expand("a{08..10}.tar") == ["a08.tar", "a09.tar", "a10.tar"]
    assert module.expand("{a,b}/{1..2}") == ["a/1", "a/2", "b/1", "b/2"]
    assert module.expand("{a}") == ["{a}"]


def test_open_folder_returns_a_path_that_its_files_share(folder, tmp_path, monkeypatch):
    url, files = folder
    fs, path, name = module.open_folder(url + "/")
    assert (
        name.replace(":///", "://") == url
        and (path == url) == (not module.is_address(url))
        and not path.endswith("/")
    )
    if name == path:
        assert module.open_folder(f"file://{url}/")[1:] == (path, path)
        monkeypatch.chdir(tmp_path)
        assert module.open_folder("folder")[1:] == (path, path)
    with module.writing(f"{name}/text") as file:
        file.write_text("ä")
    assert files() == {"text": "ä".encode()} and fs.cat_file(f"{name}/text") == fs.cat_file(
        f"{path}/text"
    )


def test_writing_uses_a_temporary_file_in_the_same_folder_and_syncs_it(tmp_path, monkeypatch):
    """The folder for temporary files may lie on another disk."""
    monkeypatch.setattr(module.tempfile, "TemporaryDirectory", None)
    synced, fsync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda file: (synced.append(file), fsync(file)))
    with module.writing(f"{tmp_path}/data") as path:
        assert path.parent == tmp_path
        path.write_bytes(b"1")
    assert (tmp_path / "data").read_bytes() == b"1" and len(synced) == 1


@pytest.fixture
def persist(monkeypatch):
    """persist(error, times, *permanent) does an action that fails `times` times with `error`.

    persist.tried keeps the file system of each try, persist.slept the seconds between tries.
    """
    persist = lambda error, times, *permanent: module.persist(
        "memory://bucket/x", action(error, times), permanent
    )
    persist.tried, persist.slept = [], []
    monkeypatch.setattr(module.time, "sleep", persist.slept.append)

    def action(error, times):
        persist.tried.clear(), persist.slept.clear()

        def act(fs, path):
            persist.tried.append(fs)
            if len(persist.tried) <= times:
                raise error
            return path

        return act

    return persist


def test_persist_retries_failed_reads_for_a_minute(persist):
    assert persist(OSError("reset by peer"), 0) == "/bucket/x" and persist.slept == []
    known = persist.tried[0]
    assert persist(OSError("reset by peer"), 7) == "/bucket/x" and persist.slept == [
        0.5,
        1,
        2,
        4,
        8,
        16,
        32,
    ]
    # each further try opens a new file system, which reads the credentials again
    assert persist.tried[0] is known and len({*map(id, persist.tried)}) == 8
    with pytest.raises(
        SystemExit, match=r"memory://bucket/x can't be read \(reset by peer\): saved files"
    ) as stop:
        persist(OSError("reset by peer"), 8)
    assert stop.value.alone and len(persist.tried) == 8
    assert persist(FileNotFoundError(), 2) == persist(PermissionError(), 2) == "/bucket/x"


@pytest.mark.parametrize(
    "error", [ImportError("no s3fs"), ModuleNotFoundError("no s3fs"), PermissionError("denied")]
)
def test_persist_does_not_retry_permanent_errors(persist, error):
    with pytest.raises(SystemExit, match="can't be read .no s3fs|can't be read .denied"):
        persist(error, 1, "FileNotFoundError", "PermissionError")
    assert persist.slept == []


def test_read_bytes_raises_at_once_for_missing_files(folder, monkeypatch):
    url, _ = folder
    monkeypatch.setattr(module.time, "sleep", None)
    with module.writing(f"{url}/a") as path:
        path.write_bytes(b"1")
    assert module.read_bytes(f"{url}/a") == b"1"
    with pytest.raises(FileNotFoundError, match=f"{url}/gone"):
        module.read_bytes(f"{url}/gone")
    for error in ("PermissionError", "NoCredentialsError") if module.is_address(url) else ():

        def refuse(self, path, error=error):
            raise type(error, (OSError,), {})("not yours")

        monkeypatch.setattr(MemoryFileSystem, "cat_file", refuse)
        with pytest.raises(SystemExit, match="can't be read .not yours"):
            module.read_bytes(f"{url}/a")


def test_an_address_with_an_unknown_protocol_is_refused_at_once(monkeypatch):
    monkeypatch.setattr(module.time, "sleep", None)
    with pytest.raises(SystemExit, match="nowhere://x can't be read .*Protocol not known"):
        module.read_bytes("nowhere://x")


def test_what_can_not_be_looked_up_is_not_taken_for_missing(folder, monkeypatch):
    """fsspec's `exists` says no. A cache or a download there would then be overwritten."""
    fs, root, _ = module.open_folder(folder[0])
    fs.pipe_file(f"{root}/cache.json", b"{}")
    assert module.has_file(fs, f"{root}/cache.json") and not module.has_file(fs, f"{root}/a.json")
    csv = f"{root}/urls.csv"
    fs.pipe_file(csv, b"url")
    args = argparse.Namespace(input=folder[0], dataset_name=None, output_dir=f"{root}-out")
    assert csv in list_tables(args)[1]
    forbidden = PermissionError("Forbidden")

    def refuse(self, path, **options):
        raise forbidden

    for name in ("info", "isfile", "isdir"):  # the others take any error for a no
        monkeypatch.setattr(type(fs), name, refuse if name == "info" else lambda *args: False)
    with pytest.raises(PermissionError):
        module.has_file(fs, csv)
    for check, said in {
        lambda: list_tables(args): f"--input {folder[0]} can't be read: Forbidden",
        lambda: check_not_cache(folder[0]): "can't be read (Forbidden)",
    }.items():
        with pytest.raises(SystemExit) as stop:
            check()
        assert said in str(stop.value)


def test_caches_of_older_versions_are_found_by_their_hashes(folder):
    url, _ = folder
    fs, root = module.fsspec.url_to_fs(url)

    def find(resolution=16):
        return find_old_hashes(SimpleNamespace(output_dir=f"{url}/", resolution=resolution))

    def write(name, digest):
        fs.pipe(f"{root}/{name}", json.dumps({"vae": {"sha256": digest}}).encode())

    assert not find() and not find(None)
    for place in ("", "32/"):
        fs.makedirs(f"{root}/{place}", exist_ok=True)
        write(f"{place}cache.json", "0" * 64)
        assert find([16, 32]) and find() == (place == "")
        write(f"{place}cache.json", f"narrow:{'0' * 64}")
        assert not find([16, 32])
    fs.pipe(f"{root}/cache.json", b"[1]")  # damaged, which `open_cache` reports
    assert not find([16, 32])
    write("32/cache.json", "0" * 64)
    assert find([16, 32])
