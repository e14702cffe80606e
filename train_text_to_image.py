"""Train the U-Net of Stable Diffusion: a latent cache, or images with captions -> a StableDiffusionPipeline.

    accelerate launch precompute_latents.py && accelerate launch train_text_to_image.py     # the demo: digits by name
    accelerate launch --config_file accelerate_configs/multi_gpu.yaml train_text_to_image.py \\
        --pretrained_model_name_or_path stable-diffusion-v1-5/stable-diffusion-v1-5 --latents_dir latents-photos \\
        --validation_prompts "a red bicycle" --output_dir sd-photos

Reads caches of precompute_latents.py (--latents_dir), or images and captions as that script does, encoded in the step.
Writes into --output_dir: the pipeline with its model card, samples/, metrics.jsonl, loss.png, report.html, logs,
run.args (this command again: @sd-photos/run.args), and every --checkpointing_steps a checkpoint-N that the same
command with --resume_from_checkpoint latest goes on from.

What stands where:
    parse_args                       the flags, one a line; bad values end here, before anything is loaded or written
    transform, CaptionedImages       keys -> a batch of images and captions; all choices follow from the key, so
                                     resuming repeats them
    load_cache, CachedLatents        keys -> a batch of a cache, read in place: nothing is copied but into its batch
    choose_rows                      the rows of an epoch, when caches have weights
    make_unet, make_schedulers       the model, how its latents are noised, and how the pipeline samples
    prepare_batch, compute_loss      a batch -> what the U-Net is given, and the loss
    log_validation, describe_model   what people look at
    main                             the run in phases, the training loop among them
After main the text is that of the other scripts, and `python tests/copy_shared.py train_text_to_image.py` copies a
change: images, batches from a thread so that the device need not wait, models and their hashes, launch, step, records,
checkpoints, output.
"""

import argparse
import atexit
import base64
import collections
import contextlib
import copy
import ctypes
import functools
import gc
import hashlib
import html
import importlib.util
import io
import itertools
import json
import math
import multiprocessing.queues
import os
import shlex
import shutil
import signal
import sys
import tarfile
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import datasets
import diffusers
import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
import torch.nn.functional as F
import torchvision.transforms.v2.functional as TF
import transformers
import xxhash
from accelerate import Accelerator
from accelerate.tracking import LOGGER_TYPE_TO_CLASS
from accelerate.utils import (
    DynamoBackend,
    InitProcessGroupKwargs,
    ProjectConfiguration,
    TorchDynamoPlugin,
    gather_object,
)
from accelerate.utils.memory import should_reduce_batch_size
from diffusers import (
    AutoencoderKL,
    AutoencoderTiny,
    DDIMScheduler,
    DDPMScheduler,
    StableDiffusionPipeline,
    UNet2DConditionModel,
)
from diffusers.optimization import SchedulerType, get_scheduler
from diffusers.training_utils import compute_snr
from filelock import FileLock, Timeout
from fsspec.implementations.local import LocalFileSystem
from huggingface_hub import create_repo, repo_info, upload_folder
from PIL import Image, ImageDraw, ImageFont, ImageOps
from torch.optim.swa_utils import get_ema_multi_avg_fn
from tqdm.auto import tqdm
from transformers import CLIPTextModel, CLIPTokenizer

try:
    from torchcodec.decoders import decode_jpeg  # up to twice as fast as Pillow
except (ImportError, OSError, RuntimeError):  # not installed, or not made for this torch
    decode_jpeg = None

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # or tokenizers complain about the loader's processes
HERE = shlex.quote(os.path.relpath(Path(__file__).parent))
# The command line that stands for no data at all; flags that are given come after it, and win.
DEMO = f"""
    --latents_dir latents-digits --pretrained_model_name_or_path {HERE}/demo/models
    --unet_config_name_or_path {HERE}/demo/digits_text_to_image_unet.json
    --output_dir sd-digits --train_batch_size 64 --num_train_epochs 80
    --learning_rate 3e-3 --lr_scheduler cosine --lr_warmup_steps 100 --snr_gamma 5
    --validation_prompts "a handwritten digit zero" "a handwritten digit one" "a handwritten digit two"
        "a handwritten digit three" "a handwritten digit four" "a handwritten digit five" "a handwritten digit six"
        "a handwritten digit seven" "a handwritten digit eight" "a handwritten digit nine"
    --validation_epochs 40 --guidance_scale 3 --checkpointing_steps 10000 --resume_from_checkpoint latest
"""

# ------------------------------------------------------------------------------------------------- the flags


