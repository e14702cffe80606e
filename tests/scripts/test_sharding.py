"""--shard: it splits weights, EMA weights and moments, and changes nothing else.

Each test forks its processes once and trains several times in them.
"""

import argparse
import copy
import os
import signal
import time

import diffusers
import numpy as np
import pytest
import torch
from conftest import (
    MODELS,
    PRX,
    QUICK,
    Script,
    assert_same_weights,
    finish,
    free_port,
    kill,
    make_captioned,
    make_models,
    make_prx,
    metrics,
    start,
    wait_until,
    weights,
)
from diffusers import (
    DDIMScheduler,
    FlowMatchEulerDiscreteScheduler,
    PRXTransformer2DModel,
    UNet2DConditionModel,
)
from PIL import Image

import train_flow
import train_text_to_image
from diffusion_training.families.known import load_family
from diffusion_training.families.names import FACTS
from diffusion_training.launch import Launch
from diffusion_training.models import AveragedWeights, start_average, update_ema
from diffusion_training.training import state as training_state
from diffusion_training.training.keeping import checkpoints
from diffusion_training.training.step import flow_schedule, objective, sharding
from diffusion_training.training.step.costs import count_memory

precompute = Script("precompute_latents")
pytestmark = pytest.mark.usefixtures("without_figures")
PORTS = []  # of the jobs that forks start, one after the other
EMA = {"ema_max_decay": 0.9999, "ema_inv_gamma": 1.0, "ema_power": 0.75}
PARTS = {train_flow: "transformer", train_text_to_image: "unet"}


def make_flags(tmp_path, script):
    """6 clipped steps of 2 images, with a checkpoint, samples and a held-out loss at steps 3 and 6.

    3 samples and 3 held-out images are uneven shares of two processes.
    """
    make_captioned(tmp_path / "images", 9)
    flags = [
        *QUICK[f"{script.__name__}.py"],
        f"--pretrained_model_name_or_path={make_models(tmp_path)}",
        f"--latents_dir={tmp_path / 'cache'}",
        "--total_batch_size=4",
        "--max_train_steps=6",
        "--max_grad_norm=0.1",
        "--num_validation_images=1",
        "--holdout=3",
        "--validation_steps=3",
        "--checkpointing_steps=3",
        "--save_best",
        "--validation_prompts",
        "a digit one",
        "a digit two",
        "one",
    ]
    family = "sd"
    if script is train_flow:
        flags.append(f"--transformer_config_name_or_path={make_prx(tmp_path / 'config')}")
        family = "prx"
    data = f"--train_data_dir={tmp_path / 'images'}", f"--pretrained_model_name_or_path={MODELS}"
    precompute(*precompute.flags(tmp_path / "cache", *data, f"--model_family={family}"))
    return flags


def train(script, *flags):
    if PORTS:  # jobs of the same forks would receive each other's messages
        os.environ["MASTER_PORT"] = str(PORTS.pop())
    Script(script.__name__)(*flags)


@pytest.fixture
def same_draws(monkeypatch):
    """Draw noise by the step alone, so that any number of processes draws the same."""
    for script in PARTS:
        monkeypatch.setattr(script, "step_seed", lambda kind, seed, data_step, *others: data_step)


def assert_near(one, other, script):
    """Check that two runs differ only by rounding: weights, EMA, moments, best, losses."""
    part = PARTS[script]
    for path in (f"checkpoint-6/{part}", f"checkpoint-6/{part}_ema", part, f"best/{part}"):
        found, expected = weights(other / path), weights(one / path)
        assert found.keys() == expected.keys()
        for name in found:
            assert torch.allclose(found[name], expected[name], rtol=0, atol=1e-6), (path, name)
    found, expected = (read_moments(folder) for folder in (other, one))
    assert found["param_groups"] == expected["param_groups"]
    for number, state in expected["state"].items():
        for name, value in state.items():
            other_value = found["state"][number][name]
            assert type(other_value) is torch.Tensor and other_value.shape == value.shape
            assert torch.allclose(other_value, value, rtol=1e-3, atol=1e-6)
    losses = [list_held_out(folder) for folder in (one, other)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5) and 6 in losses[0]
    norms = [metrics(folder)[-2]["grad_norm"] for folder in (one, other)]
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)


