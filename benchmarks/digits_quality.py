"""Do the demos learn? Judge 200 samples of a demo's pipeline with a classifier trained on the real digits.

    accelerate launch train_unconditional.py && python benchmarks/digits_quality.py ddpm-digits
    accelerate launch precompute_latents.py && accelerate launch train_text_to_image.py \\
        && python benchmarks/digits_quality.py sd-digits

Prints the classifier's accuracy on held-out digits and, of an unconditional pipeline, the share of samples that it is
at least 0.9 sure of and how many of each digit there are; of a text-to-image pipeline, prompted for each digit 20
times, the share of samples that show the digit, at guidance scales 1 and 3, and what the empty prompt draws. Exit
status 1 if fewer than 90 % are sure or right, or one of the ten is missing.
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


def load_digits():
    """The demo's digits in a fixed order: images [1797, 1, 8, 8] in [0, 1], labels [1797]."""
    rows = datasets.load_dataset(str(DIGITS), split="train").shuffle(seed=0)
    images = torch.from_numpy(np.stack([np.array(image) for image in rows["image"]]))[:, None] / 255
    return images, torch.tensor([NAMES.index(text.split()[-1]) for text in rows["text"]])


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
    parser.add_argument("pipeline", help="output_dir of a trainer")
    parser.add_argument("--num_inference_steps", type=int, default=50)
    args = parser.parse_args()
    torch.manual_seed(0)
    images, labels = load_digits()
    classifier = train_classifier(images[:1400], labels[:1400])
    with torch.no_grad():
        real = classifier(images[1400:]).softmax(dim=-1)
    print(
        f"classifier: {(real.argmax(-1) == labels[1400:]).float().mean():.1%} right on 397 held-out digits,", end=" "
    )
    print(f"at least 0.9 sure of {(real.amax(-1) >= 0.9).float().mean():.1%} of them")

    pipeline = DiffusionPipeline.from_pretrained(args.pipeline)
    pipeline.set_progress_bar_config(disable=True)
    options = {"num_inference_steps": args.num_inference_steps, "output_type": "np"}

    def classify(*prompts, **more):
        samples = pipeline(*prompts, generator=torch.Generator().manual_seed(1), **more, **options).images
        samples = torch.from_numpy(samples).permute(0, 3, 1, 2).mean(dim=1, keepdim=True)
        with torch.no_grad():
            return classifier(F.interpolate(samples, size=8, mode="area")).softmax(dim=-1)

    if not hasattr(pipeline, "tokenizer"):
        drawn = classify(200)
        good, counts = (drawn.amax(-1) >= 0.9).float().mean().item(), drawn.argmax(-1).bincount(minlength=10).tolist()
        print(f"samples: at least 0.9 sure of {good:.1%} of 200, of each digit {counts}")
    else:
        wanted = torch.arange(10).repeat_interleave(20)
        prompts = [f"a handwritten digit {NAMES[digit]}" for digit in wanted]
        for guidance_scale in (1.0, 3.0):
            right = classify(prompts, guidance_scale=guidance_scale).argmax(-1) == wanted
            good, each = right.float().mean().item(), right.view(10, 20).sum(-1).tolist()
            print(f"samples: {good:.1%} of 200 right at guidance scale {guidance_scale:g}, of 20 each {each}")
        counts = classify([""] * 200, guidance_scale=1.0).argmax(-1).bincount(minlength=10).tolist()
        print(f"empty prompt: of each digit {counts}")
    raise SystemExit(good < 0.9 or min(counts) == 0)


if __name__ == "__main__":
    main()
