"""What do a LoRA's layers cost the host? Times steps of an SDXL U-Net with its true layers, narrow.

    python benchmarks/lora_layers.py                # two minutes on one core
    python benchmarks/lora_layers.py --compile      # ten: compiled blocks as well

At batch 1, an SDXL LoRA waits for the host on a fast GPU. So the U-Net has SDXL's number of blocks,
of few channels each, and processor time is measured: a forward pass in bf16, a backward pass,
clipping, and AdamW. The ways take turns, and each is divided by peft's in the same turn:

- frozen: without a LoRA. The backward pass goes to the U-Net's input.
- peft: the layers that peft makes
- no cast: peft's own switch, `cast_input_dtype_enabled = False`. peft casts each input to float32,
  and autocast casts the copy back.
- lean: `LeanLinear` below
- compiled: the same with torch.compile, one transformer block at a time

Prints whether the loss and the weights have peft's bits after the steps.
"""

import argparse
import statistics
import time

import bench
import memory
import torch
import torch.nn.functional as F
from diffusers import UNet2DConditionModel
from peft.tuners.lora.layer import Linear

from diffusion_training.blocks import list_blocks
from diffusion_training.families.lora_layers import LAYERS
from diffusion_training.library_fixes import raise_recompile_limit


class LeanLinear(Linear):
    """A layer of peft without its casts, its product with a scale of 1, and two modules' calls.

    Only for what most runs have: one LoRA under autocast, without DoRA and dropout.
    """

    def forward(self, inputs):
        is_plain = self.scaling == {"default": 1} and not (self.disable_adapters or self.merged)
        if inputs.is_meta or not is_plain or not torch.is_autocast_enabled(inputs.device.type):
            return super().forward(inputs)
        result = self.base_layer(inputs)
        for part in (self.lora_A, self.lora_B):
            inputs = F.linear(inputs, part["default"].weight)
        return result + inputs


class Ways:
    """The ways in which the layers of a LoRA compute."""

    def __init__(self, unet):
        self.layers = [each for each in unet.modules() if isinstance(each, Linear)]
        self.blocks = [*list_blocks(unet).values()]
        self.compiled = {}  # {kind of layer: how the blocks are called}
        raise_recompile_limit(2 * len(self.blocks))

    def take(self, way):
        way, *compiled = way.split(", ")
        kind = LeanLinear if way == "lean" else Linear
        for layer in self.layers:
            layer.__class__ = kind
            layer.cast_input_dtype_enabled = way != "no cast"
            layer._disable_adapters = way == "frozen"
        if compiled and kind not in self.compiled:
            for block in self.blocks:
                block.compile()
            self.compiled[kind] = [block._compiled_call_impl for block in self.blocks]
        calls = self.compiled[kind] if compiled else [None] * len(self.blocks)
        for block, call in zip(self.blocks, calls, strict=True):
            block._compiled_call_impl = call


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
    weights = optimizer.param_groups[0]["params"]
    torch.nn.utils.clip_grad_norm_(weights, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name, default in (("rounds", 5), ("steps", 3), ("channels", 32), ("rank", 16)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--compile", action="store_true", help="compiled blocks as well")
    cli = parser.parse_args(argv)
    torch.set_num_threads(1)
    print(bench.machine())
    unet = make_unet(cli.channels, cli.rank)
    ways = Ways(unet)
    trained = [weight for weight in unet.parameters() if weight.requires_grad]
    before = [weight.detach().clone() for weight in trained]
    ends = {}

    def measure(way):
        ways.take(way)
        with torch.no_grad():
            for weight, value in zip(trained, before, strict=True):
                weight.copy_(value)
        optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
        take_step(unet, optimizer, cli.channels)
        begun = time.process_time()
        losses = [take_step(unet, optimizer, cli.channels) for _ in range(cli.steps)]
        seconds = time.process_time() - begun
        ends[way] = [torch.tensor(losses), *(each.detach().clone() for each in trained)]
        return seconds / cli.steps

    names = ["frozen", "peft", "no cast", "lean"]
    if cli.compile:
        names += ["peft, compiled", "lean, compiled"]
        for name in names[-2:]:
            measure(name)
    found = bench.interleaved({way: (lambda way=way: measure(way)) for way in names}, cli.rounds)
    rows = []
    for way, seconds in found.items():
        pairs = zip(seconds, found["peft"], strict=True)
        equal = all(map(torch.equal, ends[way], ends["peft"])) if way != "frozen" else ""
        ratio = bench.spread([one / other for one, other in pairs])
        rows.append([way, f"{1000 * statistics.median(seconds):.0f}", ratio, equal])
    header = ["", "CPU ms a step", "of peft's", "bits of peft's"]
    bench.show(
        f"{len(ways.layers)} layers of rank {cli.rank}, {cli.channels} channels", header, rows
    )


if __name__ == "__main__":
    main()
