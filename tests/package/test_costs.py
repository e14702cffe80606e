"""Costs of a run: memory as torch counts it, to the byte; operations by closed forms."""

import argparse
import re
import shutil
from functools import partial

import pytest
import torch
from accelerate import Accelerator
from conftest import make_captioned, make_models, metrics, needs, reset
from diffusers import DDPMScheduler, UNet2DConditionModel
from diffusers.models.attention_processor import Attention
from safetensors.torch import load_file
from test_lora import adapted
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import train_text_to_image as script
import train_unconditional
from diffusion_training.batches import Objective, Prepared
from diffusion_training.blocks import checkpoint_gradients, list_checkpointed
from diffusion_training.launch import Launch
from diffusion_training.models import list_parameters, start_average
from diffusion_training.training import saver
from diffusion_training.training.step import costs
from diffusion_training.training.step.costs import (
    Costs,
    copy_shapes,
    count_flops,
    count_memory,
    count_moments,
    describe_trained,
    find_peak,
)
from diffusion_training.training.step.optimizers import make_optimizer

CPU_ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
CONDITION = {"encoder_hidden_states": torch.zeros(3, 8, 32)}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return make_models(tmp_path_factory.mktemp("base"))


def args(**flags):
    flags = {
        "optimizer": "adamw",
        "learning_rate": 1e-3,
        "adam_weight_decay": 0.01,
        "adam_epsilon": 1e-8,
        **flags,
    }
    return argparse.Namespace(adam_beta1=0.9, adam_beta2=0.999, **flags)


def plan(number):
    """The flags of gradient checkpointing of so many blocks."""
    flags = {"gradient_checkpointing": False, "keep_attention": False}
    return argparse.Namespace(checkpoint_blocks=number, **flags)


def call_unet(model, *inputs):
    return train_unconditional.predict_noise({"unet": model}, *inputs)


def loss_of(call):
    """A `compute_loss` with the operations of `call(model, images, timesteps, condition)` alone."""

    def loss(objective, models, prepared, weight):
        images, condition, _ = prepared
        timesteps = torch.zeros(len(images))
        called = [call(model, images, timesteps, condition) for model in models.values()]
        return sum(prediction.sum() for prediction in called)

    return loss


def objective_of(loss, predict=None, **frozen):
    return Objective(None, predict, loss, None, None, frozen)


def count(models, loss, images, condition=CONDITION, predict=None):
    """Count the operations on one image."""
    copies = copy_shapes((models, objective_of(loss, predict)), models, with_norms=False)
    return count_flops(*copies, Prepared(images, condition, {}))


def make_costs(models, loss, accelerator=None, mixed_precision="no", compile=None):
    launch = Launch(accelerator or Accelerator(cpu=True), 1, mixed_precision, compile, 1)
    return Costs(launch, models, {}, objective_of(loss), "adamw", False)


PREPARED = Prepared(torch.zeros(3, 4, 8, 8), CONDITION, {})


def unet_of(base):
    return UNet2DConditionModel.from_pretrained(base, subfolder="unet")


@pytest.mark.parametrize("lora", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "optimizer", ["adamw", pytest.param("adamw8bit", marks=needs("bitsandbytes")), "adafactor"]
)
def test_estimated_memory_equals_the_storage_that_torch_holds(base, lora, optimizer):
    """Counted by storage, so that weights shared with the average count once."""
    model = adapted(base, lora, lora_layers="all") if lora else unet_of(base)
    models, frozen = {"unet": model}, [torch.nn.Linear(3, 5)]
    averaged, made = start_average(models), make_optimizer(models, args(optimizer=optimizer))
    said = count_memory(models, averaged, frozen, 1, optimizer)
    sum(weight.sum() for weight in list_parameters(models)).backward()
    made.step()

    def size(tensors):
        return sum(
            {
                x.data_ptr(): x.nbytes() for x in (each.untyped_storage() for each in tensors)
            }.values()
        )

    # not the tables of the 8-bit numbers, which all parameters share, nor 4 bytes for each weight
    others = ("step", "qmap1", "qmap2", "RMS")
    state = [x for each in made.state.values() for name, x in each.items() if name not in others]
    found = {
        "weights": size(model.parameters()),
        "gradients": size(x.grad for x in list_parameters(models)),
    }
    both = size([*model.parameters(), *averaged["unet"].parameters()])
    found |= {"averaged": both - found["weights"], "moments": size(state), "encoders": 4 * 20}
    assert said == found | {"two swapped blocks": 0, "exchanged gradients": 0}
    assert count_memory(models, {}, [], 2, optimizer)["exchanged gradients"] == found["gradients"]


