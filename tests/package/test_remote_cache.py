"""A cache at an address: its shards equal those on a disk, and its files come in order."""

import json

import pytest
from conftest import read_files
from fsspec.implementations.memory import MemoryFileSystem
from test_cache import encode_rows, make_args, make_cache, open_cache

from diffusion_training.cluster import remote_cache as module
from precompute_latents import write_each


@pytest.fixture(params=["disk", "address"])
def folder(request, tmp_path):
    """An empty folder, with a folder for unfinished files."""
    if request.param == "disk":
        (tmp_path / "folder/unfinished").mkdir(parents=True)
        return str(tmp_path / "folder")
    MemoryFileSystem.store.clear()
    return "memory://bucket/folder"


def objects(url):
    fs, root = module.fsspec.url_to_fs(url)
    return {path.removeprefix(f"{root}/"): fs.cat_file(path) for path in fs.find(root)}


def write_shard(path, encoded):
    return write_each(module.writing_shard_to, {0: str(path)}, range(7), encoded)[0]


def test_a_shard_has_the_same_bytes_on_a_disk_and_at_an_address(folder, tmp_path):
    (tmp_path / "one/unfinished").mkdir(parents=True)
    record = write_shard(tmp_path / "one/data.arrow", encode_rows(0, 7))
    assert write_shard(f"{folder}/data.arrow", encode_rows(0, 7)) == record
    assert objects(folder) == read_files(tmp_path / "one")


def test_a_shard_whose_encoding_fails_is_not_written_to_an_address(folder):
    def broken():
        yield from encode_rows(0, 2)
        raise RuntimeError("CUDA error: too hot")

    with pytest.raises(RuntimeError):
        write_shard(f"{folder}/data.arrow", broken())
    assert objects(folder) == {}


def test_a_cache_at_an_address_is_begun_once_and_uploaded_in_order(tmp_path, monkeypatch):
    MemoryFileSystem.store.clear()
    url = "memory://bucket/cache"
    (tmp_path / "copy").mkdir()
    assert not module.fetch_cache(url, tmp_path / "copy")  # there is none
    open_cache(make_args(tmp_path / "copy"))[1].release(force=True)
    module.begin_cache(tmp_path / "copy", url)
    assert set(objects(url)) == {"cache.json", "empty_prompt.npy", "run.args"}
    begun = objects(url)
    (tmp_path / "copy/cache.json").write_text("{}")
    with pytest.raises(
        SystemExit, match=f"{url} can't be written to, or another run has just begun there"
    ):
        module.begin_cache(tmp_path / "copy", url)
    assert objects(url) == begun

    # Files that another machine made later: shards stay at the address
    fs, root = module.fsspec.url_to_fs(url)
    make_cache(tmp_path / "whole")
    shard = (tmp_path / "whole/data-00000-of-00003.arrow").read_bytes()
    fs.pipe_file(f"{root}/data-0.arrow", shard)
    fs.pipe_file(f"{root}/unfinished/data-0.arrow.json", b"{}")
    (tmp_path / "again").mkdir()
    assert module.fetch_cache(url, tmp_path / "again")
    assert set(read_files(tmp_path / "again")) == {
        "cache.json",
        "empty_prompt.npy",
        "run.args",
        "unfinished/data-0.arrow.json",
    }

    sent, upload = [], module.upload
    monkeypatch.setattr(
        module, "upload", lambda source, path: sent.append(path) or upload(source, path)
    )
    module.upload_finished(tmp_path / "whole", url)
    assert sent[-1] == f"{url}/state.json" and len(sent) == 6
    small = {
        name: data
        for name, data in read_files(tmp_path / "whole").items()
        if not name.endswith(".arrow")
    }
    assert objects(url) == {**small, "data-0.arrow": shard}  # nothing unfinished

    fs.pipe_file("bucket/other/thesis.txt", b"mine")
    with pytest.raises(
        SystemExit, match="memory://bucket/other holds thesis.txt and no latent cache"
    ):
        module.fetch_cache("memory://bucket/other", tmp_path / "again")
    with pytest.raises(SystemExit, match="--output_dir nowhere://x can't be read"):
        module.fetch_cache("nowhere://x", tmp_path / "again")
    assert json.loads(objects(url)["cache.json"])["rows"] == 6
