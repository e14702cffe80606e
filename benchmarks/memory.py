"""Memory of training published U-Nets, counted from their shapes without any weights.

    python benchmarks/memory.py            # seconds, on any machine

Prints four tables, for one process:

1. Weights, gradients, optimizer state and averaged weights, in GB of 1e9 bytes. The activations
   that the forward pass keeps are added to them, and grow with the number and size of the images.
   A GPU needs some more.
2. Text encoders: what tokens in place of embeddings (`--text_cache ids`) add to a step.
3. Operations of a training step, per image.
4. Activations that the forward pass keeps, per image, in float32 and with attention in one fused
   kernel, which keeps queries, keys, values and result.
"""

import argparse
import json
import sys
from pathlib import Path
from unittest.mock import patch

import torch
from diffusers import UNet2DConditionModel, UNet2DModel
from torch.utils.flop_counter import FlopCounterMode
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

sys.path.insert(0, str(Path(__file__).parent.parent))
from diffusion_training.batches import Prepared
from diffusion_training.models import call_unet
from diffusion_training.training.costs import count_flops, count_moments

CONFIGS = Path(__file__).parent.parent / "configs"
SD2 = json.loads((CONFIGS / "stable_diffusion_v2_base_unet.json").read_text())
SD1 = {**SD2, "attention_head_dim": 8, "cross_attention_dim": 768, "use_linear_projection": False}
SDXL = json.loads((CONFIGS / "stable_diffusion_xl_base_unet.json").read_text())
VIT_L = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
}
VIT_H = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 23,
    "num_attention_heads": 16,
}
VIT_G = {
    "hidden_size": 1280,
    "intermediate_size": 5120,
    "num_hidden_layers": 32,
    "num_attention_heads": 20,
}
VIT_G["projection_dim"] = 1280
# Name: (U-Net, text encoders, resolutions that it is trained at).
MODELS = {
    "Stable Diffusion 1.5": (SD1, [(CLIPTextModel, VIT_L)], (256, 512)),
    "Stable Diffusion 2": (SD2, [(CLIPTextModel, VIT_H)], (256, 512)),
    "SDXL": (SDXL, [(CLIPTextModel, VIT_L), (CLIPTextModelWithProjection, VIT_G)], (512, 1024)),
}
# Models of the last table and their resolutions; the files are for train_unconditional.py.
KEPT = {"unet_64.json": (64, 128, 256), "unet_256.json": (64, 128, 256)}
KEPT |= {name: sides for name, (_, _, sides) in MODELS.items() if name != "Stable Diffusion 1.5"}
# Flags: (optimizer, whether weights are averaged, rank of the adapter).
WAYS = {
    "as it stands: AdamW, averaged weights": ("adamw", True, None),
    "`--optimizer adamw8bit`": ("adamw8bit", True, None),
    "`--no-use_ema`": ("adamw", False, None),
    "`--optimizer adamw8bit --no-use_ema`": ("adamw8bit", False, None),
    "`--rank 16 --mixed_precision bf16`": ("adamw", True, 16),
}


def make_unet(config, rank=None):
    """Build a U-Net on the meta device, without weights.

    With a rank, everything is frozen except for LoRA adapters at its attention layers.
    """
    with torch.device("meta"):
        unet = UNet2DConditionModel.from_config(config)
        if rank:
            from peft import LoraConfig

            unet.requires_grad_(False)
            unet.add_adapter(
                LoraConfig(r=rank, target_modules=["to_k", "to_q", "to_v", "to_out.0"])
            )
    return unet


def count_bytes(unet, optimizer, averaged):
    """Count the bytes of a training step by kind.

    Trainable weights are in float32, frozen ones in 16 bits.
    """
    trained = [parameter for parameter in unet.parameters() if parameter.requires_grad]
    frozen = sum(
        parameter.numel() for parameter in unet.parameters() if not parameter.requires_grad
    )
    numbers = sum(parameter.numel() for parameter in trained)
    moments = sum(count_moments(parameter, optimizer) for parameter in trained)
    return {
        "weights": 4 * numbers + 2 * frozen, "gradients": 4 * numbers, "moments": moments,
        "averaged": 4 * numbers * averaged,
    }  # fmt: skip


