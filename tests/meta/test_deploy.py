"""What `deploy` holds is run by nobody here: these tests hold its commands, probes and names against the code."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from quire.config import SERVER_GROUPS
from quire.options import option_fields
from tests.helpers.live_server import server_config

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
FLAGS = {item.flag for item in option_fields(SERVER_GROUPS)}


def documents(name: str) -> list[Any]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text("utf-8")))


def container() -> dict[str, Any]:
    deployment = documents("kubernetes/quire.yaml")[0]
    return deployment["spec"]["template"]["spec"]["containers"][0]  # type: ignore[no-any-return]


def commands() -> dict[str, list[str]]:
    entry, cuda = (
        re.search(r"^ENTRYPOINT (\[.*\])$", (DEPLOY / "docker" / name).read_text("utf-8"), re.MULTILINE)
        for name in ("Dockerfile", "Dockerfile.cuda")
    )
    unit = re.search(r"^ExecStart=(.*)$", (DEPLOY / "systemd/quire.service").read_text("utf-8"), re.MULTILINE)
    assert entry and cuda and unit
    compose = documents("docker/compose.yaml")[0]["services"]["quire"]["command"]
    return {
        "docker": yaml.safe_load(entry.group(1))[2:],
        "docker-cuda": yaml.safe_load(cuda.group(1))[2:],
        "compose": compose,
        "systemd": shlex.split(unit.group(1))[2:],
        "kubernetes": container()["args"],
    }


@pytest.mark.parametrize("name", ["docker", "docker-cuda", "compose", "systemd", "kubernetes"])
def test_every_flag_of_a_deployment_exists(name: str) -> None:
    given = [word for word in commands()[name] if word.startswith("--")]
    assert given
    assert set(given) <= FLAGS


def test_probes_ask_for_routes_that_need_no_key() -> None:
    from quire.server.app import build_app
    from quire.server.auth import ApiKeys
    from tests.helpers.fake_engine import fake_async_llm

    config = server_config()
    llm, _ = fake_async_llm(config=config)
    routes = build_app(llm, config).openapi()["paths"]
    probes = [container()[name]["httpGet"]["path"] for name in ("startupProbe", "readinessProbe", "livenessProbe")]
    asked = re.search(r"127\.0\.0\.1:8000(/\w+)", (DEPLOY / "docker/Dockerfile").read_text("utf-8"))
    assert asked
    for path in [*probes, asked.group(1)]:
        assert path in routes
        ApiKeys(["secret"]).check("GET", path, [])  # raises where a key is needed


def test_nobody_is_killed_before_requests_may_end() -> None:
    def shutdown(words: list[str]) -> float:
        return float(words[words.index("--shutdown-timeout") + 1])

    made = commands()
    pod = documents("kubernetes/quire.yaml")[0]["spec"]["template"]["spec"]
    sleep = pod["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod["terminationGracePeriodSeconds"] > sleep + shutdown(made["kubernetes"])
    unit = (DEPLOY / "systemd/quire.service").read_text("utf-8")
    stop = re.search(r"^TimeoutStopSec=(\d+)$", unit, re.MULTILINE)
    assert stop and int(stop.group(1)) > shutdown(made["systemd"])
    grace = documents("docker/compose.yaml")[0]["services"]["quire"]["stop_grace_period"]
    assert int(grace.rstrip("s")) > shutdown(made["compose"])


def test_every_file_that_a_container_is_given_exists() -> None:
    composed = documents("docker/compose.yaml")[0]
    mounts = [mount for service in composed["services"].values() for mount in service.get("volumes", [])]
    for mount in mounts:
        source = mount.split(":")[0]
        assert source in composed["volumes"] or (DEPLOY / "docker" / source).exists(), source
    scraped = documents("docker/prometheus.yml")[0]["scrape_configs"][0]["static_configs"][0]["targets"]
    assert [target.split(":")[0] for target in scraped] == ["quire"]
    assert set(composed["secrets"]) == {
        name for service in composed["services"].values() for name in service.get("secrets", ())
    }


def test_proxies_close_idle_connections_before_the_server_does() -> None:
    nginx = re.search(r"^ +keepalive_timeout (\d+)s;", (DEPLOY / "nginx/quire.conf").read_text("utf-8"), re.MULTILINE)
    assert nginx
    [cluster] = documents("envoy/quire.yaml")[0]["static_resources"]["clusters"]
    [options] = cluster["typed_extension_protocol_options"].values()
    envoy = options["common_http_protocol_options"]["idle_timeout"].rstrip("s")
    assert max(int(nginx.group(1)), int(envoy)) < server_config().server.timeout_keep_alive
