"""Required form of an answer: `response_format`, and fields of vLLM, SGLang and llama.cpp.

An unsupported schema is refused before generation. The error names the path of the unsupported keyword in the request.
The fields of vLLM, SGLang and llama.cpp require a form of the final answer, but not of reasoning or tool calls. A
backend that can enforce the form does so. Otherwise the gateway checks the answer, and generates another answer if the
form is wrong. These fields apply to Chat Completions only; the other APIs refuse them.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, Final, Literal

import orjson
from pydantic import BeforeValidator, Field

from unisono.api.field_types import AtMost, FieldInput, OpenModel, Parameters, Text, invalid_field, refused
from unisono.core.conversation import AnswerForm, TextGrammar
from unisono.errors import InvalidRequest, UnsupportedValue
from unisono.schemas import MAX_GRAMMAR_CHARACTERS, OPENAI, BadGrammar, check, check_grammar

JSON_OBJECT: Final = "json_object"
JSON_SCHEMA: Final = "json_schema"
KINDS: Final = ("text", JSON_OBJECT, JSON_SCHEMA)
# Name of a form in the prompt if the request does not name it.
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


MAX_CHOICES: Final = 1_000
MAX_CHOICE_CHARACTERS: Final = 4_096


def _to_schema(value: Any) -> Any:
    """Parse a schema that is given as JSON text; return any other value unchanged."""
    if not isinstance(value, str):
        return value
    try:
        return orjson.loads(value)
    except orjson.JSONDecodeError:
        raise invalid_field("must be a JSON schema, either as an object or as JSON text") from None


Schema = Annotated[Parameters, BeforeValidator(_to_schema), FieldInput(dict[str, Any] | str | None)]
ChoiceText = Annotated[Text, Field(min_length=1, max_length=MAX_CHOICE_CHARACTERS)]
Choices = Annotated[list[ChoiceText], Field(min_length=1), AtMost(MAX_CHOICES)]
Pattern = Annotated[Text, Field(min_length=1)]


class StructuredOutputs(OpenModel):
    """vLLM's `structured_outputs`. Only one of the fields may be set."""

    json_: Schema | None = Field(None, alias="json")
    regex: Pattern | None = None
    choice: Choices | None = None
    grammar: Pattern | None = None
    json_object: bool | None = None
    structural_tag: Any = None


class StructuredFields(OpenModel):
    """Structured output fields of a request, under the names of several servers."""

    structured_outputs: StructuredOutputs | None = None
    # vLLM before version 0.12
    guided_json: Schema | None = None
    guided_regex: Pattern | None = None
    guided_choice: Choices | None = None
    guided_grammar: Pattern | None = None
    # SGLang
    regex: Pattern | None = None
    ebnf: Pattern | None = None
    # llama.cpp
    grammar: Pattern | None = None
    json_schema: Schema | None = None


_FIELDS: Final = frozenset(StructuredFields.model_fields)


def to_answer_form(fields: StructuredFields, response_format: AnswerForm | None) -> AnswerForm | None:
    """Return the required form of the answer; None if any text is valid.

    Raises InvalidRequest if several fields require a form, or if the gateway cannot check the form. The error names the
    field.
    """
    if _FIELDS.isdisjoint(fields.__pydantic_fields_set__):
        return response_format
    found = [*_requested(fields)]
    if len(found) > (response_format is None):
        first, second = ("response_format", found[0][0]) if response_format is not None else (found[0][0], found[1][0])
        raise InvalidRequest(
            f"'{second}': '{first}' already requires a form of the answer; send only one of them.", param=second
        )
    if not found:
        return response_format
    at, convert, value = found[0]
    return convert(value, at)


def form_field(fields: StructuredFields) -> str:
    """Return the path of the field that requires the form of the answer."""
    return next((path for path, _, _ in _requested(fields)), "response_format")


Converter = Callable[[Any, str], AnswerForm]


