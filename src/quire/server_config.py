"""The options of an HTTP server; as in `config.py`, flags, YAML keys, help and docs come from them."""

from __future__ import annotations

import ipaddress
import os
import re
from dataclasses import dataclass

from quire.errors import echo
from quire.options import check_rules, option

ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[A-Za-z0-9._\[\]:-]+")
LONGEST_SOCKET_PATH = 107  # what fits into the kernel's address of a Unix socket
MEMORY_BODIES = 8  # without --data-dir all files may have so many times --max-body-bytes
TOKEN = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Server"""

    host: str = option("127.0.0.1", "Address to listen on; 0.0.0.0 for all interfaces.")
    port: int = option(8000, "Port to listen on; 0 for any free port.", low=0, high=65535)
    api_key: list[str] = option([], "API key that clients must send as a bearer token; may be repeated.", secret=True)
    engine: str = option(
        "process",
        "Run the engine in a separate process, or in a thread of the server (inline).",
        choices=("process", "inline"),
    )
    ssl_certfile: str | None = option(None, "TLS certificate file; serves HTTPS together with --ssl-keyfile.")
    ssl_keyfile: str | None = option(None, "TLS key file.", secret=True)
    max_body_bytes: int = option(
        8 * 2**20, "Largest request body accepted, such as 8MiB.", low=1024, size=True, metavar="SIZE"
    )
    timeout_keep_alive: int = option(
        75,
        "Seconds an idle connection stays open; longer than a proxy in front keeps its own.",
        low=1,
        high=3600,
        metavar="SECONDS",
    )
    shutdown_timeout: float = option(
        30.0, "Seconds that running requests may continue after SIGTERM.", low=0.0, high=86400.0, metavar="SECONDS"
    )
    trust_request_chat_template: bool = option(
        False, "Accept chat templates in requests; they run in a sandbox with limits."
    )
    ignore_unknown_fields: bool = option(False, "Ignore unknown request fields instead of rejecting the request.")
    disable_fastapi_docs: bool = option(False, "Do not serve /docs and /openapi.json.")
    disable_playground: bool = option(False, "Do not serve the playground at /.")
    enable_debug_endpoints: bool = option(
        False, "Serve /debug/blocks and /debug/prefixes, which show the contents of the KV cache and their owners."
    )
    disable_log_stats: bool = option(False, "Do not log throughput every ten seconds.")
    disable_access_log: bool = option(False, "Do not log each HTTP request.")
    log_level: str = option("info", "Lowest level of messages shown.", choices=("debug", "info", "warning", "error"))

    # Limits before the engine: time, number and origin of requests.
    max_ttft: float | None = option(
        None,
        "Respond with 503 at once to requests whose predicted time to first token exceeds this.",
        low=0.01,
        high=86400.0,
        metavar="SECONDS",
    )
    request_timeout: float | None = option(
        None,
        "Maximum time of a request, including queueing; then 504. Requests can set a lower one.",
        low=0.01,
        high=604800.0,
        metavar="SECONDS",
    )
    api_key_file: str | None = option(
        None, "File with API keys and their limits, reloaded when it changes; see docs/limits.md.", metavar="FILE"
    )
    max_connections: int | None = option(
        None,
        "Maximum number of connections; default: derived from the limit of open files. A few more may probe.",
        low=1,
        high=2**20,
    )
    max_connections_per_address: int | None = option(
        None,
        "Maximum number of connections of one client address; default: three quarters of --max-connections. "
        "X-Forwarded-For is not believed.",
        low=1,
        high=2**20,
    )
    max_receiving_bytes: int = option(
        256 * 2**20,
        "Maximum memory for request bodies that are being received, all together, such as 256MiB; then 503.",
        low=1024,
        size=True,
        metavar="SIZE",
    )
    sse_keep_alive_interval: float = option(
        15.0,
        "Seconds without an event after which a stream gets a keep-alive comment, so that proxies do not close "
        "it; 0: never.",
        low=0.0,
        high=3600.0,
        metavar="SECONDS",
    )
    ssl_ca_certs: str | None = option(None, "File with the CA certificates for client certificates.")
    ssl_cert_reqs: str = option(
        "none", "Whether client certificates are required.", choices=("none", "optional", "required")
    )
    uds: str | None = option(
        None, "Unix socket to listen on, instead of an address; only its owner can connect.", metavar="PATH"
    )
    root_path: str = option("/", "Path prefix that a reverse proxy strips.", metavar="PATH")
    allowed_origins: list[str] = option([], "Allowed CORS origin, or *; may be repeated. Default: none.")
    allowed_methods: list[str] = option([], "Allowed CORS method; may be repeated; default: GET, POST, DELETE.")
    allowed_headers: list[str] = option([], "Allowed CORS header; may be repeated; default: any.")
    allow_credentials: bool = option(False, "Allow credentials such as cookies in CORS requests.")

    # What happens when the engine dies or hangs.
    max_engine_restarts: int = option(
        3,
        "Maximum number of restarts of the engine process within a minute, not counting crashes caused by a "
        "request; 0: never. Live requests continue.",
        low=0,
        high=1000,
    )
    engine_stall_timeout: float = option(
        3.0,
        "Seconds of silence, beyond the expected duration of its work, after which an engine process is replaced.",
        low=2.0,
        high=86400.0,
        metavar="SECONDS",
    )

    api_server_count: int = option(
        1, "Number of processes that serve HTTP, all on the same engines and address.", low=1, high=64
    )
    front_stall_timeout: float = option(
        3.0,
        "Seconds after which a process that serves HTTP and does not react is replaced.",
        low=2.0,
        high=86400.0,
        metavar="SECONDS",
    )

    # Responses and conversations that are kept for later (POST /v1/responses, /v1/conversations).
    data_dir: str | None = option(
        None,
        "Folder on a local disk for what must survive restarts: stored responses and conversations, files and batches; "
        "created if there is none. Default: they are kept in memory.",
        metavar="DIR",
    )
    max_stored_responses: int = option(
        1000,
        "Maximum number of stored responses and conversations; the oldest are dropped first. 0: none.",
        low=0,
        high=2**20,
    )
    max_stored_response_bytes: int = option(
        64 * 2**20,
        "Maximum memory, or space in --data-dir, for stored responses and conversations, such as 64MiB.",
        low=0,
        size=True,
        metavar="SIZE",
    )
    stored_response_ttl: float = option(
        86400.0,
        "Seconds for which a response is stored after its end, a conversation after its last change.",
        low=1.0,
        high=2592000.0,
        metavar="SECONDS",
    )

    # Files and batches (POST /v1/files, /v1/batches, /v1/messages/batches).
    max_file_bytes: int = option(
        200 * 2**20,
        "Largest file that can be uploaded, such as 200MiB; without --data-dir it is --max-body-bytes.",
        low=1024,
        size=True,
        metavar="SIZE",
    )
    max_stored_file_bytes: int = option(
        2 * 2**30,
        "Space in --data-dir for the files and batch results of one API key, such as 2GiB; without --data-dir all keys "
        "together have 8 x --max-body-bytes.",
        low=1024,
        size=True,
        metavar="SIZE",
    )
    stored_file_ttl: float = option(
        2592000.0,
        "Seconds for which a file is kept, and a batch after its end.",
        low=1.0,
        high=31536000.0,
        metavar="SECONDS",
    )
    max_batch_concurrency: int | None = option(
        None,
        "Maximum number of batch lines that run at a time; default: a quarter of --max-num-seqs.",
        low=1,
        high=65536,
        metavar="N",
    )

    # Several models in one server.
    models: str | None = option(
        None,
        "YAML file with a list of models to serve instead of one; each has its own options, see "
        "docs/several_models.md.",
        metavar="FILE",
    )
    max_loaded_models: int | None = option(None, "Maximum number of loaded models; default: all.", low=1, high=1024)
    model_idle_timeout: float = option(
        0.0,
        "Seconds without requests after which a model releases memory until the next request; 0: never.",
        low=0.0,
        high=31536000.0,
        metavar="SECONDS",
    )
    model_idle_action: str = option(
        "sleep",
        "Memory that an idle model releases: that of the KV cache (sleep), or all of it (unload), unless the "
        "model is pinned.",
        choices=("sleep", "unload"),
    )
    model_load_timeout: float = option(
        300.0,
        "Maximum time for loading a model, and for a request to wait for it; then 503.",
        low=0.1,
        high=86400.0,
        metavar="SECONDS",
    )
    enable_admin_endpoints: bool = option(
        False, "Serve /sleep, /wake_up, /reset_prefix_cache and other admin endpoints; needs an API key."
    )
    admin_api_key: list[str] = option(
        [],
        "API key for the admin endpoints, which then accept no other key; it is not valid for other routes; may "
        "be repeated.",
        secret=True,
    )

    lora_modules: list[str] = option(
        [],
        "Adapter to serve from the start, NAME=PATH or a JSON object with name, path and base_model_name (with "
        "several models: the name of its base model); may be repeated.",
        metavar="ADAPTER",
    )

    # Logs and traces of requests.
    log_format: str = option(
        "text", "Log format: plain text lines, or one JSON object per line.", choices=("text", "json")
    )
    disable_access_log_for: list[str] = option(
        [],
        "Paths excluded from the access log, such as /health,/metrics; may be repeated. Probes are never logged.",
        metavar="PATH",
    )
    enable_log_requests: bool = option(
        False, "Log the prompts and parameters of requests, which may contain private data."
    )
    max_log_len: int | None = option(
        None, "Maximum number of logged characters and token ids of a prompt; default: 1000.", low=0, high=2**31 - 1
    )
    otlp_traces_endpoint: str | None = option(
        None,
        "OTLP endpoint for request traces, such as http://localhost:4318/v1/traces; needs quire[otel].",
        metavar="URL",
    )

    def check(self, profiled: bool = False) -> None:
        """Check what must hold between these options; raise `ConfigError` naming both.

        Args:
            profiled: whether there is a `profiler_dir`, whose routes are for admins too.
        """
        moved = [name for name, value in (("host", "127.0.0.1"), ("port", 8000)) if getattr(self, name) != value]
        without_origins = [
            name
            for name in ("allowed_methods", "allowed_headers", "allow_credentials")
            if getattr(self, name) and not self.allowed_origins
        ]
        bad_origins = [name for name in self.allowed_origins if name != "*" and not ORIGIN.fullmatch(name)]
        bad_words = [
            f"{name} must be words, got {echo(word)}"
            for name in ("allowed_methods", "allowed_headers")
            for word in getattr(self, name)
            if not TOKEN.fullmatch(word)
        ]
        guarded = self.api_key or self.api_key_file or self.admin_api_key or self.local
        rules: dict[str, object] = {
            f"uds contradicts {next(iter(moved), None)}; give one of them": self.uds is not None and moved,
            "uds contradicts ssl_certfile: a Unix socket has no TLS": (
                self.uds is not None and self.ssl_certfile is not None
            ),
            f"uds: a path may have at most {LONGEST_SOCKET_PATH} bytes": (
                self.uds is not None and len(os.fsencode(self.uds)) > LONGEST_SOCKET_PATH
            ),
            f"max_receiving_bytes must be at least max_body_bytes, {self.max_body_bytes}": (
                self.max_receiving_bytes < self.max_body_bytes
            ),
            f"api_server_count {self.api_server_count} contradicts engine inline, which runs in one process": (
                self.api_server_count > 1 and self.engine == "inline"
            ),
            "ssl_ca_certs needs ssl_certfile": self.ssl_ca_certs is not None and self.ssl_certfile is None,
            "ssl_cert_reqs (optional or required) and ssl_ca_certs need each other": (
                (self.ssl_cert_reqs != "none") != (self.ssl_ca_certs is not None)
            ),
            f"root_path must be a path such as /llm, got {echo(self.root_path)}": (
                not self.root_path.startswith("/") or "//" in self.root_path or not self.root_path.isascii()
            ),
            "max_loaded_models needs models": self.max_loaded_models is not None and self.models is None,
            "admin_api_key needs enable_admin_endpoints or profiler_dir": self.admin_api_key
            and not (self.enable_admin_endpoints or profiled),
            "admin_api_key: a key must have no blanks around it": any(key != key.strip() for key in self.admin_api_key),
            "admin_api_key and api_key must differ": set(self.admin_api_key) & set(self.api_key),
            f"enable_admin_endpoints needs api_key or admin_api_key where others reach the server, on {self.host}": (
                self.enable_admin_endpoints and not guarded
            ),
            f"profiler_dir needs api_key or admin_api_key where others reach the server, on {self.host}": (
                profiled and not guarded
            ),
            f"{next(iter(without_origins), None)} needs allowed_origins": without_origins,
            "allow_credentials contradicts allowed_origins *; name the origins": (
                self.allow_credentials and "*" in self.allowed_origins
            ),
            "allowed_origins must be * or origins such as https://example.org, got "
            f"{echo(next(iter(bad_origins), None))}": bad_origins,
            next(iter(bad_words), ""): bad_words,
        }
        check_rules(rules)

    @property
    def path_prefix(self) -> str:
        """`root_path` as it stands before paths: without a slash at its end."""
        return self.root_path.rstrip("/")

    @property
    def memory_file_bytes(self) -> int:
        """Most bytes of all files and batch results together where there is no data directory."""
        return MEMORY_BODIES * self.max_body_bytes

    @property
    def local(self) -> bool:
        """Whether only this machine reaches the server."""
        if self.uds is not None or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False
