"""How fast is `transform`, the stage of precompute_latents.py that decodes, crops and resizes, on one core? A table.

    pip install scikit-learn && python benchmarks/transform_speed.py    # opencv-python-headless joins in if installed

Encodes two photographs as JPEG of several widths. Ways to make --resolution pixels square of their centre take turns:
ours, diffusers' transform, Pillow, OpenCV as img2dataset calls it, and torchcodec with torchvision. Prints images per
second and how many times as many as with diffusers' transform in the same turn: the median, least and most. What the
decoder of ours takes alone is the limit of whoever uses libjpeg and decodes every pixel.
"""

import argparse
import functools
import io
import time

import numpy as np
import torch
import torchvision.transforms.v2 as v2
from bench import machine, spread  # before the scripts, which it finds
from PIL import Image
from torchvision import transforms

try:
    import cv2
except ImportError:
    cv2 = None

import precompute_latents as script


def make_photos(width):
    """JPEG files of `width` pixels, from the photographs inside scikit-learn (640 x 427)."""
    from sklearn.datasets import load_sample_images

    photos = []
    for pixels in load_sample_images().images:
        buffer = io.BytesIO()
        Image.fromarray(pixels).resize((width, width * 427 // 640), Image.LANCZOS).save(buffer, "JPEG", quality=90)
        photos.append(buffer.getvalue())
    return photos


def use_diffusers(resolution):
    transform = transforms.Compose(
        [
            transforms.Resize(resolution, interpolation=transforms.InterpolationMode.LANCZOS),
            transforms.CenterCrop(resolution),
            transforms.ToTensor(),
            transforms.Normalize([0.5], [0.5]),
        ]
    )
    return lambda photo: transform(Image.open(io.BytesIO(photo)).convert("RGB")) * 127.5 + 127.5


def use_pillow(resolution, draft=False):
    def transform(photo):
        image = Image.open(io.BytesIO(photo))
        if draft:
            image.draft("RGB", (resolution, resolution))
        side, (width, height) = min(image.size), image.size
        left, top = (width - side) // 2, (height - side) // 2
        box = left, top, left + side, top + side
        return np.asarray(image.convert("RGB").resize((resolution, resolution), Image.BICUBIC, box)).transpose(2, 0, 1)

    return transform


def use_opencv(resolution):
    cv2.setNumThreads(1)

    def transform(photo):  # to BGR, as it stays there
        image = cv2.imdecode(np.frombuffer(photo, np.uint8), cv2.IMREAD_UNCHANGED)
        scale = resolution / min(image.shape[:2])
        size = [round(side * scale) for side in image.shape[1::-1]]
        image = cv2.resize(image, size, interpolation=cv2.INTER_AREA)
        left, top = (size[0] - resolution) // 2, (size[1] - resolution) // 2
        return image[top : top + resolution, left : left + resolution].transpose(2, 0, 1)[::-1]

    return transform


def use_torchcodec(resolution):
    transform = v2.Compose([v2.Resize(resolution), v2.CenterCrop(resolution)])
    return lambda photo: transform(script.decode_jpeg(photo))


def use_ours(resolution):
    flags = ["--train_data_dir=.", "--pretrained_model_name_or_path=.", f"--resolution={resolution}", "--center_crop"]
    args = script.parse_args(flags)

    def transform(photo):
        item = script.transform(0, 0, {"image": {"bytes": photo, "path": None}, "text": "a photo"}, "image", 3, args)
        assert item["skipped"] is None
        return item["pixel_values"]

    return transform


WAYS = {
    "diffusers": use_diffusers,
    "Pillow, crop and resize in one": use_pillow,
    "the same, decoded smaller (`draft`), other pixels": functools.partial(use_pillow, draft=True),
    "OpenCV, as img2dataset": use_opencv,
    "torchcodec, torchvision, bilinear": use_torchcodec,
    "`transform`, ours": use_ours,
    "(its decoder alone)": lambda resolution: lambda photo: script.decode_image({"bytes": photo, "path": None}, 3),
}


def compare(photos, resolution, seconds=0.5, rounds=9):
    """{way: images per second in each of `rounds` turns}."""
    speeds = {}
    for _ in range(rounds):
        for name, use in WAYS.items():
            if (use is use_opencv and cv2 is None) or (use is use_torchcodec and script.decode_jpeg is None):
                continue
            transform, start, count = use(resolution), time.perf_counter(), 0
            while (taken := time.perf_counter() - start) < seconds or count < 2:
                transform(photos[count % len(photos)])
                count += 1
            speeds.setdefault(name, []).append(count / taken)
    return speeds


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--resolution", type=int, default=256)
    parser.add_argument("--widths", type=int, nargs="+", default=[640, 1024, 2048], help="of the photographs")
    parser.add_argument("--seconds", type=float, default=0.5, help="of a turn")
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    missing = ["OpenCV"] * (cv2 is None) + ["torchcodec"] * (script.decode_jpeg is None)
    print(f"{machine()}; to {args.resolution} px{''.join(f'; {name} is not installed' for name in missing)}\n")
    print("| images/s | " + " | ".join(f"{width} px wide" for width in args.widths) + " |")
    print("|---|" + "---|" * len(args.widths))
    found = [compare(make_photos(width), args.resolution, args.seconds, args.rounds) for width in args.widths]
    for name in found[0]:
        cells = []
        for speeds in found:
            ratio = np.divide(speeds[name], speeds["diffusers"])
            cells.append(f"{np.median(speeds[name]):.0f}, {spread(ratio)} x")
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
