"""Sentences in place of tracebacks: whatever ends a program says why, and what to do."""

import contextlib
import functools
import io
import os
import signal
import sys
from pathlib import Path


class Refused(SystemExit):
    """The end of the program with status 1 and a sentence, which `in_one_sentence` prints.

    All processes end for the same reason, so the first of each machine says it; `alone`: this one may be the only one
    to know.
    """

    def __init__(self, sentence, alone=False):
        super().__init__(sentence)
        self.alone = alone


def fail(sentence, alone=False):
    """End the program with status 1 and one sentence: what, where, and what to do."""
    raise Refused(sentence, alone)


@contextlib.contextmanager
def explained(sentence):
    """Ends the program with `sentence` and, in parentheses, the reason if what is done inside fails."""
    try:
        yield
    except Exception as error:
        fail(f"{sentence} ({explain(error)})")


def explain(error):
    """An error in one line: the cause where `datasets` or a loader's process wrapped it, and no buffers of Pillow."""
    if is_a(error, "DatasetGenerationError") and error.__cause__:
        error = error.__cause__
    text = str(error).strip()
    text = text.splitlines()[-1] if "Original Traceback" in text else text
    text = " ".join(text.split(" <_io")[0].split()) or type(error).__name__
    return text if len(text) < 400 else f"{text[:400]} ..."


def is_a(error, *names):
    """isinstance by the names of classes: importing torch or datasets would cost a process of downloads 0.8 GB."""
    return any(kind.__name__ in names for kind in type(error).__mro__)


def foresee(error, args):
    """A sentence on an error that can happen to any run, None on one that is not foreseen."""
    text = explain(error)
    if is_a(error, "OutOfMemoryError", "MemoryError") or "can't allocate memory" in text:
        less = "--train_batch_size (and more --gradient_accumulation_steps), --gradient_checkpointing or bf16"
        less = less if "train_batch_size" in args else "--batch_size"
        return f"there is not enough memory ({text[:200]}): try a smaller {less}"
    if is_a(error, "OSError", "EOFError", "TarError"):  # a full disk, a file that went away, a cut stream
        return f"{text}; what was saved before is whole"
    if "DataLoader worker (pid" in text:  # and not what was raised inside of one
        return "a process that loads data was killed: out of memory or /dev/shm? Try fewer --dataloader_num_workers"
    if is_a(error, "DistError") or (isinstance(error, RuntimeError) and "gloo" in text):
        return f"another process has ended, and says why ({text[:100]})"
    return None


def speaks():
    """Whether this process says what all processes of its machine have to say."""
    return os.environ.get("WORLD_SIZE", "1") == "1" or os.environ.get("LOCAL_RANK", "0") == "0"


def end_at_once(number, frame):
    """A signal's handler: what is whole stays, and what is half-made is deleted now or at the next start."""
    if speaks():
        name = signal.Signals(number).name
        print(f"\nStopped by {name}; what is saved is whole, and the same command goes on from here", flush=True)
    raise SystemExit(128 + number)


def in_one_sentence(main):
    """Makes what can happen to any run end in a sentence, on whichever process; the unforeseen keeps its traceback."""
    script = Path(main.__code__.co_filename).name

    @functools.wraps(main)
    def guarded(args):
        if isinstance(sys.stdout, io.TextIOWrapper):  # printing a name that is not ASCII must not end a run
            sys.stdout.reconfigure(errors="backslashreplace")
        handlers = {number: signal.signal(number, end_at_once) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            return main(args)
        except Refused as refused:
            sentence, alone = str(refused), refused.alone
        except Exception as error:
            sentence, alone = foresee(error, args), True
            if sentence is None:
                raise
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        if alone or speaks():
            print(f"\n{script}: {sentence}", file=sys.stderr, flush=True)
        raise SystemExit(1)

    return guarded


def printable(text):
    """Text from the data as it may be printed: a terminal must not be commanded by a file's name."""
    return "".join(character if character.isprintable() else "?" for character in text)
