"""Server-sent events, as they are written (the `text/event-stream` of the HTML standard)."""

EVENT_STREAM = b"text/event-stream"
HEADERS = b"Cache-Control: no-store\r\nX-Content-Type-Options: nosniff\r\nX-Accel-Buffering: no\r\n"
# A comment: it keeps proxies from taking the connection for dead, and shows whether the client is still there.
HEARTBEAT = b":\n\n"


def event_of(data: bytes, name: bytes = b"", event_id: bytes = b"") -> bytes:
    """An event with this data; nothing for nothing."""
    if not data:
        return b""
    if b"\n" in data or b"\r" in data:  # a line each, of which the client makes one text again
        data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n").replace(b"\n", b"\ndata: ")
    named = b"event: %b\n" % name if name else b""
    numbered = b"id: %b\n" % event_id if event_id else b""
    return b"%b%bdata: %b\n\n" % (named, numbered, data)


def retry_after(seconds: float) -> bytes:
    """The line that sets how long a browser waits before it connects again."""
    return b"retry: %d\n\n" % round(seconds * 1000)
