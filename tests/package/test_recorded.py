"""Pipelines without a family of their own are called as their own code calls them, to the bit."""

import itertools
import json
import math
import pickle
import sys
import threading
from argparse import Namespace
from dataclasses import replace
from types import SimpleNamespace

import diffusers
import pytest
import tiny_pipelines
import torch
from conftest import randomize
from diffusers import DiffusionPipeline, FlowMatchEulerDiscreteScheduler
from diffusers.schedulers.scheduling_utils import SchedulerOutput
from test_families import make_prx_pipeline

import precompute_latents
from diffusion_training.blocks import list_blocks
from diffusion_training.data.captions import are_cut, tokenize
from diffusion_training.data.encoders import encode_images, encode_prompts, load_encoders
from diffusion_training.errors.sentences import describe_expected
from diffusion_training.families.base import Base
from diffusion_training.families.known import load_family
from diffusion_training.families.lora_layers import LAYERS
from diffusion_training.families.opening import find_base, open_base
from diffusion_training.families.recorded import family as recorded
from diffusion_training.families.recorded import findings as recorded_captions
from diffusion_training.families.recorded import layout
from diffusion_training.families.recorded.calls import DenoiserCalls, Unrecordable, reshape_noise
from diffusion_training.families.recorded.family import Recorded
from diffusion_training.families.recorded.pipeline_run import (
    Stopped,
    drawing,
    list_pipeline_settings,
    make_pipeline,
)
from diffusion_training.families.recorded.reading import read_configs
from diffusion_training.families.recorded.tape import Tape
from diffusion_training.families.recorded.text_tensors import (
    CaptionBytes,
    decode_texts,
    describe_result,
)
from diffusion_training.families.recorded.trial import make_small
from diffusion_training.families.recording import record_family
from diffusion_training.latents.cache_size import measure_captions
from diffusion_training.training.step.flow_schedule import compute_mu

SIDE = 32
CAPTIONS = ["a digit two", "the number three, drawn by hand"]


def make_prx(folder):
    make_prx_pipeline(folder).save_pretrained(folder / "whole")
    return folder / "whole"


@pytest.mark.parametrize("make, name", [
    (tiny_pipelines.make_z_image_transformer, "n_layers"),
    (tiny_pipelines.make_qwen_transformer, "num_layers"),
])  # fmt: skip
def test_a_denoiser_is_tried_with_few_layers(make, name):
    """The 30 layers of Z-Image would take 25 GB."""
    model = make()
    small = make_small(type(model), {**model.config, name: 30})
    assert len(list_blocks(small)) <= len(list_blocks(model))


def test_modules_that_are_imported_meanwhile_do_not_stop_a_recording():
    """For example by a thread of a tracker."""
    ends = threading.Event()

    def import_modules():
        for number in itertools.cycle(range(50)):
            sys.modules[f"imported_{number}"] = sys.modules.pop(f"imported_{number - 1}", sys)
            if ends.is_set():
                return

    thread = threading.Thread(target=import_modules)
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        thread.start()
        for _ in range(50):
            with drawing(diffusers.FluxPipeline, None):
                pass
    finally:
        ends.set()
        thread.join()
        sys.setswitchinterval(usual)
        for number in range(50):
            sys.modules.pop(f"imported_{number}", None)


def open_recorded(folder, max_tokens=None):
    """(pipeline, its encoders), as a recorded family, also if it has a family of its own."""
    flags = [f"--pretrained_model_name_or_path={folder}", f"--train_data_dir={folder}"]
    args = precompute_latents.parse_args(flags)
    base = find_base(args, 0)
    family = Recorded(base.index, read_configs(base))
    base = replace(base, family=family, max_tokens=max_tokens)
    return DiffusionPipeline.from_pretrained(folder), load_encoders(base, torch.float32)


def encode(encoders, captions):
    return encode_prompts(encoders, tokenize(encoders.tokenizers, captions))


def draw_noise(encoders, count):
    family, side = encoders.family, SIDE // encoders.family.downscale(encoders.vae)
    _, channels = family.count_channels(encoders.vae)
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, channels, side, side, generator=generator)


def predict_as_pipeline(pipeline, family, noise, caption, time, monkeypatch, **more):
    """What the pipeline itself gives to its scheduler at a time, in the order of its latents.

    more: further arguments of the pipeline.
    """
    seen = []
    scheduler = pipeline.scheduler

    if scheduler.config.get("invert_sigmas"):  # of Mochi, whose time is the share of the image
        time = 1 - time

    def set_timesteps(num_inference_steps=None, device=None, sigmas=None, mu=None, timesteps=None):
        scheduler.timesteps = torch.tensor([1000 * time])
        scheduler.sigmas = torch.tensor([time, 0.0])

    def step(velocity, timestep, sample, **options):
        seen.append(velocity)
        return SchedulerOutput(prev_sample=sample)

    def draw(shape, *args, **options):
        return noise.reshape(shape)

    monkeypatch.setattr(scheduler, "set_timesteps", set_timesteps)
    monkeypatch.setattr(scheduler, "step", step)
    for kind in type(pipeline).__mro__:
        module = __import__(kind.__module__, fromlist=["x"])
        if hasattr(module, "randn_tensor"):
            monkeypatch.setattr(module, "randn_tensor", draw)
    pipeline.set_progress_bar_config(disable=True)
    options = family.findings["off"] | family.findings["own"]
    for name in ("guider", "ocr_guider"):
        if getattr(pipeline, name, None) is not None:
            getattr(pipeline, name).disable()
    size = {"height": SIDE * (4 if noise.shape[-1] * 16 == SIDE * 4 else 1), "width": SIDE}
    options |= size | more
    pipeline(prompt=caption, num_inference_steps=2, output_type="latent", **options)
    (velocity,) = seen
    return -velocity if scheduler.config.get("invert_sigmas") else velocity


