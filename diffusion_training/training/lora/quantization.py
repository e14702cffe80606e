"""Load a frozen base model in 8 bits, or in 4 bits (NF4, arXiv:2305.14314).

bitsandbytes is imported only where 4 bits need it, because most runs do not use it.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import init_empty_weights
from diffusers.models.modeling_utils import no_init_weights
from safetensors import safe_open

from diffusion_training.blocks import list_blocks
from diffusion_training.errors.sentences import fail
from diffusion_training.models import (
    NOT_FINITE,
    combine_hashes,
    find_weight_files,
    hash_weight,
    is_finite,
    raise_for_keys,
)

BLOCK = 64  # weights that share a scale in NF4


class Int8Linear(torch.nn.Linear):
    """A frozen linear layer with its weights in int8, and a scale for each output.

    compute_dtype: see `make_quantized_layer`.
    """

    quantization = "int8"
    compute_dtype = torch.float32

    def __init__(self, in_features: int, out_features: int, bias: bool, device: str) -> None:
        super().__init__(in_features, out_features, bias, device)
        weight = torch.empty(out_features, in_features, dtype=torch.int8, device=device)
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        self.register_buffer("scale", torch.empty(out_features, device=device), persistent=False)

    def quantize(self, weight: torch.Tensor) -> None:
        """Round a weight [out, in] to multiples of scales, and keep it on its device.

        The scales are rounded to bfloat16 first, so that a step in bfloat16 has the same ones.
        """
        scales, rounded = [], []
        # A CPU takes seven times as long with temporary tensors of the size of a whole weight.
        for rows in weight.split(max(1, 2**20 // weight.shape[1])):
            rows = rows.float()
            scale = (rows.abs().amax(dim=1) / 127).bfloat16().float()
            scales.append(scale.clamp_min(torch.finfo(torch.bfloat16).tiny))  # for a row of zeros
            rounded.append((rows / scales[-1][:, None]).round().to(torch.int8))
        self.scale = torch.cat(scales)
        self.weight = torch.nn.Parameter(torch.cat(rounded), requires_grad=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        result = Int8Product.apply(inputs.to(self.compute_dtype), self.weight, self.scale)
        return result if self.bias is None else result + self.bias.to(self.compute_dtype)


class Int8Product(torch.autograd.Function):
    """inputs @ (scale * weight).T, with weights that are restored for one layer at a time.

    Autograd would keep the restored weights of all layers for the backward pass. All numbers of
    int8 are exact in bfloat16.
    """

    @staticmethod
    def forward(
        ctx: Any, inputs: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(weight, scale)
        return F.linear(inputs, weight.to(inputs.dtype)) * scale.to(inputs.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        weight, scale = ctx.saved_tensors
        scaled = gradient * scale.to(gradient.dtype)
        return scaled @ weight.to(gradient.dtype), None, None


def load_quantized(
    model_class: Any,
    source: str,
    base_precision: str,
    device: torch.device,
    dtype: torch.dtype,
    subfolder: str = "",
    variant: str | None = None,
    merge: Callable[[str, torch.Tensor], torch.Tensor] | None = None,
    with_old: bool = False,
    hashed: bool = True,
) -> tuple[torch.nn.Module, str]:
    """Load a pretrained model with the layers of `list_quantizable` quantized, on `device`.

    Weights are read, hashed and quantized a few at a time, so memory never holds the complete model
    in the precision of its files. The hash is that of the exact weights, "" if they are not
    `hashed`. Raises ValueError as `load_weights` does. merge: changes the weights before that, see
    `read_training_adapter`. with_old: see `hash_weights`.
    """
    config = model_class.load_config(source, subfolder=subfolder)
    with no_init_weights(), init_empty_weights():
        model = model_class.from_config(config).eval()
    layers = list_quantizable(model)
    if not layers:
        fail(
            f"--base_precision {base_precision}: no layer of {source} is wide enough: leave it out"
        )
    for name in layers:
        exact = model.get_submodule(name)
        model.set_submodule(name, make_quantized_layer(exact, base_precision))
    model.is_loaded_in_4bit = base_precision == "nf4"  # peft chooses its layers by this
    shapes = {name: value.shape for name, value in model.state_dict().items()}
    parameters = {name for name, _ in model.named_parameters()}
    mismatched: list[str] = []
    broken: list[str] = []
    digests: list[list[str]] = []

    def place(name: str, value: torch.Tensor) -> None:
        if value.shape != shapes[name]:
            mismatched.append(name)
            return
        if merge:
            value = merge(name, value).to(value.dtype)
        layer_name, _, attribute = name.rpartition(".")
        layer = model.get_submodule(layer_name)
        if not is_finite(value):
            broken.append(name)
        if name in parameters:
            if hashed:
                digests.append(hash_weight(value, with_old))
            if attribute == "weight" and layer_name in layers:
                quantize(layer, value.to(device), dtype)
                return
            value = torch.nn.Parameter(value, requires_grad=False)
        setattr(layer, attribute, value)

    for path in find_weight_files(source, subfolder, variant):
        with safe_open(path, "pt") as file, ThreadPoolExecutor(4) as pool:
            names = [name for name in file.keys() if name in shapes]
            # hashing takes longest, and releases the GIL
            list(pool.map(lambda name, file=file: place(name, file.get_tensor(name)), names))
    raise_for_keys("mismatched keys", mismatched)
    raise_for_keys(NOT_FINITE, broken)
    missing = [name for name, value in model.state_dict().items() if value.is_meta]
    raise_for_keys("missing keys", missing)
    return model, combine_hashes(digests) if hashed else ""


def list_quantizable(model: torch.nn.Module) -> set[str]:
    """Return the names of the linear layers in a model's repeated blocks, except small ones.

    Layers outside the blocks stay exact: the embedders and the last layer.
    """
    names = set()
    for block_name, block in list_blocks(model).items():
        for name, layer in block.named_modules(prefix=block_name):
            is_linear = isinstance(layer, torch.nn.Linear)
            # a scale of NF4 must not be shared by two rows
            if is_linear and layer.in_features % BLOCK == 0 and layer.out_features >= BLOCK:
                names.add(name)
    return names


def make_quantized_layer(layer: torch.nn.Linear, base_precision: str) -> torch.nn.Linear:
    """Return a quantized layer in place of `layer`, without weights.

    It computes in float32 until `add_lora` has added an adapter, which gets that precision.
    """
    if base_precision == "int8":
        return Int8Linear(layer.in_features, layer.out_features, layer.bias is not None, "meta")
    import bitsandbytes

    quantized = bitsandbytes.nn.Linear4bit(
        layer.in_features,
        layer.out_features,
        bias=layer.bias is not None,
        compute_dtype=torch.float32,
        compress_statistics=False,
        quant_type="nf4",
        device="meta",
    )
    # On a CPU with AVX-512, bitsandbytes would rearrange the weights at the first sample for
    # kernels that have no gradient.
    quantized.support_avx512bf16_for_cpu = False
    quantized.quantization = "nf4"
    quantized.register_forward_pre_hook(cast_input)
    return quantized


def cast_input(layer: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor]:
    """Cast as autocast does for other layers, or the output would have the input's precision."""
    return (inputs[0].to(layer.compute_dtype),)


def quantize(layer: torch.nn.Linear, weight: torch.Tensor, dtype: torch.dtype) -> None:
    """Put a weight [out, in] into a layer of `make_quantized_layer`, on the weight's device."""
    if isinstance(layer, Int8Linear):
        layer.quantize(weight)
        return
    import bitsandbytes

    exact = bitsandbytes.nn.Params4bit(
        weight.float(),
        requires_grad=False,
        compress_statistics=False,
        quant_type="nf4",
        module=layer,
    )
    layer.weight = exact.to(weight.device)  # this quantizes it
    layer.quant_state.dtype = dtype  # the backward pass restores the weight in this precision
