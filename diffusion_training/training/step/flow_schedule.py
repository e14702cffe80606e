"""The sampler of flow matching, its shift of the noise levels, and the levels of training."""

import math
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from diffusion_training.errors.sentences import explained
from diffusion_training.families.base import Base, Family
from diffusion_training.training.step.samplers import try_sampler


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


def choose_training_shift(
    scheme: str, sampler: FlowMatchEulerDiscreteScheduler, patch_size: int, family: Family
) -> Callable[[int, int], float]:
    """(height, width) of latents -> shift of the noise levels in training.

    The sampler's, except with two of --weighting_scheme: "sigmoid" has none, and "flux_shift" that
    of FLUX.1 for an image of so many tokens.
    """
    if scheme == "sigmoid":
        return lambda height, width: 1.0
    if scheme == "flux_shift":  # diffusers' defaults are FLUX.1's values
        flux = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
        return partial(choose_shift, flux, patch_size)
    return partial(choose_shift, sampler, patch_size, family=family)


def draw_sigmas(args: Namespace, count: int, device: torch.device) -> torch.Tensor:
    """Shares of noise in [0, 1], float32 [count], from --weighting_scheme, before the shift."""
    if args.weighting_scheme not in ("uniform", "mode", "cosmap"):
        # more levels halfway between image and noise (arXiv:2403.03206, 3.1)
        normal = torch.randn(count, device=device)
        return torch.sigmoid(args.logit_mean + args.logit_std * normal)
    sigmas = torch.rand(count, device=device)
    angle = math.pi / 2 * sigmas
    if args.weighting_scheme == "mode":  # eq. 20 there
        return 1 - sigmas - args.mode_scale * (angle.cos().square() - 1 + sigmas)
    if args.weighting_scheme == "cosmap":  # the same as 1 - 1 / (tan(angle) + 1)
        return angle.sin() / (angle.sin() + angle.cos())
    return sigmas
