"""Write demo/models: a tiny VAE, CLIP text encoder, tokenizer and scheduler.

    python demo/make_models.py

The folder has the layout of a Stable Diffusion pipeline, and less than 2 MB. The script trains the
VAE on demo/digits (some minutes on a CPU), and prints its error on unseen digits. The text encoder
is random, which is enough to tell ten captions apart.
"""

import json
from pathlib import Path

import datasets
import diffusers
import numpy as np
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL, DDIMScheduler
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

HERE = Path(__file__).parent
WORDS = "a handwritten digit zero one two three four five six seven eight nine".split()


def make_tokenizer(words=WORDS, length=8):
    """Make a CLIP tokenizer whose merges turn each of these words into one token.

    It splits other words into letters. Prompts are padded to `length` tokens.
    """
    # As in GPT-2, printable bytes map to themselves, and the others to characters from 256 on.
    printed = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = [chr(byte) for byte in printed] + [chr(256 + i) for i in range(256 - len(printed))]
    merges = []
    for word in words:
        parts = [*word[:-1], word[-1] + "</w>"]
        for first, second in merges:  # those of earlier words come first in this word too
            for i in range(len(parts) - 1, 0, -1):
                if parts[i - 1 : i + 1] == [first, second]:
                    parts[i - 1 : i + 1] = [first + second]
        while len(parts) > 1:
            merges.append((parts[0], parts[1]))
            parts = [parts[0] + parts[1], *parts[2:]]
    tokens = (
        letters
        + [letter + "</w>" for letter in letters]
        + [first + second for first, second in merges]
    )
    vocab = {token: i for i, token in enumerate([*tokens, "<|startoftext|>", "<|endoftext|>"])}
    # "a handwritten digit seven" has six tokens with start and end. A length of 8 instead of CLIP's
    # 77 keeps the demo fast.
    return CLIPTokenizer(vocab=vocab, merges=merges, model_max_length=length)


def make_text_encoder(tokenizer, hidden_size=32):
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=tokenizer.model_max_length,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return CLIPTextModel(config)


def train_vae(images, steps=4000, batch_size=64):
    """Train an AutoencoderKL on images [N, 3, 8, 8] in [-1, 1].

    Its latents are [4, 4, 4], scaled to unit variance.
    """
    vae = AutoencoderKL(
        block_out_channels=(16, 32),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
        norm_num_groups=8,
        sample_size=8,
    )
    optimizer = torch.optim.AdamW(vae.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
    for _ in range(steps):
        batch = images[torch.randint(len(images), (batch_size,))]
        posterior = vae.encode(batch).latent_dist
        loss = (
            F.mse_loss(vae.decode(posterior.sample()).sample, batch)
            + 1e-4 * posterior.kl().mean() / 64
        )
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    with torch.no_grad():
        latents = vae.eval().encode(images).latent_dist.sample()
    vae.register_to_config(scaling_factor=round(1 / latents.std().item(), 4))
    return vae


def main():
    torch.manual_seed(0)
    rows = datasets.load_dataset(str(HERE / "digits"), split="train").shuffle(seed=0)
    images = torch.from_numpy(np.stack([np.array(image.convert("RGB")) for image in rows["image"]]))
    images = images.permute(0, 3, 1, 2) / 127.5 - 1
    vae = train_vae(images[:1400])
    with torch.no_grad():
        restored = vae.decode(vae.encode(images[1400:]).latent_dist.sample()).sample.clamp(-1, 1)
    error = (restored - images[1400:]).square().mean() / 4  # of pixel values in [0, 1]
    print(
        f"VAE: {-10 * error.log10():.1f} dB PSNR on 397 unseen digits, scaling factor "
        f"{vae.config.scaling_factor}"
    )

    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(HERE / "models/tokenizer")
    make_text_encoder(tokenizer).save_pretrained(HERE / "models/text_encoder")
    vae.save_pretrained(HERE / "models/vae")
    scheduler = DDIMScheduler(
        beta_schedule="squaredcos_cap_v2",
        prediction_type="v_prediction",
        clip_sample=False,
        set_alpha_to_one=False,
        steps_offset=1,
    )
    scheduler.save_pretrained(HERE / "models/scheduler")
    # With it, StableDiffusionPipeline.from_pretrained and PRXPipeline.from_pretrained open the
    # folder, if they are given a denoiser and a scheduler that fits it.
    index = {
        "_class_name": "StableDiffusionPipeline",
        "_diffusers_version": diffusers.__version__,
        "requires_safety_checker": False,
        "text_encoder": ["transformers", "CLIPTextModel"],
        "tokenizer": ["transformers", "CLIPTokenizer"],
        "vae": ["diffusers", "AutoencoderKL"],
    }
    (HERE / "models/model_index.json").write_text(json.dumps(index, indent=2) + "\n")


if __name__ == "__main__":
    main()
