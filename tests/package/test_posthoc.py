"""Post-hoc EMA: profiles, their correlations, and averages made of snapshots."""

import shutil

import numpy as np
import pytest
import torch

from diffusion_training.training.keeping.posthoc import (
    WIDTHS,
    PosthocEma,
    check_snapshots,
    correlate,
    list_snapshots,
    prune_snapshots,
    reconstruct,
    solve,
    solve_exponent,
    write_losses,
    write_snapshot,
)

CPU = torch.device("cpu")
STEPS = np.random.default_rng(0).integers(1, 40, 400)  # images of each step


def count_weights(ends, gamma):
    """How much each step's weights count in the average after the last, summed step by step."""
    counts = np.zeros(len(ends))
    for step, end in enumerate(ends):
        decay = (1 - (end - (ends[step - 1] if step else 0)) / end) ** (gamma + 1)
        counts *= decay
        counts[step] = 1 - decay
    return counts


@pytest.mark.parametrize("sigma_rel", [0.01, 0.05, 0.1, 0.28])
def test_the_width_is_the_standard_deviation_of_the_times(sigma_rel):
    gamma = solve_exponent(sigma_rel)
    times = (np.arange(10**5) + 0.5) / 10**5
    weights = times**gamma / (times**gamma).sum()
    mean = weights @ times
    assert (weights @ (times - mean) ** 2) ** 0.5 == pytest.approx(sigma_rel, rel=1e-4)


def test_the_measured_widths_grow_by_less_than_a_factor_of_1_7():
    """So that the best width is never far from one of them."""
    widths = np.array(WIDTHS)
    assert widths[0] == 0.02 and widths[-1] == 0.25
    assert np.all(widths[1:] > widths[:-1]) and np.all(widths[1:] < 1.7 * widths[:-1])


def test_the_averages_have_the_profile_of_a_power_of_the_images():
    ends = STEPS.cumsum()
    for sigma_rel in (0.05, 0.2):
        gamma = solve_exponent(sigma_rel)
        bounds = np.concatenate([[0], (ends / ends[-1]) ** (gamma + 1)])
        assert np.allclose(count_weights(ends, gamma), np.diff(bounds), rtol=0, atol=1e-12)


def test_correlations_are_the_integrals_of_products_of_profiles():
    times = (np.arange(10**6) + 0.5) / 10**6
    for a, gamma_a, b, gamma_b in (
        (1.0, 6.0, 0.5, 2.0),
        (0.3, 2.0, 0.9, 12.0),
        (1.0, 3.0, 1.0, 3.0),
    ):
        profiles = [
            np.where(times < end, (gamma + 1) * times**gamma / end ** (gamma + 1), 0)
            for end, gamma in ((a, gamma_a), (b, gamma_b))
        ]
        found = correlate(np.array(a), np.array(gamma_a), np.array(b), np.array(gamma_b))
        assert found == pytest.approx((profiles[0] * profiles[1]).mean(), rel=1e-5)


def test_a_stored_average_is_reconstructed_from_itself():
    gammas = [solve_exponent(width) for width in (0.05, 0.1)] * 3
    counts = solve([100, 100, 200, 200, 300, 300], gammas, 300, solve_exponent(0.1))
    assert np.allclose(counts, [0, 0, 0, 0, 0, 1], atol=1e-6)


