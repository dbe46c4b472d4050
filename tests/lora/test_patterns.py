"""Expressions of adapters match what Python's would, in a time that does not depend on how they are written."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.lora import patterns
from quire.lora.patterns import Work
from quire.lora.peft_config import MAX_WORK


class TooMuchWorkError(Exception):
    pass


def Pattern(text: str, *, ending: bool = False, steps: int = 10**7) -> patterns.Pattern:
    return patterns.Pattern(text, Work([steps], TooMuchWorkError()), ending=ending)


NAMES = ("model.layers.1.self_attn.q_proj", "model.layers.12.mlp.down_proj", "lm_head", "", "A.b-c")
PATTERNS = (
    r"model\.layers\.\d+\.self_attn\.(q|v)_proj",
    r".*\.(q_proj|down_proj)$",
    r"^(?!.*(mlp|head)).*_proj",
    r"(?:model\.)?layers\.(?P<number>[0-9]{1,2})\..*",
    r"(?i)MODEL\.LAYERS\.1\..*",
    r"(?i:a)\.[a-c]-\w",
    r"(?s)(?x) model .* q_proj  # of one layer",
    r"\S+(?<=_proj)",
    r".*\b1\b.*",
    r"\w*\W?.*?",
    r"[^.]+",
    r"(a|)*(b?){3}.*",
    r"lm_head|embed",
    r"\Alm.head\Z",
    r"^model\.layers.1\.self_attn\.q_proj$",
    r".*[a-z](?<!mlp\.[a-z]{4}_proj)",
)


@pytest.mark.parametrize("text", PATTERNS)
def test_they_match_what_python_matches(text: str) -> None:
    for name in NAMES:
        assert Pattern(text).fullmatch(name) == bool(re.fullmatch(text, name)), name
        ending = re.fullmatch(rf"(.*\.)?({text})", name) if not text.startswith("(?") or "(?!" in text else None
        if ending is not None:
            assert Pattern(text, ending=True).fullmatch(name)


PART = st.recursive(
    st.sampled_from(["a", "b", ".", "[ab]", "[^a]", r"\w", "^", "$", r"\b"]),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map(lambda pair: f"(?:{pair[0]}|{pair[1]})"),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "*?", "{0,2}", "{2}", "{1,}"])).map(
            lambda pair: f"(?:{pair[0]}){pair[1]}"
        ),
        st.tuples(st.sampled_from(["(?=", "(?!"]), inner).map(lambda pair: f"{pair[0]}{pair[1]})"),
    ),
    max_leaves=6,
)


@settings(deadline=None, max_examples=300)
@given(PART, st.text("ab.", max_size=6))
def test_random_expressions_match_what_python_matches(text: str, name: str) -> None:
    assert Pattern(text).fullmatch(name) == bool(re.fullmatch(text, name))


@pytest.mark.parametrize("text", ["(a+)+b", "((a|a)*)*b", ".*" * 500 + "x", "(a|a)" * 80 + "b", "(?:a{9999}){9999}b"])
def test_no_expression_takes_long(text: str) -> None:
    """Python would need years, or the test would be stopped."""
    assert not Pattern(text, ending=True).fullmatch("a" * 80)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("(", "missing \\)"),
        ("a)(?:b", "unbalanced"),
        ("(?<=a+)b", "fixed-width"),
        (r"(a)\1", "groupref is not supported"),
        ("x" * 2001, "more than 2000 characters"),
        ("(" * 60 + ")" * 60, "nested too deeply"),
        ("(" * 900 + ")" * 900, "recursion|nested"),
    ],
)
def test_what_is_no_expression_is_refused(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Pattern(text, ending=True)


@pytest.mark.parametrize(
    "text",
    [
        "(?i:[\\0-\U0010fffe])" * 98,
        "(?:.*(?<!x))" * 150,
        "[" + "abc" * 600 + "]*x",
        "(?:(?:(?:.*)*)*)*" * 110,
        "(?:(?:.*){9}.){60}" * 100,
        "x" * 2000,
    ],
    ids=lambda text: text[:20],
)
def test_many_expressions_are_bounded_together(text: str) -> None:
    """For many names, too: each was fast enough, but not 2048 of them."""
    work = Work([3 * 10**5], TooMuchWorkError())
    begun = time.thread_time()
    with pytest.raises(TooMuchWorkError):
        for number in range(2048):
            pattern = patterns.Pattern(text, work, ending=True)
            for layer in range(10):
                pattern.fullmatch(f"model.layers.{layer}.self_attn.q_proj{number}")
    assert time.thread_time() - begun < 5.0  # here 0.1


def test_what_adapters_of_large_models_name_is_matched() -> None:
    work = Work([MAX_WORK], TooMuchWorkError())
    parts = (
        "self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.o_proj mlp.gate_proj mlp.up_proj mlp.down_proj"
    )
    modules = [f"model.layers.{layer}.{part}" for layer in range(126) for part in parts.split()]
    targets = patterns.Pattern(
        r"^model\.(?!vision).*layers\.\d+\.(self_attn|mlp)\.(?:q|k|v|o|gate|up|down)_proj$", work
    )
    assert all(targets.fullmatch(name) for name in modules + modules)
    work = Work([MAX_WORK], TooMuchWorkError())
    names = [patterns.Pattern(name.replace(".", r"\."), work, ending=True) for name in modules]
    assert sum(pattern.fullmatch(name) for name in modules for pattern in names) == len(modules)
