"""Train the tiny StableDiffusion3Pipeline that ships with the package, from nothing, on one CPU thread.

    python -m digenrl.data.train_tiny_sd3 --out digenrl/data

writes DIR/tiny-sd3 (the pipeline, save_pretrained layout) and DIR/prompts (the two prompt sets cut by the same
split, so a held-out prompt was never seen in pre-training). Steps are counted, not timed, and seeds are fixed: on one
type of CPU the result is the same every time.

    train_vae()      the image autoencoder
    latents_of()     the pictures as normalised latents; writes the VAE's shift and scale
    train_flow()     MMDiT and both text encoders jointly, by flow matching

The flow is stopped early on purpose: OCR reads one picture in four as the number asked for, and the rest is the
headroom RL works in. Reward and exact matches on the held-out numbers (`digenrl.data.evaluate_tiny_sd3`), by flow
steps: 300: 0.47 / 0.11, 330: 0.60 / 0.23, 400: 0.80 / 0.51.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3 import StableDiffusion3Pipeline
from torch import nn
from torch.nn import functional as F

from digenrl.data.numbers import draw_style, render, split, write_prompts
from digenrl.data.tiny_sd3_parts import CountedPadding, build_pipeline, build_vae

PICTURES_PER_NUMBER = 24
VAE_STEPS, VAE_BATCH, VAE_LR = 300, 32, 3e-3
FLOW_STEPS, FLOW_BATCH, FLOW_LR, FLOW_WARMUP = 330, 64, 2e-3, 50
KL_WEIGHT = 1e-3
FINAL_LR_FRACTION = 0.05
EMA_DECAY = 0.995
#: Zero vectors the stock call appends to the context by default. Half of the training samples have them, half none.
STOCK_PADDING = 256


def draw_pictures(numbers: Sequence[str], seed: int) -> tuple[list[str], torch.Tensor]:
    """Texts and (N, 3, 12, 24) float32 pictures in [-1, 1], PICTURES_PER_NUMBER of each number."""
    rng = random.Random(seed)
    texts = [number for number in numbers for _ in range(PICTURES_PER_NUMBER)]
    pixels = render(texts, [draw_style(rng) for _ in texts])
    return texts, torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 127.5 - 1.0


def batches(size: int, batch: int, steps: int, generator: torch.Generator) -> Iterator[torch.Tensor]:
    """`steps` index batches from reshuffled epochs over `size` items; the incomplete end of an epoch is dropped."""
    if size < batch:
        raise ValueError(f"{size} pictures do not fill one batch of {batch}")
    made = 0
    while made < steps:
        for indices in torch.split(torch.randperm(size, generator=generator)[: size - size % batch], batch):
            if made == steps:
                return
            made += 1
            yield indices


def train_vae(pictures: torch.Tensor, steps: int, seed: int) -> AutoencoderKL:
    """Train by L1 + KL_WEIGHT * KL per latent element; linear learning-rate decay."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    vae = build_vae().train()
    optimizer = torch.optim.AdamW(vae.parameters(), lr=VAE_LR, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, FINAL_LR_FRACTION, total_iters=steps)
    for step, indices in enumerate(batches(len(pictures), VAE_BATCH, steps, generator)):
        images = pictures[indices]
        posterior = vae.encode(images).latent_dist
        decoded = vae.decode(posterior.sample(generator=generator)).sample
        reconstruction = F.l1_loss(decoded, images)
        loss = reconstruction + KL_WEIGHT * posterior.kl().mean() / posterior.mean[0].numel()
        _descend(loss, optimizer, schedule, list(vae.parameters()))
        _report("vae", step, steps, reconstruction)
    return vae.eval()


@torch.no_grad()
def latents_of(vae: AutoencoderKL, pictures: torch.Tensor) -> torch.Tensor:
    """Encode pictures, store their mean and 1/std in the VAE's configuration, and return normalised latents.

    Returns:
        (N, 4, 6, 12) float32 of mean 0 and standard deviation 1.
    """
    raw = torch.cat([vae.encode(part).latent_dist.mean for part in torch.split(pictures, 512)])
    shift, scale = float(raw.mean()), 1.0 / float(raw.std())
    vae.register_to_config(shift_factor=shift, scaling_factor=scale)  # type: ignore[no-untyped-call]
    return (raw - shift) * scale


def draw_sigmas(count: int, generator: torch.Generator) -> torch.Tensor:
    """(count,) noise levels: 80 % logit-normal(0, 1), 20 % uniform."""
    logit_normal = torch.sigmoid(torch.randn(count, generator=generator))
    uniform = torch.rand(count, generator=generator)
    return torch.where(torch.rand(count, generator=generator) < 0.8, logit_normal, uniform)


