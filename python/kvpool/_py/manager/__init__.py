"""All requests of one manager: handles, the lock, the batch step, snapshots."""
