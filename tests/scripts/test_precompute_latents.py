"""A latent cache from end to end: its contents, the same bytes after a kill, and errors.

Its files, its models and its reader are tested in tests/package.
"""

import argparse
import json
import math
import os
import random
import resource
import shutil
import signal
import time
import weakref

import datasets
import numpy as np
import pyarrow as pa
import pytest
import torch
from conftest import (
    MODELS,
    ROOT,
    Script,
    copy_shard,
    finish,
    hash_as_before,
    kill,
    launch,
    make_captioned,
    make_images,
    patch,
    read_files,
    start,
    wait_until,
)
from diffusers import AutoencoderKL, AutoencoderTiny
from filelock import FileLock
from PIL import Image
from transformers import CLIPTextModel, CLIPTokenizer

import precompute_latents as script
from diffusion_training.data.encoders import encode_images, encode_prompts
from diffusion_training.data.images import decode_image, shrink
from diffusion_training.draws import draw_choices
from diffusion_training.errors.stop_signals import SIGNALS
from diffusion_training.latents.reader import load_cache
from diffusion_training.models import EXACT, hash_weight, hash_weights

precompute = Script("precompute_latents")


@pytest.fixture
def flags(tmp_path):
    """A cache of 10 images in 4 shards that takes a second; later flags override these."""
    make_captioned(tmp_path / "images", 10)
    return precompute.flags(
        tmp_path / "out",
        f"--train_data_dir={tmp_path / 'images'}",
        f"--pretrained_model_name_or_path={MODELS}",
        "--rows_per_shard=3",
    )


def load_models():
    tokenizer = CLIPTokenizer.from_pretrained(MODELS, subfolder="tokenizer")
    text_encoder = CLIPTextModel.from_pretrained(MODELS, subfolder="text_encoder").eval()
    return AutoencoderKL.from_pretrained(MODELS, subfolder="vae").eval(), text_encoder, tokenizer


@torch.no_grad()
def expected_moments(vae, images):
    """Mean and std of the latents of PIL images, computed directly."""
    pixels = torch.stack([torch.from_numpy(np.array(image)).permute(2, 0, 1) for image in images])
    posterior = vae.encode(pixels / 127.5 - 1).latent_dist
    return torch.cat([posterior.mean, posterior.std], dim=1)


# ------------------------------------------------------------------- contents of the cache


def test_cache_rows_hold_latents_of_any_image_mode_and_caption_embeddings(tmp_path):
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 255, (16, 16, 3)).astype(np.uint8)
    rgb, deep = Image.fromarray(pixels), np.linspace(0, 65535, 256).reshape(16, 16)
    upright = Image.Exif()
    upright[0x0112] = 6
    clear = rgb.convert("RGBA")
    clear.putalpha(
        Image.fromarray(np.repeat([[255, 0]], [8, 8], axis=1).repeat(16, axis=0).astype(np.uint8))
    )
    on_white = pixels.copy()
    on_white[:, 8:] = 255
    palette, cmyk = rgb.quantize(16), rgb.convert("CMYK")
    kinds = {  # file: (image to save, options, what it shows)
        "0.png": (rgb, {}, rgb),
        "1.jpg": (rgb, {"quality": 95}, None),
        "2.webp": (rgb, {"lossless": True}, rgb),
        "3.png": (rgb.convert("L"), {}, rgb.convert("L").convert("RGB")),
        "4.png": (palette, {}, palette.convert("RGB")),
        "5.png": (clear, {}, Image.fromarray(on_white)),
        "6.png": (rgb, {"exif": upright}, rgb.transpose(Image.Transpose.ROTATE_270)),
        "7.png": (
            Image.fromarray(deep.astype(np.uint16)),
            {},
            Image.fromarray((deep / 257).round().astype(np.uint8)),
        ),
        "8.jpg": (cmyk, {"quality": 95}, None),
        "9.gif": (
            palette,
            {"save_all": True, "append_images": [Image.new("P", (16, 16))]},
            palette.convert("RGB"),
        ),
    }
    folder, shown = tmp_path / "images", []
    folder.mkdir()
    for name, (image, options, expected) in kinds.items():
        image.save(folder / name, **options)
        shown.append((expected or Image.open(folder / name)).convert("RGB"))
    captions = [f"a handwritten digit {i}" for i in range(len(kinds))]
    lines = [
        json.dumps({"file_name": name, "text": text})
        for name, text in zip(kinds, captions, strict=True)
    ]
    (folder / "metadata.jsonl").write_text("\n".join(lines))
    more = ["--rows_per_shard=4", "--batch_size=3", "--random_flip", "--dataloader_num_workers=1"]
    models = f"--pretrained_model_name_or_path={MODELS}"
    precompute(*precompute.flags(tmp_path / "out", f"--train_data_dir={folder}", models, *more))
    cache = datasets.load_from_disk(str(tmp_path / "out"))
    assert cache.column_names == [
        "latents",
        "latents_flipped",
        "prompt_embeds",
        "text",
        "key",
        "checksum",
    ]
    assert cache["key"][:] == list(kinds) and cache["text"][:] == captions
    vae, text_encoder, tokenizer = load_models()
    latents = torch.tensor(cache["latents"][:]).view(len(kinds), 8, 8, 8)
    flipped = torch.tensor(cache["latents_flipped"][:]).view(len(kinds), 8, 8, 8)
    mirrored = [image.transpose(Image.Transpose.FLIP_LEFT_RIGHT) for image in shown]
    for name, one, other in zip(kinds, latents, expected_moments(vae, shown), strict=True):
        # JPEG decoders round differently, by a grey level or two
        torch.testing.assert_close(
            one, other, atol=0.1 if "jpg" in name else 2e-3, rtol=1e-3, msg=name
        )
    exact = [i for i, name in enumerate(kinds) if "jpg" not in name]
    torch.testing.assert_close(
        flipped[exact], expected_moments(vae, mirrored)[exact], atol=2e-3, rtol=1e-3
    )
    with torch.no_grad():
        tokens = tokenizer(
            ["", *captions], padding="max_length", truncation=True, return_tensors="pt"
        ).input_ids
        embeds = text_encoder(tokens).last_hidden_state
    empty = np.load(tmp_path / "out/empty_prompt.npy")
    assert empty.dtype == np.float16 and empty.shape == (8, 32)
    torch.testing.assert_close(torch.from_numpy(empty).float(), embeds[0], atol=2e-3, rtol=1e-3)
    torch.testing.assert_close(
        torch.tensor(cache["prompt_embeds"][:]).view(-1, 8, 32), embeds[1:], atol=2e-3, rtol=1e-3
    )


