"""Train an unconditional diffusion model: images -> a diffusers DDPM or DDIM pipeline.

    accelerate launch train_unconditional.py     # the demo: handwritten digits, some minutes on a CPU
    accelerate launch --config_file accelerate_configs/multi_gpu.yaml train_unconditional.py \\
        --train_data_dir photos --resolution 64 --random_flip --output_dir ddpm-photos

Reads a hub data set, or a local folder of anything that `datasets.load_dataset` opens (images, parquet, webdataset).
Writes into --output_dir: the pipeline with its model card, samples/, metrics.jsonl, loss.png, the tracker's logs, and
every --checkpointing_steps a checkpoint-N that the same command with --resume_from_checkpoint latest goes on from.
"""

import argparse
import atexit
import contextlib
import copy
import functools
import hashlib
import importlib.util
import io
import itertools
import json
import math
import os
import queue
import shlex
import shutil
import signal
import sys
import threading
import time
from pathlib import Path

import datasets
import fsspec
import numpy as np
import torch
import torch.nn.functional as F
import torchvision.transforms.v2.functional as TF
from accelerate import Accelerator
from accelerate.utils import DistributedType, ProjectConfiguration, gather_object
from datasets.distributed import split_dataset_by_node
from diffusers import DDIMPipeline, DDIMScheduler, DDPMPipeline, DDPMScheduler, UNet2DModel
from diffusers.optimization import SchedulerType, get_scheduler
from diffusers.training_utils import compute_snr
from filelock import FileLock, Timeout
from huggingface_hub import create_repo, repo_info, upload_folder
from PIL import Image, ImageOps
from torch.optim.swa_utils import get_ema_multi_avg_fn
from torchvision.io import ImageReadMode, decode_jpeg
from torchvision.utils import make_grid
from tqdm.auto import tqdm

HERE = Path(os.path.relpath(Path(__file__).parent))
# What the script runs with when it is given no data.
DEMO = {
    "train_data_dir": str(HERE / "demo/digits"),
    "model_config_name_or_path": str(HERE / "demo/digits_unet.json"),
    "output_dir": "ddpm-digits",
    "resolution": 8,
    "train_batch_size": 64,
    "num_train_epochs": 100,
    "learning_rate": 4e-3,
    "lr_warmup_steps": 100,
    "prediction_type": "v_prediction",
    "ddpm_beta_schedule": "squaredcos_cap_v2",
    "snr_gamma": 5.0,
    "validation_scheduler": "ddim",
    "ddpm_num_inference_steps": 50,
    "eval_batch_size": 64,
    "dataloader_num_workers": 0,
    "checkpointing_steps": 10000,  # none, so that the demo can be run again
}

# ------------------------------------------------------------------------------------------------- arguments


