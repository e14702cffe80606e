"""--validation_metrics: right figures, the same on any number of processes, and no other bits."""

import importlib.util
import os
import signal
import sys
import warnings
from functools import partialmethod
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import transformers
from conftest import (
    MODELS,
    SIZES,
    SMALL,
    Script,
    list_sd_flags,
    make_captioned,
    make_clip,
    make_dino,
    make_images,
    make_moments,
    make_prx,
    make_unet_config,
    metrics,
    needs,
    patch,
)
from safetensors.torch import load_file, save_file
from test_flow_families import MAKE, describe_data
from test_flow_families import make_images as make_masked
from transformers import CLIPModel, CLIPProcessor

from diffusion_training.data import captions
from diffusion_training.training.keeping.best import read_best
from diffusion_training.training.scores.distances import average, cosines, measure_fid, measure_kid
from diffusion_training.training.scores.metric_flags import METRICS
from diffusion_training.training.scores.metrics import Metrics, choose_trained, to_pixels
from diffusion_training.training.scores.networks import load_network
from diffusion_training.training.showing.report import advise_step

pytestmark = pytest.mark.usefixtures("without_figures")
train, precompute = Script("train_text_to_image"), Script("precompute_latents")
unconditional, flow = Script("train_unconditional"), Script("train_flow")


@pytest.fixture(scope="module")
def inputs(sd_inputs):
    """`sd_inputs` with networks."""
    folder = sd_inputs(12)
    make_clip(folder / "clip")
    make_dino(folder / "dino")
    make_moments(folder / "moments.pt")
    return folder


@pytest.fixture
def flags(tmp_path, inputs):
    """A LoRA of 4 steps, with a checkpoint at every second one; later flags override these."""
    return list_sd_flags(
        inputs,
        tmp_path / "out",
        *"--rank=2 --train_batch_size=2 --learning_rate=1e-2 --max_train_steps=4".split(),
        "--checkpointing_steps=2",
        f"--metric_clip_model={inputs / 'clip'}",
        f"--metric_image_model={inputs / 'dino'}",
        "--guidance_scale=2",
    )


MEASURE = ["--num_metric_images=5", "--validation_metrics", "clip-t", "clip-i", "dino-i", "copy"]


def measured(folder):
    return [record for record in metrics(folder) if "metric_images" in record]


def test_figures_are_the_same_on_two_processes_and_of_the_images_drawn(
    tmp_path, flags, inputs, monkeypatch
):
    flags = [*flags, *MEASURE, "kid", "--holdout=4", "--learning_rate=0", "--max_train_steps=1"]
    flags += ["--no-validate_first", "--checkpointing_steps=1"]
    drawn = {}
    draw = train.module.draw_captions

    def keep(*given):
        drawn[given[-1][0]] = (given[-1], draw(*given))
        return drawn[given[-1][0]][1]

    with monkeypatch.context() as patched:
        patched.setattr(train.module, "draw_captions", keep)
        train(*flags)
    two = tmp_path / "two"
    train.fork(*flags, f"--output_dir={two}", num_processes=2)
    (one,), (other,) = measured(tmp_path / "out"), measured(two)
    figures = [name for name in one if not name.endswith(("_seconds", "_gb"))]
    assert {
        f"{name}{end}" for name in METRICS if name != "fid" for end in ("", "_low", "_high")
    } <= (set(figures))
    for name in figures:
        assert one[name] == pytest.approx(other[name], abs=1e-6), name
    assert (one["metric_images"], one["real_images"], one["guidance_scale"]) == (5, 4, 2)
    assert all(
        one[f"{name}_low"] <= one[name] <= one[f"{name}_high"] for name in ("copy", "clip-t")
    )
    # once more, by the models themselves
    ((rows, images),) = drawn.values()
    captions = [f"a digit {'zero one two'.split()[row % 3]}" for row in rows]
    model = CLIPModel.from_pretrained(inputs / "clip").eval()
    processor = CLIPProcessor.from_pretrained(inputs / "clip")
    pixels = [(images[number] * 255).round().astype(np.uint8) for number in range(5)]
    given = processor(text=captions, images=pixels, return_tensors="pt", padding=True)
    with torch.no_grad():
        output = model(**given)
    likeness = (output.image_embeds * output.text_embeds).sum(dim=1)
    assert one["clip-t"] == pytest.approx(likeness.mean().item(), abs=1e-5)


