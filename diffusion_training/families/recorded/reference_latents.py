"""References, the images that an edit starts from, in recordings of a pipeline's code."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from PIL import Image
from torch.utils._pytree import tree_map

from diffusion_training.families.recorded.tape import Unrecordable


@dataclass(frozen=True)
class ReferenceLatents:
    """What a VAE returns, for given latents: pipelines take the mean of its distribution."""

    latents: torch.Tensor

    @property
    def latent_dist(self) -> "ReferenceLatents":
        return self

    def mode(self) -> torch.Tensor:
        return self.latents

    def sample(self, generator: Any = None) -> torch.Tensor:
        return self.latents


class ReferenceShapes:
    """The shapes of a VAE's latents, by a VAE without weights."""

    def __init__(self, vae: Any) -> None:
        self.vae = vae
        self.known: dict[torch.Size, torch.Size] = {}  # for each shape of pixels

    def get_shape(self, pixels: torch.Tensor) -> torch.Size:
        if pixels.shape not in self.known:
            with torch.device("meta"):
                empty = torch.empty(pixels.shape, device="meta")
                output = type(self.vae).encode(self.vae, empty)
            has_moments = hasattr(output, "latent_dist")
            latents = output.latent_dist.mode() if has_moments else output[0]
            self.known[pixels.shape] = latents.shape
        return self.known[pixels.shape]


def has_statistics(config: Any) -> bool:
    """Whether a VAE, as FLUX.2's, scales latents by statistics that are among its weights."""
    return "batch_norm_eps" in config


def encode_reference(shapes: ReferenceShapes, pixels: torch.Tensor, run: Any) -> ReferenceLatents:
    """Take the place of a VAE's `encode`: return the latents that a run has for this reference.

    run: see `PipelineTrace`.
    """
    if len(pixels) != 1:
        raise Unrecordable("it takes only one reference")
    shape = shapes.get_shape(pixels)
    if run.references is None:
        latents = torch.zeros(shape)
    else:
        latents = run.references[len(run.pixels)].reshape(shape)
    run.pixels.append(pixels)
    run.latents.append(latents.flatten(1, -3))
    return ReferenceLatents(latents)


def make_blanks(sizes: Sequence[tuple[int, int]]) -> list[Image.Image]:
    """White images of these sizes, (height, width)."""
    return [Image.new("RGB", (width, height), "white") for height, width in sizes]


def measure_side(pixels: Sequence[torch.Tensor]) -> int:
    """The side of a square as large as the first reference. pixels: as the VAE gets them."""
    if not pixels:
        raise Unrecordable("its VAE does not encode references")
    return math.isqrt(math.prod(pixels[0].shape[-2:]))


def as_argument(images: Sequence[Image.Image]) -> Any:
    """References as an argument of a pipeline, which may resize an image, but not a list of one."""
    return images[0] if len(images) == 1 else [*images]


def split_references(
    prompts: dict[str, Any],
) -> tuple[list[torch.Tensor], tuple[tuple[int, int], ...], dict[str, Any]]:
    """Split a condition into the latents of references, their sizes in pixels, and the rest."""
    rest = dict(prompts)
    latents: list[torch.Tensor] = []
    sizes: list[tuple[int, int]] = []
    while (name := f"reference_{len(latents)}") in rest:
        latents.append(rest.pop(name))
        height, width = rest.pop(f"{name}_size").shape[2:]
        sizes.append((height, width))
    return latents, tuple(sizes), rest


def join_alone(results: list[Any]) -> Any:
    """Results of captions that were encoded alone, as if the pipeline took them together.

    A tensor with one row belongs to the caption. Of rows with other lengths, the first is kept.
    """

    def join(*parts: Any) -> Any:
        first = parts[0]
        is_row = isinstance(first, torch.Tensor) and first.dim() > 1 and len(first) == 1
        if is_row and all(part.shape == first.shape for part in parts):
            return torch.cat(parts)
        return first

    return tree_map(join, *results)
