"""What can only a GPU decide? Asks it in pieces of nine minutes, the most useful answers first.

    python benchmarks/gpu_plan.py --folder plan                 # on a GPU: a piece
    python benchmarks/gpu_plan.py --folder plan                 # the next piece, and so on
    python benchmarks/gpu_plan.py --folder plan --seconds 9000  # the whole plan
    python benchmarks/gpu_plan.py --folder plan --only bucketed attention
    python benchmarks/gpu_plan.py --wheels there.txt            # what a GPU without network lacks

Each run is a process of its own with a limit of time. Its line is written to plan.jsonl when it
ends, and the tables are printed from these lines. A piece makes the runs whose lines are not there,
by rank, and ends if the next one would not fit by an estimate. A run that was killed, or cut off by
the end of a piece, gets its whole limit in the next piece; after two such ends it is given up. To
repeat a run, delete its line. Lines of another card or version of torch do not count, and have
tables of their own.

All comparisons are made once, in this order, and then once more, so that a card that slows down
slows all of them:

- desk: LoRAs of SDXL, Z-Image and FLUX.2 klein 4B at 1024 px and batch 1, as recipes/ have them,
  eager and compiled
- small: a LoRA of Stable Diffusion 2 at batch 1
- encode: precompute_latents.py, also compiled and in either layout
- large_model: Qwen-Image with gradient checkpointing
- whole: Stable Diffusion 2 against a bare loop and, with --diffusers, against diffusers' script
- bucketed: twelve shapes of images and lengths of captions, with cuDNN's kernels of attention,
  which need a plan for each new shape, with plans that lengths share, and with FlashAttention
- ways: the models of desk in int8 and nf4, and with all blocks swapped
- layout, attention, compile, norms: settings without a flag, see gpu_settings.py
- large: twice the batch size

"idle" is the share of a step in which the GPU runs no kernel, because it waits for the host.
"s lost" are the seconds before the timed steps that steps of the timed speed would not have taken,
such as those in which kernels are chosen for new shapes. The models have their true shapes and
random weights.
"""

import functools
import io
import itertools
import json
import os
import re
import runpy
import shutil
import statistics
import sys
import tempfile
import time
from argparse import ArgumentTypeError
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

import bench
import gpu_settings
import memory
import psutil
import recipes_on_gpu
import step_overhead
from packaging.requirements import Requirement

from diffusion_training.training.step.costs import find_peak

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
TURNS = 2
PROFILED = 5  # steps
SHAPES = 12  # of the images of "bucketed"
# of a run, in its line
DESCRIBED = ("experiment", "against", "what", "goal", "expected", "turn")


class Made(NamedTuple):
    """What runs need in the plan's folder.

    model: its name in memory.py, for a recipe. gigabytes: on the disk. making, running: seconds
    that are expected on an H100.
    """

    model: str
    gigabytes: float
    making: float
    running: float


SD = "sd"
MADE = {
    SD: Made("", 6, 60, 40),
    "sdxl_lora": Made("SDXL", 6, 40, 45),
    "z_image_lora": Made("Z-Image", 13, 60, 70),
    "klein_4b_lora": Made("FLUX.2 klein 4B", 9, 45, 55),
    "qwen_image_lora": Made("Qwen-Image", 42, 150, 150),
}
DESK = ("sdxl_lora", "z_image_lora", "klein_4b_lora")
WAYS = {
    "int8": ["--base_precision=int8"],
    "int8, compiled": ["--base_precision=int8", "--compile"],
    "nf4": ["--base_precision=nf4"],
    "all blocks swapped": ["--blocks_to_swap=all"],
}
ATTENTION = ("cuDNN's attention", "cuDNN's, shared plans", "flash attention")


@dataclass(frozen=True)
class Run:
    """One line of the plan.

    experiment, against: the runs that are compared, such as "layout" and "512 px, cached". what:
    the change, or "baseline". needs: of `MADE`. script: "" encodes. setting: names of
    gpu_settings.py, joined by +. seconds: expected on an H100. warm, steps: those after `warm` are
    timed. goal: of the share of the peak, or of the ratio to the first of the comparison.
    """

    experiment: str
    against: str
    what: str
    needs: str
    script: str
    flags: list
    setting: str = ""
    batch: int = 1
    seconds: float = 40
    warm: int = 4
    steps: int = 14
    goal: str = ""
    turn: int = 0

    @property
    def is_compiled(self):
        return "--compile" in self.flags or any(
            name in gpu_settings.MODES for name in self.setting.split("+")
        )

    @property
    def expected(self):
        return self.seconds + 110 * self.is_compiled

    @property
    def limit(self):
        return min(500, 3 * self.expected + 60)  # it fits into a piece

    @property
    def key(self):
        return self.experiment, self.against, self.what, str(self.turn)


