"""The benchmarks run; what they measure is not judged here."""

import argparse
import functools
import io
import sys

import numpy as np
import pytest
from conftest import ROOT, reset
from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel
from PIL import Image

import train_text_to_image

sys.path.insert(0, str(ROOT / "benchmarks"))

import batch_sizes
import bench
import cached_vs_online
import digits_quality
import gpu
import growth
import peers
import plan
import step_overhead
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


TOY = ["--size=toy", "--steps=6", "--rounds=1"]


def test_step_overhead(tmp_path):
    """What a step is taken apart into, and that a bare loop takes the trainers' steps."""
    cli = bench.make_parser("").parse_args(TOY)
    cli.resolution = 64
    for name, argv in step_overhead.make_flags(tmp_path, cli).items():
        reset()
        parts = step_overhead.take_apart(name, [*argv, f"--output_dir={tmp_path / name}"])
        assert sum(parts.values()) == pytest.approx(1) and all(part >= 0 for part in parts.values())
        assert parts["backward pass"] > 0.05 and parts["noise, forward pass and loss"] > 0.05
    measured = bench.run(step_overhead.__file__, [name, *argv], steps=6)
    assert 0 < measured["step"] < measured["first"] and measured["rss"] > 100


def test_a_synthetic_cache_is_one_that_trains(tmp_path):
    """It passes every check of the trainer, that of each row included."""
    models = bench.make_models(tmp_path / "sd", "toy")
    for kind in ("embeddings", "ids"):
        folder = bench.make_cache(tmp_path / kind, models, 70, 64, kind, rows_per_shard=32)
        cache, _, batches = train_text_to_image.load_cache(folder)
        args = argparse.Namespace(seed=0, random_flip=False)
        dataset = train_text_to_image.CachedLatents(batches, args)
        assert (
            len(dataset) == cache["rows"] == 70 and len(dataset[[(0, row, 1.0) for row in range(70)]]["weight"]) == 70
        )
    assert cached_vs_online.count_flops(models, 64)[0] > 1e6


@pytest.mark.long
def test_tables_of_all_that_is_trained(tmp_path, capsys):
    for benchmark, argv in (
        (step_overhead, [*TOY, "--resolution=64"]),
        (cached_vs_online, [*TOY, "--resolution=64"]),
        (growth, ["--rows=64", "--num_caches=2", "--steps=20"]),
        (gpu, [*TOY, "--mixed_precision=no", "--resolutions=64", "--batch_sizes=4", "--no_compile"]),
    ):
        reset()
        benchmark.main(argv)
        assert capsys.readouterr().out.count("\n| ") >= 2, benchmark
    with pytest.raises(SystemExit):  # no checkout is there
        peers.main([*TOY, f"--diffusers={tmp_path}", "--resolution=64"])
