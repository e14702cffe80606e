"""How long do samples hold up the training, after the last of them is drawn?

    python benchmarks/evaluation_pause.py                       # a minute on 2 cores

train_text_to_image.py trains a toy on images. In place of its samples come pictures of the given
size, which takes no time, so that what is measured begins when the last sample is drawn: one
picture of all of them, and report.html. The pause ends with the next step.
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

import bench


def time_evaluations(count, side, every, argv):
    """Train, and print when samples were drawn, and when the steps began and ended.

    Each is [name, seconds, processor seconds of the thread].
    """
    import numpy as np

    import train_text_to_image as script
    from diffusion_training.training import results
    from diffusion_training.training.showing import captioned_samples

    marks = []

    def mark(name):
        marks.append([name, time.perf_counter(), time.thread_time()])

    take_step, save_report = script.train_step, results.save_report

    def step(*args, **options):
        names = [name for name, *_ in marks]
        if names.count("step") % every == every // 2:  # no evaluation waits for the one before
            while names.count("drawn") > [name for name, *_ in marks].count("reported"):
                time.sleep(0.01)
        mark("step")
        result = take_step(*args, **options)
        mark("stepped")
        return result

    def report(*args):
        save_report(*args)
        mark("reported")

    rng = np.random.default_rng(0)
    small = rng.random((count, side // 16, side // 16, 3), np.float32)
    smooth = small.repeat(16, axis=1).repeat(16, axis=2)
    pictures = (smooth + 0.03 * rng.standard_normal(smooth.shape, np.float32)).clip(0, 1)

    def draw_share(*args):
        drawn = dict(enumerate(pictures.copy()))
        mark("drawn")
        return drawn

    with (
        mock.patch.object(script, "train_step", step),
        mock.patch.object(results, "save_report", report),
        mock.patch.object(captioned_samples, "draw_share", draw_share),
    ):
        script.main(script.parse_args(argv))
    print(json.dumps(marks))


def measure(folder, cli, flags):
    """The pauses of a run, as {figure: median of its evaluations, without the first two}.

    The first one draws no strip of older samples yet, and matplotlib is imported by it.
    """
    with tempfile.TemporaryDirectory(dir=folder) as out:
        command = [sys.executable, __file__, "run", *map(str, (cli.images, cli.side, cli.every))]
        said = subprocess.check_output([*command, *flags, f"--output_dir={out}/out"], text=True)
    marks = json.loads(said.splitlines()[-1])
    names = [name for name, *_ in marks]
    durations, quiet, beside = [], [], []
    found = {"pause": [], "thread": [], "written": []}
    for place, name in enumerate(names):
        if name == "drawn" and "step" in names[place:]:
            after = names.index("step", place)
            for figure, index in (("pause", 1), ("thread", 2)):
                found[figure].append(marks[after][index] - marks[place][index])
            end = names.index("reported", place)
            found["written"].append(marks[end][1] - marks[place][1])
            durations.append((marks[place][1], marks[end][1]))
    for (name, *begin), (_, *end) in zip(marks, marks[1:], strict=False):
        if name == "step":
            is_beside = any(first < end[0] and begin[0] < last for first, last in durations)
            (beside if is_beside else quiet).append(end[0] - begin[0])
    medians = {figure: statistics.median(values[2:]) for figure, values in found.items()}
    slower = statistics.median(beside or [float("nan")]) / statistics.median(quiet)
    return medians | {"slower": slower}


def main(argv=None):
    parser = bench.make_parser(__doc__, batch_size=1, steps=30, rounds=1, size=None)
    parser.add_argument("--images", type=int, default=16, help="samples of an evaluation")
    parser.add_argument("--side", type=int, default=1024, help="of a sample, in pixels")
    parser.add_argument("--every", type=int, default=6, help="steps between evaluations")
    cli = parser.parse_args(argv)
    print(bench.machine())
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        models = bench.make_models(folder / "models", "toy")
        images = bench.make_images(folder / "images", 4, bench.make_pictures(64))
        flags = [f"--pretrained_model_name_or_path={models}", f"--train_data_dir={images}"]
        flags += ["--resolution=64", "--report_to=none", f"--cache_dir={folder / 'data'}"]
        flags += ["--validation_prompts", "a duck on a lake", f"--max_train_steps={cli.steps}"]
        flags += [f"--num_validation_images={cli.images}", f"--validation_steps={cli.every}"]
        flags += ["--checkpointing_steps=100000", f"--train_batch_size={cli.batch_size}"]
        found = [measure(folder, cli, flags) for _ in range(cli.rounds)]
    row = [bench.spread([each[name] for each in found]) for name in found[0]]
    header = ["pause, s", "processor time of the training's thread in it, s"]
    header += ["until all is written, s", "step beside / quiet step"]
    title = f"After the last of {cli.images} samples of {cli.side} px"
    bench.show(title, header, [row])


if __name__ == "__main__":
    if sys.argv[1:2] == ["run"]:
        time_evaluations(*map(int, sys.argv[2:5]), sys.argv[5:])
    else:
        main()
