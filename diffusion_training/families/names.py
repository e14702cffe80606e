"""What the flags say about each model family; a test compares it with the families' classes.

The classes import torch, which is too slow for --help; `load_family` makes them.
"""

from typing import NamedTuple


class FamilyFacts(NamedTuple):
    """What is known about a family before it is imported.

    Attributes of `Family` have the same names, except for the first two.
    """

    kind: str  # its file and class
    pipelines: str  # a pattern of the class in model_index.json
    title: str
    script: str = "train_flow.py"
    max_tokens: int = 0
    vae_classes: tuple[str, ...] = ("AutoencoderKL", "AutoencoderTiny")
    features: tuple[str, ...] = ("ragged embeddings",)


FACTS = {
    "sd": FamilyFacts(
        "stable_diffusion.StableDiffusion",
        "StableDiffusion(?!XL|3).*",
        "Stable Diffusion",
        "train_text_to_image.py",
        features=(),
    ),
    "sdxl": FamilyFacts(
        "stable_diffusion.StableDiffusionXL",
        "StableDiffusionXL.*",
        "Stable Diffusion XL",
        "train_text_to_image.py",
        features=("sdxl",),
    ),
    "prx": FamilyFacts(
        "prx.PRX",
        "PRXPipeline",
        "PRX",
        max_tokens=256,
        vae_classes=("AutoencoderKL", "AutoencoderTiny", "AutoencoderDC", "AutoencoderKLFlux2"),
    ),
}
# the feature of a cache whose pipeline has another argument for references than `image`
NAMED_REFERENCES = "named references"
DEFAULT_FAMILY = "sd"  # if models are given one by one
DEFAULT_FLOW_FAMILY = "prx"  # in train_flow.py
