"""Train a flow-matching transformer (PRX) or a LoRA for Z-Image: captioned images -> a pipeline.

    # the demo: digits by name
    accelerate launch precompute_latents.py --model_family prx && accelerate launch train_flow.py
    accelerate launch --config_file accelerate_configs/multi_gpu.yaml train_flow.py \\
        --latents_dir latents-photos --pretrained_model_name_or_path Photoroom/prx-256-t2i \\
        --transformer_config_name_or_path configs/prx_163m.json \\
        --validation_prompts "a red bicycle" --output_dir flow-photos --mixed_precision bf16

Input: caches of precompute_latents.py --model_family prx (--latents_dir), or the images and
captions that precompute_latents.py takes, which are then encoded in every step.
Output, in --output_dir:
    the pipeline, or with --rank pytorch_lora_weights.safetensors, with its model card, samples/,
    metrics.jsonl, loss.png, report.html, logs
    run.args      the flags of this run; @flow-photos/run.args repeats it
    checkpoint-N  one every --checkpointing_steps; to resume from the last one, run the same
                  command with --resume_from_checkpoint latest

Layout of this file:
    parse_args                      the flags; bad values stop the script before anything is loaded
    make_transformer                the model, new or pretrained, checked against the data
    predict_velocity                the one place where the model is called
    prepare_batch, compute_loss     a batch -> the inputs of the transformer, and the loss
    train_step                      one optimizer step, with the calls of Accelerate
    log_validation, describe_model  the samples, and the text of the model card
    main                            the run in phases, with the training loop
The code that all trainers share is in diffusion_training/. To get all of it in one file that you
can change:
python -m diffusion_training.standalone train_flow.py > mine.py
"""

from pathlib import Path

try:
    from diffusion_training import check_version
except ModuleNotFoundError:
    raise SystemExit(
        f"{__file__} needs the package diffusion_training: run `pip install .` in the "
        "script's repository, or make it one file with `python -m diffusion_training.standalone`"
    ) from None
check_version("0.1.0", Path(__file__).name)  # first: another version may lack the modules below

import contextlib
import json
import math
import os
import shlex
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, cast

import diffusers
import numpy as np
import torch
import torch.nn.functional as F
import transformers
from accelerate import Accelerator
from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler

from diffusion_training.arguments import PATH, make_parser, number, parse_demo
from diffusion_training.batches import Batch, Models, Predict, Prepared, StepSums
from diffusion_training.errors import explained, in_one_sentence
from diffusion_training.families.base import Base, Family, Prompts
from diffusion_training.families.known import DEFAULT_FLOW_FAMILY, FAMILIES
from diffusion_training.families.opening import open_base
from diffusion_training.files import saving
from diffusion_training.flags import (
    add_captioned_data_flags,
    add_device_flags,
    add_encoder_flags,
    add_family_flags,
    add_init_flag,
    add_logging_flags,
    add_lora_flags,
    add_optimization_flags,
    add_pipeline_flags,
    add_prompt_flags,
    add_saving_flags,
    add_shard_flag,
    check_data_args,
    check_training_args,
)
from diffusion_training.latents.encoders import load_parts
from diffusion_training.latents.encoding import encode_batch
from diffusion_training.latents.reader import choose_rows
from diffusion_training.latents.source import Data, open_data
from diffusion_training.launch import Launch, StopSignal, make_launch
from diffusion_training.loading import load_batches
from diffusion_training.models import (
    compile_model,
    freeze_on_device,
    freeze_unreached,
    list_parameters,
    load_weights,
    make_new,
)
from diffusion_training.order import Order, step_batches, step_seed
from diffusion_training.quantization import load_base
from diffusion_training.training.costs import Costs
from diffusion_training.training.denoiser import check_denoiser
from diffusion_training.training.held_out import hold_out, log_held_out_loss
from diffusion_training.training.loop import Loop, Results, record_settings
from diffusion_training.training.lora import add_lora, load_network_weights, save_lora
from diffusion_training.training.metadata import name_readers
from diffusion_training.training.objective import HeldOutMeasure, measure_constant, try_sampler
from diffusion_training.training.pipelines import save_pipeline
from diffusion_training.training.records import Records
from diffusion_training.training.report import About, Description, call_pipeline, write_usage
from diffusion_training.training.run_folder import end_run, open_run, settings_of
from diffusion_training.training.samples import Drawn, draw_samples
from diffusion_training.training.trained import Trained
from diffusion_training.training.tuning import find_learning_rate, plan_run

