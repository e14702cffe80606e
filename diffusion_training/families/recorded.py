"""A family for pipelines that have no file of their own: it is read from the pipeline's own code.

It serves every text-to-image pipeline of diffusers with a flow-matching transformer, as far as its
`__call__` can be repeated (see pipeline_code.py). Everything else is refused, in a sentence that
names the pipeline.
"""

import contextlib
import hashlib
import importlib
import inspect
import itertools
import json
import math
from collections.abc import Iterator
from functools import partial
from typing import Any, cast

import diffusers
import torch
from accelerate import PartialState
from PIL import Image
from torch.utils._pytree import keystr, tree_flatten_with_path

from diffusion_training.errors import amount, fail
from diffusion_training.families.base import Base, Encoders, Family, Prompts, Tokens
from diffusion_training.families.denoiser_call import PROBED_SIDES, DenoiserCalls, UnknownCall
from diffusion_training.families.pipeline_code import (
    OFF,
    PipelineCode,
    PipelineRun,
    is_component,
    list_size_options,
    make_pipeline,
)
from diffusion_training.families.recorded_text import (
    LONG,
    SHORT,
    CaptionBytes,
    UnknownText,
    decode_texts,
    describe_guided,
    describe_result,
    is_equal,
    list_tensors,
    plain,
    put_together,
    stack_rows,
    take_rows,
)
from diffusion_training.families.reference_latents import (
    UnknownReferences,
    join_alone,
    make_blanks,
    split_references,
)
from diffusion_training.families.tape import Unrepeatable
from diffusion_training.models import hash_rules, load_weights

GUIDANCE = ("true_cfg_scale", "guidance_scale")  # arguments of pipelines
EMBEDDED_GUIDANCE = ("distilled_guidance_scale", "guidance_scale")
PROBED_SCALE = 4.0
LARGE = 2.0**40  # beside it, a shift of latents is lost in rounding
# layers that are neither attention nor feed-forward
SPARED = ("norm", "mod", "gate", "embed", "adaln", "router")


class TextParts(torch.nn.Module):
    """The text encoders of a pipeline with its tokenizers, as one module."""

    def __init__(self, code: PipelineCode, models: dict[str, Any], options: dict[str, Any]) -> None:
        super().__init__()
        self.encoders = torch.nn.ModuleDict(models)
        self.code = [code]  # in a list, since it is no part of this module
        self.options = options  # arguments of the pipeline
        self.images: list[Any] = []  # references, where a caption has none of its own

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    @torch.no_grad()
    def record(
        self,
        captions: list[str],
        options: dict[str, Any],
        ends_at: str = "text",
        images: list[Any] | None = None,
    ) -> PipelineRun:
        """Run the pipeline's code for captions. options: further arguments of the pipeline.

        images: references of the captions.
        """
        (code,) = self.code
        images = self.images if images is None else images
        options = options | ({"image": images} if images else {})
        code.pipeline.own_device = next(self.parameters()).device
        height, width = PROBED_SIDES
        run = PipelineRun(ends_at, torch.zeros)
        return code(captions, self.options | {"height": height, "width": width} | options, run)


