"""An imitated GPU: a torch device "gpu:0" whose numbers are computed on the CPU.

It shows two faults that a CPU hides: an operator that mixes devices raises, and everything that
would make the CPU wait for a GPU is counted in `WAITS`, with the line that asked for it.

`switch_on` changes torch for the rest of the process, so call it in a fork: see `forked`.
"""

import collections
import contextlib
import functools
import os
import re
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, finish, patch, start
from diffusers.utils import torch_utils
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils import checkpoint
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
from torch.utils.flop_counter import flop_registry

from diffusion_training.latents import batch_inputs

NAME = "gpu"
DEVICE = f"{NAME}:0"
# {Wait: how often}. steps: of the optimizer, before the wait. path, line, function: the innermost
# ones of this repository's code, or else of its tests
Wait = collections.namedtuple("Wait", "steps operator path line function")
WAITS = collections.Counter()
# {Product: how often}: multiplications of matrices, convolutions and attention. dtype: such as
# "bfloat16", of the result. The rest is as above.
Product = collections.namedtuple("Product", "steps operator dtype path line function")
PRODUCTS = collections.Counter()

# These operators need a number from the device before they can return.
WAITING = {
    f"aten::{name}"
    for name in (
        "_local_scalar_dense", "nonzero", "masked_select", "_unique", "_unique2", "unique_dim",
        "unique_consecutive", "unique_dim_consecutive", "repeat_interleave", "equal", "bincount",
    )
}  # fmt: skip
# Without bmm, of which attention consists here. On CUDA it is one kernel; see `attend`.
PRODUCING = {f"aten::{operator.__name__}" for operator in flop_registry} - {"aten::bmm"}
INDEXING = {f"aten::{name}" for name in ("index", "index_put", "index_put_", "_index_put_impl_")}


def find_place():
    """The path, line and function of the innermost frame of this repository."""
    places = []
    frame = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if is_ours(code.co_filename):
            path = code.co_filename.removeprefix(f"{ROOT}/")
            places.append((path, frame.f_lineno, code.co_name))
        frame = frame.f_back
    of_code = [place for place in places if not place[0].startswith("tests/")]
    return next(iter(of_code or places), ("?", 0, "?"))


def count_wait(operator):
    """Count that an operator waits for the device."""
    WAITS[Wait(STEPS.number, operator.removeprefix("aten::"), *find_place())] += 1
    if GpuModule.forbids_waits and "synchronize" not in operator:
        raise RuntimeError(f"{operator} waits for {DEVICE}")


def count_product(operator, dtype):
    name = operator.removeprefix("aten::")
    PRODUCTS[Product(STEPS.number, name, str(dtype).removeprefix("torch."), *find_place())] += 1


@functools.cache
def is_ours(path):
    """Whether a file is of this repository, and not this one or in a virtual environment."""
    return path.startswith(f"{ROOT}/") and "/site-packages/" not in path and path != __file__


class Steps:
    """Counts the steps of the first optimizer that takes one."""

    def __init__(self):
        self.number = 0
        self.optimizer = None

    def __call__(self, optimizer, args, kwargs):
        """Called after each step of any optimizer. An optimizer may contain others."""
        self.optimizer = self.optimizer or optimizer
        self.number += optimizer is self.optimizer


STEPS = Steps()


def forget_counts():
    WAITS.clear()
    PRODUCTS.clear()
    STEPS.__init__()


