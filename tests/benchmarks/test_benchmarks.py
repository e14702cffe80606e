"""The benchmarks run, and compare the same work. Their speeds are not tested."""

import argparse
import contextlib
import dataclasses
import functools
import gc
import importlib
import importlib.metadata
import io
import json
import math
import os
import re
import runpy
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import datasets
import diffusers
import fake_device
import numpy as np
import pytest
import tiny_pipelines
import torch
from conftest import PRX, ROOT, finish, make_models, open_pipeline, reset, start, weights
from PIL import Image
from torch.nn.attention import SDPBackend

sys.path.insert(0, str(ROOT / "benchmarks"))

import bench
import cache_reader
import checkpoint_pause
import downloads
import evaluation_pause
import follow
import gpu
import gpu_plan
import gpu_promises
import gpu_settings
import growth
import loaders
import lora_layers
import memory
import peers
import precompute_speed
import quality
import recipes_on_gpu
import step_overhead
import storage
import whole_run

from diffusion_training import loading
from diffusion_training.data.images import decode_jpeg
from diffusion_training.errors.sentences import CHANGED
from diffusion_training.families.names import FACTS
from diffusion_training.latents.reader import CachedLatents, load_cache
from diffusion_training.training.step import costs
from diffusion_training.training.step.costs import count_moments
from diffusion_training.training.step.plans import ALL, MemoryPlan, Recorder

TOY = ["--size=toy", "--steps=6", "--rounds=1", "--resolution=64"]


def table(said):
    """The rows of a Markdown table as lists of cells, without its head."""
    rows = [line[2:-2].split(" | ") for line in said.splitlines() if line.startswith("|")]
    assert set(map(len, rows[:1] + rows[2:])) == {len(rows[0])}
    return rows[2:]


def first(cell):
    """The number at the beginning of a cell."""
    return float(re.match(r"[0-9.]+", cell)[0])


@pytest.fixture
def ramp(monkeypatch):
    """One picture of 120 px in place of photographs: a ramp, which would show a shift."""
    buffer, colours = (
        io.BytesIO(),
        np.add.outer(np.arange(80), np.arange(120))[..., None] + np.array([0, 20, 40]),
    )
    Image.fromarray(colours.astype(np.uint8)).save(buffer, "JPEG", quality=95)
    monkeypatch.setattr(precompute_speed, "make_photos", lambda width: [buffer.getvalue()])
    return buffer.getvalue()


def test_precompute_speed_transforms_give_the_same_picture(ramp, capsys):
    precompute_speed.main(
        ["transform", "--resolutions=32", "--widths=120", "--seconds=0.01", "--rounds=2"]
    )
    said = capsys.readouterr().out
    rows = table(said)
    there = [name for name in precompute_speed.WAYS if name in [row[0] for row in rows]]
    assert len(there) == len(rows) >= 5 and all(first(row[1]) > 0 for row in rows)
    for name, missing in (
        ("OpenCV", precompute_speed.cv2 is None),
        ("torchcodec", decode_jpeg is None),
    ):
        assert (
            (f"{name} is not installed" in said)
            == missing
            == (not any(row.startswith(name) for row in there))
        )
    photos = [precompute_speed.WAYS[name](32)(ramp) for name in there[:-1]]
    photos = [photo.numpy() if torch.is_tensor(photo) else photo.astype(float) for photo in photos]
    for name, photo in zip(there, photos, strict=False):
        assert photo.shape == (3, 32, 32) and np.abs(photo - photos[0]).mean() < 3, name


def test_precompute_speed_times_the_script(ramp, capsys):
    flags = [
        "--size=toy",
        "--rows=10",
        "--resolutions=16",
        "--batch_size=4",
        "--rounds=2",
        "--widths=120",
    ]
    precompute_speed.main(["script", *flags, "--dataloader_num_workers=0"])
    (row,) = table(capsys.readouterr().out)
    decode, encode, whole, running, share, cores = map(first, row[1:])
    assert row[0] == "16" and min(decode, encode, whole) > 0 and whole <= running
    assert share == pytest.approx(running / encode, rel=0.8) and cores == pytest.approx(
        encode / decode, abs=1
    )


def test_precompute_speed_times_two_resolutions_in_one_pass(ramp, capsys):
    flags = [
        "--size=toy",
        "--rows=6",
        "--resolutions",
        "16",
        "32",
        "--batch_size=4",
        "--rounds=1",
        "--widths=120",
    ]
    precompute_speed.main(["passes", *flags, "--dataloader_num_workers=0"])
    stage, whole = table(capsys.readouterr().out)
    assert (
        stage[0] == "stage 1"
        and whole[0] == "whole"
        and all(first(cell) >= 0 for cell in stage[1:4])
    )
    one, other, together = map(first, whole[1:4])
    # the printed figures are rounded
    low, high = (together - 0.05) / (one + other + 0.1), (together + 0.05) / (one + other - 0.1)
    assert min(one, other, together) > 0 and low - 0.01 <= float(whole[4]) <= high + 0.01


def test_cache_readers_read_the_same_numbers(tmp_path, capsys):
    models = bench.make_models(tmp_path / "models", "toy")
    folder = bench.make_cache(tmp_path / "cache", models, 21, 16, rows_per_shard=8)
    cache_reader.copy_to_numpy(folder)
    order = [[20, 3, 7], [0, 19]]
    expected = list(cache_reader.open_numpy(folder)(order))
    assert len(np.unique(np.concatenate([batch["latents"] for batch in expected]), axis=0)) == 5
    for opened in cache_reader.READERS.values():
        for batch, right in zip(opened(folder)(order), expected, strict=True):
            assert all(np.array_equal(batch[name], right[name]) for name in cache_reader.COLUMNS)
    cache_reader.main(
        ["--size=toy", "--rows=40", "--resolutions=16", "--batch_size=8", "--rounds=2"]
    )
    rows = table(capsys.readouterr().out)
    assert [row[1] for row in rows] == list(cache_reader.READERS)
    assert all(
        re.fullmatch(r"[0-9.]+k, [0-9.]+ \([0-9.]+ to [0-9.]+\)", cell)
        for row in rows
        for cell in row[2:]
    )
    assert [cell.split(", ")[1] for cell in rows[1][2:]] == 3 * ["1.00 (1.00 to 1.00)"]


def test_storage_benchmark_prints_its_table(capsys, tmp_path):
    flags = [
        "--size=toy",
        "--rows=140",
        "--rows_per_shard=1",
        "--resolution=16",
        "--batch_size=8",
        "--rounds=1",
    ]
    storage.main([*flags, f"--bucket=file://{tmp_path / 'bucket'}"])
    rows = table(capsys.readouterr().out)
    assert len(rows) == 4 and all(float(number) >= 0 for row in rows for number in row[1:])


def test_synthetic_caches_pass_the_trainers_checks(tmp_path):
    """This includes the checksum of each row."""
    models = bench.make_models(tmp_path / "sd", "toy")
    for kind in ("embeddings", "ids"):
        cache = load_cache(
            bench.make_cache(tmp_path / kind, models, 70, 64, kind, rows_per_shard=32)
        )
        dataset = CachedLatents({kind: cache}, seed=0, random_flip=False)
        assert len(dataset) == cache.settings["rows"] == 70
        assert len(dataset[[(0, row, 1.0) for row in range(70)]]["weight"]) == 70
        assert not any(shard.unchecked.any() for shard in dataset.opened.values())


