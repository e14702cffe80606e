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
    the pipeline, or with --rank pytorch_lora_weights.safetensors, with its model card, samples/,
    metrics.jsonl, loss.png, report.html, logs
    run.args      the flags of this run; @sd-photos/run.args repeats it
    checkpoint-N  one every --checkpointing_steps; to resume from the last one, run the same
                  command with --resume_from_checkpoint latest

Layout of this file:
    parse_args                      the flags; bad values stop the script before anything is loaded
    make_unet, make_schedulers      the model, the scheduler that adds noise, and the sampler
    prepare_batch, compute_loss     a batch -> the inputs of the U-Net, and the loss
    train_step                      one optimizer step, with the calls of Accelerate
    log_validation, describe_model  the samples, and the text of the model card
    main                            the run in phases, with the training loop
The code that all trainers share is in diffusion_training/. To get all of it in one file that you
can change:
python -m diffusion_training.standalone train_text_to_image.py > mine.py
"""

import contextlib
import math
import os
import shlex
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import diffusers
import numpy as np
import torch
import torch.nn.functional as F
import transformers
from accelerate import Accelerator
from diffusers import (
    DDIMScheduler,
    DDPMScheduler,
    DiffusionPipeline,
    SchedulerMixin,
    StableDiffusionPipeline,
    StableDiffusionXLPipeline,
    UNet2DConditionModel,
)

from diffusion_training import check_version

check_version("0.1.0", Path(__file__).name)  # before imports that another version may lack

from diffusion_training.arguments import COUNT, PATH, SWITCH, make_parser, number, parse_demo
from diffusion_training.data.images import make_time_ids
from diffusion_training.data.streams import add_stream_flags
from diffusion_training.data.texts import add_tag_flags
from diffusion_training.errors import explained, fail, in_one_sentence
from diffusion_training.files import saving
from diffusion_training.latents.encoders import DTYPES, hash_weights, load_models
from diffusion_training.latents.reader import choose_rows
from diffusion_training.latents.single_file import open_base
from diffusion_training.latents.source import encode_batch, load_data
from diffusion_training.latents.text_encoders import is_sdxl, read_pipeline
from diffusion_training.loading import load_batches
from diffusion_training.order import Order, step_batches, step_seed
from diffusion_training.report import Description, name_run, save_model_card, save_report
from diffusion_training.training.checkpoints import (
    load_checkpoint,
    prune_checkpoints,
    read_state,
    save_checkpoint,
)
from diffusion_training.training.costs import Costs
from diffusion_training.training.flags import (
    add_bucket_flags,
    add_device_flags,
    add_encoder_flags,
    add_logging_flags,
    add_lora_flags,
    add_optimization_flags,
    add_saving_flags,
    add_source_flags,
    add_storage_flags,
    add_transform_flags,
    check_data_args,
    check_training_args,
)
from diffusion_training.training.held_out import digest_held_out, hold_out, log_held_out_loss
from diffusion_training.training.launch import StopSignal, end_run, end_stopped, make_accelerator
from diffusion_training.training.lora import add_lora, list_lora_b, load_network_weights, save_lora
from diffusion_training.training.models import (
    Models,
    Prepared,
    call_unet,
    compile_model,
    list_parameters,
    load_weights,
    put_on_device,
    start_average,
    try_shapes,
    update_ema,
)
from diffusion_training.training.objective import (
    check_objective,
    measure_epsilon,
    min_snr_weight,
    objective_flags,
)
from diffusion_training.training.optimizers import make_lr_scheduler, make_optimizer
from diffusion_training.training.output import (
    draw_prompts,
    keep_best,
    open_output_dir,
    samples_path,
    save_pipeline,
)
from diffusion_training.training.progress import Progress
from diffusion_training.training.records import Records
from diffusion_training.training.tuning import (
    choose_batch_size,
    find_learning_rate,
    plan_steps,
    scale_learning_rate,
)

# Otherwise tokenizers warns about the loader's processes.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
HERE = shlex.quote(os.path.relpath(Path(__file__).parent))
# The command lines of the demos, which run if no data is given. The user's flags override them.
DEMO_BOTH = """
    --validation_prompts "a handwritten digit zero" "a handwritten digit one" "a handwritten digit two"
        "a handwritten digit three" "a handwritten digit four" "a handwritten digit five" "a handwritten digit six"
        "a handwritten digit seven" "a handwritten digit eight" "a handwritten digit nine"
    --guidance_scale 3 --checkpointing_steps 10000 --resume_from_checkpoint latest
