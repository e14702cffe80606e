"""The flags that several scripts share, in groups, and the checks of their values.

Only the standard library is imported, so that --help and wrong flags answer at once.
"""

import argparse
import importlib.util
import math
import os
from collections.abc import Callable
from pathlib import Path

from diffusion_training.arguments import (
    COUNT,
    PATH,
    SWITCH,
    SWITCHED_ON,
    is_address,
    number,
    size,
    steps_or_share,
)
from diffusion_training.data.flags import (
    add_caption_flags,
    add_stream_flags,
    add_tag_flags,
    check_captions,
    check_stream_args,
    is_array,
)
from diffusion_training.families.names import DEFAULT_FAMILY, DEFAULT_FLOW_FAMILY, FACTS

Add = Callable[..., argparse.Action]  # add_argument of a parser or of a group
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
    "lora_type",
    "lora_alpha",
    "lora_layers",
    "lora_dropout",
    "use_dora",
    "network_weights",
    "base_precision",
    "preserve_prior",
)
# flags that do nothing without --preserve_prior
PRIOR_ONLY = ("class_prompt", "trigger", "prior_loss_weight", "prior_every")

# metrics of --validation_metrics
SET_METRICS = ("kid", "fid")  # of all samples together
CLIP_METRICS = ("clip-t", "clip-i")
LOWER_METRICS = (*SET_METRICS, "copy")  # lower is better
METRICS = (*SET_METRICS, *CLIP_METRICS, "dino-i", "copy")


def add_source_flags(add: Add, captions: bool = False) -> None:
    """Add the flags for the source of the images, which `load_rows` reads."""
    add(
        "--dataset_name",
        type=PATH,
        help="data set on the Hugging Face hub, such as your-name/photos, or a folder with one",
    )
    add("--dataset_config_name", help="configuration of the data set, if it has several")
    add("--dataset_split", default="train", help="split of the data set to read")
    add(
        "--train_data_dir",
        type=PATH,
        help="local folder of images, parquet files or tars (webdataset); with --streaming also "
        "an address of parquet files or tars, such as 's3://bucket/{000..123}.tar'; "
        "train_unconditional.py also takes an array of images in an .npy file",
    )
    add(
        "--image_column", help="column of images (default: `image`, or the only column with images)"
    )
    if captions:
        add_caption_flags(add)
        add(
            "--instance_prompt",
            help="caption for images that have none, such as 'a photo of sks dog'",
        )
        add(
            "--folder_repeats",
            **SWITCH,
            help="use each image in a folder '10_sks dog' 10 times per epoch; images without a "
            "caption get 'sks dog'",
        )
        add(
            "--caption_extension",
            default=".txt",
            help="extension of the caption files (photo.txt for photo.jpg), read if there is no "
            "caption column",
        )
    add(
        "--max_train_samples",
        type=COUNT,
        help="use only this many images: random ones, or the first ones with --streaming or data "
        "at an address (default: all)",
    )
    add(
        "--cache_dir",
        type=PATH,
        help="folder for downloads and prepared data sets (default: the Hugging Face libraries' "
        "own)",
    )


