"""The held-out loss: images set aside, and a loss on them that can be compared between runs."""

from typing import Any

import datasets
import numpy as np
import torch
import xxhash
from accelerate import Accelerator
from accelerate.utils import gather_object

from diffusion_training.batches import Models, Objective, TrainingData
from diffusion_training.draws import step_seed
from diffusion_training.errors.sentences import fail
from diffusion_training.launch import Launch
from diffusion_training.loading import load_batches
from diffusion_training.memory import move
from diffusion_training.order import Stream, hash_names
from diffusion_training.stopping import StopSignal


def hold_out(
    accelerator: Accelerator, dataset: Any, holdout: float, seed: int
) -> tuple[Any, dict[int, int]]:
    """Split a data set: (numbers of the rows to train on, {number: hash} of held-out rows).

    Each row has a hash of the seed and its name. The rows with a hash below the share `holdout` are
    held out or, if that is a number of rows, those with the lowest hashes. So added or removed
    images do not move others. With the order `ranges`, whole shards are chosen first.
    """
    if has_ranges(dataset):
        return dataset.hold_out(accelerator, holdout, seed)
    if isinstance(getattr(dataset, "rows", None), datasets.IterableDataset):
        # a stream holds no images out; its flags were checked for that
        return Stream(dataset.rows, dataset.shuffle_buffer), {}
    if not holdout:
        return np.arange(len(dataset)), {}
    every = hash_names(dataset.names(), seed)
    # of caches with the same images in several sizes, the first is measured
    measured = np.ones(len(every), bool)
    for group in getattr(dataset, "groups", ()):
        for cache in group[1:]:
            end = dataset.cache_ends[cache]
            measured[dataset.cache_ends[cache - 1] : end] = False
    hashes = every[measured]
    count = int(holdout if holdout >= 1 else (hashes < holdout * 2.0**64).sum())
    # rows with the same name, as --folder_repeats makes them, stay together
    if 0 < count < len(hashes):
        count = int((hashes <= np.sort(hashes)[count - 1]).sum())
    if not 0 < count < len(hashes):
        fail(
            f"--holdout {holdout:g} sets {count} of {len(hashes)} images aside: choose another "
            "share or number"
        )
    accelerator.print(f"Held out: {count} of {len(hashes)} images")
    is_held_out = every <= np.sort(hashes)[count - 1]
    held_out = np.flatnonzero(is_held_out & measured)
    held_out = held_out[every[held_out].argsort()]
    return np.flatnonzero(~is_held_out), {int(row): int(every[row]) for row in held_out}


def has_ranges(dataset: Any) -> bool:
    """Whether a data set has the order `ranges`, which holds out whole shards."""
    return bool(getattr(dataset, "order", None))


def describe_held_out(
    accelerator: Accelerator, dataset: TrainingData, held_out: dict[int, int], holdout: float
) -> dict[str, Any]:
    """Describe the held-out rows for a checkpoint, in the same way on all processes.

    held_out: a hash of their images ("of": "images") or latents. With it, a resumed run finds out
        whether it would train on them, even if they were renamed.
    held_out_below: exactly the rows with a hash below this number were held out. None if whole
        shards were.
    """
    if not held_out:
        return {"held_out": None, "held_out_below": 0}
    below = None
    if not has_ranges(dataset):
        below = int(holdout * 2.0**64) if holdout < 1 else max(held_out.values()) + 1
    digests: list[str] = []
    if accelerator.is_main_process:
        of_rows = " ".join(sorted(map(dataset.digest, held_out)))
        digests = [xxhash.xxh3_128_hexdigest(of_rows.encode())]
    digest = gather_object(digests)[0]
    return {"held_out": {"of": dataset.holds, "digest": digest}, "held_out_below": below}


def log_held_out_loss(
    launch: Launch,
    records: Any,
    dataset: TrainingData,
    held_out: dict[int, int],
    models: dict[str, Models],
    objective: Objective,
    stop_signal: StopSignal,
    step: int,
) -> None:
    """Record the held-out loss at a step, unless a signal comes; see `measure_held_out_losses`.

    models: {"held_out_loss": the models, "held_out_loss_ema": their averages, if there are any}.
    """
    if not held_out or records.held_out.get("step") == step:
        return
    losses = measure_held_out_losses(
        launch, records, dataset, held_out, models, objective, stop_signal
    )
    if losses is None:
        return
    record = {name: sum(of_levels) / 9 for name, of_levels in losses.items()}
    # by level of noise, for the weights that are saved
    *_, saved = losses.values()
    record |= {f"held_out_loss_t0.{i}": loss for i, loss in enumerate(saved, 1)}
    records.add_held_out(step, record)


@torch.no_grad()
def measure_held_out_losses(
    launch: Launch,
    records: Any,
    dataset: TrainingData,
    held_out: dict[int, int],
    models: dict[str, Models],
    objective: Objective,
    stop_signal: StopSignal,
) -> dict[str, list[float]] | None:
    """Measure mean squared errors that can be compared between runs.

    It is the mean over the held-out images and nine noise levels, .1 to .9: random levels would
    hide any change. All randomness is keyed by seed, image and timestep, and a batch is one image
    at all nine levels. So batch size, number of processes and interruptions do not change the
    result.

    Returns {name in `models`: the error at each of the nine levels}, or None if a signal comes.
    """
    device = launch.device
    modules = [module for group in models.values() for module in group.values()]
    training = [module.training for module in modules]
    for module in modules:
        module.eval()  # without dropout
    tenths = torch.arange(1, 10, device=device)
    rows = sorted(held_out)
    own = launch.share(len(rows))
    # nine losses for each model, number of decoded images, number of images
    sums = torch.zeros(9 * len(models) + 2, device=device)
    keys = [[(None, rows[number % len(rows)], 1.0)] for number in own]
    batches = load_batches(dataset, keys, 0, device)
    for number, batch in zip(own, batches, strict=False):
        if stop_signal.poll():
            break
        row = rows[number % len(rows)]
        torch.manual_seed(held_out[row])  # for the draw from a VAE's distribution
        images, condition, _ = objective.prepare_held_out(batch)
        condition = {name: value.repeat_interleave(9, dim=0) for name, value in condition.items()}
        draws = []
        for level in range(9):
            seed = step_seed("held out", held_out[row], level)
            draws.append(torch.randn(images.shape, generator=torch.Generator().manual_seed(seed)))
        noise = move(torch.cat(draws), device)
        images = images.expand_as(noise)
        noisy_images = objective.held_out_loss.add_noise(images, noise, tenths)
        losses = [
            objective.held_out_loss.error(group, noisy_images, tenths, condition, images, noise)
            for group in models.values()
        ]
        if number >= len(rows):  # repeated, so that all processes measure as many
            continue
        weight = batch["weight"]  # 0 if it can't be decoded
        sums += torch.cat([weight * torch.cat(losses), weight, torch.ones_like(weight)])
        records.new_skipped.update(batch["skipped"])
    for module, was_training in zip(modules, training, strict=True):
        module.train(was_training)
    *losses, weight, tried = launch.accelerator.reduce(sums).tolist()
    if tried < len(held_out):
        return None
    if weight == 0:
        fail(f"none of the {tried:.0f} images that --holdout sets aside could be decoded")
    return {
        name: [loss / weight for loss in losses[9 * index : 9 * index + 9]]
        for index, name in enumerate(models)
    }
