"""Run a diffusers pipeline's own code up to its denoiser, and see what the denoiser gets.

A pipeline's `__call__` is the best description of how its denoiser is called. Here it runs with
stand-ins: the denoiser has a config and no weights, the scheduler takes one step, and noise and
encoded captions are given.
"""

import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import diffusers
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from diffusers.models.modeling_utils import no_init_weights
from diffusers.schedulers.scheduling_utils import SchedulerOutput

from diffusion_training.errors.faults import explain, is_machines_fault
from diffusion_training.families.recorded.modular import get_pipeline_class, silencing
from diffusion_training.families.recorded.reference_latents import (
    ReferenceShapes,
    encode_reference,
    has_statistics,
)
from diffusion_training.families.recorded.tape import Unrecordable
from diffusion_training.models import is_component

NUM_TIMES = 1000  # timesteps of a flow-matching scheduler: t = 1000 * share of noise
# arguments of pipelines for videos, with a still for a video
ONE_FRAME = {"num_frames": 1, "frames": 1}
# arguments of pipelines that would draw more frames, change the size or rewrite captions, or pass
# an object on
SWITCHED_OFF = ONE_FRAME | {
    "use_resolution_binning": False,
    "use_kv_cache": False,
    "use_pe": False,
    "enable_prompt_rewrite": False,
}


class Stopped(Exception):
    """Raised at the point of a pipeline where a run ends."""


@dataclass
class PipelineTrace:
    """What one run gives to the pipeline, and what it has seen there."""

    ends_at: str  # text, denoiser, step or decode
    noise: Callable[[tuple[int, ...]], torch.Tensor]  # shape -> the noise to start from
    time: float = 250.0  # the first timestep
    texts: Sequence[Any] | None = None  # the results of encode_prompt; None: it encodes
    output: Any = None  # of the denoiser; None: its first argument
    # latents of the references, [1, C, h, w], as the VAE encodes them; None: zeros
    references: Sequence[torch.Tensor] | None = None

    noise_shapes: list[tuple[int, ...]] = field(default_factory=list)
    mu: float | None = None  # the exponent of the shift that the scheduler gets
    encoded: list[Any] = field(default_factory=list)  # the results of encode_prompt
    calls: list[dict[str, Any]] = field(default_factory=list)  # arguments of the denoiser
    velocity: Any = None  # what the scheduler gets as the denoiser's output
    sample: Any = None  # the noise as the scheduler gets it, for example packed
    decoded: Any = None  # what the VAE gets
    decoded_with: Sequence[Any] = ()  # and what beside it, such as LTX's time
    pixels: list[torch.Tensor] = field(default_factory=list)  # references as the VAE gets them
    latents: list[torch.Tensor] = field(default_factory=list)  # of the references, [1, C, h, w]

    def reach(self, point: str) -> None:
        if point == self.ends_at:
            raise Stopped


class WatchedScheduler(FlowMatchEulerDiscreteScheduler):
    """A flow-matching scheduler that notes what it gets in its first step.

    It has a second timestep, so that `probe_times` finds models that also take the time at which a
    step ends.
    """

    run: PipelineTrace

    def set_timesteps(
        self,
        num_inference_steps: Any = None,
        device: Any = None,
        sigmas: Any = None,
        mu: float | None = None,
        timesteps: Any = None,
    ) -> None:
        self.run.mu = None if mu is None else float(mu)
        self.timesteps = torch.tensor([self.run.time, self.run.time / 3], device=device)
        self.sigmas = torch.cat([self.timesteps / NUM_TIMES, torch.zeros(1, device=device)])

    def scale_model_input(self, sample: Any, *args: Any) -> Any:
        return sample  # Bria's pipeline asks any scheduler but diffusers' own

    def step(
        self, model_output: Any, timestep: Any, sample: Any, *args: Any, **options: Any
    ) -> Any:
        self.run.velocity, self.run.sample = model_output, sample
        self.run.reach("step")
        return SchedulerOutput(prev_sample=sample)


def watch_pipeline(pipeline_class: Any) -> Any:
    """A subclass of a pipeline whose captions and device are those of its `run`."""

    def encode_prompt(self: Any, *args: Any, **options: Any) -> Any:
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
    with contextlib.ExitStack() as stack:
        own = {kind.__module__ for kind in pipeline_class.__mro__}
        folder = pipeline_class.__module__.rpartition(".")[0]  # of the blocks of a modular one
        # a copy, because another thread may import a module meanwhile
        own |= {name for name in [*sys.modules] if name.startswith(f"{folder}.")}
        for module in map(sys.modules.get, own):
            if hasattr(module, "randn_tensor"):
                stack.enter_context(patch.object(module, "randn_tensor", draw))
        yield


class EncodedCaption(str):
    """A prompt that brings its results of `encode_prompt`, for each time that it is called."""

    results: list[Any]

    def __new__(cls, results: list[Any]) -> "EncodedCaption":
        made = super().__new__(cls, " ")
        made.results = results
        return made


def replay(pipeline_class: Any) -> Any:
    """A subclass of a pipeline whose captions are encoded already, see `EncodedCaption`."""

    def encode_prompt(self: Any, prompt: Any = None, *args: Any, **options: Any) -> Any:
        if prompt and isinstance(prompt[0], EncodedCaption):
            self.results = iter(prompt[0].results)
        return next(self.results)

    names = {"encode_prompt": encode_prompt, "__module__": pipeline_class.__module__}
    return type(pipeline_class.__name__, (pipeline_class,), names)


