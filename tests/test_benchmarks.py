"""The benchmarks run; what they measure is not judged here."""

import functools
import io
import sys

import numpy as np
import pytest
from conftest import ROOT
from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel
from PIL import Image

sys.path.insert(0, str(ROOT / "benchmarks"))

import batch_sizes
import digits_quality
import plan
import transform_speed


def test_transform_speed():
    buffer = io.BytesIO()
    Image.fromarray(np.zeros((80, 120, 3), np.uint8)).save(buffer, "JPEG")
    theirs, ours = transform_speed.compare([buffer.getvalue()], 32, seconds=0.01, rounds=2)
    assert theirs > 0 and ours > 0


def test_digits_quality(tmp_path, monkeypatch, capsys):
    unet = UNet2DModel(
        sample_size=8, in_channels=1, out_channels=1, layers_per_block=1, block_out_channels=(8, 8), norm_num_groups=4,
        down_block_types=("DownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    DDPMPipeline(unet, DDPMScheduler()).save_pretrained(tmp_path)
    monkeypatch.setattr(sys, "argv", ["digits_quality.py", str(tmp_path), "--num_inference_steps=1"])
    train_classifier = digits_quality.train_classifier
    monkeypatch.setattr(digits_quality, "train_classifier", functools.partial(train_classifier, steps=2))
    with pytest.raises(SystemExit) as stop:
        digits_quality.main()
    assert stop.value.code == 1 and "of 200, of each digit [" in capsys.readouterr().out


def test_plan(capsys):
    args = plan.parse_args(["--simulate=100000", "--resolution=512", "--batch_size=16", "--embedding=59136"])
    plan.main(args)
    said = capsys.readouterr().out
    assert "in 10 h; this is 10.0 h" in said  # the guide's own figure comes out again
    assert "100,000 rows: cut into" in said and "100 records of" in said and "1,024 encoders" in said
    figures = plan.plan(10**6, args)
    # moments of 8 x 64 x 64 and embeddings of 77 x 768, two bytes each: 180 KiB, as the README says
    assert figures["cache, TB"] * 1e12 / 10**6 == (64 + 115.5) * 1024 and figures["shards"] == 489
    assert figures["parts"] == 10**6 / 2048 * 26
    assert figures["encode, hours"] == pytest.approx(10**6 / min(64 * 150, 75 * 80) / 3600)
    assert plan.simulate_parts(2048, args)[1] == 26 and plan.simulate_assignment(1024, 1024, spread=0)[1] == 1


def test_batch_sizes(tmp_path, capsys):
    UNet2DModel(
        sample_size=8, in_channels=1, out_channels=1, layers_per_block=1, block_out_channels=(8, 8), norm_num_groups=4,
        down_block_types=("DownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "UpBlock2D"),
    ).save_config(tmp_path)  # fmt: skip
    batch_sizes.main([f"--config={tmp_path}", "--resolutions=8", "--precisions=bf16", "--most=3", "--steps=1"])
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| 8")]
    assert [row[1:4] for row in rows] == [["bf16", "no", "3"], ["bf16", "yes", "3"]]
    assert all(float(row[4]) > 0 for row in rows)