def parse_args(argv=None):
    """Parse and check the command line: a bad argument ends with one line and status 2 before anything is loaded."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], epilog="@FILE stands for the flags in a file, such as a run's run.args",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter, fromfile_prefix_chars="@",
    )  # fmt: skip
    parser.convert_arg_line_to_args = functools.partial(shlex.split, comments=True)
    switch = {"action": argparse.BooleanOptionalAction, "default": False}  # --flag, and --no-flag against a @FILE
    count = number(1, 10**9, int)
    path = os.path.expanduser  # a shell leaves the ~ of --output_dir=~/run as it is

    add = parser.add_argument_group("data: a cache").add_argument
    add("--latents_dir", type=path, nargs="+", help="caches of precompute_latents.py")
    add("--latents_weights", nargs="+", type=number(1e-3, 1e3), help="how often an epoch takes each cache's rows")

    add = parser.add_argument_group("data: images, encoded in every step").add_argument
    add("--dataset_name", type=path, help="data set on the hub, or a local folder")
    add("--dataset_config_name", help="configuration of the data set, if it has several")
    add("--dataset_split", default="train", help="split to read")
    add("--train_data_dir", type=path, help="local folder: images, parquet or webdataset tars")
    add("--image_column", help="column of images (None: `image`, or the only one)")
    add("--caption_column", default="text", help="column of captions; of a list one is drawn")
    add("--caption_extension", default=".txt", help="of files beside the images, if there is no such column")
    add("--max_train_samples", type=count, help="drawn at random; of a stream the first")
    add("--cache_dir", type=path, help="where downloads and data sets are kept")
    add("--resolution", type=number(1, 16384, int), help="side of the square images, pixels")
    add("--center_crop", **switch, help="crop the centre, not a random square")
    modes = ["bicubic", "bilinear", "nearest-exact"]
    add("--min_size", type=number(0, 16384, int), default=0, help="skip images with a shorter side, pixels")
    add("--skip_empty_captions", **switch, help="skip images without a word")
    add("--image_interpolation_mode", choices=modes, default="bicubic", help="for resizing, antialiased")
    add("--dataloader_num_workers", type=number(0, 1024, int), help="processes that decode (None: by the cores)")

    add = parser.add_argument_group("data: both").add_argument
    add("--random_flip", **switch, help="mirrored images as well")
    add("--holdout", type=number(0, 10**9), default=0.0, help="share or number of images for the held-out loss")
    add("--caption_dropout", type=number(0, 1), default=0.1, help="share of captions left out, for guidance")

    add = parser.add_argument_group("model").add_argument
    add("--pretrained_model_name_or_path", type=path, help="hub id or folder of a pipeline")
    add("--revision", help="branch, tag or commit of the models on the hub")
    add("--variant", help="of the weight files, such as fp16")
    add("--unet_config_name_or_path", type=path, help="train a new U-Net: hub id, folder or JSON file")
    add("--vae_name_or_path", type=path, help="AutoencoderKL or AutoencoderTiny instead")
    add("--text_encoder_name_or_path", type=path, help="CLIP text model instead, with its tokenizer")
    add("--tokenizer_name_or_path", type=path, help="tokenizer, if not beside the text encoder")
    add("--gradient_checkpointing", **switch, help="less memory, about a third slower")
    add("--compile", nargs="?", const="inductor", metavar="BACKEND", help="torch.compile with this backend")
    add("--allow_tf32", **switch, help="TF32 matrix products on Ampere and later")
    add("--mixed_precision", choices=["no", "fp16", "bf16"], help="(None: what accelerate launch says)")

    add = parser.add_argument_group("objective").add_argument
    add("--prediction_type", choices=["epsilon", "sample", "v_prediction"], help="(None: epsilon, or the pretrained)")
    add("--rescale_betas_zero_snr", **switch, help="last timestep is pure noise (arXiv:2305.08891)")
    add("--snr_gamma", type=number(1e-3, 1e6), help="min-SNR loss weight, 5.0 is usual (arXiv:2303.09556)")
    add("--noise_offset", type=number(0, 10), default=0.0, help="for darker and lighter images, 0.1 is usual")
    add("--input_perturbation", type=number(0, 10), default=0.0, help="noise beyond the target's, 0.1 is usual")

    add = parser.add_argument_group("optimization").add_argument
    add("--seed", type=number(0, 2**63 - 1, int), default=0, help="fixes all that is random")
    add("--train_batch_size", type=number(1, 10**5, int, "auto"), default=16, help="per process and micro-batch")
    add("--total_batch_size", type=count, help="images per step, by accumulation (None: what the others give)")
    add("--gradient_accumulation_steps", type=count, default=1, help="micro-batches per optimizer step")
    add("--num_train_epochs", "--num_epochs", type=count, default=100, help="passes over the images")
    add("--max_train_steps", type=count, help="optimizer steps; overrides the epochs")
    add("--learning_rate", type=number(0, 100), default=1e-4, help="peak, after the warm-up")
    rules = ["linear", "sqrt", "auto"]
    scale = {"nargs": "?", "const": "linear", "choices": rules, "default": False}
    add("--scale_lr", **scale, help="multiply it by the images per step")
    add("--no-scale_lr", dest="scale_lr", action="store_false", default=False, help="leave it as it is given")
    add("--base_batch_size", type=count, default=1, help="images per step that it is given for, with --scale_lr")
    add("--find_lr", **switch, help="measure which rate is good, train nothing, and end")
    add("--find_lr_min", type=number(1e-30, 1e3), default=1e-7, help="rate that the test begins with")
    add("--find_lr_max", type=number(1e-30, 1e3), default=1.0, help="rate that it ends with, if it gets there")
    add("--find_lr_steps", type=number(10, 10**6, int), default=200, help="optimizer steps between the two")
    add("--lr_scheduler", choices=[s.value for s in SchedulerType], default="constant", help="shape of the decay")
    add("--lr_warmup_steps", type=number(0, 10**9, int), default=500, help="optimizer steps")
    add("--lr_num_cycles", type=count, default=1, help="restarts of cosine_with_restarts")
    add("--lr_power", type=number(0, 100), default=1.0, help="power of polynomial")
    add("--lr_step_rules", help="piecewise_constant: 1:1000,0.1:2000,0.01")
    add("--adam_beta1", type=number(0, 0.999999), default=0.9, help="decay of the gradient's mean")
    add("--adam_beta2", type=number(0, 0.999999), default=0.999, help="decay of its square's mean")
    add("--adam_weight_decay", type=number(0, 100), default=1e-2, help="decoupled weight decay")
    add("--adam_epsilon", type=number(1e-30, 1), default=1e-8, help="added to the denominator")
    add("--max_grad_norm", type=number(0, 1e9), default=1.0, help="clip the gradient's norm; 0: don't")
    add("--use_ema", action=argparse.BooleanOptionalAction, default=True, help="average the weights")
    add("--ema_inv_gamma", type=number(1e-3, 1e12), default=1.0, help="warm-up 1 - (1 + step / inv_gamma) ** -power")
    add("--ema_power", type=number(0, 10), default=0.75, help="2/3 suits over a million steps")
    add("--ema_max_decay", type=number(0, 1), default=0.9999, help="the decay that the warm-up ends at")

    add = parser.add_argument_group("logging and samples").add_argument
    add("--logging_steps", type=count, default=10, help="steps between records, which wait for the device")
    trackers = [*LOGGER_TYPE_TO_CLASS, "all", "none"]
    add("--report_to", "--logger", choices=trackers, default="tensorboard", help="besides metrics.jsonl")
    add("--tracker_project_name", default="text2image-fine-tune", help="project in the trackers")
    add("--logging_dir", default="logs", help="tensorboard's folder in --output_dir")
    add("--validation_prompts", nargs="+", help="what to draw samples of")
    add("--validation_steps", type=count, help="steps between samples and held-out losses; overrides the epochs")
    add("--validation_epochs", type=count, default=5, help="epochs between samples")
    add("--num_validation_images", type=number(1, 10**4, int), default=4, help="samples of each prompt")
    add(
        "--guidance_scale", type=number(1, 1000), default=7.5, help="of the samples; 1: no guidance (arXiv:2207.12598)"
    )
    add("--num_inference_steps", type=count, default=20, help="sampling steps")

    add = parser.add_argument_group("saving").add_argument
    add("--output_dir", type=path, default="sd-model-finetuned", help="everything is written here")
    add("--checkpointing_steps", type=count, default=500, help="optimizer steps between checkpoints")
    add("--checkpoints_total_limit", type=count, help="checkpoints to keep (None: all)")
    add("--resume_from_checkpoint", type=path, help="a checkpoint's path, or `latest`")
    add("--push_to_hub", **switch, help="upload the pipeline, as the logged-in user")
    add("--hub_model_id", help="repository (None: named like --output_dir)")
    add("--hub_private_repo", **switch, help="create it private")

    args = parser.parse_args(argv)
    if args.latents_dir is None and args.dataset_name is None and args.train_data_dir is None:
        args = parse_demo(parser, DEMO, argv)

    if args.pretrained_model_name_or_path is None:
        parser.error("--pretrained_model_name_or_path is needed: a Stable Diffusion pipeline")
    if args.latents_dir and (args.dataset_name or args.train_data_dir):
        parser.error("--latents_dir excludes --dataset_name and --train_data_dir: the cache holds the data")
    if args.latents_dir is None and args.dataset_name is None and not Path(args.train_data_dir).is_dir():
        parser.error(f"--train_data_dir {args.train_data_dir} is not a folder")
    for folder in args.latents_dir or []:
        if "://" in folder:
            parser.error(
                f"--latents_dir {folder} is an address: copy the cache to a disk, where it is mapped into memory"
            )
    if args.latents_weights and len(args.latents_weights) != len(args.latents_dir or []):
        parser.error(f"--latents_weights: {len(args.latents_weights)} for {len(args.latents_dir or [])} --latents_dir")
    images_only = ["dataset_config_name", "dataset_split", "image_column", "caption_column", "max_train_samples"]
    images_only += ["caption_extension", "center_crop", "image_interpolation_mode", "min_size", "skip_empty_captions"]
    images_only += ["dataloader_num_workers"]
    for name in images_only if args.latents_dir else []:
        if getattr(args, name) != parser.get_default(name):
            parser.error(f"--{name} does nothing with --latents_dir: the cache was made without or with it")
    check_training_args(parser, args)
    return args


# ------------------------------------------------------------------------------------------------- the data


def transform(row, epoch, item, column, channels, args):
    """Stage 1, on CPU cores: a row of the source -> its caption and its pixels, cropped and resized in uint8.

    Returns {"row", "key", "text", "pixel_values": [channels, resolution, resolution], "skipped", "outage"}: why the
    row can't be used, else None; whether that is the disk's fault, or the network's.
    """
    size, key, reason, outage = args.resolution, name_image(row, item[column]), None, False
    folder = args.train_data_dir or args.dataset_name
    if os.path.isabs(key) and os.path.isdir(folder):
        key = os.path.relpath(key, folder)  # the same wherever the data lies
    try:
        y, x, _, choice = draw_choices(args.seed, epoch, row)
        text = item[args.caption_column]
        if isinstance(text, list) and text:
            text = text[int(choice * len(text))]
        if not isinstance(text, str):
            raise ValueError(f"the caption is {text!r}")
        if args.skip_empty_captions and not text.strip():
            raise ValueError("the caption is empty")
        place = (0.5, 0.5) if args.center_crop else (y, x)
        image = decode_image(item[column], channels, min_size=args.min_size)
        image = shrink(image, size, place, args.image_interpolation_mode)
    except Exception as error:  # a placeholder keeps the batch in shape
        text, image = "", torch.zeros(channels, size, size, dtype=torch.uint8)
        reason, outage = explain(error), is_outage(error)
        if isinstance(error, OSError) and error.errno is not None:  # of the disk or the network, not of the file
            reason = f"not read: {reason}"
    return {"row": row, "key": key, "text": text, "pixel_values": image, "skipped": reason, "outage": outage}


class CaptionedImages(torch.utils.data.Dataset):
    """Turns the keys (epoch, row, weight) of `step_batches` into a batch of images and captions: `dataset[keys]`.

    {"pixel_values": uint8 [N, C, resolution, resolution], "input_ids": [N, model_max_length], "weight": [N],
    "skipped": [(name, reason)]}; a row that can't be used has weight 0.
    """

    def __init__(self, rows, column, channels, tokenizer, args):
        self.rows, self.tokenizer, self.args, self.settings = rows, tokenizer, args, (column, channels, args)
        self.fingerprint = rows._fingerprint

    def __len__(self):
        return len(self.rows)

    def names(self):
        return name_rows(self.rows, self.settings[0], self.args)

    def __getitem__(self, keys):
        items = [
            transform(row, epoch, item, *self.settings)
            for (epoch, row, _), item in zip(keys, read_items(self.rows, keys), strict=True)
        ]
        for (epoch, row, _), item in zip(keys, items, strict=True):
            if item["outage"]:  # or the run would go on, on nothing
                raise OSError(f"{item['key']} was {item['skipped']}")
            if self.args.random_flip and draw_choices(self.args.seed, epoch, row)[2] < 0.5:
                item["pixel_values"] = item["pixel_values"].flip(-1)
        weights = [0.0 if item["skipped"] else weight for (_, _, weight), item in zip(keys, items, strict=True)]
        return {
            "pixel_values": torch.stack([item["pixel_values"] for item in items]),
            "input_ids": tokenize(self.tokenizer, [item["text"] for item in items]),
            "weight": torch.tensor(weights),
            "skipped": [(item["key"], item["skipped"]) for item in items if item["skipped"]],
        }


def load_cache(folder):
    """Open a cache of precompute_latents.py without reading its rows, which are checked when they are first read.

    Returns (cache.json, empty prompt, [(shard, record batch)]).
    """
    folder, shard = Path(folder), ""
    try:
        cache = json.loads((folder / "cache.json").read_text())
        if not (folder / "state.json").is_file():
            fail(f"{folder} is not finished: run the command that made it again")
        state = json.loads((folder / "state.json").read_text())
        if state["_fingerprint"] != fingerprint(cache):
            raise ValueError("cache.json is not as it was written")
        cache.setdefault("text_cache", "embeddings")  # older caches have no other
        kinds = {"prompt_embeds": pa.list_(pa.float16(), math.prod(cache["prompt_embeds_shape"]))}
        if cache["text_cache"] == "ids":
            kinds = {"input_ids": pa.list_(pa.int32(), cache["prompt_embeds_shape"][0])}
        for name in ["latents"] + ["latents_flipped"] * cache["transform"]["random_flip"]:
            kinds[name] = pa.list_(pa.float16(), math.prod(cache["latents_shape"]))
        content, batches = (folder / "empty_prompt.npy").read_bytes(), []
        if hashlib.sha256(content).hexdigest() != cache["empty_prompt_sha256"]:
            raise ValueError("empty_prompt.npy is not as it was written")
        empty_prompt = torch.from_numpy(np.load(io.BytesIO(content)))
        for name, record in cache["shards"].items():
            shard, digest = folder / Path(name).name, xxhash.xxh3_128()
            read = [batch for batch in pa.ipc.open_stream(pa.memory_map(str(shard))) if len(batch)]
            if sum(map(len, read)) != record["rows"]:
                raise ValueError(f"{sum(map(len, read))} rows instead of {record['rows']}")
            for batch in read:
                for column, kind in kinds.items():
                    if batch[column].type != kind or batch[column].flatten().null_count:
                        raise ValueError(f"{column} is not {kind.list_size} numbers in each row")
                if "checksums" in record:
                    digest.update(batch["checksum"].to_numpy())
            if "checksums" not in record:  # of a cache from before there were any
                with shard.open("rb") as file:
                    digest = hashlib.file_digest(file, "sha256")
            if digest.hexdigest() != record.get("checksums", record["sha256"]):
                raise ValueError("it is not as it was written")
            batches += [(shard, batch) for batch in read]
        if not batches:
            raise ValueError("it holds no rows")
        return cache, empty_prompt, batches
    except FileNotFoundError as error:
        fail(f"{error.filename or shard} is missing: make the cache with precompute_latents.py")
    except Exception as error:
        if "Memory mapping file failed" in str(error):
            fail(
                f"{shard} can't be mapped into memory: raise `ulimit -v`, or the number of files that Linux lets a "
                "process map (sysctl vm.max_map_count), or make caches with more --rows_per_shard"
            )
        fail(f"{shard or folder} is damaged ({error}): run the command that made the cache again, it mends it")


class CachedLatents(torch.utils.data.Dataset):
    """Turns keys of `step_batches` into a batch of one or several latent caches.

    {"latents", "prompt_embeds": float16 [N, numbers per row], or in place of these "input_ids": int32 [N, tokens],
    "weight": [N], "skipped": []}. The columns are views of the memory-mapped files, and a row is copied once, into its
    batch. A row is checked when it is first read. A number beyond the rows is one of them once more, as `choose_rows`
    counts, which is mirrored by a draw of its own.
    """

    def __init__(self, batches, args):
        self.seed, self.random_flip = args.seed, args.random_flip
        self.batches, self.ends = batches, np.cumsum([len(batch) for _, batch in batches])
        self.views = [
            {name: batch[name].flatten().to_numpy().reshape(len(batch), -1) for name in batch.schema.names
             if name in ("latents", "latents_flipped", "prompt_embeds", "input_ids")}
            for _, batch in batches
        ]  # fmt: skip
        self.text = "input_ids" if "input_ids" in self.views[0] else "prompt_embeds"
        self.checksums = [  # None in caches from before rows had any: `load_cache` has checked the whole of those
            batch["checksum"].to_numpy() if "checksum" in batch.schema.names else None for _, batch in batches
        ]
        self.unchecked = np.ones(len(self), bool)

    def __len__(self):
        return int(self.ends[-1])

    def names(self):
        for _, batch in self.batches:
            yield from batch["key"].to_pylist()  # as `transform` named them

    def check(self, row, chunk, i):
        """Refuse a row that is not as it was written: as OSError, because the disk failed, or who wrote to it."""
        written = self.checksums[chunk]
        if written is not None and written[i] != checksum({name: view[i] for name, view in self.views[chunk].items()}):
            shard, _ = self.batches[chunk]
            raise OSError(f"{shard} is damaged: the command that made the cache mends it when it is run again")
        self.unchecked[row] = False

    def __getitem__(self, keys):
        rows = np.array([row for _, row, _ in keys]) % len(self)
        chunks = np.searchsorted(self.ends, rows, side="right")
        places = (rows - self.ends[chunks]).tolist()  # counted from the chunk's end
        columns = {"latents": [], self.text: []}
        for (epoch, number, _), row, chunk, place in zip(keys, rows.tolist(), chunks.tolist(), places, strict=True):
            if self.unchecked[row]:
                self.check(row, chunk, place)
            flip = self.random_flip and draw_choices(self.seed, epoch, number)[2] < 0.5
            columns["latents"].append(self.views[chunk]["latents_flipped" if flip else "latents"][place])
            columns[self.text].append(self.views[chunk][self.text][place])
        return {  # each column in one copy, for which this thread lets go of Python's lock once and not once a row
            **{
                name: torch.from_numpy(np.concatenate(found).reshape(len(keys), -1)) for name, found in columns.items()
            },
            "weight": torch.tensor([weight for _, _, weight in keys]),
            "skipped": [],
        }


def load_data(accelerator, args):
    """The data of the caches, or images with the models that encode them in the step.

    Returns (dataset, frozen). `frozen` is what `prepare_batch` needs: the VAE and the text encoder (None where a cache
    has what they gave), the empty prompt's embedding [tokens, D], and what cache.json says, or would say.
    """
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(accelerator.mixed_precision, torch.float32)
    if args.latents_dir:
        caches = [load_cache(folder) for folder in args.latents_dir]
        cache, empty_prompt, _ = caches[0]
        if accelerator.is_main_process:  # the models are loaded to be compared, and let go
            vae, text_encoder, tokenizer = load_models(args, torch.float32)
            try_models(vae, text_encoder)
            description = describe_models(vae, text_encoder, tokenizer)
            description |= describe_latents(vae, cache["transform"]["resolution"], cache["latents"])
            description["prompt_embeds_shape"] = [tokenizer.model_max_length, text_encoder.config.hidden_size]
            description["text_cache"] = cache["text_cache"]
            for folder, (other, _, _) in zip(args.latents_dir, caches, strict=True):
                check_cache(folder, other, description, args)
        accelerator.wait_for_everyone()
        args.resolution = args.resolution or cache["transform"]["resolution"]
        args.dataloader_num_workers = 0  # a thread reads faster than processes, which would have to pass it on
        dataset = CachedLatents([batch for _, _, batches in caches for batch in batches], args)
        content = json.dumps([cache["shards"] for cache, _, _ in caches])
        dataset.fingerprint = hashlib.sha256(content.encode()).hexdigest()[:16]
        dataset.cache_ends = np.cumsum([cache["rows"] for cache, _, _ in caches])
        text_encoder = None
        if cache["text_cache"] == "ids":
            text_encoder = load_models(args, dtype)[1].requires_grad_(False).to(accelerator.device)
        return dataset, ((None, text_encoder), empty_prompt.float().to(accelerator.device), cache)
    args.resolution = args.resolution or 512
    rows, column = load_rows(args, others=[args.caption_column])
    vae, text_encoder, tokenizer = load_models(args, dtype)
    put_on_device(vae.requires_grad_(False), accelerator.device)
    text_encoder.requires_grad_(False).to(accelerator.device)
    try_models(vae, text_encoder)
    with torch.no_grad():
        empty_prompt = encode_prompts(text_encoder, tokenize(tokenizer, [""]).to(accelerator.device))[0]
    kind = "sample" if isinstance(vae, AutoencoderTiny) else "moments"
    cache = {"vae": {"scaling_factor": vae.config.scaling_factor}, **describe_latents(vae, args.resolution, kind)}
    if accelerator.is_main_process:
        texts = look_at_captions(rows, args)
        say_equal(texts)
        cut = are_cut(tokenizer, texts or [""])
        say_cut(sum(cut), len(cut), tokenizer.model_max_length)
    dataset = CaptionedImages(rows, column, vae.config.in_channels, tokenizer, args)
    return dataset, ((vae, text_encoder), empty_prompt, cache)


def choose_rows(rows, dataset, args, epoch):
    """The rows that an epoch takes of `rows`, which are sorted: of each cache --latents_weights times as many.

    A cache's rows, in an order drawn from the seed, are gone round without end, and an epoch takes the next weight *
    rows of them: with 3 it has each thrice; with 1.5 each once or twice, and two epochs have each thrice. The first
    time a row comes in an epoch it has its own number, then one that is higher by all rows for each time before.
    """
    if not args.latents_weights:
        return rows
    chosen, parts = [], np.split(rows, np.searchsorted(rows, dataset.cache_ends[:-1]))
    for folder, weight, part in zip(args.latents_dir, args.latents_weights, parts, strict=True):
        count = round(weight * len(part))
        if count == 0:
            fail(f"--latents_weights {weight:g} takes none of the {len(part)} rows of {folder}: choose a larger one")
        rounds, places = np.divmod(np.arange(epoch * count, (epoch + 1) * count), len(part))
        order = np.random.default_rng(args.seed).permutation(part)
        chosen.append(order[places] + (rounds - rounds[0]) * len(dataset))
    return np.sort(np.concatenate(chosen))  # so that weights of 1 change nothing


def describe_latents(vae, resolution, kind):
    """What a cache says of its latents if they are of this VAE; `kind`: moments or sample."""
    side, channels = resolution // vae_scale_factor(vae), vae.config.latent_channels
    return {"latents": kind, "latents_shape": [channels * (2 if kind == "moments" else 1), side, side]}


def check_cache(folder, cache, description, args):
    """Refuse a cache that other models than `description` tells of have made, or that lacks what the flags ask for."""
    differences = find_differences({name: cache.get(name) for name in description}, description)
    if differences:
        fail(
            f"{folder} does not fit these models or the first cache ({', '.join(differences)}): choose the models or "
            "the caches anew"
        )
    say_cut(cache.get("captions_cut", 0), cache["rows"], cache["prompt_embeds_shape"][0], f"{folder}: ")
    if args.random_flip and not cache["transform"]["random_flip"]:
        fail(f"--random_flip: {folder} was made without, so it holds no mirrored latents")
    if args.resolution not in (None, cache["transform"]["resolution"]):
        fail(f"--resolution {args.resolution}: {folder} holds {cache['transform']['resolution']} px")


# ------------------------------------------------------------------------------------------------- the model


def make_unet(args, latents_shape, embed_dim):
    """The U-Net to train for latents [C, h, w]: the pretrained pipeline's, or a new one of the given config."""
    source = args.unet_config_name_or_path or args.pretrained_model_name_or_path
    options = {"cache_dir": args.cache_dir}
    with explained(f"{source} holds no UNet2DConditionModel"):
        if args.unet_config_name_or_path:
            unet = UNet2DConditionModel.from_config(UNet2DConditionModel.load_config(source, **options))
        else:
            options |= {"subfolder": "unet", "revision": args.revision, "variant": args.variant}
            unet = load_weights(UNet2DConditionModel, source, **options)
    # What the pipeline draws unless told otherwise; of old versions it would not believe sizes below 64.
    unet.register_to_config(sample_size=latents_shape[1], _diffusers_version=diffusers.__version__)
    if (unet.config.in_channels, unet.config.cross_attention_dim) != (latents_shape[0], embed_dim):
        fail(
            f"the U-Net of {source} takes {unet.config.in_channels} channels and embeddings of "
            f"{unet.config.cross_attention_dim}; the latents have {latents_shape[0]}, the embeddings {embed_dim}"
        )
    with torch.device("meta"), torch.no_grad(), explained(f"the U-Net of {source} can't be trained here"):
        latents, timestep, prompt_embeds = torch.zeros(1, *latents_shape), torch.zeros(1), torch.zeros(1, 1, embed_dim)
        prediction = type(unet).from_config(unet.config)(latents, timestep, prompt_embeds).sample  # without numbers
        if prediction.shape != latents.shape:
            raise ValueError(f"it gives {list(prediction.shape[1:])} for latents of {latents_shape}")
    return unet


def make_schedulers(args):
    """(the scheduler that noises in training, the sampler of the pipeline), both of the trained objective."""
    source, flags = args.pretrained_model_name_or_path, objective_flags(args)
    options = {"subfolder": "scheduler", "cache_dir": args.cache_dir, "revision": args.revision}
    with explained(f"{source} holds no scheduler"):
        noise_scheduler = DDPMScheduler.from_pretrained(source, **options, **flags)
        sampler = DDIMScheduler  # of the samplers the one that can start from pure noise
        if not noise_scheduler.config.rescale_betas_zero_snr:
            sampler = getattr(diffusers, DDPMScheduler.load_config(source, **options)["_class_name"])
        if not issubclass(sampler, diffusers.SchedulerMixin):
            raise ValueError(f"{sampler.__name__} is none")
        sampler = sampler.from_pretrained(source, **options, **flags)
        sampler.set_timesteps(1)  # refuses a timestep_spacing that it does not know
    check_objective(noise_scheduler)
    timesteps = noise_scheduler.config.num_train_timesteps
    if args.num_inference_steps > timesteps:
        fail(f"--num_inference_steps {args.num_inference_steps} exceeds the {timesteps} training timesteps")
    return noise_scheduler, sampler


# ------------------------------------------------------------------------------------------------- the loss


@torch.no_grad()
def prepare_batch(batch, frozen, args):
    """A batch as loaded -> (latents [N, C, h, w] of about unit size, what the U-Net is given besides), in float32.

    A fresh draw of the latents each time, and the empty prompt in place of a share of the captions.
    """
    (vae, text_encoder), empty_prompt, cache = frozen
    if "latents" in batch:  # of a cache
        latents = batch["latents"].float().unflatten(1, cache["latents_shape"])
    else:
        latents = encode_images(vae, batch["pixel_values"])
    if "prompt_embeds" in batch:
        prompt_embeds = batch["prompt_embeds"].float().unflatten(1, cache["prompt_embeds_shape"])
    else:
        prompt_embeds = encode_prompts(text_encoder, batch["input_ids"])
    if cache["latents"] == "moments":
        mean, std = latents.chunk(2, dim=1)
        # By shape, not `like` the mean: a VAE's strides must not decide which number goes where.
        latents = mean + std * torch.randn(mean.shape, device=mean.device)
    latents = latents * cache["vae"]["scaling_factor"]
    # Without dropped captions, guidance would have no unconditional model to lean on (arXiv:2207.12598).
    dropped = torch.rand(len(latents), 1, 1, device=latents.device) < args.caption_dropout
    return latents, {"encoder_hidden_states": torch.where(dropped, empty_prompt, prompt_embeds)}


