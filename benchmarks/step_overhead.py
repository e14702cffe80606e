"""What does a trainer's loop cost beyond the model? Compares its steps with a bare loop's.

    python benchmarks/step_overhead.py                          # some minutes on 2 cores
    python benchmarks/step_overhead.py --size sd2 --mixed_precision bf16 --batch_size 64 \\
        --steps 60                                              # on a GPU

The bare loop does a forward pass, a mean squared error, a backward pass and a step of fused AdamW,
on tensors that are already on the device. Both trainers run as users run them: with data from a
cache (or images), noise, EMA, clipping, records and checks. Bare loop and trainer take turns; the
ratio is that of the medians. At the end the time of a step is split by part.
"""

import contextlib
import functools
import importlib
import statistics
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import bench

TRAINERS = ("train_text_to_image", "train_unconditional")


def bare(name, *argv):
    """Run the bare loop with the flags of a trainer."""
    import torch
    import torch.nn.functional as F

    from diffusion_training.families.opening import open_base
    from diffusion_training.latents.encoders import Latents
    from diffusion_training.latents.reader import load_cache
    from diffusion_training.launch import keep_memory
    from diffusion_training.models import put_on_device

    script = importlib.import_module(name)
    args = script.parse_args(argv)
    device = bench.find_device()
    if device.type == "cpu":
        keep_memory()  # as the trainer does
    if name == TRAINERS[0]:
        cache, base = load_cache(args.latents_dir[0]).settings, open_base(args)
        tokens, width = cache["prompt_embeds_shape"]
        shape, resolution = cache["latents_shape"], cache["transform"]["resolution"]
        data = SimpleNamespace(
            family=base.family,
            latents=Latents(cache["latents"], tuple(shape), 0.0, 1.0, resolution // shape[-1]),
            empty_prompt={"prompt_embeds": torch.zeros(tokens, width)},
            resolution=resolution,
            bucket_step=None,
        )
        predict = functools.partial(script.predict_noise, base.family)
        launch = SimpleNamespace(has_weights=True, device=device, dtype=torch.float32)
        unet = script.make_unet(base, data, predict, None, launch, args)
        size = shape[1:]
        condition = {
            "encoder_hidden_states": torch.randn(
                args.train_batch_size, tokens, width, device=device
            )
        }
    else:
        unet, condition, size = script.make_unet(args), {}, [args.resolution] * 2
    put_on_device(unet, device).train()
    optimizer = torch.optim.AdamW(unet.parameters(), lr=args.learning_rate, fused=True)
    images, noise = torch.randn(
        2, args.train_batch_size, unet.config.in_channels, *size, device=device
    )
    timesteps = torch.randint(1000, (args.train_batch_size,), device=device)
    precision = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(
        args.mixed_precision, torch.float32
    )
    for _ in range(args.max_train_steps):
        with torch.autocast(device.type, precision, enabled=precision != torch.float32):
            prediction = unet(images, timesteps, **condition).sample
        F.mse_loss(prediction.float(), noise).backward()
        optimizer.step()
        optimizer.zero_grad()
    if gpu := bench.find_gpu():
        gpu.synchronize()


def time_parts(name, argv):
    """Measure where a trainer's time goes, as {part: share of a step}.

    Waits for the GPU after each part.
    """
    import torch
    from accelerate import Accelerator

    from diffusion_training.training import state
    from diffusion_training.training.records import Records

    script, marks = importlib.import_module(name), []
    parts = {
        "preparing the batch": (script, "prepare_batch"),
        "noise, forward pass and loss": (script, "compute_loss"),
        "backward pass": (Accelerator, "backward"),
        "gradient norm and clipping": (Accelerator, "clip_grad_norm_"),
        "AdamW": (torch.optim.AdamW, "step"),
        "EMA": (state, "update_ema"),
        "notes": (Records, "add"),
        "records": (Records, "update"),
    }
    times = {part: [] for part in parts}

    def now():
        if gpu := bench.find_gpu():
            gpu.synchronize()
        return time.perf_counter()

    def timed(part, function):
        def inner(*args, **options):
            begin = now()
            result = function(*args, **options)
            times[part].append(now() - begin)
            if part == "EMA":  # once per step
                marks.append((now(), {part: len(found) for part, found in times.items()}))
            return result

        return inner

    with contextlib.ExitStack() as stack:
        for part, (owner, function) in parts.items():
            stack.enter_context(
                mock.patch.object(owner, function, timed(part, getattr(owner, function)))
            )
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        script.main(script.parse_args(argv))
    (begin, before), (end, after) = marks[2], marks[-1]
    spent = {
        part: sum(found[before[part] : after[part]]) / (end - begin)
        for part, found in times.items()
    }
    return {**spent, "all else: data, loop, schedule": 1 - sum(spent.values())}


def make_flags(folder, cli):
    """Return {trainer: its flags}, without --output_dir."""
    models, rows = (
        bench.make_models(folder / "sd", cli.size),
        cli.batch_size * max(8, cli.steps // 4),
    )
    cache = bench.make_cache(folder / "cache", models, rows, cli.resolution)
    side = {"sd2": 64, "tenth": 32}.get(cli.size, 8)
    images = bench.make_images(folder / "images", 4 * rows, bench.make_pictures(side))
    common = [
        f"--max_train_steps={cli.steps}",
        f"--mixed_precision={cli.mixed_precision}",
        "--report_to=none",
    ]
    common += ["--logging_steps=5", "--checkpointing_steps=1000000", "--use_ema"]
    unconditional = [
        *common,
        f"--train_data_dir={images}",
        f"--resolution={side}",
        "--cache_images",
    ]
    unconditional += [
        "--ddpm_num_inference_steps=1",
        "--eval_batch_size=1",
        f"--cache_dir={folder / 'data'}",
    ]
    unconditional += [f"--train_batch_size={4 * cli.batch_size}"]
    if cli.size != "sd2":  # by default it is the U-Net of diffusers' script
        config = bench.make_unet_config(folder / "unet.json", [side, 2 * side], side)
        unconditional += [f"--model_config_name_or_path={config}"]
    text = [*common, f"--latents_dir={cache}", f"--pretrained_model_name_or_path={models}"]
    return dict(
        zip(TRAINERS, ([*text, f"--train_batch_size={cli.batch_size}"], unconditional), strict=True)
    )


def main(argv=None):
    parser = bench.make_parser(__doc__, batch_size=12, steps=10)
    parser.add_argument(
        "--resolution", type=int, default=256, help="pixels of the images in the latent cache"
    )
    cli = parser.parse_args(argv)
    print(bench.machine())
    with tempfile.TemporaryDirectory() as folder:
        rows, parts = [], {}
        for name, argv in make_flags(Path(folder), cli).items():
            runs = {"bare": (__file__, name, *argv), "trainer": (bench.ROOT / f"{name}.py", *argv)}

            def time_step(script, *argv):
                out = (
                    []
                    if script == __file__
                    else [f"--output_dir={tempfile.mkdtemp(dir=folder)}/out"]
                )
                return bench.run(script, [*argv, *out], cli.steps)["step"]

            steps = {kind: (lambda how=how: time_step(*how)) for kind, how in runs.items()}
            steps = bench.interleaved(steps, cli.rounds)
            ratio = statistics.median(steps["bare"]) / statistics.median(steps["trainer"])
            milliseconds = [
                bench.spread([1000 * step for step in steps[kind]], "{:.0f}") for kind in runs
            ]
            rows.append([f"`{name}.py`", *milliseconds, f"{ratio:.3f}"])
            parts[name] = time_parts(name, [*argv, f"--output_dir={folder}/apart-{name}"])
    title = (
        f"{cli.size}, batch {cli.batch_size} (unconditional {4 * cli.batch_size}), "
        f"{cli.mixed_precision}, with EMA"
    )
    header = ["", "bare loop, ms per step", "trainer, ms per step", "trainer's speed / bare loop's"]
    bench.show(title, header, rows)
    shares = [
        [part, *(f"{parts[name][part]:.1%}" for name in TRAINERS)] for part in parts[TRAINERS[0]]
    ]
    bench.show("A step by part", ["", *TRAINERS], shares)


if __name__ == "__main__":
    if sys.argv[1:2] and sys.argv[1] in TRAINERS:
        bare(*sys.argv[1:])
    else:
        main()
