"""benchmarks/image_stages.py draws the picture of data.md again, with the scripts' own crop."""

import sys

import numpy as np
from conftest import ROOT
from PIL import Image

sys.path.append(str(ROOT / "benchmarks"))
import image_stages


def test_the_picture_of_data_md_is_drawn_again(tmp_path, capsys):
    image_stages.main([f"--output_file={tmp_path / 'stages.png'}"])
    drawn, kept = (
        np.asarray(Image.open(path).convert("RGB")).astype(int)
        for path in (tmp_path / "stages.png", ROOT / "docs/image-stages.png")
    )
    assert drawn.shape == kept.shape and np.abs(drawn - kept).mean() < 1
    assert "6.0 times fewer numbers in the latents" in capsys.readouterr().out