@pytest.mark.parametrize("optimizer, count, in_block, expected", [
    ("adamw", 15, True, 2 * 4 * 15), ("muon", 15, True, 4 * 15), ("muon", 15, False, 2 * 4 * 15),
    ("prodigy", 15, False, 4 * 4 * 15),
    # bitsandbytes keeps 8 bits from 4,096 numbers on, and a float32 per 256 of them
    ("adamw8bit", 4095, False, 2 * 4 * 4095), ("adamw8bit", 4096, False, 2 * (4096 + 4 * 16)),
    ("adamw8bit", 4097, False, 2 * (4097 + 4 * 17)),
])  # fmt: skip
def test_count_moments_equals_the_state_of_the_optimizer(optimizer, count, in_block, expected):
    assert count_moments(torch.zeros(1, count), optimizer, in_block) == expected


def test_describe_trained_counts_two_weights_per_stored_4_bit_number(base, monkeypatch):
    """It counts a layer's weights, not the stored numbers, each of which may hold two."""
    model = adapted(base)
    total = sum(weight.numel() for weight in model.parameters())
    count = sum(weight.numel() for weight in list_parameters({"unet": model}))
    for packed in (
        [],
        [argparse.Namespace(weight=model.conv_in.weight, in_features=1, out_features=10**5)],
    ):
        monkeypatch.setattr(costs, "list_quantized", lambda model, packed=packed: packed)
        more = sum(10**5 - layer.weight.numel() for layer in packed)
        said = f"LoRA of rank 4: {count:,} of {total + more:,} weights"
        assert describe_trained({"unet": model}) == said


def test_operations_of_4_bit_layers_count_as_those_of_frozen_layers(monkeypatch):
    packed = torch.nn.Linear(4, 6, bias=False).requires_grad_(False)
    model = torch.nn.Sequential(packed, torch.nn.Linear(6, 2))
    monkeypatch.setattr(costs, "list_quantized", lambda model: [packed])
    copied = copy_shapes({"one": model}, {"one": model})["one"]
    assert type(copied[0]) is torch.nn.Linear and copied[0].weight.shape == (6, 4)
    assert copied[0].bias is None and all(weight.is_meta for weight in copied.parameters())
    assert [weight.requires_grad for weight in copied.parameters()] == [False, True, True]


def test_memory_of_shard_has_bf16_copies_unless_gradients_are_checkpointed(base, capsys):
    for precision, number, said in (
        ("bf16", 0, True),
        ("bf16", 1, True),
        ("bf16", 99, False),
        ("no", 0, False),
        ("no", 99, False),
    ):
        model = unet_of(base)
        checkpoint_gradients({"unet": model}, plan(number))
        launch = Launch(Accelerator(cpu=True), 1, precision, None, 1, True)
        objective = objective_of(loss_of(call_unet))
        Costs(launch, {"unet": model}, {}, objective, "adamw", False)
        assert ("copies in bf16" in capsys.readouterr().out) == said


