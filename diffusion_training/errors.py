"""Errors in one sentence, with the cause and the remedy, in place of tracebacks."""

import argparse
import atexit
import contextlib
import errno
import functools
import gc
import io
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

# System errors that concern one file or one name. All others are faults of the machine.
FILE_ERRORS = {
    errno.ENOENT,
    errno.EACCES,
    errno.EPERM,
    errno.ENAMETOOLONG,
    errno.ELOOP,
    errno.ENOTDIR,
    errno.EISDIR,
    errno.EINVAL,
    errno.EILSEQ,
    errno.ENXIO,
}
NO_MEMORY = (  # in the words of torch, the system, oneDNN, C++ and Python's threads
    "can't allocate memory",
    "Cannot allocate memory",
    "could not create a primitive",
    "bad_alloc",
    "bad allocation",
    "can't start new thread",
)
# Exit status of a process that ends only because another one of its group has ended.
PEER_ENDED = 75
UNDO: list[Callable[[], None]] = []  # called if `main` fails before there is anything to keep
# signals since `main` began, kept here because a library can swallow their exceptions
SIGNALS: list[int] = []
# restores the settings of the process that a run changed, when `main` ends or fails
CHANGED = contextlib.ExitStack()
WARNINGS: set[str] = set()  # those of `surviving`


class Refused(SystemExit):
    """The end of the program with a status and a sentence, which `in_one_sentence` prints.

    Usually all processes end for the same reason, so only the first process of each machine prints
    it. `alone`: this process may be the only one that knows the reason, so it prints the sentence
    itself.
    """

    def __init__(self, sentence: str, alone: bool = False, status: int = 1) -> None:
        super().__init__(sentence)
        self.alone = alone
        self.status = status


def fail(sentence: str, alone: bool = False) -> NoReturn:
    """End the program with status 1 and one sentence: what is wrong, where, and what to do."""
    raise Refused(sentence, alone)


@contextlib.contextmanager
def explained(sentence: str, alone: bool = False) -> Iterator[None]:
    """End the program with `sentence` and the reason in parentheses if the block fails.

    A killed loader process is no failure of the block, so its error is passed on.

    `alone`: see `Refused`.
    """
    try:
        yield
    except Exception as error:
        if is_loaders_end(error):
            raise
        raise Refused(f"{sentence} ({explain(error)})", alone, status_of(error)) from None


def explain(error: BaseException) -> str:
    """Describe an error in one line.

    An error that `datasets` or a loader process wrapped is replaced by its cause. So are the
    libraries' errors for a folder that does not exist, and for a hub that can't be reached. The
    address of a buffer in Pillow's message is cut off. A temporary name is replaced by the name
    that the file will have.
    """
    cause: BaseException | None = error
    while cause:
        if is_a(cause, "HFValidationError"):  # for example /nowhere/model
            return "there is no such folder, and no model on the hub can have this name"
        if is_a(cause, "LocalEntryNotFoundError", "OfflineModeIsEnabled"):
            return (
                "it is neither a folder here nor in the local cache, and the hub can't be reached: "
                "check the network, and that HF_HUB_OFFLINE is not set"
            )
        cause = cause.__context__
    if is_a(error, "DatasetGenerationError") and error.__cause__:
        error = error.__cause__
    if isinstance(error, UnicodeEncodeError):  # a file's name, or a text, with bytes of its own
        return f"{ascii(error.object)[:300]} can't be read as text: rename it, or write it in UTF-8"
    text = str(error).strip()
    if "Original Traceback" in text:
        text = text.splitlines()[-1]
    text = " ".join(text.split(" <_io")[0].split()) or type(error).__name__
    text = name_finally(text)
    return text if len(text) < 400 else f"{text[:400]} ..."


def name_finally(text: str) -> str:
    """A text in which temporary names are replaced by those that the files will have."""
    return re.sub(r"\.tmp-(saving/|old-|[0-9a-f]{12}-)", "", text)


def is_a(error: BaseException, *names: str) -> bool:
    """Whether an error's class, or one that it inherits from, has one of these names.

    isinstance would need torch and datasets, 0.8 GB in each download process.
    """
    return any(kind.__name__ in names for kind in type(error).__mro__)


def lacks_memory(error: BaseException) -> bool:
    """Whether an error reports that memory ran out or that no thread could be started."""
    return is_a(error, "OutOfMemoryError", "MemoryError") or any(
        words in str(error) for words in NO_MEMORY
    )


