"""Try the sampler of a pipeline before it is needed."""

from typing import Any

import torch


@torch.no_grad()
def try_sampler(sampler: Any, num_steps: int, **options: Any) -> None:
    """Call a sampler as a pipeline does, for at most ten of `num_steps` steps; raises its errors.

    options: for `set_timesteps`.
    """
    sampler.set_timesteps(min(num_steps, 10), **options)
    sample = torch.zeros(1, 4, 8, 8)
    for timestep in sampler.timesteps:
        scaled = sample
        if hasattr(sampler, "scale_model_input"):  # flow matching needs none
            scaled = sampler.scale_model_input(sample, timestep)
        sample = sampler.step(torch.zeros_like(scaled), timestep, sample).prev_sample
