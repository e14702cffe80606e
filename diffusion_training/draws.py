"""Random numbers with keys, so that a resumed run draws the same ones."""

from collections.abc import Sequence

import numpy as np
import torch
import xxhash

Key = tuple[int | None, int, float]  # epoch (None for held-out rows), row, weight
# Version of the keys. A checkpoint or a cache of another version can't be resumed.
KEYS = 2


def step_seed(purpose: str, *key: int) -> int:
    """A 64-bit seed from a purpose and integers: ("step", seed, step, micro-batch, process).

    It is a hash of their text, because numpy's SeedSequence pads keys with zeros: (0, 1) and (0, 1,
    0) would give the same numbers.
    """
    text = " ".join([purpose, *map(str, map(int, key))])
    return xxhash.xxh3_64_intdigest(text.encode())


def seed_generators(seed: int, device: torch.device) -> None:
    """Seed the generators that draw for a device: the host's and its own.

    `torch.manual_seed` asks all kinds of devices, also those that are not there, which takes most
    of its time.
    """
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)


def draw_choices(seed: int, epoch: int | None, row: int) -> np.ndarray:
    """Four numbers in [0, 1) for a row in an epoch: crop position (y, x), mirroring, caption.

    They depend on row and epoch, not on a worker's generator, so a resumed run draws the same ones.
    Epoch None is for held-out rows: the centre, not mirrored, and the caption of epoch 0, as in a
    cache.
    """
    choices = np.random.default_rng(step_seed("image", seed, epoch or 0, row)).random(4)
    return choices if epoch is not None else np.array([0.5, 0.5, 1.0, choices[3]])


def draw_caption(
    seed: int,
    epoch: int | None,
    row: int,
    weights: Sequence[float],
    exists: Sequence[bool] | np.ndarray,
) -> int:
    """Draw the number of a row's caption for an epoch, by weight, from those that exist.

    With epoch None it is the first of these.
    """
    ends = np.where(exists, weights, 0.0).cumsum()
    choice = draw_choices(seed, epoch, row)[3] if epoch is not None else 0.0
    return int(np.searchsorted(ends / ends[-1], choice, side="right"))
