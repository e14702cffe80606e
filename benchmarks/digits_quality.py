"""Does the demo learn? Judge 200 samples of its pipeline with a classifier trained on the real digits.

    accelerate launch train_unconditional.py && python benchmarks/digits_quality.py ddpm-digits

Prints the classifier's accuracy on held-out digits, the share of samples that it is at least 0.9 sure of, and how many
of each digit there are. Exit status 1 if fewer than 90 % are sure or one of the ten is missing.
"""

import argparse
from pathlib import Path

import datasets
import numpy as np
import torch
import torch.nn.functional as F
from diffusers import DiffusionPipeline
from torch import nn

DIGITS = Path(__file__).parent.parent / "demo/digits"
NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


def train_classifier(images, labels, steps=1000):
    """A small convolutional net; images [N, 1, 8, 8] in [0, 1], labels [N]."""
    layers = [nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    layers += [nn.Flatten(), nn.Dropout(0.3), nn.Linear(64 * 16, 128), nn.ReLU(), nn.Linear(128, 10)]
    classifier = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(classifier.parameters(), lr=1e-3)
    for _ in range(steps):
        batch = torch.randint(len(images), (64,))
        F.cross_entropy(classifier(images[batch]), labels[batch]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return classifier.eval()


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("pipeline", help="output_dir of train_unconditional.py")
    parser.add_argument("--num_inference_steps", type=int, default=50)
    args = parser.parse_args()
    torch.manual_seed(0)
    rows = datasets.load_dataset(str(DIGITS), split="train").shuffle(seed=0)
    images = torch.from_numpy(np.stack([np.array(image) for image in rows["image"]]))[:, None] / 255
    labels = torch.tensor([NAMES.index(text.split()[-1]) for text in rows["text"]])
    classifier = train_classifier(images[:1400], labels[:1400])
    with torch.no_grad():
        real = classifier(images[1400:]).softmax(dim=-1)
    print(
        f"classifier: {(real.argmax(-1) == labels[1400:]).float().mean():.1%} right on 397 held-out digits,", end=" "
    )
    print(f"at least 0.9 sure of {(real.amax(-1) >= 0.9).float().mean():.1%} of them")

    pipeline = DiffusionPipeline.from_pretrained(args.pipeline)
    pipeline.set_progress_bar_config(disable=True)
    samples = pipeline(
        200, generator=torch.Generator().manual_seed(1), num_inference_steps=args.num_inference_steps, output_type="np"
    ).images
    samples = F.interpolate(torch.from_numpy(samples).permute(0, 3, 1, 2), size=8, mode="area")
    with torch.no_grad():
        drawn = classifier(samples).softmax(dim=-1)
    sure, counts = (drawn.amax(-1) >= 0.9).float().mean().item(), drawn.argmax(-1).bincount(minlength=10).tolist()
    print(f"samples: at least 0.9 sure of {sure:.1%} of 200, of each digit {counts}")
    raise SystemExit(sure < 0.9 or min(counts) == 0)


if __name__ == "__main__":
    main()
