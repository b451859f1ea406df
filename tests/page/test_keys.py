"""Who has no key sees the page, and nothing of what it shows."""

from playwright.sync_api import expect


def test_a_wrong_key_is_refused_and_asked_for_again(visit):
    person = visit(key=None)
    dialog = person.page.get_by_role("dialog")
    expect(dialog).to_be_visible()
    expect(person.link).to_have_attribute("data-link", "refused")
    assert person.page.locator("[data-rank]").count() == 0
    person.show_key("wrong-key")
    expect(dialog.get_by_role("alert")).to_have_text("the API key is not one of this server's")
    person.show_key("bare-key")
    expect(dialog).to_have_count(0)
    expect(person.link).to_have_attribute("data-link", "live")
    expect(person.rank("decode/0")).to_be_visible()
    assert not any("key" in url.partition("?")[2] for url in person.urls)
    kept = "storage => JSON.stringify(Object.entries(window[storage]))"
    assert "bare-key" in person.script(kept, "sessionStorage")
    assert "bare-key" not in person.script(kept, "localStorage") + person.page.content()
    # It is kept for as long as the tab.
    person.page.reload()
    expect(person.link).to_have_attribute("data-link", "live")
    person.page.get_by_role("button", name="Forget key").click()
    expect(dialog).to_be_visible()
    assert "bare-key" not in person.script(kept, "sessionStorage")


def test_a_chat_without_a_key_asks_for_it(visit):
    person = visit(key=None)
    person.page.get_by_role("button", name="Not now").click()
    person.say("Hello")
    expect(person.answers.first.get_by_role("alert", include_hidden=True)).to_contain_text("no API key")
    expect(person.page.get_by_role("dialog")).to_be_visible()


def test_with_the_key_goes_what_was_said(visit):
    """Of an answer that is being written, too."""
    person = visit()
    person.page.route("**/v1/chat/completions", lambda route: None)  # it never comes
    person.say("Hello")
    expect(person.answers).to_have_count(1)
    person.page.get_by_role("button", name="Forget key").click()
    expect(person.page.get_by_role("dialog")).to_be_visible()
    person.page.wait_for_timeout(300)
    assert (person.answers.count(), person.page.locator(".said.user").count()) == (0, 0)
