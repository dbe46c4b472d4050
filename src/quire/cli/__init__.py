"""The `quire` command: argument parsing, terminal input and output, exit codes. No engine logic lives here.

Only `main`, `options` and `parser` are imported before a command is chosen; they cost milliseconds.
"""