def parse_args(argv=None):
    """Parse and check the command line: a bad argument ends with one line and status 2 before anything is loaded."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    # Data
    add("--dataset_name", help="data set on the hub, or a local folder")
    add("--dataset_config_name", help="configuration of the data set, if it has several")
    add("--dataset_split", default="train", help="split to read")
    add("--train_data_dir", help="local folder: images, parquet or webdataset tars")
    add("--image_column", help="column of images (None: `image`, or the only one)")
    add("--max_train_samples", type=int, help="drawn at random; of a stream the first")
    add("--streaming", action="store_true", help="read while training; needs --max_train_steps")
    add("--cache_images", action="store_true", help="decode and resize once, into --output_dir")
    add("--cache_dir", help="where downloads and data sets are kept")
    add("--resolution", type=int, default=64, help="side of the square images, pixels")
    add("--center_crop", action="store_true", help="crop the centre, not a random square")
    add("--random_flip", action="store_true", help="mirrored images as well")
    add("--preserve_input_precision", action="store_true", help="keep 16 and 32 bit grey images in float32")
    add("--dataloader_num_workers", type=int, help="processes that decode (None: by the cores)")
    # Model
    add("--model_config_name_or_path", help="U-Net config: hub id, folder or JSON file")
    add("--pretrained_model_name_or_path", help="hub id or folder of a pipeline")
    add("--gradient_checkpointing", action="store_true", help="less memory, about a third slower")
    add("--compile", nargs="?", const="inductor", metavar="BACKEND", help="torch.compile the U-Net")
    add("--allow_tf32", action="store_true", help="TF32 matrix products on Ampere and later")
    add("--mixed_precision", choices=["no", "fp16", "bf16"], help="(None: what accelerate launch says)")
    # Objective
    add("--prediction_type", choices=["epsilon", "sample", "v_prediction"], help="(None: epsilon, or the pretrained)")
    add("--ddpm_num_steps", type=int, help="training timesteps (None: 1000, or the pretrained)")
    add("--ddpm_beta_schedule", choices=["linear", "scaled_linear", "squaredcos_cap_v2"], help="(None: linear)")
    add("--rescale_betas_zero_snr", action="store_true", help="last timestep is pure noise (arXiv:2305.08891)")
    add("--snr_gamma", type=float, help="min-SNR loss weight, 5.0 is usual (arXiv:2303.09556)")
    add("--noise_offset", type=float, default=0.0, help="for darker and lighter images, 0.1 is usual")
    add("--input_perturbation", type=float, default=0.0, help="noise beyond the target's, 0.1 is usual")
    # Optimization
    add("--seed", type=int, default=0, help="fixes all that is random")
    add("--train_batch_size", type=int, default=16, help="images per process and micro-batch")
    add("--gradient_accumulation_steps", type=int, default=1, help="micro-batches per optimizer step")
    add("--num_train_epochs", "--num_epochs", type=int, default=100, help="passes over the images")
    add("--max_train_steps", type=int, help="optimizer steps; overrides the epochs")
    add("--learning_rate", type=float, default=1e-4, help="peak, after the warm-up")
    add("--lr_scheduler", choices=[s.value for s in SchedulerType], default="cosine", help="shape of the decay")
    add("--lr_warmup_steps", type=int, default=500, help="optimizer steps")
    add("--lr_num_cycles", type=int, default=1, help="restarts of cosine_with_restarts")
    add("--lr_power", type=float, default=1.0, help="power of polynomial")
    add("--lr_step_rules", help="piecewise_constant: 1:1000,0.1:2000,0.01")
    add("--adam_beta1", type=float, default=0.95, help="decay of the gradient's mean")
    add("--adam_beta2", type=float, default=0.999, help="decay of its square's mean")
    add("--adam_weight_decay", type=float, default=1e-6, help="decoupled weight decay")
    add("--adam_epsilon", type=float, default=1e-8, help="added to the denominator")
    add("--max_grad_norm", type=float, default=1.0, help="clip the gradient's norm; 0: don't")
    add("--use_ema", action=argparse.BooleanOptionalAction, default=True, help="average the weights")
    add("--ema_inv_gamma", type=float, default=1.0, help="warm-up 1 - (1 + step / inv_gamma) ** -power")
    add("--ema_power", type=float, default=0.75, help="2/3 suits over a million steps")
    add("--ema_max_decay", type=float, default=0.9999, help="the decay that the warm-up ends at")
    # Logging and samples
    add("--logging_steps", type=int, default=10, help="steps between records; each waits for the device")
    trackers = ["tensorboard", "wandb", "all", "none"]
    add("--report_to", "--logger", choices=trackers, default="tensorboard", help="besides metrics.jsonl")
    add("--tracker_project_name", default="train_unconditional", help="project in the trackers")
    add("--logging_dir", default="logs", help="tensorboard's folder in --output_dir")
    add("--validation_steps", type=int, help="steps between samples; overrides the epochs")
    add("--save_images_epochs", type=int, default=10, help="epochs between samples")
    add("--eval_batch_size", type=int, default=16, help="images to sample, over all processes")
    add("--validation_scheduler", choices=["ddpm", "ddim"], default="ddpm", help="sampler, saved with the pipeline")
    add("--ddpm_num_inference_steps", type=int, default=1000, help="sampling steps")
    # Saving
    add("--output_dir", default="ddpm-model-64", help="everything is written here")
    add("--save_model_epochs", type=int, default=10, help="epochs between saves of the pipeline")
    add("--checkpointing_steps", type=int, default=500, help="optimizer steps between checkpoints")
    add("--checkpoints_total_limit", type=int, help="checkpoints to keep (None: all)")
    add("--resume_from_checkpoint", help="a checkpoint's path, or `latest`")
    add("--push_to_hub", action="store_true", help="upload the pipeline, as the logged-in user")
    add("--hub_model_id", help="repository (None: named like --output_dir)")
    add("--hub_private_repo", action="store_true", help="create it private")

    args = parser.parse_args(argv)
    go_on = args.pretrained_model_name_or_path is not None
    if args.dataset_name is None and args.train_data_dir is None:
        demo = {key: value for key, value in DEMO.items() if key != "model_config_name_or_path" or not go_on}
        parser.set_defaults(**demo)
        args = parser.parse_args(argv)
        if os.environ.get("RANK", "0") == "0":
            flags = " ".join(f"--{key}" if value is True else f"--{key} {value}" for key, value in demo.items())
            given = shlex.join(sys.argv[1:] if argv is None else argv)
            print(
                f"No data given: this is the demo, short for\naccelerate launch {Path(__file__).name} {flags} {given}"
            )

    for name, value in vars(args).items():
        least = 0 if name in ("seed", "dataloader_num_workers", "lr_warmup_steps") else 1
        if type(value) is int and value < least:
            parser.error(f"--{name} {value} is less than {least}")
    if args.dataset_name is None and not Path(args.train_data_dir).is_dir():
        parser.error(f"--train_data_dir {args.train_data_dir} is not a folder")
    if args.model_config_name_or_path and go_on:
        parser.error("--model_config_name_or_path and --pretrained_model_name_or_path exclude each other")
    if args.streaming and args.max_train_steps is None:
        parser.error("--streaming needs --max_train_steps: a stream has no length to count epochs by")
    if args.cache_images and (args.streaming or args.preserve_input_precision):
        parser.error("--cache_images stores 8 bits of all images: it goes with neither stream nor preserved precision")
    if args.lr_scheduler == "piecewise_constant" and args.lr_step_rules is None:
        parser.error("--lr_scheduler piecewise_constant needs --lr_step_rules")
    for tracker in {"tensorboard", "wandb"} & {args.report_to}:
        if importlib.util.find_spec(tracker) is None:
            parser.error(f"--report_to {tracker}: `pip install {tracker}` first, or pass --report_to none")
    return args


def fail(message, rank=0):
    """End the program with status 1 and one sentence, printed by process `rank` however many come here."""
    if os.environ.get("RANK", "0") == str(rank):
        print(f"\n{Path(__file__).name}: {message}", file=sys.stderr, flush=True)
    raise SystemExit(1)


# ------------------------------------------------------------------------------------------------- data


def load_rows(args):
    """Open the data set. Returns (its rows, with images left undecoded; name of the column of images)."""
    source = args.dataset_name or args.train_data_dir
    load = functools.partial(datasets.load_dataset, split=args.dataset_split, streaming=args.streaming)
    try:
        rows = load(source, args.dataset_config_name, cache_dir=args.cache_dir)
    except Exception as error:
        fail(f"{source} can't be loaded as a data set: {error}")
    features = rows.features or {}
    columns = [name for name, feature in features.items() if isinstance(feature, datasets.Image)]
    column = args.image_column or ("image" if "image" in features or len(columns) != 1 else columns[0])
    if column not in features:
        fail(f"{source} has no column {column!r} but {', '.join(features)}: choose with --image_column")
    if isinstance(features[column], datasets.Image):
        rows = rows.cast_column(column, datasets.Image(decode=False))
    if args.max_train_samples is not None and args.streaming:
        rows = rows.take(args.max_train_samples)  # the first: a shuffled stream would give others each epoch
    elif args.max_train_samples is not None:
        rows = rows.shuffle(seed=args.seed).take(min(args.max_train_samples, len(rows)))
    if not args.streaming and len(rows) == 0:
        fail(f"{source} holds no images in split {args.dataset_split!r}")
    return rows, column


def decode_image(source, channels, keep_precision=False):
    """Decode an image file to a tensor [channels, height, width]: uint8, or float32 in [0, 1] with `keep_precision`.

    `source` is the file's bytes or the {"bytes", "path"} of an undecoded `datasets.Image`; `channels` is 1 or 3.
    EXIF rotation is applied, transparency laid onto white, of an animation the first frame taken, 16 bits scaled to 8.
    Raises whatever Pillow raises for a file that it can't read whole.
    """
    if isinstance(source, dict) and source["bytes"] is None:
        with fsspec.open(source["path"]) as file:
            source = file.read()
    elif isinstance(source, dict):
        source = source["bytes"]
    image = Image.open(io.BytesIO(source))  # reads the header, and refuses decompression bombs
    if image.format in ("JPEG", "MPO") and image.mode in ("L", "RGB") and not keep_precision:
        try:
            mode = ImageReadMode.GRAY if channels == 1 else ImageReadMode.RGB
            data = torch.frombuffer(bytearray(source), dtype=torch.uint8)
            return decode_jpeg(data, mode=mode, apply_exif_orientation=True)
        except RuntimeError:
            pass  # Pillow reads some JPEGs that torchvision does not, and says better what is wrong with the others
    image = ImageOps.exif_transpose(image)
    if image.mode.startswith("I") or image.mode == "F":  # deep grey; Pillow's own conversion would clip it at 255
        values = np.asarray(image, dtype=np.float32) / (1.0 if image.mode == "F" else 65535.0)
        pixels = torch.from_numpy(values).clamp(0, 1).expand(channels, -1, -1)
        return pixels.contiguous() if keep_precision else (pixels * 255).round().byte()
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    pixels = np.array(image.convert("L" if channels == 1 else "RGB")).reshape(image.height, image.width, channels)
    pixels = torch.from_numpy(pixels).permute(2, 0, 1).contiguous()
    return pixels.float() / 255 if keep_precision else pixels


def crop_square(image, y, x):
    """Cut the largest square out of [C, H, W]; `y` and `x` in [0, 1] place it, 0.5 is the centre."""
    height, width = image.shape[-2:]
    side = min(height, width)
    return TF.crop(image, round((height - side) * y), round((width - side) * x), side, side)


def resize(image, resolution, interpolation="bicubic"):
    """Resize [C, H, W] to a short side of `resolution` pixels: antialiased, in the image's own dtype."""
    image = TF.resize(image, [resolution], interpolation=TF.InterpolationMode(interpolation), antialias=True)
    return image.clamp(0, 1) if image.is_floating_point() else image


