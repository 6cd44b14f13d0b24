"""The command line, `python -m jln`: a file a command, and beside them what they share."""
