"""A trainer on Ray Train: workers and machines come and go, and every image comes once an epoch."""

import collections
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import psutil
import pytest
from conftest import ROOT, free_port, make_images, make_unet_config, wait_until

pytest.importorskip("ray", reason="Ray is not installed: pip install -r requirements-ray.txt")
# Without these Ray writes into the home folder, and sends statistics.
RAY = {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
NUM_IMAGES = 12
# A trainer that notes which rows each step draws; an image's grey level tells its row.
NOTING = """
import json, os
import train_unconditional
from train_unconditional import main, parse_args

take_step = train_unconditional.train_step

def note(*args):
    *before, batches, micro_batches, data_step, look = args
    taken = [next(batches) for _ in range(micro_batches)]
    rows = [
        int(image.float().mean()) // 20
        for batch in taken
        for image, weight in zip(batch["pixel_values"], batch["weight"])
        if weight
    ]
    ranks = {name: os.environ.get(name) for name in ("MASTER_PORT", "WORLD_SIZE")}
    line = json.dumps({"step": data_step, "rows": rows, "pid": os.getpid(), **ranks})
    with open(os.environ["NOTES"], "a") as notes:
        notes.write(line + "\\n")
    return take_step(*before, iter(taken), micro_batches, data_step, look)

train_unconditional.train_step = note

if __name__ == "__main__":
    main(parse_args())
"""


class Run:
    """Runs of train_on_ray.py, and machines of Ray's that come and go."""

    def __init__(self, folder):
        self.folder = folder
        self.out = folder / "out"
        self.temp = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # short, for the names of sockets
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

    def add_machine(self):
        head = not self.started
        place = ["--head", f"--port={self.port}", "--include-dashboard=false"]
        place = place if head else [f"--address=127.0.0.1:{self.port}"]
        ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus=1"]
        memory = "--object-store-memory=80000000"
        temp = [f"--temp-dir={self.temp}"] if head else []
        process = self.start([*ray, *place, memory, *temp], f"machine-{len(self.started)}.log")
        wait_until(lambda: "--block" in (self.folder / process_log(self)).read_text(), 120)
        return process

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

    def sizes(self):
        """The number of workers of each group that has taken a step, in order."""
        sizes = {}
        for note in self.notes():
            sizes.setdefault(note["MASTER_PORT"] or note["pid"], int(note["WORLD_SIZE"] or 1))
        return list(sizes.values())

    def steps(self):
        """[{step: rows}] of each group."""
        groups = collections.defaultdict(lambda: collections.defaultdict(list))
        for note in self.notes():
            groups[note["MASTER_PORT"] or note["pid"]][note["step"]] += note["rows"]
        return list(groups.values())

    def checkpoints(self):
        states = self.out.glob("checkpoint-*/trainer_state.json")
        return {int(path.parent.name.split("-")[1]) for path in states}

    def find(self, word):
        """The processes of this test whose command line has a word."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if word in " ".join(process.cmdline()) and self.is_ours(process):
                    found.append(process)
        return found

    def is_ours(self, process):
        """Also of processes that have lost their parents."""
        with contextlib.suppress(psutil.Error):
            if any(parent.pid == each.pid for parent in process.parents() for each in self.started):
                return True
            return process.environ().get("NOTES") == self.env["NOTES"]
        return False

    def trainers(self):
        """The trainers and their loader processes."""
        return self.find(str(self.folder / "noting.py"))

    def close(self):
        for process in self.started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for process in self.find(""):
            process.kill()
        shutil.rmtree(self.temp, ignore_errors=True)


def process_log(run):
    return f"machine-{len(run.started) - 1}.log"


@pytest.fixture
def run(tmp_path):
    make_images(tmp_path / "images", NUM_IMAGES)
    make_unet_config(tmp_path)
    run = Run(tmp_path)
    yield run
    run.close()


def kill_machine(process):
    """End a machine of Ray's, as if it had lost its power; its trainers live on for a moment."""
    for child in [psutil.Process(process.pid), *psutil.Process(process.pid).children(True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    process.wait()


@pytest.mark.long
def test_machines_and_workers_come_and_go_and_every_image_comes_once_an_epoch(run):
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
    # they were told, and saved: no step was lost
    one, two = run.steps()[1:]
    assert min(two) == max(one) + 1

    before = run.trainers()
    run.find("ray::RayTrainWorker")[0].kill()
    wait_for("a worker was killed", lambda: run.sizes()[3:] == [2])
    assert not any(process.is_running() for process in before)
    before = run.trainers()
    wait_for("they have saved", lambda: max(run.checkpoints()) > max(run.steps()[2]) + 1)
    before[0].kill()
    wait_for("a trainer was killed", lambda: run.sizes()[4:] == [2])
    assert not any(process.is_running() for process in before)

    os.killpg(driver.pid, signal.SIGTERM)
    assert driver.wait(120) == 143
    assert not run.trainers() and not (run.out / ".ray").exists()
    groups = run.steps()
    assert max(run.checkpoints()) == max(groups[-1]) + 1
    drawn = []
    for step in range(max(run.checkpoints())):
        drawn += [group[step] for group in groups if step in group][-1]
    print(f"{len(drawn) // NUM_IMAGES} epochs, {len(groups)} groups")
    for first in range(0, len(drawn) - NUM_IMAGES + 1, NUM_IMAGES):
        assert sorted(drawn[first : first + NUM_IMAGES]) == list(range(NUM_IMAGES)), first
