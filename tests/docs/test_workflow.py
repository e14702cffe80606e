"""The workflow and the hooks run existing files, with versions that passed CI; .ci/long."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
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
    assert "run: .ci/long" in text
    for name in re.findall(r"-r (\S+)", text) + re.findall(r"pytest (tests\S+)", text):
        assert (ROOT / name).exists(), name
    named = re.search(r"Python (3\.\d+) or later", (ROOT / "README.md").read_text())[1]
    assert f'python-version: "{named}"' in text  # the oldest one in the README


def test_pre_commit_and_ci_use_the_same_ruff():
    (version,) = re.findall(r"rev: v(\S+)", (ROOT / ".pre-commit-config.yaml").read_text())
    assert f"ruff=={version}\n" in (ROOT / "constraints.txt").read_text()


HEAD = """
import os, pathlib, time
import pytest

pytestmark = pytest.mark.long


@pytest.fixture(autouse=True)
def listed(request):
    with open("ran", "a") as file:
        print(request.node.name, file=file)
"""
LONG_TESTS = {
    "test_a.py": """
def test_passes(): pass
@pytest.mark.parametrize("x", ["a b", "c::d"])
def test_half(x): assert x == "a b"
def test_skipped(): pytest.skip("needs a moon")
@pytest.mark.by_hand
def test_by_hand(): assert 0
""",
    "test_b.py": """
def test_dies(): os._exit(3)
def test_hangs():
    pid = os.fork()
    if not pid:
        os.setpgid(0, 0)
        time.sleep(600)
    pathlib.Path("child").write_text(str(pid))
    time.sleep(600)
def test_last(): pass
""",
}


@pytest.fixture
def run_long(tmp_path, monkeypatch):
    """run_long(minutes, *flags, limit=seconds, status=1) runs .ci/long on LONG_TESTS.

    It returns the names of the tests that ran, in order, and {name: result} of tests/long.tsv.
    """
    monkeypatch.chdir(tmp_path)
    for folder in (".ci", "tests"):
        (tmp_path / folder).mkdir()
    for name, text in LONG_TESTS.items():
        Path("tests", name).write_text(HEAD + text)
    Path("pytest.ini").write_text(
        "[pytest]\naddopts = -m 'not long'\nmarkers =\n  long:\n  by_hand:"
    )
    git = ["git", "-c", "user.name=a", "-c", "user.email=a"]
    for command in (["init", "-q"], ["add", "tests"], ["commit", "-qm", "tests"]):
        subprocess.run([*git, *command], check=True)

    def run(minutes, *flags, limit=600, status=1):
        text = (ROOT / ".ci/long").read_text()
        assert "LIMIT = 30 * 60" in text
        Path(".ci/long").write_text(text.replace("LIMIT = 30 * 60", f"LIMIT = {limit}"))
        Path("ran").write_text("")
        command = [sys.executable, ".ci/long", str(minutes), *flags]
        with open("log", "w") as log:  # a pipe would wait for a process that is left
            done = subprocess.run(command, stdout=log, stderr=log)
        assert done.returncode == status, Path("log").read_text()
        lines = [line.split("\t") for line in Path("tests/long.tsv").read_text().splitlines()[1:]]
        return Path("ran").read_text().splitlines(), {
            line[0].partition("::")[2]: line[-1] for line in lines
        }

    return run


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def edit(path, *changes):
    text = Path(path).read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    Path(path).write_text(text)


@pytest.mark.ci
def test_long_tests_run_in_turn_and_their_results_are_kept(run_long):
    ran, results = run_long(5, limit=2)
    first = ["test_half[a b]", "test_half[c::d]", "test_passes", "test_skipped"]
    assert ran == [*first, "test_dies", "test_hangs", "test_last"]
    assert results == {
        "test_half[a b]": "passed",
        "test_half[c::d]": "failed",
        "test_passes": "passed",
        "test_skipped": "skipped: needs a moon",
        "test_dies": "did not end",
        "test_hangs": "did not end",
        "test_last": "passed",
    }
    assert not is_running(Path("child").read_text())

    # One without a line comes first, then those that did not pass, then the oldest date.
    edit("tests/test_a.py", ("test_passes", "test_new"))
    edit("tests/test_b.py", ("os._exit(3)", "pass"), ("time.sleep(600)\ndef", "pass\ndef"))
    lines = Path("tests/long.tsv").read_text().splitlines()
    (line,) = [line for line in lines if "test_skipped" in line]
    edit("tests/long.tsv", (line, line.replace(line.split("\t")[2], "2026-01-01 12:00:00")))
    ran, results = run_long(5)
    assert ran[:5] == ["test_new", "test_half[c::d]", "test_dies", "test_hangs", "test_skipped"]
    assert sorted(ran[5:]) == ["test_half[a b]", "test_last"]
    assert sorted(results) == sorted(ran)
    assert [name for name in ran if results[name] == "passed"] == [ran[0], *ran[2:4], *ran[5:]]

    # When the time is over, the running test is stopped, which is no failure.
    edit("tests/test_a.py", ('assert x == "a b"', 'time.sleep(600 * (x != "a b"))'))
    for minutes in (0.05, 0.2, 1):  # a busy machine may take longer to start pytest
        ran, results = run_long(minutes, status=0)
        if ran:
            break
    assert ran == ["test_half[c::d]"] and results["test_half[c::d]"] == "did not end"

    # A machine without the file begins where the commit's hash says.
    edit("tests/test_a.py", ("time.sleep(600", "time.sleep(0"))
    commit = subprocess.check_output(["git", "rev-parse", "--short", "HEAD"], text=True)
    order = ["test_new", "test_half[a b]", "test_half[c::d]", "test_skipped"]
    order += ["test_dies", "test_hangs", "test_last"]
    begin = int(commit, 16) % len(order)
    assert run_long(5, "--by_commit", status=0)[0] == order[begin:] + order[:begin]
