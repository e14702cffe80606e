"""What does a choice cost in quality? Trains and evaluates digits with and without it.

    python benchmarks/quality.py precision      # bf16 against float32
    python benchmarks/quality.py processes      # two processes against one, on the same cores
    python benchmarks/quality.py sampling       # the number of sampling steps, DDPM and DDIM
    python benchmarks/quality.py checkpointing  # time and memory of --gradient_checkpointing
    python benchmarks/quality.py prior          # a LoRA that forgets nothing: --preserve_prior
    python benchmarks/quality.py full_bf16      # weights in bf16 against float32, a transformer

The models draw digits of 8 px. A classifier of the demo's digits gives two figures: FID against all
1,797 digits, and for digits by name the share of samples that show the digit in the prompt.
Compared runs take turns, so that a slow machine affects both alike. Trained pipelines stay in
--output_dir: the same command again only evaluates them.

Prints Markdown tables. The interval is Student's for the mean of several seeds, and a bootstrap
for the samples of one pipeline (see evaluate_samples.py).
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import bench
import datasets
import torch
from diffusers import DDIMScheduler, DDPMScheduler, DiffusionPipeline, StableDiffusionPipeline
from evaluate_samples import load_digits, train_classifier

from diffusion_training.training.scores.distances import average, measure_fid

DEMOS = {"digits": "train_unconditional.py", "digits by name": "train_text_to_image.py"}
TRANSFORMER = "digits by name, transformer"
DEMO = str(bench.ROOT / "demo")
BY_NAME = [f"--pretrained_model_name_or_path={DEMO}/models"]
BY_NAME_UNET = [
    *BY_NAME, f"--unet_config_name_or_path={DEMO}/digits_text_to_image_unet.json", "--snr_gamma=5",
    "--train_batch_size=64", "--learning_rate=3e-3", "--lr_scheduler=cosine",
    "--lr_warmup_steps=100",
]  # fmt: skip
NAMES = "zero one two three four five six seven eight nine".split()
# of 97.5 %
STUDENT = {2: 12.71, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306}


def launch(script, folder, cli, *flags, num_processes=1, threads=1):
    """Launch a script in `cli.output_dir` as users do, unless `folder` exists."""
    if (cli.output_dir / folder).exists():
        return
    cli.output_dir.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "accelerate.commands.launch"]
    if num_processes > 1:
        command += ["--multi_gpu", f"--num_processes={num_processes}", "--main_process_port=0"]
    env = {"HF_HUB_OFFLINE": "1", **os.environ, "OMP_NUM_THREADS": str(threads)}
    if not torch.cuda.is_available():
        env["ACCELERATE_USE_CPU"] = "true"
    unfinished = f"{folder}.unfinished"
    command += [str(bench.ROOT / script), f"--output_dir={unfinished}", *flags]
    done = subprocess.run(command, cwd=cli.output_dir, env=env, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    (cli.output_dir / unfinished).rename(cli.output_dir / folder)


def train(demo, folder, cli, seed, *flags, **options):
    """Train a demo. Returns images per second, the median of its records."""
    flags = [f"--seed={seed}", f"--max_train_steps={cli.train_steps}", "--report_to=none", *flags]
    if demo == "digits":
        flags += ["--save_images_epochs=100000", "--save_model_epochs=100000"]
        flags += ["--ddpm_num_inference_steps=1", "--eval_batch_size=1"]
    else:
        flags += ["--validation_epochs=100000", "--num_inference_steps=1"]
        flags += ["--num_validation_images=1"]
        if demo == TRANSFORMER:
            launch("precompute_latents.py", "latents-digits-flow", cli, "--model_family=prx")
            flags.append("--validation_steps=100000")
        else:
            data = [f"--train_data_dir={DEMO}/digits", "--resolution=8", "--batch_size=64"]
            launch("precompute_latents.py", "latents-digits", cli, *BY_NAME, *data)
            flags = [*BY_NAME_UNET, "--latents_dir=latents-digits", *flags]
    launch(DEMOS.get(demo, "train_flow.py"), folder, cli, *flags, **options)
    lines = (cli.output_dir / folder / "metrics.jsonl").read_text().splitlines()
    records = map(json.loads, lines)
    speeds = [record["images_per_second"] for record in records if "loss" in record]
    return statistics.median(speeds[1:])


class Judge:
    """A classifier of the demo's digits, with the features of all real ones."""

    def __init__(self):
        torch.manual_seed(0)
        images, labels = load_digits()
        self.classifier = train_classifier(images, labels)
        # the labels number the captions in alphabetical order
        order = sorted(NAMES)
        self.labels = torch.tensor([order.index(name) for name in NAMES])
        with torch.no_grad():
            self.real = self.classifier[:-1](images)

    @torch.no_grad()
    def draw(self, demo, folder, cli, scheduler=None, steps=20):
        """Draw --num_samples. Returns features [N, D], hits [N] or None, and seconds per sample."""
        pipeline = DiffusionPipeline.from_pretrained(cli.output_dir / folder)
        pipeline.set_progress_bar_config(disable=True)
        if demo != TRANSFORMER:
            scheduler = scheduler or DDIMScheduler
            pipeline.scheduler = scheduler.from_config(pipeline.scheduler.config)
        if demo == "digits":  # its pipeline's class decides the sampler
            kind = "DDIMPipeline" if scheduler is DDIMScheduler else "DDPMPipeline"
            module = __import__("diffusers", fromlist=[kind])
            pipeline = getattr(module, kind)(pipeline.unet, pipeline.scheduler)
            pipeline.set_progress_bar_config(disable=True)
        if demo == TRANSFORMER:  # diffusers' pipeline passes the times of one image and its guide
            forward = pipeline.transformer.forward

            def forward_all(hidden_states, timestep, **inputs):
                times = timestep[:1].expand(len(hidden_states))
                return forward(hidden_states=hidden_states, timestep=times, **inputs)

            pipeline.transformer.forward = forward_all
        drawn = []
        begin = time.perf_counter()
        for start in range(0, cli.num_samples, 64):
            numbers = range(start, min(start + 64, cli.num_samples))
            options = {"num_inference_steps": steps, "output_type": "np"}
            options["generator"] = [torch.Generator().manual_seed(i) for i in numbers]
            if demo == "digits":
                options["batch_size"] = len(numbers)
            else:
                prompts = [f"a handwritten digit {NAMES[i % 10]}" for i in numbers]
                options |= {"prompt": prompts, "guidance_scale": 3.0, "height": 8, "width": 8}
                if demo == TRANSFORMER:
                    options["use_resolution_binning"] = False
            images = torch.from_numpy(pipeline(**options).images)
            drawn.append((images * 255).round().permute(0, 3, 1, 2).mean(dim=1, keepdim=True) / 255)
        seconds = (time.perf_counter() - begin) / cli.num_samples
        images = torch.cat(drawn)
        hits = None
        if demo != "digits":
            wanted = self.labels[torch.arange(cli.num_samples) % 10]
            hits = (self.classifier(images).argmax(dim=1) == wanted).double()
        return self.classifier[:-1](images), hits, seconds

    @torch.no_grad()
    def recognize(self, pipeline, prompts, count, seed):
        """The share of `count` samples of each of ten prompts that show its digit, [10]."""
        pipeline.set_progress_bar_config(disable=True)
        shares = []
        for label, prompt in zip(self.labels, prompts, strict=True):
            generators = [torch.Generator().manual_seed(count * seed + i) for i in range(count)]
            options = {"guidance_scale": 3, "num_inference_steps": 20, "output_type": "pt"}
            drawn = pipeline(prompt=[prompt] * count, generator=generators, **options).images
            classes = self.classifier(drawn.mean(dim=1, keepdim=True)).argmax(dim=1)
            shares.append((classes == label).double().mean())
        return torch.stack(shares)

    def fid(self, features):
        return measure_fid(self.real, features)[0]


