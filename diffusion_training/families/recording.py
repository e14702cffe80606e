"""Give `open_base` the families that are read from a pipeline's own code."""

from dataclasses import replace

from diffusion_training.families.base import Base


def record_family(base: Base, embedded_guidance_scale: float) -> Base:
    """The base with its family. Stops with an error if the pipeline can't be recorded."""
    # here, because it is a fifth of a script's code, and most demos have a family with a file
    from diffusion_training.families.recorded.reading import read_family

    return replace(read_family(base, embedded_guidance_scale), record=record_family)
