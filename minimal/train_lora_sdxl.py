# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "accelerate>=1.13,<2", "datasets>=5.1,<6", "diffusers>=0.36,<1", "numpy>=2,<3", "peft>=0.18,<1",
#   "pillow>=11.3,<14", "safetensors>=0.5,<1", "tensorboard>=2.20,<3", "torch>=2.11,<3",
#   "torchcodec>=0.16,<1", "torchvision>=0.26,<1", "transformers>=5.17,<6", "xxhash>=3.5,<5",
# ]
# ///
"""Train a LoRA of SDXL, or Stable Diffusion 1 or 2: train_text_to_image.py --rank in one file.

    uv run minimal/train_lora_sdxl.py --train_data_dir photos --instance_prompt "a sks dog" \\
        --pretrained_model_name_or_path stabilityai/stable-diffusion-xl-base-1.0 \\
        --mixed_precision bf16 --gradient_checkpointing --train_batch_size 1 \\
        --gradient_accumulation_steps 4 --max_train_steps 500 \\
        --validation_prompts "a sks dog on a beach"

Images are a folder. A caption is photo.txt beside photo.png, or the column "text" of
metadata.jsonl. The LoRA is pytorch_lora_weights.safetensors for diffusers, and the same with
_kohya in its name for ComfyUI, A1111 and sd-scripts; all read it at strength 1.

At the same flags and with --cache_latents (on a CPU, with the same OMP_NUM_THREADS) the big script
ends with the same bits, in the LoRA and in its average: on one process or several, with
accumulation, and after a kill. To resume, run the same command again. Left out here: text encoders'
LoRAs, sizes other than squares, mirrored images, masks, fp16, bases in 8 or 4 bits, other
optimizers and layers, held-out loss, most errors.
"""

import argparse
from pathlib import Path

parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
add = parser.add_argument
add("--train_data_dir", type=Path, help="folder of images")
add("--instance_prompt", help="caption of the images that have none")
add("--pretrained_model_name_or_path", help="the pipeline: a folder, or its name on the hub")
add("--resolution", type=int, help="side of the square images in pixels (default: 1024 or 512)")
add("--center_crop", action="store_true", help="crop the centre of an image, not a random part")
add("--caption_dropout", type=float, default=0.1, help="share of captions to leave empty")
add("--rank", type=int, default=16, help="of the LoRA; 4 to 64 are usual")
add("--output_dir", type=Path, default="sdxl-lora")
add("--train_batch_size", type=int, default=16, help="images per process and micro-batch")
add("--gradient_accumulation_steps", type=int, default=1, help="micro-batches per step")
add("--gradient_checkpointing", action="store_true", help="less memory, and a third slower")
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
base = args.pretrained_model_name_or_path
if not (args.train_data_dir and base and args.max_train_steps):
    parser.error("--train_data_dir, --pretrained_model_name_or_path, --max_train_steps are needed")
if not args.train_data_dir.is_dir():
    parser.error(f"--train_data_dir {args.train_data_dir} is not a folder")
for name, value in vars(args).items():  # a count is at least 1, and nan is no number
    least = 1 if isinstance(value, int) and name not in ("seed", "lr_warmup_steps") else 0
    if type(value) in (int, float) and not least <= value < float("inf"):
        parser.error(f"--{name} {value} is out of range")
STATE = "minimal_train_lora_sdxl.pt"  # in each checkpoint, beside the LoRA's files
checkpoints = {int(path.name[11:]): path for path in args.output_dir.glob("checkpoint-[0-9]*")}
is_ours = all((path / STATE).is_file() for path in checkpoints.values())
if not is_ours or (not checkpoints and any(args.output_dir.glob("*.safetensors"))):
    parser.error(f"{args.output_dir} holds what another script saved: choose another folder")

# These imports take seconds. They come after the flags, so that --help and mistakes answer at once.
import functools
import inspect
import io
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta

