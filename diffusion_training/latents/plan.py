"""The plan of latent caches: their settings, shards and size."""

import contextlib
import shlex
from argparse import Namespace
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import datasets
import fsspec

from diffusion_training.arguments import PACKAGED, list_values, name_start, read_words
from diffusion_training.data.captioned_flags import weigh_captions
from diffusion_training.data.captions import report_cut
from diffusion_training.data.encoders import Latents, check_sides, describe_latents
from diffusion_training.data.folders import is_shared
from diffusion_training.data.references import list_reference_columns
from diffusion_training.data.rows import ImageRows
from diffusion_training.data.transform_settings import Transform, make_transform
from diffusion_training.errors.sentences import explained, fail
from diffusion_training.families.base import Encoders, Family
from diffusion_training.files import is_old_hash, parse_json
from diffusion_training.latents.columns import EXTRA_COLUMNS, Column, list_columns, name_feature
from diffusion_training.latents.settings import name_shard
from diffusion_training.remote import has_file, read_bytes

# The caches of the demos, which the trainers' demos use without flags
DEMO_CACHES = ("latents-animals", "latents-digits-flow")
RECIPES = (PACKAGED if PACKAGED.is_dir() else PACKAGED.parents[1]) / "recipes"
# flags with which a trainer loads the models of a cache
MODEL_FLAGS = (
    "pretrained_model_name_or_path",
    "vae_name_or_path",
    "text_encoder_name_or_path",
    "tokenizer_name_or_path",
    "revision",
    "variant",
)


@dataclass(frozen=True)
class PlannedCache:
    """A cache to be made, with everything that decides its content."""

    output_dir: str
    family: Family
    transform: Transform
    latents: Latents
    text_cache: str  # "embeddings" or "ids"
    batch_size: int
    rows_per_shard: int
    settings: dict[str, Any]  # for cache.json; a run can resume a cache only if they are equal
    flags: dict[str, Any]  # for cache.json and run.args

    @property
    def columns(self) -> list[Column]:
        return list_columns(self.settings)

    @property
    def rows_per_batch(self) -> int:
        """How many rows of the source are loaded at once.

        For several sizes it is more than one forward pass takes, to get enough rows of each size.
        """
        return self.batch_size * (4 if self.transform.bucket_step else 1)

    def list_shards(self) -> dict[str, range]:
        """{name: its rows} of all shards; none for a stream, whose number of rows is unknown."""
        num_rows = self.settings["source"]["rows"] or 0
        firsts = range(0, num_rows, self.rows_per_shard)
        return {
            name_shard(number, self.settings): range(num_rows)[first : first + self.rows_per_shard]
            for number, first in enumerate(firsts)
        }

    def report_done(self, cache: dict[str, Any]) -> None:
        """Print what a finished cache holds, and the next command. cache: see `finish_cache`."""
        limit = cache["tokenizer"]["model_max_length"]
        report_cut(cache["captions_cut"], cache["rows"], limit, self.family.caption_unit)
        counts = f"{cache['rows']:,} rows, {cache['skipped']:,} skipped"
        print(f"Done: {counts}, are in {self.output_dir}")
        if is_shared(self.output_dir):  # the trainer that waits for it goes on
            return
        print(f"Next: {self.suggest_training()}")
        if self.output_dir not in DEMO_CACHES and self.family.suggests_lora:
            kinds = "The recipe trains a LoRA", "Without --rank it trains the whole model"
            print(f"{kinds[not self.find_recipe()]}. docs/memory.md has flags for your GPU")

    def suggest_training(self) -> str:
        """The command that trains on the cache."""
        start = name_start(self.family.script)
        if self.output_dir in DEMO_CACHES:
            return start
        words = ["--latents_dir", self.output_dir]
        for name in MODEL_FLAGS:
            if self.flags[name] is not None:
                words += [f"--{name}", self.flags[name]]
        if self.flags["model_family"]:
            words += ["--model_family", self.flags["model_family"]]
            if self.flags["pretrained_model_name_or_path"] is None:
                words += ["--transformer_config_name_or_path", "configs/prx_163m.json"]
        if self.flags["random_flip"]:
            words.append("--random_flip")
        if self.flags["mixed_precision"] != "no":
            words += ["--mixed_precision", self.flags["mixed_precision"]]
        if self.flags["max_sequence_length"]:
            words += ["--max_sequence_length", str(self.flags["max_sequence_length"])]
        if recipe := self.find_recipe():
            words = [f"@recipes/{recipe}", "--resolution", str(self.transform.resolution), *words]
        elif self.family.suggests_lora:
            words += ["--rank", "16", "--train_batch_size", "1", "--fit", "auto"]
        if self.family.reads_references:
            words += ["--caption_dropout", "0"]
        return f"{start} {shlex.join(words)}"

    def find_recipe(self) -> str | None:
        """The recipe of a LoRA for the base, which may be a folder with the name of its base."""
        name = Path(self.flags["pretrained_model_name_or_path"] or "").name
        for path in sorted(RECIPES.glob("*_lora.args")) if self.family.suggests_lora else ():
            words = read_words(path)
            base = words[words.index("--pretrained_model_name_or_path") + 1]
            is_edit = path.stem.endswith("_edit_lora")
            if Path(base).name == name and is_edit == bool(self.transform.reference_columns):
                return path.name
        return None

    def with_batch_size(self, size: int) -> "PlannedCache":
        return replace(self, batch_size=size, flags=self.flags | {"batch_size": size})