def train_flow(
    pipeline: StableDiffusion3Pipeline, texts: Sequence[str], latents: torch.Tensor, steps: int, seed: int
) -> None:
    """Train MMDiT and text encoders in place to predict the velocity `noise - clean`; keeps the weights' average."""
    generator = torch.Generator().manual_seed(seed)
    trained = nn.ModuleList([pipeline.transformer, pipeline.text_encoder, pipeline.text_encoder_2]).train()
    parameters = list(trained.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=FLOW_LR, betas=(0.9, 0.99), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: warm_cosine(step, steps))
    stock_attention = dict(pipeline.transformer.attn_processors)
    pipeline.transformer.set_attn_processor(CountedPadding())
    average = [p.detach().clone() for p in parameters]
    for step, indices in enumerate(batches(len(latents), FLOW_BATCH, steps, generator)):
        clean = latents[indices]
        sigmas = draw_sigmas(len(clean), generator)
        noise = torch.randn(clean.shape, generator=generator)
        s = sigmas[:, None, None, None]
        padding = torch.randint(2, (len(clean),), generator=generator) * float(STOCK_PADDING)
        prompts = [texts[i] for i in indices.tolist()]
        predicted = velocity(pipeline, prompts, (1 - s) * clean + s * noise, sigmas, padding)
        loss = F.mse_loss(predicted, noise - clean)
        _descend(loss, optimizer, schedule, parameters)
        decay = min(EMA_DECAY, (1 + step) / (10 + step))
        torch._foreach_lerp_(average, [p.detach() for p in parameters], 1 - decay)
        _report("flow", step, steps, loss)
    with torch.no_grad():
        torch._foreach_copy_(list[torch.Tensor](parameters), average)
    pipeline.transformer.set_attn_processor(stock_attention)
    trained.eval()


def velocity(
    pipeline: StableDiffusion3Pipeline,
    prompts: list[str],
    noisy: torch.Tensor,
    sigmas: torch.Tensor,
    padding: torch.Tensor,
) -> torch.Tensor:
    """Predicted velocity, with gradients into the text encoders: prompts go through the pipeline's own encoding.

    Args:
        pipeline: its transformer's attention is CountedPadding.
        prompts: B texts.
        noisy: (B, 4, 6, 12) float32.
        sigmas: (B,) float32.
        padding: (B,) float32, number of zero vectors in the context.
    """
    embeds, _, pooled, _ = pipeline.encode_prompt(
        prompts, prompts, prompts, do_classifier_free_guidance=False, max_sequence_length=1
    )
    output: torch.Tensor = pipeline.transformer(
        noisy,
        embeds,
        pooled,
        timestep=1000 * sigmas,
        joint_attention_kwargs={"padding_counts": padding},
        return_dict=False,
    )[0]
    return output


def warm_cosine(step: int, steps: int) -> float:
    """Learning-rate factor: linear over FLOW_WARMUP steps, then a cosine down to FINAL_LR_FRACTION."""
    if step < FLOW_WARMUP:
        return (step + 1) / FLOW_WARMUP
    progress = min(1.0, (step - FLOW_WARMUP) / max(1, steps - FLOW_WARMUP))
    return FINAL_LR_FRACTION + (1 - FINAL_LR_FRACTION) * 0.5 * (1 + float(np.cos(np.pi * progress)))


def _descend(
    loss: torch.Tensor,
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
    parameters: list[nn.Parameter],
) -> None:
    optimizer.zero_grad(set_to_none=True)
    torch.autograd.backward(loss)
    nn.utils.clip_grad_norm_(parameters, 1.0)
    optimizer.step()
    schedule.step()


def _report(name: str, step: int, steps: int, loss: torch.Tensor) -> None:
    if step % 50 == 0 or step == steps - 1:
        print(f"{name} {step + 1:4d}/{steps}  loss {loss.item():.4f}", flush=True)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Train the tiny SD3 pipeline and write the numbers prompt sets.")
    parser.add_argument("--out", type=Path, required=True, help="directory that gets tiny-sd3/ and prompts/")
    parser.add_argument("--vae-steps", type=int, default=VAE_STEPS, help="optimiser steps of the autoencoder")
    parser.add_argument("--flow-steps", type=int, default=FLOW_STEPS, help="optimiser steps of the MMDiT")
    parser.add_argument("--seed", type=int, default=0, help="seed of pictures, weights and noise")
    args = parser.parse_args()

    torch.set_num_threads(1)
    write_prompts(args.out / "prompts")
    texts, pictures = draw_pictures(split()[0], args.seed)
    vae = train_vae(pictures, args.vae_steps, args.seed)
    latents = latents_of(vae, pictures)
    torch.manual_seed(args.seed)
    pipeline = build_pipeline(vae)
    train_flow(pipeline, texts, latents, args.flow_steps, args.seed)
    pipeline.save_pretrained(args.out / "tiny-sd3", safe_serialization=True)
    print(f"wrote {args.out / 'tiny-sd3'} and {args.out / 'prompts'}")


if __name__ == "__main__":
    main()