import datasets
import diffusers
import numpy as np
import torch
import torch.nn.functional as F
import torchvision.transforms.v2.functional as TF
import xxhash
from accelerate import Accelerator, InitProcessGroupKwargs
from diffusers import DDPMScheduler, UNet2DConditionModel
from diffusers.optimization import get_scheduler
from diffusers.training_utils import compute_snr
from diffusers.utils import make_image_grid
from peft import LoraConfig
from PIL import Image, ImageOps
from safetensors.torch import save_file
from torch.optim.swa_utils import get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

try:  # up to twice as fast as Pillow; their pixels differ by a grey level or two
    from torchcodec.decoders import decode_jpeg
except (ImportError, OSError, RuntimeError):  # not installed, or not made for this torch
    decode_jpeg = None

# diffusers 0.40 has renamed the argument for the precision in which models are loaded.
DTYPE = "torch_dtype" if diffusers.__version__ < "0.40" else "dtype"
tracker = None if args.report_to == "none" else args.report_to
options = {"log_with": tracker, "project_dir": args.output_dir / "logs"}
patience = InitProcessGroupKwargs(timeout=timedelta(days=1))  # while one process encodes or draws
options["kwargs_handlers"] = [patience]
accelerator = Accelerator(mixed_precision=args.mixed_precision, **options)
device = accelerator.device
world = accelerator.num_processes
process = accelerator.process_index
dtype = torch.bfloat16 if accelerator.mixed_precision == "bf16" else torch.float32
pin = torch.Tensor.pin_memory if device.type == "cuda" else torch.Tensor.cpu  # so no copy waits

# ---- Ctrl-C and SIGTERM end the run after the current step. The processes have to agree on it, or
# some would wait for the others. They do so over gloo, on the CPU, so that no GPU has to wait.
received = [0]
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, frame: received.append(number))
new_group = torch.distributed.new_group
gloo = new_group(backend="gloo", timeout=patience.timeout) if world > 1 else None


def agree_on_signal():
    number = torch.tensor(received[-1])
    if gloo:
        torch.distributed.all_reduce(number, torch.distributed.ReduceOp.MAX, group=gloo)
    return int(number)


# Random numbers are drawn from a seed that is computed from what they are for, for example ("step",
# seed, step, ...). So a resumed run draws the same ones, and no generator has to be saved.
def key_seed(purpose, *key):
    return xxhash.xxh3_64_intdigest(" ".join([purpose, *map(str, key)]).encode())


# ---- The pipeline. SDXL differs from Stable Diffusion 1 and 2 where `is_xl` is read.
index = diffusers.DiffusionPipeline.load_config(base)
is_xl = index["_class_name"] == "StableDiffusionXLPipeline"
if not is_xl and index["_class_name"] != "StableDiffusionPipeline":
    sys.exit(f"{base} is a {index['_class_name']}, not a StableDiffusion(XL)Pipeline")
Pipeline = getattr(diffusers, index["_class_name"])
side = args.resolution or (1024 if is_xl else 512)
# parts that are not used here
absent = dict.fromkeys(index.keys() & {"safety_checker", "requires_safety_checker"})
absent |= dict.fromkeys(index.keys() & {"feature_extractor", "image_encoder"})

# ---- The data: each row is an image and its caption. To bring a data set of your own, replace
# `files` (strings), `captions` and `load_image`. To augment it, repeat both lists, such as
# `files *= 8`, and change the image in `load_image`, by random numbers of its row.
# Folders such as val/ are left out. `datasets` would look for these words in names of images, too.
splits = {"test", "testing", "eval", "evaluation", "dev", "val", "valid", "validation"}
names = [p.relative_to(args.train_data_dir) for p in args.train_data_dir.rglob("*") if p.is_file()]
names = [name for name in names if not any(p in splits or p[0] == "." for p in name.parts)]
names = sorted(str(args.train_data_dir / name) for name in names)
try:
    rows = datasets.load_dataset("imagefolder", data_files={"train": names}, split="train")
except Exception as error:
    sys.exit(f"{args.train_data_dir} can't be read as images: {error}")
