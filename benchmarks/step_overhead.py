"""What does a trainer's loop cost beyond the model? Compares its steps with a bare loop's.

    python benchmarks/step_overhead.py                          # some minutes on 2 cores
    python benchmarks/step_overhead.py --size sd2 --mixed_precision bf16 --batch_size 64 \\
        --steps 60                                              # on a GPU
    python benchmarks/step_overhead.py --alike --batch_size 2 --rounds 4 --steps 20

The bare loop does a forward pass, a mean squared error, a backward pass and a step of fused AdamW,
on tensors that are already on the device. Both trainers run as users run them: with data from a
cache (or images), noise, EMA, clipping, records and checks. Bare loop and trainer take turns; the
ratio is that of the medians. At the end the time of a step is split by part.

With --alike the bare loop of train_text_to_image.py also reads the cache with the trainer's reader,
draws noise, clips and averages. Then processor time is compared, in pairs of a bare loop and a
trainer that run one after the other, and the ratio is the median of theirs.
"""

import contextlib
import copy
import importlib
import itertools
import statistics
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import bench

TRAINERS = ("train_text_to_image", "train_unconditional")


def read_inputs(args, cache, device):
    """Yield (noisy latents, timesteps, noise, condition) of batches of a latent cache."""
    import torch
    from diffusers import DDPMScheduler

    from diffusion_training.latents.reader import CachedLatents
    from diffusion_training.loading import load_batches

    dataset = CachedLatents({"": cache}, seed=0, random_flip=False)
    rows = itertools.cycle(range(len(dataset)))
    keys = ([(0, next(rows), 1.0) for _ in range(args.train_batch_size)] for _ in itertools.count())
    scheduler = DDPMScheduler.from_pretrained(
        args.pretrained_model_name_or_path, subfolder="scheduler"
    )
    for batch in load_batches(dataset, keys, 0, device):
        moments = batch["latents"].float().unflatten(1, batch["latents_shape"])
        mean, std = moments.chunk(2, dim=1)
        latents = 0.18215 * (mean + std * torch.randn(mean.shape, device=device))
        noise = torch.randn(latents.shape, device=device)
        timesteps = torch.randint(1000, (len(latents),), device=device)
        prompts = batch["prompt_embeds"].float()
        prompts = prompts.unflatten(1, cache.settings["prompt_embeds_shape"])
        noisy = scheduler.add_noise(latents, noise, timesteps)
        yield noisy, timesteps, noise, {"encoder_hidden_states": prompts}


def bare(name, *argv):
    """Run the bare loop with the flags of a trainer. --alike must be the first of them."""
    import torch
    import torch.nn.functional as F
    from torch.optim.swa_utils import get_ema_multi_avg_fn

    from diffusion_training.data.encoders import Latents
    from diffusion_training.families.opening import open_base
    from diffusion_training.families.recording import record_family
    from diffusion_training.latents.reader import load_cache
    from diffusion_training.launch import keep_memory
    from diffusion_training.models import put_on_device

    script = importlib.import_module(name)
    is_alike = argv[0] == "--alike"
    args = script.parse_args(argv[is_alike:])
    device = bench.find_device()
    if device.type == "cpu":
        keep_memory()  # as the trainer does
    if name == TRAINERS[0]:
        cache, base = (
            load_cache(args.latents_dir[0]).settings,
            open_base(args, record=record_family),
        )
        tokens, width = cache["prompt_embeds_shape"]
        shape, resolution = cache["latents_shape"], cache["transform"]["resolution"]
        data = SimpleNamespace(
            family=base.family,
            latents=Latents(cache["latents"], tuple(shape), 0.0, 1.0, resolution // shape[-1]),
            empty_prompt={"prompt_embeds": torch.zeros(tokens, width)},
            resolution=resolution,
            bucket_step=None,
            classes=[],
            references={},
        )
        launch = SimpleNamespace(has_weights=True, device=device, dtype=torch.float32)
        unet = script.make_unet(base, data, None, launch, args)
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
    inputs = itertools.repeat((images, timesteps, noise, condition))
    if is_alike:
        inputs = read_inputs(args, load_cache(args.latents_dir[0]), device)
        average = copy.deepcopy(unet).requires_grad_(False)
    for noisy, times, target, given in itertools.islice(inputs, args.max_train_steps):
        with torch.autocast(device.type, precision, enabled=precision != torch.float32):
            prediction = unet(noisy, times, **given).sample
        F.mse_loss(prediction.float(), target).backward()
        if is_alike:
            torch.nn.utils.clip_grad_norm_(unet.parameters(), args.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        if is_alike:
            means, weights = [*average.parameters()], [*unet.parameters()]
            get_ema_multi_avg_fn(0.999)(means, weights, None)
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


def compare_alike(cli):
    """Compare the processor time of a step with that of a bare loop that does the same."""
    with tempfile.TemporaryDirectory() as folder:
        name = TRAINERS[0]
        flags = make_flags(Path(folder), cli)[name]

        def run_trainer():
            out = f"--output_dir={tempfile.mkdtemp(dir=folder)}/out"
            return bench.run(bench.ROOT / f"{name}.py", [*flags, out], cli.steps)

        def run_bare():
            return bench.run(__file__, [name, "--alike", *flags], cli.steps)

        rounds = bench.interleaved({"bare": run_bare, "trainer": run_trainer}, cli.rounds)
    bare, trainer = ([1000 * each["cpu"] for each in rounds[kind]] for kind in rounds)
    ratios = [one / other for one, other in zip(bare, trainer, strict=True)]
    header = ["", "bare loop, CPU ms per step", "trainer, CPU ms per step", "bare loop / trainer"]
    row = [f"`{name}.py`", bench.spread(bare, "{:.0f}"), bench.spread(trainer, "{:.0f}")]
    title = f"{cli.size}, batch {cli.batch_size}, the same average, clipping, noise and reader"
    bench.show(title, header, [[*row, bench.spread(ratios, "{:.3f}")]])


def main(argv=None):
    parser = bench.make_parser(__doc__, batch_size=12, steps=10)
    parser.add_argument(
        "--resolution", type=int, default=256, help="pixels of the images in the latent cache"
    )
    parser.add_argument(
        "--alike", action="store_true", help="the bare loop also reads, draws, clips and averages"
    )
    cli = parser.parse_args(argv)
    print(bench.machine())
    if cli.alike:
        compare_alike(cli)
        return
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
