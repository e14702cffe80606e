# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "accelerate>=1.13,<2", "datasets>=5.1,<6", "diffusers>=0.36,<1", "numpy>=2,<3",
#   "pillow>=11.3,<14", "tensorboard>=2.20,<3", "torch>=2.11,<3", "torchvision>=0.26,<1",
#   "xxhash>=3.5,<5",
# ]
# ///
"""Train an unconditional diffusion model on images: train_unconditional.py in one short file.

    uv run minimal/train_unconditional.py      # the demo: handwritten digits, minutes on a CPU
    python minimal/train_unconditional.py --train_data_dir photos \\
        --model_config_name_or_path configs/unet_64.json --max_train_steps 100000

At the same flags (on a CPU, with the same OMP_NUM_THREADS) it ends with the same bits as the big
script, in the U-Net and in its average: on one process or several, with accumulation, and after a
kill. To resume, run the same command again.

The big script reads some images differently: it rotates by EXIF, puts transparent images on white,
scales 16 bits to 8, and skips masks and broken files. Left out here: data sets on the hub, streams
and arrays, pretrained U-Nets, fp16, other optimizers and losses, held-out loss, the report, the
hub, deleting old checkpoints, and most error messages.
"""

import argparse
from pathlib import Path

parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
add = parser.add_argument
add("--train_data_dir", help="folder of images or parquet files (default: the demo)")
add("--model_config_name_or_path", help="config of the U-Net: a file, folder or hub id")
add("--resolution", type=int, default=64, help="side of the square images in pixels")
add("--random_flip", action="store_true", help="mirror half of the images, at random")
add("--output_dir", type=Path, default="ddpm-model-64")
add("--train_batch_size", type=int, default=16, help="images per process and micro-batch")
add("--gradient_accumulation_steps", type=int, default=1, help="micro-batches per step")
add("--max_train_steps", type=int)
add("--learning_rate", type=float, default=1e-4)
add("--lr_scheduler", default="cosine")
add("--lr_warmup_steps", type=int, help="default: 500; 0 if the rate is constant")
add("--prediction_type", choices=["epsilon", "v_prediction"], default="epsilon")
add("--ddpm_beta_schedule", default="linear", help="noise schedule of DDPMScheduler")
add("--snr_gamma", type=float, help="min-SNR weighting (arXiv:2303.09556); 5 is usual")
add("--mixed_precision", choices=["no", "bf16"], help="default: as accelerate launch says")
add("--checkpointing_steps", type=int, default=500)
add("--logging_steps", type=int, default=10)
add("--report_to", choices=["tensorboard", "wandb", "none"], default="tensorboard")
add("--validation_steps", type=int, help="between samples (default: those between checkpoints)")
add("--eval_batch_size", type=int, default=16, help="samples to draw")
add("--seed", type=int, default=0)
args = parser.parse_args()
if args.train_data_dir is None:  # the demo of the big script; flags that are given still win
    folders = [folder / "demo" for folder in Path(__file__).resolve().parents]
    demo = next((folder for folder in folders if (folder / "digits_unet.json").exists()), None)
    if demo is None:
        parser.error(
            "without flags this runs a demo, which is only in the script's repository: "
            "give --train_data_dir, --model_config_name_or_path and --max_train_steps"
        )
    parser.set_defaults(
        train_data_dir=demo / "digits",
        model_config_name_or_path=demo / "digits_unet.json",
        output_dir="ddpm-digits-minimal",
        resolution=8,
        train_batch_size=64,
        max_train_steps=2900,
        learning_rate=4e-3,
        lr_warmup_steps=100,
        prediction_type="v_prediction",
        ddpm_beta_schedule="squaredcos_cap_v2",
        snr_gamma=5,
        eval_batch_size=64,
    )
    args = parser.parse_args()
if not Path(args.train_data_dir).is_dir():
    parser.error(f"--train_data_dir {args.train_data_dir} is not a folder")
