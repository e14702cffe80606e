"""What a large run takes, on paper: bytes, cores a GPU, hours and dollars for 1e6, 1e8 and 2e9 images.

    python benchmarks/plan.py                    # figures of one day and two rented cores; replace them by your own
    python benchmarks/plan.py --transform_speed 90 --encoder_speed 250 --num_encoders 64 --gpu_price 1.2 --simulate 0

Prints a table, next to the figures of the guide that the scripts follow ("Processing 2 Billion Images for Stable
Diffusion Model Training"), then measures what the driver has to do: cut 2e9 rows into parts, list what is missing of
1e6 records, give parts to 1,024 encoders. --help says which figures are given and not measured.
"""

import argparse
import heapq
import json
import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent))
import precompute_latents as script

SIZES = (10**6, 10**8, 2 * 10**9)
# The guide: 120 million images in 10 hours on 10 machines of 32 cores, said to be m5.8xlarge.
GUIDE_IMAGES, GUIDE_HOURS, GUIDE_CORES = 120e6, 10, 320


def parse_args(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    positive = script.number(1e-9, 1e12)
    count = script.number(1, 10**12, int)
    add = parser.add_argument_group("images").add_argument
    add("--resolution", type=count, default=256, help="side of the square images, pixels")
    add("--image_bytes", type=positive, default=60e3, help="of a stored image with its caption (given, not measured)")
    add("--latent_channels", type=count, default=4, help="of the VAE, whose latents have 1/8 of the side")
    add("--embedding", type=count, default=77 * 1024, help="numbers for a caption (SD v2: 77 x 1024; ids: 2 x 77)")
    add = parser.add_argument_group("speed").add_argument
    add(
        "--download_speed",
        type=positive,
        default=GUIDE_IMAGES / GUIDE_HOURS / 3600 / GUIDE_CORES,
        help="images/s a core (the guide's)",
    )
    add(
        "--transform_speed",
        type=positive,
        default=290,
        help="images/s a core: benchmarks/transform_speed.py, 1024 px photographs to 256",
    )
    add("--encoder_speed", type=positive, default=150, help="images/s a GPU (given, not measured)")
    add("--num_encoders", type=count, default=64, help="GPUs")
    add("--parts_per_second", type=positive, default=75, help="that one driver hands out (measured, 2 shared cores)")
    add("--hash_speed", type=positive, default=1e9, help="bytes/s a core, to check what is there (given)")
    add = parser.add_argument_group("dollars an hour (given)").add_argument
    add("--core_price", type=positive, default=0.048, help="of a core")
    add("--gpu_price", type=positive, default=1.0, help="of a GPU with some cores")
    add = parser.add_argument_group("shards").add_argument
    add("--rows_per_shard", type=count, default=2048, help="rows of a file of the cache")
    add("--batch_size", type=count, default=64, help="of an encoder")
    add("--part_bytes", type=count, default=2**26, help="of pixels in a part: PART_BYTES of precompute_latents_ray.py")
    add("--simulate", type=script.number(0, 10**12, int), default=2 * 10**9, help="rows to cut into parts (0: none)")
    return parser.parse_args(argv)


def plan(images, args):
    """The figures of a run over so many images, as {name: number}."""
    row_bytes = 2 * (2 * args.latent_channels * (args.resolution // 8) ** 2 + args.embedding)
    part_rows = args.batch_size * max(1, args.part_bytes // (3 * args.resolution**2 * args.batch_size))
    speed = min(args.num_encoders * args.encoder_speed, args.parts_per_second * part_rows)
    cores = speed / args.transform_speed
    hours = images / speed / 3600
    download_core_hours = images / args.download_speed / 3600
    return {
        "images": images,
        "images, TB": images * args.image_bytes / 1e12,
        "cache, TB": images * row_bytes / 1e12,
        "shards": -(-images // args.rows_per_shard),
        "parts": images / args.rows_per_shard * -(-args.rows_per_shard // part_rows),
        "download, core hours": download_core_hours,
        "download, dollars": download_core_hours * args.core_price,
        "cores that feed a GPU": args.encoder_speed / args.transform_speed,
        "encoders kept busy": speed / args.encoder_speed,
        "images/s": speed,
        "encode, hours": hours,
        "encode, dollars": hours * (args.num_encoders * args.gpu_price + cores * args.core_price),
        "written, GB/s": speed * row_bytes / 1e9,
        "to check it all, core hours": images * row_bytes / args.hash_speed / 3600,
    }


def breaks_first(figures, args):
    """What is in the way first at this size, in a sentence."""
    if figures["encoders kept busy"] < 0.99 * args.num_encoders:
        return "one driver hands out too few parts: raise PART_BYTES, or run several on a slice of the data each"
    if figures["images, TB"] > 20:
        return "`datasets` copies the images once more when it loads them: split the data, a cache for each"
    if figures["written, GB/s"] > 5:
        return "the folder that all nodes share: it takes what all encoders write, twice (parts, then shards)"
    return "nothing: the GPUs set the pace"


def simulate_parts(rows, args):
    """Cut rows into shards and parts as the script does, in slices. Returns (seconds, parts, bytes for each part)."""
    step = args.batch_size * max(1, args.part_bytes // (3 * args.resolution**2 * args.batch_size))
    begin, count, size = time.perf_counter(), 0, 0
    for start in range(0, rows, args.rows_per_shard):
        end = min(rows, start + args.rows_per_shard)
        parts = [(first, min(first + step, end)) for first in range(start, end, step)]
        count += len(parts)
        if start == 0:
            size = sum(sys.getsizeof(part) + sum(map(sys.getsizeof, part)) for part in parts) / len(parts)
    return time.perf_counter() - begin, count, size


def simulate_listing(records):
    """List a folder of records, and read and parse them. Returns (seconds to list, to read, bytes of a record)."""
    with tempfile.TemporaryDirectory() as folder:
        text = json.dumps({"rows": 2048, "encoded_again": 0, "skipped": [], "sha256": "0" * 64})
        for i in range(records):
            with open(os.path.join(folder, f"data-{i:05d}-of-{records:05d}.arrow.json"), "w") as file:
                file.write(text)
        begin = time.perf_counter()
        names = [entry.name for entry in os.scandir(folder)]
        listed = time.perf_counter()
        for name in names:
            with open(os.path.join(folder, name)) as file:
                json.load(file)
        return listed - begin, time.perf_counter() - listed, len(text)


def simulate_assignment(parts, encoders, spread=0.1, seed=0):
    """Give each part to the encoder that is free first; encoders differ by `spread`. Returns (seconds, share busy)."""
    begin = time.perf_counter()
    speeds = np.random.default_rng(seed).normal(1, spread, encoders).clip(0.1)
    free = [(0.0, i) for i in range(encoders)]
    for _ in range(parts):
        moment, i = heapq.heappop(free)
        heapq.heappush(free, (moment + 1 / speeds[i], i))
    end = max(moment for moment, _ in free)
    return time.perf_counter() - begin, parts / (end * speeds.sum())


def main(args):
    plans = [plan(images, args) for images in SIZES]
    for name in plans[0]:
        print(
            f"{name:<28}" + "".join(f"{figures[name]:>18,.{0 if figures[name] >= 100 else 1}f}" for figures in plans)
        )
    for images, figures in zip(SIZES, plans, strict=True):
        print(f"{images:,} images; what breaks first: {breaks_first(figures, args)}")
    hours = GUIDE_IMAGES / args.download_speed / 3600 / GUIDE_CORES
    print(f"The guide downloads {GUIDE_IMAGES:,.0f} on {GUIDE_CORES} cores in {GUIDE_HOURS} h; this is {hours:.1f} h.")
    print("Its whole pre-training on 2e9 images is said to cost 39,500 dollars; the lines above stop at the cache.")
    if not args.simulate:
        return
    seconds, count, size = simulate_parts(args.simulate, args)
    print(f"{args.simulate:,} rows: cut into {count:,} parts in {seconds:.1f} s, {count * size / 1e9:.2f} GB")
    records = max(1, min(10**6, args.simulate // 1000))
    to_list, to_read, size = simulate_listing(records)
    print(
        f"{records:,} records of {size} bytes: listed in {to_list:.1f} s, read in {to_read:.1f} s (local, in memory)"
    )
    parts = min(count, 10**6)
    seconds, share = simulate_assignment(parts, 1024)
    print(f"{parts:,} parts for 1,024 encoders, 10 % apart in speed: {share:.2%} busy ({seconds:.1f} s to simulate)")


if __name__ == "__main__":
    main(parse_args())
