"""--validation_metrics: the quality of samples, measured while a run trains."""

import contextlib
import json
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
import xxhash
from accelerate.utils import gather_object
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from diffusion_training.errors.sentences import explained, fail
from diffusion_training.files import saving
from diffusion_training.launch import Launch
from diffusion_training.loading import load_batches
from diffusion_training.memory import measure_memory
from diffusion_training.order import hash_names
from diffusion_training.stopping import StopSignal
from diffusion_training.training.scores.distances import average, cosines, measure_fid, measure_kid
from diffusion_training.training.scores.metric_flags import CLIP_METRICS, SET_METRICS
from diffusion_training.training.scores.networks import Network, load_network

RESAMPLES = 100  # of the intervals
MOST_TRAINED = 2000  # images that `copy` looks at, and a LoRA is compared with
# settings that decide which pixels of an image a network gets
PIXELS = (
    "resolution", "bucket_step", "bucket_max_ratio", "bucket_no_upscale",
    "image_interpolation_mode",
)  # fmt: skip
# draws a sample for each of these rows, and returns this process's share of them:
# {index of the row: image [H, W, C] from 0 to 1}; fewer after a signal
Draw: TypeAlias = Callable[[Sequence[int]], dict[int, np.ndarray]]
# a batch -> its images, uint8 [N, C, H, W], on the device
Read: TypeAlias = Callable[[Any], torch.Tensor]
Features: TypeAlias = dict[str, torch.Tensor]  # {network: [N, width]}


