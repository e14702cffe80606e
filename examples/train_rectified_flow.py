"""Rectified flow by class on handwritten digits: straight lines from noise to images."""

import contextlib
import math

from diffusion_training.arguments import COUNT, PATH, make_parser, number
from diffusion_training.data.flags import add_source_flags, check_source
from diffusion_training.flags import add_device_flags
from diffusion_training.training.flags import (
    add_logging_flags,
    add_optimization_flags,
    add_saving_flags,
    check_training_args,
)

CLASSES = "zero one two three four five six seven eight nine".split()


def parse_args(argv=None):
    parser = make_parser(__file__, __doc__)
    add = parser.add_argument_group("data").add_argument
    add_source_flags(add)
    add("--resolution", type=number(2, 16384, int), default=8, help="side of the images, pixels")
    add("--dataloader_num_workers", type=number(0, 1024, int), help="processes that decode")
    add("--holdout", type=number(0, 10**9), default=0.0, help="share or number of images held out")
    add = parser.add_argument_group("model and samples").add_argument
    add_device_flags(add)
    add("--num_inference_steps", type=COUNT, default=20, help="sampling steps")
    add("--validation_epochs", type=COUNT, default=10, help="epochs between samples")
    schedule = {"lr_scheduler": "cosine", "lr_warmup_steps": 50, "num_train_epochs": 50}
    add_optimization_flags(parser, "cosine", adam_beta1=0.9, adam_weight_decay=1e-2)
    parser.set_defaults(train_batch_size=64, learning_rate=1e-3, **schedule)
    add = parser.add_argument_group("logging and saving").add_argument
    add_logging_flags(add, tracker_project_name="rectified-flow")
    add("--output_dir", type=PATH, default="rectified-flow-digits", help="folder for all output")
    add_saving_flags(add)
    args = parser.parse_args(argv)
    if not (args.dataset_name or args.train_data_dir):
        parser.error("--train_data_dir or --dataset_name is needed")
    check_source(parser, args)
    check_training_args(parser, args)
    return parser.freeze(args)


# --help and mistakes in the flags end here, at once: the imports below take seconds.
if __name__ == "__main__":
    args = parse_args()

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from diffusers import UNet2DModel

from diffusion_training.batches import HeldOutLoss, Objective, Prepared
from diffusion_training.data.folders import get_source
from diffusion_training.data.images import decode_image, shrink
from diffusion_training.data.rows import RowDataset, load_rows, read_items
from diffusion_training.draws import step_seed
from diffusion_training.errors.sentences import in_one_sentence
from diffusion_training.files import saving
from diffusion_training.launch import accelerator_options, make_launch
from diffusion_training.loading import load_batches
from diffusion_training.models import compile_model
from diffusion_training.order import Order, step_batches
from diffusion_training.stopping import StopSignal
from diffusion_training.training.held_out import hold_out
from diffusion_training.training.keeping.checkpoints import save_weights
from diffusion_training.training.records import Records
from diffusion_training.training.results import Results
from diffusion_training.training.run_folder import complete_args, end_run, open_run
from diffusion_training.training.saver import Saver, check_free_space
from diffusion_training.training.showing.grid import draw_grid
from diffusion_training.training.showing.report import Description
from diffusion_training.training.showing.samples import save_samples
from diffusion_training.training.state import TrainState, describe_settings, place_models
from diffusion_training.training.step.costs import Costs
from diffusion_training.training.step.optimizers import make_lr_scheduler, make_optimizer
from diffusion_training.training.tuning import find_learning_rate, plan_run


class Digits(RowDataset):
    """Keys -> {"pixel_values": uint8 [N, 1, H, W], "labels": [N], "weight": [N], "skipped"}."""

    def __init__(self, images, args):
        super().__init__(images, get_source(args))
        self.side = args.resolution

    def __getitem__(self, keys):
        items = read_items(self.rows, keys)
        images = [decode_image(item[self.column], 1) for item in items]
        batch = {"pixel_values": torch.stack([shrink(x, self.side, (0.5, 0.5)) for x in images])}
        batch["labels"] = torch.tensor([CLASSES.index(item["text"].split()[-1]) for item in items])
        return batch | {"weight": torch.tensor([key[2] for key in keys]), "skipped": []}


