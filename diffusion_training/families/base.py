"""What a model family is: the interface that each file of this folder fills in, and its values.

To add a family: a file with a subclass of `Family`, a line in known.py, and a tiny pipeline in the
tests.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypedDict

import torch
from safetensors.torch import load_file

from diffusion_training.models import load_weights

VAES_WITHOUT_MOMENTS = ("AutoencoderTiny", "AutoencoderDC")  # they give latents, no distribution


class Tokens(TypedDict, total=False):
    """Captions as tokens: each entry is [N, tokens], or [N, K, tokens] of K captions an image."""

    input_ids: torch.Tensor
    input_ids_2: torch.Tensor  # of the second tokenizer
    # bool, True where there are tokens; only of a family that is `masked`
    prompt_mask: torch.Tensor
    prompt_lengths: Any  # how many tokens each caption has


class Prompts(TypedDict, total=False):
    """What a denoiser gets of captions: float32 tensors on its device."""

    prompt_embeds: torch.Tensor  # [N, tokens, width]
    # bool [N, tokens]; where it is False, prompt_embeds is 0; those come last
    prompt_mask: torch.Tensor
    # int [N] on the CPU, so that reading it does not wait for the device
    prompt_lengths: torch.Tensor
    pooled_prompt_embeds: torch.Tensor  # [N, width]
    time_ids: torch.Tensor  # [N, 6]: original size, crop and target size


class Tokenizers(list):
    """The tokenizers of a pipeline, one for each text encoder, and their family."""

    def __init__(self, tokenizers: Iterable, family: "Family") -> None:
        super().__init__(tokenizers)
        self.family = family


@dataclass(frozen=True)
class Base:
    """Where the models of a run come from. `open_base` makes it once."""

    family: "Family"
    name: str | None  # as the user gave it: a hub id, a folder or a file
    # the hub id or folder of the pipeline; a single file is unpacked into a folder
    source: str | None
    index: dict[str, Any]  # its model_index.json; {} without a pipeline
    vae: str | None = None  # these three: what a flag of their own names
    text_encoder: str | None = None
    tokenizer: str | None = None
    revision: str | None = None
    variant: str | None = None
    cache_dir: str | None = None
    clip_skip: int | None = None
    max_tokens: int | None = None  # --max_sequence_length

    def locate(self, own_path: str | None, subfolder: str) -> tuple[str | None, dict[str, Any]]:
        """Where a part lies, as `from_pretrained` takes it: (hub id or folder, options)."""
        options: dict[str, Any] = {"cache_dir": self.cache_dir}
        if own_path is not None:
            return own_path, options
        options |= {"subfolder": subfolder, "revision": self.revision, "variant": self.variant}
        return self.source, options


@dataclass(frozen=True)
class Encoders:
    """The frozen models that turn images and captions into what is trained on.

    vae: a module, or None if the latents are cached.
    text_encoders: a ModuleList.
    """

    family: "Family"
    vae: Any
    text_encoders: Any
    tokenizers: Tokenizers
    clip_skip: int = 0  # layers of CLIP that are left out at the end

    def modules(self) -> list[torch.nn.Module]:
        return [module for module in (self.vae, self.text_encoders) if module is not None]


class Family:
    """What is particular to a model family.

    It has no state, because it is pickled into loader processes and Ray's workers: what a run has
    chosen is in `Base` and `Encoders`.
    """

    name: ClassVar[str]  # of --model_family, and in cache.json
    title: ClassVar[str]  # as people call it
    pipeline: ClassVar[str]  # its class in diffusers
    model: ClassVar[str]  # the class of the model that is trained
    folder = "transformer"  # of that model in the pipeline
    script = "train_flow.py"  # what trains it
    resolution = 512  # pixels; where neither a flag nor a cache says it
    vae_classes: tuple[str, ...] = ("AutoencoderKL", "AutoencoderTiny")
    ignored_vae_settings: tuple[str, ...] = ("latents_mean", "latents_std")  # by the pipeline
    suffixes: tuple[str, ...] = ("",)  # of the folders text_encoder and tokenizer
    embeds_width = "cross_attention_dim"  # what the model's config calls the width of embeddings
    max_tokens = 0  # of a caption without --max_sequence_length; 0: what the text encoder takes
    dropped_tokens = 0  # at the front, those of a template, whose embeddings the pipeline drops
    masked = True  # is the text encoder told which tokens are padding?
    ragged = True  # does a cache leave out the embeddings of padding?
    needs_lengths = False  # does `predict` read prompt_lengths?
    needs_sizes = False  # is the denoiser told the image's original size and crop?
    has_clip_skip = False
    named_in_cache = True  # does cache.json name the family? The first two did not
    features: tuple[str, ...] = ("ragged embeddings",)  # what readers of its caches must know
    borrows_from: tuple[str, ...] = ()  # families whose VAE and text encoder a new model may use
    precision = "bfloat16"  # on a GPU, of the pipeline that the model card opens
    samples_one_by_one = True  # each sample in a call of its own
    attention: tuple[str, ...] = ("to_k", "to_q", "to_v", "to_out.0")  # for --lora_layers attention
    other_layers: tuple[str, ...] = ()  # what --lora_layers all adds; without both there is no LoRA

    # ---- which models are of this family

    def recognizes(self, class_name: str) -> bool:
        """Whether a pipeline is of this family, by the class in its model_index.json."""
        return class_name == self.pipeline

    def recognizes_file(self, names: set[str]) -> bool:
        """Whether a single .safetensors file is of this family, by the names of its weights."""
        return False

    def check(self, base: Base) -> str | None:
        """A sentence on why models of this family can't be used as `base` says, or None."""
        return None

    def is_distilled(self, base: Base) -> bool:
        """Whether the base was distilled to draw in few steps, as far as its files or name say."""
        name = os.path.basename(base.name or "").lower()
        return "turbo" in name or "distilled" in name

    # ---- captions

    def prepare(self, tokenizer: Any, caption: str) -> str:
        """A caption as the pipeline tokenizes it: cleaned, say, or put into a chat template."""
        return caption

    def choose_text_encoder(
        self, base: Base, source: str | None, options: dict[str, Any], suffix: str
    ) -> tuple[Any, dict[str, Any]]:
        """(the class of a text encoder, further options to load it with)."""
        import diffusers.pipelines.prx  # noqa: F401  it registers a class of transformers
        import transformers

        if base.text_encoder is None and f"text_encoder{suffix}" in base.index:
            return getattr(transformers, base.index[f"text_encoder{suffix}"][1]), {}
        config = transformers.AutoConfig.from_pretrained(source, **options)
        if config.model_type == "clip":  # AutoModel would load the part for images too
            return transformers.CLIPTextModel, {}
        text_class = transformers.MODEL_FOR_TEXT_ENCODING_MAPPING.get(
            type(config), transformers.AutoModel
        )
        more = {"is_encoder_decoder": False} if config.model_type == "t5gemma" else {}
        return text_class, more

    def choose_tokenizer(self) -> Any:
        import transformers

        return transformers.AutoTokenizer

    def encode(self, encoders: Encoders, tokens: Tokens) -> Prompts:
        """Tokens [N, tokens] -> what the pipeline's `encode_prompt` makes of them, in float32."""
        raise NotImplementedError

    def encode_empty(self, encoders: Encoders, base: Base, tokens: Tokens) -> Prompts:
        """The embeddings of a caption that is left out, [1, ...]; `tokens` are those of ""."""
        return self.encode(replace(encoders, clip_skip=0), tokens)

    def describe_empty(self, empty_prompt: dict[str, torch.Tensor]) -> dict[str, Any]:
        """What cache.json says of the empty prompt besides its shapes."""
        return {}

    # ---- images

    def has_moments(self, vae: torch.nn.Module) -> bool:
        """Whether a VAE gives a distribution of the latents, not the latents themselves."""
        return type(vae).__name__ not in VAES_WITHOUT_MOMENTS

    def needs_exact_vae(self, config: dict[str, Any]) -> bool:
        """Whether a VAE with this config must compute in float32, whatever the precision."""
        return False

    def load_vae(
        self, class_name: str, source: str | None, options: dict[str, Any], dtype: torch.dtype
    ) -> torch.nn.Module:
        """A VAE of one of `vae_classes`, as the pipeline knows it."""
        import diffusers

        vae_class = getattr(diffusers, class_name)
        return load_weights(vae_class, source, **options, torch_dtype=dtype)

    def count_channels(self, vae: torch.nn.Module) -> tuple[int, int]:
        """(channels of images, channels of latents)."""
        return vae.config.in_channels, vae.config.latent_channels

    def downscale(self, vae: torch.nn.Module) -> int:
        """How many pixels a side a latent covers."""
        config = vae.config
        levels = config.get("block_out_channels") or config.encoder_block_out_channels
        return 2 ** (len(levels) - 1)

    def encode_images(self, vae: torch.nn.Module, images: torch.Tensor) -> torch.Tensor:
        """Images [N, C, H, W] in [-1, 1], in the VAE's precision -> unscaled latents, float32.

        They are mean and standard deviation, [N, 2 * channels, h, w]. A VAE without moments gives
        the latents alone, [N, channels, h, w].
        """
        if not self.has_moments(vae):
            return vae.encode(images)[0].float()
        posterior = vae.encode(images).latent_dist
        return torch.cat([posterior.mean.float(), (0.5 * posterior.logvar.float()).exp()], dim=1)

    def unpack_latents(self, latents: torch.Tensor) -> torch.Tensor:
        """Unscaled latents [N, channels, h, w] as the VAE decodes them."""
        return latents

    def describe_scale(self, vae: torch.nn.Module) -> dict[str, float | list[float]]:
        """How latents come to about unit size, as in the pipelines: (latents - shift) * scaling.

        Each is one number, or a list with one for each channel.
        """
        shift_factor = vae.config.get("shift_factor") or 0.0
        return {"scaling_factor": vae.config.scaling_factor, "shift_factor": shift_factor}

    # ---- the denoiser

    def predict(
        self, model: torch.nn.Module, noisy: torch.Tensor, times: torch.Tensor, prompts: Prompts
    ) -> torch.Tensor:
        """The prediction of the model, float32 [N, C, h, w].

        noisy: latents [N, C, h, w]. times: [N].

        For a flow-matching family, times are the share of noise in [0, 1], and the prediction is
        the velocity, noise - latents. For a U-Net, times are timesteps, and the scheduler says what
        is predicted.
        """
        raise NotImplementedError

    def check_model(self, config: Any) -> str | None:
        """Why a model with this config is not one of this family, or None."""
        return None

    def patch_size(self, model: torch.nn.Module) -> int:
        """How many latents a side make a token; sides of latents must be multiples of it."""
        return 1

    # ---- pipelines, samples

    def ask(self, prompts: Prompts, empty: Prompts, guidance_scale: float) -> dict[str, Any]:
        """The pipeline's arguments that take the place of a prompt.

        prompts: of N images. empty: for guidance, of one image.
        """
        asked: dict[str, Any] = {"prompt_embeds": prompts["prompt_embeds"]}
        if guidance_scale > 1:
            asked["negative_prompt_embeds"] = empty["prompt_embeds"].expand_as(
                prompts["prompt_embeds"]
            )
        return asked | self.guide(guidance_scale)

    def guide(self, guidance_scale: float) -> dict[str, float]:
        """The pipeline's argument for a strength of guidance, where 1 is none."""
        return {"guidance_scale": guidance_scale}

    def build(self, parts: dict[str, Any], base: Base, resolution: int) -> Any:
        """The pipeline of `parts` {name: model}; without text encoders it draws from embeddings."""
        import diffusers

        text_parts = [
            f"{name}{end}" for name in ("text_encoder", "tokenizer") for end in self.suffixes
        ]
        return getattr(diffusers, self.pipeline)(**dict.fromkeys(text_parts) | parts)

    def usage(self, resolution: int, clip_skip: int | None, max_tokens: int | None) -> str:
        """Arguments that the model card adds to the call of the pipeline, such as `, x=1`."""
        return ""

    def usage_before(self, clip_skip: int | None) -> list[str]:
        """Lines that the model card needs before the call of the pipeline."""
        return []

    # ---- LoRA

    def choose_layers(self, model: torch.nn.Module, which: str) -> list[str]:
        """The layers of --lora_layers, ends of names; attention and all are those of the model."""
        if which not in ("attention", "all"):
            return [end.strip() for end in which.split(",")]
        ends = [*self.attention, *(self.other_layers if which == "all" else ())]
        names = [f".{name}" for name, _ in model.named_modules()]
        return [end for end in ends if any(name.endswith(f".{end}") for name in names)]

    def read_lora(
        self, path: Any, model: torch.nn.Module
    ) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        """(weights, alphas, metadata) of a LoRA file, by the pipeline's own reader."""
        import diffusers

        pipeline = getattr(diffusers, self.pipeline)
        file = load_file(path)
        for name in file:  # which the reader drops, or takes for something else
            if name.endswith(".dora_scale") or name.startswith("bundle_emb."):
                raise ValueError(f"it holds {name}, which is not used here")
        # ComfyUI's own names are those of kohya's scripts, with dots: diffusers knows the latter.
        source: Any = str(path.parent)
        if any(name.startswith("diffusion_model.") and ".lora_down." in name for name in file):
            source = {name_as_kohya(name): weight for name, weight in file.items()}
        weights, *alphas, metadata = pipeline.lora_state_dict(
            source, weight_name=path.name, return_lora_metadata=True
        )
        return weights, (alphas or [{}])[0] or {}, metadata or {}

    # ---- files of other programs

    def describe_for_sd_scripts(self, model: torch.nn.Module) -> dict[str, str]:
        """What sd-scripts calls the base, in the header of a LoRA file."""
        return {"ss_base_model_version": self.name}

    def name_architecture(self, model: torch.nn.Module, predicts_velocity: bool) -> str:
        """ModelSpec's name of the model (github.com/Stability-AI/ModelSpec)."""
        return self.name

    def read_objective(self, names: set[str], header: dict[str, str]) -> dict[str, Any]:
        """What a single file says of the scheduler, by the names of its weights and its header."""
        return {}

    def merge(self, pipeline: Any) -> dict[str, torch.Tensor]:
        """The weights of a pipeline as a single file has them, on the CPU."""
        raise NotImplementedError