def test_cached_latents_are_float16_and_decode_to_the_images(tmp_path):
    precompute(
        f"--pretrained_model_name_or_path={MODELS}",
        f"--train_data_dir={ROOT / 'demo/digits'}",
        "--resolution=8",
        "--max_train_samples=64",
        f"--output_dir={tmp_path / 'out'}",
    )
    cache = datasets.load_from_disk(str(tmp_path / "out"))
    assert (
        cache.features["latents"].feature.dtype == "float16"
        and cache.features["latents"].length == 128
    )
    described = json.loads((tmp_path / "out/cache.json").read_text())
    moments = torch.tensor(cache["latents"][:]).view(-1, *described["latents_shape"])
    vae = load_models()[0]
    with torch.no_grad():
        restored = vae.decode(moments[:, :4]).sample.clamp(-1, 1).add(1).div(2)
    source = datasets.load_dataset(str(ROOT / "demo/digits"), split="train").shuffle(seed=0)[:64]
    real = torch.stack([torch.from_numpy(np.array(image)) for image in source["image"]]) / 255
    assert cache["text"][:] == source["text"]
    error = (restored.mean(dim=1) - real).square().mean()
    assert error < 0.1 * real.var()  # 28 dB; digits in another order would give 2


def test_latents_sample_stores_one_draw_instead_of_mean_and_std(tmp_path, flags):
    precompute(*flags)
    precompute(*flags, "--latents=sample", f"--output_dir={tmp_path / 'sample'}")
    precompute(
        *flags,
        "--latents=sample",
        f"--output_dir={tmp_path / 'other'}",
        "--seed=1",
        "--center_crop",
    )
    mean, std = np.split(
        np.array(datasets.load_from_disk(str(tmp_path / "out"))["latents"][:]), 2, axis=1
    )
    sample = np.array(datasets.load_from_disk(str(tmp_path / "sample"))["latents"][:])
    other = np.array(datasets.load_from_disk(str(tmp_path / "other"))["latents"][:])
    z = (sample - mean) / std
    assert sample.shape == mean.shape and abs(z.mean()) < 0.1 and 0.9 < z.std() < 1.1
    assert not np.array_equal(sample, other)
    assert np.corrcoef(z[0], z[2])[0, 1] < 0.5  # the first of one batch and the first of the next


