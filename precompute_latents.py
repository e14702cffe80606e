"""Cache what a Stable Diffusion U-Net is trained on: images and captions -> VAE latents and CLIP embeddings.

    accelerate launch precompute_latents.py     # the demo: handwritten digits, some seconds on a CPU
    accelerate launch --config_file accelerate_configs/multi_gpu.yaml precompute_latents.py \\
        --pretrained_model_name_or_path stable-diffusion-v1-5/stable-diffusion-v1-5 \\
        --train_data_dir photos --resolution 512 --center_crop --output_dir latents-photos

Reads a hub data set, or a local folder of anything that `datasets.load_dataset` opens, with a column of captions.
Writes into --output_dir: data-*.arrow, which `datasets.load_from_disk` opens, empty_prompt.npy, skipped.jsonl,
run.args (the flags again), and cache.json, which says what the cache was made from. The same command again finishes
what is missing, checks what is there, and redoes nothing that is whole.

What stands where:
    parse_args                       the flags, one a line; bad values end here, before anything is loaded or written
    transform, TransformedRows       stage 1, on CPU cores: rows -> a batch of images and captions
    describe_encoders, encode        stage 2, on the device: a batch -> the columns of the cache, and what decides them
    encode_all, work_ahead           keep the device busy, also while files are written
    read_cache ... finish            the files; a shard is whole or not there, so that a kill costs no more than one
    main                             the run in phases
After main the text is that of the other scripts, and `python tests/copy_shared.py precompute_latents.py` copies a
change: images, batches from a thread so that the device need not wait, models and their hashes, the launch.
"""

import argparse
import atexit
import collections
import contextlib
import ctypes
import functools
import hashlib
import importlib.metadata
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
import uuid
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import datasets
import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
import torchvision.transforms.v2.functional as TF
import transformers
import xxhash
from accelerate import Accelerator
from accelerate.utils import DynamoBackend, InitProcessGroupKwargs, TorchDynamoPlugin
from diffusers import AutoencoderKL, AutoencoderTiny
from filelock import FileLock, Timeout
from fsspec.implementations.local import LocalFileSystem
from PIL import Image, ImageOps
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
    --pretrained_model_name_or_path {HERE}/demo/models --train_data_dir {HERE}/demo/digits
    --output_dir latents-digits --resolution 8 --batch_size 64 --dataloader_num_workers 0
