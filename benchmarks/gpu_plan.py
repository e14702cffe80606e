"""What can only a GPU decide? Asks it in an order in which an hour that is cut off was of use.

    python benchmarks/gpu_plan.py --folder plan                 # on a GPU; 25 minutes or more
    python benchmarks/gpu_plan.py --folder plan --seconds 540   # several short calls go on
    python benchmarks/gpu_plan.py --folder plan --only layout attention

Each run is a process of its own with a limit of time. A baseline and its changes take turns, twice,
so that a card that slows down slows all of them. Each run's line is written to plan.jsonl when it
ends, a call makes only the runs whose lines are not there, and the table is printed from them.

- profile: the time of the GPU's kernels in five steps, by kind, from a cache and from images
- layout, attention, norms: settings without a flag, see gpu_settings.py
- compile: --compile as it is, in another mode, and with the attention and norms above
- desk: LoRAs of Z-Image, FLUX.2 klein 4B and SDXL at 1024 px and batch 1, as recipes/ have them,
  also compiled, in int8 and nf4, and with all blocks swapped
- small: a LoRA of Stable Diffusion 2 at batch 1, where starting kernels may take longer than they
- encode: precompute_latents.py, also compiled and in either layout
- large: twice the batch size

The models have their true shapes and random weights. The layout also has its ratio from images,
where the VAE computes in each step.
"""

import functools
import itertools
import json
import os
import re
import runpy
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import bench
import gpu_settings
import memory
import recipes_on_gpu

KINDS = {  # {kind: what the names of its kernels or, on an imitated GPU, of its operators contain}
    "layout": "nchwToNhwc|nhwcToNchw|NCHWToNHWC|NHWCToNCHW",
    "attention": "flash|fmha|sdpa|attention",
    "convolution": "conv|fprop|dgrad|wgrad|implicit_gemm",
    "optimizer": "multi_tensor|_fused_adam|_foreach|lpnorm",
    "norm": "norm|welford|RowwiseMoments|GammaBeta|InternalGradients",
    "product": "gemm|gemv|cutlass|nvjet|cublas|aten::(mm|bmm|addmm|baddbmm)",
    "copy": "memcpy|memset|copy|CatArray|aten::cat",
    "fused by --compile": "triton",
    "elementwise": "elementwise|reduce|aten::(add|mul|silu|gelu|sub|div)",
}
DESK = {"z_image_lora": "Z-Image", "klein_4b_lora": "FLUX.2 klein 4B", "sdxl_lora": "SDXL"}
DESK_WAYS = {
    "eager": [],
    "compiled": ["--compile"],
    "int8": ["--base_precision=int8"],
    "int8, compiled": ["--base_precision=int8", "--compile"],
    "nf4": ["--base_precision=nf4"],
    "all blocks swapped": ["--blocks_to_swap=all"],
}


@dataclass
class Run:
    """One line of the plan.

    experiment, against: the runs that are compared, such as "layout" and "512 px, cached". what:
    the change, or "baseline". setting: names of gpu_settings.py, joined by +. limit: seconds.
    """

    experiment: str
    against: str
    what: str
    script: str
    flags: list
    setting: str = ""
    batch: int = 1
    limit: float = 150
    round: int = 0


def name_kind(kernel):
    """The kind in `KINDS` of a kernel or operator, or "other"."""
    found = (kind for kind, words in KINDS.items() if re.search(words, kernel, re.IGNORECASE))
    return next(found, "other")


