"""What a router is yet to be told of its requests. Pure."""

from services.values.prompt_logprobs import MAX_BYTES as MAX_PROMPT_BYTES
from services.values.request import Output
from services.wire import convert_request
from services.wire.isthmus.v1 import decode_pb2


class Outbox:
    """In the order of each request. Tokens of which there is nothing else to tell are no outputs where the
    request has a number: two numbers each, in arrays of all requests, cost a tenth of a message."""

    def __init__(self) -> None:
        self._numbers: list[int] = []
        self._token_ids: list[int] = []
        self._outputs: list[decode_pb2.RequestOutput] = []
        self._behind: set[str] = set()  # requests that have outputs here, which their tokens come behind

    def __bool__(self) -> bool:
        return bool(self._outputs or self._token_ids)

    def put(self, request_id: str, output: Output, number: int = 0) -> None:
        if number and output.is_tokens_alone and request_id not in self._behind:
            self._numbers += [number] * len(output.token_ids)
            self._token_ids += output.token_ids
        else:
            self.put_message(convert_request.output_to_proto(request_id, output))

    def put_token(self, request_id: str, number: int, token_id: int) -> None:
        """As `put` of a token alone."""
        if number and request_id not in self._behind:
            self._numbers.append(number)
            self._token_ids.append(token_id)
        else:
            self.put_message(decode_pb2.RequestOutput(request_id=request_id, token_ids=(token_id,)))

    def put_message(self, output: decode_pb2.RequestOutput) -> None:
        self._outputs.append(output)
        self._behind.add(output.request_id)

    def take(self) -> decode_pb2.StepOutputs:
        """All that one message holds. What is told of prompts may be large; of one it fits."""
        outputs, self._outputs = _fitting(self._outputs)
        message = decode_pb2.StepOutputs(outputs=outputs, numbers=self._numbers, token_ids=self._token_ids)
        self._numbers, self._token_ids = [], []
        self._behind = {output.request_id for output in self._outputs}
        return message


def _fitting(
    outputs: list[decode_pb2.RequestOutput],
) -> tuple[list[decode_pb2.RequestOutput], list[decode_pb2.RequestOutput]]:
    """Those for one message, and those for the next."""
    size = 0
    for index, output in enumerate(outputs):
        size += output.prompt_logprobs.ByteSize() if output.HasField("prompt_logprobs") else 0
        if size > MAX_PROMPT_BYTES and index:
            return outputs[:index], outputs[index:]
    return outputs, []
