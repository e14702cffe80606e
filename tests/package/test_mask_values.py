"""Values of masks on the meta device: what depends only on them can be read, all else can't."""

import contextlib

import pytest
import torch

from diffusion_training.families import mask_values as module

MASK = torch.tensor([[True, True, False], [True, False, False]])


@contextlib.contextmanager
def reading(*values):
    """Yields tensors on the meta device, whose values are known inside the block."""
    known = [(value.to("meta"), value) for value in values]
    modes = module.MaskValues(known)
    with modes, module.ReadLists(modes):
        yield [tensor for tensor, _ in known]


def test_what_depends_only_on_a_mask_can_be_read():
    with reading(MASK) as (mask,):
        counts = mask.sum(dim=1)
        assert counts.is_meta and counts.tolist() == [2, 1]
        assert [counts.max().item(), int(counts[1])] == [2, 1]
        places = torch.arange(3, device="meta")
        assert (places[None] * mask).tolist() == [[0, 1, 0], [0, 0, 0]]
        assert mask.nonzero().tolist() == [[0, 0], [0, 1], [1, 0]]
        assert torch.zeros(2, device="meta").tolist() == [0, 0]
        where = torch.tensor([1, 0])  # on the CPU
        assert mask[where].is_meta and mask[where].tolist() == MASK[[1, 0]].tolist()


def test_a_mask_cuts_tensors_whose_values_are_unknown():
    with reading(MASK) as (mask,):
        states = torch.nn.Linear(4, 5, device="meta").weight[:3, :4].expand(2, 3, 4)
        assert states[mask].shape == (3, 4)
        assert states[0, mask[0]].shape == (2, 4)
        with pytest.raises((RuntimeError, NotImplementedError)):
            (states[mask] + 1).tolist()


def test_tensors_on_the_cpu_stay_there():
    with reading(MASK):
        assert (torch.arange(3) + 1).tolist() == [1, 2, 3]
        assert torch.ones(2).device.type == "cpu"
        assert torch.ones(2).to("meta").tolist() == [1, 1]


def test_values_of_large_tensors_are_not_computed(monkeypatch):
    monkeypatch.setattr(module, "MOST", 6)
    with reading(MASK) as (mask,), pytest.raises((RuntimeError, NotImplementedError)):
        mask.logical_not().tolist()
    monkeypatch.setattr(module, "MOST", 7)
    with reading(MASK) as (mask,):
        assert mask.logical_not().tolist() == (~MASK).tolist()
