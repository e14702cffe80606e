"""--validation_base and --validation_lora: samples as another base's pipeline draws them.

And --training_adapter, with which the samples' base is not the one that is trained.
"""

import contextlib
import dataclasses
import functools
import json
import os
import re
import shutil
import signal
import weakref
from argparse import Namespace
from types import SimpleNamespace

import diffusers
import numpy as np
import pytest
import tiny_pipelines
import torch
from conftest import (
    ROOT,
    Script,
    finish,
    make_captioned,
    make_dino,
    make_klein,
    make_sdxl,
    make_z_image,
    metrics,
    start,
)
from diffusers import DiffusionPipeline
from fake_device import DEVICE, forked
from original_layout import save_transformer
from PIL import Image
from safetensors.torch import load_file, save_file
from test_edits import SIDE, Pairs

from diffusion_training.draws import step_seed
from diffusion_training.families.base import Base, Family
from diffusion_training.training.lora import quantization
from diffusion_training.training.showing import captioned_samples, validation_base
from diffusion_training.training.showing.validation_base import (
    OtherBase,
    choose_drawing,
    list_differences,
)

pytestmark = [
    pytest.mark.usefixtures("without_figures"),
    # of NumPy, at a tensor that ERNIE-Image's pipeline gives its scheduler
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),
]
precompute = Script("precompute_latents")
FLOW, TEXT = Script("train_flow"), Script("train_text_to_image")
FILE = "pytorch_lora_weights.safetensors"
MAKE = {"z-image": make_z_image, "sdxl": make_sdxl, "flux2-klein": make_klein} | {
    name: tiny_pipelines.MAKE[name] for name in ("flux", "krea2", "chroma")
}
PROMPTS = ["a digit one", "two"]


def change(source, folder, seed=1):
    """A copy of a pipeline with another scheduler and weights of the denoiser: a turbo."""
    shutil.copytree(source, folder)
    (path,) = [*folder.glob("transformer/*.safetensors"), *folder.glob("unet/*.safetensors")]
    generator = torch.Generator().manual_seed(seed)
    weights = load_file(path)
    for value in weights.values():
        if value.is_floating_point():
            value.add_(0.02 * torch.randn(value.shape, generator=generator))
    save_file(weights, path, {"format": "pt"})
    index = json.loads((folder / "model_index.json").read_text())
    index |= dict.fromkeys({"is_distilled"} & index.keys(), True)
    scheduler = diffusers.DDIMScheduler.load_config(folder / "scheduler")
    if scheduler.get("shift"):
        kind = diffusers.FlowMatchEulerDiscreteScheduler
        kind.from_config(scheduler | {"shift": 1.7}).save_pretrained(folder / "scheduler")
    else:  # as SDXL Turbo; it draws noise in each step
        kind = diffusers.EulerAncestralDiscreteScheduler
        kind.from_config(scheduler | {"timestep_spacing": "trailing"}).save_pretrained(
            folder / "scheduler"
        )
        index["scheduler"] = ["diffusers", kind.__name__]
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """make(name) -> (the trainer, the flags of base and cache, its turbo's folder)."""
    made = {}

    def make(name):
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            MAKE[name](folder / "made")
            source = folder / "made/sdxl" if name == "sdxl" else folder / "made"
            shutil.move(source, folder / "base")
            turbo = change(folder / "base", folder / "turbo")
            base = [f"--pretrained_model_name_or_path={folder / 'base'}"]
            base += ["--max_sequence_length=64"] * (name == "flux2-klein")  # as in OPTIONS
            make_captioned(folder / "images", 6)
            data = [f"--train_data_dir={folder / 'images'}", "--resolution=16", "--center_crop"]
            data += ["--dataloader_num_workers=0"]
            precompute(*base, *data, f"--output_dir={folder / 'cache'}")
            trainer = TEXT if name == "sdxl" else FLOW
            made[name] = trainer, [*base, f"--latents_dir={folder / 'cache'}"], turbo
        return made[name]

    return make


def align(model):
    """Let weights begin at multiples of 64 bytes, as on a GPU.

    A CPU rounds some products by where their numbers begin, and a loaded file may lie anywhere.
    """
    for weight in model.parameters():
        weight.data = weight.data.clone()


@pytest.fixture(autouse=True)
def aligned(monkeypatch):
    def load(*args, load_base=validation_base.load_base, **options):
        model, base_hash = load_base(*args, **options)
        assert not base_hash  # each evaluation loads it: a hash would cost 0.6 s a GB each time
        align(model)
        return model, base_hash

    monkeypatch.setattr(validation_base, "load_base", load)


