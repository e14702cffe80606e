"""Tiny text-to-image pipelines of diffusers with random weights and all parts of the real ones."""

import importlib
import string
from functools import partial

import diffusers
import tokenizers
import torch
import transformers
from conftest import (
    MODELS,
    make_chat_tokenizer,
    make_dynamic_scheduler,
    make_flux2_vae,
    make_qwen_config,
    randomize,
)
from diffusers.models.transformers.transformer_bria_fibo2 import BriaFibo2Transformer2DModel

WIDTH = 32  # of embeddings


# ------------------------------------------------------------------- parts


def make_vae(channels=4, **options):
    """An AutoencoderKL with 2 x 2 pixels per latent."""
    options = {"scaling_factor": 1.5, "shift_factor": 0.25} | options
    return diffusers.AutoencoderKL(
        block_out_channels=(8, 8),
        down_block_types=("DownEncoderBlock2D",) * 2,
        norm_num_groups=4,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=channels,
        **options,
    )


def make_video_vae(channels=4):
    return diffusers.AutoencoderKLQwenImage(
        base_dim=8,
        z_dim=channels,
        dim_mult=[1, 1],
        num_res_blocks=1,
        temperal_downsample=[False],
        latents_mean=[-0.5, 0.1, 0.3, 1.0],
        latents_std=[0.8, 1.2, 2.0, 0.5],
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
        latents_mean=[-0.5, 0.1, 0.3, 1.0],
        latents_std=[0.8, 1.2, 2.0, 0.5],
    )


def make_scheduler(**options):
    return diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0, **options)


def make_clip_tokenizer():
    return transformers.CLIPTokenizer.from_pretrained(MODELS, subfolder="tokenizer")


def make_clip(width=WIDTH, projection=None, layers=2, **options):
    options |= {"hidden_size": width, "num_hidden_layers": layers}
    if projection is None:
        config = transformers.CLIPTextConfig.from_pretrained(MODELS / "text_encoder", **options)
        return transformers.CLIPTextModel(config)
    options["projection_dim"] = projection
    config = transformers.CLIPTextConfig.from_pretrained(MODELS / "text_encoder", **options)
    return transformers.CLIPTextModelWithProjection(config)


def make_t5(tokenizer, kind="T5", width=WIDTH):
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=len(tokenizer), d_model=width, d_kv=8, d_ff=32, num_layers=2, num_heads=4
    )
    return getattr(transformers, f"{kind}EncoderModel")(config)


def make_qwen3(tokenizer, layers=3):
    config = make_qwen_config(tokenizer, layers) | {"head_dim": 16}
    return transformers.Qwen3Model(transformers.Qwen3Config(**config))


def list_vision_tokens(tokenizer):
    """The ids of the tokens that stand for an image, if the tokenizer has them."""
    names = {"vision_start_token_id": VISION[0], "image_token_id": VISION[1]}
    known = tokenizer.get_vocab()
    return {name: known[token] for name, token in names.items() if token in known}


