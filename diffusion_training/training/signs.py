"""Read metrics.jsonl, and find signs in it that training goes wrong."""

import contextlib
import json
import math
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from diffusion_training.files import fits
from diffusion_training.remote import is_address

NUMBERS = (
    "epoch",
    "loss",
    "lr",
    "grad_norm",
    "clipped",
    "images_per_second",
    "data_wait",
    "skipped_images",
)
TRAINED = {"step": int} | dict.fromkeys(NUMBERS, int | float)  # fields of a training record
HELD_OUT = {"step": int, "held_out_loss": float}
SAMPLE_SIGNS = {"step": int, "signs": dict}  # fields of a record of signs in samples


def is_valid_field(name: str, value: Any) -> bool:
    """Whether a field of a record is a finite number, or a dict in `signs` and `skipped`."""
    if name in ("signs", "skipped"):
        return fits(value, dict)
    return fits(value, int | float) and math.isfinite(value)


def read_metrics(output_dir: str | Path, last_step: float = math.inf) -> list[dict]:
    """Return the records of metrics.jsonl up to a step.

    Lines damaged by a kill, a power cut or editing are skipped.
    """
    path = Path(output_dir) / "metrics.jsonl"
    records = []
    for line in path.read_bytes().splitlines() if path.is_file() else []:
        with contextlib.suppress(ValueError):
            record = json.loads(line)
            is_record = any(fits(record, fields) for fields in (TRAINED, HELD_OUT, SAMPLE_SIGNS))
            is_valid = is_record and all(map(is_valid_field, record.keys(), record.values()))
            if is_valid and record["step"] <= last_step:
                records.append(record)
    return records


class Course(NamedTuple):
    """How the loss went after the warm-up, by quarters of the later records."""

    first: float = 0.0  # mean of the first quarter
    last: float = 0.0  # mean of the last one
    highest: float = 0.0  # including the warm-up
    error: float = 0.0  # standard error of a quarter's mean, relative
    vanished: bool = False  # whether gradients are less than a fifth of the highest
    best: float = 0.0  # mean of the eighth from which the loss rises most
    worst: float = 0.0  # mean of the eighth to which it rises
    rises: bool = False  # whether the worst is above the best by more than the noise of both


def follow_loss(records: list[dict], after: list[dict]) -> Course | None:
    """Return how the loss went; None if there are too few records, or a loss is not above 0.

    The loss has noise, because timesteps are random. The noise is measured between neighbouring
    records, because the loss without it changes little from one to the next.

    after: the records after the warm-up.
    """
    losses = np.array([record["loss"] for record in after])
    if len(losses) < 8 or losses.min() <= 0:
        return None
    first, *_, last = np.array_split(losses, 4)
    logs = np.log(losses)
    noise = np.median(np.abs(np.diff(logs))) / 0.954  # if it is Gaussian
    now = np.mean([record["grad_norm"] for record in after[-len(last) :]])
    eighths = np.array_split(logs, 8)
    means = np.array([part.mean() for part in eighths])
    errors = [part.std() / math.sqrt(max(1, len(part) - 1)) for part in eighths]
    worst = 1 + (means[1:] - np.minimum.accumulate(means)[:-1]).argmax()
    best = means[:worst].argmin()
    rise = max(math.log(1.5), 4 * math.hypot(errors[best], errors[worst]))
    return Course(
        first=first.mean(),
        last=last.mean(),
        highest=max(record["loss"] for record in records),
        error=noise / math.sqrt(len(last)),
        vanished=bool(now < 0.2 * max(record["grad_norm"] for record in records)),
        best=math.exp(means[best]),
        worst=math.exp(means[worst]),
        rises=len(losses) >= 32 and bool(means[worst] - means[best] > rise),
    )