def compute_loss(unet, noise_scheduler, images, weight, args, **condition):
    """The denoising loss of DDPM (arXiv:2006.11239, eq. 14): the sum over images of weight * mean squared error.

    images, or their latents: [N, C, H, W] float32 of about unit size. weight: [N]; it adds up to 1 over a step's
    micro-batches, averaged over the processes, and is 0 for a placeholder: so return (weight * loss per image).sum(),
    whatever the loss. condition: what the U-Net is given besides, such as encoder_hidden_states.
    """
    noise = torch.randn(images.shape, device=images.device)  # by shape: `like` would draw in the order of the memory
    if args.noise_offset:  # the same all over a channel (crosslabs.org/blog/diffusion-with-offset-noise)
        noise = noise + args.noise_offset * torch.randn(*images.shape[:2], 1, 1, device=images.device)
    perturbed = noise
    if args.input_perturbation:  # more noise in the input than the target tells of (arXiv:2301.11706)
        perturbed = noise + args.input_perturbation * torch.randn(noise.shape, device=noise.device)
    timesteps = torch.randint(noise_scheduler.config.num_train_timesteps, (len(images),), device=images.device)
    # In float32 under any precision: in bfloat16 the first timesteps would get no noise at all.
    noisy_images = noise_scheduler.add_noise(images, perturbed, timesteps)
    prediction = unet(noisy_images, timesteps, **condition).sample.float()
    prediction_type = noise_scheduler.config.prediction_type
    if prediction_type == "epsilon":
        target = noise
    elif prediction_type == "sample":
        target = images
    else:
        target = noise_scheduler.get_velocity(images, noise, timesteps)
    loss = F.mse_loss(prediction, target, reduction="none").mean(dim=(1, 2, 3))
    if args.snr_gamma is not None:  # the min-SNR weight (arXiv:2303.09556)
        snr = compute_snr(noise_scheduler, timesteps)
        if prediction_type == "epsilon":
            weight = weight * snr.clamp(max=args.snr_gamma) / snr
        elif prediction_type == "sample":
            weight = weight * snr.clamp(max=args.snr_gamma)
        else:  # SNR + 1, as diffusers had it first: the paper's weight is 0 at the pure noise of a zero terminal SNR
            weight = weight * (snr + 1).clamp(max=args.snr_gamma) / (snr + 1)
    return (weight * loss).sum()


# ------------------------------------------------------------------------------------------------- the output


def make_pipeline(unet, sampler, args):
    """What is sampled from, saved and uploaded: the U-Net and the models that it was trained with, in float32."""
    vae, text_encoder, tokenizer = load_models(args, torch.float32)
    return StableDiffusionPipeline(
        vae, text_encoder, tokenizer, unet, sampler, None, None, requires_safety_checker=False
    )


def log_validation(accelerator, pipeline, step, stop_signal, args):
    """Draw --num_validation_images of each prompt, a share on each process, into samples/step-N.png and the trackers.

    An image starts from its own seed, whatever the number of processes. A signal breaks off: who sends it does not
    wait for pictures, and a run that is resumed draws what is missing.
    """
    if not args.validation_prompts:
        return

    def watch(pipeline, index, timestep, tensors):
        pipeline._interrupt = bool(stop_signal.received)  # diffusers' way to leave the remaining steps out
        return tensors

    device, unet = accelerator.device, pipeline.unet
    pipeline.vae.to(device).enable_slicing()  # one image at a time: a batch may need more memory than training
    pipeline.text_encoder.to(device)
    pipeline.set_progress_bar_config(disable=True)
    training = unet.training
    unet.eval()  # without dropout
    prompts = [prompt for prompt in args.validation_prompts for _ in range(args.num_validation_images)]
    mine, images = range(accelerator.process_index, len(prompts), accelerator.num_processes), []
    for start in range(0, len(mine), args.train_batch_size):
        batch = mine[start : start + args.train_batch_size]
        drawn = pipeline(
            [prompts[i] for i in batch],
            height=args.resolution,
            width=args.resolution,
            num_inference_steps=args.num_inference_steps,
            guidance_scale=args.guidance_scale,
            generator=[torch.Generator(device).manual_seed(step_seed(args.seed, i)) for i in batch],
            output_type="np",
            callback_on_step_end=watch,
        )
        images.extend(drawn.images)
        if stop_signal.received:
            break
    unet.train(training)
    images = gather_object([] if stop_signal.received else list(zip(mine, images, strict=True)))
    if accelerator.is_main_process and len(images) == len(prompts):
        images = np.stack([image for _, image in sorted(images, key=lambda pair: pair[0])])
        images = (images * 255).round().astype(np.uint8)
        grid = draw_grid(images.reshape(len(args.validation_prompts), -1, *images.shape[1:]), args.validation_prompts)
        save_samples(accelerator, grid, step, args)