# PRXPipeline still has a base class with a deprecated name.
warnings.filterwarnings("ignore", ".*LoraLoaderMixin", FutureWarning)
# Otherwise tokenizers warns about the loader's processes.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
HERE = shlex.quote(os.path.relpath(Path(__file__).parent))
# The command line of the demo, which runs if no data is given. The user's flags override it.
DEMO = f"""
    --latents_dir latents-digits-flow --pretrained_model_name_or_path {HERE}/demo/models
    --transformer_config_name_or_path {HERE}/demo/digits_flow_transformer.json
    --output_dir flow-digits --train_batch_size 64 --max_train_steps 1500 --validation_steps 500
    --learning_rate 2e-3 --lr_scheduler cosine --lr_warmup_steps 100
    --validation_prompts "a handwritten digit zero" "a handwritten digit one" "a handwritten digit two"
        "a handwritten digit three" "a handwritten digit four" "a handwritten digit five" "a handwritten digit six"
        "a handwritten digit seven" "a handwritten digit eight" "a handwritten digit nine"
    --guidance_scale 3 --checkpointing_steps 10000 --resume_from_checkpoint latest
"""  # noqa: E501

# -------------------------------------------------------------------------------------------------
# the flags


def parse_args(argv: list[str] | None = None) -> Namespace:
    """Parse and check the command line.

    A bad argument stops the script with one line and status 2 before anything is loaded.
    """
    parser = make_parser(__file__, __doc__, "docs/from-scratch.md")

    add_captioned_data_flags(parser)

    add = parser.add_argument_group("model").add_argument
    add_pipeline_flags(add)
    add(
        "--transformer_config_name_or_path",
        type=PATH,
        help="train a new transformer with this config: hub id, folder or JSON file",
    )
    add_init_flag(add)
    add_family_flags(add, default=DEFAULT_FLOW_FAMILY)
    add_encoder_flags(add)
    add_device_flags(add)
    add_shard_flag(add)

    add = parser.add_argument_group("LoRA").add_argument
    add_lora_flags(add, output_kohya_format=False)

    add = parser.add_argument_group("objective").add_argument
    schemes = ["logit_normal", "uniform"]
    add(
        "--weighting_scheme",
        choices=schemes,
        default="logit_normal",
        help="distribution from which the noise levels in training are drawn (arXiv:2403.03206)",
    )
    add(
        "--logit_mean",
        type=number(-100, 100),
        default=0.0,
        help="mean of --weighting_scheme logit_normal; above 0 gives more noise",
    )
    add(
        "--logit_std",
        type=number(1e-3, 100),
        default=1.0,
        help="standard deviation of --weighting_scheme logit_normal",
    )
    add(
        "--shift",
        type=number(1e-2, 100),
        help="shift of the noise levels, in training and samples; above 1 gives more noise "
        "(default: the pipeline's; for a new pipeline 1, or 3 from 512 px)",
    )

    add_optimization_flags(parser, lr_scheduler="constant", adam_beta1=0.9, adam_weight_decay=1e-2)

    add = parser.add_argument_group("logging and samples").add_argument
    add_logging_flags(add, tracker_project_name="flow")
    add_prompt_flags(add, guidance_scale=4.0, num_inference_steps=28)

    add = parser.add_argument_group("saving").add_argument
    add("--output_dir", type=PATH, default="flow-model", help="folder for all output")
    add_saving_flags(add)

    args = parser.parse_args(argv)
    if args.latents_dir is None and args.dataset_name is None and args.train_data_dir is None:
        args = parse_demo(parser, DEMO, argv)

    family = FAMILIES[args.model_family]
    if family.script != "train_flow.py":
        parser.error(f"--model_family {args.model_family} needs {family.script}")
    if args.pretrained_model_name_or_path is None:
        for name in ("vae_name_or_path", "text_encoder_name_or_path"):
            if getattr(args, name) is None:
                parser.error(
                    "give --pretrained_model_name_or_path, or both --vae_name_or_path and "
                    "--text_encoder_name_or_path"
                )
        if not (args.transformer_config_name_or_path or args.init_from):
            parser.error(
                "--transformer_config_name_or_path is needed without a pretrained pipeline"
            )
    if args.rank:
        if not family.attention:
            others = [
                each.name
                for each in FAMILIES.values()
                if each.attention and each.script == family.script
            ]
            parser.error(
                f"--rank needs --model_family {' or '.join(others)} ({family.title} has no LoRA)"
            )
        for name in ("transformer_config_name_or_path", "init_from"):
            if getattr(args, name):
                parser.error(f"--rank needs a pretrained transformer: leave --{name} out")
    if args.output_kohya_format:
        parser.error("--output_kohya_format is for U-Nets: leave it out")
    check_data_args(parser, args)
    check_training_args(parser, args)
    return parser.freeze(args)


