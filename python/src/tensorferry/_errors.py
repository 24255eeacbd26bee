"""The exceptions of the package: one class for each code of gRPC.

A wrong argument is a ValueError or a TypeError, as everywhere in Python. All else
is an Error.
"""

from __future__ import annotations

from typing import Any, Optional


class Error(Exception):
    """What the server, the program or the way to them says about a failure.

    Attributes:
        code: the name of the gRPC code, such as "NOT_FOUND".
        message: what failed.
        hint: what to do about it; may be empty.
        retryable: whether the same call can succeed later without a change.
        retry_after: seconds to wait before; None if nobody knows.
        call: the server's id of the call, push or pull that failed; may be empty. The server
            has the cause under it, as tensorferry info --call shows.
        reason: why, for programs, such as "STATE_LOST" (docs/errors.md); may be empty.
    """

    code = "UNKNOWN"
    reason = ""
    _retryable = False

    def __init__(self, message: str, *, hint: str = "", retry_after: Optional[float] = None, call: str = ""):
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.retry_after = retry_after
        self.call = call
        self.retryable = self._retryable or retry_after is not None

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message

    def __repr__(self) -> str:
        call = f", call={self.call!r}" if self.call else ""
        return f"{type(self).__name__}({self.message!r}{call})"


class Cancelled(Error):
    """The call was cancelled."""

    code = "CANCELLED"


class Unknown(Error):
    """The failure has no code."""

    code = "UNKNOWN"


class InvalidArgument(Error):
    """The server refuses what it was sent."""

    code = "INVALID_ARGUMENT"


class DeadlineExceeded(Error, TimeoutError):
    """The time is over."""

    code = "DEADLINE_EXCEEDED"


class NotFound(Error):
    """There is no such model, tensor or source."""

    code = "NOT_FOUND"


class AlreadyExists(Error):
    """There is such a thing already."""

    code = "ALREADY_EXISTS"


class PermissionDenied(Error):
    """The caller may not do this."""

    code = "PERMISSION_DENIED"


class ResourceExhausted(Error):
    """A limit of memory or count is reached; the message names it."""

    code = "RESOURCE_EXHAUSTED"


class FailedPrecondition(Error):
    """The server is not in a state for this."""

    code = "FAILED_PRECONDITION"


class Aborted(Error):
    """Somebody else was faster."""

    code = "ABORTED"
    _retryable = True


class OutOfRange(Error):
    """A number is outside of what there is."""

    code = "OUT_OF_RANGE"


class Unimplemented(Error):
    """The server does not do this."""

    code = "UNIMPLEMENTED"


class Internal(Error):
    """The server has a bug."""

    code = "INTERNAL"


class Unavailable(Error):
    """The server cannot be reached, or is about to stop."""

    code = "UNAVAILABLE"
    _retryable = True


class DataLoss(Error):
    """Bytes were damaged on their way."""

    code = "DATA_LOSS"


class Unauthenticated(Error):
    """The server does not know the caller."""

    code = "UNAUTHENTICATED"


class LinkError(Unavailable):
    """The program of the link died, could not start, or is of another version.

    The next use of a client starts another one.
    """


_BY_NUMBER = (
    Error, Cancelled, Unknown, InvalidArgument, DeadlineExceeded, NotFound, AlreadyExists, PermissionDenied,
    ResourceExhausted, FailedPrecondition, Aborted, OutOfRange, Unimplemented, Internal, Unavailable, DataLoss,
    Unauthenticated,
)  # fmt: skip


def from_code(code: int, says: dict[str, Any]) -> Error:
    """Return the exception for a gRPC code and the JSON of a done."""
    kind = _BY_NUMBER[code] if 0 < code < len(_BY_NUMBER) else Unknown
    millis = says.get("retry_millis")
    retry = millis / 1000 if isinstance(millis, (int, float)) else None
    message, hint, call = (
        str(says.get(key, default)) for key, default in (("message", kind.code), ("hint", ""), ("call", ""))
    )
    made = kind(message, hint=hint, retry_after=retry, call=call)
    made.retryable = bool(says.get("retryable", made.retryable))
    made.reason = str(says.get("reason", ""))
    return made
