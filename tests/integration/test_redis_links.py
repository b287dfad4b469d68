"""Connections to real Redis servers: whatever happens to them, each caller gets its own reply or the true failure."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import hiredis
import pytest
import uvloop

from carpool.broker.redis.client.address import NO_FILES, parse_broker_url
from carpool.broker.redis.client.link import (
    TICKS_PER_TIMEOUT,
    Command,
    CommandLink,
    Link,
    Lost,
    NoRoom,
    NotSent,
    RedisFailure,
    Refused,
    SentCommand,
)
from carpool.broker.redis.client.nodes import Nodes, parse_redirection
from carpool.broker.redis.client.topology import SlotRange, parse_slots
from carpool.core.names import TlsFiles
from carpool.testing import FakeClock
from support.certificates import Certificates
from support.processes import PATIENCE_S, until
from support.redis_nodes import connected, script_of
from support.redis_servers import HOST, RedisServer, free_port, running_redis
from support.stream_server import stream_server

RUNNERS = [asyncio.run, uvloop.run]
Run = Callable[[Coroutine[Any, Any, None]], None]


async def answers_of(nodes: Nodes, slot: int, commands: list[Command]) -> list[Any]:
    """What each caller was called back with; fails if one is called twice, or too early."""
    answers: dict[int, Any] = {}
    is_sent = False

    def note(number: int, reply: Any) -> None:
        assert is_sent, "called back before send returned"
        assert number not in answers, "called back twice"
        answers[number] = reply

    for number, command in enumerate(commands):
        nodes.send(slot, partial(note, number), *command)
    is_sent = True
    await until(lambda: len(answers) == len(commands))
    return [answers[number] for number in range(len(commands))]


# One link, with a transport that the test sees.


class RecordingTransport(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []
        self.is_aborted = False

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written.append(bytes(data))

    def abort(self) -> None:
        self.is_aborted = True


class OneLink:
    """A greeted CommandLink whose server is the test."""

    def __init__(self, timeout_s: float = PATIENCE_S, pending_bytes_max: int = 1_000_000) -> None:
        self.ends: list[str] = []
        self.replies: list[Any] = []
        self.transport = RecordingTransport()
        self.link = CommandLink(
            [(b"PING",)],
            refused=self._refused,
            lost=self.ends.append,
            timeout_s=timeout_s,
            pending_bytes_max=pending_bytes_max,
        )
        self.link.connection_made(self.transport)
        self.link.data_received(b"+PONG\r\n")
        self.transport.written.clear()

    def request(self, *command: bytes | int | str) -> None:
        self.link.request(self.replies.append, command)

    def _refused(self, link: CommandLink, entry: SentCommand, refusal: Refused) -> None:
        entry[0](refusal)


async def test_commands_of_one_turn_leave_in_one_write() -> None:
    one = OneLink()
    for number in range(3):
        one.request(b"ECHO", number)
    assert one.transport.written == []
    await asyncio.sleep(0)
    assert one.transport.written == [b"".join(b"*2\r\n$4\r\nECHO\r\n$1\r\n%d\r\n" % number for number in range(3))]
    one.link.data_received(b"$1\r\n0\r\n$1\r\n1\r\n$1\r")
    assert one.replies == [b"0", b"1"]
    one.link.close()
    assert isinstance(one.replies[2], Lost)


async def test_a_reply_that_nobody_waits_for_ends_the_connection() -> None:
    one = OneLink()
    one.request(b"ECHO", 1)
    await asyncio.sleep(0)
    one.link.data_received(b"$1\r\n1\r\n$5\r\nstray\r\n")
    assert one.replies == [b"1"]
    assert one.ends == ["it sent a reply that nobody waits for"]
    assert one.transport.is_aborted


async def test_a_reply_before_its_command_was_written_is_nobodys() -> None:
    one = OneLink()
    one.request(b"ECHO", 1)
    one.link.data_received(b"$5\r\nstray\r\n")
    assert [type(reply) for reply in one.replies] == [NotSent]
    assert one.transport.is_aborted


async def test_what_is_not_redis_ends_the_connection() -> None:
    one = OneLink()
    one.request(b"ECHO", 1)
    await asyncio.sleep(0)
    one.link.data_received(b"HTTP/1.1 400 Bad Request\r\n\r\n")
    assert [type(reply) for reply in one.replies] == [Lost]
    assert one.ends == ["it does not speak Redis's protocol"]


async def test_commands_that_a_slow_server_kept_from_being_written_were_not_sent() -> None:
    one = OneLink()
    one.request(b"ECHO", 1)
    await asyncio.sleep(0)
    one.link.pause_writing()
    one.request(b"ECHO", 2)
    await asyncio.sleep(0)
    assert len(one.transport.written) == 1
    one.link.connection_lost(None)
    assert [type(reply) for reply in one.replies] == [Lost, NotSent]


async def test_writing_goes_on_after_a_pause() -> None:
    one = OneLink()
    one.link.pause_writing()
    for number in range(3000):
        one.request(b"ECHO", number)
    await asyncio.sleep(0)
    assert one.transport.written == []
    one.link.resume_writing()
    expected = b"".join(hiredis.pack_command((b"ECHO", number)) for number in range(3000))  # type: ignore[arg-type]
    assert b"".join(one.transport.written) == expected
    one.link.data_received(b":1\r\n" * 3000)
    assert one.replies == [1] * 3000
    assert one.ends == []
    one.link.close()


async def test_pending_bytes_are_bounded_and_freed_by_replies() -> None:
    one = OneLink(pending_bytes_max=1000)
    for _ in range(3):
        one.request(b"ECHO", b"x" * 400)
    await asyncio.sleep(0)
    assert [type(reply) for reply in one.replies] == [NoRoom]
    one.link.data_received(b":1\r\n:2\r\n")
    one.request(b"ECHO", b"x" * 400)
    await asyncio.sleep(0)
    one.link.data_received(b":3\r\n")
    assert one.replies[1:] == [1, 2, 3]
    one.link.close()


async def test_a_caller_that_fails_keeps_nobody_from_its_reply() -> None:
    one = OneLink()
    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))

    def fail(_: Any) -> None:
        raise ValueError("a caller's mistake")

    one.link.request(fail, (b"ECHO", 1))
    one.request(b"ECHO", 2)
    one.link.request(fail, (b"ECHO", 3))
    one.request(b"ECHO", 4)
    await asyncio.sleep(0)
    one.link.data_received(b":1\r\n:2\r\n")
    one.link.close()
    assert one.replies[0] == 2 and isinstance(one.replies[1], Lost)
    assert [type(context["exception"]) for context in reported] == [ValueError, ValueError]


# Timeouts, in virtual time: nothing here waits for a machine.


def test_the_oldest_command_times_out_though_others_are_answered() -> None:
    clock = FakeClock()

    async def main() -> None:
        one, began = OneLink(timeout_s=0.16), clock()
        while not one.ends:
            # One reply for every two commands: the link is busy, and yet its oldest command gets older and older.
            one.request(b"A")
            one.request(b"B")
            await asyncio.sleep(0.005)
            if not one.ends:
                one.link.data_received(b":1\r\n")
            assert clock() - began < 5
        assert one.ends == ["no reply in time"]
        assert clock() - began >= 0.16

    clock.run(main())


def test_a_server_that_is_late_but_answers_is_not_given_up() -> None:
    """It is overloaded: to connect anew, and to send all again, would make that worse. One that falls silent is."""
    clock = FakeClock()

    async def main() -> None:
        one, began = OneLink(timeout_s=0.16), clock()
        for _ in range(80):
            one.request(b"A")
        while clock() - began < 0.8:  # each command waits for twice the timeout
            one.request(b"A")
            await asyncio.sleep(0.004)
            one.link.data_received(b":1\r\n")
        assert one.ends == []
        await asyncio.sleep(2 * 0.16)
        assert one.ends == ["no reply in time"]

    clock.run(main())


@pytest.mark.parametrize("is_idle", [False, True])
def test_a_server_that_hangs_is_noticed_in_less_than_twice_the_timeout(is_idle: bool) -> None:
    clock, timeout_s = FakeClock(), 0.5

    async def main() -> None:
        one, began = OneLink(timeout_s), clock()
        if not is_idle:
            await asyncio.sleep(timeout_s / TICKS_PER_TIMEOUT / 2)  # between two ticks
            one.request(b"A")
            began = clock()
        await until(lambda: one.ends == ["no reply in time"])
        assert timeout_s <= clock() - began < 2 * timeout_s

    clock.run(main())


# One server.


async def test_errors_are_replies_also_inside_others(redis_server: RedisServer) -> None:
    async with connected(redis_server.url) as nodes:
        nested = await nodes.ask(0, "EVAL", "return {1, {err = 'INNER trouble'}, 2}", 0)
        assert nested[0] == 1 and nested[2] == 2
        assert isinstance(nested[1], Refused) and nested[1].code == "INNER"
        with pytest.raises(Refused, match="QUEUEFULL no room") as caught:
            await nodes.ask(0, "EVAL", "return redis.error_reply('QUEUEFULL no room')", 0)
        assert caught.value.code == "QUEUEFULL"
        assert nodes.is_up(0)


async def test_arguments_are_not_in_the_text_of_errors(redis_server: RedisServer) -> None:
    async with connected(redis_server.url) as nodes:
        with pytest.raises(Refused, match="unknown command") as caught:
            await nodes.ask(0, "NOSUCH", "canary-payload")
        assert "canary" not in str(caught.value)


async def test_a_script_that_the_server_does_not_know_is_sent_whole(redis_server: RedisServer) -> None:
    script = script_of(b"return {KEYS[1], ARGV[1], '%d'}" % random.getrandbits(64))
    async with connected(redis_server.url) as nodes:
        assert (await nodes.ask_script(script, 0, [b"k"], [1]))[:2] == [b"k", b"1"]
        assert await nodes.ask(0, "SCRIPT", "EXISTS", script.sha) == [1]
        assert (await nodes.ask_script(script, 0, [b"k"], [2]))[:2] == [b"k", b"2"]
        answers: list[Any] = []
        nodes.run(script, 0, [b"k"], [3], answers.append)
        assert answers == []
        await until(lambda: len(answers) == 1)
        assert answers[0][:2] == [b"k", b"3"]


async def test_nothing_is_sent_before_the_start_or_after_the_close(redis_server: RedisServer) -> None:
    nodes = Nodes(parse_broker_url(redis_server.url))
    assert not nodes.is_up(0) and nodes.trouble == "not connected yet" and nodes.primaries() == []
    with pytest.raises(NotSent):
        await nodes.ask(0, "PING")
    nodes.start()
    await until(lambda: nodes.is_up(0))
    await nodes.close()
    assert not nodes.is_up(0)
    with pytest.raises(NotSent, match="closed"):
        await nodes.ask(0, "PING")


async def test_closing_waits_for_replies_that_are_due(redis_server: RedisServer) -> None:
    answers: list[Any] = []
    async with connected(redis_server.url) as nodes:
        nodes.send(0, answers.append, "ECHO", "last")
    assert answers == [b"last"]
    assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []


@pytest.mark.parametrize("run", RUNNERS)
def test_a_process_that_was_stopped_itself_does_not_blame_redis(run: Run, tmp_path: Path) -> None:
    async def main() -> None:
        async with running_redis(tmp_path) as server, connected(server.url, timeout_s=1.0) as nodes:
            reply = asyncio.ensure_future(nodes.ask(0, "ECHO", "x"))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            time.sleep(1.5)  # noqa: ASYNC251 - this is what is tested
            assert await reply == b"x"
            assert nodes.is_up(0)

    run(main())


# Logging in.


async def trouble_of(url: str, files: TlsFiles = NO_FILES) -> str:
    changes: list[None] = []
    nodes = Nodes(parse_broker_url(url, files=files), changed=lambda: changes.append(None))
    nodes.start()
    await until(lambda: len(changes) >= 2)  # where it is; that it is not up
    trouble = nodes.trouble
    assert not nodes.is_up(0)
    assert "canary" not in trouble
    await nodes.close()
    return trouble


async def test_passwords(tmp_path: Path) -> None:
    async with running_redis(tmp_path, "--requirepass", "right/password") as server:
        async with connected(f"redis://:right%2Fpassword@{HOST}:{server.port}/3") as nodes:
            assert await nodes.ask(0, "SET", "k", "v") == b"OK"
            assert b"db=3" in await nodes.ask(0, "CLIENT", "INFO")
            assert b"name=carpool" in await nodes.ask(0, "CLIENT", "INFO")
            await nodes.ask(0, "ACL", "SETUSER", "ann", "on", ">secret", "~*", "&*", "+@all", "-role", "-client")
        async with connected(f"redis://ann@{HOST}:{server.port}", password="secret") as nodes:
            assert await nodes.ask(0, "ACL", "WHOAMI") == b"ann"
        assert "WRONGPASS" in await trouble_of(f"redis://:wrong-canary@{HOST}:{server.port}")
        assert "NOAUTH" in await trouble_of(server.url)


def test_tls(tmp_path: Path, certificates: Certificates) -> None:
    ca, cert, key = certificates.pem("ca"), certificates.pem("server"), certificates.key("server")
    port = free_port()
    args = ("--tls-port", str(port), "--tls-cert-file", cert, "--tls-key-file", key, "--tls-ca-cert-file", ca)
    url = f"rediss://{HOST}:{port}"

    async def main() -> None:
        async with running_redis(tmp_path / "redis", *args):
            async with connected(url, files=TlsFiles(ca, cert, key)) as nodes:
                body = b"x" * 3_000_000
                assert await nodes.ask(0, "ECHO", body) == body
            # An authority that is not known; a server that wants to see a certificate.
            assert "certificate is not accepted" in await trouble_of(url)
            assert "CERTIFICATE_REQUIRED" in await trouble_of(url, files=TlsFiles(ca))

    for run in RUNNERS:
        run(main())


# Servers that fail.


async def test_killed_and_started_again(tmp_path: Path) -> None:
    async with running_redis(tmp_path) as server, connected(server.url) as nodes:
        server.stop()  # so that the command is written, and not answered
        pending = asyncio.ensure_future(nodes.ask(0, "ECHO", "x"))
        await asyncio.sleep(0.02)
        server.kill()
        with pytest.raises(Lost):
            await pending
        assert not nodes.is_up(0) and nodes.trouble
        with pytest.raises(NotSent):
            await nodes.ask(0, "ECHO", "x")
        await server.restart()
        await until(lambda: nodes.is_up(0))
        assert await nodes.ask(0, "ECHO", "x") == b"x"
        assert nodes.trouble == ""


async def test_a_server_that_became_a_replica_is_not_up_until_it_is_a_master_again(tmp_path: Path) -> None:
    async with (
        running_redis(tmp_path / "1") as server,
        running_redis(tmp_path / "2") as other,
        connected(server.url) as nodes,
    ):
        await server.ask("REPLICAOF", HOST, other.port)
        with pytest.raises(Refused) as caught:
            await nodes.ask(0, "SET", "k", "v")
        assert caught.value.code == "READONLY"
        assert not nodes.is_up(0)
        await until(lambda: "it is a replica" in nodes.trouble)
        await server.ask("REPLICAOF", "NO", "ONE")
        await until(lambda: nodes.is_up(0))
        assert await nodes.ask(0, "SET", "k", "v") == b"OK"


class Listener:
    """A server of the test's own; at its end every connection has ended."""

    @asynccontextmanager
    async def running(self) -> AsyncIterator[str]:
        async with stream_server(self.serve) as server:
            yield f"redis://{HOST}:{server.port}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        raise NotImplementedError


