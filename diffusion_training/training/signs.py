"""metrics.jsonl, and the signs in it that training goes wrong."""

import contextlib
import json
import math
from pathlib import Path

from diffusion_training.files import fits

NUMBERS = ("epoch", "loss", "lr", "grad_norm", "clipped", "images_per_second", "data_wait", "skipped_images")
TRAINED = {"step": int} | dict.fromkeys(NUMBERS, int | float)  # what a record of training has
HELD_OUT = {"step": int, "held_out_loss": float}


def read_metrics(output_dir, last_step=math.inf):
    """The records of metrics.jsonl up to a step; a line that a kill, a power cut or a hand has spoilt is left out."""
    path, records = Path(output_dir) / "metrics.jsonl", []
    for line in path.read_bytes().splitlines() if path.is_file() else []:
        with contextlib.suppress(ValueError):
            record = json.loads(line)
            if (fits(record, TRAINED) or fits(record, HELD_OUT)) and record["step"] <= last_step:
                numbers = (record[name] for name in record.keys() - {"signs", "skipped"})
                words = all(fits(record.get(name, {}), dict) for name in ("signs", "skipped"))
                if words and all(fits(number, int | float) and math.isfinite(number) for number in numbers):
                    records.append(record)
    return records


def find_signs(records, images, args, learned=1.0):
    """Signs that training goes wrong, as {kind: a sentence with the flag to turn}; a sane run has none.

    records: those of metrics.jsonl. images: means over the first images that the U-Net is given, of their lowest and
    highest value, mean square and being of one colour; None if there were none. learned: 0 while all that a LoRA adds
    is 0. What takes time to judge waits for 100 steps after the warm-up.
    """
    records = [record for record in records if "loss" in record]  # others are of the images held out
    (low, high, mean_square, flat), last, latents = images or (-1, 1, 1, 0), records[-1], "latents_dir" in args
    judged = [record for record in records[1:] if record["step"] > args.lr_warmup_steps] or records  # 1: a cold start
    enough, ended = last["step"] >= args.lr_warmup_steps + 100, last["step"] >= args.max_train_steps
    soon = len(records) > 1 and last["step"] >= 30  # what is plain by then
    clipped = sum(record.get("clipped", 0) for record in judged) / len(judged)
    waiting = sum(record["data_wait"] for record in judged) / len(judged)
    rest = 1 - min(args.ema_max_decay, 1 - (1 + args.max_train_steps / args.ema_inv_gamma) ** -args.ema_power)
    of_peak = last["lr"] / max([record["lr"] for record in records if record["lr"]], default=1)
    turn = "precompute_latents.py" if latents else "--cache_images"
    turn = f"{turn}, or more --dataloader_num_workers than {args.dataloader_num_workers}"
    if getattr(args, "latents_dir", None) or getattr(args, "cache_images", False):
        turn = "a faster disk, or more memory, which the system keeps files in"
    signs = {
        "latents": latents and not 0.25 < mean_square < 4,
        "range": not latents and (low < -1.01 or high > 1.01 or low > -0.01),
        "colour": not latents and flat > 0.1,
        "clipped": (enough or ended and soon) and clipped > 0.5,
        "waiting": enough and waiting > 0.05 or soon and waiting > 0.25,
        "ema": enough and args.use_ema and rest * args.max_train_steps < 2.5,
        "lora": last["step"] >= 100 and learned == 0,
        "lr": enough and ended and not args.use_ema and of_peak > 0.1,
    }
    sentences = {
        "latents": f"the latents have a root mean square of {mean_square**0.5:.2g}, not of about 1: does the VAE's "
        "scaling_factor fit?",
        "range": f"images go from {low:.2g} to {high:.2g}, where black is -1 and white 1: see prepare_batch",
        "colour": f"{flat:.0%} of the images are of one colour: look at the data, and at --image_column",
        "clipped": f"gradients are clipped in {clipped:.0%} of steps: try a lower --learning_rate or larger batches",
        "waiting": f"the device waits for data {waiting:.0%} of the time: try {turn}",
        "ema": f"the averaged weights lag behind {args.max_train_steps} steps: lower --ema_max_decay or --ema_power",
        "lora": "the LoRA still changes nothing, all its B are 0: is --learning_rate 0, or a gradient cut off?",
        "lr": f"the learning rate ends at {of_peak:.0%} of its peak, so the weights keep the noise of the last steps: "
        "try --lr_scheduler cosine, or --use_ema",
    }
    return {kind: sentences[kind] for kind, wrong in signs.items() if wrong}
