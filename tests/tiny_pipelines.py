"""Tiny text-to-image pipelines of diffusers with random weights and all parts of the real ones."""

import importlib
import inspect
import string
import sys
import tempfile
from functools import partial
from pathlib import Path

import diffusers
import tokenizers
import torch
import transformers

from diffusion_training.families.recorded.text_tensors import LONG, SHORT

MODELS = Path(__file__).parent.parent / "demo/models"
WIDTH = 32  # of embeddings
# options of transformers
HEADS = {"num_attention_heads": 2, "attention_head_dim": 16}
SINGLE = {"num_layers": 1, "num_single_layers": 1, **HEADS, "joint_attention_dim": WIDTH}
DOUBLE = {"num_layers": 2, **HEADS}
FOUR = {"in_channels": 4, "out_channels": 4}
AXES = (4, 6, 6)
# pixels of images that some of them need at least, others 16
SIDES = {"qwen_image_2_1": 64, "lumina2": 32, "lumina": 32, "sana": 32, "sana_video": 32}
SIDES |= {"wan_5b": 64, "ltx": 32, "hunyuan_video": 32}
# options of VAEs
STATISTICS = {"latents_mean": [-0.5, 0.1, 0.3, 1.0], "latents_std": [0.8, 1.2, 2.0, 0.5]}


# ------------------------------------------------------------------- parts


def make_vae(channels=4, depth=2, kind=diffusers.AutoencoderKL, **options):
    """A VAE with 2 x 2 pixels per latent, or with `depth` 4 the usual 8 x 8."""
    return kind(
        block_out_channels=(8,) * depth,
        down_block_types=("DownEncoderBlock2D",) * depth,
        norm_num_groups=4,
        up_block_types=("UpDecoderBlock2D",) * depth,
        latent_channels=channels,
        **options,
    )


def make_shifting_vae(channels=4, **options):
    return make_vae(channels, **{"scaling_factor": 1.5, "shift_factor": 0.25} | options)


def make_flux2_vae(**options):
    """FLUX.2's VAE, with a scale per channel."""
    vae = make_vae(kind=diffusers.AutoencoderKLFlux2, **options)
    vae.bn.running_mean.normal_(0, 0.2)
    vae.bn.running_var.uniform_(0.5, 2)
    return vae


def make_video_vae(**options):
    """Qwen-Image's VAE, with a scale per channel."""
    options = {"dim_mult": [1, 1], "temperal_downsample": [False]} | options
    return diffusers.AutoencoderKLQwenImage(
        base_dim=8, z_dim=4, num_res_blocks=1, **STATISTICS, **options
    )


def make_wan_vae():
    """Wan 2.2's VAE, with 16 x 16 pixels per latent."""
    return diffusers.AutoencoderKLWan(
        base_dim=8,
        decoder_base_dim=8,
        z_dim=4,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, False, False],
        in_channels=12,
        out_channels=12,
        is_residual=True,
        patch_size=2,
        scale_factor_spatial=16,
        **STATISTICS,
    )


def make_scheduler(shift=3.0):
    return diffusers.FlowMatchEulerDiscreteScheduler(shift=shift)


def make_dynamic_scheduler(**options):
    """A scheduler that shifts more for larger images, from 16 tokens on."""
    options = {"base_image_seq_len": 16, "base_shift": 0.5} | options
    return diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, **options)


def make_clip_tokenizer():
    return transformers.CLIPTokenizer.from_pretrained(MODELS, subfolder="tokenizer")


def make_chat_tokenizer(max_length=256):
    """The demo's tokenizer with a chat template."""
    tokenizer = make_clip_tokenizer()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer._tokenizer,
        pad_token=tokenizer.pad_token,
        eos_token=tokenizer.eos_token,
        model_max_length=max_length,
    )
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }} {% endfor %}"
        "{% if add_generation_prompt %}answer{% if enable_thinking %} think{% endif %}{% endif %}"
    )
    return tokenizer


VISION = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")


def make_vision_tokenizer():
    tokenizer = make_chat_tokenizer(512)
    tokenizer.add_special_tokens({"additional_special_tokens": [*VISION]})
    plain = tokenizers.processors.TemplateProcessing("$A", "$A $B", [])  # adds no token
    tokenizer.backend_tokenizer.post_processor = plain
    return tokenizer


def list_vision_tokens(tokenizer):
    """The ids of the tokens that stand for an image, if the tokenizer has them."""
    names = {"vision_start_token_id": VISION[0], "image_token_id": VISION[1]}
    known = tokenizer.get_vocab()
    return {name: known[token] for name, token in names.items() if token in known}


def make_clip(width=WIDTH, projection=None, layers=2, **options):
    options |= {"hidden_size": width, "num_hidden_layers": layers}
    kind = transformers.CLIPTextModel
    if projection is not None:
        options["projection_dim"] = projection
        kind = transformers.CLIPTextModelWithProjection
    return kind(transformers.CLIPTextConfig.from_pretrained(MODELS / "text_encoder", **options))


def make_t5(tokenizer, kind="T5", width=WIDTH):
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=len(tokenizer), d_model=width, d_kv=8, d_ff=32, num_layers=2, num_heads=4
    )
    return getattr(transformers, f"{kind}EncoderModel")(config)


def make_qwen_config(tokenizer, layers):
    """Options of a tiny text encoder like Qwen2.5."""
    sizes = {"hidden_size": WIDTH, "intermediate_size": 32, "vocab_size": len(tokenizer)}
    return sizes | {
        "num_hidden_layers": layers, "num_attention_heads": 2, "num_key_value_heads": 2
    }  # fmt: skip


def make_text_config(tokenizer, layers):
    """Options of one like Qwen3, Gemma, GLM, Llama or Mistral."""
    return make_qwen_config(tokenizer, layers) | {"head_dim": 16}


def make_qwen3(tokenizer, layers=3, kind="Qwen3Model"):
    config = transformers.Qwen3Config(**make_text_config(tokenizer, layers))
    return getattr(transformers, kind)(config)


def make_gemma2(tokenizer):
    return transformers.Gemma2Model(transformers.Gemma2Config(**make_text_config(tokenizer, 2)))


