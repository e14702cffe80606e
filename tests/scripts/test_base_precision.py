"""A LoRA with a base in 8 or 4 bits: loading it, exact resume, files that fit the base."""

import argparse
import importlib.util
import json
import weakref

import pytest
import torch
from conftest import (
    MODELS,
    Script,
    adapt_unet,
    hash_as_before,
    make_captioned,
    make_models,
    make_z_image,
    metrics,
    open_pipeline,
)
from diffusers import (
    PRXTransformer2DModel,
    SD3Transformer2DModel,
    UNet2DConditionModel,
    ZImageTransformer2DModel,
)
from safetensors.torch import load_file, save_file

from diffusion_training.batches import Prepared
from diffusion_training.families.known import load_family
from diffusion_training.launch import check_quantization
from diffusion_training.models import (
    copy_trained,
    hash_weights,
    list_parameters,
    list_quantized,
    read_precision,
    start_average,
)
from diffusion_training.training.lora import quantization
from diffusion_training.training.lora.lora import load_network_weights
from diffusion_training.training.lora.quantization import (
    list_quantizable,
    load_quantized,
    make_quantized_layer,
)
from diffusion_training.training.step.costs import (
    copy_shapes,
    count_flops,
    count_memory,
    describe_trained,
)

pytestmark = pytest.mark.usefixtures("without_figures")
precompute = Script("precompute_latents")
TRAIN = {"sd": Script("train_text_to_image"), "z-image": Script("train_flow")}
NF4 = pytest.param(
    "nf4",
    marks=pytest.mark.skipif(not importlib.util.find_spec("bitsandbytes"), reason="bitsandbytes"),
)
PRECISIONS = pytest.mark.parametrize("base_precision", ["int8", NF4])
FILE = "pytorch_lora_weights.safetensors"
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """Two bases wide enough to be quantized, one with split weights, and a cache for each."""
    folder = tmp_path_factory.mktemp("inputs")
    base = make_models(folder)
    config = UNet2DConditionModel.load_config(base / "unet") | {"block_out_channels": [64, 64]}
    torch.manual_seed(0)
    unet = UNet2DConditionModel.from_config(config | {"attention_head_dim": 16})
    unet.save_pretrained(base / "unet")
    base = make_z_image(folder / "z-image")
    config = ZImageTransformer2DModel.load_config(base / "transformer")
    config = {**config, "dim": 64, "axes_dims": [8, 12, 12]}
    transformer = ZImageTransformer2DModel.from_config(config).bfloat16()
    for path in (base / "transformer").glob("*.safetensors"):
        path.unlink()
    transformer.save_pretrained(base / "transformer", max_shard_size="100KB")
    make_captioned(folder / "images", 7)
    for name in TRAIN:
        flags = precompute.flags(
            folder / f"cache-{name}",
            f"--train_data_dir={folder / 'images'}",
            f"--pretrained_model_name_or_path={MODELS if name == 'sd' else base}",
        )
        precompute(*flags)
    return folder


def list_flags(inputs, name, base_precision, output_dir, *more):
    return TRAIN[name].flags(
        output_dir,
        f"--pretrained_model_name_or_path={inputs / name}",
        f"--latents_dir={inputs / f'cache-{name}'}",
        "--rank=2",
        f"--base_precision={base_precision}",
        *"--mixed_precision=bf16 --train_batch_size=2 --max_train_steps=6".split(),
        *"--learning_rate=1e-2 --lr_warmup_steps=1 --checkpointing_steps=3".split(),
        "--num_validation_images=1",
        *more,
    )


def load_unet(inputs, base_precision, dtype=torch.float32):
    source = str(inputs / "sd")
    return load_quantized(
        UNet2DConditionModel, source, base_precision, CPU, dtype, subfolder="unet"
    )


def adapt(unet, base_hash, dtype=torch.float32, lora_layers="attention", **flags):
    return adapt_unet(unet, lora_layers, base=base_hash, dtype=dtype, **flags)


def predict(unet):
    torch.manual_seed(1)
    return unet(torch.randn(2, 4, 8, 8), torch.tensor([5, 900]), torch.randn(2, 8, 32)).sample


@pytest.mark.parametrize("kind", [SD3Transformer2DModel, PRXTransformer2DModel])
def test_the_blocks_are_quantized_also_where_diffusers_does_not_name_them(kind):
    assert not kind._repeated_blocks
    with torch.device("meta"):
        model = kind()
    blocks = {name.split(".")[0] for name in list_quantizable(model)}
    assert blocks == {"transformer_blocks" if kind is SD3Transformer2DModel else "blocks"}
    numbers = sum(model.get_submodule(name).weight.numel() for name in list_quantizable(model))
    assert numbers > 0.98 * sum(weight.numel() for weight in model.parameters())