# -------------------------------------------------------------------------------------------------
# the model


def predict_velocity(
    family: Family,
    models: Models,
    noisy_latents: torch.Tensor,
    sigmas: torch.Tensor,
    condition: dict[str, torch.Tensor],
) -> torch.Tensor:
    """The velocity that the transformer predicts, noise - latents, float32 [N, C, h, w].

    This is the one place where the transformer is called, except for samples: change it to pass
    further inputs.

    sigmas: share of noise in [0, 1], [N]. condition: see `prepare_batch`.
    """
    prompts = cast(Prompts, condition)
    return family.predict(models["transformer"], noisy_latents, sigmas, prompts)


def make_transformer(
    base: Base, data: Data, predict: Predict, configs: Path | None, launch: Launch, args: Namespace
) -> torch.nn.Module:
    """Make the transformer to train.

    It is the pretrained pipeline's, or a new one, whose config a flag names or a checkpoint has in
    `configs`. With --rank it is frozen, in the precision of the launch or in 4 bits, and only its
    LoRA is trained. Stops with an error if it does not fit the latents and embeddings.
    """
    model_class = getattr(diffusers, base.family.model)
    # Only the config of a checkpoint is read here. `Trained` loads its weights and EMA weights.
    config_source = args.transformer_config_name_or_path
    if configs and not config_source:
        config_source = str(configs / "transformer")
    source = str(config_source or base.source)
    options = {"cache_dir": args.cache_dir}
    if not config_source:
        options |= {"subfolder": "transformer", "revision": args.revision, "variant": args.variant}
    with explained(f"{source} holds no {model_class.__name__}"):
        if config_source or not launch.has_weights:
            config = model_class.load_config(source, **options)
            if config.get("_class_name", model_class.__name__) != model_class.__name__:
                raise ValueError(f"it is a {config['_class_name']}")
            transformer = make_new(model_class, config, launch.has_weights)
        elif args.rank:
            transformer, base_hash = load_base(
                model_class, source, args.base_precision, launch.device, launch.dtype, **options
            )
        else:
            transformer = load_weights(model_class, source, **options)
    models = {"transformer": transformer}
    unreached = check_denoiser(models, predict, "transformer", source, data)
    if args.rank:
        layers = base.family.choose_layers(transformer, args.lora_layers)
        add_lora(transformer, layers, base_hash, launch.dtype, args)
        if args.network_weights:
            read_lora = base.family.read_lora
            load_network_weights(transformer, args.network_weights, "transformer", read_lora)
    freeze_unreached(transformer, unreached)
    return transformer