"""  # noqa: E501
DEMO = f"""
    --latents_dir latents-digits --pretrained_model_name_or_path {HERE}/demo/models
    --unet_config_name_or_path {HERE}/demo/digits_text_to_image_unet.json
    --output_dir sd-digits --train_batch_size 64 --num_train_epochs 80 --validation_epochs 40
    --learning_rate 3e-3 --lr_scheduler cosine --lr_warmup_steps 100 --snr_gamma 5 {DEMO_BOTH}
"""
DEMO_LORA = f"""
    --train_data_dir {HERE}/demo/nines --pretrained_model_name_or_path {HERE}/demo/zero_to_eight
    --output_dir lora-nine --resolution 8 --train_batch_size 64 --num_train_epochs 60 --validation_epochs 30
    --learning_rate 3e-3 --lr_scheduler cosine --lr_warmup_steps 20 --snr_gamma 5 {DEMO_BOTH}
"""  # noqa: E501

# -------------------------------------------------------------------------------------------------
# the flags


def parse_args(argv: list[str] | None = None) -> Namespace:
    """Parse and check the command line.

    A bad argument stops the script with one line and status 2 before anything is loaded.
    """
    parser = make_parser(__file__, __doc__)

    add = parser.add_argument_group("data: a cache").add_argument
    add(
        "--latents_dir",
        type=PATH,
        nargs="+",
        help="one or more caches made by precompute_latents.py",
    )
    add(
        "--latents_weights",
        nargs="+",
        type=number(1e-3, 1e3),
        help="for each cache, how often an epoch takes its rows",
    )
    add_storage_flags(add)

    add = parser.add_argument_group("data: images, encoded in every step").add_argument
    add_source_flags(add, captions=True)
    add("--resolution", type=number(2, 16384, int), help="side of the square images, pixels")
    add("--center_crop", **SWITCH, help="crop the centre, not a random square")
    add_transform_flags(add)
    add(
        "--prefetch_factor",
        type=COUNT,
        help="batches that each process of --dataloader_num_workers loads ahead (None: 2)",
    )
    add_bucket_flags(add)
    add_stream_flags(add)

    add = parser.add_argument_group("data: both").add_argument
    add("--random_flip", **SWITCH, help="use mirrored images too")
    add(
        "--holdout",
        type=number(0, 10**9),
        default=0.0,
        help="share or number of images to hold out for the held-out loss",
    )
    add_tag_flags(add)
    # A second name of a flag, here and below, is the one in diffusers' scripts.
    names = ["--caption_dropout", "--proportion_empty_prompts"]
    add(
        *names,
        type=number(0, 1),
        default=0.1,
        help="share of captions replaced by the empty prompt, for guidance",
    )

    add = parser.add_argument_group("model").add_argument
    add("--pretrained_model_name_or_path", type=PATH, help="hub id or folder of a pipeline")
    add("--revision", help="branch, tag or commit of the models on the hub")
    add("--variant", help="variant of the weight files, such as fp16")
    add(
        "--unet_config_name_or_path",
        type=PATH,
        help="config of a new U-Net to train: hub id, folder or JSON file",
    )
    add_encoder_flags(add)
    add_device_flags(add)

    add_lora_flags(parser.add_argument_group("LoRA").add_argument)

    add = parser.add_argument_group("objective").add_argument
    add(
        "--prediction_type",
        choices=["epsilon", "sample", "v_prediction"],
        help="what the U-Net predicts (None: as the pretrained pipeline, or epsilon)",
    )
    add(
        "--rescale_betas_zero_snr",
        **SWITCH,
        help="make the last timestep pure noise (arXiv:2305.08891)",
    )
    add(
        "--snr_gamma",
        type=number(1e-3, 1e6),
        help="gamma of the min-SNR loss weight; 5.0 is usual (arXiv:2303.09556)",
    )
    add(
        "--noise_offset",
        type=number(0, 10),
        default=0.0,
        help="add an offset to the noise, for darker and lighter images; 0.1 is usual",
    )
    add(
        "--input_perturbation",
        type=number(0, 10),
        default=0.0,
        help="noise beyond the target's, 0.1 is usual",
    )

    add_optimization_flags(parser, lr_scheduler="constant", adam_beta1=0.9, adam_weight_decay=1e-2)

    add = parser.add_argument_group("logging and samples").add_argument
    add_logging_flags(add, tracker_project_name="text2image-fine-tune")
    add("--validation_prompts", "--validation_prompt", nargs="+", help="prompts of the samples")
    add(
        "--validation_steps",
        type=COUNT,
        help="optimizer steps between samples and held-out losses; overrides the epochs",
    )
    add("--validation_epochs", type=COUNT, default=5, help="epochs between samples")
    add("--num_validation_images", type=number(1, 10**4, int), default=4, help="samples per prompt")
    add(
        "--guidance_scale",
        type=number(1, 1000),
        default=7.5,
        help="guidance scale of the samples; 1: no guidance (arXiv:2207.12598)",
    )
    add("--num_inference_steps", type=COUNT, default=20, help="sampling steps")

    add = parser.add_argument_group("saving").add_argument
    add("--output_dir", type=PATH, default="sd-model-finetuned", help="folder for all output")
    add_saving_flags(add)

    args = parser.parse_args(argv)
    if args.latents_dir is None and args.dataset_name is None and args.train_data_dir is None:
        args = parse_demo(parser, DEMO_LORA if args.rank else DEMO, argv)

    if args.pretrained_model_name_or_path is None:
        parser.error("--pretrained_model_name_or_path is needed: a Stable Diffusion pipeline")
    if args.rank and args.unet_config_name_or_path:
        parser.error(
            "--rank trains a LoRA for a U-Net that is trained: leave --unet_config_name_or_path out"
        )
    check_data_args(parser, args)
    check_training_args(parser, args)
    return args


# -------------------------------------------------------------------------------------------------
# the model


def make_unet(frozen: SimpleNamespace, args: Namespace) -> UNet2DConditionModel:
    """Make the U-Net to train: the pretrained pipeline's, or a new one from a config.

    Stops with an error if it does not fit the latents and embeddings.
    """
    channels, *size = frozen.cache["latents_shape"]
    latents_shape = [channels // 2 if frozen.cache["latents"] == "moments" else channels, *size]
    embed_dim = frozen.empty_prompt["prompt_embeds"].shape[-1]
    condition: dict[str, Sequence[int]] = {"encoder_hidden_states": (1, embed_dim)}
    source = args.unet_config_name_or_path or open_base(args)
    options = {"cache_dir": args.cache_dir}
    with explained(f"{source} holds no UNet2DConditionModel"):
        if args.unet_config_name_or_path:
            unet = UNet2DConditionModel.from_config(
                UNet2DConditionModel.load_config(source, **options)
            )
        else:
            options |= {"subfolder": "unet", "revision": args.revision, "variant": args.variant}
            unet = load_weights(UNet2DConditionModel, source, **options)
    # The default size of the pipeline's images. The version is set because the pipeline would
    # replace sizes below 64 in a config of an old one.
    unet.register_to_config(sample_size=latents_shape[1], _diffusers_version=diffusers.__version__)
    if (unet.config.in_channels, unet.config.cross_attention_dim) != (latents_shape[0], embed_dim):
        takes = (
            f"{unet.config.in_channels} channels and embeddings of "
            f"{unet.config.cross_attention_dim}"
        )
        fail(
            f"the U-Net of {source} takes {takes}; the latents have {latents_shape[0]}, the "
            f"embeddings {embed_dim}"
        )
    if "pooled_prompt_embeds" in frozen.empty_prompt:
        condition |= {
            "text_embeds": frozen.empty_prompt["pooled_prompt_embeds"].shape,
            "time_ids": (6,),
        }
    if ("time_ids" in condition) != (unet.config.addition_embed_type == "text_time"):
        found = f"has addition_embed_type {unet.config.addition_embed_type!r}"
        fail(f"the U-Net of {source} {found}: SDXL's is text_time, and no other's")
    try_shapes(unet, source, latents_shape, **condition)
    return unet


def make_schedulers(args: Namespace) -> tuple[DDPMScheduler, SchedulerMixin]:
    """Return (the scheduler that adds noise in training, the sampler of the pipeline).

    Both have the objective that is trained.
    """
    source, flags = open_base(args), objective_flags(args)
    options = {"subfolder": "scheduler", "cache_dir": args.cache_dir, "revision": args.revision}
    with explained(f"{source} holds no scheduler"):
        noise_scheduler = DDPMScheduler.from_pretrained(source, **options, **flags)
        sampler = DDIMScheduler  # the sampler that can start from pure noise
        if not noise_scheduler.config.rescale_betas_zero_snr:
            sampler = getattr(
                diffusers, DDPMScheduler.load_config(source, **options)["_class_name"]
            )
        if not issubclass(sampler, diffusers.SchedulerMixin):
            raise ValueError(f"{sampler.__name__} is none")
        sampler = sampler.from_pretrained(source, **options, **flags)
        sampler.set_timesteps(1)  # raises an error for an unknown timestep_spacing
    check_objective(noise_scheduler)
    timesteps = noise_scheduler.config.num_train_timesteps
    if args.num_inference_steps > timesteps:
        fail(
            f"--num_inference_steps {args.num_inference_steps} exceeds the {timesteps} training "
            "timesteps"
        )
    return noise_scheduler, sampler


# -------------------------------------------------------------------------------------------------
# the loss


@torch.no_grad()
def prepare_batch(batch: dict, frozen: SimpleNamespace, caption_dropout: float) -> Prepared:
    """Turn a loaded batch into (latents, condition, loss_inputs).

    latents: float32 [N, C, h, w] of about unit size, drawn anew each time.
    condition: further inputs of the U-Net, {name: tensor [N, ...]}.
    loss_inputs: inputs of the loss alone, {name: tensor [N, ...]}.

    The empty prompt replaces a share `caption_dropout` of the captions.
    """
    latents, prompts, loss_inputs = encode_batch(batch, frozen, caption_dropout)
    condition = {"encoder_hidden_states": prompts["prompt_embeds"]}
    if "pooled_prompt_embeds" in prompts:  # SDXL, which also takes sizes and crops
        size = [frozen.pixels * side for side in latents.shape[-2:]]
        sizes = make_time_ids(
            batch["original_size"], batch["crop_top_left"], size, batch["flipped"]
        )
        condition |= {"text_embeds": prompts["pooled_prompt_embeds"], "time_ids": sizes}
    return latents, condition, loss_inputs


def compute_loss(
    models: Models,
    noise_scheduler: DDPMScheduler,
    images: torch.Tensor,
    condition: dict[str, torch.Tensor],
    loss_inputs: dict[str, torch.Tensor],
    weight: torch.Tensor,
    args: Namespace,
) -> torch.Tensor:
    """The denoising loss of DDPM (arXiv:2006.11239, eq. 14).

    Returns the sum over images of weight * mean squared error.

    models: {"unet": ...}, the trained models.
    images: images or their latents, float32 [N, C, H, W], of about unit size.
    condition, loss_inputs: see `prepare_batch`.
    weight: [N]. Over a step's micro-batches, averaged over the processes, the weights add up to 1;
        a placeholder has weight 0. So return (weight * loss per image).sum(), whatever the loss.
    """
    # Drawn by shape: randn_like would follow the memory layout.
    noise = torch.randn(images.shape, device=images.device)
    if args.noise_offset:
        # one offset for a whole channel (crosslabs.org/blog/diffusion-with-offset-noise)
        noise = noise + args.noise_offset * torch.randn(
            *images.shape[:2], 1, 1, device=images.device
        )
    perturbed = noise
    if args.input_perturbation:
        # the input gets more noise than the target has (arXiv:2301.11706)
        perturbed = noise + args.input_perturbation * torch.randn(noise.shape, device=noise.device)
    timesteps = torch.randint(
        noise_scheduler.config.num_train_timesteps, (len(images),), device=images.device
    )
    # Always in float32: in bfloat16 the first timesteps would get no noise at all.
    noisy_images = noise_scheduler.add_noise(images, perturbed, timesteps)
    prediction = call_unet(models["unet"], noisy_images, timesteps, condition)
    if noise_scheduler.config.prediction_type == "epsilon":
        target = noise
    elif noise_scheduler.config.prediction_type == "sample":
        target = images
    else:
        target = noise_scheduler.get_velocity(images, noise, timesteps)
    error = F.mse_loss(prediction, target, reduction="none")
    error = error * loss_inputs.get("mask", 1)  # in [0, 1], for each pixel
    loss = error.mean(dim=(1, 2, 3))  # of each image
    if args.snr_gamma is not None:
        weight = min_snr_weight(weight, noise_scheduler, timesteps, args.snr_gamma)
    return (weight * loss).sum()


def train_step(
    accelerator: Accelerator,
    noise_scheduler: DDPMScheduler,
    args: Namespace,
    prepare: Callable[[dict], Prepared],
    models: Models,
    optimizer: torch.optim.Optimizer,
    batches: Iterator[dict],
    micro_batches: int,
    data_step: int,
) -> torch.Tensor:
    """Do one optimizer step on the next `micro_batches` of `batches`.

    prepare: `prepare_batch`.

    Returns [sum of weight * loss, sum of weight, norm of the gradient] of this process, on the
    device. After an fp16 overflow, accelerator.optimizer_step_was_skipped is True. Nothing here
    waits for the device.
    """
    sums = torch.zeros(2, device=accelerator.device)
    for micro_batch in range(micro_batches):
        batch = next(batches)
        # The random numbers depend on the step, not on earlier draws: a resumed run draws the same.
        torch.manual_seed(
            step_seed("step", args.seed, data_step, micro_batch, accelerator.process_index)
        )
        images, condition, loss_inputs = prepare(batch)
        with contextlib.ExitStack() as stack:
            if micro_batch < micro_batches - 1:
                # the processes average their gradients once a step, in its last micro-batch
                for model in models.values():
                    stack.enter_context(accelerator.no_sync(model))
            loss = compute_loss(
                models, noise_scheduler, images, condition, loss_inputs, batch["weight"], args
            )
            accelerator.backward(loss)
        sums += torch.stack([loss.detach(), batch["weight"].sum()])
    grad_norm = accelerator.clip_grad_norm_(list_parameters(models), args.max_grad_norm or math.inf)
    optimizer.step()
    optimizer.zero_grad()  # to None, which frees memory for the next forward pass
    return torch.cat([sums, grad_norm[None]])  # one tensor, read later: an .item() here would wait


# -------------------------------------------------------------------------------------------------
# the output


def make_pipeline(
    unet: UNet2DConditionModel, sampler: SchedulerMixin, args: Namespace
) -> DiffusionPipeline:
    """Make the pipeline that is sampled from, saved and uploaded.

    It has the U-Net and the models that it was trained with, in float32.
    """
    vae, text_encoders, tokenizers = load_models(args, torch.float32)
    models = (vae, *text_encoders, *tokenizers, unet, sampler)
    if not is_sdxl(args):
        return StableDiffusionPipeline(*models, None, None, requires_safety_checker=False)
    zeros = read_pipeline(args).get("force_zeros_for_empty_prompt", True)
    return StableDiffusionXLPipeline(
        *models, force_zeros_for_empty_prompt=zeros, add_watermarker=False
    )


def log_validation(
    accelerator: Accelerator,
    pipeline: DiffusionPipeline,
    step: int,
    stop_signal: StopSignal,
    args: Namespace,
) -> None:
    """Draw --num_validation_images per prompt into samples/step-N.png and the trackers."""

    def watch(
        pipeline: DiffusionPipeline, index: int, timestep: torch.Tensor, tensors: dict
    ) -> dict:
        # diffusers' way to skip the remaining steps
        pipeline._interrupt = bool(stop_signal.received)
        return tensors

    def draw(prompts: list[str], generators: list[torch.Generator]) -> Sequence[np.ndarray]:
        return pipeline(
            prompts,
            height=args.resolution,
            width=args.resolution,
            output_type="np",
            callback_on_step_end=watch,
            num_inference_steps=args.num_inference_steps,
            guidance_scale=args.guidance_scale,
            generator=generators,
            clip_skip=args.clip_skip,
        ).images

    draw_prompts(accelerator, pipeline, draw, args.train_batch_size, step, stop_signal, args)


def describe_model(step: int, loss: float | None, args: Namespace) -> Description:
    """Return (tags for the hub, a description, example code) for the model card and the report."""
    name, base, data, prompt = name_run(args)
    steps = f"{step} steps{f', to a loss of {loss:.4g}' if loss else ''}"
    trained = "trained from scratch" if args.unet_config_name_or_path else "fine-tuned"
    kind = "Stable Diffusion XL" if is_sdxl(args) else "Stable Diffusion"
    what = f"""A {kind} pipeline whose U-Net was {trained} on `{data}`