def make_gemma(tokenizer):
    return transformers.GemmaModel(transformers.GemmaConfig(**make_text_config(tokenizer, 2)))


def make_smollm3(tokenizer):
    config = make_qwen_config(tokenizer, 2) | {"pad_token_id": 0, "bos_token_id": 0}
    config["vocab_size"] = 128_001  # BRIA's code names the last token
    return transformers.SmolLM3ForCausalLM(transformers.SmolLM3Config(**config))


ROPE = {"mrope_section": [2, 3, 3], "rope_theta": 10000.0}
MROPE = {"type": "default", **ROPE}
SIGHT = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32}
SEES = "Qwen3VLForConditionalGeneration"
# pixels of an image, as in the published models; by default it would shrink 1024 x 1024 pixels
SEEN = {"shortest_edge": 56 * 56, "longest_edge": 2**24}


def make_qwen25_vl(tokenizer, layers=3):
    text = make_qwen_config(tokenizer, layers) | {"rope_parameters": MROPE}
    config = transformers.Qwen2_5_VLConfig(
        text_config=text,
        vision_config=SIGHT | {"out_hidden_size": 32, "fullatt_block_indexes": [0]},
        **list_vision_tokens(tokenizer),
    )
    return transformers.Qwen2_5_VLForConditionalGeneration(config)


