"""--full_bf16: weights in bfloat16, updated in the backward pass, exactly and without bias."""

import argparse
import gc
import weakref

import pytest
import torch
from conftest import (
    ROOT,
    Script,
    copy_state,
    has_ended,
    kill,
    metrics,
    open_pipeline,
    start,
    wait_until,
)
from safetensors.torch import load_file
from test_block_swap import bases  # noqa: F401
from torch.optim.optimizer import register_optimizer_step_post_hook
from transformers.optimization import Adafactor

from diffusion_training.training.keeping.checkpoints import find_checkpoints
from diffusion_training.training.step.costs import count_memory
from diffusion_training.training.step.full_bf16 import FullBf16Adafactor, round_randomly
from diffusion_training.training.step.optimizers import make_optimizer
from diffusion_training.training.step.plans import Meter

pytestmark = pytest.mark.usefixtures("without_figures")
FLOW, TEXT = Script("train_flow"), Script("train_text_to_image")
# as people who come from kohya's scripts or musubi-tuner have it in their commands
WHOLE = ["--full_bf16", "--fused_backward_pass", "--optimizer=adafactor", "--no-use_ema"]
WHOLE += ["--max_grad_norm=0", "--mixed_precision=bf16"]
BF16 = torch.bfloat16


def make(dtype=BF16, seed=0, full_bf16=True):
    """Return ({name: model}, its optimizer): matrices, a convolution, biases."""
    torch.manual_seed(1)
    parts = [torch.nn.Linear(40, 40) for _ in range(3)]
    parts += [torch.nn.Unflatten(1, (10, 2, 2)), torch.nn.Conv2d(10, 6, 3, padding=1)]
    models = {"unet": torch.nn.Sequential(*parts).to(dtype)}
    flags = {"optimizer": "adafactor", "learning_rate": 1e-2, "adam_weight_decay": 0.1}
    args = argparse.Namespace(**flags, seed=seed, full_bf16=full_bf16)
    return models, make_optimizer(models, args)


def train(models, optimizer, steps):
    for step in steps:
        torch.manual_seed(step)
        weight = next(models["unet"].parameters())
        inputs = torch.randn(8, weight.shape[1]).to(weight.dtype)
        models["unet"](inputs).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def flatten(models, optimizer):
    """All numbers of weights and moments."""
    weights = [*models["unet"].parameters()]
    return weights + [x for weight in weights for x in optimizer.state[weight].values()]


def are_equal(one, other):
    return all(
        torch.equal(x, y) and x.dtype == y.dtype if torch.is_tensor(x) else x == y
        for x, y in zip(one, other, strict=True)
    )


def test_rounding_is_to_a_neighbour_and_its_mean_is_the_number():
    torch.manual_seed(0)
    exact = torch.randn(60) * 10.0 ** torch.randint(-30, 30, (60,))
    exact[:3] = torch.tensor([1.0, 1.0 + 2**-9, -(1.0 + 2**-23)])
    many = 2**16
    generator = torch.Generator().manual_seed(0)
    rounded = round_randomly(exact.repeat(many, 1), generator)
    assert torch.equal(rounded, rounded.bfloat16().float())
    bits = exact.view(torch.int32)
    low = (bits & -(2**16)).view(torch.float32)
    high = ((bits & -(2**16)) + 2**16).view(torch.float32)
    assert ((rounded == low) | (rounded == high)).all()
    step = (high - low).double()
    share = (bits & 0xFFFF).double() / 2**16  # of those that must go up
    found = (rounded.double().mean(dim=0) - low.double()) / step
    error = (share * (1 - share) / many).sqrt()
    assert (found - share).abs().max() < 0.02 and (found - share).abs().le(5 * error + 1e-9).all()
    # rounding to the nearest would be off by up to a half
    nearest = (exact.bfloat16().double() - low.double()) / step
    assert (nearest - share).abs().max() > 0.4
    special = torch.tensor([0.0, -0.0, 1.5, torch.inf, -torch.inf, torch.nan])
    kept = round_randomly(special.clone(), generator)
    assert torch.equal(kept[:-1], special[:-1]) and kept[-1].isnan()
    # the NaN of GPUs, and others
    bits = torch.tensor([0x7FFFFFFF, -1, 0x7F800001, 0x7FC00000], dtype=torch.int32)
    assert round_randomly(bits.view(torch.float32), generator).isnan().all()


