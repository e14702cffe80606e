"""Write a caption for each image, with a model that describes images.

    python caption_images.py     # the demo: a tiny model describes drawings of ducks
    python caption_images.py --train_data_dir photos --mixed_precision bf16 \\
        --pretrained_model_name_or_path Qwen/Qwen3-VL-8B-Instruct --trigger "sks dog"

Input: a folder of images, parquet files, or a data set on the hub; and a model of transformers that
turns an image and a text into a text (`AutoModelForImageTextToText`), such as Qwen3-VL, JoyCaption,
Florence-2 or BLIP. Output: `photo.txt` beside each `photo.jpg`, which the other scripts read. With
--output_file, the captions go into one file instead: a .jsonl with the names of the images, or a
.parquet with the images.

An image that has a caption file keeps it, unless you give --overwrite. Run the same command again
to resume: no image is described twice. An image that can't be decoded, or for which the model
returns no words, gets no caption and is listed at the end.

Layout of this file:
    parse_args       the flags
    ImageBatches     on CPU cores: rows -> what the model's processor makes of them
    load_captioner   the model and its processor
    describe         on the device: a batch -> its captions
    Journal          the captions so far, which a resumed run reads
    write_captions   all captions -> the file of --output_file
    main             the run
"""

from pathlib import Path

try:
    from diffusion_training import check_version
except ModuleNotFoundError:
    raise SystemExit(
        f"{__file__} needs the package diffusion_training: run `pip install .` in the "
        "script's repository"
    ) from None
check_version("0.1.0", Path(__file__).name)  # first: another version may lack the modules below

import collections
import glob
import json
import math
import os
import re
import shlex
from argparse import Namespace
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TextIO

from diffusion_training.arguments import (
    COUNT,
    PATH,
    SWITCH,
    is_address,
    make_parser,
    number,
    parse_demo,
)
from diffusion_training.data.flags import add_source_flags, add_worker_flag, check_source
from diffusion_training.flags import add_precision_flag

HERE = shlex.quote(os.path.relpath(Path(__file__).parent))
# The flags of a run without a data set. Flags on the command line override them.
DEMO = f"""
    --pretrained_model_name_or_path {HERE}/demo/captioner --train_data_dir {HERE}/demo/ducks
    --output_file captioned-ducks.parquet --dataloader_num_workers 0
"""
INSTRUCTION = (
    "Describe this image in one or two sentences, as a caption for training a text-to-image model."
)

# -------------------------------------------------------------------------------------------------
# the flags


def parse_args(argv: list[str] | None = None) -> Namespace:
    """Parse and check the command line.

    A bad argument stops the script with one line and status 2 before anything is loaded.
    """
    parser = make_parser(__file__, __doc__, "docs/data.md")
    add = parser.add_argument_group("images").add_argument
    add_source_flags(add)
    add(
        "--caption_extension",
        default=".txt",
        help="extension of the caption files (photo.txt for photo.jpg)",
    )
    add(
        "--seed",
        type=number(0, 2**63 - 1, int),
        default=0,
        help="seed of the images that --max_train_samples draws",
    )
    add_worker_flag(add)

    add = parser.add_argument_group("model").add_argument
    add(
        "--pretrained_model_name_or_path",
        type=PATH,
        help="model of transformers that describes images: its id on the hub, or a folder",
    )
    add(
        "--revision",
        help="branch, tag or commit of the model on the hub",
        useless_with="--pretrained_model_name_or_path FILE",
    )
    add(
        "--prompt",
        help="what to ask of the model, such as '<MORE_DETAILED_CAPTION>' for Florence-2 (default: "
        f"'{INSTRUCTION}' for a model that has a chat template, else nothing)",
    )
    add("--system_prompt", help="instruction before --prompt, for a model that has a chat template")
    add(
        "--max_new_tokens",
        type=number(1, 4096, int),  # more than any text encoder reads
        default=256,
        help="longest caption, in tokens, if the model can write as many",
    )
    add("--batch_size", type=COUNT, default=8, help="images that the model describes at once")
    add_precision_flag(add)

    add = parser.add_argument_group("captions").add_argument
    add("--trigger", help="words to put in front of each caption, such as 'sks dog'")
    add("--overwrite", **SWITCH, help="replace captions that are there (default: keep them)")
    add(
        "--output_file",
        type=PATH,
        help="write all captions into this file, NAME.jsonl or NAME.parquet (default: a caption "
        "file beside each image)",
    )
    args = parser.parse_args(argv)
    if args.dataset_name is None and args.train_data_dir is None:
        args = parse_demo(parser, DEMO, argv)
    if args.pretrained_model_name_or_path is None:
        parser.error(
            "--pretrained_model_name_or_path is missing: give a model that describes images, such "
            "as Qwen/Qwen3-VL-8B-Instruct"
        )
    check_source(parser, args)
    if not re.fullmatch(r"\.?[^./\\][^/\\]*", args.caption_extension):
        parser.error(
            f"--caption_extension {args.caption_extension} is no extension: give one such as .txt"
        )
    for name in ("prompt", "trigger"):
        if vars(args)[name] is not None and not vars(args)[name].strip():
            parser.error(f"--{name} is empty: leave it out")
    source = args.dataset_name or args.train_data_dir
    file = args.output_file
    if file is None:
        if not os.path.isdir(source):
            parser.error(f"{source} is not a folder of images: give --output_file NAME.parquet")
    elif is_address(file) or not file.endswith((".jsonl", ".parquet")):
        parser.error(f"--output_file {file} is not the name of a .jsonl or .parquet file on a disk")
    elif os.path.exists(file) and not args.overwrite:
        parser.error(f"--output_file {file} exists: choose another, or give --overwrite")
    elif not os.path.isdir(os.path.dirname(file) or "."):
        parser.error(f"--output_file {file}: there is no folder {os.path.dirname(file)}")
    return parser.freeze(args)