def list_flags(trainer, base, *more):
    flags = trainer.flags("none", *base, "--rank=2", "--train_batch_size=2", "--learning_rate=0.1")
    flags += ["--max_train_steps=4", "--checkpointing_steps=2", "--num_validation_images=2"]
    return [*flags, "--num_inference_steps=2", "--validation_prompts", *PROMPTS, *more]


def read_turbo(folder, step, rows=2, count=2, side=16):
    """The pictures of the second base, uint8 [prompts, count, side, side, 3], from its columns."""
    grid = np.array(Image.open(folder / f"samples/step-{step:07d}.png"))
    shown = max(64, side)
    step = shown + 4
    top, left = len(grid) - rows * step, grid.shape[1] - count * step
    cells = grid[top:, left:].reshape(rows, step, count, step, 3)[:, :shown, :, :shown]
    scale = shown // side
    return cells[:, scale // 2 :: scale, :, scale // 2 :: scale].transpose(0, 2, 1, 3, 4)


def draw(pipeline, number, prompts, count=2, side=16, per_call=1, **options):
    """The same pictures by a pipeline of diffusers. per_call: images of one prompt per call."""
    pipeline.set_progress_bar_config(disable=True)
    pipeline.vae.enable_slicing()  # images are decoded one by one, for the same rounding
    align(pipeline.components["unet" if "unet" in pipeline.components else "transformer"])
    images = []
    numbers = range(len(prompts) * count)
    for first in range(0, len(numbers), per_call):
        own = numbers[first : first + per_call]
        seeds = [step_seed("sample", 0, each) for each in own]
        images += [
            *pipeline(
                prompt=prompts[own[0] // count],
                # a caption is encoded alone, for the same rounding
                **({"num_images_per_prompt": per_call} if per_call > 1 else {}),
                generator=[torch.Generator().manual_seed(seed) for seed in seeds],
                height=side,
                width=side,
                num_inference_steps=number,
                output_type="np",
                **options,
            ).images
        ]
    pixels = (np.stack(images) * 255).round().astype(np.uint8)
    return pixels.reshape(len(prompts), count, *pixels.shape[1:])


# arguments of pipelines for no guidance and, of tiny ones, for as many tokens as were cached
OPTIONS = {
    "z-image": {"guidance_scale": 0.0},
    "flux2-klein": {"guidance_scale": 1.0, "max_sequence_length": 64},
    "krea2": {"guidance_scale": 0.0},
}


@pytest.mark.parametrize("name", [
    "z-image", *(pytest.param(name, marks=pytest.mark.long) for name in MAKE if name != "z-image"),
])  # fmt: skip
def test_samples_are_those_of_the_turbos_pipeline_with_the_lora(tmp_path, bases, name):
    trainer, base, turbo = bases(name)
    runs = {"plain": [], "both": [f"--validation_base={turbo}"]}
    for run, more in runs.items():
        trainer(*list_flags(trainer, base, *more), f"--output_dir={tmp_path / run}")
    for path in (FILE, "checkpoint-4/optimizer.bin"):
        one, other = ((tmp_path / run / path).read_bytes() for run in runs)
        assert one == other, path
    pipeline = DiffusionPipeline.from_pretrained(turbo)
    options = OPTIONS.get(name, {"guidance_scale": 1.0})
    per_call = 2 if name == "sdxl" else 1
    plain = draw(pipeline, 8, PROMPTS, per_call=per_call, **options)
    assert np.array_equal(read_turbo(tmp_path / "both", 0), plain)
    pipeline.load_lora_weights(tmp_path / "both", weight_name=FILE)
    adapted = draw(pipeline, 8, PROMPTS, per_call=per_call, **options)
    assert np.array_equal(read_turbo(tmp_path / "both", 4), adapted)
    assert np.abs(adapted.astype(int) - plain).max() > 1
    if name != "z-image":
        return
    # the turbo's transformer in one file, with the base's scheduler
    file = save_transformer(turbo, tmp_path / "z-turbo.safetensors")
    more = [f"--validation_base={file}", f"--cache_dir={tmp_path / 'kept'}", "--max_train_steps=1"]
    trainer(*list_flags(trainer, base, *more), f"--output_dir={tmp_path / 'file'}")
    pipeline = DiffusionPipeline.from_pretrained(turbo)
    scheduler = turbo.with_name("base") / "scheduler"
    pipeline.scheduler = type(pipeline.scheduler).from_pretrained(scheduler)
    assert pipeline.scheduler.config.shift != 1.7
    assert np.array_equal(
        read_turbo(tmp_path / "file", 0), draw(pipeline, 8, PROMPTS, per_call=per_call, **options)
    )
    card = (tmp_path / "file/README.md").read_text()
    assert 'ZImageTransformer2DModel.from_single_file("z-turbo.safetensors", config="' in card


def make_speed_lora(base, path, rank=3):
    """A LoRA file: for a U-Net with kohya's names and a scale of 0.5, else with diffusers'."""
    parts = DiffusionPipeline.from_pretrained(base).components
    folder = "unet" if "unet" in parts else "transformer"
    generator = torch.Generator().manual_seed(2)
    weights = {}
    for name, layer in parts[folder].named_modules():
        if isinstance(layer, torch.nn.Linear) and name.endswith(("to_q", "to_out.0", "w1")):
            a = 0.3 * torch.randn(rank, layer.in_features, generator=generator)
            b = 0.3 * torch.randn(layer.out_features, rank, generator=generator)
            if folder == "unet":
                key = f"lora_unet_{name.replace('.', '_')}"
                weights |= {f"{key}.lora_down.weight": a, f"{key}.lora_up.weight": b}
                weights[f"{key}.alpha"] = torch.tensor(rank / 2)
            else:
                key = f"{folder}.{name}"
                weights |= {f"{key}.lora_A.weight": a, f"{key}.lora_B.weight": b}
    save_file(weights, path)
    return path


@pytest.mark.long
@pytest.mark.parametrize("name, more", [
    ("z-image", ["--lora_layers=attention"]), ("sdxl", ["--use_dora"]), ("flux", []),
])  # fmt: skip
def test_samples_with_a_speed_lora_are_those_of_the_pipeline_with_both(tmp_path, bases, name, more):
    trainer, base, turbo = bases(name)
    folder = turbo.with_name("base")
    speed = make_speed_lora(folder, tmp_path / "lcm-3steps.safetensors")
    flags = list_flags(trainer, base, f"--validation_lora={speed}", *more)
    trainer(*flags, f"--output_dir={tmp_path / 'out'}")
    code = (tmp_path / "out/report.html").read_text()
    assert "base with lcm-3steps.safetensors, 3 steps" in code
    pipeline = DiffusionPipeline.from_pretrained(folder)
    pipeline.load_lora_weights(tmp_path / "out", weight_name=FILE, adapter_name="trained")
    pipeline.load_lora_weights(speed, adapter_name="speed")
    pipeline.set_adapters(["trained", "speed"])
    if name == "sdxl":
        pipeline.scheduler = diffusers.LCMScheduler.from_config(pipeline.scheduler.config)
        assert "LCMScheduler.from_config(pipeline.scheduler.config)" in code
    guidance = OPTIONS.get(name, {"guidance_scale": 1.0})
    per_call = 2 if name == "sdxl" else 1
    drawn = draw(pipeline, 3, PROMPTS, per_call=per_call, **guidance)
    assert np.array_equal(read_turbo(tmp_path / "out", 4), drawn)
    pipeline.set_adapters(["trained"])
    one = draw(pipeline, 3, PROMPTS, per_call=per_call, **guidance)
    assert not np.array_equal(one, drawn)


@pytest.mark.long
def test_edits_are_those_of_the_turbos_pipeline_with_the_lora(tmp_path, monkeypatch):
    tiny_pipelines.make_small(monkeypatch)
    pairs = Pairs(tmp_path, "klein")
    pairs.precompute()
    turbo = change(tmp_path / "base", tmp_path / "turbo")
    more = ["--rank=2", "--learning_rate=0.1", "--num_validation_images=1"]
    more += [f"--validation_base={turbo}", "--validation_base_steps=3"]
    FLOW(*pairs.flags("lora", *more, *pairs.samples()))
    pipeline = DiffusionPipeline.from_pretrained(turbo)
    reference = Image.open(pairs.images / "0.control.png")
    options = {"count": 1, "side": SIDE, "image": reference, **OPTIONS["flux2-klein"]}
    before = draw(pipeline, 3, ["one"], **options)
    pipeline.load_lora_weights(tmp_path / "lora")
    after = draw(pipeline, 3, ["one"], **options)
    shown = read_turbo(tmp_path / "lora", 3, rows=1, side=SIDE)
    assert np.array_equal(shown[:, :1], before) and np.array_equal(shown[:, 1:], after)
    assert not np.array_equal(before, after)
    grid = Image.open(tmp_path / "lora/samples/step-0000003.png")
    assert grid.width > 5 * SIDE  # reference, before, after; before, after


@pytest.mark.long
@pytest.mark.parametrize("num_processes", [1, 2])
def test_a_run_that_is_killed_while_it_draws_with_the_turbo_resumes_to_the_same(
    tmp_path, bases, monkeypatch, num_processes
):
    trainer, base, turbo = bases("z-image")
    flags = list_flags(trainer, base, f"--validation_base={turbo}", "--validation_steps=2")
    flags.append("--resume_from_checkpoint=latest")
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    trainer.fork(*flags, f"--output_dir={whole}", num_processes=num_processes)

    def run():
        opened = []

        def load(self, trained, weights, load=OtherBase.load):
            opened.append(trained)
            if len(opened) == 2:  # the first time is before training
                os.kill(os.getpid(), signal.SIGKILL)
            return load(self, trained, weights)

        OtherBase.load = load
        trainer(*flags, f"--output_dir={killed}")

    assert set(finish(start(run, num_processes))) == {-signal.SIGKILL}
    assert not (killed / "samples/step-0000002.png").exists()
    trainer.fork(*flags, f"--output_dir={killed}", num_processes=num_processes)
    names = [FILE, *(f"samples/step-000000{step}.png" for step in (0, 2, 4))]
    for path in [*names, "checkpoint-4/optimizer.bin"]:
        assert (whole / path).read_bytes() == (killed / path).read_bytes(), path


@pytest.mark.long
@pytest.mark.parametrize("name", ["sdxl", "flux"])
def test_a_quantized_and_swapped_turbo_draws_the_same(tmp_path, bases, monkeypatch, name):
    monkeypatch.setattr(quantization, "BLOCK", 8)  # so that layers of tiny models are quantized
    trainer, base, turbo = bases(name)
    flags = list_flags(trainer, base, f"--validation_base={turbo}", "--mixed_precision=bf16")
    flags += ["--base_precision=int8"]
    for run, more in {"plain": [], "swapped": ["--blocks_to_swap=all"]}.items():
        trainer(*flags, *more, f"--output_dir={tmp_path / run}")
    for path in (FILE, "samples/step-0000000.png", "samples/step-0000004.png"):
        one, other = ((tmp_path / run / path).read_bytes() for run in ("plain", "swapped"))
        assert one == other, path
    pipeline = DiffusionPipeline.from_pretrained(turbo)
    pipeline.load_lora_weights(tmp_path / "plain", weight_name=FILE)
    drawn = draw(pipeline, 8, PROMPTS, per_call=2 if name == "sdxl" else 1, guidance_scale=1.0)
    difference = np.abs(read_turbo(tmp_path / "plain", 4) - drawn.astype(float)).mean()
    assert 0 < difference < 4


@pytest.mark.long
@forked
def test_on_a_gpu_one_base_at_a_time_is_in_its_memory(tmp_path, bases, monkeypatch):
    trainer, base, turbo = bases("z-image")
    seen, weakrefs = [], []
    draw_share = captioned_samples.draw_share

    def list_devices(pipeline):
        return {str(weight.device) for weight in pipeline.transformer.parameters()}

    def watch(launch, pipeline, base, *given):
        seen.append((base.prefix, pipeline, list_devices(pipeline)))
        if base.prefix:  # the trained base has no memory on the device
            _, trained, _ = seen[-2]
            held = [x.untyped_storage().nbytes() for x in trained.transformer.parameters()]
            assert not any(held)
            weakrefs.append(weakref.ref(pipeline.transformer))
        return draw_share(launch, pipeline, base, *given)

    @contextlib.contextmanager
    def leave(model, staying_on_host=validation_base.staying_on_host):
        with staying_on_host(model):
            yield
            assert weakrefs.pop()() is None  # before the trained base comes back

    monkeypatch.setattr(captioned_samples, "draw_share", watch)
    monkeypatch.setattr(validation_base, "staying_on_host", leave)
    for run, more in {"plain": [], "both": [f"--validation_base={turbo}"]}.items():
        flags = list_flags(trainer, base, "--mixed_precision=bf16", *more)
        trainer(*flags, f"--output_dir={tmp_path / run}")
    assert not weakrefs
    assert [key for key, _, _ in seen] == ["", "", *["", "turbo_"] * 2]
    assert all(devices == {DEVICE} for _, _, devices in seen)
    one, other = ((tmp_path / run / FILE).read_bytes() for run in ("plain", "both"))
    assert one == other


@pytest.mark.long
def test_metrics_are_also_measured_of_the_turbos_samples(tmp_path, bases):
    trainer, base, turbo = bases("z-image")
    flags = list_flags(trainer, base, f"--validation_base={turbo}", "--validation_metrics")
    flags += ["dino-i", "copy", f"--metric_image_model={make_dino(tmp_path / 'dino')}"]
    flags += ["--num_metric_images=3", f"--output_dir={tmp_path / 'out'}", "--metric_steps=2"]
    trainer(*flags)
    records = [each for each in metrics(tmp_path / "out") if "metric_images" in each]
    assert [record["step"] for record in records] == [0, 2, 4]
    for record in records:
        for name in ("dino-i", "dino-i_low", "copy"):
            assert -1 <= record[f"turbo_{name}"] <= 1
        assert record["turbo_dino-i"] != record["dino-i"]
    page = (tmp_path / "out/report.html").read_text()
    assert "<td>turbo_dino-i" in page and "turbo_ are samples with" in page


@pytest.mark.long
def test_card_and_report_have_code_for_the_turbo_first(tmp_path, bases, monkeypatch):
    trainer, base, turbo = bases("sdxl")
    speed = make_speed_lora(turbo, tmp_path / "Hyper-4steps.safetensors")
    flags = list_flags(trainer, base, f"--validation_base={turbo}", f"--validation_lora={speed}")
    trainer(*flags, "--num_validation_images=1", f"--output_dir={tmp_path / 'out'}")
    card = (tmp_path / "out/README.md").read_text()
    _, code, *_ = card.split("```python\n")
    code = code.partition("```")[0]
    heading = '# Put the path or the id of this base in place of "turbo"\n'
    heading += '# Put the path or the id of this base in place of "base"\n'
    heading += "# turbo with Hyper-4steps.safetensors, 4 steps, no guidance\n"
    assert code.startswith(heading) and "\n# base, 2 steps, guidance 7.5\n" in code
    assert code.index('from_pretrained("turbo"') < code.index('from_pretrained("base"')
    assert 'pipeline.set_adapters(["trained", "speed"])' in code
    assert str(tmp_path) not in code and "A LoRA of rank 2 for the U-Net of `base`" in card
    page = (tmp_path / "out/report.html").read_text()
    assert page.count("load_lora_weights") == 3
    # the report has the paths as they were given: its code runs, and draws what the grid shows
    report = (tmp_path / "out/report.json").read_text()
    assert str(turbo) in report
    local = code.replace('"turbo"', repr(str(turbo))).replace('"base"', repr(str(base[0][32:])))
    local = local.replace('"out"', f"{str(tmp_path / 'out')!r}, weight_name={FILE!r}")
    local = local.replace('"Hyper-4steps.safetensors"', repr(str(speed)))
    monkeypatch.chdir(tmp_path)
    exec(local, {})
    assert (tmp_path / "image.png").is_file()


@pytest.mark.long
@pytest.mark.parametrize("name", ["sdxl", "flux"])
def test_a_second_base_by_its_id_draws_like_its_folder(hub, tmp_path, bases, name):
    """Only its denoiser's weights are fetched: captions and the VAE are the base's."""
    trainer, base, turbo = bases(name)
    hub.add("org/turbo", turbo)
    flags = list_flags(trainer, base, "--max_train_steps=2")
    drawn = {}
    for kind, given in {"folder": turbo, "id": "org/turbo"}.items():
        trainer(*flags, f"--validation_base={given}", f"--output_dir={tmp_path / kind}")
        drawn[kind] = read_turbo(tmp_path / kind, 2)
    assert np.array_equal(*drawn.values())
    weights = [path for path in hub.downloads() if path.endswith(".safetensors")]
    folder = "unet" if name == "sdxl" else "transformer"
    assert weights == [f"{folder}/diffusion_pytorch_model.safetensors"]


@pytest.mark.long
def test_a_base_that_does_not_fit_ends_in_a_sentence_before_any_step(tmp_path, bases, monkeypatch):
    trainer, base, turbo = bases("z-image")
    out = tmp_path / "out"
    flags = [*list_flags(trainer, base), f"--output_dir={out}"]
    other = tmp_path / "other"
    shutil.copytree(turbo, other)
    kind = diffusers.ZImageTransformer2DModel
    config = kind.load_config(other / "transformer")
    kind.from_config(config | {"n_layers": config["n_layers"] + 1}).save_pretrained(
        other / "transformer"
    )
    empty = tmp_path / "empty"
    shutil.copytree(turbo, empty, ignore=shutil.ignore_patterns("*.safetensors"))
    (tmp_path / "no-pipeline").mkdir()
    unet = make_speed_lora(bases("sdxl")[2], tmp_path / "unet.safetensors")
    wide = tmp_path / "wide.safetensors"
    save_file(
        {"transformer.layers.0.attention.to_q.lora_A.weight": torch.ones(2, 7),
         "transformer.layers.0.attention.to_q.lora_B.weight": torch.ones(7, 2)}, wide,
    )  # fmt: skip
    (tmp_path / "text.safetensors").write_text("no weights")
    klein = bases("flux2-klein")[2]
    for flag, sentence in {
        f"--validation_base={klein}": "is a Flux2KleinPipeline, but the base a ZImagePipeline",
        f"--validation_base={other}": "other shapes than the base's, such as layers.",
        f"--validation_base={empty}": "has no diffusion_pytorch_model.safetensors",
        f"--validation_base={tmp_path / 'no-pipeline'}": "is not a pipeline: it has no model_index",
        f"--validation_base={tmp_path / 'nowhere'}": "nowhere can't be opened as a pipeline",
        f"--validation_lora={unet}": "unet.safetensors can't be used (",
        f"--validation_lora={wide}": "layers.0.attention.to_q has another width",
        f"--validation_lora={tmp_path / 'text.safetensors'}": "text.safetensors can't be used (",
        f"--validation_lora={tmp_path / 'nowhere'}": "nowhere can't be used (",
    }.items():
        assert sentence in trainer.refused(*flags, flag), flag
    monkeypatch.setattr(validation_base, "measure_free", lambda: 10**5)
    said = trainer.refused(*flags, f"--validation_base={turbo}")
    assert "needs 0.00145 GB of the host's memory for samples, and only 0.0001 GB" in said
    assert not [*out.glob("*")]


def test_flags_that_do_nothing_end_in_a_sentence(tmp_path):
    base = ["--pretrained_model_name_or_path=x", f"--latents_dir={tmp_path}", "--rank=2"]
    prompts = ["--validation_prompts=one"]
    for flags, sentence in (
        (["--validation_base=x", *prompts], "--validation_base does nothing without --rank"),
        (["--validation_lora=x", *prompts], "--validation_lora does nothing without --rank"),
        ([base[2], "--validation_base=x"], "does nothing without --validation_prompts"),
        (
            [base[2], "--validation_base=x", *prompts, "--num_validation_images=0"],
            "does nothing without --num_validation_images",
        ),
        ([base[2], "--validation_base_steps=4", *prompts], "--validation_base_steps does nothing"),
        ([base[2], "--validation_base_guidance=4", *prompts], "guidance does nothing without"),
        ([base[2], "--validation_lora=x", "--lora_type=lokr", *prompts], "--lora_type lokr"),
    ):
        assert sentence in FLOW.refused(*base[:2], *flags, status=2)


def choose(name, index=None, lora=None, pipeline="ZImagePipeline", shift=1, **flags):
    family = SimpleNamespace(
        pipeline=pipeline,
        embedded_guidance=flags.pop("embedded", None),
        guidance_args=lambda scale: {"guidance_scale": scale - shift},
        is_distilled=functools.partial(Family.is_distilled, None),
    )
    args = {"validation_base_steps": None, "validation_base_guidance": None, "guidance_scale": 4.0}
    args |= {"num_inference_steps": 28, "validation_lora": lora} | flags
    return choose_drawing(
        SimpleNamespace(family=family, name=name, transformer=None, index=index or {}),
        Namespace(**args),
    )


def test_steps_and_guidance_are_those_of_the_name_or_the_pipeline():
    assert choose("Tongyi-MAI/Z-Image-Turbo") == (8, 1.0)
    assert choose("me/Z-Image") == (50, 6.0)  # its pipeline's guidance_scale is 5
    assert choose("me/klein", {"is_distilled": True}) == (8, 1.0)
    assert choose("me/base", lora="path/sdxl_lightning_4step_lora.safetensors") == (4, 1.0)
    assert choose("me/base", lora="Hyper-SD-8steps-CFG.safetensors") == (8, 1.0)
    assert choose("me/base", lora="lcm.safetensors") == (8, 1.0)
    assert choose("me/16-stepsisters") == (50, 6.0)
    more = {"validation_base_steps": 3, "validation_base_guidance": 2.0}
    assert choose("me/Turbo", **more) == (3, 2.0)
    dev = {"pipeline": "FluxPipeline", "embedded": "guidance_scale", "shift": 0}
    assert choose("FLUX.1-dev", lora="Hyper-8steps", **dev) == (8, 3.5)


def test_the_scheduler_is_the_second_bases_or_as_the_fast_lora_needs_it():
    own = diffusers.DDIMScheduler(beta_end=0.5, prediction_type="v_prediction")
    turbo = diffusers.EulerDiscreteScheduler(beta_end=0.25)
    values = dict.fromkeys(field.name for field in dataclasses.fields(OtherBase))
    make = lambda **options: OtherBase(**values | options).make_scheduler(own)
    assert make() is own
    made = make(sampler=("LCMScheduler", {"timestep_spacing": "linspace"}))
    assert type(made) is diffusers.LCMScheduler and made.config.timestep_spacing == "linspace"
    assert (made.config.beta_end, made.config.prediction_type) == (0.5, "v_prediction")
    made = make(scheduler=turbo, sampler=("LCMScheduler", {}))
    assert type(made) is diffusers.EulerDiscreteScheduler and made is not turbo
    assert made.config.beta_end == 0.25


def test_parts_that_differ_from_the_bases_are_named(tmp_path):
    base = Base(None, "base", str(tmp_path / "base"), {})
    index = {"vae": ["diffusers", "AutoencoderKL"], "text_encoder": ["transformers", "T5"]}
    turbo = Base(None, "turbo", str(tmp_path / "turbo"), index | {"tokenizer": ["x", "y"]})
    for folder in ("base", "turbo"):
        for part in ("vae", "text_encoder"):
            (tmp_path / folder / part).mkdir(parents=True)
            config = {"scaling_factor": 0.5, "_diffusers_version": folder, folder: 1}
            (tmp_path / folder / part / "config.json").write_text(json.dumps(config))
    assert list_differences(base, turbo) == []
    (tmp_path / "turbo/vae/config.json").write_text(json.dumps({"scaling_factor": 0.6}))
    assert list_differences(base, turbo) == ["vae"]
    (tmp_path / "turbo/vae/config.json").unlink()
    assert list_differences(base, turbo) == []


# -------------------------------------------------------------------------------------------------
# --training_adapter


def merge(base, lora, folder):
    """A copy of a pipeline with a LoRA of `make_speed_lora` in its denoiser's weights."""
    shutil.copytree(base, folder)
    (path,) = [*folder.glob("transformer/*.safetensors"), *folder.glob("unet/*.safetensors")]
    weights, adapter = load_file(path), load_file(lora)
    for name, weight in weights.items():
        layer = name.removesuffix(".weight")
        kohya = f"lora_unet_{layer.replace('.', '_')}"
        if f"transformer.{layer}.lora_A.weight" in adapter:
            a, b = (adapter[f"transformer.{layer}.lora_{part}.weight"] for part in "AB")
            weights[name] = weight + b @ a
        elif f"{kohya}.lora_down.weight" in adapter:
            a, b = (adapter[f"{kohya}.lora_{part}.weight"] for part in ("down", "up"))
            weights[name] = weight + 0.5 * (b @ a)
    save_file(weights, path, {"format": "pt"})
    return folder


@pytest.mark.parametrize("name, more", [
    pytest.param("z-image", [], marks=pytest.mark.ci), *(
        pytest.param(*case, marks=pytest.mark.long) for case in (
            ("z-image", ["--base_precision=int8", "--mixed_precision=bf16"]),
            ("sdxl", ["--blocks_to_swap=all"]), ("flux", []),
        )
    ),
])  # fmt: skip
def test_a_training_adapter_is_part_of_the_base_in_training_alone(
    tmp_path, bases, monkeypatch, name, more
):
    monkeypatch.setattr(quantization, "BLOCK", 8)
    trainer, base, turbo = bases(name)
    folder = turbo.with_name("base")
    adapter = make_speed_lora(folder, tmp_path / "adapter.safetensors")
    merged = merge(folder, adapter, tmp_path / "merged-base")
    zero = {key: 0 * value if "alpha" not in key else value
            for key, value in load_file(adapter).items()}  # fmt: skip
    save_file(zero, tmp_path / "zero.safetensors")
    more = [*more, "--guidance_scale=1"]
    cached = [flag for flag in base if "pretrained" not in flag]
    on_merged = [f"--pretrained_model_name_or_path={merged}", *cached]
    runs = {
        "plain": list_flags(trainer, base, *more),
        "zero": list_flags(
            trainer, base, *more, f"--training_adapter={tmp_path / 'zero.safetensors'}"
        ),
        "adapted": list_flags(trainer, base, *more, f"--training_adapter={adapter}"),
        "merged": list_flags(trainer, on_merged, *more),
    }
    for run, flags in runs.items():
        trainer(*flags, f"--output_dir={tmp_path / run}")
    read = lambda path: {run: (tmp_path / run / path).read_bytes() for run in runs}
    for path in (FILE, "checkpoint-4/optimizer.bin"):
        found = read(path)
        assert found["plain"] == found["zero"] != found["adapted"] == found["merged"], path
    found = read("samples/step-0000000.png")
    assert found["plain"] == found["zero"] == found["adapted"] != found["merged"]
    said = trainer.refused(
        *runs["plain"], f"--output_dir={tmp_path / 'adapted'}", "--resume_from_checkpoint=latest",
        "--max_train_steps=5",
    )  # fmt: skip
    assert "is of another LoRA (another base)" in said
    if len(more) > 1:
        return
    pipeline = DiffusionPipeline.from_pretrained(folder)
    pipeline.load_lora_weights(tmp_path / "adapted", weight_name=FILE)
    drawn = draw(pipeline, 2, PROMPTS, **OPTIONS.get(name, {"guidance_scale": 1.0}))
    assert np.array_equal(read_turbo(tmp_path / "adapted", 4), drawn)


@pytest.mark.long
def test_an_adapter_made_of_a_turbos_pictures_keeps_its_other_samples(tmp_path, bases, monkeypatch):
    """As docs/models.md makes one. With it, a LoRA of a subject changes other samples less."""
    trainer, _, turbo = bases("z-image")
    page = (ROOT / "docs/models.md").read_text()
    (code,) = re.findall(r"```python\n(# draw\.py\n.*?)```", page, re.DOTALL)
    tiny = {"Tongyi-MAI/Z-Image-Turbo": str(turbo), "1024": "16", "range(500)": "range(24)"}
    tiny |= {"pipeline.enable_model_cpu_offload()": "", "torch.bfloat16": "torch.float32"}
    for old, new in tiny.items():
        assert old in code
        code = code.replace(old, new)
    others = ["a digit zero", "a digit one", "a digit two", "two digits", "three", "four"]
    (tmp_path / "captions.txt").write_text("\n".join(others))
    monkeypatch.chdir(tmp_path)
    exec(code, {})
    made = {path: path.read_bytes() for path in sorted((tmp_path / "images").iterdir())}
    assert len(made) == 48
    lost = tmp_path / "images/00007.png"
    lost.unlink()  # a second start draws only this one, the same as before
    exec(code, {})
    assert {path: path.read_bytes() for path in sorted((tmp_path / "images").iterdir())} == made

    def train(images, output, steps, *more):
        base = f"--pretrained_model_name_or_path={turbo}"
        cache = tmp_path / f"latents-{images.name}"
        if not cache.exists():
            data = [f"--train_data_dir={images}", "--resolution=16", f"--output_dir={cache}"]
            precompute(base, *data, "--dataloader_num_workers=0")
        flags = trainer.flags(tmp_path / output, base, f"--latents_dir={cache}", "--rank=4")
        flags += ["--train_batch_size=8", "--learning_rate=5e-3", "--lora_layers=all"]
        trainer(*flags, f"--max_train_steps={steps}", "--checkpointing_steps=10000", *more)
        return tmp_path / output / FILE

    pipeline = DiffusionPipeline.from_pretrained(turbo)
    before = draw(pipeline, 4, others, **OPTIONS["z-image"]).astype(float)
    adapter = train(tmp_path / "images", "adapter", 300)
    changes = {"plain": [], "adapted": []}  # of a color value, mean
    for seed in range(3):
        images = tmp_path / f"subject-{seed}"
        make_captioned(images, 8, ["a subject"] * 8)
        for name, of_all in changes.items():
            more = [f"--training_adapter={adapter}"] * (name == "adapted")
            lora = train(images, f"{name}-{seed}", 60, f"--seed={seed}", *more)
            pipeline.load_lora_weights(lora)
            after = draw(pipeline, 4, others, **OPTIONS["z-image"])
            pipeline.unload_lora_weights()
            of_all.append(np.abs(after - before).mean())
    print(changes)  # 0.72 of the change without it, when this test was written
    assert sum(changes["adapted"]) < 0.9 * sum(changes["plain"])


@pytest.mark.long
def test_a_training_adapter_that_does_not_fit_ends_in_a_sentence(tmp_path, bases):
    trainer, base, _ = bases("z-image")
    unet = make_speed_lora(bases("sdxl")[2], tmp_path / "unet.safetensors")
    flags = [*list_flags(trainer, base), f"--output_dir={tmp_path / 'out'}"]
    for file in (unet, tmp_path / "nowhere.safetensors"):
        said = trainer.refused(*flags, f"--training_adapter={file}")
        assert f"--training_adapter {file} can't be used (" in said
    assert not (tmp_path / "out").exists()


def test_a_training_adapter_needs_a_lora(tmp_path):
    base = ["--pretrained_model_name_or_path=x", f"--latents_dir={tmp_path}"]
    said = FLOW.refused(*base, "--training_adapter=x", status=2)
    assert "--training_adapter does nothing without --rank" in said
    said = FLOW.refused(*base, "--training_adapter=x", "--rank=2", "--use_dora", status=2)
    assert "--use_dora needs the base as it is" in said
