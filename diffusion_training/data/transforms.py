"""A row of a data set -> its caption, and its image, mask and references, cropped and resized."""

from collections.abc import Sequence
from typing import Any

import torch
from PIL import Image

from diffusion_training.data.buckets import choose_size
from diffusion_training.data.images import decode_image, explain_row, name_image, plan_crop, shrink
from diffusion_training.data.references import resize_reference
from diffusion_training.data.texts import Text, draw_text, list_captions
from diffusion_training.data.transform_settings import Transform
from diffusion_training.draws import draw_choices
from diffusion_training.errors.faults import explain, is_a, is_machines_fault


def transform_row(
    row: int,
    epoch: int | None,
    item: dict,
    transform: Transform,
    target: Sequence[int] | None = None,
) -> dict[str, Any]:
    """Stage 1, on CPU cores: turn a row of the source into its caption and its resized image.

    The image is cropped and resized to `target` (height, width); for None see `choose_size`. An
    error of the machine, such as a full disk, is raised. Returns a dict:

    - "row" and "key": the number and the name of the row
    - "text": the caption, or with --caption_weights the list from `list_captions`
    - "pixel_values": uint8 [channels, *target]
    - "original_size": (height, width) of the stored image
    - "crop_top_left": (top, left) of the crop, in pixels of the resized image
    - "mask": uint8 [1, *target], if there is a column of masks
    - "references": if there are columns of them, the references as Pillow's images, and
      "is_aligned": whether they are mirrored with the image; see `transform_references`
    - "skipped": why the row can't be used, else None
    """
    key = name_image(row, item[transform.image_column], transform.source)
    weights = transform.caption_weights
    mask_column = transform.mask_column
    try:
        y, x, _, _ = draw_choices(transform.seed, epoch, row)
        text = read_text(row, epoch, item, transform)
        position = (0.5, 0.5) if transform.center_crop else (y, x)
        image = decode_image(
            item[transform.image_column],
            transform.channels,
            min_size=transform.min_size,
            allowed=transform.allowed,
        )
        original_size = height, width = tuple(image.shape[-2:])
        target = target or choose_size(height, width, transform)
        top, left, rows, columns = plan_crop(height, width, target, position)
        crop = round(top * target[0] / rows), round(left * target[1] / columns)
        image = shrink(image, target, position, transform.image_interpolation_mode)
        references, is_aligned = transform_references(
            item, transform, original_size, target, position
        )
        mask = None
        if mask_column:
            mask = decode_mask(item[mask_column], original_size, transform.allowed)
            mask = shrink(mask, target, position, "bilinear")
        reason = None
    except Exception as error:  # a placeholder keeps the batch in shape
        # otherwise good rows would be skipped, and a run could continue without data
        if is_machines_fault(error):
            raise
        original_size = target = target or (transform.resolution, transform.resolution)
        text = [""] * len(weights) if weights else ""
        image = torch.zeros(transform.channels, *target, dtype=torch.uint8)
        crop = (0, 0)
        references, is_aligned = make_placeholders(transform), True
        mask = image[:1]
        names = (transform.image_column, mask_column, *transform.reference_columns)
        reason = explain_row(error, *(item.get(name) for name in names if name))
        # it may be readable later
        if is_a(error, "Unreached") or isinstance(error, OSError) and error.errno is not None:
            reason = f"not read: {reason}"
    return {
        "row": row,
        "key": key,
        "text": text,
        "pixel_values": image,
        "skipped": reason,
        **({"mask": mask} if mask_column else {}),
        "original_size": original_size,
        "crop_top_left": crop,
        **(
            {"references": references, "is_aligned": is_aligned}
            if transform.reference_columns
            else {}
        ),
    }


def read_text(row: int, epoch: int | None, item: dict, transform: Transform) -> Text:
    """The caption of a row in an epoch, or with --caption_weights the list of its captions."""
    if transform.caption_weights:
        return list_captions(item, transform)
    *_, choice = draw_choices(transform.seed, epoch, row)
    return draw_text(item, choice, transform)


def decode_mask(
    source: dict | None, size: Sequence[int], allowed: Sequence[str] = ()
) -> torch.Tensor:
    """Decode a mask to uint8 [1, *size]: the loss counts where it is white.

    It is all white for an image without a mask. Raises ValueError for a mask that can't be decoded,
    or whose size is not the image's.
    """
    if source is None or source["bytes"] is source["path"] is None:
        return torch.full((1, *size), 255, dtype=torch.uint8)
    try:
        mask = decode_image(source, 1, allowed=allowed)
    except Exception as error:
        if is_machines_fault(error) or is_a(error, "Unreached"):
            raise
        raise ValueError(f"its mask can't be used: {explain(error)}") from error
    if tuple(mask.shape[-2:]) != tuple(size):
        raise ValueError(
            f"its mask has {mask.shape[-1]} x {mask.shape[-2]} pixels, "
            f"the image {size[1]} x {size[0]}"
        )
    return mask


def transform_references(
    item: dict,
    transform: Transform,
    original_size: Sequence[int],
    target: Sequence[int],
    position: tuple[float, float],
) -> tuple[list[Image.Image], bool]:
    """The references of a row, and whether they are mirrored with its image.

    If all have the image's size, they get its crop and are mirrored with it. Otherwise they are
    only resized, and neither they nor the image are mirrored. Raises ValueError for one that can't
    be decoded.

    original_size, target: (height, width) of the stored image, and of the resized one.
    """
    pixels = []
    for name in transform.reference_columns:
        source = item[name]
        if source is None or source["bytes"] is source["path"] is None:
            continue
        try:
            pixels.append(
                decode_image(source, 3, min_size=transform.min_size, allowed=transform.allowed)
            )
        except Exception as error:
            if is_machines_fault(error) or is_a(error, "Unreached"):
                raise
            raise ValueError(f"its reference can't be used: {explain(error)}") from error
    is_aligned = all(tuple(each.shape[-2:]) == tuple(original_size) for each in pixels)
    resized = []
    for each in pixels:
        if is_aligned:
            multiple = transform.reference_multiple
            scale = transform.reference_side / transform.resolution / multiple
            size = [multiple * max(1, round(side * scale)) for side in target]
            each = shrink(each, size, position, transform.image_interpolation_mode)
        else:
            each = resize_reference(
                each, transform.reference_side, transform.image_interpolation_mode
            )
        resized.append(Image.fromarray(each.permute(1, 2, 0).numpy()))
    return resized, is_aligned


def make_placeholders(transform: Transform) -> list[Image.Image]:
    """References for a row that can't be used, which keep its batch in shape."""
    side = transform.reference_side
    return [Image.new("RGB", (side, side)) for _ in transform.reference_columns]
