"""A body requests so many answers to so many prompts, which is read and bounded here."""

from services.router.dialects.json_body import Body, InvalidParameter
from services.values.request import MAX_ID_CHARS
from services.wire.isthmus.v1.generation_pb2 import GenerateRequest

MAX_EACH = 128  # It is the bound of GenerateRequest.n.
MAX_PROMPTS = 256
MAX_ANSWERS = 1024  # A call gets no more.
_MOST_BYTES = 64 << 20  # This is what all of a call's prompts together may repeat.


def read_n(body: Body, request: GenerateRequest) -> None:
    n = body.integer("n", 1, MAX_EACH)
    if n is not None:
        request.n = n


def read_best_of(body: Body, request: GenerateRequest, stream: bool) -> None:
    best_of = body.integer("best_of", 1, MAX_EACH)
    if best_of is None:
        return
    answered = request.n or 1
    if best_of < answered:
        raise body.wrong("best_of", f"must be at least n, which is {answered}")
    if stream and best_of > answered:
        raise body.wrong("best_of", "cannot be streamed where it is more than n: set stream to false")
    request.best_of = best_of


def check_number(num_prompts: int, param: str) -> None:
    if not 1 <= num_prompts <= MAX_PROMPTS:
        raise InvalidParameter(param, f"must be at most {MAX_PROMPTS} prompts, got {num_prompts}")


def one_for_each(num_prompts: int, request: GenerateRequest, param: str) -> list[GenerateRequest]:
    """Return requests for so many prompts, of which `request` itself is the first.

    `param` is what the body calls the prompts. Raises InvalidParameter where there are too many prompts, or
    none, or too much is asked of each.
    """
    check_number(num_prompts, param)
    num_answers = num_prompts * max(request.n or 1, request.best_of)
    if num_answers > MAX_ANSWERS:
        problem = f"with n or best_of asks for {num_answers} answers; a call gets {MAX_ANSWERS} at most"
        raise InvalidParameter(param, problem)
    if num_prompts * request.ByteSize() > _MOST_BYTES:  # A body of megabytes would be held for each.
        problem = f"is {num_prompts} prompts, too many beside so long a body: send fewer at a time"
        raise InvalidParameter(param, problem)
    return [request, *(_another(request, place) for place in range(1, num_prompts))]


def _another(request: GenerateRequest, place: int) -> GenerateRequest:
    other = GenerateRequest()
    other.CopyFrom(request)
    if request.request_id:
        suffix = f"/{place}"
        other.request_id = request.request_id[: MAX_ID_CHARS - len(suffix)] + suffix
    return other