# --help and mistakes in the flags end here, at once: the imports below take seconds. Importing this
# file parses nothing, so that tests and loader processes can do so.
if __name__ == "__main__":
    args = parse_args()

import datasets
import torch
import transformers
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torchvision.transforms.v2.functional import to_pil_image
from tqdm.auto import tqdm
from transformers import AutoModelForImageTextToText, AutoProcessor

from diffusion_training.data.folders import get_source
from diffusion_training.data.images import decode_image, explain_row, name_image
from diffusion_training.data.rows import ImageRows, load_rows, read_items
from diffusion_training.errors.faults import is_machines_fault
from diffusion_training.errors.printing import amount
from diffusion_training.errors.sentences import explained, fail, in_one_sentence
from diffusion_training.errors.stop_signals import end_if_stopped
from diffusion_training.files import hash_values, saving, write_file
from diffusion_training.launch import Launch, accelerator_options, make_launch
from diffusion_training.loading import load_batches
from diffusion_training.meeting import Meeting

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# -------------------------------------------------------------------------------------------------
# on CPU cores


class ImageBatches(torch.utils.data.Dataset):
    """Decodes rows, and makes of them what the model takes."""

    def __init__(self, images: ImageRows, processor: Any, text: str | None) -> None:
        self.images = images
        self.processor = processor
        self.text = text  # what the model is asked, the same for each image

    def __getitem__(self, rows: Sequence[int]) -> dict[str, Any]:
        """A batch: {"row": the numbers, "skipped": {row: reason}, "inputs": of the model}."""
        pictures, used, skipped = [], [], {}
        items = read_items(self.images.rows, [(0, row) for row in rows])
        for row, item in zip(rows, items, strict=True):
            try:
                source = item[self.images.column]
                pixels = decode_image(source, channels=3, allowed=self.images.allowed)
                pictures.append(to_pil_image(pixels))
                used.append(row)
            except Exception as error:
                if is_machines_fault(error):
                    raise
                skipped[row] = explain_row(error, item[self.images.column])
        inputs = {}
        if pictures:
            texts = {} if self.text is None else {"text": [self.text] * len(pictures)}
            # one list for each image: some processors take several images for a text
            grouped = [[picture] for picture in pictures] if texts else pictures
            with explained("the model's processor can't read the images with this --prompt"):
                made = self.processor(images=grouped, return_tensors="pt", padding=True, **texts)
            inputs = {**made}
        return {"row": used, "skipped": skipped, "inputs": inputs}


# -------------------------------------------------------------------------------------------------
# on the device


def load_captioner(launch: Launch, args: Namespace) -> tuple[torch.nn.Module, Any, str | None]:
    """Return (the model on the device, its processor, the text to ask for each image).

    The text is None for a model that describes an image without being asked, such as BLIP.
    """
    name = args.pretrained_model_name_or_path
    options = {"revision": args.revision, "cache_dir": args.cache_dir}
    with explained(f"{name} can't be used as a model that describes images"):
        with launch.accelerator.local_main_process_first():  # downloads are shared
            processor = AutoProcessor.from_pretrained(name, **options)
            model = AutoModelForImageTextToText.from_pretrained(name, dtype=launch.dtype, **options)
    if not hasattr(processor, "tokenizer") or not hasattr(processor, "image_processor"):
        fail(f"{name} has no processor of images and text (processor_config.json)")
    tokenizer = processor.tokenizer
    tokenizer.padding_side = "left"  # words are added at the end
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    model.to(launch.device).eval().requires_grad_(False)
    if getattr(processor, "chat_template", None) is None:
        if args.system_prompt:
            fail(f"--system_prompt is for a model with a chat template, and {name} has none")
        return model, processor, args.prompt
    question = [{"type": "image"}, {"type": "text", "text": args.prompt or INSTRUCTION}]
    messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
    if args.system_prompt:
        content = [{"type": "text", "text": args.system_prompt}]
        messages.insert(0, {"role": "system", "content": content})
    with explained(f"the chat template of {name} can't be used"):
        text = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return model, processor, text


