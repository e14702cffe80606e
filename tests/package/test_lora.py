"""LoRA: trained, shared and refused layers; files that give the trained model at strength 1."""

import argparse
import json

import pytest
import torch
from conftest import adapt_unet, make_models, open_pipeline
from diffusers import StableDiffusionPipeline, UNet2DConditionModel
from diffusers.training_utils import _collate_lora_metadata
from peft import get_peft_model_state_dict
from safetensors import safe_open
from safetensors.torch import load_file

from diffusion_training.families.known import load_family
from diffusion_training.host_memory import HostMemory
from diffusion_training.models import (
    AveragedWeights,
    copy_trained,
    list_parameters,
    start_average,
    update_ema,
)
from diffusion_training.training.keeping.checkpoint_copy import CheckpointCopy, count_copy
from diffusion_training.training.lora.lora import (
    fold_scale,
    list_adapter,
    list_lora_b,
    load_adapter,
    load_network_weights,
    save_adapter,
    save_lora,
)

FAMILY = load_family("sd")
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_models(tmp_path_factory.mktemp("base"))


def adapted(folder, dtype=torch.float32, **flags):
    unet = UNet2DConditionModel.from_pretrained(folder, subfolder="unet").eval()
    flags["layers"] = flags.pop("lora_layers", "attention")
    return adapt_unet(unet, dtype=dtype, **flags)


def load_file_into(unet, path):
    load_network_weights(unet, path, "unet", FAMILY.convert_lora)


def predict(unet):
    torch.manual_seed(1)
    with torch.no_grad():
        return unet(torch.randn(2, 4, 8, 8), torch.tensor([5, 900]), torch.randn(2, 8, 32)).sample


