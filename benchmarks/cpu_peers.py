"""Quire beside other engines for CPUs, on the same shapes and prompts, in turns, in one run.

Each engine is a child process with the Python of its own virtual environment. While one works, all others are stopped
with SIGSTOP, so that no spinning thread disturbs. Repetitions go round the engines; each has fresh random prompts, the
same for every engine; all generate greedily and never stop early. Medians; a gap under 15 percent means nothing.

    python benchmarks/peers/make_models.py --models FOLDER checkpoint ...      # see there
    python benchmarks/cpu_peers.py --models FOLDER --shape M2 --precision int8 \\
        --peer vllm=VENV/bin/python --peer openvino=VENV/bin/python --peer llama.cpp=VENV/bin/python \\
        --peer llama-server=PROGRAM --results FILE.json

A peer not named is looked for in the running Python. Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from common import commit_line, machine_line, print_header
from peers import servers
from peers.processes import Child, EngineFailed, foreign_load
from peers.report import OURS, print_run
from peers.workloads import MEASURES, OFFLINE, REQUESTS_PER_STREAM, SERVED, STREAM, STREAMS, WARM_UP, Workload

ENGINES = (OURS, "vllm", "openvino", "llama.cpp", "transformers")
SERVERS = (OURS, "vllm", "llama-server")
# What each engine calls the three precisions; an engine without a form of one takes no part in it.
FORMS = {
    OURS: {"bf16": "{}", "int8": "{}", "int4": "{}"},  # rounds the weights itself while it loads them
    "vllm": {"bf16": "{}", "int8": "{}-int8", "int4": "{}-int4"},
    "openvino": {"bf16": "{}-bf16.ov", "int8": "{}-int8.ov", "int4": "{}-int4.ov"},
    "llama.cpp": {"bf16": "{}-bf16.gguf", "int8": "{}-int8.gguf", "int4": "{}-int4.gguf"},
    "transformers": {"bf16": "{}"},
}
BITS = {"bf16": 16, "int8": 8, "int4": 4}
# These compute a common prefix again for every request, which takes minutes; --everything measures that too.
WITHOUT_PREFIX_CACHE = ("llama.cpp", "transformers")
LONG_START = 45.0  # seconds of starting after which an engine is not started again
SETTINGS = {
    "max_model_len": 2048,
    "max_num_seqs": 32,
    "kv_bytes": 2 << 30,
    "max_sequences": 16,  # of llama.cpp, which divides its cache among them ...
    "max_sequence_len": 1088,  # ... evenly
}


def main() -> None:
    """Measure what was asked for, and print it."""
    args = parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped"))  # so that the engines end too
    peers = find_peers(args)
    print_header("Quire and other engines on this CPU")
    results: dict[str, Any] = {"machine": machine_line(), "commit": commit_line(), "date": time.strftime("%F")}
    results |= {"threads": args.threads, "settings": SETTINGS, "scale": args.scale, "runs": []}
    logs = args.logs or Path(tempfile.mkdtemp(prefix="cpu-peers-"))
    logs.mkdir(parents=True, exist_ok=True)
    if args.scale != 1:
        print(f"All lengths times {args.scale}: a look at whether everything runs, no measurement.\n")
    say(f"engines: {', '.join(peers)}; absent: {', '.join(absent(peers)) or 'none'}; their output: {logs}")
    for shape in ("M1", "M2") if args.shape == "both" else (args.shape,):
        comparison = Comparison(args, shape, peers, logs, results)
        try:
            comparison.measure()
        finally:
            comparison.save()
            print_run(comparison.run, BITS[args.precision])


def parse_args() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, required=True, help="folder that make_models.py wrote")
    parser.add_argument("--shape", choices=("M1", "M2", "both"), default="both")
    parser.add_argument("--precision", choices=BITS, default="bf16")
    parser.add_argument("--workloads", default="W1,W2,W3,W4,W4w,W5", help="comma-separated")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--starts", type=int, default=2, help="times an engine is started, unless that takes long")
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=PYTHON", help="or llama-server=PROGRAM")
    parser.add_argument("--only", help="comma-separated engines; default: all that are found")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--allowance", type=float, default=25.0, help="seconds in a workload after which a peer rests")
    parser.add_argument("--everything", action="store_true", help="W4 also of engines without a prefix cache")
    parser.add_argument("--scale", type=float, default=1.0, help="multiplies all lengths, for a quick look")
    parser.add_argument("--results", type=Path, help="JSON file, written after each repetition")
    parser.add_argument("--logs", type=Path, help="folder for the engines' output; default: a temporary one")
    args = parser.parse_args()
    args.workloads = args.workloads.split(",")
    for name in args.workloads:
        if name not in OFFLINE and name not in SERVED:
            parser.error(f"--workloads: {name} is none of {', '.join([*OFFLINE, 'W5'])}")
    return args


def find_peers(args: argparse.Namespace) -> dict[str, str]:
    """Return the program of each engine and server that is there."""
    given = dict(item.split("=", 1) for item in args.peer)
    for name, program in given.items():
        if name not in ENGINES and name not in SERVERS:
            raise SystemExit(f"--peer {name}: none of {', '.join(dict.fromkeys((*ENGINES, *SERVERS)))}")
        if not os.access(program, os.X_OK):
            raise SystemExit(f"--peer {name}: {program} is no program")
    look = Child("look", [sys.executable, engine_script(), "look", "{}"], {}, Path(os.devnull))
    here = json.loads(look.process.communicate()[0])
    found = {name: given.get(name) or sys.executable for name in ENGINES if name in given or name in here}
    found |= {"llama-server": given["llama-server"]} if "llama-server" in given else {}
    chosen = args.only.split(",") if args.only else list(found)
    return {name: program for name, program in found.items() if name in chosen}


def absent(peers: Iterable[str]) -> list[str]:
    """Return the engines that are not there."""
    return [name for name in dict.fromkeys((*ENGINES, *SERVERS)) if name not in peers]


def engine_script() -> str:
    """Return the script that is an engine."""
    return str(Path(__file__).resolve().parent / "peers" / "engines.py")


def say(text: str) -> None:
    """Report progress."""
    print(text, file=sys.stderr, flush=True)


def environment(name: str, program: str, threads: int) -> dict[str, str]:
    """Return the environment variables of an engine; vLLM's are those its CPU guide tells to set."""
    variables = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if name != "vllm":
        return variables
    cores = sorted(os.sched_getaffinity(0))[:threads]
    libraries = [
        *Path(program).parents[1].glob("lib/libiomp5.so"),
        *Path("/usr/lib").glob("*/libtcmalloc_minimal.so.4"),
    ]
    return variables | {
        "VLLM_CPU_KVCACHE_SPACE": str(SETTINGS["kv_bytes"] >> 30),
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "LD_PRELOAD": ":".join(map(str, libraries)),
    }


