"""Entry point of the `quire` command: picks the command, and turns every failure into one line and an exit code.

A command is a module with a `COMMAND` (`cli.flags.Command`); only the chosen one is imported, and it imports what is
heavy after its arguments are checked.
"""

from __future__ import annotations

import importlib
import io
import os
import sys
import traceback
from collections.abc import Sequence

from quire.cli.flags import Parser, add_debug_flag, printable
from quire.errors import ConfigError, QuireError
from quire.logs import escape
from quire.options import nearest
from quire.version import __version__

COMMANDS = {
    "serve": ("quire.cli.serve", "serve a model over HTTP, with the OpenAI API"),
    "run": ("quire.cli.run", "talk to a model, or have it answer one prompt"),
    "chat": ("quire.cli.chat", "talk to a model in the terminal"),
    "generate": ("quire.cli.generate", "complete prompts from a file, standard input, or the command line"),
    "pull": ("quire.cli.pull", "download a model from the Hugging Face hub"),
    "run-batch": ("quire.cli.run_batch", "answer a file of requests in OpenAI's batch format"),
    "plan": ("quire.cli.plan", "show how much memory a model needs, and what fits beside it"),
    "convert": ("quire.cli.convert", "write a model packed for this machine, in another dtype, or quantized"),
    "verify": ("quire.cli.verify", "compare a model with transformers, layer by layer if it differs"),
    "bench": ("quire.cli.bench", "measure latency, throughput, quality, or a running server"),
    "train": ("quire.cli.train", "train a small model from scratch"),
    "collect-env": ("quire.cli.collect_env", "print what a bug report should say about this machine"),
    "simulate": ("quire.cli.simulate", "replay a trace against the scheduler in virtual time"),
}
INTERRUPTED = 130
MAX_LINE = 4096  # characters of an error
BROKEN_PIPE = 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; argparse's --help and --version raise SystemExit(0)."""
    words = list(sys.argv[1:] if argv is None else argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a character shows a question mark
    try:
        return _run(words)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader is gone (`quire generate | head`); keep Python from complaining again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except QuireError as error:
        return _report(error, error.message, error.exit_code, words)
    except MemoryError as error:
        return _report(error, f"not enough memory: {error}", QuireError.exit_code, words)
    except Exception as error:  # the boundary of the process: a bug, reported as one
        text = f"unexpected {type(error).__name__}: {error}; --debug shows where"
        return _report(error, text, QuireError.exit_code, words)


def _run(words: list[str]) -> int:
    name = next((word for word in words if not word.startswith("-")), None)
    if name is not None and name not in COMMANDS:
        raise ConfigError(f"unknown command {printable(name)}{nearest(name, list(COMMANDS))}")
    args = _build_parser(name).parse_args(words)
    if args.command is None:
        _build_parser(None).print_help(sys.stderr)
        return ConfigError.exit_code
    return int(importlib.import_module(COMMANDS[args.command][0]).COMMAND.main(args))


def _build_parser(chosen: str | None) -> Parser:
    """Build the parser with the arguments of the chosen command; the others appear by name only."""
    parser = Parser(prog="quire", description="An LLM inference and serving engine in pure Python.")
    parser.add_argument("--version", action="version", version=f"quire {__version__}")
    add_debug_flag(parser)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for name, (module, summary) in COMMANDS.items():
        if name == chosen:
            importlib.import_module(module).COMMAND.add_parser(commands, f"quire {name}", summary)
        else:
            commands.add_parser(name, help=summary)
    return parser


def _report(error: Exception, message: str, exit_code: int, words: list[str]) -> int:
    if "--debug" in words:
        traceback.print_exception(error, file=sys.stderr)
    line = escape(" ".join(message.split("\n")))
    print("error: " + (line if len(line) <= MAX_LINE else line[:MAX_LINE] + "..."), file=sys.stderr)
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
