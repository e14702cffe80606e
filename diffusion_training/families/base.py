"""The interface of a model family, which each file of this folder implements, and its types.

To add a family, write a file with a subclass of `Family`, a line in names.py, and a tiny pipeline
in the tests.
"""

import contextlib
import hashlib
import inspect
import json
import math
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias, TypedDict

import torch
from safetensors.torch import load_file

from diffusion_training.errors.faults import explain, is_machines_fault
from diffusion_training.errors.printing import amount
from diffusion_training.errors.sentences import fail
from diffusion_training.models import load_weights, name_inputs
from diffusion_training.repositories import Repository, check_variant

VAES_WITHOUT_MOMENTS = ("AutoencoderTiny", "AutoencoderDC")  # they return plain latents

MAGNITUDE = "lora_magnitude_vector"  # of DoRA, as PEFT and diffusers name it


class Tokens(TypedDict, total=False):
    """Captions as tokens, [N, tokens] each, or [N, K, tokens] with K captions per image."""

    input_ids: torch.Tensor
    input_ids_2: torch.Tensor  # from the second tokenizer
    input_ids_3: torch.Tensor
    # bool, False for padding; only if the family is `masked`
    prompt_mask: torch.Tensor
    prompt_lengths: Any  # the number of tokens of each caption
    references: Any  # for each caption a list of Pillow's images, if the text encoder sees them


class Prompts(TypedDict, total=False):
    """Encoded captions for a denoiser: float32 tensors on its device."""

    prompt_embeds: torch.Tensor  # [N, tokens, width]
    # bool [N, tokens], False for padding; padding comes last, and its embeddings are 0
    prompt_mask: torch.Tensor
    # int [N] on the CPU, so that reading it does not wait for the device
    prompt_lengths: torch.Tensor
    pooled_prompt_embeds: torch.Tensor  # [N, width]
    time_ids: torch.Tensor  # [N, 6]: original size, crop and target size
    # For each reference, from number 0: its latents [N, C, h, w], and an empty tensor whose shape
    # [N, 0, height, width] is its size in pixels. Shapes are known without waiting for the device.
    reference_0: torch.Tensor
    reference_0_size: torch.Tensor


class Tokenizers(list):
    """The tokenizers of a pipeline, one for each text encoder, and their family."""

    def __init__(
        self, tokenizers: Iterable, family: "Family", classes: dict[str, str] | None = None
    ) -> None:
        super().__init__(tokenizers)
        self.family = family
        self.classes = classes  # of class labels: see `get_token`

    @property
    def are_ragged(self) -> bool:
        """Whether a caption has as many embeddings as tokens, and padding none.

        False for bytes in place of tokens, see `recorded.text_tensors.CaptionBytes`.
        """
        return self.family.ragged and self.family.caption_unit == "tokens"


def hash_rules(tokenizer: Any) -> str:
    """A hash of all that determines the token ids of a tokenizer's vocabulary.

    For example the order of merges: two tokenizers with the same vocabulary may differ in it.
    """
    # the last is an attribute of `CaptionBytes`
    names = ("padding_side", "truncation_side", "pad_token", "chat_template", "rules")
    rules = {name: getattr(tokenizer, name, None) for name in names}
    if backend := getattr(tokenizer, "backend_tokenizer", None):
        rules |= json.loads(backend.to_str())
        del rules["padding"], rules["truncation"]  # those of the last call
    return hashlib.sha256(json.dumps(rules, sort_keys=True).encode()).hexdigest()


# (base, --embedded_guidance_scale) -> the base with a family of its own; see `record_family`
Record: TypeAlias = Callable[["Base", float], "Base"]