class GpuTensor(torch.Tensor):
    """A tensor on the imitated GPU. `numbers` is the tensor on the CPU that holds its numbers."""

    @staticmethod
    def __new__(cls, numbers):
        return torch.Tensor._make_wrapper_subclass(
            cls,
            numbers.shape,
            strides=numbers.stride(),
            storage_offset=numbers.storage_offset(),
            dtype=numbers.dtype,
            device=torch.device(DEVICE),
        )

    def __init__(self, numbers):
        self.numbers = numbers

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            return METHODS.get(function, function)(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        return run_operator(function, args, kwargs or {})

    def __deepcopy__(self, memo):
        if id(self) not in memo:
            result = to_gpu(self.numbers.detach().clone())
            if isinstance(self, torch.nn.Parameter):
                result = torch.nn.Parameter(result)
            memo[id(self)] = result.requires_grad_(self.requires_grad)
        return memo[id(self)]

    def __reduce_ex__(self, protocol):
        """Save it like a tensor on the CPU."""
        count_wait("save")
        numbers = self.numbers.detach()
        if isinstance(self, torch.nn.Parameter):
            numbers = torch.nn.Parameter(numbers, self.requires_grad)
        return numbers.__reduce_ex__(protocol)


def to_gpu(numbers):
    if MpsModule.is_on and numbers.dtype in (torch.float64, torch.complex128):
        raise TypeError("the MPS framework doesn't support float64")
    return GpuTensor(numbers)


def is_on_gpu(value):
    return isinstance(value, GpuTensor)


def is_on_cpu(value):
    return isinstance(value, torch.Tensor) and not is_on_gpu(value) and value.device.type == "cpu"


def run_operator(function, args, kwargs):
    """Run an operator on the numbers of its tensors; the result is on the imitated GPU."""
    name = function.name().partition(".")[0]
    if name == "aten::_to_copy":
        return convert(function, *args, **kwargs)
    if name == "aten::copy_":
        return copy(*args, **kwargs)
    if name == "aten::native_group_norm" and not GpuModule.norms_keep_layout:
        args = (args[0].contiguous(), *args[1:])
    values = list_values([*args, *kwargs.values()])
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    if name in INDEXING:
        check_indexing(name, args)
    else:
        check_devices(function.name(), tensors)
    for value in values:
        if isinstance(value, torch._C.Generator) and value._cdata not in GENERATORS:
            raise RuntimeError(f"{name} on {DEVICE} with a generator of the CPU")
    if name in WAITING and not (name == "aten::repeat_interleave" and kwargs.get("output_size")):
        count_wait(name)
    wrapped = {id(value.numbers): value for value in tensors if is_on_gpu(value)}
    result = function(*unwrap(args), **{key: unwrap(value) for key, value in kwargs.items()})
    if name in PRODUCING:
        count_product(name, next(x.dtype for x in list_values([result]) if x is not None))
    device = kwargs.get("device")
    if device is not None and torch.device(device).type != NAME:
        return result
    if torch.Tag.inplace_view in function.tags:  # such as squeeze_, which has changed `numbers`
        with no_dispatch():
            function(*args, **kwargs)
    return wrap_all(result, wrapped)


def list_values(values):
    """The values and those in lists of them. It is much faster than torch's pytree."""
    found = []
    for value in values:
        if isinstance(value, (list, tuple)):
            found += list_values(value)
        else:
            found.append(value)
    return found


def unwrap(value):
    if isinstance(value, (list, tuple)):
        return type(value)(map(unwrap, value))
    if is_on_gpu(value):
        return value.numbers
    is_device = isinstance(value, torch.device) and value.type == NAME
    return torch.device("cpu") if is_device else value


def wrap_all(value, wrapped):
    """Put results onto the imitated GPU.

    wrapped: {id of their numbers: argument}. An operator in place returns one of them.
    """
    if isinstance(value, (list, tuple)):
        return type(value)([wrap_all(each, wrapped) for each in value])
    if not is_on_cpu(value):
        return value
    own = wrapped.get(id(value))
    if own is None:
        return to_gpu(value)
    if own.shape != value.shape:  # such as arange, which has enlarged an empty tensor
        with torch._C.DisableTorchFunctionSubclass():
            torch.Tensor.data.__set__(own, to_gpu(value))
    return own


def check_devices(name, tensors):
    """Raise if tensors on the CPU are mixed in; a number (of no dimensions) may be there."""
    others = [value for value in tensors if is_on_cpu(value) and value.dim()]
    if others:
        shapes = [
            f"{'gpu' if is_on_gpu(value) else value.device.type} {list(value.shape)}"
            for value in tensors
        ]
        raise RuntimeError(f"{name} mixes devices: {', '.join(shapes)}")


def check_indexing(name, args):
    """Check the arguments of index or index_put, and count what waits.

    As on CUDA, indices on the CPU are allowed and copied, and a mask waits for the number of its
    elements, unless one number is put at its places.
    """
    itself, indices, *values = args
    values = [value for value in values if isinstance(value, torch.Tensor)]
    check_devices(name, [itself, *values])
    indices = [index for index in indices if index is not None]
    if not is_on_gpu(itself):
        check_devices(name, [itself, *indices])
    fills = values and is_on_cpu(values[0])
    is_mask = any(index.dtype in (torch.bool, torch.uint8) for index in indices)
    if any(map(is_on_cpu, indices)) or (is_mask and not fills):
        count_wait(name)


def convert(function, tensor, *, device=None, non_blocking=False, **options):
    """Run `_to_copy`, which is behind `to`, `cpu`, `float` and others.

    With non_blocking, the copy on the CPU is pinned, and nothing waits.
    """
    kind = NAME if device is None else torch.device(device).type
    if kind == "meta":
        return function(tensor.numbers, device=device, **options)
    result = function(tensor.numbers, **options)
    if kind == NAME:
        return to_gpu(result)
    if non_blocking:
        return remember_pinned(result)
    count_wait("copy to the CPU")
    return result


def copy(target, source, non_blocking=False):
    """Run `copy_`. It waits if one side is on the CPU, unless that is pinned."""
    to_cpu, from_cpu = not is_on_gpu(target), is_on_cpu(source)
    if (to_cpu or from_cpu) and source.numel():
        if not (non_blocking and is_pinned(target if to_cpu else source)):
            count_wait(f"copy {'to' if to_cpu else 'from'} the CPU")
    numbers = source.numbers if is_on_gpu(source) else source
    (target if to_cpu else target.numbers).copy_(numbers)
    return target


# -------------------------------------------------------------------------------------------------
# methods that do not end in an operator


def raise_for_numpy(tensor, *args, **kwargs):
    raise TypeError(f"can't convert {DEVICE} device type tensor to numpy: copy it to the CPU first")


def to_list(tensor):
    count_wait("tolist")
    return tensor.detach().numbers.tolist()


def format_tensor(tensor, pattern):
    if tensor.dim() == 0:
        return format(tensor.item(), pattern)  # counts the wait
    return format_all(tensor)


def format_all(tensor, **options):
    count_wait("repr")
    return repr(tensor.detach().numbers).removesuffix(")") + f", device='{DEVICE}')"


def set_data(tensor, value):
    torch.Tensor.data.__set__(tensor, value)
    tensor.numbers = value.numbers


def set_item(tensor, index, value):
    """Pass a number as CUDA gets it: as a tensor on the CPU."""
    if isinstance(value, (int, float)):
        value = torch.tensor(value, dtype=tensor.dtype)
    tensor[index] = value


def get_storage(tensor):
    return tensor.detach().numbers.untyped_storage()


METHODS = {
    torch.Tensor.numpy: raise_for_numpy,
    torch.Tensor.__array__: raise_for_numpy,
    torch.Tensor.tolist: to_list,
    torch.Tensor.__format__: format_tensor,
    torch.Tensor.__repr__: format_all,
    torch.Tensor.data.__set__: set_data,
    torch.Tensor.__setitem__: set_item,
    torch.Tensor.untyped_storage: get_storage,
    torch.Tensor.data_ptr: lambda tensor: tensor.detach().numbers.data_ptr(),
}


# -------------------------------------------------------------------------------------------------
# pinned memory, generators, and the module torch.gpu

PINNED = {}  # {address of a storage: (its end, weak reference to it)}


def remember_pinned(tensor):
    """Note that a tensor on the CPU is pinned, with all tensors that share its memory."""
    storage = tensor.untyped_storage()
    start = storage.data_ptr()
    PINNED[start] = start + storage.nbytes(), StorageWeakRef(storage)
    return tensor


def is_pinned(tensor, device=None):
    if is_on_gpu(tensor):
        return False
    address = tensor.untyped_storage().data_ptr()
    if address in PINNED:
        return not PINNED[address][1].expired()
    return any(  # a part of pinned memory
        start < address < end and not reference.expired()
        for start, (end, reference) in PINNED.items()
    )


def pin_memory(tensor, device=None):
    if MpsModule.is_on:
        raise RuntimeError("pinned memory is for CUDA")
    return tensor if is_pinned(tensor) else remember_pinned(tensor.clone())


GENERATORS = set()  # addresses of those on the imitated GPU; operators get other Python objects


class Generator(torch._C.Generator):
    """A generator that knows its device. It draws the numbers of one on the CPU."""

    def __new__(cls, device="cpu"):
        generator = super().__new__(cls, "cpu")
        generator.place = torch.device(device)
        if generator.place.type == NAME:
            GENERATORS.add(generator._cdata)
        return generator

    @property
    def device(self):
        return self.place


class Event:
    """A point in the queue of a GPU."""

    def __init__(self, enable_timing=False, **options):
        self.time = None

    def record(self, stream=None):
        self.time = time.perf_counter()

    def query(self):
        return True

    def wait(self, stream=None):
        pass

    def synchronize(self):
        count_wait("Event.synchronize")

    def elapsed_time(self, other):
        return (other.time - self.time) * 1000


class Stream:
    """A queue of a GPU. All of them are done at once."""

    def __init__(self, device=None):
        pass

    def record_event(self):
        event = Event()
        event.record()
        return event

    def wait_stream(self, stream):
        pass


class GpuModule:
    """torch.gpu, with the functions of torch.cuda."""

    Event = Event
    Stream = Stream
    forbids_waits = False
    norms_keep_layout = True  # False: as on CUDA before torch 2.15
    BFloat16Tensor = HalfTensor = FloatTensor = torch.Tensor

    def is_available(self):
        return True

    is_initialized = is_available

    def _is_in_bad_fork(self):
        return False

    def device_count(self):
        return 1

    def current_stream(self, device=None):
        return Stream()

    default_stream = current_stream

    def stream(self, stream):
        return contextlib.nullcontext()

    def current_device(self):
        return 0

    def set_device(self, device):
        pass

    def device(self, device):
        return contextlib.nullcontext()

    def manual_seed(self, seed):
        pass  # torch.manual_seed sets the generator of the CPU, which draws for this device too

    manual_seed_all = manual_seed

    def get_rng_state(self, device=None):
        return torch.get_rng_state()

    def set_rng_state(self, state, device=None):
        torch.set_rng_state(state)

    def get_amp_supported_dtype(self):
        return [torch.bfloat16, torch.float16]

    def is_bf16_supported(self, including_emulation=True):
        return True

    def synchronize(self, device=None):
        count_wait("synchronize")

    def set_sync_debug_mode(self, mode):
        """In the mode "error" all that waits raises an error, except what is called synchronize."""
        GpuModule.forbids_waits = mode == "error"

    def empty_cache(self):
        pass

    def max_memory_allocated(self, device=None):
        return 2 * 10**9

    def max_memory_reserved(self, device=None):
        return 3 * 10**9

    memory_allocated = max_memory_allocated

    def memory_reserved(self, device=None):
        return 10**9

    def mem_get_info(self, device=None):
        return 14 * 10**9, 16 * 10**9

    def reset_peak_memory_stats(self, device=None):
        pass

    def set_per_process_memory_fraction(self, fraction, device=None):
        pass

    def get_device_name(self, device=None):
        return "Imitated GPU"

    def get_device_properties(self, device=None):
        return SimpleNamespace(name="Imitated GPU", total_memory=16 * 10**9)


class MpsModule(GpuModule):
    """torch.mps: the module of Apple's GPUs, which lacks many functions of torch.cuda."""

    is_on = False  # is the imitated device one of Apple's?

    def __getattribute__(self, name):
        if name in vars(GpuModule) and name not in OF_TORCH and not hasattr(torch.mps, name):
            raise AttributeError(f"torch.mps has no {name}")
        return super().__getattribute__(name)


# what torch itself asks such a module for
OF_TORCH = {"is_available", "is_initialized", "_is_in_bad_fork", "device_count", "current_device"}
OF_TORCH |= {"device", "set_device", "get_amp_supported_dtype", "manual_seed_all"}


# -------------------------------------------------------------------------------------------------
# autocast


def read_autocast_list(kind):
    """Names of the operators that autocast treats in one way on CUDA, from torch's header."""
    header = Path(torch.__file__).parent / "include/ATen/autocast_mode.h"
    (text,) = re.findall(rf"#define AT_FORALL_{kind}\(_\)(.*?)\n\n", header.read_text(), re.S)
    pairs = re.findall(r"_\((\w+)(?:, (\w+))?\)", text)
    return [f"{name}.{overload}" if overload else name for name, overload in pairs]


def cast(value, dtype):
    """Cast a value as autocast does: only tensors of floats, and not those of float64."""
    if is_on_gpu(value) and value.is_floating_point() and value.dtype != torch.float64:
        return value.to(dtype)
    return value


def run_in_lower_precision(args):
    return torch.get_autocast_dtype(NAME)


def run_in_float32(args):
    return torch.float32


def run_in_widest(args):
    """The widest type of the arguments."""
    types = [value.dtype for value in tree_leaves(args) if is_on_gpu(value)]
    is_wide = torch.float32 in types or not types
    return torch.float32 if is_wide else torch.get_autocast_dtype(NAME)


def make_autocast_kernel(operator, choose):
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)

    def run(*args, **kwargs):
        with torch._C._ExcludeDispatchKeyGuard(keys):
            dtype = choose((args, kwargs))
            args, kwargs = tree_map(lambda value: cast(value, dtype), (args, kwargs))
            return operator(*args, **kwargs)

    return run


