"""White space around the parts of an answer is dropped or kept while it comes. Pure."""

from collections.abc import Callable


class Led:
    """`lead` comes before the first text, or at the end."""

    def __init__(self, lead: str, sink: Callable[[str], None]) -> None:
        self.lead, self._sink = lead, sink

    def __call__(self, text: str) -> None:
        if text:
            self._sink(self.lead + text)
            self.lead = ""

    def finish(self) -> None:
        self._sink(self.lead)


class Trailed:
    """White space comes with the text behind it, and not at the end."""

    def __init__(self, sink: Callable[[str], None]) -> None:
        self._held, self._sink = "", sink

    def __call__(self, text: str) -> None:
        text = self._held + text
        kept = text.rstrip()
        self._held = text[len(kept) :]
        self._sink(kept)


class Unlined:
    """A line's end at the beginning is dropped where the text is `led` by one, and one at the end is `held`
    back. `begins_line` says that what came last was a line's end."""

    def __init__(self, sink: Callable[[str], object], led: bool = True) -> None:
        self.held = ""
        self.begins_line = False
        self._begins, self._sink = led, sink

    def __call__(self, text: str) -> None:
        if text:
            self.begins_line = text.endswith("\n")
        if self._begins and text:
            text, self._begins = text.removeprefix("\n"), False
        text = self.held + text
        kept = text.removesuffix("\n")
        self.held = text[len(kept) :]
        self._sink(kept)
