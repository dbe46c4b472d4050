"""`quire serve`: checks options, files and addresses in milliseconds, then hands over to the server.

The file of `--models`, a list of models with options of their own, is read and checked here as flags are.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire import logs
from quire.cli.flags import Command, Flag, check_mapping, flags_of, load_yaml, printable
from quire.config import CONFIG_GROUPS, DEMO_MODEL, SERVER_GROUPS, AcceptedOptions, EngineConfig
from quire.engine.launch import engine_options
from quire.errors import AddressInUseError, ConfigError, ModelError, echo
from quire.kernels.gpu.probe import check_gpu, has_driver, missing_packages
from quire.options import option
from quire.server.data_dir import prepare_data_dir, remove_stale_data_dirs, temporary_data_dir
from quire.server.model_entry import ModelEntry, accepted_names, served_names
from quire.server_config import ServerConfig
from quire.supervisor.listen import listening
from quire.supervisor.supervisor import Supervisor

FLAGS = flags_of((*SERVER_GROUPS, AcceptedOptions))
KEY_VARIABLE = "VLLM_API_KEY"
PROFILER_VARIABLE = "VLLM_TORCH_PROFILER_DIR"
ROOM_FACTOR = 2  # of a file of stored responses, over their bytes: there are indices, and a log


def run(values: dict[str, Any]) -> int:
    """Check everything that needs no model, then serve until a signal stops it; return the exit code."""
    check_model_given(values)
    values = with_environment(values)
    config = EngineConfig.from_kwargs(groups=SERVER_GROUPS, **values)
    entries = None if config.server.models is None else checked_entries(Path(config.server.models), values)
    check_server(config)
    logs.setup(config.server.log_level, config.server.log_format, in_thread=True)
    remove_stale_data_dirs()
    with contextlib.ExitStack() as stack:
        if config.server.api_server_count > 1 and config.server.data_dir is None:
            # Only in files can they share stored responses and batches.
            room = ROOM_FACTOR * (config.server.max_stored_response_bytes + config.server.memory_file_bytes)
            config = config.replace(data_dir=str(stack.enter_context(temporary_data_dir(room))))
        listener = stack.enter_context(listening(config.server))
        front_args = {
            "options": config.to_kwargs(),
            "entries": None if entries is None else [entry.to_kwargs() for entry in entries],
        }
        supervisor = Supervisor(config.server, front_args, listener)
        if entries is None and config.server.engine == "process" and config.server.api_key_file is None:
            # It loads its model while the front still imports what a server needs.
            supervisor.engines.find(served_names(config)[0], engine_options(config))
        return supervisor.run()


def check_model_given(values: Mapping[str, Any]) -> None:
    """Raise `ConfigError` if a model's folder was taken for one of several names, which end where a flag begins."""
    names = values.get("served_model_name", ())
    if len(names) > 1 and "model" not in values and (names[-1] == DEMO_MODEL or Path(names[-1]).is_dir()):
        raise ConfigError(
            f"served_model_name: is {names[-1]!r} the model? Then give it before --served-model-name, which takes "
            "several names",
            param="served_model_name",
        )


def with_environment(values: dict[str, Any]) -> dict[str, Any]:
    """Return the options with what VLLM_API_KEY and VLLM_TORCH_PROFILER_DIR say, unless they say it themselves.

    Variables of vLLM that are set and change nothing get a line each. Raises `ConfigError` for an empty key.
    """
    for name in sorted(os.environ):
        if name.startswith("VLLM_") and name not in (KEY_VARIABLE, PROFILER_VARIABLE):
            print(f"{printable(name)} is set, and changes nothing here", file=sys.stderr)
    folder = os.environ.get(PROFILER_VARIABLE)
    if folder and values.get("profiler_dir") is None:
        print(f"{PROFILER_VARIABLE} is set: it is --profiler-dir", file=sys.stderr)
        values = {**values, "profiler_dir": folder}
    key = os.environ.get(KEY_VARIABLE)
    if key is None or values.get("api_key") or values.get("api_key_file") is not None:
        return values
    if not key:
        raise ConfigError(f"{KEY_VARIABLE} is empty; unset it, or give --api-key", param="api_key")
    print(f"{KEY_VARIABLE} is set: it is this server's API key", file=sys.stderr)
    return {**values, "api_key": [key]}


