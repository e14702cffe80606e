"""Families of models: only their own files name them, and each one matches its pipeline.

Embeddings, predictions and images equal those of tiny pipelines of all families.
"""

import ast
import copy
import inspect
import pickle
import re
from argparse import Namespace
from dataclasses import dataclass
from functools import cache
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
import transformers
from conftest import (
    MODELS,
    PRX,
    ROOT,
    Script,
    make_captioned,
    make_klein,
    make_models,
    make_qwen_image,
    make_sdxl,
    make_z_image,
    open_pipeline,
)
from safetensors.torch import save_file

import precompute_latents
import train_flow
import train_text_to_image
from diffusion_training.data.captions import tokenize
from diffusion_training.data.encoders import encode_empty_prompt, encode_prompts, load_encoders
from diffusion_training.errors.sentences import Refused
from diffusion_training.families.base import Base, Encoders, Family
from diffusion_training.families.known import find_family, load_family
from diffusion_training.families.lora_layers import LAYER_SETS, LAYERS
from diffusion_training.families.names import FACTS, FamilyFacts
from diffusion_training.families.opening import open_base
from diffusion_training.families.recording import record_family
from diffusion_training.latents.batch_inputs import make_time_ids
from diffusion_training.latents.columns import list_features
from diffusion_training.models import take_shapes
from diffusion_training.training.lora.lora import (
    add_lora,
    list_adapter,
    list_lora_b,
    load_network_weights,
    save_lora,
)

# ------------------------------------------------------------------- names in other files

# Allowed elsewhere: the class that train_text_to_image.py trains for any family, and the command
# that encodes the digits of the demo, which download_images.py names at its end.
ALLOWED = {("train_text_to_image.py", "UNet2DConditionModel"), ("download_images.py", "prx")}


def list_files():
    """The scripts and the package, without the families' own files."""
    package = sorted((ROOT / "diffusion_training").rglob("*.py"))
    return [
        path
        for path in [*sorted(ROOT.glob("*.py")), *package]
        if ROOT / "diffusion_training/families" not in path.parents
    ]


def name_pattern():
    """A pattern for a family's name, title and classes, as whole words."""
    words = set()
    for family in map(load_family, FACTS):
        words |= {family.name, family.title, family.pipeline, family.model}
    longest_first = "|".join(map(re.escape, sorted(words, key=len, reverse=True)))
    return re.compile(rf"(?<![\w-])(?:{longest_first})(?![\w-])")


def list_excepted(tree):
    """The nodes of docstrings, demos' command lines, and names of features."""
    excepted = set()
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and isinstance(body[0], ast.Expr):
            excepted.add(body[0].value)
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "").startswith("DEMO"):
            excepted |= set(ast.walk(node.value))
        # `"sdxl" in features`: the name in cache.json is older than the families
        if isinstance(node, ast.Compare) and isinstance(node.left, ast.Constant):
            if node.left.value == "sdxl" and [type(each) for each in node.ops] == [ast.In]:
                excepted.add(node.left)
    return excepted


def find_names(source):
    """[(line, text)] where code names a family, or asks which one it is."""
    tree, pattern = ast.parse(source), name_pattern()
    excepted, found = list_excepted(tree), []
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            texts = [] if node in excepted else pattern.findall(node.value)
        else:  # names that are imported, read, called or defined
            names = [getattr(node, field, None) for field in ("id", "attr", "name", "arg")]
            texts = [name for name in names if isinstance(name, str)]
            texts = [name for name in texts if name == "is_sdxl" or pattern.fullmatch(name)]
        found += [(getattr(node, "lineno", 0), text) for text in texts]
    return found


def test_only_a_familys_own_files_name_it():
    assert len(list_files()) > 60
    for path in list_files():
        found = [
            (line, text)
            for line, text in find_names(path.read_text())
            if (path.name, text) not in ALLOWED
        ]
        assert not found, f"{path.relative_to(ROOT)} names families: {found}"


