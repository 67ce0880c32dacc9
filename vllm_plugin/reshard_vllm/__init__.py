"""The engine's side, inside vLLM's workers: recording of loaders, install, receiver."""