def checked_entries(path: Path, values: Mapping[str, Any]) -> list[ModelEntry]:
    """Return the models of the file of `--models`; `values` are options given beside it. Raises `ConfigError`."""
    entries = read_entries(path, values)
    check_room(path, entries)
    for number, entry in enumerate(entries, 1):
        check_readable({"chat_template": entry.config.model.chat_template}, f"{path}: entry {number}: ")
    return entries


def check_server(config: EngineConfig) -> None:
    """Check names, files, the address, and that there is a driver if a GPU is asked for.

    Raises:
        ConfigError: a repeated model name, a file that cannot be read, a folder that cannot be written, no driver of a
            GPU, an address that is not this machine's.
        AddressInUseError: the port is taken.
    """
    check_path(config.model.model)
    names = config.model.served_model_name
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"served_model_name: {name!r} is given twice", param="served_model_name")
    files = {
        "ssl_certfile": config.server.ssl_certfile,
        "ssl_keyfile": config.server.ssl_keyfile,
        "ssl_ca_certs": config.server.ssl_ca_certs,
        "api_key_file": config.server.api_key_file,
        "chat_template": config.model.chat_template,
    }
    check_readable(files)
    if config.server.api_key or config.server.api_key_file is not None:
        from quire.server.key_file import all_keys  # not for everybody

        all_keys(config.server.api_key, config.server.api_key_file, warn=False)  # the front warns
    if config.device.device == "cuda" and (missing_packages() or not has_driver()):
        check_gpu()  # the engine, which takes longer to start, would find the same
    if config.server.ssl_certfile is not None:
        check_certificate(config.server.ssl_certfile, config.server.ssl_keyfile)
    if config.profiler.profiler_dir is not None:
        from quire.engine.profiler import check_profiler_dir  # not for everybody

        check_profiler_dir(config.profiler.profiler_dir)
    if config.server.data_dir is not None:
        prepare_data_dir(config.server.data_dir)
    if config.server.uds is None:
        check_address(config.server.host, config.server.port)
    elif os.path.lexists(config.server.uds) and not stat.S_ISSOCK(os.lstat(config.server.uds).st_mode):
        raise ConfigError(f"uds: {config.server.uds!r} exists and is no socket", param="uds")


def check_path(model: str) -> None:
    """Raise `ModelError` if a model is named by a path where there is nothing, before the server says it listens."""
    if not model.startswith(("/", "./", "../", "~")):
        return  # a name on the hub, or a folder that the engine finds
    paths = [Path(name).expanduser() for name in (model, model.rpartition(":")[0]) if name]  # FOLDER:Q4_K_M
    if not any(map(os.path.lexists, paths)):
        raise ModelError(f"{echo(model)}: no such file or folder")


def check_readable(files: Mapping[str, str | None], where: str = "") -> None:
    """Check that files, by option, can be read. Raises `ConfigError` that begins with `where` they were named."""
    for name, path in files.items():
        if path is not None and not os.access(path, os.R_OK):
            reason = "cannot be read" if Path(path).exists() else "does not exist"
            raise ConfigError(f"{where}{name}: {path!r} {reason}", param=name)


def check_certificate(certfile: str, keyfile: str | None) -> None:
    """Load certificate and key and forget them. Raises `ConfigError`."""
    import ssl

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certfile, keyfile)
    except (ssl.SSLError, OSError) as error:
        reason = f"{certfile!r} and {keyfile!r} are no certificate and its key: {error}"
        raise ConfigError(f"ssl_certfile: {reason}", param="ssl_certfile") from None


