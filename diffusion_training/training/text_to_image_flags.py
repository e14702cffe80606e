"""Flags of the text-to-image trainers, and their checks. Imports only the standard library."""

from argparse import ArgumentParser, Namespace

from diffusion_training.arguments import COUNT, PATH, SWITCH, Add, OrNo, local_path, number
from diffusion_training.training.flags import refuse_together


def add_init_flag(add: Add) -> None:
    """Add the flag that `find_start` reads."""
    add(
        "--init_from",
        type=PATH,
        help="run folder or checkpoint whose weights and step a new run starts from, with a new "
        "optimizer and possibly other data",
    )


def add_memory_flags(add: Add) -> None:
    """Add the flags for models that do not fit on a GPU in the usual way."""
    add(
        "--fit",
        type=number(1e-3, 10**4, float, "auto", "no"),
        action=OrNo,
        metavar="auto|GB",
        help="choose the fastest way to take a step within so many GB of a GPU's memory (auto: "
        "nine tenths of what is free; no: takes back a recipe's): gradient checkpointing of no "
        "blocks, some or all, and with --rank blocks that stay in the host's memory; the results "
        "are the same",
    )
    add(
        "--shard",
        **SWITCH,
        help="split weights, EMA and optimizer state over the GPUs (FSDP2), for models that do "
        "not fit on one; see docs/memory.md",
    )
    add(
        "--full_bf16",
        "--fused_backward_pass",
        **SWITCH,
        help="keep the weights in bfloat16, and update each in the backward pass, which frees its "
        "gradient: 2 bytes a weight, so that a whole model fits on a small GPU; both names do "
        "both; see docs/memory.md",
    )


def add_timestep_flags(add: Add) -> None:
    """Add the flags for a range of noise levels."""
    add(
        "--min_timestep",
        type=number(0, 999, int),
        default=0,
        help="train only with at least so much noise, from 0 (none) to 1000 (only noise)",
    )
    add(
        "--max_timestep",
        type=number(1, 1000, int),
        default=1000,
        help="train only with less noise than this, from 0 (none) to 1000 (only noise)",
    )


def add_prompt_flags(add: Add, guidance_scale: float, num_inference_steps: int) -> None:
    """Add the flags of text-to-image trainers for samples."""
    add(
        "--validation_prompts",
        "--validation_prompt",
        nargs="+",
        help="one or more prompts for the samples (default: no samples)",
    )
    add(
        "--validation_prompts_file",
        type=local_path,
        help="file with a prompt per line in place of --validation_prompts, with kohya's switches: "
        "--w and --h (width, height), --d (seed), --s (steps), --l (guidance scale), --n (negative "
        "prompt); or a JSON list",
    )
    add(
        "--validation_steps",
        type=COUNT,
        needs="--validation_prompts or --holdout",
        strict=False,
        help="draw samples and measure the held-out loss every so many optimizer steps, instead "
        "of epochs",
    )
    add(
        "--validation_epochs",
        type=COUNT,
        default=5,
        help="draw samples and measure the held-out loss every so many epochs",
        needs="--validation_prompts or --holdout",
        useless_with="--validation_steps",
        strict=False,
    )
    add(
        "--num_validation_images",
        type=number(0, 10**4, int),
        default=4,
        help="samples per prompt; 0: no samples",
        needs="--validation_prompts",
        strict=False,
    )
    add(
        "--guidance_scale",
        type=number(1, 1000),
        default=guidance_scale,
        help="guidance scale of the samples; 1: no guidance (arXiv:2207.12598)",
        needs="--validation_prompts or --validation_metrics",
        strict=False,
    )
    add(
        "--num_inference_steps",
        type=COUNT,
        default=num_inference_steps,
        help="denoising steps per sample",
        needs="--validation_prompts or --validation_metrics",
        strict=False,
    )


def check_text_to_image_args(parser: ArgumentParser, args: Namespace) -> None:
    """Stop with an error if the flags of this file do not fit together, or with others."""
    if args.min_timestep >= args.max_timestep:
        parser.error(
            f"--min_timestep {args.min_timestep} must be below --max_timestep {args.max_timestep}"
        )
    if args.fit:
        excluded = {
            "--train_batch_size auto": args.train_batch_size == "auto",
            "--shard": args.shard,
        }
        refuse_together(parser, "--fit", excluded)
    if args.posthoc_ema:
        refuse_together(parser, "--posthoc_ema", {"--rank": args.rank, "--shard": args.shard})
    if args.full_bf16:
        check_full_bf16_args(parser, args)
    if args.shard:
        excluded = {
            "--rank": args.rank,
            "--compile": args.compile,
            "--find_lr": args.find_lr,
            "--train_batch_size auto": args.train_batch_size == "auto",
            "--mixed_precision fp16": args.mixed_precision == "fp16",
            f"--optimizer {args.optimizer}": args.optimizer not in ("adamw", "muon"),
        }
        refuse_together(parser, "--shard", excluded)


def check_full_bf16_args(parser: ArgumentParser, args: Namespace) -> None:
    """Stop with an error if other flags can't be used with --full_bf16."""
    excluded = {
        "--rank": args.rank,
        "--shard": args.shard,
        "--compile": args.compile,
        "--gradient_accumulation_steps": args.gradient_accumulation_steps > 1,
        "--total_batch_size": args.total_batch_size,
        "--posthoc_ema": args.posthoc_ema,
    }
    refuse_together(parser, "--full_bf16", excluded)
    needed = {
        "--optimizer adafactor": args.optimizer == "adafactor",
        "--no-use_ema": not args.use_ema,
        "--max_grad_norm 0": not args.max_grad_norm,
    }
    if missing := " ".join(flag for flag, is_given in needed.items() if not is_given):
        parser.error(
            "--full_bf16 updates a weight as soon as its gradient is there, with Adafactor, which "
            f"clips each update by itself, and keeps no average: add {missing}"
        )