def name_image(row, source):
    """What the reader knows an image by."""
    return (isinstance(source, dict) and source.get("path")) or f"row {row}"


def draw_choices(seed, epoch, row):
    """Four numbers in [0, 1) for a row in an epoch: place of the crop (y, x), mirroring, caption.

    Keyed by what they are for, not drawn from a worker's generator: a resumed run draws as the first one did.
    """
    return np.random.default_rng([seed, epoch, row]).random(4)


def cache_batch(batch, indices, column, resolution, center_crop, channels):
    """Decode and resize a batch of rows for `cache_images`; rows that can't be decoded are named and left out."""
    pixels, sizes, threads = [], [], torch.get_num_threads()
    torch.set_num_threads(1)  # OpenMP does not survive the fork of `map`, and there is a process per core
    for row, source in zip(indices, batch[column], strict=True):
        try:
            image = decode_image(source, channels)
            if center_crop:
                image = crop_square(image, 0.5, 0.5)
            longest = 4 * min(image.shape[-2:])  # a strip of 1 x 10000 would grow without bound
            image = resize(TF.center_crop(image, [min(side, longest) for side in image.shape[-2:]]), resolution)
        except Exception as error:
            tqdm.write(f"Skipped {name_image(row, source)} ({error})", file=sys.stderr)
            continue
        pixels.append(image.numpy().tobytes())
        sizes.append(list(image.shape))
    torch.set_num_threads(threads)
    return {"pixels": pixels, "size": sizes}


def cache_images(rows, column, args, channels, num_workers):
    """Decode and resize every image once, into a memory-mapped Arrow file whose name says which data and transform.

    Returns (data set with columns `pixels`, the bytes of uint8 [C, H, W], and `size`; number of images left out).
    """
    settings = {"column": column, "resolution": args.resolution, "center_crop": args.center_crop, "channels": channels}
    key = hashlib.sha256(json.dumps([rows._fingerprint, settings]).encode()).hexdigest()[:16]
    path = Path(args.output_dir) / "image_cache" / f"{key}.arrow"
    path.parent.mkdir(parents=True, exist_ok=True)
    features = {"pixels": datasets.Value("large_binary"), "size": datasets.List(datasets.Value("int32"), length=3)}
    with FileLock(f"{path}.lock"):  # the first process to come here writes it, the others find it whole
        cached = rows.map(
            cache_batch, with_indices=True, batched=True, batch_size=64, writer_batch_size=64, fn_kwargs=settings,
            remove_columns=[column], features=datasets.Features(features), cache_file_name=str(path),
            new_fingerprint=key, num_proc=num_workers if num_workers > 1 else None, desc="Caching images",
        )  # fmt: skip
    if len(cached) == 0:
        fail(f"none of the {len(rows)} images could be decoded")
    return cached, len(rows) - len(cached)


def step_batches(rows, args, rank, num_processes, first_step):
    """Yield without end one process's micro-batches of keys (epoch, row, weight), from optimizer step `first_step` on.

    (seed, epoch) alone fixes an epoch's order, so any step can be started from. A step takes the next images of that
    order; the last one of an epoch takes what is left, so every image comes exactly once an epoch: none is dropped or
    repeated. The weights make the sum of loss * weight over a step's micro-batches, averaged over the processes as DDP
    does, the mean over the step's images. A process with no image left gets one of weight 0, because DDP needs all to
    take part.
    """
    per_micro = args.train_batch_size * num_processes
    per_step = per_micro * args.gradient_accumulation_steps
    first_epoch, step_in_epoch = divmod(first_step, math.ceil(len(rows) / per_step))
    for epoch in itertools.count(first_epoch):
        order = np.random.default_rng([args.seed, epoch]).permutation(len(rows)).tolist()
        for step_start in range(step_in_epoch * per_step, len(rows), per_step):
            step = order[step_start : step_start + per_step]
            for start in range(0, len(step), per_micro):
                mine = step[start : start + per_micro][rank::num_processes]
                yield [(epoch, row, num_processes / len(step)) for row in mine] or [(epoch, step[0], 0.0)]
        step_in_epoch = 0


def stream_batches(rows, args, rank, num_processes, first_step):
    """Like `step_batches` for a stream, with the item itself as fourth part of a key.

    Each process reads its own share of the stream, shuffled, again and again; resuming reads up to where the run was.
    """
    shuffled = rows.shuffle(seed=args.seed, buffer_size=1000)
    share = split_dataset_by_node(shuffled, rank, num_processes)
    weight = 1 / (args.train_batch_size * args.gradient_accumulation_steps)

    def keys():
        for epoch in itertools.count():
            share.set_epoch(epoch)
            row = None
            for row, item in enumerate(share):
                yield epoch, row, weight, item
            if row is None:
                raise ValueError(f"process {rank} finds nothing in the stream: it has fewer images than processes")

    endless = itertools.islice(keys(), first_step * args.gradient_accumulation_steps * args.train_batch_size, None)
    while True:
        yield list(itertools.islice(endless, args.train_batch_size))


