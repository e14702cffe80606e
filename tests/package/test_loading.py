"""Loading: batches are ready early, errors are passed on, and no process remains or hangs."""

import argparse
import functools
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from conftest import finish, kill, start, wait_until

from diffusion_training import loading
from diffusion_training.errors.sentences import fail, in_one_sentence
from diffusion_training.latents.passes import work_ahead
from diffusion_training.loading import load_batches, seconds_between

CPU = torch.device("cpu")


class Items(torch.utils.data.Dataset):
    """A key that is a number is a wait in seconds; a callable key is called."""

    def __getitem__(self, key):
        if callable(key):
            return key()
        time.sleep(key)
        return {"pixel_values": torch.full((1,), key), "skipped": [key]}


def bug():
    raise RuntimeError("a bug of mine")


def vanished_file():
    raise FileNotFoundError(2, "No such file or directory", "/disk/1.png")


class Unpicklable:
    """An item that fails to pickle, as in a container whose /dev/shm is full.

    torch's own thread would drop the batch, and the run would wait for ever.
    """

    def __reduce__(self):
        raise RuntimeError("unable to write to file </torch_1>: No space left on device (28)")


def unpicklable():
    return {"pixel_values": Unpicklable()}


def load_in_process(tmp_path, keys, workers):
    """(exit statuses, output) of a process that loads as a trainer does."""

    @in_one_sentence
    def main(args):
        list(load_batches(Items(), keys, workers, CPU))

    (tmp_path / "log").unlink(missing_ok=True)
    codes = finish(
        start(lambda: main(argparse.Namespace(train_batch_size=1)), log=tmp_path / "log")
    )
    return codes, (tmp_path / "log").read_text()


def test_load_batches_reads_ahead_measures_waits_and_raises_errors(monkeypatch):
    threads = threading.active_count()
    read = []
    batches = load_batches(Items(), (read.append(i) or 0.0 for i in range(8)), 0, CPU)
    batch = next(batches)
    assert batch["pixel_values"].item() == 0 and batch["skipped"] == [0]
    wait_until(lambda: len(read) == 3)  # two more are read while the device computes
    batches.close()
    assert threading.active_count() == threads
    assert len(list(load_batches(Items(), [0.0] * 3, 0, CPU))) == 3  # keys may be finite
    broken = load_batches(Items(), [0.0, bug, 0.0], 0, CPU)
    next(broken)
    with pytest.raises(RuntimeError, match="^a bug of mine$"):
        next(broken)
    # a clock that runs only while a batch is waited for: two marks per batch
    clock, marks = [0.0], []
    monkeypatch.setattr(loading, "mark_time", lambda device: marks.append(device) or clock[0])

    def read_slowly(number):
        wait_until(lambda: len(marks) > 2 * number)
        clock[0] += 0.5
        return {"number": number}

    keys = [functools.partial(read_slowly, number) for number in range(5)]
    waits = [seconds_between(*batch["waited"]) for batch in load_batches(Items(), keys, 0, CPU)]
    assert waits == [0.5] * 5


@pytest.mark.parametrize("given, most", [(None, 2 + 2), (6, 6 + 2)])
def test_a_loader_process_reads_a_fixed_number_of_batches_ahead(given, most):
    """The thread reads two more. Batches that were taken count too."""
    taken = []
    batches = load_batches(Items(), (taken.append(i) or 0.0 for i in range(99)), 1, CPU, given)
    next(batches)
    wait_until(lambda: len(taken) >= most + 1)
    time.sleep(0.1)
    assert len(taken) == most + 1
    batches.close()


def test_a_signal_during_the_fork_of_loaders_leaves_no_traceback(tmp_path):
    """Python would print and drop an exception that is raised during a fork."""

    @in_one_sentence
    def main(args):
        list(load_batches(Items(), [0.0] * 9, 2, CPU))

    def run():
        os.register_at_fork(after_in_parent=lambda: os.kill(os.getpid(), signal.SIGTERM))
        main(argparse.Namespace(train_batch_size=1))

    codes = finish(start(run, log=tmp_path / "log"))
    said = (tmp_path / "log").read_text()
    assert codes == [143] and "Stopped by SIGTERM" in said
    assert "Traceback" not in said and "Exception ignored" not in said


