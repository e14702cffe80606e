"""What a pipeline's `encode_prompt` returns, recorded caption by caption, and put together again.

Each caption is encoded alone, since some encoders give it other embeddings beside a longer one.
Its results are columns of a cache. A `TextTensor` describes one of them, as plain JSON values.
"""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, TypedDict

import torch
from torch.nn.functional import pad

from diffusion_training.families.recorded.tape import Unrecordable
from diffusion_training.models import list_tensors

SHORT, LONG = "a red car", "three birds, and a blue house by the sea at night"  # probes
LONGEST = LONG * 20  # FLUX.3 has as many tokens for SHORT as for LONG, and more for this one
MOST_BYTES = 4096  # of a caption
MAIN = "prompt_embeds"  # the column of the embeddings


class TextTensor(TypedDict, total=False):
    """A tensor among the results of `encode_prompt`."""

    column: str  # its name in a cache
    of: str  # of the caption, or of the empty prompt (for guidance)
    dtype: str
    shape: list[int]  # for one caption; the longest, if `is_ragged`
    # The axis of captions; "list" if each has a tensor of its own, None if all captions share it
    axis: int | str | None
    is_ragged: bool  # does its first axis count the caption's tokens?
    typical: float  # a value: 1 for a mask, except if it is 0 for each token
    is_zero: bool  # is each of its numbers 0, for any caption? If absent: no
    is_mask: bool  # is it 1 for each token of a caption, as a mask of padding? If absent: no


def is_part(node: Any) -> bool:
    return isinstance(node, dict) and "column" in node


def list_numbers(calls: list[dict[str, Any]]) -> torch.Tensor:
    """All floating-point numbers among the arguments of calls."""
    numbers = [x.flatten().float() for x in list_tensors(calls) if x.is_floating_point()]
    return torch.cat(numbers)


def plain(result: Any) -> Any:
    """Tuples as lists, as JSON has them."""
    if isinstance(result, list | tuple):
        return [plain(item) for item in result]
    return result


