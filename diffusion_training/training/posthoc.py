"""Post-hoc EMA: averages of any width, made after the training (arXiv:2312.02696, section 3).

    python -m diffusion_training.training.posthoc flow-photos --sigma_rel 0.05 0.10 \\
        --output_dir flow-widths

Input: the output folder of a run with --posthoc_ema, whose snapshots are in posthoc_ema/.
Output: the pipeline of the run with weights of each width, in a folder sigma_rel-0.05 and so on.

A width sigma_rel is a share of the run: 0.10 averages over about the last tenth. Weights at n
images count in proportion to n ** gamma. Any such average is nearly a sum of the snapshots.
"""

import json
import shutil
from argparse import Namespace
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import diffusers
import numpy as np
import torch
from accelerate.utils import broadcast
from safetensors import safe_open
from safetensors.torch import save_file

from diffusion_training.arguments import PATH, make_parser, number
from diffusion_training.batches import Models
from diffusion_training.errors import explained, fail, in_one_sentence
from diffusion_training.files import delete, saving, sort_header
from diffusion_training.models import move_averages, start_average

FOLDER = "posthoc_ema"  # in the output folder of a run
LOSSES = "held_out.json"  # in it: the held-out losses of some widths
WIDTHS = (0.02, 0.03, 0.05, 0.07, 0.1, 0.14, 0.2, 0.25)  # whose held-out loss is measured


# -------------------------------------------------------------------------------------------------
# widths


def find_exponent(sigma_rel: float) -> float:
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


class PosthocEma:
    """The averages of a run with --posthoc_ema, each with its own width.

    averages: {sigma_rel: {name: the average of a model}}. images: how many were trained on.
    """

    def __init__(self, models: Models, widths: Iterable[float]) -> None:
        self.averages = {width: start_average(models) for width in widths}
        self.gammas = {width: find_exponent(width) for width in self.averages}
        self.images = 0
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

    def update(self, models: Models, images: int) -> None:
        """Move the averages towards the trained weights, after a step on so many images."""
        self.images += images
        for width, averages in self.averages.items():
            decay = (1 - images / self.images) ** (self.gammas[width] + 1)
            move_averages(averages, models, decay)

    def copy(self) -> dict[str, tuple[dict[str, torch.Tensor], dict[str, str]]]:
        """{name of a file: (weights in float16 on the CPU, header)} of a snapshot."""
        return {
            f"{name}-{width:g}.safetensors": (
                {key: model.get_parameter(key).half().cpu() for key in self.trained[name]},
                {"model": name, "sigma_rel": f"{width:g}", "images": str(self.images)},
            )
            for width, averages in self.averages.items()
            for name, model in averages.items()
        }

    def reconstruct(self, output_dir: Path, width: float, is_main: bool) -> Models:
        """The average of any width at the end of the run, on all processes.

        It takes the place of one of the averages, which are saved by then. The first process reads
        the snapshots.
        """
        averages = next(iter(self.averages.values()))
        for name, model in averages.items():
            weights: dict[str, torch.Tensor] = {}
            if is_main:
                weights = dict(reconstruct(list_snapshots(output_dir), name, width))
            for key in self.trained[name]:
                weight = model.get_parameter(key).data
                if is_main:
                    weight.copy_(weights[key])
                broadcast(weight)
        return averages


def write_snapshot(
    output_dir: Path, step: int, files: dict[str, tuple[dict[str, torch.Tensor], dict[str, str]]]
) -> None:
    """Write the files of `PosthocEma.copy` into a folder, completely or not at all."""
    folder = output_dir / FOLDER
    folder.mkdir(exist_ok=True)
    path = folder / f"step-{step:07d}"
    with saving(folder, path) as unfinished:
        (unfinished / path.name).mkdir()
        for name, (weights, header) in files.items():
            save_file(weights, unfinished / path.name / name, header)
            sort_header(unfinished / path.name / name)  # its order is random


def find_snapshots(output_dir: str | Path) -> list[Path]:
    """The files of all snapshots of a run, in the order of their steps."""
    return sorted(Path(output_dir, FOLDER).glob("step-*/*.safetensors"))


def prune_snapshots(output_dir: Path, reached: int) -> None:
    """Delete snapshots after the step `reached`, where a resumed run begins; all of them for -1."""
    folder = output_dir / FOLDER
    for path in folder.glob("step-*"):
        if int(path.name.removeprefix("step-")) > reached:
            delete(path)
    delete(folder / LOSSES)


def check_snapshots(
    output_dir: Path, reached: int, widths: Collection[float] | None, every: int
) -> None:
    """Check the snapshots of a run that resumes at the step `reached`.

    widths: --posthoc_ema. every: steps between snapshots.

    It stops with an error if they would end here: averages made of them would not be the result's.
    It prints if the ones before this step are missing.
    """
    steps = [int(path.parent.name.removeprefix("step-")) for path in find_snapshots(output_dir)]
    has_snapshots = any(step <= reached for step in steps)
    if has_snapshots and not widths:
        fail(
            f"{output_dir} has snapshots of --posthoc_ema, which would end at step {reached}: give "
            f"this flag again, or move {output_dir / FOLDER} away"
        )
    if widths and every <= reached and not has_snapshots:
        print(
            f"{output_dir} has no snapshots of --posthoc_ema up to step {reached}, so averages of "
            f"large widths will not be exact: copy {FOLDER}/ there before the run resumes"
        )


