"""Choosing the batch size that fits, and the learning rate, by a rule or by a range test."""

import gc
import json
import math
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Generator
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from accelerate.utils.memory import should_reduce_batch_size
from tqdm.auto import tqdm

from diffusion_training.errors import end_if_stopped, fail
from diffusion_training.files import saving
from diffusion_training.training.costs import measure_memory
from diffusion_training.training.models import Models, copy_trained, put_on_device, start_average
from diffusion_training.training.optimizers import make_optimizer
from diffusion_training.training.progress import Progress

# `train_step`, with models, optimizer, batches, number of micro-batches, data step
TakeStep = Callable[..., torch.Tensor]


def choose_batch_size(
    accelerator: Accelerator,
    models: Models,
    take_step: TakeStep,
    dataset: Any,
    rows: Any,
    before: dict,
    args: Namespace,
) -> None:
    """Replace --train_batch_size auto and --total_batch_size by numbers, on all processes alike.

    The numbers are put into `args`. auto is the result of `largest_batch`, or the earlier one of
    the checkpoint whose settings are `before`.
    """
    total, num_processes, auto = (
        args.total_batch_size,
        accelerator.num_processes,
        args.train_batch_size == "auto",
    )
    each, rest = divmod(total or (max(num_processes, len(rows)) if auto else 0), num_processes)
    if auto:
        largest = 0 if dataset.sizes is None else np.argmax(dataset.sizes[rows].prod(axis=1))
        batch, size = dataset[[(0, int(rows[largest]), 1.0)]], before.get("train_batch_size")
        size = size or largest_batch(accelerator, models, take_step, batch, each, args)
        args.train_batch_size = next(n for n in range(size, 0, -1) if not total or each % n == 0)
    if total and (rest or each % args.train_batch_size or args.gradient_accumulation_steps != 1):
        other = "or --gradient_accumulation_steps is given, which it chooses itself"
        each = f"--train_batch_size {args.train_batch_size} x {num_processes} processes"
        fail(f"--total_batch_size {total} is no multiple of {each}, {other}")
    args.gradient_accumulation_steps = (
        each // args.train_batch_size if total else args.gradient_accumulation_steps
    )
    factors = args.train_batch_size, args.gradient_accumulation_steps, num_processes
    said = "{} x {} accumulated x {} processes".format(*factors)
    accelerator.print(f"Batch size: {said}, {math.prod(factors)} images a step")


def largest_batch(
    accelerator: Accelerator,
    models: Models,
    take_step: TakeStep,
    batch: dict,
    most: int,
    args: Namespace,
) -> int:
    """Return how many images like the one in `batch`, up to `most`, fit in a micro-batch.

    They must fit on the devices of all processes. Each size is tried with steps of a copy,
    including optimizer, averaged weights and the memory that DDP takes for gradients.
    """
    device = accelerator.device

    def prepare(size: int) -> Callable[[int], Any]:
        trial = {
            name: put_on_device(copy_trained(model), device).train()
            for name, model in models.items()
        }
        if args.gradient_checkpointing:
            for model in trial.values():
                model.enable_gradient_checkpointing()
        others = [
            start_average(trial)
            for wanted in (args.use_ema, accelerator.num_processes > 1)
            if wanted
        ]
        optimizer = accelerator.prepare(make_optimizer(trial, accelerator.scaler, args))
        # Without DDP: a process whose memory is full would leave the others waiting.
        trial = {
            name: accelerator.prepare_model(model, evaluation_mode=True)
            for name, model in trial.items()
        }
        many = {
            k: v.repeat_interleave(size, 0).to(device) if torch.is_tensor(v) else v
            for k, v in batch.items()
        }
        return lambda step: (take_step(trial, optimizer, iter([many]), 1, step), others)

    scaler = accelerator.scaler and accelerator.scaler.state_dict()
    found = find_largest(accelerator, device, prepare, most)
    if scaler:  # the trials have moved its scale
        accelerator.scaler.load_state_dict(scaler)
    if found == 0:
        fail(
            "not even one image fits: try --gradient_checkpointing, --mixed_precision bf16 or "
            "a smaller model"
        )
    return found


def find_largest(
    accelerator: Accelerator,
    device: torch.device,
    prepare: Callable[[int], Callable[[int], Any]],
    most: int,
) -> int:
    """Return how many images, up to `most`, fit on the devices of all processes; 0 if none does.

    The number is doubled until the memory is full, then bisected. A tenth of a GPU stays free. On a
    CPU the limit is 64, because it does not report that it is full. A line is printed for each
    number: images, memory of the first device, images per second of step 1.

    prepare(size): puts everything onto the device, and returns compute(step), which is called for
    steps 0 and 1.
    """

    def fits(size: int) -> bool:
        full, compute = False, None
        try:
            compute = prepare(size)
            if cuda:
                torch.cuda.reset_peak_memory_stats(device)
            for step in range(2):
                begin = time.perf_counter()
                compute(step)
                if cuda:
                    torch.cuda.synchronize(device)
            found = (
                f"{measure_memory(device)[0] / 1e9:12.3g}"
                f"{size / (time.perf_counter() - begin):10.1f}"
            )
        except RuntimeError as error:
            if not (full := should_reduce_batch_size(error)):
                raise
        compute = None
        accelerator.free_memory()
        full = any(gather_object([full]))
        accelerator.print(f"{size:8}{'too many' if full else found:>12}")
        return not full

    if cuda := device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(0.9)
    most = min(most, 64) if device.type == "cpu" else most
    gc.freeze()  # so that collecting garbage of a trial does not go through all other objects
    accelerator.print(f"{'images':>8}{'memory, GB':>12}{'images/s':>10}")
    low, high = 0, most + 1  # `low` images fit, `high` do not
    while high - low > 1:
        end_if_stopped()
        size = min(2 * low or 1, most) if high > most else (low + high) // 2
        low, high = (size, high) if fits(size) else (low, size)
    gc.unfreeze()
    if cuda:
        torch.cuda.set_per_process_memory_fraction(1.0)
    return low