@pytest.mark.long
def test_step_overhead_times_the_parts_of_a_step_and_a_bare_loop(tmp_path):
    cli = bench.make_parser("").parse_args(TOY[:3])
    cli.resolution = 64
    for name, argv in step_overhead.make_flags(tmp_path, cli).items():
        reset()
        parts = step_overhead.time_parts(name, [*argv, f"--output_dir={tmp_path / name}"])
        assert sum(parts.values()) == pytest.approx(1) and all(part >= 0 for part in parts.values())
        assert parts["backward pass"] > 0.05 and parts["noise, forward pass and loss"] > 0.05
        assert all(parts.values()), parts  # each patched function was called
        if name == step_overhead.TRAINERS[0]:
            step_overhead.bare(name, *argv)
            step_overhead.bare(name, "--alike", *argv)
    measured = bench.run(step_overhead.__file__, [name, *argv], steps=6)
    assert 0 < measured["step"] < measured["first"] and measured["rss"] > 100


@pytest.mark.long
def test_peers_runs_scripts_in_turns_and_compares_them(tmp_path, capsys, monkeypatch):
    """Our scripts parse the flags. The times of steps are made up."""
    seconds, started = {"embeddings": 1, "ids": 2, "pixels": 4, "theirs": 5}, []

    def run(script, argv, steps):
        lora = "--rank=4" in argv
        if theirs := script.is_relative_to(tmp_path):
            assert script.parts[-3] == "examples"
            assert not re.search("--no-use_ema|--lora_layers", " ".join(map(str, argv)))
            assert script.parts[-2:] == peers.TRAINERS[trainer]
        else:
            args = importlib.import_module(script.stem).parse_args(list(map(str, argv)))
            assert (
                args.use_ema == (not lora)
                and args.max_train_steps in (steps, None)
                and args.report_to == "none"
            )
        cache = [
            Path(flag.split("=")[1]).name.split("-")[-1]
            for flag in argv
            if flag.startswith("--latents_dir")
        ]
        started.append("theirs" if theirs else cache[0] if cache else "pixels")
        step = seconds[started[-1]] + len(started) / 100
        return {"step": step, "first_cpu": 9, "forward_cpu": 2, "start_cpu": 3}

    monkeypatch.setattr(bench, "run", run)
    flags = [*TOY[:2], "--rounds=3", "--resolution=64", f"--diffusers={tmp_path}"]
    trainer = "train_text_to_image"
    peers.main([*flags, "--trainers", trainer])
    rows = table(capsys.readouterr().out)
    assert started == 3 * list(seconds) and [row[2] for row in rows][0] == "1.90 (1.83 to 1.98)"
    shares = [row[3].split(" ")[0] for row in rows]
    assert (
        shares == ["1.00", "0.51", "0.26", "0.21"]
        and rows[1][3] == "0.51 (0.50 to 0.52)"
        and rows[0][5:] == ["9.0 (9.0 to 9.0)", "2.00 (2.00 to 2.00)", "3.00 (3.00 to 3.00)"]
    )
    train, vae, text = peers.count_flops(bench.make_models(tmp_path / "sd", "toy"), 64)
    shares = [1, train / (train + text), *2 * [train / (train + vae + text)]]
    assert [row[4] for row in rows] == [f"{share:.2f}" for share in shares] and train > 1e6
    peers.main([*TOY, "--trainers", "train_unconditional"])
    assert started[12:] == ["pixels"] and capsys.readouterr()
    trainer = "sdxl_lora"
    peers.main([*flags, "--trainers", trainer])
    rows = table(capsys.readouterr().out)
    assert started[13:] == 3 * list(seconds) and [row[0] for row in rows] == 4 * ["a LoRA for SDXL"]
    trainer = "z_image_lora"
    peers.main([*flags, "--trainers", trainer, "--ways", "from images", "diffusers"])
    rows = table(capsys.readouterr().out)
    assert started[25:] == 3 * ["pixels", "theirs"]
    assert [row[0] for row in rows] == 2 * ["a LoRA for Z-Image"]


def burn(seconds):
    """Use so much processor time of this thread."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def test_stopwatch_divides_the_processor_time_of_a_run():
    watch = whole_run.Stopwatch()
    script = SimpleNamespace(evaluate=lambda: burn(0.1) or script.save(), save=lambda: burn(0.05))
    whole_run.divide(functools.partial(watch.inside, "evaluations"), script, "evaluate")
    whole_run.divide(functools.partial(watch.inside, "pauses"), script, "save")
    written = SimpleNamespace(write=lambda: burn(0.3))
    whole_run.divide(watch.beside, written, "write")
    watch.switch("steps")
    thread = threading.Thread(target=written.write)
    thread.start()
    burn(0.02)
    script.evaluate()
    burn(0.02)
    watch.switch("end")  # while the thread still writes
    thread.join()
    used = time.process_time()
    watch.switch("end")
    assert sum(watch.spent.values()) == pytest.approx(used, abs=0.03)
    del watch.spent["imports"]  # all that this process did before
    parts = {"steps": 0.04, "evaluations": 0.1, "pauses": 0.05, "files": 0.3, "end": 0}
    assert watch.spent == pytest.approx(parts, abs=0.03)


THEIRS = """
import argparse
import time

import torch

def burn(seconds):
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass

class StableDiffusionXLPipeline:
    @classmethod
    def from_pretrained(cls):
        burn(0.5)

def log_validation():
    burn(0.5)

def parse_args():
    return argparse.ArgumentParser().parse_known_args()[0]

def main(args):
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))])
    burn(2)
    for step in range(1, 5):
        optimizer.step()
        burn(0.5)
        if step == 2:
            StableDiffusionXLPipeline.from_pretrained()
            log_validation()
    burn(2)
"""


@pytest.mark.long
def test_whole_run_compares_the_parts_of_two_runs(tmp_path, capsys):
    """Ours is really run. diffusers' script is one that burns known times."""
    script = tmp_path / "examples/text_to_image/train_text_to_image_lora_sdxl.py"
    script.parent.mkdir(parents=True)
    script.write_text(THEIRS)
    whole_run.main(["--steps=4", f"--diffusers={tmp_path}"])
    rows = table(capsys.readouterr().out)
    assert [row[0] for row in rows] == [*whole_run.PARTS.values(), "the whole run"]
    ours, theirs = ([float(row[i]) for row in rows] for i in (1, 2))
    for parts in (ours, theirs):
        assert sum(parts[:-1]) == pytest.approx(parts[-1], abs=0.4)
    assert all(seconds > 0 for seconds in ours[:2]) and ours[5] > 0
    assert theirs[1] > 2  # torch imports a part of itself for its first step
    assert theirs[2:-1] == pytest.approx([1.5, 0, 0, 1, 2.5], abs=0.3)


