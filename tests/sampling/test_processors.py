"""Logits processors: named plug-ins that see their own row only, and whose faults end their own request only."""

from __future__ import annotations

import importlib.metadata
import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from quire.errors import ConfigError
from quire.kernels.create import create_backend
from quire.sampling.metadata import SequenceState
from quire.sampling.processors import load_processors, registered_names
from quire.sampling.sampler import Sampler, SamplerOutput
from quire.sampling_params import SamplingParams
from tests.helpers.sampling_rows import metadata_of, new_sequence

VOCAB = 12


def only(args: dict[str, Any], prompt_ids: list[int], vocab_size: int) -> Callable[..., np.ndarray]:
    """Allow one token: the one named, or the prompt's last plus the number of tokens so far."""

    def process(output_ids: np.ndarray, logits: np.ndarray) -> np.ndarray:
        token = args.get("token", prompt_ids[-1] + len(output_ids))
        kept = logits[token]
        logits[:] = -np.inf
        logits[token] = max(kept, 0.0)
        return logits

    return process


def returning(result: Any) -> Callable[..., Any]:
    return lambda args, prompt_ids, vocab_size: lambda output_ids, logits: result(logits)


def raising(args: dict[str, Any], prompt_ids: list[int], vocab_size: int) -> Any:
    def process(output_ids: np.ndarray, logits: np.ndarray) -> np.ndarray:
        raise KeyError("no such thing")

    return process


def greedy_to_change(args: dict[str, Any], prompt_ids: list[int], vocab_size: int) -> Any:
    def process(output_ids: np.ndarray, logits: np.ndarray) -> np.ndarray:
        output_ids[0] = 3
        return logits

    return process


FACTORIES = {
    "only": only,
    "raising": raising,
    "changing": greedy_to_change,
    "no factory": lambda args, prompt_ids, vocab_size: 3,
    "bad factory": lambda *args: 1 / 0,
    "list": returning(lambda logits: logits.tolist()),
    "nothing": returning(lambda logits: None),
    "short": returning(lambda logits: logits[:-1]),
    "double": returning(lambda logits: logits.astype(np.float64)),
    "nan": returning(lambda logits: np.full_like(logits, np.nan)),
    "inf": returning(lambda logits: np.full_like(logits, np.inf)),
    "freeing": returning(lambda logits: np.linspace(9, 8, len(logits), dtype=np.float32)),
    "empty": returning(lambda logits: np.full_like(logits, -np.inf)),
}


def sample(rows: list[SamplingParams], device: str = "cpu") -> SamplerOutput:
    backend = create_backend(device, "float32", "float32", 1)
    batch = metadata_of(rows, VOCAB, prompt=[1, 2, 3], outputs=[[5, 6]] * len(rows), factories=FACTORIES)
    logits = np.tile(np.linspace(0, 1, VOCAB, dtype=np.float32), (len(rows), 1))
    return Sampler(backend).start(backend.from_numpy(logits), batch).finish()


def asking(*processors: Any, **fields: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, logits_processors=list(processors), **fields)


@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_a_processor_changes_its_own_row(device: str) -> None:
    plain = SamplingParams(temperature=0.0)
    rows = [plain, asking({"name": "only", "args": {"token": 4}}), plain, asking("only")]
    assert sample(rows, device).token_ids.tolist() == [11, 4, 11, 3 + 2]


def test_what_other_options_bar_stays_barred() -> None:
    sampled = sample([asking("freeing"), asking("freeing", allowed_token_ids=[6, 3]), asking("freeing", "empty")])
    assert sampled.token_ids.tolist() == [0, 3, -1]


def test_arguments_are_those_of_the_request_and_over_them_its_own() -> None:
    rows = [
        asking("only", extra_args={"token": 7}),
        asking({"name": "only", "args": {"token": 8}}, extra_args={"token": 7}),
    ]
    assert sample(rows).token_ids.tolist() == [7, 8]


def test_processors_run_in_order_after_biases_and_before_penalties() -> None:
    assert sample([asking("only", logit_bias={4: 100.0})]).token_ids.tolist() == [5]
    assert sample([asking("only", repetition_penalty=10.0)]).token_ids.tolist() == [5]
    both = asking({"name": "only", "args": {"token": 4}}, {"name": "only", "args": {"token": 9}})
    assert sample([both]).token_ids.tolist() == [9]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("raising", "logits processor raising failed: KeyError"),
        ("changing", "logits processor changing failed: ValueError"),
        ("no factory", "which cannot be called"),
        ("bad factory", "ZeroDivisionError"),
        ("list", "a list, not an array"),
        ("nothing", "a NoneType, not an array"),
        ("short", r"float32 \[11\], not float32 \[12\]"),
        ("double", r"float64 \[12\], not float32 \[12\]"),
        ("nan", "NaN or infinite"),
        ("inf", "NaN or infinite"),
        ("empty", "leave no token"),
        ("unheard of", "unheard of is not registered"),
    ],
)
def test_a_fault_is_an_error_of_its_own_row(name: str, message: str) -> None:
    sampled = sample([asking("only"), asking(name), SamplingParams(temperature=0.0)])
    assert sampled.token_ids.tolist() == [5, -1, 11]
    assert list(sampled.errors) == [1]
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(sampled.errors[1].message)


def test_forks_have_processors_of_their_own() -> None:
    made = []

    def counting(args: dict[str, Any], prompt_ids: list[int], vocab_size: int) -> Any:
        made.append(prompt_ids)
        return lambda output_ids, logits: logits

    state = SequenceState(new_sequence(asking("counting"), [1, 2], [3]), VOCAB, {"counting": counting})
    assert state.processors is not None
    twin = state.fork()
    assert twin.processors is not None
    for processors in (state.processors, twin.processors, state.processors):
        processors.apply(np.zeros(0, dtype=np.int32), np.zeros(VOCAB, dtype=np.float32))
    assert made == [[1, 2], [1, 2]]


def test_plugins_are_named_in_the_option(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("plugins_of_this_test")
    module.only = only  # type: ignore[attr-defined]
    module.number = 3  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "plugins_of_this_test", module)
    assert load_processors([]) == {}
    assert load_processors(["mine=plugins_of_this_test:only"]) == {"mine": only}
    assert registered_names(["mine=plugins_of_this_test:only", "other"]) == ["mine", "other"]
    entry = importlib.metadata.EntryPoint("packed", "plugins_of_this_test:only", "quire.logits_processors")
    monkeypatch.setattr(
        importlib.metadata,
        "entry_points",
        lambda **chosen: [entry] if chosen.get("name") in (None, "packed") else [],
    )
    assert load_processors(["packed"]) == {"packed": only}
    for plugin, message in [
        ("mine=plugins_of_this_test", "must be NAME=MODULE:ATTRIBUTE"),
        ("=plugins_of_this_test:only", "must be NAME=MODULE:ATTRIBUTE"),
        ("mine=plugins_of_this_test:absent", "mine cannot be imported .* AttributeError"),
        ("mine=no_such_module:f", "mine cannot be imported .* ModuleNotFoundError"),
        ("mine=plugins_of_this_test:number", "mine is no factory"),
        ("unheard_of", "no installed package has a logits processor 'unheard_of' .*packed"),
    ]:
        with pytest.raises(ConfigError, match=message) as caught:
            load_processors([plugin])
        assert caught.value.param == "logits_processors"
    with pytest.raises(ConfigError, match="'mine' twice"):
        registered_names(["mine=a:b", "mine=c:d"])