"""
DTYPES = {"no": "float32", "fp16": "float16", "bf16": "bfloat16"}  # of --mixed_precision
BATCH_BYTES = 2**26  # of a record batch: a trainer opens every one of a cache, and this script holds one
# Flags that change nothing in a cache: cache.json and run.args are the same whatever they were.
UNLIKE = ("output_dir", "cache_dir", "dataloader_num_workers", "dry_run", "max_skipped")

# ------------------------------------------------------------------------------------------------- the flags


def make_parser():
    """The flags, and how they are read."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], epilog="@FILE stands for the flags in a file, such as a run's run.args",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter, fromfile_prefix_chars="@",
    )  # fmt: skip
    parser.convert_arg_line_to_args = functools.partial(shlex.split, comments=True)
    switch = {"action": argparse.BooleanOptionalAction, "default": False}  # --flag, and --no-flag against a @FILE
    count = number(1, 10**9, int)
    path = os.path.expanduser  # a shell leaves the ~ of --output_dir=~/run as it is

    add = parser.add_argument_group("data").add_argument
    add("--dataset_name", type=path, help="data set on the hub, or a local folder")
    add("--dataset_config_name", help="configuration of the data set, if it has several")
    add("--dataset_split", default="train", help="split to read")
    add("--train_data_dir", type=path, help="local folder: images, parquet or webdataset tars")
    add("--image_column", help="column of images (None: `image`, or the only one)")
    add("--caption_column", default="text", help="column of captions; of a list one is drawn")
    add("--caption_extension", default=".txt", help="of files beside the images, if there is no such column")
    add("--max_train_samples", type=count, help="drawn at random; of a stream the first")
    add("--cache_dir", type=path, help="where downloads and data sets are kept")
    add("--resolution", type=number(1, 16384, int), default=512, help="side of the square images, pixels")
    add("--center_crop", **switch, help="crop the centre, not a random square")
    add("--random_flip", **switch, help="mirrored images as well")
    add("--min_size", type=number(0, 16384, int), default=0, help="skip images with a shorter side, pixels")
    add("--skip_empty_captions", **switch, help="skip images without a word")
    modes = ["bicubic", "bilinear", "nearest-exact"]
    add("--image_interpolation_mode", choices=modes, default="bicubic", help="for resizing, antialiased")
    add("--dataloader_num_workers", type=number(0, 1024, int), help="processes that decode (None: by the cores)")

    add = parser.add_argument_group("models").add_argument
    add("--pretrained_model_name_or_path", type=path, help="hub id or folder of a pipeline")
    add("--revision", help="branch, tag or commit of the models on the hub")
    add("--variant", help="of the weight files, such as fp16")
    add("--vae_name_or_path", type=path, help="AutoencoderKL or AutoencoderTiny instead")
    add("--text_encoder_name_or_path", type=path, help="CLIP text model instead, with its tokenizer")
    add("--tokenizer_name_or_path", type=path, help="tokenizer, if not beside the text encoder")
    add("--compile", nargs="?", const="inductor", metavar="BACKEND", help="torch.compile with this backend")
    add("--mixed_precision", choices=["no", "fp16", "bf16"], help="(None: what accelerate launch says)")

    add = parser.add_argument_group("output").add_argument
    add("--output_dir", type=path, default="latents", help="everything is written here")
    add("--latents", choices=["moments", "sample"], help="mean and std, or one draw (None: moments if there are any)")
    add("--text_cache", choices=["embeddings", "ids"], default="embeddings", help="ids: small; the trainer encodes")
    add("--rows_per_shard", type=count, default=1024, help="source rows per file; a kill loses no more")
    add("--batch_size", type=number(1, 10**5, int), default=16, help="images per process and forward pass")
    add("--max_skipped", type=number(0, 1), default=0.05, help="share of rows that may fail")
    add("--seed", type=number(0, 2**63 - 1, int), default=0, help="fixes all that is random")
    add("--dry_run", **switch, help="say how big the cache will be, and stop")
    return parser


def check_args(parser, args):
    """End with one line and status 2 if flags do not fit together, before anything is loaded."""
    if args.dataset_name is None and not Path(args.train_data_dir).is_dir():
        parser.error(f"--train_data_dir {args.train_data_dir} is not a folder")
    if args.pretrained_model_name_or_path is None:
        for name in ("vae_name_or_path", "text_encoder_name_or_path"):
            if getattr(args, name) is None:
                parser.error(f"--pretrained_model_name_or_path is needed, or --{name} as well")


def parse_args(argv=None):
    """Parse and check the command line."""
    parser = make_parser()
    args = parser.parse_args(argv)
    if args.dataset_name is None and args.train_data_dir is None:
        args = parse_demo(parser, DEMO, argv)
    check_args(parser, args)
    return args


# ------------------------------------------------------------------------------------------------- stage 1: the data


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


class TransformedRows(torch.utils.data.Dataset):
    """Turns keys (0, row) into a batch of what `transform` makes of the rows, as the trainers see them in epoch 0.

    {"row", "key", "text", "skipped", "cut": lists, "pixel_values": uint8 [N, C, H, W], "input_ids": [N,
    model_max_length]}; "cut" says which captions have more tokens than that.
    """

    def __init__(self, rows, tokenizer, *settings):
        self.rows, self.tokenizer, self.settings = rows, tokenizer, settings

    def __getitem__(self, keys):
        items = [
            transform(row, epoch, item, *self.settings)
            for (epoch, row), item in zip(keys, read_items(self.rows, keys), strict=True)
        ]
        batch = {name: [item[name] for item in items] for name in items[0]}
        batch["pixel_values"] = torch.stack(batch["pixel_values"])
        batch["cut"] = are_cut(self.tokenizer, batch["text"])
        return {**batch, "input_ids": tokenize(self.tokenizer, batch["text"])}


