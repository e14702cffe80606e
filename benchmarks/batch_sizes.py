"""How many images fit into a step of `train_unconditional.py`, and how fast are they? A Markdown table.

    python benchmarks/batch_sizes.py                                    # on a GPU: diffusers' U-Net, 64 to 256 px
    python benchmarks/batch_sizes.py --config demo/digits_unet.json --resolutions 8 --precisions no     # on a CPU

Finds the micro-batch as `--train_batch_size auto` does, then times whole steps of it on the same images: forward,
backward, clipping, optimizer; no data is loaded. Prints images per second and, on a GPU, the peak of its memory.
"""

import argparse
import itertools
import sys
import time
from pathlib import Path

import torch
from accelerate.state import AcceleratorState

sys.path.insert(0, str(Path(__file__).parent.parent))
import train_unconditional as script


def measure(config, resolution, precision, checkpointing, most, steps):
    """(micro-batch, images per second, GiB of the device at most, nan without a GPU)."""
    AcceleratorState._reset_state(True)
    argv = ["--train_data_dir=.", f"--resolution={resolution}", f"--mixed_precision={precision}"]
    argv += [f"--model_config_name_or_path={config}"] * bool(config) + ["--gradient_checkpointing"] * checkpointing
    args = script.parse_args(argv)
    accelerator, _ = script.make_accelerator(args)
    unet, scheduler = script.make_unet(args), script.make_noise_scheduler(args)
    image = torch.zeros(1, unet.config.in_channels, resolution, resolution, dtype=torch.uint8)
    batch = {"pixel_values": image, "weight": torch.ones(1)}
    size = script.largest_batch(accelerator, unet, scheduler, batch, None, most, args)
    script.put_on_device(unet, accelerator.device)
    if checkpointing:
        unet.enable_gradient_checkpointing()
    fused = accelerator.scaler is None
    unet, optimizer = accelerator.prepare(unet, torch.optim.AdamW(unet.parameters(), fused=fused))
    many = {name: value.repeat_interleave(size, 0).to(accelerator.device) for name, value in batch.items()}
    batches, cuda = itertools.repeat(many), accelerator.device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    for step in range(2 + steps):
        if step == 2:  # the first two warm up
            accelerator.wait_for_everyone()
            torch.cuda.synchronize() if cuda else None
            start = time.perf_counter()
        script.train_step(accelerator, unet, optimizer, scheduler, batches, 1, step, None, args)
    torch.cuda.synchronize() if cuda else None
    speed = size * steps / (time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() / 2**30 if cuda else float("nan")
    unet = optimizer = many = batches = None
    accelerator.free_memory()
    return size, speed, peak


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--config", help="U-Net config (None: the one of diffusers' script)")
    parser.add_argument("--resolutions", type=int, nargs="+", default=[64, 128, 256])
    parser.add_argument("--precisions", nargs="+", default=["no", "bf16"])
    parser.add_argument("--most", type=int, default=4096, help="images in a step at most")
    parser.add_argument("--steps", type=int, default=10, help="that are timed")
    args = parser.parse_args(argv)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(f"{device}\n\n| pixels | precision | gradient checkpointing | micro-batch | images/s | GiB |")
    print("|---|---|---|---|---|---|")
    for resolution, precision, checkpointing in itertools.product(args.resolutions, args.precisions, (False, True)):
        size, speed, peak = measure(args.config, resolution, precision, checkpointing, args.most, args.steps)
        print(
            f"| {resolution} | {precision} | {'yes' if checkpointing else 'no'} | {size} | {speed:.1f} | {peak:.1f} |"
        )


if __name__ == "__main__":
    main()
