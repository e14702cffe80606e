"""Train the U-Net of Stable Diffusion (XL), or a LoRA for it: images and captions -> a pipeline.

    # the demo: digits by name
    accelerate launch precompute_latents.py && accelerate launch train_text_to_image.py
    # the demo of a LoRA: a model of the digits 0 to 8 learns 9
    accelerate launch train_text_to_image.py --rank 16
    accelerate launch --config_file accelerate_configs/multi_gpu.yaml train_text_to_image.py \\
        --pretrained_model_name_or_path stable-diffusion-v1-5/stable-diffusion-v1-5 \\
        --latents_dir latents-photos --validation_prompts "a red bicycle" --output_dir sd-photos

Input: caches of precompute_latents.py (--latents_dir), or the images and captions that
precompute_latents.py takes, which are then encoded in every step. Output, in --output_dir:
    the pipeline, with its model card, samples/, metrics.jsonl, loss.png, report.html, logs; with
    --rank two LoRA files in place of the pipeline: pytorch_lora_weights.safetensors for diffusers,
    pytorch_lora_weights_kohya.safetensors for ComfyUI, A1111 and sd-scripts
    run.args      the flags of this run; @sd-photos/run.args repeats it
    checkpoint-N  one every --checkpointing_steps; to resume from the last one, run the same
                  command with --resume_from_checkpoint latest

Layout of this file:
    parse_args                      the flags; bad values stop the script before anything is loaded
    predict_noise                   the one place where the U-Net is called
    make_unet, make_schedulers      the model, the scheduler that adds noise, and the sampler
    prepare_batch, compute_loss     a batch -> the inputs of the U-Net, and the loss
    train_step                      one optimizer step, with the calls of Accelerate
    log_validation, describe_model  the samples, and the text of the model card
    main                            the run in phases, with the training loop
The code that all trainers share is in diffusion_training/. To get all of it in one file that you
can change:
python -m diffusion_training.standalone train_text_to_image.py > mine.py
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
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from typing import cast

import diffusers
import torch
import torch.nn.functional as F
import transformers
from accelerate import Accelerator
from diffusers import (
    DDIMScheduler,
    DDPMScheduler,
    DiffusionPipeline,
    SchedulerMixin,
    UNet2DConditionModel,
)

from diffusion_training.arguments import PATH, SWITCH, make_parser, parse_demo
from diffusion_training.batches import Batch, Models, Predict, Prepared, StepSums
from diffusion_training.errors import explained, fail, in_one_sentence
from diffusion_training.families.base import Base, Family, Prompts
from diffusion_training.families.known import DEFAULT_FAMILY, FAMILIES
from diffusion_training.families.opening import open_base
from diffusion_training.files import saving
from diffusion_training.flags import (
    add_captioned_data_flags,
    add_device_flags,
    add_encoder_flags,
    add_init_flag,
    add_logging_flags,
    add_lora_flags,
    add_noise_flags,
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
from diffusion_training.training.lora import (
    add_lora,
    list_further_layers,
    load_network_weights,
    save_lora,
)
from diffusion_training.training.metadata import describe_file, name_readers
from diffusion_training.training.objective import (
    check_objective,
    load_sampler,
    measure_constant,
    measure_epsilon,
    min_snr_weight,
    objective_flags,
    try_sampler,
)
from diffusion_training.training.pipelines import SINGLE_FILE, save_pipeline, save_single_file
from diffusion_training.training.records import Records
from diffusion_training.training.report import About, Description, call_pipeline, write_usage
from diffusion_training.training.run_folder import end_run, open_run, settings_of
from diffusion_training.training.samples import Drawn, draw_samples
from diffusion_training.training.trained import Trained
from diffusion_training.training.tuning import find_learning_rate, plan_run

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
HERE = shlex.quote(os.path.relpath(Path(__file__).parent))
# The command lines of the demos, which run if no data is given. The user's flags override them.
DEMO_BOTH = "--guidance_scale 3 --checkpointing_steps 10000 --resume_from_checkpoint latest"
DEMO = f"""
    --latents_dir latents-digits --pretrained_model_name_or_path {HERE}/demo/models
    --unet_config_name_or_path {HERE}/demo/digits_text_to_image_unet.json
    --output_dir sd-digits --train_batch_size 64 --num_train_epochs 80 --validation_epochs 40
    --learning_rate 3e-3 --lr_scheduler cosine --lr_warmup_steps 100 --snr_gamma 5 {DEMO_BOTH}
    --validation_prompts "a handwritten digit zero" "a handwritten digit one" "a handwritten digit two"
        "a handwritten digit three" "a handwritten digit four" "a handwritten digit five" "a handwritten digit six"
        "a handwritten digit seven" "a handwritten digit eight" "a handwritten digit nine"
