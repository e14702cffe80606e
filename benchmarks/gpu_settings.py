"""Run a trainer with settings that it has no flag for: rows of gpu_plan.py.

    python benchmarks/gpu_settings.py cudnn.benchmark+channels_last train_text_to_image.py ...

A setting becomes a flag once a GPU has shown that it helps.
"""

import functools
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


def use_channels_last():
    """Use channels_last for all models, also where group norms do not keep it."""
    import torch

    from diffusion_training import models

    models.choose_layout = lambda device: torch.channels_last


def prefer_attention(*first):
    """Try these kernels of attention first. torch's choice is cuDNN's on H100, H200 and B200."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from diffusion_training.errors.sentences import CHANGED

    names = dict.fromkeys([*first, "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH"])
    backends = [getattr(SDPBackend, name) for name in names]
    CHANGED.enter_context(sdpa_kernel(backends, set_priority=True))  # until the script ends


def share_plans():
    """Let one plan of cuDNN's attention serve several lengths, where there is no mask."""
    os.environ["TORCH_CUDNN_SDPA_AVOID_RECOMPILE"] = "1"  # experimental in torch 2.15
    prefer_attention("CUDNN_ATTENTION")


def norm_in_bf16():
    """Let group and layer norms read and write what they get, such as bfloat16.

    Autocast computes them in float32, which costs two more passes through memory. Their statistics
    are float32 inside the kernel anyway.
    """
    import torch
    from torch.nn import functional

    def keep(norm):
        def inner(images, *shape, weight=None, bias=None, eps=1e-5):
            own = [None if part is None else part.to(images.dtype) for part in (weight, bias)]
            kind = "cpu" if images.is_meta else images.device.type  # meta has no autocast
            with torch.autocast(kind, enabled=False):
                return norm(images, *shape, *own, eps)

        return inner

    groups, layers = keep(functional.group_norm), keep(functional.layer_norm)

    def run_groups(self, images):
        return groups(images, self.num_groups, weight=self.weight, bias=self.bias, eps=self.eps)

    def run_layers(self, images):
        shape = self.normalized_shape
        return layers(images, shape, weight=self.weight, bias=self.bias, eps=self.eps)

    torch.nn.GroupNorm.forward, torch.nn.LayerNorm.forward = run_groups, run_layers


def compile_in(mode):
    """Compile in a mode of torch.compile, as `accelerate config` sets it."""
    os.environ |= {"ACCELERATE_DYNAMO_BACKEND": "INDUCTOR", "ACCELERATE_DYNAMO_MODE": mode}


SETTINGS = {
    "torch's memory layout": keep_layout,
    "channels_last": use_channels_last,
    "cuDNN's attention": functools.partial(prefer_attention, "CUDNN_ATTENTION"),
    "cuDNN's, shared plans": share_plans,
    "flash attention": functools.partial(prefer_attention, "FLASH_ATTENTION"),
    "norms in bf16": norm_in_bf16,
    "cudnn.benchmark": choose_convolutions,
    "expandable segments": expand_segments,
    "copies on a stream of their own": copy_beside,
}
# of torch.compile, for runs that the others do not take part in
MODES = {
    "max-autotune-no-cudagraphs": functools.partial(compile_in, "max-autotune-no-cudagraphs"),
    "reduce-overhead": functools.partial(compile_in, "reduce-overhead"),
}


if __name__ == "__main__":
    _, names, script, *argv = sys.argv
    sys.path[:0] = [str(Path(script).parent.resolve())]
    for name in names.split("+"):
        (SETTINGS | MODES)[name]()
    sys.argv = [script, *argv]
    runpy.run_path(script, run_name="__main__")
