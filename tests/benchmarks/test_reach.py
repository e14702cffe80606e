"""How many lines a demo runs: what a reader of the simplest run meets."""

import json
import subprocess
import sys

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

import reach

MOST = 2480  # lines of the package
FILES = 48


def test_lines_inside_functions_of_the_package_are_counted_once(tmp_path):
    """Also in threads; not those of imports, of the bodies of classes and of other packages."""
    package = tmp_path / "diffusion_training"
    package.mkdir()
    (package / "some.py").write_text(
        "import threading\n\nclass One:\n    count = 1\n\n"
        "    def add(self):\n        self.count += 1\n\n"
        "def run():\n    for _ in range(3):\n        One().add()\n"
        "    thread = threading.Thread(target=in_thread)\n    thread.start()\n    thread.join()\n\n"
        "def in_thread():\n    return [number\n        for number in (1, 2)]\n\n"
        "def never():\n    return 1\n"
    )
    sys.path.insert(0, str(package))
    try:
        counts = reach.count_lines(lambda: __import__("some").run(), tmp_path)
    finally:
        sys.path.remove(str(package))
        del sys.modules["some"]
    assert counts == {"diffusion_training/some.py": 8}


@pytest.mark.ci
def test_the_demo_of_images_runs_few_lines(tmp_path):
    command = [sys.executable, reach.__file__, *reach.UNCONDITIONAL]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout.splitlines()[-1])
    assert counts.pop("train_unconditional.py") > 200
    total = sum(counts.values())
    assert 0.9 * MOST < total < MOST and len(counts) <= FILES, (total, len(counts))