class Metrics:
    """Measures samples of a run. Made before step 1; all processes call all methods.

    Sample i has the caption of a real image, and a seed of its own. So figures are the same on any
    number of processes, except for rounding, and training is the same with and without them.
    """

    def __init__(
        self,
        launch: Launch,
        dataset: Any,
        train_rows: Any,
        held_out: dict[int, int],
        args: Namespace,
    ) -> None:
        """Load the networks, and choose the real images. Stops with an error if that fails."""
        self.launch = launch
        self.dataset = dataset
        self.args = args
        self.names = list(dict.fromkeys(args.validation_metrics))
        self.every = args.metric_steps or args.checkpointing_steps
        is_lora = vars(args).get("rank")
        self.count = args.num_metric_images or (64 if is_lora else 512)
        # networks are on the CPU between two measurements
        self.networks: dict[str, Network] = {}
        if set(self.names) - set(CLIP_METRICS):
            self.networks["image"] = self.load("metric_image_model")
        if set(self.names) & set(CLIP_METRICS):
            self.networks["clip"] = clip = self.load("metric_clip_model")
            if clip.embed_texts is None:
                fail(f"--metric_clip_model {clip.name} has no text encoder: choose a CLIP model")
        self.trained: list[int] = []
        if "copy" in self.names or not held_out:
            self.trained = choose_trained(dataset, train_rows, args.seed)
        self.real = sorted(held_out, key=lambda row: held_out[row]) or self.trained
        self.check_real(len(self.real))
        # what `measure_real` returns; once is enough
        self.measured_real: tuple[list[int], Features] = ([], {})

    def load(self, flag: str) -> Network:
        name = vars(self.args)[flag]
        with explained(f"--{flag} {name} can't be used"):
            return load_network(name, self.args.cache_dir)

    def check_real(self, count: int) -> None:
        """Stop with an error if there are too few real images."""
        spread = [name for name in self.names if name in SET_METRICS]
        if spread and count < 2:
            fail(
                f"--validation_metrics {spread[0]} compares the spread of samples with that of "
                f"held-out images, so it needs two that can be decoded, not {count}: raise "
                "--holdout"
            )

    @torch.no_grad()
    def score(
        self, step: int, draw: Draw, read: Read, stop_signal: StopSignal
    ) -> dict[str, Any] | None:
        """Draw samples and measure them. Returns a record; None if a signal has come.

        The record is complete on the first process only.
        """
        begin = time.perf_counter()
        seconds: dict[str, float] = {}
        with self.on_device():
            if not self.measured_real[0]:
                self.measured_real = self.measure_real(read, stop_signal)
            usable, known = self.measured_real
            if not usable:
                return None
            rows = [usable[number % len(usable)] for number in range(self.count)]
            with timed(seconds, "sampling"):
                drawn = draw(rows)
            found = []
            images = {number: to_pixels(drawn[number]) for number in drawn if number < self.count}
            for kind, network in self.networks.items():
                with timed(seconds, f"{kind}_model"):
                    for number, image in images.items():
                        features = network.embed_images(image[None].to(self.launch.device))
                        found.append((kind, number, features[0].float().cpu()))
            found = gather_object(found)
            if len(found) < self.count * len(self.networks):
                return None
            record: dict[str, Any] = {"step": step, "metric_images": self.count}
            if self.launch.is_main:
                fake = stack_features(found)
                record |= self.compare(rows, known, fake)
        names = ("guidance_scale", "num_inference_steps", "ddpm_num_inference_steps")
        record |= {name: vars(self.args)[name] for name in names if name in self.args}
        seconds["metric"] = time.perf_counter() - begin
        record |= {f"{name}_seconds": value for name, value in seconds.items()}
        return record | {"metric_memory_gb": measure_memory(self.launch.device)[0] / 1e9}

    def compare(self, rows: list[int], known: Features, fake: Features) -> dict[str, Any]:
        """The figures of samples, with the ends of their intervals. Call it on the first process.

        rows: whose captions the samples have. known: features of real images, and their "rows".
        """
        place = {row: index for index, row in enumerate(known["rows"].tolist())}
        real = [place[row] for row in self.real if row in place]
        trained = [place[row] for row in self.trained if row in place]
        record: dict[str, Any] = {"real_images": len(real)}
        for name in self.names:
            kind = "clip" if name in CLIP_METRICS else "image"
            own, others = fake[kind], known[kind]
            if name in SET_METRICS:
                measure = measure_kid if name == "kid" else measure_fid
                value, interval = measure(others[real], own, RESAMPLES)
            elif name == "copy":
                nearest = cosines(own, others[trained]).amax(dim=1)
                value, interval = average(nearest, RESAMPLES)
                if len(trained) > 1:  # how near the training images are to each other
                    apart = cosines(others[trained], others[trained]).fill_diagonal_(-1)
                    record["copy_real"] = apart.amax(dim=1).mean().item()
            elif name == "clip-t":
                value, interval = average(self.compare_with_prompts(rows, own), RESAMPLES)
            else:
                value, interval = average(cosines(own, others[real]).mean(dim=1), RESAMPLES)
            low, high = interval or (value, value)
            record |= {name: value, f"{name}_low": low, f"{name}_high": high}
        return record

    def compare_with_prompts(self, rows: list[int], fake: torch.Tensor) -> torch.Tensor:
        """The cosine of each sample and its prompt, [N]."""
        captions = [self.dataset.caption(row) for row in rows]
        embed = self.networks["clip"].embed_texts
        assert embed
        texts = list(dict.fromkeys(captions))
        embedded = torch.cat([embed([text]).float().cpu() for text in texts])
        numbers = torch.tensor([texts.index(caption) for caption in captions])
        return cosines(fake, embedded).gather(1, numbers[:, None])[:, 0]

    def measure_real(self, read: Read, stop_signal: StopSignal) -> tuple[list[int], Features]:
        """Compute the features of the real images once; later runs of the folder read them.

        Returns (rows to draw samples for, features); the latter are empty on other processes. No
        rows are returned if a signal has come.
        """
        path = Path(self.args.output_dir) / "metrics.safetensors"
        rows = sorted({*self.real, *self.trained})
        known: Features = {}
        source = ""
        if self.launch.is_main:
            source = self.hash_source(rows)
            with contextlib.suppress(Exception), safe_open(path, "pt") as file:
                if file.metadata()["source"] == source:
                    known = load_file(path)
        if not gather_object([bool(known)])[0]:
            found = gather_object(self.embed_rows(rows, read, stop_signal))
            if any(gather_object([stop_signal.received])):
                return [], {}
            if self.launch.is_main:
                known = stack_features(found)
                known["rows"] = torch.tensor(sorted({row for _, row, _ in found}))
                with saving(path.parent, path.name) as unfinished:
                    save_file(known, unfinished / path.name, {"source": source})
        own = set(known["rows"].tolist()) if known else set()
        usable = gather_object([[row for row in self.real if row in own]])[0]
        if not usable:
            fail(f"--validation_metrics: none of {len(self.real)} real images can be decoded")
        self.check_real(len(usable))
        return usable, known

    def embed_rows(
        self, rows: list[int], read: Read, stop_signal: StopSignal
    ) -> list[tuple[str, int, torch.Tensor]]:
        """This process's share of (network, row, features) of real images that can be decoded."""
        # images of one size at a time
        most = 16 if self.dataset.sizes is None else 1
        own = rows[self.launch.rank :: self.launch.num_processes]
        chunks = [own[start : start + most] for start in range(0, len(own), most)]
        keys = [[(None, row, 1.0) for row in chunk] for chunk in chunks]
        batches = load_batches(self.dataset, keys, 0, self.launch.device)
        found = []
        for chunk, batch in zip(chunks, batches, strict=True):
            if stop_signal.received:
                break
            images = as_colour(read(batch))
            for kind, network in self.networks.items():
                features = network.embed_images(images).float().cpu()
                for row, weight, feature in zip(chunk, batch["weight"], features, strict=True):
                    if weight:
                        found.append((kind, row, feature))
        return found

    def hash_source(self, rows: list[int]) -> str:
        """A hash of what the features of the real images depend on."""
        networks = {kind: network.describe() for kind, network in self.networks.items()}
        images = [self.dataset.digest(row) for row in rows]
        pixels = {name: vars(self.args).get(name) for name in PIXELS}
        content = json.dumps([networks, rows, images, pixels])
        return xxhash.xxh3_128_hexdigest(content.encode())

    @contextlib.contextmanager
    def on_device(self) -> Iterator[None]:
        """Have the networks on the device only inside, because training needs its memory."""
        for network in self.networks.values():
            network.module.to(self.launch.device)
        try:
            yield
        finally:
            for network in self.networks.values():
                network.module.to("cpu")