def is_machines_fault(error: BaseException) -> bool:
    """Whether the machine failed (memory, descriptors, disk, network), rather than a row's data.

    A bad row is skipped and listed. A fault of the machine ends the run or the task, and the same
    command tries the row again.
    """
    if lacks_memory(error) or is_a(error, "TimeoutError", "ConnectionError"):
        return True
    return isinstance(error, OSError) and error.errno is not None and error.errno not in FILE_ERRORS


@contextlib.contextmanager
def suppressing_row_errors() -> Iterator[None]:
    """Suppress an error in the block if a row's data or file caused it; raise all others."""
    try:
        yield
    except (OSError, ValueError) as error:
        if is_machines_fault(error):
            raise


def describe_expected(error: BaseException, args: argparse.Namespace) -> str | None:
    """Return a sentence for an error that can happen in any run; None for an unexpected error."""
    text = explain(error)
    if lacks_memory(error):
        settings = {
            "train_batch_size": "--train_batch_size (and more --gradient_accumulation_steps), "
            "--gradient_checkpointing or bf16",
            "batch_size": "--batch_size (auto finds the largest that fits)",
            "connections": "--num_cpus or --connections",
        }
        setting = next((settings[flag] for flag in settings if flag in args), "batch")
        return f"there is not enough memory ({text[:200]}): try a smaller {setting}"
    # a full disk, a file that was deleted, a stream that was cut off
    if is_a(error, "OSError", "EOFError", "TarError"):
        return f"{text}; files saved before are complete"
    if is_loaders_end(error):
        return (
            "a process that loads data was killed: out of memory or /dev/shm? "
            "Try fewer --dataloader_num_workers"
        )
    if is_peers_end(error):
        return f"another process has ended: see its message ({text[:100]})"
    return None


def is_loaders_end(error: BaseException) -> bool:
    """Whether a process that loads data was killed.

    torch raises this error in the main thread at any moment. An exception inside such a process
    has another text.
    """
    return "DataLoader worker (pid" in explain(error)


def is_peers_end(error: BaseException) -> bool:
    """Whether an error only shows that another process of the group has ended."""
    if is_a(error, "DistError"):
        return True
    return isinstance(error, RuntimeError) and "gloo" in explain(error)


def status_of(error: BaseException) -> int:
    """The exit status of a process that ends because of an error."""
    return PEER_ENDED if is_peers_end(error) else 1


def is_local_main() -> bool:
    """Whether this process prints the messages that all processes of its machine share."""
    return os.environ.get("WORLD_SIZE", "1") == "1" or os.environ.get("LOCAL_RANK", "0") == "0"


def list_stop_signals() -> list[int]:
    """Ctrl-C, SIGTERM, and SIGHUP, which a terminal sends when it closes, unless nohup is used."""
    stop = [signal.SIGINT, signal.SIGTERM]
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        stop.append(signal.SIGHUP)
    return [int(number) for number in stop]


@contextlib.contextmanager
def handling(handler: Callable[[int, FrameType | None], Any]) -> Iterator[None]:
    """Let `handler` handle the stop signals inside the block.

    In another thread this does nothing, because Python delivers signals only to the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.signal(number, handler) for number in list_stop_signals()}
    try:
        yield
    finally:
        for number, previous in handlers.items():
            signal.signal(number, previous)


@contextlib.contextmanager
def holding_signals() -> Iterator[None]:
    """Delay the stop signals until the end of the block.

    Use it to fork processes. An exception during a fork would be printed and lost, and the new
    process, which inherits the handlers, would print another traceback.
    """
    held: list[int] = []
    try:
        with handling(lambda number, frame: held.append(number)):
            yield
    finally:
        for number in held:
            signal.raise_signal(number)


def end_at_once(number: int, frame: FrameType | None) -> NoReturn:
    """A signal handler that ends the program.

    Complete files stay. Incomplete files are deleted now or at the next start.
    """
    SIGNALS.append(number)
    raise SystemExit(128 + number)


def end_if_stopped() -> None:
    """End the program if a signal's exception was swallowed, for example by a destructor.

    Call it between phases.
    """
    if SIGNALS:
        raise SystemExit(128 + SIGNALS[-1])


def hide_secrets(value: Any) -> Any:
    """Cut passwords and queries, such as signatures, out of the addresses in a text or in texts.

    All that a run prints or records goes through this.
    """
    if isinstance(value, list | tuple):
        return type(value)(map(hide_secrets, value))
    if not isinstance(value, str) or "://" not in value:
        return value
    value = re.sub(r"(?<=://)[^/\s@]+@", "***@", value)
    return re.sub(r"(://[^\s?]*\?)[^\s'\")]*=[^\s'\")]*", r"\1***", value)


class LastingStream:
    """stdout or stderr, without secrets. What can't be written is lost, and does not end a run.

    For example, the reader of a pipe has ended, or the disk of a log is full.
    """

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError, ValueError):  # ValueError: it is closed
            self.stream.write(hide_secrets(text))
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self.stream.flush()


def flush_or_discard(stream: Any) -> None:
    """Write out a stream. If that fails, discard the rest, or Python would exit with status 120."""
    with contextlib.suppress(ValueError):  # it is closed
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


@contextlib.contextmanager
def outlasting_the_terminal() -> Iterator[None]:
    """Let the block print to `LastingStream`s."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # for a name that is not ASCII
        with contextlib.suppress(OSError):
            sys.stdout.reconfigure(errors="backslashreplace")
    with contextlib.ExitStack() as stack:
        redirects = contextlib.redirect_stdout, contextlib.redirect_stderr
        for redirect, stream in zip(redirects, (sys.stdout, sys.stderr), strict=True):
            if stream:  # None if the program has no terminal
                stack.callback(flush_or_discard, stream)
                stack.enter_context(redirect(LastingStream(stream)))
        yield


