"""Plain sentences that name the largest parts of a request's time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

MOST_SENTENCES = 6
LEAST_SHARE = 0.02  # of the whole time, that is worth a sentence
WAITS = {
    "seats": "for a place in the batch (--max-num-seqs)",
    "kv_cache": "for room in the KV cache",
    "budget": "for its share of the tokens of a step (--max-num-batched-tokens)",
    "turn": "for its turn",
}

Part = tuple[float, str]  # seconds, and the sentence about them


def explain(prompts: Sequence[Mapping[str, Any]], seconds: float, num_restarts: int) -> list[str]:
    """Return what took the time of a request, the largest part first; what went wrong is told in any case.

    Args:
        prompts: as in the timeline, one for each of the request's prompts. seconds: the whole time.
    """
    trouble: list[Part] = []
    parts: list[Part] = []
    for number, prompt in enumerate(prompts):
        name = f" (prompt {number})" if len(prompts) > 1 else ""
        trouble += [(took, text + name) for took, text in _preemptions(prompt)]
        parts += [(took, text + name) for took, text in _parts(prompt)]
    if num_restarts:
        text = f"the engine was restarted {_times(num_restarts)}; what it had computed was computed again"
        trouble.append((seconds, text))
    parts = [part for part in parts if part[0] >= LEAST_SHARE * seconds]
    told = sorted([*trouble, *parts], key=lambda part: -part[0])
    kept = told[:MOST_SENTENCES]
    kept += [part for part in trouble if part not in kept][:MOST_SENTENCES]
    return [text for _, text in kept]


def _preemptions(prompt: Mapping[str, Any]) -> Iterator[Part]:
    events = [event for event in prompt.get("events", ()) if event["event"] == "preempted"]
    for how in sorted({event["how"] for event in events}):
        alike = [event for event in events if event["how"] == how]
        lost = sum(event.get("seconds") or 0.0 for event in alike)
        counts = ", ".join([str(event["tokens"]) for event in alike])
        tokens = f"{counts} token{'' if counts == '1' else 's'}"
        back = all(event.get("seconds") is not None for event in alike)
        lasted = _time(lost) if back else f"{_time(lost)}, and not back yet" if lost else "not back yet"
        text = f"preempted {_times(len(alike))} ({how}) after {tokens}: {lasted}"
        again = sum(event.get("recomputed") or 0 for event in alike)
        if again:
            text += f", of which some to compute {_count(again)} again"
        yield lost, text
    unknown = prompt["preemptions"] - len(events)
    if unknown > 0:
        yield 0.0, f"preempted {_times(unknown)}; when is not known any more"


def _parts(prompt: Mapping[str, Any]) -> Iterator[Part]:
    events: Sequence[Mapping[str, Any]] = prompt.get("events", ())
    scheduled: Mapping[str, Any] = next((event for event in events if event["event"] == "scheduled"), {})
    grammar = prompt.get("grammar_seconds") or 0.0
    if grammar:
        yield grammar, f"waited {_time(grammar)} until its form was compiled"
    queued = (prompt["queue_seconds"] or 0.0) - grammar
    if queued > 0:
        yield queued, f"waited {_time(queued)} {WAITS.get(scheduled.get('waited_for', ''), 'in the queue')}"
    if prompt["arrived_at"] and prompt["arrived_at"] > 0:
        yield prompt["arrived_at"], f"took {_time(prompt['arrived_at'])} before it was handed to the engine's queue"
    if prompt["prefill_seconds"]:
        yield prompt["prefill_seconds"], _prefill(prompt)
    if prompt["decode_seconds"]:
        yield prompt["decode_seconds"], _decode(prompt)


def _prefill(prompt: Mapping[str, Any]) -> str:
    text = f"computing its {_count(prompt['prompt_tokens'], 'prompt token')} took {_time(prompt['prefill_seconds'])}"
    chunks = prompt.get("num_chunks") or 0
    if chunks > 1:
        text += f", in {chunks} steps"
    others = max((chunk["others"] for chunk in prompt.get("chunks", ())), default=0)
    if others:
        text += f" shared with up to {_count(others, 'other sequence')}"
    if prompt["cached_tokens"]:
        text += f"; {prompt['cached_tokens']} of them came from the cache"
    return text


def _decode(prompt: Mapping[str, Any]) -> str:
    text = f"generating {_count(prompt['completion_tokens'])} took {_time(prompt['decode_seconds'])}"
    if prompt["mean_token_seconds"]:
        text += f", {_time(prompt['mean_token_seconds'])} each"
    steps = prompt.get("steps") or {}
    beside = steps.get("mean_sequences", 1.0) - 1.0
    if beside >= 0.5:
        text += f", beside {_count(round(beside), 'other sequence')} on average"
    slowest = max(prompt.get("slowest_steps", ()), key=lambda step: step["seconds"] or 0.0, default=None)
    if slowest is not None and slowest["seconds"] and slowest["seconds"] > 3 * steps.get("p50", slowest["seconds"]):
        text += f"; the slowest step took {_time(slowest['seconds'])}"
        foreign = slowest["prompt_tokens"] - (slowest["own_tokens"] if slowest["own_tokens"] > 1 else 0)
        if foreign > 0:
            text += f", for it computed {_count(foreign, 'prompt token')} of others"
    return text


def _count(count: int, name: str = "token") -> str:
    return f"{count} {name}{'' if count == 1 else 's'}"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _time(seconds: float) -> str:
    if seconds >= 10:
        return f"{seconds:.0f} s"
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1000 * seconds:.{0 if seconds >= 0.1 else 1}f} ms"
