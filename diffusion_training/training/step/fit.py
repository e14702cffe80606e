"""--fit: the fastest plan that fits into the memory of the device, with the same bits."""

from argparse import Namespace
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
from accelerate.utils import broadcast_object_list, convert_outputs_to_fp32, gather_object

from diffusion_training.batches import Batch, Models, Objective
from diffusion_training.blocks import (
    PLANS,
    checkpoint_gradients,
    chooses_plan,
    describe_memory_plan,
    list_segments,
)
from diffusion_training.errors.sentences import fail
from diffusion_training.launch import Launch
from diffusion_training.memory import is_gpu
from diffusion_training.models import is_swapped, put_on_device
from diffusion_training.training.step.costs import count_memory, count_trained
from diffusion_training.training.step.plans import ALL, MemoryPlan, Meter, StepMemory, record_step


@dataclass(frozen=True)
class Estimate:
    """The bytes that a run needs, as a function of its plan."""

    step: StepMemory
    held: int  # on the device at all times, if all that can be on the host is there
    prepared: int  # at the most while a batch is prepared, such as by text encoders, besides it
    drawn: int  # at the most while samples are drawn, without the VAE
    swappable: list[int]  # of each segment on the host
    encoders: int  # what a cache would leave out of `held`

    def count_swapped(self, plan: MemoryPlan) -> tuple[int, int]:
        """Return the bytes of the swappable weights on (the device, the host)."""
        host = self.swappable[: plan.swapped]
        return sum(self.swappable[plan.swapped :]) + sum(sorted(host)[-2:]), sum(host)

    def count_step(self, plan: MemoryPlan) -> int:
        held = self.held + self.count_swapped(plan)[0]
        return held + max(self.step.count(plan), self.prepared)

    def count_drawing(self, plan: MemoryPlan) -> int:
        return self.held + self.count_swapped(plan)[0] + self.drawn

    def count(self, plan: MemoryPlan) -> int:
        return max(self.count_step(plan), self.count_drawing(plan))

    def leave_out_encoders(self) -> "Estimate":
        """The estimate with a cache."""
        return replace(self, held=self.held - self.encoders, prepared=0, encoders=0)

    def describe(self, plan: MemoryPlan, draws: bool) -> str:
        words = [f"{self.count_step(plan) / 1e9:.3g} GB in a step"]
        if draws:
            drawing = self.count_drawing(plan) / 1e9
            words.append(f"{drawing:.3g} GB and the VAE while samples are drawn")
        words.append(f"{self.count_swapped(plan)[1] / 1e9:.3g} GB of the host's memory")
        return ", ".join(words)


def list_plans(estimate: Estimate) -> Iterator[MemoryPlan]:
    """All plans, the fastest first.

    These are plans without swapped blocks, by the operations that are computed twice, and then
    those that copy blocks in every step.
    """
    step = estimate.step
    count = max((each.place + 1 for each in step.segments), default=0)
    some = [MemoryPlan(number) for number in range(1, count)] + [ALL] * (count > 0)
    kept = [replace(plan, keeps_attention=keeps) for plan in some for keeps in (True, False)]
    yield from sorted([MemoryPlan(), *kept], key=step.share_repeated)
    if estimate.swappable:
        yield from (replace(ALL, swapped=number) for number in range(1, count + 1))


def choose_plan(estimate: Estimate, room: float) -> MemoryPlan | None:
    """Return the fastest plan that needs at most `room` bytes; None if there is none."""
    fitting = (plan for plan in list_plans(estimate) if estimate.count(plan) <= room)
    return next(fitting, None)


def fit_models(
    launch: Launch,
    models: Models,
    objective: Objective,
    batch: Batch,
    accumulation_steps: int,
    before: dict[str, Any],
    args: Namespace,
) -> str | None:
    """Choose a plan by one step, change the models to it, and print it. On all processes.

    batch: one image of the largest size. accumulation_steps: micro-batches in a step. before: the
    settings of a checkpoint.

    Returns the flags that give the plan without --fit; None if nothing is chosen. Stops with an
    error if no plan fits.
    """
    say = launch.accelerator.print
    has_blocks = any(map(list_segments, models.values()))
    draws = bool(args.validation_prompts and args.num_validation_images)
    given = [name for name in PLANS if vars(args)[name]]
    if not is_gpu(launch.device):
        say("Fit: --fit chooses for a GPU, and does nothing on a CPU")
    elif given:
        say(f"Fit: --{given[0]} is given, so --fit chooses nothing")
    elif not has_blocks:
        names = " and ".join(type(model).__name__ for model in models.values())
        say(f"Fit: {names} has no repeated blocks, so there is nothing to choose")
    if not (has_blocks and chooses_plan(launch.device, args)):
        return None
    room = measure_room(launch, args.fit)
    try:
        estimate = estimate_run(launch, models, objective, batch, draws, args)
        step = replace(estimate.step, adds_up=accumulation_steps > 1)
        estimate = replace(estimate, step=step)
    except torch.OutOfMemoryError:
        fail(
            f"--fit {args.fit}: the model does not fit, even if one block computes at a time: "
            f"{advise_without_estimate(args)}"
        )
    plan = choose_plan(estimate, room)
    if launch.compile and before.get("compile"):
        # compiled code rounds in another way if it is cut elsewhere
        kept = read_plan(describe_memory_plan(before))
        if estimate.count(kept) <= room:
            plan = kept
    (plan,) = broadcast_object_list([plan])
    if plan is None:
        least = min(list_plans(estimate), key=estimate.count)
        fail(
            f"--fit {args.fit}: {room / 1e9:.3g} GB may be used, but the run needs at least "
            f"{estimate.describe(least, draws)}. It would need "
            f"{describe_helps(estimate, models, args)}"
        )
    for model in models.values():
        if is_swapped(model):
            model.block_swap.keep(model, plan.swapped)
    checkpoint_gradients(models, plan.flags())
    said = estimate.describe(plan, draws)
    say(f"Fit: {plan.describe()}: {said}, of {room / 1e9:.3g} GB that may be used (estimated)")
    if not args.latents_dir and not args.cache_latents:
        faster = choose_plan(estimate.leave_out_encoders(), room)
        if faster and faster != choose_plan(estimate, room):
            size = f"{estimate.encoders / 1e9:.3g} GB of VAE and text encoders"
            say(f"Fit: --cache_latents cpu leaves out {size}: then {faster.describe()} fits")
    return plan.describe()


