"""Flags for --validation_metrics, and their checks. Imports only the standard library."""

import argparse
import os

from diffusion_training.arguments import COUNT, PATH, Add, number

# metrics of --validation_metrics
SET_METRICS = ("kid", "fid")  # of all samples together
CLIP_METRICS = ("clip-t", "clip-i")
LOWER_METRICS = (*SET_METRICS, "copy")  # lower is better
METRICS = (*SET_METRICS, *CLIP_METRICS, "dino-i", "copy")
TURBO = "turbo_"  # begins names of figures and files of samples that --validation_base draws


def add_metric_flags(add: Add) -> None:
    """Add the flags that `Metrics` reads."""
    add(
        "--validation_metrics",
        nargs="+",
        choices=METRICS,
        help="measure samples of the averaged weights at each checkpoint: kid and fid (distance "
        "from held-out images), clip-t (likeness to the prompt), clip-i and dino-i (to the real "
        "images), copy (to the nearest training image)",
    )
    add(
        "--metric_image_model",
        type=PATH,
        default="facebook/dinov2-small",
        help="network for kid, fid, dino-i and copy: hub id or folder of a transformers model, "
        "TorchScript file, or inception (which fid needs)",
        needs="--validation_metrics kid|fid|dino-i|copy",
        strict=False,
    )
    add(
        "--metric_clip_model",
        type=PATH,
        default="openai/clip-vit-base-patch32",
        help="network for clip-t and clip-i: hub id or folder of a CLIP model",
        needs="--validation_metrics clip-t|clip-i",
        strict=False,
    )
    add(
        "--metric_steps",
        type=COUNT,
        help="optimizer steps between two measurements of --validation_metrics (default: "
        "--checkpointing_steps)",
        needs="--validation_metrics",
    )
    add(
        "--num_metric_images",
        type=number(2, 10**6, int),
        help="samples that --validation_metrics draws (default: 512; for a LoRA 64)",
        needs="--validation_metrics",
    )
    add(
        "--save_best_metric",
        choices=METRICS,
        help="keep the weights with the best value of one of --validation_metrics in the folder "
        "best/",
    )


def check_metric_args(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Stop with an error if the flags of --validation_metrics do not fit together."""
    chosen = args.validation_metrics or []
    if args.save_best_metric and args.save_best_metric not in chosen:
        parser.error(
            f"--save_best_metric {args.save_best_metric} must be one of --validation_metrics"
        )
    if args.save_best_metric and args.save_best:
        parser.error("--save_best and --save_best_metric both write best/: leave one of them out")
    if "clip-t" in chosen and "validation_prompts" not in args:
        parser.error("--validation_metrics clip-t needs prompts, which this model does not take")
    if chosen and not args.holdout:
        needs = sorted({*chosen} & {*SET_METRICS} if vars(args).get("rank") else {*chosen})
        if needs:
            parser.error(
                f"--validation_metrics {needs[0]} needs images that are not trained on: set some "
                "aside with --holdout"
            )
    is_file = os.path.isfile(args.metric_image_model)
    if "fid" in chosen and args.metric_image_model != "inception" and not is_file:
        parser.error(
            "--validation_metrics fid is defined by one network: add --metric_image_model "
            "inception, or a TorchScript file of it"
        )