def list_held_out(folder):
    records = [record for record in metrics(folder) if "held_out_loss" in record]
    return {record["step"]: record["held_out_loss_ema"] for record in records}


def list_checkpoints(folder):
    return {path.name for path in folder.glob("checkpoint-*")}


def read_moments(folder):
    return torch.load(folder / "checkpoint-6/optimizer.bin", weights_only=True)


def assert_same_samples(one, other):
    names = sorted(path.name for path in (one / "samples").iterdir())
    assert names == sorted(path.name for path in (other / "samples").iterdir())
    for name in names:
        pixels = [np.asarray(Image.open(folder / "samples" / name), int) for folder in (one, other)]
        assert abs(pixels[0] - pixels[1]).max() <= 1


def forbid_reading(model_class):
    """Only the first process may read weights of the trained model, or hold all of them."""

    def shard_empty(model, device):
        assert all(weight.is_meta for weight in model.parameters())
        sharding.shard(model, device)

    if os.environ["RANK"] != "0":
        model_class.from_pretrained = None
        training_state.shard = shard_empty


def train_until_signal(scheduler, number, script, *argv):
    """Train. The second process gets a signal while it samples, and all processes stop."""
    denoise, calls = scheduler.step, []
    for module in (objective, flow_schedule):  # its steps are not samples
        module.try_sampler = lambda *args, **options: None

    def interrupted(self, *args, **options):
        calls.append(0)
        if len(calls) == number and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGTERM)
        return denoise(self, *args, **options)

    scheduler.step = interrupted
    with pytest.raises(SystemExit) as stop:
        train(script, *argv)
    assert stop.value.code == 143 and len(calls) == number, calls
    scheduler.step = denoise


@pytest.mark.ci
def test_shard_trains_the_same_transformer_and_resumes_both_ways(tmp_path, same_draws):
    """Three runs of two processes: `whole`, `resumed` and `crossed`.

    `resumed` gets a signal in a sample that the second process draws only to keep in step with the
    first one; resumed, it ends with the bits of `whole`. `crossed` resumes from an unsharded run,
    is killed while it gathers a checkpoint, and is resumed unsharded.
    """
    script = train_flow
    flags = make_flags(tmp_path, script)
    plain, whole, resumed, crossed = (
        tmp_path / name for name in ("plain", "whole", "resumed", "crossed")
    )
    train(script, *flags, f"--output_dir={plain}")
    gather_state = sharding.gather_state
    ports = [free_port() for _ in range(4)]

    def die(optimizer):
        if (crossed / "checkpoint-4").exists() and os.environ["RANK"] == "1":
            os._exit(9)
        return gather_state(optimizer)

    def run():
        PORTS.extend(ports)
        forbid_reading(PRXTransformer2DModel)
        sharded = [*flags, "--shard"]
        train(script, *sharded, f"--output_dir={whole}")
        again = [*sharded, f"--output_dir={resumed}", "--resume_from_checkpoint=latest"]
        train_until_signal(FlowMatchEulerDiscreteScheduler, 3, script, *again)
        assert not (resumed / "samples/step-0000003.png").exists()
        train(script, *again)
        checkpoints.gather_state = die
        source = f"--resume_from_checkpoint={plain / 'checkpoint-3'}"
        train(script, *sharded, f"--output_dir={crossed}", source, "--checkpointing_steps=2")

    log = tmp_path / "log"
    codes = finish(start(run, 2, log), 300)
    text = log.read_text()
    assert codes == [75, 9] and "Traceback" not in text, text
    assert "Stopped by SIGTERM after step 3 of 6" in text
    assert "another process has ended: see its message" in text
    assert_near(plain, whole, script)
    assert_same_samples(plain, whole)
    for path in ("checkpoint-6/transformer", "checkpoint-6/transformer_ema", "transformer"):
        assert_same_weights(whole / path, resumed / path)
    moments = [(folder / "checkpoint-6/optimizer.bin").read_bytes() for folder in (whole, resumed)]
    assert moments[0] == moments[1]
    assert_same_samples(whole, resumed)
    assert list_checkpoints(crossed) == {"checkpoint-4"} and not list(crossed.glob(".tmp-*"))
    train(script, *flags, f"--output_dir={crossed}", "--resume_from_checkpoint=latest")
    assert_near(plain, crossed, script)