def make_unet(args):
    channels = {"in_channels": 1, "out_channels": 1, "block_out_channels": (32, 64)}
    down, up = ("DownBlock2D", "AttnDownBlock2D"), ("AttnUpBlock2D", "UpBlock2D")
    blocks = {"layers_per_block": 1, "down_block_types": down, "up_block_types": up}
    return UNet2DModel(args.resolution, num_class_embeds=len(CLASSES), **channels, **blocks)


def prepare_batch(batch):
    return Prepared(batch["pixel_values"] / 127.5 - 1, {"class_labels": batch["labels"]}, {})


def predict_velocity(models, noisy, times, condition):
    return models["unet"](noisy, 1000 * times, **condition).sample.float()


def add_noise(images, noise, times):
    return torch.lerp(images, noise, times.view(-1, 1, 1, 1))


def compute_loss(objective, models, prepared, weight):
    """At a time in [0, 1] on the line from an image to noise, predict its direction."""
    images, condition, _ = prepared
    noise = torch.randn(images.shape, device=images.device)
    times = torch.randn(len(images), device=images.device).sigmoid()  # arXiv:2403.03206
    velocity = objective.predict(models, add_noise(images, noise, times), times, condition)
    error = F.mse_loss(velocity, noise - images, reduction="none")
    return (weight * error.mean(dim=(1, 2, 3))).sum()


def add_tenths(images, noise, tenths):
    return add_noise(images, noise, tenths / 10)


def measure_error(models, noisy, tenths, condition, images, noise):
    """The error of each image at a time of `tenths` / 10, for the held-out loss."""
    velocity = predict_velocity(models, noisy, tenths / 10, condition)
    return F.mse_loss(velocity, noise - images, reduction="none").mean(dim=(1, 2, 3))


@torch.no_grad()
def draw_samples(unet, device, args):
    """Ten images of each class, in equal steps from time 1 to 0: uint8 [classes, 10, H, W, 1]."""
    labels = torch.arange(len(CLASSES), device=device).repeat_interleave(10)
    generator = torch.Generator().manual_seed(step_seed("sample", args.seed))
    x = torch.randn(len(labels), 1, *[args.resolution] * 2, generator=generator).to(device)
    for time in torch.linspace(1, 0, args.num_inference_steps + 1, device=device)[:-1]:
        times, condition = time.expand(len(labels)), {"class_labels": labels}
        x = x - predict_velocity({"unet": unet}, x, times, condition) / args.num_inference_steps
    x = (127.5 * (x.clamp(-1, 1) + 1)).round().byte().permute(0, 2, 3, 1)
    return x.unflatten(0, (len(CLASSES), 10)).cpu().numpy()


def train_step(
    accelerator,
    objective,
    models,
    optimizer,
    batches,
    next_step,
    seed,
    max_grad_norm,
    on_batch=None,
):
    loss, weight = torch.zeros(2, device=accelerator.device)
    for micro_batch in range(next_step.micro_batches):
        batch = next(batches)
        rank = accelerator.process_index
        torch.manual_seed(step_seed("step", seed, next_step.number, micro_batch, rank))
        prepared = objective.prepare(batch)
        if on_batch:
            on_batch(prepared, batch["weight"])
        # the processes average their gradients in the last one
        last = micro_batch == next_step.micro_batches - 1
        with contextlib.nullcontext() if last else accelerator.no_sync(models["unet"]):
            weighted_loss = objective.loss(models, prepared, batch["weight"])
            accelerator.backward(weighted_loss)
        loss += weighted_loss.detach()
        weight += batch["weight"].sum()
    trained = [weight for group in optimizer.param_groups for weight in group["params"]]
    grad_norm = accelerator.clip_grad_norm_(trained, max_grad_norm or math.inf)
    optimizer.step()
    optimizer.zero_grad()
    return {"loss": loss, "weight": weight, "grad_norm": grad_norm}  # .item() would wait here


def describe_model(about, settings):
    usage = f'UNet2DModel.from_pretrained("{about.name}", subfolder="unet")'
    what = f"A U-Net of rectified flow, trained for {about.step} steps."
    return Description(["rectified-flow"], what, usage)