def make_scheduler(base: Base, resolution: int, args: Namespace) -> FlowMatchEulerDiscreteScheduler:
    """Make the sampler of the pipeline, with --shift."""
    source = base.source
    options = {"cache_dir": args.cache_dir, "revision": args.revision}
    _, class_name = base.index.get("scheduler", [None, None])
    with explained(f"{source} holds no scheduler for flow matching"):
        if class_name == FlowMatchEulerDiscreteScheduler.__name__:
            sampler = FlowMatchEulerDiscreteScheduler.from_pretrained(
                source, subfolder="scheduler", **options
            )
        else:  # the base has no flow matching, or is not a pipeline but single models
            if base.family.recognizes(base.index.get("_class_name", "")) and args.shift is None:
                raise ValueError(f"it has a {class_name}: set the shift of the noise with --shift")
            sampler = FlowMatchEulerDiscreteScheduler(shift=3.0 if resolution >= 512 else 1.0)
        if args.shift is not None:  # the same for all sizes
            sampler = FlowMatchEulerDiscreteScheduler.from_config(
                sampler.config, shift=args.shift, use_dynamic_shifting=False
            )
        if class_name:
            side = resolution // 8  # of the latents, roughly
            shift = choose_shift(sampler, 2, side, side)
            if not 0 < shift < math.inf:
                raise ValueError(f"it shifts the noise by {shift}")
            # some pipelines need it for any scheduler
            mu = compute_mu(sampler.config, side**2 / 4)
            try_sampler(sampler, 10, mu=mu)
    return sampler


def compute_mu(config: Any, tokens: float) -> float:
    """The exponent of the shift for an image of so many tokens, as the pipelines compute it."""
    slope = (config.max_shift - config.base_shift) / (
        config.max_image_seq_len - config.base_image_seq_len
    )
    return config.base_shift + slope * (tokens - config.base_image_seq_len)


def choose_shift(
    sampler: FlowMatchEulerDiscreteScheduler, patch_size: int, height: int, width: int
) -> float:
    """The sampler's shift of the noise levels, used in training too (arXiv:2403.03206, 5.3.2).

    With use_dynamic_shifting it grows with the number of tokens, as in the pipelines. height,
    width: size of the latents.
    """
    config = sampler.config
    if not config.use_dynamic_shifting:
        return config.shift
    mu = compute_mu(config, height * width / patch_size**2)
    return math.exp(mu) if config.time_shift_type == "exponential" else mu


# -------------------------------------------------------------------------------------------------
# the loss


@torch.no_grad()
def prepare_batch(data: Data, caption_dropout: float, batch: Batch) -> Prepared:
    """Turn a loaded batch into latents, condition and inputs of the loss.

    New latents are drawn from the VAE's distribution each time. The condition holds the model's
    other inputs, the family's `Prompts`. A share `caption_dropout` of the captions becomes the
    empty prompt.
    """
    return encode_batch(batch, data, caption_dropout)


def add_noise(latents: torch.Tensor, noise: torch.Tensor, sigmas: torch.Tensor) -> torch.Tensor:
    """Move latents [N, C, h, w] along the straight line to noise, by a share `sigmas` [N]."""
    sigmas = sigmas.view(-1, 1, 1, 1)
    return (1 - sigmas) * latents + sigmas * noise


def compute_loss(
    args: Namespace,
    shift_for_size: Callable[[int, int], float],
    predict: Predict,
    loss_models: Models,
    models: Models,
    prepared: Prepared,
    weight: torch.Tensor,
) -> torch.Tensor:
    """The loss of rectified flow (arXiv:2209.03003).

    Returns the sum over images of weight * mean squared error of the velocity.

    shift_for_size: (height, width) of latents -> shift of the noise levels; see `choose_shift`.
    predict: `predict_velocity`. loss_models: networks that only the loss uses; see `main`.
    models: {"transformer": ...}, the trained models.
    prepared: see `prepare_batch`.
    weight: [N], num_processes / images in the step, because the processes average their gradients;
        0 for an image that can't be used. Any loss must return (weight * loss of each image).sum().
    """
    images, condition, loss_inputs = prepared
    noise = torch.randn(images.shape, device=images.device)
    if args.weighting_scheme == "logit_normal":
        # more levels halfway between image and noise (arXiv:2403.03206, 3.1)
        sigmas = torch.randn(len(images), device=images.device)
        sigmas = torch.sigmoid(args.logit_mean + args.logit_std * sigmas)
    else:
        sigmas = torch.rand(len(images), device=images.device)
    shift = shift_for_size(*images.shape[2:])
    sigmas = shift * sigmas / (1 + (shift - 1) * sigmas)
    # In float32: bfloat16 would round the sigmas to 8 bits.
    noisy_images = add_noise(images, noise, sigmas)
    prediction = predict(models, noisy_images, sigmas, condition)
    target = noise - images
    error = F.mse_loss(prediction, target, reduction="none")
    error = error * loss_inputs.get("mask", 1)  # 0 to 1: how much each pixel counts
    loss = error.mean(dim=(1, 2, 3))  # of each image
    return (weight * loss).sum()