if not (args.model_config_name_or_path and args.max_train_steps):
    parser.error("--model_config_name_or_path and --max_train_steps are needed")
for name, value in vars(args).items():  # a count is at least 1, and nan is no number
    least = 1 if isinstance(value, int) and name not in ("seed", "lr_warmup_steps") else 0
    if type(value) in (int, float) and not least <= value < float("inf"):
        parser.error(f"--{name} {value} is out of range")
STATE = "minimal_train_unconditional.pt"  # the one file of a checkpoint
checkpoints = {int(path.name[11:]): path for path in args.output_dir.glob("checkpoint-[0-9]*")}
is_ours = all((path / STATE).is_file() for path in checkpoints.values())
if not is_ours or (not checkpoints and any(args.output_dir.glob("*.json"))):
    parser.error(f"{args.output_dir} holds what another script saved: choose another folder")

# These imports take seconds. They come after the flags, so that --help and mistakes answer at once.
import copy
import functools
import io
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import datasets
import numpy as np
import torch
import torch.nn.functional as F
import torchvision.transforms.v2.functional as TF
import xxhash
from accelerate import Accelerator
from diffusers import DDIMPipeline, DDPMScheduler, UNet2DModel
from diffusers.optimization import get_scheduler
from diffusers.training_utils import compute_snr
from diffusers.utils import make_image_grid
from PIL import Image
from torch.optim.swa_utils import get_ema_multi_avg_fn

tracker = None if args.report_to == "none" else args.report_to
options = {"log_with": tracker, "project_dir": args.output_dir / "logs"}
accelerator = Accelerator(mixed_precision=args.mixed_precision, **options)
device = accelerator.device
world = accelerator.num_processes
rank = accelerator.process_index

# ---- Ctrl-C and SIGTERM end the run after the current step. The processes have to agree on it, or
# some would wait for the others. They do so over gloo, on the CPU, so that no GPU has to wait.
received = [0]
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, frame: received.append(number))
gloo = torch.distributed.new_group(backend="gloo") if world > 1 else None


def agree_on_signal():
    number = torch.tensor(received[-1])
    if gloo:
        torch.distributed.all_reduce(number, torch.distributed.ReduceOp.MAX, group=gloo)
    return int(number)


# Random numbers are drawn from a seed that is computed from what they are for, for example ("step",
# seed, step, ...). So a resumed run draws the same ones, and no generator has to be saved.
def key_seed(purpose, *key):
    return xxhash.xxh3_64_intdigest(" ".join([purpose, *map(str, key)]).encode())


# ---- The model, its average and the optimizer. All are float32, because bf16 is too coarse for the
# small updates of a weight. Mixed precision lowers only the precision of the computation.
config = UNet2DModel.load_config(args.model_config_name_or_path) | {"sample_size": args.resolution}
torch.manual_seed(args.seed)  # every process starts from the same weights
unet = UNet2DModel.from_config(config)
channels = 1 if unet.config.in_channels == 1 else 3  # of the images: see `load_image`
if not unet.config.in_channels == unet.config.out_channels == channels:
    sys.exit(
        f"the U-Net takes {unet.config.in_channels} channels and returns "
        f"{unet.config.out_channels}, but images have {channels}: give it the others where the "
        "model is called, and draw the samples with a pipeline that does so too"
    )
