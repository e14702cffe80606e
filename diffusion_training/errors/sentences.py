"""Errors in one sentence, with the cause and the remedy, in place of tracebacks."""

import argparse
import atexit
import contextlib
import functools
import gc
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from diffusion_training.errors.faults import (
    explain,
    is_a,
    is_loaders_end,
    is_peers_end,
    lacks_memory,
)
from diffusion_training.errors.printing import outlasting_the_terminal, shorten
from diffusion_training.errors.stop_signals import SIGNALS, end_at_once, end_if_stopped, handling

# the folder of a repository in the hub's cache, which users know by its id
REPOSITORY = re.compile(
    r"(?<![^\s'\"])[^\s'\"]*models--([\w.]++(?:-[\w.]++)*+)--([\w.-]{1,96}+)[/\\]snapshots[/\\][0-9a-f]{40}"
)
# Exit status of a process that ends only because another one of its group has ended.
PEER_ENDED = 75
UNDO: list[Callable[[], None]] = []  # called if `main` fails before there is anything to keep
# restores the settings of the process that a run changed, when `main` ends or fails
CHANGED = contextlib.ExitStack()
WARNINGS: set[str] = set()  # those of `surviving`
# checks that would take time at the start: if `main` fails with an unexpected error, they are
# called to find the reason
CHECKS: list[Callable[[], Any]] = []
AGAIN: list[str] = []  # what the command lacks to continue this run, see `name_command`


class Refused(SystemExit):
    """The end of the program with a status and a sentence, which `in_one_sentence` prints.

    Usually all processes end for the same reason, so only the first process of each machine prints
    it. `alone`: this process may be the only one that knows the reason, so it prints the sentence
    itself.
    """

    def __init__(self, sentence: str, alone: bool = False, status: int = 1) -> None:
        super().__init__(REPOSITORY.sub(r"\1/\2", shorten(sentence)))
        self.alone = alone
        self.status = status


def fail(sentence: str, alone: bool = False) -> NoReturn:
    """End the program with status 1 and one sentence: what is wrong, where, and what to do."""
    raise Refused(sentence, alone)


def name_command() -> str:
    """The command that continues the run, for a sentence; a trainer's needs a flag."""
    return " ".join(["the same command", *AGAIN])


@contextlib.contextmanager
def explained(sentence: str, alone: bool = False) -> Iterator[None]:
    """End the program with `sentence` and the reason in parentheses if the block fails.

    A killed loader process doesn't count as a failure of the block: its error is passed on.

    `alone`: see `Refused`.
    """
    try:
        yield
    except Exception as error:
        if is_loaders_end(error):
            raise
        raise Refused(f"{sentence} ({explain(error)})", alone, status_of(error)) from None


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
    if is_a(error, "Unrecordable"):  # of families/recorded/, where no caller has explained it
        return f"the pipeline can't be trained here: {text}"
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


def find_reason() -> Refused | None:
    """What the first of `CHECKS` that ends the program raises, or None."""
    for check in CHECKS:
        try:
            check()
        except Refused as refused:
            return refused
    return None


def status_of(error: BaseException) -> int:
    """The exit status of a process that ends because of an error."""
    return PEER_ENDED if is_peers_end(error) else 1


def is_local_main() -> bool:
    """Whether this process prints the messages that all processes of its machine share."""
    return os.environ.get("WORLD_SIZE", "1") == "1" or os.environ.get("LOCAL_RANK", "0") == "0"


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
            CHECKS.clear()  # they hold models
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
            if sentence is None and (refused := find_reason()):
                sentence = str(refused)
                alone = refused.alone
            sentence = sentence and shorten(sentence)
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
                    f"and {name_command()} continues from here",
                    flush=True,
                )
            raise SystemExit(128 + SIGNALS[-1])
        if alone or is_local_main():
            print(f"\n{script}: {sentence}", file=sys.stderr, flush=True)
        raise SystemExit(status)

    @functools.wraps(main)
    def guarded(args: argparse.Namespace) -> None:
        for notes in (SIGNALS, UNDO, WARNINGS, AGAIN, CHECKS):  # of an earlier run in this process
            notes.clear()
        if getattr(args, "resume_from_checkpoint", "latest") != "latest":  # of a trainer
            AGAIN.append("with --resume_from_checkpoint latest")
        is_program = not gc.isenabled()  # see `Parser.parse_known_args`
        if is_program:
            gc.freeze()  # what was imported is never looked through again
            atexit.register(unfreeze_for_triton)
            gc.enable()
        with contextlib.ExitStack() as terminal:
            try:
                run(args, terminal)
            except Exception:
                if not is_program:
                    raise
                # here, where stderr hides secrets, which the message may repeat
                print(traceback.format_exc(), end="", file=sys.stderr)
                raise SystemExit(1) from None
            finally:
                if is_program:  # a Ctrl-C while Python ends would print a traceback of `atexit`
                    atexit.register(signal.signal, signal.SIGINT, signal.SIG_DFL)

    return guarded
