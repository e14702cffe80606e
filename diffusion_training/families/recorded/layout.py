"""How a recorded pipeline packs, scales and orders the latents that its VAE decodes.

1. `trace_decoding` lets the pipeline's code go on from given noise to its VAE, without steps.
2. From zeros, a large number and the digits of 0, 1, 2, ..., `probe_layout` reads shift, scale and
   order.
3. `describe_scale` gives shift and scale as a VAE's config has them, one for each channel.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from diffusion_training.families.recorded.calls import DenoiserCalls
from diffusion_training.families.recorded.pipeline_run import PipelineTrace
from diffusion_training.families.recorded.tape import Unrecordable
from diffusion_training.families.recorded.text_tensors import list_numbers

BASE = 4096  # of digits
LARGE = 2.0**40  # beside it, a shift of latents is lost in rounding


@dataclass(frozen=True)
class Layout:
    """What becomes of latents [C, h, w] on their way to the VAE."""

    shape: torch.Size  # of one image there
    order: torch.Tensor  # the position in the latents of each number there
    shift: torch.Tensor  # what becomes of 0, in the order of the latents
    large: torch.Tensor  # what becomes of `LARGE`
    further: Sequence[torch.Tensor | None]  # what the VAE gets beside them, for one image


class InFloat32:
    """A VAE that a pipeline gives latents in float32, whatever its own precision."""

    dtype = torch.float32

    def __init__(self, vae: Any) -> None:
        self.vae = vae

    def __getattr__(self, name: str) -> Any:
        return getattr(self.vae, name)


def trace_decoding(
    calls: DenoiserCalls, vae: Any, size: tuple[int, int], noise: torch.Tensor
) -> PipelineTrace:
    """A run that notes what the pipeline gives to its VAE if it ends with this noise."""
    run = PipelineTrace("decode", noise.reshape, texts=[calls.make_texts([1])])
    run_with(calls, vae, size, run)
    run.decoded = run.decoded.cpu().float()
    return run


def run_with(
    calls: DenoiserCalls, vae: Any, size: Sequence[int], run: PipelineTrace, **options: Any
) -> None:
    """Run the pipeline's code with the weights and config of a VAE."""
    pipeline = calls.code.pipeline
    stand_in, pipeline.vae = pipeline.vae, InFloat32(vae)
    try:
        calls.run(1, size, run, **options)
    finally:
        pipeline.vae = stand_in


def normalize_references(
    calls: DenoiserCalls, vae: Any, images: list[Any], latents: list[torch.Tensor]
) -> list[torch.Tensor]:
    """Latents of a row's references with the VAE's statistics, as the pipeline applies them.

    The shapes and the order of the numbers are those of `latents`. The pipeline's own code runs
    with 0, 1, 2, ... in place of latents, which tells where each number goes, and with the latents
    and the VAE's statistics.
    """
    sizes = [each.numel() for each in latents]
    positions = torch.arange(1.0, 1 + sum(sizes)).split(sizes)
    numbers = []
    for given in ([torch.zeros(count) for count in sizes], positions, latents):
        run = PipelineTrace("denoiser", torch.zeros, texts=[calls.make_texts([8])])
        run.references = [each.cpu() for each in given]
        options = calls.name_images(images)
        if given is latents:
            run_with(calls, vae, calls.shape[1:], run, **options)
        else:
            calls.run(1, calls.shape[1:], run, **options)
        numbers.append(list_numbers(run.calls))
    blank, counted, scaled = numbers
    is_reference = counted != blank
    order = counted[is_reference].long()
    if not torch.equal(order.sort().values, torch.arange(1, 1 + sum(sizes))):
        raise Unrecordable("its denoiser gets other numbers than the latents of references")
    found = scaled[is_reference][order.argsort()].split(sizes)
    return [each.view_as(own) for each, own in zip(found, latents, strict=True)]


def probe_layout(calls: DenoiserCalls, vae: Any, size: tuple[int, int]) -> Layout:
    """The layout of latents of this size, found out once."""
    if size not in calls.layouts:
        count = calls.channels * math.prod(size)
        with torch.inference_mode(False), torch.device("cpu"):
            numbers = torch.arange(count)
            fills = torch.zeros(count), torch.full((count,), LARGE)
            of_zeros, of_large = (trace_decoding(calls, vae, size, each) for each in fills)
            shift, large = of_zeros.decoded, of_large.decoded
            # scaled and shifted back, float32 counts to some thousands exactly, so in two digits
            digits = (
                (trace_decoding(calls, vae, size, each.float()).decoded - shift) / (large / LARGE)
                for each in (numbers // BASE, numbers % BASE)
            )
            high, low = (digit.round().long().flatten() for digit in digits)
            order = high * BASE + low
            if not torch.equal(order.sort().values, torch.arange(count)):
                raise Unrecordable("its VAE gets other numbers than its latents")
            back = order.argsort()
            shape = shift.shape[1:]
            shift, large = (each.flatten()[back] for each in (shift, large))
        calls.layouts[size] = Layout(shape, order, shift, large, of_zeros.decoded_with)
    return calls.layouts[size]


@functools.cache
def place(order: torch.Tensor, device: torch.device, is_inverse: bool = False) -> torch.Tensor:
    """The order of a layout, or its inverse, on a device."""
    return (order.argsort() if is_inverse else order).to(device)


def describe_scale(calls: DenoiserCalls, vae: Any) -> dict[str, Any]:
    """See `Family.describe_scale`."""
    channels, height, width = calls.shape
    layout = probe_layout(calls, vae, (height, width))
    shift, large = (each.view(channels, -1) for each in (layout.shift, layout.large))
    if any((each != each[:, :1]).any() for each in (shift, large)):
        raise Unrecordable("its latents have no scale per channel")
    shifts = [float(str(number)) for number in shift[:, 0].numpy()]
    factors = (LARGE / large[:, 0]).tolist()
    is_one = len(set(factors)) == 1
    return {
        # a number of a config has few digits, and one that a VAE has measured for a channel has all
        "scaling_factor": shorten_factor(large[0, 0], factors[0]) if is_one else factors,
        "shift_factor": shifts[0] if len(set(shifts)) == 1 else shifts,
    }


def shorten_factor(large: torch.Tensor, factor: float) -> float:
    """The factor that makes `large` of `LARGE` by division, with few digits if those suffice."""
    for digits in range(1, 7):
        short = float(f"{factor:.{digits}g}")
        if short and torch.equal(torch.tensor(LARGE) / short, large):
            return short
    return factor
