"""The command line, `torch-sagellm` or `python -m torch_sagellm`; main.py lists the commands."""