@pytest.mark.parametrize(
    "source, found",
    [
        ('kind = "sd"', ["sd"]),
        ('if family == "sdxl": x', ["sdxl"]),
        ('fail(f"{x} is no Stable Diffusion XL pipeline")', ["Stable Diffusion XL"]),
        ("from diffusers import PRXPipeline", ["PRXPipeline"]),
        ("diffusers.PRXTransformer2DModel", ["PRXTransformer2DModel"]),
        ("def is_sdxl(args): pass", ["is_sdxl"]),
        ('add("--x", help="only for prx")', ["prx"]),
        ('"""Of PRX."""\ndef f():\n    """Of sd."""\n    return 1', []),
        ('DEMO = f"--model_family prx {x}"', []),
        ('if "sdxl" in features: x', []),
        ('"sd-scripts calls it sdxl_base"', []),
    ],
)
def test_find_names_finds_family_names_in_code(source, found):
    assert [text for _, text in find_names(source)] == found


# ------------------------------------------------------------------- the list of families


def test_families_match_their_diffusers_classes_and_scripts():
    for name in FACTS:
        family = load_family(name)
        assert name == family.name
        pipeline, model = (getattr(diffusers, kind) for kind in (family.pipeline, family.model))
        assert issubclass(pipeline, diffusers.DiffusionPipeline)
        assert issubclass(model, torch.nn.Module) and (ROOT / family.script).is_file()
        assert find_family(family.pipeline) is family
        assert set(family.features) <= list_features() and set(family.borrows_from) <= set(FACTS)
        assert family.ragged <= family.masked  # else padding would look like tokens
        assert family.resolution in (512, 1024)
        options = inspect.signature(pipeline.__call__).parameters
        if "max_sequence_length" in options:
            assert family.max_tokens == options["max_sequence_length"].default
    titles = {family.title for family in map(load_family, FACTS)}
    assert len(titles) == len(FACTS)


def test_facts_for_the_flags_are_those_of_the_families():
    found = {
        name: facts._replace(
            **{key: getattr(load_family(name), key) for key in FamilyFacts._fields[2:]}
        )
        for name, facts in FACTS.items()
    }
    assert found == FACTS


def test_a_vae_without_shift_factor_gets_zero_in_the_pipeline():
    """PRX's computes with `shift_factor`, also if it is None."""
    vae = diffusers.AutoencoderKL.from_pretrained(MODELS, subfolder="vae", shift_factor=None)
    parts = {"vae": vae, "transformer": None, "scheduler": None}
    prx = load_family("prx")
    pipeline = prx.build(parts, Base(prx, None, None, {}), 16)
    assert pipeline.vae.config.shift_factor == 0


def test_prx_usage_sets_resolution_binning_and_256_tokens():
    prx = load_family("prx")
    assert prx.max_tokens == 256  # model_max_length of the published tokenizers
    usages = {size: prx.usage(size, None, None) for size in (256, 512, 768, 1024)}
    assert [size for size, usage in usages.items() if usage] == [768]
    assert usages[768] == ", use_resolution_binning=False"


def test_a_new_family_has_defaults_for_other_programs():
    class New(Family):
        name = "new"

    assert New().describe_for_sd_scripts(None) == {"ss_base_model_version": "new"}
    assert New().name_architecture(None, False) == "new"
    assert New().guess_objective({"v_pred"}, {}) == {}
    assert not New().recognizes_file({"v_pred"})


def test_sdxl_describes_whether_the_empty_prompt_is_zero():
    one, zero = torch.ones(2), torch.zeros(2)
    for embeds, pooled in ((one, zero), (zero, one), (zero, zero)):
        described = load_family("sdxl").describe_empty({"a": embeds, "b": pooled})
        both_zero = embeds is pooled is zero
        assert described == {"force_zeros_for_empty_prompt": both_zero}


def test_families_can_be_pickled():
    for name, family in LOADED.items():
        copied = pickle.loads(pickle.dumps(family))
        assert copied.name == name and type(copied) is type(family) and not vars(copied)


@pytest.mark.parametrize(
    "name, class_names",
    {
        "sd": [
            "StableDiffusionPipeline",
            "StableDiffusionImg2ImgPipeline",
            "StableDiffusionInpaintPipeline",
        ],
        "sdxl": ["StableDiffusionXLPipeline", "StableDiffusionXLImg2ImgPipeline"],
        "prx": ["PRXPipeline"],
        None: [
            "ZImagePipeline",
            "Flux2KleinPipeline",
            "QwenImagePipeline",
            "Flux2Pipeline",
            "Flux2KleinInpaintPipeline",
            "QwenImageEditPipeline",
            "QwenImageLayeredPipeline",
            "",
            "StableDiffusion3Pipeline",
            "StableDiffusion3Img2ImgPipeline",
            "StableDiffusion3InpaintPipeline",
            "ZImageImg2ImgPipeline",
            "ZImageInpaintPipeline",
            "ZImageControlNetPipeline",
            "ZImageOmniPipeline",
            "PRXImg2ImgPipeline",
            "prxpipeline",
            "LatentDiffusionPipeline",
            "KandinskyPipeline",
            "FluxPipeline",
            "OnnxStableDiffusionPipeline",
        ],
    }.items(),
)
def test_find_family_recognizes_pipeline_class_names(name, class_names):
    for class_name in class_names:
        family = find_family(class_name)
        assert (family and family.name) == name, class_name