def check_address(host: str, port: int) -> None:
    """Bind to the address and let go of it again, so that a bad one is reported before a model is loaded."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, UnicodeError) as error:
        raise ConfigError(f"host: {host!r} is not an address: {error}", param="host") from None
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise AddressInUseError(f"address already in use: {host}:{port}", param="port") from None
            reason = os.strerror(error.errno) if error.errno else str(error)
            raise ConfigError(f"cannot listen on {host}:{port}: {reason}", param="host") from None


ONE_MODEL = ("model", "served_model_name")  # options that make no sense as a default for several models


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryOptions:
    """Several models"""

    pinned: bool = option(False, "Never unload this model.")
    load: str | None = option(
        None,
        "Load it before the server is ready, or with its first request; default: demand, but start for pinned models.",
        choices=("start", "demand"),
    )


def read_entries(path: Path, defaults: Mapping[str, Any]) -> list[ModelEntry]:
    """Return the models of a file.

    Args:
        defaults: checked values of options, engine's and server's, from the command line.

    Raises:
        ConfigError: names the file, the entry and the option.
    """
    for name in ONE_MODEL:
        if name in defaults:
            raise ConfigError(f"models contradicts {name}; put it into {path}", param="models")
    loaded = load_yaml(path, "models")
    if not isinstance(loaded, list) or not loaded:
        raise ConfigError(
            f"{path} must hold a list of models, each a mapping of option names to values", param="models"
        )
    flags = flags_of((*CONFIG_GROUPS, EntryOptions))
    entries = [_entry(f"{path}: entry {number}", found, defaults, flags) for number, found in enumerate(loaded, 1)]
    _check_names(path, entries)
    return entries


def _entry(where: str, found: Any, defaults: Mapping[str, Any], flags: Sequence[Flag]) -> ModelEntry:
    if not isinstance(found, dict):
        raise ConfigError(f"{where} must be a mapping of option names to values", param="models")
    named = found.get("served_model_name", found.get("served-model-name", found.get("model")))
    if isinstance(named, str):
        where = f"{where} ({named[:100]})"
    for flag in flags_of((ServerConfig,)):
        if flag.name in found or flag.option.removeprefix("--") in found:
            raise ConfigError(f"{where}: {flag.name} is an option of the server, not of a model", param=flag.name)
    values = check_mapping(found, flags, where)
    if "model" not in values:
        raise ConfigError(f"{where}: model is missing", param="model")
    pinned, load = values.pop("pinned", False), values.pop("load", None)
    try:
        config = EngineConfig.from_kwargs(groups=SERVER_GROUPS, **{**defaults, **values})
    except ConfigError as error:
        raise ConfigError(f"{where}: {error.message}", param=error.param) from None
    return ModelEntry(config=config, pinned=pinned, at_start=load == "start" if load else pinned)


def _check_names(path: Path, entries: Sequence[ModelEntry]) -> None:
    numbers: dict[str, int] = {}
    for number, entry in enumerate(entries, 1):
        if len(set(entry.names)) < len(entry.names):
            raise ConfigError(f"{path}: entry {number}: a served_model_name is given twice", param="served_model_name")
        for name in sorted(accepted_names(entry.config)):
            if name in numbers:
                raise ConfigError(
                    f"{path}: entries {numbers[name]} and {number} are both called {name}; give one of them another "
                    "served_model_name",
                    param="served_model_name",
                )
            numbers[name] = number


def check_room(path: Path, entries: Sequence[ModelEntry]) -> None:
    """Check that the models which must be in memory may be, and leave a place for the others. Raises `ConfigError`."""
    most = entries[0].config.server.max_loaded_models or len(entries)
    pinned = sum(entry.pinned for entry in entries)
    at_start = sum(entry.at_start or entry.pinned for entry in entries)
    if at_start > most:
        raise ConfigError(
            f"{path}: {at_start} models are pinned or loaded at start; max_loaded_models allows {most}",
            param="max_loaded_models",
        )
    if pinned == most < len(entries):
        raise ConfigError(
            f"{path}: {pinned} pinned models take all of max_loaded_models {most}, so that the other "
            f"{len(entries) - pinned} could never be loaded",
            param="max_loaded_models",
        )


COMMAND = Command(
    run=run,
    flags=FLAGS,
    description="Serve a model over HTTP, with the OpenAI API. Without MODEL it serves the built-in one.",
)
