"""Background responses, generated independently of their client's connection.

One process owns each response and logs its events. If the owner dies, another process takes over. Readers of a response
read only the log.
"""
