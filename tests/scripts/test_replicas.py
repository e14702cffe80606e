"""The processes compare their weights at each checkpoint, and a difference ends the run."""

import os

import pytest
import torch
from accelerate import Accelerator
from conftest import Script, checkpoints, finish, list_unconditional_flags, start

from diffusion_training.training.keeping.replicas import check_replicas, list_replicas, sum_bits
from diffusion_training.training.state import Averages

pytestmark = pytest.mark.usefixtures("without_figures")
train = Script("train_unconditional")


@pytest.fixture
def flags(tmp_path):
    """6 steps, with a checkpoint at every second one, which replaces the previous one."""
    return list_unconditional_flags(
        tmp_path,
        12,
        "--max_train_steps=6",
        "--checkpointing_steps=2",
        "--checkpoints_total_limit=1",
        "--lr_warmup_steps=0",
        "--ddpm_num_inference_steps=1",
    )


def flip_bit(weight):
    """Flip a middle bit of a weight's first number, as faulty memory would."""
    with torch.no_grad():
        weight.view(-1)[:1].view(torch.int32).bitwise_xor_(1 << 20)


@pytest.mark.parametrize("part, named", [
    (None, None), ("trained", "unet/conv_out.weight"), ("ema", "unet_ema/conv_out.weight"),
])  # fmt: skip
def test_flipped_bit_in_one_process_ends_the_run_at_the_next_checkpoint(
    tmp_path, flags, part, named
):
    """A bit flips at step 3, in the second process. The checkpoint of step 2 stays."""

    def run():
        update = Averages.update

        def update_and_corrupt(self, progress, *given):
            update(self, progress, *given)
            if part and progress.global_step == 3 and os.environ["RANK"] == "1":
                flip_bit(getattr(self, part)["unet"].conv_out.weight)

        Averages.update = update_and_corrupt
        train(*flags)

    log = tmp_path / "log"
    codes = set(finish(start(run, 2, log)))
    text = log.read_text()
    if part is None:
        assert codes == {0} and checkpoints(tmp_path / "out") == {"checkpoint-6"}, text
        return
    assert codes == {1} and "Traceback" not in text, text
    said = f"at step 4, {named} of process 0 differs from 1. No checkpoint was written"
    assert text.count(said) == 1
    assert checkpoints(tmp_path / "out") == {"checkpoint-2"}
    assert not list((tmp_path / "out").glob(".tmp-*"))


def test_replica_checksums_see_every_bit_and_skip_frozen_weights(tmp_path):
    """The error names the first tensor that differs. A single process compares nothing."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))
    model[0].bias.requires_grad_(False)
    averaged = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))
    replicas = list_replicas({"unet": model}, {"unet": averaged.requires_grad_(False)})
    names = [f"{name}/{key}" for name in ("unet", "unet_ema")
             for key in ("0.weight", "1.weight", "1.bias")]  # fmt: skip
    assert list(replicas) == names
    assert replicas["unet_ema/1.bias"] is averaged[1].bias
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        tensor = torch.randn(4, 3, 2, 2).to(dtype)
        before = sum_bits(tensor)
        assert before.dtype == torch.int64 and before.shape == ()
        assert sum_bits(tensor.to(memory_format=torch.channels_last)) == before
        tensor.view(-1)[7] = torch.nextafter(tensor.view(-1)[7], torch.tensor(9.0, dtype=dtype))
        assert sum_bits(tensor) != before
    assert sum_bits(torch.tensor([0.0, -0.0])) == sum_bits(torch.tensor([-0.0, 0.0])) != 0
    check_replicas(Accelerator(cpu=True), {"unet": model}, {}, 1)
