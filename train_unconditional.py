"""Train an unconditional diffusion model: images -> a diffusers DDPM or DDIM pipeline.

    accelerate launch train_unconditional.py     # the demo: handwritten digits, some minutes on a CPU
    accelerate launch --config_file accelerate_configs/multi_gpu.yaml train_unconditional.py \\
        --train_data_dir photos --resolution 64 --random_flip --output_dir ddpm-photos

Reads a hub data set, or a local folder of anything that `datasets.load_dataset` opens (images, parquet, webdataset).
Writes into --output_dir: the pipeline with its model card, samples/, metrics.jsonl, loss.png, report.html, logs,
run.args (this command again: @ddpm-photos/run.args), and every --checkpointing_steps a checkpoint-N that the same
command with --resume_from_checkpoint latest goes on from.

What stands where:
    parse_args                       the flags, one a line; bad values end here, before anything is loaded or written
    ImageDataset                     keys -> a batch; crops and flips follow from the key, so resuming repeats them
    make_unet, make_noise_scheduler  the model, and how its images are noised
    prepare_batch, compute_loss      a batch -> what the U-Net is given, and the loss
    train_step                       one optimizer step, with what Accelerate does in the open
    log_validation, describe_model   what people look at
    main                             the run in phases, the training loop among them
What every trainer needs besides is in diffusion_training/. To have all of it in one file of your own:
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

check_version("0.1.0", Path(__file__).name)  # before more of it is imported, which may not be there

from diffusion_training.arguments import COUNT, PATH, SWITCH, check_source, make_parser, number, parse_demo
from diffusion_training.data.image_cache import cache_images
from diffusion_training.data.images import decode_image, name_image, shrink
from diffusion_training.data.rows import RowDataset, Rows, load_rows, read_items
from diffusion_training.data.streams import add_stream_flags
from diffusion_training.errors import explain, explained, fail, in_one_sentence, is_machines_fault
from diffusion_training.loading import load_batches
from diffusion_training.order import Order, draw_choices, step_batches, step_seed
from diffusion_training.report import Description, save_model_card, save_report
from diffusion_training.training.checkpoints import load_checkpoint, prune_checkpoints, read_state, save_checkpoint
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
from diffusion_training.training.objective import check_objective, measure_epsilon, min_snr_weight, objective_flags
from diffusion_training.training.optimizers import make_lr_scheduler, make_optimizer
from diffusion_training.training.output import keep_best, open_output_dir, samples_path, save_pipeline, save_samples
from diffusion_training.training.progress import Progress
from diffusion_training.training.records import Records
from diffusion_training.training.tuning import choose_batch_size, find_learning_rate, plan_steps, scale_learning_rate

HERE = shlex.quote(os.path.relpath(Path(__file__).parent))
# The command line that stands for no data at all; flags that are given come after it, and win.
DEMO = f"""
    --train_data_dir {HERE}/demo/digits
    --model_config_name_or_path {HERE}/demo/digits_unet.json
    --output_dir ddpm-digits --resolution 8 --train_batch_size 64 --num_train_epochs 100
    --learning_rate 4e-3 --lr_warmup_steps 100 --prediction_type v_prediction
    --ddpm_beta_schedule squaredcos_cap_v2 --snr_gamma 5 --validation_scheduler ddim
    --ddpm_num_inference_steps 50 --eval_batch_size 64 --dataloader_num_workers 0
    --checkpointing_steps 10000 --resume_from_checkpoint latest