def measure_velocity(predict: Predict) -> HeldOutMeasure:
    """Measure the held-out loss as the mean squared error of the velocity."""

    def add_tenths(
        latents: torch.Tensor, noise: torch.Tensor, tenths: torch.Tensor
    ) -> torch.Tensor:
        return add_noise(latents, noise, tenths / 10)

    def measure_error(
        models: Models,
        noisy_latents: torch.Tensor,
        tenths: torch.Tensor,
        condition: dict[str, torch.Tensor],
        latents: torch.Tensor,
        noise: torch.Tensor,
    ) -> torch.Tensor:
        velocity = predict(models, noisy_latents, tenths / 10, condition)
        return F.mse_loss(velocity, noise - latents, reduction="none").mean(dim=(1, 2, 3))

    return HeldOutMeasure(add_tenths, measure_error)


def train_step(
    accelerator: Accelerator,
    prepare: Callable[[Batch], Prepared],
    loss: Callable[[Models, Prepared, torch.Tensor], torch.Tensor],
    seed: int,
    max_grad_norm: float,
    models: Models,
    optimizer: torch.optim.Optimizer,
    batches: Iterator[Batch],
    micro_batches: int,
    data_step: int,
    on_batch: Callable[[Prepared, torch.Tensor], None] | None = None,
) -> StepSums:
    """Do one optimizer step on the next `micro_batches` of `batches`.

    prepare, loss: `prepare_batch` and `compute_loss`. on_batch(prepared, weight): called for each
    batch.

    Returns the sums of this process. After an fp16 overflow, accelerator.optimizer_step_was_skipped
    is True. Nothing here waits for the device.
    """
    total_loss = torch.zeros((), device=accelerator.device)
    total_weight = torch.zeros((), device=accelerator.device)
    for micro_batch in range(micro_batches):
        batch = next(batches)
        # A resumed run draws the same random numbers, because the seed is computed from the step.
        rank = accelerator.process_index
        torch.manual_seed(step_seed("step", seed, data_step, micro_batch, rank))
        prepared = prepare(batch)
        if on_batch:
            on_batch(prepared, batch["weight"])
        with contextlib.ExitStack() as stack:
            # The processes average their gradients only in the step's last micro-batch.
            if micro_batch < micro_batches - 1:
                for model in models.values():
                    stack.enter_context(accelerator.no_sync(model))
            weighted_loss = loss(models, prepared, batch["weight"])
            accelerator.backward(weighted_loss)
        total_loss += weighted_loss.detach()
        total_weight += batch["weight"].sum()
    grad_norm = accelerator.clip_grad_norm_(list_parameters(models), max_grad_norm or math.inf)
    optimizer.step()
    optimizer.zero_grad()  # sets them to None, which frees memory for the next forward pass
    # Not .item(), which would wait for the device. The loop reads many steps' sums at once.
    return {"loss": total_loss, "weight": total_weight, "grad_norm": grad_norm}


# -------------------------------------------------------------------------------------------------
# the output


PARTS = ("transformer", "vae", "text_encoder*", "tokenizer*", "scheduler")  # a pipeline's folders


class Interrupted(Exception):
    """Raised if a stop signal arrives while samples are drawn."""


def make_pipeline(
    base: Base,
    transformer: torch.nn.Module,
    sampler: FlowMatchEulerDiscreteScheduler,
    resolution: int,
    with_text: bool = False,
) -> DiffusionPipeline:
    """Make the pipeline of the transformer and the models that it was trained with, in float32.

    with_text: with the text encoders, for saving. Samples are drawn from embeddings, without them.
    """
    parts = load_parts(base, with_text) | {"transformer": transformer, "scheduler": sampler}
    return base.family.build(parts, base, resolution)


