"""Flags of the source of images, and their checks. Imports only the standard library."""

import os
from argparse import ArgumentParser, Namespace

from diffusion_training.arguments import (
    COUNT,
    PATH,
    SWITCH,
    Add,
    OneOrMore,
    is_address,
    local_path,
    number,
)


def add_caption_flags(add: Add) -> None:
    """Add the flags for the source of captions, which `draw_text` and `list_captions` read."""
    add(
        "--caption_column",
        nargs="+",
        action=OneOrMore,
        default="text",
        help="column of captions or lists of them, or several columns; each epoch draws one per "
        "image; a cache keeps one of a list (all with --caption_weights), or all columns",
        useless_with="--latents_dir",
    )
    add(
        "--caption_weights",
        nargs="+",
        type=number(1e-6, 1e6),
        help="relative probabilities of the captions of an image, such as 0.3 0.7",
    )
    add(
        "--caption_prefix",
        type=str.strip,
        useless_with="--latents_dir or --class_column",
        help="words in front of every caption that does not begin with them, such as the trigger "
        "'sks dog,'; --shuffle_caption leaves them there; a dropped caption has none",
    )


def add_stream_flags(add: Add, trains: bool = True) -> None:
    """Add the flags for data that is not on a disk, which `load_rows` and `hold_out` read."""
    add(
        "--streaming",
        **SWITCH,
        help="read the data piece by piece, without downloading all of it first; a trainer then "
        "needs --max_train_steps",
        useless_with="--latents_dir",
    )
    if trains:
        add(
            "--shuffle_buffer",
            type=COUNT,
            default=1000,
            help="with --streaming, number of images that are shuffled together",
            needs="--streaming",
            useless_with="--latents_dir",
        )


def check_stream_args(parser: ArgumentParser, args: Namespace) -> None:
    """Stop with an error if a flag needs more than a stream can give.

    A stream yields its images one by one, and their number is known only at its end.
    """
    given = vars(args) if vars(args).get("streaming") else {}
    if given.get("max_train_steps", 1) is None:
        parser.error("--streaming needs --max_train_steps, because a stream has no epochs")
    if given.get("checkpointing_epochs"):
        parser.error("a stream has no epochs: give --checkpointing_steps instead")
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


def add_array_flags(add: Add) -> None:
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


def list_allowed(args: Namespace) -> tuple[str, ...]:
    """The addresses below which rows may name files: --allow_addresses, and a data set's own."""
    flags = vars(args)
    own = [f"hf://datasets/{flags['dataset_name']}"] if flags.get("dataset_name") else []
    return *(flags.get("allow_addresses") or ()), *own


def is_array(source: str | None) -> bool:
    """Whether a source of images is an .npy file."""
    return source is not None and source.lower().endswith(".npy") and os.path.isfile(source)


def add_source_flags(add: Add, captions: bool = False) -> None:
    """Add the flags for the source of the images, which `load_rows` reads."""
    add(
        "--dataset_name",
        type=PATH,
        help="data set on the Hugging Face hub, such as your-name/photos, or a folder with one",
    )
    add(
        "--dataset_config_name",
        help="configuration of the data set, if it has several",
        useless_with="--latents_dir or --train_data_dir *.npy",
    )
    add(
        "--dataset_split",
        default="train",
        help="split of the data set to read",
        useless_with="--latents_dir or --train_data_dir *.npy",
    )
    add(
        "--train_data_dir",
        type=PATH,
        help="local folder of images, parquet files or tars (webdataset); with --streaming also "
        "an address of parquet files or tars, such as 's3://bucket/{000..123}.tar'; "
        "train_unconditional.py also takes an array of images in an .npy file",
    )
    add(
        "--image_column",
        help="column of images (default: `image`, or the only column with images)",
        useless_with="--latents_dir or --train_data_dir *.npy",
    )
    if captions:
        add_caption_flags(add)
        add(
            "--instance_prompt",
            help="caption for images that have none, such as 'a photo of sks dog'",
            useless_with="--latents_dir",
        )
        add(
            "--folder_repeats",
            **SWITCH,
            help="use each image in a folder '10_sks dog' 10 times per epoch; images without a "
            "caption get 'sks dog'",
            useless_with="--latents_dir",
        )
        add(
            "--caption_extension",
            default=".txt",
            help="extension of the caption files (photo.txt for photo.jpg), read if there is no "
            "caption column",
            useless_with="--latents_dir or --streaming or --class_column",
        )
    add(
        "--max_train_samples",
        type=COUNT,
        help="use only this many images: random ones, or the first ones with --streaming or data "
        "at an address (default: all)",
        useless_with="--latents_dir",
    )
    add(
        "--allow_addresses",
        nargs="+",
        metavar="PREFIX",
        help="rows may name files below these addresses, such as s3://my-bucket/images or "
        "http://10.0.0.5 (default: rows name only files on the disk, and http or https addresses "
        "of public hosts)",
        useless_with="--latents_dir",
    )
    add(
        "--cache_dir",
        type=local_path,
        help="folder for downloads and prepared data sets (default: the Hugging Face libraries' "
        "own)",
    )


