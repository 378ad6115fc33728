"""Required format of an answer: text, any JSON object, or JSON that fits a schema.

An unsupported schema is refused before generation. The error names the path of the unsupported keyword in the request.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field

from unisono.api.field_types import OpenModel, Parameters, Text, refused
from unisono.core.conversation import AnswerForm
from unisono.schemas import OPENAI, check

JSON_OBJECT: Final = "json_object"
JSON_SCHEMA: Final = "json_schema"
KINDS: Final = ("text", JSON_OBJECT, JSON_SCHEMA)
UNNAMED: Final = "response"

FormName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]


class SchemaSpec(OpenModel):
    """Named JSON schema. If `schema` is missing, any JSON object is valid."""

    name: FormName | None = None
    description: Text | None = None
    schema_: Parameters | None = Field(None, alias="schema")
    strict: bool | None = None

    def form(self, at: str) -> AnswerForm:
        """Return the format; `at` is the path of the schema in the request.

        Raises InvalidRequest for a schema that is invalid or not supported.
        """
        strict = bool(self.strict)
        if self.schema_ is not None:
            check(self.schema_, at, strict=OPENAI if strict else None)
        return AnswerForm(self.name or UNNAMED, self.schema_, self.description or "", strict)


def _check_kind(value: Any) -> Any:
    if isinstance(value, str) and value not in KINDS:
        raise refused(f"must be one of {', '.join(KINDS)}")
    return value


Kind = Annotated[Literal["text", "json_object", "json_schema"], BeforeValidator(_check_kind)]


class ResponseFormat(OpenModel):
    """`response_format` of Chat Completions.

    The field `json_schema` contains the schema. For the types `json_object` and `json_schema`, the schema may also be a
    field of this object itself, as in the Responses API.
    """

    type: Kind
    json_schema: SchemaSpec | None = None
    schema_: Parameters | None = Field(None, alias="schema")
    name: FormName | None = None
    description: Text | None = None
    strict: bool | None = None

    def form(self, at: str) -> AnswerForm | None:
        """Return the format, None for text; `at` is the path of the format in the request.

        Raises InvalidRequest for an unsupported schema. The error names a field below `at`.
        """
        if self.type == "text":
            return None
        if self.type == JSON_SCHEMA and self.json_schema is not None:
            return self.json_schema.form(f"{at}.json_schema.schema")
        flat = SchemaSpec(name=self.name, description=self.description, schema=self.schema_, strict=self.strict)
        return flat.form(f"{at}.schema")


class TextFormat(SchemaSpec):
    """`text.format` of the Responses API."""

    type: Kind

    def to_answer_form(self, at: str) -> AnswerForm | None:
        """Return the format, None for text; `at` is the path of the format in the request.

        Raises InvalidRequest for an unsupported schema. The error names a field below `at`.
        """
        if self.type == "text":
            return None
        return self.form(f"{at}.schema")

    def written(self) -> dict[str, Any]:
        """Return the format as the response repeats it."""
        if self.type != JSON_SCHEMA:
            return {"type": self.type}
        return {
            "type": JSON_SCHEMA,
            "name": self.name or UNNAMED,
            "description": self.description,
            "schema": self.schema_ if self.schema_ is not None else {"type": "object"},
            "strict": bool(self.strict),
        }
