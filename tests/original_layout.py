"""A pipeline folder -> one file in the layout in which Stable Diffusion was published.

And its transformer -> one file in the layout in which that was published, for ComfyUI.
"""

import json
import re

import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES
from safetensors.torch import load_file, save_file
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


def to_published(vae):
    """The weights of a VAE in the layout in which it was published, where attention convolves."""
    weights = {theirs: vae.state_dict()[ours] for ours, theirs in name_vae(vae).items()}
    return {
        name: value[..., None, None] if ".attn_1." in name and value.dim() == 2 else value
        for name, value in weights.items()
    }


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
    weights |= to_published(vae)
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


# ------------------------------------------------------------------- transformers


class Symbol:
    """Stands for a weight of an original file in diffusers' conversion.

    parts: [(its name, number of the part, number of all parts)] of the original weights.
    """

    shape = [0]

    def __init__(self, parts):
        self.parts = parts

    def chunk(self, count, dim=0):
        ((name, _, _),) = self.parts
        return [Symbol([(name, number, count)]) for number in range(count)]

    @classmethod
    def __torch_function__(cls, function, types, args, kwargs=None):
        if function is torch.cat:
            return cls(sum((each.parts for each in args[0]), []))
        count = args[1] if function is torch.chunk else len(args[1])
        return args[0].chunk(count)


class Asked(dict):
    """An original file of which only the names are known that tell a conversion the blocks."""

    def pop(self, name):
        return Symbol([(name, 0, 1)])

    def __missing__(self, name):
        return self.pop(name)


def list_hints(config):
    """Names by which diffusers' conversions of SD 3, FLUX.1 and Chroma count the blocks."""
    layers = config["num_layers"] - 1
    if "num_single_layers" not in config:
        dual = [f"joint_blocks.{i}.attn2." for i in config["dual_attention_layers"]]
        return dict.fromkeys([f"joint_blocks.{layers}.ln_q", *dual])
    names = [f"double_blocks.{layers}.", f"single_blocks.{config['num_single_layers'] - 1}."]
    names += ["guidance"] * bool(config.get("guidance_embeds"))
    if "approximator_layers" in config:
        names.append(f"distilled_guidance_layer.layers.{config['approximator_layers'] - 1}.")
    return dict.fromkeys(names)


def invert(convert, config, weights):
    """Undo a conversion that asks for the weights by their original names."""
    found = {}
    for name, symbol in convert(checkpoint=Asked(list_hints(config)), config=config).items():
        for (original, number, count), part in zip(
            symbol.parts, weights[name].chunk(len(symbol.parts)), strict=True
        ):
            found.setdefault(original, [None] * count)[number] = part
    return {name: torch.cat(parts) for name, parts in found.items()}


