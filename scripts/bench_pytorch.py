#!/usr/bin/env python3
"""The PyTorch side of the benchmark case `wan-small`: a Wan transformer of 3,963,520 weights, 16 samples of 80 tokens.

    bench_pytorch.py denoise-cfg|train [--runs N] [--threads N]

`denoise-cfg` is one denoising step with classifier-free guidance as diffusers' `WanPipeline` makes it: two forward passes.
`train` is one LoRA step: forward, mean square as the loss, backward, AdamW. Prompts have 12 tokens, zero-padded to the 512 rows
that Wan attends to. Everything is float32 with random weights. Prints one JSON object; one process measures one case, so that
the peak memory is that case's own.
"""

import argparse
import json
import resource
import statistics
import time

import torch
from diffusers import WanTransformer3DModel
from peft import LoraConfig

CONFIG = dict(
    patch_size=(1, 2, 2),
    num_attention_heads=6,
    attention_head_dim=32,
    in_channels=16,
    out_channels=16,
    text_dim=128,
    freq_dim=256,
    ffn_dim=768,
    num_layers=6,
    cross_attn_norm=True,
    qk_norm="rms_norm_across_heads",
    eps=1e-6,
    rope_max_seq_len=1024,
)
LORA = LoraConfig(r=4, lora_alpha=8, target_modules=["to_q", "to_k", "to_v", "to_out.0"], init_lora_weights="gaussian")
BATCH, TEXT_TOKENS, TEXT_ROWS, GUIDANCE_SCALE, STEP_SIZE = 16, 12, 512, 4.5, -0.05


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", choices=["denoise-cfg", "train"])
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    import_rss = peak_rss_mib()
    step = {"denoise-cfg": denoise_cfg, "train": train}[args.case]()
    for _ in range(2):
        step()
    runs = [seconds(step) for _ in range(args.runs)]
    result = dict(median_s=statistics.median(runs), min_s=min(runs), peak_rss_mib=peak_rss_mib(), runs=runs)
    print(json.dumps(result | dict(import_rss_mib=import_rss, torch=torch.__version__)))


def denoise_cfg():
    """x <- x + dt v,   v = v_uncond + s (v_cond - v_uncond)"""
    transformer = WanTransformer3DModel(**CONFIG).eval()
    latents, prompt, negative = noise(), text(), text()

    @torch.no_grad()
    def step():
        conditional = velocity(transformer, latents, prompt)
        unconditional = velocity(transformer, latents, negative)
        return latents + STEP_SIZE * (unconditional + GUIDANCE_SCALE * (conditional - unconditional))

    return step


def train():
    transformer = WanTransformer3DModel(**CONFIG).requires_grad_(False)
    transformer.add_adapter(LORA)
    optimizer = torch.optim.AdamW([p for p in transformer.parameters() if p.requires_grad], lr=1e-4, weight_decay=1e-4)
    latents, prompt = noise(), text()

    def step():
        velocity(transformer, latents, prompt).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def velocity(transformer, latents, prompt):
    timestep = torch.full((BATCH,), 500)
    return transformer(hidden_states=latents, timestep=timestep, encoder_hidden_states=prompt, return_dict=False)[0]


def noise():
    return torch.randn(BATCH, 16, 5, 8, 8)


def text():
    return torch.cat([torch.randn(BATCH, TEXT_TOKENS, 128), torch.zeros(BATCH, TEXT_ROWS - TEXT_TOKENS, 128)], dim=1)


def seconds(step):
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def peak_rss_mib():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


if __name__ == "__main__":
    main()
