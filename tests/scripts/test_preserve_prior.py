"""--preserve_prior: a LoRA keeps its base's predictions for other prompts, and resumes exactly."""

import json
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from conftest import Script, list_sd_flags, make_models, metrics, needs
from diffusers import UNet2DConditionModel
from test_train_lora import FILE, contents

from diffusion_training.batches import Objective, Prepared
from diffusion_training.training.lora.lora import add_lora
from diffusion_training.training.lora.prior import Prior, capture_inputs, without_adapters
from diffusion_training.training.step.denoiser import load_base

pytestmark = pytest.mark.usefixtures("without_figures")
train, precompute = Script("train_text_to_image"), Script("precompute_latents")
PRIOR = ["--preserve_prior", "--class_prompt", "a digit", "a digit two"]


@pytest.fixture(scope="module")
def inputs(sd_inputs):
    return sd_inputs(7)  # so that some steps are short


@pytest.fixture
def flags(tmp_path, inputs):
    """A run of 4 steps; later flags override these."""
    return list_sd_flags(
        inputs,
        tmp_path / "out",
        "--rank=2",
        "--train_batch_size=2",
        "--learning_rate=1e-2",
        "--lr_warmup_steps=1",
        "--checkpointing_steps=2",
        *PRIOR,
    )


@pytest.mark.parametrize("num_processes, more", [
    (1, ["--prior_every=2", "--lora_dropout=0.1", "--gradient_checkpointing"]),
    pytest.param(2, ["--use_dora", "--mixed_precision=bf16"], marks=pytest.mark.long),
    pytest.param(
        2, ["--gradient_accumulation_steps=2", "--prior_every=3", "--num_train_epochs=4"],
        marks=pytest.mark.long,
    ),
])  # fmt: skip
def test_run_with_a_prior_resumes_to_the_same_bits(tmp_path, flags, num_processes, more):
    flags = [*flags, "--num_train_epochs=2", *more]
    whole, rest = tmp_path / "whole/lora", tmp_path / "rest/lora"
    again = f"--resume_from_checkpoint={whole / 'checkpoint-2'}"
    for argv in ([f"--output_dir={whole}"], [f"--output_dir={rest}", again]):
        train.fork(*flags, *argv, num_processes=num_processes)
    one, other = contents(whole), contents(rest)
    assert {FILE, "checkpoint-4/optimizer.bin"} <= other.keys()
    assert {name for name in other if other[name] != one[name]} == set()


def test_prior_loss_is_0_until_the_lora_has_learned(tmp_path, flags):
    """The U-Net has dropout and so has the LoRA: neither counts as a change."""
    train(*flags, "--lora_dropout=0.5", "--prior_every=2", "--max_train_steps=4")
    losses = [record.get("prior_loss") for record in metrics(tmp_path / "out")]
    assert losses[0] == 0.0 and losses[1] is losses[3] is None and losses[2] > 0


@pytest.mark.long
def test_compiled_model_has_the_same_prior_loss(tmp_path, flags):
    """Adapters are switched off in code that was compiled with them."""
    for name, more in (("eager", []), ("compiled", ["--compile=eager"])):
        train(*flags, *more, "--max_train_steps=3", f"--output_dir={tmp_path / name}")
    found = [
        [record["prior_loss"] for record in metrics(tmp_path / name)]
        for name in ("eager", "compiled")
    ]
    assert found[1] == pytest.approx(found[0], rel=1e-3) and found[0][0] == 0 < found[0][2]


def make_unet(folder, base_precision=None, **flags):
    """The U-Net of `make_models` with a LoRA that changes its predictions."""
    options = {"rank": 2, "lora_alpha": None, "use_dora": False, "lora_dropout": 0.0}
    options |= {"lora_type": "lora", "lora_layers": "attention"}
    args = SimpleNamespace(**options | flags)
    device = torch.device("cpu")
    unet, _ = load_base(
        UNet2DConditionModel, str(folder), base_precision, device, torch.float32, subfolder="unet"
    )
    torch.manual_seed(0)
    add_lora(unet, ["to_k", "to_q", "to_v"], "", torch.float32, args)
    for name, weight in unet.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight)
    return unet.eval()


