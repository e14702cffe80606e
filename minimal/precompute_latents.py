# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "accelerate>=1.13,<2", "datasets>=5.1,<6", "diffusers>=0.36,<1", "numpy>=2,<3",
#   "pillow>=11.3,<14", "pyarrow>=21,<28", "torch>=2.11,<3", "torchcodec>=0.16,<1",
#   "torchvision>=0.26,<1", "transformers>=5.17,<6", "xxhash>=3.5,<5",
# ]
# ///
"""Encode images and captions into a latent cache: precompute_latents.py in one short file.

    uv run minimal/precompute_latents.py       # the demo: drawings of animals, seconds on a CPU
    python minimal/precompute_latents.py --train_data_dir photos --center_crop \\
        --pretrained_model_name_or_path my-pipeline --output_dir latents-photos

The cache is a data set that `datasets.load_from_disk` opens. train_text_to_image.py and its twin
train on it. At the same flags (on a CPU, with the same OMP_NUM_THREADS) its shards have the same
bytes as those of the big script: from one process or several, and after a kill. The same command
resumes, and makes damaged shards again.

Left out here: SDXL and other families, VAEs without moments, several sizes or captions, masks,
streams, token ids, fp16 (where rows that overflow are encoded again), work for the device while a
shard is written, and most error messages.
"""

import argparse
import json
from pathlib import Path

parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], allow_abbrev=False)
add = parser.add_argument
add("--train_data_dir", help="folder of images or parquet files (default: the demo)")
add("--dataset_name", help="in its place: a data set on the Hugging Face hub")
add("--caption_column", default="text", help="column of captions, or of lists to draw one from")
add("--pretrained_model_name_or_path", help="a pipeline of Stable Diffusion 1 or 2")
add("--resolution", type=int, default=512, help="side of the square images in pixels")
add("--center_crop", action="store_true", help="crop the centre of an image, not a random part")
add("--random_flip", action="store_true", help="store the latents of mirrored images too")
add("--output_dir", type=Path, default="latents")
add("--batch_size", type=int, default=16, help="images that each process encodes at once")
add("--rows_per_shard", type=int, default=1024, help="a process that is killed loses at most these")
add("--max_skipped", type=float, default=0.05, help="share of the images that may be unusable")
add("--mixed_precision", choices=["no", "bf16"], help="default: as accelerate launch says")
add("--seed", type=int, default=0)
args = parser.parse_args()
if args.train_data_dir is None and args.dataset_name is None:  # the demo of the big script
    folders = [folder / "demo" for folder in Path(__file__).resolve().parents]
    demo = next((folder for folder in folders if (folder / "digits_unet.json").exists()), None)
    if demo is None:
        parser.error(
            "without flags this runs a demo, which is only in the script's repository: "
            "give --train_data_dir and --pretrained_model_name_or_path"
        )
    parser.set_defaults(
        train_data_dir=str(demo / "animals"),
        pretrained_model_name_or_path=str(demo / "drawings"),
        output_dir="latents-animals",
        resolution=64,
        batch_size=32,
    )
    args = parser.parse_args()
if args.train_data_dir and args.dataset_name:
    parser.error("give --train_data_dir or --dataset_name, not both")
if args.train_data_dir and not Path(args.train_data_dir).is_dir():
    parser.error(f"--train_data_dir {args.train_data_dir} is not a folder")
if args.pretrained_model_name_or_path is None:
    parser.error("--pretrained_model_name_or_path is needed")
for name, value in vars(args).items():  # a count is at least 1, and nan is no number
    least = 1 if isinstance(value, int) and name != "seed" else 0
    if type(value) in (int, float) and not least <= value < float("inf"):
        parser.error(f"--{name} {value} is out of range")
cache_path = args.output_dir / "cache.json"
if not cache_path.exists() and any(args.output_dir.glob("[!.]*")):
    parser.error(f"{args.output_dir} holds something else: choose another folder")

# These imports take seconds. They come after the flags, so that --help and mistakes answer at once.
import hashlib
import io
import math
import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from importlib.metadata import version

import datasets
import numpy as np
import pyarrow as pa
import torch
import torchvision.transforms.v2.functional as TF
import xxhash
from accelerate import Accelerator, InitProcessGroupKwargs
from diffusers import AutoencoderKL, StableDiffusionPipeline
from PIL import Image, ImageOps
from transformers import CLIPTextModel, CLIPTokenizer

