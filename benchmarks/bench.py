"""Code that the benchmarks share.

Models with random weights, images, caches of random numbers, and the timing of training steps.
"""

import argparse
import contextlib
import io
import itertools
import json
import math
import os
import platform
import runpy
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
# Sizes of the models; "text" is (hidden size, layers) of the text encoder.
# sd2: Stable Diffusion 2.
# tenth: a tenth of its channels; the VAE's share of the work at 512 px is about the same.
# small: fast encoders whose outputs have as many bytes as Stable Diffusion 2's.
# toy: small enough for tests.
SIZES = {
    "sd2": {
        "unet": (320, 640, 1280, 1280),
        "vae": (128, 256, 512, 512),
        "groups": 32,
        "text": (1024, 23),
    },
    "tenth": {"unet": (32, 64, 128, 128), "vae": (18, 36, 72, 72), "groups": 6, "text": (96, 2)},
    "small": {"unet": (8, 8), "vae": (8, 16, 16, 16), "groups": 8, "text": (1024, 0)},
    "toy": {"unet": (8, 8), "vae": (4, 4, 4, 4), "groups": 4, "text": (32, 2)},
}


def make_models(folder, size):
    """Make a Stable Diffusion folder with random weights."""
    import torch
    from diffusers import (
        AutoencoderKL,
        DDPMScheduler,
        StableDiffusionPipeline,
        UNet2DConditionModel,
    )
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

    shape, (width, layers) = SIZES[size], SIZES[size]["text"]
    blocks, levels = len(shape["unet"]), len(shape["vae"])
    torch.manual_seed(0)
    config = json.loads((ROOT / "configs/stable_diffusion_v2_base_unet.json").read_text())
    config |= {"block_out_channels": shape["unet"], "cross_attention_dim": width}
    config |= {"attention_head_dim": [max(1, channels // 64) for channels in shape["unet"]]}
    config |= {"norm_num_groups": 32 if min(shape["unet"]) >= 32 else 4}
    config["down_block_types"] = ["CrossAttnDownBlock2D"] * (blocks - 1) + ["DownBlock2D"]
    config["up_block_types"] = ["UpBlock2D"] + ["CrossAttnUpBlock2D"] * (blocks - 1)
    vae = AutoencoderKL(
        down_block_types=["DownEncoderBlock2D"] * levels,
        up_block_types=["UpDecoderBlock2D"] * levels,
        block_out_channels=shape["vae"],
        layers_per_block=2,
        norm_num_groups=shape["groups"],
        scaling_factor=0.18215,
    )
    tokenizer = CLIPTokenizer.from_pretrained(ROOT / "demo/models/tokenizer", model_max_length=77)
    text_config = CLIPTextConfig(
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=max(1, width // 64),
        vocab_size=49408 if size == "sd2" else len(tokenizer),
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    scheduler = DDPMScheduler.from_pretrained(ROOT / "demo/models/scheduler")
    models = (
        vae,
        CLIPTextModel(text_config),
        tokenizer,
        UNet2DConditionModel.from_config(config),
        scheduler,
    )
    StableDiffusionPipeline(*models, None, None, requires_safety_checker=False).save_pretrained(
        folder
    )
    return Path(folder)


def make_sdxl(folder, size):
    """Make a Stable Diffusion XL folder with random weights.

    It has a second text encoder, and a U-Net with fewer levels, of which the inner ones are deeper.
    """
    import torch
    from diffusers import StableDiffusionPipeline, StableDiffusionXLPipeline, UNet2DConditionModel
    from transformers import CLIPTextModelWithProjection

    sd, (width, _) = (
        StableDiffusionPipeline.from_pretrained(make_models(folder, size)),
        SIZES[size]["text"],
    )
    first, *_, last = SIZES[size]["unet"]
    torch.manual_seed(1)
    sd.text_encoder.config.projection_dim = width
    config = {
        **sd.unet.config,
        "block_out_channels": (first, 2 * first, last),
        "cross_attention_dim": 2 * width,
    }
    config |= {
        "attention_head_dim": [max(1, channels // 64) for channels in config["block_out_channels"]]
    }
    config |= {"down_block_types": ["DownBlock2D"] + 2 * ["CrossAttnDownBlock2D"]}
    config |= {
        "up_block_types": 2 * ["CrossAttnUpBlock2D"] + ["UpBlock2D"],
        "transformer_layers_per_block": [1, 2, 10],
    }
    config |= {"addition_embed_type": "text_time", "addition_time_embed_dim": 256}
    config |= {"projection_class_embeddings_input_dim": width + 6 * 256}
    second = CLIPTextModelWithProjection(sd.text_encoder.config)
    models = (
        sd.vae,
        sd.text_encoder,
        second,
        sd.tokenizer,
        sd.tokenizer,
        UNet2DConditionModel.from_config(config),
    )
    StableDiffusionXLPipeline(*models, sd.scheduler, add_watermarker=False).save_pretrained(folder)
    return Path(folder)


def make_transformer_pipeline(folder, name, **layers):
    """Make the tests' tiny pipeline of this name, but with these numbers of layers."""
    import diffusers

    sys.path.append(str(ROOT / "tests"))
    import tiny_pipelines

    tiny_pipelines.MAKE[name](folder)
    model = diffusers.AutoModel.from_pretrained(str(folder), subfolder="transformer")
    model = type(model).from_config({**model.config, **layers})
    tiny_pipelines.randomize(model)
    model.save_pretrained(folder / "transformer")
    return folder


def make_unet_config(path, widths, side, layers=1):
    """Write the config of a U-Net without attention, for the unconditional trainers."""
    config = {"_class_name": "UNet2DModel", "sample_size": side, "block_out_channels": widths}
    config |= {"layers_per_block": layers, "norm_num_groups": 32 if min(widths) % 32 == 0 else 4}
    config |= {
        "down_block_types": ["DownBlock2D"] * len(widths),
        "up_block_types": ["UpBlock2D"] * len(widths),
    }
    path.write_text(json.dumps(config))
    return path


def make_pictures(side):
    """Yield 16 JPEG files that are smooth like photographs."""
    import numpy as np
    from PIL import Image

    rng = np.random.default_rng(0)
    for _ in range(16):
        small, buffer = (
            rng.integers(0, 256, (side // 16 + 2, side // 16 + 2, 3), np.uint8),
            io.BytesIO(),
        )
        Image.fromarray(small).resize((side, side), Image.BICUBIC).save(buffer, "JPEG", quality=90)
        yield buffer.getvalue()


def make_images(folder, count, pictures):
    """Write a folder of `count` images with captions, repeating the given files."""
    folder, pictures = Path(folder), list(pictures)
    folder.mkdir(parents=True)
    for i in range(count):
        if i < len(pictures):
            (folder / f"{i}.jpg").write_bytes(pictures[i])
        else:
            os.link(folder / f"{i % len(pictures)}.jpg", folder / f"{i}.jpg")
    lines = [json.dumps({"file_name": f"{i}.jpg", "text": f"a digit {i}"}) for i in range(count)]
    (folder / "metadata.jsonl").write_text("\n".join(lines))
    return folder


def make_cache(
    folder, models, rows, resolution, text_cache="embeddings", rows_per_shard=1024, written=None
):
    """Write a finished latent cache of random numbers, in the format of precompute_latents.py.

    `written`: write only this many shards and make the others links to them. Use it for caches
    that would take too long to write or would not fit on the disk.
    """
    import datasets
    import numpy as np
    import pyarrow as pa
    import torch

    import precompute_latents
    from diffusion_training.data.encoders import load_encoders
    from diffusion_training.data.rows import ImageRows
    from diffusion_training.families.opening import open_base
    from diffusion_training.families.recording import record_family
    from diffusion_training.files import write_file
    from diffusion_training.latents.cache import finish_cache, writing_shard
    from diffusion_training.latents.columns import checksum_row
    from diffusion_training.latents.passes import LatentRows
    from diffusion_training.latents.plan import plan_caches

    folder = Path(folder)
    (folder / "unfinished").mkdir(parents=True)
    args = precompute_latents.parse_args(
        [
            f"--pretrained_model_name_or_path={models}",
            f"--train_data_dir={models}",
            f"--resolution={resolution}",
            f"--text_cache={text_cache}",
            f"--rows_per_shard={rows_per_shard}",
            f"--output_dir={folder}",
        ]
    )
    base = open_base(args, record=record_family)
    encoders = load_encoders(base, torch.float32)
    empty_prompt, described = precompute_latents.describe_encoders(base, encoders, args, "no")
    images = ImageRows(datasets.Dataset.from_dict({"row": range(rows)}), "image")
    (planned,) = plan_caches(args, images, encoders, described, {})
    settings, shards = planned.settings, [*planned.list_shards()]
    write_file(folder / "cache.json", json.dumps(settings))
    tokens, _ = settings["prompt_embeds_shape"]
    rng, numbers = np.random.default_rng(0), math.prod(settings["latents_shape"])

    def encoded(start, end):
        for first in range(start, end, 64):
            count = min(64, end - first)
            columns = {"latents": rng.random((count, numbers), np.float32).astype(np.float16)}
            columns["latents"][:, numbers // 2 :] *= 0.1  # the second half are standard deviations
            if text_cache == "embeddings":
                texts = {name: (count, embeds.size) for name, embeds in empty_prompt.items()}
                columns |= {
                    name: rng.random(shape, np.float32).astype(np.float16)
                    for name, shape in texts.items()
                }
            else:
                texts = ["input_ids", "input_ids_2"][: len(empty_prompt)]
                columns |= {name: rng.integers(0, 200, (count, tokens), np.int32) for name in texts}
            if len(empty_prompt) > 1:  # SDXL
                columns["original_size"] = np.full((count, 2), resolution, np.int32)
                columns["crop_top_left"] = np.zeros((count, 2), np.int32)
            sums = [
                checksum_row({name: column[i] for name, column in columns.items()})
                for i in range(count)
            ]
            arrays = {
                n: pa.FixedSizeListArray.from_arrays(c.ravel(), c.shape[1])
                for n, c in columns.items()
            }
            arrays["text"] = arrays["key"] = pa.array([str(first + i) for i in range(count)])
            arrays["checksum"] = pa.array(sums, pa.uint64())
            counts = {"encoded_again": 0, "captions_cut": 0}
            rows_of_batch = range(first, first + count)
            yield LatentRows(0, rows_of_batch, pa.RecordBatch.from_pydict(arrays), [], counts)

    for number, name in enumerate(shards):
        start = number * rows_per_shard
        if written and number >= written and rows - start >= rows_per_shard:
            for path in folder / name, folder / f"unfinished/{name}.json":
                os.link(path.with_name(path.name.replace(name, shards[number % written])), path)
            continue
        end = min(rows, start + rows_per_shard)
        with writing_shard(folder / name, range(start, end)) as (_, add):
            for item in encoded(start, end):
                add(item)
    finish_cache(folder, empty_prompt, 1)
    return folder


def call(script, argv, limit=None, log=os.devnull, steps=None, forbid_syncs=False):
    """Run a script in its own process, see `child`. Returns what it used, as `os.wait4` does.

    Ends with its output if it fails. limit: seconds, after which it is killed.
    """
    command = [sys.executable, __file__, *map(str, [log, steps, forbid_syncs, script, *argv])]
    with tempfile.NamedTemporaryFile("w+") as output:
        environment = {"HF_HUB_OFFLINE": "1", **os.environ}
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env=environment, start_new_session=True
        )
        timer = threading.Timer(limit or 0, os.kill, (process.pid, signal.SIGKILL))
        if limit:
            timer.start()
        _, status, usage = os.wait4(process.pid, 0)
        timer.cancel()
        process.returncode = os.waitstatus_to_exitcode(status)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # the processes of its data loader
        if process.returncode:
            output.seek(0)
            sys.exit(f"{' '.join(command)} failed:\n{output.read()[-3000:]}")
    return usage


def run(script, argv, steps=None, forbid_syncs=False, limit=None):
    """Run a training script in its own process and time its steps.

    A hook on AdamW records the time of each optimizer step. After `steps` steps the process ends,
    without waiting for the final save. With `forbid_syncs`, waiting for the GPU in the steps before
    the first record (--logging_steps 10) is an error. limit: see `call`.

    Returns {"first": seconds from the start of the process to the end of step 1, "step": mean
    seconds per step after the third, "first_cpu" and "cpu": the same in processor time, without
    loader processes, "start_cpu" and "forward_cpu": processor time from the end of the imports to
    the end of step 1 and to the first call of the trained model, "rss": peak memory in MiB, "gpu":
    peak GPU memory in GiB}.
    """
    with tempfile.TemporaryDirectory() as folder:
        log, begin = Path(folder, "steps"), time.time()
        usage = call(script, argv, limit, log, steps, forbid_syncs)
        if not log.exists():
            sys.exit(f"{script} took no step")
        times, used, peaks, imports, forwards = zip(
            *(map(float, line.split()) for line in log.read_text().splitlines()), strict=True
        )
    warm = min(3, len(times) - 1)
    steps = max(1, len(times) - 1 - warm)
    return {
        "first": times[0] - begin,
        "first_cpu": used[0],
        "start_cpu": used[0] - imports[0],
        "forward_cpu": forwards[0] - imports[0],
        "step": (times[-1] - times[warm]) / steps,
        "cpu": (used[-1] - used[warm]) / steps,
        "rss": usage.ru_maxrss / 1024,
        "gpu": peaks[-1],
    }


def launch(script, **flags):
    """Run a script to its end in a process of its own, on the CPU.

    flags: {name: a value, a list of them, or True for a switch}.
    """
    command = [sys.executable, str(ROOT / f"{script}.py")]
    for name, value in flags.items():
        values = value if isinstance(value, list) else [] if value is True else [value]
        command += [f"--{name}", *map(str, values)]
    status = subprocess.call(command, env=os.environ | {"ACCELERATE_USE_CPU": "true"})
    if status:  # the script has said why
        sys.exit(status)


def interleaved(runs, rounds):
    """Run all functions in turns, once per round, so that a slow machine affects all alike.

    Returns {name: [the result of each round]}.
    """
    results = {name: [] for name in runs}
    for _ in range(rounds):
        for name, function in runs.items():
            results[name].append(function())
    return results


def spread(numbers, form="{:.2f}"):
    """Format the median, followed by the range if there are several numbers."""
    low, high = form.format(min(numbers)), form.format(max(numbers))
    return form.format(statistics.median(numbers)) + (
        f" ({low} to {high})" if len(numbers) > 1 else ""
    )


def find_device():
    """The GPU with CUDA, or the CPU without one. A test puts an imitated GPU there."""
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def find_gpu():
    """torch.cuda, or None without a GPU."""
    import torch

    device = find_device()
    return None if device.type == "cpu" else torch.get_device_module(device)


def machine():
    """Describe the hardware and the torch version."""
    import torch

    processor = platform.processor() or platform.machine()
    for line in (
        Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    ):
        if line.startswith("model name"):
            processor = line.split(":")[1].strip()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    gpu = find_gpu()
    device = gpu.get_device_name() if gpu else "no GPU"
    return (
        f"{device}, {cores} cores of {processor}, {torch.get_num_threads()} threads, "
        f"torch {torch.__version__}"
    )


def show(title, header, rows):
    """Print a Markdown table, each row as soon as it is known."""
    print(f"\n{title}\n\n| {' | '.join(header)} |\n|{'---|' * len(header)}", flush=True)
    for row in rows:
        print(f"| {' | '.join(map(str, row))} |", flush=True)


def make_parser(doc, **defaults):
    """Make a parser with the shared flags. A default of None leaves a flag out."""
    parser = argparse.ArgumentParser(
        description=doc.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    defaults = {
        "size": "tenth",
        "mixed_precision": "no",
        "batch_size": 4,
        "steps": 12,
        "rounds": 3,
        **defaults,
    }
    options = {"size": {"choices": SIZES, "help": "size of the models: SD 2's, or smaller"}}
    options["mixed_precision"] = {"choices": ["no", "fp16", "bf16"]}
    for name, default in defaults.items():
        if default is not None:
            parser.add_argument(f"--{name}", default=default, **options.get(name, {"type": int}))
    return parser


def child(log, steps, forbid_syncs, script, *argv):
    """Run a script as `python script argv` does, and log the time of each optimizer step."""
    import torch
    from accelerate import Accelerator
    from diffusers import ModelMixin

    last = 0 if steps == "None" else int(steps)
    begin = Accelerator.__init__
    marks = {}  # processor time at the end of the imports, and at the first call of the model

    def begin_main(self, *args, **options):  # `main` of all scripts begins with it
        marks.setdefault("imports", time.process_time())
        begin(self, *args, **options)

    def note(module, args):
        if torch.is_grad_enabled() and isinstance(module, ModelMixin):
            trained = [weight for weight in module.parameters() if weight.requires_grad]
            tensors = [*trained[:1], *(each for each in args if torch.is_tensor(each))]
            # calls on the meta device only look at shapes
            if trained and all(each.device.type != "meta" for each in tensors):
                marks["forward"] = time.process_time()
                hook.remove()

    Accelerator.__init__ = begin_main
    hook = torch.nn.modules.module.register_module_forward_pre_hook(note)
    step, count, gpu = torch.optim.AdamW.step, itertools.count(1), find_gpu()

    def timed(self, *args, **options):
        result = step(self, *args, **options)
        number = next(count)
        if gpu and number in (4, last):  # the timing begins and ends here
            gpu.synchronize()
        with open(log, "a") as file:
            peak = gpu.max_memory_allocated() / 2**30 if gpu else math.nan
            marked = f"{marks.get('imports', math.nan)} {marks.get('forward', math.nan)}"
            file.write(f"{time.time()} {time.process_time()} {peak} {marked}\n")
        if gpu and forbid_syncs == "True":
            gpu.set_sync_debug_mode("error" if 5 <= number < 9 else "default")
        if number == last:
            os._exit(0)
        return result

    torch.optim.AdamW.step = timed
    sys.argv, sys.path[0] = [script, *argv], str(Path(script).parent)
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    child(*sys.argv[1:])