"""

# ------------------------------------------------------------------------------------------------- the flags


def parse_args(argv: list[str] | None = None) -> Namespace:
    """Parse and check the command line: a bad argument ends with one line and status 2 before anything is loaded."""
    parser = make_parser(__file__, __doc__)

    add = parser.add_argument_group("data").add_argument
    add_source_flags(add)
    add_stream_flags(add)
    add("--cache_images", **SWITCH, help="decode and resize once, into --output_dir")
    add("--resolution", type=number(2, 16384, int), default=64, help="side of the square images, pixels")
    add("--center_crop", **SWITCH, help="crop the centre, not a random square")
    add("--random_flip", **SWITCH, help="mirrored images as well")
    add("--min_size", type=number(0, 16384, int), default=0, help="skip images with a shorter side, pixels")
    add("--holdout", type=number(0, 10**9), default=0.0, help="share or number of images for the held-out loss")
    add("--preserve_input_precision", **SWITCH, help="keep 16 and 32 bit grey images in float32")
    add("--dataloader_num_workers", type=number(0, 1024, int), help="processes that decode (None: by the cores)")
    add("--prefetch_factor", type=COUNT, help="batches that each of these reads ahead (None: 2)")

    add = parser.add_argument_group("model").add_argument
    add("--model_config_name_or_path", type=PATH, help="U-Net config: hub id, folder or JSON file")
    add("--pretrained_model_name_or_path", type=PATH, help="hub id or folder of a pipeline")
    add_device_flags(add)

    add = parser.add_argument_group("objective").add_argument
    add("--prediction_type", choices=["epsilon", "sample", "v_prediction"], help="(None: epsilon, or the pretrained)")
    add("--ddpm_num_steps", type=number(2, 10**5, int), help="training timesteps (None: 1000, or the pretrained)")
    add("--ddpm_beta_schedule", choices=["linear", "scaled_linear", "squaredcos_cap_v2"], help="(None: linear)")
    add("--rescale_betas_zero_snr", **SWITCH, help="last timestep is pure noise (arXiv:2305.08891)")
    add("--snr_gamma", type=number(1e-3, 1e6), help="min-SNR loss weight, 5.0 is usual (arXiv:2303.09556)")
    add("--noise_offset", type=number(0, 10), default=0.0, help="for darker and lighter images, 0.1 is usual")
    add("--input_perturbation", type=number(0, 10), default=0.0, help="noise beyond the target's, 0.1 is usual")

    add_optimization_flags(parser, lr_scheduler="cosine", adam_beta1=0.95, adam_weight_decay=1e-6)

    add = parser.add_argument_group("logging and samples").add_argument
    add_logging_flags(add, tracker_project_name="train_unconditional")
    add("--validation_steps", type=COUNT, help="steps between samples and held-out losses; overrides the epochs")
    add("--save_images_epochs", type=COUNT, default=10, help="epochs between samples")
    add("--eval_batch_size", type=number(1, 10**4, int), default=16, help="images to sample, over all processes")
    add("--validation_scheduler", choices=["ddpm", "ddim"], default="ddpm", help="sampler, saved with the pipeline")
    add("--ddpm_num_inference_steps", type=COUNT, default=1000, help="sampling steps")

    add = parser.add_argument_group("saving").add_argument
    add("--output_dir", type=PATH, default="ddpm-model-64", help="everything is written here")
    add("--save_model_epochs", type=COUNT, default=10, help="epochs between saves of the pipeline")
    add_saving_flags(add)

    args = parser.parse_args(argv)
    go_on = args.pretrained_model_name_or_path is not None
    if args.dataset_name is None and args.train_data_dir is None:
        demo = [line for line in DEMO.splitlines() if not (go_on and "--model_config_name_or_path" in line)]
        args = parse_demo(parser, "\n".join(demo), argv)

    check_source(parser, args)
    if args.model_config_name_or_path and go_on:
        parser.error("--model_config_name_or_path and --pretrained_model_name_or_path exclude each other")
    if args.cache_images and (args.streaming or args.preserve_input_precision):
        parser.error("--cache_images stores 8 bits of all images: it goes with neither stream nor preserved precision")
    check_training_args(parser, args)
    return args


# ------------------------------------------------------------------------------------------------- the data


class ImageDataset(RowDataset):
    """Turns the keys (epoch, row, weight) of `step_batches` into a batch: `dataset[keys]`.

    {"pixel_values": [N, C, resolution, resolution], "weight": [N], "skipped": [(name, reason)]}, pixels from 0 to 255
    in uint8, with --preserve_input_precision in float32. What can't be decoded is black and has weight 0.
    """

    def __init__(self, rows: Rows, column: str, channels: int, args: Namespace) -> None:
        super().__init__(rows, column, args)
        self.channels, self.dtype = channels, torch.float32 if args.preserve_input_precision else torch.uint8

    def __getitem__(self, keys: list[tuple]) -> dict[str, Any]:
        items = read_items(self.rows, keys)
        pixel_values = torch.zeros(len(keys), self.channels, *[self.args.resolution] * 2, dtype=self.dtype)
        weight, skipped = torch.tensor([key[2] for key in keys]), []  # a weight of 0 takes an image out of the mean
        for i, (key, item) in enumerate(zip(keys, items, strict=True)):
            try:
                pixel_values[i] = self.load(key[0], key[1], item)
            except Exception as error:  # whatever a file does to its decoder: one image is no reason to end a run
                if is_machines_fault(error):  # but then it would go on, on nothing
                    raise
                weight[i] = 0.0
                skipped.append((name_image(key[1], item[self.column]), explain(error)))
        return {"pixel_values": pixel_values, "weight": weight, "skipped": skipped}

    def load(self, epoch: int | None, row: int, item: dict) -> torch.Tensor:
        """One image [C, resolution, resolution], cropped and mirrored as its key says."""
        y, x, flip, _ = draw_choices(self.args.seed, epoch, row)
        image = decode_image(item[self.column], self.channels, self.args.preserve_input_precision, self.args.min_size)
        image = shrink(image, self.args.resolution, (0.5, 0.5) if self.args.center_crop else (y, x))
        return image.flip(-1) if self.args.random_flip and flip < 0.5 else image


# ------------------------------------------------------------------------------------------------- the model


def make_unet(args: Namespace) -> UNet2DModel:
    """The U-Net to train: a trained pipeline's, a config's, or the one of diffusers' script (114 million weights)."""
    source = args.pretrained_model_name_or_path or args.model_config_name_or_path
    with explained(f"{source} holds no UNet2DModel"):
        if args.pretrained_model_name_or_path:
            unet = load_weights(UNet2DModel, source, subfolder="unet", cache_dir=args.cache_dir)
            unet.register_to_config(sample_size=args.resolution)  # what the pipeline will draw
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
    channels, multiple = unet.config.in_channels, 2 ** (len(unet.config.block_out_channels) - 1)  # levels halve
    if channels not in (1, 3) or unet.config.out_channels != channels:
        fail(f"{source} takes {channels} and gives {unet.config.out_channels} channels; images have 1 or 3")
    if args.resolution % multiple:
        fail(f"--resolution {args.resolution} is not a multiple of {multiple}, which this U-Net needs")
    condition: dict[str, tuple] = {}  # shapes of what `prepare_batch` gives of an image besides, () of a label
    try_shapes(unet, source, [channels, args.resolution, args.resolution], **condition)
    return unet