def choose_trained(dataset: Any, train_rows: Any, seed: int) -> list[int]:
    """At most `MOST_TRAINED` of the rows that are trained on, chosen by their names."""
    if not isinstance(train_rows, np.ndarray):
        fail(
            "--validation_metrics can't compare samples with images that are trained on, if these "
            "are read shard by shard: leave copy out, and give --holdout"
        )
    if len(train_rows) > MOST_TRAINED:
        hashes = hash_names(dataset.names(), seed)[train_rows]
        train_rows = train_rows[hashes.argsort(kind="stable")[:MOST_TRAINED]]
    return train_rows.tolist()


def stack_features(found: list[tuple[str, int, torch.Tensor]]) -> Features:
    """[(network, number, features)] -> {network: features [N, width] in the order of numbers}."""
    found = sorted(found, key=lambda each: each[1])
    kinds = dict.fromkeys(kind for kind, _, _ in found)
    return {kind: torch.stack([each[2] for each in found if each[0] == kind]) for kind in kinds}


def to_pixels(image: np.ndarray) -> torch.Tensor:
    """A sample [H, W, C] from 0 to 1 -> uint8 [3, H, W]."""
    pixels = torch.from_numpy((image * 255).round().astype(np.uint8))
    return as_colour(pixels.permute(2, 0, 1)[None])[0]


def as_colour(images: torch.Tensor) -> torch.Tensor:
    """Repeat the channel of grey images, uint8 [N, C, H, W]."""
    if images.shape[1] not in (1, 3):
        fail(f"--validation_metrics needs grey or colour images, not {images.shape[1]} channels")
    return images.expand(-1, 3, -1, -1)


@contextlib.contextmanager
def timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    """Note how many seconds the block takes."""
    begin = time.perf_counter()
    yield
    seconds[name] = time.perf_counter() - begin
