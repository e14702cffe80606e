"""The flags that several scripts share, in groups, and the checks of their values."""

import argparse
import importlib.util
import math
import os
from collections.abc import Callable
from pathlib import Path

from accelerate.tracking import LOGGER_TYPE_TO_CLASS
from diffusers.optimization import SchedulerType

from diffusion_training.arguments import COUNT, PATH, SWITCH, number, size, steps_or_share
from diffusion_training.data.streams import add_stream_flags, check_stream_args
from diffusion_training.data.texts import add_caption_flags, add_tag_flags, check_captions
from diffusion_training.families.base import Family
from diffusion_training.families.known import DEFAULT_FAMILY, DEFAULT_FLOW_FAMILY, FAMILIES
from diffusion_training.remote import is_address

Add = Callable[..., argparse.Action]  # add_argument of a parser or of a group
# flags that do nothing with --latents_dir
IMAGES_ONLY = (
    "dataset_config_name",
    "dataset_split",
    "image_column",
    "caption_column",
    "max_train_samples",
    "caption_extension",
    "center_crop",
    "image_interpolation_mode",
    "min_size",
    "skip_empty_captions",
    "dataloader_num_workers",
    "bucket_step",
    "bucket_max_ratio",
    "mask_column",
    "bucket_no_upscale",
    "prefetch_factor",
    "instance_prompt",
    "folder_repeats",
    "streaming",
    "shuffle_buffer",
)
# flags that do nothing without --rank
LORA_ONLY = (
    "lora_alpha",
    "lora_layers",
    "lora_dropout",
    "use_dora",
    "network_weights",
    "base_precision",
)


def add_source_flags(add: Add, captions: bool = False) -> None:
    """Add the flags for the source of the images, which `load_rows` reads."""
    add(
        "--dataset_name",
        type=PATH,
        help="data set on the hub, such as your-name/photos, or a local folder",
    )
    add("--dataset_config_name", help="configuration of the data set, if it has several")
    add("--dataset_split", default="train", help="split to read")
    add(
        "--train_data_dir",
        type=PATH,
        help="local folder of images, parquet files or webdataset tars; with --streaming also an "
        "address of the last two, such as 's3://bucket/{000..123}.tar'; in train_unconditional.py "
        "also an .npy file",
    )
    add(
        "--image_column", help="column of images (default: `image`, or the only column with images)"
    )
    if captions:
        add_caption_flags(add)
        add("--instance_prompt", help="caption of images that have none")
        add(
            "--folder_repeats",
            **SWITCH,
            help="use images in a folder 10_name 10 times per epoch, captioned `name` if needed",
        )
        add(
            "--caption_extension",
            default=".txt",
            help="extension of caption files beside the images, read if there is no caption column",
        )
    add(
        "--max_train_samples",
        type=COUNT,
        help="use so many images, drawn at random; the first ones from a stream or an address "
        "(default: all)",
    )
    add(
        "--cache_dir",
        type=PATH,
        help="folder for downloads and prepared data sets (default: those of the libraries)",
    )


