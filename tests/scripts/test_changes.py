"""Each file in patches/ is applied to every trainer that it changes, which then trains."""

import copy
import difflib
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tempfile
import types
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from conftest import (
    ROOT,
    Script,
    assert_same_weights,
    finish,
    make_captioned,
    make_images,
    make_models,
    make_moments,
    make_prx,
    make_sdxl,
    metrics,
    patch,
    reset,
    start,
    wait_until,
    weights,
)
from diffusers import (
    DDPMScheduler,
    DiffusionPipeline,
    FluxControlNetPipeline,
    StableDiffusion3ControlNetPipeline,
    StableDiffusionControlNetPipeline,
    StableDiffusionInpaintPipeline,
    StableDiffusionXLControlNetPipeline,
    UNet2DConditionModel,
    UNet2DModel,
)
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from peft import LoraConfig
from PIL import Image
from safetensors.torch import load_file
from tiny_pipelines import MAKE, make_shifting_vae
from torchvision.transforms.functional import pil_to_tensor

import train_text_to_image
from diffusion_training.batches import Prepared
from diffusion_training.data.captions import tokenize
from diffusion_training.data.encoders import encode_images, encode_prompts, load_encoders
from diffusion_training.models import list_parameters
from diffusion_training.training.step.costs import Costs, count_memory

pytestmark = pytest.mark.usefixtures("without_figures")
LOSSES = {
    "huber_schedule": "--huber_c=0.1",
    "debiased": "--debiased_estimation_loss",
    "multires_noise": "--multires_noise_discount=0.3",
}
SMALL = ["huber", *LOSSES, "class_labels", "second_image", "masked_loss", "trained_module"]
CONTROLS = ("controlnet", "controlnet_flow")
NAMES = [*SMALL, "perceptual", "inpainting", *CONTROLS, "repa", "t_lora"]
CHANGES = {name: (ROOT / f"patches/{name}.diff").read_text() for name in NAMES}
SOURCES = {  # where the images are
    "class_labels": "labels",
    "second_image": "second",
    "masked_loss": "masked",
    "inpainting": "masked",
    **dict.fromkeys(CONTROLS, "controlled"),
}
TRAINERS = {
    "unconditional": "train_unconditional.py",
    "text": "train_text_to_image.py",
    "flow": "train_flow.py",
}


def change_text(change, name):
    """Apply a patch to one of the files that it changes: (the new text, the changed lines)."""
    old = (ROOT / name).read_text()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(old)
        command = ["git", "apply", f"--include={name}"]
        done = subprocess.run(command, input=change, cwd=folder, text=True, capture_output=True)
        assert done.returncode == 0, done.stderr
        new = path.read_text()
    lines = difflib.unified_diff(old.splitlines(), new.splitlines(), n=0)
    changed = [line for line in lines if re.match(r"[+-](?![+-]{2})", line)]
    assert changed, f"the patch does not change {name}"
    return new, changed


def apply(change, trainer, folder):
    """The changed copy of a script, as a module."""
    name = TRAINERS.get(trainer, trainer)
    path = folder / f"changed_{name}"
    path.write_text(change_text(change, name)[0])
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(script, *argv):
    """Run a changed script, which `Script` can't import."""
    reset()
    script.main(script.parse_args([str(arg) for arg in argv]))


def save_config(folder, **options):
    UNet2DModel(
        sample_size=16, layers_per_block=1, block_out_channels=(8, 16), norm_num_groups=4,
        down_block_types=("DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D"), **options,
    ).save_config(folder)  # fmt: skip


