"""Stop a run after a signal, on all processes in the same step."""

import contextlib
import os
import signal
import sys
from types import FrameType
from typing import Any, NoReturn

import torch
from accelerate import Accelerator

from diffusion_training.errors.sentences import name_command, surviving
from diffusion_training.errors.stop_signals import SIGNALS, handling
from diffusion_training.launch import TIMEOUT, make_group


class StopSignal:
    """Notes the stop signals, which end the run on all processes after the current step.

    together: whether all processes call the models at the same time, and `poll` equally often.
    writer: `Writer`, whose thread may fail.
    """

    def __init__(self, num_processes: int, together: bool = False, writer: Any = None) -> None:
        self.together = together
        self.writer = writer
        self.agreed = 0
        self.starved_because = ""  # why --follow ends the run
        self.handlers = contextlib.ExitStack()
        self.handlers.enter_context(handling(self.note))
        self.group = make_group(TIMEOUT) if num_processes > 1 else None

    @property
    def received(self) -> int:
        # SIGNALS also has a signal from before, whose exception was swallowed
        return self.agreed or (SIGNALS[-1] if SIGNALS else 0)

    def note(self, number: int, frame: FrameType | None) -> None:
        SIGNALS.append(number)
        if len(SIGNALS) >= 3:  # torchrun sends each signal twice; a third one is meant to kill
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    @property
    def was_stopped(self) -> bool:
        """Whether all processes have agreed to end the run before its last step."""
        return bool(self.agreed or self.starved_because)

    def agree(self) -> int:
        """Once per step: return the signal's number if any process has received one, else 0.

        If the writer has failed, all processes end here, in the same step.
        """
        has_failed = self.writer is not None and self.writer.has_failed()
        self.agreed, has_failed = self.find_highest(self.received, has_failed)
        if has_failed:
            self.writer.wait()  # raises the error
            self.find_highest(0, False)  # other processes wait here until the first one has ended
        return self.agreed

    def find_highest(self, number: int, flag: bool) -> tuple[int, bool]:
        """Return the highest of each value on all processes."""
        numbers = torch.tensor([number, int(flag)])
        if self.group is not None:
            torch.distributed.all_reduce(numbers, torch.distributed.ReduceOp.MAX, group=self.group)
        return int(numbers[0]), bool(numbers[1])

    def poll(self) -> int:
        """Between two calls of a model: return the signal's number or 0."""
        return self.agree() if self.together else self.received

    def close(self) -> None:
        self.handlers.close()


def end_stopped(
    accelerator: Accelerator, stop: int, global_step: int, max_train_steps: int
) -> NoReturn:
    """End the program after a signal, with the exit status for that signal."""
    where = f"after step {global_step} of {max_train_steps}"
    name = signal.Signals(stop).name
    accelerator.print(f"Stopped by {name} {where}; {name_command()} continues from there")
    with surviving("the trackers could not be closed"):
        accelerator.end_training()
    SIGNALS.clear()  # it has been reported
    sys.exit(128 + stop)
