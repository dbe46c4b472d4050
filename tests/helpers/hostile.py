"""Clients that mean harm, in a process of their own: garbage, floods, bombs, and requests that never end.

Each attack ends by itself or is ended by the server, whose limits of time apply. None of them asks for more generation
than an honest request may, so that what suffers beside them suffers from a lack of defence.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import functools
import json
import random
import sys
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

from tests.helpers.background import change_priority, report, stop_requested
from tests.helpers.wire import HOST, JSON, STATUS, send

PATIENCE = 60.0  # seconds until the server must have ended a connection
SIZE = 8 * 2**20 - 1000
USER = '{"role":"user","content":"a"}'
BOMBS = [
    "{% for i in range(100000) %}{% for j in range(100000) %}{{ i * j }}{% endfor %}{% endfor %}",
    "{{ 'a' * 1000000000 }}",
    "{{ range(1000000000) | list }}",
    "{{ 300000000 | round(300000000, 'ceil') }}",
    "{% set x = [1] %}{% for i in range(64) %}{% set x = x + x %}{% endfor %}{{ x == x }}",
    "{{ ('a' * 1000000) | replace('a', 'a' * 1000000) }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ messages.__class__.__mro__ }}",
]


class Target:
    """The server: its address, and a key of those that it has."""

    def __init__(self, url: str, key: str) -> None:
        parts = urlsplit(url)
        self.address = (str(parts.hostname), int(parts.port or 0))
        self.key = key.encode()

    def request(self, path: str, body: bytes, key: bytes | None = None) -> bytes:
        """Return a POST of JSON, with the server's key unless there is another."""
        return self.head(path, key) + b"Content-Length: %d\r\n\r\n" % len(body) + body

    def head(self, path: str, key: bytes | None = None) -> bytes:
        """Return its head without the end."""
        bearer = b"Authorization: Bearer %b\r\n" % (self.key if key is None else key)
        return b"POST %b HTTP/1.1\r\n" % path.encode() + HOST + JSON + bearer

    async def exchange(self, *pieces: bytes, pause: float = 0.0, most: int | None = None) -> list[bytes]:
        """Send pieces, and return the statuses of what comes until the server ends the connection.

        Args:
            pause: seconds after each piece. most: bytes of the response after which the client breaks off.
        """
        reader, writer = await asyncio.open_connection(*self.address)
        answer = b""
        sending = asyncio.ensure_future(self._send(writer, pieces, pause))
        try:
            with contextlib.suppress(OSError):
                async with asyncio.timeout(PATIENCE):
                    while (most is None or len(answer) < most) and (more := await reader.read(2**16)):
                        answer += more
        finally:
            sending.cancel()
            writer.transport.abort()
        return STATUS.findall(answer)

    async def _send(self, writer: asyncio.StreamWriter, pieces: tuple[bytes, ...], pause: float) -> None:
        with contextlib.suppress(OSError):
            for piece in pieces:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(pause)


def completion(rng: random.Random, **fields: object) -> bytes:
    """Return a small honest body."""
    return json.dumps({"model": "quire-demo", "prompt": f"{rng.random()}", "max_tokens": 20, **fields}).encode()