def check_source(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Stop with an error if the data folder does not exist, or if two sources are given.

    One of two sources would be ignored.
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
    elif not Path(source).is_dir():
        takes_array = "array_range" in args
        if not (takes_array and is_array(source)):
            more = ", nor an .npy file" if takes_array else ""
            parser.error(f"--train_data_dir {source} is not a folder{more}")


def add_image_flags(add: Add, trains: bool = True) -> None:
    """Add the flags for how images are loaded and cropped, with or without captions."""
    add("--center_crop", **SWITCH, help="crop the centre of an image, not a random part")
    add(
        "--min_size",
        type=number(0, 16384, int),
        default=0,
        help="skip images with a side shorter than this many pixels",
    )
    add(
        "--dataloader_num_workers",
        type=number(0, 1024, int),
        help="processes that decode images (default: one less than the CPU cores per launched "
        "process, at most 8)",
    )
    if trains:
        add(
            "--prefetch_factor",
            type=COUNT,
            help="batches that each process of --dataloader_num_workers loads ahead (default: 2)",
        )


def add_transform_flags(add: Add) -> None:
    """Add the flags that `transform_row` reads, besides those of `add_image_flags`."""
    add("--skip_empty_captions", **SWITCH, help="skip images with an empty caption")
    add(
        "--image_interpolation_mode",
        choices=["bicubic", "bilinear", "nearest-exact"],
        default="bicubic",
        help="interpolation for resizing images, always antialiased",
    )


def add_bucket_flags(add: Add) -> None:
    """Add the flags for images of several sizes, which `choose_size` reads, and for masks."""
    add(
        "--bucket_step",
        type=number(1, 4096, int),
        help="keep the aspect ratios of images, with sides that are multiples of this number, "
        "such as 64 (default: crop to squares)",
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
    )
    add("--bucket_no_upscale", **SWITCH, help="with --bucket_step, never enlarge images")
    add(
        "--mask_column",
        help="column of masks; the loss counts where a mask is white (default: the file "
        "photo.mask.png beside photo.jpg)",
    )


def add_storage_flags(add: Add) -> None:
    """Add the flags for caches that are remote, or have too many rows for one permutation.

    `open_latents` reads them.
    """
    add(
        "--shards_dir",
        type=PATH,
        help="if --latents_dir is an address (s3://...): local folder for copies of the cache's "
        "files (shards)",
    )
    add(
        "--shards_size",
        type=size(1, 10**18),
        default=10**11,
        help="maximum size of --shards_dir, such as 50GB (default: 100GB)",
    )
    add(
        "--shuffle_shards",
        type=number(1, 10**4, int),
        default=2,
        help="if a cache has too many rows to shuffle them all: number of shards whose rows are "
        "shuffled together",
    )


def add_device_flags(add: Add, trains: bool = True) -> None:
    """Add the flags for how the device computes.

    `make_launch`, `compile_model` and a trainer's `main` read them.
    """
    if trains:
        add(
            "--gradient_checkpointing",
            **SWITCH,
            help="compute activations a second time instead of storing them: less memory, about a "
            "third slower",
        )
    add(
        "--compile",
        nargs="?",
        const="inductor",
        metavar="BACKEND",
        help="use torch.compile, with this backend; inductor if you name none",
    )
    add(
        "--no-compile",
        dest="compile",
        action="store_false",
        default=None,
        help="do not use torch.compile, even if `accelerate config` turns it on",
    )
    if trains:
        add(
            "--allow_tf32",
            **SWITCH,
            help="compute float32 matrix products in TF32, on Ampere GPUs and later: faster, less "
            "exact",
        )
        add(
            "--deterministic",
            **SWITCH,
            help="use only deterministic GPU kernels: slower, but a resumed run ends with the same "
            "bits as one that never stopped",
        )
    add(
        "--mixed_precision",
        choices=["no", "fp16", "bf16"],
        help="precision of the computation; no is float32, bf16 is for Ampere GPUs and later, "
        "fp16 for older ones such as a T4 (default: the setting of `accelerate launch` or "
        "`accelerate config`, else no)",
    )


def add_shard_flag(add: Add) -> None:
    """Add the flag for models that do not fit on one GPU."""
    add(
        "--shard",
        **SWITCH,
        help="split weights, EMA and optimizer state over the GPUs (FSDP2), for models that do "
        "not fit on one; see docs/memory.md",
    )


def add_family_flags(add: Add) -> None:
    """Add the flags for model family and caption length, which `open_base` reads."""
    add(
        "--model_family",
        choices=[*FACTS],
        help="model family (default: the pipeline's; without a pipeline, or for a new transformer "
        f"with a U-Net's VAE and text encoder, {DEFAULT_FLOW_FAMILY} in train_flow.py, elsewhere "
        f"{DEFAULT_FAMILY})",
    )
    limits = [
        f"{family.max_tokens} for {name}" for name, family in FACTS.items() if family.max_tokens
    ]
    add(
        "--max_sequence_length",
        type=COUNT,
        help="maximum number of tokens of a caption; the rest is cut off "
        f"(default: {', '.join(limits)})",
    )


def add_encoder_flags(add: Add) -> None:
    """Add the flags for encoders other than the pipeline's, which `open_base` reads."""
    usual = FACTS[DEFAULT_FAMILY].vae_classes
    classes = ", ".join(usual)
    for name, family in FACTS.items():
        if family.vae_classes != usual:
            classes += f"; for {name} {', '.join(family.vae_classes)}"
    add(
        "--vae_name_or_path",
        "--pretrained_vae_model_name_or_path",  # the name in diffusers' scripts
        type=PATH,
        help="VAE to use instead of the pipeline's: hub id or folder, of one of these classes: "
        f"{classes}",
    )
    add(
        "--text_encoder_name_or_path",
        type=PATH,
        help="text encoder to use instead of the pipeline's, with its tokenizer: hub id or folder",
    )
    add(
        "--single_file_config",
        type=PATH,
        help="configs for a pipeline in one .safetensors file: hub id or folder (default: those "
        "of its family)",
    )
    add(
        "--tokenizer_name_or_path",
        type=PATH,
        help="tokenizer, if it is not stored with the text encoder: hub id or folder",
    )
    add(
        "--clip_skip",
        type=number(1, 100, int),
        help="number of final CLIP layers to skip; 2 in kohya's scripts and A1111 is 1 here "
        "(default: skip none)",
    )


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
        "fits",
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
    )
    add(
        "--find_lr_max",
        type=number(1e-30, 1e3),
        default=1.0,
        help="learning rate at which --find_lr ends, if the loss does not end it earlier",
    )
    add(
        "--find_lr_steps",
        type=number(10, 10**6, int),
        default=200,
        help="number of optimizer steps from --find_lr_min to --find_lr_max",
    )
    add(
        "--optimizer",
        choices=["adamw", "adamw8bit", "adafactor", "muon"],
        default="adamw",
        help="optimizer; adamw8bit and adafactor take less memory, muon is for transformers",
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
    )
    add(
        "--lr_power",
        type=number(0, 100),
        default=1.0,
        help="power of --lr_scheduler polynomial; 1 is linear",
    )
    add(
        "--lr_step_rules",
        help="factors of --lr_scheduler piecewise_constant; for example 1:1000,0.1:2000,0.01 "
        "means 1 until step 1000, 0.1 until step 2000, then 0.01",
    )
    add(
        "--adam_beta1",
        type=number(0, 0.999999),
        default=adam_beta1,
        help="beta1 of Adam: decay of its average of the gradients",
    )
    add(
        "--adam_beta2",
        type=number(0, 0.999999),
        default=0.999,
        help="beta2 of Adam: decay of its average of the squared gradients",
    )
    add(
        "--adam_weight_decay",
        type=number(0, 100),
        default=adam_weight_decay,
        help="decoupled weight decay, with any --optimizer",
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
        **SWITCHED_ON,
        help="keep an exponential moving average (EMA) of the weights, for the samples and the "
        "result",
    )
    add(
        "--ema_inv_gamma",
        type=number(1e-3, 1e12),
        default=1.0,
        help="inv_gamma in the EMA decay, 1 - (1 + step / inv_gamma) ** -power",
    )
    add(
        "--ema_power",
        type=number(0, 10),
        default=0.75,
        help="power in the EMA decay; for more than a million steps use 0.6667",
    )
    add("--ema_max_decay", type=number(0, 1), default=0.9999, help="upper limit of the EMA decay")
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
    )


