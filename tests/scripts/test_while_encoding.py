"""--follow: a trainer beside the script that makes its cache has the bits of a later one."""

import os
import random
import re
import signal
import time

import pytest
from conftest import (
    MODELS,
    Script,
    checkpoints,
    finish,
    has_ended,
    kill,
    make_captioned,
    make_models,
    metrics,
    patch,
    read_files,
    start,
    upload,
    wait_until,
)
from test_storage import assert_same_end

from diffusion_training.latents import (
    follow,  # noqa: F401  a run imports it late, after `patch`
    stream,
)

precompute = Script("precompute_latents")
train = Script("train_text_to_image")
pytestmark = pytest.mark.usefixtures("without_figures")
NUM_ROWS, ROWS_PER_SHARD = 15, 2  # 8 shards
BROKEN = (0, 6, 7, 11)  # images that can't be decoded


@pytest.fixture
def flags(tmp_path, monkeypatch):
    """(flags of the cache, flags of the trainer), without their folders."""
    monkeypatch.setattr(stream, "LEAST_RANGES", 4)
    patch(monkeypatch, "POLL", 0.02)
    make_captioned(tmp_path / "images", NUM_ROWS)
    for number in BROKEN:
        (tmp_path / "images" / f"{number}.png").write_bytes(b"no image")
    cache = [
        *precompute.flags(""),
        f"--train_data_dir={tmp_path / 'images'}",
        f"--pretrained_model_name_or_path={MODELS}",
        f"--rows_per_shard={ROWS_PER_SHARD}",
        "--max_skipped=0.5",
        "--random_flip",
    ]
    trained = [
        f"--pretrained_model_name_or_path={make_models(tmp_path)}",
        "--num_train_epochs=2",
        "--checkpointing_steps=2",
        "--train_batch_size=2",
        "--random_flip",
        "--holdout=2",
        "--follow=5",
        "--resume_from_checkpoint=latest",
    ]
    return cache, train.flags("", *trained)


def make(folder, cache_flags, shard=None, until=lambda: True):
    """In a fork: make the cache, and wait before each shard from a number on."""
    encode = precompute.module.encode

    def encode_late(batch, *args):
        if shard is not None and batch["row"][0] >= ROWS_PER_SHARD * shard:
            wait_until(until)
        return encode(batch, *args)

    precompute.module.encode = encode_late
    precompute(*cache_flags, f"--output_dir={folder}")


def assert_same_run(one, other):
    assert_same_end(one, other)
    held_out = [
        [r["held_out_loss"] for r in metrics(folder) if "held_out_loss" in r]
        for folder in (one, other)
    ]
    assert held_out[0] == held_out[1] != []


def read_cache(folder):
    return {name: data for name, data in read_files(folder).items() if name != "run.args"}


def test_a_trainer_that_starts_first_has_the_bits_of_one_that_starts_last(tmp_path, flags):
    """It waits for the first shards, later ones come while it trains, and both are killed once."""
    cache_flags, flags = flags
    cache, out, log = tmp_path / "cache", tmp_path / "out", tmp_path / "log"
    log.touch()
    flags = [*flags, f"--latents_dir={cache}"]
    begin = lambda: start(lambda: train(*flags, f"--output_dir={out}"), 1, log)
    trainer = begin()
    wait_until(lambda: "Waiting for cache.json" in log.read_text())
    maker = start(lambda: make(cache, cache_flags, 7, lambda: False))
    # two batches are encoded before one is written
    wait_until(lambda: "Waiting for data-00005-of-00008.arrow" in log.read_text())
    wait_until(lambda: checkpoints(out))
    assert not (cache / "data-00005-of-00008.arrow").exists()
    kill([*maker, *trainer])
    log.write_text("")
    trainer = begin()
    waits_again = lambda: "Waiting for data-00005" in log.read_text()
    maker = start(lambda: make(cache, cache_flags, 5, lambda: waits_again() and not time.sleep(1)))
    assert finish([*maker, *trainer]) == [0, 0]
    said = log.read_text()
    assert "Held out: 2 of 15 images" in said and "Epoch: 13 images, 7 steps" in said
    assert (cache / "skipped.jsonl").read_text().count("\n") == 4

    files = read_cache(cache)
    train.fork(*flags, f"--output_dir={tmp_path / 'later'}")
    assert_same_run(tmp_path / "later", out)
    waited = sum(
        record["data_wait"] * 2 / record["images_per_second"]
        for record in metrics(out)
        if "loss" in record
    )
    assert waited > 1  # second
    assert read_cache(cache) == files


