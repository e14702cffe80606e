"""Write demo/captioner: a tiny model that describes the drawings of demo/animals and demo/ducks.

    python demo/make_captioner.py

The model is a GIT (arXiv:2205.14100) with 0.76 million weights, stored in 16 bits: 1.5 MB. The
script trains it on four fifths of the 270 drawings, some minutes on a CPU, and prints how many
drawings of the other fifth it describes with exactly their caption. It knows nothing else.
"""

from pathlib import Path

import datasets
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import (
    CLIPImageProcessor,
    GitConfig,
    GitForCausalLM,
    GitProcessor,
    PreTrainedTokenizerFast,
)

HERE = Path(__file__).parent
STEPS, BATCH_SIZE = 1200, 64


def make_processor(captions):
    """Make a processor of images with 64 pixels, and of the words of the captions."""
    words = sorted({word for caption in captions for word in caption.split()})
    vocab = {word: i for i, word in enumerate(["[PAD]", "[CLS]", "[SEP]", "[UNK]", *words])}
    tokenizer = Tokenizer(WordLevel(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    return GitProcessor(
        CLIPImageProcessor(
            size={"shortest_edge": 64},
            crop_size={"height": 64, "width": 64},
            image_mean=[0.5] * 3,
            image_std=[0.5] * 3,
        ),
        PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]",
            unk_token="[UNK]", bos_token="[CLS]", eos_token="[SEP]",
        ),
    )  # fmt: skip


def make_model(processor, hidden_size=96, layers=3):
    sizes = {
        "hidden_size": hidden_size,
        "intermediate_size": 4 * hidden_size,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
    }
    config = GitConfig(
        vision_config={**sizes, "image_size": 64, "patch_size": 16},
        vocab_size=len(processor.tokenizer),
        max_position_embeddings=16,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        **sizes,
    )
    model = GitForCausalLM(config)
    model.generation_config.bos_token_id = 1
    model.generation_config.eos_token_id = 2
    model.generation_config.pad_token_id = 0
    return model


def shift(images):
    """Move each image by up to three pixels, and change its brightness a little."""
    padded = torch.nn.functional.pad(images, (3, 3, 3, 3), mode="replicate")
    moved = []
    for image in padded:
        y, x = torch.randint(7, (2,)).tolist()
        moved.append(image[:, y : y + 64, x : x + 64] * (0.95 + 0.1 * torch.rand(1)))
    return torch.stack(moved)


def train(model, images, tokens):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-3, total_steps=STEPS)
    model.train()
    for step in range(STEPS):
        rows = torch.randint(len(images), (BATCH_SIZE,))
        ids = tokens["input_ids"][rows]
        mask = tokens["attention_mask"][rows]
        labels = ids.masked_fill(mask == 0, -100)
        loss = model(
            pixel_values=shift(images[rows]), input_ids=ids, attention_mask=mask, labels=labels
        ).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 100 == 0:
            print(f"step {step}, loss {loss.item():.3f}", flush=True)
    return model.eval()


def main():
    torch.manual_seed(0)
    folders = [str(HERE / name) for name in ("animals", "ducks")]
    parts = [datasets.load_dataset(folder, split="train") for folder in folders]
    rows = datasets.concatenate_datasets(parts)
    captions = rows["text"][:]
    processor = make_processor(captions)
    images = processor.image_processor(rows["image"][:], return_tensors="pt")["pixel_values"]
    tokens = processor.tokenizer(captions, padding=True, return_tensors="pt")
    order = torch.randperm(len(captions), generator=torch.Generator().manual_seed(0))
    held_out, used = order[: len(captions) // 5], order[len(captions) // 5 :]
    model = make_model(processor)
    print(f"{sum(x.numel() for x in model.parameters()):,} weights")
    train(model, images[used], {name: x[used] for name, x in tokens.items()})
    model.half().save_pretrained(HERE / "captioner")
    processor.save_pretrained(HERE / "captioner")
    model.float()
    with torch.inference_mode():
        ids = model.generate(pixel_values=images[held_out], max_new_tokens=12)
    texts = processor.batch_decode(ids, skip_special_tokens=True)
    right = sum(text == captions[row] for text, row in zip(texts, held_out.tolist(), strict=True))
    print(f"{right} of {len(held_out)} drawings that were held out have exactly their caption")


if __name__ == "__main__":
    main()
