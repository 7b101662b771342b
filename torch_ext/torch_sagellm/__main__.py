"""`python -m torch_sagellm`: the command line."""

import sys

from torch_sagellm.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
