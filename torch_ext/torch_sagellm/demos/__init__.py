"""Demonstration programs for ``torch-sagellm demo``. Call sites in them are reported like those of a user's program."""
