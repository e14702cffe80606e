"""How long does a checkpoint hold up the training? Compares waiting for it with writing it beside.

    python benchmarks/checkpoints.py                            # some minutes on 2 cores
    python benchmarks/checkpoints.py --size sd2 --mixed_precision bf16     # on a GPU

train_unconditional.py trains on images in memory. "Waits" is the same run without memory for a
copy, so the training waits while a checkpoint is written. Both take turns. A pause is the time
between two steps with a checkpoint, without the time between two others.
"""

import importlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

import bench

KINDS = ("waits", "beside")


def time_steps(kind, argv):
    """Train, and print {"steps": [when each began, when it ended], "copied": bytes}."""
    import torch

    from diffusion_training.training import state

    script = importlib.import_module("train_unconditional")
    take_step, save_checkpoint, marks, written = script.train_step, state.save_checkpoint, [], []

    def synchronize():
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()

    def step(*args, **options):
        begin = synchronize()
        result = take_step(*args, **options)
        marks.append([begin, synchronize()])
        return result

    def save(path, *args):
        begin = time.perf_counter()
        save_checkpoint(path, *args)
        size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        written.append([begin, time.perf_counter(), size])

    make_snapshot = state.make_snapshot if kind == "beside" else lambda *args: None
    with (
        mock.patch.object(script, "train_step", step),
        mock.patch.object(state, "save_checkpoint", save),
        mock.patch.object(state, "make_snapshot", make_snapshot),
    ):
        script.main(script.parse_args(argv))
    print(json.dumps({"steps": marks, "written": written}))


def measure(kind, folder, argv, every):
    """Return the figures of a run: its pauses, its quiet steps and those beside a writing thread.

    In seconds, except for "bytes".
    """
    with tempfile.TemporaryDirectory(dir=folder) as out:
        command = [sys.executable, __file__, kind, *argv, f"--output_dir={out}/out"]
        found = json.loads(subprocess.check_output(command, text=True).splitlines()[-1])
    steps, written = found["steps"], found["written"]
    gaps = [after[0] - before[1] for before, after in zip(steps, steps[1:], strict=False)]
    usual = statistics.median(gaps)
    pauses = [gap - usual for number, gap in enumerate(gaps, 1) if number % every == 0]
    quiet = []
    beside = []
    for begin, end in steps[3:]:
        is_beside = any(begin < last and first < end for first, last, _ in written)
        (beside if is_beside else quiet).append(end - begin)
    return {
        "pause": statistics.median(pauses),
        "quiet": statistics.median(quiet),
        "beside": statistics.median(beside or [float("nan")]),
        "write": statistics.median(last - first for first, last, _ in written),
        "bytes": written[0][2],
    }


def main(argv=None):
    parser = bench.make_parser(__doc__, batch_size=4, steps=30)
    parser.add_argument("--channels", type=int, nargs="+", default=[128, 256, 256])
    parser.add_argument("--every", type=int, default=10, help="steps between checkpoints")
    cli = parser.parse_args(argv)
    print(bench.machine())
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        images = bench.make_images(folder / "images", 4 * cli.batch_size, bench.make_pictures(32))
        flags = [f"--train_data_dir={images}", f"--cache_dir={folder / 'data'}", "--resolution=32"]
        flags += ["--cache_images", "--report_to=none", "--use_ema", "--ddpm_num_inference_steps=1"]
        flags += ["--eval_batch_size=1", f"--max_train_steps={cli.steps}"]
        flags += [f"--checkpointing_steps={cli.every}", "--checkpoints_total_limit=1"]
        flags += ["--save_images_epochs=100000", "--save_model_epochs=100000"]
        flags += [
            f"--train_batch_size={cli.batch_size}",
            f"--mixed_precision={cli.mixed_precision}",
        ]
        if cli.size != "sd2":  # by default it is the U-Net of diffusers' script
            config = bench.make_unet_config(folder / "unet.json", cli.channels, 32)
            flags.append(f"--model_config_name_or_path={config}")
        runs = {kind: (lambda kind=kind: measure(kind, folder, flags, cli.every)) for kind in KINDS}
        found = bench.interleaved(runs, cli.rounds)
    rows = []
    for kind, figures in found.items():
        spreads = [bench.spread([each[name] for each in figures]) for name in ("pause", "write")]
        slower = [each["beside"] / each["quiet"] for each in figures] if kind == "beside" else [1.0]
        quiet = bench.spread([each["quiet"] for each in figures])
        rows.append([kind, *spreads, quiet, bench.spread(slower)])
    size = found["beside"][0]["bytes"] / 1e6
    pairs = zip(found["waits"], found["beside"], strict=True)
    ratio = bench.spread([waits["pause"] / beside["pause"] for waits, beside in pairs], "{:.0f}")
    title = f"A checkpoint of {size:.0f} MB; the pause is {ratio} times shorter beside the training"
    header = ["", "pause, s", "until it is written, s", "quiet step, s", "step beside / quiet step"]
    bench.show(title, header, rows)


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1] in KINDS:
        time_steps(sys.argv[1], sys.argv[2:])
    else:
        main()
