"""`python -m sagellm`: the command line."""

import sys

from sagellm.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
