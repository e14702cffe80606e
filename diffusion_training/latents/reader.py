"""Latent caches -> batches.

Rows are read from the cache's own shards or from fetched copies, and checked when first read.
"""

import hashlib
import io
import json
from argparse import Namespace
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from diffusion_training.data.captions import tokenize_batch
from diffusion_training.data.families import Tokenizers
from diffusion_training.errors import fail
from diffusion_training.latents.cache import fingerprint_cache
from diffusion_training.latents.columns import (
    EMPTY,
    FEATURES,
    PROMPTS,
    TEXTS,
    describe_columns,
    pad_prompts,
    take_caption,
)
from diffusion_training.latents.fetch import Fetcher
from diffusion_training.latents.shards import OpenShard, Shards
from diffusion_training.order import Key, draw_caption, draw_choices, step_seed
from diffusion_training.remote import is_address, read_bytes

FEW = 1000  # shards: a local cache of no more has all of them opened, and so checked, at the start
MOST_OPEN = 50_000  # shards at a time: Linux lets a process map 65,530 files
Cache = tuple[dict, dict[str, torch.Tensor], Shards]  # see `load_cache`


def load_cache(folder: str | Path) -> Cache:
    """Open a cache of precompute_latents.py, on a disk or at an address, without reading its rows.

    Returns (cache.json, {name: embedding of a dropped caption}, its `Shards`).
    """
    folder = str(folder)
    try:
        cache = json.loads(read_bytes(f"{folder}/cache.json"))
        try:
            state = json.loads(read_bytes(f"{folder}/state.json"))
        except FileNotFoundError:
            fail(f"{folder} is not finished: run the command that made it again")
        if state["_fingerprint"] != fingerprint_cache(cache):
            raise ValueError("cache.json is not as it was written")
        if cache["format_version"] not in (2, 3):
            fail(
                f"{folder} is a cache of format {cache['format_version']}, this version reads "
                "2 and 3: make it anew"
            )
        if unknown := set(cache.get("features", [])) - FEATURES:
            fail(
                f"{folder} holds {', '.join(sorted(unknown))}, which this version does not "
                "know: take a newer one"
            )
        empty_prompt = {}
        for column in [column for column in EMPTY if f"{column}_shape" in cache]:
            content = read_bytes(f"{folder}/{EMPTY[column]}.npy")
            if hashlib.sha256(content).hexdigest() != cache[f"{EMPTY[column]}_sha256"]:
                raise ValueError(f"{EMPTY[column]}.npy is not as it was written")
            empty_prompt[column] = torch.from_numpy(np.load(io.BytesIO(content)))
        if "ragged embeddings" in cache.get("features", []):
            length, width = cache["prompt_embeds_shape"]
            padded, mask = pad_prompts(
                [empty_prompt["prompt_embeds"].numpy().ravel()], length, width
            )
            empty_prompt = {"prompt_embeds": torch.from_numpy(padded).view(length, width)}
            empty_prompt["prompt_mask"] = torch.from_numpy(mask)[0]
        shards = Shards(folder, cache)
        if not shards.rows.sum():
            raise ValueError("it holds no rows")
    except FileNotFoundError as error:
        fail(f"{error.filename or error} is missing: make the cache with precompute_latents.py")
    except Exception as error:
        fail(
            f"{folder} is damaged ({error}): run the command that made the cache again, it mends it"
        )
    if len(shards) <= FEW and not is_address(folder):
        for number in range(len(shards)):
            shards.open(number)
    return cache, empty_prompt, shards


