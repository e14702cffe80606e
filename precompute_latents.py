"""Cache what a Stable Diffusion U-Net is trained on: images and captions -> VAE latents and CLIP embeddings.

    accelerate launch precompute_latents.py     # the demo: handwritten digits, some seconds on a CPU
    accelerate launch --config_file accelerate_configs/multi_gpu.yaml precompute_latents.py \\
        --pretrained_model_name_or_path stable-diffusion-v1-5/stable-diffusion-v1-5 \\
        --train_data_dir photos --resolution 512 --center_crop --output_dir latents-photos

Reads a hub data set, or a local folder of anything that `datasets.load_dataset` opens, with a column of captions.
Writes into --output_dir: data-*.arrow, which `datasets.load_from_disk` opens, empty_prompt.npy, skipped.jsonl, and
cache.json, which says what the cache was made from. The same command again finishes what is missing, checks what is
there, and redoes nothing that is whole.
"""

import argparse
import atexit
import contextlib
import functools
import hashlib
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
from datetime import timedelta
from pathlib import Path

import datasets
import fsspec
import numpy as np
import pyarrow as pa
import torch
import torchvision.transforms.v2.functional as TF
import transformers
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs
from diffusers import AutoencoderKL, AutoencoderTiny
from filelock import FileLock, Timeout
from PIL import Image, ImageOps
from torchvision.io import ImageReadMode, decode_jpeg
from tqdm.auto import tqdm
from transformers import CLIPTextModel, CLIPTokenizer

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # or tokenizers complain about the loader's processes
HERE = Path(os.path.relpath(Path(__file__).parent))
# What the script runs with when it is given no data.
DEMO = {
    "pretrained_model_name_or_path": str(HERE / "demo/models"),
    "train_data_dir": str(HERE / "demo/digits"),
    "output_dir": "latents-digits",
    "resolution": 8,
    "batch_size": 64,
    "dataloader_num_workers": 0,
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
    add("--caption_column", default="text", help="column of captions; of a list one is drawn")
    add("--max_train_samples", type=int, help="drawn at random; of a stream the first")
    add("--cache_dir", help="where downloads and data sets are kept")
    add("--resolution", type=int, default=512, help="side of the square images, pixels")
    add("--center_crop", action="store_true", help="crop the centre, not a random square")
    add("--random_flip", action="store_true", help="mirrored images as well")
    modes = ["bicubic", "bilinear", "nearest-exact"]
    add("--image_interpolation_mode", choices=modes, default="bicubic", help="for resizing, antialiased")
    add("--dataloader_num_workers", type=int, help="processes that decode (None: by the cores)")
    # Models
    add("--pretrained_model_name_or_path", help="hub id or folder of a pipeline")
    add("--revision", help="branch, tag or commit of the models on the hub")
    add("--variant", help="of the weight files, such as fp16")
    add("--vae_name_or_path", help="AutoencoderKL or AutoencoderTiny instead")
    add("--text_encoder_name_or_path", help="CLIP text model instead, with its tokenizer")
    add("--tokenizer_name_or_path", help="tokenizer, if not beside the text encoder")
    add("--mixed_precision", choices=["no", "fp16", "bf16"], help="(None: what accelerate launch says)")
    # Output
    add("--output_dir", default="latents", help="everything is written here")
    add("--latents", choices=["moments", "sample"], help="mean and std, or one draw (None: moments if there are any)")
    add("--rows_per_shard", type=int, default=1024, help="source rows per file; a kill loses no more")
    add("--batch_size", type=int, default=16, help="images per process and forward pass")
    add("--max_skipped", type=float, default=0.05, help="share of rows that may fail")
    add("--seed", type=int, default=0, help="fixes all that is random")
    add("--dry_run", action="store_true", help="say how big the cache will be, and stop")

    args = parser.parse_args(argv)
    if args.dataset_name is None and args.train_data_dir is None:
        parser.set_defaults(**DEMO)
        args = parser.parse_args(argv)
        if os.environ.get("RANK", "0") == "0":
            flags = " ".join(f"--{key} {value}" for key, value in DEMO.items())
            given = shlex.join(sys.argv[1:] if argv is None else argv)
            print(
                f"No data given: this is the demo, short for\naccelerate launch {Path(__file__).name} {flags} {given}"
            )
    args.streaming = False  # a stream has neither a length nor a fingerprint to hold a cache to

    for name, value in vars(args).items():
        least = 0 if name in ("seed", "dataloader_num_workers") else 1
        if type(value) is int and value < least:
            parser.error(f"--{name} {value} is less than {least}")
    if not 0 <= args.max_skipped <= 1:
        parser.error(f"--max_skipped {args.max_skipped} is not a share between 0 and 1")
    if args.dataset_name is None and not Path(args.train_data_dir).is_dir():
        parser.error(f"--train_data_dir {args.train_data_dir} is not a folder")
    if args.pretrained_model_name_or_path is None:
        for name in ("vae_name_or_path", "text_encoder_name_or_path"):
            if getattr(args, name) is None:
                parser.error(f"--pretrained_model_name_or_path is needed, or --{name} as well")
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


def select_captioned(rows, image_column, args):
    """Keep the columns of images and of captions."""
    if args.caption_column not in rows.column_names:
        source, names = args.dataset_name or args.train_data_dir, ", ".join(rows.column_names)
        fail(f"{source} has no column {args.caption_column!r} but {names}: choose with --caption_column")
    return rows.select_columns([image_column, args.caption_column])


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


def transform(row, epoch, item, column, channels, args):
    """Stage 1, on CPU cores: a row of the source -> its caption and its pixels, cropped and resized in uint8.

    Returns {"row", "key", "text", "pixel_values": [channels, resolution, resolution], "skipped"}; the last says why
    the row can't be used, else it is None.
    """
    size, key, reason = args.resolution, name_image(row, item[column]), None
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
        image = decode_image(item[column], channels)
        image = crop_square(image, 0.5, 0.5) if args.center_crop else crop_square(image, y, x)
        image = resize(image, size, args.image_interpolation_mode)
    except Exception as error:  # a placeholder keeps the batch in shape
        text, image = "", torch.zeros(channels, size, size, dtype=torch.uint8)
        reason = str(error).split(" <_io")[0] or type(error).__name__  # without the address of Pillow's buffer
    return {"row": row, "key": key, "text": text, "pixel_values": image, "skipped": reason}


def tokenize(tokenizer, texts):
    """Captions -> tokens [N, model_max_length], filled up or cut off."""
    return tokenizer(texts, padding="max_length", truncation=True, return_tensors="pt").input_ids


class TransformedRows(torch.utils.data.Dataset):
    """Turns a list of rows into a batch of what `transform` makes of them, as the trainers see them in epoch 0.

    {"row", "key", "text", "skipped": lists, "pixel_values": uint8 [N, C, H, W], "input_ids": [N, model_max_length]}
    """

    def __init__(self, rows, tokenizer, *settings):
        self.rows, self.tokenizer, self.settings = rows, tokenizer, settings

    def __getitems__(self, indices):  # a batch at once: looking up single rows costs more than a small image
        columns = self.rows[indices]
        items = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        items = [transform(row, 0, item, *self.settings) for row, item in zip(indices, items, strict=True)]
        batch = {name: [item[name] for item in items] for name in items[0]}
        batch["pixel_values"] = torch.stack(batch["pixel_values"])
        return {**batch, "input_ids": tokenize(self.tokenizer, batch["text"])}


def keep(batch):
    """What the data sets give is a batch already."""
    return batch


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


# ------------------------------------------------------------------------------------------------- encode


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
        vae = vae_class.from_pretrained(source, **options, torch_dtype=dtype)
        source, options = locate_model(args, args.text_encoder_name_or_path, "text_encoder")
        text_encoder = CLIPTextModel.from_pretrained(source, **options, torch_dtype=dtype)
        own_path = args.tokenizer_name_or_path or args.text_encoder_name_or_path
        source, options = locate_model(args, own_path, "tokenizer")
        options.pop("variant", None)
        tokenizer = CLIPTokenizer.from_pretrained(source, **options)
        if len(tokenizer) < 256:  # where there are no files, transformers makes one that knows two tokens
            raise ValueError("no vocabulary")
    except Exception as error:
        fail(
            f"{source} does not hold the {options.get('subfolder', 'model')} of a Stable Diffusion pipeline ({error})"
        )
    if args.resolution is not None and args.resolution % vae_scale_factor(vae):
        fail(f"--resolution {args.resolution} is not a multiple of {vae_scale_factor(vae)}, which this VAE needs")
    # Old tokenizers do not know how many tokens the text encoder takes.
    tokenizer.model_max_length = min(tokenizer.model_max_length, text_encoder.config.max_position_embeddings)
    return vae.eval(), text_encoder.eval(), tokenizer


def step_seed(*key):
    """A 64-bit seed from integers: (seed, step, micro-batch, process)."""
    return int(np.random.SeedSequence(key).generate_state(1, np.uint64)[0])


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


@torch.inference_mode()
def encode(batch, vae, text_encoder, args):
    """Stage 2, on the device: a batch of `transform`ed rows -> the columns of the cache that are numbers.

    Returns ({column: float16 [N, numbers per row]}, event): the columns are on their way to the CPU, and there once
    the event has happened (None on a CPU).
    """
    pixel_values, device = batch["pixel_values"], vae.device
    # Batches begin where shards do, so this does not depend on the number of processes.
    generator = torch.Generator(device).manual_seed(step_seed(args.seed, batch["row"][0]))
    columns = {"latents": encode_images(vae, pixel_values)}
    if args.random_flip:
        columns["latents_flipped"] = encode_images(vae, pixel_values.flip(-1))
    if args.latents == "sample" and not isinstance(vae, AutoencoderTiny):
        for name, moments in columns.items():
            mean, std = moments.chunk(2, dim=1)
            columns[name] = mean + std * torch.randn(mean.shape, generator=generator, device=device)
    columns["prompt_embeds"] = encode_prompts(text_encoder, batch["input_ids"])
    columns = {name: x.half().flatten(1).to("cpu", non_blocking=True) for name, x in columns.items()}
    event = torch.cuda.Event() if device.type == "cuda" else None
    if event is not None:
        event.record()
    return columns, event


def all_finite(columns, event):
    """Wait for `encode` and tell for each row whether all of its numbers are finite."""
    if event is not None:
        event.synchronize()
    return torch.stack([numbers.isfinite().all(dim=1) for numbers in columns.values()]).all(dim=0)


def encode_all(batches, models, exact_models, args):
    """Encode batch after batch; yields (first row, record batch of the good rows, skipped, images encoded again).

    What is not finite in `models` (Stable Diffusion's VAEs overflow in float16) is encoded again by `exact_models`,
    the same in float32. A row that is not finite even then, or too large for the cache's float16, is skipped.
    """
    queued = None
    for batch in itertools.chain(batches, [None]):
        ready, queued = queued, batch and (batch, *encode(batch, *models, args))
        if ready is None:
            continue  # one batch stays queued: the device computes it while the one before is checked and written
        batch, columns, event = ready
        finite, encoded_again = all_finite(columns, event), 0
        if not finite.all() and exact_models is not models:
            encoded_again = len(finite)
            device = batch["pixel_values"].device
            columns, event = encode(batch, *(model.to(device) for model in exact_models), args)
            finite = all_finite(columns, event)
        reasons = [
            reason or (None if good else "its latents or embeddings are not finite")
            for reason, good in zip(batch["skipped"], finite.tolist(), strict=True)
        ]
        good = [i for i, reason in enumerate(reasons) if reason is None]
        skipped = [
            {"row": row, "key": key, "reason": reason}
            for row, key, reason in zip(batch["row"], batch["key"], reasons, strict=True)
            if reason is not None
        ]
        arrays = {
            name: pa.FixedSizeListArray.from_arrays(pa.array(numbers[good].flatten().numpy()), numbers.shape[1])
            for name, numbers in columns.items()
        }
        for name in ("text", "key"):
            arrays[name] = pa.array([batch[name][i] for i in good], pa.string())
        yield batch["row"][0], pa.RecordBatch.from_pydict(arrays), skipped, encoded_again


# ------------------------------------------------------------------------------------------------- the cache


def hash_weights(model):
    """SHA-256 of a model's weights: of their values and shapes, whatever the files and the library call them."""
    digests = []
    for weight in model.parameters():
        digest = hashlib.sha256(str(tuple(weight.shape)).encode())
        digest.update(weight.detach().float().cpu().contiguous().numpy())
        digests.append(digest.hexdigest())
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


def write_file(path, text):
    """Write a small file whole or not at all."""
    unfinished = path.with_name(f".tmp-{path.name}")
    unfinished.write_text(text)
    unfinished.replace(path)


def read_cache(output_dir):
    """What cache.json says, and the records of all shards that are whole, also of those written since.

    Returns (dict, {file name: {"rows", "sha256", "encoded_again", "skipped": [{"row", "key", "reason"}]}}).
    """
    cache = json.loads((output_dir / "cache.json").read_text())
    records = {name: {**record, "skipped": []} for name, record in cache.get("shards", {}).items()}
    if records:  # finished once: what was skipped is in one file
        for entry in map(json.loads, (output_dir / "skipped.jsonl").read_text().splitlines()):
            records[name_shard(entry["row"], cache)]["skipped"].append(entry)
    for path in output_dir.glob("unfinished/*.json"):
        records[path.stem] = json.loads(path.read_text())
    return cache, records


def name_shard(row, cache):
    """The file that holds a row of the source."""
    number, count = row // cache["rows_per_shard"], math.ceil(cache["source"]["rows"] / cache["rows_per_shard"])
    return f"data-{number:05d}-of-{count:05d}.arrow"


def digest_file(path):
    """SHA-256 of a file, None if there is none."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        return None


def write_shard(path, encoded):
    """Write what `encode_all` yields for one shard, whole or not at all, and then its record."""
    unfinished, record = path.with_name(f".tmp-{path.name}"), {"rows": 0, "encoded_again": 0, "skipped": []}
    try:
        with contextlib.ExitStack() as stack:
            file, writer = stack.enter_context(unfinished.open("wb")), None
            for _, rows, skipped, encoded_again in encoded:
                writer = writer or stack.enter_context(pa.ipc.new_stream(file, rows.schema))
                writer.write_batch(rows)
                record["rows"] += len(rows)
                record["encoded_again"] += encoded_again
                record["skipped"] += skipped
        with unfinished.open("rb") as file:
            os.fsync(file.fileno())
        record["sha256"] = digest_file(unfinished)
        unfinished.replace(path)
        write_file(path.parent / "unfinished" / f"{path.name}.json", json.dumps(record))
    except OSError as error:
        fail(
            f"{path} could not be written ({error}); the same command goes on from the shards that are whole",
            os.environ.get("RANK", "0"),
        )
    finally:
        unfinished.unlink(missing_ok=True)
    return record


def check_skipped(count, num_rows, max_skipped, output_dir):
    """End the program if more rows were skipped than --max_skipped allows."""
    if count > max_skipped * num_rows:
        fail(
            f"{count} of {num_rows} rows could not be used, more than --max_skipped {max_skipped:g} allows: see "
            f"{output_dir}; the same command with a larger --max_skipped goes on from here",
            os.environ.get("RANK", "0"),
        )


def finish(output_dir, empty_prompt, max_skipped):
    """When all shards are whole, write what makes them a data set; last state.json, without which it does not open."""
    cache, records = read_cache(output_dir)
    skipped = [entry for record in records.values() for entry in record.pop("skipped")]
    skipped.sort(key=lambda entry: entry["row"])
    write_file(output_dir / "skipped.jsonl", "".join(json.dumps(entry) + "\n" for entry in skipped))
    check_skipped(len(skipped), cache["source"]["rows"], max_skipped, output_dir)
    np.save(output_dir / ".tmp-empty_prompt.npy", empty_prompt)
    (output_dir / ".tmp-empty_prompt.npy").replace(output_dir / "empty_prompt.npy")
    cache["empty_prompt_sha256"] = digest_file(output_dir / "empty_prompt.npy")
    cache["rows"] = sum(record["rows"] for record in records.values())
    cache["skipped"], cache["encoded_again"] = len(skipped), sum(r["encoded_again"] for r in records.values())
    cache["shards"] = dict(sorted(records.items()))
    # What `datasets` wants to find
    state = dict.fromkeys(["_format_columns", "_format_type", "_split"])
    state |= {"_format_kwargs": {}, "_output_all_columns": False}
    state["_data_files"] = [{"filename": name} for name in cache["shards"]]
    state["_fingerprint"] = hashlib.sha256(json.dumps(cache).encode()).hexdigest()[:16]
    write_file(output_dir / "cache.json", json.dumps(cache, indent=1))
    write_file(output_dir / "dataset_info.json", "{}")
    write_file(output_dir / "state.json", json.dumps(state, indent=1))
    shutil.rmtree(output_dir / "unfinished")
    return cache


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


def show_progress(encoded, batches, progress_bar):
    """Pass on what `encode_all` yields, and show the speed and how long the device waited for images."""
    start = time.perf_counter()
    for item in encoded:
        waited = batches.waited / (time.perf_counter() - start)
        progress_bar.set_postfix_str(f"{waited:.1%} waiting for images", refresh=False)
        progress_bar.update(len(item[1]) + len(item[2]))
        yield item


def stop(number, frame):
    """End at once: what is whole stays, and the shard in work is deleted on the way out."""
    if os.environ.get("RANK", "0") == "0":
        print(f"\nStopped by {signal.Signals(number).name}; the same command goes on from here", flush=True)
    raise SystemExit(128 + number)


def main(args):
    """Make the cache; ends with status 130 or 143 after Ctrl-C or SIGTERM, with 1 and a sentence if it can't go on."""
    # Processes meet only at the start and the end, and the end may be days away.
    accelerator = Accelerator(
        mixed_precision=args.mixed_precision, kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(days=100))]
    )
    device, rank, num_processes = accelerator.device, accelerator.process_index, accelerator.num_processes
    check_processes(accelerator)

    # Models
    transformers.utils.logging.disable_progress_bar()
    dtypes = {"no": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
    if accelerator.mixed_precision not in dtypes:
        fail(f"--mixed_precision {accelerator.mixed_precision} is not supported: choose no, fp16 or bf16")
    dtype, (*exact_models, tokenizer) = dtypes[accelerator.mixed_precision], load_models(args, torch.float32)
    description = describe_models(*exact_models, tokenizer)
    with torch.inference_mode():
        empty_prompt = encode_prompts(exact_models[1], tokenize(tokenizer, [""]))[0].half().numpy()
    models = exact_models if dtype == torch.float32 else load_models(args, dtype)[:2]
    vae, text_encoder = models
    if args.latents is None:
        args.latents = "sample" if isinstance(vae, AutoencoderTiny) else "moments"
    elif args.latents == "moments" and isinstance(vae, AutoencoderTiny):
        fail("an AutoencoderTiny has no moments: leave --latents out")
    vae.to(device, memory_format=torch.channels_last if device.type == "cuda" else torch.preserve_format)
    text_encoder.to(device)
    channels = vae.config.in_channels
    with torch.inference_mode():
        try:
            blank = torch.zeros(1, channels, args.resolution, args.resolution, dtype=torch.uint8, device=device)
            num_channels, height, width = encode_images(vae, blank).shape[1:]
        except RuntimeError as error:
            fail(f"the VAE can't encode {args.resolution} x {args.resolution} pixels ({error})")
    if args.latents == "sample" and not isinstance(vae, AutoencoderTiny):
        num_channels //= 2

    # Data
    rows, column = load_rows(args)
    rows = select_captioned(rows, column, args)
    transform_flags = ["resolution", "center_crop", "image_interpolation_mode", "random_flip", "seed"]
    settings = {
        "format_version": 1,
        **description,
        "latents": args.latents,
        "latents_shape": [num_channels, height, width],
        "prompt_embeds_shape": list(empty_prompt.shape),
        "dtype": str(dtype).removeprefix("torch."),
        "transform": {name: getattr(args, name) for name in transform_flags},
        "source": {"fingerprint": rows._fingerprint, "rows": len(rows)},
        "rows_per_shard": args.rows_per_shard,
    }
    shards = [name_shard(row, settings) for row in range(0, len(rows), args.rows_per_shard)]
    row_bytes = 2 * (num_channels * height * width * (1 + args.random_flip) + empty_prompt.size)
    size = functools.partial(tqdm.format_sizeof, suffix="B", divisor=1000)
    accelerator.print(
        f"{len(rows):,} rows of {size(row_bytes)} ({size(2 * empty_prompt.size)} of it the caption's) and the text: "
        f"{size(len(rows) * row_bytes)} in {len(shards):,} shards"
    )
    if args.dry_run:
        return

    # The cache that is there, or a new one
    output_dir = Path(args.output_dir)
    lock = FileLock(output_dir / ".lock")
    if accelerator.is_main_process:
        try:
            output_dir.mkdir(parents=True, exist_ok=True)
            lock.acquire(timeout=0)
            if not (output_dir / "cache.json").exists():
                if others := [path.name for path in output_dir.iterdir() if not path.name.startswith(".")]:
                    fail(f"--output_dir {output_dir} holds {others[0]} and no latent cache: choose another folder")
                unlike = ("output_dir", "cache_dir", "dataloader_num_workers", "dry_run", "streaming", "max_skipped")
                flags = {name: x for name, x in vars(args).items() if x is not None and name not in unlike}
                write_file(output_dir / "cache.json", json.dumps({**settings, "made_with": flags}, indent=1))
            for leftover in output_dir.glob(".tmp-*"):  # of a run that was killed
                leftover.unlink()
            (output_dir / "unfinished").mkdir(exist_ok=True)
        except Timeout:
            fail(f"another process is writing to {output_dir}: end it, or choose another --output_dir")
        except OSError as error:
            fail(f"--output_dir {output_dir} can't be written to ({error})")
    accelerator.wait_for_everyone()
    try:
        cache, records = read_cache(output_dir)
        differences = find_differences({name: cache.get(name) for name in settings}, settings)
    except Exception as error:
        fail(f"{output_dir} is damaged ({type(error).__name__}: {error}): delete it, or choose another --output_dir")
    if differences:
        fail(f"{output_dir} holds another cache ({', '.join(differences)}): choose another --output_dir")

    # Encode the shards that are missing or damaged, each process its share
    handlers = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    missing = {}  # first row of a shard: the row after its last
    mine = range(rank, len(shards), num_processes)
    for number in tqdm(mine, "Checking", disable=not records or rank > 0, leave=False):
        name = shards[number]
        if name in records and (digest := digest_file(output_dir / name)) != records[name]["sha256"]:
            print(f"{output_dir / name} is {'damaged' if digest else 'gone'}: making it again", flush=True)
            del records[name]
        if name not in records:
            missing[number * args.rows_per_shard] = min(len(rows), (number + 1) * args.rows_per_shard)
    if missing:
        (output_dir / "state.json").unlink(missing_ok=True)  # an unfinished cache does not open
    num_workers = args.dataloader_num_workers
    if num_workers is None:  # a core per process stays free for the encoder
        num_workers = max(0, min(8, count_cores() - 1))
    dataloader = torch.utils.data.DataLoader(
        TransformedRows(rows, tokenizer, column, channels, args),
        batch_sampler=(
            range(first, min(first + args.batch_size, end))
            for start, end in missing.items()
            for first in range(start, end, args.batch_size)
        ),
        collate_fn=keep,
        num_workers=num_workers,
        pin_memory=device.type == "cuda",
        worker_init_fn=ignore_signals,
    )
    batches = Prefetcher(dataloader, device)
    total = sum(min(args.rows_per_shard, len(rows) - number * args.rows_per_shard) for number in mine)
    done = total - sum(end - start for start, end in missing.items())
    name = f"Images (process 1 of {num_processes})" if num_processes > 1 else "Images"
    progress_bar = tqdm(total=total, initial=done, desc=name, unit="img", disable=not accelerator.is_main_process)
    num_skipped = sum(len(records[shards[number]]["skipped"]) for number in mine if shards[number] in records)
    encoded = show_progress(encode_all(batches, models, exact_models, args), batches, progress_bar)
    for number, of_shard in itertools.groupby(encoded, lambda item: item[0] // args.rows_per_shard):
        num_skipped += len(write_shard(output_dir / shards[number], of_shard)["skipped"])
        check_skipped(num_skipped, len(rows), args.max_skipped, output_dir)
    batches.close()
    progress_bar.close()
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        try:
            cache = finish(output_dir, empty_prompt, args.max_skipped)
        except OSError as error:
            fail(f"{output_dir} could not be finished ({error}); its shards are whole, the same command goes on")
        lock.release()
        (output_dir / ".lock").unlink()
        print(f"Done: {cache['rows']:,} rows, {cache['skipped']:,} skipped, are in {output_dir}")
    for number, handler in handlers.items():
        signal.signal(number, handler)
    accelerator.wait_for_everyone()
    time.sleep(0.1)  # torch 2.11 can hang on the way out if gloo's thread has not yet let go of the last gather
    accelerator.end_training()


if __name__ == "__main__":
    main(parse_args())
