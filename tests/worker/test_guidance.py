"""Constraints of rows and their masks, and the log-probabilities of what masks leave."""

from __future__ import annotations

import numpy as np
import pytest

from quire.kernels.cpu.backend import CPUBackend
from quire.sampling.grammars import GrammarStore
from quire.sampling.metadata import Bitmask
from quire.tokenizer.tokenizer import Tokenizer
from quire.worker.guidance import BitmaskWriter, Guide, masked_logprobs
from tests.frontend.conftest import MAKERS, NAMED


def tokenizer() -> Tokenizer:
    return Tokenizer(MAKERS["byte_level"](), special_tokens=NAMED["byte_level"])


def allowed(bits: np.ndarray) -> list[int]:
    return np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist()


def ids(text: str) -> list[int]:
    return [tokenizer().encode_segments([char])[0] for char in text]


def guide(store: GrammarStore, grammar: str) -> Guide:
    return Guide(store.start(grammar), None, jump_forward=True, vocab_size=425)


@pytest.mark.parametrize("vocab_size", [425, 447, 448, 449, 512])
def test_masks_of_several_rows_are_written_at_once(vocab_size: int) -> None:
    store = GrammarStore(tokenizer, vocab_size)
    writer = BitmaskWriter(4, vocab_size)
    writer.start([])
    writer.wait()
    digits, word = guide(store, "start: /[0-3]/"), guide(store, 'start: "k" "m"?')
    writer.bits[:] = -1
    writer.start([(digits.matcher, 2), (word.matcher, 0)])
    writer.wait()
    assert allowed(writer.bits[2]) == sorted(ids("0123"))
    assert allowed(writer.bits[0]) == ids("k")
    assert (writer.bits[1] == -1).all()
    word.accept(ids("k"))
    twin = word.fork()
    twin.accept(ids("m"))
    writer.start([(word.matcher, 0), (twin.matcher, 1)])
    writer.wait()
    assert allowed(writer.bits[0]) == sorted([*ids("m"), 422])
    assert (word.complete, twin.complete) == (False, True)
    writer.close()


def test_a_token_outside_the_grammar_is_an_error_and_no_end() -> None:
    store = GrammarStore(tokenizer, 425)
    made = guide(store, 'start: "ab" "cd"')
    assert made.error is None and not made.complete
    spelled = tokenizer().encode_segments(["abcd"])
    assert made.fork().advance(spelled[0], 10) == spelled[1:]
    made.accept(ids("ac"))
    assert made.error is not None
    assert "\n" not in made.error.message
    assert not made.complete


def test_masked_log_probabilities_are_those_of_the_whole_distribution() -> None:
    backend = CPUBackend("float32", num_threads=1)
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(3, 100)).astype(np.float32) * 4
    whole = logits.astype(np.float64)
    whole -= np.log(np.exp(whole).sum(axis=1, keepdims=True))
    mask = np.zeros((2, 128), bool)
    mask[0, [5, 17, 80]] = True
    mask[1, rng.permutation(100)[:50]] = True
    bits = np.packbits(mask, axis=1, bitorder="little").view(np.int32)
    top = masked_logprobs(backend, logits.copy(), Bitmask(np.array([2, 0]), bits, np.array([-1, -1])), 10)
    for row, left in ((2, mask[0]), (0, mask[1]), (1, np.ones(128, bool))):
        best = sorted(np.flatnonzero(left[:100]), key=lambda token: -whole[row, token])[:10]
        assert top.token_ids[row, 0] == best[0]
        assert top.token_ids[row, 1 : len(best) + 1].tolist() == best
        np.testing.assert_allclose(top.logprobs[row, 1 : len(best) + 1], whole[row, best], atol=1e-5)
        assert np.isneginf(top.logprobs[row, len(best) + 1 :]).all()
        assert top.ranks[row] == 1 + (logits[row] > logits[row, best[0]]).sum()
