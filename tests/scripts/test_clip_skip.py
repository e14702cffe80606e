"""--clip_skip: embeddings, caches, samples and the card use the same layer as diffusers."""

import json

import pytest
import torch
from conftest import (
    MODELS,
    Script,
    make_captioned,
    make_models,
    make_prx,
    make_sdxl,
    open_pipeline,
    read_losses,
    replace,
)
from diffusers import StableDiffusionPipeline, StableDiffusionXLPipeline
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

import precompute_latents
from diffusion_training.data.captions import tokenize
from diffusion_training.data.encoders import encode_empty_prompt, encode_prompts, load_encoders
from diffusion_training.families.opening import open_base

pytestmark = pytest.mark.usefixtures("without_figures")
precompute = Script("precompute_latents")
train = Script("train_text_to_image")
train_flow = Script("train_flow")


@pytest.fixture
def models(tmp_path):
    return make_models(tmp_path)


def list_cache_flags(tmp_path, models, *more, name="cache"):
    data = f"--train_data_dir={tmp_path / 'images'}"
    base = f"--pretrained_model_name_or_path={models}"
    return precompute.flags(tmp_path / name, data, base, "--batch_size=3", *more)


def list_train_flags(tmp_path, models, *more):
    base = f"--pretrained_model_name_or_path={models}"
    options = ["--train_batch_size=2", "--lr_warmup_steps=0", "--num_validation_images=1"]
    return train.flags(tmp_path / "out", base, *options, *more)


def show_layers(pipeline):
    """Let diffusers' --clip_skip find the layers, as the model card does."""
    vars(pipeline.text_encoder)["text_model"] = pipeline.text_encoder


@pytest.mark.parametrize("kind", [pytest.param("sd", marks=pytest.mark.long), "sdxl"])
def test_clip_skip_gives_the_embeddings_of_the_pipeline(tmp_path, kind):
    folder = make_sdxl(tmp_path) if kind == "sdxl" else make_models(tmp_path)
    for suffix in ("", "_2")[: 1 + (kind == "sdxl")]:  # three layers, so that SDXL keeps one
        config = CLIPTextConfig.from_pretrained(folder / f"text_encoder{suffix}")
        config.num_hidden_layers = 3
        torch.manual_seed(3)
        (CLIPTextModelWithProjection if suffix else CLIPTextModel)(config).save_pretrained(
            folder / f"text_encoder{suffix}"
        )
    args = precompute_latents.parse_args(
        [f"--pretrained_model_name_or_path={folder}", f"--train_data_dir={folder}"]
    )
    found = {}
    for clip_skip in (None, 1):
        base = open_base(replace(args, clip_skip=clip_skip))
        encoders = load_encoders(base, torch.float32)
        vae, text_encoders, tokenizers = encoders.vae, encoders.text_encoders, encoders.tokenizers
        captions = ["a digit one", "", "two " * 50]
        with torch.no_grad():
            ours = found[clip_skip] = encode_prompts(encoders, tokenize(tokenizers, captions))
            if kind == "sdxl":
                pipeline = StableDiffusionXLPipeline(
                    vae, *text_encoders, *tokenizers, None, None, force_zeros_for_empty_prompt=False
                )
            else:
                parts = vae, *text_encoders, *tokenizers, None, None, None, None
                pipeline = StableDiffusionPipeline(*parts, requires_safety_checker=False)
                show_layers(pipeline)
            options = {
                "num_images_per_prompt": 1,
                "do_classifier_free_guidance": True,
                "device": "cpu",
            }
            embeds, negative, *pooled = pipeline.encode_prompt(
                captions, clip_skip=clip_skip, **options
            )
        assert torch.equal(ours["prompt_embeds"], embeds)
        empty = encode_empty_prompt(encoders, base)
        if kind == "sdxl":  # it uses zeros
            assert torch.equal(ours["pooled_prompt_embeds"], pooled[0])
        else:  # the pipeline's empty prompt is from the last layer
            torch.testing.assert_close(empty["prompt_embeds"], negative[0], rtol=0, atol=1e-6)
        saved = text_encoders[0].state_dict().keys()
        assert not any(name.startswith("text_model.text_model") for name in saved)
    assert not torch.allclose(found[None]["prompt_embeds"], found[1]["prompt_embeds"])
    most = 1 if kind == "sdxl" else 2  # SDXL's pipeline starts at the last but one
    load_encoders(open_base(replace(args, clip_skip=most)), torch.float32)
    with pytest.raises(SystemExit, match=f"--clip_skip {most + 1} leaves none of 3 layers"):
        load_encoders(open_base(replace(args, clip_skip=most + 1)), torch.float32)


