"""Benchmarks. Each is a module to run (`python -m bench.transfer`), prints a table and writes JSON."""
