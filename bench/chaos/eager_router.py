"""A router that has whoever computes a prompt pull what another rank holds more of it, at no price.

    python -m bench.chaos.eager_router, with the flags of services.router

Small models compute faster than a pull begins, so that a router would hardly ever choose one.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from services.process.signals import ending_at_once
from services.router.placement import sources
from services.router.placement.candidates import SourceCandidate
from services.router.placement.price import PriceList


@contextmanager
def eager_to_pull() -> Iterator[None]:
    with patch.object(sources, "_TIME_SHARE", math.inf), patch.object(PriceList, "pull", _for_nothing):
        yield


def _for_nothing(prices: PriceList, source: SourceCandidate, wait_s: float) -> tuple[float, float]:
    return 0.0, 0.0


if __name__ == "__main__":
    with ending_at_once(), eager_to_pull():
        from services.router.__main__ import main

        main()
