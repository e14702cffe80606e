"""Let the processes of a run wait for each other, for longer than a collective call may."""

import time
from datetime import timedelta

import torch

from diffusion_training.launch import Launch, make_group


class Meeting:
    """A point at which all processes wait for the last one, perhaps for days. A signal ends it."""

    def __init__(self, launch: Launch) -> None:
        self.group = make_group(timedelta(days=100)) if launch.num_processes > 1 else None

    def wait(self) -> None:
        if self.group is not None:
            work = torch.distributed.barrier(self.group, async_op=True)
            while not work.is_completed():  # not work.wait(), in which Python handles no signal
                time.sleep(0.1)
            work.wait()  # raises its error
