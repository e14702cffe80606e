"""The direct call of a denoiser, with arguments as its pipeline's own code makes them.

1. `DenoiserCalls` runs the pipeline's code up to the denoiser, and finds the size of its latents
   and how its arguments depend on the time.
2. When a batch of a new shape comes, `record` keeps the operations that make the other arguments of
   latents and encoded captions, and compares what they give for other values.
3. `predict` repeats them, and calls the denoiser as it is wrapped for training.
4. `record_output` keeps what the pipeline makes of the output before `scheduler.step`.
"""

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from accelerate import PartialState
from torch.utils._pytree import (
    TreeSpec,
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_map_only,
    tree_unflatten,
)

from diffusion_training.families.recorded.mask_values import is_whole_numbers, on_meta
from diffusion_training.families.recorded.pipeline_run import NUM_TIMES, PipelineCode, PipelineTrace
from diffusion_training.families.recorded.reference_latents import as_argument, make_blanks
from diffusion_training.families.recorded.tape import Tape, Unrecordable
from diffusion_training.families.recorded.text_tensors import TextTensor, is_equal, rebuild_results
from diffusion_training.models import list_tensors

PLAIN = (int, float, str, bool, type(None), torch.dtype, torch.device)
PROBED_TIMES = (1.0, 137.5, 250.0, 611.123, 750.0, 999.0)
# {how a pipeline computes the time from its timestep t: (on t, on the share of noise)}
TIME_MAPS: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "t": (lambda t: t, lambda share: NUM_TIMES * share),
    "t / 1000": (lambda t: t / NUM_TIMES, lambda share: share),
    "(1000 - t) / 1000": (lambda t: (NUM_TIMES - t) / NUM_TIMES, lambda share: 1 - share),
    "1 - t / 1000": (lambda t: 1 - t / NUM_TIMES, lambda share: 1 - share),
}
PROBED_SIDES = (256, 512)  # pixels
FULL_STEPS = 50  # of samples, as the pipelines' defaults


def find_difference(named: Sequence[tuple[Any, Any]], others: Sequence[Any]) -> str | None:
    """The first argument whose value is another one, or None. named: (path, value) of each."""
    for (path, one), other in zip(named, others, strict=True):
        if not is_equal(one, other):
            return keystr(path)
    return None


def measure_noise(run: PipelineTrace) -> list[int]:
    """The sides of the noise that a run starts from, without axes of one; [] if it draws none.

    Raises Unrecordable if it draws more than one image.
    """
    shape = [size for size in run.noise_shapes[0][1:] if size > 1] if run.noise_shapes else []
    if len(shape) == 4:
        noise = run.noise_shapes[0]
        raise Unrecordable(f"it draws videos, or several images, from noise of the shape {noise}")
    return shape


@dataclass(frozen=True)
class Call:
    """A call of the denoiser, for a batch of one size and of captions of certain shapes."""

    # (noisy latents, those of references, tensors of encode_prompt) -> arguments that are tensors
    tensors: Tape
    leaves: list[Any]  # all arguments, flat
    spec: TreeSpec
    where: list[int]  # positions of the tensors among them
    times: dict[int, str]  # positions of the time: one of `TIME_MAPS`

    def fill(self, tensors: Sequence[torch.Tensor]) -> list[Any]:
        """All arguments, flat, for other inputs of `tensors`."""
        arguments = list(self.leaves)
        for position, tensor in zip(self.where, self.tensors(*tensors), strict=True):
            arguments[position] = tensor
        return arguments