def test_cache_is_made_with_autoencoder_tiny_and_models_from_separate_folders(tmp_path, flags):
    tae = AutoencoderTiny(
        in_channels=1,
        out_channels=1,
        encoder_block_out_channels=(8, 8),
        num_encoder_blocks=(1, 1),
        decoder_block_out_channels=(8, 8),
        num_decoder_blocks=(1, 1),
    )
    tae.save_pretrained(tmp_path / "tae")
    apart = [
        f"--vae_name_or_path={tmp_path / 'tae'}",
        f"--text_encoder_name_or_path={MODELS / 'text_encoder'}",
        f"--tokenizer_name_or_path={MODELS / 'tokenizer'}",
    ]
    data = [flag for flag in flags if "pretrained" not in flag]
    precompute(*data, *apart)
    described = json.loads((tmp_path / "out/cache.json").read_text())
    assert described["vae"]["class"] == "AutoencoderTiny" and described["latents"] == "sample"
    assert described["vae"]["scaling_factor"] == tae.config.scaling_factor
    cache = datasets.load_from_disk(str(tmp_path / "out"))
    grey = torch.from_numpy(np.array(Image.open(tmp_path / "images/0.png").convert("L")))[None]
    image = shrink(grey, 16, draw_choices(0, 0, 0)[:2])
    with torch.no_grad():
        expected = tae.encode(image[None] / 127.5 - 1).latents
    torch.testing.assert_close(
        torch.tensor(cache[0]["latents"]).view(expected.shape), expected, atol=0.02, rtol=0.01
    )
    assert "no moments" in precompute.refused(
        *data, *apart, "--latents=moments", f"--output_dir={tmp_path / 'b'}"
    )


def test_bf16_latents_are_close_and_overflows_are_encoded_in_float32(tmp_path, flags, monkeypatch):
    precompute(*flags)
    precompute(*flags, "--mixed_precision=bf16", f"--output_dir={tmp_path / 'bf16'}")
    exact, low = (datasets.load_from_disk(str(tmp_path / name)) for name in ("out", "bf16"))
    exact, low = np.array(exact["latents"][:]), np.array(low["latents"][:])
    assert 0 < np.abs(exact - low).max() < 0.1

    def overflow(encoders, pixel_values):
        latents = encode_images(encoders, pixel_values)
        return (
            latents * float("inf")
            if encoders.vae.dtype == torch.bfloat16 and pixel_values.max() > 175
            else latents
        )

    loaded = []  # weights of the exact models; they must not be held while rows are encoded

    def load(base, dtype):
        assert [held() for held in loaded] in ([], [None])  # never two copies
        encoders = load_encoders(base, dtype)
        if dtype in (EXACT, torch.float32):
            loaded.append(weakref.ref(encoders.text_encoders))
        return encoders

    def encode_all(*given):
        assert [held() for held in loaded] == [None]
        yield from encode_rows(*given)

    load_encoders, encode_rows = script.load_encoders, script.encode_all
    monkeypatch.setattr(script, "load_encoders", load)
    monkeypatch.setattr(script, "encode_all", encode_all)
    monkeypatch.setattr(script, "encode_images", overflow)
    precompute(*flags, "--mixed_precision=bf16", f"--output_dir={tmp_path / 'again'}")
    assert len(loaded) == 2  # again for row 9
    again = np.array(datasets.load_from_disk(str(tmp_path / "again"))["latents"][:])
    described = json.loads((tmp_path / "again/cache.json").read_text())
    # Row 9, which is alone in its batch
    assert described["encoded_again"] == 1 and described["skipped"] == 0
    np.testing.assert_allclose(again[9], exact[9], atol=1e-3)
    assert np.array_equal(again[:9], low[:9])


def test_only_the_first_process_of_a_machine_loads_the_exact_models(tmp_path, flags, monkeypatch):
    def load(base, dtype):
        with open(tmp_path / os.environ["RANK"], "a") as log:
            print(dtype, file=log)
        return load_encoders(base, dtype)

    load_encoders = script.load_encoders
    monkeypatch.setattr(script, "load_encoders", load)
    precompute.fork(*flags, "--mixed_precision=bf16", num_processes=2)
    assert (tmp_path / "0").read_text() == f"{EXACT}\ntorch.bfloat16\n"
    assert (tmp_path / "1").read_text() == "torch.bfloat16\n"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_embeddings_of_every_precision_are_stored_as_float16(dtype):
    """Text encoders of recorded pipelines, such as Chroma's, may give bfloat16."""
    assert script.shorten(torch.ones(2, dtype=dtype)).dtype == torch.float16


def test_are_finite_judges_like_torchs_isfinite():
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.float16)
    assert torch.equal(script.are_finite(every[:, None]), every.isfinite())
    for numbers in (every.float(), torch.arange(9), torch.tensor([True, False])):
        assert torch.equal(script.are_finite(numbers[:, None]), numbers.isfinite())
    rows = torch.zeros(3, 5, dtype=torch.float16)
    rows[1, 4] = -math.inf
    assert script.are_finite(rows).tolist() == [True, False, True]


