"""Train an unconditional diffusion model: images -> a diffusers DDPM or DDIM pipeline.

    accelerate launch train_unconditional.py     # the demo: handwritten digits, minutes on a CPU
    accelerate launch --config_file accelerate_configs/multi_gpu.yaml train_unconditional.py \\
        --train_data_dir photos --resolution 64 --random_flip --output_dir ddpm-photos

Input: a data set on the hub, or a local folder that `datasets.load_dataset` can open (images,
parquet, webdataset). Output, in --output_dir:
    the pipeline with its model card, samples/, metrics.jsonl, loss.png, report.html, logs
    run.args      the flags of this run; @ddpm-photos/run.args repeats it
    checkpoint-N  one every --checkpointing_steps; to resume from the last one, run the same
                  command with --resume_from_checkpoint latest

Layout of this file:
    parse_args                       the flags; bad values stop the script before anything is loaded
    ImageDataset                     keys -> a batch; the key decides crop and flip, so a resumed
                                     run repeats them
    make_unet, make_noise_scheduler  the model, and the scheduler that adds noise in training
    prepare_batch, compute_loss      a batch -> the inputs of the U-Net, and the loss
    train_step                       one optimizer step, with the calls of Accelerate
    log_validation, describe_model   the samples, and the text of the model card
    main                             the run in phases, with the training loop
The code that all trainers share is in diffusion_training/. To get all of it in one file that you
can change:
python -m diffusion_training.standalone train_unconditional.py > mine.py
"""

import contextlib
import math
import os
import shlex
from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import gather_object
from diffusers import DDIMPipeline, DDPMPipeline, DDPMScheduler, DiffusionPipeline, UNet2DModel
from PIL import Image
from torchvision.utils import make_grid
from tqdm.auto import tqdm

from diffusion_training import check_version

check_version("0.1.0", Path(__file__).name)  # before imports that another version may lack

from diffusion_training.arguments import (
    COUNT,
    PATH,
    SWITCH,
    check_source,
    make_parser,
    number,
    parse_demo,
)
from diffusion_training.data.image_cache import cache_images
from diffusion_training.data.images import decode_image, name_image, shrink
from diffusion_training.data.rows import RowDataset, Rows, load_rows, read_items
from diffusion_training.data.streams import add_stream_flags
from diffusion_training.errors import explain, explained, fail, in_one_sentence, is_machines_fault
from diffusion_training.loading import load_batches
from diffusion_training.order import Order, draw_choices, step_batches, step_seed
from diffusion_training.report import Description, save_model_card, save_report
from diffusion_training.training.checkpoints import (
    load_checkpoint,
    prune_checkpoints,
    read_state,
    save_checkpoint,
)
from diffusion_training.training.costs import Costs
from diffusion_training.training.flags import (
    add_device_flags,
    add_logging_flags,
    add_optimization_flags,
    add_saving_flags,
    add_source_flags,
    check_training_args,
)
from diffusion_training.training.held_out import digest_held_out, hold_out, log_held_out_loss
from diffusion_training.training.launch import StopSignal, end_run, end_stopped, make_accelerator
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
    keep_best,
    open_output_dir,
    samples_path,
    save_pipeline,
    save_samples,
)
from diffusion_training.training.progress import Progress
from diffusion_training.training.records import Records
from diffusion_training.training.tuning import (
    choose_batch_size,
    find_learning_rate,
    plan_steps,
    scale_learning_rate,
)

HERE = shlex.quote(os.path.relpath(Path(__file__).parent))
# The command line of the demo, which runs if no data is given. The user's flags override it.
DEMO = f"""
    --train_data_dir {HERE}/demo/digits
    --model_config_name_or_path {HERE}/demo/digits_unet.json
    --output_dir ddpm-digits --resolution 8 --train_batch_size 64 --num_train_epochs 100
    --learning_rate 4e-3 --lr_warmup_steps 100 --prediction_type v_prediction
    --ddpm_beta_schedule squaredcos_cap_v2 --snr_gamma 5 --validation_scheduler ddim
    --ddpm_num_inference_steps 50 --eval_batch_size 64 --dataloader_num_workers 0
    --checkpointing_steps 10000 --resume_from_checkpoint latest
"""

