"""The page's pure modules, in the engine that they run in."""

import json

import pytest


@pytest.fixture(scope="module")
def core(chromium, cluster):
    """Calls a function of a module: core("bars", "promptLanes", argument, ...)."""
    page = chromium.new_page()
    page.goto(cluster.url)
    root = page.locator('script[type="module"]').get_attribute("src").removesuffix("main.js")

    def call(module, name, *arguments):
        return page.evaluate(
            "([path, name, given]) => import(path).then((module) => module[name](...given))",
            [f"/{root}core/{module}.js", name, list(arguments)],
        )

    yield call
    page.close()


def usage(**tokens):
    names = ("prompt_tokens", "decode_prefix_len", "delta_tokens", "computed_tokens")
    return {name: tokens.get(name, 0) for name in names}


@pytest.mark.parametrize(
    ("plan", "told", "came", "computed"),
    [
        # Prefill holds less than decode, more, and all but the last token; nothing; plan local; both pull.
        ("remote", (100, 80, 20, 60, 0), {"found": 80, "moved": 20}, {"reused": 40, "computed": 60}),
        ("remote", (100, 20, 80, 50, 0), {"found": 20, "moved": 80}, {"reused": 50, "computed": 50}),
        ("remote", (100, 0, 100, 1, 0), {"moved": 100}, {"reused": 99, "computed": 1}),
        ("remote", (100, 0, 100, 100, 0), {"moved": 100}, {"computed": 100}),
        ("local", (100, 64, 0, 36, 0), {"found": 64, "computed": 36}, {"reused": 64, "computed": 36}),
        (
            "remote",
            (100, 80, 20, 20, 30),
            {"found": 80, "moved": 20},
            {"reused": 50, "pulled": 30, "computed": 20},
        ),
        (
            "local",
            (100, 64, 0, 36, 48),
            {"found": 16, "pulled": 48, "computed": 36},
            {"reused": 16, "pulled": 48, "computed": 36},
        ),
    ],
)
def test_a_prompts_lanes(core, plan, told, came, computed):
    names = ("prompt_tokens", "decode_prefix_len", "delta_tokens", "computed_tokens", "pulled_tokens")
    lanes = core("bars", "promptLanes", {"plan": plan, "usage": dict(zip(names, told, strict=True))})
    assert {one["kind"]: one["amount"] for one in lanes["came"]} == came
    assert {one["kind"]: one["amount"] for one in lanes["computed"]} == computed
    assert sum(came.values()) == sum(computed.values()) == lanes["whole"]


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("count", 1234567, "1,234,567"),
        ("bytes", 1023, "1023 B"),
        ("bytes", 163840, "160 KiB"),
        ("bytes", 1536, "1.5 KiB"),
        ("seconds", 0.0146, "15 ms"),
        ("seconds", 0.0004, "0.4 ms"),
        ("seconds", 1.234, "1.23 s"),
        ("seconds", 75, "1 min 15 s"),
        ("ago", 0.5, "now"),
        ("ago", 3700, "1 h ago"),
    ],
)
def test_numbers_as_people_read_them(core, name, value, text):
    assert core("format", name, value) == text


def rank_of(name, state="live", **load):
    worker, _, index = name.partition("/")
    return {
        "rank": {"worker": worker, "rank": int(index)},
        "role": "ROLE_DECODE",
        "state": state,
        "load": load,
    }


def test_a_rank_that_goes_stays_on_the_list_until_it_is_back(core):
    cluster = core("cluster", "newCluster")
    event = {"ranks": [rank_of("d/0", used_pages=3), rank_of("d/1")]}
    cluster = core("cluster", "applied", cluster, event, 100, True)
    assert cluster["ranks"]["d/0"]["load"]["used"] == 3
    cluster = core("cluster", "applied", cluster, {"gone": [{"worker": "d", "generation": "7"}]}, 101, False)
    assert (cluster["ranks"]["d/0"]["state"], cluster["ranks"]["d/0"]["load"]["used"]) == ("gone", 0)
    assert cluster["ranks"]["d/1"]["state"] == "live"
    back = core("cluster", "applied", cluster, {"ranks": [rank_of("d/0")]}, 120, False)
    assert (back["ranks"]["d/0"]["state"], back["ranks"]["d/0"]["backAt"]) == ("live", 120)
    assert "d/0" in core("cluster", "ticked", cluster, 130)["ranks"]
    assert "d/0" not in core("cluster", "ticked", cluster, 1000)["ranks"]


def test_a_rank_that_went_while_the_feed_was_cut_is_gone(core):
    cluster = core("cluster", "newCluster")
    cluster = core("cluster", "applied", cluster, {"ranks": [rank_of("d/0"), rank_of("d/1")]}, 100, True)
    cluster = core("cluster", "applied", cluster, {"ranks": [rank_of("d/1")]}, 110, True)
    assert {name: rank["state"] for name, rank in cluster["ranks"].items()} == {"d/0": "gone", "d/1": "live"}