def give_inputs(config, resolution):
    """Return (latents of one image of `resolution` pixels, the U-Net's other inputs)."""
    condition = {"encoder_hidden_states": torch.zeros(1, 77, config["cross_attention_dim"])}
    if config.get("addition_embed_type"):
        condition |= {"text_embeds": torch.zeros(1, 1280), "time_ids": torch.zeros(1, 6)}
    return torch.zeros(1, 4, resolution // 8, resolution // 8), condition


def count_step(config, resolution):
    """Count the operations of a forward and backward pass on one image, as the trainers do."""

    def loss(models, prepared, weight):
        timesteps = torch.zeros(1)
        return call_unet(models["unet"], prepared.images, timesteps, prepared.condition).sum()

    prepared = Prepared(*give_inputs(config, resolution), {})
    return count_flops({"unet": make_unet(config)}, loss, prepared)


class OneKernel(torch.autograd.Function):
    """Attention that keeps the same tensors as a fused kernel; shapes only."""

    @staticmethod
    def forward(ctx, query, key, value):
        result = torch.empty_like(query)
        ctx.save_for_backward(query, key, value, result)
        return result


def count_kept(name, resolution):
    """Count the bytes of activations per image of a model in KEPT."""
    with torch.device("meta"):
        if name in MODELS:
            unet, inputs = make_unet(MODELS[name][0]), give_inputs(MODELS[name][0], resolution)
        else:
            unet = UNet2DModel.from_config(UNet2DModel.load_config(CONFIGS / name))
            inputs = torch.zeros(1, 3, resolution, resolution), {}
        weights, kept = {id(weight) for weight in unet.parameters()}, {}

        def keep(tensor):
            base, storage = (
                tensor if tensor._base is None else tensor._base,
                tensor.untyped_storage(),
            )
            if id(base) not in weights:
                kept[storage._cdata] = storage  # kept alive, so that no address is reused
            return tensor

        attend = lambda query, key, value, **options: OneKernel.apply(query, key, value)  # noqa: E731
        with patch("torch.nn.functional.scaled_dot_product_attention", attend):
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                result = call_unet(unet.train(), inputs[0], torch.zeros(1), inputs[1])
    assert result.requires_grad
    return sum(storage.nbytes() for storage in kept.values())


def count_encoders(config, kinds, resolution):
    """Return the size and the relative cost of text encoders.

    (bytes in 16 bits, their operations divided by those of a training step of the U-Net).
    """
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        encoders = [kind(CLIPTextConfig(**shape)) for kind, shape in kinds]
        for encoder in encoders:
            encoder(torch.ones(1, 77).long())
    share = counter.get_total_flops() / count_step(config, resolution)
    return 2 * sum(p.numel() for encoder in encoders for p in encoder.parameters()), share


def main(argv=None):
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args(argv)
    print(
        "| U-Net | flags | weights | gradients | moments | averaged | in a step, GB |\n"
        "|---|---|---|---|---|---|---|"
    )
    for name, (config, _, _) in MODELS.items():
        unets = {rank: make_unet(config, rank) for rank in {rank for _, _, rank in WAYS.values()}}
        for way, (optimizer, averaged, rank) in WAYS.items():
            counts = count_bytes(unets[rank], optimizer, averaged)
            cells = [f"{count / 1e9:.2f}" for count in (*counts.values(), sum(counts.values()))]
            print(f"| {name} | {way} | {' | '.join(cells)} |", flush=True)
    print(
        "\n| text encoders of | GB in 16 bits | operations, beside those of a step |\n|---|---|---|"
    )
    for name, (config, kinds, resolutions) in MODELS.items():
        found = [count_encoders(config, kinds, resolution) for resolution in resolutions]
        shares = ", ".join(
            f"{100 * share:.1f} % at {side} px"
            for (_, share), side in zip(found, resolutions, strict=True)
        )
        print(f"| {name} | {found[0][0] / 1e9:.1f} | {shares} |", flush=True)
    print("\n| U-Net | px | TFLOP an image |\n|---|---|---|")
    for name, (config, _, resolutions) in MODELS.items():
        for side in resolutions:
            print(f"| {name} | {side} | {count_step(config, side) / 1e12:.2f} |", flush=True)
    print("\n| U-Net | px | MB an image | times the smallest |\n|---|---|---|---|")
    for name, sides in KEPT.items():
        counts = [count_kept(name, side) for side in sides]
        for side, count in zip(sides, counts, strict=True):
            print(f"| {name} | {side} | {count / 1e6:,.0f} | {count / counts[0]:.1f} |", flush=True)


if __name__ == "__main__":
    main()