def mean_with_interval(values, form="{:.3g}"):
    """Format the mean of several seeds with Student's 95 % interval."""
    mean = statistics.mean(values)
    if len(values) == 1:
        return form.format(mean)
    half = STUDENT[len(values)] * statistics.stdev(values) / len(values) ** 0.5
    return f"{form.format(mean)} ({form.format(mean - half)} to {form.format(mean + half)})"


def compare(cli, title, ways, demos=None):
    """Train the demos in several ways with each seed, and evaluate them.

    ways: {what: function of (demo, seed) that trains and returns (folder, images per second)}.
    demos: by default those of the command line.
    """
    judge = Judge()
    rows = []
    for demo in demos or cli.demos:
        found = {name: [] for name in ways}
        for seed in range(cli.seeds):
            for name, way in ways.items():
                folder, speed = way(demo, seed)
                features, hits, _ = judge.draw(demo, folder, cli)
                right = 0.0 if hits is None else hits.mean().item()
                found[name].append((judge.fid(features), right, speed))
        first = next(iter(found))
        for name, figures in found.items():
            fid, right, _ = zip(*figures, strict=True)
            pairs = zip(figures, found[first], strict=True)
            differences, _, ratios = zip(
                *[(own[0] - base[0], 0, own[2] / base[2]) for own, base in pairs], strict=True
            )
            rows.append(
                [
                    demo,
                    name,
                    mean_with_interval(fid),
                    "" if name == first else mean_with_interval(differences, "{:+.2f}"),
                    mean_with_interval(right) if demo != "digits" else "",
                    bench.spread(ratios),
                ]
            )
    header = ["demo", "", "FID", "difference of FID, same seed", "right digits"]
    bench.show(title, [*header, f"training speed / {first}"], rows)