def make_qwen2_vl(tokenizer):
    vision = {"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 1}
    config = transformers.Qwen2VLConfig(
        text_config=make_qwen_config(tokenizer, 3) | {"rope_parameters": MROPE},
        vision_config=vision,
        **list_vision_tokens(tokenizer),
    )
    return transformers.Qwen2VLForConditionalGeneration(config)


def make_qwen3_vl(tokenizer, layers, kind=SEES):
    text = make_text_config(tokenizer, layers)
    config = transformers.Qwen3VLConfig(
        text_config=text | {"rope_parameters": {"rope_type": "default", **ROPE}},
        vision_config=SIGHT | {"out_hidden_size": 32, "deepstack_visual_indexes": [0]},
        **list_vision_tokens(tokenizer),
    )
    return getattr(transformers, kind)(config)


def make_mistral3(tokenizer, layers, kind):
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
    vision |= {"num_hidden_layers": 1, "head_dim": 16, "image_size": 32, "patch_size": 16}
    config = transformers.Mistral3Config(
        text_config=transformers.MistralConfig(**make_text_config(tokenizer, layers)),
        vision_config=transformers.PixtralVisionConfig(**vision),
    )
    return getattr(transformers, kind)(config)


def make_qwen2_processor(tokenizer, kind="Qwen2VLProcessor"):
    return getattr(transformers, kind)(
        transformers.Qwen2VLImageProcessor(size=SEEN),
        tokenizer,
        transformers.Qwen2VLVideoProcessor(),
        tokenizer.chat_template,
    )


def make_pixtral_processor(tokenizer):
    return transformers.PixtralProcessor(
        transformers.PixtralImageProcessor(patch_size={"height": 16, "width": 16}),
        tokenizer,
        chat_template=tokenizer.chat_template,
    )


def make_qwen3_processor(tokenizer):
    return transformers.Qwen3VLProcessor(
        image_processor=transformers.Qwen2VLImageProcessor(patch_size=16, size=SEEN),
        tokenizer=tokenizer,
        video_processor=transformers.Qwen3VLVideoProcessor(),
        chat_template=tokenizer.chat_template,
    )


def make_flux_transformer(**options):
    options = {
        "in_channels": 16,
        **SINGLE,
        "attention_head_dim": 32,  # wide enough for 4 bits
        "pooled_projection_dim": WIDTH,
        "axes_dims_rope": (8, 12, 12),
    } | options
    return diffusers.FluxTransformer2DModel(**options)


def make_z_image_transformer(**options):
    return diffusers.ZImageTransformer2DModel(
        in_channels=4,
        dim=32,
        n_layers=2,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=WIDTH,
        axes_dims=[*AXES],
        axes_lens=[256, 32, 32],
        **options,
    )


def make_bria_fibo2_transformer():
    module = importlib.import_module("diffusers.models.transformers.transformer_bria_fibo2")
    return module.BriaFibo2Transformer2DModel(
        in_channels=4, dim=32, n_layers=2, n_refiner_layers=1, n_heads=2, cap_feat_dim=3 * WIDTH,
        injection_layer_ids=(0,), perceiver_num_layers=1, min_num_gist_tokens=8,
        max_num_gist_tokens=16, gist_step=8, axes_dims=AXES,
    )  # fmt: skip


def make_siglip():
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
    vision |= {"num_hidden_layers": 1, "patch_size": 16, "num_patches": 16}
    return transformers.Siglip2VisionModel(transformers.Siglip2VisionConfig(**vision))


def make_flux2_transformer(**options):
    options = SINGLE | {"joint_attention_dim": 3 * WIDTH} | options
    return diffusers.Flux2Transformer2DModel(in_channels=16, axes_dims_rope=[4, 4, 4, 4], **options)


def make_qwen_transformer(**options):
    sizes = {"in_channels": 16, "out_channels": 4, "joint_attention_dim": WIDTH}
    return diffusers.QwenImageTransformer2DModel(axes_dims_rope=AXES, **sizes, **DOUBLE, **options)


# ------------------------------------------------------------------- pipelines

MAKE = {}
EDIT = {}  # pipelines that edit images
REFUSED = {}  # pipelines that can't be recorded
BLOCKS = {}  # pipelines of blocks
OTHER_BLOCKS = {}  # those of models that have another pipeline as well
OTHERS = {}  # pipelines with the parts of another one, which only the lists of models need


def randomize(transformer):
    """Draw the weights of a new transformer, because some are 0, and it would predict 0."""
    for weight in transformer.parameters():
        torch.nn.init.normal_(weight, std=0.1) if weight.dim() > 1 else None


def save(function, folder, **options):
    """Save the pipeline that a function returns, with random weights."""
    torch.manual_seed(0)
    made = function(**options)
    randomize(made.components["transformer"])
    is_modular = isinstance(made, diffusers.ModularPipeline)
    made.save_pretrained(str(folder), **{"overwrite_modular_index": True} if is_modular else {})
    return folder


def pipeline(function, among=MAKE):
    """Add a function that returns a pipeline to `MAKE`, as {name: function(folder)}."""
    among[function.__name__.removeprefix("make_")] = partial(save, function)
    return function


edit = partial(pipeline, among=EDIT)
refused = partial(pipeline, among=REFUSED)
of_blocks = partial(pipeline, among=BLOCKS)


OF_TOKENIZER = ("tokenizer", "text_encoder", "processor", "text_processor")


def add(name, kind, among=MAKE, length=256, sees=False, **parts):
    """Add a pipeline of one text encoder to `among`, and return function(folder), which saves it.

    parts: functions, called in this order, or (class, options) of diffusers. Those `OF_TOKENIZER`
    get the tokenizer: the demo's with a chat template, of a length or with tokens for images.
    """

    def make(**options):
        tokenizer = make_vision_tokenizer() if sees else make_chat_tokenizer(length)
        made = {"tokenizer": tokenizer}
        for part, value in parts.items():
            if isinstance(value, tuple):
                made[part] = getattr(diffusers, value[0])(**value[1])
            else:
                made[part] = value(tokenizer) if part in OF_TOKENIZER else value()
        known = inspect.signature(getattr(diffusers, kind)).parameters
        made = {part: value for part, value in made.items() if part in known}
        return getattr(diffusers, kind)(**made, **options)

    among[name] = partial(save, make)
    return among[name]


# Qwen3 with a chat template, a VAE that shifts; 40,000 weights
make_z_image = add(
    "z_image", "ZImagePipeline", length=64, text_encoder=make_qwen3,
    vae=partial(make_vae, scaling_factor=0.5, shift_factor=0.25),
    transformer=make_z_image_transformer, scheduler=partial(make_scheduler, 6.0),
)  # fmt: skip
# 28 layers of Qwen3, 2 + 2 blocks, a scale per channel of the VAE
make_klein = add(
    "klein", "Flux2KleinPipeline", length=64,
    text_encoder=partial(make_qwen3, layers=28, kind="Qwen3ForCausalLM"), vae=make_flux2_vae,
    transformer=partial(
        make_flux2_transformer, num_layers=2, num_single_layers=2, guidance_embeds=False
    ),
    scheduler=partial(make_dynamic_scheduler, max_image_seq_len=4096, max_shift=1.15),
)  # fmt: skip
# 2 layers of Qwen2.5-VL, 2 blocks, a scale per channel of the VAE
make_qwen_image = add(
    "qwen_image", "QwenImagePipeline", text_encoder=partial(make_qwen25_vl, layers=2),
    vae=make_video_vae, transformer=make_qwen_transformer,
    scheduler=partial(
        make_dynamic_scheduler, max_image_seq_len=8192, max_shift=0.9, shift_terminal=0.02
    ),
)  # fmt: skip


@pipeline
def make_flux(**options):
    tokenizer = make_chat_tokenizer(64)
    return diffusers.FluxPipeline(
        scheduler=make_dynamic_scheduler(),
        vae=make_shifting_vae(),
        text_encoder=make_clip(),
        tokenizer=make_clip_tokenizer(),
        text_encoder_2=make_t5(tokenizer),
        tokenizer_2=tokenizer,
        transformer=make_flux_transformer(**options),
    )


@pipeline
def make_flux_dev():
    """It takes a guidance scale as an input."""
    return make_flux(guidance_embeds=True)


def make_sd3_transformer(**options):
    return diffusers.SD3Transformer2DModel(
        sample_size=8,
        **FOUR,
        **DOUBLE | {"attention_head_dim": 8},
        caption_projection_dim=16,
        pooled_projection_dim=20,
        **options,
    )


@pipeline
def make_sd3():
    tokenizer = make_chat_tokenizer(64)
    clip = make_clip_tokenizer()
    more = {"pos_embed_max_size": 8 * 32, "dual_attention_layers": (0,), "qk_norm": "rms_norm"}
    return diffusers.StableDiffusion3Pipeline(
        transformer=make_sd3_transformer(joint_attention_dim=64, **more),
        scheduler=make_scheduler(),
        vae=make_shifting_vae(),
        text_encoder=make_clip(32, 8, 3),
        tokenizer=clip,
        text_encoder_2=make_clip(16, 12, 3),
        tokenizer_2=clip,
        text_encoder_3=make_t5(tokenizer, width=64),
        tokenizer_3=tokenizer,
    )


add(
    "qwen_image_2_1", "QwenImage21Pipeline", sees=True,
    vae=("AutoencoderKLQwenImage21", dict(
        base_dim=8, decoder_base_dim=8, z_dim=4, dim_mult=[1] * 5, num_res_blocks=1,
        temperal_downsample=[False, True, True, True], **STATISTICS,
    )),
    transformer=("QwenImage21Transformer2DModel", dict(
        context_in_dim=WIDTH, axes_dims_rope=AXES, **FOUR, **DOUBLE
    )),
    scheduler=make_dynamic_scheduler, text_encoder=partial(make_qwen3_vl, layers=2),
    processor=make_qwen3_processor,
)  # fmt: skip


@pipeline
def make_krea2(chosen=(1, 2)):
    """chosen: the layers of the text encoder that are read."""
    tokenizer = make_chat_tokenizer()
    return diffusers.Krea2Pipeline(
        transformer=diffusers.Krea2Transformer2DModel(
            in_channels=16,
            **DOUBLE,
            num_key_value_heads=2,
            intermediate_size=32,
            timestep_embed_dim=16,
            text_hidden_dim=WIDTH,
            num_text_layers=len(chosen),
            text_num_attention_heads=2,
            text_num_key_value_heads=2,
            text_intermediate_size=32,
            num_layerwise_text_blocks=1,
            num_refiner_text_blocks=1,
            axes_dims_rope=AXES,
        ),
        scheduler=make_dynamic_scheduler(),
        vae=make_video_vae(),
        text_encoder=make_qwen3_vl(tokenizer, chosen[-1], "Qwen3VLModel"),
        tokenizer=tokenizer,
        text_encoder_select_layers=chosen,
    )


# options of Lumina's transformers
LUMINA = {"sample_size": 8, "in_channels": 4, "hidden_size": 32, "num_layers": 2,
          "num_attention_heads": 2, "num_kv_heads": 2, "multiple_of": 16}  # fmt: skip


add(
    "lumina2", "Lumina2Pipeline",
    transformer=("Lumina2Transformer2DModel", dict(
        num_refiner_layers=1, axes_dim_rope=AXES, axes_lens=(300, 512, 512), cap_feat_dim=WIDTH,
        **LUMINA,
    )),
    scheduler=make_scheduler, vae=partial(make_shifting_vae, depth=4), text_encoder=make_gemma2,
)  # fmt: skip
add(
    "lumina", "LuminaPipeline",
    transformer=("LuminaNextDiT2DModel", dict(cross_attention_dim=WIDTH, **LUMINA)),
    scheduler=make_scheduler, vae=partial(make_shifting_vae, depth=4), text_encoder=make_gemma,
)  # fmt: skip
add(
    "chroma", "ChromaPipeline", length=64,
    transformer=("ChromaTransformer2DModel", dict(
        in_channels=16, **SINGLE, axes_dims_rope=AXES, approximator_num_channels=8,
        approximator_hidden_dim=16, approximator_layers=1,
    )),
    scheduler=make_scheduler, vae=make_shifting_vae, text_encoder=make_t5,
)  # fmt: skip


@pipeline
def make_cogview4(**options):
    tokenizer = make_chat_tokenizer()
    transformer = diffusers.CogView4Transformer2DModel(
        **FOUR | options,
        **DOUBLE,
        text_embed_dim=WIDTH,
        time_embed_dim=16,
        condition_dim=4,
        sample_size=8,
        rope_axes_dim=(256, 256),
    )
    config = transformers.GlmConfig(**make_text_config(tokenizer, 2), pad_token_id=0)
    return diffusers.CogView4Pipeline(
        tokenizer=tokenizer,
        text_encoder=transformers.GlmModel(config),
        vae=make_shifting_vae(),
        transformer=transformer,
        scheduler=make_scheduler(),
    )


@pipeline
def make_hunyuan_image():
    tokenizer = make_chat_tokenizer(1200)
    glyphs = transformers.ByT5Tokenizer()
    transformer = diffusers.HunyuanImageTransformer2DModel(
        **FOUR,
        **HEADS,
        num_layers=1,
        num_single_layers=1,
        num_refiner_layers=1,
        text_embed_dim=WIDTH,
        text_embed_2_dim=WIDTH,
        rope_axes_dim=(8, 8),
    )
    vae = diffusers.AutoencoderKLHunyuanImage(
        in_channels=3,
        out_channels=3,
        latent_channels=4,
        block_out_channels=(32, 32),
        layers_per_block=1,
        spatial_compression_ratio=2,
        sample_size=32,
        scaling_factor=0.75,
    )
    return diffusers.HunyuanImagePipeline(
        scheduler=make_scheduler(),
        vae=vae,
        text_encoder=make_qwen25_vl(tokenizer),
        tokenizer=tokenizer,
        text_encoder_2=make_t5(glyphs),
        tokenizer_2=glyphs,
        transformer=transformer,
        guider=diffusers.AdaptiveProjectedMixGuidance(),
        ocr_guider=diffusers.AdaptiveProjectedMixGuidance(),
    )


SANA = {}  # options of its VAE
for name in ("encoder", "decoder"):
    SANA[f"{name}_block_types"] = ("ResBlock", "EfficientViTBlock")
    SANA[f"{name}_block_out_channels"] = (8, 8)
    SANA[f"{name}_qkv_multiscales"] = ((), (5,))
    SANA[f"{name}_layers_per_block"] = [1, 1]
add(
    "sana", "SanaPipeline", length=512,
    vae=("AutoencoderDC", dict(
        latent_channels=4, attention_head_dim=2, **SANA, downsample_block_type="conv",
        upsample_block_type="interpolate", decoder_norm_types="rms_norm",
        decoder_act_fns="silu", scaling_factor=0.41407,
    )),
    transformer=("SanaTransformer2DModel", dict(
        **FOUR, **DOUBLE, num_cross_attention_heads=2, cross_attention_head_dim=16,
        cross_attention_dim=32, caption_channels=WIDTH, sample_size=8,
    )),
    text_encoder=make_gemma2, scheduler=make_scheduler,
)  # fmt: skip
add(
    "auraflow", "AuraFlowPipeline",
    transformer=("AuraFlowTransformer2DModel", dict(
        sample_size=8, **FOUR, **HEADS, num_mmdit_layers=1, num_single_dit_layers=1,
        joint_attention_dim=WIDTH, caption_projection_dim=32, pos_embed_max_size=256 * 256,
    )),
    text_encoder=partial(make_t5, kind="UMT5"), vae=partial(make_shifting_vae, shift_factor=None),
    scheduler=make_scheduler,
)  # fmt: skip
add(
    "ovis_image", "OvisImagePipeline", length=512,
    transformer=("OvisImageTransformer2DModel", dict(
        in_channels=16, out_channels=16, axes_dims_rope=AXES, **SINGLE
    )),
    scheduler=make_dynamic_scheduler, vae=make_shifting_vae, text_encoder=make_qwen3,
)  # fmt: skip
add(
    "ernie_image", "ErnieImagePipeline", vae=make_flux2_vae,
    transformer=("ErnieImageTransformer2DModel", dict(
        hidden_size=32, num_attention_heads=2, num_layers=2, ffn_hidden_size=32, in_channels=16,
        out_channels=16, text_in_dim=WIDTH, rope_axes_dim=AXES,
    )),
    text_encoder=partial(make_mistral3, layers=2, kind="Mistral3Model"), scheduler=make_scheduler,
)  # fmt: skip


# FLUX.2 [dev]: a processor with a chat template, and guidance as an input
add(
    "flux2", "Flux2Pipeline", length=64, transformer=make_flux2_transformer,
    scheduler=make_dynamic_scheduler, vae=make_flux2_vae,
    text_encoder=partial(make_mistral3, layers=30, kind="Mistral3ForConditionalGeneration"),
    tokenizer=make_pixtral_processor,
)  # fmt: skip
add(
    "nucleus", "NucleusMoEImagePipeline", sees=True,
    transformer=("NucleusMoEImageTransformer2DModel", dict(
        in_channels=16, out_channels=4, num_layers=5, **HEADS, joint_attention_dim=WIDTH,
        axes_dims_rope=AXES, num_experts=4, mlp_ratio=8.0, moe_intermediate_dim=32,
        capacity_factors=2.0,
    )),
    scheduler=make_dynamic_scheduler, vae=make_video_vae,
    text_encoder=partial(make_qwen3_vl, layers=9), processor=make_qwen3_processor,
)  # fmt: skip
add(
    "bria", "BriaPipeline", length=128,
    transformer=("BriaTransformer2DModel", dict(
        in_channels=16, axes_dims_rope=[*AXES], **SINGLE
    )),
    scheduler=make_dynamic_scheduler, vae=make_shifting_vae, text_encoder=make_t5,
)  # fmt: skip
add(
    "bria_fibo", "BriaFiboPipeline", REFUSED, length=512,
    transformer=("BriaFiboTransformer2DModel", dict(
        in_channels=4, axes_dims_rope=[*AXES],
        **SINGLE | {"joint_attention_dim": 2 * WIDTH, "text_encoder_dim": WIDTH},
    )),
    scheduler=make_dynamic_scheduler, vae=make_wan_vae, text_encoder=make_smollm3,
)  # fmt: skip


@pipeline
def make_longcat(words=()):
    """words: those that become one token each."""
    tokenizer = make_vision_tokenizer()
    tokenizer.add_tokens([*words])
    return diffusers.LongCatImagePipeline(
        scheduler=make_dynamic_scheduler(),
        vae=make_shifting_vae(16),
        text_encoder=make_qwen25_vl(tokenizer),
        tokenizer=tokenizer,
        text_processor=make_qwen2_processor(tokenizer),
        transformer=diffusers.LongCatImageTransformer2DModel(
            in_channels=64, pooled_projection_dim=WIDTH, axes_dims_rope=[*AXES], **SINGLE
        ),
    )


add(
    "z_image_omni", "ZImageOmniPipeline", REFUSED,
    transformer=partial(make_z_image_transformer, siglip_feat_dim=32),
    scheduler=make_scheduler, vae=make_shifting_vae, text_encoder=make_qwen3,
    siglip=make_siglip, siglip_processor=transformers.Siglip2ImageProcessor,
)  # fmt: skip
add(
    "bria_fibo2", "BriaFibo2Pipeline", REFUSED, sees=True, transformer=make_bria_fibo2_transformer,
    scheduler=make_dynamic_scheduler, vae=make_flux2_vae,
    text_encoder=partial(make_qwen3_vl, layers=36), processor=make_qwen3_processor,
)  # fmt: skip
IDEOGRAM = ("Ideogram4Transformer2DModel", dict(
    in_channels=16, num_layers=1, **HEADS, intermediate_size=32, adaln_dim=16,
    llm_features_dim=13 * WIDTH, mrope_section=(4, 2, 2),
))  # fmt: skip
add(
    "ideogram4", "Ideogram4Pipeline", REFUSED, sees=True, scheduler=make_scheduler,
    vae=make_flux2_vae, text_encoder=partial(make_qwen3_vl, layers=36, kind="Qwen3VLModel"),
    transformer=IDEOGRAM, unconditional_transformer=IDEOGRAM,
)  # fmt: skip


@refused
def make_kandinsky5(kind="Kandinsky5T2IPipeline", vae=None):
    tokenizer = make_vision_tokenizer()
    return getattr(diffusers, kind)(
        transformer=diffusers.Kandinsky5Transformer3DModel(
            in_visual_dim=4,
            in_text_dim=WIDTH,
            in_text_dim2=WIDTH,
            time_dim=32,
            out_visual_dim=4,
            model_dim=32,
            ff_dim=32,
            num_text_blocks=1,
            num_visual_blocks=1,
            axes_dims=AXES,
        ),
        vae=vae or make_shifting_vae(depth=4),
        text_encoder=make_qwen25_vl(tokenizer),
        tokenizer=make_qwen2_processor(tokenizer, "Qwen2_5_VLProcessor"),
        text_encoder_2=make_clip(max_position_embeddings=77),
        tokenizer_2=make_clip_tokenizer(),
        scheduler=make_scheduler(),
    )


@refused
def make_hidream():
    tokenizer = make_chat_tokenizer(64)
    clip = make_clip_tokenizer()
    llama = make_chat_tokenizer(64)
    config = transformers.LlamaConfig(**make_text_config(llama, 2))
    transformer = diffusers.HiDreamImageTransformer2DModel(
        patch_size=2,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        **HEADS,
        caption_channels=[WIDTH, WIDTH],
        text_emb_dim=20,
        axes_dims_rope=AXES,
        max_resolution=(32, 32),
        llama_layers=[0, 1],
    )
    return diffusers.HiDreamImagePipeline(
        scheduler=make_scheduler(),
        vae=make_shifting_vae(),
        text_encoder=make_clip(32, 8, 3, max_position_embeddings=248),
        tokenizer=clip,
        text_encoder_2=make_clip(16, 12, 3, max_position_embeddings=248),
        tokenizer_2=clip,
        text_encoder_3=make_t5(tokenizer),
        tokenizer_3=tokenizer,
        text_encoder_4=transformers.LlamaForCausalLM(config),
        tokenizer_4=llama,
        transformer=transformer,
    )


@refused
def make_glm_image():
    """Its model of image tokens writes what each image is to hold."""
    plain = make_chat_tokenizer()
    names = ("image_token", "grid_bos_token", "grid_eos_token")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain.backend_tokenizer,
        pad_token=plain.pad_token,
        bos_token=plain.eos_token,
        extra_special_tokens={name: f"<{name}>" for name in names},
    )
    tokenizer.chat_template = plain.chat_template
    text = make_qwen_config(tokenizer, 1) | {"vision_vocab_size": 64, "pad_token_id": 0}
    text["rope_parameters"] = {"rope_type": "default", **ROPE, "partial_rotary_factor": 1.0}
    config = transformers.GlmImageConfig(
        text_config=text,
        vision_config=SIGHT | {"image_size": 64},
        vq_config={"embed_dim": 16, "num_embeddings": 32, "latent_channels": 32},
        image_token_id=1,
        image_start_token_id=40,
        image_end_token_id=41,
    )
    processor = transformers.GlmImageProcessor(
        transformers.GlmImageImageProcessor(), tokenizer, tokenizer.chat_template
    )
    glyphs = transformers.ByT5Tokenizer()
    return diffusers.GlmImagePipeline(
        tokenizer=glyphs,
        processor=processor,
        text_encoder=make_t5(glyphs),
        vision_language_encoder=transformers.GlmImageForConditionalGeneration(config),
        vae=make_shifting_vae(depth=4, latents_mean=[0.0] * 4, latents_std=[1.0] * 4),
        transformer=diffusers.GlmImageTransformer2DModel(
            **FOUR,
            **HEADS,
            num_layers=1,
            text_embed_dim=WIDTH,
            time_embed_dim=32,
            condition_dim=8,
            prior_vq_quantizer_codebook_size=64,
        ),
        scheduler=make_scheduler(),
    )


