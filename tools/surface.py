"""Writes down everything of Quire that a user can see, as sorted JSON, to be compared before and after a change.

    python tools/surface.py [ROOT] > surface.json

It looks at the checkout ROOT (by default its own) from outside: the public names of the package, `--help` of every
command, a YAML file with every key, a running server with the built-in model, and a folder of the disk tier. Nothing
below the public names is imported, so that it runs on any version. It takes about half a minute.

Sections: `api`, `cli`, `yaml`, `routes`, `unlisted` (routes outside the description), `fields` (what each route
answers to each known field), `answers` (keys and types), `errors`, `error_messages`, `metrics`, `logs`, `plugins` and
`disk`. Texts for people only are in `error_messages` and in the help of `cli` and `metrics`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import http.client
import inspect
import json
import os
import re
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MODEL = "quire-demo"
PROMPT = "KING:"
CHAT = [{"role": "user", "content": "Say hello."}]
KEY = bytes(range(32)).hex()
DISK_RECORD = struct.Struct("<8sII16s")  # magic, slot, bytes of the header, digest of the block
DISK_HEADER = struct.Struct("<BBI")  # bytes of the block's hash, of its parent's, number of tokens
PROBE = {"surface": []}  # of no type that any simple field takes
# Fields that are known to some route, but stand in no description because they are refused by name.
REFUSED_FIELDS = """
    activation annotations audio best_of cache_salt caller container context context_management conversation
    custom_logit_processor detokenize diagnostics dimensions documents ec_transfer_params echo embed_dtype endianness
    flat_logprobs function_call functions guided_decoding_backend height images include_reasoning inference_geo
    is_3d_lora_weight kv_transfer_params load_inplace logprob_token_ids logprobs max_chunks_per_doc
    max_completion_tokens max_tokens max_tokens_per_doc mcp_servers media_io_kwargs messages mm_processor_kwargs
    modalities moderation n options output_format personality prediction prompt prompt_cache_options
    prompt_cache_retention prompt_embeds prompt_logprob_token_ids prompt_logprobs rank_fields reasoning_effort
    response_format return_prompt_text return_token_ids routed_experts_prompt_start service_tier session_id shift
    softmax speed steps store suffix system template top_logprobs trace_decode_token_ids truncate
    truncate_prompt_tokens truncation_side use_beam_search user_profile_id verbosity watermarking web_search_options
    width workspace_id unheard_of
"""
# The fields of `options` in Ollama's requests.
OLLAMA_OPTIONS = """
    temperature top_k top_p min_p typical_p repeat_penalty presence_penalty frequency_penalty seed stop mirostat
    mirostat_tau mirostat_eta num_predict num_ctx repeat_last_n tfs_z penalize_newline num_keep num_batch num_gpu
    main_gpu num_thread numa low_vram f16_kv logits_all vocab_only use_mmap use_mlock unheard_of
