"""All exceptions of the protocol.

MoriioError
 +-- DeclarationError         a machine that cannot be compiled (our bug, at import)
 +-- ProtocolError            an input that a state or a decoder has no answer for
 |    +-- LocalProtocolError  the caller did it
 |    +-- PlanError           blocks or layers that a side does not have (geometry.plan)
 |    +-- RemoteProtocolError a peer, the router or a client did it; harms only its own transfer
 |         +-- DecodeError    bytes that are no message
 |         +-- ParameterError kv_transfer_params or a request id that do not lead to a peer
 +-- IllegalEventError        no row; raised by the table, turned into one of the above by the core
 +-- ConfigurationError       a key of the configuration; names key, value and what was expected
"""

from __future__ import annotations

__all__ = [
    "ConfigurationError",
    "DeclarationError",
    "DecodeError",
    "IllegalEventError",
    "LocalProtocolError",
    "MoriioError",
    "ParameterError",
    "ProtocolError",
    "RemoteProtocolError",
]


class MoriioError(Exception):
    """Base of all errors of this project."""


class DeclarationError(MoriioError):
    """The declared machine uses something the compiled table does not honour, or has a hole."""


class ProtocolError(MoriioError):
    """An input without an answer.  The side that raised it is untouched."""


class LocalProtocolError(ProtocolError):
    """The caller of the core did something that the state does not allow."""


class RemoteProtocolError(ProtocolError):
    """A peer sent something that is no message or has no answer."""


class DecodeError(RemoteProtocolError):
    """Bytes that are no message; the text says what was expected."""


class ParameterError(RemoteProtocolError):
    """A request's parameters do not describe a transfer; names the key, the value and what was expected."""

    def __init__(self, key: str, value: object, expected: str) -> None:
        shown = repr(value)
        super().__init__(f"{key}={shown[:200]}: expected {expected}")
        self.key, self.value, self.expected = key, value, expected


class IllegalEventError(MoriioError):
    """A table has no row for this trigger in this state."""

    def __init__(self, machine: str, state: object, trigger: str) -> None:
        super().__init__(f"{machine}: no row for {trigger!r} in {getattr(state, 'name', state)}")
        self.machine, self.state, self.trigger = machine, state, trigger


class ConfigurationError(MoriioError):
    """A key of the configuration is unknown, missing, of a wrong type or out of range."""

    def __init__(self, key: str, value: object, expected: str) -> None:
        super().__init__(f"{key}={value!r}: expected {expected}")
        self.key, self.value, self.expected = key, value, expected
