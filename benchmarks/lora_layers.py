"""What do a LoRA's layers cost the host? Times steps of an SDXL U-Net with its true layers, narrow.

    python benchmarks/lora_layers.py                # a minute on one core

At batch 1, an SDXL LoRA waits for the host on a fast GPU. So the U-Net has SDXL's number of blocks,
of few channels each, and processor time is measured: a forward pass in bf16, a backward pass, and
AdamW. The ways take turns, and each is divided by peft's in the same turn:

- frozen: without a LoRA. The backward pass goes to the U-Net's input.
- peft: the layers that peft makes
- no cast: peft's own switch, `cast_input_dtype_enabled = False`. peft casts each input to float32,
  and autocast casts the copy back.
- lean: two products and a sum in one function, for one adapter with alpha = rank
- lean, inline: the same with the frozen product, too

Prints whether the loss and the gradients have peft's bits after the steps.
"""

import argparse
import contextlib
import statistics
import time
import types

import bench
import memory
import torch
import torch.nn.functional as F
from diffusers import UNet2DConditionModel

from diffusion_training.families.lora_layers import LAYERS


def add_lean(layer, inputs):
    result = layer.base_layer(inputs)
    a, b = layer.lora_A.default.weight, layer.lora_B.default.weight
    return result + F.linear(F.linear(inputs, a), b)


def add_inline(layer, inputs):
    base = layer.base_layer
    result = F.linear(inputs, base.weight, base.bias)
    a, b = layer.lora_A.default.weight, layer.lora_B.default.weight
    return result + F.linear(F.linear(inputs, a), b)


@contextlib.contextmanager
def computing(layers, way):
    """Let the layers of a LoRA compute in one of the ways in the block."""
    forward = {"lean": add_lean, "lean, inline": add_inline}.get(way)
    for layer in layers:
        if forward:
            layer.forward = types.MethodType(forward, layer)
        layer.cast_input_dtype_enabled = way == "peft"
        layer._disable_adapters = way == "frozen"
    yield
    for layer in layers:
        vars(layer).pop("forward", None)


def make_unet(channels, rank):
    """An SDXL U-Net with a LoRA in the layers that a recipe trains."""
    config = memory.SDXL | {
        "block_out_channels": [channels, channels, channels],
        "attention_head_dim": [1, 2, 2],
        "norm_num_groups": 8,
        "cross_attention_dim": channels,
        "projection_class_embeddings_input_dim": 6 * 8 + channels,
        "addition_time_embed_dim": 8,
    }
    torch.manual_seed(0)
    unet = UNet2DConditionModel.from_config(config)
    memory.add_adapter("SDXL", unet, LAYERS["UNet2DConditionModel"].default, rank, torch.bfloat16)
    for name, weight in unet.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=0.02)
    return unet


def take_step(unet, optimizer, channels):
    """Take a step. Returns its loss."""
    draw = torch.Generator().manual_seed(0)
    latents = torch.randn(1, 4, 8, 8, generator=draw).requires_grad_()
    texts = torch.randn(1, 77, channels, generator=draw)
    added = {"text_embeds": torch.randn(1, channels, generator=draw)}
    added["time_ids"] = torch.zeros(1, 6)
    with torch.autocast("cpu", torch.bfloat16):
        prediction = unet(latents, torch.tensor([500]), texts, added_cond_kwargs=added).sample
    loss = prediction.float().square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name, default in (("rounds", 5), ("steps", 3), ("channels", 32), ("rank", 16)):
        parser.add_argument(f"--{name}", type=int, default=default)
    cli = parser.parse_args(argv)
    torch.set_num_threads(1)
    print(bench.machine())
    unet = make_unet(cli.channels, cli.rank)
    layers = [each for each in unet.modules() if hasattr(each, "base_layer")]
    trained = [weight for weight in unet.parameters() if weight.requires_grad]
    before = [weight.detach().clone() for weight in trained]
    ends = {}

    def measure(way):
        with torch.no_grad():
            for weight, value in zip(trained, before, strict=True):
                weight.copy_(value)
                weight.grad = None
        optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
        with computing(layers, way):
            take_step(unet, optimizer, cli.channels)
            begun = time.process_time()
            losses = [take_step(unet, optimizer, cli.channels) for _ in range(cli.steps)]
            seconds = time.process_time() - begun
        ends[way] = [torch.tensor(losses), *(each.detach().clone() for each in trained)]
        return seconds / cli.steps

    ways = ("frozen", "peft", "no cast", "lean", "lean, inline")
    found = bench.interleaved({way: (lambda way=way: measure(way)) for way in ways}, cli.rounds)
    rows = []
    for way, seconds in found.items():
        pairs = zip(seconds, found["peft"], strict=True)
        equal = all(map(torch.equal, ends[way], ends["peft"])) if way != "frozen" else ""
        ratio = bench.spread([one / other for one, other in pairs])
        rows.append([way, f"{1000 * statistics.median(seconds):.0f}", ratio, equal])
    header = ["", "CPU ms a step", "of peft's", "bits of peft's"]
    bench.show(f"{len(layers)} layers of rank {cli.rank}, {cli.channels} channels", header, rows)


if __name__ == "__main__":
    main()