@pytest.mark.parametrize("width, most", [(0.07, 3e-3), (0.15, 3e-3), (0.03, 0.06)])
def test_snapshots_make_the_average_that_training_with_the_width_would_have(width, most, tmp_path):
    """Compared with the sum of the weights after every step, with the profile's counts."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 200)
    model.bias.requires_grad_(False)  # a frozen weight is neither averaged nor changed
    bias = model.bias.clone()
    posthoc = PosthocEma({"unet": model}, [0.05, 0.1])
    velocity = torch.zeros_like(model.weight)
    seen = []
    for step, images in enumerate(STEPS, 1):
        velocity = 0.95 * velocity + 0.05 * torch.randn_like(velocity)
        model.weight.data += velocity + 0.01
        seen.append(model.weight.detach().clone())
        posthoc.update(int(images))
        if step % 25 == 0:
            write_snapshot(tmp_path, step, posthoc.copy(CPU))
    counts = torch.tensor(count_weights(STEPS.cumsum(), solve_exponent(width)))
    expected = torch.einsum("s,sij->ij", counts, torch.stack(seen).double()).float()
    (found,) = [weight for _, weight in reconstruct(list_snapshots(tmp_path), "unet", width)]
    spread = (model.weight - expected).norm()
    assert (found - expected).norm() < most * spread
    averages = posthoc.reconstruct(list_snapshots(tmp_path), width, True)
    assert torch.equal(averages["unet"].weight, found) and torch.equal(model.bias, bias)


def test_a_run_that_resumes_without_its_snapshots_says_so(tmp_path, capsys):
    checkpoint = tmp_path / "checkpoint-3"
    (tmp_path / "posthoc_ema/step-0000003").mkdir(parents=True)
    (tmp_path / "posthoc_ema/step-0000003/unet-0.05.safetensors").touch()
    check_snapshots(tmp_path, checkpoint, 3, [0.05, 0.1], 1)
    check_snapshots(tmp_path, checkpoint, 2, [0.05, 0.1], 3)  # none is due
    check_snapshots(tmp_path, checkpoint, 2, None, 1)  # the snapshot will be deleted
    assert not capsys.readouterr().out
    check_snapshots(tmp_path, checkpoint, 2, [0.05, 0.1], 2)
    assert "no snapshots of --posthoc_ema up to step 2" in capsys.readouterr().out


def test_snapshots_after_the_checkpoint_of_a_resumed_run_are_deleted(tmp_path):
    posthoc = PosthocEma({"unet": torch.nn.Linear(2, 2)}, [0.05, 0.1])
    posthoc.images = 4
    for step in (2, 4):
        write_snapshot(tmp_path, step, posthoc.copy(CPU))
    write_losses(tmp_path, 4, {0.1: 2.0, 0.2: 1.0, 0.25: 3.0})
    prune_snapshots(tmp_path, 2)
    assert {path.name for path in (tmp_path / "posthoc_ema").iterdir()} == {"step-0000002"}
    assert len(list_snapshots(tmp_path)) == 2
    prune_snapshots(tmp_path, -1)
    assert list_snapshots(tmp_path) == []


def test_snapshots_that_are_damaged_missing_or_of_another_run_are_refused(tmp_path):
    run, other = tmp_path / "run", tmp_path / "other"
    for folder in (run, other):
        folder.mkdir()
        posthoc = PosthocEma({"unet": torch.nn.Linear(2, 2)}, [0.05, 0.1])
        for step in (2, 4, 6):
            posthoc.update(2)
            write_snapshot(folder, step, posthoc.copy(CPU))
            for weight in posthoc.averages[0.05]["unet"].parameters():
                weight.data += 1
    step = run / "posthoc_ema/step-0000004"
    path = step / "unet-0.05.safetensors"
    content = path.read_bytes()
    assert len(list_snapshots(run)) == 6
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(SystemExit, match="unet-0.05.safetensors can't be read .it has changed"):
        list_snapshots(run)
    shutil.copy(other / "posthoc_ema/step-0000004/unet-0.05.safetensors", path)
    with pytest.raises(SystemExit, match="does not follow the snapshots before it"):
        list_snapshots(run)
    shutil.rmtree(step)
    with pytest.raises(SystemExit, match="step-0000006/.+ does not follow the snapshots before"):
        list_snapshots(run)
    shutil.rmtree(run / "posthoc_ema/step-0000002")
    with pytest.raises(SystemExit, match="does not follow the snapshots before it"):
        list_snapshots(run)