def predict(models, noisy, times, condition):
    return models["unet"](noisy, times, condition["prompt_embeds"]).sample


def make_inputs(count=3):
    torch.manual_seed(1)
    return torch.randn(count, 4, 8, 8), torch.arange(count), {
        "prompt_embeds": torch.randn(count, 5, 32)
    }  # fmt: skip


@pytest.mark.parametrize("use_dora", [False, True])
def test_without_adapters_a_model_is_its_base(inputs, use_dora):
    unet = make_unet(inputs / "sd", use_dora=use_dora)
    frozen = next(weight for weight in unet.parameters() if weight.requires_grad)
    frozen.requires_grad_(False)  # as `freeze_unreached` does
    trained = [weight.requires_grad for weight in unet.parameters()]
    exact = UNet2DConditionModel.from_pretrained(inputs / "sd/unet").eval()
    given = make_inputs()
    with torch.no_grad():
        adapted = predict({"unet": unet}, *given)
        with without_adapters({"unet": unet}):
            found = predict({"unet": unet}, *given)
        assert torch.equal(found, predict({"unet": exact}, *given))
        assert not torch.equal(adapted, found)
        assert torch.equal(adapted, predict({"unet": unet}, *given))
    assert [weight.requires_grad for weight in unet.parameters()] == trained


@needs("bitsandbytes")
def test_without_adapters_a_model_in_4_bits_is_its_base(tmp_path):
    base = make_models(tmp_path)
    config = UNet2DConditionModel.load_config(base / "unet") | {"block_out_channels": [64, 64]}
    unet = UNet2DConditionModel.from_config(config | {"attention_head_dim": 16})
    unet.save_pretrained(base / "unet")
    device, given = torch.device("cpu"), make_inputs()
    options = {"base_precision": "nf4", "device": device, "dtype": torch.float32}
    exact, _ = load_base(UNet2DConditionModel, str(base), **options, subfolder="unet")
    unet = make_unet(base, "nf4")
    with torch.no_grad(), without_adapters({"unet": unet}):
        found = predict({"unet": unet}, *given)
    with torch.no_grad():
        assert torch.equal(found, predict({"unet": exact.eval()}, *given))
        assert not torch.equal(found, predict({"unet": unet}, *given))


class Prompts:
    """In place of `PromptEmbeds`: one that is drawn always."""

    prompts = (None,)
    embeds = torch.randn(3, 5, 32, generator=torch.Generator().manual_seed(2))

    def choose_condition(self, numbers, device, like):
        assert numbers == [0] * 3 and "prompt_embeds" in like
        return {"prompt_embeds": self.embeds}


def test_prior_adds_the_gradients_of_its_formula(inputs):
    """The noisy images are those of the script's loss, the weights those of the images."""
    unet = make_unet(inputs / "sd").train()
    images, times, condition = make_inputs()
    seen = []

    def compute_loss(objective, models, prepared, weight):
        noisy = prepared.clean + torch.randn(images.shape)
        prediction = objective.predict(models, noisy, times, prepared.condition)
        seen.append(noisy)
        return (weight * prediction.square().mean(dim=(1, 2, 3))).sum()

    prepared = Prepared(images, condition, {})
    objective = Objective(lambda batch: batch, predict, compute_loss, None, None)
    weight = torch.tensor([0.5, 0.0, 1.5])
    torch.manual_seed(3)
    loss = Prior(Prompts(), 0.7, 4).backward(
        Accelerator(cpu=True), objective, {"unet": unet}, prepared, weight
    )
    trained = [parameter for parameter in unet.parameters() if parameter.requires_grad]
    found = [parameter.grad for parameter in trained]
    assert unet.training
    unet.eval()
    given = {"unet": unet}, seen[0], times, {"prompt_embeds": Prompts.embeds}
    with torch.no_grad(), without_adapters({"unet": unet}):
        base = predict(*given)
    change = (predict(*given) - base).square().mean(dim=(1, 2, 3))
    expected = (weight * change).sum()
    assert loss.item() == expected.item() > 0
    gradients = torch.autograd.grad(0.7 * 4 * expected, trained)
    for gradient, own in zip(gradients, found, strict=True):
        torch.testing.assert_close(gradient, own, rtol=1e-5, atol=1e-8)
    assert len(seen) == 1