# ------------------------------------------------------------------- pipelines of blocks


def make_blocks(kind, **parts):
    """A modular pipeline without the block that rewrites captions."""
    blocks = kind()
    blocks.sub_blocks.pop("prompt_upsampler", None)
    made = blocks.init_pipeline()
    made.update_components(**parts)
    return made


@of_blocks
def make_flux3(kind="Flux3AutoBlocks", **options):
    tokenizer = make_chat_tokenizer(512)
    return make_blocks(
        getattr(diffusers, kind),
        transformer=diffusers.Flux3Transformer2DModel(
            in_channels=16,
            cond_in_channels=16,
            **SINGLE | {"joint_attention_dim": 256},
            axes_dims_rope=(4, 4, 4, 4),
            **options,
        ),
        text_encoder=make_qwen3_vl(tokenizer, 33),
        tokenizer=make_qwen3_processor(tokenizer),
        vae=make_flux2_vae(),
    )


@of_blocks
def make_flux3_distilled():
    return make_flux3("Flux3DistilledAutoBlocks", flow_map=True)


@of_blocks
def make_anima():
    tokenizer = make_chat_tokenizer(512)
    letters = [(letter, -1.0) for letter in ["\u2581", *string.ascii_lowercase]]
    special = [(token, 0.0) for token in ("<pad>", "</s>", "<unk>")]
    t5_tokenizer = transformers.T5TokenizerFast(vocab=special + letters, extra_ids=0)
    return make_blocks(
        diffusers.AnimaAutoBlocks,
        text_encoder=make_qwen3(tokenizer),
        tokenizer=tokenizer,
        t5_tokenizer=t5_tokenizer,
        text_conditioner=diffusers.AnimaTextConditioner(
            source_dim=WIDTH,
            target_dim=WIDTH,
            model_dim=WIDTH,
            num_layers=1,
            num_attention_heads=2,
            target_vocab_size=len(t5_tokenizer),
        ),
        vae=make_video_vae(dim_mult=[1, 1, 1, 1], temperal_downsample=[False, True, True]),
        transformer=diffusers.CosmosTransformer3DModel(
            **FOUR,
            **DOUBLE,
            mlp_ratio=2.0,
            text_embed_dim=WIDTH,
            adaln_lora_dim=4,
            max_size=(4, 128, 128),
            rope_scale=(1.0, 4.0, 4.0),
            concat_padding_mask=True,
            extra_pos_embed_type=None,
        ),
        scheduler=make_scheduler(),
    )


