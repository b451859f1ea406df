"""Lives of a rank's process as stories: what it says and how it ends, what probes hear, what its parent does.

    start                      another life begins
    says PHASE [WHY]           waiting, serving or stopping, as processes do
    beats SECONDS              time passes, and it is heard of every second
    wait SECONDS               time passes
    exits CODE                 what its supervisor decides, by all its lives

The parent looks once a second. It may be away for 60 s once it has stood.
"""

import pytest

from plugins.transcripts import stem, transcripts_beside
from services.process.health import SILENT_S, Lifecycle, ProcessPhase, SilentLooks
from services.process.supervisor import Restart, on_exit

PHASES = {"waiting": ProcessPhase.WAITING, "serving": ProcessPhase.SERVING, "stopping": ProcessPhase.STOPPING}


class Lives:
    def __init__(self):
        self.now_s = self.started_s = 0.0
        self.rank = Lifecycle("the rank", lambda: self.now_s, restart_timeout_s=60.0)
        self.looks, self.failures, self.told = SilentLooks(), 0, ""

    def perform(self, command):
        yield from getattr(self, f"do_{command.name}")(command) or ()
        if (probes := self.probes()) != self.told:
            self.told = probes
            yield probes

    def probes(self):
        health = self.rank.health()
        answers = {"startup": health.startup, "ready": health.ready, "live": health.live}
        passing = [name for name, reason in answers.items() if not reason]
        failing = {reason for reason in answers.values() if reason}
        return f"probes that pass: {', '.join(passing) or 'none'}" + "".join(
            f"; {r}" for r in sorted(failing)
        )

    def do_start(self, command):
        self.rank.begin()
        self.rank.last_words = ""
        self.looks, self.started_s = SilentLooks(), self.now_s

    def do_says(self, command):
        phase, *why = command.words
        self.rank.enter(PHASES[phase])
        self.rank.last_beat = self.now_s
        self.rank.last_words = " ".join(why)

    def do_beats(self, command):
        return self.pass_time(int(command.words[0]), beating=True)

    def do_wait(self, command):
        return self.pass_time(int(command.words[0]), beating=False)

    def pass_time(self, seconds, beating):
        for _ in range(seconds):
            self.now_s += 1.0
            if beating:
                self.rank.last_beat = self.now_s
            self.looks.look(self.rank)
            if self.looks.looks == SILENT_S:
                yield f"at {self.now_s:.0f} s: it hangs, and is killed"

    def do_exits(self, command):
        code = int(command.words[0])
        self.rank.begin()
        why = self.rank.last_words
        self.rank.last_end = f"exit code {code}" + (f", {why}" if why else "")
        decision = on_exit(code, self.now_s - self.started_s, self.failures, self.rank.has_served)
        if isinstance(decision, Restart):
            self.failures = decision.failures
            yield f"starts again in {decision.delay_s:g} s, after {decision.failures} short lives"
        else:
            yield f"all ranks are stopped, exit code {decision.exit_code}"


@pytest.mark.parametrize("path", transcripts_beside(__file__), ids=stem)
def test_lives(path, play):
    play(path, Lives().perform)
