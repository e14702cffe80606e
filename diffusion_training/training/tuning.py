"""Choosing the batch size that fits, and the learning rate, by a rule or by a range test."""

import json
import math
import sys
from argparse import Namespace
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from accelerate import Accelerator
from tqdm.auto import tqdm

from diffusion_training.batches import Batch, Models, Objective, StepSums, TrainingData
from diffusion_training.blocks import checkpoint_gradients, describe_memory_plan
from diffusion_training.errors.printing import amount
from diffusion_training.errors.sentences import fail
from diffusion_training.errors.stop_signals import end_if_stopped
from diffusion_training.files import saving
from diffusion_training.launch import Launch
from diffusion_training.memory import find_largest
from diffusion_training.models import copy_trained, put_on_device, start_average
from diffusion_training.order import Order
from diffusion_training.training.progress import NextStep, Progress
from diffusion_training.training.run_folder import RunFolder
from diffusion_training.training.step.optimizers import make_optimizer

# the script's `train_step`
TrainStep: TypeAlias = Callable[..., StepSums]


@dataclass(frozen=True)
class Plan:
    """How large a step is, how many there are, and where the run begins."""

    train_batch_size: int  # per process and micro-batch
    gradient_accumulation_steps: int
    learning_rate: float
    lr_scheduler: str
    lr_warmup_steps: int
    max_train_steps: int
    checkpointing_steps: int  # with --checkpointing_epochs those of so many whole epochs
    is_done: bool  # whether nothing is left to train
    progress: Progress
    saved_state: dict[str, Any]  # of the checkpoint; see `read_state`
    fitted: str | None  # the flags of the plan that --fit has chosen

    def settings(self) -> dict[str, Any]:
        """The values to record, under the names of the flags."""
        names = (
            "train_batch_size",
            "gradient_accumulation_steps",
            "learning_rate",
            "lr_scheduler",
            "lr_warmup_steps",
            "max_train_steps",
            "checkpointing_steps",
            "fitted",
        )
        return {name: getattr(self, name) for name in names}


def plan_run(
    launch: Launch,
    run: RunFolder,
    models: Models,
    objective: Objective,
    train_step: TrainStep,
    dataset: TrainingData,
    train_rows: Any,
    order: Order,
    args: Namespace,
    fit: Callable[..., str | None] | None = None,
) -> Plan:
    """Choose batch size, learning rate and number of steps; the same on all processes.

    The batch size comes first, because a checkpoint's position in the data is a number of images.

    train_rows: the rows to train on. order: their order. fit: for --fit, see `fit_models`.
    """
    num_images = len(order.rows(0))
    state = run.read_state(num_images, args)
    batch_size, accumulation_steps = choose_batch_size(
        launch, models, objective, train_step, dataset, train_rows, state["settings"], args
    )
    per_micro_batch = batch_size * launch.num_processes
    progress = Progress(state, num_images, per_micro_batch, accumulation_steps, order)
    accelerator = launch.accelerator
    fitted = None
    if fit and args.fit:
        batch = make_largest(dataset, train_rows)
        fitted = fit(launch, models, objective, batch, accumulation_steps, state["settings"], args)
    if launch.compile and state["settings"].get("compile"):
        announce_changed_bits(accelerator, state["settings"], vars(args) | {"fitted": fitted})
    max_train_steps = args.max_train_steps or progress.last_step(args.num_train_epochs)
    lr_scheduler, lr_warmup_steps = choose_warmup(accelerator, max_train_steps, state, args)
    plan = Plan(
        train_batch_size=batch_size,
        gradient_accumulation_steps=accumulation_steps,
        learning_rate=scale_learning_rate(accelerator, progress.images_per_step, args),
        lr_scheduler=lr_scheduler,
        lr_warmup_steps=lr_warmup_steps,
        max_train_steps=max_train_steps,
        checkpointing_steps=(
            args.checkpointing_epochs * progress.steps_per_epoch
            if args.checkpointing_epochs
            else args.checkpointing_steps
        ),
        is_done=progress.global_step > max_train_steps and not args.find_lr,
        progress=progress,
        saved_state=state,
        fitted=fitted,
    )
    if plan.is_done:
        accelerator.print(
            f"The checkpoint is beyond step {max_train_steps}: there is nothing left to train"
        )
    else:
        # with --init_from, a run counts from a later step
        first_step = 0 if state["settings"] else progress.global_step
        report_plan(accelerator, progress, plan, first_step, args)
    return plan


