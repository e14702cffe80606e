"""Sentences in place of tracebacks: whatever ends a program says why, and what to do."""

import argparse
import contextlib
import copy
import errno
import functools
import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

# What the system says of one file or one name, whatever the machine; all else that it says is of the machine.
OF_A_FILE = {
    errno.ENOENT, errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EISDIR,
    errno.EINVAL, errno.EILSEQ, errno.ENXIO,
}  # fmt: skip
NO_MEMORY = (  # as torch, the system, oneDNN, C++ and Python's threads say it
    "can't allocate memory", "Cannot allocate memory", "could not create a primitive", "bad_alloc", "bad allocation",
    "can't start new thread",
)  # fmt: skip
UNDO: list[Callable[[], None]] = []  # what to call if `main` fails before there is anything to keep
SIGNALS: list[int] = []  # that have come since `main` began: the exception of one can be swallowed, this can't


class Refused(SystemExit):
    """The end of the program with status 1 and a sentence, which `in_one_sentence` prints.

    All processes end for the same reason, so the first of each machine says it; `alone`: this one may be the only one
    to know.
    """

    def __init__(self, sentence: str, alone: bool = False) -> None:
        super().__init__(sentence)
        self.alone = alone


def fail(sentence: str, alone: bool = False) -> NoReturn:
    """End the program with status 1 and one sentence: what, where, and what to do."""
    raise Refused(sentence, alone)


@contextlib.contextmanager
def explained(sentence: str, alone: bool = False) -> Iterator[None]:
    """Ends the program with `sentence` and, in parentheses, the reason if what is inside fails. alone: of `fail`."""
    try:
        yield
    except Exception as error:
        fail(f"{sentence} ({explain(error)})", alone)


def explain(error: BaseException) -> str:
    """An error in one line: the cause where `datasets` or a loader's process wrapped it, and no buffers of Pillow."""
    if is_a(error, "DatasetGenerationError") and error.__cause__:
        error = error.__cause__
    text = str(error).strip()
    text = text.splitlines()[-1] if "Original Traceback" in text else text
    text = " ".join(text.split(" <_io")[0].split()) or type(error).__name__
    return text if len(text) < 400 else f"{text[:400]} ..."


def is_a(error: BaseException, *names: str) -> bool:
    """isinstance by the names of classes: importing torch or datasets would cost a process of downloads 0.8 GB."""
    return any(kind.__name__ in names for kind in type(error).__mro__)


def lacks_memory(error: BaseException) -> bool:
    """Whether an error says that there is no memory, or no thread, to be had."""
    return is_a(error, "OutOfMemoryError", "MemoryError") or any(words in str(error) for words in NO_MEMORY)


def is_machines_fault(error: BaseException) -> bool:
    """Whether memory, descriptors, disk or network failed, and not what a row holds or names.

    A row's fault is skipped and listed. The machine's ends the run, or the task, and the same command tries the row
    again.
    """
    if lacks_memory(error) or is_a(error, "TimeoutError", "ConnectionError"):
        return True
    return isinstance(error, OSError) and error.errno is not None and error.errno not in OF_A_FILE


@contextlib.contextmanager
def passing_rows_faults() -> Iterator[None]:
    """Go on behind the block when what a row holds or names is at fault, and only then."""
    try:
        yield
    except (OSError, ValueError) as error:
        if is_machines_fault(error):
            raise


def foresee(error: BaseException, args: argparse.Namespace) -> str | None:
    """A sentence on an error that can happen to any run, None on one that is not foreseen."""
    text = explain(error)
    if lacks_memory(error):
        less = "--train_batch_size (and more --gradient_accumulation_steps), --gradient_checkpointing or bf16"
        less = {"train_batch_size": less, "batch_size": "--batch_size", "connections": "--num_cpus or --connections"}
        less = next((flags for name, flags in less.items() if name in args), "batch")
        return f"there is not enough memory ({text[:200]}): try a smaller {less}"
    if is_a(error, "OSError", "EOFError", "TarError"):  # a full disk, a file that went away, a cut stream
        return f"{text}; what was saved before is whole"
    if "DataLoader worker (pid" in text:  # and not what was raised inside of one
        return "a process that loads data was killed: out of memory or /dev/shm? Try fewer --dataloader_num_workers"
    if is_a(error, "DistError") or (isinstance(error, RuntimeError) and "gloo" in text):
        return f"another process has ended, and says why ({text[:100]})"
    return None


def speaks() -> bool:
    """Whether this process says what all processes of its machine have to say."""
    return os.environ.get("WORLD_SIZE", "1") == "1" or os.environ.get("LOCAL_RANK", "0") == "0"


@contextlib.contextmanager
def handling(handler: Callable[[int, FrameType | None], Any]) -> Iterator[None]:
    """Ctrl-C and SIGTERM go to `handler` inside; in a thread, which Python gives no signals, nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, before in handlers.items():
            signal.signal(number, before)


def end_at_once(number: int, frame: FrameType | None) -> NoReturn:
    """A signal's handler: what is whole stays, and what is half-made is deleted now or at the next start."""
    SIGNALS.append(number)
    raise SystemExit(128 + number)


def end_if_stopped() -> None:
    """End the program if a signal has come whose exception was swallowed, as in a destructor: between phases."""
    if SIGNALS:
        raise SystemExit(128 + SIGNALS[-1])


def in_one_sentence(main: Callable[[argparse.Namespace], None]) -> Callable[[argparse.Namespace], None]:
    """Makes what can happen to any run end in a sentence, on whichever process; the unforeseen keeps its traceback.

    `main` is given a copy of its arguments, which it may change.
    """
    script = Path(main.__code__.co_filename).name

    @functools.wraps(main)
    def guarded(args: argparse.Namespace) -> None:
        if isinstance(sys.stdout, io.TextIOWrapper):  # printing a name that is not ASCII must not end a run
            sys.stdout.reconfigure(errors="backslashreplace")
        SIGNALS.clear()
        UNDO.clear()
        try:
            with handling(end_at_once):
                main(copy.deepcopy(args))
            UNDO.clear()
            return
        except Refused as refused:
            sentence, alone = str(refused), refused.alone
        except SystemExit:
            if not SIGNALS:  # or it has said what there is to say
                raise
        except Exception as error:
            sentence, alone = foresee(error, args), True
            if sentence is None and not SIGNALS:
                raise
        finally:
            for undo in UNDO:
                undo()
        if SIGNALS:  # which may have been taken for what a library does with its errors
            if speaks():
                name = signal.Signals(SIGNALS[-1]).name
                print(
                    f"\nStopped by {name}; what is saved is whole, and the same command goes on from here", flush=True
                )
            raise SystemExit(128 + SIGNALS[-1])
        if alone or speaks():
            print(f"\n{script}: {sentence}", file=sys.stderr, flush=True)
        raise SystemExit(1)

    return guarded


def printable(text: str) -> str:
    """Text from the data as it may be printed: a terminal must not be commanded by a file's name."""
    return "".join(character if character.isprintable() else "?" for character in text)
