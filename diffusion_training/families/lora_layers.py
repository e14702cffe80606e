"""The layers of each denoiser that may get a LoRA. Imports only the standard library."""

from typing import NamedTuple

LAYER_SETS = ("attention", "attention_mlp", "all")


class Layers(NamedTuple):
    """The layers of a denoiser that may get a LoRA, as ends of their names.

    Those of attention and MLP are in its repeated blocks; a layer that holds both is in both.
    """

    attention: tuple[str, ...]
    mlp: tuple[str, ...]
    further: tuple[str, ...] = ()  # added by --lora_layers all, also outside of the blocks
    default: str = "attention_mlp"  # --lora_layers

    def choose(self, which: str) -> tuple[str, ...]:
        """The ends of attention, or of attention and MLP, for one of `LAYER_SETS`."""
        return self.attention if which == "attention" else self.attention + self.mlp


ONE = ("to_q", "to_k", "to_v", "to_out.0")
TWO = (*ONE, "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
NET = ("net.0.proj", "net.2")
# the names of diffusers' own classes, for denoisers that are not listed
COMMON = Layers(TWO, NET)
LAYERS = {  # {class of the denoiser: its layers}
    "UNet2DConditionModel": Layers(
        ONE,
        ("ff.net.0.proj", "ff.net.2"),
        ("proj_in", "proj_out", "conv1", "conv2", "conv_shortcut"),
    ),
    "PRXTransformer2DModel": Layers(
        ("img_qkv_proj", "txt_kv_proj", "to_out.0"), ("gate_proj", "up_proj", "down_proj")
    ),
    "AuraFlowTransformer2DModel": Layers(TWO, ("linear_1", "linear_2", "out_projection")),
    "ChromaTransformer2DModel": Layers(TWO, (*NET, "proj_mlp", "proj_out")),
    "CosmosTransformer3DModel": Layers(ONE, NET),  # Anima
    "ErnieImageTransformer2DModel": Layers(ONE, ("gate_proj", "up_proj", "linear_fc2")),
    "Flux2Transformer2DModel": Layers(
        (*TWO, "to_qkv_mlp_proj", "attn.to_out"),
        ("linear_in", "linear_out", "to_qkv_mlp_proj", "attn.to_out"),
    ),
    "Flux3Transformer2DModel": Layers(ONE, ("linear_in", "linear_out")),
    "FluxTransformer2DModel": Layers(TWO, (*NET, "proj_mlp", "proj_out")),
    "Krea2Transformer2DModel": Layers(
        ONE,
        ("to_gate", "ff.gate", "ff.up", "ff.down"),
        (
            "img_in",
            "final_layer.linear",
            "txt_in.linear_1",
            "txt_in.linear_2",
            "time_embed.linear_1",
            "time_embed.linear_2",
            "time_mod_proj",
        ),
        default="all",
    ),
    "Lumina2Transformer2DModel": Layers(
        ONE, ("feed_forward.linear_1", "feed_forward.linear_2", "feed_forward.linear_3")
    ),
    "QwenImage21Transformer2DModel": Layers(
        ONE, ("img_mlp.gate_layer", "img_mlp.proj", "img_mlp.out")
    ),
    "QwenImageTransformer2DModel": Layers(TWO, NET),
    "SD3Transformer2DModel": Layers(TWO, NET),
    "WanTransformer3DModel": Layers(ONE, ("ffn.net.0.proj", "ffn.net.2")),
    "ZImageTransformer2DModel": Layers(
        ONE, ("feed_forward.w1", "feed_forward.w2", "feed_forward.w3")
    ),
}
