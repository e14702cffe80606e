"""The flow-matching families with published models: cached, fully trained, and as a LoRA.

tests/package/test_families.py compares each family with its pipeline.
"""

import copy
import json
import math
import re

import numpy as np
import peft
import pytest
import torch
from conftest import (
    MODELS,
    PRX,
    Script,
    checkpoints,
    make_klein,
    make_masked,
    make_qwen_image,
    make_z_image,
    metrics,
    read_losses,
)
from diffusers import (
    AutoencoderKLFlux2,
    DiffusionPipeline,
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
)
from diffusers.pipelines.flux2.pipeline_flux2_klein import compute_empirical_mu
from diffusers.pipelines.qwenimage.pipeline_qwenimage import calculate_shift
from other_programs import apply_lokr_as_comfy
from PIL import Image
from safetensors.torch import load_file

import train_flow as script
from diffusion_training.draws import step_seed
from diffusion_training.families.base import Base
from diffusion_training.families.known import load_family
from diffusion_training.families.recorded.family import Recorded
from diffusion_training.latents.columns import list_columns
from diffusion_training.latents.reader import load_cache
from diffusion_training.training.step.flow_schedule import choose_shift, choose_training_shift

MAKE = {"z-image": make_z_image, "flux2-klein": make_klein, "qwen-image": make_qwen_image}
CLASSES = {"z-image": "ZImagePipeline", "flux2-klein": "Flux2KleinPipeline"}
CLASSES |= {"qwen-image": "QwenImagePipeline"}
LIMITS = {"flux2-klein": ["--max_sequence_length=64"]}  # to which it pads captions
precompute = Script("precompute_latents")
train = Script("train_flow")
each_family = pytest.mark.parametrize("name", MAKE)
# klein takes longest, and tests/package/test_families.py compares it with its pipeline
one_family = pytest.mark.parametrize(
    "name", [n if n == "z-image" else pytest.param(n, marks=pytest.mark.long) for n in MAKE]
)


@pytest.fixture(scope="module")
def roots(tmp_path_factory):
    """make(name) -> a folder with a base, images of several sizes, masks, and two caches."""
    made = {}

    def make(name):
        if name not in made:
            folder = made[name] = tmp_path_factory.mktemp("root") / name
            MAKE[name](folder / "base")
            make_images(folder / "images")
            for kind in ("embeddings", "ids"):
                cache = [f"--output_dir={folder / kind}", f"--text_cache={kind}"]
                options = ["--random_flip", "--rows_per_shard=4", "--batch_size=3"]
                precompute(*describe_data(folder), *cache, *options)
        return made[name]

    return make


@pytest.fixture
def root(roots, name):
    return roots(name)


def make_images(folder):
    """The images of `make_masked` with two captions each, some of them missing."""
    make_masked(folder)
    lines = []
    for i, path in enumerate(sorted(folder.glob("[0-9][0-9].png"))):
        captions = {
            "short": [None, "one", "two"][i % 3],
            "long": f"a digit {'zero one'.split()[i % 2]}",
        }
        lines.append(json.dumps({"file_name": path.name, **captions}))
    for path in folder.glob("*.txt"):
        path.unlink()
    (folder / "metadata.jsonl").write_text("\n".join(lines))


def describe_data(folder):
    return [
        f"--pretrained_model_name_or_path={folder / 'base'}",
        f"--train_data_dir={folder / 'images'}",
        *["--caption_column", "short", "long", "--caption_weights", "1", "2"],
        *["--resolution=16", "--bucket_step=4", "--center_crop", "--dataloader_num_workers=0"],
        *LIMITS.get(folder.name, []),
    ]


@pytest.fixture
def flags(root, name, tmp_path):
    """A short run; later flags override these."""
    return train.flags(
        tmp_path / "out",
        f"--pretrained_model_name_or_path={root / 'base'}",
        *LIMITS.get(name, []),
        "--train_batch_size=2",
        "--num_validation_images=1",
        "--caption_dropout=0.3",
        "--random_flip",
    )


@pytest.fixture
def cached(root, flags):
    return [*flags, f"--latents_dir={root / 'embeddings'}"]


# ------------------------------------------------------------------- caches


