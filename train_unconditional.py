"""Train an unconditional diffusion model: images -> a diffusers DDPM or DDIM pipeline.

    python train_unconditional.py     # the demo: handwritten digits, minutes on a CPU
    accelerate launch --config_file accelerate_configs/multi_gpu.yaml train_unconditional.py \\
        --train_data_dir photos --resolution 64 --random_flip --output_dir ddpm-photos

Input: a data set on the hub, or a local folder that `datasets.load_dataset` can open (images,
parquet, webdataset). Output, in --output_dir:
    the pipeline with its model card, samples/, metrics.jsonl, loss.png, report.html, logs
    run.args      the flags of this run; pass @ddpm-photos/run.args to repeat it
    checkpoint-N  one every --checkpointing_steps; to resume from the last one, run the same
                  command with --resume_from_checkpoint latest

Layout of this file:
    parse_args                       the flags; bad values stop the script before anything is loaded
    ImageDataset                     keys -> a batch; the same key always has the same crop and flip
    make_unet                        the model
    prepare_batch, compute_loss      a batch -> the inputs of the U-Net, and the loss
    train_step                       one optimizer step, with the calls to Accelerate
    draw_images                      the samples, to look at (log_validation) and to measure
    describe_model                   the text of the model card
    main                             the run from its first line to its last, with the loop
The code that all trainers share is in diffusion_training/. minimal/train_unconditional.py
is one short file without it, which trains the same weights, bit for bit.
"""

from pathlib import Path

try:
    from diffusion_training import check_version
except ModuleNotFoundError:
    raise SystemExit(
        f"{__file__} needs the package diffusion_training: run `pip install .` in the script's "
        "repository, or start from minimal/train_unconditional.py there, which does not need it"
    ) from None
check_version("0.1.0", Path(__file__).name)  # first: another version may lack the modules below

import contextlib
import math
import os
import shlex
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from diffusion_training.arguments import COUNT, PATH, make_parser, parse_demo
from diffusion_training.data.flags import (
    add_array_flags,
    add_plain_image_flags,
    add_source_flags,
    add_stream_flags,
    check_plain_images,
    check_source,
    is_array,
)
from diffusion_training.flags import add_device_flags
from diffusion_training.training.flags import (
    add_logging_flags,
    add_noise_flags,
    add_optimization_flags,
    add_sample_flags,
    add_saving_flags,
    add_schedule_flags,
    check_training_args,
)
from diffusion_training.training.scores.metric_flags import add_metric_flags

HERE = shlex.quote(os.path.relpath(Path(__file__).parent))
# The command line of the demo, which runs if no data is given. The user's flags override it.
DEMO = f"""
    --train_data_dir {HERE}/demo/digits
    --model_config_name_or_path {HERE}/demo/digits_unet.json
    --output_dir ddpm-digits --resolution 8 --train_batch_size 64 --num_train_epochs 100
    --learning_rate 4e-3 --lr_warmup_steps 100 --prediction_type v_prediction
    --ddpm_beta_schedule squaredcos_cap_v2 --snr_gamma 5
    --eval_batch_size 64 --dataloader_num_workers 0
    --checkpointing_steps 10000 --resume_from_checkpoint latest
"""

# -------------------------------------------------------------------------------------------------
# the flags


