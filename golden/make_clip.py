#!/usr/bin/env python3
"""Makes golden/clip-tiny/ (image_encoder/ and image_processor/ of a model folder), golden/clip.safetensors and golden/i2v21_pipeline.safetensors: the image
encoder of Wan2.1 image-to-video, and what diffusers' WanImageToVideoPipeline makes of a picture with it.

The network is that of make_i2v_pipeline.py, with a branch for the image whose weights are made of its own, see `with_image_branch`. The picture is
crates/video/tests/fixtures/picture.png. Run in the root of the repository: `python golden/make_clip.py`.
"""

import json
from pathlib import Path

import torch
from diffusers import WanImageToVideoPipeline, WanPipeline, WanTransformer3DModel
from PIL import Image
from safetensors.torch import save_file
from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModel

from make_wan22 import steps

GOLDEN = Path(__file__).parent
SIDE = 16


def main():
    torch.manual_seed(5)
    config = CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=2,
        image_size=SIDE,
        patch_size=4,
        hidden_act="gelu",
    )
    encoder = CLIPVisionModel(config).eval()
    with torch.no_grad():
        for weight in encoder.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    folder = GOLDEN / "clip-tiny/image_encoder"
    folder.mkdir(parents=True, exist_ok=True)
    # the names of the released files
    prefix = "vision_model."
    state = {name if name.startswith(prefix) else prefix + name: value.contiguous() for name, value in encoder.state_dict().items()}
    save_file(state, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**config.to_dict(), "architectures": ["CLIPVisionModel"]}, indent=1) + "\n")
    processor = CLIPImageProcessor(size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE})
    processor.save_pretrained(GOLDEN / "clip-tiny/image_processor")

    picture = Image.open(GOLDEN.parent / "crates/video/tests/fixtures/picture.png").convert("RGB")
    pixels = processor(images=picture, return_tensors="pt")["pixel_values"]
    random = torch.randn(2, 3, SIDE, SIDE)
    with torch.no_grad():
        features = lambda x: encoder(pixel_values=x, output_hidden_states=True).hidden_states[-2]
        tensors = {"picture": pixels, "picture_features": features(pixels), "random": random, "random_features": features(random)}
    save_file({name: value.contiguous() for name, value in tensors.items()}, GOLDEN / "clip.safetensors")

    base = WanPipeline.from_pretrained(GOLDEN / "wan-tiny", torch_dtype=torch.float32)
    options = {**base.transformer.config, "in_channels": 36, "image_dim": 32, "added_kv_proj_dim": 64}
    transformer = WanTransformer3DModel.from_config(options)
    transformer.load_state_dict(with_image_branch(base.transformer.state_dict()))
    pipe = WanImageToVideoPipeline(
        tokenizer=base.tokenizer,
        text_encoder=base.text_encoder,
        image_encoder=encoder,
        image_processor=processor,
        vae=base.vae,
        scheduler=base.scheduler,
        transformer=transformer.eval(),
    )
    pipe.set_progress_bar_config(disable=True)
    frame = (pipe.video_processor.preprocess(picture, height=32, width=48) + 1) / 2
    save_file({"frame": frame.contiguous(), "latents_after_step": steps(pipe, image=picture)}, GOLDEN / "i2v21_pipeline.safetensors")


def with_image_branch(weights):
    weights = dict(weights)
    own = weights["patch_embedding.weight"]
    weights["patch_embedding.weight"] = torch.cat([own, 0.7 * own[:, :4], 0.5 * own], dim=1)
    text = weights["condition_embedder.text_embedder.linear_1.weight"]
    dim, features = text.shape
    embedder = "condition_embedder.image_embedder."
    weights |= {
        f"{embedder}norm1.weight": torch.ones(features),
        f"{embedder}norm1.bias": torch.zeros(features),
        f"{embedder}ff.net.0.proj.weight": text[:features].clone(),
        f"{embedder}ff.net.0.proj.bias": torch.zeros(features),
        f"{embedder}ff.net.2.weight": text.clone(),
        f"{embedder}ff.net.2.bias": torch.zeros(dim),
        f"{embedder}norm2.weight": torch.ones(dim),
        f"{embedder}norm2.bias": torch.zeros(dim),
    }
    for name in [name for name in weights if ".attn2.to_k." in name or ".attn2.to_v." in name]:
        added = name.replace("to_k", "add_k_proj").replace("to_v", "add_v_proj")
        weights[added] = 0.6 * weights[name]
    for name in [name for name in weights if ".attn2.norm_k." in name]:
        weights[name.replace("norm_k", "norm_added_k")] = weights[name].clone()
    return weights


if __name__ == "__main__":
    main()