files = [each["path"] for each in rows.cast_column("image", datasets.Image(decode=False))["image"]]
captions = list(rows["text"]) if "text" in rows.column_names else [None] * len(rows)
for row, file in enumerate(files):
    text = Path(file).with_suffix(".txt")
    if text.is_file():
        captions[row] = text.read_text(encoding="utf-8-sig")
    captions[row] = args.instance_prompt if captions[row] is None else captions[row].strip()
    if captions[row] is None:
        sys.exit(f"{file} has no caption: write {text}, or give --instance_prompt")


# An image file -> uint8 [3, height, width]: upright, and white where it is transparent.
def decode_image(data):
    image = Image.open(io.BytesIO(data))
    is_jpeg = image.format in ("JPEG", "MPO") and image.mode in ("L", "RGB")
    if decode_jpeg and is_jpeg and image.getexif().get(0x0112, 1) == 1:
        return decode_jpeg(data, mode="RGB")
    ImageOps.exif_transpose(image, in_place=True)
    if image.has_transparency_data:
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image.convert("RGBA"))
    return TF.pil_to_tensor(image.convert("RGB"))


# A row -> uint8 [3, side, side], and what SDXL is told of it (arXiv:2307.01952, 2.2): the size of
# the file, the corner of the crop in the resized image, and the side. The crop depends on the seed
# and the row alone.
def load_image(row):
    try:
        pixels = decode_image(Path(files[row]).read_bytes())
    except Exception as error:
        sys.exit(f"{files[row]} can't be read as an image: {error}")
    y, x, _, _ = np.random.default_rng(key_seed("image", args.seed, 0, row)).random(4)
    if args.center_crop:
        y = x = 0.5
    height, width = pixels.shape[1:]
    crop = min(height, width)
    top, left = round((height - crop) * y), round((width - crop) * x)
    time_ids = [height, width, round(top * side / crop), round(left * side / crop), side, side]
    crop = top, left, crop, crop
    pixels = TF.resized_crop(pixels, *crop, [side, side], Image.BICUBIC, antialias=True)
    return pixels, torch.tensor(time_ids)


# ---- Images and captions are encoded once, into a file. A row has the embeddings of the caption
# and, as mean and standard deviation, the distribution that the VAE gave for the image, in float16.
@torch.no_grad()
def encode_all():
    pipeline = Pipeline.from_pretrained(base, unet=None, **absent)

    def encode(texts):
        options = {"num_images_per_prompt": 1, "do_classifier_free_guidance": False}
        embeds, _, *pooled = pipeline.encode_prompt(texts, device=pipeline.device, **options)
        encoded = {"prompt_embeds": embeds}
        if is_xl:
            encoded["pooled_prompt_embeds"] = pooled[0]
        return {name: each.half().cpu() for name, each in encoded.items()}

    empty = encode([""])  # in float32, on the CPU, as the big script does
    if is_xl and index.get("force_zeros_for_empty_prompt", True):  # as SDXL was trained
        empty = {name: torch.zeros_like(each) for name, each in empty.items()}
    for name, part in pipeline.to(device).components.items():
        is_exact = name == "vae" and is_xl and part.config.force_upcast  # it stays in float32
        if isinstance(part, torch.nn.Module) and not is_exact:
            part.to(dtype)
    shown = [encode([prompt]) for prompt in args.validation_prompts or []]
    batches = []
    for start in range(0, len(files), 4):  # four at once, as the big script does on a CPU
        part = range(start, min(start + 4, len(files)))
        images, time_ids = map(torch.stack, zip(*map(load_image, part), strict=True))
        images = (images.to(device) / 127.5 - 1).to(pipeline.vae.dtype)
        posterior = pipeline.vae.encode(images).latent_dist
        moments = torch.stack([posterior.mean, (0.5 * posterior.logvar.float()).exp()], dim=1)
        batch = {"latents": moments.half().cpu(), "time_ids": time_ids}
        batches.append(batch | encode([captions[row] for row in part]))
        print(f"Encoded {part.stop} of {len(files)} images")
    rows = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
    scale = pipeline.vae.config.scaling_factor
    return {"rows": rows, "empty": empty, "shown": shown, "scale": scale}


