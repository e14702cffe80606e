"""A new family of models needs one file. The one in this test is like Stable Diffusion 3.

Two CLIP text encoders with projections, padding that is kept without a mask, a VAE that shifts, and
flow matching. The scripts cache, train (fully and as a LoRA), resume and draw with it.
"""

import json
import sys
import types
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tiny_pipelines
import torch
import torch.nn.functional as F
import transformers
from conftest import (
    Script,
    assert_same_weights,
    checkpoints,
    make_captioned,
    make_masked,
    metrics,
    read_losses,
)
from diffusers import DiffusionPipeline, StableDiffusion3Pipeline
from PIL import Image
from safetensors.torch import load_file

import precompute_latents
import train_flow as script
from diffusion_training.data.captions import tokenize
from diffusion_training.data.encoders import encode_prompts, load_encoders
from diffusion_training.draws import step_seed
from diffusion_training.families.base import Base, Encoders, Family, Prompts, Tokens
from diffusion_training.families.known import load_family
from diffusion_training.families.lora_layers import COMMON
from diffusion_training.families.names import FACTS, FamilyFacts
from diffusion_training.families.opening import open_base
from diffusion_training.families.recording import record_family
from diffusion_training.latents.columns import list_columns
from diffusion_training.latents.reader import load_cache

precompute = Script("precompute_latents")
train = Script("train_flow")

# ------------------------------------------------------------------- the family

WIDTH = 64  # of embeddings; 4,096 in the published one, the width of its third text encoder
THIRD = 256  # tokens of the missing third text encoder, replaced by zeros


class StableDiffusion3(Family):
    """Stable Diffusion 3 (arXiv:2403.03206), without the third of its text encoders."""

    name = "sd3"
    title = "Stable Diffusion 3"
    pipeline = "StableDiffusion3Pipeline"
    model = "SD3Transformer2DModel"
    resolution = 1024
    suffixes = ("", "_2")
    embeds_width = "joint_attention_dim"
    masked = False
    ragged = False
    features = ("pooled embeddings",)
    samples_one_by_one = False

    def encode(self, encoders: Encoders, tokens: Tokens) -> Prompts:
        first, second = encoders.text_encoders
        outputs = [
            first(tokens["input_ids"], output_hidden_states=True),
            second(tokens["input_ids_2"], output_hidden_states=True),
        ]
        embeds = torch.cat([output.hidden_states[-2] for output in outputs], dim=-1).float()
        pooled = torch.cat([output.text_embeds for output in outputs], dim=-1).float()
        embeds = F.pad(embeds, (0, WIDTH - embeds.shape[-1], 0, THIRD))
        return {"prompt_embeds": embeds, "pooled_prompt_embeds": pooled}

    def predict(
        self, model: torch.nn.Module, noisy: torch.Tensor, times: torch.Tensor, prompts: Prompts
    ) -> torch.Tensor:
        output = model(
            noisy,
            timestep=1000 * times,
            encoder_hidden_states=prompts["prompt_embeds"],
            pooled_projections=prompts["pooled_prompt_embeds"],
        )
        return output.sample.float()

    def patch_size(self, model: torch.nn.Module) -> int:
        return model.config.patch_size

    def call_args(self, prompts: Prompts, empty: Prompts, guidance_scale: float) -> dict[str, Any]:
        asked = super().call_args(prompts, empty, guidance_scale)
        pooled = prompts["pooled_prompt_embeds"]
        asked["pooled_prompt_embeds"] = pooled
        if guidance_scale > 1:
            asked["negative_pooled_prompt_embeds"] = empty["pooled_prompt_embeds"].expand_as(pooled)
        return asked

    def build(self, parts: dict[str, Any], base: Base, resolution: int) -> Any:
        third = {"text_encoder_3": None, "tokenizer_3": None}
        return super().build(parts | third, base, resolution)


# ------------------------------------------------------------------- a tiny pipeline


