"""Slots: how buffers form slots, how many slots a quota buys, and which of them are in use."""
