"""--checkpoints_to: if a machine dies with its disk, nothing that was copied is lost."""

import json
import os
import re
import shutil
import signal
import threading
import time

import numpy as np
import pytest
from conftest import (
    ROOT,
    Script,
    assert_same_weights,
    checkpoints,
    finish,
    make_images,
    metrics,
    patch,
    reset,
    start,
)

import train_unconditional as script
from diffusion_training.files import checksum_files
from diffusion_training.training.keeping.copies import Address, find_unfinished, find_whole

pytestmark = pytest.mark.usefixtures("without_figures", "quick_retries")


@pytest.fixture
def quick_retries(monkeypatch):
    """A failed copy is tried again after 0.1 s."""
    patch(monkeypatch, "RETRY", 0.1)


@pytest.fixture
def flags(tmp_path, unet_config):
    """6 steps; checkpoints, held-out losses and samples at every second one."""
    make_images(tmp_path / "images", 8)
    return [
        f"--train_data_dir={tmp_path / 'images'}",
        f"--model_config_name_or_path={unet_config}",
        f"--output_dir={tmp_path / 'out'}",
        f"--checkpoints_to={tmp_path / 'copies'}",
        "--resolution=16",
        "--holdout=2",
        "--save_best",
        "--train_batch_size=1",
        "--total_batch_size=2",
        "--max_train_steps=6",
        "--checkpointing_steps=2",
        "--validation_steps=2",
        "--save_model_epochs=100",
        "--ddpm_num_inference_steps=1",
        "--eval_batch_size=1",
        "--learning_rate=1e-3",
        "--lr_scheduler=constant",
        "--logging_steps=1",
        "--report_to=none",
        "--dataloader_num_workers=0",
    ]


MARKER = "trainer_state.json"
LATEST = "--resume_from_checkpoint=latest"


def train(*argv):
    reset()
    script.main(script.parse_args([str(arg) for arg in argv]))


def run(*argv, log, num_processes=1):
    """A run in forks; returns their exit statuses."""
    return {*finish(start(lambda: train(*argv), num_processes, log), 300)}


def assert_same_run(one, other, last):
    for path in (f"{last}/unet", f"{last}/unet_ema", "unet", "best/unet"):
        assert_same_weights(one / path, other / path)
    names = (f"{last}/optimizer.bin", "best/held_out.json")
    names += tuple(f"samples/{path.name}" for path in (one / "samples").iterdir())
    for name in names:
        assert (one / name).read_bytes() == (other / name).read_bytes(), name
    for kind in ("loss", "held_out_loss"):
        losses = [{r["step"]: r[kind] for r in metrics(out) if kind in r} for out in (one, other)]
        assert losses[0] == losses[1] != {}


def check_copies(folder):
    """Return the steps of complete checkpoints. Their bytes must be as written."""
    names = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    steps = [*find_whole(names, "checkpoint")]
    for step in steps:
        state = json.loads((folder / f"checkpoint-{step}/trainer_state.json").read_text())
        state["checksums"].pop("trainer_state.json")
        assert checksum_files(folder / f"checkpoint-{step}") == state["checksums"]
    return steps


def test_a_run_that_lost_its_disk_resumes_with_the_same_bits(tmp_path, flags, capfd):
    out, copies = tmp_path / "out", tmp_path / "copies"
    flags = [*flags, "--learning_rate=0.5"]  # the weights of step 4 are the best
    train(*flags)
    assert json.loads((out / "best/held_out.json").read_text())["step"] == 4
    assert check_copies(copies) == [2, 4, 6]
    whole = out.rename(tmp_path / "whole")
    for name in ("README.md", "metrics.jsonl", "samples/step-0000006.png"):
        assert (whole / name).exists()
    assert (copies / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
    error = r"copies holds checkpoint-6 of an earlier run: resume it with --resume_from_checkp"
    with pytest.raises(SystemExit):
        train(*flags)
    assert re.search(error, capfd.readouterr().err)
    shutil.rmtree(copies / "checkpoint-6")  # as if the machine had died before it was copied
    train(*flags, LATEST, "--checkpoints_total_limit=1")
    assert "Fetching checkpoint-4" in capfd.readouterr().out
    assert_same_run(whole, out, "checkpoint-6")
    assert check_copies(copies) == [6] and checkpoints(out) == {"checkpoint-6"}
    shutil.rmtree(out)
    train(*flags, "--resume_from_checkpoint=checkpoint-6")  # the run is done
    assert_same_run(whole, out, "checkpoint-6")


def test_a_stopped_run_waits_for_its_last_copy_or_prints_what_is_missing(
    tmp_path, flags, monkeypatch
):
    send, log = Address.send, tmp_path / "log"

    def slow(store, source, name):
        if name == "checkpoint-2/optimizer.bin":
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.5)
        send(store, source, name)

    monkeypatch.setattr(Address, "send", slow)
    assert run(*flags, "--max_train_steps=2000", log=log) == {143}
    steps = check_copies(tmp_path / "copies")
    assert f"Stopped by SIGTERM after step {steps[-1]} of 2000" in log.read_text()

    def hang(store, source, name):
        if name.startswith(("checkpoint-", "samples/")):
            threading.Event().wait()
        send(store, source, name)

    monkeypatch.setattr(Address, "send", hang)
    argv = [*flags, LATEST, f"--max_train_steps={steps[-1] + 2}", "--checkpoints_to_timeout=0.1"]
    assert run(*argv, log=log) == {0}
    lost = f"checkpoint-{steps[-1] + 2}"
    said = rf"Not copied to .*copies: {lost}, .*out still exists, the same command copies it"
    assert re.search(said, log.read_text()) and check_copies(tmp_path / "copies") == steps
    monkeypatch.undo()
    assert run(*argv, "--checkpoints_to_timeout=60", log=log) == {0}  # and it does
    assert check_copies(tmp_path / "copies")[-1] == steps[-1] + 2


