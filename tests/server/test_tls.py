"""TLS: certificates that are replaced while the server runs, old versions, certificates of clients."""

from __future__ import annotations

import shutil
import socket
import ssl
import subprocess
from pathlib import Path

import httpx
import pytest

from quire.server.run import watch_files
from tests.helpers.certificates import certify
from tests.helpers.live_server import LiveServer, MakeServer

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="certificates are made by openssl")


def served_name(server: LiveServer) -> str:
    """Return the name in the certificate that a new connection is shown."""
    context = ssl._create_unverified_context()
    plain = socket.create_connection(server.listener.getsockname(), timeout=20)
    with context.wrap_socket(plain, server_hostname="localhost") as connection:
        der = connection.getpeercert(binary_form=True)
    assert der is not None
    text = subprocess.run(
        ["openssl", "x509", "-inform", "der", "-noout", "-subject"], input=der, check=True, capture_output=True
    ).stdout.decode()
    return text.strip().rpartition("=")[2].strip()


def test_a_new_certificate_is_shown_without_a_restart(make_server: MakeServer, tmp_path: Path) -> None:
    cert, key = certify(tmp_path / "a", "first")
    server = make_server(ssl_certfile=str(cert), ssl_keyfile=str(key))
    watch = watch_files(server.context.config.server, server.context.keys, server.tls)
    assert served_name(server) == "first"
    other_cert, other_key = certify(tmp_path / "b", "second")
    shutil.copy(other_cert, cert)
    watch.poll()
    assert served_name(server) == "first", "half of a pair is not taken over"
    shutil.copy(other_key, key)
    watch.poll()
    assert served_name(server) == "second"
    cert.write_text("nothing")
    watch.poll(force=True)
    assert served_name(server) == "second"
    with httpx.Client(verify=ssl.create_default_context(cafile=str(other_cert)), trust_env=False) as client:
        assert client.get(f"{server.url}/health").status_code == 200


def test_nothing_older_than_tls_1_2(make_server: MakeServer, tmp_path: Path) -> None:
    cert, key = certify(tmp_path, "old")
    server = make_server(ssl_certfile=str(cert), ssl_keyfile=str(key))
    assert server.tls is not None
    assert server.tls.minimum_version >= ssl.TLSVersion.TLSv1_2
    context = ssl._create_unverified_context()
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    plain = socket.create_connection(server.listener.getsockname(), timeout=20)
    with context.wrap_socket(plain) as connection:
        assert connection.version() == "TLSv1.2"


def test_clients_show_a_certificate(make_server: MakeServer, tmp_path: Path) -> None:
    ca = certify(tmp_path / "ca", "authority")
    cert, key = certify(tmp_path / "server", "server", ca)
    mine = certify(tmp_path / "client", "client", ca)
    server = make_server(
        ssl_certfile=str(cert), ssl_keyfile=str(key), ssl_ca_certs=str(ca[0]), ssl_cert_reqs="required"
    )
    context = ssl.create_default_context(cafile=str(ca[0]))
    with httpx.Client(verify=context, trust_env=False) as stranger, pytest.raises(httpx.HTTPError):
        stranger.get(f"{server.url}/health")
    context.load_cert_chain(*map(str, mine))
    with httpx.Client(verify=context, trust_env=False) as known:
        assert known.get(f"{server.url}/health").status_code == 200