def check_source(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Stop with an error if the data folder does not exist, or if two sources are given.

    One of two sources would be ignored.
    """
    source = args.train_data_dir
    if args.dataset_name and source:
        parser.error("--dataset_name and --train_data_dir exclude each other")
    if args.dataset_name is None and is_address(source) and not vars(args).get("streaming"):
        parser.error(
            f"--train_data_dir {source} is an address: give --streaming, or copy the data to a disk"
        )
    if args.dataset_name is not None or is_address(source) or Path(source).is_dir():
        return
    takes_array = "array_range" in args
    if not (takes_array and Path(source).suffix == ".npy" and Path(source).is_file()):
        more = ", nor an .npy file" if takes_array else ""
        parser.error(f"--train_data_dir {source} is not a folder{more}")


def add_transform_flags(add: Add) -> None:
    """Add the flags that `transform_row` reads, besides resolution and crop."""
    add(
        "--min_size",
        type=number(0, 16384, int),
        default=0,
        help="skip images with a side shorter than this many pixels",
    )
    add("--skip_empty_captions", **SWITCH, help="skip images with an empty caption")
    add(
        "--image_interpolation_mode",
        choices=["bicubic", "bilinear", "nearest-exact"],
        default="bicubic",
        help="interpolation for resizing, always antialiased",
    )
    add(
        "--dataloader_num_workers",
        type=number(0, 1024, int),
        help="processes that decode images (default: the cores of each process but one, at most 8)",
    )


def add_bucket_flags(add: Add) -> None:
    """Add the flags for images of several sizes, which `choose_size` reads, and for masks."""
    add(
        "--bucket_step",
        type=number(1, 4096, int),
        help="keep aspect ratios, with sides that are multiples of this (default: square images)",
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
        help="with --bucket_step, crop images to this ratio of the longer side to the shorter one",
    )
    add(
        "--bucket_no_upscale",
        **SWITCH,
        help="with --bucket_step, never enlarge images: smaller ones get sizes of their own",
    )
    add(
        "--mask_column",
        help="masks, white where the loss counts (default: photo.mask.png beside photo.jpg)",
    )


def add_storage_flags(add: Add) -> None:
    """Add the flags for caches that are remote, or have too many rows for one permutation.

    `open_latents` reads them.
    """
    add(
        "--shards_dir",
        type=PATH,
        help="local folder for the shards that are prefetched from --latents_dir s3://...",
    )
    add(
        "--shards_size",
        type=size(1, 10**18),
        default=10**11,
        help="most bytes that --shards_dir may hold, such as 50GB (default: 100GB)",
    )
    add(
        "--shuffle_shards",
        type=number(1, 10**4, int),
        default=2,
        help="how many shards are shuffled together, if the rows are not shuffled all at once",
    )


def add_device_flags(add: Add, trains: bool = True) -> None:
    """Add the flags for how the device computes.

    `make_launch`, `compile_model` and a trainer's `main` read them.
    """
    if trains:
        add(
            "--gradient_checkpointing",
            **SWITCH,
            help="keep fewer activations: less memory, about a third slower",
        )
    add(
        "--compile",
        nargs="?",
        const="inductor",
        metavar="BACKEND",
        help="use torch.compile with this backend (inductor if none is named)",
    )
    add(
        "--no-compile",
        dest="compile",
        action="store_false",
        default=None,
        help="do not use torch.compile, even if `accelerate config` says so",
    )
    if trains:
        add(
            "--allow_tf32",
            **SWITCH,
            help="compute float32 matrix products in TF32, on Ampere GPUs and later",
        )
        add(
            "--deterministic",
            **SWITCH,
            help="use only deterministic kernels on a GPU, slower, so that a resume is exact there",
        )
    add(
        "--mixed_precision",
        choices=["no", "fp16", "bf16"],
        help="precision of the computation; fp16 for GPUs before Ampere, such as the T4 "
        "(default: what `accelerate config` or the launch says, else no)",
    )


def add_shard_flag(add: Add) -> None:
    """Add the flag for models that do not fit on one GPU."""
    add(
        "--shard",
        **SWITCH,
        help="leave a part of weights, average and moments on each GPU (FSDP2): see docs/memory.md",
    )


def add_family_flags(add: Add, default: str | None = None) -> None:
    """Add the flags for model family and caption length, which `open_base` reads."""
    add(
        "--model_family",
        choices=[*FAMILIES],
        default=default,
        help=f"family of the models (default: the pipeline's, or {DEFAULT_FAMILY}; in "
        f"train_flow.py {DEFAULT_FLOW_FAMILY})",
    )
    limits = [
        f"{name} (default: {family.max_tokens})"
        for name, family in FAMILIES.items()
        if family.max_tokens
    ]
    add(
        "--max_sequence_length",
        type=COUNT,
        help=f"most tokens of a caption, for {' and '.join(limits)}",
    )


def add_encoder_flags(add: Add) -> None:
    """Add the flags for encoders other than the pipeline's, which `open_base` reads."""
    usual = Family.vae_classes
    classes = ", ".join(usual)
    for name, family in FAMILIES.items():
        others = [vae_class for vae_class in family.vae_classes if vae_class not in usual]
        if others:
            classes += f" or, for {name}, {', '.join(others)}"
    add(
        "--vae_name_or_path",
        "--pretrained_vae_model_name_or_path",  # the name in diffusers' scripts
        type=PATH,
        help=f"VAE to use instead: {classes}",
    )
    add(
        "--text_encoder_name_or_path",
        type=PATH,
        help="text encoder to use instead of the pipeline's, with its tokenizer",
    )
    add(
        "--single_file_config",
        type=PATH,
        help="folder or hub id of the configs of a single-file model (default: its family's)",
    )
    add(
        "--tokenizer_name_or_path",
        type=PATH,
        help="tokenizer, if it is not stored with the text encoder",
    )
    add(
        "--clip_skip",
        type=number(1, 100, int),
        help="number of last CLIP layers to skip; 1 here is kohya's 2 (default: skip none)",
    )


def add_noise_flags(add: Add) -> None:
    """Add the flags of the noise that U-Nets learn to predict."""
    add(
        "--rescale_betas_zero_snr",
        **SWITCH,
        help="make the last timestep pure noise (arXiv:2305.08891)",
    )
    add(
        "--snr_gamma",
        type=number(1e-3, 1e6),
        help="gamma of the min-SNR loss weight; 5.0 is usual (arXiv:2303.09556)",
    )
    add(
        "--noise_offset",
        type=number(0, 10),
        default=0.0,
        help="add an offset to the noise, for darker and lighter images; 0.1 is usual",
    )
    add(
        "--input_perturbation",
        type=number(0, 10),
        default=0.0,
        help="add more noise to the input than is to be predicted; 0.1 is usual (arXiv:2301.11706)",
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
        help="images per process and micro-batch; auto: the largest number that fits",
    )
    add(
        "--total_batch_size",
        type=COUNT,
        help="images per optimizer step on all processes, reached by accumulation (default: "
        "--train_batch_size x --gradient_accumulation_steps x processes)",
    )
    add(
        "--gradient_accumulation_steps",
        type=COUNT,
        default=1,
        help="micro-batches whose gradients are added up for an optimizer step",
    )
    add(
        "--num_train_epochs", "--num_epochs", type=COUNT, default=100, help="passes over all images"
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
        help="scale --learning_rate with the images per step (linear if no rule is named)",
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
        help="with --scale_lr, the images per step that --learning_rate was chosen for",
    )
    add("--find_lr", **SWITCH, help="search for a good learning rate and stop, without training")
    add(
        "--find_lr_min",
        type=number(1e-30, 1e3),
        default=1e-7,
        help="first learning rate that --find_lr tries",
    )
    add(
        "--find_lr_max",
        type=number(1e-30, 1e3),
        default=1.0,
        help="last learning rate that --find_lr tries, if it does not stop earlier",
    )
    add(
        "--find_lr_steps",
        type=number(10, 10**6, int),
        default=200,
        help="most optimizer steps of --find_lr",
    )
    add(
        "--optimizer",
        choices=["adamw", "adamw8bit", "adafactor", "muon"],
        default="adamw",
        help="adamw8bit and adafactor take less memory; muon is for transformers",
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
        choices=[schedule.value for schedule in SchedulerType],
        default=lr_scheduler,
        help="schedule of the learning rate",
    )
    add(
        "--lr_warmup_steps",
        type=steps_or_share,
        default=500,
        help="optimizer steps in which the learning rate rises to its peak, or below 1 their "
        "share of the run, such as 0.05 (not with constant)",
    )
    add("--lr_num_cycles", type=COUNT, default=1, help="number of restarts of cosine_with_restarts")
    add("--lr_power", type=number(0, 100), default=1.0, help="power of the polynomial schedule")
    add(
        "--lr_step_rules",
        help="rules of the piecewise_constant schedule, such as 1:1000,0.1:2000,0.01",
    )
    add(
        "--adam_beta1",
        type=number(0, 0.999999),
        default=adam_beta1,
        help="decay of Adam's mean of the gradient",
    )
    add(
        "--adam_beta2",
        type=number(0, 0.999999),
        default=0.999,
        help="decay of Adam's mean of the squared gradient",
    )
    add(
        "--adam_weight_decay",
        type=number(0, 100),
        default=adam_weight_decay,
        help="decoupled weight decay",
    )
    add(
        "--adam_epsilon",
        type=number(1e-30, 1),
        default=1e-8,
        help="epsilon of Adam, added to the denominator",
    )
    add(
        "--max_grad_norm",
        type=number(0, 1e9),
        default=1.0,
        help="clip the gradient to this norm; 0: no clipping",
    )
    add(
        "--use_ema",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="keep an exponential moving average (EMA) of the weights",
    )
    add(
        "--ema_inv_gamma",
        type=number(1e-3, 1e12),
        default=1.0,
        help="inv_gamma in the decay of the EMA, 1 - (1 + step / inv_gamma) ** -power",
    )
    add(
        "--ema_power",
        type=number(0, 10),
        default=0.75,
        help="power in the decay of the EMA; use 2/3 for more than a million steps",
    )
    add("--ema_max_decay", type=number(0, 1), default=0.9999, help="largest EMA decay")


def add_lora_flags(add: Add, output_kohya_format: bool) -> None:
    """Add the flags that `add_lora`, `load_network_weights` and `save_lora` read.

    output_kohya_format: the default of this flag.
    """
    add(
        "--rank",
        "--lora_rank",
        type=number(1, 4096, int),
        help="train a LoRA of this rank, such as 16 (default: train the whole model)",
    )
    add(
        "--lora_alpha",
        type=number(1e-3, 1e6),
        help="alpha of the LoRA, whose output is multiplied by alpha / rank (default: the rank)",
    )
    add(
        "--lora_layers",
        default="attention",
        help="layers that get a LoRA: attention, all, or ends of module names: to_q,to_v,ff.net.2",
    )
    add(
        "--lora_dropout",
        type=number(0, 0.999),
        default=0.0,
        help="probability of dropping an input of the LoRA",
    )
    add(
        "--use_dora",
        **SWITCH,
        help="train a DoRA: a LoRA with trained magnitudes, slower (arXiv:2402.09353)",
    )
    add("--network_weights", type=PATH, help="file of a LoRA to continue training")
    add(
        "--base_precision",
        choices=["nf4"],
        help="precision of the frozen base of a LoRA; nf4: 4 bits, with bitsandbytes "
        "(default: that of --mixed_precision)",
    )
    add(
        "--output_kohya_format",
        action=argparse.BooleanOptionalAction,
        default=output_kohya_format,
        help="write a second LoRA file, for ComfyUI, A1111 and sd-scripts; only for U-Nets",
    )


def add_logging_flags(add: Add, tracker_project_name: str) -> None:
    """Add the flags for records and trackers."""
    add(
        "--logging_steps",
        type=COUNT,
        default=10,
        help="optimizer steps between records; each one waits for the device",
    )
    add(
        "--report_to",
        "--logger",
        choices=[*LOGGER_TYPE_TO_CLASS, "all", "none"],
        default="tensorboard",
        help="tracker that gets the records of metrics.jsonl, too",
    )
    add(
        "--tracker_project_name",
        default=tracker_project_name,
        help="name of the project in the trackers",
    )
    add("--logging_dir", default="logs", help="folder in --output_dir for the logs of tensorboard")
    add(
        "--validate_first",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="draw samples and measure the held-out loss of a pretrained model before step 1",
    )


def add_saving_flags(add: Add) -> None:
    """Add the flags for checkpoints and the hub."""
    add(
        "--checkpointing_steps", type=COUNT, default=500, help="optimizer steps between checkpoints"
    )
    add("--checkpoints_total_limit", type=COUNT, help="checkpoints to keep (default: all)")
    add(
        "--checkpoints_to",
        type=PATH,
        help="address (s3://bucket/run) or folder to copy checkpoints, samples and records to, in "
        "the background; --resume_from_checkpoint finds them there as well",
    )
    add(
        "--checkpoints_to_timeout",
        type=number(0, 86400),
        default=120.0,
        help="seconds to wait, at the end and after a signal, for the last copy",
    )
    add(
        "--save_best",
        **SWITCH,
        help="keep the weights with the lowest held-out loss in best/; needs --holdout",
    )
    add(
        "--resume_from_checkpoint",
        type=PATH,
        help="path of a checkpoint to resume from, or `latest`",
    )
    add(
        "--push_to_hub",
        **SWITCH,
        help="upload the result to the hub, as the user of `hf auth login`",
    )
    add(
        "--hub_model_id",
        help="repository of --push_to_hub, as your-name/lora (default: named like --output_dir)",
    )
    add("--hub_private_repo", **SWITCH, help="make the repository of --push_to_hub private")


def check_data_args(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Stop with an error if the data flags of a text-to-image trainer do not fit together.

    The data is either a cache, or images with captions.
    """
    check_captions(parser, args)
    caches = args.latents_dir or []
    if not caches:
        check_source(parser, args)
    elif args.dataset_name or args.train_data_dir:
        parser.error(
            "--latents_dir excludes --dataset_name and --train_data_dir: the cache holds the data"
        )
    if len({*map(os.path.realpath, caches)}) < len(caches):
        parser.error(
            "--latents_dir names a cache twice: --latents_weights says how often an epoch takes "
            "its rows"
        )
    if args.latents_weights and len(args.latents_weights) != len(caches):
        parser.error(
            f"--latents_weights: {len(args.latents_weights)} for {len(caches)} --latents_dir"
        )
    addresses = [*filter(is_address, caches)]
    if addresses and not args.shards_dir:
        parser.error(
            f"--latents_dir {addresses[0]} is an address: "
            "--shards_dir says where its shards lie for a while"
        )
    for name in IMAGES_ONLY if caches else ():
        if getattr(args, name) != parser.get_default(name):
            parser.error(
                f"--{name} does nothing with --latents_dir: the cache was made without or with it"
            )


def check_training_args(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Stop with an error if the flags that all trainers share do not fit together.

    The parser has already checked the bounds of numbers.
    """
    check_stream_args(parser, args)
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
    if getattr(args, "shard", False):
        excluded = {
            "--rank": args.rank,
            "--compile": args.compile,
            "--find_lr": args.find_lr,
            "--train_batch_size auto": args.train_batch_size == "auto",
            "--mixed_precision fp16": args.mixed_precision == "fp16",
            f"--optimizer {args.optimizer}": args.optimizer not in ("adamw", "muon"),
        }
        for flag, is_given in excluded.items():
            if is_given:
                parser.error(f"--shard can't be combined with {flag}: leave one of them out")
    if args.find_lr_min >= args.find_lr_max:
        parser.error(
            f"--find_lr_min {args.find_lr_min} is not below --find_lr_max {args.find_lr_max}"
        )
    if args.optimizer == "adamw8bit" and importlib.util.find_spec("bitsandbytes") is None:
        parser.error("--optimizer adamw8bit: `pip install bitsandbytes` first, or choose another")
    if getattr(args, "base_precision", None):
        if importlib.util.find_spec("bitsandbytes") is None:
            parser.error("--base_precision nf4: `pip install bitsandbytes` first, or leave it out")
        if args.use_dora:
            parser.error(
                "--use_dora computes with the exact weights of the base: leave it or "
                "--base_precision out"
            )
    if "rank" in args:
        for name in LORA_ONLY if args.rank is None else ():
            if getattr(args, name) != parser.get_default(name):
                parser.error(f"--{name} does nothing without --rank")
    if args.save_best and not getattr(args, "holdout", 0):
        parser.error(
            "--save_best goes by the held-out loss: say with --holdout how many images it is "
            "measured on"
        )
    if args.checkpoints_to and not is_address(args.checkpoints_to):
        one, other = Path(args.checkpoints_to).resolve(), Path(args.output_dir).resolve()
        if one.is_relative_to(other) or other.is_relative_to(one):
            parser.error(
                f"--checkpoints_to {args.checkpoints_to} and --output_dir {args.output_dir} must "
                "be two folders, neither in the other"
            )
    tracker = args.report_to
    if tracker in LOGGER_TYPE_TO_CLASS and importlib.util.find_spec(tracker) is None:
        parser.error(
            f"--report_to {tracker}: `pip install {tracker}` first, or pass --report_to none"
        )


def add_pipeline_flags(add: Add) -> None:
    """Add the flags for the pretrained pipeline, which `open_base` reads."""
    add(
        "--pretrained_model_name_or_path",
        type=PATH,
        help="pretrained pipeline: hub id, folder, or (text to image) a .safetensors file",
    )
    add("--revision", help="branch, tag or commit of the models on the hub")
    add("--variant", help="variant of the weight files to load: fp16 loads *.fp16.safetensors")


def add_init_flag(add: Add) -> None:
    """Add the flag that `find_origin` reads."""
    add(
        "--init_from",
        type=PATH,
        help="folder of a run, or a checkpoint: start from its weights and step, with other data",
    )


def add_captioned_data_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of text-to-image trainers for their data, which `open_data` reads."""
    add = parser.add_argument_group("data: a cache").add_argument
    add(
        "--latents_dir",
        type=PATH,
        nargs="+",
        help="one or more caches made by precompute_latents.py",
    )
    add(
        "--latents_weights",
        nargs="+",
        type=number(1e-3, 1e3),
        help="for each --latents_dir, how often an epoch takes its rows (default: once)",
    )
    add_storage_flags(add)

    add = parser.add_argument_group("data: images, encoded in every step").add_argument
    add_source_flags(add, captions=True)
    add(
        "--resolution",
        type=number(2, 16384, int),
        help="side of the square images in pixels (default: that of the cache, or of the family: "
        "512, SDXL 1024)",
    )
    add("--center_crop", **SWITCH, help="crop the centre, not a random square")
    add_transform_flags(add)
    add(
        "--prefetch_factor",
        type=COUNT,
        help="batches that each process of --dataloader_num_workers loads ahead (default: 2)",
    )
    add_bucket_flags(add)
    add_stream_flags(add)

    add = parser.add_argument_group("data: both").add_argument
    add(
        "--random_flip",
        **SWITCH,
        help="use mirrored images too: a trainer mirrors at random, a cache holds both",
    )
    add(
        "--holdout",
        type=number(0, 10**9),
        default=0.0,
        help="share (below 1) or number of images that are not trained on, for the held-out loss",
    )
    add_tag_flags(add)
    add(
        "--caption_dropout",
        "--proportion_empty_prompts",  # the name in diffusers' scripts
        type=number(0, 1),
        default=0.1,
        help="share of captions that are replaced by the empty prompt, so that guidance works",
    )


def add_prompt_flags(add: Add, guidance_scale: float, num_inference_steps: int) -> None:
    """Add the flags of text-to-image trainers for samples."""
    add(
        "--validation_prompts",
        "--validation_prompt",
        nargs="+",
        help="one or more prompts to draw samples of (default: no samples)",
    )
    add(
        "--validation_steps",
        type=COUNT,
        help="optimizer steps between samples and held-out losses; overrides the epochs",
    )
    add(
        "--validation_epochs",
        type=COUNT,
        default=5,
        help="epochs between samples, and held-out losses",
    )
    add(
        "--num_validation_images",
        type=number(0, 10**4, int),
        default=4,
        help="samples per prompt; 0: no samples",
    )
    add(
        "--guidance_scale",
        type=number(1, 1000),
        default=guidance_scale,
        help="guidance scale of the samples; 1: no guidance (arXiv:2207.12598)",
    )
    add(
        "--num_inference_steps",
        type=COUNT,
        default=num_inference_steps,
        help="denoising steps of a sample",
    )