def parse_args(argv: list[str] | None = None) -> Namespace:
    """Parse and check the command line.

    A bad argument stops the script with one line and status 2 before anything is loaded.
    """
    parser = make_parser(__file__, __doc__, "docs/training.md")

    add = parser.add_argument_group("data").add_argument
    add_source_flags(add)
    add_array_flags(add)
    add_stream_flags(add)
    add_plain_image_flags(add)

    add = parser.add_argument_group("model").add_argument
    add(
        "--model_config_name_or_path",
        type=PATH,
        help="train a new U-Net with this config: hub id, folder or JSON file",
    )
    add(
        "--pretrained_model_name_or_path",
        type=PATH,
        help="pretrained pipeline: hub id or folder; text-to-image U-Nets also from one "
        ".safetensors file",
    )
    add_device_flags(add)

    add = parser.add_argument_group("objective").add_argument
    add_noise_flags(add)
    add_schedule_flags(add)

    add_optimization_flags(parser, lr_scheduler="cosine", adam_beta1=0.95, adam_weight_decay=1e-6)

    add = parser.add_argument_group("logging and samples").add_argument
    add_logging_flags(add, tracker_project_name="train_unconditional")
    add_sample_flags(add)

    add_metric_flags(parser.add_argument_group("metrics of samples").add_argument)

    add = parser.add_argument_group("saving").add_argument
    add("--output_dir", type=PATH, default="ddpm-model-64", help="folder for all output")
    add("--save_model_epochs", type=COUNT, default=10, help="epochs between saves of the pipeline")
    add_saving_flags(add)

    args = parser.parse_args(argv)
    is_pretrained = args.pretrained_model_name_or_path is not None
    if args.dataset_name is None and args.train_data_dir is None:
        demo = [
            line
            for line in DEMO.splitlines()
            if not (is_pretrained and "--model_config_name_or_path" in line)
        ]
        args = parse_demo(parser, "\n".join(demo), argv)

    check_source(parser, args)
    check_plain_images(parser, args)
    if args.model_config_name_or_path and is_pretrained:
        parser.error(
            "--model_config_name_or_path and --pretrained_model_name_or_path can't be combined"
        )
    check_training_args(parser, args)
    steps = args.ddpm_num_inference_steps
    sampler = args.validation_scheduler or ("ddpm" if steps else "ddim")
    if steps is None:
        steps = {"ddim": 50, "ddpm": 1000}[sampler]
        steps = min(steps, args.ddpm_num_steps or steps)
    return parser.freeze(args, validation_scheduler=sampler, ddpm_num_inference_steps=steps)


# --help and mistakes in the flags end here, at once: the imports below take seconds. Importing this
# file parses nothing, so that tests, Ray's workers and loader processes can do so.
if __name__ == "__main__":
    args = parse_args()

import numpy as np
import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import gather_object
from diffusers import DDIMPipeline, DDPMPipeline, DDPMScheduler, DiffusionPipeline, UNet2DModel
from PIL import Image
from torchvision.utils import make_grid
from tqdm.auto import tqdm

from diffusion_training.batches import Batch, ImageBatch, Models, Objective, Prepared, StepSums
from diffusion_training.data.arrays import load_images
from diffusion_training.data.folders import get_source
from diffusion_training.data.images import decode_image, explain_row, name_image, shrink
from diffusion_training.data.rows import ImageRows, RowDataset, read_items
from diffusion_training.draws import Key, draw_choices, seed_generators, step_seed
from diffusion_training.errors.faults import is_machines_fault
from diffusion_training.errors.printing import amount
from diffusion_training.errors.sentences import explained, fail, in_one_sentence
from diffusion_training.launch import Launch, accelerator_options, make_launch
from diffusion_training.loading import load_batches
from diffusion_training.models import compile_model, freeze_on_device, load_weights
from diffusion_training.order import Order, step_batches
from diffusion_training.repositories import fetch_model
from diffusion_training.shapes import check_shapes
from diffusion_training.stopping import StopSignal
from diffusion_training.training.held_out import hold_out
from diffusion_training.training.keeping.writer import Writer
from diffusion_training.training.progress import NextStep
from diffusion_training.training.records import Records
from diffusion_training.training.results import Results, open_metrics
from diffusion_training.training.run_folder import complete_args, end_run, open_run
from diffusion_training.training.saver import Saver, check_free_space
from diffusion_training.training.showing.pipelines import save_pipeline
from diffusion_training.training.showing.report import About, Description, write_usage
from diffusion_training.training.showing.samples import save_samples
from diffusion_training.training.state import TrainState, describe_settings, place_models
from diffusion_training.training.step.costs import Costs
from diffusion_training.training.step.objective import (
    held_out_epsilon_loss,
    make_noise_scheduler,
    min_snr_weight,
)
from diffusion_training.training.step.optimizers import make_lr_scheduler, make_optimizer
from diffusion_training.training.tuning import find_learning_rate, plan_run

# -------------------------------------------------------------------------------------------------
# the data


