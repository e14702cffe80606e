"""train_flow.py from end to end.

PRX from caches and images, other text encoders and VAEs, training in two phases, LoRA of Z-Image.
"""

import json
import math
import os
import runpy
import shlex
import signal
import sys
from argparse import Namespace
from functools import partial

import fsspec
import numpy as np
import peft
import pytest
import torch
import torch.nn.functional as F
import transformers
from accelerate import Accelerator
from conftest import (
    MODELS,
    PRX,
    ROOT,
    Script,
    assert_same_weights,
    checkpoints,
    launch,
    make_captioned,
    make_masked,
    make_prx,
    make_z_image,
    metrics,
    patch,
    read_losses,
    replace,
    weights,
)
from diffusers import (
    AutoencoderDC,
    AutoencoderKL,
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    PRXPipeline,
    PRXTransformer2DModel,
)
from PIL import Image
from safetensors.torch import load_file

import train_flow as script
from diffusion_training.batches import Prepared
from diffusion_training.data import captions
from diffusion_training.data.captions import tokenize
from diffusion_training.data.encoders import encode_images, encode_prompts, load_encoders
from diffusion_training.draws import step_seed
from diffusion_training.families.base import Encoders
from diffusion_training.families.known import load_family
from diffusion_training.families.names import FACTS
from diffusion_training.families.opening import open_base
from diffusion_training.families.recording import record_family
from diffusion_training.latents.reader import CachedLatents, load_cache
from diffusion_training.training.keeping.checkpoints import load_start
from diffusion_training.training.showing.report import name_run
from diffusion_training.training.step.costs import count_memory
from diffusion_training.training.step.optimizers import make_optimizer

sys.path.insert(0, str(ROOT / "benchmarks"))
import evaluate_samples

pytestmark = pytest.mark.usefixtures("without_figures")
train, precompute = Script("train_flow"), Script("precompute_latents")
CAPTIONS = [
    "a digit zero",
    "a handwritten digit one",
    "digit",
    "a handwritten digit seven",
    "one",
    "a digit two",
]


@pytest.fixture
def flags(tmp_path):
    """A run of 6 steps on 6 images; later flags override these."""
    make_captioned(tmp_path / "images", 6, CAPTIONS)
    make_prx(tmp_path / "config")
    return train.flags(
        tmp_path / "out",
        f"--pretrained_model_name_or_path={MODELS}",
        f"--transformer_config_name_or_path={tmp_path / 'config'}",
        "--num_validation_images=2",
    )


@pytest.fixture
def cached(tmp_path, flags):
    make_cache(tmp_path)
    return [*flags, f"--latents_dir={tmp_path / 'cache'}"]


def list_cache_flags(tmp_path, *argv, name="cache"):
    return precompute.flags(
        tmp_path / name,
        f"--train_data_dir={tmp_path / 'images'}",
        f"--pretrained_model_name_or_path={MODELS}",
        "--model_family=prx",
        "--rows_per_shard=4",
        "--batch_size=3",
        *argv,
    )


def make_cache(tmp_path, *argv, name="cache"):
    precompute(*list_cache_flags(tmp_path, *argv, name=name))


def open_data(argv):
    """The data of a run."""
    args = script.parse_args([str(arg) for arg in argv])
    launch = script.make_launch(Accelerator(**script.accelerator_options(args)), args)
    return script.open_data(
        launch, open_base(args, "train_flow.py", record=record_family), None, {}, args
    )


# ------------------------------------------------------------------- captions


def test_prx_embeddings_equal_the_pipelines_without_padding(tmp_path, cached, monkeypatch):
    """Captions are cleaned as by the pipeline and stored unpadded; zeros pad a batch."""
    texts = ["A Digit ONE!", "@someone a digit", "", *CAPTIONS]
    pipeline = PRXPipeline(None, None, *load_text(), None)
    embeds, mask, _, _ = pipeline.encode_prompt(texts, do_classifier_free_guidance=False)
    encoders = load_encoders(
        open_base(script.parse_args(cached), "train_flow.py", record=record_family), torch.float32
    )
    with torch.no_grad():
        ours = encode_prompts(encoders, tokenize(encoders.tokenizers, texts))
    assert torch.equal(ours["prompt_mask"], mask) and mask.sum(dim=1).unique().numel() > 3
    assert torch.equal(ours["prompt_embeds"], embeds.masked_fill(~mask[..., None], 0))

    cache = load_cache(tmp_path / "cache")
    empty_prompt = cache.empty_prompt
    rows = [row for batch in cache.shards for row in batch["prompt_embeds"].to_pylist()]
    assert [len(row) for row in rows] == (32 * mask[3:].sum(dim=1)).tolist()
    assert (
        torch.equal(empty_prompt["prompt_mask"], mask[2])
        and not empty_prompt["prompt_embeds"][~mask[2]].any()
    )
    dataset = CachedLatents({"cache": cache}, 0, False)
    batch = dataset[[(0, row, 1.0) for row in (5, 0, 3)]]
    assert torch.equal(batch["prompt_mask"], mask[[8, 3, 6]])
    assert torch.equal(
        batch["prompt_embeds"].view(3, 8, 32), ours["prompt_embeds"][[8, 3, 6]].half()
    )
    lengths = mask[[8, 3, 6]].sum(dim=1).tolist()
    assert batch["prompt_lengths"] == lengths == [5, 5, 6]

    # to the longest caption, or to the empty prompt if that is longer; a search pads fully
    monkeypatch.setattr(captions, "MULTIPLE", 2)
    short = dataset[[(0, row, 1.0) for row in (5, 0, 3)]]
    assert torch.equal(short["prompt_mask"], mask[[8, 3, 6], :6])
    assert torch.equal(short["prompt_embeds"], batch["prompt_embeds"][:, : 6 * 32])
    dataset.least_tokens = 7
    assert dataset[[(0, 0, 1.0)]]["prompt_mask"].shape == (1, 8)
    longest = dataset.longest(2)
    assert longest["prompt_lengths"] == [8] and longest["prompt_embeds"].shape == (1, 8 * 32)
    assert torch.equal(longest["latents"], dataset[[(0, 2, 1.0)]]["latents"])


