# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "accelerate>=1.13,<2", "datasets>=5.1,<6", "diffusers>=0.36,<1", "numpy>=2,<3",
#   "tensorboard>=2.20,<3", "torch>=2.11,<3", "transformers>=5.17,<6", "xxhash>=3.5,<5",
# ]
# ///
"""Train the U-Net of Stable Diffusion on a latent cache: train_text_to_image.py in one short file.

    uv run minimal/precompute_latents.py         # makes the cache of the demo: drawings of animals
    uv run minimal/train_text_to_image.py        # the demo, minutes on a CPU
    python minimal/train_text_to_image.py --latents_dir latents-photos \\
        --pretrained_model_name_or_path my-pipeline --max_train_steps 10000 \\
        --validation_prompts "a red bicycle" "a blue bicycle"

At the same flags (on a CPU, with the same OMP_NUM_THREADS) it ends with the same bits as the big
script, in the U-Net and in its average: on one process or several, with accumulation, and after a
kill. To resume, run the same command again. The big script also checks that the cache is intact and
fits the models. Left out here: SDXL, LoRA, training from images, several sizes or captions, masks,
fp16, other optimizers and losses, held-out loss, the report, most errors.
"""

import argparse
import json
from pathlib import Path

parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
add = parser.add_argument
add("--latents_dir", type=Path, help="cache of precompute_latents.py (default: the demo's)")
add("--pretrained_model_name_or_path", help="the pipeline that the cache was made with")
add("--unet_config_name_or_path", help="train a new U-Net with this config, not the pretrained one")
add("--resolution", type=int, help="that of the cache")
add("--random_flip", action="store_true", help="mirror half of the images; the cache must have it")
add("--caption_dropout", type=float, default=0.1, help="share of captions to leave empty")
add("--output_dir", type=Path, default="sd-model-finetuned")
add("--train_batch_size", type=int, default=16, help="images per process and micro-batch")
add("--gradient_accumulation_steps", type=int, default=1, help="micro-batches per step")
add("--max_train_steps", type=int)
add("--learning_rate", type=float, default=1e-4)
add("--lr_scheduler", default="constant")
add("--lr_warmup_steps", type=int, help="default: 500; 0 if the rate is constant")
add("--prediction_type", choices=["epsilon", "v_prediction"], help="default: the pipeline's")
add("--snr_gamma", type=float, help="min-SNR weighting (arXiv:2303.09556); 5 is usual")
add("--mixed_precision", choices=["no", "bf16"], help="default: as accelerate launch says")
add("--checkpointing_steps", type=int, default=500)
add("--logging_steps", type=int, default=10)
add("--report_to", choices=["tensorboard", "wandb", "none"], default="tensorboard")
add("--validation_prompts", nargs="+", help="prompts of the samples (default: no samples)")
add("--validation_steps", type=int, help="between samples (default: those between checkpoints)")
add("--num_validation_images", type=int, default=4, help="samples of each prompt")
add("--num_inference_steps", type=int, default=20, help="denoising steps of a sample")
add("--guidance_scale", type=float, default=7.5, help="of the samples; 1 is no guidance")
add("--seed", type=int, default=0)
args = parser.parse_args()
if args.latents_dir is None:  # the demo of the big script; flags that are given still win
    folders = [folder / "demo" for folder in Path(__file__).resolve().parents]
    demo = next((folder for folder in folders if (folder / "digits_unet.json").exists()), None)
    if demo is None:
        parser.error(
            "without flags this runs a demo, which is only in the script's repository: "
            "give --latents_dir, --pretrained_model_name_or_path and --max_train_steps"
        )
    parser.set_defaults(
        latents_dir="latents-animals",
        pretrained_model_name_or_path=str(demo / "drawings"),
        output_dir="sd-animals-minimal",
        train_batch_size=16,
        max_train_steps=300,
        learning_rate=1e-3,
        lr_scheduler="cosine",
        lr_warmup_steps=20,
        snr_gamma=5,
        validation_prompts=["a blue dog on pink", "a purple dolphin", "a red goat on blue"],
        guidance_scale=1.5,
    )
    args = parser.parse_args()
if not (args.pretrained_model_name_or_path and args.max_train_steps):
    parser.error("--pretrained_model_name_or_path and --max_train_steps are needed")
for name, value in vars(args).items():  # a count is at least 1, and nan is no number
    least = 1 if isinstance(value, int) and name not in ("seed", "lr_warmup_steps") else 0
    if type(value) in (int, float) and not least <= value < float("inf"):
        parser.error(f"--{name} {value} is out of range")
if not (args.latents_dir / "state.json").is_file():
    parser.error(f"no cache in {args.latents_dir}: run precompute_latents.py")
