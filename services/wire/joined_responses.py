"""The responses of one answer are joined here into one."""

from services.wire.isthmus.v1.generation_pb2 import GenerateResponse


class JoinedResponses:
    def __init__(self) -> None:
        self._joined = GenerateResponse()
        self._texts: list[str] = []
        self._reasonings: list[str] = []

    def add(self, response: GenerateResponse) -> None:
        self._texts.append(response.text)
        self._reasonings.append(response.reasoning)
        self._joined.MergeFrom(response)  # The lists grow; texts and finish are replaced.

    @property
    def has_finished(self) -> bool:
        return bool(self._joined.HasField("finish"))

    def whole(self) -> GenerateResponse:
        """Return all in one. It may be called once, when all have come."""
        self._joined.text, self._joined.reasoning = "".join(self._texts), "".join(self._reasonings)
        return self._joined
