"""Programs that show what this package does, for ``torch-sagellm demo``. Places in them count as a user's program."""
