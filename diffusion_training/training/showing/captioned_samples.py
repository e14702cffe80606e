"""Draw samples of prompts and captions on all processes, and the pictures of edits."""

import contextlib
import inspect
from argparse import Namespace
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import gather_object
from diffusers import DiffusionPipeline
from PIL import Image, ImageOps
from PIL.PngImagePlugin import PngInfo

from diffusion_training.batches import Objective
from diffusion_training.data.captioned_data import Data
from diffusion_training.data.encoders import place_decoder
from diffusion_training.data.prompt_file import split_prompt
from diffusion_training.data.references import choose_result_size
from diffusion_training.draws import step_seed
from diffusion_training.errors.sentences import fail
from diffusion_training.families.base import Base, Prompts
from diffusion_training.files import hash_values, saving
from diffusion_training.launch import Launch
from diffusion_training.loading import load_batches
from diffusion_training.stopping import StopSignal
from diffusion_training.training.keeping.writer import Writer
from diffusion_training.training.showing.grid import draw_grid
from diffusion_training.training.showing.sample_base import SampleBase
from diffusion_training.training.showing.samples import save_samples


class Interrupted(Exception):
    """Raised if a stop signal arrives while samples are drawn."""


def choose_sample_bases(
    launch: Launch, base: Base, data: Data, model: torch.nn.Module, args: Namespace
) -> list[SampleBase]:
    """The run's own base and, with --validation_base or --validation_lora, another one.

    Stops with an error if that one can't be used, or a prompt asks for a size that the model can't
    draw. model: the one to be trained.
    """
    multiple = data.family.patch_size(model) * data.latents.downscale
    for line in args.validation_prompts if args.validation_prompts_file else ():
        _, values = split_prompt(line)
        for name in ("width", "height"):
            if values.get(name, 0) % multiple:
                fail(
                    f"--validation_prompts_file: {line!r} has a {name} that is not a multiple of "
                    f"{multiple}, which this model needs"
                )
    bases: list[SampleBase] = [
        SampleBase(
            name=str(base.name),
            family=data.family,
            num_inference_steps=args.num_inference_steps,
            guidance_scale=args.guidance_scale,
        )
    ]
    if args.training_adapter:
        from diffusion_training.training.showing.validation_base import open_plain_base

        bases = [open_plain_base(launch, base, data, model, args)]
    if args.validation_base or args.validation_lora:
        from diffusion_training.training.showing.validation_base import open_other_base

        bases.append(open_other_base(launch, base, data, model, args))
    return bases