def draw_grid(images, prompts):
    """Images uint8 [prompts, per prompt, H, W, C] -> a picture with a row for each prompt, which stands beside it."""
    prompts = [prompt if len(prompt) < 400 else prompt[:400] + "…" for prompt in prompts]  # measured again and again
    size = max(64, images.shape[2])
    font, margin = ImageFont.load_default(14), 4
    label = min(400, max(math.ceil(font.getlength(prompt)) for prompt in prompts)) + 2 * margin
    step = size + margin
    grid = Image.new("RGB", (label + images.shape[1] * step, len(prompts) * step), "white")
    draw = ImageDraw.Draw(grid)
    for y, (prompt, row) in enumerate(zip(prompts, images, strict=True)):
        while font.getlength(prompt) > label - 2 * margin:
            prompt = prompt[:-2].rstrip("…") + "…"
        draw.text((margin, y * step + size // 2), prompt, "black", font, anchor="lm")
        for x, image in enumerate(row):
            picture = Image.fromarray(image.squeeze()).convert("RGB").resize((size, size), Image.NEAREST)
            grid.paste(picture, (label + x * step, y * step))
    return grid


def describe_model(step, loss, args):
    """For card and report: (the hub's tags, what was trained on what, how to use it)."""
    name, base = args.hub_model_id or Path(args.output_dir).resolve().name, args.pretrained_model_name_or_path
    data = args.latents_dir or [args.dataset_name or args.train_data_dir]
    data = ", ".join(Path(path).name for path in data)
    prompt = json.dumps((args.validation_prompts or ["a photograph"])[0])
    trained = "trained from scratch" if args.unet_config_name_or_path else "fine-tuned"
    what = f"""A Stable Diffusion pipeline whose U-Net was {trained} on `{data}`
for {step} steps{f", to a loss of {loss:.4g}" if loss else ""}; the other models are those of
`{base if not Path(base).exists() else Path(base).resolve().name}`."""
    usage = f"""from diffusers import StableDiffusionPipeline

pipeline = StableDiffusionPipeline.from_pretrained("{name}")
image = pipeline({prompt}, height={args.resolution}, width={args.resolution}).images[0]"""
    return ["text-to-image", "stable-diffusion", "diffusers-training"], what, usage


# ------------------------------------------------------------------------------------------------- the run


def main(args):
    """Train; ends with status 130 or 143 after Ctrl-C or SIGTERM, and with 1 and a sentence if it can't go on."""
    transformers.utils.logging.disable_progress_bar()
    # The launch first: it says which device, which process of how many, and in which precision all else happens.
    project = ProjectConfiguration(args.output_dir, logging_dir=str(Path(args.output_dir, args.logging_dir)))
    log_with = None if args.report_to == "none" else args.report_to
    accelerator, cores = make_accelerator(args, log_with=log_with, project_config=project)
    device, rank, num_processes = accelerator.device, accelerator.process_index, accelerator.num_processes
    torch.set_float32_matmul_precision("high" if args.allow_tf32 else "highest")
    lock, checkpoint = open_output_dir(accelerator, args)  # locked to the end, so that no second run writes here

    # The data before the model, which must fit the latents and embeddings. A core per process stays free.
    noise_scheduler, sampler = make_schedulers(args)
    if args.dataloader_num_workers is None:
        args.dataloader_num_workers = min(8, cores - 1)
    dataset, frozen = load_data(accelerator, args)
    _, empty_prompt, cache = frozen
    train_rows, held_out = hold_out(accelerator, dataset, args)
    epoch_rows = functools.partial(choose_rows, train_rows, dataset, args)
    num_images = len(epoch_rows(0))  # of an epoch
    channels, *size = cache["latents_shape"]
    channels //= 2 if cache["latents"] == "moments" else 1
    torch.manual_seed(args.seed)  # every process starts from the same weights
    unet = make_unet(args, [channels, *size], empty_prompt.shape[-1])

    # Where the run is: data_step counts also the steps that fp16 skipped, images_seen is where the data goes on.
    state = read_state(checkpoint, num_images)
    global_step, data_step, images_seen = state["global_step"], state["data_step"], state["images_seen"]
    choose_batch_size(accelerator, unet, noise_scheduler, dataset, train_rows, frozen, state["settings"], args)
    images_per_micro_batch = args.train_batch_size * num_processes
    images_per_step = images_per_micro_batch * args.gradient_accumulation_steps
    scale_learning_rate(accelerator, images_per_step, args)
    if args.max_train_steps is None:
        args.max_train_steps = count_steps(data_step, images_seen, num_images, images_per_step, args)
    if global_step > args.max_train_steps:
        accelerator.print(f"{checkpoint} is beyond step {args.max_train_steps}: there is nothing left to train")
        return
    settings = {**vars(args), "num_processes": num_processes, "num_images": num_images, "data": dataset.fingerprint}

    # Weights, averaged weights and optimizer, all in float32: autocast lowers the precision of what is computed only.
    put_on_device(unet, device)
    models = {"unet": unet}
    if args.use_ema:
        models["unet_ema"] = copy.deepcopy(unet).eval().requires_grad_(False)
    if args.gradient_checkpointing:
        unet.enable_gradient_checkpointing()
    optimizer = torch.optim.AdamW(
        [{"params": unet.parameters(), "initial_lr": args.learning_rate}],  # as a resumed schedule needs
        lr=args.learning_rate, betas=(args.adam_beta1, args.adam_beta2), eps=args.adam_epsilon,
        weight_decay=args.adam_weight_decay,
        fused=accelerator.scaler is None,  # fused skips fp16 overflows by itself, unseen by Accelerate
    )  # fmt: skip
    if checkpoint:  # before `prepare`, which wraps what is loaded here
        load_checkpoint(accelerator, checkpoint, models, optimizer, state, settings)
    # Started at `global_step`, update k has the rate f(k); the usual start would waste update 1 on f(0) = 0.
    lr_scheduler = get_scheduler(
        args.lr_scheduler, optimizer, step_rules=args.lr_step_rules, num_warmup_steps=args.lr_warmup_steps,
        num_training_steps=args.max_train_steps + 1, num_cycles=args.lr_num_cycles, power=args.lr_power,
        last_epoch=global_step,
    )  # fmt: skip
    if args.compile:
        compile_model(unet, args.compile)
    ddp_unet, optimizer = accelerator.prepare(unet, optimizer)  # what is called; `unet` is what is saved and averaged
    sampled = unet
    if args.use_ema:
        sampled = accelerator.prepare_model(models["unet_ema"], evaluation_mode=True)  # autocast as in training

    # Batches come without end, across epochs, so the device never waits for one to begin.
    keys = step_batches(epoch_rows, args, rank, num_processes, images_seen)
    loaded = load_batches(dataset, keys, args.dataloader_num_workers, device)
    if args.find_lr:  # and end: nothing that it trains is kept
        return find_learning_rate(
            accelerator, lock, ddp_unet, optimizer, noise_scheduler, loaded, images_seen, num_images, data_step,
            frozen, args,
        )  # fmt: skip
    records = Records(accelerator, global_step, 0, checkpoint is not None, args)
    batches, stop_signal = records.watch(loaded), StopSignal(num_processes)
    log_held_out = functools.partial(
        log_held_out_loss, accelerator, records, dataset, held_out, models, noise_scheduler, frozen, stop_signal, args
    )
    stop = 0
    samples_every = args.validation_steps, images_seen, args.validation_epochs * num_images
    if checkpoint and is_due(global_step, *samples_every) and not samples_path(global_step, args).exists():
        pipeline = make_pipeline(sampled, sampler, args)  # a kill came between the two
        log_held_out(global_step)
        log_validation(accelerator, pipeline, global_step, stop_signal, args)
        stop = stop_signal.agree()  # broken off, before a step leads past it

    unet.train()
    while global_step < args.max_train_steps and not stop:
        # An epoch's last step takes what is left. This follows from images_seen alone, so that a resumed run agrees.
        epoch, image = divmod(images_seen, num_images)
        step_images = min(images_per_step, num_images - image)
        micro_batches = math.ceil(step_images / images_per_micro_batch)
        sums = train_step(
            accelerator, ddp_unet, optimizer, noise_scheduler, batches, micro_batches, data_step, frozen, args
        )
        data_step, images_seen = data_step + 1, images_seen + step_images
        if stepped := not accelerator.optimizer_step_was_skipped:
            global_step += 1
            if args.use_ema:
                update_ema(models["unet_ema"], unet, global_step, args)
            records.add(sums, step_images, epoch, lr_scheduler.get_last_lr()[0])
            lr_scheduler.step()
        else:  # fp16 overflowed: the scaler lowers its scale, the weights are as before
            check_overflows(data_step - global_step, data_step)

        # What is due. A step that was skipped counts for epochs only, or what is due at a step would be due again.
        stop, last, new_step = stop_signal.agree(), global_step == args.max_train_steps, global_step * stepped
        log_due = is_due(new_step, args.logging_steps) or (stepped and last)
        checkpoint_due = stop or last or is_due(new_step, args.checkpointing_steps)
        samples_due = is_due(new_step, args.validation_steps, images_seen, args.validation_epochs * num_images)
        if log_due or checkpoint_due:  # the only place where the host waits for the device
            records.update(global_step, log_due, last)
        state = {"global_step": global_step, "data_step": data_step, "images_seen": images_seen, "settings": settings}
        with records.paused():
            if checkpoint_due:  # before the samples, which may take longer than a preempted job has left
                save_checkpoint(accelerator, models, optimizer, state, args)
            if samples_due and not last and not stop:
                log_held_out(global_step)
                log_validation(accelerator, make_pipeline(sampled, sampler, args), global_step, stop_signal, args)
                if (stop := stop_signal.agree()) and not checkpoint_due:  # broken off; who resumes here draws them
                    records.update(global_step, False, last)
                    save_checkpoint(accelerator, models, optimizer, state, args)

    loaded.close()  # and with it the thread and the loader's processes
    records.bar.close()
    if not stop:
        pipeline = make_pipeline(sampled, sampler, args)
        if accelerator.is_main_process:  # before the samples, again because of the time that they take
            save_pipeline(pipeline, args)
        log_held_out(global_step)
        log_validation(accelerator, pipeline, global_step, stop_signal, args)
        stop = stop_signal.agree()
    stop_signal.close()
    if stop:
        end_stopped(accelerator, stop, global_step, args)
    if accelerator.is_main_process:
        prune_checkpoints(Path(args.output_dir) / f"checkpoint-{global_step}", args)  # if a kill came before it
        save_model_card(global_step, args)
        save_report(global_step, args)
    samples = "samples/" if args.validation_prompts else "no samples (no --validation_prompts)"
    folders = ["unet/*", "vae/*", "text_encoder/*", "tokenizer/*", "scheduler/*"]
    end_run(accelerator, lock, f"Done: pipeline, {samples} and report.html are in {args.output_dir}", folders, args)


# --------------------------------------------------------------- shared by all scripts: flags, errors, images, batches


def number(low, high, kind=float, *words):
    """An argparse type: numbers of a kind from `low` to `high`, so never nan or inf, or one of `words`."""

    def parse(text):
        if text in words:
            return text
        if not low <= (value := kind(text)) <= high:
            raise argparse.ArgumentTypeError(f"{text} is not between {low:g} and {high:g}")
        return value

    parse.__name__, parse.bounds = kind.__name__, (low, high, kind)
    return parse


def parse_demo(parser, demo, argv):
    """The arguments of the demo, which every flag in `argv` wins over; prints the command that they stand for."""
    command = shlex.split(demo) + (sys.argv[1:] if argv is None else argv)
    if os.environ.get("RANK", "0") == "0":
        print("No data given: this is the demo, short for")
        print(f"accelerate launch {Path(__file__).name} {shlex.join(command)}")
    return parser.parse_args(command)


def format_args(args, leave_out=()):
    """The flags as a file that @FILE reads, a flag a line."""
    lines = [f"# accelerate launch {Path(__file__).name} @run.args"]
    for name, value in vars(args).items():
        if name in leave_out or value is None:
            continue
        if isinstance(value, bool):
            lines.append(f"--{name}" if value else f"--no-{name}")
        elif isinstance(value, list):
            lines.append(f"--{name} {shlex.join(map(str, value))}")
        else:
            lines.append(f"--{name}={shlex.quote(str(value))}")
    return "\n".join(lines) + "\n"


def fail(message, alone=False):
    """End the program with status 1 and one sentence.

    All processes come here for the same reason, so the first of each machine says it; `alone`: this one may be the
    only one to know.
    """
    if alone or os.environ.get("WORLD_SIZE", "1") == "1" or os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"\n{Path(__file__).name}: {message}", file=sys.stderr, flush=True)
    raise SystemExit(1)


def explain(error):
    """An error in one line: the cause where `datasets` or a loader's process wrapped it, and no buffers of Pillow."""
    if isinstance(error, datasets.exceptions.DatasetGenerationError) and error.__cause__:
        error = error.__cause__
    text = str(error).strip()
    text = text.splitlines()[-1] if "Original Traceback" in text else text
    text = " ".join(text.split(" <_io")[0].split()) or type(error).__name__
    return text if len(text) < 400 else f"{text[:400]} ..."


def stop(number, frame):
    """End at once on a signal: what is whole stays, and what is half-made is deleted now or at the next start."""
    if os.environ.get("WORLD_SIZE", "1") == "1" or os.environ.get("LOCAL_RANK", "0") == "0":
        name = signal.Signals(number).name
        print(f"\nStopped by {name}; what is saved is whole, and the same command goes on from here", flush=True)
    raise SystemExit(128 + number)


def foresee(error, args):
    """A sentence on an error that can happen to any run, None on one that is not foreseen."""
    text = explain(error)
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in text:
        less = "--train_batch_size (and more --gradient_accumulation_steps), --gradient_checkpointing or bf16"
        less = less if "train_batch_size" in args else "--batch_size"
        return f"there is not enough memory ({text[:200]}): try a smaller {less}"
    if isinstance(error, OSError | EOFError | tarfile.TarError):  # a full disk, a file that went away, a cut stream
        return f"{text}; what was saved before is whole"
    if "DataLoader worker (pid" in text:  # and not what was raised inside of one
        return "a process that loads data was killed: out of memory or /dev/shm? Try fewer --dataloader_num_workers"
    if "Too many open files" in text:
        return "there are too many open files: raise the limit (ulimit -n), or try fewer --dataloader_num_workers"
    if "class_labels should be provided" in text:
        return "the U-Net wants class labels, which this script does not give it: choose another config"
    if isinstance(error, RuntimeError) and "gloo" in text or isinstance(error, torch.distributed.DistError):
        return f"another process has ended, and says why ({text[:100]})"
    return None


def in_one_sentence(main):
    """Makes what can happen to any run end in a sentence, on whichever process; the unforeseen keeps its traceback."""

    @functools.wraps(main)
    def guarded(args):
        if isinstance(sys.stdout, io.TextIOWrapper):  # printing a name that is not ASCII must not end a run
            sys.stdout.reconfigure(errors="backslashreplace")
        handlers = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            main(args)
        except Exception as error:
            if sentence := foresee(error, args):
                fail(sentence, alone=True)
            raise
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

    return guarded


@contextlib.contextmanager
def explained(sentence):
    """Ends the program with `sentence` and, in parentheses, the reason if what is done inside fails."""
    try:
        yield
    except Exception as error:
        fail(f"{sentence} ({explain(error)})")


def load_rows(args, streaming=False, others=()):
    """Open the data set. Returns (its rows, with images left undecoded as {"bytes", "path"}; the column of images).

    `others`: further columns that are wanted. The rest, which may be images too, is not read for nothing.
    """
    source = args.dataset_name or args.train_data_dir
    extension = "." + getattr(args, "caption_extension", "txt").lstrip(".")
    captions = has_caption_files(source, extension)
    with explained(f"{source} can't be loaded as a data set"):
        with listed_once():
            builder = datasets.load_dataset_builder(
                "imagefolder" if captions else source,  # or it might be loaded as text, the lines of the captions
                args.dataset_config_name, data_dir=source if captions else None, cache_dir=args.cache_dir,
            )  # fmt: skip
        if not streaming:
            builder.download_and_prepare()
        rows = (builder.as_streaming_dataset if streaming else builder.as_dataset)(split=args.dataset_split)
    caption_column = getattr(args, "caption_column", None)
    if captions and caption_column in others and caption_column not in rows.features:
        rows = add_captions(rows, caption_column, extension)
    features = rows.features or {}
    columns = [name for name, feature in features.items() if isinstance(feature, datasets.Image)]
    column = args.image_column or ("image" if "image" in features or len(columns) != 1 else columns[0])
    if column not in features:
        fail(f"{source} has no column {column!r} but {', '.join(features)}: choose with --image_column")
    for name in others:
        if name not in features:
            fail(
                f"{source} has no column {name!r} but {', '.join(features)}: choose with --caption_column, or put "
                f"captions beside the images (photo{extension} for photo.jpg)"
            )
    with explained(f"column {column!r} of {source} can't be read as images"):
        for name in [column, *(name for name in others if name in columns)]:
            # Plain bytes and paths become images too; a cache that was made of them knows them by this fingerprint.
            same = {} if streaming or name in columns else {"new_fingerprint": rows._fingerprint}
            rows = rows.cast_column(name, datasets.Image(decode=False), **same)
    if os.path.isdir(source) and os.environ.get("RANK", "0") == "0":
        say_unused(source, builder, rows, column, args.dataset_split)
    if args.max_train_samples is not None and streaming:
        rows = rows.take(args.max_train_samples)  # the first: a shuffled stream would give others each epoch
    elif args.max_train_samples is not None:
        rows = rows.shuffle(seed=args.seed).take(min(args.max_train_samples, len(rows)))
    rows = rows.select_columns([column, *others])
    if not streaming and len(rows) == 0:
        fail(f"{source} holds no images in split {args.dataset_split!r}")
    return rows, column


@contextlib.contextmanager
def listed_once():
    """Lists a local folder once: `datasets` would do so for each of the 66 patterns that a split's files may match."""
    find = LocalFileSystem.find
    LocalFileSystem.find = functools.cache(find)
    try:
        yield
    finally:
        LocalFileSystem.find = find


def say_unused(folder, builder, rows, column, split):
    """Say which files of a folder are no part of the data set: `datasets` leaves them out without a word."""
    used, images = [], getattr(builder, "EXTENSIONS", ())  # only a builder of image folders has some
    images = () if isinstance(rows, datasets.IterableDataset) else images  # a stream does not know its rows
    for name, paths in (builder.config.data_files or {}).items():
        used += [path for path in paths if name != split or Path(path).suffix.lower() not in images]
    if images:  # those that metadata name, or all
        used += pc.struct_field(rows.data[column], "path").to_pylist()
    real = functools.cache(os.path.realpath)
    used = {os.path.join(real(os.path.dirname(path)), os.path.basename(path)) for path in used}
    found = [os.path.join(place, name) for place, _, names in os.walk(real(folder)) for name in names]
    meant = ("/.", "/__download__/")  # hidden files, and what download_images.py keeps for itself
    found = [path for path in found if not any(part in path.removeprefix(real(folder)) for part in meant)]
    unused = sorted(path for path in found if path not in used)
    if unused:
        kinds = collections.Counter(Path(path).suffix.lower() or "no suffix" for path in unused).most_common(5)
        kinds = ", ".join(f"{count} {kind}" for kind, count in kinds)
        named = os.path.relpath(unused[0], real(folder))
        print(printable(f"{folder}: {len(unused)} of {len(found)} files are not used ({kinds}), such as {named}"))


def has_caption_files(folder, extension):
    """Whether an image in a local folder has a caption file beside it: photo.txt for photo.jpg."""
    paths = list(Path(folder).rglob("*")) if os.path.isdir(folder) else []
    named = {path.with_suffix("") for path in paths if path.suffix == extension}
    images = Image.registered_extensions()
    return any(path.suffix.lower() in images and path.with_suffix("") in named for path in paths)


def add_captions(rows, column, extension):
    """Add the captions that lie beside a folder's images, None where there is none; they enter the fingerprint."""

    def read(path):
        path = Path(path).with_suffix(extension)
        with contextlib.suppress(OSError, UnicodeDecodeError):
            return path.read_text(encoding="utf-8-sig").strip() if path.is_file() else None  # a pipe has no end

    images = rows.cast_column("image", datasets.Image(decode=False))["image"][:]
    captions = [read(image["path"]) for image in images]
    fingerprint = hashlib.sha256(json.dumps([rows._fingerprint, captions]).encode()).hexdigest()[:16]
    return rows.add_column(column, captions, new_fingerprint=fingerprint)


def check_output_dir(args):
    """Refuse an --output_dir that is no folder of its own: what is written must never become what is read."""
    if "://" in args.output_dir or "\0" in args.output_dir:
        fail(f"--output_dir {args.output_dir!r} is no path on a disk: write to one, and copy what comes out")
    written = Path(args.output_dir).resolve()
    for name, value in vars(args).items():
        values = [x for x in (value if isinstance(value, list) else [value]) if isinstance(x, str)]
        if any("\ud800" <= character <= "\udfff" for character in "".join(values)):
            fail(f"--{name} {value!a} can't be read as text: rename it, or write it in UTF-8")
        if name in ("latents_dir", "train_data_dir", "dataset_name") or name.endswith("name_or_path"):
            for source in filter(os.path.isdir, values):
                if written.is_relative_to(Path(source).resolve()):
                    fail(f"--output_dir {args.output_dir} lies in --{name} {source}: choose another folder")


def delete(path):
    """Delete a file, a folder or a link, if there is one; never what a link leads to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def load_weights(kind, source, **options):
    """`kind.from_pretrained`, but all weights must be there: others would be random, or not there at all."""
    model, info = kind.from_pretrained(source, output_loading_info=True, **options)
    for what in ("missing_keys", "mismatched_keys"):
        if info[what]:
            raise ValueError(f"{len(info[what])} {what.replace('_', ' ')}, such as {sorted(map(str, info[what]))[0]}")
    return model


def read_items(rows, keys):
    """The rows that keys (epoch, row, ...) name, as dicts. At once: single rows cost more than a small image."""
    if len(keys[0]) == 4:  # streamed: the key has it with it
        return [item for _, _, _, item in keys]
    columns = rows[[key[1] for key in keys]]
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def decode_image(source, channels, keep_precision=False, min_size=0):
    """Decode an image to a tensor [channels, height, width]: uint8, or float32 in [0, 1] with `keep_precision`.

    `source` is the {"bytes", "path"} of an undecoded `datasets.Image`; a "size" beside them says that the bytes are
    those of such a tensor. `channels` is 1 or 3.
    EXIF rotation is applied, transparency laid onto white, of an animation the first frame taken, 16 bits scaled to 8.
    Raises ValueError for less than `min_size` pixels on a side, and what Pillow raises for what it can't read whole.
    """
    if source is None or source["bytes"] is source["path"] is None:
        raise ValueError("there is no image")
    data = source["bytes"]
    if "size" in source:
        return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(source["size"])
    if data is None:
        if os.path.exists(source["path"]) and not os.path.isfile(source["path"]):
            raise ValueError("it is no file")  # but a pipe or a device, which might never end
        with fsspec.open(source["path"]) as file:
            data = file.read(2**30 + 1)
    if len(data) > 2**30:
        raise ValueError("it has more than 1 GiB")
    Image.init()  # knows all formats from here on; not all are meant: Pillow hands EPS to a program that executes it
    formats = "JPEG PNG WEBP AVIF BMP GIF JPEG2000 PPM QOI TIFF TGA".split()  # as they are tried; TGA has no mark
    formats = [name for name in formats if name in Image.OPEN]
    image = Image.open(io.BytesIO(data), formats=formats)  # reads the header, and refuses decompression bombs
    if min(image.size) < min_size:
        raise ValueError(f"{image.width} x {image.height} pixels are less than --min_size {min_size}")
    if decode_jpeg and image.format in ("JPEG", "MPO") and image.mode in ("L", "RGB") and not keep_precision:
        if image.getexif().get(0x0112, 1) == 1:  # Pillow alone decides what is turned, and turns it below
            with contextlib.suppress(RuntimeError):  # some of what torchcodec can't read Pillow can, and names faults
                if "exif" in image.info:
                    data = data.replace(b"Exif\0\0", b"exif\0\0", 1)
                return decode_jpeg(data, mode="GRAY" if channels == 1 else "RGB")
    ImageOps.exif_transpose(image, in_place=True)
    if image.mode.startswith("I") or image.mode == "F":  # deep grey; Pillow's own conversion would clip it at 255
        values = np.asarray(image, dtype=np.float32) / (1.0 if image.mode == "F" else 65535.0)
        if not (values.min() >= 0 and values.max() <= 1):  # nor nan
            raise ValueError(f"its values are not from 0 to {'1' if image.mode == 'F' else '65535'}")
        pixels = torch.from_numpy(values).expand(channels, -1, -1)
        return pixels.contiguous() if keep_precision else (pixels * 255).round().byte()
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    mode = "L" if channels == 1 else "RGB"
    image = image if image.mode == mode else image.convert(mode)  # it would copy
    pixels = torch.from_numpy(np.array(image).reshape(image.height, image.width, channels)).permute(2, 0, 1)
    return pixels.float() / 255 if keep_precision else pixels


def is_outage(error):
    """Whether an image can't be read because of the disk or the network, and not because it is gone or forbidden."""
    if not isinstance(error, OSError) or error.errno is None or isinstance(error, PermissionError):
        return False
    return not (isinstance(error, FileNotFoundError) and os.path.isdir(os.path.dirname(str(error.filename))))


def shrink(image, resolution, place=None, interpolation="bicubic"):
    """Crop [C, H, W] to the largest square and resize it to `resolution` pixels: antialiased, in its own dtype.

    `place` is (y, x) of the crop in [0, 1], (0.5, 0.5) the centre. None crops no more than strips, to 4 : 1, and makes
    the short side `resolution`. Cropped first, because a long strip that is resized whole may not fit into memory.
    """
    height, width = image.shape[-2:]
    side = min(height, width)
    if place is None:
        image = TF.center_crop(image, [min(height, 4 * side), min(width, 4 * side)])
    else:
        image = TF.crop(image, round((height - side) * place[0]), round((width - side) * place[1]), side, side)
    image = TF.resize(image, [resolution], interpolation=TF.InterpolationMode(interpolation), antialias=True)
    return image.clamp(0, 1) if image.is_floating_point() else image


def name_image(row, source):
    """What the reader knows an image by."""
    return printable((source and source["path"]) or f"row {row}")


def printable(text):
    """Text from the data as it may be printed: a terminal must not be commanded by a file's name."""
    return "".join(character if character.isprintable() else "?" for character in text)


def step_seed(*key):
    """A 64-bit seed from integers, such as (seed, step, micro-batch, process)."""
    return int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0])


def draw_choices(seed, epoch, row):
    """Four numbers in [0, 1) for a row in an epoch: place of the crop (y, x), mirroring, caption.

    Keyed by what they are for, not drawn from a worker's generator: a resumed run draws as the first one did. Epoch
    None, for a row that is held out: the centre, not mirrored, the caption of epoch 0, which is the one of a cache.
    """
    choices = np.random.default_rng([seed, epoch or 0, row]).random(4)
    return choices if epoch is not None else np.array([0.5, 0.5, 1.0, choices[3]])


def ignore_signals(worker_id):
    """Loader processes outlive Ctrl-C and SIGTERM: the trainer still needs data to finish its step."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    # One that can't hand a batch over, for want of shared memory, would go on without a word, and be waited for.
    multiprocessing.queues.Queue._on_queue_feeder_error = staticmethod(lambda error, batch: os._exit(1))


def end_workers():
    """End what is left of the loader's processes, which ignore the signal that Python's own exit would send them."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch would take their end for a fault
    if processes := multiprocessing.active_children():
        time.sleep(0.2)  # what is on its way to them arrives, or the thread that sends it would complain
        for process in processes:
            process.kill()