# channels_last is the fastest for convolutions on a GPU, if group norms keep it (torch 2.15 does).
trial = torch.empty(1, 64, 2, 2, device=device, memory_format=torch.channels_last)
keeps_it = F.group_norm(trial, 32).is_contiguous(memory_format=torch.channels_last)
layout = torch.channels_last if device.type == "cuda" and keeps_it else torch.preserve_format
pin = torch.Tensor.pin_memory if device.type == "cuda" else torch.Tensor.cpu  # so no copy waits
# What is trained: each of these models is optimized, averaged, clipped and saved. A further one,
# such as a projection, is added here alone. Hooks come after the copy, or the average has them too.
trained = torch.nn.ModuleDict({"unet": unet})
trained.to(device, memory_format=layout)
ema = copy.deepcopy(trained).eval().requires_grad_(False)
# Betas and weight decay are those of diffusers' script. `fused` updates all weights in one go.
adam = {"betas": (0.95, 0.999), "weight_decay": 1e-6, "fused": True}
optimizer = torch.optim.AdamW(trained.parameters(), lr=args.learning_rate, **adam)
rates = [group["lr"] for group in optimizer.param_groups]  # a group may have its own
objective = {"prediction_type": args.prediction_type, "beta_schedule": args.ddpm_beta_schedule}
noise_scheduler = DDPMScheduler(**objective)
predicts_velocity = args.prediction_type == "v_prediction"

# ---- The data. The rows hold image files, which are decoded when a step needs them.
# Folders such as val/ are left out. `datasets` would look for these words in names of images, too.
splits = {"test", "testing", "eval", "evaluation", "dev", "val", "valid", "validation"}
root = Path(args.train_data_dir)
names = [path.relative_to(root) for path in root.rglob("*") if path.is_file()]
names = [name for name in names if not any(p in splits or p[0] == "." for p in name.parts)]
images = [name for name in names if name.suffix.lower() in Image.registered_extensions()]
images = sorted(str(root / name) for name in images)
files = {"path": str(root)}
if images and not any(root.rglob("*.parquet")):  # a card may have pictures
    files = {"path": "imagefolder", "data_files": {"train": images}}
try:
    rows = datasets.load_dataset(**files, split="train").select_columns("image")
except Exception as error:
    sys.exit(f"{args.train_data_dir} can't be read as images or parquet files alone: {error}")
rows = rows.cast_column("image", datasets.Image(decode=False))
accelerator.print(f"{len(rows)} images in split 'train'")
threads = ThreadPoolExecutor(8)  # Pillow and torchvision release Python's lock


# A file -> uint8 [channels, resolution, resolution]. Crop and flip depend on the epoch and the row,
# not on who reads it and when.
def load_image(epoch, row, source):
    y, x, flip, _ = np.random.default_rng(key_seed("image", args.seed, epoch, row)).random(4)
    image = Image.open(io.BytesIO(source["bytes"]) if source["bytes"] else source["path"])
    mode = "L" if unet.config.in_channels == 1 else "RGB"
    image.draft(mode, image.size)  # a JPEG stores the brightness: take that, not one computed anew
    side = min(image.size)  # of the largest square, which lies at a random place
    crop = [round((image.height - side) * y), round((image.width - side) * x), side, side]
    pixels = TF.pil_to_tensor(image.convert(mode))
    pixels = TF.resized_crop(pixels, *crop, [args.resolution] * 2, Image.BICUBIC, antialias=True)
    return pixels.flip(-1) if args.random_flip and flip < 0.5 else pixels


# To bring a data set of your own, replace `rows`, of which only the length is used elsewhere, and
# `load_batch`: epoch, numbers of rows -> a tensor with an entry for each of them. What is random in
# it, such as an augmentation, is drawn from a key_seed of epoch and row.
def load_batch(epoch, own):
    images = threads.map(load_image, [epoch] * len(own), own, rows[own]["image"])
    return {"images": torch.stack([*images])}


# ---- A step's images, in the order of the epoch: a list of micro-batches, each with the weights of
# this process's images. The last step of an epoch takes those that are left, so that an epoch has
# each image once. A thread loads the next step while the device computes one.
@functools.lru_cache(1)
def shuffle(epoch):
    return np.random.default_rng(key_seed("epoch", args.seed, epoch)).permutation(len(rows))


