"""Says at the end of a run what tests recorded of their seconds, the longest of each kind; judges nothing.

A test tells with `record_property("WHAT_s", seconds)`.
"""

from collections import defaultdict

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    told: dict[str, list[tuple[float, str]]] = defaultdict(list)
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties:
            if name.endswith("_s"):
                told[name].append((value, report.nodeid))
    for name, of_tests in told.items():
        seconds, test = max(of_tests)
        terminalreporter.write_line(f"longest {name} of {len(of_tests)}: {seconds:.3f} in {test}")