class ImageDataset(torch.utils.data.Dataset):
    """Turns keys of `step_batches` into items {"pixel_values": [C, resolution, resolution], "weight", "skipped"}.

    An image that can't be decoded comes as zeros of weight 0, with its name and the reason in "skipped".
    """

    def __init__(self, rows, column, args, channels):
        self.rows, self.column, self.channels = rows, column, channels
        self.seed, self.resolution, self.center_crop = args.seed, args.resolution, args.center_crop
        self.random_flip, self.keep_precision = args.random_flip, args.preserve_input_precision

    def __getitems__(self, keys):  # a batch at once: for small images, looking up single rows costs more than decoding
        if len(keys[0]) == 4:  # streamed
            return [self.load(epoch, row, weight, item) for epoch, row, weight, item in keys]
        columns = self.rows[[row for _, row, _ in keys]]
        items = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        return [self.load(*key, item) for key, item in zip(keys, items, strict=True)]

    def load(self, epoch, row, weight, item):
        y, x, flip, _ = draw_choices(self.seed, epoch, row)
        if self.center_crop:
            y, x = 0.5, 0.5
        try:
            if "pixels" in item:
                image = torch.frombuffer(bytearray(item["pixels"]), dtype=torch.uint8).view(item["size"])
            else:
                image = decode_image(item[self.column], self.channels, self.keep_precision)
            # Cropped first, because a long strip resized whole may not fit into memory.
            image = resize(crop_square(image, y, x), self.resolution)
            if self.random_flip and flip < 0.5:
                image = image.flip(-1)
            return {"pixel_values": image, "weight": weight, "skipped": None}
        except Exception as error:
            dtype = torch.float32 if self.keep_precision else torch.uint8
            image = torch.zeros(self.channels, self.resolution, self.resolution, dtype=dtype)
            return {
                "pixel_values": image,
                "weight": 0.0,
                "skipped": (name_image(row, item.get(self.column)), str(error)),
            }


def collate(items):
    """Stack the items of `ImageDataset`; "skipped" becomes a list of those that are not None."""
    return {
        "pixel_values": torch.stack([item["pixel_values"] for item in items]),
        "weight": torch.tensor([item["weight"] for item in items]),
        "skipped": [item["skipped"] for item in items if item["skipped"]],
    }


def ignore_signals(worker_id):
    """Loader processes outlive Ctrl-C and SIGTERM: the trainer still needs data to finish its step."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


class Prefetcher:
    """Iterates `dataloader` in a thread, two batches ahead, with the tensors on their way to `device`.

    `waited` adds up the seconds in which the device had nothing left to do and the next batch was not there.
    """

    def __init__(self, dataloader, device):
        self.device, self.waited = device, 0.0
        self.queue, self.closed = queue.Queue(maxsize=2), threading.Event()
        # iter() starts the loader's processes here, not in the thread: forking beside a busy main thread can deadlock.
        self.thread = threading.Thread(target=self.fill, args=(iter(dataloader),), daemon=True)
        self.thread.start()
        # After an error, too: the loader's processes, deaf to SIGTERM, would otherwise hold up the exit.
        atexit.register(self.close)

    def fill(self, batches):
        try:
            while not self.closed.is_set():
                batch = next(batches)
                for name, value in batch.items():  # on the stream that computes: queued there, not waited for
                    batch[name] = value.to(self.device, non_blocking=True) if torch.is_tensor(value) else value
                self.queue.put(batch)
        except BaseException as error:
            self.queue.put(error)

    def __iter__(self):
        return self

    def __next__(self):
        idle_since = None if self.device.type == "cuda" else time.perf_counter()
        while True:
            try:
                batch = self.queue.get(timeout=0.001)
                break
            except queue.Empty:  # the host runs ahead of a GPU: only what it waits after that has run dry counts
                if idle_since is None and torch.cuda.current_stream(self.device).query():
                    idle_since = time.perf_counter()
        if idle_since is not None:
            self.waited += time.perf_counter() - idle_since
        if isinstance(batch, BaseException):
            raise batch
        return batch

    def close(self):
        """End the thread and with it the loader's processes."""
        self.closed.set()
        while self.thread.is_alive():
            try:
                self.queue.get(timeout=0.1)
            except queue.Empty:
                pass


def prepare_images(pixel_values):
    """Images as loaded [N, C, H, W] (uint8, or float32 in [0, 1]) -> float32 in [-1, 1]."""
    return pixel_values * 2 - 1 if pixel_values.is_floating_point() else pixel_values / 127.5 - 1


# ------------------------------------------------------------------------------------------------- model


def make_unet(args):
    """The U-Net to train: a trained pipeline's, a config's, or the one of diffusers' script (114 million weights)."""
    source = args.pretrained_model_name_or_path or args.model_config_name_or_path
    try:
        if args.pretrained_model_name_or_path:
            unet = UNet2DModel.from_pretrained(source, subfolder="unet", cache_dir=args.cache_dir)
            unet.register_to_config(sample_size=args.resolution)
        elif args.model_config_name_or_path:
            config = UNet2DModel.load_config(source, cache_dir=args.cache_dir)
            unet = UNet2DModel.from_config(config, sample_size=args.resolution)
        else:
            unet = UNet2DModel(
                sample_size=args.resolution,
                block_out_channels=(128, 128, 256, 256, 512, 512),
                down_block_types=("DownBlock2D",) * 4 + ("AttnDownBlock2D", "DownBlock2D"),
                up_block_types=("UpBlock2D", "AttnUpBlock2D") + ("UpBlock2D",) * 4,
            )
    except Exception as error:
        fail(f"{source} holds no UNet2DModel ({error})")
    channels, multiple = unet.config.in_channels, 2 ** (len(unet.config.block_out_channels) - 1)
    if channels not in (1, 3) or unet.config.out_channels != channels:
        fail(f"{source} takes {channels} and gives {unet.config.out_channels} channels; images have 1 or 3")
    if args.resolution % multiple:
        fail(f"--resolution {args.resolution} is not a multiple of {multiple}, which this U-Net needs")
    return unet


def make_noise_scheduler(args):
    """The scheduler that noises in training: the flags that are given, over what the pretrained pipeline says."""
    flags = {
        "num_train_timesteps": args.ddpm_num_steps,
        "beta_schedule": args.ddpm_beta_schedule,
        "prediction_type": args.prediction_type,
    }
    flags = {key: value for key, value in flags.items() if value is not None}
    if args.rescale_betas_zero_snr:
        # Sampling must then start at the last timestep, which "leading" spacing leaves out.
        flags.update(rescale_betas_zero_snr=True, timestep_spacing="trailing")
    source = args.pretrained_model_name_or_path
    try:
        load = functools.partial(
            DDPMScheduler.from_pretrained, source, subfolder="scheduler", cache_dir=args.cache_dir
        )
        scheduler = load(**flags) if source else DDPMScheduler(**flags)
    except Exception as error:
        fail(f"{source} holds no scheduler ({error})")
    if scheduler.config.rescale_betas_zero_snr and scheduler.config.prediction_type == "epsilon":
        fail("--rescale_betas_zero_snr needs --prediction_type v_prediction or sample: epsilon has nothing to learn")
    timesteps = scheduler.config.num_train_timesteps
    if args.ddpm_num_inference_steps > timesteps:
        fail(f"--ddpm_num_inference_steps {args.ddpm_num_inference_steps} exceeds the {timesteps} training timesteps")
    return scheduler


# ------------------------------------------------------------------------------------------------- loss and EMA


def step_seed(*key):
    """A 64-bit seed from integers: (seed, step, micro-batch, process)."""
    return int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0])