def list_pipeline_settings(index: dict[str, Any]) -> dict[str, Any]:
    """The entries of model_index.json that are settings of the pipeline."""
    return {
        name: value
        for name, value in index.items()
        if not name.startswith("_")
        and not is_component(value)
        and value not in ([None, None], None)
    }


def list_size_options(pipeline_class: Any, height: int, width: int) -> dict[str, int]:
    """Further arguments without which a pipeline draws another size than is asked for."""
    has_area = "max_area" in inspect.signature(pipeline_class.__call__).parameters
    return {"max_area": height * width} if has_area else {}


class Absent:
    """Stands in for a tokenizer that the pipeline's constructor reads."""

    def __getattr__(self, name: str) -> "Absent":
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **options: Any) -> "Absent":
        return self

    def __getitem__(self, key: Any) -> "Absent":
        return self

    def __len__(self) -> int:
        return 0


def make_pipeline(kind: Any, parts: dict[str, Any], index: dict[str, Any]) -> Any:
    """Make a pipeline of `parts`, without the others. index: model_index.json, for settings."""
    expected, optional = kind._get_signature_keys(kind)
    given = {
        name: value for name, value in list_pipeline_settings(index).items() if name in optional
    }
    given |= dict.fromkeys(name for name in expected if name not in optional)
    given |= {name: part for name, part in parts.items() if name in expected}
    absent = {
        name: Absent()
        for name, part in given.items()
        if part is None and ("tokenizer" in name or "processor" in name)
    }
    try:
        with contextlib.suppress(AttributeError):
            return kind(**given)
        return kind(**given | absent)  # it asks a tokenizer or processor
    except (AttributeError, ImportError) as error:  # it asks another part, or needs a package
        raise Unrecordable(f"its code raises an error as it is made: {explain(error)}") from error


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
        self.folder = folder
        self.kind = get_pipeline_class(index)
        self.denoiser_class = getattr(diffusers, index[folder][1])
        self.has = inspect.signature(self.kind.__call__).parameters
        watched = watch_pipeline(self.kind)
        with torch.device("meta"), no_init_weights():
            denoiser = self.denoiser_class.from_config(configs[folder])
            vae_class = getattr(diffusers, configs["vae"]["_class_name"])
            vae = vae_class.from_config(configs["vae"])
        if has_statistics(vae.config):  # a cache has references as they leave these
            vae.bn = torch.nn.BatchNorm2d(vae.bn.num_features, affine=False, device="cpu")
            vae.register_to_config(batch_norm_eps=0.0)
        # diffusers visits all modules for the answer, and pipelines ask in each run
        names = {"dtype": denoiser.dtype, "__module__": self.denoiser_class.__module__}
        denoiser.__class__ = type(self.denoiser_class.__name__, (self.denoiser_class,), names)
        # pipelines move references to the device of their VAE
        vae.__class__ = type(vae_class.__name__, (vae_class,), {"device": torch.device("cpu")})
        self.reference_shapes = ReferenceShapes(vae)
        self.parameters = list(inspect.signature(self.denoiser_class.forward).parameters)[1:]

        def forward(*args: Any, **options: Any) -> Any:
            return self.call_denoiser(*args, **options)

        # a modular pipeline asks which arguments it has
        forward.__signature__ = inspect.signature(denoiser.forward)  # type: ignore[attr-defined]
        denoiser.forward = forward
        self.scheduler = WatchedScheduler.from_config(configs["scheduler"])
        given = (parts or {}) | {folder: denoiser, "scheduler": self.scheduler, "vae": vae}
        self.pipeline = make_pipeline(watched, given, index)
        self.pipeline.set_progress_bar_config(disable=True)
        self.pipeline.own_device = torch.device("cpu")

    def call_denoiser(self, *args: Any, **options: Any) -> Any:
        run = self.pipeline.run
        run.calls.append(dict(zip(self.parameters, args, strict=False)) | options)
        run.reach("denoiser")
        output = next(iter(run.calls[-1].values())) if run.output is None else run.output
        return Transformer2DModelOutput(sample=output)

    @torch.no_grad()
    def __call__(
        self, captions: Sequence[str], options: dict[str, Any], run: PipelineTrace
    ) -> PipelineTrace:
        """Run the pipeline's code for `captions`. options: further arguments of the pipeline."""

        def draw(shape: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
            run.noise_shapes.append(tuple(shape))
            return run.noise(tuple(shape))

        def decode(latents: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            run.decoded, run.decoded_with = latents, args
            raise Stopped

        def encode(pixels: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            return encode_reference(self.reference_shapes, pixels, run)

        output_type = "pt" if run.ends_at == "decode" else "latent"
        asked: dict[str, Any] = {"num_inference_steps": 2, "output_type": output_type}
        asked |= (
            SWITCHED_OFF
            | options
            | list_size_options(self.kind, options["height"], options["width"])
        )
        asked = {name: value for name, value in asked.items() if name in self.has}
        self.pipeline.run = self.scheduler.run = run
        vae = self.pipeline.vae
        try:
            # not on the meta device, on which models are tried; a run's tensors serve for training
            with (
                torch.inference_mode(False),
                torch.device("cpu"),
                drawing(self.kind, draw),
                silencing(),
            ):
                vae.decode, vae.encode = decode, encode
                self.pipeline(prompt=list(captions), **asked)  # some write into the list
        except Stopped:
            pass
        except Exception as error:
            if isinstance(error, Unrecordable) or is_machines_fault(error):
                raise
            trial = f"in a trial at {options['height']} x {options['width']} pixels"
            raise Unrecordable(f"its code raises an error {trial}: {explain(error)}") from error
        finally:
            del vae.decode, vae.encode
        return run
