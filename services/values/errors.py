"""Errors are named by what the caller can do next. net/grpc_errors.py maps them to gRPC status and back."""

import re
from typing import Self


class IsthmusError(Exception):
    """This is the base class of every error that we raise on purpose."""


# An error sentence about one field of the API begins with the field's name.
_FIELD = re.compile(
    r"(?P<field>(?:sampling|chat)\.[\w.\[\]]+|(?:prompt|text|token_ids\.ids)(?:\[\d+\])?)"
    r"(?: |(?=[:,] ))(?P<problem>.+)",
    re.DOTALL,
)


class InvalidRequest(IsthmusError):
    """The request can never work; give up.

    `field` is the API's name of the wrong field, or empty if there is no single one, and `problem` is the
    rest of the sentence.
    """

    def __init__(self, field: str = "", problem: str | None = None) -> None:
        """A single argument is the whole sentence, about no single field."""
        self.field, self.problem = ("", field) if problem is None else (field, problem)
        # Some sentences have the form "sampling.logprobs: none here".
        space = "" if not self.field or self.problem.startswith((",", ":")) else " "
        super().__init__(f"{self.field}{space}{self.problem}")

    @classmethod
    def received(cls, sentence: str) -> Self:
        """Return the error for a sentence from a peer, since gRPC transmits no fields of an error."""
        parts = _FIELD.match(sentence)
        return cls(sentence) if parts is None else cls(parts["field"], parts["problem"])


class ContextExceeded(InvalidRequest):
    """The prompt is longer than any context here; make it shorter."""


class Unauthenticated(IsthmusError):
    """The call has no API key that is known here; give up."""


class Forbidden(IsthmusError):
    """The API key does not allow this; give up, or use another key."""


class NotFound(IsthmusError):
    """The request names something that does not exist; give up."""


class AlreadyRunning(IsthmusError):
    """A request with this id is running; choose another id or wait."""


class NoCapacity(IsthmusError):
    """There is no capacity here now; try another rank, or try later, after `retry_after_s` if it is known."""

    def __init__(self, message: str = "", retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class OverLimit(NoCapacity):
    """The tenant has reached one of its own limits; try later, after `retry_after_s`."""


class PeerFailed(IsthmusError):
    """A rank that we needed failed or disappeared; retry with another one."""


class KvCorrupt(PeerFailed):
    """Pages do not hold what their writer reported; retry with another rank."""


class StaleGeneration(IsthmusError):
    """The rank has restarted since it was chosen; choose again."""


class Unavailable(IsthmusError):
    """This service cannot serve at present (it drains, has no rank, or etcd is away); retry later."""


class RankLeaves(Unavailable):
    """The rank is about to leave; go on at another one, which may pull from this one what it computed."""


class DeadlineExceeded(IsthmusError):
    """The client's deadline has passed."""


class Aborted(IsthmusError):
    """The client stopped the request."""


class ConfigError(IsthmusError):
    """The settings or the checkpoint cannot work; the process refuses to start and gives the reason."""


class ProtocolError(IsthmusError):
    """A peer violated the protocol between ranks, or our own code tried an illegal step."""


def root_cause(error: BaseException) -> BaseException:
    """Return the error that a caller can act on: of an ExceptionGroup the first of ours, or of all."""
    if not isinstance(error, BaseExceptionGroup):
        return error
    ours = error.subgroup(IsthmusError)
    return root_cause((ours if ours is not None else error).exceptions[0])


def let_frames_go(error: BaseException) -> None:
    """Remove the traceback frames of an answered error and of those behind it.

    Frames hold the refused message, and if one of them also holds the error, all of it stays in memory until
    the garbage collector runs. That counts objects, so a few with many megabytes do not start it.
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
