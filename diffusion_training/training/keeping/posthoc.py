"""Post-hoc EMA: averages of any width, made after the training (arXiv:2312.02696, section 3).

A run with --posthoc_ema writes snapshots of its averages. reconstruct_ema.py reads them.

A width sigma_rel is a share of the run: 0.10 averages over about the last tenth. Weights at n
images count in proportion to n ** gamma. Any such average is nearly a sum of the snapshots.
"""

import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import xxhash
from accelerate.utils import broadcast
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from diffusion_training.arguments import number
from diffusion_training.batches import Models
from diffusion_training.errors.sentences import explained, fail
from diffusion_training.files import delete, saving, sort_header
from diffusion_training.host_memory import HostMemory
from diffusion_training.memory import is_gpu
from diffusion_training.models import AveragedWeights, start_average

FOLDER = "posthoc_ema"  # in the output folder of a run
LOSSES = "held_out.json"  # in it: the held-out losses of some widths
WIDTH = number(0.005, 0.28)  # the widths that are possible here; an argparse type
WIDTHS = (0.02, 0.03, 0.05, 0.07, 0.1, 0.14, 0.2, 0.25)  # whose held-out loss is measured


# -------------------------------------------------------------------------------------------------
# widths


def solve_exponent(sigma_rel: float) -> float:
    """The gamma of a width: the standard deviation of the weights' times, as a share of the run."""
    roots = np.roots([1, 7, 16 - sigma_rel**-2, 12 - sigma_rel**-2])
    return float(roots.real.max())


def correlate(
    images_a: np.ndarray, gamma_a: np.ndarray, images_b: np.ndarray, gamma_b: np.ndarray
) -> np.ndarray:
    """The integral of the product of two profiles, each of which has the integral 1.

    images: where a profile ends. The arrays are broadcast.
    """
    ratio = images_a / images_b
    exponent = np.where(ratio < 1, gamma_b, -gamma_a)
    product = (gamma_a + 1) * (gamma_b + 1) * ratio**exponent
    return product / ((gamma_a + gamma_b + 1) * np.maximum(images_a, images_b))


def solve(images: Sequence[float], gammas: Sequence[float], end: float, gamma: float) -> np.ndarray:
    """How often each snapshot counts in the average that is next to a profile, in float64 [N].

    images, gammas: of the snapshots. end, gamma: of the profile.
    """
    n = np.array(images, np.float64)
    exponents = np.array(gammas, np.float64)
    products = correlate(n[:, None], exponents[:, None], n[None], exponents[None])
    # least squares also solve it if two snapshots are nearly the same
    counts = np.linalg.lstsq(products, correlate(n, exponents, np.float64(end), gamma))[0]
    return counts / counts.sum()


# -------------------------------------------------------------------------------------------------
# in a run


class AverageFile(NamedTuple):
    """What a file of a snapshot holds: the weights of one average of one model, on the CPU."""

    name: str
    weights: dict[str, torch.Tensor]
    header: dict[str, str]


