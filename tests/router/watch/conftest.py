"""Requests on a router, and what a watch needs of its generator."""

import pytest
from opentelemetry.trace import INVALID_SPAN

from router.placement.placement_ranks import WEIGHTS, decode, prefill, request
from services.router.cluster import HashedPrompt, Placed
from services.router.placement.decision import place
from services.router.request.client_request import ClientRequest
from services.router.request.progress import Progress
from services.values.rank import RankKey
from services.values.request import SamplingParams


class Requests:
    """In the place of a Generator: those that run, and those that listen."""

    def __init__(self):
        self.running, self.listeners = [], []

    def listen(self, ended):
        self.listeners.append(ended)
        return lambda: self.listeners.remove(ended)

    def begin(self, request_id, tenant="", began_s=100.0, **fields):
        asked = ClientRequest(request_id, SamplingParams(), "c", tenant, model="m", **fields)
        progress = Progress(asked, began_s, INVALID_SPAN)
        self.running.append(progress)
        return progress

    def end(self, progress, outcome="finished"):
        self.running.remove(progress)
        for ended in list(self.listeners):
            ended(progress, outcome)


@pytest.fixture
def requests():
    return Requests()


@pytest.fixture
def placed():
    """With forty decode ranks compared, one of them draining."""

    def placed(pinned=None, bandwidth=lambda sender, receiver: 1e9):
        decodes = [decode(i, pending_tokens=i) for i in range(40)]
        decodes[1] = decode(1, excluded="draining")
        key = None if pinned is None else RankKey("decode", pinned)
        decision = place(request(pinned=key), decodes, [prefill(0)], bandwidth, WEIGHTS, 0.0, spare_ranks=64)
        return Placed(decision, None, None, None, key, HashedPrompt(None, 0, None), None, {}, True, None)

    return placed
