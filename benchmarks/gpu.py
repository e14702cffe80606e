"""How fast are training and encoding on one GPU, at the true sizes of Stable Diffusion 2?

    python benchmarks/gpu.py [--diffusers path/to/diffusers]    # on a GPU
    python benchmarks/gpu.py --size toy --mixed_precision no --resolutions 64 --batch_sizes 4 \\
        --steps 6                                               # on a CPU

Weights are random, because trained ones cost the same. The runs train from a latent cache with EMA,
also with --compile, and with settings that have no flag (see gpu_settings.py); from pixels; and an
unconditional model. Prints for each:

- images per second, and for the latent cache the ratio to a bare loop (see step_overhead.py)
- the share of the GPU's peak that the model's operations use (MFU)
- the share of the time in which the GPU waited for data
- GPU memory

Then prints the images per second of encoding. Stops with an error if the run from a latent cache
waits for the GPU between two records.
"""

import json
import statistics
import tempfile
from pathlib import Path

import bench
import gpu_settings
import peers
import precompute_speed
import step_overhead
import torch

# Dense bfloat16 operations per second, from the data sheets.
PEAKS = {"A100": 312e12, "H100": 989e12, "H200": 989e12}


def main(argv=None):
    parser = bench.make_parser(
        __doc__, size="sd2", mixed_precision="bf16", batch_size=None, steps=30, rounds=None
    )
    parser.add_argument("--resolutions", type=int, nargs="+", default=[256, 512])
    parser.add_argument(
        "--batch_sizes",
        type=int,
        nargs="+",
        default=[128, 64],
        help="one batch size per resolution",
    )
    parser.add_argument(
        "--diffusers", help="checkout of diffusers, to also train from pixels with its script"
    )
    parser.add_argument("--no_compile", action="store_true", help="skip the runs with --compile")
    cli = parser.parse_args(argv)
    machine, training, encoding = bench.machine(), [], []
    print(machine)
    peak = next((peak for name, peak in PEAKS.items() if name in machine), float("nan"))
    ours, few = bench.ROOT / "train_text_to_image.py", cli.size != "sd2"
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        models = bench.make_models(folder / "sd", cli.size)
        for resolution, batch in zip(cli.resolutions, cli.batch_sizes, strict=True):
            flops, _, _ = peers.count_flops(models, resolution)
            cache = bench.make_cache(folder / f"cache-{resolution}", models, 4 * batch, resolution)
            pictures = bench.make_pictures(2 * resolution)
            images = bench.make_images(
                folder / f"images-{resolution}", (16 if few else 48) * batch, pictures
            )

            def row(
                what,
                start,
                argv,
                forbid_syncs=False,
                resolution=resolution,
                batch=batch,
                flops=flops,
            ):
                (script, *name), out = start, folder / f"out-{len(training)}"
                common = [f"--mixed_precision={cli.mixed_precision}", f"--train_batch_size={batch}"]
                common += [
                    "--max_train_steps=100000",
                    "--checkpointing_steps=1000000",
                    f"--output_dir={out}",
                ]
                found = bench.run(script, [*name, *common, *argv], cli.steps, forbid_syncs)
                speed, metrics = batch / found["step"], out / "metrics.jsonl"
                records = [json.loads(line) for line in metrics.open()] if metrics.exists() else []
                waits = [record["data_wait"] for record in records[1:] if "data_wait" in record]
                training.append(
                    [
                        f"{resolution} px, batch {batch}",
                        what,
                        f"{speed:.1f}",
                        flops and f"{speed * flops / peak:.1%}",
                        f"{statistics.median(waits):.2%}" if waits else "",
                        f"{found['gpu']:.1f}",
                        f"{found['first']:.0f}",
                    ]
                )
                print(training[-1], flush=True)
                return speed

            pretrained = f"--pretrained_model_name_or_path={models}"
            cached = [
                pretrained,
                f"--latents_dir={cache}",
                "--report_to=none",
                "--logging_steps=10",
            ]
            bare = row("a bare loop, no EMA", [step_overhead.__file__, ours.stem], cached)
            speed = row("ours, EMA", [ours], [*cached, "--use_ema"], forbid_syncs=True)
            training[-1][1] += f", {speed / bare:.3f} of the bare loop"
            for setting in gpu_settings.SETTINGS if torch.cuda.is_available() else ():
                start = [gpu_settings.__file__, setting, ours]
                speed_with = row(setting, start, [*cached, "--use_ema"])
                training[-1][1] += f", {speed_with / speed:.3f} of ours"
            if resolution == cli.resolutions[-1] and not cli.no_compile:  # compiling takes minutes
                row("with --compile", [ours], [*cached, "--use_ema", "--compile"])
            data = [f"--train_data_dir={images}", f"--cache_dir={folder / 'data'}", "--use_ema"]
            pixels = [pretrained, *data, f"--resolution={resolution}"]
            row("from pixels", [ours], [*pixels, "--report_to=none"])
            if cli.diffusers:
                theirs = Path(cli.diffusers, "examples/text_to_image/train_text_to_image.py")
                row("from pixels, diffusers", [theirs], [*pixels, "--dataloader_num_workers=8"])
            if resolution == cli.resolutions[0]:
                unet = (
                    [f"--model_config_name_or_path={bench.ROOT}/demo/digits_unet.json"]
                    if few
                    else []
                )
                small = [*data, "--resolution=64", "--cache_images", *unet]
                row(
                    "train_unconditional.py, 64 px",
                    [bench.ROOT / "train_unconditional.py"],
                    small,
                    flops="",
                )
            flags = [
                f"--mixed_precision={cli.mixed_precision}",
                f"--batch_size={cli.batch_sizes[0]}",
                "--center_crop",
            ]
            flags += [pretrained, *data[:2], f"--resolution={resolution}"]
            _, running = precompute_speed.run(flags, folder / f"encoded-{resolution}")
            speed = len(list(images.glob("*.jpg"))) / running
            encoding.append([f"{resolution} px, batch {cli.batch_sizes[0]}", f"{speed:.1f}"])
            print(encoding[-1], flush=True)
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
    header = ["", "", "images/s", "share of peak", "waiting for data", "GiB", "s to step 1"]
    bench.show(f"Text to image, {cli.size}, {cli.mixed_precision}", header, training)
    bench.show(
        f"precompute_latents.py, running, {cli.size}, {cli.mixed_precision}",
        ["", "images/s"],
        encoding,
    )


if __name__ == "__main__":
    main()