def test_operations_of_a_convolution_follow_the_closed_form():
    """2 x pixels x kernel x input channels x output channels, three times.

    Once forward, once for the weights' gradient and once for the input's.
    """
    layer = torch.nn.Conv2d(6, 10, 3, stride=2, padding=1)
    forward = 2 * (8 * 12) * 9 * 6 * 10
    loss = loss_of(lambda model, images, timesteps, condition: model(images))
    first = count({"one": layer}, loss, torch.zeros(5, 6, 16, 24), {})
    assert first == 2 * forward  # the images need no gradient
    twice = torch.nn.Sequential(torch.nn.Conv2d(6, 6, 1), layer)
    own = 2 * (16 * 24) * 36
    both = count({"one": twice}, loss, torch.zeros(5, 6, 16, 24), {})
    assert both == 3 * forward + 2 * own


def test_operations_of_an_attention_block_follow_the_closed_form():
    """Four projections and the products with keys and values; backward takes twice as many."""
    tokens, words, width, others = 40, 7, 16, 24
    block = Attention(width, cross_attention_dim=others, heads=2, dim_head=8)
    loss = loss_of(lambda model, images, timesteps, condition: model(images, **condition))
    condition = {"encoder_hidden_states": torch.zeros(2, words, others)}
    found = count({"a": block}, loss, torch.zeros(2, tokens, width), condition)
    products = 3 * 2 * (2 * tokens * words * width)
    # keys and values of the text, which needs no gradient
    weights = 2 * (tokens * width * width + 2 * words * others * width)
    assert found == products + 2 * weights + 3 * 2 * tokens * width * width


def test_operations_do_not_depend_on_checkpointing_compiling_or_precision(base):
    model = unet_of(base).train()
    images = torch.zeros(3, 4, 8, 8)
    loss = loss_of(call_unet)
    of_one = lambda model: count({"unet": model}, loss, images)
    once = of_one(model)
    assert count({"a": model, "b": unet_of(base)}, loss, images) == 2 * once
    checkpoint_gradients({"unet": model}, plan(99))
    assert of_one(model) == once and list_checkpointed(model)  # only off in the copy
    model.compile(backend="aot_eager")
    assert of_one(Accelerator(cpu=True, mixed_precision="bf16").prepare(model)) == once
    exact, half = (of_one(adapted(base, dtype)) for dtype in (torch.float32, torch.bfloat16))
    assert exact == half and 0.6 * once < exact < 0.9 * once  # frozen weights need no gradient


def test_operations_include_networks_that_only_the_loss_uses(base):
    unet, images = unet_of(base).train(), torch.zeros(3, 4, 8, 8)
    flags = argparse.Namespace(
        noise_offset=0.1, input_perturbation=0.1, snr_gamma=5.0, min_timestep=0, max_timestep=1000
    )
    predict = script.predict_noise
    real = partial(script.compute_loss, flags, DDPMScheduler())
    prompts = {"prompt_embeds": CONDITION["encoder_hidden_states"]}
    once = count({"unet": unet}, loss_of(call_unet), images)
    assert count({"unet": unet}, real, images, prompts, predict) == once

    teacher = unet_of(base).requires_grad_(False)

    def compare(objective, models, prepared, weight):
        images, condition, _ = prepared
        timesteps, frozen = torch.zeros(len(images)), {"unet": objective.frozen["teacher"]}
        seen = objective.predict(frozen, images, timesteps, condition)
        return seen.sum() + real(objective, models, prepared, weight)

    objective = objective_of(compare, predict, teacher=teacher)
    copies = copy_shapes(({"unet": unet}, objective), {"unet": unet}, [teacher], with_norms=False)
    found = count_flops(*copies, Prepared(images, prompts, {}))
    assert 1.3 * once < found < 1.4 * once  # without gradients, so it is a third of one
    copied = copies[1].frozen["teacher"]
    assert all(weight.is_meta for weight in copied.parameters())
    assert not any(weight.is_meta for weight in (*teacher.parameters(), *unet.parameters()))


