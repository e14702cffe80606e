"""Our trainers beside diffusers' example scripts: steady speed, and time to the first step.

    python benchmarks/peers.py --diffusers path/to/diffusers            # a checkout of it; some minutes on 2 cores
    python benchmarks/peers.py --diffusers path/to/diffusers --size sd2 --mixed_precision bf16 --batch_size 32 \\
        --resolution 512 --steps 40                                     # on a GPU

Same model, weights, images, batch, precision, averaged weights; each is started as `python script flags`, in turns.
Our text-to-image trainer encodes in the step here, as theirs does; what a cache saves is in cached_vs_online.py.
"""

import itertools
import json
import tempfile
from pathlib import Path

import bench


def main(argv=None):
    parser = bench.make_parser(__doc__, batch_size=2)
    parser.add_argument("--resolution", type=int, default=256, help="of text to image; unconditional takes a quarter")
    parser.add_argument("--diffusers", required=True, help="a checkout of diffusers")
    cli = parser.parse_args(argv)
    print(bench.machine())
    with tempfile.TemporaryDirectory() as folder:
        folder, number, rows = Path(folder), itertools.count(), []
        models, side = bench.make_models(folder / "sd", cli.size), cli.resolution // 4
        images = bench.make_images(folder / "images", 8 * cli.batch_size * cli.steps, cli.resolution)
        widths = {"toy": [8, 16], "tenth": [32, 64, 128], "sd2": [128, 128, 256, 256, 512, 512]}[cli.size]
        config = {"_class_name": "UNet2DModel", "sample_size": side, "block_out_channels": widths}
        config |= {"layers_per_block": 2 if cli.size == "sd2" else 1, "norm_num_groups": min(32, widths[0])}
        config |= {"down_block_types": ["DownBlock2D"] * len(widths), "up_block_types": ["UpBlock2D"] * len(widths)}
        (folder / "unet.json").write_text(json.dumps(config))
        common = [f"--mixed_precision={cli.mixed_precision}", f"--train_data_dir={images}", "--use_ema"]
        common += [f"--cache_dir={folder / 'data'}", "--checkpointing_steps=1000000", "--dataloader_num_workers=1"]
        text = [f"--pretrained_model_name_or_path={models}", f"--resolution={cli.resolution}"]
        text += [f"--train_batch_size={cli.batch_size}", f"--max_train_steps={cli.steps}"]
        unconditional = [f"--model_config_name_or_path={folder / 'unet.json'}", f"--resolution={side}"]
        # A step of 8 times the images, for one epoch; one image sampled in one step at the end.
        unconditional += [f"--train_batch_size={8 * cli.batch_size}", "--num_epochs=1", "--save_images_epochs=2"]
        unconditional += ["--eval_batch_size=1", "--ddpm_num_inference_steps=1"]
        for name, place, flags in (
            ("train_unconditional", "unconditional_image_generation", unconditional),
            ("train_text_to_image", "text_to_image", text),
        ):

            def run(script, *more, flags=flags):
                return bench.run(
                    script, [*common, *flags, *more, f"--output_dir={folder}/out-{next(number)}"], cli.steps
                )

            theirs = Path(cli.diffusers, "examples", place, f"{name}.py")
            runs = {
                "ours": lambda run=run, name=name: run(bench.ROOT / f"{name}.py", "--report_to=none"),
                "diffusers": lambda run=run, theirs=theirs: run(theirs),
            }
            results, size = bench.interleaved(runs, cli.rounds), cli.batch_size * (1 if "text" in name else 8)
            for whose, measured in results.items():
                speeds, first = [size / one["step"] for one in measured], [one["first"] for one in measured]
                rows.append([f"`{name}.py`", whose, bench.spread(speeds), bench.spread(first, "{:.1f}")])
        title = (
            f"{cli.size}, {cli.resolution} px, batch {cli.batch_size} (unconditional: {side} px, 8 times as many), "
        )
        bench.show(
            title + f"{cli.mixed_precision}, with EMA", ["", "", "images/s", "seconds to the end of step 1"], rows
        )


if __name__ == "__main__":
    main()
