"""The layers of models: linear layers that own their sharding, norms, rotary tables, attention, experts."""
