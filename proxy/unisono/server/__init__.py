"""The serving process: everything around the application that uvicorn does not do.

uvicorn runs the event loop, parses HTTP and WebSockets, and closes idle connections. A module stays here only for a
property that uvicorn lacks. Its docstring states the property and a figure. All figures were measured with uvicorn
0.54, uvloop and httptools over loopback, on a busy machine with two cores.
"""