def measure_room(launch: Launch, fit: float | str) -> float:
    """The bytes that a run may use on each device, as its --fit says; the least of all processes.

    auto: nine tenths of what is free. Stops with an error if a device has less than is asked for.
    """
    gpu = torch.get_device_module(launch.device)
    total = gpu.get_device_properties(launch.device).total_memory
    if fit == "auto":
        free, _ = gpu.mem_get_info(launch.device)
        room = 0.9 * (free + gpu.memory_reserved(launch.device))  # its own are counted
    else:
        room = float(fit) * 1e9
    totals = gather_object([total])
    if fit != "auto" and room > min(totals):
        fail(f"--fit {fit:g}: a GPU has only {min(totals) / 1e9:.3g} GB: use --fit auto")
    return min(gather_object([room]))


def estimate_run(
    launch: Launch, models: Models, objective: Objective, batch: Batch, draws: bool, args: Namespace
) -> Estimate:
    """Measure a step and a sample with the blocks one at a time. See `fit_models`."""
    for model in models.values():
        put_on_device(model, launch.device).train()

    def prepare(size: int) -> tuple[Any, torch.Tensor]:
        repeated = {
            name: each.repeat_interleave(size, 0).to(launch.device)
            if torch.is_tensor(each)
            else each
            for name, each in dict[str, Any](batch).items()
        }
        return objective.prepare(repeated), repeated["weight"]

    size = args.train_batch_size
    with ExitStack() as stack:
        for model in models.values():  # as `prepare` will do
            call = convert_outputs_to_fp32(launch.accelerator.autocast()(model.forward))
            stack.enter_context(patch.object(model, "forward", call))

        def compute() -> torch.Tensor:
            return objective.loss(models, prepared, weight)

        with Meter(launch.device) as meter:
            prepared, weight = prepare(size)
            of_batch, most = meter.held, meter.peak
            step = record_step(models, compute, meter, bool(args.full_bf16))
        drawn = 0
        if draws:  # with guidance the model gets each image twice
            prepared, weight = prepare(2 * size)
            with torch.no_grad(), Meter(launch.device) as meter:
                compute()
            drawn = meter.peak
    others = [*objective.frozen.values(), *objective.encoders]
    sizes = count_memory(models, {}, others, launch.num_processes, args.optimizer)
    trained, _ = count_trained(models, args.optimizer)
    sizes["averaged"] = trained * (args.use_ema + len(args.posthoc_ema or ()))
    del sizes["two swapped blocks"]
    if not args.full_bf16:  # the step has them
        del sizes["gradients"]
    swaps = [model.block_swap for model in models.values() if is_swapped(model)]
    swappable = [size for swap in swaps for size in swap.list_sizes()]
    held = sum(sizes.values()) + of_batch
    return Estimate(step, held, most - of_batch, drawn, swappable, sizes["encoders"])


def read_plan(described: str) -> MemoryPlan:
    """The plan of `describe_memory_plan`, without swapped blocks: compiled models have none."""
    words = described.split()
    number = ALL.checkpointed if {"--gradient_checkpointing", "--blocks_to_swap"} & {*words} else 0
    if "--checkpoint_blocks" in words:
        number = int(words[words.index("--checkpoint_blocks") + 1])
    return MemoryPlan(number, "--keep_attention" in words)


def describe_helps(estimate: Estimate, models: Models, args: Namespace) -> str:
    """What the flags that change results would leave of a step's memory, in the order to try."""
    least = min(list_plans(estimate), key=estimate.count)
    count = estimate.count(least)
    helps = {}
    weights = sum(x.nbytes for model in models.values() for x in model.parameters())
    trained, moments = count_trained(models, args.optimizer)
    if args.rank and not args.base_precision:
        on_device = estimate.count_swapped(least)[0] if estimate.swappable else weights
        helps["--base_precision int8"] = count - on_device / 2
        # it can't be swapped, and a weight of 2 bytes takes 0.56
        both = sum(estimate.swappable) or weights
        helps["--base_precision nf4"] = count - on_device + 0.28 * both
    if not args.rank and args.optimizer == "adamw":
        helps["--optimizer adamw8bit"] = count - 0.75 * moments
    if not args.rank and args.use_ema:
        helps["--no-use_ema"] = count - trained
    activations = estimate.step.count(ALL) - estimate.step.gradients
    helps["half the --resolution"] = count - 0.75 * max(0, activations)
    if not args.latents_dir and not args.cache_latents:
        helps["--cache_latents cpu"] = estimate.leave_out_encoders().count(least)
    return ", ".join(
        f"{size / 1e9:.3g} GB with {name}" for name, size in helps.items() if size < count
    )


def advise_without_estimate(args: Namespace) -> str:
    if args.rank:
        return "try --base_precision int8 or nf4, or a smaller --resolution"
    return "try --full_bf16, or a LoRA with --rank 16"
