"""Open and lock the output folder of a run, and write its files, completely or not at all."""

import json
import math
import os
import secrets
import textwrap
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from diffusers import DiffusionPipeline
from filelock import BaseFileLock
from huggingface_hub import create_repo, repo_info, upload_folder
from PIL import Image, ImageDraw, ImageFont
from safetensors.torch import save_file

from diffusion_training.arguments import Flags, format_args
from diffusion_training.data.images import measure_roughness
from diffusion_training.errors import UNDO, explained, fail
from diffusion_training.files import (
    check_output_dir,
    clean,
    delete,
    delete_if_empty,
    lock_folder,
    saving,
    sort_header,
)
from diffusion_training.launch import Launch, StopSignal
from diffusion_training.models import is_finite
from diffusion_training.order import step_seed
from diffusion_training.training.checkpoints import (
    find_checkpoint,
    find_checkpoints,
    find_start,
    read_start,
    read_state,
)
from diffusion_training.training.copies import Copies, find_name, open_copies, share_checkpoint
from diffusion_training.training.signs import read_best

SINGLE_FILE = "single_file.safetensors"  # of --output_single_file


@dataclass(frozen=True)
class Run:
    """The locked folder of a run, and the checkpoint to begin from."""

    script: str  # the file that is run
    lock: BaseFileLock | None  # None except on the first process
    checkpoint: Path | None  # to resume from
    before: dict[str, Any]  # the settings of that checkpoint
    hub_model_id: str | None
    start: Path | None = None  # of --init_from, unless the run resumes another
    configs: Path | None = None  # checkpoint with the models' configs; None without --init_from
    command: str = ""  # the content of run.args
    reached: int = -1  # the step of the checkpoint, if there is one
    tracker_id: str | None = None  # a resumed run keeps it, so it is one run in wandb
    copies: Copies | None = None  # at --checkpoints_to; None except on the first process

    def read_state(self, num_images: int, args: Namespace) -> dict[str, Any]:
        """The state in which the run begins; see `read_state`."""
        if self.start:
            return read_start(self.start, args)
        return read_state(self.checkpoint, num_images)

    def settings(self) -> dict[str, Any]:
        return {"hub_model_id": self.hub_model_id, "tracker_id": self.tracker_id}


def settings_of(args: Namespace, *values: Any, **others: Any) -> Flags:
    """Merge the flags and the values found for them, under the names of the flags.

    Checkpoints, trackers, the report and run.args record them. values: `Launch`, `Run`,
    `Data`, `Plan`. others: single values.
    """
    settings = dict(vars(args))
    for value in values:
        settings |= value.settings()
    return Flags(getattr(args, "given", ()), **settings | others)


