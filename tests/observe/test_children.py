"""Children are looked up once, and are the metric's own."""

import pytest
from prometheus_client import CollectorRegistry, Counter

from services.observe.prometheus import Children

pytestmark = pytest.mark.long


def test_a_child_is_asked_for_once_and_counts_for_the_metric(monkeypatch):
    registry, asked = CollectorRegistry(), []
    counter = Counter("seen", "Seen.", ["plan", "reason"], registry=registry)
    labels = counter.labels

    def noted(*names):
        asked.append(names)
        return labels(*names)

    monkeypatch.setattr(counter, "labels", noted)
    children = Children(counter)
    for reason in ("tie", "tie", "pinned", "tie"):
        children["local", reason].inc()
    assert asked == [("local", "tie"), ("local", "pinned")]
    assert registry.get_sample_value("seen_total", {"plan": "local", "reason": "tie"}) == 3
