"""Batches ahead of the device: loader processes, a thread that reads ahead, and the time that was waited."""

import atexit
import collections
import contextlib
import multiprocessing.queues
import os
import signal
import time
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeAlias, TypeVar

import torch

Ahead = TypeVar("Ahead")
Mark: TypeAlias = float | torch.cuda.Event  # of `mark_time`


def load_batches(
    dataset: Any, keys: Iterable, num_workers: int, device: torch.device, prefetch_factor: int | None = None
) -> Generator[dict]:
    """Yield `dataset[key]` for each of `keys`, two ahead, with the tensors on their way to the device.

    Each of `num_workers` processes reads `prefetch_factor` ahead of that, None: two. A thread reads ahead, so that a
    data set without processes of its own is read while the device computes, too. Each batch has "waited": two marks,
    before and after the wait for it, of which `seconds_between` makes seconds.
    """
    loader = torch.utils.data.DataLoader(
        dataset, batch_size=None, sampler=keys, num_workers=num_workers, worker_init_fn=ignore_signals,
        pin_memory=device.type == "cuda", prefetch_factor=prefetch_factor if num_workers else None,
    )  # fmt: skip
    try:
        batches = iter(loader)  # starts the processes here: forking beside a busy thread can deadlock
    finally:
        atexit.register(end_workers)  # after they are there, so that it comes before other ways to wait for them

    def move(value: Any) -> Any:
        if isinstance(value, list):
            return [move(part) for part in value]
        if isinstance(value, dict):
            return {name: move(part) for name, part in value.items()}
        return value.to(device, non_blocking=True) if torch.is_tensor(value) else value

    def load() -> dict | None:
        # On the stream that computes: the copy is queued there, and nobody waits for it.
        batch = next(batches, None)
        return move(batch)

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


def ignore_signals(worker_id: int) -> None:
    """Loader processes outlive Ctrl-C and SIGTERM: the trainer still needs data to finish its step."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # One that can't hand a batch over, for want of shared memory, would go on without a word, and be waited for.
    multiprocessing.queues.Queue._on_queue_feeder_error = staticmethod(lambda error, batch: os._exit(1))  # type: ignore[attr-defined]


def end_workers() -> None:
    """End what is left of the loader's processes, which ignore the signal that Python's own exit would send them."""
    if hasattr(signal, "SIGCHLD"):  # not on Windows
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch would take their end for a fault
    if processes := multiprocessing.active_children():
        time.sleep(0.2)  # what is on its way to them arrives, or the thread that sends it would complain
        for process in processes:
            process.kill()


def mark_time(device: torch.device) -> Mark:
    """This moment of a device: on CUDA when it has done all that was queued before, else now."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(begin: Mark, end: Mark) -> float:
    """The time between two marks; those of a CUDA device must have happened."""
    return end - begin if isinstance(begin, float) else begin.elapsed_time(end) / 1000


def work_ahead(items: Iterator[Ahead], count: int, device: torch.device) -> Iterator[Ahead]:
    """Yield what a generator makes, up to `count` ahead in a thread: the device works while files are written."""
    if device.type == "cpu":  # would do both itself, and `keep_memory` serves the main thread
        yield from items
        return
    item = next(items, None)  # the first here: it starts the loader's processes, and a thread should not fork

    def make() -> Ahead | None:
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():  # a thread has its own
            return next(items, None)

    with ThreadPoolExecutor(1) as thread:
        queue = collections.deque(thread.submit(make) for _ in range(count))
        try:
            while item is not None:
                yield item
                item = queue.popleft().result()
                queue.append(thread.submit(make))
        finally:
            thread.shutdown(wait=False, cancel_futures=True)