def in_order(family, noise, velocity):
    """A packed velocity [1, ...] like `noise`, by the pipeline's packing of 0, 1, 2, ..."""
    calls = family.own_calls
    count = noise[0].numel()
    run = recorded.PipelineTrace("step", torch.arange(count, dtype=torch.float32).reshape)
    run.texts = [calls.make_texts([1])]
    calls.run(1, noise.shape[2:], run)
    return velocity.flatten()[run.sample.flatten().long().argsort()].view_as(noise)


ALL = tiny_pipelines.MAKE | {name: tiny_pipelines.BLOCKS[name] for name in ("flux3", "anima")}
GATED = ("krea2", "qwen_image_2_1", "ernie_image", "nucleus")


@pytest.mark.parametrize(
    "name", [n if n in GATED else pytest.param(n, marks=pytest.mark.long) for n in ALL]
)
@torch.no_grad()
def test_attention_and_mlp_are_the_layers_of_blocks_that_see_tokens(tmp_path, name, monkeypatch):
    monkeypatch.setattr(
        "test_recorded.SIDE", 64 if name in ("qwen_image_2_1", "lumina2", "wan_5b") else 32
    )
    ALL[name](tmp_path / name)
    flags = [f"--pretrained_model_name_or_path={tmp_path / name}", f"--train_data_dir={tmp_path}"]
    base = open_base(precompute_latents.parse_args(flags), record=record_family)
    encoders = load_encoders(base, torch.float32)
    family = encoders.family
    kind = getattr(diffusers, family.model)
    model = kind.from_pretrained(tmp_path / name, subfolder="transformer")
    linear = {n: m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    inputs = {layer: [] for layer in linear.values()}

    def note(layer, args, output):
        inputs[layer].append(args[0].reshape(-1, args[0].shape[-1]))

    for layer in linear.values():
        layer.register_forward_hook(note)
    noise, prompts = draw_noise(encoders, 1), encode(encoders, CAPTIONS[:1])
    other = {name: x / 2 if x.is_floating_point() else x for name, x in prompts.items()}
    for each, texts in ((noise, prompts), (-noise, other)):
        family.predict(model, each, torch.tensor([0.5]), texts)
    expected, uncalled = set(), set()  # FLUX.3 has blocks for references alone
    for full, layer in linear.items():
        first, second = inputs[layer][:: max(1, len(inputs[layer]) // 2)][:2] or (None, None)
        words = full.split(".")
        above = [model.get_submodule(".".join(words[:end])) for end in range(1, len(words))]
        is_of_block = any(isinstance(each, torch.nn.ModuleList) for each in above)
        is_router = hasattr(model.get_submodule(full.rpartition(".")[0]), "experts")
        if not is_of_block or first is None or is_router or layer.out_features == 1:
            uncalled |= {full} if first is None else set()
            continue
        # of a time embedding there is one row, or one for each token, whatever the tokens are
        if len(first) > 1 and not torch.equal(first, second):
            expected.add(full)
    assert {*family.choose_layers(model, "attention_mlp")} - uncalled == expected
    assert len(expected) > 4
    further = LAYERS[kind.__name__].further if kind.__name__ in LAYERS else ()
    assert {*family.choose_layers(model, "all")} - uncalled == expected | {*further}
    attention = {*family.choose_layers(model, "attention")}
    both = {*family.choose_layers(model, "attention_mlp")}
    assert attention == both if name in ("sana", "sana_video") else attention < both  # convolutions
    both = [name for name in attention if "mlp" in name]  # of FLUX.2's single blocks
    assert bool(both) == (kind.__name__ == "Flux2Transformer2DModel")


@pytest.mark.parametrize("name", ["cogview4", "flux", "klein", "flux2"])
def test_noise_levels_are_shifted_as_the_pipeline_shifts_them(tmp_path, name, monkeypatch, capsys):
    """CogView4 has a formula of its own; that of FLUX.2 depends on the number of steps as well."""
    options = {"base_image_seq_len": 16, "base_shift": 0.25, "max_shift": 0.75}
    config = FlowMatchEulerDiscreteScheduler(**options, use_dynamic_shifting=True).config
    folder = tiny_pipelines.MAKE[name](tmp_path / name)
    FlowMatchEulerDiscreteScheduler.from_config(config).save_pretrained(folder / "scheduler")
    pipeline, encoders = open_recorded(folder)
    family, given = encoders.family, {}

    def set_timesteps(num_inference_steps=None, device=None, sigmas=None, mu=None, timesteps=None):
        given[len(sigmas)] = mu
        raise Stopped

    monkeypatch.setattr(pipeline.scheduler, "set_timesteps", set_timesteps)
    for height, width in ((64, 64), (64, 128)):
        size = tuple(side // family.downscale(encoders.vae) for side in (height, width))
        tokens = math.prod(size) / family.patch_size(pipeline.transformer) ** 2
        expected = compute_mu(config, tokens)
        found = family.choose_mu(size, expected)
        for steps in (4, 50, 200):
            with pytest.raises(Stopped):
                pipeline(prompt="a", num_inference_steps=steps, height=height, width=width)
        if name in ("klein", "flux2"):
            assert given[4] > given[50] > found == expected
            # with the usual config of a scheduler, it is the pipeline's shift in many steps
            usual = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True).config
            assert compute_mu(usual, tokens) == pytest.approx(given[200], rel=1e-5)
        elif name == "flux":
            assert given[4] == given[50] == pytest.approx(found) and found == expected
        else:
            assert given[4] == given[50] == found > expected + 0.5
    said = capsys.readouterr().out.count("shifts noise levels at 64 x 64 pixels by ")
    assert said == (name in ("klein", "flux2"))


FEW = ("z_image", "flux", "wan_5b", "krea2", "hunyuan_image")  # one of each mechanism
GUIDANCE = {  # the flags of guidance 2.5 in samples; hunyuan_image draws without
    "z_image": {"guidance_scale": 1.5},  # it counts from 0
    "flux": {"true_cfg_scale": 2.5, "guidance_scale": 1.0},
    "wan_5b": {"guidance_scale": 2.5},  # like Chroma
    "krea2": {"guidance_scale": 1.5},
    "hunyuan_image": {},
}
FOUR_PIXELS = ("ernie_image", "flux2", "klein", "wan", "skyreels_v2", "sana_video")  # per latent
PATCH_SIZES = dict.fromkeys(FEW, 2) | {"hunyuan_image": 1}  # of transformers


@pytest.mark.parametrize(
    "name",
    [n if n in FEW else pytest.param(n, marks=pytest.mark.long) for n in tiny_pipelines.MAKE],
)
@torch.no_grad()
def test_a_recorded_prediction_has_the_bits_of_the_pipeline(tmp_path, name, monkeypatch):
    monkeypatch.setattr(
        "test_recorded.SIDE", 64 if name in ("qwen_image_2_1", "lumina2", "wan_5b") else 32
    )
    pipeline, encoders = open_recorded(tiny_pipelines.MAKE[name](tmp_path))
    family = encoders.family
    assert pickle.loads(pickle.dumps(family)).findings == family.findings
    if name in FEW:
        assert family.guidance_args(2.5) == GUIDANCE[name]
        assert family.guided is None or "'of': 'empty'" in repr(family.guided["results"])
        assert family.own_calls.patch_size == PATCH_SIZES[name]
        captions = tokenize(encoders.tokenizers, [""])
        empty = family.encode_empty(encoders, Base(family, "", "", {}), captions)
        assert empty.keys() == encode(encoders, [""]).keys()
    noise = draw_noise(encoders, 1)
    ours = []
    for caption in CAPTIONS:
        prompts = encode(encoders, [caption])
        time = torch.tensor([0.5])
        ours.append(family.predict(pipeline.transformer, noise, time, prompts))
        size = {"height": SIDE} if name in FOUR_PIXELS else {}
        theirs = predict_as_pipeline(pipeline, family, noise, caption, 0.5, monkeypatch, **size)
        assert torch.equal(ours[-1], in_order(family, noise, theirs).float())
    assert not torch.equal(*ours)
    (sampled,) = family.call_args(prompts, prompts, 2.5)["prompt"]
    assert len(sampled.results) == len(family.guided["results"] if family.guided else [0])
    later = family.predict(pipeline.transformer, noise, torch.tensor([0.25]), prompts)
    assert not torch.equal(later, ours[-1])


@pytest.mark.long
@pytest.mark.parametrize("name", ["wan", "wan_5b", "hunyuan_video", "ltx", "mochi", "easy_animate"])
@torch.no_grad()
def test_a_perfect_prediction_gives_the_latents_of_a_still_back(tmp_path, name, monkeypatch):
    """By the pipeline's own scheduler, which tells the sign of the velocity and of the time."""
    pipeline, encoders = open_recorded(tiny_pipelines.MAKE[name](tmp_path))
    pipeline.set_progress_bar_config(disable=True)
    family = encoders.family
    noise = draw_noise(encoders, 1)
    latents = torch.randn(noise.shape, generator=torch.Generator().manual_seed(2))
    calls = family.own_calls
    numbers = torch.arange(noise.numel(), dtype=torch.float32)
    run = recorded.PipelineTrace("step", numbers.reshape, texts=[calls.make_texts([1])])
    calls.run(1, noise.shape[2:], run)
    packed = (noise - latents).flatten()[run.sample.flatten().long()].view_as(run.sample)
    sign = -1 if name == "mochi" else 1
    monkeypatch.setattr(pipeline.transformer, "forward", lambda *args, **options: (sign * packed,))
    prompts = encode(encoders, CAPTIONS[:1])
    read = family.predict(pipeline.transformer, noise, torch.tensor([0.5]), prompts)
    assert torch.equal(read, noise - latents)
    options = family.findings["off"] | family.findings["own"] | {"height": SIDE, "width": SIDE}
    with drawing(type(pipeline), lambda shape, *args, **more: noise.reshape(shape)):
        drawn = pipeline(
            prompt=CAPTIONS[0], num_inference_steps=8, output_type="latent", **options
        ).frames
    rounding = {"rtol": 0, "atol": 5e-3 if "wan" in name else 1e-4}  # UniPC begins below 1
    torch.testing.assert_close(in_order(family, noise, drawn), latents, **rounding)


@torch.no_grad()
def test_a_distilled_transformer_is_given_the_guidance_of_the_flag(tmp_path, monkeypatch):
    pipeline, encoders = open_recorded(tiny_pipelines.MAKE["flux_dev"](tmp_path))
    noise, prompts = draw_noise(encoders, 1), encode(encoders, CAPTIONS[:1])
    ours = []
    for scale in (1.0, 3.5):
        parts = (encoders.family.index, encoders.family.configs, scale, encoders.family.findings)
        family = Recorded(*parts)
        ours.append(family.predict(pipeline.transformer, noise, torch.tensor([0.5]), prompts))
        more = {"guidance_scale": scale}
        theirs = predict_as_pipeline(pipeline, family, noise, CAPTIONS[0], 0.5, monkeypatch, **more)
        assert torch.equal(ours[-1], in_order(family, noise, theirs).float())
        # samples are drawn with --guidance_scale, without a second caption
        assert family.guidance_args(2.5) == {"guidance_scale": 2.5, "true_cfg_scale": 1}
        assert "negative_prompt" not in family.call_args(prompts, prompts, 2.5)
    assert not torch.equal(*ours)


@pytest.mark.long
@torch.no_grad()
def test_recorded_gives_the_bits_of_a_family_written_by_hand(tmp_path):
    folder = make_prx(tmp_path / "prx")
    pipeline, encoders = open_recorded(folder)
    recorded_family, family = encoders.family, load_family("prx")
    flags = [f"--pretrained_model_name_or_path={folder}", f"--train_data_dir={folder}"]
    own = load_encoders(
        open_base(precompute_latents.parse_args(flags), record=record_family), torch.float32
    )
    assert own.family is family
    images = torch.randint(256, (2, 3, SIDE, SIDE), dtype=torch.uint8)
    one, two = (encode_images(e, images) for e in (encoders, own))
    assert torch.equal(one, two)
    assert recorded_family.describe_scale(encoders.vae) == family.describe_scale(own.vae)
    noise = draw_noise(encoders, 2)
    for captions in (CAPTIONS, CAPTIONS[::-1], CAPTIONS[:1] * 2):
        prompts, hand = encode(encoders, captions), encode(own, captions)
        # its pipeline returns the mask of padding, which is recorded as a column
        prompts["prompt_mask"] = prompts["prompt_1"].bool()
        times = torch.tensor([0.7, 0.3])
        ours = recorded_family.predict(pipeline.transformer, noise, times, prompts)
        theirs = family.predict(pipeline.transformer, noise, times, hand)
        # texts are encoded one by one here, and together there
        torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-5)
        # the same embeddings give the same bits
        assert torch.equal(ours, family.predict(pipeline.transformer, noise, times, prompts))


@pytest.mark.parametrize(
    "name",
    [
        n if n == "z_image" else pytest.param(n, marks=pytest.mark.long)
        for n in ("z_image", "qwen_image", "ernie_image", "qwen_image_2_1")
    ],
)
@torch.no_grad()
def test_blocks_are_recorded_as_the_other_pipeline_of_their_model(tmp_path, name):
    """Their text blocks return lists, and components that are null are left out."""
    tiny_pipelines.OTHER_BLOCKS[name](tmp_path / "blocks")
    _, whole = open_recorded(tiny_pipelines.MAKE[name](tmp_path / "whole"))
    flags = [
        f"--pretrained_model_name_or_path={tmp_path / 'blocks'}",
        f"--train_data_dir={tmp_path}",
    ]
    encoders = load_encoders(
        open_base(precompute_latents.parse_args(flags), record=record_family), torch.float32
    )
    assert not encoders.family.needs_references
    folder = tmp_path / "whole"
    kind = getattr(diffusers, encoders.family.model)
    model = kind.from_pretrained(folder, subfolder="transformer")
    calls = encoders.family.own_calls
    noise = torch.randn(2, calls.channels, 64 // calls.downscale, 64 // calls.downscale)
    times = torch.tensor([0.7, 0.3])
    ours, theirs = (
        each.family.predict(
            model, noise, times, encode_prompts(each, tokenize(each.tokenizers, CAPTIONS))
        )
        for each in (encoders, whole)
    )
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


# ------------------------------------------------------------------- a pipeline nobody has seen


class OwnPipeline(diffusers.FluxPipeline):
    """A pipeline with its own packing (columns first, halved channels) and its own time."""

    def __call__(self, prompt=None, height=None, width=None, num_inference_steps=4,
                 guidance_scale=1.0, output_type="pil", **options):  # fmt: skip
        from diffusers.utils.torch_utils import randn_tensor  # noqa: F401

        embeds, pooled, text_ids = self.encode_prompt(prompt=prompt, prompt_2=None)
        shape = (len(prompt), 4, height // 2, width // 2)
        latents = OWN.randn_tensor(shape, device=embeds.device, dtype=embeds.dtype)
        parts = latents.unfold(3, 2, 2).unfold(2, 2, 2).permute(0, 3, 2, 5, 4, 1)
        latents = parts.reshape(len(prompt), -1, 16).flip(2)
        ids = torch.zeros(latents.shape[1], 3)
        self.scheduler.set_timesteps(num_inference_steps, device=embeds.device)
        for t in self.scheduler.timesteps:
            time = OWN.map_time(t.expand(len(prompt)))
            output = self.transformer(
                hidden_states=latents, timestep=time, pooled_projections=pooled,
                encoder_hidden_states=OWN.read_text(embeds), txt_ids=text_ids, img_ids=ids,
                return_dict=False,
            )[0]  # fmt: skip
            latents = self.scheduler.step(-output, t, latents, return_dict=False)[0]
        raise AssertionError("not reached")


class OWN:
    """What `OwnPipeline` uses, to be replaced."""

    randn_tensor = staticmethod(lambda shape, **options: torch.randn(shape, **options))
    map_time = staticmethod(lambda t: 1 - t / 1000)
    read_text = staticmethod(lambda embeds: embeds)


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Calls of a made-up pipeline with a tiny transformer, and that transformer."""
    import sys

    module = sys.modules[OwnPipeline.__module__]
    monkeypatch.setattr(module, "randn_tensor", None, raising=False)
    monkeypatch.setattr(OWN, "randn_tensor", lambda *a, **k: module.randn_tensor(*a, **k))
    monkeypatch.setattr(recorded, "CALLS", [])
    monkeypatch.setattr(diffusers, "OwnPipeline", OwnPipeline, raising=False)
    folder = tiny_pipelines.MAKE["flux"](tmp_path / "own")
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps(index | {"_class_name": "OwnPipeline"}))

    def open_own():
        args = precompute_latents.parse_args(
            [f"--pretrained_model_name_or_path={folder}", f"--train_data_dir={folder}"]
        )
        base = open_base(args, record=record_family)
        assert base.family.name == "OwnPipeline"
        parts = base.family.load_text_encoder(base, str(folder), {}, "", torch.float32).eval()
        family = base.family.probe_encoders([parts])
        model = diffusers.FluxTransformer2DModel.from_pretrained(folder, subfolder="transformer")
        return family, parts, model

    return open_own


@torch.no_grad()
def test_a_made_up_pipeline_trains_as_it_draws(own):
    family, parts, model = own()
    randomize(model)
    assert family.own_calls.time_maps == {"['timestep']": "1 - t / 1000"}
    noise = torch.randn(2, 4, 8, 12)
    result = [parts.record([text], family.findings["off"]).encoded[0] for text in CAPTIONS]
    rows = [recorded.take_rows(family.findings["structure"], each) for each in result]
    prompts = recorded.stack_rows(family.findings["parts"], rows)
    ours = family.predict(model, noise, torch.tensor([0.75, 0.25]), prompts)
    packed = noise.unfold(3, 2, 2).unfold(2, 2, 2).permute(0, 3, 2, 5, 4, 1)
    shape = packed.shape
    output = model(
        hidden_states=packed.reshape(2, -1, 16).flip(2),
        timestep=torch.tensor([0.25, 0.75]),
        pooled_projections=torch.cat([each[1] for each in result]),
        encoder_hidden_states=torch.cat([each[0] for each in result]),
        txt_ids=result[0][2],
        img_ids=torch.zeros(24, 3),
    ).sample
    parts = (-output).flip(2).reshape(shape)  # column, row, y, x, channel
    theirs = parts.permute(0, 5, 2, 3, 1, 4).reshape(noise.shape)
    assert torch.equal(ours, theirs)


def test_captions_that_do_not_fit_the_denoiser_end_in_a_sentence(own):
    """As a cache would that another version of the pipeline has encoded."""
    family, _, model = own()
    findings = json.loads(json.dumps(family.findings).replace("32]", "7]"))
    assert findings != family.findings
    with pytest.raises(SystemExit, match=r"with the cache's captions, .*make the cache again.*7"):
        Recorded(family.index, family.configs, findings=findings).try_model(model, 64)


def list_places(node, place=()):
    """The keys that lead to each value of nested lists and dicts."""
    items = node.items() if isinstance(node, dict) else enumerate(node)
    for key, value in items if isinstance(node, dict | list) else ():
        yield (*place, key)
        yield from list_places(value, (*place, key)) if isinstance(value, dict | list) else ()


def test_changed_findings_of_a_file_are_refused():
    """Except for a plain value in place of a tensor, which `encode_empty` notices."""
    part = {"column": "prompt_embeds", "of": "caption", "dtype": "float32", "shape": [9, 4]}
    part |= {"typical": 0.0, "axis": 0, "is_ragged": True}
    pooled = part | {"column": "prompt_1", "shape": [4], "is_ragged": False}
    mask = {"mask": "int64", "of": "caption"}
    results = [[part, mask, 7], [part | {"of": "empty"}, pooled, None]]
    written = {
        "off": {"true_cfg_scale": 1.0, "guidance_scale": 0.0},
        "structure": [part, mask, [pooled, None]],
        "parts": [part, pooled],
        "guided": {"name": "true_cfg_scale", "results": results, "from_zero": False},
        "own": {"use_pe": False},
        "references": {"count": 1, "are_needed": False, "are_read": True},
        "max_sequence_length": 9,
    }
    recorded_captions.check_findings(written)
    number = 0
    for place in list_places(written):
        for value in (None, True, -1, "", "x", [1], {}, {"a": 1}):
            findings = json.loads(json.dumps(written))
            node = findings
            for key in place[:-1]:
                node = node[key]
            before = node[place[-1]]
            node[place[-1]] = value
            is_node = place[0] in ("structure", "guided") and isinstance(place[-1], int)
            is_node = is_node or place[-1] in ("structure", "results")
            may_be_plain = is_node and "shape" not in place and not isinstance(value, dict)
            may_be_none = place in (("guided",), ("references",), ("own",)) and not value
            is_free = place == ("max_sequence_length",) or (
                place[0] == "references" and type(value) is type(before) is bool
            )
            if before == value or may_be_plain or may_be_none or is_free:
                continue
            number += 1
            with pytest.raises(Exception):  # noqa: B017  any: `open_data` explains it
                recorded_captions.check_findings(findings)
                pytest.fail(f"{place} = {value!r} was taken")
    assert number > 300


def test_a_denoiser_that_is_always_guided_is_refused(own, monkeypatch):
    monkeypatch.setattr(recorded_captions, "is_guided", lambda run: True)
    with pytest.raises(SystemExit, match="here: its denoiser is always called with guid"):
        own()


def test_a_pipeline_of_videos_is_refused():
    def draw(captions, options, run):
        run.noise_shapes.append((1, 4, 21, 32, 64))

    wan = SimpleNamespace(code=draw, options={}, make_texts=lambda lengths: None)
    with pytest.raises(Unrecordable, match=r"it draws videos, or several .*\(1, 4, 21, 32, 64\)"):
        DenoiserCalls.probe_geometry(wan)


def test_a_pipeline_of_several_images_is_refused_before_its_captions_are_described(
    own, monkeypatch
):
    """As QwenImageLayeredPipeline, whose code needs a text encoder to go further."""
    draw = OWN.randn_tensor
    monkeypatch.setattr(OWN, "randn_tensor", lambda shape, **o: draw((*shape, 5), **o)[..., 0])
    monkeypatch.setattr(recorded_captions, "describe_result", None)
    with pytest.raises(SystemExit, match=r"it draws videos, or several images, .*\(1, 4, 128, 256"):
        own()


def test_a_package_that_a_pipeline_needs_is_named(own, monkeypatch):
    """As for the safety checker of Cosmos, while its text encoder is there."""

    def fail(self, **parts):
        raise ImportError("`guard` is not installed")

    monkeypatch.setattr(OwnPipeline, "__init__", fail)
    with pytest.raises(SystemExit, match="can't be trained here: .* made: `guard` is not inst"):
        own()


class AskingPipeline(diffusers.DiffusionPipeline):
    """A pipeline that asks parts as it is made; the scripts have some of them only at times."""

    def __init__(self, text_processor, vae):
        self.register_modules(text_processor=text_processor, vae=vae)
        self.sides = text_processor.image_processor.size, vae.config.sample_size


def test_a_pipeline_may_ask_its_processor_as_it_is_made():
    """As LongCatImageEditPipeline, whose processor is no `processor` by name."""
    vae = tiny_pipelines.make_vae(sample_size=7)
    assert make_pipeline(AskingPipeline, {"vae": vae}, {}).sides[1] == 7
    with pytest.raises(Unrecordable, match="raises an error as it is made: 'NoneType' object has"):
        make_pipeline(AskingPipeline, {}, {})


def test_calls_that_fail_for_one_reason_are_named_together():
    said = recorded_captions.describe_faults(
        {None: "it is red", "image": "big", "images": "big"}, 1
    )
    assert said == (
        "it can't be called with 1 reference: without an image, it is red; with image=, with "
        "images=, big"
    )


VAE, TRANSFORMER = ["diffusers", "AutoencoderKL"], ["diffusers", "FluxTransformer2DModel"]


@pytest.mark.parametrize(
    "name, parts, reason",
    [
        ("PRXPixelPipeline", {"transformer": TRANSFORMER}, "it has no VAE"),
        ("OmniGenPipeline", {"transformer": TRANSFORMER, "vae": VAE}, "it has no encode_prompt"),
        ("DreamLitePipeline", {"unet": ["diffusers", "X"], "vae": VAE}, "its denoiser is a U-Net"),
        ("FluxPipeline", {"vae": VAE}, "it has no transformer"),
        (
            "VisualClozeGenerationPipeline",
            {"transformer": TRANSFORMER, "vae": VAE},
            "it takes no prompt",
        ),
        ("NoPipeline", {"transformer": TRANSFORMER, "vae": VAE}, "has no class of this name"),
        (
            "WanPipeline",
            {name: TRANSFORMER for name in ("transformer", "transformer_2")}
            | {"vae": VAE, "boundary_ratio": 0.875},
            "it has two experts: transformer draws the noise levels above 0.875, .* Choose Wan 2.1",
        ),
        (
            "WanImageToVideoPipeline",
            {"transformer": TRANSFORMER, "vae": VAE},
            "it makes a video of image, which stills can't teach: choose",
        ),
        (
            "SkyReelsV2DiffusionForcingVideoToVideoPipeline",
            {"transformer": TRANSFORMER, "vae": VAE},
            "it makes a video of video, which stills can't teach: choose",
        ),
        (
            "LTX2Pipeline",
            {"transformer": TRANSFORMER, "vae": VAE, "audio_vae": VAE},
            "it draws videos with sound \\(audio_vae\\) in one transformer, .* such as Wan 2.1",
        ),
        (
            "HunyuanVideo15Pipeline",
            {"transformer": TRANSFORMER, "vae": VAE, "guider": ["diffusers", "X"]},
            "it draws videos, and its transformer is called by a guider .* a plain pipeline, such",
        ),
        (
            "Ideogram4Pipeline",
            {"transformer": TRANSFORMER, "unconditional_transformer": TRANSFORMER, "vae": VAE},
            "it has more than one denoiser: transformer, unconditional_transformer",
        ),
        (["own", "FluxPipeline"], {"transformer": TRANSFORMER, "vae": VAE}, "is in own.py of its"),
    ],
)
def test_a_pipeline_is_refused_by_the_part_that_it_lacks(tmp_path, name, parts, reason):
    (tmp_path / "model_index.json").write_text(json.dumps({"_class_name": name} | parts))
    flags = [f"--pretrained_model_name_or_path={tmp_path}", f"--train_data_dir={tmp_path}"]
    with pytest.raises(SystemExit, match=f"Pipeline, which these scripts can't train: .*{reason}"):
        open_base(precompute_latents.parse_args(flags), record=record_family)


def test_log_messages_about_probes_are_left_out(own, caplog):
    family, parts, _ = own()
    parts.others["tokenizer"].model_max_length = 2
    with caplog.at_level("WARNING"):
        parts.record(["a caption of more tokens"], {})
    assert not caplog.records


def test_results_of_encode_prompt_may_hold_plain_values():
    def record(captions):
        return torch.ones(len(captions), 3, 2), 7, (None, "x")

    structure, (part,) = describe_result(record, None)
    assert structure == [part, 7, [None, "x"]] and part["shape"] == [3, 2]


def test_a_time_computed_in_an_unknown_way_is_refused(own, monkeypatch):
    monkeypatch.setattr(OWN, "map_time", lambda t: (t / 1000) ** 2)
    with pytest.raises(SystemExit) as stop:
        own()
    reason = "its denoiser's timestep is not a known function of the time"
    assert f"OwnPipeline can't be trained here: {reason}" in str(stop.value)
    assert "\n" not in str(stop.value)


def test_a_pipeline_that_encodes_captions_elsewhere_is_refused(own, monkeypatch):
    def call(self, prompt=None, height=None, width=None, num_inference_steps=2):
        assert self.tokenizer and prompt

    monkeypatch.setattr(OwnPipeline, "__call__", call)
    with pytest.raises(SystemExit, match="it does not encode captions by encode_prompt"):
        own()


def test_a_modular_pipeline_is_run_with_the_blocks_that_it_names(tmp_path):
    """FLUX.2 klein's base has a guider, and its distilled model, of the same class, has none."""
    for name, has_guider in {"klein": False, "klein_base": True}.items():
        folder = tiny_pipelines.OTHER_BLOCKS[name](tmp_path / name)
        path = folder / "modular_model_index.json"
        index = json.loads(path.read_text()) | {"_class_name": "Flux2KleinModularPipeline"}
        path.write_text(json.dumps(index))
        flags = [f"--pretrained_model_name_or_path={folder}", f"--train_data_dir={folder}"]
        family = open_base(precompute_latents.parse_args(flags), record=record_family).family
        assert family.has_guider == has_guider
        assert family.blocks == index["_blocks_class_name"]
        path.write_text(json.dumps(index | {"_blocks_class_name": "SequentialPipelineBlocks"}))
        assert (
            open_base(precompute_latents.parse_args(flags), record=record_family).family.blocks
            == "Flux2KleinAutoBlocks"
        )


class StandIn:
    """In place of calls: latents go to the VAE in another order, scaled and shifted."""

    channels = 32

    def __init__(self):
        self.layouts = {}


@pytest.mark.long
def test_a_layout_of_more_numbers_than_float32_counts_is_exact(monkeypatch):
    """8.4 million, as of FLUX.2 at 4096 x 4096 pixels."""
    size = 512, 512
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(32 * 512 * 512, generator=generator)
    scale = torch.rand(32, 1, generator=generator) * 3 + 0.3
    shift = torch.randn(32, 1, generator=generator)

    def decode(calls, vae, size, noise):
        decoded = ((noise.view(32, -1) / scale) + shift).flatten()[order].view(1, 32, *size)
        return SimpleNamespace(decoded=decoded, decoded_with=())

    monkeypatch.setattr(layout, "trace_decoding", decode)
    assert torch.equal(layout.probe_layout(StandIn(), None, size).order, order)


@torch.no_grad()
def test_a_caption_with_more_tokens_than_there_is_room_for_ends_in_a_sentence(tmp_path):
    _, encoders = open_recorded(tiny_pipelines.MAKE["ernie_image"](tmp_path))
    for part in encoders.family.findings["parts"]:
        part["shape"][0] = 8
    with pytest.raises(SystemExit, match="can't encode a caption: it has .* room for 8; shorten"):
        encode(encoders, CAPTIONS)


def test_what_nobody_has_explained_about_a_pipeline_is_a_sentence():
    said = describe_expected(Unrecordable("it draws videos"), Namespace())
    assert said == "the pipeline can't be trained here: it draws videos"


def test_a_use_of_captions_that_depends_on_their_values_is_refused(own, monkeypatch):
    monkeypatch.setattr(OWN, "read_text", lambda embeds: embeds * (embeds.sum().item() != 0))
    with pytest.raises(SystemExit) as stop:
        own()
    said = "its denoiser's ['encoder_hidden_states'] can't be repeated for other values"
    assert said in str(stop.value)


# ------------------------------------------------------------------- captions of two lengths


@pytest.mark.parametrize("name", ["qwen_image_2_1", "krea2"])  # in two calls, in one
@torch.no_grad()
def test_captions_of_two_lengths_in_a_batch_give_what_each_gives_alone(tmp_path, name):
    pipeline, encoders = open_recorded(tiny_pipelines.MAKE[name](tmp_path))
    family, model = encoders.family, pipeline.transformer
    family.try_model(model, 64)
    side = 64 // family.downscale(encoders.vae)
    noise, times = torch.randn(2, 4, side, side), torch.tensor([0.7, 0.3])
    for order in ([0, 1], [1, 0]):
        prompts = encode(encoders, [CAPTIONS[i] for i in order])
        together = family.predict(model, noise, times, prompts)
        for i in range(2):
            row = {key: value[i : i + 1] for key, value in prompts.items()}
            alone = family.predict(model, noise[i : i + 1], times[i : i + 1], row)
            torch.testing.assert_close(together[i : i + 1], alone, rtol=0, atol=1e-5)


# ------------------------------------------------------------------- operations


def test_a_tape_repeats_operations_on_other_tensors_and_devices():
    constant = torch.arange(3.0)

    def function(x, mask):
        return [(x + constant * 2).view(-1), mask.sum(dim=0) * 2, constant]

    inputs = torch.zeros(2, 3), torch.zeros(2, 3, dtype=torch.bool)
    tape = Tape(function, inputs)
    others = torch.randn(3, 2).T.contiguous().T.T, torch.ones(2, 3, dtype=torch.bool)
    others = torch.randn(2, 3), others[1]
    assert all(map(torch.equal, tape(*others), function(*others)))
    assert torch.equal(tape(torch.randn(3, 2).T, others[1])[2], constant)  # another layout
    assert len(tape.steps) == 4  # not that of the constant
    assert all(x.is_meta for x in tape(*(x.to("meta") for x in others)))


@pytest.mark.parametrize(
    "function", [lambda x: x * x.sum().item(), lambda x: x.clone() if x.any() else torch.ones(3)]
)
def test_a_tape_keeps_what_it_can_not_repeat_as_it_was(function):
    tape, others = Tape(function, [torch.zeros(3)]), torch.rand(3)
    assert not torch.equal(tape(others)[0], function(others))


def test_a_tape_repeats_changes_in_place_on_new_tensors():
    def function(x):
        padded = torch.zeros(5)
        padded[1:4] = x
        return padded.mul_(2)

    tape, others = Tape(function, [torch.zeros(3)]), torch.rand(3)
    for _ in range(2):
        assert torch.equal(tape(others)[0], function(others))
    assert torch.equal(tape(torch.zeros(3))[0], torch.zeros(5))


def test_a_tape_leaves_out_operations_of_which_only_values_are_read():
    tape = Tape(lambda x: x * 2 if x.sum() < 1 else x, [torch.zeros(3)])
    assert [str(step.operation) for step in tape.steps] == ["aten.mul.Tensor"]
    assert torch.equal(tape(torch.ones(3))[0], torch.full((3,), 2.0))


def test_a_pipeline_that_draws_other_noise_is_refused():
    with pytest.raises(Unrecordable, match=r"noise of the shape \[5\]"):
        reshape_noise(torch.zeros(4), (5,))


def test_settings_of_a_pipeline_are_what_is_no_part_of_it():
    parts = {"vae": ["diffusers", "AutoencoderKL"], "image_encoder": [None, None], "old": None}
    index = {"_class_name": "X", "is_distilled": False, "ratios": [1, 2], "shift": 3.0}
    assert list_pipeline_settings(parts | index) == {
        name: value for name, value in index.items() if name != "_class_name"
    }


@pytest.mark.parametrize(
    "name",
    [
        "z_image",
        *(pytest.param(n, marks=pytest.mark.long) for n in ("flux", "sd3", "krea2", "sana")),
        *(pytest.param(n, marks=pytest.mark.long) for n in ("ernie_image", "qwen_image")),
    ],
)
@torch.no_grad()
def test_captions_are_cut_if_no_text_encoder_reads_their_end(tmp_path, name):
    """The second caption is too long for CLIP, which has 8 tokens here, but not for T5."""
    tiny_pipelines.MAKE[name](tmp_path)
    _, encoders = open_recorded(tmp_path)
    captions = ["a cat", "a red cat by " * 5, "a red cat by " * 300]
    cut = are_cut(pickle.loads(pickle.dumps(encoders.tokenizers)), captions)
    one, other = (
        encode(encoders, [caption + more for caption in captions]) for more in ("", "the sea")
    )
    is_read = [any(not torch.equal(one[part][i], other[part][i]) for part in one) for i in range(3)]
    assert cut == [not each for each in is_read] == [False, False, True]
    counted = measure_captions(encoders.tokenizers, captions[:2])
    assert counted["ids"] == sum(map(len, captions[:2])) / 2
    assert ("embeddings" in counted) == encoders.family.ragged
    if encoders.family.ragged:  # the size of a cache is estimated by the numbers of tokens
        exact = encode(encoders, captions[:2])["prompt_lengths"].float().mean()
        assert exact <= counted["embeddings"] <= exact + 40  # of a template


def test_captions_are_bytes_that_a_mask_counts():
    texts = ["ab", "\u00e9", ""]
    tokens = CaptionBytes({}, {})(texts, padding="max_length")
    assert tokens.attention_mask.sum(dim=1).tolist() == [2, 2, 0]
    assert decode_texts(tokens.input_ids) == texts