def name_kind(kernel):
    """The kind in `KINDS` of a kernel or operator, or "other"."""
    found = (kind for kind, words in KINDS.items() if re.search(words, kernel, re.IGNORECASE))
    return next(found, "other")


# ------------------------------------------------------------------- in processes of their own


def watch(path, begun, warm, steps, setting, script, *argv):
    """Run a trainer, and write what its steps and their kernels take to `path`.

    begun: when its process was started. The kernels are those of `PROFILED` more steps, so that the
    profiler slows no timed step. Then the process ends, without waiting for the final save.
    """
    import torch
    from torch.profiler import ProfilerActivity

    warm, steps = int(warm), int(steps)
    for name in filter(None, setting.split("+")):
        (gpu_settings.SETTINGS | gpu_settings.MODES)[name]()
    step, count, gpu = torch.optim.AdamW.step, itertools.count(1), bench.find_gpu()
    has_kernels = bench.find_device().type == "cuda"
    activities = [ProfilerActivity.CUDA if has_kernels else ProfilerActivity.CPU]
    profiler = torch.profiler.profile(activities=activities)
    times, numbers = {}, {}

    def watched(self, *args, **options):
        result, number = step(self, *args, **options), next(count)
        if number in (1, warm, steps, steps + PROFILED):
            if gpu:
                gpu.synchronize()
            times[number] = time.time()
        if number == steps:
            each = (times[steps] - times[warm]) / (steps - warm)
            numbers["step"], numbers["first"] = each, times[1] - float(begun)
            numbers["lost"] = times[warm] - times[1] - (warm - 1) * each
            if gpu:
                numbers["GiB"] = gpu.max_memory_allocated() / 2**30
            Path(path).write_text(json.dumps(numbers))
            profiler.start()
        if number == steps + PROFILED:
            profiler.stop()
            sums = dict.fromkeys([*KINDS, "other"], 0.0)
            for event in profiler.key_averages():
                spent = event.self_device_time_total if has_kernels else event.self_cpu_time_total
                sums[name_kind(event.key)] += spent / 1e6 / PROFILED
            numbers["kernels"] = sums
            Path(path).write_text(json.dumps(numbers))
            os._exit(0)
        return result

    torch.optim.AdamW.step = watched
    sys.argv, sys.path[0] = [script, *argv], str(Path(script).parent)
    runpy.run_path(script, run_name="__main__")


def time_encoding(path, setting, count, *argv):
    """Encode images, and write the images per second since the first batch to `path`."""
    import precompute_speed

    if setting:
        gpu_settings.SETTINGS[setting]()
    with tempfile.TemporaryDirectory() as folder:
        _, running = precompute_speed.run(argv, f"{folder}/cache")
    Path(path).write_text(json.dumps({"images/s": int(count) / running}))


def make(folder, name, size, batch, resolution):
    """Make what runs need. folder: it must be new."""
    folder, batch, resolution = Path(folder), int(batch), int(resolution)
    if name == SD:
        models = bench.make_models(folder / "models", size)
        bench.make_cache(folder / "cache", models, 4 * batch, resolution)
        pictures = bench.make_pictures(2 * resolution)
        bench.make_images(folder / "images", 16 * batch, pictures)
        return
    model = MADE[name].model
    recipes_on_gpu.make_pipeline(model, folder / "base", bench.find_device())
    recipes_on_gpu.make_photographs(folder / "photographs", memory.MODELS[model].side, 4)
    make_shapes(folder / "shapes", memory.MODELS[model].side)


def make_shapes(folder, side):
    """Write images of `SHAPES` shapes, of about side x side pixels, and captions of all lengths."""
    from PIL import Image

    folder.mkdir()
    image = Image.open(io.BytesIO(next(bench.make_pictures(side))))
    lines = []
    for number in range(SHAPES):
        stretch = 2 ** (number / (SHAPES - 1) - 0.5)  # so that width / height is 0.5 to 2
        name = f"{number}.jpg"
        image.resize((round(side * stretch), round(side / stretch))).save(folder / name)
        text = "zero one two three four " * (3 * number + 1)
        lines.append(json.dumps({"file_name": name, "text": text}))
    (folder / "metadata.jsonl").write_text("\n".join(lines))