def test_the_wrong_trainer_names_the_right_one_before_images_are_encoded(tmp_path, monkeypatch):
    make_sdxl(tmp_path)
    make_captioned(tmp_path / "images", 2, ["one", "two"])
    monkeypatch.setattr(train_flow, "cache_latents_once", lambda *given: pytest.fail("it encodes"))
    flags = [f"--pretrained_model_name_or_path={tmp_path / 'sdxl'}", "--cache_latents", "--rank=2"]
    flags += [f"--train_data_dir={tmp_path / 'images'}", f"--output_dir={tmp_path / 'out'}"]
    with pytest.raises(SystemExit) as stop:
        Script("train_flow")(*flags)
    assert stop.value.code == 1 and not (tmp_path / "out").exists()
    with pytest.raises(Refused, match="of the family sdxl: train it with train_text_to_image.py"):
        open_base(train_flow.parse_args(flags), "train_flow.py", record=record_family)


def test_no_diffusers_pipeline_belongs_to_two_families():
    names = [name for name in dir(diffusers) if name.endswith("Pipeline")]
    patterns = [facts.pipelines for facts in FACTS.values()]
    counts = {name: sum(bool(re.fullmatch(each, name)) for each in patterns) for name in names}
    assert len(names) > 100 and max(counts.values()) == 1


# ------------------------------------------------------------------- equal to the pipeline


def make_prx_pipeline(folder):
    """A PRX pipeline with the demo's text encoder and VAE. Its samples depend on the text."""
    parts = open_pipeline(make_models(folder)).components
    torch.manual_seed(0)
    transformer = diffusers.PRXTransformer2DModel(**PRX).eval()
    for weight in transformer.parameters():
        torch.nn.init.normal_(weight, std=0.2)
    parts["vae"].register_to_config(shift_factor=0.0)
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    return diffusers.PRXPipeline(
        transformer, scheduler, parts["text_encoder"], parts["tokenizer"], parts["vae"]
    )


def make_sdxl_pipeline(folder):
    """An SDXL pipeline with text encoders of three layers, so that one can be skipped."""
    folder = make_sdxl(folder)
    for name in ("CLIPTextModel", "CLIPTextModelWithProjection"):
        path = folder / ("text_encoder_2" if "Projection" in name else "text_encoder")
        config = transformers.CLIPTextConfig.from_pretrained(path, num_hidden_layers=3)
        torch.manual_seed(2)
        getattr(transformers, name)(config).save_pretrained(path)
    return open_folder(folder)


def open_folder(folder):
    return diffusers.DiffusionPipeline.from_pretrained(folder)


# {name: (function that makes the pipeline in a folder, its subfolder, options of its calls)}
MAKE = {
    "sd": (lambda folder: open_pipeline(make_models(folder)), "sd", {}),
    "sdxl": (make_sdxl_pipeline, "sdxl", {}),
    "prx": (make_prx_pipeline, "sd", {"use_resolution_binning": False}),
    # without a file of their own
    "z-image": (lambda folder: open_folder(make_z_image(folder / "z")), "z", {}),
    "flux2-klein": (
        lambda folder: open_folder(make_klein(folder / "k")),
        "k",
        {"max_sequence_length": 64},
    ),
    "qwen-image": (lambda folder: open_folder(make_qwen_image(folder / "q")), "q", {}),
}
LIMIT = "max_sequence_length"
CAPTIONS = ["A digit @someone", "two " * 50, "", "the number three, drawn by hand"]
SIDE = 16
LOADED = {name: load_family(name) for name in FACTS}
CASES = [(name, None) for name in FACTS]
CASES += [(name, 1) for name, family in LOADED.items() if family.has_clip_skip]


