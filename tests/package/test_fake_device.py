"""The imitated GPU of tests/fake_device.py: what it computes, what it refuses, what it counts."""

import copy
import io
import linecache

import fake_device
import pytest
import safetensors.torch
import torch
from accelerate import Accelerator
from conftest import make_tiny_unet
from fake_device import DEVICE, WAITS, forked
from torch.nn import functional as F

from diffusion_training import memory


def is_on_gpu(tensor):
    return str(tensor.device) == DEVICE


def assert_waits(count, call):
    """The call waits so often, and each wait is at a line of this file."""
    WAITS.clear()
    call()
    assert sum(WAITS.values()) == count, WAITS
    assert {wait.path for wait in WAITS} <= {"tests/package/test_fake_device.py"}


# operators that wait, with a tensor of six numbers, a mask and indices, all on the device
WAITING = {
    "item": lambda x, mask, index: x[0].item(),
    "float": lambda x, mask, index: float(x[0]),
    "bool": lambda x, mask, index: bool(mask[0]),
    "if": lambda x, mask, index: 1 if mask.any() else 2,
    "format": lambda x, mask, index: f"{x.sum():.3f}",
    "print": lambda x, mask, index: repr(x),
    "tolist": lambda x, mask, index: x.tolist(),
    "cpu": lambda x, mask, index: x.cpu(),
    "copy to the CPU": lambda x, mask, index: torch.zeros(6).copy_(x),
    "copy to unpinned memory": lambda x, mask, index: torch.zeros(6).copy_(x, non_blocking=True),
    "copy from the CPU": lambda x, mask, index: x.copy_(torch.ones(6)),
    "to": lambda x, mask, index: torch.ones(6).to(DEVICE),
    "to, not pinned": lambda x, mask, index: torch.ones(6).to(DEVICE, non_blocking=True),
    "to, blocking": lambda x, mask, index: torch.ones(6).pin_memory().to(DEVICE),
    "a list": lambda x, mask, index: torch.tensor([1.0, 2.0], device=DEVICE),
    "a number": lambda x, mask, index: torch.as_tensor(3, device=DEVICE),
    "assign a number": lambda x, mask, index: x.__setitem__(0, 3.0),
    "nonzero": lambda x, mask, index: mask.nonzero(),
    "where": lambda x, mask, index: torch.where(mask),
    "index by a mask": lambda x, mask, index: x[mask],
    "assign to a mask": lambda x, mask, index: x.__setitem__(mask, x[:3] + 1),
    "index from the CPU": lambda x, mask, index: x[torch.tensor([1, 2])],
    "masked_select": lambda x, mask, index: x.masked_select(mask),
    "unique": lambda x, mask, index: x.unique(),
    "unique_consecutive": lambda x, mask, index: x.unique_consecutive(),
    "repeat_interleave": lambda x, mask, index: x.repeat_interleave(index),
    "equal": lambda x, mask, index: torch.equal(x, x + 1),
    "bincount": lambda x, mask, index: index.bincount(),
    "save": lambda x, mask, index: torch.save(x, io.BytesIO()),
    "synchronize": lambda x, mask, index: torch.get_device_module(DEVICE).synchronize(),
    "wait for an event": lambda x, mask, index: (
        torch.get_device_module(DEVICE).Event().synchronize()
    ),
}
NOT_WAITING = {
    "arithmetic": lambda x, mask, index: (x * 2 + index).softmax(0).cumsum(0).argsort(),
    "new tensors": lambda x, mask, index: (torch.zeros(3, device=DEVICE), torch.rand_like(x)),
    "a number from the CPU": lambda x, mask, index: x * torch.tensor(3.0),
    "index": lambda x, mask, index: x[index],
    "assign to indices": lambda x, mask, index: x.__setitem__(index, x * 2),
    "assign a number to a mask": lambda x, mask, index: x.__setitem__(mask, 0),
    "masked_fill": lambda x, mask, index: x.masked_fill(mask, 0).where(mask, x),
    "repeat_interleave": lambda x, mask, index: x.repeat_interleave(2),
    "repeat_interleave of known size": lambda x, mask, index: x.repeat_interleave(
        index, output_size=15
    ),
    "to": lambda x, mask, index: torch.ones(6).pin_memory()[:3].to(DEVICE, non_blocking=True),
    "cpu": lambda x, mask, index: x.to("cpu", non_blocking=True),
    "copy to pinned memory": lambda x, mask, index: (
        torch.zeros(6).pin_memory().copy_(x, non_blocking=True)
    ),
    "bfloat16": lambda x, mask, index: x.to(torch.bfloat16),
    "copy": lambda x, mask, index: copy.deepcopy(x),
    "an empty list": lambda x, mask, index: torch.tensor([], device=DEVICE),
    "event": lambda x, mask, index: fake_device.Event().record(),
}