@each_family
def test_flow_family_caches_record_their_features(root, name):
    embeddings = load_cache(root / "embeddings").settings
    ids = load_cache(root / "ids").settings
    # the transformer of klein gets the embeddings of padding too, and no mask
    padding = {"embeddings": name != "flux2-klein", "ids": True}
    for kind, settings in (("embeddings", embeddings), ("ids", ids)):
        assert settings["model_family"] == CLASSES[name]
        features = settings["features"]
        assert {"ragged latents", "masks", "captions"} <= set(features)
        assert (
            any(feature.startswith("ragged ") for feature in features if "lat" not in feature)
            == padding[kind]
        )
    scale = embeddings["vae"]["scaling_factor"]
    assert isinstance(scale, float) if name == "z-image" else len(scale) in (4, 16)
    tokens = {column.name: column for column in list_columns(ids)}["input_ids"]
    assert tokens.count_bytes(100) == 2 * 4 * 100  # of a caption with 100 letters, two captions


@one_family
@pytest.mark.usefixtures("without_figures")
def test_flow_family_caches_give_the_same_losses_as_images(root, tmp_path, flags, capfd):
    """The data has several sizes, masks, several captions, mirrored images, dropped captions."""
    data = {
        "images": describe_data(root),
        "embeddings": [f"--latents_dir={root / 'embeddings'}"],
        "ids": [f"--latents_dir={root / 'ids'}"],
    }
    for kind, argv in data.items():
        named = []
        if kind == "ids":
            prompts = tmp_path / "prompts.txt"
            prompts.write_text("a --d 1 --l 4\na --d 1 --l 4 --n a digit one")
            named = ["--output_name=dog", f"--validation_prompts_file={prompts}"]
        train(*flags, *argv, *named, "--rank=2", f"--output_dir={tmp_path / kind}")
    out = tmp_path / "ids"
    (second,) = (path for path in out.glob("checkpoint-*/dog-*") if path.stat().st_nlink == 2)
    assert re.fullmatch(r"dog-step0000000\d\.safetensors", second.name)
    picture = np.array(Image.open(max(out.glob("samples/step-*.png"))).convert("RGB")).astype(int)
    rows = picture[:64, -68:-4], picture[68:132, -68:-4]
    assert (rows[0] != rows[1]).any()  # only the second one has a negative prompt
    assert (out / "dog.safetensors").samefile(out / "pytorch_lora_weights.safetensors")
    following = capfd.readouterr().out.strip().splitlines()[-1]
    copied = f"ComfyUI reads this LoRA: copy {out}/dog.safetensors to models/loras/dog.safetensors"
    assert following.endswith(copied)
    expected = read_losses(tmp_path / "images")
    assert len(expected) >= 6
    for kind in ("embeddings", "ids"):
        assert read_losses(tmp_path / kind) == pytest.approx(expected, rel=2e-3)


@each_family
def test_embeddings_beyond_float16_are_refused_before_encoding(root, name, tmp_path, monkeypatch):
    encode = Recorded.encode_empty

    def encode_large(self, encoders, base, tokens):
        prompts = encode(self, encoders, base, tokens)
        prompts["prompt_embeds"][..., 0] = 1e5
        return prompts

    monkeypatch.setattr(Recorded, "encode_empty", encode_large)
    error = precompute.refused(*describe_data(root), f"--output_dir={tmp_path / 'cache'}")
    assert "do not fit into float16: use --text_cache ids" in error
    assert not (tmp_path / "cache").exists()


# ------------------------------------------------------------------- full training