def compute_loss(
    unet, noise_scheduler, images, weight, snr_gamma=None, noise_offset=0.0, input_perturbation=0.0, **condition
):
    """The denoising loss of DDPM (arXiv:2006.11239, eq. 14): the sum over images of weight * mean squared error.

    images, or their latents: [N, C, H, W] float32 of about unit size. weight: [N]; it adds up to 1 over a step's
    micro-batches, averaged over the processes, and is 0 for a placeholder: so return (weight * loss per image).sum(),
    whatever the loss. condition: what the U-Net is given besides, such as encoder_hidden_states.
    The noising is done in float32: in bfloat16 the first timesteps would get no noise at all.
    `snr_gamma`: the min-SNR weight of arXiv:2303.09556; for v_prediction with SNR + 1 in place of SNR, as diffusers
    had it first, because the paper's weight is 0 where a zero terminal SNR has its pure noise.
    `noise_offset`: noise that is the same all over a channel (crosslabs.org/blog/diffusion-with-offset-noise).
    `input_perturbation`: more noise in the input than the target tells of (arXiv:2301.11706).
    """
    noise = torch.randn(images.shape, device=images.device)  # by shape: `like` would draw in the order of the memory
    if noise_offset:
        noise = noise + noise_offset * torch.randn(*images.shape[:2], 1, 1, device=images.device)
    perturbed = (
        noise + input_perturbation * torch.randn(noise.shape, device=noise.device) if input_perturbation else noise
    )
    timesteps = torch.randint(noise_scheduler.config.num_train_timesteps, (len(images),), device=images.device)
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
    if snr_gamma is not None:
        snr = compute_snr(noise_scheduler, timesteps)
        if prediction_type == "epsilon":
            weight = weight * snr.clamp(max=snr_gamma) / snr
        elif prediction_type == "sample":
            weight = weight * snr.clamp(max=snr_gamma)
        else:
            weight = weight * (snr + 1).clamp(max=snr_gamma) / (snr + 1)
    return (weight * loss).sum()


def update_ema(ema_unet, unet, step, args):
    """Move the averaged weights towards the trained ones after optimizer step `step`, counted from 1.

    The decay warms up as in diffusers' EMAModel (after @crowsonkb); the first step copies.
    """
    decay = min(args.ema_max_decay, 1 - (1 + (step - 1) / args.ema_inv_gamma) ** -args.ema_power)
    get_ema_multi_avg_fn(decay)(list(ema_unet.parameters()), list(unet.parameters()), None)


# ------------------------------------------------------------------------------------------------- checkpoints


def remove(path):
    """Delete a folder in such a way that no half of it is ever seen under its name."""
    shutil.rmtree(path.rename(path.parent / f".tmp-old-{path.name}"))


def replace(path, new):
    """Move `new` to `path`; a folder that stands there is moved out of the way first and deleted last."""
    if not path.is_dir():
        new.replace(path)
        return
    old = path.rename(path.parent / f".tmp-old-{path.name}")
    new.rename(path)
    shutil.rmtree(old)


@contextlib.contextmanager
def saving(output_dir, what):
    """Give a temporary folder to write into; if that fails, delete it and end with a sentence."""
    unfinished = Path(output_dir) / ".tmp-saving"
    try:
        yield unfinished
    except Exception as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        fail(f"{what} could not be saved ({error}); what was saved before is untouched")


def find_checkpoints(output_dir):
    """The whole checkpoints in a folder, oldest first."""
    found = [path.parent for path in Path(output_dir).glob("checkpoint-*/trainer_state.json")]
    steps = {path: path.name.removeprefix("checkpoint-") for path in found}
    return sorted((path for path in found if steps[path].isdigit()), key=lambda path: int(steps[path]))


def find_checkpoint(args):
    """The checkpoint that --resume_from_checkpoint means, None to start afresh."""
    given, found = args.resume_from_checkpoint, find_checkpoints(args.output_dir)
    if given == "latest":
        if not found and os.environ.get("RANK", "0") == "0":
            print(f"No checkpoint in {args.output_dir} yet: starting afresh")
        return found[-1] if found else None
    if given:
        path = Path(given) if Path(given).is_dir() else Path(args.output_dir, given)
        if not (path / "trainer_state.json").is_file():
            fail(
                f"--resume_from_checkpoint {given} is no whole checkpoint, neither as a path nor in {args.output_dir}"
            )
        if path.resolve() in [older.resolve() for older in found[:-1]]:
            fail(f"{found[-1]} is newer than {path}: delete what is newer, or choose another --output_dir")
        return path
    if found:
        fail(
            f"{args.output_dir} holds {found[-1].name} of an earlier run: go on from it with --resume_from_checkpoint "
            "latest, or choose another --output_dir"
        )


def save_checkpoint(accelerator, unet, ema_unet, optimizer, state, args):
    """Write checkpoint-N and then prune the oldest: call it on every process.

    Weights, optimizer and `state` are all there is to restore: data order and noise follow from the step.
    """
    path, scaler = Path(args.output_dir) / f"checkpoint-{state['global_step']}", accelerator.scaler
    if accelerator.is_main_process:
        with saving(args.output_dir, path) as unfinished:
            accelerator.unwrap_model(unet).save_pretrained(unfinished / "unet")
            if ema_unet is not None:
                ema_unet.save_pretrained(unfinished / "unet_ema")
            torch.save(optimizer.state_dict(), unfinished / "optimizer.bin")
            torch.save(scaler.state_dict() if scaler else {}, unfinished / "scaler.bin")
            (unfinished / "trainer_state.json").write_text(json.dumps(state, indent=2))
            replace(path, unfinished)
        if args.checkpoints_total_limit is not None:
            others = [checkpoint for checkpoint in find_checkpoints(args.output_dir) if checkpoint != path]
            for checkpoint in others[: max(0, len(others) - args.checkpoints_total_limit + 1)]:
                remove(checkpoint)
    accelerator.wait_for_everyone()


def load_checkpoint(path, unet, ema_unet, optimizer, scaler):
    """Load checkpoint-N into the models, the optimizer and the fp16 scaler, and return its `state`."""
    try:
        unet.load_state_dict(type(unet).from_pretrained(path / "unet").state_dict())
        if ema_unet is not None:
            ema_unet.load_state_dict(type(unet).from_pretrained(path / "unet_ema").state_dict())
        moments = torch.load(path / "optimizer.bin", map_location="cpu", weights_only=True)
        moments["param_groups"] = optimizer.state_dict()["param_groups"]  # the flags of this run count
        optimizer.load_state_dict(moments)
        for parameter, moments in optimizer.state.items():  # saved channels_last on CUDA, which other devices are not
            for name in ("exp_avg", "exp_avg_sq"):
                moments[name] = torch.empty_like(parameter).copy_(moments[name])
        if scaler is not None and (saved := torch.load(path / "scaler.bin", weights_only=True)):
            scaler.load_state_dict(saved)
        return json.loads((path / "trainer_state.json").read_text())
    except Exception as error:
        reason = str(error).strip().split("\n")[-1]
        fail(f"{path} is damaged or from another model ({reason}); resume from another or choose a new --output_dir")


