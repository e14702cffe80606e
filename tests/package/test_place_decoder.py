"""Decoding where a GPU lacks the memory."""

import gc
import weakref

import pytest
import tiny_pipelines
import torch

from diffusion_training.data.encoders import place_decoder


class FullGpu:
    """The VAE of a test, on a device that has no room for decoding."""

    def to(self, device):
        self.where = device
        return self

    def decode(self, latents, **options):
        if self.where != "cpu":
            raise torch.OutOfMemoryError("full")
        return super().decode(latents, **options)


@pytest.mark.parametrize("device, said", [("gpu", True), ("cpu", False)])
def test_a_vae_decodes_on_the_cpu_if_a_gpu_lacks_the_memory(device, said, capsys):
    plain = tiny_pipelines.make_shifting_vae().eval()
    plain.enable_slicing()
    vae = type("Vae", (FullGpu, type(plain)), {}).from_config(plain.config).eval()
    vae.load_state_dict(plain.state_dict())
    latents = torch.randn(2, 4, 4, 4)
    place_decoder(vae, device)
    assert vae.use_slicing
    with torch.no_grad():
        expected = plain.decode(latents).sample
        for _ in range(2):
            # Stable Diffusion's pipeline passes a generator, which the VAE does not use
            found = vae.decode(latents, return_dict=False, generator=[torch.Generator()])[0]
            assert torch.equal(found, expected)
            assert vae.where == device
    assert capsys.readouterr().out.count("decoded on the CPU") == said
    known = weakref.ref(vae)
    gc.disable()  # pytest's own collection must not hide a cycle, which would keep it on the GPU
    try:
        del vae
        assert known() is None
    finally:
        gc.enable()


def test_a_vae_that_takes_a_time_decodes_each_row_with_its_own():
    """LTX's, whose own slicing pairs the latents of two rows."""
    plain = tiny_pipelines.make_ltx_vae(timestep_conditioning=True).eval()
    latents, times = torch.randn(2, 4, 1, 2, 2), torch.tensor([0.0, 0.5])
    with torch.no_grad():
        expected = plain.decode(latents, times)[0]
        place_decoder(plain, torch.device("cpu"))
        (found,) = plain.decode(latents, times, return_dict=False)
    torch.testing.assert_close(found, expected)
    assert (found[0] - found[1]).abs().max() > 1e-3
