"""Connect to Ray or start it, and run tasks on it."""

import argparse
import atexit
import collections
import itertools
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable
from pathlib import Path
from typing import Any, TypeVar

from diffusion_training.errors.sentences import CHANGED, explained, name_command
from diffusion_training.errors.stop_signals import (
    SIGNALS,
    end_at_once,
    end_if_stopped,
    list_stop_signals,
)

# Ray reads these when it is imported. The first silences a warning about a future change for GPUs.
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
# Else a Ray that we start prints 20 lines of its log before `watch_raylet` ends the program.
os.environ.setdefault("RAY_enable_pipe_based_agent_to_parent_health_check", "0")
# Under `uv run`, Ray would send the working folder, with its data, to all workers.
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")

Task = TypeVar("Task")
TRIES = 4  # attempts at a task whose worker dies
LOSSES = 100  # and whose machine is lost, which is hardly the task's fault
# seconds without an answer after which Ray ends the program, without a sentence
RAYS_PATIENCE = float(os.environ.get("RAY_gcs_rpc_server_reconnect_timeout_s", "60"))


def list_own_modules(*objects: Any) -> list[str]:
    """Return the files and folders of the modules that define `objects` (functions, classes).

    Workers on other machines need them to import these objects.
    """
    names = {value.__module__.split(".")[0] for value in objects}
    files = [Path(sys.modules[name].__file__ or "").resolve() for name in names]
    return sorted(str(file.parent if file.name == "__init__.py" else file) for file in files)


def check_ray_args(parser: argparse.ArgumentParser, address: str | None, output_dir: str) -> None:
    """Stop with an error if --address is empty, or --output_dir does not outlast the job.

    Ray unpacks `ray job submit --working-dir` in a folder that it deletes.
    """
    if address == "":
        parser.error("--address is empty: leave it out to start Ray on this machine")
    path = os.path.abspath(output_dir)
    if "/working_dir_files/" in path:
        parser.error(f"Ray deletes {path} after the job: give an absolute --output_dir")


def connect(address: str | None, modules: list[str], **options: Any) -> Callable[[], None]:
    """Connect to Ray at `address` or RAY_ADDRESS, or start it on this machine.

    If this process is already connected, it does nothing. modules: see `list_own_modules`. Returns
    a function that ends the new connection. Ends the program with an error if Ray can't be started
    or found, or later, when its process on this machine has died.
    """
    import ray

    if ray.is_initialized():
        return lambda: None
    cluster = address or os.environ.get("RAY_ADDRESS", "")
    handlers = {number: signal.getsignal(number) for number in list_stop_signals()}
    search = f" or found at {cluster}" if cluster else ""
    with explained(f"Ray can't be started{search}"):
        # Ray itself takes minutes to notice that no host answers
        if re.fullmatch(r"[^/]+:\d+", cluster):
            host, port = cluster.rsplit(":", 1)
            socket.create_connection((host, int(port)), timeout=10).close()
        try:
            ray.init(
                address,
                runtime_env={"py_modules": modules},
                logging_level="error",
                log_to_driver=False,
                **options,
            )
        except SystemExit:
            # A signal came. Python's own end would abort, since Ray has only half begun.
            atexit.register(lambda: os._exit(128 + SIGNALS[-1]))
            end_if_stopped()  # by our handler, which Ray keeps for Ctrl-C
            end_at_once(signal.SIGTERM, None)  # by Ray's, which replaces ours in the meantime
    for number, handler in handlers.items():  # Ray has replaced them
        signal.signal(number, handler)
    ended = threading.Event()
    CHANGED.callback(ended.set)  # also if `main` fails before it disconnects
    context = ray.get_runtime_context()
    host, port = context.gcs_address.rsplit(":", 1)
    for node in ray.nodes():
        if node["NodeID"] == context.get_node_id():
            raylet = node["NodeManagerAddress"], node["NodeManagerPort"]
            places = raylet, (host.strip("[]"), int(port))
            threading.Thread(target=watch_ray, args=(*places, ended), daemon=True).start()

    def disconnect() -> None:
        ended.set()
        ray.shutdown()

    return disconnect


