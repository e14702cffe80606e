"""--shard: weights, averages and moments in parts, and everything else as without it.

Each test forks its processes once and trains several times in them.
"""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import (
    MODELS,
    assert_same_weights,
    finish,
    make_captioned,
    make_models,
    make_prx,
    metrics,
    reset,
    start,
    weights,
)
from PIL import Image

import precompute_latents
import train_flow
import train_text_to_image
from diffusion_training.training import sharding

pytestmark = pytest.mark.usefixtures("without_figures")
PARTS = {train_flow: "transformer", train_text_to_image: "unet"}


def make_flags(tmp_path, script):
    """6 clipped steps of 2 images, with a checkpoint, samples and a held-out loss at steps 3 and 6.

    3 samples and 3 held-out images are uneven shares of two processes.
    """
    make_captioned(tmp_path / "images", 9)
    models = make_models(tmp_path)
    flags = [
        f"--pretrained_model_name_or_path={models}",
        f"--latents_dir={tmp_path / 'cache'}",
        "--train_batch_size=1",
        "--total_batch_size=4",
        "--max_train_steps=6",
        "--learning_rate=1e-3",
        "--lr_warmup_steps=2",
        "--max_grad_norm=0.1",
        "--logging_steps=1",
        "--report_to=none",
        "--num_inference_steps=2",
        "--num_validation_images=1",
        "--holdout=3",
        "--validation_steps=3",
        "--checkpointing_steps=3",
        "--save_best",
        "--validation_prompts",
        "a digit one",
        "a digit two",
        "one",
    ]
    family = "sd"
    if script is train_flow:
        flags.append(f"--transformer_config_name_or_path={make_prx(tmp_path / 'config')}")
        family = "prx"
    reset()
    precompute_latents.main(
        precompute_latents.parse_args(
            [
                f"--train_data_dir={tmp_path / 'images'}",
                f"--pretrained_model_name_or_path={MODELS}",
                f"--model_family={family}",
                "--resolution=16",
                f"--output_dir={tmp_path / 'cache'}",
                "--dataloader_num_workers=0",
            ]
        )
    )
    return flags


def train(script, *argv):
    reset()
    script.main(script.parse_args([str(arg) for arg in argv]))


def fork(function, log, num_processes=2):
    pids = start(function, num_processes, log)
    assert set(finish(pids)) == {0}, log.read_text()


@pytest.mark.parametrize("script", [train_flow, train_text_to_image])
def test_try(tmp_path, script):
    flags = make_flags(tmp_path, script)
    for name, more in {"plain": [], "sharded": ["--shard"]}.items():
        fork(lambda: train(script, *flags, *more, f"--output_dir={tmp_path / name}"), tmp_path / name.upper())
        print((tmp_path / name.upper()).read_text())
    part = PARTS[script]
    for path in (f"checkpoint-6/{part}", f"checkpoint-6/{part}_ema", part):
        a, b = weights(tmp_path / "plain" / path), weights(tmp_path / "sharded" / path)
        print(path, max((a[n] - b[n]).abs().max().item() for n in a))
    print(metrics(tmp_path / "plain")[-1], metrics(tmp_path / "sharded")[-1])
    print(sorted(os.listdir(tmp_path / "sharded")), sorted(os.listdir(tmp_path / "sharded/best")))