@one_family
def test_flow_family_pipelines_redraw_the_last_validation_samples(root, name, tmp_path, flags):
    prompts = ["a digit one", "a digit two"]
    cached = [*flags, f"--latents_dir={root / 'embeddings'}"]
    validation = ["--validation_prompts", *prompts, "--guidance_scale=3", "--holdout=2"]
    train(*cached, *validation, "--gradient_checkpointing")
    assert {"held_out_loss", "held_out_loss_ema"} <= metrics(tmp_path / "out")[-1].keys()
    pipeline = DiffusionPipeline.from_pretrained(tmp_path / "out")
    before = DiffusionPipeline.from_pretrained(root / "base")
    assert type(pipeline) is type(before)
    weights = pipeline.transformer.state_dict().items()
    others = before.transformer.state_dict()
    changed = [name for name, weight in weights if not torch.equal(weight, others[name])]
    assert len(changed) > 0.9 * len(others)
    assert pipeline.scheduler.config == before.scheduler.config
    # the call that the model card shows, with the seed of a sample
    card = (tmp_path / "out/README.md").read_text()
    (call,) = [line for line in card.splitlines() if line.startswith("image = pipeline(")]
    call = call.removeprefix("image = ").removesuffix(").images[0]")
    scale = {"z-image": "guidance_scale=2", "flux2-klein": "guidance_scale=3"}
    assert f", num_inference_steps=2, {scale.get(name, 'true_cfg_scale=3')}" in call
    path = max((tmp_path / "out/samples").iterdir())
    grid = np.array(Image.open(path).convert("RGB")).astype(int)
    pipeline.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(step_seed("sample", 0, 0))
    names = {"pipeline": pipeline, "generator": generator}
    image = eval(f"{call}, generator=generator).images[0]", names)
    assert image.size == (16, 16)
    image = np.array(image.resize((64, 64), Image.NEAREST)).astype(int)
    assert np.abs(grid[:64, -68:-4] - image).max() <= 1


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("flux2-klein", marks=pytest.mark.ci),
        pytest.param("qwen-image", marks=pytest.mark.long),
    ],
)
@pytest.mark.usefixtures("without_figures")
def test_killed_flow_family_runs_resume_bit_identically(name, tmp_path, cached):
    """On two processes: full training of klein, and a LoRA for Qwen-Image."""
    argv = [*cached, "--num_train_epochs=3", "--checkpointing_steps=2", "--holdout=2"]
    argv += ["--checkpoints_total_limit=2", *["--rank=2"] * (name == "qwen-image")]
    whole, killed = [f"--output_dir={tmp_path / folder}" for folder in ("whole", "killed")]
    train.fork(*argv, whole, num_processes=2)
    argv += [killed, "--resume_from_checkpoint=latest"]
    train.kill_after_checkpoint(tmp_path / "killed", *argv, num_processes=2)
    train.fork(*argv, num_processes=2)
    assert checkpoints(tmp_path / "whole") == checkpoints(tmp_path / "killed") != set()
    last = max(checkpoints(tmp_path / "whole"), key=lambda folder: int(folder.split("-")[1]))
    for part in (f"{last}/transformer", f"{last}/transformer_ema"):
        (path,) = (tmp_path / "whole" / part).glob("*.safetensors")
        weights = load_file(path)
        others = load_file(tmp_path / "killed" / part / path.name)
        assert weights.keys() == others.keys()
        assert all(torch.equal(weights[name], others[name]) for name in weights)
    assert read_losses(tmp_path / "whole") == read_losses(tmp_path / "killed")


# ------------------------------------------------------------------- LoRAs


@one_family
@pytest.mark.usefixtures("without_figures")
def test_flow_family_pipelines_load_the_trained_lora(root, name, tmp_path, flags):
    lora = [*flags, f"--latents_dir={root / 'ids'}", "--rank=2", "--lora_layers=all"]
    train(*lora, "--learning_rate=1e-2", "--validation_prompts", "one")
    pipeline = DiffusionPipeline.from_pretrained(root / "base")
    pipeline.set_progress_bar_config(disable=True)
    options = {"height": 16, "width": 16, "num_inference_steps": 2, "output_type": "np"}
    options["prompt"] = "one"
    draw = lambda: pipeline(generator=torch.Generator().manual_seed(0), **options).images
    before = draw()
    pipeline.load_lora_weights(tmp_path / "out")
    assert np.abs(draw() - before).max() > 1e-3
    path = tmp_path / "out/pytorch_lora_weights.safetensors"
    trained = load_file(path)
    layers = dict(pipeline.transformer.named_modules())
    adapted = {layer for layer in layers if hasattr(layers[layer], "base_layer")}
    assert {key.split(".lora_")[0] for key in trained} == {f"transformer.{n}" for n in adapted}
    again = [f"--network_weights={path}", "--max_train_steps=1", "--learning_rate=0"]
    train(*lora, *again, f"--output_dir={tmp_path / 'again'}")
    loaded = load_file(tmp_path / "again" / path.name)
    assert loaded.keys() == trained.keys()
    assert all(torch.equal(trained[key], loaded[key]) for key in trained)