def read_parts(make):
    """{name: part} of the pipeline that `make(folder)` saves."""
    with tempfile.TemporaryDirectory() as folder:
        parts = diffusers.DiffusionPipeline.from_pretrained(make(folder)).components
    return {name: part for name, part in parts.items() if part is not None}


def add_blocks(name, kind, make):
    """Add a pipeline of blocks with the parts of the pipeline that `make(folder)` saves."""

    def make_from_parts():
        made = getattr(diffusers, kind)().init_pipeline()
        known = made._component_specs
        parts = {key: part for key, part in read_parts(make).items() if key in known}
        made.update_components(**parts)
        return made

    OTHER_BLOCKS[name] = partial(save, make_from_parts)


def add_other(name, kind, make):
    """Add a pipeline of another class with the parts of the one that `make(folder)` saves."""
    OTHERS[name] = partial(save, lambda: getattr(diffusers, kind)(**read_parts(make)))


add_blocks("klein", "Flux2KleinAutoBlocks", make_klein)
add_blocks("klein_base", "Flux2KleinBaseAutoBlocks", make_klein)
add_blocks("flux2", "Flux2AutoBlocks", MAKE["flux2"])
add_blocks("z_image", "ZImageAutoBlocks", make_z_image)
add_blocks("qwen_image", "QwenImageAutoBlocks", make_qwen_image)
add_blocks("qwen_image_2_1", "QwenImage21AutoBlocks", MAKE["qwen_image_2_1"])
add_blocks("ernie_image", "ErnieImageAutoBlocks", MAKE["ernie_image"])


