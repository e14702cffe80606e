"""Write the pipeline of a run with averages (EMA) of any width, after the training.

    python reconstruct_ema.py ddpm-widths --output_dir ddpm-best
    python reconstruct_ema.py ddpm-widths --sigma_rel 0.03 0.15 --output_dir ddpm-others

Input: the output folder of a run with --posthoc_ema, whose snapshots are in posthoc_ema/.
Output: the pipeline of the run with weights of each width, in a folder sigma_rel-0.05 and so on.

A width sigma_rel is a share of the run: 0.10 averages over about the last tenth. The arithmetic
(arXiv:2312.02696, section 3) is in diffusion_training/training/keeping/posthoc.py.
"""

from pathlib import Path

try:
    from diffusion_training import check_version
except ModuleNotFoundError:
    raise SystemExit(
        f"{__file__} needs the package diffusion_training: run `pip install .` in the "
        "script's repository"
    ) from None
check_version("0.1.0", Path(__file__).name)  # first: another version may lack the modules below

import importlib
import json
import shutil
from argparse import Namespace

from diffusion_training.arguments import PATH, make_parser, number


def parse_args(argv: list[str] | None = None) -> Namespace:
    """Parse and check the command line.

    A bad argument stops the script with one line and status 2 before anything is written.
    """
    parser = make_parser(__file__, __doc__, "docs/training.md")
    add = parser.add_argument_group("run").add_argument
    add("run_dir", type=PATH, help="output folder of a run with --posthoc_ema")
    add = parser.add_argument_group("averages").add_argument
    add(
        "--sigma_rel",
        type=number(0.005, 0.28),
        nargs="+",
        help="widths (default: the one with the lowest held-out loss, which the run has measured)",
    )
    add = parser.add_argument_group("output").add_argument
    add("--output_dir", type=PATH, required=True, help="folder for all output")
    return parser.freeze(parser.parse_args(argv))


# --help and mistakes in the flags end here, at once: the imports below take seconds. Importing this
# file parses nothing, so that tests can do so.
if __name__ == "__main__":
    args = parse_args()

import diffusers
import torch

from diffusion_training.errors.sentences import explained, fail, in_one_sentence
from diffusion_training.files import check_output_dir, saving
from diffusion_training.models import (
    NOT_FINITE,
    is_component,
    is_finite,
    load_weights,
    raise_for_keys,
)
from diffusion_training.training.keeping.posthoc import (
    SnapshotFile,
    list_snapshots,
    read_best_width,
    read_step,
    reconstruct,
)


def check_part(folder: Path, library: str, class_name: str) -> None:
    """Stop with an error if a part of the run's pipeline, which is copied, can't be opened."""
    with explained(
        f"{folder} is damaged: the run's command with --resume_from_checkpoint latest writes it "
        "again"
    ):
        if not folder.is_dir():
            raise ValueError("it is not a folder")
        if library in ("diffusers", "transformers"):  # else a class of the pipeline's own code
            kind = getattr(importlib.import_module(library), class_name)
            is_model = issubclass(kind, torch.nn.Module)
            load_weights(kind, str(folder)) if is_model else kind.from_pretrained(folder)


def write_pipeline(
    run_dir: Path, snapshots: list[SnapshotFile], width: float, output_dir: Path
) -> None:
    """Write the pipeline of a run with the weights of a width."""
    with explained(f"{run_dir / 'model_index.json'} can't be read"):
        index = json.loads((run_dir / "model_index.json").read_text())
        # a run's folder may be from somebody else: no name may lead out of it
        parts = {
            name: entry
            for name, entry in index.items()
            if is_component(entry) and Path(name).name == name
        }
    trained = {snapshot.model for snapshot in snapshots}
    models = {name for name in trained & parts.keys() if (run_dir / name).is_dir()}
    if not models:
        fail(f"{run_dir} has snapshots of {', '.join(trained)}, and its pipeline has none of these")
    for name in sorted(parts.keys() - models):
        check_part(run_dir / name, *parts[name])
    if output_dir.exists() and not (output_dir / "model_index.json").is_file():
        fail(f"{output_dir} is not a pipeline, and would be replaced: choose another --output_dir")
    with saving(output_dir.parent, output_dir) as unfinished:
        folder = unfinished / output_dir.name
        folder.mkdir()
        shutil.copy(run_dir / "model_index.json", folder)
        for name in parts.keys() - models:
            shutil.copytree(run_dir / name, folder / name)
        for name in models:
            model = getattr(diffusers, parts[name][1]).from_pretrained(run_dir / name)
            weights = dict(reconstruct(snapshots, name, width))
            if not weights.keys() <= dict(model.named_parameters()).keys():
                raise ValueError(f"the snapshots are of another {name}")
            raise_for_keys(NOT_FINITE, [key for key, x in weights.items() if not is_finite(x)])
            model.load_state_dict(weights, strict=False)
            model.save_pretrained(folder / name)


@in_one_sentence
def main(args: Namespace) -> None:
    run_dir = Path(args.run_dir)
    snapshots = list_snapshots(run_dir)
    if not snapshots:
        fail(f"{run_dir} has no snapshots: train it with --posthoc_ema")
    if not (run_dir / "model_index.json").is_file():
        fail(f"{run_dir} holds no pipeline yet: finish the run first")
    check_output_dir(vars(args))
    widths = args.sigma_rel or [read_best_width(run_dir)]
    output_dir = Path(args.output_dir)
    output_dir.mkdir(parents=True, exist_ok=True)
    last = read_step(snapshots[-1].path.parent)
    for width in widths:
        folder = output_dir / f"sigma_rel-{width:g}"
        write_pipeline(run_dir, snapshots, width, folder)
        print(f"The average of sigma_rel {width:g} at step {last} is in {folder}")


if __name__ == "__main__":
    main(args)