def make_noise_scheduler(args: Namespace) -> DDPMScheduler:
    """The scheduler that noises in training: the flags that are given, over what the pretrained pipeline says."""
    flags = {"num_train_timesteps": args.ddpm_num_steps, "beta_schedule": args.ddpm_beta_schedule}
    flags = {key: value for key, value in flags.items() if value is not None} | objective_flags(args)
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
        fail(f"--ddpm_num_inference_steps {args.ddpm_num_inference_steps} exceeds the {timesteps} training timesteps")
    return scheduler


# ------------------------------------------------------------------------------------------------- the loss


def prepare_batch(batch: dict) -> Prepared:
    """A batch as loaded -> (images float32 [N, C, H, W] in [-1, 1], condition: what the U-Net is given besides,
    loss_inputs: what the loss alone needs). Both are {name: tensor [N, ...]}."""
    images, condition, loss_inputs = batch["pixel_values"], {}, {}
    images = images * 2 - 1 if images.is_floating_point() else images / 127.5 - 1
    return images, condition, loss_inputs


def compute_loss(
    models: Models, noise_scheduler: DDPMScheduler, images: torch.Tensor, condition: dict[str, torch.Tensor],
    loss_inputs: dict[str, torch.Tensor], weight: torch.Tensor, args: Namespace,
) -> torch.Tensor:  # fmt: skip
    """The denoising loss of DDPM (arXiv:2006.11239, eq. 14): the sum over images of weight * mean squared error.

    models: {"unet": ...}, what is trained. images, or their latents: [N, C, H, W] float32 of about unit size.
    condition, loss_inputs: of `prepare_batch`. weight: [N]; it adds up to 1 over a step's micro-batches, averaged over
    the processes, and is 0 for a placeholder: so return (weight * loss per image).sum(), whatever the loss.
    """
    noise = torch.randn(images.shape, device=images.device)  # by shape: `like` would draw in the order of the memory
    if args.noise_offset:  # the same all over a channel (crosslabs.org/blog/diffusion-with-offset-noise)
        noise = noise + args.noise_offset * torch.randn(*images.shape[:2], 1, 1, device=images.device)
    perturbed = noise
    if args.input_perturbation:  # more noise in the input than the target tells of (arXiv:2301.11706)
        perturbed = noise + args.input_perturbation * torch.randn(noise.shape, device=noise.device)
    timesteps = torch.randint(noise_scheduler.config.num_train_timesteps, (len(images),), device=images.device)
    # In float32 under any precision: in bfloat16 the first timesteps would get no noise at all.
    noisy_images = noise_scheduler.add_noise(images, perturbed, timesteps)
    prediction = call_unet(models["unet"], noisy_images, timesteps, condition)
    if noise_scheduler.config.prediction_type == "epsilon":
        target = noise
    elif noise_scheduler.config.prediction_type == "sample":
        target = images
    else:
        target = noise_scheduler.get_velocity(images, noise, timesteps)
    error = F.mse_loss(prediction, target, reduction="none")
    error = error * loss_inputs.get("mask", 1)  # in [0, 1], of each pixel
    loss = error.mean(dim=(1, 2, 3))  # of each image
    if args.snr_gamma is not None:
        weight = min_snr_weight(weight, noise_scheduler, timesteps, args.snr_gamma)
    return (weight * loss).sum()