@dataclass(frozen=True)
class Base:
    """Where the models of a run come from. `open_base` makes it once."""

    family: "Family"
    name: str | None  # as the user gave it: a hub id, a folder or a file
    # the folder of the pipeline; a repository has one in the cache, and a single file is unpacked
    source: str | None
    index: dict[str, Any]  # its model_index.json; {} without a pipeline
    vae: str | None = None  # this and the next two: folders, from their own flags
    text_encoder: str | None = None
    tokenizer: str | None = None
    transformer: str | None = None  # the folder into which --transformer_file was unpacked
    # {part: the folder into which its own file was unpacked}
    unpacked: dict[str, str] = field(default_factory=dict)
    variant: str | None = None
    # those folders that are of a repository, which `locate` completes
    repositories: dict[str | None, Repository] = field(default_factory=dict)
    clip_skip: int | None = None
    max_tokens: int | None = None  # --max_sequence_length
    num_references: int = 0  # columns of images that an edit starts from
    resolution: int = 0  # --resolution, the largest; 0 if it is not given
    classes: tuple[str, ...] = ()  # of --class_column, in place of a text encoder
    record: Record | None = None  # of a recorded pipeline

    def locate(
        self, own_path: str | None, subfolder: str, with_weights: bool = True
    ) -> tuple[str | None, dict[str, Any]]:
        """Where a part is, as arguments of `from_pretrained`: (folder, options).

        A part of a repository is fetched first; without weights only what describes it.
        """
        folder = own_path or self.unpacked.get(subfolder)
        options: dict[str, Any] = {}
        if folder is None:
            folder, options = self.source, {"subfolder": subfolder, "variant": self.variant}
        if folder in self.repositories:
            self.repositories[folder].fetch(**options, with_weights=with_weights)
        elif folder and with_weights:
            place = Path(folder, options.get("subfolder", ""))
            names = os.listdir(place) if place.is_dir() else []
            check_variant(place, names, "", options.get("variant"))
        return folder, options

    @property
    def commit(self) -> str | None:
        """The commit of a pipeline on the hub."""
        repository = self.repositories.get(self.source)
        return repository.folder.name if repository else None

    def locate_scheduler(self) -> tuple[str | None, dict[str, str]]:
        """Where the pipeline's scheduler is, see `locate`."""
        source, _ = self.locate(None, "scheduler", with_weights=False)
        return source, {"subfolder": "scheduler"}


@dataclass(frozen=True)
class Encoders:
    """The frozen models that turn images and captions into latents and embeddings.

    vae: a module, or None if the latents are cached.
    text_encoders: a ModuleList.
    """

    family: "Family"
    vae: Any
    text_encoders: Any
    tokenizers: Tokenizers
    clip_skip: int = 0  # number of CLIP's last layers to skip

    def modules(self) -> list[torch.nn.Module]:
        return [module for module in (self.vae, self.text_encoders) if module is not None]


