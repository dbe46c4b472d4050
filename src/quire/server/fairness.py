"""Shares of the fair policy that come from the file of API keys. What a share means stands in `scheduler.policy`."""

from __future__ import annotations

import dataclasses

from quire.config import EngineConfig
from quire.errors import ConfigError
from quire.server.key_file import read_keys


def with_key_weights(config: EngineConfig) -> EngineConfig:
    """Return the config with the weights of keys among the tenants'. They are read at the start only.

    Raises:
        ConfigError: the file is unusable, or its weights contradict an option.
    """
    path = config.server.api_key_file
    if path is None:
        return config
    rules = read_keys(path)
    weights = {rule.name: rule.weight for rule in rules.values() if rule.weight is not None}
    if not weights:
        return config
    if config.scheduler.scheduling_policy != "fair":
        raise ConfigError("weights in api_key_file need scheduling_policy fair", param="api_key_file")
    for name in weights:
        if name in config.scheduler.tenant_weights:
            raise ConfigError(
                f"tenant_weights contradicts api_key_file, which has a weight for {name} too", param="tenant_weights"
            )
    scheduler = dataclasses.replace(config.scheduler, tenant_weights={**config.scheduler.tenant_weights, **weights})
    return dataclasses.replace(config, scheduler=scheduler)
