"""Certificates for tests of TLS, made by openssl."""

from __future__ import annotations

import subprocess
from pathlib import Path


def certify(folder: Path, name: str, ca: tuple[Path, Path] | None = None) -> tuple[Path, Path]:
    """Make a certificate for localhost, signed by itself or by `ca`; return it and its key."""
    folder.mkdir(exist_ok=True)
    cert, key = folder / "cert.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    command += ["-days", "2", "-subj", f"/CN={name}", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    if ca is not None:
        command += ["-CA", str(ca[0]), "-CAkey", str(ca[1]), "-addext", "basicConstraints=critical,CA:FALSE"]
    subprocess.run([*command, "-keyout", str(key), "-out", str(cert)], check=True, capture_output=True)
    return cert, key