def make_others(folder, column):
    """Images with a second column of images; the right half of masks is black."""
    make_images(folder, 8)
    lines = []
    for i in range(8):
        pixels = np.full((20, 24), 250 - i, np.uint8)
        pixels[:, 12:] *= column != "mask"
        Image.fromarray(pixels).save(folder / f"other{i}.png")
        files = {"image_file_name": f"{i}.png", f"{column}_file_name": f"other{i}.png"}
        lines.append(json.dumps(files | {"text": "a digit zero"}))
    (folder / "metadata.jsonl").write_text("\n".join(lines))


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Images of all kinds, tiny models, and a tiny DINOv2."""
    folder = tmp_path_factory.mktemp("changes")
    make_models(folder)
    make_prx(folder / "prx")
    save_config(folder / "unet")
    save_config(folder / "labels-unet", num_class_embeds=10)
    save_config(folder / "second-unet", in_channels=4, out_channels=4)
    make_captioned(folder / "images", 8)
    make_others(folder / "second", "depth")
    make_others(folder / "masked", "mask")
    make_captioned(folder / "controlled", 8)
    for i in range(8):
        image = Image.open(folder / f"controlled/{i}.png")
        image.convert("L").save(folder / f"controlled/{i}.control.png")
    make_sdxl(folder / "xl")
    for base in ("sd", "xl/sdxl"):  # a ControlNet takes 8 x 8 pixels per latent
        shutil.copytree(folder / base, folder / f"{base}-8")
        make_shifting_vae(depth=4, shift_factor=None).save_pretrained(folder / f"{base}-8/vae")
    for base in ("sd3", "flux"):
        make_shifting_vae(depth=4).save_pretrained(MAKE[base](folder / base) / "vae")
    make_images(folder / "labels", 8)
    for i in range(8):  # one folder per class
        (folder / f"labels/{i % 3}").mkdir(exist_ok=True)
        (folder / f"labels/{i}.png").rename(folder / f"labels/{i % 3}/{i}.png")
    torch.manual_seed(0)
    small = {"num_hidden_layers": 1, "num_attention_heads": 2, "mlp_ratio": 1}
    config = transformers.Dinov2Config(hidden_size=384, image_size=224, patch_size=14, **small)
    transformers.Dinov2Model(config).save_pretrained(folder / "dino")
    return folder


@pytest.mark.parametrize("path", sorted((ROOT / "patches").glob("*.diff")), ids=lambda p: p.stem)
def test_a_change_leaves_no_name_undefined(path):
    """A patch may still apply when an import that its lines need has gone."""
    change = path.read_text()
    for name in re.findall(r"^\+\+\+ b/(.*\.py)$", change, re.M):
        text, _ = change_text(change, name)
        command = [sys.executable, "-m", "ruff", "check", "--select=F821", "--isolated", "-"]
        done = subprocess.run(command, input=text, text=True, capture_output=True)
        assert done.returncode == 0, f"{name}: {done.stdout}"


@pytest.fixture(autouse=True)
def without_downloads(monkeypatch):
    """Replace VGG with a random layer."""
    features = lambda: torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3))
    fake = lambda weights: types.SimpleNamespace(features=features())
    monkeypatch.setattr("torchvision.models.vgg16", fake)


def list_flags(root, output, name, trainer, kind="images"):
    """A run of 4 steps on 6 images; later flags override these."""
    source = SOURCES.get(name, "images")
    common = [
        f"--output_dir={output}", "--train_batch_size=2", "--max_train_steps=4",
        "--logging_steps=1", "--report_to=none", "--holdout=2", "--lr_warmup_steps=0",
        "--lr_scheduler=constant", "--checkpointing_steps=2",
    ]  # fmt: skip
    if kind == "images":
        common += [f"--train_data_dir={root / source}", "--dataloader_num_workers=0"]
        common += ["--center_crop", "--resolution=16"]
    else:
        common += [f"--latents_dir={kind}"]
    common += [LOSSES[name]] if name in LOSSES else []
    if trainer == "unconditional":
        unet = f"{source}-unet" if source in ("labels", "second") else "unet"
        common += [f"--model_config_name_or_path={root / unet}"]
        return [*common, "--ddpm_num_inference_steps=2", "--eval_batch_size=12"]
    common += [f"--pretrained_model_name_or_path={root / 'sd'}", "--no-validate_first"]
    common += ["--random_flip"]
    if name == "t_lora":
        common += ["--rank=4", "--lora_layers=all", "--learning_rate=1e-2"]
        common += ["--validation_prompts", "a digit", "--num_inference_steps=2"]
    if trainer == "flow" and name not in CONTROLS:
        common += [f"--transformer_config_name_or_path={root / 'prx'}"]
    if name in CONTROLS:
        base = root / ("sd3" if trainer == "flow" else "sd-8")
        common += [f"--pretrained_model_name_or_path={base}", "--resolution=32"]
        control = root / "controlled/0.control.png"
        common += ["--validation_prompts", "a digit", "--validation_images", control]
        common += ["--num_inference_steps=2", "--learning_rate=0.05"]
    if name == "inpainting":
        common += ["--mask_column=mask"] if kind == "images" else []
        common += ["--validation_prompts", "a digit", "--num_inference_steps=2"]
        common += ["--num_validation_images=2"]
    return common


def use_column(monkeypatch, change):
    """Replace the package's columns with those of a change."""
    text, _ = change_text(change, "diffusion_training/latents/columns.py")
    changed = types.ModuleType("changed_columns")
    monkeypatch.setitem(sys.modules, "changed_columns", changed)  # its data class needs it
    exec(text.replace("(8, 64, 64)", "(8, 8, 8)"), vars(changed))  # for 16 pixels, not 512
    patch(monkeypatch, "EXTRA_COLUMNS", changed.EXTRA_COLUMNS)