class CachedLatents(torch.utils.data.Dataset):
    """Turns keys of `step_batches` into a batch of one or several latent caches.

    A batch is {"latents", "prompt_embeds": float16 [N, numbers per row], "latents_shape":
    [channels, height, width], "flipped": bool [N], "weight": [N], "skipped": []}, with the other
    columns of `describe_columns`. With cached tokens, "input_ids": int32 [N, tokens] replaces the
    embeddings. All rows of a batch must have the same size.

    The columns are views of the memory-mapped files, and a row is copied once, into its batch. A
    shard is opened when it is first needed, and a row is checked when it is first read. A number
    beyond the rows is a repetition of one of them, as `choose_rows` counts them; whether it is
    mirrored is drawn separately.

    caches: {folder: what `load_cache` returns}.
    fetcher: a `Fetcher`, if some of the caches are at an address.
    tokenizers, args: for `tokenize_batch`, if the cached tokens are not to be used.
    """

    fetcher: Fetcher
    tokenizers: Tokenizers | None = None
    args: Namespace

    def __init__(self, caches: dict[str, Cache], seed: int, random_flip: bool) -> None:
        self.seed, self.random_flip, self.folders, self.opened = seed, random_flip, list(caches), {}
        self.parts = [shards for _, _, shards in caches.values()]
        self.firsts = np.cumsum([0, *map(len, self.parts)])  # numbers of the caches' first shards
        self.lengths = np.concatenate([shards.rows for shards in self.parts])
        self.ends = self.lengths.cumsum()
        self.cache_ends = np.cumsum([cache["rows"] for cache, _, _ in caches.values()])
        content = json.dumps([cache["shards"] for cache, _, _ in caches.values()])
        self.fingerprint = hashlib.sha256(content.encode()).hexdigest()[:16]
        # `check_caches` makes sure that the others have the same columns
        first, _, _ = next(iter(caches.values()))
        kinds = describe_columns(first)
        self.columns = [
            name for name in kinds if name not in ("latents_flipped", "size", "prompt_lengths")
        ]
        # set if each row has several captions
        self.caption_weights = first["transform"].get("caption_weights")
        self.shape = first["latents_shape"]
        # {column that is as long as the caption: (tokens, numbers of each)}, with padding
        self.padded = {}
        if "ragged embeddings" in first.get("features", []):
            length, width = first["prompt_embeds_shape"]
            self.padded = {
                name: (length, width if name == "prompt_embeds" else 1)
                for name in kinds
                if name in PROMPTS
            }
        self.ragged, self.size_of_row = "size" in kinds, None

    def __len__(self) -> int:
        return int(self.ends[-1])

    @property
    def sizes(self) -> np.ndarray | None:
        """(height, width) of each row's latents, None if all have the same size."""
        if self.ragged and self.size_of_row is None:
            views = (view for shard in range(len(self.lengths)) for view in self.open(shard).views)
            self.size_of_row = np.concatenate([view["size"] for view in views])
        return self.size_of_row

    def find_shard(self, shard: int) -> tuple[Shards, int]:
        """Return (`Shards` of its cache, its number in them) for a shard's number among all."""
        part = int(np.searchsorted(self.firsts, shard, side="right")) - 1
        return self.parts[part], shard - int(self.firsts[part])

    def open(self, shard: int) -> OpenShard:
        """Return a shard, and open it if it is not open yet."""
        if (opened := self.opened.get(shard)) is None:
            shards, number = self.find_shard(shard)
            if len(self.opened) >= MOST_OPEN:
                self.opened.pop(next(iter(self.opened)))
            path = self.fetcher.path(shard) if is_address(shards.folder) else None
            opened = self.opened[shard] = shards.open(number, path, alone=True)
        return opened

    def digest(self, row: int) -> str:
        shard = int(np.searchsorted(self.ends, row, side="right"))
        opened = self.open(shard)
        chunk, place = opened.find(row - int(self.ends[shard] - self.lengths[shard]))
        return str(opened.checksums[chunk][place])

    def names(self, shards: Iterable[int] | None = None) -> Iterator[str]:
        for shard in range(len(self.lengths)) if shards is None else shards:
            for batch in self.open(shard).batches:
                yield from batch["key"].to_pylist()  # as `transform` named them

    def __getitem__(self, keys: list[Key]) -> dict[str, Any]:
        rows = np.array([row for _, row, _ in keys]) % len(self)
        shards = np.searchsorted(self.ends, rows, side="right")
        places = rows - self.ends[shards] + self.lengths[shards]
        columns, flipped, texts = {name: [] for name in self.columns}, [], []
        for (epoch, number, _), shard, place in zip(
            keys, shards.tolist(), places.tolist(), strict=True
        ):
            opened = self.open(shard)
            texts += [opened.read_text(place, self.tokenizers)] if self.tokenizers else []
            views, place = opened.view(place)
            flip = self.random_flip and draw_choices(self.seed, epoch, number)[2] < 0.5
            flipped.append(flip)
            if self.caption_weights:
                lengths = views["prompt_lengths"][place]
                which = draw_caption(self.seed, epoch, number, self.caption_weights, lengths >= 0)
            for name, found in columns.items():
                numbers = views["latents_flipped" if flip and name == "latents" else name][place]
                if self.caption_weights and name in TEXTS:
                    numbers = take_caption(numbers, lengths, which, name in self.padded)
                found.append(numbers)
        batch, lengths = {}, {}
        for name, shape in self.padded.items():
            batch[name], batch["prompt_mask"] = pad_prompts(columns.pop(name), *shape)
            lengths["prompt_lengths"] = batch["prompt_mask"].sum(axis=1).tolist()
        # Each column in one copy: this thread releases Python's lock once per column, not per row
        batch |= {
            name: np.concatenate(found).reshape(len(keys), -1) for name, found in columns.items()
        }
        batch = {name: torch.from_numpy(numbers) for name, numbers in batch.items()} | lengths
        batch |= tokenize_batch(self.tokenizers, self.args, texts, keys) if self.tokenizers else {}
        weights = torch.tensor([weight for _, _, weight in keys])
        shape = [
            self.shape[0],
            *(self.shape[1:] if self.sizes is None else self.sizes[rows[0]].tolist()),
        ]
        return {
            **batch,
            "latents_shape": shape,
            "flipped": torch.tensor(flipped),
            "weight": weights,
            "skipped": [],
        }


