"""Every error the engine raises on purpose.

    EngineError
    ├── ConfigError                 a model, engine or mesh configuration that cannot work
    ├── CheckpointError             a weight file that is missing, truncated, foreign or mislabelled
    ├── TokenizerError              a tokenizer file that is missing, foreign or of an unknown kind
    ├── InvalidRequestError         a request that can never be served as it stands
    │   ├── UnsupportedParameterError   a parameter that this server knows of and does not serve
    │   └── PromptTooLongError          prompt (plus what it asks for) exceeds the context
    ├── OverloadedError             not now; try again after `retry_after_s`
    │   ├── QueueFullError              the bounded queue is full
    │   └── DrainingError               the replica finishes what runs and takes nothing new
    ├── DeadlineExceededError       the request's time is over
    ├── RequestCancelledError       the client went away, or an operator cancelled
    └── EngineDeadError             the engine's loop stopped; nothing can be served
        └── ReplicaGroupError           a host of the replica did not come, left, fell silent or diverged

A message names what was given, what was expected and what to do.
"""


class EngineError(Exception):
    """Root of the tree."""


class ConfigError(EngineError):
    """A configuration that cannot work."""


class CheckpointError(EngineError):
    """A weight file that is missing, truncated, foreign or mislabelled."""


class TokenizerError(EngineError):
    """A tokenizer file that is missing, foreign or of an unknown kind."""


class InvalidRequestError(EngineError):
    """A request that can never be served as it stands.

    `param` names the offending parameter, or is None where the request as a whole is wrong.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (str(self), self.param))


class UnsupportedParameterError(InvalidRequestError):
    """A parameter that this server knows of and does not serve."""


class PromptTooLongError(InvalidRequestError):
    """The prompt, or the prompt plus the tokens asked for, exceeds the context length."""


class OverloadedError(EngineError):
    """The server takes no more work now. `retry_after_s` (seconds) is a hint for the client."""

    def __init__(self, message: str, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (str(self), self.retry_after_s))


class QueueFullError(OverloadedError):
    """The bounded queue is full."""


class DrainingError(OverloadedError):
    """The replica finishes what runs and takes nothing new."""


class DeadlineExceededError(EngineError):
    """The request did not finish within its deadline."""


class RequestCancelledError(EngineError):
    """The request was cancelled by its client or an operator."""


class EngineDeadError(EngineError):
    """The engine's loop stopped on an internal failure; the replica must be replaced."""


class ReplicaGroupError(EngineDeadError):
    """A host of the replica did not come, left, fell silent or diverged. The message names it."""
