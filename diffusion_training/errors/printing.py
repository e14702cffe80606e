"""What a run prints: without secrets and control characters, to streams that may break."""

import contextlib
import hashlib
import io
import os
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

# The rest of an address in a text, after "://" and not in an archive or on a disk: user and
# password, which may hold any character, also a blank, if an @ follows soon; all up to a blank.
OUTSIDE = "".join(f"(?<!{name})" for name in "zip tar bz2 xz lz4 zstd archive file local".split())
ADDRESS = re.compile(OUTSIDE + r"://((?:[^\s/@:]*:(?!:|\d+(?:[/\s'\")]|$))[^@\n]{0,300}@)?\S*)")
# The place of user, password, host and port in such a rest, which may hold another address
HOST = re.compile(r"://(?:\[[^]/@]*\])?([^/]*?)(?=::|/|\Z)")

# An installed package has the scripts here, and the pages beside them.
PACKAGED = Path(__file__).resolve().parents[1] / "scripts"
MOST = 2000  # characters of a sentence: a value of the user or of the data may have millions
SECRETS: dict[str, str] = {}  # of the addresses on the command line, and what is shown for each
PARTS: set[str] = set()  # of these secrets: a library's error may repeat only a part


def split_address(rest: str) -> tuple[str, str, str]:
    """Split an address, without its scheme, into a secret, what can be shown, and a secret.

    The first is a user, perhaps with a password, and ends in @. The last begins with the first ?, #
    or ;. Where it is not clear which @ ends a password, nothing is shown.
    """
    start = re.search(r"[?#;]|\Z", rest).start()  # type: ignore[union-attr]
    head = rest[:start]
    last_at = head.rfind("@")
    shown = 0
    for host in HOST.finditer(f"://{head}"):
        name, colon, port = host[1].partition(":")
        first = host.start(1) - len("://")
        if not colon:
            shown = first + name.rfind("@") + 1 if "@" in name else shown
        elif "@" in rest[start:]:
            return "", "", rest
        elif last_at >= first:
            shown = last_at + 1
            break
        elif not re.fullmatch(r"\d{0,5}", port):  # a password whose @ is written as %40
            start = first + len(name)
            break
    return rest[:shown], rest[shown:start], rest[start:]


def join_address(user: str, shown: str, query: str) -> str:
    return f"{user and '***@'}{shown}{query and '?***'}"


def name_address(address: str) -> str:
    """An address without secrets, as a name: a hash of all of it is in the place of a query."""
    match = re.search(OUTSIDE + "://", address)
    if not match:
        return address
    scheme = address[: match.end()]
    _, shown, query = split_address(address[match.end() :])
    if not query:
        return scheme + shown
    content = f"{scheme}{shown}{query}".encode(errors="surrogatepass")
    return f"{scheme}{shown}~{hashlib.sha256(content).hexdigest()[:16]}"


def find_secrets(address: str) -> tuple[dict[str, str], set[str]]:
    """The secrets of an address with what is shown for each, and the parts of these secrets."""
    match = re.search(OUTSIDE + "://", address)
    rest = address[match.end() :] if match else ""
    user, shown, query = split_address(rest)
    secrets = {rest: join_address(user, shown, query)} if user or query else {}
    if user:
        secrets[user] = "***@"
    if len(query) > 5:
        secrets[query] = "?***"
    name, _, password = user[:-1].partition(":")
    if not password and len(name) >= 8:  # a token in the place of a name
        password = name
    parts = {password, *re.split(r"[@/?#:\s'\"]", f"{password}@{unquote(password)}")}
    if query and query[0] not in "?#;":  # it has the password, too
        parts.update(re.split(r"[@/?#:;=&\s]", f"{query}@{unquote(query)}"))
    for text in (query, unquote(query)):
        parts.update(re.findall(r"[?#;=&]([^=&;?#]+)(?=[&;?#]|$)", text))
    return secrets, {part for part in parts if len(part) >= 4}


def note_secrets(words: Iterable[str]) -> None:
    """Remember the secrets in the addresses on a command line, which `hide_secrets` looks for."""
    SECRETS.clear()
    PARTS.clear()
    for address in (part for word in words for part in re.split(r"::(?=\w+://)", word)):
        secrets, parts = find_secrets(address)
        SECRETS.update(secrets)
        PARTS.update(parts)


def hide_secrets(value: Any, printed: bool = False, address: str = "") -> Any:
    """Cut what may be secret out of the addresses in a text or in texts: see `split_address`.

    All that a run prints or records goes through this. printed: also parts of the secrets on the
    command line. Values that are recorded keep them, as a folder may have the name of a password.
    address: one of the data, whose secrets and parts are cut, too.
    """
    if isinstance(value, list | tuple):
        return type(value)(hide_secrets(each, printed, address) for each in value)
    if not isinstance(value, str):
        return value
    secrets, parts = find_secrets(address)
    for secret, shown in (SECRETS | secrets).items():
        value = value.replace(secret, shown)
    if parts := parts | PARTS if printed else parts:
        words = "|".join(map(re.escape, sorted(parts, key=len, reverse=True)))
        value = re.sub(rf"(?<!\w)(?:{words})(?!\w)", "***", value)
    return ADDRESS.sub(hide_address, value)


def hide_address(match: re.Match[str]) -> str:
    """An address without secrets, and the punctuation of the sentence after it."""
    rest = match[1].rstrip("'\")],.;:?!}>")
    return f"://{join_address(*split_address(rest))}{match[1][len(rest) :]}"


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


def printable(text: str, kept: str = "") -> str:
    """Text from the data, safe to print: unprintable characters become question marks.

    Otherwise a file's name could send commands to the terminal. kept: such characters that stay.
    """
    return "".join(each if each.isprintable() or each in kept else "?" for each in text)


def shorten(sentence: str) -> str:
    """A sentence that is safe to print, without the middle of a very long one.

    In an installed package, a page such as docs/memory.md gets its path.
    """
    if PACKAGED.is_dir():
        sentence = re.sub(r"(?<![\w/])docs/(?=[\w-]+\.md)", f"{PACKAGED}/docs/", sentence)
    half = MOST // 2
    if len(sentence) > MOST:
        sentence = f"{sentence[:half]} ... {sentence[-half:]}"
    return printable(sentence, kept="\n")


def print_once(sentence: str | None) -> None:
    """Print a sentence about the data, if there is one, on the first of all processes."""
    if sentence and os.environ.get("RANK", "0") == "0":
        print(printable(sentence), flush=True)
