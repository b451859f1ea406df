"""Parts of a message reach templates of every kind as these were written for."""

import jinja2

from services.router.text.template_turns import TemplateContent

HEAD = "{% for m in messages %}<{{ m.role }}>"
LISTS = "{% for p in m.content %}{% if p.type == 'text' %}[{{ p.text | trim }}]{% endif %}{% endfor %}"
KINDS = {
    "strings": HEAD + "{{ m.content }}{% endfor %}",
    "trimmed": HEAD + "{{ m.content | trim }}{% endfor %}",
    "added": HEAD + "{{ m.content + '!' }}{% endfor %}",
    "as JSON": HEAD + "{{ m.content | tojson }}{% endfor %}",
    "lists": HEAD
    + "{% if m.content is string %}{{ m.content }}{% else %}"
    + LISTS
    + "{% endif %}{% endfor %}",
    "lists alone": HEAD + LISTS + "{% endfor %}",
    "lists of users": HEAD
    + "{% if m.role == 'user' and m.content is not string %}"
    + LISTS
    + "{% elif m.content is string %}{{ m.content }}{% endif %}{% endfor %}",
    "in order": "{% if messages[0].role != 'user' %}{{ nothing.at_all }}{% endif %}"
    + HEAD
    + "{{ m.content }}{% endfor %}",
}


def rendered(kind, role, content):
    template = jinja2.Environment().from_string(KINDS[kind])
    contents = TemplateContent(lambda messages: template.render(messages=messages))
    before = [{"role": "user", "content": "x"}] if kind == "in order" else []
    text = template.render(messages=[*before, {"role": role, "content": contents.of(role, content)}])
    return text.removeprefix("<user>x").removeprefix(f"<{role}>")


def test_parts_are_joined_as_the_template_does_and_a_string_stays_one(subtests):
    for kind, role, expected in [
        ("strings", "user", " a\n b"),
        ("strings", "tool", " a\n b"),
        ("trimmed", "user", "a\n b"),
        ("added", "user", " a\n b!"),
        ("as JSON", "user", '" a\\n b"'),
        ("lists", "user", "[a][b]"),
        ("lists", "assistant", "[a][b]"),
        ("lists", "system", "[a][b]"),
        ("lists alone", "user", "[a][b]"),
        ("lists of users", "user", "[a][b]"),
        ("lists of users", "system", " a\n b"),
        ("in order", "assistant", " a\n b"),
    ]:
        with subtests.test(kind=kind, role=role, expected=expected):
            assert rendered(kind, role, [" a", " b"]) == expected

    for kind in KINDS:
        for role in ["system", "user", "assistant", "tool"]:
            with subtests.test(kind=kind, role=role):
                expected = {"lists alone": "[a]", "added": "a!", "as JSON": '"a"'}.get(kind, "a")
                assert rendered(kind, role, "a") == expected


def test_a_template_is_tried_once_for_each_role():
    chats = []
    contents = TemplateContent(lambda messages: chats.append(messages) or "")
    for _ in range(3):
        contents.of("user", ["a"])
        contents.of("system", "a")
    assert len(chats) == 4  # with a string and with a list