def test_counting_operations_changes_neither_random_state_nor_model(base):
    model, draw = unet_of(base).train(), torch.get_rng_state()
    before = [weight.clone() for weight in model.parameters()]
    count({"unet": model}, loss_of(call_unet), torch.zeros(1, 4, 8, 8))
    assert torch.equal(draw, torch.get_rng_state()) and all(
        x.grad is None for x in model.parameters()
    )
    assert all(
        torch.equal(one, other) for one, other in zip(before, model.parameters(), strict=True)
    )


def test_costs_measures_tflops_per_device_and_mfu(base, capsys):
    made = make_costs({"unet": unet_of(base)}, loss_of(call_unet))
    line = re.fullmatch(
        r"Trains: [\d,]+ weights\n"
        r"Memory needed: (\S+) MB = (\S+) weights \+ (\S+) gradients \+ (\S+) moments, plus .*\n",
        capsys.readouterr().out,
    )
    assert float(line[1]) == pytest.approx(4 * float(line[2]), rel=0.01)
    assert (
        made.measure(10.0).keys() == {"memory_gb", "host_gb"}
        and 0.1 < made.measure(10.0)["memory_gb"] < 100
    )
    models = {"unet": unet_of(base)}
    objective = made.count_first(objective_of(loss_of(call_unet)))
    with torch.no_grad():  # as for the inputs of --preserve_prior
        objective.loss(models, PREPARED, torch.ones(3))
    assert made.measure(10.0).keys() == {"memory_gb", "host_gb"}
    for image in (PREPARED.clean, torch.zeros(3, 4, 16, 16)):  # only the first one counts
        objective.loss(models, PREPARED._replace(clean=image), torch.ones(3)).backward()
    assert made.flops == count(models, loss_of(call_unet), PREPARED.clean)
    made.num_processes, made.peak = 2, 1e-3
    found = made.measure(10.0)
    assert found["tflops"] == pytest.approx(5 * made.flops / 1e12) and found[
        "mfu"
    ] == pytest.approx(found["tflops"] / 1e-3)
    assert made.describe().startswith("Memory in use: ") and made.describe().endswith(
        "of this process and its data loader"
    )


def test_costs_names_the_kernels_of_attention_on_a_gpu(monkeypatch):
    monkeypatch.setattr(costs, "ATTENTION", costs.ATTENTION | {CPU_ATTENTION: "a kernel"})
    made = make_costs({"model": torch.nn.Linear(1, 1)}, None)

    def attend(own, models, prepared, weight):
        images = prepared.clean
        torch.nn.functional.scaled_dot_product_attention(images, images, images)
        with sdpa_kernel(SDPBackend.MATH):
            for _ in range(2):
                torch.nn.functional.scaled_dot_product_attention(images, images, images)
        return images.sum()

    made.count_first(objective_of(attend)).loss({}, PREPARED, torch.ones(3))
    assert made.describe_attention() == ""
    made.total_gb = 80.0
    said = "Attention: a kernel (1 x), separate products, slow and with more memory (2 x)"
    assert made.describe_attention() == said


def test_training_goes_on_if_operations_can_not_be_counted(base, monkeypatch, capsys):
    """For example because torch has changed how it calls a formula."""
    models = {"unet": unet_of(base)}
    loss = loss_of(call_unet)
    made = make_costs(models, loss)
    monkeypatch.setattr(costs, "flop_registry", {torch.ops.aten.addmm: lambda: 1})
    objective = made.count_first(objective_of(loss))
    found = [objective.loss(models, PREPARED, torch.ones(3)) for _ in range(2)]
    assert torch.equal(*found) and torch.equal(
        found[0], objective_of(loss).loss(models, PREPARED, 1)
    )
    assert made.measure(10.0).keys() == {"memory_gb", "host_gb"}
    said = "tflops are not recorded: the model's operations can't be counted ("
    assert capsys.readouterr().err.count(said) == 1


