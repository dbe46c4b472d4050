"""`python -m quire` is the `quire` command."""

import os
import sys

# Python looks for modules in the current directory first. It may be a model folder, whose code is never run.
if not sys.flags.safe_path and sys.path[0] != os.path.dirname(os.path.dirname(__file__)):
    del sys.path[0]

from quire.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
