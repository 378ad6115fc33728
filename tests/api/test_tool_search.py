"""Search among deferred tools: which are found, in which order."""

from __future__ import annotations

from time import process_time

import pytest

from unisono.api.tool_search import (
    BY_WORDS,
    MAX_FOUND,
    MAX_QUERY_WORDS,
    search_by_pattern,
    search_by_words,
    tool_search,
)
from unisono.core.conversation import FunctionTool, Json
from unisono.core.tool_host import found_names


def tool(name: str, description: str = "", **arguments: str) -> FunctionTool:
    fields = {key: {"type": "string", "description": text} for key, text in arguments.items()}
    return FunctionTool(name, description, {"type": "object", "properties": fields})


TOOLS = (
    tool("crm__listCustomers", "List all customers of a region.", region="Country or state"),
    tool("crm__get_invoice", "Get one invoice."),
    tool("mail__send", "Send an e-mail to customers.", to="Address", body="Text"),
    tool("wetter", "Zeigt das Wetter. 天気"),
    FunctionTool("run", "Run a script.", {"type": "string"}, free_text=True),
)
# Query, and the names that are found, in the order of their declaration.
QUERIES: dict[str, list[str]] = {
    "customer": ["crm__listCustomers", "mail__send"],
    "list customers": ["crm__listCustomers", "mail__send"],
    "CRM invoices": ["crm__listCustomers", "crm__get_invoice"],
    "state": ["crm__listCustomers"],
    "天気": ["wetter"],
    "script": ["run"],
    "nothing like it": [],
    "": [],
}


@pytest.mark.parametrize(("query", "names"), QUERIES.items(), ids=QUERIES)
def test_the_best_tools_are_found(query: str, names: list[str]) -> None:
    outcome = search_by_words(TOOLS, {"query": query})
    assert (found_names(outcome), outcome.is_error) == (names, False)
    assert outcome.text.startswith("Found: " if names else "No tool was found.")


def test_the_words_about_a_namespace_or_a_server_find_its_tools() -> None:
    billing = FunctionTool("billing__op1", namespace="billing", namespace_description="Invoices and refunds.")
    served = FunctionTool("docs__op2", server="docs")
    search = tool_search("find", BY_WORDS, [billing, tool("other")], {"docs": "Manuals."})
    assert found_names(search.run({"query": "refund an invoice"}, (served,))) == ["billing__op1"]
    assert found_names(search.run({"query": "manual"}, (served,))) == ["docs__op2"]


def test_of_many_tools_the_best_are_found() -> None:
    tools = [tool(f"pay{number}", "bill " * number) for number in range(MAX_FOUND + 3)]
    assert found_names(search_by_words(tools, {"query": "bill"})) == [each.name for each in tools[-MAX_FOUND:]]


PATTERNS: dict[str, list[str]] = {
    "customers": ["crm__listCustomers", "mail__send"],
    "^crm__": ["crm__listCustomers", "crm__get_invoice"],
    "(?i)GET_.*": ["crm__get_invoice"],
    "GET_": [],
}


@pytest.mark.parametrize(("pattern", "names"), PATTERNS.items(), ids=PATTERNS)
def test_a_pattern_finds_tools_in_their_order(pattern: str, names: list[str]) -> None:
    assert found_names(search_by_pattern(TOOLS, {"pattern": pattern})) == names
    assert found_names(search_by_pattern(TOOLS, {"query": pattern})) == names


# Arguments of models that forget the name of the argument, and the tools that are found.
OTHER_ARGUMENTS: list[tuple[dict[str, Json], list[str]]] = [
    ({"keywords": "invoice"}, ["crm__get_invoice"]),
    ({"paths": ["mail", 5]}, ["mail__send"]),
    ({"query": 5}, []),
    ({}, []),
]


@pytest.mark.parametrize(("arguments", "names"), OTHER_ARGUMENTS)
def test_all_texts_of_the_arguments_are_searched_for(arguments: dict[str, Json], names: list[str]) -> None:
    outcome = search_by_words(TOOLS, arguments)
    assert (found_names(outcome), outcome.is_error) == (names, False)


@pytest.mark.parametrize("arguments", [{}, {"pattern": 5}, {"pattern": ["a"]}])
def test_a_pattern_that_is_no_text_is_an_error(arguments: dict[str, Json]) -> None:
    assert search_by_pattern(TOOLS, arguments).is_error


@pytest.mark.parametrize("pattern", ["(", r"(a)\1", "(?=a)", "a{1000}{1000}", "(a{30}){30}"])
def test_a_pattern_that_cannot_run_is_an_error(pattern: str) -> None:
    many = tuple(tool(f"t{number}", "a" * 4_000) for number in range(512))
    outcome = search_by_pattern(many, {"pattern": pattern})
    assert outcome.is_error
    assert "'pattern'" in outcome.text


def test_many_tools_are_searched_in_time() -> None:
    many = tuple(tool(f"tool_{number}", "word " * 2_000) for number in range(512))
    began = process_time()
    outcome = search_by_words(many, {"query": " ".join(f"word{number} word" for number in range(200))})
    # It takes 0.3 s, in a thread of its own; the rest is for a busy machine.
    assert process_time() - began < 3
    assert len(found_names(outcome)) == MAX_FOUND


def test_only_the_first_words_of_a_query_count() -> None:
    words = [f"zebra{chr(97 + number // 26)}{chr(97 + number % 26)}" for number in range(MAX_QUERY_WORDS)]
    assert found_names(search_by_words(TOOLS, {"query": " ".join([*words[1:], "weather", "script"])})) == []
    assert found_names(search_by_words(TOOLS, {"query": " ".join([*words[1:], *words[1:], "script"])})) == ["run"]


def test_a_long_query_takes_no_longer_than_a_short_one() -> None:
    many = [tool(f"tool{number}", "Does something with customers.") for number in range(512)]
    words = " ".join(
        f"{chr(97 + a)}{chr(97 + b)}{chr(97 + c)}" for a in range(26) for b in range(26) for c in range(26)
    )
    began = process_time()
    search_by_words(many, {"query": words})
    assert process_time() - began < 1.0