"""
# The smallest body that each route answers.
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": MODEL, "prompt": PROMPT, "max_tokens": 1},
    "/v1/chat/completions": {"model": MODEL, "messages": CHAT, "max_tokens": 1},
    "/v1/responses": {"model": MODEL, "input": "Say hello.", "max_output_tokens": 1},
    "/v1/responses/input_tokens": {"model": MODEL, "input": "Say hello."},
    "/v1/conversations": {},
    "/v1/conversations/{conversation_id}": {"metadata": {}},
    "/v1/conversations/{conversation_id}/items": {"items": [{"role": "user", "content": "Say hello."}]},
    "/v1/messages": {"model": MODEL, "messages": CHAT, "max_tokens": 1},
    "/v1/messages/count_tokens": {"model": MODEL, "messages": CHAT},
    "/v1/messages/batches": {
        "requests": [{"custom_id": "a", "params": {"model": MODEL, "messages": CHAT, "max_tokens": 1}}]
    },
    "/v1/batches": {"input_file_id": "file-a", "endpoint": "/v1/completions", "completion_window": "24h"},
    "/api/chat": {"model": MODEL, "messages": CHAT, "stream": False, "options": {"num_predict": 1}},
    "/api/generate": {"model": MODEL, "prompt": PROMPT, "stream": False, "options": {"num_predict": 1}},
    "/api/show": {"model": MODEL},
    "/api/embed": {"model": MODEL, "input": "a text"},
    "/api/embeddings": {"model": MODEL, "prompt": "a text"},
    "/v1/embeddings": {"model": MODEL, "input": "a text"},
    "/pooling": {"model": MODEL, "input": "a text"},
    "/classify": {"model": MODEL, "input": "a text"},
    "/rerank": {"model": MODEL, "query": "a text", "documents": ["a text"]},
    "/v1/rerank": {"model": MODEL, "query": "a text", "documents": ["a text"]},
    "/v2/rerank": {"model": MODEL, "query": "a text", "documents": ["a text"]},
    "/score": {"model": MODEL, "text_1": "a text", "text_2": "a text"},
    "/v1/score": {"model": MODEL, "text_1": "a text", "text_2": "a text"},
    "/tokenize": {"model": MODEL, "prompt": "a text"},
    "/detokenize": {"model": MODEL, "tokens": [1, 2]},
    "/v1/load_lora_adapter": {"lora_name": "a", "lora_path": "/nowhere/at/all"},
    "/v1/unload_lora_adapter": {"lora_name": "a"},
}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
MORE = {"n": 2, "logprobs": True, "top_logprobs": 1, "max_tokens": 4, "include_metrics": True, "return_token_ids": True}
# Name -> (path, changes of its body above): what answers look like.
ANSWERS: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": ("/v1/completions", {"max_tokens": 4}),
    "completion with everything": (
        "/v1/completions",
        {"max_tokens": 4, "logprobs": 1, "prompt_logprobs": 1, "echo": True, "return_token_ids": True, "n": 1}
        | {"include_metrics": True},
    ),
    "completion stream": (
        "/v1/completions",
        {"stream": True, "logprobs": 1, "max_tokens": 4, "stream_options": {"include_usage": True}},
    ),
    "beam search": ("/v1/completions", {"use_beam_search": True, "n": 2, "temperature": 0.0, "max_tokens": 3}),
    "chat": ("/v1/chat/completions", {"max_tokens": 4}),
    "chat with everything": ("/v1/chat/completions", {**MORE, "prompt_logprobs": 1}),
    "chat with metrics": ("/v1/chat/completions", {**MORE, "n": 1}),
    "chat stream": (
        "/v1/chat/completions",
        {**MORE, "stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ),
    "chat with a schema": (
        "/v1/chat/completions",
        {"max_tokens": 20, "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
    ),
    "chat with tools": ("/v1/chat/completions", {"max_tokens": 40, "tools": TOOLS, "tool_choice": "required"}),
    "plug-in": ("/v1/completions", {"logits_processors": ["surface"], "max_tokens": 2}),
    "response": ("/v1/responses", {"max_output_tokens": 4}),
    "response with log-probabilities": (
        "/v1/responses",
        {"max_output_tokens": 4, "top_logprobs": 1, "include": ["message.output_text.logprobs"]},
    ),
    "response stream": ("/v1/responses", {"max_output_tokens": 4, "stream": True}),
    "response in the background": ("/v1/responses", {"max_output_tokens": 4, "background": True}),
    "input tokens": ("/v1/responses/input_tokens", {}),
    "conversation": ("/v1/conversations", {"metadata": {"a": "b"}, "items": CHAT}),
    "message": ("/v1/messages", {"max_tokens": 4}),
    "message stream": ("/v1/messages", {"max_tokens": 4, "stream": True}),
    "message tokens": ("/v1/messages/count_tokens", {}),
    "message batch": ("/v1/messages/batches", {}),
    "ollama chat": ("/api/chat", {}),
    "ollama chat stream": ("/api/chat", {"stream": True}),
    "ollama generate": ("/api/generate", {}),
    "ollama generate raw": ("/api/generate", {"raw": True}),
    "ollama generate stream": ("/api/generate", {"stream": True}),
    "ollama without a prompt": ("/api/generate", {"prompt": ""}),
    "ollama show": ("/api/show", {}),
    "tokenize": ("/tokenize", {"return_token_strs": True}),
    "detokenize": ("/detokenize", {}),
}
PATHS = """
    / /health /healthz /livez /ping /ready /readyz /load /version /v1/models /v1/models/quire-demo /requests
    /v1/files /v1/files/file-a /v1/files/file-a/content /v1/batches /v1/batches/a /v1/messages/batches
    /debug/blocks /debug/blocks?tier=host&tokens=true&limit=3 /debug/prefixes /debug/prefixes?tokens=true
    /is_sleeping /playground/state /api/version /api/tags /api/ps /openapi.json /docs
