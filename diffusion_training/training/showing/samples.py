"""The picture of samples: its place, and how it is saved."""

from pathlib import Path

import numpy as np
from accelerate import Accelerator
from PIL import Image

from diffusion_training.errors.sentences import surviving
from diffusion_training.files import saving


def samples_path(output_dir: str | Path, step: int) -> Path:
    """Return the path of the samples drawn after a step."""
    return Path(output_dir) / "samples" / f"step-{step:07d}.png"


def save_samples(
    accelerator: Accelerator, picture: Image.Image, output_dir: str | Path, step: int
) -> None:
    """Write a picture of samples, and pass it to trackers that support pictures."""
    path = samples_path(output_dir, step)
    path.parent.mkdir(exist_ok=True)
    with saving(path.parent, path) as unfinished:
        picture.save(unfinished / path.name)  # half a picture would count as finished
    for tracker in accelerator.trackers:
        if hasattr(tracker, "log_images"):
            layout = {"dataformats": "NHWC"} if tracker.name == "tensorboard" else {}
            with surviving(f"{tracker.name} did not take samples; the folder samples/ has them"):
                tracker.log_images({"samples": np.asarray(picture)[None]}, step=step, **layout)
