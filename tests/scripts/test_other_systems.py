"""Scripts run without what Windows lacks, and spawn their processes. None ran on Windows yet."""

import os
import subprocess
import sys

import pytest
from conftest import ROOT, metrics

RUN = [sys.executable, ROOT / "tests/without_linux.py"]
TRAINERS = {
    "train_unconditional.py": ["--ddpm_num_inference_steps=2", "--dataloader_num_workers=1"],
    "train_text_to_image.py": ["--rank=4", "--num_inference_steps=2", "--dataloader_num_workers=1"],
    "train_flow.py": ["--num_inference_steps=2"],  # of a cache, so without loader processes
}


def run(folder, script, *flags):
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [*map(str, [*RUN, ROOT / script, *flags])]
    ended = subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.long
@pytest.mark.parametrize("script", TRAINERS)
def test_trainers_run_and_resume_without_what_windows_lacks(tmp_path, script):
    if script == "train_flow.py":
        run(tmp_path, "precompute_latents.py", "--model_family=prx")  # the demo's cache
    flags = ["--output_dir=out", "--checkpointing_steps=1", *TRAINERS[script]]
    for steps in (2, 3):
        run(tmp_path, script, *flags, f"--max_train_steps={steps}")
        assert metrics(tmp_path / "out")[-1]["step"] == steps


@pytest.mark.long
def test_a_cache_is_made_without_what_windows_lacks(tmp_path):
    run(tmp_path, "precompute_latents.py", "--output_dir=cache", "--dataloader_num_workers=1")
    assert (tmp_path / "cache/cache.json").exists()
