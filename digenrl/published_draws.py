"""How the reference training of Flow-GRPO draws prompts and shared noise, for comparison with it; no run uses this.

    k_repeat_batches       prompt indices of one sampling batch, by rank
    shared_noise_seed      seed of the noise that all samples of a prompt start from

Here the same choices follow from identities (`digenrl.prompts.prompts_of_iteration`, `init_same_noise`). There the
members of a group are scattered over ranks, and groups are told apart by the text of their prompt.

Source: Flow-GRPO (arXiv 2505.05470) and its reference training.
"""

from __future__ import annotations

import hashlib


def k_repeat_batches(size: int, batch: int, repeats: int, world: int, seed: int, epoch: int) -> list[list[int]]:
    """Indices into a data set of `size` prompts, `batch` for each of `world` ranks.

    world * batch / repeats distinct prompts are drawn, each is taken `repeats` times, and all are shuffled.

    Raises:
        ValueError: `repeats` does not divide world * batch, or there are too few prompts.
    """
    import torch

    distinct, rest = divmod(world * batch, repeats)
    if rest or distinct > size:
        raise ValueError(f"{world} ranks x {batch} samples need {world * batch / repeats:g} of {size} distinct prompts")
    generator = torch.Generator().manual_seed(seed + epoch)
    chosen = torch.randperm(size, generator=generator)[:distinct].repeat_interleave(repeats)
    order = chosen[torch.randperm(len(chosen), generator=generator)]
    return [list(map(int, part)) for part in order.reshape(world, batch)]


def shared_noise_seed(prompt: str, base: int) -> int:
    """Seed for `prompt`; `base` is 10000 * epoch + index of the sampling batch."""
    digest = hashlib.sha256(prompt.encode()).digest()
    return (base + int.from_bytes(digest[:4], "big")) % 2**31