@dataclass
class Opened:
    """A tiny pipeline, opened by diffusers and by the package."""

    pipeline: Any
    base: Base
    encoders: Encoders
    options: dict[str, Any]  # of the pipeline's calls

    @property
    def family(self):
        return self.base.family

    @property
    def denoiser(self):
        return self.pipeline.components[self.family.folder]


@pytest.fixture(scope="module")
def pipelines(tmp_path_factory):
    """make(name) -> (pipeline, folder), once for each family."""

    @cache
    def make(name):
        folder = tmp_path_factory.mktemp(name)
        function, subfolder, _ = MAKE[name]
        pipeline = function(folder)
        pipeline.set_progress_bar_config(disable=True)
        if name in FACTS and load_family(name).usage_before(1):  # the card's lines for clip_skip
            vars(pipeline.text_encoder)["text_model"] = pipeline.text_encoder
        return pipeline, folder / subfolder

    return make


@pytest.fixture(scope="module")
def bases(pipelines):
    """open(name, clip_skip) -> the pipeline as the package opens it, once for each."""

    @cache
    def open(name, clip_skip):
        pipeline, folder = pipelines(name)
        options = MAKE[name][2]
        argv = [f"--pretrained_model_name_or_path={folder}", f"--train_data_dir={folder}"]
        argv += [f"--model_family={name}"] * (name in FACTS)
        argv += [f"--{flag}={value}" for flag, value in options.items() if flag == LIMIT]
        argv += [f"--clip_skip={clip_skip}"] * (clip_skip is not None)
        base = open_base(precompute_latents.parse_args(argv), record=record_family)
        encoders = load_encoders(base, torch.float32)
        for suffix, tokenizer in zip(base.family.suffixes, encoders.tokenizers, strict=True):
            # old tokenizers do not know the text encoder's maximum length
            pipeline.components[f"tokenizer{suffix}"].model_max_length = tokenizer.model_max_length
        return Opened(pipeline, base, encoders, options)

    return open


@pytest.fixture
def opened(bases, name, clip_skip):
    return bases(name, clip_skip)


def each_family(test):
    """Run a test with each family's pipeline, and with --clip_skip if it has it."""
    return pytest.mark.parametrize("name, clip_skip", CASES)(test)


def skip_layers(opened):
    """The pipeline's own option for --clip_skip, if set."""
    return {"clip_skip": opened.base.clip_skip} if opened.base.clip_skip else {}


def encode_as_pipeline(opened, captions):
    """Encode captions with the pipeline, in the format of `Family.encode`."""
    pipeline, options = opened.pipeline, {"do_classifier_free_guidance": False}
    options |= skip_layers(opened)
    if opened.family.name == "sd":
        embeds, _ = pipeline.encode_prompt(captions, "cpu", 1, **options)
        return {"prompt_embeds": embeds}
    if opened.family.name == "sdxl":
        embeds, _, pooled, _ = pipeline.encode_prompt(captions, **options)
        return {"prompt_embeds": embeds, "pooled_prompt_embeds": pooled}
    embeds, mask, _, _ = pipeline.encode_prompt(captions, **options)
    return {"prompt_embeds": embeds.masked_fill(~mask[..., None], 0), "prompt_mask": mask}


@each_family
@torch.no_grad()
def test_text_encoders_keep_no_keys_and_values(opened, monkeypatch):
    """They serve to generate text, and would take memory for each caption."""
    monkeypatch.delattr("transformers.cache_utils.Cache.update")
    encode_prompts(opened.encoders, tokenize(opened.encoders.tokenizers, CAPTIONS))


@each_family
@torch.no_grad()
def test_embeddings_equal_the_pipelines(opened):
    tokens = tokenize(opened.encoders.tokenizers, CAPTIONS)
    ours, theirs = encode_prompts(opened.encoders, tokens), encode_as_pipeline(opened, CAPTIONS)
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert ours[name].dtype == (torch.bool if name == "prompt_mask" else torch.float32)
        assert torch.equal(ours[name], value), name
    lengths = tokens.get("prompt_mask", torch.ones(4, 8)).sum(dim=1)
    assert (lengths.unique().numel() > 2) == opened.family.masked  # captions differ in length
    assert not torch.equal(ours["prompt_embeds"][0], ours["prompt_embeds"][3])


