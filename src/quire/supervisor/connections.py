"""`ConnectionCounter`: how many connections there are, in all and by address, and what one too many may still do."""

from __future__ import annotations

import ipaddress
import logging
import time
from collections import Counter
from dataclasses import dataclass

from quire.server_config import ServerConfig

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 65536
MIN_CONNECTIONS = 8
PROBE_CONNECTIONS = 8  # beyond the limit, for probes only
LOG_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Admission:
    """How a connection was counted.

    Attributes:
        address: what it was counted by. excess: why it is one too many, or "". may_probe: whether it may send a request
            to a probe all the same. relayed: another front forwards a request over it, and has counted the client's.
    """

    address: str
    excess: str = ""
    may_probe: bool = True
    relayed: bool = False


class ConnectionCounter:
    """Counts the connections of a server.

    Args:
        max_connections: a connection beyond it may only probe.
        max_per_address: how many a client's address may have, likewise. One network of IPv6 (/64) counts as one
            address; the peers of a Unix socket have none.
    """

    def __init__(self, max_connections: int, max_per_address: int) -> None:
        self.max_connections = max_connections
        self.max_per_address = max_per_address
        self.num_connections = 0
        self._num_excess = 0
        self._by_address: Counter[str] = Counter()
        self._last_warning = -LOG_SECONDS

    @property
    def is_crowded(self) -> bool:
        """Whether connections get scarce: more than half of them are in use."""
        return self.num_connections > self.max_connections // 2

    def add(self, peer: object) -> Admission:
        """Count a connection; `peer` is what `accept` returned with it."""
        address = address_of(peer)
        self.num_connections += 1
        self._by_address[address] += 1
        if address and self._by_address[address] > self.max_per_address:
            excess = f"there are more than {self.max_per_address} connections from this address"
        elif self.num_connections > self.max_connections:
            excess = "there are too many connections"
        else:
            return Admission(address)
        self._num_excess += 1
        now = time.monotonic()
        if now - self._last_warning >= LOG_SECONDS:
            self._last_warning = now
            logger.warning("%s; further ones are refused", excess)
        return Admission(address, excess, self._num_excess <= PROBE_CONNECTIONS)

    def remove(self, admission: Admission) -> None:
        """Count a connection no longer."""
        self.num_connections -= 1
        self._num_excess -= bool(admission.excess)
        self._by_address[admission.address] -= 1
        if not self._by_address[admission.address]:
            del self._by_address[admission.address]


def counter_of(server: ServerConfig) -> ConnectionCounter:
    """Return the counter with the limits of a server's options, or those that the limit of open files suggests."""
    most = server.max_connections or default_connections()
    return ConnectionCounter(most, server.max_connections_per_address or max(1, most * 3 // 4))


def address_of(peer: object) -> str:
    """Return what a client's connections are counted by; empty for peers of a Unix socket."""
    if not isinstance(peer, tuple):
        return ""
    host = str(peer[0])
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is None:
        return str(ipaddress.IPv6Network((address, 64), strict=False))
    return str(getattr(address, "ipv4_mapped", None) or address)


def default_connections() -> int:
    """Return how many connections the limit of open files leaves, with some files for everything else."""
    try:
        import resource
    except ImportError:  # not on every platform
        return MAX_CONNECTIONS
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if files == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return max(MIN_CONNECTIONS, min(MAX_CONNECTIONS, files - max(files // 8, 40)))
