"""How the shipped pipeline is trained, on a few pictures and for a few steps."""

import pytest
import torch

from digenrl.data.tiny_sd3_parts import CountedPadding, build_pipeline, build_tokenizer, build_vae
from digenrl.data.train_tiny_sd3 import (
    FINAL_LR_FRACTION,
    FLOW_WARMUP,
    batches,
    draw_pictures,
    latents_of,
    train_flow,
    train_vae,
    velocity,
    warm_cosine,
)
from digenrl.trajectory import tensor_hash


def test_tokenizer_reads_a_token_a_digit_between_start_and_end() -> None:
    tokenizer = build_tokenizer()
    ids = tokenizer(["042", "", "9"], padding="max_length", max_length=5, truncation=True).input_ids
    assert ids == [[2, 4, 8, 6, 1], [2, 1, 0, 0, 0], [2, 13, 1, 0, 0]]
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id) == (0, 1, 2)


@pytest.mark.parametrize("count", [0, 1, 256])
def test_one_counted_padding_token_equals_that_many_of_the_stock_call(count: int) -> None:
    torch.manual_seed(0)
    pipeline = build_pipeline(build_vae())
    with torch.no_grad():
        for parameter in pipeline.transformer.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    prompts, sigmas, noisy = ["042", "7"], torch.tensor([0.3, 0.8]), torch.randn(2, 4, 6, 12)
    embeds, _, pooled, _ = pipeline.encode_prompt(
        prompts, None, None, do_classifier_free_guidance=False, max_sequence_length=count
    )
    stock = pipeline.transformer(noisy, embeds, pooled, timestep=1000 * sigmas, return_dict=False)[0]
    pipeline.transformer.set_attn_processor(CountedPadding())
    counted = velocity(pipeline, prompts, noisy, sigmas, torch.full((2,), float(count)))
    torch.testing.assert_close(counted, stock, rtol=1e-5, atol=1e-5)


def test_training_is_deterministic_and_leaves_stock_attention() -> None:
    texts, pictures = draw_pictures(["042", "137", "905"], seed=0)
    hashes = set()
    for _ in range(2):
        vae = train_vae(pictures, steps=3, seed=0)
        latents = latents_of(vae, pictures)
        assert latents.mean().abs() < 1e-4 and abs(latents.std() - 1) < 1e-4
        torch.manual_seed(0)
        pipeline = build_pipeline(vae)
        before = tensor_hash(*pipeline.transformer.parameters())
        train_flow(pipeline, texts, latents, steps=3, seed=0)
        trained = [p for part in (vae, pipeline.transformer, pipeline.text_encoder) for p in part.parameters()]
        hashes.add(tensor_hash(*trained))
        assert tensor_hash(*pipeline.transformer.parameters()) != before
        assert {type(p).__name__ for p in pipeline.transformer.attn_processors.values()} == {"JointAttnProcessor2_0"}
    assert len(hashes) == 1


def test_batches_cover_whole_epochs_and_are_counted() -> None:
    made = list(batches(10, 4, 5, torch.Generator().manual_seed(0)))
    assert [len(b) for b in made] == [4] * 5
    assert len(set(torch.cat(made[:2]).tolist())) == 8
    with pytest.raises(ValueError, match="3 pictures do not fill one batch of 4"):
        next(batches(3, 4, 1, torch.Generator()))


def test_learning_rate_warms_up_and_falls_to_its_end() -> None:
    assert warm_cosine(0, 400) == 1 / FLOW_WARMUP and warm_cosine(FLOW_WARMUP, 400) == 1.0
    assert warm_cosine(400, 400) == pytest.approx(FINAL_LR_FRACTION)