for {steps}; the other models are those of
`{base}`."""
    source, more = name, ""
    if args.rank:
        what = (
            f"A LoRA of rank {args.rank} for the U-Net of `{base}`,\n"
            f"trained on `{data}` for {steps}."
        )
        source, more = str(base), f'\npipeline.load_lora_weights("{name}")'
        if objective := objective_flags(args):  # the base's scheduler does not have it
            more += (
                "\npipeline.scheduler = DDIMScheduler.from_config("
                f"{{**pipeline.scheduler.config, **{objective}}})"
            )
    skip = f", clip_skip={args.clip_skip}" * bool(args.clip_skip)
    if skip and not is_sdxl(args):  # with transformers 4 it has such a part
        more += (
            '\nvars(pipeline.text_encoder)["text_model"] = pipeline.text_encoder'
            "  # where clip_skip looks for it"
        )
    opener, way = "DiffusionPipeline", "from_pretrained"
    if source.endswith(".safetensors"):
        opener, way = f"{kind.replace(' ', '')}Pipeline", "from_single_file"
    usage = f"""from diffusers import {"DDIMScheduler, " * ("DDIM" in more)}{opener}

pipeline = {opener}.{way}("{source}"){more}
image = pipeline({prompt}, height={args.resolution}, width={args.resolution}{skip}).images[0]"""
    tags = ["text-to-image", kind.lower().replace(" ", "-"), "diffusers-training"]
    return tags + ["lora"] * bool(args.rank), what, usage


# -------------------------------------------------------------------------------------------------
# the run


@in_one_sentence
def main(args: Namespace) -> None:
    """Train.

    The exit status is 130 after Ctrl-C, 143 after SIGTERM, and 1 after an error, with one line
    that tells the reason.
    """
    transformers.utils.logging.disable_progress_bar()
    # The launch comes first: it sets the device, the processes and the precision.
    accelerator, cores = make_accelerator(args)
    device, rank, num_processes = (
        accelerator.device,
        accelerator.process_index,
        accelerator.num_processes,
    )
    # The lock is held until the end, so that no second run writes here.
    lock, checkpoint = open_output_dir(accelerator, __file__, args)

    # The data comes before the model, which must fit the latents and embeddings. One core per
    # process stays free for the trainer.
    noise_scheduler, sampler = make_schedulers(args)
    if args.dataloader_num_workers is None:
        args.dataloader_num_workers = min(8, cores - 1)
    dataset, frozen = load_data(accelerator, ("sd", "sdxl"), args, checkpoint)
    train_rows, held_out = hold_out(accelerator, dataset, args.holdout, args.seed)
    epoch_rows = partial(choose_rows, train_rows, dataset, args.latents_weights)
    num_images = len(epoch_rows(0))  # per epoch
    torch.manual_seed(args.seed)  # every process starts from the same weights
    unet = make_unet(frozen, args)
    if args.rank:
        # The U-Net is frozen: only its LoRA is trained, averaged and saved.
        add_lora(unet, hash_weights(unet), getattr(torch, DTYPES[args.mixed_precision]), args)
        if args.network_weights:
            load_network_weights(unet, args.network_weights)
    models = {"unet": unet}  # what is trained, averaged and saved, each in a folder of its name

    # The position of the run. The batch size is chosen before it, because a checkpoint's position
    # is counted in images.
    prepare = partial(prepare_batch, frozen=frozen, caption_dropout=args.caption_dropout)
    take_step = partial(train_step, accelerator, noise_scheduler, args, prepare)
    state = read_state(checkpoint, num_images)
    choose_batch_size(accelerator, models, take_step, dataset, train_rows, state["settings"], args)
    per_micro_batch, order = (
        args.train_batch_size * num_processes,
        Order(epoch_rows, args.seed, dataset.sizes),
    )
    progress = Progress(state, num_images, per_micro_batch, args.gradient_accumulation_steps, order)
    scale_learning_rate(accelerator, progress.images_per_step, args)
    if not plan_steps(accelerator, progress, args):
        return
    settings = {
        **vars(args),
        "num_processes": num_processes,
        "num_images": num_images,
        "data": dataset.fingerprint,
    }
    settings["held_out"] = digest_held_out(accelerator, dataset, held_out)

    # Trained weights, averaged weights and optimizer state are in float32. Autocast lowers the
    # precision of the computation only.
    for model in models.values():
        put_on_device(model, device)
    averaged = start_average(models) if args.use_ema else {}
    saved = models | {f"{name}_ema": model for name, model in averaged.items()}
    if args.gradient_checkpointing:
        unet.enable_gradient_checkpointing()
    optimizer = make_optimizer(models, accelerator.scaler, args)
    if checkpoint:  # before `prepare`, which wraps the models and the optimizer
        load_checkpoint(accelerator, checkpoint, saved, optimizer, state, settings)
    lr_scheduler = make_lr_scheduler(optimizer, progress.global_step, args)
    costs = Costs(
        accelerator, models, averaged, call_unet, args, [frozen.vae, frozen.text_encoders]
    )
    if args.compile:
        compile_model(unet, args.compile, order.num_sizes)
    *prepared, optimizer = accelerator.prepare(*models.values(), optimizer)
    # `prepared` is called in training; `models` is saved and averaged.
    prepared = dict(zip(models, prepared, strict=True))
    for model in averaged.values():
        accelerator.prepare_model(model, evaluation_mode=True)  # autocast as in training
    sampled = averaged.get("unet", unet)

    # Batches continue across epochs, so the device never waits for an epoch to begin.
    keys = step_batches(order, progress, rank, num_processes)
    loaded = load_batches(dataset, keys, args.dataloader_num_workers, device, args.prefetch_factor)
    if args.find_lr:  # and stop: nothing that it trains is kept
        found = find_learning_rate(
            accelerator, prepared, optimizer, take_step, loaded, progress, args
        )
        return end_run(accelerator, lock, found, [], args)
    records = Records(
        accelerator, progress.global_step, 0, checkpoint, args, list_lora_b(models), costs
    )
    batches, stop_signal = records.watch(loaded), StopSignal(num_processes)
    take_step = partial(train_step, accelerator, noise_scheduler, args, records.look(prepare))
    stop = stop_signal.agree()  # a signal that came earlier, even if a library swallowed it
    measured = {
        name.replace("unet", "held_out_loss"): saved[name]
        for name in ("unet", "unet_ema")
        if name in saved
    }

    def show(pipeline: DiffusionPipeline) -> int:
        """Make the held-out loss, the samples and the report.

        Returns the signal that interrupted them, or 0.
        """
        log_held_out_loss(
            accelerator,
            records,
            dataset,
            held_out,
            measured,
            measure_epsilon(noise_scheduler),
            partial(prepare, caption_dropout=0.0),
            stop_signal,
            progress.global_step,
        )
        save = (
            partial(save_lora, saved, args=args) if args.rank else partial(save_pipeline, pipeline)
        )
        keep_best(accelerator, records.held_out, progress.global_step, save, args)
        log_validation(accelerator, pipeline, progress.global_step, stop_signal, args)
        if accelerator.is_main_process:
            save_report(progress.global_step, __file__, describe_model, args)
        return stop_signal.agree()

    samples_every = args.validation_steps, args.validation_epochs
    shown = samples_path(args.output_dir, progress.global_step).exists()
    if checkpoint and progress.is_due(*samples_every) and not shown and not stop:
        # The last run ended between checkpoint and samples. Draw them before training goes past
        # this step.
        stop = show(make_pipeline(sampled, sampler, args))

    for model in models.values():
        model.train()
    while progress.global_step < args.max_train_steps and not stop:
        epoch, (step_images, micro_batches) = progress.epoch, progress.next_step()
        sums = take_step(prepared, optimizer, batches, micro_batches, progress.data_step)
        progress.advance(step_images, stepped=not accelerator.optimizer_step_was_skipped)
        # If fp16 overflowed, the scaler lowers its scale and the weights stay as they were.
        if progress.stepped:
            if args.use_ema:
                update_ema(averaged, models, progress.global_step, args)
            records.add(sums, step_images, epoch, lr_scheduler.get_last_lr()[0])
            lr_scheduler.step()

        # What is due.
        stop, last = stop_signal.agree(), progress.global_step == args.max_train_steps
        log_due = progress.is_due(args.logging_steps) or (progress.stepped and last)
        checkpoint_due = stop or last or progress.is_due(args.checkpointing_steps)
        if log_due or checkpoint_due:  # the only place where the host waits for the device
            records.update(progress.global_step, log_due, last)
        with records.paused():
            if checkpoint_due:
                # before the samples, which may take longer than a preempted job has left
                save_checkpoint(
                    accelerator, saved, optimizer, progress.state() | {"settings": settings}, args
                )
            if progress.is_due(*samples_every) and not last and not stop:
                stop = show(make_pipeline(sampled, sampler, args))
                if stop and not checkpoint_due:  # interrupted: a run that resumes here draws them
                    records.update(progress.global_step, False, last)
                    save_checkpoint(
                        accelerator,
                        saved,
                        optimizer,
                        progress.state() | {"settings": settings},
                        args,
                    )

    loaded.close()  # also ends the thread and the loader's processes
    records.bar.close()
    if not stop:
        pipeline = make_pipeline(sampled, sampler, args)
        if accelerator.is_main_process:
            # before the samples, which take time
            if args.rank:
                with saving(args.output_dir, f"the LoRA in {args.output_dir}") as unfinished:
                    save_lora(saved, unfinished, args)
            else:
                save_pipeline(pipeline, args.output_dir)
        stop = show(pipeline)
    stop_signal.close()
    if stop:
        end_stopped(accelerator, stop, progress.global_step, args.max_train_steps)
    if accelerator.is_main_process:
        # again, in case a kill prevented it
        prune_checkpoints(Path(args.output_dir) / f"checkpoint-{progress.global_step}", args)
        save_model_card(progress.global_step, describe_model, args)
    samples = "samples/" if args.validation_prompts else "no samples (no --validation_prompts)"
    done = (
        f"Done: {'LoRA' if args.rank else 'pipeline'}, {samples} "
        f"and report.html are in {args.output_dir}"
    )
    files = [f"{name}/*" for name in ("unet", "vae", "text_encoder*", "tokenizer*", "scheduler")]
    end_run(accelerator, lock, done, ["pytorch_lora_weights*"] if args.rank else files, args)


if __name__ == "__main__":
    main(parse_args())
