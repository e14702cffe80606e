# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "accelerate>=1.13,<2", "datasets>=5.1,<6", "diffusers>=0.36,<1", "numpy>=2,<3", "peft>=0.18,<1",
#   "pillow>=11.3,<14", "safetensors>=0.5,<1", "tensorboard>=2.20,<3", "torch>=2.11,<3",
#   "torchcodec>=0.16,<1", "torchvision>=0.26,<1", "transformers>=5.17,<6", "xxhash>=3.5,<5",
# ]
# ///
"""Train a LoRA of a flow-matching pipeline: train_flow.py --rank --cache_latents in one file.

    uv run minimal/train_lora.py --train_data_dir photos --instance_prompt "a photo of sks dog" \\
        --pretrained_model_name_or_path Tongyi-MAI/Z-Image --mixed_precision bf16 \\
        --gradient_checkpointing --train_batch_size 1 --gradient_accumulation_steps 4 \\
        --max_train_steps 500 --validation_prompts "a photo of sks dog on a beach"

Models: Z-Image, FLUX.1, FLUX.2 klein, Qwen-Image, Stable Diffusion 3 and 3.5. Images are a folder.
A caption is photo.txt beside photo.png, or the column "text" of metadata.jsonl. The LoRA is
pytorch_lora_weights.safetensors, which diffusers and ComfyUI read at strength 1.

At the same flags (on a CPU, with the same OMP_NUM_THREADS) it ends with the same bits as the big
script, in the LoRA and in its average: on one process or several, with accumulation, and after a
kill. (In bf16, Stable Diffusion 3 has to be stored in bf16.) To resume, run the same command again.
Left out here: other models, sizes other than squares, masks, edits, 8 or 4 bits, most errors.
"""

import argparse
from pathlib import Path

parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
add = parser.add_argument
add("--train_data_dir", type=Path, help="folder of images")
add("--instance_prompt", help="caption of the images that have none")
add("--pretrained_model_name_or_path", help="the pipeline: a folder, or its name on the hub")
add("--resolution", type=int, help="side of the square images in pixels (default: 1024)")
add("--center_crop", action="store_true", help="crop the centre of an image, not a random part")
add("--caption_dropout", type=float, default=0.1, help="share of captions to leave empty")
add("--rank", type=int, default=16, help="of the LoRA; 4 to 64 are usual")
add("--output_dir", type=Path, default="flow-lora")
add("--train_batch_size", type=int, default=16, help="images per process and micro-batch")
add("--gradient_accumulation_steps", type=int, default=1, help="micro-batches per step")
add("--gradient_checkpointing", action="store_true", help="less memory, and a third slower")
add("--max_train_steps", type=int)
add("--learning_rate", type=float, default=1e-4)
add("--lr_scheduler", default="constant")
add("--lr_warmup_steps", type=int, help="default: 500; 0 if the rate is constant")
add("--shift", type=float, help="of the noise levels; above 1 is more (default: the pipeline's)")
add("--mixed_precision", choices=["no", "bf16"], help="default: as accelerate launch says")
add("--checkpointing_steps", type=int, default=500)
add("--logging_steps", type=int, default=10)
add("--report_to", choices=["tensorboard", "wandb", "none"], default="tensorboard")
add("--validation_prompts", nargs="+", help="prompts of the samples (default: no samples)")
add("--validation_steps", type=int, help="between samples (default: those between checkpoints)")
add("--num_validation_images", type=int, default=4, help="samples of each prompt")
add("--num_inference_steps", type=int, default=28, help="denoising steps of a sample")
add("--guidance_scale", type=float, default=4.0, help="of the samples; 1 is no guidance")
add("--seed", type=int, default=0)
args = parser.parse_args()
base = args.pretrained_model_name_or_path
side = args.resolution or 1024
if not (args.train_data_dir and base and args.max_train_steps):
    parser.error("--train_data_dir, --pretrained_model_name_or_path, --max_train_steps are needed")
if not args.train_data_dir.is_dir():
    parser.error(f"--train_data_dir {args.train_data_dir} is not a folder")
for name, value in vars(args).items():  # a count is at least 1, and nan is no number
    least = 1 if isinstance(value, int) and name not in ("seed", "lr_warmup_steps") else 0
    if type(value) in (int, float) and not least <= value < float("inf"):
        parser.error(f"--{name} {value} is out of range")
