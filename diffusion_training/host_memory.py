"""The memory of the host: how much is free, and pinned memory that tensors are cut from."""

import contextlib
import math
from pathlib import Path

import psutil
import torch

from diffusion_training.memory import is_gpu

# torch rounds the size of pinned memory up to a power of two, so that other sizes would waste some
BLOCK = 2**30  # bytes
CGROUPS = Path("/sys/fs/cgroup")


class HostMemory:
    """Memory of the host, pinned for a GPU, from which tensors are cut, one after another.

    Raises RuntimeError if there is not enough.

    num_bytes: of all tensors together. More of them get memory of their own, which is not pinned.
    """

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.blocks = []
        # the end of a block stays empty if the next tensor does not fit there
        rest = int(1.05 * num_bytes) + 2**20
        while rest > 0:
            block = torch.empty(min(rest, BLOCK), dtype=torch.uint8)
            # Memory that is not pinned is taken when it is first written to. If that was now, the
            # processes that load data, which are forked later, would keep the old pages.
            block = block.pin_memory() if is_gpu(device) else block
            self.blocks.append(block.untyped_storage())
            rest -= BLOCK
        self.place = 0, 0  # block and byte where the next tensor begins

    def cut(self, like: torch.Tensor) -> torch.Tensor:
        """A tensor with the type, shape and layout of another one, and any values."""
        shape = torch.empty_like(like, device="meta")
        size = math.ceil(shape.nbytes / 64) * 64
        number, start = self.place
        while number < len(self.blocks) and start + size > self.blocks[number].nbytes():
            number, start = number + 1, 0
        if number == len(self.blocks):
            return torch.empty_like(like, device="cpu")
        self.place = number, start + size
        # a storage of its own, because torch.save writes whole storages
        storage = self.blocks[number][start : start + shape.nbytes]
        tensor = torch.empty(0, dtype=like.dtype)
        return tensor.set_(storage, 0, shape.shape, shape.stride())


def measure_free() -> int:
    """The bytes of the host's memory that processes can still take.

    A container or a Slurm job may have less than the machine, which psutil does not know.
    """
    free = psutil.virtual_memory().available
    with contextlib.suppress(OSError):  # no cgroups of version 2
        own = Path("/proc/self/cgroup").read_text().rpartition("0::/")[2].strip()
        for group in (CGROUPS / own, *(CGROUPS / own).parents):
            limit = group / "memory.max"
            if limit.is_file() and (most := limit.read_text().strip()) != "max":
                used = int((group / "memory.current").read_text())
                counts = dict(map(str.split, (group / "memory.stat").read_text().splitlines()))
                free = min(free, int(most) - used + int(counts["inactive_file"]))
    return free
