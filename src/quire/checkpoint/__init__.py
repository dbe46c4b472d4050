"""Model folders: resolving names, config.json, weight files of every format, pooling. Imports only leaf modules."""
