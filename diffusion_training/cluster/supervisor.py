"""Run a trainer for a worker of Ray Train, and end it when the worker ends for any reason.

    worker of Ray Train -- pipe --> supervisor -- signals --> trainer and its loader processes

The worker itself can't do this: it may be killed, and Ray Train runs its function in a thread. The
supervisor is a process without a parent, because Ray kills the children of a worker that it ends,
and a trainer needs time to save.
"""

import contextlib
import ctypes
import json
import math
import os
import select
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass

TAIL = 20_000  # bytes of the last errors that are reported


@dataclass(frozen=True)
class Task:
    """The task of a supervisor."""

    command: list[str]  # starts the trainer
    folder: str  # the trainer's working folder
    lock: str  # a file that is locked (shared) until the trainer has ended
    log: str | None  # a file for the trainer's output; None: where the worker prints
    over: str  # a file that appears when the job ends
    save_seconds: float  # time for the trainer to save before it is killed


@dataclass(frozen=True)
class Ended:
    """How a trainer ended."""

    status: int  # -9 if signal 9 killed it
    errors: str  # the last lines of its stderr


class Supervisor:
    """A supervisor and its trainer, as the worker sees them."""

    def __init__(self, task: Task, environment: dict[str, str]) -> None:
        read, write = os.pipe()
        code = f"from {supervise.__module__} import supervise; supervise()"
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, json.dumps(asdict(task)), str(write)],
            env=environment,
            stdin=subprocess.PIPE,
            pass_fds=[write],
            start_new_session=True,  # Ray may kill the worker's process group
        )
        os.close(write)
        self.report = open(read)

    def stop(self) -> None:
        """Let the trainer save and end. The same happens when this process ends."""
        assert self.process.stdin
        self.process.stdin.close()

    def wait(self) -> Ended | None:
        """Wait until the trainer has ended. Returns None if the supervisor was killed."""
        with self.report, self.process:
            report = self.report.read()
        return Ended(**json.loads(report)) if report else None


def supervise() -> None:
    """Carry out the `Task` in argv, and write an `Ended` to the file descriptor in argv.

    When stdin is closed or the job is over, SIGTERM lets the trainer save and end.
    """
    if os.fork():
        os._exit(0)
    import fcntl  # only on systems that have fork

    task = Task(**json.loads(sys.argv[1]))
    if task.log:
        with open(task.log, "ab") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
    with open(task.lock, "a+") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        trainer = subprocess.Popen(
            task.command,
            cwd=task.folder,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,  # a process group for the trainer and its loader processes
            preexec_fn=end_with_parent,
        )
        ended = wait_for_end(trainer, task.over, task.save_seconds)
    with contextlib.suppress(BrokenPipeError):  # the worker has ended
        os.write(int(sys.argv[2]), json.dumps(asdict(ended)).encode())


def end_with_parent() -> None:
    """Let Linux kill this process if its parent is killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def wait_for_end(trainer: subprocess.Popen[bytes], over: str, save_seconds: float) -> Ended:
    """Wait until a trainer has ended, and kill the processes that it leaves."""
    assert trainer.stderr
    errors = trainer.stderr.fileno()
    os.set_blocking(errors, False)
    tail = b""
    waiting = [0, errors]
    deadline = math.inf
    while trainer.poll() is None and time.monotonic() < deadline:
        ready, _, _ = select.select(waiting, [], [], 0.5)
        if deadline == math.inf and (0 in ready or os.path.exists(over)):
            waiting.remove(0)
            trainer.terminate()
            deadline = time.monotonic() + save_seconds
        if errors in ready:
            written = os.read(errors, 2**16)
            os.write(2, written)
            tail = (tail + written)[-TAIL:]
            if not written:
                waiting.remove(errors)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(trainer.pid, signal.SIGKILL)
    status = trainer.wait()
    rest = trainer.stderr.read() or b""
    os.write(2, rest)
    return Ended(status, (tail + rest).decode(errors="replace"))


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
