"""Run a trainer with a setting that it has no flag for: rows of gpu.py.

    python benchmarks/gpu_settings.py cudnn.benchmark train_text_to_image.py --latents_dir ...

A setting becomes a flag once a GPU has shown that it helps.
"""

import os
import runpy
import sys
from pathlib import Path


def choose_convolutions():
    """Let cuDNN try its kernels for each shape, as EDM2 does."""
    import torch

    torch.backends.cudnn.benchmark = True


def expand_segments():
    """Let torch's allocator enlarge its blocks, as torchtitan does, against fragmentation."""
    os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def copy_beside():
    """Copy batches on a stream of their own, so that a copy runs beside the computation."""
    import bench
    import torch

    from diffusion_training import loading

    send = loading.send_to_device
    gpu = bench.find_gpu()
    side = gpu.Stream()

    def send_beside(batch, device, non_blocking):
        computing = gpu.default_stream(device)
        with gpu.stream(side):
            sent = send(batch, device, non_blocking=non_blocking)
        computing.wait_stream(side)  # what is queued from now on, such as the step of this batch
        for value in (sent or {}).values():
            if isinstance(value, torch.Tensor):
                value.record_stream(computing)  # or its memory could be reused too early
        return sent

    loading.send_to_device = send_beside


def keep_layout():
    """Leave models in torch's own memory layout, whatever `choose_layout` would choose."""
    import torch

    from diffusion_training import models

    models.choose_layout = lambda device: torch.preserve_format


def keep_attention():
    """Leave attention to torch's first choice. Trainers try cuDNN's first on Hopper."""
    import contextlib

    from diffusion_training import launch

    launch.choose_attention = lambda device: contextlib.nullcontext()


SETTINGS = {
    "torch's memory layout": keep_layout,
    "torch's attention": keep_attention,
    "cudnn.benchmark": choose_convolutions,
    "expandable segments": expand_segments,
    "copies on a stream of their own": copy_beside,
}


if __name__ == "__main__":
    _, setting, script, *argv = sys.argv
    sys.path[:0] = [str(Path(script).parent.resolve())]
    SETTINGS[setting]()
    sys.argv = [script, *argv]
    runpy.run_path(script, run_name="__main__")
