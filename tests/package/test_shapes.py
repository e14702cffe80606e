"""Shapes without values: which weights a result depends on."""

import torch

from diffusion_training.shapes import list_reached


def test_list_reached_finds_the_weights_that_get_a_gradient():
    """Also behind a branch, but not behind detach or in a layer whose output is dropped."""
    first, second, detached, dropped = (torch.nn.Linear(3, 3, device="meta") for _ in range(4))
    second.bias.requires_grad_(False)
    hidden = first(torch.zeros(2, 3, device="meta"))
    dropped(hidden)
    result = second(hidden) + detached(hidden).detach() + hidden
    assert list_reached(result) == {first.weight, first.bias, second.weight}
    result.sum().backward()
    modules = torch.nn.ModuleList([first, second, detached, dropped])
    with_gradient = {weight for weight in modules.parameters() if weight.grad is not None}
    assert list_reached(result) == with_gradient
