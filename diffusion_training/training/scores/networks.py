"""Networks that judge images: features of images and, with CLIP, of texts."""

import importlib.util
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from diffusion_training.errors.sentences import fail
from diffusion_training.models import hash_weights, is_finite, raise_for_keys
from diffusion_training.repositories import fetch_model

# a classifier of ImageNet, converted from TensorFlow, with which FID is defined
INCEPTION = "inception"


@dataclass(frozen=True)
class Network:
    """A frozen network. Its features are float32 [N, width]."""

    name: str
    module: torch.nn.Module
    # images uint8 [N, 3, H, W], on the network's device -> features
    embed_images: Callable[[torch.Tensor], torch.Tensor]
    embed_texts: Callable[[Sequence[str]], torch.Tensor] | None = None  # only CLIP and the like

    def describe(self) -> str:
        """Its name, and a hash of its weights, so that stored features are not used for another."""
        return f"{self.name} {hash_weights(self.module)}"


def load_network(name: str, cache_dir: str | None = None) -> Network:
    """Load a network on the CPU: "inception", a TorchScript file, or what `AutoModel` opens.

    Raises an error if it can't be used for images.
    """
    if name == INCEPTION:
        network = load_inception()
    elif Path(name).is_file():
        network = load_torchscript(name)
    else:
        network = load_pretrained(name, cache_dir)
    features = network.embed_images(torch.zeros(2, 3, 64, 64, dtype=torch.uint8))
    if features.dim() != 2 or len(features) != 2 or not is_finite(features):
        shape = [*features.shape]
        raise ValueError(
            f"features of 2 images are of shape {shape}, not of [2, width] with finite numbers"
        )
    return network


def load_pretrained(name: str, cache_dir: str | None) -> Network:
    from transformers import AutoModel, AutoProcessor

    folder = fetch_model(name, cache_dir)
    model, info = AutoModel.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    # DINO is published without the pooler, which is not used here
    missing = [key for key in info["missing_keys"] if not key.startswith("pooler.")]
    raise_for_keys("missing keys", missing)
    raise_for_keys("mismatched keys", info["mismatched_keys"])
    model = model.eval().requires_grad_(False)
    processor = AutoProcessor.from_pretrained(folder)
    has_class_token = any(
        key.endswith(("cls_token", "class_embedding")) for key, _ in model.named_parameters()
    )

    def process(images: torch.Tensor) -> dict[str, torch.Tensor]:
        pixels = processor(images=list(images.cpu()), return_tensors="pt").pixel_values
        return {"pixel_values": pixels.to(model.device)}

    def embed_images(images: torch.Tensor) -> torch.Tensor:
        if hasattr(model, "get_image_features"):
            return model.get_image_features(**process(images)).pooler_output
        states = model(**process(images)).last_hidden_state
        if states.dim() == 4:  # of a convolutional network, [N, width, h, w]
            return states.mean(dim=(2, 3))
        return states[:, 0] if has_class_token else states.mean(dim=1)

    def embed_texts(texts: Sequence[str]) -> torch.Tensor:
        tokens = processor.tokenizer(
            list(texts),
            padding="max_length",  # as SigLIP was trained
            truncation=True,
            max_length=model.config.text_config.max_position_embeddings,
            return_tensors="pt",
        )
        return model.get_text_features(**tokens.to(model.device)).pooler_output

    has_texts = hasattr(model, "get_text_features")
    if has_texts:
        embed_texts(["a"])
    return Network(name, model, embed_images, embed_texts if has_texts else None)


def load_inception() -> Network:
    for package in ("torchmetrics", "torch_fidelity"):
        if importlib.util.find_spec(package) is None:
            fail(f"{INCEPTION} needs {package}: `pip install torchmetrics torch-fidelity`")
    from torchmetrics.image.fid import NoTrainInceptionV3

    model = NoTrainInceptionV3("inception-v3-compat", ["2048"])
    return Network(INCEPTION, model, model)


def load_torchscript(name: str) -> Network:
    # torch warns that TorchScript is deprecated, but networks are still published in it
    with warnings.catch_warnings(action="ignore"):
        model = torch.jit.load(name, map_location="cpu").eval()
    # Without this option NVIDIA's Inception files for StyleGAN return class probabilities.
    takes_option = "return_features" in str(model.forward.schema)
    options: dict[str, Any] = {"return_features": True} if takes_option else {}
    return Network(name, model, lambda images: model(images, **options).float())
