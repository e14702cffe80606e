"""--validation_base, --validation_lora: samples with a second base, which draws in few steps.

A LoRA is trained on a base that draws in many steps, and people use it with a turbo of it. Here the
second base gets the LoRA as its file has it, so a sample equals that of the second base's own
pipeline after `load_lora_weights`.
"""

import contextlib
import gc
import inspect
import os
import re
import warnings
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import diffusers
import torch
from accelerate.utils import convert_outputs_to_fp32
from peft import LoraConfig, inject_adapter_in_model, set_peft_model_state_dict
from peft.tuners.lora import LoraLayer

from diffusion_training.data.captioned_data import Data
from diffusion_training.errors.sentences import explained, fail
from diffusion_training.families.base import Base
from diffusion_training.families.opening import open_base
from diffusion_training.host_memory import measure_free
from diffusion_training.launch import Launch
from diffusion_training.memory import is_gpu
from diffusion_training.models import find_weight_files, is_component, list_scales, put_on_device
from diffusion_training.training.lora.lora import add_lora, make_lora_files
from diffusion_training.training.lora.lora_files import (
    LORA_A,
    LORA_B,
    LORA_FILE,
    LoraFile,
    read_plain_lora,
    tell_left_out,
)
from diffusion_training.training.scores.metric_flags import TURBO
from diffusion_training.training.showing.sample_base import SampleBase
from diffusion_training.training.step.denoiser import load_base
from diffusion_training.training.step.samplers import try_sampler

# flags of the base that do not hold for --validation_base
OF_BASE = (
    "model_family",
    "revision", "vae_name_or_path", "text_encoder_name_or_path", "tokenizer_name_or_path",
    "single_file_config",
)  # fmt: skip
FEW_STEPS = 8  # of a distilled model whose name does not say how many
# by these words in the name of a U-Net's LoRA it needs consistency sampling (arXiv:2311.05556)
CONSISTENCY = ("lcm", "dmd")
SPEED = "speed"  # name of the adapter of --validation_lora; the trained one is "default"
# entries of a config that do not change what a model computes
UNIMPORTANT = (
    "_diffusers_version",
    "_name_or_path",
    "transformers_version",
    "dtype",
    "torch_dtype",
)


@dataclass(frozen=True, kw_only=True)
class OtherBase(SampleBase):
    """The base of --validation_base, or the run's own with --validation_lora, or both.

    Its denoiser is in memory only while samples are drawn, as the trained one is in training: in
    the same precision, and with --blocks_to_swap. The trained one is then in the host's memory.
    """

    base: Base
    scheduler: Any  # None: that of the trained pipeline
    sampler: tuple[str, dict[str, Any]] | None  # see `choose_sampler`
    resolution: int
    launch: Launch
    args: Namespace

    @contextlib.contextmanager
    def open(self, pipeline: Any) -> Iterator[Any]:
        """A pipeline of this base with the LoRA and the VAE of `pipeline`, the trained one."""
        folder = self.family.folder
        trained = pipeline.components[folder]
        weights, _ = make_lora_files({folder: trained}, None)[LORA_FILE]
        with staying_on_host(trained):
            model = self.load(trained, weights)
            parts = {"vae": pipeline.vae, folder: model}
            parts["scheduler"] = self.make_scheduler(pipeline.scheduler)
            opened = self.family.build(parts, self.base, self.resolution)
            yield opened
            # out of memory, before the trained one comes back
            setattr(opened, folder, None)
            del model, parts
            gc.collect()  # its layers refer to each other

    def make_scheduler(self, own: Any) -> Any:
        """The scheduler of --validation_base, or `own` as the LoRA of few steps needs it."""
        if self.scheduler:
            return type(self.scheduler).from_config(self.scheduler.config)
        if self.sampler is None:
            return own
        name, options = self.sampler
        return getattr(diffusers, name).from_config(own.config, **options)

    def load(self, trained: Any, weights: dict[str, torch.Tensor]) -> Any:
        """Load the denoiser, and add the adapter of the trained one. weights: those of its file."""
        args = self.args
        folder = self.family.folder
        launch = self.launch
        # as in `load_denoiser` and `adapt_denoiser`
        swap = getattr(trained, "block_swap", None)  # of --blocks_to_swap or --fit
        device = torch.device("cpu") if swap else launch.device
        source, options = self.base.locate(self.base.transformer, folder)
        model, _ = load_base(
            type(trained),
            str(source),
            args.base_precision,
            device,
            launch.dtype,
            hashed=False,
            **options,
        )
        speed = read_plain_lora(self.lora, model, self.family) if self.lora else None
        # the factor alpha / rank is in the weights of a file
        plain = {"lora_alpha": args.rank, "lora_dropout": 0.0, "use_rslora": False}
        flags = Namespace(**vars(args) | plain)
        add_lora(model, trained.adapter["target_modules"], "", launch.dtype, flags)
        own = {key.removeprefix(f"{folder}."): value.float() for key, value in weights.items()}
        set_peft_model_state_dict(model, own)
        if speed:
            add_speed_lora(model, speed)
        model.requires_grad_(False)
        if swap:
            from diffusion_training.training.lora.block_swap import BlockSwap

            BlockSwap(model, sum(map(bool, swap.weights)), launch.device)
        put_on_device(model, launch.device)
        # what `prepare_model` does, which also keeps a reference to the model
        model.forward = convert_outputs_to_fp32(launch.accelerator.autocast()(model.forward))
        return model


