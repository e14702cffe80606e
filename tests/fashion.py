"""Fashion-MNIST from Debian's archive: 70,000 pictures of clothes, 28 px, in ten classes (MIT)."""

import gzip

import datasets
import numpy as np
from packages import open_package
from PIL import Image

NAMES = ["T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker"]
NAMES += ["Bag", "Ankle boot"]


def fetch_fashion():
    """{split: (images uint8 [N, 28, 28], labels [N])}; skips the test without the package."""
    folder = open_package("dataset-fashion-mnist") / "usr/share/datasets/fashion-mnist"

    def read(name, begin):
        content = gzip.decompress((folder / f"{name}-ubyte.gz").read_bytes())
        return np.frombuffer(content, np.uint8, offset=begin)

    return {
        split: (
            read(f"{split}-images-idx3", 16).reshape(-1, 28, 28),
            read(f"{split}-labels-idx1", 8),
        )
        for split in ("train", "t10k")
    }


def write_images(images, labels, path):
    """Write a parquet file of images with their classes."""
    features = {"image": datasets.Image(), "label": datasets.ClassLabel(names=NAMES)}
    pictures = [Image.fromarray(image) for image in images]
    rows = {"image": pictures, "label": labels.tolist()}
    path.parent.mkdir(parents=True)
    datasets.Dataset.from_dict(rows, datasets.Features(features)).to_parquet(path)