@pytest.mark.parametrize("source", ["cache", pytest.param("images", marks=pytest.mark.long)])
def test_training_has_the_same_bits_with_and_without_metrics(tmp_path, flags, inputs, source):
    if source == "images":
        flags = [flag for flag in flags if not flag.startswith("--latents_dir")]
        flags += [f"--train_data_dir={inputs / 'images'}", "--dataloader_num_workers=0"]
        flags += ["--resolution=16", f"--cache_dir={inputs / 'datasets'}"]
    file = "pytorch_lora_weights.safetensors"
    for name, more in (("without", []), ("with", MEASURE)):
        train(*flags, *more, f"--output_dir={tmp_path / name}")
    one, other = ((tmp_path / name / file).read_bytes() for name in ("without", "with"))
    assert one == other
    assert [record["step"] for record in measured(tmp_path / "with")] == [0, 2, 4]
    page = (tmp_path / "with/report.html").read_text()
    assert "<h2>Quality of the samples</h2>" in page and "Take step" in page
    assert "5 samples against 12 real images" in page
    last = measured(tmp_path / "with")[-1]
    assert f"| copy | {last['copy']:.4g} |" in (tmp_path / "with/README.md").read_text()
    assert "Quality of the samples" not in (tmp_path / "without/report.html").read_text()


@pytest.mark.long
def test_run_killed_while_it_measures_resumes_with_the_same_figures(tmp_path, flags, monkeypatch):
    flags = [*flags, *MEASURE, "--no-validate_first", "--resume_from_checkpoint=latest"]
    train(*flags, f"--output_dir={tmp_path / 'whole'}")
    compare = Metrics.compare

    def die(self, *given, killed_at=0):
        if (tmp_path / "out/checkpoint-4").exists() == (killed_at == 4):
            os._exit(9)
        return compare(self, *given)

    for killed_at in (2, 4):  # after the checkpoint of this step
        with monkeypatch.context() as patched:
            patched.setattr(Metrics, "compare", partialmethod(die, killed_at=killed_at))
            patch(patched, "make_checkpoint_copy", lambda *args: None)  # they are written at once
            train.fork(*flags, status=9)
    train(*flags)
    whole, rest = (measured(tmp_path / name) for name in ("whole", "out"))
    assert [record["step"] for record in rest] == [2, 4]
    for one, other in zip(whole, rest, strict=True):
        names = [name for name in one if not name.endswith(("_seconds", "_gb"))]
        assert {name: one[name] for name in names} == {name: other[name] for name in names}


@pytest.mark.long
def test_real_features_are_computed_once(tmp_path, flags, monkeypatch):
    flags = [*flags, *MEASURE, "--max_train_steps=2", "--resume_from_checkpoint=latest"]
    train(*flags)
    assert (tmp_path / "out/metrics.safetensors").exists()
    calls = []
    embed_rows = Metrics.embed_rows
    monkeypatch.setattr(
        Metrics, "embed_rows", lambda self, *given: calls.append(1) or embed_rows(self, *given)
    )
    train(*flags, "--max_train_steps=4")
    assert not calls
    train(*flags, "--max_train_steps=6", "--validation_metrics", "clip-i")  # other networks
    assert len(calls) == 1


