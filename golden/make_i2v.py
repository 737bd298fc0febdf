#!/usr/bin/env python3
"""Makes golden/i2v-tiny/, golden/i2v-tiny-no-image/ and golden/i2v.safetensors: the transformers of image-to-video.

That of Wan2.1 reads 36 channels (latents, mask, condition) and attends to the embedding of an image; that of Wan2.2 A14B
reads 36 channels and has no image branch. Sizes are tiny, weights are seeded random numbers off their defaults.
Run in the root of the repository: `python golden/make_i2v.py`.
"""

from pathlib import Path

import torch
from diffusers import WanTransformer3DModel
from safetensors.torch import save_file

GOLDEN = Path(__file__).parent
TEXT_ROWS, TEXT_LENGTH, IMAGE_ROWS = 5, 512, 9
SIZES = {
    "num_attention_heads": 2,
    "attention_head_dim": 16,
    "in_channels": 36,
    "out_channels": 16,
    "text_dim": 16,
    "freq_dim": 32,
    "ffn_dim": 48,
    "num_layers": 2,
}
GRADIENTS = [
    "blocks.0.attn2.add_k_proj.weight",
    "blocks.1.attn2.add_v_proj.bias",
    "blocks.1.attn2.norm_added_k.weight",
    "blocks.0.attn2.to_q.weight",
    "condition_embedder.image_embedder.ff.net.0.proj.weight",
    "condition_embedder.image_embedder.norm1.weight",
]


def main():
    generator = torch.Generator().manual_seed(7)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    text = torch.zeros(2, TEXT_LENGTH, SIZES["text_dim"])
    text[:, :TEXT_ROWS] = normal(2, TEXT_ROWS, SIZES["text_dim"])
    latents, image, weight = normal(2, 36, 2, 4, 6), normal(2, IMAGE_ROWS, 24), normal(2, 16, 2, 4, 6)
    timesteps = torch.tensor([999.0, 250.0])
    tensors = {"hidden_states": latents, "text": text[:, :TEXT_ROWS].contiguous(), "image": image, "timestep": timesteps, "weight": weight}

    model = build("i2v-tiny", normal, image_dim=24, added_kv_proj_dim=32)
    sample = model(latents, timesteps, text, encoder_hidden_states_image=image, return_dict=False)[0]
    (sample * weight).sum().backward()
    tensors["sample"] = sample.detach()
    named = dict(model.named_parameters())
    tensors |= {f"grad.{name}": named[name].grad for name in GRADIENTS}

    model = build("i2v-tiny-no-image", normal)
    with torch.no_grad():
        tensors["no_image.sample"] = model(latents, timesteps, text, return_dict=False)[0]
    save_file({name: value.contiguous() for name, value in tensors.items()}, GOLDEN / "i2v.safetensors")


def build(folder, normal, **options):
    model = WanTransformer3DModel(**SIZES, **options).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(normal(*weight.shape) * 0.1)
    model.save_pretrained(GOLDEN / folder)
    return model


if __name__ == "__main__":
    main()