def make_inputs(opened, caption):
    """The denoiser's inputs for one caption and an image of SIDE pixels, from the package."""
    tokens = tokenize(opened.encoders.tokenizers, [caption])
    prompts = dict(encode_prompts(opened.encoders, tokens))
    if opened.family.needs_lengths:
        prompts["prompt_lengths"] = prompts["prompt_mask"].sum(dim=1)
    if opened.family.needs_sizes:
        size, corner, flipped = torch.tensor([[SIDE, SIDE]]), torch.zeros(1, 2), torch.zeros(1)
        prompts["time_ids"] = make_time_ids(size, corner, (SIDE, SIDE), flipped.bool())
    return prompts


def predict(family, model, *inputs):
    """The prediction of a denoiser, as its trainer calls it."""
    if family.folder == "unet":
        return train_text_to_image.predict_noise({"unet": model}, *inputs)
    return family.predict(model, *inputs)


@each_family
@torch.no_grad()
def test_predictions_equal_the_pipelines(opened):
    """Bit for bit in the first step. Later the pipeline may round the time differently."""
    _, channels = opened.family.count_channels(opened.encoders.vae)
    side = SIDE // opened.family.downscale(opened.encoders.vae)
    shape = (1, channels, side, side)
    given, noisy = [], [torch.randn(shape, generator=torch.Generator().manual_seed(0))]
    caption, scheduler = "a digit two", opened.pipeline.scheduler

    def watch(module, inputs, output):
        given.append(output[0])

    def keep(pipeline, number, timestep, tensors):
        noisy.append(tensors["latents"].clone())
        return tensors

    hook = opened.denoiser.register_forward_hook(watch)
    opened.pipeline(
        prompt=caption,
        height=SIDE,
        width=SIDE,
        num_inference_steps=3,
        latents=noisy[0].clone(),
        callback_on_step_end=keep,
        output_type="latent",
        guidance_scale=1.0,
        **opened.options,
        **skip_layers(opened),
    )
    hook.remove()
    is_flow = isinstance(scheduler, diffusers.FlowMatchEulerDiscreteScheduler)
    times = scheduler.sigmas if is_flow else scheduler.timesteps
    prompts = make_inputs(opened, caption)
    ours = [
        predict(opened.family, opened.denoiser, noisy[i], times[i : i + 1], prompts)
        for i in range(3)
    ]
    assert len(given) == 3 and torch.equal(ours[0], given[0])
    for prediction, theirs in zip(ours, given, strict=True):
        assert prediction.dtype == torch.float32
        assert torch.allclose(prediction, theirs, atol=1e-4)
    assert not torch.allclose(ours[0], ours[2], atol=1e-2)  # the time matters
    one = make_inputs(opened, "one")
    others = predict(opened.family, opened.denoiser, noisy[0], times[:1], one)
    assert not torch.allclose(ours[0], others, atol=1e-4)  # and so does the caption


@each_family
@torch.no_grad()
def test_predict_keeps_all_tensors_on_one_device(opened):
    """Tensors on the meta device can't be mixed with others."""
    _, channels = opened.family.count_channels(opened.encoders.vae)
    prompts = take_shapes(make_inputs(opened, "a digit two"))
    noisy, times = torch.zeros(1, channels, 4, 4, device="meta"), torch.ones(1, device="meta")
    model = copy.deepcopy(opened.denoiser).to("meta")
    predicted = predict(opened.family, model, noisy, times, prompts)
    assert predicted.is_meta and predicted.shape == noisy.shape


def draw(pipeline, count, first, arguments):
    generators = [torch.Generator().manual_seed(first + i) for i in range(count)]
    options = {"height": SIDE, "width": SIDE, "num_inference_steps": 2, "output_type": "np"}
    return pipeline(**arguments, **options, generator=generators).images


@pytest.mark.parametrize("scale", [1.0, 3.0])
@each_family
@torch.no_grad()
def test_images_from_embeddings_equal_images_from_prompts(opened, scale):
    """Bit for bit, and by a pipeline that has no text encoder."""
    family, encoders = opened.family, opened.encoders
    prompts = ["a digit two", "one"]
    empty = {name: x[None] for name, x in encode_empty_prompt(encoders, opened.base).items()}
    parts = {name: opened.pipeline.components[name] for name in ("vae", "scheduler", family.folder)}
    alone = family.build(parts, opened.base, SIDE)
    alone.set_progress_bar_config(disable=True)
    assert type(alone) is type(opened.pipeline)
    for suffix in family.suffixes:
        text_encoder = alone.components[f"text_encoder{suffix}"]
        assert text_encoder is None or not list(text_encoder.parameters())
    size = 1 if family.samples_one_by_one else len(prompts)
    images, expected = [], []
    for first in range(0, len(prompts), size):
        captions = prompts[first : first + size]  # encoded together, as the pipeline does
        encoded = encode_prompts(encoders, tokenize(encoders.tokenizers, captions))
        asked = family.call_args(encoded, empty, scale)
        assert any(argument.startswith("negative_") for argument in asked) == (scale > 1)
        images += [*draw(alone, size, first, asked)]
        named = {"prompt": captions, "guidance_scale": scale, **opened.options}
        expected += [*draw(opened.pipeline, size, first, named | skip_layers(opened))]
    assert np.array_equal(images, expected)
    assert np.abs(images[0] - images[1]).max() > 1e-3