# -------------------------------------------------------------------------------------------------
# the flags


def parse_args(argv: list[str] | None = None) -> Namespace:
    """Parse and check the command line.

    A bad argument stops the script with one line and status 2 before anything is loaded.
    """
    parser = make_parser(__file__, __doc__)

    add = parser.add_argument_group("data").add_argument
    add_source_flags(add)
    add_stream_flags(add)
    add(
        "--cache_images",
        **SWITCH,
        help="decode and resize all images once, and store them in --output_dir",
    )
    add(
        "--resolution",
        type=number(2, 16384, int),
        default=64,
        help="side of the square images, pixels",
    )
    add("--center_crop", **SWITCH, help="crop the centre, not a random square")
    add("--random_flip", **SWITCH, help="use mirrored images too")
    add(
        "--min_size",
        type=number(0, 16384, int),
        default=0,
        help="skip images with a side shorter than this many pixels",
    )
    add(
        "--holdout",
        type=number(0, 10**9),
        default=0.0,
        help="share or number of images to hold out for the held-out loss",
    )
    add("--preserve_input_precision", **SWITCH, help="keep 16 and 32 bit grey images in float32")
    add(
        "--dataloader_num_workers",
        type=number(0, 1024, int),
        help="processes that decode images (None: depends on the number of cores)",
    )
    add(
        "--prefetch_factor",
        type=COUNT,
        help="batches that each process of --dataloader_num_workers loads ahead (None: 2)",
    )

    add = parser.add_argument_group("model").add_argument
    add("--model_config_name_or_path", type=PATH, help="U-Net config: hub id, folder or JSON file")
    add("--pretrained_model_name_or_path", type=PATH, help="hub id or folder of a pipeline")
    add_device_flags(add)

    add = parser.add_argument_group("objective").add_argument
    add(
        "--prediction_type",
        choices=["epsilon", "sample", "v_prediction"],
        help="what the U-Net predicts (None: as the pretrained pipeline, or epsilon)",
    )
    add(
        "--ddpm_num_steps",
        type=number(2, 10**5, int),
        help="training timesteps (None: as the pretrained pipeline, or 1000)",
    )
    add(
        "--ddpm_beta_schedule",
        choices=["linear", "scaled_linear", "squaredcos_cap_v2"],
        help="noise schedule (None: as the pretrained pipeline, or linear)",
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

    add_optimization_flags(parser, lr_scheduler="cosine", adam_beta1=0.95, adam_weight_decay=1e-6)

    add = parser.add_argument_group("logging and samples").add_argument
    add_logging_flags(add, tracker_project_name="train_unconditional")
    add(
        "--validation_steps",
        type=COUNT,
        help="optimizer steps between samples and held-out losses; overrides the epochs",
    )
    add("--save_images_epochs", type=COUNT, default=10, help="epochs between samples")
    add(
        "--eval_batch_size",
        type=number(1, 10**4, int),
        default=16,
        help="number of images to sample, over all processes",
    )
    add(
        "--validation_scheduler",
        choices=["ddpm", "ddim"],
        default="ddpm",
        help="sampler, saved with the pipeline",
    )
    add("--ddpm_num_inference_steps", type=COUNT, default=1000, help="sampling steps")

    add = parser.add_argument_group("saving").add_argument
    add("--output_dir", type=PATH, default="ddpm-model-64", help="folder for all output")
    add("--save_model_epochs", type=COUNT, default=10, help="epochs between saves of the pipeline")
    add_saving_flags(add)

    args = parser.parse_args(argv)
    go_on = args.pretrained_model_name_or_path is not None
    if args.dataset_name is None and args.train_data_dir is None:
        demo = [
            line
            for line in DEMO.splitlines()
            if not (go_on and "--model_config_name_or_path" in line)
        ]
        args = parse_demo(parser, "\n".join(demo), argv)

    check_source(parser, args)
    if args.model_config_name_or_path and go_on:
        parser.error(
            "--model_config_name_or_path and --pretrained_model_name_or_path exclude each other"
        )
    if args.cache_images and (args.streaming or args.preserve_input_precision):
        parser.error(
            "--cache_images stores 8 bits of all images: it goes with neither stream nor preserved "
            "precision"
        )
    check_training_args(parser, args)
    return args


# -------------------------------------------------------------------------------------------------
# the data


class ImageDataset(RowDataset):
    """Turns the keys (epoch, row, weight) of `step_batches` into a batch: `dataset[keys]`.

    A batch is {"pixel_values": [N, C, resolution, resolution], "weight": [N], "skipped": [(name,
    reason)]}. Pixels are uint8, or float32 in [0, 1] with --preserve_input_precision. An image that
    can't be decoded is black and has weight 0.
    """

    def __init__(self, rows: Rows, column: str, channels: int, args: Namespace) -> None:
        super().__init__(rows, column, args)
        self.channels, self.dtype = (
            channels,
            torch.float32 if args.preserve_input_precision else torch.uint8,
        )

    def __getitem__(self, keys: list[tuple]) -> dict[str, Any]:
        items = read_items(self.rows, keys)
        pixel_values = torch.zeros(
            len(keys), self.channels, *[self.args.resolution] * 2, dtype=self.dtype
        )
        # A weight of 0 excludes an image from the mean.
        weight, skipped = torch.tensor([key[2] for key in keys]), []
        for i, (key, item) in enumerate(zip(keys, items, strict=True)):
            try:
                pixel_values[i] = self.load(key[0], key[1], item)
            except Exception as error:
                # Whatever its decoder raises, a bad image must not stop the run. A fault of the
                # machine must, or the run would continue without data.
                if is_machines_fault(error):
                    raise
                weight[i] = 0.0
                skipped.append((name_image(key[1], item[self.column]), explain(error)))
        return {"pixel_values": pixel_values, "weight": weight, "skipped": skipped}

    def load(self, epoch: int | None, row: int, item: dict) -> torch.Tensor:
        """Return one image [C, resolution, resolution], with the crop and flip of its key."""
        y, x, flip, _ = draw_choices(self.args.seed, epoch, row)
        image = decode_image(
            item[self.column], self.channels, self.args.preserve_input_precision, self.args.min_size
        )
        image = shrink(image, self.args.resolution, (0.5, 0.5) if self.args.center_crop else (y, x))
        return image.flip(-1) if self.args.random_flip and flip < 0.5 else image


# -------------------------------------------------------------------------------------------------
# the model


def make_unet(args: Namespace) -> UNet2DModel:
    """Make the U-Net to train.

    It comes from a pretrained pipeline or from a config. Without either it is the U-Net of
    diffusers' script, with 114 million weights.
    """
    source = args.pretrained_model_name_or_path or args.model_config_name_or_path
    with explained(f"{source} holds no UNet2DModel"):
        if args.pretrained_model_name_or_path:
            unet = load_weights(UNet2DModel, source, subfolder="unet", cache_dir=args.cache_dir)
            unet.register_to_config(sample_size=args.resolution)  # size of the pipeline's images
        elif args.model_config_name_or_path:
            config = UNet2DModel.load_config(source, cache_dir=args.cache_dir)
            unet = UNet2DModel.from_config(config, sample_size=args.resolution)
        else:
            unet = UNet2DModel(
                sample_size=args.resolution,
                block_out_channels=(128, 128, 256, 256, 512, 512),
                down_block_types=("DownBlock2D",) * 4 + ("AttnDownBlock2D", "DownBlock2D"),
                up_block_types=("UpBlock2D", "AttnUpBlock2D") + ("UpBlock2D",) * 4,
            )
    # Each further level halves the resolution.
    channels, multiple = unet.config.in_channels, 2 ** (len(unet.config.block_out_channels) - 1)
    if channels not in (1, 3) or unet.config.out_channels != channels:
        fail(
            f"{source} takes {channels} and gives {unet.config.out_channels} channels; images have "
            "1 or 3"
        )
    if args.resolution % multiple:
        fail(
            f"--resolution {args.resolution} is not a multiple of {multiple}, which this U-Net "
            "needs"
        )
    # For one image, the shapes of the conditions that `prepare_batch` returns; () for a label.
    condition: dict[str, tuple] = {}
    try_shapes(unet, source, [channels, args.resolution, args.resolution], **condition)
    return unet


def make_noise_scheduler(args: Namespace) -> DDPMScheduler:
    """Make the scheduler that adds noise in training.

    Flags override the scheduler of the pretrained pipeline.
    """
    flags = {"num_train_timesteps": args.ddpm_num_steps, "beta_schedule": args.ddpm_beta_schedule}
    flags = {key: value for key, value in flags.items() if value is not None} | objective_flags(
        args
    )
    source = args.pretrained_model_name_or_path
    with explained(f"{source} holds no scheduler" if source else "these flags make no scheduler"):
        if source:
            options = {"subfolder": "scheduler", "cache_dir": args.cache_dir}
            scheduler = DDPMScheduler.from_pretrained(source, **options, **flags)
        else:
            scheduler = DDPMScheduler(**flags)
    check_objective(scheduler)
    timesteps = scheduler.config.num_train_timesteps
    if args.ddpm_num_inference_steps > timesteps:
        fail(
            f"--ddpm_num_inference_steps {args.ddpm_num_inference_steps} exceeds the {timesteps} "
            "training timesteps"
        )
    return scheduler


# -------------------------------------------------------------------------------------------------
# the loss


def prepare_batch(batch: dict) -> Prepared:
    """Turn a loaded batch into (images, condition, loss_inputs).

    images: float32 [N, C, H, W] in [-1, 1].
    condition: further inputs of the U-Net, {name: tensor [N, ...]}.
    loss_inputs: inputs of the loss alone, {name: tensor [N, ...]}.
    """
    images, condition, loss_inputs = batch["pixel_values"], {}, {}
    images = images * 2 - 1 if images.is_floating_point() else images / 127.5 - 1
    return images, condition, loss_inputs


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


@torch.no_grad()
def log_validation(
    accelerator: Accelerator,
    pipeline: DiffusionPipeline,
    step: int,
    stop_signal: StopSignal,
    args: Namespace,
) -> torch.Tensor | None:
    """Draw --eval_batch_size images into samples/step-N.png and the trackers.

    Each process draws a share. Returns the images on the main process, else None.

    The samples equal the pipeline's. Its loop is written out here, so that you can pass further
    inputs to the U-Net, such as class labels. Image i has its own seed, so the number of processes
    does not matter. A signal interrupts the sampling, because its sender does not wait for
    pictures; a resumed run draws the missing ones.
    """
    unet, scheduler, device = pipeline.unet, pipeline.scheduler, accelerator.device
    training, size = unet.training, unet.config.sample_size
    unet.eval()  # without dropout
    mine, images = (
        range(accelerator.process_index, args.eval_batch_size, accelerator.num_processes),
        [],
    )
    if mine:
        generators = [
            torch.Generator(device).manual_seed(step_seed("sample", args.seed, i)) for i in mine
        ]
        shape = (unet.config.in_channels, size, size)
        images = torch.stack(
            [torch.randn(shape, generator=generator, device=device) for generator in generators]
        )
        scheduler.set_timesteps(args.ddpm_num_inference_steps)
        hidden = not accelerator.is_main_process
        for timestep in tqdm(scheduler.timesteps, "Sampling", leave=False, disable=hidden):
            if stop_signal.received:
                break
            prediction = unet(images, timestep).sample
            images = scheduler.step(prediction, timestep, images, generator=generators).prev_sample
        images = (images / 2 + 0.5).clamp(0, 1).cpu()
    unet.train(training)
    images = gather_object([] if stop_signal.received else list(zip(mine, images, strict=True)))
    if accelerator.is_main_process and len(images) == args.eval_batch_size:
        images = torch.stack([image for _, image in sorted(images, key=lambda pair: pair[0])])
        grid = make_grid(images, nrow=math.ceil(math.sqrt(len(images))), padding=1, pad_value=0.5)
        grid = Image.fromarray((grid * 255).round().byte().permute(1, 2, 0).numpy())
        scale = max(1, 512 // grid.width)  # so that digits of 8 px can be seen
        grid = grid.resize((grid.width * scale, grid.height * scale), Image.NEAREST)
        save_samples(accelerator, grid, args.output_dir, step)
        return images
    return None


def describe_model(step: int, loss: float | None, args: Namespace) -> Description:
    """Return (tags for the hub, a description, example code) for the model card and the report."""
    name = args.hub_model_id or Path(args.output_dir).resolve().name
    data = Path(args.dataset_name or args.train_data_dir).name
    what = f"An unconditional diffusion model, trained on `{data}` for {step} steps"
    what += f", to a loss of {loss:.4g}." if loss else "."
    usage = f"""from diffusers import DiffusionPipeline

pipeline = DiffusionPipeline.from_pretrained("{name}")
image = pipeline(num_inference_steps={args.ddpm_num_inference_steps}).images[0]"""
    return ["unconditional-image-generation", "diffusion-models-class"], what, usage


# -------------------------------------------------------------------------------------------------
# the run


@in_one_sentence
def main(args: Namespace) -> None:
    """Train.

    The exit status is 130 after Ctrl-C, 143 after SIGTERM, and 1 after an error, with one line
    that tells the reason.
    """
    # The launch comes first: it sets the device, the processes and the precision.
    accelerator, cores = make_accelerator(args)
    device, rank, num_processes = (
        accelerator.device,
        accelerator.process_index,
        accelerator.num_processes,
    )
    # The lock is held until the end, so that no second run writes here.
    lock, checkpoint = open_output_dir(accelerator, __file__, args)

    # The model comes before the data: its channels decide whether images become grey or colour.
    noise_scheduler = make_noise_scheduler(args)
    torch.manual_seed(args.seed)  # every process starts from the same weights
    unet = make_unet(args)
    models = {"unet": unet}  # what is trained, averaged and saved, each in a folder of its name

    # The data. One core per process stays free for the trainer.
    rows, column = load_rows(args, args.streaming)
    channels, num_left_out = unet.config.in_channels, 0
    if args.cache_images:
        rows, num_left_out = cache_images(rows, column, channels, min(8, cores), args)
    if args.dataloader_num_workers is None:
        args.dataloader_num_workers = min(8, cores - 1)
    dataset = ImageDataset(rows, column, channels, args)
    train_rows, held_out = hold_out(accelerator, dataset, args.holdout, args.seed)
    num_images = len(train_rows)

    # The position of the run. The batch size is chosen before it, because a checkpoint's position
    # is counted in images.
    take_step = partial(train_step, accelerator, noise_scheduler, args, prepare_batch)
    state = read_state(checkpoint, num_images)
    choose_batch_size(accelerator, models, take_step, dataset, train_rows, state["settings"], args)
    progress = Progress(
        state, num_images, args.train_batch_size * num_processes, args.gradient_accumulation_steps
    )
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

    # Weights, averaged weights and optimizer state are in float32. Autocast lowers the precision of
    # the computation only.
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
    costs = Costs(accelerator, models, averaged, call_unet, args)
    if args.compile:
        compile_model(unet, args.compile)
    *prepared, optimizer = accelerator.prepare(*models.values(), optimizer)
    # `prepared` is called in training; `models` is saved and averaged.
    prepared = dict(zip(models, prepared, strict=True))
    for model in averaged.values():
        accelerator.prepare_model(model, evaluation_mode=True)  # autocast as in training
    # The pipeline that draws the samples and is saved. A DDIMPipeline converts the scheduler.
    kind = DDIMPipeline if args.validation_scheduler == "ddim" else DDPMPipeline
    pipeline = kind(averaged.get("unet", unet), noise_scheduler)

    # Batches continue across epochs, so the device never waits for an epoch to begin.
    keys = step_batches(Order(train_rows, args.seed), progress, rank, num_processes)
    loaded = load_batches(dataset, keys, args.dataloader_num_workers, device, args.prefetch_factor)
    if args.find_lr:  # and stop: nothing that it trains is kept
        found = find_learning_rate(
            accelerator, prepared, optimizer, take_step, loaded, progress, args
        )
        return end_run(accelerator, lock, found, [], args)
    records = Records(
        accelerator, progress.global_step, num_left_out, checkpoint, args, costs=costs
    )
    batches, stop_signal = records.watch(loaded), StopSignal(num_processes)
    take_step = partial(train_step, accelerator, noise_scheduler, args, records.look(prepare_batch))
    stop = stop_signal.agree()  # a signal that came earlier, even if a library swallowed it
    measured = {
        name.replace("unet", "held_out_loss"): saved[name]
        for name in ("unet", "unet_ema")
        if name in saved
    }

    def show() -> int:
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
            prepare_batch,
            stop_signal,
            progress.global_step,
        )
        keep_best(
            accelerator,
            records.held_out,
            progress.global_step,
            partial(save_pipeline, pipeline),
            args,
        )
        samples = log_validation(accelerator, pipeline, progress.global_step, stop_signal, args)
        records.judge(samples, progress.global_step)
        if accelerator.is_main_process:
            save_report(progress.global_step, __file__, describe_model, args)
        return stop_signal.agree()

    samples_every = args.validation_steps, args.save_images_epochs
    shown = samples_path(args.output_dir, progress.global_step).exists()
    if checkpoint and progress.is_due(*samples_every) and not shown and not stop:
        # The last run ended between checkpoint and samples. Draw them before training goes past
        # this step.
        stop = show()

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
        pipeline_due = progress.is_due(None, args.save_model_epochs)
        # This is the only place where the host waits for the device.
        if log_due or checkpoint_due or pipeline_due:
            records.update(progress.global_step, log_due, last)
        with records.paused():
            if checkpoint_due:
                # before the samples, which may take longer than a preempted job has left
                save_checkpoint(
                    accelerator, saved, optimizer, progress.state() | {"settings": settings}, args
                )
            if pipeline_due and not last and not stop and accelerator.is_main_process:
                save_pipeline(pipeline, args.output_dir)
            if progress.is_due(*samples_every) and not last and not stop:
                stop = show()
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
        if accelerator.is_main_process:
            # before the samples, which take time
            save_pipeline(pipeline, args.output_dir)
        stop = show()
    stop_signal.close()
    if stop:
        end_stopped(accelerator, stop, progress.global_step, args.max_train_steps)
    if accelerator.is_main_process:
        # again, in case a kill prevented it
        prune_checkpoints(Path(args.output_dir) / f"checkpoint-{progress.global_step}", args)
        save_model_card(progress.global_step, describe_model, args)
    done = f"Done: pipeline, samples/ and report.html are in {args.output_dir}"
    end_run(accelerator, lock, done, [f"{name}/*" for name in ("unet", "scheduler")], args)


if __name__ == "__main__":
    main(parse_args())
