"""Training from a cache in a bucket, with kills and a faulty server."""

import contextlib
import json
import os
import shutil
import time

import pytest
from conftest import (
    MODELS,
    Script,
    assert_same_weights,
    checkpoints,
    finish,
    has_ended,
    make_captioned,
    make_models,
    metrics,
    patch,
    start,
    upload,
    wait_until,
)
from test_train_text_to_image import EXACT

from diffusion_training.latents import stream

boto3 = pytest.importorskip("boto3", reason="no S3 server: pip install -r requirements-dev.txt")
precompute = Script("precompute_latents")
train = Script("train_text_to_image")
pytestmark = pytest.mark.usefixtures("without_figures")
NUM_ROWS, ROWS_PER_SHARD = 23, 2


@pytest.fixture
def stored(tmp_path, storage, monkeypatch):
    """(flags of a short run, the address of its cache).

    The cache is a copy of tmp_path/cache, with 12 shards of 2 rows.
    """
    if storage is None:
        pytest.skip("no S3 server")
    make_captioned(tmp_path / "images", NUM_ROWS)
    data = [f"--train_data_dir={tmp_path / 'images'}", f"--pretrained_model_name_or_path={MODELS}"]
    rows = ["--batch_size=3", f"--rows_per_shard={ROWS_PER_SHARD}"]
    precompute(*precompute.flags(tmp_path / "cache", *data, *rows, "--random_flip"))
    models = f"--pretrained_model_name_or_path={make_models(tmp_path)}"
    more = [*EXACT, "--num_train_epochs=2", f"--shards_dir={tmp_path}/shards"]
    bucket = tmp_path.name.lower().replace("_", "-")[-50:]
    return train.flags(tmp_path / "out", models, *more), upload(tmp_path / "cache", storage, bucket)


@pytest.fixture
def in_ranges(monkeypatch):
    """Read caches of any size in ranges: 4 for one process, 2 for each of two."""
    patch(monkeypatch, "MOST_PERMUTED", 0)
    monkeypatch.setattr(stream, "LEAST_RANGES", 4)


def run(flags, out, *argv, **options):
    """Train to the end, in forked processes."""
    return train.fork(*flags, f"--output_dir={out}", *argv, **options)


def assert_same_run(one, other):
    assert checkpoints(one) == checkpoints(other) != set()
    assert_same_end(one, other)


def assert_same_end(one, other):
    """Equal last weights and losses; a stopped run may have more checkpoints."""
    last = max(checkpoints(one), key=lambda name: int(name.split("-")[1]))
    for part in (f"{last}/unet", f"{last}/unet_ema", "unet"):
        assert_same_weights(one / part, other / part)
    losses = [
        [(r["step"], r["loss"]) for r in metrics(folder) if "loss" in r] for folder in (one, other)
    ]
    assert losses[0] == losses[1]


def folder_bytes(folder):
    found = 0
    for place, _, names in os.walk(folder):  # ignores files that disappear meanwhile
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                found += os.path.getsize(f"{place}/{name}") * name.endswith(".arrow")
    return found


def test_a_cache_in_a_bucket_trains_to_the_bits_of_one_on_disk(tmp_path, stored):
    flags, address = stored
    run(
        flags,
        tmp_path / "disk",
        f"--latents_dir={tmp_path / 'cache'}",
        "--holdout=3",
        num_processes=2,
    )
    said = run(
        flags, tmp_path / "bucket", f"--latents_dir={address}", "--holdout=3", num_processes=2
    )
    assert_same_run(tmp_path / "disk", tmp_path / "bucket")
    assert "Held out: 3 of 23 images" in said
    (whole,) = (tmp_path / "shards").glob("whole-*")
    assert len(list(whole.glob("*.arrow"))) == 12  # it stays for the next run
    content = json.loads(
        next((tmp_path / "bucket").glob("checkpoint-*/trainer_state.json")).read_text()
    )
    assert "order" not in content["settings"]


def test_a_killed_run_that_reads_in_ranges_resumes_bit_identically(tmp_path, stored, in_ranges):
    """The run is the same from a disk and from a bucket, and the shards folder keeps its limit.

    The limit of 13 shards is for two processes. Each reads half of the 12 shards, has the windows
    of two ranges open, and keeps two shards.
    """
    (flags, address), num_processes = stored, 2
    flags = [*flags, "--shuffle_shards=1", "--holdout=3"]
    run(
        flags,
        tmp_path / "whole",
        f"--latents_dir={tmp_path / 'cache'}",
        num_processes=num_processes,
    )
    largest = max(path.stat().st_size for path in (tmp_path / "cache").glob("*.arrow"))
    flags += [
        f"--latents_dir={address}",
        f"--shards_size={13 * largest}",
        "--resume_from_checkpoint=latest",
    ]
    killed, most = tmp_path / "killed", 0
    train.kill_after_checkpoint(killed, *flags, num_processes=num_processes)
    left = [path for path in (tmp_path / "shards").glob("run-*") if path.is_dir()]
    assert len(left) == num_processes
    pids = start(
        lambda: train(*flags, f"--output_dir={killed}"), num_processes, tmp_path / "second.log"
    )
    while not has_ended(pids[0]):
        most = max(most, folder_bytes(tmp_path / "shards"))
        time.sleep(0.005)
    assert {*finish(pids)} == {0}, (tmp_path / "second.log").read_text()
    assert_same_run(tmp_path / "whole", killed)
    assert 0 < most <= 13 * largest and not any(path.exists() for path in left)


# ------------------------------------------------------------------- a server that misbehaves