def test_training_continues_when_copying_fails(tmp_path, flags, monkeypatch, capfd):
    write, failures = Address.write, iter(range(3))

    def fail(store, name, content):
        if "checkpoint-" in name and next(failures, None) is not None:
            raise OSError("503 slow down")
        write(store, name, content)

    monkeypatch.setattr(Address, "write", fail)
    train(*flags)
    assert check_copies(tmp_path / "copies") == [2, 4, 6]
    said = f"Copying to {tmp_path / 'copies'} failed (503 slow down); the run tries again later"
    assert said in capfd.readouterr().err


def test_an_unusable_checkpoints_to_is_refused_before_training(tmp_path, flags, capfd):
    (tmp_path / "file").touch()
    for to in (f"{tmp_path}/file", "nowhere://bucket/run"):
        with pytest.raises(SystemExit):
            train(*flags, f"--checkpoints_to={to}")
        assert f"--checkpoints_to {to} can't be written to" in capfd.readouterr().err
        assert not (tmp_path / "out").exists()
    for to in (tmp_path / "out", tmp_path / "out/copies", tmp_path):
        with pytest.raises(SystemExit):
            train(*flags, f"--checkpoints_to={to}")
        assert "must be separate folders: neither may be in the other" in capfd.readouterr().err
    with pytest.raises(SystemExit):
        train(*flags, f"--checkpoints_to={tmp_path}/a::b")
    assert "fsspec reads '::' in a path as two addresses" in capfd.readouterr().err


@pytest.mark.long
def test_machines_without_a_shared_folder_fetch_the_resumed_checkpoint(tmp_path, flags):
    """Two processes, each the first of its machine.

    The first one has a checkpoint that is not copied yet, and later it loses its disk.
    """
    log = tmp_path / "log"

    def job(*argv):
        os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
        train(*flags, f"--output_dir={tmp_path / os.environ['RANK']}", LATEST, *argv)

    def run_both(*argv):
        codes = {*finish(start(lambda: job(*argv), 2, log))}
        assert codes == {0}, log.read_text()

    run_both("--max_train_steps=2")
    shutil.rmtree(tmp_path / "copies/checkpoint-2")
    run_both("--max_train_steps=4")
    assert (tmp_path / "1/.tmp-fetched/checkpoint-2").exists()
    shutil.rmtree(tmp_path / "0")
    run_both()
    fetched = {path.name for path in (tmp_path / "1/.tmp-fetched").iterdir()}
    assert fetched == {"checkpoint-4", "metrics.jsonl"}
    assert check_copies(tmp_path / "copies") == [2, 4, 6]
    whole = [f"--output_dir={tmp_path / 'whole'}", f"--checkpoints_to={tmp_path / 'others'}"]
    assert run(*flags, *whole, log=log, num_processes=2) == {0}
    assert_same_run(tmp_path / "whole", tmp_path / "0", "checkpoint-6")


@pytest.mark.ci
def test_a_run_resumes_from_a_bucket(tmp_path, flags, storage, monkeypatch):
    boto3 = pytest.importorskip("boto3", reason="no S3 server")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    client = boto3.client("s3", endpoint_url=storage)
    client.create_bucket(Bucket="runs")
    log = tmp_path / "log"
    flags = [*flags, "--checkpoints_total_limit=1", LATEST]
    assert run(*flags, "--checkpoints_to=s3://no-such-bucket/run", log=log) == {1}
    assert "--checkpoints_to s3://no-such-bucket/run can't be written to" in log.read_text()
    flags += ["--checkpoints_to=s3://runs/a/run"]
    assert run(*flags, "--max_train_steps=4", log=log) == {0}, log.read_text()
    names = {item["Key"] for item in client.list_objects_v2(Bucket="runs")["Contents"]}
    names = {name.removeprefix("a/run/") for name in names}
    assert [*find_whole(names, "checkpoint")] == [4]
    client.put_object(Bucket="runs", Key="a/run/checkpoint-3/optimizer.bin", Body=b"unfinished")
    shutil.rmtree(tmp_path / "out")
    assert run(*flags, log=log) == {0}, log.read_text()
    names = {item["Key"] for item in client.list_objects_v2(Bucket="runs")["Contents"]}
    names = {name.removeprefix("a/run/") for name in names}
    assert [*find_whole(names, "checkpoint")] == [6] and not find_unfinished(names)
    assert "Fetching checkpoint-4 from s3://runs/a/run" in log.read_text()
    assert "Traceback" not in log.read_text() and "failed" not in log.read_text()