def write_losses(output_dir: Path, step: int, losses: dict[float, float]) -> float:
    """Write the held-out losses of some widths. Returns the width with the lowest."""
    best = min(losses, key=lambda width: losses[width])
    content = {"step": step, "held_out_loss": {f"{w:g}": loss for w, loss in losses.items()}}
    folder = output_dir / FOLDER
    with saving(folder, folder / LOSSES) as unfinished:
        (unfinished / LOSSES).write_text(json.dumps(content | {"best": best}, indent=2))
    return best


# -------------------------------------------------------------------------------------------------
# after it


class SnapshotFile(NamedTuple):
    """One average of one model at one step."""

    path: Path
    model: str
    gamma: float
    images: int


def list_snapshots(output_dir: str | Path) -> list[SnapshotFile]:
    """The files of all snapshots of a run, in the order of their steps."""
    found = []
    for path in find_snapshots(output_dir):
        with explained(f"{path} can't be read"), safe_open(path, "pt") as file:
            header = file.metadata()
            gamma = find_exponent(float(header["sigma_rel"]))
            found.append(SnapshotFile(path, header["model"], gamma, int(header["images"])))
    return found


def reconstruct(
    snapshots: list[SnapshotFile], model: str, sigma_rel: float
) -> Iterator[tuple[str, torch.Tensor]]:
    """Each weight of the average of a model at the last snapshot, float32, by its name."""
    own = [snapshot for snapshot in snapshots if snapshot.model == model]
    images = [snapshot.images for snapshot in own]
    gammas = [snapshot.gamma for snapshot in own]
    counts = solve(images, gammas, max(images), find_exponent(sigma_rel))
    files = [safe_open(snapshot.path, "pt") for snapshot in own]
    for key in files[0].keys():
        parts = zip(counts, files, strict=True)
        yield key, sum(count * file.get_tensor(key).double() for count, file in parts).float()


def write_pipeline(
    run: Path, snapshots: list[SnapshotFile], width: float, output_dir: Path
) -> None:
    """Write the pipeline of a run with the weights of a width."""
    index = json.loads((run / "model_index.json").read_text())
    parts = {name: entry for name, entry in index.items() if (run / name).is_dir()}
    models = {snapshot.model for snapshot in snapshots} & parts.keys()
    with saving(output_dir.parent, output_dir) as unfinished:
        folder = unfinished / output_dir.name
        folder.mkdir()
        shutil.copy(run / "model_index.json", folder)
        for name in parts.keys() - models:
            shutil.copytree(run / name, folder / name)
        for name in models:
            model = getattr(diffusers, parts[name][1]).from_pretrained(run / name)
            weights = dict(reconstruct(snapshots, name, width))
            if not weights.keys() <= dict(model.named_parameters()).keys():
                raise ValueError(f"the snapshots are of another {name}")
            model.load_state_dict(weights, strict=False)
            model.save_pretrained(folder / name)


def parse_args(argv: list[str] | None = None) -> Namespace:
    parser = make_parser(__file__, __doc__, "docs/training.md")
    add = parser.add_argument_group("post-hoc EMA").add_argument
    add("run", type=PATH, help="output folder of a run with --posthoc_ema")
    add(
        "--sigma_rel",
        type=number(0.005, 0.28),
        nargs="+",
        help="widths (default: the one with the lowest held-out loss, which the run has measured)",
    )
    add("--output_dir", type=PATH, required=True, help="folder for the pipelines")
    return parser.freeze(parser.parse_args(argv))


@in_one_sentence
def main(args: Namespace) -> None:
    run = Path(args.run)
    snapshots = list_snapshots(run)
    if not snapshots:
        fail(f"{run} has no snapshots: train it with --posthoc_ema")
    if not (run / "model_index.json").is_file():
        fail(f"{run} holds no pipeline yet: finish the run first")
    widths = args.sigma_rel
    if widths is None:
        losses = run / FOLDER / LOSSES
        if not losses.is_file():
            fail(f"{run} has no held-out loss of any width: give --sigma_rel")
        widths = [json.loads(losses.read_text())["best"]]
    output_dir = Path(args.output_dir)
    output_dir.mkdir(parents=True, exist_ok=True)
    last = int(snapshots[-1].path.parent.name.removeprefix("step-"))
    for width in widths:
        folder = output_dir / f"sigma_rel-{width:g}"
        write_pipeline(run, snapshots, width, folder)
        print(f"The average of sigma_rel {width:g} at step {last} is in {folder}")


if __name__ == "__main__":
    main(parse_args())
