"""One loop, several clients: each gets the outputs of its own requests, and nobody else can end them."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from quire.config import EngineConfig
from quire.engine.core import EngineCore
from quire.engine.loop import RequestOwners, run
from quire.engine.messages import AbortRequests, Call, CallResult, EngineOutputs, ToEngine
from quire.errors import ConfigError
from quire.executor.null import NullExecutor
from quire.step import PendingOutput, SchedulerOutput, SequenceOutput, StoredBlocks, Tier, TransferOp
from tests.engine.conftest import request
from tests.helpers.loop_clients import Batch, ScriptedClients


@pytest.fixture
def core(folder: Path) -> EngineCore:
    return EngineCore(EngineConfig.from_kwargs(model=str(folder), num_gpu_blocks_override=64), executor=NullExecutor())


def served(core: EngineCore, *batches: Batch, connected: tuple[int, ...] = (0, 1)) -> ScriptedClients:
    clients = ScriptedClients(batches, connected)
    run(core, clients)
    core.call("check_integrity")
    assert core.call("stats")["num_free_blocks"] == 64
    return clients


def finished(clients: ScriptedClients, client_index: int) -> dict[str, tuple[str, list[int]]]:
    """What each sequence of a client ended with."""
    tokens: dict[str, list[int]] = {}
    reasons: dict[str, str] = {}
    for output in clients.outputs(client_index):
        tokens.setdefault(output.sequence_id, []).extend(output.new_token_ids)
        if output.finish_reason is not None:
            assert output.sequence_id not in reasons
            reasons[output.sequence_id] = output.finish_reason
    return {name: (reasons.get(name, ""), found) for name, found in tokens.items()}


@pytest.mark.parametrize("seed", range(5))
def test_several_clients_are_served_as_each_would_be_alone(core: EngineCore, seed: int) -> None:
    rng = random.Random(seed)
    sent: dict[int, list[ToEngine]] = {
        client: [request(f"{client}.{number}", rng.randint(1, 20), sequences=rng.randint(1, 3)) for number in range(10)]
        for client in range(3)
    }
    alone = {client: finished(served(core, [(client, m) for m in sent[client]]), client) for client in sent}
    everything = [(client, message) for client, messages in sent.items() for message in messages]
    rng.shuffle(everything)
    batches = []
    while everything:
        count = rng.randint(0, 4)
        batches.append(everything[:count])
        everything = everything[count:]
    together = served(core, *batches, connected=(0, 1, 2, 3))
    assert {client: finished(together, client) for client in sent} == alone
    assert [message for message in together.sent[3] if message.outputs] == []  # type: ignore[union-attr]
    for client in range(4):
        last = together.sent[client][-1]
        assert isinstance(last, EngineOutputs) and last.stats.num_running == 0, "all hear that nothing runs any more"


def test_a_client_cannot_abort_the_requests_of_another(core: EngineCore) -> None:
    ids = ["a", "b", "b-0", "b-1", "unknown"]
    clients = served(
        core,
        [(0, request("a")), (0, request("b", sequences=2)), (1, request("c"))],
        [(1, AbortRequests(ids))],
        [(0, AbortRequests(["b-0", "c"]))],
    )
    assert {name: reason for name, (reason, _) in finished(clients, 0).items()} == {
        "a": "length",
        "b-0": "",
        "b-1": "length",
    }
    assert finished(clients, 1)["c"][0] == "length"


def test_the_requests_of_a_client_that_is_gone_are_aborted_and_the_others_go_on(core: EngineCore) -> None:
    clients = served(
        core,
        [(0, request("a", 400)), (0, request("b", 400, sequences=3)), (1, request("c", 20))],
        [],
        [(0, AbortRequests(["b-1"])), (0, None)],
    )
    assert all(reason == "" and len(tokens) < 5 for reason, tokens in finished(clients, 0).values())
    assert finished(clients, 1)["c"][0] == "length"


def test_an_id_that_another_client_uses_is_refused_to_whom_it_comes_late(core: EngineCore) -> None:
    clients = served(
        core,
        [(0, request("a")), (1, request("a")), (1, AbortRequests(["a"])), (1, None)],
        [],
        [],
        [],
        [],
        [(2, request("a"))],  # free again
    )
    assert finished(clients, 0)["a"][0] == finished(clients, 2)["a"][0] == "length"
    [refused] = clients.outputs(1)
    assert refused.finish_reason == "error" and refused.error is not None and refused.error.refused
    assert refused.error.param == "request_id"


def test_calls_are_answered_to_whom_they_come_from(core: EngineCore) -> None:
    clients = served(core, [(0, Call(1, "stats")), (1, Call(1, "nonsense"))])
    [first], [second] = clients.sent[0], clients.sent[1]
    assert isinstance(first, CallResult) and first.error is None
    assert isinstance(second, CallResult) and second.error is not None
    error = second.error.exception()
    assert type(error) is ConfigError and (error.param, error.code) == ("method", "invalid_config")


def test_each_scheduled_token_is_reported_to_one_client(core: EngineCore) -> None:
    clients = served(core, [(0, request("a", 8)), (1, request("b", 12))], [(0, request("c", 3))])
    messages = [message for sent in clients.sent.values() for message in sent]
    sent = [message.stats for message in messages if isinstance(message, EngineOutputs)]
    total = core.call("stats")["num_scheduled_tokens"]
    assert sum(stats.num_new_tokens for stats in sent) == total > 23
    assert any(stats.num_new_tokens == 0 for stats in sent), "both got outputs of one step"


def test_requests_that_end_before_a_step_sees_them_are_heard_of(core: EngineCore) -> None:
    clients = served(core, [(0, request("a")), (0, AbortRequests(["a"]))], connected=(0,))
    [last] = clients.sent[0]
    assert isinstance(last, EngineOutputs) and (last.stats.num_running, last.stats.num_waiting) == (0, 0)


def test_an_output_of_a_sequence_that_its_client_has_aborted_reaches_no_other() -> None:
    owners = RequestOwners()
    owners.add(0, request("a", sequences=2))
    owners.add(1, request("b"))
    assert owners.remove(0, ["a-1"]) == ["a-1"]
    outputs = [SequenceOutput(name, [], finish_reason="error") for name in ("a-0", "a-1", "b")]
    assert owners.split(outputs) == {0: outputs[:1], 1: outputs[2:]}
    assert owners.owned_by(0) == owners.owned_by(1) == []


def test_stores_that_fail_after_the_last_step_are_reported(folder: Path) -> None:
    class SlowFullDisk(NullExecutor):
        """Each store fails after the steps that were submitted."""

        failing: list[int] = []

        def stored_blocks(self) -> StoredBlocks:
            return StoredBlocks(num_slots=64)

        def submit(self, plan: SchedulerOutput) -> PendingOutput:
            pending = super().submit(plan)
            if plan.is_empty and self.failing:
                pending.result().failed_stores = {Tier.DISK: self.failing}
                self.failing = []
            self.failing = self.failing + [each.key for each in plan.transfers if each.op is TransferOp.STORE]
            return pending

    config = EngineConfig.from_kwargs(model=str(folder), num_gpu_blocks_override=64)
    core = EngineCore(config, executor=SlowFullDisk())
    clients = served(core, [(0, request("a", prompt=tuple(range(40))))], *([[]] * 30))
    stored = [message.stats.num_stored_blocks for message in clients.sent[1] if isinstance(message, EngineOutputs)]
    assert stored == [2, 0], "all clients hear that it is idle, and that nothing is on the disk"