def make_qwen25_vl(tokenizer):
    rope = {"type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
    vision = {"depth": 1, "hidden_size": 32, "num_heads": 2, "out_hidden_size": 32}
    config = transformers.Qwen2_5_VLConfig(
        text_config=make_qwen_config(tokenizer, 3) | {"rope_parameters": rope},
        vision_config=vision | {"intermediate_size": 32, "fullatt_block_indexes": [0]},
        **list_vision_tokens(tokenizer),
    )
    return transformers.Qwen2_5_VLForConditionalGeneration(config)


def make_qwen3_vl(tokenizer, kind, layers):
    text = make_qwen_config(tokenizer, layers) | {"head_dim": 16}
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
    vision = {"depth": 1, "hidden_size": 32, "num_heads": 2, "out_hidden_size": 32}
    vision |= {"intermediate_size": 32, "deepstack_visual_indexes": [0]}
    config = transformers.Qwen3VLConfig(
        text_config=text | {"rope_parameters": rope},
        vision_config=vision,
        **list_vision_tokens(tokenizer),
    )
    return getattr(transformers, kind)(config)


def make_mistral_config(tokenizer, layers):
    config = make_qwen_config(tokenizer, layers) | {"head_dim": 16}
    return transformers.MistralConfig(**config)


def make_pixtral_config():
    config = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
    config |= {"num_hidden_layers": 1, "head_dim": 16, "image_size": 32, "patch_size": 16}
    return transformers.PixtralVisionConfig(**config)


def make_qwen3_processor(tokenizer):
    return transformers.Qwen3VLProcessor(
        image_processor=transformers.Qwen2VLImageProcessor(patch_size=16),
        tokenizer=tokenizer,
        video_processor=transformers.Qwen3VLVideoProcessor(),
        chat_template=tokenizer.chat_template,
    )


def make_gemma2(tokenizer):
    config = make_qwen_config(tokenizer, 2) | {"head_dim": 16}
    return transformers.Gemma2Model(transformers.Gemma2Config(**config))


# ------------------------------------------------------------------- pipelines

MAKE = {}
EDIT = {}  # pipelines that edit images
REFUSED = {}  # pipelines that can't be recorded
BLOCKS = {}  # pipelines of blocks


def pipeline(function, among=MAKE):
    """Add a function that returns a pipeline to `MAKE`, as {name: function(folder)}."""
    name = function.__name__.removeprefix("make_")

    def make(folder):
        torch.manual_seed(0)
        made = function()
        denoiser = made.components["transformer"]
        randomize(denoiser)
        is_modular = isinstance(made, diffusers.ModularPipeline)
        options = {"overwrite_modular_index": True} if is_modular else {}
        made.save_pretrained(str(folder), **options)
        return folder

    among[name] = make
    return function


refused = partial(pipeline, among=REFUSED)
of_blocks = partial(pipeline, among=BLOCKS)


def make_flux_transformer(**options):
    options = {
        "in_channels": 16,
        "num_layers": 1,
        "num_single_layers": 1,
        "attention_head_dim": 32,  # wide enough for 4 bits
        "num_attention_heads": 2,
        "joint_attention_dim": WIDTH,
        "pooled_projection_dim": WIDTH,
        "axes_dims_rope": (8, 12, 12),
    } | options
    return diffusers.FluxTransformer2DModel(**options)


@pipeline
def make_flux(**options):
    tokenizer = make_chat_tokenizer(64)
    return diffusers.FluxPipeline(
        scheduler=make_dynamic_scheduler(),
        vae=make_vae(),
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


@pipeline
def make_sd3():
    tokenizer = make_chat_tokenizer(64)
    clip = make_clip_tokenizer()
    transformer = diffusers.SD3Transformer2DModel(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=64,
        caption_projection_dim=16,
        pooled_projection_dim=20,
        pos_embed_max_size=8 * 32,
        dual_attention_layers=(0,),
        qk_norm="rms_norm",
    )
    return diffusers.StableDiffusion3Pipeline(
        transformer=transformer,
        scheduler=make_scheduler(),
        vae=make_vae(),
        text_encoder=make_clip(32, 8, 3),
        tokenizer=clip,
        text_encoder_2=make_clip(16, 12, 3),
        tokenizer_2=clip,
        text_encoder_3=make_t5(tokenizer, width=64),
        tokenizer_3=tokenizer,
    )


@pipeline
def make_qwen_image_2_1():
    tokenizer = make_vision_tokenizer()
    vae = diffusers.AutoencoderKLQwenImage21(
        base_dim=8,
        decoder_base_dim=8,
        z_dim=4,
        dim_mult=[1, 1, 1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True, True, True],
        latents_mean=[-0.5, 0.1, 0.3, 1.0],
        latents_std=[0.8, 1.2, 2.0, 0.5],
    )
    transformer = diffusers.QwenImage21Transformer2DModel(
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        context_in_dim=32,
        axes_dims_rope=(4, 6, 6),
    )
    return diffusers.QwenImage21Pipeline(
        scheduler=make_dynamic_scheduler(),
        vae=vae,
        text_encoder=make_qwen3_vl(tokenizer, "Qwen3VLForConditionalGeneration", 2),
        processor=make_qwen3_processor(tokenizer),
        transformer=transformer,
    )


@pipeline
def make_krea2():
    tokenizer = make_chat_tokenizer(256)
    transformer = diffusers.Krea2Transformer2DModel(
        in_channels=16,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        num_key_value_heads=2,
        intermediate_size=32,
        timestep_embed_dim=16,
        text_hidden_dim=32,
        num_text_layers=2,
        text_num_attention_heads=2,
        text_num_key_value_heads=2,
        text_intermediate_size=32,
        num_layerwise_text_blocks=1,
        num_refiner_text_blocks=1,
        axes_dims_rope=(4, 6, 6),
    )
    return diffusers.Krea2Pipeline(
        scheduler=make_dynamic_scheduler(),
        vae=make_video_vae(),
        text_encoder=make_qwen3_vl(tokenizer, "Qwen3VLModel", 2),
        tokenizer=tokenizer,
        transformer=transformer,
        text_encoder_select_layers=(1, 2),
    )


@pipeline
def make_lumina2():
    tokenizer = make_chat_tokenizer(256)
    transformer = diffusers.Lumina2Transformer2DModel(
        sample_size=8,
        in_channels=4,
        hidden_size=32,
        num_layers=2,
        num_refiner_layers=1,
        num_attention_heads=2,
        num_kv_heads=2,
        multiple_of=16,
        axes_dim_rope=(4, 6, 6),
        axes_lens=(300, 512, 512),
        cap_feat_dim=32,
    )
    return diffusers.Lumina2Pipeline(
        transformer=transformer,
        scheduler=make_scheduler(),
        vae=make_vae_8(),
        text_encoder=make_gemma2(tokenizer),
        tokenizer=tokenizer,
    )


def make_vae_8(**options):
    """An AutoencoderKL with 8 x 8 pixels per latent, as some pipelines take for granted."""
    options = {"scaling_factor": 1.5, "shift_factor": 0.25, "latent_channels": 4} | options
    return diffusers.AutoencoderKL(
        block_out_channels=(8, 8, 8, 8),
        down_block_types=("DownEncoderBlock2D",) * 4,
        norm_num_groups=4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=1,
        **options,
    )


@pipeline
def make_chroma():
    tokenizer = make_chat_tokenizer(64)
    transformer = diffusers.ChromaTransformer2DModel(
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=WIDTH,
        axes_dims_rope=(4, 6, 6),
        approximator_num_channels=8,
        approximator_hidden_dim=16,
        approximator_layers=1,
    )
    return diffusers.ChromaPipeline(
        scheduler=make_scheduler(),
        vae=make_vae(),
        text_encoder=make_t5(tokenizer),
        tokenizer=tokenizer,
        transformer=transformer,
    )


@pipeline
def make_cogview4():
    tokenizer = make_chat_tokenizer(256)
    config = make_qwen_config(tokenizer, 2) | {"head_dim": 16}
    transformer = diffusers.CogView4Transformer2DModel(
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        text_embed_dim=32,
        time_embed_dim=16,
        condition_dim=4,
        sample_size=8,
        rope_axes_dim=(256, 256),
    )
    return diffusers.CogView4Pipeline(
        tokenizer=tokenizer,
        text_encoder=transformers.GlmModel(transformers.GlmConfig(**config, pad_token_id=0)),
        vae=make_vae(),
        transformer=transformer,
        scheduler=make_scheduler(),
    )


@pipeline
def make_hunyuan_image():
    tokenizer = make_chat_tokenizer(1200)
    glyphs = transformers.ByT5Tokenizer()
    transformer = diffusers.HunyuanImageTransformer2DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=1,
        num_single_layers=1,
        num_refiner_layers=1,
        text_embed_dim=32,
        text_embed_2_dim=32,
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


@pipeline
def make_sana():
    tokenizer = make_chat_tokenizer(512)
    vae = diffusers.AutoencoderDC(
        latent_channels=4,
        attention_head_dim=2,
        encoder_block_types=("ResBlock", "EfficientViTBlock"),
        decoder_block_types=("ResBlock", "EfficientViTBlock"),
        encoder_block_out_channels=(8, 8),
        decoder_block_out_channels=(8, 8),
        encoder_qkv_multiscales=((), (5,)),
        decoder_qkv_multiscales=((), (5,)),
        encoder_layers_per_block=(1, 1),
        decoder_layers_per_block=[1, 1],
        downsample_block_type="conv",
        upsample_block_type="interpolate",
        decoder_norm_types="rms_norm",
        decoder_act_fns="silu",
        scaling_factor=0.41407,
    )
    transformer = diffusers.SanaTransformer2DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=2,
        num_cross_attention_heads=2,
        cross_attention_head_dim=16,
        cross_attention_dim=32,
        caption_channels=32,
        sample_size=8,
    )
    return diffusers.SanaPipeline(
        tokenizer=tokenizer,
        text_encoder=make_gemma2(tokenizer),
        vae=vae,
        transformer=transformer,
        scheduler=make_scheduler(),
    )


@pipeline
def make_auraflow():
    tokenizer = make_chat_tokenizer(256)
    transformer = diffusers.AuraFlowTransformer2DModel(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        num_mmdit_layers=1,
        num_single_dit_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=WIDTH,
        caption_projection_dim=32,
        pos_embed_max_size=256 * 256,
    )
    return diffusers.AuraFlowPipeline(
        tokenizer=tokenizer,
        text_encoder=make_t5(tokenizer, "UMT5"),
        vae=make_vae(shift_factor=None),
        transformer=transformer,
        scheduler=make_scheduler(),
    )


@pipeline
def make_ovis_image():
    tokenizer = make_chat_tokenizer(512)
    transformer = diffusers.OvisImageTransformer2DModel(
        in_channels=16,
        out_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=WIDTH,
        axes_dims_rope=(4, 6, 6),
    )
    return diffusers.OvisImagePipeline(
        scheduler=make_dynamic_scheduler(),
        vae=make_vae(),
        text_encoder=make_qwen3(tokenizer),
        tokenizer=tokenizer,
        transformer=transformer,
    )


@pipeline
def make_ernie_image():
    tokenizer = make_chat_tokenizer(256)
    config = transformers.Mistral3Config(
        text_config=make_mistral_config(tokenizer, 2), vision_config=make_pixtral_config()
    )
    vae = make_flux2_vae()
    transformer = diffusers.ErnieImageTransformer2DModel(
        hidden_size=32,
        num_attention_heads=2,
        num_layers=2,
        ffn_hidden_size=32,
        in_channels=16,
        out_channels=16,
        text_in_dim=32,
        rope_axes_dim=(4, 6, 6),
    )
    return diffusers.ErnieImagePipeline(
        transformer=transformer,
        vae=vae,
        text_encoder=transformers.Mistral3Model(config),
        tokenizer=tokenizer,
        scheduler=make_scheduler(),
    )


@pipeline
def make_flux2():
    """FLUX.2 [dev]: a processor with a chat template, and guidance as an input."""
    tokenizer = make_chat_tokenizer(64)
    processor = transformers.PixtralProcessor(
        transformers.PixtralImageProcessor(patch_size={"height": 16, "width": 16}),
        tokenizer,
        chat_template=tokenizer.chat_template,
    )
    config = transformers.Mistral3Config(
        text_config=make_mistral_config(tokenizer, 30), vision_config=make_pixtral_config()
    )
    transformer = diffusers.Flux2Transformer2DModel(
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=96,
        axes_dims_rope=[4, 4, 4, 4],
    )
    return diffusers.Flux2Pipeline(
        scheduler=make_dynamic_scheduler(),
        vae=make_flux2_vae(),
        text_encoder=transformers.Mistral3ForConditionalGeneration(config),
        tokenizer=processor,
        transformer=transformer,
    )


@pipeline
def make_lumina():
    tokenizer = make_chat_tokenizer(256)
    config = make_qwen_config(tokenizer, 2) | {"head_dim": 16}
    transformer = diffusers.LuminaNextDiT2DModel(
        sample_size=8,
        in_channels=4,
        hidden_size=32,
        num_layers=2,
        num_attention_heads=2,
        num_kv_heads=2,
        multiple_of=16,
        cross_attention_dim=32,
    )
    return diffusers.LuminaPipeline(
        transformer=transformer,
        scheduler=make_scheduler(),
        vae=make_vae_8(),
        text_encoder=transformers.GemmaModel(transformers.GemmaConfig(**config)),
        tokenizer=tokenizer,
    )


@pipeline
def make_nucleus():
    tokenizer = make_vision_tokenizer()
    transformer = diffusers.NucleusMoEImageTransformer2DModel(
        in_channels=16,
        out_channels=4,
        num_layers=5,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        axes_dims_rope=(4, 6, 6),
        num_experts=4,
        mlp_ratio=8.0,
        moe_intermediate_dim=32,
        capacity_factors=2.0,
    )
    return diffusers.NucleusMoEImagePipeline(
        transformer=transformer,
        scheduler=make_dynamic_scheduler(),
        vae=make_video_vae(),
        text_encoder=make_qwen3_vl(tokenizer, "Qwen3VLForConditionalGeneration", 9),
        processor=make_qwen3_processor(tokenizer),
    )


@pipeline
def make_bria():
    tokenizer = make_chat_tokenizer(128)
    return diffusers.BriaPipeline(
        transformer=diffusers.BriaTransformer2DModel(
            in_channels=16,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=WIDTH,
            axes_dims_rope=[4, 6, 6],
        ),
        scheduler=make_dynamic_scheduler(),
        vae=make_vae(),
        text_encoder=make_t5(tokenizer),
        tokenizer=tokenizer,
    )


@refused
def make_bria_fibo():
    tokenizer = make_chat_tokenizer(512)
    config = make_qwen_config(tokenizer, 2) | {"pad_token_id": 0, "bos_token_id": 0}
    config["vocab_size"] = 128_001  # its code names the last token
    return diffusers.BriaFiboPipeline(
        transformer=diffusers.BriaFiboTransformer2DModel(
            in_channels=4,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=2 * WIDTH,
            axes_dims_rope=[4, 6, 6],
            text_encoder_dim=WIDTH,
        ),
        scheduler=make_dynamic_scheduler(),
        vae=make_wan_vae(),
        text_encoder=transformers.SmolLM3ForCausalLM(transformers.SmolLM3Config(**config)),
        tokenizer=tokenizer,
    )


@pipeline
def make_longcat():
    tokenizer = make_vision_tokenizer()
    processor = transformers.Qwen2VLProcessor(
        transformers.Qwen2VLImageProcessor(),
        tokenizer,
        transformers.Qwen2VLVideoProcessor(),
        tokenizer.chat_template,
    )
    return diffusers.LongCatImagePipeline(
        scheduler=make_dynamic_scheduler(),
        vae=make_vae(16),
        text_encoder=make_qwen25_vl(tokenizer),
        tokenizer=tokenizer,
        text_processor=processor,
        transformer=diffusers.LongCatImageTransformer2DModel(
            in_channels=64,
            num_layers=1,
            num_single_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=WIDTH,
            pooled_projection_dim=WIDTH,
            axes_dims_rope=[4, 6, 6],
        ),
    )


@refused
def make_z_image_omni():
    tokenizer = make_chat_tokenizer(256)
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
    vision |= {"num_hidden_layers": 1, "patch_size": 16, "num_patches": 16}
    transformer = diffusers.ZImageTransformer2DModel(
        in_channels=4,
        dim=32,
        n_layers=2,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=32,
        siglip_feat_dim=32,
        axes_dims=[4, 6, 6],
        axes_lens=[256, 32, 32],
    )
    return diffusers.ZImageOmniPipeline(
        scheduler=make_scheduler(),
        vae=make_vae(),
        text_encoder=make_qwen3(tokenizer),
        tokenizer=tokenizer,
        transformer=transformer,
        siglip=transformers.Siglip2VisionModel(transformers.Siglip2VisionConfig(**vision)),
        siglip_processor=transformers.Siglip2ImageProcessor(),
    )


@refused
def make_bria_fibo2():
    tokenizer = make_vision_tokenizer()
    return diffusers.BriaFibo2Pipeline(
        transformer=BriaFibo2Transformer2DModel(
            in_channels=4,
            dim=32,
            n_layers=2,
            n_refiner_layers=1,
            n_heads=2,
            cap_feat_dim=3 * WIDTH,
            injection_layer_ids=(0,),
            perceiver_num_layers=1,
            min_num_gist_tokens=8,
            max_num_gist_tokens=16,
            gist_step=8,
            axes_dims=(4, 6, 6),
        ),
        scheduler=make_dynamic_scheduler(),
        vae=make_flux2_vae(),
        text_encoder=make_qwen3_vl(tokenizer, "Qwen3VLForConditionalGeneration", 36),
        processor=make_qwen3_processor(tokenizer),
    )


@refused
def make_ideogram4():
    tokenizer = make_vision_tokenizer()
    options = {
        "in_channels": 16,
        "num_layers": 1,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "adaln_dim": 16,
        "llm_features_dim": 13 * WIDTH,
        "mrope_section": (4, 2, 2),
    }
    return diffusers.Ideogram4Pipeline(
        scheduler=make_scheduler(),
        vae=make_flux2_vae(),
        text_encoder=make_qwen3_vl(tokenizer, "Qwen3VLModel", 36),
        tokenizer=tokenizer,
        transformer=diffusers.Ideogram4Transformer2DModel(**options),
        unconditional_transformer=diffusers.Ideogram4Transformer2DModel(**options),
    )


@refused
def make_kandinsky5():
    tokenizer = make_vision_tokenizer()
    processor = transformers.Qwen2_5_VLProcessor(
        transformers.Qwen2VLImageProcessor(),
        tokenizer,
        transformers.Qwen2VLVideoProcessor(),
        tokenizer.chat_template,
    )
    return diffusers.Kandinsky5T2IPipeline(
        transformer=diffusers.Kandinsky5Transformer3DModel(
            in_visual_dim=4,
            in_text_dim=32,
            in_text_dim2=32,
            time_dim=32,
            out_visual_dim=4,
            model_dim=32,
            ff_dim=32,
            num_text_blocks=1,
            num_visual_blocks=1,
            axes_dims=(4, 6, 6),
        ),
        vae=make_vae_8(),
        text_encoder=make_qwen25_vl(tokenizer),
        tokenizer=processor,
        text_encoder_2=make_clip(max_position_embeddings=77),
        tokenizer_2=make_clip_tokenizer(),
        scheduler=make_scheduler(),
    )


@refused
def make_hidream():
    tokenizer = make_chat_tokenizer(64)
    clip = make_clip_tokenizer()
    llama = make_chat_tokenizer(64)
    config = make_qwen_config(llama, 2) | {"head_dim": 16}
    transformer = diffusers.HiDreamImageTransformer2DModel(
        patch_size=2,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        caption_channels=[WIDTH, 32],
        text_emb_dim=20,
        axes_dims_rope=(4, 6, 6),
        max_resolution=(32, 32),
        llama_layers=[0, 1],
    )
    return diffusers.HiDreamImagePipeline(
        scheduler=make_scheduler(),
        vae=make_vae(),
        text_encoder=make_clip(32, 8, 3, max_position_embeddings=248),
        tokenizer=clip,
        text_encoder_2=make_clip(16, 12, 3, max_position_embeddings=248),
        tokenizer_2=clip,
        text_encoder_3=make_t5(tokenizer),
        tokenizer_3=tokenizer,
        text_encoder_4=transformers.LlamaForCausalLM(transformers.LlamaConfig(**config)),
        tokenizer_4=llama,
        transformer=transformer,
    )


@refused
def make_glm_image():
    """Its model of image tokens writes what each image is to hold."""
    plain = make_chat_tokenizer(256)
    names = ("image_token", "grid_bos_token", "grid_eos_token")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain.backend_tokenizer,
        pad_token=plain.pad_token,
        bos_token=plain.eos_token,
        extra_special_tokens={name: f"<{name}>" for name in names},
    )
    tokenizer.chat_template = plain.chat_template
    text = make_qwen_config(tokenizer, 1) | {"vision_vocab_size": 64, "pad_token_id": 0}
    text["rope_parameters"] = {"rope_type": "default", "mrope_section": [2, 3, 3],
                               "rope_theta": 10000.0, "partial_rotary_factor": 1.0}  # fmt: skip
    vision = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32}
    config = transformers.GlmImageConfig(
        text_config=text,
        vision_config=vision | {"image_size": 64},
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
        vae=make_vae_8(latents_mean=[0.0] * 4, latents_std=[1.0] * 4),
        transformer=diffusers.GlmImageTransformer2DModel(
            in_channels=4,
            out_channels=4,
            num_layers=1,
            attention_head_dim=16,
            num_attention_heads=2,
            text_embed_dim=WIDTH,
            time_embed_dim=32,
            condition_dim=8,
            prior_vq_quantizer_codebook_size=64,
        ),
        scheduler=make_scheduler(),
    )