@torch.inference_mode()
def describe(
    model: torch.nn.Module, processor: Any, inputs: dict[str, torch.Tensor], max_new_tokens: int
) -> list[str]:
    """Return the captions of a batch, each in one line. Each word is the most probable one."""
    dtype = next(model.parameters()).dtype
    inputs = {name: x.to(dtype) if x.is_floating_point() else x for name, x in inputs.items()}
    asked = inputs.get("input_ids")
    # beyond its last position, a model such as Florence-2 ends with an error of its library
    limit = vars(model.config.get_text_config(decoder=True)).get("max_position_embeddings")
    length = 0 if asked is None else asked.shape[1]
    room = (limit or math.inf) - length
    if room < 1:
        fail(
            f"an image with --prompt takes {length} tokens, and the model reads {limit}: shorten it"
        )
    if model.config.is_encoder_decoder:  # the answer has positions of its own
        room = limit or math.inf
    most = min(max_new_tokens, room)
    words = model.generate(**inputs, max_new_tokens=most, do_sample=False, num_beams=1)
    # a decoder returns the question too, and an encoder-decoder only the answer
    if asked is not None and torch.equal(words[:, : asked.shape[1]], asked):
        words = words[:, asked.shape[1] :]
    texts = processor.batch_decode(words, skip_special_tokens=True)
    return [" ".join(text.split()) for text in texts]


# -------------------------------------------------------------------------------------------------
# the output


class Made(NamedTuple):
    """What a run has made of a row: a caption, or the reason why it has none."""

    row: int
    caption: str | None
    skipped: str | None


class Journal:
    """The captions of an unfinished run, a line each. Each process writes a file of its own.

    Its first line has the settings. Captions of a run with other settings are not used, and its
    file is deleted if it has none.
    """

    def __init__(self, beside: Path, settings: str) -> None:
        self.folder, self.name = beside.parent, f".captions-{beside.name}"
        self.settings = settings

    def list_files(self) -> list[Path]:
        return sorted(self.folder.glob(f"{glob.escape(self.name)}-*"))

    def read(self) -> dict[int, Made]:
        """{row: what was made of it}, by all processes. A kill may have cut the last line off."""
        found = {}
        for path in self.list_files():
            lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
            if lines[0] != self.settings and len(lines) == 2:
                path.unlink()
                continue
            if lines[0] != self.settings:
                fail(
                    f"{path} is of an unfinished run with other flags or other images: run that "
                    f"command again, or delete {self.folder / self.name}-*"
                )
            for line in lines[1:-1]:
                made = Made(*json.loads(line))
                found[made.row] = made
        return found

    def open(self, rank: int) -> TextIO:
        """Open the file of a process, after its last whole line."""
        path = self.folder / f"{self.name}-{rank}"
        whole = path.read_bytes().rpartition(b"\n") if path.exists() else (b"", b"", b"")
        with explained(f"{path} can't be written"):
            path.write_bytes((whole[0] or self.settings.encode()) + b"\n")
            return path.open("a", encoding="utf-8")

    def delete(self) -> None:
        for path in self.list_files():
            path.unlink()


def list_image_files(images: ImageRows, args: Namespace) -> list[str]:
    """The path of each row's image. Stops with an error if one is not a file of its own."""
    source = get_source(args)
    items = images.rows[images.column] if len(images.rows) else []
    paths = [item["path"] for item in items]
    for row, path in enumerate(paths):
        if path is None or not os.path.isfile(path):
            name = name_image(row, items[row], source)
            fail(f"{name} of {source} is not a file of its own: give --output_file NAME.parquet")
    return paths


def name_caption_files(images: ImageRows, args: Namespace) -> list[Path]:
    """The caption file of each row. Stops with an error if two images would share one."""
    paths = list_image_files(images, args)
    extension = "." + args.caption_extension.lstrip(".")
    files = [Path(path).with_suffix(extension) for path in paths]
    if taken := {*files} & {*map(Path, paths)}:
        fail(
            f"--caption_extension {extension} would write over the image {min(taken)}: choose "
            "another"
        )
    file, count = collections.Counter(files).most_common(1)[0]
    if count > 1:
        fail(f"{count} images share the caption file {file}: rename all but one of them")
    return files