"""
METHODS = ("GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS")
# What clients try that is not offered, or not in the description: all methods of each are tried.
UNLISTED = """
    /api/pull /api/push /api/create /api/copy /api/delete /v1/responses/compact /metrics / /playground/main.js
    /playground/state /ping /health /v1/files /v1/files/a /v1/files/a/content /v1/batches/a /v1/batches/a/cancel
    /v1/messages/batches/a /v1/messages/batches/a/cancel /v1/messages/batches/a/results
    /v1/responses/a /v1/responses/a/cancel /v1/responses/a/input_items /v1/models/a/load
    /v1/conversations/a /v1/conversations/a/items /v1/conversations/a/items/b
    /unheard/of
"""
PLUGIN = """
class Nothing:
    def __call__(self, output_token_ids, logits):
        return logits


def make(*args, **kwargs):
    return Nothing()
"""


def shape(value: Any) -> Any:
    """Return keys and types of a JSON value; the items of a list are one."""
    if isinstance(value, dict):
        return {str(name): shape(item) for name, item in sorted(value.items(), key=lambda pair: str(pair[0]))}
    if isinstance(value, list):
        return [merged([shape(item) for item in value])] if value else []
    return type(value).__name__


def merged(shapes: list[Any]) -> Any:
    """Return what the shapes of several values have in common, or the union of their types."""
    if all(isinstance(item, dict) for item in shapes):
        names = sorted({name for item in shapes for name in item})
        return {name: merged([item[name] for item in shapes if name in item]) for name in names}
    if all(isinstance(item, list) for item in shapes):
        inner = [part for item in shapes for part in item]
        return [merged(inner)] if inner else []
    texts = sorted({item if isinstance(item, str) else json.dumps(item, sort_keys=True) for item in shapes})
    return "|".join(texts)


# ---- the package and its command ----


def describe_api() -> dict[str, Any]:
    """Return every public name of the package, with signatures, fields and members."""
    import quire

    return {name: _member(getattr(quire, name), name) for name in sorted(quire.__all__)}


def _member(value: Any, name: str) -> Any:
    if not inspect.isclass(value):
        return repr(value) if name == "__version__" else _signature(value)
    members: dict[str, Any] = {"bases": [base.__name__ for base in value.__mro__[1:-1]], "signature": _signature(value)}
    for member in sorted(dir(value)):
        if member.startswith("_") and member not in ("__enter__", "__aenter__", "__exit__", "__aexit__", "__iter__"):
            continue
        found = inspect.getattr_static(value, member)
        if isinstance(found, classmethod | staticmethod):
            found = found.__func__
        if isinstance(found, property):
            members[member] = "property"
        elif inspect.isfunction(found):
            members[member] = _signature(found)
        else:
            members[member] = type(found).__name__
    fields = getattr(value, "__struct_fields__", None)
    if fields is not None:
        members["fields"] = list(fields)
    elif dataclasses.is_dataclass(value):
        members["fields"] = [item.name for item in dataclasses.fields(value)]
    return members


def _signature(value: Any) -> list[str]:
    """Return the parameters; their annotations are left out, for they may name what is not public."""
    try:
        parameters = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):
        return []
    texts = [f"{item.kind.name}: {item.replace(annotation=inspect.Parameter.empty)}" for item in parameters]
    return [re.sub(r"<function .*>", "<function>", text) for text in texts]


class Command:
    """Runs `python -m quire` of a checkout."""

    def __init__(self, root: Path, *paths: Path) -> None:
        folders = os.pathsep.join(map(str, [root / "src", *paths]))
        self._env = dict(os.environ, PYTHONPATH=folders, COLUMNS="1000", PYTHONUNBUFFERED="1")

    def start(self, *words: str, log: Path) -> subprocess.Popen[bytes]:
        """Begin a command; its output goes to a file."""
        with log.open("wb") as file:
            return subprocess.Popen(self._words(words), stdout=file, stderr=file, env=self._env)

    def run(self, *words: str) -> tuple[int, str]:
        """Return exit code and output."""
        done = subprocess.run(self._words(words), capture_output=True, text=True, env=self._env, timeout=900)
        return done.returncode, done.stdout + done.stderr

    def python(self, code: str, *words: str) -> str:
        """Return the output of a program."""
        found = subprocess.run(
            [sys.executable, "-c", code, *words], capture_output=True, text=True, env=self._env, timeout=900
        )
        if found.returncode:
            raise RuntimeError(found.stderr)
        return found.stdout

    @staticmethod
    def _words(words: tuple[str, ...]) -> list[str]:
        return [sys.executable, "-m", "quire", *words]


def describe_commands(command: Command) -> dict[str, Any]:
    """Return each command's flags with their help, in which defaults, bounds and choices stand."""
    commands: dict[str, Any] = {"": _help(command)}
    for name in _subcommands(command.run("--help")[1]):
        commands[name] = _help(command, name)
        for inner in _subcommands(command.run(name, "--help")[1]) if name == "bench" else ():
            commands[f"{name} {inner}"] = _help(command, name, inner)
    return commands