# ------------------------------------------------------------------- pipelines that edit images

edit = partial(pipeline, among=EDIT)
VISION = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")


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
    transformer = diffusers.Flux3Transformer2DModel(
        in_channels=16,
        cond_in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=256,
        axes_dims_rope=(4, 4, 4, 4),
        **options,
    )
    return make_blocks(
        getattr(diffusers, kind),
        text_encoder=make_qwen3_vl(tokenizer, "Qwen3VLForConditionalGeneration", 33),
        tokenizer=make_qwen3_processor(tokenizer),
        vae=make_flux2_vae(),
        transformer=transformer,
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
        vae=diffusers.AutoencoderKLQwenImage(
            base_dim=8,
            z_dim=4,
            dim_mult=[1, 1, 1, 1],
            num_res_blocks=1,
            latents_mean=[-0.5, 0.1, 0.3, 1.0],
            latents_std=[0.8, 1.2, 2.0, 0.5],
        ),
        transformer=diffusers.CosmosTransformer3DModel(
            in_channels=4,
            out_channels=4,
            num_attention_heads=2,
            attention_head_dim=16,
            num_layers=2,
            mlp_ratio=2.0,
            text_embed_dim=WIDTH,
            adaln_lora_dim=4,
            max_size=(4, 128, 128),
            rope_scale=(1.0, 4.0, 4.0),
            concat_padding_mask=True,
            extra_pos_embed_type=None,
        ),
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
    )


