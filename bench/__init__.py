"""The benchmark: `make bench`, or `python -m bench`. How to run and read it is in docs/benchmarks.md."""
