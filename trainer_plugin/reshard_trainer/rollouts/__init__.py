"""Rollouts: generating them at one version, or all the time with bounded staleness."""
