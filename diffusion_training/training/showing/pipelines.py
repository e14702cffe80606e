"""Save a pipeline as a folder."""

import json
import os
from pathlib import Path

from diffusers import DiffusionPipeline, ModularPipeline

from diffusion_training.errors.sentences import fail
from diffusion_training.files import saving
from diffusion_training.models import is_finite


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
