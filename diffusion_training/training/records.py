"""What a run reports: metrics.jsonl, trackers, progress bar, skipped images, waiting for data."""

import contextlib
import itertools
import json
import math
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from tqdm.auto import tqdm

from diffusion_training.errors import explained, fail
from diffusion_training.files import saving
from diffusion_training.loading import seconds_between
from diffusion_training.training.checkpoints import find_checkpoints
from diffusion_training.training.costs import Costs
from diffusion_training.training.models import Prepared
from diffusion_training.training.signs import find_signs, read_metrics


class Records:
    """Collects and reports how a run is doing.

    `watch`, `look` and `add` only take notes; only `update` waits for the device.

    lora_b: see `list_lora_b`; empty without a LoRA.
    costs: `Costs`, if they are to be recorded.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        global_step: int,
        num_left_out: int,
        checkpoint: Path | None,
        args: Namespace,
        lora_b: Sequence[torch.Tensor] = (),
        costs: Costs | None = None,
    ) -> None:
        self.accelerator, self.output_dir, self.args = accelerator, Path(args.output_dir), args
        # records of the run that is resumed
        kept = read_metrics(checkpoint.parent, global_step) if checkpoint else []
        self.held_out = next((record for record in reversed(kept) if "held_out_loss" in record), {})
        self.num_records = sum("loss" in record for record in kept)
        self.signs = {kind for record in kept for kind in record.get("signs", ())}
        if accelerator.is_main_process:  # what came after the checkpoint is recorded again
            with saving(args.output_dir, "metrics.jsonl") as unfinished:
                (unfinished / "metrics.jsonl").write_text(
                    "".join(json.dumps(record) + "\n" for record in kept)
                )
        flags = {name: x for name, x in vars(args).items() if x is not None}
        flags = {
            name: " | ".join(map(str, x)) if isinstance(x, list) else x for name, x in flags.items()
        }
        advice = (
            "`wandb login`, or set WANDB_MODE=offline, or "
            if args.report_to in ("wandb", "all")
            else ""
        )
        with explained(f"--report_to {args.report_to} does not work: {advice}--report_to none"):
            accelerator.init_trackers(
                args.tracker_project_name, flags, {"wandb": {"dir": args.output_dir}}
            )
        main = accelerator.is_main_process
        self.bar = tqdm(
            total=args.max_train_steps, initial=global_step, desc="Steps", disable=not main
        )
        # since the last record: sums of `train_step`, number of clipped steps, number of steps
        self.sums = torch.zeros(5, device=accelerator.device)
        # of the first batches: see `measure_images`
        self.images = torch.zeros(6, device=accelerator.device)
        self.waits, self.num_images, self.start, self.looked_at = [], 0, time.perf_counter(), 0
        self.skipped = {
            name: reason for record in kept for name, reason in record.get("skipped", {}).items()
        }
        self.num_told, self.new_skipped, self.num_left_out = len(self.skipped), {}, num_left_out
        self.losses = [(record["epoch"], record["loss"]) for record in kept if "loss" in record]
        self.sampled: tuple[int, float] | None = None  # see `judge`
        self.any_decoded, self.lora_b, self.costs, self.told = (
            checkpoint is not None,
            lora_b,
            costs,
            False,
        )

    def watch(self, batches: Iterable[dict]) -> Iterator[dict]:
        """Pass batches on; note images that could not be decoded, and how long each batch took."""
        for batch in batches:
            self.new_skipped.update(batch["skipped"])
            self.waits.append(batch["waited"])
            yield batch

    def look(self, prepare_batch: Callable[[dict], Prepared]) -> Callable[[dict], Prepared]:
        """Return `prepare_batch` with a look at the first images that it returns."""

        def prepare(batch: dict) -> Prepared:
            images, condition, loss_inputs = prepare_batch(batch)
            # per process; enough to tell whether the model gets proper images
            if self.looked_at < 100:
                self.looked_at += len(images)
                self.images += measure_images(images, batch["weight"])
                if self.costs and self.accelerator.is_main_process:
                    with self.paused():
                        self.costs.look(images, condition)
            return images, condition, loss_inputs

        return prepare

    def judge(self, samples: torch.Tensor | None, step: int) -> None:
        """Note how rough samples [N, C, H, W] are, for `find_signs`; None if there are none."""
        if samples is not None:
            self.sampled = (
                step,
                measure_images(samples, torch.ones(len(samples)) / len(samples))[4].item(),
            )

    def add(self, sums: torch.Tensor, num_images: int, epoch: int, lr: float) -> None:
        """Add the result of `train_step` for a step with `num_images` on all processes together."""
        one, clipped = torch.ones_like(sums[:1]), sums[2:3] > (self.args.max_grad_norm or math.inf)
        self.sums += torch.cat([sums, clipped, one])
        self.num_images, self.epoch, self.lr = self.num_images + num_images, epoch, lr
        self.bar.update(1)  # only counts: showing the loss would wait for the device

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the time inside, for saving and sampling, out of images per second."""
        begin = time.perf_counter()
        yield
        pause = time.perf_counter() - begin
        self.start += pause
        if not self.bar.disable:  # and out of the bar's estimate of a step
            self.bar.start_t += pause
            self.bar.last_print_t += pause

    def update(self, step: int, log: bool, last: bool) -> None:
        """Wait for the device, check the steps since the last record, and write one if `log`."""
        norms = torch._foreach_norm(self.lora_b) if self.lora_b else [torch.ones_like(self.sums[0])]
        learned = torch.stack(norms).sum()[None]
        sums = self.accelerator.reduce(torch.cat([learned, self.sums, self.images])).tolist()
        learned, total_loss, total_weight, total_norm, clipped, steps, *images = sums
        for name, reason in gather_object(sorted(self.new_skipped.items())):
            if name not in self.skipped and self.accelerator.is_main_process:
                self.bar.write(f"Skipped {name} ({reason})", file=sys.stderr)
            self.skipped[name] = reason
        self.new_skipped = {}
        self.any_decoded = self.any_decoded or total_weight > 0
        if self.costs and self.accelerator.is_main_process and not self.told:
            self.told = self.bar.write(self.costs.describe()) is None
        if total_weight == 0 and (self.num_images >= 100 or (last and not self.any_decoded)):
            fail(f"none of the last {self.num_images} images could be decoded")
        if not math.isfinite(total_loss + total_norm):  # before anything is saved
            kept = find_checkpoints(self.output_dir)
            where = f"at step {step} (last checkpoint: {kept[-1] if kept else 'none'})"
            fail(
                f"the loss is not finite {where}; try a lower --learning_rate or more "
                "--lr_warmup_steps"
            )
        if not log or total_weight == 0:
            return
        now = time.perf_counter()
        duration = now - self.start
        record = {
            "step": step,
            "epoch": self.epoch,
            "loss": total_loss / total_weight,
            "lr": self.lr,
            "grad_norm": total_norm / steps,
            "clipped": clipped / steps,  # share of the steps
            "images_per_second": self.num_images / duration,
            # share of the time
            "data_wait": sum(seconds_between(*wait) for wait in self.waits) / duration,
            "skipped_images": len(self.skipped) + self.num_left_out,
        }
        self.losses.append((self.epoch, record["loss"]))
        # the epoch of this record, or of the one before it
        ended = self.losses[-1 if last else -2 :][0][0]
        if last or ended != self.epoch:
            found = [loss for epoch, loss in self.losses if epoch == ended]
            record["epoch_loss"] = sum(found) / len(found)
        if self.costs and self.accelerator.is_main_process:
            record |= self.costs.measure(record["images_per_second"])
        self.bar.set_postfix_str(
            f"loss={record['loss']:.4f}, lr={self.lr:.1e}, "
            f"{record['images_per_second']:.1f} img/s, "
            f"{record['data_wait']:.1%} waiting for data"
            + (f", {record['mfu']:.0%} of the peak" if "mfu" in record else "")
            + (f", held out {self.held_out['held_out_loss']:.4f}" if self.held_out else "")
        )
        signs, self.num_records = {}, self.num_records + 1
        if self.accelerator.is_main_process and (last or self.num_records.bit_count() == 1):
            # At records 1, 2, 4, 8 ...: early but seldom, because all records are read.
            images = [total / images[-1] for total in images[:-1]] if images[-1] else None
            signs = find_signs(
                [*read_metrics(self.output_dir), record],
                images,
                self.args,
                learned,
                self.costs,
                self.sampled,
            )
            signs = {kind: text for kind, text in signs.items() if kind not in self.signs}
            self.signs |= signs.keys()
        for text in signs.values():
            self.bar.write(f"Worth a look: {text}", file=sys.stderr)
        skipped = dict(itertools.islice(self.skipped.items(), self.num_told, None))
        self.num_told, more = len(self.skipped), {"signs": signs, "skipped": skipped}
        self.write(record | {name: value for name, value in more.items() if value})
        self.sums.zero_()
        # each record covers what came since the last one
        self.waits, self.num_images, self.start = [], 0, now

    def write(self, record: dict[str, Any]) -> None:
        """Add a record to metrics.jsonl and the trackers."""
        if self.accelerator.is_main_process:
            with (self.output_dir / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(record) + "\n")
        numbers = {
            key: value for key, value in record.items() if key not in ("step", "signs", "skipped")
        }
        self.accelerator.log(numbers, step=record["step"])


@torch.no_grad()
def measure_images(images: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return sums over images [N, C, H, W] of `weight` [N] times six measures.

    They are: lowest value, highest value, mean square, 1 if flat (of one colour), roughness, 1.
    Roughness is the mean squared difference of neighbours over twice the variance: 1 for white
    noise, near 0 for smooth images. By the Wiener-Khinchin theorem it is the power at high
    frequencies.
    """
    values = images.flatten(1)
    low, high = values.aminmax(dim=1)
    found = [low, high, values.square().mean(dim=1), (low == high).float()]
    rough = images.diff(dim=-1).square().mean(dim=(1, 2, 3)) / (
        2 * values.var(dim=1, unbiased=False)
    )
    found += [rough.nan_to_num(0, 0, 0), torch.ones_like(low)]
    return weight @ torch.stack(found, dim=1)