@forked
def test_waits_are_counted_with_their_line():
    for calls, count in ((WAITING, 1), (NOT_WAITING, 0)):
        for name, call in calls.items():
            x = torch.arange(6, device=DEVICE).float()
            index = torch.arange(6, device=DEVICE)
            mask = index % 2 == 0
            print(name)
            assert_waits(count, lambda: call(x, mask, index))


@forked
def test_steps_before_a_wait_are_counted():
    layer = torch.nn.Linear(2, 2, device=DEVICE)
    optimizer, other = (torch.optim.AdamW(layer.parameters(), fused=True) for _ in range(2))
    layer(torch.ones(1, 2, device=DEVICE)).sum().backward()
    for _ in range(2):
        optimizer.step()
        other.step()  # such as a second one inside the first
        layer.weight.sum().item()
    assert [(wait.steps, wait.function) for wait in WAITS] == [
        (number, "test_steps_before_a_wait_are_counted") for number in (1, 2)
    ]
    assert set(WAITS.values()) == {1}
    fake_device.forget_counts()
    assert not WAITS and fake_device.STEPS.number == 0


@forked
def test_a_wait_in_the_backward_pass_has_our_line():
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(context, x):
            return x * 2

        @staticmethod
        def backward(context, gradient):
            gradient.sum().item()
            return gradient * 2

    x = torch.ones(2, device=DEVICE, requires_grad=True)
    assert_waits(1, lambda: Doubled.apply(x).sum().backward())
    (wait,) = WAITS
    assert linecache.getline(__file__, wait.line).strip() == "gradient.sum().item()"
    assert wait.function == "backward"


@forked
def test_mixed_devices_raise():
    x, y = torch.ones(2, 3, device=DEVICE), torch.ones(3)
    index = torch.tensor([0, 1], device=DEVICE)
    for call in (
        lambda: x + y,
        lambda: y.add_(x[0]),
        lambda: torch.cat([x[0], y]),
        lambda: F.linear(x, y[None]),
        lambda: y[index],
        lambda: torch._foreach_add([x, x], [y, y]),
    ):
        with pytest.raises(RuntimeError, match=r"mixes devices: .*(gpu \[|cpu \[3\])"):
            call()
    with pytest.raises(RuntimeError, match=r"aten::add.Tensor mixes devices: gpu \[2, 3\], cpu \["):
        x + y
    assert is_on_gpu(x + torch.tensor(3))  # a number may be on the CPU, as on CUDA
    with pytest.raises(TypeError, match="can't convert"):
        x.numpy()
    with pytest.raises(RuntimeError, match="with a generator of the CPU"):
        torch.randn(3, device=DEVICE, generator=torch.Generator())


@forked
def test_numbers_and_gradients_of_a_layer_equal_the_cpus():
    torch.manual_seed(0)
    layer, x = torch.nn.Linear(5, 3), torch.randn(4, 5)
    other, parameter = copy.deepcopy(layer), layer.weight
    parameter.label = "a library's"
    layer.to(DEVICE)
    assert layer.weight is parameter and is_on_gpu(parameter) and parameter.label
    results = []
    for module, inputs in ((layer, x.to(DEVICE)), (other, x)):
        optimizer = torch.optim.AdamW(module.parameters(), fused=True)
        module(inputs).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 0.1)
        gradients = [weight.grad.clone() for weight in module.parameters()]
        optimizer.step()
        results.append([*gradients, *module.parameters()])
    for one, two in zip(*results, strict=True):
        assert is_on_gpu(one) and torch.equal(one.cpu(), two)
    moved = layer.cpu()
    assert not any(map(is_on_gpu, moved.parameters()))


@forked
def test_copies_are_apart():
    layer = torch.nn.Linear(2, 2, device=DEVICE)
    other = copy.deepcopy(layer)
    assert isinstance(other.weight, torch.nn.Parameter) and other.weight.requires_grad
    with torch.no_grad():
        other.weight.zero_()
    assert layer.weight.abs().sum() > 0
    tied = copy.deepcopy([layer.weight, layer.weight])
    assert tied[0] is tied[1] and is_on_gpu(tied[0])
    layer.weight.data = torch.ones(2, 2, device=DEVICE)
    assert layer.weight.sum() == 4 and layer(torch.ones(1, 2, device=DEVICE)).shape == (1, 2)


@forked
def test_saved_tensors_are_on_the_cpu_when_loaded():
    layer = torch.nn.Linear(2, 2, device=DEVICE)
    file = io.BytesIO()
    torch.save({"weights": layer.state_dict(), "one": layer.weight}, file)
    file.seek(0)
    loaded = torch.load(file)
    assert loaded["one"].requires_grad
    safe = safetensors.torch.load(safetensors.torch.save(layer.state_dict()))
    for weights in (loaded["weights"], safe):
        assert torch.equal(weights["weight"], layer.weight.detach().cpu())
        assert not is_on_gpu(weights["weight"])
    other = torch.nn.Linear(2, 2, device=DEVICE)
    other.load_state_dict(safe)
    assert torch.equal(other.weight, layer.weight)