@pytest.fixture
def gradients(monkeypatch):
    """{weight: its gradient} of each update since the last look; at most one is there at a time."""
    found = {}
    update = FullBf16Adafactor.update

    def watch(self, name, weight):
        (weights,) = (group["params"] for group in self.param_groups)
        assert [each is weight for each in weights if each.grad is not None] == [True]
        found[weight] = weight.grad.float()
        update(self, name, weight)
        assert weight.grad is None

    monkeypatch.setattr(FullBf16Adafactor, "update", watch)
    return found


def test_an_update_is_adafactors_in_float32_then_rounded(gradients):
    models, optimizer = make()
    weights = list(models["unet"].parameters())
    exact = [torch.nn.Parameter(weight.detach().float()) for weight in weights]
    options = {"relative_step": False, "scale_parameter": False}
    reference = Adafactor(exact, lr=1e-2, weight_decay=0.1, **options)
    ups = downs = 0
    for step in range(4):
        for one, weight in zip(exact, weights, strict=True):
            one.data = weight.detach().float()
        train(models, optimizer, [step])
        assert gradients.keys() == {*weights}
        for one, weight in zip(exact, weights, strict=True):
            one.grad = gradients[weight]
        norm = torch.nn.utils.get_total_norm([one.grad for one in exact])
        torch.testing.assert_close(optimizer.grad_norm, norm)
        reference.step()
        for one, weight in zip(exact, weights, strict=True):
            bits = one.detach().view(torch.int32) & -(2**16)
            low, high = bits.view(torch.float32), (bits + 2**16).view(torch.float32)
            assert ((weight == low) | (weight == high)).all()
            ups += (weight == high).sum()
            downs += (weight == low).sum()
            assert are_equal(reference.state[one].values(), optimizer.state[weight].values())
        gradients.clear()
    assert 0.8 < ups / downs < 1.25


def test_weights_that_stay_in_float32_get_the_bits_of_adafactor():
    runs = [make(torch.float32), make(torch.float32, full_bf16=False)]
    assert [type(optimizer) for _, optimizer in runs] == [FullBf16Adafactor, Adafactor]
    for run in runs:
        train(*run, range(3))
    assert are_equal(*(flatten(*run) for run in runs))


def test_random_bits_depend_on_seed_update_and_name_alone():
    runs = [make(), make(), make(seed=1)]
    for run in runs:
        train(*run, range(2))
    one, same, other = (flatten(*run) for run in runs)
    assert are_equal(one, same) and not are_equal(one, other)
    rounded = []
    for name in ("a", "b"):
        weight = torch.nn.Parameter(torch.ones(1000, dtype=BF16))
        options = {"relative_step": False, "scale_parameter": False}
        optimizer = FullBf16Adafactor(
            {name: torch.nn.ParameterList([weight])}, seed=0, lr=0.003, **options
        )
        for _ in range(2):
            weight.data.fill_(1)
            weight.grad = torch.ones_like(weight)
            state = torch.get_rng_state()
            optimizer.update(name, weight)
            assert torch.equal(torch.get_rng_state(), state)
            rounded.append(weight.detach().clone())
    assert len({tuple(each.tolist()) for each in rounded}) == 4


def test_a_resumed_optimizer_continues_bit_for_bit():
    models, optimizer = make()
    train(models, optimizer, range(3))
    others, other = make()
    train(others, other, range(5, 6))
    others["unet"].load_state_dict(models["unet"].state_dict())
    copy_state(optimizer, other)
    assert are_equal(flatten(models, optimizer), flatten(others, other))
    train(models, optimizer, range(3, 6))
    train(others, other, range(3, 6))
    assert are_equal(flatten(models, optimizer), flatten(others, other))


def test_a_backward_pass_holds_one_gradient_at_a_time(gradients):
    """By the bytes that torch has allocated, also in the engine and for the update."""
    many, width = 30, 128
    options = {"relative_step": False, "scale_parameter": False}
    with Meter(torch.device("cpu")) as counter:
        model = torch.nn.Sequential(*[torch.nn.Linear(width, width) for _ in range(many)]).to(BF16)
        optimizer = FullBf16Adafactor({"one": model}, 0, lr=1e-3, **options)
        for _ in range(2):  # the first makes the moments
            loss = model(torch.randn(2, width, dtype=BF16)).sum()
            counter.peak = before = counter.held
            loss.backward()
            optimizer.step()
    counted = count_memory({"one": model}, {}, [], 1, "adafactor")["gradients"]
    assert counted == 16 * width**2 < 0.3 * 2 * many * width**2
    assert counter.peak - before == pytest.approx(counted, rel=0.02)
    assert len(gradients) == 2 * many


