"""tests/packages.py: a package is fetched once, checked and unpacked, or the test is skipped."""

import hashlib
import io
import re
import shutil
import subprocess
import zipfile

import packages
import pytest
from conftest import ROOT

NAMES = (
    "pypi|pythonhosted|pytorch|debian|ubuntu|fedoraproject|archlinux|anaconda|npmjs|golang|crates"
)
SERVER = re.compile(rf"\b({NAMES})[.](org|com|io)\b")
CPU_WHEELS = re.compile(r"(?<=--index-url https://)download[.]pytorch[.]org(?=/whl/cpu\n)")


def make_zip(files):
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        for name, value in files.items():
            archive.writestr(name, value)
    return data.getvalue()


def make_wheel(folder, monkeypatch):
    """A wheel that pip finds without an index, with a zip file in it."""
    about = {
        "METADATA": "Metadata-Version: 2.1\nName: nowhere-else\nVersion: 1.2\n",
        "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "RECORD": "",
    }
    files = {f"nowhere_else-1.2.dist-info/{name}": text for name, text in about.items()}
    path = folder / "nowhere_else-1.2-py3-none-any.whl"
    path.write_bytes(make_zip({"a/model.zip": make_zip({"b.txt": b"text"}), **files}))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return path, [*packages.PIP, "nowhere-else==1.2"], "a/model/b.txt"


def make_deb(folder, monkeypatch):
    """A Debian package, and an apt-get that finds it."""
    if shutil.which("dpkg-deb") is None:
        pytest.skip("needs dpkg-deb")
    for name in ("DEBIAN/control", "usr/a.txt"):
        (folder / "content" / name).parent.mkdir(parents=True)
    about = "Package: nowhere-else\nVersion: 1:1.2\nArchitecture: all\n"
    about += "Maintainer: A <a@b.c>\nDescription: a text\n"
    (folder / "content/DEBIAN/control").write_text(about)
    (folder / "content/usr/a.txt").write_text("text")
    path = folder / "nowhere-else_1%3a1.2_all.deb"
    command = ["dpkg-deb", "--build", "--root-owner-group", folder / "content", path]
    subprocess.run(command, check=True, capture_output=True)
    client = folder / "bin/apt-get"
    client.parent.mkdir()
    script = f'[ "$*" = "download --quiet nowhere-else=1:1.2" ] && cp "{path}" .'
    client.write_text(f"#!/bin/sh\n{script} || {{ echo not found >&2; exit 100; }}\n")
    client.chmod(0o755)
    monkeypatch.setenv("PATH", str(client.parent), prepend=":")
    return path, [*packages.APT, "nowhere-else=1:1.2"], "usr/a.txt"


@pytest.mark.parametrize("make", [make_wheel, make_deb])
def test_a_package_is_fetched_once_checked_and_unpacked(tmp_path, monkeypatch, make):
    path, command, content = make(tmp_path, monkeypatch)
    cache = tmp_path / "cache"
    monkeypatch.setattr(packages, "CACHE", cache)
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    monkeypatch.setattr(packages, "PACKAGES", {"package": (command, "0" * 64)})
    with pytest.raises(AssertionError, match=f"is another file: its SHA-256 is {sha256}"):
        packages.open_package("package")
    assert not [*cache.iterdir()]
    monkeypatch.setattr(packages, "PACKAGES", {"package": (command, sha256)})
    folder = packages.open_package("package")
    assert (folder / content).read_text() == "text"
    path.unlink()
    assert packages.open_package("package") == folder
    assert [*cache.iterdir()] == [folder]
    shutil.rmtree(folder)
    with pytest.raises(
        pytest.skip.Exception, match=f"^{re.escape(command[-1])} can't be fetched: "
    ):
        packages.open_package("package")
    monkeypatch.setattr(packages, "PACKAGES", {"package": (["no-client", "a=1"], sha256)})
    with pytest.raises(pytest.skip.Exception, match="a=1 can't be fetched: .*no-client"):
        packages.open_package("package")
    assert not [*cache.iterdir()]


def test_tests_and_workflows_name_no_package_server():
    paths = [path for folder in (".github", "tests") for path in (ROOT / folder).rglob("*.*")]
    texts = {path: path.read_text() for path in paths if path.suffix in (".py", ".yml", ".tsv")}
    assert len(texts) > 150
    for path, text in texts.items():
        found = SERVER.search(CPU_WHEELS.sub("", text))
        assert not found, f"{path} names {found[0]}"
