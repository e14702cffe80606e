"""Shapes without values: the same as torch's, with the same inputs, and the same calls fail."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from diffusers import SD3Transformer2DModel, UNet2DConditionModel

from diffusion_training.shapes import QuickShapes, list_reached

SD3 = {
    "sample_size": 8, "patch_size": 2, "in_channels": 4, "num_layers": 2, "attention_head_dim": 8,
    "num_attention_heads": 2, "joint_attention_dim": 16, "caption_projection_dim": 16,
    "pooled_projection_dim": 16, "out_channels": 4,
}  # fmt: skip
UNET = {
    "sample_size": 8, "block_out_channels": (8, 16), "norm_num_groups": 4,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"), "cross_attention_dim": 16,
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"), "attention_head_dim": 8,
}  # fmt: skip
PROMPTS = {"encoder_hidden_states": (1, 5, 16)}


@pytest.mark.parametrize("kind, config, more", [
    (UNet2DConditionModel, UNET, {}), (SD3Transformer2DModel, SD3, {"pooled_projections": (1, 16)}),
])  # fmt: skip
def test_a_model_has_the_same_shapes_and_reached_weights(kind, config, more):
    """SD3's last block drops the text, so that some of its weights are not reached."""
    found = []
    for mode in (contextlib.nullcontext(), QuickShapes()):
        with torch.device("meta"), mode:
            model = kind(**config)
            inputs = {name: torch.zeros(shape) for name, shape in (PROMPTS | more).items()}
            result = model(torch.zeros(1, 4, 8, 8), timestep=torch.zeros(1), **inputs).sample
            reached = list_reached(result)
        names = {name for name, weight in model.named_parameters() if weight in reached}
        found.append((result.shape, result.dtype, names))
    assert found[0] == found[1] and found[0][2]


WRONG = {
    "width of a linear layer": lambda x: F.linear(x, torch.zeros(4, 7)),
    "width of a norm": lambda x: F.layer_norm(x, (5,)),
    "groups": lambda x: F.group_norm(x, 5),
    "weights of groups": lambda x: F.group_norm(x, 2, torch.zeros(8), torch.zeros(8)),
    "attention of another width": lambda x: F.scaled_dot_product_attention(x, x[..., 1:], x),
    "values of other tokens": lambda x: F.scaled_dot_product_attention(x, x, x[:, 1:]),
    "mask": lambda x: F.scaled_dot_product_attention(x, x, x, torch.zeros(3, 5)),
    "sum": lambda x: x + x[..., 1:],
}


@pytest.mark.parametrize("name", WRONG)
def test_a_call_that_torch_refuses_is_refused(name):
    with torch.device("meta"), QuickShapes(), pytest.raises(RuntimeError):
        WRONG[name](torch.zeros(2, 4, 6))


def test_sums_of_several_shapes_or_types_are_left_to_torch():
    with torch.device("meta"), QuickShapes():
        x = torch.zeros(2, 4, 6)
        assert (x + torch.zeros(4, 1)).shape == (2, 4, 6)
        assert (x.int() / 2).dtype == torch.float32
        assert (x.bfloat16() * x).dtype == torch.float32


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