def choose_batch_size(
    launch: Launch,
    models: Models,
    objective: Objective,
    train_step: TrainStep,
    dataset: TrainingData,
    train_rows: Any,
    before: dict[str, Any],
    args: Namespace,
) -> tuple[int, int]:
    """Return (--train_batch_size, --gradient_accumulation_steps).

    auto becomes the result of `largest_batch`, or the size in `before`, a checkpoint's settings.
    With --total_batch_size, no process computes more images at once than its share of a step.
    """
    total = args.total_batch_size
    num_processes = launch.num_processes
    accumulation_steps = launch.gradient_accumulation_steps
    batch_size = args.train_batch_size
    per_process, rest = divmod(total or 0, num_processes)
    if batch_size == "auto":
        fits = before.get("train_batch_size")
        if fits is None:
            batch = make_largest(dataset, train_rows)
            most = per_process if total else max(num_processes, len(train_rows)) // num_processes
            fits = largest_batch(launch, models, objective, train_step, batch, most, args)
        batch_size = next(n for n in range(fits, 0, -1) if not total or per_process % n == 0)
    if total:
        given, batch_size = batch_size, min(batch_size, per_process or 1)
        if accumulation_steps != 1:
            fail(
                "--total_batch_size sets --gradient_accumulation_steps itself: remove one of them, "
                "here or in `accelerate config`"
            )
        if rest or per_process % batch_size:
            each = f"{num_processes} processes"
            if given == batch_size:
                each = f"--train_batch_size {given} x {each}"
            fail(f"--total_batch_size {total} is not a multiple of {each}: choose another")
        accumulation_steps = per_process // batch_size
    images = batch_size * accumulation_steps * num_processes
    launch.accelerator.print(
        f"Batch size: {batch_size} x {accumulation_steps} accumulated x "
        f"{amount(num_processes, 'process')} = {amount(images, 'image')} per step"
    )
    return batch_size, accumulation_steps


def make_largest(dataset: TrainingData, train_rows: Any) -> Batch:
    """A batch of one image, of the largest size, with the longest caption."""
    sizes = dataset.sizes
    largest = 0 if sizes is None else np.argmax(count_latents(sizes[train_rows]))
    return dataset.longest(int(train_rows[largest]))


def announce_changed_bits(
    accelerator: Accelerator, before: dict[str, Any], now: dict[str, Any]
) -> None:
    """Print that compiled code rounds in another way if other blocks are checkpointed than before.

    before, now: settings of a checkpoint and of the run.
    """
    old, new = describe_memory_plan(before), describe_memory_plan(now)
    if old != new:
        accelerator.print(
            f"With --compile the last bits change: the checkpoint has {old}, this run has {new}"
        )


def count_latents(sizes: np.ndarray) -> np.ndarray:
    """How many latents each row has, with its references. sizes: see `CachedLatents.sizes`."""
    heights = np.concatenate([sizes[:, :1], sizes[:, 2::4]], axis=1)
    widths = np.concatenate([sizes[:, 1:2], sizes[:, 3::4]], axis=1)
    return (heights * widths).sum(axis=1)