@pytest.mark.long
def test_shard_trains_the_same_unet_and_stops_on_a_signal(tmp_path, same_draws):
    script = train_text_to_image
    # with a smaller --adam_epsilon, Adam amplifies rounding where the gradient is almost 0
    flags = [*make_flags(tmp_path, script), "--adam_epsilon=1e-6"]
    plain, sharded = tmp_path / "plain", tmp_path / "sharded"
    train(script, *flags, f"--output_dir={plain}")
    ports = [free_port() for _ in range(2)]

    def run():
        PORTS.extend(ports)
        forbid_reading(UNet2DConditionModel)
        argv = [*flags, "--shard", f"--output_dir={sharded}", "--resume_from_checkpoint=latest"]
        train_until_signal(DDIMScheduler, 7, script, *argv)
        train(script, *argv)

    assert finish(start(run, 2, tmp_path / "log"), 300) == [0, 0], (tmp_path / "log").read_text()
    assert_near(plain, sharded, script)
    assert_same_samples(plain, sharded)


def test_sharded_unet_has_the_same_gradients_and_can_be_gathered(tmp_path):
    """The U-Net's blocks contain other blocks. The job has one process, which holds all parts."""
    unet = UNet2DConditionModel.from_pretrained(make_models(tmp_path) / "unet")
    expected, average = copy.deepcopy(unet), start_average({"unet": unet})["unet"]
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        for model in (unet, average):
            sharding.shard(model, torch.device("cpu"))
        inputs = torch.randn(2, 4, 8, 8), torch.tensor([3, 5]), torch.randn(2, 5, 32)
        for model in (expected, unet):
            torch.manual_seed(0)  # for dropout
            model(*inputs).sample.square().mean().backward()
        weights_of = dict(expected.named_parameters())
        for name, weight in unet.named_parameters():
            found = sharding.whole(weight.grad)
            assert torch.allclose(found, weights_of[name].grad, rtol=1e-4, atol=1e-7), name
        with torch.no_grad():  # the average's weights outside the blocks must not stay whole
            average.eval()(*inputs)
        averages = AveragedWeights.of({"unet": average}, {"unet": unet})
        update_ema(averages, 2, argparse.Namespace(**EMA))
        for model in (unet, average):
            again = sharding.gather_model(model)
            assert type(again) is UNet2DConditionModel and not again.conv_in.weight.is_meta
            for name, value in again.state_dict().items():
                assert torch.equal(value, expected.state_dict()[name])
    finally:
        torch.distributed.destroy_process_group()


def test_shard_is_refused_with_flags_that_it_does_not_support(capsys):
    flags = ["--latents_dir=a", "--pretrained_model_name_or_path=b", "--shard"]
    for more in (
        "--rank 4",
        "--compile",
        "--find_lr",
        "--train_batch_size auto",
        "--mixed_precision fp16",
        "--optimizer adamw8bit",
        "--optimizer adafactor",
    ):
        with pytest.raises(SystemExit) as stop:
            train_text_to_image.parse_args([*flags, *more.split()])
        said = capsys.readouterr().err.strip().split("\n")[-1]
        given = more.removesuffix(" 4")
        assert stop.value.code == 2 and f"--shard can't be combined with {given}:" in said
    assert train_text_to_image.parse_args([*flags, "--optimizer=muon"]).shard
    assert train_flow.parse_args([*flags, "--gradient_checkpointing"]).shard


