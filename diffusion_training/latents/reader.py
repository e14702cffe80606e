"""Latent caches -> batches: rows are read where they lie, and checked when they are first read."""

import hashlib
import io
import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
import xxhash

from diffusion_training.data.captions import say_cut
from diffusion_training.errors import fail
from diffusion_training.files import find_differences
from diffusion_training.latents.cache import fingerprint_cache
from diffusion_training.latents.columns import EMPTY, FEATURES, checksum_row, describe_columns, view_rows
from diffusion_training.latents.encoders import (
    describe_latents,
    describe_models,
    describe_prompts,
    encode_empty_prompt,
    load_models,
    try_models,
)
from diffusion_training.order import draw_choices, step_seed


def load_cache(folder):
    """Open a cache of precompute_latents.py without reading its rows, which are checked when they are first read.

    Returns (cache.json, {name: what stands for a caption that is left out}, [(shard, record batch)]).
    """
    folder, shard = Path(folder), ""
    try:
        cache = json.loads((folder / "cache.json").read_text())
        if not (folder / "state.json").is_file():
            fail(f"{folder} is not finished: run the command that made it again")
        if json.loads((folder / "state.json").read_text())["_fingerprint"] != fingerprint_cache(cache):
            raise ValueError("cache.json is not as it was written")
        if cache["format_version"] not in (2, 3):
            fail(f"{folder} is a cache of format {cache['format_version']}, this version reads 2 and 3: make it anew")
        if unknown := set(cache.get("features", [])) - FEATURES:
            fail(f"{folder} holds {', '.join(sorted(unknown))}, which this version does not know: take a newer one")
        kinds, empty_prompt, batches = describe_columns(cache), {}, []
        for column in [column for column in EMPTY if f"{column}_shape" in cache]:
            content = (folder / f"{EMPTY[column]}.npy").read_bytes()
            if hashlib.sha256(content).hexdigest() != cache[f"{EMPTY[column]}_sha256"]:
                raise ValueError(f"{EMPTY[column]}.npy is not as it was written")
            empty_prompt[column] = torch.from_numpy(np.load(io.BytesIO(content)))
        for name, record in cache["shards"].items():
            shard, digest = folder / Path(name).name, xxhash.xxh3_128()
            read = [batch for batch in pa.ipc.open_stream(pa.memory_map(str(shard))) if len(batch)]
            if sum(map(len, read)) != record["rows"]:
                raise ValueError(f"{sum(map(len, read))} rows instead of {record['rows']}")
            for batch in read:
                for column, kind in kinds.items():
                    if batch[column].type != kind or batch[column].flatten().null_count:
                        raise ValueError(f"{column} is not {getattr(kind, 'list_size', 'some')} numbers in each row")
                digest.update(batch["checksum"].to_numpy())
            if digest.hexdigest() != record["checksums"]:
                raise ValueError("it is not as it was written")
            batches += [(shard, batch) for batch in read]
        if not batches:
            raise ValueError("it holds no rows")
        return cache, empty_prompt, batches
    except FileNotFoundError as error:
        fail(f"{error.filename or shard} is missing: make the cache with precompute_latents.py")
    except Exception as error:
        if "Memory mapping file failed" in str(error):
            turn = "raise `ulimit -v` or vm.max_map_count, or make caches with more --rows_per_shard"
            fail(f"{shard} can't be mapped into memory: {turn}")
        fail(f"{shard or folder} is damaged ({error}): run the command that made the cache again, it mends it")