def largest_batch(
    launch: Launch,
    models: Models,
    objective: Objective,
    train_step: TrainStep,
    batch: Batch,
    most: int,
    args: Namespace,
) -> int:
    """Return how many images like the one in `batch`, up to `most`, fit in a micro-batch.

    They must fit on the devices of all processes. Each size is tried with steps of a copy,
    including optimizer, averaged weights and the memory that DDP takes for gradients.
    """
    accelerator, device = launch.accelerator, launch.device

    def prepare_trial(size: int) -> Callable[[int], Any]:
        trial = {
            name: put_on_device(copy_trained(model), device).train()
            for name, model in models.items()
        }
        checkpoint_gradients(trial, args)
        num_copies = args.use_ema + len(args.posthoc_ema or ()) + (launch.num_processes > 1)
        copies = [start_average(trial) for _ in range(num_copies)]
        optimizer = accelerator.prepare(make_optimizer(trial, args))
        # Without DDP: a process whose memory is full would leave the others waiting.
        for name, model in trial.items():
            trial[name] = accelerator.prepare_model(model, evaluation_mode=True)
        repeated = {
            name: value.repeat_interleave(size, 0).to(device) if torch.is_tensor(value) else value
            for name, value in dict[str, Any](batch).items()
        }

        def take_step(number: int) -> Any:
            step = NextStep(number, epoch=0, images=size, micro_batches=1)
            return copies, train_step(
                accelerator, objective, trial, optimizer, iter([repeated]), step, args.seed,
                args.max_grad_norm,
            )  # fmt: skip

        return take_step

    scaler = accelerator.scaler and accelerator.scaler.state_dict()
    size = find_largest(accelerator, device, prepare_trial, most)
    if scaler:  # the trials have changed its scale
        accelerator.scaler.load_state_dict(scaler)
    if size == 0:
        fail(
            "not even one image fits: try --gradient_checkpointing, --mixed_precision bf16 or "
            "a smaller model"
        )
    return size


def scale_learning_rate(accelerator: Accelerator, images_per_step: int, args: Namespace) -> float:
    """Scale --learning_rate from --base_batch_size to this batch size by --scale_lr, and print it.

    linear suits SGD (arXiv:1706.02677), sqrt suits Adam (arXiv:2205.10287), and auto is linear up
    to 512 images and sqrt beyond.
    """
    if not args.scale_lr:
        return args.learning_rate

    def weigh(images: int) -> float:
        weights = {
            "linear": images,
            "sqrt": math.sqrt(images),
            "auto": min(images, math.sqrt(512 * images)),
        }
        return weights[args.scale_lr]

    factor = weigh(images_per_step) / weigh(args.base_batch_size)
    rate = args.learning_rate * factor
    before, after = (
        np.format_float_scientific(value, precision=4, trim="-", exp_digits=1)
        for value in (args.learning_rate, rate)
    )
    rule = f"{args.scale_lr}, {amount(images_per_step, 'image')} per step"
    accelerator.print(f"Learning rate ({rule}): {before} x {factor:g} = {after}")
    return rate


def choose_warmup(
    accelerator: Accelerator, max_train_steps: int, state: dict[str, Any], args: Namespace
) -> tuple[str, int]:
    """Return (--lr_scheduler, steps of --lr_warmup_steps, which may be a share of the run).

    With a warm-up, constant becomes constant_with_warmup. A share is counted once, when a run
    begins: a later --max_train_steps does not change it.
    """
    schedule = args.lr_scheduler
    warmup = args.lr_warmup_steps
    if warmup is None:
        warmup = 0 if schedule in ("constant", "piecewise_constant") else 500
    if schedule == "constant" and warmup:
        schedule = "constant_with_warmup"
    if isinstance(warmup, int):
        return schedule, warmup
    steps = state["settings"].get("lr_warmup_steps")
    if steps is None:
        steps = round(warmup * max_train_steps)
        reason = f"{warmup:g} of {max_train_steps}"
    else:
        reason = "as when the run began"
    accelerator.print(f"Warm-up: {amount(steps, 'step')}, {reason}")
    return schedule, steps


