"""How good are a pipeline's samples? FID, KID and CLIP score, with intervals.

    python benchmarks/evaluate_samples.py ddpm-mine --num_samples 5000
    python benchmarks/evaluate_samples.py sd-mine --real path/to/images \\
        --clip openai/clip-vit-large-patch14
    # the demo, without a network
    python benchmarks/evaluate_samples.py ddpm-digits --feature_extractor digits

The real images are those of the run that trained the pipeline, cropped in the centre. If the run
had --holdout, only its held-out images are used. Pass --real if the run trained from a cache or the
pipeline comes from elsewhere. Text to image is prompted with the captions of the real images.

Sample i has its own seed, so the figures are the same for any batch size and, except for rounding,
for any number of processes. FID depends on the number of images and on the feature extractor:
compare only figures for which both are the same.

--feature_extractor inception needs `pip install torchmetrics torch-fidelity`, which downloads the
weights. Prints a Markdown table; --output also writes JSON. The trainers' --validation_metrics
measure the same while they train.
"""

import argparse
import importlib.util
import json
import sys
from pathlib import Path

import datasets
import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import gather_object
from diffusers import DiffusionPipeline
from torch import nn
from tqdm.auto import tqdm

sys.path.insert(0, str(Path(__file__).parent.parent))
import train_text_to_image
import train_unconditional
from diffusion_training.arguments import Flags, list_values, number
from diffusion_training.data.arrays import load_images
from diffusion_training.draws import step_seed
from diffusion_training.errors.sentences import explained
from diffusion_training.launch import accelerator_options, make_launch
from diffusion_training.training.held_out import hold_out
from diffusion_training.training.scores.distances import average, measure_fid, measure_kid
from diffusion_training.training.scores.networks import load_network


def load_digits():
    """Load the demo's digits.

    Returns images [1797, 1, 8, 8] in [0, 1] and labels [1797], numbered in the alphabetical order
    of the captions.
    """
    rows = datasets.load_dataset(str(Path(__file__).parent.parent / "demo/digits"), split="train")
    images = torch.from_numpy(np.stack([np.array(image) for image in rows["image"]]))[:, None] / 255
    return images, torch.from_numpy(np.unique(rows["text"], return_inverse=True)[1])


