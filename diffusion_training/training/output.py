"""The output folder of a run: opened, locked, and written so that nothing is left half done."""

import json
import math
import os
from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from diffusers import DiffusionPipeline
from filelock import BaseFileLock
from huggingface_hub import create_repo, repo_info
from PIL import Image, ImageDraw, ImageFont

from diffusion_training.arguments import format_args
from diffusion_training.errors import UNDO, explained, fail
from diffusion_training.files import (
    check_output_dir,
    clean,
    delete,
    leave_nothing,
    saving,
    take_folder,
)
from diffusion_training.order import step_seed
from diffusion_training.training.checkpoints import find_checkpoint, find_checkpoints, read_state
from diffusion_training.training.launch import StopSignal
from diffusion_training.training.signs import read_best


def open_output_dir(
    accelerator: Accelerator, script: str, args: Namespace
) -> tuple[BaseFileLock | None, Path | None]:
    """Make, lock and clean --output_dir, make the hub repository, and write run.args.

    run.args holds the flags of this command, to repeat it.

    script: the file that is run.

    Returns (the lock, or None except on the first process; the checkpoint to resume from, or None).
    """
    check_output_dir(args)
    output_dir = Path(args.output_dir)
    lock = None
    if accelerator.is_main_process:
        # every run leaves one of these; a cache may too, but it also has cache.json
        own = {"run.args", "metrics.jsonl", "find_lr.json", "image_cache"}
        # perhaps only checkpoints were copied here
        own |= {path.name for path in find_checkpoints(output_dir)}
        is_own = lambda names: own & names and "cache.json" not in names  # noqa: E731
        if not output_dir.exists():
            UNDO.append(partial(leave_nothing, output_dir))
        lock = take_folder(output_dir, output_dir, is_own, "run of this script")
        with explained(f"--output_dir {output_dir} can't be written to"):
            clean(output_dir)
    accelerator.wait_for_everyone()
    # On all processes, so that all of them stop if there is an error
    checkpoint = find_checkpoint(args.resume_from_checkpoint, args.output_dir)
    if accelerator.is_main_process and checkpoint is None and not args.find_lr:
        # left by a run without a checkpoint: a folder holds only one run
        for old in (output_dir / "samples").glob("step-*.png"):
            old.unlink()
    if accelerator.is_main_process and not args.find_lr:
        restore_best(output_dir, checkpoint)
        with saving(output_dir, "run.args") as unfinished:
            (unfinished / "run.args").write_bytes(os.fsencode(format_args(args, Path(script).name)))
    if accelerator.is_main_process and args.push_to_hub:
        name, private = (
            args.hub_model_id or output_dir.resolve().name,
            args.hub_private_repo or None,
        )
        with explained(
            f"--push_to_hub: no repository {name}; `hf auth login` first, or leave it out"
        ):
            args.hub_model_id = create_repo(name, private=private, exist_ok=True).repo_id
            public = private and not repo_info(args.hub_model_id).private
        if public:
            fail(
                f"--hub_private_repo: {args.hub_model_id} exists and is public; make it "
                "private, or choose another"
            )
    return lock, checkpoint


def samples_path(output_dir: str | Path, step: int) -> Path:
    """Return the path of the samples drawn after a step."""
    return Path(output_dir) / "samples" / f"step-{step:07d}.png"


def save_samples(
    accelerator: Accelerator, picture: Image.Image, output_dir: str | Path, step: int
) -> None:
    """Write a picture of samples, whole or not at all, and pass it to trackers that support it."""
    path = samples_path(output_dir, step)
    path.parent.mkdir(exist_ok=True)
    with saving(path.parent, path) as unfinished:
        picture.save(unfinished / path.name)  # half a picture would be taken for a finished one
    for tracker in accelerator.trackers:
        if hasattr(tracker, "log_images"):
            layout = {"dataformats": "NHWC"} if tracker.name == "tensorboard" else {}
            tracker.log_images({"samples": np.asarray(picture)[None]}, step=step, **layout)