def watch_ray(raylet: tuple[str, int], gcs: tuple[str, int], ended: threading.Event) -> None:
    """End the program in a sentence when Ray has died, until `ended`.

    raylet: host and port of Ray's process on this machine. gcs: those of the process that directs
    the cluster, which may be restarted. Ray itself ends the program a minute later, without a word
    on what to do, perhaps while the main thread waits for Ray and never returns.
    """
    answered = time.monotonic()  # when both did so last
    while not ended.wait(1):
        place = raylet
        try:
            socket.create_connection(raylet, timeout=10).close()
            place = gcs
            socket.create_connection(gcs, timeout=10).close()
            answered = time.monotonic()
            continue
        except OSError as error:
            reason = f"head node does not answer at {gcs[0]}:{gcs[1]} ({error})"
            if place is raylet and isinstance(error, ConnectionRefusedError):
                reason = "process on this machine, the raylet, has died, perhaps for lack of memory"
            elif time.monotonic() - answered < 0.75 * RAYS_PATIENCE:
                continue
        if not ended.is_set():
            print(
                f"\n{Path(sys.argv[0]).name}: Ray's {reason}; saved files are complete: start Ray "
                f"again if you had started it, and {name_command()} continues",
                file=sys.stderr,
                flush=True,
            )
            os._exit(1)


class Gauges:
    """Numbers of a script that Ray exports to Prometheus, such as ray_download_images_rows_done.

    descriptions: {name of a number: what it is}.
    """

    def __init__(self, script: str, **descriptions: str) -> None:
        from ray.util.metrics import Gauge

        self.gauges = {
            name: Gauge(f"{script}_{name}", description)
            for name, description in descriptions.items()
        }

    def set(self, **values: float | None) -> None:
        """Set some of the numbers; None, for one that is not known yet, changes nothing."""
        for name, value in values.items():
            if value is not None:
                self.gauges[name].set(value)


def is_lost_machine(error: BaseException) -> bool:
    """Whether a task failed because its machine, or the one with its result, was taken away."""
    from ray import exceptions

    lost = (exceptions.NodeDiedError, exceptions.ObjectLostError)
    # an actor's error has the cause only in its text, unless Ray was told of the preemption
    is_actors = getattr(error, "preempted", False) or "its node has died" in str(error)
    return isinstance(error, lost) or is_actors


def run_tasks(
    items: Iterable[Task], submit: Callable[[Task], Any], limit: Callable[[], float]
) -> Generator[tuple[Task, Any, str | None]]:
    """Run a task for each item, at most `limit()` at a time, and yield each when it ends.

    Yields (item, the task's result, None), or (item, None, reason) for an item whose worker died
    TRIES times, or its machine LOSSES times. submit(item) starts a task, with max_retries=0,
    because the deaths of workers are counted here.
    """
    import ray

    fatal = (
        ray.exceptions.WorkerCrashedError,
        ray.exceptions.NodeDiedError,
        ray.exceptions.OutOfMemoryError,
    )
    waiting = iter(items)
    pending = {}
    deaths, losses = collections.Counter(), collections.Counter()
    try:
        while True:
            for item in itertools.islice(waiting, max(0, int(limit()) - len(pending))):
                pending[submit(item)] = item
            if not pending:
                return
            done, _ = ray.wait(list(pending), num_returns=len(pending), timeout=0.5)
            end_if_stopped()  # Ray may have swallowed a signal's exception
            for ref in done:
                item = pending.pop(ref)
                try:
                    yield item, ray.get(ref), None
                except fatal as error:
                    (losses if is_lost_machine(error) else deaths)[id(item)] += 1
                    if deaths[id(item)] == TRIES:
                        yield item, None, f"its worker process died {TRIES} times; out of memory?"
                    elif losses[id(item)] == LOSSES:
                        yield item, None, f"its machine was lost {LOSSES} times"
                    else:
                        pending[submit(item)] = item
    finally:
        for ref in pending:
            ray.cancel(ref, force=True)