def open_run(launch: Launch, script: str, args: Namespace) -> Run:
    """Make, lock and clean --output_dir, and make the hub repository. script: the file that is run.

    The files of an earlier run stay until `begin_run`.
    """
    check_output_dir(vars(args))
    output_dir = Path(args.output_dir)
    copies_to = None if args.find_lr else args.checkpoints_to
    given = args.resume_from_checkpoint
    if copies_to:
        given = find_name(given, copies_to)
    lock = None
    copies = None
    if launch.is_main:
        # every run leaves one of these; a cache may too, but it also has cache.json
        own = {"run.args", "metrics.jsonl", "find_lr.json", "image_cache"}
        # perhaps only checkpoints were copied here
        own |= {path.name for path in find_checkpoints(output_dir)}
        if not output_dir.exists():
            UNDO.append(partial(delete_if_empty, output_dir))
        lock = lock_folder(
            output_dir,
            output_dir,
            lambda names: own & names and "cache.json" not in names,
            "run of this script",
        )
        for best in (output_dir / "best", output_dir / "best-before"):
            if args.save_best and best.exists() and not (best / "held_out.json").exists():
                fail(
                    f"--save_best would replace {best}, which is not from a run: rename that folder"
                )
        with explained(f"--output_dir {output_dir} can't be written to"):
            clean(output_dir)
        if copies_to:
            copies = open_copies(args, given, output_dir)
    launch.accelerator.wait_for_everyone()
    folder = output_dir
    if copies_to:
        folder = share_checkpoint(launch.accelerator, copies, copies_to, output_dir)
    if folder != output_dir:
        given = "latest"  # the only one there
    # On all processes, so that all of them stop if there is an error
    checkpoint = find_checkpoint(given, str(folder))
    state = read_state(checkpoint, None)
    hub_model_id = args.hub_model_id
    command = format_args(vars(settings_of(args, launch)), Path(script).name)
    if launch.is_main and not args.find_lr:
        if not (output_dir / "run.args").exists():  # it marks the folder as a run's
            write_command(command, output_dir)
        if args.push_to_hub:
            hub_model_id = make_repository(args)
    init_from = getattr(args, "init_from", None)
    start = None if checkpoint else find_start(init_from)
    configs = (checkpoint or start) if init_from else None
    reached = state["global_step"] if checkpoint else -1
    before = state["settings"]
    tracker_id = None
    if args.report_to in ("wandb", "all"):
        tracker_id = os.environ.get("WANDB_RUN_ID")  # if the user has set it
        # a run that resumes a checkpoint of another folder is a new run
        if checkpoint and checkpoint.parent.resolve() == output_dir.resolve():
            tracker_id = tracker_id or before.get("tracker_id")
        tracker_id = tracker_id or secrets.token_hex(4)
    return Run(
        script=script,
        lock=lock,
        checkpoint=checkpoint,
        before=before,
        hub_model_id=hub_model_id,
        start=start,
        configs=configs,
        command=command,
        reached=reached,
        tracker_id=tracker_id,
        copies=copies,
    )


def begin_run(run: Run, output_dir: Path) -> None:
    """Replace the files of an earlier run, once this one works: a folder holds only one run.

    Call it on the first process.
    """
    if run.checkpoint is None:
        for old in (output_dir / "samples").glob("step-*.png"):
            if old.stem.removeprefix("step-").isdecimal():  # else it is a copy of the user's
                old.unlink()
    restore_best(output_dir, run.reached)
    write_command(run.command, output_dir)


def write_command(command: str, output_dir: Path) -> None:
    """Write run.args, the flags of a command, to repeat it."""
    with saving(output_dir, "run.args") as unfinished:
        (unfinished / "run.args").write_bytes(os.fsencode(command))


def make_repository(args: Namespace) -> str:
    """Make the repository of --push_to_hub, or use an existing one. Returns its id."""
    name = args.hub_model_id or Path(args.output_dir).resolve().name
    private = args.hub_private_repo or None
    with explained(f"--push_to_hub can't use {name}: run `hf auth login`, or remove the flag"):
        name = create_repo(name, private=private, exist_ok=True).repo_id
        is_public = private and not repo_info(name).private
    if is_public:
        fail(f"--hub_private_repo: {name} exists and is public: make it private, or choose another")
    return name


def end_run(launch: Launch, run: Run, done: str, files: list[str], args: Namespace) -> None:
    """Upload if asked for, print `done`, and release everything. files: patterns to upload."""
    accelerator = launch.accelerator
    accelerator.wait_for_everyone()
    # torch 2.11 can hang at exit if gloo's thread has not finished the last gather
    time.sleep(0.1)
    if launch.is_main and args.push_to_hub and not args.find_lr:
        files = ["model_index.json", "README.md", "loss.png", "samples/*", *files]
        with explained(
            f"the upload to {run.hub_model_id} failed; everything is in {args.output_dir}"
        ):
            upload_folder(
                repo_id=run.hub_model_id, folder_path=args.output_dir, allow_patterns=files
            )
    accelerator.print(done)
    if run.lock is not None:
        run.lock.release(force=True)
    accelerator.end_training()


def samples_path(output_dir: str | Path, step: int) -> Path:
    """Return the path of the samples drawn after a step."""
    return Path(output_dir) / "samples" / f"step-{step:07d}.png"


