"""These tests show what the cluster does with it, as the page shows it."""

import re

import pytest
from playwright.sync_api import expect

from page.visitor import LONG_MS

LONG = "Tell me about the isthmus of Corinth and its canal. " * 6


def numbers(turn):
    """What stands below the prompt's bar: {"prompt tokens": 312, "found": 0, ...}."""
    pieces = turn.locator(".numbers").first.locator("> span").all_inner_texts()
    found = [re.match(r"([\d,]+) (prompt tokens|found|moved|computed)", piece.strip()) for piece in pieces]
    return {match[2]: int(match[1].replace(",", "")) for match in found if match}


def width(turn, kind):
    """Of a segment of the bar's upper lane, as a share."""
    bar = turn.locator(".prompt-bar > .bar:not(.thin)").bounding_box()["width"]
    segment = turn.locator(f'.prompt-bar > .bar:not(.thin) > [data-kind="{kind}"]')
    return segment.bounding_box()["width"] / bar if segment.count() else 0.0


def test_the_second_turn_finds_what_the_first_one_left(visit):
    person = visit()
    person.set_up(max_tokens=24)
    person.ask(LONG)
    person.ask("And the canal of Panama?")
    person.page.wait_for_timeout(400)  # the bar has grown to its width
    second, first = person.turns.nth(0), person.turns.nth(1)
    told = numbers(second)
    assert told["prompt tokens"] == told["found"] + told["moved"]
    assert told["found"] > 250 and told["moved"] < 150
    assert abs(width(second, "found") - told["found"] / told["prompt tokens"]) < 0.02
    assert abs(width(second, "moved") - told["moved"] / told["prompt tokens"]) < 0.02
    assert width(second, "found") > width(first, "found")
    expect(second.locator(".way")).to_have_text(re.compile(r"^prefill/0 → decode/[01]$"))
    expect(second.get_by_label(re.compile("Time to the first token: .*compute"))).to_be_visible()
    # The chat says the same, and leads there.
    caption = person.answers.last.locator(".caption-button")
    expect(caption).to_contain_text(f"{told['found']} of {told['prompt tokens']} found")
    assert (
        person.page.get_by_label("Totals").get_by_text("KV saved").locator("..").locator("dd").inner_text()
        != "0 B"
    )


def test_a_click_shows_the_price_list(visit):
    person = visit()
    person.set_up(max_tokens=24)
    person.ask(LONG)
    turn = person.turns.first
    expect(turn.locator(".prices")).to_be_hidden()
    turn.locator("summary").click()
    prices = turn.locator(".prices li")
    expect(prices).to_have_count(2)
    expect(prices.nth(0)).to_have_attribute("data-chosen", "true")
    expect(prices.nth(0)).to_contain_text("compute")
    turn.locator("summary").press("Enter")
    expect(turn.locator(".prices")).to_be_hidden()


@pytest.mark.timeout(500)
def test_a_rank_is_killed_and_comes_back(visit, cluster):
    person = visit()
    person.set_up(max_tokens=24)
    rank = person.rank("decode/1")
    expect(rank).to_have_attribute("data-state", re.compile("live|back"))
    cluster.kill_rank("decode", 1)
    expect(rank).to_have_attribute("data-state", re.compile("suspect|gone"), timeout=LONG_MS)
    person.ask("Hello")  # by the other one
    expect(person.turns.first.locator(".way")).to_contain_text("decode/0")
    expect(rank).to_have_attribute("data-state", re.compile("back|live"), timeout=4 * LONG_MS)


def test_requests_of_others_are_told_to_whom_they_concern(visit, chromium):
    acme, other, operator = visit(key="acme-key"), visit(key="bare-key"), visit(key="ours-key")
    for person in (acme, operator):
        person.set_up(max_tokens=16)
    second = visit(key="acme-key")
    acme.ask("Hello")
    mine = acme.turns.first.get_attribute("data-request")
    seen = [person.page.locator(f'.request-id[title="{mine}"]') for person in (second, other, operator)]
    expect(seen[0]).to_be_visible()
    everybodys = operator.page.get_by_label("everybody's")
    everybodys.check()
    acme.ask("And now?")
    mine = acme.turns.first.get_attribute("data-request")
    expect(operator.page.locator(f'.request-id[title="{mine}"]')).to_be_visible()
    assert seen[1].count() == 0
    # Others may not, are told so where they asked, and see their own still.
    other.page.get_by_label("everybody's").click()
    expect(other.page.get_by_role("alert")).to_contain_text("operator")
    expect(other.page.get_by_label("everybody's")).not_to_be_checked()
    expect(other.link).to_have_attribute("data-link", "live")


def test_no_prompt_is_in_what_is_told_of_requests(visit):
    first, second = visit(), visit()
    first.set_up(max_tokens=16)
    first.ask("the word that is nowhere else: chrysanthemum")
    request = first.turns.first.get_attribute("data-request")
    shown = second.page.locator(f'.request-id[title="{request}"]')
    expect(shown).to_be_visible()
    shown.click()
    expect(second.page.locator(f"#turn-{request} .prices")).to_be_visible()
    assert "chrysanthemum" not in second.page.content()


def test_the_feed_is_read_again_after_it_was_cut(visit):
    person = visit()
    person.context.set_offline(True)
    # The stream that stands is not cut by that: another one is asked for.
    person.page.get_by_label("everybody's").evaluate("box => box.click()")
    expect(person.link).to_have_attribute("data-link", "lost")
    person.context.set_offline(False)
    expect(person.link).to_have_attribute("data-link", re.compile("live|forbidden"), timeout=LONG_MS)
