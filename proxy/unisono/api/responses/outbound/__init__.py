"""Conversion of engine events to the Responses API's objects and event streams.

The returned object, the object in the last event and the stored response are equal. `response.to_response` makes all
of them from the records of `core.state_store`.
"""