@contextlib.contextmanager
def staying_on_host(model: torch.nn.Module) -> Iterator[None]:
    """Have the weights of a model in the host's memory in the block, if they are on a GPU.

    The tensors stay the same objects, which other models share, but have no memory there: they must
    not be read.
    """
    scales = [getattr(scale, "absmax", scale) for scale in list_scales(model)]
    tensors = {id(each): each for each in [*model.parameters(), *model.buffers(), *scales]}
    moved = [
        (each.detach(), each.detach().cpu(), each.untyped_storage().nbytes())
        for each in tensors.values()
        if is_gpu(each.device)
    ]
    for tensor, _, _ in moved:
        tensor.untyped_storage().resize_(0)
    yield
    for tensor, values, size in moved:
        tensor.untyped_storage().resize_(size)
        tensor.copy_(values)


def open_other_base(
    launch: Launch, base: Base, data: Data, model: Any, args: Namespace
) -> OtherBase:
    """The base of --validation_base and --validation_lora, before any step and without weights.

    Stops with an error if it does not fit the trained base, or if the memory is too small. model:
    the trained one.
    """
    lora = args.validation_lora
    other = base
    scheduler = None
    if args.validation_base:
        other = open_turbo(launch, base, data, model, args)
        scheduler = load_scheduler(other)
    check_host_memory(model, "--validation_base" if args.validation_base else "--validation_lora")
    steps, guidance = choose_drawing(other, args)
    if scheduler and "timestep_spacing" in scheduler.config:  # of a U-Net
        with explained(f"the scheduler of {other.name} can't draw in {steps} steps"):
            try_sampler(scheduler, steps)
    if lora:
        with torch.device("meta"), explained(f"--validation_lora {lora} can't be used"):
            file = read_plain_lora(lora, type(model).from_config(model.config), other.family)
        tell_left_out(file, "--validation_lora")
    found = OtherBase(
        prefix=TURBO, name=str(other.name), lora=lora, family=other.family,
        num_inference_steps=steps, guidance_scale=guidance, sampler=choose_sampler(other, lora),
        base=other, scheduler=scheduler, resolution=data.resolution, launch=launch, args=args,
    )  # fmt: skip
    launch.accelerator.print(
        f"Samples are also drawn with {found.describe()}; --validation_base_steps and "
        "--validation_base_guidance change that"
    )
    return found