def test_hooks_of_steps_are_called_for_whole_steps():
    """Also after a plain Adafactor, for which torch puts them around `Adafactor.step`."""
    make(full_bf16=False)
    steps = []
    handle = register_optimizer_step_post_hook(lambda *given: steps.append(given))
    train(*make(), range(2))
    handle.remove()
    assert len(steps) == 2


def test_a_trial_of_a_batch_size_leaves_no_weights():
    """Torch does not free a weight whose hook holds the weight."""
    models, optimizer = make()
    train(models, optimizer, range(1))
    found = weakref.ref(models["unet"][0].weight)
    del models, optimizer
    gc.collect()
    assert found() is None


def test_weights_of_bfloat16_are_counted_as_they_are():
    models, optimizer = make()
    train(models, optimizer, range(1))
    sizes = count_memory(models, {}, [], 1, "adafactor")
    weights = sum(weight.numel() for weight in models["unet"].parameters())
    moments = [x for each in optimizer.state.values() for k, x in each.items() if "avg" in k]
    assert sizes["weights"] == 2 * weights
    assert sizes["moments"] == sum(x.nbytes for x in moments)
    assert {x.dtype for x in moments} == {torch.float32}


def list_flags(base, out, *more):
    flags = FLOW.flags(out, *base, *WHOLE, "--train_batch_size=2", "--learning_rate=0.01")
    return [*flags, "--max_train_steps=6", "--checkpointing_steps=3", *more]


def kill_in_an_update(trainer, folder, *flags):
    """Kill a run in a fork in the middle of step 4, when half of the weights are updated."""
    reached = folder.with_name(f"{folder.name}-reached")
    update = FullBf16Adafactor.update

    def update_and_wait(self, name, weight):
        update(self, name, weight)
        counts = [each.get("step") for each in self.state.values()]
        if counts.count(4) == len(counts) // 2:
            wait_until(lambda: find_checkpoints(folder), 60)
            reached.touch()
            wait_until(lambda: False)

    def run():
        FullBf16Adafactor.update = update_and_wait
        trainer(*flags, f"--output_dir={folder}")

    (pid,) = start(run, log=folder.with_name("log"))
    wait_until(lambda: reached.exists() or has_ended(pid), 90)
    assert reached.exists(), folder.with_name("log").read_text()
    kill([pid])


FAMILIES = ["sd", "sdxl", "z_image", "klein", "qwen_image", "flux", "krea2", "flux3", "sd3"]


@pytest.mark.long
@pytest.mark.parametrize("name", FAMILIES)
def test_a_run_killed_in_an_update_ends_with_the_same_bits(tmp_path, bases, name):  # noqa: F811
    trainer, base = bases(name)
    flags = list_flags(base, "none", "--gradient_checkpointing", "--resume_from_checkpoint=latest")
    trainer.fork(*flags, f"--output_dir={tmp_path / 'plain'}")
    kill_in_an_update(trainer, tmp_path / "killed", *flags)
    trainer.fork(*flags, f"--output_dir={tmp_path / 'killed'}")
    folder = "unet" if trainer.file_name == TEXT.file_name else "transformer"
    file = f"{folder}/diffusion_pytorch_model.safetensors"
    for path in (file, f"checkpoint-6/{file}", "checkpoint-6/optimizer.bin"):
        one, other = (tmp_path / run / path for run in ("plain", "killed"))
        assert one.read_bytes() == other.read_bytes(), path
    trained, before = (
        load_file(tmp_path / "plain" / file),
        load_file(tmp_path / "plain/checkpoint-3" / file),
    )
    # those for references, which FLUX.3 has and this run lacks, do nothing
    keys = [key for key in trained if "image_cond" not in key]
    changed = [not torch.equal(trained[key], before[key]) for key in keys]
    assert sum(changed) > 0.8 * len(changed)
    assert BF16 in {weight.dtype for weight in trained.values()}


