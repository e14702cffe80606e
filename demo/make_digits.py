"""Write demo/digits: the 1,797 handwritten digits of the UCI data set, as one parquet file.

    pip install scikit-learn && python demo/make_digits.py

Its columns are `image` and `text`. The images are part of the scikit-learn package, so nothing is
downloaded. Credit and licence: demo/digits/README.md.
"""

from pathlib import Path

import datasets
import numpy as np
from PIL import Image
from sklearn.datasets import load_digits

NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")

digits = load_digits()
# 8 x 8 pixels of 17 grey levels, 0 to 16
images = [Image.fromarray(np.rint(image * (255 / 16)).astype(np.uint8)) for image in digits.images]
texts = [f"a handwritten digit {NAMES[target]}" for target in digits.target]
features = datasets.Features({"image": datasets.Image(), "text": datasets.Value("string")})
dataset = datasets.Dataset.from_dict({"image": images, "text": texts}, features=features)
dataset.to_parquet(Path(__file__).parent / "digits" / "train.parquet")
