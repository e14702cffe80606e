"""Run a diffusers pipeline's own code up to its denoiser, and see what the denoiser gets.

A pipeline's `__call__` is the best description of how its denoiser is called. Here it runs with
stand-ins: the denoiser has a config and no weights, the scheduler takes one step, and noise and
encoded captions are given. `Traced` keeps the operations of such a run, to repeat them on tensors
of any device without the pipeline.
"""

import contextlib
import copy
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import diffusers
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from torch.fx.experimental.proxy_tensor import make_fx

NUM_TIMES = 1000  # timesteps of a flow-matching scheduler: t = 1000 * share of noise
# arguments of pipelines that would change the size, or hand an object to the denoiser
OFF = {"use_resolution_binning": False, "use_kv_cache": False}


class Stopped(Exception):
    """Raised at the point of a pipeline where a run ends."""


@dataclass
class Run:
    """What one run gives to the pipeline, and what it has seen there."""

    ends_at: str  # text, denoiser, step or decode
    noise: Callable[[tuple[int, ...]], torch.Tensor]  # shape -> the noise to start from
    time: float = 250.0  # the only timestep
    texts: Sequence[Any] | None = None  # the results of encode_prompt; None: it encodes
    output: Any = None  # of the denoiser; None: its first argument

    noise_shapes: list[tuple[int, ...]] = field(default_factory=list)
    encoded: list[Any] = field(default_factory=list)  # the results of encode_prompt
    mu: float | None = None  # the shift that the pipeline passes to its scheduler
    calls: list[dict[str, Any]] = field(default_factory=list)  # arguments of the denoiser
    velocity: Any = None  # what the scheduler gets as the denoiser's output
    sample: Any = None  # the noise as the scheduler gets it, for example packed
    decoded: Any = None  # what the VAE gets

    def reach(self, point: str) -> None:
        if point == self.ends_at:
            raise Stopped


class WatchedScheduler(FlowMatchEulerDiscreteScheduler):
    """A flow-matching scheduler of one step, which notes what it gets."""

    run: Run

    def set_timesteps(
        self, num_inference_steps=None, device=None, sigmas=None, mu=None, timesteps=None
    ):
        self.run.mu = mu
        self.timesteps = torch.tensor([self.run.time], device=device)
        self.sigmas = torch.tensor([self.run.time / NUM_TIMES, 0.0], device=device)

    def step(self, model_output, timestep, sample, *args, **options):
        self.run.velocity, self.run.sample = model_output, sample
        self.run.reach("step")
        return (sample,)


def watch(pipeline_class: Any) -> Any:
    """A subclass of a pipeline whose captions and device are those of its `run`."""

    def encode_prompt(self, *args, **options):
        run = self.run
        if run.texts is None:
            run.encoded.append(pipeline_class.encode_prompt(self, *args, **options))
        else:
            run.encoded.append(run.texts[len(run.encoded)])
        run.reach("text")
        return run.encoded[-1]

    device = property(lambda self: self.own_device)
    names = {"encode_prompt": encode_prompt, "_execution_device": device, "device": device}
    names |= {"__module__": pipeline_class.__module__}
    return type(pipeline_class.__name__, (pipeline_class,), names)


@contextlib.contextmanager
def drawing(pipeline_class: Any, draw: Callable[..., torch.Tensor]) -> Iterator[None]:
    """Replace `randn_tensor` in the modules of a pipeline."""
    modules = {sys.modules[kind.__module__] for kind in pipeline_class.__mro__}
    modules = {module for module in modules if hasattr(module, "randn_tensor")}
    own = {module: module.randn_tensor for module in modules}
    try:
        for module in modules:
            module.randn_tensor = draw
        yield
    finally:
        for module, function in own.items():
            module.randn_tensor = function


