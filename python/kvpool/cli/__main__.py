"""``python -m kvpool.cli``: the same as the script ``kvpool``."""

from __future__ import annotations

from kvpool.cli.main import app

if __name__ == "__main__":
    app(prog_name="kvpool")
