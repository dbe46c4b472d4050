"""Scheduling policies decide in which order requests are served.

A policy gives each request a key when it arrives. The same key orders the waiting queue and the running requests, and
the last running one is the one that is preempted; so a preempted request returns to its place without being
remembered as a special case.
"""

from __future__ import annotations

from collections.abc import Mapping

from quire.scheduler.request import Request


class Policy:
    """Serves requests in the order of arrival; others build on it.

    Attributes:
        preempts: whether a waiting request may take the place of a running one of lower rank (higher `priority`).
        longest_prefix_first: whether, of the first waiting requests, those with more tokens in the cache go first.
    """

    preempts = False
    longest_prefix_first = False

    def key(self, request: Request, number: int) -> tuple[float, ...]:
        """Return the sort key of a request, the `number`-th to arrive; smaller is earlier."""
        return (request.engine_request.arrival_time, number)

    def admitted(self, request: Request) -> None:
        """`request` begins to run."""

    def ended(self, request: Request) -> None:
        """`request` has ended."""


class PriorityPolicy(Policy):
    """Serves lower `priority` first; among equals, first come, first served.

    With `ageing` [s] a request gains one rank for each such time that it waits, so that none waits for ever. Since
    all gain at the same rate, their order never changes and the key stays what it was at arrival.
    """

    preempts = True

    def __init__(self, ageing: float = 0.0) -> None:
        self._ageing = ageing

    def key(self, request: Request, number: int) -> tuple[float, ...]:
        if self._ageing > 0:
            return (
                request.engine_request.priority + request.engine_request.arrival_time / self._ageing,
                request.engine_request.arrival_time,
                number,
            )
        return (request.engine_request.priority, request.engine_request.arrival_time, number)


class PrefixPolicy(Policy):
    """Serves the longest cached prefix first, else in order of arrival (Zheng et al. 2024, section 3)."""

    longest_prefix_first = True


class FairPolicy(Policy):
    """Tenants share by weight; within a tenant, first come, first served.

    Start-time fair queueing (Goyal et al. 1996, section 2): a request's tag is the later of the virtual time and its
    tenant's last tag plus the cost of that request: its tokens over the tenant's weight. Generated tokens are charged
    when the request ends.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        self._weights = dict(weights)
        self._now = 0.0
        self._next: dict[str, float] = {}

    def key(self, request: Request, number: int) -> tuple[float, ...]:
        tag = max(self._now, self._next.get(request.engine_request.tenant, 0.0))
        self._charge(request.engine_request.tenant, tag, request.num_prompt_tokens)
        return (tag, request.engine_request.arrival_time, number)

    def _charge(self, tenant: str, start: float, num_tokens: int) -> None:
        self._next[tenant] = start + num_tokens / self._weights.get(tenant, 1.0)

    def admitted(self, request: Request) -> None:
        self._now = max(self._now, request.order_key[0])

    def ended(self, request: Request) -> None:
        """See `Policy.ended`; tenants whose debt is past are forgotten."""
        self._charge(
            request.engine_request.tenant,
            self._next.get(request.engine_request.tenant, self._now),
            request.num_output_tokens,
        )
        if len(self._next) > 1000:
            self._next = {tenant: tag for tenant, tag in self._next.items() if tag > self._now}


def make_policy(name: str, *, ageing: float = 0.0, weights: Mapping[str, float] | None = None) -> Policy:
    """Return a policy by its name in `scheduling_policy`; see `PriorityPolicy` and `FairPolicy` for the others."""
    if name == "priority":
        return PriorityPolicy(ageing)
    if name == "fair":
        return FairPolicy(weights or {})
    return PrefixPolicy() if name == "lpm" else Policy()
