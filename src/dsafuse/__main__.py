"""`dsafuse`, also `python -m dsafuse`."""

from dsafuse.cli.app import app

if __name__ == "__main__":
    app(prog_name="dsafuse")
