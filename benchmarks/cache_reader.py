"""How fast does train_text_to_image.py read a latent cache, beside other ways to read the same numbers? A table.

    python benchmarks/cache_reader.py

Makes a cache of random numbers in the shapes of Stable Diffusion 2, with the functions of precompute_latents.py, and
the same numbers as .npy files. Reads them in random order, on one thread, in turns: the trainer's `CachedLatents`
through its `load_batches`, numpy's memory map indexed by the rows of a batch, `datasets` in two formats through a
DataLoader, and the trainer's reader in a worker process. Each opens its files anew, three times: not in the page cache
(of this machine; there may be another below it), in it, and again. Prints thousands of rows a second: the median, and
as a share of numpy's in the same turn (median, least to most). The first pass of ours checks each row's checksum.
"""

import argparse
import gc
import json
import os
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import datasets
import numpy as np
import torch
from bench import machine, spread  # before the scripts, which it finds

import precompute_latents as maker
import train_text_to_image as script

COLUMNS = "latents", "prompt_embeds"


def make_cache(folder, rows, resolution, tokens=(77, 1024), batch_size=16, rows_per_shard=1024):
    """A finished cache of random numbers, and beside it latents.npy and prompt_embeds.npy with the same."""
    side, rng = resolution // 8, np.random.default_rng(0)
    sizes = {"latents": 8 * side * side, "prompt_embeds": tokens[0] * tokens[1]}
    base = {
        name: rng.standard_normal((batch_size, size), np.float32).astype(np.float16) for name, size in sizes.items()
    }
    copies = {
        name: np.lib.format.open_memmap(folder / f"{name}.npy", "w+", np.float16, (rows, size))
        for name, size in sizes.items()
    }

    def encode(batch, *_):  # in place of the models; as fast as a disk, and no row is like another
        columns = {name: numbers * np.float16(1 + batch["row"][0] / rows) for name, numbers in base.items()}
        for name, numbers in columns.items():
            copies[name][batch["row"]] = numbers[: len(batch["row"])]
        return {name: torch.from_numpy(numbers[: len(batch["row"])]) for name, numbers in columns.items()}, None

    def batches(start):
        for first in range(start, min(rows, start + rows_per_shard), batch_size):
            numbers = list(range(first, min(rows, start + rows_per_shard, first + batch_size)))
            names, none = [f"{row}.jpg" for row in numbers], [None] * len(numbers)
            yield {"row": numbers, "key": names, "text": names, "cut": [False] * len(numbers), "skipped": none}

    maker.encode, original = encode, maker.encode
    cache = {
        "rows_per_shard": rows_per_shard, "source": {"rows": rows}, "latents_shape": [8, side, side],
        "prompt_embeds_shape": list(tokens), "transform": {"random_flip": False},
    }  # fmt: skip
    (folder / "unfinished").mkdir()
    maker.write_file(folder / "cache.json", json.dumps(cache))
    for start in range(0, rows, rows_per_shard):
        maker.write_shard(folder / maker.name_shard(start, cache), maker.encode_all(batches(start), (), (), None))
    maker.encode = original
    maker.finish(folder, np.zeros(tokens, np.float16), 0)


def loaded(dataset, keys):
    return torch.utils.data.DataLoader(dataset, batch_size=None, sampler=keys)


def open_ours(folder, workers=0):
    dataset = script.CachedLatents(script.load_cache(folder)[2], SimpleNamespace(seed=0, random_flip=False))
    return lambda order: script.load_batches(
        dataset, [[(0, row, 1.0) for row in rows] for rows in order], workers, torch.device("cpu")
    )


def open_numpy(folder):
    arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in COLUMNS}
    return lambda order: ({name: array[rows] for name, array in arrays.items()} for rows in order)


def open_torch_format(folder):
    dataset = datasets.load_from_disk(str(folder)).with_format("torch", columns=list(COLUMNS))
    return lambda order: loaded(dataset, order)


def open_arrow_format(folder):
    dataset = datasets.load_from_disk(str(folder)).with_format("arrow", columns=list(COLUMNS))

    def read(table):
        columns = {name: table[name].combine_chunks() for name in COLUMNS}
        return {name: column.flatten().to_numpy().reshape(len(column), -1) for name, column in columns.items()}

    return lambda order: map(read, loaded(dataset, order))


READERS = {
    "train_text_to_image.py": open_ours,
    "numpy memory map": open_numpy,
    'with_format("torch"), to float32': open_torch_format,
    'with_format("arrow")': open_arrow_format,
    "train_text_to_image.py's, 1 worker process": lambda folder: open_ours(folder, 1),
}


def forget(folder):
    """Drop the files from the page cache; only pages that no process maps go."""
    gc.collect()
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(read, order):
    """Rows a second of a pass."""
    start = time.perf_counter()
    rows = sum(len(batch["prompt_embeds"]) for batch in read(order))
    return rows / (time.perf_counter() - start)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--resolutions", type=int, nargs="+", default=[256, 512])
    parser.add_argument("--tokens", type=int, nargs=2, default=[77, 1024], help="shape of a caption's embedding")
    parser.add_argument("--batch_size", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dir", help="where the files lie for a while (None: in the system's temporary folder)")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    print(f"{machine()}; batches of {args.batch_size}\n\n| pixels | reader | cold, first pass | first pass | later |")
    print("|---|---|---|---|---|")
    rng = np.random.default_rng(0)
    for resolution in args.resolutions:
        with tempfile.TemporaryDirectory(dir=args.dir) as folder:
            folder, speeds = Path(folder), {name: [] for name in READERS}
            make_cache(folder, args.rows, resolution, args.tokens)
            for _ in range(args.rounds):
                for name, opened in READERS.items():
                    forget(folder)
                    passes = []
                    for times in (1, 2):
                        read = opened(folder)
                        for _ in range(times):
                            order = np.split(
                                rng.permutation(args.rows), range(args.batch_size, args.rows, args.batch_size)
                            )
                            passes.append(measure(read, [rows.tolist() for rows in order]))
                        del read
                    speeds[name].append(passes)
            for name, passes in speeds.items():
                shares = np.array(passes) / speeds["numpy memory map"]
                pairs = zip(np.transpose(passes), shares.T, strict=True)
                cells = [f"{np.median(found) / 1e3:.1f}k, {spread(share)}" for found, share in pairs]
                print(f"| {resolution} | {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
