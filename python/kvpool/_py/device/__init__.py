"""The device seam: where bytes lie, how they move, and in which order."""
