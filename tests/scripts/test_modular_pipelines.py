"""Pipelines of blocks: FLUX.3 and Anima have no other."""

import functools
import json
import shutil

import diffusers
import numpy as np
import pytest
import tiny_pipelines
import torch
from conftest import Script, assert_same_weights, make_captioned
from diffusers.modular_pipelines import PipelineState
from PIL import Image

import precompute_latents
import train_flow
from diffusion_training.data.captions import tokenize
from diffusion_training.data.encoders import encode_prompts, load_encoders
from diffusion_training.families.opening import open_base
from diffusion_training.families.recorded.family import Recorded
from diffusion_training.families.recorded.modular import get_pipeline_class
from diffusion_training.families.recording import record_family
from diffusion_training.training.showing.captioned_card import describe_text_to_image
from diffusion_training.training.showing.pipelines import name_source
from diffusion_training.training.showing.report import name_run

precompute, train = Script("precompute_latents"), Script("train_flow")
# of 80 tokens with their padding, of 160, and of more than the 512 that are kept
CAPTIONS = ["a digit zero", "one", "a digit two " * 40, "", "a digit one " * 300, "digit"]
DRAWN = {
    "flux3": {"height": 8, "width": 12, "num_inference_steps": 2},
    "anima": {"height": 16, "width": 32, "num_inference_steps": 2},
}
BLOCKS = {  # those in which a LoRA has layers
    "flux3": ("mode_blocks.image", "txt_mode_blocks", "single_transformer_blocks"),
    "anima": ("transformer_blocks",),
}
LORA = "pytorch_lora_weights.safetensors"


def make(folder, name="flux3"):
    """(flags of the base, flags of the images)"""
    tiny_pipelines.BLOCKS[name](folder / "base")
    make_captioned(folder / "images", 6, CAPTIONS)
    data = [f"--train_data_dir={folder / 'images'}", "--resolution=16", "--center_crop"]
    return f"--pretrained_model_name_or_path={folder / 'base'}", data


def open_blocks(folder):
    """The pipeline as its users open it, without the block that rewrites captions."""
    index = json.loads((folder / "modular_model_index.json").read_text())
    blocks = getattr(diffusers, index["_blocks_class_name"])()
    blocks.sub_blocks.pop("prompt_upsampler", None)
    pipeline = blocks.init_pipeline(str(folder))
    pipeline.load_components()
    return pipeline


def draw(pipeline, name):
    options = {"output_type": "np", "output": "images", **DRAWN[name]}
    return pipeline(prompt="one", generator=torch.Generator().manual_seed(0), **options)


# shape: of the latents; Anima's blocks have an axis of frames more
@pytest.mark.parametrize("name, shape", [("flux3", (16, 2, 3)), ("anima", (4, 2, 4))])
@torch.no_grad()
def test_a_recorded_modular_pipeline_has_the_bits_of_its_blocks(tmp_path, name, shape):
    base, data = make(tmp_path, name)
    args = precompute_latents.parse_args([base, *data])
    encoders = load_encoders(open_base(args, record=record_family), torch.float32)
    family, calls = encoders.family, []
    assert family.guided["name"] == "guidance_scale"
    pipeline = open_blocks(tmp_path / "base")
    forward = pipeline.transformer.forward

    @functools.wraps(forward)
    def note(*args, **options):
        calls.append((options["timestep"], forward(*args, **options)[0]))
        return calls[-1][1:]

    pipeline.guider.disable()
    for caption in CAPTIONS[1:4]:
        noise = torch.randn(1, *shape)
        latents = noise if name == "flux3" else noise.unsqueeze(2)
        pipeline.transformer.forward = note
        pipeline(prompt=caption, latents=latents, output_type="np", **DRAWN[name])
        pipeline.transformer.forward = forward
        prompts = encode_prompts(encoders, tokenize(encoders.tokenizers, [caption]))
        time, velocity = calls[0]
        calls.clear()
        ours = family.predict(pipeline.transformer, noise, time, prompts)
        velocity = velocity.mT if name == "flux3" else velocity
        assert torch.equal(ours, velocity.reshape(noise.shape))


