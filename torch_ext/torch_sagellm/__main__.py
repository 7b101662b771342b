"""`python -m torch_sagellm`: the command line."""

import sys

if __name__ == "__main__":
    try:
        from torch_sagellm.cli.main import main

        code = main()
    except KeyboardInterrupt:  # Ctrl-C while Python is still loading this program
        code = 130
    sys.exit(code)