class Comparison:
    """All engines on one shape in one precision."""

    def __init__(
        self, args: argparse.Namespace, shape: str, peers: dict[str, str], logs: Path, results: dict[str, Any]
    ) -> None:
        self._args = args
        self._peers = peers
        self._logs = logs
        self._results = results
        self._children: dict[str, Child] = {}
        self._servers: dict[str, servers.Server] = {}
        checkpoint = args.models / shape / "model.safetensors"
        self.run: dict[str, Any] = {
            "shape": shape,
            "precision": args.precision,
            "parameters": checkpoint.stat().st_size // 2,
            "bandwidth": 0.0,
            "engines": {},
            "servers": {},
            "workloads": {},
        }
        results["runs"].append(self.run)

    def measure(self) -> None:
        """Measure the offline workloads with all engines alive, then the servers."""
        self.run["bandwidth"] = memory_bandwidth(self._args.threads)
        offline = [name for name in OFFLINE if name in self._args.workloads]
        try:
            if offline:
                self._start_engines()
                self._warm_up()
            for name in offline:
                self._repeat(name, list(self._children), OFFLINE[name].title, self._offline_run)
        finally:
            self._close("engines")
        try:
            if "W5" in self._args.workloads:
                self._start_servers()
                for name, title in SERVED.items():
                    self._repeat(name, list(self._servers), title, self._served_run)
        finally:
            self._close("servers")

    def save(self) -> None:
        """Write everything measured so far, if a file was named."""
        if self._args.results:
            part = self._args.results.with_suffix(".part")
            part.write_text(json.dumps(self._results, indent=1))
            part.replace(self._args.results)

    def _settings(self, name: str) -> dict[str, Any] | None:
        """Return an engine's settings, or None if it has no form of this precision."""
        form = FORMS["llama.cpp" if name == "llama-server" else name].get(self._args.precision)
        if form is None:
            return None
        model = (self._args.models / form.format(self.run["shape"])).resolve()
        settings = {**SETTINGS, "threads": self._args.threads, "precision": self._args.precision}
        return settings | {"model": str(model)}

    def _spawn(self, kind: str, name: str, words: list[str]) -> Child:
        program = self._peers[name]
        log = self._logs / f"{self.run['shape']}-{self._args.precision}-{kind}-{name}.log"
        child = Child(name, words, environment(name, program, self._args.threads), log)
        self._children[name] = child
        return child

    def _start_engines(self) -> None:
        """Start one engine after the other, each to its first token."""
        for name in (name for name in ENGINES if name in self._peers):
            settings = self._settings(name)
            if settings is None:
                say(f"{name} takes no part: it has no {self._args.precision}")
                continue
            words = [self._peers[name], engine_script(), name, json.dumps(settings)]
            starts: list[float] = []
            child = self._spawn("engine", name, words)
            with self._guarded("engines", name):
                entry = child.read()
                starts.append(time.perf_counter() - child.started)
                while len(starts) < self._args.starts and sum(starts) < LONG_START:
                    child.close()
                    child = self._spawn("engine", name, words)
                    entry = child.read()
                    starts.append(time.perf_counter() - child.started)
                self._started("engines", name, entry | {"starts": starts})

    def _start_servers(self) -> None:
        for name in (name for name in SERVERS if name in self._peers):
            settings = self._settings(name)
            if settings is None:
                continue
            port = servers.free_port()
            child = self._spawn("server", name, servers.command(name, self._peers[name], port, settings))
            server = servers.Server(child, port, settings["model"])
            with self._guarded("servers", name):
                self._started("servers", name, {"starts": [server.wait()]})
                self._servers[name] = server

    def _started(self, kind: str, name: str, entry: dict[str, Any]) -> None:
        self.run[kind][name] = entry
        self._children[name].note_memory()
        self._children[name].pause()
        say(f"{self.run['shape']} {self._args.precision}: {name} started in {entry['starts'][-1]:.1f} s")
        self.save()

    def _guarded(self, kind: str, name: str) -> Guard:
        return Guard(self, kind, name)

    def drop(self, kind: str, name: str, reason: str) -> None:
        """End an engine that failed; the others go on."""
        say(f"{name} failed: {reason}")
        self.run[kind].setdefault(name, {})["failed"] = reason
        self._servers.pop(name, None)
        self._children.pop(name).close()

    def _warm_up(self) -> None:
        for name, child in list(self._children.items()):
            with self._guarded("engines", name):
                child.resume()
                for number, workload in enumerate(WARM_UP):
                    self._ask(child, workload.scaled(self._args.scale), f"warm up {number}")
                child.pause()

    def _ask(self, child: Child, workload: Workload, seed: str) -> dict[str, Any]:
        """Run a workload; check how many tokens came."""
        prompts = workload.prompts(seed)
        answer = child.ask({"prompts": prompts, "max_tokens": workload.output})
        if answer["tokens"] != workload.count * workload.output:
            raise EngineFailed(f"{child.name} generated {answer['tokens']} tokens")
        return answer

    def _repeat(
        self, workload: str, names: list[str], title: str, once: Callable[[str, str, str], dict[str, Any]]
    ) -> None:
        """Let the engines take turns at a workload."""
        kind = "servers" if workload in SERVED else "engines"
        runs: dict[str, list[dict[str, Any]]] = {name: [] for name in names if self._takes_part(workload, name)}
        self.run["workloads"][workload] = runs
        for repetition in range(self._args.repeat):
            turn = repetition % max(1, len(runs))
            for name in [*runs][turn:] + [*runs][:turn]:  # nobody always comes first
                used = sum(run["wall"] for run in runs[name])
                if name not in self._children or (name != OURS and used > self._args.allowance):
                    continue
                with self._guarded(kind, name):
                    self._children[name].resume()
                    runs[name].append(once(workload, name, f"{workload} {repetition}"))
                    self._children[name].pause()
                    self.run[kind][name]["memory"] = self._children[name].memory
                    say(f"  {workload} {repetition + 1} {name}: {describe(runs[name][-1])}")
                    self.save()

    def _takes_part(self, workload: str, name: str) -> bool:
        return self._args.everything or not (workload in ("W4", "W4w") and name in WITHOUT_PREFIX_CACHE)

    def _offline_run(self, name: str, engine: str, seed: str) -> dict[str, Any]:
        workload = OFFLINE[name].scaled(self._args.scale)
        child = self._children[engine]
        if workload.warm:
            child.ask({"prompts": workload.prompts(seed)[:1], "max_tokens": 1})
        record: dict[str, Any] = {}
        with foreign_load(child, record):
            record |= self._ask(child, workload, seed)
        return record | {"value": MEASURES[workload.measure].read(workload, record)}

    def _served_run(self, name: str, engine: str, seed: str) -> dict[str, Any]:
        workload, streams = STREAM.scaled(self._args.scale), STREAMS if name == "W5" else 1
        server = self._servers[engine]
        server.closed_loop(workload, streams, 1, f"warm up {seed}") if seed.endswith(" 0") else None
        record: dict[str, Any] = {}
        with foreign_load(server.child, record):
            record |= server.closed_loop(workload, streams, REQUESTS_PER_STREAM, seed)
        return record

    def _close(self, kind: str) -> None:
        for name, child in list(self._children.items()):
            child.close()
            self.run[kind].setdefault(name, {})["memory"] = child.memory
        self._children.clear()
        self._servers.clear()


class Guard:
    """An engine that fails within is dropped from the comparison; the others go on."""

    def __init__(self, comparison: Comparison, kind: str, name: str) -> None:
        self._comparison, self._kind, self._name = comparison, kind, name

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        failed = isinstance(error, (EngineFailed, OSError))
        if failed:
            self._comparison.drop(self._kind, self._name, str(error))
        return failed


def describe(record: dict[str, Any]) -> str:
    """Return the figures of one run in a line."""
    return ", ".join(f"{key} {value:.4g}" for key, value in record.items() if isinstance(value, float))


def memory_bandwidth(threads: int) -> float:
    """Return the bytes a second that `threads` threads read from memory together: the best of some passes."""
    import numpy as np

    arrays = [np.zeros(1 << 26, np.float32) + index for index in range(threads)]
    best = 0.0
    for _ in range(8):
        workers = [threading.Thread(target=array.max) for array in arrays]
        started = time.perf_counter()
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        best = max(best, sum(array.nbytes for array in arrays) / (time.perf_counter() - started))
    return best


if __name__ == "__main__":
    main()