@pytest.mark.long
def test_best_metric_keeps_the_weights_of_its_step(tmp_path, flags, inputs, monkeypatch):
    values = {0: 0.9, 1: 0.3, 2: 0.5, 3: 0.4, 4: 0.45, 5: 0.46}  # step 0 is not trained

    def measure(self, step, draw, read, stop_signal):
        names = ("dino-i", "dino-i_low", "dino-i_high")
        record = {"step": step, "metric_images": 2, "real_images": 2}
        return record | dict.fromkeys(names, values[step])

    monkeypatch.setattr(Metrics, "score", measure)
    more = ["--validation_metrics=dino-i", "--save_best_metric=dino-i", "--metric_steps=1"]
    train(*flags, *more, "--checkpointing_steps=1")
    out = tmp_path / "out"
    best = {"step": 2, "metric": "dino-i", "value": 0.5}
    assert best.items() <= read_best(out / "best").items()
    file = "pytorch_lora_weights.safetensors"
    assert (out / "best" / file).read_bytes() == (out / "checkpoint-2" / file).read_bytes()
    assert (
        "best/ holds step 2, which has the best dino-i: 0.5." in (out / "report.html").read_text()
    )
    # values of another network can't be compared
    more += [
        f"--metric_image_model={inputs / 'moments.pt'}",
        "--resume_from_checkpoint=latest",
        "--max_train_steps=5",
    ]
    train(*flags, *more, "--checkpointing_steps=1")
    assert read_best(out / "best")["step"] == 5


def test_unconditional_samples_are_measured_with_a_torchscript_network(
    tmp_path, inputs, monkeypatch
):
    # bytes in use, and bytes that torch has reserved
    patch(monkeypatch, "measure_memory", lambda device: (3 * 10**9, 5 * 10**9))
    make_images(tmp_path / "images", 12)
    flags = unconditional.flags(
        tmp_path / "out",
        f"--train_data_dir={tmp_path / 'images'}",
        f"--model_config_name_or_path={make_unet_config(tmp_path)}",
        "--train_batch_size=4",
        "--max_train_steps=2",
        "--holdout=6",
        f"--metric_image_model={inputs / 'moments.pt'}",
        "--num_metric_images=7",
        "--eval_batch_size=4",
    )
    unconditional(*flags, "--validation_metrics", "kid", "fid", "dino-i", "copy")
    (record,) = measured(tmp_path / "out")
    assert record["fid"] > 0 and record["step"] == 2 and record["real_images"] == 6
    assert -1 <= record["copy"] <= 1 and record["kid_low"] < record["kid"] < record["kid_high"]
    assert record["metric_memory_gb"] == 3 and record["sampling_seconds"] > 0


@pytest.mark.parametrize("name, kind", [
    ("qwen-image", "embeddings"),
    pytest.param("qwen-image", "images", marks=pytest.mark.long),
    *(pytest.param(name, kind, marks=pytest.mark.long)
      for name in ("z-image", "flux2-klein") for kind in ("images", "embeddings")),
])  # fmt: skip
def test_every_family_is_measured_with_several_sizes_and_captions(tmp_path, inputs, name, kind):
    MAKE[name](tmp_path / "base")
    make_masked(tmp_path / "images")
    data = describe_data(tmp_path)
    if kind != "images":
        precompute(*data, f"--output_dir={tmp_path / 'cache'}")
        data = [data[0], f"--latents_dir={tmp_path / 'cache'}"]
    flags = flow.flags(tmp_path / "out", *data, "--rank=2", "--train_batch_size=2")
    flags += [f"--metric_image_model={inputs / 'dino'}", f"--metric_clip_model={inputs / 'clip'}"]
    flow(*flags, "--max_train_steps=1", "--holdout=3", *MEASURE, "kid")
    before, after = measured(tmp_path / "out")
    assert (before["step"], after["step"]) == (0, 1)
    assert before["copy_real"] == after["copy_real"] < 1
    assert all(-1 <= after[metric] <= 1 for metric in MEASURE[-4:])


def test_captions_of_other_lengths_than_the_empty_one_are_drawn(tmp_path, inputs, monkeypatch):
    """Batches are padded to their longest caption, the empty prompt to the most tokens."""
    monkeypatch.setattr(captions, "MULTIPLE", 2)
    make_captioned(tmp_path / "images", 4)
    make_prx(tmp_path / "config")
    flow(
        f"--train_data_dir={tmp_path / 'images'}", f"--pretrained_model_name_or_path={MODELS}",
        f"--transformer_config_name_or_path={tmp_path / 'config'}", "--resolution=16",
        "--holdout=2", "--max_train_steps=1", "--guidance_scale=3", "--num_inference_steps=1",
        f"--metric_image_model={inputs / 'dino'}", "--validation_metrics=kid",
        "--num_metric_images=2", f"--output_dir={tmp_path / 'out'}",
    )  # fmt: skip
    assert [record["step"] for record in measured(tmp_path / "out")] == [1]