def test_embeddings_that_overflow_are_not_cached(tmp_path, flags, monkeypatch):
    def overflow(encoders, tokens):
        factor = 1 if encoders.text_encoders[0].dtype == torch.float32 else float("inf")
        return {name: embeds * factor for name, embeds in encode_prompts(encoders, tokens).items()}

    monkeypatch.setattr(script, "encode_prompts", overflow)
    precompute(*flags, "--mixed_precision=bf16")
    assert np.isfinite(np.load(tmp_path / "out/empty_prompt.npy")).all()
    assert np.isfinite(datasets.load_from_disk(str(tmp_path / "out"))["prompt_embeds"][:]).all()


def test_rows_with_infinite_latents_are_skipped(tmp_path, flags, monkeypatch):
    def overflow(encoders, pixel_values):
        latents = encode_images(encoders, pixel_values)
        return torch.where(pixel_values.amax((1, 2, 3), keepdim=True) > 175, latents * 1e6, latents)

    monkeypatch.setattr(script, "encode_images", overflow)
    precompute(*flags, "--max_skipped=0.2")
    assert len(datasets.load_from_disk(str(tmp_path / "out"))) == 9
    assert "not finite" in json.loads((tmp_path / "out/skipped.jsonl").read_text())["reason"]


# ------------------------------------------------------------------- kills, repairs, settings


@pytest.mark.parametrize("num_processes", [1, 2])
def test_a_killed_cache_run_resumes_to_the_same_bytes(tmp_path, flags, num_processes):
    flags = [*flags, "--random_flip", "--rows_per_shard=1", "--batch_size=1", "--latents=sample"]
    precompute(*flags, f"--output_dir={tmp_path / 'whole'}")
    whole = read_files(tmp_path / "whole")
    assert sorted(whole) == sorted(
        [f"data-{i:05d}-of-00010.arrow" for i in range(10)]
        + [
            "cache.json",
            "dataset_info.json",
            "empty_prompt.npy",
            "run.args",
            "skipped.jsonl",
            "state.json",
        ]
    )
    encode = script.encode

    def slow(*args):
        time.sleep(0.02)
        return encode(*args)

    def run():
        script.encode = slow
        precompute(*flags, f"--output_dir={tmp_path / 'out'}")

    shards = lambda: len(list((tmp_path / "out").glob("data-*")))
    for attempt, moment in enumerate(random.Random(num_processes).sample(range(9), 3)):
        pids = start(run, num_processes, log=tmp_path / "log")
        wait_until(lambda moment=moment: shards() > moment)
        time.sleep(0.01 * attempt)
        kill(pids)
        if shards() < 10:
            with pytest.raises(FileNotFoundError):
                datasets.load_from_disk(str(tmp_path / "out"))
    (tmp_path / "out/.tmp-data-00003-of-00010.arrow").write_bytes(b"half")
    before = {path: path.stat().st_ino for path in (tmp_path / "out").glob("data-*")}
    assert finish(start(run, num_processes, log=tmp_path / "log")) == [0] * num_processes, (
        tmp_path / "log"
    ).read_text()
    assert read_files(tmp_path / "out") == whole
    redone = sum(path.stat().st_ino != inode for path, inode in before.items())
    assert redone <= num_processes  # only shards that were renamed but not recorded


def test_sigterm_ends_the_cache_run_and_leaves_complete_shards(tmp_path, flags):
    encode = script.encode
    written = lambda: list((tmp_path / "out").glob("data-*"))

    calls = []

    def encode_and_wait(*args):
        """The last of five batches waits for a shard, and then for the signal."""
        calls.append(0)
        if len(calls) == 5:
            wait_until(written)
            wait_until(lambda: SIGNALS)  # it may have come before, in a destructor
        return encode(*args)

    def run():
        script.encode = encode_and_wait
        precompute(*flags, "--dataloader_num_workers=1")

    pids = start(run, log=tmp_path / "log")
    wait_until(written)
    os.kill(pids[0], signal.SIGTERM)
    assert finish(pids) == [143]
    assert "continues from here" in (tmp_path / "log").read_text()
    assert (
        not list((tmp_path / "out").glob(".tmp-*")) and not (tmp_path / "out/state.json").exists()
    )
    precompute(*flags)
    assert len(datasets.load_from_disk(str(tmp_path / "out"))) == 10


