"""Z-Image: a transformer with a Qwen3 text encoder (arXiv:2511.22699)."""

from typing import Any

import torch

from diffusion_training.families.base import (
    Base,
    Encoders,
    Family,
    Prompts,
    Tokens,
    attend_to,
    format_chat,
    move_to_front,
    set_shift,
)


class ZImage(Family):
    """Tongyi's Z-Image."""

    name = "z-image"
    title = "Z-Image"
    pipeline = "ZImagePipeline"
    model = "ZImageTransformer2DModel"
    embeds_width = "cap_feat_dim"
    max_tokens = 512
    resolution = 1024
    needs_lengths = True
    other_layers = ("feed_forward.w1", "feed_forward.w2", "feed_forward.w3")

    def prepare(self, tokenizer: Any, caption: str) -> str:
        return format_chat(tokenizer, caption, enable_thinking=True)

    def encode(self, encoders: Encoders, tokens: Tokens) -> Prompts:
        (text_encoder,) = encoders.text_encoders
        mask = tokens["prompt_mask"]
        output = text_encoder(
            input_ids=tokens["input_ids"],
            attention_mask=attend_to(mask),
            output_hidden_states=True,
            use_cache=False,
        )
        return move_to_front(output.hidden_states[-2].float(), mask)

    def predict(
        self, model: torch.nn.Module, noisy: torch.Tensor, times: torch.Tensor, prompts: Prompts
    ) -> torch.Tensor:
        """The model takes lists; its time runs from noise to image, and so does its velocity."""
        embeds = prompts["prompt_embeds"]
        lengths = prompts["prompt_lengths"].tolist()
        captions = [rows[:length] for rows, length in zip(embeds, lengths, strict=True)]
        output = model(list(noisy.unsqueeze(2)), 1 - times, captions).sample
        return -torch.stack(output).squeeze(2).float()

    def patch_size(self, model: torch.nn.Module) -> int:
        return 2

    def call_args(self, prompts: Prompts, empty: Prompts, guidance_scale: float) -> dict[str, Any]:
        """The pipeline takes lists."""
        lengths = prompts["prompt_mask"].sum(dim=1).tolist()
        pairs = zip(prompts["prompt_embeds"], lengths, strict=True)
        asked: dict[str, Any] = {"prompt_embeds": [rows[:length] for rows, length in pairs]}
        if guidance_scale > 1:
            negative = empty["prompt_embeds"][0][: int(empty["prompt_mask"].sum())]
            asked["negative_prompt_embeds"] = [negative] * len(lengths)
        return asked | self.guidance_args(guidance_scale)

    def guidance_args(self, guidance_scale: float) -> dict[str, float]:
        """The pipeline's scale is 0 without guidance."""
        return {"guidance_scale": guidance_scale - 1}

    def build(self, parts: dict[str, Any], base: Base, resolution: int) -> Any:
        set_shift(parts["vae"])
        return super().build(parts, base, resolution)
