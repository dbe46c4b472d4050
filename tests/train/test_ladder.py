"""The ladder from a perceptron to a Llama: exact sizes, and each component that should help does."""

from __future__ import annotations

import pytest
import torch

from quire.train.ladder import CONTEXT, train_variants, variants

# Which letter follows depends on the one two places back, so one character of context is not enough.
PATTERN = "abcacbbcabacaabbcc\n" * 80


def test_the_perceptron_on_65_characters_has_33217_parameters() -> None:
    model = variants(65)["perceptron"]()
    assert sum(parameter.numel() for parameter in model.parameters()) == 33_217


def test_every_variant_is_larger_than_the_one_before_and_sees_no_future() -> None:
    torch.manual_seed(0)
    sizes = []
    for build in variants(65).values():
        model = build().eval()
        sizes.append(sum(parameter.numel() for parameter in model.parameters()))
        ids = torch.randint(0, 65, (1, CONTEXT))
        changed = ids.clone()
        changed[0, 9] = (changed[0, 9] + 1) % 65
        with torch.inference_mode():
            torch.testing.assert_close(model(ids)[0, :9], model(changed)[0, :9])
    assert sizes == sorted(set(sizes))


@pytest.mark.slow
def test_context_lowers_the_loss_where_the_text_needs_it() -> None:
    by_name = {result.name: result.val_loss for result in train_variants(PATTERN, steps=30)}
    perceptron, *_, complete = by_name.values()
    assert complete < by_name["+ attention with RoPE"] < perceptron
    assert complete < 0.5 * perceptron
