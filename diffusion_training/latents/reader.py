"""Latent caches -> batches.

Rows are read from the cache's own shards or from fetched copies, and checked when first read.
"""

import functools
import hashlib
import io
import json
import math
import re
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, cast
from urllib.parse import unquote

import numpy as np
import torch
import xxhash
from huggingface_hub import repo_info

from diffusion_training.arguments import is_address
from diffusion_training.batches import LatentBatch
from diffusion_training.data.captions import tokenize_batch, tokenize_longest
from diffusion_training.data.folders import is_shared
from diffusion_training.data.texts import CaptionChoice
from diffusion_training.draws import Key, draw_caption, draw_choices, step_seed
from diffusion_training.errors.faults import explain
from diffusion_training.errors.printing import print_once, printable
from diffusion_training.errors.sentences import fail
from diffusion_training.families.base import Tokenizers
from diffusion_training.files import hash_values
from diffusion_training.latents.columns import (
    FORMAT_VERSION,
    Column,
    list_columns,
    list_features,
    name_empty_files,
)
from diffusion_training.latents.settings import (
    FINISHED,
    SETTINGS,
    check_form,
    find_gap,
    fingerprint_cache,
)
from diffusion_training.latents.shards import OpenShard, Shards, describe_repeats, name_repair
from diffusion_training.remote import read_bytes

CHOOSE = "diffusion_training.latents.filtered"
FILTERED = "filtered "  # so begins the fingerprint of a source that `CHOOSE` has made
FEW_SHARDS = 1000  # a local cache with at most these is checked whole at the start
MOST_OPEN = 50_000  # shards at a time: Linux lets a process map 65,530 files


class Cache(NamedTuple):
    """An opened cache, whose rows are not read yet."""

    settings: dict[str, Any]  # cache.json
    empty_prompt: dict[str, torch.Tensor]  # embeddings of a dropped caption, for one image
    shards: Shards


def load_cache(
    folder: str | Path, maker: str = "precompute_latents.py", follow: float | None = None
) -> Cache:
    """Open a cache, on a disk or at an address, without reading its rows.

    maker: the command that makes such caches. follow: how many minutes to wait for what is not
    there, if the cache may still be made; see `FollowedShards`.
    """
    folder = str(folder)
    read = read_bytes
    if follow is not None:
        from diffusion_training.latents.follow import (  # here: few runs need it
            FollowedShards,
            describe_plan,
            read_when_there,
        )

        read = functools.partial(read_when_there, minutes=follow)
    # a run resumes a cache only if it can read cache.json and state.json
    missing = f"make the cache with {maker}, in an empty folder"
    damaged = "delete it, and make the cache again"
    if is_shared(folder):
        missing = damaged = name_repair(folder)
    try:
        cache = json.loads(read(f"{folder}/cache.json"))
        state = None
        try:
            state = json.loads(read_bytes(f"{folder}/state.json"))
        except FileNotFoundError:
            if follow is None:
                fail(f"{folder} is not finished: to finish it, run the command that made it")
        if state and state["_fingerprint"] != fingerprint_cache(cache):
            raise ValueError("cache.json has changed since it was written")
        if cache["format_version"] != FORMAT_VERSION:
            fail(
                f"{folder} has format {cache['format_version']}, but this version reads "
                f"{FORMAT_VERSION}: make the cache again"
            )
        check_form(cache, SETTINGS | (FINISHED if follow is None else {}))
        missing = damaged = name_repair(folder)
        if unknown := set(cache["features"]) - list_features():
            names = printable(", ".join(sorted(unknown)))
            fail(f"{folder} holds {names}, which this version can't read: install a newer one")
        empty_prompt = {}
        for name, file in name_empty_files(cache).items():
            content = read(f"{folder}/{file}.npy")
            if state and hashlib.sha256(content).hexdigest() != cache[f"{file}_sha256"]:
                raise ValueError(f"{file}.npy has changed since it was written")
            empty_prompt[name] = torch.from_numpy(np.load(io.BytesIO(content)))
        for column in list_columns({**cache, "text_cache": "embeddings"}):
            if column.is_padded and column.name in empty_prompt:
                padded, mask = column.pad([empty_prompt[column.name].numpy().ravel()])
                empty_prompt[column.name] = torch.from_numpy(padded).view(column.shape)
                if "ragged embeddings" in cache["features"]:
                    empty_prompt["prompt_mask"] = torch.from_numpy(mask)[0]
        if follow is None:
            shards = Shards(folder, cache)
        else:
            plan = describe_plan(folder, cache)
            shards = FollowedShards(folder, cache, follow)
            cache = plan
        if not shards.rows.sum():
            raise ValueError("it holds no rows")
        if follow is None and (gap := find_gap(cache)):
            raise ValueError(gap)
    except (FileNotFoundError, NotADirectoryError) as error:
        if (Path(folder) / "dataset_info.json").is_file() and missing != damaged:
            missing = (
                f"if its rows were chosen from a cache, run python -m {CHOOSE} {folder} --like "
                "CACHE --output_dir NEW"
            )
        if reason := find_hub_fault(folder):
            fail(f"{folder} can't be read ({reason})")
        fail(f"{error.filename or error} is missing: {missing}")
    except Exception as error:
        fail(f"{folder} is damaged ({error}): {damaged}")
    if len(shards) <= FEW_SHARDS and not is_address(folder) and follow is None:
        opened = [shards.open(number).batches for number in range(len(shards))]
        is_chosen = str(cache["source"]["fingerprint"]).startswith(FILTERED)
        if not is_chosen and not cache.get("made_with", {}).get("folder_repeats"):
            print_once(describe_repeats(shards, opened))
    return Cache(cache, empty_prompt, shards)


