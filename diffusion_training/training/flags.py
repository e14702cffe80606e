"""The flags that several scripts have, group by group, and what is refused in them."""

import argparse
import importlib.util
import math
import os
from collections.abc import Callable
from typing import Any

from accelerate.tracking import LOGGER_TYPE_TO_CLASS
from diffusers.optimization import SchedulerType

from diffusion_training.arguments import COUNT, PATH, SWITCH, check_source, number, size
from diffusion_training.data.streams import check_stream_args
from diffusion_training.data.texts import add_caption_flags, check_captions
from diffusion_training.remote import is_address

Add = Callable[..., argparse.Action]  # a parser's, or a group's, add_argument


def add_source_flags(add: Add, captions: bool = False) -> None:
    """Where images come from: what `load_rows` reads."""
    add("--dataset_name", type=PATH, help="data set on the hub, or a local folder")
    add("--dataset_config_name", help="configuration of the data set, if it has several")
    add("--dataset_split", default="train", help="split to read")
    add("--train_data_dir", type=PATH, help="local folder: images, parquet or webdataset tars")
    add("--image_column", help="column of images (None: `image`, or the only one)")
    if captions:
        add_caption_flags(add)
        add("--instance_prompt", help="caption of images that have none")
        add("--folder_repeats", **SWITCH, help="images in a folder 10_name come 10 times, as `name` if they have none")
        add("--caption_extension", default=".txt", help="of files beside the images, if there is no such column")
    add("--max_train_samples", type=COUNT, help="drawn at random; of a stream the first")
    add("--cache_dir", type=PATH, help="where downloads and data sets are kept")


def add_transform_flags(add: Add) -> None:
    """What `transform` reads besides resolution and crop."""
    add("--min_size", type=number(0, 16384, int), default=0, help="skip images with a shorter side, pixels")
    add("--skip_empty_captions", **SWITCH, help="skip images without a word")
    modes = ["bicubic", "bilinear", "nearest-exact"]
    add("--image_interpolation_mode", choices=modes, default="bicubic", help="for resizing, antialiased")
    add("--dataloader_num_workers", type=number(0, 1024, int), help="processes that decode (None: by the cores)")


def add_bucket_flags(add: Add) -> None:
    """Images of several sizes: what `choose_size` reads, and masks beside them."""
    add("--bucket_step", type=number(1, 4096, int), help="keep ratios: sides are multiples of it (None: squares)")
    keep: dict[str, Any] = {"dest": "bucket_step", "action": "store_const", "const": 64}
    add("--use_aspect_ratio_buckets", **keep, help="--bucket_step 64, under diffusers' name")
    add("--bucket_max_ratio", type=number(1, 16), default=2.0, help="of the longer side to the shorter one")
    add("--bucket_no_upscale", **SWITCH, help="enlarge no image: smaller ones have sizes of their own")
    add("--mask_column", help="masks, white where the loss counts (None: photo.mask.png beside photo.jpg)")


def add_storage_flags(add: Add) -> None:
    """Caches at an address, or of more rows than are permuted: what `open_latents` reads."""
    add("--shards_dir", type=PATH, help="folder of this machine for shards of --latents_dir s3://..., fetched ahead")
    add("--shards_size", type=size(1, 10**18), default=10**11, help="bytes that it may hold, such as 100GB")
    add("--shuffle_shards", type=number(1, 10**4, int), default=2, help="of a range, whose rows are shuffled together")


def add_device_flags(add: Add, trains: bool = True) -> None:
    """How the device computes: what `make_accelerator`, `compile_model` and a trainer's `main` read."""
    if trains:
        add("--gradient_checkpointing", **SWITCH, help="less memory, about a third slower")
    add("--compile", nargs="?", const="inductor", metavar="BACKEND", help="torch.compile with this backend")
    add("--no-compile", dest="compile", action="store_false", default=None, help="whatever the launch says")
    if trains:
        add("--allow_tf32", **SWITCH, help="TF32 matrix products on Ampere and later")
    add("--mixed_precision", choices=["no", "fp16", "bf16"], help="(None: what accelerate launch says)")


def add_family_flags(add: Add, default: str | None = None) -> None:
    """Which family the models are of, and how much of a caption it reads: what `load_models` reads."""
    families = ["sd", "sdxl", "prx", "z-image"]
    add("--model_family", choices=families, default=default, help="whose prompts (None: the pipeline's, or sd)")
    add("--max_sequence_length", type=COUNT, help="tokens of a caption, of prx and z-image (None: 256 or 512)")


def add_encoder_flags(add: Add) -> None:
    """Encoders that are not those of the pipeline: what `load_models` reads."""
    names = ["--vae_name_or_path", "--pretrained_vae_model_name_or_path"]  # the second is that of diffusers' scripts
    add(*names, type=PATH, help="AutoencoderKL, AutoencoderTiny or, of prx, AutoencoderDC")
    add("--text_encoder_name_or_path", type=PATH, help="text encoder instead, with its tokenizer")
    add("--single_file_config", type=PATH, help="configs of a base in one file (None: those of its family)")
    add("--tokenizer_name_or_path", type=PATH, help="tokenizer, if not beside the text encoder")
    add("--clip_skip", type=number(1, 100, int), help="layers of CLIP that are left out; 1 is kohya's 2 (None: none)")


