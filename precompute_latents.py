"""Cache a data set for training: images -> VAE latents, captions -> text embeddings.

    accelerate launch precompute_latents.py     # the demo: handwritten digits, seconds on a CPU
    accelerate launch --config_file accelerate_configs/multi_gpu.yaml precompute_latents.py \\
        --pretrained_model_name_or_path stable-diffusion-v1-5/stable-diffusion-v1-5 \\
        --train_data_dir photos --resolution 512 --center_crop --output_dir latents-photos

Input: a data set on the hub, or a local folder that `datasets.load_dataset` can open, with a
column of captions. Output, in --output_dir:
    data-*.arrow      the shards; `datasets.load_from_disk` opens them
    empty_prompt.npy  the embedding of a dropped caption
    skipped.jsonl     the rows that could not be used, and why
    run.args          the flags of this run
    cache.json        the models, the data and the settings that the cache was made with
Run the same command again to resume: it checks the existing shards and makes only those that are
missing or damaged. Several values of --resolution make several caches in one pass, for example
--output_dir/256 and --output_dir/512.

Layout of this file:
    parse_args         the flags; bad values stop the script before anything is loaded or written
    TransformedRows    stage 1, on CPU cores: rows -> a batch of images and captions
    describe_encoders  stage 2, on the CPU: the settings that decide the content of the cache
    encode             stage 2, on the device: a batch -> the columns of the cache
    encode_all         keeps the device busy while finished rows are checked and written
    main               the run in phases
Cropping and the choice of captions are in diffusion_training/data/, the files of a cache in
diffusion_training/latents/. To get all of it in one file that you can change:
python -m diffusion_training.standalone precompute_latents.py > mine.py
"""

import argparse
import itertools
import math
import os
import shlex
import time
from argparse import Namespace
from collections.abc import Iterable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
import transformers
from tqdm.auto import tqdm

from diffusion_training import check_version

check_version("0.1.0", Path(__file__).name)  # first: another version may lack the modules below

from diffusion_training.arguments import (
    COUNT,
    PATH,
    SWITCH,
    OneOrMore,
    check_source,
    make_parser,
    number,
    parse_demo,
)
from diffusion_training.data.captions import (
    are_cut,
    count_tokens,
    decode_ahead,
    look_at_captions,
    say_cut,
    say_emptied,
    say_equal,
    tokenize,
    transform,
)
from diffusion_training.data.families import Tokenizers
from diffusion_training.data.images import shrink_masks
from diffusion_training.data.rows import load_rows, read_items
from diffusion_training.data.streams import StreamedRows, add_stream_flags, check_stream_args
from diffusion_training.data.texts import check_captions
from diffusion_training.errors import end_if_stopped, fail, in_one_sentence
from diffusion_training.latents.cache import (
    check_skipped,
    describe_damage,
    finish_cache,
    open_cache,
    writing_shard,
)
from diffusion_training.latents.columns import (
    LATENTS,
    PROMPTS,
    checksum_row,
    count_rows,
    make_column,
)
from diffusion_training.latents.encoders import (
    DTYPES,
    Encoders,
    describe_latents,
    describe_models,
    encode_images,
    has_moments,
    load_models,
    place_encoders,
    try_models,
    vae_scale_factor,
)
from diffusion_training.latents.passes import (
    CacheEncoded,
    find_batch_size,
    find_begun,
    set_batch_size,
    split_caches,
    take_resolutions,
    write_each,
)
from diffusion_training.latents.plan import name_shard, plan_cache
from diffusion_training.latents.text_encoders import (
    describe_prompts,
    encode_empty_prompt,
    encode_prompts,
)
from diffusion_training.loading import load_batches, seconds_between, work_ahead
from diffusion_training.order import KEYS, step_seed
from diffusion_training.training.flags import (
    add_bucket_flags,
    add_device_flags,
    add_encoder_flags,
    add_family_flags,
    add_source_flags,
    add_transform_flags,
)
from diffusion_training.training.launch import make_accelerator

# Without it, tokenizers warns about the worker processes of the DataLoader.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
HERE = shlex.quote(os.path.relpath(Path(__file__).parent))
# The flags of a run without a data set. Flags on the command line override them.
DEMO = f"""
    --pretrained_model_name_or_path {HERE}/demo/models --train_data_dir {HERE}/demo/digits
    --output_dir latents-digits --resolution 8 --batch_size 64 --dataloader_num_workers 0
"""