@pytest.mark.parametrize(
    "name", [n if n == "qwen-image" else pytest.param(n, marks=pytest.mark.long) for n in MAKE]
)
@pytest.mark.usefixtures("without_figures")
def test_comfyui_computes_the_trained_lokr_of_a_transformer(
    root, name, tmp_path, flags, monkeypatch
):
    """The model as ComfyUI changes its weights is the model with the checkpoint's adapter."""
    monkeypatch.setattr(torch.Tensor, "half", torch.Tensor.float)  # no rounding
    lokr = [*flags, f"--latents_dir={root / 'ids'}", "--rank=2", "--lora_layers=all"]
    lokr += ["--lora_type=lokr", "--lokr_factor=2", "--lora_alpha=3", "--learning_rate=1e-2"]
    train(*lokr, "--max_train_steps=2", "--gradient_checkpointing")
    pipeline = DiffusionPipeline.from_pretrained(root / "base")
    plain, applied = pipeline.transformer, copy.deepcopy(pipeline.transformer)
    path = tmp_path / "out/pytorch_lora_weights.safetensors"
    file = load_file(path)
    names = {f"transformer.{layer}": layer for layer, _ in plain.named_modules()}
    assert apply_lokr_as_comfy(applied, file, names) == file.keys()
    adapter = tmp_path / "out/checkpoint-2/transformer_ema"
    merged = peft.PeftModel.from_pretrained(copy.deepcopy(plain), adapter).merge_and_unload()
    changed = 0
    for (key, one), other in zip(applied.named_parameters(), merged.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)
        changed += not torch.equal(one, plain.get_parameter(key))
    assert changed > 4
    if name != "qwen-image":  # diffusers' other pipelines refuse it
        pytest.importorskip("diffusers", "0.42")
        pipeline.load_lora_weights(tmp_path / "out")
    again = [f"--network_weights={path}", "--max_train_steps=1", "--learning_rate=0"]
    train(*lokr, *again, "--lora_alpha=2", f"--output_dir={tmp_path / 'again'}")
    for key, value in load_file(tmp_path / "again" / path.name).items():
        torch.testing.assert_close(value, file[key])


# ------------------------------------------------------------------- a VAE of another family


@pytest.mark.long
def test_prx_trains_with_the_vae_of_flux2(tmp_path, roots):
    root = roots("flux2-klein")
    vae = root / "base/vae"
    models = [f"--vae_name_or_path={vae}", f"--text_encoder_name_or_path={MODELS / 'text_encoder'}"]
    models += [f"--tokenizer_name_or_path={MODELS / 'tokenizer'}", "--model_family=prx"]
    data = [f"--train_data_dir={root / 'images'}", "--caption_column=long", "--resolution=16"]
    precompute(*models, *data, "--center_crop", f"--output_dir={tmp_path / 'cache'}")
    described = load_cache(tmp_path / "cache").settings["vae"]
    assert described["class"] == "AutoencoderKL"
    config = tmp_path / "transformer.json"
    config.write_text(json.dumps({**PRX, "_class_name": "PRXTransformer2DModel"}))
    train(
        *models,
        f"--latents_dir={tmp_path / 'cache'}",
        f"--transformer_config_name_or_path={config}",
        f"--output_dir={tmp_path / 'out'}",
        *["--validation_prompts", "one", "--max_train_steps=2", "--num_inference_steps=1"],
        *["--report_to=none", "--train_batch_size=2"],
    )
    pipeline = DiffusionPipeline.from_pretrained(tmp_path / "out")
    original = AutoencoderKLFlux2.from_pretrained(vae)
    image = torch.rand(1, 3, 16, 16) * 2 - 1
    with torch.no_grad():
        latents = original.encode(image).latent_dist.mean
        assert torch.equal(pipeline.vae.encode(image).latent_dist.mean, latents)
        assert torch.equal(pipeline.vae.decode(latents).sample, original.decode(latents).sample)
    factor = (original.bn.running_var + 1e-4).mean().rsqrt()
    config = pipeline.vae.config
    assert config.scaling_factor == described["scaling_factor"] == pytest.approx(float(factor))
    assert config.shift_factor == pytest.approx(float(original.bn.running_mean.mean()))


