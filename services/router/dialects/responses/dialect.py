"""Responses: how they are asked for and answered, and what is kept of them."""

from collections.abc import Mapping

from services.router.dialects.dialect import Envelope
from services.router.dialects.responses.answer import ResponseAnswer
from services.router.dialects.responses.call import ResponsesCall, read_responses_call
from services.router.dialects.responses.store import ResponseStore
from services.router.dialects.sampling_defaults import SamplingDefaults


class ResponsesDialect:
    name = "responses"

    def __init__(self, defaults: SamplingDefaults, store: ResponseStore) -> None:
        self._defaults = defaults
        self._store = store

    def read(self, fields: Mapping[str, object], headers: Mapping[str, str]) -> ResponsesCall:
        return read_responses_call(fields, headers, self._defaults)

    def answer(self, call: ResponsesCall, envelope: Envelope) -> ResponseAnswer:
        return ResponseAnswer(call, envelope, self._store)