@PRECISIONS
def test_base_is_hashed_and_quantized_weight_by_weight(inputs, monkeypatch, base_precision):
    folder = str(inputs / "z-image")
    exact = ZImageTransformer2DModel.from_pretrained(folder, subfolder="transformer")
    assert len(list((inputs / "z-image/transformer").glob("*.safetensors"))) > 3
    assert read_precision(folder, "transformer") == torch.bfloat16
    names = list_quantizable(exact)
    assert 10 < len(names) < sum(isinstance(x, torch.nn.Linear) for x in exact.modules())
    references, held = [], []
    quantize = quantization.quantize

    def watch(layer, weight, dtype):
        references.append(weakref.ref(weight))
        held.append(sum(reference() is not None for reference in references))
        quantize(layer, weight, dtype)

    monkeypatch.setattr(quantization, "quantize", watch)
    model, base_hash = load_quantized(
        ZImageTransformer2DModel, folder, base_precision, CPU, torch.float32,
        subfolder="transformer", with_old=True,
    )  # fmt: skip
    assert base_hash.split() == [hash_weights(exact), hash_as_before(exact)]
    assert len(held) == len(names)
    assert max(held) <= 4  # one per thread
    weights = dict(exact.named_parameters())
    most = {"int8": 0.01, "nf4": 0.15}[base_precision]
    for name, layer in model.named_modules():
        if name in names:
            found = layer(torch.eye(layer.in_features)).T - (
                0 if layer.bias is None else layer.bias[:, None]
            )
            weight = weights[f"{name}.weight"].detach()
            assert 0 < (found - weight).norm() < most * weight.norm()
    kept = {name: x for name, x in model.named_parameters() if x.is_floating_point()}
    assert kept.keys() == weights.keys() - {f"{name}.weight" for name in names}
    assert all(torch.equal(x, weights[name]) for name, x in kept.items())


@PRECISIONS
def test_load_quantized_names_missing_and_mismatched_weights(inputs, tmp_path, base_precision):
    folder = tmp_path / "sd/unet"
    folder.mkdir(parents=True)
    (folder / "config.json").write_bytes((inputs / "sd/unet/config.json").read_bytes())
    weights = load_file(inputs / "sd/unet/diffusion_pytorch_model.safetensors")
    path = folder / "diffusion_pytorch_model.safetensors"
    for changes, said in (
        ({"conv_in.bias": torch.zeros(3)}, "1 mismatched keys, such as conv_in.bias"),
        ({}, "1 missing keys, such as conv_in.bias"),
    ):
        kept = {name: x for name, x in weights.items() if name != "conv_in.bias"}
        save_file(kept | changes, path)
        with pytest.raises(ValueError, match=said):
            load_unet(tmp_path, base_precision)
    path.unlink()
    with pytest.raises(FileNotFoundError, match="has no diffusion_pytorch_model.safetensors"):
        load_unet(tmp_path, base_precision)


@PRECISIONS
def test_only_the_adapter_is_trained_and_copies_share_the_base(inputs, base_precision):
    stored = {"int8": torch.int8, "nf4": torch.uint8}[base_precision]
    unet = adapt(*load_unet(inputs, base_precision, torch.bfloat16), torch.bfloat16)
    for name, weight in unet.named_parameters():
        assert weight.requires_grad == ("lora_" in name)
        kinds = (torch.float32,) if "lora_" in name else (torch.bfloat16, stored)
        assert weight.dtype in kinds
    layers = list_quantized(unet)
    assert len(layers) > 10 and {layer.compute_dtype for layer in layers} == {torch.bfloat16}
    assert {layer.weight.dtype for layer in layers} == {stored}
    for copied in (copy_trained(unet), start_average({"unet": unet})["unet"]):
        for one, other in zip(unet.parameters(), copied.parameters(), strict=True):
            assert (one is other) != one.requires_grad
        for one, other in zip(layers, list_quantized(copied), strict=True):
            name = {"int8": "scale", "nf4": "quant_state"}[base_precision]
            assert getattr(one, name) is getattr(other, name)


@PRECISIONS
def test_every_factor_of_a_lokr_beside_a_quantized_base_is_trained(inputs, base_precision):
    unet, base_hash = load_unet(inputs, base_precision, torch.bfloat16)
    flags = {"lora_type": "lokr", "lokr_factor": 4, "lora_layers": "all"}
    unet = adapt(unet, base_hash, torch.bfloat16, **flags)
    with torch.autocast("cpu", torch.bfloat16):
        predict(unet).square().sum().backward()
    for name, weight in unet.named_parameters():
        assert weight.requires_grad == (".lokr_" in name) == (weight.grad is not None)
        assert weight.grad is None or (weight.dtype, weight.grad.any()) == (torch.float32, True)