@in_one_sentence
def main(args):
    accelerator = Accelerator(**accelerator_options(args))
    launch = make_launch(accelerator, args)
    run = open_run(launch, __file__, args)
    dataset = Digits(load_rows(args, others=["text"]), args)
    train_rows, held_out = hold_out(accelerator, dataset, args.holdout, args.seed)
    order = Order(train_rows, args.seed)
    torch.manual_seed(args.seed)
    models = {"unet": make_unet(args)}
    measure = HeldOutLoss(add_tenths, measure_error)
    objective = Objective(prepare_batch, predict_velocity, compute_loss, measure, prepare_batch)

    plan = plan_run(launch, run, models, objective, train_step, dataset, train_rows, order, args)
    if plan.is_done:
        return
    args = complete_args(args, launch, run, plan)
    check_free_space(launch, models, args)
    averages = place_models(launch, models, args)
    optimizer = make_optimizer(models, args)
    progress = plan.progress
    settings = describe_settings(launch, progress, dataset, held_out, args)
    state = TrainState(models, averages, optimizer, progress, settings)
    state.load(accelerator, run, plan.saved_state, args)
    lr_scheduler = make_lr_scheduler(optimizer, progress.global_step, args)
    costs = Costs(launch, models, averages.models(), objective, args.optimizer, args.allow_tf32)
    if launch.is_main:
        objective = costs.count_first(objective)  # the operations of the first step, for records
    if launch.compile:
        compile_model(models["unet"], launch.compile)
    wrapped = {"unet": accelerator.prepare(models["unet"])}
    optimizer = accelerator.prepare(optimizer)

    keys = step_batches(order, progress, launch.rank, launch.num_processes)
    workers = launch.choose_workers(args.dataloader_num_workers)
    loaded = load_batches(dataset, keys, workers, launch.device)
    if args.find_lr:
        result = find_learning_rate(
            accelerator, objective, train_step, wrapped, optimizer, loaded, progress, args
        )
        end_run(launch, run, result, [], args)
        return
    records = Records(accelerator, run, progress, models, objective, costs, 0, args)
    stop_signal = StopSignal(launch.num_processes, launch.shard, run.writer)
    saver = Saver(launch, run, state, records, stop_signal, args)
    batches = records.watch(loaded)

    def write_result(best, folder):
        with saving(folder, "the U-Net") as unfinished:
            save_weights(best["unet"], unfinished / "unet")

    results = Results(
        "U-Net", ["unet/*"], write_result, describe_model, launch, run, state, objective, dataset,
        held_out, records, stop_signal, args,
    )  # fmt: skip

    def show():
        results.measure_held_out()
        results.keep_best()
        if launch.is_main:
            samples = draw_samples(averages.get_model("unet"), launch.device, args)
            step = progress.global_step
            save_samples(accelerator, draw_grid(samples, CLASSES), args.output_dir, step)
        results.report()

    def goes_on():
        return progress.global_step < args.max_train_steps and not stop_signal.was_stopped

    stop_signal.agree()  # a signal may have come before
    while goes_on():
        next_step = progress.next_step()
        sums = train_step(
            accelerator, objective, wrapped, optimizer, batches, next_step, args.seed,
            args.max_grad_norm, records.measure_inputs,
        )  # fmt: skip
        stepped = not accelerator.optimizer_step_was_skipped  # after an fp16 overflow
        progress.advance(next_step.images, stepped)
        averages.update(progress, next_step.images)
        if stepped:
            records.add(sums, next_step, lr_scheduler.get_last_lr()[0])
            lr_scheduler.step()
        stop_signal.agree()
        if progress.is_due(args.logging_steps):
            records.log()
        if args.posthoc_ema and progress.is_due(args.posthoc_ema_steps or args.checkpointing_steps):
            saver.save_snapshot()
        epochs = args.checkpointing_epochs
        if progress.is_due(None if epochs else args.checkpointing_steps, epochs):
            saver.save_checkpoint()
        if progress.is_due(None, args.validation_epochs) and goes_on():
            show()
    saver.save_last()
    loaded.close()
    records.bar.close()
    if not stop_signal.was_stopped:
        results.write()
        show()
        if args.posthoc_ema:
            results.compare_widths()
    saver.finish()
    results.end()


if __name__ == "__main__":
    main(args)
