"""What a run prints: without secrets and control characters, to streams that may break."""

import contextlib
import io
import os
import re
import sys
from collections.abc import Iterator
from typing import Any

# In addresses: a user's name with a password, which may hold any character, also a blank or @; a
# token in the place of a name; and a query or fragment, but not the ? of a pattern of names.
PASSWORD = re.compile(r"(?<=://)[^\s/@:]*:(?!:|\d+(?:[/\s'\")]|$))[^@\n]*@(?:[^\s@]*@)*")
TOKEN = re.compile(r"(?<=://)[^/\s@]+@")
QUERY = re.compile(
    r"(://[^\s?#]*)(?:\?(?=\S*=|[^\s./?'\")]{6})|\#(?=\S*=))\S*?(?=['\")\],.;:]*(?:\s|$))"
)


def hide_secrets(value: Any) -> Any:
    """Cut passwords and queries, such as signatures, out of the addresses in a text or in texts.

    All that a run prints or records goes through this.
    """
    if isinstance(value, list | tuple):
        return type(value)(map(hide_secrets, value))
    if not isinstance(value, str) or "://" not in value:
        return value
    value = TOKEN.sub("***@", PASSWORD.sub("***@", value))
    return QUERY.sub(r"\1?***", value)


class LastingStream:
    """stdout or stderr, without secrets. Output that can't be written is dropped.

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