def load_batches(dataset, keys, num_workers, device):
    """Yield `dataset[key]` for each of `keys`, two ahead, with the tensors on their way to the device.

    A thread reads ahead, so that also a data set without processes of its own is read while the device computes. Each
    batch has "waited": two marks, before and after the wait for it, of which `seconds_between` makes seconds.
    """
    loader = torch.utils.data.DataLoader(
        dataset, batch_size=None, sampler=keys, num_workers=num_workers, worker_init_fn=ignore_signals,
        pin_memory=device.type == "cuda",
    )  # fmt: skip
    try:
        batches = iter(loader)  # starts the processes here: forking beside a busy thread can deadlock
    finally:
        atexit.register(end_workers)  # after they are there, so that it comes before other ways to wait for them

    def load():
        # On the stream that computes: the copy is queued there, and nobody waits for it.
        batch = next(batches, None)
        return batch and {k: v.to(device, non_blocking=True) if torch.is_tensor(v) else v for k, v in batch.items()}

    with ThreadPoolExecutor(1) as thread:
        ahead = [thread.submit(load) for _ in range(2)]
        try:
            while True:
                begin = mark_time(device)
                batch = ahead.pop(0).result()
                if batch is None:
                    return
                ahead.append(thread.submit(load))
                yield {**batch, "waited": (begin, mark_time(device))}
        finally:
            thread.shutdown(wait=False, cancel_futures=True)


def mark_time(device):
    """This moment of a device: on CUDA when it has done all that was queued before, else now."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(begin, end):
    """The time between two marks; those of a CUDA device must have happened."""
    return end - begin if isinstance(begin, float) else begin.elapsed_time(end) / 1000


# ----------------------------------------------------------- shared by the scripts of latents: models and their hashes


def tokenize(tokenizer, texts):
    """Captions -> tokens [N, model_max_length], filled up or cut off."""
    return tokenizer(texts, padding="max_length", truncation=True, return_tensors="pt").input_ids


def look_at_captions(rows, args):
    """Captions of up to 10,000 rows, evenly spread."""
    captions = rows.select_columns(args.caption_column)[:: max(1, len(rows) // 10**4)][args.caption_column]
    texts = [text[0] if isinstance(text, list) and text else text for text in captions]
    return [text for text in texts if isinstance(text, str)]


def say_equal(texts):
    """Say it if captions are all the same: as a rule that is a wrong column."""
    if len(texts) > 1 and len(set(texts)) == 1:
        print(f"All captions that were looked at say {printable(texts[0][:60])!r}: is it the right --caption_column?")


def say_cut(count, total, limit, where=""):
    """Say how many captions lose their end."""
    if count:
        print(f"{where}{count:,} of {total:,} captions have more than {limit} tokens, and lose what is beyond")


def are_cut(tokenizer, texts):
    """For each caption whether it has more tokens than the text encoder takes, and so loses its end."""
    return [bool(encoding.overflowing) for encoding in tokenizer(texts, truncation=True).encodings]


def fingerprint(cache):
    """What `datasets` knows a cache by: a hash of cache.json, which tells also whether it is as it was written."""
    return hashlib.sha256(json.dumps(cache).encode()).hexdigest()[:16]


def checksum(row):
    """xxh3 of the numbers in a row of a cache: {column: float16 [numbers per row]}, in the order of the names."""
    digest = xxhash.xxh3_64()
    for name in sorted(row):
        digest.update(row[name])
    return digest.intdigest()


def locate_model(args, own_path, subfolder):
    """Where a model is: (hub id or folder, options). One with a flag of its own is no part of a pipeline."""
    if own_path is not None:
        return own_path, {"cache_dir": args.cache_dir}
    options = {"cache_dir": args.cache_dir, "subfolder": subfolder, "revision": args.revision, "variant": args.variant}
    return args.pretrained_model_name_or_path, options


def vae_scale_factor(vae):
    """How many times smaller than the image the latents are in height and in width."""
    return 2 ** (len(vae.config.get("block_out_channels") or vae.config.encoder_block_out_channels) - 1)


def load_models(args, dtype):
    """The VAE, the text encoder and the tokenizer, on the CPU."""
    try:
        source, options = locate_model(args, args.vae_name_or_path, "vae")
        kind = AutoencoderKL.load_config(source, **options)["_class_name"]
        if kind not in ("AutoencoderKL", "AutoencoderTiny"):
            raise ValueError(f"it is an {kind}, no AutoencoderKL or AutoencoderTiny")
        vae_class = AutoencoderTiny if kind == "AutoencoderTiny" else AutoencoderKL
        vae = load_weights(vae_class, source, **options, torch_dtype=dtype)
        factor = vae.config.scaling_factor
        if not (isinstance(factor, float | int) and 0 < factor < math.inf):
            raise ValueError(f"its scaling_factor is {factor!r}")
        for name in ("shift_factor", "latents_mean", "latents_std"):
            if vae.config.get(name):
                raise ValueError(f"it has a {name}, which a StableDiffusionPipeline would leave out")
        source, options = locate_model(args, args.text_encoder_name_or_path, "text_encoder")
        text_encoder = load_weights(CLIPTextModel, source, **options, torch_dtype=dtype)
        own_path = args.tokenizer_name_or_path or args.text_encoder_name_or_path
        source, options = locate_model(args, own_path, "tokenizer")
        options.pop("variant", None)
        tokenizer = CLIPTokenizer.from_pretrained(source, **options)
        if len(tokenizer) < 256:  # where there are no files, transformers makes one that knows two tokens
            raise ValueError("no vocabulary")
        if len(tokenizer) > text_encoder.config.vocab_size or tokenizer.pad_token is None:
            raise ValueError("it has other tokens than the text encoder, or none to fill up with")
        limit = min(tokenizer.model_max_length, text_encoder.config.max_position_embeddings)
        if limit < 3:  # a word, and what stands before and after it
            raise ValueError(f"it takes {limit} tokens")
        tokenizer.model_max_length = limit  # old tokenizers do not know how many the text encoder takes
    except Exception as error:
        fail(
            f"{source} does not hold the {options.get('subfolder', 'model')} of a Stable Diffusion pipeline "
            f"({explain(error)})"
        )
    if args.resolution is not None and args.resolution % vae_scale_factor(vae):
        fail(f"--resolution {args.resolution} is not a multiple of {vae_scale_factor(vae)}, which this VAE needs")
    return vae.eval(), text_encoder.eval(), tokenizer


def encode_images(vae, pixel_values):
    """Images uint8 [N, C, H, W] -> mean and std of their latents, float32 [N, 2 * latent_channels, h, w], unscaled.

    Of an AutoencoderTiny, which has no std, the latents themselves: [N, latent_channels, h, w].
    """
    images = (pixel_values / 127.5 - 1).to(vae.dtype)
    if isinstance(vae, AutoencoderTiny):
        return vae.encode(images).latents.float()
    posterior = vae.encode(images).latent_dist
    return torch.cat([posterior.mean.float(), (0.5 * posterior.logvar.float()).exp()], dim=1)


def encode_prompts(text_encoder, input_ids):
    """Tokens [N, model_max_length] -> the text encoder's last hidden state, float32 [N, model_max_length, D]."""
    return text_encoder(input_ids)[0].float()


def try_models(vae, text_encoder):
    """Encode a small image and two tokens, or end the program: a config may say what can't be computed."""
    with torch.no_grad():
        with explained("the VAE does not work"):
            side = 2 * vae_scale_factor(vae)
            latents = encode_images(vae, torch.zeros(1, vae.config.in_channels, side, side, device=vae.device))
            vae.decode(latents[:, : vae.config.latent_channels].to(vae.dtype))
        with explained("the text encoder does not work"):
            encode_prompts(text_encoder, torch.zeros(1, 2, dtype=torch.long, device=text_encoder.device))


def hash_weights(model):
    """SHA-256 of a model's weights: of their values and shapes, whatever the files and the library call them."""

    def hash_weight(weight):
        digest = hashlib.sha256(str(tuple(weight.shape)).encode())
        digest.update(weight.detach().float().cpu().contiguous().numpy())
        return digest.hexdigest()

    with ThreadPoolExecutor() as pool:  # gigabytes, and all processes wait; hashing lets other threads run
        digests = pool.map(hash_weight, model.parameters())
    return hashlib.sha256("".join(sorted(digests)).encode()).hexdigest()


def describe_models(vae, text_encoder, tokenizer):
    """What has to be the same in the models of two caches, or of a cache and a trainer, for them to fit."""
    probe = tokenizer("The quick brown fox, 123 times!", truncation=True).input_ids
    vocabulary = json.dumps([sorted(tokenizer.get_vocab().items()), probe])
    return {
        "vae": {
            "class": type(vae).__name__,
            "sha256": hash_weights(vae),
            "scaling_factor": vae.config.scaling_factor,
            "shift_factor": vae.config.shift_factor or 0.0,
        },
        "text_encoder": {"class": type(text_encoder).__name__, "sha256": hash_weights(text_encoder)},
        "tokenizer": {
            "sha256": hashlib.sha256(vocabulary.encode()).hexdigest(),
            "model_max_length": tokenizer.model_max_length,
        },
    }


def find_differences(before, now, prefix=""):
    """What differs between two nested dicts, as ["vae.scaling_factor 0.18215 -> 0.13025"]."""
    found = []
    for key in {**before, **now}:
        old, new = before.get(key), now.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            found += find_differences(old, new, f"{prefix}{key}.")
        elif old != new:
            found.append(f"{prefix}{key} {old} -> {new}")
    return found


def make_accelerator(args, timeout=timedelta(hours=2), **options):
    """The Accelerator; what `accelerate config` and its launcher say goes into `args`, or is refused in a sentence.

    Returns (accelerator, number of cores for each process of this machine). `timeout`: how long processes wait for
    each other; some wait while the first downloads or checks a model.
    """
    for engine in ("FSDP", "DEEPSPEED", "MEGATRON_LM", "PARALLELISM_CONFIG"):  # on a CPU Accelerate would drop them
        if os.environ.get(f"ACCELERATE_USE_{engine}", "false").lower() not in ("false", "0", "no"):
            fail(f"{engine} is not supported: launch on one device, or on several with DDP (--multi_gpu)")
    args.mixed_precision = args.mixed_precision or os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if args.mixed_precision not in ("no", "fp16", "bf16"):
        fail(f"mixed precision {args.mixed_precision} is not supported: choose no, fp16 or bf16")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    with explained("the processes can't be set up as they were launched"):
        cores = max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
        num_launched = int(os.environ.get("WORLD_SIZE", 1))
        dynamo = TorchDynamoPlugin()  # what the launcher says; `compile_model` does it, for the weights' names
        options["kwargs_handlers"] = [InitProcessGroupKwargs(timeout=timeout)]
        accelerator = Accelerator(mixed_precision=args.mixed_precision, dynamo_backend="no", **options)
        torch.ones(1, device=accelerator.device)  # which may be busy, not there, or too old for this torch
    device, num_processes = accelerator.device, accelerator.num_processes
    if num_processes == 1 and {"ACCELERATE_MIXED_PRECISION", "MASTER_ADDR"} <= os.environ.keys():
        num_launched = max(
            2, num_launched
        )  # what the launcher leaves of several processes on CPUs: one, and an address
    if num_launched != num_processes:
        fail(
            f"{num_launched} processes were launched but each sees {num_processes}: on CPUs set "
            "ACCELERATE_USE_CPU=true and launch with --multi_gpu, on GPUs give each process its own"
        )
    if not accelerator.distributed_type.value.startswith(("NO", "MULTI_")):  # MULTI_...: DDP, whatever the device
        fail(f"{accelerator.distributed_type.value} is not supported: launch on one device, or on several with DDP")
    if args.mixed_precision == "fp16" and device.type == "cpu":
        fail("fp16 does nothing on a CPU, or is very slow: use --mixed_precision bf16 or no")
    if args.compile is None and dynamo.backend != DynamoBackend.NO:
        args.compile = dynamo.backend.value.lower()
    # The trainers accumulate by themselves: with a number of its own, Accelerate would divide the gradients once more.
    steps, accelerator.gradient_accumulation_steps = accelerator.gradient_accumulation_steps, 1
    if steps < 1:
        fail(f"the launch says {steps} gradient accumulation steps: there must be one at least")
    if steps != 1 and "gradient_accumulation_steps" in args:
        if args.gradient_accumulation_steps not in (1, steps):
            fail(f"--gradient_accumulation_steps {args.gradient_accumulation_steps}, but the launch says {steps}")
        args.gradient_accumulation_steps = steps
    if device.type == "cpu":
        keep_memory()
        if threads_are_default():
            torch.set_num_threads(cores)
    threads = f", {torch.get_num_threads()} threads each" if device.type == "cpu" else ""
    accelerator.print(f"Processes: {num_processes} on {device.type}{threads}; mixed precision: {args.mixed_precision}")
    return accelerator, cores


def threads_are_default():
    """Whether one thread is the launcher's own idea, said neither in its environment nor in its command line."""
    if "ACCELERATE_MIXED_PRECISION" not in os.environ or os.environ.get("OMP_NUM_THREADS") != "1":
        return False
    try:
        launcher = Path(f"/proc/{os.getppid()}")
        words = (launcher / "environ").read_bytes() + (launcher / "cmdline").read_bytes().replace(b"-", b"_")
        return b"OMP_NUM_THREADS=" not in words and b"num_cpu_threads" not in words
    except OSError:  # no Linux, or no right to look
        return True