def add_lora_flags(add: Add) -> None:
    """Add the flags that `add_lora` and `load_network_weights` read."""
    add(
        "--rank",
        "--lora_rank",
        type=number(1, 4096, int),
        help="train a LoRA of this rank, such as 16 (default: train the whole model)",
    )
    add(
        "--lora_type",
        choices=["lora", "lokr"],
        default="lora",
        help="lokr: train a LoKr, the Kronecker product of two small matrices, for ComfyUI and "
        "diffusers 0.42 (arXiv:2309.14859)",
    )
    add(
        "--lokr_factor",
        type=number(1, 4096, int),
        default=8,
        help="with --lora_type lokr, size of the smaller matrix; the larger one has the size of "
        "the layer, divided by it, and is trained whole if --rank is at least half of that",
    )
    add(
        "--lora_alpha",
        type=number(1e-3, 1e6),
        help="the LoRA's output is multiplied by alpha / rank: a larger alpha makes it stronger "
        "(default: the rank)",
    )
    add(
        "--lora_layers",
        default="attention",
        help="layers that get a LoRA: attention, all, or ends of module names, such as "
        "to_q,to_v,ff.net.2",
    )
    add(
        "--lora_dropout",
        type=number(0, 0.999),
        default=0.0,
        help="probability with which each input of the LoRA is set to 0 in training",
    )
    add(
        "--use_dora",
        **SWITCH,
        help="train a DoRA, a LoRA that also trains the magnitudes of the weights: slower "
        "(arXiv:2402.09353); ComfyUI applies that of a U-Net, not that of a transformer",
    )
    add(
        "--network_weights",
        type=PATH,
        help="LoRA file to continue training from, or the output folder of a run with --rank",
    )
    add(
        "--base_precision",
        choices=["int8", "nf4"],
        help="with --rank, precision of the frozen base model, to save memory: int8 takes 1 byte a "
        "weight, nf4 about half a byte and needs bitsandbytes (default: that of --mixed_precision)",
    )
    add(
        "--preserve_prior",
        **SWITCH,
        help="keep what the base model predicts for --class_prompt, so that the LoRA changes only "
        "what it is taught",
    )
    add(
        "--class_prompt",
        nargs="+",
        help="with --preserve_prior, one or more prompts for what must not change, such as 'a "
        "photo of a dog'; each image of a step takes one of them; with --trigger only the class, "
        "such as dog",
    )
    add(
        "--trigger",
        help="words in the captions for what the LoRA learns, such as 'sks dog'; the prompts that "
        "must not change are then the captions with --class_prompt in place of these words",
    )
    add(
        "--prior_loss_weight",
        type=number(1e-6, 1e6),
        default=1.0,
        help="weight of the loss of --preserve_prior",
    )
    add(
        "--prior_every",
        type=COUNT,
        default=1,
        help="add the loss of --preserve_prior only every so many steps, multiplied by this "
        "number: faster, since it takes three passes more",
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
    )
    add("--logging_dir", default="logs", help="folder in --output_dir for the logs of tensorboard")
    add(
        "--validate_first",
        **SWITCHED_ON,
        help="if the model is pretrained, draw samples and measure the held-out loss before step "
        "1 too",
    )


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
    )
    add(
        "--metric_clip_model",
        type=PATH,
        default="openai/clip-vit-base-patch32",
        help="network for clip-t and clip-i: hub id or folder of a CLIP model",
    )
    add(
        "--metric_steps",
        type=COUNT,
        help="optimizer steps between two measurements of --validation_metrics (default: "
        "--checkpointing_steps)",
    )
    add(
        "--num_metric_images",
        type=number(2, 10**6, int),
        help="samples that --validation_metrics draws (default: 512; for a LoRA 64)",
    )
    add(
        "--save_best_metric",
        choices=METRICS,
        help="keep the weights with the best value of one of --validation_metrics in the folder "
        "best/",
    )


