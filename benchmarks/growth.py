"""Does anything grow with the data? Start, resume, step time and memory for 1e3 to 1e6 rows.

    python benchmarks/growth.py                                 # some minutes, and 1.5 GB of disk
    python benchmarks/growth.py --rows 1000 10000000 --num_caches 1 --rows_per_shard 100 \\
        --written_shards 16
    # loose image files
    python benchmarks/growth.py --rows --images 1000 10000 100000 [--diffusers path/to/diffusers]
    # a long run; compare its tenths
    python benchmarks/growth.py --rows 1000 --num_caches 1 --steps 20000

Rows are small (the demo's models, 8 px), so that costs that depend on their number are
visible. Each run is a process of its own, so the time of a start includes the imports. --images
starts the unconditional trainer twice on a folder with this number of image files; with --diffusers
also diffusers' script.
"""

import itertools
import json
import tempfile
from pathlib import Path

import bench


def train_from_caches(folder, rows, count, cli):
    """Train from `count` caches and resume; return a row of the table.

    It holds the seconds to start and to resume, the milliseconds per step and the peak memory.
    """
    models, script = bench.ROOT / "demo/models", bench.ROOT / "train_text_to_image.py"
    shards = {"rows_per_shard": cli.rows_per_shard, "written": cli.written_shards}
    caches = [
        bench.make_cache(folder / f"{rows}-{count}-{i}", models, rows // count, 8, **shards)
        for i in range(count)
    ]
    out, unet = folder / f"out-{rows}-{count}", bench.ROOT / "demo/digits_text_to_image_unet.json"
    flags = [
        f"--pretrained_model_name_or_path={models}",
        "--latents_dir",
        *caches,
        "--report_to=none",
        "--use_ema",
    ]
    flags += [
        f"--unet_config_name_or_path={unet}",
        f"--train_batch_size={cli.batch_size}",
        f"--output_dir={out}",
    ]
    flags += [f"--logging_steps={max(1, cli.steps // 10)}", "--resume_from_checkpoint=latest"]
    first = bench.run(script, [*flags, f"--max_train_steps={cli.steps}"])
    again = bench.run(script, [*flags, f"--max_train_steps={cli.steps + 5}"])
    records = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    steps = [
        1000 * cli.batch_size / record["images_per_second"]
        for record in records
        if "loss" in record
    ]
    seconds = [f"{run['first']:.1f}" for run in (first, again)]
    return [
        f"{rows:,}",
        count,
        *seconds,
        f"{steps[1]:.0f} to {steps[9]:.0f}",
        f"{first['rss']:.0f}",
    ]


def start_from_files(folder, count, cli):
    """Start the unconditional trainers twice on `count` files; return a row of the table.

    It holds the seconds to the end of step 1 for each start.
    """
    images = bench.make_images(folder / f"images-{count}", count, bench.make_pictures(16))
    unet = bench.make_unet_config(folder / "unet.json", [8, 8], 8)
    (images / "metadata.jsonl").unlink()
    row, theirs = [f"{count:,}"], "examples/unconditional_image_generation/train_unconditional.py"
    for name in ["train_unconditional.py", *([theirs] if cli.diffusers else [])]:
        script = Path(cli.diffusers, name) if name == theirs else bench.ROOT / name
        flags = [
            f"--train_data_dir={images}",
            f"--model_config_name_or_path={unet}",
            "--resolution=8",
        ]
        flags += [
            f"--train_batch_size={cli.batch_size}",
            f"--cache_dir={folder / script.parent.name}-{count}",
        ]
        for turn in "12":
            out = f"--output_dir={folder / script.parent.name}-{count}-{turn}"
            row.append(f"{bench.run(script, [*flags, out], 1)['first']:.1f}")
    return row


def main(argv=None):
    parser = bench.make_parser(
        __doc__, size=None, mixed_precision=None, batch_size=16, steps=300, rounds=None
    )
    add = parser.add_argument
    add("--rows", type=int, nargs="*", default=[10**3, 10**4, 10**5, 10**6])
    add(
        "--num_caches",
        type=int,
        nargs="+",
        default=[1, 8],
        help="number of caches that the rows are split into",
    )
    add("--rows_per_shard", type=int, default=1024)
    add(
        "--written_shards",
        type=int,
        help="shards to write; the others are links to them (None: write all)",
    )
    add(
        "--images",
        type=int,
        nargs="*",
        default=[],
        help="numbers of loose image files to start from",
    )
    add("--diffusers", help="checkout of diffusers, to also start its script on --images")
    cli = parser.parse_args(argv)
    print(bench.machine())
    with tempfile.TemporaryDirectory() as folder:
        if cli.rows:
            header = [
                "rows",
                "caches",
                "start to step 1, s",
                "resume to next step, s",
                "ms per step, 2nd to last tenth",
            ]
            sizes = itertools.product(cli.rows, cli.num_caches)
            rows = (train_from_caches(Path(folder), *size, cli) for size in sizes)
            bench.show(
                f"{cli.steps} steps of {cli.batch_size}, with EMA",
                [*header, "most memory, MiB"],
                rows,
            )
        if cli.images:
            header = ["files", "start to step 1, s", "again, s", "diffusers', s", "again, s"]
            rows = (start_from_files(Path(folder), count, cli) for count in cli.images)
            bench.show("Loose files", header if cli.diffusers else header[:3], rows)


if __name__ == "__main__":
    main()