@pytest.mark.long
def test_a_signal_while_real_images_are_read_ends_the_run_without_figures(
    tmp_path, flags, monkeypatch
):
    flags = [*flags, *MEASURE, "--no-validate_first", "--resume_from_checkpoint=latest"]
    embed = Metrics.embed_rows

    def embed_rows(self, rows, *given):
        os.kill(os.getpid(), signal.SIGTERM)
        assert embed(self, rows, *given) == []
        return []

    with monkeypatch.context() as patched:
        patched.setattr(Metrics, "embed_rows", embed_rows)
        with pytest.raises(SystemExit) as stop:
            train(*flags)
    assert stop.value.code == 143 and not measured(tmp_path / "out")
    assert not (tmp_path / "out/metrics.safetensors").exists()
    train(*flags)
    assert [record["step"] for record in measured(tmp_path / "out")] == [2, 4]


@pytest.mark.parametrize(
    "argv, sentence",
    [
        (["kid"], "--validation_metrics kid needs images that are not trained on"),
        (["fid", "--holdout=3"], "--validation_metrics fid is defined by one network: add"),
        (["copy", "--save_best_metric=kid"], "--save_best_metric kid must be one of"),
        (["copy", "--save_best_metric=copy", "--save_best", "--holdout=2"], "both write best/"),
        (["nothing"], "invalid choice: 'nothing'"),
    ],
)
def test_metrics_that_are_not_possible_end_in_one_line(tmp_path, flags, argv, sentence):
    error = train.refused(*flags, "--validation_metrics", *argv, status=2)
    assert sentence in error.splitlines()[-1]


def test_metrics_need_held_out_images_without_a_lora(tmp_path, flags):
    flags = [flag for flag in flags if flag != "--rank=2"]
    error = train.refused(*flags, "--validation_metrics=copy", status=2)
    assert "copy needs images that are not trained on" in error
    error = train.refused(*flags[:-1], "--metric_steps=3", status=2)
    assert "--metric_steps does nothing without --validation_metrics" in error


@pytest.mark.parametrize(
    "argv, sentence",
    [
        (
            ["dino-i", "--metric_image_model=nowhere/dino"],
            "--metric_image_model nowhere/dino can't",
        ),
        (["clip-t", "--metric_clip_model={dino}"], "has no text encoder: choose a CLIP model"),
        (["clip-t", "--metric_clip_model={sd}"], "can't be used"),
    ],
)
def test_networks_that_cant_be_loaded_end_the_run_before_step_1(
    tmp_path, flags, inputs, argv, sentence
):
    argv = [flag.format(dino=inputs / "dino", sd=inputs / "sd/unet") for flag in argv]
    assert sentence in train.refused(*flags, "--validation_metrics", *argv)
    assert not (tmp_path / "out/metrics.jsonl").exists()


# ------------------------------------------------------------------- networks and distances


def test_a_network_without_some_weights_is_refused(tmp_path):
    path = make_dino(tmp_path / "dino") / "model.safetensors"
    weights = load_file(path)
    del weights["layernorm.weight"]
    save_file(weights, path, {"format": "pt"})
    with pytest.raises(ValueError, match="1 missing keys, such as layernorm.weight"):
        load_network(str(tmp_path / "dino"))


@pytest.mark.parametrize("function, shape", [
    (lambda images: images.float(), "[2, 3, 64, 64]"),
    (lambda images: images.float().mean(dim=(2, 3)) / 0, "[2, 3]"),
])  # fmt: skip
def test_a_network_without_features_is_refused(tmp_path, function, shape):
    path = tmp_path / "network.pt"
    with warnings.catch_warnings(action="ignore"):  # TorchScript is deprecated
        torch.jit.trace(function, torch.ones(2, 3, 64, 64, dtype=torch.uint8)).save(str(path))
    with pytest.raises(ValueError) as error:
        load_network(str(path))
    assert f"of shape {shape}, not of [2, width] with finite numbers" in str(error.value)


