"""What a model folder is and says: resolving names, config.json, safetensors. Imports nothing of ours but errors."""