def _subcommands(text: str) -> list[str]:
    listed = re.split(r"\n  (?:COMMAND|KIND)\n", text)[-1]
    return re.findall(r"^ {4}([a-z][a-z-]*)\b", listed, re.MULTILINE)


def _help(command: Command, *words: str) -> dict[str, str]:
    flags: dict[str, str] = {}
    last = ""
    for line in command.run(*words, "--help")[1].splitlines():
        found = re.match(r"  (-.*?|[A-Z]+)(?:  +(.*))?$", line)
        if found:
            last = found[1]
            flags[last] = found[2] or ""
        elif last and line.startswith(" " * 10):
            flags[last] = f"{flags[last]} {line.strip()}".strip()
    return flags


def describe_yaml(command: Command, flags: dict[str, str], folder: Path) -> dict[str, str]:
    """Return what `--config` says to each key that a flag has, and to some that none has, if it is given a list."""
    names = sorted({re.sub(r"\[no-\]", "", name) for flag in flags for name in re.findall(r"--([][a-z0-9-]+)", flag)})
    code = """if True:
        import contextlib, io, json, sys
        from quire.cli.main import main
        found = {}
        for name in json.loads(sys.argv[2]):
            with open(sys.argv[1], "w") as file:
                file.write(name + ": [[{}]]\\nunheard_of: 1\\n")
            said = io.StringIO()
            with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
                main(["plan", "--config", sys.argv[1]])
            found[name] = said.getvalue().strip().replace(sys.argv[1], "FILE")
        print(json.dumps(found))
    """
    keys = [name.replace("-", "_") for name in names] + ["unheard_of_too"]
    return dict(json.loads(command.python(code, str(folder / "options.yaml"), json.dumps(keys))))


# ---- a server ----


