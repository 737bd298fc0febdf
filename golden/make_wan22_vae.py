#!/usr/bin/env python3
"""Makes golden/wan22-vae-tiny/ and golden/wan22_vae.safetensors: a small autoencoder of Wan2.2's kind (levels with paths around them, patches of 2x2
pixels) with random weights, and what diffusers' AutoencoderKLWan makes of it. Run in the root of the repository: `python golden/make_wan22_vae.py`.
"""

from pathlib import Path

import torch
from diffusers import AutoencoderKLWan
from safetensors.torch import save_file

GOLDEN = Path(__file__).parent


def main():
    torch.manual_seed(0)
    vae = AutoencoderKLWan(
        base_dim=4,
        decoder_base_dim=6,
        z_dim=6,
        dim_mult=[1, 2, 4, 4],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
        latents_mean=[0.1 * i - 0.2 for i in range(6)],
        latents_std=[0.5 + 0.1 * i for i in range(6)],
        is_residual=True,
        in_channels=12,
        out_channels=12,
        patch_size=2,
        scale_factor_temporal=4,
        scale_factor_spatial=16,
    ).eval()
    with torch.no_grad():
        for name, weight in vae.named_parameters():
            if name.endswith("gamma"):
                weight.add_(0.1 * torch.randn_like(weight))
            elif weight.dim() > 1:
                weight.mul_(1.5)  # so that every path counts
    vae.save_pretrained(GOLDEN / "wan22-vae-tiny")

    tensors = {}
    for case, shape in {"f9": (1, 3, 9, 32, 48), "f1": (1, 3, 1, 32, 32), "f5b2": (2, 3, 5, 32, 32)}.items():
        video = torch.rand(shape) * 2 - 1
        tensors[f"{case}.video"] = video
        with torch.no_grad():
            posterior = vae.encode(video).latent_dist
            tensors[f"{case}.mean"] = posterior.mean
            tensors[f"{case}.logvar"] = posterior.logvar
            latents = torch.randn_like(posterior.mean)
            tensors[f"{case}.latents"] = latents
            tensors[f"{case}.decoded"] = vae.decode(latents).sample
    double = vae.double()
    with torch.no_grad():
        tensors["f9.decoded_float64"] = double.decode(tensors["f9.latents"].double()).sample.float()
        tensors["f9.mean_float64"] = double.encode(tensors["f9.video"].double()).latent_dist.mean.float()
    save_file({name: value.contiguous() for name, value in tensors.items()}, GOLDEN / "wan22_vae.safetensors")


if __name__ == "__main__":
    main()