@contextlib.contextmanager
def surviving(what: str) -> Iterator[None]:
    """Turn an error of the block, which a run can do without, into a line on stderr, once."""
    try:
        yield
    except Exception as error:
        sentence = f"\n{what} ({explain(error)})"
        if sentence not in WARNINGS:
            print(sentence, file=sys.stderr)
        WARNINGS.add(sentence)


def unfreeze_for_triton() -> None:
    """Let the interpreter's last collection free triton's objects: nanobind reports them as leaks.

    The collection takes seconds of processor time, so it is left out without triton.
    """
    if "triton" in sys.modules:
        gc.unfreeze()


def in_one_sentence(
    main: Callable[[argparse.Namespace], None],
) -> Callable[[argparse.Namespace], None]:
    """Decorate `main` so that expected errors end it with one sentence, on every process.

    Unexpected errors keep their traceback.
    """
    script = Path(main.__code__.co_filename).name

    def run(args: argparse.Namespace, terminal: contextlib.ExitStack) -> None:
        try:
            terminal.enter_context(outlasting_the_terminal())
            with handling(end_at_once), CHANGED:
                main(args)
                end_if_stopped()
            UNDO.clear()
            return
        except Refused as refused:
            sentence = str(refused)
            alone = refused.alone
            status = refused.status
        except SystemExit:
            if not SIGNALS:  # its message is printed already
                raise
        except Exception as error:
            sentence = describe_expected(error, args)
            alone = True
            status = status_of(error)
            if sentence is None and not SIGNALS:
                raise
        finally:
            for undo in UNDO:
                undo()
        # a library may have turned the signal's exception into an error of its own
        if SIGNALS:
            if is_local_main():
                name = signal.Signals(SIGNALS[-1]).name
                print(
                    f"\nStopped by {name}; saved files are complete, "
                    "and the same command continues from here",
                    flush=True,
                )
            raise SystemExit(128 + SIGNALS[-1])
        if alone or is_local_main():
            print(f"\n{script}: {sentence}", file=sys.stderr, flush=True)
        raise SystemExit(status)

    @functools.wraps(main)
    def guarded(args: argparse.Namespace) -> None:
        for notes in (SIGNALS, UNDO, WARNINGS):  # of an earlier run in this process
            notes.clear()
        if not gc.isenabled():  # see `Parser.parse_known_args`
            gc.freeze()  # what was imported is never looked through again
            atexit.register(unfreeze_for_triton)
            gc.enable()
        with contextlib.ExitStack() as terminal:
            run(args, terminal)

    return guarded


def amount(count: int, noun: str) -> str:
    """A count and its noun, such as "1 thread" or "2 processes"."""
    plural = "es" if noun.endswith("s") else "s"
    return f"{count:,} {noun}{'' if count == 1 else plural}"


def printable(text: str) -> str:
    """Text from the data, safe to print: unprintable characters become question marks.

    Otherwise a file's name could send commands to the terminal.
    """
    return "".join(character if character.isprintable() else "?" for character in text)


def print_once(sentence: str | None) -> None:
    """Print a sentence about the data, if there is one, on the first of all processes."""
    if sentence and os.environ.get("RANK", "0") == "0":
        print(printable(sentence))
