"""The objective: both trainers' loss and its weight match the papers for every prediction type."""

import argparse
import math

import pytest
import torch
from diffusers import DDPMScheduler
from diffusers.training_utils import compute_snr

import train_text_to_image
import train_unconditional
from diffusion_training.batches import Prepared
from diffusion_training.training.step.objective import (
    check_objective,
    min_snr_weight,
    objective_flags,
    to_epsilon,
)

TYPES = ["epsilon", "sample", "v_prediction"]
PREDICT = {  # with each script's name for embeddings
    train_unconditional: (train_unconditional.predict_noise, "encoder_hidden_states"),
    train_text_to_image: (train_text_to_image.predict_noise, "prompt_embeds"),
}
TRAINERS = pytest.mark.parametrize("script", [train_unconditional, train_text_to_image])


class Model:
    """Predicts a constant, and keeps its inputs."""

    def __init__(self, prediction=0.0):
        self.prediction = prediction

    def __call__(self, noisy, timesteps, encoder_hidden_states, added_cond_kwargs=None):
        condition = {"encoder_hidden_states": encoder_hidden_states}
        self.noisy, self.timesteps, self.condition = noisy, timesteps, condition
        return argparse.Namespace(sample=torch.full_like(noisy, self.prediction))


def loss_of(script, model, scheduler, images, weight, **flags):
    torch.manual_seed(3)
    args = argparse.Namespace(
        **{"snr_gamma": None, "noise_offset": 0.0, "input_perturbation": 0.0}
        | {"min_timestep": 0, "max_timestep": 1000, **flags}
    )
    predict, name = PREDICT[script]
    prepared = Prepared(images, {name: "it"}, {})
    objective = argparse.Namespace(predict=predict)
    return script.compute_loss(args, scheduler, objective, {"unet": model}, prepared, weight)


def test_timesteps_stay_in_their_range_whatever_the_scheduler_has():
    images, weight = torch.zeros(2000, 3, 1, 1), torch.ones(2000)
    for number, flags, expected in (
        (1000, {}, (0, 999)),
        (1000, {"min_timestep": 500, "max_timestep": 510}, (500, 509)),
        (10, {"min_timestep": 500}, (5, 9)),
        (10, {"min_timestep": 500, "max_timestep": 501}, (5, 5)),
    ):
        model = Model()
        scheduler = DDPMScheduler(num_train_timesteps=number)
        loss_of(train_text_to_image, model, scheduler, images, weight, **flags)
        seen = model.timesteps.min().item(), model.timesteps.max().item()
        assert seen == pytest.approx(expected, abs=2 if not flags else 0), flags


@TRAINERS
@pytest.mark.parametrize("prediction_type", TYPES)
@pytest.mark.parametrize("snr_gamma", [None, 5.0])
def test_compute_loss_matches_the_papers_formulas(script, prediction_type, snr_gamma):
    scheduler = DDPMScheduler(prediction_type=prediction_type)
    images, weight = torch.rand(4, 3, 8, 8) * 2 - 1, torch.tensor([0.5, 0.25, 0.25, 0.0])
    model = Model(0.1)
    loss = loss_of(script, model, scheduler, images, weight, snr_gamma=snr_gamma)
    assert model.condition == {"encoder_hidden_states": "it"}
    torch.manual_seed(3)
    noise = torch.randn_like(images)
    alpha_bar = torch.cumprod(1 - torch.linspace(1e-4, 0.02, 1000), 0)[model.timesteps].view(
        -1, 1, 1, 1
    )
    torch.testing.assert_close(
        model.noisy, alpha_bar.sqrt() * images + (1 - alpha_bar).sqrt() * noise
    )
    velocity = alpha_bar.sqrt() * noise - (1 - alpha_bar).sqrt() * images
    target = {"epsilon": noise, "sample": images, "v_prediction": velocity}[prediction_type]
    snr = (alpha_bar / (1 - alpha_bar)).flatten()
    factor = {
        "epsilon": snr.clamp(max=5) / snr,
        "sample": snr.clamp(max=5),
        "v_prediction": (snr + 1).clamp(max=5) / (snr + 1),
    }[prediction_type]
    expected = ((0.1 - target) ** 2).mean((1, 2, 3)) * weight * (1 if snr_gamma is None else factor)
    torch.testing.assert_close(loss, expected.sum())


@TRAINERS
def test_noise_offset_changes_the_target_and_input_perturbation_does_not(script):
    scheduler, model = DDPMScheduler(), Model()
    images, weight = torch.zeros(4000, 3, 2, 2), torch.full((4000,), 1 / 4000)

    def run(**flags):
        loss = loss_of(script, model, scheduler, images, weight, **flags)
        level = (1 - scheduler.alphas_cumprod[model.timesteps]).sqrt().view(-1, 1, 1, 1)
        return loss.item(), model.noisy / level  # the noise that the model sees

    loss, noise = run()
    assert loss == pytest.approx(1, abs=0.03) and noise.std().item() == pytest.approx(1, abs=0.02)
    loss, noise = run(noise_offset=0.5)  # in the target as well
    assert loss == pytest.approx(1.25, abs=0.05)
    assert noise.mean((2, 3)).var().item() == pytest.approx(0.25 + 0.25, abs=0.03)
    loss, noise = run(input_perturbation=0.5)  # in the input only
    assert loss == pytest.approx(1, abs=0.03) and noise.var().item() == pytest.approx(
        1.25, abs=0.05
    )


