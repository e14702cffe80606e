"""The flags of precompute_latents.py and precompute_latents_ray.py: only the standard library."""

import argparse

from diffusion_training.arguments import COUNT, PATH, SWITCH, OneOrMore, number
from diffusion_training.data.captioned_flags import (
    add_bucket_flags,
    add_reference_flags,
    add_transform_flags,
    check_captions,
    check_reference_flags,
)
from diffusion_training.data.flags import (
    add_flip_flag,
    add_image_flags,
    add_source_flags,
    check_source,
)
from diffusion_training.families.flags import (
    add_encoder_flags,
    add_family_flags,
    add_pipeline_flags,
)
from diffusion_training.flags import add_device_flags


def add_cache_flags(parser: argparse.ArgumentParser, with_classes: bool = False) -> None:
    """Add the flags that both scripts have. with_classes: and those of classes."""
    add = parser.add_argument_group("data").add_argument
    add_source_flags(add, captions=True)
    if with_classes:
        add(
            "--class_column",
            help="column of classes, as numbers or names, in place of captions and of a text "
            "encoder, such as label",
        )
        add(
            "--import_latents",
            **SWITCH,
            help="--train_data_dir holds latents that others have published, in LightningDiT's "
            "form, in place of images",
        )
    side = number(2, 16384, int)
    add(
        "--resolution",
        type=side,
        nargs="+",
        action=OneOrMore,
        help="side of the square images in pixels; with --bucket_step, no image has more pixels "
        "than this square; several values make several caches (default: the model's, 512 or 1024)",
    )
    add_image_flags(add, trains=False)
    add_flip_flag(add)
    add_transform_flags(add)
    add_bucket_flags(add)
    add_reference_flags(add)

    add = parser.add_argument_group("models").add_argument
    add_pipeline_flags(add)
    add_family_flags(add)
    add_encoder_flags(add)
    add_device_flags(add, trains=False)

    add = parser.add_argument_group("output").add_argument
    add("--output_dir", type=PATH, default="latents", help="folder for all output")
    add(
        "--latents",
        choices=["moments", "sample"],
        help="what to store for an image: moments (mean and standard deviation, from which each "
        "step draws new latents), or one sample of its latents (default: moments if the VAE has "
        "them)",
    )
    add(
        "--text_cache",
        choices=["embeddings", "ids"],
        default="embeddings",
        help="what to store for a caption: its embeddings, or its token ids, which take less "
        "space but are encoded in each training step",
    )
    add(
        "--rows_per_shard",
        type=COUNT,
        default=1024,
        help="number of rows (images) per file of the cache; a killed run loses at most this many",
    )
    add(
        "--batch_size",
        type=number(1, 10**5, int, "auto"),
        default=16,
        help="images that each process (GPU) encodes at once; auto finds the largest number that "
        "fits",
    )
    add(
        "--max_skipped",
        type=number(0, 1),
        default=0.05,
        help="stop with an error if more than this share of the images can't be used",
    )
    add("--seed", type=number(0, 2**63 - 1, int), default=0, help="seed of all random choices")
    add(
        "--dry_run",
        **SWITCH,
        help="print how large the cache will be, and whether the shards of an existing one hold "
        "their own rows, and stop",
    )


def check_cache_args(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Stop with one line and status 2 if the flags do not fit together."""
    check_source(parser, args)
    check_captions(parser, args)
    check_reference_flags(parser, args)
    has_classes = bool(vars(args).get("class_column"))
    if args.pretrained_model_name_or_path is None:
        for name in ("vae_name_or_path", *["text_encoder_name_or_path"] * (not has_classes)):
            if getattr(args, name) is None:
                parser.error(
                    "give --pretrained_model_name_or_path, or both --vae_name_or_path and "
                    "--text_encoder_name_or_path"
                )
    imports = bool(vars(args).get("import_latents"))
    if imports and not (has_classes and args.latents == "sample"):
        parser.error("--import_latents needs --class_column labels and --latents sample")
    without = {
        "class_column": (
            "streaming",
            "caption_column",
            "caption_weights",
            "instance_prompt",
            "folder_repeats",
        ),
        "import_latents": ("dataset_name", "image_column", "mask_column", "bucket_step"),
    }
    for flag, names in without.items():
        for name in names if vars(args).get(flag) else ():
            if vars(args)[name] != parser.get_default(name):
                parser.error(f"--{name} can't be combined with --{flag}: leave one of them out")