cache = json.loads((args.latents_dir / "cache.json").read_text())
plain = {"latents": "moments", "text_cache": "embeddings", "features": []}
if any(cache.get(name) != value for name, value in plain.items()):
    parser.error(f"{args.latents_dir} is no plain cache of embeddings: use the big script")
made = cache["transform"]
shape = cache["latents_shape"]
if args.random_flip > made["random_flip"] or args.resolution not in (None, made["resolution"]):
    parser.error(f"{args.latents_dir} was not made with this --random_flip and --resolution")
STATE = "minimal_train_text_to_image.pt"  # the one file of a checkpoint
checkpoints = {int(path.name[11:]): path for path in args.output_dir.glob("checkpoint-[0-9]*")}
is_ours = all((path / STATE).is_file() for path in checkpoints.values())
if not is_ours or (not checkpoints and any(args.output_dir.glob("*.json"))):
    parser.error(f"{args.output_dir} holds what another script saved: choose another folder")

# These imports take seconds. They come after the flags, so that --help and mistakes answer at once.
import copy
import functools
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import numpy as np
import torch
import torch.nn.functional as F
import xxhash
from accelerate import Accelerator
from datasets import load_from_disk
from diffusers import DDIMScheduler, DDPMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from diffusers.optimization import get_scheduler
from diffusers.training_utils import compute_snr
from diffusers.utils import make_image_grid
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


# ---- The data. A row has the distribution that the VAE gave for an image, as mean and standard
# deviation, and the embeddings of its caption. The files are memory-mapped float16.
columns = ["latents", "prompt_embeds"] + ["latents_flipped"] * args.random_flip
rows = load_from_disk(str(args.latents_dir)).select_columns(columns).with_format("torch")
empty_prompt = torch.tensor(np.load(args.latents_dir / "empty_prompt.npy")).float().to(device)


# To bring a data set of your own, replace `rows`, of which only the length is used elsewhere, and
# `load_batch`: epoch, numbers of rows -> tensors with an entry for each of them. What is random in
# it, such as an augmentation, is drawn from a key_seed of epoch and row.
def load_batch(epoch, own):
    batch = rows[own]
    if args.random_flip:  # by the third number of a key; the first two have placed the crop
        keys = [key_seed("image", args.seed, epoch, row) for row in own]
        flipped = torch.tensor([np.random.default_rng(key).random(4)[2] < 0.5 for key in keys])
        flipped = flipped[:, None]
        batch["latents"] = torch.where(flipped, batch["latents_flipped"], batch["latents"])
    return {name: batch[name] for name in ("latents", "prompt_embeds")}


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


# ---- The model, its average and the optimizer. All are float32, because bf16 is too coarse for the
# small updates of a weight. Mixed precision lowers only the precision of the computation.
base = args.pretrained_model_name_or_path
source = args.unet_config_name_or_path
torch.manual_seed(args.seed)  # every process starts from the same weights
if source:
    unet = UNet2DConditionModel.from_config(UNet2DConditionModel.load_config(source))
else:
    unet = UNet2DConditionModel.from_pretrained(base, subfolder="unet")
channels = shape[0] // 2  # of the input: add those that are concatenated to the noisy latents
if unet.config.in_channels != channels:
    sys.exit(
        f"the U-Net takes {unet.config.in_channels} channels, but gets {channels}: give it the "
        "others where the model is called, and in draw_samples"
    )
unet.register_to_config(sample_size=shape[1])  # the size that the pipeline draws
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
# Betas and weight decay are torch's defaults. `fused` updates all weights in one go.
optimizer = torch.optim.AdamW(trained.parameters(), lr=args.learning_rate, fused=True)
rates = [group["lr"] for group in optimizer.param_groups]  # a group may have its own
flags = {"prediction_type": args.prediction_type} if args.prediction_type else {}
noise_scheduler = DDPMScheduler.from_pretrained(base, subfolder="scheduler", **flags)
config = {name: value for name, value in unet.config.items() if name[0] != "_"}  # no paths
config["prediction_type"] = noise_scheduler.config.prediction_type
predicts_velocity = config["prediction_type"] == "v_prediction"

# ---- Resume from the newest checkpoint. Step and images seen are the whole position of a run: the
# order of the data and the noise follow from them.
step = images_seen = 0
if checkpoints:
    newest = checkpoints[max(checkpoints)] / STATE
    saved = torch.load(newest, map_location="cpu", weights_only=True)
    if saved["config"] != config or saved["trained"].keys() != trained.state_dict().keys():
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


