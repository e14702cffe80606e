"""Distances between sets of features of images: FID, KID, cosines, and their intervals."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F

MAX_FEATURES = 10_000  # features that KID compares; it does not depend on their number


def measure_kid(
    real: torch.Tensor, fake: torch.Tensor, resamples: int = 0
) -> tuple[float, list[float] | None]:
    """The KID (arXiv:1801.01401) of two sets of features [N, D], and its interval.

    It is the unbiased estimate from all pairs, with the paper's cubic kernel.
    """
    real, fake = real[:MAX_FEATURES].double(), fake[:MAX_FEATURES].double()

    def compare(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return (one @ other.T / one.shape[1] + 1) ** 3

    within = [compare(real, real), compare(fake, fake)]
    between = compare(real, fake)

    def estimate(*numbers: torch.Tensor) -> float:
        counts = []
        total = 0.0
        for drawn, kernel in zip(numbers, within, strict=True):
            count = torch.bincount(drawn, minlength=len(kernel)).double()  # times each is drawn
            of_itself = count @ kernel.diagonal()
            total += ((count @ kernel @ count - of_itself) / (len(drawn) * (len(drawn) - 1))).item()
            counts.append(count)
        pairs = len(numbers[0]) * len(numbers[1])
        return total - 2 * (counts[0] @ between @ counts[1]).item() / pairs

    sets = [torch.arange(len(part)) for part in (real, fake)]
    value = estimate(*sets)
    return value, bootstrap_interval(value, estimate, sets, resamples)


def measure_fid(
    real: torch.Tensor, fake: torch.Tensor, resamples: int = 0
) -> tuple[float, list[float] | None]:
    """The FID (arXiv:1706.08500) of two sets of features [N, D], and its interval.

    It is computed from singular values, which is much faster than a root of a matrix.
    """

    def estimate(*sets: torch.Tensor) -> float:
        means = [part.double().mean(dim=0) for part in sets]
        roots = []
        for part, mean in zip(sets, means, strict=True):
            root = (part - mean) / (len(part) - 1) ** 0.5
            is_tall = len(root) > root.shape[1]
            roots.append(torch.linalg.qr(root, mode="r").R if is_tall else root)
        # trace of the root of the covariances' product
        shared = torch.linalg.svdvals(roots[0] @ roots[1].T).sum()
        distance = (means[0] - means[1]).square().sum()
        return (distance + sum(root.square().sum() for root in roots) - 2 * shared).item()

    value = estimate(real, fake)
    return value, bootstrap_interval(value, estimate, (real, fake), resamples)


def average(values: torch.Tensor, resamples: int = 0) -> tuple[float, list[float] | None]:
    """The mean of values [N], and its interval."""
    value = values.mean().item()
    return value, bootstrap_interval(value, lambda drawn: drawn.mean().item(), (values,), resamples)


def bootstrap_interval(
    value: float, function: Callable[..., float], sets: Sequence[torch.Tensor], resamples: int
) -> list[float] | None:
    """Estimate a metric's 95 % interval by the bootstrap: its spread over other sets of this size.

    Drawing with replacement raises FID and KID, because a resample contains duplicates. So the
    spread of the resamples is measured around their mean and applied to `value`. Returns None
    without resamples.
    """
    if not resamples:
        return None
    generator = torch.Generator().manual_seed(0)

    def draw(part: torch.Tensor) -> torch.Tensor:
        return part[torch.randint(len(part), (len(part),), generator=generator)]

    drawn = np.array([function(*map(draw, sets)) for _ in range(resamples)])
    return [value + float(end) for end in np.quantile(drawn, [0.025, 0.975]) - drawn.mean()]


def cosines(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The cosines of all pairs of two sets of features, [N, M]."""
    return F.normalize(one.double()) @ F.normalize(other.double()).T
