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
    make_transformer                the model, new or pretrained; it must fit latents and embeddings
    call_transformer                calls the model; hides how the families differ
    prepare_batch, compute_loss     a batch -> the inputs of the transformer, and the loss
    train_step                      one optimizer step, with the calls of Accelerate
    log_validation, describe_model  the samples, and the text of the model card
    main                            the run in phases, with the training loop
The code that all trainers share is in diffusion_training/. To get all of it in one file that you
can change:
python -m diffusion_training.standalone train_flow.py > mine.py
"""

import contextlib
import math
import os
import shlex
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from accelerate import Accelerator
from diffusers import (
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    PRXPipeline,
    PRXTransformer2DModel,
    ZImagePipeline,
    ZImageTransformer2DModel,
)

from diffusion_training import check_version

check_version("0.1.0", Path(__file__).name)  # before imports that another version may lack

from diffusion_training.arguments import COUNT, PATH, SWITCH, make_parser, number, parse_demo
from diffusion_training.data.streams import add_stream_flags
from diffusion_training.data.texts import add_tag_flags
from diffusion_training.errors import explained, fail, in_one_sentence
from diffusion_training.files import saving
from diffusion_training.latents.encoders import DTYPES, hash_weights, load_models
from diffusion_training.latents.reader import choose_rows
from diffusion_training.latents.source import encode_batch, load_data
from diffusion_training.latents.text_encoders import read_pipeline
from diffusion_training.loading import load_batches
from diffusion_training.order import Order, step_batches, step_seed
from diffusion_training.report import Description, name_run, save_model_card, save_report
from diffusion_training.training.checkpoints import (
    find_start,
    load_checkpoint,
    load_start,
    prune_checkpoints,
    read_start,
    read_state,
    save_checkpoint,
)
from diffusion_training.training.costs import Costs
from diffusion_training.training.flags import (
    add_bucket_flags,
    add_device_flags,
    add_encoder_flags,
    add_family_flags,
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
    compile_model,
    list_parameters,
    load_weights,
    put_on_device,
    start_average,
    update_ema,
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
# {family: (class to train, its pipeline, config key for the width of the embeddings)}
CLASSES = {
    "prx": (PRXTransformer2DModel, PRXPipeline, "context_in_dim"),
    "z-image": (ZImageTransformer2DModel, ZImagePipeline, "cap_feat_dim"),
}

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
        "--transformer_config_name_or_path",
        type=PATH,
        help="config of a new transformer to train: hub id, folder or JSON file",
    )
    add(
        "--init_from",
        type=PATH,
        help="folder of a run: start from its weights and step, with other data",
    )
    add_family_flags(add, default="prx")
    add_encoder_flags(add)
    add_device_flags(add)

    add_lora_flags(parser.add_argument_group("LoRA").add_argument)

    add = parser.add_argument_group("objective").add_argument
    schemes = ["logit_normal", "uniform"]
    add(
        "--weighting_scheme",
        choices=schemes,
        default="logit_normal",
        help="distribution of the noise levels (arXiv:2403.03206)",
    )
    add(
        "--logit_mean",
        type=number(-100, 100),
        default=0.0,
        help="mean of logit_normal; above 0 gives more noise",
    )
    add(
        "--logit_std",
        type=number(1e-3, 100),
        default=1.0,
        help="standard deviation of logit_normal",
    )
    add(
        "--shift",
        type=number(1e-2, 100),
        help="shift of the noise levels (None: the pipeline's; without one 1, or 3 from 512 px on)",
    )

    add_optimization_flags(parser, lr_scheduler="constant", adam_beta1=0.9, adam_weight_decay=1e-2)

    add = parser.add_argument_group("logging and samples").add_argument
    add_logging_flags(add, tracker_project_name="flow")
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
        default=4.0,
        help="guidance scale of the samples; 1: no guidance (arXiv:2207.12598)",
    )
    add("--num_inference_steps", type=COUNT, default=28, help="sampling steps")

    add = parser.add_argument_group("saving").add_argument
    add("--output_dir", type=PATH, default="flow-model", help="folder for all output")
    add_saving_flags(add)

    args = parser.parse_args(argv)
    if args.latents_dir is None and args.dataset_name is None and args.train_data_dir is None:
        args = parse_demo(parser, DEMO, argv)

    if args.model_family not in CLASSES:
        parser.error(f"--model_family {args.model_family}: train_text_to_image.py trains it")
    if args.pretrained_model_name_or_path is None:
        for name in ("vae_name_or_path", "text_encoder_name_or_path"):
            if getattr(args, name) is None:
                parser.error(f"--pretrained_model_name_or_path is needed, or --{name} as well")
        if not (args.transformer_config_name_or_path or args.init_from):
            parser.error("--transformer_config_name_or_path is needed where there is no pipeline")
    if args.rank and (
        args.transformer_config_name_or_path or args.init_from or args.model_family == "prx"
    ):
        turn = "leave --transformer_config_name_or_path and --init_from out"
        parser.error(
            "--rank trains a LoRA for a transformer of --model_family z-image that is trained: "
            f"{turn}"
        )
    if args.output_kohya_format:
        parser.error("--output_kohya_format knows U-Nets only: leave it out")
    check_data_args(parser, args)
    check_training_args(parser, args)
    return args


# -------------------------------------------------------------------------------------------------
# the model


def make_transformer(
    frozen: SimpleNamespace, start: Path | None, args: Namespace
) -> torch.nn.Module:
    """Make the transformer to train.

    It is new (from a config), the pretrained pipeline's, or like the one of a checkpoint, `start`.
    Stops with an error if it does not fit the latents and embeddings.
    """
    kind, _, width = CLASSES[args.model_family]
    channels, *size = frozen.cache["latents_shape"]
    channels = channels // 2 if frozen.cache["latents"] == "moments" else channels
    embed_dim = frozen.empty_prompt["prompt_embeds"].shape[-1]
    # Only the config of a checkpoint is read here. Its weights and averaged weights come later.
    given = args.transformer_config_name_or_path or (str(start / "transformer") if start else None)
    source, options = given or args.pretrained_model_name_or_path, {"cache_dir": args.cache_dir}
    with explained(f"{source} holds no {kind.__name__}"):
        if given:
            config = kind.load_config(source, **options)
            if config.get("_class_name", kind.__name__) != kind.__name__:
                raise ValueError(f"it is a {config['_class_name']}")
            transformer = kind.from_config(config)
        else:
            options |= {
                "subfolder": "transformer",
                "revision": args.revision,
                "variant": args.variant,
            }
            transformer = load_weights(kind, source, **options)
    found = transformer.config.in_channels, transformer.config[width]
    if found != (channels, embed_dim):
        takes = f"{found[0]} channels and embeddings of {found[1]}"
        fail(
            f"the transformer of {source} takes {takes}; the latents have {channels}, the "
            f"embeddings {embed_dim}"
        )
    # side of a patch, in latents
    patch = transformer.config.patch_size if args.model_family == "prx" else 2
    step = (
        args.bucket_step or frozen.cache.get("transform", {}).get("bucket_step") or args.resolution
    )
    if step % (patch * frozen.pixels):
        fail(
            f"the transformer of {source} wants sides of {patch * frozen.pixels} pixels: {step} is "
            "no multiple of it"
        )
    with (
        torch.device("meta"),
        torch.no_grad(),
        explained(f"the transformer of {source} can't be trained here"),
    ):
        embeds = torch.zeros(1, *frozen.empty_prompt["prompt_embeds"].shape)
        prompts = {
            "prompt_embeds": embeds,
            "prompt_mask": torch.ones(embeds.shape[:2], dtype=torch.bool),
        }
        if args.model_family == "z-image":
            prompts["prompt_lengths"] = torch.tensor([embeds.shape[1]], device="cpu")
        latents = torch.zeros(1, channels, *size)
        call_transformer(kind.from_config(transformer.config), latents, torch.zeros(1), prompts)
    return transformer


def call_transformer(
    transformer: torch.nn.Module,
    noisy_latents: torch.Tensor,
    sigmas: torch.Tensor,
    prompts: dict[str, torch.Tensor],
) -> torch.Tensor:
    """Return the velocity (noise - latents) that the transformer predicts, float32 [N, C, h, w].

    This works for all families.

    sigmas: share of noise in [0, 1], [N].
    prompts: see `encode_batch`. Z-Image also needs "prompt_lengths", which are on the CPU.
    """
    embeds = prompts["prompt_embeds"]
    if "prompt_lengths" not in prompts:
        given = {"encoder_hidden_states": embeds, "attention_mask": prompts["prompt_mask"]}
        return transformer(noisy_latents, sigmas, **given).sample.float()
    # Z-Image takes lists. Its time runs from noise to image, and it predicts latents - noise.
    lengths = prompts["prompt_lengths"]
    # Tensors on the meta device, which count operations, have no values.
    lengths = [embeds.shape[1]] * len(embeds) if lengths.is_meta else lengths.tolist()
    captions = [rows[:length] for rows, length in zip(embeds, lengths, strict=True)]
    found = transformer(list(noisy_latents.unsqueeze(2)), 1 - sigmas, captions).sample
    return -torch.stack(found).squeeze(2).float()


def make_scheduler(args: Namespace) -> tuple[FlowMatchEulerDiscreteScheduler, float]:
    """Return (the sampler of the pipeline, its shift of noise levels).

    Training uses the same shift (arXiv:2403.03206, 5.3.2).
    """
    source, options = (
        args.pretrained_model_name_or_path,
        {"cache_dir": args.cache_dir, "revision": args.revision},
    )
    kind = read_pipeline(args).get("scheduler", [None, None])[1]
    with explained(f"{source} holds no scheduler"):
        if kind == "FlowMatchEulerDiscreteScheduler":
            sampler = FlowMatchEulerDiscreteScheduler.from_pretrained(
                source, subfolder="scheduler", **options
            )
        else:  # no flow model, or no pipeline but single models
            sampler = FlowMatchEulerDiscreteScheduler(shift=3.0 if args.resolution >= 512 else 1.0)
    if sampler.config.use_dynamic_shifting:
        fail(
            f"the scheduler of {source} shifts noise by the size of an image, which can't be "
            "trained here"
        )
    if args.shift is not None:
        sampler = FlowMatchEulerDiscreteScheduler.from_config(sampler.config, shift=args.shift)
    return sampler, sampler.config.shift


# -------------------------------------------------------------------------------------------------
# the loss


@torch.no_grad()
def prepare_batch(batch: dict, frozen: SimpleNamespace, caption_dropout: float) -> Prepared:
    """Turn a loaded batch into (latents, condition, loss_inputs).

    latents: float32 [N, C, h, w] of about unit size, drawn anew each time.
    condition: further inputs of the transformer, {name: tensor [N, ...]}.
    loss_inputs: inputs of the loss alone, {name: tensor [N, ...]}.

    The empty prompt replaces a share `caption_dropout` of the captions.
    """
    return encode_batch(batch, frozen, caption_dropout)


def add_noise(latents: torch.Tensor, noise: torch.Tensor, sigmas: torch.Tensor) -> torch.Tensor:
    """Move latents [N, C, h, w] along the straight line to noise, by a share `sigmas` [N]."""
    sigmas = sigmas.view(-1, 1, 1, 1)
    return (1 - sigmas) * latents + sigmas * noise


def compute_loss(
    models: Models,
    shift: float,
    latents: torch.Tensor,
    condition: dict[str, torch.Tensor],
    loss_inputs: dict[str, torch.Tensor],
    weight: torch.Tensor,
    args: Namespace,
) -> torch.Tensor:
    """The loss of rectified flow (arXiv:2209.03003).

    Returns the sum over images of weight * mean squared error of the velocity.

    models: {"transformer": ...}, the trained models.
    shift: shift of the noise levels.
    latents: float32 [N, C, h, w], of about unit size.
    condition, loss_inputs: see `prepare_batch`.
    weight: [N]. Over a step's micro-batches, averaged over the processes, the weights add up to 1;
        a placeholder has weight 0. So return (weight * loss per image).sum(), whatever the loss.
    """
    noise = torch.randn(latents.shape, device=latents.device)
    if args.weighting_scheme == "logit_normal":
        # more levels in the middle, between image and noise (arXiv:2403.03206, 3.1)
        sigmas = torch.randn(len(latents), device=latents.device)
        sigmas = torch.sigmoid(args.logit_mean + args.logit_std * sigmas)
    else:
        sigmas = torch.rand(len(latents), device=latents.device)
    sigmas = shift * sigmas / (1 + (shift - 1) * sigmas)
    # Sigmas are continuous and in float32: bfloat16 has a precision of 8 bits only.
    velocity = call_transformer(
        models["transformer"], add_noise(latents, noise, sigmas), sigmas, condition
    )
    error = F.mse_loss(velocity, noise - latents, reduction="none")
    error = error * loss_inputs.get("mask", 1)  # in [0, 1], for each pixel
    loss = error.mean(dim=(1, 2, 3))  # of each image
    return (weight * loss).sum()


def measure_velocity() -> tuple[Callable, Callable]:
    """Return two functions for `log_held_out_loss`: one adds noise, one measures the error.

    Noise levels are in tenths, [N]. The error is the velocity's mean squared error per image, [N].
    """

    def add(latents: torch.Tensor, noise: torch.Tensor, tenths: torch.Tensor) -> torch.Tensor:
        return add_noise(latents, noise, tenths / 10)

    def measure(
        transformer: torch.nn.Module,
        noisy_latents: torch.Tensor,
        tenths: torch.Tensor,
        condition: dict[str, torch.Tensor],
        latents: torch.Tensor,
        noise: torch.Tensor,
    ) -> torch.Tensor:
        velocity = call_transformer(transformer, noisy_latents, tenths / 10, condition)
        return F.mse_loss(velocity, noise - latents, reduction="none").mean(dim=(1, 2, 3))

    return add, measure


def train_step(
    accelerator: Accelerator,
    shift: float,
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
        latents, condition, loss_inputs = prepare(batch)
        with contextlib.ExitStack() as stack:
            if micro_batch < micro_batches - 1:
                # the processes average their gradients once a step, in its last micro-batch
                for model in models.values():
                    stack.enter_context(accelerator.no_sync(model))
            loss = compute_loss(
                models, shift, latents, condition, loss_inputs, batch["weight"], args
            )
            accelerator.backward(loss)
        sums += torch.stack([loss.detach(), batch["weight"].sum()])
    grad_norm = accelerator.clip_grad_norm_(list_parameters(models), args.max_grad_norm or math.inf)
    optimizer.step()
    optimizer.zero_grad()  # to None, which frees memory for the next forward pass
    return torch.cat([sums, grad_norm[None]])  # one tensor, read later: an .item() here would wait


# -------------------------------------------------------------------------------------------------
# the output


class Interrupted(Exception):
    """Raised if a signal comes while a sample is drawn."""


def make_pipeline(
    transformer: torch.nn.Module, sampler: FlowMatchEulerDiscreteScheduler, args: Namespace
) -> DiffusionPipeline:
    """Make the pipeline that is sampled from, saved and uploaded.

    It has the transformer and the models that it was trained with, in float32.
    """
    vae, (text_encoder,), (tokenizer,) = load_models(args, torch.float32)
    if vae.config.get("shift_factor", 0.0) is None:  # PRXPipeline adds it, and can't add None
        vae.register_to_config(shift_factor=0.0)
    _, kind, _ = CLASSES[args.model_family]
    more = {"default_sample_size": args.resolution} if args.model_family == "prx" else {}
    parts = {"vae": vae, "text_encoder": text_encoder, "tokenizer": tokenizer, "scheduler": sampler}
    return kind(transformer=transformer, **parts, **more)


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
        if stop_signal.received:
            raise Interrupted
        return tensors

    def draw(prompts: list[str], generators: list[torch.Generator]) -> Sequence[np.ndarray]:
        more, scale = {"use_resolution_binning": False}, args.guidance_scale
        if args.model_family == "z-image":  # its pipeline's scale is 0 for no guidance
            more, scale = {}, scale - 1
        try:
            return pipeline(
                prompts,
                height=args.resolution,
                width=args.resolution,
                output_type="np",
                callback_on_step_end=watch,
                num_inference_steps=args.num_inference_steps,
                guidance_scale=scale,
                generator=generators,
                **more,
            ).images
        except Interrupted:
            return []

    # One prompt at a time: with several prompts and guidance, PRXPipeline passes a different number
    # of times than of latents.
    draw_prompts(accelerator, pipeline, draw, 1, step, stop_signal, args)


def describe_model(step: int, loss: float | None, args: Namespace) -> Description:
    """Return (tags for the hub, a description, example code) for the model card and the report."""
    name, base, data, prompt = name_run(args)
    title = {"prx": "PRX", "z-image": "Z-Image"}[args.model_family]
    steps = f"{step} steps{f', to a loss of {loss:.4g}' if loss else ''}"
    trained = (
        "trained from scratch"
        if args.transformer_config_name_or_path or args.init_from
        else "fine-tuned"
    )
    what = (
        f"A {title} pipeline whose transformer was {trained} on `{data}`\n"
        f"for {steps}, by flow matching."
    )
    if base:
        what += f" The other models are those of\n`{base}`."
    source, more = name, ""
    if args.rank:
        what = (
            f"A LoRA of rank {args.rank} for the transformer of `{base}`,\n"
            f"trained on `{data}` for {steps}."
        )
        source, more = base, f'\npipeline.load_lora_weights("{name}")'
    given = f"{prompt}, height={args.resolution}, width={args.resolution}"
    if args.model_family == "prx" and args.resolution not in (256, 512, 1024):
        given += ", use_resolution_binning=False"
    usage = f"""from diffusers import DiffusionPipeline

