"""A trainer on Ray Train: workers come and go, and each image is drawn once per epoch."""

import collections
import contextlib
import dataclasses
import functools
import itertools
import json
import os
import queue
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types

import psutil
import pytest
from conftest import (
    ROOT,
    TRAINING,
    free_port,
    make_captioned,
    make_images,
    make_models,
    make_unet_config,
    replace,
    start_ray_node,
    wait_until,
)
from test_storage import assert_same_end

pytest.importorskip("ray", reason="Ray is not installed: pip install -r requirements-ray.txt")
# Without these Ray writes into the home folder, and sends statistics.
RAY = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}

import train_on_ray  # noqa: E402

NUM_IMAGES = 12
# A trainer that records the rows of each step. An image's grey level is its row.
NOTING = """
import json, os, time
import train_unconditional
from train_unconditional import main, parse_args

take_step = train_unconditional.train_step

def note(*args):
    *before, batches, step, seed, max_grad_norm, look = args
    taken = [next(batches) for _ in range(step.micro_batches)]
    rows = [
        int(image.float().mean()) // 20
        for batch in taken
        for image, weight in zip(batch["pixel_values"], batch["weight"])
        if weight
    ]
    ranks = {name: os.environ.get(name) for name in ("MASTER_PORT", "WORLD_SIZE")}
    line = json.dumps({"step": step.number, "rows": rows, "pid": os.getpid(), **ranks})
    with open(os.environ["NOTES"], "a") as notes:
        notes.write(line + "\\n")
    time.sleep(float(os.environ.get("PACE", "0")))
    return take_step(*before, iter(taken), step, seed, max_grad_norm, look)

train_unconditional.train_step = note

if __name__ == "__main__":
    main(parse_args())
"""

# Replaces a trainer: its first run is killed, its second run ends with an error.
FAILING = """
import argparse, os, signal, sys

def parse_args(argv=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir")
    parser.add_argument("--resume_from_checkpoint")
    return parser.parse_args(argv)

if __name__ == "__main__":
    state = os.path.join(parse_args().output_dir, "checkpoint-1", "trainer_state.json")
    if os.path.exists(state):
        print(f"threads: {os.environ['OMP_NUM_THREADS']}", flush=True)
        sys.exit("\\nfailing.py: a sentence")
    os.mkdir(os.path.dirname(state))
    open(state, "w").close()
    os.kill(os.getpid(), signal.SIGKILL)
"""

# precompute_latents_ray.py, which makes the second half of a cache when it may
HELD_BACK = """
import time
from pathlib import Path

import precompute_latents_ray as script

class HeldBack(script.Encoder):
    def make(self, shard):
        may = Path(self.job.args.output_dir).with_name("may")
        while shard[0] >= 5 and not may.exists():
            time.sleep(0.1)
        return super().make(shard)

script.Encoder = HeldBack

if __name__ == "__main__":
    script.main(script.parse_args())
"""