def test_a_second_run_encodes_only_damaged_and_missing_shards(tmp_path, flags, capfd, monkeypatch):
    (tmp_path / "images/4.png").write_bytes(b"no image")
    flags.append("--max_skipped=0.2")
    precompute(*flags)
    whole = read_files(tmp_path / "out")
    encoded = []
    encode = script.encode
    monkeypatch.setattr(
        script, "encode", lambda batch, *rest: encoded.append(batch["row"]) or encode(batch, *rest)
    )
    precompute(*flags)
    assert encoded == [] and read_files(tmp_path / "out") == whole
    for damage in ("flip", "truncate", "delete"):
        path = tmp_path / "out/data-00001-of-00004.arrow"
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data if damage == "flip" else data[:-100])
        if damage == "delete":
            path.unlink()
        # Stopped during the repair: a half-repaired cache must not open
        with monkeypatch.context() as broken:
            broken.setattr(script, "write_each", lambda *args: pytest.fail("stopped"))
            with pytest.raises(pytest.fail.Exception):
                precompute(*flags)
        assert not (tmp_path / "out/state.json").exists()
        encoded.clear()
        capfd.readouterr()
        precompute(*flags)
        said = capfd.readouterr().out
        assert f"data-00001-of-00004.arrow is {'gone' if damage == 'delete' else 'damaged'}" in said
        assert encoded == [range(3, 5), range(5, 6)] or encoded == [[3, 4], [5]]
        assert read_files(tmp_path / "out") == whole


def test_a_shard_with_rows_of_another_is_found_without_a_change_and_made_again(
    tmp_path, flags, capsys
):
    out = tmp_path / "out"
    precompute(*flags)
    whole = read_files(out)
    precompute(*flags, "--dry_run")
    assert f"{out}: all 4 shards hold their own rows\n" in capsys.readouterr().out
    wrong = copy_shard(out, 2, 0)
    before = read_files(out)
    precompute(*flags, "--dry_run")
    said = capsys.readouterr().out
    assert "1 of 4 shards must be made again, which this command does without --dry_run" in said
    assert f": {wrong}; the first holds rows of another shard, such as 6.png" in said
    assert read_files(out) == before
    (cache,) = [load_cache(out)]
    assert len(cache.shards) == 4
    assert "(data-00000-of-00004.arrow and data-00002-of-" in capsys.readouterr().out
    precompute(*flags)
    said = capsys.readouterr().out
    assert f"{wrong} holds rows of another shard, such as 6.png: making it again\n" in said
    assert said.count("making it again") == 1 and read_files(out) == whole
    (out / wrong).write_bytes(b"damaged")
    precompute(*flags, "--dry_run")
    assert f"{wrong}; the first can't be read" in capsys.readouterr().out
    precompute(*flags, "--dry_run", "--resolution=32")
    assert f"{out} holds another cache (" in capsys.readouterr().out


def test_cache_refuses_other_models_data_and_precision(tmp_path, flags):
    """test_cache.py tests that each setting is compared."""
    precompute(*flags)
    whole = read_files(tmp_path / "out")
    vae, text_encoder, _ = load_models()
    shutil.copytree(MODELS, tmp_path / "models")
    with torch.no_grad():
        vae.encoder.conv_in.bias[0] += 1e-3
        text_encoder.final_layer_norm.bias[0] += 1e-3
    vae.save_pretrained(tmp_path / "vae")
    text_encoder.save_pretrained(tmp_path / "text_encoder")
    make_captioned(tmp_path / "others", 10)
    text = [
        f"--text_encoder_name_or_path={tmp_path / 'text_encoder'}",
        f"--tokenizer_name_or_path={MODELS}/tokenizer",
    ]
    for change, names in {
        (f"--vae_name_or_path={tmp_path / 'vae'}",): ["vae.sha256"],
        (*text,): ["text_encoder.sha256"],
        ("--resolution=32",): ["latents_shape", "transform.resolution 16 -> 32"],
        ("--latents=sample",): ["latents moments -> sample", "latents_shape"],
        ("--text_cache=ids",): ["text_cache embeddings -> ids"],
        ("--mixed_precision=bf16",): ["dtype float32 -> bfloat16"],
        ("--max_train_samples=5",): ["source.fingerprint", "source.rows 10 -> 5"],
        (f"--train_data_dir={tmp_path / 'others'}",): ["source.fingerprint"],
    }.items():
        error = precompute.refused(*flags, *change)
        settings = error.split("; ")[-1]  # after the flags
        assert all(name in error for name in names), (change, error)
        assert settings.count(" -> ") == len(names), (change, error)
        assert {k: v for k, v in read_files(tmp_path / "out").items() if k != ".lock"} == whole
    # The folder of the models and flags that do not change the numbers may differ.
    precompute(
        *flags, f"--pretrained_model_name_or_path={tmp_path / 'models'}", "--max_skipped=0.5"
    )
    now = read_files(tmp_path / "out")
    assert str(tmp_path / "models") in now["run.args"].decode()  # the last command
    assert now | {"run.args": b""} == whole | {"run.args": b""}


