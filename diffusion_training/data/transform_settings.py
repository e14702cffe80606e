"""The settings by which rows of a data set become images and captions, as one value."""

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from diffusion_training.data.flags import list_allowed
from diffusion_training.data.folders import get_source


@dataclass(frozen=True)
class Transform:
    """How a row becomes an image and a caption. Fields are named like the flags."""

    allowed: tuple[str, ...]  # see `list_allowed`
    source: str  # see `get_source`; keys of images are relative to it
    image_column: str
    mask_column: str | None
    caption_column: str | list[str]
    caption_weights: list[float] | None  # if all captions of an image are kept
    caption_prefix: str | None
    skip_empty_captions: bool
    channels: int  # 1 or 3
    resolution: int
    center_crop: bool
    random_flip: bool
    min_size: int
    image_interpolation_mode: str
    bucket_step: int | None
    bucket_max_ratio: float
    bucket_no_upscale: bool
    seed: int
    reference_columns: Sequence[str]  # of the images that an edit starts from
    reference_side: int  # side in pixels of a square reference
    reference_multiple: int  # sides of references are multiples of it


def make_transform(
    args: Namespace,
    image_column: str,
    mask_column: str | None,
    caption_weights: list[float] | None,
    channels: int,
    resolution: int,
    reference_columns: Sequence[str] = (),
    reference_side: int = 0,
    reference_multiple: int = 1,
) -> Transform:
    """Make the transform from the flags, and from values that depend on the rows and models."""
    known: dict[str, Any] = {
        "allowed": list_allowed(args),
        "source": get_source(args),
        "image_column": image_column,
        "mask_column": mask_column,
        "caption_weights": caption_weights,
        "channels": channels,
        "resolution": resolution,
        "reference_columns": reference_columns,
        "reference_side": reference_side,
        "reference_multiple": reference_multiple,
    }
    flags: dict[str, Any] = {field.name: vars(args).get(field.name) for field in fields(Transform)}
    return Transform(**flags | known)
