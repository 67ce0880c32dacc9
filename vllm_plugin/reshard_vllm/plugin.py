"""vLLM's `general_plugins` entry point: makes the weight-transfer backend `reshard` known.

vLLM calls `register` once in every process of an engine, before a model is loaded. An import error
here would be logged and swallowed by vLLM, so this module imports nothing that can fail.
"""

BACKEND = "reshard"


def register() -> None:
    """Register the backend with vLLM's weight-transfer factory; calling it again is harmless."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            BACKEND, "reshard_vllm.engine", "ReshardTransferEngine"
        )
