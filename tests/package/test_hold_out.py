"""The held-out loss: its rows, and the documented figure."""

import argparse

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from conftest import make_unet_config
from diffusers import DDPMScheduler, UNet2DModel

import train_unconditional
from diffusion_training.batches import Prepared
from diffusion_training.draws import step_seed
from diffusion_training.launch import Launch
from diffusion_training.training.held_out import describe_held_out, hold_out, log_held_out_loss
from diffusion_training.training.records import Records
from diffusion_training.training.step.objective import held_out_epsilon_loss


class Named:
    """A data set with given names. Each image is random, with its row as the seed."""

    def __init__(self, names, broken=()):
        self.all, self.broken, self.asked = list(names), broken, []

    def __len__(self):
        return len(self.all)

    def names(self):
        return iter(self.all)

    def __getitem__(self, keys):
        ((epoch, row, weight),) = keys
        self.asked.append((epoch, row))
        images = torch.rand(1, 3, 16, 16, generator=torch.Generator().manual_seed(row)) * 2 - 1
        batch = {"pixel_values": images, "weight": torch.tensor([weight]), "skipped": []}
        if row in self.broken:
            batch = {
                "pixel_values": torch.zeros(1, 3, 16, 16),
                "weight": torch.zeros(1),
                "skipped": [("it", "why")],
            }
        return batch


def split(names, holdout, seed=0):
    """Return the names to train on and the held-out names."""
    rows, held = hold_out(Accelerator(cpu=True), Named(names), holdout, seed)
    assert sorted([*rows.tolist(), *held]) == list(range(len(names))) and rows.tolist() == sorted(
        rows
    )
    return {names[row] for row in rows}, {names[row] for row in held}


def test_new_images_do_not_change_which_others_are_held_out(capsys):
    names = [f"{i}.png" for i in range(60)]
    trained, held = split(names, 0.2)
    assert 4 <= len(held) <= 22 and f"Held out: {len(held)} of 60 images" in capsys.readouterr().out
    left = [name for i, name in enumerate(names) if i % 7]
    # some names removed, some new, in another order
    now_trained, now_held = split([f"a new {i}" for i in range(9)] + left[::-1], 0.2)
    assert now_trained & trained == trained & {*left} and now_held & held == held & {*left}
    assert split(names, 0.2, seed=1)[1] != held
    # A number takes the lowest hashes, so further images change only the last of them.
    assert (
        len(split(names, 1.0)[1]) == 1
        and len(split(names, 7)[1]) == 7
        and split(names, 7)[1] < split(names, 9)[1]
    )
    rows, nothing = hold_out(Accelerator(cpu=True), Named(names), 0.0, 0)
    assert rows.tolist() == list(range(60)) and nothing == {}


def test_the_choice_of_held_out_images_stays_the_same_in_every_version():
    """A run that resumes with another version must not train on held-out images."""
    assert split([f"{i}.png" for i in range(12)], 4)[1] == {"0.png", "1.png", "5.png", "10.png"}


def test_rows_of_the_same_name_are_held_out_together():
    """--folder_repeats gives an image several rows: all or none of them are held out."""
    names = [f"{i % 10}.png" for i in range(50)]
    for holdout, count in (1, 5), (5, 5), (7, 10), (0.3, 15):
        trained, held = split(names, holdout)
        assert not trained & held and 5 * len(held) == count
    with pytest.raises(SystemExit, match="sets 50 of 50 images aside"):
        split(names, 46)


def test_describe_held_out_depends_on_content_and_not_on_order():
    dataset = Named("abcd")
    dataset.holds = "images"
    dataset.digest = lambda row: f"image of {dataset.all[row]}"

    def describe(held_out, holdout=2.0):
        return describe_held_out(Accelerator(cpu=True), dataset, held_out, holdout)

    one = describe({0: 5, 2: 6})
    dataset.all = ["c", "x", "a", "d"]
    assert describe({0: 6, 2: 5}) == one and one["held_out_below"] == 7
    assert one["held_out"]["of"] == "images" and len(one["held_out"]["digest"]) == 32
    assert describe({0: 6, 2: 5}, 0.25)["held_out_below"] == 2**62
    assert describe({0: 5, 1: 6})["held_out"] != one["held_out"]
    assert describe({}) == {"held_out": None, "held_out_below": 0}
    dataset.order = {"num_ranges": 8}  # whole shards
    assert describe({0: 5})["held_out_below"] is None


@pytest.mark.parametrize("holdout, count", [(1e-9, 0), (12, 12), (99, 99)])
def test_holding_out_all_or_no_images_is_refused(holdout, count):
    with pytest.raises(
        SystemExit, match=f"sets {count} of 12 images aside: choose another share or number"
    ):
        split([f"{i}.png" for i in range(12)], holdout)


class FakeRecords(argparse.Namespace):
    """Keeps the records that a run would write."""

    def __init__(self):
        super().__init__(held_out={}, new_skipped={}, records=[])

    add_held_out = Records.add_held_out

    def write(self, record):
        self.records.append(record)


@pytest.fixture(scope="module")
def unets(tmp_path_factory):
    """Two U-Nets with dropout, the first of them in training."""
    torch.manual_seed(0)
    config = UNet2DModel.load_config(make_unet_config(tmp_path_factory.mktemp("model")))
    return [UNet2DModel.from_config(config).train(), UNet2DModel.from_config(config).eval()]