def scale_learning_rate(accelerator: Accelerator, images_per_step: int, args: Namespace) -> None:
    """Scale --learning_rate from --base_batch_size to this batch size by --scale_lr, and print it.

    linear suits SGD (arXiv:1706.02677), sqrt suits Adam (arXiv:2205.10287), and auto is linear up
    to 512 images and sqrt beyond.
    """
    if not args.scale_lr:
        return
    rules = {
        "linear": lambda images: images,
        "sqrt": math.sqrt,
        "auto": lambda n: min(n, math.sqrt(512 * n)),
    }
    factor = rules[args.scale_lr](images_per_step) / rules[args.scale_lr](args.base_batch_size)
    rates = (args.learning_rate, args.learning_rate * factor)
    given, scaled = (
        np.format_float_scientific(rate, precision=4, trim="-", exp_digits=1) for rate in rates
    )
    args.learning_rate *= factor
    rule = f"{args.scale_lr}, {images_per_step} images a step"
    accelerator.print(f"Learning rate ({rule}): {given} x {factor:g} = {scaled}")


def plan_steps(accelerator: Accelerator, progress: Progress, args: Namespace) -> bool:
    """Put a number for --max_train_steps into `args`. Return whether anything is left to train."""
    args.max_train_steps = steps = args.max_train_steps or progress.last_step(args.num_train_epochs)
    if progress.global_step > steps and not args.find_lr:
        accelerator.print(f"The checkpoint is beyond step {steps}: there is nothing left to train")
        return False
    if progress.num_images < sys.maxsize:  # a stream has no epochs
        each = math.ceil(progress.num_images / progress.images_per_step)
        accelerator.print(
            f"Epoch: {progress.num_images} images, {each} steps; {steps} steps are "
            f"{steps / each:.4g} epochs"
        )
    if args.lr_scheduler == "polynomial" and args.learning_rate <= 1e-7:
        fail(
            "--lr_scheduler polynomial ends at a rate of 1e-7: begin above it, not at "
            f"{args.learning_rate:g}"
        )
    if args.lr_warmup_steps > steps / 10 and args.lr_scheduler not in (
        "constant",
        "piecewise_constant",
    ):
        turn = f"--lr_warmup_steps {steps // 20} would suit it"
        accelerator.print(
            f"The learning rate rises for {args.lr_warmup_steps} of {steps} steps: {turn}"
        )
    return True


def find_learning_rate(
    accelerator: Accelerator,
    models: Models,
    optimizer: torch.optim.Optimizer,
    take_step: TakeStep,
    batches: Generator[dict],
    progress: Progress,
    args: Namespace,
) -> str:
    """Find a learning rate by a range test (arXiv:1506.01186); write find_lr.json and find_lr.png.

    The rate grows by a constant factor per step until the loss, smoothed over about ten steps, is
    four times its lowest value. The suggestion is a tenth of the rate at the lowest loss. Nothing
    trained here is kept. Returns a sentence with the result.
    """
    import matplotlib.figure  # imported here, because it takes half a second

    tested, average = [], 0.0
    rates = np.geomspace(args.find_lr_min, args.find_lr_max, args.find_lr_steps).tolist()
    for rate in tqdm(rates, "Range test", disable=not accelerator.is_main_process):
        end_if_stopped()
        for group in optimizer.param_groups:
            group["lr"] = rate
        images, micro_batches = progress.next_step()
        sums = take_step(models, optimizer, batches, micro_batches, progress.data_step)
        progress.advance(images, stepped=True)
        loss, weight, _ = accelerator.reduce(sums).tolist()
        if weight == 0:  # no image of the step could be decoded
            continue
        average = 0.9 * average + 0.1 * loss / weight
        smoothed = average / (1 - 0.9 ** (len(tested) + 1))  # corrects for its start at 0
        if not smoothed < math.inf:
            break
        tested.append((smoothed, rate, loss / weight))
        if smoothed > 4 * min(tested)[0]:
            break
    batches.close()
    if not tested:
        fail("the loss is not finite from the start: there is no learning rate to find")
    lowest, best, _ = min(tested)
    reason = f"a tenth of {best:.2g}, at which the smoothed loss was lowest ({lowest:.4g})"
    found = {"suggestion": best / 10, "reason": reason}
    found |= dict(
        zip(("smoothed", "rates", "losses"), map(list, zip(*tested, strict=True)), strict=True)
    )
    if accelerator.is_main_process:
        figure = matplotlib.figure.Figure(figsize=(7, 4), layout="constrained")
        axes = figure.add_subplot(
            xlabel="learning rate", ylabel="loss", xscale="log", yscale="log", title=reason
        )
        axes.plot(found["rates"], found["losses"], alpha=0.3)
        axes.plot(found["rates"], found["smoothed"])
        axes.axvline(best / 10, linestyle="--")
        with saving(args.output_dir, "find_lr.json") as unfinished:
            figure.savefig(unfinished / "find_lr.png")
            (unfinished / "find_lr.json").write_text(json.dumps(found))
    return f"--learning_rate {best / 10:.2g}: {reason}; see {args.output_dir}/find_lr.png"
