"""`unisono mcp serve`: the tool servers over HTTP and over standard input and output."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import httpx2
import pytest
from click.testing import CliRunner
from mcp.client.client import Client
from mcp.client.stdio import StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client

from tests.toolservers.running import UNISONO, called, command, text_of
from unisono.cli import main

ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "a.md").write_text("# The answer\n\nIt is 42.\n")
    return tmp_path


def by_stdio(*arguments: str) -> Client:
    program, *rest = UNISONO
    return Client(stdio_client(StdioServerParameters(command=program, args=[*rest, *arguments], cwd=ROOT)))


@pytest.mark.slow
async def test_the_browser_is_served_over_http(folder: Path) -> None:
    async with command("mcp", "serve", "browser", "--folder", str(folder), "--port", "0") as (process, lines):
        assert lines[0] == f"Search: {folder}."
        async with Client(lines[-1].split()[-1]) as client:
            assert "【0†The answer】 # The answer It is 42." in text_of(await called(client, "search", query="answer"))
            assert "L4: It is 42." in text_of(await called(client, "open", id=0))
        process.terminate()
        # The signal ends the server without a traceback: uvicorn sends it again after the shutdown.
        assert await asyncio.wait_for(process.wait(), 30) == -signal.SIGTERM


@pytest.mark.slow
async def test_the_browser_is_served_over_standard_output(folder: Path) -> None:
    async with by_stdio("mcp", "serve", "browser", "--folder", str(folder), "--stdio") as client:
        await called(client, "search", query="answer")
        assert "L4: It is 42." in text_of(await called(client, "open", id=0))


@pytest.mark.slow
async def test_python_is_served_over_http_and_prints_its_restrictions() -> None:
    async with command("mcp", "serve", "python", "--port", "0", "--seconds", "5") as (_, lines):
        assert lines[0].startswith("Code runs with ")
        assert "network" in lines[0].lower()
        assert "This is not a security boundary" in lines[1]
        async with Client(lines[-1].split()[-1]) as client:
            assert text_of(await called(client, "python", code="print(42)")) == "42\n"


async def test_python_is_served_over_standard_output() -> None:
    async with by_stdio("mcp", "serve", "python", "--stdio") as client:
        assert text_of(await called(client, "python", code="print(42)")) == "42\n"


@pytest.mark.slow
async def test_web_pages_cannot_drive_a_server(folder: Path) -> None:
    async with command("mcp", "serve", "browser", "--folder", str(folder), "--port", "0") as (_, lines):
        url = lines[-1].split()[-1]
        body = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}
        async with httpx2.AsyncClient() as client:
            for headers, status in (({"origin": "https://evil.com"}, 403), ({"host": "evil.com"}, 421)):
                answer = await client.post(url, json=body, headers={"accept": "application/json", **headers})
                assert answer.status_code == status


async def test_a_configured_key_is_required(folder: Path) -> None:
    arguments = ("mcp", "serve", "browser", "--folder", str(folder), "--port", "0", "--key-variable", "THE_KEY")
    async with command(*arguments, THE_KEY="open sesame") as (_, lines):
        url = lines[-1].split()[-1]
        async with httpx2.AsyncClient() as client:
            for headers in ({}, {"authorization": "Bearer wrong"}):
                assert (await client.post(url, json={}, headers=headers)).status_code == 401
        authorized = httpx2.AsyncClient(headers={"authorization": "Bearer open sesame"})
        async with authorized, Client(streamable_http_client(url, http_client=authorized)) as mcp_client:
            assert "42" in text_of(await called(mcp_client, "search", query="answer"))


MISTAKES = {
    "no search source": (["browser"], "give either --searxng or --folder"),
    "two search sources": (["browser", "--folder", ".", "--searxng", "http://x"], "give either --searxng or --folder"),
    "invalid URL": (["browser", "--searxng", "example.com"], "--searxng: must be an http or https URL"),
    "missing folder": (["browser", "--folder", "/nowhere"], "/nowhere: the folder does not exist"),
    "public address without a key": (["browser", "--folder", ".", "--host", "0.0.0.0"], "a key is required"),
    "host name without a key": (["browser", "--folder", ".", "--host", "example.com"], "a key is required"),
    "unset key variable": (
        ["browser", "--folder", ".", "--key-variable", "NO_KEY"],
        "the environment variable NO_KEY is not set",
    ),
    "invalid port": (["browser", "--folder", ".", "--host", "127.0.0.1", "--port", "1x"], "'1x' is not a valid"),
    "missing interpreter": (["python", "--python", "/nowhere/python"], "/nowhere/python: cannot be run"),
}


@pytest.mark.parametrize(("arguments", "sentence"), MISTAKES.values(), ids=MISTAKES)
def test_invalid_arguments_are_explained(arguments: list[str], sentence: str) -> None:
    result = CliRunner().invoke(main, ["mcp", "serve", *arguments])
    assert result.exit_code != 0
    assert sentence in result.output
