"""Load batches ahead of the device, with loader processes and a thread, and time the waits."""

import atexit
import multiprocessing
import signal
import time
from collections.abc import Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias

import torch
from accelerate.utils import send_to_device

from diffusion_training.errors.sentences import Refused
from diffusion_training.errors.stop_signals import holding_signals, list_stop_signals
from diffusion_training.library_fixes import exit_if_sending_fails
from diffusion_training.memory import is_gpu

Mark: TypeAlias = float | torch.cuda.Event  # see `mark_time`


def load_batches(
    dataset: Any,
    keys: Iterable,
    num_workers: int,
    device: torch.device,
    prefetch_factor: int | None = None,
) -> Generator[Any]:
    """Yield `dataset[key]` for each key, two batches ahead, with the tensors sent to the device.

    A thread reads these two batches, so that data is read while the device computes, also without
    loader processes. Each of `num_workers` processes reads `prefetch_factor` more (None: two). A
    batch's entry "waited" has two marks, from before and after the wait for it; see
    `seconds_between`.
    """
    loader = torch.utils.data.DataLoader(
        WithRefusals(dataset),
        batch_size=None,
        sampler=keys,
        num_workers=num_workers,
        worker_init_fn=ignore_signals,
        pin_memory=is_gpu(device),
        prefetch_factor=prefetch_factor if num_workers else None,
    )
    try:
        # starts the processes now, because forking beside a busy thread can deadlock
        with holding_signals():
            batches = iter(loader)
    finally:
        # registered after they start, so that it runs before other exit handlers wait for them
        atexit.register(end_workers)

    def load() -> dict | None:
        try:
            batch = next(batches, None)
        except (ConnectionError, EOFError) as error:
            # A killed process closes its connections before it is dead, and torch looks only once.
            # An error of `dataset` has the name of its process in its text.
            if num_workers and "DataLoader worker process" not in str(error):
                raise RuntimeError("DataLoader worker (pid unknown) was killed") from error
            raise
        if isinstance(batch, Refused):
            raise batch
        # The copy is queued on the stream that computes, so nothing has to wait for it.
        return send_to_device(batch, device, non_blocking=True)

    with ThreadPoolExecutor(1) as thread:
        ahead = [thread.submit(load) for _ in range(2)]
        try:
            while True:
                begin = mark_time(device)
                batch = ahead.pop(0).result()
                if batch is None:
                    return
                ahead.append(thread.submit(load))
                yield {**batch, "waited": (begin, mark_time(device))}
        finally:
            thread.shutdown(wait=False, cancel_futures=True)


class WithRefusals:
    """A data set that returns a `Refused`, because a loader process can't raise it."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitem__(self, key: Any) -> Any:
        try:
            return self.dataset[key]
        except Refused as refused:
            return refused


def ignore_signals(worker_id: int) -> None:
    """Let a loader process ignore the stop signals, because the trainer finishes its step."""
    for number in list_stop_signals():
        signal.signal(number, signal.SIG_IGN)
    exit_if_sending_fails()


def end_workers() -> None:
    """Kill the remaining loader processes.

    They ignore the signal that Python sends them when it exits.
    """
    if hasattr(signal, "SIGCHLD"):  # not on Windows
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch would report their end as an error
    if processes := multiprocessing.active_children():
        # queued data must arrive first, or the sending thread prints an error
        time.sleep(0.2)
        for process in processes:
            process.kill()


def mark_time(device: torch.device) -> Mark:
    """Mark a time: on CUDA, when all work that is queued so far is done; else now."""
    if not is_gpu(device):
        return time.perf_counter()
    event = torch.get_device_module(device).Event(enable_timing=True)
    event.record()
    return event


def seconds_between(begin: Mark, end: Mark) -> float:
    """Return the time between two marks. On CUDA, both must have been reached."""
    return end - begin if isinstance(begin, float) else begin.elapsed_time(end) / 1000
