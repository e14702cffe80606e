"""Make the family of a pipeline that has no file of its own."""

import inspect
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers

from diffusion_training.errors.sentences import explained, fail
from diffusion_training.families.base import Base, Family
from diffusion_training.families.recorded.family import Recorded
from diffusion_training.families.recorded.modular import convert_index, get_pipeline_class
from diffusion_training.models import is_component


def read_family(base: Base, embedded_guidance_scale: float) -> Base:
    """The base with its family. Stops with an error if the pipeline can't be recorded."""
    if not Path(str(base.source), diffusers.DiffusionPipeline.config_name).exists():
        with explained(f"{base.source} can't be opened as a pipeline"):
            base = replace(base, index=convert_index(base.index))
    if missing := name_missing_part(base.index):
        name = base.index["_class_name"]
        name = name[-1] if isinstance(name, list) else name
        fail(f"{base.name} is a {name}, which these scripts can't train: {missing}")
    family = Recorded(base.index, read_configs(base), embedded_guidance_scale)
    return replace(base, family=family)


def read_configs(base: Base) -> dict[str, Any]:
    """{part: its config} of a pipeline's VAE, scheduler and transformer."""
    configs = {}
    created = base.index.get("_created", {})
    for name in ("vae", "scheduler", Family.folder):
        if name in created:
            configs[name] = created[name]
            continue
        with explained(f"{base.source} holds no {name}"):
            kind = getattr(diffusers, base.index[name][1])
            own_path = base.vae if name == "vae" else None
            source, options = base.locate(own_path, name, with_weights=False)
            options.pop("variant", None)
            configs[name] = dict(kind.load_config(source, **options))
    return configs


def name_missing_part(index: dict[str, Any]) -> str | None:
    """What the pipeline of a model_index.json lacks to be recorded, or None."""
    name = index.get("_class_name")
    if isinstance(name, list):
        return f"its class is in {name[0]}.py of its folder, and only classes of diffusers are read"
    kind = get_pipeline_class(index)
    if kind is None:
        return "diffusers has no class of this name"
    if not is_component(index.get(Recorded.folder)):
        if is_component(index.get("unet")):
            return (
                "its denoiser is a U-Net, and those are trained for Stable Diffusion and SDXL alone"
            )
        return "it has no transformer"
    if not hasattr(kind, "encode_prompt"):
        return "it has no encode_prompt"
    options = inspect.signature(kind.__call__).parameters
    if "prompt" not in options:
        return "it takes no prompt"
    if "num_frames" in options:
        return "it draws videos"
    parts = [name for name, entry in index.items() if is_component(entry)]
    denoisers = [name for name in parts if "transformer" in name]
    if len(denoisers) > 1:
        return f"it has more than one denoiser: {', '.join(denoisers)}"
    return None if is_component(index.get("vae")) else "it has no VAE"