def load_text():
    encoder = transformers.CLIPTextModel.from_pretrained(MODELS, subfolder="text_encoder").eval()
    return encoder, transformers.CLIPTokenizer.from_pretrained(MODELS, subfolder="tokenizer")


def test_left_padding_tokenizer_gives_the_same_tokens(cached):
    encoders = load_encoders(
        open_base(script.parse_args(cached), "train_flow.py", record=record_family), torch.float32
    )
    tokenizers = encoders.tokenizers
    right = tokenize(tokenizers, CAPTIONS)
    tokenizers[0].padding_side = "left"
    left = tokenize(tokenizers, CAPTIONS)
    assert not torch.equal(left["prompt_mask"], right["prompt_mask"])
    sequence = lambda batch: [
        ids[mask].tolist()
        for ids, mask in zip(batch["input_ids"], batch["prompt_mask"], strict=True)
    ]
    assert sequence(left) == sequence(right)
    with torch.no_grad():
        found = encode_prompts(encoders, left)
    assert torch.equal(found["prompt_mask"], right["prompt_mask"])  # moved to the front
    assert (
        not found["prompt_embeds"][~found["prompt_mask"]].any()
        and found["prompt_embeds"].isfinite().all()
    )


def test_dry_run_reports_captions_emptied_by_cleaning_and_text_sizes(tmp_path, flags, capfd):
    make_captioned(tmp_path / "images", 6, ["一张照片", *CAPTIONS[1:]])
    make_cache(tmp_path, "--dry_run")
    said = capfd.readouterr().out
    assert "1 of 6 captions have no words after cleaning, such as '一张照片'" in said
    # Six captions have 2, 5, 3, 6, 3 and 5 tokens, or 8 each with padding. A token takes 4 bytes
    # as an id and 32 x 2 bytes as an embedding.
    assert (
        "captions take 96.0B as ids, 1.60kB as embeddings, 3.07kB as embeddings with padding"
        in said
    )
    assert not (tmp_path / "cache").exists()


# ------------------------------------------------------------------- the output of a run


