"""A metric's children are kept by their labels, for what is counted with every request."""

from typing import TypeVar

from prometheus_client.metrics import MetricWrapperBase

_Metric = TypeVar("_Metric", bound=MetricWrapperBase)


class Children(dict[tuple[str, ...], _Metric]):
    """This does as `metric.labels`, which checks and locks each time: a child is found in a tenth of that."""

    def __init__(self, metric: _Metric) -> None:
        super().__init__()
        self._metric = metric

    def __missing__(self, labels: tuple[str, ...]) -> _Metric:
        child = self[labels] = self._metric.labels(*labels)
        return child
