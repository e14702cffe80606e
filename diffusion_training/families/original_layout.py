"""The names of weights in the single files in which Stable Diffusion was published.

ComfyUI and A1111 read such files, and sd-scripts uses these names for the layers of SDXL. Weights
are renamed from diffusers' and transformers' names. OpenCLIP's query, key and value are merged.
"""

import re
from collections.abc import Collection

import torch

Weights = dict[str, torch.Tensor]

UNET_ENDS = {
    "conv_in": "input_blocks.0.0",
    "conv_norm_out": "out.0",
    "conv_out": "out.2",
    "time_embedding.linear_1": "time_embed.0",
    "time_embedding.linear_2": "time_embed.2",
    "add_embedding.linear_1": "label_emb.0.0",
    "add_embedding.linear_2": "label_emb.0.2",
    "mid_block.resnets.0": "middle_block.0",
    "mid_block.attentions.0": "middle_block.1",
    "mid_block.resnets.1": "middle_block.2",
}
RESNET = {
    "norm1": "in_layers.0",
    "conv1": "in_layers.2",
    "time_emb_proj": "emb_layers.1",
    "norm2": "out_layers.0",
    "conv2": "out_layers.3",
    "conv_shortcut": "skip_connection",
}
UNET_BLOCK = re.compile(
    r"(down|up)_blocks\.(\d+)\.(resnets|attentions|downsamplers|upsamplers)\.(\d+)"
)
VAE_ATTENTION = {
    "group_norm": "norm",
    "to_q": "q",
    "to_k": "k",
    "to_v": "v",
    "to_out.0": "proj_out",
}
OPEN_CLIP = {
    "embeddings.token_embedding": "token_embedding",
    "embeddings.position_embedding.weight": "positional_embedding",
    "encoder.layers": "transformer.resblocks",
    "self_attn.out_proj": "attn.out_proj",
    "layer_norm1": "ln_1",
    "layer_norm2": "ln_2",
    "mlp.fc1": "mlp.c_fc",
    "mlp.fc2": "mlp.c_proj",
    "final_layer_norm": "ln_final",
}


def rename_unet(names: Collection[str], layers_per_block: int) -> dict[str, str]:
    """{diffusers' name: published name} of modules or weights of a complete U-Net.

    The published names number the layers of all down blocks in a row, and those of all up blocks.
    """
    attentive = {name.split(".attentions.")[0] for name in names if ".attentions." in name}
    per_block = layers_per_block + 1
    renamed = {}
    for name in names:
        published = name
        for start, other in UNET_ENDS.items():
            if f"{name}.".startswith(f"{start}."):
                published = other + name[len(start) :]
        if match := UNET_BLOCK.match(name):
            way, kind = match.group(1, 3)
            block, layer = map(int, match.group(2, 4))
            rest = name[match.end() :]
            position = 1 if kind == "attentions" else 0
            if kind == "downsamplers":
                rest = rest.replace(".conv", ".op", 1)
                published = f"input_blocks.{(block + 1) * per_block}.0{rest}"
            elif kind == "upsamplers":
                position = 2 if f"up_blocks.{block}" in attentive else 1
                published = f"output_blocks.{(block + 1) * per_block - 1}.{position}{rest}"
            elif way == "down":
                published = f"input_blocks.{1 + block * per_block + layer}.{position}{rest}"
            else:
                published = f"output_blocks.{block * per_block + layer}.{position}{rest}"
        if ".resnets." in name:
            published = replace_part(published, RESNET)
        renamed[name] = published
    return renamed


def merge_vae(weights: Weights, levels: int) -> Weights:
    """The weights of a VAE with `levels` levels of blocks under their published names.

    On the way up, the published names count the levels from the last one. Attention uses 1x1
    convolutions there.
    """
    merged = {}
    for name, value in weights.items():
        published = re.sub(r"down_blocks\.(\d+)\.resnets", r"down.\1.block", name)
        published = re.sub(r"down_blocks\.(\d+)\.downsamplers\.0", r"down.\1.downsample", published)
        if match := re.search(r"up_blocks\.(\d+)\.(resnets|upsamplers\.0)", published):
            kind = "block" if match[2] == "resnets" else "upsample"
            level = levels - 1 - int(match[1])
            published = published.replace(match[0], f"up.{level}.{kind}")
        published = published.replace("mid_block.resnets.0", "mid.block_1")
        published = published.replace("mid_block.resnets.1", "mid.block_2")
        if "mid_block.attentions.0" in published:
            published = published.replace("mid_block.attentions.0", "mid.attn_1")
            published = replace_part(published, VAE_ATTENTION)
            if value.dim() == 2:
                value = value[..., None, None]
        published = published.replace("conv_shortcut", "nin_shortcut")
        merged[published.replace("conv_norm_out", "norm_out")] = value
    return merged


def replace_part(name: str, parts: dict[str, str]) -> str:
    """Replace parts of a name between dots."""
    for part, other in parts.items():
        name = re.sub(rf"\.{re.escape(part)}(?=\.|$)", f".{other}", name)
    return name


def merge_clip(weights: Weights) -> Weights:
    """The weights of OpenAI's CLIP under their names before transformers 5."""
    return {f"text_model.{name.removeprefix('text_model.')}": x for name, x in weights.items()}


def merge_open_clip(weights: Weights) -> Weights:
    """The weights of an OpenCLIP text encoder in OpenCLIP's layout.

    There, query, key and value are one matrix, and the projection is transposed.
    """
    merged = {}
    for name, value in weights.items():
        published = name.removeprefix("text_model.")
        if published == "text_projection.weight":
            merged["text_projection"] = value.T
            continue
        if ".k_proj." in name or ".v_proj." in name or "position_ids" in name:
            continue
        if ".q_proj." in name:
            qkv = [weights[name.replace(".q_proj.", f".{part}_proj.")] for part in "qkv"]
            value = torch.cat(qkv)
            published = published.replace("self_attn.q_proj.", "attn.in_proj_")
        for part, other in OPEN_CLIP.items():
            published = published.replace(part, other)
        merged[published] = value
    return merged
