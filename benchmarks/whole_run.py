"""Where does the processor time of a whole run go? A LoRA of SDXL, ours beside diffusers' script.

    python benchmarks/whole_run.py                                  # ours alone; minutes on 2 cores
    python benchmarks/whole_run.py --diffusers path/to/diffusers    # a checkout of the repository

Both train a LoRA for attention on images, with one image a step, with SDXL's numbers of blocks and
few channels. They save a checkpoint and draw a sample in the middle of the run and at its end. The
processor time of all threads is divided among the parts of the run; a thread that writes a
checkpoint while the training goes on is a part of its own. The scripts take turns.
"""

import contextlib
import functools
import importlib.util
import itertools
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import bench

PARTS = {
    "imports": "imports",
    "start": "start, to the end of step 1",
    "steps": "all other steps",
    "pauses": "pauses for two checkpoints",
    "files": "their files, written beside the steps",
    "evaluations": "two evaluations",
    "end": "end",
}


class Stopwatch:
    """Divides the processor time of this process among the parts of a run, in seconds."""

    def __init__(self) -> None:
        self.part = "imports"
        self.spent: Counter[str] = Counter()
        self.begin = 0.0
        self.clock: int | None = None  # of the thread that writes files, while it does

    def read(self) -> float:
        """The processor time so far, without that of the thread that writes files."""
        beside = self.spent["files"]
        if self.clock is not None:
            beside += time.clock_gettime(self.clock) - self.clock_begin
        return time.process_time() - beside

    def switch(self, part: str) -> str:
        """Begin a part. Returns the one that ends."""
        now = self.read()
        self.spent[self.part] += now - self.begin
        self.begin = now
        ended, self.part = self.part, part
        return ended

    @contextlib.contextmanager
    def inside(self, part):
        """The block belongs to a part, whatever part is around it."""
        outer = self.switch(part)
        try:
            yield
        finally:
            self.switch(outer)

    @contextlib.contextmanager
    def beside(self):
        """The block runs in a thread of its own, which writes files."""
        self.clock_begin = time.thread_time()
        self.clock = time.pthread_getcpuclockid(threading.get_ident())
        try:
            yield
        finally:
            self.spent["files"] += time.thread_time() - self.clock_begin
            self.clock = None


def divide(block, owner, name):
    """Let all calls of a function of `owner`, a module or a class, run in `block()`."""
    function = getattr(owner, name)

    @functools.wraps(function)
    def called(*args, **options):
        with block():
            return function(*args, **options)

    setattr(owner, name, called)


def time_parts(script, steps, *argv):
    """Run a script with its flags, and print the seconds of its parts."""
    watch, path, steps = Stopwatch(), Path(script), int(steps)
    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    import torch
    from accelerate import Accelerator

    evaluation = functools.partial(watch.inside, "evaluations")
    pause = functools.partial(watch.inside, "pauses")
    divide(evaluation, module, "log_validation")
    if path.parent == bench.ROOT:
        from diffusion_training.training import saver
        from diffusion_training.training.results import Results

        for name in ("measure_held_out", "keep_best", "report"):
            divide(evaluation, Results, name)
        divide(pause, saver.Saver, "save_checkpoint")
        divide(watch.beside, saver, "save_checkpoint")
    else:
        divide(evaluation, module.StableDiffusionXLPipeline, "from_pretrained")
        divide(pause, Accelerator, "save_state")
    step, count = torch.optim.AdamW.step, itertools.count(1)

    def step_once(self, *args, **options):
        result = step(self, *args, **options)
        number = next(count)
        if number in (1, steps):
            watch.switch("steps" if number == 1 else "end")
        return result

    torch.optim.AdamW.step = step_once
    sys.argv = [script, *argv]
    watch.switch("start")
    module.main(module.parse_args())
    watch.switch("end")
    print(json.dumps(watch.spent))


def measure(folder, steps, script, argv):
    """Return {part: processor seconds} of a run in a process of its own."""
    with tempfile.TemporaryDirectory(dir=folder) as out:
        command = [sys.executable, __file__, script, steps, *argv, f"--output_dir={out}/out"]
        command = [str(each) for each in command]
        said = subprocess.run(command, capture_output=True, text=True)
    if said.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{said.stderr[-3000:]}")
    return json.loads(said.stdout.splitlines()[-1])


def make_flags(folder, cli):
    """Return {who: (script, its flags)}, without --output_dir."""
    half = cli.steps // 2
    images = bench.make_images(folder / "images", half, bench.make_pictures(cli.resolution))
    base = bench.make_sdxl(folder / "sdxl", cli.size)
    config = json.loads((base / "unet/config.json").read_text())
    config["sample_size"] = cli.resolution // 8  # the size of diffusers' samples
    (base / "unet/config.json").write_text(json.dumps(config))
    flags = [
        f"--pretrained_model_name_or_path={base}",
        f"--train_data_dir={images}",
        f"--cache_dir={folder / 'data'}",
        f"--resolution={cli.resolution}",
        f"--mixed_precision={cli.mixed_precision}",
        f"--rank={cli.rank}",
        f"--max_train_steps={2 * half}",
        f"--checkpointing_steps={half}",
        "--train_batch_size=1",
        "--dataloader_num_workers=0",
        "--validation_prompt=a digit",
        "--num_validation_images=1",
    ]
    own = ["--lora_layers=attention", "--no-use_ema", "--no-validate_first"]
    own += [f"--validation_steps={half}", "--num_inference_steps=50", "--guidance_scale=5"]
    found = {"ours": (bench.ROOT / "train_text_to_image.py", [*flags, *own])}
    if cli.diffusers:
        name = "examples/text_to_image/train_text_to_image_lora_sdxl.py"
        # an epoch is half the run; one sample after the first epoch, and one at the end
        found["diffusers"] = (Path(cli.diffusers, name), [*flags, "--validation_epochs=2"])
    return found


def main(argv=None):
    parser = bench.make_parser(__doc__, size="toy", steps=100, rounds=1, batch_size=None)
    parser.add_argument("--resolution", type=int, default=64)
    parser.add_argument("--rank", type=int, default=4)
    parser.add_argument("--diffusers", help="checkout of diffusers, to compare with its script")
    cli = parser.parse_args(argv)
    print(bench.machine())
    with tempfile.TemporaryDirectory() as folder:
        runs = {
            who: functools.partial(measure, folder, 2 * (cli.steps // 2), *how)
            for who, how in make_flags(Path(folder), cli).items()
        }
        found = bench.interleaved(runs, cli.rounds)
    for measured in itertools.chain(*found.values()):
        measured["whole"] = sum(measured.values())
    rows = []
    for part, title in (PARTS | {"whole": "the whole run"}).items():
        seconds = {who: [each.get(part, 0) for each in turns] for who, turns in found.items()}
        rows.append([title, *(bench.spread(each, "{:.1f}") for each in seconds.values())])
    title = f"Processor seconds of a LoRA of SDXL, rank {cli.rank}, {2 * (cli.steps // 2)} steps "
    bench.show(f"{title}at {cli.resolution} px, {cli.size}", ["", *found], rows)


if __name__ == "__main__":
    if sys.argv[1:2] and not sys.argv[1].startswith("-"):
        time_parts(*sys.argv[1:])
    else:
        main()