def find_hub_fault(address: str) -> str | None:
    """Why a file is missing at an address of the hub; None if its repository can be read."""
    match = re.match(r"hf://(datasets/|spaces/|)([^/@]+/[^/@]+)(?:@([^/]+))?", address)
    if not match:
        return None
    kind, name, revision = match.groups()
    revision = revision and unquote(revision)
    try:
        repo_info(name, revision=revision, repo_type=kind.removesuffix("s/") or None)
    except Exception as error:
        return explain(error)
    return None


class CachedLatents(torch.utils.data.Dataset):
    """Turns keys of `step_batches` into a batch of one or several latent caches.

    All rows of a batch must have the same size. The columns are views of the memory-mapped files,
    and a row is copied once, into its batch. A shard is opened when it is first needed, and a row
    is checked when it is first read. Numbers beyond the last row are repetitions of rows (see
    `choose_rows`), and each is mirrored or not on its own.
    """

    holds = "latents"  # what `digest` covers
    num_left_out = 0

    def __init__(
        self,
        caches: dict[str, Cache],
        seed: int,
        random_flip: bool,
        caption_weights: list[float] | None = None,
        reads_captions: tuple[Tokenizers, CaptionChoice] | None = None,
        optional_columns: Collection[str] = (),
    ) -> None:
        """caches: {folder: what `load_cache` returns}, with equal columns.

        caption_weights: how often each caption of a row is drawn, if it has several.
        reads_captions: tokenizes captions here, if the cached tokens are not used.
        optional_columns: names of columns to read besides the default ones.
        """
        self.seed = seed
        self.random_flip = random_flip
        self.caption_weights = caption_weights
        self.reads_captions = reads_captions
        self.folders = list(caches)
        settings = [cache.settings for cache in caches.values()]
        self.opened: dict[int, OpenShard] = {}
        self.parts = [cache.shards for cache in caches.values()]
        for shards in self.parts:
            shards.select_columns(optional_columns)
        self.firsts = np.cumsum([0, *map(len, self.parts)])  # number of each cache's first shard
        self.lengths = np.concatenate([shards.places for shards in self.parts])
        self.starts = self.lengths.cumsum() - self.lengths  # number of each shard's first row
        self.cache_ends = np.cumsum([cache.settings["rows"] for cache in caches.values()])
        self.fingerprint = hash_values([cache.settings["shards"] for cache in caches.values()])
        self.flips = [each["transform"]["random_flip"] for each in settings]
        # some caches may lack mirrored images or masks
        self.columns_of = [{column.name: column for column in part.columns} for part in self.parts]
        columns = {name: column for own in self.columns_of for name, column in own.items()}
        self.columns = [column for column in columns.values() if column.is_in_batch]
        # A batch is padded at least as far as the empty prompt, which may replace a caption; to the
        # full length (None) if the model sees padding.
        mask = next(iter(caches.values())).empty_prompt.get("prompt_mask")
        self.least_tokens = None if mask is None else int(mask.sum())
        self.shape = settings[0]["latents_shape"]
        self.shapes = np.array([each["latents_shape"] for each in settings])
        self.groups = group_sizes(settings)
        # columns of sizes, by which the rows of a batch are alike
        self.size_columns = [name for name in columns if name in ("size", "reference_sizes")]

    def __len__(self) -> int:
        return int(self.cache_ends[-1])

    @functools.cached_property
    def sizes(self) -> np.ndarray | None:
        """(height, width) of each row's latents, None if all have the same size.

        With references, four numbers more for each: the size of its latents, and in pixels.
        """
        if not self.size_columns:
            if (self.shapes == self.shapes[0]).all():
                return None
            return np.repeat(self.shapes[:, 1:], np.diff(self.cache_ends, prepend=0), axis=0)
        views = [view for shard in range(len(self.lengths)) for view in self.open(shard).views]
        sizes = [np.concatenate([view[name] for view in views]) for name in self.size_columns]
        if "size" not in self.size_columns:
            sizes.insert(0, np.tile(np.int32(self.shape[1:]), (len(self), 1)))
        return np.concatenate(sizes, axis=1)

    def locate_row(self, shard: int) -> tuple[Shards, int]:
        """Return (`Shards` of its cache, number in that cache) for a shard's number among all."""
        part = int(np.searchsorted(self.firsts, shard, side="right")) - 1
        return self.parts[part], shard - int(self.firsts[part])

    def open(self, shard: int) -> OpenShard:
        """Return a shard, after opening it if needed."""
        if shard not in self.opened:
            shards, number = self.locate_row(shard)
            if len(self.opened) >= MOST_OPEN:
                self.opened.pop(next(iter(self.opened)))
            self.opened[shard] = shards.open(number, self.find_copy(shard), alone=True)
        return self.opened[shard]

    def find_copy(self, shard: int) -> Path | None:
        """The fetched copy of a shard; None for a cache on a disk."""
        return None

    def find_row(self, shard: int, index: int) -> tuple[OpenShard, int, bool]:
        """Return (open shard, index of a row in it, whether it is the row at this index)."""
        return self.open(shard), index, True

    def digest(self, row: int) -> str:
        """A hash of a row's latents."""
        shard = int(np.searchsorted(self.starts, row, side="right")) - 1
        views, index = self.open(shard).view(row - int(self.starts[shard]))
        return xxhash.xxh3_128_hexdigest(views["latents"][index].tobytes())

    def caption(self, row: int) -> str:
        """The caption that a row has if it is held out."""
        shard = int(np.searchsorted(self.starts, row, side="right")) - 1
        opened = self.open(shard)
        chunk, index = opened.locate(row - int(self.starts[shard]))
        text = opened.batches[chunk]["text"][index].as_py()
        if isinstance(text, list):
            exists = [caption is not None for caption in text]
            text = text[draw_caption(self.seed, None, row, self.caption_weights or (), exists)]
        return text

    def names(self, shards: Iterable[int] | None = None) -> Iterator[str]:
        for shard in range(len(self.lengths)) if shards is None else shards:
            for batch in self.open(shard).batches:
                yield from batch["key"].to_pylist()  # as `transform_row` named them

    def __getitem__(self, keys: list[Key]) -> LatentBatch:
        rows = np.array([row for _, row, _ in keys]) % len(self)
        shards = np.searchsorted(self.starts, rows, side="right") - 1
        indices = rows - self.starts[shards]
        sizes = self.shape[1:] if self.sizes is None else self.sizes[rows[0]].tolist()
        size = sizes[:2]
        values: dict[Column, list[np.ndarray]] = {column: [] for column in self.columns}
        weights = []
        flipped = []
        texts = []
        for (epoch, number, weight), shard, index in zip(
            keys, shards.tolist(), indices.tolist(), strict=True
        ):
            opened, index, is_own = self.find_row(shard, index)
            weights.append(weight if is_own else 0.0)
            if self.reads_captions:
                texts.append(opened.read_text(index, self.reads_captions[0]))
            views, index = opened.view(index)
            part = int(np.searchsorted(self.firsts, shard, side="right")) - 1
            flip = self.random_flip and draw_choices(self.seed, epoch, number)[2] < 0.5
            flip = flip and self.flips[part]
            flipped.append(flip)
            if self.caption_weights:
                lengths = views["prompt_lengths"][index]
                caption = draw_caption(self.seed, epoch, number, self.caption_weights, lengths >= 0)
            for wanted, numbers_of_rows in values.items():
                column = self.columns_of[part].get(wanted.name)
                if column is None:  # a cache without masks: its images count everywhere
                    numbers_of_rows.append(np.full(math.prod(size), 255, wanted.dtype))
                    continue
                name = column.mirrored if flip and column.mirrored else column.name
                numbers = views[name][index]
                if flip and column.is_map:
                    width = size[1]
                    if not column.is_ragged:
                        width = column.shape[-1] * size[1] // int(self.shapes[part][2])
                    numbers = numbers.reshape(-1, width)[:, ::-1].ravel()
                if self.caption_weights and column.is_of_caption:
                    numbers = column.choose_caption_part(numbers, lengths, caption)
                numbers_of_rows.append(numbers)
        batch: dict[str, Any] = {}
        for column, numbers_of_rows in values.items():
            if column.is_padded:
                batch |= self.pad(column, numbers_of_rows)
            else:  # in one copy: this thread releases Python's lock once per column, not per row
                numbers = np.concatenate(numbers_of_rows)
                if len(numbers):  # else none of these rows has this reference
                    batch[column.name] = torch.from_numpy(numbers.reshape(len(keys), -1))
        if self.reads_captions:
            batch |= tokenize_batch(*self.reads_captions, texts, keys)
        batch["latents_shape"] = [self.shape[0], *size]
        if len(sizes) > 2:
            batch["reference_sizes"] = [sizes[i : i + 4] for i in range(2, len(sizes), 4)]
        batch["flipped"] = torch.tensor(flipped)
        batch["weight"] = torch.tensor(weights)
        batch["skipped"] = []
        return cast(LatentBatch, batch)

    def pad(self, column: Column, rows: list[np.ndarray]) -> dict[str, Any]:
        """The entries of a batch for a column of captions, with their mask and lengths."""
        padded, mask = column.pad(rows, self.least_tokens)
        return {
            column.name: torch.from_numpy(padded),
            "prompt_mask": torch.from_numpy(mask),
            "prompt_lengths": mask.sum(axis=1).tolist(),
        }

    def longest(self, row: int) -> LatentBatch:
        """A batch of one row, with a caption as long as captions can be."""
        batch: dict[str, Any] = dict(self[[(0, row, 1.0)]])
        for column in self.columns:
            if column.is_padded:
                batch |= self.pad(column, [np.zeros(math.prod(column.shape), column.dtype)])
        if self.reads_captions:
            batch |= tokenize_longest(*self.reads_captions)
        return cast(LatentBatch, batch)


