"""Shapes without values: which weights a result depends on, and how few blocks tell."""

import pytest
import torch
from diffusers import ModelMixin, QwenImageTransformer2DModel, UNet2DConditionModel
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.transformers import transformer_qwenimage

from diffusion_training.shapes import call_on_meta, check_shapes, list_reached

QWEN = {
    "patch_size": 1, "in_channels": 4, "out_channels": 4, "num_layers": 5, "attention_head_dim": 16,
    "num_attention_heads": 2, "joint_attention_dim": 16, "axes_dims_rope": (4, 6, 6),
}  # fmt: skip
UNET = {
    "sample_size": 8, "block_out_channels": (8, 16), "norm_num_groups": 4, "layers_per_block": 1,
    "cross_attention_dim": 16, "attention_head_dim": 2, "transformer_layers_per_block": 4,
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
}  # fmt: skip
CONDITION = {"prompt_embeds": torch.zeros(1, 5, 16)}


class CountsItsBlocks(QwenImageTransformer2DModel):
    def forward(self, *args, **options):
        assert len(self.transformer_blocks) == self.config.num_layers
        return super().forward(*args, **options)


def call_qwen(models, noisy, times, condition):
    height, width = noisy.shape[2:]
    tokens, embeds = noisy.flatten(2).mT, condition["prompt_embeds"]
    mask = torch.ones(embeds.shape[:2], dtype=torch.bool)
    output = models["model"](tokens, embeds, mask, times, img_shapes=[[(1, height, width)]]).sample
    return output.mT.unflatten(2, (height, width))


def call_unet(models, noisy, times, condition):
    return models["model"](noisy, times, condition["prompt_embeds"]).sample


@pytest.mark.parametrize(
    ("kind", "config", "call", "block", "counts"),
    [
        (QwenImageTransformer2DModel, QWEN, call_qwen, "QwenImageTransformerBlock", (5, 2)),
        (UNet2DConditionModel, UNET, call_unet, "BasicTransformerBlock", (16, 8)),
        (CountsItsBlocks, QWEN, call_qwen, "QwenImageTransformerBlock", (5, 5)),
    ],
)
def test_the_ends_of_equal_blocks_tell_as_much_as_all(kind, config, call, block, counts):
    """The last block of Qwen-Image drops the text's output, so some of its weights do nothing."""
    with torch.device("meta"):
        models = {"model": kind(**config)}
    called = []

    def note(module, args, output):
        called.append(type(module).__name__)

    hook = torch.nn.modules.module.register_module_forward_hook(note)
    try:
        with torch.device("meta"):
            whole = call_on_meta(models, call, [4, 8, 8], CONDITION)
        assert called.count(block) == counts[0]
        called.clear()
        assert check_shapes(models, call, "the model", [4, 8, 8], CONDITION) == whole
        assert called.count(block) == counts[1]
    finally:
        hook.remove()
    assert bool(whole.unreached) == (kind is not UNet2DConditionModel)


def test_weights_that_do_nothing_in_each_block_are_named_in_all_blocks(monkeypatch):
    class Block(transformer_qwenimage.QwenImageTransformerBlock):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            self.idle = torch.nn.Linear(2, 2)

    monkeypatch.setattr(transformer_qwenimage, "QwenImageTransformerBlock", Block)
    with torch.device("meta"):
        models = {"model": QwenImageTransformer2DModel(**QWEN)}
        whole = call_on_meta(models, call_qwen, [4, 8, 8], CONDITION)
    short = check_shapes(models, call_qwen, "the model", [4, 8, 8], CONDITION)
    assert sorted(short.unreached) == sorted(whole.unreached)
    assert sum("idle" in name for name in whole.unreached) == 2 * QWEN["num_layers"]


class Part(torch.nn.Module):
    """A block, whose second layer is used in all blocks of a stack but the last."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x, is_last):
        return self.first(x) if is_last else self.second(self.first(x))


class TwoStacks(ModelMixin, ConfigMixin):
    _repeated_blocks = ["Part"]

    @register_to_config
    def __init__(self, depth=4):
        super().__init__()
        for name in ("text", "image"):
            blocks = torch.nn.ModuleList([Part() for _ in range(depth)])
            self.add_module(name, torch.nn.ModuleDict({"blocks": blocks}))

    def forward(self, x, timestep):
        for stack, keeps in ((self.text, False), (self.image, True)):
            blocks = [*stack["blocks"]]
            for block in blocks:
                x = block(x, is_last=block is blocks[-1] and not keeps)
        return x


def test_blocks_of_two_stacks_are_not_taken_for_one():
    with torch.device("meta"):
        models = {"model": TwoStacks()}
    given = models, lambda models, noisy, times, _: models["model"](noisy, times)
    found = check_shapes(*given, "the model", [4, 8, 4], CONDITION)
    assert found.unreached == [f"text.blocks.3.second.{name}" for name in ("weight", "bias")]


def test_a_model_that_does_not_fit_ends_with_its_own_reason():
    with torch.device("meta"):
        models = {"model": QwenImageTransformer2DModel(**QWEN)}
    narrow = CONDITION | {"prompt_embeds": torch.zeros(1, 5, 12)}
    with pytest.raises(SystemExit, match=r"the model can't be trained here \(.*12"):
        check_shapes(models, call_qwen, "the model", [4, 8, 8], narrow)
    with pytest.raises(SystemExit, match=r"the shape \[4, 8, 8\], not \[3, 8, 8\]"):
        check_shapes(
            models, lambda m, x, *rest: call_qwen(m, x.new_zeros(1, 4, 8, 8), *rest), "the model",
            [3, 8, 8], CONDITION,
        )  # fmt: skip


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
