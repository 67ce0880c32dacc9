"""Geometry: boxes of global tensors, views of local storage, shardings. Pure."""