def save_samples(
    accelerator: Accelerator, picture: Image.Image, output_dir: str | Path, step: int
) -> None:
    """Write a picture of samples, and pass it to trackers that support pictures."""
    path = samples_path(output_dir, step)
    path.parent.mkdir(exist_ok=True)
    with saving(path.parent, path) as unfinished:
        picture.save(unfinished / path.name)  # half a picture would count as finished
    for tracker in accelerator.trackers:
        if hasattr(tracker, "log_images"):
            layout = {"dataformats": "NHWC"} if tracker.name == "tensorboard" else {}
            tracker.log_images({"samples": np.asarray(picture)[None]}, step=step, **layout)


class Drawn(NamedTuple):
    """Samples, and their latents before the VAE decodes them."""

    images: Sequence[np.ndarray]  # float [N, H, W, C] in [0, 1]
    latents: torch.Tensor  # see `to_square`


def draw_samples(
    launch: Launch,
    pipeline: DiffusionPipeline,
    draw: Callable[[list[int], list[torch.Generator]], Drawn],
    per_call: int,
    step: int,
    stop_signal: StopSignal,
    settings: Namespace,
) -> float | None:
    """Draw --num_validation_images of each prompt, and save them as the samples of a step.

    Returns the mean roughness of their latents on the first process.

    Each process draws a share. An image starts from its own seed, whatever the number of processes.
    A signal stops the drawing, since its sender does not wait for pictures; a resumed run draws
    them.

    draw: (numbers of up to `per_call` prompts, a generator for each) -> `Drawn`.
    """
    device = launch.device
    model = getattr(pipeline, "unet", None) or pipeline.transformer
    # decode one image at a time: a batch may need more memory than training
    pipeline.vae.to(device).enable_slicing()
    pipeline.set_progress_bar_config(disable=True)
    training = model.training
    model.eval()  # without dropout
    prompts = settings.validation_prompts
    count = len(prompts) * settings.num_validation_images
    own = launch.share(count)
    images: list[Any] = []
    roughness: list[float] = []
    for start in range(0, len(own), per_call):
        numbers = [number % count for number in own[start : start + per_call]]
        generators = [
            torch.Generator(device).manual_seed(step_seed("sample", settings.seed, number))
            for number in numbers
        ]
        drawn = draw([i // settings.num_validation_images for i in numbers], generators)
        if stop_signal.poll():
            break
        images.extend(drawn.images)
        roughness += measure_roughness(to_square(drawn.latents).float()).tolist()
    model.train(training)
    parts = [] if stop_signal.received else list(zip(own, images, roughness, strict=True))
    parts = [part for part in gather_object(parts) if part[0] < count]
    if not launch.is_main or len(parts) < count:
        return None
    parts.sort(key=lambda part: part[0])
    pixels = np.stack([image for _, image, _ in parts])
    pixels = (pixels * 255).round().astype(np.uint8)
    grid = draw_grid(pixels.reshape(len(prompts), -1, *pixels.shape[1:]), prompts)
    save_samples(launch.accelerator, grid, settings.output_dir, step)
    return sum(rough for _, _, rough in parts) / count


def to_square(latents: torch.Tensor) -> torch.Tensor:
    """Latents [N, C, h, w] of square images, which some pipelines keep as [N, h * w, C]."""
    if latents.dim() == 4:
        return latents
    return latents.transpose(1, 2).unflatten(2, (math.isqrt(latents.shape[1]), -1))


def save_pipeline(pipeline: DiffusionPipeline, output_dir: str | Path) -> None:
    """Write the pipeline folder; an existing one stays until the new one is complete."""
    model = getattr(pipeline, "unet", None) or pipeline.transformer
    if not all(map(is_finite, model.parameters())):
        fail(
            "the weights are not finite, so they are not saved; an earlier pipeline is kept: try a "
            "lower --learning_rate",
            alone=True,
        )
    with saving(output_dir, f"the pipeline in {output_dir}") as unfinished:
        pipeline.save_pretrained(unfinished)
        # a local path that a model was loaded from is private
        for path in unfinished.glob("*/config.json"):
            config = json.loads(path.read_text())
            if os.path.exists(config.pop("_name_or_path", "")):
                path.write_text(json.dumps(config, indent=2) + "\n")


def save_single_file(
    weights: dict[str, torch.Tensor], metadata: dict[str, str], output_dir: str | Path
) -> None:
    """Write a model as one file, beside its pipeline folder. weights: see `Family.merge`."""
    with saving(output_dir, f"the single file in {output_dir}") as unfinished:
        save_file(weights, unfinished / SINGLE_FILE, {"format": "pt", **metadata})
        sort_header(unfinished / SINGLE_FILE)


def restore_best(output_dir: Path, reached: int) -> None:
    """Restore best/ as it was at the step `reached`. A new run, with -1, deletes it."""
    best, before = output_dir / "best", output_dir / "best-before"
    for folder in (best, before):
        if read_best(folder).get("step", -1) > reached:
            delete(folder)
    if (before / "held_out.json").exists():  # else it is the user's
        if best.exists():
            delete(before)
        else:
            before.rename(best)


def keep_best(
    output_dir: Path, record: dict[str, Any], step: int, save: Callable[[Path], None]
) -> None:
    """Write best/ if the held-out loss at this step is the lowest so far. On the first process.

    save(folder): writes the content of best/.
    record: the last held-out record. If there are averaged weights, their loss counts, since they
    are saved.

    The previous best is kept as best-before until a checkpoint is as new as the best, so that a run
    resumed from an older checkpoint can restore it.
    """
    if record.get("step") != step:
        return
    loss = record.get("held_out_loss_ema", record.get("held_out_loss"))
    best, before = output_dir / "best", output_dir / "best-before"
    steps = [int(path.name.split("-")[-1]) for path in find_checkpoints(output_dir)]
    reached = max(steps, default=-1)
    known = read_best(best)
    if loss < known.get("held_out_loss", math.inf):
        if known and known["step"] <= reached:
            delete(before)
            best.rename(before)
        with saving(output_dir, best) as unfinished:
            (unfinished / "best").mkdir()
            save(unfinished / "best")
            content = json.dumps({"step": step, "held_out_loss": loss})
            (unfinished / "best/held_out.json").write_text(content)
    if read_best(best).get("step", math.inf) <= reached:  # there is none if no loss was finite
        delete(before)


def draw_grid(images: np.ndarray, prompts: list[str]) -> Image.Image:
    """Turn images uint8 [prompts, per prompt, H, W, C] into a picture: a row for each prompt.

    The prompt is written beside its row, in letters a tenth of an image high, so that they can be
    read when the picture is shown small.
    """
    size = max(64, images.shape[2])
    font = ImageFont.load_default(max(14, size // 10))
    margin = 4
    width = max(400, size)  # of the longest line
    texts = []
    for prompt in prompts:
        lines = textwrap.wrap(prompt[:4000], max(1, int(width / font.getlength("n"))))
        most = max(1, int(size / (1.3 * font.size)))
        texts.append("\n".join([*lines[:most], *["…"] * (len(lines) > most)]))
    draw = ImageDraw.Draw(Image.new("RGB", (1, 1)))
    boxes = [draw.multiline_textbbox((0, 0), text, font) for text in texts]
    label = math.ceil(max(box[2] for box in boxes)) + 2 * margin
    step = size + margin
    grid = Image.new("RGB", (label + images.shape[1] * step, len(prompts) * step), "white")
    draw = ImageDraw.Draw(grid)
    for y, (text, row) in enumerate(zip(texts, images, strict=True)):
        draw.text((margin, y * step + size // 2), text, "black", font, anchor="lm")
        for x, image in enumerate(row):
            picture = (
                Image.fromarray(image.squeeze()).convert("RGB").resize((size, size), Image.NEAREST)
            )
            grid.paste(picture, (label + x * step, y * step))
    return grid