def test_a_cache_that_an_older_version_began_is_resumed_and_keeps_its_hashes(
    tmp_path, flags, monkeypatch
):
    """Also beside a new one of another --resolution. Another VAE is refused as before."""
    out = tmp_path / "out"
    both = [*flags, "--resolution", "16", "32"]
    precompute(*both)
    whole = {name: data for name, data in read_files(out).items() if name.endswith(".arrow")}
    shutil.rmtree(out)
    vae, *_ = load_models()
    new, old = hash_weights(vae), hash_as_before(vae)
    with monkeypatch.context() as before:
        patch(before, "hash_weights", hash_as_before)
        precompute(*flags, f"--output_dir={out / '16'}")
    (out / "16/data-00003-of-00004.arrow").unlink()
    asked = []

    def watch(weight, with_old):
        asked.append(with_old)
        return hash_weight(weight, with_old)

    patch(monkeypatch, "hash_weight", watch)
    for _ in range(2):  # the second run has nothing to do
        precompute(*both)
        files = read_files(out)
        assert {name: files[name] for name in whole} == whole
        found = [json.loads(files[f"{side}/cache.json"])["vae"]["sha256"] for side in (16, 32)]
        assert found == [old, new]
    assert load_cache(out / "16") and all(asked)
    with torch.no_grad():
        vae.encoder.conv_in.bias[0] += 1e-3
    vae.save_pretrained(tmp_path / "vae")
    error = precompute.refused(*both, f"--vae_name_or_path={tmp_path / 'vae'}")
    assert "/16 holds another cache (" in error and f"vae.sha256 {old} -> narrow:" in error
    shutil.rmtree(out / "16")
    asked.clear()
    precompute(*both)  # hashes of the older version are not computed any more
    assert asked and not any(asked)


@pytest.mark.long
def test_accelerate_launch_with_two_processes_writes_the_same_cache(tmp_path, flags):
    precompute(*flags, f"--output_dir={tmp_path / 'one'}")
    argv = [
        "--multi_gpu",
        "--num_processes",
        "2",
        "--main_process_port",
        "0",
        "precompute_latents.py",
        *flags,
    ]
    done = launch(*argv, f"--output_dir={tmp_path / 'two'}", env={"ACCELERATE_USE_CPU": "true"})
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Done: 10 rows, 0 skipped") == 1
    assert read_files(tmp_path / "one") == read_files(tmp_path / "two")


@pytest.mark.long
def test_precompute_latents_memory_does_not_grow_with_the_rows(tmp_path):
    digits = datasets.load_dataset(str(ROOT / "demo/digits"), split="train")
    peaks = []
    for count in (1000, 10000):
        folder = tmp_path / str(count)
        folder.mkdir()
        digits.select([i % len(digits) for i in range(count)]).to_parquet(folder / "train.parquet")

        def run(folder=folder):
            # Fast latents of 16 kB per row: keeping 9,000 rows would take 150 MB more.
            def shrink_images(encoders, images):
                return images[:, :1, ::2, ::2].float().repeat(1, 8, 1, 1) / 255

            script.encode_images = shrink_images
            precompute(
                f"--train_data_dir={folder}",
                f"--pretrained_model_name_or_path={MODELS}",
                "--resolution=64",
                "--batch_size=64",
                f"--output_dir={tmp_path / f'out{folder.name}'}",
                "--dataloader_num_workers=0",
            )
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            (folder / "peak").write_text(str(peak))

        assert finish(start(run, log=tmp_path / "log"), timeout=200) == [0], (
            tmp_path / "log"
        ).read_text()
        peaks.append(int((folder / "peak").read_text()))
    assert peaks[1] < 1.1 * peaks[0], peaks


# ------------------------------------------------------------------- errors


