"""The options of an HTTP server; as in `config.py`, flags, YAML keys, help and docs come from them."""

from __future__ import annotations

from dataclasses import dataclass

from quire.options import option


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Server"""

    host: str = option("127.0.0.1", "Address to listen on; 0.0.0.0 is all interfaces.")
    port: int = option(8000, "Port to listen on; 0 takes a free one.", low=0, high=65535)
    api_key: list[str] = option([], "Key that clients must send as a bearer token; may be repeated.", secret=True)
    engine: str = option(
        "process",
        "Whether the engine has a process of its own or a thread of the server's.",
        choices=("process", "inline"),
    )
    ssl_certfile: str | None = option(None, "TLS certificate file; serves HTTPS together with --ssl-keyfile.")
    ssl_keyfile: str | None = option(None, "TLS key file.", secret=True)
    max_body_bytes: int = option(
        8 * 2**20, "Largest request body accepted, such as 8MiB.", low=1024, size=True, metavar="SIZE"
    )
    timeout_keep_alive: int = option(5, "Seconds an idle connection stays open.", low=1, high=3600, metavar="SECONDS")
    shutdown_timeout: float = option(
        30.0, "Seconds that running requests may go on after SIGTERM.", low=0.0, high=86400.0, metavar="SECONDS"
    )
    trust_request_chat_template: bool = option(
        False, "Let requests bring a chat template of their own; it runs sandboxed, with bounds."
    )
    ignore_unknown_fields: bool = option(False, "Ignore unknown request fields instead of refusing the request.")
    disable_fastapi_docs: bool = option(False, "Do not serve /docs and /openapi.json.")
    enable_debug_endpoints: bool = option(
        False, "Serve /debug/blocks and /debug/prefixes, which show what the KV cache holds and for whom."
    )
    disable_log_stats: bool = option(False, "Do not log throughput every ten seconds.")
    disable_access_log: bool = option(False, "Do not log each HTTP request.")
    log_level: str = option("info", "Least important messages shown.", choices=("debug", "info", "warning", "error"))
