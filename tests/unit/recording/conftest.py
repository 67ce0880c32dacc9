"""vLLM is imported here once: what its imports warn of is not ours, what our tests warn of is."""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import reshard_vllm.recording.loader_map  # noqa: F401
