#!/usr/bin/env python3
"""Makes golden/i2v_pipeline.safetensors: what diffusers' WanImageToVideoPipeline makes of an image, without an image encoder, as in Wan2.2 A14B.

The tensors named `expanded` are those of the network of wan-tiny as it is, in the way of Wan2.2 TI2V-5B: the image is the first latent frame.

The other network is that of wan-tiny, whose patch embedding reads 36 channels: its own 16, the first 4 of them times 0.7 (mask), and all of them times 0.5
(latents of the image). The second is the first with every weight times 0.75. So neither needs a file. Prompts, initial latents and solver are those of
golden/pipeline.json. Run in the root of the repository: `python golden/make_i2v_pipeline.py`.
"""

import copy
from pathlib import Path

import torch
from diffusers import WanImageToVideoPipeline, WanPipeline, WanTransformer3DModel
from safetensors.torch import load_file, save_file

from make_wan22 import NEGATIVE_PROMPT, PROMPT

GOLDEN = Path(__file__).parent


def main():
    base = WanPipeline.from_pretrained(GOLDEN / "wan-tiny", torch_dtype=torch.float32)
    transformer = WanTransformer3DModel.from_config({**base.transformer.config, "in_channels": 36})
    weights = base.transformer.state_dict()
    own = weights["patch_embedding.weight"]
    weights["patch_embedding.weight"] = torch.cat([own, 0.7 * own[:, :4], 0.5 * own], dim=1)
    transformer.load_state_dict(weights)
    second = copy.deepcopy(transformer)
    with torch.no_grad():
        for weight in second.parameters():
            weight.mul_(0.75)
    image = torch.rand((1, 3, 32, 48), generator=torch.Generator().manual_seed(11))
    two = pipeline(base, transformer=transformer.eval(), transformer_2=second.eval(), boundary_ratio=0.9)
    tensors = {"image": image, **made(two, image, guidance_scale_2=3.0)}
    expanded = made(pipeline(base, transformer=base.transformer, expand_timesteps=True), image)
    tensors |= {f"expanded.{name}": value for name, value in expanded.items()}
    save_file({name: value.contiguous() for name, value in tensors.items()}, GOLDEN / "i2v_pipeline.safetensors")


def pipeline(base, **options):
    parts = {name: getattr(base, name) for name in ("tokenizer", "text_encoder", "vae")}
    pipe = WanImageToVideoPipeline(**parts, scheduler=copy.deepcopy(base.scheduler), **options)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def made(pipe, image, **options):
    """What the autoencoder makes of the image, the latents after each step, and the frames."""
    latents = load_file(GOLDEN / "pipeline.safetensors")["latents_initial"]
    after = []

    def keep(_pipe, _step, _timestep, tensors):
        after.append(tensors["latents"].clone())
        return {}

    result = pipe(
        image=image,
        prompt=PROMPT,
        negative_prompt=NEGATIVE_PROMPT,
        height=32,
        width=48,
        num_frames=9,
        num_inference_steps=8,
        guidance_scale=4.5,
        latents=latents,
        output_type="pt",
        callback_on_step_end=keep,
        **options,
    )
    condition = pipe.prepare_latents(2 * image - 1, 1, 16, 32, 48, 9, torch.float32, "cpu", None, latents)[1]
    return {"condition": condition, "latents_after_step": torch.stack(after), "frames": result.frames}


if __name__ == "__main__":
    main()