@pytest.mark.long
def test_all_that_calls_the_model_works_with_weights_in_bfloat16(tmp_path, bases, capsys):  # noqa: F811
    """Samples, held-out loss, best weights, result, a second phase, and both searches."""
    trainer, base = bases("sd")
    samples = ["--validation_prompts=a digit one", "--num_validation_images=1", "--holdout=2"]
    flags = list_flags(base, tmp_path / "one", *samples, "--save_best", "--train_batch_size=auto")
    trainer(*flags, "--logging_steps=1", "--checkpoints_to=memory://full-bf16")
    records = [record for record in metrics(tmp_path / "one") if "grad_norm" in record]
    assert len(records) == 6 and all(record["grad_norm"] > 0 for record in records)
    assert all(record["clipped"] == 0 for record in records)
    assert "held_out_loss" in set().union(*metrics(tmp_path / "one"))
    assert (tmp_path / "one/samples/step-0000006.png").exists()
    file = "unet/diffusion_pytorch_model.safetensors"
    for folder in ("", "best/", "checkpoint-3/"):
        kinds = {weight.dtype for weight in load_file(tmp_path / "one" / folder / file).values()}
        assert kinds == {BF16}, folder
    pipeline = open_pipeline(tmp_path / "one")
    for name, weight in load_file(tmp_path / "one" / file).items():
        assert torch.equal(pipeline.unet.get_parameter(name), weight.float())
    again = list_flags(base, tmp_path / "two", "--holdout=2", f"--init_from={tmp_path / 'one'}")
    trainer(*again, "--max_train_steps=7")
    assert "step 6" in capsys.readouterr().out
    one, two = (load_file(tmp_path / run / file) for run in ("one", "two"))
    assert any(not torch.equal(one[name], two[name]) for name in one)
    trainer(*list_flags(base, tmp_path / "three", "--find_lr", "--find_lr_steps=10"))
    assert "--learning_rate" in capsys.readouterr().out


@pytest.mark.parametrize("trainer", [TEXT, FLOW], ids=["u-net", "transformer"])
def test_what_can_not_be_had_is_refused_in_a_sentence(tmp_path, trainer):
    whole = trainer.flags(tmp_path / "out", f"--latents_dir={tmp_path}", *WHOLE)
    whole += [f"--pretrained_model_name_or_path={ROOT / 'demo/models'}"]
    for more, sentence in (
        (["--use_ema"], "keeps no average: add --no-use_ema"),
        (["--optimizer=adamw", "--max_grad_norm=1"], "add --optimizer adafactor --max_grad_norm 0"),
        (["--rank=2"], "--full_bf16 can't be combined with --rank: leave one of them out"),
        (["--shard"], "--full_bf16 can't be combined with --shard"),
        (["--compile"], "--full_bf16 can't be combined with --compile"),
        (["--gradient_accumulation_steps=2"], "combined with --gradient_accumulation_steps"),
        (["--total_batch_size=4"], "--full_bf16 can't be combined with --total_batch_size"),
        (["--posthoc_ema", "0.05", "0.1"], "--full_bf16 can't be combined with --posthoc_ema"),
        (["--blocks_to_swap=all"], "--blocks_to_swap does nothing without --rank"),
    ):
        assert sentence in trainer.refused(*whole, *more, status=2)
    for flag in WHOLE[:2]:
        args = trainer.module.parse_args([each for each in whole if each not in WHOLE[:2]] + [flag])
        assert args.full_bf16
    for more in (["--mixed_precision=no"], ["--mixed_precision=fp16"]):
        said = trainer.refused(*whole, *more)
        assert "--full_bf16 needs --mixed_precision bf16" in said or "fp16 does nothing" in said
    for variable, value, sentence in (
        ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "2", "accelerate launch accumulates gradients"),
        ("ACCELERATE_DYNAMO_BACKEND", "EAGER", "accelerate launch turns on torch.compile"),
    ):
        with pytest.MonkeyPatch.context() as m:
            m.setenv(variable, value)
            assert sentence in trainer.refused(*whole)
    assert not (tmp_path / "out").exists()


@pytest.mark.long
def test_several_processes_are_refused(tmp_path, bases):  # noqa: F811
    trainer, base = bases("sd")
    said = trainer.fork(*list_flags(base, tmp_path / "out"), num_processes=2, status=1)
    assert "--full_bf16 trains on one device" in said
    assert not (tmp_path / "out").exists()
