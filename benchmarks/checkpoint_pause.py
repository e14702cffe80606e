"""How long does a checkpoint hold up the training? Compares waiting for it with writing it beside.

    python benchmarks/checkpoint_pause.py                            # some minutes on 2 cores
    python benchmarks/checkpoint_pause.py --size sd2 --mixed_precision bf16     # on a GPU

It measures a U-Net that train_unconditional.py trains on images in memory, and a LoRA of SDXL with
its average, of rank 16 for attention, which has 1,120 tensors. "Waits" is the same run without
memory for a copy, so the training waits while a checkpoint is written. Both take turns. A pause is
the time between two steps with a checkpoint, without the time between two others. The first one is
left out: without a GPU, memory for the copy is only taken then. On a machine with other programs,
compare the processor time of the training's thread.
"""

import functools
import importlib
import itertools
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
SCRIPTS = {"unconditional": "train_unconditional", "sdxl_lora": "train_text_to_image"}
NAMES = {"unconditional": "a U-Net", "sdxl_lora": "a LoRA of SDXL"}


def time_steps(kind, model, argv):
    """Train, and print the times of each step and of each written checkpoint.

    {"steps": [[(seconds, processor seconds of this thread) at its begin, at its end]],
    "written": [[seconds at its begin, at its end, bytes]]}
    """

    from diffusion_training.training import saver

    script = importlib.import_module(SCRIPTS[model])
    take_step, save_checkpoint, marks, written = script.train_step, saver.save_checkpoint, [], []

    def synchronize():
        if gpu := bench.find_gpu():
            gpu.synchronize()
        return time.perf_counter(), time.thread_time()

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

    make_checkpoint_copy = saver.make_checkpoint_copy if kind == "beside" else lambda *args: None
    with (
        mock.patch.object(script, "train_step", step),
        mock.patch.object(saver, "save_checkpoint", save),
        mock.patch.object(saver, "make_checkpoint_copy", make_checkpoint_copy),
    ):
        script.main(script.parse_args(argv))
    print(json.dumps({"steps": marks, "written": written}))


def measure(kind, model, folder, argv, every):
    """Return the figures of a run, in seconds, except for "bytes".

    A pause, and the processor time in it; a quiet step, and one beside a thread that writes.
    """
    with tempfile.TemporaryDirectory(dir=folder) as out:
        command = [sys.executable, __file__, kind, model, *argv, f"--output_dir={out}/out"]
        found = json.loads(subprocess.check_output(command, text=True).splitlines()[-1])
    steps, written = found["steps"], found["written"]
    pauses = {}
    for index, name in enumerate(("pause", "work")):
        gaps = [after[0][index] - before[1][index] for before, after in itertools.pairwise(steps)]
        usual = statistics.median(gaps)
        due = [gap - usual for number, gap in enumerate(gaps, 1) if number % every == 0]
        pauses[name] = statistics.median(due[1:])
    quiet = []
    beside = []
    for (begin, _), (end, _) in steps[3:]:
        is_beside = any(begin < last and first < end for first, last, _ in written)
        (beside if is_beside else quiet).append(end - begin)
    none = [float("nan")]  # few steps may all be beside a thread that writes, or none
    return {
        **pauses,
        "quiet": statistics.median(quiet or none),
        "beside": statistics.median(beside or none),
        "write": statistics.median(last - first for first, last, _ in written),
        "bytes": written[0][2],
    }


def make_flags(model, folder, cli):
    """The flags of a run, without --output_dir."""
    side = 32 if model == "unconditional" else 64
    pictures = bench.make_pictures(side)
    images = bench.make_images(folder / model, 4 * cli.batch_size, pictures)
    flags = [f"--train_data_dir={images}", f"--cache_dir={folder / 'data'}"]
    flags += [f"--resolution={side}", "--report_to=none", "--use_ema"]
    flags += [f"--max_train_steps={cli.steps}", f"--train_batch_size={cli.batch_size}"]
    flags += [f"--checkpointing_steps={cli.every}", "--checkpoints_total_limit=1"]
    flags.append(f"--mixed_precision={cli.mixed_precision}")
    if model == "sdxl_lora":
        base = bench.make_sdxl(folder / "sdxl", cli.size)
        flags += [f"--pretrained_model_name_or_path={base}", f"--rank={cli.rank}"]
        return [*flags, "--lora_layers=attention"]
    flags += ["--cache_images", "--ddpm_num_inference_steps=1", "--eval_batch_size=1"]
    flags += ["--save_images_epochs=100000", "--save_model_epochs=100000"]
    if cli.size != "sd2":  # by default it is the U-Net of diffusers' script
        config = bench.make_unet_config(folder / "unet.json", cli.channels, side)
        flags.append(f"--model_config_name_or_path={config}")
    return flags


def main(argv=None):
    parser = bench.make_parser(__doc__, batch_size=1, steps=25)
    parser.add_argument("--models", nargs="+", choices=SCRIPTS, default=[*SCRIPTS])
    parser.add_argument("--channels", type=int, nargs="+", default=[128, 256, 256])
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--every", type=int, default=8, help="steps between checkpoints")
    cli = parser.parse_args(argv)
    print(bench.machine())
    for model in cli.models:
        with tempfile.TemporaryDirectory() as folder:
            argv = [model, folder, make_flags(model, Path(folder), cli), cli.every]
            runs = {kind: functools.partial(measure, kind, *argv) for kind in KINDS}
            found = bench.interleaved(runs, cli.rounds)
        rows = []
        for kind, figures in found.items():
            names = ("pause", "work", "write", "quiet")
            spreads = [bench.spread([each[name] for each in figures]) for name in names]
            slower = [each["beside"] / each["quiet"] for each in figures]
            rows.append([kind, *spreads, bench.spread(slower if kind == "beside" else [1.0])])
        size = found["beside"][0]["bytes"] / 1e6
        pairs = [*zip(found["waits"], found["beside"], strict=True)]
        ratios = [
            bench.spread([waits[name] / beside[name] for waits, beside in pairs], "{:.1f}")
            for name in ("pause", "work")
        ]
        title = (
            f"A checkpoint of {NAMES[model]}, {size:.0f} MB; beside the training the pause is "
            f"{ratios[0]} times shorter, and has {ratios[1]} times less processor time"
        )
        header = ["", "pause, s", "processor time in it, s", "until it is written, s"]
        header += ["quiet step, s", "step beside / quiet step"]
        bench.show(title, header, rows)


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1] in KINDS:
        time_steps(sys.argv[1], sys.argv[2], sys.argv[3:])
    else:
        main()
