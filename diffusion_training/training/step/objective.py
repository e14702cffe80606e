"""The objective of U-Nets: supported schedulers, the min-SNR weight, and predictions as noise."""

from argparse import Namespace
from typing import Any

import diffusers
import torch
import torch.nn.functional as F
from diffusers import DDIMScheduler, DDPMScheduler, SchedulerMixin
from diffusers.training_utils import compute_snr

from diffusion_training.batches import HeldOutLoss, Models, Predict
from diffusion_training.errors.sentences import explained, fail
from diffusion_training.repositories import fetch_model
from diffusion_training.training.step.samplers import try_sampler


def objective_flags(args: Namespace) -> dict[str, Any]:
    """Return the objective's scheduler options that the flags set; others keep their values."""
    flags = {} if args.prediction_type is None else {"prediction_type": args.prediction_type}
    if args.rescale_betas_zero_snr:
        # Sampling must then start at the last timestep, which "leading" spacing leaves out.
        flags |= {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
    return flags


def check_objective(scheduler: DDPMScheduler) -> None:
    """Stop with an error if `compute_loss` can't train with a scheduler."""
    timesteps = scheduler.config.num_train_timesteps
    if type(timesteps) is not int or timesteps < 2:
        fail(f"the scheduler has {timesteps!r} training timesteps: it needs at least two")
    if scheduler.betas.shape != (timesteps,):
        fail(
            f"the scheduler has {scheduler.betas.numel()} betas for {timesteps} training timesteps"
        )
    if not all(0 <= beta <= 1 for beta in scheduler.betas.tolist()):  # nor NaN
        fail(
            f"the scheduler's betas go from {scheduler.betas[0]:g} to {scheduler.betas[-1]:g}: "
            "they must lie between 0 and 1"
        )
    if scheduler.config.prediction_type not in ("epsilon", "sample", "v_prediction"):
        fail(
            f"the scheduler's prediction type {scheduler.config.prediction_type!r} is unknown: "
            "set --prediction_type"
        )
    if scheduler.config.rescale_betas_zero_snr and scheduler.config.prediction_type == "epsilon":
        fail(
            "--rescale_betas_zero_snr needs --prediction_type v_prediction or sample: from pure "
            "noise, epsilon has nothing to learn"
        )


def load_sampler(source: str | None, options: dict[str, Any], objective: dict[str, Any]) -> Any:
    """Load the scheduler of a pipeline, in its own class. Stops with an error if it has no betas.

    A DDPMScheduler would have betas that the model was never trained with. options: subfolder.
    objective: see `objective_flags`.
    """
    config = DDPMScheduler.load_config(source, **options)
    sampler = getattr(diffusers, config["_class_name"]).from_pretrained(
        source, **options, **objective
    )
    if not hasattr(sampler, "betas"):
        fail(
            f"{source} has a {type(sampler).__name__}, which has no betas: training needs a "
            "scheduler such as DDIMScheduler"
        )
    return sampler


def make_noise_scheduler(args: Namespace) -> DDPMScheduler:
    """Make the scheduler that adds noise in training.

    Flags override the scheduler of the pretrained pipeline.
    """
    flags = {"num_train_timesteps": args.ddpm_num_steps, "beta_schedule": args.ddpm_beta_schedule}
    flags = {key: value for key, value in flags.items() if value is not None} | objective_flags(
        args
    )
    source = args.pretrained_model_name_or_path
    with explained(f"{source} holds no scheduler" if source else "the flags don't fit together"):
        if source:
            folder = fetch_model(source, args.cache_dir, ("scheduler",))
            options = {"subfolder": "scheduler"}
            load_sampler(folder, options, flags)  # checks the pipeline's own scheduler class
            scheduler = DDPMScheduler.from_pretrained(folder, **options, **flags)
        else:
            scheduler = DDPMScheduler(**flags)
    check_objective(scheduler)
    timesteps = scheduler.config.num_train_timesteps
    if args.ddpm_num_inference_steps > timesteps:
        fail(
            f"--ddpm_num_inference_steps {args.ddpm_num_inference_steps} exceeds the {timesteps} "
            "training timesteps"
        )
    if source:
        with explained(f"the scheduler of {source} can't draw samples"):
            ddim = args.validation_scheduler == "ddim"
            sampler = DDIMScheduler.from_config(scheduler.config) if ddim else scheduler
            try_sampler(sampler, args.ddpm_num_inference_steps)
    return scheduler


def make_schedulers(base: Any, args: Namespace) -> tuple[DDPMScheduler, SchedulerMixin]:
    """Return (the scheduler that adds noise in training, the sampler of the pipeline).

    Both are set to the objective of the training.
    """
    objective = objective_flags(args)
    with explained(f"{base.name} holds no scheduler"):
        source, options = base.locate_scheduler()
        sampler = load_sampler(source, options, objective)
        noise_scheduler = DDPMScheduler.from_pretrained(source, **options, **objective)
        if noise_scheduler.config.rescale_betas_zero_snr:
            # sampling starts from pure noise, which not every sampler can do
            sampler = DDIMScheduler.from_pretrained(source, **options, **objective)
    check_objective(noise_scheduler)
    timesteps = noise_scheduler.config.num_train_timesteps
    if args.num_inference_steps > timesteps:
        fail(
            f"--num_inference_steps {args.num_inference_steps} exceeds the {timesteps} training "
            "timesteps"
        )
    with explained(f"the scheduler of {base.name} ({type(sampler).__name__}) can't draw samples"):
        try_sampler(sampler, args.num_inference_steps)
    return noise_scheduler, sampler


def min_snr_weight(
    weight: torch.Tensor, noise_scheduler: DDPMScheduler, timesteps: torch.Tensor, gamma: float
) -> torch.Tensor:
    """Multiply `weight` [N] by the min-SNR weight at `timesteps` [N] (arXiv:2303.09556).

    It depends on the prediction type.
    """
    snr = compute_snr(noise_scheduler, timesteps)
    if noise_scheduler.config.prediction_type == "epsilon":
        return weight * snr.clamp(max=gamma) / snr
    if noise_scheduler.config.prediction_type == "sample":
        return weight * snr.clamp(max=gamma)
    # SNR + 1, as in diffusers: the paper's weight is 0 for the pure noise of a zero terminal SNR
    return weight * (snr + 1).clamp(max=gamma) / (snr + 1)


def to_epsilon(
    prediction: torch.Tensor,
    noisy_images: torch.Tensor,
    noise_scheduler: DDPMScheduler,
    timesteps: torch.Tensor,
) -> torch.Tensor:
    """Convert a prediction of any type to one of the noise (arXiv:2202.00512, appendix D)."""
    # the signal's variance
    alpha = noise_scheduler.alphas_cumprod.to(prediction.device)[timesteps].view(-1, 1, 1, 1)
    if noise_scheduler.config.prediction_type == "epsilon":
        return prediction
    if noise_scheduler.config.prediction_type == "sample":
        return (noisy_images - alpha.sqrt() * prediction) / (1 - alpha).sqrt()
    return alpha.sqrt() * prediction + (1 - alpha).sqrt() * noisy_images


def held_out_epsilon_loss(noise_scheduler: DDPMScheduler, predict: Predict) -> HeldOutLoss:
    """Measure the mean squared error of epsilon, whatever the models predict."""
    num_timesteps = noise_scheduler.config.num_train_timesteps

    def add_noise(images: torch.Tensor, noise: torch.Tensor, tenths: torch.Tensor) -> torch.Tensor:
        return noise_scheduler.add_noise(images, noise, tenths * num_timesteps // 10)

    def measure_error(
        models: Models,
        noisy_images: torch.Tensor,
        tenths: torch.Tensor,
        condition: dict[str, torch.Tensor],
        images: torch.Tensor,
        noise: torch.Tensor,
    ) -> torch.Tensor:
        timesteps = tenths * num_timesteps // 10
        prediction = predict(models, noisy_images, timesteps, condition)
        epsilon = to_epsilon(prediction, noisy_images, noise_scheduler, timesteps)
        return F.mse_loss(epsilon, noise, reduction="none").mean(dim=(1, 2, 3))

    return HeldOutLoss(add_noise, measure_error)