STATE = "minimal_train_lora.pt"  # in each checkpoint, beside a LoRA file
checkpoints = {int(path.name[11:]): path for path in args.output_dir.glob("checkpoint-[0-9]*")}
is_ours = all((path / STATE).is_file() for path in checkpoints.values())
if not is_ours or (not checkpoints and any(args.output_dir.glob("*.safetensors"))):
    parser.error(f"{args.output_dir} holds what another script saved: choose another folder")

# These imports take seconds. They come after the flags, so that --help and mistakes answer at once.
import functools
import inspect
import io
import math
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
from accelerate import Accelerator, DistributedDataParallelKwargs, InitProcessGroupKwargs
from diffusers.optimization import get_scheduler
from diffusers.utils import make_image_grid
from peft import LoraConfig
from PIL import Image, ImageOps
from safetensors.torch import save_file
from torch.nn.utils.rnn import pad_sequence
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
# The last block of some transformers has layers that change nothing, for which DDP would wait.
ddp = DistributedDataParallelKwargs(find_unused_parameters=True)
options["kwargs_handlers"] = [patience, ddp]
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


# ---- What differs between the models, each as the code of its pipeline has it. Delete those that
# you do not need. Noise is drawn in the shape of `noisy`, [N, channels, height, width]. The keys of
# a prompt are arguments of the pipeline; in `predict` each has a list with a tensor per image.
class StableDiffusion3:
    layers = "to_q", "to_k", "to_v", "to_out.0"  # which get a LoRA, by the ends of their names
    layers += "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out", "net.0.proj", "net.2"
    patch = 2  # numbers of `noisy` per token along a side
    has_frames = False  # is its VAE one for videos?
    batch = torch.stack  # how its pipeline takes the prompts of several images
    guidance = {"guidance_scale": args.guidance_scale}  # of samples; with an empty prompt, or None

    def encode(pipeline, text):  # a caption -> {argument: tensor without the axis of images}
        options = {"do_classifier_free_guidance": False}
        embeds, _, pooled, _ = pipeline.encode_prompt(text, None, None, **options)
        return {"prompt_embeds": embeds[0], "pooled_prompt_embeds": pooled[0]}

    def scale(vae):  # (shift, factor): (latents - shift) * factor has about unit variance
        return vae.config.shift_factor, vae.config.scaling_factor

    def pack(latents):  # latents of the VAE -> as noise is added
        return latents

    def predict(model, noisy, sigmas, prompt_embeds, pooled_prompt_embeds):
        embeds, pooled = torch.stack(prompt_embeds), torch.stack(pooled_prompt_embeds)
        return model(noisy, embeds, pooled, timestep=1000 * sigmas).sample


class ZImage(StableDiffusion3):
    layers = "to_q", "to_k", "to_v", "to_out.0"
    layers += "feed_forward.w1", "feed_forward.w2", "feed_forward.w3"
    batch = list

    def encode(pipeline, text):
        (embeds,), _ = pipeline.encode_prompt(text, do_classifier_free_guidance=False)
        return {"prompt_embeds": embeds}

    def predict(model, noisy, sigmas, prompt_embeds):  # it predicts latents - noise
        return -torch.stack(model([*noisy.unsqueeze(2)], 1 - sigmas, prompt_embeds)[0]).squeeze(2)


class Flux(StableDiffusion3):
    layers = StableDiffusion3.layers + ("proj_mlp", ".proj_out")  # the dot: of blocks alone
    guidance = None  # it was trained to draw without: the scale is an input of FLUX.1-dev

    def encode(pipeline, text):
        embeds, pooled, _ = pipeline.encode_prompt(text)
        return {"prompt_embeds": embeds[0], "pooled_prompt_embeds": pooled[0]}

    def predict(model, noisy, sigmas, prompt_embeds, pooled_prompt_embeds):
        pipeline = diffusers.FluxPipeline
        count, _, height, width = noisy.shape
        size = count, height // 2, width // 2
        img_ids = pipeline._prepare_latent_image_ids(*size, device, torch.float32)
        txt_ids = torch.zeros(len(prompt_embeds[0]), 3, device=device)
        guidance = torch.ones_like(sigmas) if transformer.config.guidance_embeds else None
        tokens = pipeline._pack_latents(noisy, *noisy.shape)
        embeds, pooled = torch.stack(prompt_embeds), torch.stack(pooled_prompt_embeds)
        velocity = model(tokens, embeds, pooled, sigmas, img_ids, txt_ids, guidance).sample
        return pipeline._unpack_latents(velocity, height, width, 1)


