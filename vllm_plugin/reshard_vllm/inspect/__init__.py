"""Ranks of a vLLM model without an engine: what lands where, and whether it comes out bit for bit.

Nothing is imported here: the command must start fast, and only worker processes import vLLM.
"""
