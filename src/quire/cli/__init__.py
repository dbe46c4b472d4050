"""The `quire` command: argument parsing, terminal input and output, exit codes. No engine logic lives here.

Only `main` and `flags` are imported before a command is chosen; a command imports what is heavy when it runs.
"""