def train_step(
    accelerator: Accelerator, noise_scheduler: DDPMScheduler, args: Namespace, prepare: Callable[[dict], Prepared],
    models: Models, optimizer: torch.optim.Optimizer, batches: Iterator[dict], micro_batches: int, data_step: int,
) -> torch.Tensor:  # fmt: skip
    """One optimizer step on the next `micro_batches` of `batches`; `prepare` is `prepare_batch`.

    Returns [sum of weight * loss, sum of weight, norm of the gradient] on the device, of this process; after it,
    accelerator.optimizer_step_was_skipped tells of an fp16 overflow. Nothing here waits for the device.
    """
    sums = torch.zeros(2, device=accelerator.device)
    for micro_batch in range(micro_batches):
        batch = next(batches)
        # What is drawn depends on the step alone, not on what was drawn before: a resumed run draws the same.
        torch.manual_seed(step_seed("step", args.seed, data_step, micro_batch, accelerator.process_index))
        images, condition, loss_inputs = prepare(batch)
        with contextlib.ExitStack() as stack:
            if micro_batch < micro_batches - 1:  # the processes' gradients are averaged once a step, in its last
                for model in models.values():
                    stack.enter_context(accelerator.no_sync(model))
            loss = compute_loss(models, noise_scheduler, images, condition, loss_inputs, batch["weight"], args)
            accelerator.backward(loss)
        sums += torch.stack([loss.detach(), batch["weight"].sum()])
    grad_norm = accelerator.clip_grad_norm_(list_parameters(models), args.max_grad_norm or math.inf)
    optimizer.step()
    optimizer.zero_grad()  # to None: the memory is free for the next forward pass
    return torch.cat([sums, grad_norm[None]])  # one tensor, read later: an .item() here would wait


# ------------------------------------------------------------------------------------------------- the output