@forked
def test_generators_repeat_their_numbers():
    generator = torch.Generator(DEVICE).manual_seed(3)
    assert str(generator.device) == DEVICE
    one = torch.randn(5, device=DEVICE, generator=generator)
    state = generator.get_state()
    two = torch.randn(5, device=DEVICE, generator=generator)
    assert not torch.equal(one, two)
    generator.set_state(state)
    assert torch.equal(torch.randn(5, device=DEVICE, generator=generator), two)
    generator.manual_seed(3)
    assert torch.equal(torch.randn(5, device=DEVICE, generator=generator), one)
    assert torch.Generator().device.type == "cpu"
    torch.manual_seed(1)
    one = torch.randn(5, device=DEVICE)
    torch.manual_seed(1)
    assert torch.equal(torch.randn(5, device=DEVICE), one)


@forked
def test_autocast_has_cudas_types():
    layer, x = torch.nn.Linear(4, 4, device=DEVICE), torch.randn(4, 4, device=DEVICE)
    convolution = torch.nn.Conv2d(1, 1, 3, device=DEVICE)
    for precision in (torch.bfloat16, torch.float16):
        with torch.autocast("gpu", precision):
            y = layer(x)
            heads = y[None, None]
            low = [y, y @ x, convolution(heads), F.scaled_dot_product_attention(*[heads] * 3)]
            high = [y.softmax(-1), F.layer_norm(y, (4,)), F.mse_loss(y, y), y.exp(), y.sum()]
            kept = [y + y, F.silu(y)]
            widest = [torch.cat([y, x]), y + x]
        assert {each.dtype for each in low + kept} == {precision}
        assert {each.dtype for each in high + widest} == {torch.float32}
        y.sum().backward()
        assert layer.weight.grad.dtype == torch.float32
    assert layer(x).dtype == torch.float32
    # as on the CPU, where the lists are torch's own
    with torch.autocast("cpu", torch.bfloat16):
        other = copy.deepcopy(layer).cpu()(x.cpu())
    with torch.autocast("gpu", torch.bfloat16):
        assert torch.equal(layer(x).cpu(), other)


@forked
def test_inference_mode_checkpoints_and_layouts():
    layer = torch.nn.Conv2d(3, 4, 3, device=DEVICE).to(memory_format=torch.channels_last)
    images = torch.randn(2, 3, 8, 8, device=DEVICE).contiguous(memory_format=torch.channels_last)
    with torch.inference_mode():
        inferred = layer(images)
        assert not inferred.requires_grad and inferred.flatten().shape == (2 * 4 * 6 * 6,)
        assert inferred.is_contiguous(memory_format=torch.channels_last)
    dropped = torch.nn.Sequential(layer, torch.nn.Dropout(0.5))
    torch.manual_seed(0)
    dropped(images).square().sum().backward()
    gradient, layer.weight.grad = layer.weight.grad, None
    torch.manual_seed(0)
    torch.utils.checkpoint.checkpoint(
        dropped, images, use_reentrant=False
    ).square().sum().backward()
    assert torch.equal(layer.weight.grad, gradient)


@forked
def test_the_module_has_cudas_functions():
    device = torch.device(DEVICE)
    module = torch.get_device_module(device)
    begin, end = module.Event(enable_timing=True), module.Event(enable_timing=True)
    begin.record()
    end.record()
    later = module.current_stream().record_event()
    assert 0 <= begin.elapsed_time(end) <= begin.elapsed_time(later) < 1000
    assert module.max_memory_allocated(device) <= module.max_memory_reserved(device)
    assert module.get_device_properties(device).total_memory > 10**9
    assert torch.accelerator.current_accelerator().type == device.type
    loader = torch.utils.data.DataLoader(torch.ones(4, 2), batch_size=2, pin_memory=True)
    assert all(batch.is_pinned() for batch in loader)
    assert memory.is_gpu(device) and memory.measure_memory(device) == (2 * 10**9, 3 * 10**9)
    assert str(Accelerator().device) == DEVICE


@forked
def test_unet_is_close_to_the_cpus():
    torch.manual_seed(0)
    cpu = make_tiny_unet(cross_attention_dim=8)
    gpu = copy.deepcopy(cpu).to(DEVICE)
    inputs = torch.randn(2, 4, 8, 8), torch.tensor([3, 7]), torch.randn(2, 5, 8)
    WAITS.clear()
    moved = [each.pin_memory().to(DEVICE, non_blocking=True) for each in inputs]
    results = []
    for unet, arguments in ((gpu, moved), (cpu, inputs)):
        prediction = unet(*arguments).sample
        prediction.square().mean().backward()
        results.append([prediction, *(weight.grad for weight in unet.parameters())])
    assert not WAITS
    for one, two in zip(*results, strict=True):
        difference = (one.cpu() - two).norm() / results[1][0].norm()
        assert difference < 1e-5