def register_autocast(library):
    """Let autocast do on the imitated GPU what it does on CUDA."""
    lists = {
        "LOWER_PRECISION_FP": run_in_lower_precision,
        "FP32": run_in_float32,
        "FP32_SET_OPT_DTYPE": run_in_float32,
        "PROMOTE": run_in_widest,
    }
    chosen = {name: choose for kind, choose in lists.items() for name in read_autocast_list(kind)}
    chosen |= {"cat": run_in_widest, "stack": run_in_widest}
    for name, choose in chosen.items():
        packet, _, overload = name.partition(".")
        operators = getattr(torch.ops.aten, packet, None)
        if operators is None or (overload or "default") not in operators.overloads():
            continue
        operator = getattr(operators, overload or "default")
        library.impl(operator, make_autocast_kernel(operator, choose), "AutocastPrivateUse1")


# -------------------------------------------------------------------------------------------------
# switching it on

LIBRARIES = []  # a library's kernels end with it


def empty(size, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None):
    memory_format = memory_format or torch.contiguous_format
    return to_gpu(torch.empty(size, dtype=dtype, device="cpu", memory_format=memory_format))


def empty_strided(size, stride, dtype=None, layout=None, device=None, pin_memory=None):
    return to_gpu(torch.empty_strided(size, stride, dtype=dtype, device="cpu"))