def make_cache(root, folder, name, trainer, change, *more):
    """A cache with the columns of a change."""
    script = apply(change, "precompute_latents.py", folder)
    script.DINO = str(root / "dino")
    source = "masked" if name == "inpainting" else "images"
    flags = [f"--train_data_dir={root / source}", "--resolution=16", "--center_crop"]
    flags += [f"--pretrained_model_name_or_path={root / 'sd'}", "--dataloader_num_workers=0"]
    flags += ["--model_family=prx"] * (trainer == "flow")
    flags += ["--mask_column=mask"] * (name == "inpainting")
    run(script, *flags, "--random_flip", f"--output_dir={folder / 'cache'}", *more)
    return folder / "cache"


def list_runs():
    """All pairs of a change and a trainer in it; also inpainting from a cache."""
    for name, change in CHANGES.items():
        for trainer, script in TRAINERS.items():
            if re.search(rf"^--- a/{script}", change, re.M):
                yield name, trainer, "cache" if name == "repa" else "images"
    yield "inpainting", "text", "cache"


def test_documented_changes_are_short_and_cover_the_right_trainers():
    sizes = {}
    for name, trainer, _ in list_runs():
        _, lines = change_text(CHANGES[name], TRAINERS[trainer])
        sizes.setdefault(name, []).append(len(lines))
        assert max(map(len, lines)) <= 101  # with the + before it
    assert all(max(sizes[name]) < 10 for name in SMALL)
    assert all(max(sizes[name]) < (90 if name in CONTROLS else 33) for name in NAMES)
    assert [name for name in NAMES if len(sizes[name]) == 3] == [
        "huber",
        "huber_schedule",
        "trained_module",
        "perceptual",
    ]


def mark(name, trainer, kind):
    """In each test run, the flow trainer shows a change of several trainers."""
    is_shown = name in ("huber", "trained_module", "perceptual", "repa") and trainer != "flow"
    is_shown |= (name, kind) == ("inpainting", "images")
    is_shown |= name in LOSSES and (name, trainer) != ("multires_noise", "text")
    is_shown |= name in ("controlnet_flow", "second_image")
    return pytest.param(name, trainer, kind, marks=pytest.mark.long if is_shown else pytest.mark.ci)


@pytest.mark.parametrize("name, trainer, kind", [mark(*run) for run in list_runs()])
def test_documented_changes_train_and_resume_to_the_same_bits(
    root, tmp_path, monkeypatch, name, trainer, kind
):
    """The runs use gradient checkpointing, --train_batch_size=auto and held-out images."""
    change = CHANGES[name]
    if kind == "cache":
        use_column(monkeypatch, change)
        kind = make_cache(root, tmp_path, name, trainer, change)
    script = apply(change, trainer, tmp_path)
    flags = list_flags(root, tmp_path / "out", name, trainer, kind)
    flags += ["--gradient_checkpointing", "--train_batch_size=auto"]
    step = script.train_step

    def copy_at_step_3(*given):
        """Copy the folder as a kill would leave it: without step 3, with checkpoint-2."""
        if given[5].number == 3 and not (tmp_path / "killed").exists():
            # it is written beside the steps
            wait_until((tmp_path / "out/checkpoint-2").exists)
            shutil.copytree(tmp_path / "out", tmp_path / "killed")
        return step(*given)

    script.train_step = copy_at_step_3
    run(script, *flags)
    records = metrics(tmp_path / "out")
    assert any("held_out_loss_ema" in record for record in records)
    assert all(np.isfinite(record.get("loss", 0)) for record in records)
    resumed = [*flags, f"--output_dir={tmp_path / 'killed'}", "--resume_from_checkpoint=latest"]
    run(script, *resumed)
    names = {"unconditional": "unet", "text": "unet", "flow": "transformer"}[trainer]
    names = "controlnet" if name in CONTROLS else names
    names = {names, f"{names}_ema"}
    if module := {"trained_module": "log_variance", "repa": "projection"}.get(name):
        names |= {module, f"{module}_ema"}
    folders = {path.parent for path in (tmp_path / "out/checkpoint-4").glob("*/*.safetensors")}
    assert {folder.name for folder in folders} == names
    for folder in folders:
        (path,) = folder.glob("*.safetensors")
        expected = load_file(path)
        found = load_file(tmp_path / "killed/checkpoint-4" / folder.name / path.name)
        before = load_file(tmp_path / "out/checkpoint-2" / folder.name / path.name)
        assert expected.keys() == found.keys()
        assert all(torch.equal(expected[key], found[key]) for key in expected)
        assert any(not torch.equal(expected[key], before[key]) for key in expected)
    if name == "inpainting":
        assert weights(tmp_path / "out/unet")["conv_in.weight"][:, 4:].any()
        assert (tmp_path / "out/samples/step-0000004.png").exists()
        pipeline = StableDiffusionInpaintPipeline.from_pretrained(tmp_path / "out")
        assert pipeline.unet.config.in_channels == 9
    if name == "controlnet":
        check_controlnet(root / "sd-8", tmp_path / "out", StableDiffusionControlNetPipeline)
    if name == "controlnet_flow":
        check_controlnet(root / "sd3", tmp_path / "out", StableDiffusion3ControlNetPipeline)