class Run:
    """Runs of train_on_ray.py, on Ray machines that come and go."""

    def __init__(self, folder):
        self.folder = folder
        self.out = folder / "out"
        self.temp = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # short names of sockets
        self.port = free_port()
        (folder / "noting.py").write_text(NOTING)
        self.env = os.environ | RAY
        self.env |= {"NOTES": str(folder / "notes"), "PYTHONPATH": f"{ROOT}:{ROOT}/tests/children"}
        self.started = []

    def start(self, command, log):
        with open(self.folder / log, "ab") as file:
            process = subprocess.Popen(
                [str(word) for word in command],
                env=self.env,
                cwd=self.folder,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        self.started.append(process)
        return process

    def add_machine(self, *flags):
        place = [f"--address=127.0.0.1:{self.port}"]
        if not self.started:
            place = ["--head", f"--port={self.port}", f"--temp-dir={self.temp}"]
        machine = start_ray_node(self.folder, *place, *flags, env=self.env)
        self.started.append(machine)
        return machine

    def train(self, *flags, trainer="noting.py", workers=("--min_workers=1", "--max_workers=2")):
        data = [
            f"--train_data_dir={self.folder / 'images'}",
            f"--model_config_name_or_path={self.folder / 'tiny-unet'}",
            f"--output_dir={self.out}",
            "--resolution=16",
            "--train_batch_size=1",
            "--report_to=none",
            "--eval_batch_size=1",
            "--logging_steps=1",
            "--ddpm_num_inference_steps=1",
            "--lr_warmup_steps=0",
            "--checkpointing_steps=20",
            "--checkpoints_total_limit=3",
            "--mixed_precision=no",
            "--dataloader_num_workers=1",
            "--lr_scheduler=constant",
        ]
        address = [f"--address=127.0.0.1:{self.port}"] if self.started else []
        script = [sys.executable, ROOT / "train_on_ray.py", "--cpu", *workers, *address]
        return self.start([*script, "--resize_seconds=5", trainer, *data, *flags], "driver.log")

    def log(self):
        return (self.folder / "driver.log").read_text()

    def notes(self):
        path = self.folder / "notes"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines]

    def groups(self):
        """The notes of each group of trainers: one begins when the previous one has ended."""
        groups = itertools.groupby(self.notes(), lambda note: note["MASTER_PORT"] or note["pid"])
        return [list(notes) for _, notes in groups]

    def sizes(self):
        """The number of workers of each group that has taken a step, in order."""
        return [int(notes[0]["WORLD_SIZE"] or 1) for notes in self.groups()]

    def steps(self):
        """[{step: rows}] of each group."""
        found = []
        for notes in self.groups():
            found.append(collections.defaultdict(list))
            for note in notes:
                found[-1][note["step"]] += note["rows"]
        return found

    def check_rows(self, num_steps):
        """Check that the last groups to take each step drew every row once per epoch."""
        groups, drawn = self.steps(), []
        for step in range(num_steps):
            drawn += [group[step] for group in groups if step in group][-1]
        for first in range(0, len(drawn) - NUM_IMAGES + 1, NUM_IMAGES):
            assert sorted(drawn[first : first + NUM_IMAGES]) == list(range(NUM_IMAGES)), first
        return len(drawn) // NUM_IMAGES

    def checkpoints(self):
        states = self.out.glob("checkpoint-*/trainer_state.json")
        return {int(path.parent.name.split("-")[1]) for path in states}

    def find(self, word):
        """The processes of this test whose command line contains a word."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if word in " ".join(process.cmdline()) and self.is_ours(process):
                    found.append(process)
        return found

    def is_ours(self, process):
        """Whether this test started the process, even if its parents have ended."""
        with contextlib.suppress(psutil.Error):
            if any(parent.pid == each.pid for parent in process.parents() for each in self.started):
                return True
            return process.environ().get("NOTES") == self.env["NOTES"]
        return False

    def trainers(self):
        """The trainers, with their supervisors and loader processes."""
        return self.find(str(self.folder / "noting.py"))

    def find_kind(self, kind):
        """The workers, or their supervisors, the trainers of these, or the loaders of these."""
        if kind == "worker":
            return self.find("ray::RayTrainWorker")
        found = self.find("supervise()")
        for _ in range(["supervisor", "trainer", "loader"].index(kind)):
            pids = {process.pid for process in found}
            found = [process for process in self.trainers() if find_parent(process) in pids]
        return found

    def close(self):
        for process in self.started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for process in self.find(""):
            process.kill()
        shutil.rmtree(self.temp, ignore_errors=True)


@pytest.fixture
def run(tmp_path):
    make_images(tmp_path / "images", NUM_IMAGES)
    make_unet_config(tmp_path)
    run = Run(tmp_path)
    yield run
    run.close()


def find_parent(process):
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.ppid()


def kill_machine(process):
    """End a Ray machine, as if its power failed. Its trainers live a moment longer."""
    for child in [psutil.Process(process.pid), *psutil.Process(process.pid).children(True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    process.wait()


def refuse(capsys, *argv):
    with pytest.raises(SystemExit) as stop:
        train_on_ray.parse_args([str(arg) for arg in argv])
    assert stop.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


def test_train_on_ray_reports_bad_flags_in_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "failing.py").write_text(FAILING)
    (tmp_path / "plain.py").write_text("")
    (tmp_path / "letter.txt").write_text("")
    # another module with the script's name is not used
    (tmp_path / "other").mkdir()
    (tmp_path / "other/failing.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path / "other")
    two = "--max_workers=2"
    for script in ("nothing.py", "letter.txt", tmp_path, f"{'a' * 300}.py"):
        assert f"{script} is not a trainer: give the path of a file" in refuse(capsys, two, script)
    (tmp_path / "no_list.py").write_text("def parse_args(): pass")
    (tmp_path / "number.py").write_text("parse_args = 5")
    for script in ("plain.py", "no_list.py", "number.py"):
        said = refuse(capsys, two, script)
        assert f"{script} is not a trainer: it has no parse_args that takes a list" in said
    text = "import argparse\n\ndef parse_args(argv): return argparse.Namespace()"
    (tmp_path / "no_resume.py").write_text(text)
    said = refuse(capsys, two, "no_resume.py")
    assert "no_resume.py is not a trainer: it has no --resume_from_checkpoint" in said
    text = text.replace("()", "(resume_from_checkpoint=None)")
    (tmp_path / "no_output.py").write_text(text)
    assert "it has no --output_dir" in refuse(capsys, two, "no_output.py")
    for name, text in {"open": "x = (", "null": "x = 1\0", "coded": "# coding: nonsense"}.items():
        (tmp_path / f"{name}.py").write_text(text)
        said = refuse(capsys, two, f"{name}.py")
        assert f"{name}.py can't be read: " in said and "Traceback" not in said
    said = refuse(capsys, two, "--min_workers=3", "failing.py", "--output_dir=out")
    assert "--min_workers 3 exceeds --max_workers 2" in said
    # errors of the trainer's flags, before Ray starts
    assert "unrecognized arguments: --typo" in refuse(capsys, two, "failing.py", "--typo")
    resume = "--resume_from_checkpoint=checkpoint-3"
    said = refuse(capsys, two, "failing.py", "--output_dir=out", resume)
    assert "leave --resume_from_checkpoint checkpoint-3 out" in said
    gone = "--output_dir=/tmp/ray/session/working_dir_files/x/out"
    assert "give an absolute --output_dir" in refuse(capsys, two, "failing.py", gone)
    assert list(tmp_path.glob("out*")) == []
    args = train_on_ray.parse_args([two, "failing.py", "--output_dir", "out"])
    assert (args.script, args.output_dir) == (str(tmp_path / "failing.py"), str(tmp_path / "out"))
    # found beside the script, from any folder
    monkeypatch.chdir(ROOT)
    demo = train_on_ray.parse_args([])
    assert (demo.max_workers, demo.cpu, demo.output_dir) == (2, True, str(ROOT / "ddpm-digits"))
    args = train_on_ray.parse_args([two, "train_unconditional.py"])
    assert args.script == str(ROOT / "train_unconditional.py")


def test_a_single_worker_ignores_the_ranks_of_another_launcher(tmp_path, monkeypatch):
    """For example, a job of two machines has started Ray on them."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"):
        monkeypatch.setenv(name, "2")
    monkeypatch.setenv("KEPT", "2")
    context = types.SimpleNamespace(get_world_rank=lambda: 0, get_world_size=lambda: 1)
    monkeypatch.setattr(train_on_ray.ray.train, "get_context", lambda: context)
    monkeypatch.setattr(train_on_ray.ray.util, "get_node_ip_address", lambda: "10.0.0.1")
    monkeypatch.setattr(train_on_ray, "broadcast_from_rank_zero", lambda value: value)
    job = train_on_ray.RayJob("", [], "", str(tmp_path), "token", "host", True, 1)
    job.shared.mkdir()
    found = train_on_ray.join_group(job, queue.SimpleQueue())
    assert found["KEPT"] == "2" and found["ACCELERATE_USE_CPU"] == "true"
    assert not found.keys() & {*train_on_ray.RANKS}