times = [os.path.getmtime(file) for file in files if os.path.exists(file)]
about = [base, dtype, side, args.center_crop, args.seed, args.validation_prompts]
about += [files, times, captions]
about += map(inspect.getsource, (decode_image, load_image, encode_all))  # if you change them
path = args.output_dir / f"encoded-{key_seed('data', *about):016x}.pt"
if accelerator.is_main_process and not path.exists():
    args.output_dir.mkdir(parents=True, exist_ok=True)
    torch.save(encode_all(), path.with_suffix(".tmp"))
    path.with_suffix(".tmp").rename(path)  # it is whole, or absent
accelerator.wait_for_everyone()
encoded = torch.load(path, weights_only=True, mmap=True)
empty = {name: each.float().to(device) for name, each in encoded["empty"].items()}


# ---- A step's images, in the order of the epoch: a list of micro-batches, each with the weights of
# this process's images. The last step of an epoch takes those that are left, so that an epoch has
# each image once. A thread loads the next step while the device computes one.
def load_step(images_seen):
    epoch, start = divmod(images_seen, len(files))
    order = np.random.default_rng(key_seed("epoch", args.seed, epoch)).permutation(len(files))
    per_micro_batch = args.train_batch_size * world
    taken = order[start : start + per_micro_batch * args.gradient_accumulation_steps].tolist()
    micro_batches = []
    for first in range(0, len(taken), per_micro_batch):
        # With these weights the sum over micro-batches, averaged over processes by DDP, is the mean
        # over the step's images. A process that gets no image computes one with weight 0, for DDP.
        micro = taken[first : first + per_micro_batch]
        own = micro[process::world] or micro[:1]
        weight = torch.full([len(own)], world / len(taken) * (process < len(micro)))
        batch = {name: column[own] for name, column in encoded["rows"].items()}
        batch["weight"] = weight
        micro_batches.append({name: pin(value) for name, value in batch.items()})
    return micro_batches, len(taken)


# ---- The model. Its weights are frozen, in the precision of the run. The LoRA is in float32,
# since bf16 is too coarse for the small updates of a weight. A is drawn, and B is 0 at first.
unet = UNet2DConditionModel.from_pretrained(base, subfolder="unet", **{DTYPE: dtype})
unet.requires_grad_(False)
adapted = "to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2"  # attention and MLP
layers = {
    name: module.float()  # for now: a LoRA is drawn in the precision of its layer
    for name, module in unet.named_modules()
    if name.endswith(adapted)
}
torch.manual_seed(args.seed)  # every process starts from the same weights
lora = {"r": args.rank, "lora_alpha": args.rank, "init_lora_weights": "gaussian"}
unet.add_adapter(LoraConfig(**lora, target_modules=[*layers]))
for layer in layers.values():
    layer.to(dtype)
if args.gradient_checkpointing:  # a block keeps its input alone, and computes the rest once more
    for block in unet.modules():
        if type(block).__name__ in ("ResnetBlock2D", "BasicTransformerBlock"):
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
# channels_last is the fastest for convolutions on a GPU, if group norms keep it (torch 2.15 does).
trial = torch.empty(1, 64, 2, 2, device=device, memory_format=torch.channels_last)
keeps_it = F.group_norm(trial, 32).is_contiguous(memory_format=torch.channels_last)
layout = torch.channels_last if device.type == "cuda" and keeps_it else torch.preserve_format

