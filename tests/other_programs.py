"""The keys that other programs read from a LoRA file, and their arithmetic.

The names follow from a U-Net's config. ComfyUI and A1111 number its blocks as they were published,
sd-scripts as diffusers does, but SDXL's as published. Sources: ComfyUI's comfy/lora.py and
comfy/weight_adapter, and sd-scripts' networks/lora.py.
"""

import torch
from original_layout import name_unet

PREFIX = "model.diffusion_model."
# ComfyUI's names of B, which follow the name of a layer
UPS = (".lora_up.weight", "_lora.up.weight", ".lora_B.weight", ".lora.up.weight")
RESIZE = ("ResnetBlock2D", "Downsample2D", "Upsample2D")  # with sd-scripts' conv_dim


def list_layers(unet):
    """{diffusers' name: the published one} of the layers with a weight."""
    names = name_unet(unet)
    return {
        name.removesuffix(".weight"): names[name].removeprefix(PREFIX).removesuffix(".weight")
        for name, weight in unet.named_parameters()
        if name.endswith(".weight") and weight.dim() > 1
    }


def comfy_names(unet):
    """{name that ComfyUI looks for: diffusers' name of the layer}."""
    known = {}
    for name, published in list_layers(unet).items():
        known[f"diffusion_model.{published}"] = name
        known[f"lora_unet_{published.replace('.', '_')}"] = name
        known[f"lora_unet_{name.replace('.', '_')}"] = name
        plain = name.replace(".to_", ".processor.to_")  # as diffusers named them before PEFT
        plain = plain[:-2] if plain.endswith(".to_out.0") else plain
        known |= {plain: name, f"unet.{plain}": name}
    return known


def sd_scripts_names(unet):
    """{name that sd-scripts look for: diffusers' name of the layer}; SDXL's are translated first.

    Only layers in transformers and in blocks that change the size can have a LoRA.
    """
    kinds = ("Transformer2DModel", *RESIZE)
    blocks = [name for name, module in unet.named_modules() if type(module).__name__ in kinds]
    return {
        f"lora_unet_{name.replace('.', '_')}": name
        for name in list_layers(unet)
        if name.startswith(tuple(f"{block}." for block in blocks))
    }


def list_applied(keys, known):
    """The layers of a file that a program applies, and the keys that it leaves out."""
    applied = {known[name] for name in known if any(f"{name}{end}" in keys for end in UPS)}
    ends = (
        ".lora_down.weight", ".lora_up.weight", ".alpha", ".dora_scale", ".lora_A.weight",
        ".lora_B.weight",
    )  # fmt: skip
    used = {f"{name}{end}" for name in known if known[name] in applied for end in ends}
    return applied, set(keys) - used


@torch.no_grad()
def apply_as_comfy(unet, file):
    """Add a file to a U-Net's weights with ComfyUI's arithmetic, at strength 1."""
    for name, layer in comfy_names(unet).items():
        if f"{name}.lora_up.weight" not in file:
            continue
        up, down = (file[f"{name}.lora_{way}.weight"].float() for way in ("up", "down"))
        weight = unet.get_submodule(layer).weight
        delta = (up.flatten(1) @ down.flatten(1)).reshape(weight.shape)
        adapted = weight + delta * file[f"{name}.alpha"].item() / len(down)
        if f"{name}.dora_scale" in file:
            scale = file[f"{name}.dora_scale"].float()
            assert len(scale) == len(weight)  # or ComfyUI takes it for one value per input
            norm = weight.flatten(1).norm(dim=1).view(-1, *[1] * (weight.dim() - 1))
            adapted = adapted * (scale / (norm + torch.finfo(torch.float32).eps))
        weight.copy_(adapted)
    return unet


@torch.no_grad()
def apply_lokr_as_comfy(model, file, names):
    """Add a LoKr file to weights as ComfyUI does at strength 1. Returns the keys that it reads.

    names: {its name for a layer: the layer}. See comfy/weight_adapter/lokr.py.
    """
    read = set()
    for name, layer in names.items():
        parts = {key: value for key, value in file.items() if key.rpartition(".")[0] == name}
        if not parts:
            continue
        read |= parts.keys()
        part = {key.rpartition(".")[2]: value.float() for key, value in parts.items()}
        scale = 1.0
        w2 = part.get("lokr_w2")
        if w2 is None:
            w2 = part["lokr_w2_a"] @ part["lokr_w2_b"]
            if "alpha" in part:
                scale = part["alpha"] / len(part["lokr_w2_b"])
        w1 = part["lokr_w1"]
        if w2.dim() == 4:
            w1 = w1[:, :, None, None]
        weight = model.get_submodule(layer).weight
        weight += scale * torch.kron(w1, w2).reshape(weight.shape)
    return read
