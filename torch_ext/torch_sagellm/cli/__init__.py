"""The command line, `python -m torch_sagellm`: doctor, tune, table, explain, simulate."""