@TRAINERS
def test_noise_does_not_depend_on_the_memory_layout(script):
    """A VAE on a GPU, or some convolutions on a CPU, give latents with channels_last strides."""
    model, images, noisy = Model(), torch.randn(2, 4, 8, 8), []
    for layout in (torch.contiguous_format, torch.channels_last):
        flags = {"noise_offset": 0.1, "input_perturbation": 0.1}
        loss_of(
            script,
            model,
            DDPMScheduler(),
            images.to(memory_format=layout),
            torch.ones(2) / 2,
            **flags,
        )
        noisy.append(model.noisy)
    assert torch.equal(*noisy)


def test_min_snr_keeps_the_pure_noise_of_a_zero_terminal_snr():
    scheduler = DDPMScheduler(prediction_type="v_prediction", rescale_betas_zero_snr=True)
    scheduler.alphas_cumprod = torch.tensor([1.0, 0.5, 0.0])
    weight = min_snr_weight(torch.full((2,), 0.5), scheduler, torch.tensor([1, 2]), 5.0)
    assert weight.tolist() == [0.5, 0.5]


def test_min_snr_weight_multiplies_before_it_divides():
    """weight * clamp / snr: weight * (clamp / snr) would change the bits of earlier runs."""
    scheduler, timesteps, weight = DDPMScheduler(), torch.arange(1000), torch.full((1000,), 1 / 3)
    found, snr = (
        min_snr_weight(weight, scheduler, timesteps, 5.0),
        compute_snr(scheduler, timesteps),
    )
    assert torch.equal(found, weight * snr.clamp(max=5) / snr)
    assert not torch.equal(found, weight * (snr.clamp(max=5) / snr))


def test_to_epsilon_turns_a_perfect_prediction_into_the_noise():
    images, noise, timesteps = (
        torch.randn(9, 3, 4, 4),
        torch.randn(9, 3, 4, 4),
        torch.arange(100, 1000, 100),
    )
    for prediction_type in TYPES:
        scheduler = DDPMScheduler(prediction_type=prediction_type)
        noisy = scheduler.add_noise(images, noise, timesteps)
        perfect = {"epsilon": noise, "sample": images}.get(prediction_type)
        perfect = scheduler.get_velocity(images, noise, timesteps) if perfect is None else perfect
        assert torch.allclose(to_epsilon(perfect, noisy, scheduler, timesteps), noise, atol=1e-4)


def test_objective_flags_override_only_what_is_given():
    none = argparse.Namespace(prediction_type=None, rescale_betas_zero_snr=False)
    assert objective_flags(none) == {}
    both = argparse.Namespace(prediction_type="sample", rescale_betas_zero_snr=True)
    expected = {
        "prediction_type": "sample",
        "rescale_betas_zero_snr": True,
        "timestep_spacing": "trailing",
    }
    assert objective_flags(both) == expected


@pytest.mark.parametrize("config, sentence", [
    ({"num_train_timesteps": 1},
     "the scheduler has 1 training timesteps: it needs at least two"),
    ({"num_train_timesteps": 2.5}, "has 2.5 training timesteps"),
    ({"prediction_type": None}, "prediction type None is unknown: set --prediction_type"),
    ({"rescale_betas_zero_snr": True, "prediction_type": "epsilon"},
     "needs --prediction_type v_prediction or sample"),
    ({"num_train_timesteps": 3}, "the scheduler has 2 betas for 3 training timesteps"),
    ({"betas": 0.1}, "the scheduler has 1 betas for 2 training timesteps"),
    ({"betas": [-0.1, 0.2]}, "betas go from -0.1 to 0.2: they must lie between 0 and 1"),
    ({"betas": [0.1, math.nan]}, "betas go from 0.1 to nan"),
])  # fmt: skip
def test_schedulers_that_can_not_be_trained_are_refused(config, sentence):
    plain = {
        "num_train_timesteps": 2,
        "prediction_type": "epsilon",
        "rescale_betas_zero_snr": False,
    }

    def check(betas=(0.1, 0.2), **changed):
        config = argparse.Namespace(**plain | changed)
        check_objective(argparse.Namespace(config=config, betas=torch.tensor(betas)))

    check()
    with pytest.raises(SystemExit, match=sentence):
        check(**config)


@TRAINERS
def test_noise_offset_is_drawn_for_each_image_and_channel(script):
    scheduler, model = DDPMScheduler(), Model()
    images, weight = torch.zeros(4000, 3, 2, 2), torch.full((4000,), 1 / 4000)
    loss_of(script, model, scheduler, images, weight, noise_offset=5.0)
    level = (1 - scheduler.alphas_cumprod[model.timesteps]).sqrt().view(-1, 1, 1, 1)
    offsets = (model.noisy / level).mean((2, 3))
    assert (torch.corrcoef(offsets.T) - torch.eye(3)).abs().max() < 0.1
    assert offsets.var(0).min() > 20  # over the images
