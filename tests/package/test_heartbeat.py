"""A machine that falls silent ends the job.

A machine that is busy, has left, or was stopped together with all others does not.
"""

import hashlib
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from conftest import finish, kill, patch, reset, start, wait_until

from diffusion_training.arguments import Flags
from diffusion_training.errors.sentences import PEER_ENDED
from diffusion_training.launch import accelerator_options, make_launch


@pytest.fixture
def quick(monkeypatch):
    patch(monkeypatch, "BEAT", 0.15)  # 2.6 seconds of silence


def start_machines(folder, seconds, after=lambda rank: None):
    """Start two machines of one process; they meet for some seconds, then call `after`."""

    def work():
        reset()
        os.environ["LOCAL_WORLD_SIZE"], os.environ["LOCAL_RANK"] = "1", "0"
        args = Flags(mixed_precision=None, compile=None)
        rank = make_launch(Accelerator(**accelerator_options(args)), args).rank
        for _ in range(int(seconds / 0.05)):
            time.sleep(0.05)
            torch.distributed.all_reduce(torch.ones(1))
            Path(folder, f"met-{rank}").touch()
        after(rank)
        print("the end", flush=True)

    return start(work, 2, folder / "log")


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_silent_machine_ends_the_job_in_one_sentence(tmp_path, quick, stopped):
    """This includes machine 0, whose store then does not even answer."""
    pids = start_machines(tmp_path, 600)
    wait_until(lambda: (tmp_path / f"met-{stopped}").exists())
    time.sleep(1)  # they have received each other's beats
    os.killpg(pids[stopped], signal.SIGSTOP)
    try:
        assert finish([pids[1 - stopped]], 200) == [PEER_ENDED]
    finally:
        kill(pids)
    said = (tmp_path / "log").read_text()
    assert (
        f"machine {stopped} ({os.uname().nodename}) has been silent for 3 seconds; "
        "saved files are complete"
    ) in said
    assert "Traceback" not in said and "the end" not in said


@pytest.mark.ci
def test_machines_paused_together_continue_together(tmp_path, quick):
    pids = start_machines(tmp_path, 3)
    wait_until(lambda: (tmp_path / "met-1").exists())
    time.sleep(1)
    for number, wait in (signal.SIGSTOP, 4), (signal.SIGCONT, 0):
        for pid in pids:
            os.killpg(pid, number)
        time.sleep(wait)
    assert finish(pids) == [0, 0], (tmp_path / "log").read_text()


def test_a_machine_that_is_busy_or_finishes_last_is_not_ended(tmp_path, quick):
    def work(rank):
        deadline = time.time() + 4 * (rank == 0)
        while time.time() < deadline:  # in Python, which holds the GIL, or outside
            hashlib.sha256(bytes(2**20))
            sum(range(100_000))

    pids = start_machines(tmp_path, 1, work)
    assert finish(pids) == [0, 0], (tmp_path / "log").read_text()
    assert (tmp_path / "log").read_text().count("the end") == 2