# ------------------------------------------------------------------- the runs


class Plan:
    """The runs, for the flags of the command."""

    def __init__(self, folder, cli):
        self.folder, self.cli = folder, cli
        self.common = [f"--mixed_precision={cli.mixed_precision}"]
        self.common += ["--max_train_steps=100000", "--checkpointing_steps=1000000"]
        self.logged = ["--report_to=none", "--logging_steps=10"]  # not diffusers' script
        sd = folder / SD
        self.models = f"--pretrained_model_name_or_path={sd / 'models'}"
        self.cached = [f"--latents_dir={sd / 'cache'}"]
        self.pixels = [f"--train_data_dir={sd / 'images'}", f"--resolution={cli.resolution}"]
        self.pixels += [f"--cache_dir={folder / 'data'}"]

    def list_runs(self):
        """All runs, by rank; the first of each comparison is its baseline."""
        for turn in range(TURNS):
            for experiment in self.cli.only:
                for run in getattr(self, f"list_{experiment}")():
                    if not (run.is_compiled and self.cli.no_compile):
                        yield replace(run, experiment=experiment, turn=turn)

    def train(self, against, what, data, *flags, batch=None, script=None, **options):
        """A run of train_text_to_image.py or, with its path and first words, of another script."""
        batch = batch or self.cli.batch_size
        path, *first = script or [str(bench.ROOT / "train_text_to_image.py")]
        flags = [*first, *self.common, self.models, f"--train_batch_size={batch}", *data, *flags]
        if path != self.find_peer():
            flags += self.logged
        return Run("", against, what, SD, path, flags, batch=batch, **options)

    def find_peer(self):
        """The path of diffusers' script, if --diffusers has it."""
        name = "examples/text_to_image/train_text_to_image.py"
        return self.cli.diffusers and str(Path(self.cli.diffusers, name).resolve())

    def train_recipe(self, name, against, what, *flags, images="photographs", more=0, **options):
        """A run of a recipe at batch 1. more: seconds beside those of `MADE`."""
        path, made = recipes_on_gpu.RECIPES[name], MADE[name]
        script = str(bench.ROOT / re.search(r"train_\w+\.py", path.read_text())[0])
        folder, side = self.folder / name, memory.MODELS[made.model].side
        given = [f"@{path}", f"--pretrained_model_name_or_path={folder / 'base'}", *self.common]
        given += [f"--train_data_dir={folder / images}", f"--cache_dir={self.folder / 'data'}"]
        given += ["--train_batch_size=1", "--total_batch_size=1", "--lr_warmup_steps=0"]
        given += [f"--resolution={side}", *self.logged, *flags]
        seconds = made.running + more
        return Run("", against, what, name, script, given, seconds=seconds, **options)

    def list_desk(self):
        for name in DESK:
            model = MADE[name].model
            # --fit of its recipe checkpoints no block on 80 GB
            goal = {"goal": "40 % of an H100"} if model == "Z-Image" else {}
            yield self.train_recipe(name, model, "eager", **goal)
            yield self.train_recipe(name, model, "compiled", "--compile", **goal)

    def list_small(self):
        rank = "--rank=4" if self.cli.size == "toy" else "--rank=16"  # the toy has 8 channels
        lora = functools.partial(self.train, "batch 1")
        yield lora("eager", self.cached, rank, batch=1)
        yield lora("--compile", self.cached, rank, "--compile", batch=1)
        mode = "reduce-overhead"
        yield lora(mode, self.cached, rank, batch=1, setting=mode)

    def list_encode(self):
        flags = [str(16 * self.cli.batch_size), f"--mixed_precision={self.cli.mixed_precision}"]
        flags += [f"--batch_size={self.cli.batch_size}", self.models, "--center_crop", *self.pixels]
        row = functools.partial(Run, "", "images", needs=SD, script="")
        yield row("baseline", flags=flags)
        for setting in ("torch's memory layout", "channels_last"):
            yield row(setting, flags=flags, setting=setting)
        yield row("--compile", flags=[*flags, "--compile"])

    def list_large_model(self):
        flags = ["--fit=no", "--gradient_checkpointing"]
        options = {"goal": "38 % of an H100"}
        yield self.train_recipe("qwen_image_lora", "Qwen-Image", "checkpointed", *flags, **options)

    def list_whole(self):
        against = f"cached, batch {self.cli.batch_size}"
        bare = [step_overhead.__file__, "train_text_to_image"]
        yield self.train(against, "a bare loop, no EMA", self.cached, script=bare)
        goal = "33 % of an H200; 0.98 of the first"
        yield self.train(against, "ours, EMA", self.cached, "--use_ema", goal=goal)
        against = f"from images, batch {self.cli.batch_size}"
        goal = {}
        if theirs := self.find_peer():
            flags, goal = ["--use_ema", "--dataloader_num_workers=8"], {"goal": "1 of the first"}
            yield self.train(against, "diffusers, EMA", self.pixels, *flags, script=[theirs])
        yield self.train(against, "ours, EMA", self.pixels, "--use_ema", **goal)

    def list_bucketed(self):
        options = {"images": "shapes", "warm": SHAPES, "steps": 2 * SHAPES, "more": 15}
        for name in DESK[:2]:
            for setting in ATTENTION:
                against = f"{MADE[name].model}, {SHAPES} shapes"
                yield self.train_recipe(name, against, setting, setting=setting, **options)

    def list_ways(self):
        for name in DESK:
            model = MADE[name].model
            yield self.train_recipe(name, model, "eager")
            for what, flags in WAYS.items():
                yield self.train_recipe(name, model, what, *flags, more=25)

    def list_settings(self, *changes, pixels=False):
        data = {"cached": self.cached} | ({"from images": self.pixels} if pixels else {})
        for against, flags in data.items():
            for setting in ("", *changes):
                what = setting or "baseline"
                yield self.train(against, what, flags, "--use_ema", setting=setting)

    def list_layout(self):
        yield from self.list_settings("torch's memory layout", "channels_last", pixels=True)

    def list_attention(self):
        yield from self.list_settings(*ATTENTION)

    def list_norms(self):
        yield from self.list_settings("norms in bf16")

    def list_compile(self):
        row = functools.partial(self.train, "cached")
        yield row("baseline", self.cached, "--use_ema")
        mode = "max-autotune-no-cudagraphs"
        for setting in ("", mode, "cuDNN's attention", "cuDNN's attention+norms in bf16"):
            what = f"--compile, {setting}" if setting else "--compile"
            flags = ["--use_ema", *["--compile"] * (setting != mode)]
            yield row(what, self.cached, *flags, setting=setting)

    def list_large(self):
        twice = 2 * self.cli.batch_size
        yield self.train("cached", "baseline", self.cached, "--use_ema")
        yield self.train("cached", f"batch {twice}", self.cached, "--use_ema", batch=twice)


