"""A trial of a recorded pipeline's denoiser, before it is trained.

1. `make_small` makes a denoiser of few layers with random weights.
2. `is_exact` calls it for two images at two times, together and alone.
3. `probe_batching` tells by it whether captions of several lengths can share a call.
"""

from typing import Any

import torch

from diffusion_training.families.recorded.calls import DenoiserCalls
from diffusion_training.families.recorded.tape import Unrecordable
from diffusion_training.families.recorded.text_tensors import stack_rows

SMALL = 64  # side in pixels of an image on which a denoiser is tried


def probe_batching(calls: DenoiserCalls, resolution: int, config: Any) -> bool:
    """Whether each image needs a call of its own, since captions have several lengths.

    Raises Unrecordable if a batch of two equal lengths differs from each image alone.
    """
    model = make_small(calls.code.denoiser_class, config)
    if not is_exact(calls, model, resolution, [8, 8]):
        raise Unrecordable("two images in a batch change each other")
    return calls.is_ragged and not is_exact(calls, model, resolution, [8, 5])


@torch.no_grad()
def is_exact(
    calls: DenoiserCalls, model: torch.nn.Module, resolution: int, lengths: list[int]
) -> bool:
    """Whether a batch of two captions, of these lengths and at two times, equals each alone."""
    with torch.device("cpu"):
        generator = torch.Generator().manual_seed(0)
        side = min(SMALL, resolution) // calls.downscale
        noisy = torch.randn(2, calls.channels, side, side, generator=generator)
        times = torch.tensor([0.7, 0.3])
        rows = []
        for count in lengths:
            row = {}
            for part in calls.parts:
                shape = [count, *part["shape"][1:]] if part["is_ragged"] else part["shape"]
                row[part["column"]] = torch.full(shape, part["typical"])
                is_own = part["axis"] is not None and not part.get("is_zero")
                if part["dtype"].startswith("float") and is_own:
                    row[part["column"]] = torch.randn(shape, generator=generator)
            rows.append(row)
        prompts = stack_rows(calls.parts, rows)
        together = calls.predict(model, noisy, times, prompts)
        for order in ([0], [1], [1, 0]):
            some = {name: value[order] for name, value in prompts.items()}
            alone = calls.predict(model, noisy[order], times[order], some)
            if (alone - together[order]).abs().max() > 1e-3 * together.abs().mean():
                return False
    return True


def make_small(kind: Any, config: Any) -> torch.nn.Module:
    """A denoiser of few layers with random weights, on the CPU."""
    ends = ("layers", "blocks", "depth")
    few = {
        name: 1
        for name, value in config.items()
        # those of the text encoder are inputs
        if name.startswith(("num_", "n_")) and name.endswith(ends) and "text" not in name
        if isinstance(value, int) and value > 1
    }
    try:
        with torch.device("meta"):
            kind.from_config({**config, **few})
    except Exception:  # its layers depend on each other
        few = {}
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(0)
        model = kind.from_config({**config, **few}).eval()
        for weight in model.parameters():
            if weight.dim() > 1:
                torch.nn.init.normal_(weight, std=weight[0].numel() ** -0.5)
    return model
