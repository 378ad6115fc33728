"""Background responses, generated independently of their client's connection.

One process owns each response and logs its events. Another process takes over when the owner dies. Readers use only
the log.
"""