# ------------------------------------------------------------------- LoRA

ADAPTED = [(name, None) for name in MAKE]


@pytest.mark.parametrize("name, clip_skip", CASES[: len(FACTS)])
def test_lora_layers_of_each_family_exist_in_its_model(opened):
    family, model = opened.family, opened.denoiser
    layers = LAYERS[type(model).__name__]
    chosen = {which: family.choose_layers(model, which) for which in LAYER_SETS}
    assert {*chosen["attention"]} == {*layers.attention}
    assert {*chosen["attention_mlp"]} == {*layers.attention, *layers.mlp}
    assert {*chosen["all"]} == {*layers.attention, *layers.mlp, *layers.further}
    for end in chosen["all"]:
        layers = [m for n, m in model.named_modules() if f".{n}".endswith(f".{end}")]
        assert layers and all(isinstance(m, torch.nn.Linear | torch.nn.Conv2d) for m in layers)


DOUBLE = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj")
DOUBLE += ("to_add_out",)
RECORDED = {  # {name: (ends of the layers of attention, those of attention_mlp and all besides)}
    "z-image": (DOUBLE[:4], ("feed_forward.w1", "feed_forward.w2", "feed_forward.w3")),
    "flux2-klein": ((*DOUBLE, "to_qkv_mlp_proj", "attn.to_out"), ("linear_in", "linear_out")),
    "qwen-image": (DOUBLE, ("net.0.proj", "net.2")),
}


@pytest.mark.parametrize("name, clip_skip", [(name, None) for name in RECORDED])
def test_lora_layers_of_recorded_families_are_those_of_attention_and_feed_forward(opened, name):
    attention, others = RECORDED[name]
    linear = [n for n, m in opened.denoiser.named_modules() if isinstance(m, torch.nn.Linear)]
    for which in LAYER_SETS:
        ends = attention if which == "attention" else attention + others
        expected = {n for n in linear if n.endswith(tuple(f".{end}" for end in ends))}
        assert {*opened.family.choose_layers(opened.denoiser, which)} == expected
        assert all(any(n.endswith(f".{end}") for n in expected) for end in ends)


@pytest.mark.parametrize("name, clip_skip", ADAPTED)
@pytest.mark.parametrize("which", ["attention", "attention_mlp"])
def test_a_saved_lora_is_read_back_also_by_the_pipeline(tmp_path, opened, which):
    family, flags = opened.family, {"rank": 2, "lora_alpha": 3, "use_dora": False}
    args = Namespace(**flags, lora_type="lora", lora_dropout=0.0, lora_layers=which)
    models = []
    for seed in (0, 1):
        model = copy.deepcopy(opened.denoiser)
        torch.manual_seed(seed)
        add_lora(model, family.choose_layers(model, which), "base", torch.float32, args)
        models.append(model)
    trained, read = models
    for weight in list_lora_b({family.folder: trained}):
        torch.nn.init.normal_(weight)
    save_lora({family.folder: trained}, tmp_path, None)
    path = tmp_path / "pytorch_lora_weights.safetensors"
    load_network_weights(read, path, family.folder, family.convert_lora)
    one, other = list_adapter(trained), list_adapter(read)
    assert one.keys() == other.keys() and len(one) >= 4
    assert all(torch.allclose(one[key], other[key], rtol=1e-3, atol=1e-6) for key in one)
    if not hasattr(opened.denoiser, "load_lora_adapter"):  # the code of its model card does
        return
    opened.pipeline.load_lora_weights(tmp_path, weight_name=path.name)
    loaded = {key for key, _ in opened.denoiser.named_parameters() if ".lora_" in key}
    opened.pipeline.unload_lora_weights()
    assert {key.replace(".default_0", "") for key in loaded} == one.keys()


