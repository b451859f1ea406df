"""What an answer's text must be, where a body says it."""

from services.router.dialects.body import Body, json_text
from services.wire.isthmus.v1.common_pb2 import Constraint


def schema_constraint(holder: Body, member: str = "schema") -> Constraint:
    """A JSON schema that is a member of `holder`. Raises InvalidParameter."""
    schema = holder.get(member)
    if not isinstance(schema, dict):
        raise holder.wrong(member, "must be an object: a JSON schema")
    return Constraint(json_schema=json_text(schema, holder.name_of(member)))
