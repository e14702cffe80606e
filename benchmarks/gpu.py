"""One GPU, all that matters: training and encoding at the true sizes of Stable Diffusion 2.

    python benchmarks/gpu.py                                        # on a GPU; --diffusers path/to/diffusers beside it
    python benchmarks/gpu.py --size toy --mixed_precision no --resolutions 64 --batch_sizes 4 --steps 6   # on a CPU

Weights are random, which costs the same as trained ones. From a latent cache, averaged weights on: images a second,
the share of the GPU's peak that the model's operations use (MFU), how long it waited for data, its memory, and the
ratio to a bare loop (see step_overhead.py); with and without --compile; on pixels; encoding; and an unconditional
model. What waits for the GPU between two records is an error here.
"""

import json
import statistics
import tempfile
import time
from pathlib import Path

import bench
import cached_vs_online
import step_overhead

PEAKS = {"A100": 312e12, "H100": 989e12, "H200": 989e12}  # dense bfloat16 operations a second, of the data sheets


def encode(models, images, resolution, cli, folder):
    """(images a second of precompute_latents.py from its first encoded batch on, share of waiting for images)."""
    import torch

    import precompute_latents as script

    args = script.parse_args([
        f"--pretrained_model_name_or_path={models}", f"--train_data_dir={images}", f"--resolution={resolution}",
        f"--mixed_precision={cli.mixed_precision}", f"--batch_size={cli.batch_sizes[0]}", "--center_crop",
        f"--cache_dir={folder / 'data'}", f"--output_dir={folder / f'encoded-{resolution}'}",
    ])  # fmt: skip
    marks, waits, rows, show = [], [], [], script.show_progress

    def noted(encoded, waited, progress_bar):
        for item in show(encoded, waited, progress_bar):
            marks.append(time.perf_counter())
            rows.append(len(item[1]))
            waits.append(progress_bar.postfix)
            yield item

    script.show_progress = noted
    try:
        script.main(args)
    finally:
        script.show_progress = show
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return sum(rows[1:]) / (marks[-1] - marks[0]), waits[-1].split()[0]


def main(argv=None):
    parser = bench.make_parser(__doc__, size="sd2", mixed_precision="bf16", batch_size=None, steps=30, rounds=None)
    parser.add_argument("--resolutions", type=int, nargs="+", default=[256, 512])
    parser.add_argument("--batch_sizes", type=int, nargs="+", default=[128, 64], help="one for each resolution")
    parser.add_argument("--diffusers", help="a checkout of diffusers, whose script trains on pixels beside ours")
    parser.add_argument("--no_compile", action="store_true", help="leave out the runs with --compile")
    cli = parser.parse_args(argv)
    machine = bench.machine()
    print(machine)
    peak = next((peak for name, peak in PEAKS.items() if name in machine), float("nan"))
    training, encoding = [], []
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        models = bench.make_models(folder / "sd", cli.size)
        for resolution, batch in zip(cli.resolutions, cli.batch_sizes, strict=True):
            flops, _, _ = cached_vs_online.count_flops(models, resolution)
            cache = bench.make_cache(folder / f"cache-{resolution}", models, 4 * batch, resolution)
            images = bench.make_images(
                folder / f"images-{resolution}", (16 if cli.size == "toy" else 48) * batch, 2 * resolution
            )
            flags = [f"--pretrained_model_name_or_path={models}", f"--mixed_precision={cli.mixed_precision}"]
            flags += [f"--train_batch_size={batch}", "--max_train_steps=100000", "--checkpointing_steps=1000000"]
            cached = [*flags, f"--latents_dir={cache}", "--report_to=none", "--logging_steps=10"]

            def row(what, script, argv, resolution=resolution, batch=batch, flops=flops):
                out = folder / f"out-{len(training)}"
                out_flag = [] if script == step_overhead.__file__ else [f"--output_dir={out}"]
                found = bench.run(script, [*argv, *out_flag], cli.steps, "--use_ema" in argv and "ours" in what)
                speed, lines = batch / found["step"], []
                if (out / "metrics.jsonl").exists():
                    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
                waits = [record["data_wait"] for record in lines[1:] if "data_wait" in record]
                training.append([
                    f"{resolution} px, batch {batch}", what, f"{speed:.1f}", f"{speed * flops / peak:.1%}",
                    f"{statistics.median(waits):.2%}" if waits else "", f"{found['gpu']:.1f}", f"{found['first']:.0f}",
                ])  # fmt: skip
                print(training[-1], flush=True)
                return speed

            ours = bench.ROOT / "train_text_to_image.py"
            bare = row("a bare loop, no EMA", step_overhead.__file__, ["train_text_to_image", *cached])
            speed = row("ours, EMA", ours, [*cached, "--use_ema"])
            training[-1][1] += f", {speed / bare:.3f} of the bare loop"
            if resolution == cli.resolutions[-1] and not cli.no_compile:  # it takes minutes
                row("with --compile", ours, [*cached, "--use_ema", "--compile"])
            pixels = [f"--train_data_dir={images}", f"--resolution={resolution}", f"--cache_dir={folder / 'data'}"]
            row("from pixels", ours, [*flags, *pixels, "--use_ema", "--report_to=none"])
            if cli.diffusers:
                theirs = Path(cli.diffusers, "examples/text_to_image/train_text_to_image.py")
                row("from pixels, diffusers", theirs, [*flags, *pixels, "--use_ema", "--dataloader_num_workers=8"])
            if resolution == cli.resolutions[0]:
                images64 = [f"--train_data_dir={images}", "--resolution=64", "--cache_images", "--use_ema"]
                common = [flag for flag in [*flags, *images64] if "pretrained" not in flag]
                unet = [] if cli.size == "sd2" else [f"--model_config_name_or_path={bench.ROOT}/demo/digits_unet.json"]
                row("train_unconditional.py, 64 px", bench.ROOT / "train_unconditional.py", [*common, *unet])
                training[-1][3] = ""  # of another model
            speed, wait = encode(models, images, resolution, cli, folder)
            encoding.append([f"{resolution} px, batch {cli.batch_sizes[0]}", f"{speed:.1f}", wait])
            print(encoding[-1], flush=True)
        header = ["", "", "images/s", "of the GPU's peak", "waiting for data", "GiB", "s to step 1"]
        bench.show(f"Text to image, {cli.size}, {cli.mixed_precision}", header, training)
        bench.show(f"precompute_latents.py, {cli.size}, {cli.mixed_precision}", ["", "images/s", "waiting"], encoding)


if __name__ == "__main__":
    main()
