"""Which adapters are in memory and in slots, and which requests wait for room there."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest

from quire.engine_request import LoRARequest
from quire.errors import ModelError
from quire.layers.lora import LoRASlots
from quire.lora.adapter import Adapter
from quire.lora.store import MAX_OVERTAKE_SECONDS, AdapterStore


class FakeSlots:
    """Records the contents of the slots."""

    base_vocab = 160

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.there: list[str | None] = [None] * num_slots
        self.fills = 0

    def fill(self, slot: int, packed: dict[Any, Any], vocab_size: int) -> None:
        self.there[slot] = packed.get("name")
        self.fills += bool(packed)


class Store(AdapterStore):
    """Makes up adapters instead of reading files, and fails for number 13; `read_numbers` has all that were read."""

    def __init__(self, num_slots: int, max_loaded: int) -> None:
        self.now, self.read_numbers, self.fake = 0.0, list[int](), FakeSlots(num_slots)
        super().__init__(cast(LoRASlots, self.fake), max_loaded, clock=lambda: self.now)

    def _read(self, request: LoRARequest) -> tuple[Adapter, Any]:
        self.read_numbers.append(request.lora_int_id)
        if request.lora_int_id == 13:
            raise ModelError("bad adapter")
        return Adapter({}, 160, 160, f"digest-{request.lora_int_id}"), {"name": request.lora_name}

    def request(self, number: int, user: str, path: str = "/x") -> None:
        self.prepare(LoRARequest(f"a{number}", number, path), user)

    def results(self) -> dict[str, str]:
        """The results of all users, polled until nothing is being read any more."""
        found: dict[str, str] = {}
        while True:
            found |= {user: result.error or result.digest for user, result in self.poll(0.5).items()}
            if self._reading is None:
                return found


@pytest.fixture
def store() -> Any:
    made = Store(num_slots=2, max_loaded=2)
    yield made
    made.close()


def test_an_adapter_is_read_once_for_all_its_users(store: Store) -> None:
    store.request(1, "a")
    store.request(1, "b")
    assert store.results() == {"a": "digest-1", "b": "digest-1"}
    store.request(1, "c")
    assert store.results() == {"c": "digest-1"} and store.read_numbers == [1]


@pytest.mark.parametrize("loaded", [False, True])
def test_another_path_under_a_number_is_refused_until_the_adapter_is_unloaded(store: Store, loaded: bool) -> None:
    store.request(1, "a", "/x/")
    if loaded:
        store.results()
    store.request(1, "b", "/y")
    store.request(1, "c", "/x")
    found = store.results()
    assert found["b"] == "lora_int_id 1 is that of the adapter in /x; another adapter must have another one"
    assert found["c"] == "digest-1"
    store.release(1, "b")
    for user in "ac":
        store.release(1, user)
    store.unload(1)
    store.request(1, "b", "/y")
    assert store.results()["b"] == "digest-1"


def test_adapters_with_users_stay_and_others_are_unloaded_by_last_use(store: Store) -> None:
    for number, user in ((1, "a"), (2, "b")):
        store.request(number, user)
    store.results()
    store.request(3, "c")
    assert store.results() == {}, "both are in use"
    store.release(2, "b")
    assert store.results() == {"c": "digest-3"}
    store.release(1, "a")
    store.release(3, "c")
    store.request(1, "d")
    store.results()
    store.release(1, "d")
    store.request(4, "e")
    store.results()
    assert store.read_numbers == [1, 2, 3, 4], "3 has gone, which was used before 1"
    store.request(1, "f")
    assert store.results() == {"f": "digest-1"} and store.read_numbers == [1, 2, 3, 4]


def test_users_of_loaded_adapters_overtake_for_a_limited_time(store: Store) -> None:
    store.request(1, "a")
    store.request(2, "b")
    store.results()
    store.request(3, "waits")
    store.request(1, "early")
    assert store.results() == {"early": "digest-1"}
    store.now = MAX_OVERTAKE_SECONDS
    store.request(1, "late")
    store.release(1, "a")
    assert store.results() == {}
    store.release(1, "early")
    assert store.results() == {"waits": "digest-3"}
    store.release(2, "b")
    assert store.results() == {"late": "digest-1"}


def test_users_that_stopped_waiting_get_no_result_and_block_no_others(store: Store) -> None:
    store.request(1, "a")
    store.request(2, "b")
    store.results()
    for number, user in ((3, "c"), (4, "d"), (3, "e")):
        store.request(number, user)
    store.release(3, "c")
    store.release(3, "e")
    store.release(1, "a")
    assert store.results() == {"d": "digest-4"} and 3 not in store.read_numbers


def test_a_failed_adapter_is_read_again(store: Store) -> None:
    store.request(13, "a")
    store.request(13, "b")
    assert store.results() == {"a": "bad adapter", "b": "bad adapter"}
    store.request(13, "c")
    assert store.results() == {"c": "bad adapter"} and store.read_numbers == [13, 13]


def test_the_adapters_of_a_step_get_the_least_recently_used_slots() -> None:
    store = Store(num_slots=2, max_loaded=4)
    for number in (1, 2, 3):
        store.request(number, f"user-{number}")
    store.results()
    np.testing.assert_array_equal(store.slots_of(np.array([1, 0, 2, 1])), [0, -1, 1, 0])
    np.testing.assert_array_equal(store.slots_of(np.array([2, 0])), [1, -1])
    np.testing.assert_array_equal(store.slots_of(np.array([0, 0])), [-1, -1])
    np.testing.assert_array_equal(store.slots_of(np.array([3, 2])), [0, 1])
    assert store.fake.there == ["a3", "a2"] and store.fake.fills == 3
    store.release(3, "user-3")
    store.unload(3)
    assert store.fake.there == [None, "a2"]
    store.unload(2)
    assert store.fake.there == [None, "a2"], "it is in use"
    store.release(2, "user-2")
    assert store.fake.there == [None, None]
    store.close()