def open_turbo(launch: Launch, base: Base, data: Data, model: Any, args: Namespace) -> Base:
    """The pipeline of --validation_base, which must have the same weights as the base.

    Of a transformer in one file, as ComfyUI has it, the other parts are the base's.
    """
    name = args.validation_base
    if name.endswith((".safetensors", ".gguf")) and base.family.folder == "transformer":
        from diffusion_training.families.transformer_file import unpack_transformer

        return replace(base, name=name, transformer=unpack_transformer(name, base, args.cache_dir))
    flags = dict.fromkeys(OF_BASE) | {"pretrained_model_name_or_path": name}
    other = open_base(Namespace(**vars(args) | flags), record=base.record)
    if "_class_name" not in other.index:
        fail(f"--validation_base {name} is not a pipeline: it has no model_index.json")
    if other.family.pipeline != base.family.pipeline:
        fail(
            f"--validation_base {name} is a {other.family.pipeline}, but the base a "
            f"{base.family.pipeline}: give a pipeline that was made from the base"
        )
    folder = other.family.folder
    with explained(f"--validation_base {name} can't be used"):
        kind = type(model)
        source, _ = other.locate(None, folder, with_weights=False)
        config = kind.load_config(source, subfolder=folder)
        if config.get("_class_name", kind.__name__) != kind.__name__:
            raise ValueError(f"its {folder} is a {config['_class_name']}, not a {kind.__name__}")
        own, others = list_shapes(kind, model.config), list_shapes(kind, config)
        if differing := sorted(dict(own.items() ^ others.items())):
            raise ValueError(
                f"{len(differing)} weights have other shapes than the base's, such as "
                f"{differing[0]}: give a pipeline that was made from the base"
            )
        variant = find_variant(other)
        # captions are those of the base
        family = other.family.restore_findings(base.family.describe_empty(data.empty_prompt))
    if differing := list_differences(base, other):
        launch.accelerator.print(
            f"{name} has another {' and '.join(differing)} than the base: its samples are drawn "
            "with the base's"
        )
    return replace(other, family=family, classes=base.classes, variant=variant)


def list_shapes(kind: Any, config: Any) -> dict[str, tuple[int, ...]]:
    """{name: shape} of the weights of a model with this config."""
    with torch.device("meta"):
        model = kind.from_config(config)
    return {name: tuple(weight.shape) for name, weight in model.named_parameters()}


def find_variant(other: Base) -> str | None:
    """--variant, if the pipeline has such weights. Raises FileNotFoundError if it has none at all.

    The files are fetched now, so that no step is lost to a missing one.
    """
    folder = other.family.folder
    if other.variant:
        with contextlib.suppress(FileNotFoundError):
            source, options = other.locate(None, folder)
            find_weight_files(str(source), **options)
            return other.variant
    source, options = replace(other, variant=None).locate(None, folder)
    find_weight_files(str(source), **options)
    return None


def list_differences(base: Base, other: Base) -> list[str]:
    """The parts for images and captions whose config differs from the base's."""
    own_paths = {"vae": base.vae, "text_encoder": base.text_encoder}
    found = []
    for part, entry in other.index.items():
        if not part.startswith(("vae", "text_encoder")) or not is_component(entry):
            continue
        configs = []
        for each, own_path in ((base, own_paths.get(part)), (other, None)):
            source, options = each.locate(own_path, part, with_weights=False)
            options.pop("variant", None)
            with contextlib.suppress(OSError):  # a folder may lack what is not used
                configs.append(diffusers.AutoencoderKL.load_config(source, **options))
        if len(configs) == 2:
            one, two = configs
            both = [key for key in one.keys() & two.keys() if key not in UNIMPORTANT]
            if any(one[key] != two[key] for key in both):
                found.append(part)
    return found


def load_scheduler(other: Base) -> Any:
    """The scheduler of --validation_base, of any class."""
    with explained(f"--validation_base {other.name} has no scheduler"):
        _, class_name = other.index["scheduler"]
        if class_name == diffusers.FlowMatchEulerDiscreteScheduler.__name__:
            return other.family.load_scheduler(other)
        source, options = other.locate_scheduler()
        return getattr(diffusers, class_name).from_pretrained(source, **options)


