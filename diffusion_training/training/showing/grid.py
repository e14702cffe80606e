"""Samples and their prompts as one picture."""

import math
import textwrap
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont


def draw_grid(
    images: np.ndarray, prompts: list[str], headings: Sequence[tuple[str, int]] = ()
) -> Image.Image:
    """Turn images uint8 [prompts, per prompt, H, W, C] into a picture: a row for each prompt.

    The prompt is written beside its row, in letters a tenth of an image high, so that they can be
    read when the picture is shown small.

    headings: (text, number of columns below it), from left to right.
    """
    size = max(64, images.shape[2])
    font = ImageFont.load_default(max(14, size // 10))
    margin = 4
    width = max(400, size)  # of the longest line
    texts = []
    for prompt in prompts:
        lines = textwrap.wrap(prompt[:4000], max(1, int(width / font.getlength("n"))))
        most = max(1, int(size / (1.3 * font.size)))
        texts.append("\n".join([*lines[:most], *["…"] * (len(lines) > most)]))
    draw = ImageDraw.Draw(Image.new("RGB", (1, 1)))
    boxes = [draw.multiline_textbbox((0, 0), text, font) for text in texts]
    label = math.ceil(max(box[2] for box in boxes)) + 2 * margin
    step = size + margin
    titles = []
    for text, count in headings:
        columns = max(1, int(count * step / font.getlength("n")))
        titles.append("\n".join(textwrap.wrap(text, columns)))
    boxes = [draw.multiline_textbbox((0, 0), title, font) for title in titles]
    top = max((math.ceil(box[3]) + 2 * margin for box in boxes), default=0)
    # the heading of each column; those of different ones are a little apart
    owners = [place for place, (_, count) in enumerate(headings) for _ in range(count)]
    owners = owners or [0] * images.shape[1]
    starts = [label + x * step + 4 * margin * place for x, place in enumerate(owners)]
    grid = Image.new("RGB", (starts[-1] + step, top + len(prompts) * step), "white")
    draw = ImageDraw.Draw(grid)
    for place, title in enumerate(titles):
        draw.text((starts[owners.index(place)], margin), title, "black", font)
    for y, (text, row) in enumerate(zip(texts, images, strict=True)):
        draw.text((margin, top + y * step + size // 2), text, "black", font, anchor="lm")
        for x, image in enumerate(row):
            picture = (
                Image.fromarray(image.squeeze()).convert("RGB").resize((size, size), Image.NEAREST)
            )
            grid.paste(picture, (starts[x], top + y * step))
    return grid