def test_loaders_compares_the_same_training_with_three_ways_to_load(monkeypatch, capsys):
    seconds = {"0": [4.0, 6.0], "None": [2.0, 4.0], "True": [1.0, 1.0]}
    parsed = []

    def run(script, argv, steps):
        assert Path(script).name == "train_unconditional.py" and steps == 6
        args = importlib.import_module("train_unconditional").parse_args(argv)
        assert len(os.listdir(args.train_data_dir)) == 6 * 4 + 1  # captions too
        parsed.append(vars(args))
        way = str(args.cache_images or args.dataloader_num_workers)
        return {"step": seconds[way].pop(0), "cpu": 0.5, "first_cpu": 9.0}

    monkeypatch.setattr(bench, "run", run)
    flags = ["--rounds=2", "--steps=6", "--batch_size=4", "--resolutions=64"]
    loaders.main(flags)
    rows = table(capsys.readouterr().out)
    assert [row[1] for row in rows] == ["0.8 (0.7 to 1.0)", "1.5 (1.0 to 2.0)", "4.0 (4.0 to 4.0)"]
    assert [row[2] for row in rows] == [
        "0.58 (0.50 to 0.67)",
        "1.00 (1.00 to 1.00)",
        "3.00 (2.00 to 4.00)",
    ]
    assert {row[3] for row in rows} == {"125.0 (125.0 to 125.0)"}
    differ = {key for one in parsed for key in one if one[key] != parsed[0][key]}
    assert differ - {"given"} == {"cache_images", "dataloader_num_workers", "output_dir"}


PUBLISHED = {
    "Stable Diffusion 1.5": 859_520_964,
    "Stable Diffusion 2": 865_910_724,
    "SDXL": 2_567_463_684,
}


@pytest.mark.long
def test_memory_counts_match_published_models():
    whole = memory.FULL[1]
    for name, count in PUBLISHED.items():
        held = memory.count_held(name, whole)
        kinds = ("weights", "gradients", "moments", "averaged")
        assert [held[kind] for kind in kinds] == [4 * count, 4 * count, 8 * count, 4 * count]
    # Rank 16 at 140 attentions in 70 blocks: A and B of to_q, to_k, to_v, to_out. `attn2` reads
    # 2,048 numbers per token. The MLP of a block makes 8 numbers, of which 4 are a gate.
    widths = [640] * 10 + [1280] * 60
    adapter = sum(16 * (7 * 2 * width + (width + width) + 2 * (2048 - width)) for width in widths)
    adapter += sum(16 * (9 * width + 5 * width) for width in widths)
    assert adapter == 41_861_120
    # In a block: attention to itself and to the text, and a feed-forward part with a gate.
    numbers = sum(4 * w * w + 2 * w * w + 2 * 2048 * w + 8 * w * w + 4 * w * w for w in widths)
    largest = 8 * 1280 * 1280  # in 16 bits while it is used
    saved = numbers * (2 - 0.5 - 4 / 64) - 2 * largest
    held = memory.count_held("SDXL", memory.LORA[4])
    assert held["gradients"] == held["averaged"] == 4 * adapter
    assert held["weights"] == 2 * PUBLISHED["SDXL"] + 4 * adapter - int(saved)
    assert held["moments"] == 8 * adapter
    # with int8, a byte for a weight, and a scale for each output of its layers
    outputs = sum(4 * w + 2 * w + 2 * w + 8 * w + w for w in widths)
    less = memory.count_held("SDXL", memory.LORA[3])["weights"] - held["weights"]
    assert less == pytest.approx(numbers * (1 - 0.5 - 4 / 64) + 4 * outputs, rel=0.01)
    families = {model.family for model in memory.MODELS.values()}
    assert families == {*FACTS, *memory.RECORDED}


@torch.no_grad()
def test_blocks_of_qwen_image_2_1_are_called_like_its_model(tmp_path):
    model = tiny_pipelines.MAKE["qwen_image_2_1"](tmp_path)
    model = diffusers.QwenImage21Transformer2DModel.from_pretrained(model / "transformer")
    noisy, times = torch.randn(2, 4, 4, 6), torch.tensor([0.7, 0.3])
    texts = torch.randn(2, 5, 32)
    (whole,) = model(
        hidden_states=noisy.flatten(2).transpose(1, 2),
        encoder_hidden_states=texts,
        timestep=times,
        img_shapes=[[(1, 4, 6)]] * 2,
        img_mask=torch.tensor([[False] * 5 + [True] * 6] * 2),
        return_dict=False,
    )
    found = memory.QwenImage21().predict(model, noisy, times, {"prompt_embeds": texts})
    assert torch.equal(found, whole[:, 5:].transpose(1, 2).reshape(noisy.shape))


def test_counted_activations_equal_saved_tensors(monkeypatch):
    """torch's hooks count the same in float32. In 16 bits norms still compute in float32."""
    small = {**memory.SD2, "block_out_channels": [64, 64], "attention_head_dim": 8}
    for name in ("down_block_types", "up_block_types"):
        small[name] = sorted(small[name][:2])
    model = dataclasses.replace(memory.MODELS["Stable Diffusion 2"], config=small)
    monkeypatch.setitem(memory.MODELS, "small", model)

    def record(is_lora, mixed_precision, images=1):
        precision = "bf16" if is_lora else "no"
        step = memory.record.__wrapped__("small", 256, is_lora, mixed_precision, images, precision)
        kept = sum(each.between + each.graph for each in step.segments)
        return dataclasses.replace(step, gradients=0), kept

    exact, kept = record(False, "no")
    # besides the first and the last convolution
    assert kept == pytest.approx(memory.count_kept("small", 256), rel=0.03)
    half, twice = record(False, "bf16"), record(False, "no", 2)
    assert 0.5 < half[1] / kept < 0.95 and twice[1] == pytest.approx(2 * kept, rel=0.02)
    assert exact.count(ALL) < 0.7 * exact.count(MemoryPlan())
    lora, _ = record(True, "bf16")
    assert lora.count(MemoryPlan()) < half[0].count(MemoryPlan())
    # segments that are alike are computed once
    monkeypatch.setattr(memory, "FirstOfEqual", Recorder)
    every, _ = record(True, "bf16")
    assert len(every.segments) == len(lora.segments)
    for plan in (MemoryPlan(), MemoryPlan(3), MemoryPlan(3, True), ALL):
        assert lora.count(plan) == pytest.approx(every.count(plan), rel=0.01), plan
        assert lora.share_repeated(plan) == every.share_repeated(plan) >= 0


@pytest.fixture
def small_models(monkeypatch):
    """In place of four published models, small ones of the same families."""
    vae = dict(memory.KL, block_out_channels=(8, 8, 8, 8), norm_num_groups=4)
    unet = dict(memory.SDXL, block_out_channels=[32, 32, 32], attention_head_dim=4)
    unet["transformer_layers_per_block"] = 1
    klein = dict(memory.KLEIN, num_layers=1, num_single_layers=1, num_attention_heads=2)
    flux2 = {"block_out_channels": (8, 8, 8, 8), "norm_num_groups": 4}
    flux = dict(memory.FLUX_KL, **flux2)
    z_image = {"dim": 256, "n_layers": 2, "n_refiner_layers": 1, "n_heads": 2, "n_kv_heads": 2}
    qwen = {"num_layers": 2, "num_attention_heads": 2}
    qwen_vae = {"base_dim": 8, "num_res_blocks": 1}
    for name, config, kind in (
        ("SDXL", unet, ("AutoencoderKL", vae)),
        ("FLUX.2 klein 4B", klein, ("AutoencoderKLFlux2", flux2)),
        ("Z-Image", z_image, ("AutoencoderKL", flux)),
        ("Qwen-Image", qwen, ("AutoencoderKLQwenImage", qwen_vae)),
    ):
        model = dataclasses.replace(memory.MODELS[name], config=config, vae=kind, side=64)
        monkeypatch.setitem(memory.MODELS, name, model)
    monkeypatch.setattr(recipes_on_gpu, "SHORT", [*recipes_on_gpu.SHORT, "--resolution=64"])


