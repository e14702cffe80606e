"""Does anything grow with the data? Start, resume, steps and memory of training from caches of 1e3 to 1e6 rows.

    python benchmarks/growth.py                                   # some minutes, and 1.5 GB of disk
    python benchmarks/growth.py --rows --images 1000 10000 100000 [--diffusers path/to/diffusers]      # loose files
    python benchmarks/growth.py --rows 1000 --num_caches 1 --steps 20000          # a long run: its tenths

A row is small here (the demo's models, 8 px), so that what belongs to the number of rows is not hidden by their size.
Runs are processes of their own, and what a start takes holds the imports. --images: the unconditional trainer, from
folders of so many image files, the first time and again, and diffusers' script if its checkout is given.
"""

import json
import tempfile
from pathlib import Path

import bench


def main(argv=None):
    parser = bench.make_parser(__doc__, size=None, mixed_precision=None, batch_size=16, steps=300, rounds=None)
    parser.add_argument("--rows", type=int, nargs="*", default=[10**3, 10**4, 10**5, 10**6])
    parser.add_argument(
        "--num_caches", type=int, nargs="+", default=[1, 8], help="folders that the rows are split over"
    )
    parser.add_argument("--images", type=int, nargs="*", default=[], help="loose files in a folder")
    parser.add_argument("--diffusers", help="a checkout of diffusers, to start its script from --images too")
    cli = parser.parse_args(argv)
    print(bench.machine())
    table, models = [], bench.ROOT / "demo/models"
    with tempfile.TemporaryDirectory() as folder:
        for rows in cli.rows:
            for count in cli.num_caches:
                place = Path(folder, f"{rows}-{count}")
                caches = [bench.make_cache(place / f"{i}", models, rows // count, 8) for i in range(count)]
                flags = [f"--pretrained_model_name_or_path={models}", "--latents_dir", *caches, "--report_to=none"]
                flags += [
                    f"--unet_config_name_or_path={bench.ROOT / 'demo/digits_text_to_image_unet.json'}",
                    "--use_ema",
                ]
                flags += [f"--train_batch_size={cli.batch_size}", f"--output_dir={place / 'out'}"]
                flags += [f"--logging_steps={max(1, cli.steps // 10)}", "--resume_from_checkpoint=latest"]
                script = bench.ROOT / "train_text_to_image.py"
                first = bench.run(script, [*flags, f"--max_train_steps={cli.steps}"])
                again = bench.run(script, [*flags, f"--max_train_steps={cli.steps + 5}"])
                lines = (place / "out/metrics.jsonl").read_text().splitlines()
                speeds = [record["images_per_second"] for record in map(json.loads, lines) if "loss" in record]
                tenths = f"{1000 * cli.batch_size / speeds[1]:.0f} to {1000 * cli.batch_size / speeds[9]:.0f}"
                table.append([f"{rows:,}", count, f"{first['first']:.1f}", f"{again['first']:.1f}", tenths,
                              f"{first['rss']:.0f}"])  # fmt: skip
        header = ["rows", "caches", "start to step 1, s", "resume to next step, s", "ms a step, 2nd to 10th tenth"]
        if cli.rows:
            bench.show(f"{cli.steps} steps of {cli.batch_size}, with EMA", [*header, "most MiB resident"], table)
        if cli.images:
            header = ["files", "start to step 1, s", "again, s", "diffusers', s", "again, s"]
            header = header if cli.diffusers else header[:3]
            bench.show("Loose files", header, [start_from_files(Path(folder), count, cli) for count in cli.images])


def start_from_files(folder, count, cli):
    """Seconds to the end of step 1 of the unconditional trainers, the first time and again: a row of the table."""
    images, unet = bench.make_images(folder / f"images-{count}", count, 16), folder / "unet.json"
    (images / "metadata.jsonl").unlink()
    config = {"_class_name": "UNet2DModel", "block_out_channels": [8, 8], "norm_num_groups": 4, "sample_size": 8}
    config |= {"down_block_types": ["DownBlock2D"] * 2, "up_block_types": ["UpBlock2D"] * 2}
    unet.write_text(json.dumps(config))
    row, theirs = [f"{count:,}"], "examples/unconditional_image_generation/train_unconditional.py"
    for name in ["train_unconditional.py", *([theirs] if cli.diffusers else [])]:
        script = Path(cli.diffusers, name) if name == theirs else bench.ROOT / name
        flags = [f"--train_data_dir={images}", f"--model_config_name_or_path={unet}", "--resolution=8"]
        flags += [f"--train_batch_size={cli.batch_size}", f"--cache_dir={folder / script.parent.name}-{count}"]
        for turn in "12":
            out = f"--output_dir={folder / script.parent.name}-{count}-{turn}"
            row.append(f"{bench.run(script, [*flags, out], 1)['first']:.1f}")
    return row


if __name__ == "__main__":
    main()