@pytest.mark.parametrize("flags, words", [
    (["--cpu", "--min_workers=5"], "1 GPUs, enough for 4 workers (1 CPU each), but --min"),
    (["--cpus_per_worker=2", "--min_workers=2"], "for 1 worker (2 CPU and a GPU each), but --min"),
    (["--cpu", "--min_workers=4"], ""),
    (["--cpus_per_worker=3", "--min_workers=1"], ""),
])  # fmt: skip
def test_check_resources_refuses_or_waits_for_too_few_cpus_or_gpus(
    monkeypatch, capsys, flags, words
):
    nodes = [{"CPU": 3, "GPU": 1}, {"CPU": 1}, {"CPU": 64}]
    nodes = [{"Resources": node, "Alive": node["CPU"] < 64} for node in nodes]
    monkeypatch.setattr(train_on_ray.ray, "nodes", lambda: nodes)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    flags = [*flags, "--max_workers=9", "train_unconditional.py"]
    args = train_on_ray.parse_args(flags)
    with pytest.raises(SystemExit) if words else contextlib.nullcontext() as stop:
        train_on_ray.check_resources(args)
    assert not words or words in str(stop.value)
    # a cluster may grow
    train_on_ray.check_resources(replace(args, address="a:1"))
    assert words in capsys.readouterr().out