def keep_memory():
    """Let glibc keep memory that is freed: activations come and go in every step, and to ask the system for new pages
    each time takes up to half of it (mallopt(3))."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        for parameter in (-1, -3):  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD, in bytes
            libc.mallopt(parameter, 2**30)


def put_on_device(model, device):
    """Move a model; on CUDA its convolutions get the memory layout that they are fastest in."""
    return model.to(device, memory_format=torch.channels_last if device.type == "cuda" else torch.preserve_format)


def compile_model(model, backend):
    """torch.compile in place, which keeps the names of the weights, with the options that `accelerate config` set."""
    options, dynamo = {}, TorchDynamoPlugin()
    if dynamo.backend != DynamoBackend.NO:  # else the launcher's dynamic=False is nobody's wish
        options = {"mode": dynamo.mode, "fullgraph": dynamo.fullgraph, "dynamic": dynamo.dynamic}
    with explained(f"torch.compile with {backend} is not possible"):
        if options and dynamo.use_regional_compilation:
            model.compile_repeated_blocks(backend=backend, **options)
        else:
            model.compile(backend=backend, **options)


# ------------------------------------------------------------------------------------ shared by the trainers: steps


def train_step(accelerator, unet, optimizer, noise_scheduler, batches, micro_batches, data_step, frozen, args):
    """One optimizer step on the next `micro_batches` of `batches`.

    Returns [sum of weight * loss, sum of weight, norm of the gradient, what `measure_images` says] on the device, of
    this process; after it, accelerator.optimizer_step_was_skipped tells of an fp16 overflow. Nothing here waits for
    the device.
    """
    sums = torch.zeros(6, device=accelerator.device)
    for micro_batch in range(micro_batches):
        batch = next(batches)
        # What is drawn depends on the step alone, not on what was drawn before: a resumed run draws the same.
        torch.manual_seed(step_seed(args.seed, data_step, micro_batch, accelerator.process_index))
        images, condition = prepare_batch(batch, frozen, args)
        # The processes' gradients are averaged once a step, in its last backward.
        last = micro_batch == micro_batches - 1
        with contextlib.nullcontext() if last else accelerator.no_sync(unet):
            loss = compute_loss(unet, noise_scheduler, images, batch["weight"], args, **condition)
            accelerator.backward(loss)
        weight_sum = batch["weight"].sum()
        sums += torch.cat([torch.stack([loss.detach(), weight_sum]), measure_images(images, batch["weight"])])
    grad_norm = accelerator.clip_grad_norm_(unet.parameters(), args.max_grad_norm or math.inf)
    optimizer.step()
    optimizer.zero_grad()  # to None: the memory is free for the next forward pass
    return torch.cat([sums[:2], grad_norm[None], sums[2:]])  # one tensor, read later: an .item() here would wait


def measure_images(images, weight):
    """Sums over images [N, C, H, W] of weight [N] times: lowest and highest value, mean square, 1 if of one colour."""
    values = images.flatten(1)
    low, high = values.aminmax(dim=1)
    return weight @ torch.stack([low, high, values.square().mean(dim=1), (low == high).float()], dim=1)


def update_ema(ema_unet, unet, step, args):
    """Move the averaged weights towards the trained ones after optimizer step `step`, counted from 1.

    The decay warms up as in diffusers' EMAModel (after @crowsonkb); the first step copies.
    """
    decay = min(args.ema_max_decay, 1 - (1 + (step - 1) / args.ema_inv_gamma) ** -args.ema_power)
    get_ema_multi_avg_fn(decay)(list(ema_unet.parameters()), list(unet.parameters()), None)


def check_training_args(parser, args):
    """What both trainers refuse in their arguments, besides numbers out of their bounds."""
    if args.lr_scheduler == "piecewise_constant":
        try:  # as diffusers reads them
            *rules, last = (args.lr_step_rules or "").split(",")
            rules = [(float(value), int(step)) for value, step in (rule.split(":") for rule in rules)]
            if not all(map(math.isfinite, [float(last), *(value for value, _ in rules)])):
                raise ValueError
        except ValueError:
            parser.error("--lr_scheduler piecewise_constant needs --lr_step_rules like 1:1000,0.1:2000,0.01")
    if args.lr_scheduler == "polynomial" and args.learning_rate <= 1e-7:
        parser.error("--lr_scheduler polynomial ends at a rate of 1e-7: --learning_rate must be larger")
    if args.find_lr_min >= args.find_lr_max:
        parser.error(f"--find_lr_min {args.find_lr_min} is not below --find_lr_max {args.find_lr_max}")
    args.push_to_hub &= not args.find_lr  # there is nothing to upload
    without_effect = {
        "lr_warmup_steps": args.lr_scheduler in ("constant", "piecewise_constant"),
        "lr_num_cycles": args.lr_scheduler != "cosine_with_restarts",
        "lr_power": args.lr_scheduler != "polynomial",
        "lr_step_rules": args.lr_scheduler != "piecewise_constant",
        "base_batch_size": not args.scale_lr,
        **dict.fromkeys(["find_lr_min", "find_lr_max", "find_lr_steps"], not args.find_lr),
        **dict.fromkeys(["ema_inv_gamma", "ema_power", "ema_max_decay"], not args.use_ema),
        **dict.fromkeys(["hub_model_id", "hub_private_repo"], not args.push_to_hub),
    }
    for name, ignored in without_effect.items():
        value = getattr(args, name)
        if ignored and value and value != parser.get_default(name) and os.environ.get("RANK", "0") == "0":
            print(f"--{name} {value} has no effect: the other flags leave no use for it", file=sys.stderr)
    for tracker in {*LOGGER_TYPE_TO_CLASS} & {args.report_to}:
        if importlib.util.find_spec(tracker) is None:
            parser.error(f"--report_to {tracker}: `pip install {tracker}` first, or pass --report_to none")


def choose_batch_size(accelerator, unet, noise_scheduler, dataset, rows, frozen, before, args):
    """Put numbers for --train_batch_size auto and --total_batch_size into `args`, the same on all processes.

    auto is what `largest_batch` finds, or what it found for the checkpoint whose settings are `before`.
    """
    total, num_processes, auto = args.total_batch_size, accelerator.num_processes, args.train_batch_size == "auto"
    if not total and not auto:
        return
    each, rest = divmod(total or max(num_processes, len(rows)), num_processes)
    if auto:
        batch, size = dataset[[(0, int(rows[0]), 1.0)]], before.get("train_batch_size")
        size = size or largest_batch(accelerator, unet, noise_scheduler, batch, frozen, each, args)
        args.train_batch_size = next(n for n in range(size, 0, -1) if not total or each % n == 0)
    if total and (rest or each % args.train_batch_size or args.gradient_accumulation_steps != 1):
        fail(
            f"--total_batch_size {total} is no multiple of --train_batch_size {args.train_batch_size} "
            f"x {num_processes} processes, or --gradient_accumulation_steps is given, which it chooses itself"
        )
    args.gradient_accumulation_steps = each // args.train_batch_size if total else args.gradient_accumulation_steps
    steps = args.gradient_accumulation_steps
    accelerator.print(f"Batch size: {args.train_batch_size} x {steps} accumulated x {num_processes} processes")


def largest_batch(accelerator, unet, noise_scheduler, batch, frozen, most, args):
    """How many images like the one in `batch`, up to `most`, can be a micro-batch on the devices of all processes.

    Doubled until the memory is full, then bisected. A trial is two steps of a copy, with optimizer, averaged weights
    and what DDP takes for gradients; a tenth of a GPU stays free. A CPU never says that it is full: 64 is the end.
    """

    def fits(size):
        full, device = False, accelerator.device
        try:
            model = put_on_device(copy.deepcopy(unet), device).train()
            if args.gradient_checkpointing:
                model.enable_gradient_checkpointing()
            others = [copy.deepcopy(model) for wanted in (args.use_ema, accelerator.num_processes > 1) if wanted]
            optimizer = accelerator.prepare(torch.optim.AdamW(model.parameters(), fused=accelerator.scaler is None))
            # Without DDP: a process whose memory is full would leave the others waiting.
            model = accelerator.prepare_model(model, evaluation_mode=True)
            many = {k: v.repeat_interleave(size, 0).to(device) for k, v in batch.items() if torch.is_tensor(v)}
            for step in range(2):
                train_step(accelerator, model, optimizer, noise_scheduler, iter([many]), 1, step, frozen, args)
        except RuntimeError as error:
            if not (full := should_reduce_batch_size(error)):
                raise
        model = others = optimizer = many = None  # noqa: F841
        accelerator.free_memory()
        return not any(gather_object([full]))

    scaler = accelerator.scaler and accelerator.scaler.state_dict()
    if cuda := accelerator.device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(0.9)
    most = min(most, 64) if accelerator.device.type == "cpu" else most
    gc.freeze()  # so that collecting what a trial leaves behind does not look through all else
    low, high = 0, most + 1  # so many fit, so many do not
    while high - low > 1:
        size = min(2 * low or 1, most) if high > most else (low + high) // 2
        low, high = (size, high) if fits(size) else (low, size)
    gc.unfreeze()
    if cuda:
        torch.cuda.set_per_process_memory_fraction(1.0)
    if scaler:  # the trials have moved its scale
        accelerator.scaler.load_state_dict(scaler)
    if low == 0:
        fail("not even one image fits: try --gradient_checkpointing, --mixed_precision bf16 or a smaller model")
    return low


def scale_learning_rate(accelerator, images_per_step, args):
    """Multiply --learning_rate, which is given for --base_batch_size, as --scale_lr says, and print the result.

    linear is what keeps SGD alike (arXiv:1706.02677), sqrt Adam (arXiv:2205.10287); auto is linear up to 512 images.
    """
    if not args.scale_lr:
        return
    rules = {"linear": lambda images: images, "sqrt": math.sqrt, "auto": lambda n: min(n, math.sqrt(512 * n))}
    factor = rules[args.scale_lr](images_per_step) / rules[args.scale_lr](args.base_batch_size)
    given, scaled = (
        np.format_float_scientific(rate, precision=4, trim="-", exp_digits=1)
        for rate in (args.learning_rate, args.learning_rate * factor)
    )
    args.learning_rate *= factor
    accelerator.print(
        f"Learning rate ({args.scale_lr}, {images_per_step} images a step): {given} x {factor:g} = {scaled}"
    )


def hold_out(accelerator, dataset, args):
    """Split a data set: (numbers of the rows to train on, {number: hash} of those for the held-out loss).

    A row's hash, of --seed and its name, alone decides, so that images that come or go move no others: it lies below
    the share --holdout, or is one of so many lowest.
    """
    if not args.holdout:
        return np.arange(len(dataset)), {}
    hashes = (xxhash.xxh3_64_intdigest(f"{args.seed} {name}".encode()) for name in dataset.names())
    hashes = np.fromiter(hashes, np.uint64, len(dataset))
    count = int(args.holdout if args.holdout >= 1 else (hashes < args.holdout * 2.0**64).sum())
    if not 0 < count < len(hashes):
        fail(f"--holdout {args.holdout:g} sets {count} of {len(hashes)} images aside: choose another share or number")
    order = hashes.argsort(kind="stable")
    accelerator.print(f"Held out: {count} of {len(hashes)} images")
    return np.sort(order[count:]), {int(row): int(hashes[row]) for row in order[:count]}


def name_rows(rows, column, args):
    """What each row is known by, as in a cache: its file in the folder, or its number. Reads no image."""
    paths = pc.struct_field(rows.data[column], "path").to_pylist()
    if rows._indices is not None:  # --max_train_samples has drawn them
        paths = [paths[i] for i in rows._indices.column(0).to_pylist()]
    names = [name_image(row, {"path": path}) for row, path in enumerate(paths)]
    folder = args.train_data_dir or args.dataset_name
    return [os.path.relpath(name, folder) if os.path.isabs(name) else name for name in names]


def step_batches(rows, args, rank, num_processes, images_seen):
    """Yield without end one process's micro-batches of keys (epoch, row, weight), from the image `images_seen` on.

    `rows` are numbers, or a function of the epoch that gives always as many. (seed, epoch) alone fixes their order, so
    a run can go on at any image, also with another batch size or number of processes. A step takes the next images of
    that order; the last one of an epoch takes what is left, so every number comes exactly once an epoch: none is
    dropped or repeated. The weights make the sum of loss * weight over a step's micro-batches, averaged over the
    processes as DDP does, the mean over the step's images. A process with no image left gets one of weight 0, because
    DDP needs all to take part.
    """
    per_micro = args.train_batch_size * num_processes
    per_step = per_micro * args.gradient_accumulation_steps
    rows_of = rows if callable(rows) else lambda epoch: rows
    num_images = len(rows_of(0))
    first_epoch, first_image = divmod(images_seen, num_images)
    for epoch in itertools.count(first_epoch):
        order = np.random.default_rng([args.seed, epoch]).permutation(rows_of(epoch))
        for step_start in range(first_image, num_images, per_step):
            step = order[step_start : step_start + per_step].tolist()
            for start in range(0, len(step), per_micro):
                mine = step[start : start + per_micro][rank::num_processes]  # in turns, so that all have about as many
                yield [(epoch, row, num_processes / len(step)) for row in mine] or [(epoch, step[0], 0.0)]
        first_image = 0  # the next epoch is whole


@torch.no_grad()
def log_held_out_loss(
    accelerator, records, dataset, held_out, models, noise_scheduler, frozen, stop_signal, args, step
):
    """Record the held-out loss at a step: the mean squared error of epsilon, whatever the objective and its weights.

    It is the mean over the images that `hold_out` chose and over nine timesteps, .1 to .9 of all: at random ones it
    would drown in their differences. All that is drawn is keyed by --seed, image and timestep, and a batch is an image
    at its nine, so that runs can be compared, whatever their batch size, processes and kills. A signal breaks off.
    """
    if not held_out or records.held_out.get("step") == step:
        return
    device, training = accelerator.device, models["unet"].training
    models["unet"].eval()  # without dropout
    args = argparse.Namespace(**{**vars(args), "caption_dropout": 0.0})
    timesteps = torch.arange(1, 10, device=device) * noise_scheduler.config.num_train_timesteps // 10
    rows = sorted(held_out)[accelerator.process_index :: accelerator.num_processes]
    sums = torch.zeros(9 * len(models) + 2, device=device)  # nine losses for each model, images, images tried
    for row, batch in zip(rows, load_batches(dataset, [[(None, row, 1.0)] for row in rows], 0, device), strict=False):
        if stop_signal.received:
            break
        torch.manual_seed(held_out[row])  # for the draw from a VAE's distribution
        images, condition = prepare_batch(batch, frozen, args)
        condition = {name: value.repeat_interleave(9, dim=0) for name, value in condition.items()}
        generators = [torch.Generator().manual_seed(step_seed(held_out[row], level)) for level in range(9)]
        noise = torch.cat([torch.randn(images.shape, generator=generator) for generator in generators]).to(device)
        noisy_images, losses = noise_scheduler.add_noise(images.expand_as(noise), noise, timesteps), []
        for model in models.values():
            prediction = model(noisy_images, timesteps, **condition).sample.float()
            prediction = to_epsilon(prediction, noisy_images, noise_scheduler, timesteps)
            losses.append(F.mse_loss(prediction, noise, reduction="none").mean(dim=(1, 2, 3)))
        weight = batch["weight"]  # 0 for what can't be decoded
        sums += torch.cat([weight * torch.cat(losses), weight, torch.ones_like(weight)])
        records.new_skipped.update(batch["skipped"])
    models["unet"].train(training)
    *sums, weight, tried = accelerator.reduce(sums).tolist()
    if tried < len(held_out):
        return
    if weight == 0:
        fail(f"none of the {tried:.0f} images that --holdout sets aside could be decoded")
    nines = [[value / weight for value in sums[start : start + 9]] for start in range(0, len(sums), 9)]
    record = {name.replace("unet", "held_out_loss"): sum(nine) / 9 for name, nine in zip(models, nines, strict=True)}
    record |= {f"held_out_loss_t0.{i}": value for i, value in enumerate(nines[-1], 1)}  # of what the pipeline gets
    records.held_out = {"step": step, **record}
    records.write(records.held_out)


def to_epsilon(prediction, noisy_images, noise_scheduler, timesteps):
    """What the U-Net predicts, of whatever type, as a prediction of the noise (arXiv:2202.00512, appendix D)."""
    alpha = noise_scheduler.alphas_cumprod.to(prediction.device)[timesteps].view(-1, 1, 1, 1)  # the signal's variance
    if noise_scheduler.config.prediction_type == "epsilon":
        return prediction
    if noise_scheduler.config.prediction_type == "sample":
        return (noisy_images - alpha.sqrt() * prediction) / (1 - alpha).sqrt()
    return alpha.sqrt() * prediction + (1 - alpha).sqrt() * noisy_images


def find_learning_rate(
    accelerator, lock, unet, optimizer, noise_scheduler, batches, images_seen, num_images, data_step, frozen, args
):
    """Find a learning rate by a range test (arXiv:1506.01186), write find_lr.json and find_lr.png, and end the run.

    The rate grows by the same factor from step to step, until the loss, smoothed over about ten, is four times its
    lowest. The suggestion is a tenth of the rate at the lowest. Nothing that is trained here is kept.
    """
    import matplotlib.figure  # here, because it takes half a second

    tested, average, per_micro = [], 0.0, args.train_batch_size * accelerator.num_processes
    rates = np.geomspace(args.find_lr_min, args.find_lr_max, args.find_lr_steps).tolist()
    for step, rate in enumerate(tqdm(rates, "Range test", disable=not accelerator.is_main_process)):
        for group in optimizer.param_groups:
            group["lr"] = rate
        step_images = min(per_micro * args.gradient_accumulation_steps, num_images - images_seen % num_images)
        micro_batches, images_seen = math.ceil(step_images / per_micro), images_seen + step_images
        sums = train_step(
            accelerator, unet, optimizer, noise_scheduler, batches, micro_batches, data_step + step, frozen, args
        )
        loss, weight, *_ = accelerator.reduce(sums).tolist()
        if weight == 0:  # no image of the step could be decoded
            continue
        average = 0.9 * average + 0.1 * loss / weight
        smoothed = average / (1 - 0.9 ** (len(tested) + 1))  # as if it had not begun at 0
        if not smoothed < math.inf:
            break
        tested.append((smoothed, rate, loss / weight))
        if smoothed > 4 * min(tested)[0]:
            break
    batches.close()
    if not tested:
        fail("the loss is not finite from the start: there is no learning rate to find")
    lowest, best, _ = min(tested)
    reason = f"a tenth of {best:.2g}, at which the smoothed loss was lowest ({lowest:.4g})"
    found = {"suggestion": best / 10, "reason": reason}
    found |= dict(zip(("smoothed", "rates", "losses"), map(list, zip(*tested, strict=True)), strict=True))
    if accelerator.is_main_process:
        figure = matplotlib.figure.Figure(figsize=(7, 4), layout="constrained")
        axes = figure.add_subplot(xlabel="learning rate", ylabel="loss", xscale="log", yscale="log", title=reason)
        axes.plot(found["rates"], found["losses"], alpha=0.3)
        axes.plot(found["rates"], found["smoothed"])
        axes.axvline(best / 10, linestyle="--")
        with saving(args.output_dir, "find_lr.json") as unfinished:
            figure.savefig(unfinished / "find_lr.png")
            (unfinished / "find_lr.json").write_text(json.dumps(found))
    end_run(
        accelerator, lock, f"--learning_rate {best / 10:.2g}: {reason}; see {args.output_dir}/find_lr.png", [], args
    )


def objective_flags(args):
    """What the flags say of a scheduler's objective; the rest is left as the scheduler has it."""
    flags = {} if args.prediction_type is None else {"prediction_type": args.prediction_type}
    if args.rescale_betas_zero_snr:
        # Sampling must then start at the last timestep, which "leading" spacing leaves out.
        flags |= {"rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
    return flags


def check_objective(scheduler):
    """Refuse a scheduler that `compute_loss` can't train."""
    timesteps = scheduler.config.num_train_timesteps
    if type(timesteps) is not int or timesteps < 2:
        fail(f"the scheduler has {timesteps!r} training timesteps: there must be two at least")
    if scheduler.config.prediction_type not in ("epsilon", "sample", "v_prediction"):
        fail(f"the scheduler's prediction type {scheduler.config.prediction_type!r} is unknown: set --prediction_type")
    if scheduler.config.rescale_betas_zero_snr and scheduler.config.prediction_type == "epsilon":
        fail("--rescale_betas_zero_snr needs --prediction_type v_prediction or sample: epsilon has nothing to learn")


def is_due(global_step, steps, images_seen=1, images=0):
    """Whether what comes every `steps`, or if that is None every so many `images`, comes now; step 0 is none."""
    if steps is not None:
        return global_step > 0 and global_step % steps == 0
    return images_seen % images == 0


def count_steps(data_step, images_seen, num_images, images_per_step, args):
    """The step at which --num_train_epochs end: the steps so far, and those for the images that are left."""
    steps_per_epoch = math.ceil(num_images / images_per_step)
    epoch, image = divmod(images_seen, num_images)
    rest_of_epoch = math.ceil((num_images - image) / images_per_step)
    return data_step + rest_of_epoch + (args.num_train_epochs - epoch - 1) * steps_per_epoch


def check_overflows(overflows, data_step):
    """End a run in fp16 that skips step after step; some at the start are how the scaler finds its scale."""
    if overflows > 50 + data_step / 100:
        fail(f"{overflows} of {data_step} fp16 steps overflowed: use bf16 or a lower --learning_rate")


class StopSignal:
    """Ctrl-C and SIGTERM, noted here, end the run after the step in work and on all processes alike."""

    def __init__(self, num_processes):
        self.received, self.times = 0, 0
        self.handlers = {number: signal.signal(number, self.note) for number in (signal.SIGINT, signal.SIGTERM)}
        # The processes agree over gloo, so that no device has to wait.
        self.group = torch.distributed.new_group(backend="gloo") if num_processes > 1 else None

    def note(self, number, frame):
        self.received, self.times = number, self.times + 1
        if self.times == 3:  # torchrun passes each on a second time; who sends a third means it
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def agree(self):
        """The signal's number if any process has received one, else 0: the same on all, once a step."""
        number = torch.tensor(self.received)
        if self.group is not None:
            torch.distributed.all_reduce(number, torch.distributed.ReduceOp.MAX, group=self.group)
        return int(number)

    def close(self):
        for number, handler in self.handlers.items():
            signal.signal(number, handler)


class Records:
    """What a run tells while it trains: metrics.jsonl, trackers, the bar, skipped images, the share of waiting.

    `watch` and `add` only take notes; `update` alone waits for the device.
    """

    def __init__(self, accelerator, global_step, num_left_out, resumed, args):
        self.accelerator, self.output_dir, self.args = accelerator, Path(args.output_dir), args
        kept = read_metrics(args.output_dir, global_step) if resumed else []
        self.held_out = next((record for record in reversed(kept) if "held_out_loss" in record), {})
        self.num_records = sum("loss" in record for record in kept)
        self.signs = {kind for record in kept for kind in record.get("signs", ())}
        if accelerator.is_main_process:  # what was recorded after the checkpoint comes again
            with saving(args.output_dir, "metrics.jsonl") as unfinished:
                (unfinished / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in kept))
        shown = {key: value for key, value in vars(args).items() if value is not None}
        shown = {
            key: " | ".join(map(str, value)) if isinstance(value, list) else value for key, value in shown.items()
        }
        advice = "`wandb login`, or set WANDB_MODE=offline, or " if args.report_to in ("wandb", "all") else ""
        with explained(f"--report_to {args.report_to} does not work: {advice}--report_to none"):
            accelerator.init_trackers(args.tracker_project_name, shown, {"wandb": {"dir": args.output_dir}})
        main = accelerator.is_main_process
        self.bar = tqdm(total=args.max_train_steps, initial=global_step, desc="Steps", disable=not main)
        self.sums = torch.zeros(9, device=accelerator.device)  # since the record: `train_step`'s, clipped, steps
        self.waits, self.num_images, self.start = [], 0, time.perf_counter()
        self.skipped = {name: reason for record in kept for name, reason in record.get("skipped", {}).items()}
        self.num_told, self.new_skipped, self.num_left_out = len(self.skipped), {}, num_left_out
        self.any_decoded = resumed

    def watch(self, batches):
        """Pass batches on, and note what could not be decoded and how long each was waited for."""
        for batch in batches:
            self.new_skipped.update(batch["skipped"])
            self.waits.append(batch["waited"])
            yield batch

    def add(self, sums, num_images, epoch, lr):
        """Take in what `train_step` returned, of a step that all processes took with `num_images` in all."""
        one, clipped = torch.ones_like(sums[:1]), sums[2:3] > (self.args.max_grad_norm or math.inf)
        self.sums += torch.cat([sums, clipped, one])
        self.num_images, self.epoch, self.lr = self.num_images + num_images, epoch, lr
        self.bar.update(1)  # counts, and shows nothing that would have to be waited for

    @contextlib.contextmanager
    def paused(self):
        """Saving and sampling are no part of the rate."""
        begin = time.perf_counter()
        yield
        self.start += time.perf_counter() - begin

    def update(self, step, log, last):
        """Wait for the device, check what has come since the last record and, if it is time to `log`, write one."""
        total_loss, total_weight, total_norm, *images, clipped, steps = self.accelerator.reduce(self.sums).tolist()
        for name, reason in gather_object(sorted(self.new_skipped.items())):
            if name not in self.skipped and self.accelerator.is_main_process:
                self.bar.write(f"Skipped {name} ({reason})", file=sys.stderr)
            self.skipped[name] = reason
        self.new_skipped = {}
        self.any_decoded = self.any_decoded or total_weight > 0
        if total_weight == 0 and (self.num_images >= 100 or (last and not self.any_decoded)):
            fail(f"none of the last {self.num_images} images could be decoded")
        if not math.isfinite(total_loss + total_norm):  # before anything is saved
            kept = find_checkpoints(self.output_dir)
            fail(
                f"the loss is not finite at step {step} (last checkpoint: {kept[-1] if kept else 'none'}); "
                "try a lower --learning_rate or more --lr_warmup_steps"
            )
        if not log or total_weight == 0:
            return
        now = time.perf_counter()
        duration = now - self.start
        record = {
            "step": step,
            "epoch": self.epoch,
            "loss": total_loss / total_weight,
            "lr": self.lr,
            "grad_norm": total_norm / steps,
            "clipped": clipped / steps,  # share of the steps
            "images_per_second": self.num_images / duration,
            "data_wait": sum(seconds_between(*wait) for wait in self.waits) / duration,  # share of the time
            "skipped_images": len(self.skipped) + self.num_left_out,
        }
        self.bar.set_postfix_str(
            f"loss={record['loss']:.4f}, lr={self.lr:.1e}, {record['images_per_second']:.1f} img/s, "
            f"{record['data_wait']:.1%} waiting for data"
            + (f", held out {self.held_out['held_out_loss']:.4f}" if self.held_out else "")
        )
        signs, self.num_records = {}, self.num_records + 1
        if self.accelerator.is_main_process and (last or self.num_records.bit_count() == 1):
            # At records 1, 2, 4, 8 ...: soon, and yet seldom, because all are read.
            images = [total / total_weight for total in images]
            signs = find_signs([*read_metrics(self.output_dir), record], images, self.args)
            signs = {kind: text for kind, text in signs.items() if kind not in self.signs}
            self.signs |= signs.keys()
        for text in signs.values():
            self.bar.write(f"Worth a look: {text}", file=sys.stderr)
        skipped = dict(itertools.islice(self.skipped.items(), self.num_told, None))
        self.num_told, more = len(self.skipped), {"signs": signs, "skipped": skipped}
        self.write(record | {name: value for name, value in more.items() if value})
        self.sums.zero_()
        self.waits, self.num_images, self.start = [], 0, now  # each record tells of what came since the last

    def write(self, record):
        """Add a record to metrics.jsonl and the trackers."""
        if self.accelerator.is_main_process:
            with (self.output_dir / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(record) + "\n")
        numbers = {key: value for key, value in record.items() if key not in ("step", "signs", "skipped")}
        self.accelerator.log(numbers, step=record["step"])