try:  # up to twice as fast as Pillow; their pixels differ by a grey level or two
    from torchcodec.decoders import decode_jpeg
except (ImportError, OSError, RuntimeError):  # not installed, or not made for this torch
    decode_jpeg = None

# At the end the processes wait for the last one, perhaps for long.
patience = InitProcessGroupKwargs(timeout=timedelta(days=100))
accelerator = Accelerator(mixed_precision=args.mixed_precision, kwargs_handlers=[patience])
device = accelerator.device

# ---- The data. The rows hold image files, which are decoded when they are needed.
source = args.dataset_name or args.train_data_dir
if os.path.isdir(source):
    source = os.path.realpath(source)  # names of images are relative to it
# Folders such as val/ are left out. `datasets` would look for these words in names of images, too.
splits = {"test", "testing", "eval", "evaluation", "dev", "val", "valid", "validation"}
names = [path.relative_to(source) for path in Path(source).rglob("*") if path.is_file()]
names = [name for name in names if not any(p in splits or p[0] == "." for p in name.parts)]
paths = sorted(os.path.join(source, name) for name in names)
images = [p for p in map(Path, paths) if p.suffix.lower() in Image.registered_extensions()]
has_texts = any(path.with_suffix(".txt").is_file() for path in images)  # beside photo.png
files = {"path": source}
if images and not any(Path(source).rglob("*.parquet")):  # a card may have pictures
    files = {"path": "imagefolder", "data_files": {"train": paths}}
try:
    rows = datasets.load_dataset(**files, split="train")
except Exception as error:
    sys.exit(f"{source} can't be loaded as a data set: {error}")
if has_texts and args.caption_column not in rows.column_names:
    undecoded = rows.cast_column("image", datasets.Image(decode=False))["image"]
    paths = [Path(image["path"]).with_suffix(".txt") for image in undecoded]
    texts = [path.read_text("utf-8-sig") if path.is_file() else None for path in paths]
    rows = rows.add_column(args.caption_column, texts)
for name in ("image", args.caption_column):
    if name not in rows.column_names:
        sys.exit(f"{source} has no column {name!r}, only {', '.join(rows.column_names)}")
undecoded = {"feature": datasets.Image(decode=False), "new_fingerprint": rows._fingerprint}
rows = rows.cast_column("image", **undecoded).select_columns(["image", args.caption_column])

# ---- The models, at first in float32 on the CPU, where a trainer will compare them with its own.
base = args.pretrained_model_name_or_path
index = StableDiffusionPipeline.load_config(base)
if index["_class_name"] != "StableDiffusionPipeline" or index["vae"][1] != "AutoencoderKL":
    sys.exit(f"{base} is no StableDiffusionPipeline with an AutoencoderKL: use the big script")
# transformers loads the precision of the files, which may be float16.
vae = AutoencoderKL.from_pretrained(base, subfolder="vae").float().eval()
text_encoder = CLIPTextModel.from_pretrained(base, subfolder="text_encoder").float().eval()
tokenizer = CLIPTokenizer.from_pretrained(base, subfolder="tokenizer")
most_tokens = min(tokenizer.model_max_length, text_encoder.config.max_position_embeddings)
tokenizer.model_max_length = most_tokens  # old files do not store it
downscale = 2 ** (len(vae.config.block_out_channels) - 1)  # pixels along the side of a latent
if args.resolution % downscale:
    sys.exit(f"--resolution {args.resolution} must be a multiple of {downscale} for this VAE")


# Captions -> tokens: "input_ids", [N, most_tokens].
def tokenize(texts):
    return tokenizer(texts, padding="max_length", truncation=True, return_tensors="pt")


# Tokens -> embeddings, float32 [N, most_tokens, width].
@torch.inference_mode()
def encode_captions(tokens):
    return text_encoder(tokens.input_ids.to(text_encoder.device)).last_hidden_state.float()


# Images uint8 [N, C, H, W] -> mean and standard deviation of their latents, float32. They are not
# scaled. A step of the training draws latents from them, each time others.
@torch.inference_mode()
def encode_images(images):
    posterior = vae.encode((images / 127.5 - 1).to(vae.dtype)).latent_dist
    return torch.cat([posterior.mean.float(), (0.5 * posterior.logvar.float()).exp()], dim=1)