def make_job(tmp_path, **changes):
    values = dict.fromkeys(field.name for field in dataclasses.fields(train_on_ray.RayJob))
    values |= {"folder": str(tmp_path), "output_dir": str(tmp_path / "out"), "token": "t"}
    return train_on_ray.RayJob(**values | {"host": "first", "script": "train_x.py"} | changes)


def test_the_last_record_is_found_before_damaged_ones(tmp_path):
    assert train_on_ray.read_last_record(tmp_path) == {}
    lines = ['{"step": 3, "loss": 0.5}', '{"step": "x", "loss": 1.5}', "5", "[" * 10**4, '{"lo']
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    assert train_on_ray.read_last_record(tmp_path) == {"step": 3, "loss": 0.5}


def test_find_unshared_names_folders_missing_on_a_machine(tmp_path):
    job = make_job(tmp_path)
    lock = train_on_ray.make_shared(job)
    assert train_on_ray.find_unshared(job) is None
    with pytest.raises(SystemExit, match="another process is writing to .*out: end it"):
        train_on_ray.make_shared(job)
    lock.release()
    missing = make_job(tmp_path, token="of another folder")
    assert train_on_ray.find_unshared(missing) == f"--output_dir {tmp_path / 'out'}"
    event = train_on_ray.run_trainer(missing, {})
    assert event.kind == "failed" and "of first is missing on " in event.text
    missing = make_job(tmp_path, folder="/none")
    assert train_on_ray.find_unshared(missing) == "the folder /none"


@pytest.mark.parametrize("status, kind, words", [
    (0, None, ""), (-9, "lost", "was ended by SIGKILL"), (143, "lost", "was ended by SIGTERM"),
    (75, "lost", "because another worker ended"), (2, "failed", "train_x.py: one sentence"),
    (1, "failed", "train_x.py: one sentence"), (137, "lost", "was ended by SIGKILL"),
])  # fmt: skip
def test_interpret_end_classifies_exit_statuses_of_a_trainer(status, kind, words):
    printed = "train_x.py: a warning\n\ntrain_x.py: one sentence\nSteps: 1%\rframe #19: clone\n"
    event = train_on_ray.interpret_end(status, printed, "mine.py")  # which imports train_x.py
    assert (event and event.kind) == kind and words in (event.text if event else "")
    if status == 1:
        event = train_on_ray.interpret_end(1, "Traceback\nx.py:3: y\nKeyError: 3\n\n", "it")
        assert event.text == "it ended with status 1: KeyError: 3"


@pytest.mark.parametrize("is_over", [False, True])
def test_run_trainer_reports_the_last_words_and_stops_when_the_job_is_over(
    tmp_path, monkeypatch, capsys, is_over
):
    """Of an earlier trainer, the log has other words."""
    script = tmp_path / "trainer.py"
    code = "import sys, time; print('before'); sys.stderr.write('KeyError: 3\\n')\n"
    script.write_text(code + ("time.sleep(60)" if is_over else "print('last'); sys.exit(3)"))
    context = types.SimpleNamespace(get_world_rank=lambda: 1)
    monkeypatch.setattr(train_on_ray.ray.train, "get_context", lambda: context)
    job = make_job(tmp_path, script=str(script), flags=[], save_seconds=20)
    train_on_ray.make_shared(job).release()
    job.log(1).write_text("trainer.py: earlier\n")
    if is_over:
        job.over.touch()
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    event = train_on_ray.run_trainer(job, environment)
    if is_over:
        assert event.kind == "lost" and "was ended by SIGTERM" in event.text
        return
    host = socket.gethostname()
    assert event.text == f"trainer.py of worker 1 on {host} ended with status 3: last"
    assert capsys.readouterr().out == "before\nKeyError: 3\nlast\n"