class CachedLatents(torch.utils.data.Dataset):
    """Turns keys of `step_batches` into a batch of one or several latent caches.

    {"latents", "prompt_embeds": float16 [N, numbers per row], or in place of these "input_ids": int32 [N, tokens],
    "latents_shape": [channels, height, width], "flipped": bool [N], "weight": [N], "skipped": []}, and what else
    `describe_columns` says; the rows must be of one size. The columns are views of the memory-mapped files, and a row
    is copied once, into its batch. A row is checked when it is first read. A number beyond the rows is one of them
    once more, as `choose_rows` counts, which is mirrored by a draw of its own. caches: {folder: what `load_cache`
    returns}.
    """

    def __init__(self, caches, seed, random_flip):
        self.seed, self.random_flip, self.folders = seed, random_flip, list(caches)
        self.batches = [batch for _, _, batches in caches.values() for batch in batches]
        self.ends = np.cumsum([len(batch) for _, batch in self.batches])
        self.cache_ends = np.cumsum([cache["rows"] for cache, _, _ in caches.values()])
        content = json.dumps([cache["shards"] for cache, _, _ in caches.values()])
        self.fingerprint = hashlib.sha256(content.encode()).hexdigest()[:16]
        first, _, _ = next(iter(caches.values()))  # others have the same columns, which `check_caches` checks
        kinds = describe_columns(first)
        self.views = [
            {name: view_rows(batch[name]) for name in batch.schema.names if name in kinds or name == "latents_flipped"}
            for _, batch in self.batches
        ]
        self.columns = [name for name in kinds if name not in ("latents_flipped", "size")]
        self.shape = first["latents_shape"]
        self.sizes = np.concatenate([view["size"] for view in self.views]) if "size" in kinds else None
        self.checksums = [batch["checksum"].to_numpy() for _, batch in self.batches]
        self.unchecked = np.ones(len(self), bool)

    def __len__(self):
        return int(self.ends[-1])

    def digest(self, row):
        chunk = int(np.searchsorted(self.ends, row, side="right"))
        return str(self.checksums[chunk][row - self.ends[chunk]])  # counted from the chunk's end

    def names(self):
        for _, batch in self.batches:
            yield from batch["key"].to_pylist()  # as `transform` named them

    def check(self, row, chunk, i):
        """Refuse a row that is not as it was written: as OSError, because the disk failed, or who wrote to it."""
        if self.checksums[chunk][i] != checksum_row({name: view[i] for name, view in self.views[chunk].items()}):
            shard, _ = self.batches[chunk]
            raise OSError(f"{shard} is damaged: the command that made the cache mends it when it is run again")
        self.unchecked[row] = False

    def __getitem__(self, keys):
        rows = np.array([row for _, row, _ in keys]) % len(self)
        chunks = np.searchsorted(self.ends, rows, side="right")
        places = (rows - self.ends[chunks]).tolist()  # counted from the chunk's end
        columns, flipped = {name: [] for name in self.columns}, []
        for (epoch, number, _), row, chunk, place in zip(keys, rows.tolist(), chunks.tolist(), places, strict=True):
            if self.unchecked[row]:
                self.check(row, chunk, place)
            flip = self.random_flip and draw_choices(self.seed, epoch, number)[2] < 0.5
            flipped.append(flip)
            for name, found in columns.items():
                found.append(self.views[chunk]["latents_flipped" if flip and name == "latents" else name][place])
        # Each column in one copy, for which this thread lets go of Python's lock once and not once a row
        batch = {name: np.concatenate(found).reshape(len(keys), -1) for name, found in columns.items()}
        batch = {name: torch.from_numpy(numbers) for name, numbers in batch.items()}
        weights = torch.tensor([weight for _, _, weight in keys])
        shape = [self.shape[0], *(self.shape[1:] if self.sizes is None else self.sizes[rows[0]].tolist())]
        return {**batch, "latents_shape": shape, "flipped": torch.tensor(flipped), "weight": weights, "skipped": []}


def choose_rows(rows, dataset, weights, epoch):
    """The rows that an epoch takes of `rows`, which are sorted: of each cache its weight times as many.

    A cache's rows, in an order drawn from the seed, are gone round without end, and an epoch takes the next weight *
    rows of them: with 3 it has each thrice; with 1.5 each once or twice, and two epochs have each thrice. All epochs
    have as many, and what is lost by rounding in one comes in the next. The first time a row comes in an epoch it has
    its own number, then one that is higher by all rows for each time before.
    """
    if not weights:
        return rows
    chosen, parts = [], np.split(rows, np.searchsorted(rows, dataset.cache_ends[:-1]))
    shares = [weight * len(part) for weight, part in zip(weights, parts, strict=True)]
    for folder, share, part in zip(dataset.folders, shares, parts, strict=True):
        if share < 1:
            fail(f"--latents_weights takes {share:g} of the {len(part)} rows of {folder}: choose a larger one")
    for part, first, end in zip(parts, deal(shares, epoch), deal(shares, epoch + 1), strict=True):
        rounds, places = np.divmod(np.arange(first, end), len(part))
        order = np.random.default_rng(step_seed("weights", dataset.seed)).permutation(part)
        chosen.append(order[places] + (rounds - first // len(part)) * len(dataset))
    return np.sort(np.concatenate(chosen))  # so that weights of 1 change nothing


def deal(shares, epochs):
    """How many rows `epochs` epochs take of each cache, of round(sum(shares)) each: by largest remainder."""
    total = round(sum(shares)) * epochs
    quotas = np.array(shares) / sum(shares) * total
    counts = np.floor(quotas).astype(int)
    counts[np.argsort(counts - quotas, kind="stable")[: total - counts.sum()]] += 1
    return counts.tolist()


def check_caches(caches, args):
    """Refuse caches that other models than those of the flags have made, or that lack what the flags ask for."""
    first, _, _ = next(iter(caches.values()))
    vae, text_encoders, tokenizers = load_models(args, torch.float32)  # to be compared, and let go
    try_models(vae, text_encoders)
    description = describe_models(vae, text_encoders, tokenizers)
    description |= describe_latents(vae, first["transform"]["resolution"], first["latents"])
    description |= describe_prompts(encode_empty_prompt(text_encoders, tokenizers, args), args)
    description |= {"text_cache": first["text_cache"], "features": first.get("features")}
    for folder, (cache, _, _) in caches.items():
        if differences := find_differences({name: cache.get(name) for name in description}, description):
            fail(f"{folder} does not fit these models or the first cache ({', '.join(differences)}): choose others")
        say_cut(cache["captions_cut"], cache["rows"], cache["prompt_embeds_shape"][0], f"{folder}: ")
        if args.random_flip and not cache["transform"]["random_flip"]:
            fail(f"--random_flip: {folder} was made without, so it holds no mirrored latents")
        if args.resolution not in (None, cache["transform"]["resolution"]):
            fail(f"--resolution {args.resolution}: {folder} holds {cache['transform']['resolution']} px")
