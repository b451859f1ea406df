import asyncio
from types import SimpleNamespace

import pytest
from opentelemetry.trace import INVALID_SPAN

from services.errors import NoCapacity
from services.request import SamplingParams
from services.router.generation import Generator
from services.router.progress import Checked

CHECKED = Checked("r", SamplingParams(), "", "", 0)


class Outcomes(list):
    """In the place of RouterMetrics."""

    def ended(self, progress, outcome, took_s):
        self.append(outcome)


@pytest.mark.parametrize(
    ("error", "deadline", "outcome"),
    [
        (None, None, "finished"),
        (NoCapacity("full"), None, "NoCapacity"),
        (KeyError("a bug"), None, "Internal"),
        (KeyError("a bug"), 50.0, "Internal"),
        (asyncio.CancelledError(), None, "cancelled"),
        (asyncio.CancelledError(), 101.0, "cancelled"),
        (asyncio.CancelledError(), 99.0, "DeadlineExceeded"),
        (GeneratorExit(), 100.05, "DeadlineExceeded"),  # gRPC's clock is not ours
        (GeneratorExit(), 101.0, "cancelled"),
    ],
)
def test_how_a_request_ended(error, deadline, outcome):
    outcomes = Outcomes()
    cluster = SimpleNamespace(ended=lambda request_id: None)
    generator = Generator("m", None, cluster, outcomes, max_attempts=1, max_wait_s=1.0, clock=lambda: 100.0)
    try:
        with generator._track(CHECKED, INVALID_SPAN, deadline):
            assert generator.num_running == 1
            if error is not None:
                raise error
    except BaseException as raised:
        assert raised is error
    assert outcomes == [outcome]
    assert generator.num_running == 0