class Events:
    """Replaces the queue between workers and driver."""

    def __init__(self, *events):
        self.events = [train_on_ray.Event(*event) for event in events]

    def empty(self):
        return not self.events

    def get(self):
        """Ray's queue prints an error of its own if a signal ends a `get` with a timeout."""
        return self.events.pop(0)


def test_watch_exports_the_workers_and_the_last_record(tmp_path, monkeypatch):
    values = {}

    class Gauge:
        def __init__(self, name, description):
            self.set = functools.partial(values.__setitem__, name.removeprefix("train_on_ray_"))

    monkeypatch.setattr("ray.util.metrics.Gauge", Gauge)
    job = make_job(tmp_path)
    train_on_ray.make_shared(job).release()
    events = Events(("started", "2 workers", 2), ("started", "3 workers", 3))
    train_on_ray.watch(threading.Thread(), job, events, 9)
    assert values == {"workers": 3, "starts": 2}
    lines = [{"step": i, "loss": i / 2, "images_per_second": 7.0} for i in range(3000)]
    lines += [{"step": 3000, "held_out_loss": 1.0}]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "out/metrics.jsonl").write_text(text + '{"step": 3001, "lo')
    train_on_ray.watch(threading.Thread(), job, Events(), 9)
    recorded = {"step": 2999, "loss": 1499.5, "images_per_second": 7.0}
    assert values == {"workers": 3, "starts": 2} | recorded