def check_source(parser: ArgumentParser, args: Namespace) -> None:
    """Stop with an error if the data folder does not exist, or if two sources are given.

    Of two sources, one would be ignored.
    """
    source = args.train_data_dir
    if args.dataset_name is not None:
        if source:
            parser.error("--dataset_name and --train_data_dir can't be combined")
    elif is_address(source):
        if not vars(args).get("streaming"):
            parser.error(
                f"--train_data_dir {source} is an address: give --streaming, or copy the data to a "
                "disk"
            )
    elif not os.path.isdir(source):
        takes_array = "array_range" in args
        if not (takes_array and is_array(source)):
            more = ", nor an .npy file" if takes_array else ""
            parser.error(f"--train_data_dir {source} is not a folder{more}")


def add_image_flags(add: Add, trains: bool = True) -> None:
    """Add the flags for how images are loaded and cropped, with or without captions."""
    add(
        "--center_crop",
        **SWITCH,
        help="crop the centre of an image, not a random part",
        useless_with="--latents_dir",
    )
    add(
        "--min_size",
        type=number(0, 16384, int),
        default=0,
        help="skip images with a side shorter than this many pixels",
        useless_with="--latents_dir",
    )
    add_worker_flag(add)
    if trains:
        add(
            "--prefetch_factor",
            type=number(1, 1000, int),
            help="batches that each process of --dataloader_num_workers loads ahead (default: 2)",
            useless_with="--latents_dir or --cache_latents or --data or --dataloader_num_workers 0",
        )


def add_flip_flag(add: Add) -> None:
    """Add the flag for mirrored images."""
    add(
        "--random_flip",
        **SWITCH,
        help="use mirrored images too: a trainer mirrors at random, a cache stores both versions",
    )


def add_holdout_flag(add: Add) -> None:
    """Add the flag that `hold_out` reads."""
    add(
        "--holdout",
        type=number(0, 10**9),
        default=0.0,
        help="keep this share (below 1) or number of images out of training, to measure the loss "
        "on them (held-out loss)",
    )


def add_plain_image_flags(add: Add) -> None:
    """Add the flags for images without captions, besides those of their source."""
    add(
        "--cache_images",
        **SWITCH,
        help="decode and resize all images once before training, and store them in --cache_dir, "
        "where all runs share them",
    )
    add(
        "--resolution",
        type=number(2, 16384, int),
        default=64,
        help="side of the square images in pixels",
    )
    add_image_flags(add)
    add_flip_flag(add)
    add_holdout_flag(add)
    add(
        "--preserve_input_precision",
        **SWITCH,
        help="read floats, and grey images of 16 and 32 bits, in float32, without rounding to 8 "
        "bits",
    )


def check_plain_images(parser: ArgumentParser, args: Namespace) -> None:
    """Stop with an error if the flags for images without captions do not fit their source."""
    if not is_array(args.train_data_dir):
        if args.array_range or args.array_layout:
            parser.error(
                "--array_range and --array_layout need an array: --train_data_dir FILE.npy"
            )
    elif args.cache_images or args.streaming:
        parser.error("leave --cache_images and --streaming out: an array is memory-mapped")
    if args.cache_images and (args.streaming or args.preserve_input_precision):
        parser.error(
            "--cache_images can't be combined with --streaming or --preserve_input_precision: it "
            "stores all images, with 8 bits"
        )


def add_worker_flag(add: Add) -> None:
    """Add the flag that `Launch.choose_workers` takes."""
    add(
        "--dataloader_num_workers",
        type=number(0, 1024, int),
        help="processes that decode images (default: one less than the CPU cores per launched "
        "process, at most 8)",
        useless_with="--latents_dir",
    )
