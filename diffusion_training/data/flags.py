"""Flags of captions, streams and arrays, and their checks. Imports only the standard library."""

from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

from diffusion_training.arguments import COUNT, PATH, SWITCH, OneOrMore, number

REFERENCE_FLAGS = (
    "conditioning_image_column",
    "conditioning_data_dir",
    "allow_missing_conditioning",
)


def add_caption_flags(add: Callable[..., Any]) -> None:
    """Add the flags for the source of captions, which `draw_text` and `list_captions` read."""
    add(
        "--caption_column",
        nargs="+",
        action=OneOrMore,
        default="text",
        help="column of captions or lists of them, or several columns; each epoch draws one per "
        "image; a cache keeps one of a list (all with --caption_weights), or all columns",
    )
    add(
        "--caption_weights",
        nargs="+",
        type=number(1e-6, 1e6),
        help="relative probabilities of the captions of an image, such as 0.3 0.7",
    )


def add_reference_flags(add: Callable[..., Any]) -> None:
    """Add the flags for reference images, which `add_references` reads."""
    add(
        "--conditioning_image_column",
        nargs="+",
        help="column of the image that an edit starts from (reference), or several columns for "
        "several references (default: the file photo.control.png beside photo.png)",
    )
    add(
        "--conditioning_data_dir",
        nargs="+",
        type=PATH,
        help="folder of references with the names of the images, or several folders",
    )
    add(
        "--allow_missing_conditioning",
        **SWITCH,
        help="train an image without a reference as text to image (default: leave it out)",
    )


def check_reference_flags(parser: ArgumentParser, args: Namespace) -> None:
    """Stop with an error if the flags for reference images do not fit with others."""
    given = [name for name in REFERENCE_FLAGS if vars(args)[name]]
    if {"conditioning_image_column", "conditioning_data_dir"} <= {*given}:
        parser.error("give --conditioning_image_column or --conditioning_data_dir, not both")
    if given and vars(args).get("streaming"):
        parser.error(f"--{given[0]} needs the images on a disk: leave --streaming out")
    if given and not vars(args).get("cache_latents", True):
        parser.error(
            f"--{given[0]} is for making a cache: add --cache_latents, or leave it out if "
            "--latents_dir has the references"
        )


def add_tag_flags(add: Callable[..., Any]) -> None:
    """Add the flags for shuffling tags, which `choose_caption` reads."""
    add(
        "--shuffle_caption",
        **SWITCH,
        help="shuffle the tags (text between commas) of each caption anew in each epoch",
    )
    add(
        "--keep_tokens",
        type=number(0, 1000, int),
        default=0,
        help="with --shuffle_caption, number of tags at the front that stay in place",
    )


def check_captions(parser: ArgumentParser, args: Namespace) -> None:
    """Stop with an error if the caption flags do not fit together."""
    if vars(args).get("keep_tokens") and not args.shuffle_caption:
        parser.error("--keep_tokens does nothing without --shuffle_caption")
    if vars(args).get("text_cache") == "ids" and args.clip_skip:
        parser.error(
            "--clip_skip does nothing with --text_cache ids: give it to the trainer, which encodes "
            "the captions"
        )
    if args.bucket_no_upscale and not args.bucket_step:
        parser.error("--bucket_no_upscale does nothing without --bucket_step: give both")
    if not isinstance(args.caption_column, list):
        return
    num_weights = len(weigh_captions(args) or [])
    if num_weights != len(args.caption_column):
        parser.error(
            f"--caption_weights has {num_weights} values for {len(args.caption_column)} "
            "columns of --caption_column: give one for each"
        )
    for name in ("instance_prompt", "folder_repeats"):
        if vars(args)[name]:
            parser.error(f"--{name} fills gaps in a single column: give only one --caption_column")


def weigh_captions(args: Namespace) -> list[float] | None:
    """Return --caption_weights; several caption columns have equal ones by default."""
    if args.caption_weights is None and isinstance(args.caption_column, list):
        return [1.0] * len(args.caption_column)
    return args.caption_weights


def add_stream_flags(add: Callable[..., Any], trains: bool = True) -> None:
    """Add the flags for data that is not on a disk, which `load_rows` and `hold_out` read."""
    add(
        "--streaming",
        **SWITCH,
        help="read the data piece by piece, without downloading all of it first; a trainer then "
        "needs --max_train_steps",
    )
    if trains:
        add(
            "--shuffle_buffer",
            type=COUNT,
            default=1000,
            help="with --streaming, number of images that are shuffled together",
        )


def check_stream_args(parser: ArgumentParser, args: Namespace) -> None:
    """Stop with an error if a flag needs more than a stream can give.

    A stream yields its images one by one, and their number is known only at its end.
    """
    given = vars(args) if vars(args).get("streaming") else {}
    if given.get("max_train_steps", 1) is None:
        parser.error("--streaming needs --max_train_steps, because a stream has no epochs")
    if given.get("holdout"):
        parser.error("--holdout needs the images on a disk: leave --holdout or --streaming out")
    for name in ("train_batch_size", "batch_size"):
        if given.get(name) == "auto":
            parser.error(
                f"--{name} auto needs the images on a disk: give a number with --streaming"
            )
    if isinstance(given.get("resolution"), list):
        parser.error(
            "--streaming makes only one cache at a time: give one --resolution, or data on a disk"
        )
    if given.get("bucket_step") and "max_train_steps" in given:
        parser.error(
            "--bucket_step needs the sizes of all images at the start: make a cache with "
            "precompute_latents.py --streaming"
        )
    for name in ("instance_prompt", "folder_repeats"):
        if given.get(name):
            parser.error(f"--{name} needs the images on a disk: a stream has captions in a column")


def add_array_flags(add: Callable[..., Any]) -> None:
    """Add the flags that `open_array` reads."""
    add(
        "--array_range",
        type=number(-1, 1),
        nargs=2,
        metavar=("BLACK", "WHITE"),
        help="for an .npy file of floats: its values for black and white, 0 1 or -1 1",
    )
    add(
        "--array_layout",
        choices=["nchw", "nhwc"],
        help="for an .npy file: order of the axes (default: found by the number of channels)",
    )


def is_array(source: str | None) -> bool:
    """Whether a source of images is an .npy file."""
    return source is not None and source.lower().endswith(".npy") and Path(source).is_file()
