"""One client of an engine has it for itself while the others have stepped aside."""

from __future__ import annotations

from quire.engine.isolation import Isolation
from quire.engine.messages import Alone, FromEngine, Isolate, StepAside, SteppedAside, ToEngine

ASIDE, BACK, WANTS, GIVES_UP, DONE = StepAside(True), StepAside(False), Isolate(True), Isolate(False), SteppedAside()


class World:
    """Clients 0, 1, ...; `say` returns what the engine sends after a client's message."""

    def __init__(self, num_clients: int) -> None:
        self.connected = list(range(num_clients))
        self.sent: list[tuple[int, FromEngine]] = []
        self.isolation = Isolation(lambda client, message: self.sent.append((client, message)))

    def say(self, client: int, message: ToEngine | None) -> list[tuple[int, FromEngine]]:
        self.sent.clear()
        if message is None:
            self.connected.remove(client)
        self.isolation.note(client, message)
        self.isolation.update(self.connected)
        return list(self.sent)


def test_the_only_client_is_alone_at_once() -> None:
    world = World(1)
    assert world.say(0, WANTS) == [(0, Alone())]
    assert world.say(0, GIVES_UP) == []


def test_others_have_stepped_aside_before_a_client_is_alone() -> None:
    world = World(3)
    assert world.say(1, WANTS) == [(0, ASIDE), (2, ASIDE)]
    assert world.say(0, DONE) == []
    assert world.say(2, DONE) == [(1, Alone())]
    assert world.say(1, GIVES_UP) == [(0, BACK), (2, BACK)]


def test_clients_are_alone_one_after_the_other() -> None:
    world = World(2)
    assert world.say(0, WANTS) == [(1, ASIDE)]
    assert world.say(1, WANTS) == []
    assert world.say(1, DONE) == [(0, Alone())]
    assert world.say(0, GIVES_UP) == [(0, ASIDE), (1, BACK)]
    assert world.say(0, DONE) == [(1, Alone())]
    assert world.say(1, GIVES_UP) == [(0, BACK)]


def test_a_client_goes_on_only_after_it_has_stepped_aside() -> None:
    """Else it would send requests again of which the engine still sends outputs."""
    world = World(2)
    assert world.say(0, WANTS) == [(1, ASIDE)]
    assert world.say(0, GIVES_UP) == []
    assert world.say(1, DONE) == [(1, BACK)]


def test_clients_that_are_gone_keep_nobody_waiting() -> None:
    world = World(3)
    world.say(0, WANTS)
    world.say(1, DONE)
    assert world.say(2, None) == [(0, Alone())]
    assert world.say(0, None) == [(1, BACK)]


def test_a_client_that_connects_meanwhile_steps_aside_too() -> None:
    world = World(1)
    assert world.say(0, WANTS) == [(0, Alone())]
    world.connected.append(1)
    assert world.say(0, DONE) == [(1, ASIDE)]
    assert world.say(1, DONE) == []
    assert world.say(0, GIVES_UP) == [(1, BACK)]