def test_a_run_whose_cache_stands_still_saves_and_ends_with_the_reason(tmp_path, flags):
    """On two processes; a signal ends a wait too, and the whole cache gives the same bits."""
    cache_flags, flags = flags
    cache, out, log = tmp_path / "cache", tmp_path / "out", tmp_path / "log"
    flags = [*flags, f"--latents_dir={cache}", f"--output_dir={out}"]
    flags += ["--checkpointing_steps=100", "--train_batch_size=1"]
    maker = start(lambda: make(cache, cache_flags, 7, lambda: False), 1, log)
    wait_until(lambda: (cache / "unfinished" / "data-00004-of-00008.arrow.json").exists())
    kill(maker)
    said = train.fork(*flags, "--follow=0.05", num_processes=2, status=1)
    sentence = f"no shard has come to {cache} for 0.05 minutes (--follow), and data-00005-of-00008"
    assert said.count(f"train_text_to_image.py: {sentence}") == 1 and "Traceback" not in said
    assert re.search(r"the same command continues from step [12]\n", said)
    assert len(checkpoints(out)) == 1

    trainers = start(lambda: train(*flags), 2, log)
    wait_until(lambda: "Waiting for data-00005-of-00008.arrow" in log.read_text())
    os.kill(trainers[0], signal.SIGTERM)
    assert finish(trainers) == [143, 143]
    precompute(*cache_flags, f"--output_dir={cache}")
    train.fork(*flags, num_processes=2)
    train.fork(*flags, f"--output_dir={tmp_path / 'later'}", num_processes=2)
    assert_same_run(tmp_path / "later", out)


@pytest.mark.long
@pytest.mark.parametrize("num_processes", [1, 2])
def test_a_cache_that_is_made_at_an_address_trains_like_one_on_a_disk(
    tmp_path, flags, storage, num_processes
):
    """The trainer is killed while it waits for a shard."""
    if storage is None:
        pytest.skip("no S3 server")
    cache_flags, flags = flags
    cache, out, log = tmp_path / "cache", tmp_path / "out", tmp_path / "log"
    bucket = tmp_path.name.lower().replace("_", "-")[-50:]
    there = [f"--latents_dir=s3://{bucket}/cache", f"--shards_dir={tmp_path / 'shards'}"]
    flags = [*flags, f"--train_batch_size={2 // num_processes}"]
    begin = lambda: start(lambda: train(*flags, *there, f"--output_dir={out}"), num_processes, log)
    maker = start(lambda: make(cache, cache_flags, 7, lambda: False))
    wait_until(lambda: (cache / "unfinished" / "data-00004-of-00008.arrow.json").exists())
    kill(maker)
    upload(cache, storage, bucket)
    trainers = begin()
    wait_until(lambda: "Waiting for data-00005-of-00008.arrow" in log.read_text())
    wait_until(lambda: checkpoints(out))
    kill(trainers)
    trainers = begin()
    precompute(*cache_flags, f"--output_dir={cache}")
    upload(cache, storage, bucket)
    assert finish(trainers) == [0] * num_processes, log.read_text()
    later = [f"--latents_dir={cache}", f"--output_dir={tmp_path / 'later'}"]
    train.fork(*flags, *later, num_processes=num_processes)
    assert_same_run(tmp_path / "later", out)


def train_slowly(flags):
    """In a fork: train, half a second for a step."""
    take_step = train.module.train_step
    train.module.train_step = lambda *args: (time.sleep(0.5), take_step(*args))[1]
    train(*flags)


@pytest.mark.long
def test_twenty_kills_of_each_do_not_change_the_weights(tmp_path, flags):
    """Both are killed at random times, and started again, in several runs."""
    cache_flags, flags = flags
    flags = [*flags, "--checkpointing_steps=1", "--checkpoints_total_limit=2"]
    precompute(*cache_flags, f"--output_dir={tmp_path / 'cache'}")
    later = tmp_path / "later"
    train.fork(*flags, f"--latents_dir={tmp_path / 'cache'}", f"--output_dir={later}")
    draw = random.Random(0)
    kills = dict.fromkeys(("maker", "trainer"), 0)
    while min(kills.values()) < 20:
        folder = tmp_path / str(kills)
        (folder / "out").mkdir(parents=True)
        cache, out = folder / "cache", folder / "out"
        works = {
            "maker": lambda: make(cache, cache_flags, 0, lambda: not time.sleep(0.5)),
            "trainer": lambda: train_slowly(
                [*flags, f"--latents_dir={cache}", f"--output_dir={out}"]
            ),
        }
        counts = {
            "maker": lambda: len([*cache.glob("data-*.arrow")]),
            "trainer": lambda: max(
                [int(path.name.split("-")[1]) for path in out.glob("checkpoint-*")] + [0]
            ),
        }
        running = {kind: start(work, 1, folder / kind) for kind, work in works.items()}
        while running:
            kind = min(running, key=kills.__getitem__)  # the maker ends long before the trainer
            if draw.random() < 0.8:  # after some work; else perhaps before any
                least = counts[kind]() + 1
                wait_until(lambda: counts[kind]() >= least or has_ended(*running[kind]))
            time.sleep(draw.uniform(0, 1))
            if has_ended(*running[kind]):
                said = (folder / kind).read_text()
                assert finish(running.pop(kind)) == [0], said
            else:
                kill(running[kind])
                kills[kind] += 1
                running[kind] = start(works[kind], 1, folder / kind)
        assert read_cache(cache) == read_cache(tmp_path / "cache")
        assert_same_run(later, out)
    print(kills)
