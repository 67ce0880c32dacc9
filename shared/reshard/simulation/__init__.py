"""Refits that cannot be run here: published models, their layouts, and a stated cost model."""
