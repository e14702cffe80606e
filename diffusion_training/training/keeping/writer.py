"""A thread that writes checkpoints, snapshots, samples and reports while the training goes on."""

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
        """Let the thread call `write`, after all that was begun before, unless that has failed.

        So a checkpoint that is whole has the snapshots and samples of the steps before.

        kind: "checkpoint", "snapshot", "samples" or "report". Waits for the last of this kind.
        """
        self.wait(kind)
        before = [*self.writing.values()]

        def write_next() -> None:
            for each in before:
                each.result()
            write()

        self.writing[kind] = self.thread.submit(write_next)

    def has_failed(self) -> bool:
        """Whether a file could not be written; False while it is still being written."""
        return any(each.done() and each.exception() for each in self.writing.values())

    def wait(self, *kinds: str) -> None:
        """Wait until the last of these kinds is written, of all by default. Raises its error."""
        for kind in kinds or [*self.writing]:
            if kind in self.writing:
                self.writing[kind].result()