def test_watch_stops_without_new_checkpoints_or_on_a_trainers_error(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(train_on_ray.time, "sleep", lambda seconds: None)
    job = make_job(tmp_path)
    train_on_ray.make_shared(job).release()
    over = threading.Thread()  # a thread that does not run
    start, lost = ("started", "2 workers"), ("lost", "it was ended by SIGKILL")
    train_on_ray.watch(over, job, Events(start, lost, start, lost, start), 2)
    with pytest.raises(SystemExit, match="started 3 times without a new checkpoint; the last re"):
        train_on_ray.watch(over, job, Events(start, lost, start, lost, start), 1)
    failed = [("failed", "it ended with status 1: x"), ("failed", "train_x.py: a sentence")]
    capsys.readouterr()
    with pytest.raises(SystemExit, match="^train_x.py: a sentence"):
        train_on_ray.watch(over, job, Events(start, *failed), 1)
    job.log(0).write_text("\ntrain_x.py: a sentence\n")
    with pytest.raises(SystemExit, match="^1$"):  # it is printed once
        train_on_ray.watch(over, job, Events(start, *failed), 1)
    assert capsys.readouterr().out.count("a sentence") == 1


@pytest.mark.ci
def test_a_killed_trainer_is_restarted_and_an_error_ends_the_job(run):
    (run.folder / "failing.py").write_text(FAILING)
    run.env.pop("OMP_NUM_THREADS")  # then Ray sets it
    command = [sys.executable, ROOT / "train_on_ray.py", "--cpu", "--max_workers=1"]
    command += ["--cpus_per_worker=2", "failing.py", f"--output_dir={run.out}"]
    driver = run.start(command, "driver.log")
    assert driver.wait(600) == 1
    said = run.log()
    assert said.count("Ray: 1 worker\n") == 2 and said.count("was ended by SIGKILL") == 1, said
    assert said.count("failing.py: a sentence") == 1 and "threads: 2" in said, said
    assert "Traceback" not in said
    assert sorted(path.name for path in run.out.iterdir()) == [".lock-ray", "checkpoint-1"]


@pytest.mark.long
def test_a_stopped_or_killed_driver_saves_and_leaves_no_process(run):
    begin = time.time()
    for number, status in (signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9):
        before = run.checkpoints()
        driver = run.train("--max_train_steps=100000")
        wait_until(lambda: driver.poll() is not None or run.checkpoints() - before, 300)
        driver.send_signal(number)
        stopped = time.time()
        assert driver.wait(120) == status, run.log()
        wait_until(lambda: not run.find(""), 60)
        print(
            f"{time.time() - begin:.0f} s: {number.name}, {time.time() - stopped:.1f} s to the end"
        )
        assert max(run.checkpoints()) == max(run.steps()[-1]) + 1
        assert (run.out / ".ray").exists() == (number == signal.SIGKILL)
        run.started.clear()
    assert run.sizes() == [2, 2, 2]
    assert [min(group) for group in run.steps()[1:]] == [max(x) + 1 for x in run.steps()[:-1]]


@pytest.mark.long
@pytest.mark.parametrize("delay", [1, 5, 9])
def test_sigterm_while_the_workers_start_ends_with_143(run, delay):
    driver = run.train("--max_train_steps=100000")
    wait_until(lambda: driver.poll() is not None or (run.out / ".ray").exists(), 300)
    time.sleep(delay)
    driver.terminate()
    assert driver.wait(120) == 143, run.log()
    assert "Stopped by SIGTERM" in run.log() and "Unhandled error" not in run.log()
    wait_until(lambda: not run.find(""), 60)
    assert not (run.out / ".ray").exists()


@pytest.mark.long
def test_each_image_is_drawn_once_per_epoch_while_machines_come_and_go(run):
    run.add_machine()
    other = run.add_machine()
    driver = run.train("--max_train_steps=100000")
    begin = time.time()

    def wait_for(what, condition):
        wait_until(lambda: driver.poll() is not None or condition(), 300)
        assert driver.poll() is None, run.log()
        print(f"{time.time() - begin:4.0f} s: {what}", flush=True)

    wait_for("2 workers have saved", lambda: run.sizes() == [2] and run.checkpoints())
    before = run.trainers()
    kill_machine(other)
    wait_for("a machine was lost: 1 worker", lambda: run.sizes()[1:] == [1])
    assert not any(process.is_running() for process in before)
    run.add_machine()
    wait_for("a machine came: 2 workers", lambda: run.sizes()[2:] == [2])
    # the trainers were told and saved, so no step was lost
    one, two = run.steps()[1:]
    assert min(two) == max(one) + 1

    before = run.trainers()
    run.find("ray::RayTrainWorker")[0].kill()
    wait_for("a worker was killed", lambda: run.sizes()[3:] == [2])
    assert not any(process.is_running() for process in before)
    before = run.trainers()
    wait_for("they have saved", lambda: max(run.checkpoints()) > max(run.steps()[2]) + 1)
    run.find_kind("trainer")[0].kill()
    wait_for("a trainer was killed", lambda: run.sizes()[4:] == [2])
    assert not any(process.is_running() for process in before)

    os.killpg(driver.pid, signal.SIGTERM)
    assert driver.wait(120) == 143
    assert not run.trainers() and not (run.out / ".ray").exists()
    groups = run.steps()
    assert max(run.checkpoints()) == max(groups[-1]) + 1
    print(f"{run.check_rows(max(run.checkpoints()))} epochs, {len(groups)} groups")


@pytest.mark.long
@pytest.mark.parametrize("min_workers", [2, 1])
def test_random_kills_on_ray_train_do_not_change_rows_and_bits(run, min_workers):
    """Kill processes, a machine and the driver KILLS times (default: 10).

    A run ends by itself after some kills, and then another one begins. With two workers at each
    step it has the bits of an undisturbed run.
    """
    num_kills, num_steps, rng = int(os.environ.get("KILLS", 10)), 60, random.Random(min_workers)
    kinds = ["worker", "supervisor", "trainer", "loader", "machine", "driver"]
    counts = collections.Counter(dict.fromkeys(kinds, 0))
    run.env["PACE"] = "0.1"
    run.add_machine()
    machine = run.add_machine()

    def begin():
        (run.folder / "driver.log").unlink(missing_ok=True)
        steps = ["--checkpointing_steps=10", f"--max_train_steps={num_steps}"]
        workers = [f"--min_workers={min_workers}", "--max_workers=2", "--max_failures=99"]
        return run.train(*steps, workers=workers)

    def read_weights():
        """The result, and the last checkpoint. A group that was told to save has written others."""
        found = [*run.out.rglob("*.safetensors"), *run.out.rglob("optimizer.bin")]
        names = {path.relative_to(run.out): path for path in found}
        last = f"checkpoint-{num_steps}"
        return {
            name: path.read_bytes()
            for name, path in names.items()
            if name.parts[0] in (last, "unet")
        }

    def judge():
        """Check a driver that ended by itself: it is done, or names a killed loader process."""
        assert "Traceback" not in run.log(), run.log()
        counts[f"ended with status {driver.returncode}"] += 1
        if driver.returncode:
            sentence = ".py: a process that loads data was killed"
            assert driver.returncode == 1 and sentence in run.log(), run.log()
            return
        wait_until(lambda: not run.trainers() and not run.find("ray::RayTrain"), 60)
        counts["epochs"] += run.check_rows(num_steps)
        assert min_workers == 1 or read_weights() == whole
        (run.folder / "notes").unlink()
        shutil.rmtree(run.out)

    driver = begin()
    assert driver.wait(300) == 0, run.log()
    whole = read_weights()
    assert len(whole) > 3
    judge()
    driver, num_groups = begin(), 0
    while sum(counts[kind] for kind in kinds) < num_kills:
        if rng.random() < 0.5:  # at a step; else at any moment
            wait_until(lambda: driver.poll() is not None or len(run.groups()) > num_groups, 300)
        time.sleep(rng.uniform(0, 6))
        if driver.poll() is not None:
            judge()
            driver, num_groups = begin(), 0
            continue
        num_groups = len(run.groups())
        kind = rng.choice(kinds)
        if kind == "driver":
            driver.kill()
            driver.wait()
            # Ray Train would keep the CPUs of a killed driver for three minutes
            for process in run.find("ray::_AutoscalingCoordinatorActor"):
                process.kill()
            driver = begin()
        elif kind == "machine":
            kill_machine(machine)
            machine = run.add_machine()
        else:
            victims = run.find_kind(kind)
            if not victims:
                continue
            with contextlib.suppress(psutil.NoSuchProcess):
                rng.choice(victims).kill()
        counts[kind] += 1
        print(dict(counts), flush=True)
    while driver.wait(300):
        judge()
        driver = begin()
    judge()
    print(dict(counts))


@pytest.mark.long
def test_workers_on_ray_follow_encoders_on_ray_to_the_bits_of_a_finished_cache(run):
    """Two of each, on one cluster; an encoder and a trainer are killed."""
    num_images, cache = 40, run.folder / "cache"
    make_captioned(run.folder / "captioned", num_images)
    (run.folder / "captioned/7.png").write_bytes(b"no image")
    (run.folder / "held_back.py").write_text(HELD_BACK)
    run.add_machine("--num-cpus=4")
    address = f"--address=127.0.0.1:{run.port}"
    base = f"--pretrained_model_name_or_path={make_models(run.folder)}"
    encode = [sys.executable, "held_back.py", address, "--num_encoders=2", base, "--random_flip"]
    encode += [f"--train_data_dir={run.folder / 'captioned'}", f"--output_dir={cache}"]
    encode += ["--resolution=16", "--rows_per_shard=4", "--batch_size=2"]
    train = [sys.executable, ROOT / "train_on_ray.py", "--cpu", "--min_workers=2", address]
    train += ["--max_workers=2", "train_text_to_image.py", base, f"--latents_dir={cache}"]
    train += ["--follow=30", "--holdout=2", "--random_flip", "--num_train_epochs=2"]
    train += ["--checkpointing_steps=2", "--use_ema", *TRAINING]

    together, later = run.folder / "together", run.folder / "later"
    trainer = run.start([*train, f"--output_dir={together}"], "trainer.log")
    encoder = run.start(encode, "encoder.log")
    logs = [run.folder / "encoder.log", run.folder / "trainer.log"]
    said = lambda: "".join(log.read_text() for log in logs)
    is_over = lambda: trainer.poll() is not None or encoder.poll() is not None
    saved = lambda: [*together.glob("checkpoint-*/trainer_state.json")]
    wait_until(lambda: is_over() or saved(), 900)
    assert not is_over() and not (cache / "state.json").exists(), said()
    for kind in ("ray::HeldBack", f"{ROOT}/train_text_to_image.py"):
        run.find(kind)[0].kill()
    (run.folder / "may").touch()
    assert encoder.wait(900) == trainer.wait(900) == 0, said()
    assert "2 encoders" in said() and said().count("Ray: 2 workers") >= 2, said()
    again = run.start([*train, f"--output_dir={later}"], "later.log")
    assert again.wait(900) == 0, (run.folder / "later.log").read_text()
    assert_same_end(later, together)
