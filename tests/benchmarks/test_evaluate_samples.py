"""benchmarks/evaluate_samples.py: its metrics are right and tell good samples from bad ones.

The real images are those that were held out.
"""

import functools
import importlib.util
import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash
from accelerate import Accelerator
from conftest import (
    MODELS,
    ROOT,
    Script,
    finish,
    make_captioned,
    make_clip,
    make_images,
    make_models,
    make_moments,
    make_unet_config,
    patch,
    reset,
    start,
)
from diffusers import StableDiffusionPipeline
from transformers import CLIPModel, CLIPProcessor

sys.path.insert(0, str(ROOT / "benchmarks"))

import evaluate_samples

from diffusion_training.latents.reader import CachedLatents, load_cache
from diffusion_training.training.held_out import hold_out
from diffusion_training.training.scores.distances import average, measure_fid, measure_kid

train_unconditional = Script("train_unconditional")
train_text_to_image = Script("train_text_to_image")
precompute = Script("precompute_latents")


@pytest.fixture
def extractor(tmp_path):
    return f"--feature_extractor={make_moments(tmp_path / 'moments.pt')}"


def evaluate(tmp_path, *argv):
    reset()
    evaluate_samples.main([*map(str, argv), f"--output={tmp_path / 'report.json'}"])
    return json.loads((tmp_path / "report.json").read_text())


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run on 12 images, 5 of them held out, which leaves the weights unchanged."""
    folder = tmp_path_factory.mktemp("trained")
    make_images(folder / "images", 12)
    flags = train_unconditional.flags(
        folder / "out",
        f"--train_data_dir={folder / 'images'}",
        f"--model_config_name_or_path={make_unet_config(folder)}",
        f"--cache_dir={folder / 'cache'}",
        *"--train_batch_size=4 --max_train_steps=1 --learning_rate=0".split(),
        *"--ddpm_num_inference_steps=1 --holdout=5 --random_flip".split(),
    )
    train_unconditional(*flags)
    return folder


@pytest.fixture
def pipeline(tmp_path, trained):
    """A copy of `trained`, with its images at the path in run.args."""
    for name in ("images", "out"):
        shutil.copytree(trained / name, tmp_path / name)
    return tmp_path / "out"


@pytest.fixture
def seen(monkeypatch):
    """The rows that were read as real images."""
    rows, dataset = [], train_unconditional.module.ImageDataset
    load = dataset.load
    monkeypatch.setattr(
        dataset,
        "load",
        lambda self, epoch, row, item: rows.append((epoch, row)) or load(self, epoch, row, item),
    )
    return rows


@pytest.mark.parametrize("count, features", [(300, 8), (20, 32)])  # more images, and fewer
def test_fid_equals_torchmetrics(count, features):
    from torchmetrics.image.fid import FrechetInceptionDistance

    generator = torch.Generator().manual_seed(0)
    mix = torch.randn(features, features, generator=generator)
    real, fake = (torch.randn(count + n, features, generator=generator) @ mix for n in (0, 7))
    same = torch.nn.Identity()  # `update` gets features, not images
    same.num_features = features
    metric = FrechetInceptionDistance(same)
    metric.update(real, real=True)
    metric.update(fake + 1, real=False)
    slow = metric.compute().item()
    fast, _ = measure_fid(real, fake + 1)
    assert fast == pytest.approx(slow, rel=1e-3) and slow > 1
    assert measure_fid(real, real + 2)[0] == pytest.approx(4 * features, rel=1e-3)
    assert measure_fid(real, real)[0] == pytest.approx(0, abs=1e-2 * slow)


def test_confidence_intervals_cover_95_percent():
    """95 % of the intervals contain the true value: the mean, or 0 for KID between two halves."""
    generator = torch.Generator().manual_seed(0)
    held = 0
    for _ in range(200):
        values = torch.randn(50, generator=generator) + 3
        mean, (low, high) = average(values, 100)
        held += low < 3 < high
        assert low < mean < high
    assert 175 <= held <= 199
    halves = torch.randn(2, 60, 4, generator=generator)
    _, (low, high) = measure_kid(*halves, 50)
    assert low < 0 < high
    _, (low, high) = measure_kid(halves[0], halves[1] + 1, 50)
    assert 0 < low < high
    assert average(values, 0) == (values.mean().item(), None)


@pytest.fixture(scope="module", autouse=True)
def classifier():
    """Trained once, and for a third of the steps: right on 99 % of the digits."""
    with pytest.MonkeyPatch.context() as context:
        train, trained = functools.partial(evaluate_samples.train_classifier, steps=300), []
        once = lambda *data: trained[0] if trained else trained.append(train(*data)) or trained[0]
        context.setattr(evaluate_samples, "train_classifier", once)
        yield


@pytest.mark.long
def test_a_trained_demo_scores_better_than_an_untrained_one(tmp_path, monkeypatch, seen, capsys):
    """The demo for 200 steps of half the images, with a U-Net of half the width."""
    monkeypatch.chdir(ROOT)
    for name in ("log_held_out_loss", "make_report"):  # they take longer than this short training
        patch(monkeypatch, name, lambda *_: None)
    config = json.loads(Path("demo/digits_unet.json").read_text()) | {
        "block_out_channels": [16, 32]
    }
    (tmp_path / "unet.json").write_text(json.dumps(config))
    reports = {}
    for name, flags in (
        ("trained", ["--max_train_steps=200"]),
        ("not", ["--max_train_steps=1", "--learning_rate=0"]),
    ):
        train_unconditional(
            *flags,
            f"--output_dir={tmp_path / name}",
            *"--lr_warmup_steps=20 --holdout=100 --report_to=none".split(),
            *"--save_images_epochs=1000 --eval_batch_size=1 --train_batch_size=32".split(),
            f"--model_config_name_or_path={tmp_path / 'unet.json'}",
        )
        seen.clear()
        reports[name] = evaluate(
            tmp_path,
            tmp_path / name,
            *"--feature_extractor=digits --num_samples=100 --num_inference_steps=20".split(),
            "--resamples=30",
        )
    hashes = {row: xxhash.xxh3_64_intdigest(f"0 row {row}".encode()) for row in range(1797)}
    assert {row for _, row in seen} == set(sorted(hashes, key=hashes.get)[:100]) and reports["not"][
        "held_out"
    ]
    assert reports["not"]["real"] == reports["not"]["samples"] == 100
    for metric in ("FID", "KID"):
        trained, untrained = (reports[name]["metrics"][metric] for name in ("trained", "not"))
        assert (
            trained["value"] < 0.5 * untrained["value"]
            and trained["interval"][1] < untrained["interval"][0]
        )
        assert trained["interval"][0] < trained["value"] < trained["interval"][1]
        assert trained["halves_of_real"] < 0.5 * untrained["value"]
    assert f"| FID | {reports['not']['metrics']['FID']['value']:.4g} | " in capsys.readouterr().out


@pytest.mark.long
def test_fid_and_kid_of_real_images_are_near_zero():
    images, _ = evaluate_samples.load_digits()
    extract = evaluate_samples.load_extractor("digits", "cpu")
    with torch.no_grad():
        real = extract((images * 255).byte().expand(-1, 3, -1, -1))
        noise = extract(torch.randint(256, (900, 3, 8, 8), dtype=torch.uint8))
    assert real.shape == (1797, 128)
    for measure in (measure_fid, measure_kid):
        far, near = measure(real, noise)[0], measure(real[::2], real[1::2])[0]
        assert abs(near) < 0.02 * far
    assert measure_fid(real, real)[0] == pytest.approx(0, abs=1e-3 * measure_fid(real, noise)[0])


def test_evaluation_does_not_depend_on_batch_size_and_processes(
    tmp_path, pipeline, extractor, seen, capsys
):
    flags = [pipeline, extractor, "--num_samples=7", "--num_inference_steps=2", "--resamples=20"]
    one = evaluate(tmp_path, *flags)
    assert (
        len(seen) == 5
        and {epoch for epoch, _ in seen} == {None}
        and one["real"] == 5
        and one["held_out"]
    )
    assert "7 samples, 5 real images, held out from training" in capsys.readouterr().out
    other = evaluate(tmp_path, *flags, "--batch_size=2")
    argv = [*map(str, flags), f"--output={tmp_path / 'two.json'}"]
    reset()
    job = start(lambda: evaluate_samples.main(argv), 2, tmp_path / "log")
    assert finish(job) == [0, 0], (tmp_path / "log").read_text()
    two = json.loads((tmp_path / "two.json").read_text())
    for report in (other, two):
        for metric, found in report["metrics"].items():
            assert found["value"] == pytest.approx(
                one["metrics"][metric]["value"], rel=1e-5, abs=1e-6
            )
            assert found["interval"] == pytest.approx(
                one["metrics"][metric]["interval"], rel=1e-4, abs=1e-5
            )
    another = evaluate(tmp_path, *flags, "--seed=1")
    assert another["metrics"]["FID"]["value"] != pytest.approx(
        one["metrics"]["FID"]["value"], rel=1e-3
    )


def test_a_pipeline_without_run_args_is_compared_with_a_folder(
    tmp_path, pipeline, extractor, seen, capsys
):
    (pipeline / "run.args").unlink()
    flags = [pipeline, extractor, "--num_samples=4", "--num_inference_steps=1", "--resamples=0"]
    with pytest.raises(SystemExit):
        evaluate(tmp_path, *flags)
    assert "does not name its images: give --real" in capsys.readouterr().err
    (tmp_path / "images/3.png").write_bytes(b"no image")
    report = evaluate(tmp_path, *flags, f"--real={tmp_path / 'images'}")
    assert (
        report["real"] == 11
        and not report["held_out"]
        and {row for _, row in seen} == set(range(12))
    )
    assert report["metrics"]["FID"]["interval"] is None and report["metrics"]["FID"]["value"] > 0
    assert "11 real images, not held out from training" in capsys.readouterr().out


@pytest.mark.long
def test_text_to_image_is_evaluated_with_held_out_captions(
    tmp_path, extractor, seen, monkeypatch, capsys
):
    captions = [f"a digit {'zero one two'.split()[i % 3]} {i}" for i in range(12)]
    make_captioned(tmp_path / "images", 12, captions)
    models = make_models(tmp_path)
    flags = [f"--train_data_dir={tmp_path / 'images'}", f"--pretrained_model_name_or_path={MODELS}"]
    precompute(*precompute.flags(tmp_path / "cache", *flags, "--rows_per_shard=5"))
    train_text_to_image(
        f"--pretrained_model_name_or_path={models}",
        f"--latents_dir={tmp_path / 'cache'}",
        f"--output_dir={tmp_path / 'out'}",
        *"--max_train_steps=1 --learning_rate=0 --report_to=none --holdout=4".split(),
        "--guidance_scale=2",
    )
    drawn, draw = [], StableDiffusionPipeline.__call__

    def spy(self, **options):
        drawn.append((options, draw(self, **options)))
        return drawn[-1][1]

    monkeypatch.setattr(StableDiffusionPipeline, "__call__", spy)
    flags = [
        tmp_path / "out",
        extractor,
        "--num_samples=6",
        "--num_inference_steps=2",
        "--resamples=10",
    ]
    with pytest.raises(SystemExit):
        evaluate(tmp_path, *flags)
    assert "does not name its images: give --real" in capsys.readouterr().err
    flags += [
        f"--real={tmp_path / 'images'}",
        f"--clip={make_clip(tmp_path / 'clip')}",
        "--batch_size=6",
    ]
    report = evaluate(tmp_path, *flags)
    state = json.loads((tmp_path / "out/checkpoint-1/trainer_state.json").read_text())
    assert (
        state["settings"]["num_images"] == 8
        and report["real"] == 4 == len(seen)
        and report["held_out"]
    )
    args = train_text_to_image.module.parse_args([f"@{tmp_path / 'out/run.args'}"])
    data = CachedLatents({"cache": load_cache(tmp_path / "cache")}, args.seed, args.random_flip)
    _, held_out = hold_out(Accelerator(cpu=True), data, args.holdout, args.seed)
    of_cache = {list(data.names())[row] for row in held_out}  # as the trainer chose them
    ((options, result),) = drawn
    assert {f"{prompt.split()[-1]}.png" for prompt in options["prompt"]} == of_cache and len(
        of_cache
    ) == 4
    assert options["guidance_scale"] == 2 and result.images.shape == (6, 16, 16, 3)
    model, processor = (
        CLIPModel.from_pretrained(tmp_path / "clip"),
        CLIPProcessor.from_pretrained(tmp_path / "clip"),
    )
    cosines = []
    for image, prompt in zip(result.images, options["prompt"], strict=True):  # one by one
        image = (image * 255).round().astype(np.uint8)
        inputs = processor(text=[prompt], images=[image], return_tensors="pt")
        with torch.no_grad():
            embeds = model(**inputs)
        cosines.append(
            torch.nn.functional.cosine_similarity(embeds.text_embeds, embeds.image_embeds).item()
        )
    found = report["metrics"]["CLIP score"]
    assert found["value"] == pytest.approx(100 * np.mean(cosines), abs=1e-3)
    assert found["interval"][0] <= found["value"] <= found["interval"][1]


@pytest.mark.parametrize(
    "argv, sentence",
    [
        ([], "`pip install torch-fidelity` first"),
        (
            ["--feature_extractor=digits", "--clip=clip"],
            "--clip compares samples with their prompts: this pipeline has none",
        ),
        (["--num_samples=1"], "1 is not between 2 and"),
    ],
)
def test_evaluations_that_are_not_possible_end_in_one_line(
    tmp_path, pipeline, argv, sentence, capsys, monkeypatch
):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if "fidelity" in name else find_spec(name)
    )
    with pytest.raises(SystemExit) as stop:
        evaluate(tmp_path, pipeline, *argv)
    assert stop.value.code == 2 and sentence in capsys.readouterr().err.splitlines()[-1]
    assert not Path(tmp_path / "report.json").exists()


def test_a_missing_torchmetrics_is_named(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        evaluate(tmp_path, "anywhere", "--feature_extractor=inception")
    assert "`pip install torchmetrics` first" in capsys.readouterr().err


def test_a_feature_extractor_that_cant_be_loaded_is_named(tmp_path, pipeline):
    with pytest.raises(SystemExit, match="--feature_extractor nowhere.pt can't be loaded"):
        evaluate(tmp_path, pipeline, "--feature_extractor=nowhere.pt")