def test_the_first_step_counts_what_torch_counts_in_both_passes(base):
    """torch runs the backward pass, and repeats forward passes of gradient checkpointing."""
    for model in (unet_of(base).train(), adapted(base, torch.float32)):
        models = {"unet": model}
        with FlopCounterMode(display=False) as both:
            loss_of(call_unet)(None, models, PREPARED, None).backward()
        # its fused attention computes the scores again in the backward pass: 5 products, not 4
        repeated = sum(
            flops / 5
            for operator, flops in both.get_flop_counts()["Global"].items()
            if "attention" in str(operator) and "backward" in str(operator)
        )
        # of keys and values of the text, which need no gradient; a LoRA's do
        made = make_costs(models, loss_of(call_unet))
        for number in (0, 99):
            checkpoint_gradients(models, plan(number))
            objective = made.count_first(objective_of(loss_of(call_unet)))
            objective.loss(models, PREPARED, torch.ones(3)).backward()
            assert made.flops == (both.get_total_flops() - repeated) // 3


def test_operations_of_a_compiled_model_are_counted_on_a_copy(base):
    """torch would not use the compiled code in a step that it counts."""
    models = {"unet": unet_of(base)}
    made = make_costs(models, loss_of(call_unet), compile="aot_eager")
    calls = []

    def compiled(*inputs):
        calls.append(torch.utils._python_dispatch._get_current_dispatch_mode())
        return call_unet(*inputs)

    objective = made.count_first(objective_of(loss_of(compiled)))
    objective.loss(models, PREPARED, torch.ones(3))
    assert calls == [None] and made.flops == count(models, loss_of(call_unet), PREPARED.clean)


@pytest.mark.parametrize("name, peaks", [
    ("NVIDIA H100 80GB HBM3", (989, 989, 495)), ("NVIDIA H100 PCIe", (756, 756, 378)),
    ("NVIDIA H200", (989, 989, 495)),
    ("NVIDIA A100-SXM4-80GB", (312, 312, 156)), ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", (None,) * 3),
    ("NVIDIA A10", (125, 125, 62.5)), ("NVIDIA A10G", (None,) * 3), ("NVIDIA L4", (121, 121, 60)),
    ("NVIDIA L40S", (362, 362, 183)), ("Tesla T4", (65, None, None)),
    ("NVIDIA B200", (2250, 2250, 1125)), ("NVIDIA H100 NVL", (835, 835, 418)),
    ("NVIDIA A40", (150, 150, 75)), ("NVIDIA GeForce RTX 3090", (71, 71, 36)),
    ("Tesla V100-SXM2-16GB", (125, None, None)),
    ("NVIDIA GeForce RTX 4090", (165, 165, 83)),
    ("NVIDIA GeForce RTX 4090 Laptop GPU", (None,) * 3),
    ("AMD Instinct MI300X", (None,) * 3),
])  # fmt: skip
def test_find_peak_depends_on_gpu_and_precision(name, peaks):
    found = [find_peak(name, *of) for of in (("fp16", False), ("bf16", True), ("no", True))]
    assert tuple(found) == peaks and find_peak(name, "no", False) is None


def test_costs_reads_memory_and_peak_of_the_gpu(base, monkeypatch, capsys):
    """torch's answers about the GPU are made up."""
    fake = argparse.Namespace(total_memory=80e9)
    resets = []
    monkeypatch.setattr(costs.torch.cuda, "reset_peak_memory_stats", resets.append)
    for name, value in {
        "get_device_properties": fake,
        "get_device_name": "NVIDIA A100-SXM4-80GB",
        "max_memory_allocated": 30e9, "max_memory_reserved": 40e9,
    }.items():  # fmt: skip
        monkeypatch.setattr(costs.torch.cuda, name, lambda *_, value=value: value)
    accelerator = argparse.Namespace(device=torch.device("cuda"), num_processes=1, print=print)
    made = make_costs({"unet": unet_of(base)}, loss_of(call_unet), accelerator, "bf16")
    assert made.describe() == "Memory in use: 30 GB at the peak, 40 reserved, of 80"
    assert resets == [accelerator.device]
    made.flops = 1e12
    measured = made.measure(156.0)
    assert 0.1 < measured.pop("host_gb") < 100
    assert measured == {"memory_gb": 30.0, "tflops": 156.0, "mfu": 0.5}


