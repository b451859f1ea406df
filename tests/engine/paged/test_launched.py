"""An engine's thread reports while the device computes the next step."""

from types import SimpleNamespace

from services.engine.paged.core_events import Token
from services.engine.paged.shell.engine_thread import EngineThread, Stop
from services.values.request import FinishReason

LAST = Token(9, None, FinishReason.STOP)


class Core:
    """It emits some events before a step is launched, and others after it. With None nothing is launched."""

    def __init__(self, steps, is_told=True):
        self.steps, self.log, self.events = list(steps), [], []
        self.tiers = None
        self.launched = None
        self.runner = SimpleNamespace(when_launched=self._when_launched)
        self._is_told = is_told

    def _when_launched(self, call):
        self.launched = call
        return self._is_told

    def submit(self, seq):
        pass

    def step(self):
        before, after, is_busy = self.steps.pop(0)
        if before is not None:
            self.events += before
            if self._is_told:
                self.launched()
        self.log.append("computed")
        self.events += after
        if not self.steps:
            self.thread.post(Stop(free=False))
        return is_busy

    def take_outputs(self):
        events, self.events = self.events, []
        return [("seq", event) for event in events]

    def take_cache_events(self):
        return None

    def load(self):
        return None


class Loop:
    def create_future(self):
        return SimpleNamespace(cancelled=lambda: True)

    def call_soon_threadsafe(self, call, argument):
        call(argument)


def reported(steps, is_told=True):
    """Return the events of each report, and between them when steps were computed."""
    core = Core(steps, is_told)

    def deliver(report):
        core.log.extend([event for _, event in report.events] for _ in range(bool(report.events)))

    core.thread = EngineThread(lambda: core, deliver, lambda error: None, Loop())
    core.thread.submit("seq")
    core.thread._live()
    return core.log


def test_tokens_are_told_while_the_device_computes_the_next_ones(subtests):
    busy, idle = True, False
    cases = {
        "the next step's launch": (
            [([], [1, 2], busy), ([], [3, 4], busy), ([], [5], idle)],
            ["computed", [1, 2], "computed", [3, 4], "computed", [5]],
        ),
        "more than tokens": (
            [([], [1, LAST], busy), ([], [3], busy), ([], [LAST], idle)],
            ["computed", [1, LAST], "computed", [3], "computed", [LAST]],
        ),
        "who was let in": ([(["reserved"], [1], idle)], [["reserved"], "computed", [1]]),
        "nothing is launched": (
            [([], [1], busy), (None, [], busy), (None, [], idle)],
            ["computed", "computed", [1], "computed"],
        ),
    }
    for name, (steps, expected) in cases.items():
        with subtests.test(name):
            assert reported(steps) == expected
    with subtests.test("the end"):
        assert reported([([], [1], busy)]) == ["computed", [1]]
    with subtests.test("a runner that never tells"):
        steps = [([], [1], busy), (["reserved"], [2], idle)]
        assert reported(steps, is_told=False) == ["computed", [1], "computed", ["reserved", 2]]