EXPERIMENTS = ("desk", "small", "encode", "large_model", "whole", "bucketed", "ways")
EXPERIMENTS += ("layout", "attention", "compile", "norms", "large")


# ------------------------------------------------------------------- making them


def read_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def add_line(path, line):
    with path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def measure(run, limit, peak):
    """Make a run. Returns its numbers. Ends with SystemExit if it fails or takes too long.

    peak: TFLOP/s of the card, or None.
    """
    with tempfile.TemporaryDirectory() as folder:
        result, out = Path(folder, "numbers"), Path(folder, "out")
        if not run.script:
            bench.call(__file__, ["encode", result, run.setting, *run.flags], limit)
            return json.loads(result.read_text())
        argv = ["watch", result, time.time(), run.warm, run.steps, run.setting, run.script]
        try:
            bench.call(__file__, [*argv, *run.flags, f"--output_dir={out}"], limit)
        except SystemExit as stop:
            if not result.exists():
                raise
            print(f"only its kernels are missing: {stop}", file=sys.stderr)
        found = json.loads(result.read_text())
        records = read_lines(out / "metrics.jsonl")
    numbers = {"images/s": run.batch / found["step"], **found, "peak": peak}
    counted = [each for each in records if "tflops" in each]
    if counted:
        numbers["TFLOP"] = counted[0]["tflops"] / counted[0]["images_per_second"]
    return numbers