def test_a_run_prints_estimated_and_measured_memory_and_batch_size_trials(
    tmp_path, base, without_figures, capsys
):
    """The printed memory is that of training the adapter, beside frozen encoders."""
    make_captioned(tmp_path / "images", 4)
    flags = [
        f"--pretrained_model_name_or_path={base}",
        f"--train_data_dir={tmp_path / 'images'}",
        "--resolution=16",
    ]
    flags += [
        "--max_train_steps=2",
        "--report_to=none",
        "--logging_steps=1",
        "--dataloader_num_workers=0",
        "--rank=2",
    ]
    script.main(
        script.parse_args([*flags, "--train_batch_size=auto", f"--output_dir={tmp_path / 'out'}"])
    )
    said = capsys.readouterr().out
    assert re.search(
        r"Memory needed: \S+ MB = \S+ weights \+ \S+ averaged \+ \S+ gradients \+ "
        r"\S+ moments \+ \S+ encoders, plus activations\n",
        said,
    )
    assert said.count("of this process and its data loader\n") == 1
    tried = re.findall(r"^ +(\d+) +([\d.]+) +([\d.]+)$", said, re.M)
    assert "  images  memory, GB  images/s\n" in said and [int(row[0]) for row in tried] == [
        1,
        2,
        4,
    ]
    for record in metrics(tmp_path / "out"):
        assert record["memory_gb"] > 0.1 and record["tflops"] > 0 and "mfu" not in record


@pytest.mark.parametrize("rank", [None, 2])
def test_too_little_disk_space_for_checkpoints_is_refused(
    tmp_path, base, without_figures, monkeypatch, capsys, rank
):
    make_captioned(tmp_path / "images", 4)
    flags = [
        f"--pretrained_model_name_or_path={base}",
        f"--train_data_dir={tmp_path / 'images'}",
        f"--output_dir={tmp_path / 'out'}",
        "--resolution=16",
        "--max_train_steps=1",
        "--report_to=none",
        "--dataloader_num_workers=0",
        *([f"--rank={rank}", "--output_kohya_format"] if rank else []),
    ]
    counted = []
    count = saver.count_disk

    def note(*args):
        counted.append(count(*args))
        return counted[-1]

    monkeypatch.setattr(saver, "count_disk", note)

    def train(*more):
        reset()
        script.main(script.parse_args([*flags, *more]))

    def leave(free):
        monkeypatch.setattr(shutil, "disk_usage", lambda folder: argparse.Namespace(free=free))

    leave(0)
    with pytest.raises(SystemExit):
        train()
    ((checkpoint, result),) = counted
    needed = 2 * checkpoint + result
    said = f"out has 0 GB free, and two checkpoints and the result take {needed / 1e9:.3g} GB: make"
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    leave(needed)
    train()
    folder = tmp_path / "out/checkpoint-1"
    tensors = [x for path in folder.rglob("*.safetensors") for x in load_file(path).values()]
    for moments in torch.load(folder / "optimizer.bin", weights_only=True)["state"].values():
        tensors += [x for x in moments.values() if torch.is_tensor(x)]
    # without alphas and numbers of steps
    assert checkpoint == sum(x.nbytes for x in tensors if x.dim() > 0)
    leave(needed - 1)
    train("--resume_from_checkpoint=latest", "--max_train_steps=2")  # which has written one of them
    leave(checkpoint)
    with pytest.raises(SystemExit):
        train("--resume_from_checkpoint=latest", "--max_train_steps=3")
    assert "and a checkpoint and the result take" in capsys.readouterr().err
    assert (tmp_path / "out/checkpoint-2").exists()
