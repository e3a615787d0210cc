"""Every error loraplex raises on purpose.

    LoraplexError
    ├── UserError                  the caller can fix it; the message says how
    │   ├── InvalidRequestError    a field of a request is wrong (names the field)
    │   │   └── ContextLengthError     prompt and answer do not fit the context
    │   ├── UnknownModelError      no base model or adapter of that name
    │   ├── ModelError             a base model that cannot be served as it is
    │   ├── AdapterError           an adapter that cannot be served as it is
    │   │   ├── AdapterFormatError     the checkpoint is broken or asks for something unsupported
    │   │   ├── AdapterMismatchError   the checkpoint belongs to another base model
    │   │   ├── AdapterFetchError      it could not be downloaded from the hub or from S3
    │   │   └── AdapterConflictError   the name is taken, or the adapter is being changed right now
    │   ├── OptionError            an option has a value that it cannot have; a ValueError, too
    │   ├── HubError               a repository could not be fetched from the Hugging Face hub
    │   └── PathNotAllowedError    a path or repository that the operator did not allow
    ├── CapacityError              it would never fit: memory budget or context length
    ├── StorageError               the state directory cannot be written
    │   └── DiskFullError              because its disk is full
    ├── KernelError                a GPU kernel could not be compiled or launched (names it, and its shapes)
    └── EngineDeadError            the engine process died; in-flight work is lost, new work will be served
        ├── EngineFailedError          it died too often, and the server ends
        ├── RequestMovedError          it handed the request over, for another engine to continue
        └── EngineClosedError          it was stopped on purpose, because its server is shutting down

Bugs of our own are asserts, not members of this tree.
"""

from __future__ import annotations


class LoraplexError(Exception):
    """Base of the tree; `str(error)` is always fit to show to a user."""


class UserError(LoraplexError):
    """Something the caller sent or configured is wrong."""


class InvalidRequestError(UserError):
    """One field of a request is wrong."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextLengthError(InvalidRequestError):
    """Prompt and answer together are longer than the context."""


class OptionError(UserError, ValueError):
    """An option has a value that it cannot have."""


class UnknownModelError(UserError):
    """The requested model or adapter does not exist."""


class ModelError(UserError):
    """The base model checkpoint is unsupported or broken."""


class AdapterError(UserError):
    """An adapter cannot be served."""


class AdapterFormatError(AdapterError):
    """The adapter checkpoint is broken, or asks for something that is not implemented."""

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class AdapterMismatchError(AdapterError):
    """The adapter was trained on a base model of another shape."""


class AdapterFetchError(AdapterError):
    """The adapter could not be downloaded from the Hugging Face hub or from S3."""


class AdapterConflictError(AdapterError):
    """The name is taken, or another change of the same adapter is in progress."""


class HubError(UserError):
    """A repository could not be fetched: the hub, the network or the disk failed."""


class PathNotAllowedError(UserError):
    """A path resolves to somewhere outside the allowed folders, or a repository is not an allowed one."""


class CapacityError(LoraplexError):
    """The thing asked for can never fit the configured memory."""


class StorageError(LoraplexError):
    """The state directory could not be read or written."""


class DiskFullError(StorageError):
    """There is no room left on the disk of the state directory."""


class KernelError(LoraplexError):
    """A GPU kernel could not be compiled or launched."""


class EngineDeadError(LoraplexError):
    """The engine process ended while work was in flight."""


class EngineFailedError(EngineDeadError):
    """The engine process died too often to be started again."""


class RequestMovedError(EngineDeadError):
    """The engine handed the request over; another engine continues it."""


class EngineClosedError(EngineDeadError):
    """The engine process was stopped on purpose before the work was done."""
