"""The workflow and the hooks run existing files, with versions that passed CI."""

import re
import subprocess
import sys

from conftest import ROOT


def test_workflows_fit_their_schema_and_name_existing_files():
    schema = ["check_jsonschema", "--builtin-schema", "vendor.github-workflows"]
    paths = sorted(ROOT.glob(".github/workflows/*.yml"))
    done = subprocess.run(
        [sys.executable, "-m", *schema, *map(str, paths)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout
    assert [path.stem for path in paths] == ["release", "test"]
    assert "run: .ci/run" in paths[0].read_text()  # nothing is published that fails
    text = paths[1].read_text()
    assert "run: .ci/run" in text and (ROOT / ".ci/run").exists()
    for name in re.findall(r"-r (\S+)", text) + re.findall(r"pytest (tests\S+)", text):
        assert (ROOT / name).exists(), name
    named = re.search(r"Python (3\.\d+) or later", (ROOT / "README.md").read_text())[1]
    assert f'python-version: "{named}"' in text  # the oldest one in the README


def test_pre_commit_and_ci_use_the_same_ruff():
    (version,) = re.findall(r"rev: v(\S+)", (ROOT / ".pre-commit-config.yaml").read_text())
    assert f"ruff=={version}\n" in (ROOT / "constraints.txt").read_text()
