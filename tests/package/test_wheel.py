"""The wheel has the scripts and what their demos open; they run in an empty folder."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile

import pytest
from conftest import ROOT
from test_package import PACKAGE, SCRIPTS

import diffusion_training

TABLES = ("accelerate_configs", "configs", "demo", "docs", "minimal", "recipes")


def run(*words, cwd, site=None):
    """Run a command; `site`: a folder with an installed wheel, in place of the repository."""
    env = os.environ | {"PYTHONPATH": str(site or ROOT)}
    return subprocess.run(
        [sys.executable, *words], cwd=cwd, env=env, capture_output=True, text=True, timeout=600
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """A folder with the unpacked wheel, made of a copy of the repository."""
    folder = tmp_path_factory.mktemp("wheel")
    ignored = shutil.ignore_patterns(".*", "__pycache__", "tests")
    shutil.copytree(ROOT, folder / "source", ignore=ignored)
    shutil.copytree(ROOT / ".ci", folder / "source/.ci", ignore=shutil.ignore_patterns("venv"))
    assert run(".ci/address", "https://git.example/us/it/", cwd=folder / "source").returncode == 0
    build = "from setuptools import build_meta; build_meta.build_wheel('..')"
    done = run("-c", build, cwd=folder / "source")
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def test_pyproject_names_every_folder_of_the_package():
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {path.parent.relative_to(ROOT) for path in PACKAGE.rglob("*.py")}
    named = {".".join(folder.parts) for folder in folders}
    assert {*tools["packages"]} == named | {"diffusion_training.scripts"}


def test_the_wheel_has_the_scripts_and_what_they_open(site):
    scripts = site / "diffusion_training/scripts"
    assert {path.stem for path in scripts.glob("*.py")} == {*SCRIPTS}
    for path in (path for name in TABLES for path in (ROOT / name).rglob("*.*")):
        if path.is_file() and "__pycache__" not in path.parts:
            assert (scripts / path.relative_to(ROOT)).read_bytes() == path.read_bytes()


def test_the_module_runs_a_script_by_its_name(site, tmp_path):
    for known in (None, site):
        done = run("-m", "diffusion_training", cwd=tmp_path, site=known)
        assert done.returncode == 1 and "one of caption_images, download" in done.stderr
        done = run("-m", "diffusion_training", "train_flow", "--help", cwd=tmp_path, site=known)
        assert done.returncode == 0 and "usage: train_flow.py" in done.stdout
    # recipes and pages stand beside the scripts
    words = ["train_text_to_image.py", "@recipes/sdxl_lora.args", "--debug_loss"]
    done = run("-m", "diffusion_training", *words, cwd=tmp_path, site=site)
    (page,) = re.findall(r"there is no flag --debug_loss: (\S+) says: gone: ", done.stderr)
    assert (
        done.returncode == 2 and page == f"{site}/diffusion_training/scripts/docs/from-diffusers.md"
    )


def test_pypi_gets_addresses_of_pages_and_pictures(site):
    (about,) = site.glob("*.dist-info/METADATA")
    text = about.read_text()
    release = f"https://git.example/us/it/raw/v{diffusion_training.__version__}"
    assert f"]({release}/docs/duck.png)" in text
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert len(links) > 60 and all(re.match("https://|#", link) for link in links)
    assert "Project-URL: Repository, https://git.example/us/it\n" in text
    for link in (link.replace("/raw/", "/blob/") for link in links):
        if path := link.partition(release.replace("/raw/", "/blob/"))[2]:
            assert (ROOT / path.strip("/").partition("#")[0]).exists(), path


def test_the_project_has_one_name():
    name = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["name"]
    assert (ROOT / "README.md").read_text().startswith(f"# {name.capitalize()}\n")
    assert f'title: "{name.capitalize()}: ' in (ROOT / "CITATION.cff").read_text()


UNCONDITIONAL = ["train_unconditional", "--max_train_steps=2", "--ddpm_num_inference_steps=1"]


@pytest.mark.ci
def test_a_demo_of_the_wheel_runs_in_an_empty_folder(site, tmp_path):
    done = run("-m", "diffusion_training", *UNCONDITIONAL, cwd=tmp_path, site=site)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]


@pytest.mark.long
def test_demos_of_the_wheel_run_in_an_empty_folder(site, tmp_path):
    short = ["--max_train_steps=2", "--num_inference_steps=1"]
    for words in (
        ["precompute_latents"],
        ["train_text_to_image", *short],
        ["train_text_to_image", "--rank=2", *short],
        ["precompute_latents", "--model_family=prx"],
        ["train_flow", *short],
        ["precompute_latents_ray", "--output_dir=latents-on-ray"],
        ["download_images"],
        ["train_on_ray", "--max_workers=1", "--cpu", "train_unconditional.py", *UNCONDITIONAL[1:]],
    ):
        done = run("-m", "diffusion_training", *words, cwd=tmp_path, site=site)
        assert done.returncode == 0, (words, done.stdout[-2000:], done.stderr[-3000:])
    launcher = ["-m", "accelerate.commands.launch", "-m", "diffusion_training"]
    done = run(*launcher, "train_flow", "--max_train_steps=3", cwd=tmp_path, site=site)
    assert done.returncode == 0, done.stderr
