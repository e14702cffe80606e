"""Cost of training a transformer or a U-Net from scratch, counted from its shapes.

    python benchmarks/plan.py --images 2e9 --peak_tflops 989 --mfu 0.4 0.248

Operations are per image: forward and backward for the trained model, forward for the encoders.
Hours and dollars are computed from the operations, a device's peak, the used share of it (mfu in a
run's records) and its price. Nothing is measured.
"""

import argparse
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from diffusers import AutoencoderDC, AutoencoderKL, PRXTransformer2DModel, UNet2DModel
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    Gemma2Config,
    Gemma2Model,
    T5Config,
    T5EncoderModel,
)

sys.path.insert(0, str(Path(__file__).parent.parent))
from diffusion_training.batches import Prepared
from diffusion_training.families.known import load_family
from diffusion_training.training.step.costs import PEAKS, count_flops
from train_flow import predict_velocity

ROOT = Path(__file__).parent.parent
TRANSFORMERS = ["prx_163m", "prx_1.2b"]
PHASES = {256: 0.8, 512: 0.2}  # side in pixels: share of the training images
U_NET_STEPS = 500_000  # of 64 images
DEVICES = {
    name: PEAKS[key][0] for name, key in (("RTX 4090", "GeForce RTX 4090$"), ("H100", "H100"))
}
TOKENS, MEAN_TOKENS = 256, 40  # per caption: the most, and mean without padding
BATCH_TOKENS = [64, 128, TOKENS]  # to which a batch's longest caption is rounded up
KL = {"block_out_channels": (128, 256, 512, 512), "layers_per_block": 2, "latent_channels": 16}
KL |= {"down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4}
T5_XXL = {
    "d_model": 4096,
    "d_ff": 10240,
    "num_layers": 24,
    "num_heads": 64,
    "feed_forward_proj": "gated-gelu",
}
# Text encoder: (function that builds its published shape, width of an embedding).
TEXT = {
    "CLIP L": (
        lambda: CLIPTextModel(
            CLIPTextConfig(
                hidden_size=768,
                intermediate_size=3072,
                num_attention_heads=12,
                max_position_embeddings=TOKENS,
            )
        ),
        768,
    ),
    "Gemma 2 2B": (lambda: Gemma2Model(Gemma2Config()), 2304),
    "T5 XXL": (lambda: T5EncoderModel(T5Config(**T5_XXL)), 4096),
}


def count(function):
    """Count the operations of a forward pass, in 1e12."""
    with torch.device("meta"), torch.no_grad(), FlopCounterMode(display=False) as counter:
        function()
    return counter.get_total_flops() / 1e12


def count_transformer(name, side, tokens=BATCH_TOKENS[0]):
    """Return (number of weights, operations of a training step on one image in 1e12).

    tokens: in a caption, with padding.
    """
    config = PRXTransformer2DModel.load_config(ROOT / "configs" / f"{name}.json")
    with torch.device("meta"):
        model = PRXTransformer2DModel.from_config(config)
    prompts = {"prompt_embeds": torch.zeros(1, tokens, config["context_in_dim"])}
    prompts["prompt_mask"] = torch.ones(1, tokens, dtype=torch.bool)
    latents = torch.zeros(1, config["in_channels"], side // 8, side // 8)

    def loss(models, prepared, weight):
        sigmas = torch.zeros(1)
        images, condition = prepared.clean, prepared.condition
        return predict_velocity(load_family("prx"), models, images, sigmas, condition).sum()

    objective = SimpleNamespace(loss=loss)
    flops = count_flops({"transformer": model}, objective, Prepared(latents, prompts, {}))
    return sum(weight.numel() for weight in model.parameters()), flops / 1e12


def count_unet(name):
    """Return the operations of a training step of a U-Net on one image in 1e12."""
    config = UNet2DModel.load_config(ROOT / "configs" / f"{name}.json")
    with torch.device("meta"):
        model = UNet2DModel.from_config(config)

    def loss(models, prepared, weight):
        return models["unet"](prepared.clean, torch.zeros(1)).sample.sum()

    images = torch.zeros(1, 3, config["sample_size"], config["sample_size"])
    return count_flops({"unet": model}, SimpleNamespace(loss=loss), Prepared(images, {}, {})) / 1e12


def main(args):
    def price(tflop, images, mfu):
        hours = images * tflop / (args.peak_tflops * mfu) / 3600
        return f"{hours:,.0f} h, ${hours * args.dollars_per_hour:,.0f}"

    print(f"{args.peak_tflops:g} TFLOP/s, ${args.dollars_per_hour:g} per hour\n")
    sides = list(PHASES)
    plans = [(images, mfu) for images in args.images for mfu in args.mfu]
    heads = [f"TFLOP at {side} px" for side in sides]
    heads += [f"{images / 1e6:,.0f} million images at {mfu:.3g}" for images, mfu in plans]
    print(f"| transformer | weights | {' | '.join(heads)} |\n|---|---|{'---|' * len(heads)}")
    trained = {}
    for name in TRANSFORMERS:
        found = [count_transformer(name, side) for side in sides]
        trained[name] = sum(
            share * flops for share, (_, flops) in zip(PHASES.values(), found, strict=True)
        )
        cells = [f"{flops:.2f}" for _, flops in found]
        cells += [price(trained[name], *each) for each in plans]
        print(f"| {name} | {found[0][0] / 1e6:,.0f} M | {' | '.join(cells)} |", flush=True)

    heads = " | ".join(f"{tokens} tokens" for tokens in BATCH_TOKENS)
    print(f"\n| TFLOP with captions padded to | px | {heads} |\n|---|---|{'---|' * 3}")
    for name in TRANSFORMERS:
        for side in sides:
            found = [count_transformer(name, side, tokens)[1] for tokens in BATCH_TOKENS]
            cells = [f"{flops:.3f}, {flops / found[-1]:.2f} x" for flops in found]
            print(f"| {name} | {side} | {' | '.join(cells)} |", flush=True)

    first, texts = TRANSFORMERS[0], {}
    print(
        f"\n| text encoder | TFLOP for {TOKENS} tokens | as a multiple of {first}'s step "
        f"| a row with padding | a row of {MEAN_TOKENS} tokens |"
    )
    print("|---|---|---|---|---|")
    for name, (make, width) in TEXT.items():
        with torch.device("meta"):
            model = make()
        texts[name] = flops = count(
            lambda model=model: model(torch.ones(1, TOKENS, dtype=torch.long))
        )
        sizes = " | ".join(
            f"{2 * width * tokens / 1e3:,.0f} kB" for tokens in (TOKENS, MEAN_TOKENS)
        )
        print(f"| {name} | {flops:.2f} | {flops / trained[first]:.1f} | {sizes} |", flush=True)

    print(
        "\n| VAE | "
        + " | ".join(f"TFLOP at {side} px" for side in sides)
        + " |\n|---|"
        + "---|" * len(sides)
    )
    with torch.device("meta"):
        vaes = {"AutoencoderKL": AutoencoderKL(**KL), "AutoencoderDC": AutoencoderDC()}
    for name, vae in vaes.items():
        found = [
            count(lambda vae=vae, side=side: vae.encode(torch.zeros(1, 3, side, side)))
            for side in sides
        ]
        print(f"| {name} | {' | '.join(f'{flops:.2f}' for flops in found)} |", flush=True)
        if name == "AutoencoderKL":
            images = sum(found)
    print(
        "\n| text encoder, and AutoencoderKL | TFLOP in two passes | in one pass | share |\n"
        "|---|---|---|---|"
    )
    for name, flops in texts.items():
        each, one = images + len(sides) * flops, images + flops
        print(f"| {name} | {each:.2f} | {one:.2f} | {one / each:.2f} |")

    heads = ["TFLOP per image", *(f"hours, {device}" for device in DEVICES)]
    print(f"\n| U-Net | {' | '.join(heads)} |\n|---|{'---|' * len(heads)}")
    for side in (32, 64, 128, 256):
        flops = count_unet(f"unet_{side}")
        seconds = [64 * U_NET_STEPS * flops / peak / args.mfu[-1] for peak in DEVICES.values()]
        hours = " | ".join(f"{each / 3600:,.1f}" for each in seconds)
        print(f"| unet_{side} | {flops:.3f} | {hours} |")


def parse_args(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--images",
        type=float,
        nargs="+",
        default=[2e9],
        help="images seen in training, over all epochs",
    )
    parser.add_argument(
        "--peak_tflops",
        type=float,
        default=989,
        help="peak of the device in TFLOP/s (989: H100, dense bf16)",
    )
    parser.add_argument(
        "--mfu",
        type=float,
        nargs="+",
        default=[0.4, 0.248],
        help="used share of the peak (0.4: an assumption; 0.248: measured, docs/benchmarks.md)",
    )
    parser.add_argument(
        "--dollars_per_hour", type=float, default=3.0, help="price of the device (an assumption)"
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    main(parse_args())
