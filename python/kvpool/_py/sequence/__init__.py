"""One request: its blocks, what a new length needs, and its states."""