def load_step(images_seen):
    epoch, start = divmod(images_seen, len(rows))
    per_micro_batch = args.train_batch_size * world
    end = start + per_micro_batch * args.gradient_accumulation_steps
    taken = shuffle(epoch)[start:end].tolist()
    micro_batches = []
    for first in range(0, len(taken), per_micro_batch):
        # With these weights the sum over micro-batches, averaged over processes by DDP, is the mean
        # over the step's images. A process that gets no image computes one with weight 0, for DDP.
        micro = taken[first : first + per_micro_batch]
        own = micro[rank::world] or micro[:1]
        weight = torch.full([len(own)], world / len(taken) * (rank < len(micro)))
        batch = load_batch(epoch, own) | {"weight": weight}
        micro_batches.append({name: pin(value) for name, value in batch.items()})
    return micro_batches, len(taken)


# ---- Resume from the newest checkpoint. Step and images seen are the whole position of a run: the
# order of the data and the noise follow from them.
step = images_seen = 0
if checkpoints:
    newest = checkpoints[max(checkpoints)] / STATE
    saved = torch.load(newest, map_location="cpu", weights_only=True)
    is_same = saved["config"] == config | objective
    if not is_same or saved["trained"].keys() != trained.state_dict().keys():
        sys.exit(f"{newest} is of another U-Net or objective: choose another --output_dir")
    trained.load_state_dict(saved["trained"])
    ema.load_state_dict(saved["ema"])
    optimizer.load_state_dict(saved["optimizer"])
    step = saved["step"]
    images_seen = saved["images_seen"]
    accelerator.print(f"Resuming from {newest}")
# The checkpoint has the learning rates of its last step. Those given above may be others by now.
for group, rate in zip(optimizer.param_groups, rates, strict=True):
    group |= {"lr": rate, "initial_lr": rate}
# The schedule starts after its step 0, whose rate is 0, so that no step is wasted. `prepare` does
# not get it, because it would count each step once for each process.
usual = 0 if args.lr_scheduler == "constant" else 500
warmup = usual if args.lr_warmup_steps is None else args.lr_warmup_steps
schedule = {"constant": "constant_with_warmup"}.get(args.lr_scheduler, args.lr_scheduler)
counts = {"num_warmup_steps": warmup, "num_training_steps": args.max_train_steps + 1}
lr_scheduler = get_scheduler(schedule, optimizer, **counts, last_epoch=step)
# The models with autocast, and with several processes in DDP. They share weights with `trained`.
models = {name: accelerator.prepare(model) for name, model in trained.items()}
optimizer = accelerator.prepare(optimizer)
# Of a run that was killed, TensorBoard drops what it logged after this step.
about = {name: str(value) for name, value in vars(args).items()}
accelerator.init_trackers(Path(__file__).stem, about, {"tensorboard": {"purge_step": step + 1}})