class PipelineCode:
    """A pipeline with stand-ins for its denoiser and scheduler.

    folder: the denoiser's name in the pipeline. index: model_index.json. configs: of the VAE, the
    scheduler and the denoiser. parts: {name: part} used instead of stand-ins.
    """

    def __init__(
        self,
        folder: str,
        index: dict[str, Any],
        configs: dict[str, Any],
        parts: dict[str, Any] | None = None,
    ) -> None:
        parts = parts or {}
        self.folder = folder
        self.kind = getattr(diffusers, index["_class_name"])
        self.denoiser_class = getattr(diffusers, index[folder][1])
        self.has = inspect.signature(self.kind.__call__).parameters
        watched = watch(self.kind)
        expected, optional = watched._get_signature_keys(watched)
        given = {name: index[name] for name in optional if name in index}
        given |= dict.fromkeys(name for name in expected if name not in optional)
        given |= {name: part for name, part in parts.items() if name in expected}
        with torch.device("meta"):
            denoiser = self.denoiser_class.from_config(configs[folder])
            if "vae" not in parts:
                vae_class = getattr(diffusers, configs["vae"]["_class_name"])
                given["vae"] = vae_class.from_config(configs["vae"])
        self.parameters = list(inspect.signature(self.denoiser_class.forward).parameters)[1:]
        denoiser.forward = self.call_denoiser
        self.scheduler = WatchedScheduler.from_config(configs["scheduler"])
        self.pipeline = watched(**given | {folder: denoiser, "scheduler": self.scheduler})
        self.pipeline.set_progress_bar_config(disable=True)
        self.pipeline.own_device = torch.device("cpu")
        self.run: Run | None = None

    def call_denoiser(self, *args: Any, **options: Any) -> Any:
        run = self.pipeline.run
        run.calls.append(dict(zip(self.parameters, args, strict=False)) | options)
        run.reach("denoiser")
        output = next(iter(run.calls[-1].values())) if run.output is None else run.output
        return Transformer2DModelOutput(sample=output)

    @torch.no_grad()
    def __call__(self, captions: Sequence[str], options: dict[str, Any], run: Run) -> Run:
        """Run the pipeline's code for `captions`. options: further arguments of the pipeline."""

        def draw(shape, *args, **kwargs):
            run.noise_shapes.append(tuple(shape))
            return run.noise(tuple(shape))

        def decode(latents, *args, **kwargs):
            run.decoded = latents
            raise Stopped

        output_type = "pt" if run.ends_at == "decode" else "latent"
        asked = {"num_inference_steps": 2, "output_type": output_type} | OFF | options
        asked = {name: value for name, value in asked.items() if name in self.has}
        self.pipeline.run = self.scheduler.run = run
        vae = self.pipeline.vae
        level = diffusers.utils.logging.get_verbosity()
        diffusers.utils.logging.set_verbosity_error()
        try:
            # not on the meta device, on which models are tried; a run's tensors serve for training
            with torch.inference_mode(False), torch.device("cpu"), drawing(self.kind, draw):
                vae.decode = decode
                self.pipeline(prompt=list(captions), **asked)  # some write into the list
        except Stopped:
            pass
        finally:
            diffusers.utils.logging.set_verbosity(level)
            del vae.decode
        return run


class Traced:
    """The operations of a function of tensors, without those that do not depend on its inputs.

    It repeats them on any device, without the function. Raises an error if the function reads the
    values of its inputs, for example with `.item()`.
    """

    def __init__(self, function: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> None:
        with torch.inference_mode(False), torch.no_grad():
            module = make_fx(function)(*inputs)
        known: dict[torch.fx.Node, Any] = {}
        for node in list(module.graph.nodes):
            if node.op == "get_attr":
                known[node] = getattr(module, node.target)
            elif node.op == "call_function" and all(n in known for n in node.all_input_nodes):
                args = torch.fx.node.map_arg(node.args, known.__getitem__)
                options = torch.fx.node.map_arg(node.kwargs, known.__getitem__)
                known[node] = node.target(*args, **options)
                if isinstance(known[node], torch.Tensor):
                    name = f"constant_{len(known)}"
                    module.register_buffer(name, known[node].clone())
                    with module.graph.inserting_before(node):
                        constant = module.graph.get_attr(name)
                    node.replace_all_uses_with(constant)
                    known[constant] = known[node]
            elif node.op == "call_function":  # on the device of its inputs
                node.kwargs = {
                    name: value
                    for name, value in node.kwargs.items()
                    if name not in ("device", "pin_memory", "layout")
                }
        module.graph.eliminate_dead_code()
        used = {node.target for node in module.graph.nodes if node.op == "get_attr"}
        for name, _ in list(module.named_buffers()):
            if name not in used:
                delattr(module, name)
        module.recompile()
        self.modules = {torch.device("cpu"): module}

    def __call__(self, *inputs: torch.Tensor) -> Any:
        device = inputs[0].device
        if device not in self.modules:
            self.modules[device] = copy.deepcopy(self.modules[torch.device("cpu")]).to(device)
        return self.modules[device](*inputs)

    def equals(self, other: "Traced") -> bool:
        """Whether both have the same operations and constants."""
        mine, others = (each.modules[torch.device("cpu")] for each in (self, other))
        pairs = zip(mine.buffers(), others.buffers(), strict=False)
        return mine.code == others.code and all(torch.equal(one, two) for one, two in pairs)
