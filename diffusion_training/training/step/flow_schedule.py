"""The sampler of flow matching, and its shift of the noise levels."""

import math
from argparse import Namespace
from typing import Any

from diffusers import FlowMatchEulerDiscreteScheduler

from diffusion_training.errors.sentences import explained
from diffusion_training.families.base import Base, Family
from diffusion_training.training.step.objective import try_sampler


def make_scheduler(base: Base, resolution: int, args: Namespace) -> FlowMatchEulerDiscreteScheduler:
    """Make the sampler of the pipeline, with --shift."""
    _, class_name = base.index.get("scheduler", [None, None])
    with explained(f"{base.source} holds no scheduler for flow matching"):
        if class_name == FlowMatchEulerDiscreteScheduler.__name__:
            sampler = base.family.load_scheduler(base)
        else:  # the base has no flow matching, or is not a pipeline but single models
            known = 3.0 if resolution >= 512 else 1.0
            if base.index.get("_class_name") == base.family.pipeline and args.shift is None:
                source, options = base.locate_scheduler()
                config = FlowMatchEulerDiscreteScheduler.load_config(source, **options)
                # other solvers of flow matching, such as SANA's, have the shift by this name
                known = config.get("flow_shift") if config.get("use_flow_sigmas") else None
            if known is None:
                raise ValueError(f"it has a {class_name}: set the shift of the noise with --shift")
            sampler = FlowMatchEulerDiscreteScheduler(shift=known)
        if args.shift is not None:  # the same for all sizes
            sampler = FlowMatchEulerDiscreteScheduler.from_config(
                sampler.config, shift=args.shift, use_dynamic_shifting=False
            )
        if class_name:
            side = resolution // 8  # of the latents, roughly
            shift = choose_shift(sampler, 2, side, side)
            if not 0 < shift < math.inf:
                raise ValueError(f"it shifts the noise by {shift}")
            # some pipelines pass mu to any scheduler
            mu = compute_mu(sampler.config, side**2 / 4)
            try_sampler(sampler, 10, mu=mu)
    return sampler


def compute_mu(config: Any, tokens: float) -> float:
    """The exponent of the shift for an image of so many tokens, as the pipelines compute it."""
    slope = (config.max_shift - config.base_shift) / (
        config.max_image_seq_len - config.base_image_seq_len
    )
    return config.base_shift + slope * (tokens - config.base_image_seq_len)


def choose_shift(
    sampler: FlowMatchEulerDiscreteScheduler,
    patch_size: int,
    height: int,
    width: int,
    family: Family | None = None,
) -> float:
    """The sampler's shift of the noise levels, used in training too (arXiv:2403.03206, 5.3.2).

    With use_dynamic_shifting it grows with the number of tokens, as in the pipelines. height,
    width: size of the latents. family: whose pipeline may have a formula of its own.
    """
    config = sampler.config
    if not config.use_dynamic_shifting:
        return config.shift
    mu = compute_mu(config, height * width / patch_size**2)
    if family:
        mu = family.choose_mu((height, width), mu)
    return math.exp(mu) if config.time_shift_type == "exponential" else mu
