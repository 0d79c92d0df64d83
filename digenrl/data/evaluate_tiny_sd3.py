"""Read back what a tiny pipeline writes: OCR reward and exact matches on the held-out numbers.

    python -m digenrl.data.evaluate_tiny_sd3

calls the stock pipeline, all prompts in one batch, and prints both means. Its answer for the pipeline that ships with
the package is the level RL starts from.
"""

from __future__ import annotations

import argparse
from importlib.resources import files

import numpy as np
import torch
from diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3 import StableDiffusion3Pipeline
from numpy.typing import NDArray

from digenrl.data.numbers import HEIGHT, WIDTH, split
from digenrl.rewards.ocr import Recogniser, exact_match, text_reward


def load(path: str) -> StableDiffusion3Pipeline:
    """Load a pipeline that has no T5: diffusers wants to be told so, although its model_index.json says it."""
    pipeline: StableDiffusion3Pipeline = StableDiffusion3Pipeline.from_pretrained(
        path, text_encoder_3=None, tokenizer_3=None
    )
    pipeline.set_progress_bar_config(disable=True)  # type: ignore[no-untyped-call]
    return pipeline


def generate(
    pipeline: StableDiffusion3Pipeline, prompts: list[str], seed: int, padding: int, steps: int = 10
) -> NDArray[np.uint8]:
    """(B, 12, 24, 3) uint8 pictures by the stock call, without guidance.

    Args:
        pipeline: a tiny pipeline.
        prompts: B numbers.
        seed: of the initial noise.
        padding: zero vectors in place of the T5 embedding; the stock default is 256.
        steps: denoising steps.
    """
    images = pipeline(
        prompts,
        height=HEIGHT,
        width=WIDTH,
        num_inference_steps=steps,
        guidance_scale=1.0,
        max_sequence_length=padding,
        generator=torch.Generator().manual_seed(seed),
        output_type="np",
    ).images
    pixels: NDArray[np.uint8] = np.rint(255 * np.asarray(images)).astype(np.uint8)
    return pixels


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="OCR reward of a tiny SD3 pipeline on the 200 held-out numbers.")
    parser.add_argument("--path", default=str(files("digenrl.data") / "tiny-sd3"), help="directory of the pipeline")
    parser.add_argument("--steps", type=int, default=10, help="denoising steps")
    parser.add_argument("--padding", type=int, default=0, help="max_sequence_length of the stock call")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="seeds of the initial noise")
    args = parser.parse_args()

    torch.set_num_threads(1)
    numbers = split()[1]
    pipeline, recogniser = load(args.path), Recogniser()
    for seed in args.seeds:
        readings = recogniser(generate(pipeline, numbers, seed, args.padding, args.steps))
        pairs = list(zip(readings, numbers, strict=True))
        reward = np.mean([text_reward(reading, number) for reading, number in pairs])
        exact = np.mean([exact_match(reading, number) for reading, number in pairs])
        print(f"seed {seed}  OCR reward {reward:.3f}  exact {exact:.3f}", flush=True)


if __name__ == "__main__":
    main()