def choose_rows(
    rows: np.ndarray, dataset: CachedLatents, weights: list[float] | None, epoch: int
) -> np.ndarray:
    """Return the rows that an epoch takes: from each cache, weight * its number of rows.

    Caches that hold the same images in several sizes count as one, with the sum of their weights,
    and each time that an image is taken, its size is drawn with their weights as odds.

    `rows` are sorted. The rows of a cache, in an order drawn from the seed, are repeated without
    end, and each epoch takes the next weight * rows of them. With weight 3, an epoch takes each row
    three times; with 1.5, once or twice, and two epochs take each row three times. All epochs have
    the same number of rows; rows lost by rounding in one epoch come in the next. For each
    repetition in an epoch, the number of all rows is added to a row's number.
    """
    if not weights:
        return rows
    of_caches = np.split(rows, np.searchsorted(rows, dataset.cache_ends[:-1]))
    parts = [of_caches[group[0]] for group in dataset.groups]
    odds = [np.array([weights[cache] for cache in group]) for group in dataset.groups]
    shares = [float(each.sum()) * len(part) for each, part in zip(odds, parts, strict=True)]
    folders = [dataset.folders[group[0]] for group in dataset.groups]
    for folder, share, part in zip(folders, shares, parts, strict=True):
        if share < 1:
            fail(
                f"--latents_weights takes {share:g} of the {len(part)} rows of {folder}: "
                "choose a larger weight"
            )
    firsts = apportion(shares, epoch)
    ends = apportion(shares, epoch + 1)
    starts = dataset.cache_ends - np.diff(dataset.cache_ends, prepend=0)
    sizes = np.random.default_rng(step_seed("sizes", dataset.seed, epoch))
    chosen = []
    for part, group, each, first, end in zip(
        parts, dataset.groups, odds, firsts, ends, strict=True
    ):
        rounds, indices = np.divmod(np.arange(first, end), len(part))
        order = np.random.default_rng(step_seed("weights", dataset.seed)).permutation(part)
        taken = order[indices] + (rounds - first // len(part)) * len(dataset)
        if len(group) > 1:
            drawn = sizes.choice(len(group), len(taken), p=each / each.sum())
            taken += (starts[group] - starts[group[0]])[drawn]
        chosen.append(taken)
    return np.sort(np.concatenate(chosen))  # so that weights of 1 change nothing


def group_sizes(settings: list[dict[str, Any]]) -> list[list[int]]:
    """The numbers of caches, those that hold the same images in several sizes in one list.

    Stops with an error if such caches lack different images, because their rows are not the same.
    settings: of each cache.
    """
    groups: dict[Any, list[int]] = {}
    for number, each in enumerate(settings):
        source = each["source"].get("fingerprint")
        sides = [settings[other]["transform"]["resolution"] for other in groups.get(source, [])]
        is_other = source is None or each["transform"]["resolution"] in sides
        groups.setdefault(number if is_other else source, []).append(number)
    for group in (group for group in groups.values() if len(group) > 1):
        first, *others = (settings[number]["shards"]["rows"] for number in group)
        if any(each != first for each in others):
            sides = [settings[number]["transform"]["resolution"] for number in group]
            fail(
                f"the caches of {', '.join(map(str, sides))} px hold different images: "
                "skipped.jsonl in each says which could not be used; remove them from the data"
            )
    return list(groups.values())


def apportion(shares: list[float], epochs: int) -> list[int]:
    """Return how many rows the first `epochs` epochs take of each cache, by largest remainder.

    Each epoch takes round(sum(shares)) rows.
    """
    total = round(sum(shares)) * epochs
    quotas = np.array(shares) / sum(shares) * total
    counts = np.floor(quotas).astype(int)
    counts[np.argsort(counts - quotas, kind="stable")[: total - counts.sum()]] += 1
    return counts.tolist()
