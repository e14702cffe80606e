"""Errors described in one line, and told apart: of a row, of the machine, of another process."""

import contextlib
import errno
import re
from collections.abc import Iterator

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
