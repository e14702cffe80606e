"""Cache a data set for training: images -> VAE latents, captions -> text embeddings.

    python precompute_latents.py     # the demo: drawings of animals, seconds on a CPU
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
    encode_images      stage 2, on the device: the VAE
    encode_texts       stage 2, on the device: the text encoders
    encode             stage 2, on the device: a batch -> the columns of the cache
    make_arrow_rows    stage 3, on the CPU: the columns -> Arrow rows, and which ones are skipped
    encode_all         keeps the device busy while finished rows are checked and written
    write_each         stage 3: the Arrow rows of a shard -> its file
    main               the run in phases
Cropping and the choice of captions are in diffusion_training/data/, what differs between models in
diffusion_training/families/, the files of a cache in diffusion_training/latents/ (`writing_shard`
in cache.py). minimal/precompute_latents.py is one short file without the package, which writes the
same shards, byte for byte.
"""

from pathlib import Path

try:
    from diffusion_training import check_version
except ModuleNotFoundError:
    raise SystemExit(
        f"{__file__} needs the package diffusion_training: run `pip install .` in the script's "
        "repository, or start from minimal/precompute_latents.py there, which does not need it"
    ) from None
check_version("0.1.0", Path(__file__).name)  # first: another version may lack the modules below

import collections
import contextlib
import functools
import itertools
import math
import os
import shlex
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypedDict

from diffusion_training.arguments import make_parser, parse_demo
from diffusion_training.data.flags import add_stream_flags, check_stream_args
from diffusion_training.families.names import FACTS
from diffusion_training.latents.cache_flags import add_cache_flags, check_cache_args

HERE = shlex.quote(os.path.relpath(Path(__file__).parent))
# The flags of a run without a data set. Flags on the command line override them.
DEMO = f"""
    --pretrained_model_name_or_path {HERE}/demo/drawings --train_data_dir {HERE}/demo/animals
    --output_dir latents-animals --resolution 64 --batch_size 32 --dataloader_num_workers 0
"""
DEMO_FLOW = f"""
    --pretrained_model_name_or_path {HERE}/demo/models --train_data_dir {HERE}/demo/digits
    --output_dir latents-digits-flow --resolution 8 --batch_size 64 --dataloader_num_workers 0
"""

# -------------------------------------------------------------------------------------------------
# the flags


def choose_demo(model_family: str | None) -> str:
    """The demo whose cache is for the trainer of this family."""
    family = FACTS.get(model_family or "")
    return DEMO_FLOW if family and family.script == "train_flow.py" else DEMO


def parse_args(argv: list[str] | None = None) -> Namespace:
    """Parse and check the command line."""
    parser = make_parser(__file__, __doc__, "docs/latent-cache.md")
    add_cache_flags(parser, with_classes=True)
    add_stream_flags(parser.add_argument_group("stream").add_argument, trains=False)
    args = parser.parse_args(argv)
    if args.dataset_name is None and args.train_data_dir is None:
        args = parse_demo(parser, choose_demo(args.model_family), argv)
    check_cache_args(parser, args)
    check_stream_args(parser, args)
    return parser.freeze(args)


# --help and mistakes in the flags end here, at once: the imports below take seconds. Importing this
# file parses nothing, so that tests, Ray's workers and loader processes can do so.
if __name__ == "__main__":
    args = parse_args()

import numpy as np
import pyarrow as pa
import torch
import transformers
from accelerate import Accelerator
from accelerate.utils import gather_object
from PIL import Image, ImageOps
from tqdm.auto import tqdm

