"""One file of a script that has its own modules beside it."""

import subprocess
import sys

import pytest
from conftest import ROOT

from diffusion_training.standalone import make_standalone

SCRIPT = """'''A script.'''
import math
%s

if __name__ == "__main__":
    print(%s(math.tau))
"""


def test_what_lies_beside_the_script_comes_along_or_is_refused(tmp_path):
    # a module without a docstring
    (tmp_path / "my_losses.py").write_text("def half(x):\n    return x / 2\n")
    script = tmp_path / "script.py"
    for line, name in {
        "from my_losses import half": "half",
        "import my_losses": "my_losses.half",
        "import my_losses as mine": "mine.half",
    }.items():
        script.write_text(SCRIPT % (line, name))
        one = make_standalone(script)
        assert "import my_losses" not in one and "print(half(math.tau))" in one
    said = subprocess.run(
        [sys.executable, "-I", "-c", one], capture_output=True, text=True, check=True
    ).stdout
    assert said.startswith("3.14159")
    for line, name in {
        "from my_losses import half as mine": "mine",
        "import my_losses": "vars(my_losses)['half']",
    }.items():
        script.write_text(SCRIPT % (line, name))
        with pytest.raises(
            SystemExit, match="script.py imports .* as a module or under another name"
        ):
            make_standalone(script)
    script.write_text(SCRIPT % ("import my_losses\n\nhalf = 1", "my_losses.half"))
    with pytest.raises(SystemExit, match="script.py uses half of my_losses, and another half"):
        make_standalone(script)


def test_no_file_is_the_usage(tmp_path):
    command = [sys.executable, "-m", "diffusion_training.standalone", tmp_path / "none.py"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 1 and found.stderr.startswith("usage: ")
