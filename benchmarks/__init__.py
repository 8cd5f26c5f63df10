"""Benchmarks of kvpool: each module is one command, `python -m benchmarks.NAME`; results are kept in `results/`."""