def log_validation(
    launch: Launch,
    pipeline: DiffusionPipeline,
    data: Data,
    step: int,
    stop_signal: StopSignal,
    settings: Namespace,
) -> float | None:
    """Draw --num_validation_images per prompt into samples/step-N.png and the trackers.

    Returns the roughness of the samples on the first process; see `draw_samples`.
    """
    seen: dict[str, torch.Tensor] = {}

    def interrupt(
        pipeline: DiffusionPipeline, index: int, timestep: torch.Tensor, tensors: dict
    ) -> dict:
        if stop_signal.poll():
            raise Interrupted
        seen.update(tensors)
        return tensors

    def draw(numbers: list[int], generators: list[torch.Generator]) -> Drawn:
        assert data.validation  # samples are drawn only if there are prompts
        prompts, empty = data.validation.choose(numbers, launch.device)
        images: Sequence[np.ndarray] = []
        with contextlib.suppress(Interrupted):
            images = pipeline(
                **data.family.call_args(prompts, empty, settings.guidance_scale),
                height=settings.resolution,
                width=settings.resolution,
                output_type="np",
                callback_on_step_end=interrupt,
                num_inference_steps=settings.num_inference_steps,
                generator=generators,
            ).images
        return Drawn(images, seen.get("latents", torch.zeros(0)))

    per_call = 1 if data.family.samples_one_by_one else settings.train_batch_size
    return draw_samples(launch, pipeline, draw, per_call, step, stop_signal, settings)


def describe_model(family: Family, about: About, settings: Namespace) -> Description:
    """Return the texts of the model card and the report, with example code."""
    is_new = bool(settings.transformer_config_name_or_path or settings.init_from)
    how = "trained from scratch" if is_new else "fine-tuned"
    what = (
        f"A {family.title} pipeline whose transformer was {how} on `{about.data}`\n"
        f"for {about.step} steps, by flow matching."
    )
    if about.base:
        what += f" The other models are those of\n`{about.base}`."
    source = about.name
    setup = []
    more = ""
    if settings.rank:
        what = (
            f"A LoRA of rank {settings.rank} for the transformer of `{about.base}`,\n"
            f"trained on `{about.data}` for {about.step} steps."
        )
        what += f"\n{name_readers(settings, for_unet=False)}"
        source = str(about.base)
        more = f', variant="{settings.variant}"' if settings.variant else ""
        setup.append(f"pipeline.load_lora_weights({json.dumps(about.name)})")
    call = call_pipeline(about, settings, family.guidance_args(settings.guidance_scale))
    call += family.usage(settings.resolution, settings.clip_skip, settings.max_sequence_length)
    usage = write_usage(source, call, setup, precision=family.precision, more=more)
    tags = ["text-to-image", family.name, "diffusers-training"]
    base = None if is_new else settings.pretrained_model_name_or_path
    return Description(tags + ["lora"] * bool(settings.rank), what, usage, base)


# -------------------------------------------------------------------------------------------------
# the run