def test_networks_give_the_features_of_their_models(tmp_path, inputs):
    images = torch.randint(256, (3, 3, 20, 24), dtype=torch.uint8)
    clip = load_network(str(inputs / "clip"))
    model = CLIPModel.from_pretrained(inputs / "clip").eval()
    processor = CLIPProcessor.from_pretrained(inputs / "clip")
    given = processor(
        text=["a", "a digit one"], images=list(images), return_tensors="pt", padding=True
    )
    with torch.no_grad():
        output = model(**given)
        assert cosines(clip.embed_images(images), output.image_embeds).diagonal().min() > 1 - 1e-6
        assert cosines(
            clip.embed_texts(["a", "a digit one"]), output.text_embeds
        ).diagonal().min() > (1 - 1e-6)
        dino = load_network(str(inputs / "dino"))
        model = transformers.Dinov2Model.from_pretrained(inputs / "dino").eval()
        pixels = transformers.BitImageProcessor.from_pretrained(inputs / "dino")(
            images=list(images), return_tensors="pt"
        )
        assert torch.equal(dino.embed_images(images), model(**pixels).last_hidden_state[:, 0])
    assert dino.embed_texts is None


def test_inception_is_that_of_torchmetrics_fid(monkeypatch):
    """Of its sizes of features, only 2048 gives FID. Its weights are not downloaded here."""

    def make(name, features_list):
        assert (name, features_list) == ("inception-v3-compat", ["2048"])
        return lambda images: torch.ones(len(images), 2048)

    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    fid = SimpleNamespace(NoTrainInceptionV3=make)
    monkeypatch.setitem(sys.modules, "torchmetrics.image.fid", fid)
    network = load_network("inception")
    assert network.name == "inception" and network.embed_texts is None
    assert network.embed_images(torch.zeros(3, 3, 8, 8)).shape == (3, 2048)


def test_networks_without_pooler_or_class_token_can_be_used(tmp_path):
    """DINO is published without its pooler. Convolutional networks have maps of features."""
    config = transformers.ViTConfig(**SMALL, image_size=16, patch_size=8)
    transformers.ViTModel(config, add_pooling_layer=False).save_pretrained(tmp_path / "vit")
    config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1])
    transformers.ResNetModel(config).save_pretrained(tmp_path / "resnet")
    images = torch.randint(256, (2, 3, 20, 24), dtype=torch.uint8)
    for name in ("vit", "resnet"):
        transformers.BitImageProcessor(**SIZES).save_pretrained(tmp_path / name)
        with torch.no_grad():
            assert load_network(str(tmp_path / name)).embed_images(images).shape == (2, 16)


@needs("torchmetrics")
def test_kid_equals_torchmetrics():
    from torchmetrics.image.kid import KernelInceptionDistance

    generator = torch.Generator().manual_seed(0)
    real, fake = (torch.randn(count, 8, generator=generator) for count in (40, 40))
    fake += 0.3
    with warnings.catch_warnings(action="ignore"):
        metric = KernelInceptionDistance(torch.nn.Identity(), subsets=1, subset_size=40)
    metric.update(real, real=True)
    metric.update(fake, real=False)
    value, interval = measure_kid(real, fake, 50)
    assert value == pytest.approx(metric.compute()[0].item(), rel=1e-4)
    assert interval[0] < value < interval[1]
    assert measure_kid(real, fake) == (value, None)


def test_figures_of_equal_sets():
    features = torch.randn(30, 6, generator=torch.Generator().manual_seed(0))
    assert measure_fid(features, features)[0] == pytest.approx(0, abs=1e-6)
    assert measure_kid(features[::2], features[1::2])[0] == pytest.approx(0, abs=1)
    assert cosines(features, features).diagonal().min() == pytest.approx(1)
    assert average(torch.ones(5), 10) == (1.0, [1.0, 1.0])


