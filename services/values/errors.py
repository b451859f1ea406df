"""Errors are named by what the caller can do next. net/grpc_errors.py maps them to gRPC status and back."""

import re
from typing import Self


class IsthmusError(Exception):
    """Every error that we raise on purpose is one of these."""


# A sentence of the API that is about one field of it begins so.
_FIELD = re.compile(
    r"(?P<field>(?:sampling|chat)\.[\w.\[\]]+|(?:prompt|text|token_ids\.ids)(?:\[\d+\])?)"
    r"(?: |(?=[:,] ))(?P<problem>.+)",
    re.DOTALL,
)


class InvalidRequest(IsthmusError):
    """The request can never work; give up.

    `field` is the API's name of what is wrong, empty where that is no one field, and `problem` is what the
    sentence says of it.
    """

    def __init__(self, field: str = "", problem: str | None = None) -> None:
        """A single argument is the whole sentence, which is about no one field."""
        self.field, self.problem = ("", field) if problem is None else (field, problem)
        # Some say "sampling.logprobs: none here".
        space = "" if not self.field or self.problem.startswith((",", ":")) else " "
        super().__init__(f"{self.field}{space}{self.problem}")

    @classmethod
    def received(cls, sentence: str) -> Self:
        """Return the error that a peer sent as its sentence: gRPC carries no fields of an error."""
        told = _FIELD.match(sentence)
        return cls(sentence) if told is None else cls(told["field"], told["problem"])


class ContextExceeded(InvalidRequest):
    """The prompt is longer than any context here; make it shorter."""


class Unauthenticated(IsthmusError):
    """Nobody has shown a key that is known here; give up."""


class Forbidden(IsthmusError):
    """The key that was shown is not good for this; give up, or show another."""


class NotFound(IsthmusError):
    """The request names what does not exist; give up."""


class AlreadyRunning(IsthmusError):
    """A request with this id is running; choose another id or wait."""


class NoCapacity(IsthmusError):
    """There is no capacity here now; try another rank, or later: in `retry_after_s`, where that is known."""

    def __init__(self, message: str = "", retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class PeerFailed(IsthmusError):
    """A rank we depended on failed or went away; retry with another."""


class KvCorrupt(PeerFailed):
    """Pages do not hold what the rank that wrote them says it wrote; retry with another."""


class StaleGeneration(IsthmusError):
    """The rank has been restarted since it was chosen; choose again."""


class Unavailable(IsthmusError):
    """This service cannot serve at present (draining, no rank, etcd away); retry later."""


class DeadlineExceeded(IsthmusError):
    """The client's deadline has passed."""


class Aborted(IsthmusError):
    """The request was stopped by its client."""


class ConfigError(IsthmusError):
    """The settings or the checkpoint cannot work; the process refuses to start and says why."""


class ProtocolError(IsthmusError):
    """A peer broke the protocol between ranks, or our own code requested an illegal step."""


def root_cause(error: BaseException) -> BaseException:
    """Return the one error that a caller can act on: out of an ExceptionGroup ours if there is one, else
    the first; anything else is itself."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    ours = error.subgroup(IsthmusError)
    return root_cause((ours if ours is not None else error).exceptions[0])


def let_frames_go(error: BaseException) -> None:
    """Cut an error that has been answered, and those behind it, off the frames that they came through.

    Frames hold the message that was refused, and where one of them holds the error too, all of it stays until
    the garbage collector comes by: that counts objects, and a few of many megabytes are no reason for it.
    """
    behind: list[BaseException | None] = [error]
    seen = set[int]()
    while behind:
        each = behind.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        each.__traceback__ = None
        behind += [each.__cause__, each.__context__]
        behind += each.exceptions if isinstance(each, BaseExceptionGroup) else ()
