"""Pipelines without a family of their own: a cache, training, a LoRA, kills, samples."""

import copy
import inspect
import json

import diffusers
import numpy as np
import pytest
import tiny_pipelines
import torch
from conftest import (
    Script,
    assert_same_weights,
    checkpoints,
    finish,
    make_captioned,
    make_moments,
    metrics,
    start,
)
from diffusers import DiffusionPipeline
from safetensors.torch import load_file

from diffusion_training.families.recorded import family as recorded
from diffusion_training.families.recorded.family import Recorded
from diffusion_training.families.recorded.pipeline_run import SWITCHED_OFF
from diffusion_training.latents.reader import load_cache
from diffusion_training.latents.settings import fingerprint_cache

# ERNIE-Image's pipeline gives its scheduler a tensor, of which NumPy warns
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
precompute, train = Script("precompute_latents"), Script("train_flow")
CAPTIONS = ["a digit zero", "a handwritten digit one", "digit", "one", "a digit two", ""]
SIDES = tiny_pipelines.SIDES
NEW = "flux"  # tried in CI
LORA = "pytorch_lora_weights.safetensors"


def make(folder, name):
    """(flags of the base, flags of the images) of a tiny pipeline."""
    tiny_pipelines.MAKE[name](folder / "base")
    make_captioned(folder / "images", 6, CAPTIONS)
    data = [f"--train_data_dir={folder / 'images'}", f"--resolution={SIDES.get(name, 16)}"]
    base = f"--pretrained_model_name_or_path={folder / 'base'}"
    return [base], [*data, "--center_crop", "--dataloader_num_workers=0"]


def list_flags(name, folder, *more):
    return [
        "--train_batch_size=2",
        "--caption_dropout=0.3",
        "--num_validation_images=1",
        "--num_inference_steps=2",
        "--report_to=none",
        f"--latents_dir={folder / 'cache'}",
        *more,
    ]


@pytest.fixture
def made(request, tmp_path):
    name = request.param
    base, data = make(tmp_path, name)
    precompute(*base, *data, "--batch_size=4", f"--output_dir={tmp_path / 'cache'}")
    return name, base, data, tmp_path


each = pytest.mark.parametrize(
    "made",
    [n if n == NEW else pytest.param(n, marks=pytest.mark.long) for n in tiny_pipelines.MAKE],
    indirect=True,
)
new = pytest.mark.parametrize("made", [NEW], indirect=True)


@new
@pytest.mark.long
@pytest.mark.usefixtures("without_figures")
def test_metrics_decode_the_latents_of_a_cache(made, monkeypatch):
    """The trainer has encoded no image, so it does not know yet how the pipeline packs latents."""
    name, base, _, folder = made
    monkeypatch.setattr(recorded, "CALLS", [])
    measure = ["--holdout=2", "--validation_metrics=kid", "--num_metric_images=2"]
    measure += [f"--metric_image_model={make_moments(folder / 'moments.pt')}"]
    flags = list_flags(name, folder, "--max_train_steps=1", f"--output_dir={folder / 'out'}")
    train(*base, *flags, *measure)
    assert any("kid" in record for record in metrics(folder / "out"))


@pytest.mark.long
@each
@pytest.mark.usefixtures("without_figures")
def test_a_killed_run_on_two_processes_resumes_to_the_same_bits_and_draws(made):
    name, base, _, folder = made
    settings = load_cache(folder / "cache").settings
    assert settings["model_family"].endswith("Pipeline") and "recorded text" in settings["features"]
    flags = [*base, *list_flags(name, folder, "--max_train_steps=3", "--checkpointing_steps=1")]
    flags += ["--validation_prompts", "a digit two", "--guidance_scale=3"]
    train.fork(*flags, f"--output_dir={folder / 'whole'}", num_processes=2)
    flags += ["--resume_from_checkpoint=latest"]
    train.kill_after_checkpoint(folder / "killed", *flags, num_processes=2)
    said = train.fork(*flags, f"--output_dir={folder / 'killed'}", num_processes=2)
    assert "called with" in said
    assert checkpoints(folder / "whole") >= {"checkpoint-3"}
    assert_same_weights(folder / "whole/transformer", folder / "killed/transformer")
    assert [r["loss"] for r in metrics(folder / "whole") if "loss" in r][-1] < 20
    assert list((folder / "whole/samples").glob("*.png"))
    drawn = DiffusionPipeline.from_pretrained(folder / "killed")
    assert type(drawn).__name__ == settings["model_family"]
    card = (folder / "whole/README.md").read_text()
    assert "guidance" in card or "guider" in (folder / "base/model_index.json").read_text()


