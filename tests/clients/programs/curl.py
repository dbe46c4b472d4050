"""The program curl. The first arguments, up to "--", are options for it; see ../programs.py for the others."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path


def command(options: list[str], method: str, key: str, body: str) -> list[str]:
    """Return a command without addresses."""
    words = ["curl", "--silent", "--show-error", "--no-buffer", "--noproxy", "*", *options]
    words += ["--head"] if method == "HEAD" else ["--request", method]
    words += ["--header", f"Authorization: Bearer {key}"]
    if body != "-":
        words += ["--header", "Content-Type: application/json", "--data-binary", f"@{body}"]
    return words


def fetch(words: list[str], url: str, count: int) -> None:
    """Make `count` requests in one process, which keeps its connections, and print what comes."""
    with tempfile.TemporaryDirectory() as folder:
        for index in range(count):
            words += [url, "--output", str(Path(folder) / str(index))]
        told = subprocess.run(
            [*words, "--write-out", "%{http_code} %{filename_effective}\n"], check=True, capture_output=True, text=True
        )
        for line in told.stdout.splitlines():
            status, name = line.split()
            data = Path(name).read_bytes() if Path(name).exists() and "--head" not in words else b""
            sys.stdout.buffer.write(b"%s %d\n%b\n" % (status.encode(), len(data), data))


def main() -> None:
    """Do what the arguments ask for."""
    split = sys.argv.index("--")
    mode, method, url, key, body, count = sys.argv[split + 1 :]
    words = command(sys.argv[1:split], method, key, body)
    if mode in ("each", "expect"):
        fetch([*words, "--header", "Expect: 100-continue"] if mode == "expect" else words, url, int(count))
    elif mode == "together":
        fetch([*words, "--parallel"], url, int(count))
    else:
        with subprocess.Popen([*words, url], stdout=subprocess.PIPE, text=True) as running:
            assert running.stdout is not None
            if mode == "abort":
                print(next(line for line in running.stdout if line.startswith("data: ")), end="", flush=True)
            else:
                sys.stdin.buffer.raw.read(1)  # type: ignore[union-attr]
            running.terminate()
        sys.stdin.buffer.raw.read(1)  # type: ignore[union-attr]


main()