pipeline = DiffusionPipeline.from_pretrained("{source}"){more}
image = pipeline({given}).images[0]"""
    return (
        ["text-to-image", args.model_family, "diffusers-training"] + ["lora"] * bool(args.rank),
        what,
        usage,
    )


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
    if args.dataloader_num_workers is None:
        args.dataloader_num_workers = min(8, cores - 1)
    dataset, frozen = load_data(accelerator, CLASSES, args, checkpoint)
    sampler, shift = make_scheduler(args)
    train_rows, held_out = hold_out(accelerator, dataset, args.holdout, args.seed)
    epoch_rows = partial(choose_rows, train_rows, dataset, args.latents_weights)
    num_images = len(epoch_rows(0))  # per epoch
    torch.manual_seed(args.seed)  # every process starts from the same weights
    start = None if checkpoint else find_start(args.init_from)
    transformer = make_transformer(frozen, args.init_from and (checkpoint or start), args)
    if args.rank:
        # The transformer is frozen: only its LoRA is trained, averaged and saved.
        add_lora(
            transformer,
            hash_weights(transformer),
            getattr(torch, DTYPES[args.mixed_precision]),
            args,
        )
        if args.network_weights:
            load_network_weights(transformer, args.network_weights, "transformer")
    # The models that are trained, averaged and saved, each in a folder of its name.
    models = {"transformer": transformer}

    # The position of the run. The batch size is chosen before it, because a checkpoint's position
    # is counted in images.
    prepare = partial(prepare_batch, frozen=frozen, caption_dropout=args.caption_dropout)
    take_step = partial(train_step, accelerator, shift, args, prepare)
    state = read_state(checkpoint, num_images) if start is None else read_start(start, args)
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
        transformer.enable_gradient_checkpointing()
    optimizer = make_optimizer(models, accelerator.scaler, args)
    if checkpoint:  # before `prepare`, which wraps the models and the optimizer
        load_checkpoint(accelerator, checkpoint, saved, optimizer, state, settings)
    elif start:
        load_start(accelerator, start, saved, state)
    lr_scheduler = make_lr_scheduler(optimizer, progress.global_step, args)
    costs = Costs(
        accelerator, models, averaged, call_transformer, args, [frozen.vae, frozen.text_encoders]
    )
    if args.compile:
        compile_model(transformer, args.compile, order.num_sizes)
    *prepared, optimizer = accelerator.prepare(*models.values(), optimizer)
    # `prepared` is called in training; `models` is saved and averaged.
    prepared = dict(zip(models, prepared, strict=True))
    for model in averaged.values():
        accelerator.prepare_model(model, evaluation_mode=True)  # autocast as in training
    sampled = averaged.get("transformer", transformer)

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
    take_step = partial(train_step, accelerator, shift, args, records.look(prepare))
    stop = stop_signal.agree()  # a signal that came earlier, even if a library swallowed it
    measured = {name.replace("transformer", "held_out_loss"): saved[name] for name in saved}

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
            measure_velocity(),
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
    files = [
        f"{name}/*" for name in ("transformer", "vae", "text_encoder*", "tokenizer*", "scheduler")
    ]
    end_run(accelerator, lock, done, ["pytorch_lora_weights*"] if args.rank else files, args)


if __name__ == "__main__":
    main(parse_args())