def choose_rows(
    rows: np.ndarray, dataset: CachedLatents, weights: list[float] | None, epoch: int
) -> np.ndarray:
    """Return the rows that an epoch takes: from each cache, its weight times as many as it has.

    `rows` are sorted. The rows of a cache, in an order drawn from the seed, are repeated without
    end, and each epoch takes the next weight * rows of them. With weight 3, an epoch takes each row
    three times; with 1.5, once or twice, and two epochs take each row three times. All epochs have
    the same number of rows; rows lost by rounding in one epoch come in the next. A row has its own
    number when it first comes in an epoch, and for each repetition the number of all rows is added.
    """
    if not weights:
        return rows
    chosen, parts = [], np.split(rows, np.searchsorted(rows, dataset.cache_ends[:-1]))
    shares = [weight * len(part) for weight, part in zip(weights, parts, strict=True)]
    for folder, share, part in zip(dataset.folders, shares, parts, strict=True):
        if share < 1:
            fail(
                f"--latents_weights takes {share:g} of the {len(part)} rows of {folder}: "
                "choose a larger one"
            )
    for part, first, end in zip(parts, deal(shares, epoch), deal(shares, epoch + 1), strict=True):
        rounds, places = np.divmod(np.arange(first, end), len(part))
        order = np.random.default_rng(step_seed("weights", dataset.seed)).permutation(part)
        chosen.append(order[places] + (rounds - first // len(part)) * len(dataset))
    return np.sort(np.concatenate(chosen))  # so that weights of 1 change nothing


def deal(shares: list[float], epochs: int) -> list[int]:
    """Return how many rows the first `epochs` epochs take of each cache, by largest remainder.

    Each epoch takes round(sum(shares)) rows.
    """
    total = round(sum(shares)) * epochs
    quotas = np.array(shares) / sum(shares) * total
    counts = np.floor(quotas).astype(int)
    counts[np.argsort(counts - quotas, kind="stable")[: total - counts.sum()]] += 1
    return counts.tolist()
