"""Text of files in requests: formats, downloads, and extraction in a separate process."""