class Flux2Klein(StableDiffusion3):
    # both of the last hold attention and MLP
    layers = StableDiffusion3.layers + ("linear_in", "linear_out", "to_qkv_mlp_proj", "to_out")
    patch = 1

    def encode(pipeline, text):
        return {"prompt_embeds": pipeline.encode_prompt(text)[0][0]}

    def scale(vae):
        std = torch.sqrt(vae.bn.running_var + vae.config.batch_norm_eps)
        return vae.bn.running_mean.view(-1, 1, 1), (1 / std).view(-1, 1, 1)

    def pack(latents):
        return diffusers.Flux2KleinPipeline._patchify_latents(latents)

    def predict(model, noisy, sigmas, prompt_embeds):
        pipeline = diffusers.Flux2KleinPipeline
        embeds = torch.stack(prompt_embeds)
        img_ids = pipeline._prepare_latent_ids(noisy).to(device)
        txt_ids = pipeline._prepare_text_ids(embeds).to(device)
        tokens = pipeline._pack_latents(noisy)
        velocity = model(tokens, embeds, sigmas, img_ids, txt_ids, guidance=None).sample
        return velocity.transpose(1, 2).reshape(noisy.shape)


class QwenImage(StableDiffusion3):
    has_frames = True
    guidance = {"true_cfg_scale": args.guidance_scale}

    def encode(pipeline, text):
        (embeds,), _ = pipeline.encode_prompt(text, max_sequence_length=512)
        return {"prompt_embeds": embeds, "prompt_embeds_mask": torch.ones(len(embeds))}

    def scale(vae):
        mean, std = (torch.tensor(vae.config[f"latents_{name}"]) for name in ("mean", "std"))
        return mean.view(-1, 1, 1), (1 / std).view(-1, 1, 1)

    def pack(latents):
        return latents.squeeze(2)

    def predict(model, noisy, sigmas, prompt_embeds, prompt_embeds_mask):
        pipeline = diffusers.QwenImagePipeline
        count, _, height, width = noisy.shape
        embeds = pad_sequence(prompt_embeds, batch_first=True)
        mask = pad_sequence(prompt_embeds_mask, batch_first=True).long()
        mask = mask if len({*map(len, prompt_embeds)}) > 1 else None
        tokens = pipeline._pack_latents(noisy, *noisy.shape)
        sizes = [[(1, height // 2, width // 2)]] * count
        velocity = model(tokens, embeds, mask, sigmas, sizes).sample
        return pipeline._unpack_latents(velocity, height, width, 1).squeeze(2)


index = diffusers.DiffusionPipeline.load_config(base)
families = [StableDiffusion3, ZImage, Flux, Flux2Klein, QwenImage]
families = {f"{each.__name__}Pipeline": each for each in families}
if index["_class_name"] not in families:
    sys.exit(f"{base} is a {index['_class_name']}, not one of {', '.join(families)}")
family = families[index["_class_name"]]
Pipeline = getattr(diffusers, index["_class_name"])

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


# A row -> uint8 [3, side, side]. The crop depends on the seed and the row alone.
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
    corner = round((height - crop) * y), round((width - crop) * x)
    size = [side, side]
    return TF.resized_crop(pixels, *corner, crop, crop, size, Image.BICUBIC, antialias=True)


# ---- Images and captions are encoded once, into a file. A row has the prompt and, as mean and
# standard deviation, the distribution that the VAE gave for the image. Numbers are float16.
@torch.no_grad()
def encode_all():
    # The big script encodes the empty prompt on the CPU, in float32. If no caption is dropped, the
    # text encoders need half the memory.
    types = {"vae": torch.float32, "default": torch.float32 if args.caption_dropout else dtype}
    pipeline = Pipeline.from_pretrained(base, transformer=None, **{DTYPE: types})
    scale = family.scale(pipeline.vae)
    prompts = [family.encode(pipeline, "")]
    for part in pipeline.components.values():
        if isinstance(part, torch.nn.Module):
            for weight in part.parameters():  # not buffers, some of which have to be exact
                weight.data = weight.data.to(dtype)
            part.to(device)
    prompts += [family.encode(pipeline, text) for text in [*shown_prompts, *captions]]
    prompts = [{name: each.half().cpu() for name, each in of.items()} for of in prompts]
    latents = []
    for start in range(0, len(files), 4):  # four at once, as the big script does on a CPU
        images = torch.stack([load_image(i) for i in range(start, min(start + 4, len(files)))])
        images = (images.to(device) / 127.5 - 1).to(dtype)
        images = images.unsqueeze(2) if family.has_frames else images
        posterior = pipeline.vae.encode(images).latent_dist
        parts = posterior.mean.float(), (0.5 * posterior.logvar.float()).exp()
        latents += torch.stack([family.pack(part) for part in parts], dim=1).half().cpu()
        print(f"Encoded {len(latents)} of {len(files)} images")  # [2, channels, height, width]
    return {"scale": scale, "prompts": prompts, "latents": latents}


shown_prompts = args.validation_prompts or []
times = [os.path.getmtime(file) for file in files if os.path.exists(file)]
about = [base, dtype, side, args.center_crop, args.seed, bool(args.caption_dropout)]
about += [files, times, captions, shown_prompts]
code = decode_image, load_image, family.encode, family.pack, encode_all
about += map(inspect.getsource, code)  # if you change it
path = args.output_dir / f"encoded-{key_seed('data', *about):016x}.pt"
if accelerator.is_main_process and not path.exists():
    args.output_dir.mkdir(parents=True, exist_ok=True)
    torch.save(encode_all(), path.with_suffix(".tmp"))
    path.with_suffix(".tmp").rename(path)  # it is whole, or absent
accelerator.wait_for_everyone()
encoded = torch.load(path, weights_only=True, mmap=True)
shift_of_latents, factor = (torch.as_tensor(each, device=device) for each in encoded["scale"])
empty, *prompts = encoded["prompts"]
shown, prompts = prompts[: len(shown_prompts)], prompts[len(shown_prompts) :]

# ---- The model. Its weights are frozen, in the precision of the run. The LoRA is in float32,
# since bf16 is too coarse for the small updates of a weight. A is drawn, and B is 0 at first.
transformer = getattr(diffusers, index["transformer"][1])
transformer = transformer.from_pretrained(base, subfolder="transformer", **{DTYPE: dtype})
transformer.requires_grad_(False)
layers = {
    name: module.float()  # for now: a LoRA is drawn in the precision of its layer
    for name, module in transformer.named_modules()
    if isinstance(module, torch.nn.Linear) and name.endswith(family.layers)
}
torch.manual_seed(args.seed)  # every process starts from the same weights
lora = {"r": args.rank, "lora_alpha": args.rank, "init_lora_weights": "gaussian"}
transformer.add_adapter(LoraConfig(**lora, target_modules=[*layers]))
for layer in layers.values():
    layer.to(dtype)
transformer.to(device)
if args.gradient_checkpointing:  # a block keeps its input alone, and computes the rest once more
    for blocks in transformer.children():
        for block in blocks if isinstance(blocks, torch.nn.ModuleList) else []:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)

# What is trained: each weight of these modules that needs a gradient is optimized, averaged and
# saved. A further module, such as a projection, is added here alone.
trained = {"transformer": transformer}
weights = {
    f"{name}.{key}": weight
    for name, module in trained.items()
    for key, weight in module.to(device).named_parameters()
    if weight.requires_grad
}
ema = {name: weight.detach().clone() for name, weight in weights.items()}
# Betas and weight decay are torch's defaults. `fused` updates all weights in one go.
optimizer = torch.optim.AdamW(weights.values(), lr=args.learning_rate, fused=True)
settings = {"base": base, "rank": args.rank, "weights": [*weights]}

# A larger image needs more noise to be unrecognizable, so its noise levels are shifted up.
fixed = {"shift": args.shift, "use_dynamic_shifting": False} if args.shift else {}
scheduler = diffusers.FlowMatchEulerDiscreteScheduler
scheduler = scheduler.from_pretrained(base, subfolder="scheduler", **fixed)
known = scheduler.config
shift = known.shift
if known.use_dynamic_shifting:  # as the pipelines compute it from the number of tokens
    tokens = encoded["latents"][0][0, 0].numel() / family.patch**2
    slope = known.max_shift - known.base_shift
    slope /= known.max_image_seq_len - known.base_image_seq_len
    shift = known.base_shift + slope * (tokens - known.base_image_seq_len)
    shift = math.exp(shift) if known.time_shift_type == "exponential" else shift

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
        moments = torch.stack([encoded["latents"][row] for row in own])
        micro_batches.append([pin(weight), pin(moments), [prompts[row] for row in own]])
    return micro_batches, len(taken)


# Prompts as `predict` takes them: {name: list of tensors}, on the device.
def move(prompts):
    return {
        name: [pin(each[name]).to(device, non_blocking=True).float() for each in prompts]
        for name in prompts[0]
    }


# The average, with the names of diffusers: transformer.LAYER.lora_A.weight, and with B.
def save_lora(folder):
    names = {name: name.replace(".default", "") for name in ema if ".lora_" in name}
    adapter = {new: ema[name].half().cpu() for name, new in names.items()}
    save_file(adapter, folder / "pytorch_lora_weights.safetensors", {"format": "pt"})


# Weights and averages change places: once before samples, and once after.
def swap():
    for name, weight in weights.items():
        weight.data, ema[name] = ema[name], weight.data


# Samples of the average, from the same noise each time. They do not change the training, whose
# random numbers are seeded anew in each micro-batch. They are drawn before step 1 too, and show the
# base. A transformer with further inputs needs a pipeline of its own here, which gives them.
def draw_samples():
    swap()
    transformer.eval()
    parts = {name: None for name in index if name.startswith(("text_encoder", "tokenizer"))}
    parts |= {"transformer": transformer, "scheduler": scheduler}
    pipeline = Pipeline.from_pretrained(base, **parts)
    pipeline.set_progress_bar_config(disable=True)
    pipeline.vae.to(device)
    options = {"num_inference_steps": args.num_inference_steps, "height": side, "width": side}
    options |= family.guidance or {"guidance_scale": args.guidance_scale}
    if family.guidance:
        options |= {f"negative_{name}": family.batch(each) for name, each in move([empty]).items()}
    images = []
    for prompt in shown:
        options |= {name: family.batch(each) for name, each in move([prompt]).items()}
        for number in range(args.num_validation_images):  # one by one: this takes less memory
            seed = key_seed("sample", args.seed, number)
            options["generator"] = torch.Generator(device).manual_seed(seed)
            images += pipeline(**options).images
    transformer.train()
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
transformer.train()
losses = []
ahead = ThreadPoolExecutor(1)
coming = ahead.submit(load_step, images_seen)
stop = agree_on_signal()
while step < args.max_train_steps and not stop:
    micro_batches, count = coming.result()
    images_seen += count
    coming = ahead.submit(load_step, images_seen)
    losses.append(torch.zeros((), device=device))
    for number, (weight, moments, texts) in enumerate(micro_batches):
        torch.manual_seed(key_seed("step", args.seed, step, number, process))
        weight, moments = (x.to(device, non_blocking=True) for x in (weight, moments))
        mean, std = moments.float().unbind(1)
        latents = mean + std * torch.randn(mean.shape, device=device)  # new ones each time
        latents = (latents - shift_of_latents) * factor
        # Guidance needs a model that also draws without a caption (arXiv:2207.12598).
        dropped = torch.rand(len(texts)) < args.caption_dropout
        texts = [empty if no else own for no, own in zip(dropped, texts, strict=True)]
        # The loss of rectified flow (arXiv:2209.03003): the model predicts the velocity on the line
        # from image to noise. More levels are drawn from its middle (arXiv:2403.03206, 3.1).
        noise = torch.randn(latents.shape, device=device)
        sigmas = torch.sigmoid(torch.randn(len(latents), device=device))
        sigmas = shift * sigmas / (1 + (shift - 1) * sigmas)
        share = sigmas.view(-1, 1, 1, 1)
        noisy = (1 - share) * latents + share * noise  # in float32: bf16 is too coarse
        with ExitStack() as stack:
            # Only in the step's last micro-batch the processes exchange their gradients.
            for model in models.values() if number + 1 < len(micro_batches) else []:
                stack.enter_context(accelerator.no_sync(model))
            velocity = family.predict(models["transformer"], noisy, sigmas, **move(texts)).float()
            loss = F.mse_loss(velocity, noise - latents, reduction="none").mean(dim=(1, 2, 3))
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
    draw_every = args.validation_steps or args.checkpointing_steps
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
