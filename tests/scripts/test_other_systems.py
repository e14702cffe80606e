"""Scripts run without what Windows lacks, and spawn their processes. None ran on Windows yet."""

import os
import subprocess
import sys

import pytest
from conftest import ROOT, metrics

RUN = [sys.executable, ROOT / "tests/without_linux.py"]
TRAINERS = {
    "train_unconditional.py": "--ddpm_num_inference_steps=2",
    "train_text_to_image.py": "--num_inference_steps=2",
    "train_flow.py": "--num_inference_steps=2",
}


def run(*command):
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    ended = subprocess.run([*map(str, [*RUN, *command])], env=env, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.long
@pytest.mark.parametrize("script", TRAINERS)
def test_trainers_run_and_resume_without_what_windows_lacks(tmp_path, script):
    flags = [f"--output_dir={tmp_path / 'out'}", "--dataloader_num_workers=1", TRAINERS[script]]
    for steps in (2, 3):
        run(script, *flags, "--checkpointing_steps=1", f"--max_train_steps={steps}")
        assert metrics(tmp_path / "out")[-1]["step"] == steps


@pytest.mark.long
def test_a_cache_is_made_without_what_windows_lacks(tmp_path):
    run("precompute_latents.py", f"--output_dir={tmp_path / 'cache'}", "--dataloader_num_workers=1")
    assert (tmp_path / "cache/cache.json").exists()