@PRECISIONS
def test_sampling_does_not_change_quantized_weights(inputs, base_precision):
    """CPU kernels for sampling would rearrange nf4's weights, which then have no gradient."""
    unet = adapt(*load_unet(inputs, base_precision)).train()
    before = [weight.clone() for weight in unet.parameters()]
    gradients = []
    for _ in range(2):
        predict(unet).square().sum().backward()
        gradients.append([weight.grad.clone() for weight in list_parameters({"unet": unet})])
        unet.zero_grad()
        with torch.no_grad():
            predict(unet.eval())
        unet.train()
    assert all(map(torch.equal, before, unet.parameters()))
    assert all(x.any() for x in gradients[0]) and all(map(torch.equal, *gradients))


@PRECISIONS
def test_flops_and_memory_of_a_quantized_base_are_counted(inputs, base_precision):
    """The FLOPs are those of an exact base. A weight takes a byte or half a byte, plus scales."""
    exact = UNet2DConditionModel.from_pretrained(inputs / "sd", subfolder="unet")
    unets = [adapt(exact, "hash"), adapt(*load_unet(inputs, base_precision))]

    def loss(models, prepared, weight):
        embeds = prepared.condition["prompt_embeds"]
        times = torch.zeros(1)
        return models["unet"](prepared.clean, times, embeds).sample.sum()

    prepared = Prepared(torch.zeros(1, 4, 8, 8), {"prompt_embeds": torch.zeros(1, 8, 32)}, {})
    objective = argparse.Namespace(loss=loss)
    flops = [
        count_flops(*copy_shapes(({"unet": unet}, objective), {"unet": unet}), prepared)
        for unet in unets
    ]
    assert flops[0] == flops[1] > 0
    sizes = [
        count_memory({"unet": unet}, start_average({"unet": unet}), [], 1, "adamw")
        for unet in unets
    ]
    layers = list_quantized(unets[1])
    numbers = sum(layer.in_features * layer.out_features for layer in layers)
    scales = 4 * sum(layer.out_features for layer in layers)  # of int8
    held = {"int8": numbers + scales, "nf4": numbers * (0.5 + 4 / 64)}[base_precision]
    assert sizes[0].pop("weights") - sizes[1].pop("weights") == 4 * numbers - held
    assert sizes[0] == sizes[1]
    assert describe_trained({"unet": unets[0]}) == describe_trained({"unet": unets[1]})


def test_int8_layer_has_the_gradient_of_its_restored_weights():
    """A row of zeros stays one, and no number leaves the range of int8."""
    torch.manual_seed(0)
    weight = torch.randn(6, 64) * torch.tensor([1, 0, 1e-20, 1e3, 3, 0.1])[:, None]
    layer = make_quantized_layer(torch.nn.Linear(64, 6), "int8")
    layer.bias = torch.nn.Parameter(torch.randn(6), requires_grad=False)
    layer.quantize(weight.repeat(6000, 1))  # it is quantized in parts of 2**20 numbers
    layer.scale, layer.weight.data = layer.scale[-6:], layer.weight[-6:]
    restored = layer.scale.float()[:, None] * layer.weight.float()
    assert (restored - weight).abs().amax(1).le(0.51 * layer.scale.float()).all()
    assert not restored[1].any() and layer.weight.abs().amax(1).tolist() == [127, 0, *[127] * 4]
    inputs = torch.randn(2, 3, 64, requires_grad=True)
    results = []
    for product in (layer, lambda x: torch.nn.functional.linear(x, restored, layer.bias)):
        result = product(inputs)
        (gradient,) = torch.autograd.grad((result / (1 + result.abs().detach())).sum(), inputs)
        results.append((result, gradient))
    for own, exact in zip(*results, strict=True):
        torch.testing.assert_close(own, exact, rtol=1e-5, atol=1e-3)
    layer.compute_dtype = torch.bfloat16
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(inputs).dtype == torch.bfloat16


