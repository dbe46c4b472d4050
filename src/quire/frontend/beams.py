"""The result of a beam search as vLLM's `LLM.beam_search` shapes it, from the `RequestOutput` that it ends with."""

from __future__ import annotations

from quire.errors import QuireError, RequestError
from quire.outputs import BeamSearchOutput, BeamSearchSequence, CompletionOutput, RequestOutput
from quire.sampling_params import BeamSearchParams
from quire.tokenizer.tokenizer import Tokenizer


def check_beam_params(params: object) -> None:
    """Raise `RequestError` unless `params` are `BeamSearchParams`."""
    if not isinstance(params, BeamSearchParams):
        raise RequestError(
            f"params must be BeamSearchParams, got {type(params).__name__}", param="params", code="invalid_type"
        )


def beam_search_output(
    output: RequestOutput, params: BeamSearchParams, tokenizer: Tokenizer | None
) -> BeamSearchOutput:
    """Return the beams, best first. Raises what ended the search, if it did not end by itself."""
    for completion in output.outputs:
        if completion.error is not None:
            raise completion.error
        if completion.finish_reason == "abort":
            raise QuireError("the beam search was aborted", code="request_aborted")
    return BeamSearchOutput(
        [_sequence(output.prompt_token_ids, completion, params, tokenizer) for completion in output.outputs]
    )


def _sequence(
    prompt_ids: list[int], completion: CompletionOutput, params: BeamSearchParams, tokenizer: Tokenizer | None
) -> BeamSearchSequence:
    token_ids = completion.token_ids
    cum_logprob = completion.cumulative_logprob or 0.0
    stopped = completion.finish_reason == "stop"
    kept = token_ids[:-1] if stopped and not params.include_stop_str_in_output else token_ids
    tokens = prompt_ids + kept
    return BeamSearchSequence(
        tokens=tokens,
        cum_logprob=cum_logprob,
        text="" if tokenizer is None else tokenizer.decode(tokens, params.skip_special_tokens),
        finish_reason=completion.finish_reason,
        stop_reason=token_ids[-1] if stopped else None,
        score=cum_logprob / len(token_ids) ** params.length_penalty,
    )
