"""The training model's building blocks against their formulas."""

from __future__ import annotations

import torch

from quire.train.model import Llama, ModelConfig, RMSNorm, apply_rope, rope_tables

CONFIG = ModelConfig(
    vocab_size=50,
    hidden_size=32,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=64,
)


def test_rms_norm_divides_by_the_root_of_the_mean_of_squares() -> None:
    x = torch.tensor([[3.0, 4.0]])
    expected = x / (12.5 + 1e-6) ** 0.5
    torch.testing.assert_close(RMSNorm(2, 1e-6)(x), expected)


def test_rope_keeps_lengths_and_makes_scores_depend_on_distance_only() -> None:
    cos, sin = rope_tables(CONFIG)
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(8, generator=generator).expand(1, 1, 64, 8) for _ in range(2))
    q, k = apply_rope(q, cos, sin)[0, 0], apply_rope(k, cos, sin)[0, 0]
    torch.testing.assert_close(q.norm(dim=-1), q.norm(dim=-1)[:1].expand(64))
    scores = q @ k.T
    torch.testing.assert_close(scores[10, 3], scores[60, 53], rtol=1e-4, atol=1e-4)
    assert abs(float(scores[10, 3] - scores[10, 4])) > 1e-3


def test_no_token_sees_the_future() -> None:
    torch.manual_seed(0)
    model = Llama(CONFIG).eval()
    ids = torch.randint(0, 50, (1, 12))
    changed = ids.clone()
    changed[0, 8] = (changed[0, 8] + 1) % 50
    with torch.inference_mode():
        before, after = model(ids), model(changed)
    torch.testing.assert_close(before[0, :8], after[0, :8])
    assert not torch.allclose(before[0, 8:], after[0, 8:])


def test_parameter_count_follows_the_formula_with_the_head_tied() -> None:
    per_layer = 32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 40 + 2 * 32
    assert Llama(CONFIG).num_parameters() == 50 * 32 + 2 * per_layer + 32


def test_weights_repeat_with_the_seed() -> None:
    models = []
    for seed in (5, 5, 6):
        torch.manual_seed(seed)
        models.append(Llama(CONFIG).model.embed_tokens.weight)
    assert torch.equal(models[0], models[1]) and not torch.equal(models[0], models[2])
