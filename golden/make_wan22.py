#!/usr/bin/env python3
"""Makes golden/wan22.safetensors: what diffusers' WanPipeline makes of Wan2.2's two networks and of its expanded timesteps.

The second network of wan-tiny is the first with every weight times 0.75, so it needs no file. Prompts, initial latents and
solver are those of golden/pipeline.json. Run in the root of the repository: `python golden/make_wan22.py`.
"""

import copy
from pathlib import Path

import torch
from diffusers import WanPipeline
from safetensors.torch import load_file, save_file

GOLDEN = Path(__file__).parent
PROMPT = "A red fox runs across a snowy field at sunrise."
NEGATIVE_PROMPT = "low quality, blurred details, static"


def main():
    torch.manual_seed(0)
    base = WanPipeline.from_pretrained(GOLDEN / "wan-tiny", torch_dtype=torch.float32)
    base.set_progress_bar_config(disable=True)
    second = copy.deepcopy(base.transformer)
    with torch.no_grad():
        for weight in second.parameters():
            weight.mul_(0.75)

    experts = pipeline(base, transformer_2=second, boundary_ratio=0.875)
    tensors = {
        "experts": steps(experts, guidance_scale_2=3.0),
        "same_scale": steps(experts),
        "expanded": steps(pipeline(base, expand_timesteps=True)),
    }
    experts.load_lora_weights(GOLDEN / "lora/diffusers_with_metadata", load_into_transformer_2=True)
    tensors["lora_2"] = steps(experts, guidance_scale_2=3.0)
    save_file({f"{name}.latents_after_step": value for name, value in tensors.items()}, GOLDEN / "wan22.safetensors")


def pipeline(base, **options):
    parts = {name: getattr(base, name) for name in ("tokenizer", "text_encoder", "vae", "transformer")}
    made = WanPipeline(**parts, scheduler=copy.deepcopy(base.scheduler), **options)
    made.set_progress_bar_config(disable=True)
    return made


def steps(pipe, **options):
    """The latents after each of the steps [8, 1, C, F, H, W]."""
    after = []

    def keep(_pipe, _step, _timestep, tensors):
        after.append(tensors["latents"].clone())
        return {}

    pipe(
        prompt=PROMPT,
        negative_prompt=NEGATIVE_PROMPT,
        height=32,
        width=48,
        num_frames=9,
        num_inference_steps=8,
        guidance_scale=4.5,
        latents=load_file(GOLDEN / "pipeline.safetensors")["latents_initial"].clone(),
        output_type="latent",
        callback_on_step_end=keep,
        **options,
    )
    return torch.stack(after).contiguous()


if __name__ == "__main__":
    main()