@pytest.mark.long
@pytest.mark.usefixtures("small_models")
def test_recipes_on_gpu_measures_a_lora_and_a_whole_model(capsys):
    flags = ["--flags=--optimizer=adafactor --no-use_ema", "--cards=48"]
    recipes_on_gpu.main(["--recipes", "sdxl_lora", "klein_4b_full", *flags])
    lora, whole = capsys.readouterr().out.splitlines()[-2:]
    assert re.fullmatch(r"\| sdxl_lora \| 48 \|  \| 0.0 \| 0.0 \| 0.0 \|  \| .* \|", lora)
    assert re.fullmatch(r"\| klein_4b_full \| 48 \|  \| 0.0 \| 0.0 \| 0.0 \|  \| .* \|", whole)


@pytest.mark.long
def test_gpu_promises_compares_resumed_runs(capsys):
    gpu_promises.main(["--waits", "--resume", "text to image"])
    said = capsys.readouterr().out
    assert "| text to image |  | 0 | 0 |" in said
    assert "| text to image | --deterministic | 0 | 0 |" in said


def test_recipes_on_gpu_knows_the_model_of_each_recipe():
    without = {name for name in recipes_on_gpu.RECIPES if not recipes_on_gpu.find_model(name)}
    videos = {"wan21_1_3b_lora", "wan21_14b_lora", "wan22_5b_lora"}  # not in its list of models
    assert without == {"unet_64_8gb", *videos}
    assert set(recipes_on_gpu.NAMES.values()) <= memory.MODELS.keys()


@pytest.mark.parametrize("optimizer", ["adamw", "adamw8bit"])
def test_count_moments_equals_the_optimizers_state(optimizer):
    if optimizer == "adamw8bit":
        make = pytest.importorskip("bitsandbytes").optim.AdamW8bit
    else:
        make = torch.optim.AdamW
    for shape in ((3,), (64, 63), (64, 64), (1000, 77), (320, 320, 3, 3)):
        parameter = torch.nn.Parameter(torch.randn(shape))
        parameter.grad, steps = torch.randn(shape), make([parameter])
        steps.step()
        tensors = [
            x
            for name, x in steps.state[parameter].items()
            if torch.is_tensor(x) and name[:4] not in ("step", "qmap")
        ]
        assert sum(x.numel() * x.element_size() for x in tensors) == count_moments(
            parameter, optimizer
        ), shape


