"""The events by which an item of a response comes.

message, reasoning    output_item.added, content_part.added, TEXT.delta*, TEXT.done, content_part.done,
                      output_item.done                       TEXT: output_text, reasoning_text
function_call         output_item.added, function_call_arguments.delta*, .done, output_item.done
"""

from services.router.dialects.answer import Json
from services.router.dialects.parts import Closed, Grown, Kind, Opened, Part, Step
from services.router.dialects.responses.output import IN_PROGRESS, content_part, item, item_id

_TEXTS = {
    Kind.THINKING: "response.reasoning_text",
    Kind.TEXT: "response.output_text",
    Kind.CALL: "response.function_call_arguments",
}


class ItemEvents:
    def __init__(self, stem: str) -> None:
        """`stem`: of the items' ids."""
        self._stem = stem

    def of(self, step: Step, status: str, answer_id: str) -> list[Json]:
        """In order, without their numbers. `status` is the item's, if it is done."""
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