def name_originals(family, model, program):
    """{a layer's name in the original model: its layers in diffusers}, for attention."""
    if program == "PEFT":
        ends = tuple(f".{end}" for end in family.choose_layers(model, "attention"))
        names = [name for name, _ in model.named_modules()]
        return {name: [name] for name in names if f".{name}".endswith(ends)}
    # ai-toolkit uses diffusers' names
    if family.model.startswith("ZImage") and program != "ai-toolkit":
        blocks = [name for name, m in model.named_modules() if name.endswith(".attention")]
        names = {f"{name}.qkv": [f"{name}.to_{letter}" for letter in "qkv"] for name in blocks}
        return names | {f"{name}.out": [f"{name}.to_out.0"] for name in blocks}
    if not family.model.startswith("Flux2"):
        return {name: [name] for name in family.choose_layers(model, "attention")}
    names = {}
    for i in range(model.config.num_layers):
        original, attention = f"double_blocks.{i}", f"transformer_blocks.{i}.attn"
        projections = [f"{attention}.to_{letter}" for letter in "qkv"]
        names[f"{original}.img_attn.qkv"] = projections
        names[f"{original}.img_attn.proj"] = [f"{attention}.to_out.0"]
        names[f"{original}.txt_attn.qkv"] = [f"{attention}.add_{letter}_proj" for letter in "qkv"]
        names[f"{original}.txt_attn.proj"] = [f"{attention}.to_add_out"]
    for i in range(model.config.num_single_layers):
        attention = f"single_transformer_blocks.{i}.attn"
        names[f"single_blocks.{i}.linear1"] = [f"{attention}.to_qkv_mlp_proj"]
        names[f"single_blocks.{i}.linear2"] = [f"{attention}.to_out"]
    return names


@pytest.mark.parametrize("name", RECORDED)
@pytest.mark.parametrize("clip_skip", [None])
@pytest.mark.parametrize("program", ["ai-toolkit", "kohya", "ComfyUI", "PEFT"])
def test_loras_of_other_programs_load_with_the_same_effect(tmp_path, opened, program):
    family, model = opened.family, copy.deepcopy(opened.denoiser)
    layers = dict(model.named_modules())
    weights, expected = {}, {}
    generator = torch.Generator().manual_seed(0)
    for original, parts in name_originals(family, model, program).items():
        a = torch.randn(2, layers[parts[0]].in_features, generator=generator)
        width = sum(layers[part].out_features for part in parts)
        b = torch.randn(width, 2, generator=generator)
        if program == "PEFT":
            key = f"{family.folder}.{original}"
            weights |= {f"{key}.lora_A.default.weight": a, f"{key}.lora_B.default.weight": b}
        elif program != "ai-toolkit":
            key = f"lora_unet_{original.replace('.', '_')}"
            if program == "ComfyUI":
                key = f"diffusion_model.{original}"
            weights |= {f"{key}.lora_down.weight": a, f"{key}.lora_up.weight": b}
            weights[f"{key}.alpha"] = torch.tensor(1.0)
        else:
            key = f"diffusion_model.{original}"
            weights |= {f"{key}.lora_A.weight": a, f"{key}.lora_B.weight": b}
        effect = b @ a * (1 if program in ("ai-toolkit", "PEFT") else 0.5)
        for part, rows in zip(parts, effect.chunk(len(parts)), strict=True):
            expected[part] = rows
    save_file({"x": torch.ones(1)}, tmp_path / "pytorch_lora_weights.safetensors")  # another file
    path = tmp_path / "lora.safetensors"
    save_file({key: value.clone() for key, value in weights.items()}, path)
    flags = {"rank": 2, "lora_alpha": 3, "use_dora": False, "lora_type": "lora"}
    args = Namespace(**flags, lora_dropout=0.0, lora_layers="attention")
    add_lora(model, family.choose_layers(model, "attention"), "base", torch.float32, args)
    load_network_weights(model, path, family.folder, family.convert_lora)
    adapted = {name: m for name, m in model.named_modules() if getattr(m, "lora_A", None)}
    assert adapted.keys() == expected.keys()
    for name, layer in adapted.items():
        delta = layer.lora_B["default"].weight @ layer.lora_A["default"].weight
        delta = delta * layer.scaling["default"]
        assert torch.allclose(delta, expected[name], rtol=1e-4, atol=1e-5), name