def describe_result(
    record: Callable[[list[str]], Any], most_tokens: int | None
) -> tuple[Any, list[TextTensor]]:
    """Find out how the results of `encode_prompt` depend on captions.

    record(captions): the results for captions that are encoded together. most_tokens: of a caption.

    Returns (the structure of the results, with a `TextTensor` for each tensor and {"mask": dtype}
    where several captions get a mask; the list of the parts).
    """
    one, same, longer = (plain(record(each)) for each in ([SHORT], [SHORT, SHORT], [LONGEST]))
    parts: list[TextTensor] = []

    def describe(a: Any, b: Any, c: Any) -> Any:
        if isinstance(a, torch.Tensor):
            part = describe_tensor(a, b, c)
        elif isinstance(a, list) and len(b) == 2 * len(a) == 2 and isinstance(a[0], torch.Tensor):
            part = describe_tensor(a[0], b[0], c[0]) | {"axis": "list"}  # a tensor per caption
        elif isinstance(a, list):
            if len(a) != len(b):
                raise Unrecordable("its encode_prompt returns a list of lists")
            return [describe(*items) for items in zip(a, b, c, strict=True)]
        elif isinstance(a, int | float | str | None):
            return a
        else:
            raise Unrecordable(f"its encode_prompt returns a {type(a).__name__}")
        parts.append(part)
        return part

    structure = describe(one, same, longer)
    if not parts:
        raise Unrecordable("its encode_prompt returns no tensor")
    ragged = [part for part in parts if part["is_ragged"]]
    if len({part["shape"][0] for part in ragged}) > 1:
        raise Unrecordable("its captions have two numbers of tokens")
    if ragged:
        structure = find_masks(structure, plain(record([SHORT, LONGEST])))
        if most_tokens is None:
            words = plain(record(["a " * (MOST_BYTES // 2)]))
            most_tokens = max(len(tensor.squeeze(0)) for tensor in list_tensors(words))
        for part in ragged:
            part["shape"][0] = max(most_tokens, part["shape"][0])
    # the embeddings are the largest part that grows with the caption, or else the largest
    main = max(ragged or parts, key=lambda part: torch.Size(part["shape"]).numel())
    for number, part in enumerate(parts):
        part["column"] = MAIN if part is main else f"prompt_{number}"
        part["of"] = "caption"
    return structure, parts


def describe_tensor(one: torch.Tensor, same: torch.Tensor, longer: torch.Tensor) -> TextTensor:
    """A part of the results of one caption, of the same caption twice, and of a longer one."""
    grown = [axis for axis, size in enumerate(one.shape) if same.shape[axis] == 2 * size]
    axis = None
    if one.shape != same.shape:
        if len(grown) != 1 or one.shape[grown[0]] != 1:
            raise Unrecordable(f"its encode_prompt returns {list(same.shape)} for two captions")
        axis = grown[0]
    of_one, of_longer = (move_rows(each, axis) for each in (one, longer))
    differ = [i for i, size in enumerate(of_one.shape) if of_longer.shape[i] != size]
    if differ not in ([], [0]):
        raise Unrecordable(f"its encode_prompt returns {list(longer.shape)} for a longer caption")
    part = TextTensor(
        column="",
        of="",
        dtype=name_dtype(one),
        shape=list(of_longer.shape),
        typical=0.0 if one.is_floating_point() else float(of_longer.any()),
        axis=axis,
        is_ragged=bool(differ),
    )
    if axis is not None and one.is_floating_point() and not longer.any():
        part["is_zero"] = True
    if part["is_ragged"] and of_one.dim() == 1 and not one.is_floating_point():
        if one.all() and longer.all():
            part["is_mask"] = True
    return part


def name_dtype(tensor: torch.Tensor) -> str:
    """The type of a recorded tensor: float32 for all floating-point numbers."""
    return str(exactly(tensor).dtype).removeprefix("torch.")


def exactly(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor in float32, whatever the precision of the text encoder."""
    return tensor.float() if tensor.is_floating_point() else tensor


def move_rows(tensor: torch.Tensor, axis: int | str | None) -> torch.Tensor:
    """The tensor of the only caption, without the axis of captions."""
    return tensor.movedim(axis, 0)[0] if isinstance(axis, int) else tensor


def find_masks(node: Any, together: Any) -> Any:
    """Put {"mask": dtype} for None where captions of two lengths, encoded together, get a mask."""
    if isinstance(node, list):
        return [find_masks(*pair) for pair in zip(node, together, strict=True)]
    if node is None and isinstance(together, torch.Tensor) and together.dim() == 2:
        count = int(together[0].sum())
        if 0 < count < len(together[0]) and together[0, :count].bool().all():
            return {"mask": str(together.dtype).removeprefix("torch."), "of": "caption"}
    return node


def take_rows(structure: Any, result: Any, of: str = "caption") -> dict[str, torch.Tensor]:
    """The results for one caption as {column: tensor}, without the axis of captions."""
    rows = {}
    for part, tensor in pair_parts(structure, plain(result)):
        if part["of"] == of:
            tensor = tensor[0] if part["axis"] == "list" else move_rows(tensor, part["axis"])
            rows[part["column"]] = exactly(tensor)
    return rows


def stack_rows(
    parts: list[TextTensor], rows: list[dict[str, torch.Tensor]]
) -> dict[str, torch.Tensor]:
    """Recorded captions as a batch: {column: [N, ...]}, ragged ones padded with zeros.

    With a ragged part, adds prompt_mask, and prompt_lengths on the CPU.
    """
    batch = {}
    for part in parts:
        tensors = [row[part["column"]] for row in rows]
        if part["is_ragged"]:
            most = part["shape"][0]
            if (longest := max(map(len, tensors))) > most:
                raise Unrecordable(
                    f"it has {longest} tokens, and there is room for {most}; shorten captions, or "
                    "give a larger --max_sequence_length"
                )
            behind = [0, 0] * (tensors[0].dim() - 1)
            tensors = [pad(tensor, [*behind, 0, most - len(tensor)]) for tensor in tensors]
        stacked = torch.stack(tensors)
        batch[part["column"]] = stacked.to(torch.uint8) if stacked.dtype == torch.bool else stacked
    if any(part["is_ragged"] for part in parts):
        main = next(part for part in parts if part["column"] == MAIN)
        lengths = torch.tensor([len(row[MAIN]) for row in rows])
        device = batch[MAIN].device
        batch["prompt_mask"] = torch.arange(main["shape"][0], device=device) < lengths.to(
            device, non_blocking=True
        ).unsqueeze(1)
        batch["prompt_lengths"] = lengths
    return batch


def rebuild_results(structure: Any, sources: dict[str, dict[str, torch.Tensor]]) -> Any:
    """The results of `encode_prompt` for a batch of recorded captions.

    sources: {"caption": batch, "empty": batch}, as `stack_rows` makes them.
    """
    if isinstance(structure, list):
        return [rebuild_results(node, sources) for node in structure]
    if not isinstance(structure, dict):
        return structure
    batch = sources[structure["of"]]
    if "mask" in structure:
        lengths = batch["prompt_lengths"].tolist()
        if len(set(lengths)) == 1:
            return None
        return batch["prompt_mask"][:, : max(lengths)].to(getattr(torch, structure["mask"]))
    values = batch[structure["column"]].to(getattr(torch, structure["dtype"]))
    if structure["is_ragged"]:
        lengths = batch["prompt_lengths"].tolist()
        if structure["axis"] == "list":
            return [row[:n] for row, n in zip(values, lengths, strict=True)]
        values = values[:, : max(lengths)]
    if structure["axis"] == "list":
        return list(values)
    return values[0] if structure["axis"] is None else values.movedim(0, structure["axis"])


def describe_guided(result: Any, structure: Any, alone: Any) -> Any:
    """A result of `encode_prompt` in a run with guidance, as parts of a caption and of none.

    alone: the result for the same caption without guidance. A value equal to none of its parts is
    that of the empty prompt. Raises Unrecordable if it has no part's shape.
    """
    pairs = pair_parts(structure, plain(alone))
    left = [part for part, _ in pairs]

    def match(node: Any) -> Any:
        is_list = isinstance(node, list) and len(node) == 1
        tensor = node[0] if is_list and isinstance(node[0], torch.Tensor) else node
        if isinstance(tensor, torch.Tensor):
            of_kind = [
                pair for pair in pairs if (pair[0]["axis"] == "list") == (tensor is not node)
            ]
            for part, own in of_kind:
                if is_equal(own[0] if part["axis"] == "list" else own, tensor):
                    return part
            for part, _ in of_kind:
                if part in left and is_like(part, move_rows(tensor, part["axis"])):
                    left.remove(part)
                    return {**part, "of": "empty"}
            raise Unrecordable("guidance turns its embeddings into others")
        if isinstance(node, list):
            return [match(item) for item in node]
        return node

    return match(plain(result))


def is_like(part: TextTensor, tensor: torch.Tensor) -> bool:
    """Whether a caption's tensor has the type and shape of a part."""
    first = 1 if part["is_ragged"] else 0
    return (name_dtype(tensor), [*tensor.shape[first:]]) == (part["dtype"], part["shape"][first:])


def is_equal(one: Any, other: Any) -> bool:
    """Whether two tensors or plain values are equal."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and torch.equal(one, other)
    return type(one) is type(other) and one == other


def pair_parts(structure: Any, result: Any) -> list[tuple[TextTensor, Any]]:
    """Each part of a structure with its tensor, or list of tensors."""
    if is_part(structure):
        return [(structure, result)]
    if isinstance(structure, list):
        pairs = zip(structure, result, strict=True)
        return [found for node, item in pairs for found in pair_parts(node, item)]
    return []


class CaptionBytes:
    """Takes the place of a tokenizer: captions as the bytes of UTF-8, padded with zeros.

    The pipeline's own tokenizers read captions, inside `encode_prompt`.
    """

    model_max_length = MOST_BYTES

    def __init__(
        self,
        vocabulary: dict[str, str],
        rules: dict[str, list],
        readers: Sequence[Callable[[str], Any]] = (),
    ) -> None:
        """Hashes of the pipeline's tokenizers. rules: those of `hash_rules`, and templates.

        readers: see `probe_readers`.
        """
        self.vocabulary = vocabulary
        self.rules = rules
        self.readers = readers

    def get_vocab(self) -> dict[str, str]:
        return self.vocabulary

    def __call__(
        self,
        texts: str | Sequence[str],
        padding: str | None = None,
        truncation: bool = True,
        return_tensors: str | None = None,
    ) -> SimpleNamespace:
        if isinstance(texts, str):
            return SimpleNamespace(input_ids=list(encode_text(texts)[:MOST_BYTES]))
        rows = [list(encode_text(text)[:MOST_BYTES]) for text in texts]
        if padding is None:
            encodings = [SimpleNamespace(overflowing=self.is_cut(text)) for text in texts]
            return SimpleNamespace(input_ids=rows, encodings=encodings)
        ids = torch.tensor([row + [0] * (MOST_BYTES - len(row)) for row in rows])
        return SimpleNamespace(input_ids=ids, attention_mask=ids != 0)

    def is_cut(self, text: str) -> bool:
        """Whether no text encoder reads the end of a caption."""
        cut = [bool(reader(text).overflowing) for reader in self.readers] or [False]
        return all(cut) or len(encode_text(text)) > MOST_BYTES

    def count_tokens(self, text: str) -> int:
        """How many tokens the text encoders read, with those of a template; bytes if unknown."""
        counts = [sum(reader(text).attention_mask) for reader in self.readers]
        return max(counts, default=len(encode_text(text)))


def encode_text(text: str) -> bytes:
    return text.replace("\0", " ").encode(errors="replace")


def decode_texts(ids: torch.Tensor) -> list[str]:
    """The captions of token ids [N, MOST_BYTES]; a character that was cut off is left out."""
    rows = ids.cpu().to(torch.uint8).numpy()
    return [row.tobytes().rstrip(b"\0").decode(errors="ignore") for row in rows]
