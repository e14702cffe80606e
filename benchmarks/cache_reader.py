"""How fast does train_text_to_image.py read a latent cache, compared with other readers?

    python benchmarks/cache_reader.py

Makes a cache of random numbers in the shapes of Stable Diffusion 2, and writes the same numbers to
.npy files. Each reader reads all rows in random order on one thread. These take turns:

- the trainer's `CachedLatents` through its `load_batches`
- numpy's memory map, indexed by the rows of a batch
- `datasets` in two formats through a DataLoader
- the trainer's reader in a worker process

A reader opens the files when they are not in the page cache, and reads them once ("cold, first
pass"). Then it opens them again and reads them twice ("first pass", "later"). The storage may have
a further cache.

Prints thousands of rows per second (median), and the speed relative to numpy's in the same turn
(median, least to most). The first pass of the trainer's reader also checks each row's checksum.
"""

import functools
import gc
import os
import tempfile
import time
from pathlib import Path

import bench  # first: it puts the package on sys.path
import datasets
import numpy as np
import torch

from diffusion_training.latents.reader import CachedLatents, load_cache
from diffusion_training.loading import load_batches

COLUMNS = "latents", "prompt_embeds"


def copy_to_numpy(folder):
    """Write the numbers of a cache to latents.npy and prompt_embeds.npy beside it."""
    shards = load_cache(folder).shards
    for name in COLUMNS:
        np.save(
            folder / f"{name}.npy",
            np.concatenate(
                [batch[name].flatten().to_numpy().reshape(len(batch), -1) for batch in shards]
            ),
        )


def loaded(dataset, keys):
    return torch.utils.data.DataLoader(dataset, batch_size=None, sampler=keys)


def open_ours(folder, workers=0):
    dataset = CachedLatents({folder: load_cache(folder)}, seed=0, random_flip=False)
    return lambda order: load_batches(
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
        return {
            name: column.flatten().to_numpy().reshape(len(column), -1)
            for name, column in columns.items()
        }

    return lambda order: map(read, loaded(dataset, order))


READERS = {
    "train_text_to_image.py": open_ours,
    "numpy memory map": open_numpy,
    'with_format("torch"), to float32': open_torch_format,
    'with_format("arrow")': open_arrow_format,
    "train_text_to_image.py's, 1 worker process": lambda folder: open_ours(folder, 1),
}


def forget(folder):
    """Drop the files from the page cache, except for pages that a process maps."""
    gc.collect()
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(opened, folder, batches):
    """Return the rows per second of three passes.

    The first opens files that are not in the page cache, the second opens them again, and the third
    reuses the open files.
    """
    forget(folder)
    speeds = []
    for times in (1, 2):
        read = opened(folder)
        for _ in range(times):
            order, start = batches(), time.perf_counter()
            rows = sum(len(batch["prompt_embeds"]) for batch in read(order))
            speeds.append(rows / (time.perf_counter() - start))
        del read
    return speeds


def main(argv=None):
    parser = bench.make_parser(
        __doc__, size="small", mixed_precision=None, batch_size=64, steps=None, rounds=7
    )
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--resolutions", type=int, nargs="+", default=[256, 512])
    parser.add_argument(
        "--dir", help="folder for temporary files (None: the system's temporary folder)"
    )
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    rng = np.random.default_rng(0)

    def batches():
        order = np.split(
            rng.permutation(args.rows), range(args.batch_size, args.rows, args.batch_size)
        )
        return [rows.tolist() for rows in order]

    def rows():
        for resolution in args.resolutions:
            with tempfile.TemporaryDirectory(dir=args.dir) as place:
                models, folder = (
                    bench.make_models(Path(place, "models"), args.size),
                    Path(place, "cache"),
                )
                copy_to_numpy(bench.make_cache(folder, models, args.rows, resolution))
                runs = {
                    name: functools.partial(measure, way, folder, batches)
                    for name, way in READERS.items()
                }
                speeds = bench.interleaved(runs, args.rounds)
            for name, passes in speeds.items():
                shares = np.array(passes) / speeds["numpy memory map"]
                pairs = zip(np.transpose(passes), shares.T, strict=True)
                cells = [
                    f"{np.median(found) / 1e3:.1f}k, {bench.spread(share)}"
                    for found, share in pairs
                ]
                yield [resolution, name, *cells]

    header = ["pixels", "reader", "cold, first pass", "first pass", "later"]
    bench.show(f"{bench.machine()}; batches of {args.batch_size}", header, rows())


if __name__ == "__main__":
    main()
