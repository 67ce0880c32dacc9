"""Run as `python -m benchmarks.refit`."""

from benchmarks.refit.command import main

main(prog_name="python -m benchmarks.refit")