# ------------------------------------------------------------------- pipelines for videos

TEMPLATE_END = 110  # characters of HunyuanVideo's template that are tokens of their own


def make_umt5(tokenizer):
    return make_t5(tokenizer, "UMT5")


def make_flow_solver(shift=3.0):
    """A multistep solver, as Wan and SkyReels have it."""
    return diffusers.UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=shift
    )


def make_wan_vae_2_1():
    """4 x 4 pixels per latent, and 2 frames."""
    return diffusers.AutoencoderKLWan(
        base_dim=8,
        z_dim=4,
        dim_mult=[1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True],
        scale_factor_temporal=2,
        scale_factor_spatial=4,
        **STATISTICS,
    )


WAN = dict(**DOUBLE, **FOUR, text_dim=WIDTH, freq_dim=16, ffn_dim=32, rope_max_seq_len=64)
add(
    "wan", "WanPipeline", text_encoder=make_umt5, vae=make_wan_vae_2_1,
    transformer=("WanTransformer3DModel", WAN), scheduler=make_flow_solver,
)  # fmt: skip


@pipeline
def make_wan_5b():
    """Wan 2.2 TI2V 5B: a time for each token."""
    tokenizer = make_chat_tokenizer(256)
    return diffusers.WanPipeline(
        tokenizer=tokenizer,
        text_encoder=make_umt5(tokenizer),
        vae=make_wan_vae(),
        transformer=diffusers.WanTransformer3DModel(**WAN),
        scheduler=make_flow_solver(5.0),
        expand_timesteps=True,
    )