def report_plan(
    accelerator: Accelerator, progress: Progress, plan: Plan, first_step: int, args: Namespace
) -> None:
    """Print steps and epochs. Stops with an error if the schedule does not fit the rate.

    first_step: the step of --init_from, from which this run counts, or 0.
    """
    steps = plan.max_train_steps - first_step
    if progress.num_images < sys.maxsize:  # a stream has no epochs
        per_epoch = math.ceil(progress.num_images / progress.images_per_step)
        since = f" after step {first_step}" if first_step else ""
        epochs = "1 epoch" if steps == per_epoch else f"{steps / per_epoch:.4g} epochs"
        accelerator.print(
            f"Epoch: {amount(progress.num_images, 'image')}, {amount(per_epoch, 'step')}; "
            f"the run: {amount(steps, 'step')}{since}, {epochs}"
        )
    if args.lr_scheduler == "polynomial" and plan.learning_rate <= 1e-7:
        fail(
            "--lr_scheduler polynomial ends at a learning rate of 1e-7: begin above it, not at "
            f"{plan.learning_rate:g}"
        )
    warmup = plan.lr_warmup_steps - first_step
    if warmup <= 0 < min(first_step, plan.lr_warmup_steps):
        accelerator.print(
            f"The warm-up of the learning rate ended at step {plan.lr_warmup_steps}, and this run "
            f"begins at step {first_step}: its new optimizer starts without a warm-up"
        )
    if warmup > steps / 10:
        what = f"takes {warmup} of {steps} steps"
        if warmup > steps:
            what = f"of {warmup} steps is longer than the run of {steps}, so the rate only rises"
        accelerator.print(
            f"The warm-up of the learning rate {what}. As a rule it takes a twentieth of a run: "
            "--lr_warmup_steps 0.05"
        )


class RangeTest(NamedTuple):
    """A step of a range test."""

    smoothed: float  # loss
    rate: float
    loss: float


def find_learning_rate(
    accelerator: Accelerator,
    objective: Objective,
    train_step: TrainStep,
    models: Models,
    optimizer: torch.optim.Optimizer,
    batches: Generator[Batch],
    progress: Progress,
    args: Namespace,
) -> str:
    """Find a learning rate by a range test (arXiv:1506.01186); write find_lr.json and find_lr.png.

    The rate grows by a constant factor per step until the loss, smoothed over about ten steps, is
    four times its lowest value. The suggestion is a tenth of the rate at the lowest loss. Nothing
    trained here is kept. Returns a sentence with the result.
    """
    tested: list[RangeTest] = []
    average = 0.0
    rates = np.geomspace(args.find_lr_min, args.find_lr_max, args.find_lr_steps).tolist()
    for rate in tqdm(rates, "Range test", disable=not accelerator.is_main_process):
        end_if_stopped()
        for group in optimizer.param_groups:
            group["lr"] = rate
        step = progress.next_step()
        sums = train_step(
            accelerator, objective, models, optimizer, batches, step, args.seed,
            args.max_grad_norm,
        )  # fmt: skip
        progress.advance(step.images, stepped=True)
        total = torch.stack([sums["loss"], sums["weight"]])
        loss, weight = accelerator.reduce(total).tolist()
        if weight == 0:  # no image of the step could be decoded
            continue
        average = 0.9 * average + 0.1 * loss / weight
        smoothed = average / (1 - 0.9 ** (len(tested) + 1))  # corrects the average's start at 0
        if not smoothed < math.inf:
            break
        tested.append(RangeTest(smoothed, rate, loss / weight))
        if smoothed > 4 * min(tested).smoothed:
            break
    batches.close()
    if not tested:
        fail("the loss is not finite from the start: there is no learning rate to find")
    best = min(tested)
    reason = (
        f"a tenth of {best.rate:.2g}, at which the smoothed loss was lowest ({best.smoothed:.4g})"
    )
    if accelerator.is_main_process:
        save_range_test(tested, best.rate / 10, reason, args.output_dir)
    return f"--learning_rate {best.rate / 10:.2g}: {reason}; see {args.output_dir}/find_lr.png"


def save_range_test(
    tested: list[RangeTest], suggestion: float, reason: str, output_dir: str
) -> None:
    """Write find_lr.json and find_lr.png."""
    import matplotlib.figure  # imported here, because it takes half a second

    smoothed, rates, losses = zip(*tested, strict=True)
    figure = matplotlib.figure.Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot(
        xlabel="learning rate", ylabel="loss", xscale="log", yscale="log", title=reason
    )
    axes.plot(rates, losses, alpha=0.3)
    axes.plot(rates, smoothed)
    axes.axvline(suggestion, linestyle="--")
    content = {
        "suggestion": suggestion,
        "reason": reason,
        "smoothed": smoothed,
        "rates": rates,
        "losses": losses,
    }
    with saving(output_dir, "find_lr.json") as unfinished:
        figure.savefig(unfinished / "find_lr.png")
        (unfinished / "find_lr.json").write_text(json.dumps(content))
