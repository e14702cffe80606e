"""Flags that trainers share, and their checks. Imports only the standard library."""

import argparse
import math
from pathlib import Path
from typing import Any

from diffusion_training.arguments import (
    COUNT,
    PATH,
    SWITCH,
    SWITCHED_ON,
    Add,
    check_package,
    is_address,
    local_path,
    number,
    steps_or_share,
)
from diffusion_training.data.flags import check_stream_args
from diffusion_training.training.scores.metric_flags import check_metric_args

# Importing the libraries takes seconds, so a test compares these with accelerate's and diffusers'.
TRACKERS = (
    "aim",
    "comet_ml",
    "mlflow",
    "tensorboard",
    "wandb",
    "clearml",
    "dvclive",
    "swanlab",
    "trackio",
)
SCHEDULES = (
    "linear",
    "cosine",
    "cosine_with_restarts",
    "polynomial",
    "constant",
    "constant_with_warmup",
    "piecewise_constant",
)
OPTIMIZERS = ("adamw", "adamw8bit", "adafactor", "muon", "prodigy")


def add_noise_flags(add: Add) -> None:
    """Add the flags for the noise that U-Nets learn to predict."""
    add(
        "--prediction_type",
        choices=["epsilon", "sample", "v_prediction"],
        help="what the U-Net predicts (default: as in the pretrained pipeline, else epsilon)",
    )
    add(
        "--rescale_betas_zero_snr",
        **SWITCH,
        help="rescale the noise schedule so that the last timestep is pure noise "
        "(arXiv:2305.08891)",
    )
    add(
        "--snr_gamma",
        type=number(1e-3, 1e6),
        help="weight the loss of each timestep by min-SNR with this gamma; 5.0 is usual, see "
        "arXiv:2303.09556 (default: equal weights)",
    )
    add(
        "--noise_offset",
        type=number(0, 10),
        default=0.0,
        help="strength of a random shift of each channel's noise, for darker and lighter samples; "
        "0.1 is usual",
    )
    add(
        "--input_perturbation",
        type=number(0, 10),
        default=0.0,
        help="strength of additional noise that the model need not predict; 0.1 is usual "
        "(arXiv:2301.11706)",
    )


def add_schedule_flags(add: Add) -> None:
    """Add the flags for the noise schedule of a new pipeline."""
    add(
        "--ddpm_num_steps",
        type=number(2, 10**5, int),
        help="number of timesteps (noise levels) in training (default: as in the pretrained "
        "pipeline, else 1000)",
    )
    add(
        "--ddpm_beta_schedule",
        choices=["linear", "scaled_linear", "squaredcos_cap_v2"],
        help="noise schedule (default: as in the pretrained pipeline, else linear)",
    )


