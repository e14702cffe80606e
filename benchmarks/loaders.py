"""Loader processes and --cache_images of train_unconditional.py, by the speed of its training.

    OMP_NUM_THREADS=1 python benchmarks/loaders.py     # some minutes on 2 cores

A small U-Net trains on JPEG files of 640 x 640 px, at several resolutions: with no loader process,
where one thread of the trainer decodes the images; with the default number of processes; and with
--cache_images, which decodes all images before step 1, once for all runs. Each way runs once in
each round. The relative speeds compare runs of one round. The processor time is that of the trainer
without its loader processes: of a step, and to the end of step 1.
"""

import functools
import itertools
import tempfile
from pathlib import Path

import bench

WAYS = {
    "`--dataloader_num_workers 0`": ["--dataloader_num_workers=0"],
    "the default": [],
    "`--cache_images`": ["--cache_images"],
}


def main(argv=None):
    parser = bench.make_parser(__doc__, size=None, batch_size=8, steps=20)
    parser.add_argument("--resolutions", type=int, nargs="+", default=[64, 256])
    parser.add_argument(
        "--widths", type=int, nargs="+", default=[8, 8, 16, 16], help="of the U-Net"
    )
    cli = parser.parse_args(argv)
    print(bench.machine())
    number = itertools.count()
    header = ["", "images/s", "relative to the default, in the same round"]
    header += ["ms of processor time per image", "s of processor time to the end of step 1"]
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        pictures, count = bench.make_pictures(640), cli.batch_size * cli.steps
        images = bench.make_images(folder / "images", count, pictures)
        for side in cli.resolutions:
            unet = bench.make_unet_config(folder / f"{side}.json", cli.widths, side)
            common = [f"--train_data_dir={images}", f"--model_config_name_or_path={unet}"]
            common += [f"--resolution={side}", f"--cache_dir={folder / f'cache-{side}'}"]
            common += [f"--train_batch_size={cli.batch_size}", "--num_epochs=2"]
            common += [f"--mixed_precision={cli.mixed_precision}", "--report_to=none"]

            def time_it(flags, common=common):
                output = f"--output_dir={folder}/out-{next(number)}"
                script = bench.ROOT / "train_unconditional.py"
                return bench.run(script, [*common, *flags, output], cli.steps)

            runs = {way: functools.partial(time_it, flags) for way, flags in WAYS.items()}
            results, rows = bench.interleaved(runs, cli.rounds), []
            for way, found in results.items():
                turns = zip(results["the default"], found, strict=True)
                used = [1000 * one["cpu"] / cli.batch_size for one in found]
                rows.append(
                    [
                        way,
                        bench.spread([cli.batch_size / one["step"] for one in found], "{:.1f}"),
                        bench.spread([one["step"] / other["step"] for one, other in turns]),
                        bench.spread(used, "{:.1f}"),
                        bench.spread([one["first_cpu"] for one in found], "{:.1f}"),
                    ]
                )
            bench.show(f"{side} px, batches of {cli.batch_size}", header, rows)


if __name__ == "__main__":
    main()
