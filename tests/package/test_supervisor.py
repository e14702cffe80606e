"""A trainer ends with its worker, whichever process is killed, and leaves no process."""

import contextlib
import json
import os
import signal
import sys
import time

import psutil
import pytest
from conftest import ROOT, finish, kill, start, wait_until

from diffusion_training.cluster.supervisor import save_and_end, start_trainer, wait_until_free

# Replaces a trainer with a loader process, and writes down the ids of both.
TRAINER = """
import json, os, signal, sys, time
folder, stubborn = sys.argv[1:]

def save(number, frame):
    time.sleep(0.1)
    open(f"{folder}/saved", "w").close()
    if stubborn == "no":
        sys.exit(143)

signal.signal(signal.SIGTERM, save)
loader = os.fork()
if not loader:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(60)
os.write(2, b"\\xff\\ntrainer.py: a sentence\\n")
with open(f"{folder}/.pids", "w") as file:
    json.dump([os.getpid(), loader, os.getppid()], file)
os.rename(f"{folder}/.pids", f"{folder}/pids")
while True:
    time.sleep(60)
"""
SAID = "\ufffd\ntrainer.py: a sentence\n"  # its stderr, whose first byte is not valid UTF-8


class Worker:
    """A worker in its own process, and the processes that it started."""

    def __init__(self, folder, stubborn=False, save_seconds=20, stops=False):
        command = [sys.executable, "-S", "-c", TRAINER, str(folder), "yes" if stubborn else "no"]
        self.folder = folder
        self.lock = str(folder / "lock")
        environment = os.environ | {"PYTHONPATH": str(ROOT)}

        def work():
            supervisor = start_trainer(
                command, environment, str(folder), self.lock, folder / "log", save_seconds
            )
            if stops:
                wait_until(lambda: (folder / "pids").exists())
                save_and_end(supervisor)
            (folder / "ended").write_text(str(supervisor.wait()))

        (self.pid,) = start(work)
        wait_until(lambda: (folder / "pids").exists())
        self.trainer, self.loader, self.supervisor = json.loads((folder / "pids").read_text())

    def list_alive(self):
        """Which of trainer, loader and supervisor are alive."""
        left = []
        for name in ("trainer", "loader", "supervisor"):
            with contextlib.suppress(psutil.NoSuchProcess):
                if psutil.Process(getattr(self, name)).status() != psutil.STATUS_ZOMBIE:
                    left.append(name)
        return left

    def ended(self):
        finish([self.pid])
        return (self.folder / "ended").read_text()


@pytest.fixture
def worker(tmp_path):
    made = []
    yield lambda **options: made.append(Worker(tmp_path, **options)) or made[0]
    kill([made[0].pid])
    for name in made[0].list_alive():
        os.kill(getattr(made[0], name), signal.SIGKILL)


def test_a_killed_worker_lets_the_trainer_save_and_leaves_no_process(worker):
    it = worker()
    assert not wait_until_free(it.lock, 0)
    os.kill(it.pid, signal.SIGKILL)
    assert wait_until_free(it.lock, 100)  # a new group waits for this
    wait_until(lambda: not it.list_alive())
    assert (it.folder / "saved").exists()


def test_a_trainer_that_ignores_sigterm_is_killed(worker):
    it = worker(stubborn=True, save_seconds=2)
    begin = time.time()
    os.kill(it.pid, signal.SIGKILL)
    wait_until(lambda: not it.list_alive())
    assert (it.folder / "saved").exists() and 1.9 < time.time() - begin


def test_a_killed_trainer_is_reported_with_its_output_and_its_loaders_end(worker):
    it = worker()
    os.kill(it.trainer, signal.SIGKILL)
    assert it.ended() == "137"
    wait_until(lambda: not it.list_alive())
    assert (it.folder / "log").read_text(errors="replace") == SAID


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_a_killed_supervisor_ends_the_trainer(worker):
    it = worker()
    os.kill(it.supervisor, signal.SIGKILL)
    assert it.ended() == "-9"
    wait_until(lambda: "trainer" not in it.list_alive())


def test_a_worker_can_tell_the_trainer_to_save(worker):
    it = worker(stops=True)
    assert it.ended() == "143"
    assert (it.folder / "saved").exists()
    wait_until(lambda: not it.list_alive())