# The average as a pipeline. VAE and text encoder are read from the disk each time, so that the
# training does not have to hold them.
def make_pipeline():
    sampler = DDIMScheduler.from_config(noise_scheduler.config)
    parts = {"unet": ema["unet"], "scheduler": sampler, "safety_checker": None}
    parts["requires_safety_checker"] = False
    pipeline = StableDiffusionPipeline.from_pretrained(base, **parts)
    pipeline.text_encoder.float()  # transformers loads the precision of the files
    return pipeline


# Samples of the average, from the same noise each time. They do not change the training, whose
# random numbers are seeded anew in each micro-batch. They are drawn before step 1 too, and show the
# model as it was. A model with further inputs needs a pipeline of its own here, which gives them.
def draw_samples():
    pipeline = make_pipeline().to(device)
    pipeline.set_progress_bar_config(disable=True)
    images = []
    for prompt in args.validation_prompts:
        for number in range(args.num_validation_images):  # one by one: this takes less memory
            seed = key_seed("sample", args.seed, number)
            images += pipeline(
                prompt,
                num_inference_steps=args.num_inference_steps,
                guidance_scale=args.guidance_scale,
                generator=torch.Generator(device).manual_seed(seed),
            ).images
    del pipeline
    picture = make_image_grid(images, len(args.validation_prompts), args.num_validation_images)
    (args.output_dir / "samples").mkdir(parents=True, exist_ok=True)
    picture.save(args.output_dir / f"samples/step-{step:07d}.png")
    for tracker in accelerator.trackers:
        layout = {"dataformats": "NHWC"} if tracker.name == "tensorboard" else {}
        tracker.log_images({"samples": np.asarray(picture)[None]}, step=step, **layout)


# Of a run that was killed, TensorBoard drops what it logged after this step.
about = {name: str(value) for name, value in vars(args).items()}
accelerator.init_trackers(Path(__file__).stem, about, {"tensorboard": {"purge_step": step + 1}})

if step == 0 and args.validation_prompts and accelerator.is_main_process:
    draw_samples()

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
        torch.manual_seed(key_seed("step", args.seed, step, number, rank))
        mean, std = batch["latents"].unflatten(1, shape).chunk(2, dim=1)
        latents = mean + std * torch.randn(mean.shape, device=device)  # new ones each time
        latents = (latents - cache["vae"]["shift_factor"]) * cache["vae"]["scaling_factor"]
        # Guidance needs a model that also draws without a caption (arXiv:2207.12598).
        dropped = torch.rand(len(latents), device=device) < args.caption_dropout
        prompts = batch["prompt_embeds"].unflatten(1, empty_prompt.shape)
        prompts = torch.where(dropped[:, None, None], empty_prompt, prompts)
        # The loss of DDPM (arXiv:2006.11239, eq. 14). Noise is added in float32: in bf16 the first
        # timesteps would get none at all.
        noise = torch.randn(latents.shape, device=device)
        timesteps = torch.randint(len(noise_scheduler), [len(latents)], device=device)
        noisy_latents = noise_scheduler.add_noise(latents, noise, timesteps)
        target = noise
        if predicts_velocity:
            target = noise_scheduler.get_velocity(latents, noise, timesteps)
        if args.snr_gamma:  # timesteps with little noise count less, or they would dominate
            snr = compute_snr(noise_scheduler, timesteps) + predicts_velocity
            weight = weight * snr.clamp(max=args.snr_gamma) / snr
        # Only in the step's last micro-batch the processes exchange their gradients.
        with ExitStack() as stack:
            for model in models.values() if number + 1 < len(micro_batches) else []:
                stack.enter_context(accelerator.no_sync(model))
            prediction = models["unet"](noisy_latents, timesteps, prompts).sample.float()
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
        state |= {"optimizer": optimizer.state_dict(), "config": config}
        with open(unfinished / STATE, "wb") as file:
            torch.save(state | {"step": step, "images_seen": images_seen}, file)
            os.fsync(file.fileno())
        unfinished.rename(folder)
    draw_every = args.validation_steps or args.checkpointing_steps
    is_drawn = not stop and (step % draw_every == 0 or step == args.max_train_steps)
    if is_drawn and args.validation_prompts and accelerator.is_main_process:
        draw_samples()

# ---- The end: the average in a pipeline, or after a signal the status that a shell expects.
if accelerator.is_main_process and not stop:
    make_pipeline().save_pretrained(args.output_dir)
accelerator.wait_for_everyone()  # or the launcher would end the first process while it saves
accelerator.print("Stopped: the same command resumes" if stop else f"Done: see {args.output_dir}")
accelerator.end_training()
if stop:
    sys.exit(128 + stop)