# {class: [(diffusers' name, the original one)]}: regular expressions, tried in turn
NAMES = {
    "ZImageTransformer2DModel": [
        (r"^all_(final_layer|x_embedder)\.2-1\.", r"\1."),
        (r"\.attention\.to_out\.0\.", ".attention.out."),
        (r"\.attention\.norm_([qk])\.", r".attention.\1_norm."),
    ],
    "QwenImageTransformer2DModel": [],
    "QwenImage21Transformer2DModel": [],
    "Flux2Transformer2DModel": [
        (r"^x_embedder", "img_in"),
        (r"^context_embedder", "txt_in"),
        (r"^time_guidance_embed\.timestep_embedder\.linear_1", "time_in.in_layer"),
        (r"^time_guidance_embed\.timestep_embedder\.linear_2", "time_in.out_layer"),
        (r"^time_guidance_embed\.guidance_embedder\.linear_1", "guidance_in.in_layer"),
        (r"^time_guidance_embed\.guidance_embedder\.linear_2", "guidance_in.out_layer"),
        (r"^(\w+_stream_modulation\w*)\.linear", r"\1.lin"),
        (r"^norm_out\.linear", "final_layer.adaLN_modulation.1"),
        (r"^proj_out", "final_layer.linear"),
        (r"^(single_transformer_blocks\.\d+)\.attn\.to_qkv_mlp_proj", r"\1.linear1"),
        (r"^(single_transformer_blocks\.\d+)\.attn\.to_out", r"\1.linear2"),
        (r"^(single_transformer_blocks\.\d+)\.attn\.norm_q\.weight", r"\1.norm.query_norm.scale"),
        (r"^(single_transformer_blocks\.\d+)\.attn\.norm_k\.weight", r"\1.norm.key_norm.scale"),
        (r"^single_transformer_blocks", "single_blocks"),
        (r"\.attn\.norm_q\.weight", ".img_attn.norm.query_norm.scale"),
        (r"\.attn\.norm_k\.weight", ".img_attn.norm.key_norm.scale"),
        (r"\.attn\.norm_added_q\.weight", ".txt_attn.norm.query_norm.scale"),
        (r"\.attn\.norm_added_k\.weight", ".txt_attn.norm.key_norm.scale"),
        (r"\.attn\.to_out\.0\.", ".img_attn.proj."),
        (r"\.attn\.to_add_out\.", ".txt_attn.proj."),
        (r"\.ff\.linear_in\.", ".img_mlp.0."),
        (r"\.ff\.linear_out\.", ".img_mlp.2."),
        (r"\.ff_context\.linear_in\.", ".txt_mlp.0."),
        (r"\.ff_context\.linear_out\.", ".txt_mlp.2."),
        (r"^transformer_blocks", "double_blocks"),
    ],
    "Flux3Transformer2DModel": [
        (r"^timestep_embedder\.linear_1", "time_in.in_layer"),
        (r"^timestep_embedder\.linear_2", "time_in.out_layer"),
        (r"^proj_out", "final_layer.image.linear"),
        (r"^norm_out\.linear", "final_layer.image.adaLN_modulation.1"),
        (r"^x_embedders\.", "emb_in."),
        (r"^context_embedder\.", "txt_in."),
        (r"^mode_blocks\.", "content_mode_blocks."),
        (r"^single_transformer_blocks\.", "single_blocks."),
        (r"\.attn\.to_([qkv])\.weight", r".\1_proj.weight"),
        (r"\.attn\.to_out\.0\.weight", ".attn_out.weight"),
        (r"\.attn\.norm_q\.weight", ".norm.query_norm.scale"),
        (r"\.attn\.norm_k\.weight", ".norm.key_norm.scale"),
        (r"\.ff\.linear_in\.", ".mlp_in."),
        (r"\.ff\.linear_out\.", ".mlp_out."),
        (r"(modulation\w*)\.linear\.", r"\1.lin."),
    ],
    "Krea2Transformer2DModel": [
        (r"^img_in\.", "first."),
        (r"^time_embed\.linear_1\.", "tmlp.0."),
        (r"^time_embed\.linear_2\.", "tmlp.2."),
        (r"^time_mod_proj\.", "tproj.1."),
        (r"^txt_in\.norm\.weight", "txtmlp.0.scale"),
        (r"^txt_in\.linear_1\.", "txtmlp.1."),
        (r"^txt_in\.linear_2\.", "txtmlp.3."),
        (r"^text_fusion\.", "txtfusion."),
        (r"^transformer_blocks\.", "blocks."),
        (r"^final_layer\.linear\.", "last.linear."),
        (r"^final_layer\.norm\.weight", "last.norm.scale"),
        (r"^final_layer\.scale_shift_table", "last.modulation.lin"),
        (r"\.attn\.to_([qkv])\.", r".attn.w\1."),
        (r"\.attn\.to_out\.0\.", ".attn.wo."),
        (r"\.attn\.to_gate\.", ".attn.gate."),
        (r"\.attn\.norm_q\.weight", ".attn.qknorm.qnorm.scale"),
        (r"\.attn\.norm_k\.weight", ".attn.qknorm.knorm.scale"),
        (r"\.ff\.", ".mlp."),
        (r"\.norm1\.weight", ".prenorm.scale"),
        (r"\.norm2\.weight", ".postnorm.scale"),
        (r"\.scale_shift_table", ".mod.lin"),
    ],
}
# {class: [(diffusers' name, the original one)]} of weights that are one in a file, in their order
FUSED = {
    "ZImageTransformer2DModel": [(rf"attention\.to_{x}\.", "attention.qkv.") for x in "qkv"],
    "Flux2Transformer2DModel": [
        *((rf"\.attn\.to_{x}\.", ".img_attn.qkv.") for x in "qkv"),
        *((rf"\.attn\.add_{x}_proj\.", ".txt_attn.qkv.") for x in "qkv"),
    ],
    "QwenImage21Transformer2DModel": [
        (r"img_mlp\.gate_layer\.", "img_mlp.gate_up."),
        (r"img_mlp\.proj\.", "img_mlp.gate_up."),
    ],
}


def rename(kind, weights):
    """Undo a conversion that renames weights, by the tables above."""
    found = {}
    for pattern, fused in FUSED.get(kind, []):
        for name in [name for name in weights if re.search(pattern, name)]:
            found.setdefault(re.sub(pattern, fused, name), []).append(weights[name])
            weights = {key: value for key, value in weights.items() if key != name}
    for name, value in weights.items():
        found[name] = [value]
        if kind.startswith("Flux") and "norm_out.linear" in name:  # scale and shift
            found[name] = [*value.chunk(2)][::-1]
        if kind.startswith("Krea2") and re.match(r"transformer_blocks.*scale_shift_table", name):
            found[name] = [value.flatten()]
    renamed = {}
    for name, values in found.items():
        for pattern, original in NAMES[kind]:
            name = re.sub(pattern, original, name)
        renamed[name] = torch.cat(values)
    return renamed


def to_original(kind, config, weights):
    """The weights of a transformer of class `kind`, in the layout in which it was published."""
    if kind in NAMES:
        return rename(kind, weights)
    convert = SINGLE_FILE_LOADABLE_CLASSES[kind]["checkpoint_mapping_fn"]
    return invert(convert, config, weights)


def save_transformer(folder, path, prefix="", **more):
    """Write the transformer of a pipeline folder into one file in its published layout.

    more: weights to add. Returns the file.
    """
    config = json.loads((folder / "transformer/config.json").read_text())
    (own,) = folder.glob("transformer/*.safetensors")
    weights = to_original(config["_class_name"], config, load_file(own))
    save_file({f"{prefix}{name}": x.contiguous() for name, x in weights.items()} | more, path)
    return path


def split_as_tiny(monkeypatch):
    """Let diffusers divide FLUX.1's and Chroma's single blocks by a tiny width, not by 3072."""

    def split(weight, sizes, dim=0, split=torch.split):
        if sizes == (3072, 3072, 3072, 4 * 3072) and isinstance(weight, torch.Tensor):
            width = len(weight) // 7
            sizes = (width, width, width, 4 * width)
        return split(weight, sizes, dim=dim)

    monkeypatch.setattr(torch, "split", split)