def draw_prompts(
    accelerator: Accelerator,
    pipeline: DiffusionPipeline,
    draw: Callable[[list[str], list[torch.Generator]], Sequence[np.ndarray]],
    most: int,
    step: int,
    stop_signal: StopSignal,
    args: Namespace,
) -> None:
    """Draw --num_validation_images of each prompt, and save them as the samples of a step.

    Each process draws a share. An image starts from its own seed, whatever the number of processes.
    A signal stops the drawing, since its sender does not wait for pictures; a resumed run draws
    what is missing.

    draw: (up to `most` prompts, their generators) -> images float [N, H, W, C] in [0, 1].
    """
    if not args.validation_prompts:
        return
    device = accelerator.device
    model = getattr(pipeline, "unet", None) or pipeline.transformer
    # decode one image at a time: a batch may need more memory than training
    pipeline.vae.to(device).enable_slicing()
    for text_encoder in (pipeline.text_encoder, getattr(pipeline, "text_encoder_2", None)):
        text_encoder and text_encoder.to(device)
    pipeline.set_progress_bar_config(disable=True)
    training = model.training
    model.eval()  # without dropout
    prompts = [
        prompt for prompt in args.validation_prompts for _ in range(args.num_validation_images)
    ]
    mine, images = range(accelerator.process_index, len(prompts), accelerator.num_processes), []
    for start in range(0, len(mine), most):
        batch = mine[start : start + most]
        generators = [
            torch.Generator(device).manual_seed(step_seed("sample", args.seed, i)) for i in batch
        ]
        images.extend(draw([prompts[i] for i in batch], generators))
        if stop_signal.received:
            break
    model.train(training)
    images = gather_object([] if stop_signal.received else list(zip(mine, images, strict=True)))
    if accelerator.is_main_process and len(images) == len(prompts):
        images = np.stack([image for _, image in sorted(images, key=lambda pair: pair[0])])
        images = (images * 255).round().astype(np.uint8)
        grid = draw_grid(
            images.reshape(len(args.validation_prompts), -1, *images.shape[1:]),
            args.validation_prompts,
        )
        save_samples(accelerator, grid, args.output_dir, step)


def save_pipeline(pipeline: DiffusionPipeline, output_dir: str | Path) -> None:
    """Write the pipeline folder; an existing one stays until the new one is complete."""
    model = getattr(pipeline, "unet", None) or pipeline.transformer
    if not all(weight.isfinite().all() for weight in model.parameters()):
        fail(
            "the weights are not finite: they are not saved, and the pipeline that stood "
            "there stays",
            alone=True,
        )
    with saving(output_dir, f"the pipeline in {output_dir}") as unfinished:
        pipeline.save_pretrained(unfinished)
        # a local path that a model was loaded from is private
        for path in unfinished.glob("*/config.json"):
            config = json.loads(path.read_text())
            if os.path.exists(config.pop("_name_or_path", "")):
                path.write_text(json.dumps(config, indent=2) + "\n")


def restore_best(output_dir: Path, checkpoint: Path | None) -> None:
    """Restore best/ as it was at a checkpoint; for a run that begins (None), delete it."""
    reached = read_state(checkpoint, None)["global_step"] if checkpoint else -1
    for folder in (output_dir / "best", output_dir / "best-before"):
        if read_best(folder).get("step", -1) > reached:
            delete(folder)
    if (output_dir / "best-before").exists():
        if (output_dir / "best").exists():
            delete(output_dir / "best-before")
        else:
            (output_dir / "best-before").rename(output_dir / "best")


def keep_best(
    accelerator: Accelerator, record: dict, step: int, save: Callable[[Path], None], args: Namespace
) -> None:
    """With --save_best, write best/ if the held-out loss at this step is the lowest so far.

    save(folder): writes the content of best/.
    record: the last held-out record. The loss of the averaged weights counts if there are any,
    since they are what is saved.

    The previous best is kept as best-before until a checkpoint is as new as the best, so that a run
    resumed from an older checkpoint can restore it.
    """
    output_dir, loss = (
        Path(args.output_dir),
        record.get("held_out_loss_ema", record.get("held_out_loss")),
    )
    if not args.save_best or not accelerator.is_main_process or record.get("step") != step:
        return
    best = output_dir / "best"
    reached = max(
        (int(path.name.split("-")[-1]) for path in find_checkpoints(output_dir)), default=-1
    )
    known = read_best(best)
    if loss < known.get("held_out_loss", math.inf):
        if known and known["step"] <= reached:
            delete(output_dir / "best-before")
            best.rename(output_dir / "best-before")
        with saving(output_dir, best) as unfinished:
            (unfinished / "best").mkdir()
            save(unfinished / "best")
            (unfinished / "best/held_out.json").write_text(
                json.dumps({"step": step, "held_out_loss": loss})
            )
    if read_best(best)["step"] <= reached:
        delete(output_dir / "best-before")


def draw_grid(images: np.ndarray, prompts: list[str]) -> Image.Image:
    """Turn images uint8 [prompts, per prompt, H, W, C] into a picture: a row for each prompt.

    The prompt is written beside its row.
    """
    # cut long ones first, because the loop below measures each shorter version
    prompts = [prompt if len(prompt) < 400 else prompt[:400] + "…" for prompt in prompts]
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
            picture = (
                Image.fromarray(image.squeeze()).convert("RGB").resize((size, size), Image.NEAREST)
            )
            grid.paste(picture, (label + x * step, y * step))
    return grid