# -------------------------------------------------------------------------------------------------
# the flags


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that this script shares with precompute_latents_ray.py."""
    add = parser.add_argument_group("data").add_argument
    add_source_flags(add, captions=True)
    side = number(2, 16384, int)
    add(
        "--resolution",
        type=side,
        nargs="+",
        action=OneOrMore,
        help="side of the square images in pixels; several values make several caches",
    )
    add("--center_crop", **SWITCH, help="crop the centre, not a random square")
    add("--random_flip", **SWITCH, help="use mirrored images too")
    add_transform_flags(add)
    add_bucket_flags(add)

    add = parser.add_argument_group("models").add_argument
    add("--pretrained_model_name_or_path", type=PATH, help="hub id or folder of a pipeline")
    add("--revision", help="branch, tag or commit of the models on the hub")
    add("--variant", help="variant of the weight files, such as fp16")
    add_family_flags(add)
    add_encoder_flags(add)
    add_device_flags(add, trains=False)

    add = parser.add_argument_group("output").add_argument
    add("--output_dir", type=PATH, default="latents", help="folder for all output")
    add(
        "--latents",
        choices=["moments", "sample"],
        help="store mean and std, or one sample (None: moments if the VAE has them)",
    )
    add(
        "--text_cache",
        choices=["embeddings", "ids"],
        default="embeddings",
        help="ids: a small cache of token ids, encoded by the trainer",
    )
    add(
        "--rows_per_shard",
        type=COUNT,
        default=1024,
        help="source rows per file; a killed run loses at most this many",
    )
    add(
        "--batch_size",
        type=number(1, 10**5, int, "auto"),
        default=16,
        help="images per forward pass of a process; auto: the largest that fits",
    )
    add("--max_skipped", type=number(0, 1), default=0.05, help="share of rows that may fail")
    add("--seed", type=number(0, 2**63 - 1, int), default=0, help="seed of all random choices")
    add("--dry_run", **SWITCH, help="print the size of the cache, and stop")


def check_args(parser: argparse.ArgumentParser, args: Namespace) -> None:
    """Stop with one line and status 2 if the flags do not fit together."""
    check_source(parser, args)
    check_captions(parser, args)
    if args.pretrained_model_name_or_path is None:
        for name in ("vae_name_or_path", "text_encoder_name_or_path"):
            if getattr(args, name) is None:
                parser.error(f"--pretrained_model_name_or_path is needed, or --{name} as well")


def parse_args(argv: list[str] | None = None) -> Namespace:
    """Parse and check the command line."""
    parser = make_parser(__file__, __doc__)
    add_flags(parser)
    add_stream_flags(parser.add_argument_group("stream").add_argument, trains=False)
    args = parser.parse_args(argv)
    if args.dataset_name is None and args.train_data_dir is None:
        # PRX gets a folder of its own, so its demo does not meet the cache of the U-Net's demo.
        flow = " --output_dir latents-digits-flow" * (args.model_family == "prx")
        args = parse_demo(parser, DEMO + flow, argv)
    check_args(parser, args)
    check_stream_args(parser, args)
    # None leaves it out of cache.json, because the script on Ray has no --streaming.
    args.streaming = args.streaming or None
    return args


# -------------------------------------------------------------------------------------------------
# stage 1: the data


class TransformedRows(torch.utils.data.Dataset):
    """Decodes rows once and makes a batch of them for each cache.

    Takes (indices into `caches`, keys (0, row)) and returns {"batches": [one per cache]}. `caches`
    holds the flags of each cache. The rows are transformed as the trainers see them in epoch 0.

    A batch has, in the order of the rows:
        cache: index of its cache
        row, key, skipped: lists, as `transform` returns them
        text: list of captions; with --caption_weights, of lists of captions
        cut: list of bool: does the caption have more tokens than model_max_length?
        groups: lists of positions in the batch, one list for each group of equally sized images
    and in the order of the groups:
        pixel_values: for each group, uint8 [n, C, H, W]
        mask: for each group, uint8 [n, 1, H, W], if the data set has masks
        input_ids, and for SDXL input_ids_2: [N, model_max_length]
        original_size, crop_top_left: int32 [N, 2]
    """

    def __init__(
        self, rows: Any, tokenizers: Tokenizers, column: str, channels: int, caches: list[Namespace]
    ) -> None:
        self.rows, self.tokenizers, self.column, self.channels = rows, tokenizers, column, channels
        self.caches = caches

    def __getitem__(self, key: tuple[Sequence[int], list[tuple]]) -> dict[str, Any]:
        places, keys = key
        found: dict[int, list] = {place: [] for place in places}
        for (epoch, row, *_), item in zip(keys, read_items(self.rows, keys), strict=True):
            if len(places) > 1:
                item = decode_ahead(item, self.column, self.channels, self.caches[0])
            for place, items in found.items():
                items.append(
                    transform(row, epoch, item, self.column, self.channels, self.caches[place])
                )
        return {"batches": [self.collate(place, items) for place, items in found.items()]}

    def collate(self, place: int, items: list[dict]) -> dict[str, Any]:
        batch: dict[str, Any] = {"cache": place} | {
            name: [item[name] for item in items] for name in items[0]
        }
        places = range(len(items))
        sizes = dict.fromkeys(image.shape for image in batch["pixel_values"])
        groups = [[i for i in places if batch["pixel_values"][i].shape == size] for size in sizes]
        most = self.caches[place].batch_size
        groups = [group[i : i + most] for group in groups for i in range(0, len(group), most)]
        for name in batch.keys() & {"pixel_values", "mask"}:
            batch[name] = [torch.stack([batch[name][i] for i in group]) for group in groups]
        batch["groups"], batch["cut"] = groups, are_cut(self.tokenizers, batch["text"])
        order = sum(groups, [])
        for name in ("original_size", "crop_top_left"):
            batch[name] = torch.tensor([batch[name][i] for i in order], dtype=torch.int32)
        return batch | tokenize(self.tokenizers, [batch["text"][i] for i in order])


# -------------------------------------------------------------------------------------------------
# stage 2: the models


def describe_encoders(
    vae: torch.nn.Module,
    text_encoders: torch.nn.ModuleList,
    tokenizers: Tokenizers,
    args: Namespace,
) -> tuple[dict[str, np.ndarray], dict]:
    """Try the models on the CPU in float32, and describe the cache that they will make.

    Returns (empty_prompt, settings). `empty_prompt` is {name: float16 array}, the embeddings that
    a trainer uses for a dropped caption. `settings` must be equal in two runs for their shards to
    fit together.
    """
    try_models(vae, text_encoders)
    if args.latents == "moments" and not has_moments(vae):
        fail(f"an {type(vae).__name__} has no moments: leave --latents out")
    args.latents = args.latents or ("moments" if has_moments(vae) else "sample")
    empty_prompt = encode_empty_prompt(text_encoders, tokenizers, args)
    prompts = describe_prompts(empty_prompt, args)
    if "prompt_mask" in empty_prompt:  # drop the padding, as for the rows
        empty_prompt["prompt_embeds"] = empty_prompt["prompt_embeds"][
            empty_prompt.pop("prompt_mask")
        ]
    empty_prompt = {name: embeds.half().numpy() for name, embeds in empty_prompt.items()}
    settings = {
        "format_version": 2,  # version 1 had no row checksums
        "keys": KEYS,
        **describe_models(vae, text_encoders, tokenizers),
        **describe_latents(vae, args.resolution, args.latents),
        **prompts,
        "text_cache": args.text_cache,
        "dtype": DTYPES[args.mixed_precision],
    }
    return empty_prompt, settings


@torch.inference_mode()
def encode_texts(
    batch: dict, text_encoders: torch.nn.ModuleList, args: Namespace
) -> dict[str, torch.Tensor]:
    """Stage 2 for captions, on the device.

    Returns {column: [N, numbers per row]} in float16, or int32 for token ids.
    """
    if args.text_cache == "ids":
        names = [
            name
            for name in ("input_ids", "input_ids_2", "prompt_mask", "prompt_lengths")
            if name in batch
        ]
        return {name: batch[name] if name == "prompt_mask" else batch[name].int() for name in names}
    texts = encode_prompts(text_encoders, batch)
    return {name: x.half() if x.is_floating_point() else x for name, x in texts.items()}


@torch.inference_mode()
def encode(
    batch: dict,
    vae: torch.nn.Module,
    text_encoders: torch.nn.ModuleList,
    args: Namespace,
    texts: dict | None = None,
) -> tuple[dict, torch.cuda.Event | None]:
    """Stage 2, on the device: a batch of transformed rows -> the numeric columns of the cache.

    `texts` is the result of `encode_texts`, if the caller already has it. Returns (columns, event).
    `columns` is {name: [n, numbers per row] for each group of rows}, in float16, int32 (token ids
    and sizes) or uint8 (masks). The copies to the CPU may still be running: they are complete once
    `event` has happened (None on a CPU).
    """
    device, columns = vae.device, {}
    # Each shard starts a new batch, so the noise does not depend on the number of processes.
    generator = torch.Generator(device).manual_seed(
        step_seed("latents", args.seed, batch["row"][0])
    )
    for name in ["latents"] + ["latents_flipped"] * args.random_flip:
        columns[name] = []
        for pixel_values in batch["pixel_values"]:
            latents = encode_images(
                vae, pixel_values.flip(-1) if name == "latents_flipped" else pixel_values
            )
            if args.latents == "sample" and has_moments(vae):
                mean, std = latents.chunk(2, dim=1)
                latents = mean + std * torch.randn(mean.shape, generator=generator, device=device)
            columns[name].append(latents.half())
    texts = encode_texts(batch, text_encoders, args) if texts is None else texts
    if len(text_encoders) > 1:  # SDXL is conditioned on size and crop
        texts = texts | {name: batch[name] for name in ("original_size", "crop_top_left")}
    counts = [len(group) for group in batch["groups"]]
    columns |= {name: numbers.split(counts) for name, numbers in texts.items()}
    if "mask" in batch:
        columns["mask"] = [shrink_masks(masks, vae_scale_factor(vae)) for masks in batch["mask"]]
    if args.bucket_step:
        sizes = [
            torch.tensor(latents.shape[-2:], dtype=torch.int32) for latents in columns["latents"]
        ]
        columns["size"] = [
            size.expand(len(group), 2) for size, group in zip(sizes, batch["groups"], strict=True)
        ]
    for name, parts in columns.items():
        columns[name] = [part.flatten(1).to("cpu", non_blocking=True) for part in parts]
    event = torch.cuda.Event() if device.type == "cuda" else None
    if event is not None:
        event.record()
    return columns, event


def collect(
    groups: list[list[int]], columns: dict[str, list[torch.Tensor]], event: torch.cuda.Event | None
) -> tuple[dict, list[bool]]:
    """Wait for `encode`, and bring the rows back into their order.

    Returns ({column: list with an array for each row}, list that tells which rows are finite).
    """
    if event is not None:
        event.synchronize()
    order = np.argsort(sum(groups, []))
    parts = zip(*columns.values(), strict=True)  # for each group, all its columns
    finite = [
        torch.stack([part.isfinite().all(dim=1) for part in group]).all(dim=0) for group in parts
    ]
    rows = {
        name: [row for part in parts for row in part.numpy()] for name, parts in columns.items()
    }
    if "prompt_mask" in rows:  # drop the padding
        masks = rows.pop("prompt_mask")
        for name in rows.keys() & set(PROMPTS):
            pairs = zip(rows[name], masks, strict=True)
            rows[name] = [row.reshape(len(mask), -1)[mask].ravel() for row, mask in pairs]
    return {name: [found[i] for i in order] for name, found in rows.items()}, torch.cat(finite)[
        order
    ].tolist()


def encode_all(
    batches: Iterable[dict], models: Encoders, exact_models: Encoders, caches: list[Namespace]
) -> Iterator[CacheEncoded]:
    """Encode all batches, and keep the device busy while rows are checked.

    `caches` holds the flags of each cache. Consecutive batches of the same rows, for several
    caches, share their encoded captions. If a batch is not finite (Stable Diffusion's VAEs
    overflow in float16), it is encoded again with `exact_models`, the same models in float32. A
    row that is not finite even then, or too large for the cache's float16, is skipped.

    Yields (index of the cache, first row, record batch of the good rows, skipped rows, counts).
    """
    queued = order = texts = None
    for batch in itertools.chain(batches, [None]):
        if batch and order != (order := (batch["row"], batch["groups"])):
            texts = encode_texts(batch, models[1], caches[batch["cache"]])
        ready, queued = (
            queued,
            batch and (batch, *encode(batch, *models, caches[batch["cache"]], texts)),
        )
        if ready is None:
            # One batch stays queued: the device computes it while the previous one is checked and
            # written.
            continue
        batch, columns, event = ready
        args = caches[batch["cache"]]
        (columns, finite), counts = collect(batch["groups"], columns, event), {"encoded_again": 0}
        if not all(finite) and exact_models is not models:
            counts["encoded_again"] = len(finite)
            device = batch["input_ids"].device
            again = encode(batch, *(model.to(device) for model in exact_models), args)
            columns, finite = collect(batch["groups"], *again)
        good, skipped = [], []
        for i, (row, key, reason) in enumerate(
            zip(batch["row"], batch["key"], batch["skipped"], strict=True)
        ):
            reason = reason or (None if finite[i] else "its latents or embeddings are not finite")
            good += [i] if reason is None else []
            skipped += [] if reason is None else [{"row": row, "key": key, "reason": reason}]
        counts["captions_cut"] = sum(batch["cut"][i] for i in good)
        rows = [checksum_row({name: numbers[i] for name, numbers in columns.items()}) for i in good]
        ragged = (LATENTS if args.bucket_step else ()) + (PROMPTS if "prompt_mask" in batch else ())
        arrays = {
            name: make_column(numbers, good, name in ragged) for name, numbers in columns.items()
        }
        kinds = {
            "text": pa.list_(pa.string()) if args.caption_weights else pa.string(),
            "key": pa.string(),
        }
        arrays |= {
            name: pa.array([batch[name][i] for i in good], kind) for name, kind in kinds.items()
        }
        arrays["checksum"] = pa.array(rows, pa.uint64())
        yield batch["cache"], batch["row"][0], pa.RecordBatch.from_pydict(arrays), skipped, counts


# -------------------------------------------------------------------------------------------------
# the run


def list_batches(loaded: Iterable[dict], waits: list) -> Iterator[dict]:
    """Yield the batches of `TransformedRows`, and append the waiting times to `waits`."""
    for made in loaded:
        waits.append(made["waited"])
        yield from made["batches"]


def show_progress(
    encoded: Iterable[CacheEncoded], waits: list, progress_bar: tqdm
) -> Iterator[CacheEncoded]:
    """Pass on the results of `encode_all`, and show the speed and the time spent waiting."""
    start, waited = time.perf_counter(), 0.0
    for item in encoded:
        while len(waits) > 2:  # on CUDA the last events may not have happened yet
            waited += seconds_between(*waits.pop(0))
        progress_bar.set_postfix_str(
            f"{waited / (time.perf_counter() - start):.1%} waiting for images", refresh=False
        )
        progress_bar.update(len(item[2]) + len(item[3]))
        yield item


@in_one_sentence
def main(args: Namespace) -> None:
    """Make the cache.

    The exit status is 130 after Ctrl-C, 143 after SIGTERM, and 1 after an error, with one line
    that tells the reason.
    """
    transformers.utils.logging.disable_progress_bar()
    # Processes synchronize only at the start and at the end, which may be days apart.
    accelerator, cores = make_accelerator(args, timeout=timedelta(days=100))
    device, rank, num_processes = (
        accelerator.device,
        accelerator.process_index,
        accelerator.num_processes,
    )

    # The models are loaded before the data: images are decoded to the channels of the VAE, grey or
    # colour.
    sides = take_resolutions(args)
    vae, text_encoders, tokenizers = load_models(args, torch.float32)
    empty_prompt, settings = describe_encoders(vae, text_encoders, tokenizers, args)
    exact_models = vae, text_encoders
    models = place_encoders(exact_models, device, args)
    rows, column = load_rows(args, args.streaming, [args.caption_column])
    texts = look_at_captions(rows, args.caption_column) if accelerator.is_main_process else []
    say_equal(texts, args)
    say_emptied(tokenizers, texts)

    # The settings decide the content, and so whether an existing cache can be resumed.
    plans, tokens = split_caches(vae, settings, sides, args), count_tokens(tokenizers, texts)
    for each, settings in plans:
        _, sentence = plan_cache(rows, settings, tokens, each)
        accelerator.print(sentence if len(plans) == 1 else f"{each.output_dir}: {sentence}")
    if args.dry_run:
        return
    caches, folders = [each for each, _ in plans], [Path(each.output_dir) for each, _ in plans]
    dataset = TransformedRows(rows, tokenizers, column, models[0].config.in_channels, caches)
    if args.batch_size == "auto":  # an existing cache keeps its batch size
        size = find_begun(folders) or find_batch_size(accelerator, device, dataset, models, encode)
        set_batch_size(size, args, *caches)
    locks, begun, records = zip(
        *(open_cache(accelerator, settings, each) for each, settings in plans), strict=True
    )
    stream = StreamedRows(rows, folders[0], begun[0], records[0]) if args.streaming else None
    num_rows = stream.count if stream else len(rows)  # a stream knows only the rows read so far

    # Each process takes every num_processes-th shard. It first checks its shards, then makes those
    # that are missing or damaged.
    missing: dict[int, dict[int, Path]] = {}  # {shard: {index of a cache that lacks it: its file}}
    mine = range(rank, math.ceil(num_rows / args.rows_per_shard), num_processes)
    for i in tqdm(mine, "Checking", disable=not any(records) or rank > 0, leave=False):
        for place, (folder, known) in enumerate(zip(folders, records, strict=True)):
            path = folder / name_shard(i, settings)
            if damage := describe_damage(path, known):
                print(f"{path} {damage}: making it again", flush=True)
                del known[path.name]
            if path.name not in known:
                missing.setdefault(i, {})[place] = path
                (folder / "state.json").unlink(missing_ok=True)  # an unfinished cache does not open

    # Encode. Each shard starts a new batch, so its bytes do not depend on the number of processes.
    many = count_rows(args)
    if args.dataloader_num_workers is None:  # leaves one core per process to the encoder
        args.dataloader_num_workers = min(8, cores - 1)
    ends = {i: min(num_rows, (i + 1) * args.rows_per_shard) for i in mine}
    keys = (
        (list(paths), [(0, row) for row in range(first, min(first + many, ends[i]))])
        for i, paths in missing.items()
        for first in range(i * args.rows_per_shard, ends[i], many)
    )
    if stream:
        lacking = {i * args.rows_per_shard: ends[i] for i in missing}
        keys = ((range(1), batch) for batch in stream.keys(lacking, many, rank, num_processes))
    batches, waits = load_batches(dataset, keys, args.dataloader_num_workers, device), []
    counts = {i: ends[i] - i * args.rows_per_shard for i in mine}
    total = len(caches) * sum(counts.values())
    done = total - sum(len(paths) * counts[i] for i, paths in missing.items())
    total = total if stream is None or stream.ended else None
    name = f"Images (process 1 of {num_processes})" if num_processes > 1 else "Images"
    progress_bar = tqdm(
        total=total, initial=done, desc=name, unit="img", disable=not accelerator.is_main_process
    )
    skipped = [
        [x for i in mine for x in known.get(name_shard(i, settings), {"skipped": []})["skipped"]]
        for known in records
    ]
    encoded = work_ahead(
        encode_all(list_batches(batches, waits), models, exact_models, caches), 16, device
    )
    encoded = show_progress(encoded, waits, progress_bar)
    for i, of_shard in itertools.groupby(encoded, lambda item: item[1] // args.rows_per_shard):
        # A stream may have more shards than were known at the start.
        paths = missing.get(i) or {0: folders[0] / name_shard(i, settings)}
        made = write_each(writing_shard, paths, of_shard)
        if stream:
            num_rows = stream.keep_place(i, rank)
        for place, record in made.items():
            skipped[place] += record["skipped"]
            check_skipped(skipped[place], num_rows, args.max_skipped)
        end_if_stopped()
    batches.close()
    progress_bar.close()

    # When all processes are done, the first one, which has the locks, writes the records into one
    # cache.json.
    accelerator.wait_for_everyone()
    for output_dir, lock in zip(folders, filter(None, locks), strict=False):
        try:
            cache = finish_cache(output_dir, empty_prompt, args.max_skipped)
        except OSError as error:
            fail(
                f"{output_dir} could not be finished ({error}); "
                "its shards are whole, the same command goes on"
            )
        lock.release(force=True)
        # missing_ok: some versions of filelock delete the file themselves.
        (output_dir / ".lock").unlink(missing_ok=True)
        say_cut(cache["captions_cut"], cache["rows"], cache["prompt_embeds_shape"][0])
        print(f"Done: {cache['rows']:,} rows, {cache['skipped']:,} skipped, are in {output_dir}")
    accelerator.wait_for_everyone()
    # torch 2.11 can hang at exit if gloo's thread has not yet released the last gather.
    time.sleep(0.1)
    accelerator.end_training()


if __name__ == "__main__":
    main(parse_args())
