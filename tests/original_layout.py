"""A pipeline folder -> one file in the layout in which Stable Diffusion was published."""

import re

import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from safetensors.torch import save_file
from transformers import CLIPTextModel, CLIPTextModelWithProjection

RESNET = {
    "norm1": "in_layers.0",
    "conv1": "in_layers.2",
    "time_emb_proj": "emb_layers.1",
    "norm2": "out_layers.0",
}
RESNET |= {"conv2": "out_layers.3", "conv_shortcut": "skip_connection"}
UNET = {"conv_in": "input_blocks.0.0", "conv_norm_out": "out.0", "conv_out": "out.2"}
UNET |= {"time_embedding.linear_1": "time_embed.0", "time_embedding.linear_2": "time_embed.2"}
UNET |= {"add_embedding.linear_1": "label_emb.0.0", "add_embedding.linear_2": "label_emb.0.2"}
UNET |= {"mid_block.resnets.0": "middle_block.0", "mid_block.attentions.0": "middle_block.1"}
UNET |= {"mid_block.resnets.1": "middle_block.2"}
ATTENTION = {"group_norm": "norm", "to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "proj_out"}


def name_unet(unet):
    """{our name: the published one} of a U-Net's weights."""
    each, names = unet.config.layers_per_block + 1, {}
    for key in unet.state_dict():
        name = next(
            (
                key.replace(ours, theirs, 1)
                for ours, theirs in UNET.items()
                if key.startswith(f"{ours}.")
            ),
            key,
        )
        if found := re.match(
            r"(down|up)_blocks\.(\d+)\.(resnets|attentions|downsamplers|upsamplers)\.(\d+)", key
        ):
            (way, kind), (i, j) = found.group(1, 3), map(int, found.group(2, 4))
            place = {"resnets": 0, "attentions": 1}.get(kind)
            if kind == "downsamplers":
                name = f"input_blocks.{(i + 1) * each}.0.op{key[found.end() + 5 :]}"
            elif kind == "upsamplers":
                place = 2 if hasattr(unet.up_blocks[i], "attentions") else 1
                name = f"output_blocks.{i * each + each - 1}.{place}{key[found.end() :]}"
            elif way == "down":
                name = f"input_blocks.{1 + i * each + j}.{place}{key[found.end() :]}"
            else:
                name = f"output_blocks.{i * each + j}.{place}{key[found.end() :]}"
        if "resnets" in key:
            for ours, theirs in RESNET.items():
                name = name.replace(f".{ours}.", f".{theirs}.")
        names[key] = f"model.diffusion_model.{name}"
    return names


def name_vae(vae):
    last, names = len(vae.config.block_out_channels) - 1, {}
    for key in vae.state_dict():
        name = re.sub(r"down_blocks\.(\d+)\.resnets\.(\d+)", r"down.\1.block.\2", key)
        name = re.sub(r"down_blocks\.(\d+)\.downsamplers\.0", r"down.\1.downsample", name)
        name = re.sub(r"up_blocks\.(\d+)\.resnets", lambda m: f"up.{last - int(m[1])}.block", name)
        name = re.sub(
            r"up_blocks\.(\d+)\.upsamplers\.0", lambda m: f"up.{last - int(m[1])}.upsample", name
        )
        name = re.sub(r"mid_block\.resnets\.(\d+)", lambda m: f"mid.block_{int(m[1]) + 1}", name)
        if "mid_block.attentions.0." in name:
            name = name.replace("mid_block.attentions.0", "mid.attn_1")
            for ours, theirs in ATTENTION.items():
                name = name.replace(f".{ours}.", f".{theirs}.")
        name = name.replace("conv_shortcut", "nin_shortcut").replace("conv_norm_out", "norm_out")
        names[key] = f"first_stage_model.{name}"
    return names


def to_open_clip(weights, prefix):
    """Convert the weights of a CLIPTextModelWithProjection to open_clip's layout.

    There, query, key and value are one tensor.
    """
    found = {f"{prefix}text_projection": weights["text_projection.weight"].T.contiguous()}
    for key, value in weights.items():
        name = key.removeprefix("text_model.")
        if (
            name == "text_projection.weight"
            or "position_ids" in name
            or re.search(r"\.[kv]_proj\.", name)
        ):
            continue
        if ".q_proj." in name:
            value = torch.cat([weights[key.replace("q_proj", f"{each}_proj")] for each in "qkv"])
            name = name.replace("self_attn.q_proj.", "attn.in_proj_")
        for ours, theirs in {
            "embeddings.token_embedding": "token_embedding",
            "embeddings.position_embedding.weight": "positional_embedding",
            "encoder.layers": "transformer.resblocks",
            "self_attn.out_proj": "attn.out_proj",
            "layer_norm1": "ln_1",
            "layer_norm2": "ln_2",
            "mlp.fc1": "mlp.c_fc",
            "mlp.fc2": "mlp.c_proj",
            "final_layer_norm": "ln_final",
        }.items():
            name = name.replace(ours, theirs)
        found[prefix + name] = value
    return found


def save_original(folder, path, sdxl=False, dtype=torch.float32):
    """Write the U-Net, VAE and text encoders of a pipeline folder into one file."""
    unet = UNet2DConditionModel.from_pretrained(folder, subfolder="unet")
    vae = AutoencoderKL.from_pretrained(folder, subfolder="vae")
    weights = {theirs: unet.state_dict()[ours] for ours, theirs in name_unet(unet).items()}
    for ours, theirs in name_vae(vae).items():
        value = vae.state_dict()[ours]
        weights[theirs] = (
            value[..., None, None] if ".attn_1." in theirs and value.dim() == 2 else value
        )
    text = CLIPTextModel.from_pretrained(folder, subfolder="text_encoder").state_dict()
    prefix = "conditioner.embedders.0" if sdxl else "cond_stage_model"
    text = {
        f"{prefix}.transformer.text_model.{key.removeprefix('text_model.')}": x
        for key, x in text.items()
    }
    if sdxl:
        two = CLIPTextModelWithProjection.from_pretrained(
            folder, subfolder="text_encoder_2"
        ).state_dict()
        text |= to_open_clip(two, "conditioner.embedders.1.model.")
    weights = {name: value.to(dtype).contiguous() for name, value in (weights | text).items()}
    save_file(weights, path)
