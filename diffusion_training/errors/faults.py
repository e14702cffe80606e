"""Errors described in one line, and told apart: of a row, of the machine, of another process."""

import contextlib
import errno
import re
import traceback
from collections.abc import Iterator
from typing import Any

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


def explain(error: BaseException) -> str:
    """Describe an error in one line.

    An error that `datasets` or a loader process wrapped is replaced by its cause. So are the
    libraries' errors for a folder that does not exist, and for the hub, see `explain_hub`. The
    address of a buffer in Pillow's message is cut off. A temporary name is replaced by the name
    that the file will have.
    """
    chain = [error]
    for each in chain:  # it grows meanwhile; links can form a circle
        chain += [x for x in (each.__cause__, each.__context__) if x and x not in chain]
    if any(is_a(each, "HFValidationError") for each in chain):  # for example /nowhere/model
        return "there is no such folder, and no model on the hub can have this name"
    if sentence := next(filter(None, map(explain_hub, chain)), None):
        return sentence
    if any(is_a(each, "LocalEntryNotFoundError") for each in chain):
        return (
            "it is neither a folder here nor in the local cache, and the hub can't be reached: "
            "check the network, and that HF_HUB_OFFLINE is not set"
        )
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


def explain_hub(error: BaseException) -> str | None:
    """Describe an error of the model and data set hub; None for other errors.

    A file that a repository lacks is None, too: the libraries name it.
    """
    if is_a(error, "OfflineModeIsEnabled"):
        # its text has the address, .../org/name/resolve/main/vae/config.json
        match = re.search(r"/([^/\s]+/[^/\s]+)/resolve/[^/\s]+/([^\s?]+?):?(?:\s|$)", str(error))
        what = f"{match[2]} of {match[1]}" if match else "what it needs"
        return (
            f"{what} is neither in a folder here nor in the local cache, and HF_HUB_OFFLINE is "
            "set: unset it, or run the command once without it"
        )
    if is_a(error, "TransportError"):  # of httpx, which no other library here uses
        reason = str(error) or type(error).__name__
        return f"the hub can't be reached ({reason}): check the network, then run it again"
    if is_web_page(error):
        return (
            "the hub's answer is not JSON; perhaps it is the login page of a proxy: open the hub "
            "in a browser, then run it again"
        )
    if is_a(error, "DatasetNotFoundError"):  # `datasets` has dropped the hub's own error
        match = re.match(r"Dataset '([^']+)' (is a gated|doesn't exist)(.*)", str(error))
        if not match:
            return None
        if match[2] == "is a gated":
            return describe_gated(match[1], "must be authenticated" not in match[3])
        return describe_unknown(match[1])
    if not is_a(error, "HfHubHTTPError") or is_a(error, "EntryNotFoundError"):
        return None
    response: Any = vars(error)["response"]
    status = response.status_code
    # .../api/models/org/name/..., or .../org/name/resolve/...
    path = re.match(r"/(?:api/\w+/|datasets/)?([^/]+/[^/]+)", response.request.url.path)
    name = path[1] if path else "the repository"
    if is_a(error, "GatedRepoError"):
        return describe_gated(name, has_token=status != 401)
    if is_a(error, "RepositoryNotFoundError"):
        return describe_unknown(name)
    if is_a(error, "RevisionNotFoundError"):
        return f"{name} has no such revision: see the branches and tags on its page"
    said = (getattr(error, "server_message", None) or response.reason_phrase)[:200]
    has_token = "authorization" in response.request.headers
    if status == 401 and not has_token:
        return f"the hub needs your token ({said}): run `hf auth login`"
    if status == 401:
        return f"the hub refuses your token ({said}): run `hf auth login`, or unset HF_TOKEN"
    if is_refused_by_storage(error):
        return (
            f"{response.request.url.host} refuses the request ({said}), because of a firewall or "
            "of an address that has expired: run it again"
        )
    if status == 403:
        return f"your token lacks the right to do this ({said}): make one that has it"
    if status == 429:
        wait = response.headers.get("Retry-After")
        wait = f"in {wait} s" if wait else "in some minutes"
        return f"the hub allows no more requests for now (429): run it again {wait}"
    if status >= 500:
        return f"the hub has a fault ({status} {said}): run it again later"
    return f"{response.request.url.host} refuses the request ({status} {said}): run it again later"


def is_web_page(error: BaseException) -> bool:
    """Whether the hub's client got a text that is not JSON, such as the login page of a proxy.

    The error is the one that a damaged file on this disk raises, too, but it passes httpx, which
    has the name httpx2 in newer releases of the client.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    is_of_client = any(frame.f_globals["__name__"].startswith("httpx") for frame in frames)
    return is_of_client and is_a(error, "JSONDecodeError")


def is_refused_by_storage(error: BaseException) -> bool:
    """Whether a request without a token was refused: by the storage, or by a firewall.

    The storage is asked by an address that expires, and gets no token.
    """
    response: Any = getattr(error, "response", None)
    if not is_a(error, "HfHubHTTPError") or response is None:
        return False
    return response.status_code == 403 and "authorization" not in response.request.headers


def describe_gated(name: str, has_token: bool) -> str:
    if not has_token:
        return f"{name} is gated: accept its terms on its page, then run `hf auth login`"
    return (
        f"{name} is gated, and your token has no access to it: accept its terms on its page, with "
        "the account of the token, and wait if its authors must agree"
    )


def describe_unknown(name: str) -> str:
    return (
        f"the hub has no {name}, or it is private and your token may not read it: check the "
        "spelling, or run `hf auth login`"
    )


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
    if is_a(error, "TimeoutError", "ConnectionError", "TransportError", "LocalEntryNotFoundError"):
        return True
    if lacks_memory(error) or is_web_page(error):
        return True
    if is_a(error, "HfHubHTTPError"):  # the hub, or the right to read it, unless a file is missing
        return not is_a(error, "EntryNotFoundError")
    # fsspec's FileNotFoundError has a text there
    return (
        isinstance(error, OSError)
        and isinstance(error.errno, int)
        and error.errno not in FILE_ERRORS
    )


@contextlib.contextmanager
def suppressing_row_errors() -> Iterator[None]:
    """Suppress an error in the block if a row's data or file caused it; raise all others."""
    try:
        yield
    except (OSError, ValueError) as error:
        if is_machines_fault(error):
            raise


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