class ImageDataset(RowDataset):
    """Turns the keys (epoch, row, weight) of `step_batches` into a batch: `dataset[keys]`.

    A batch is {"pixel_values": [N, C, resolution, resolution], "weight": [N], "skipped": [(name,
    reason)]}. Pixels are uint8, or float32 in [0, 1] with --preserve_input_precision. An image that
    can't be decoded is black and has weight 0.
    """

    def __init__(
        self, images: ImageRows, channels: int, num_left_out: int, args: Namespace
    ) -> None:
        super().__init__(images, get_source(args), args.shuffle_buffer)
        self.num_left_out = num_left_out  # by `cache_images`
        self.channels = channels
        self.args = args

    def __getitem__(self, keys: list[Key]) -> ImageBatch:
        items = read_items(self.rows, keys)
        side = self.args.resolution
        dtype = torch.float32 if self.args.preserve_input_precision else torch.uint8
        pixel_values = torch.zeros(len(keys), self.channels, side, side, dtype=dtype)
        weight = torch.tensor([key[2] for key in keys])
        skipped = []
        for i, (key, item) in enumerate(zip(keys, items, strict=True)):
            try:
                pixel_values[i] = self.load(key[0], key[1], item)
            except Exception as error:
                # A decoder can raise any error, and a bad image must not stop the run. A fault of
                # the machine must, or the run would continue without data.
                if is_machines_fault(error):
                    raise
                weight[i] = 0.0  # so it adds nothing to the gradient
                image = item[self.column]
                skipped.append((name_image(key[1], image), explain_row(error, image)))
        batch: ImageBatch = {"pixel_values": pixel_values, "weight": weight, "skipped": skipped}
        return batch

    def load(self, epoch: int | None, row: int, item: dict) -> torch.Tensor:
        """Return one image [C, resolution, resolution], with the crop and flip of its key."""
        args = self.args
        y, x, flip, _ = draw_choices(args.seed, epoch, row)
        keep_precision = args.preserve_input_precision
        source = item[self.column]
        image = decode_image(source, self.channels, keep_precision, args.min_size, self.allowed)
        image = shrink(image, args.resolution, (0.5, 0.5) if args.center_crop else (y, x))
        return image.flip(-1) if args.random_flip and flip < 0.5 else image


# -------------------------------------------------------------------------------------------------
# the model


def predict_noise(
    models: Models,
    noisy_images: torch.Tensor,
    timesteps: torch.Tensor,
    condition: dict[str, torch.Tensor],
) -> torch.Tensor:
    """The prediction of the U-Net, float32 [N, C, H, W].

    The U-Net is called here and in `draw_images`: to pass further inputs, change both. A check of
    the shapes calls this function with {"unet": ...} alone.

    condition: see `prepare_batch`.
    """
    return models["unet"](noisy_images, timesteps, **condition).sample.float()


def make_unet(args: Namespace) -> UNet2DModel:
    """Make the U-Net to train.

    It comes from a pretrained pipeline or from a config. Without either it is the U-Net of
    diffusers' script, with 114 million weights.
    """
    source = args.pretrained_model_name_or_path or args.model_config_name_or_path
    with explained(f"{source} holds no {UNet2DModel.__name__}"):
        if args.pretrained_model_name_or_path:
            folder = fetch_model(source, args.cache_dir, ("unet",))
            unet = load_weights(UNet2DModel, folder, subfolder="unet")
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
    channels = unet.config.in_channels
    multiple = 2 ** (len(unet.config.block_out_channels) - 1)  # a level halves the side
    fits = channels in (1, 3) or is_array(args.train_data_dir)
    if not fits or unet.config.out_channels != channels:
        fail(
            f"the U-Net of {source} has {channels} input and {unet.config.out_channels} output "
            "channels; images have 1 or 3"
        )
    if args.resolution % multiple:
        fail(
            f"--resolution {args.resolution} is not a multiple of {multiple}, which this U-Net "
            "needs"
        )
    # The conditions that `prepare_batch` returns, for one image.
    condition: dict[str, torch.Tensor] = {}
    shape = [channels, args.resolution, args.resolution]
    check_shapes({"unet": unet}, predict_noise, f"the U-Net of {source}", shape, condition)
    return unet


# -------------------------------------------------------------------------------------------------
# the loss


