"""How good are a pipeline's samples? FID, KID and CLIP score, with intervals.

    accelerate launch benchmarks/evaluate_samples.py ddpm-mine --num_samples 5000
    accelerate launch benchmarks/evaluate_samples.py sd-mine --real path/to/images \\
        --clip openai/clip-vit-large-patch14
    # the demo, without a network
    python benchmarks/evaluate_samples.py ddpm-digits --feature_extractor digits

The real images are those of the run that trained the pipeline, cropped in the centre. If the run
had --holdout, only its held-out images are used. Pass --real if the run trained from a cache or the
pipeline comes from elsewhere. Text to image is prompted with the captions of the real images.

Sample i has its own seed, so the figures are the same for any batch size and, except for rounding,
for any number of processes. FID depends on the number of images and on the feature extractor:
compare only figures for which both are the same.

Needs torchmetrics (`pip install torchmetrics`). With --feature_extractor inception it also needs
torch-fidelity, which downloads the weights. Prints a Markdown table; --output also writes
JSON.
"""

import argparse
import functools
import importlib.util
import json
import sys
import warnings
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
from diffusion_training.data.rows import load_rows
from diffusion_training.errors import explained
from diffusion_training.launch import accelerator_options, make_launch
from diffusion_training.order import step_seed
from diffusion_training.training.held_out import hold_out


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
    if name == "inception":
        from torchmetrics.image.fid import NoTrainInceptionV3

        return NoTrainInceptionV3("inception-v3-compat", ["2048"]).to(device)
    # torch warns that TorchScript is deprecated, but extractors are still published in it
    with warnings.catch_warnings(action="ignore"):
        extractor = torch.jit.load(name, map_location=device).eval()
    # Without this option NVIDIA's Inception files for StyleGAN return class probabilities.
    options = (
        {"return_features": True} if "return_features" in str(extractor.forward.schema) else {}
    )
    return lambda images: extractor(images, **options).float()


def load_clip(name, device):
    """Load a scorer: images uint8 [N, 3, H, W], prompts -> CLIP scores [N].

    The score is 100 times the cosine of the two CLIP embeddings.
    """
    from transformers import CLIPModel, CLIPProcessor

    model, processor = (
        CLIPModel.from_pretrained(name).eval().to(device),
        CLIPProcessor.from_pretrained(name),
    )

    def score(images, prompts):
        length = model.config.text_config.max_position_embeddings
        tokens = {"return_tensors": "pt", "padding": True, "truncation": True, "max_length": length}
        embeds = model(**processor(text=prompts, images=list(images.cpu()), **tokens).to(device))
        return 100 * (embeds.image_embeds * embeds.text_embeds).sum(dim=-1)  # both have length 1

    return score


def measure_kid(real, fake, subsets=100):
    """Compute the KID (arXiv:1801.01401) of two sets of features [N, D] with torchmetrics.

    It is the mean over random subsets of at most 1000 features.
    """
    from torchmetrics.image.kid import KernelInceptionDistance

    size = min(len(real), len(fake), 1000)
    torch.manual_seed(0)  # for the random subsets
    with warnings.catch_warnings(action="ignore"):  # it warns that it stores all features
        metric = KernelInceptionDistance(
            nn.Identity(), subsets=subsets, subset_size=size, sync_on_compute=False
        )
    metric.update(real, real=True)
    metric.update(fake, real=False)
    return metric.compute()[0].item()


def measure_fid(real, fake):
    """Compute the FID (arXiv:1706.08500) of two sets of features [N, D] with torchmetrics."""
    from torchmetrics.image.fid import FrechetInceptionDistance

    same = nn.Identity()  # `update` gets features, not images
    same.num_features = real.shape[1]
    metric = FrechetInceptionDistance(same, sync_on_compute=False)  # one process has them all
    metric.update(real, real=True)
    metric.update(fake, real=False)
    return metric.compute().item()


def measure_fid_fast(real, fake):
    """Compute the same FID from singular values, for the resamples.

    With 2048 features torchmetrics takes 18 s on one core.
    """
    means = [part.double().mean(dim=0) for part in (real, fake)]
    roots = [
        (part - mean) / (len(part) - 1) ** 0.5
        for part, mean in zip((real, fake), means, strict=True)
    ]
    roots = [
        torch.linalg.qr(root, mode="r").R if len(root) > root.shape[1] else root for root in roots
    ]
    # trace of the root of the covariances' product
    shared = torch.linalg.svdvals(roots[0] @ roots[1].T).sum()
    return (
        (means[0] - means[1]).square().sum()
        + sum(root.square().sum() for root in roots)
        - 2 * shared
    ).item()


def find_interval(value, function, sets, resamples):
    """Estimate a metric's 95 % interval by the bootstrap: its spread over other sets of this size.

    Drawing with replacement raises FID and KID, because a resample contains duplicates. So the
    spread of the resamples is measured around their mean and applied to `value`. Returns None
    without resamples.
    """
    if not resamples:
        return None
    generator = torch.Generator().manual_seed(0)
    draw = lambda part: part[torch.randint(len(part), (len(part),), generator=generator)]  # noqa: E731
    drawn = np.array([function(*map(draw, sets)) for _ in range(resamples)])
    return [value + float(end) for end in np.quantile(drawn, [0.025, 0.975]) - drawn.mean()]


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
    images = load_rows(run, others=[run.caption_column] if captioned else [], channels=channels)
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
        "--feature_extractor", default="inception", help="inception, digits or a TorchScript file"
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
    for name in ["torchmetrics"] + ["torch_fidelity"] * (args.feature_extractor == "inception"):
        if importlib.util.find_spec(name) is None:
            parser.error(
                f"`pip install {name.replace('_', '-')}` first, "
                "or choose another --feature_extractor"
            )
    if (
        args.feature_extractor not in ("inception", "digits")
        and not Path(args.feature_extractor).is_file()
    ):
        parser.error(
            f"--feature_extractor {args.feature_extractor} is "
            "neither inception, nor digits, nor a file"
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
        captions = [text[0] if isinstance(text, list) and text else text or "" for text in captions]
        prompts = [captions[i % len(captions)] for i in range(args.num_samples)]
    with explained("the feature extractor or CLIP model can't be loaded"):
        extract = load_extractor(args.feature_extractor, device)
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
        kid_fast = functools.partial(measure_kid, subsets=10)
        for name, measure, fast in (
            ("FID", measure_fid, measure_fid_fast),
            ("KID", measure_kid, kid_fast),
        ):
            value = measure(real, fake)
            interval = find_interval(value, fast, (real, fake), args.resamples)
            halves = measure(real[::2], real[1::2])
            report["metrics"][name] = {
                "value": value,
                "interval": interval,
                "halves_of_real": halves,
            }
        if score:
            mean = lambda scores: scores.mean().item()  # noqa: E731
            interval = find_interval(mean(scores), mean, (scores,), args.resamples)
            report["metrics"]["CLIP score"] = {"value": mean(scores), "interval": interval}
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
