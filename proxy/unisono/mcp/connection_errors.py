"""Errors that explain a failed connection to a tool server."""

from __future__ import annotations

from mcp.shared.exceptions import MCPError
from pydantic import ValidationError

from unisono.core.tool_host import ToolServer
from unisono.errors import (
    ToolServerError,
    ToolServerProtocolError,
    ToolServerTimeout,
    ToolServerUnauthorized,
    ToolServerUnavailable,
)
from unisono.mcp.messages import Exchange


def connection_error(
    server: ToolServer, exchange: Exchange, failure: BaseException | None, *, is_stopped: bool
) -> ToolServerError:
    """Return the error to raise for callers that wait for a connection.

    `exchange` is the record of the handshake, and `failure` its exception, None if it is still running. `is_stopped` is
    True if the connection has ended or is being closed.
    """
    name = f"The tool server {server.label!r}"
    if (refusal := credentials_error(name, exchange)) is not None:
        return refusal
    if exchange.problem:
        return ToolServerUnavailable(f"{name} cannot be used: {exchange.problem}.")
    if exchange.status >= 300:
        return ToolServerUnavailable(f"{name} answered with HTTP {exchange.status}.")
    if failure is None and is_stopped:
        return ToolServerUnavailable(f"{name} was disconnected before it was ready.")
    if failure is None:
        return ToolServerTimeout(f"{name} was not ready within {server.timeouts.connect_s:g} seconds.")
    if is_stopped:
        return ToolServerUnavailable(f"{name} ended the connection before it was ready.")
    if any(isinstance(error, MCPError | ValidationError | RuntimeError) for error in _flatten(failure)):
        return ToolServerProtocolError(
            f"{name} failed the MCP handshake: no common protocol version, or an invalid message."
        )
    return ToolServerUnavailable(f"{name} cannot be reached or started. Check its URL or command.")


def credentials_error(name: str, exchange: Exchange) -> ToolServerUnauthorized | None:
    """Return an error if the server rejected the credentials, otherwise None.

    The text of the error begins with `name`.
    """
    if exchange.status not in (401, 403):
        return None
    return ToolServerUnauthorized(
        f"{name} rejected the credentials (HTTP {exchange.status}). Check the credentials for this server."
    )


def kinds_of(error: BaseException) -> str:
    """Describe an error by its class names only: its text may contain content and addresses."""
    return ", ".join(sorted({type(leaf).__name__ for leaf in _flatten(error)}))


def _flatten(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in _flatten(inner)]
    return [error]
