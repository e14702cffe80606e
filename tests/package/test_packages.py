"""tests/packages.py: packages are checked, unpacked once, and skipped without a network."""

import hashlib
import io
import json
import tarfile
import zipfile

import packages
import pytest


def make_zip(**files):
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        for name, value in files.items():
            archive.writestr(name, value)
    return data.getvalue()


def make_deb(content):
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w:xz") as archive:
        info = tarfile.TarInfo("usr/a.txt")
        info.size = len(content)
        archive.addfile(info, io.BytesIO(content))
    parts = b"!<arch>\n"
    for name, part in (("debian-binary", b"2.0"), ("data.tar.xz", data.getvalue())):
        parts += f"{name:<48}{len(part):<10}`\n".encode() + part + b"\n" * (len(part) % 2)
    return parts


@pytest.mark.parametrize(
    "name, data, path",
    [
        ("wheel", make_zip(**{"a/model.zip": make_zip(**{"b.txt": b"text"})}), "a/model/b.txt"),
        ("pool/a_1_all.deb", make_deb(b"text"), "usr/a.txt"),
    ],
)
def test_a_package_is_fetched_once_checked_and_unpacked(tmp_path, monkeypatch, name, data, path):
    short = name.removeprefix("pool/").partition("_")[0]
    sha256 = hashlib.sha256(data).hexdigest()
    index = json.dumps({"files": [{"url": "file", "hashes": {"sha256": sha256}}]})
    monkeypatch.setattr(packages, "CACHE", tmp_path / "cache")
    monkeypatch.setattr(packages, "PACKAGES", {name: sha256})

    def fail(url, accept=""):
        raise OSError("no network")

    monkeypatch.setattr(packages, "read", fail)
    with pytest.raises(pytest.skip.Exception, match="can't be fetched: no network"):
        packages.open_package(short)
    read = lambda url, accept="": index if "simple" in url else data + b"changed"
    monkeypatch.setattr(packages, "read", read)
    with pytest.raises(AssertionError, match="is another file"):
        packages.open_package(short)
    assert not (tmp_path / "cache").exists()
    monkeypatch.setattr(packages, "read", lambda url, accept="": index if "simple" in url else data)
    folder = packages.open_package(short)
    assert (folder / path).read_text() == "text"
    monkeypatch.setattr(packages, "read", fail)
    assert packages.open_package(short) == folder
    assert [*(tmp_path / "cache").iterdir()] == [folder]
