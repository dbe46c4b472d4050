"""`quire bench quality`: what it scores, what it compares, and that a worse model looks worse."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quire.cli.bench import quality
from quire.cli.bench.quality import Score
from quire.outputs import CompletionOutput, Logprob, RequestOutput

NATS = {"float32": 1.0, "bfloat16": 1.25, "int8": 1.5}


class FakeLLM:
    """Gives every token the same probability, which depends on the variant."""

    max_model_len = 9

    def __init__(self, config: Any, seen: list[list[int]]) -> None:
        self.loss, self.seen = NATS[config.model.quantization or config.model.dtype], seen

    def __enter__(self) -> FakeLLM:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def get_tokenizer(self) -> SimpleNamespace:
        return SimpleNamespace(encode=lambda text: list(range(len(text))))

    def generate(self, prompts: list[Any], params: Any, use_tqdm: bool) -> list[RequestOutput]:
        assert params.prompt_logprobs == 0
        outputs = []
        for prompt in prompts:
            ids = prompt["prompt_token_ids"]
            self.seen.append(ids)
            scored: list[Any] = [None, *({token: Logprob(-self.loss)} for token in ids[1:])]
            outputs.append(RequestOutput("r", None, ids, [CompletionOutput(0, "", [0])], True, scored))
        return outputs


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    prompts: list[list[int]] = []
    monkeypatch.setattr(quality, "open_llm", lambda config: FakeLLM(config, prompts))
    return prompts


def test_variants_are_compared_with_the_first(quire, seen, tmp_path: Path) -> None:
    text, path = tmp_path / "text.txt", tmp_path / "out.json"
    text.write_text("twenty letters long.")
    words = ("--variant", "float32", "--variant", "bfloat16", "--variant", "int8", "--text", str(text))
    result = quire("bench", "quality", *words, "--output-json", str(path))
    assert result.code == 0, result.err
    assert "Perplexity on 3 passages, 17 predicted tokens" in result.out  # of 8, 8 and 4 tokens
    assert [len(ids) for ids in seen[:3]] == [8, 8, 4]
    lines = {line.split()[0]: line.split() for line in result.out.splitlines()[2:]}
    assert lines["float32"][1:3] == ["1.00000", f"{math.e:.4f}"]
    assert lines["bfloat16"][3:6] == ["+0.25000", "±", "0.00000"]
    assert float(lines["float32"][-1]) == pytest.approx(2 * float(lines["bfloat16"][-1]), rel=0.01)
    stored = json.loads(path.read_text())
    assert (stored["compared_with"], stored["num_tokens"]) == ("float32", 17)
    assert stored["variants"]["int8"]["difference"] == pytest.approx(0.5)


def test_the_error_of_a_difference_is_that_over_passages() -> None:
    first, other = Score(((10.0, 10), (20.0, 10)), 0), Score(((12.0, 10), (20.0, 10)), 0)
    mean, error = other.difference(first)
    assert mean == pytest.approx(0.1)
    assert error == pytest.approx(0.1)  # of 0.2 and 0.0: their deviation 0.1414 over the root of 2
    assert first.difference(first) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--variant", "int3"], "variant: 'int3' is not one of float32, bfloat16, int8"),
        (["--model", "/no/folder"], "text: a file is needed"),
        (["--text", "/no/file"], "text: cannot read '/no/file'"),
        (["--dtype", "float32"], "unknown option --dtype"),
    ],
)
def test_bad_options_are_named(quire, seen, words: list[str], part: str) -> None:
    result = quire("bench", "quality", *words)
    assert result.code == 2
    assert part in result.err
    assert not seen


def test_a_text_too_short_to_predict_anything_is_refused(quire, seen, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("a")
    result = quire("bench", "quality", "--text", str(tmp_path / "text.txt"))
    assert (result.code, "no two tokens" in result.err) == (2, True)


@pytest.mark.slow
def test_the_demo_model_loses_little_by_eight_bits_and_more_by_four(quire, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    words = ("--device", "reference", "--num-threads", "1", "--num-passages", "12", "--output-json", str(path))
    result = quire("bench", "quality", *words)
    assert result.code == 0, result.err
    found = json.loads(path.read_text())["variants"]
    assert list(found) == list(quality.VARIANTS)
    assert 0.3 < found["float32"]["nats_per_token"] < 1.0
    losses = {name: abs(figures["difference"]) for name, figures in found.items()}
    assert losses["float32"] == 0
    assert all(0 < losses[name] < 0.01 for name in ("bfloat16", "int8", "int8-weight-only", "kv-int8"))
    assert 0 < losses["int4"] < 0.05
    sizes = {name: figures["weight_bytes"] for name, figures in found.items()}
    assert sizes["int4"] < 0.6 * sizes["int8"] < 0.4 * sizes["bfloat16"] == 0.4 * sizes["kv-int8"]
