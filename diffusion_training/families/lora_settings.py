"""The settings with which a LoRA of each model is usually trained, and their sources.

A line per model; docs/lora.md has its table from here, and the recipes their values. Imports only
the standard library. `python tests/docs/test_lora_settings.py` updates the page.
"""

from typing import NamedTuple

from diffusion_training.families.lora_layers import LAYERS

# the repositories that were read: {name: (address, commit)}; where models are newer, a later commit
SOURCES = {
    "diffusers": ("huggingface/diffusers", "58eb52c0803ea9af3abec60841c2a093bdf1f951"),
    "DiffSynth": ("modelscope/DiffSynth-Studio", "fed7b18fac2ed4cb802796eec91970e7659bccde"),
    "ai-toolkit": ("ostris/ai-toolkit", "27a03a91f23eb1b757d5ec2e80ee3e129cfcc350"),
    "OneTrainer": ("Nerogar/OneTrainer", "23df3832e8f213d64c337e39f9365ba46e99fed0"),
    "SimpleTuner": ("bghira/SimpleTuner", "bc8e6ab7738ce457a2ed8eb2d26cadd91c6442cb"),
    "musubi-tuner": ("kohya-ss/musubi-tuner", "30c658c4f4b0bf05038b3346eff9670259b10fc7"),
    "sd-scripts": ("kohya-ss/sd-scripts", "48d368fa557731ad0488c07304dfeba8c07910eb"),
    "krea-2": ("krea-ai/krea-2", "0ef6ff75608f5c3571aceac98444fcf8a820a230"),
    "diffusion-pipe": ("tdrussell/diffusion-pipe", "0784ca8bdf7c8c302e826c0f31abe839c77b110f"),
    "diffusers, later": ("huggingface/diffusers", "0cca9a38990cbc51d69366c1a67f5cfdc25601f7"),
    "DiffSynth, later": ("modelscope/DiffSynth-Studio", "a3241922d2db591165ac7c46ba54816ff45ade42"),
    "musubi-tuner, later": ("kohya-ss/musubi-tuner", "02b5088978d289407ec06deccf5189e8c275a00e"),
    "SimpleTuner 4.10.1": ("simpletuner 4.10.1", "https://pypi.org/project/simpletuner/4.10.1/"),
}


class Said(NamedTuple):
    """What a source says about a model. Its alpha is the rank where it is not named."""

    source: str  # in `SOURCES`
    path: str
    what: str


class LoraSettings(NamedTuple):
    """Settings of one model. What is None is the script's default, which depends on the model."""

    title: str
    denoiser: str  # in `LAYERS`
    sources: tuple[Said, ...]
    chosen: str  # what was chosen where the sources disagree, and why
    rank: int = 16
    alpha: float | None = None  # the rank
    learning_rate: float = 1e-4
    steps: int = 1000
    images: int = 2  # in a step
    resolution: int = 1024
    timesteps: str | None = "logit_normal"  # --weighting_scheme; None: a U-Net draws them evenly
    shift: float | None = None  # that of the pipeline
    caption_dropout: float = 0.05
    weight_decay: float = 0.01

    @property
    def layers(self) -> str:
        """--lora_layers."""
        return LAYERS[self.denoiser].default