@pytest.mark.parametrize("layers", ["attention", "all"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_the_adapter_is_trained_in_float32(base, layers, dtype):
    unet = adapted(base, dtype, lora_layers=layers, use_dora=True)
    for name, weight in unet.named_parameters():
        assert weight.requires_grad == ("lora_" in name) and weight.dtype == (
            torch.float32 if "lora_" in name else dtype
        )
    ends = {
        name.split(".lora_A")[0].split(".")[-1]
        for name, _ in unet.named_parameters()
        if "lora_A" in name
    }
    assert ({"conv1", "proj_in", "2"} <= ends) == (layers == "all") and "to_q" in ends
    assert sum(map(torch.Tensor.numel, list_parameters({"unet": unet}))) == sum(
        weight.numel() for name, weight in unet.named_parameters() if "lora_" in name
    )


def test_dora_magnitudes_are_computed_from_float32_weights(base):
    """So a DoRA starts equal to its base, also if the base is in bfloat16."""
    exact, half = (adapted(base, dtype, use_dora=True) for dtype in (torch.float32, torch.bfloat16))
    pairs = zip(exact.named_parameters(), half.named_parameters(), strict=True)
    found = [torch.equal(one, other) for (name, one), (_, other) in pairs if "magnitude" in name]
    assert len(found) > 4 and all(found)


def test_ema_and_trial_copies_share_the_frozen_weights(base):
    models = {"unet": adapted(base)}
    averaged = start_average(models)
    for copied in (averaged["unet"], copy_trained(models["unet"])):
        for one, other in zip(models["unet"].parameters(), copied.parameters(), strict=True):
            assert (one is other) != one.requires_grad and (one is other) == (
                one.data_ptr() == other.data_ptr()
            )
    assert not any(weight.requires_grad for weight in averaged["unet"].parameters())
    before = [weight.clone() for weight in models["unet"].parameters()]
    with torch.no_grad():
        for weight in list_parameters(models):
            weight += 1
    update_ema(
        AveragedWeights.of(averaged, models),
        1,
        argparse.Namespace(ema_max_decay=0.9, ema_power=0.75, ema_inv_gamma=1.0),
    )
    for one, other, was in zip(
        averaged["unet"].parameters(), models["unet"].parameters(), before, strict=True
    ):
        # the first EMA step copies the weights
        assert torch.equal(one, other) and torch.equal(one, was) != other.requires_grad


FORMS = [
    {"lora_alpha": 1},
    {},
    {"lora_alpha": 16, "use_rslora": True},
    {"rank": 3, "lora_alpha": 10, "lora_layers": "all"},
]


def test_a_second_name_is_a_copy_where_links_are_impossible(tmp_path, base, monkeypatch):
    def refuse(*given):
        raise OSError("no links here")

    monkeypatch.setattr("os.link", refuse)
    save_lora({"unet": adapted(base)}, tmp_path, None, "dog")
    one, other = (tmp_path / f"{name}.safetensors" for name in ("dog", "pytorch_lora_weights"))
    assert one.read_bytes() == other.read_bytes() and not one.samefile(other)


@pytest.mark.parametrize(
    "flags, kohya",
    [*((form, kohya) for form in FORMS for kohya in (False, True)), ({"use_dora": True}, False)],
)
def test_lora_files_give_the_trained_model_at_strength_1(tmp_path, base, flags, kohya, monkeypatch):
    """For any alpha, through diffusers' own reader, without rounding to float16."""
    unet = adapted(base, **flags)
    monkeypatch.setattr(torch.Tensor, "half", torch.Tensor.float)
    metadata = FAMILY.describe_for_sd_scripts(unet)
    save_lora({"unet": unet}, tmp_path, metadata if kohya else None)
    name = "pytorch_lora_weights_kohya.safetensors" if kohya else "pytorch_lora_weights.safetensors"
    pipeline = open_pipeline(base)
    without = predict(pipeline.unet.eval())
    pipeline.load_lora_weights(tmp_path, weight_name=name)
    trained, found = predict(unet), predict(pipeline.unet)
    effect = (trained - without).abs().max()
    assert effect > 0.01 and (found - trained).abs().max() < 1e-5 * effect
    if kohya:
        weights = load_file(tmp_path / name)
        with safe_open(tmp_path / name, "pt") as file:
            about = file.metadata()
        rank = str(flags.get("rank", 4))
        assert {str(int(value)) for key, value in weights.items() if key.endswith(".alpha")} == {
            rank
        }
        assert about == {
            "ss_network_module": "networks.lora", "ss_network_dim": rank, "ss_network_alpha": rank,
            "ss_base_model_version": "sd_v1", "ss_v2": "False",
        }  # fmt: skip
        assert (
            "lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn1_to_q.lora_down.weight"
            in weights
        )


def test_save_lora_writes_the_ema_adapter(tmp_path, base):
    models = {"unet": adapted(base), "unet_ema": adapted(base, seed=1)}
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    save_lora(models, tmp_path / "one", None)
    save_lora({"unet": models["unet_ema"]}, tmp_path / "other", None)
    one, other = (
        load_file(tmp_path / name / "pytorch_lora_weights.safetensors") for name in ("one", "other")
    )
    assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
    with torch.no_grad():
        # one number of the EMA adapter is beyond float16
        list_lora_b(models)[-1].view(-1)[0] = 70000.0
    with pytest.raises(ValueError, match="the weights of the adapter are not finite in float16"):
        save_lora(models, tmp_path, None)


def test_fold_scale_below_1_balances_the_largest_values_of_a_and_b():
    a, b = torch.randn(2, 5), torch.randn(3, 2)
    b[0] = 0  # some zeros change nothing
    adapter = {"x.lora_A.weight": a, "x.lora_B.weight": b}
    for scale in (1 / 16, 4.0):
        folded = fold_scale(adapter, scale)
        found_a, found_b = folded["x.lora_A.weight"], folded["x.lora_B.weight"]
        torch.testing.assert_close(found_b @ found_a, scale * b @ a)
        if scale < 1:
            torch.testing.assert_close(found_a.abs().max(), found_b.abs().max())
        else:
            assert torch.equal(found_a, a)
    for name in adapter:  # an adapter of zeros can't be balanced
        nothing = fold_scale(adapter | {name: torch.zeros_like(adapter[name])}, 0.5)
        assert all(value.isfinite().all() for value in nothing.values())


@pytest.mark.parametrize("flags", [{}, {"use_dora": True}, {"lora_type": "lokr", "lokr_factor": 2}])
def test_list_adapter_has_the_names_of_peft(base, flags):
    unet = adapted(base, torch.float32, **flags)
    found, expected = list_adapter(unet), get_peft_model_state_dict(unet)
    assert [*found] == [*expected] and all(map(torch.equal, found.values(), expected.values()))


def test_files_of_a_copy_without_base_are_those_of_the_model(tmp_path, base):
    """They are made later, in the thread that writes them; a DoRA's need the norms of the base."""
    for number, flags in enumerate(({}, {"use_dora": True})):
        unet = adapted(base, torch.float32, **flags)
        for weight in unet.parameters():
            if weight.requires_grad:
                torch.nn.init.normal_(weight, std=0.1)
        expected, folder = tmp_path / f"{number}-before", tmp_path / f"{number}"
        expected.mkdir()
        folder.mkdir()
        save_lora({"unet": unet}, expected, {})
        memory = HostMemory(count_copy({"unet": unet}, 0), CPU)
        copy = CheckpointCopy({"unet": unet}, memory, CPU)
        optimizer = torch.optim.SGD(unet.parameters())
        copy.take(optimizer)
        write = unet.adapter.prepare_files({"unet": unet}, copy.copies, {})
        with torch.no_grad():  # the training goes on
            for weight in unet.parameters():
                weight.mul_(2 if weight.requires_grad else 1)
        write(folder)
        names = [path.name for path in sorted(expected.iterdir())]
        assert len(names) == 2
        for name in names:
            assert (folder / name).read_bytes() == (expected / name).read_bytes()
        copy.take(optimizer)  # and the next checkpoint has the new values
        doubled = copy.copies["unet"].named_parameters()
        own = dict(unet.named_parameters())
        assert all(torch.equal(value, own[name]) for name, value in doubled if "lora_" in name)


@pytest.mark.parametrize("use_dora", [False, True])
def test_a_saved_adapter_is_loaded_exactly_and_has_no_base_weights(tmp_path, base, use_dora):
    unet, other = (
        adapted(base, lora_layers="all", use_dora=use_dora, seed=seed) for seed in (0, 1)
    )
    save_adapter(unet.to(memory_format=torch.channels_last), tmp_path / "unet")  # as on CUDA
    assert sum(
        value.numel() for value in load_file(tmp_path / "unet/adapter_model.safetensors").values()
    ) == sum(weight.numel() for weight in list_parameters({"unet": unet}))
    load_adapter(other, tmp_path / "unet")
    assert all(
        torch.equal(*pair) for pair in zip(unet.parameters(), other.parameters(), strict=True)
    )


@pytest.mark.parametrize("flags", [
    {}, {"lora_alpha": 16, "use_rslora": True},
    {"lora_alpha": 3, "lora_layers": "all", "use_dora": True},
])  # fmt: skip
@pytest.mark.parametrize("form", ["ours", "kohya", "diffusers"])
def test_network_weights_load_with_the_same_effect_for_any_alpha(
    tmp_path, base, flags, form, monkeypatch
):
    one = adapted(base, **flags)
    monkeypatch.setattr(torch.Tensor, "half", torch.Tensor.float)
    path = tmp_path / f"pytorch_lora_weights{'_kohya' * (form == 'kohya')}.safetensors"
    if form == "diffusers":  # its scripts write alpha into the header
        about = _collate_lora_metadata({"unet": one})
        StableDiffusionPipeline.save_lora_weights(
            tmp_path, unet_lora_layers=list_adapter(one), **about
        )
    else:
        save_lora({"unet": one}, tmp_path, {} if form == "kohya" else None)
    for more in ({}, {"lora_alpha": 2}):
        other = adapted(base, seed=1, **{**flags, **more})
        assert (predict(other) - predict(one)).abs().max() > 0.01
        load_file_into(other, path)
        assert (predict(other) - predict(one)).abs().max() < 2e-6
        assert {weight.dtype for weight in list_parameters({"unet": other})} == {torch.float32}
    half = adapted(base, torch.bfloat16, seed=1, **flags)
    load_file_into(half, path)  # beside a base of another precision
    pairs = zip(list_products(half), list_products(one), strict=True)
    assert all(torch.allclose(*pair, rtol=1e-5, atol=1e-6) for pair in pairs)


def list_products(unet):
    """B @ A of all layers."""
    layers = [layer for layer in unet.modules() if getattr(layer, "lora_A", None)]
    return [
        layer.lora_B["default"].weight.flatten(1) @ layer.lora_A["default"].weight.flatten(1)
        for layer in layers
    ]


def test_network_weights_of_other_layers_or_rank_are_refused(tmp_path, base):
    save_lora({"unet": adapted(base)}, tmp_path, None)
    path = tmp_path / "pytorch_lora_weights.safetensors"
    for flags, said in [
        ({"rank": 2}, "its rank is 4"),
        ({"lora_layers": "to_q,to_k"}, "it has an adapter at .*to_"),
        ({"lora_layers": "all"}, "it has no adapter at "),
    ]:  # fmt: skip
        with pytest.raises(
            SystemExit, match=rf"does not fit; pass the --rank and --lora_layers .* \({said}"
        ):
            load_file_into(adapted(base, **flags), path)
    narrow = UNet2DConditionModel.load_config(base / "unet") | {"cross_attention_dim": 16}
    UNet2DConditionModel.from_config(narrow).save_pretrained(tmp_path / "narrow/unet")
    with pytest.raises(SystemExit, match=r"\(.*attn2.to_[kv] has another width\)"):
        load_file_into(adapted(tmp_path / "narrow"), path)
    for name in ("nothing.safetensors", "test.safetensors"):
        (tmp_path / "test.safetensors").write_bytes(b"no weights")
        with pytest.raises(SystemExit, match="--network_weights .* can't be used"):
            load_file_into(adapted(base), tmp_path / name)


def test_an_adapter_of_another_base_or_form_is_refused(tmp_path, base):
    save_adapter(adapted(base), tmp_path / "unet")
    load_adapter(adapted(base, lora_dropout=0.5), tmp_path / "unet")
    # the same form, written differently
    load_adapter(
        adapted(base, torch.bfloat16, lora_layers="to_v, to_q,to_k,to_out.0"), tmp_path / "unet"
    )
    for flags, said in [
        ({"base": "x"}, "another base"),
        ({"rank": 2}, "r 4 -> 2, lora_alpha 4 -> 2"),
        ({"lora_alpha": 8}, "lora_alpha 4 -> 8"), ({"use_dora": True}, "use_dora False -> True"),
        ({"lora_layers": "to_q"}, r"target_modules \['to_k', .*\] -> \['to_q'\]"),
    ]:  # fmt: skip
        kept = "keep base and flags as they were"
        if "lora_layers" in flags:
            kept += r" \(--lora_layers to_k,to_out\.0,to_q,to_v\)"
        with pytest.raises(SystemExit, match=rf"unet is of another LoRA \({said}\): {kept}, or"):
            load_adapter(adapted(base, **flags), tmp_path / "unet")
    config = json.loads((tmp_path / "unet/adapter_config.json").read_text())
    assert config["r"] == 4 and config["base_sha256"] == "base" and config["lora_dropout"] == 0


@pytest.mark.parametrize("flags, said", [
    ({"lora_layers": "to_q,to_x"}, "the model has no to_x"),
    ({"lora_layers": "nothing"}, "nothing"),
    ({"lora_layers": ""}, "--lora_layers : can't add"),
    ({"lora_layers": "norm1"}, "norm1"),
    ({"lora_layers": "attn1"}, "not supported"),
    ({"rank": 9}, "is only 8"),
])  # fmt: skip
def test_lora_layers_that_can_not_be_adapted_are_refused(base, flags, said):
    with pytest.raises(SystemExit, match="can't add adapters of rank") as stop:
        adapted(base, **flags)
    assert said in str(stop.value) and len(str(stop.value)) < 600


def test_a_rank_may_be_the_full_rank_and_the_header_of_a_file_is_sorted(tmp_path, base):
    header = {name: "" for name in "fedcba"}
    save_lora({"unet": adapted(base, rank=8)}, tmp_path, header)
    content = (tmp_path / "pytorch_lora_weights_kohya.safetensors").read_bytes()
    written = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])["__metadata__"]
    assert [*written] == sorted(written) and {*header} < {*written}