def infer(is_on):
    """Replace inference mode, in which torch can't make views of a `GpuTensor`."""
    return torch.no_grad() if is_on else contextlib.nullcontext()


def swap_tensors(parameter, moved, swap=torch.utils.swap_tensors):
    """Let a parameter that is moved keep the attributes that a library has given to it."""
    for name, value in vars(parameter).items():
        if name != "numbers":
            vars(moved).setdefault(name, value)
    swap(parameter, moved)


def attend(query, *args, **options):
    """Attention, whose products torch computes in float32 on this device, also those of bfloat16.

    So it is counted with the type of the query, in which a kernel of CUDA computes it.
    """
    count_product("scaled_dot_product_attention", query.dtype)
    return torch.ops.aten._scaled_dot_product_attention_math(query, *args, **options)[0]


def copy_from(source, target, non_blocking=False):
    return copy(target, source, non_blocking)


def switch_on(is_cuda=True):
    """Add the device "gpu" to torch, for the rest of the process; Accelerate chooses it.

    The package takes it for a GPU, and its branches for CUDA run. is_cuda=False: they do not, and
    the device refuses what "mps" refuses, the device of Macs. (torch refuses the name "mps".)
    """
    MpsModule.is_on = not is_cuda
    _setup_privateuseone_for_python_backend(NAME, GpuModule() if is_cuda else MpsModule())
    library = torch.library.Library("aten", "IMPL")
    library.impl("empty.memory_format", empty, "PrivateUse1")
    library.impl("empty_strided", empty_strided, "PrivateUse1")
    library.impl("_copy_from", copy_from, "PrivateUse1")
    library.impl("scaled_dot_product_attention", attend, "AutogradPrivateUse1")
    register_autocast(library)
    others = torch.library.Library("_", "IMPL")  # autocast leaves all other operators as they are
    others.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    LIBRARIES.extend([library, others])
    # so that a module keeps its parameters when it is moved, as on CUDA
    torch.__future__.set_swap_module_params_on_conversion(True)
    torch.utils.swap_tensors = swap_tensors
    # otherwise the backward pass runs in a thread, whose stack does not have our lines
    torch.autograd.set_multithreading_enabled(False)
    # torch finds it once in a process; checkpointed blocks that get no tensor by position use it
    checkpoint.DefaultDeviceType.set_device_type(NAME)
    torch.utils._foreach_utils._foreach_supported_types.append(GpuTensor)
    torch.Tensor.pin_memory, torch.Tensor.is_pinned = pin_memory, is_pinned
    torch.Tensor.record_stream = lambda tensor, stream: None
    torch.Generator = Generator
    torch._C._InferenceMode = infer
    register_optimizer_step_post_hook(STEPS)
    if is_cuda:
        patch(pytest.MonkeyPatch(), "is_gpu", lambda device: device.type == NAME)
    else:
        batch_inputs.WITHOUT_FLOAT64.add(NAME)
        torch_utils._DTYPE_UNSUPPORTED_DEVICES[torch.float64] |= {NAME}  # of diffusers
    os.environ["ACCELERATE_TORCH_DEVICE"] = DEVICE


def forked(function):
    """Run a test in a fork in which the device is on."""

    @functools.wraps(function)
    def run(*args, **kwargs):
        def child():
            switch_on()
            function(*args, **kwargs)

        with tempfile.NamedTemporaryFile("r") as log:
            codes = finish(start(child, log=log.name))
            assert codes == [0], log.read()

    return run