def test_find_inputs_gives_what_the_loss_passes_to_the_model(inputs):
    def compute_loss(objective, models, prepared, weight):
        more = prepared.condition | {"extra": torch.ones(3)}
        return objective.predict(models, prepared.clean + 1, torch.arange(3), more).sum()

    images, _, condition = make_inputs()
    objective = Objective(None, None, compute_loss, None, None)
    noisy, times, found = capture_inputs(objective, {}, Prepared(images, condition, {}), None)
    assert torch.equal(noisy, images + 1) and times.tolist() == [0, 1, 2]
    assert found.keys() == {"prompt_embeds", "extra"}


@pytest.mark.parametrize("source", ["cache", pytest.param("images", marks=pytest.mark.long)])
def test_trigger_is_replaced_in_the_captions(tmp_path, flags, inputs, source, monkeypatch, capfd):
    data = [f"--latents_dir={inputs / 'cache'}"]
    if source == "images":
        data = [f"--train_data_dir={inputs / 'images'}", "--resolution=16"]
        data += [f"--cache_dir={inputs / 'datasets'}", "--dataloader_num_workers=0"]
    flags = [flag for flag in flags if flag not in PRIOR and not flag.startswith("--latents_dir")]
    flags += [*data, "--preserve_prior", "--class_prompt=thing", "--max_train_steps=1"]
    encoded = []
    from diffusion_training.data import prompts as module

    encode = module.encode_caption
    monkeypatch.setattr(
        module,
        "encode_caption",
        lambda by, text, *more: encoded.append(text) or encode(by, text, *more),
    )
    train(*flags, "--trigger=digit")
    assert encoded == ["a thing one", "a thing two", "a thing zero"]
    error = train.refused(*flags, "--trigger=sks dog", f"--output_dir={tmp_path / 'none'}")
    assert "--trigger 'sks dog' is in none of 7 captions: correct it" in error


@pytest.mark.parametrize(
    "argv, sentence",
    [
        (["--preserve_prior", "--class_prompt=a"], "--preserve_prior does nothing without --rank"),
        (["--rank=4", "--preserve_prior"], "--preserve_prior needs --class_prompt: prompts for"),
        (["--rank=4", "--class_prompt=a"], "--class_prompt does nothing without --preserve_prior"),
        (["--rank=4", "--prior_every=2"], "--prior_every does nothing without --preserve_prior"),
        (["--rank=4", *PRIOR, "--trigger=dog"], "--trigger needs words, and one --class_prompt"),
        (
            ["--rank=4", "--preserve_prior", "--trigger=sks dog", "--class_prompt=a sks dog"],
            "--class_prompt 'a sks dog' is what the LoRA must learn: describe what must not change",
        ),
        (
            ["--rank=4", "--preserve_prior", "--class_prompt", "a", "b", "--instance_prompt=b"],
            "--class_prompt 'b' is what the LoRA must learn",
        ),
        (["--rank=4", *PRIOR, "--prior_every=0"], "argument --prior_every: 0 is not between 1"),
    ],
)
def test_bad_prior_flags_end_in_one_line(argv, sentence):
    argv = ["--pretrained_model_name_or_path=sd", "--train_data_dir=.", "--resolution=8", *argv]
    assert sentence in train.refused(*argv, status=2).splitlines()[-1]


@pytest.mark.long
def test_auto_batch_size_and_range_test_work_with_a_prior(tmp_path, flags):
    train(*flags, "--find_lr", "--find_lr_steps=10")
    assert json.loads((tmp_path / "out/find_lr.json").read_text())["suggestion"] > 0
    train(*flags, "--train_batch_size=auto", "--max_train_steps=1")