class Server:
    """A running server."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self.process, self.log = process, log
        deadline = time.monotonic() + 900  # the first start compiles kernels
        while "ready url=" not in log.read_text(errors="replace"):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(log.read_text())
            time.sleep(0.05)
        port = int(re.findall(r"ready url=http://127\.0\.0\.1:(\d+)", log.read_text())[0])
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)

    def ask(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        """Return status, headers and body of an answer."""
        data = None if body is None else json.dumps(body).encode()
        given = {"Content-Type": "application/json", **(headers or {})} if body is not None else headers or {}
        for _ in range(2):
            try:
                self._connection.request(method, path, data, given)
                answer = self._connection.getresponse()
                return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
            except (http.client.HTTPException, ConnectionError):
                self._connection.close()
        raise RuntimeError(f"{method} {path} is not answered")


@contextlib.contextmanager
def serving(command: Command, log: Path, *words: str) -> Iterator[Server]:
    """Run a server while the block runs."""
    process = command.start("serve", "--port", "0", *words, log=log)
    try:
        yield Server(process, log)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def describe_answer(status: int, headers: dict[str, str], data: bytes) -> dict[str, Any]:
    """Return what a client can rely on in an answer."""
    kind = headers.get("content-type", "").partition(";")[0]
    names = [name for name in headers if name not in ("date", "content-length", "connection")]
    answer: dict[str, Any] = {"status": status, "type": kind, "headers": sorted(names)}
    if kind == "application/json":
        answer["body"] = shape(json.loads(data)) if data else None
    elif kind == "text/event-stream":
        events: dict[str, list[Any]] = {}
        for block in data.decode().strip().split("\n\n"):
            lines = dict(line.split(": ", 1) for line in block.split("\n"))
            text = lines["data"]
            if text == "[DONE]":
                answer["done"] = text
            else:
                events.setdefault(lines.get("event", "data"), []).append(shape(json.loads(text)))
        answer["events"] = {name: merged(shapes) for name, shapes in events.items()}
    elif kind == "application/x-ndjson":
        answer["lines"] = merged([shape(json.loads(line)) for line in data.splitlines()])
    return answer


def describe_server(server: Server) -> dict[str, Any]:
    """Return routes, what they say to every field, answers, errors and metrics."""
    description = json.loads(server.ask("GET", "/openapi.json")[2])
    answers: dict[str, Any] = {}
    codes: dict[str, set[str]] = {}
    last_id = ""
    for name, (path, changes) in ANSWERS.items():
        status, headers, data = server.ask("POST", path, {**BODIES[path], **changes, **_steady(path)})
        answers[name] = describe_answer(status, headers, data)
        if path == "/v1/responses" and headers.get("content-type") == "application/json":
            last_id = json.loads(data)["id"]
        if name == "conversation":
            conversation_id = json.loads(data)["id"]
        if name == "chat":
            chat_id = json.loads(data)["id"]
    for path in [
        *PATHS.split(),
        f"/requests/{chat_id}",
        f"/v1/responses/{last_id}",
        f"/v1/responses/{last_id}/input_items",
        f"/v1/conversations/{conversation_id}",
        f"/v1/conversations/{conversation_id}/items",
    ]:
        shown = path.replace(chat_id, "ID").replace(last_id, "ID").replace(conversation_id, "ID")
        answers[f"GET {shown}"] = describe_answer(*server.ask("GET", path))
    answers["GET /openapi.json"]["body"] = sorted(description)
    answers["DELETE response"] = describe_answer(*server.ask("DELETE", f"/v1/responses/{last_id}"))
    for path in ("/sleep?level=1", "/wake_up", "/reset_prefix_cache", f"/v1/models/{MODEL}/load"):
        answers[f"POST {path}"] = describe_answer(*server.ask("POST", path))
    metrics = describe_metrics(server.ask("GET", "/metrics")[2].decode())
    fields, messages = describe_fields(server, description, codes)
    unlisted = {f"{method} {path}": server.ask(method, path)[0] for path in UNLISTED.split() for method in METHODS}
    for path in UNLISTED.split():
        for method in ("GET", "POST"):
            _note_error(codes, path, *server.ask(method, path)[::2])
    return {
        "routes": description,
        "unlisted": unlisted,
        "answers": answers,
        "fields": fields,
        "error_messages": messages,
        "error_codes": {code: sorted(kinds) for code, kinds in codes.items()},
        "metrics": metrics,
    }


def _steady(path: str) -> dict[str, Any]:
    """Return what makes a route's answer the same each time."""
    if path.startswith("/v1/") and not re.search("token|batches|conversations", path):
        return {"temperature": 0.0}
    return {}


