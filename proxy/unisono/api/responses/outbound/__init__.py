"""Events of the engine to the Responses wire: the response object, its events one by one, and the answer as a whole.

The object a client gets, the one in the last event and the one that is kept are the same: all are made by
`response.to_response` from what `core.state` keeps.
"""
