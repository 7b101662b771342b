"""The command line, `python -m sagellm`: doctor, tune, table, explain, simulate."""