class PosthocEma:
    """The averages of a run with --posthoc_ema, each with its own width.

    averages: {sigma_rel: {name: the average of a model}}. images: how many were trained on.
    """

    def __init__(self, models: Models, widths: Iterable[float]) -> None:
        self.averages = {width: start_average(models) for width in widths}
        self.weights = {
            width: AveragedWeights.of(averaged, models) for width, averaged in self.averages.items()
        }
        self.gammas = {width: solve_exponent(width) for width in self.averages}
        self.images = 0
        self.memory: HostMemory | None = None  # for the copies
        self.trained = {
            name: [key for key, weight in model.named_parameters() if weight.requires_grad]
            for name, model in models.items()
        }

    def models(self) -> Models:
        """The averages as a checkpoint holds them."""
        return {
            f"{name}_posthoc_{width:g}": model
            for width, models in self.averages.items()
            for name, model in models.items()
        }

    def update(self, images: int) -> None:
        """Move the averages towards the trained weights, after a step on so many images."""
        self.images += images
        for width, weights in self.weights.items():
            decay = (1 - images / self.images) ** (self.gammas[width] + 1)
            weights.move(decay)

    def take_memory(self, device: torch.device) -> HostMemory:
        """The memory for copies, in which each snapshot replaces the one before."""
        num_weights = sum(
            model.get_parameter(key).numel()
            for averages in self.averages.values()
            for name, model in averages.items()
            for key in self.trained[name]
        )
        try:
            return HostMemory(2 * num_weights, device)
        except RuntimeError:  # so much can't be pinned: the host waits for each weight
            return HostMemory(0, device)

    def copy(self, device: torch.device) -> Iterator[AverageFile]:
        """Copy the averages in float16, for `write_snapshot`.

        The host does not wait for a GPU before it reads the first file.
        """
        is_async = is_gpu(device)
        self.memory = self.memory or self.take_memory(device)
        self.memory.place = 0, 0
        files = []
        for width, averages in self.averages.items():
            for name, model in averages.items():
                weights = {}
                for key in self.trained[name]:
                    # contiguous, as safetensors needs it
                    weight = model.get_parameter(key).half().contiguous()
                    weights[key] = self.memory.cut(weight).copy_(weight, non_blocking=is_async)
                header = {"model": name, "sigma_rel": f"{width:g}", "images": str(self.images)}
                files.append(AverageFile(f"{name}-{width:g}.safetensors", weights, header))
        if is_async:
            copied = torch.get_device_module(device).current_stream().record_event()

        def list_copied() -> Iterator[AverageFile]:
            if is_async:
                copied.synchronize()
            yield from files

        return list_copied()

    def reconstruct(self, snapshots: list["SnapshotFile"], width: float, is_main: bool) -> Models:
        """The average of any width at the end of the run, on all processes.

        It takes the place of one of the averages, which are saved by then.

        snapshots: see `list_snapshots`. Only the first process reads them.
        """
        averages = next(iter(self.averages.values()))
        for name, model in averages.items():
            weights: dict[str, torch.Tensor] = {}
            if is_main:
                weights = dict(reconstruct(snapshots, name, width))
            for key in self.trained[name]:
                weight = model.get_parameter(key).data
                if is_main:
                    weight.copy_(weights[key])
                broadcast(weight)
        return averages


def write_snapshot(output_dir: Path, step: int, files: Iterable[AverageFile]) -> None:
    """Write the files of `PosthocEma.copy` into a folder, completely or not at all."""
    folder = output_dir / FOLDER
    folder.mkdir(exist_ok=True)
    path = folder / f"step-{step:07d}"
    before = {each.name: each for each in find_snapshots(output_dir)}  # the last of each average
    with saving(folder, path) as unfinished:
        (unfinished / path.name).mkdir()
        for name, weights, header in files:
            header["checksum"] = checksum_average(weights, header)
            if name in before:
                header["before"] = read_header(before[name]).get("checksum", "")
            save_file(weights, unfinished / path.name / name, header)
            sort_header(unfinished / path.name / name)  # its order is random


def checksum_average(weights: dict[str, torch.Tensor], header: dict[str, str]) -> str:
    """xxh3_128 of what the header says of an average, and of its weights."""
    checksum = xxhash.xxh3_128()
    for key in ("model", "sigma_rel", "images"):
        checksum.update(f"{header[key]} ".encode())
    for key in sorted(weights):
        checksum.update(key.encode())
        checksum.update(weights[key].numpy())
    return checksum.hexdigest()


def read_header(path: Path) -> dict[str, str]:
    with safe_open(path, "pt") as file:
        return file.metadata()


def read_step(snapshot: Path) -> int:
    """The step of a snapshot, from the name of its folder."""
    return int(snapshot.name.removeprefix("step-"))


def find_snapshot_folders(output_dir: str | Path) -> list[Path]:
    """The folders of all snapshots of a run, in the order of their steps; others are the user's."""
    paths = sorted(Path(output_dir, FOLDER).glob("step-*"))
    return [path for path in paths if path.name.removeprefix("step-").isdecimal()]


def find_snapshots(output_dir: str | Path) -> list[Path]:
    """The files of all snapshots of a run, in the order of their steps."""
    folders = find_snapshot_folders(output_dir)
    return [path for folder in folders for path in sorted(folder.glob("*.safetensors"))]


def prune_snapshots(output_dir: Path, reached: int) -> None:
    """Delete snapshots after the step `reached`, where a resumed run begins; all of them for -1."""
    for path in find_snapshot_folders(output_dir):
        if read_step(path) > reached:
            delete(path)
    delete(output_dir / FOLDER / LOSSES)


