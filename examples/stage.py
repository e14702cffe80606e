"""A stage of your own in downloads and caches: docs/cluster.md explains it.

It leaves out images that a safety filter rejects, and rewrites captions on a cluster of Ray.
"""

import functools
import io

import ray
from PIL import Image
from torchvision.transforms.functional import to_pil_image
from transformers import pipeline

FILTER = "Falconsai/nsfw_image_detection"
NAME = f"{FILTER}, 1"  # scripts record it: data of another stage is refused


@functools.cache  # once in each process
def load_filter():
    return pipeline("image-classification", FILTER, device="cpu")


def find_fault(image: Image.Image | bytes) -> str | None:
    """Why an image is left out, or None."""
    if isinstance(image, bytes):
        image = Image.open(io.BytesIO(image)).convert("RGB")
    return "unsafe" if load_filter()(image)[0]["label"] == "nsfw" else None


def change(rows: list[dict]) -> None:
    """Check or change rows, which are as `transform_row` returns them."""
    for row in rows:
        row["skipped"] = row["skipped"] or find_fault(to_pil_image(row["pixel_values"]))
    if ray.is_initialized():  # in a task of precompute_latents_ray.py
        rewriter = ray.get_actor("rewriter")
        texts = ray.get(rewriter.rewrite.remote([row["text"] for row in rows]))
        for row, text in zip(rows, texts, strict=True):
            row["text"] = text


class Rewriter:
    """An actor of Ray, with a model on a GPU of its own."""

    def __init__(self):
        self.model = pipeline("text-generation", "your-name/rewriter", device="cuda")

    def rewrite(self, texts: list[str]) -> list[str]:
        return [each[0]["generated_text"] for each in self.model(texts, return_full_text=False)]