def plan_caches(
    args: Namespace,
    images: ImageRows,
    encoders: Encoders,
    described: dict[str, Any],
    launch_flags: dict[str, Any],
) -> list[PlannedCache]:
    """A cache for each --resolution, in subfolders named after the side if there are several.

    Each is as if it were made alone. described: the settings that the models decide. launch_flags:
    {flag: value} of the flags that the launch decides.
    """
    family = encoders.family
    sides = list_values(args.resolution or family.resolution)
    folders = [args.output_dir]
    if len(sides) > 1:
        check_not_cache(args.output_dir)
        folders = [f"{args.output_dir.rstrip('/')}/{side}" for side in sides]
    references = list_reference_columns(images.rows, args)
    check_references(family, images, references, args)
    channels, _ = family.count_channels(encoders.vae)
    kind = described["latents"]
    weights = weigh_captions(args)
    caches = []
    for side, folder in zip(sides, folders, strict=True):
        check_sides(family.downscale(encoders.vae), side, args.bucket_step)
        latents = describe_latents(family, encoders.vae, side, kind)
        count = len(references)
        reference_side = family.choose_reference_side(side, count) if count else 0
        transform = make_transform(
            args,
            images.column,
            images.mask_column,
            weights,
            channels,
            side,
            references,
            reference_side,
            latents.downscale,
        )
        about = {}
        if count:
            shape = family.shape_reference(encoders.vae, reference_side)
            about["references"] = {"count": count, "side": reference_side, "shape": shape}
            about["references"]["are_enlarged"] = False  # in caches of before, which lack it
        settings = describe_cache(
            described | {"latents_shape": list(latents.shape)} | about,
            transform,
            family.features,
            images.rows,
            args.rows_per_shard,
        )
        flags = vars(args) | launch_flags
        flags |= {"resolution": side, "output_dir": folder, "latents": kind}
        flags |= {"mask_column": images.mask_column, "caption_weights": weights}
        caches.append(
            PlannedCache(
                output_dir=folder,
                family=family,
                transform=transform,
                latents=latents,
                text_cache=args.text_cache,
                batch_size=args.batch_size,
                rows_per_shard=args.rows_per_shard,
                settings=settings,
                flags=flags,
            )
        )
    return caches


def find_old_hashes(args: Namespace) -> bool:
    """Whether an older version has begun one of the caches, so that its hashes are compared."""
    folder = args.output_dir.rstrip("/")
    for place in (folder, *(f"{folder}/{side}" for side in list_values(args.resolution))):
        with contextlib.suppress(Exception):  # there is none, or `open_cache` says what is wrong
            if is_old_hash(parse_json(read_bytes(f"{place}/cache.json"))["vae"]["sha256"]):
                return True
    return False


def check_references(
    family: Family, images: ImageRows, references: list[str], args: Namespace
) -> None:
    """Stop with an error if a cache of references can't be made with these flags.

    references: their columns.
    """
    if not references:
        return
    if args.random_flip and images.mask_column:
        fail("--random_flip can't mirror masks beside references: leave one of them out")
    if family.needs_references and args.allow_missing_conditioning:
        fail(
            f"--allow_missing_conditioning: a {family.pipeline} can't be called without a reference"
        )
    if family.reads_references:
        for flag, is_given in {
            "--random_flip": args.random_flip,
            "--text_cache ids": args.text_cache == "ids",
        }.items():
            if is_given:
                fail(
                    f"{flag} can't be used here, because the text encoder of a {family.pipeline} "
                    "sees the references: leave it out"
                )


def check_not_cache(output_dir: str) -> None:
    """Stop with an error if the folder for several caches is a cache itself."""
    with explained(f"--output_dir {output_dir} can't be read"):
        fs, root = fsspec.url_to_fs(output_dir)
        if has_file(fs, f"{root}/cache.json"):
            fail(
                f"--output_dir {output_dir} is a cache itself: several --resolution need another "
                "folder, where each gets a subfolder"
            )


def describe_cache(
    described: dict[str, Any],
    transform: Transform,
    family_features: tuple[str, ...],
    rows: Any,
    rows_per_shard: int,
) -> dict[str, Any]:
    """The settings in a new cache.json. described: those that the models decide."""
    names = (
        "resolution center_crop image_interpolation_mode random_flip seed min_size bucket_step "
        "bucket_max_ratio bucket_no_upscale skip_empty_captions caption_weights"
    ).split()
    settings = described | {"transform": {name: getattr(transform, name) for name in names}}
    if transform.caption_prefix:
        settings["transform"]["caption_prefix"] = transform.caption_prefix
    ragged = ("ragged embeddings", "ragged ids")
    features: dict[str, Any] = {name: True for name in family_features if name not in ragged}
    features |= {
        "ragged latents": transform.bucket_step,
        "masks": transform.mask_column,
        "ragged embeddings": "ragged embeddings" in family_features,
        "ragged ids": "ragged ids" in family_features and described["text_cache"] == "ids",
        "captions": transform.caption_weights,
        "references": transform.reference_columns,
        "classes": "classes" in described,
    }
    features |= {name_feature(column): True for column in EXTRA_COLUMNS}
    settings["features"] = [name for name, is_present in features.items() if is_present]
    num_rows = None if isinstance(rows, datasets.IterableDataset) else len(rows)
    settings["source"] = {"fingerprint": rows._fingerprint, "rows": num_rows}
    settings["rows_per_shard"] = rows_per_shard
    return settings
