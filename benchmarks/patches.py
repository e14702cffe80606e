"""What do three changes of docs/patches.md gain? Each is trained beside the plain script.

    python benchmarks/patches.py

A small transformer learns to draw Fashion-MNIST by class, at 16 px. The teacher of REPA and the
network of the perceptual term are EfficientNet-Lite0, trained on ImageNet. Pictures and network are
fetched from Debian and PyPI. Samples are drawn without guidance. A classifier that was trained on
other images finds the share of right classes; its features give KID against the test images.

Prints a Markdown table: means of the seeds, with Student's 95 % intervals.
"""

import argparse
import json
import sys
from pathlib import Path

import bench
import pytest
import torch
import torch.nn.functional as F
from diffusers import DiffusionPipeline
from quality import STUDENT, mean_with_interval

sys.path.extend([str(bench.ROOT / "tests"), str(bench.ROOT / "tests/scripts")])
from conftest import MODELS, metrics
from fashion import fetch_fashion, write_images
from test_changes import CHANGES, apply, run
from test_classes import train_classifier
from test_real_data import apply_repa, replace_vgg

import train_flow
from diffusion_training.training.scores.distances import measure_kid

VAE = f"--vae_name_or_path={MODELS / 'vae'}"


class Judge:
    """A classifier of clothes, and its features of the test images."""

    def __init__(self, splits):
        images, labels = splits["train"]
        others = self.scale(images[-15000:])
        self.classifier = train_classifier(others, torch.tensor(labels[-15000:]).long())
        with torch.no_grad():
            self.real = self.classifier[:-1](self.scale(splits["t10k"][0][:2000]))

    def scale(self, images):
        images = torch.tensor(images)[:, None] / 127.5 - 1
        return F.interpolate(images, (16, 16), mode="bilinear", antialias=True)

    @torch.no_grad()
    def measure(self, folder, count):
        """(the share of right classes, KID) of `count` samples of each class."""
        pipeline = DiffusionPipeline.from_pretrained(folder)
        pipeline.set_progress_bar_config(disable=True)
        size = {"height": 16, "width": 16, "use_resolution_binning": False}
        drawn = [
            pipeline(
                [str(label)] * count, num_inference_steps=20, guidance_scale=1, output_type="pt",
                generator=torch.Generator().manual_seed(label), **size,
            ).images
            for label in range(10)
        ]  # fmt: skip
        images = 2 * torch.cat(drawn).mean(dim=1, keepdim=True) - 1
        labels = torch.arange(10).repeat_interleave(count)
        right = (self.classifier(images).argmax(dim=1) == labels).double().mean().item()
        return right, measure_kid(self.real, self.classifier[:-1](images))[0]


def prepare(cli, cache_script, splits):
    """Make the images and their cache with the teacher's features, unless they exist."""
    images, labels = splits["train"]
    if not (cli.output_dir / "images").exists():
        path = cli.output_dir / "images/rows.parquet"
        write_images(images[: cli.rows], labels[: cli.rows], path)
    config = json.loads((bench.ROOT / "demo/digits_flow_transformer.json").read_text())
    config |= {"context_in_dim": 10, "patch_size": 2}
    (cli.output_dir / "transformer.json").write_text(json.dumps(config))
    run(
        cache_script, VAE, "--model_family=prx", "--class_column=label", "--resolution=16",
        f"--train_data_dir={cli.output_dir / 'images'}", "--batch_size=64",
        f"--output_dir={cli.output_dir / 'latents'}", f"--cache_dir={cli.output_dir / 'datasets'}",
    )  # fmt: skip


def train(cli, script, name, seed, flags):
    """Train, unless it was done. Returns (folder, held-out loss)."""
    folder = cli.output_dir / f"{name.replace(' ', '-')}-{seed}"
    if not (folder / "model_index.json").exists():
        run(
            script, VAE, f"--latents_dir={cli.output_dir / 'latents'}", f"--seed={seed}",
            f"--transformer_config_name_or_path={cli.output_dir / 'transformer.json'}",
            f"--max_train_steps={cli.train_steps}", f"--checkpointing_steps={cli.train_steps}",
            "--train_batch_size=64", "--learning_rate=2e-3", "--lr_scheduler=cosine",
            "--lr_warmup_steps=0.05", "--holdout=300", "--report_to=none",
            f"--output_dir={folder}", *flags,
        )  # fmt: skip
    records = metrics(folder)
    (held_out,) = [
        record["held_out_loss_ema"]
        for record in records
        if record["step"] == cli.train_steps and "held_out_loss_ema" in record
    ]
    return folder, held_out


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--seeds", type=int, choices=[1, *STUDENT], default=3)
    parser.add_argument("--rows", type=int, default=4000, help="images, 300 of them held out")
    parser.add_argument("--train_steps", type=int, default=300, help="steps of each training")
    parser.add_argument("--num_samples", type=int, default=1000, help="of each training")
    parser.add_argument("--output_dir", type=Path, default=Path("patches-out"), help="of all runs")
    cli = parser.parse_args(argv)
    cli.output_dir = cli.output_dir.absolute()
    cli.output_dir.mkdir(parents=True, exist_ok=True)
    print(bench.machine())
    splits = fetch_fashion()
    judge = Judge(splits)
    found = {}
    with pytest.MonkeyPatch.context() as monkeypatch:
        replace_vgg(monkeypatch)
        cache_script, repa = apply_repa(monkeypatch, cli.output_dir, side=4)
        prepare(cli, cache_script, splits)
        perceptual, module = (
            apply(CHANGES[name], "flow", cli.output_dir)
            for name in ("perceptual", "trained_module")
        )
        ways = {
            "without": (train_flow, []),
            "REPA": (repa, []),
            # about a fifth of the loss: this network's features are larger than VGG's
            "perceptual term": (perceptual, ["--perceptual_weight=0.02"]),
            "learned weights": (module, []),
        }
        for seed in range(cli.seeds):
            for name, (script, flags) in ways.items():
                folder, held_out = train(cli, script, name, seed, flags)
                figures = (held_out, *judge.measure(folder, cli.num_samples // 10))
                found.setdefault(name, []).append(figures)
    rows = []
    for name, figures in found.items():
        row = [name]
        columns = list(zip(*figures, strict=True))
        of_base = list(zip(*found["without"], strict=True))
        for own, base in zip(columns, of_base, strict=True):
            row.append(mean_with_interval(own))
            differences = [a - b for a, b in zip(own, base, strict=True)]
            row.append("" if name == "without" else mean_with_interval(differences, "{:+.2g}"))
        rows.append(row)
    measures = ["held-out loss", "right classes", "KID"]
    header = [cell for measure in measures for cell in (measure, "difference, same seed")]
    title = f"{cli.train_steps} steps of 64 images"
    bench.show(title, ["", *header], rows)


if __name__ == "__main__":
    main()