def test_t_lora_change_uses_fewer_ranks_for_noisier_images(tmp_path):
    """As a LoRA whose further ranks are 0, for each image of a batch and each kind of layer."""
    script = apply(CHANGES["t_lora"], "text", tmp_path)
    torch.manual_seed(0)
    unet = UNet2DConditionModel(
        block_out_channels=(8, 16), layers_per_block=1, cross_attention_dim=32, norm_num_groups=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), attention_head_dim=8,
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    layers = ["to_q", "ff.net.2", "conv1", "time_emb_proj"]  # of tokens, images, vectors
    unet.add_adapter(LoraConfig(r=5, target_modules=layers, init_lora_weights=False))
    plain = copy.deepcopy(unet)
    script.mask_ranks(unet, 1000)
    masked = copy.deepcopy(unet)  # as the average of the weights is
    images, embeds = torch.randn(3, 4, 4, 4), torch.randn(3, 7, 32)
    times = torch.tensor([999, 550, 0])
    found = masked(images, times, embeds).sample
    for i, ranks in enumerate((1, 2, 5)):
        unet = copy.deepcopy(plain)
        for name, weight in unet.named_parameters():
            if ".lora_A." in name:
                weight.data[ranks:] = 0
        inputs = images[i : i + 1], times[i], embeds[i : i + 1]
        expected = unet(*inputs).sample
        torch.testing.assert_close(found[i : i + 1], expected, rtol=1e-4, atol=1e-5)
        called = masked(inputs[0], timestep=times[i], encoder_hidden_states=inputs[2]).sample
        torch.testing.assert_close(called, expected)  # as pipelines call it
        assert (i == 2) == torch.allclose(expected, plain(*inputs).sample, rtol=1e-3)


def check_controlnet(base, folder, kind):
    """The pipeline draws another image for another hint, with the denoiser of the base."""
    is_flow = (base / "transformer").exists()
    part = "transformer" if is_flow else "unet"
    before, after = weights(base / part), weights(folder / part)
    assert all(torch.equal(before[key], after[key]) for key in before)
    layer = "controlnet_blocks.0.weight" if is_flow else "controlnet_down_blocks.0.weight"
    assert weights(folder / "controlnet")[layer].any()
    pipeline = DiffusionPipeline.from_pretrained(folder)
    assert isinstance(pipeline, kind)
    argument = "control_image" if is_flow else "image"
    pipeline.set_progress_bar_config(disable=True)
    drawn = [
        pipeline(
            "a digit",
            **{argument: Image.new("RGB", (32, 32), colour)},
            height=32,
            width=32,
            num_inference_steps=2,
            output_type="np",
            generator=torch.Generator().manual_seed(0),
        ).images
        for colour in ("black", "white")
    ]
    assert np.abs(drawn[0] - drawn[1]).max() > 1e-5
    assert (folder / "samples/step-0000004.png").exists()
    assert f" {argument}=load_image" in (folder / "README.md").read_text()