# What is trained: each weight of these modules that needs a gradient is optimized, averaged and
# saved. A further module, such as a projection, is added here alone.
trained = {"unet": unet}
weights = {
    f"{name}.{key}": weight
    for name, module in trained.items()
    for key, weight in module.to(device, memory_format=layout).named_parameters()
    if weight.requires_grad
}
ema = {name: weight.detach().clone() for name, weight in weights.items()}
# Betas and weight decay are torch's defaults. `fused` updates all weights in one go.
optimizer = torch.optim.AdamW(weights.values(), lr=args.learning_rate, fused=True)
flags = {"prediction_type": args.prediction_type} if args.prediction_type else {}
noise_scheduler = DDPMScheduler.from_pretrained(base, subfolder="scheduler", **flags)
predicts_velocity = noise_scheduler.config.prediction_type == "v_prediction"
settings = {"base": base, "rank": args.rank, "weights": [*weights], "v": predicts_velocity}

# ---- Resume from the newest checkpoint. Step and images seen are the whole position of a run: the
# order of the data and the noise follow from them.
step = images_seen = 0
if checkpoints:
    newest = checkpoints[max(checkpoints)] / STATE
    saved = torch.load(newest, map_location="cpu", weights_only=True)
    if saved["settings"] != settings:
        sys.exit(f"{newest} is of another LoRA: choose another --output_dir")
    for own, of in ((weights, "weights"), (ema, "ema")):
        for name, weight in own.items():
            weight.data.copy_(saved[of][name])
    # Rates and other settings are those given above, which may have changed.
    optimizer.load_state_dict(optimizer.state_dict() | {"state": saved["optimizer"]["state"]})
    step = saved["step"]
    images_seen = saved["images_seen"]
    accelerator.print(f"Resuming from {newest}")
for group in optimizer.param_groups:
    group["initial_lr"] = group["lr"]  # which get_scheduler needs; a group may have its own
# The schedule starts after its step 0, whose rate is 0, so that no step is wasted. `prepare` does
# not get it, because it would count each step once for each process.
usual = 0 if args.lr_scheduler == "constant" else 500
warmup = usual if args.lr_warmup_steps is None else args.lr_warmup_steps
schedule = {"constant": "constant_with_warmup"}.get(args.lr_scheduler, args.lr_scheduler)
counts = {"num_warmup_steps": warmup, "num_training_steps": args.max_train_steps + 1}
lr_scheduler = get_scheduler(schedule, optimizer, **counts, last_epoch=step)
# The models with autocast, and with several processes in DDP. They share weights with `trained`.
models = {name: accelerator.prepare(module) for name, module in trained.items()}
optimizer = accelerator.prepare(optimizer)


# The average in two files: with the names of diffusers, and with those of kohya's scripts.
def save_lora(folder):
    names = {name: name.replace(".default", "") for name in ema if ".lora_" in name}
    adapter = {new: ema[name].half().cpu() for name, new in names.items()}
    kohya = {}
    for name, each in adapter.items():  # unet.LAYER.lora_A.weight, and with B
        layer = f"lora_{name.partition('.lora_')[0].replace('.', '_')}"
        kohya[f"{layer}.lora_{'down' if '.lora_A.' in name else 'up'}.weight"] = each
        kohya[f"{layer}.alpha"] = torch.tensor(args.rank)
    save_file(adapter, folder / "pytorch_lora_weights.safetensors", {"format": "pt"})
    save_file(kohya, folder / "pytorch_lora_weights_kohya.safetensors")


# Weights and averages change places: once before samples, and once after.
def swap():
    for name, weight in weights.items():
        weight.data, ema[name] = ema[name], weight.data


