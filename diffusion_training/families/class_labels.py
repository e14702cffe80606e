"""Class labels in place of captions: a tokenizer of class names, and their one-hot embeddings.

Both are ordinary models of transformers, so that a pipeline holds them and takes class names as
prompts. The transformer's projection of its embeddings then is the table of labels of DiT
(arXiv:2212.09748), and the empty prompt, whose embedding is all padding, is no class.
"""

from collections import Counter
from collections.abc import Callable, Sequence

import tokenizers
import torch
import transformers

from diffusion_training.errors.printing import printable
from diffusion_training.errors.sentences import fail


def list_tokens(names: Sequence[str], clean: Callable[[str], str]) -> list[list[str]]:
    """The tokens of each class: its number, and its name as the pipeline cleans it.

    A name that is then empty, or another's, is left out. If names are numbers themselves, there are
    no others.
    """
    cleaned = [clean(name) for name in names]
    counts = Counter(cleaned)
    has_numbers = not any(name.isdigit() for name in cleaned)
    tokens = []
    for number, name in enumerate(cleaned):
        own = [str(number)] if has_numbers else []
        own += [name] if name and counts[name] == 1 else []
        if not own:
            fail(f"the class {printable(names[number])!r} can't be told from others: rename it")
        tokens.append(own)
    return tokens


def make_tokenizer(tokens: list[list[str]]) -> transformers.PreTrainedTokenizerFast:
    """A tokenizer that takes a whole caption as one token. It raises for others than `tokens`."""
    words = ["<pad>", *(word for own in tokens for word in own)]
    vocabulary = {word: number for number, word in enumerate(words)}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=model,
        pad_token="<pad>",
        model_max_length=2,  # a class, and padding
    )


def make_text_encoder(tokens: list[list[str]]) -> torch.nn.Module:
    """A T5 without layers, whose last norm leaves a one-hot embedding for each class.

    In float32, so that its numbers are 0 and 1 when they are rounded to float16.
    """
    count = len(tokens)
    classes = [number for number, own in enumerate(tokens) for _ in own]
    config = transformers.T5Config(
        vocab_size=len(classes) + 1,
        d_model=count,
        num_layers=0,
        num_heads=1,
        d_kv=1,
        d_ff=1,
        dropout_rate=0.0,
    )
    encoder = transformers.T5EncoderModel(config)
    with torch.no_grad():
        # large, so that the epsilon of the norm does not count
        rows = 1024 * torch.nn.functional.one_hot(torch.tensor(classes), count)
        encoder.shared.weight.copy_(torch.cat([torch.zeros(1, count), rows]))
        encoder.encoder.final_layer_norm.weight.fill_(count**-0.5)
    return encoder
