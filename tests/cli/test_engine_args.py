"""`EngineArgs` on a command line of one's own, and the engines that are made of it."""

from __future__ import annotations

import argparse
import asyncio

import pytest

from quire import AsyncEngineArgs, AsyncLLMEngine, EngineArgs, LLMEngine, SamplingParams
from quire.errors import ConfigError


def parsed(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=1)
    return EngineArgs.add_cli_args(parser).parse_args(words)


def test_flags_become_options() -> None:
    args = parsed("--model", "quire-demo", "--max-num-seqs", "4", "--rounds", "3", "--trust-remote-code")
    config = EngineArgs.from_cli_args(args).create_engine_config()
    assert (config.model.model, config.scheduler.max_num_seqs) == ("quire-demo", 4)
    assert config == EngineArgs("quire-demo", max_num_seqs=4, trust_remote_code=True).create_engine_config()


def test_mistakes_are_named() -> None:
    with pytest.raises(ConfigError, match="max_num_seq; did you mean max_num_seqs"):
        EngineArgs(max_num_seq=4)


def test_an_engine_is_driven_step_by_step() -> None:
    engine = LLMEngine.from_engine_args(EngineArgs(max_model_len=128, num_threads=1, num_gpu_blocks_override=32))
    engine.add_request("0", "The king said", SamplingParams(temperature=0.0, max_tokens=4))
    last = None
    while engine.has_unfinished_requests():
        for output in engine.step():
            last = output
    engine.close()
    assert last is not None and last.finished and len(last.outputs[0].token_ids) == 4


def test_an_engine_serves_streams() -> None:
    async def main() -> list[int]:
        args = AsyncEngineArgs(max_model_len=128, num_threads=1, num_gpu_blocks_override=32)
        engine = AsyncLLMEngine.from_engine_args(args)
        try:
            params = SamplingParams(temperature=0.0, max_tokens=4)
            return [len(output.outputs[0].token_ids) async for output in engine.generate("The king said", params, "0")]
        finally:
            await engine.close()

    counts = asyncio.run(main())
    assert counts[-1] == 4 and counts == sorted(counts)