add(
    "skyreels_v2", "SkyReelsV2Pipeline", text_encoder=make_umt5, vae=make_wan_vae_2_1,
    transformer=("SkyReelsV2Transformer3DModel", WAN), scheduler=partial(make_flow_solver, 8.0),
)  # fmt: skip


def make_ltx_vae(**options):
    """8 x 8 pixels per latent, and a time beside the latents, as LTX-Video since 0.9.1."""
    return diffusers.AutoencoderKLLTXVideo(
        latent_channels=4,
        block_out_channels=(8, 8),
        down_block_types=("LTXVideoDownBlock3D",) * 2,
        decoder_block_out_channels=(8, 8),
        layers_per_block=(1, 1, 1),
        decoder_layers_per_block=(1, 1, 1),
        spatio_temporal_scaling=(True, True),
        decoder_spatio_temporal_scaling=(True, True),
        decoder_inject_noise=(False,) * 3,
        downsample_type=("conv", "conv"),
        upsample_residual=(False, False),
        upsample_factor=(1, 1),
        patch_size=2,
        spatial_compression_ratio=8,
        temporal_compression_ratio=4,
        **options,
    )


LTX = dict(**FOUR, **DOUBLE, cross_attention_dim=WIDTH, caption_channels=WIDTH)
add(
    "ltx", "LTXPipeline", text_encoder=make_t5,
    vae=partial(make_ltx_vae, timestep_conditioning=True),
    transformer=("LTXVideoTransformer3DModel", LTX),
    scheduler=partial(make_dynamic_scheduler, max_shift=2.05, shift_terminal=0.1),
)  # fmt: skip


def make_llama(tokenizer):
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=WIDTH, intermediate_size=32, num_hidden_layers=4,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=1024,
    )  # fmt: skip
    return transformers.LlamaModel(config)


SMALL = dict(
    latent_channels=4, block_out_channels=(8, 8, 8, 8), layers_per_block=1, norm_num_groups=4
)


def make_hunyuan_vae():
    return diffusers.AutoencoderKLHunyuanVideo(**SMALL)


@pipeline
def make_hunyuan_video():
    """Of its template it cuts off 95 tokens, which are about as many here."""
    from diffusers.pipelines.hunyuan_video import pipeline_hunyuan_video

    tokenizer = make_chat_tokenizer(1024)
    before, _, _ = pipeline_hunyuan_video.DEFAULT_PROMPT_TEMPLATE["template"].partition("{}")
    tokenizer.add_tokens([before[:-TEMPLATE_END]])
    return diffusers.HunyuanVideoPipeline(
        text_encoder=make_llama(tokenizer),
        tokenizer=tokenizer,
        text_encoder_2=make_clip(max_position_embeddings=77),
        tokenizer_2=make_clip_tokenizer(),
        vae=make_hunyuan_vae(),
        transformer=diffusers.HunyuanVideoTransformer3DModel(
            **FOUR, **HEADS, num_layers=1, num_single_layers=1, num_refiner_layers=1,
            text_embed_dim=WIDTH, pooled_projection_dim=WIDTH, rope_axes_dim=AXES,
        ),
        scheduler=make_scheduler(7.0),
    )  # fmt: skip


add(
    "mochi", "MochiPipeline", text_encoder=make_t5,
    vae=("AutoencoderKLMochi", dict(
        latent_channels=12, out_channels=3, encoder_block_out_channels=(32,) * 4,
        decoder_block_out_channels=(32,) * 4, layers_per_block=(1, 1, 1, 1, 1),
    )),
    transformer=("MochiTransformer3DModel", dict(
        **DOUBLE, pooled_projection_dim=WIDTH, in_channels=12, text_embed_dim=WIDTH,
        time_embed_dim=16,
    )),
    scheduler=lambda: diffusers.FlowMatchEulerDiscreteScheduler(invert_sigmas=True),
)  # fmt: skip
add(
    "sana_video", "SanaVideoPipeline", length=512, text_encoder=make_gemma2, vae=make_wan_vae_2_1,
    transformer=("SanaVideoTransformer3DModel", dict(
        **FOUR, **DOUBLE, num_cross_attention_heads=2, cross_attention_head_dim=16,
        cross_attention_dim=32, caption_channels=WIDTH,
    )),
    scheduler=partial(make_flow_solver, 8.0),
)  # fmt: skip
EASY_ANIMATE = dict(
    sees=True, text_encoder=make_qwen2_vl, vae=("AutoencoderKLMagvit", SMALL),
    transformer=("EasyAnimateTransformer3DModel", dict(
        **FOUR, **DOUBLE, patch_size=2, time_embed_dim=16, text_embed_dim=WIDTH
    )),
    scheduler=make_scheduler,
)  # fmt: skip
add("easy_animate", "EasyAnimatePipeline", **EASY_ANIMATE)
add("easy_animate_control", "EasyAnimateControlPipeline", OTHERS, **EASY_ANIMATE)
OTHERS["kandinsky5_t2v"] = partial(
    save, lambda: make_kandinsky5("Kandinsky5T2VPipeline", make_hunyuan_vae())
)


# ------------------------------------------------------------------- pipelines that edit images


