"""Flags of images with captions, and their checks. Imports only the standard library."""

from argparse import ArgumentParser, Namespace

from diffusion_training.arguments import SWITCH, Add, local_path, number

REFERENCE_FLAGS = (
    "conditioning_image_column",
    "conditioning_data_dir",
    "allow_missing_conditioning",
)


def check_captions(parser: ArgumentParser, args: Namespace) -> None:
    """Stop with an error if the caption flags do not fit together."""
    if vars(args).get("text_cache") == "ids" and args.clip_skip:
        parser.error(
            "--clip_skip does nothing with --text_cache ids: give it to the trainer, which encodes "
            "the captions"
        )
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


def add_tag_flags(add: Add) -> None:
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
        needs="--shuffle_caption",
    )


def add_transform_flags(add: Add) -> None:
    """Add the flags that `transform_row` reads, besides those of `add_image_flags`."""
    add(
        "--skip_empty_captions",
        **SWITCH,
        help="skip images with an empty caption",
        useless_with="--latents_dir or --class_column",
    )
    add(
        "--image_interpolation_mode",
        choices=["bicubic", "bilinear", "nearest-exact"],
        default="bicubic",
        help="interpolation for resizing images, always antialiased",
        useless_with="--latents_dir",
    )


def add_bucket_flags(add: Add) -> None:
    """Add the flags for images of several sizes, which `choose_size` reads, and for masks."""
    add(
        "--bucket_step",
        type=number(1, 4096, int),
        help="keep the aspect ratios of images, with sides that are multiples of this number, "
        "such as 64 (default: crop to squares)",
        useless_with="--latents_dir",
    )
    add(
        "--use_aspect_ratio_buckets",
        dest="bucket_step",
        action="store_const",
        const=64,
        help="same as --bucket_step 64; the name in diffusers' scripts",
    )
    add(
        "--bucket_max_ratio",
        type=number(1, 16),
        default=2.0,
        help="with --bucket_step, crop images so that the longer side is at most this many times "
        "the shorter",
        needs="--bucket_step",
        useless_with="--latents_dir",
    )
    add(
        "--bucket_no_upscale",
        **SWITCH,
        help="with --bucket_step, never enlarge images",
        needs="--bucket_step",
        useless_with="--latents_dir",
    )
    add(
        "--mask_column",
        help="column of masks; the loss counts where a mask is white (default: the file "
        "photo.mask.png beside photo.jpg)",
        useless_with="--latents_dir",
    )


def add_reference_flags(add: Add) -> None:
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
        type=local_path,
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