"""  # noqa: E501
DEMO_LORA = f"""
    --train_data_dir {HERE}/demo/nines --pretrained_model_name_or_path {HERE}/demo/zero_to_eight
    --output_dir lora-nine --resolution 8 --train_batch_size 64 --num_train_epochs 60 --validation_epochs 30
    --learning_rate 3e-3 --lr_scheduler cosine --lr_warmup_steps 20 --snr_gamma 5 {DEMO_BOTH}
    --validation_prompts "a handwritten digit nine" "a handwritten digit four" "a handwritten digit eight"
        "a handwritten digit zero"
"""  # noqa: E501

# -------------------------------------------------------------------------------------------------
# the flags


def parse_args(argv: list[str] | None = None) -> Namespace:
    """Parse and check the command line.

    A bad argument stops the script with one line and status 2 before anything is loaded.
    """
    parser = make_parser(__file__, __doc__, "docs/training.md")

    add_captioned_data_flags(parser)

    add = parser.add_argument_group("model").add_argument
    add_pipeline_flags(add)
    add(
        "--unet_config_name_or_path",
        type=PATH,
        help="train a new U-Net with this config: hub id, folder or JSON file",
    )
    add_init_flag(add)
    add_encoder_flags(add)
    add_device_flags(add)
    add_shard_flag(add)

    add = parser.add_argument_group("LoRA").add_argument
    add_lora_flags(add, output_kohya_format=True)

    add = parser.add_argument_group("objective").add_argument
    add(
        "--prediction_type",
        choices=["epsilon", "sample", "v_prediction"],
        help="what the U-Net predicts (default: as in the pretrained pipeline, else epsilon)",
    )
    add_noise_flags(add)

    add_optimization_flags(parser, lr_scheduler="constant", adam_beta1=0.9, adam_weight_decay=1e-2)

    add = parser.add_argument_group("logging and samples").add_argument
    add_logging_flags(add, tracker_project_name="text2image-fine-tune")
    add_prompt_flags(add, guidance_scale=7.5, num_inference_steps=20)

    add = parser.add_argument_group("saving").add_argument
    add("--output_dir", type=PATH, default="sd-model-finetuned", help="folder for all output")
    add_saving_flags(add)
    add(
        "--output_single_file",
        **SWITCH,
        help="also write the pipeline as one .safetensors file, for ComfyUI and A1111",
    )

    args = parser.parse_args(argv)
    if args.latents_dir is None and args.dataset_name is None and args.train_data_dir is None:
        args = parse_demo(parser, DEMO_LORA if args.rank else DEMO, argv)

    if args.pretrained_model_name_or_path is None:
        family = FAMILIES[DEFAULT_FAMILY]
        parser.error(f"--pretrained_model_name_or_path is needed: a {family.title} pipeline")
    for name in ("unet_config_name_or_path", "init_from"):
        if args.rank and getattr(args, name):
            parser.error(f"--rank needs a pretrained U-Net: leave --{name} out")
    if args.rank and args.output_single_file:
        parser.error("--output_single_file writes a pipeline, not a LoRA: leave it or --rank out")
    check_data_args(parser, args)
    check_training_args(parser, args)
    return parser.freeze(args)


# -------------------------------------------------------------------------------------------------
# the model


def predict_noise(
    family: Family,
    models: Models,
    noisy_images: torch.Tensor,
    timesteps: torch.Tensor,
    condition: dict[str, torch.Tensor],
) -> torch.Tensor:
    """The prediction of the U-Net, float32 [N, C, h, w].

    This is the one place where the U-Net is called, except for samples: change it to pass further
    inputs.

    condition: see `prepare_batch`.
    """
    return family.predict(models["unet"], noisy_images, timesteps, cast(Prompts, condition))


def make_unet(
    base: Base, data: Data, predict: Predict, configs: Path | None, launch: Launch, args: Namespace
) -> torch.nn.Module:
    """Make the U-Net to train.

    It is the pretrained pipeline's, or a new one, whose config a flag names or a checkpoint has in
    `configs`. With --rank it is frozen, in the precision of the launch or in 4 bits, and only its
    LoRA is trained. Stops with an error if it does not fit the latents and embeddings.
    """
    # Only the config of a checkpoint is read here. `Trained` loads its weights and EMA weights.
    config_source = args.unet_config_name_or_path
    if configs and not config_source:
        config_source = str(configs / "unet")
    source = str(config_source or base.source)
    options = {"cache_dir": args.cache_dir}
    if not config_source:
        options |= {"subfolder": "unet", "revision": args.revision, "variant": args.variant}
    with explained(f"{source} holds no {UNet2DConditionModel.__name__}"):
        if config_source or not launch.has_weights:
            config = UNet2DConditionModel.load_config(source, **options)
            unet = make_new(UNet2DConditionModel, config, launch.has_weights)
        elif args.rank:
            unet, base_hash = load_base(
                UNet2DConditionModel, source, args.base_precision, launch.device, launch.dtype,
                **options,
            )  # fmt: skip
        else:
            unet = load_weights(UNet2DConditionModel, source, **options)
    # sample_size is the default size of the pipeline's images. The version is set because the
    # pipeline replaces sizes below 64 in configs of old versions.
    side = data.latents.shape[1]
    unet.register_to_config(sample_size=side, _diffusers_version=diffusers.__version__)
    check_denoiser({"unet": unet}, predict, "U-Net", source, data)
    if args.rank:
        layers = base.family.choose_layers(unet, args.lora_layers)
        network = args.network_weights
        read_lora = base.family.read_lora
        if network and args.lora_layers == "all":
            layers += list_further_layers(unet, layers, network, "unet", read_lora)
        add_lora(unet, layers, base_hash, launch.dtype, args)
        if network:
            load_network_weights(unet, network, "unet", read_lora)
    return unet


def make_schedulers(base: Base, args: Namespace) -> tuple[DDPMScheduler, SchedulerMixin]:
    """Return (the scheduler that adds noise in training, the sampler of the pipeline).

    Both are set to the objective of the training.
    """
    source = base.source
    objective = objective_flags(args)
    options = {"subfolder": "scheduler", "cache_dir": args.cache_dir, "revision": args.revision}
    with explained(f"{source} holds no scheduler"):
        sampler = load_sampler(source, options, objective)
        noise_scheduler = DDPMScheduler.from_pretrained(source, **options, **objective)
        if noise_scheduler.config.rescale_betas_zero_snr:
            # sampling starts from pure noise, which not every sampler can do
            sampler = DDIMScheduler.from_pretrained(source, **options, **objective)
    check_objective(noise_scheduler)
    timesteps = noise_scheduler.config.num_train_timesteps
    if args.num_inference_steps > timesteps:
        fail(
            f"--num_inference_steps {args.num_inference_steps} exceeds the {timesteps} training "
            "timesteps"
        )
    with explained(f"the scheduler of {source} ({type(sampler).__name__}) can't draw samples"):
        try_sampler(sampler, args.num_inference_steps)
    return noise_scheduler, sampler


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


def compute_loss(
    args: Namespace,
    noise_scheduler: DDPMScheduler,
    predict: Predict,
    loss_models: Models,
    models: Models,
    prepared: Prepared,
    weight: torch.Tensor,
) -> torch.Tensor:
    """The denoising loss of DDPM (arXiv:2006.11239, eq. 14).

    Returns the sum over images of weight * mean squared error.

    predict: `predict_noise`. loss_models: networks that only the loss uses; see `main`.
    models: {"unet": ...}, the trained models.
    prepared: see `prepare_batch`.
    weight: [N], num_processes / images in the step, because the processes average their gradients;
        0 for an image that can't be used. Any loss must return (weight * loss of each image).sum().
    """
    images, condition, loss_inputs = prepared
    # randn_like would draw other noise for another memory layout.
    noise = torch.randn(images.shape, device=images.device)
    if args.noise_offset:
        # the same offset for all pixels of a channel
        # (crosslabs.org/blog/diffusion-with-offset-noise)
        offset = torch.randn(*images.shape[:2], 1, 1, device=images.device)
        noise = noise + args.noise_offset * offset
    perturbed = noise
    if args.input_perturbation:
        # the input gets noise that the target does not have (arXiv:2301.11706)
        perturbed = noise + args.input_perturbation * torch.randn(noise.shape, device=noise.device)
    num_timesteps = noise_scheduler.config.num_train_timesteps
    timesteps = torch.randint(num_timesteps, (len(images),), device=images.device)
    # In float32: in bfloat16 the first timesteps would get no noise at all.
    noisy_images = noise_scheduler.add_noise(images, perturbed, timesteps)
    prediction = predict(models, noisy_images, timesteps, condition)
    if noise_scheduler.config.prediction_type == "epsilon":
        target = noise
    elif noise_scheduler.config.prediction_type == "sample":
        target = images
    else:
        target = noise_scheduler.get_velocity(images, noise, timesteps)
    error = F.mse_loss(prediction, target, reduction="none")
    error = error * loss_inputs.get("mask", 1)  # 0 to 1: how much each pixel counts
    loss = error.mean(dim=(1, 2, 3))  # of each image
    if args.snr_gamma is not None:
        weight = min_snr_weight(weight, noise_scheduler, timesteps, args.snr_gamma)
    return (weight * loss).sum()


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


# the files of a pipeline
PARTS = [f"{part}/*" for part in ("unet", "vae", "text_encoder*", "tokenizer*", "scheduler")]


def make_pipeline(
    base: Base, unet: torch.nn.Module, sampler: SchedulerMixin, with_text: bool = False
) -> DiffusionPipeline:
    """Make the pipeline of the U-Net and the models that it was trained with, in float32.

    with_text: with the text encoders, for saving. Samples are drawn from embeddings, without them.
    """
    parts = load_parts(base, with_text) | {"unet": unet, "scheduler": sampler}
    return base.family.build(parts, base, base.family.resolution)


def save_whole(
    pipeline: DiffusionPipeline, family: Family, folder: Path, metadata: dict[str, str] | None
) -> None:
    """Write the pipeline, and with `metadata` also one file that has it as its header."""
    save_pipeline(pipeline, folder)
    if metadata is not None:
        with explained("--output_single_file can't be written; the pipeline was saved"):
            weights = family.merge(pipeline)
        save_single_file(weights, metadata, folder)


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
        seen.update(tensors)
        # the pipeline then skips the remaining steps
        pipeline._interrupt = bool(stop_signal.poll())
        return tensors

    def draw(numbers: list[int], generators: list[torch.Generator]) -> Drawn:
        assert data.validation  # samples are drawn only if there are prompts
        prompts, empty = data.validation.choose(numbers, launch.device)
        images = pipeline(
            **data.family.call_args(prompts, empty, settings.guidance_scale),
            height=settings.resolution,
            width=settings.resolution,
            output_type="np",
            callback_on_step_end=interrupt,
            num_inference_steps=settings.num_inference_steps,
            generator=generators,
        ).images
        return Drawn(images, seen["latents"])

    per_call = settings.train_batch_size
    return draw_samples(launch, pipeline, draw, per_call, step, stop_signal, settings)


def describe_model(family: Family, about: About, settings: Namespace) -> Description:
    """Return the texts of the model card and the report, with example code."""
    is_new = bool(settings.unet_config_name_or_path or settings.init_from)
    how = "trained from scratch" if is_new else "fine-tuned"
    what = (
        f"A {family.title} pipeline whose U-Net was {how} on `{about.data}`\n"
        f"for {about.step} steps; the other models are those of `{about.base}`."
    )
    source = about.name
    setup = []
    more = ""
    if settings.rank:
        what = (
            f"A LoRA of rank {settings.rank} for the U-Net of `{about.base}`,\n"
            f"trained on `{about.data}` for {about.step} steps."
        )
        source = str(about.base)
        more = f', variant="{settings.variant}"' if settings.variant else ""
        setup.append(f"pipeline.load_lora_weights({json.dumps(about.name)})")
        if objective := objective_flags(settings):  # the base's scheduler has another one
            setup.append(
                "pipeline.scheduler = DDIMScheduler.from_config("
                f"{{**pipeline.scheduler.config, **{objective}}})"
            )
    setup += family.usage_before(settings.clip_skip)
    if readers := name_readers(settings, for_unet=True):
        what += f"\n{readers}"
    opener = "DiffusionPipeline.from_pretrained"
    if source.endswith(".safetensors"):
        opener = f"{family.pipeline}.from_single_file"
    call = call_pipeline(about, settings, family.guidance_args(settings.guidance_scale))
    call += family.usage(settings.resolution, settings.clip_skip, None)
    usage = write_usage(source, call, setup, opener, family.precision, more)
    tags = ["text-to-image", family.title.lower().replace(" ", "-"), "diffusers-training"]
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
    base = open_base(args, trained_by="train_text_to_image.py")

    # The data comes before the model, which must fit the latents and embeddings.
    noise_scheduler, sampler = make_schedulers(base, args)
    data = open_data(launch, base, run.checkpoint, run.before, args)
    train_rows, held_out = hold_out(accelerator, data.dataset, args.holdout, args.seed)
    epoch_rows = partial(choose_rows, train_rows, data.dataset, args.latents_weights)

    # The model, and functions for the loop, held-out loss, --find_lr and --train_batch_size auto.
    torch.manual_seed(args.seed)  # every process starts from the same weights
    predict = partial(predict_noise, base.family)
    unet = make_unet(base, data, predict, run.configs, launch, args)
    models: Models = {"unet": unet}  # each is trained, averaged, and saved in a folder of its name
    loss_models: Models = {}  # only the loss uses them: frozen, on the device, never saved
    prepare = partial(prepare_batch, data, args.caption_dropout)
    loss_of = partial(compute_loss, args, noise_scheduler)
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
        compile_model(unet, launch.compile, order.num_sizes)
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
    metadata = describe_file(
        base.family, unet, noise_scheduler, data.captions, progress.num_images, settings
    )
    lora_metadata = metadata if args.output_kohya_format else None

    def save_result(best: Models, folder: Path) -> None:
        if args.rank:
            with saving(folder, f"the LoRA in {folder}") as unfinished:
                save_lora(trained.saved, unfinished, lora_metadata)
        else:
            pipeline = make_pipeline(base, best["unet"], sampler, True)
            save_whole(pipeline, base.family, folder, metadata if args.output_single_file else None)

    def measure() -> None:
        log_held_out_loss(
            launch, records, data.dataset, held_out, trained.held_out,
            measure_epsilon(noise_scheduler, predict), partial(prepare_batch, data, 0.0),
            stop_signal, progress.global_step,
        )  # fmt: skip

    def draw() -> float | None:
        pipeline = make_pipeline(base, trained.best("unet"), sampler)
        return log_validation(launch, pipeline, data, progress.global_step, stop_signal, settings)

    results = Results(
        name="LoRA" if args.rank else "pipeline",
        files=["pytorch_lora_weights*"] if args.rank else [SINGLE_FILE, *PARTS],
        save=save_result,
        log_held_out_loss=measure,
        log_validation=draw,
        describe=partial(describe_model, base.family),
    )
    loop = Loop(launch, run, trained, progress, records, results, settings, recorded, lora_metadata)
    samples_every = (args.validation_steps, args.validation_epochs)
    is_pretrained = bool(args.init_from) or args.unet_config_name_or_path is None
    stop = loop.train(step, records.watch(loaded), stop_signal, samples_every, is_pretrained)
    loaded.close()  # ends its thread and the loader's processes
    loop.finish(stop, stop_signal)


if __name__ == "__main__":
    main(parse_args())