# klein's own file divides by what this one's code multiplies
@pytest.mark.parametrize(
    "name, tolerance",
    [("klein", 1e-5), *(pytest.param(n, 1e-5, marks=pytest.mark.long) for n in ("flux3", "flux2"))],
)
@torch.no_grad()
def test_an_edit_of_a_modular_pipeline_is_called_as_by_its_blocks(tmp_path, name, tolerance):
    make_other = tiny_pipelines.OTHER_BLOCKS | tiny_pipelines.BLOCKS
    make_other[name](tmp_path / "base")
    flags = [f"--pretrained_model_name_or_path={tmp_path / 'base'}", f"--train_data_dir={tmp_path}"]
    flags += ["--conditioning_image_column", "before"]
    base = open_base(precompute_latents.parse_args(flags), num_references=1, record=record_family)
    encoders = load_encoders(base, torch.float32)
    family, calls = encoders.family, []
    pixels = np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8)
    reference = Image.fromarray(pixels)
    prompts = dict(encode_prompts(encoders, tokenize(encoders.tokenizers, ["a digit two"])))
    (latents,) = family.encode_references(encoders.vae, [[reference]])
    size = {"reference_0_size": torch.empty(1, 0, 64, 64)}
    pipeline = open_blocks(tmp_path / "base")
    forward = pipeline.transformer.forward

    @functools.wraps(forward)
    def note(*args, **options):
        calls.append((options, forward(*args, **options)[0]))
        return (calls[-1][1],)

    pipeline.transformer.forward = note
    if "guider" in pipeline.components:
        pipeline.guider.disable()
    sides = {"height": 16, "width": 24, "num_inference_steps": 1, "output_type": "np"}
    noise = torch.randn(1, 16, 4, 6)
    options = {"max_sequence_length": family.max_tokens} if name != "flux3" else {}
    pipeline(prompt="a digit two", image=reference, latents=noise, **sides, **options)
    pipeline.transformer.forward = forward
    options, velocity = calls[0]
    time = options["timestep"]
    ours = [
        family.predict(pipeline.transformer, noise, time, prompts | size | {"reference_0": each})
        for each in (latents, -latents)
    ]
    count = noise.shape[2] * noise.shape[3]
    velocity = velocity[:, :count].mT.reshape(noise.shape)
    torch.testing.assert_close(ours[0], velocity, rtol=0, atol=tolerance)
    assert (ours[1] - ours[0]).abs().max() > 1e-3


@pytest.mark.ci
@pytest.mark.parametrize("name", ["flux3", pytest.param("anima", marks=pytest.mark.long)])
@pytest.mark.usefixtures("without_figures")
def test_a_lora_of_a_modular_pipeline_trains_and_is_read_by_it(tmp_path, name):
    base, data = make(tmp_path, name)
    precompute(base, *data, f"--output_dir={tmp_path / 'cache'}")
    flags = [base, f"--latents_dir={tmp_path / 'cache'}", "--train_batch_size=2", "--rank=2"]
    flags += ["--learning_rate=0.1", "--lora_layers=all", "--report_to=none", "--max_train_steps=2"]
    flags += ["--validation_prompts", "one", "--num_validation_images=1", "--guidance_scale=3"]
    train(*flags, "--num_inference_steps=2", f"--output_dir={tmp_path / 'lora'}")
    half = ["--mixed_precision=bf16", "--max_train_steps=1", f"--output_dir={tmp_path / 'half'}"]
    train(*[flag for flag in flags if "latents_dir" not in flag], *data, *half)  # a bf16 VAE
    pipeline = open_blocks(tmp_path / "base")
    before = draw(pipeline, name)
    pipeline.load_lora_weights(tmp_path / "lora", weight_name=LORA)
    adapted = [n for n, _ in pipeline.transformer.named_modules() if ".lora_A." in n]
    assert all(any(n.startswith(f"{block}.0.{part}") for n in adapted)
               for block in BLOCKS[name] for part in ("attn", "ff"))  # fmt: skip
    assert np.abs(draw(pipeline, name) - before).max() > 1e-3
    assert list((tmp_path / "lora/samples").glob("*.png"))


def test_a_saved_modular_pipeline_names_the_classes_of_its_own_parts(tmp_path):
    """FLUX.1's blocks expect a T5 tokenizer, whose class can't read the files of another."""
    tokenizer = tiny_pipelines.make_chat_tokenizer(64)
    made = get_pipeline_class({"_class_name": "FluxModularPipeline"})(tokenizer_2=tokenizer)
    made.save_pretrained(tmp_path)
    opened = diffusers.ModularPipeline.from_pretrained(str(tmp_path))
    opened.load_components()
    assert opened.tokenizer_2("one").input_ids == tokenizer("one").input_ids


def test_blocks_that_do_not_encode_captions_may_read_them(monkeypatch):
    """Ideogram 4 can rewrite a caption, and QwenImageLayered writes one where there is none."""
    kinds = [
        get_pipeline_class({"_class_name": f"{name}ModularPipeline"})
        for name in ("Ideogram4", "QwenImageLayered")
    ]
    assert not any("prompt" in kind.encoded for kind in kinds)
    given = {}
    monkeypatch.setattr(
        diffusers.ModularPipeline, "__call__", lambda self, **o: given.update(o) or PipelineState()
    )
    encode = lambda self, prompt, **options: [7 for _ in self.encoded]
    monkeypatch.setattr(kinds[0], "encode_prompt", encode)
    kinds[0]()(prompt=["one"])
    assert given.items() >= (dict.fromkeys(kinds[0].encoded, 7) | {"prompt": ["one"]}).items()


