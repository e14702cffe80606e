"""How fast are training and encoding on one GPU, at the true sizes of Stable Diffusion 2?

    python benchmarks/gpu.py [--diffusers path/to/diffusers]    # on a GPU
    python benchmarks/gpu.py --size toy --mixed_precision no --resolutions 64 --batch_sizes 4 \\
        --steps 6                                               # on a CPU

A GPU first takes a few steps of a toy model with what no test can try on an imitated GPU: --compile
and, on several GPUs, DDP and --shard.

Weights are random, because trained ones cost the same. The runs train from a latent cache with EMA,
also with --compile; from pixels; and an unconditional model. (gpu_plan.py compares settings.)
Prints for each:

- images per second, and for the latent cache the ratio to a bare loop (see step_overhead.py)
- the share of the GPU's peak that the model's operations use (MFU)
- the share of the time in which the GPU waited for data
- GPU memory

Then prints the images per second of encoding. The run from a latent cache fails if it waits for the
GPU between two records. A run that fails is marked in the table, the others continue, and the
status is 1 at the end.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

import bench
import peers
import precompute_speed
import step_overhead

from diffusion_training.training.step.costs import find_peak

FAILED = "failed"


class Table:
    """Measures runs, each in a row: where, what, and the columns of `HEADER`."""

    HEADER = ("", "", "images/s", "share of peak", "waiting for data", "GiB", "s to step 1")

    def __init__(self, folder, cli):
        gpu = bench.find_gpu()
        name = gpu.get_device_name() if gpu else ""
        self.peak = find_peak(name, cli.mixed_precision, False)  # TFLOP/s
        self.folder, self.cli, self.rows = folder, cli, []

    def add(self, where, what, batch, flops, start, argv, compared=None, forbid_syncs=False):
        """Run a script. Returns its images per second, None if it fails.

        where, what: the first cells. flops: of an image. start: the script, and what goes before
        its flags. compared: (what, images per second), for the ratio.
        """
        (script, *first), out = start, self.folder / f"out-{len(self.rows)}"
        common = [f"--mixed_precision={self.cli.mixed_precision}", f"--train_batch_size={batch}"]
        common += ["--max_train_steps=100000", "--checkpointing_steps=1000000"]
        argv = [*first, *common, f"--output_dir={out}", *argv]
        speed, cells = None, [FAILED, "", "", "", ""]
        try:
            found = bench.run(script, argv, self.cli.steps, forbid_syncs)
        except SystemExit as stop:
            print(stop, file=sys.stderr)
        else:
            speed, metrics = batch / found["step"], out / "metrics.jsonl"
            records = [json.loads(line) for line in metrics.open()] if metrics.exists() else []
            waits = [record["data_wait"] for record in records[1:] if "data_wait" in record]
            if compared and compared[1]:
                what += f", {speed / compared[1]:.3f} of {compared[0]}"
            cells = [
                f"{speed:.1f}",
                f"{speed * flops / 1e12 / self.peak:.1%}" if flops and self.peak else "",
                f"{statistics.median(waits):.2%}" if waits else "",
                f"{found['gpu']:.1f}",
                f"{found['first']:.0f}",
            ]
        self.rows.append([where, what, *cells])
        print(self.rows[-1], flush=True)
        return speed


def time_encoding(flags, folder, count):
    """Images per second of precompute_latents.py, as a cell."""
    try:
        _, running = precompute_speed.run(flags, folder)
    except (Exception, SystemExit):
        traceback.print_exc()
        return FAILED
    finally:
        if gpu := bench.find_gpu():
            gpu.empty_cache()
    return f"{count / running:.1f}"


def list_checks(num_gpus, no_compile):
    """{what: (processes, flags)} of runs that no test can make on an imitated GPU."""
    checks = {} if no_compile else {"--compile": (1, ["--compile"])}
    if num_gpus > 1:
        checks |= {"DDP": (num_gpus, []), "--shard": (num_gpus, ["--shard"])}
    return checks


def check(folder, num_processes, flags):
    """Launch a few steps of a toy model from a cache. Returns a cell."""
    models = bench.make_models(folder / "sd", "toy")
    cache = bench.make_cache(folder / "cache", models, 8, 64)
    command = [sys.executable, "-m", "accelerate.commands.launch", "--main_process_port=0"]
    command += [f"--num_processes={num_processes}", *["--multi_gpu"] * (num_processes > 1)]
    command += [str(bench.ROOT / "train_text_to_image.py"), f"--latents_dir={cache}"]
    command += [f"--pretrained_model_name_or_path={models}", f"--output_dir={folder / 'out'}"]
    command += ["--max_train_steps=3", "--train_batch_size=1", "--use_ema", "--report_to=none"]
    env = {"HF_HUB_OFFLINE": "1", **os.environ}
    done = subprocess.run([*command, *flags], env=env, capture_output=True, text=True)
    if done.returncode == 0:
        return "works"
    print(f"{' '.join([*command, *flags])} failed:\n{done.stderr[-3000:]}", file=sys.stderr)
    return FAILED


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
    print(bench.machine())
    few = cli.size != "sd2"
    gpu = bench.find_gpu()
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        checked = []
        for what, how in list_checks(gpu.device_count(), cli.no_compile).items() if gpu else ():
            checked.append([what, check(folder / f"check{what}", *how)])
            print(checked[-1], flush=True)
        table, encoding = Table(folder, cli), []
        models = bench.make_models(folder / "sd", cli.size)
        for resolution, batch in zip(cli.resolutions, cli.batch_sizes, strict=True):
            where = f"{resolution} px, batch {batch}"
            flops, _, _ = peers.count_flops(models, resolution)
            cache = bench.make_cache(folder / f"cache-{resolution}", models, 4 * batch, resolution)
            pictures = bench.make_pictures(2 * resolution)
            images = bench.make_images(
                folder / f"images-{resolution}", (16 if few else 48) * batch, pictures
            )
            ours = bench.ROOT / "train_text_to_image.py"
            pretrained = f"--pretrained_model_name_or_path={models}"
            cached = [pretrained, f"--latents_dir={cache}", "--report_to=none"]
            cached += ["--logging_steps=10"]
            with_ema = [*cached, "--use_ema"]
            bare = [step_overhead.__file__, ours.stem]
            bare = table.add(where, "a bare loop, no EMA", batch, flops, bare, cached)
            speed = table.add(
                where, "ours, EMA", batch, flops, [ours], with_ema, ("the bare loop", bare), True
            )
            data = [f"--train_data_dir={images}", f"--cache_dir={folder / 'data'}", "--use_ema"]
            pixels = [pretrained, *data, f"--resolution={resolution}"]
            flags = [*pixels, "--report_to=none"]
            table.add(where, "from pixels", batch, flops, [ours], flags)
            if cli.diffusers:
                theirs = Path(cli.diffusers, "examples/text_to_image/train_text_to_image.py")
                flags = [*pixels, "--dataloader_num_workers=8"]
                table.add(where, "from pixels, diffusers", batch, flops, [theirs], flags)
            if resolution == cli.resolutions[0]:
                small = [*data, "--resolution=64", "--cache_images"]
                if few:
                    small += [f"--model_config_name_or_path={bench.ROOT}/demo/digits_unet.json"]
                start = [bench.ROOT / "train_unconditional.py"]
                table.add(where, "train_unconditional.py, 64 px", batch, None, start, small)
            flags = [f"--mixed_precision={cli.mixed_precision}", f"--batch_size={batch}"]
            flags += ["--center_crop", pretrained, *data[:2], f"--resolution={resolution}"]
            count = len(list(images.glob("*.jpg")))
            encoded = time_encoding(flags, folder / f"encoded-{resolution}", count)
            encoding.append([where, encoded])
            print(encoding[-1], flush=True)
            if resolution == cli.resolutions[-1] and not cli.no_compile:  # compiling takes minutes
                compiled = [*with_ema, "--compile"]
                table.add(where, "with --compile", batch, flops, [ours], compiled, ("ours", speed))
    what = f"{cli.size}, {cli.mixed_precision}"
    bench.show(f"Text to image, {what}", table.HEADER, table.rows)
    bench.show(f"precompute_latents.py, running, {what}", ["", "images/s"], encoding)
    if any(FAILED in row for row in [*checked, *table.rows, *encoding]):
        sys.exit("Some runs failed; see above")


if __name__ == "__main__":
    main()