def find_signs(
    records: list[dict],
    images: Sequence[float] | None,
    args: Namespace,
    learned: float = 1.0,
    costs: Any = None,
    sampled: tuple[int, float] | None = None,
    find_constant_loss: Callable[[], float] = lambda: math.nan,
) -> dict[str, str]:
    """Return signs that training goes wrong, {kind: a sentence that names a flag to change}.

    A good run has none. Signs that need time are first looked for 100 steps after the warm-up.

    records: those of metrics.jsonl.
    images: means over the first images that the model gets: lowest value, highest value, mean
    square, share of one colour, roughness, share with an all-black mask; None if there were none.
    learned: 0 while a LoRA adds nothing.
    costs: `Costs`, if the memory of the device is known.
    sampled: (step, roughness) of the last samples.
    find_constant_loss: returns the loss of a constant prediction.
    """
    # the others hold held-out losses or signs
    records = [record for record in records if "loss" in record]
    last = records[-1]
    low, high, mean_square, flat, rough, masked = images or (-1, 1, 1, 0, 1, 0)
    sampled_at, sampled_rough = sampled or (0, 0)
    latents = "latents_dir" in args
    has_warmup = args.lr_scheduler not in ("constant", "piecewise_constant")
    warmup = args.lr_warmup_steps * has_warmup
    # except the first one: a cold start is slow
    after = [record for record in records[1:] if record["step"] > warmup]
    counted = after or records
    enough = last["step"] >= warmup + 100
    ended = last["step"] >= args.max_train_steps
    soon = len(records) > 1 and last["step"] >= 30  # enough for obvious signs
    clipped = sum(record["clipped"] for record in after) / max(1, len(after))
    waiting = sum(record["data_wait"] for record in counted) / len(counted)
    final_decay = 1 - (1 + args.max_train_steps / args.ema_inv_gamma) ** -args.ema_power
    rest = 1 - min(args.ema_max_decay, final_decay)
    of_peak = last["lr"] / max([record["lr"] for record in records if record["lr"]], default=1)
    caches = vars(args).get("latents_dir") or []
    if any(map(is_address, caches)):
        remedy = "a larger --shards_size, so that more is fetched ahead, or a faster network"
    elif caches or vars(args).get("cache_images"):
        remedy = "a faster disk, or more memory for the system's file cache"
    else:
        remedy = "precompute_latents.py" if latents else "--cache_images"
        remedy += f", or more --dataloader_num_workers than {args.dataloader_num_workers}"
    total = held = 0  # 0: unknown, as for a CPU
    if costs:
        total = costs.total_gb or 0
        held = costs.held
    used = last.get("memory_gb", 0)
    would_fit = int((0.9 * total - held) / max(used - held, 1e-9) * args.train_batch_size)
    noisy = rough < 0.8 and sampled_rough > (1 + rough) / 2
    rates = [record["lr"] for record in records]
    is_zero = soon and not any(rates)
    course = follow_loss(records, after) if enough and any(rates) else None
    constant = find_constant_loss() if course else math.nan
    # hardly better than a model that has learned nothing, within the noise
    poor = course is not None and course.last * (1 - 2 * course.error) > 0.7 * constant
    course = course or Course()
    falls = course.first > course.last * (1 + 6 * course.error)
    settled = poor and (ended or last["step"] >= warmup + 1000)
    spoilt = course.vanished or course.rises or course.highest > 2 * constant
    signs = {
        "idle": (
            soon and 0 < used < 2 / 3 * total and would_fit > args.train_batch_size,
            f"at most {used:.3g} of {total:.3g} GB are in use: "
            f"try --train_batch_size {would_fit}, or no --gradient_checkpointing",
        ),
        "full": (
            total and soon and used > 0.92 * total,
            f"up to {used:.3g} of {total:.3g} GB are in use: "
            "try a lower --train_batch_size, or --gradient_checkpointing",
        ),
        "latents": (
            latents and not 0.25 < mean_square < 4,
            f"the latents have a root mean square of {mean_square**0.5:.2g}, "
            "not of about 1: does the VAE's scaling_factor fit?",
        ),
        "range": (
            not latents and (low < -1.01 or high > 1.01 or low > -0.01),
            f"images have values from {low:.2g} to {high:.2g}, but black is -1 and white 1: "
            "see prepare_batch",
        ),
        "colour": (
            not latents and flat > 0.1,
            f"{flat:.0%} of the images have only one colour: look at the data and --image_column",
        ),
        "masks": (
            masked > 0.1,
            f"the masks of {masked:.0%} of the images are all black, so these images are not "
            "trained on: only white parts are",
        ),
        "noise": (
            noisy and 2 * sampled_at >= args.max_train_steps,
            f"the samples of step {sampled_at} are nearly as rough as noise "
            f"({sampled_rough:.2f}; the data {rough:.2f}, noise 1): "
            "try more steps, or another --learning_rate",
        ),
        "zero": (
            is_zero,
            "the learning rate is 0, so nothing is trained: see --learning_rate and --lr_scheduler",
        ),
        "warmup": (
            ended and soon and last["step"] <= warmup,
            f"the run ends within its warm-up of {warmup} steps: "
            "try --lr_warmup_steps 0.05, or more --max_train_steps",
        ),
        "high": (
            settled and spoilt,
            f"the loss stays high, at {course.last:.3g} (highest: {course.highest:.3g}; a constant "
            f"prediction gives {constant:.3g}): try a lower --learning_rate",
        ),
        "unsteady": (
            course.rises and not settled,
            f"the loss rose from {course.best:.3g} to {course.worst:.3g}, more than its noise: "
            "try a lower --learning_rate",
        ),
        "low": (
            settled and falls and not spoilt,
            f"the loss falls slowly, from {course.first:.3g} to {course.last:.3g} (a constant "
            f"prediction gives {constant:.3g}): try a higher --learning_rate, or more steps",
        ),
        "nothing": (
            settled and not falls and not spoilt,
            f"the loss stays at {course.last:.3g}, and a constant prediction gives {constant:.3g}: "
            "is --learning_rate far too low, or a gradient cut off?",
        ),
        "clipped": (
            (enough or (ended and soon)) and clipped > 0.5 and any(rates) and not poor,
            f"gradients are clipped in {clipped:.0%} of steps: "
            "try a lower --learning_rate, larger batches or a higher --max_grad_norm",
        ),
        "waiting": (
            (enough and waiting > 0.05) or (soon and waiting > 0.25),
            f"the device waits for data {waiting:.0%} of the time: try {remedy}",
        ),
        "ema": (
            enough and args.use_ema and rest * args.max_train_steps < 2.5,
            f"the averaged weights lag behind, with only {args.max_train_steps} steps: "
            "lower --ema_max_decay or --ema_power",
        ),
        "lora": (
            last["step"] >= 100 and learned == 0,
            "the LoRA still changes nothing, all its B are 0: "
            "is --learning_rate 0, or a gradient cut off?",
        ),
        "lr": (
            enough and ended and not args.use_ema and of_peak > 0.1,
            f"the learning rate ends at {of_peak:.0%} of its peak, "
            "so the weights keep the noise of the last steps: "
            "try --lr_scheduler cosine, or --use_ema",
        ),
    }
    return {kind: sentence for kind, (is_wrong, sentence) in signs.items() if is_wrong}
