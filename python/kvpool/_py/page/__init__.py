"""Pages: who owns them, which of them may go, and what goes with them."""