@torch.no_grad()
def log_validation(
    accelerator: Accelerator, pipeline: DiffusionPipeline, step: int, stop_signal: StopSignal, args: Namespace
) -> torch.Tensor | None:
    """Draw --eval_batch_size images, a share on each process, into samples/step-N.png and the trackers; returns them.

    What is drawn is what the pipeline draws, here with its loop in the open: a U-Net that is given more than noise and
    timestep (class labels, say) is given it here. Image i starts from its own seed, however many processes there are.
    A signal breaks off: who sends it does not wait for pictures, and a run that is resumed draws what is missing.
    """
    unet, scheduler, device = pipeline.unet, pipeline.scheduler, accelerator.device
    training, size = unet.training, unet.config.sample_size
    unet.eval()  # without dropout
    mine, images = range(accelerator.process_index, args.eval_batch_size, accelerator.num_processes), []
    if mine:
        generators = [torch.Generator(device).manual_seed(step_seed("sample", args.seed, i)) for i in mine]
        shape = (unet.config.in_channels, size, size)
        images = torch.stack([torch.randn(shape, generator=generator, device=device) for generator in generators])
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
        scale = max(1, 512 // grid.width)  # so that digits of 8 px can be looked at
        grid = grid.resize((grid.width * scale, grid.height * scale), Image.NEAREST)
        save_samples(accelerator, grid, args.output_dir, step)
        return images
    return None


def describe_model(step: int, loss: float | None, args: Namespace) -> Description:
    """For card and report: (the hub's tags, what was trained on what, how to use it)."""
    name = args.hub_model_id or Path(args.output_dir).resolve().name
    data = Path(args.dataset_name or args.train_data_dir).name
    what = f"An unconditional diffusion model, trained on `{data}` for {step} steps"
    what += f", to a loss of {loss:.4g}." if loss else "."
    usage = f"""from diffusers import DiffusionPipeline

pipeline = DiffusionPipeline.from_pretrained("{name}")
image = pipeline(num_inference_steps={args.ddpm_num_inference_steps}).images[0]"""
    return ["unconditional-image-generation", "diffusion-models-class"], what, usage


# ------------------------------------------------------------------------------------------------- the run


@in_one_sentence
def main(args: Namespace) -> None:
    """Train; ends with status 130 or 143 after Ctrl-C or SIGTERM, and with 1 and a sentence if it can't go on."""
    # The launch first: it says which device, which process of how many, and in which precision all else happens.
    accelerator, cores = make_accelerator(args)
    device, rank, num_processes = accelerator.device, accelerator.process_index, accelerator.num_processes
    lock, checkpoint = open_output_dir(accelerator, __file__, args)  # to the end, so that no second run writes here

    # The model before the data, because its channels say whether images are decoded to grey or to colour.
    noise_scheduler = make_noise_scheduler(args)
    torch.manual_seed(args.seed)  # every process starts from the same weights
    unet = make_unet(args)
    models = {"unet": unet}  # what is trained, averaged and saved, each in a folder of its name

    # The data. A core per process stays free for the trainer.
    rows, column = load_rows(args, args.streaming)
    channels, num_left_out = unet.config.in_channels, 0
    if args.cache_images:
        rows, num_left_out = cache_images(rows, column, channels, min(8, cores), args)
    if args.dataloader_num_workers is None:
        args.dataloader_num_workers = min(8, cores - 1)
    dataset = ImageDataset(rows, column, channels, args)
    train_rows, held_out = hold_out(accelerator, dataset, args.holdout, args.seed)
    num_images = len(train_rows)

    # Where the run is. What sets a step's size comes before, because a checkpoint's position is counted in images.
    take_step = partial(train_step, accelerator, noise_scheduler, args, prepare_batch)
    state = read_state(checkpoint, num_images)
    choose_batch_size(accelerator, models, take_step, dataset, train_rows, state["settings"], args)
    progress = Progress(state, num_images, args.train_batch_size * num_processes, args.gradient_accumulation_steps)
    scale_learning_rate(accelerator, progress.images_per_step, args)
    if not plan_steps(accelerator, progress, args):
        return
    settings = {**vars(args), "num_processes": num_processes, "num_images": num_images, "data": dataset.fingerprint}
    settings["held_out"] = digest_held_out(accelerator, dataset, held_out)

    # Weights, averaged weights and optimizer, all in float32: autocast lowers the precision of what is computed only.
    for model in models.values():
        put_on_device(model, device)
    averaged = start_average(models) if args.use_ema else {}
    saved = models | {f"{name}_ema": model for name, model in averaged.items()}
    if args.gradient_checkpointing:
        unet.enable_gradient_checkpointing()
    optimizer = make_optimizer(models, accelerator.scaler, args)
    if checkpoint:  # before `prepare`, which wraps what is loaded here
        load_checkpoint(accelerator, checkpoint, saved, optimizer, state, settings)
    lr_scheduler = make_lr_scheduler(optimizer, progress.global_step, args)
    costs = Costs(accelerator, models, averaged, call_unet, args)
    if args.compile:
        compile_model(unet, args.compile)
    *prepared, optimizer = accelerator.prepare(*models.values(), optimizer)
    prepared = dict(zip(models, prepared, strict=True))  # what is called; `models` are what is saved and averaged
    for model in averaged.values():
        accelerator.prepare_model(model, evaluation_mode=True)  # autocast as in training
    # What is drawn from, and saved in the end; a DDIMPipeline makes the scheduler its own.
    kind = DDIMPipeline if args.validation_scheduler == "ddim" else DDPMPipeline
    pipeline = kind(averaged.get("unet", unet), noise_scheduler)

    # Batches come without end, across epochs, so the device never waits for one to begin.
    keys = step_batches(Order(train_rows, args.seed), progress, rank, num_processes)
    loaded = load_batches(dataset, keys, args.dataloader_num_workers, device, args.prefetch_factor)
    if args.find_lr:  # and end: nothing that it trains is kept
        found = find_learning_rate(accelerator, prepared, optimizer, take_step, loaded, progress, args)
        return end_run(accelerator, lock, found, [], args)
    records = Records(accelerator, progress.global_step, num_left_out, checkpoint, args, costs=costs)
    batches, stop_signal = records.watch(loaded), StopSignal(num_processes)
    take_step = partial(train_step, accelerator, noise_scheduler, args, records.look(prepare_batch))
    stop = stop_signal.agree()  # what came until here, and was swallowed somewhere
    measured = {name.replace("unet", "held_out_loss"): saved[name] for name in ("unet", "unet_ema") if name in saved}

    def show() -> int:
        """Held-out loss, samples and report. Returns the signal that has broken them off, 0 for none."""
        log_held_out_loss(
            accelerator, records, dataset, held_out, measured, measure_epsilon(noise_scheduler), prepare_batch,
            stop_signal, progress.global_step,
        )  # fmt: skip
        keep_best(accelerator, records.held_out, progress.global_step, partial(save_pipeline, pipeline), args)
        samples = log_validation(accelerator, pipeline, progress.global_step, stop_signal, args)
        records.judge(samples, progress.global_step)
        if accelerator.is_main_process:
            save_report(progress.global_step, __file__, describe_model, args)
        return stop_signal.agree()

    samples_every = args.validation_steps, args.save_images_epochs
    shown = samples_path(args.output_dir, progress.global_step).exists()
    if checkpoint and progress.is_due(*samples_every) and not shown and not stop:
        stop = show()  # a kill came between the two; broken off, before a step leads past it

    for model in models.values():
        model.train()
    while progress.global_step < args.max_train_steps and not stop:
        epoch, (step_images, micro_batches) = progress.epoch, progress.next_step()
        sums = take_step(prepared, optimizer, batches, micro_batches, progress.data_step)
        progress.advance(step_images, stepped=not accelerator.optimizer_step_was_skipped)
        if progress.stepped:  # else fp16 overflowed: the scaler lowers its scale, the weights are as before
            if args.use_ema:
                update_ema(averaged, models, progress.global_step, args)
            records.add(sums, step_images, epoch, lr_scheduler.get_last_lr()[0])
            lr_scheduler.step()

        # What is due.
        stop, last = stop_signal.agree(), progress.global_step == args.max_train_steps
        log_due = progress.is_due(args.logging_steps) or (progress.stepped and last)
        checkpoint_due = stop or last or progress.is_due(args.checkpointing_steps)
        pipeline_due = progress.is_due(None, args.save_model_epochs)
        if log_due or checkpoint_due or pipeline_due:  # the only place where the host waits for the device
            records.update(progress.global_step, log_due, last)
        with records.paused():
            if checkpoint_due:  # before the samples, which may take longer than a preempted job has left
                save_checkpoint(accelerator, saved, optimizer, progress.state() | {"settings": settings}, args)
            if pipeline_due and not last and not stop and accelerator.is_main_process:
                save_pipeline(pipeline, args.output_dir)
            if progress.is_due(*samples_every) and not last and not stop:
                stop = show()
                if stop and not checkpoint_due:  # broken off; who resumes here draws them
                    records.update(progress.global_step, False, last)
                    save_checkpoint(accelerator, saved, optimizer, progress.state() | {"settings": settings}, args)

    loaded.close()  # and with it the thread and the loader's processes
    records.bar.close()
    if not stop:
        if accelerator.is_main_process:  # before the samples, again because of the time that they take
            save_pipeline(pipeline, args.output_dir)
        stop = show()
    stop_signal.close()
    if stop:
        end_stopped(accelerator, stop, progress.global_step, args.max_train_steps)
    if accelerator.is_main_process:
        prune_checkpoints(Path(args.output_dir) / f"checkpoint-{progress.global_step}", args)  # if a kill came before
        save_model_card(progress.global_step, describe_model, args)
    done = f"Done: pipeline, samples/ and report.html are in {args.output_dir}"
    end_run(accelerator, lock, done, [f"{name}/*" for name in ("unet", "scheduler")], args)


if __name__ == "__main__":
    main(parse_args())
