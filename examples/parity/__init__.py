"""The parts of `echo_parity.py`: one GRPO task, trained in four ways on the same seeds."""
