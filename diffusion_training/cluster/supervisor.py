"""Run a trainer for a worker of Ray Train, and end it when the worker ends for any reason.

    worker of Ray Train -- pipe --> supervisor -- signals --> trainer and its loader processes

The worker itself can't do this: it may be killed, and a trainer needs time to save.
"""

import contextlib
import ctypes
import math
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path


def start_trainer(
    command: list[str],
    environment: dict[str, str],
    folder: str,
    lock: str,
    log: Path,
    save_seconds: float,
) -> subprocess.Popen[bytes]:
    """Start a trainer in a folder, with a supervisor, and return the supervisor.

    The supervisor ends with the trainer's status, or 128 + number of the signal that killed the
    trainer. The trainer gets SIGTERM after `save_and_end`, or when this process ends, and is killed
    `save_seconds` later. lock: a file that the supervisor locks (shared) until the trainer has
    ended. log: a file to which both append their output.
    """
    import fcntl  # only on systems that have fork

    code = f"from {__name__} import supervise; supervise()"
    with open(lock, "a+") as locked, open(log, "ab") as output:
        fcntl.flock(locked, fcntl.LOCK_SH)
        return subprocess.Popen(
            [sys.executable, "-c", code, folder, str(save_seconds), *command],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            pass_fds=[locked.fileno()],
            start_new_session=True,  # Ray may kill the worker's process group
        )


def save_and_end(supervisor: subprocess.Popen[bytes]) -> None:
    """Let the trainer of a supervisor save and end."""
    assert supervisor.stdin
    supervisor.stdin.close()


def supervise() -> None:
    """Run the command in argv: a folder, seconds to save, the trainer's words."""
    folder, save_seconds, *command = sys.argv[1:]
    trainer = subprocess.Popen(
        command,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        start_new_session=True,  # a process group for the trainer and its loader processes
        preexec_fn=end_with_parent,
    )
    deadline = math.inf
    while trainer.poll() is None and time.monotonic() < deadline:
        if deadline < math.inf:
            time.sleep(0.1)
        elif select.select([0], [], [], 0.5)[0]:
            trainer.terminate()
            deadline = time.monotonic() + float(save_seconds)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(trainer.pid, signal.SIGKILL)
    status = trainer.wait()
    sys.exit(status if status >= 0 else 128 - status)


def end_with_parent() -> None:
    """Let Linux kill this process if its parent is killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def wait_until_free(lock: str, seconds: float) -> bool:
    """Wait until no supervisor holds a lock. Returns False if one still does after `seconds`."""
    import fcntl

    deadline = time.monotonic() + seconds
    with open(lock, "a+") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except BlockingIOError:
                if time.monotonic() > deadline:
                    return False
                time.sleep(0.2)
