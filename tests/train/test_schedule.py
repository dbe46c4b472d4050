"""Learning rate and row length as functions of the step, and the validation of options."""

from __future__ import annotations

import itertools

import pytest

from quire.errors import ConfigError
from quire.train.config import PRESETS, TrainConfig, config_from_preset
from quire.train.trainer import learning_rate, row_length

CONFIG = TrainConfig(steps=1000, warmup_steps=100, learning_rate=1e-3, min_lr_ratio=0.1, long_fraction=0.2)


def test_rate_rises_linearly_peaks_after_warm_up_and_falls_to_the_floor() -> None:
    rates = [learning_rate(CONFIG, step) for step in range(1000)]
    assert rates[0] == pytest.approx(1e-5)
    assert rates[49] == pytest.approx(5e-4)
    assert max(rates) == rates[100] == pytest.approx(1e-3)
    assert rates[550] == pytest.approx(0.5 * (1e-3 + 1e-4))
    assert all(a >= b for a, b in itertools.pairwise(rates[100:]))
    assert rates[-1] == pytest.approx(1e-4, rel=0.01)


def test_only_the_last_part_trains_on_long_rows() -> None:
    lengths = [row_length(CONFIG, step) for step in range(1000)]
    assert lengths[:800] == [256] * 800 and lengths[800:] == [1024] * 200


def test_without_a_long_part_every_row_is_short() -> None:
    config = TrainConfig(steps=10, long_fraction=0.0)
    assert {row_length(config, step) for step in range(10)} == {256}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("steps", 0),
        ("num_kv_heads", 3),
        ("num_heads", 7),
        ("context_length", 2048),
        ("batch_tokens", 100),
        ("chat_fraction", 1.5),
        ("precision", "fp8"),
        ("tokenizer", "word"),
        ("data", "no-such-file.txt"),
    ],
)
def test_a_bad_option_is_named_with_its_value(field: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        TrainConfig(**{field: value}).validate()  # type: ignore[arg-type]
    assert f"{field}={value!r}" in caught.value.message and caught.value.param == field


def test_every_preset_is_valid_and_an_unknown_one_is_refused() -> None:
    for name in PRESETS:
        config_from_preset(name).validate()
    with pytest.raises(ConfigError, match="shakespeare-char"):
        config_from_preset("gpt5")


def test_options_override_the_preset() -> None:
    config = config_from_preset("shakespeare-char", steps=7)
    assert config.steps == 7 and config.tokenizer == "char" and config.hidden_size == 128