# ------------------------------------------------------------------------------------------------- stage 2: the models


def describe_encoders(vae, text_encoder, tokenizer, args):
    """Find out what the models, on the CPU and in float32, make of these flags.

    Returns (empty_prompt: its embedding, float16 [tokens, D]; settings: what of all this has to be the same in two
    runs, or their shards do not fit together).
    """
    try_models(vae, text_encoder)
    has_moments = not isinstance(vae, AutoencoderTiny)
    if args.latents == "moments" and not has_moments:
        fail("an AutoencoderTiny has no moments: leave --latents out")
    args.latents = args.latents or ("moments" if has_moments else "sample")
    with torch.device("meta"):  # shapes without numbers: a whole image would take a CPU a while
        shell = type(vae).from_config(vae.config)
        image = torch.zeros(1, vae.config.in_channels, args.resolution, args.resolution, dtype=torch.uint8)
    with torch.inference_mode(), explained(f"the VAE can't encode {args.resolution} x {args.resolution} pixels"):
        channels, *size = encode_images(shell, image).shape[1:]
    with torch.inference_mode():
        empty_prompt = encode_prompts(text_encoder, tokenize(tokenizer, [""]))[0].half().numpy()
    settings = {
        "format_version": 2,  # 1 had no checksums of rows
        **describe_models(vae, text_encoder, tokenizer),
        "latents": args.latents,
        "latents_shape": [channels // 2 if args.latents == "sample" and has_moments else channels, *size],
        "prompt_embeds_shape": list(empty_prompt.shape),
        "text_cache": args.text_cache,
        "dtype": DTYPES[args.mixed_precision],
    }
    return empty_prompt, settings


def place_encoders(exact_models, device, args):
    """VAE and text encoder on the device in the precision that is asked for; `exact_models` are they in float32."""
    dtype = getattr(torch, DTYPES[args.mixed_precision])
    vae, text_encoder = models = exact_models if dtype == torch.float32 else load_models(args, dtype)[:2]
    put_on_device(vae, device)
    text_encoder.to(device)
    if args.compile:  # the parts that the encoding calls
        compile_model(vae.encoder, args.compile)
        compile_model(text_encoder, args.compile)
    return models


@torch.inference_mode()
def encode(batch, vae, text_encoder, args):
    """Stage 2, on the device: a batch of `transform`ed rows -> the columns of the cache that are numbers.

    Returns ({column: float16 [N, numbers per row], token ids int32}, event): the columns are on their way to the CPU,
    and there once the event has happened (None on a CPU).
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
    columns = {name: latents.half().flatten(1) for name, latents in columns.items()}
    if args.text_cache == "ids":
        columns["input_ids"] = batch["input_ids"].int()
    else:
        columns["prompt_embeds"] = encode_prompts(text_encoder, batch["input_ids"]).half().flatten(1)
    columns = {name: numbers.to("cpu", non_blocking=True) for name, numbers in columns.items()}
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
    """Encode batch after batch; yields (first row, record batch of the good rows, skipped, counts of other things).

    What is not finite in `models` (Stable Diffusion's VAEs overflow in float16) is encoded again by `exact_models`,
    the same in float32. A row that is not finite even then, or too large for the cache's float16, is skipped.
    """
    queued = None
    for batch in itertools.chain(batches, [None]):
        ready, queued = queued, batch and (batch, *encode(batch, *models, args))
        if ready is None:
            continue  # one batch stays queued: the device computes it while the one before is checked and written
        batch, columns, event = ready
        finite, counts = all_finite(columns, event), {"encoded_again": 0}
        if not finite.all() and exact_models is not models:
            counts["encoded_again"] = len(finite)
            device = batch["pixel_values"].device
            columns, event = encode(batch, *(model.to(device) for model in exact_models), args)
            finite = all_finite(columns, event)
        reasons = [
            reason or (None if good else "its latents or embeddings are not finite")
            for reason, good in zip(batch["skipped"], finite.tolist(), strict=True)
        ]
        good = [i for i, reason in enumerate(reasons) if reason is None]
        counts["captions_cut"] = sum(batch["cut"][i] for i in good)
        skipped = [
            {"row": row, "key": key, "reason": reason}
            for row, key, reason in zip(batch["row"], batch["key"], reasons, strict=True)
            if reason is not None
        ]
        rows = [checksum({name: numbers[i].numpy() for name, numbers in columns.items()}) for i in good]
        arrays = {
            name: pa.FixedSizeListArray.from_arrays(pa.array(numbers[good].flatten().numpy()), numbers.shape[1])
            for name, numbers in columns.items()
        }
        for name in ("text", "key"):
            arrays[name] = pa.array([batch[name][i] for i in good], pa.string())
        arrays["checksum"] = pa.array(rows, pa.uint64())
        yield batch["row"][0], pa.RecordBatch.from_pydict(arrays), skipped, counts


# ------------------------------------------------------------------------------------------------- the cache


def write_file(path, text):
    """Write a small file whole or not at all."""
    unfinished = name_unfinished(path)
    unfinished.write_bytes(os.fsencode(text))  # as argparse reads run.args; the rest is ASCII
    unfinished.replace(path)


def name_unfinished(path):
    """A name for a file until it is whole; never the same twice: a run that is thought dead may still be writing."""
    return path.with_name(f".tmp-{uuid.uuid4().hex[:12]}-{path.name}")


def read_cache(output_dir):
    """What cache.json says, and the records of all shards that are whole, also of those written since.

    Returns (dict, {file name: {"rows", "sha256", "checksums": of the rows' checksums, "encoded_again",
    "captions_cut", "skipped": [{"row", "key", "reason"}]}}).
    """
    cache, state = json.loads((output_dir / "cache.json").read_text()), output_dir / "state.json"
    if state.exists() and json.loads(state.read_text())["_fingerprint"] != fingerprint(cache):
        raise ValueError("cache.json is not as it was written")
    cache.setdefault("text_cache", "embeddings")  # older caches have no other
    records = {name: {**record, "skipped": []} for name, record in cache.get("shards", {}).items()}
    if records:  # finished once: what was skipped is in one file
        for entry in map(json.loads, (output_dir / "skipped.jsonl").read_text().splitlines()):
            records[name_shard(entry["row"], cache)]["skipped"].append(entry)
    for path in output_dir.glob("unfinished/data-*.json"):
        with contextlib.suppress(ValueError):  # a record that can't be read is that of a shard that is missing
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


def write_batches(writer, batches, checksums):
    """Write record batches as one; those without a row as none, which would be in the way of who reads by batches."""
    for batch in pa.Table.from_batches(batches).combine_chunks().to_batches() if batches else ():
        writer.write_batch(batch)
        checksums.update(batch["checksum"].to_numpy())


def write_shard(path, encoded):
    """Write what `encode_all` yields for one shard, whole or not at all, and then its record."""
    unfinished, record = name_unfinished(path), {"rows": 0, "encoded_again": 0, "captions_cut": 0, "skipped": []}
    checksums = xxhash.xxh3_128()  # with it a trainer knows a shard, and by its rows' checksums each row
    try:
        with contextlib.ExitStack() as stack:
            file, writer, held = stack.enter_context(unfinished.open("wb")), None, []
            for _, rows, skipped, counts in encoded:
                writer = writer or stack.enter_context(pa.ipc.new_stream(file, rows.schema))
                held.append(rows)
                for name, more in {"rows": len(rows), "skipped": skipped, **counts}.items():
                    record[name] += more
                if sum(batch.nbytes for batch in held) >= BATCH_BYTES:
                    write_batches(writer, held, checksums)
                    held = []
            write_batches(writer, held, checksums)
        with unfinished.open("rb") as file:
            os.fsync(file.fileno())
        record["sha256"], record["checksums"] = digest_file(unfinished), checksums.hexdigest()
        unfinished.replace(path)
        write_file(path.parent / "unfinished" / f"{path.name}.json", json.dumps(record))
    except OSError as error:
        fail(
            f"{path} could not be written ({error}); the same command goes on from the shards that are whole",
            alone=True,
        )
    finally:
        unfinished.unlink(missing_ok=True)
    return record


def describe_damage(path, records):
    """Why a shard that has a record must be made again, None if it need not."""
    if path.name not in records:
        return None
    if any(entry["reason"].startswith("not read") for entry in records[path.name]["skipped"]):
        return "lacks rows that could not be read"
    if (digest := digest_file(path)) != records[path.name]["sha256"]:
        return "is damaged" if digest else "is gone"


def check_skipped(skipped, num_rows, max_skipped):
    """End the program if more rows were skipped than --max_skipped allows."""
    if len(skipped) > max_skipped * num_rows:
        fail(
            f"{len(skipped)} of {num_rows} rows could not be used, more than --max_skipped {max_skipped:g} allows, "
            f"such as {skipped[-1]['key']} ({skipped[-1]['reason']}); the same command tries again what could not be "
            "read, and goes on from here with a larger --max_skipped",
            alone=True,
        )


def plan_cache(rows, empty_prompt, settings, args):
    """Complete `settings`, and say how big the cache will be. Returns (names of its shards, that sentence)."""
    transform_flags = ["resolution", "center_crop", "image_interpolation_mode", "random_flip", "seed"]
    transform_flags += ["min_size", "skip_empty_captions"]
    settings |= {
        "transform": {name: getattr(args, name) for name in transform_flags},
        "source": {"fingerprint": rows._fingerprint, "rows": len(rows)},
        "rows_per_shard": args.rows_per_shard,
    }
    shards = [name_shard(row, settings) for row in range(0, len(rows), args.rows_per_shard)]
    text_bytes = 2 * empty_prompt.size if args.text_cache == "embeddings" else 4 * len(empty_prompt)
    row_bytes = 2 * math.prod(settings["latents_shape"]) * (1 + args.random_flip) + text_bytes
    size = functools.partial(tqdm.format_sizeof, suffix="B", divisor=1000)
    return shards, (
        f"{len(rows):,} rows of {size(row_bytes)} ({size(text_bytes)} of it the caption's) and the text: "
        f"{size(len(rows) * row_bytes)} in {len(shards):,} shards"
    )


def open_cache(accelerator, settings, args, folder=None):
    """Lock --output_dir, and take up the cache that is there, or begin one. `folder`: its copy, if it is elsewhere.

    Returns (the lock, which only the first process holds; what `read_cache` returns).
    """
    if folder is None:
        check_output_dir(args)
    output_dir, name = Path(folder or args.output_dir), args.output_dir
    lock = FileLock(output_dir / ".lock", is_singleton=True)  # a run that failed in a notebook may still hold it
    decoder = describe_decoder()
    if accelerator.is_main_process:
        try:
            output_dir.mkdir(parents=True, exist_ok=True)
            lock.acquire(timeout=0)
            if not (output_dir / "cache.json").exists():
                if others := [path.name for path in output_dir.iterdir() if not path.name.startswith(".")]:
                    fail(f"--output_dir {name} holds {others[0]} and no latent cache: choose another folder")
                flags = {name: x for name, x in vars(args).items() if x is not None and name not in UNLIKE}
                described = {**settings, "decoder": decoder, "made_with": flags}
                write_file(output_dir / "cache.json", json.dumps(described, indent=1))
            (output_dir / "unfinished").mkdir(exist_ok=True)
            for leftover in output_dir.rglob(".tmp-*"):  # of a run that was killed
                delete(leftover)
        except Timeout:
            fail(f"another process is writing to {name}: end it, or choose another --output_dir")
        except OSError as error:
            fail(f"--output_dir {name} can't be written to ({error})")
    accelerator.wait_for_everyone()
    try:
        cache, records = read_cache(output_dir)
        differences = find_differences({name: cache.get(name) for name in settings}, settings)
    except Exception as error:
        fail(f"{name} is damaged ({type(error).__name__}: {error}): delete it, or choose another --output_dir")
    if differences:
        fail(f"{name} holds another cache ({', '.join(differences)}): choose another --output_dir")
    path, text = output_dir / "run.args", format_args(args, UNLIKE)
    if accelerator.is_main_process and not (path.is_file() and path.read_bytes() == os.fsencode(text)):
        write_file(path, text)
    if cache.get("decoder", decoder) != decoder:  # no reason to refuse: JPEG decoders differ by a grey level or two
        accelerator.print(f"{name} was begun with {cache['decoder']}; its JPEGs are decoded with {decoder} now")
    return lock, cache, records


def describe_decoder():
    """What decodes JPEGs here, with its version."""
    name = "torchcodec" if decode_jpeg else "pillow"
    return f"{name} {importlib.metadata.version(name)}"


def finish(output_dir, empty_prompt, max_skipped):
    """When all shards are whole, write what makes them a data set; last state.json, without which it does not open."""
    cache, records = read_cache(output_dir)
    skipped = [entry for record in records.values() for entry in record.pop("skipped")]
    skipped.sort(key=lambda entry: entry["row"])
    write_file(output_dir / "skipped.jsonl", "".join(json.dumps(entry) + "\n" for entry in skipped))
    check_skipped(skipped, cache["source"]["rows"], max_skipped)
    np.save(output_dir / ".tmp-empty_prompt.npy", empty_prompt)
    (output_dir / ".tmp-empty_prompt.npy").replace(output_dir / "empty_prompt.npy")
    cache["empty_prompt_sha256"] = digest_file(output_dir / "empty_prompt.npy")
    for name in ("rows", "encoded_again", "captions_cut"):
        cache[name] = sum(record[name] for record in records.values())
    cache["skipped"] = len(skipped)
    cache["shards"] = dict(sorted(records.items()))
    # What `datasets` wants to find
    state = dict.fromkeys(["_format_columns", "_format_type", "_split"])
    state |= {"_format_kwargs": {}, "_output_all_columns": False}
    state["_data_files"] = [{"filename": name} for name in cache["shards"]]
    state["_fingerprint"] = fingerprint(cache)
    write_file(output_dir / "cache.json", json.dumps(cache, indent=1))
    write_file(output_dir / "dataset_info.json", "{}")
    write_file(output_dir / "state.json", json.dumps(state, indent=1))
    shutil.rmtree(output_dir / "unfinished")
    return cache


# ------------------------------------------------------------------------------------------------- the run


def watch(batches, waits):
    """Pass batches on, and note how long each was waited for."""
    for batch in batches:
        waits.append(batch["waited"])
        yield batch


def work_ahead(items, count, device):
    """Yield what a generator makes, up to `count` ahead in a thread: the device works while files are written."""
    if device.type == "cpu":  # would do both itself, and `keep_memory` serves the main thread
        yield from items
        return
    item = next(items, None)  # the first here: it starts the loader's processes, and a thread should not fork

    def make():
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():  # a thread has its own
            return next(items, None)

    with ThreadPoolExecutor(1) as thread:
        queue = collections.deque(thread.submit(make) for _ in range(count))
        try:
            while item is not None:
                yield item
                item = queue.popleft().result()
                queue.append(thread.submit(make))
        finally:
            thread.shutdown(wait=False, cancel_futures=True)


def show_progress(encoded, waits, progress_bar):
    """Pass on what `encode_all` yields, and show the speed and how long the device waited for images."""
    start, waited = time.perf_counter(), 0.0
    for item in encoded:
        while len(waits) > 2:  # on CUDA the last may not have happened yet
            waited += seconds_between(*waits.pop(0))
        progress_bar.set_postfix_str(f"{waited / (time.perf_counter() - start):.1%} waiting for images", refresh=False)
        progress_bar.update(len(item[1]) + len(item[2]))
        yield item


def main(args):
    """Make the cache; ends with status 130 or 143 after Ctrl-C or SIGTERM, with 1 and a sentence if it can't go on."""
    transformers.utils.logging.disable_progress_bar()
    # Processes meet only at the start and the end, and the end may be days away.
    accelerator, cores = make_accelerator(args, timeout=timedelta(days=100))
    device, rank, num_processes = accelerator.device, accelerator.process_index, accelerator.num_processes

    # The models before the data, because the VAE says whether images are decoded to grey or to colour.
    *exact_models, tokenizer = load_models(args, torch.float32)
    empty_prompt, settings = describe_encoders(*exact_models, tokenizer, args)
    models = place_encoders(exact_models, device, args)
    rows, column = load_rows(args, others=[args.caption_column])
    if accelerator.is_main_process:
        say_equal(look_at_captions(rows, args))

    # What decides the content, and with it whether a cache that is there can be gone on with.
    shards, sentence = plan_cache(rows, empty_prompt, settings, args)
    accelerator.print(sentence)
    if args.dry_run:
        return
    output_dir = Path(args.output_dir)
    lock, _, records = open_cache(accelerator, settings, args)

    # Each process takes every so many shards, and checks them before it makes those that are missing or damaged.
    missing = {}  # first row of a shard: the row after its last
    mine = range(rank, len(shards), num_processes)
    for number in tqdm(mine, "Checking", disable=not records or rank > 0, leave=False):
        name = shards[number]
        if damage := describe_damage(output_dir / name, records):
            print(f"{output_dir / name} {damage}: making it again", flush=True)
            del records[name]
        if name not in records:
            missing[number * args.rows_per_shard] = min(len(rows), (number + 1) * args.rows_per_shard)
    if missing:
        (output_dir / "state.json").unlink(missing_ok=True)  # an unfinished cache does not open

    # Encode. Batches begin where shards do, so that their bytes do not depend on the number of processes.
    if args.dataloader_num_workers is None:  # a core per process stays free for the encoder
        args.dataloader_num_workers = min(8, cores - 1)
    keys = (
        [(0, row) for row in range(first, min(first + args.batch_size, end))]
        for start, end in missing.items()
        for first in range(start, end, args.batch_size)
    )
    dataset = TransformedRows(rows, tokenizer, column, models[0].config.in_channels, args)
    batches, waits = load_batches(dataset, keys, args.dataloader_num_workers, device), []
    total = sum(min(args.rows_per_shard, len(rows) - number * args.rows_per_shard) for number in mine)
    done = total - sum(end - start for start, end in missing.items())
    name = f"Images (process 1 of {num_processes})" if num_processes > 1 else "Images"
    progress_bar = tqdm(total=total, initial=done, desc=name, unit="img", disable=not accelerator.is_main_process)
    skipped = [entry for number in mine if shards[number] in records for entry in records[shards[number]]["skipped"]]
    encoded = encode_all(watch(batches, waits), models, exact_models, args)
    encoded = work_ahead(encoded, 16, device)
    encoded = show_progress(encoded, waits, progress_bar)
    for number, of_shard in itertools.groupby(encoded, lambda item: item[0] // args.rows_per_shard):
        skipped += write_shard(output_dir / shards[number], of_shard)["skipped"]
        check_skipped(skipped, len(rows), args.max_skipped)
    batches.close()
    progress_bar.close()

    # The records become one cache.json when all processes are done.
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        try:
            cache = finish(output_dir, empty_prompt, args.max_skipped)
        except OSError as error:
            fail(f"{output_dir} could not be finished ({error}); its shards are whole, the same command goes on")
        lock.release(force=True)
        (output_dir / ".lock").unlink()
        say_cut(cache["captions_cut"], cache["rows"], cache["prompt_embeds_shape"][0])
        print(f"Done: {cache['rows']:,} rows, {cache['skipped']:,} skipped, are in {output_dir}")
    accelerator.wait_for_everyone()
    time.sleep(0.1)  # torch 2.11 can hang on the way out if gloo's thread has not yet let go of the last gather
    accelerator.end_training()


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


main = in_one_sentence(main)

if __name__ == "__main__":
    main(parse_args())