def add_saving_flags(add: Add) -> None:
    """Add the flags for checkpoints and the hub."""
    add(
        "--checkpointing_steps", type=COUNT, default=500, help="optimizer steps between checkpoints"
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
    )
    add("--hub_private_repo", **SWITCH, help="with --push_to_hub, make the repository private")


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
            "--latents_dir can't be combined with --dataset_name or --train_data_dir: the cache "
            "holds the data"
        )
    if len({*map(os.path.realpath, caches)}) < len(caches):
        parser.error(
            "--latents_dir names a cache twice: name it once, and use its rows more often with "
            "--latents_weights"
        )
    if args.latents_weights and len(args.latents_weights) != len(caches):
        parser.error(
            f"--latents_weights needs a value for each --latents_dir: {len(caches)}, not "
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
    # --cache_latents of a recipe says how to make a cache if none is given
    for name in IMAGES_ONLY if caches and not args.cache_latents else ():
        if vars(args)[name] != parser.get_default(name):
            parser.error(
                f"--{name} does nothing with --latents_dir: give it to precompute_latents.py, "
                "or leave it out"
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
        if args.lr_warmup_steps:
            parser.error(
                "--lr_scheduler piecewise_constant has no warm-up: leave --lr_warmup_steps out, "
                "and begin --lr_step_rules with a small factor"
            )
    if args.posthoc_ema_steps and not args.posthoc_ema:
        parser.error("--posthoc_ema_steps does nothing without --posthoc_ema")
    if args.posthoc_ema and len({f"{width:g}" for width in args.posthoc_ema}) < 2:
        parser.error("--posthoc_ema needs two different widths, such as 0.05 0.10")
    for name in ("rank", "shard"):
        if args.posthoc_ema and vars(args).get(name):
            parser.error(f"--posthoc_ema can't be combined with --{name}: leave one of them out")
    if vars(args).get("shard"):
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
    if args.optimizer == "adamw8bit":
        check_package(parser, "--optimizer adamw8bit", "bitsandbytes", "choose another")
    base_precision = vars(args).get("base_precision")
    if base_precision == "nf4":
        check_package(parser, "--base_precision nf4", "bitsandbytes", "choose int8")
    if vars(args).get("lora_type") == "lokr":
        for name in ("use_dora", "lora_dropout"):
            if vars(args)[name]:
                parser.error(f"--{name} can't be combined with --lora_type lokr: leave one out")
    elif "rank" in args and args.lokr_factor != parser.get_default("lokr_factor"):
        parser.error("--lokr_factor does nothing without --lora_type lokr")
    if base_precision and args.use_dora:
        parser.error("--use_dora needs the exact weights of the base: leave --base_precision out")
    for name in LORA_ONLY if "rank" in args and args.rank is None else ():
        if vars(args)[name] != parser.get_default(name):
            parser.error(f"--{name} does nothing without --rank")
    if "rank" in args:
        check_prior_args(parser, args)
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


def check_prior_args(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Stop with an error if the flags of --preserve_prior do not fit together."""
    if not args.preserve_prior:
        for name in PRIOR_ONLY:
            if vars(args)[name] != parser.get_default(name):
                parser.error(f"--{name} does nothing without --preserve_prior")
    elif not args.class_prompt:
        parser.error(
            "--preserve_prior needs --class_prompt: prompts for what must not change, such as 'a "
            "photo of a dog'"
        )
    elif args.trigger is not None and (not args.trigger or len(args.class_prompt) > 1):
        parser.error(
            "--trigger needs words, and one --class_prompt that replaces them in the captions"
        )
    for prompt in args.class_prompt or []:
        if args.trigger in prompt if args.trigger else prompt == args.instance_prompt:
            parser.error(
                f"--class_prompt {prompt!r} is what the LoRA must learn: describe what must not "
                "change, such as 'dog' for 'sks dog'"
            )


def check_metric_args(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Stop with an error if the flags of --validation_metrics do not fit together."""
    chosen = args.validation_metrics or []
    if not chosen:
        for name in ("metric_steps", "num_metric_images"):
            if vars(args)[name]:
                parser.error(f"--{name} does nothing without --validation_metrics")
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


def check_package(parser: argparse.ArgumentParser, flag: str, package: str, advice: str) -> None:
    """Stop with an error if a package that a flag needs is not installed."""
    if importlib.util.find_spec(package) is None:
        parser.error(f"{flag} needs {package}: `pip install {package}`, or {advice}")


def add_pipeline_flags(add: Add) -> None:
    """Add the flags for the pretrained pipeline, which `open_base` reads."""
    add(
        "--pretrained_model_name_or_path",
        type=PATH,
        help="pretrained pipeline: hub id or folder; text-to-image U-Nets also from one "
        ".safetensors file",
    )
    add("--revision", help="branch, tag or commit of the models on the hub")
    add(
        "--variant", help="variant of the weight files to load, such as fp16 for *.fp16.safetensors"
    )


def add_init_flag(add: Add) -> None:
    """Add the flag that `find_origin` reads."""
    add(
        "--init_from",
        type=PATH,
        help="run folder or checkpoint whose weights and step a new run starts from, with a new "
        "optimizer and possibly other data",
    )


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
        help="a number for each --latents_dir: how often an epoch uses its rows (default: once)",
    )
    add_storage_flags(add)

    add = parser.add_argument_group("data: images, encoded in every step").add_argument
    add_source_flags(add, captions=True)
    add(
        "--cache_latents",
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
        help="side of the square images in pixels; with --bucket_step, no image has more pixels "
        "than this square (default: that of the cache, else the model's, such as 512 or 1024)",
    )
    add_image_flags(add)
    add_transform_flags(add)
    add_bucket_flags(add)
    add_stream_flags(add)

    add = parser.add_argument_group("data: a cache or images").add_argument
    add(
        "--random_flip",
        **SWITCH,
        help="use mirrored images too: a trainer mirrors at random, a cache stores both versions",
    )
    add(
        "--holdout",
        type=number(0, 10**9),
        default=0.0,
        help="keep this share (below 1) or number of images out of training, to measure the loss "
        "on them (held-out loss)",
    )
    add_tag_flags(add)
    add(
        "--caption_dropout",
        "--proportion_empty_prompts",  # the name in diffusers' scripts
        type=number(0, 1),
        default=0.1,
        help="share of captions that are replaced by the empty prompt, which guidance needs",
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
        "--validation_steps",
        type=COUNT,
        help="draw samples and measure the held-out loss every so many optimizer steps, instead "
        "of epochs",
    )
    add(
        "--validation_epochs",
        type=COUNT,
        default=5,
        help="draw samples and measure the held-out loss every so many epochs",
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
        help="denoising steps per sample",
    )