def test_flow_pipeline_redraws_the_last_validation_samples(tmp_path, cached, num_processes=2):
    prompts = ["a digit one", "a digit two"]
    argv = [*cached, "--validation_prompts", *prompts, "--guidance_scale=3", "--holdout=2"]
    train.fork(*argv, num_processes=num_processes)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {
        "model_index.json",
        "transformer",
        "vae",
        "text_encoder",
        "tokenizer",
        "scheduler",
        "README.md",
    } <= names
    record = metrics(tmp_path / "out")[-1]
    assert {
        "held_out_loss",
        "held_out_loss_ema",
        "held_out_loss_t0.1",
        "held_out_loss_t0.9",
    } <= record.keys()
    card = (tmp_path / "out/README.md").read_text()
    pipeline = DiffusionPipeline.from_pretrained(tmp_path / "out")
    assert (
        isinstance(pipeline, PRXPipeline)
        and "use_resolution_binning=False" in card
        and "text-to-image" in card
    )
    path = max((tmp_path / "out/samples").iterdir())
    grid = np.array(Image.open(path).convert("RGB")).astype(int)
    for i in range(4):
        generator = torch.Generator().manual_seed(step_seed("sample", 0, i))
        options = {
            "generator": generator,
            "guidance_scale": 3,
            "num_inference_steps": 2,
            "height": 16,
            "width": 16,
        }
        image = pipeline(prompts[i // 2], use_resolution_binning=False, **options).images[0]
        image = np.array(image.resize((64, 64), Image.NEAREST)).astype(int)
        y, x = 68 * (i // 2), grid.shape[1] - 68 * (2 - i % 2)
        assert np.abs(grid[y : y + 64, x : x + 64] - image).max() <= 1


@pytest.mark.parametrize("text_cache", ["embeddings", "ids"])
def test_flow_cache_trains_like_its_images(tmp_path, images, flags, text_cache, monkeypatch):
    """Captions are padded to the longest of their batch."""
    monkeypatch.setattr(captions, "MULTIPLE", 2)
    make_cache(tmp_path, "--random_flip", "--center_crop", f"--text_cache={text_cache}")
    shared = ["--random_flip", "--num_train_epochs=2", "--caption_dropout=0.3"]
    train(*images, *shared, "--center_crop", f"--output_dir={tmp_path / 'images-out'}")
    train(
        *flags,
        *shared,
        f"--latents_dir={tmp_path / 'cache'}",
        f"--output_dir={tmp_path / 'cache-out'}",
    )
    one, other = read_losses(tmp_path / "images-out"), read_losses(tmp_path / "cache-out")
    assert len(one) == 12 and one == pytest.approx(other, rel=5e-4)


def test_flow_cache_with_buckets_and_masks_trains_like_its_images(tmp_path, flags):
    make_masked(tmp_path / "masked")
    data = [
        f"--train_data_dir={tmp_path / 'masked'}",
        "--resolution=16",
        "--bucket_step=4",
        "--center_crop",
    ]
    make_cache(tmp_path, *data, "--random_flip")
    flags = [*flags, "--random_flip", "--train_batch_size=2"]
    train(*flags, *data, "--dataloader_num_workers=0", f"--output_dir={tmp_path / 'images-out'}")
    train(*flags, f"--latents_dir={tmp_path / 'cache'}", f"--output_dir={tmp_path / 'cache-out'}")
    one, other = read_losses(tmp_path / "images-out"), read_losses(tmp_path / "cache-out")
    assert len(one) >= 6 and one == pytest.approx(other, rel=5e-4)


def test_predict_velocity_ignores_masked_tokens_and_padding_length(cached):
    """Neither the values nor the length of the padding matter, even without any token."""
    torch.manual_seed(0)
    model, latents, sigmas = PRXTransformer2DModel(**PRX), torch.randn(2, 4, 4, 4), torch.rand(2)
    for weight in model.parameters():  # new weights ignore the text
        torch.nn.init.normal_(weight, std=0.2)
    embeds, mask = torch.randn(2, 5, 32), torch.tensor([[1, 1, 1, 0, 0], [0] * 5]).bool()
    call = lambda embeds, mask: script.predict_velocity(
        load_family("prx"),
        {"transformer": model},
        latents,
        sigmas,
        {"prompt_embeds": embeds, "prompt_mask": mask},
    )
    with torch.no_grad():
        found = call(embeds, mask)
        other = torch.where(mask[..., None], embeds, torch.randn(2, 5, 32))
        assert torch.equal(call(other, mask), found) and found.isfinite().all()
        longer = F.pad(embeds, (0, 0, 0, 7)), F.pad(mask, (0, 7))
        assert torch.allclose(call(*longer), found, atol=1e-5)
        assert not torch.allclose(call(embeds, torch.ones_like(mask)), found, atol=1e-3)


def test_flow_training_from_a_remote_cache_is_bit_identical(tmp_path, cached, monkeypatch):
    """Also if rows are shuffled within ranges, which gives another order."""
    fsspec.filesystem("memory").put(f"{tmp_path / 'cache'}/", "/flow/", recursive=True)
    stored = [*cached, "--latents_dir=memory://flow", f"--shards_dir={tmp_path / 'shards'}"]
    for order in ("full", "ranges"):
        if order == "ranges":
            patch(monkeypatch, "MOST_PERMUTED", 0)
        train(*cached, f"--output_dir={tmp_path / order}")
        train(*stored, f"--output_dir={tmp_path / order}-stored")
        assert_same_weights(
            tmp_path / order / "transformer", tmp_path / f"{order}-stored" / "transformer"
        )
    assert read_losses(tmp_path / "full") != read_losses(tmp_path / "ranges")


def test_signal_interrupts_flow_sampling_after_the_checkpoint(tmp_path, cached):
    def send_and_step(*args, **options):
        signal.raise_signal(signal.SIGTERM)
        return script.FlowMatchEulerDiscreteScheduler.step_(*args, **options)

    kind = FlowMatchEulerDiscreteScheduler
    kind.step_, kind.step = kind.step, send_and_step
    try:
        with pytest.raises(SystemExit) as stop:
            train(
                *cached,
                "--validation_steps=2",
                "--validation_prompts",
                "a digit",
                "--num_inference_steps=50",
            )
    finally:
        kind.step = kind.step_
    assert stop.value.code == 143 and checkpoints(tmp_path / "out") == {"checkpoint-2"}
    assert not list((tmp_path / "out/samples").glob("*"))


# ------------------------------------------------------------------- the loss


class ExactVelocity(torch.nn.Module):
    """Predicts the exact velocity from one image to any noise."""

    def __init__(self, latents):
        super().__init__()
        self.latents, self.seen = latents, []

    def forward(self, noisy, sigmas, encoder_hidden_states, attention_mask):
        self.seen.append((noisy, sigmas))
        share = sigmas.view(-1, 1, 1, 1)
        noise = (noisy - (1 - share) * self.latents) / share
        return Output(noise - self.latents)


def loss_of(argv, model, latents, shift=1.0, weight=None, **inputs):
    args = script.parse_args(["--latents_dir=x", "--pretrained_model_name_or_path=y", *argv])
    condition = {
        "prompt_embeds": torch.zeros(len(latents), 1, 1),
        "prompt_mask": torch.ones(len(latents), 1).bool(),
    }
    weight = torch.full((len(latents),), 1 / len(latents)) if weight is None else weight
    objective = Namespace(predict=partial(script.predict_velocity, load_family("prx")))
    prepared = Prepared(latents, condition, inputs)
    models = {"transformer": model}
    return script.compute_loss(
        args, lambda height, width: shift, objective, models, prepared, weight
    )


class Output:
    def __init__(self, sample):
        self.sample = sample


def test_exact_velocity_has_loss_0_and_sigmas_follow_their_distribution():
    torch.manual_seed(0)
    latents = torch.randn(4000, 2, 2, 2)
    for argv, shift, quantiles in [
        ([], 1.0, lambda q: torch.sigmoid(torch.special.ndtri(q))),
        (
            ["--logit_mean=1", "--logit_std=0.5"],
            1.0,
            lambda q: torch.sigmoid(1 + 0.5 * torch.special.ndtri(q)),
        ),
        (["--weighting_scheme=uniform"], 3.0, lambda q: 3 * q / (1 + 2 * q)),
        (["--weighting_scheme=flux_shift"], 1.0, lambda q: torch.sigmoid(torch.special.ndtri(q))),
        # the density 2 / (pi - 2 pi x + 2 pi x^2), integrated
        (
            ["--weighting_scheme=cosmap"],
            1.0,
            lambda q: 0.5 + 0.5 * torch.tan(math.pi / 2 * (q - 0.5)),
        ),
        (["--weighting_scheme=mode", "--mode_scale=0"], 1.0, lambda q: q),
        (
            ["--weighting_scheme=mode", "--mode_scale=1.29"],
            1.0,
            lambda q: q - 1.29 * (torch.sin(math.pi / 2 * q).square() - q),
        ),
        # the range comes after the shift
        (
            ["--weighting_scheme=uniform", "--min_timestep=500", "--max_timestep=900"],
            3.0,
            lambda q: 0.5 + 0.4 * 3 * q / (1 + 2 * q),
        ),
    ]:
        model = ExactVelocity(latents)
        assert loss_of(argv, model, latents, shift).item() < 1e-4
        ((noisy, sigmas),) = model.seen
        q = torch.tensor([0.1, 0.3, 0.5, 0.7, 0.9])
        assert torch.allclose(sigmas.quantile(q), quantiles(q), atol=0.03), argv
        assert sigmas.dtype == torch.float32 and sigmas.unique().numel() > 3900  # continuous
        spread = (
            noisy.square().mean(dim=(1, 2, 3)) - (1 - sigmas).square() - sigmas.square()
        ).mean()
        assert abs(spread) < 0.05  # a mix of noise and image


def test_flow_held_out_loss_is_the_velocity_error_at_nine_noise_levels():
    torch.manual_seed(0)
    latents, noise, wrong = torch.randn(3, 9, 2, 2, 2).unbind()
    tenths = torch.arange(1, 10)
    condition = {"prompt_embeds": torch.zeros(9, 1, 1), "prompt_mask": torch.ones(9, 1).bool()}
    model = ExactVelocity(latents)
    measure = script.held_out_velocity_loss(partial(script.predict_velocity, load_family("prx")))
    noisy = measure.add_noise(latents, noise, tenths)
    share = (tenths / 10).view(-1, 1, 1, 1)
    assert torch.allclose(noisy, share * noise + (1 - share) * latents)
    error = measure.error({"transformer": model}, noisy, tenths, condition, latents, noise)
    assert error.shape == (9,) and error.max() < 1e-4
    model.latents = wrong  # the prediction is wrong by (latents - wrong) / share
    error = measure.error({"transformer": model}, noisy, tenths, condition, latents, noise)
    assert torch.allclose(error, (((latents - wrong) / share) ** 2).mean(dim=(1, 2, 3)))


def test_flow_loss_applies_weights_and_masks():

    class Zero(torch.nn.Module):
        def forward(self, noisy, sigmas, **given):
            return Output(torch.zeros_like(noisy))

    latents, weight = torch.randn(3, 2, 4, 4), torch.tensor([0.5, 0.0, 0.5])
    torch.manual_seed(1)
    plain = loss_of([], Zero(), latents, weight=weight)
    torch.manual_seed(1)
    noise = torch.randn(3, 2, 4, 4)
    each = (noise - latents).square().mean(dim=(1, 2, 3))
    assert torch.allclose(plain, (weight * each).sum())
    mask = torch.zeros(3, 1, 4, 4)
    mask[..., 0] = 1
    torch.manual_seed(1)
    masked = loss_of([], Zero(), latents, weight=weight, mask=mask)
    assert torch.allclose(
        masked, (weight * ((noise - latents).square() * mask).mean(dim=(1, 2, 3))).sum()
    )


def test_flow_train_step_stays_on_its_device(monkeypatch):
    """Tensors on the meta device can't be mixed with others."""
    monkeypatch.setattr(script, "seed_generators", lambda seed, device: None)  # it has none

    class Twice(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.factor = torch.nn.Parameter(torch.ones(1, device="meta"))

        def forward(self, noisy, sigmas, **given):
            return Output(self.factor * noisy * sigmas.view(-1, 1, 1, 1))

    model = Twice()
    accelerator = Namespace(
        device=torch.device("meta"),
        process_index=0,
        backward=torch.Tensor.backward,
        clip_grad_norm_=lambda parameters, limit: torch.zeros((), device="meta"),
    )
    latents, weight = torch.zeros(2, 4, 2, 2, device="meta"), torch.ones(2, device="meta")
    for scheme in ("logit_normal", "uniform"):
        loss = lambda models, prepared, weight: loss_of(
            [f"--weighting_scheme={scheme}"], models["transformer"], *prepared, weight=weight
        )
        batches = iter([{"weight": weight}])
        objective = Namespace(prepare=lambda batch: [latents], loss=loss, prior=None)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        sums = script.train_step(
            accelerator, objective, {"transformer": model}, optimizer, batches,
            script.NextStep(0, epoch=0, images=2, micro_batches=1), 0, 1.0,
        )  # fmt: skip
        assert sums.keys() == {"loss", "weight", "grad_norm"}
        assert all(value.is_meta for value in sums.values())


def test_flow_caption_dropout_uses_the_empty_prompt(tmp_path, cached, monkeypatch):
    data = open_data(cached)
    batch = data.dataset[[(0, row, 1.0) for row in range(6)]]
    torch.manual_seed(0)
    latents, condition, _ = script.prepare_batch(data, 1.0, batch)
    assert torch.equal(condition["prompt_mask"], data.empty_prompt["prompt_mask"].expand(6, 8))
    assert torch.equal(
        condition["prompt_embeds"], data.empty_prompt["prompt_embeds"].expand(6, 8, 32)
    )
    monkeypatch.setattr(captions, "MULTIPLE", 2)
    _, short, _ = script.prepare_batch(data, 1.0, data.dataset[[(0, 0, 1.0)]])
    assert short["prompt_embeds"].shape == (1, 6, 32)
    for name, empty in data.empty_prompt.items():
        assert torch.equal(short[name][0], empty[:6]) and not empty[6:].any()
    _, kept, _ = script.prepare_batch(data, 0.0, batch)
    assert torch.equal(kept["prompt_mask"], batch["prompt_mask"]) and latents.shape == (6, 4, 8, 8)


# ------------------------------------------------------------------- other models


def make_t5(folder):
    """A T5 with the demo's tokenizer, and a VAE with 16 channels and a shift, in two folders."""
    tokenizer = transformers.CLIPTokenizer.from_pretrained(MODELS, subfolder="tokenizer")
    options = {
        "vocab_size": len(tokenizer),
        "d_model": 24,
        "d_ff": 32,
        "d_kv": 8,
        "num_layers": 2,
        "num_heads": 2,
    }
    torch.manual_seed(0)
    transformers.T5ForConditionalGeneration(transformers.T5Config(**options)).save_pretrained(
        folder / "t5"
    )
    tokenizer.model_max_length = 10**30  # like T5's
    tokenizer.save_pretrained(folder / "t5")
    vae = AutoencoderKL(
        block_out_channels=(8, 8),
        down_block_types=("DownEncoderBlock2D",) * 2,
        norm_num_groups=4,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=16,
        scaling_factor=0.5,
        shift_factor=0.25,
    )
    vae.save_pretrained(folder / "vae16")
    return [
        f"--text_encoder_name_or_path={folder / 't5'}",
        f"--vae_name_or_path={folder / 'vae16'}",
    ]


def test_flow_trains_from_scratch_with_t5_and_a_vae_with_shift(tmp_path, flags):
    parts = [*make_t5(tmp_path), "--max_sequence_length=12"]
    make_prx(tmp_path / "config", in_channels=16, context_in_dim=24)
    flags = [flag for flag in flags if "pretrained" not in flag]
    argv = [
        f"--train_data_dir={tmp_path / 'images'}",
        "--resolution=16",
        "--dataloader_num_workers=0",
    ]
    precompute(
        *argv, *parts, "--model_family=prx", f"--output_dir={tmp_path / 'cache'}", "--center_crop"
    )
    cache = json.loads((tmp_path / "cache/cache.json").read_text())
    assert cache["text_encoder"]["class"] == "T5EncoderModel" and cache["prompt_embeds_shape"] == [
        12,
        24,
    ]
    train(*flags, *argv, *parts, "--center_crop", f"--output_dir={tmp_path / 'online'}")
    train(*flags, *parts, f"--latents_dir={tmp_path / 'cache'}", "--validation_prompts", "one")
    assert read_losses(tmp_path / "out") == pytest.approx(
        read_losses(tmp_path / "online"), rel=5e-4
    )
    pipeline = DiffusionPipeline.from_pretrained(tmp_path / "out")
    assert pipeline.tokenizer.model_max_length == 12 and pipeline.vae.config.shift_factor == 0.25
    image = pipeline(
        "one", height=16, width=16, use_resolution_binning=False, num_inference_steps=1
    ).images[0]
    assert image.size == (16, 16)

    # Training uses (latents - shift) * factor, which the pipeline undoes.
    data = open_data([*flags, *parts, f"--latents_dir={tmp_path / 'cache'}"])
    batch = data.dataset[[(0, 0, 1.0)]]
    batch["latents"][:, batch["latents"].shape[1] // 2 :] = 0  # no deviation
    latents, _, _ = script.prepare_batch(data, 0.0, batch)
    mean = batch["latents"].float().view(1, 32, 8, 8)[:, :16]
    assert torch.allclose(latents / 0.5 + 0.25, mean, atol=1e-6)


def test_autoencoder_dc_is_cached_as_samples_without_moments(tmp_path, flags):
    blocks = {
        "encoder_block_out_channels": (8, 8),
        "decoder_block_out_channels": (8, 8),
        "latent_channels": 4,
    }
    kinds = {
        "encoder_block_types": "ResBlock",
        "decoder_block_types": "ResBlock",
        "attention_head_dim": 4,
    }
    layers = {
        "encoder_layers_per_block": (1, 1),
        "decoder_layers_per_block": (1, 1),
        "scaling_factor": 0.4,
    }
    qkv = {"encoder_qkv_multiscales": ((), ()), "decoder_qkv_multiscales": ((), ())}
    torch.manual_seed(0)
    vae = AutoencoderDC(**blocks, **kinds, **layers, **qkv)
    vae.save_pretrained(tmp_path / "dc")
    make_cache(tmp_path, f"--vae_name_or_path={tmp_path / 'dc'}")
    cache = load_cache(tmp_path / "cache").settings
    assert cache["latents"] == "sample" and cache["latents_shape"] == [4, 8, 8]
    assert cache["vae"]["class"] == "AutoencoderDC" and cache["vae"]["scaling_factor"] == 0.4
    pixels = torch.randint(0, 256, (1, 3, 16, 16), dtype=torch.uint8)
    encoders = Encoders(load_family("prx"), vae, None, [])
    assert torch.equal(encode_images(encoders, pixels), vae.encode(pixels / 127.5 - 1).latent)
    train(*flags, f"--latents_dir={tmp_path / 'cache'}", f"--vae_name_or_path={tmp_path / 'dc'}")
    assert type(DiffusionPipeline.from_pretrained(tmp_path / "out").vae) is AutoencoderDC
    moments = [f"--vae_name_or_path={tmp_path / 'dc'}", "--latents=moments"]
    error = precompute.refused(*list_cache_flags(tmp_path, *moments, name="other"))
    assert "an AutoencoderDC has no moments" in error


def test_flow_init_from_continues_at_another_resolution(tmp_path, cached, flags, capfd):
    """Weights, averaged weights and the step count continue; optimizer and data start afresh.

    A checkpoint of the second phase takes precedence over --init_from.
    """
    train(*cached, "--holdout=2", "--checkpointing_steps=2")
    make_cache(tmp_path, "--resolution=32", name="large")
    flags = [flag for flag in flags if "transformer_config" not in flag]
    second = [
        *flags,
        f"--latents_dir={tmp_path / 'large'}",
        f"--init_from={tmp_path / 'out'}",
        "--holdout=2",
    ]
    second += [
        f"--output_dir={tmp_path / 'second'}",
        "--validation_prompts=a",
        "--checkpointing_steps=1",
        "--resume_from_checkpoint=latest",
    ]
    begun = []

    def record_start(accelerator, start, models, state, settings):
        load_start(accelerator, start, models, state, settings)
        begun.append(
            {
                name: {k: v.clone() for k, v in model.state_dict().items()}
                for name, model in models.items()
            }
        )
        begun.append(dict(state))

    with pytest.MonkeyPatch.context() as m:
        patch(m, "load_start", record_start)
        train(*second, "--max_train_steps=6")
        for name, model in begun[0].items():
            before = weights(tmp_path / f"out/checkpoint-4/{name}")
            assert all(torch.equal(before[key], value) for key, value in model.items())
        assert (begun[1]["global_step"], begun[1]["images_seen"]) == (4, 0)
        records = metrics(tmp_path / "second")
        assert [record["step"] for record in records if "loss" in record] == [5, 6]
        # the first record measures the initial weights
        first = records[0]
        assert first["step"] == 4 and first["held_out_loss"] != first["held_out_loss_ema"]
        samples = tmp_path / "second/samples"
        assert sorted(path.name[-5:] for path in samples.iterdir()) == ["4.png", "6.png"]
        page = (tmp_path / "second/report.html").read_text()
        assert page.index("<figcaption>step 4") < page.index("<figcaption>step 6")
        train(*second, "--max_train_steps=8")  # from its own checkpoint
        assert len(begun) == 2 and max(checkpoints(tmp_path / "second")) == "checkpoint-8"
    said = capfd.readouterr().out
    assert f"Starting from the weights of {tmp_path / 'out/checkpoint-4'}, at step 4" in said
    assert "the run: 2 steps after step 4, " in said  # 2 of 6 steps are left
    pipeline = DiffusionPipeline.from_pretrained(tmp_path / "second")
    assert pipeline.config.default_sample_size == 32

    other = [*second, f"--output_dir={tmp_path / 'third'}"]
    assert "held out other images than this run, so one run would be measured on" in train.refused(
        *other, "--holdout=0"
    )
    assert "is neither a complete checkpoint nor a run with one" in train.refused(
        *other, f"--init_from={tmp_path / 'images'}"
    )
    assert "must be above 4: this run counts from the step of" in train.refused(
        *other, "--max_train_steps=4"
    )


def test_muon_trains_block_matrices_and_adamw_the_rest(tmp_path, cached):
    args = script.parse_args([*cached, "--optimizer=muon", "--adam_weight_decay=0.1"])
    torch.manual_seed(1)
    model = PRXTransformer2DModel(**PRX)
    optimizer = make_optimizer({"transformer": model}, args)
    muon, adamw = [{id(weight) for weight in group["params"]} for group in optimizer.param_groups]
    for name, weight in model.named_parameters():
        assert id(weight) in (
            muon if name.startswith("blocks.") and weight.dim() == 2 else adamw
        ), name
    # torch's two optimizers take the same steps
    twin = PRXTransformer2DModel(**PRX)
    twin.load_state_dict(model.state_dict())
    named = list(twin.named_parameters())
    matrices = [
        weight for name, weight in named if name.startswith("blocks.") and weight.dim() == 2
    ]
    shared = {"lr": 1e-3, "weight_decay": 0.1}
    both = [
        torch.optim.Muon(matrices, **shared, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW([w for _, w in named if all(w is not m for m in matrices)], **shared),
    ]
    for _ in range(2):  # a third step would amplify rounding
        for network, steps in ((model, [optimizer]), (twin, both)):
            torch.manual_seed(0)
            given = torch.randn(2, 4, 4, 4), torch.rand(2), torch.randn(2, 3, 32)
            network(*given).sample.square().mean().backward()
            for one in steps:
                one.step()
                one.zero_grad()
    kept = [x for state in optimizer.state.values() for x in state.values() if x.dim()]
    said = count_memory({"transformer": model}, {}, [], 1, "muon")["moments"]
    assert said == sum(x.numel() * x.element_size() for x in kept)
    for (name, one), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        # A step is 1e-3, and Newton-Schulz runs in bfloat16
        assert torch.allclose(one, other, atol=2e-5), name


def test_flow_card_names_the_kind_of_training_and_loads_the_variant():
    def describe(*flags):
        base = ["--pretrained_model_name_or_path=x"]
        args = script.parse_args([*base, "--latents_dir=y", "--output_dir=z", *flags])
        about = name_run(1, args, local=True)
        return script.describe_model(load_family("prx"), about, replace(args, resolution=16))

    config = "--transformer_config_name_or_path=w"
    for flags, how in (([], "fine-tuned"), ([config], "trained from scratch")):
        assert f"of this PRX pipeline was {how} on `y`" in describe(*flags).what
    lora = describe("--rank=2")
    assert lora.what.startswith("A LoRA of rank 2 ") and "lora" in lora.tags
    assert "variant" not in lora.usage
    assert 'variant="fp16"' in describe("--rank=2", "--variant=fp16").usage


@pytest.mark.parametrize("kind", ["lora", pytest.param("lokr", marks=pytest.mark.long)])
def test_prx_card_loads_the_trained_lora(tmp_path, cached, monkeypatch, kind):
    """diffusers' PRXTransformer2DModel has no methods for adapters, so the card adds them."""
    assert not hasattr(PRXTransformer2DModel, "load_lora_adapter")  # else simplify it
    train(*cached, "--max_train_steps=2", "--learning_rate=1e-2")
    base = tmp_path / "out"
    flags = [f"--pretrained_model_name_or_path={base}", f"--latents_dir={tmp_path / 'cache'}"]
    flags += ["--rank=2", f"--lora_type={kind}", "--learning_rate=3e-2", "--max_train_steps=4"]
    train(*train.flags(tmp_path / "new", *flags))
    _, usage, *_ = (tmp_path / "new/README.md").read_text().split("```")
    start, end = usage.index("from diffusers.loaders"), usage.index("image = pipeline(")
    pipeline = DiffusionPipeline.from_pretrained(base)
    monkeypatch.chdir(tmp_path)
    exec(usage[start:end].replace('.to("cuda")', ""), {"pipeline": pipeline})
    path = tmp_path / "new/pytorch_lora_weights.safetensors"
    adapter = load_file(path)
    layers = {key.partition(f".{kind}_")[0] for key in adapter}
    before = PRXTransformer2DModel.from_pretrained(base / "transformer")
    ends = ("img_qkv_proj", "txt_kv_proj", "to_out.0", "gate_proj", "up_proj", "down_proj")
    assert layers == {f"transformer.{n}" for n, _ in before.named_modules() if n.endswith(ends)}
    trained = peft.PeftModel.from_pretrained(before, tmp_path / "new/checkpoint-4/transformer_ema")
    inputs = torch.randn(1, 4, 8, 8), torch.tensor([0.5]), torch.randn(1, 5, 32)
    with torch.no_grad(), trained.disable_adapter():
        plain = trained(*inputs).sample
    with torch.no_grad():
        expected, found = trained(*inputs).sample, pipeline.transformer(*inputs).sample
    change = (expected - plain).abs().max()
    assert change > 1e-3 and (found - expected).abs().max() < change / 100  # float16
    again = [f"--network_weights={path}", "--max_train_steps=1", "--learning_rate=0"]
    train(*train.flags(tmp_path / "again", *flags, *again))
    for key, value in load_file(tmp_path / "again" / path.name).items():
        assert torch.equal(value, adapter[key])


def test_compile_gets_the_transformer_and_the_number_of_shapes(tmp_path, cached, monkeypatch):
    """Captions of at most 8 tokens are padded to 3, 6 or 8."""
    monkeypatch.setattr(captions, "MULTIPLE", 3)
    compiled = []
    monkeypatch.setattr(script, "compile_model", lambda *given: compiled.append(given))
    train(*cached, "--max_train_steps=1", "--compile=eager")
    ((transformer, backend, num_shapes),) = compiled
    assert type(transformer) is PRXTransformer2DModel and (backend, num_shapes) == ("eager", 3)
    assert [record["skipped_images"] for record in metrics(tmp_path / "out")] == [0]


def test_flow_samples_are_drawn_one_at_a_time(monkeypatch):
    """In a batch, the longest caption would change the others' samples."""
    families = [family for family in map(load_family, FACTS) if family.script == "train_flow.py"]
    counts = []
    monkeypatch.setattr(script, "draw_prompts", lambda *given: counts.append(given[4]))
    for family in families:
        data, settings = Namespace(family=family), Namespace(train_batch_size=4)
        script.log_validation(None, None, data, [], 0, None, None, settings)
    assert counts == [1] * len(families)


def test_train_flow_turns_tokenizers_parallelism_off(monkeypatch):
    monkeypatch.delenv("TOKENIZERS_PARALLELISM")
    runpy.run_path(script.__file__)
    assert os.environ["TOKENIZERS_PARALLELISM"] == "false"


# ------------------------------------------------------------------- errors


def test_flow_rank_needs_a_pretrained_transformer():
    argv = ["--latents_dir=x", "--pretrained_model_name_or_path=x", "--rank=2"]
    argv += ["--transformer_config_name_or_path=x"]
    assert (
        "--rank needs a pretrained transformer: leave --transformer_config_name_or_path out"
        in train.refused(*argv, status=2)
    )


def test_mismatched_flow_models_or_caches_give_a_one_sentence_error(tmp_path, cached, flags):
    make_prx(tmp_path / "wide", context_in_dim=48)
    config = f"--transformer_config_name_or_path={tmp_path / 'wide'}"
    assert "takes 4 channels and embeddings of 48, but the data has 4 and 32" in train.refused(
        *cached, config
    )
    make_prx(tmp_path / "coarse", patch_size=3)
    config = f"--transformer_config_name_or_path={tmp_path / 'coarse'}"
    assert "needs sides that are multiples of 6 pixels, not 16" in train.refused(*cached, config)
    config = f"--transformer_config_name_or_path={ROOT / 'configs/unet_32.json'}"
    assert "holds no PRXTransformer2DModel" in train.refused(*cached, config)
    make_cache(tmp_path, "--model_family=sd", name="clip")
    error = train.refused(*flags, f"--latents_dir={tmp_path / 'clip'}")
    assert "does not fit these models" in error and "model_family" in error
    wrong = ["--model_family=sd", "--max_sequence_length=4"]
    error = precompute.refused(*list_cache_flags(tmp_path, *wrong, name="other"))
    assert "--max_sequence_length 4 does nothing for Stable Diffusion: leave it out" in error
    error = train.refused(*cached, "--max_sequence_length=9")
    assert "--max_sequence_length 9 is too large: the text encoder takes 8 tokens" in error
    base = make_z_image(tmp_path / "z")
    wrong = [f"--pretrained_model_name_or_path={base}", "--model_family=prx"]
    error = train.refused(*cached, *wrong)
    assert f"--model_family prx does not fit {base}, a ZImagePipeline: leave it out" in error
    assert not (tmp_path / "out").exists()


# ------------------------------------------------------------------- launching, and the demo


@pytest.mark.long
def test_accelerate_launch_trains_flow_on_one_and_two_processes(tmp_path, cached):
    argv = [*cached, "--mixed_precision=bf16", "--max_train_steps=2"]
    two = ["--multi_gpu", "--num_processes=2", "--main_process_port=0"]
    for count, options in ((1, []), (2, two)):
        run = launch(
            *options,
            "train_flow.py",
            *argv,
            f"--output_dir={tmp_path / str(count)}",
            env={"ACCELERATE_USE_CPU": "true"},
        )
        assert run.returncode == 0, run.stderr
        assert run.stdout.count(f"Processes: {count} on cpu") == 1
        assert math.isfinite(read_losses(tmp_path / str(count))[-1])


def judge(pipeline, guidance_scale, count, prompt="a handwritten digit {}"):
    """Share of samples, `count` of each digit, in which a classifier sees the prompt's digit."""
    torch.manual_seed(0)
    classifier = evaluate_samples.train_classifier(*evaluate_samples.load_digits())
    pipeline.set_progress_bar_config(disable=True)
    right = 0
    names = "zero one two three four five six seven eight nine".split()
    for digit, name in enumerate(sorted(names)):  # the order of the classifier's labels
        for seed in range(count):
            options = {
                "guidance_scale": guidance_scale,
                "height": 8,
                "width": 8,
                "use_resolution_binning": False,
            }
            generator = torch.Generator().manual_seed(seed)
            image = pipeline(
                prompt.format(name), generator=generator, output_type="pt", **options
            ).images
            right += int(classifier(image.mean(dim=1, keepdim=True)).argmax() == digit)
    return right / (10 * count)


@pytest.mark.long
def test_flow_demo_draws_the_digits_of_its_prompts(tmp_path):
    """The whole demo, some minutes."""
    cache = f"--output_dir={tmp_path / 'latents'}"
    run = launch("precompute_latents.py", "--model_family=prx", cache)
    assert run.returncode == 0, run.stderr
    argv = [
        *shlex.split(script.DEMO),
        f"--latents_dir={tmp_path / 'latents'}",
        f"--output_dir={tmp_path / 'out'}",
    ]
    run = launch("train_flow.py", *argv)
    assert run.returncode == 0, run.stderr
    pipeline = DiffusionPipeline.from_pretrained(tmp_path / "out")
    shares = {scale: judge(pipeline, scale, 10) for scale in (1, 3)}
    assert min(shares.values()) >= 0.95, shares
