"""Client for commands on one server, without unused parts of the Redis library.

The library's retries, metrics, locks, timeouts and packing in Python take several times as long as the rest of a
command.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from hiredis import pack_command
from redis.asyncio import Redis
from redis.asyncio.connection import AbstractConnection, ConnectionPool
from redis.asyncio.sentinel import SentinelConnectionPool
from redis.exceptions import ResponseError

Command = tuple[str | bytes | int, ...]


class CommandClient(Redis):
    """Client whose commands have no time limit. Cancelling a command closes its connection."""

    async def exchange(self, commands: Sequence[Command]) -> list[Any]:
        """Send commands on one connection, and return one answer for each.

        The answer to a command that the server rejects is the `ResponseError`.
        """
        pool: Any = self.connection_pool
        connection = await pool.get_connection()
        try:
            await connection.send_packed_command([pack_command(cast("Any", command)) for command in commands])
            answers: list[Any] = []
            for name, *_ in commands:
                try:
                    answers.append(await self.parse_response(connection, str(name)))
                except ResponseError as error:
                    answers.append(error)
        except BaseException:
            # Some answers may be unread. A later command on this connection would get them as its own.
            await connection.disconnect(nowait=True)
            raise
        else:
            return answers
        finally:
            await pool.release(connection)


class CommandPool(ConnectionPool):
    """Pool of connections for one event loop."""

    async def get_connection(self, command_name: object = None, *keys: object, **options: object) -> Any:
        connection: Any = self.get_available_connection()  # type: ignore[no-untyped-call]
        try:
            if connection.is_connected and self._is_outdated(connection):
                await connection.disconnect(nowait=True)
            # If there is data to read, the server has closed the connection, or no command waits for this answer.
            if not connection.is_connected or await connection.can_read():
                await self.ensure_connection(connection)
        except BaseException:
            await self.release(connection)
            raise
        return connection

    async def release(self, connection: AbstractConnection) -> None:
        self._in_use_connections.remove(connection)
        self._available_connections.append(connection)

    def _is_outdated(self, connection: Any) -> bool:
        return False


class SentinelCommandPool(CommandPool, SentinelConnectionPool):
    """Pool of connections to the primary that the sentinels reported last, for one event loop.

    A former primary accepts writes until the sentinels demote it. Therefore, connections to a former primary are closed
    before they are used again. Otherwise, consecutive commands could go to different servers.
    """

    def _is_outdated(self, connection: Any) -> bool:
        # When the primary changes, the library closes idle connections, but not those in use.
        return self.master_address not in (None, (connection.host, connection.port))
