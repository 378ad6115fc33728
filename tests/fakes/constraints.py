"""Effect of an output constraint on the real servers: a grammar, nothing, or an error.

Each server reads its own fields and ignores all others. Constraints that it cannot compile are refused in its own way.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

TYPES = {"object", "array", "string", "integer", "number", "boolean", "null"}
VLLM_WORDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


class GrammarError(Exception):
    """Error message of the server for a constraint that it cannot compile."""


@dataclass(frozen=True)
class Held:
    """Constraint of a generation: a schema, a choice of texts, or a grammar of a text."""

    schema: Any = None
    texts: tuple[str, ...] = ()
    regex: str = ""
    gbnf: str = ""
    lark: str = ""

    def example(self) -> str:
        """Return an output that satisfies the constraint. The only grammars are those of a probe."""
        if self.regex or self.gbnf or self.lark:
            return "unisono"
        return self.texts[0] if self.texts else json.dumps(_example(self.schema), separators=(",", ":"))


def vllm(asked: dict[str, Any], *, knows_tags: bool = True) -> Held | None:
    constraint = asked.get("structured_outputs")
    if constraint is None:
        return None
    if not isinstance(constraint, dict):
        raise GrammarError("1 validation error: body.structured_outputs")
    words = [word for word in VLLM_WORDS if constraint.get(word) is not None]
    if len(words) != 1:
        raise GrammarError(f"You must use one kind of structured outputs constraint but {words} are specified")
    word, value = words[0], constraint[words[0]]
    if word == "json":
        return Held(_compiled(value if isinstance(value, dict) else json.loads(_text(value))))
    if word == "json_object" and value is True:
        return Held({"type": "object"})
    if word == "choice" and isinstance(value, list) and value and all(isinstance(each, str) for each in value):
        return Held(texts=tuple(value))
    if word == "regex":
        re.compile(_text(value))
        return Held(regex=value)
    if word == "grammar" and "::=" in _text(value):
        return Held(gbnf=value)
    # Its default engine reads Lark's notation without imports.
    if word == "grammar" and "%import" not in _text(value):
        return Held(lark=value)
    if word == "structural_tag" and knows_tags:
        tag = json.loads(_text(value))
        if tag["type"] == "structural_tag" and tag["format"]["type"] == "json_schema":
            return Held(_compiled(tag["format"]["json_schema"]))
    raise GrammarError(f"Invalid structured_outputs {word} specification.")


def sglang(asked: dict[str, Any]) -> Held | None:
    words = [word for word in ("json_schema", "regex", "ebnf", "structural_tag") if asked.get(word) is not None]
    if not words:
        return None
    if len(words) > 1:
        raise GrammarError("Only one of regex, json_schema, or ebnf can be set.")
    value = _text(asked[words[0]])
    if words[0] == "json_schema":
        return Held(_compiled(json.loads(value)))
    if words[0] == "regex":
        re.compile(value)
        texts = tuple(re.sub(r"\\(.)", r"\1", each) for each in re.findall(r"\(((?:[^()\\]|\\.)*)\)", value, re.S))
        if texts and all(re.fullmatch(value, each) for each in texts):
            return Held(texts=texts)
        return Held(regex=value)
    if words[0] == "ebnf":
        return Held(gbnf=value)
    raise GrammarError(f"cannot read this {words[0]}")


def llamacpp(asked: dict[str, Any]) -> Held | None:
    schema, grammar = asked.get("json_schema"), asked.get("grammar") or None
    if schema is not None and grammar is not None:
        raise GrammarError('Either "json_schema" or "grammar" can be specified, but not both')
    if schema is not None:
        return Held(_compiled(schema))
    if grammar is None:
        return None
    rule = re.fullmatch(r'root ::= ((?:"(?:[^"\\\n]|\\.)*"(?: \| )?)+)', _text(grammar))
    # Names of rules have no underscores, and a rule does not continue with an operator on the next line.
    names = re.sub(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]', "", grammar)
    if rule is None and re.search(r"(?m)^\s*root ::=", names) and not re.search(r"_|\n\s*\|", names):
        return Held(gbnf=grammar)
    if rule is None:
        raise GrammarError("Failed to initialize samplers: failed to parse grammar")
    return Held(texts=tuple(json.loads(f'"{each}"') for each in re.findall(r'"((?:[^"\\]|\\.)*)"', rule[1])))


def ollama(asked: dict[str, Any]) -> Held | None:
    output_format = asked.get("format")
    if output_format in (None, ""):
        return None
    if output_format == "json":
        return Held({"type": "object"})
    if not isinstance(output_format, dict):
        raise GrammarError('invalid format: "x"; expected "json" or a valid JSON Schema object')
    return Held(_compiled(output_format))


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise GrammarError("Input should be a valid string")
    return value


def _compiled(schema: Any) -> Any:
    """Return the schema after checks like those of a grammar compiler."""
    if not isinstance(schema, dict):
        raise GrammarError("schema must be an object")
    if json.dumps(schema).find("http://") >= 0:
        raise GrammarError("only references into the same document are supported")
    pending: list[Any] = [schema]
    while pending:
        each = pending.pop()
        if isinstance(each, list):
            pending += each
        elif isinstance(each, dict):
            if isinstance(each.get("type"), str) and each["type"] not in TYPES:
                raise GrammarError(f"Invalid type: {each['type']}")
            pending += each.values()
    return schema


def _example(schema: Any) -> Any:
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return schema["enum"][0]
    if schema.get("type") == "object":
        return {name: _example(schema["properties"][name]) for name in schema.get("required", ())}
    return {"array": [], "string": "x", "integer": 1, "number": 1, "boolean": True}.get(schema.get("type"))
