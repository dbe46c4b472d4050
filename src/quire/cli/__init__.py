"""The command line: one file per command, options generated from the config dataclasses."""