def make_small(monkeypatch):
    """Let pipelines resize references to some 64 x 64 pixels, not to 1024 x 1024."""
    for name in ("FluxKontext", "QwenImageEdit", "QwenImageEditPlus", "QwenImage21"):
        getattr(diffusers, f"{name}Pipeline", None)  # imports its module
    small = {"PREFERRED_KONTEXT_RESOLUTIONS": [(32, 32), (24, 48), (48, 24)]}
    small |= {"VAE_IMAGE_SIZE": 64 * 64, "CONDITION_IMAGE_SIZE": 64 * 64}
    modules = [each for name, each in sys.modules.items() if name.startswith("diffusers.")]
    for module in modules:
        for name in small.keys() & vars(module).keys():
            monkeypatch.setattr(module, name, small[name])
        if calculate := vars(module).get("calculate_dimensions"):
            monkeypatch.setattr(
                module, "calculate_dimensions", lambda area, ratio, f=calculate: f(64 * 64, ratio)
            )


def make_edit(kind, **options):
    tokenizer = make_vision_tokenizer()
    return kind(
        transformer=make_qwen_transformer(**options),
        scheduler=make_dynamic_scheduler(),
        vae=make_video_vae(),
        text_encoder=make_qwen25_vl(tokenizer),
        tokenizer=tokenizer,
        processor=make_qwen2_processor(tokenizer),
    )


@edit
def make_qwen_edit_plus():
    return make_edit(diffusers.QwenImageEditPlusPipeline)


@edit
def make_qwen_edit():
    return make_edit(diffusers.QwenImageEditPipeline)


add(
    "joy_edit", "JoyImageEditPipeline", REFUSED, sees=True,
    transformer=("JoyImageEditTransformer3DModel", dict(
        patch_size=[1, 2, 2], in_channels=4, hidden_size=32, num_attention_heads=2,
        text_dim=WIDTH, mlp_width_ratio=2.0, num_layers=1, rope_dim_list=[*AXES],
    )),
    vae=("AutoencoderKLWan", dict(
        base_dim=8, z_dim=4, dim_mult=[1, 1], num_res_blocks=1, temperal_downsample=[False],
        **STATISTICS,
    )),
    scheduler=make_scheduler, text_encoder=partial(make_qwen3_vl, layers=2),
    processor=make_qwen3_processor,
)  # fmt: skip


@refused
def make_qwen_layered():
    options = {"use_additional_t_cond": True, "use_layer3d_rope": True}
    return make_edit(diffusers.QwenImageLayeredPipeline, **options)


@edit
def make_kontext():
    flux = make_flux(guidance_embeds=True)
    parts = {name: part for name, part in flux.components.items() if part is not None}
    return diffusers.FluxKontextPipeline(**parts)


EDIT |= {name: MAKE[name] for name in ("qwen_image_2_1", "flux2")}

add_blocks("flux", "FluxAutoBlocks", MAKE["flux"])
add_blocks("sd3", "StableDiffusion3AutoBlocks", MAKE["sd3"])
add_blocks("kontext", "FluxKontextAutoBlocks", EDIT["kontext"])
KREA2 = partial(save, partial(make_krea2, (2, 5, 8, 11, 14, 17, 20, 23, 26, 29, 32, 35)))
add_blocks("krea2", "Krea2AutoBlocks", KREA2)
add_blocks("krea2_turbo", "Krea2TurboAutoBlocks", KREA2)
add_blocks("qwen_image_2_1_turbo", "QwenImage21TurboAutoBlocks", MAKE["qwen_image_2_1"])
add_blocks("qwen_edit", "QwenImageEditAutoBlocks", EDIT["qwen_edit"])
add_blocks("qwen_edit_plus", "QwenImageEditPlusAutoBlocks", EDIT["qwen_edit_plus"])
add_blocks("qwen_layered", "QwenImageLayeredAutoBlocks", REFUSED["qwen_layered"])
add_blocks("ideogram4", "Ideogram4AutoBlocks", REFUSED["ideogram4"])

CONTROL = partial(save, partial(make_flux, in_channels=32, out_channels=16))
for name, kind in {"": "", "_img2img": "Img2Img", "_inpaint": "Inpaint"}.items():
    add_other(f"flux_control{name}", f"FluxControl{kind}Pipeline", CONTROL)
FILL = partial(save, partial(make_flux, in_channels=48, out_channels=16))
add_other("flux_fill", "FluxFillPipeline", FILL)
add_other("klein_kv", "Flux2KleinKVPipeline", make_klein)
add_other("bria_fibo_edit", "BriaFiboEditPipeline", REFUSED["bria_fibo"])
add_other("kandinsky5_i2i", "Kandinsky5I2IPipeline", REFUSED["kandinsky5"])
# the error of its code for captions that are too long is one itself
WORDS = partial(save, partial(make_longcat, f"{SHORT} {LONG}".split()))
add_other("longcat_edit", "LongCatImageEditPipeline", WORDS)
WIDER = partial(save, partial(make_cogview4, in_channels=8))
add_other("cogview4_control", "CogView4ControlPipeline", WIDER)


for name in ("LTXCondition", "LTXImageToVideo", "LTXI2VLongMultiPrompt"):
    add_other(name, f"{name}Pipeline", MAKE["ltx"])
add_other("forcing", "SkyReelsV2DiffusionForcingPipeline", MAKE["skyreels_v2"])


def give_true_downscale(folder):
    """Give a saved pipeline a VAE of 8 x 8 pixels per latent, for images of their true size."""
    made = diffusers.DiffusionPipeline.from_pretrained(folder)
    videos = {"dim_mult": [1, 1, 1, 1], "temperal_downsample": [False, True, True]}
    kinds = {
        "AutoencoderKL": partial(make_shifting_vae, depth=4),
        "AutoencoderKLFlux2": partial(make_flux2_vae, depth=4),
        "AutoencoderKLQwenImage": partial(make_video_vae, **videos),
    }
    kind = type(made.vae).__name__
    if kind in kinds:  # the others have more than 2 x 2 already
        torch.manual_seed(0)
        made.register_modules(vae=kinds[kind]())
        made.save_pretrained(folder)
    return folder