def add_optimization_flags(
    parser: argparse.ArgumentParser, lr_scheduler: str, adam_beta1: float, adam_weight_decay: float
) -> None:
    """Add the flags for steps, batches, learning rate, optimizer and EMA.

    The parameters are the defaults that differ between diffusers' scripts.
    """
    add = parser.add_argument_group("optimization").add_argument
    add("--seed", type=number(0, 2**63 - 1, int), default=0, help="seed of all random choices")
    add(
        "--train_batch_size",
        type=number(1, 10**5, int, "auto"),
        default=16,
        help="images that each process (GPU) computes at once; auto finds the largest number that "
        "fits; with --total_batch_size, at most its share of a step",
    )
    add(
        "--total_batch_size",
        type=COUNT,
        help="images per optimizer step, of all processes together; gradients are accumulated to "
        "reach it (default: --train_batch_size x --gradient_accumulation_steps x processes)",
    )
    add(
        "--gradient_accumulation_steps",
        type=COUNT,
        default=1,
        help="batches of --train_batch_size whose gradients are added up for one optimizer step",
    )
    add(
        "--num_train_epochs",
        "--num_epochs",
        type=COUNT,
        default=100,
        help="passes over all images",
        useless_with="--max_train_steps",
        strict=False,
    )
    add(
        "--max_train_steps",
        type=COUNT,
        help="number of optimizer steps; overrides --num_train_epochs",
    )
    add(
        "--learning_rate",
        type=number(0, 100),
        default=1e-4,
        help="peak learning rate, after the warm-up",
    )
    add(
        "--scale_lr",
        nargs="?",
        const="linear",
        choices=["linear", "sqrt", "auto"],
        default=False,
        help="scale --learning_rate with images per step / --base_batch_size: linear (also if you "
        "name no rule), sqrt (with the square root), or auto (linear up to 512 images, sqrt "
        "beyond) (default: off)",
    )
    add(
        "--no-scale_lr",
        dest="scale_lr",
        action="store_false",
        default=False,
        help="do not scale --learning_rate",
    )
    add(
        "--base_batch_size",
        type=COUNT,
        default=1,
        help="with --scale_lr, the number of images per step that --learning_rate was chosen for",
        needs="--scale_lr",
    )
    add(
        "--find_lr",
        **SWITCH,
        help="try rising learning rates, print a suggestion for --learning_rate, and stop: no "
        "model is saved",
    )
    add(
        "--find_lr_min",
        type=number(1e-30, 1e3),
        default=1e-7,
        help="learning rate at which --find_lr begins",
        needs="--find_lr",
    )
    add(
        "--find_lr_max",
        type=number(1e-30, 1e3),
        default=1.0,
        help="learning rate at which --find_lr ends, if the loss does not end it earlier",
        needs="--find_lr",
    )
    add(
        "--find_lr_steps",
        type=number(10, 10**6, int),
        default=200,
        help="number of optimizer steps from --find_lr_min to --find_lr_max",
        needs="--find_lr",
    )
    add(
        "--optimizer",
        default="adamw",
        help="optimizer: adamw; adamw8bit or adafactor, which take less memory; muon, for "
        "transformers; prodigy, which finds the learning rate by itself; or a class of torch's "
        "form by its name in Python, such as torch.optim.RAdam",
    )
    add(
        "--optimizer_args",
        nargs="+",
        metavar="KEY=VALUE",
        help="arguments of such a class, for example betas=0.9,0.99 weight_decay=0.01",
        needs="--optimizer *.*",
    )
    add(
        "--use_8bit_adam",
        dest="optimizer",
        action="store_const",
        const="adamw8bit",
        default="adamw",
        help="same as --optimizer adamw8bit",
    )
    add(
        "--lr_scheduler",
        choices=SCHEDULES,
        default=lr_scheduler,
        help="schedule of the learning rate",
    )
    add(
        "--lr_warmup_steps",
        type=steps_or_share,
        help="optimizer steps in which the learning rate rises to its peak; a number below 1 is a "
        "share of the run, such as 0.05; with it, --lr_scheduler constant becomes "
        "constant_with_warmup (default: 500; none for constant and piecewise_constant)",
    )
    add(
        "--lr_num_cycles",
        type=COUNT,
        default=1,
        help="number of cycles of --lr_scheduler cosine_with_restarts; 1 has no restart",
        needs="--lr_scheduler cosine_with_restarts",
    )
    add(
        "--lr_power",
        type=number(0, 100),
        default=1.0,
        help="power of --lr_scheduler polynomial; 1 is linear",
        needs="--lr_scheduler polynomial",
    )
    add(
        "--lr_step_rules",
        help="factors of --lr_scheduler piecewise_constant; for example 1:1000,0.1:2000,0.01 "
        "means 1 until step 1000, 0.1 until step 2000, then 0.01",
        needs="--lr_scheduler piecewise_constant",
    )
    add(
        "--adam_beta1",
        type=number(0, 0.999999),
        default=adam_beta1,
        help="beta1 of Adam: decay of its average of the gradients",
        useless_with="--optimizer adafactor|*.*",
    )
    add(
        "--adam_beta2",
        type=number(0, 0.999999),
        default=0.999,
        help="beta2 of Adam: decay of its average of the squared gradients",
        useless_with="--optimizer adafactor|*.*",
    )
    add(
        "--adam_weight_decay",
        type=number(0, 100),
        default=adam_weight_decay,
        help="decoupled weight decay",
        useless_with="--optimizer *.*",
    )
    add(
        "--adam_epsilon",
        type=number(1e-30, 1),
        default=1e-8,
        help="epsilon of Adam, added to the denominator",
        useless_with="--optimizer adafactor|*.*",
    )
    add(
        "--max_grad_norm",
        type=number(0, 1e9),
        default=1.0,
        help="clip the gradient to this norm; 0: no clipping",
    )
    add(
        "--use_ema",
        **SWITCHED_ON,
        help="keep an exponential moving average (EMA) of the weights, for the samples and the "
        "result",
    )
    add(
        "--ema_inv_gamma",
        type=number(1e-3, 1e12),
        default=1.0,
        help="inv_gamma in the EMA decay, 1 - (1 + step / inv_gamma) ** -power",
        needs="--use_ema",
    )
    add(
        "--ema_power",
        type=number(0, 10),
        default=0.75,
        help="power in the EMA decay; for more than a million steps use 0.6667",
        needs="--use_ema",
    )
    add(
        "--ema_max_decay",
        type=number(0, 1),
        default=0.9999,
        help="upper limit of the EMA decay",
        needs="--use_ema",
    )
    add(
        "--posthoc_ema",
        type=number(0.005, 0.28),
        nargs="+",
        help="also keep averages of these widths, such as 0.05 0.10, and their snapshots, from "
        "which an average of any width is made after the run (arXiv:2312.02696)",
    )
    add(
        "--posthoc_ema_steps",
        type=COUNT,
        help="optimizer steps between snapshots of --posthoc_ema (default: --checkpointing_steps)",
        needs="--posthoc_ema",
    )