async def close(*writers: asyncio.StreamWriter) -> None:
    for writer in writers:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


class FakeRedis(Listener):
    """Answers each command by its first word; what is not in `answers` gets +OK."""

    def __init__(self) -> None:
        self.replies: dict[bytes, bytes] = {}

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        parser = hiredis.Reader()
        while data := await reader.read(65536):
            parser.feed(data)
            while (command := parser.gets()) is not False:
                writer.write(self.replies.get(command[0], b"+OK\r\n"))


async def test_a_server_that_loads_its_data_is_not_up() -> None:
    server = FakeRedis()
    server.replies[b"PING"] = b"-LOADING Redis is loading the dataset in memory\r\n"
    async with server.running() as url:
        nodes = Nodes(parse_broker_url(url))
        nodes.start()
        await until(lambda: "LOADING" in nodes.trouble)
        assert not nodes.is_up(0)
        del server.replies[b"PING"]
        await until(lambda: nodes.is_up(0))
        # One that begins to load while it is in use.
        server.replies[b"GET"] = server.replies[b"PING"] = b"-LOADING Redis is loading the dataset in memory\r\n"
        got, echoed = await answers_of(nodes, 0, [(b"GET", b"k"), (b"ECHO", b"k")])
        assert isinstance(got, Refused) and got.code == "LOADING"
        assert echoed == b"OK", "what was pending on the connection still gets its own reply"
        assert not nodes.is_up(0)
        del server.replies[b"PING"]
        await until(lambda: nodes.is_up(0))
        await nodes.close()