def make_needed(name, folder, limit, cli):
    """Make what a run needs, if it is not there."""
    if (folder / name).exists():
        return
    part = folder / f"{name}.part"
    shutil.rmtree(part, ignore_errors=True)
    for other in MADE:  # they are made again when a run needs them
        if shutil.disk_usage(folder).free < 1e9 * MADE[name].gigabytes:
            shutil.rmtree(folder / other, ignore_errors=True)
    part.mkdir()
    bench.call(__file__, ["make", part, name, cli.size, cli.batch_size, cli.resolution], limit)
    part.rename(folder / name)


def estimate(run, is_made, lines):
    """The seconds that a run will take, with what it needs.

    They are those of its other turn, or else those on an H100, times the slowness of earlier runs.
    """
    worked = [line for line in lines if line.get("numbers")]
    own = [line["seconds"] for line in worked if tuple(line["key"][:3]) == run.key[:3]]
    slowness = max(1, statistics.median([x["seconds"] / x["expected"] for x in worked] or [1]))
    making = 0 if is_made else MADE[run.needs].making * slowness
    return making + (own[-1] if own else run.expected * slowness)


def count_seconds():
    """The seconds since the process began, imports included."""
    return time.time() - psutil.Process().create_time()


def make_piece(plan, path, machine, peak):
    """Make runs until the next would not fit into --seconds. Returns those that are left."""
    left, is_first = [], True
    for run in plan.list_runs():
        lines = [line for line in read_lines(path) if line["machine"] == machine]
        own = [line for line in lines if tuple(line["key"]) == run.key]
        if any("numbers" in line for line in own):
            continue
        described = {name: getattr(run, name) for name in DESCRIBED}
        line = {"key": run.key, "machine": machine, **described}
        if len(own) > 1:
            print(*run.key, "was killed twice and is given up", file=sys.stderr)
            add_line(path, {**line, "numbers": None, "seconds": 0})
            continue
        needed = estimate(run, (plan.folder / run.needs).exists(), lines)
        if own:  # it was killed
            needed = max(needed, run.limit)
        room = plan.cli.seconds - count_seconds()
        if room < (1 if is_first else needed):
            left.append((run, needed))
            continue
        is_first = False
        add_line(path, line)  # of a run that does not end, it is the only one
        print(*run.key, f"some {needed:.0f} s", flush=True)
        numbers, limit, begun = None, 0, time.monotonic()
        try:
            make_needed(run.needs, plan.folder, room, plan.cli)
            begun = time.monotonic()
            limit = max(1, min(run.limit, plan.cli.seconds - count_seconds()))
            numbers = measure(run, limit, peak)
        except SystemExit as stop:
            print(stop, file=sys.stderr)
        if numbers is None and limit < run.limit and count_seconds() >= plan.cli.seconds:
            left.append((run, run.limit))  # cut off by the end of the piece
            continue
        add_line(path, {**line, "numbers": numbers, "seconds": time.monotonic() - begun})
        print(*run.key, json.dumps(numbers), flush=True)
    return left


def format_share(numbers, operations):
    """The share of the card's peak, as a cell. operations: TFLOP of an image, or None."""
    if not operations or not numbers.get("peak"):
        return ""
    return f"{numbers['images/s'] * operations / numbers['peak']:.1%}"


def show(lines, machine):
    """Print the tables of the lines of plan.jsonl, of one card and version of torch."""
    rows, kernels, comparisons = [], [], {}
    for line in lines:
        if line["machine"] == machine and "numbers" in line:
            comparison = comparisons.setdefault((line["experiment"], line["against"]), {})
            comparison.setdefault(line["what"], {})[line["turn"]] = line
    for place, comparison in comparisons.items():
        worked = {
            what: {turn: line["numbers"] for turn, line in turns.items() if line["numbers"]}
            for what, turns in comparison.items()
        }
        first = next(iter(worked.values()))
        counts = [each.get("TFLOP") for turns in worked.values() for each in turns.values()]
        operations = next(filter(None, counts), None)
        for what, turns in worked.items():
            goal = next(iter(comparison[what].values()))["goal"]
            if not turns:
                rows.append([*place, what, "failed", "", "", goal, *[""] * 4])
                continue
            numbers = turns[max(turns)]
            pairs = [(turns[turn], first[turn]) for turn in turns if turn in first]
            ratios = [one["images/s"] / other["images/s"] for one, other in pairs]
            idle = ""
            if "kernels" in numbers:
                busy = numbers["kernels"].values()
                idle = f"{max(0, 1 - sum(busy) / numbers['step']):.0%}"
                kernels.append([*place, what, *(f"{1000 * each:.1f}" for each in busy)])
            rows.append(
                [
                    *place,
                    what,
                    bench.spread([each["images/s"] for each in turns.values()]),
                    f"{statistics.median(ratios):.3f}" if ratios else "",
                    format_share(numbers, numbers.get("TFLOP", operations)),
                    goal,
                    idle,
                    *(
                        f"{numbers[name]:.1f}" if name in numbers else ""
                        for name in ("GiB", "first", "lost")
                    ),
                ]
            )
    if kernels:
        header = ["", "", "", *KINDS, "other"]
        bench.show(f"Kernels, ms a step: {machine}", header, kernels)
    header = ["", "", "", "images/s", "of the first", "of the peak", "goal", "idle", "GiB"]
    bench.show(f"The plan: {machine}", [*header, "s to step 1", "s lost"], rows)


