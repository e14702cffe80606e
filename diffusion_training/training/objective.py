"""The objective: which schedulers it goes with, its min-SNR weight, and any prediction as one of the noise."""

from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import DDPMScheduler
from diffusers.training_utils import compute_snr

from diffusion_training.errors import fail
from diffusion_training.training.models import call_unet


def objective_flags(args: Namespace) -> dict[str, Any]:
    """What the flags say of a scheduler's objective; the rest is left as the scheduler has it."""
    flags = {} if args.prediction_type is None else {"prediction_type": args.prediction_type}
    if args.rescale_betas_zero_snr:
        # Sampling must then start at the last timestep, which "leading" spacing leaves out.
        flags |= {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
    return flags


def check_objective(scheduler: DDPMScheduler) -> None:
    """Refuse a scheduler that `compute_loss` can't train."""
    timesteps = scheduler.config.num_train_timesteps
    if type(timesteps) is not int or timesteps < 2:
        fail(f"the scheduler has {timesteps!r} training timesteps: there must be two at least")
    if scheduler.config.prediction_type not in ("epsilon", "sample", "v_prediction"):
        fail(f"the scheduler's prediction type {scheduler.config.prediction_type!r} is unknown: set --prediction_type")
    if scheduler.config.rescale_betas_zero_snr and scheduler.config.prediction_type == "epsilon":
        fail("--rescale_betas_zero_snr needs --prediction_type v_prediction or sample: epsilon has nothing to learn")


def min_snr_weight(
    weight: torch.Tensor, noise_scheduler: DDPMScheduler, timesteps: torch.Tensor, gamma: float
) -> torch.Tensor:
    """`weight` [N] times the min-SNR weight at `timesteps` [N], as the prediction type has it (arXiv:2303.09556)."""
    snr = compute_snr(noise_scheduler, timesteps)
    if noise_scheduler.config.prediction_type == "epsilon":
        return weight * snr.clamp(max=gamma) / snr
    if noise_scheduler.config.prediction_type == "sample":
        return weight * snr.clamp(max=gamma)
    # SNR + 1, as diffusers had it first: the paper's weight is 0 at the pure noise of a zero terminal SNR
    return weight * (snr + 1).clamp(max=gamma) / (snr + 1)


def to_epsilon(
    prediction: torch.Tensor, noisy_images: torch.Tensor, noise_scheduler: DDPMScheduler, timesteps: torch.Tensor
) -> torch.Tensor:
    """What the U-Net predicts, of whatever type, as a prediction of the noise (arXiv:2202.00512, appendix D)."""
    alpha = noise_scheduler.alphas_cumprod.to(prediction.device)[timesteps].view(-1, 1, 1, 1)  # the signal's variance
    if noise_scheduler.config.prediction_type == "epsilon":
        return prediction
    if noise_scheduler.config.prediction_type == "sample":
        return (noisy_images - alpha.sqrt() * prediction) / (1 - alpha).sqrt()
    return alpha.sqrt() * prediction + (1 - alpha).sqrt() * noisy_images


def measure_epsilon(noise_scheduler: DDPMScheduler) -> tuple[Callable, Callable]:
    """What `log_held_out_loss` measures of a U-Net: the mean squared error of epsilon, whatever is predicted.

    Returns (add_noise(images, noise, tenths) -> noisy images, measure(unet, noisy images, tenths, condition, images,
    noise) -> the loss of each image [N]); tenths: which share of the timesteps, int [N].
    """
    num_timesteps = noise_scheduler.config.num_train_timesteps

    def add_noise(images: torch.Tensor, noise: torch.Tensor, tenths: torch.Tensor) -> torch.Tensor:
        return noise_scheduler.add_noise(images, noise, tenths * num_timesteps // 10)

    def measure(
        unet: torch.nn.Module, noisy_images: torch.Tensor, tenths: torch.Tensor, condition: dict[str, torch.Tensor],
        images: torch.Tensor, noise: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        timesteps = tenths * num_timesteps // 10
        prediction = call_unet(unet, noisy_images, timesteps, condition)
        prediction = to_epsilon(prediction, noisy_images, noise_scheduler, timesteps)
        return F.mse_loss(prediction, noise, reduction="none").mean(dim=(1, 2, 3))

    return add_noise, measure