# Samples of the average, from the same noise each time. They do not change the training, whose
# random numbers are seeded anew in each micro-batch. They are drawn before step 1 too, and show the
# base. A U-Net with further inputs needs a pipeline of its own here, which gives them.
def draw_samples():
    swap()
    unet.eval()
    parts = {name: None for name in index if name.startswith(("text_encoder", "tokenizer"))}
    pipeline = Pipeline.from_pretrained(base, unet=unet, **parts, **absent)
    pipeline.scheduler = pipeline.scheduler.from_config(pipeline.scheduler.config, **flags)
    pipeline.vae.to(device)
    pipeline.set_progress_bar_config(disable=True)
    options = {"num_inference_steps": args.num_inference_steps, "height": side, "width": side}
    options |= {f"negative_{name}": each for name, each in empty.items()}
    images = []
    for prompt in encoded["shown"]:
        options |= {name: each.float().to(device) for name, each in prompt.items()}
        for number in range(args.num_validation_images):  # one by one: this takes less memory
            seed = key_seed("sample", args.seed, number)
            options["generator"] = torch.Generator(device).manual_seed(seed)
            images += pipeline(**options, guidance_scale=args.guidance_scale).images
    unet.train()
    swap()
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
unet.train()
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
        torch.manual_seed(key_seed("step", args.seed, step, number, process))
        mean, std = batch["latents"].float().unbind(1)
        latents = mean + std * torch.randn(mean.shape, device=device)  # new ones each time
        latents = latents * encoded["scale"]
        # Guidance needs a model that also draws without a caption (arXiv:2207.12598).
        dropped = torch.rand(len(latents), device=device) < args.caption_dropout
        prompts = {
            name: torch.where(dropped.view(-1, *[1] * (none.dim() - 1)), none, batch[name].float())
            for name, none in empty.items()
        }
        added = None
        if is_xl:
            added = {"time_ids": batch["time_ids"].float()}
            added["text_embeds"] = prompts["pooled_prompt_embeds"]
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
            prediction = models["unet"](
                noisy_latents, timesteps, prompts["prompt_embeds"], added_cond_kwargs=added
            ).sample.float()
            loss = F.mse_loss(prediction, target, reduction="none").mean(dim=(1, 2, 3))
            loss = (weight * loss).sum()
            accelerator.backward(loss)
        losses[-1] += loss.detach()
    accelerator.clip_grad_norm_(weights.values(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    # The average warms up, as in diffusers' EMAModel: the first step copies the weights.
    decay = min(0.9999, 1 - step**-0.75)
    get_ema_multi_avg_fn(decay)([*ema.values()], [*weights.values()], None)
    # Until here nothing has waited for the GPU. A record does, and all processes take part in it.
    if step % args.logging_steps == 0:
        loss = accelerator.reduce(torch.stack(losses).mean(), "mean").item()
        lr = lr_scheduler.get_last_lr()[0]
        accelerator.print(f"step {step}, loss {loss:.4f}, lr {lr:.3g}")
        accelerator.log({"loss": loss, "lr": lr}, step=step)
        losses.clear()
    lr_scheduler.step()
    stop = agree_on_signal()
    is_last = step == args.max_train_steps
    if (stop or step % args.checkpointing_steps == 0 or is_last) and accelerator.is_main_process:
        # A checkpoint is complete or absent: it gets its name when all of it is on the disk.
        folder = args.output_dir / f"checkpoint-{step}"
        unfinished = folder.with_name(f".unfinished-{folder.name}")
        unfinished.mkdir(parents=True, exist_ok=True)  # a killed run may have left it
        state = {"weights": {name: each.detach() for name, each in weights.items()}, "ema": ema}
        state |= {"optimizer": optimizer.state_dict(), "settings": settings}
        with open(unfinished / STATE, "wb") as file:
            torch.save(state | {"step": step, "images_seen": images_seen}, file)
            os.fsync(file.fileno())
        save_lora(unfinished)
        unfinished.rename(folder)
    draw_every = args.validation_steps or args.checkpointing_steps
    is_drawn = not stop and (step % draw_every == 0 or is_last)
    if is_drawn and args.validation_prompts and accelerator.is_main_process:
        draw_samples()

# ---- The end: the LoRA of the average, or after a signal the status that a shell expects.
if accelerator.is_main_process and not stop:
    save_lora(args.output_dir)
accelerator.wait_for_everyone()  # or the launcher would end the first process while it saves
accelerator.print("Stopped: the same command resumes" if stop else f"Done: see {args.output_dir}")
accelerator.end_training()
if stop:
    sys.exit(128 + stop)