AI_TOOLKIT = Said(
    "ai-toolkit",
    "ui/src/app/jobs/new/jobConfig.ts",
    "all linear layers of the blocks, rank 32, 1e-4, 3,000 x 1, 512 to 1024 px, caption dropout "
    "0.05, weight decay 1e-4",
)
KREA2_SCRIPT = Said(
    "diffusers",
    "examples/dreambooth/train_dreambooth_lora_krea2.py, README_krea2.md",
    "the authors' recommendation: attention with its gate, MLP and embedders, rank 32, 3e-4 to "
    "7e-4, constant, 1,000 x 1, 1024 px; for long runs a higher rank on attention and its gate",
)
KLEIN = (
    Said(
        "diffusers",
        "examples/dreambooth/README_flux2.md, train_dreambooth_lora_flux2_klein.py",
        "attention (and the layers that hold attention and MLP), rank 4, 1e-4, 500 x 4, 1024 px, "
        "no caption dropout",
    ),
    Said(
        "DiffSynth",
        "examples/flux2/model_training/lora/",
        "attention and MLP (also the layers that hold both), rank 32, 1e-4, 250 passes x 1",
    ),
    Said("musubi-tuner", "docs/flux_2.md", "all linear layers of the blocks, rank 32, 1e-4"),
    Said("ai-toolkit", "ui/src/app/jobs/new/options.tsx", AI_TOOLKIT.what + ", base in 8 bits"),
    Said(
        "OneTrainer",
        "training_presets/Flux 2",
        "all linear layers of the blocks, rank 16, alpha 1, 3e-5, 100 passes x 2, 512 px, "
        "logit-normal with the pipeline's shift, base in int8",
    ),
)
QWEN = (
    Said(
        "diffusers",
        "examples/dreambooth/README_qwen.md, train_dreambooth_lora_qwen_image.py",
        "attention, rank 4, 2e-4, 500 x 4, 1024 px, no caption dropout",
    ),
    Said(
        "DiffSynth",
        "examples/qwen_image/model_training/lora/",
        "attention, half of the MLP and modulation, rank 32, 1e-4, 250 passes x 1",
    ),
    Said(
        "musubi-tuner",
        "docs/qwen_image.md",
        "all linear layers of the blocks without modulation, rank 16, 5e-5, shift 2.2",
    ),
    Said(
        "OneTrainer",
        "training_presets/QwenImage",
        "attention and MLP, rank 16, alpha 1, 3e-4, 100 passes x 2, 512 px, logit-normal, base in "
        "8 bits",
    ),
)
QWEN_CHOICE = (
    "The MLP, since three of four train it. Rank 16, since a LoRA of rank 32 takes 2 GB more. "
    "The middle of the three rates with alpha = rank."
)
SD3 = (
    Said(
        "diffusers",
        "examples/dreambooth/README_sd3.md, train_dreambooth_lora_sd3.py",
        "attention, 1e-4, 500 x 4, 1024 px, logit-normal; or rank 32, Prodigy, 1,500 x 1",
    ),
    Said(
        "OneTrainer",
        "training_presets/SD3",
        "all linear layers, rank 16, alpha 1, 3e-4, 100 passes x 4, 1024 px, logit-normal, base in "
        "16 bits",
    ),
    Said("sd-scripts", "docs/sd3_train_network.md", "all of the blocks, rank 16, alpha 1, 1e-4"),
)
SD3_CHOICE = "The MLP and rank 16, as two of the trainers have them; alpha = rank, as diffusers."
QWEN_2_1 = (
    Said(
        "diffusers, later",
        "examples/dreambooth/README_qwenimage21.md",
        "attention, rank 4 (16 is its default), 1e-4, 500 x 4, 1024 px, no caption dropout; edits "
        "1,000 x 1",
    ),
    Said(
        "DiffSynth, later",
        "examples/qwen_image_21/model_training/lora/Qwen-Image-2.1.sh",
        "all linear layers of the blocks, rank 32, 1e-4, 250 passes x 1, edits 500",
    ),
    Said(
        "musubi-tuner, later",
        "docs/qwen_image_21.md",
        "attention and MLP, rank 16, 1e-4, 2,000 x 1, shift 3",
    ),
    Said(
        "SimpleTuner 4.10.1",
        "simpletuner/examples/qwen_image-2.1-24g.peft-lora/config.json",
        "attention, rank 32, 1e-4, 2,000 x 1, 512 px, no caption dropout, shift by resolution, "
        "base in 16 bits, with a training adapter",
    ),
)
QWEN_2_1_CHOICE = (
    "Attention, MLP and rank 16, as musubi-tuner. No dropped captions, as diffusers and "
    "SimpleTuner: the model draws without guidance. The recipes have no training adapter."
)
WAN_1_3B = Said(
    "ai-toolkit",
    "config/examples/train_lora_wan21_1b_24gb.yaml",
    "from stills: all linear layers of the blocks, rank 32, 1e-4, 2,000 x 1, 632 px, caption "
    "dropout 0.05, sigmoid (logit-normal), base in 16 bits",
)
WAN_14B = Said(
    "ai-toolkit",
    "config/examples/train_lora_wan21_14b_24gb.yaml",
    f"{WAN_1_3B.what.removesuffix('16 bits')}8 bits",
)
WAN_DIFFSYNTH = "attention and MLP, rank 32, 1e-4, 500 passes x 1, 832 x 480 px"
WAN_SIMPLETUNER = "attention, rank 16, 6e-5, 200 x 1, {} px, caption dropout 0.1, base in {}"
WAN_MUSUBI = Said(
    "musubi-tuner",
    "docs/wan.md, src/musubi_tuner/networks/lora_wan.py",
    "attention and MLP, rank 32, 2e-4, 16 passes, shift 3, base in fp8",
)
WAN_PIPE = Said(
    "diffusion-pipe",
    "docs/supported_models.md, examples/main_example.toml",
    "rank 32, 2e-5 (in the example for all models), logit-normal",
)
WAN_CHOICE = (
    "Attention, MLP and rank 32, as all but SimpleTuner; 1e-4, the middle of the five rates; and "
    "the 2,000 images of ai-toolkit, the one that trains from stills, as 1,000 x 2."
)
BETWEEN = "1,000 x 2, as explained above."
SETTINGS = {
    "sd15": LoraSettings(
        "Stable Diffusion 1.5",
        "UNet2DConditionModel",
        (
            Said(
                "diffusers",
                "examples/text_to_image/README.md",
                "attention, rank 4, 1e-4, 100 passes x 1, 512 px",
            ),
            Said(
                "OneTrainer",
                "training_presets/SD1.5",
                "attention and MLP, rank 16, alpha 1, 3e-4, 100 passes x 4, 512 px, base in 16 "
                "bits",
            ),
            Said(
                "sd-scripts",
                "docs/train_network.md, networks/lora.py",
                "attention, MLP and projections, rank 16, alpha 1, 1e-4, 10 passes",
            ),
        ),
        "The MLP, as two of three; alpha = rank with 1e-4, as diffusers; 100 passes of 20 "
        "photographs are 500 x 4.",
        steps=500,
        images=4,
        resolution=512,
        timesteps=None,
    ),
    "sdxl": LoraSettings(
        "SDXL",
        "UNet2DConditionModel",
        (
            Said(
                "diffusers",
                "examples/dreambooth/README_sdxl.md",
                "attention, rank 4, 1e-4, 500 x 4, 1024 px",
            ),
            Said(
                "OneTrainer",
                "training_presets/SDXL",
                "attention and MLP, rank 16, alpha 1, 3e-4, 100 passes x 4, 1024 px, base in 16 "
                "bits",
            ),
            Said(
                "sd-scripts",
                "docs/sdxl_train_network.md, networks/lora.py",
                "attention, MLP and projections, rank 32, alpha 16, 1e-4",
            ),
            Said(
                "DiffSynth",
                "examples/stable_diffusion_xl/model_training/lora/",
                "attention, MLP and projections, rank 32, 1e-4, 50 passes",
            ),
        ),
        "The MLP, as three of four; rank 16, since a thing needs no more; 500 x 4, as diffusers.",
        steps=500,
        images=4,
        timesteps=None,
    ),
    "sd35_medium": LoraSettings(
        "Stable Diffusion 3.5 Medium", "SD3Transformer2DModel", SD3, f"{SD3_CHOICE} {BETWEEN}"
    ),
    "sd35_large": LoraSettings(
        "Stable Diffusion 3.5 Large",
        "SD3Transformer2DModel",
        (
            *SD3,
            Said(
                "ai-toolkit",
                "config/examples/train_lora_sd35_large_24gb.yaml",
                "all linear layers of the blocks, rank 16, 1e-4, 2,000 x 1, 1024 px, caption "
                "dropout 0.05, noise levels drawn evenly, base in 8 bits",
            ),
        ),
        f"{SD3_CHOICE} {BETWEEN}",
    ),
    "flux1_dev": LoraSettings(
        "FLUX.1-dev",
        "FluxTransformer2DModel",
        (
            Said(
                "diffusers",
                "examples/dreambooth/README_flux.md, train_dreambooth_lora_flux.py",
                "attention and MLP, rank 4, Prodigy, 500 x 4, 512 or 1024 px, guidance 1",
            ),
            Said(
                "DiffSynth",
                "examples/flux/model_training/lora/FLUX.1-dev.sh",
                "attention, MLP and modulation, rank 32, 1e-4, 250 passes x 1",
            ),
            Said(
                "ai-toolkit",
                "config/examples/train_lora_flux_24gb.yaml",
                "all linear layers of the blocks, rank 16, 1e-4, 2,000 x 1, 512 to 1024 px, "
                "caption dropout 0.05, base in 8 bits",
            ),
            Said(
                "OneTrainer",
                "training_presets/Flux Dev.1",
                "all linear layers, rank 16, alpha 1, 3e-4, 100 passes x 4, 768 px, logit-normal "
                "with the pipeline's shift, base in nf4",
            ),
            Said(
                "sd-scripts",
                "docs/flux_train_network.md",
                "all of the blocks, rank 16, alpha 1, 1e-4",
            ),
        ),
        f"Rank 16, as three of five. {BETWEEN} No dropped captions: the model draws without "
        "guidance of two passes.",
        caption_dropout=0.0,
    ),
    "flux1_kontext": LoraSettings(
        "FLUX.1 Kontext (edits)",
        "FluxTransformer2DModel",
        (
            Said(
                "diffusers",
                "examples/dreambooth/train_dreambooth_lora_flux_kontext.py",
                "attention and MLP, rank 4, 1e-4",
            ),
            Said(
                "DiffSynth",
                "examples/flux/model_training/lora/FLUX.1-Kontext-dev.sh",
                "attention, MLP and modulation, rank 32, 1e-4, 2,000 passes x 1",
            ),
            Said("musubi-tuner", "docs/flux_kontext.md", "all of the blocks, rank 32, 1e-4"),
            Said(
                "ai-toolkit",
                "config/examples/train_lora_flux_kontext_24gb.yaml",
                "all linear layers of the blocks, rank 16, 1e-4, 3,000 x 1, 512 and 768 px, "
                "caption dropout 0.05, base in 8 bits",
            ),
        ),
        "Rank 32, as two of four, since an edit is more than a thing. 3,000 pairs, as ai-toolkit, "
        "in half the steps.",
        rank=32,
        steps=1500,
        caption_dropout=0.0,
    ),
    "klein_4b": LoraSettings(
        "FLUX.2 klein 4B",
        "Flux2Transformer2DModel",
        KLEIN,
        f"Attention and MLP, rank 32, 1e-4, as three of five. {BETWEEN}",
        rank=32,
    ),
    "klein_9b": LoraSettings(
        "FLUX.2 klein 9B", "Flux2Transformer2DModel", KLEIN, f"As of klein 4B. {BETWEEN}", rank=32
    ),
    "klein_4b_edit": LoraSettings(
        "FLUX.2 klein 4B (edits)",
        "Flux2Transformer2DModel",
        KLEIN,
        "As of klein 4B. 3,000 pairs, as ai-toolkit has for edits of FLUX.1 and Qwen-Image.",
        rank=32,
        steps=1500,
    ),
    "flux3_klein": LoraSettings(
        "FLUX.3 klein",
        "Flux3Transformer2DModel",
        (
            Said(
                "SimpleTuner 4.10.1",
                "simpletuner/examples/flux3_image-24g.peft-lora/config.json",
                "the base: attention, rank 32, 1e-4, 2,000 x 3, 512 px, shift 6.93, no caption "
                "dropout, base in 16 bits; the turbo at 768 px, 4,000 x 1, with a training adapter",
            ),
        ),
        "Its rank and rate, which are those of FLUX.2 klein, whose other settings are taken: one "
        f"source is too few to leave the MLP out. {BETWEEN}",
        rank=32,
    ),
    "krea2": LoraSettings(
        "Krea 2",
        "Krea2Transformer2DModel",
        (
            KREA2_SCRIPT,
            Said("krea-2", "README.md", "train on Raw, draw with Turbo; names diffusers' script"),
            Said(
                "DiffSynth",
                "examples/krea2/model_training/lora/Krea-2-Raw.sh",
                "the authors' layers, rank 32, 1e-4, 250 passes x 1",
            ),
            Said(
                "musubi-tuner",
                "docs/krea2.md",
                "the authors' layers, rank 32, 1e-4, shift 2.5, 16 passes",
            ),
            Said(
                "OneTrainer",
                "training_presets/Krea 2",
                "attention and MLP, rank 16, alpha 1, 3e-4, 100 passes x 2, 512 px, base in int8",
            ),
            Said(
                "SimpleTuner",
                "simpletuner/examples/krea2.peft-lora",
                "attention, rank 64, 1e-4 (Lion), 1,000 x 1, base in int8",
            ),
        ),
        "The authors' own layers, rank, rate and steps; without text_fusion.projector, whose full "
        "rank is 1, and with the MLP's gate.",
        rank=32,
        learning_rate=3e-4,
        images=1,
        caption_dropout=0.0,
    ),
    "z_image": LoraSettings(
        "Z-Image",
        "ZImageTransformer2DModel",
        (
            Said(
                "diffusers",
                "examples/dreambooth/README_z_image.md",
                "attention, rank 4, 1e-4 or Prodigy, 500 x 4, 1024 px",
            ),
            Said(
                "DiffSynth",
                "examples/z_image/model_training/lora/Z-Image.sh",
                "attention and MLP, rank 32, 1e-4, 250 passes x 1",
            ),
            Said(
                "musubi-tuner",
                "docs/zimage.md",
                "all of the blocks, rank 32, 1e-4, shift 2, 16 passes",
            ),
            Said(
                "OneTrainer",
                "training_presets/Z-Image",
                "attention and MLP without the refiners, rank 16, alpha 1, 3e-4, 100 passes x 2, "
                "512 px, logit-normal, base in 8 bits",
            ),
            Said(
                "SimpleTuner",
                "simpletuner/examples/z-image.peft-lora",
                "attention, rank 64, 1e-4 (Lion), 1,000 x 1, base in int8",
            ),
        ),
        f"Attention and MLP, rank 32, as DiffSynth and musubi-tuner. {BETWEEN}",
        rank=32,
    ),
    "qwen_image": LoraSettings(
        "Qwen-Image", "QwenImageTransformer2DModel", QWEN, f"{QWEN_CHOICE} {BETWEEN}"
    ),
    "qwen_image_edit": LoraSettings(
        "Qwen-Image-Edit",
        "QwenImageTransformer2DModel",
        (
            *QWEN[1:],
            Said(
                "ai-toolkit",
                "config/examples/train_lora_qwen_image_edit_2509_32gb.yaml",
                "all linear layers of the blocks, rank 16, 1e-4, 3,000 x 1, 512 to 1024 px, "
                "caption dropout 0.05, base rounded to 3 bits beside an adapter that undoes that",
            ),
        ),
        "As of Qwen-Image. 3,000 pairs, as ai-toolkit, in half the steps.",
        steps=1500,
    ),
    "qwen_image_2_1": LoraSettings(
        "Qwen-Image 2.1",
        "QwenImage21Transformer2DModel",
        QWEN_2_1,
        f"{QWEN_2_1_CHOICE} {BETWEEN}",
        caption_dropout=0.0,
    ),
    "qwen_image_2_1_edit": LoraSettings(
        "Qwen-Image 2.1 (edits)",
        "QwenImage21Transformer2DModel",
        QWEN_2_1,
        "As of Qwen-Image 2.1. 3,000 pairs, as of Qwen-Image-Edit: between 1,000 and 500 passes.",
        steps=1500,
        caption_dropout=0.0,
    ),
    "anima": LoraSettings(
        "Anima",
        "CosmosTransformer3DModel",
        (
            Said(
                "DiffSynth",
                "examples/anima/model_training/lora/anima-preview.sh",
                "all linear layers of the blocks, rank 32, 1e-4, 250 passes x 1",
            ),
            Said(
                "OneTrainer",
                "training_presets/Anima",
                "attention and MLP, rank 16, alpha 1, 3e-5, 100 passes x 2, 512 px, logit-normal, "
                "base in int8",
            ),
            Said(
                "SimpleTuner",
                "simpletuner/examples/anima.peft-lora",
                "attention, rank 64, 1e-5, 1,000 x 1, shift 3, caption dropout 0.1",
            ),
            Said(
                "sd-scripts",
                "docs/anima_train_network.md",
                "blocks and embedders, rank 8, alpha 1, 1e-4 (lower for a larger alpha), "
                "logit-normal",
            ),
        ),
        "Attention and MLP, as three of four; rank 16, as OneTrainer. The rates lie between "
        f"1e-5 and 1e-4: 3e-5, their middle. {BETWEEN}",
        learning_rate=3e-5,
    ),
    "chroma": LoraSettings(
        "Chroma",
        "ChromaTransformer2DModel",
        (
            Said(
                "ai-toolkit",
                "config/examples/train_lora_chroma_24gb.yaml",
                "all linear layers of the blocks, rank 16, 1e-4, 2,000 x 1, 512 to 1024 px, "
                "caption dropout 0.05, base in 8 bits",
            ),
            Said(
                "OneTrainer",
                "training_presets/Chroma",
                "attention and MLP, rank 16, alpha 1, 3e-4, 100 passes x 2, 512 px, noise levels "
                "by an inverted parabola, base in 8 bits",
            ),
            Said(
                "SimpleTuner",
                "simpletuner/examples/chroma.peft-lora",
                "attention, rank 16, 1e-4, shift 3, base in int8",
            ),
        ),
        f"The MLP, as two of three. {BETWEEN}",
    ),
    "lumina2": LoraSettings(
        "Lumina 2",
        "Lumina2Transformer2DModel",
        (
            Said(
                "diffusers",
                "examples/dreambooth/README_lumina2.md",
                "attention, rank 4, 1e-4, 500 x 4, 1024 px",
            ),
            Said(
                "ai-toolkit",
                "config/examples/train_lora_lumina.yaml",
                "all linear layers of the blocks, rank 16, 1e-4, 2,000 x 1, 512 to 1024 px, "
                "caption dropout 0.05, base in 16 bits",
            ),
            Said(
                "sd-scripts",
                "docs/lumina_train_network.md",
                "all of the blocks, rank 8, 1e-4, 10 passes, shift 6",
            ),
        ),
        f"The MLP, as two of three; rank 16, the largest. {BETWEEN}",
    ),
    "ernie_image": LoraSettings(
        "ERNIE-Image",
        "ErnieImageTransformer2DModel",
        (
            Said(
                "DiffSynth",
                "examples/ernie_image/model_training/lora/ERNIE-Image.sh",
                "attention, rank 32, 1e-4, 250 passes x 1, 1024 px",
            ),
            Said(
                "OneTrainer",
                "training_presets/Ernie Image",
                "attention and MLP, rank 16, alpha 1, 3e-4, 100 passes x 2, 512 px, base in int8",
            ),
            Said(
                "SimpleTuner",
                "simpletuner/examples/ernie.peft-lora",
                "attention, rank 16, 1e-4 (Lion), 512 px, base in int8",
            ),
            AI_TOOLKIT,
        ),
        f"The MLP, as two of four; rank 16, as two of four. {BETWEEN}",
    ),
    "auraflow": LoraSettings(
        "AuraFlow",
        "AuraFlowTransformer2DModel",
        (
            Said(
                "SimpleTuner",
                "simpletuner/examples/auraflow.peft-lora",
                "attention, rank 8, 1e-4 (Lion), shift 1.73, 1024 px, base in 16 bits",
            ),
        ),
        "One source: its rate and shift (which is the pipeline's), and what other transformers "
        "have else.",
    ),
    "wan21_1_3b": LoraSettings(
        "Wan 2.1 1.3B (stills)",
        "WanTransformer3DModel",
        (
            WAN_1_3B,
            Said(
                "DiffSynth",
                "examples/wanvideo/model_training/lora/Wan2.1-T2V-1.3B.sh",
                WAN_DIFFSYNTH,
            ),
            WAN_MUSUBI,
            Said(
                "SimpleTuner",
                "simpletuner/examples/wan2.1-t2v-1.3b-480p-single-gpu.peft-lora+ramtorch",
                WAN_SIMPLETUNER.format(480, "16 bits"),
            ),
            WAN_PIPE,
        ),
        WAN_CHOICE,
        rank=32,
        resolution=640,
    ),
    "wan21_14b": LoraSettings(
        "Wan 2.1 14B (stills)",
        "WanTransformer3DModel",
        (
            WAN_14B,
            Said(
                "DiffSynth",
                "examples/wanvideo/model_training/lora/Wan2.1-T2V-14B.sh",
                WAN_DIFFSYNTH,
            ),
            WAN_MUSUBI,
            Said(
                "SimpleTuner",
                "simpletuner/examples/wan2.1-t2v-14b-480p-8xh100.peft-lora+cp-fa3",
                WAN_SIMPLETUNER.format(480, "fp8"),
            ),
            WAN_PIPE,
        ),
        WAN_CHOICE,
        rank=32,
        resolution=640,
    ),
    "wan22_5b": LoraSettings(
        "Wan 2.2 TI2V 5B (stills)",
        "WanTransformer3DModel",
        (
            Said(
                "DiffSynth",
                "examples/wanvideo/model_training/lora/Wan2.2-TI2V-5B.sh",
                f"from clips and first frames: {WAN_DIFFSYNTH}",
            ),
            Said(
                "SimpleTuner",
                "simpletuner/examples/wan2.2-ti2v-5b-480p-single-gpu.peft-lora+ramtorch",
                WAN_SIMPLETUNER.format(512, "16 bits"),
            ),
            AI_TOOLKIT,
        ),
        "Attention, MLP, rank 32 and 1e-4, as DiffSynth and ai-toolkit; 2,000 images, as of Wan "
        "2.1. The base draws 720p, so a still has its area.",
        rank=32,
        resolution=960,
    ),
}
