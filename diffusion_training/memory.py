"""Send tensors to a device and copy them back, measure memory, find how many images fit into it."""

import contextlib
import gc
import multiprocessing
import time
from collections.abc import Callable
from typing import Any

import psutil
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from accelerate.utils.memory import should_reduce_batch_size

from diffusion_training.errors.stop_signals import end_if_stopped


def is_gpu(device: torch.device) -> bool:
    """Return whether a device is a GPU with CUDA. Tests patch this to imitate a GPU."""
    return device.type == "cuda"


def move(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor from the CPU to a device. A GPU takes it from pinned memory: nothing waits."""
    if is_gpu(device):
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def measure_memory(device: torch.device) -> tuple[int, int]:
    """Return the peak bytes (in use, reserved by torch) of a CUDA device.

    On other devices, both are the bytes that this process and its workers hold now.
    """
    if is_gpu(device):
        gpu = torch.get_device_module(device)
        return gpu.max_memory_allocated(device), gpu.max_memory_reserved(device)
    held = 0
    for process in (None, *(worker.pid for worker in multiprocessing.active_children())):
        with contextlib.suppress(psutil.Error):  # the process has just ended
            held += psutil.Process(process).memory_info().rss
    return held, held


def find_largest(
    accelerator: Accelerator,
    device: torch.device,
    prepare: Callable[[int], Callable[[int], Any]],
    most: int,
) -> int:
    """Return how many images, up to `most`, fit on the devices of all processes; 0 if none does.

    The number is doubled until the memory is full, then bisected. A tenth of a GPU stays free. On a
    CPU the limit is 64, because a CPU does not report that its memory is full. Each number is
    printed with the memory of the first device and the images per second of step 1.

    prepare(size) puts everything onto the device and returns compute(step), which is called for
    steps 0 and 1.
    """

    gpu = torch.get_device_module(device) if is_gpu(device) else None

    def fits(size: int) -> bool:
        full = False
        compute = None
        try:
            compute = prepare(size)
            if gpu:
                gpu.reset_peak_memory_stats(device)
            for step in range(2):
                begin = time.perf_counter()
                compute(step)
                if gpu:
                    gpu.synchronize(device)
            speed = size / (time.perf_counter() - begin)
            measured = f"{measure_memory(device)[0] / 1e9:12.3g}{speed:10.1f}"
        except RuntimeError as error:
            full = should_reduce_batch_size(error)
            if not full:
                raise
        compute = None
        accelerator.free_memory()
        full = any(gather_object([full]))
        accelerator.print(f"{size:8}{'too many' if full else measured:>12}")
        return not full

    if gpu:
        gpu.set_per_process_memory_fraction(0.9)
    most = min(most, 64) if device.type == "cpu" else most
    gc.freeze()  # collecting the garbage of a trial need not visit all other objects
    accelerator.print(f"{'images':>8}{'memory, GB':>12}{'images/s':>10}")
    low = 0  # this many images fit
    high = most + 1  # this many do not
    while high - low > 1:
        end_if_stopped()
        size = min(2 * low or 1, most) if high > most else (low + high) // 2
        if fits(size):
            low = size
        else:
            high = size
    gc.unfreeze()
    if gpu:
        gpu.set_per_process_memory_fraction(1.0)
    return low
