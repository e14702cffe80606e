"""Train the U-Net of Stable Diffusion (XL), or a LoRA for it: images and captions -> a pipeline.

    # the demo: a model of drawings learns eight animals
    python precompute_latents.py && python train_text_to_image.py
    # the demo of a LoRA: the model learns a duck
    python train_text_to_image.py --rank 16
    accelerate launch --config_file accelerate_configs/multi_gpu.yaml train_text_to_image.py \\
        --pretrained_model_name_or_path stable-diffusion-v1-5/stable-diffusion-v1-5 \\
        --latents_dir latents-photos --validation_prompts "a red bicycle" --output_dir sd-photos

Input: caches of precompute_latents.py (--latents_dir), or the images and captions that
precompute_latents.py takes, which are then encoded in every step. Output, in --output_dir:
    the pipeline, with its model card, samples/, metrics.jsonl, loss.png, report.html, logs; with
    --rank two LoRA files in place of the pipeline: pytorch_lora_weights.safetensors for diffusers,
    pytorch_lora_weights_kohya.safetensors for ComfyUI, A1111 and sd-scripts
    run.args      the flags of this run; pass @sd-photos/run.args to repeat it
    checkpoint-N  one every --checkpointing_steps; to resume from the last one, run the same
                  command with --resume_from_checkpoint latest

Layout of this file:
    parse_args                      the flags; bad values stop the script before anything is loaded
    predict_noise                   the call of the U-Net
    make_unet                       the model, new or pretrained, checked against the data
    prepare_batch, compute_loss     a batch -> the inputs of the U-Net, and the loss
    train_step                      one optimizer step, with the calls to Accelerate
    log_validation, describe_model  the samples, and the text of the model card
    main                            the run from its first line to its last, with the loop
The code that all trainers share is in diffusion_training/. minimal/train_text_to_image.py
is one short file without it, which trains the same weights, bit for bit.
"""

from pathlib import Path

try:
    from diffusion_training import check_version
except ModuleNotFoundError:
    raise SystemExit(
        f"{__file__} needs the package diffusion_training: run `pip install .` in the script's "
        "repository, or start from minimal/train_text_to_image.py there, which does not need it"
    ) from None
check_version("0.1.0", Path(__file__).name)  # first: another version may lack the modules below

import contextlib
import math
import os
import shlex
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from diffusion_training.arguments import PATH, SWITCH, SWITCHED_ON, make_parser, parse_demo
from diffusion_training.data.prompt_file import read_prompt_file
from diffusion_training.families.flags import add_encoder_flags, add_pipeline_flags
from diffusion_training.families.names import DEFAULT_FAMILY, FACTS
from diffusion_training.flags import add_device_flags
from diffusion_training.latents.flags import add_captioned_data_flags, check_data_args
from diffusion_training.training.flags import (
    add_logging_flags,
    add_noise_flags,
    add_optimization_flags,
    add_saving_flags,
    check_training_args,
)
from diffusion_training.training.lora.lora_flags import (
    add_lora_flags,
    add_validation_base_flags,
    check_lora_args,
)
from diffusion_training.training.scores.metric_flags import add_metric_flags
from diffusion_training.training.text_to_image_flags import (
    add_init_flag,
    add_memory_flags,
    add_prompt_flags,
    add_timestep_flags,
    check_text_to_image_args,
)