def find_signs(records, images, args):
    """Signs that training goes wrong, as {kind: a sentence with the flag to turn}; a sane run has none.

    records: those of metrics.jsonl. images: means over the images that the U-Net is given, of their lowest and
    highest value, mean square and being of one colour. What takes time to judge waits for 100 steps after the warm-up.
    """
    records = [record for record in records if "loss" in record]  # others are of the images held out
    (low, high, mean_square, flat), last, latents = images, records[-1], "latents_dir" in args
    judged = [record for record in records[1:] if record["step"] > args.lr_warmup_steps] or records  # 1: a cold start
    enough, ended = last["step"] >= args.lr_warmup_steps + 100, last["step"] >= args.max_train_steps
    clipped = sum(record.get("clipped", 0) for record in judged) / len(judged)
    waiting = sum(record["data_wait"] for record in judged) / len(judged)
    rest = 1 - min(args.ema_max_decay, 1 - (1 + args.max_train_steps / args.ema_inv_gamma) ** -args.ema_power)
    of_peak = last["lr"] / max([record["lr"] for record in records if record["lr"]], default=1)
    turn = "precompute_latents.py" if latents else "--cache_images"
    turn = f"{turn}, or more --dataloader_num_workers than {args.dataloader_num_workers}"
    if getattr(args, "latents_dir", None) or getattr(args, "cache_images", False):
        turn = "a faster disk, or more memory, which the system keeps files in"
    signs = {
        "latents": latents and not 0.25 < mean_square < 4,
        "range": not latents and (low < -1.01 or high > 1.01 or low > -0.01),
        "colour": not latents and flat > 0.1,
        "clipped": enough and clipped > 0.5,
        "waiting": enough and waiting > 0.05,
        "ema": enough and args.use_ema and rest * args.max_train_steps < 2.5,
        "lr": enough and ended and not args.use_ema and of_peak > 0.1,
    }
    sentences = {
        "latents": f"the latents have a root mean square of {mean_square**0.5:.2g}, not of about 1: does the VAE's "
        "scaling_factor fit?",
        "range": f"images go from {low:.2g} to {high:.2g}, where black is -1 and white 1: see prepare_batch",
        "colour": f"{flat:.0%} of the images are of one colour: look at the data, and at --image_column",
        "clipped": f"gradients are clipped in {clipped:.0%} of steps: try a lower --learning_rate or larger batches",
        "waiting": f"the device waits for data {waiting:.0%} of the time: try {turn}",
        "ema": f"the averaged weights lag behind {args.max_train_steps} steps: lower --ema_max_decay or --ema_power",
        "lr": f"the learning rate ends at {of_peak:.0%} of its peak, so the weights keep the noise of the last steps: "
        "try --lr_scheduler cosine, or --use_ema",
    }
    return {kind: sentences[kind] for kind, wrong in signs.items() if wrong}


# ------------------------------------------------------------------------------ shared by the trainers: checkpoints


def clean(output_dir):
    """Put back what a kill left half-moved by `saving`, and delete what it left half-written."""
    for old in output_dir.glob(".tmp-old-*"):
        path = output_dir / old.name.removeprefix(".tmp-old-")
        if not path.exists():
            old.rename(path)
    for leftover in output_dir.glob(".tmp-*"):
        delete(leftover)


@contextlib.contextmanager
def saving(folder, what):
    """Give an empty folder; what is written there then takes its place in `folder`, each item whole or not at all.

    If that fails, it ends with a sentence, and what stood there before stays.
    """
    folder = Path(folder)
    unfinished = folder / ".tmp-saving"
    try:
        delete(unfinished)  # what a kill has left
        unfinished.mkdir()
        yield unfinished
        for path in unfinished.rglob("*"):
            if path.is_file():  # on the disk before it has its name, or a power cut leaves empty files
                with path.open("rb") as file:
                    os.fsync(file.fileno())
        for item in unfinished.iterdir():  # one by one: each is whole, and what is elsewhere stays
            path, old = folder / item.name, folder / f".tmp-old-{item.name}"
            if path.is_dir():  # a folder can't be replaced in one go: `clean` puts it back if a kill comes here
                path.rename(old)
            item.replace(path)
            delete(old)  # last: until here one of the two is whole
        unfinished.rmdir()
    except Exception as error:  # torch.save says nothing of a disk that is full
        full = folder.is_dir() and shutil.disk_usage(folder).free < 2**20
        reason = "the disk is full" if full else explain(error)
        shutil.rmtree(unfinished, ignore_errors=True)
        fail(f"{what} could not be saved ({reason}); what was saved before is untouched", alone=True)


def find_checkpoints(output_dir):
    """The whole checkpoints in a folder, oldest first."""
    found = [path.parent for path in Path(output_dir).glob("checkpoint-*/trainer_state.json")]
    steps = {path: path.name.removeprefix("checkpoint-") for path in found}
    return sorted((path for path in found if steps[path].isdecimal()), key=lambda path: int(steps[path]))


def find_checkpoint(args):
    """The checkpoint that --resume_from_checkpoint means, None to start afresh; the same on all machines."""
    given, found, path = args.resume_from_checkpoint, find_checkpoints(args.output_dir), None
    if given == "latest":
        path = found[-1] if found else None
        if path is None and os.environ.get("RANK", "0") == "0":
            print(f"No checkpoint in {args.output_dir} yet: starting afresh")
    elif given:
        path = Path(args.output_dir, given)  # first, so that a namesake in the working directory is not taken for it
        path = path if path.is_dir() else Path(given)
        if not (path / "trainer_state.json").is_file():
            fail(
                f"--resume_from_checkpoint {given} is no whole checkpoint, neither as a path nor in {args.output_dir}"
            )
        if path.resolve() in [older.resolve() for older in found[:-1]]:
            fail(f"{found[-1]} is newer than {path}: delete what is newer, or choose another --output_dir")
    elif found:
        fail(
            f"{args.output_dir} holds {found[-1].name} of an earlier run: go on from it with --resume_from_checkpoint "
            "latest, or choose another --output_dir"
        )
    if len(set(gather_object([path and path.name]))) > 1:
        fail("the machines found different checkpoints: --output_dir must be a folder that they share")
    return path


