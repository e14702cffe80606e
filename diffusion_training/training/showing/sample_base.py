"""What samples are drawn with: a base, its number of steps and its guidance."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from diffusion_training.errors.printing import amount
from diffusion_training.families.base import Family


@dataclass(frozen=True, kw_only=True)
class SampleBase:
    """What samples are drawn with: the run's own base, or another one, see `OtherBase`."""

    name: str  # as the user gave it
    family: Family
    num_inference_steps: int
    guidance_scale: float
    lora: str | None = None  # of --validation_lora
    prefix: str = ""  # of names in files and records

    @contextlib.contextmanager
    def open(self, pipeline: Any) -> Iterator[Any]:
        """The pipeline that draws. pipeline: that of the trained model."""
        yield pipeline

    def describe(self) -> str:
        """The heading of its samples."""
        names = [os.path.basename(each.rstrip("/")) for each in (self.name, self.lora) if each]
        guidance = "no guidance"
        if self.guidance_scale > 1:
            guidance = f"guidance {self.guidance_scale:g}"
        return f"{' with '.join(names)}, {amount(self.num_inference_steps, 'step')}, {guidance}"