@in_one_sentence
def main(args: Namespace) -> None:
    """Train.

    Exit status: 130 after Ctrl-C, 143 after SIGTERM, 1 after an error, printed in one line.
    """
    transformers.utils.logging.disable_progress_bar()
    # The launch comes first: it decides devices, processes and precision.
    launch = make_launch(args)
    accelerator = launch.accelerator
    run = open_run(launch, __file__, args)  # locks the folder against other runs
    base = open_base(args, trained_by="train_flow.py")

    # The data comes before the model, which must fit the latents and embeddings.
    data = open_data(launch, base, run.checkpoint, run.before, args)
    sampler = make_scheduler(base, data.resolution, args)
    train_rows, held_out = hold_out(accelerator, data.dataset, args.holdout, args.seed)
    epoch_rows = partial(choose_rows, train_rows, data.dataset, args.latents_weights)

    # The model, and functions for the loop, held-out loss, --find_lr and --train_batch_size auto.
    torch.manual_seed(args.seed)  # every process starts from the same weights
    predict = partial(predict_velocity, base.family)
    transformer = make_transformer(base, data, predict, run.configs, launch, args)
    models: Models = {"transformer": transformer}  # each is trained, averaged, saved in its folder
    loss_models: Models = {}  # only the loss uses them: frozen, on the device, never saved
    prepare = partial(prepare_batch, data, args.caption_dropout)
    shift_for_size = partial(choose_shift, sampler, base.family.patch_size(transformer))
    loss_of = partial(compute_loss, args, shift_for_size)
    loss = partial(loss_of, predict, loss_models)
    step = partial(train_step, accelerator, prepare, loss, args.seed, args.max_grad_norm)

    # The batch size comes before the position in the data, which a checkpoint counts in images.
    freeze_on_device(loss_models, launch.device)
    order = Order(epoch_rows, args.seed, data.dataset.sizes)
    state = run.read_state(len(epoch_rows(0)), args)
    plan, progress = plan_run(launch, models, step, data.dataset, train_rows, order, state, args)
    if plan.is_done:
        return
    settings = settings_of(args, launch, run, data, plan)
    recorded = record_settings(settings, launch, progress, data.dataset, held_out)

    # Weights, EMA and optimizer are in float32: autocast lowers only the computation's precision.
    trained = Trained(launch, models, settings)
    trained.load(run, state, recorded)
    others = [*loss_models.values(), *data.modules()]
    costs = Costs(launch, models, trained.averaged, others, loss, args.optimizer, args.allow_tf32)
    if launch.compile:
        compile_model(transformer, launch.compile, order.num_sizes)
    trained.prepare(progress.global_step)

    # Batches are loaded ahead across epochs, so the device never waits for an epoch to begin.
    keys = step_batches(order, progress, launch.rank, launch.num_processes)
    loaded = load_batches(data.dataset, keys, data.num_workers, launch.device, args.prefetch_factor)
    if args.find_lr:  # the run ends here, and its weights are not kept
        result = find_learning_rate(accelerator, trained, step, loaded, progress, args)
        return end_run(launch, run, result, [], settings)
    constant = partial(measure_constant, loss_of, loss_models)
    records = Records(
        accelerator, progress.global_step, 0, run.checkpoint, settings, models, costs, constant
    )
    stop_signal = StopSignal(launch.num_processes, launch.shard)

    # The loop calls these: held-out loss and samples, and at the end the pipeline or LoRA.
    def save_result(best: Models, folder: Path) -> None:
        if args.rank:
            with saving(folder, f"the LoRA in {folder}") as unfinished:
                save_lora(trained.saved, unfinished, None)
        else:
            pipeline = make_pipeline(base, best["transformer"], sampler, data.resolution, True)
            save_pipeline(pipeline, folder)

    def measure() -> None:
        log_held_out_loss(
            launch, records, data.dataset, held_out, trained.held_out,
            measure_velocity(predict), partial(prepare_batch, data, 0.0),
            stop_signal, progress.global_step,
        )  # fmt: skip

    def draw() -> float | None:
        pipeline = make_pipeline(base, trained.best("transformer"), sampler, data.resolution)
        return log_validation(launch, pipeline, data, progress.global_step, stop_signal, settings)

    results = Results(
        name="LoRA" if args.rank else "pipeline",
        files=["pytorch_lora_weights*"] if args.rank else [f"{part}/*" for part in PARTS],
        save=save_result,
        log_held_out_loss=measure,
        log_validation=draw,
        describe=partial(describe_model, base.family),
    )
    loop = Loop(launch, run, trained, progress, records, results, settings, recorded)
    samples_every = (args.validation_steps, args.validation_epochs)
    is_pretrained = bool(args.init_from) or args.transformer_config_name_or_path is None
    stop = loop.train(step, records.watch(loaded), stop_signal, samples_every, is_pretrained)
    loaded.close()  # ends its thread and the loader's processes
    loop.finish(stop, stop_signal)


if __name__ == "__main__":
    main(parse_args())
