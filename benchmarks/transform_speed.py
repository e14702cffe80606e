"""How fast is `transform`, the stage of precompute_latents.py that decodes, crops and resizes, on one core?

    pip install scikit-learn && python benchmarks/transform_speed.py

Encodes two photographs as JPEG of several widths and times, in turns, diffusers' transform (Pillow, lanczos, then to
float and normalised) against ours, both to --resolution pixels square. Prints images per second and their ratio.
"""

import argparse
import io
import sys
import time
from pathlib import Path

import torch
from PIL import Image
from torchvision import transforms

sys.path.insert(0, str(Path(__file__).parent.parent))
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


def measure(function, photos, seconds):
    start, count = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        function(photos[count % len(photos)])
        count += 1
    return count / (time.perf_counter() - start)


def compare(photos, resolution, seconds=1.0, rounds=5):
    """The best of `rounds` turns: (images per second of diffusers' transform, of ours)."""
    theirs = transforms.Compose(
        [
            transforms.Resize(resolution, interpolation=transforms.InterpolationMode.LANCZOS),
            transforms.CenterCrop(resolution),
            transforms.ToTensor(),
            transforms.Normalize([0.5], [0.5]),
        ]
    )
    flags = ["--train_data_dir=.", "--pretrained_model_name_or_path=.", f"--resolution={resolution}", "--center_crop"]
    args = script.parse_args(flags)

    def transform(photo):
        item = {"image": {"bytes": photo, "path": None}, "text": "a photograph"}
        assert script.transform(0, 0, item, "image", 3, args)["skipped"] is None

    speeds = [(0.0, 0.0)]
    for _ in range(rounds):
        other = measure(lambda photo: theirs(Image.open(io.BytesIO(photo)).convert("RGB")), photos, seconds)
        speeds.append((other, measure(transform, photos, seconds)))
    return tuple(map(max, zip(*speeds, strict=True)))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--resolution", type=int, default=256)
    args = parser.parse_args()
    torch.set_num_threads(1)
    for width in (640, 1024, 2048):
        theirs, ours = compare(make_photos(width), args.resolution)
        print(f"{width} px wide: diffusers {theirs:.0f} img/s, ours {ours:.0f} img/s: {ours / theirs:.1f} times")


if __name__ == "__main__":
    main()