@functools.cache
def large_bodies() -> list[tuple[str, bytes]]:
    """Return routes and bodies of as many values as 8 MiB hold."""
    bodies = {
        "/v1/completions": [
            '"prompt":[' + ",".join(["5"] * (SIZE // 2 - 50)) + "]",
            '"prompt":[' + ",".join(["[]"] * (SIZE // 3 - 50)) + "]",
            '"prompt":[' + ",".join(["[" * 60 + "]" * 60] * (SIZE // 121 - 50)) + "]",
            ",".join([f'"k{number}":1' for number in range(500_000)]),
            '"prompt":"' + "x" * (SIZE - 99) + '","n":NaN',
        ],
        "/v1/chat/completions": [
            '"messages":[' + ",".join([USER] * 100_000) + "]",
            f'"messages":[{USER}],"tools":[' + ",".join(['{"type":"function"}'] * 100_000) + "]",
            '"messages":' + "[" * 100_000,
        ],
    }
    return [(path, f'{{"model":"quire-demo",{body}}}'.encode()) for path in bodies for body in bodies[path]]


async def garbage(target: Target, rng: random.Random) -> list[bytes]:
    """Send requests with changed bytes."""
    return (await send(target.address, rng, None, PATIENCE)).statuses


async def trailers(target: Target, rng: random.Random) -> list[bytes]:
    """End a body with megabytes of trailers, among them a key, or of chunk extensions."""
    head = target.head("/v1/completions", b"none") + b"Transfer-Encoding: chunked\r\n\r\n"
    if rng.random() < 0.5:
        more = b"Authorization: Bearer %b\r\n" % target.key
        more += b"".join([b"X-%d: %b\r\n" % (number, b"a" * 990) for number in range(1000)])
        return await target.exchange(head + b"0\r\n", *[more] * 20)
    return await target.exchange(head, *[b"1;" + b"a" * 65000 + b"\r\n \r\n"] * 300)


async def slow(target: Target, rng: random.Random) -> list[bytes]:
    """Send a head or a body a byte at a time."""
    data = target.request("/v1/completions", completion(rng))
    start = rng.choice((10, len(data) - 50))
    pieces = [data[:start], *[data[at : at + 1] for at in range(start, len(data))]]
    return await target.exchange(*pieces, pause=2.0)


async def large(target: Target, rng: random.Random) -> list[bytes]:
    """Send 8 MiB of brackets, keys, numbers or messages."""
    path, body = rng.choice(large_bodies())
    return await target.exchange(
        target.head(path) + b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(body), body
    )


async def bomb(target: Target, rng: random.Random) -> list[bytes]:
    """Send a chat template that would run or grow for ever."""
    body = {"model": "quire-demo", "messages": [{"role": "user", "content": "a"}], "chat_template": rng.choice(BOMBS)}
    data = json.dumps({**body, "max_tokens": 1}).encode()
    return await target.exchange(target.request("/v1/chat/completions", data), most=1)


async def wrong_key(target: Target, rng: random.Random) -> list[bytes]:
    """Guess keys that begin like the right one, or have bytes that no key has."""
    good = target.key
    keys = [good[:-1], good + b"a", good.upper(), b"", b"\xff" * 5000, rng.randbytes(20).hex().encode(), good[::-1]]
    return await target.exchange(*[target.request("/v1/completions", completion(rng), key) for key in keys], most=2**11)


async def abort(target: Target, rng: random.Random) -> list[bytes]:
    """Begin streams and break off."""
    data = target.request("/v1/completions", completion(rng, stream=True, ignore_eos=True))
    return await target.exchange(data, most=rng.choice((1, 500, 2000)))


async def pipeline(target: Target, rng: random.Random) -> list[bytes]:
    """Send more requests at once than may wait on a connection, and read nothing for a while."""
    count = rng.choice((20, 400))
    data = target.request("/v1/completions", completion(rng, temperature=9))
    return await target.exchange(data * count, most=2**12)


ATTACKS: list[Callable[[Target, random.Random], Awaitable[list[bytes]]]] = [
    garbage,
    trailers,
    slow,
    large,
    bomb,
    wrong_key,
    abort,
    pipeline,
]


async def attack(target: Target, rng: random.Random, per_second: float) -> dict[str, int]:
    """Begin attacks at random times until a stop is requested; return the statuses of the responses, counted."""
    counts: collections.Counter[str] = collections.Counter()
    large_bodies()

    async def one(kind: int, seed: int) -> None:
        name = ATTACKS[kind].__name__
        try:
            statuses = await ATTACKS[kind](target, random.Random(seed))
        except TimeoutError:
            counts[f"{name} never ended"] += 1
            return
        counts[name] += 1
        for status in set(statuses):
            counts[f"{name} {status.decode()}"] += 1

    async with asyncio.TaskGroup() as tasks:
        number = 0
        while not await asyncio.to_thread(stop_requested, rng.expovariate(per_second)):
            tasks.create_task(one(number % len(ATTACKS), rng.randrange(2**31)))
            number += 1
    return dict(counts)


def main() -> None:
    """Attack URL with KEY, SEED, so many times PER_SECOND."""
    url, key, seed, per_second = sys.argv[1:]
    change_priority(19)  # in earnest they have machines of their own
    report(asyncio.run(attack(Target(url, key), random.Random(seed), float(per_second))))


if __name__ == "__main__":
    main()