def measure(
    unets, dataset, held, fake=None, prediction_type="epsilon", received=0, prepare=None, step=4
):
    fake = fake or FakeRecords()
    names = ["held_out_loss", "held_out_loss_ema"]
    models = {name: {"unet": unet} for name, unet in zip(names, unets, strict=False)}
    objective = argparse.Namespace(
        held_out_loss=held_out_epsilon_loss(
            DDPMScheduler(prediction_type=prediction_type), train_unconditional.predict_noise
        ),
        prepare_held_out=prepare or (lambda batch: Prepared(batch["pixel_values"], {}, {})),
    )
    log_held_out_loss(
        Launch(Accelerator(cpu=True), 1, "no", None, 1), fake, dataset, held, models, objective,
        argparse.Namespace(poll=lambda: received), step,
    )  # fmt: skip
    return fake


HELD = {1: 12345678901234567, 4: 987654321987654321, 6: 55}


@pytest.mark.parametrize("prediction_type", ["epsilon", "sample", "v_prediction"])
def test_the_held_out_loss_is_the_epsilon_error_of_uncropped_images(unets, prediction_type):
    """Computed again from the weights and the documented keys, for any prediction type."""
    dataset = Named(range(7))
    fake = measure(unets, dataset, HELD, prediction_type=prediction_type)
    (record,) = fake.records
    assert (
        record["step"] == 4
        and fake.held_out == record
        and [unet.training for unet in unets] == [True, False]
    )
    # epoch None: never randomly cropped or mirrored
    assert dataset.asked == [(None, 1), (None, 4), (None, 6)]
    alphas = DDPMScheduler().alphas_cumprod.double()
    for unet, key in zip(unets, ("held_out_loss", "held_out_loss_ema"), strict=True):
        was, losses = unet.training, []
        unet.eval()  # without dropout
        for row, row_hash in HELD.items():
            image = dataset[[(None, row, 1.0)]]["pixel_values"]
            for i in range(9):
                generator = torch.Generator().manual_seed(step_seed("held out", row_hash, i))
                noise, a = torch.randn(image.shape, generator=generator), alphas[100 * (i + 1)]
                noisy = (a.sqrt() * image + (1 - a).sqrt() * noise).float()
                with torch.no_grad():
                    predicted = unet(noisy, 100 * (i + 1)).sample
                if prediction_type == "sample":
                    predicted = (noisy - a.sqrt() * predicted) / (1 - a).sqrt()
                if prediction_type == "v_prediction":
                    predicted = a.sqrt() * predicted + (1 - a).sqrt() * noisy
                losses.append(((predicted - noise) ** 2).mean().item())
        unet.train(was)
        losses = np.array(losses).reshape(-1, 9).mean(0)
        assert record[key] == pytest.approx(losses.mean(), rel=1e-4)
    nine = [record[f"held_out_loss_t0.{i}"] for i in range(1, 10)]
    assert nine == pytest.approx(losses.tolist(), rel=1e-4)  # with the pipeline's inputs
    assert len(record) == 3 + 9


def test_the_held_out_loss_is_reproducible_and_recorded_once_per_step(unets):
    torch.manual_seed(1)
    fake = measure(unets, Named(range(7)), HELD)
    torch.manual_seed(2)
    measure(unets, Named(range(7)), HELD, fake)  # as after a resume at the same step
    assert len(fake.records) == 1
    measure(unets, Named(range(7)), HELD, fake, step=5)
    assert [record["step"] for record in fake.records] == [4, 5]
    assert {**fake.records[0], "step": 5} == fake.records[1]


def test_held_out_conditions_are_repeated_for_nine_timesteps(unets):
    """Inputs that only the loss needs are not passed."""
    drawn, given = [], []

    def prepare(batch):
        drawn.append(torch.rand(1).item())
        label = {"label": torch.tensor([[len(drawn), 0]])}
        return Prepared(batch["pixel_values"], label, {"mask": torch.zeros(1)})

    class Model(torch.nn.Module):
        def forward(self, noisy, timesteps, label):
            given.append(label.tolist())
            return argparse.Namespace(sample=noisy)

    for _ in range(2):
        measure([Model()], Named(range(7)), HELD, prepare=prepare)
    assert (
        given[:3] == [[[i, 0]] * 9 for i in (1, 2, 3)]
        and drawn[:3] == drawn[3:]
        and len({*drawn}) == 3
    )


def test_a_signal_stops_the_held_out_loss_without_a_record(unets):
    fake, dataset = FakeRecords(), Named(range(7))
    measure(unets, dataset, HELD, fake, received=15)
    assert fake.records == [] and fake.held_out == {}
    measure(unets, dataset, {}, fake)  # nothing is held out
    assert fake.records == []


def test_broken_held_out_images_are_skipped_but_all_broken_end_the_run(unets):
    whole = measure(unets, Named(range(7)), {1: HELD[1], 6: HELD[6]})
    less = measure(unets, Named(range(7), broken=[4]), HELD)
    assert less.records[0]["held_out_loss"] == pytest.approx(
        whole.records[0]["held_out_loss"], rel=1e-6
    )
    assert less.new_skipped == {"it": "why"} and not whole.new_skipped
    with pytest.raises(
        SystemExit, match="none of the 3 images that --holdout sets aside could be decoded"
    ):
        measure(unets, Named(range(7), broken=[1, 4, 6]), HELD)
