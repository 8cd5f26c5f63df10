"""Numbers and names that every layer uses."""
