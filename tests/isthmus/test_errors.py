"""What the router raises reaches a client as the error that says what to do next."""

import grpc

import isthmus
from isthmus.errors import error_from
from router.scripted_router import status
from services.net import grpc_errors
from services.values import errors

OF_THE_ROUTER = {
    errors.InvalidRequest: isthmus.InvalidRequest,
    errors.ContextExceeded: isthmus.ContextExceeded,
    errors.Unauthenticated: isthmus.Unauthenticated,
    errors.Forbidden: isthmus.Forbidden,
    errors.NotFound: isthmus.NotFound,
    errors.AlreadyRunning: isthmus.AlreadyRunning,
    errors.NoCapacity: isthmus.Overloaded,
    errors.PeerFailed: isthmus.Unavailable,
    errors.Unavailable: isthmus.Unavailable,
    errors.DeadlineExceeded: isthmus.DeadlineExceeded,
    errors.Aborted: isthmus.Cancelled,
    ValueError: isthmus.ServerFailed,
}


def test_an_error_is_told_by_its_name_and_its_sentence(subtests):
    for raised, read in OF_THE_ROUTER.items():
        with subtests.test(raised=raised):
            code = grpc_errors.status_of(raised())
            told = error_from(status(code, "why", [("isthmus-error", raised.__name__)]))
            assert type(told) is read and str(told) == "why" and told.code is code
            assert told.retry_after_s is None
    for said, seconds in [("1500", 1.5), ("-1", float("inf")), ("soon", float("inf"))]:
        with subtests.test(said=said):
            full = status(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", [("grpc-retry-pushback-ms", said)])
            assert error_from(full).retry_after_s == seconds
    with subtests.test("a message that is too large is no overload"):
        full = status(grpc.StatusCode.RESOURCE_EXHAUSTED, "Sent message larger than max (9 vs. 4)")
        assert type(error_from(full)) is isthmus.InvalidRequest
    with subtests.test("a status without words has its name"):
        assert str(error_from(status(grpc.StatusCode.UNAVAILABLE))) == "UNAVAILABLE"
    with subtests.test("all have one base"):
        for name in isthmus.__all__:
            value = getattr(isthmus, name)
            if isinstance(value, type) and issubclass(value, Exception):
                assert issubclass(value, isthmus.IsthmusError)
