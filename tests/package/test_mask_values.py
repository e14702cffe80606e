"""Values of masks beside the meta device: what depends only on them can be read, all else can't."""

import pytest
import torch

from diffusion_training.families.recorded import mask_values as module

MASK = torch.tensor([[True, True, False], [True, False, False]])
UNREADABLE = pytest.raises((RuntimeError, NotImplementedError))


def test_what_depends_only_on_a_mask_can_be_read():
    with module.on_meta():
        counts = MASK.sum(dim=1)
        assert counts.tolist() == [2, 1]
        assert [counts.max().item(), int(counts[1])] == [2, 1]
        places = torch.arange(3, device="meta")
        assert (places[None] * MASK).tolist() == [[0, 1, 0], [0, 0, 0]]
        assert MASK.nonzero().tolist() == [[0, 0], [0, 1], [1, 0]]
        assert MASK[torch.tensor([1, 0])].tolist() == [[True, False, False], [True, True, False]]


def test_a_mask_cuts_tensors_whose_values_are_unknown():
    states = torch.nn.Linear(4, 5, device="meta").weight[:3, :4].expand(2, 3, 4)
    with module.on_meta():
        assert states[MASK].shape == (3, 4)
        assert states[0, MASK[0]].shape == (2, 4)
        with UNREADABLE:
            (states[MASK] + 1).tolist()


def test_fractions_are_on_the_meta_device():
    with module.on_meta(), torch.autocast("meta", torch.bfloat16):
        shares = MASK.sum(dim=1) / 2
        assert shares.is_meta and shares.dtype == torch.float32
        with UNREADABLE:
            shares.tolist()


def test_autocast_of_another_device_works_as_ever():
    with module.on_meta(), torch.autocast("cpu", torch.bfloat16):
        assert torch.is_autocast_enabled("cpu")


def test_values_of_large_tensors_are_not_computed(monkeypatch):
    monkeypatch.setattr(module, "MAX_NUMBERS", 6)
    with module.on_meta(), UNREADABLE:
        MASK.logical_not().sum().tolist()
    monkeypatch.setattr(module, "MAX_NUMBERS", 7)
    with module.on_meta():
        assert MASK.logical_not().tolist() == (~MASK).tolist()