class Recorded(Family):
    """A family that is read from a pipeline. It holds only plain values, so it can be pickled."""

    embeds_width = ""
    needs_lengths = False
    ragged = False
    scales_references = False  # the pipeline's code does

    def __init__(
        self,
        index: dict[str, Any],
        configs: dict[str, Any],
        embedded_guidance_scale: float = 1.0,
        findings: dict[str, Any] | None = None,
    ) -> None:
        """index: model_index.json. configs: {part: its config} of VAE, scheduler and transformer.

        embedded_guidance_scale: in training. findings: what `find_out` has found, if it was called.
        """
        self.index = index
        self.configs = configs
        self.findings = findings or {}
        self.embedded_guidance_scale = embedded_guidance_scale
        self.name = self.pipeline = index["_class_name"]
        self.title = self.name.removesuffix("Pipeline")
        self.model = index[self.folder][1]
        self.vae_classes = (configs["vae"]["_class_name"],)
        self.ignored_vae_settings = ()
        options = inspect.signature(self.pipeline_class.__call__).parameters
        # only of models that were distilled from guided ones, for example FLUX.1-dev
        if configs[self.folder].get("guidance_embeds"):
            self.embedded_guidance = next((x for x in EMBEDDED_GUIDANCE if x in options), None)
        most = options.get("max_sequence_length")
        self.max_tokens = most.default if most and most.default else 0
        parts = self.findings.get("parts", [])
        self.ragged = self.needs_lengths = any(part["is_ragged"] for part in parts)
        text = "ragged embeddings" if self.ragged else "ragged ids"
        self.features = ("recorded text", text)
        self.padded = tuple(part["column"] for part in parts if part["is_ragged"])
        self.takes_references = "image" in options
        about = self.findings.get("references", {})
        self.reads_references = about.get("are_read", False)
        self.needs_references = about.get("are_needed", False)

    @property
    def pipeline_class(self) -> Any:
        return getattr(diffusers, self.pipeline)

    @property
    def guided(self) -> dict[str, Any] | None:
        """How samples are drawn with guidance, see `find_guidance`."""
        return None if self.embedded_guidance else self.findings["guided"]

    @contextlib.contextmanager
    def explaining(self, what: str) -> Iterator[None]:
        """End the program in a sentence if the pipeline's code can't be recorded."""
        try:
            yield
        except (UnknownCall, UnknownReferences, UnknownText, Unrepeatable) as error:
            fail(f"{self.pipeline} can't be trained here: {what}, {error}")

    def make_code(self, **parts: Any) -> PipelineCode:
        return PipelineCode(self.folder, self.index, self.configs, parts)

    # ---- captions

    def load_text_encoder(
        self, base: Base, source: str | None, options: dict[str, Any], suffix: str, dtype: Any
    ) -> torch.nn.Module:
        """All parts of the pipeline that read captions."""
        options = {name: value for name, value in options.items() if name != "subfolder"}
        models: dict[str, torch.nn.Module] = {}
        others: dict[str, Any] = {}
        for name, entry in self.index.items():
            if not is_component(entry) or name in (self.folder, "vae", "scheduler"):
                continue
            kind = getattr(importlib.import_module(entry[0]), entry[1])
            if issubclass(kind, torch.nn.Module):
                model = load_weights(kind, source, subfolder=name, **options, torch_dtype=dtype)
                models[name] = model.eval()
            else:
                own = {key: value for key, value in options.items() if key != "variant"}
                others[name] = kind.from_pretrained(source, subfolder=name, **own)
        if not models:
            raise ValueError("it has no text encoder")
        asked = {"max_sequence_length": base.max_tokens} if base.max_tokens else {}
        parts = TextParts(self.make_code(**models, **others), models, asked)
        parts.others = others
        known = self.findings.get("references", {}).get("count", 0)
        parts.images = make_blanks([BLANK] * (base.num_references or known))
        return parts

    def load_tokenizer(
        self, source: str | None, options: dict[str, Any], text_encoder: Any
    ) -> CaptionBytes:
        vocabulary = {}
        rules = {}
        for name, part in text_encoder.others.items():
            tokenizer = getattr(part, "tokenizer", part)
            if hasattr(tokenizer, "get_vocab"):
                words = json.dumps(sorted(tokenizer.get_vocab().items()))
                vocabulary[name] = hashlib.sha256(words.encode()).hexdigest()
                rules[name] = [hash_rules(tokenizer), getattr(part, "chat_template", None)]
        return CaptionBytes(vocabulary, rules)

    def count_max_tokens(self, base: Base, text_encoders: Any, tokenizers: Any) -> int:
        return tokenizers[0].model_max_length

    def find_out(self, text_encoders: Any) -> "Recorded":
        """The family with the structure of encoded captions, and the arguments of guidance."""
        if self.findings:
            return self
        (parts,) = text_encoders
        with self.explaining("its references"):
            about = self.try_references(parts)
        with self.explaining("its captions"):
            off = self.turn_guidance_off(parts)
            most = parts.options.get("max_sequence_length", self.max_tokens or None)
            if most and about.get("are_read"):  # references have tokens too
                embeds, *_ = list_tensors(parts.record([SHORT], off).encoded[0])
                most += embeds.shape[1]
            record = partial(record_text, parts, off)
            structure, described = describe_result(record, most)
            findings = {"off": off, "structure": structure, "parts": described}
            findings |= {"references": about} if about else {}
            findings["guided"] = self.find_guidance(parts, off, structure)
            has = parts.code[0].has
            findings["own"] = {name: value for name, value in OFF.items() if name in has}
        # as a cache has them
        findings = json.loads(json.dumps(findings | parts.options))
        found = self.with_findings(findings)
        found.check_text(parts)
        columns = [f"{part['column']} {part['shape']}" for part in described]
        tokens = ", as many tokens as it has" if found.ragged else ""
        PartialState().print(f"{self.pipeline}: a caption becomes {', '.join(columns)}{tokens}")
        return found

    def try_references(self, parts: TextParts) -> dict[str, Any]:
        """How the pipeline uses references; {} if there are none."""
        if not self.takes_references:
            return {}
        are_needed = False
        try:
            alone = parts.record([SHORT], {}, images=[]).encoded[0]
        except (AttributeError, NameError, TypeError):  # it asks the image that is not there
            are_needed = True
            if not parts.images:
                fail(
                    f"a {self.pipeline} edits images: give those that edits start from, with "
                    "--conditioning_image_column"
                )
        if not parts.images:
            return {}
        try:
            white = list_tensors(parts.record([SHORT], {}).encoded[0])
        except ValueError as error:
            count = amount(len(parts.images), "reference")
            raise UnknownReferences(f"it can't be called with {count}: {error}") from error
        black = [Image.new("RGB", image.size) for image in parts.images]
        other = list_tensors(parts.record([SHORT], {}, images=black).encoded[0])
        are_read = not all(map(is_equal, white, other))
        are_read = are_read or not (are_needed or all(map(is_equal, white, list_tensors(alone))))
        return {"count": len(black), "are_needed": are_needed, "are_read": are_read}

    def check_text(self, parts: TextParts) -> None:
        """Stop if a recorded caption gives the denoiser other arguments than the caption itself."""
        off, structure = self.findings["off"], self.findings["structure"]
        live = parts.record([LONG], off, "denoiser")
        batch = stack_rows(self.findings["parts"], [take_rows(structure, live.encoded[0])])
        calls = self.open_calls(self.configs[self.folder], tuple([BLANK] * len(parts.images)))
        lengths = batch["prompt_lengths"].tolist() if self.ragged else [1]
        run = PipelineRun("denoiser", torch.zeros, texts=[calls.join(batch, lengths)])
        with self.explaining("its captions"):
            calls.run(1, calls.shape[1:], run)
            expected, _ = tree_flatten_with_path(live.calls[0])
            given, _ = tree_flatten_with_path(run.calls[0])
            for (path, one), (_, other) in zip(expected, given, strict=True):
                if not (is_equal(one, other) if isinstance(one, torch.Tensor) else one == other):
                    raise UnknownText(f"recorded, they give another {keystr(path)}")

    def turn_guidance_off(self, parts: TextParts) -> dict[str, Any]:
        """Arguments with which the denoiser is called once, for the captions alone."""
        (code,) = parts.code
        for name, part in code.pipeline.components.items():
            if hasattr(part, "disable") and "guider" in name:
                part.disable()
        names = [name for name in GUIDANCE if name in code.has]
        for values in itertools.product((1.0, 0.0), repeat=len(names)):
            off = dict(zip(names, values, strict=True))
            run = parts.record([SHORT], off, "step")
            if len(run.calls) == 1 and not is_doubled(run):
                return off
        raise UnknownCall("its denoiser is always called with guidance")

    def find_guidance(
        self, parts: TextParts, off: dict[str, Any], structure: Any
    ) -> dict[str, Any] | None:
        """The argument that turns guidance on, and what encode_prompt returns then.

        None if samples can't be drawn with guidance.
        """
        for name in off:
            asked = off | {name: PROBED_SCALE, "negative_prompt": [""]}
            try:
                run = parts.record([SHORT], asked, "step")
            except (RuntimeError, TypeError, ValueError):  # both captions have other lengths
                continue
            if len(run.calls) > 1 or is_doubled(run):
                alone = parts.record([SHORT], off).encoded[0]
                results = [describe_guided(each, structure, alone) for each in run.encoded]
                return {"name": name, "results": results, "from_zero": off[name] == 0}
        return None

    def recall(self, settings: dict[str, Any]) -> "Recorded":
        """The family with the findings in a cache's settings."""
        return self.with_findings(settings["recorded"])

    def with_findings(self, findings: dict[str, Any]) -> "Recorded":
        return Recorded(self.index, self.configs, self.embedded_guidance_scale, findings)

    def encode(self, encoders: Encoders, tokens: Tokens) -> Prompts:
        """Encode captions one by one, from their bytes."""
        (parts,) = encoders.text_encoders
        structure = self.findings["structure"]
        rows = []
        captions = decode_texts(tokens["input_ids"])
        references = tokens.get("references") or [None] * len(captions)
        for caption, images in zip(captions, references, strict=True):
            (result,) = parts.record([caption], self.findings["off"], images=images).encoded
            rows.append(take_rows(structure, result))
        return cast(Prompts, stack_rows(self.findings["parts"], rows))

    def encode_empty(self, encoders: Encoders, base: Base, tokens: Tokens) -> Prompts:
        """What the pipeline takes for no caption when it guides. It may lack a template."""
        empty = self.encode(encoders, tokens)
        guided = self.guided
        if guided is None:
            return empty
        (parts,) = encoders.text_encoders
        asked = self.findings["off"] | {guided["name"]: PROBED_SCALE, "negative_prompt": [""]}
        (images,) = tokens.get("references") or [None]
        results = parts.record([SHORT], asked, "denoiser", images).encoded
        rows = {name: value[0] for name, value in dict[str, Any](empty).items()}
        for structure, result in zip(guided["results"], results, strict=True):
            rows |= take_rows(structure, plain(result), of="empty")
        return cast(Prompts, stack_rows(self.findings["parts"], [rows]))

    def describe_empty(self, empty_prompt: dict[str, torch.Tensor]) -> dict[str, Any]:
        return {"recorded": self.findings}

    # ---- images

    def open_calls(
        self, config: Any, references: tuple[tuple[int, int], ...] | None = None
    ) -> DenoiserCalls:
        """How the pipeline calls a denoiser with this config. Recorded once in a process.

        references: (height, width) in pixels of each; None: as few as the pipeline takes.
        """
        if references is None:
            references = (BLANK,) * self.needs_references
        known = id(self), id(config), references
        if known not in CALLS:
            options = dict(self.findings["off"])
            if self.embedded_guidance:
                options[self.embedded_guidance] = self.embedded_guidance_scale
            known_by = [self.index, self.configs, self.findings, options, dict(config)]
            key = json.dumps(known_by, default=str)
            if (key, references) not in CALLS:
                if key not in CODES:
                    configs = self.configs | {self.folder: config}
                    CODES[key] = PipelineCode(self.folder, self.index, configs)
                found = self.findings
                with self.explaining("its denoiser"):
                    CALLS[key, references] = DenoiserCalls(
                        CODES[key],
                        found["structure"],
                        found["parts"],
                        options,
                        references,
                        one_by_one="references" in found,
                    )
            CALLS[known] = CALLS[key, references]
            KEPT.append((self, config))  # so that no other object gets their ids
        return CALLS[known]

    @property
    def own_calls(self) -> DenoiserCalls:
        """Those of the pipeline's own denoiser."""
        return self.open_calls(self.configs[self.folder])

    def see_references(self, images: list[Any]) -> PipelineRun:
        """A run of the pipeline's code that notes what its VAE gets for references."""
        calls = self.own_calls
        run = PipelineRun("denoiser", torch.zeros, texts=[calls.make_texts([8])])
        height, width = PROBED_SIDES
        options = self.findings["off"] | {"image": images, "height": height, "width": width}
        with self.explaining("its references"):
            return calls.code([""], options, run)

    def choose_reference_side(self, resolution: int, count: int) -> int:
        run = self.see_references(make_blanks([(resolution, resolution)] * count))
        return math.isqrt(math.prod(run.pixels[0].shape[-2:]))

    def shape_reference(self, vae: torch.nn.Module, side: int) -> list[int]:
        (latents,) = self.see_references(make_blanks([(side, side)])).latents
        return list(latents.shape[1:])

    def encode_references(self, vae: torch.nn.Module, rows: list[list[Any]]) -> list[torch.Tensor]:
        encoded = []
        for images in rows:
            pixels = self.see_references(images).pixels if images else []
            of_row = []
            for each in pixels:
                latents = super().encode_images(vae, each.to(vae.device, vae.dtype))
                mean = latents.chunk(2, dim=1)[0] if self.has_moments(vae) else latents
                of_row.append(mean.flatten(1, -3))
            encoded.append(of_row)
        return [torch.cat(each) for each in zip(*encoded, strict=True)]

    def see_decoded(self, vae: Any, size: tuple[int, int], noise: torch.Tensor) -> torch.Tensor:
        """What the pipeline gives to its VAE if it ends with this noise, on the CPU."""
        calls = self.own_calls
        run = PipelineRun("decode", noise.reshape, texts=[calls.make_texts([1])])
        stand_in, calls.code.pipeline.vae = calls.code.pipeline.vae, vae
        try:
            with self.explaining("its latents"):
                calls.run(1, size, run)
        finally:
            calls.code.pipeline.vae = stand_in
        return run.decoded.cpu().float()

    def find_layout(self, vae: Any, size: tuple[int, int]) -> tuple[torch.Size, torch.Tensor]:
        """(shape of one decoded image of latents, the position of each number in the latents)."""
        if size not in (layouts := self.own_calls.layouts):
            count = self.own_calls.geometry.channels * size[0] * size[1]
            with torch.inference_mode(False), torch.device("cpu"):
                fills = (torch.zeros(count), torch.full((count,), LARGE), torch.arange(count) + 0.0)
                shift, large, counted = (self.see_decoded(vae, size, each) for each in fills)
                order = ((counted - shift) / (large / LARGE)).round().long().flatten()
                if not torch.equal(order.sort().values, torch.arange(count)):
                    fail(f"{self.pipeline} can't be trained here: it decodes more than its latents")
            layouts[size] = shift.shape[1:], order
        return layouts[size]

    def count_channels(self, vae: torch.nn.Module) -> tuple[int, int]:
        return 3, self.own_calls.geometry.channels

    def downscale(self, vae: torch.nn.Module) -> int:
        return self.own_calls.geometry.downscale

    def trial_side(self, vae: torch.nn.Module) -> int:
        return 64  # a multiple of what pipelines ask for

    def describe_scale(self, vae: torch.nn.Module) -> dict[str, float | list[float]]:
        """From what becomes of 0 and of a large number on their way to the VAE."""
        channels, height, width = self.own_calls.shape
        _, order = self.find_layout(vae, (height, width))
        back = order.argsort()
        rows = []
        for number in (0.0, LARGE):
            noise = torch.full((len(order),), number, device="cpu")
            decoded = self.see_decoded(vae, (height, width), noise).flatten()[back]
            rows.append(decoded.view(channels, -1))
        shift, large = rows
        if any((each != each[:, :1]).any() for each in rows):
            fail(f"{self.pipeline} can't be trained here: its latents have no scale per channel")
        scales: dict[str, Any] = {
            "scaling_factor": [shorten_factor(number) for number in large[:, 0]],
            "shift_factor": [float(str(number)) for number in shift[:, 0].numpy()],
        }
        return {
            name: values[0] if len(set(values)) == 1 else values for name, values in scales.items()
        }

    def encode_images(self, vae: torch.nn.Module, images: torch.Tensor) -> torch.Tensor:
        size = tuple(side // self.downscale(vae) for side in images.shape[2:])
        if vae.config.get("in_channels", 3) == 4:  # with transparency
            images = torch.nn.functional.pad(images, (0, 0, 0, 0, 0, 1), value=1.0)
        shape, order = self.find_layout(vae, size)
        if len(shape) == 4:  # a VAE for videos
            images = images.unsqueeze(2)
        encoded = super().encode_images(vae, images)
        parts = encoded.chunk(2 if self.has_moments(vae) else 1, dim=1)
        back = place(order, images.device, argsort=True)
        rows = [part.flatten(1)[:, back].unflatten(1, (-1, *size)) for part in parts]
        return torch.cat(rows, dim=1)

    def unpack_latents(self, vae: torch.nn.Module, latents: torch.Tensor) -> torch.Tensor:
        shape, order = self.find_layout(vae, tuple(latents.shape[2:]))
        return latents.flatten(1)[:, place(order, latents.device)].unflatten(1, shape)

    # ---- the denoiser

    def predict(
        self, model: torch.nn.Module, noisy: torch.Tensor, times: torch.Tensor, prompts: Prompts
    ) -> torch.Tensor:
        config = getattr(model, "module", model).config
        references, sizes, texts = split_references(dict(prompts))
        calls = self.open_calls(config, sizes)
        with self.explaining("its denoiser"):
            return calls.predict(model, noisy, times, texts, references)

    def check_inputs(self, config: Any, channels: int, width: int) -> str | None:
        return None  # a trial of the model tells

    def try_model(self, model: torch.nn.Module, resolution: int) -> None:
        """Find out whether captions of two lengths can share a batch, with a model of few layers.

        Stops if two images at two times do not give what each gives alone.
        """
        calls = self.open_calls(model.config)
        calls.needs_one_length = False  # not yet known
        small = make_small_denoiser(type_of(self.model), model.config)
        with self.explaining("its denoiser"):
            is_mixed = calls.one_by_one
            if not is_mixed:
                if not calls.is_exact(small, resolution, [8, 8]):
                    raise UnknownCall("two images in a batch change each other")
                is_mixed = not self.ragged or calls.is_exact(small, resolution, [8, 5])
            calls.needs_one_length = not is_mixed
        times = ", ".join(f"{name[2:-2]} = {of}" for name, of in calls.time_maps.items())
        alone = "; only captions of one length share a batch" if calls.needs_one_length else ""
        PartialState().print(f"{self.pipeline}: {self.model} is called with {times}{alone}")

    def patch_size(self, model: torch.nn.Module) -> int:
        return self.open_calls(model.config).patch_size

    # ---- pipelines, samples

    def call_args(self, prompts: Prompts, empty: Prompts, guidance_scale: float) -> dict[str, Any]:
        """A prompt that brings its embeddings, see `build`."""
        sources: dict[str, Any] = {"caption": prompts, "empty": empty}
        lengths = {of: [1] * len(each["prompt_embeds"]) for of, each in sources.items()}
        if self.ragged:
            lengths = {of: each["prompt_mask"].sum(dim=1).tolist() for of, each in sources.items()}
        guided = self.guided
        structures = [self.findings["structure"]]
        asked: dict[str, Any] = self.guidance_args(guidance_scale)
        if guided and guidance_scale > 1:
            structures = guided["results"]
            asked["negative_prompt"] = [""]
        results = [put_together(each, sources, lengths) for each in structures]
        return {"prompt": [EncodedPrompt(results)], **asked, **self.findings["own"]}

    def size_args(self, height: int, width: int) -> dict[str, int]:
        return {"height": height, "width": width} | list_size_options(
            self.pipeline_class, height, width
        )

    def guidance_args(self, guidance_scale: float) -> dict[str, float]:
        guided = self.guided
        if self.embedded_guidance:
            return self.findings["off"] | {self.embedded_guidance: guidance_scale}
        if guided is None or guidance_scale <= 1:
            return dict(self.findings["off"])
        shift = 1 if guided["from_zero"] else 0
        return self.findings["off"] | {guided["name"]: guidance_scale - shift}

    def usage(self, resolution: int, clip_skip: int | None, max_tokens: int | None) -> str:
        own = dict(self.findings["own"])
        if max_tokens:
            own["max_sequence_length"] = max_tokens
        own |= list_size_options(self.pipeline_class, resolution, resolution)
        guided = self.guided
        if guided and guided["name"] == "true_cfg_scale":  # without it, there is no guidance
            own["negative_prompt"] = ""
        return "".join(
            f", {name}={json.dumps(value)}" if isinstance(value, str) else f", {name}={value}"
            for name, value in own.items()
        )

    def build(self, parts: dict[str, Any], base: Base, resolution: int) -> Any:
        """Without text encoders, it replays the embeddings of an `EncodedPrompt`."""
        kind = self.pipeline_class
        is_whole = any(name in parts for name in self.index if name.startswith("text_encoder"))
        return make_pipeline(kind if is_whole else replay(kind), parts, self.index)

    def list_parts(self, text_encoders: Any, tokenizers: Any) -> dict[str, Any]:
        (parts,) = text_encoders
        return {**parts.encoders, **parts.others}

    # ---- LoRA

    def has_lora(self) -> bool:
        return hasattr(self.pipeline_class, "load_lora_weights")

    def choose_layers(self, model: torch.nn.Module, which: str) -> list[str]:
        """Linear layers of the blocks: those of attention, or all but those in `SPARED`."""
        if which not in ("attention", "all"):
            return super().choose_layers(model, which)
        chosen = []
        for name, module in model.named_modules():
            words = name.lower().split(".")
            is_in_block = any(word.isdigit() for word in words)
            is_attention = any("attn" in word or "attention" in word for word in words)
            is_spared = any(spared in word for word in words for spared in SPARED)
            if isinstance(module, torch.nn.Linear) and is_in_block and not is_spared:
                if is_attention or which == "all":
                    chosen.append(name)
        return chosen


BLANK = 256, 256  # height and width in pixels of a reference in trials
CALLS: dict[Any, DenoiserCalls] = {}
CODES: dict[str, PipelineCode] = {}
KEPT: list[Any] = []
PLACED: dict[Any, torch.Tensor] = {}


def type_of(model: str) -> Any:
    return getattr(diffusers, model)


def make_small_denoiser(kind: Any, config: Any) -> torch.nn.Module:
    """A denoiser of few layers with random weights, on the CPU."""
    ends = ("layers", "blocks", "depth")
    few = {
        name: 1
        for name, value in config.items()
        # those of the text encoder are inputs
        if name.startswith("num_") and name.endswith(ends) and "text" not in name
        if isinstance(value, int) and value > 1
    }
    try:
        with torch.device("meta"):
            kind.from_config({**config, **few})
    except Exception:  # its layers depend on each other
        few = {}
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(0)
        model = kind.from_config({**config, **few}).eval()
        for weight in model.parameters():
            if weight.dim() > 1:
                torch.nn.init.normal_(weight, std=weight[0].numel() ** -0.5)
    return model


def place(order: torch.Tensor, device: torch.device, argsort: bool = False) -> torch.Tensor:
    """A kept order, or its inverse, on a device, once."""
    known = id(order), device, argsort
    if known not in PLACED:
        PLACED[known] = (order.argsort() if argsort else order).to(device)
    return PLACED[known]


def is_doubled(run: PipelineRun) -> bool:
    """Whether the denoiser got more latents than the captions have."""
    given = list_tensors(next(iter(run.calls[0].values())))
    expected = math.prod(run.noise_shapes[0]) + sum(latents.numel() for latents in run.latents)
    return sum(tensor.numel() for tensor in given) != expected


def record_text(parts: TextParts, off: dict[str, Any], captions: list[str]) -> Any:
    """The results of captions that are encoded together, or, beside references, alone."""
    if parts.images:
        return join_alone([parts.record([caption], off).encoded[0] for caption in captions])
    return parts.record(captions, off).encoded[0]


def shorten_factor(large: torch.Tensor) -> float:
    """The factor that makes `large` of `LARGE` by division, with few digits if those suffice."""
    factor = float(LARGE / large)
    for digits in range(1, 7):
        short = float(f"{factor:.{digits}g}")
        if short and torch.equal(torch.tensor(LARGE) / short, large):
            return short
    return factor


class EncodedPrompt(str):
    """A prompt that brings its results of `encode_prompt`, for each time that it is called."""

    results: list[Any]

    def __new__(cls, results: list[Any]) -> "EncodedPrompt":
        made = super().__new__(cls, " ")
        made.results = results
        return made


def replay(pipeline_class: Any) -> Any:
    """A subclass of a pipeline whose captions are encoded already, see `EncodedPrompt`."""

    def encode_prompt(self: Any, prompt: Any = None, *args: Any, **options: Any) -> Any:
        if prompt and isinstance(prompt[0], EncodedPrompt):
            self.results = iter(prompt[0].results)
        return next(self.results)

    names = {"encode_prompt": encode_prompt, "__module__": pipeline_class.__module__}
    return type(pipeline_class.__name__, (pipeline_class,), names)


def recognize(index: dict[str, Any]) -> bool:
    """Whether a model_index.json may be that of a recorded pipeline."""
    kind = getattr(diffusers, str(index.get("_class_name")), None)
    folder = index.get(Recorded.folder)
    return (
        hasattr(kind, "encode_prompt") and is_component(folder) and is_component(index.get("vae"))
    )
