#!/usr/bin/env python3
"""Does a trained adapter mean the same in Python as in `flash-grpo`?

Samples the same videos, from the same initial latents, with `flash-grpo sample` and with diffusers' `WanPipeline`:
without an adapter, with the adapter loaded by `pipe.load_lora_weights`, and with it loaded by `PeftModel.from_pretrained`;
each with and without classifier-free guidance. Prints the differences as a Markdown table and exits with 1 if one of them
exceeds the tolerance, or if the adapter changes so little that the comparison would prove nothing.

    pip install torch diffusers transformers peft ftfy imageio imageio-ffmpeg
    python scripts/agreement.py --lora runs/moving-shapes/adapter
"""

import argparse
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import diffusers
import imageio.v3 as imageio
import numpy as np
import torch
import transformers
from diffusers import WanPipeline
from peft import PeftModel
from safetensors.torch import load_file, save_file

HEIGHT, WIDTH, NUM_FRAMES, STEPS = 64, 64, 9, 10
NEGATIVE_PROMPT = "a blue square moves left"
# how many times the tolerance an adapter must change the latents by
MIN_EFFECT = 10


def main():
    args = parse_args()
    for library in (diffusers, transformers):
        library.utils.logging.disable_progress_bar()
    cases = [(scale, prompt) for scale in (1.0, args.guidance_scale) for prompt in args.prompt]
    with tempfile.TemporaryDirectory() as folder:
        initial = initial_latents(args.model, args.seed)
        save_file({"latents": initial}, Path(folder, "initial.safetensors"))
        loras = {"none": None, "trained": args.lora}
        ours = {name: [flash_grpo(args, lora, *case, Path(folder)) for case in cases] for name, lora in loras.items()}
        video = check_video(Path(folder, "video.mp4"), ours["trained"][-1][1])
    pipe = load(args.model)
    base = [sample(pipe, *case, initial) for case in cases]
    theirs = [("none", "`WanPipeline`", base)]
    for route, add_adapter in [("`load_lora_weights`", load_with_diffusers), ("`PeftModel.from_pretrained`", load_with_peft)]:
        pipe = add_adapter(load(args.model), args.lora)
        theirs.append(("trained", route, [sample(pipe, *case, initial) for case in cases]))
    rows = [
        (adapter, route, scale, *differences(ours[adapter], samples, [case[0] == scale for case in cases]))
        for adapter, route, samples in theirs
        for scale in (1.0, args.guidance_scale)
    ]
    effects = [effect(ours["none"], ours["trained"]), *(effect(base, samples) for _, _, samples in theirs[1:])]
    print_report(args, rows, effects, video)
    failures = list(check(args.tolerance, rows, effects))
    for failure in failures:
        print(f"error: {failure}", file=sys.stderr)
    sys.exit(1 if failures else 0)


def parse_args():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="models/moving-shapes", help="model folder in the diffusers layout")
    parser.add_argument("--lora", required=True, help="adapter folder that `flash-grpo train` wrote (RUN/adapter)")
    parser.add_argument("--binary", default="target/release/flash-grpo")
    parser.add_argument("--prompt", nargs="+", default=["a red circle moves right", "a green triangle moves up"])
    parser.add_argument("--guidance-scale", type=float, default=4.5, help="of the half of the samples with guidance")
    parser.add_argument("--tolerance", type=float, default=1e-3, help="largest absolute difference of latents and frames")
    parser.add_argument("--seed", type=int, default=0, help="of the initial latents")
    return parser.parse_args()


def initial_latents(model, seed):
    """Noise [1, C, F, H, W] that every sample starts from."""
    pipe = load(model)
    channels, generator = pipe.transformer.config.in_channels, torch.Generator().manual_seed(seed)
    return pipe.prepare_latents(1, channels, HEIGHT, WIDTH, NUM_FRAMES, torch.float32, torch.device("cpu"), generator)