def make_sd3(folder):
    """A pipeline of 20,000 weights; its text encoders differ in width."""
    tokenizer = tiny_pipelines.make_clip_tokenizer()
    torch.manual_seed(0)
    options = {"joint_attention_dim": WIDTH, "pos_embed_max_size": 8}
    StableDiffusion3Pipeline(
        text_encoder=tiny_pipelines.make_clip(32, 8, 3),
        tokenizer=tokenizer,
        text_encoder_2=tiny_pipelines.make_clip(16, 12, 3),
        tokenizer_2=tokenizer,
        text_encoder_3=None,
        tokenizer_3=None,
        vae=tiny_pipelines.make_shifting_vae(use_quant_conv=False, use_post_quant_conv=False),
        transformer=tiny_pipelines.make_sd3_transformer(**options),
        scheduler=tiny_pipelines.make_scheduler(),
    ).save_pretrained(folder)
    return folder


def open_sd3(folder):
    """Open the pipeline with diffusers, which must know that there is no third encoder."""
    pipeline = DiffusionPipeline.from_pretrained(folder, text_encoder_3=None, tokenizer_3=None)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


CAPTIONS = ["a digit zero", "a handwritten digit one", "digit", "one", "a digit two", ""]


def register(monkeypatch, kind=StableDiffusion3):
    """Add a family to the list, and its file to the folder. The package needs nothing else."""
    facts = FamilyFacts("sd3.Kind", kind.pipeline, kind.title, features=kind.features)
    monkeypatch.setitem(FACTS, "sd3", facts)
    file = types.SimpleNamespace(Kind=kind)
    monkeypatch.setitem(sys.modules, "diffusion_training.families.sd3", file)
    load_family.cache_clear()


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    register(monkeypatch)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A folder with the pipeline, six captioned images, and a cache of each kind."""
    folder = tmp_path_factory.mktemp("sd3")
    make_sd3(folder / "sd3")
    make_captioned(folder / "images", 6, CAPTIONS)
    with pytest.MonkeyPatch.context() as m:
        register(m)
        for kind in ("embeddings", "ids"):
            flags = precompute.flags(
                folder / kind,
                f"--train_data_dir={folder / 'images'}",
                f"--pretrained_model_name_or_path={folder / 'sd3'}",
                f"--text_cache={kind}",
                *["--center_crop", "--random_flip", "--rows_per_shard=4", "--batch_size=3"],
            )
            precompute(*flags)
    return folder


@pytest.fixture
def flags(root, tmp_path):
    """A run of 6 steps on 6 images; later flags override these."""
    return train.flags(
        tmp_path / "out",
        f"--pretrained_model_name_or_path={root / 'sd3'}",
        "--model_family=sd3",
        "--num_validation_images=2",
        "--caption_dropout=0.3",
        "--random_flip",
    )


@pytest.fixture
def cached(root, flags):
    return [*flags, f"--latents_dir={root / 'embeddings'}"]


# ------------------------------------------------------------------- its name and its pipeline


@pytest.mark.parametrize("parse_args", [script.parse_args, precompute_latents.parse_args])
def test_a_new_family_is_a_choice_of_model_family(root, parse_args, monkeypatch, capsys):
    argv = [f"--pretrained_model_name_or_path={root / 'sd3'}", "--model_family=sd3"]
    argv.append(f"--train_data_dir={root / 'images'}")
    assert parse_args(argv).model_family == "sd3"
    with pytest.raises(SystemExit) as stop:
        parse_args(["--help"])
    assert stop.value.code == 0 and ",sd3}" in capsys.readouterr().out
    monkeypatch.delitem(FACTS, "sd3")
    with pytest.raises(SystemExit) as stop:
        parse_args(argv)
    assert stop.value.code == 2 and "invalid choice: 'sd3'" in capsys.readouterr().err


@torch.no_grad()
def test_a_new_family_encodes_predicts_and_samples_like_its_pipeline(root):
    """A bug in the family itself would show in no other test."""
    family, pipeline = load_family("sd3"), open_sd3(root / "sd3")
    argv = [f"--pretrained_model_name_or_path={root / 'sd3'}"]
    base = open_base(
        precompute_latents.parse_args([*argv, f"--train_data_dir={root}"]), record=record_family
    )
    assert base.family is family  # by model_index.json alone
    encoders = load_encoders(base, torch.float32)
    captions = ["a digit zero", "one"]
    embeds, no_embeds, pooled, no_pooled = pipeline.encode_prompt(captions, None, None)
    prompts = encode_prompts(encoders, tokenize(encoders.tokenizers, captions))
    empty = encode_prompts(encoders, tokenize(encoders.tokenizers, ["", ""]))
    for ours, theirs in ((prompts, (embeds, pooled)), (empty, (no_embeds, no_pooled))):
        assert torch.equal(ours["prompt_embeds"], theirs[0])
        assert torch.equal(ours["pooled_prompt_embeds"], theirs[1])

    given = []
    watch = lambda module, inputs, output: given.append(output[0])
    hook = pipeline.transformer.register_forward_hook(watch)
    latents = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    options = {"height": 16, "width": 16, "num_inference_steps": 2, "latents": latents}
    options["output_type"] = "np"
    pipeline(captions, guidance_scale=1, **options)
    hook.remove()
    prediction = family.predict(pipeline.transformer, latents, torch.ones(2), prompts)
    assert torch.equal(prediction, given[0])

    parts = {name: pipeline.components[name] for name in ("vae", "scheduler", "transformer")}
    alone = family.build(parts, base, 16)
    alone.set_progress_bar_config(disable=True)
    for scale in (1.0, 3.0):
        drawn = alone(**family.call_args(prompts, empty, scale), **options).images
        assert np.array_equal(drawn, pipeline(captions, guidance_scale=scale, **options).images)


# ------------------------------------------------------------------- caches


def test_a_new_familys_cache_has_its_columns_and_older_readers_refuse_it(root, monkeypatch):
    pipeline = open_sd3(root / "sd3")
    embeds, _, pooled, _ = pipeline.encode_prompt(CAPTIONS, None, None)
    settings = {kind: load_cache(root / kind).settings for kind in ("embeddings", "ids")}
    for kind, names in {
        "embeddings": ["prompt_embeds", "pooled_prompt_embeds"],
        "ids": ["input_ids", "input_ids_2"],
    }.items():
        columns = [column.name for column in list_columns(settings[kind])]
        assert columns == [*names, "latents", "latents_flipped"]
        described = {name: settings[kind][name] for name in ("model_family", "features")}
        assert described == {"model_family": "sd3", "features": ["pooled embeddings"]}
        assert settings[kind]["prompt_embeds_shape"] == [8 + THIRD, WIDTH]
        assert settings[kind]["pooled_prompt_embeds_shape"] == [20]
        assert settings[kind]["vae"]["shift_factor"] == 0.25
        assert settings[kind]["text_encoder_2"]["class"] == "CLIPTextModelWithProjection"
    rows = [
        {name: batch[name][i].as_py() for name in ("prompt_embeds", "pooled_prompt_embeds")}
        for batch in load_cache(root / "embeddings").shards
        for i in range(len(batch))
    ]
    for row, embedding, vector in zip(rows, embeds, pooled, strict=True):
        assert row["prompt_embeds"] == embedding.half().flatten().tolist()
        assert row["pooled_prompt_embeds"] == vector.half().tolist()
    monkeypatch.delitem(FACTS, "sd3")
    with pytest.raises(SystemExit, match="pooled embeddings, which this version can't read"):
        load_cache(root / "embeddings")


class ThreeEncoders(StableDiffusion3):
    """With the third text encoder, whose embeddings follow those of the others."""

    suffixes = ("", "_2", "_3")

    def encode(self, encoders: Encoders, tokens: Tokens) -> Prompts:
        *two, third = encoders.text_encoders
        prompts = super().encode(replace(encoders, text_encoders=two), tokens)
        embeds = [prompts["prompt_embeds"], third(tokens["input_ids_3"])[0].float()]
        return {**prompts, "prompt_embeds": torch.cat(embeds, dim=1)}


@pytest.mark.usefixtures("without_figures")
def test_a_cache_of_ids_has_those_of_three_text_encoders(root, tmp_path, flags, monkeypatch):
    register(monkeypatch, ThreeEncoders)
    tiny_pipelines.MAKE["sd3"](tmp_path / "base")
    base = f"--pretrained_model_name_or_path={tmp_path / 'base'}"
    data = [f"--train_data_dir={root / 'images'}", "--center_crop", "--random_flip"]
    precompute(*precompute.flags(tmp_path / "ids", base, *data, "--text_cache=ids"))
    train(*flags, base, f"--latents_dir={tmp_path / 'ids'}", "--max_train_steps=1")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "base/tokenizer_3")
    (rows,) = load_cache(tmp_path / "ids").shards
    expected = tokenizer(CAPTIONS, padding="max_length", max_length=8, truncation=True).input_ids
    assert rows["input_ids_3"].to_pylist() == expected


# ------------------------------------------------------------------- training


@pytest.mark.usefixtures("without_figures")
def test_a_new_familys_caches_give_the_same_losses_as_images(root, tmp_path, flags):
    data = {
        "images": [
            f"--train_data_dir={root / 'images'}",
            "--resolution=16",
            "--center_crop",
            "--dataloader_num_workers=0",
        ],
        "embeddings": [f"--latents_dir={root / 'embeddings'}"],
        "ids": [f"--latents_dir={root / 'ids'}"],
    }
    for name, argv in data.items():
        train(*flags, *argv, "--num_train_epochs=2", f"--output_dir={tmp_path / name}")
    expected = read_losses(tmp_path / "images")
    assert len(expected) == 12
    for name in ("embeddings", "ids"):
        assert read_losses(tmp_path / name) == pytest.approx(expected, rel=5e-4)


@pytest.mark.long
@pytest.mark.usefixtures("without_figures")
def test_a_new_family_trains_on_several_captions_and_sizes(tmp_path, flags):
    make_masked(tmp_path / "images")
    lines = []
    for i, path in enumerate(sorted((tmp_path / "images").glob("[0-9][0-9].png"))):
        captions = {
            "short": [None, "one", "two"][i % 3],
            "long": f"a digit {'zero one'.split()[i % 2]}",
        }
        lines.append(json.dumps({"file_name": path.name, **captions}))
    for path in (tmp_path / "images").glob("*.txt"):
        path.unlink()
    (tmp_path / "images/metadata.jsonl").write_text("\n".join(lines))
    data = [
        f"--train_data_dir={tmp_path / 'images'}",
        *["--caption_column", "short", "long", "--caption_weights", "1", "2"],
        *["--resolution=16", "--bucket_step=4", "--center_crop", "--dataloader_num_workers=0"],
    ]
    (base,) = [flag for flag in flags if flag.startswith("--pretrained_model_name_or_path=")]
    cache = f"--output_dir={tmp_path / 'cache'}"
    precompute(*data, base, cache, "--random_flip")
    flags = [*flags, "--train_batch_size=2"]
    train(*flags, *data, f"--output_dir={tmp_path / 'online'}")
    train(*flags, f"--latents_dir={tmp_path / 'cache'}")
    expected = read_losses(tmp_path / "online")
    assert len(expected) >= 6 and read_losses(tmp_path / "out") == pytest.approx(expected, rel=5e-4)


@pytest.mark.long
@pytest.mark.usefixtures("without_figures")
def test_killed_runs_of_a_new_family_resume_bit_identically(tmp_path, cached, num_processes=2):
    argv = [*cached, "--num_train_epochs=4", "--checkpointing_steps=2", "--holdout=2"]
    argv += ["--checkpoints_total_limit=2"]
    whole, killed = [f"--output_dir={tmp_path / name}" for name in ("whole", "killed")]
    train.fork(*argv, whole, num_processes=num_processes)
    argv += [killed, "--resume_from_checkpoint=latest"]
    train.kill_after_checkpoint(tmp_path / "killed", *argv, num_processes=num_processes)
    train.fork(*argv, num_processes=num_processes)
    assert checkpoints(tmp_path / "whole") == checkpoints(tmp_path / "killed") != set()
    last = max(checkpoints(tmp_path / "whole"), key=lambda name: int(name.split("-")[1]))
    for part in (f"{last}/transformer", f"{last}/transformer_ema", "transformer"):
        assert_same_weights(tmp_path / "whole" / part, tmp_path / "killed" / part)
    assert read_losses(tmp_path / "whole") == read_losses(tmp_path / "killed")


@pytest.mark.ci
def test_a_new_familys_pipeline_redraws_the_last_validation_samples(tmp_path, cached):
    """The run also computes its costs, its curves and the held-out loss."""
    prompts = ["a digit one", "a digit two"]
    train(*cached, "--validation_prompts", *prompts, "--guidance_scale=3", "--holdout=2")
    record = metrics(tmp_path / "out")[-1]
    assert {"held_out_loss", "held_out_loss_ema"} <= record.keys()
    index = json.loads((tmp_path / "out/model_index.json").read_text())
    assert index["_class_name"] == "StableDiffusion3Pipeline"
    assert index["text_encoder_3"] == index["tokenizer_3"] == [None, None]
    card = (tmp_path / "out/README.md").read_text()
    assert "The transformer of this Stable Diffusion 3 pipeline was fine-tuned" in card
    pipeline = open_sd3(tmp_path / "out")
    assert type(pipeline) is StableDiffusion3Pipeline and pipeline.vae.config.shift_factor == 0.25
    path = max((tmp_path / "out/samples").iterdir())
    grid = np.array(Image.open(path).convert("RGB")).astype(int)
    options = {"guidance_scale": 3, "num_inference_steps": 2, "height": 16, "width": 16}
    for i in range(4):
        generator = torch.Generator().manual_seed(step_seed("sample", 0, i))
        (image,) = pipeline(prompts[i // 2], generator=generator, **options).images
        image = np.array(image.resize((64, 64), Image.NEAREST)).astype(int)
        y, x = 68 * (i // 2), grid.shape[1] - 68 * (2 - i % 2)
        assert np.abs(grid[y : y + 64, x : x + 64] - image).max() <= 1


@pytest.mark.usefixtures("without_figures")
@pytest.mark.long
def test_a_new_familys_pipeline_loads_the_trained_lora(root, tmp_path, flags):
    lora = [*flags, f"--latents_dir={root / 'ids'}", "--rank=2", "--lora_layers=all"]
    lora += ["--learning_rate=1e-2", "--checkpointing_steps=5"]
    train(*lora, "--num_train_epochs=2", "--validation_prompts", "one")
    pipeline = open_sd3(root / "sd3")
    options = {"height": 16, "width": 16, "num_inference_steps": 2, "output_type": "np"}
    draw = lambda: pipeline("one", generator=torch.Generator().manual_seed(0), **options).images
    before = draw()
    pipeline.load_lora_weights(tmp_path / "out")
    assert np.abs(draw() - before).max() > 1e-3
    path = tmp_path / "out/pytorch_lora_weights.safetensors"
    trained = load_file(path)
    layers = dict(pipeline.transformer.named_modules())
    adapted = {name for name, layer in layers.items() if hasattr(layer, "base_layer")}
    assert {name.split(".lora_")[0] for name in trained} == {f"transformer.{n}" for n in adapted}
    for end in COMMON.attention + COMMON.mlp:
        assert any(name.endswith(f".{end}") for name in adapted), end

    # It resumes from its checkpoint, and from the file.
    train(*lora, "--num_train_epochs=3", "--resume_from_checkpoint=latest")
    assert metrics(tmp_path / "out")[-1]["step"] == 18
    resumed = load_file(path)
    again = [f"--network_weights={path}", "--max_train_steps=1", "--learning_rate=0"]
    train(*lora, *again, f"--output_dir={tmp_path / 'again'}")
    loaded = load_file(tmp_path / "again" / path.name)
    assert loaded.keys() == resumed.keys() == trained.keys()
    assert all(torch.equal(resumed[name], loaded[name]) for name in trained)
