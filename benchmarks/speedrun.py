"""Which settings of a LoRA learn fastest? Trains one under a list of settings, and measures each.

    python benchmarks/speedrun.py                       # a U-Net learns a duck
    python benchmarks/speedrun.py --task nines          # a transformer of digits learns the nine
    python benchmarks/speedrun.py --report              # only the tables of what has run
    python benchmarks/speedrun.py --only "all 0.002" "all 0.002, rank 8"    # in this order
    python benchmarks/speedrun.py --page                # the tables of docs/benchmarks.md
    python benchmarks/speedrun.py --base z_image --pictures photographs --hours 4

The trainers of this repository run in this process, on a fixed public set of pictures with ten of
them held out: 30 ducks (demo/ducks, on demo/drawings), or 30 nines of the digits. First come five
rates for three sets of layers, each with about the same number of weights. Then the best of them
changes in one respect at a time. All settings get the same seeds, so that two of them are compared
on the same held-out pictures.

Each run appends a line to results.jsonl in --output_dir, and the same command continues after a
stop. For each setting the table has, as the mean of its seeds with Student's 95 % interval:

- the held-out loss at the end, and its ratio to that of the reference with the same seed
- steps and processor seconds until the reference's last held-out loss, if it is reached. The
  seconds are those of the steps alone
- subject: the share of samples that show the subject. A classifier says so, which the benchmark
  trains; most prompts name a picture that no run has trained on
- copy: the share of samples for held-out captions whose nearest picture, by the mean square
  error, is one of the 20 that were trained on and not one of the 10 held out. All ducks differ, so
  0 is best; nines have one caption, so 0.67 is
- prior: how far samples of other prompts are from the base's, in color values from 0 to 255

T-LoRA has a second row, for samples and held-out loss with its mask, which no other program has.
report.html has the same with pictures. --page adds the figures of the runs in --output_dir, if
there are any, to benchmarks/speedrun_runs/, and writes the tables of docs/benchmarks.md.

--base trains a published model with its recipe, at 512 px, on a folder of about 30 pictures: each
run in a process of its own, which goes on where it was stopped. Further flags are the trainer's.
There `subject` is the likeness to the pictures (dino-i), and `copy` the trainer's metric.
"""

import argparse
import html
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import bench
import datasets
import numpy as np
import torch
import torch.nn.functional as F
from accelerate.state import AcceleratorState, GradientState, PartialState
from diffusers import DDIMScheduler, DiffusionPipeline, StableDiffusionPipeline
from diffusers.loaders import PeftAdapterMixin
from evaluate_samples import load_digits, train_classifier
from PIL import Image
from quality import STUDENT
from safetensors.torch import load_file
from torch import nn
from torchvision.utils import save_image

from diffusion_training.order import hash_names

RATES = (2e-3, 4.7e-3, 8.5e-4, 1.1e-2, 3.5e-4)  # a factor of 31; that of the reference first
HELD_OUT = 10
BASE_STEPS = 1500  # of the transformer that learns a nine
MEASURED = 40  # steps between two held-out losses
MEASURES = ("held_out_loss", "subject", "copy", "prior")
# what the tables show of a run
SHOWN = (
    "setting", "seed", "commit", "weights", *MEASURES, "masked", "held_out_losses", "step_seconds",
)  # fmt: skip
RUNS = bench.ROOT / "benchmarks/speedrun_runs"  # those of docs/benchmarks.md, a file for each task
PAGE = bench.ROOT / "docs/benchmarks.md"
# {mark in the page: files in RUNS}
TABLES = {"ducks": ["ducks"], "nines": ["nines"], "few": ["ducks-1", "ducks-3", "ducks-5"]}


@dataclass(frozen=True)
class Setting:
    """Flags of a trainer, beyond those that all runs of a task have."""

    name: str
    flags: dict[str, Any] = field(default_factory=dict)
    patch: str | None = None  # in patches/, for the trainer

    def change(self, name: str, patch: str | None = None, **flags: Any) -> "Setting":
        return Setting(f"{self.name}, {name}", self.flags | flags, patch)


@dataclass(frozen=True)
class Picture:
    image: torch.Tensor  # uint8 [3, H, W]
    caption: str


@dataclass(frozen=True)
class Task:
    """What is learned with which settings."""

    script: str  # of a trainer
    layers: dict[str, tuple[str, int]]  # {name: (--lora_layers, rank)}, with about as many weights
    rates: tuple[float, ...]  # that of the reference first
    flags: dict[str, Any]  # of all runs
    # the prompts of samples of the subject beyond the held-out captions, and of others
    further: list[str]
    others: list[str]