def add_logging_flags(add: Add, tracker_project_name: str) -> None:
    """Add the flags for records and trackers."""
    add(
        "--logging_steps",
        type=COUNT,
        default=10,
        help="optimizer steps between records in metrics.jsonl; a small number slows training, "
        "because each record waits for the device",
    )
    add(
        "--report_to",
        "--logger",
        choices=[*TRACKERS, "all", "none"],
        default="tensorboard",
        help="tracker that also gets the records of metrics.jsonl",
    )
    add(
        "--tracker_project_name",
        default=tracker_project_name,
        help="name of the project in the trackers",
        useless_with="--report_to none",
        strict=False,
    )
    add(
        "--logging_dir",
        type=local_path,
        default="logs",
        help="folder in --output_dir for the logs of tensorboard and aim",
        needs="--report_to tensorboard|aim|all",
        strict=False,
    )
    add(
        "--validate_first",
        **SWITCHED_ON,
        help="if the model is pretrained, draw samples and measure the held-out loss before step "
        "1 too",
    )


def add_saving_flags(add: Add) -> None:
    """Add the flags for checkpoints and the hub."""
    add(
        "--checkpointing_steps",
        type=COUNT,
        default=500,
        help="optimizer steps between checkpoints",
        useless_with="--checkpointing_epochs",
    )
    add(
        "--checkpointing_epochs",
        type=COUNT,
        help="epochs between checkpoints, instead of --checkpointing_steps",
    )
    add(
        "--checkpoints_total_limit",
        type=COUNT,
        help="keep only this many checkpoints, the newest (default: all)",
    )
    add(
        "--checkpoints_to",
        type=PATH,
        help="address (s3://bucket/run) or folder for copies of checkpoints, samples and records, "
        "made in the background; --resume_from_checkpoint finds them there too",
    )
    add(
        "--checkpoints_to_timeout",
        type=number(0, 86400),
        default=120.0,
        help="seconds to wait for the copies to --checkpoints_to when the run ends or is stopped",
        needs="--checkpoints_to",
    )
    add(
        "--save_best",
        **SWITCH,
        help="keep the weights with the lowest held-out loss in the folder best/; needs --holdout",
    )
    add(
        "--resume_from_checkpoint", type=PATH, help="checkpoint to resume from: a path, or `latest`"
    )
    add(
        "--push_to_hub",
        **SWITCH,
        help="upload the result to the Hugging Face hub at the end; needs `hf auth login`",
    )
    add(
        "--hub_model_id",
        help="with --push_to_hub, name of the repository, such as your-name/lora (default: named "
        "like --output_dir)",
        needs="--push_to_hub",
    )
    add(
        "--hub_private_repo",
        **SWITCH,
        help="with --push_to_hub, make the repository private",
        needs="--push_to_hub",
    )


