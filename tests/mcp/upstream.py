"""Real MCP server as a separate process, with every transport; run as a script.

    python upstream.py http      prints a JSON object with one address per transport: modern, modern_json, legacy,
                                 legacy_json, stateless, sse; `notes` is the file with a line for each started call
    python upstream.py stdio     uses standard input and output

The legacy transports refuse the newer handshake, like a server that does not know it.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import uvicorn
from mcp.server.mcpserver import AcceptedElicitation, Context, Elicit, ElicitationResult, MCPServer, Resolve
from mcp.shared.exceptions import UrlElicitationRequiredError
from mcp_types import (
    AudioContent,
    CallToolResult,
    ElicitRequestURLParams,
    EmbeddedResource,
    ImageContent,
    ResourceLink,
    TextContent,
    TextResourceContents,
    ToolAnnotations,
)
from pydantic import BaseModel, Field
from starlette.types import ASGIApp, Receive, Scope, Send

NOTES = Path(os.environ.get("UPSTREAM_NOTES") or tempfile.mkdtemp())


def note(line: str) -> None:
    with (NOTES / "calls").open("a") as calls:
        calls.write(f"{line}\n")


def build() -> MCPServer:
    # Logs are off, because the SDK formats each traceback in colour, which takes a second of processor time.
    server = MCPServer("upstream", log_level="CRITICAL")

    @server.tool(annotations=ToolAnnotations(read_only_hint=True))
    def echo(text: str) -> str:
        """Says what it is told."""
        note(f"echo {text}")
        return text

    @server.tool(structured_output=False)
    def mixed() -> CallToolResult:
        """A block of every kind."""
        return CallToolResult(
            content=[
                TextContent(text="words"),
                ImageContent(data="AAAA", mime_type="image/png"),
                AudioContent(data="AAAAAAAA", mime_type="audio/wav"),
                ResourceLink(name="report", uri="http://127.0.0.1:9/secret", mime_type="text/plain"),
                EmbeddedResource(resource=TextResourceContents(uri="file:///note", text="a note")),
            ]
        )

    @server.tool(structured_output=False)
    def facts() -> CallToolResult:
        return CallToolResult(content=[], structured_content={"answer": 42})

    @server.tool()
    async def slow(seconds: float, name: str = "") -> str:
        note(f"slow begins {name}")
        try:
            await asyncio.sleep(seconds)
        except asyncio.CancelledError:
            note(f"slow cancelled {name}")
            raise
        note(f"slow ends {name}")
        return "done"

    @server.tool()
    async def steps(ctx: Context) -> str:
        for step in (1, 2, 3):
            await ctx.report_progress(step, 3, f"step {step}")
        return "walked"

    @server.tool(structured_output=False)
    def huge(size: int) -> str:
        note("huge")
        return "ü" * (size // 2)

    @server.tool()
    def broken() -> str:
        raise ValueError("it does not work")

    @server.tool()
    async def grow(name: str, ctx: Context) -> str:
        """One tool more from now on."""

        def another() -> str:
            return name

        server.add_tool(another, name=name)
        await ctx.notify_tools_changed()
        await ctx.session.send_tool_list_changed()
        return "grown"

    @server.tool()
    def headers(ctx: Context) -> str:
        """The headers of this very call."""
        request = ctx.request_context.request
        return json.dumps(dict(request.headers) if request is not None else {})

    @server.tool()
    def environment() -> str:
        return json.dumps(dict(os.environ))

    @server.tool()
    def die(name: str = "") -> str:
        note(f"die {name}")
        os.kill(os.getpid(), signal.SIGKILL)
        return "never"

    @server.tool()
    def complain(lines: int) -> str:
        for _ in range(lines):
            print("x" * 5000, file=sys.stderr)
        return "complained"

    @server.tool()
    def child() -> str:
        """Starts a process of its own and says which."""
        process = subprocess.Popen(["sleep", "60"], stdin=subprocess.DEVNULL)
        return f"{os.getpid()} {process.pid}"

    @server.tool()
    def digits(number: int) -> str:
        return str(number)

    @server.tool()
    def mirrored(
        place: Annotated[str, Field(json_schema_extra={"x-mcp-header": "Place"})], number: int, ctx: Context
    ) -> str:
        """The header that repeats an argument, beside an argument."""
        request = ctx.request_context.request
        return f"{request.headers['mcp-param-place'] if request is not None else ''} {number}"

    add_questions(server)
    return server


class Trip(BaseModel):
    """Answer to the question when to travel."""

    day: str
    seats: int = Field(ge=1, le=9)


class Class(BaseModel):
    first: bool


def _when(city: str) -> Elicit[Trip]:
    return Elicit(f"When do you travel to {city}?", Trip)


def _class() -> Elicit[Class]:
    return Elicit("First class?", Class)


def add_questions(server: MCPServer) -> None:
    """Add tools that ask the user."""

    @server.tool()
    def book(city: str, trip: Annotated[ElicitationResult[Trip], Resolve(_when)]) -> str:
        """Book a trip."""
        if not isinstance(trip, AcceptedElicitation):
            note(f"book {city} {trip.action}")
            return f"not booked: {trip.action}"
        note(f"book {city} {trip.data.day} {trip.data.seats}")
        return f"booked {city} on {trip.data.day} for {trip.data.seats}"

    @server.tool()
    def upgrade(
        city: str,
        trip: Annotated[ElicitationResult[Trip], Resolve(_when)],
        wanted: Annotated[ElicitationResult[Class], Resolve(_class)],
    ) -> str:
        """Book a trip in a class."""
        day = trip.data.day if isinstance(trip, AcceptedElicitation) else trip.action
        first = wanted.data.first if isinstance(wanted, AcceptedElicitation) else wanted.action
        note(f"upgrade {city} {day} {first}")
        return f"{city} on {day}, first class: {first}"

    @server.tool()
    def files(name: str) -> str:
        """Files of the user, who must sign in before."""
        # The user signs in on the page.
        if len(name) > 99 or not (NOTES / f"signed-in-{name}").exists():
            url = name if ":" in name else f"https://sign-in.example.com/{name}"
            raise UrlElicitationRequiredError(
                [ElicitRequestURLParams(message="Sign in to see your files.", url=url, elicitation_id=name)]
            )
        return f"files of {name}"


class Legacy:
    """Middleware that refuses requests of the newer protocol."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope.get("headers") or [])
        if headers.get(b"mcp-protocol-version", b"").startswith(b"2026"):
            await send({"type": "http.response.start", "status": 400, "headers": []})
            await send({"type": "http.response.body", "body": b""})
            return
        await self._app(scope, receive, send)


async def serve() -> None:
    apps: dict[str, Any] = {
        "modern": build().streamable_http_app(),
        "modern_json": build().streamable_http_app(json_response=True),
        "legacy": Legacy(build().streamable_http_app()),
        "legacy_json": Legacy(build().streamable_http_app(json_response=True)),
        "stateless": Legacy(build().streamable_http_app(stateless_http=True)),
        "sse": build().sse_app(),
    }
    servers = {
        name: uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", timeout_graceful_shutdown=1))
        for name, app in apps.items()
    }
    running = [asyncio.create_task(server.serve()) for server in servers.values()]
    while not all(server.started for server in servers.values()):
        await asyncio.sleep(0.01)
    ports = {name: server.servers[0].sockets[0].getsockname()[1] for name, server in servers.items()}
    paths = {name: "/sse" if name == "sse" else "/mcp" for name in ports}
    urls = {name: f"http://127.0.0.1:{port}{paths[name]}" for name, port in ports.items()}
    print(json.dumps({**urls, "notes": str(NOTES / "calls")}), flush=True)
    await asyncio.gather(*running)


if __name__ == "__main__":
    if sys.argv[1] == "stdio":
        build().run("stdio")
    else:
        asyncio.run(serve())
