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


def measure(function, photos, seconds=1.0):
    start, count = time.perf_counter(), 0
    while time.perf_counter() - start < seconds:
        function(photos[count % len(photos)])
        count += 1
    return count / (time.perf_counter() - start)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--resolution", type=int, default=256)
    args = parser.parse_args()
    torch.set_num_threads(1)
    theirs = transforms.Compose(
        [
            transforms.Resize(args.resolution, interpolation=transforms.InterpolationMode.LANCZOS),
            transforms.CenterCrop(args.resolution),
            transforms.ToTensor(),
            transforms.Normalize([0.5], [0.5]),
        ]
    )
    flags = ["--train_data_dir=.", "--pretrained_model_name_or_path=.", f"--resolution={args.resolution}"]
    ours = script.parse_args([*flags, "--center_crop"])

    def transform(photo):
        row = script.transform(0, {"image": {"bytes": photo, "path": None}, "text": ""}, "image", 3, ours)
        assert row["skipped"] is None

    for width in (640, 1024, 2048):
        photos, speeds = make_photos(width), [[], []]
        for _ in range(5):
            speeds[0].append(measure(lambda photo: theirs(Image.open(io.BytesIO(photo)).convert("RGB")), photos))
            speeds[1].append(measure(transform, photos))
        theirs_best, ours_best = max(speeds[0]), max(speeds[1])
        print(
            f"{width} px wide: diffusers {theirs_best:.0f} img/s, ours {ours_best:.0f} img/s: "
            f"{ours_best / theirs_best:.1f} times"
        )


if __name__ == "__main__":
    main()