@pytest.mark.long
@pytest.mark.parametrize(
    "name, kind", [("sd3", StableDiffusion3ControlNetPipeline), ("flux", FluxControlNetPipeline)]
)
def test_controlnet_flow_change_predicts_as_its_pipeline(root, tmp_path, monkeypatch, name, kind):
    script = apply(CHANGES["controlnet_flow"], "flow", tmp_path)
    base, out = root / name, tmp_path / "out"
    flags = [*list_flags(root, out, "controlnet_flow", "flow"), "--mixed_precision=bf16"]
    run(script, *flags, f"--pretrained_model_name_or_path={base}")
    check_controlnet(base, out, kind)
    pipeline = DiffusionPipeline.from_pretrained(out)
    pipeline.set_progress_bar_config(disable=True)
    take_mean = lambda self, generator=None: self.mode()
    monkeypatch.setattr(DiagonalGaussianDistribution, "sample", take_mean)
    args = script.parse_args([f"--pretrained_model_name_or_path={base}", "--latents_dir=x"])
    given = script.open_trained_base(args, "train_flow.py", script.record_family)
    encoders = load_encoders(given, torch.float32)
    prompts = encode_prompts(encoders, tokenize(encoders.tokenizers, ["a digit"]))
    image = Image.open(root / "controlled/0.png").convert("RGB").resize((32, 32))
    noise, seen = torch.randn(1, 4, 4, 4), []

    def step(velocity, time, sample, **options):
        seen.append((velocity, time, sample))
        raise KeyboardInterrupt

    monkeypatch.setattr(pipeline.scheduler, "step", step)
    options = {"control_image": image, "height": 32, "width": 32, "num_inference_steps": 2}
    latents = noise if name == "sd3" else pipeline._pack_latents(noise, 1, 4, 4, 4)
    with pytest.raises(KeyboardInterrupt):
        pipeline("a digit", latents=latents, guidance_scale=1, **options)
    velocity, time, _ = seen[0]
    if name == "flux":
        velocity = pipeline._unpack_latents(velocity, 32, 32, 8)
    pixels = pil_to_tensor(image)[None]
    hint, _ = encode_images(encoders, pixels).chunk(2, dim=1)
    scale = pipeline.vae.config
    prompts["hint"] = (hint - scale.shift_factor) * scale.scaling_factor
    controlnet = script.make_controlnet(given, pipeline.transformer, out / "controlnet")
    models = {"controlnet": controlnet}
    ours = script.predict_velocity(
        encoders.family, pipeline.transformer, models, noise, time.view(1) / 1000, prompts
    )
    torch.testing.assert_close(ours, velocity, rtol=0, atol=1e-5)
    ours.sum().backward()  # DDP would wait for weights without a gradient
    assert all(weight.grad is not None for weight in list_parameters(models))
    flags += [f"--controlnet_model_name_or_path={out / 'controlnet'}", "--learning_rate=1e-9"]
    run(script, *flags, f"--pretrained_model_name_or_path={base}",
        f"--output_dir={tmp_path / 'again'}", "--max_train_steps=1")  # fmt: skip
    one, two = (weights(folder / "controlnet") for folder in (out, tmp_path / "again"))
    assert all(torch.allclose(one[key], two[key], atol=1e-6) for key in one)


@pytest.mark.long
@pytest.mark.parametrize("name", ["sd3", "flux"])
def test_controlnet_flow_change_averages_gradients_and_resumes_on_two_processes(
    root, tmp_path, monkeypatch, name
):
    train = Script("train_flow")
    train.module = apply(CHANGES["controlnet_flow"], "flow", tmp_path)
    flags = list_flags(root, tmp_path / "whole", "controlnet_flow", "flow")
    flags += [f"--pretrained_model_name_or_path={root / name}", "--gradient_checkpointing"]
    take_step = torch.optim.AdamW.step

    def keep_gradients(self, *args):
        weights = [weight for group in self.param_groups for weight in group["params"]]
        path = tmp_path / f"{torch.distributed.get_rank()}.pt"
        torch.save([weight.grad for weight in weights], path)
        return take_step(self, *args)

    with monkeypatch.context() as m:
        m.setattr(torch.optim.AdamW, "step", keep_gradients)
        train.fork(*flags, num_processes=2)
    one, other = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    assert all(gradient is not None for gradient in one) and any(each.any() for each in one)
    assert all(map(torch.equal, one, other))
    killed = tmp_path / "killed"
    flags += ["--resume_from_checkpoint=latest"]
    train.kill_after_checkpoint(killed, *flags, num_processes=2)
    train.fork(*flags, f"--output_dir={killed}", num_processes=2)
    for part in ("controlnet", "checkpoint-4/controlnet", "checkpoint-4/controlnet_ema"):
        assert_same_weights(tmp_path / "whole" / part, killed / part)