from diffusion_training.data.captions import (
    are_cut,
    report_emptied,
    report_equal,
    sample_captions,
    tokenize,
)
from diffusion_training.data.encoders import (
    describe_models,
    encode_empty_prompt,
    encode_prompts,
    load_encoders,
    place_encoders,
    try_encoders,
)
from diffusion_training.data.folders import count_references
from diffusion_training.data.images import shrink_masks
from diffusion_training.data.references import add_references, list_reference_columns
from diffusion_training.data.rows import ImageRows, load_rows, name_rows, read_items
from diffusion_training.data.transforms import transform_row
from diffusion_training.draws import KEYS, step_seed
from diffusion_training.errors.printing import print_once
from diffusion_training.errors.sentences import Refused, explained, fail, in_one_sentence
from diffusion_training.errors.stop_signals import end_if_stopped
from diffusion_training.families.base import Base, Encoders, Tokenizers, Tokens
from diffusion_training.families.opening import open_base
from diffusion_training.families.recording import record_family
from diffusion_training.latents.cache import (
    OpenCache,
    check_skipped,
    describe_damage,
    describe_rows,
    find_begun,
    finish_cache,
    open_cache,
    writing_shard,
)
from diffusion_training.latents.cache_size import describe_size, measure_captions
from diffusion_training.latents.columns import FORMAT_VERSION, checksum_row, group_by_checksum
from diffusion_training.latents.passes import LatentRows, decode_ahead, try_batch_sizes, work_ahead
from diffusion_training.latents.plan import PlannedCache, find_old_hashes, plan_caches
from diffusion_training.latents.published import (
    check_published,
    name_published,
    open_published,
    read_row,
)
from diffusion_training.latents.settings import describe_prompts, name_shard
from diffusion_training.launch import Launch, accelerator_options, make_launch
from diffusion_training.loading import load_batches, seconds_between
from diffusion_training.meeting import Meeting
from diffusion_training.memory import is_gpu
from diffusion_training.models import DTYPES, EXACT

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


# -------------------------------------------------------------------------------------------------
# stage 1: the data


class RowBatch(TypedDict, total=False):
    """Some rows for one cache.

    Entries before the blank line are in the order of the rows, those after it in that of `groups`.
    """

    cache_index: int  # which of the caches
    row: list[int]
    key: list[str]
    skipped: list[str | None]  # why a row can't be used
    text: list[Any]  # a caption; with --caption_weights a list of captions
    cut: list[bool]  # whether a caption has more tokens than model_max_length
    groups: list[list[int]]  # positions in the batch, of equally sized images

    # of each group, uint8 [n, C, H, W]; of published latents, float [n, 2, C, h, w]
    pixel_values: list[torch.Tensor]
    mask: list[torch.Tensor]  # of each group, uint8 [n, 1, H, W], if the data set has masks
    input_ids: torch.Tensor  # [N, model_max_length]; other results of `tokenize` too
    original_size: torch.Tensor  # int32 [N, 2]
    crop_top_left: torch.Tensor  # int32 [N, 2]
    references: list[list[Image.Image]]  # of each row, if the data set has columns of them
    is_aligned: list[bool]  # whether the references of a row are mirrored with its image


@dataclass(frozen=True)
class TransformedRows(torch.utils.data.Dataset):
    """Decodes rows once and makes a batch of them for each cache.

    Takes (indices into `caches`, keys (0, row)) and returns {"batches": [a `RowBatch` per cache]}.
    The rows are transformed as in epoch 0 of a trainer.
    """

    rows: Any
    tokenizers: Tokenizers
    caches: list[PlannedCache]
    transform_row: Callable[..., dict[str, Any]] = transform_row  # or `read_row`

    def __getitem__(self, key: tuple[Sequence[int], list[tuple]]) -> dict[str, Any]:
        indices, keys = key
        items: dict[int, list] = {index: [] for index in indices}
        for (epoch, row, *_), item in zip(keys, read_items(self.rows, keys), strict=True):
            if len(items) > 1:
                item = decode_ahead(item, self.caches[0].transform)
            for index, of_cache in items.items():
                of_cache.append(self.transform_row(row, epoch, item, self.caches[index].transform))
        return {"batches": [self.collate(index, of_cache) for index, of_cache in items.items()]}

    def name_rows(self, numbers: range) -> list[str]:
        """The keys that consecutive rows have in a cache. No image is read."""
        if hasattr(self.rows, "name_rows"):  # at an address
            return self.rows.name_rows(numbers)
        if self.transform_row is read_row:
            return name_published(self.rows, numbers)
        transform = self.caches[0].transform
        return name_rows(self.rows, transform.image_column, transform.source, numbers)

    def collate(self, index: int, items: list[dict]) -> RowBatch:
        # a group has images of one size, and references of one size
        sizes = [
            (item["pixel_values"].shape, *(image.size for image in item.get("references", ())))
            for item in items
        ]
        limit = self.caches[index].batch_size
        groups = []
        for size in dict.fromkeys(sizes):
            group = [i for i, own in enumerate(sizes) if own == size]
            groups += [group[start : start + limit] for start in range(0, len(group), limit)]
        order = sum(groups, [])
        batch: Any = {"cache_index": index, "groups": groups}
        for name in ("row", "key", "skipped", "text"):
            batch[name] = [item[name] for item in items]
        batch["cut"] = are_cut(self.tokenizers, batch["text"])
        for name in items[0].keys() & {"pixel_values", "mask"}:
            batch[name] = [torch.stack([items[i][name] for i in group]) for group in groups]
        for name in ("original_size", "crop_top_left"):
            batch[name] = torch.tensor([items[i][name] for i in order], dtype=torch.int32)
        if self.caches[index].transform.reference_columns:
            for name in ("references", "is_aligned"):
                batch[name] = [items[i][name] for i in order]
        batch |= tokenize(self.tokenizers, [batch["text"][i] for i in order])
        return batch