def _requested(fields: StructuredFields) -> Iterator[tuple[str, Converter, Any]]:
    """Yield the path, the converter and the value of each field that requires a form.

    Raises UnsupportedValue for a structural tag.
    """
    outputs = fields.structured_outputs
    if outputs is not None:
        if outputs.structural_tag is not None:
            at = "structured_outputs.structural_tag"
            raise UnsupportedValue(f"'{at}' is not supported; use 'structured_outputs.json' or tools.", param=at)
        for name, convert in _CONVERTERS.items():
            if (value := getattr(outputs, "json_" if name == "json" else name)) is not None:
                yield f"structured_outputs.{name}", convert, value
        if outputs.json_object:
            yield "structured_outputs.json_object", lambda value, at: AnswerForm(UNNAMED), True
    for name, kind in _FIELD_KINDS.items():
        if (value := getattr(fields, name)) is not None:
            yield name, _CONVERTERS[kind], value


def _json(schema: dict[str, Any], at: str) -> AnswerForm:
    check(schema, at)
    return AnswerForm(UNNAMED, schema)


def _choice(choices: list[str], at: str) -> AnswerForm:
    return AnswerForm(UNNAMED, choices=tuple(dict.fromkeys(choices)))


def _regex(pattern: str, at: str) -> AnswerForm:
    return _text(TextGrammar("regex", pattern), at)


# A Lark grammar defines the rule `start`, possibly with the prefixes `?` and `!`, or with attributes in brackets.
_LARK: Final = re.compile(r"^\s*(?:%llguidance\b|[?!]{0,2}start\b[^:\"|\n]*:(?!:))", re.MULTILINE)


def _grammar(definition: str, at: str) -> AnswerForm:
    """Return the form for a grammar in the notation of Lark or GBNF. (vLLM calls GBNF "EBNF".)"""
    # Imported on first use: the module is only needed for grammars.
    from llguidance.gbnf_to_lark import gbnf_to_lark

    if len(definition) > MAX_GRAMMAR_CHARACTERS:
        raise UnsupportedValue(f"'{at}' has more than {MAX_GRAMMAR_CHARACTERS:,} characters; shorten it.", param=at)
    if _LARK.search(definition):
        return _text(TextGrammar("lark", definition), at)
    try:
        lark = gbnf_to_lark(_ESCAPED.sub(_unescaped, definition))
    # The converter raises plain exceptions for some invalid grammars.
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise UnsupportedValue(
            f"'{at}' is not a grammar in the notation of GBNF or Lark: {reason}.", param=at
        ) from None
    return _text(TextGrammar("lark", lark, gbnf=definition), at)


# The pattern also matches an escaped backslash, so that `\\u0041` stays unchanged.
_ESCAPED: Final = re.compile(r"\\u([0-9A-Fa-f]{4})|\\U([0-9A-Fa-f]{8})|\\.", re.DOTALL)


def _unescaped(found: re.Match[str]) -> str:
    """Return the character of a long escape sequence, which the converter would misread."""
    code = int(found[1] or found[2] or "0", 16)
    if not code or code > sys.maxunicode or 0xD800 <= code < 0xE000:
        return found[0]
    return f"\\x{code:02x}" if code < 0x80 else chr(code)


def _text(grammar: TextGrammar, at: str) -> AnswerForm:
    try:
        check_grammar(grammar)
    except BadGrammar as error:
        raise UnsupportedValue(f"'{at}' cannot be enforced: {error}.", param=at) from None
    return AnswerForm(UNNAMED, grammar=grammar)


_CONVERTERS: Final[Mapping[str, Converter]] = {"json": _json, "regex": _regex, "choice": _choice, "grammar": _grammar}
# Kind of form that each field requires, keyed by the field's name.
_FIELD_KINDS: Final[Mapping[str, str]] = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "regex": "regex",
    "ebnf": "grammar",
    "grammar": "grammar",
    "json_schema": "json",
}


# Fields of Chat Completions that require a form of the answer.
FORM_FIELDS: Final = frozenset(
    {
        *("response_format", "structured_outputs", "guided_json", "guided_choice", "guided_regex", "guided_grammar"),
        *("regex", "ebnf", "json_schema", "grammar"),
    }
)


def refuse_forms(request: OpenModel, remedy: str) -> None:
    """Raise UnsupportedValue if a field of Chat Completions requires a form of the answer.

    A note would not be enough, because the client would parse the answer as if it had the required form.
    """
    fields = request.model_extra or {}
    for name in FORM_FIELDS & fields.keys():
        if (value := fields[name]) and value != {"type": "text"}:
            raise UnsupportedValue(f"'{name}' is not supported by this API; {remedy}.", param=name)