@dataclass(frozen=True)
class Toy(Task):
    """A task that one core can do: a base, pictures of a subject, and who recognizes it."""

    side: int  # of a picture, in pixels
    guidance: float
    options: dict[str, Any]  # of a call of the pipeline
    subject: int  # its class in the classifier
    prepare: Callable[[Path], tuple[Path, list[Picture]]]  # returns the base and the pictures
    load: Callable[[Path, Path | None], DiffusionPipeline]  # the base, with a LoRA
    # a classifier: images [N, 3, side, side] in [0, 1] -> logits
    make_judge: Callable[["Toy", Path, list[Picture]], nn.Module]
    held_out: int = HELD_OUT  # of 30 pictures


# -------------------------------------------------------------------------------------------------
# the tasks

THINGS = (
    "airship apple ball balloon banana bear bird book burger cake candy car castle cup fish flower "
    "gift heart ladybug lemon melon monkey mushroom pear strawberry teddy train tree"
).split()
COLORS = "red orange yellow green blue purple pink".split()
GROUNDS = ("", " on pink", " on yellow", " on green", " on blue")


def read_pictures(folder: Path) -> list[Picture]:
    rows = datasets.load_dataset(str(folder), split="train")
    return [
        Picture(to_tensor(image), text)
        for image, text in zip(rows["image"], rows["text"], strict=True)
    ]


def to_tensor(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)


def prepare_ducks(folder: Path) -> tuple[Path, list[Picture]]:
    base = bench.ROOT / "demo/drawings"
    call(
        "precompute_latents", pretrained_model_name_or_path=base, resolution=64, batch_size=10,
        train_data_dir=bench.ROOT / "demo/ducks", output_dir=folder / "latents",
    )  # fmt: skip
    return base, read_pictures(bench.ROOT / "demo/ducks")


def load_drawings(base: Path, lora: Path | None) -> DiffusionPipeline:
    pipeline = StableDiffusionPipeline.from_pretrained(base, dtype=torch.float32)
    pipeline.scheduler = DDIMScheduler.from_config(pipeline.scheduler.config)
    if lora:
        pipeline.load_lora_weights(lora)
    return pipeline


def make_conv_net(classes: int) -> nn.Sequential:
    """For images [N, 3, 64, 64] in [0, 1]."""
    layers: list[nn.Module] = [nn.AvgPool2d(2)]
    for inputs, outputs in ((3, 16), (16, 32), (32, 64)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Dropout(0.3), nn.Linear(64 * 16, classes))


def make_duck_judge(task: Toy, folder: Path, ducks: list[Picture]) -> nn.Module:
    """A classifier of ducks, eight animals, and all that the base draws.

    Colors change places in training, so that the shape decides. Prints how it does on every fifth
    picture, which it has not seen.
    """
    animals = read_pictures(bench.ROOT / "demo/animals")
    names = sorted({find_animal(animal.caption) for animal in animals})
    base = task.load(bench.ROOT / "demo/drawings", None)
    prompts = [
        f"a {COLORS[i % len(COLORS)]} {thing}{GROUNDS[i % len(GROUNDS)]}"
        for i, thing in enumerate(3 * THINGS)
    ]
    prompts += [duck.caption for duck in ducks]  # the base can't draw them: no duck is in these
    drawn = draw(task, base, prompts)
    images = torch.stack([*(each.image for each in [*ducks, *animals]), *drawn])
    numbers = [1 + names.index(find_animal(animal.caption)) for animal in animals]
    labels = torch.tensor([0] * len(ducks) + numbers + [1 + len(names)] * len(drawn))
    unseen = torch.arange(len(images)) % 5 == 0
    torch.manual_seed(0)
    judge = make_conv_net(2 + len(names))
    train_judge(judge, images[~unseen] / 255, labels[~unseen])
    says, is_duck = judge(images[unseen] / 255).argmax(dim=1) == 0, labels[unseen] == 0
    print(
        f"The classifier finds {(says & is_duck).sum()} of {is_duck.sum()} unseen ducks, and "
        f"{(says & ~is_duck).sum()} in {(~is_duck).sum()} other pictures"
    )
    return judge


def find_animal(caption: str) -> str:
    """The last word before the ground."""
    return caption.split(" on ")[0].split()[-1]


