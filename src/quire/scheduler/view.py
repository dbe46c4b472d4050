"""Describes a scheduler between two steps, its queues and its block manager, for `/debug/...`.

The parts that need no requests are in `kvcache.view`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from quire.errors import echo
from quire.kvcache.view import TIERS, describe_blocks, describe_disk, describe_pools, draw_blocks, map_blocks
from quire.scheduler.request import Request
from quire.scheduler.scheduler import Scheduler

QUEUES = ("running", "waiting", "swapped", "loading")


def describe(
    scheduler: Scheduler, *, tier: str = "device", start: int = 0, limit: int = 1024, tokens: bool = False
) -> dict[str, Any]:
    """Return sizes, states and waste of the pools, hit rates, the queues, and some blocks of a tier, one by one.

    Args:
        tier, start, tokens: see `describe_blocks`. limit: most blocks, and requests of each queue, to list.
    """
    kv, stats = scheduler.kv, scheduler.stats()
    requests = scheduler.requests
    num_computed = {s.sequence_id: s.num_computed_tokens for request in requests for s in request.sequences}
    return {
        "num_steps": stats.num_steps,
        **describe_pools(kv, num_computed),
        "prefix_cache": {
            "queries": stats.prefix_cache_queries,
            "hits": stats.prefix_cache_hits,
            "host_hits": stats.host_cache_hits,
            "disk_hits": stats.disk_cache_hits,
            "hit_rate": stats.prefix_cache_hits / max(stats.prefix_cache_queries, 1),
        },
        "preemptions": {
            "recompute": stats.num_preemptions - stats.num_swapped_out,
            "swap": stats.num_swapped_out,
        },
        "queues": _describe_queues(scheduler, requests, limit),
        "tier": tier,
        "blocks": describe_blocks(kv, num_computed, tier=tier, start=start, limit=limit, tokens=tokens),
    }


def describe_map(scheduler: Scheduler, *, cells: int, limit: int = 1024) -> dict[str, Any]:
    """Return what a dashboard polls: the queues, and a map of each tier that has blocks.

    `requests` lists at most `limit` of each queue, with the name of their queue and their tenant; the maps
    know their owners by the place in that list. `queues` counts all of them.

    Args:
        cells: most cells of a map, see `map_blocks`.
    """
    kv = scheduler.kv
    counts = dict.fromkeys(QUEUES, 0)
    rows: list[dict[str, Any]] = []
    request_of: dict[str, int] = {}
    for request in scheduler.requests:
        queue = _queue(request)
        counts[queue] += 1
        if counts[queue] <= limit:
            request_of.update(dict.fromkeys([s.sequence_id for s in request.sequences], len(rows)))
            progress = {
                "tenant": request.engine_request.tenant,
                "queue": queue,
                "sequences": len(request.sequences),
                "tokens_done": sum([sequence.num_computed_tokens for sequence in request.sequences]),
                "tokens_left": request.num_uncomputed_tokens,
                "tokens_generated": sum([s.num_tokens - s.num_prompt_tokens for s in request.sequences]),
                "max_tokens": request.engine_request.max_tokens * len(request.sequences),
            }
            rows.append(_summarize_request(scheduler, request) | progress)
    maps = [map_blocks(kv, request_of, tier=tier, cells=cells) for tier in TIERS]
    return {
        "num_steps": scheduler.stats().num_steps,
        "block_size": kv.block_size,
        "disk": describe_disk(kv),
        "queues": counts,
        "requests": rows,
        "maps": [item for item in maps if item["num_blocks"]],
    }


def _summarize_request(scheduler: Scheduler, request: Request) -> dict[str, Any]:
    return {
        "request_id": request.request_id,
        "prompt_tokens": request.num_prompt_tokens,
        "preemptions": request.num_preemptions,
        "blocks": scheduler.kv.num_allocated_blocks(request.sequences),
        "host_blocks": scheduler.kv.num_allocated_blocks(request.sequences, swapped=True),
    }


def _describe_queues(scheduler: Scheduler, requests: Iterable[Request], limit: int) -> dict[str, Any]:
    queues: dict[str, Any] = {name: {"num_requests": 0, "requests": []} for name in QUEUES}
    for request in requests:
        queue = queues[_queue(request)]
        queue["num_requests"] += 1
        if len(queue["requests"]) < limit:
            queue["requests"].append(_describe_request(scheduler, request))
    return queues


def _queue(request: Request) -> str:
    """Return the one of `QUEUES` that has `request`; preempted and deferred ones wait like new ones."""
    name = request.status.name.lower()
    return name if name in QUEUES else "waiting"


def _describe_request(scheduler: Scheduler, request: Request) -> dict[str, Any]:
    return _summarize_request(scheduler, request) | {
        "priority": request.engine_request.priority,
        "sequences": [
            {
                "sequence_id": sequence.sequence_id,
                "tokens_done": sequence.num_computed_tokens,
                "tokens_left": sequence.num_uncomputed_tokens,
                "blocks": scheduler.kv.num_allocated_blocks((sequence,)),
            }
            for sequence in request.sequences
        ],
    }


def draw_picture(picture: Mapping[str, Any]) -> str:
    """Return what `describe` returned as text: a line for each pool, the waste, the blocks as a grid, the requests."""
    lines = []
    for name in ("device", "host", "disk"):
        pool = dict(picture[name])
        count = pool.pop("num_blocks")
        if count:
            states = ", ".join(f"{number} {state.replace('_', ' ')}" for state, number in pool.items())
            lines.append(f"{name}: {count} blocks of {picture['block_size']} tokens: {states}")
    waste = picture["waste"]
    lines.append(
        f"waste: {waste['wasted_slots']} of {waste['reserved_slots']} slots of running sequences, "
        f"at most {waste['most_in_a_table']} in a block table"
    )
    lines.append(draw_blocks(picture["blocks"], picture["block_size"]))
    for name, queue in picture["queues"].items():
        if queue["num_requests"]:
            lines.append(f"{name}: {queue['num_requests']}")
        for request in queue["requests"]:
            done = ", ".join(f"{s['tokens_done']} done {s['tokens_left']} left" for s in request["sequences"])
            blocks = f"{request['blocks']} blocks, {request['host_blocks']} on the host"
            lines.append(f"  {echo(request['request_id'])}: {blocks}, {request['preemptions']} preemptions; {done}")
    return "\n".join(lines)
