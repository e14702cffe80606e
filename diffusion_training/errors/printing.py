"""What a run prints: without secrets and control characters, to streams that may break."""

import contextlib
import io
import os
import re
import sys
from collections.abc import Iterable, Iterator
from typing import Any
from urllib.parse import unquote

# In the text of a sentence: a user's name with a password, which may hold any character, also a
# blank or @; a token in the place of a name; and a query or fragment, but not the ? of a pattern of
# names. The limits keep a long text of addresses quick.
PASSWORD = re.compile(
    r"(?<=://)[^\s/@:]*:(?!:|\d+(?:[/\s'\")]|$))[^@\n]{0,300}@(?:[^\s@]{0,300}@)*"
)
TOKEN = re.compile(r"(?<=://)[^/\s@]+@")
QUERY = re.compile(r"(://[^\s?#]{0,2000})(?:\?(?=\S*=|[^\s./?'\")]{6})|#(?=\S*=))(\S*)")
# The same in an address alone, whose end is known. A number before the first slash is a port.
USER = re.compile(r"(?![^/:@]*:\d+(?:/|$))(?:[^/:]*:.*|[^/]*)@", re.DOTALL)
SIGNATURE = re.compile(r"(?:\?(?=.*=|[^./?]{6})|#(?=.*=)).*", re.DOTALL)

SECRETS: dict[str, str] = {}  # of the addresses on the command line, and what is shown for each
PARTS: set[str] = set()  # of these secrets: a library's error may repeat only a part


def note_secrets(words: Iterable[str]) -> None:
    """Remember the secrets in the addresses on a command line, which `hide_secrets` looks for."""
    SECRETS.clear()
    PARTS.clear()
    for address in (part for word in words for part in re.split(r"::(?=\w+://)", word)):
        rest = address.partition("://")[2]
        user = USER.match(rest)
        query = SIGNATURE.search(rest, user.end() if user else 0)
        if user:
            SECRETS[user[0]] = "***@"
            password = user[0][:-1].partition(":")[2]
            PARTS.update(re.split(r"[@/?#:\s]", f"{password}@{unquote(password)}"), [password])
        if query:
            SECRETS[query[0]] = "?***"
            PARTS.update(re.findall(r"[=?#]([^=&;?#]+)(?=[&;?#]|$)", query[0]))
    PARTS.difference_update([part for part in PARTS if len(part) < 4])


def hide_secrets(value: Any, printed: bool = False) -> Any:
    """Cut passwords and queries, such as signatures, out of the addresses in a text or in texts.

    All that a run prints or records goes through this. printed: also parts of the secrets on the
    command line. Values that are recorded keep them, as a folder may have the name of a password.
    """
    if isinstance(value, list | tuple):
        return type(value)(hide_secrets(each, printed) for each in value)
    if not isinstance(value, str):
        return value
    for secret, shown in SECRETS.items():
        value = value.replace(secret, shown)
    if printed and PARTS:
        parts = "|".join(map(re.escape, sorted(PARTS, key=len, reverse=True)))
        value = re.sub(rf"(?<!\w)(?:{parts})(?!\w)", "***", value)
    if "://" not in value:
        return value
    value = TOKEN.sub("***@", PASSWORD.sub("***@", value))
    return QUERY.sub(hide_query, value)


def hide_query(match: re.Match[str]) -> str:
    """An address without its query, and the punctuation of the sentence after it."""
    end = match[2][len(match[2].rstrip("'\")],.;:")) :]
    return f"{match[1]}?***{end}"


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
            self.stream.write(hide_secrets(text, printed=True))
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
        print(printable(sentence), flush=True)