def test_failed_rows_are_listed_in_skipped_jsonl_and_others_kept(tmp_path, flags, monkeypatch):
    (tmp_path / "images/3.png").write_bytes(b"no image")
    (tmp_path / "images/7.png").write_bytes((tmp_path / "images/7.png").read_bytes()[:200])
    captions = [
        json.loads(line) for line in (tmp_path / "images/metadata.jsonl").read_text().splitlines()
    ]
    captions[8]["text"] = None
    (tmp_path / "images/metadata.jsonl").write_text("\n".join(map(json.dumps, captions)))
    error = precompute.refused(*flags)
    assert "rows could not be used, more than --max_skipped 0.05" in error
    kept = set((tmp_path / "out").glob("data-*"))
    assert kept and not (tmp_path / "out/state.json").exists()
    precompute(*flags, "--max_skipped=0.3")
    skipped = [
        json.loads(line) for line in (tmp_path / "out/skipped.jsonl").read_text().splitlines()
    ]
    assert [(entry["row"], entry["key"]) for entry in skipped] == [
        (3, "3.png"),
        (7, "7.png"),
        (8, "8.png"),
    ]
    assert (
        skipped[0]["reason"] == "cannot identify image file" and "truncated" in skipped[1]["reason"]
    )
    assert skipped[2]["reason"] == "it has no caption"
    cache = datasets.load_from_disk(str(tmp_path / "out"))
    assert cache["key"][:] == [f"{i}.png" for i in (0, 1, 2, 4, 5, 6, 9)]
    described = json.loads((tmp_path / "out/cache.json").read_text())
    assert (described["rows"], described["skipped"], described["source"]["rows"]) == (7, 3, 10)


def test_a_cache_shard_without_rows_can_be_opened(tmp_path, flags):
    for i in (3, 4, 5):
        (tmp_path / f"images/{i}.png").write_bytes(b"no image")
    precompute(*flags, "--max_skipped=0.5")
    cache = datasets.load_from_disk(str(tmp_path / "out"))
    assert cache["key"][:] == [f"{i}.png" for i in (0, 1, 2, 6, 7, 8, 9)]


def test_a_full_disk_ends_the_cache_run_and_keeps_written_shards(tmp_path, flags, monkeypatch):
    real, calls = pa.ipc.new_stream, []

    def full(*args):
        calls.append(args)
        if len(calls) == 3:
            raise OSError(28, "No space left on device")
        return real(*args)

    monkeypatch.setattr(pa.ipc, "new_stream", full)
    error = precompute.refused(*flags)
    assert "data-00002-of-00004.arrow could not be written" in error and "No space left" in error
    assert len(list((tmp_path / "out").glob("data-*"))) == 2 and not list(
        (tmp_path / "out").glob(".tmp-*")
    )
    precompute(*flags)
    assert len(calls) == 5 and len(datasets.load_from_disk(str(tmp_path / "out"))) == 10


def test_after_batches_that_did_not_fit_smaller_ones_make_the_cache(tmp_path, flags, monkeypatch):
    def encode(encoders, pixel_values):
        if len(pixel_values) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return encode_images(encoders, pixel_values)

    monkeypatch.setattr(script, "encode_images", encode)
    said = precompute.refused(*flags, "--batch_size=3")
    assert "try a smaller --batch_size (auto finds the largest that fits)" in said
    precompute(*flags, "--batch_size=auto")
    made_with = json.loads((tmp_path / "out/cache.json").read_text())["made_with"]
    assert (
        made_with["batch_size"] == 2 and "--batch_size=2" in (tmp_path / "out/run.args").read_text()
    )
    (tmp_path / "out/data-00001-of-00004.arrow").unlink()
    monkeypatch.setattr(script, "try_batch_sizes", None)  # it is known
    precompute(*flags, "--batch_size=auto")


def test_cache_refuses_folders_with_other_files_or_another_writer(tmp_path, flags):
    (tmp_path / "other").mkdir()
    (tmp_path / "other/model_index.json").write_text("{}")
    assert "holds model_index.json and no latent cache" in precompute.refused(
        *flags, f"--output_dir={tmp_path / 'other'}"
    )
    precompute(*flags)
    with FileLock(tmp_path / "out/.lock"):
        assert "another process is writing" in precompute.refused(*flags)
    (tmp_path / "out/cache.json").write_text('{"rows')
    assert "is damaged" in precompute.refused(*flags)


def test_run_args_file_makes_the_same_cache_again(tmp_path, flags):
    precompute(*flags, "--max_skipped=0.5")
    again = [f"@{tmp_path / 'out/run.args'}", f"--output_dir={tmp_path / 'again'}"]
    precompute(*again)
    assert read_files(tmp_path / "out") == read_files(tmp_path / "again")