def make_small(monkeypatch):
    """Let pipelines resize references to some 64 x 64 pixels, not to 1024 x 1024."""
    kontext, edit, plus, new = (
        importlib.import_module(f"diffusers.pipelines.{name}")
        for name in (
            "flux.pipeline_flux_kontext",
            "qwenimage.pipeline_qwenimage_edit",
            "qwenimage.pipeline_qwenimage_edit_plus",
            "qwenimage21.pipeline_qwenimage21",
        )
    )
    monkeypatch.setattr(kontext, "PREFERRED_KONTEXT_RESOLUTIONS", [(32, 32), (24, 48), (48, 24)])
    monkeypatch.setattr(plus, "VAE_IMAGE_SIZE", 64 * 64)
    monkeypatch.setattr(plus, "CONDITION_IMAGE_SIZE", 64 * 64)
    for module in (edit, new):
        calculate = module.calculate_dimensions
        monkeypatch.setattr(
            module, "calculate_dimensions", lambda area, ratio, f=calculate: f(64 * 64, ratio)
        )


def make_vision_tokenizer():
    tokenizer = make_chat_tokenizer(512)
    tokenizer.add_special_tokens({"additional_special_tokens": [*VISION]})
    plain = tokenizers.processors.TemplateProcessing("$A", "$A $B", [])  # adds no token
    tokenizer.backend_tokenizer.post_processor = plain
    return tokenizer


def make_edit_parts():
    """The parts of the pipelines of Qwen-Image-Edit."""
    tokenizer = make_vision_tokenizer()
    image_processor = transformers.Qwen2VLImageProcessor()
    processor = transformers.Qwen2VLProcessor(
        image_processor, tokenizer, transformers.Qwen2VLVideoProcessor(), tokenizer.chat_template
    )
    transformer = diffusers.QwenImageTransformer2DModel(
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        axes_dims_rope=(4, 6, 6),
    )
    return {
        "scheduler": make_dynamic_scheduler(),
        "vae": make_video_vae(),
        "text_encoder": make_qwen25_vl(tokenizer),
        "tokenizer": tokenizer,
        "processor": processor,
        "transformer": transformer,
    }


@edit
def make_qwen_edit_plus():
    return diffusers.QwenImageEditPlusPipeline(**make_edit_parts())


@edit
def make_qwen_edit():
    return diffusers.QwenImageEditPipeline(**make_edit_parts())


@edit
def make_kontext():
    flux = make_flux(guidance_embeds=True)
    parts = {name: part for name, part in flux.components.items() if part is not None}
    return diffusers.FluxKontextPipeline(**parts)


EDIT["qwen_image_2_1"] = MAKE["qwen_image_2_1"]