def add_optimization_flags(
    parser: argparse.ArgumentParser, lr_scheduler: str, adam_beta1: float, adam_weight_decay: float
) -> None:
    """Steps, batches, learning rate, optimizer, averaged weights; what diffusers' scripts differ in is given."""
    add = parser.add_argument_group("optimization").add_argument
    add("--seed", type=number(0, 2**63 - 1, int), default=0, help="fixes all that is random")
    add("--train_batch_size", type=number(1, 10**5, int, "auto"), default=16, help="per process and micro-batch")
    add("--total_batch_size", type=COUNT, help="images per step, by accumulation (None: what the others give)")
    add("--gradient_accumulation_steps", type=COUNT, default=1, help="micro-batches per optimizer step")
    add("--num_train_epochs", "--num_epochs", type=COUNT, default=100, help="passes over the images")
    add("--max_train_steps", type=COUNT, help="optimizer steps; overrides the epochs")
    add("--learning_rate", type=number(0, 100), default=1e-4, help="peak, after the warm-up")
    scale: dict[str, Any] = {"nargs": "?", "const": "linear", "choices": ["linear", "sqrt", "auto"], "default": False}
    add("--scale_lr", **scale, help="multiply it by the images per step")
    add("--no-scale_lr", dest="scale_lr", action="store_false", default=False, help="leave it as it is given")
    add("--base_batch_size", type=COUNT, default=1, help="images per step that it is given for, with --scale_lr")
    add("--find_lr", **SWITCH, help="measure which rate is good, train nothing, and end")
    add("--find_lr_min", type=number(1e-30, 1e3), default=1e-7, help="rate that the test begins with")
    add("--find_lr_max", type=number(1e-30, 1e3), default=1.0, help="rate that it ends with, if it gets there")
    add("--find_lr_steps", type=number(10, 10**6, int), default=200, help="optimizer steps between the two")
    kinds = ["adamw", "adamw8bit", "adafactor", "muon"]
    add("--optimizer", choices=kinds, default="adamw", help="8 bits, adafactor: less memory; muon: for transformers")
    eight: dict[str, Any] = {"dest": "optimizer", "action": "store_const", "const": "adamw8bit", "default": "adamw"}
    add("--use_8bit_adam", **eight, help="short for --optimizer adamw8bit")
    schedules = [schedule.value for schedule in SchedulerType]
    add("--lr_scheduler", choices=schedules, default=lr_scheduler, help="shape of the decay")
    add("--lr_warmup_steps", type=number(0, 10**9, int), default=500, help="optimizer steps")
    add("--lr_num_cycles", type=COUNT, default=1, help="restarts of cosine_with_restarts")
    add("--lr_power", type=number(0, 100), default=1.0, help="power of polynomial")
    add("--lr_step_rules", help="piecewise_constant: 1:1000,0.1:2000,0.01")
    add("--adam_beta1", type=number(0, 0.999999), default=adam_beta1, help="decay of the gradient's mean")
    add("--adam_beta2", type=number(0, 0.999999), default=0.999, help="decay of its square's mean")
    add("--adam_weight_decay", type=number(0, 100), default=adam_weight_decay, help="decoupled weight decay")
    add("--adam_epsilon", type=number(1e-30, 1), default=1e-8, help="added to the denominator")
    add("--max_grad_norm", type=number(0, 1e9), default=1.0, help="clip the gradient's norm; 0: don't")
    add("--use_ema", action=argparse.BooleanOptionalAction, default=True, help="average the weights")
    add("--ema_inv_gamma", type=number(1e-3, 1e12), default=1.0, help="warm-up 1 - (1 + step / inv_gamma) ** -power")
    add("--ema_power", type=number(0, 10), default=0.75, help="2/3 suits over a million steps")
    add("--ema_max_decay", type=number(0, 1), default=0.9999, help="the decay that the warm-up ends at")


def add_lora_flags(add: Add) -> None:
    """What `add_lora`, `load_network_weights` and `save_lora` read."""
    add("--rank", "--lora_rank", type=number(1, 4096, int), help="of a LoRA, trained instead (None: the whole model)")
    add("--lora_alpha", type=number(1e-3, 1e6), help="its effect is times alpha / rank (None: the rank)")
    add("--lora_layers", default="attention", help="attention, all, or ends of modules' names: to_q,to_v,ff.net.2")
    add("--lora_dropout", type=number(0, 0.999), default=0.0, help="share of its inputs that are left out")
    add("--use_dora", **SWITCH, help="train magnitudes as well, slower (arXiv:2402.09353)")
    add("--network_weights", type=PATH, help="file of a LoRA that goes on being trained")
    add("--output_kohya_format", **SWITCH, help="write the LoRA for ComfyUI and A1111 as well")