# ------------------------------------------------------------------- the shift for each image size


def test_choose_shift_equals_the_pipelines_shift_for_each_size(monkeypatch):
    published = {
        "klein": {"base_shift": 0.5, "max_shift": 1.15, "max_image_seq_len": 4096},
        "qwen": {"base_shift": 0.5, "max_shift": 0.9, "max_image_seq_len": 8192},
    }
    for name, options in published.items():
        sampler = FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True, base_image_seq_len=256, **options
        )
        for height, width in ((16, 16), (32, 32), (64, 64), (40, 100)):
            tokens = height * width
            shift = choose_shift(sampler, 1, height, width)
            assert choose_shift(sampler, 2, 2 * height, 2 * width) == shift
            if name == "klein":  # at 200 steps; with fewer it shifts more
                expected = compute_empirical_mu(tokens, 200)
                assert math.log(shift) == pytest.approx(expected, abs=1e-4)
            else:
                expected = calculate_shift(tokens, 256, 8192, 0.5, 0.9)
                assert math.log(shift) == pytest.approx(expected)
            # noise levels of training are those of the sampler
            sampler.set_timesteps(sigmas=[0.9, 0.5, 0.1], mu=math.log(shift))
            levels = torch.tensor([0.9, 0.5, 0.1])
            levels = shift * levels / (1 + (shift - 1) * levels)
            assert torch.allclose(sampler.sigmas[:3], levels)
    sampler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    assert choose_shift(sampler, 2, 8, 8) == 3.0
    sampler = FlowMatchEulerDiscreteScheduler(
        use_dynamic_shifting=True, time_shift_type="linear", **published["klein"]
    )
    assert choose_shift(sampler, 1, 16, 16) == 0.5
    # two distributions have their own, whatever the pipeline's is; family=None: no formula of its
    shifts = {
        scheme: choose_training_shift(scheme, sampler, 2, None)(32, 64)
        for scheme in ("sigmoid", "flux_shift", "shift", "mode")
    }
    of_flux = math.exp(calculate_shift(16 * 32, 256, 4096, 0.5, 1.15))
    assert shifts["sigmoid"] == 1 and shifts["flux_shift"] == pytest.approx(of_flux)
    assert shifts["shift"] == shifts["mode"] == choose_shift(sampler, 2, 32, 64) != of_flux


@pytest.mark.parametrize("name", ["qwen-image"])
@pytest.mark.usefixtures("without_figures")
def test_each_image_size_has_its_own_shift_unless_the_flag_sets_one(
    root, tmp_path, cached, monkeypatch
):
    shifts = {}
    choose = script.choose_training_shift

    def watch(*given):
        shift_for_size = choose(*given)

        def record(height, width):
            shifts[height, width] = shift_for_size(height, width)
            return shifts[height, width]

        return record

    monkeypatch.setattr(script, "choose_training_shift", watch)
    train(*cached, "--rank=2")
    sizes = {height * width for height, width in shifts}
    assert len(shifts) >= 2 and len(set(shifts.values())) == len(sizes)
    shifts.clear()
    train(*cached, "--shift=2.5", "--max_train_steps=2", f"--output_dir={tmp_path / 'fixed'}")
    assert set(shifts.values()) == {2.5}
    scheduler = DiffusionPipeline.from_pretrained(tmp_path / "fixed").scheduler
    assert (scheduler.config.shift, scheduler.config.use_dynamic_shifting) == (2.5, False)


