"""One run for several resolutions writes the bytes of separate runs, also after a kill."""

import json
import random
import shutil
import time

import pytest
import torch
from conftest import (
    MODELS,
    finish,
    kill,
    make_captioned,
    make_masked,
    make_sdxl,
    patch,
    start,
    wait_until,
)
from conftest import read_files as contents
from test_precompute_latents import precompute

import precompute_latents as script
from diffusion_training.data.images import decode_image


@pytest.fixture
def flags(tmp_path):
    """Two caches of 10 images in 4 shards each, one image broken; later flags override these."""
    make_captioned(tmp_path / "images", 10)
    (tmp_path / "images/5.png").write_bytes(b"no image")
    return precompute.flags(
        tmp_path / "out",
        f"--train_data_dir={tmp_path / 'images'}",
        f"--pretrained_model_name_or_path={MODELS}",
        "--rows_per_shard=3",
        "--random_flip",
        "--latents=sample",
        "--max_skipped=0.2",
        *["--resolution", "8", "16"],
    )


def make_each(tmp_path, flags):
    """{resolution: files} of separate runs, in folders with other names."""
    for side in (8, 16):
        precompute(*flags, f"--resolution={side}", f"--output_dir={tmp_path / f'alone-{side}'}")
    return {side: contents(tmp_path / f"alone-{side}") for side in (8, 16)}


def read_caches(tmp_path):
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"8", "16"}
    return {side: contents(tmp_path / f"out/{side}") for side in (8, 16)}


def test_several_resolutions_equal_separate_caches_and_decode_once(
    tmp_path, flags, monkeypatch, capsys
):
    alone, decoded, texts, encode_texts = make_each(tmp_path, flags), [], [], script.encode_texts

    def decode(source, *args, **options):
        decoded.append("pixels" in source)
        return decode_image(source, *args, **options)

    patch(monkeypatch, "decode_image", decode)
    monkeypatch.setattr(
        script, "encode_texts", lambda batch, *rest: texts.append(1) or encode_texts(batch, *rest)
    )
    precompute(*flags)
    assert (
        read_caches(tmp_path) == alone
        and json.loads(alone[8]["cache.json"])["transform"]["resolution"] == 8
    )
    assert (
        decoded.count(False) == 9 + 3 and decoded.count(True) == 2 * 9 and len(texts) == 3 * 2 + 1
    )
    said = capsys.readouterr().out
    assert (
        f"{tmp_path / 'out'}/8: 10 rows of" in said
        and f"9 rows, 1 skipped, are in {tmp_path / 'out/16'}" in said
    )


@pytest.mark.long
def test_several_resolutions_work_with_buckets_masks_sdxl_and_ids(tmp_path, flags):
    make_masked(tmp_path / "data")
    flags += [
        f"--train_data_dir={tmp_path / 'data'}",
        "--bucket_step=4",
        "--text_cache=ids",
        "--latents=moments",
    ]
    flags += [
        f"--pretrained_model_name_or_path={make_sdxl(tmp_path / 'sdxl')}",
        "--dataloader_num_workers=1",
    ]
    alone = make_each(tmp_path, flags)
    precompute(*flags)
    assert read_caches(tmp_path) == alone
    assert json.loads(alone[8]["cache.json"])["features"] == ["sdxl", "ragged latents", "masks"]


def test_overflow_at_one_resolution_leaves_the_other_unchanged(tmp_path, flags, monkeypatch):
    """The batch of one resolution overflows and is encoded again, with its captions.

    That of the other resolution is kept.
    """
    encode = script.encode_images

    def overflow(encoders, pixel_values):
        latents = encode(encoders, pixel_values)
        odd = encoders.vae.dtype != script.torch.float32 and pixel_values.shape[-1] == 16
        return latents * (float("inf") if odd else 1)

    monkeypatch.setattr(script, "encode_images", overflow)
    flags += ["--mixed_precision=bf16", "--model_family=prx"]
    alone = make_each(tmp_path, flags)
    precompute(*flags)
    assert read_caches(tmp_path) == alone
    again = [json.loads(alone[side]["cache.json"])["encoded_again"] for side in (8, 16)]
    assert again == [0, 10] and alone[8]["empty_prompt.npy"] == alone[16]["empty_prompt.npy"]


@pytest.mark.parametrize("num_processes", [1, pytest.param(2, marks=pytest.mark.long)])
def test_a_killed_run_of_several_resolutions_resumes_to_the_same_bytes(
    tmp_path, flags, num_processes
):
    alone, encode = make_each(tmp_path, flags), script.encode

    def slow(*args):
        time.sleep(0.02)
        return encode(*args)

    def run():
        script.encode = slow
        precompute(*flags)

    shards = lambda: len(list((tmp_path / "out").glob("*/data-*")))
    for attempt, moment in enumerate(random.Random(num_processes).sample(range(7), 3)):
        pids = start(run, num_processes, log=tmp_path / "log")
        wait_until(lambda moment=moment: shards() > moment)
        time.sleep(0.01 * attempt)
        kill(pids)
    assert finish(start(run, num_processes, log=tmp_path / "log")) == [0] * num_processes, (
        tmp_path / "log"
    ).read_text()
    assert read_caches(tmp_path) == alone