def test_errors_in_a_loader_process_keep_their_traceback(tmp_path):
    codes, said = load_in_process(tmp_path, [0.0, bug], 1)
    assert (
        codes == [1]
        and "DataLoader worker process 0" in said
        and ", in bug\n" in said
        and "a bug of mine" in said
    )


@pytest.mark.parametrize("workers", [0, 1])
def test_files_that_vanish_while_loading_end_in_one_sentence(tmp_path, workers):
    codes, said = load_in_process(tmp_path, [0.0, vanished_file, 0.0], workers)
    assert codes == [1] and "Traceback" not in said and len(said.strip().splitlines()) == 1
    assert "No such file or directory: '/disk/1.png'; files saved before are complete" in said


def test_a_loader_process_that_can_not_send_a_batch_ends_the_run(tmp_path):
    codes, said = load_in_process(tmp_path, [0.0, unpicklable, *[0.0] * 9], 1)
    assert codes == [1] and "out of memory or /dev/shm? Try fewer --dataloader_num_workers" in said


def test_a_killed_loader_process_ends_the_run_and_leaves_no_orphan(tmp_path):
    """The kernel kills one when memory runs out: one sentence, status 1, no hang, no orphan."""

    @in_one_sentence
    def main(args):
        for _ in load_batches(Items(), [0.01] * 9999, 2, CPU):
            (tmp_path / "began").touch()

    (pid,) = start(lambda: main(argparse.Namespace(train_batch_size=1)), log=tmp_path / "log")
    wait_until((tmp_path / "began").exists)
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    assert len(children) == 2
    os.kill(int(children[0]), signal.SIGKILL)
    assert finish([pid]) == [1], (tmp_path / "log").read_text()
    log = (tmp_path / "log").read_text()
    assert "a process that loads data was killed" in log and "Traceback" not in log
    wait_until(lambda: not any(Path(f"/proc/{child}").exists() for child in children))


def reset_connection():
    raise ConnectionResetError(104, "Connection reset by peer")


def test_a_lost_connection_to_a_loader_process_is_a_killed_process(tmp_path, monkeypatch):
    """A killed process closes its connections before torch can see that it is dead."""
    codes, said = load_in_process(tmp_path, [0.0, reset_connection], 1)  # of a file, say
    assert codes == [1] and "reset by peer; files saved before are complete" in said
    loader = torch.utils.data.dataloader._MultiProcessingDataLoaderIter
    monkeypatch.setattr(loader, "_try_get_data", lambda *args, **options: reset_connection())
    codes, said = load_in_process(tmp_path, [0.0], 1)
    assert codes == [1] and "a process that loads data was killed" in said


def test_loader_processes_ignore_signals_and_end_with_the_trainer(tmp_path):
    @in_one_sentence
    def main(args):
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # replaces the trainer's handler
        batches = load_batches(Items(), [0.01] * 9999, 2, CPU)
        next(batches)
        os.killpg(0, signal.SIGINT)  # as a terminal does to all
        for _ in range(20):
            next(batches)
        fail("the loss is not finite")

    pids = start(lambda: main(argparse.Namespace(train_batch_size=1)), log=tmp_path / "log")
    assert finish(pids) == [1] and "the loss is not finite" in (tmp_path / "log").read_text()
    kill(pids)


def test_work_ahead_keeps_the_order_and_raises_errors():
    def count(last):
        yield from range(last)
        raise ValueError("at the end")

    for device in (CPU, torch.device("meta")):  # an asynchronous device gets more ahead
        threads, items = threading.active_count(), work_ahead(count(5), 2, device)
        assert [next(items) for _ in range(5)] == list(range(5))
        with pytest.raises(ValueError, match="at the end"):
            next(items)
        assert list(work_ahead(iter(range(3)), 2, device)) == [0, 1, 2]
        assert threading.active_count() == threads
