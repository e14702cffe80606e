"""The five commands of the guide, from a table of URLs to a pipeline, each killed once.

A local web server and a local S3 server are used.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile

import diffusers
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conftest import (
    ROOT,
    assert_same_weights,
    checkpoints,
    finish,
    kill,
    make_models,
    read_losses,
    reset,
    start,
    wait_until,
)
from image_server import FLAGS, ImageServer

boto3 = pytest.importorskip("boto3", reason="no S3 server: pip install -r requirements-dev.txt")
pytest.importorskip("ray", reason="needs requirements-ray.txt")
import download_images  # noqa: E402
import train_text_to_image  # noqa: E402

NUM_ROWS, NUM_IMAGES = 40, 29  # every fourth row is filtered out, and one file comes twice


@pytest.fixture
def server():
    server = ImageServer()
    yield server
    server.close()


@pytest.fixture
def bucket(storage, monkeypatch):
    """bucket(prefix): {name: bytes} of the objects there; bucket.names(prefix): only their keys."""
    if storage is None:
        pytest.skip("needs moto[server]")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    client = boto3.client("s3", endpoint_url=storage, region_name="us-east-1")
    client.create_bucket(Bucket="five")

    def names(prefix):
        found = client.list_objects_v2(Bucket="five", Prefix=f"{prefix}/").get("Contents", [])
        return [entry["Key"] for entry in found]

    def read(prefix):
        bodies = {
            name: client.get_object(Bucket="five", Key=name)["Body"].read()
            for name in names(prefix)
        }
        return {name.removeprefix(f"{prefix}/"): body for name, body in bodies.items()}

    read.names = names
    return read


@pytest.fixture
def begin(tmp_path):
    """begin(script, *argv) starts a script in a process with its own session.

    If the script starts Ray, Ray's files are in /tmp.
    """
    folder, started = tempfile.mkdtemp(prefix="five-", dir="/tmp"), []
    env = {"RAY_TMPDIR": folder, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}

    def start(script, *argv):
        with open(tmp_path / "log", "a") as log:
            command = [sys.executable, ROOT / script, *argv]
            options = {"stdout": log, "stderr": log, "cwd": tmp_path, "start_new_session": True}
            started.append(
                subprocess.Popen(list(map(str, command)), env={**os.environ, **env}, **options)
            )
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.long
def test_the_guides_five_commands_give_the_same_results_after_kills(
    tmp_path, server, bucket, begin
):
    """The trial, the download, the cache, the training and the picture."""
    said = lambda: (tmp_path / "log").read_text()[-3000:]

    def run(script, *argv):
        assert begin(script, *argv).wait(300) == 0, said()

    def run_killed(is_time, script, *argv):
        process = begin(script, *argv)
        wait_until(lambda: is_time() or process.poll() is not None, 200)
        assert process.poll() is None, said()
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        run(script, *argv)

    def fork(module, *argv):
        """Run a script without Ray in a fork, which has all imports already."""

        def work():
            reset()
            os.chdir(tmp_path)
            download_images.run_items = lambda items, *shared: (
                download_images.download_shard(item, *shared) for item in items
            )
            module.main(module.parse_args([str(arg) for arg in argv]))

        return start(work, log=tmp_path / "log")

    urls = [f"{server.url}/image/{10 if i == 17 else i}" for i in range(NUM_ROWS)]
    captions = [f"a digit {'zero one two'.split()[i % 3]}" for i in range(NUM_ROWS)]
    table = {
        "url": urls,
        "text": captions,
        "similarity": [0.1 if i % 4 == 3 else 0.5 for i in range(NUM_ROWS)],
    }
    pq.write_table(pa.table(table), tmp_path / "urls.parquet")
    download = ["--input=urls.parquet", "--where=similarity > 0.3", *FLAGS, "--num_cpus=2"]

    # 1. A trial
    assert finish(fork(download_images, *download, "--limit=3", "--output_dir=trial")) == [0], (
        said()
    )
    assert len(pq.read_table(next((tmp_path / "trial").glob("*.parquet")))) == 3

    # 2. Images
    download += ["--rows_per_shard=4", "--skip_repeated"]
    assert finish(fork(download_images, *download, "--output_dir=s3://five/images")) == [0], said()
    server.delay = 0.2
    done = lambda: sum("/records/" in name for name in bucket.names("killed-images")) >= 2
    run_killed(done, "download_images.py", *download, "--output_dir=s3://five/killed-images")
    images = bucket("images")
    assert (
        bucket("killed-images") == images
        and json.loads(images["__download__/summary.json"])["images"] == NUM_IMAGES
    )

    # 3. A latent cache
    cache = [
        "precompute_latents_ray.py",
        "--train_data_dir=s3://five/images",
        "--resolution=16",
        "--rows_per_shard=6",
    ]
    cache += [
        f"--pretrained_model_name_or_path={make_models(tmp_path)}",
        "--batch_size=2",
        "--num_encoders=1",
    ]
    run(*cache, "--output_dir=s3://five/latents")
    done = lambda: sum(".json" in name for name in bucket.names("killed-latents/unfinished")) >= 1
    run_killed(done, *cache, "--output_dir=s3://five/killed-latents")
    latents = bucket("latents")
    assert (
        bucket("killed-latents") == latents
        and sum(name.endswith(".arrow") for name in latents) == 5
    )

    # 4. A pipeline
    train = ["--latents_dir=s3://five/latents", "--pretrained_model_name_or_path=sd"]
    train += [
        "--train_batch_size=2",
        "--num_train_epochs=4",
        "--checkpointing_steps=5",
        "--use_ema",
        "--logging_steps=1",
    ]
    train += [
        "--report_to=none",
        "--resume_from_checkpoint=latest",
        "--validation_prompts=a digit one",
    ]
    train += ["--num_inference_steps=2"]
    assert finish(
        fork(train_text_to_image, *train, "--output_dir=whole", "--shards_dir=shards")
    ) == [0], said()
    killed, train = (
        tmp_path / "killed",
        [*train, "--output_dir=killed", "--shards_dir=killed-shards"],
    )
    pids = fork(train_text_to_image, *train)
    wait_until(lambda: killed.exists() and checkpoints(killed))
    kill(pids)
    assert not (killed / "unet").exists() and finish(fork(train_text_to_image, *train)) == [0], (
        said()
    )
    assert_same_weights(tmp_path / "whole/unet", killed / "unet")
    losses = [read_losses(tmp_path / name) for name in ("whole", "killed")]
    assert losses[0] == losses[1] and len(losses[0]) == 4 * 15

    # 5. A picture
    pipeline = diffusers.DiffusionPipeline.from_pretrained(killed)
    pipeline.set_progress_bar_config(disable=True)
    picture = pipeline(
        "a digit one", height=16, width=16, num_inference_steps=2, output_type="np"
    ).images
    assert picture.shape == (1, 16, 16, 3) and np.isfinite(picture).all()
