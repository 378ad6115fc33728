"""Failures of HTTP client connections and of the responses on them."""


class ConnectionFault(Exception):
    """Failure of a connection or of the response on it."""


class PoolClosed(ConnectionFault):
    """The pool was closed, so no connection is opened."""


class ConnectFailed(ConnectionFault):
    """No connection could be opened."""


class ConnectTimeout(ConnectionFault):
    """The server accepted no connection within the time limit."""


class ClosedBeforeResponse(ConnectionFault):
    """The server closed the connection before it sent a response head."""


class NotSent(ClosedBeforeResponse):
    """The connection was closed before any byte of the request was written."""


class ResponseCutShort(ConnectionFault):
    """The connection ended inside the body of a response."""


class InvalidResponse(ConnectionFault):
    """The server sent something other than an HTTP response."""


class ConnectionLost(ConnectionFault):
    """The connection was reset before the response head, or the gateway closed it."""