def finished(request_id, prompt, found):
    placement = {"decode": {"worker": "d"}, "prefill": {"worker": "p", "rank": 2}, "plan": "PLAN_REMOTE"}
    usage = {"prompt_tokens": prompt, "decode_prefix_len": found, "kv_bytes_saved": str(2**40)}
    finish = {"placement": placement, "usage": usage, "reason": "FINISH_REASON_STOP"}
    return {"request_id": request_id, "outcome": "ok", "finish": finish}


def test_finished_requests_are_summed_once(core):
    cluster = core("cluster", "newCluster")
    for now, event in enumerate(
        ([finished("a", 100, 0)], [finished("a", 100, 0), finished("b", 100, 80)], [{"request_id": "c"}])
    ):
        cluster = core("cluster", "applied", cluster, {"finished": event}, now, False)
    assert [request["id"] for request in cluster["finished"]] == ["c", "b", "a"]
    assert cluster["totals"] == {
        "requests": 3,
        "prompt": 200,
        "found": 80,
        "pulled": 0,
        "reused": 0,
        "moved": 0,
        "saved": 2**41,
    }
    assert cluster["byRank"]["d/0"] == {"prompt": 200, "had": 80}
    assert cluster["placed"]["b"]["placed"]["prefill"] == "p/2"


def test_an_id_that_is_given_again_is_another_request(core):
    cluster = core("cluster", "newCluster")
    for ended_at_s in (1.0, 2.0, 2.0):
        told = [{**finished(name, 100, 0), "ended_at_s": ended_at_s} for name in ("r", "toString")]
        cluster = core("cluster", "applied", cluster, {"finished": told}, 0, False)
    assert [(request["id"], request["endedAt"]) for request in cluster["finished"]] == [
        ("toString", 2),
        ("r", 2),
    ]
    assert cluster["totals"]["requests"] == 4


def answer(**fields):
    base = {
        "role": "assistant",
        "content": "A",
        "reasoning": "",
        "calls": [],
        "tokenIds": [],
        "state": "done",
    }
    return {**base, **fields}


def test_what_of_a_conversation_is_sent(core):
    ask = {"role": "user", "content": "Q"}
    call = {"id": "c1", "name": "f", "args": "{}", "result": "21"}
    turns = [ask, answer(tokenIds=[1, 2]), ask, answer(state="failed"), ask, answer(content="", calls=[call])]
    sent = core("conversation", "messagesOf", turns, "S")
    assert [message["role"] for message in sent] == [
        "system",
        "user",
        "assistant",
        "user",
        "assistant",
        "tool",
    ]
    assert sent[2]["token_ids"] == [1, 2]
    assert sent[4]["tool_calls"][0]["function"] == {"name": "f", "arguments": "{}"}
    assert sent[5] == {"role": "tool", "tool_call_id": "c1", "content": "21"}
    thought = core("conversation", "messagesOf", [ask, answer(tokenIds=[1], reasoning="hm")], "")
    assert thought[1] == {"role": "assistant", "content": "A"}
    cut_short = core(
        "conversation", "messagesOf", [ask, answer(content="", reasoning="hm", state="stopped"), ask], ""
    )
    assert [message["role"] for message in cut_short] == ["user", "assistant", "user"]
    silent = core("conversation", "messagesOf", [ask, answer(content="", state="stopped"), ask], "")
    assert [message["role"] for message in silent] == ["user"]


def test_an_answer_grows_by_its_chunks(core):
    grown = core("conversation", "newAnswer", "r1")
    pieces = [
        {"reasoning_content": "h"},
        {"reasoning_content": "m"},
        {"content": "Hel"},
        {"content": "lo"},
        {"tool_calls": [{"index": 0, "id": "c", "function": {"name": "f", "arguments": '{"a"'}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": ": 1}"}}]},
    ]
    for delta in pieces:
        grown = core("conversation", "grown", grown, {"choices": [{"delta": delta, "token_ids": [1]}]})
    assert (grown["reasoning"], grown["content"], grown["state"]) == ("hm", "Hello", "streaming")
    assert (grown["calls"][0]["name"], json.loads(grown["calls"][0]["args"])) == ("f", {"a": 1})
    assert grown["tokenIds"] == [1] * 6


def test_settings_that_were_kept_by_another_version(core):
    kept = {"system": 7, "maxTokens": "many", "temperature": "0.5", "other": 1}
    settings = core("settings", "restored", kept)
    assert (settings["system"], settings["maxTokens"], settings["temperature"]) == ("", 512, "0.5")
    assert "other" not in settings
    assert core("settings", "restored", None)["maxTokens"] == 512


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("no code, but `a` word", ["no code, but `a` word"]),
        ("Here:\n```python\ndef f():\n    pass\n```\nDone.", ["Here:", ["def f():\n    pass"], "Done."]),
        ("````\n```\nx\n```\n````", [["```\nx\n```"]]),
        ("~~~\nx\n```\n~~~ y", [["x\n```\n~~~ y"]]),
        ("```\nstill being wr", [["still being wr"]]),
        ("```js", []),
        ("```not` a fence\nx", ["```not` a fence\nx"]),
    ],
)
def test_code_is_told_apart(core, text, pieces):
    found = core("format", "codeApart", text)
    assert [[one["text"]] if one["isCode"] else one["text"] for one in found] == pieces