def checksums(folder):
    """{file: xxh3_128} of all files in a folder, but for the one that says them."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != "trainer_state.json":
            digest = xxhash.xxh3_128()
            with path.open("rb") as file:
                while block := file.read(1 << 24):
                    digest.update(block)
            found[str(path.relative_to(folder))] = digest.hexdigest()
    return found


def save_checkpoint(accelerator, models, optimizer, state, args):
    """Write checkpoint-N and then prune the oldest: call it on every process.

    Weights, optimizer and `state` are all there is to restore: data order and noise follow from the step.
    """
    path, scaler = Path(args.output_dir) / f"checkpoint-{state['global_step']}", accelerator.scaler
    if accelerator.is_main_process:
        with saving(args.output_dir, path) as unfinished:
            for name, model in models.items():
                model.save_pretrained(unfinished / path.name / name)
            torch.save(optimizer.state_dict(), unfinished / path.name / "optimizer.bin")
            torch.save(scaler.state_dict() if scaler else {}, unfinished / path.name / "scaler.bin")
            state["checksums"] = checksums(unfinished / path.name)
            own = xxhash.xxh3_128(json.dumps(state).encode())  # of all the rest in the file
            state["checksums"]["trainer_state.json"] = own.hexdigest()
            (unfinished / path.name / "trainer_state.json").write_text(json.dumps(state, indent=2))
        prune_checkpoints(path, args)
    accelerator.wait_for_everyone()


def prune_checkpoints(saved, args):
    """Delete the oldest beyond --checkpoints_total_limit, never the one that was `saved` last."""
    if args.checkpoints_total_limit is not None:
        others = [checkpoint for checkpoint in find_checkpoints(args.output_dir) if checkpoint != saved]
        for checkpoint in others[: max(0, len(others) - args.checkpoints_total_limit + 1)]:
            # Under another name first, so that no half of it is ever taken for a checkpoint.
            delete(checkpoint.rename(checkpoint.with_name(f".tmp-{checkpoint.name}")))


def read_state(checkpoint, num_images):
    """Where a checkpoint is in the training and in the data, and its settings; zeros without one."""
    if checkpoint is None:
        return {"global_step": 0, "data_step": 0, "images_seen": 0, "settings": {}}
    with explained(f"{checkpoint} is damaged; resume from another or choose a new --output_dir"):
        state = json.loads((checkpoint / "trainer_state.json").read_text())
        before, own = state["settings"], state.get("checksums", {}).pop("trainer_state.json", None)
        if own not in (None, xxhash.xxh3_128(json.dumps(state).encode()).hexdigest()):
            raise ValueError("trainer_state.json is not as it was written")
        if "images_seen" not in state:  # of a checkpoint from before it was counted
            per_step = before["train_batch_size"] * before["gradient_accumulation_steps"] * before["num_processes"]
            epoch, step = divmod(state["data_step"], math.ceil(before["num_images"] / per_step))
            state["images_seen"] = epoch * before["num_images"] + step * per_step
        for name in ("global_step", "data_step", "images_seen"):
            if type(state[name]) is not int or state[name] < 0:
                raise ValueError(f"{name} is {state[name]!r}")
        if before["num_images"] != num_images:  # other images: the epoch that was begun begins again
            state["images_seen"] = state["images_seen"] // before["num_images"] * num_images
    return state


def load_checkpoint(accelerator, path, models, optimizer, state, settings):
    """Load checkpoint-N into models, optimizer and fp16 scaler, and say which settings have changed."""
    then, now = ({name: of.get(name, 0) for name in ("holdout", "seed")} for of in (state["settings"], settings))
    if now["holdout"] and then != now:
        fail(
            f"{path} was trained on images that would be held out: {then} -> {now}; keep both, or leave --holdout out"
        )
    try:
        written, found = state.get("checksums"), checksums(path)
        if written is not None and written != found:
            names = [name for name in {**written, **found} if written.get(name) != found.get(name)]
            raise ValueError(f"{names[0]} is not as it was written")
        for name, model in models.items():
            folder = path / name if (path / name).is_dir() else path / "unet"  # --use_ema from here on
            model.load_state_dict(type(model).from_pretrained(folder).state_dict())
        moments = torch.load(path / "optimizer.bin", map_location="cpu", weights_only=True)
        moments["param_groups"] = optimizer.state_dict()["param_groups"]  # the flags of this run count
        optimizer.load_state_dict(moments)
        for parameter, moments in optimizer.state.items():  # saved channels_last on CUDA, which other devices are not
            for name in ("exp_avg", "exp_avg_sq"):
                moments[name] = torch.empty_like(parameter).copy_(moments[name])
        if accelerator.scaler is not None and (saved := torch.load(path / "scaler.bin", weights_only=True)):
            accelerator.scaler.load_state_dict(saved)
    except Exception as error:
        reason = str(error).strip().split("\n")[-1]
        fail(f"{path} is damaged or from another model ({reason}); resume from another or choose a new --output_dir")
    before = {**settings, **state["settings"], "resume_from_checkpoint": settings["resume_from_checkpoint"]}
    changed = [f", {key} {before[key]} -> {value}" for key, value in settings.items() if before[key] != value]
    accelerator.print(f"Resuming from {path}{''.join(changed)}")


# ----------------------------------------------------------------------------- shared by the trainers: the output


def open_output_dir(accelerator, args):
    """Make, lock and clean --output_dir, find the hub repository, and write run.args, which is this command again.

    Returns (the lock, which only the first process holds; the checkpoint to go on from, or None).
    """
    check_output_dir(args)
    output_dir = Path(args.output_dir)
    lock = FileLock(output_dir / ".lock", is_singleton=True)  # a run that failed in a notebook may still hold it
    if accelerator.is_main_process:
        try:
            output_dir.mkdir(parents=True, exist_ok=True)
            others = [path.name for path in output_dir.iterdir() if not path.name.startswith(".")]
            own = {"run.args", "metrics.jsonl", "find_lr.json"} & set(others)  # one of which each run leaves
            own = own and "cache.json" not in others
            if others and not own:
                fail(f"--output_dir {output_dir} holds {min(others)} and no run of this script: choose another folder")
            lock.acquire(timeout=0)
            clean(output_dir)
        except Timeout:
            fail(f"another process is training into {output_dir}: end it, or choose another --output_dir")
        except OSError as error:
            fail(f"--output_dir {output_dir} can't be written to ({error})")
    accelerator.wait_for_everyone()
    checkpoint = find_checkpoint(args)  # by all processes, so that all refuse alike
    if accelerator.is_main_process and not args.find_lr:
        with saving(output_dir, "run.args") as unfinished:
            (unfinished / "run.args").write_bytes(os.fsencode(format_args(args)))  # as argparse reads it
    if accelerator.is_main_process and args.push_to_hub:
        name, private = args.hub_model_id or output_dir.resolve().name, args.hub_private_repo or None
        with explained(f"--push_to_hub: no repository {name}; `hf auth login` first, or leave it out"):
            args.hub_model_id = create_repo(name, private=private, exist_ok=True).repo_id
            public = private and not repo_info(args.hub_model_id).private
        if public:
            fail(f"--hub_private_repo: {args.hub_model_id} exists and is public; make it private, or choose another")
    return lock, checkpoint


def samples_path(step, args):
    """Where the samples after a step are."""
    return Path(args.output_dir) / "samples" / f"step-{step:07d}.png"


def save_samples(accelerator, picture, step, args):
    """Write a PIL picture of samples whole or not at all, and pass it to the trackers that take pictures."""
    path = samples_path(step, args)
    path.parent.mkdir(exist_ok=True)
    with saving(path.parent, path) as unfinished:
        picture.save(unfinished / path.name)  # a half picture would pass for one that is done
    for tracker in accelerator.trackers:
        if hasattr(tracker, "log_images"):
            layout = {"dataformats": "NHWC"} if tracker.name == "tensorboard" else {}
            tracker.log_images({"samples": np.asarray(picture)[None]}, step=step, **layout)
    save_report(step, args)


def read_metrics(output_dir, last_step=math.inf):
    """The records of metrics.jsonl up to a step; a line that a kill or a power cut has spoilt is left out."""
    path, records = Path(output_dir) / "metrics.jsonl", []
    for line in path.read_bytes().splitlines() if path.is_file() else []:
        with contextlib.suppress(ValueError, TypeError, KeyError):
            record = json.loads(line)
            if record["step"] <= last_step and math.isfinite(record.get("loss", record.get("held_out_loss"))):
                records.append(record)
    return records


def plot_loss(output_dir):
    """Draw the losses in metrics.jsonl into loss.png and return the last of training, None without a record."""
    import matplotlib.figure  # here, because it takes half a second

    records = read_metrics(output_dir)
    figure = matplotlib.figure.Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot(xlabel="optimizer step", ylabel="loss", yscale="log")
    for name in ("loss", "held_out_loss", "held_out_loss_ema"):
        if drawn := [record for record in records if name in record]:
            axes.plot([record["step"] for record in drawn], [record[name] for record in drawn], label=name)
            axes.legend()
    axes.grid(True, alpha=0.3)
    figure.savefig(Path(output_dir) / "loss.png")
    return next((record["loss"] for record in reversed(records) if "loss" in record), None)


def save_pipeline(pipeline, args):
    """Write the pipeline folder; the one that stood there stays until the new one is whole."""
    if not all(weight.isfinite().all() for weight in pipeline.unet.parameters()):
        fail("the weights are not finite: they are not saved, and the pipeline that stood there stays", alone=True)
    with saving(args.output_dir, f"the pipeline in {args.output_dir}") as unfinished:
        pipeline.save_pretrained(unfinished)
        for path in unfinished.glob("*/config.json"):  # where a model came from on this machine is nobody's business
            config = json.loads(path.read_text())
            if os.path.exists(config.pop("_name_or_path", "")):
                path.write_text(json.dumps(config, indent=2) + "\n")


def list_settings(args):
    """The flags that card and report show, paths by their last name only."""
    settings = {key: value for key, value in vars(args).items() if value is not None and not key.endswith("_dir")}
    local = lambda value: isinstance(value, str) and os.path.isabs(value) and os.path.exists(value)  # noqa: E731
    return {key: Path(value).name if local(value) else value for key, value in settings.items()}


def save_model_card(step, args):
    """Write README.md as the hub shows it: data, samples, loss curve and settings."""
    output_dir = Path(args.output_dir)
    tags, what, usage = describe_model(step, plot_loss(output_dir), args)
    samples = sorted((output_dir / "samples").glob("step-*.png"))
    picture = f"![samples](samples/{samples[-1].name})" if samples else ""
    table = "".join(f"| {key} | {value} |\n" for key, value in list_settings(args).items())
    held_out = [record for record in read_metrics(output_dir) if "held_out_loss" in record][-1:]
    losses = "".join(f"| {name} | {value:.4g} |\n" for record in held_out for name, value in record.items())
    if losses:
        table += f"\n| held out (epsilon's squared error) | |\n|---|---|\n{losses}"
    with saving(output_dir, "the model card") as unfinished:
        (unfinished / "README.md").write_text(f"""---
library_name: diffusers
pipeline_tag: {tags[0]}
tags: [diffusers, {", ".join(tags)}]
---

# {args.hub_model_id or output_dir.resolve().name}

{what}

```python
{usage}
```

{picture}
![loss](loss.png)

| setting | value |
|---|---|
{table}""", encoding="utf-8")  # fmt: skip


def draw_curves(records, names, log=False):
    """Values of metrics.jsonl over their steps as an SVG figure, a line a name, each point a mean of many records."""
    lines = {}
    for name in names:
        points = [(record["step"], record[name]) for record in records if math.isfinite(record.get(name, math.nan))]
        if points:
            parts = np.array_split(np.array(points, float), min(len(points), 300))
            lines[name] = np.array([part.mean(axis=0) for part in parts])
    if not lines:
        return ""
    (first, low), (last, high) = (f(np.concatenate(list(lines.values())), axis=0) for f in (np.min, np.max))
    log, low = (True, low) if log and low > 0 else (False, min(low, 0.0))
    scale = np.log if log else np.asarray
    drawn, said = "", []
    for i, (name, points) in enumerate(lines.items()):
        x = 45 + 270 * (points[:, 0] - first) / ((last - first) or 1)
        y = 105 - 95 * (scale(points[:, 1]) - scale(low)) / ((scale(high) - scale(low)) or 1)
        colour = f"hsl({210 + 36 * i} 70% 50%)"
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in [*zip(x, y, strict=True), (x[-1], y[-1])])
        drawn += f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5" stroke-linecap="round"/>'
        said.append(f'<b style="color: {colour}">&#9632;</b> {html.escape(name)} {points[-1, 1]:.4g}')
    return f"""<figure><figcaption>{" ".join(said)}</figcaption><svg viewBox="0 0 320 122">
<path d="M45 10V105H315" fill="none" stroke="currentColor" opacity=".4"/>{drawn}
<text x="42" y="14" text-anchor="end">{high:.3g}</text><text x="42" y="107" text-anchor="end">{low:.3g}</text>
<text x="45" y="118">{first:.0f}</text><text x="315" y="118" text-anchor="end">step {last:.0f}</text></svg></figure>"""


def save_report(step, args):
    """Write report.html: one file that shows a run, in any browser and without a network; its failure ends no run."""
    style = """:root { color-scheme: light dark } figure { margin: 0 } pre { background: #8882; padding: 1rem }
body { font: 1rem/1.5 system-ui, sans-serif; max-width: 72rem; margin: auto; padding: 1rem; overflow-wrap: anywhere }
.curves { display: grid; gap: 1.5rem; grid-template-columns: repeat(auto-fill, minmax(min(100%, 20rem), 1fr)) }
.strip, pre { display: flex; gap: 1rem; overflow-x: auto } .strip img { max-height: 20rem; display: block }
svg { width: 100%; display: block } text { font-size: 9px; fill: currentColor } .sign { border-left: 4px solid #d70 }
.sign, td { padding-left: 1rem } td, th { text-align: left; vertical-align: top; border-bottom: 1px solid #8884 }
th { font-weight: normal }"""
    output_dir, e = Path(args.output_dir), lambda value: html.escape(str(value))
    table = lambda pairs: "".join(f"<tr><th>{e(a)}<td>{e(b)}" for a, b in pairs)  # noqa: E731
    try:
        records = read_metrics(output_dir)
        losses = [record["loss"] for record in records if "loss" in record]
        _, what, usage = describe_model(step, losses[-1] if losses else None, args)
        held_out = sorted({name for record in records if "held_out_loss" in record for name in record} - {"step"})
        curves = [draw_curves(records, ["loss"], log=True)]
        curves.append(draw_curves(records, [name for name in held_out if not name[-1].isdigit()], log=True))
        curves.append(draw_curves(records, [name for name in held_out if name[-1].isdigit()], log=True))
        curves += [draw_curves(records, ["lr"]), draw_curves(records, ["grad_norm"], log=True)]
        curves += [draw_curves(records, ["images_per_second"]), draw_curves(records, ["data_wait"])]
        samples, strip = sorted((output_dir / "samples").glob("step-*.png"), reverse=True), ""
        for i in sorted({round(i) for i in np.linspace(0, len(samples) - 1, min(8, len(samples)))}):
            buffer = io.BytesIO()
            with Image.open(samples[i]) as picture:
                picture.thumbnail((400, 640))  # so that the file stays small
                picture.save(buffer, "PNG", optimize=True)
            png, number = base64.b64encode(buffer.getvalue()).decode(), int(samples[i].stem.split("-")[1])
            strip += f'<figure><img alt="" src="data:image/png;base64,{png}">step {number}</figure>'
        signs = [(record["step"], sign) for record in records for sign in record.get("signs", {}).values()]
        signs = [f'<p class="sign">Worth a look, at step {at}: {e(sign)}</p>' for at, sign in signs]
        skipped = {name: reason for record in records for name, reason in record.get("skipped", {}).items()}
        for folder in getattr(args, "latents_dir", None) or []:  # what the cache lacks
            rows = map(json.loads, (Path(folder) / "skipped.jsonl").read_text(encoding="utf-8").splitlines())
            skipped |= {row["key"]: row["reason"] for row in rows}
        count = max([len(skipped), *(record.get("skipped_images", 0) for record in records)])
        name = e(args.hub_model_id or output_dir.resolve().name)
        page = f"""<!doctype html><html lang="en"><meta charset="utf-8"><title>{name}</title><style>{style}</style>
<meta name="viewport" content="width=device-width"><h1>{name}</h1><p>{e(what.replace("`", ""))}</p>
<p>Step {step} of {args.max_train_steps}, {time.strftime("%Y-%m-%d %H:%M")}.</p>{"".join(signs)}
<h2>Curves</h2><div class="curves">{"".join(curves)}</div>
<h2>Samples, newest first</h2><div class="strip">{strip or "None were drawn."}</div>
<h2>Use it</h2><pre>{e(usage)}</pre>
<p>The same run again: <code>accelerate launch {e(Path(__file__).name)} @run.args</code></p>
<h2>Left out: {count} images</h2><table>{table(list(skipped.items())[:100])}</table>
<h2>Settings</h2><table>{table(list_settings(args).items())}</table></html>"""
        (output_dir / ".tmp-report.html").write_text(page, encoding="utf-8")
        (output_dir / ".tmp-report.html").replace(output_dir / "report.html")
    except Exception as error:
        print(f"\nreport.html could not be written ({explain(error)})", file=sys.stderr)


def end_stopped(accelerator, stop, global_step, args):
    """End the program after a signal, with the status that says so."""
    accelerator.print(
        f"Stopped by {signal.Signals(stop).name} after step {global_step} of {args.max_train_steps}; "
        "the same command with --resume_from_checkpoint latest goes on from there"
    )
    accelerator.end_training()
    sys.exit(128 + stop)


def end_run(accelerator, lock, done, files, args):
    """Upload if asked for, say `done`, and let go of everything."""
    accelerator.wait_for_everyone()
    time.sleep(0.1)  # torch 2.11 can hang on the way out if gloo's thread has not yet let go of the last gather
    if accelerator.is_main_process and args.push_to_hub:
        files = ["model_index.json", "README.md", "loss.png", "samples/*", *files]
        with explained(f"the upload to {args.hub_model_id} failed; the pipeline is whole in {args.output_dir}"):
            upload_folder(repo_id=args.hub_model_id, folder_path=args.output_dir, allow_patterns=files)
    accelerator.print(done)
    lock.release(force=True)
    accelerator.end_training()


main = in_one_sentence(main)

if __name__ == "__main__":
    main(parse_args())
