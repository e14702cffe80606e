"""Save a pipeline as a folder, and as one file for other programs."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import torch
from diffusers import DiffusionPipeline, ModularPipeline
from safetensors.torch import save_file

from diffusion_training.errors.sentences import explained, fail
from diffusion_training.files import saving, sort_header
from diffusion_training.models import is_finite

SINGLE_FILE = "single_file.safetensors"  # of --output_single_file


def save_pipeline(pipeline: DiffusionPipeline, output_dir: str | Path) -> None:
    """Write the pipeline folder; an existing one stays until the new one is complete."""
    model = getattr(pipeline, "unet", None) or pipeline.transformer
    if not all(map(is_finite, model.parameters())):
        fail(
            "the weights are not finite, so they are not saved; an earlier pipeline is kept: try a "
            "lower --learning_rate",
            alone=True,
        )
    with saving(output_dir, f"the pipeline in {output_dir}") as unfinished:
        pipeline.save_pretrained(unfinished)
        name_source(unfinished, None)
        # a local path that a model was loaded from is private
        for path in unfinished.glob("*/config.json"):
            config = json.loads(path.read_text())
            if os.path.exists(config.pop("_name_or_path", "")):
                path.write_text(json.dumps(config, indent=2) + "\n")


def name_source(folder: str | Path, repository: str | None) -> None:
    """Write into the index of a modular pipeline where its parts are; None: in its own folder."""
    path = Path(folder, ModularPipeline.config_name)
    if not path.exists():
        return
    index = json.loads(path.read_text())
    for entry in index.values():
        if isinstance(entry, list):
            entry[2]["pretrained_model_name_or_path"] = repository
    path.write_text(json.dumps(index, indent=2) + "\n")


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
