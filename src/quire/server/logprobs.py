"""Log-probabilities as the three APIs want them: completions, chat completions, and vLLM's prompt_logprobs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quire.outputs import Logprob, TokenLogprobs
from quire.tokenizer.tokenizer import Tokenizer

LOWEST = -9999.0  # JSON has no -inf


def token_name(token_id: int, entry: Logprob, as_id: bool) -> str:
    """Return how a token is called in an answer: by its text, or as "token_id:5"."""
    return f"token_id:{token_id}" if as_id or entry.decoded_token is None else entry.decoded_token


def completion_logprobs(
    token_ids: Sequence[int],
    positions: Sequence[TokenLogprobs | None],
    offset: int,
    *,
    as_ids: bool = False,
    tokenizer: Tokenizer | None = None,
) -> tuple[dict[str, Any], int]:
    """Return the "logprobs" of a completion, and the offset behind its last token.

    Args:
        positions: per token, its entry and its alternatives; None where nothing predicts it (a prompt's first token).
        offset: characters of the text before the first of these tokens.
        tokenizer: to name tokens that have no entry.
    """
    tokens: list[str] = []
    values: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    offsets: list[int] = []
    value: float | None
    top: dict[str, float] | None
    for token_id, position in zip(token_ids, positions):
        if position is None:
            text = "" if tokenizer is None else tokenizer.token_text(token_id)
            name = f"token_id:{token_id}" if as_ids else text
            value, top = None, None
        else:
            entry = position[token_id]
            text = entry.decoded_token or ""
            name, value = token_name(token_id, entry, as_ids), max(entry.logprob, LOWEST)
            top = {}
            for other, item in position.items():  # the chosen token comes first, and keeps its name
                top.setdefault(token_name(other, item, as_ids), max(item.logprob, LOWEST))
        tokens.append(name)
        values.append(value)
        tops.append(top)
        offsets.append(offset)
        offset += len(text)
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}, offset


def chat_logprobs(
    token_ids: Sequence[int],
    positions: Sequence[TokenLogprobs],
    count: int,
    tokenizer: Tokenizer | None,
    *,
    as_ids: bool = False,
    only: Sequence[int] | None = None,
) -> dict[str, Any]:
    """Return the "logprobs" of a chat choice.

    Args:
        count: alternatives per token, the likeliest ones; -1 is all. only: token ids that are the alternatives instead.
    """

    def described(token_id: int, entry: Logprob) -> dict[str, Any]:
        raw = None if tokenizer is None else list(tokenizer.token_bytes(token_id))
        name = token_name(token_id, entry, as_ids)
        return {"token": name, "logprob": max(entry.logprob, LOWEST), "bytes": raw}

    content = []
    for token_id, position in zip(token_ids, positions):
        item = described(token_id, position[token_id])
        if only is not None:
            best = [(other, position[other]) for other in only]
        else:
            best = sorted(position.items(), key=lambda pair: pair[1].rank or 0)
            best = best if count < 0 else best[:count]
        item["top_logprobs"] = [described(other, entry) for other, entry in best]
        content.append(item)
    return {"content": content, "refusal": None}


def prompt_logprobs(positions: Sequence[TokenLogprobs | None] | None) -> list[dict[int, Any] | None] | None:
    """Return vLLM's "prompt_logprobs": per position, token id -> logprob, rank and text; None for the first."""
    if positions is None:
        return None
    return [
        None
        if position is None
        else {
            token_id: {
                "logprob": max(entry.logprob, LOWEST),
                "rank": entry.rank,
                "decoded_token": entry.decoded_token,
            }
            for token_id, entry in position.items()
        }
        for position in positions
    ]
