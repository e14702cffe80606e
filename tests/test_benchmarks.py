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

import digits_quality
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