def test_the_device_does_not_wait_while_a_shard_is_written(tmp_path, flags, monkeypatch):
    """While a file is written, the device gets 16 further batches. The test reads no clock."""
    make_images(tmp_path / "more", 64)
    lines = [json.dumps({"file_name": f"{i}.png", "text": "x"}) for i in range(64)]
    (tmp_path / "more/metadata.jsonl").write_text("\n".join(lines))
    encode, fsync, work_ahead = script.encode, os.fsync, script.work_ahead
    queued, taken, written = [], [], []

    def queue(*batch):
        columns, _ = encode(*batch)
        queued.append(batch)
        return columns, argparse.Namespace(synchronize=lambda: None)

    def count_taken(items, count, _):
        for item in work_ahead(items, count, argparse.Namespace(type="xpu")):
            taken.append(item)
            yield item

    def write_slowly(file):
        """Wait until the device has all batches that it can get."""
        if taken:  # else it is cache.json
            wait_until(lambda: len(queued) >= min(64, len(taken) + 16))
        written.append(len(taken))
        fsync(file)

    monkeypatch.setattr(script, "encode", queue)
    monkeypatch.setattr(script, "work_ahead", count_taken)
    monkeypatch.setattr(os, "fsync", write_slowly)
    precompute(
        *flags, f"--train_data_dir={tmp_path / 'more'}", "--rows_per_shard=16", "--batch_size=1"
    )
    assert len(queued) == 64 and sum(0 < count < 64 for count in written) == 3


def test_rows_lost_in_an_outage_are_read_by_the_next_run(tmp_path, flags, capfd, monkeypatch):
    """The folder disappears while it is read and comes back.

    No good row is lost, and broken rows stay skipped.
    """
    (tmp_path / "images/9.png").write_bytes(b"no image")
    precompute(*flags, "--max_skipped=0.1", f"--output_dir={tmp_path / 'whole'}")

    def away(source, channels, **options):
        if source["path"].endswith(("4.png", "5.png", "6.png")):
            raise FileNotFoundError(2, "No such file or directory", source["path"])
        return decode_image(source, channels, **options)

    with monkeypatch.context() as broken:
        patch(broken, "decode_image", away)
        error = precompute.refused(*flags, "--max_skipped=0.1")
        assert "not read: [Errno 2]" in error
        precompute(*flags, "--max_skipped=0.5")  # although the cache was complete
        assert len(datasets.load_from_disk(str(tmp_path / "out"))) == 6
    capfd.readouterr()
    precompute(*flags, "--max_skipped=0.1")
    assert capfd.readouterr().out.count("lacks rows that could not be read: making it again") == 2
    assert read_files(tmp_path / "out") == read_files(tmp_path / "whole")


def test_dry_run_prints_the_cache_size_and_writes_nothing(tmp_path, flags, capsys, monkeypatch):
    patch(monkeypatch, "decode_image", lambda *args, **options: pytest.fail("an image was read"))
    precompute(*flags, "--dry_run", "--random_flip")
    said = capsys.readouterr().out
    # moments of 8 x 8 x 8 twice, embeddings of 8 x 32, two bytes each
    assert "10 rows of 2.56kB (512B for the caption)" in said and "25.6kB in 4 shards" in said
    assert not (tmp_path / "out").exists()


def test_precompute_latents_reports_bad_data_and_models_in_one_line(tmp_path, flags):
    for argv, said in {
        "--caption_column=caption": (
            "no column 'caption', only image, text: choose with --caption_column"
        ),
        "--resolution=15": "--resolution 15 is not a multiple of 2, which this VAE needs",
        f"--pretrained_model_name_or_path={tmp_path / 'images'}": (
            "does not hold the text_encoder of"
        ),
        "--mixed_precision=fp16": "fp16 does nothing on a CPU",
    }.items():
        assert said in precompute.refused(*flags, argv)
    shutil.copytree(MODELS, tmp_path / "models")
    config = json.loads((tmp_path / "models/vae/config.json").read_text())
    (tmp_path / "models/vae/config.json").write_text(
        json.dumps({**config, "norm_num_groups": True})
    )
    assert "the VAE does not work (group_norm()" in precompute.refused(
        *flags, f"--pretrained_model_name_or_path={tmp_path / 'models'}"
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "argv, sentence",
    [
        (["--train_data_dir=nowhere"], "--train_data_dir nowhere is not a folder"),
        (
            ["--train_data_dir=."],
            "give --pretrained_model_name_or_path, or both --vae_name_or_path and",
        ),
        (["--train_data_dir=.", "--vae_name_or_path=v"], "or both --vae_name_or_path and"),
        (["--batch_size=0"], "--batch_size: 0 is not between 1 and"),
        (["--max_skipped=5"], "--max_skipped: 5 is not between 0 and 1"),
    ],
)
def test_precompute_latents_reports_bad_flags_in_one_line(argv, sentence):
    assert sentence in precompute.refused(*argv, status=2).splitlines()[-1]
