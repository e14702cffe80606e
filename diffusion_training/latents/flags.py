"""Flags for caches and images of text-to-image trainers. Imports only the standard library."""

import argparse
import os

from diffusion_training.arguments import (
    PATH,
    Add,
    OneOrMore,
    Parser,
    is_address,
    list_values,
    local_path,
    number,
    size,
)
from diffusion_training.data.captioned_flags import (
    add_bucket_flags,
    add_tag_flags,
    add_transform_flags,
    check_captions,
)
from diffusion_training.data.flags import (
    add_flip_flag,
    add_holdout_flag,
    add_image_flags,
    add_source_flags,
    add_stream_flags,
    check_source,
)


def add_storage_flags(add: Add) -> None:
    """Add the flags for caches that are remote, or have too many rows for one permutation.

    `open_stored` reads them.
    """
    add(
        "--shards_dir",
        type=local_path,
        help="if --latents_dir is an address (s3://...): local folder for copies of the cache's "
        "files (shards)",
        needs="--latents_dir *://*",
        strict=False,
    )
    add(
        "--shards_size",
        type=size(1, 10**18),
        default=10**11,
        help="maximum size of --shards_dir, such as 50GB (default: 100GB)",
        needs="--latents_dir *://*",
        strict=False,
    )
    add(
        "--shuffle_shards",
        type=number(1, 10**4, int),
        default=2,
        help="if a cache has too many rows to shuffle them all: number of shards whose rows are "
        "shuffled together",
        needs="--latents_dir",
    )
    add(
        "--follow",
        nargs="?",
        const=60.0,
        type=number(1 / 60, 10**6),
        metavar="MINUTES",
        help="train while the cache is made: the first epoch takes its shards in their order; save "
        "and end if no shard comes for so many minutes (60 without a number)",
    )


def check_data_args(parser: Parser, args: argparse.Namespace) -> None:
    """Stop with an error if the data flags of a text-to-image trainer do not fit together.

    The data is either a cache, or images with captions.
    """
    check_captions(parser, args)
    caches = args.latents_dir or []
    if args.data:
        from diffusion_training.latents.data_file import read_data_file

        others = ("latents_dir", "train_data_dir", "dataset_name", "streaming", "folder_repeats")
        for name in others:
            if vars(args)[name]:
                parser.error(f"--{name} can't be combined with --data, which names the images")
        try:
            read_data_file(args.data, parser.advise)
        except (OSError, ValueError, RecursionError) as error:
            parser.error(f"--data {args.data} can't be used: {error}")
    elif not caches:
        check_source(parser, args)
    elif args.dataset_name or args.train_data_dir:
        parser.error(
            "--latents_dir can't be combined with --dataset_name or --train_data_dir: the cache "
            "holds the data"
        )
    if len({*map(os.path.realpath, caches)}) < len(caches):
        parser.error(
            "--latents_dir names a cache twice: name it once, and use its rows more often with "
            "--latents_weights"
        )
    if args.follow and (len(caches) != 1 or args.latents_weights):
        parser.error("--follow needs one --latents_dir, without --latents_weights")
    sides = list_values(args.resolution)
    if len(sides) > 1 and not (args.cache_latents or args.data or caches):
        parser.error("several values of --resolution need --cache_latents")
    count = len(caches)
    what = "--latents_dir"
    if not caches and len(sides) > 1:
        count, what = len(sides), "--resolution"
    if args.latents_weights and len(args.latents_weights) != count:
        parser.error(
            f"--latents_weights needs a value for each {what}: {count}, not "
            f"{len(args.latents_weights)}"
        )
    addresses = [*filter(is_address, caches)]
    if addresses and not args.shards_dir:
        parser.error(
            f"--latents_dir {addresses[0]} is an address: "
            "give --shards_dir, a local folder for copies of its shards"
        )
    if args.cache_latents and args.streaming:
        parser.error("--cache_latents stores the latents of all images: leave --streaming out")


def add_captioned_data_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of text-to-image trainers for their data, which `open_data` reads."""
    add = parser.add_argument_group("data: a cache").add_argument
    add(
        "--latents_dir",
        type=PATH,
        nargs="+",
        help="one or more caches made by precompute_latents.py: folders or addresses (s3://...)",
    )
    add(
        "--latents_weights",
        nargs="+",
        type=number(1e-3, 1e3),
        help="a number for each --latents_dir: how often an epoch uses its rows (default: once); "
        "or for each --resolution: how often an image has this size, compared with the others",
    )
    add_storage_flags(add)

    add = parser.add_argument_group("data: images, encoded in every step").add_argument
    add_source_flags(add, captions=True)
    add(
        "--data",
        type=local_path,
        help="a .toml or .json file of several folders of images, each with its own num_repeats, "
        "captions, flip_aug and resolution, in the form of musubi-tuner and sd-scripts, see "
        "docs/data.md; includes --cache_latents",
    )
    add(
        "--cache_latents",
        useless_with="--latents_dir",
        nargs="?",
        const="device",
        choices=["device", "cpu"],
        help="encode the images once, before training, into a cache that all runs share (in "
        "--cache_dir); cpu: on the CPU, if the text encoder does not fit on the GPU (default: "
        "encode in every step)",
    )
    add(
        "--no-cache_latents",
        dest="cache_latents",
        action="store_const",
        const=None,
        help="encode the images in every step",
    )
    add(
        "--resolution",
        type=number(2, 16384, int),
        nargs="+",
        action=OneOrMore,
        help="side of the square images in pixels; with --bucket_step, no image has more pixels "
        "than this square; several values, with --cache_latents: each time in one of these sizes, "
        "and samples in the first (default: that of the cache, else the model's, such as 512 or "
        "1024)",
    )
    add_image_flags(add)
    add_transform_flags(add)
    add_bucket_flags(add)
    add_stream_flags(add)

    add = parser.add_argument_group("data: a cache or images").add_argument
    add_flip_flag(add)
    add_holdout_flag(add)
    add_tag_flags(add)
    add(
        "--caption_dropout",
        "--proportion_empty_prompts",  # the name in diffusers' scripts
        type=number(0, 1),
        default=0.1,
        help="share of captions that are replaced by the empty prompt, which guidance needs",
    )