@pytest.mark.parametrize("name, num_processes, more, base_precision", [
    pytest.param(
        "sd", 1, ["--lora_layers=all", "--lora_dropout=0.1", "--optimizer=adamw8bit"], *NF4.values,
        marks=[*NF4.marks, pytest.mark.long],
    ),
    pytest.param(
        "z-image", 2, ["--gradient_checkpointing"], *NF4.values,
        marks=[*NF4.marks, pytest.mark.long],
    ),
    ("z-image", 1, ["--num_inference_steps=1"], "int8"),
    pytest.param("sd", 1, ["--lora_layers=all"], "int8", marks=pytest.mark.long),
    pytest.param("z-image", 2, ["--gradient_checkpointing"], "int8", marks=pytest.mark.long),
])  # fmt: skip
def test_runs_with_a_quantized_base_resume_bit_identically_and_fit_the_exact_base(
    tmp_path, inputs, name, num_processes, more, base_precision
):
    looked = ["--holdout=2", "--validation_prompts=a", "--validation_steps=3"]
    whole, rest = tmp_path / "whole", tmp_path / "rest"
    resume = [f"--resume_from_checkpoint={whole / 'checkpoint-3'}"]
    for folder, again in ((whole, []), (rest, resume)):
        flags = list_flags(inputs, name, base_precision, folder, *more, *looked, *again)
        TRAIN[name].fork(*flags, num_processes=num_processes)
    model = "transformer" if name == "z-image" else "unet"
    for path in (
        FILE,
        f"checkpoint-6/{model}/adapter_model.safetensors",
        f"checkpoint-6/{model}_ema/adapter_model.safetensors",
        "checkpoint-6/optimizer.bin",
        "samples/step-0000006.png",
    ):
        assert (whole / path).read_bytes() == (rest / path).read_bytes(), path
    records = [record for record in metrics(whole) if "held_out_loss" in record]
    assert len(records) == 3 and records[-1] in metrics(rest)
    config = json.loads((whole / f"checkpoint-6/{model}/adapter_config.json").read_text())
    assert config["quantization"] == base_precision
    if name == "sd":
        pipeline = open_pipeline(inputs / name)
        assert config["base_sha256"] == hash_weights(pipeline.unet)
        before = predict(pipeline.unet.eval())
        pipeline.load_lora_weights(whole)
        trained = adapt(*load_unet(inputs, base_precision), lora_layers="all", rank=2)
        load_network_weights(trained, whole / FILE, "unet", load_family("sd").convert_lora)
        effect = (predict(pipeline.unet) - before).abs().max()
        rounding = (predict(trained.eval()) - predict(pipeline.unet)).abs().max()
        assert 0 < rounding < effect / {"int8": 20, "nf4": 3}[base_precision]


@PRECISIONS
def test_runs_keep_their_base_precision_and_refuse_unsupported_flags(
    tmp_path, inputs, capfd, base_precision
):
    out = tmp_path / "out"
    few = ["--max_train_steps=1"]
    train = TRAIN["sd"]
    train(*list_flags(inputs, "sd", base_precision, out, *few))
    assert "Memory in use: " in capfd.readouterr().out
    flags = list_flags(inputs, "sd", base_precision, out, "--resume_from_checkpoint=latest")
    exact = [flag for flag in flags if not flag.startswith("--base_precision")]
    for argv, said in (
        (exact, f"is of another LoRA (quantization {base_precision} -> None): keep base"),
        ([*flags, "--mixed_precision=fp16"], "fp16 does nothing on a CPU"),
        (
            [*flags, f"--pretrained_model_name_or_path={make_models(tmp_path)}"],
            f"--base_precision {base_precision}: no layer of ",
        ),
    ):
        assert said in train.refused(*argv)
    whole = [flag for flag in flags if flag != "--rank=2" and "resume" not in flag]
    for argv, said in (
        ([*flags, "--use_dora"], "--use_dora needs the exact weights of the base"),
        (whole, "--base_precision does nothing without --rank"),
    ):
        assert said in train.refused(*argv, status=2)
    if base_precision == "nf4":
        said = "--base_precision nf4 can't be compiled: leave --compile out"
        assert said in train.refused(*flags, "--compile")
    with pytest.raises(SystemExit, match=f"{base_precision} computes in bfloat16 or float32: use"):
        check_quantization(base_precision, "fp16", None)
    again = list_flags(
        inputs, "sd", base_precision, tmp_path / "more", *few, f"--network_weights={out / FILE}"
    )
    train(*again, "--learning_rate=0")
    assert (tmp_path / "more" / FILE).read_bytes() == (out / FILE).read_bytes()


@pytest.mark.parametrize(
    "backend",
    [
        pytest.param("eager", marks=pytest.mark.ci),
        pytest.param("aot_eager", marks=pytest.mark.long),
    ],
)
def test_an_int8_base_can_be_compiled(tmp_path, inputs, backend):
    few = ["--max_train_steps=2", "--checkpointing_steps=2", "--num_validation_images=0"]
    for name, more in (("plain", []), ("compiled", [f"--compile={backend}"])):
        TRAIN["sd"](*list_flags(inputs, "sd", "int8", tmp_path / name, *few, *more))
    plain, compiled = (load_file(tmp_path / name / FILE) for name in ("plain", "compiled"))
    for name, weight in plain.items():
        # Adam's first steps turn on the sign of gradients, so few numbers may differ by a step
        assert (compiled[name].float() - weight.float()).norm() < 0.3 * weight.float().norm()
