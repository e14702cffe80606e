"""A family for pipelines that have no file of their own: it is read from the pipeline's own code.

1. A cache is made: `probe_encoders` tries the text encoders (findings.py), and cache.json keeps the
   findings. `encode` records each caption (text_tensors.py), and `read_latents` packs latents as
   the pipeline does (layout.py).
2. Training begins: `restore_findings` reads cache.json, and `try_model` tries a small denoiser
   (trial.py).
3. In a step, `predict` calls the denoiser with recorded arguments (calls.py).
4. For a sample, the pipeline draws with recorded captions (`build`, `call_args`).
5. A pipeline whose code can't be repeated is refused in a sentence that names it.
"""

import contextlib
import hashlib
import inspect
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import diffusers
import torch
import transformers
from accelerate import PartialState
from torch.utils._pytree import tree_flatten_with_path, tree_leaves, tree_map_only

from diffusion_training.errors.faults import explain
from diffusion_training.errors.sentences import explained, fail
from diffusion_training.families.base import Base, Encoders, Family, Prompts, Tokens, hash_rules
from diffusion_training.families.names import NAMED_REFERENCES
from diffusion_training.families.recorded.calls import DenoiserCalls, find_difference
from diffusion_training.families.recorded.findings import (
    IMAGE_ARGUMENTS,
    TextParts,
    check_findings,
    describe_captions,
    probe_readers,
    probe_references,
    turn_on,
)
from diffusion_training.families.recorded.layout import (
    Layout,
    describe_scale,
    normalize_references,
    place,
    probe_layout,
)
from diffusion_training.families.recorded.modular import get_pipeline_class
from diffusion_training.families.recorded.pipeline_run import (
    ONE_FRAME,
    EncodedCaption,
    PipelineCode,
    PipelineTrace,
    is_component,
    list_size_options,
    make_pipeline,
    replay,
)
from diffusion_training.families.recorded.reference_latents import (
    has_statistics,
    make_blanks,
    measure_side,
    split_references,
)
from diffusion_training.families.recorded.tape import Unrecordable
from diffusion_training.families.recorded.text_tensors import (
    LONG,
    SHORT,
    CaptionBytes,
    decode_texts,
    exactly,
    pair_parts,
    plain,
    rebuild_results,
    stack_rows,
    take_rows,
)
from diffusion_training.families.recorded.trial import probe_batching
from diffusion_training.models import list_tensors, load_weights

EMBEDDED_GUIDANCE = ("distilled_guidance_scale", "guidance_scale")  # arguments of pipelines
USUAL_RATIO = 4  # of the longer side of a reference to the shorter one, at most
BLANK = 256, 256  # height and width in pixels of a reference in trials
NO_READERS = ("safety_checker", "image_encoder", "feature_extractor")  # of captions
# in the names of pipelines that share their weights with another
OTHER_TASK = re.compile("ControlNet|Img2Img|Inpaint(ing)?|PAG|VideoToVideo")
# layers that are neither attention nor feed-forward; FLUX.3 has blocks called mode_blocks, and
# Chroma's distilled_guidance_layer makes the modulation of all blocks
SPARED = re.compile("norm|mod(?!e)|adaln|router|guidance")
# [(the plain values that they depend on, calls)], recorded once in a process
CALLS: list[tuple[tuple[Any, ...], DenoiserCalls]] = []