class DenoiserCalls:
    """How a pipeline calls its denoiser. Each size of a batch is recorded when it comes first."""

    def __init__(
        self,
        code: PipelineCode,
        findings: dict[str, Any],
        options: dict[str, Any],
        references: Sequence[tuple[int, int]] = (),
    ) -> None:
        """findings: see `describe_captions`. options: arguments of the pipeline.

        references: (height, width) in pixels of each image that an edit starts from.
        """
        # Is the denoiser called for each image of a batch? Some pipelines edit only one at a time,
        # and some take captions of one length: see `probe_batching`.
        self.one_by_one = "references" in findings
        self.code = code
        # Mochi's time counts the share of the image, and its velocity goes from noise to image
        self.is_inverted = code.scheduler.config.invert_sigmas
        self.structure = findings["structure"]
        self.parts: list[TextTensor] = findings["parts"]
        self.image_argument = findings.get("references", {}).get("name", "image")
        self.options = options | self.name_images(make_blanks(references))
        self.is_ragged = any(part["is_ragged"] for part in self.parts)
        self.channels, self.downscale = self.probe_geometry()
        self.time_maps = self.probe_times()
        self.calls: dict[Any, Call] = {}
        self.outputs: dict[Any, Tape] = {}
        self.layouts: dict[Any, Any] = {}  # see `probe_layout`
        self.shifts: dict[Any, float] = {}  # see `choose_mu`
        self.reference_sizes: dict[Any, Any] = {}  # see `measure_references`
        # of the references' latents
        self.reference_shapes = [latents.shape for latents in self.probe().latents]
        # a pipeline whose call can't be repeated is refused here
        lengths = [8] if self.one_by_one else [8, 6]
        self.record((len(lengths), *self.shape), lengths)

    def name_images(self, images: list[Any]) -> dict[str, Any]:
        """References as an argument of the pipeline."""
        return {self.image_argument: as_argument(images)} if images else {}

    @property
    def shape(self) -> tuple[int, int, int]:
        """The shape of latents in trials."""
        height, width = (side // self.downscale for side in PROBED_SIDES)
        return self.channels, height, width

    def probe_geometry(self) -> tuple[int, int]:
        """(channels of the latents that the pipeline starts from, pixels per latent on a side)."""
        height, width = PROBED_SIDES
        run = PipelineTrace("denoiser", torch.zeros, texts=[self.make_texts([1])])
        self.code([""], self.options | {"height": height, "width": width}, run)
        shape = measure_noise(run)
        if len(shape) != 3 or shape[2] * height != shape[1] * width or height % shape[1]:
            shapes = f"{run.noise_shapes} in a trial at {height} x {width} pixels"
            raise Unrecordable(f"it draws noise of the shapes {shapes}")
        return shape[0], height // shape[1]

    @property
    def patch_size(self) -> int:
        """Latents per token along a side: by the length of the packed sequence, or the config."""
        _, height, width = self.shape
        run = self.probe()
        first = next(iter(run.calls[0].values()))
        if isinstance(first, torch.Tensor) and first.dim() == 3:
            # the sequence of an edit holds the references as well
            share = math.prod(self.shape) / self.count_numbers(run)
            return math.isqrt(round(height * width / (first.shape[1] * share)))
        config = self.code.pipeline.components[self.code.folder].config
        size = config.get("patch_size", config.get("all_patch_size", 1))
        return size if isinstance(size, int) else size[-1]

    def count_numbers(self, run: PipelineTrace) -> int:
        """How many numbers the latents have in a run, with those of references."""
        return math.prod(self.shape) + sum(latents.numel() for latents in run.latents)

    def probe(self, time: float = 250.0, **options: Any) -> PipelineTrace:
        """Run the pipeline's code for one caption up to the denoiser."""
        run = PipelineTrace("denoiser", torch.zeros, time, [self.make_texts([8])])
        return self.run(1, self.shape[1:], run, **options)

    def choose_mu(self, size: tuple[int, int], expected: float) -> float:
        """The exponent of the shift of the noise levels, for latents of a size.

        It is what the pipeline gives its scheduler. expected: by the scheduler's config, which is
        kept where the pipeline's is equal up to rounding, or depends on the number of steps as
        well. FLUX.2's pipelines shift more in fewer steps, which is good for few large steps, and
        in 200 steps by what the config says: that is the model's own shift. It is printed once.
        """
        if size not in self.shifts:
            few, many = (self.measure_mu(size, steps) for steps in (4, FULL_STEPS))
            found = expected
            if many is not None and not math.isclose(many, expected, rel_tol=1e-6):
                found = many if few == many else expected
                if few != many and not self.shifts:
                    height, width = (side * self.downscale for side in size)
                    PartialState().print(
                        f"In {FULL_STEPS} steps, {self.code.kind.__name__} shifts noise levels at "
                        f"{height} x {width} pixels by {math.exp(many):.3g}, and in fewer steps by "
                        f"more, in 200 steps by {math.exp(self.measure_mu(size, 200) or 0):.3g}. "
                        f"Training shifts them by {math.exp(expected):.3g}, as the scheduler's "
                        "config says: --shift sets another shift"
                    )
            self.shifts[size] = found
        return self.shifts[size]

    def measure_mu(self, size: tuple[int, int], num_steps: int) -> float | None:
        """What the pipeline gives its scheduler as `mu`, for latents of a size."""
        run = PipelineTrace("denoiser", torch.zeros, texts=[self.make_texts([8])])
        return self.run(1, size, run, num_inference_steps=num_steps).mu

    def join(self, prompts: dict[str, torch.Tensor]) -> Any:
        return rebuild_results(self.structure, {"caption": prompts})

    def make_texts(self, lengths: list[int], known: dict[str, torch.Tensor] | None = None) -> Any:
        """Results of encode_prompt for captions with so many tokens, on the CPU, all zeros.

        known: columns that have other values.
        """
        count = len(lengths)
        blank = {
            part["column"]: torch.full((count, *part["shape"]), part["typical"], device="cpu")
            for part in self.parts
        }
        blank["prompt_mask"] = torch.ones(count, max(lengths), dtype=torch.bool, device="cpu")
        blank["prompt_lengths"] = torch.tensor(lengths, device="cpu")
        for part in self.list_masks():
            tokens = torch.arange(part["shape"][0], device="cpu")
            blank[part["column"]] = (tokens < blank["prompt_lengths"].unsqueeze(1)).float()
        return self.join(blank | (known or {}))

    def list_masks(self) -> list[TextTensor]:
        """The parts whose values follow from the numbers of tokens."""
        return [part for part in self.parts if part.get("is_mask")]

    def run(
        self, count: int, size: Sequence[int], run: PipelineTrace, **options: Any
    ) -> PipelineTrace:
        """Run the pipeline's code for latents of a size. options: further arguments of it."""
        height, width = (side * self.downscale for side in size)
        options = self.options | {"height": height, "width": width} | options
        self.code([""] * count, options, run)
        if run.ends_at == "denoiser" and len(run.calls) != 1:
            raise Unrecordable("its denoiser is not called")
        return run

    def probe_times(self) -> dict[str, str]:
        """{an argument that depends on the time: one of `TIME_MAPS`}."""
        seen: list[dict[str, torch.Tensor]] = []
        for time in PROBED_TIMES:
            leaves, _ = tree_flatten_with_path(self.probe(time).calls[0])
            seen.append({keystr(path): leaf for path, leaf in leaves})
        maps = {}
        for name, first in seen[0].items():
            values = [each[name] for each in seen]
            if not isinstance(first, torch.Tensor) or all(is_equal(first, v) for v in values):
                continue
            for formula, (of_timestep, _) in TIME_MAPS.items():
                expected = (of_timestep(torch.full_like(v, t)) for v, t in
                            zip(values, PROBED_TIMES, strict=True))  # fmt: skip
                if all(map(is_equal, values, expected)):
                    maps[name] = formula
                    break
            else:
                argument = name[2:-2]  # of ['timestep']
                raise Unrecordable(f"its denoiser's {argument} is not a known function of the time")
        if not maps:
            raise Unrecordable("no argument of its denoiser depends on the time")
        return maps

    def predict(
        self,
        model: torch.nn.Module,
        noisy: torch.Tensor,
        times: torch.Tensor,
        prompts: dict[str, torch.Tensor],
        references: Sequence[torch.Tensor] = (),
    ) -> torch.Tensor:
        """The velocity, float32 [N, C, h, w]. See `Family.predict`."""
        if self.one_by_one and len(noisy) > 1:
            rows = [slice(i, i + 1) for i in range(len(noisy))]
            return torch.cat(
                [
                    self.predict(
                        model,
                        noisy[row],
                        times[row],
                        {name: value[row] for name, value in prompts.items()},
                        [latents[row] for latents in references],
                    )
                    for row in rows
                ]
            )
        lengths = [1] * len(noisy)  # not read if all captions have the same number of tokens
        if self.is_ragged:
            lengths = prompts["prompt_lengths"].tolist()
        texts = self.join(prompts)
        leaves = list_tensors(texts)
        if self.is_inverted:
            times = 1 - times
        call = self.get_call(noisy.shape, lengths, leaves)
        arguments = call.fill([noisy, *references, *leaves])
        for position, formula in call.times.items():
            time = TIME_MAPS[formula][1](times)
            like = call.leaves[position]
            if like.numel() == len(times):
                time = time.view(like.shape)
            elif like.dim() > 1:  # for each token of each image
                time = time.view(-1, *[1] * (like.dim() - 1)).expand(like.shape)
            arguments[position] = time.to(like.dtype)
        context: Any = contextlib.nullcontext()
        if noisy.is_meta:
            values = self.list_values(call, noisy.shape, lengths, prompts)
            pairs = zip(arguments, values, strict=True)
            arguments = [value if is_whole_numbers(value) else one for one, value in pairs]
            context = on_meta()
        with context:
            output = model(**tree_unflatten(arguments, call.spec))[0]
        velocity = self.read(output, noisy.shape, lengths)
        return -velocity if self.is_inverted else velocity

    def list_values(
        self, call: Call, shape: torch.Size, lengths: list[int], prompts: dict[str, torch.Tensor]
    ) -> list[Any]:
        """The arguments of a call on the CPU, with the values of masks, and zeros.

        prompts: NAME_values is the value of the column NAME, if its values matter.
        """
        known = {name: prompts[f"{name}_values"] for name in prompts if f"{name}_values" in prompts}
        texts = list_tensors(self.make_texts(lengths, known))
        return call.fill([*self.make_latents(shape), *texts])

    def make_latents(self, shape: Sequence[int]) -> list[torch.Tensor]:
        """Noisy latents of a shape and those of references, on the CPU, all zeros."""
        shapes = [tuple(shape), *self.reference_shapes]
        return [torch.zeros(each, device="cpu") for each in shapes]

    def get_call(self, shape: torch.Size, lengths: list[int], texts: list[torch.Tensor]) -> Call:
        # masks without padding may be left out by the pipeline
        known = (shape, len({*lengths}) == 1, *(text.shape for text in texts))
        if known not in self.calls:
            self.calls[known] = self.record(shape, lengths)
        return self.calls[known]

    def record(self, shape: Sequence[int], lengths: list[int]) -> Call:
        """Record the call for latents of a shape, and captions with so many tokens."""
        texts = self.make_texts(lengths)
        count = len(self.reference_shapes)

        def call(noise: torch.Tensor, *tensors: torch.Tensor) -> dict[str, Any]:
            given = iter(tensors[count:])
            run = PipelineTrace("denoiser", partial(reshape_noise, noise))
            run.texts = [tree_map_only(torch.Tensor, lambda _: next(given), texts)]
            run.references = tensors[:count]
            return self.run(len(noise), shape[2:], run).calls[0]

        inputs = [*self.make_latents(shape), *list_tensors(texts)]
        named, spec = tree_flatten_with_path(call(*inputs))
        names = [keystr(path) for path, _ in named]
        arguments = [leaf for _, leaf in named]
        for name, leaf in zip(names, arguments, strict=True):
            if not isinstance(leaf, (torch.Tensor, *PLAIN)):
                raise Unrecordable(f"its denoiser takes a {type(leaf).__name__} as {name}")
        where = [i for i, leaf in enumerate(arguments) if isinstance(leaf, torch.Tensor)]
        times = {i: self.time_maps[name] for i, name in enumerate(names) if name in self.time_maps}
        made = Call(Tape(call, inputs), arguments, spec, where, times)
        is_fixed = self.find_fixed(inputs, lengths)
        pairs = zip(inputs, is_fixed, strict=True)
        others = [tensor if is_fixed else vary(tensor) for tensor, is_fixed in pairs]
        expected, _ = tree_flatten_with_path(call(*others))
        if [path for path, _ in expected] != [path for path, _ in named]:
            raise Unrecordable("its denoiser gets other arguments for other captions")
        if name := find_difference(expected, made.fill(others)):
            raise Unrecordable(f"its denoiser's {name} can't be repeated for other values")
        return made

    def find_fixed(self, inputs: list[torch.Tensor], lengths: list[int]) -> list[bool]:
        """Which inputs of a call, see `record`, are masks: they have no other values."""
        masks = {
            part["column"]: torch.zeros(len(lengths), *part["shape"], device="cpu")
            for part in self.list_masks()
        }
        others = list_tensors(self.make_texts(lengths, masks))
        images = [False] * (len(inputs) - len(others))
        texts = inputs[len(images) :]
        return images + [not is_equal(*pair) for pair in zip(texts, others, strict=True)]

    def read(self, output: Any, shape: torch.Size, lengths: list[int]) -> torch.Tensor:
        """The velocity that the pipeline makes of the denoiser's output, float32 [N, C, h, w]."""
        leaves = list_tensors(output)
        known = (shape, *((leaf.shape, leaf.dtype) for leaf in leaves))
        if known not in self.outputs:
            self.outputs[known] = self.record_output(output, shape, lengths)
        (velocity,) = self.outputs[known](*leaves)
        return velocity

    def record_output(self, output: Any, shape: torch.Size, lengths: list[int]) -> Tape:
        texts = self.make_texts(lengths)
        outputs, spec = tree_flatten(output)
        leaves = [torch.zeros(x.shape, dtype=x.dtype, device="cpu") for x in outputs]
        numbers = math.prod(shape[1:])
        positions = torch.arange(numbers, dtype=torch.float32, device="cpu").repeat(shape[0])

        def finish(*tensors: torch.Tensor) -> PipelineTrace:
            given = tree_unflatten(tensors, spec)
            noise = partial(reshape_noise, positions)
            return self.run(
                shape[0], shape[2:], PipelineTrace("step", noise, texts=[texts], output=given)
            )

        packed = finish(*leaves).sample[0].flatten().long()
        if not torch.equal(packed.sort().values, torch.arange(numbers, device="cpu")):
            raise Unrecordable("its latents are not those that it starts from, in another order")
        order = packed.argsort()

        def read(*tensors: torch.Tensor) -> list[torch.Tensor]:
            velocity = finish(*tensors).velocity
            return [velocity.flatten(1).index_select(1, order).view(shape).float()]

        tape = Tape(read, leaves)
        others = [vary(leaf) for leaf in leaves]
        if not all(map(is_equal, tape(*others), read(*others))):
            raise Unrecordable("its use of the denoiser's output depends on values")
        return tape


def vary(tensor: torch.Tensor) -> torch.Tensor:
    """Other values than 0: random numbers, or a mask of which the last quarter is 0."""
    generator = torch.Generator("cpu").manual_seed(0)
    if tensor.is_floating_point():
        random = torch.randn(tensor.shape, generator=generator, device="cpu")
        return random.to(tensor.dtype)
    varied = torch.ones_like(tensor)
    if tensor.dim() > 1:
        varied[:, 3 * tensor.shape[1] // 4 :] = 0
    return varied


def reshape_noise(noise: torch.Tensor, size: tuple[int, ...]) -> torch.Tensor:
    if math.prod(size) != noise.numel():
        raise Unrecordable(f"it draws noise of the shape {list(size)} as well")
    return noise.reshape(size)
