"""Takes what is sent by OTLP over HTTP and throws it away, as cheaply as may be: bench/trace_receiver.py PORT."""

import asyncio
import sys

TAKEN = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"


class Taker(asyncio.Protocol):
    """One connection."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.head = b""
        # Bytes of the body that are still to come.
        self.left = 0

    def data_received(self, data: bytes) -> None:
        while data:
            if not self.left:
                self.head, end, data = (self.head + data).partition(b"\r\n\r\n")
                if not end:
                    return
                lines = self.head.lower().split(b"\r\n")
                self.left = next(int(line[15:]) for line in lines if line.startswith(b"content-length:"))
                self.head = b""
            taken = min(self.left, len(data))
            self.left -= taken
            data = data[taken:]
            if not self.left:
                self.transport.write(TAKEN)


async def main(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(Taker, "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1])))
