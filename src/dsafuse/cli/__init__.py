"""COMMAND LINE: typer and rich over `check`, `serving` and `vllm`, a file for each command."""
