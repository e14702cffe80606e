"""Read metrics.jsonl, and find signs in it that training goes wrong."""

import contextlib
import itertools
import math
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from diffusion_training.arguments import is_address
from diffusion_training.batches import Models, Objective, Prepared
from diffusion_training.files import fits, parse_json

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
MEASURED = {"step": int, "metric_images": int}  # of --validation_metrics
MOST_RECORDS = 50_000  # training records in memory, some 75 MB


def is_valid_field(name: str, value: Any) -> bool:
    """Whether a field of a record is a finite number, or a dict in `signs` and `skipped`."""
    if name in ("signs", "skipped"):
        return fits(value, dict)
    # math.isfinite fails for an int that no float can hold
    return fits(value, int | float) and abs(value) <= sys.float_info.max


def iterate_metrics(output_dir: str | Path, last_step: float = math.inf) -> Iterator[dict]:
    """Read the records of metrics.jsonl up to a step.

    Lines damaged by a kill, a power cut or editing are skipped, and so are fields that are no
    finite numbers, such as a text that a changed script adds.
    """
    path = Path(output_dir) / "metrics.jsonl"
    if not path.is_file():
        return
    with path.open("rb") as file:
        for line in file:
            with contextlib.suppress(ValueError):
                record = parse_json(line)
                if not fits(record, dict):
                    continue
                record = {key: it for key, it in record.items() if is_valid_field(key, it)}
                forms = (TRAINED,) if "loss" in record else (HELD_OUT, MEASURED)
                if fits(record, forms) and record["step"] <= last_step:
                    yield record


def read_metrics(output_dir: str | Path, last_step: float = math.inf) -> list[dict]:
    """Return the records of metrics.jsonl up to a step, or a part of them, for curves and signs.

    Of a long run these are every second, fourth, ... training record and the last one, and the
    first 100 skipped images, so that memory does not grow with the run.
    """
    trained: dict[int, dict] = {}  # {number of the record: record}
    others: dict[int, dict] = {}  # held-out losses, metrics, and records with signs
    newest: dict[int, dict] = {}
    stride, num_skipped = 1, 0
    for number, record in enumerate(iterate_metrics(output_dir, last_step)):
        if skipped := record.get("skipped"):
            record["skipped"] = dict(itertools.islice(skipped.items(), 100 - num_skipped))
            num_skipped += len(record["skipped"])
        newest = {number: record}
        if "loss" not in record or "signs" in record:
            others |= newest
        elif number % stride == 0:
            trained |= newest
            if len(trained) > MOST_RECORDS:
                stride *= 2
                trained = {n: record for n, record in trained.items() if n % stride == 0}
    return [record for _, record in sorted((others | trained | newest).items())]


class Inputs(NamedTuple):
    """Means over the first images, or latents, that the model gets."""

    lowest: float = -1.0  # value of an image
    highest: float = 1.0
    mean_square: float = 1.0


def find_signs(
    records: list[dict],
    inputs: Inputs,
    args: Namespace,
    learned: float = 1.0,
    find_constant_loss: Callable[[], float] = lambda: math.nan,
) -> dict[str, str]:
    """Return signs that training goes wrong, {kind: a sentence that says what to change}.

    A good run has none. Signs that need time are first looked for 100 steps after the warm-up.

    records: those of metrics.jsonl. learned: 0 while a LoRA adds nothing. find_constant_loss:
    returns the loss of a constant prediction.
    """
    records = [
        record for record in records if "loss" in record
    ]  # others hold held-out losses or metrics
    step = records[-1]["step"]
    warmup = args.lr_warmup_steps
    is_late = step >= warmup + 100
    # without the first record: a cold start is slow
    after = [record for record in records[1:] if record["step"] > warmup]
    is_zero = step >= 30 and not any(record["lr"] for record in records)
    signs = {"range": judge_inputs(inputs, "latents_dir" in args)}
    if is_zero:
        signs["zero"] = (
            "the learning rate is 0, so nothing is trained: see --learning_rate and --lr_scheduler"
        )
    elif step >= 100 and learned == 0:
        signs["lora"] = "the LoRA still changes nothing: is a gradient cut off?"
    elif is_late:
        had_time = step >= min(warmup + 1000, args.max_train_steps)
        losses = [record["loss"] for record in after]
        signs |= judge_loss(losses, find_constant_loss() if had_time else math.nan)
    waits = [record["data_wait"] for record in after or records[1:]]
    waiting = sum(waits) / max(1, len(waits))
    if step >= 30 and waiting > (0.05 if is_late else 0.25):
        signs["waiting"] = (
            f"the device waits for data {waiting:.0%} of the time: try {name_faster_reader(args)}"
        )
    return {kind: sentence for kind, sentence in signs.items() if sentence}