def check_training_args(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Stop with an error if the flags that all trainers share do not fit together.

    The parser has already checked the bounds of numbers.
    """
    check_stream_args(parser, args)
    if args.total_batch_size and args.gradient_accumulation_steps > 1:
        parser.error(
            "--total_batch_size sets --gradient_accumulation_steps itself: remove one of them"
        )
    if args.lr_scheduler == "piecewise_constant":
        try:  # parses them as diffusers does
            *rules, last = (args.lr_step_rules or "").split(",")
            factors = [float(last)]
            for rule in rules:
                factor, step = rule.split(":")
                factors.append(float(factor))
                int(step)
            if not all(map(math.isfinite, factors)):
                raise ValueError
        except ValueError:
            parser.error(
                "--lr_scheduler piecewise_constant needs --lr_step_rules like 1:1000,0.1:2000,0.01"
            )
        if args.lr_warmup_steps:
            parser.error(
                "--lr_scheduler piecewise_constant has no warm-up: leave --lr_warmup_steps out, "
                "and begin --lr_step_rules with a small factor"
            )
    if args.posthoc_ema and len({f"{width:g}" for width in args.posthoc_ema}) < 2:
        parser.error("--posthoc_ema needs two different widths, such as 0.05 0.10")
    if args.find_lr_min >= args.find_lr_max:
        parser.error(
            f"--find_lr_min {args.find_lr_min} is not below --find_lr_max {args.find_lr_max}"
        )
    if args.optimizer not in OPTIMIZERS and "." not in args.optimizer:
        parser.error(
            f"--optimizer {args.optimizer} is none of {', '.join(OPTIMIZERS)}, and no class such "
            "as torch.optim.RAdam"
        )
    if args.optimizer == "prodigy":
        excluded = {"--find_lr": args.find_lr, "--scale_lr": args.scale_lr}
        refuse_together(parser, "--optimizer prodigy", excluded)
        if args.learning_rate == parser.get_default("learning_rate"):
            args.learning_rate = 1.0
        if args.learning_rate < 0.01:
            parser.error(
                "--optimizer prodigy multiplies the rate that it finds by --learning_rate "
                f"{args.learning_rate:g}: give --learning_rate 1"
            )
    if args.optimizer == "adamw8bit":
        check_package(parser, "--optimizer adamw8bit", "bitsandbytes", "choose another")
    if args.save_best and not vars(args).get("holdout"):
        parser.error(
            "--save_best needs --holdout: the best weights are those with the lowest held-out loss"
        )
    if "validation_metrics" in args:
        check_metric_args(parser, args)
    if args.checkpoints_to and not is_address(args.checkpoints_to):
        if "::" in args.checkpoints_to:
            parser.error(
                f"--checkpoints_to {args.checkpoints_to}: fsspec reads '::' in a path as two "
                "addresses: choose another name"
            )
        one, other = Path(args.checkpoints_to).resolve(), Path(args.output_dir).resolve()
        if one.is_relative_to(other) or other.is_relative_to(one):
            parser.error(
                f"--checkpoints_to {args.checkpoints_to} and --output_dir {args.output_dir} must "
                "be separate folders: neither may be in the other"
            )
    if args.report_to in TRACKERS:
        flag = f"--report_to {args.report_to}"
        check_package(parser, flag, args.report_to, "use --report_to none")


def refuse_together(parser: argparse.ArgumentParser, flag: str, others: dict[str, Any]) -> None:
    """Stop with an error if one of {another flag: whether it is given} is given with `flag`."""
    for other, is_given in others.items():
        if is_given:
            parser.error(f"{flag} can't be combined with {other}: leave one of them out")


def add_sample_flags(add: Add) -> None:
    """Add the flags for samples without prompts."""
    add(
        "--validation_steps",
        type=COUNT,
        help="draw samples and measure the held-out loss every so many optimizer steps, instead "
        "of epochs",
    )
    add(
        "--save_images_epochs",
        type=COUNT,
        default=10,
        help="draw samples and measure the held-out loss every so many epochs",
        useless_with="--validation_steps",
        strict=False,
    )
    add(
        "--eval_batch_size",
        type=number(1, 10**4, int),
        default=16,
        help="number of samples to draw, on all processes together",
    )
    add(
        "--validation_scheduler",
        choices=["ddpm", "ddim"],
        help="scheduler that draws the samples, and is saved in the pipeline (default: ddim, or "
        "ddpm if --ddpm_num_inference_steps is given)",
    )
    add(
        "--ddpm_num_inference_steps",
        type=COUNT,
        help="denoising steps per sample (default: 50 for ddim, 1000 for ddpm)",
    )