@pytest.mark.long
@pytest.mark.usefixtures("without_figures")
@pytest.mark.parametrize("precision", ["nf4", "int8"])
def test_a_modular_pipeline_with_a_quantized_base_keeps_its_prior(tmp_path, precision):
    pytest.importorskip("bitsandbytes")
    base, data = make(tmp_path)
    folder = tmp_path / "base/transformer"
    config = diffusers.Flux3Transformer2DModel.load_config(folder)
    wide = {**config, "attention_head_dim": 64, "axes_dims_rope": (16, 16, 16, 16)}
    diffusers.Flux3Transformer2DModel.from_config(wide).save_pretrained(folder)
    precompute(base, *data, f"--output_dir={tmp_path / 'cache'}")
    flags = [base, f"--latents_dir={tmp_path / 'cache'}", "--train_batch_size=2", "--rank=2"]
    flags += ["--report_to=none", "--max_train_steps=2", "--gradient_checkpointing"]
    flags += ["--preserve_prior", "--class_prompt=thing", f"--base_precision={precision}"]
    train(*flags, f"--output_dir={tmp_path / 'lora'}")
    header = json.loads(
        (tmp_path / "lora/checkpoint-2/transformer/adapter_config.json").read_text()
    )
    assert header["quantization"] == precision


@pytest.mark.parametrize(
    "name, more, reason",
    [
        (
            "flux3_distilled",
            "",
            "its denoiser's target_timestep is not a known function of the time",
        ),
        # its blocks start from an image with noise
        pytest.param(
            "anima",
            "--conditioning_data_dir=references",
            "its denoiser does not get references beside the noise",
            marks=pytest.mark.long,
        ),
    ],
)
def test_what_a_modular_pipeline_can_not_train_is_refused(
    tmp_path, monkeypatch, name, more, reason
):
    base, data = make(tmp_path, name)
    shutil.copytree(tmp_path / "images", tmp_path / "references")
    monkeypatch.chdir(tmp_path)
    assert reason in precompute.refused(
        base, *data, *more.split(), f"--output_dir={tmp_path}/cache"
    )


@pytest.mark.parametrize(
    "name, has_guider, can_rewrite",
    [("Flux3", True, True), ("Anima", True, False), ("Flux", False, False)],
)
def test_a_card_sets_only_what_the_blocks_have(tmp_path, name, has_guider, can_rewrite):
    index = {"_class_name": f"{name}ModularPipeline", "transformer": ["diffusers", "ModelMixin"]}
    configs = {"vae": {"_class_name": "AutoencoderKL"}, "scheduler": {}, "transformer": {}}
    findings = {"off": {"guidance_scale": 1.0}, "own": {}, "guided": None}
    flags = ["--latents_dir=x", "--pretrained_model_name_or_path=x", f"--output_dir={tmp_path}"]
    args = train_flow.parse_args([*flags, "--resolution=16", "--validation_prompts", "one"])
    family = Recorded(index, configs, findings=findings)
    about = name_run(1, args, local=False)
    card = describe_text_to_image(family, "transformer", False, about, args).usage
    assert ("guider.guidance_scale = 1" in card) == has_guider
    assert (", guidance_scale=1" in card) == (not has_guider)
    assert ("prompt_upsampler" in card) == can_rewrite


@pytest.mark.parametrize("name", ["flux3", "anima"])
@pytest.mark.long
@pytest.mark.usefixtures("without_figures")
def test_a_whole_modular_pipeline_trains_is_killed_resumes_and_can_be_moved(tmp_path, name):
    base, data = make(tmp_path, name)
    precompute(base, *data, f"--output_dir={tmp_path / 'cache'}")
    flags = [base, f"--latents_dir={tmp_path / 'cache'}", "--train_batch_size=2", "--shift=3"]
    flags += ["--max_train_steps=3", "--checkpointing_steps=1", "--report_to=none"]
    flags += ["--validation_prompts", "one", "--num_validation_images=1", "--num_inference_steps=2"]
    train.fork(*flags, f"--output_dir={tmp_path / 'whole'}", num_processes=2)
    flags += ["--resume_from_checkpoint=latest"]
    train.kill_after_checkpoint(tmp_path / "killed", *flags, num_processes=2)
    train.fork(*flags, f"--output_dir={tmp_path / 'killed'}", num_processes=2)
    assert_same_weights(tmp_path / "whole/transformer", tmp_path / "killed/transformer")
    assert str(tmp_path) not in (tmp_path / "whole/modular_model_index.json").read_text()
    (tmp_path / "whole").rename(tmp_path / "moved")
    code = (tmp_path / "moved/README.md").read_text().split("```python\n")[1].split("```")[0]
    for name, path in {"whole": "moved", "image.png": "image.png"}.items():
        code = code.replace(f'"{name}"', f'"{tmp_path / path}"')
    made = {}
    exec(code, made)
    assert made["pipeline"].scheduler.config.shift == 3 and made["pipeline"].guider.guidance_scale
    assert (tmp_path / "image.png").exists()
    moved = f"--pretrained_model_name_or_path={tmp_path / 'moved'}"  # as a base
    precompute(moved, *data, f"--output_dir={tmp_path / 'other'}")
    train(moved, *flags[1:-1], f"--output_dir={tmp_path / 'again'}")
    name_source(tmp_path / "again", "someone/model")  # as for the hub
    index = json.loads((tmp_path / "again/modular_model_index.json").read_text())
    assert index["transformer"][2]["pretrained_model_name_or_path"] == "someone/model"
