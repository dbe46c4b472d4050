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
TOKEN = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")


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
    disable_playground: bool = option(False, "Do not serve the page at / with a chat and a live picture of the engine.")
    enable_debug_endpoints: bool = option(
        False, "Serve /debug/blocks and /debug/prefixes, which show what the KV cache holds and for whom."
    )
    disable_log_stats: bool = option(False, "Do not log throughput every ten seconds.")
    disable_access_log: bool = option(False, "Do not log each HTTP request.")
    log_level: str = option("info", "Least important messages shown.", choices=("debug", "info", "warning", "error"))

    # What stands between the socket and the engine: limits of time, number and origin.
    max_ttft: float | None = option(
        None,
        "Answer 503 at once to requests whose first token would, by the length of the queue, come later than this.",
        low=0.01,
        high=86400.0,
        metavar="SECONDS",
    )
    request_timeout: float | None = option(
        None,
        "Most seconds an answer may take, waiting included; then 504. Requests may ask for less.",
        low=0.01,
        high=604800.0,
        metavar="SECONDS",
    )
    api_key_file: str | None = option(
        None, "File of API keys and their limits, read again when it changes; see docs/limits.md.", metavar="FILE"
    )
    max_connections: int | None = option(
        None, "Most connections at a time; default: what the limit of open files leaves.", low=1, high=2**20
    )
    sse_keep_alive_interval: float = option(
        15.0,
        "Seconds without an event after which a stream gets a comment, so that no proxy takes it for dead; 0: none.",
        low=0.0,
        high=3600.0,
        metavar="SECONDS",
    )
    ssl_ca_certs: str | None = option(None, "File of the authorities that sign certificates of clients.")
    ssl_cert_reqs: str = option(
        "none", "Whether clients must have a certificate.", choices=("none", "optional", "required")
    )
    uds: str | None = option(
        None, "Unix socket to listen on, in place of an address; only its owner may connect.", metavar="PATH"
    )
    root_path: str = option("/", "Prefix of all paths that a proxy in front takes away.", metavar="PATH")
    allowed_origins: list[str] = option(
        [], "Web page origin that may use the server from a browser, or *; may be repeated. Default: none."
    )
    allowed_methods: list[str] = option(
        [], "Method that these pages may use; may be repeated; default: GET, POST, DELETE."
    )
    allowed_headers: list[str] = option([], "Header that these pages may send; may be repeated; default: any.")
    allow_credentials: bool = option(False, "Let browsers send cookies along.")

    # What happens when the engine dies or hangs.
    max_engine_restarts: int = option(
        3,
        "Most times within a minute that an engine process which died is replaced, not counting deaths for which a "
        "request is to blame; 0: never. Live requests go on.",
        low=0,
        high=1000,
    )
    engine_stall_timeout: float = option(
        3.0,
        "Seconds for which an engine process may be silent beyond what its work explains, before it is replaced.",
        low=2.0,
        high=86400.0,
        metavar="SECONDS",
    )

    # Responses that are kept for later (POST /v1/responses).
    max_stored_responses: int = option(
        1000, "Most responses kept in memory; the oldest ones go first. 0: none.", low=0, high=2**20
    )
    max_stored_response_bytes: int = option(
        64 * 2**20, "Most memory for them, such as 64MiB.", low=0, size=True, metavar="SIZE"
    )
    stored_response_ttl: float = option(
        86400.0, "Seconds after its end that a response is kept.", low=1.0, high=2592000.0, metavar="SECONDS"
    )

    # Several models in one server.
    models: str | None = option(
        None,
        "YAML file with a list of models to serve in place of one; each takes options of its own, see "
        "docs/several_models.md.",
        metavar="FILE",
    )
    max_loaded_models: int | None = option(
        None, "Most models in memory at a time; default: all there are.", low=1, high=1024
    )
    model_idle_timeout: float = option(
        0.0,
        "Seconds without requests after which a model gives up memory until the next one; 0: never.",
        low=0.0,
        high=31536000.0,
        metavar="SECONDS",
    )
    model_idle_action: str = option(
        "sleep",
        "What an idle model gives up: the KV cache's memory (sleep), or all of it (unload), but not if it is pinned.",
        choices=("sleep", "unload"),
    )
    model_load_timeout: float = option(
        300.0,
        "Seconds that loading a model may take, and that a request waits for one at most; then 503.",
        low=0.1,
        high=86400.0,
        metavar="SECONDS",
    )
    enable_admin_endpoints: bool = option(
        False, "Serve /sleep, /wake_up, /reset_prefix_cache and others that operate the models; needs an API key."
    )
    admin_api_key: list[str] = option(
        [],
        "Key for these routes, which then take no other, and which is good for nothing else; may be repeated.",
        secret=True,
    )

    lora_modules: list[str] = option(
        [],
        "Adapter that is offered from the start, NAME=PATH or a JSON object of name, path and base_model_name (with "
        "several models: that of the model it belongs to); may be repeated.",
        metavar="ADAPTER",
    )

    # What is written down of requests.
    log_format: str = option(
        "text", "Lines of the log for people, or an object of JSON each.", choices=("text", "json")
    )
    disable_access_log_for: list[str] = option(
        [],
        "Paths of which no request is logged, such as /health,/metrics; may be repeated. Probes never are.",
        metavar="PATH",
    )
    enable_log_requests: bool = option(False, "Log the prompts and parameters of requests, which may be private.")
    max_log_len: int | None = option(
        None, "Most characters and token ids of a prompt that are logged; default 1000.", low=0, high=2**31 - 1
    )
    otlp_traces_endpoint: str | None = option(
        None,
        "Send traces of requests there, such as http://localhost:4318/v1/traces; needs quire[otel].",
        metavar="URL",
    )

    def check(self) -> None:
        """Check what must hold between these options; raise `ConfigError` naming both."""
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
            "ssl_ca_certs needs ssl_certfile": self.ssl_ca_certs is not None and self.ssl_certfile is None,
            "ssl_cert_reqs (optional or required) and ssl_ca_certs need each other": (
                (self.ssl_cert_reqs != "none") != (self.ssl_ca_certs is not None)
            ),
            f"root_path must be a path such as /llm, got {echo(self.root_path)}": (
                not self.root_path.startswith("/") or "//" in self.root_path or not self.root_path.isascii()
            ),
            "max_loaded_models needs models": self.max_loaded_models is not None and self.models is None,
            "admin_api_key needs enable_admin_endpoints": self.admin_api_key and not self.enable_admin_endpoints,
            "admin_api_key: a key must have no blanks around it": any(key != key.strip() for key in self.admin_api_key),
            "admin_api_key and api_key must differ": set(self.admin_api_key) & set(self.api_key),
            f"enable_admin_endpoints needs api_key or admin_api_key where others reach the server, on {self.host}": (
                self.enable_admin_endpoints and not guarded
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
    def local(self) -> bool:
        """Whether only this machine reaches the server."""
        if self.uds is not None or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False
