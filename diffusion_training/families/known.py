"""The list of the model families. --model_family and model_index.json choose among them."""

from diffusion_training.families.base import Family
from diffusion_training.families.flux2 import Flux2Klein
from diffusion_training.families.prx import PRX
from diffusion_training.families.qwen_image import QwenImage
from diffusion_training.families.stable_diffusion import StableDiffusion, StableDiffusionXL
from diffusion_training.families.z_image import ZImage

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        StableDiffusion(),
        StableDiffusionXL(),
        PRX(),
        ZImage(),
        Flux2Klein(),
        QwenImage(),
    )
}


def find_family(class_name: str) -> Family | None:
    """The family of a pipeline, by the class in its model_index.json, or None."""
    return next((each for each in FAMILIES.values() if each.recognizes(class_name)), None)