def write_captions(images: ImageRows, made: Iterable[Made], args: Namespace) -> None:
    """Write --output_file: the rows that have captions, in their order."""
    path = Path(args.output_file)
    rows = [each.row for each in made if each.caption is not None]
    captions = [each.caption for each in made if each.caption is not None]
    if path.suffix == ".jsonl":
        source = get_source(args)
        items = images.rows.select(rows)[images.column]
        lines = (
            json.dumps({"file_name": os.path.relpath(item["path"], source), "text": caption})
            for item, caption in zip(items, captions, strict=True)
        )
        with explained(f"{path} can't be written"):
            write_file(path, (f"{line}\n" for line in lines))
        return
    kept = images.rows.select(rows).add_column("text", captions)
    kept = kept.cast_column(images.column, datasets.Image())  # its bytes, not only its path
    with saving(path.parent, path, f".tmp-{path.name}") as unfinished:
        kept.to_parquet(unfinished / path.name)


@in_one_sentence
def main(args: Namespace) -> None:
    """Caption the images.

    Exit status: 130 after Ctrl-C, 143 after SIGTERM, 1 after an error, printed in one line.
    """
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()  # it warns of each unused setting
    with explained("the launched processes can't be set up"):
        accelerator = Accelerator(**accelerator_options(args))
    launch = make_launch(accelerator, args)
    if launch.compile:
        fail("accelerate launch turns on torch.compile, which a caption's growing length defeats")
    end = Meeting(launch)  # the first process to come there may have to wait for long

    images = load_rows(args)
    files = None if args.output_file else name_caption_files(images, args)
    if files is None and args.output_file.endswith(".jsonl"):
        list_image_files(images, args)  # it stops now, not after hours, if images have no files
    about = [args.pretrained_model_name_or_path, args.revision, args.prompt, args.system_prompt]
    # the fingerprint of a folder covers the caption files, which this run adds
    data = [*map(str, files)] if files else images.rows._fingerprint
    about += [args.max_new_tokens, args.trigger, data]
    beside = args.output_file or os.path.join(get_source(args), args.caption_extension)
    journal = Journal(Path(beside), hash_values(about))

    # The first process decides which images need a caption, because others may write some already.
    plan: list[Any] = [None]
    if launch.is_main:
        made = journal.read()
        missing = [row for row in range(len(images.rows)) if row not in made]
        kept = set() if files is None or args.overwrite else {f for f in files if f.exists()}
        plan = [[row for row in missing if files is None or files[row] not in kept]]
        if kept:
            print(f"{amount(len(kept), 'image')} with a caption file: kept (see --overwrite)")
    (to_make,) = broadcast_object_list(plan)

    model, processor, text = load_captioner(launch, args)
    own = to_make[launch.rank :: launch.num_processes]
    keys = [own[start : start + args.batch_size] for start in range(0, len(own), args.batch_size)]
    num_workers = launch.choose_workers(args.dataloader_num_workers)
    batches = load_batches(ImageBatches(images, processor, text), keys, num_workers, launch.device)
    bar = tqdm(total=len(own), desc="Images", unit="img", disable=not launch.is_main)
    with journal.open(launch.rank) as file:
        for batch in batches:
            made_now = [Made(row, None, reason) for row, reason in batch["skipped"].items()]
            captions = []
            if batch["row"]:
                captions = describe(model, processor, batch["inputs"], args.max_new_tokens)
            for row, caption in zip(batch["row"], captions, strict=True):
                if not caption:
                    made_now.append(Made(row, None, "the model returned no words"))
                    continue
                caption = f"{args.trigger}, {caption}" if args.trigger else caption
                if files is not None:
                    with explained(f"{files[row]} can't be written"):
                        write_file(files[row], caption + "\n", lasting=False)
                made_now.append(Made(row, caption, None))
            # after the caption files: a kill in between only describes this batch again
            file.writelines(json.dumps(each) + "\n" for each in made_now)
            file.flush()
            bar.update(len(made_now))
            end_if_stopped()
    batches.close()
    bar.close()

    end.wait()
    if launch.is_main:
        made = [each for _, each in sorted(journal.read().items())]
        if args.output_file:
            write_captions(images, made, args)
        skipped = [each for each in made if each.caption is None]
        for each in skipped[:20]:
            item = images.rows[each.row][images.column]
            print(f"no caption: {name_image(each.row, item, get_source(args))}: {each.skipped}")
        if len(skipped) > 20:
            print(f"and {amount(len(skipped) - 20, 'further image')} without a caption")
        journal.delete()
        if len(made) == len(skipped) > 0:
            fail("no image could be described")
        example = next((each.caption for each in made if each.caption), None)
        where = args.output_file or f"files {args.caption_extension} beside the images"
        print(f"Done: {amount(len(made) - len(skipped), 'caption')} in {where}")
        if example:
            print(f"The first one: {example}")
    accelerator.wait_for_everyone()
    accelerator.end_training()


if __name__ == "__main__":
    main(args)