def train_judge(judge: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> None:
    """images: [N, 3, H, W] in [0, 1]. Each class is as frequent as the others."""
    optimizer = torch.optim.AdamW(judge.parameters(), lr=2e-3)
    frequency = 1 / torch.bincount(labels)[labels]
    for _ in range(400):
        batch = torch.multinomial(frequency, 64, replacement=True)
        shown = images[batch][:, torch.randperm(3)]
        shown = torch.roll(shown, torch.randint(-4, 5, (2,)).tolist(), dims=(2, 3))
        shown = shown + 0.05 * torch.randn(shown.shape)
        if torch.rand(()) < 0.5:
            shown = shown.flip(3)
        F.cross_entropy(judge(shown), labels[batch]).backward()
        optimizer.step()
        optimizer.zero_grad()
    judge.eval()


NINE = "a handwritten digit nine"
DIGITS = [
    f"a handwritten digit {name}" for name in "zero one two three four five six seven eight".split()
]


def prepare_nines(folder: Path) -> tuple[Path, list[Picture]]:
    """Train a transformer on the other digits, for two minutes, and set 30 nines aside."""
    digits = datasets.load_dataset(str(bench.ROOT / "demo/digits"), split="train")
    texts = np.array(digits["text"])
    nines = np.flatnonzero(texts == NINE)[:30]
    for name, rows in (("others", np.flatnonzero(texts != NINE)), ("nines", nines)):
        if not (folder / name).exists():  # a file that is written again would be another source
            digits.select(rows).to_parquet(str(folder / f"{name}.parquet"))
            (folder / name).mkdir()
            (folder / f"{name}.parquet").rename(folder / name / "train.parquet")
        call(
            "precompute_latents", pretrained_model_name_or_path=bench.ROOT / "demo/models",
            model_family="prx", resolution=8, batch_size=64, train_data_dir=folder / name,
            output_dir=folder / ("latents" if name == "nines" else "latents-others"),
        )  # fmt: skip
    base = folder / "base"
    if not (base / "model_index.json").exists():
        call(
            "train_flow", pretrained_model_name_or_path=bench.ROOT / "demo/models",
            transformer_config_name_or_path=bench.ROOT / "demo/digits_flow_transformer.json",
            latents_dir=folder / "latents-others", train_batch_size=64, max_train_steps=BASE_STEPS,
            learning_rate=2e-3, lr_scheduler="cosine", lr_warmup_steps=100, output_dir=base,
            resume_from_checkpoint="latest", report_to="none",
        )  # fmt: skip
    return base, read_pictures(folder / "nines")


def load_digits_pipeline(base: Path, lora: Path | None) -> DiffusionPipeline:
    pipeline = DiffusionPipeline.from_pretrained(base)
    transformer = pipeline.transformer
    if lora:  # as its model card says
        kind = type(transformer)
        transformer.__class__ = type("Adaptable", (kind, PeftAdapterMixin), {})
        transformer.load_lora_adapter(
            lora, prefix="transformer", weight_name="pytorch_lora_weights.safetensors"
        )
    forward = transformer.forward

    def forward_all(hidden_states: torch.Tensor, timestep: torch.Tensor, **inputs: Any) -> Any:
        """diffusers' pipeline passes the times of one image and its guide."""
        times = timestep[:1].expand(len(hidden_states))
        return forward(hidden_states=hidden_states, timestep=times, **inputs)

    transformer.forward = forward_all
    return pipeline


def make_digit_judge(task: Toy, folder: Path, nines: list[Picture]) -> nn.Module:
    torch.manual_seed(0)
    images, labels = load_digits()
    grey = nn.Conv2d(3, 1, 1, bias=False)
    nn.init.constant_(grey.weight, 1 / 3)
    return nn.Sequential(grey, train_classifier(images, labels))


TASKS = {
    "nines": Toy(
        script="train_flow",
        rates=RATES,
        layers={
            "attention": ("attention", 16),
            "attention_mlp": ("attention_mlp", 6),
            "mlp": ("gate_proj,up_proj,down_proj", 11),
        },
        flags={
            "train_batch_size": 10, "max_train_steps": 240, "lr_scheduler": "cosine",
            "lr_warmup_steps": 1 / 12,
        },
        side=8,
        guidance=3,
        options={"use_resolution_binning": False},
        subject=3,  # in alphabetical order
        further=[NINE] * 30,
        others=DIGITS * 2,
        prepare=prepare_nines,
        load=load_digits_pipeline,
        make_judge=make_digit_judge,
    ),
    "ducks": Toy(
        script="train_text_to_image",
        rates=RATES,
        layers={
            "attention": ("attention", 16),
            "attention_mlp": ("attention_mlp", 8),
            "all": ("all", 3),
        },
        flags={
            "train_batch_size": 10, "max_train_steps": 240, "lr_scheduler": "cosine",
            "lr_warmup_steps": 1 / 12, "snr_gamma": 5,
        },
        side=64,
        guidance=1.5,
        options={},
        subject=0,
        further=[f"a {color} duck{ground}" for color in ("purple", "green") for ground in GROUNDS],
        others=[
            "a red apple on blue", "a purple car", "a green cup on pink", "a blue fish on yellow",
            "an orange heart", "a yellow balloon on green", "a blue tree", "a pink gift on blue",
            "a red mushroom on pink", "a blue teddy on green", "a pear on yellow", "a green bird",
        ],
        prepare=prepare_ducks,
        load=load_drawings,
        make_judge=make_duck_judge,
    ),
}  # fmt: skip


# -------------------------------------------------------------------------------------------------
# the settings


def list_grid(task: Task) -> list[Setting]:
    """Layers and rates, with about the same number of weights. The first one is the reference."""
    return [
        Setting(f"{name} {rate:g}", {"lora_layers": layers, "rank": rank, "learning_rate": rate})
        for rate in task.rates
        for name, (layers, rank) in task.layers.items()
    ]


def list_changes(best: Setting, task: Task) -> list[Setting]:
    """Single changes of the best setting of the grid, the most informative first."""
    rank, steps = best.flags["rank"], task.flags["max_train_steps"]

    def with_steps(count: int) -> Setting:
        return best.change(f"{count} steps", max_train_steps=count)

    changes = [with_steps(steps // 4)]
    ranks = [each for each in (16, 8, 32, 4, 64) if each != rank]
    changes += [best.change(f"rank {each}", rank=each) for each in ranks]
    changes += [
        best.change("no EMA", use_ema=False),
        best.change("prodigy", optimizer="prodigy", learning_rate=None),
        best.change("alpha 1", lora_alpha=1),
        best.change("no caption dropout", caption_dropout=0),
        with_steps(steps // 2),
        with_steps(2 * steps),
        best.change("constant rate", lr_scheduler="constant"),
        best.change("muon", optimizer="muon"),
        best.change("adamw8bit", optimizer="adamw8bit"),
        with_steps(4 * steps),
    ]
    if task.script == "train_text_to_image":
        changes.append(best.change("no snr_gamma", snr_gamma=None))
        changes.append(best.change("T-LoRA", patch="t_lora"))
    return changes


def find_best(settings: list[Setting], results: list[dict], seeds: Iterable[int]) -> Setting:
    """The setting with the lowest mean of the last held-out losses."""

    def mean(setting: Setting) -> float:
        losses = [run["held_out_loss"] for run in find_runs(results, setting.name, seeds)]
        return statistics.mean(losses) if losses else float("inf")

    return min(settings, key=mean)


def find_runs(results: list[dict], name: str, seeds: Iterable[int]) -> list[dict]:
    return [run for run in results if run["setting"] == name and run["seed"] in [*seeds]]


# -------------------------------------------------------------------------------------------------
# a run


def write_flags(flags: dict[str, Any]) -> list[str]:
    """{name: a value, None, which leaves the flag out, True, False or a list} as words."""
    words = []
    for name, value in flags.items():
        if isinstance(value, bool):
            words.append(f"--{'' if value else 'no-'}{name}")
        elif value is not None:
            words += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    return words


def load_script(script: str, patch: str | None, folder: Path) -> Any:
    """A script, or its copy in `folder` with one of patches/."""
    if patch is None:
        return __import__(script)
    name = f"{script}_{patch}"
    shutil.copy(bench.ROOT / f"{script}.py", folder / f"{script}.py")
    change = bench.ROOT / f"patches/{patch}.diff"
    outside = {"GIT_CEILING_DIRECTORIES": str(folder.parent)}  # else git looks for the repository
    command = ["git", "apply", f"--include={script}.py", change]
    subprocess.run(command, cwd=folder, env=os.environ | outside, check=True)
    (folder / f"{script}.py").rename(folder / f"{name}.py")
    sys.path.append(str(folder))
    return __import__(name)


def call(script: str, patch: str | None = None, folder: Path = Path(), **flags: Any) -> float:
    """Run a script in this process. Returns the processor seconds of its training steps.

    patch, folder: see `load_script`. flags: see `write_flags`.
    """
    module = load_script(script, patch, folder)
    seconds = 0.0
    train_step = getattr(module, "train_step", None)

    def timed(*args: Any, **options: Any) -> Any:
        nonlocal seconds
        begin = time.process_time()
        sums = train_step(*args, **options)
        seconds += time.process_time() - begin
        return sums

    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()  # a script expects a process of its own
    if train_step:
        module.train_step = timed
    try:
        module.main(module.parse_args(write_flags(flags)))
    finally:
        if train_step:
            module.train_step = train_step
    return seconds


@torch.no_grad()
def draw(task: Toy, pipeline: DiffusionPipeline, prompts: list[str]) -> torch.Tensor:
    """The first sample of each prompt, uint8 [N, 3, H, W]."""
    pipeline.set_progress_bar_config(disable=True)
    drawn = []
    for start in range(0, len(prompts), 10):
        part = prompts[start : start + 10]
        images = pipeline(
            part, num_inference_steps=20, guidance_scale=task.guidance, height=task.side,
            width=task.side, output_type="pt", **task.options,
            generator=[torch.Generator().manual_seed(start + i) for i in range(len(part))],
        ).images  # fmt: skip
        drawn.append((images * 255).round().byte())
    return torch.cat(drawn)


def open_toy(task: Toy, folder: Path) -> Callable[[Setting, int], dict[str, Any]]:
    """Prepare base, pictures and classifier. Returns what does a run."""
    base, pictures = task.prepare(folder)
    path = folder / "judge.pt"
    if not path.exists():
        torch.save(task.make_judge(task, folder, pictures), path)
    judge = torch.load(path, weights_only=False)
    return lambda setting, seed: run_setting(task, setting, seed, base, pictures, judge, folder)


def name_run(setting: Setting, seed: int) -> str:
    return f"{setting.name}-{seed}".replace(", ", "-").replace(" ", "-")


def run_setting(
    task: Toy, setting: Setting, seed: int, base: Path, pictures: list[Picture],
    judge: nn.Module, folder: Path,
) -> dict[str, Any]:  # fmt: skip
    """Train with a setting, and measure the result."""
    out = folder / "runs" / name_run(setting, seed)
    shutil.rmtree(out, ignore_errors=True)  # of a run that was stopped
    begin = time.perf_counter()
    common = {
        "pretrained_model_name_or_path": base, "latents_dir": folder / "latents", "seed": seed,
        "holdout": task.held_out, "report_to": "none", "checkpointing_steps": 10**6,
    } | task.flags | setting.flags  # fmt: skip
    seconds = call(
        task.script, setting.patch, folder, output_dir=out, validation_steps=MEASURED, **common
    )
    run = describe_run(setting, seed, out)
    run["step_seconds"] = seconds / run["steps"]
    run |= measure(task, seed, base, out, pictures, judge, folder)
    if setting.patch == "t_lora":  # so far by the file alone, as other programs draw
        mask = load_script(task.script, setting.patch, folder).mask_ranks
        masked = measure(task, seed, base, out, pictures, judge, folder, mask)
        run["masked"] = masked | {"held_out_loss": run["held_out_loss"]}
        plain = folder / "runs" / f"{out.name}-plain"
        shutil.rmtree(plain, ignore_errors=True)
        unchanged = {"max_train_steps": 1, "learning_rate": 0, "lr_warmup_steps": 0}
        call(task.script, network_weights=out, output_dir=plain, **common | unchanged)
        run["held_out_loss"] = describe_run(setting, seed, plain)["held_out_losses"][0]
    return run | {"seconds": time.perf_counter() - begin}


def read_records(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def describe_run(setting: Setting, seed: int, out: Path) -> dict[str, Any]:
    """What the folder of a run tells, without the measures of its samples."""
    losses = {
        record["step"]: record.get("held_out_loss_ema", record["held_out_loss"])
        for record in read_records(out)
        if "held_out_loss" in record
    }
    weights = load_file(out / "pytorch_lora_weights.safetensors")
    return {
        "setting": setting.name,
        "folder": out.name,
        "flags": setting.flags,
        "seed": seed,
        "held_out_loss": losses[max(losses)],
        "held_out_losses": losses,
        "steps": max(losses),
        "weights": sum(weight.numel() for weight in weights.values()),
        "commit": find_commit(),
        "machine": bench.machine(),
    }


def measure(
    task: Toy, seed: int, base: Path, out: Path, pictures: list[Picture], judge: nn.Module,
    folder: Path, mask: Callable | None = None,
) -> dict[str, float]:  # fmt: skip
    """Draw with a LoRA, and compare: with the subject, with training pictures, with the base.

    mask: `mask_ranks` of patches/t_lora.diff.
    """
    rows = choose_held_out(folder / "latents", seed, task.held_out)
    held_out = [picture for i, picture in enumerate(pictures) if i in rows]
    trained = torch.stack([each.image for i, each in enumerate(pictures) if i not in rows])
    pipeline = task.load(base, out)
    if mask:
        mask(pipeline.unet, pipeline.scheduler.config.num_train_timesteps)
    drawn = draw(task, pipeline, [picture.caption for picture in held_out] + task.further)
    others = draw(task, pipeline, task.others)
    save_image(torch.cat([drawn, others]) / 255, out / "samples.png", nrow=10)
    with torch.no_grad():
        shows = judge(drawn / 255).argmax(dim=1) == task.subject
    asked = torch.stack([picture.image for picture in held_out])
    nearest = [
        measure_errors(drawn[: task.held_out], each).amin(dim=1) for each in (trained, asked)
    ]
    path = folder / "base.pt"
    if not path.exists():
        torch.save(draw(task, task.load(base, None), task.others), path)
    change = others.float() - torch.load(path)
    return {
        "subject": shows.float().mean().item(),
        "copy": (nearest[0] < nearest[1]).float().mean().item(),
        "prior": change.abs().mean().item(),
    }


def measure_errors(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Distances of images uint8 [N, C, H, W] and [M, C, H, W], [N, M]."""
    return torch.cdist(one.flatten(1).float(), other.flatten(1).float())


def choose_held_out(latents: Path, seed: int, count: int = HELD_OUT) -> list[int]:
    """The rows that a trainer holds out, as `hold_out` chooses them."""
    names = datasets.load_from_disk(str(latents))["key"]
    return np.sort(hash_names(names, seed).argsort()[:count]).tolist()


def find_commit() -> str:
    done = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=bench.ROOT, capture_output=True, text=True
    )
    return done.stdout.strip()


# -------------------------------------------------------------------------------------------------
# a published model

OTHERS = ["a photo of a cat", "a portrait of a woman", "a street in the rain", "a bowl of fruit"]


def describe_published(base: str, prompt: str) -> tuple[Path, Task]:
    """The recipe of a model of families/lora_settings.py, and its task."""
    from memory import MODELS, count_adapter  # here, because it imports much

    from diffusion_training.families.lora_layers import LAYERS
    from diffusion_training.families.lora_settings import SETTINGS

    recipes = sorted((bench.ROOT / "recipes").glob(f"{base}_lora*.args"))
    if base not in SETTINGS or not recipes or SETTINGS[base].title not in MODELS:
        sys.exit(f"--base {base} has no recipe, settings and sizes here: see docs/lora-settings.md")
    settings = SETTINGS[base]
    sets = ["attention", "attention_mlp"] + ["all"] * bool(LAYERS[settings.denoiser].further)
    sizes = {each: count_adapter(settings.title, each) for each in sets}  # of rank 1
    steps = 960 // settings.images
    return recipes[0], Task(
        script="train_flow" if settings.timesteps else "train_text_to_image",
        layers={
            each: (each, round(settings.rank * sizes[settings.layers] / size))
            for each, size in sizes.items()
        },
        rates=tuple(float(f"{settings.learning_rate * rate / RATES[0]:.2g}") for rate in RATES),
        flags={
            "instance_prompt": prompt, "resolution": 512, "total_batch_size": settings.images,
            "max_train_steps": steps, "validation_steps": steps // 6, "metric_steps": steps,
            "num_metric_images": 16, "validation_metrics": ["dino-i", "copy"],
            "num_validation_images": 1,
        },
        further=[prompt, f"{prompt} on a beach"],
        others=OTHERS,
    )  # fmt: skip


def run_published(
    task: Task, recipe: Path, pictures: Path, more: list[str], folder: Path, setting: Setting,
    seed: int,
) -> dict[str, Any]:  # fmt: skip
    """Train in a process of its own, or go on, and read the measures of the trainer."""
    out = folder / "runs" / name_run(setting, seed)
    flags = task.flags | setting.flags | {
        "train_data_dir": pictures, "output_dir": out, "holdout": HELD_OUT, "seed": seed,
        "validation_prompts": task.further + task.others, "report_to": "none",
        "resume_from_checkpoint": "latest",
    }  # fmt: skip
    begin = time.perf_counter()
    words = [f"{bench.ROOT / task.script}.py", f"@{recipe}", *write_flags(flags), *more]
    if status := subprocess.run([sys.executable, *words]).returncode:
        raise SystemExit(status)
    records = read_records(out)
    run = describe_run(setting, seed, out)
    found = {name: value for record in records for name, value in record.items()}  # the last ones
    speeds = [record["images_per_second"] for record in records if "images_per_second" in record]
    run["step_seconds"] = task.flags["total_batch_size"] / statistics.median(speeds)
    run |= {"subject": found["dino-i"], "copy": found["copy"], "prior": measure_change(task, out)}
    return run | {"seconds": time.perf_counter() - begin}


def measure_change(task: Task, out: Path) -> float:
    """How far the last samples of the other prompts are from the base's, in color values."""
    paths = sorted((out / "samples").glob("step-*.png"))
    before, after = (np.asarray(Image.open(paths[i]), float) for i in (0, -1))
    side = len(before) // len(task.further + task.others)  # a row for each prompt
    change = np.abs(after - before)[-side * len(task.others) :, -side:]
    return change.mean()


# -------------------------------------------------------------------------------------------------
# the list, the tables


def find_settings(task: Task, names: list[str]) -> list[Setting]:
    """The settings of some names: those of the grid, and their single changes."""
    grid = list_grid(task)
    known = {each.name: each for each in grid}
    known |= {each.name: each for one in grid for each in list_changes(one, task)}
    if unknown := [name for name in names if name not in known]:
        sys.exit(f"--only: there is no setting {unknown[0]!r}; all: {', '.join(known)}")
    return [known[name] for name in names]


def plan(task: Task, results: list[dict], seeds: int) -> Iterator[tuple[Setting, int]]:
    """All runs, the most informative first. results: those that are done, which grow meanwhile.

    The grid comes with one seed. Its best setting of each set of layers and the reference then get
    all seeds, the best of these is changed in one respect at a time, and the rest of the grid
    follows.
    """
    grid = list_grid(task)
    yield from ((setting, 0) for setting in grid)
    last = [
        find_best([each for each in grid if each.flags["lora_layers"] == layers], results, [0])
        for layers, _ in task.layers.values()
    ]
    last = list(dict.fromkeys([each.name for each in [grid[0], *last]]))
    finalists = [each for each in grid if each.name in last]
    for seed in range(1, seeds):
        yield from ((setting, seed) for setting in finalists)
    changes = list_changes(find_best(finalists, results, range(seeds)), task)
    for seed in range(seeds):
        yield from ((setting, seed) for setting in changes)
    for seed in range(1, seeds):
        yield from ((setting, seed) for setting in grid if setting not in finalists)


def mean_with_interval(values: list[float], digits: int) -> str:
    """The mean of several seeds with Student's 95 % interval."""
    mean = statistics.mean(values)
    if len(values) == 1:
        return f"{mean:.{digits}f}"
    half = STUDENT[len(values)] * statistics.stdev(values) / len(values) ** 0.5
    return f"{mean:.{digits}f} ± {half:.{digits}f}"


def reach(run: dict, loss: float) -> int | None:
    """The first measured step with this held-out loss; None if it is never reached."""
    reached = [int(step) for step, value in run["held_out_losses"].items() if value <= loss]
    return min(reached, default=None)


HEADER = [
    "setting", "seeds", "weights", "held-out loss", "loss / reference", "steps to reference",
    "seconds to reference", "subject", "copy", "prior", "commit",
]  # fmt: skip


def make_table(task: Task, results: list[dict]) -> list[list[str]]:
    """A row for each setting, the lowest held-out loss first."""
    results = results + [
        run | run["masked"] | {"setting": f"{run['setting']}, masked"}
        for run in results
        if "masked" in run
    ]
    reference = list_grid(task)[0].name
    goals = {run["seed"]: run["held_out_loss"] for run in results if run["setting"] == reference}
    rows = []
    for name in dict.fromkeys(run["setting"] for run in results):
        runs = [run for run in results if run["setting"] == name]
        pairs = [(run, goals[run["seed"]]) for run in runs if run["seed"] in goals]
        steps = [reach(run, goal) for run, goal in pairs]
        seconds = [
            step * run["step_seconds"] for (run, _), step in zip(pairs, steps, strict=True) if step
        ]
        columns = [[run[name] for run in runs] for name in ("subject", "copy", "prior")]
        mean = statistics.mean(run["held_out_loss"] for run in runs)
        row = [
            name if name != reference else f"{name} (reference)",
            str(len(runs)),
            f"{runs[0]['weights']:,}",
            mean_with_interval([run["held_out_loss"] for run in runs], 4),
            mean_with_interval([run["held_out_loss"] / goal for run, goal in pairs], 2)
            if pairs
            else "",
            ", ".join(str(step or "never") for step in steps),
            f"{statistics.mean(seconds):.0f}" if len(seconds) == len(steps) > 0 else "",
            *(mean_with_interval(values, 2 if i < 2 else 1) for i, values in enumerate(columns)),
            ", ".join(dict.fromkeys(run["commit"] for run in runs)),
        ]
        rows.append((mean, row))
    return [row for _, row in sorted(rows)]


def read_runs(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def keep_runs(folder: Path) -> None:
    """Add what the tables show of the runs in --output_dir to RUNS, with five decimals."""
    for log in sorted(folder.glob("*/results.jsonl")):
        path = RUNS / f"{log.parent.name}.jsonl"
        runs = {}
        for run in read_runs(path) + read_runs(log):
            shown = json.dumps({name: run[name] for name in SHOWN if name in run})
            rounded = json.loads(shown, parse_float=lambda number: round(float(number), 5))
            runs[run["setting"], run["seed"]] = json.dumps(rounded) + "\n"
        path.write_text("".join(runs.values()))


def make_ratios(names: list[str]) -> list[list[str]]:
    """T-LoRA divided by the ordinary LoRA of the same pictures and seed, over files of RUNS."""
    pairs = []
    for name in names:
        runs = {(run["setting"], run["seed"]): run for run in read_runs(RUNS / f"{name}.jsonl")}
        for (setting, seed), run in runs.items():
            if "masked" in run:
                pairs.append((run, runs[setting.removesuffix(", T-LoRA"), seed]))
    rows = [["T-LoRA / ordinary LoRA", "pairs", "held-out loss", "subject", "prior"]]
    for title, masked in (("as other programs load it", False), ("with its mask", True)):
        row = [title, str(len(pairs))]
        for name in ("held_out_loss", "subject", "prior"):
            ratios = [
                (run["masked"] if masked else run)[name] / ordinary[name] for run, ordinary in pairs
            ]
            row.append(mean_with_interval(ratios, 2))
        rows.append(row)
    return rows


def fill_tables(page: str) -> str:
    """Put the tables of the runs in RUNS between their marks in a page."""
    tables = {mark: [HEADER] for mark in TABLES} | {"ratios": make_ratios(TABLES["few"])}
    for mark, names in TABLES.items():
        for name in names:
            task, _, few = name.partition("-")
            for setting, *figures in make_table(TASKS[task], read_runs(RUNS / f"{name}.jsonl")):
                tables[mark].append([f"from {few}: {setting}" if few else setting, *figures])
    for mark, rows in tables.items():
        lines = [f"| {' | '.join(row)} |" for row in rows]
        table = "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:], ""])
        place = rf"(?<=<!-- speedrun {mark} -->\n).*?(?=<!-- end -->)"
        page = re.sub(place, lambda _, table=table: table, page, count=1, flags=re.S)
    return page


def write_report(task: Task, results: list[dict], folder: Path) -> None:
    """Write report.html, with the samples of each setting's first run."""
    cells = "".join(f"<th>{html.escape(name)}" for name in [*HEADER, "samples"])
    lines = [f"<!doctype html><meta charset=utf-8><title>Speedrun</title><table><tr>{cells}"]
    for row in make_table(task, results):
        name = row[0].removesuffix(" (reference)").removesuffix(", masked")
        run = next(run for run in results if run["setting"] == name)
        cells = "".join(f"<td>{html.escape(cell)}" for cell in row)
        source = html.escape(f"runs/{run['folder']}/samples.png")
        lines.append(f'<tr>{cells}<td><img src="{source}" width=640>')
    rows = f"the rows: held-out captions; {', '.join(task.further)}; {', '.join(task.others)}"
    lines.append(f"</table><p>Samples, {html.escape(rows)}")
    (folder / "report.html").write_text("\n".join(lines) + "\n")


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--task", choices=TASKS, default="ducks")
    parser.add_argument("--few", type=int, help="train on so many pictures, such as 3, and not 20")
    parser.add_argument("--base", help="train this model of docs/lora-settings.md, such as z_image")
    parser.add_argument("--pictures", type=Path, help="with --base, a folder of about 30 pictures")
    parser.add_argument("--prompt", default="a photo of sks dog", help="with --base, the caption")
    parser.add_argument("--seeds", type=int, choices=[1, *STUDENT], default=3)
    parser.add_argument("--only", nargs="+", help="settings to run, in place of the whole list")
    parser.add_argument("--steps", type=int, help="fewer than the task's, for a test")
    parser.add_argument("--hours", type=float, help="begin no run after so many hours")
    parser.add_argument("--report", action="store_true", help="run nothing, print the table")
    parser.add_argument("--page", action="store_true", help="write the tables of benchmarks.md")
    parser.add_argument("--output_dir", type=Path, default=Path("speedrun"))
    cli, more = parser.parse_known_args(argv)
    if cli.page:
        keep_runs(cli.output_dir)
        PAGE.write_text(fill_tables(PAGE.read_text()))
        return
    if cli.base and cli.few:
        parser.error("--few is for --task")
    if cli.base and (cli.report or cli.pictures):
        recipe, task = describe_published(cli.base, cli.prompt)
    elif cli.base or more:
        parser.error("--base needs --pictures" if cli.base else f"there is no flag {more[0]}")
    else:
        task = TASKS[cli.task]
    if cli.few:
        task = replace(task, held_out=HELD_OUT + 20 - cli.few)
    if cli.steps:
        task = replace(task, flags=task.flags | {"max_train_steps": cli.steps})
    name = (cli.base or cli.task) + (f"-{cli.few}" if cli.few else "")
    folder = cli.output_dir.absolute() / name
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "results.jsonl"
    results = read_runs(log)
    if not cli.report:
        print(bench.machine())
        if isinstance(task, Toy):
            do_run = open_toy(task, folder)
        else:
            do_run = partial(run_published, task, recipe, cli.pictures.absolute(), more, folder)
        run_all(cli, task, do_run, results, folder)
    if not results:
        sys.exit(f"{log} has no runs yet")
    bench.show(f"{name}; {bench.machine()}", HEADER, make_table(task, results))
    print(f"Look at {folder / 'report.html'}")


def run_all(
    cli: argparse.Namespace, task: Task, do_run: Callable[[Setting, int], dict],
    results: list[dict], folder: Path,
) -> None:  # fmt: skip
    """Do the runs that are missing, and append each to `results` and its file."""
    end = time.monotonic() + 3600 * (cli.hours or 10**6)
    runs = plan(task, results, cli.seeds)
    if cli.only:
        chosen = find_settings(task, cli.only)
        runs = ((setting, seed) for seed in range(cli.seeds) for setting in chosen)
    for setting, seed in runs:
        if find_runs(results, setting.name, [seed]):
            continue
        if time.monotonic() > end:
            return
        try:
            run = do_run(setting, seed)
        except SystemExit as stop:
            if stop.code != 1:  # a signal, or a wrong flag
                raise
            continue  # the trainer has said why, such as a missing package
        results.append(run)
        with (folder / "results.jsonl").open("a") as file:
            file.write(json.dumps(run) + "\n")
        write_report(task, results, folder)
        figures = ", ".join(f"{name} {run[name]:.3g}" for name in MEASURES)
        print(f"{setting.name}, seed {seed}: {figures}", flush=True)


if __name__ == "__main__":
    main()