def train_classifier(images, labels, steps=1000):
    """Train a small conv net on images [N, 1, 8, 8] in [0, 1] and labels [N]."""
    layers = [
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
    ]
    layers += [
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(64 * 16, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    ]
    classifier = nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(classifier.parameters(), lr=1e-3)
    for _ in range(steps):
        batch = torch.randint(len(images), (64,))
        F.cross_entropy(classifier(images[batch]), labels[batch]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return classifier.eval()


def load_extractor(name, device):
    """Load a feature extractor: images uint8 [N, 3, H, W] -> features float32 [N, D]."""
    if name == "digits":
        # The features are the last hidden layer of a classifier of the demo's digits.
        torch.manual_seed(0)
        classifier = train_classifier(*load_digits())[:-1].to(device)
        grey = lambda images: images.float().mean(dim=1, keepdim=True) / 255  # noqa: E731
        return lambda images: classifier(F.interpolate(grey(images), size=8, mode="area"))
    network = load_network(name)
    network.module.to(device)
    return network.embed_images


def load_clip(name, device):
    """Load a scorer: images uint8 [N, 3, H, W], prompts -> CLIP scores [N].

    The score is 100 times the cosine of the two CLIP embeddings.
    """
    network = load_network(name)
    network.module.to(device)

    def score(images, prompts):
        return 100 * F.cosine_similarity(
            network.embed_images(images), network.embed_texts(prompts), dim=1
        )

    return score


def read_real(pipeline, parser, args):
    """Open the real images as the training run did, at the size of the samples.

    Returns (data set, the run's flags, some replaced by this script's). Held-out images are
    recognized by their names, so for a run from a cache they are found in --real.
    """
    path, captioned = Path(args.pipeline, "run.args"), hasattr(pipeline, "tokenizer")
    flags = (
        [f"@{path}"]
        if path.is_file()
        else ["--train_data_dir=.", "--pretrained_model_name_or_path=."]
    )
    run = (train_text_to_image if captioned else train_unconditional).parse_args(flags)
    changed = {"center_crop": True, "preserve_input_precision": False}
    if args.real:
        changed |= {"train_data_dir": args.real, "dataset_name": None}
    elif not path.is_file() or not (run.train_data_dir or run.dataset_name):
        parser.error(f"{args.pipeline} does not name its images: give --real")
    for name in ("image_column", "caption_column"):
        if getattr(args, name):
            changed[name] = getattr(args, name)
    size = pipeline.unet.config.sample_size * getattr(pipeline, "vae_scale_factor", 1)
    changed["resolution"] = args.resolution or (path.is_file() and run.resolution) or size
    changed["guidance_scale"] = args.guidance_scale or getattr(run, "guidance_scale", None)
    run = Flags(**vars(run) | changed)
    channels = 3 if captioned else pipeline.unet.config.in_channels
    images = load_images(run, False, [run.caption_column] if captioned else [], channels)
    return train_unconditional.ImageDataset(images, channels, 0, run), run


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    count = number(1, 10**7, int)
    parser.add_argument("pipeline", help="folder of a pipeline, such as a trainer's --output_dir")
    parser.add_argument(
        "--real", help="folder of real images, with captions for text to image (default: the run's)"
    )
    parser.add_argument("--image_column", help="image column of --real (default: the run's)")
    parser.add_argument("--caption_column", help="caption column of --real (default: the run's)")
    parser.add_argument("--num_samples", type=number(2, 10**7, int), default=1000)
    parser.add_argument(
        "--batch_size", type=count, default=64, help="samples drawn at once by each process"
    )
    parser.add_argument("--num_inference_steps", type=count, default=50)
    parser.add_argument(
        "--guidance_scale", type=number(1, 1000), help="(default: the run's, or 7.5)"
    )
    parser.add_argument(
        "--resolution",
        type=count,
        help="side of the samples in pixels (default: the run's, or the pipeline's)",
    )
    parser.add_argument(
        "--seed", type=number(0, 2**63 - 1, int), default=0, help="seed of the samples"
    )
    parser.add_argument(
        "--feature_extractor",
        default="inception",
        help="inception, digits, a TorchScript file, or a transformers model (hub id or folder)",
    )
    parser.add_argument("--clip", help="CLIPModel for the CLIP score: hub id or folder")
    parser.add_argument(
        "--resamples",
        type=number(0, 10**6, int),
        default=200,
        help="number of resamples for the intervals (0: no intervals)",
    )
    parser.add_argument("--output", type=Path, help="JSON file to write")
    args = parser.parse_args(argv)
    for name in ["torchmetrics", "torch_fidelity"] * (args.feature_extractor == "inception"):
        if importlib.util.find_spec(name) is None:
            parser.error(
                f"`pip install {name.replace('_', '-')}` first, "
                "or choose another --feature_extractor"
            )
    with explained(f"{args.pipeline} can't be loaded as a pipeline"):
        pipeline = DiffusionPipeline.from_pretrained(args.pipeline)
    captioned = hasattr(pipeline, "tokenizer")
    if args.clip and not captioned:
        parser.error("--clip compares samples with their prompts: this pipeline has none")
    dataset, run = read_real(pipeline, parser, args)
    launch = make_launch(Accelerator(**accelerator_options(run)), run)
    accelerator, device = launch.accelerator, launch.device
    rank, num_processes = launch.rank, launch.num_processes
    pipeline.set_progress_bar_config(disable=True)
    pipeline.to(device)
    train_rows, held_out = hold_out(accelerator, dataset, run.holdout, run.seed)
    real_rows = sorted(held_out) or train_rows.tolist()
    if captioned:
        captions = dataset.rows[real_rows][list_values(run.caption_column)[0]]
        captions = [text[0] if isinstance(text, list) and text else text for text in captions]
        # the number of a class is a prompt, too
        captions = [str(text) if isinstance(text, int) else text or "" for text in captions]
        prompts = [captions[i % len(captions)] for i in range(args.num_samples)]
    with explained(f"--feature_extractor {args.feature_extractor} can't be loaded"):
        extract = load_extractor(args.feature_extractor, device)
    with explained(f"--clip {args.clip} can't be loaded"):
        score = load_clip(args.clip, device) if args.clip else None

    def read(numbers):
        batch = dataset[[(None, real_rows[i], 1.0) for i in numbers]]
        decoded = batch["weight"] > 0
        return [i for i, whole in zip(numbers, decoded, strict=True) if whole], batch[
            "pixel_values"
        ][decoded]

    def draw(numbers):
        options = {"num_inference_steps": args.num_inference_steps, "output_type": "np"}
        if captioned:
            options |= {
                "height": run.resolution,
                "width": run.resolution,
                "guidance_scale": run.guidance_scale,
            }
            options["prompt"] = [prompts[i] for i in numbers]
        else:
            options["batch_size"] = len(numbers)
        generators = [
            torch.Generator(device).manual_seed(step_seed("sample", args.seed, i)) for i in numbers
        ]
        images = torch.from_numpy(pipeline(generator=generators, **options).images)
        return numbers, (images * 255).round().byte().permute(0, 3, 1, 2)

    def compute_features(what, load, count):
        """Load `count` images, shared among the processes, and compute their features.

        Returns features [N, D] and CLIP scores [N]; the scores are 0 except for samples.
        """
        mine, found = range(rank, count, num_processes), []
        for start in tqdm(
            range(0, len(mine), args.batch_size), what, disable=not accelerator.is_main_process
        ):
            numbers, images = load(list(mine[start : start + args.batch_size]))
            if not numbers:  # none could be decoded
                continue
            images = images.expand(-1, 3, -1, -1).to(device)
            scored = score and load is draw
            scores = (
                score(images, [prompts[i] for i in numbers]) if scored else torch.zeros(len(images))
            )
            found += zip(numbers, extract(images).cpu(), scores.cpu(), strict=True)
        _, *found = zip(*sorted(gather_object(found), key=lambda item: item[0]), strict=True)
        return [torch.stack(part) for part in found]

    with torch.no_grad():
        real, _ = compute_features("Real images", read, len(real_rows))
        fake, scores = compute_features("Samples", draw, args.num_samples)
    if accelerator.is_main_process:
        report = {
            "pipeline": args.pipeline,
            "samples": len(fake),
            "real": len(real),
            "held_out": bool(held_out),
        }
        report |= {
            "feature_extractor": args.feature_extractor,
            "resamples": args.resamples,
            "metrics": {},
        }
        for name, measure in (("FID", measure_fid), ("KID", measure_kid)):
            value, interval = measure(real, fake, args.resamples)
            halves, _ = measure(real[::2], real[1::2])
            report["metrics"][name] = {
                "value": value,
                "interval": interval,
                "halves_of_real": halves,
            }
        if score:
            value, interval = average(scores, args.resamples)
            report["metrics"]["CLIP score"] = {"value": value, "interval": interval}
        print(
            f"\n{len(fake)} samples, {len(real)} real images, "
            f"{'' if held_out else 'not '}held out from training\n"
        )
        print(
            "| metric | value | 95 % interval | one half of the real images against the other |\n"
            "|---|---|---|---|"
        )
        for name, found in report["metrics"].items():
            ends = " to ".join(f"{end:.4g}" for end in found["interval"] or [])
            halves = f"{found['halves_of_real']:.4g}" if "halves_of_real" in found else ""
            print(f"| {name} | {found['value']:.4g} | {ends} | {halves} |")
        if args.output:
            args.output.write_text(json.dumps(report, indent=2) + "\n")
    accelerator.end_training()


if __name__ == "__main__":
    main()
