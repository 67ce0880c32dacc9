"""What can go wrong between prompts and batches; part of the one tree in `reshard.errors`."""

from reshard.errors import EngineError, ReshardError


class RolloutError(ReshardError):
    """A rollout, a setting or a call that breaks the protocol's rules."""


class StaleEngine(EngineError):
    """No engine served the version that was asked for before the deadline."""


class EngineFault(EngineError):
    """One engine failed one request: unreachable, gone, broken or too slow; another may do it."""


class EngineFenced(EngineFault):
    """The engine holds mixed weights and refuses to serve until a full refit succeeds."""


class RequestRefused(EngineError):
    """The engine understood the request and will never serve it; no other engine would."""


class PromptsExhausted(RolloutError):
    """Every prompt was used: no full batch will come any more."""
