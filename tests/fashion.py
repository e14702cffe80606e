"""Fashion-MNIST from Debian's archive: 70,000 pictures of clothes, 28 px, in ten classes (MIT)."""

import gzip
import hashlib
import io
import tarfile
import urllib.request

import datasets
import numpy as np
import pytest
from PIL import Image

URL = "https://deb.debian.org/debian/pool/main/d/dataset-fashion-mnist/"
URL += "dataset-fashion-mnist_0.0~git20200523.55506a9-1_all.deb"
SHA256 = "39e172fe32dd318ebb3e512220c3beea2fa47d7e20bab348fb4e0922d6beefc0"
NAMES = ["T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker"]
NAMES += ["Bag", "Ankle boot"]


def fetch_fashion():
    """{split: (images uint8 [N, 28, 28], labels [N])}; skips the test without a network."""
    try:
        with urllib.request.urlopen(URL, timeout=60) as answer:
            package = answer.read()
    except OSError as error:
        pytest.skip(f"no Fashion-MNIST: {URL} can't be fetched ({error})")
    assert hashlib.sha256(package).hexdigest() == SHA256
    content = read_members(package)["data.tar.xz"]
    with tarfile.open(fileobj=io.BytesIO(content)) as tar:

        def read(name, begin):
            file = tar.extractfile(f"./usr/share/datasets/fashion-mnist/{name}-ubyte.gz")
            return np.frombuffer(gzip.decompress(file.read()), np.uint8, offset=begin)

        return {
            split: (
                read(f"{split}-images-idx3", 16).reshape(-1, 28, 28),
                read(f"{split}-labels-idx1", 8),
            )
            for split in ("train", "t10k")
        }


def read_members(package):
    """{name: content} of a Debian package, which is an ar archive."""
    members, place = {}, 8
    while place < len(package):
        name = package[place : place + 16].decode().strip(" /")
        size = int(package[place + 48 : place + 58])
        members[name] = package[place + 60 : place + 60 + size]
        place += 60 + size + size % 2
    return members


def write_images(images, labels, path):
    """Write a parquet file of images with their classes."""
    features = {"image": datasets.Image(), "label": datasets.ClassLabel(names=NAMES)}
    pictures = [Image.fromarray(image) for image in images]
    rows = {"image": pictures, "label": labels.tolist()}
    path.parent.mkdir(parents=True)
    datasets.Dataset.from_dict(rows, datasets.Features(features)).to_parquet(path)