def profile(path, script, *argv):
    """Run a trainer and write {kind: ms a step} of the GPU's time in steps 4 to 8 to `path`."""
    import torch
    from torch.profiler import ProfilerActivity

    step, count, gpu = torch.optim.AdamW.step, itertools.count(1), bench.find_gpu()
    has_kernels = bench.find_device().type == "cuda"
    activities = [ProfilerActivity.CUDA if has_kernels else ProfilerActivity.CPU]
    profiler = torch.profiler.profile(activities=activities)

    def watched(self, *args, **options):
        result, number = step(self, *args, **options), next(count)
        if number in (3, 8) and gpu:
            gpu.synchronize()
        if number == 3:
            profiler.start()
        if number == 8:
            profiler.stop()
            sums = {}
            for event in profiler.key_averages():
                spent = event.self_device_time_total if has_kernels else event.self_cpu_time_total
                kind = name_kind(event.key)
                sums[kind] = sums.get(kind, 0) + spent / 5000
            Path(path).write_text(json.dumps(sums))
            os._exit(0)
        return result

    torch.optim.AdamW.step = watched
    sys.argv, sys.path[0] = [script, *argv], str(bench.ROOT)
    runpy.run_path(script, run_name="__main__")


def time_encoding(path, setting, count, *argv):
    """Encode images, and write the images per second since the first batch to `path`."""
    import precompute_speed

    if setting:
        gpu_settings.SETTINGS[setting]()
    with tempfile.TemporaryDirectory() as folder:
        _, running = precompute_speed.run(argv, f"{folder}/cache")
    Path(path).write_text(json.dumps({"images/s": int(count) / running}))