def draw_prompts(
    launch: Launch,
    pipeline: DiffusionPipeline,
    data: Data,
    bases: Sequence[SampleBase],
    per_call: int,
    step: int,
    stop_signal: StopSignal,
    writer: Writer,
    args: Namespace,
    **inputs: Any,
) -> None:
    """Draw --num_validation_images of each prompt, and save them as the samples of a step.

    Each process draws a share. An image starts from its own seed, whatever the number of processes.
    A signal stops the drawing, since its sender does not wait for pictures; a resumed run draws
    them.

    bases: what draws, each in columns of its own; see `choose_sample_bases`. per_call: images per
    call of the pipeline. inputs: further arguments of the pipeline.
    """
    assert data.validation  # samples are drawn only if there are prompts
    validation = data.validation
    per_prompt = args.num_validation_images
    # of the switches of --validation_prompts_file, for each image
    values: list[dict[str, Any]] = []
    for line in args.validation_prompts if args.validation_prompts_file else ():
        _, own_values = split_prompt(line)
        for number in range(per_prompt):
            seed = {"seed": own_values["seed"] + number} if "seed" in own_values else {}
            values.append(own_values | seed)
    per_call = 1 if values else per_call
    count = len(args.validation_prompts) * per_prompt

    def choose(numbers: list[int]) -> tuple[Prompts, Prompts]:
        return validation.choose([number // per_prompt for number in numbers], launch.device)

    def choose_inputs(numbers: list[int]) -> dict[str, Any]:
        if not validation.images:
            return inputs
        references = validation.images[numbers[0] // per_prompt]
        height, width = fit_size(references[-1], args.resolution, data.latents.downscale)
        # those of a ControlNet for SD 3 or FLUX.1 have another name, see docs/patches.md
        name = data.family.image_argument
        name = name if takes(pipeline, name) else "control_image"
        given = references if len(references) > 1 else references[0]
        return data.family.size_args(height, width) | {name: given} | inputs

    drawn: list[tuple[tuple[int, int], np.ndarray]] = []  # ((base, image), its pixels)
    for place, base in enumerate(bases):
        if stop_signal.received:
            break
        with base.open(pipeline) as opened:
            share = draw_share(
                launch, opened, base, count, per_call, choose, "sample", stop_signal, args,
                choose_inputs, values,
            )  # fmt: skip
        drawn += [((place, number), image) for number, image in share.items()]
    parts = [] if stop_signal.received else drawn
    parts = [part for part in gather_object(parts) if part[0][1] < count]
    if not launch.is_main or len(parts) < count * len(bases):
        return
    # takes seconds, during which the training goes on
    write = partial(save_grid, launch, data, bases, parts, step, args)
    writer.begin("samples", write)


def save_grid(
    launch: Launch,
    data: Data,
    bases: Sequence[SampleBase],
    drawn: list[tuple[tuple[int, int], np.ndarray]],
    step: int,
    args: Namespace,
) -> None:
    """Save the images of all processes as one picture, the samples of a step.

    bases: see `draw_prompts`. drawn: ((base, image), its pixels from 0 to 1), in any order.
    """
    assert data.validation
    references = data.validation.images
    drawn = sorted(drawn, key=lambda part: part[0])
    images = [(image * 255).round().astype(np.uint8) for _, image in drawn]
    if args.validation_prompts_file and not references:  # white below and beside smaller ones
        side = max(max(image.shape[:2]) for image in images)
        images = [
            np.pad(
                image,
                ((0, side - image.shape[0]), (0, side - image.shape[1]), (0, 0)),
                constant_values=255,
            )
            for image in images
        ]
    count = len(images) // len(bases)
    columns = []  # of each base: [prompts, images, H, W, C]
    for place, base in enumerate(bases):
        own = images[place * count : (place + 1) * count]
        if references:
            pairs = zip(args.validation_prompts, references, strict=True)
            name = [base.describe()] if base.prefix else []
            keys = [
                hash_values([prompt, *name, *(each.tobytes().hex() for each in given)])
                for prompt, given in pairs
            ]
            firsts = own[:: args.num_validation_images]
            before = keep_before(firsts, keys, args.output_dir, step, base.prefix)
            shown = [[] for _ in keys] if base.prefix else references  # references once
            own = arrange_edits(own, before, shown, args.resolution)
        columns.append(np.stack(own).reshape(len(args.validation_prompts), -1, *own[0].shape))
    headings = [(base.describe(), x.shape[1]) for base, x in zip(bases, columns, strict=True)]
    grid = draw_grid(
        np.concatenate(columns, axis=1), args.validation_prompts, headings if len(bases) > 1 else ()
    )
    save_samples(launch.accelerator, grid, args.output_dir, step)


def fit_size(reference: Image.Image, resolution: int, multiple: int) -> list[int]:
    """The size (height, width) of an edit's result: that of its last reference."""
    return choose_result_size(reference.height, reference.width, resolution, multiple)


def takes(pipeline: Any, name: str) -> bool:
    """Whether a call of the pipeline has an argument with this name."""
    return name in inspect.signature(pipeline.__call__).parameters


def before_path(output_dir: str | Path, number: int, prefix: str = "") -> Path:
    """Return the path of a prompt's first sample from before training. prefix: of `SampleBase`."""
    return Path(output_dir) / "samples" / f"{prefix}before-{number:02d}.png"


def keep_before(
    images: list[np.ndarray], keys: list[str], output_dir: str, step: int, prefix: str = ""
) -> list[np.ndarray]:
    """The first sample of each prompt from before training; none if it was not drawn.

    At step 0, `images` are these samples, and are kept for later pictures.

    keys: what the samples are of, so that a resumed run does not show those of other prompts.
    prefix: of `SampleBase`.
    """
    paths = [before_path(output_dir, number, prefix) for number in range(len(images))]
    if step == 0:
        folder = paths[0].parent
        folder.mkdir(exist_ok=True)
        for image, key, path in zip(images, keys, paths, strict=True):
            about = PngInfo()
            about.add_text("key", key)
            with saving(folder, path) as unfinished:
                Image.fromarray(image).save(unfinished / path.name, pnginfo=about)
    elif all(path.exists() for path in paths):
        before = [Image.open(path) for path in paths]
        if all(each.info.get("key") == key for each, key in zip(before, keys, strict=True)):
            return [np.array(each) for each in before]
    return []


def arrange_edits(
    images: list[np.ndarray],
    before: list[np.ndarray],
    references: Sequence[list[Image.Image]],
    side: int,
) -> list[np.ndarray]:
    """For each prompt its references, the sample from before training, and the samples.

    All become squares of a side, with white beside those of another shape.
    """
    per_prompt = len(images) // len(references)
    listed: list[Any] = []
    for number, own in enumerate(references):
        listed += [*own, *before[number : number + 1]]
        listed += images[number * per_prompt : (number + 1) * per_prompt]
    pictures = [Image.fromarray(np.asarray(each)).convert("RGB") for each in listed]
    return [np.array(ImageOps.pad(each, (side, side), color="white")) for each in pictures]


def draw_captions(
    launch: Launch,
    pipeline: DiffusionPipeline,
    data: Data,
    base: SampleBase,
    objective: Objective,
    stop_signal: StopSignal,
    args: Namespace,
    rows: Sequence[int],
    **inputs: Any,
) -> dict[int, np.ndarray]:
    """Draw a sample with the caption of each of `rows`, for --validation_metrics.

    Returns the share of this process, {index of the row: image [H, W, C] from 0 to 1}; fewer after
    a signal. inputs: further arguments of the pipeline.
    """
    per_call = 1 if data.family.samples_one_by_one else args.train_batch_size
    empty: Any = {name: value[None] for name, value in data.empty_prompt.items()}
    own = launch.share(len(rows))
    keys = [[(None, rows[number % len(rows)], 1.0)] for number in own]
    batches = load_batches(data.dataset, keys, 0, launch.device)

    def choose(numbers: list[int]) -> tuple[Prompts, Prompts]:  # in the order of `own`
        found = [objective.prepare_held_out(next(batches)).condition for _ in numbers]
        prompts: Any = {
            name: torch.cat([pad_to(each[name], value.shape[1]) for each in found])
            for name, value in empty.items()
        }
        return prompts, empty

    with base.open(pipeline) as opened:
        return draw_share(
            launch, opened, base, len(rows), per_call, choose, "metric", stop_signal, args,
            lambda numbers: inputs,
        )  # fmt: skip


def pad_to(embeds: torch.Tensor, tokens: int) -> torch.Tensor:
    """Pad embeddings or masks [N, fewer tokens, ...] with zeros, as `empty_prompt` is padded."""
    behind = [0, 0] * (embeds.dim() - 2)
    return torch.nn.functional.pad(embeds, [*behind, 0, tokens - embeds.shape[1]])


def draw_share(
    launch: Launch,
    pipeline: DiffusionPipeline,
    base: SampleBase,
    count: int,
    per_call: int,
    choose: Callable[[list[int]], tuple[Prompts, Prompts]],
    purpose: str,
    stop_signal: StopSignal,
    args: Namespace,
    choose_inputs: Callable[[list[int]], dict[str, Any]],
    values: Sequence[dict[str, Any]] = (),
) -> dict[int, np.ndarray]:
    """Draw this process's share of `count` images: {number: image [H, W, C] from 0 to 1}.

    After a signal there are fewer. Numbers from `count` on are placeholders.

    choose: numbers -> (their prompts, the empty prompt). purpose: keys the seeds. choose_inputs:
    numbers -> further arguments of the pipeline. values: what each image has instead of the flags'
    values, under the names of `split_prompt`; then `per_call` is 1. Steps and guidance are those of
    the run's own base alone, since another one draws in few steps.
    """

    def interrupt(
        pipeline: DiffusionPipeline, index: int, timestep: torch.Tensor, tensors: dict
    ) -> dict:
        if stop_signal.poll():
            raise Interrupted
        return tensors

    watched = "callback_on_step_end"
    callbacks = {watched: interrupt} if takes(pipeline, watched) else {}
    device = launch.device
    model = getattr(pipeline, "unet", None) or pipeline.transformer
    place_decoder(pipeline.vae, device)
    pipeline.set_progress_bar_config(disable=True)
    training = model.training
    model.eval()  # without dropout
    own = launch.share(count)
    images: list[Any] = []
    for start in range(0, len(own), per_call):
        numbers = [number % count for number in own[start : start + per_call]]
        prompts, empty = choose(numbers)
        with contextlib.suppress(Interrupted):
            asked = base.family.size_args(args.resolution, args.resolution) | choose_inputs(numbers)
            steps, guidance = base.num_inference_steps, base.guidance_scale
            seeds = [step_seed(purpose, args.seed, number) for number in numbers]
            if values:
                own_values = values[numbers[0]]
                if not base.prefix:
                    steps = own_values.get("sample_steps", steps)
                    guidance = own_values.get("scale", guidance)
                seeds = [own_values.get("seed", *seeds)]
                if own_values.keys() & {"width", "height"}:
                    sides = (own_values.get(name, args.resolution) for name in ("height", "width"))
                    asked |= base.family.size_args(*sides)
            drawn = pipeline(
                **base.family.call_args(prompts, empty, guidance),
                output_type="np",
                **callbacks,
                num_inference_steps=steps,
                generator=[torch.Generator(device).manual_seed(seed) for seed in seeds],
                **asked,
            )
            images.extend(base.family.read_images(drawn))
        if stop_signal.poll():
            break
    model.train(training)
    return dict(zip(own, images, strict=False))
