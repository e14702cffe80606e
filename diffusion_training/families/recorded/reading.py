"""Make the family of a pipeline that has no file of its own."""

import inspect
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
from diffusers.modular_pipelines import ModularPipeline

from diffusion_training.errors.sentences import explained, fail
from diffusion_training.families.base import Base, Family
from diffusion_training.families.recorded.family import Recorded
from diffusion_training.families.recorded.modular import convert_index, get_pipeline_class
from diffusion_training.families.recorded.pipeline_run import ONE_FRAME
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


def find_video_fault(kind: Any, index: dict[str, Any]) -> str | None:
    """Why a pipeline for videos can't be trained on stills, or None."""
    parts = [name for name, entry in index.items() if is_component(entry)]
    if sound := [name for name in parts if "audio" in name or name == "vocoder"]:
        return (
            f"it draws videos with sound ({', '.join(sound)}) in one transformer, which would be "
            "trained on silence: choose a model without sound, such as Wan 2.1"
        )
    if "transformer_2" in parts and (boundary := index.get("boundary_ratio")) is not None:
        return (
            f"it has two experts: transformer draws the noise levels above {boundary:g}, where a "
            "picture's composition is decided, and transformer_2 those below. A LoRA of one of "
            "them is missing in the steps of the other, and two are not trained here. Choose Wan "
            "2.1, or Wan 2.2 TI2V 5B, which have one"
        )
    options = inspect.signature(kind.__call__).parameters
    needed = [
        name
        for name in ("image", "video")
        if name in options and options[name].default is inspect.Parameter.empty
    ]
    if needed:
        return (
            f"it makes a video of {' and '.join(needed)}, which stills can't teach: choose a "
            "pipeline that draws from text alone, such as Wan 2.1's"
        )
    if "guider" in parts or issubclass(kind, ModularPipeline):
        return (
            "it draws videos, and its transformer is called by a guider or by blocks, which are "
            "recorded for images alone: choose a plain pipeline, such as Wan 2.1's"
        )
    return None


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
    parts = [name for name, entry in index.items() if is_component(entry)]
    of_videos = (*ONE_FRAME, "driving_video")
    if any(name in options for name in of_videos) and (fault := find_video_fault(kind, index)):
        return fault
    denoisers = [name for name in parts if "transformer" in name]
    if len(denoisers) > 1:
        return f"it has more than one denoiser: {', '.join(denoisers)}"
    return None if is_component(index.get("vae")) else "it has no VAE"
