"""A person at the page."""

import re

from playwright.sync_api import expect

LONG_MS = 60_000  # never waited out
# A request that is refused, or cut off because the page was left, is told in the console as well.
_MEANT = re.compile(r"status of (401|403|502|503)|net::ERR_")


class Visitor:
    """`key`: shown when the page asks for one; None: the question is left open."""

    def __init__(self, browser, url, key, **context):
        self.context = browser.new_context(
            **{
                "viewport": {"width": 1280, "height": 860},
                "color_scheme": "light",
                "locale": "en-US",
                **context,
            }
        )
        self.page = self.context.new_page()
        self.complaints, self.urls = [], []
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("console", self._note)
        self.page.on("request", lambda request: self.urls.append(request.url))
        self.page.goto(url)
        if key is not None:
            self.show_key(key)
            expect(self.link).to_have_attribute("data-link", "live")

    def _note(self, message):
        if message.type in ("error", "warning") and not _MEANT.search(message.text):
            self.complaints.append(message.text)

    @property
    def link(self):
        return self.page.get_by_role("status")

    @property
    def box(self):
        return self.page.locator(".composer textarea")

    @property
    def answers(self):
        return self.page.locator(".said.model")

    @property
    def turns(self):
        """Of this conversation, the newest first."""
        return self.page.get_by_label("This conversation").locator("details.turn")

    def rank(self, name):
        return self.page.locator(f'[data-rank="{name}"]')

    def show_key(self, key):
        self.page.get_by_role("textbox", name="API key").fill(key)
        self.page.get_by_role("button", name="Use it").click()

    def set_up(self, **fields):
        """Settings, by their labels."""
        self.page.get_by_role("button", name="Settings").click()
        for label, value in fields.items():
            self.page.get_by_label(label.replace("_", " ").capitalize(), exact=True).fill(str(value))
        self.page.get_by_role("button", name="Settings").click()

    def say(self, text):
        self.box.fill(text)
        self.box.press("Enter")

    def ask(self, text):
        """Until the answer has ended, and the feed has told of it."""
        number = self.answers.count()
        self.say(text)
        expect(self.answers).to_have_count(number + 1)
        expect(self.answers.last).to_have_attribute("data-state", "done", timeout=LONG_MS)
        expect(self.turns.first.locator(".more")).to_have_text("prices", timeout=LONG_MS)

    def script(self, expression, argument=None):
        return self.page.evaluate(expression, argument)
