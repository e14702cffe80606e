"""What the flags say about each model family; a test compares it with the families' classes.

known.py has the classes, which import torch: too slow for --help.
"""

from typing import NamedTuple


class Facts(NamedTuple):
    """What the flags say about a family. The attributes of `Family` have the same names."""

    title: str
    script: str = "train_flow.py"
    max_tokens: int = 0
    vae_classes: tuple[str, ...] = ("AutoencoderKL", "AutoencoderTiny")


FACTS = {
    "sd": Facts("Stable Diffusion", "train_text_to_image.py"),
    "sdxl": Facts("Stable Diffusion XL", "train_text_to_image.py"),
    "prx": Facts(
        "PRX",
        max_tokens=256,
        vae_classes=("AutoencoderKL", "AutoencoderTiny", "AutoencoderDC", "AutoencoderKLFlux2"),
    ),
    "z-image": Facts("Z-Image", max_tokens=512),
    "flux2-klein": Facts("FLUX.2 klein", max_tokens=512, vae_classes=("AutoencoderKLFlux2",)),
    "qwen-image": Facts("Qwen-Image", max_tokens=512, vae_classes=("AutoencoderKLQwenImage",)),
}
DEFAULT_FAMILY = "sd"  # if models are given one by one
DEFAULT_FLOW_FAMILY = "prx"  # in train_flow.py
