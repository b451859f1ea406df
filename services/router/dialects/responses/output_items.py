"""Parts of an answer are items of a response's output."""

from services.router.dialects.answer_parts import Closed, Grown, Kind, Opened, Part, Step
from services.router.dialects.dialect_answer import Json

_PREFIXES = {Kind.THINKING: "rs", Kind.TEXT: "msg", Kind.CALL: "fc"}
COMPLETED, IN_PROGRESS, INCOMPLETE = "completed", "in_progress", "incomplete"


def item_id(part: Part, stem: str) -> str:
    return f"{_PREFIXES[part.kind]}_{stem}{part.index}"


def item(part: Part, stem: str, status: str, answer_id: str = "") -> Json:
    """Return the item. One in progress is empty yet. `answer_id` is what a client hands on with thinking:
    only the router reads it."""
    head = {"id": item_id(part, stem), "status": status}
    has_content = status != IN_PROGRESS
    match part.kind:
        case Kind.THINKING:
            content = [content_part(part)] if has_content else []
            handle = {"encrypted_content": answer_id} if answer_id else {}
            return {**head, "type": "reasoning", "summary": [], "content": content, **handle}
        case Kind.TEXT:
            content = [content_part(part)] if has_content else []
            return {**head, "type": "message", "role": "assistant", "content": content}
        case Kind.CALL:
            called = {"call_id": part.call_id, "name": part.name, "arguments": part.text}
            return {**head, "type": "function_call", **called}


def content_part(part: Part) -> Json:
    if part.kind is Kind.THINKING:
        return {"type": "reasoning_text", "text": part.text}
    return {"type": "output_text", "text": part.text, "annotations": [], "logprobs": []}


_TEXTS = {
    Kind.THINKING: "response.reasoning_text",
    Kind.TEXT: "response.output_text",
    Kind.CALL: "response.function_call_arguments",
}


class ItemEvents:
    def __init__(self, stem: str) -> None:
        self._stem = stem

    def of(self, step: Step, status: str, answer_id: str) -> list[Json]:
        """Return a step's events in order, without their numbers. `status` is the item's, if it is done."""
        match step:
            case Opened(part):
                opened = self._item("added", part, IN_PROGRESS, "")
                return [opened, *self._content("added", part)]
            case Grown(part, delta):
                return [self._text("delta", part, delta=delta)]
            case Closed(part):
                whole = "arguments" if part.kind is Kind.CALL else "text"
                named = {"name": part.name} if part.kind is Kind.CALL else {}
                done = self._text("done", part, **{whole: part.text}, **named)
                return [done, *self._content("done", part), self._item("done", part, status, answer_id)]

    def _item(self, verb: str, part: Part, status: str, answer_id: str) -> Json:
        whole = item(part, self._stem, status, answer_id)
        return {"type": f"response.output_item.{verb}", "output_index": part.index, "item": whole}

    def _content(self, verb: str, part: Part) -> list[Json]:
        if part.kind is Kind.CALL:
            return []
        place = {**self._place(part), "content_index": 0}
        return [{"type": f"response.content_part.{verb}", **place, "part": content_part(part)}]

    def _text(self, verb: str, part: Part, **members: str) -> Json:
        index = {} if part.kind is Kind.CALL else {"content_index": 0}
        logprobs: Json = {"logprobs": []} if part.kind is Kind.TEXT else {}
        return {"type": f"{_TEXTS[part.kind]}.{verb}", **self._place(part), **index, **members, **logprobs}

    def _place(self, part: Part) -> Json:
        return {"item_id": item_id(part, self._stem), "output_index": part.index}
