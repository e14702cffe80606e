"""A thread that writes checkpoints and snapshots while the training goes on."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from diffusion_training.errors.sentences import CHANGED


class Writer:
    """A thread of the first process, which writes files while the training goes on."""

    def __init__(self) -> None:
        self.thread = ThreadPoolExecutor(1)
        self.writing: dict[str, Future[None]] = {}  # the last of each kind
        CHANGED.callback(self.thread.shutdown)  # a run that fails waits for it, too

    def begin(self, kind: str, write: Callable[[], None]) -> None:
        """Let the thread call `write`. kind: "checkpoint" or "snapshot"."""
        self.writing[kind] = self.thread.submit(write)

    def has_failed(self) -> bool:
        """Whether a file could not be written; False while it is still being written."""
        return any(each.done() and each.exception() for each in self.writing.values())

    def wait(self, *kinds: str) -> None:
        """Wait until the last of these kinds is written, of all by default. Raises its error."""
        for kind in kinds or ("snapshot", "checkpoint"):
            if kind in self.writing:
                self.writing[kind].result()