class Family:
    """Everything that is specific to a model family.

    It has no state, because it is pickled into loader processes and Ray's workers. The choices of
    a run are in `Base` and `Encoders`.
    """

    name: str  # in --model_family and cache.json
    title: str  # in messages and model cards
    pipeline: str  # its class in diffusers
    model: str  # the class of the model that is trained
    folder = "transformer"  # the folder of that model in the pipeline
    script = "train_flow.py"  # the script that trains it
    resolution = 512  # pixels, if neither a flag nor a cache sets it
    vae_classes: tuple[str, ...] = ("AutoencoderKL", "AutoencoderTiny")
    ignored_vae_settings: tuple[str, ...] = ("latents_mean", "latents_std")  # by the pipeline
    suffixes: tuple[str, ...] = ("",)  # of the folders text_encoder and tokenizer
    embeds_width = "cross_attention_dim"  # the width of embeddings in the model's config
    max_tokens = 0  # per caption, by default; 0: the limit of the text encoder
    caption_unit = "tokens"  # counted by the limit of captions
    masked = True  # does the text encoder take a mask of the padding?
    ragged = True  # does a cache leave out the embeddings of padding?
    needs_lengths = False  # does `predict` read prompt_lengths?
    needs_sizes = False  # does the denoiser take the image's original size and crop?
    has_clip_skip = False
    # the argument of the pipeline whose value is an input of the denoiser, if there is one
    embedded_guidance: str | None = None
    takes_classes = False  # may class labels replace captions?
    padded: tuple[str, ...] = ("prompt_embeds",)  # the columns without padding, if `ragged`
    features: tuple[str, ...] = ("ragged embeddings",)  # those that a reader of its caches needs
    borrows_from: tuple[str, ...] = ()  # families whose VAE and text encoder a new model may use
    precision = "bfloat16"  # that the model card uses on a GPU
    first_image = "images[0]"  # of what the pipeline returns, for the model card
    blocks = ""  # the class of a modular pipeline's blocks
    has_guider = False  # has a modular pipeline an object for guidance?
    can_rewrite = False  # has it a block that rewrites captions?
    # Can the denoiser see references, the images that an edit starts from? And the text encoder?
    takes_references = False
    reads_references = False
    image_argument = "image"  # of the pipeline, for references
    needs_references = False  # can't the pipeline be called without one?
    samples_one_by_one = True  # one call of the pipeline per sample
    suggests_lora = True  # do the commands that are printed train a LoRA?

    # ---- which models are of this family

    def recognizes_file(self, names: set[str]) -> bool:
        """Whether a single .safetensors file is of this family, by the names of its weights."""
        return False

    def find_fault(self, base: Base) -> str | None:
        """The reason why the models of `base` can't be used, as a sentence, or None."""
        return None

    def is_distilled(self, base: Base) -> bool:
        """Whether the base was distilled to sample in few steps, judged by its files or name."""
        name = os.path.basename(base.transformer or base.name or "").lower()
        return "turbo" in name or "distilled" in name or bool(base.index.get("is_distilled"))

    # ---- captions

    def prepare(self, tokenizer: Any, caption: str) -> str:
        """A caption as the pipeline tokenizes it, for example cleaned or in a chat template."""
        return caption

    def choose_text_encoder(
        self, base: Base, source: str | None, options: dict[str, Any], suffix: str
    ) -> tuple[Any, dict[str, Any]]:
        """Returns (the class of a text encoder, further options to load it)."""
        import diffusers.pipelines.prx  # noqa: F401  it registers a class of transformers
        import transformers

        if base.text_encoder is None and f"text_encoder{suffix}" in base.index:
            return getattr(transformers, base.index[f"text_encoder{suffix}"][1]), {}
        config = transformers.AutoConfig.from_pretrained(source, **options)
        if config.model_type == "clip":  # AutoModel would also load the image encoder
            return transformers.CLIPTextModel, {}
        text_class = transformers.MODEL_FOR_TEXT_ENCODING_MAPPING.get(
            type(config), transformers.AutoModel
        )
        more = {"is_encoder_decoder": False} if config.model_type == "t5gemma" else {}
        return text_class, more

    def choose_tokenizer(self) -> Any:
        import transformers

        return transformers.AutoTokenizer

    def load_text_encoder(
        self,
        base: Base,
        source: str | None,
        options: dict[str, Any],
        suffix: str,
        dtype: torch.dtype,
    ) -> torch.nn.Module:
        """Load a text encoder, on the CPU. source, options: see `Base.locate`."""
        text_class, more = self.choose_text_encoder(base, source, options, suffix)
        return load_weights(text_class, source, **options, **more, torch_dtype=dtype)

    def load_tokenizer(
        self, source: str | None, options: dict[str, Any], text_encoder: torch.nn.Module
    ) -> Any:
        """Load the tokenizer of a text encoder. Raises ValueError if they do not fit."""
        tokenizer = self.choose_tokenizer().from_pretrained(source, **options)
        if len(tokenizer) < 256:  # without files, transformers makes one with two tokens
            raise ValueError("it has no vocabulary")
        known = text_encoder.get_input_embeddings().num_embeddings
        if len(tokenizer) > known or tokenizer.pad_token is None:
            raise ValueError("it has more tokens than the text encoder, or no padding token")
        if not isinstance(tokenizer.model_max_length, int | float):
            raise ValueError("its model_max_length is no number")
        return tokenizer

    def count_max_tokens(
        self, base: Base, text_encoders: Iterable[Any], tokenizers: Iterable[Any]
    ) -> int:
        """How many tokens of a caption are read."""
        limits = [tokenizer.model_max_length for tokenizer in tokenizers]
        for encoder in text_encoders:
            limits.append(getattr(encoder.config, "max_position_embeddings", math.inf))
        limit = min(limits)
        if base.max_tokens and base.max_tokens > limit:
            fail(
                f"--max_sequence_length {base.max_tokens} is too large: the text encoder takes "
                f"{limit} tokens"
            )
        most = base.max_tokens or self.max_tokens or math.inf
        count = min(limit, most)
        if count < 2:  # for the first and the last token
            fail(
                f"captions get {amount(int(count), 'token')}, but need 2: "
                "check --max_sequence_length, and model_max_length in the tokenizer's config"
            )
        return int(count)

    def probe_encoders(self, text_encoders: Iterable[Any]) -> "Family":
        """The family with what is found out by trying the text encoders."""
        return self

    def restore_findings(self, cache: dict[str, Any]) -> "Family":
        """The family with what was found out when a cache was made. cache: its settings."""
        return self

    def encode(self, encoders: Encoders, tokens: Tokens) -> Prompts:
        """Encode tokens [N, tokens] like the pipeline's `encode_prompt`, but in float32."""
        raise NotImplementedError

    def encode_empty(self, encoders: Encoders, base: Base, tokens: Tokens) -> Prompts:
        """The embeddings of a dropped caption, [1, ...]; `tokens` are those of ""."""
        return self.encode(replace(encoders, clip_skip=0), tokens)

    def describe_empty(self, empty_prompt: dict[str, torch.Tensor]) -> dict[str, Any]:
        """Entries on the encoded captions in cache.json, besides their shapes."""
        return {}

    # ---- images

    def has_moments(self, vae: torch.nn.Module) -> bool:
        """Whether a VAE returns a distribution of latents, not the latents themselves."""
        return type(vae).__name__ not in VAES_WITHOUT_MOMENTS

    def needs_exact_vae(self, config: dict[str, Any]) -> bool:
        """Whether a VAE with this config must compute in float32, whatever the precision."""
        return False

    def load_vae(
        self, class_name: str, source: str | None, options: dict[str, Any], dtype: torch.dtype
    ) -> torch.nn.Module:
        """Load a VAE of one of `vae_classes`, in the form that the pipeline uses."""
        import diffusers

        vae_class = getattr(diffusers, class_name)
        return load_weights(vae_class, source, **options, torch_dtype=dtype)

    def count_channels(self, vae: torch.nn.Module) -> tuple[int, int]:
        """(channels of images, channels of latents)."""
        return vae.config.in_channels, vae.config.latent_channels

    def downscale(self, vae: torch.nn.Module) -> int:
        """Pixels per latent along a side."""
        config = vae.config
        levels = config.get("block_out_channels") or config.encoder_block_out_channels
        return 2 ** (len(levels) - 1)

    def prepare_images(self, vae: torch.nn.Module, pixel_values: torch.Tensor) -> torch.Tensor:
        """Images uint8 [N, C, H, W] as `vae.encode` takes them: in [-1, 1], in its precision."""
        return (pixel_values / 127.5 - 1).to(vae.dtype)

    def read_latents(
        self, vae: torch.nn.Module, encoded: Any, size: tuple[int, ...]
    ) -> torch.Tensor:
        """What `vae.encode` has returned -> unscaled latents, float32. size: in pixels.

        They are mean and standard deviation, [N, 2 * channels, h, w]. A VAE without moments returns
        only the latents, [N, channels, h, w].
        """
        if not self.has_moments(vae):
            return encoded[0].float()
        posterior = encoded.latent_dist
        return torch.cat([posterior.mean.float(), (0.5 * posterior.logvar.float()).exp()], dim=1)

    def unpack_latents(self, vae: torch.nn.Module, latents: torch.Tensor) -> torch.Tensor:
        """Unscaled latents [N, channels, h, w] as the VAE decodes them."""
        return latents

    def decode(self, vae: torch.nn.Module, latents: torch.Tensor) -> torch.Tensor:
        """The images of unscaled latents [N, channels, h, w], from -1 to 1.

        [N, C, H, W], or [N, C, 1, H, W] of a VAE for videos.
        """
        return vae.decode(self.unpack_latents(vae, latents).to(vae.dtype))[0]

    def read_images(self, result: Any) -> Any:
        """The images that a pipeline has drawn, by what its call returns."""
        return result.images

    def choose_reference_side(self, resolution: int, count: int) -> int:
        """The side in pixels of square references, as the pipeline resizes `count` of them."""
        return resolution

    def shape_reference(self, vae: torch.nn.Module, side: int) -> list[int]:
        """The shape of the latents of a square reference, [C, h, w]."""
        _, channels = self.count_channels(vae)
        return [channels, side // self.downscale(vae), side // self.downscale(vae)]

    def encode_references(self, vae: torch.nn.Module, rows: list[list[Any]]) -> list[torch.Tensor]:
        """References of N rows, as Pillow's images -> for each its unscaled latents, [N, C, h, w].

        The references with the same number have the same size. Latents are the mean of the VAE's
        distribution, as in the pipelines, in float32.
        """
        raise NotImplementedError

    def measure_references(self, images: list[Any]) -> list[tuple[int, int]]:
        """(height, width) in pixels of references of a row, as `encode_references` encodes them."""
        return [(image.height, image.width) for image in images]

    def describe_scale(self, vae: torch.nn.Module) -> dict[str, float | list[float]]:
        """The factors that scale latents to about unit size: (latents - shift) * scaling.

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
        the velocity, noise - latents. For a U-Net, times are timesteps, and the scheduler's
        prediction_type decides.
        """
        raise NotImplementedError

    def find_model_fault(self, config: Any) -> str | None:
        """Why a model with this config is not one of this family, or None."""
        return None

    def find_input_fault(self, config: Any, channels: int, width: int) -> str | None:
        """Why a model does not fit latents with so many channels, and embeddings of a width."""
        own_width = config[self.embeds_width]
        if (config.in_channels, own_width) == (channels, width):
            return None
        return (
            f"takes {config.in_channels} channels and embeddings of {own_width}, but the data has "
            f"{channels} and {width}: use the VAE and text encoder of this model"
        )

    def try_model(self, model: torch.nn.Module, resolution: int) -> None:
        """Find out what must be known about the model before it is trained."""

    def list_inputs(self, model: torch.nn.Module, prompts: Prompts) -> set[str]:
        """The names of all inputs that the pipeline's own call gives the model, if it is asked.

        prompts: one encoded caption. See `models.name_inputs`.
        """
        return set()

    def patch_size(self, model: torch.nn.Module) -> int:
        """Latents per token along a side; sides of latents must be multiples of it."""
        return 1

    def choose_mu(self, size: tuple[int, int], expected: float) -> float:
        """The exponent of the shift of the noise levels, as the pipeline gives it its scheduler.

        size: of the latents. expected: the exponent by the scheduler's config.
        """
        return expected

    # ---- pipelines, samples

    def call_args(self, prompts: Prompts, empty: Prompts, guidance_scale: float) -> dict[str, Any]:
        """The arguments of a call of the pipeline that replace a prompt.

        prompts: N encoded captions. empty: the empty prompt, for guidance.
        """
        asked: dict[str, Any] = {"prompt_embeds": prompts["prompt_embeds"]}
        if guidance_scale > 1:
            asked["negative_prompt_embeds"] = empty["prompt_embeds"].expand_as(
                prompts["prompt_embeds"]
            )
        return asked | self.guidance_args(guidance_scale)

    def size_args(self, height: int, width: int) -> dict[str, int]:
        """The arguments of that call for the size of the image in pixels."""
        return {"height": height, "width": width}

    def guidance_args(self, guidance_scale: float) -> dict[str, float]:
        """The argument of that call for a guidance scale, where 1 means no guidance."""
        return {"guidance_scale": guidance_scale}

    def load_scheduler(self, base: Base) -> Any:
        """Load the pipeline's scheduler of flow matching."""
        from diffusers import FlowMatchEulerDiscreteScheduler

        source, options = base.locate_scheduler()
        return FlowMatchEulerDiscreteScheduler.from_pretrained(source, **options)

    def build(self, parts: dict[str, Any], base: Base, resolution: int) -> Any:
        """Make a pipeline of `parts`, {name: model}. Without text encoders it needs embeddings."""
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

    def list_parts(self, text_encoders: Any, tokenizers: Any) -> dict[str, Any]:
        """The parts of a pipeline that read captions, for `build`."""
        parts: dict[str, Any] = {}
        for suffix, text_encoder, tokenizer in zip(
            self.suffixes, text_encoders, tokenizers, strict=True
        ):
            parts |= {f"text_encoder{suffix}": text_encoder, f"tokenizer{suffix}": tokenizer}
        return parts

    # ---- LoRA

    def choose_layers(self, model: torch.nn.Module, which: str) -> list[str]:
        """--lora_layers as ends of names; its sets omit those not in the model."""
        # here, because few runs need the table
        from diffusion_training.families.lora_layers import COMMON, LAYER_SETS, LAYERS

        if which not in LAYER_SETS:
            return [end.strip() for end in which.split(",")]
        layers = LAYERS.get(type(model).__name__, COMMON)
        ends = [*layers.choose(which), *(layers.further if which == "all" else ())]
        names = [f".{name}" for name, _ in model.named_modules()]
        return [end for end in ends if any(name.endswith(f".{end}") for name in names)]

    def convert_lora(
        self, path: Any, model: torch.nn.Module
    ) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        """Read (weights, alphas, metadata) of a LoRA file with the pipeline's own reader."""
        import diffusers

        pipeline = getattr(diffusers, self.pipeline)
        file = load_file(path)
        for name in file:  # the reader drops or misreads these weights
            if name.endswith(".dora_scale") or name.startswith("bundle_emb."):
                raise ValueError(f"it holds {name}, which is not used here")
        source: Any = str(path.parent)
        plain = {leave_out_adapter(name): weight for name, weight in file.items()}
        if plain.keys() != file.keys():  # of PEFT, whose names of adapters diffusers reads in part
            source = plain
        # ComfyUI's own names are kohya's with dots, and diffusers reads only kohya's.
        if any(name.startswith("diffusion_model.") and ".lora_down." in name for name in file):
            source = {name_as_kohya(name): weight for name, weight in file.items()}
        for name, value in file.items():  # diffusers' loops need it
            if name.endswith(".alpha") and not 0 <= value < math.inf:
                raise ValueError(f"its {name} is {value}")
        asked: dict[str, Any] = {"weight_name": path.name, "return_lora_metadata": True}
        if "return_alphas" in inspect.signature(pipeline.lora_state_dict).parameters:
            asked["return_alphas"] = True  # FLUX.1's reader takes them out of the weights
        try:
            weights, *alphas, metadata = pipeline.lora_state_dict(source, **asked)
        except Exception as error:
            if is_machines_fault(error):
                raise
            raise ValueError(f"diffusers can't read it: {explain(error)}") from error
        return weights, (alphas or [{}])[0] or {}, metadata or {}

    # ---- files of other programs

    def describe_for_sd_scripts(self, model: torch.nn.Module) -> dict[str, str]:
        """The names of the base for sd-scripts, in the header of a LoRA file."""
        return {"ss_base_model_version": self.name}

    def name_architecture(self, model: torch.nn.Module, predicts_velocity: bool) -> str:
        """ModelSpec's name of the model (github.com/Stability-AI/ModelSpec)."""
        return self.name

    def guess_objective(self, names: set[str], header: dict[str, str]) -> dict[str, Any]:
        """The scheduler's settings, by the names of a single file's weights and its header."""
        return {}

    def merge(self, pipeline: Any) -> dict[str, torch.Tensor]:
        """The weights of a pipeline in the layout of a single file, on the CPU."""
        raise NotImplementedError


class Called(Exception):
    """Ends a call of a model before it computes anything."""


def catch_inputs(model: torch.nn.Module, call: Callable[[], Any]) -> set[str]:
    """The names of the inputs that `call()` gives a model, which computes nothing."""
    given: set[str] = set()

    def watch(*args: Any, **options: Any) -> None:
        given.update(name_inputs(model, args, options))
        raise Called

    model.forward = watch
    try:
        with contextlib.suppress(Called):
            call()
    finally:
        del model.forward
    return given


def leave_out_adapter(key: str) -> str:
    """A weight's name without its adapter's: lora_A.weight for PEFT's own lora_A.default.weight."""
    key = re.sub(rf"\.{MAGNITUDE}\.\w+\.weight$", f".{MAGNITUDE}", key)
    return re.sub(r"(\.lora_[AB])\.\w+(\.weight)$", r"\1\2", key)


def name_as_kohya(name: str) -> str:
    """diffusion_model.a.b.lora_up.weight -> lora_unet_a_b.lora_up.weight."""
    layer, *end = name.removeprefix("diffusion_model.").partition(".lora_")
    if not end[0]:  # diffusion_model.a.b.alpha
        layer, *end = layer.rpartition(".")
    return f"lora_unet_{layer.replace('.', '_')}{''.join(end)}"


def set_shift(vae: Any) -> None:
    """Replace a shift_factor of None, with which some pipelines would compute."""
    if vae.config.get("shift_factor", 0.0) is None:
        vae.register_to_config(shift_factor=0.0)


# For families whose text encoder takes a mask of the padding


def move_to_front(embeds: torch.Tensor, mask: torch.Tensor) -> Prompts:
    """Move padding, where `mask` is False, behind the embeddings [N, tokens, width], as zeros.

    Some tokenizers put padding on the left.
    """
    order = mask.int().argsort(dim=1, descending=True, stable=True)
    mask = mask.gather(1, order)
    embeds = embeds.gather(1, order[..., None].expand_as(embeds))
    return {"prompt_embeds": embeds.masked_fill(~mask[..., None], 0), "prompt_mask": mask}


def attend_to(mask: torch.Tensor) -> torch.Tensor:
    """The attention mask of a text encoder: all 1 for no tokens, since all 0 would give 0 / 0."""
    return (mask | ~mask.any(dim=1, keepdim=True)).long()
