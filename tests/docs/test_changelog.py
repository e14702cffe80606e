"""CHANGELOG.md: its newest version and its formats match the code."""

import re

from conftest import ROOT

from diffusion_training import __version__
from diffusion_training.draws import KEYS
from diffusion_training.latents.columns import FORMAT_VERSION, list_features

TEXT = (ROOT / "CHANGELOG.md").read_text()


def test_changelog_starts_with_the_package_version():
    assert re.search(r"^## \[(.+?)\]", TEXT, re.M)[1] == __version__


def test_changelog_lists_the_current_formats():
    rows = {
        row[0]: row
        for row in (line[2:-2].split(" | ") for line in TEXT.splitlines() if line.startswith("| "))
    }
    written, read = rows["latent cache"][2:4]
    assert written.split(",")[0] == read.split(",")[0] == str(FORMAT_VERSION)
    assert all(f"`{feature}`" in written for feature in list_features())
    for what in ("half-made cache", "checkpoint"):
        assert rows[what][2] == str(KEYS) and rows[what][3].split(";")[0] == str(KEYS)