class Recorded(Family):
    """A family that is read from a pipeline. It holds only plain values, so it can be pickled."""

    resolution = 1024  # as these pipelines draw
    embeds_width = ""
    needs_lengths = False
    ragged = False
    caption_unit = "bytes, or more tokens than its text encoders read"

    def __init__(
        self,
        index: dict[str, Any],
        configs: dict[str, Any],
        embedded_guidance_scale: float = 1.0,
        findings: dict[str, Any] | None = None,
    ) -> None:
        """index: model_index.json. configs: {part: its config} of VAE, scheduler and transformer.

        embedded_guidance_scale: in training. findings: those of `probe_encoders`, if there are any.
        """
        self.index = index
        self.configs = configs
        self.findings = findings or {}
        self.embedded_guidance_scale = embedded_guidance_scale
        self.name = self.pipeline = index["_class_name"]
        self.title = self.name.removesuffix("Pipeline").removesuffix("Modular")
        kind = self.pipeline_class
        self.blocks = getattr(kind, "blocks_name", "")
        self.has_guider = "guider" in getattr(kind, "created", {})
        self.can_rewrite = getattr(kind, "can_rewrite", False)
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
        self.draws_videos = any(name in options for name in ONE_FRAME)
        self.takes_negative = "negative_prompt" in options
        takes_images = any(name in options for name in IMAGE_ARGUMENTS)
        self.takes_references = takes_images and not self.draws_videos
        if self.draws_videos:
            self.first_image = "frames[0][0]"
            self.resolution = options["height"].default or self.resolution
        about = self.findings.get("references", {})
        self.image_argument = about.get("name", "image")
        if "name" in about:
            self.features += (NAMED_REFERENCES,)
        self.reads_references = about.get("are_read", False)
        self.needs_references = about.get("are_needed", False)

    @property
    def pipeline_class(self) -> Any:
        return get_pipeline_class(self.index)

    @property
    def guided(self) -> dict[str, Any] | None:
        """How samples are drawn with guidance, see `probe_guidance`."""
        return None if self.embedded_guidance else self.findings["guided"]

    def find_fault(self, base: Base) -> str | None:
        if other := name_plain_pipeline(self.pipeline):
            return (
                f"a {self.pipeline} draws for a task of its own with the weights of a {other}: "
                f'train those, by "_class_name": "{other}" in a copy of model_index.json'
            )
        scheduler = self.configs["scheduler"]
        kind = scheduler["_class_name"]
        predicts_velocity = scheduler.get("prediction_type") == "flow_prediction"
        if kind.startswith("FlowMatch") or predicts_velocity:
            return None
        return (
            f"{self.pipeline} can't be trained here: it has a {kind}, and only flow matching is "
            "recorded"
        )

    @contextlib.contextmanager
    def explaining(self, what: str = "can't be trained here") -> Iterator[None]:
        """End the program in a sentence if the pipeline's code can't be recorded."""
        try:
            yield
        except Unrecordable as error:
            fail(f"{self.pipeline} {what}: {error}")

    # ---- captions

    def load_text_encoder(
        self, base: Base, source: str | None, options: dict[str, Any], suffix: str, dtype: Any
    ) -> torch.nn.Module:
        """All parts of the pipeline that read captions."""
        models: dict[str, torch.nn.Module] = {}
        others: dict[str, Any] = {}
        of_captions = base
        if base.text_encoder:  # a pipeline, too
            of_captions = replace(base, source=base.text_encoder, variant=None)
        for name, entry in self.index.items():
            if not is_component(entry) or name in (self.folder, "vae", "scheduler", *NO_READERS):
                continue
            # a library, or the folder of a pipeline that brings its own class
            libraries = {"diffusers": diffusers, "transformers": transformers}
            library = libraries.get(entry[0]) or getattr(diffusers.pipelines, entry[0], None)
            if library is None:  # importing any other module would run its code
                raise ValueError(f"model_index.json has the library {entry[0]} for {name}")
            kind = getattr(library, entry[1])
            source, given = of_captions.locate(None, name)
            if issubclass(kind, torch.nn.Module):
                models[name] = load_weights(kind, source, **given, torch_dtype=dtype)
            else:
                given.pop("variant", None)
                others[name] = kind.from_pretrained(source, **given)
        if not models:
            raise ValueError("it has no text encoder")
        asked = {"max_sequence_length": base.max_tokens} if base.max_tokens else {}
        known = self.findings.get("references", {}).get("count", 0)
        # as large as the images of a new cache: the pipeline may give references their size
        side = base.resolution or self.resolution
        sizes = [BLANK] * known or [(side, side)] * base.num_references
        with self.explaining():
            code = PipelineCode(self.folder, self.index, self.configs, models | others)
        parts = TextParts(code, models, others, asked, make_blanks(sizes))
        parts.image_argument = self.image_argument
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
        return CaptionBytes(vocabulary, rules, probe_readers(text_encoder))

    def count_max_tokens(self, base: Base, text_encoders: Any, tokenizers: Any) -> int:
        return tokenizers[0].model_max_length

    def probe_encoders(self, text_encoders: Any) -> "Recorded":
        """The family with the structure of encoded captions, and the arguments of guidance."""
        if self.findings:
            return self
        (parts,) = text_encoders
        is_without = not parts.images
        with self.explaining():
            references = probe_references(parts)
            findings = describe_captions(parts, references, self.max_tokens)
        found = self.restore_findings({"recorded": json.loads(json.dumps(findings))})
        found.check_text(parts)
        if is_without and references:
            fail(
                f"a {self.pipeline} edits images: give those that edits start from, as "
                "photo.control.png beside photo.png or with --conditioning_image_column"
            )
        columns = [f"{part['column']} {part['shape']}" for part in findings["parts"]]
        tokens = ", as many tokens as it has" if found.ragged else ""
        PartialState().print(f"{self.pipeline}: a caption becomes {', '.join(columns)}{tokens}")
        return found

    def check_text(self, parts: TextParts) -> None:
        """Stop if a recorded caption gives the denoiser other arguments than the caption itself."""
        off, structure = self.findings["off"], self.findings["structure"]
        with self.explaining():
            live = parts.record([LONG], off, "denoiser")
            batch = stack_rows(self.findings["parts"], [take_rows(structure, live.encoded[0])])
        sizes = tuple((image.height, image.width) for image in parts.images)
        calls = self.open_calls(self.configs[self.folder], sizes)
        run = PipelineTrace("denoiser", torch.zeros, texts=[calls.join(batch)])
        with self.explaining():
            calls.run(1, calls.shape[1:], run)
            given = tree_map_only(torch.Tensor, exactly, live.calls[0])
            expected, _ = tree_flatten_with_path(given)
            if name := find_difference(expected, tree_leaves(run.calls[0])):
                raise Unrecordable(f"a recorded caption gives its denoiser another {name}")

    def restore_findings(self, settings: dict[str, Any]) -> "Recorded":
        """The family with the findings in a cache's settings.

        Raises an error if the pipeline can't be called with them.
        """
        findings = settings["recorded"]
        check_findings(findings)
        found = Recorded(self.index, self.configs, self.embedded_guidance_scale, findings)
        _ = found.own_calls
        return found

    def encode(self, encoders: Encoders, tokens: Tokens) -> Prompts:
        """Encode captions one by one, from their bytes."""
        (parts,) = encoders.text_encoders
        structure = self.findings["structure"]
        rows = []
        captions = decode_texts(tokens["input_ids"])
        references = tokens.get("references") or [None] * len(captions)
        with self.explaining("can't encode a caption"):
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
        (images,) = tokens.get("references") or [None]
        rows = {name: value[0] for name, value in dict[str, Any](empty).items()}
        with explained(f"{self.pipeline} is not guided as its cache says: make the cache again"):
            asked = turn_on(self.findings["off"], guided["name"])
            results = parts.record([SHORT], asked, "denoiser", images).encoded
            for structure, result in zip(guided["results"], results, strict=True):
                if len(pair_parts(structure, plain(result))) != len(list_tensors(result)):
                    raise ValueError("a value of encode_prompt has become a tensor, or none")
                rows |= take_rows(structure, plain(result), of="empty")
        return cast(Prompts, stack_rows(self.findings["parts"], [rows]))

    def describe_empty(self, empty_prompt: dict[str, torch.Tensor]) -> dict[str, Any]:
        return {"recorded": self.findings}

    # ---- images

    def trace_references(self, images: list[Any]) -> PipelineTrace:
        """A run of the pipeline's code that notes what its VAE gets for references."""
        try:
            return self.own_calls.probe(**self.own_calls.name_images(images))
        except Unrecordable as error:
            sizes = " and ".join(f"{image.width} x {image.height}" for image in images)
            reason = explain(error.__cause__ or error)  # without the size of the trial's result
            fail(f"{self.pipeline} can't take references of {sizes} pixels: {reason}")

    def choose_reference_side(self, resolution: int, count: int) -> int:
        run = self.trace_references(make_blanks([(resolution, resolution)] * count))
        with self.explaining():
            return measure_side(run.pixels)

    def shape_reference(self, vae: torch.nn.Module, side: int) -> list[int]:
        (latents,) = self.trace_references(make_blanks([(side, side)])).latents
        return list(latents.shape[1:])

    def measure_references(self, images: list[Any]) -> list[tuple[int, int]]:
        sizes = super().measure_references(images)
        known = self.own_calls.reference_sizes
        if tuple(sizes) not in known:
            # As the VAE gets them, if the pipeline leaves these sizes as they are: they are fewer,
            # and each is recorded once.
            for height, width in sizes:
                if max(height, width) > USUAL_RATIO * min(height, width):
                    print(
                        f"A reference of the ratio {width}:{height} is longer than "
                        f"{USUAL_RATIO}:1, and models have seen few of those"
                    )
            own = self.measure_pixels(sizes)
            known[tuple(sizes)] = own if self.measure_pixels(own) == own else sizes
        return known[tuple(sizes)]

    def measure_pixels(self, sizes: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """The sizes in which the pipeline's VAE gets references of these sizes."""
        pixels = self.trace_references(make_blanks(sizes)).pixels
        return [(each.shape[-2], each.shape[-1]) for each in pixels]

    def encode_references(self, vae: torch.nn.Module, rows: list[list[Any]]) -> list[torch.Tensor]:
        of_rows = []
        for images in rows:
            pixels = self.trace_references(images).pixels if images else []
            of_row = []
            for each in pixels:
                encoded = vae.encode(each.to(vae.device, vae.dtype))
                latents = super().read_latents(vae, encoded, each.shape[-2:])
                mean = latents.chunk(2, dim=1)[0] if self.has_moments(vae) else latents
                of_row.append(mean.flatten(1, -3))
            if has_statistics(vae.config):
                with self.explaining():
                    of_row = normalize_references(self.own_calls, vae, images, of_row)
            of_rows.append(of_row)
        return [torch.cat(each) for each in zip(*of_rows, strict=True)]

    def count_channels(self, vae: torch.nn.Module) -> tuple[int, int]:
        return 3, self.own_calls.channels

    def downscale(self, vae: torch.nn.Module) -> int:
        return self.own_calls.downscale

    def probe_layout(self, vae: torch.nn.Module, size: tuple[int, int]) -> Layout:
        with self.explaining():
            return probe_layout(self.own_calls, vae, size)

    def describe_scale(self, vae: torch.nn.Module) -> dict[str, float | list[float]]:
        with self.explaining():
            return describe_scale(self.own_calls, vae)

    def find_layout(self, vae: torch.nn.Module, size: tuple[int, ...]) -> tuple[int, int, Layout]:
        """(height, width, layout) of the latents of images of a size in pixels."""
        height, width = (side // self.downscale(vae) for side in size)
        return height, width, self.probe_layout(vae, (height, width))

    def prepare_images(self, vae: torch.nn.Module, pixel_values: torch.Tensor) -> torch.Tensor:
        images = super().prepare_images(vae, pixel_values)
        if vae.config.get("in_channels", 3) == 4:  # with transparency
            images = torch.nn.functional.pad(images, (0, 0, 0, 0, 0, 1), value=1.0)
        *_, layout = self.find_layout(vae, images.shape[2:])
        return images.unsqueeze(2) if len(layout.shape) == 4 else images  # a VAE for videos

    def read_latents(
        self, vae: torch.nn.Module, encoded: Any, size: tuple[int, ...]
    ) -> torch.Tensor:
        latents = super().read_latents(vae, encoded, size)
        height, width, layout = self.find_layout(vae, size)
        parts = latents.chunk(2 if self.has_moments(vae) else 1, dim=1)
        back = place(layout.order, latents.device, is_inverse=True)
        rows = [part.flatten(1)[:, back].unflatten(1, (-1, height, width)) for part in parts]
        return torch.cat(rows, dim=1)

    def unpack_latents(self, vae: torch.nn.Module, latents: torch.Tensor) -> torch.Tensor:
        height, width = latents.shape[2:]
        layout = self.probe_layout(vae, (height, width))
        order = place(layout.order, latents.device)
        return latents.flatten(1)[:, order].unflatten(1, layout.shape)

    def decode(self, vae: torch.nn.Module, latents: torch.Tensor) -> torch.Tensor:
        further = self.probe_layout(vae, (latents.shape[2], latents.shape[3])).further
        given = self.unpack_latents(vae, latents).to(vae.dtype)
        # such as the time that LTX's VAE takes
        of_each = [x if x is None else x.to(given).expand(len(given)) for x in further]
        return vae.decode(given, *of_each)[0]

    def read_images(self, result: Any) -> Any:
        if not self.draws_videos:
            return result.images
        return [frames[0] for frames in result.frames]

    # ---- the denoiser

    def open_calls(
        self, config: Any, references: tuple[tuple[int, int], ...] | None = None
    ) -> DenoiserCalls:
        """How the pipeline calls a denoiser with this config.

        references: (height, width) in pixels of each; None: as few as the pipeline takes.
        """
        if references is None:
            references = (BLANK,) * self.needs_references
        model = (self.index, self.configs, config)
        text = (self.findings, self.embedded_guidance_scale)
        code = None
        for known, calls in CALLS:
            if known[:3] == model:
                if known == (*model, *text, references):
                    return calls
                code = calls.code  # its models on the meta device are not made again
        options = dict(self.findings["off"])
        if self.embedded_guidance:
            options[self.embedded_guidance] = self.embedded_guidance_scale
        with self.explaining():
            if code is None:
                configs = self.configs | {self.folder: config}
                code = PipelineCode(self.folder, self.index, configs)
            calls = DenoiserCalls(code, self.findings, options, references)
        CALLS.append(((*model, *text, references), calls))
        return calls

    @property
    def own_calls(self) -> DenoiserCalls:
        """Those of the pipeline's own denoiser."""
        return self.open_calls(self.configs[self.folder])

    def predict(
        self, model: torch.nn.Module, noisy: torch.Tensor, times: torch.Tensor, prompts: Prompts
    ) -> torch.Tensor:
        config = getattr(model, "module", model).config
        references, sizes, texts = split_references(dict(prompts))
        calls = self.open_calls(config, sizes)
        with self.explaining():
            return calls.predict(model, noisy, times, texts, references)

    def find_input_fault(self, config: Any, channels: int, width: int) -> str | None:
        return None  # a trial of the model tells

    def try_model(self, model: torch.nn.Module, resolution: int) -> None:
        """Find out whether captions of two lengths can share a call, with a model of few layers.

        Stops if a batch of two images, at two times, differs from each image alone.
        """
        calls = self.open_calls(model.config)
        misfit = (
            f"{self.model} can't be called with the cache's captions, which another version of "
            "diffusers may have encoded (make the cache again)"
        )
        with explained(misfit), self.explaining():
            if not calls.one_by_one:
                calls.one_by_one = probe_batching(calls, resolution, model.config)
        times = ", ".join(f"{name[2:-2]} = {of}" for name, of in calls.time_maps.items())
        alone = "; each image of a batch in a call of its own" if calls.one_by_one else ""
        PartialState().print(f"{self.pipeline}: {self.model} is called with {times}{alone}")

    def patch_size(self, model: torch.nn.Module) -> int:
        return self.open_calls(model.config).patch_size

    def choose_mu(self, size: tuple[int, int], expected: float) -> float:
        with self.explaining():
            return self.own_calls.choose_mu(size, expected)

    # ---- pipelines, samples

    def call_args(self, prompts: Prompts, empty: Prompts, guidance_scale: float) -> dict[str, Any]:
        """A prompt that brings its embeddings, see `build`."""
        sources: dict[str, Any] = {"caption": dict(prompts), "empty": dict(empty)}
        if self.ragged:
            for batch in sources.values():
                batch["prompt_lengths"] = batch["prompt_mask"].sum(dim=1)
        guided = self.guided
        structures = [self.findings["structure"]]
        asked: dict[str, Any] = self.guidance_args(guidance_scale)
        if guided and guidance_scale > 1:
            structures = guided["results"]
            if self.takes_negative:
                asked["negative_prompt"] = [""]
        results = [rebuild_results(each, sources) for each in structures]
        return {"prompt": [EncodedCaption(results)], **asked, **self.findings["own"]}

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

    def load_scheduler(self, base: Base) -> Any:
        return diffusers.FlowMatchEulerDiscreteScheduler.from_config(self.configs["scheduler"])

    def usage(self, resolution: int, clip_skip: int | None, max_tokens: int | None) -> str:
        own = dict(self.findings["own"])
        if max_tokens:
            own["max_sequence_length"] = max_tokens
        own |= list_size_options(self.pipeline_class, resolution, resolution)
        usage = "".join(f", {name}={value}" for name, value in own.items())
        usage += ', output_type="pil"' * self.draws_videos
        if self.guided and self.takes_negative:
            usage += ', negative_prompt=""'  # without it, some have no guidance, others an error
        return usage

    def build(self, parts: dict[str, Any], base: Base, resolution: int) -> Any:
        """Without text encoders, it replays the embeddings of an `EncodedCaption`."""
        kind = self.pipeline_class
        own = getattr(diffusers, self.configs["scheduler"]["_class_name"])
        sampler: Any = parts.get("scheduler")
        # a multistep solver of flow matching, such as Wan's, draws with the shift of training
        if type(sampler) is diffusers.FlowMatchEulerDiscreteScheduler and own is not type(sampler):
            solver = own.from_config(self.configs["scheduler"], flow_shift=sampler.config.shift)
            parts = parts | {"scheduler": solver}
        is_whole = any(name in parts for name in self.index if name.startswith("text_encoder"))
        return make_pipeline(kind if is_whole else replay(kind), parts, self.index)

    def list_parts(self, text_encoders: Any, tokenizers: Any) -> dict[str, Any]:
        (parts,) = text_encoders
        return {**parts.encoders, **parts.others}

    # ---- LoRA

    def choose_layers(self, model: torch.nn.Module, which: str) -> list[str]:
        """Linear layers of the blocks, by the table; of other models, all but those in `SPARED`."""
        from diffusion_training.families.lora_layers import LAYER_SETS, LAYERS

        if which not in LAYER_SETS:
            return super().choose_layers(model, which)
        if layers := LAYERS.get(type(model).__name__):
            ends = tuple(f".{end}" for end in layers.choose(which))
            further = tuple(f".{end}" for end in layers.further if which == "all")
            return [
                name
                for name, module in model.named_modules()
                if isinstance(module, torch.nn.Linear)
                and (
                    re.search(r"\.\d+\.", name)
                    and name.endswith(ends)
                    or f".{name}".endswith(further)
                )
            ]
        chosen = []
        for name, module in model.named_modules():
            of_block = re.search(r"\.\d+\.(.+)", name.lower())  # such as blocks.0.attn.to_q
            inner = of_block[1] if of_block else ""
            words = name.lower().split(".")
            is_attention = any("attn" in word or "attention" in word for word in words)
            # attention are the four projections; Krea 2 has a gate there, and HunyuanImage blocks
            # inside of the embedder of captions
            is_attention &= not re.search("gate|embed", name.lower())
            is_spared = SPARED.search(name.lower()) or "embed" in inner or is_router(model, name)
            if isinstance(module, torch.nn.Linear) and inner and not is_spared:
                if is_attention or which != "attention":
                    chosen.append(name)
        return chosen


def is_router(model: torch.nn.Module, name: str) -> bool:
    """Whether a layer chooses among the experts beside it."""
    return hasattr(model.get_submodule(name.rpartition(".")[0]), "experts")


def name_plain_pipeline(name: str) -> str | None:
    """The class for text to image, or edits, of a pipeline's weights, if it is for another task.

    A control model has weights of its own, which are for no other class. A ControlNet is a second
    model beside those of the other class.
    """
    other = OTHER_TASK.sub("", name)
    is_known = other != name and hasattr(diffusers, other)
    return other if is_known and "Control" not in other else None
