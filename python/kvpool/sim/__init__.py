"""What the command line runs: replay of request traces, planning, diagnosis and micro-benchmarks.

Everything here stands on the public API of :mod:`kvpool.v2`; nothing in the managers knows of it.
"""