# A hash of a model's weights, by which a trainer knows it. Each weight is hashed in the first
# precision that holds its values, so that copies in 16 and 32 bits are one model.
def hash_weights(model):
    digests = []
    for weight in model.parameters():
        flat = weight.detach().flatten()
        for kind in (torch.bfloat16, torch.float16, torch.float32):
            if torch.equal(flat.to(kind).float(), flat):
                break
        digest = hashlib.sha256(f"{kind} {tuple(weight.shape)}".encode())
        digest.update(flat.to(kind).view(torch.uint8).numpy())
        digests.append(digest.hexdigest())
    return "narrow:" + hashlib.sha256("".join(sorted(digests)).encode()).hexdigest()


# ---- The settings that decide the content of the cache. A trainer, and a run that resumes, compare
# them with their own.
empty_prompt = encode_captions(tokenize([""]))[0].half().numpy()  # in place of a dropped caption
probe = tokenizer("The quick brown fox, 123 times!", truncation=True).input_ids
vocabulary = json.dumps([sorted(tokenizer.get_vocab().items()), probe])
side = args.resolution // downscale
settings = {
    "format_version": 4,
    "keys": 2,
    "model_family": "sd",
    "vae": {
        "class": "AutoencoderKL",
        "sha256": hash_weights(vae),
        "scaling_factor": vae.config.scaling_factor,
        "shift_factor": vae.config.get("shift_factor") or 0.0,
    },
    "text_encoder": {"class": "CLIPTextModel", "sha256": hash_weights(text_encoder)},
    "tokenizer": {
        "sha256": hashlib.sha256(vocabulary.encode()).hexdigest(),
        "model_max_length": most_tokens,
    },
    "latents": "moments",
    "latents_shape": [2 * vae.config.latent_channels, side, side],
    "prompt_embeds_shape": list(empty_prompt.shape),
    "text_cache": "embeddings",
    "dtype": "bfloat16" if accelerator.mixed_precision == "bf16" else "float32",
    "transform": {
        "resolution": args.resolution,
        "center_crop": args.center_crop,
        "image_interpolation_mode": "bicubic",
        "random_flip": args.random_flip,
        "seed": args.seed,
        "min_size": 0,
        "bucket_step": None,
        "bucket_max_ratio": 2.0,
        "bucket_no_upscale": False,
        "skip_empty_captions": False,
        "caption_weights": None,
    },
    "features": [],
    "source": {"fingerprint": rows._fingerprint, "rows": len(rows)},
    "rows_per_shard": args.rows_per_shard,
}
if accelerator.mixed_precision == "bf16":
    vae.bfloat16()
    text_encoder.bfloat16()
layout = torch.channels_last if device.type == "cuda" else torch.preserve_format
pin = torch.Tensor.pin_memory if device.type == "cuda" else torch.Tensor.cpu  # so no copy waits
vae.to(device, memory_format=layout)  # on a GPU the fastest for convolutions
text_encoder.to(device)