HERE = shlex.quote(os.path.relpath(Path(__file__).parent))
# The command lines of the demos, which run if no data is given. The user's flags override them.
DEMO_BOTH = "--checkpointing_steps 10000 --resume_from_checkpoint latest"
DEMO = f"""
    --latents_dir latents-animals --pretrained_model_name_or_path {HERE}/demo/drawings
    --output_dir sd-animals --train_batch_size 16 --num_train_epochs 20 --validation_epochs 10
    --learning_rate 1e-3 --lr_scheduler cosine --lr_warmup_steps 20 --snr_gamma 5 --guidance_scale 1.5 {DEMO_BOTH}
    --num_validation_images 2
    --validation_prompts "a pink caterpillar on green" "a blue dog on pink" "a purple dolphin on yellow"
        "a red goat on blue" "a green pig" "a blue rooster" "a yellow tiger on pink" "an orange turtle on blue"
"""  # noqa: E501
DEMO_LORA = f"""
    --train_data_dir {HERE}/demo/ducks --pretrained_model_name_or_path {HERE}/demo/drawings
    --output_dir lora-duck --resolution 64 --train_batch_size 10 --num_train_epochs 80 --validation_epochs 40
    --learning_rate 2e-3 --lr_scheduler cosine --lr_warmup_steps 20 --snr_gamma 5 --guidance_scale 1.5 {DEMO_BOTH}
    --lora_layers attention --preserve_prior --prior_every 4 --caption_dropout 0
    --class_prompt "a red car" "a blue cup on yellow" "an orange fish" "a green apple on pink" "a pink heart"
        "a purple balloon on blue" "a yellow tree on green" "a blue gift" "a mushroom on yellow" "a red melon"
    --validation_prompts "a yellow duck on blue" "a purple duck on pink" "a red car on yellow" "a green apple"
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
    add_memory_flags(add)

    add = parser.add_argument_group("LoRA").add_argument
    add_lora_flags(add)
    add(
        "--output_kohya_format",
        **SWITCHED_ON,
        help="with --rank, write a second LoRA file, for ComfyUI, A1111 and sd-scripts",
        needs="--rank",
    )

    add = parser.add_argument_group("objective").add_argument
    add_noise_flags(add)
    add_timestep_flags(add)

    add_optimization_flags(parser, lr_scheduler="constant", adam_beta1=0.9, adam_weight_decay=1e-2)

    add = parser.add_argument_group("logging and samples").add_argument
    add_logging_flags(add, tracker_project_name="text2image-fine-tune")
    add_prompt_flags(add, guidance_scale=7.5, num_inference_steps=20)
    add_validation_base_flags(add)

    add_metric_flags(parser.add_argument_group("metrics of samples").add_argument)

    add = parser.add_argument_group("saving").add_argument
    add("--output_dir", type=PATH, default="sd-model-finetuned", help="folder for all output")
    add_saving_flags(add)
    add(
        "--output_single_file",
        **SWITCH,
        help="also write the pipeline as one .safetensors file, for ComfyUI and A1111",
    )

    args = parser.parse_args(argv)
    if not (args.latents_dir or args.dataset_name or args.train_data_dir or args.data):
        if args.cache_latents:  # as recipes say
            parser.error("give images: --train_data_dir FOLDER, or --dataset_name")
        args = parse_demo(parser, DEMO_LORA if args.rank else DEMO, argv)

    if args.pretrained_model_name_or_path is None:
        title = FACTS[DEFAULT_FAMILY].title
        parser.error(f"--pretrained_model_name_or_path is needed: a {title} pipeline")
    for name in ("unet_config_name_or_path", "init_from"):
        if args.rank and getattr(args, name):
            parser.error(f"--rank needs a pretrained U-Net: leave --{name} out")
    if args.rank and args.output_single_file:
        parser.error("--output_single_file writes a pipeline, not a LoRA: leave out one of the two")
    read_prompt_file(parser, args)
    check_data_args(parser, args)
    check_training_args(parser, args)
    check_text_to_image_args(parser, args)
    check_lora_args(parser, args)
    return parser.freeze(args)


# --help and mistakes in the flags end here, at once: the imports below take seconds. Importing this
# file parses nothing, so that tests, Ray's workers and loader processes can do so.
if __name__ == "__main__":
    args = parse_args()

import diffusers
import torch
import torch.nn.functional as F
import transformers
from accelerate import Accelerator
from diffusers import DDPMScheduler, DiffusionPipeline, SchedulerMixin, UNet2DConditionModel

from diffusion_training.batches import (
    Batch,
    Models,
    Objective,
    Prepared,
    StepSums,
    TextToImageBatch,
)
from diffusion_training.data.captioned_data import Data
from diffusion_training.data.encoders import encode_images, load_parts
from diffusion_training.draws import seed_generators, step_seed
from diffusion_training.errors.sentences import explained, in_one_sentence
from diffusion_training.families.base import Base, Family
from diffusion_training.families.trained import open_trained_base
from diffusion_training.files import saving
from diffusion_training.latents.batch_inputs import (
    make_time_ids,
    read_mask,
    read_pixels,
    read_prompts,
)
from diffusion_training.latents.reader import choose_rows
from diffusion_training.latents.shared import cache_latents_once
from diffusion_training.latents.source import open_data
from diffusion_training.launch import Launch, accelerator_options, make_launch
from diffusion_training.loading import load_batches
from diffusion_training.models import compile_model, freeze_on_device
from diffusion_training.order import Order, step_batches
from diffusion_training.stopping import StopSignal
from diffusion_training.training.held_out import hold_out
from diffusion_training.training.keeping.writer import Writer
from diffusion_training.training.lora.lora import save_lora
from diffusion_training.training.lora.prior import make_prior
from diffusion_training.training.progress import NextStep
from diffusion_training.training.records import Records
from diffusion_training.training.results import Results, draws_samples, open_metrics
from diffusion_training.training.run_folder import complete_args, end_run, open_run
from diffusion_training.training.saver import Saver, check_free_space
from diffusion_training.training.showing.captioned_card import describe_text_to_image
from diffusion_training.training.showing.captioned_samples import (
    choose_sample_bases,
    draw_captions,
    draw_prompts,
)
from diffusion_training.training.showing.metadata import describe_file
from diffusion_training.training.showing.readers import advise_copy, list_lora_files, name_readers
from diffusion_training.training.showing.report import About, Description
from diffusion_training.training.showing.sample_base import SampleBase
from diffusion_training.training.showing.single_file_output import SINGLE_FILE, save_whole
from diffusion_training.training.state import TrainState, describe_settings, place_models
from diffusion_training.training.step.costs import Costs
from diffusion_training.training.step.denoiser import (
    adapt_denoiser,
    check_denoiser,
    fit_denoiser,
    load_denoiser,
)
from diffusion_training.training.step.objective import (
    held_out_epsilon_loss,
    make_schedulers,
    min_snr_weight,
    objective_flags,
)
from diffusion_training.training.step.optimizers import make_lr_scheduler, make_optimizer
from diffusion_training.training.tuning import find_learning_rate, plan_run

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


# -------------------------------------------------------------------------------------------------
# the model


def predict_noise(
    models: Models,
    noisy_latents: torch.Tensor,
    timesteps: torch.Tensor,
    condition: dict[str, torch.Tensor],
) -> torch.Tensor:
    """The prediction of the U-Net, float32 [N, C, h, w].

    The U-Net is called here and, for samples, by its pipeline: to pass further inputs, change
    `log_validation` and `score` too. A check of the shapes calls this function with
    {"unet": ...} alone.

    condition: see `prepare_batch`.
    """
    embeds = condition["prompt_embeds"]
    added = None
    if "time_ids" in condition:  # of SDXL
        pooled = condition["pooled_prompt_embeds"]
        added = {"text_embeds": pooled, "time_ids": condition["time_ids"]}
    unet = models["unet"]
    return unet(noisy_latents, timesteps, embeds, added_cond_kwargs=added).sample.float()


def make_unet(
    base: Base, data: Data, configs: Path | None, launch: Launch, args: Namespace
) -> torch.nn.Module:
    """Make the U-Net to train.

    It is the pretrained pipeline's, or a new one, whose config comes from a flag or, with
    --init_from, from the checkpoint `configs`. With --rank it is frozen, in the precision of the
    launch or quantized, and only its LoRA is trained. With --full_bf16 its weights are in bfloat16.
    Stops with an error if it does not fit the latents and embeddings.
    """
    config = args.unet_config_name_or_path
    unet, source, base_hash = load_denoiser(
        UNet2DConditionModel, base, config, configs, launch, args
    )
    # sample_size is the default size of the pipeline's images. The version is set because the
    # pipeline replaces sizes below 64 in configs of old versions.
    side = data.latents.shape[1]
    unet.register_to_config(sample_size=side, _diffusers_version=diffusers.__version__)
    is_own = source == str(base.source)
    check_denoiser({"unet": unet}, predict_noise, "U-Net", source, data, is_own=is_own)
    if args.rank:
        adapt_denoiser(unet, base, base_hash, configs, launch, args)
    return unet


# -------------------------------------------------------------------------------------------------
# the loss


@torch.no_grad()
def prepare_batch(data: Data, caption_dropout: float, batch: TextToImageBatch) -> Prepared:
    """Turn a loaded batch into latents [N, C, h, w], condition and inputs of the loss.

    If the VAE gives a distribution, latents are drawn from it anew each time. The condition holds
    prompt_embeds and what else the family needs, see `Prompts`; the inputs of the loss may hold a
    mask [N, 1, h, w]. A share `caption_dropout` of the captions becomes the empty prompt.

    batch: pixels or latents, and captions as tokens or embeddings.
    """
    if "latents" in batch:  # from a cache
        latents = batch["latents"].float().unflatten(1, batch["latents_shape"])
    else:
        latents = encode_images(data.loaded_encoders, batch["pixel_values"])
    condition = read_prompts(batch, data)  # a cache has embeddings, or tokens, which are encoded
    if data.latents.kind == "moments":
        mean, std = latents.chunk(2, dim=1)
        # By shape, not `randn_like`: a VAE's strides must not decide which number goes where.
        latents = mean + std * torch.randn(mean.shape, device=mean.device)
    # Contiguous, as a cache has them: a VAE's memory layout must not decide how the model computes.
    latents = ((latents - data.latents.shift) * data.latents.factor).contiguous()
    # Guidance needs a model that also predicts without a caption (arXiv:2207.12598).
    dropped = torch.rand(len(latents), device=latents.device) < caption_dropout
    for name, empty in data.empty_prompt.items():
        empty = empty[: condition[name].shape[1]]  # a batch of short captions has fewer tokens
        where = dropped.view(-1, *[1] * empty.dim())
        condition[name] = torch.where(where, empty, condition[name])
    if data.family.needs_sizes:  # SDXL sees the size of the image file, and the crop
        target = [data.latents.downscale * side for side in latents.shape[-2:]]
        condition["time_ids"] = make_time_ids(
            batch["original_size"], batch["crop_top_left"], target, batch["flipped"]
        )
    loss_inputs = {}
    if "mask" in batch:
        loss_inputs["mask"] = read_mask(batch, data, latents.shape[-2:])
    return Prepared(latents, condition, loss_inputs)


def compute_loss(
    args: Namespace,
    noise_scheduler: DDPMScheduler,
    objective: Objective,
    models: Models,
    prepared: Prepared,
    weight: torch.Tensor,
) -> torch.Tensor:
    """The denoising loss of DDPM (arXiv:2006.11239, eq. 14).

    Returns the sum over images of weight * mean squared error.

    objective: `predict` calls `predict_noise`; `frozen` holds networks that only the loss uses.
    models: {"unet": ...}, the trained models.
    prepared: see `prepare_batch`.
    weight: [N], num_processes / images in the step, because the processes average their gradients;
        0 for an image that can't be used. Any loss must return (weight * loss of each image).sum().
    """
    images, condition, loss_inputs = prepared
    # With randn_like, the noise would depend on the memory layout.
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
    # of 1000, but a scheduler may have another number of them
    num_timesteps = noise_scheduler.config.num_train_timesteps
    low = args.min_timestep * num_timesteps // 1000
    high = math.ceil(args.max_timestep * num_timesteps / 1000)
    timesteps = torch.randint(low, high, (len(images),), device=images.device)
    # In float32: in bfloat16 the first timesteps would get no noise at all.
    noisy_images = noise_scheduler.add_noise(images, perturbed, timesteps)
    prediction = objective.predict(models, noisy_images, timesteps, condition)
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
    objective: Objective,
    models: Models,
    optimizer: torch.optim.Optimizer,
    batches: Iterator[Batch],
    next_step: NextStep,
    seed: int,
    max_grad_norm: float,
    on_batch: Callable[[Prepared, torch.Tensor], None] | None = None,
) -> StepSums:
    """Take one optimizer step on the next `next_step.micro_batches` of `batches`.

    objective: calls `prepare_batch` and `compute_loss`. models, optimizer: as wrapped by
    Accelerate. on_batch(prepared, weight): looks at each micro-batch. In `main` it measures the
    range of the first 100 images; it changes nothing.

    Returns the sums of this process. After an fp16 overflow, accelerator.optimizer_step_was_skipped
    is True. Nothing here waits for the device, except the scaler of fp16 and, in the
    first step, `on_batch`.
    """
    total_loss = torch.zeros((), device=accelerator.device)
    total_weight = torch.zeros((), device=accelerator.device)
    total_prior = torch.zeros((), device=accelerator.device)
    # --preserve_prior: some steps have a second loss, whose gradients are added
    has_prior = objective.prior is not None and objective.prior.is_due(next_step.number)
    for micro_batch in range(next_step.micro_batches):
        batch = next(batches)
        # A resumed run draws the same random numbers, because the seed is computed from the step.
        process = accelerator.process_index
        key = step_seed("step", seed, next_step.number, micro_batch, process)
        seed_generators(key, accelerator.device)
        prepared = objective.prepare(batch)
        if on_batch:
            on_batch(prepared, batch["weight"])
        if has_prior:
            total_prior += objective.prior.backward(
                accelerator, objective, models, prepared, batch["weight"]
            )
        with contextlib.ExitStack() as stack:
            # DDP averages the gradients only in the step's last micro-batch (--shard: in each).
            if micro_batch < next_step.micro_batches - 1:
                for model in models.values():
                    stack.enter_context(accelerator.no_sync(model))
            weighted_loss = objective.loss(models, prepared, batch["weight"])
            accelerator.backward(weighted_loss)  # it does not divide: `weight` includes that
        total_loss += weighted_loss.detach()
        total_weight += batch["weight"].sum()
    trained = [weight for group in optimizer.param_groups for weight in group["params"]]
    grad_norm = accelerator.clip_grad_norm_(trained, max_grad_norm or math.inf)
    optimizer.step()  # --full_bf16: the backward pass has updated the weights already
    optimizer.zero_grad()  # sets them to None, which frees memory for the next forward pass
    # Not .item(), which would wait for the device: `log` reads the sums of many steps at once.
    sums: StepSums = {"loss": total_loss, "weight": total_weight, "grad_norm": grad_norm}
    if has_prior:
        sums["prior_loss"] = total_prior
    return sums


# -------------------------------------------------------------------------------------------------
# the output


# patterns of a pipeline's files, for the upload
PARTS = [f"{part}/*" for part in ("unet", "vae", "text_encoder*", "tokenizer*", "scheduler")]


def make_pipeline(
    base: Base, unet: torch.nn.Module, sampler: SchedulerMixin, with_text: bool = False
) -> DiffusionPipeline:
    """Make the pipeline of the U-Net and the models that it was trained with, in float32.

    with_text: with the text encoders, for saving. Samples are drawn from embeddings, without them.
    """
    parts = load_parts(base, with_text) | {"unet": unet, "scheduler": sampler}
    return base.family.build(parts, base, base.family.resolution)


def log_validation(
    launch: Launch,
    pipeline: DiffusionPipeline,
    data: Data,
    bases: Sequence[SampleBase],
    step: int,
    stop_signal: StopSignal,
    writer: Writer,
    args: Namespace,
) -> None:
    """Draw --num_validation_images per prompt into samples/step-N.png and the trackers.

    The pipeline itself draws, and with --validation_base another one with the LoRA beside it. Each
    process draws a share, and each image has its own seed. A signal stops the sampling. Further
    inputs of the pipelines are passed as draw_prompts(..., name=value).
    """
    per_call = args.train_batch_size
    draw_prompts(launch, pipeline, data, bases, per_call, step, stop_signal, writer, args)


def describe_model(
    family: Family, about: About, args: Namespace, bases: Sequence[SampleBase] = ()
) -> Description:
    """Return the texts of the model card and the report, with example code.

    bases: see `choose_sample_bases`.
    """
    is_new = bool(args.unet_config_name_or_path or args.init_from)
    setup = []
    # the base's scheduler has another objective
    if args.rank and (objective := objective_flags(args)):
        setup.append(
            "pipeline.scheduler = DDIMScheduler.from_config("
            f"{{**pipeline.scheduler.config, **{objective}}})"
        )
    return describe_text_to_image(family, "U-Net", is_new, about, args, setup, bases=bases)


# -------------------------------------------------------------------------------------------------
# the run


@in_one_sentence
def main(args: Namespace) -> None:
    """Train.

    Exit status: 130 after Ctrl-C, 143 after SIGTERM, 1 after an error, printed in one line.
    """
    transformers.utils.logging.disable_progress_bar()
    # Devices, processes and precision, as the flags and `accelerate launch` say.
    with explained("the launched processes can't be set up"):
        accelerator = Accelerator(**accelerator_options(args))
    launch = make_launch(accelerator, args)
    run = open_run(launch, __file__, args)  # the output folder, locked, and its checkpoint
    # which family it belongs to: the wrong script ends here, before any image is encoded
    base = open_trained_base(args, "train_text_to_image.py")
    # --cache_latents: runs precompute_latents.py first, before any model is loaded here
    args_of_data = cache_latents_once(launch, args, __file__, run.checkpoint_settings)
    noise_scheduler, sampler = make_schedulers(base, args)

    # The data comes before the model, which must fit the latents and embeddings.
    data = open_data(launch, base, run.checkpoint, run.checkpoint_settings, args_of_data)
    train_rows, held_out = hold_out(accelerator, data.dataset, args.holdout, args.seed)
    # the rows that an epoch takes: all, or shares of the caches by --latents_weights
    epoch_rows = partial(choose_rows, train_rows, data.dataset, args_of_data.latents_weights)
    order = Order(epoch_rows, args.seed, data.dataset.sizes)

    # The model and its loss.
    torch.manual_seed(args.seed)  # every process starts from the same weights
    unet = make_unet(base, data, run.config_checkpoint, launch, args)
    # Each of these is trained, averaged and saved in checkpoints. The pipeline has the U-Net only.
    models: Models = {"unet": unet}
    frozen: Models = {}  # only for the loss: on the device, under autocast, never saved
    objective = Objective(
        prepare=partial(prepare_batch, data, args.caption_dropout),
        predict=predict_noise,
        compute_loss=partial(compute_loss, args, noise_scheduler),
        # the held-out loss, which a change of the loss leaves alone, so that runs can be compared
        held_out_loss=held_out_epsilon_loss(noise_scheduler, predict_noise),
        prepare_held_out=partial(prepare_batch, data, 0.0),
        frozen=freeze_on_device(frozen, accelerator),
        encoders=data.modules(),  # only for the estimate of memory
        prior=make_prior(data, args),
    )

    # what samples are drawn with: the base and, with --validation_base, another one as well
    bases = choose_sample_bases(launch, base, data, unet, args)

    # Batch size, learning rate and number of steps. --train_batch_size auto tries whole steps;
    # --fit chooses what is computed twice, and what waits in the host's memory.
    plan = plan_run(
        launch, run, models, objective, train_step, data.dataset, train_rows, order, args,
        fit_denoiser,
    )  # fmt: skip
    if plan.is_done:  # the checkpoint is beyond --max_train_steps, which has been printed
        return
    # From here on, `args` has the values that were found.
    args = complete_args(args, launch, run, data, plan)
    # the networks of --validation_metrics; None without it
    metrics = open_metrics(launch, data.dataset, train_rows, held_out, args)

    # The header of a LoRA or a single file, for other programs.
    num_images = plan.progress.num_images
    metadata = describe_file(base.family, unet, noise_scheduler, data.captions, num_images, args)
    lora_metadata = metadata if args.output_kohya_format else None
    # What the steps change: weights, their averages, optimizer, learning rate, position.
    check_free_space(launch, models, args)
    # on the device (--shard: a part of them); with averages of --use_ema
    averages = place_models(launch, models, args)
    optimizer = make_optimizer(models, args)
    progress = plan.progress
    # All that a checkpoint holds. A resumed run gets it back here.
    state = TrainState(
        models=models, averages=averages, optimizer=optimizer, progress=progress,
        settings=describe_settings(launch, progress, data.dataset, held_out, args),
    )  # fmt: skip
    state.load(accelerator, run, plan.saved_state, args)
    lr_scheduler = make_lr_scheduler(optimizer, progress.global_step, args)
    # prints the memory that is needed
    costs = Costs(launch, models, averages.models(), objective, args.optimizer, args.allow_tf32)
    if launch.is_main:
        objective = costs.count_first(objective)  # the operations of the first step, for records
    if launch.compile:
        compile_model(unet, launch.compile, order.num_sizes)
    # Accelerate wraps the models (DDP on several processes, autocast) and the optimizer (the scaler
    # of fp16). evaluation_mode wraps without DDP, which sharded models do not need.
    wrap = partial(accelerator.prepare_model, device_placement=False)
    wrapped = {name: wrap(model, evaluation_mode=launch.shard) for name, model in models.items()}
    optimizer = accelerator.prepare(optimizer)

    # Batches are loaded ahead across epochs, so the device never waits for an epoch to begin.
    keys = step_batches(order, progress, launch.rank, launch.num_processes)
    loaded = load_batches(data.dataset, keys, data.num_workers, launch.device, args.prefetch_factor)
    if args.find_lr:  # the run ends here, and its weights are not kept
        result = find_learning_rate(
            accelerator, objective, train_step, wrapped, optimizer, loaded, progress, args
        )
        end_run(launch, run, result, [], args)
        return
    # Records and trackers start. From now on, a signal waits for the end of a step.
    records = Records(
        accelerator, run, progress, models, objective, costs, data.dataset.num_left_out, args
    )
    stop_signal = StopSignal(launch.num_processes, launch.shard, run.writer)
    stop_signal.agree()  # one may have come before
    saver = Saver(launch, run, state, records, stop_signal, args, lora_metadata)
    batches = records.watch(loaded)

    def write_result(result: Models, folder: Path) -> None:
        """Write the pipeline, or the LoRA. Only the first process calls it, so it can't wait.

        result: {name: model}, whole, the averages with --use_ema. A LoRA is taken from
        `state`, which holds the trained one and its average.
        """
        if args.rank:
            with saving(folder, f"the LoRA in {folder}") as unfinished:
                save_lora(state.list_models(), unfinished, lora_metadata, args.output_name)
        else:
            pipeline = make_pipeline(base, result["unet"], sampler, with_text=True)
            header = metadata if args.output_single_file else None
            save_whole(pipeline, base.family.merge, folder, header)

    results = Results(
        name="LoRA" if args.rank else "pipeline",
        files=list_lora_files(args) if args.rank else [SINGLE_FILE, *PARTS],
        write_result=write_result,
        describe=partial(describe_model, base.family, bases=bases),
        launch=launch, run=run, state=state, records=records, stop_signal=stop_signal,
        objective=objective, dataset=data.dataset, held_out=held_out, metrics=metrics,
        readers=name_readers(args, type(unet).__name__),
        advice=advise_copy(args, type(unet).__name__), args=args,
    )  # fmt: skip

    def show() -> None:
        """Held-out loss, samples and report. Each process measures and draws a share."""
        results.measure_held_out()
        results.keep_best()  # --save_best
        if draws_samples(args):
            with records.timed("samples_seconds"):  # in the next record
                pipeline = make_pipeline(base, averages.get_model("unet"), sampler)
                step = progress.global_step
                log_validation(launch, pipeline, data, bases, step, stop_signal, run.writer, args)
        results.report()

    def score() -> None:
        """Measure --validation_metrics on samples of the averaged weights, on all processes.

        Further inputs of the pipeline are passed as partial(draw_captions, ..., name=value).
        """
        with records.timed("metrics_seconds"):
            pipeline = make_pipeline(base, averages.get_model("unet"), sampler)
            draws = [
                partial(draw_captions, launch, pipeline, data, each, objective, stop_signal, args)
                for each in bases
            ]
            results.score(draws, partial(read_pixels, data, pipeline.vae))
        results.keep_best()  # --save_best_metric
        results.report()

    def goes_on() -> bool:
        """Whether steps are left, and nothing has stopped the run on any process."""
        return progress.global_step < args.max_train_steps and not stop_signal.was_stopped

    # Before step 1, a pretrained model is shown as it is. A resumed run shows what was due at its
    # checkpoint, if a kill has prevented that.
    is_pretrained = bool(args.init_from) or args.unet_config_name_or_path is None
    shows_first = run.checkpoint is None and is_pretrained and args.validate_first
    samples_are_due = progress.is_due(args.validation_steps, args.validation_epochs)
    if goes_on() and (shows_first or (samples_are_due and results.lack_samples())):
        show()
    if metrics and goes_on():
        if shows_first or (run.checkpoint and progress.is_due(metrics.every)):
            score()

    checkpoint_epochs = args.checkpointing_epochs
    checkpoint_steps = None if checkpoint_epochs else args.checkpointing_steps

    # The loop. Every process runs every line, and most lines wait for the other processes: put none
    # under `if launch.is_main`. It ends after the last step, or when any process gets a signal.
    while goes_on():
        if data.is_followed:  # --follow: wait until the cache has the images of the step
            reason = data.dataset.wait_for_images(progress, stop_signal, records)
            stop_signal.starved_because = reason
            if not goes_on():
                break
        next_step = progress.next_step()
        sums = train_step(
            accelerator, objective, wrapped, optimizer, batches, next_step, args.seed,
            args.max_grad_norm, records.measure_inputs,
        )  # fmt: skip
        if args.full_bf16:  # the backward pass has used and freed the gradients
            sums["grad_norm"] = optimizer.optimizer.grad_norm
        # False after an fp16 overflow: then only the position in the data moves
        stepped = not accelerator.optimizer_step_was_skipped
        progress.advance(next_step.images, stepped)
        averages.update(progress, next_step.images)  # the rule is `update_ema` in models.py
        if stepped:
            records.add(sums, next_step, lr_scheduler.get_last_lr()[0])  # the rate of this step
            lr_scheduler.step()
        stop_signal.agree()  # on all processes, whether one of them has got a signal
        requests: list[str] = []
        # A record comes before what is saved at the same step, since a save takes the same sums.
        if progress.is_due(args.logging_steps):
            records.log()  # waits for the device; means over all processes, for the trackers too
            requests = results.take_requests()  # `touch OUTPUT_DIR/sample-now`, or save-now
        # Snapshots and checkpoints are copied. A thread of the first process writes the copy during
        # the next steps.
        if args.posthoc_ema and progress.is_due(args.posthoc_ema_steps or args.checkpointing_steps):
            saver.save_snapshot()
        if progress.is_due(checkpoint_steps, checkpoint_epochs) or "save-now" in requests:
            saver.save_checkpoint()
        # After the last step, these come with the result.
        if metrics and progress.is_due(metrics.every) and goes_on():
            score()
        if goes_on() and (
            progress.is_due(args.validation_steps, args.validation_epochs)
            or "sample-now" in requests
        ):
            show()

    # The end. A run that was stopped only gets its checkpoint, and exits with the signal's status.
    saver.save_last()  # checkpoint and snapshot, unless this step has them
    loaded.close()  # ends the thread and the processes that load
    records.bar.close()
    if not stop_signal.was_stopped:
        results.write()  # before the samples, so that a kill can't lose it
        if metrics:
            score()
        show()
        if args.posthoc_ema:
            results.compare_widths()
    saver.finish()  # waits for samples, report and the copies of --checkpoints_to
    results.end()  # the model card, the upload, and what to do next


if __name__ == "__main__":
    main(args)