def judge_inputs(inputs: Inputs, latents: bool) -> str:
    """Return a sentence if images are not from -1 to 1, or latents are not about 1 in size."""
    low, high, mean_square = inputs
    if latents and not 0.25 < mean_square < 4:
        return (
            f"the latents have a root mean square of {mean_square**0.5:.2g}, "
            "not of about 1: does the VAE's scaling_factor fit?"
        )
    if not latents and (low < -1.01 or high > 1.01 or low > -0.01):
        return (
            f"images have values from {low:.2g} to {high:.2g}, but black is -1 and white 1: "
            "see prepare_batch"
        )
    return ""


def judge_loss(losses: list[float], constant: float) -> dict[str, str]:
    """Return {"high": sentence} if the loss rises, {"nothing": ...} if it stays high, else {}.

    A rate that is too low and one that is far too high may end at the same loss, so only a loss
    that rises has a sentence with a direction. The loss has noise, because timesteps are random,
    so it is compared by the means and standard errors of eighths of the records.

    losses: after the warm-up. constant: the loss of a constant prediction; nan if unknown.
    """
    if len(losses) < 32 or min(losses) <= 0:
        return {}
    eighths = np.array_split(np.log(losses), 8)
    means = np.array([eighth.mean() for eighth in eighths])
    errors = [eighth.std(ddof=1) / math.sqrt(len(eighth)) for eighth in eighths]
    highest = 1 + (means[1:] - np.minimum.accumulate(means)[:-1]).argmax()
    lowest = means[:highest].argmin()  # before it
    rise = means[highest] - means[lowest]
    if rise > max(math.log(1.5), 4 * math.hypot(errors[lowest], errors[highest])):
        rose = f"{math.exp(means[lowest]):.3g} to {math.exp(means[highest]):.3g}"
        return {"high": f"the loss rose from {rose}: try a lower --learning_rate"}
    if math.exp(means[-1] - 2 * errors[-1]) > 0.7 * constant:
        sentence = (
            f"the loss is still {math.exp(means[-1]):.3g}, and a constant prediction gives "
            f"{constant:.3g}: try --find_lr, or more steps"
        )
        return {"nothing": sentence}
    return {}


@torch.no_grad()
def measure_constant(objective: Objective, models: Models, prepared: Prepared) -> float:
    """The loss of the best constant prediction, for any objective; nan if it can't be measured.

    A model that has learned nothing is not better. As a function of the constant, the loss is a
    parabola, so three points are measured, with the same noise and timesteps.
    """

    def predict_constant(constant: torch.Tensor, *inputs: Any) -> torch.Tensor:
        return constant

    images = prepared.clean
    weight = torch.full([len(images)], 1 / len(images), device=images.device)
    losses = torch.zeros(3, device=images.device)
    try:
        for seed in range(32):
            for i, value in enumerate((-1.0, 0.0, 1.0)):
                torch.manual_seed(seed)  # training steps set their own
                predict = partial(predict_constant, torch.full_like(images, value))
                constant = replace(objective, predict=predict)
                losses[i] += constant.loss(models, prepared, weight)
    except Exception:  # only signs need it, and a user's loss may need another prediction
        return math.nan
    low, middle, high = (losses / 32).tolist()
    curvature = (low + high) / 2 - middle
    return middle - (high - low) ** 2 / (16 * curvature) if curvature > 0 else math.nan


def judge_end(records: list[dict]) -> str:
    """Return a sentence if the loss still fell at the end of a run, else "".

    The last two quarters of the records are compared, by their means and standard errors, if the
    learning rate was constant in both: a rate that decays makes the loss fall by itself. A run that
    was too short and a rate that is too low look the same, so the sentence names both.

    records: see `read_metrics`.
    """
    records = [record for record in records if "loss" in record]
    half = records[len(records) // 2 :]
    if len(records) < 32 or len({record["lr"] for record in half}) > 1:
        return ""
    before, last = np.array_split([record["loss"] for record in half], 2)
    errors = [quarter.std(ddof=1) / math.sqrt(len(quarter)) for quarter in (before, last)]
    if before.mean() - last.mean() <= 3 * math.hypot(*errors):
        return ""
    fell = f"from {before.mean():.3g} to {last.mean():.3g} in the second half of the run"
    advice = "train longer, or try a higher --learning_rate"
    return f"\nThe loss was still falling, {fell}: {advice}"


def name_faster_reader(args: Namespace) -> str:
    """What to change so that batches come faster."""
    if vars(args).get("follow"):
        return "a faster maker of the cache: the trainer waits for its shards"
    caches = vars(args).get("latents_dir") or []
    if any(map(is_address, caches)):
        return "a larger --shards_size, so that more is fetched ahead, or a faster network"
    if caches or vars(args).get("cache_images") or vars(args).get("cache_latents"):
        return "a faster disk, or more memory for the system's file cache"
    first = "precompute_latents.py" if "latents_dir" in args else "--cache_images"
    return f"{first}, or more --dataloader_num_workers than {args.dataloader_num_workers}"