# ---- The folder of the cache. A file gets its name when all of it is on the disk, so it is whole
# or absent, whenever a run is killed.
@contextmanager
def writing(path):
    unfinished = path.with_name(f".tmp-{os.getpid()}-{path.name}")
    with open(unfinished, "wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)


def write_json(path, content):
    with writing(path) as file:
        file.write(json.dumps(content, indent=1).encode())


def digest_file(path):
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


records_dir = args.output_dir / "records"  # what each complete shard holds
if accelerator.is_main_process:
    args.output_dir.mkdir(parents=True, exist_ok=True)
    if not cache_path.exists():
        decoder = "torchcodec" if decode_jpeg else "pillow"
        about = {"decoder": f"{decoder} {version(decoder)}", "tokenizer_rules": {"libraries": ""}}
        about["made_with"] = {name: str(value) for name, value in vars(args).items() if value}
        write_json(cache_path, settings | about)
    records_dir.mkdir(exist_ok=True)  # after cache.json, by which the folder is known as a cache
accelerator.wait_for_everyone()
cache = json.loads(cache_path.read_text())
if different := [name for name in settings if cache.get(name) != settings[name]]:
    different = ", ".join(different)
    sys.exit(f"{args.output_dir} holds another cache ({different}): choose another --output_dir")

# ---- Rows -> images and captions, in threads: Pillow and torchvision release Python's lock.
threads = ThreadPoolExecutor(8)
mode = "L" if vae.config.in_channels == 1 else "RGB"


# An image file -> uint8 [C, H, W]: upright, and white where it is transparent.
def decode_image(file):
    data = Path(file["path"]).read_bytes() if file["bytes"] is None else file["bytes"]
    image = Image.open(io.BytesIO(data))
    is_jpeg = image.format in ("JPEG", "MPO") and image.mode in ("L", "RGB")
    if decode_jpeg and is_jpeg and image.getexif().get(0x0112, 1) == 1:
        return decode_jpeg(data, mode="GRAY" if mode == "L" else "RGB")
    ImageOps.exif_transpose(image, in_place=True)
    if image.mode[0] in "IF":
        raise ValueError("it has more than 8 bits, which only the big script reads")
    if image.has_transparency_data:
        white = Image.new("RGBA", image.size, "white")
        image = Image.alpha_composite(white, image.convert("RGBA"))
    return TF.pil_to_tensor(image.convert(mode))


# A row -> its name, its caption, its image, and why it can't be used. The random numbers come from
# a seed that is computed from what they are for, so it does not matter who draws them, and when.
def load_row(row, file, text):
    name = (file and file["path"]) or f"row {row}"
    if os.path.isabs(name) and os.path.isabs(source):
        name = Path(os.path.relpath(name, source)).as_posix()
    key = xxhash.xxh3_64_intdigest(f"image {args.seed} 0 {row}".encode())
    y, x, _, choice = np.random.default_rng(key).random(4)
    if args.center_crop:
        y = x = 0.5
    try:
        if isinstance(text, list):
            text = text[int(choice * len(text))]
        if not isinstance(text, str):
            raise ValueError("it has no caption")
        image = decode_image(file)
        height, width = image.shape[1:]
        crop = min(height, width)  # the largest square
        corner = round((height - crop) * y), round((width - crop) * x)
        size = [args.resolution] * 2
        image = TF.resized_crop(image, *corner, crop, crop, size, Image.BICUBIC, antialias=True)
        return name, text.removeprefix("\ufeff").strip(), image, None
    except Exception as error:
        if isinstance(error, MemoryError) or getattr(error, "errno", None):
            raise  # the machine's fault, such as a disk that is gone, not the row's
        # A black image takes its place, so that the batch keeps its shape.
        black = torch.zeros(len(mode), args.resolution, args.resolution, dtype=torch.uint8)
        reason = re.sub(" at 0x[0-9a-f]+", "", f"{type(error).__name__}: {error}")  # of an object
        return name, "", black, reason


# Lists of row numbers -> lists of loaded rows; two batches are loaded while one is encoded.
def load_ahead(batches):
    loading = []
    for batch in batches:
        columns = rows[batch]
        loading.append(threads.map(load_row, batch, columns["image"], columns[args.caption_column]))
        if len(loading) > 2:
            yield [*loading.pop(0)]
    for loaded in loading:
        yield [*loaded]


# With a wrong column or a broken disk, all rows would be skipped.
def check_skipped(skipped):
    if len(skipped) > args.max_skipped * len(rows):
        example = f"{skipped[-1]['key']} ({skipped[-1]['reason']})"
        sys.exit(f"{len(skipped)} of {len(rows)} rows can't be used, such as {example}")


# ---- The shards. Each process makes every num_processes-th one. A shard starts a new batch, so its
# bytes do not depend on which process makes it.
count = math.ceil(len(rows) / args.rows_per_shard)
digits = max(5, len(str(count)))  # the same for all, since shards are sorted by name
names = [f"data-{number:0{digits}d}-of-{count:0{digits}d}.arrow" for number in range(count)]
all_skipped = []
for number in range(accelerator.process_index, count, accelerator.num_processes):
    path = args.output_dir / names[number]
    record_path = records_dir / f"{path.name}.json"
    if record_path.exists():  # the shard is complete, if nobody has damaged it since
        record = json.loads(record_path.read_text())
        if path.exists() and digest_file(path) == record["sha256"]:
            all_skipped += record["skipped"]
            continue
    first = number * args.rows_per_shard
    end = min(first + args.rows_per_shard, len(rows))
    starts = range(first, end, args.batch_size)
    batches = [[*range(start, min(start + args.batch_size, end))] for start in starts]
    parts = [[]]  # record batches that are written as one: a trainer opens few large ones faster
    skipped = []
    captions_cut = 0
    for batch, loaded in zip(batches, load_ahead(batches), strict=True):
        keys, texts, images, reasons = zip(*loaded, strict=True)
        # On the device. float16 halves the size of the cache.
        images = pin(torch.stack(images)).to(device, non_blocking=True)
        tokens = tokenize(list(texts))
        columns = {"latents": encode_images(images)}
        if args.random_flip:
            columns["latents_flipped"] = encode_images(images.flip(-1))
        columns["prompt_embeds"] = encode_captions(tokens)
        columns = {name: each.half().flatten(1).cpu().numpy() for name, each in columns.items()}
        # Rows that can't be used are listed, and left out.
        good = []
        for i, row in enumerate(batch):
            is_finite = all(np.isfinite(each[i]).all() for each in columns.values())
            reason = reasons[i] or (None if is_finite else "its numbers are not finite")
            if reason is None:
                good.append(i)
            else:
                skipped.append({"row": row, "key": keys[i], "reason": reason})
        # The columns as Arrow arrays, whose rows all have the same number of values.
        arrays = {
            name: pa.FixedSizeListArray.from_arrays(pa.array(each[good].ravel()), each.shape[1])
            for name, each in columns.items()
        }
        arrays["text"] = pa.array([texts[i] for i in good], pa.string())
        arrays["key"] = pa.array([keys[i] for i in good], pa.string())
        # A trainer checks a row when it first reads it, by the hash of its numbers.
        hashed = [b"".join(columns[name][i].tobytes() for name in sorted(columns)) for i in good]
        arrays["checksum"] = pa.array(map(xxhash.xxh3_64_intdigest, hashed), pa.uint64())
        parts[-1].append(pa.RecordBatch.from_pydict(arrays))
        if sum(each.nbytes for each in parts[-1]) >= 2**26:
            parts.append([])
        captions_cut += sum(bool(tokens.encodings[i].overflowing) for i in good)
    checksums = xxhash.xxh3_128()  # a hash of the rows' hashes, for a trainer that opens the shard
    schema = parts[0][0].schema  # `datasets` reads an Arrow stream, and its columns from the schema
    with writing(path) as file, pa.ipc.new_stream(file, schema) as writer:
        for part in parts:
            for table in pa.Table.from_batches(part, schema).combine_chunks().to_batches():
                writer.write_batch(table)
                checksums.update(table["checksum"].to_numpy())
    # A shard with a record is complete. After a kill between the two, it is made again.
    record = {"rows": end - first - len(skipped), "sha256": digest_file(path)}
    record |= {"checksums": checksums.hexdigest(), "encoded_again": 0}
    write_json(record_path, record | {"captions_cut": captions_cut, "skipped": skipped})
    all_skipped += skipped
    check_skipped(all_skipped)
    accelerator.print(f"{path.name}: rows {first} to {end - 1} of {len(rows)}")

# ---- The end: the files that make the shards a data set. state.json is the last.
accelerator.wait_for_everyone()
if accelerator.is_main_process:
    records = [json.loads((records_dir / f"{name}.json").read_text()) for name in names]
    skipped = sum((record["skipped"] for record in records), [])
    check_skipped(skipped)
    with writing(args.output_dir / "skipped.jsonl") as file:
        file.write("".join(json.dumps(each) + "\n" for each in skipped).encode())
    with writing(args.output_dir / "empty_prompt.npy") as file:
        np.save(file, empty_prompt)
    cache["empty_prompt_sha256"] = digest_file(args.output_dir / "empty_prompt.npy")
    for name in ("rows", "encoded_again", "captions_cut"):
        cache[name] = sum(record[name] for record in records)
    cache["skipped"] = len(skipped)
    cache["shards"] = {"name": names}
    for name in ("rows", "sha256", "checksums", "encoded_again", "captions_cut"):
        cache["shards"][name] = [record[name] for record in records]
    # `datasets` needs these keys.
    state = {"_format_columns": None, "_format_type": None, "_format_kwargs": {}, "_split": None}
    state |= {"_output_all_columns": False, "_data_files": [{"filename": name} for name in names]}
    state["_fingerprint"] = hashlib.sha256(json.dumps(cache).encode()).hexdigest()[:16]
    write_json(cache_path, cache)
    write_json(args.output_dir / "dataset_info.json", {})
    write_json(args.output_dir / "state.json", state)
    for leftover in args.output_dir.rglob(".tmp-*"):  # of runs that were killed
        leftover.unlink()
    print(f"Done: {cache['rows']} rows, {len(skipped)} skipped, are in {args.output_dir}")
    if cache["captions_cut"]:
        print(f"{cache['captions_cut']} captions are longer than {most_tokens} tokens, and are cut")
accelerator.wait_for_everyone()  # or the launcher would end the first process while it writes
accelerator.end_training()