def list_wheels(there):
    """Yield `name==version` of all packages that the plan needs and another machine lacks.

    there: {name: version} on that machine. The versions and what they need are those installed
    here.
    """
    text = (bench.ROOT / "requirements.txt").read_text()
    wanted = [re.sub(r"\s*#.*", "", line) for line in text.splitlines()]
    wanted, done = [*filter(None, wanted), "bitsandbytes"], set()
    while wanted:
        requirement = Requirement(wanted.pop())
        name = normalize(requirement.name)
        is_asked = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        fits = name in there and requirement.specifier.contains(there[name], prereleases=True)
        if name in done or fits or not is_asked:
            continue
        done.add(name)
        yield f"{name}=={metadata.version(name)}"
        wanted += metadata.requires(name) or []


def normalize(name):
    return re.sub("[-_.]+", "-", name).lower()


def read_freeze(path):
    """{name: version} of a file that `pip freeze` or `pip list --format freeze` wrote."""
    try:
        text = Path(path).read_text()
    except OSError as error:
        raise ArgumentTypeError(str(error)) from error
    found = re.findall(r"^([\w.-]+)==(\S+)", text, re.MULTILINE)
    if not found:
        raise ArgumentTypeError(f"{path} has no lines like torch==2.11.0, as of `pip freeze`")
    return {normalize(name): version for name, version in found}


def main(argv=None):
    parser = bench.make_parser(
        __doc__, size="sd2", mixed_precision="bf16", batch_size=64, steps=None, rounds=None
    )
    parser.add_argument("--folder", type=Path, default="plan", help="for models, data, plan.jsonl")
    parser.add_argument("--only", nargs="+", choices=EXPERIMENTS, default=EXPERIMENTS)
    parser.add_argument("--seconds", type=float, default=540, help="of a piece")
    parser.add_argument("--resolution", type=int, default=512)
    parser.add_argument("--no_compile", action="store_true", help="skip the runs with --compile")
    parser.add_argument("--diffusers", help="checkout of diffusers, to also train with its script")
    parser.add_argument(
        "--wheels",
        type=read_freeze,
        metavar="FILE",
        help="print what the plan needs beyond the packages of another machine's `pip freeze`",
    )
    cli = parser.parse_args(argv)
    if cli.wheels:
        print(*sorted(list_wheels(cli.wheels)), sep="\n")
        return
    folder = cli.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    print(bench.machine(), flush=True)
    # a resumed or repeated run finds its compiled code there
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder / "inductor"))
    import torch

    gpu, path = bench.find_gpu(), folder / "plan.jsonl"
    card = gpu.get_device_name() if gpu else "no GPU"
    machine = f"{card}, torch {torch.__version__}, {cli.size}, {cli.mixed_precision}"
    left = make_piece(Plan(folder, cli), path, machine, find_peak(card, cli.mixed_precision, False))
    lines = read_lines(path)
    for each in dict.fromkeys(line["machine"] for line in lines):
        show(lines, each)
    if left:
        run, seconds = left[0]
        print(f"\n{len(left)} runs are left: give the same command again. The next one,", end=" ")
        print(f"{' '.join(run.key[:3])}, takes some {seconds:.0f} s")
    if any(line.get("numbers", line) is None for line in lines):
        sys.exit("Some runs failed; see above")


CHILDREN = {"watch": watch, "encode": time_encoding, "make": make}

if __name__ == "__main__":
    _, *words = sys.argv
    if words and words[0] in CHILDREN:
        CHILDREN[words[0]](*words[1:])
    else:
        main()
