"""Failures of connections to backends and of the responses on them."""


class ConnectionFault(Exception):
    """Failure of a connection or of the response on it."""


class ConnectFailed(ConnectionFault):
    """No connection could be opened."""


class ConnectTimeout(ConnectionFault):
    """No connection was accepted in time."""


class ClosedBeforeResponse(ConnectionFault):
    """The backend closed the connection before it sent a response head."""


class ResponseCutShort(ConnectionFault):
    """The connection ended inside the body of a response."""


class InvalidResponse(ConnectionFault):
    """The backend sent something other than an HTTP response."""


class ConnectionLost(ConnectionFault):
    """The connection was reset before the response head, or the gateway closed it."""
