"""The benchmarks run; what they measure is not judged here."""

import argparse
import functools
import io
import json
import re
import sys

import numpy as np
import pytest
import torch
from conftest import ROOT, make_images, metrics, reset
from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel
from PIL import Image

import train_text_to_image
import train_unconditional

sys.path.insert(0, str(ROOT / "benchmarks"))

import batch_sizes
import bench
import cache_reader
import cached_vs_online
import digits_quality
import find_lr_worth
import gpu
import growth
import peers
import plan
import precompute_speed
import step_overhead
import transform_speed

import precompute_latents as script


def table(said):
    """The rows of a Markdown table as lists of cells, without its head."""
    rows = [line.strip("| ").split(" | ") for line in said.splitlines() if line.startswith("|")]
    assert set(map(len, rows[:1] + rows[2:])) == {len(rows[0])}
    return rows[2:]


def first(cell):
    """What a cell begins with, as a number."""
    return float(re.match(r"[0-9.]+", cell)[0])


def test_transform_speed(monkeypatch, capsys):
    buffer = io.BytesIO()
    ramp = np.add.outer(np.arange(80), np.arange(120))[..., None] + np.array([0, 20, 40])
    Image.fromarray(ramp.astype(np.uint8)).save(buffer, "JPEG", quality=95)
    monkeypatch.setattr(transform_speed, "make_photos", lambda width: [buffer.getvalue()])
    transform_speed.main(["--resolution=32", "--widths", "120", "--seconds=0.01", "--rounds=2"])
    said = capsys.readouterr().out
    rows = table(said)
    there = [name for name in transform_speed.WAYS if name in [row[0] for row in rows]]
    assert len(there) == len(rows) >= 5 and all(first(row[1]) > 0 for row in rows)
    for name, missing in (("OpenCV", transform_speed.cv2 is None), ("torchcodec", script.decode_jpeg is None)):
        assert (f"{name} is not installed" in said) == missing == (not any(row.startswith(name) for row in there))
    photos = [transform_speed.WAYS[name](32)(buffer.getvalue()) for name in there[:-1]]
    photos = [photo.numpy() if torch.is_tensor(photo) else photo.astype(float) for photo in photos]
    for name, photo in zip(there, photos, strict=False):  # all ways make the same picture
        assert photo.shape == (3, 32, 32) and np.abs(photo - photos[0]).mean() < 3, name


def test_cache_reader(tmp_path, capsys):
    cache_reader.make_cache(tmp_path, 21, 16, (3, 8), batch_size=4, rows_per_shard=8)
    order = [[20, 3, 7], [0, 19]]
    expected = list(cache_reader.open_numpy(tmp_path)(order))
    assert len(np.unique(np.concatenate([batch["latents"] for batch in expected]), axis=0)) == 5
    for opened in cache_reader.READERS.values():  # all read the same numbers
        for batch, right in zip(opened(tmp_path)(order), expected, strict=True):
            assert all(np.array_equal(batch[name], right[name]) for name in cache_reader.COLUMNS)
    cache_reader.forget(tmp_path)
    cache_reader.main(["--rows=40", "--resolutions=16", "--tokens", "3", "8", "--batch_size=8", "--rounds=2"])
    rows = table(capsys.readouterr().out)
    assert [row[1] for row in rows] == list(cache_reader.READERS)
    assert all(re.fullmatch(r"[0-9.]+k, [0-9.]+ \([0-9.]+ to [0-9.]+\)", cell) for row in rows for cell in row[2:])
    assert [cell.split(", ")[1] for cell in rows[1][2:]] == 3 * ["1.00 (1.00 to 1.00)"]


def test_precompute_speed(capsys, monkeypatch):
    buffer = io.BytesIO()
    Image.fromarray(np.zeros((20, 30, 3), np.uint8)).save(buffer, "JPEG")
    monkeypatch.setattr(precompute_speed, "make_photos", lambda width: [buffer.getvalue()])
    precompute_speed.main(
        ["--rows=10", "--resolutions=16", "--vae", "8", "8", "--text", "16", "1", "--tokens=8", "--batch_size=4",
         "--rounds=2", "--dataloader_num_workers=0"]
    )  # fmt: skip
    (row,) = table(capsys.readouterr().out)
    decode, encode, whole, running, share, cores = map(first, row[1:])
    assert row[0] == "16" and min(decode, encode, whole) > 0 and whole <= running
    assert share == pytest.approx(running / encode, rel=0.8) and cores == pytest.approx(encode / decode, abs=1)


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
        (growth, ["--rows", "--images", "8", "32"]),
        (gpu, [*TOY[:2], "--mixed_precision=no", "--resolutions=64", "--batch_sizes=4", "--no_compile"]),
    ):
        reset()
        benchmark.main(argv)
        assert capsys.readouterr().out.count("\n| ") >= 2, benchmark
    with pytest.raises(SystemExit):  # no checkout is there
        peers.main([*TOY, f"--diffusers={tmp_path}", "--resolution=64"])


def test_find_lr_worth(tmp_path, unet_config, capsys, monkeypatch):
    """What stands in the table is what the runs measured; here they run in this process, which is faster."""

    def run(command, **options):
        reset()
        train_unconditional.main(train_unconditional.parse_args(command[2:]))
        return argparse.Namespace(returncode=0)

    monkeypatch.setattr(find_lr_worth.subprocess, "run", run)
    argv = ["train_unconditional.py", "--steps=2", "--factors", "1", "2", "--holdout=3", f"--output_dir={tmp_path}"]
    argv += ["--", f"--train_data_dir={make_images(tmp_path / 'images', 8)}", "--resolution=16", "--find_lr_steps=10"]
    argv += [f"--model_config_name_or_path={unet_config}", "--ddpm_num_inference_steps=1", "--train_batch_size=2"]
    find_lr_worth.main([*argv, "--learning_rate=0.003"])
    said = capsys.readouterr().out
    found = json.loads((tmp_path / "train_unconditional/find-lr/find_lr.json").read_text())["suggestion"]
    assert f"2 steps; --find_lr suggests {found:.2g}; " in said
    rows = [line.strip("| ").split(" | ") for line in said.splitlines() if line.startswith("| 0.")]
    assert [row[0] for row in rows] == [f"{rate:.2g}" for rate in (found, 2 * found, 0.003)]
    for name, row in zip((f"lr-{found:.3g}", f"lr-{2 * found:.3g}", "own"), rows, strict=True):
        record = metrics(tmp_path / "train_unconditional" / name)[-1]
        assert record["step"] == 2
        assert row[2:] == [f"{record[key]:.4f}" for key in ("held_out_loss_ema", "held_out_loss")]
