"""Ray: started or found, with what its workers need of these files."""

import collections
import itertools
import os
import re
import signal
import socket
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from diffusion_training.errors import end_if_stopped, explained

Task = TypeVar("Task")


def find_modules(*objects: Any) -> list[str]:
    """The files and folders that hold functions or classes: what a worker needs to import them on another machine."""
    files = {Path(sys.modules[each.__module__.split(".")[0]].__file__ or "").resolve() for each in objects}
    return sorted(str(file.parent if file.name == "__init__.py" else file) for file in files)


def connect(address: str | None, modules: list[str], **options: Any) -> Callable[[], None]:
    """Find Ray at `address` or at RAY_ADDRESS, or start one; one that this process has already is taken.

    `modules`: of `find_modules`. Returns what ends it again, to be called; ends the program in a sentence if there is
    none to be had.
    """
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # or Ray warns of a change to come, for GPUs
    import ray

    was_there = ray.is_initialized()
    if not was_there:
        known = address or os.environ.get("RAY_ADDRESS", "")
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        with explained(f"Ray can't be started{f' or found at {known}' if known else ''}"):
            if re.fullmatch(r"[^/]+:\d+", known):  # Ray itself would take minutes to find nobody there
                host, port = known.rsplit(":", 1)
                socket.create_connection((host, int(port)), timeout=10).close()
            ray.init(
                address, runtime_env={"py_modules": modules}, logging_level="error", log_to_driver=False, **options
            )
        for number, handler in handlers.items():  # Ray has put its own in place
            signal.signal(number, handler)
    return (lambda: None) if was_there else ray.shutdown


def work_off(
    items: Iterable[Task], submit: Callable[[Task], Any], most: Callable[[], float], tries: int = 4
) -> Iterator[tuple[Task, Any, str | None]]:
    """Keep `most()` tasks at work; yields (item, what its task returned, None) or (item, None, why not) as they end.

    `submit(item)` starts a task, which Ray must not repeat: it is counted here how often a process or node died of it.
    """
    import ray

    deaths = ray.exceptions.WorkerCrashedError, ray.exceptions.NodeDiedError, ray.exceptions.OutOfMemoryError
    left, pending, died = iter(items), {}, collections.Counter()
    try:
        while True:
            for item in itertools.islice(left, max(0, int(most()) - len(pending))):
                pending[submit(item)] = item
            if not pending:
                return
            done, _ = ray.wait(list(pending), num_returns=len(pending), timeout=0.5)
            end_if_stopped()  # Ray may have swallowed what a signal raised
            for ref in done:
                item = pending.pop(ref)
                try:
                    yield item, ray.get(ref), None
                except deaths:
                    died[id(item)] += 1
                    if died[id(item)] == tries:
                        yield item, None, f"the process that worked on it died {tries} times; out of memory?"
                    else:
                        pending[submit(item)] = item
    finally:
        for ref in pending:
            ray.cancel(ref, force=True)
