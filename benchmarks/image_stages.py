"""Draw what is done to an image before a step: cropped, mirrored, encoded to latents, and decoded.

    python benchmarks/image_stages.py

The image is two drawings of demo/animals side by side (public domain). Crop and VAE are those of
the scripts; the VAE is the small one of demo/drawings. Writes docs/image-stages.png, and prints how
much smaller the latents are. Some seconds on one core.
"""

import argparse
from pathlib import Path

import bench
import datasets
import numpy as np
import torch
from diffusers import AutoencoderKL
from PIL import Image, ImageDraw, ImageFont

from diffusion_training.data.images import shrink

SIDE = 64  # pixels of the crop, as --resolution
PRINTED = 192  # of a square in the picture
MARGIN, CAPTION = 12, 40
POSITION = 0.5, 0.2  # of the crop, from top and from left


def open_image(rows: datasets.Dataset, captions: tuple[str, str]) -> torch.Tensor:
    """Two drawings side by side, uint8 [3, 64, 128]."""
    found = [rows[rows["text"].index(caption)]["image"].convert("RGB") for caption in captions]
    pixels = np.concatenate([np.asarray(image) for image in found], axis=1)
    return torch.from_numpy(pixels).movedim(-1, 0)


def show(image: torch.Tensor) -> Image.Image:
    """An image [3, h, w] of values from -1 to 1, enlarged without smoothing."""
    pixels = ((image / 2 + 0.5).clamp(0, 1) * 255).round().byte().movedim(0, -1).numpy()
    width = PRINTED * image.shape[2] // image.shape[1]
    return Image.fromarray(pixels).resize((width, PRINTED), Image.Resampling.NEAREST)


def join(panels: list[tuple[str, Image.Image]]) -> Image.Image:
    """The panels in a row, each above its caption."""
    widths = [panel.width + MARGIN for _, panel in panels]
    page = Image.new("RGB", (sum(widths) + MARGIN, PRINTED + MARGIN + CAPTION), "white")
    pen, font = ImageDraw.Draw(page), ImageFont.load_default(size=13)
    left = MARGIN
    for (caption, panel), width in zip(panels, widths, strict=True):
        page.paste(panel, (left, MARGIN))
        place = (left + panel.width / 2, MARGIN + PRINTED + 4)
        pen.text(place, caption, "black", font, anchor="ma", align="center")
        left += width
    return page


@torch.no_grad()
def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    default = bench.ROOT / "docs/image-stages.png"
    parser.add_argument("--output_file", type=Path, default=default, help="the picture")
    args = parser.parse_args(argv)
    rows = datasets.Dataset.from_parquet(str(bench.ROOT / "demo/animals/train.parquet"))
    stored = open_image(rows, ("a dolphin on blue", "a red dog on yellow"))
    cropped = shrink(stored, (SIDE, SIDE), POSITION, "bilinear")
    mirrored = cropped.flip(-1) / 127.5 - 1
    vae = AutoencoderKL.from_pretrained(bench.ROOT / "demo/drawings/vae", torch_dtype=torch.float32)
    latents = vae.encode(mirrored[None]).latent_dist.mean
    decoded = vae.decode(latents).sample[0]
    _, channels, height, width = latents.shape
    colors = latents[0, :3] / latents[0, :3].abs().amax((1, 2), keepdim=True)
    panels = [
        (f"the file,\n{stored.shape[2]} x {stored.shape[1]} pixels", show(stored / 127.5 - 1)),
        (f"cropped to\n{SIDE} x {SIDE} pixels", show(cropped / 127.5 - 1)),
        ("mirrored\n(--random_flip)", show(mirrored)),
        (f"latents, {height} x {width} x {channels}\n(3 of {channels} as colors)", show(colors)),
        ("decoded\nby the VAE", show(decoded)),
    ]
    join(panels).save(args.output_file, optimize=True)
    error = (decoded - mirrored).square().mean().sqrt() * 127.5
    print(f"{mirrored.numel() / latents.numel():.1f} times fewer numbers in the latents")
    print(f"{error:.1f} of 255: root mean square error of the decoded image")


if __name__ == "__main__":
    main()