# -------------------------------------------------------------------------------------------------
# stage 2: the models


def describe_encoders(
    base: Base, encoders: Encoders, args: Namespace, mixed_precision: str
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Try the models on the CPU in float32, and describe the cache that they will make.

    Returns (empty_prompt, settings). `empty_prompt` is {name: float16 array},
    the embeddings that a trainer uses for a dropped caption. Two runs can work on one cache only if
    their `settings` are equal.
    """
    try_encoders(encoders)
    family = encoders.family
    has_moments = family.has_moments(encoders.vae)
    if args.latents == "moments" and not has_moments:
        fail(f"an {type(encoders.vae).__name__} has no moments: use --latents sample")
    empty_prompt = encode_empty_prompt(encoders, base)
    settings = {
        "format_version": FORMAT_VERSION,
        "keys": KEYS,
        **describe_models(encoders, with_old=find_old_hashes(args)),
        "latents": args.latents or ("moments" if has_moments else "sample"),
        "latents_shape": None,  # `plan_caches` fills it in, for each --resolution
        **describe_prompts(encoders, empty_prompt),
        "text_cache": args.text_cache,
        "dtype": DTYPES[mixed_precision],
    }
    if family.ragged:  # without padding, like the rows
        mask = empty_prompt.pop("prompt_mask")
        empty_prompt |= {name: empty_prompt[name][mask] for name in family.padded}
    rounded = {name: shorten(embeds).numpy() for name, embeds in empty_prompt.items()}
    if not all(np.isfinite(embeds).all() for embeds in rounded.values()):
        fail("the embeddings of this text encoder do not fit into float16: use --text_cache ids")
    return rounded, settings


def load_and_describe(
    launch: Launch, base: Base, images: ImageRows, args: Namespace
) -> tuple[Base, dict[str, np.ndarray], dict[str, Any], Encoders]:
    """Load the models twice: exact, to describe them; then in the precision that encodes.

    On a CPU that may be the same copy. As the models take gigabytes, only one process of each
    machine describes them.

    Returns (the base, with what its family has found out, empty_prompt, settings, the encoders);
    see `describe_encoders`.
    """
    accelerator = launch.accelerator
    is_exact = launch.dtype == torch.float32 and launch.device.type == "cpu" and not launch.compile
    encoders = found = None
    if accelerator.is_local_main_process:
        encoders = load_encoders(base, EXACT)
        if args.import_latents:
            check_published(images.rows, encoders, args)
        found = encoders.family, *describe_encoders(base, encoders, args, launch.mixed_precision)
    if not is_exact:
        encoders = None  # free it before the same models are loaded to encode
    local_main = launch.rank - accelerator.local_process_index
    family, empty_prompt, settings = gather_object([found])[local_main]
    base = replace(base, family=family)
    encoders = encoders or load_encoders(base, EXACT if is_exact else launch.dtype)
    return base, empty_prompt, settings, encoders


def encode_images(encoders: Encoders, pixel_values: torch.Tensor) -> torch.Tensor:
    """The VAE's part of stage 2: images uint8 [N, C, H, W] -> unscaled latents, float32.

    They are mean and standard deviation, [N, 2 * channels, h, w], from which a trainer draws, or
    the latents themselves if the VAE gives no distribution. A family may have them in another
    layout.
    """
    family, vae = encoders.family, encoders.vae
    images = family.prepare_images(vae, pixel_values)  # in [-1, 1], in the VAE's precision
    encoded = vae.encode(images)
    return family.read_latents(vae, encoded, pixel_values.shape[-2:])


@torch.inference_mode()
def encode_texts(batch: RowBatch, encoders: Encoders, text_cache: str) -> dict[str, torch.Tensor]:
    """The text encoders' part of stage 2. With --text_cache ids, a trainer calls them instead.

    Returns {column: [N, numbers per row]}, embeddings in float16, token ids in int32.
    """
    names = Tokens.__annotations__
    tokens: Any = {name: value for name, value in dict[str, Any](batch).items() if name in names}
    if not encoders.family.reads_references:
        tokens.pop("references", None)
    values: Any = tokens
    if text_cache != "ids":
        # Each family calls its text encoders as its pipeline's `encode_prompt` does. Stable
        # Diffusion's embeddings are text_encoder(input_ids)[0].
        values = encode_prompts(encoders, tokens)
    if tokens["input_ids"].dim() == 2:  # one caption per image: its row is as long as its tokens
        values.pop("prompt_lengths", None)
    return {name: shorten(value) for name, value in values.items()}


def shorten(value: torch.Tensor) -> torch.Tensor:
    """A tensor in the type of its column; a mask stays bool."""
    short = {torch.float32: torch.float16, torch.bfloat16: torch.float16, torch.int64: torch.int32}
    return value.to(short.get(value.dtype, value.dtype))


class Encoded(NamedTuple):
    """The columns of a batch, on their way to the CPU."""

    columns: dict[str, list[torch.Tensor]]  # per group of rows, [n, numbers per row]
    event: torch.cuda.Event | None  # happens when they have arrived; None on a CPU


def mirror_images(batch: RowBatch) -> list[torch.Tensor]:
    """The images of each group, mirrored. One whose references are not aligned stays as it is."""
    # published latents are pairs, which change places
    mirrored = [images.flip(1 if images.dim() == 5 else -1) for images in batch["pixel_values"]]
    if "references" in batch:
        start = 0
        for images, flipped in zip(batch["pixel_values"], mirrored, strict=True):
            for i, is_aligned in enumerate(batch["is_aligned"][start : start + len(images)]):
                if not is_aligned:
                    flipped[i] = images[i]
            start += len(images)
    return mirrored


def encode_references(
    batch: RowBatch, encoders: Encoders, cache: PlannedCache
) -> dict[str, list[torch.Tensor]]:
    """The columns of references, see `list_latents_of_references`, for each group of rows."""
    count = len(cache.transform.reference_columns)
    kinds = {"": batch["references"]}
    if cache.transform.random_flip:
        kinds["_flipped"] = [
            [ImageOps.mirror(image) for image in images] if is_aligned else images
            for images, is_aligned in zip(batch["references"], batch["is_aligned"], strict=True)
        ]
    columns: dict[str, list[torch.Tensor]] = collections.defaultdict(list)
    start = 0
    for group in batch["groups"]:
        sizes = torch.zeros(len(group), count, 4, dtype=torch.int32)
        for suffix, rows in kinds.items():
            own = rows[start : start + len(group)]
            try:
                encoded = encoders.family.encode_references(encoders.vae, own)
            except Refused as error:  # of references of this size
                fail(f"{batch['key'][group[0]]}: {error}")
            in_pixels = encoders.family.measure_references(own[0])
            for number in range(count):
                latents = torch.zeros(len(group), 0)
                if number < len(encoded):
                    latents = encoded[number]
                    sizes[:, number] = torch.tensor([*latents.shape[-2:], *in_pixels[number]])
                columns[f"reference_{number}{suffix}"].append(latents.half())
        columns["reference_sizes"].append(sizes)
        start += len(group)
    return columns


@torch.inference_mode()
def encode(
    batch: RowBatch,
    encoders: Encoders,
    cache: PlannedCache,
    texts: dict[str, torch.Tensor] | None = None,
) -> Encoded:
    """Stage 2, on the device: a batch of rows -> the cache's columns of numbers.

    texts: from `encode_texts`, if the captions are encoded already.
    """
    family = encoders.family
    device = encoders.vae.device
    # Each shard starts a new batch, so the noise does not depend on the number of processes.
    generator = torch.Generator(device).manual_seed(
        step_seed("latents", cache.transform.seed, batch["row"][0])
    )

    def encode_latents(pixel_values: torch.Tensor) -> torch.Tensor:
        if pixel_values.dim() == 5:  # published latents
            return pixel_values[:, 0].half()
        latents = encode_images(encoders, pixel_values)
        if cache.latents.kind == "sample" and family.has_moments(encoders.vae):
            mean, std = latents.chunk(2, dim=1)
            latents = mean + std * torch.randn(mean.shape, generator=generator, device=device)
        return latents.half()

    columns: dict[str, Any] = {}
    columns["latents"] = [encode_latents(images) for images in batch["pixel_values"]]
    if cache.transform.random_flip:
        columns["latents_flipped"] = [encode_latents(images) for images in mirror_images(batch)]
    if texts is None:
        texts = encode_texts(batch, encoders, cache.text_cache)
    if "references" in batch:
        columns |= encode_references(batch, encoders, cache)
    if family.needs_sizes:
        texts = texts | {
            "original_size": batch["original_size"],
            "crop_top_left": batch["crop_top_left"],
        }
    counts = [len(group) for group in batch["groups"]]
    for name, numbers in texts.items():
        columns[name] = numbers.split(counts)
    if "mask" in batch:
        columns["mask"] = [shrink_masks(masks, cache.latents.downscale) for masks in batch["mask"]]
    if cache.transform.bucket_step:
        columns["size"] = [
            torch.tensor(latents.shape[-2:], dtype=torch.int32).expand(len(latents), 2)
            for latents in columns["latents"]
        ]
    for name, parts in columns.items():
        columns[name] = [part.flatten(1).to("cpu", non_blocking=True) for part in parts]
    gpu = torch.get_device_module(device) if is_gpu(device) else None
    event = gpu.current_stream().record_event() if gpu else None
    return Encoded(columns, event)


def collect(
    groups: list[list[int]], encoded: Encoded, padded: Sequence[str]
) -> tuple[dict[str, list[np.ndarray]], list[bool]]:
    """Wait for `encode`, and put its columns into the order of the rows.

    padded: columns whose padding is removed. Returns ({column: the numbers of each row}, for each
    row whether all its numbers are finite).
    """
    columns, event = encoded
    if event is not None:
        event.synchronize()
    order = np.argsort(sum(groups, []))
    finite = torch.ones(len(order), dtype=torch.bool)
    rows = {}
    for name, parts in columns.items():
        finite &= torch.cat([are_finite(part) for part in parts])
        rows[name] = [row for part in parts for row in part.numpy()]
    if "prompt_mask" in rows:
        masks = rows.pop("prompt_mask")
        for name in padded:
            pairs = zip(rows[name], masks, strict=True)
            rows[name] = [row.reshape(len(mask), -1)[mask].ravel() for row, mask in pairs]
    sorted_rows = {name: [numbers[i] for i in order] for name, numbers in rows.items()}
    return sorted_rows, finite[order].tolist()


def are_finite(rows: torch.Tensor) -> torch.Tensor:
    """Which rows of numbers [N, M] are finite, bool [N].

    float16 is compared by its bits. On a CPU this takes an eighth of the time of `isfinite`.
    """
    if rows.dtype != torch.float16 or not rows.shape[1]:
        return rows.isfinite().all(dim=1)
    return (rows.view(torch.int16) & 0x7FFF).amax(dim=1) < 0x7C00  # without the sign


def encode_all(
    batches: Iterable[RowBatch],
    encoders: Encoders,
    load_exact: Callable[[], Encoders] | None,
    caches: list[PlannedCache],
) -> Iterator[LatentRows]:
    """Encode batches for `caches`.

    If the next batch has the same rows, for another cache, their captions are encoded only once.

    Rows with numbers that are not finite are encoded again by the models in float32, because Stable
    Diffusion's VAEs overflow in float16. A row is skipped if that does not help, or if its numbers
    are too large for the cache's float16.

    load_exact: loads the models in float32, only when they are needed, because they take gigabytes.
        None if `encoders` are in float32.
    """
    queued: list[tuple[RowBatch, Encoded]] = []
    previous = texts = None
    for batch in batches:
        cache = caches[batch["cache_index"]]
        # references may have other sizes in another cache
        is_new = (batch["row"], batch["groups"]) != previous or encoders.family.reads_references
        if is_new:
            previous = batch["row"], batch["groups"]
            texts = encode_texts(batch, encoders, cache.text_cache)
        queued.append((batch, encode(batch, encoders, cache, texts)))
        if len(queued) > 1:  # one batch stays queued: the device computes it in the meantime
            yield make_arrow_rows(*queued.pop(0), encoders, load_exact, caches)
    for last in queued:
        yield make_arrow_rows(*last, encoders, load_exact, caches)


def make_arrow_rows(
    batch: RowBatch,
    encoded: Encoded,
    encoders: Encoders,
    load_exact: Callable[[], Encoders] | None,
    caches: list[PlannedCache],
) -> LatentRows:
    """Turn the results of `encode` into Arrow columns; encode again if some are not finite."""
    cache = caches[batch["cache_index"]]
    by_name = {column.name: column for column in cache.columns}
    padded = [name for name, column in by_name.items() if column.is_padded]
    rows, finite = collect(batch["groups"], encoded, padded)
    encoded_again = 0
    if load_exact and not all(finite):
        exact = load_exact()
        encoded_again = len(finite)
        device = batch["input_ids"].device
        for module in exact.modules():
            module.to(device)
        rows, finite = collect(batch["groups"], encode(batch, exact, cache), padded)
    good = []
    skipped = []
    for i, (row, key, reason) in enumerate(
        zip(batch["row"], batch["key"], batch["skipped"], strict=True)
    ):
        if reason is None and finite[i]:
            good.append(i)
        else:
            reason = reason or "its latents or embeddings are not finite"
            skipped.append({"row": row, "key": key, "reason": reason})
    arrays = {
        name: by_name[name].make_array([numbers[i] for i in good]) for name, numbers in rows.items()
    }
    text_type = pa.list_(pa.string()) if cache.transform.caption_weights else pa.string()
    arrays["text"] = pa.array([batch["text"][i] for i in good], text_type)
    arrays["key"] = pa.array([batch["key"][i] for i in good], pa.string())
    for checksum, names in group_by_checksum(cache.columns).items():
        checksums = [checksum_row({name: rows[name][i] for name in names}) for i in good]
        arrays[checksum] = pa.array(checksums, pa.uint64())
    counts = {"encoded_again": encoded_again, "captions_cut": sum(batch["cut"][i] for i in good)}
    record_batch = pa.RecordBatch.from_pydict(arrays)
    return LatentRows(batch["cache_index"], batch["row"], record_batch, skipped, counts)


# -------------------------------------------------------------------------------------------------
# the run


def list_batches(loaded: Iterable[dict], waits: list) -> Iterator[RowBatch]:
    """Yield the batches of `TransformedRows`, and add the time of each wait to `waits`."""
    for item in loaded:
        waits.append(item["waited"])
        yield from item["batches"]


def show_progress(
    encoded: Iterable[LatentRows], waits: list, progress_bar: tqdm
) -> Iterator[LatentRows]:
    """Yield the items of `encoded`; show the speed and the share of time waiting for images."""
    start = time.perf_counter()
    waited = 0.0
    for item in encoded:
        while len(waits) > 2:  # on CUDA the last ones may be unfinished
            waited += seconds_between(*waits.pop(0))
        share = waited / (time.perf_counter() - start)
        progress_bar.set_postfix_str(f"{share:.1%} waiting for images", refresh=False)
        progress_bar.update(len(item.rows) + len(item.skipped))
        yield item


def find_missing(
    rows: dict[int, range],
    dataset: TransformedRows,
    opened: list[OpenCache],
    is_stream: bool,
    show_bar: bool,
) -> dict[int, dict[int, Path]]:
    """Find missing or damaged shards: {shard: {index of a cache that lacks it: its file}}.

    rows: {shard: its rows}.
    """
    missing: dict[int, dict[int, Path]] = {}
    caches = dataset.caches
    for shard, numbers in tqdm(rows.items(), "Checking", disable=not show_bar, leave=False):
        names = None if is_stream else functools.partial(dataset.name_rows, numbers)
        for index, (cache, open_one) in enumerate(zip(caches, opened, strict=True)):
            folder = Path(cache.output_dir)
            path = folder / name_shard(shard, cache.settings)
            records = open_one.records
            if damage := describe_damage(path, records, names):
                print(f"{path} {damage}: making it again", flush=True)
                del records[path.name]
            if path.name not in records:
                missing.setdefault(shard, {})[index] = path
                (folder / "state.json").unlink(missing_ok=True)  # an unfinished cache does not open
    return missing


def write_each(
    writing: Callable[..., AbstractContextManager[tuple[dict[str, Any], Callable[..., None]]]],
    paths: dict[int, Any],
    numbers: range,
    encoded: Iterable[LatentRows],
) -> dict[int, dict[str, Any]]:
    """Write the rows of one shard, for each cache into its own file. Returns the shards' records.

    A shard is an Arrow stream, which `datasets` opens. It gets its name when it is complete.

    writing: `writing_shard`, or on Ray `writing_shard_to`.
    paths: {index of the cache: file}. numbers: of the shard's rows in the source.
    """
    with contextlib.ExitStack() as stack:
        shards = {
            index: stack.enter_context(writing(path, numbers)) for index, path in paths.items()
        }
        for item in encoded:
            _, write = shards[item.cache_index]
            write(item)
    return {index: record for index, (record, _) in shards.items()}


def finish(
    caches: list[PlannedCache],
    opened: list[OpenCache],
    empty_prompt: dict[str, np.ndarray],
    max_skipped: float,
) -> None:
    """On the first process, which holds the locks, write the records into one cache.json."""
    for planned, open_one in zip(caches, opened, strict=True):
        if open_one.lock is None:
            continue
        folder = Path(planned.output_dir)
        try:
            cache = finish_cache(folder, empty_prompt, max_skipped)
        except OSError as error:
            fail(
                f"{folder} could not be finished ({error}); "
                "its shards are complete: run the same command to resume"
            )
        open_one.lock.release(force=True)
        # missing_ok: some versions of filelock delete the file themselves.
        (folder / ".lock").unlink(missing_ok=True)
        planned.report_done(cache)


@in_one_sentence
def main(args: Namespace) -> None:
    """Make the cache.

    Exit status: 130 after Ctrl-C, 143 after SIGTERM, 1 after an error, printed in one line.
    """
    transformers.utils.logging.disable_progress_bar()
    with explained("the launched processes can't be set up"):
        accelerator = Accelerator(**accelerator_options(args))
    launch = make_launch(accelerator, args)
    end = Meeting(launch)  # the first process to come there may have to wait for days
    device = launch.device
    rank, num_processes = launch.rank, launch.num_processes

    base = open_base(args, num_references=count_references(args), record=record_family)
    text_column = args.class_column or args.caption_column
    if args.import_latents:
        images = open_published(args)
    else:
        references = add_references if base.num_references else None
        images = load_rows(args, args.streaming, [text_column], add_references=references)
    classes: list[str] = []
    if args.class_column:  # they replace captions and a text encoder
        from diffusion_training.data.class_names import name_classes  # here: few caches have them

        images, classes = name_classes(images, args)
        base = replace(base, classes=tuple(classes))
    base, empty_prompt, described, encoders = load_and_describe(launch, base, images, args)
    if classes:
        described["classes"] = classes
    # for rows whose results are not finite in the precision of the launch
    load_exact = None
    if launch.dtype != torch.float32:
        load_exact = functools.cache(functools.partial(load_encoders, base, torch.float32))
    texts = (
        sample_captions(images.rows, args.caption_column, args.caption_prefix)
        if launch.is_main
        else []
    )
    if not list_reference_columns(images.rows, args):  # edits may share one instruction
        report_equal(texts, args)
    report_emptied(encoders.tokenizers, texts)

    # The plan decides the content of the caches. A run can resume only those with an equal plan.
    launch_flags = {
        "mixed_precision": launch.mixed_precision,
        "compile": launch.compile,
        # None is not recorded: cache.json must be the same on Ray, which does not have these flags.
        "streaming": args.streaming or None,
        "import_latents": args.import_latents or None,
    }
    caches = plan_caches(args, images, encoders, described, launch_flags)
    lengths = measure_captions(encoders.tokenizers, texts)
    for cache in caches:
        sentence = describe_size(cache.settings, lengths, compare=args.dry_run)
        accelerator.print(sentence if len(caches) == 1 else f"{cache.output_dir}: {sentence}")
    read = read_row if args.import_latents else transform_row
    dataset = TransformedRows(images.rows, encoders.tokenizers, caches, read)
    if args.dry_run:
        for cache in caches if launch.is_main else ():
            print_once(describe_rows(cache, dataset.name_rows))
        return
    place_encoders(encoders, device, launch.compile)
    if args.batch_size == "auto":  # an existing cache keeps its batch size
        size = find_begun(Path(cache.output_dir) for cache in caches)
        size = size or try_batch_sizes(accelerator, device, dataset, encoders, encode)
        accelerator.print(f"Batch size: {size}")
        caches = [cache.with_batch_size(size) for cache in caches]
        dataset = replace(dataset, caches=caches)
    opened = [open_cache(accelerator, cache, empty_prompt) for cache in caches]
    stream = None
    if args.streaming:
        from diffusion_training.data.streams import StreamedRows  # here: few caches are of streams

        _, cache_json, records = opened[0]
        stream = StreamedRows(images.rows, Path(caches[0].output_dir), cache_json, records)
    num_rows = stream.count if stream else len(images.rows)  # of a stream, what was read before

    # Each process takes every num_processes-th shard. It first checks its shards, then makes those
    # that are missing or damaged. Each shard starts a new batch, so its bytes do not depend on the
    # number of processes.
    per_shard, per_batch = args.rows_per_shard, caches[0].rows_per_batch
    shards = range(rank, math.ceil(num_rows / per_shard), num_processes)
    has_records = any(open_one.records for open_one in opened)
    rows = {n: range(n * per_shard, min(num_rows, (n + 1) * per_shard)) for n in shards}
    show_bar = has_records and launch.is_main
    missing = find_missing(rows, dataset, opened, stream is not None, show_bar)
    keys: Iterator[Any] = (
        (list(paths), [(0, row) for row in rows[number][start : start + per_batch]])
        for number, paths in missing.items()
        for start in range(0, len(rows[number]), per_batch)
    )
    if stream:
        to_make = {rows[number].start: rows[number].stop for number in missing}
        streamed = stream.keys(to_make, per_batch, rank, num_processes)
        keys = ((range(1), batch) for batch in streamed)
    num_workers = launch.choose_workers(args.dataloader_num_workers)
    batches = load_batches(dataset, keys, num_workers, device)

    total = len(caches) * sum(map(len, rows.values()))
    done = total - sum(len(paths) * len(rows[number]) for number, paths in missing.items())
    progress_bar = tqdm(
        total=total if stream is None or stream.ended else None,
        initial=done,
        desc=f"Images (process 1 of {num_processes})" if num_processes > 1 else "Images",
        unit="img",
        disable=not launch.is_main,
    )
    waits: list[Any] = []
    encoded = encode_all(list_batches(batches, waits), encoders, load_exact, caches)
    encoded = show_progress(work_ahead(encoded, 16, device), waits, progress_bar)
    names = [name_shard(number, caches[0].settings) for number in shards]
    skipped = [  # in this process's complete shards
        sum(each.records[name]["skipped"] for name in names if name in each.records)
        for each in opened
    ]

    # the end of a stream is not known
    writing = functools.partial(writing_shard, may_end=stream is not None)
    for number, of_shard in itertools.groupby(encoded, lambda item: item.numbers[0] // per_shard):
        paths = missing.get(number)
        if paths is None:  # a stream has more shards than were known at the start
            paths = {0: Path(caches[0].output_dir) / name_shard(number, caches[0].settings)}
        numbers = range(number * per_shard, (number + 1) * per_shard) if stream else rows[number]
        records = write_each(writing, paths, numbers, of_shard)
        if stream:  # its rows are counted as they come
            num_rows = stream.save_position(number, rank)
        for index, record in records.items():
            skipped[index] += len(record["skipped"])
            last = record["skipped"][-1] if record["skipped"] else None
            check_skipped(skipped[index], last, num_rows, args.max_skipped)
        end_if_stopped()
    batches.close()
    progress_bar.close()

    end.wait()
    finish(caches, opened, empty_prompt, args.max_skipped)
    accelerator.wait_for_everyone()
    # torch 2.11 can hang at exit if gloo's thread has not yet released the last gather.
    time.sleep(0.1)
    accelerator.end_training()


if __name__ == "__main__":
    main(args)
