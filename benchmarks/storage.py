"""How fast are rows of a latent cache read from a disk, a bounded folder and a bucket?

    python benchmarks/storage.py                                # 2 GB of disk
    python benchmarks/storage.py --bucket s3://bucket/scratch   # copies the cache to a real bucket

Makes a cache of random numbers in the shapes of Stable Diffusion 2, and reads an epoch of it as
trainers do, in turns:

- from a disk, in the orders `full` and `ranges`
- in `ranges` through a bounded folder, which is filled from a folder beside it or from the bucket;
  it holds half of the cache, little more than the shuffle windows need
- with --mosaic, the same with mosaicml-streaming (see mosaic_reader.py)

Without --bucket, moto serves as the bucket if it is installed. Prints the medians of the rows and
bytes per second after the first batch, and of the seconds to the first batch.
"""

import atexit
import functools
import importlib.util
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import bench
import fsspec
import torch

from diffusion_training.latents import stream
from diffusion_training.latents.reader import load_cache
from diffusion_training.latents.source import MOST_PERMUTED
from diffusion_training.loading import load_batches
from diffusion_training.order import Order, step_batches
from diffusion_training.training.held_out import hold_out
from diffusion_training.training.progress import Progress


def read_epoch(cache, ranges, folder, size, batch_size):
    """Return (rows per second, seconds to the first batch) of one epoch.

    Nothing is trained at the same time.
    """
    begin, most = time.perf_counter(), 0 if ranges else MOST_PERMUTED
    accelerator = SimpleNamespace(local_process_index=0)
    launch = SimpleNamespace(accelerator=accelerator, rank=0, num_processes=1)
    caches = {cache: load_cache(cache)}
    kept = stream.Storage(folder, size, shuffle_shards=1)
    dataset = stream.open_stored(launch, caches, (0, False), kept, None, None, None, most)
    rows, _ = hold_out(accelerator, dataset, 0, 0)
    progress = Progress(
        {"global_step": 0, "data_step": 0, "images_seen": 0}, len(rows), batch_size, 1
    )
    batches = load_batches(
        dataset, step_batches(Order(rows, 0), progress, 0, 1), 0, torch.device("cpu")
    )
    count = len(next(batches)["weight"])
    first = time.perf_counter()
    read = 0
    while read + count < len(rows):
        read += len(next(batches)["weight"])
    seconds = time.perf_counter() - first
    batches.close()
    return read / seconds, first - begin


def read_by_mosaic(python, *argv):
    """Measure like `read_epoch`, with mosaicml-streaming in an environment of its own."""
    command = [python, Path(__file__).parent / "mosaic_reader.py", *argv]
    done = subprocess.run(list(map(str, command)), stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout.splitlines()[-1]) if done.stdout else None


def start_server():
    """Start a moto S3 server as a process, and pass its address to botocore."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    atexit.register(server.kill)  # also after an error
    names = {
        "ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "ACCESS_KEY_ID": "a",
        "SECRET_ACCESS_KEY": "b",
    }
    os.environ.update(
        {f"AWS_{name}": value for name, value in names.items()}, AWS_DEFAULT_REGION="us-east-1"
    )
    while socket.socket().connect_ex(("127.0.0.1", port)):
        time.sleep(0.1)
    fsspec.filesystem("s3").mkdir("bucket")
    return server


def main(argv=None):
    parser = bench.make_parser(
        __doc__, size="small", mixed_precision=None, batch_size=64, steps=None, rounds=3
    )
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--rows_per_shard", type=int, default=16)
    parser.add_argument("--resolution", type=int, default=256)
    parser.add_argument("--bucket", help="address to copy the cache to (None: a local moto server)")
    parser.add_argument("--mosaic", help="Python with mosaicml-streaming, to compare with it")
    parser.add_argument(
        "--dir", help="folder for temporary files (None: the system's temporary folder)"
    )
    cli = parser.parse_args(argv)
    server = None
    if cli.bucket is None and importlib.util.find_spec("moto"):
        server, cli.bucket = start_server(), "s3://bucket/scratch"
    with tempfile.TemporaryDirectory(dir=cli.dir, ignore_cleanup_errors=True) as place:
        models, cache = bench.make_models(Path(place, "models"), cli.size), Path(place, "cache")
        bench.make_cache(cache, models, cli.rows, cli.resolution, rows_per_shard=cli.rows_per_shard)
        sizes = [path.stat().st_size for path in cache.glob("*.arrow")]
        need = min(sum(sizes), round(2.3 * stream.LEAST_RANGES * max(sizes)))
        places = {"a disk, `full`": (cache, False), "a disk, `ranges`": (cache, True)}
        places["a bounded folder, from a disk"] = f"file://{cache}", True
        if cli.bucket:
            fs, there = fsspec.url_to_fs(f"{cli.bucket}/cache")
            fs.put(f"{cache}/", f"{there}/", recursive=True)
            far = f"a bounded folder, from {'moto' if server else cli.bucket}"
            places[far] = f"{cli.bucket}/cache", True
        options = {"folder": f"{place}/shards", "size": need, "batch_size": cli.batch_size}
        runs = {
            name: functools.partial(read_epoch, *where, **options) for name, where in places.items()
        }
        if cli.mosaic:
            theirs, mosaic = Path(place, "mds"), functools.partial(read_by_mosaic, cli.mosaic)
            mosaic("write", cache, theirs, max(sizes))
            reads = functools.partial(mosaic, "read", cli.batch_size, theirs)
            runs["mosaicml-streaming, a disk"] = reads
            runs["mosaicml-streaming, a bounded folder, from a disk"] = functools.partial(
                reads, theirs, need
            )
            if cli.bucket:
                os.environ["S3_ENDPOINT_URL"] = os.environ.get(
                    "AWS_ENDPOINT_URL", "https://s3.amazonaws.com"
                )
                fs.put(f"{theirs}/", f"{there}-mds/", recursive=True)
                where = f"{cli.bucket}/cache-mds", need
                runs[f"mosaicml-streaming, {far}"] = functools.partial(reads, *where)
        found = bench.interleaved(runs, cli.rounds)
        row_bytes = sum(sizes) / cli.rows
        rows = (
            [
                name,
                bench.spread([speed for speed, _ in of], "{:.0f}"),
                f"{sorted(speed for speed, _ in of)[len(of) // 2] * row_bytes / 1e6:.0f}",
                bench.spread([first for _, first in of]),
            ]
            for name, of in found.items()
        )
        bench.show(
            f"{bench.machine()}; {cli.rows:,} rows of {row_bytes / 1e3:.0f} kB, "
            f"folder of {need / 1e6:.0f} MB",
            ["rows from", "rows/s", "MB/s", "s to the first batch"],
            rows,
        )


if __name__ == "__main__":
    main()