def test_list_gathered_returns_inner_blocks_before_outer_ones(tmp_path):
    for family in map(load_family, FACTS):
        model_class = getattr(diffusers, family.model)
        assert model_class._no_split_modules or family.name == "prx"
    transformer = PRXTransformer2DModel(**PRX)
    assert sharding.list_gathered(transformer) == [*transformer.blocks] != []
    unet = UNet2DConditionModel.from_pretrained(make_models(tmp_path) / "unet")
    blocks = sharding.list_gathered(unet)
    assert {type(block).__name__ for block in blocks} == {*unet._no_split_modules}
    for number, block in enumerate(blocks):
        assert not {*block.modules()} & {*blocks[number + 1 :]}


def test_share_memory_counts_parts_and_some_whole_blocks():
    model = PRXTransformer2DModel(**PRX)
    models = {"transformer": model}
    sizes = count_memory(models, start_average(models), [torch.nn.Linear(3, 5)], 4, "adamw")
    block = sum(weight.numel() for weight in model.blocks[0].parameters())
    all_weights = sum(weight.numel() for weight in model.parameters())
    outside = all_weights - 2 * block
    found = sharding.share_memory(sizes, models, 4, 1)
    assert found == {
        "weights": all_weights,
        "averaged": all_weights,
        "gradients": all_weights,
        "moments": 2 * all_weights,
        "encoders": 4 * 20,
        "two swapped blocks": 0,
        "exchanged gradients": 0,
        "whole blocks": 4 * (2 * outside + 4 * block),
        "copies in bf16": 2 * all_weights,
    }
    assert sharding.share_memory(sizes, models, 4, 0)["copies in bf16"] == 0
    assert sharding.share_memory(sizes, models, 4, 0.5)["copies in bf16"] == all_weights


@pytest.mark.parametrize("num_processes", [1, 2, 3, 8])
def test_launch_share_gives_all_processes_equally_many_numbers(num_processes):
    class World(Launch):
        rank = property(lambda self: self.accelerator)
        num_processes = property(lambda self: num_processes)

    for count in range(12):
        worlds = [World(rank, 1, "no", None, 1, True) for rank in range(num_processes)]
        shares = [world.share(count) for world in worlds]
        assert len({*map(len, shares)}) == 1
        taken = sorted(number for share in shares for number in share)
        assert taken[:count] == [*range(count)] and len(taken) < count + num_processes


@pytest.mark.long
@pytest.mark.parametrize("num_processes, seed", [(1, 0), (1, 1), (2, 0), (2, 1)])
@pytest.mark.parametrize("script", PARTS)
def test_sharded_run_killed_50_times_ends_with_the_same_bits(tmp_path, script, num_processes, seed):
    """Set KILLS=5 to kill it only five times."""
    num_kills = int(os.environ.get("KILLS", 50))
    flags = [
        *make_flags(tmp_path, script),
        "--shard",
        "--checkpointing_steps=1",
        "--validation_steps=7",
    ]
    steps = 4 * num_kills
    flags += [f"--max_train_steps={steps}", "--checkpoints_total_limit=2"]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    random = np.random.default_rng((num_processes, seed))

    def run(output_dir):
        train(script, *flags, f"--output_dir={output_dir}", "--resume_from_checkpoint=latest")

    log = tmp_path / "log"
    begin = time.monotonic()
    assert set(finish(start(lambda: run(whole), num_processes, log), 3000)) == {0}, log.read_text()
    seconds = (time.monotonic() - begin) / steps
    for _ in range(num_kills):
        before = list_checkpoints(killed)
        pids = start(lambda: run(killed), num_processes, log)
        wait_until(lambda before=before: list_checkpoints(killed) - before, 100)
        time.sleep(random.uniform(0, 2 * seconds))  # not so long that it ends before the last kill
        kill(pids)
    assert set(finish(start(lambda: run(killed), num_processes, log), 3000)) == {0}, log.read_text()
    last = f"checkpoint-{steps}"
    part = PARTS[script]
    for path in (f"{last}/{part}", f"{last}/{part}_ema", part, f"best/{part}"):
        assert_same_weights(whole / path, killed / path)
    moments = [(folder / last / "optimizer.bin").read_bytes() for folder in (whole, killed)]
    assert moments[0] == moments[1]