def name_as_kohya(name: str) -> str:
    """diffusion_model.a.b.lora_up.weight -> lora_unet_a_b.lora_up.weight."""
    layer, *end = name.removeprefix("diffusion_model.").partition(".lora_")
    if not end[0]:  # diffusion_model.a.b.alpha
        layer, *end = layer.rpartition(".")
    return f"lora_unet_{layer.replace('.', '_')}{''.join(end)}"


# For families whose text encoder takes chat turns or a mask of the padding


def format_chat(tokenizer: Any, caption: str, enable_thinking: bool) -> str:
    """A user's turn that says the caption, and the beginning of the answer."""
    turns = [{"role": "user", "content": caption}]
    return tokenizer.apply_chat_template(
        turns, tokenize=False, add_generation_prompt=True, enable_thinking=enable_thinking
    )


def move_to_front(embeds: torch.Tensor, mask: torch.Tensor) -> Prompts:
    """Embeddings [N, tokens, width] with those that `mask` leaves out last, and 0.

    Some tokenizers put padding on the left.
    """
    order = mask.int().argsort(dim=1, descending=True, stable=True)
    mask = mask.gather(1, order)
    embeds = embeds.gather(1, order[..., None].expand_as(embeds))
    return {"prompt_embeds": embeds.masked_fill(~mask[..., None], 0), "prompt_mask": mask}


def attend_to(mask: torch.Tensor) -> torch.Tensor:
    """The attention mask of a text encoder; a caption without a token has all, or it is 0 / 0."""
    return (mask | ~mask.any(dim=1, keepdim=True)).long()


# For families whose transformer takes patches of 2 x 2 latents in a row


def make_patches(latents: torch.Tensor) -> torch.Tensor:
    """Put 2 x 2 latents into the channels of one: [N, C, 2h, 2w] -> [N, 4C, h, w].

    The four latents of a channel stay side by side, as in the pipelines.
    """
    return torch.nn.functional.pixel_unshuffle(latents, 2)


def to_sequence(latents: torch.Tensor) -> torch.Tensor:
    """[N, C, h, w] -> [N, h * w, C]."""
    return latents.flatten(2).transpose(1, 2)


def from_sequence(sequence: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """[N, h * w, C] -> [N, C, h, w], with the shape of `like`."""
    return sequence.transpose(1, 2).reshape(like.shape)