def test_memory_estimates_a_model_of_ones_own(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(memory, "KEPT", {**memory.KEPT})
    path = tmp_path / "own.json"
    config = json.loads((ROOT / "demo/digits_unet.json").read_text())
    path.write_text(json.dumps({"_class_name": "UNet2DModel", "sample_size": 8} | config))
    memory.main(["--models", str(path)])
    said = capsys.readouterr().out
    assert said.count("\n|---|") == 2  # no heads of tables without rows
    row = said.splitlines()[-1].split(" | ")
    assert row[:2] == [f"| {path}", "8"]
    assert int(row[3]) == pytest.approx(1.5 * int(row[2]), rel=0.1)  # 12 GB, 8 GB
    path = tmp_path / "other.json"
    path.write_text(json.dumps({"_class_name": "VQModel"}))
    with pytest.raises(SystemExit):
        memory.main(["--models", str(path)])
    assert "_class_name is VQModel" in capsys.readouterr().err


def test_plans_of_one_model_match_the_page(capsys):
    memory.main(["--plans", "--models", "FLUX.2 klein 4B"])
    check_plans(capsys.readouterr().out, 1)


@pytest.mark.long
def test_plans_of_all_models_match_the_page(capsys):
    memory.main(["--plans", "--models", *PLANNED])
    check_plans(capsys.readouterr().out, len(PLANNED))


PLANNED = ["SDXL", "FLUX.2 klein 4B", "FLUX.2 klein 9B", "Z-Image", "FLUX.1-dev", "Qwen-Image"]


def check_plans(said, models):
    """Check that docs/memory.md has all rows that `memory.py --plans` prints."""
    page = (ROOT / "docs/memory.md").read_text().splitlines()
    rows = [line for line in said.splitlines() if " GB | " in line]
    assert len(rows) == 6 * models and [row for row in rows if row not in page] == []


@pytest.mark.long
def test_memory_of_unets_without_captions_matches_the_pages(capsys):
    memory.main(["--models", *(name for name in memory.KEPT if name not in memory.MODELS)])
    tables = read_tables(capsys.readouterr().out)
    page = (ROOT / "docs/training.md").read_text()
    for name, side, count, _ in tables["Activations in float32"]:
        if name == f"unet_{side}.json":
            (row,) = re.findall(rf"^\| \[{name}\].* \| (\d+) \|$", page, re.M)
            assert row == count.replace(",", ""), name
    for row in tables["The largest batch without captions, float32"]:
        assert f"| {' | '.join(row)} |" in page


@pytest.mark.long
@pytest.mark.parametrize("model", [name for name in memory.MODELS if "Wan" not in name])
def test_memory_of_a_model_matches_the_pages(capsys, model):
    memory.main(["--models", model])
    tables = read_tables(capsys.readouterr().out)
    assert len(tables) >= 12
    compare_with_pages(tables)
    if model in ("Stable Diffusion 2", "SDXL"):
        ((_, _, size, shares),) = tables["Text encoders"]
        page = " ".join((ROOT / "docs/latent-cache.md").read_text().split())
        assert f"{shares}, and {size} GB in 16 bits |" in page
    if model == "SDXL":
        check_sdxl(tables)


def check_sdxl(tables):
    """Check what pages say of SDXL outside their tables."""
    # diffusers' table has 5,979.1 GFLOP for SDXL's forward pass, which is a third of a step. It
    # leaves out the products of attention.
    products = sum(
        4 * tokens * (tokens + 77) * width * n
        for tokens, width, n in ((4096, 640, 10), (1024, 1280, 60))
    )
    assert memory.count_flops_of("SDXL", 1024) / 3 - products == pytest.approx(5979.1e9, rel=0.01)
    plans = {row[1]: row[2:] for row in tables["Plans of --fit auto"]}
    said = [f"| 16 GB and more | none: {plans['16 GB'][1]} GB in a step"]
    for card in ("8 GB", "12 GB"):
        plan, step, *_ = plans[card]
        number = re.fullmatch(r"--checkpoint_blocks (\d+) --keep_attention", plan)[1]
        said.append(f"| {card} | {number} blocks are computed twice: {step} GB in a step")
    said.append(f"int8`: {memory.count_step('SDXL', memory.LORA[3]) / 1e9:.1f} GB in a step |")
    page = (ROOT / "docs/lora.md").read_text()
    assert [part for part in said if part not in page] == []


def read_tables(said):
    """The tables that memory.py printed: {title: rows}."""
    tables = {}
    for part in said.strip().split("\n\n"):
        if not part.startswith("|"):
            title = part
            continue
        tables[title] = table(part)
    return tables


def compare_with_pages(tables):
    """Check that memory.py prints each row that pages have about its models."""
    names = ("docs/memory", "docs/benchmarks", "benchmarks/memory")
    pages = "".join((ROOT / f"{name}.md").read_text() for name in names)
    pages = re.sub(r"\[([^]]*)\]\(\.\./recipes/[^)]*\)", r"\1", pages)  # links to recipes
    printed = {f"| {' | '.join(row)} |" for rows in tables.values() for row in rows}
    starts = tuple({f"| {row[0]} |" for rows in tables.values() for row in rows})
    kept = [line for line in pages.splitlines() if line.startswith(starts)]
    assert kept and [line for line in kept if line not in printed] == []


@pytest.mark.long
def test_quality_benchmark_compares_choices(tmp_path, capsys, monkeypatch):
    """Training and sampling are faked; accuracy and FID are computed from real digits."""
    images, labels = quality.load_digits()
    order = sorted(quality.NAMES)
    trained, given = [], []

    def launch(script, folder, cli, *flags, **options):
        trained.append((script, folder, options))
        (cli.output_dir / folder).mkdir(parents=True, exist_ok=True)
        speed = 30 if "bf16" in folder or "2-processes" in folder else 20
        lines = [{"loss": 1, "images_per_second": each} for each in (1, speed)] + [{"signs": {}}]
        text = "\n".join(map(json.dumps, lines))
        (cli.output_dir / folder / "metrics.jsonl").write_text(text)

    class Drawer:
        """Draws the digits of the prompts, or any digits; with DDPM it draws noise."""

        scheduler = unet = quality.DDIMScheduler()

        def __init__(self, *parts):
            pass

        def set_progress_bar_config(self, disable):
            pass

        def load_lora_weights(self, folder):
            assert folder.is_dir()

        def __call__(self, generator, prompt=None, **options):
            given.append(options)
            rows = torch.arange(len(generator))
            if prompt:
                wanted = [order.index(text.split()[-1]) for text in prompt]
                rows = torch.tensor([int((labels == label).nonzero()[0]) for label in wanted])
            drawn = images[rows].permute(0, 2, 3, 1).numpy()
            if options["output_type"] == "pt":
                return argparse.Namespace(images=images[rows])
            if isinstance(self.scheduler, quality.DDPMScheduler):
                drawn = np.random.default_rng(0).random(drawn.shape, np.float32)
            return argparse.Namespace(images=drawn)

    monkeypatch.setattr(quality, "launch", launch)
    monkeypatch.setattr(quality.DiffusionPipeline, "from_pretrained", lambda folder: Drawer())
    monkeypatch.setattr("diffusers.DDIMPipeline", Drawer)
    judge = quality.train_classifier(images, labels, steps=150)
    monkeypatch.setattr(quality, "train_classifier", lambda *data: judge)
    argv = ["--num_samples=20", f"--output_dir={tmp_path}"]
    quality.main(["precision", "--seeds=2", *argv])
    rows = table(capsys.readouterr().out)
    assert [row[:2] for row in rows[2:]] == [
        ["digits by name", name] for name in ("float32", "bf16")
    ]
    assert first(rows[3][4]) >= 0.9 and rows[3][3].startswith("+0.00 (")
    assert [row[5] for row in rows] == ["1.00 (1.00 to 1.00)", "1.50 (1.50 to 1.50)"] * 2
    quality.main(["processes", "--seeds=1", "--demos", "digits", *argv])
    rows = table(capsys.readouterr().out)
    assert [row[5] for row in rows] == ["1.00", "1.50"]
    assert trained[-1][2] == {"num_processes": 2, "threads": 1}
    argv += ["--demos", "digits by name", "--sampling_steps", "5", "7"]
    quality.main(["sampling", *argv])
    rows = table(capsys.readouterr().out)
    assert [row[1:3] for row in rows] == [
        [name, str(steps)] for name in ("DDPM", "DDIM") for steps in (5, 7)
    ]
    assert first(rows[0][3]) > first(rows[2][3]) and first(rows[0][4]) < first(rows[2][4])
    assert given[-1]["num_inference_steps"] == 7
    quality.main(["prior", "--seeds=2", *argv[:2]])
    rows = table(capsys.readouterr().out)
    assert len(rows) == 7 and rows[0][0] == "before"
    assert all(row[1:] == rows[0][1:] for row in rows) and first(rows[0][2]) >= 0.8
    nines = datasets.load_dataset(str(tmp_path / "nines-alone"), split="train")
    assert set(nines["text"]) == {"a handwritten digit nine"}
    times = {"step": 2.0, "rss": 900.0}, {"step": 3.0, "rss": 700.0}
    runs = iter([*times, *times])
    monkeypatch.setattr(bench, "run", lambda *argv: next(runs))
    toy = ["--size=toy", "--resolution=64", "--batch_size=1", "--steps=5", "--rounds=2"]
    quality.main(["checkpointing", *toy])
    plain, kept = table(capsys.readouterr().out)
    assert kept[2].startswith("1.50 (") and kept[4].startswith("-200 (") and plain[0] == "without"


def test_quality_draws_with_a_transformer_many_digits_at_once(tmp_path, monkeypatch):
    """Its pipeline in diffusers gives the transformer the times of one image."""
    torch.manual_seed(0)
    parts = open_pipeline(make_models(tmp_path)).components
    transformer = diffusers.PRXTransformer2DModel(**PRX)
    for weight in transformer.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    parts["vae"].register_to_config(shift_factor=0.0)
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    text = parts["text_encoder"], parts["tokenizer"]
    diffusers.PRXPipeline(transformer, scheduler, *text, parts["vae"]).save_pretrained(
        tmp_path / "trained"
    )
    classifier = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    monkeypatch.setattr(quality, "train_classifier", lambda *data: classifier)
    judge, found = quality.Judge(), []
    for number in (1, 3):
        cli = argparse.Namespace(output_dir=tmp_path, num_samples=number)
        found.append(judge.draw(quality.TRANSFORMER, "trained", cli, steps=2))
        assert len(found[-1][0]) == len(found[-1][1]) == number
    torch.testing.assert_close(found[0][0], found[1][0][:1])


@pytest.mark.long
def test_patches_compares_each_change_with_the_plain_script(tmp_path, capsys):
    """It fetches pictures and a network, and takes minutes."""
    patches = importlib.import_module("patches")
    flags = ["--seeds=2", "--rows=310", "--train_steps=2", "--num_samples=20"]
    patches.main([*flags, f"--output_dir={tmp_path}"])
    rows = table(capsys.readouterr().out)
    names = ["without", "REPA", "perceptual term", "learned weights"]
    assert [row[0] for row in rows] == names
    assert rows[0][2::2] == ["", "", ""] and all(row[2] for row in rows[1:])
    assert all(first(row[1]) > 0 and 0 <= first(row[3]) <= 1 for row in rows)
    folders = [tmp_path / name.replace(" ", "-") for name in names]
    trained = [weights(f"{folder}-0/transformer")["img_in.weight"] for folder in folders]
    assert not any(torch.equal(trained[0], other) for other in trained[1:])


def test_gpu_settings_are_in_effect_when_the_script_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    script = tmp_path / "script.py"
    script.write_text("pass")
    for setting in ("cudnn.benchmark", "expandable segments"):
        monkeypatch.setattr(sys, "argv", ["", setting, str(script), "--steps=1"])
        runpy.run_path(gpu_settings.__file__, run_name="__main__")
    assert torch.backends.cudnn.benchmark
    assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert sys.argv[1:] == ["--steps=1"]


def test_the_settings_of_attention_last_until_the_script_ends(monkeypatch):
    monkeypatch.setenv("TORCH_CUDNN_SDPA_AVOID_RECOMPILE", "0")
    list_kernels = torch._C._get_sdp_priority_order
    usual = list_kernels()
    for setting, first, has_cudnn in (
        ("cuDNN's attention", SDPBackend.CUDNN_ATTENTION, True),
        ("cuDNN's, shared plans", SDPBackend.CUDNN_ATTENTION, True),
        ("flash attention", SDPBackend.FLASH_ATTENTION, False),
    ):
        with CHANGED:  # a script's `main` ends so
            gpu_settings.SETTINGS[setting]()
            gc.collect()
            assert list_kernels()[0] == first.value
            assert torch.backends.cuda.cudnn_sdp_enabled() == has_cudnn
        assert list_kernels() == usual and torch.backends.cuda.cudnn_sdp_enabled()
    assert os.environ["TORCH_CUDNN_SDPA_AVOID_RECOMPILE"] == "1"


def test_copies_beside_the_computation_are_waited_for_and_keep_their_memory(monkeypatch):
    calls = []
    side = SimpleNamespace()
    computing = SimpleNamespace(wait_stream=lambda stream: calls.append(("wait", stream)))

    @contextlib.contextmanager
    def use(stream):
        calls.append(("use", stream))
        yield
        calls.append(("used", stream))

    device = {"Stream": lambda: side, "stream": use, "default_stream": lambda device: computing}
    monkeypatch.setattr(bench, "find_gpu", lambda: SimpleNamespace(**device))
    monkeypatch.setattr(
        torch.Tensor, "record_stream", lambda tensor, stream: calls.append(("keep", stream))
    )
    send = lambda batch, device, non_blocking: calls.append(("send", device)) or batch
    monkeypatch.setattr(loading, "send_to_device", send)
    gpu_settings.copy_beside()
    batch = {"latents": torch.ones(1), "skipped": []}
    assert loading.send_to_device(batch, "cuda", non_blocking=True) is batch
    sent = [("use", side), ("send", "cuda"), ("used", side)]
    assert calls == [*sent, ("wait", side), ("keep", computing)]
    assert loading.send_to_device(None, "cuda", non_blocking=True) is None


class ForkedProcess:
    """A process of `bench.run` that is a fork, for `subprocess.Popen`."""

    def __init__(self, command, stdout, **options):
        _, path, *argv = command
        assert path == bench.__file__
        (self.pid,) = start(lambda: bench.child(*argv), log=stdout.name)


GPU_RUNS = ["a bare loop, no EMA", "ours, EMA", "from pixels", "train_unconditional.py, 64 px"]


def test_gpu_benchmark_shows_what_a_run_recorded_and_goes_on_after_a_failed_one(
    tmp_path, monkeypatch, capsys
):
    def run(script, argv, steps, forbid_syncs):
        assert argv[:3] == ["first", "--mixed_precision=bf16", "--train_batch_size=8"]
        assert steps == 30 and not forbid_syncs
        if script == "broken.py":
            sys.exit("it is broken")
        (folder,) = (flag.partition("=")[2] for flag in argv if flag.startswith("--output_dir"))
        Path(folder).mkdir()
        waits = [{"data_wait": 0.9}, {"held_out_loss": 1}, {"data_wait": 0.01}, {"data_wait": 0.03}]
        Path(folder, "metrics.jsonl").write_text("\n".join(map(json.dumps, waits)))
        return {"step": 0.5, "first": 20.2, "gpu": 3.14}

    monkeypatch.setattr(bench, "run", run)
    device = SimpleNamespace(get_device_name=lambda: "NVIDIA A100-SXM4-80GB")
    monkeypatch.setattr(bench, "find_gpu", lambda: device)
    table = gpu.Table(tmp_path, argparse.Namespace(mixed_precision="bf16", steps=30))
    run_one = functools.partial(table.add, "256 px", batch=8, argv=[])
    compared = ("ours", 10.0)
    # 16 images/s of 7.8 TFLOP are 124.8 of 312 TFLOP/s
    speed = run_one("all", flops=7.8e12, start=["works.py", "first"], compared=compared)
    assert speed == 16
    assert run_one("none", flops=1, start=["broken.py", "first"], compared=compared) is None
    assert run_one("no FLOPs", flops=None, start=["works.py", "first"], compared=("it", None)) == 16
    assert table.rows == [
        ["256 px", "all, 1.600 of ours", "16.0", "40.0%", "2.00%", "3.1", "20"],
        ["256 px", "none", "failed", "", "", "", ""],
        ["256 px", "no FLOPs", "16.0", "", "2.00%", "3.1", "20"],
    ]
    assert "it is broken" in capsys.readouterr().err


def test_gpu_benchmark_checks_what_an_imitated_gpu_can_not():
    assert [*gpu.list_checks(1, no_compile=False)] == ["--compile"]
    assert [*gpu.list_checks(1, no_compile=True)] == []
    assert gpu.list_checks(4, no_compile=True)["--shard"] == (4, ["--shard"])


@pytest.mark.long
def test_gpu_benchmark_checks_a_toy_model_on_several_devices(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert gpu.check(tmp_path / "shard", *gpu.list_checks(2, no_compile=True)["--shard"]) == "works"
    assert gpu.check(tmp_path / "wrong", 1, ["--no_such_flag"]) == gpu.FAILED
    assert "--no_such_flag" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.usefixtures("without_figures")
def test_gpu_benchmark_runs_on_an_imitated_gpu(tmp_path):
    """Except --compile. Each run takes its steps, waits for nothing, and none fails."""
    log = tmp_path / "log"
    flags = ["--size=toy", "--steps=11", "--resolutions=64", "--batch_sizes=1", "--no_compile"]

    def child():
        fake_device.switch_on()
        bench.find_device = lambda: torch.device(fake_device.DEVICE)
        bench.subprocess = SimpleNamespace(Popen=ForkedProcess)
        gpu.main(flags)

    codes = finish(start(child, log=str(log)), timeout=1800)
    said = log.read_text()
    assert codes == [0], said
    assert said.startswith("Imitated GPU, ")
    runs, encoding = said.split("precompute_latents.py, running")
    rows = table(runs)
    assert [row[1].split(",")[0] for row in rows] == [run.split(",")[0] for run in GPU_RUNS]
    assert all(row[5] == "1.9" for row in rows)
    assert all(re.search(r"\d of the bare loop|\d of ours", row[1]) for row in rows[1:2])
    assert len(table(encoding)) == 1


def test_the_plan_names_the_kinds_of_kernels():
    kernels = {
        "void cudnn::ops::nchwToNhwcKernel<__half>": "layout",
        "sm90_xmma_fprop_implicit_gemm_bf16": "convolution",
        "void flash_fwd_kernel<Flash_fwd_kernel_traits>": "attention",
        "nvjet_hsh_256x128_64x4_NTN": "product",
        "void at::native::RowwiseMomentsCUDAKernel<float>": "norm",
        "void at::native::vectorized_elementwise_kernel<4>": "elementwise",
        "void at::native::multi_tensor_apply_kernel<FusedAdam>": "optimizer",
        "Memcpy DtoD (Device -> Device)": "copy",
        "triton_poi_fused_add_0": "fused by --compile",
        "aten::embedding": "other",
    }
    assert {name: gpu_plan.name_kind(name) for name in kernels} == kernels


def test_norms_in_bf16_have_the_numbers_of_their_kernel(monkeypatch):
    for kind in (torch.nn.GroupNorm, torch.nn.LayerNorm):
        monkeypatch.setattr(kind, "forward", kind.forward)
    images = torch.randn(2, 8, 4, 8)
    norms = [torch.nn.GroupNorm(4, 8), torch.nn.LayerNorm(8)]
    exact = [norm(images) for norm in norms]
    gpu_settings.norm_in_bf16()
    assert all(map(torch.equal, [norm(images) for norm in norms], exact))
    halves = [norm(images.bfloat16()) for norm in norms]
    assert {half.dtype for half in halves} == {torch.bfloat16}
    for half, other in zip(halves, exact, strict=True):
        torch.testing.assert_close(half.float(), other, atol=0.05, rtol=0.05)


@pytest.fixture
def piece(tmp_path, monkeypatch):
    """piece(*flags) makes a piece of gpu_plan.py, whose runs only take time, on an H100.

    Returns the runs that have ended in it. taking: {experiment: {what: seconds}}, by default 40.
    """
    card = SimpleNamespace(get_device_name=lambda: piece.card)
    monkeypatch.setattr(bench, "find_gpu", lambda: card)
    clock = SimpleNamespace(now=0.0)

    def measure(run, limit, peak):
        seconds = piece.taking.get(run.experiment, {}).get(run.what, 40)
        clock.now += min(seconds, limit)
        if seconds == math.inf:
            raise KeyboardInterrupt  # the machine is gone
        if seconds > limit:
            sys.exit(f"{run.what} was killed")
        ended.append(run.key)
        speed = 16 if run.what == "eager" else 20
        return {"images/s": speed, "step": 1 / speed, "TFLOP": 13.5, "peak": peak}

    def make_needed(name, folder, limit, cli):
        if not (folder / name).exists():
            clock.now += 60
            (folder / name).mkdir()

    def piece(*flags):
        ended.clear()
        clock.now = 0.0
        with contextlib.suppress(KeyboardInterrupt):
            gpu_plan.main([f"--folder={tmp_path}", *flags])
        return [*ended]

    ended, piece.taking, piece.card = [], {}, "NVIDIA H100 80GB HBM3"
    monkeypatch.setattr(gpu_plan, "measure", measure)
    monkeypatch.setattr(gpu_plan, "make_needed", make_needed)
    monkeypatch.setattr(gpu_plan, "count_seconds", lambda: clock.now)
    monkeypatch.setattr(gpu_plan.time, "monotonic", lambda: clock.now)
    return piece


def test_the_plan_goes_on_in_the_next_piece_and_ends_before_its_limit(piece, capsys):
    flags = ["--only", "norms", "layout", "--seconds=190"]
    found = [piece(*flags) for _ in range(6)]
    # 60 s for models, then three runs of 40; without models four
    assert [*map(len, found)] == [3, 4, 4, 4, 1, 0]
    said = capsys.readouterr().out
    assert "13 runs are left: give the same command again. The next one, layout cached" in said
    keys = [key for each in found for key in each]
    whats = ["baseline", "torch's memory layout", "channels_last"]
    once = [("norms", "cached", "baseline"), ("norms", "cached", "norms in bf16")]
    once += [("layout", data, what) for data in ("cached", "from images") for what in whats]
    assert keys == [(*run, str(turn)) for turn in range(2) for run in once]


def test_the_plan_learns_how_slow_the_machine_is(piece):
    piece.taking = {"norms": {"baseline": 80, "norms in bf16": 80}}
    # models take 60 s; after two runs of 80 s in place of 40, 70 s have no room for a third
    assert len(piece("--only", "norms", "layout", "--seconds=290")) == 2


def test_a_run_of_the_plan_that_was_killed_is_made_again_and_given_up_after_two_times(
    piece, capsys
):
    flags = ["--only", "norms", "--seconds=540"]
    piece.taking = {"norms": {"baseline": math.inf}}
    assert piece(*flags) == []
    piece.taking = {}
    baseline, changed = ("norms", "cached", "baseline"), ("norms", "cached", "norms in bf16")
    assert piece(*flags) == [(*what, turn) for turn in "01" for what in (baseline, changed)]
    flags = ["--only", "large", "--seconds=540"]
    piece.taking = {"large": {"baseline": math.inf}}
    assert [piece(*flags) for _ in range(2)] == [[], []]
    piece.taking = {}
    with pytest.raises(SystemExit, match="Some runs failed"):
        piece(*flags)
    assert "large cached baseline 0 was killed twice and is given" in capsys.readouterr().err


def test_a_run_of_the_plan_that_is_cut_off_gets_its_whole_limit_in_the_next_piece(piece, capsys):
    piece.taking = {"norms": {"norms in bf16": 170}}
    flags = ["--only", "norms", "--seconds=200"]
    assert piece(*flags) == [("norms", "cached", "baseline", "0")]
    assert "3 runs are left" in capsys.readouterr().out
    assert piece(*flags)[0] == ("norms", "cached", "norms in bf16", "0")
    # in the rest of a piece that has less than the limit it is not tried again
    piece.taking = {"large": {"batch 128": 170}}
    flags = ["--only", "compile", "large", "--seconds=140"]
    begun = "large cached batch 128 0 some"
    assert len(piece(*flags)) == 2 and f"{begun} 40 s" in capsys.readouterr().out
    assert len(piece(*flags)) == 3 and begun not in capsys.readouterr().out
    # one that takes more than its own limit has failed
    piece.taking = {"layout": {"baseline": 400}}
    with pytest.raises(SystemExit, match="Some runs failed"):
        piece("--only", "layout", "--seconds=540")


def test_the_plan_shows_the_card_and_goals_and_begins_again_on_another_card(piece, capsys):
    flags = ["--only", "desk", "--seconds=9000"]
    keys = piece(*flags)
    assert [key[1] for key in keys[:6:2]] == ["SDXL", "Z-Image", "FLUX.2 klein 4B"]
    piece.card = "NVIDIA H200"
    assert piece(*flags) == keys
    first, other = capsys.readouterr().out.split("The plan: ")[2:]
    assert first.startswith(f"NVIDIA H100 80GB HBM3, torch {torch.__version__}, sd2, bf16\n")
    assert other.startswith(f"NVIDIA H200, torch {torch.__version__}, sd2, bf16\n")
    # 16 images/s of 13.5 TFLOP of 989
    eager, compiled = table(first)[2:4]
    assert eager[:7] == ["desk", "Z-Image", "eager", "16.00 (16.00 to 16.00)", "1.000", "21.8%",
                         "40 % of an H100"]  # fmt: skip
    assert compiled[4:6] == ["1.250", "27.3%"]


def test_the_scripts_take_all_flags_of_the_plan(tmp_path):
    flags = {"mixed_precision": "bf16", "resolution": 512, "batch_size": 64, "no_compile": False}
    flags |= {"only": gpu_plan.EXPERIMENTS, "diffusers": "peers", "size": "sd2"}
    cli = argparse.Namespace(**flags)
    runs = [*gpu_plan.Plan(tmp_path, cli).list_runs()]
    assert len({run.key for run in runs}) == len(runs)
    assert [run.what for run in runs[: len(runs) // 2]] == [
        run.what for run in runs[len(runs) // 2 :]
    ]
    for name in gpu_plan.MADE:
        for part in ("models", "cache", "images", "base", "photographs", "shapes"):
            (tmp_path / name / part).mkdir(parents=True)
    for run in runs:
        name = Path(run.script or "precompute_latents.py").stem
        flags = [*run.flags[not run.script :], "--output_dir=out"]
        if name == "step_overhead":
            name, *flags = flags
        if "examples" not in run.script:
            args = importlib.import_module(name).parse_args(flags)
            assert args.compile is None or run.is_compiled
        settings = gpu_settings.SETTINGS | gpu_settings.MODES
        assert all(each in settings for each in run.setting.split("+") if each)
        assert run.limit <= 500


def test_images_of_many_shapes_have_as_many_buckets_and_lengths(tmp_path):
    gpu_plan.make_shapes(tmp_path / "shapes", 256)
    lines = [json.loads(line) for line in (tmp_path / "shapes/metadata.jsonl").open()]
    sizes = {Image.open(tmp_path / "shapes" / line["file_name"]).size for line in lines}
    assert len(sizes) == len({len(line["text"]) for line in lines}) == gpu_plan.SHAPES
    assert {round(width * height / 256**2, 1) for width, height in sizes} == {1}


def test_the_plan_lists_the_wheels_that_another_machine_lacks(tmp_path, capsys):
    installed = {each.name: each.version for each in importlib.metadata.distributions()}

    def list_wheels(there):
        path = tmp_path / "there.txt"
        path.write_text("".join(f"{name}=={version}\n" for name, version in there.items()))
        gpu_plan.main([f"--wheels={path}"])
        return capsys.readouterr().out.split()

    assert list_wheels(installed) == []
    assert list_wheels(installed | {"peft": "0.1"}) == [f"peft=={installed['peft']}"]
    few = {name: installed[name] for name in installed if name not in ("datasets", "dill")}
    assert [line.split("==")[0] for line in list_wheels(few)] == ["datasets", "dill"]
    with pytest.raises(SystemExit):
        gpu_plan.main([f"--wheels={tmp_path / 'nowhere'}"])
    assert "No such file" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.usefixtures("without_figures", "small_models")
@pytest.mark.parametrize("only", [gpu_plan.EXPERIMENTS[i : i + 2] for i in range(0, 12, 2)])
def test_the_plan_runs_on_an_imitated_gpu(only, tmp_path, monkeypatch):
    """All of it, in one turn, but --compile does nothing."""
    monkeypatch.setattr(gpu_plan, "TURNS", 1)
    monkeypatch.setattr(costs, "PEAKS", {"Imitated GPU": (1, 1)})
    flags = ["--size=toy", "--resolution=64", "--batch_size=1", f"--folder={tmp_path / 'plan'}"]
    flags += ["--seconds=9000", "--only", *only]

    def child():
        fake_device.switch_on()
        torch.nn.Module.compile = lambda *args, **options: None
        diffusers.ModelMixin.compile_repeated_blocks = torch.nn.Module.compile
        bench.find_device = lambda: torch.device(fake_device.DEVICE)
        bench.subprocess = SimpleNamespace(Popen=ForkedProcess)
        gpu_plan.main(flags)

    (code,) = finish(start(child, log=str(tmp_path / "log")), timeout=3000)
    said = (tmp_path / "log").read_text()
    assert "The plan: Imitated GPU, torch " in said, said
    kernels, plan = said.split("The plan: Imitated GPU, torch ")
    assert all(float(row[5]) > 0 for row in table(kernels) if row[0] == "whole")
    rows = table(plan)
    assert {row[0] for row in rows} == set(only)
    failed = {(row[1], row[2]) for row in rows if row[3] == "failed"}
    # nf4 needs tensors that are not imitated, and int8 wider layers than those of the toy SDXL
    cannot = {("SDXL", "int8"), ("SDXL", "int8, compiled"), *((row[1], "nf4") for row in rows)}
    assert failed <= cannot and code == bool(failed), said
    rows = [row for row in rows if row[3] != "failed"]
    assert all(float(row[4]) > 0 for row in rows)
    assert all(row[5].endswith("%") and row[7].endswith("%") for row in rows if row[0] != "encode")


@pytest.mark.long
def test_lora_layers_compares_ways_with_the_same_bits(capsys):
    lora_layers.main(["--rounds=1", "--steps=1"])
    said = capsys.readouterr().out
    assert "700 layers of rank 16" in said
    rows = {row[0]: row[1:] for row in table(said)}
    assert all(first(row[0]) > 0 for row in rows.values())
    assert {name: row[2] for name, row in rows.items()} == {
        "frozen": "", "peft": "True", "no cast": "True", "lean": "True",
    }  # fmt: skip


@pytest.mark.long
def test_training_benchmarks_print_their_tables(tmp_path, capsys):
    for benchmark, argv in (
        (step_overhead, TOY),
        (peers, TOY),
        (
            checkpoint_pause,
            "--size=toy --steps=13 --rounds=1 --channels 8 8 --rank=4 --every=4".split(),
        ),
        (evaluation_pause, "--steps=12 --images=2 --side=32 --every=3".split()),
        (
            growth,
            "--rows=64 --num_caches=2 --steps=20 --rows_per_shard=4 --written_shards=2".split(),
        ),
        (growth, ["--rows", "--images", "8", "32"]),
        (
            gpu,
            [
                *TOY[:2],
                "--mixed_precision=no",
                "--resolutions=64",
                "--batch_sizes=4",
                "--no_compile",
            ],
        ),
    ):
        reset()
        benchmark.main(argv)
        assert capsys.readouterr().out.count("\n| ") >= 2, benchmark


@pytest.mark.long
def test_follow_benchmark_compares_runs_of_equal_weights(capsys):
    follow.main("--steps=12 --batch_size=4 --rounds=1 --encode_wait=1 --step_wait=0.1".split())
    ((_, later, together, ratio, waited_later, waited),) = table(capsys.readouterr().out)
    assert float(ratio) == pytest.approx(float(together) / float(later), abs=0.05)
    assert int(waited_later[:-1]) < int(waited[:-1]) <= 100


@pytest.mark.long
def test_downloads_benchmark_measures_plain_and_resized_images(ramp, capsys, monkeypatch):
    """Resized images are really downloaded; for the others only the command is checked."""
    pytest.importorskip("ray", reason="Ray is not installed: pip install -r requirements-ray.txt")
    measure = downloads.measure

    def measure_one(way, table, shrinks, cli):
        if shrinks:
            return measure(way, table, shrinks, cli)
        script = importlib.import_module("download_images")
        script.parse_args(
            list(map(str, downloads.make_command(way, table, "out", shrinks, cli)[2:]))
        )
        return 1, 1

    monkeypatch.setattr(downloads, "measure", measure_one)
    monkeypatch.setattr(downloads, "make_photos", lambda width: [ramp])
    downloads.main(["--rows=16", "--rounds=1"])
    rows = table(capsys.readouterr().out)
    assert [row[:2] for row in rows] == [["as they came", "ours"], ["shrunk to 512 px", "ours"]]
    assert all(first(row[2]) > 0 for row in rows)
    cli = argparse.Namespace(img2dataset="img2dataset", rows=16)
    command = downloads.make_command("img2dataset", "urls.parquet", "out", True, cli)
    assert command[0] == "img2dataset" and "--image_size=512" in command