def test_make_scheduler_uses_the_bases_scheduler_or_a_default_shift(tmp_path):
    def make(resolution, index, *flags):
        argv = ["--pretrained_model_name_or_path=x", "--latents_dir=y", *flags]
        base = Base(load_family("prx"), "x", str(tmp_path), index)
        config = script.make_scheduler(base, resolution, script.parse_args(argv)).config
        return config.shift, config.use_dynamic_shifting

    assert [make(size, {}) for size in (511, 512)] == [(1.0, False), (3.0, False)]
    assert make(512, {}, "--shift=2") == (2.0, False)
    kind = FlowMatchEulerDiscreteScheduler
    kind(shift=5.0, use_dynamic_shifting=True).save_pretrained(tmp_path / "scheduler")
    index = {"_class_name": "PRXPipeline", "scheduler": ["diffusers", kind.__name__]}
    assert make(512, index) == (5.0, True) and make(512, index, "--shift=2") == (2.0, False)
    index["scheduler"] = ["diffusers", "DDIMScheduler"]
    assert make(512, index, "--shift=2") == (2.0, False)
    assert make(512, index | {"_class_name": "PixArtAlphaPipeline"}) == (3.0, False)
    with pytest.raises(SystemExit, match="it has a DDIMScheduler: set the shift of the noise"):
        make(512, index)
    solver = DPMSolverMultistepScheduler  # as SANA's
    index["scheduler"] = ["diffusers", solver.__name__]
    options = {"prediction_type": "flow_prediction", "flow_shift": 2.5}
    solver(**options, use_flow_sigmas=True).save_pretrained(tmp_path / "scheduler")
    assert make(512, index) == (2.5, False) and make(512, index, "--shift=2") == (2.0, False)
    solver(**options).save_pretrained(tmp_path / "scheduler")  # which does not shift
    with pytest.raises(SystemExit, match="it has a DPMSolverMultistepScheduler: set the shift"):
        make(512, index)


@pytest.mark.parametrize(
    "change",
    [
        {"base_shift": None},
        {"max_shift": "1.15"},
        {"base_image_seq_len": None},
        {"max_image_seq_len": 256},  # as large as base_image_seq_len
        {"base_shift": math.nan},
        {"max_shift": 1e30},
        {"base_shift": None, "use_dynamic_shifting": False},  # pipelines compute with it anyway
        {"shift": -1, "use_dynamic_shifting": False},
        {"shift": None, "use_dynamic_shifting": False},
        {"shift_terminal": "0.02"},
    ],
)
def test_schedulers_with_invalid_shift_settings_are_refused(tmp_path, change):
    kind = FlowMatchEulerDiscreteScheduler
    kind(use_dynamic_shifting=True).save_pretrained(tmp_path / "scheduler")
    path = tmp_path / "scheduler/scheduler_config.json"
    index = {"_class_name": "PRXPipeline", "scheduler": ["diffusers", kind.__name__]}
    base = Base(load_family("prx"), "x", str(tmp_path), index)
    args = script.parse_args(["--pretrained_model_name_or_path=x", "--latents_dir=y"])
    script.make_scheduler(base, 512, args)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(SystemExit, match=f"{tmp_path} holds no scheduler for flow matching"):
        script.make_scheduler(base, 512, args)


# ------------------------------------------------------------------- warnings and refusals


@pytest.mark.usefixtures("without_figures")
def test_a_distilled_base_is_trained_with_a_warning(tmp_path, roots, capfd):
    make_klein(tmp_path / "klein", is_distilled=True)
    images = describe_data(roots("flux2-klein"))
    argv = [*images, f"--pretrained_model_name_or_path={tmp_path / 'klein'}", "--rank=2"]
    argv += ["--max_train_steps=1", "--report_to=none"]
    train(*argv, f"--output_dir={tmp_path / 'out'}")
    said = capfd.readouterr().out
    assert f"{tmp_path / 'klein'} was distilled to sample in few steps." in said
    assert "give --training_adapter" in said  # one of two ways out
    train(*argv, *images[:1], f"--output_dir={tmp_path / 'other'}")
    assert "was distilled to" not in capfd.readouterr().out


@pytest.mark.parametrize("script", [train, precompute], ids=["train", "precompute"])
def test_pipelines_of_unknown_families_are_refused(tmp_path, script, roots):
    images = roots("z-image") / "images"
    base = tmp_path / "base"
    base.mkdir()
    (base / "model_index.json").write_text('{"_class_name": "FluxPipeline"}')
    argv = [f"--pretrained_model_name_or_path={base}", f"--train_data_dir={images}"]
    argv += [f"--output_dir={tmp_path / 'out'}"]
    sentence = f"{base} is a FluxPipeline, which these scripts can't train: it has no transformer"
    assert sentence in script.refused(*argv)