# ---- The training.
trained.train()
losses = []
ahead = ThreadPoolExecutor(1)
coming = ahead.submit(load_step, images_seen)
stop = agree_on_signal()
while step < args.max_train_steps and not stop:
    micro_batches, count = coming.result()
    images_seen += count
    coming = ahead.submit(load_step, images_seen)
    losses.append(torch.zeros((), device=device))
    for number, batch in enumerate(micro_batches):
        batch = {name: each.to(device, non_blocking=True) for name, each in batch.items()}
        weight = batch["weight"]
        # The loss of DDPM (arXiv:2006.11239, eq. 14). Noise is added in float32: in bf16 the first
        # timesteps would get none at all.
        torch.manual_seed(key_seed("step", args.seed, step, number, rank))
        images = batch["images"] / 127.5 - 1  # in [-1, 1]
        noise = torch.randn(images.shape, device=device)
        timesteps = torch.randint(len(noise_scheduler), [len(images)], device=device)
        noisy_images = noise_scheduler.add_noise(images, noise, timesteps)
        target = noise
        if predicts_velocity:
            target = noise_scheduler.get_velocity(images, noise, timesteps)
        if args.snr_gamma:  # timesteps with little noise count less, or they would dominate
            snr = compute_snr(noise_scheduler, timesteps) + predicts_velocity
            weight = weight * snr.clamp(max=args.snr_gamma) / snr
        # Only in the step's last micro-batch the processes exchange their gradients.
        with ExitStack() as stack:
            for model in models.values() if number + 1 < len(micro_batches) else []:
                stack.enter_context(accelerator.no_sync(model))
            prediction = models["unet"](noisy_images, timesteps).sample.float()
            loss = F.mse_loss(prediction, target, reduction="none").mean(dim=(1, 2, 3))
            loss = (weight * loss).sum()
            accelerator.backward(loss)
        losses[-1] += loss.detach()
    accelerator.clip_grad_norm_(trained.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    # The average warms up, as in diffusers' EMAModel: the first step copies the weights.
    decay = min(0.9999, 1 - step**-0.75)
    get_ema_multi_avg_fn(decay)([*ema.parameters()], [*trained.parameters()], None)
    # Until here nothing has waited for the GPU. A record does, and all processes take part in it.
    if step % args.logging_steps == 0:
        loss = accelerator.reduce(torch.stack(losses).mean(), "mean").item()
        lr = lr_scheduler.get_last_lr()[0]
        accelerator.print(f"step {step}, loss {loss:.4f}, lr {lr:.3g}")
        accelerator.log({"loss": loss, "lr": lr}, step=step)
        losses.clear()
    lr_scheduler.step()
    stop = agree_on_signal()
    is_due = stop or step % args.checkpointing_steps == 0 or step == args.max_train_steps
    if is_due and accelerator.is_main_process:
        # A checkpoint is complete or absent: it gets its name when all of it is on the disk.
        folder = args.output_dir / f"checkpoint-{step}"
        unfinished = folder.with_name(f".unfinished-{folder.name}")
        unfinished.mkdir(parents=True, exist_ok=True)  # a killed run may have left it
        state = {"trained": trained.state_dict(), "ema": ema.state_dict()}
        state |= {"optimizer": optimizer.state_dict(), "config": config | objective}
        with open(unfinished / STATE, "wb") as file:
            torch.save(state | {"step": step, "images_seen": images_seen}, file)
            os.fsync(file.fileno())
        unfinished.rename(folder)
    draw_every = args.validation_steps or args.checkpointing_steps
    is_drawn = not stop and (step % draw_every == 0 or step == args.max_train_steps)
    if is_drawn and accelerator.is_main_process:
        # Samples of the average, from the same noise each time. They do not change the training,
        # whose random numbers are seeded anew in each micro-batch.
        pipeline = DDIMPipeline(ema["unet"], noise_scheduler)
        pipeline.set_progress_bar_config(disable=True)
        generator = torch.Generator(device).manual_seed(key_seed("sample", args.seed))
        images = pipeline(args.eval_batch_size, generator=generator).images
        count = len(images)
        high = max(n for n in range(1, count + 1) if count % n == 0 and n * n <= count)
        picture = make_image_grid(images, high, count // high)  # as square as the count allows
        (args.output_dir / "samples").mkdir(parents=True, exist_ok=True)
        picture.save(args.output_dir / f"samples/step-{step:07d}.png")
        for tracker in accelerator.trackers:
            layout = {"dataformats": "NHWC"} if tracker.name == "tensorboard" else {}
            tracker.log_images({"samples": np.asarray(picture)[None]}, step=step, **layout)

# ---- The end: the average as a pipeline, or after a signal the status that a shell expects.
if accelerator.is_main_process and not stop:
    DDIMPipeline(ema["unet"], noise_scheduler).save_pretrained(args.output_dir)
accelerator.wait_for_everyone()  # or the launcher would end the first process while it saves
accelerator.print("Stopped: the same command resumes" if stop else f"Done: see {args.output_dir}")
accelerator.end_training()
if stop:
    sys.exit(128 + stop)