@pytest.mark.long
def test_controlnet_change_trains_sdxl_and_continues_a_controlnet(root, tmp_path):
    script = apply(CHANGES["controlnet"], "text", tmp_path)
    base, out = root / "xl/sdxl-8", tmp_path / "out"
    flags = [*list_flags(root, out, "controlnet", "text"), "--mixed_precision=bf16"]
    flags += [f"--pretrained_model_name_or_path={base}"]
    run(script, *flags)
    check_controlnet(base, out, StableDiffusionXLControlNetPipeline)
    flags += [f"--controlnet_model_name_or_path={out / 'controlnet'}", "--learning_rate=1e-9"]
    run(script, *flags, f"--output_dir={tmp_path / 'again'}", "--max_train_steps=1")
    one, two = (weights(folder / "controlnet") for folder in (out, tmp_path / "again"))
    assert all(torch.allclose(one[key], two[key], atol=1e-6) for key in one)


@pytest.mark.parametrize(
    "name, trainer",
    [("class_labels", "unconditional"), pytest.param("repa", "flow", marks=pytest.mark.long)],
)
def test_documented_changes_train_on_two_processes(root, tmp_path, monkeypatch, name, trainer):
    change = CHANGES[name]
    kind = "images"
    if name == "repa":
        use_column(monkeypatch, change)
        kind = make_cache(root, tmp_path, name, trainer, change)
    script = apply(change, trainer, tmp_path)
    flags = list_flags(root, tmp_path / "out", name, trainer, kind)
    log = tmp_path / "log"
    assert finish(start(lambda: run(script, *flags), 2, log)) == [0, 0], log.read_text()
    assert any("held_out_loss" in record for record in metrics(tmp_path / "out"))


def test_huber_change_trains_with_the_huber_loss(root, tmp_path):
    script = apply(CHANGES["huber"], "unconditional", tmp_path)
    losses = []
    for kind in ("l2", "huber"):
        flags = list_flags(root, tmp_path / kind, "huber", "unconditional")
        run(script, *flags, f"--loss_type={kind}", "--max_train_steps=1")
        losses.append(metrics(tmp_path / kind)[0]["loss"])
    assert losses[1] < 0.6 * losses[0]  # half the square, or less for errors above 1


def test_labels_change_passes_class_labels_to_the_unet(root, tmp_path, monkeypatch):
    script = apply(CHANGES["class_labels"], "unconditional", tmp_path)
    flags = [*list_flags(root, tmp_path / "out", "class_labels", "unconditional"), "--holdout=0"]
    seen, forward = [], UNet2DModel.forward

    def spy(self, sample, timestep, class_labels=None, **rest):
        if not sample.is_meta:  # the check of shapes has no numbers
            levels = ((sample.mean(dim=(1, 2, 3)) + 1) * 127.5 / 20).floor().tolist()
            seen.append((self.training, levels, class_labels.tolist()))
        return forward(self, sample, timestep, class_labels, **rest)

    monkeypatch.setattr(UNet2DModel, "forward", spy)
    # The U-Net sees the images themselves, so that each can be told from its label.
    monkeypatch.setattr(DDPMScheduler, "add_noise", lambda self, images, noise, timesteps: images)
    run(script, *flags)
    trained = [
        pair
        for training, levels, labels in seen
        if training
        for pair in zip(levels, labels, strict=True)
    ]
    assert sorted(set(trained)) == [(i, i % 3) for i in range(8)]
    drawn = [labels for training, _, labels in seen if not training]
    assert drawn and drawn[0] == [i % 10 for i in range(12)]
    # the code of the model card, on this computer
    _, usage, *_ = (tmp_path / "out/README.md").read_text().split("```")
    monkeypatch.chdir(tmp_path)
    usage = usage.removeprefix("python\n")
    exec(usage.replace('from_pretrained("', f'from_pretrained("{tmp_path}/'), {})
    assert (tmp_path / "image.png").exists() and seen[-1][2] == [3]