def test_a_cache_made_with_clip_skip_trains_and_samples_with_it(tmp_path, models, monkeypatch):
    make_captioned(tmp_path / "images", 4)
    for name, more in {"cache": ["--clip_skip=1"], "ids": ["--text_cache=ids"], "none": []}.items():
        precompute(*list_cache_flags(tmp_path, models, "--center_crop", *more, name=name))
    assert json.loads((tmp_path / "cache/cache.json").read_text())["text_encoder"]["clip_skip"] == 1
    assert "clip_skip" not in (tmp_path / "none/cache.json").read_text()
    drawn, call = [], StableDiffusionPipeline.__call__

    def draw(self, **given):
        if "latents" not in given:  # else the call finds out what the pipeline gives the U-Net
            drawn.append(given)
        return call(self, **given)

    monkeypatch.setattr(StableDiffusionPipeline, "__call__", draw)
    images = f"--train_data_dir={tmp_path / 'images'}", "--resolution=16", "--center_crop"
    runs = {
        "images": [*images, "--clip_skip=1"],
        "cache": [f"--latents_dir={tmp_path / 'cache'}"],  # the cache records it
        "ids": [f"--latents_dir={tmp_path / 'ids'}", "--clip_skip=1"],
        "last": images,
    }
    losses = {}
    for name, argv in runs.items():
        more = ["--validation_prompts=a digit", "--no-validate_first"]
        more.append(f"--output_dir={tmp_path / 'runs' / name}")
        train(*list_train_flags(tmp_path, models, *argv, *more))
        losses[name] = read_losses(tmp_path / "runs" / name)
    assert losses["cache"] == pytest.approx(losses["images"], rel=2e-4)
    assert losses["ids"] == pytest.approx(losses["images"], rel=2e-4) != losses["last"]
    pipeline = open_pipeline(models)
    pipeline.tokenizer.model_max_length = 8
    show_layers(pipeline)
    layers = []
    for given, clip_skip in zip(drawn, [1, 1, 1, None], strict=True):
        with torch.no_grad():
            expected = pipeline.encode_prompt("a digit", "cpu", 1, True, clip_skip=clip_skip)
        for name, embeds in zip(("prompt_embeds", "negative_prompt_embeds"), expected, strict=True):
            torch.testing.assert_close(given[name], embeds, rtol=0, atol=1e-6)
        layers.append(expected[0])
    assert not torch.allclose(layers[0], layers[-1])
    card = (tmp_path / "runs/cache/README.md").read_text()
    assert (
        ", clip_skip=1).images[0]" in card and 'vars(pipeline.text_encoder)["text_model"]' in card
    )
    for folder, flag, said in (
        ("none", 1, "text_encoder.clip_skip None -> 1"),
        ("cache", 2, "--clip_skip 2 leaves none of 2 layers"),
    ):
        more = [f"--latents_dir={tmp_path / folder}", f"--clip_skip={flag}"]
        assert said in train.refused(*list_train_flags(tmp_path, models, *more))
    error = precompute.refused(*list_cache_flags(tmp_path, models, "--center_crop"))
    assert "holds another cache (" in error and "; text_encoder.clip_skip 1 -> None)" in error


def test_clip_skip_is_refused_where_it_has_no_effect(tmp_path, models):
    make_captioned(tmp_path / "images", 4)
    flags = list_cache_flags(tmp_path, MODELS, "--model_family=prx", "--clip_skip=1")
    said = "--clip_skip 1 does nothing for PRX: leave it out"
    assert said in precompute.refused(*flags)
    flags = list_cache_flags(tmp_path, models, "--text_cache=ids", "--clip_skip=1")
    error = precompute.refused(*flags, status=2)
    assert "--clip_skip does nothing with --text_cache ids" in error
    config = f"--transformer_config_name_or_path={make_prx(tmp_path / 'config')}"
    data = [f"--train_data_dir={tmp_path / 'images'}", "--resolution=16", "--clip_skip=1"]
    assert said in train_flow.refused(*list_train_flags(tmp_path, MODELS, config, *data))