def check_snapshots(
    output_dir: Path, checkpoint: Path, reached: int, widths: Collection[float] | None, every: int
) -> None:
    """Check the snapshots of a run that resumes `checkpoint`, at the step `reached`.

    widths: --posthoc_ema. every: steps between snapshots.

    It stops with an error if they would end here, or may be of another run than the checkpoint:
    averages made of them would not be the result's. It prints if the ones before this step are
    missing.
    """
    steps = [read_step(path.parent) for path in find_snapshots(output_dir)]
    has_snapshots = any(step <= reached for step in steps)
    if has_snapshots and checkpoint.parent.resolve() != output_dir.resolve():
        fail(
            f"{output_dir} has snapshots of --posthoc_ema, and the checkpoint is of another folder "
            f"({checkpoint}): choose another --output_dir. If both are of one run, copy the "
            f"checkpoint to {output_dir} as well"
        )
    if has_snapshots and not widths:
        fail(
            f"{output_dir} has snapshots of --posthoc_ema, which would end at step {reached}: give "
            f"this flag again, or move {output_dir / FOLDER} away"
        )
    if widths and every <= reached and not has_snapshots:
        print(
            f"{output_dir} has no snapshots of --posthoc_ema up to step {reached}, so averages of "
            f"large widths will not be exact: before the run resumes, copy {FOLDER}/ of its run "
            "there, and the checkpoint"
        )


def write_losses(output_dir: Path, step: int, losses: dict[float, float]) -> float:
    """Write the held-out losses of some widths. Returns the width with the lowest."""
    best = min(losses, key=lambda width: losses[width])
    content = {"step": step, "held_out_loss": {f"{w:g}": loss for w, loss in losses.items()}}
    folder = output_dir / FOLDER
    with saving(folder, folder / LOSSES) as unfinished:
        (unfinished / LOSSES).write_text(json.dumps(content | {"best": best}, indent=2))
    return best


def read_best_width(output_dir: Path) -> float:
    """The width with the lowest held-out loss, which the run has measured."""
    losses = output_dir / FOLDER / LOSSES
    if not losses.is_file():
        fail(f"{output_dir} has no held-out loss of any width: give --sigma_rel")
    with explained(f"{losses} can't be read: give --sigma_rel"):
        return WIDTH(json.loads(losses.read_text())["best"])


# -------------------------------------------------------------------------------------------------
# after it


class SnapshotFile(NamedTuple):
    """One average of one model at one step."""

    path: Path
    model: str
    gamma: float
    images: int


def list_snapshots(output_dir: str | Path) -> list[SnapshotFile]:
    """The files of all snapshots of a run, in the order of their steps.

    Stops with an error if one is damaged, or does not follow the one before it in the same run.
    Those that were written before they had checksums are not compared.
    """
    found = []
    last: dict[str, str] = {}  # {name of a file: the checksum of the last one}
    for path in find_snapshots(output_dir):
        with explained(f"{path} can't be read"):
            header = read_header(path)
            checksum = header.get("checksum", "")
            if checksum and checksum != checksum_average(load_file(path), header):
                raise ValueError("it has changed since it was written: copy it again")
            gamma = solve_exponent(WIDTH(header["sigma_rel"]))
            images = number(1, 2**63, int)(header["images"])
            found.append(SnapshotFile(path, header["model"], gamma, images))
        if header.get("before", "") != last.get(path.name, ""):
            fail(
                f"{path} does not follow the snapshots before it: some are missing, or are of "
                "another run. Copy those of its run there"
            )
        last[path.name] = checksum
    return found


def reconstruct(
    snapshots: list[SnapshotFile], model: str, sigma_rel: float
) -> Iterator[tuple[str, torch.Tensor]]:
    """Each weight of the average of a model at the last snapshot, float32, by its name."""
    own = [snapshot for snapshot in snapshots if snapshot.model == model]
    images = [snapshot.images for snapshot in own]
    gammas = [snapshot.gamma for snapshot in own]
    counts = solve(images, gammas, max(images), solve_exponent(sigma_rel))
    files = [safe_open(snapshot.path, "pt") for snapshot in own]
    for key in files[0].keys():
        parts = zip(counts, files, strict=True)
        yield key, sum(count * file.get_tensor(key).double() for count, file in parts).float()