def describe_fields(
    server: Server, description: dict[str, Any], codes: dict[str, set[str]]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return how each route answers to each field of any route with a value of a wrong type: status, code, param."""
    schemas = {
        path: content["application/json"]["schema"]
        for path, operations in description["paths"].items()
        if "application/json" in (content := operations.get("post", {}).get("requestBody", {}).get("content", {}))
    }
    assert schemas.keys() == BODIES.keys(), schemas.keys() ^ BODIES.keys()
    names = sorted({name for schema in schemas.values() for name in schema["properties"]} | set(REFUSED_FIELDS.split()))
    found: dict[str, Any] = {}
    messages: dict[str, str] = {}
    for path in sorted(schemas):
        for name in names:
            status, _, data = server.ask("POST", path, {**BODIES[path], name: PROBE})
            error = _note_error(codes, path, status, data)
            found.setdefault(path, {})[name] = [status, error.get("code"), error.get("type"), error.get("param")]
            if error:
                messages[f"{path} {name}"] = error["message"]
    for name in OLLAMA_OPTIONS.split():
        status, _, data = server.ask("POST", "/api/chat", {**BODIES["/api/chat"], "options": {name: PROBE}})
        found["/api/chat"][f"options.{name}"] = [status, *_note_error(codes, "/api/chat", status, data).values()]
    return found, messages


def _note_error(codes: dict[str, set[str]], path: str, status: int, data: bytes) -> dict[str, Any]:
    """Return the error in an answer, {} if there is none, and note its code and type."""
    if status < 400 or not data:
        return {}
    error = json.loads(data).get("error", {})
    error = {"message": error} if isinstance(error, str) else error
    if "code" in error:
        codes.setdefault(error["code"], set()).add(f"{status} {error['type']}")
    return dict(error)


def describe_metrics(text: str) -> dict[str, Any]:
    """Return each metric: type, help, samples, names of labels, and the values of those that have few."""
    metrics: dict[str, Any] = {}
    for line in text.splitlines():
        if line.startswith(("# HELP ", "# TYPE ")):
            _, kind, name, rest = line.split(" ", 3)
            metrics.setdefault(name, {"samples": {}})[kind.lower()] = rest
            continue
        sample, labels = re.match(r"([A-Za-z0-9_:]+)(\{.*\})?", line).groups()  # type: ignore[union-attr]
        values = metrics[name]["samples"].setdefault(sample, {})
        for label, value in re.findall(r'([a-z_]+)="([^"]*)"', labels or ""):
            fixed = label not in ("handler", "method", "status", "model_name", "version", "num_gpu_blocks")
            values[label] = sorted({*values.get(label, ()), *([value] if fixed else [])})
    return metrics


def describe_logs(text: str) -> dict[str, Any]:
    """Return the keys of JSON lines: of those about single requests by logger, of all others together."""
    found: dict[str, list[Any]] = {}
    for line in text.splitlines():
        if line.startswith("{"):
            record = json.loads(line)
            name = record.get("logger", "")
            own = name in ("quire.access", "quire.requests")
            found.setdefault(name if own else "others", []).append(shape(record))
    return {name: merged(shapes) for name, shapes in found.items()}


# ---- the rest ----


def describe_errors(root: Path) -> dict[str, Any]:
    """Return the classes of errors, and every code that the source has as a literal."""
    import quire.errors

    classes = {}
    for name, value in vars(quire.errors).items():
        if inspect.isclass(value) and issubclass(value, quire.errors.QuireError):
            members = ("http_status", "exit_code", "error_type", "default_code")
            classes[name] = {member: getattr(value, member, None) for member in members}
            classes[name]["bases"] = [base.__name__ for base in value.__mro__[1:-1]]
    text = "\n".join(path.read_text() for path in sorted((root / "src" / "quire").rglob("*.py")))
    literals = set(re.findall(r"\b(?:default_code = |code=)\"([a-z_]+)\"", text))
    return {"classes": classes, "codes": sorted(literals)}


def describe_disk(command: Command, folder: Path) -> dict[str, Any]:
    """Return the files of the disk tier, and what they hold with a known key of hashes."""
    code = """if True:
        import sys
        from quire import LLM, SamplingParams
        with LLM(kv_disk_dir=sys.argv[1], kv_disk_space="64MiB", block_size=16, num_gpu_blocks_override=64) as llm:
            llm.generate("All the world is a stage, and all the men and women merely players. " * 2,
                         SamplingParams(max_tokens=4, temperature=0.0))
    """
    command.python(code, str(folder))
    [store] = [path for path in folder.iterdir() if path.is_dir()]
    meta = json.loads((store / "meta").read_text())
    (store / "meta").write_text(json.dumps({**meta, "hash_key": KEY}))
    for name in ("headers", "blocks"):
        os.truncate(store / name, 0)
    command.python(code, str(folder))
    headers, blocks = (store / "headers").read_bytes(), (store / "blocks").read_bytes()
    key = bytes.fromhex(KEY)
    size = DISK_RECORD.size + meta["header_nbytes"] + 16
    records = []
    for start in range(0, len(headers), size):
        record = headers[start : start + size]
        magic, slot, length, digest = DISK_RECORD.unpack_from(record)
        header = record[DISK_RECORD.size : DISK_RECORD.size + length]
        own, parent, tokens = DISK_HEADER.unpack_from(header)
        stride = -(-meta["block_nbytes"] // 4096) * 4096
        payload = blocks[slot * stride : slot * stride + meta["block_nbytes"]]
        sound = [
            hashlib.blake2b(payload, digest_size=16, key=key).digest() == digest,
            hashlib.blake2b(record[:-16], digest_size=16, key=key).digest() == record[-16:],
        ]
        records.append([magic.decode("latin-1"), length, own, parent, tokens, sound, header.hex()])
    return {
        "folder": store.name,
        "files": sorted(path.name for path in store.iterdir()),
        "meta": {name: value for name, value in meta.items() if name != "hash_key"},
        "records": sorted(records, key=str),
        "blocks": len(blocks),
    }


def main(root: Path) -> dict[str, Any]:
    """Return everything."""
    sys.path.insert(0, str(root / "src"))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plugins = folder / "plugins"
        info = plugins / "surface_plugin-1.0.dist-info"
        info.mkdir(parents=True)
        (plugins / "surface_plugin.py").write_text(PLUGIN)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: surface-plugin\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("[quire.logits_processors]\nsurface = surface_plugin:make\n")
        command = Command(root, plugins)
        commands = describe_commands(command)
        log = folder / "log"
        options = ("--enable-admin-endpoints", "--enable-debug-endpoints", "--log-format", "json")
        options += ("--enable-log-requests", "--logits-processors", "surface", "--enable-lora", "--swap-space", "64MiB")
        with serving(command, log, *options) as server:
            found = describe_server(server)
        return {
            "api": describe_api(),
            "cli": commands,
            "yaml": describe_yaml(command, commands["serve"], folder),
            "errors": {**describe_errors(root), "seen": found.pop("error_codes")},
            "plugins": {"quire.logits_processors": found["answers"]["plug-in"]["status"]},
            "logs": describe_logs(log.read_text(errors="replace")),
            "disk": describe_disk(command, folder / "disk"),
            **found,
        }


if __name__ == "__main__":
    checkout = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[1]).resolve()
    sys.stdout.write(json.dumps(main(checkout), indent=1, sort_keys=True) + "\n")