def test_several_resolutions_encode_only_missing_and_damaged_shards(tmp_path, flags, monkeypatch):
    """One cache has a damaged shard and one lacks two.

    Afterwards, a run with the stored flags encodes nothing.
    """
    alone, encoded, encode = make_each(tmp_path, flags), [], script.encode
    shutil.copytree(tmp_path / "alone-8", tmp_path / "out/8")
    shutil.copytree(tmp_path / "alone-16", tmp_path / "out/16")
    (tmp_path / "out/16/data-00001-of-00004.arrow").unlink()
    (tmp_path / "out/16/data-00003-of-00004.arrow").unlink()
    (tmp_path / "out/8/data-00003-of-00004.arrow").write_bytes(b"half")

    def watched(batch, *rest):
        encoded.append((batch["cache_index"], batch["row"]))
        return encode(batch, *rest)

    monkeypatch.setattr(script, "encode", watched)
    precompute(*flags)
    assert read_caches(tmp_path) == alone and encoded == [(1, [3, 4]), (1, [5]), (0, [9]), (1, [9])]
    encoded.clear()
    precompute(f"@{tmp_path}/out/8/run.args", f"--output_dir={tmp_path}/out/8", "--max_skipped=1")
    assert read_caches(tmp_path) == alone and encoded == []


def test_invalid_resolutions_are_refused_before_anything_is_written(tmp_path, flags, capfd):
    error = precompute.refused(*flags, "--resolution", "8", "16", "8", status=2)
    assert "--resolution 8 16 8 gives a value twice" in error
    assert "--resolution 15 is not a multiple of 2" in precompute.refused(
        *flags, "--resolution", "8", "15"
    )
    precompute(*flags, "--dry_run")
    said = capfd.readouterr().out
    assert (
        f"{tmp_path / 'out'}/8: 10 rows of 768B" in said
        and f"{tmp_path / 'out'}/16: 10 rows of 1.54kB" in said
    )
    assert not (tmp_path / "out").exists()
    precompute(*flags, "--resolution=8")
    before = contents(tmp_path / "out")
    assert "out is a cache itself: several --resolution need another folder" in precompute.refused(
        *flags
    )
    assert contents(tmp_path / "out") == before
    shutil.rmtree(tmp_path / "out")
    precompute(*flags)
    assert "holds 16 and no latent cache" in precompute.refused(*flags, "--resolution=8")


# ------------------------------------------------------------------- the batch size


def test_batch_size_auto_fits_the_largest_resolution_and_is_kept(
    tmp_path, flags, monkeypatch, capsys
):
    """The device has memory for five images of 16 px.

    The bytes are the same as with that batch size passed as a flag.
    """
    encode, tried = script.encode_images, []

    def full(encoders, pixel_values):
        tried.append(tuple(pixel_values.shape[::3]))
        if pixel_values.shape[-1] == 16 and len(pixel_values) > 5:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        return encode(encoders, pixel_values)

    monkeypatch.setattr(script, "encode_images", full)
    flags += ["--rows_per_shard=8", "--batch_size=auto"]
    precompute(*flags)
    sizes = list(dict.fromkeys(count for count, side in tried[: tried.index((5, 8))] if side == 16))
    assert sizes == [1, 2, 4, 8, 6, 5]
    said = capsys.readouterr().out
    assert " 6    too many\n" in said and "Batch size: 5\n" in said
    whole = read_caches(tmp_path)
    shutil.rmtree(tmp_path / "out")
    precompute(*flags, "--batch_size=5")
    assert read_caches(tmp_path) == whole and b"--batch_size=5" in whole[8]["run.args"]

    # A half-made cache keeps its batch size even if the memory has changed
    tried.clear()
    for path in (tmp_path / "out/8/data-00001-of-00002.arrow", tmp_path / "out/16/state.json"):
        path.unlink()
    monkeypatch.setattr(script, "encode_images", encode)
    precompute(*flags)
    assert read_caches(tmp_path) == whole and tried == []
    assert "memory, GB" not in capsys.readouterr().out


def test_batch_size_auto_writes_nothing_if_not_even_one_image_fits(tmp_path, flags, monkeypatch):
    def full(batch, *rest):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")

    monkeypatch.setattr(script, "encode", full)
    assert "not even one image fits: try --mixed_precision bf16" in precompute.refused(
        *flags, "--batch_size=auto"
    )
    assert not (tmp_path / "out").exists()


def test_batch_size_auto_on_two_processes_tries_several_sizes_together(tmp_path, flags):
    make_masked(tmp_path / "data")
    flags += [f"--train_data_dir={tmp_path / 'data'}", "--bucket_step=4", "--batch_size=auto"]
    said = precompute.fork(*flags, f"--output_dir={tmp_path / 'two'}", num_processes=2)
    assert said.count("Batch size: 3\n") == 1
    precompute(*flags, "--batch_size=3")
    assert contents(tmp_path / "two") == contents(tmp_path / "out")


def test_streaming_refuses_several_resolutions_and_batch_size_auto(flags):
    for argv, said in (
        (["8", "16"], "give one --resolution"),
        (["8", "--batch_size=auto"], "--batch_size auto needs"),
    ):
        assert said in precompute.refused(*flags, "--streaming", "--resolution", *argv, status=2)