def test_fewer_samples_of_a_lora_are_measured(monkeypatch):
    network = SimpleNamespace(embed_texts=print, name="clip")
    monkeypatch.setattr(Metrics, "load", lambda self, flag: network)
    unset = {"metric_steps": None, "checkpointing_steps": 5, "num_metric_images": None}
    for flags, count in (({"rank": 4}, 64), ({}, 512), ({"rank": 4, "num_metric_images": 9}, 9)):
        args = SimpleNamespace(**{"validation_metrics": ["clip-t"]} | unset | flags)
        metrics = Metrics(None, None, np.arange(3), {1: 1, 2: 0}, args)
        assert (metrics.count, metrics.every, metrics.real) == (count, 5, [2, 1])


def test_samples_become_colour_images_of_bytes():
    ramp = np.linspace(0, 1, 6).reshape(2, 3, 1)
    grey = to_pixels(ramp)
    assert grey.dtype == torch.uint8 and grey.shape == (3, 2, 3)
    assert grey[2].tolist() == [[0, 51, 102], [153, 204, 255]]
    colours = to_pixels(np.concatenate([ramp, ramp * 0, ramp / 2], axis=2))
    assert torch.equal(colours[0], grey[0]) and colours[1:, 0, 2].tolist() == [0, 51]
    for count in (2, 4):
        with pytest.raises(SystemExit, match=f"grey or colour images, not {count} channels"):
            to_pixels(np.zeros((2, 2, count)))


def compare(fake, trained):
    """The record of `copy` for features of samples and of training images."""
    measuring = SimpleNamespace(
        names=["copy"], real=[], trained=[5, 3, 8], networks={}, compare_with_prompts=None
    )
    rows = torch.tensor([3, 5, 8])
    return Metrics.compare(measuring, [], {"rows": rows, "image": trained}, {"image": fake})


def test_copy_rises_when_samples_repeat_training_images():
    generator = torch.Generator().manual_seed(0)
    trained = torch.randn(3, 16, generator=generator)
    other = compare(torch.randn(4, 16, generator=generator), trained)
    same = compare(trained[[0, 0, 2, 1]] * 3, trained)
    assert same["copy"] == pytest.approx(1)
    assert other["copy"] < 0.8 and other["copy_real"] == same["copy_real"] < 0.8


def test_trained_images_are_chosen_by_name():
    names = np.array([f"{i}.png" for i in range(5000)])
    rows = np.arange(0, 5000, 2)
    chosen = choose_trained(SimpleNamespace(names=lambda: names), rows, 0)
    assert len(chosen) == 2000 and set(chosen) <= set(rows.tolist())
    order = np.random.default_rng(0).permutation(5000)
    moved = choose_trained(
        SimpleNamespace(names=lambda: names[order]), np.flatnonzero(order % 2 == 0), 0
    )
    assert set(names[chosen]) == set(names[order][moved])
    assert choose_trained(None, np.array([4, 7]), 0) == [4, 7]


def test_the_report_advises_the_best_step_that_does_not_copy():
    def record(step, prompt, subject, copied):
        return {"step": step, "clip-t": prompt, "dino-i": subject, "copy": copied, "copy_real": 0.8}

    before = record(0, 0.9, 0.9, 0.1)
    run = [before, record(1, 0.3, 0.2, 0.5), record(2, 0.28, 0.5, 0.7), record(3, 0.2, 0.6, 0.9)]
    assert advise_step(run) == (
        "Take step 2: it is best in clip-t and dino-i together, among the steps that do not repeat "
        "the training images."
    )
    assert "train for fewer steps" in advise_step([before, run[3], record(4, 1, 1, 0.85)])
    assert advise_step(run[:2]) == ""


def test_kid_needs_two_held_out_images(flags, inputs):
    """The spread of one image is not a number, and a division by 0."""
    more = ["--validation_metrics", "kid", f"--metric_image_model={inputs / 'moments.pt'}"]
    error = train.refused(*flags, *more, "--holdout=1")
    assert "needs two that can be decoded, not 1: raise --holdout" in error