def flash_grpo(args, lora, guidance_scale, prompt, folder):
    """(latents, frames) of `flash-grpo sample`."""
    files = {name: str(folder / f"{name}.safetensors") for name in ("initial", "latents", "frames")}
    command = [args.binary, "sample", "--model", args.model, "--prompt", prompt, "--negative-prompt", NEGATIVE_PROMPT]
    command += ["--guidance-scale", str(guidance_scale), "--num-inference-steps", str(STEPS), "--grid", unipc_grid()]
    command += ["--height", str(HEIGHT), "--width", str(WIDTH), "--num-frames", str(NUM_FRAMES)]
    command += ["--init-latents", files["initial"], "--save-latents", files["latents"], "--save-frames", files["frames"]]
    command += ["--output", str(folder / "video.mp4"), *(["--lora", lora] if lora else [])]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return load_file(files["latents"])["latents"].numpy(), load_file(files["frames"])["frames"].numpy()


def unipc_grid():
    """What `flash-grpo` calls the sigmas of the installed diffusers, which changed them with 0.37."""
    major, minor = (int(part) for part in version("diffusers").split(".")[:2])
    return "unipc-0.37" if (major, minor) >= (0, 37) else "unipc"


def load(model):
    pipe = WanPipeline.from_pretrained(model, dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def load_with_diffusers(pipe, lora):
    pipe.load_lora_weights(lora)
    return pipe


def load_with_peft(pipe, lora):
    pipe.transformer = PeftModel.from_pretrained(pipe.transformer, lora).get_base_model()
    return pipe


@torch.no_grad()
def sample(pipe, guidance_scale, prompt, initial):
    """(latents, frames) of `WanPipeline`."""
    last = {}
    frames = pipe(
        prompt=prompt,
        negative_prompt=NEGATIVE_PROMPT,
        height=HEIGHT,
        width=WIDTH,
        num_frames=NUM_FRAMES,
        num_inference_steps=STEPS,
        guidance_scale=guidance_scale,
        latents=initial.clone(),
        output_type="np",
        callback_on_step_end=lambda pipe, step, timestep, tensors: last.update(tensors) or {},
    ).frames
    return last["latents"].numpy(), frames


def differences(ours, theirs, chosen):
    """(largest, mean) absolute difference of the latents, and of the frames, over the chosen samples."""
    pairs = [pair for pair, is_chosen in zip(zip(ours, theirs), chosen) if is_chosen]
    errors = [np.stack([np.abs(a[part] - b[part]) for a, b in pairs]) for part in (0, 1)]
    return [(error.max(), error.mean()) for error in errors]


def effect(base, adapted):
    """How much an adapter changes the latents: the largest change, of the sample that it changes least."""
    return min(np.abs(before[0] - after[0]).max() for before, after in zip(base, adapted))


def check(tolerance, rows, effects):
    """What is wrong, as messages; a difference that is not a number is wrong too."""
    for adapter, route, scale, *parts in rows:
        if not all(largest <= tolerance for largest, _ in parts):
            yield f"adapter {adapter}, {route}, guidance {scale:g}: beyond the tolerance {tolerance:g}"
    if not min(effects) >= MIN_EFFECT * tolerance:
        yield f"the adapter changes the latents by only {min(effects):.1e}, too little to prove anything"


def check_video(path, frames):
    """Reads the video file back; it must hold all frames, close to those that were saved."""
    video = imageio.imread(path)
    shape = (NUM_FRAMES, HEIGHT, WIDTH, 3)
    if video.shape != shape:
        sys.exit(f"{path.name}: read back as {video.shape}, expected {shape}")
    error = np.abs(video / 255.0 - frames[0]).mean()
    return f"{shape[0]} frames of {shape[2]}x{shape[1]}, mean difference {error:.4f} from the frames before compression"


def print_report(args, rows, effects, video):
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "diffusers", "transformers", "peft"))
    print(f"`flash-grpo sample` against {versions}: {WIDTH}x{HEIGHT}, {NUM_FRAMES} frames, {STEPS} steps of UniPC")
    print(f"(grid `{unipc_grid()}`), float32, {len(args.prompt)} prompts; absolute differences, tolerance {args.tolerance:g}.\n")
    print("| adapter | Python side | guidance | latents max | latents mean | frames max | frames mean |")
    print("|---|---|---|---|---|---|---|")
    for adapter, route, scale, latents, frames in rows:
        numbers = " | ".join(f"{number:.1e}" for number in (*latents, *frames))
        print(f"| {adapter} | {route} | {scale:g} | {numbers} |")
    print(f"\nThe adapter changes the latents by at least {min(effects):.2e} (largest change, of the sample that changes least).")
    print(f"The video file read by imageio: {video}.")


if __name__ == "__main__":
    main()
