"""WHAT the library computes. An op is its oracle; nothing here knows Triton."""
