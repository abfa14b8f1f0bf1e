"""COMMAND LINE: explain, verify, bench, demo and env; typer and rich over `check`, a file for each command."""