def measure(run, steps):
    """Make a run. Returns its numbers. Ends with SystemExit if it fails or takes too long."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "numbers")
        flags = [*run.flags, f"--output_dir={folder}/out"]
        if run.experiment == "profile":
            bench.call(__file__, ["profile", result, run.script, *flags], run.limit)
            return json.loads(result.read_text())
        if run.experiment == "encode":
            bench.call(__file__, ["encode", result, run.setting, *run.flags], run.limit)
            return json.loads(result.read_text())
        start = [gpu_settings.__file__, run.setting, run.script] if run.setting else [run.script]
        found = bench.run(start[0], [*start[1:], *flags], steps, limit=run.limit)
    return {
        "images/s": run.batch / found["step"],
        "GiB": found["gpu"],
        "s to step 1": found["first"],
    }


def take_turns(runs):
    """The runs of each comparison, twice, in turns."""
    for _, group in itertools.groupby(runs, lambda run: (run.experiment, run.against)):
        group = list(group)
        for number in range(1 if group[0].experiment == "profile" else 2):
            for run in group:
                yield Run(**{**vars(run), "round": number})


class Plan:
    """The runs, and the models and data in a folder, which are made when a run needs them."""

    def __init__(self, folder, cli):
        self.folder, self.cli = folder, cli
        self.precision = f"--mixed_precision={cli.mixed_precision}"

    @functools.cached_property
    def models(self):
        folder = self.folder / "sd"
        return folder if folder.exists() else bench.make_models(folder, self.cli.size)

    @functools.cached_property
    def cache(self):
        folder, rows = self.folder / "cache", 4 * self.cli.batch_size
        if (folder / "empty_prompt.npy").exists():
            return folder
        return bench.make_cache(folder, self.models, rows, self.cli.resolution)

    @functools.cached_property
    def images(self):
        folder = self.folder / "images"
        pictures = bench.make_pictures(2 * self.cli.resolution)
        count = 16 * self.cli.batch_size
        return folder if folder.exists() else bench.make_images(folder, count, pictures)

    def train(self, experiment, against, what, data, *flags, batch=None, **options):
        """A run of train_text_to_image.py, with EMA. data: its flags."""
        batch = batch or self.cli.batch_size
        script = str(bench.ROOT / "train_text_to_image.py")
        common = [f"--pretrained_model_name_or_path={self.models}", "--report_to=none"]
        common += [self.precision, f"--train_batch_size={batch}", "--max_train_steps=100000"]
        common += ["--checkpointing_steps=1000000", "--logging_steps=10"]
        flags = [*common, *data, *flags]
        return Run(experiment, against, what, script, flags, batch=batch, **options)

    def list_runs(self, experiment):
        """The runs of an experiment; the first of each comparison is its baseline."""
        cached, ema = [f"--latents_dir={self.cache}"], "--use_ema"
        pixels = [f"--train_data_dir={self.images}", f"--resolution={self.cli.resolution}"]
        pixels += [f"--cache_dir={self.folder / 'data'}"]
        if experiment == "profile":
            for what, data in ("cached", cached), ("from images", pixels):
                yield self.train(experiment, what, "kernels", data, ema)
        elif experiment in ("layout", "attention", "norms"):
            changes = {
                "layout": ["torch's memory layout", "channels_last"],
                "attention": ["torch's attention", "cuDNN's attention"],
                "norms": ["norms in bf16"],
            }[experiment]
            for what, data in ("cached", cached), ("from images", pixels):
                if data is cached or experiment == "layout":
                    for name in ("", *changes):
                        row = name or "baseline"
                        yield self.train(experiment, what, row, data, ema, setting=name)
        elif experiment == "compile":
            slow = {"limit": 420}
            yield self.train(experiment, "cached", "baseline", cached, ema)
            yield self.train(experiment, "cached", "--compile", cached, ema, "--compile", **slow)
            for setting in (
                "max-autotune-no-cudagraphs",
                "cuDNN's attention",
                "cuDNN's attention+norms in bf16",
            ):
                flags = [] if setting in gpu_settings.MODES else ["--compile"]
                row = self.train(experiment, "cached", f"--compile, {setting}", cached, ema, *flags)
                yield Run(**{**vars(row), "setting": setting, **slow})
        elif experiment == "desk":
            for recipe, name in DESK.items():
                yield from self.list_desk(recipe, name)
        elif experiment == "small":
            lora = ["--rank=16"]
            yield self.train(experiment, "batch 1", "baseline", cached, *lora, batch=1)
            for setting in ("", "reduce-overhead"):
                flags = lora if setting else [*lora, "--compile"]
                what, options = setting or "--compile", {"setting": setting, "limit": 300}
                yield self.train(experiment, "batch 1", what, cached, *flags, batch=1, **options)
        elif experiment == "encode":
            count = len(list(self.images.glob("*.jpg")))
            flags = [str(count), self.precision, f"--batch_size={self.cli.batch_size}"]
            flags += [f"--pretrained_model_name_or_path={self.models}", "--center_crop", *pixels]
            for what, setting, more in (
                ("baseline", "", []),
                ("torch's memory layout", "torch's memory layout", []),
                ("channels_last", "channels_last", []),
                ("--compile", "", ["--compile"]),
            ):
                yield Run(experiment, "images", what, "", [*flags, *more], setting, limit=240)
        else:
            twice = 2 * self.cli.batch_size
            yield self.train(experiment, "cached", "baseline", cached, ema)
            yield self.train(experiment, "cached", f"batch {twice}", cached, ema, batch=twice)

    def list_desk(self, recipe, name):
        """The runs of a recipe at batch 1."""
        path, side = recipes_on_gpu.RECIPES[recipe], memory.MODELS[name].side
        base, photographs = self.folder / recipe, self.folder / f"photographs-{side}"
        if not base.exists():
            recipes_on_gpu.make_pipeline(name, base, bench.find_device())
        if not photographs.exists():
            recipes_on_gpu.make_photographs(photographs, side, 4)
        script = str(bench.ROOT / re.search(r"train_\w+\.py", path.read_text())[0])
        flags = [f"@{path}", f"--pretrained_model_name_or_path={base}", "--report_to=none"]
        flags += [f"--train_data_dir={photographs}", f"--cache_dir={self.folder / 'data'}"]
        flags += ["--train_batch_size=1", "--total_batch_size=1", "--max_train_steps=100000"]
        flags += ["--checkpointing_steps=1000000", "--lr_warmup_steps=0", self.precision]
        flags += [f"--resolution={side}"]
        for what, more in DESK_WAYS.items():
            if not ("--compile" in more and self.cli.no_compile):
                yield Run("desk", name, what, script, [*flags, *more], limit=300)


EXPERIMENTS = ("profile", "layout", "attention", "compile", "norms")
EXPERIMENTS += ("desk", "encode", "small", "large")


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def show(lines):
    """Print the tables of the lines of plan.jsonl."""
    profiles = [line for line in lines if line["experiment"] == "profile" and line["numbers"]]
    kinds = [*KINDS, "other"]
    rows = [
        [line["against"], *(f"{line['numbers'].get(kind, 0):.1f}" for kind in kinds)]
        for line in profiles
    ]
    if rows:
        bench.show("Kernels, ms a step", ["", *kinds], rows)
    runs, rows = {}, []
    for line in lines:
        if line["experiment"] != "profile":
            comparison = runs.setdefault((line["experiment"], line["against"]), {})
            comparison.setdefault(line["what"], []).append(line["numbers"])
    for (experiment, against), comparison in runs.items():
        speeds = {
            what: [numbers["images/s"] for numbers in found if numbers]
            for what, found in comparison.items()
        }
        first = next(iter(speeds.values()))
        for what, found in speeds.items():
            pairs = zip(found, first, strict=False)
            ratio = statistics.median([one / other for one, other in pairs] or [0])
            last = next((numbers for numbers in reversed(comparison[what]) if numbers), {})
            cells = [f"{last[key]:.1f}" if key in last else "" for key in ("GiB", "s to step 1")]
            speed = bench.spread(found) if found else "failed"
            rows.append([experiment, against, what, speed, f"{ratio:.3f}" * bool(ratio), *cells])
    header = ["", "", "", "images/s", "of the first", "GiB", "s to step 1"]
    bench.show("The plan", header, rows)


def main(argv=None):
    parser = bench.make_parser(
        __doc__, size="sd2", mixed_precision="bf16", batch_size=64, steps=14, rounds=None
    )
    parser.add_argument("--folder", type=Path, required=True, help="for models, data, plan.jsonl")
    parser.add_argument("--only", nargs="+", choices=EXPERIMENTS, default=EXPERIMENTS)
    parser.add_argument("--seconds", type=float, help="begin no run after this time")
    parser.add_argument("--resolution", type=int, default=512)
    parser.add_argument("--no_compile", action="store_true", help="skip the runs with --compile")
    cli = parser.parse_args(argv)
    begun, folder = time.monotonic(), cli.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    print(bench.machine(), flush=True)
    # a resumed or repeated run finds its compiled code there
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder / "inductor"))
    path, plan = folder / "plan.jsonl", Plan(folder, cli)
    done = {tuple(line["key"]) for line in read_lines(path)}
    for experiment in cli.only:
        if cli.no_compile and experiment in ("compile", "small"):
            continue
        for run in take_turns(plan.list_runs(experiment)):
            key = (run.experiment, run.against, run.what, str(run.round))
            late = cli.seconds and time.monotonic() - begun > cli.seconds
            if key in done or late or (cli.no_compile and "--compile" in run.flags):
                continue
            numbers = None
            try:
                numbers = measure(run, cli.steps)
            except SystemExit as stop:
                print(stop, file=sys.stderr)
            line = {name: getattr(run, name) for name in ("experiment", "against", "what")}
            with path.open("a") as file:
                file.write(json.dumps({"key": key, **line, "numbers": numbers}) + "\n")
            print(*key, json.dumps(numbers), flush=True)
    lines = read_lines(path)
    show(lines)
    if any(line["numbers"] is None for line in lines):
        sys.exit("Some runs failed; see above")


if __name__ == "__main__":
    {"profile": profile, "encode": time_encoding}.get(sys.argv[1], lambda *_: main())(*sys.argv[2:])