def add_logging_flags(add: Add, tracker_project_name: str) -> None:
    """Records and trackers."""
    add("--logging_steps", type=COUNT, default=10, help="steps between records, which wait for the device")
    trackers = [*LOGGER_TYPE_TO_CLASS, "all", "none"]
    add("--report_to", "--logger", choices=trackers, default="tensorboard", help="besides metrics.jsonl")
    add("--tracker_project_name", default=tracker_project_name, help="project in the trackers")
    add("--logging_dir", default="logs", help="tensorboard's folder in --output_dir")


def add_saving_flags(add: Add) -> None:
    """Checkpoints and the hub."""
    add("--checkpointing_steps", type=COUNT, default=500, help="optimizer steps between checkpoints")
    add("--checkpoints_total_limit", type=COUNT, help="checkpoints to keep (None: all)")
    add("--save_best", **SWITCH, help="keep the weights of the lowest held-out loss in best/; needs --holdout")
    add("--resume_from_checkpoint", type=PATH, help="a checkpoint's path, or `latest`")
    add("--push_to_hub", **SWITCH, help="upload the result, as the logged-in user")
    add("--hub_model_id", help="repository (None: named like --output_dir)")
    add("--hub_private_repo", **SWITCH, help="create it private")


def check_data_args(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """What text-to-image trainers refuse in the flags of their data: a cache, or images with captions."""
    check_captions(parser, args)
    if args.latents_dir and (args.dataset_name or args.train_data_dir):
        parser.error("--latents_dir excludes --dataset_name and --train_data_dir: the cache holds the data")
    if args.latents_dir is None:
        check_source(parser, args)
    if len({*map(os.path.realpath, args.latents_dir or [])}) < len(args.latents_dir or []):
        parser.error("--latents_dir names a cache twice: --latents_weights says how often an epoch takes its rows")
    if args.latents_weights and len(args.latents_weights) != len(args.latents_dir or []):
        parser.error(f"--latents_weights: {len(args.latents_weights)} for {len(args.latents_dir or [])} --latents_dir")
    images_only = ["dataset_config_name", "dataset_split", "image_column", "caption_column", "max_train_samples"]
    images_only += ["caption_extension", "center_crop", "image_interpolation_mode", "min_size", "skip_empty_captions"]
    images_only += ["dataloader_num_workers", "bucket_step", "bucket_max_ratio", "mask_column", "bucket_no_upscale"]
    images_only += ["prefetch_factor", "instance_prompt", "folder_repeats", "streaming", "shuffle_buffer"]
    found = [folder for folder in args.latents_dir or [] if is_address(folder)]
    if found and not args.shards_dir:
        parser.error(f"--latents_dir {found[0]} is an address: --shards_dir says where its shards lie for a while")
    for name in images_only if args.latents_dir else []:
        if getattr(args, name) != parser.get_default(name):
            parser.error(f"--{name} does nothing with --latents_dir: the cache was made without or with it")


def check_training_args(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """What all trainers refuse in these flags, besides numbers out of their bounds."""
    check_stream_args(parser, args)
    if args.lr_scheduler == "piecewise_constant":
        try:  # as diffusers reads them
            *rules, last = (args.lr_step_rules or "").split(",")
            rules = [(float(value), int(step)) for value, step in (rule.split(":") for rule in rules)]
            if not all(map(math.isfinite, [float(last), *(value for value, _ in rules)])):
                raise ValueError
        except ValueError:
            parser.error("--lr_scheduler piecewise_constant needs --lr_step_rules like 1:1000,0.1:2000,0.01")
    if args.find_lr_min >= args.find_lr_max:
        parser.error(f"--find_lr_min {args.find_lr_min} is not below --find_lr_max {args.find_lr_max}")
    if args.optimizer == "adamw8bit" and importlib.util.find_spec("bitsandbytes") is None:
        parser.error("--optimizer adamw8bit: `pip install bitsandbytes` first, or choose another")
    names = ["lora_alpha", "lora_layers", "lora_dropout", "use_dora", "output_kohya_format", "network_weights"]
    for name in names if "rank" in args and args.rank is None else ():
        if getattr(args, name) != parser.get_default(name):
            parser.error(f"--{name} does nothing without --rank")
    for name in ("output_kohya_format", "network_weights") if "rank" in args and args.use_dora else ():
        if getattr(args, name):
            parser.error(f"--{name} has no form for --use_dora: leave one of them out")
    if args.save_best and not getattr(args, "holdout", 0):
        parser.error("--save_best goes by the held-out loss: say with --holdout how many images it is measured on")
    args.push_to_hub &= not args.find_lr  # there is nothing to upload
    for tracker in {*LOGGER_TYPE_TO_CLASS} & {args.report_to}:
        if importlib.util.find_spec(tracker) is None:
            parser.error(f"--report_to {tracker}: `pip install {tracker}` first, or pass --report_to none")