def test_labels_change_measures_samples_of_all_labels(root, tmp_path):
    """--validation_metrics draws as samples/ does, with a label for each image."""
    script = apply(CHANGES["class_labels"], "unconditional", tmp_path)
    flags = list_flags(root, tmp_path / "out", "class_labels", "unconditional")
    make_moments(tmp_path / "moments.pt")
    flags += ["--max_train_steps=1", f"--metric_image_model={tmp_path / 'moments.pt'}"]
    run(script, *flags, "--validation_metrics=kid", "--num_metric_images=4")
    (record,) = [each for each in metrics(tmp_path / "out") if "kid" in each]
    assert np.isfinite(record["kid"]) and record["metric_images"] == 4


def test_prompts_of_samples_are_encoded_again_by_a_text_encoder_that_changes(root, tmp_path):
    """The line of docs/changing.md, in a script whose step changes the text encoder."""
    page = (ROOT / "docs/changing.md").read_text()
    (again,) = re.findall(r"`(replace\(data, .*?\))`", page)
    text = (ROOT / "train_text_to_image.py").read_text()
    call = "log_validation(launch, pipeline, data, "
    assert text.count(call) == 1 and text.count("import shlex\n") == 1
    text = text.replace(call, call.replace("data", again))
    imports = "from diffusion_training.data.prompts import encode_for_all\n"
    imports += "from dataclasses import replace\nimport shlex\n"
    (tmp_path / "changed.py").write_text(text.replace("import shlex\n", imports))
    spec = importlib.util.spec_from_file_location("changed", tmp_path / "changed.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    drawn = []

    def change_encoder(data, *rest):
        data.encoders.text_encoders[0].requires_grad_(False).get_input_embeddings().weight.add_(1)
        return prepare_batch(data, *rest)

    def draw(launch, pipeline, data, *rest):
        drawn.append(data.validation.prompts[0]["prompt_embeds"])

    prepare_batch, script.prepare_batch, script.draw_prompts = (
        script.prepare_batch, change_encoder, draw
    )  # fmt: skip
    flags = list_flags(root, tmp_path / "out", "huber", "text")
    run(script, *flags, "--validation_prompts=a digit", "--validation_steps=2", "--holdout=0")
    assert len(drawn) == 2 and not torch.equal(*drawn)


def test_second_image_change_adds_the_image_column_as_channels(root, tmp_path):
    script = apply(CHANGES["second_image"], "unconditional", tmp_path)
    flags = [*list_flags(root, tmp_path / "out", "second_image", "unconditional"), "--holdout=0"]
    batches, prepare_batch = [], script.prepare_batch
    script.prepare_batch = lambda batch: (
        batches.append(batch["pixel_values"]) or prepare_batch(batch)
    )
    run(script, *flags)
    depths = sorted({int(image[3, 0, 0]) for batch in batches for image in batch})
    assert batches[0].shape == (2, 4, 16, 16) and depths == [*range(243, 251)]
    assert np.asarray(Image.open(tmp_path / "out/samples/step-0000004.png")).ndim == 3


def test_masked_loss_change_ignores_errors_outside_the_mask(root, tmp_path):
    """A constant added in the masked half does not change the loss of the other half."""
    script = apply(CHANGES["masked_loss"], "unconditional", tmp_path)
    noise_scheduler, mask = DDPMScheduler(), torch.zeros(2, 1, 8, 8)
    mask[..., :4] = 1
    args = script.parse_args(list_flags(root, tmp_path / "out", "masked_loss", "unconditional"))

    batch = torch.cat([torch.full((2, 3, 8, 8), 127), 255 * mask.byte()], dim=1)
    prepared = script.prepare_batch({"pixel_values": batch})
    assert prepared.clean.shape == (2, 3, 8, 8) and torch.equal(prepared.loss_inputs["mask"], mask)
    losses = []
    for error in (0.0, 100.0):

        def predict(models, noisy_images, timesteps, condition):
            torch.manual_seed(0)
            prediction = torch.randn(
                noisy_images.shape
            )  # the noise, which compute_loss draws first
            prediction[..., 4:] += error
            return prediction

        torch.manual_seed(0)
        weight = torch.ones(2) / 2
        objective = types.SimpleNamespace(predict=predict)
        loss = script.compute_loss(args, noise_scheduler, objective, {}, prepared, weight)
        losses.append(loss.item())
    assert losses == [0.0, 0.0]


def test_changes_of_the_loss_compute_their_formulas(root, tmp_path):
    """Of a prediction of zeros, at a known timestep."""
    images, weight = torch.randn(2, 3, 8, 8), torch.tensor([0.25, 0.75])
    losses, noises = {}, {}
    for name in ("", *LOSSES):
        script = apply(CHANGES[name], "text", tmp_path) if name else train_text_to_image
        flags = list_flags(root, tmp_path / "out", name, "text") + ["--min_timestep=600"]
        args = script.parse_args([*map(str, flags), "--max_timestep=601"])
        assert name == "" or vars(args)[LOSSES[name].split("=")[0][2:]]

        def predict(models, noisy_images, timesteps, condition):
            assert timesteps.tolist() == [600, 600]
            noises[name] = (noisy_images - alpha.sqrt() * images) / (1 - alpha).sqrt()
            return torch.zeros_like(noisy_images)

        scheduler = DDPMScheduler()
        alpha = scheduler.alphas_cumprod[600]
        objective = types.SimpleNamespace(predict=predict)
        torch.manual_seed(0)
        prepared = Prepared(images, {}, {})
        losses[name] = script.compute_loss(args, scheduler, objective, {}, prepared, weight)
    squares = noises[""].square()
    each = lambda error: (weight * error.mean(dim=(1, 2, 3))).sum()
    snr = alpha / (1 - alpha)
    c = 0.1 + 0.9 / (1 + snr**-0.5) ** 2  # snr of sd-scripts: sigma = snr ** -0.5
    assert torch.allclose(losses["huber_schedule"], each(2 * c * ((squares + c**2).sqrt() - c)))
    assert torch.allclose(losses["debiased"], losses[""] / snr.sqrt())
    coarse = noises["multires_noise"]
    assert torch.allclose(losses["multires_noise"], each(coarse.square()), atol=1e-5)
    assert torch.allclose(coarse.std(dim=(1, 2, 3)), torch.ones(2), atol=1e-3)
    neighbours = (coarse[..., 1:] * coarse[..., :-1]).mean()
    assert neighbours > 0.05 + (noises[""][..., 1:] * noises[""][..., :-1]).mean()


@pytest.mark.long
def test_changes_with_extra_modules_count_their_flops_and_memory(root, tmp_path, monkeypatch):
    """This covers a second trained module and a network in the loss, whose weights stay frozen."""
    seen = {}

    def spy_on_costs(costs, objective):
        seen["costs"] = costs
        return count_first(costs, objective)

    def spy_on_memory(models, averaged, frozen, num_processes, optimizer):
        seen["memory"] = count_memory(models, averaged, frozen, num_processes, optimizer)
        seen["frozen"] = [weight for module in frozen for weight in module.parameters()]
        seen["before"] = [weight.clone() for weight in seen["frozen"]]
        return seen["memory"]

    count_first = Costs.count_first
    monkeypatch.setattr(Costs, "count_first", spy_on_costs)
    monkeypatch.setattr("diffusion_training.training.step.costs.count_memory", spy_on_memory)
    found = {}
    for name in ("plain", "trained_module", "perceptual"):
        script = train_text_to_image
        if name != "plain":
            script = apply(CHANGES[name], "text", tmp_path)
        flags = list_flags(root, tmp_path / name, name, "text")
        run(script, *flags, "--max_train_steps=1", "--holdout=0")
        operations = seen["costs"].flops
        found[name] = {
            **seen,
            "operations": operations,
            "loss": metrics(tmp_path / name)[0]["loss"],
        }
        assert not any(weight.requires_grad for weight in seen["frozen"])
        assert all(map(torch.equal, seen["before"], seen["frozen"]))
    plain, module, perceptual = found.values()
    # a layer from 64 numbers to one: forward, and backward to the weights
    assert module["operations"] - plain["operations"] == 2 * 2 * 64
    assert module["memory"]["weights"] - plain["memory"]["weights"] == 4 * 65
    # VGG's replacement: two images of 14 x 14 pixels forward, one backward; and the VAE
    vgg = 3 * 2 * (3 * 9) * 8 * 14**2
    assert perceptual["operations"] - plain["operations"] > 2 * vgg
    assert perceptual["memory"]["encoders"] > plain["memory"]["encoders"] + 4 * 8 * (3 * 9 + 1)
    assert perceptual["loss"] > plain["loss"]
