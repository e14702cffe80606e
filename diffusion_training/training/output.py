"""The folder of a run: opened, locked, and written to, each thing whole or not at all."""

import json
import math
import os
from functools import partial
from pathlib import Path

import numpy as np
from huggingface_hub import create_repo, repo_info
from PIL import Image, ImageDraw, ImageFont

from diffusion_training.arguments import format_args
from diffusion_training.errors import UNDO, explained, fail
from diffusion_training.files import check_output_dir, clean, leave_nothing, saving, take_folder
from diffusion_training.training.checkpoints import find_checkpoint


def open_output_dir(accelerator, script, args):
    """Make, lock and clean --output_dir, find the hub repository, and write run.args, which is this command again.

    `script`: the file that is run. Returns (the lock, None but on the first process; the checkpoint to go on from, or
    None).
    """
    check_output_dir(args)
    output_dir = Path(args.output_dir)
    lock = None
    if accelerator.is_main_process:
        own = {"run.args", "metrics.jsonl", "find_lr.json"}  # one of which each run leaves; a cache has run.args too
        is_own = lambda names: own & names and "cache.json" not in names  # noqa: E731
        if not output_dir.exists():
            UNDO.append(partial(leave_nothing, output_dir))
        lock = take_folder(output_dir, output_dir, is_own, "run of this script")
        with explained(f"--output_dir {output_dir} can't be written to"):
            clean(output_dir)
    accelerator.wait_for_everyone()
    # By all processes, so that all refuse alike
    checkpoint = find_checkpoint(args.resume_from_checkpoint, args.output_dir)
    if accelerator.is_main_process and checkpoint is None and not args.find_lr:
        for old in (output_dir / "samples").glob("step-*.png"):  # of a run that left no checkpoint: a folder holds one
            old.unlink()
    if accelerator.is_main_process and not args.find_lr:
        with saving(output_dir, "run.args") as unfinished:
            (unfinished / "run.args").write_bytes(os.fsencode(format_args(args, Path(script).name)))
    if accelerator.is_main_process and args.push_to_hub:
        name, private = args.hub_model_id or output_dir.resolve().name, args.hub_private_repo or None
        with explained(f"--push_to_hub: no repository {name}; `hf auth login` first, or leave it out"):
            args.hub_model_id = create_repo(name, private=private, exist_ok=True).repo_id
            public = private and not repo_info(args.hub_model_id).private
        if public:
            fail(f"--hub_private_repo: {args.hub_model_id} exists and is public; make it private, or choose another")
    return lock, checkpoint


def samples_path(output_dir, step):
    """Where the samples after a step are."""
    return Path(output_dir) / "samples" / f"step-{step:07d}.png"


def save_samples(accelerator, picture, output_dir, step):
    """Write a PIL picture of samples whole or not at all, and pass it to the trackers that take pictures."""
    path = samples_path(output_dir, step)
    path.parent.mkdir(exist_ok=True)
    with saving(path.parent, path) as unfinished:
        picture.save(unfinished / path.name)  # a half picture would pass for one that is done
    for tracker in accelerator.trackers:
        if hasattr(tracker, "log_images"):
            layout = {"dataformats": "NHWC"} if tracker.name == "tensorboard" else {}
            tracker.log_images({"samples": np.asarray(picture)[None]}, step=step, **layout)


def save_pipeline(pipeline, output_dir):
    """Write the pipeline folder; the one that stood there stays until the new one is whole."""
    if not all(weight.isfinite().all() for weight in pipeline.unet.parameters()):
        fail("the weights are not finite: they are not saved, and the pipeline that stood there stays", alone=True)
    with saving(output_dir, f"the pipeline in {output_dir}") as unfinished:
        pipeline.save_pretrained(unfinished)
        for path in unfinished.glob("*/config.json"):  # where a model came from on this machine is nobody's business
            config = json.loads(path.read_text())
            if os.path.exists(config.pop("_name_or_path", "")):
                path.write_text(json.dumps(config, indent=2) + "\n")


def draw_grid(images, prompts):
    """Images uint8 [prompts, per prompt, H, W, C] -> a picture with a row for each prompt, which stands beside it."""
    prompts = [prompt if len(prompt) < 400 else prompt[:400] + "…" for prompt in prompts]  # measured again and again
    size = max(64, images.shape[2])
    font, margin = ImageFont.load_default(14), 4
    label = min(400, max(math.ceil(font.getlength(prompt)) for prompt in prompts)) + 2 * margin
    step = size + margin
    grid = Image.new("RGB", (label + images.shape[1] * step, len(prompts) * step), "white")
    draw = ImageDraw.Draw(grid)
    for y, (prompt, row) in enumerate(zip(prompts, images, strict=True)):
        while font.getlength(prompt) > label - 2 * margin:
            prompt = prompt[:-2].rstrip("…") + "…"
        draw.text((margin, y * step + size // 2), prompt, "black", font, anchor="lm")
        for x, image in enumerate(row):
            picture = Image.fromarray(image.squeeze()).convert("RGB").resize((size, size), Image.NEAREST)
            grid.paste(picture, (label + x * step, y * step))
    return grid