@each
@pytest.mark.usefixtures("without_figures")
def test_a_lora_is_read_by_the_pipeline_and_changes_its_images(made, monkeypatch):
    name, base, _, folder = made
    flags = [*base, *list_flags(name, folder), f"--output_dir={folder / 'lora'}", "--rank=2"]
    flags += ["--learning_rate=0.1", "--max_train_steps=3", "--lora_layers=all"]
    flags.append("--use_dora" if name == NEW else "--no-use_ema")
    train(*flags, "--gradient_checkpointing")
    pipeline = DiffusionPipeline.from_pretrained(folder / "base")
    pipeline.set_progress_bar_config(disable=True)
    side = SIDES.get(name, 16)
    options = {"height": side, "width": side, "num_inference_steps": 2, "output_type": "latent"}
    known = inspect.signature(type(pipeline).__call__).parameters
    options |= {key: value for key, value in SWITCHED_OFF.items() if key in known}
    card = (folder / "lora/README.md").read_text()
    if 'negative_prompt=""' in card:  # without it, EasyAnimate's has an error
        options["negative_prompt"] = ""

    def draw():
        drawn = pipeline(prompt="one", generator=torch.Generator().manual_seed(0), **options)
        return drawn.images if hasattr(drawn, "images") else drawn.frames

    before = draw()
    if hasattr(pipeline, "load_lora_weights"):
        pipeline.load_lora_weights(folder / "lora", weight_name=LORA)
    else:  # as its model card does
        monkeypatch.chdir(folder)
        code = card.partition(".to(device)\n")[2].partition("image = ")[0]
        exec(code, {"pipeline": pipeline})
    assert np.abs(np.asarray(draw() - before)).max() > 1e-4
    layers = dict(pipeline.transformer.named_modules())
    adapted = {name for name, layer in layers.items() if hasattr(layer, "base_layer")}
    saved = {key.split(".lora_")[0] for key in load_file(folder / "lora" / LORA)}
    assert saved == {f"transformer.{name}" for name in adapted}


# two text encoders, three, and embeddings of as many tokens as a caption has
@pytest.mark.parametrize("made", [NEW, "sd3", "ernie_image"], indirect=True)
@pytest.mark.long
@pytest.mark.usefixtures("without_figures")
def test_a_lokr_of_a_recorded_pipeline_trains_and_is_read_back(made, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "half", torch.Tensor.float)  # no rounding
    name, base, _, folder = made
    flags = [*base, *list_flags(name, folder), "--rank=2", "--lora_layers=all", "--lora_type=lokr"]
    train(*flags, f"--output_dir={folder / 'lokr'}", "--learning_rate=0.1", "--max_train_steps=3")
    again = [f"--network_weights={folder / 'lokr'}", f"--output_dir={folder / 'again'}"]
    train(*flags, *again, "--learning_rate=0", "--max_train_steps=1")
    one, other = (load_file(folder / kind / LORA) for kind in ("lokr", "again"))
    assert one.keys() == other.keys() and any(value.any() for value in one.values())
    for key, value in one.items():
        torch.testing.assert_close(value, other[key])
    model = DiffusionPipeline.from_pretrained(folder / "base").transformer
    model.load_lora_adapter(folder / "lokr", weight_name=LORA)
    adapted = {name for name, layer in model.named_modules() if hasattr(layer, "base_layer")}
    assert {key.rpartition(".")[0] for key in one} == {f"transformer.{name}" for name in adapted}


@new
@pytest.mark.usefixtures("without_figures")
def test_changed_settings_of_a_recorded_pipeline_end_in_a_sentence(made):
    """The fingerprint fits, as after a program that changes cache.json on purpose."""
    name, base, _, folder = made
    flags = [*base, *list_flags(name, folder, "--max_train_steps=1")]
    flags += ["--validation_prompts=one", f"--output_dir={folder / 'out'}"]
    path = folder / "cache/cache.json"
    written = path.read_text()
    for change, sentence in {
        lambda found: found["structure"][0].pop("dtype"): "cache.json is damaged: make the cache",
        lambda found: found.pop("own"): "cache.json is damaged: make the cache again ('own')",
        lambda found: found["guided"]["results"].pop(): "is not guided as its cache says: make the",
    }.items():
        cache = json.loads(written)
        change(cache["recorded"])
        path.write_text(json.dumps(cache))
        state = {"_fingerprint": fingerprint_cache(cache)}
        (folder / "cache/state.json").write_text(json.dumps(state))
        assert sentence in train.refused(*flags)