@pytest.mark.ci
def test_bucket_errors_are_retried(tmp_path, stored, in_ranges, faulty, monkeypatch):
    patch(monkeypatch, "WAITS", (0.05,) * 3)
    flags, address = stored
    run(flags, tmp_path / "disk", f"--latents_dir={tmp_path / 'cache'}")
    name = "data-{:05}-of-00012.arrow".format
    faults = {
        name(0): ["503"] * 2,
        name(1): ["wrong"] * 2,
        name(2): ["gone"] * 2,
        name(3): ["cut"] * 2,
    }
    log = faulty(
        faults | {name(4): ["expired"], "cache.json": ["503"], "empty_prompt.npy": ["cut"]}
    )
    run(flags, tmp_path / "bucket", f"--latents_dir={address}", "--shards_size=1MB")
    assert_same_run(tmp_path / "disk", tmp_path / "bucket")
    asked = log.read_text().splitlines()
    for number in range(4):
        assert sum(line.startswith("GET") and line.endswith(name(number)) for line in asked) >= 3


@pytest.mark.long
def test_lasting_bucket_errors_end_the_run_and_it_resumes_later(
    tmp_path, stored, in_ranges, faulty, monkeypatch
):
    patch(monkeypatch, "WAITS", (0.05,) * 2)
    flags, address = stored
    flags = [*flags, f"--latents_dir={address}", "--num_train_epochs=1", "--checkpointing_steps=1"]
    flags += ["--resume_from_checkpoint=latest"]
    with monkeypatch.context() as m:
        m.setenv("AWS_ENDPOINT_URL", os.environ["AWS_ENDPOINT_URL"])
        faulty({"data-00005-of-00012.arrow": ["wrong"] * 100})
        told = run(flags, tmp_path / "out", status=1)
    (sentence,) = [
        line for line in told.splitlines() if line.startswith("train_text_to_image.py: ")
    ]
    assert (
        f"{address}/data-00005-of-00012.arrow can't be read" in sentence
        and "its SHA-256 is not the one in cache.json" in sentence
    )
    assert "when it can be read, the same command continues" in sentence
    assert not list((tmp_path / "shards").glob("run-*"))
    run(flags, tmp_path / "whole")
    run(flags, tmp_path / "out")
    assert_same_run(tmp_path / "whole", tmp_path / "out")


def destroy(bucket):
    """Delete a bucket; returns False if the run has just written to it."""
    bucket.objects.delete()
    try:
        bucket.delete()
    except bucket.meta.client.exceptions.ClientError:
        return False
    return True


@pytest.mark.long
@pytest.mark.parametrize("num_processes", [1, 2])
def test_a_bucket_that_vanishes_under_a_run_costs_no_saved_step(
    tmp_path, stored, in_ranges, storage, monkeypatch, num_processes
):
    """The bucket with cache and copies is deleted during a run, then made again by its owner."""
    patch(monkeypatch, "WAITS", (0.05,) * 2)
    flags, address = stored
    bucket = boto3.resource("s3", endpoint_url=storage).Bucket(address.split("/")[2])
    make_captioned(tmp_path / "more", 60)  # more than a run fetches before its first step
    data = [f"--train_data_dir={tmp_path / 'more'}", f"--pretrained_model_name_or_path={MODELS}"]
    shutil.rmtree(tmp_path / "cache")
    precompute(*precompute.flags(tmp_path / "cache", *data, "--rows_per_shard=2", "--random_flip"))
    upload(tmp_path / "cache", storage, bucket.name)
    largest = max(path.stat().st_size for path in (tmp_path / "cache").glob("*.arrow"))
    flags = [*flags, f"--latents_dir={address}", f"--shards_size={13 * largest}"]
    flags += ["--shuffle_shards=1", "--max_train_steps=24"]
    flags += [f"--checkpoints_to=s3://{bucket.name}/run", "--checkpoints_to_timeout=1"]
    flags += ["--checkpointing_steps=1", "--resume_from_checkpoint=latest"]
    whole = [f"--latents_dir={tmp_path / 'cache'}", f"--checkpoints_to={tmp_path / 'copies'}"]
    run(flags, tmp_path / "whole", *whole, num_processes=num_processes)
    out, log = tmp_path / "out", tmp_path / "log"
    ends = []
    for after in (1, 6, 12):
        pids = start(lambda: train(*flags, f"--output_dir={out}"), num_processes, log)
        numbers = lambda: (name.split("-")[-1] for name in checkpoints(out))
        saved = lambda: [int(number) for number in numbers() if number.isdigit()]
        wait_until(lambda after=after: out.exists() and max(saved(), default=0) >= after, 100)
        wait_until(lambda: destroy(bucket))
        codes, said = {*finish(pids)}, log.read_text()
        ends += codes
        assert "Traceback" not in said and max(saved()) >= after, said
        assert "The specified bucket does not exist" in said or "Could not connect" in said, said
        upload(tmp_path / "cache", storage, bucket.name)
    run(flags, out, num_processes=num_processes)
    assert_same_run(tmp_path / "whole", out)
    assert 1 in ends and {*ends} <= {0, 1, 75}, ends  # 75: because the other process has ended


# ------------------------------------------------------------------- refused flags


def test_caches_that_can_not_be_fetched_are_refused(tmp_path, stored, in_ranges):
    flags, local = stored[0], f"--latents_dir={tmp_path / 'cache'}"
    error = train.refused(*flags, local, "--latents_weights", "2")
    assert "--latents_weights can only be used with at most 0 rows" in error
    error = train.refused(*flags, f"--latents_dir={tmp_path / 'none'}")
    assert "none/cache.json is missing: make the cache with precompute_latents.py" in error
    flags = [flag for flag in flags if "shards_dir" not in flag]
    error = train.refused(*flags, "--latents_dir=s3://a/b", status=2)
    assert "give --shards_dir, a local folder for copies of its shards" in error
