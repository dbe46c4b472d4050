"""Proxies that stand between a program and a server: with nothing configured but the address, and as in `deploy/`."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tests.clients.programs import need

DEPLOY = Path(__file__).parents[2] / "deploy"
SECONDS = 20.0

Make = Callable[[Path, int, int], list[str]]  # from a folder, the proxy's port and the server's to a command


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def proxy(name: str, folder: Path, server_port: int) -> Iterator[str]:
    """Run a proxy until the block ends, which gets its address."""
    port = free_port()
    with (folder / "log").open("wb") as log:
        words = PROXIES[name](folder, port, server_port)
        process = subprocess.Popen(words, stdout=log, stderr=log, cwd=folder, env={**os.environ, "HOME": str(folder)})
        try:
            deadline = time.monotonic() + SECONDS
            while not _listens(port):
                assert process.poll() is None and time.monotonic() < deadline, (folder / "log").read_text()
                time.sleep(0.02)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait(SECONDS)


def _listens(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
        return True
    return False


def _replaced(text: str, replacements: Sequence[tuple[str, str]]) -> str:
    for old, new in replacements:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return text


def _nginx(folder: Path, site: str) -> list[str]:
    paths = [f"{name}_temp_path {folder}/{name};" for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")]
    user = "user root;" if os.geteuid() == 0 else ""
    text = f"daemon off; {user} pid {folder}/pid; error_log stderr;\nevents {{}}\n"
    (folder / "conf").write_text(f"{text}http {{ access_log off; {' '.join(paths)}\n{site} }}\n")
    return [need("nginx"), "-p", str(folder), "-c", str(folder / "conf"), "-e", "stderr"]


def _nginx_bare(folder: Path, port: int, server_port: int) -> list[str]:
    place = f"location / {{ proxy_pass http://127.0.0.1:{server_port}; }}"
    return _nginx(folder, f"server {{ listen 127.0.0.1:{port}; {place} }}")


def _nginx_deployed(folder: Path, port: int, server_port: int) -> list[str]:
    text = (DEPLOY / "nginx" / "quire.conf").read_text()
    addresses = [("listen 80", f"listen 127.0.0.1:{port}"), ("127.0.0.1:8000", f"127.0.0.1:{server_port}")]
    return _nginx(folder, _replaced(text, addresses))


def _envoy(folder: Path, port: int, server_port: int, *others: tuple[str, str]) -> list[str]:
    program = need("envoy")
    text = (DEPLOY / "envoy" / "quire.yaml").read_text()
    addresses = [
        ("{address: 0.0.0.0, port_value: 80}", f"{{address: 127.0.0.1, port_value: {port}}}"),
        ("{address: 127.0.0.1, port_value: 8000}", f"{{address: 127.0.0.1, port_value: {server_port}}}"),
    ]
    (folder / "conf.yaml").write_text(_replaced(text, [*addresses, *others]))
    return [program, "-c", str(folder / "conf.yaml"), "--use-dynamic-base-id", "--concurrency", "1", "-l", "warning"]


def _envoy_bare(folder: Path, port: int, server_port: int) -> list[str]:
    times = [("stream_idle_timeout: 3600s", ""), ("timeout: 0s", ""), ("idle_timeout: 60s", "{}")]
    return _envoy(folder, port, server_port, *times)


def _haproxy(folder: Path, port: int, server_port: int) -> list[str]:
    (folder / "conf").write_text(
        "defaults\n mode http\n timeout connect 5s\n timeout client 60s\n timeout server 60s\n"
        f"listen quire\n bind 127.0.0.1:{port}\n server quire 127.0.0.1:{server_port}\n"
    )
    return [need("haproxy"), "-f", str(folder / "conf")]


def _apache(folder: Path, port: int, server_port: int) -> list[str]:
    modules = ["mpm_event", "authz_core", "proxy", "proxy_http"]
    lines = [f"LoadModule {name}_module /usr/lib/apache2/modules/mod_{name}.so" for name in modules]
    lines += [f"Listen 127.0.0.1:{port}", f"PidFile {folder}/pid", "ErrorLog /dev/stderr", "ServerName localhost"]
    lines += [f"DefaultRuntimeDir {folder}", f'ProxyPass "/" "http://127.0.0.1:{server_port}/"']
    (folder / "conf").write_text("\n".join(lines) + "\n")
    return [need("apache2"), "-d", str(folder), "-f", str(folder / "conf"), "-D", "FOREGROUND"]


def _caddy(folder: Path, port: int, server_port: int) -> list[str]:
    site = f"http://127.0.0.1:{port} {{\n reverse_proxy 127.0.0.1:{server_port}\n}}\n"
    (folder / "conf").write_text(f"{{\n admin off\n auto_https off\n}}\n{site}")
    return [need("caddy"), "run", "--adapter", "caddyfile", "--config", str(folder / "conf")]


PROXIES: dict[str, Make] = {
    "nginx": _nginx_bare,
    "nginx-deployed": _nginx_deployed,
    "envoy": _envoy_bare,
    "envoy-deployed": _envoy,
    "haproxy": _haproxy,
    "apache": _apache,
    "caddy": _caddy,
}