class CopiesAddress:
    """The address of the copies of a killed run, as another program sees it."""

    def __init__(self, folder, bucket=None):
        self.folder = folder
        self.bucket = bucket
        self.url = f"s3://{bucket.name}/run" if bucket else folder

    def list(self):
        """The steps of the complete checkpoints."""
        if self.bucket:
            names = {item.key.removeprefix("run/") for item in self.bucket.objects.all()}
        else:
            places = [place for place, _, files in os.walk(self.folder) if MARKER in files]
            names = {f"{os.path.relpath(place, self.folder)}/{MARKER}" for place in places}
        return [*find_whole(names, "checkpoint")]

    def check(self):
        if self.bucket:
            shutil.rmtree(self.folder, ignore_errors=True)
            for item in self.bucket.objects.all():
                path = self.folder / item.key.removeprefix("run/")
                path.parent.mkdir(parents=True, exist_ok=True)
                self.bucket.download_file(item.key, str(path))
        return check_copies(self.folder)


def kill_and_resume(tmp_path, flags, num_processes, num_kills, address):
    """Kill a run repeatedly, and mostly delete its disk. It ends like an uninterrupted run."""
    last = 4 * num_kills
    flags = [*flags, LATEST, f"--max_train_steps={last}", "--checkpointing_steps=1"]
    flags += ["--validation_steps=3", "--checkpoints_total_limit=2"]
    out, log = tmp_path / "out", tmp_path / "log"
    random = np.random.default_rng(num_processes)
    fetched, said = 0, ""
    for _ in range(num_kills):
        before = max(address.list(), default=0)
        said += Script("train_unconditional").kill_after_checkpoint(
            out, *flags, f"--checkpoints_to={address.url}", num_processes=num_processes,
            until=lambda before=before: max(address.list(), default=0) > before,
            delay=random.uniform(0, 0.3) if num_kills > 2 else 0,
        )  # fmt: skip
        assert address.check()[-1] > before
        if random.uniform() < 0.7:
            shutil.rmtree(out)
            fetched += 1
    ended = run(*flags, f"--checkpoints_to={address.url}", log=log, num_processes=num_processes)
    said += log.read_text()
    assert ended == {0} and "Traceback" not in said, said
    assert said.count("Fetching checkpoint-") >= fetched
    assert address.check() == [last - 1, last]
    names = {path.relative_to(address.folder).as_posix() for path in address.folder.rglob("*")}
    assert not find_unfinished(names) and ".tmp-" not in " ".join(names)
    whole = [f"--output_dir={tmp_path / 'whole'}", f"--checkpoints_to={tmp_path / 'others'}"]
    assert run(*flags, *whole, log=log, num_processes=num_processes) == {0}
    assert_same_run(tmp_path / "whole", out, f"checkpoint-{last}")


def test_slurm_leaves_enough_time_for_the_last_copy():
    text = (ROOT / "accelerate_configs/slurm.sh").read_text()
    (notice,) = re.findall(r"--signal=TERM@(\d+)", text)
    (wait,) = re.findall(r"export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=(\d+)", text)
    timeout = script.parse_args([]).checkpoints_to_timeout
    assert int(notice) > int(wait) > timeout + 30  # the step and the checkpoint


def test_a_run_killed_with_its_disk_ends_with_the_same_bits(tmp_path, flags):
    kill_and_resume(tmp_path, flags, 1, 2, CopiesAddress(tmp_path / "copies"))


@pytest.mark.long
@pytest.mark.parametrize("num_processes, store", [(1, "disk"), (2, "disk"), (2, "bucket")])
def test_a_run_killed_100_times_with_its_disk_ends_with_the_same_bits(
    tmp_path, flags, num_processes, store, storage, monkeypatch
):
    """KILLS=5 for fewer."""
    bucket = make_bucket(storage, "killed", monkeypatch) if store == "bucket" else None
    address = CopiesAddress(tmp_path / "copies", bucket)
    kill_and_resume(tmp_path, flags, num_processes, int(os.environ.get("KILLS", 100)), address)


@pytest.mark.long
@pytest.mark.parametrize("num_processes", [1, 2])
def test_a_run_killed_40_times_beside_a_faulty_bucket_ends_with_the_same_bits(
    tmp_path, flags, num_processes, storage, faulty, monkeypatch
):
    """Each fifth request of the bucket fails. KILLS=5 for fewer."""
    faulty({"": 0.2})
    # of its own, since the server keeps what an earlier test has copied
    bucket = make_bucket(storage, f"killed-{num_processes}-faulty", monkeypatch)
    address = CopiesAddress(tmp_path / "copies", bucket)
    kill_and_resume(tmp_path, flags, num_processes, int(os.environ.get("KILLS", 40)), address)


def make_bucket(storage, name, monkeypatch):
    boto3 = pytest.importorskip("boto3", reason="no S3 server")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    return boto3.resource("s3", endpoint_url=storage).create_bucket(Bucket=name)