@pytest.mark.parametrize("made", [NEW, "sd3"], indirect=True)  # two text encoders, and three
@pytest.mark.long
def test_a_recorded_cache_trains_like_its_images(made):
    """Also as bytes of captions, which each step encodes."""
    name, base, data, folder = made
    ids = ["--text_cache=ids", f"--output_dir={folder / 'ids'}"]
    precompute(*base, *data, *ids)
    losses = {}
    flags = list_flags(name, folder, "--max_train_steps=3", "--logging_steps=1")
    without = [flag for flag in flags if not flag.startswith("--latents_dir")]
    for kind, source in {
        "cache": flags,
        "ids": [*without, f"--latents_dir={folder / 'ids'}"],
        "images": [*without, *data],
    }.items():
        train(*base, *source, "--holdout=2", f"--output_dir={folder}/out-{kind}")
        losses[kind] = [r["loss"] for r in metrics(f"{folder}/out-{kind}") if "loss" in r]
    assert len(losses["cache"]) == 3
    assert losses["cache"] == pytest.approx(losses["images"], rel=2e-3)
    assert losses["ids"] == pytest.approx(losses["images"], rel=2e-3)


@new
@pytest.mark.long
@pytest.mark.usefixtures("without_figures")
@pytest.mark.parametrize("flag", ["--shard", "--base_precision=nf4"])
def test_recorded_pipelines_train_sharded_and_in_4_bits(made, flag):
    name, base, _, folder = made
    more = []
    if "nf4" in flag:
        pytest.importorskip("bitsandbytes")
        more = ["--rank=2"]
    flags = [*base, *list_flags(name, folder, "--max_train_steps=2"), flag, *more]
    train.fork(*flags, f"--output_dir={folder / 'out'}", num_processes=1 if more else 2)
    assert metrics(folder / "out")[-1]["step"] == 2


# fixed embeddings with a pooled one, three text encoders, and a mask of ragged embeddings
@pytest.mark.parametrize("made", [NEW, "sd3", "krea2"], indirect=True)
@pytest.mark.long
@pytest.mark.usefixtures("without_figures")
def test_recorded_pipelines_train_compiled_and_in_bf16(made):
    name, base, data, folder = made
    flags = [*base, *list_flags(name, folder, "--max_train_steps=3", "--logging_steps=1")]
    images = [*data, "--mixed_precision=bf16"]
    losses = {}
    for kind, more in {
        "plain": [],
        "images": images,
        "compiled": ["--compile=aot_eager"],
        "bf16": ["--mixed_precision=bf16", "--validation_prompts", "one"],
        "both": ["--mixed_precision=bf16", "--compile=aot_eager", "--gradient_checkpointing"],
        "lora": ["--mixed_precision=bf16", "--compile=aot_eager", "--rank=2"],
    }.items():
        cache = [] if kind != "images" else [f"--latents_dir={folder / 'cache'}"]
        own = [flag for flag in flags if flag not in cache]
        train(*own, *more, f"--output_dir={folder}/out-{kind}")
        losses[kind] = [r["loss"] for r in metrics(f"{folder}/out-{kind}") if "loss" in r]
        assert len(losses[kind]) == 3
        rel = 1e-4 if kind == "compiled" else 0.05
        assert losses[kind] == pytest.approx(losses["plain"], rel=rel), kind