def compare_precision(cli):
    def way(precision):
        def run(demo, seed):
            folder = f"{demo.replace(' ', '-')}-{precision}-{seed}"
            return folder, train(demo, folder, cli, seed, f"--mixed_precision={precision}")

        return run

    compare(cli, "Precision of the training", {"float32": way("no"), "bf16": way("bf16")})


def compare_full_bf16(cli):
    """Both with Adafactor, and without clipping of the whole gradient and EMA."""

    def way(name, *flags):
        def run(demo, seed):
            shared = ["--optimizer=adafactor", "--no-use_ema", "--max_grad_norm=0"]
            folder = f"transformer-{name}-{seed}"
            return folder, train(demo, folder, cli, seed, *shared, *flags)

        return run

    ways = {
        "float32": way("float32", "--mixed_precision=no"),
        "--full_bf16": way("full-bf16", "--mixed_precision=bf16", "--full_bf16"),
    }
    compare(cli, "Weights in bfloat16", ways, [TRANSFORMER])


def compare_processes(cli):
    def way(count):
        def run(demo, seed):
            folder = f"{demo.replace(' ', '-')}-{count}-processes-{seed}"
            size = f"--train_batch_size={64 // count}"
            options = {"num_processes": count, "threads": 2 // count}
            return folder, train(demo, folder, cli, seed, size, **options)

        return run

    compare(
        cli,
        "64 images per step on two cores",
        {"one process with two threads": way(1), "two processes with a thread each": way(2)},
    )


def compare_sampling(cli):
    judge = Judge()
    rows = []
    for demo in cli.demos:
        folder = f"{demo.replace(' ', '-')}-no-0"
        train(demo, folder, cli, 0, "--mixed_precision=no")
        for name, scheduler in (("DDPM", DDPMScheduler), ("DDIM", DDIMScheduler)):
            for steps in cli.sampling_steps:
                features, hits, seconds = judge.draw(demo, folder, cli, scheduler, steps)
                value, (low, high) = measure_fid(judge.real, features, 200)
                right = ""
                if hits is not None:
                    share, ends = average(hits, 1000)
                    right = f"{share:.3f} ({ends[0]:.3f} to {ends[1]:.3f})"
                figures = [f"{value:.3g} ({low:.3g} to {high:.3g})", right, f"{1000 * seconds:.3g}"]
                rows.append([demo, name, steps, *figures])
    header = ["demo", "sampler", "steps", "FID", "right digits", "ms per sample"]
    bench.show("Sampling steps", header, rows)


def compare_checkpointing(cli):
    with tempfile.TemporaryDirectory() as folder:
        models = bench.make_models(Path(folder, "sd"), cli.size)
        rows = cli.batch_size * max(8, cli.steps)
        cache = bench.make_cache(Path(folder, "cache"), models, rows, cli.resolution, "ids")
        argv = [f"--latents_dir={cache}", f"--pretrained_model_name_or_path={models}"]
        argv += [f"--max_train_steps={cli.steps}", "--checkpointing_steps=1000000"]
        argv += ["--report_to=none", f"--train_batch_size={cli.batch_size}", "--no-validate_first"]

        def way(*flags):
            out = f"--output_dir={tempfile.mkdtemp(dir=folder)}/out"
            return bench.run(bench.ROOT / DEMOS["digits by name"], [*argv, out, *flags], cli.steps)

        found = bench.interleaved(
            {"without": way, "with": lambda: way("--gradient_checkpointing")}, cli.rounds
        )
    rows = []
    for name, runs in found.items():
        pairs = list(zip(runs, found["without"], strict=True))
        rows.append(
            [
                name,
                bench.spread([run["step"] for run in runs]),
                bench.spread([run["step"] / base["step"] for run, base in pairs]),
                bench.spread([run["rss"] for run in runs], "{:.0f}"),
                bench.spread([run["rss"] - base["rss"] for run, base in pairs], "{:+.0f}"),
            ]
        )
    title = f"--gradient_checkpointing ({cli.size}, {cli.resolution} px, batch {cli.batch_size})"
    header = ["", "s per step", "relative time", "most memory, MiB", "difference, MiB"]
    bench.show(title, header, rows)


def compare_prior(cli):
    """A LoRA of demo/zero_to_eight learns the nine from nines alone."""
    judge = Judge()
    base = bench.ROOT / "demo/zero_to_eight"
    nine = "a handwritten digit nine"
    prompts = [f"a handwritten digit {name}" for name in NAMES]
    data = cli.output_dir / "nines-alone"
    if not data.exists():
        data.mkdir(parents=True)
        rows = datasets.load_dataset(str(bench.ROOT / "demo/nines"), split="train")
        rows.filter(lambda row: row["text"] == nine).to_parquet(data / "train.parquet")
    keep = ["--preserve_prior", "--caption_dropout=0", "--class_prompt"]
    ways = {
        "before": None,
        "without": [],
        "without, --caption_dropout 0": ["--caption_dropout=0"],
        "a handwritten digit": [*keep, "a handwritten digit"],
        "zero to four": [*keep, *prompts[:5]],
        "zero to eight": [*keep, *prompts[:9]],
        "zero to eight, --prior_every 4": ["--prior_every=4", *keep, *prompts[:9]],
    }
    found = {name: [] for name in ways}
    for seed in range(cli.seeds):
        for number, (name, flags) in enumerate(ways.items()):
            pipeline = StableDiffusionPipeline.from_pretrained(base)
            if flags is not None:
                folder = f"prior-{number}-{seed}"
                launch(
                    "train_text_to_image.py", folder, cli, f"--seed={seed}", "--rank=16",
                    "--lora_layers=attention",
                    f"--max_train_steps={cli.train_steps}", f"--train_data_dir={data}",
                    f"--pretrained_model_name_or_path={base}", "--resolution=8",
                    "--train_batch_size=64", "--learning_rate=3e-3", "--lr_scheduler=cosine",
                    "--lr_warmup_steps=20", "--snr_gamma=5", "--dataloader_num_workers=0",
                    "--checkpointing_steps=100000", "--report_to=none", *flags,
                )  # fmt: skip
                pipeline.load_lora_weights(cli.output_dir / folder)
            shares = judge.recognize(pipeline, prompts, cli.num_samples // 10, seed)
            parts = (shares[9], shares[:5].mean(), shares[5:9].mean())
            found[name].append([part.item() for part in parts])
    rows = []
    for name, figures in found.items():
        columns = zip(*figures, strict=True)
        rows.append([name, *(f"{statistics.mean(x):.3f} ({min(x):.2f} to {max(x):.2f})"
                             for x in columns)])  # fmt: skip
    header = ["--class_prompt", "nine", "zero to four", "five to eight"]
    bench.show("Right digits after a LoRA of nines alone", header, rows)


COMPARISONS = {
    "precision": compare_precision,
    "processes": compare_processes,
    "sampling": compare_sampling,
    "checkpointing": compare_checkpointing,
    "prior": compare_prior,
    "full_bf16": compare_full_bf16,
}


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("comparison", choices=COMPARISONS)
    parser.add_argument("--demos", nargs="+", choices=DEMOS, default=[*DEMOS])
    parser.add_argument("--seeds", type=int, choices=[1, *STUDENT], default=5)
    parser.add_argument("--train_steps", type=int, default=2000, help="steps of each training")
    parser.add_argument("--num_samples", type=int, default=1000, help="of each pipeline")
    parser.add_argument("--sampling_steps", type=int, nargs="+", default=[10, 20, 50, 250, 1000])
    parser.add_argument("--size", choices=bench.SIZES, default="tenth", help="for checkpointing")
    parser.add_argument("--resolution", type=int, default=512, help="for checkpointing")
    parser.add_argument("--batch_size", type=int, default=4, help="for checkpointing")
    parser.add_argument("--steps", type=int, default=8, help="for checkpointing")
    parser.add_argument("--rounds", type=int, default=3, help="for checkpointing")
    parser.add_argument("--output_dir", type=Path, default=Path("quality"), help="of all runs")
    cli = parser.parse_args(argv)
    if cli.steps < 5:
        parser.error("--steps must be at least 5: the first three are not timed")
    cli.output_dir = cli.output_dir.absolute()
    print(bench.machine())
    COMPARISONS[cli.comparison](cli)


if __name__ == "__main__":
    main()