def prepare_batch(batch: ImageBatch) -> Prepared:
    """Turn a loaded batch into images in [-1, 1], condition, and inputs of the loss.

    The condition holds the U-Net's other inputs, such as class labels.
    """
    images = batch["pixel_values"]
    images = images * 2 - 1 if images.is_floating_point() else images / 127.5 - 1
    condition: dict[str, torch.Tensor] = {}
    loss_inputs: dict[str, torch.Tensor] = {}
    return Prepared(images, condition, loss_inputs)


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
    num_timesteps = noise_scheduler.config.num_train_timesteps
    timesteps = torch.randint(num_timesteps, (len(images),), device=images.device)
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
    for micro_batch in range(next_step.micro_batches):
        batch = next(batches)
        # A resumed run draws the same random numbers, because the seed is computed from the step.
        process = accelerator.process_index
        key = step_seed("step", seed, next_step.number, micro_batch, process)
        seed_generators(key, accelerator.device)
        prepared = objective.prepare(batch)
        if on_batch:
            on_batch(prepared, batch["weight"])
        with contextlib.ExitStack() as stack:
            # DDP averages the gradients only in the step's last micro-batch.
            if micro_batch < next_step.micro_batches - 1:
                for model in models.values():
                    stack.enter_context(accelerator.no_sync(model))
            weighted_loss = objective.loss(models, prepared, batch["weight"])
            accelerator.backward(weighted_loss)  # it does not divide: `weight` includes that
        total_loss += weighted_loss.detach()
        total_weight += batch["weight"].sum()
    trained = [weight for group in optimizer.param_groups for weight in group["params"]]
    grad_norm = accelerator.clip_grad_norm_(trained, max_grad_norm or math.inf)
    optimizer.step()
    optimizer.zero_grad()  # sets them to None, which frees memory for the next forward pass
    # Not .item(), which would wait for the device: `log` reads the sums of many steps at once.
    return {"loss": total_loss, "weight": total_weight, "grad_norm": grad_norm}


# -------------------------------------------------------------------------------------------------
# the output


@torch.no_grad()
def draw_images(
    launch: Launch,
    pipeline: DiffusionPipeline,
    purpose: str,
    numbers: Sequence[int],
    stop_signal: StopSignal,
    args: Namespace,
) -> torch.Tensor:
    """Draw an image for each number, [N, C, H, W] from 0 to 1; none after a signal to stop.

    The images equal the pipeline's. Its loop is written out here, so that you can pass further
    inputs to the U-Net, such as class labels. Each number has its own seed for each purpose,
    "sample" or "metric", so the number of processes does not matter.
    """
    unet = pipeline.unet
    scheduler = pipeline.scheduler
    device = launch.device
    if not numbers:
        return torch.zeros(0)
    training = unet.training
    unet.eval()  # without dropout
    generators = [
        torch.Generator(device).manual_seed(step_seed(purpose, args.seed, number))
        for number in numbers
    ]
    side = unet.config.sample_size
    shape = (unet.config.in_channels, side, side)
    noise = [torch.randn(shape, generator=generator, device=device) for generator in generators]
    images = torch.stack(noise)
    scheduler.set_timesteps(args.ddpm_num_inference_steps)
    hides_bar = None if launch.is_main else True  # None: where there is no terminal
    for timestep in tqdm(scheduler.timesteps, "Sampling", leave=False, disable=hides_bar):
        if stop_signal.received:
            break
        prediction = unet(images, timestep).sample
        images = scheduler.step(prediction, timestep, images, generator=generators).prev_sample
    unet.train(training)
    return images[:0] if stop_signal.received else (images / 2 + 0.5).clamp(0, 1).cpu()