@new
def test_gradients_are_averaged_over_processes(made):
    """The denoiser is called through DDP. With the bare model, nothing would be averaged."""
    _, base, _, folder = made
    settings = load_cache(folder / "cache").settings
    index = DiffusionPipeline.load_config(folder / "base")
    model = diffusers.FluxTransformer2DModel.from_pretrained(folder / "base/transformer")
    vae = diffusers.AutoencoderKL.load_config(folder / "base/vae")
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler.load_config(folder / "base/scheduler")
    configs = {"vae": vae, "scheduler": scheduler, "transformer": dict(model.config)}
    family = Recorded(index, configs).restore_findings(settings)
    noise = torch.randn(2, 4, 8, 8)
    prompts = {part["column"]: torch.randn(2, *part["shape"]) for part in family.findings["parts"]}
    prompts["prompt_2"] = torch.zeros(2, *prompts["prompt_2"].shape[1:])

    def differentiate(model, rows):
        some = {name: value[rows] for name, value in prompts.items()}
        times = torch.tensor([0.7, 0.3])[rows]
        family.predict(model, noise[rows], times, some).square().mean().backward()
        return [w.grad for w in model.parameters() if w.grad is not None]

    alone = differentiate(copy.deepcopy(model), [0, 1])

    def work():
        torch.distributed.init_process_group("gloo")
        rank = torch.distributed.get_rank()
        wrapped = torch.nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
        torch.save(differentiate(wrapped, [rank]), folder / f"{rank}.pt")
        torch.distributed.destroy_process_group()

    assert finish(start(work, 2)) == [0, 0]
    one, other = (torch.load(folder / f"{rank}.pt") for rank in range(2))
    assert len(one) == len(alone) > 20
    assert all(map(torch.equal, one, other))
    for averaged, whole in zip(one, alone, strict=True):
        torch.testing.assert_close(averaged, whole, rtol=1e-3, atol=1e-6)


def test_embedded_guidance_is_refused_where_no_transformer_takes_it(tmp_path):
    base, data = make(tmp_path, "flux")
    flags = [*base, *data, "--embedded_guidance_scale=3.5", f"--output_dir={tmp_path / 'out'}"]
    error = train.refused(*flags)
    assert "--embedded_guidance_scale 3.5 does nothing for Flux: leave it out" in error


@pytest.mark.parametrize("rank", [[], ["--rank=2"]])
def test_a_pipeline_that_can_not_be_recorded_is_refused_by_name(tmp_path, rank):
    (tmp_path / "model_index.json").write_text('{"_class_name": "KandinskyPipeline"}')
    argv = [f"--pretrained_model_name_or_path={tmp_path}", "--latents_dir=x"]
    said = train.refused(*argv, *rank, f"--output_dir={tmp_path}-out")
    assert "is a KandinskyPipeline, which these scripts can't train" in said


@pytest.mark.parametrize("file", ["model_index.json", "modular_model_index.json"])
def test_text_to_image_names_the_script_for_other_pipelines(tmp_path, file):
    """By the class alone: it imports nothing of recorded pipelines."""
    (tmp_path / file).write_text('{"_class_name": "Flux2KleinPipeline", "vae": [1, 2, {}]}')
    if file == "model_index.json":
        (tmp_path / file).write_text('{"_class_name": "Flux2KleinPipeline"}')
    argv = [f"--pretrained_model_name_or_path={tmp_path}", "--latents_dir=x"]
    said = Script("train_text_to_image").refused(*argv, f"--output_dir={tmp_path}-out")
    sentence = "is a Flux2KleinPipeline, which can't be trained here: try train_flow.py"
    assert f"{tmp_path} {sentence}" in said


@pytest.mark.parametrize(
    "pipeline, model, scheduler",
    [
        ("PixArtAlpha", "PixArtTransformer2DModel", "DPMSolverMultistepScheduler"),
        ("PixArtSigma", "PixArtTransformer2DModel", "DPMSolverMultistepScheduler"),
        ("HunyuanDiT", "HunyuanDiT2DModel", "DDPMScheduler"),
        ("CogView3Plus", "CogView3PlusTransformer2DModel", "CogVideoXDDIMScheduler"),
        ("SanaSprint", "SanaTransformer2DModel", "SCMScheduler"),
    ],
)
def test_a_transformer_without_flow_matching_is_refused_by_its_scheduler(
    tmp_path, pipeline, model, scheduler
):
    index = {"_class_name": f"{pipeline}Pipeline", "_diffusers_version": "0.42.1"}
    for part, kind in (("vae", "AutoencoderKL"), ("transformer", model), ("scheduler", scheduler)):
        index[part] = ["diffusers", kind]
        folder = tmp_path / part
        folder.mkdir()
        name = "scheduler_config.json" if part == "scheduler" else "config.json"
        (folder / name).write_text(json.dumps({"_class_name": kind}))
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    base = f"--pretrained_model_name_or_path={tmp_path}"
    for script, more in ((precompute, f"--train_data_dir={tmp_path}"), (train, "--latents_dir=x")):
        said = script.refused(base, more, f"--output_dir={tmp_path}-out")
        assert f"{pipeline}Pipeline can't be trained here: it has a {scheduler}" in said
