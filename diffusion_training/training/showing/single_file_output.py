"""Save a pipeline also as one file, for other programs."""

from collections.abc import Callable
from pathlib import Path

import torch
from diffusers import DiffusionPipeline
from safetensors.torch import save_file

from diffusion_training.errors.sentences import explained
from diffusion_training.files import saving, sort_header
from diffusion_training.training.showing.pipelines import save_pipeline

SINGLE_FILE = "single_file.safetensors"  # of --output_single_file


def save_single_file(
    weights: dict[str, torch.Tensor], metadata: dict[str, str], output_dir: str | Path
) -> None:
    """Write a model as one file, beside its pipeline folder. weights: see `Family.merge`."""
    with saving(output_dir, f"the single file in {output_dir}") as unfinished:
        save_file(weights, unfinished / SINGLE_FILE, {"format": "pt", **metadata})
        sort_header(unfinished / SINGLE_FILE)


def save_whole(
    pipeline: DiffusionPipeline,
    merge: Callable[[DiffusionPipeline], dict[str, torch.Tensor]],
    folder: Path,
    metadata: dict[str, str] | None,
) -> None:
    """Write the pipeline. With `metadata`, also write it as one file with that header.

    merge: `Family.merge`, which returns the weights of all parts under the names of such a file.
    """
    save_pipeline(pipeline, folder)
    if metadata is not None:
        with explained("--output_single_file can't be written; the pipeline was saved"):
            weights = merge(pipeline)
        save_single_file(weights, metadata, folder)