def log_validation(
    launch: Launch,
    pipeline: DiffusionPipeline,
    step: int,
    stop_signal: StopSignal,
    writer: Writer,
    args: Namespace,
) -> None:
    """Draw --eval_batch_size images into samples/step-N.png and the trackers.

    Each process draws a share. After a signal to stop, a resumed run draws the samples.
    """
    count = args.eval_batch_size
    numbers = range(launch.rank, count, launch.num_processes)
    drawn = draw_images(launch, pipeline, "sample", numbers, stop_signal, args)
    pairs = gather_object([*zip(numbers, drawn, strict=False)])
    if not launch.is_main or len(pairs) < count:
        return
    pairs.sort(key=lambda pair: pair[0])
    images = torch.stack([image for _, image in pairs])
    # if images are neither grey nor RGB (arrays), each channel is shown by itself
    shown = images if images.shape[1] in (1, 3) else images.flatten(0, 1)[:, None]
    grid = make_grid(shown, nrow=math.ceil(math.sqrt(len(shown))), padding=1, pad_value=0.5)
    picture = Image.fromarray((grid * 255).round().byte().permute(1, 2, 0).numpy())
    scale = max(1, 512 // picture.width)  # to show digits of 8 px
    picture = picture.resize((picture.width * scale, picture.height * scale), Image.NEAREST)
    write = partial(save_samples, launch.accelerator, picture, args.output_dir, step)
    writer.begin("samples", write)  # in its thread: a PNG takes time, and the training goes on


def draw_rows(
    launch: Launch,
    pipeline: DiffusionPipeline,
    stop_signal: StopSignal,
    args: Namespace,
    rows: Sequence[int],
) -> dict[int, np.ndarray]:
    """Draw as many samples as there are `rows`, for --validation_metrics.

    Returns the share of this process, {index: image [H, W, C] from 0 to 1}; fewer after a signal.
    """
    own = launch.share(len(rows))
    drawn: dict[int, np.ndarray] = {}
    for start in range(0, len(own), args.eval_batch_size):
        numbers = own[start : start + args.eval_batch_size]
        images = draw_images(launch, pipeline, "metric", numbers, stop_signal, args)
        drawn |= zip(numbers, images.permute(0, 2, 3, 1).numpy(), strict=False)
    return drawn


def read_pixels(batch: ImageBatch) -> torch.Tensor:
    """The images of a loaded batch, uint8 [N, C, H, W]."""
    pixels = batch["pixel_values"]
    return (pixels * 255).round().byte() if pixels.is_floating_point() else pixels


def describe_model(about: About, args: Namespace) -> Description:
    """Return the texts of the model card and the report, with example code."""
    what = (
        f"An unconditional diffusion model, trained on `{about.data}` for {about.step} steps. "
        f"Samples are drawn in {amount(args.ddpm_num_inference_steps, 'step')} of "
        f"{args.validation_scheduler.upper()}."
    )
    call = f"num_inference_steps={args.ddpm_num_inference_steps}"
    if is_array(args.train_data_dir):
        call += ', output_type="np"'
    usage = write_usage(about.name, call, side=args.resolution)
    tags = ["unconditional-image-generation", "diffusion-models-class"]
    return Description(tags, what, usage, args.pretrained_model_name_or_path)


# -------------------------------------------------------------------------------------------------
# the run


@in_one_sentence
def main(args: Namespace) -> None:
    """Train.

    Exit status: 130 after Ctrl-C, 143 after SIGTERM, 1 after an error, printed in one line.
    """
    # Devices, processes and precision, as the flags and `accelerate launch` say.
    with explained("the launched processes can't be set up"):
        accelerator = Accelerator(**accelerator_options(args))
    launch = make_launch(accelerator, args)
    run = open_run(launch, __file__, args)  # the output folder, locked, and its checkpoint

    # The model comes before the data: its channels decide whether images are grey or in colour.
    noise_scheduler = make_noise_scheduler(args)
    torch.manual_seed(args.seed)  # every process starts from the same weights
    unet = make_unet(args)
    # Each of these is trained, averaged and saved in checkpoints. The pipeline has the U-Net only.
    models: Models = {"unet": unet}
    frozen: Models = {}  # only for the loss: on the device, under autocast, never saved
    objective = Objective(
        prepare=prepare_batch,
        predict=predict_noise,
        compute_loss=partial(compute_loss, args, noise_scheduler),
        # the held-out loss, which a change of the loss leaves alone, so that runs can be compared
        held_out_loss=held_out_epsilon_loss(noise_scheduler, predict_noise),
        prepare_held_out=prepare_batch,
        frozen=freeze_on_device(frozen, accelerator),
    )

    # The data.
    channels = unet.config.in_channels
    images = load_images(args, args.streaming, channels=channels)
    num_left_out = 0
    if args.cache_images:
        from diffusion_training.data.image_cache import cache_images  # here: few runs need it

        workers = min(8, launch.cores)
        rows, num_left_out = cache_images(images.rows, images.column, channels, workers, args)
        images = images._replace(rows=rows)
    num_workers = launch.choose_workers(args.dataloader_num_workers)
    dataset = ImageDataset(images, channels, num_left_out, args)
    train_rows, held_out = hold_out(accelerator, dataset, args.holdout, args.seed)
    order = Order(train_rows, args.seed)

    # Batch size, learning rate and number of steps. --train_batch_size auto tries whole steps.
    plan = plan_run(launch, run, models, objective, train_step, dataset, train_rows, order, args)
    if plan.is_done:  # the checkpoint is beyond --max_train_steps, which has been printed
        return
    # From here on, `args` has the values that were found.
    args = complete_args(args, launch, run, plan, dataloader_num_workers=num_workers)
    # the networks of --validation_metrics; None without it
    metrics = open_metrics(launch, dataset, train_rows, held_out, args)

    # What the steps change: weights, their averages, optimizer, learning rate and position. The
    # models are put on the device, and averaged with --use_ema.
    check_free_space(launch, models, args)
    averages = place_models(launch, models, args)
    optimizer = make_optimizer(models, args)
    progress = plan.progress
    # All that a checkpoint holds. A resumed run gets it back here.
    state = TrainState(
        models=models, averages=averages, optimizer=optimizer, progress=progress,
        settings=describe_settings(launch, progress, dataset, held_out, args),
    )  # fmt: skip
    state.load(accelerator, run, plan.saved_state, args)
    lr_scheduler = make_lr_scheduler(optimizer, progress.global_step, args)
    # prints the memory that is needed
    costs = Costs(launch, models, averages.models(), objective, args.optimizer, args.allow_tf32)
    if launch.is_main:
        objective = costs.count_first(objective)  # the operations of the first step, for records
    if launch.compile:
        compile_model(unet, launch.compile)
    # Accelerate wraps the models (DDP on several processes, autocast) and the optimizer (the scaler
    # of fp16).
    wrap = partial(accelerator.prepare_model, device_placement=False)
    wrapped = {name: wrap(model) for name, model in models.items()}
    optimizer = accelerator.prepare(optimizer)

    # Batches are loaded ahead across epochs, so the device never waits for an epoch to begin.
    keys = step_batches(order, progress, launch.rank, launch.num_processes)
    loaded = load_batches(dataset, keys, num_workers, launch.device, args.prefetch_factor)
    if args.find_lr:  # the run ends here, and its weights are not kept
        result = find_learning_rate(
            accelerator, objective, train_step, wrapped, optimizer, loaded, progress, args
        )
        end_run(launch, run, result, [], args)
        return
    # Records and trackers start. From now on, a signal waits for the end of a step.
    records = Records(
        accelerator, run, progress, models, objective, costs, dataset.num_left_out, args
    )
    stop_signal = StopSignal(launch.num_processes, launch.shard, run.writer)
    stop_signal.agree()  # one may have come before
    saver = Saver(launch, run, state, records, stop_signal, args)
    batches = records.watch(loaded)

    # This pipeline draws the samples and is saved. It has the average of the U-Net with --use_ema,
    # else the U-Net itself. DDIMPipeline converts the scheduler.
    pipeline_class = DDIMPipeline if args.validation_scheduler == "ddim" else DDPMPipeline
    pipeline = pipeline_class(averages.get_model("unet"), noise_scheduler)

    def write_result(result: Models, folder: Path) -> None:
        """Write the pipeline, which holds `result` already. On the first process only."""
        save_pipeline(pipeline, folder)

    results = Results(
        name="pipeline", files=["unet/*", "scheduler/*"], write_result=write_result,
        describe=describe_model, launch=launch, run=run, state=state, records=records,
        stop_signal=stop_signal, objective=objective, dataset=dataset, held_out=held_out,
        metrics=metrics, args=args,
    )  # fmt: skip

    def show() -> None:
        """Held-out loss, samples and report. Each process measures and draws a share."""
        results.measure_held_out()
        results.keep_best()  # --save_best
        with records.timed("samples_seconds"):  # in the next record
            log_validation(launch, pipeline, progress.global_step, stop_signal, run.writer, args)
        results.report()

    def score() -> None:
        """Measure --validation_metrics on samples of the averaged weights, on all processes."""
        with records.timed("metrics_seconds"):
            draw_share = partial(draw_rows, launch, pipeline, stop_signal, args)
            results.score([draw_share], read_pixels)
        results.keep_best()  # --save_best_metric
        results.report()

    def goes_on() -> bool:
        """Whether steps are left, and nothing has stopped the run on any process."""
        return progress.global_step < args.max_train_steps and not stop_signal.was_stopped

    # Before step 1, a pretrained model is shown as it is. A resumed run shows what was due at its
    # checkpoint, if a kill has prevented that.
    is_pretrained = args.pretrained_model_name_or_path is not None
    shows_first = run.checkpoint is None and is_pretrained and args.validate_first
    samples_are_due = progress.is_due(args.validation_steps, args.save_images_epochs)
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
        next_step = progress.next_step()
        sums = train_step(
            accelerator, objective, wrapped, optimizer, batches, next_step, args.seed,
            args.max_grad_norm, records.measure_inputs,
        )  # fmt: skip
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
        if progress.is_due(None, args.save_model_epochs) and goes_on():
            results.write()
        if metrics and progress.is_due(metrics.every) and goes_on():
            score()
        if goes_on() and (
            progress.is_due(args.validation_steps, args.save_images_epochs)
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