def open_plain_base(
    launch: Launch, base: Base, data: Data, model: torch.nn.Module, args: Namespace
) -> OtherBase:
    """The run's own base without --training_adapter. model: the trained one."""
    check_host_memory(model, "--training_adapter")
    return OtherBase(
        name=str(base.name), family=data.family, num_inference_steps=args.num_inference_steps,
        guidance_scale=args.guidance_scale, base=base, scheduler=None, sampler=None,
        resolution=data.resolution, launch=launch, args=args,
    )  # fmt: skip


def check_host_memory(model: torch.nn.Module, flag: str) -> None:
    """Stop with an error if the host lacks the memory for a second base, in each process.

    Of two bases one is in it while samples are drawn: with --blocks_to_swap and on a CPU the second
    one, on a GPU the trained one.
    """
    size = sum(weight.nbytes for weight in model.parameters() if not weight.requires_grad)
    needed = size * int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    free = measure_free()
    if needed > free:
        fail(
            f"{flag} needs {needed / 1e9:.3g} GB of the host's memory for samples, and only "
            f"{free / 1e9:.3g} GB are free: make room, or leave it out"
        )


def choose_drawing(other: Base, args: Namespace) -> tuple[int, float]:
    """(steps, guidance scale) of the samples: as flags say, or the name, or the pipeline."""
    family = other.family
    name = os.path.basename(str(args.validation_lora or other.name).rstrip("/")).lower()
    said = re.search(r"(\d+)[-_ ]?steps?(?![a-z])", name)
    is_fast = bool(said or args.validation_lora or family.is_distilled(other))
    kind = getattr(family, "pipeline_class", None) or getattr(diffusers, family.pipeline)
    options = inspect.signature(kind.__call__).parameters
    steps = args.num_inference_steps
    if is_fast:
        steps = int(said[1]) if said else FEW_STEPS
    elif isinstance(asked := options["num_inference_steps"].default, int):
        steps = asked
    guidance = args.guidance_scale
    if is_fast and not family.embedded_guidance:
        guidance = 1.0
    else:
        # a family's arguments grow by 1 with the scale, from numbers of their own
        given = family.guidance_args(2.0)
        for key, value in family.guidance_args(3.0).items():
            asked = options[key].default if key in options else None
            if value != given[key] and isinstance(asked, int | float):
                guidance = max(1.0, asked + 2.0 - given[key])
    return args.validation_base_steps or steps, args.validation_base_guidance or guidance


def choose_sampler(other: Base, lora: str | None) -> tuple[str, dict[str, Any]] | None:
    """(class of the scheduler, settings) with which a U-Net draws in few steps by a LoRA.

    None: that of the pipeline.
    """
    if lora is None or other.family.folder != "unet":
        return None
    name = os.path.basename(lora).lower()
    if any(word in name for word in CONSISTENCY):
        return "LCMScheduler", {}
    return "EulerDiscreteScheduler", {"timestep_spacing": "trailing"}


def add_speed_lora(model: torch.nn.Module, file: LoraFile) -> None:
    """Add a LoRA file beside a trained adapter. file: see `read_plain_lora`."""
    by_rank: dict[int, list[str]] = {}
    for layer, parts in file.layers.items():
        by_rank.setdefault(len(parts[LORA_A]), []).append(layer)
    for rank, layers in by_rank.items():
        config = LoraConfig(r=rank, lora_alpha=rank, target_modules=layers)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Already found a `peft_config`", UserWarning)
            inject_adapter_in_model(config, model, adapter_name=SPEED)
    for layer, parts in file.layers.items():
        module: Any = model.get_submodule(layer)
        for part, own in ((LORA_A, module.lora_A[SPEED]), (LORA_B, module.lora_B[SPEED])):
            weight = own.float().weight
            weight.data.copy_(parts[part].reshape(weight.shape))
        module.scaling[SPEED] = file.scales[layer]
    for module in model.modules():
        if isinstance(module, LoraLayer):
            module.set_adapter(["default", SPEED])
