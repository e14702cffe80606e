"""LoKr: an adapter whose weights are the Kronecker product of two small matrices, w1 and w2.

arXiv:2309.14859. peft makes the layers, and reads and names their weights. Here they get another
forward pass.
"""

from typing import Any

import torch
import torch.nn.functional as F
from peft.tuners.lokr import layer as peft_layers


class Factored(torch.nn.Module):
    """Applies w1 and w2 one after the other.

    peft makes their product, which is as large as the layer's weights: more than twice the
    operations. It also draws a number in each call, and leaves the layer out if it is 0.
    """

    base_layer: Any
    scaling: dict[str, float]
    disable_adapters: bool
    lokr_w1: torch.nn.ParameterDict
    lokr_w2: torch.nn.ParameterDict
    lokr_w2_a: torch.nn.ParameterDict
    lokr_w2_b: torch.nn.ParameterDict

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        result = self.base_layer(inputs)
        if self.disable_adapters:
            return result
        w1 = self.scaling["default"] * self.lokr_w1["default"]
        if "default" in self.lokr_w2:
            w2 = self.lokr_w2["default"]
        else:
            w2 = self.lokr_w2_a["default"] @ self.lokr_w2_b["default"]
        change = self.multiply(inputs, w1.to(inputs.dtype), w2.to(inputs.dtype))
        return result + change.to(result.dtype)


class Linear(Factored, peft_layers.Linear):
    """The LoKr of a linear layer."""

    def multiply(self, inputs: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
        """inputs [..., c * d] @ kron(w1 [a, c], w2 [b, d]).T -> [..., a * b]."""
        parts = inputs.unflatten(-1, (w1.shape[1], w2.shape[1]))
        return (w1 @ F.linear(parts, w2)).flatten(-2)


class Conv2d(Factored, peft_layers.Conv2d):
    """The LoKr of a convolution."""

    def multiply(self, inputs: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor) -> torch.Tensor:
        """inputs [N, c * d, h, w] convolved with kron(w1 [a, c], w2) -> [N, a * b, h, w].

        w2: [b, d, k, k], or [b, d * k * k] as a product.
        """
        layer = self.base_layer
        parts = inputs.unflatten(1, (w1.shape[1], -1)).flatten(0, 1)
        kernel = w2.view(len(w2), -1, *layer.kernel_size)
        maps = F.conv2d(parts, kernel, None, layer.stride, layer.padding, layer.dilation)
        maps = maps.unflatten(0, (len(inputs), -1))
        return torch.einsum("ac,ncbhw->nabhw", w1, maps).flatten(1, 2)


def simplify_lokr(model: torch.nn.Module) -> None:
    """Let the LoKr layers that peft has added compute as above. Raises ValueError for others."""
    for name, module in model.named_modules():
        if isinstance(module, peft_layers.LoKrLayer):
            base = module.base_layer
            if isinstance(base, torch.nn.Linear):
                module.__class__ = Linear
            elif isinstance(base, torch.nn.Conv2d) and base.groups == 1:
                module.__class__ = Conv2d
            else:
                raise ValueError(f"a LoKr of {name} is not supported")
