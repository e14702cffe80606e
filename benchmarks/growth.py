"""Does anything grow with the data? Start, resume, steps and memory of training from caches of 1e3 to 1e6 rows.

    python benchmarks/growth.py                                   # some minutes, and 1.5 GB of disk
    python benchmarks/growth.py --rows 1000 --num_caches 1 --steps 20000          # a long run: its tenths

A row is small here (the demo's models, 8 px), so that what belongs to the number of rows is not hidden by their size.
Runs are processes of their own, and what a start takes holds the imports.
"""

import json
import tempfile
from pathlib import Path

import bench


def main(argv=None):
    parser = bench.make_parser(__doc__, size=None, mixed_precision=None, batch_size=16, steps=300, rounds=None)
    parser.add_argument("--rows", type=int, nargs="+", default=[10**3, 10**4, 10**5, 10**6])
    parser.add_argument(
        "--num_caches", type=int, nargs="+", default=[1, 8], help="folders that the rows are split over"
    )
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
        bench.show(f"{cli.steps} steps of {cli.batch_size}, with EMA", [*header, "most MiB resident"], table)


if __name__ == "__main__":
    main()