class CuttingProxy(Listener):
    """Passes bytes on, in pieces of any size, and cuts connections at random places of either direction."""

    def __init__(self, port: int, dice: random.Random) -> None:
        self._to = port
        self._dice = dice
        self.cuts = 0
        self.is_cutting = True

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        other_reader, other_writer = await asyncio.open_connection(HOST, self._to)
        both = (writer, other_writer)
        try:
            await asyncio.gather(self._pass(reader, other_writer, both), self._pass(other_reader, writer, both))
        finally:
            other_writer.close()

    async def _pass(
        self, source: asyncio.StreamReader, target: asyncio.StreamWriter, both: tuple[asyncio.StreamWriter, ...]
    ) -> None:
        with suppress(OSError):
            while data := await source.read(self._dice.choice((50, 1000, 5000, 65536))):
                if self.is_cutting and self._dice.random() < 0.04:
                    target.write(data[: self._dice.randrange(len(data) + 1)])
                    await target.drain()
                    self.cuts += 1
                    break
                target.write(data)
                await target.drain()
        await close(*both)


@pytest.mark.parametrize("seed", [1, 2])
async def test_no_reply_reaches_another_caller_whatever_is_cut(
    seed: int, redis_server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("carpool.broker.redis.client.node.PAUSE_S_MAX", 0.05)
    dice = random.Random(seed)
    proxy = CuttingProxy(redis_server.port, dice)
    answers: dict[int, Any] = {}
    key = f"cut-{seed}-{dice.getrandbits(32)}"
    seen = script_of(b"redis.call('SADD', KEYS[1], ARGV[1]) return {ARGV[1], ARGV[2]}")
    bodies: dict[int, bytes] = {}

    def note(number: int, reply: Any) -> None:
        assert number not in answers, "called back twice"
        answers[number] = reply

    async with proxy.running() as url:
        nodes = Nodes(parse_broker_url(url), timeout_s=PATIENCE_S)
        nodes.start()
        number = 0
        give_up_at = time.monotonic() + PATIENCE_S
        while (proxy.cuts < 12 or number < 2000) and time.monotonic() < give_up_at:
            for _ in range(dice.randrange(1, 40)):
                bodies[number] = b"%d:" % number + b"x" * dice.choice((1, 100, 3000))
                nodes.run(seen, 0, [key.encode()], [number, bodies[number]], partial(note, number))
                number += 1
            await asyncio.sleep(dice.choice((0, 0, 0.001, 0.01)))
        await until(lambda: len(answers) == number)
        proxy.is_cutting = False
        await nodes.close()
    assert proxy.cuts >= 12
    async with connected(redis_server.url) as nodes:
        executed = {int(member) for member in await nodes.ask(0, "SMEMBERS", key)}
        await nodes.ask(0, "DEL", key)
    kinds = {"reply": 0, "Lost": 0, "NotSent": 0}
    for number, answer in answers.items():
        if isinstance(answer, RedisFailure):
            kinds[type(answer).__name__] += 1
            assert not (isinstance(answer, NotSent) and number in executed), "it said that it was not executed"
        else:
            kinds["reply"] += 1
            assert answer == [b"%d" % number, bodies[number]], "another caller's reply"
            assert number in executed
    assert all(kinds.values()), kinds


# Readers.


async def test_a_reader_gets_everything_and_comes_back(tmp_path: Path) -> None:
    received: list[Any] = []
    losses: list[None] = []

    def subscribe(link: Link) -> None:
        link.send("SSUBSCRIBE", "bell")
        link.send("SUBSCRIBE", "other")

    async with running_redis(tmp_path) as server, connected(server.url) as nodes:
        reader = nodes.reader(0, connected=subscribe, received=received.append, lost=lambda: losses.append(None))
        await until(lambda: len(received) == 2)
        await nodes.ask(0, "SPUBLISH", "bell", "ding")
        await until(lambda: len(received) == 3)
        assert received[0][0] == b"ssubscribe" and received[2] == [b"smessage", b"bell", b"ding"]
        received.clear()
        server.kill()
        await until(lambda: len(losses) == 1)
        await server.restart()
        await until(lambda: len(received) == 2 and nodes.is_up(0))
        await nodes.ask(0, "SPUBLISH", "bell", "dong")
        await until(lambda: len(received) == 3)
        reader.close()
        await reader.wait_closed()
        assert len(losses) == 1, "who closes it needs not be told"


async def test_a_reader_whose_owner_fails_gets_another_connection(redis_server: RedisServer) -> None:
    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    attempts: list[Link] = []

    def connect(link: Link) -> None:
        attempts.append(link)
        if len(attempts) == 1:
            raise ValueError("the owner's mistake")

    async with connected(redis_server.url) as nodes:
        nodes.reader(0, connected=connect, received=lambda reply: None, lost=lambda: None)
        await until(lambda: len(attempts) == 2)
        assert attempts[1].is_open and not attempts[0].is_open
    assert [type(context["exception"]) for context in reported] == [ValueError]


# Words of Clusters.


def test_redirections() -> None:
    assert parse_redirection("MOVED 3999 127.0.0.1:6381", "asked") == (3999, ("127.0.0.1", 6381))
    assert parse_redirection("ASK 0 ::1:6381", "asked") == (0, ("::1", 6381))
    assert parse_redirection("MOVED 1 :6381", "asked") == (1, ("asked", 6381))
    for nonsense in ("MOVED", "MOVED x h:1", "MOVED 1 h:x", "MOVED 16384 h:1", "MOVED 1 h:1 more", "MOVED -1 h:1"):
        assert parse_redirection(nonsense, "asked") is None


def test_slots() -> None:
    reply = [[0, 99, [b"h1", 1, b"id", []], [b"replica", 2, b"id"]], [100, 16383, [None, 3, b"id"]], [5, 5, [b"?", 4]]]
    assert parse_slots(reply, "asked") == [SlotRange(0, 99, ("h1", 1), 1), SlotRange(100, 16383, ("asked", 3))]
    for nonsense in ([[0, 16384, [b"h", 1]]], [[2, 1, [b"h", 1]]], [[0, 1]], [[0, 1, []]], b"text"):
        with pytest.raises((ValueError, TypeError, IndexError)):
            parse_slots(nonsense, "asked")
