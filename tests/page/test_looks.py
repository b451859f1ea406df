"""Light and dark, wide and narrow, and without a mouse."""

import pytest
from playwright.sync_api import expect

from page.test_chat import sideways


def background(person):
    return person.script("getComputedStyle(document.body).backgroundColor")


def test_it_is_light_or_dark_as_the_system_is_and_as_a_person_wants_it(visit):
    light, dark = visit(color_scheme="light"), visit(color_scheme="dark")
    bright, black = background(light), background(dark)
    assert bright != black
    theme = light.page.get_by_role("button", name="Theme")
    for expected in (bright, black, bright):  # light, dark, as the system
        theme.click()
        light.page.wait_for_timeout(50)
        assert background(light) == expected
    theme.click()
    theme.click()
    light.page.reload()
    assert background(light) == black


@pytest.mark.parametrize("pixels", [360, 420, 800])
def test_where_it_is_narrow_one_pane_is_shown_at_a_time(visit, pixels):
    person = visit(viewport={"width": pixels, "height": 740})
    person.set_up(max_tokens=40)
    person.ask("What is an isthmus? " + "y" * 200)
    assert not sideways(person)
    chat, cluster = person.page.locator("#chat"), person.page.locator("#cluster")
    expect(chat).to_be_visible()
    expect(cluster).to_be_hidden()
    person.page.get_by_role("button", name="Cluster").click()
    expect(chat).to_be_hidden()
    expect(person.rank("decode/0")).to_be_visible()
    assert not sideways(person)
    person.turns.first.locator("summary").click()
    expect(person.turns.first.locator(".prices")).to_be_visible()
    assert not sideways(person)
    person.page.get_by_role("button", name="Chat", exact=True).click()
    person.answers.first.locator(".caption-button").click()
    expect(person.turns.first).to_be_visible()


def test_everything_can_be_reached_by_keys(visit):
    person = visit()
    person.set_up(max_tokens=20)
    person.ask("Hello")
    person.box.focus()
    reached = []
    for _ in range(30):
        person.page.keyboard.press("Tab")
        reached.append(
            person.script(
                "(document.activeElement.ariaLabel ?? document.activeElement.innerText ?? '').trim()"
            )
        )
        outline = person.script("getComputedStyle(document.activeElement).outlineStyle")
        assert outline != "none" or person.script("document.activeElement === document.body")
    for name in ("API key", "Forget key"):
        if name in reached:
            break
    else:
        raise AssertionError(reached)
    assert any(name.startswith("Turn 1") for name in reached), reached
    assert any(name.startswith("Theme") for name in reached), reached


def test_nothing_jumps_while_an_answer_comes(visit):
    """Cumulative layout shift, as browsers measure it, of what no input has caused."""
    person = visit()
    person.set_up(max_tokens=60)
    person.ask("Hello")
    person.script(
        """() => {
          window.shifted = 0;
          new PerformanceObserver((list) => {
            for (const entry of list.getEntries()) if (!entry.hadRecentInput) window.shifted += entry.value;
          }).observe({ type: "layout-shift" });
        }"""
    )
    person.ask("And now?")
    person.page.wait_for_timeout(500)
    assert person.script("window.shifted") < 0.1