# ------------------------------------------------------------------------------------------------- samples and output


def make_pipeline(unet, noise_scheduler, args):
    """The pipeline that is sampled from, saved and uploaded: what was trained, with the chosen sampler."""
    if args.validation_scheduler == "ddim":
        return DDIMPipeline(unet, DDIMScheduler.from_config(noise_scheduler.config))
    return DDPMPipeline(unet, DDPMScheduler.from_config(noise_scheduler.config))


def log_validation(accelerator, unet, noise_scheduler, step, args):
    """Draw --eval_batch_size images, a share on each process, into samples/step-N.png and the trackers.

    Image i starts from its own seed, so the grid does not depend on the number of processes.
    """
    training = unet.training
    pipeline = make_pipeline(unet.eval(), noise_scheduler, args)
    pipeline.set_progress_bar_config(disable=not accelerator.is_main_process, leave=False, desc="Sampling")
    rank, num_processes = accelerator.process_index, accelerator.num_processes
    share = math.ceil(args.eval_batch_size / num_processes)
    generators = [
        torch.Generator(accelerator.device).manual_seed(step_seed(args.seed, i * num_processes + rank))
        for i in range(share)
    ]
    images = pipeline(share, generators, num_inference_steps=args.ddpm_num_inference_steps, output_type="np").images
    unet.train(training)
    images = torch.from_numpy(images).permute(0, 3, 1, 2).to(accelerator.device).contiguous()
    images = accelerator.gather(images)  # [num_processes * share, C, H, W], process by process
    if accelerator.is_main_process:
        images = images.unflatten(0, (num_processes, share)).transpose(0, 1).flatten(0, 1)[: args.eval_batch_size]
        grid = make_grid(images.cpu(), nrow=math.ceil(math.sqrt(len(images))), padding=1, pad_value=0.5)
        grid = (grid * 255).round().byte().permute(1, 2, 0).numpy()
        path = Path(args.output_dir) / "samples" / f"step-{step:07d}.png"
        path.parent.mkdir(exist_ok=True)
        scale = max(1, 512 // grid.shape[1])  # so that digits of 8 px can be looked at
        Image.fromarray(grid).resize((grid.shape[1] * scale, grid.shape[0] * scale), Image.NEAREST).save(path)
        for tracker in accelerator.trackers:
            if hasattr(tracker, "log_images"):
                layout = {"dataformats": "NHWC"} if tracker.name == "tensorboard" else {}
                tracker.log_images({"samples": grid[None]}, step=step, **layout)


def read_metrics(output_dir, last_step=math.inf):
    """The records of metrics.jsonl up to a step; the line that a kill cut short is left out."""
    path = Path(output_dir) / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.is_file() else []
    return [
        record for record in map(json.loads, (x for x in lines if x.endswith("}\n"))) if record["step"] <= last_step
    ]


def plot_loss(output_dir):
    """Draw the losses in metrics.jsonl into loss.png and return the last, None without a record."""
    import matplotlib.figure  # here, because it takes half a second

    records = read_metrics(output_dir)
    figure = matplotlib.figure.Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot(xlabel="optimizer step", ylabel="loss", yscale="log")
    axes.plot([record["step"] for record in records], [record["loss"] for record in records])
    axes.grid(True, alpha=0.3)
    figure.savefig(Path(output_dir) / "loss.png")
    return records[-1]["loss"] if records else None


def save_pipeline(pipeline, args):
    """Write the pipeline folder; the one that stood there stays until the new one is whole."""
    output_dir = Path(args.output_dir)
    with saving(output_dir, f"the pipeline in {output_dir}") as unfinished:
        pipeline.save_pretrained(unfinished)
        for item in unfinished.iterdir():
            replace(output_dir / item.name, item)
        unfinished.rmdir()


def save_model_card(step, args):
    """Write README.md as the hub shows it: data, samples, loss curve and settings."""
    output_dir, loss = Path(args.output_dir), plot_loss(args.output_dir)
    name = args.hub_model_id or output_dir.resolve().name
    samples = sorted((output_dir / "samples").glob("step-*.png"))
    settings = {key: value for key, value in vars(args).items() if value is not None and not key.endswith("_dir")}
    (output_dir / "README.md").write_text(f"""---
library_name: diffusers
pipeline_tag: unconditional-image-generation
tags: [diffusers, unconditional-image-generation, diffusion-models-class]
---

# {name}

An unconditional diffusion model, trained on `{args.dataset_name or Path(args.train_data_dir).resolve().name}`
for {step} steps, to a loss of {loss}.

```python
from diffusers import DiffusionPipeline

pipeline = DiffusionPipeline.from_pretrained("{name}")
image = pipeline(num_inference_steps={args.ddpm_num_inference_steps}).images[0]
```

{f"![samples](samples/{samples[-1].name})" if samples else ""}
![loss](loss.png)

| setting | value |
|---|---|
{"".join(f"| {key} | {value} |{chr(10)}" for key, value in settings.items())}""")


# ------------------------------------------------------------------------------------------------- main


def check_processes(accelerator):
    """Refuse processes that do not know of each other: each would write the same files."""
    if int(os.environ.get("WORLD_SIZE", 1)) != accelerator.num_processes:
        fail(
            f"{os.environ['WORLD_SIZE']} processes were launched but each sees {accelerator.num_processes}: on CPUs "
            "set ACCELERATE_USE_CPU=true and launch with --multi_gpu, on GPUs give each process its own"
        )


def count_cores():
    """The number of cores for each process of this machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))


def check_launch(accelerator):
    """Refuse what would train wrongly or in vain."""
    check_processes(accelerator)
    if accelerator.distributed_type not in (DistributedType.NO, DistributedType.MULTI_GPU, DistributedType.MULTI_CPU):
        fail(f"{accelerator.distributed_type.value} is not supported: launch on one device, or on several with DDP")
    if accelerator.mixed_precision == "fp16" and accelerator.device.type == "cpu":
        fail("fp16 does nothing on a CPU: use --mixed_precision bf16 or no")


def use_cores(device):
    """The number of cores for each process; on a CPU the process takes them, if the launcher left it only one."""
    cores = count_cores()
    launched = "ACCELERATE_MIXED_PRECISION" in os.environ and os.environ.get("OMP_NUM_THREADS") == "1"
    if device.type == "cpu" and launched:
        torch.set_num_threads(cores)
    return cores


def open_output_dir(lock, args):
    """Make --output_dir and lock it, clean up what a killed run left half-written, and find the hub repository."""
    output_dir = Path(args.output_dir)
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except Timeout:
        fail(f"another process is training into {output_dir}: end it, or choose another --output_dir")
    except OSError as error:
        fail(f"--output_dir {output_dir} can't be written to ({error})")
    for leftover in output_dir.glob(".tmp-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    if args.push_to_hub:
        name, private = args.hub_model_id or output_dir.resolve().name, args.hub_private_repo or None
        try:
            args.hub_model_id = create_repo(name, private=private, exist_ok=True).repo_id
            public = private and not repo_info(args.hub_model_id).private
        except Exception as error:
            fail(f"--push_to_hub: no repository {name} ({error}); `hf auth login` first, or leave it out")
        if public:
            fail(f"--hub_private_repo: {args.hub_model_id} exists and is public; make it private, or choose another")


def start_records(accelerator, last_step, args):
    """Open the trackers and metrics.jsonl; of an earlier run the records up to `last_step` are kept."""
    if accelerator.is_main_process:
        records, output_dir = read_metrics(args.output_dir, last_step), Path(args.output_dir)
        (output_dir / ".tmp-metrics").write_text("".join(json.dumps(record) + "\n" for record in records))
        replace(output_dir / "metrics.jsonl", output_dir / ".tmp-metrics")
    try:
        shown = {key: value for key, value in vars(args).items() if value is not None}
        shown = {key: " | ".join(value) if isinstance(value, list) else value for key, value in shown.items()}
        accelerator.init_trackers(args.tracker_project_name, shown, {"wandb": {"dir": args.output_dir}})
    except Exception as error:
        fail(f"--report_to {args.report_to}: {error}; `wandb login`, or set WANDB_MODE=offline, or --report_to none")


def main(args):
    """Train; ends with status 130 or 143 after Ctrl-C or SIGTERM, and with 1 and a sentence if it can't go on."""
    output_dir, noise_scheduler = Path(args.output_dir), make_noise_scheduler(args)
    accelerator = Accelerator(
        mixed_precision=args.mixed_precision,
        log_with=None if args.report_to == "none" else args.report_to,
        project_config=ProjectConfiguration(args.output_dir, logging_dir=str(output_dir / args.logging_dir)),
    )
    device, rank, num_processes = accelerator.device, accelerator.process_index, accelerator.num_processes
    check_launch(accelerator)
    cores = use_cores(device)
    if args.allow_tf32:
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.allow_tf32 = True
    lock = FileLock(output_dir / ".lock")
    if accelerator.is_main_process:
        open_output_dir(lock, args)
    accelerator.wait_for_everyone()
    checkpoint = find_checkpoint(args)
    torch.manual_seed(args.seed)  # every process starts from the same weights
    unet = make_unet(args)
    channels = unet.config.in_channels

    # Data
    rows, column = load_rows(args)
    rows = rows.select_columns([column])
    num_workers = args.dataloader_num_workers
    if num_workers is None:  # a core per process stays free for the trainer
        num_workers = max(0, min(8, cores - 1))
    num_left_out = 0
    if args.cache_images:
        rows, num_left_out = cache_images(rows, column, args, channels, min(8, cores))
    num_images = sys.maxsize if args.streaming else len(rows)  # a stream never ends its first epoch
    images_per_micro_batch = args.train_batch_size * num_processes
    images_per_step = images_per_micro_batch * args.gradient_accumulation_steps
    steps_per_epoch = math.ceil(num_images / images_per_step)
    if args.max_train_steps is None:
        args.max_train_steps = args.num_train_epochs * steps_per_epoch

    # Models and optimizer
    memory_format = torch.channels_last if device.type == "cuda" else torch.preserve_format
    unet.to(device, memory_format=memory_format)
    ema_unet = copy.deepcopy(unet).eval().requires_grad_(False) if args.use_ema else None
    if args.gradient_checkpointing:
        unet.enable_gradient_checkpointing()
    optimizer = torch.optim.AdamW(
        unet.parameters(),
        lr=args.learning_rate,
        betas=(args.adam_beta1, args.adam_beta2),
        weight_decay=args.adam_weight_decay,
        eps=args.adam_epsilon,
        fused=accelerator.scaler is None,  # fused skips fp16 overflows by itself, unseen by Accelerate
    )
    settings = {**vars(args), "num_processes": num_processes, "num_images": num_images}
    settings["mixed_precision"] = accelerator.mixed_precision
    state = {"global_step": 0, "data_step": 0}
    if checkpoint is not None:
        state = load_checkpoint(checkpoint, unet, ema_unet, optimizer, accelerator.scaler)
        before = {**state["settings"], "resume_from_checkpoint": args.resume_from_checkpoint}
        changed = [
            f", {key} {before.get(key)} -> {value}" for key, value in settings.items() if before.get(key) != value
        ]
        accelerator.print(f"Resuming from {checkpoint}{''.join(changed)}")
    global_step, data_step = state["global_step"], state["data_step"]  # data_step also counts steps that fp16 skipped
    if len(set(gather_object([global_step]))) > 1:
        fail("the machines found different checkpoints: --output_dir must be a folder that they share")
    for group in optimizer.param_groups:
        group["initial_lr"] = args.learning_rate
    # Started at `global_step`, update k has the rate f(k); the usual start would waste update 1 on f(0) = 0.
    lr_scheduler = get_scheduler(
        args.lr_scheduler,
        optimizer,
        step_rules=args.lr_step_rules,
        num_warmup_steps=args.lr_warmup_steps,
        num_training_steps=args.max_train_steps + 1,
        num_cycles=args.lr_num_cycles,
        power=args.lr_power,
        last_epoch=global_step,
    )
    if args.compile:
        unet.compile(backend=args.compile)  # in place, which keeps the names of the weights
    unet, optimizer = accelerator.prepare(unet, optimizer)
    if ema_unet is not None:
        ema_unet = accelerator.prepare_model(ema_unet, evaluation_mode=True)  # the same autocast as in training
    plain_unet = accelerator.unwrap_model(unet)
    sample_unet = plain_unet if ema_unet is None else ema_unet

    # Loader: batches come without end, across epochs, so the device never waits for one to begin.
    batch_keys = stream_batches if args.streaming else step_batches
    dataloader = torch.utils.data.DataLoader(
        ImageDataset(rows, column, args, channels),
        batch_sampler=batch_keys(rows, args, rank, num_processes, data_step),
        collate_fn=collate,
        num_workers=num_workers,
        pin_memory=device.type == "cuda",
        worker_init_fn=ignore_signals,
    )

    # Records
    start_records(accelerator, global_step if checkpoint else -1, args)
    progress_bar = tqdm(
        total=args.max_train_steps, initial=global_step, desc="Steps", disable=not accelerator.is_main_process
    )
    received = []

    def note_signal(number, frame):
        received.append(number)
        if len(received) == 3:  # torchrun passes each on a second time; who sends a third means it
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    handlers = {number: signal.signal(number, note_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    # The processes agree on signals after each step, over gloo, so that no device has to wait.
    signal_group = torch.distributed.new_group(backend="gloo") if num_processes > 1 else None

    # Train
    unet.train()
    batches = Prefetcher(dataloader, device)
    sums = torch.zeros(4, device=device)  # since the last record: loss, weight, gradient norm, steps
    skipped_images, new_skipped, skipped_in_a_row, any_decoded = {}, {}, 0, checkpoint is not None
    window_start, window_images, stop = time.perf_counter(), 0, 0
    while global_step < args.max_train_steps and not stop:
        # `data_step` alone fixes the images and, through the seed, all that is random: noise, flips, dropout ...
        epoch, step_in_epoch = divmod(data_step, steps_per_epoch)
        step_images = min(images_per_step, num_images - step_in_epoch * images_per_step)
        micro_batches = math.ceil(step_images / images_per_micro_batch)
        step_sums = torch.zeros(2, device=device)
        for micro_batch in range(micro_batches):
            batch = next(batches)
            torch.manual_seed(step_seed(args.seed, data_step, micro_batch, rank))
            images = prepare_images(batch["pixel_values"])
            # The processes' gradients are averaged once a step, in its last backward.
            with contextlib.nullcontext() if micro_batch == micro_batches - 1 else accelerator.no_sync(unet):
                loss = compute_loss(
                    unet,
                    noise_scheduler,
                    images,
                    batch["weight"],
                    args.snr_gamma,
                    args.noise_offset,
                    args.input_perturbation,
                )
                accelerator.backward(loss)
            step_sums += torch.stack([loss.detach(), batch["weight"].sum()])
            new_skipped.update(batch["skipped"])
        data_step += 1
        grad_norm = accelerator.clip_grad_norm_(unet.parameters(), args.max_grad_norm or math.inf)
        optimizer.step()
        optimizer.zero_grad()
        if accelerator.optimizer_step_was_skipped:  # fp16 overflow: the scale is lowered, the weights are as before
            skipped_in_a_row += 1
            if skipped_in_a_row == 50:
                fail(
                    f"50 fp16 steps in a row overflowed after step {global_step}: use bf16 or a lower --learning_rate"
                )
            continue
        lr, skipped_in_a_row = lr_scheduler.get_last_lr()[0], 0
        lr_scheduler.step()
        global_step += 1
        if ema_unet is not None:
            update_ema(ema_unet, plain_unet, global_step, args)
        sums += torch.cat([step_sums, torch.stack([grad_norm, torch.ones_like(grad_norm)])])
        window_images += step_images
        progress_bar.update(1)

        flag = torch.tensor(max(received, default=0))
        if signal_group is not None:
            torch.distributed.all_reduce(flag, torch.distributed.ReduceOp.MAX, group=signal_group)
        stop, last = int(flag), global_step == args.max_train_steps
        epochs_done = data_step // steps_per_epoch if data_step % steps_per_epoch == 0 else None
        log_due = global_step % args.logging_steps == 0 or last
        checkpoint_due = global_step % args.checkpointing_steps == 0 or stop
        pipeline_due = epochs_done is not None and epochs_done % args.save_model_epochs == 0
        samples_due = epochs_done is not None and epochs_done % args.save_images_epochs == 0
        if args.validation_steps is not None:
            samples_due = global_step % args.validation_steps == 0
        if log_due or checkpoint_due or pipeline_due:  # the only place where the host waits for the device
            total_loss, total_weight, total_norm, steps = accelerator.reduce(sums).tolist()
            for name, reason in gather_object(sorted(new_skipped.items())):
                if name not in skipped_images and accelerator.is_main_process:
                    progress_bar.write(f"Skipped {name} ({reason})", file=sys.stderr)
                skipped_images[name] = reason
            new_skipped = {}
            any_decoded = any_decoded or total_weight > 0
            if total_weight == 0 and (window_images >= 100 or (last and not any_decoded)):
                fail(f"none of the last {window_images} images could be decoded")
            if not math.isfinite(total_loss + total_norm):
                kept = find_checkpoints(output_dir)
                fail(
                    f"the loss is not finite at step {global_step} (last checkpoint: {kept[-1] if kept else 'none'}); "
                    "try a lower --learning_rate or more --lr_warmup_steps"
                )
        if log_due and total_weight > 0:
            now = time.perf_counter()
            record = {
                "step": global_step,
                "epoch": epoch,
                "loss": total_loss / total_weight,
                "lr": lr,
                "grad_norm": total_norm / steps,
                "images_per_second": window_images / (now - window_start),
                "data_wait": batches.waited / (now - window_start),  # share of the time
                "skipped_images": len(skipped_images) + num_left_out,
            }
            progress_bar.set_postfix_str(
                f"loss={record['loss']:.4f}, lr={lr:.1e}, {record['images_per_second']:.1f} img/s, "
                f"{record['data_wait']:.1%} waiting for data"
            )
            if accelerator.is_main_process:
                with (output_dir / "metrics.jsonl").open("a") as file:
                    file.write(json.dumps(record) + "\n")
            accelerator.log({key: value for key, value in record.items() if key != "step"}, step=global_step)
            sums.zero_()
            window_start, window_images, batches.waited = now, 0, 0.0

        pause = time.perf_counter()
        if checkpoint_due:
            state = {"global_step": global_step, "data_step": data_step, "settings": settings}
            save_checkpoint(accelerator, unet, ema_unet, optimizer, state, args)
        if pipeline_due and not last and not stop and accelerator.is_main_process:
            save_pipeline(make_pipeline(sample_unet, noise_scheduler, args), args)
            save_model_card(global_step, args)
        if samples_due and not last and not stop:
            log_validation(accelerator, sample_unet, noise_scheduler, global_step, args)
        window_start += time.perf_counter() - pause

    batches.close()
    progress_bar.close()
    for number, handler in handlers.items():
        signal.signal(number, handler)
    if stop:
        accelerator.print(
            f"Stopped by {signal.Signals(stop).name} after step {global_step} of {args.max_train_steps}; "
            "the same command with --resume_from_checkpoint latest goes on from there"
        )
        accelerator.end_training()
        sys.exit(128 + stop)
    if accelerator.is_main_process:  # before the samples, which may take longer than a preempted job has left
        save_pipeline(make_pipeline(sample_unet, noise_scheduler, args), args)
    log_validation(accelerator, sample_unet, noise_scheduler, global_step, args)
    if accelerator.is_main_process:
        save_model_card(global_step, args)
    accelerator.wait_for_everyone()
    time.sleep(0.1)  # torch 2.11 can hang on the way out if gloo's thread has not yet let go of the last gather
    if accelerator.is_main_process and args.push_to_hub:
        files = ["model_index.json", "README.md", "unet/*", "scheduler/*", "samples/*", "loss.png"]
        try:
            upload_folder(repo_id=args.hub_model_id, folder_path=output_dir, allow_patterns=files)
        except Exception as error:
            fail(f"the upload to {args.hub_model_id} failed ({error}); the pipeline is whole in {output_dir}")
    accelerator.print(f"Done: pipeline, samples/ and loss.png are in {output_dir}")
    lock.release()
    accelerator.end_training()


if __name__ == "__main__":
    main(parse_args())
