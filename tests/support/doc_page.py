"""Runs the blocks of one page as a reader would: `python -m support.doc_page PAGE DIRECTORY`.

`DIRECTORY` becomes what a checkout looks like after `make setup`. The text of a block is not changed. What is not the
reader's: settings by which nothing is refused because this machine is slow, and servers of others' that a page
speaks of (`STAND_INS`). With `--isolated` the process has a network to itself (`unshare`), in which every port is free.
"""

import contextlib
import io
import os
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from fcntl import ioctl
from importlib.util import find_spec
from pathlib import Path

from support.certificates import Certificates
from support.doc_blocks import ROOT, Block, blocks_of, is_like, json_printed, json_shown
from support.processes import CLEAN_ENVIRONMENT, PATIENCE_S

# A server says that it serves.
_READY = re.compile(r"serving on|Carpool is ready|simulated GPUs? at|Ready to accept connections|Uvicorn running on")
_PROBLEM = re.compile(r"urn:carpool:error:[\w-]+")
# `fastapi` and `uvicorn` for where they are not installed.
_OTHERS = Path(__file__).parent / "stand_ins"
_PATIENT = {
    "CARPOOL_BROKER_QUEUE_TIMEOUT_S": "60",
    "CARPOOL_BROKER_TOTAL_TIMEOUT_S": "90",
    "CARPOOL_GATEWAY_DRAIN_GRACE_S": "0",
    "CARPOOL_SHEDDING_MODE": "off",
}
# What a page's reader has running already.
STAND_INS = {
    "upstreams.md": (
        "carpool sim-gpu --port 8080 --workers 1 --latency-ms 5",
        "python -m support.embedder 8501 7997 8100 8081",
    )
}


class BrokenBlock(Exception):
    """A block that does not do what its page says."""


class Server:
    """A terminal in which something runs until its section ends."""

    def __init__(self, process: "subprocess.Popen[bytes]", section: tuple[int, ...]) -> None:
        self.process = process
        self.section = section

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGTERM)
        self.process.wait(PATIENCE_S)


class Page:
    """One page at work in one directory."""

    def __init__(self, page: Path, directory: Path) -> None:
        self._blocks = blocks_of(page)
        self._directory = directory
        self._pasted = directory / ".pasted"
        self._environment = _checkout(directory)
        self._servers: list[Server] = []
        self._shell = subprocess.Popen(
            ["bash", "--norc", "--noprofile"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=directory,
            env=self._environment,
            start_new_session=True,
        )
        self._pasted.mkdir()
        self._type("set -em -o pipefail")
        self._steps: dict[str, Callable[[Block, Path], None]] = {
            "sh": self._run_sh,
            "toml": self._load_toml,
            "python": self._run_python,
            "json": lambda block, file: None,  # looked at with the block before it
            "yaml": self._parse_yaml,
            "conf": lambda block, file: None,  # whoever is started with it reads it
        }

    def run(self) -> None:
        """All blocks; BrokenBlock says which one does not work."""
        try:
            if self._blocks[0].page == "upstreams-security.md":
                (self._directory / "certs").mkdir()
                Certificates(self._directory / "certs")
            for number, command in enumerate(STAND_INS.get(self._blocks[0].page, ())):
                self._serve(Block("stand-in", number, (), "sh", "server", command + "\n"))
            for number, block in enumerate(self._blocks):
                if block.excerpt is None and block.language:
                    following = self._blocks[number + 1] if number + 1 < len(self._blocks) else None
                    self._run_block(block, following if following and following.language == "json" else None)
            self._leave(())
        finally:
            self._shell.kill()
            _kill_all_in(self._directory)

    def _run_block(self, block: Block, expected: Block | None) -> None:
        sys.stdout.write(f"{block.place}\n")
        sys.stdout.flush()
        self._leave(block.section)
        file = self._pasted / f"{block.line}.{block.language}"
        file.write_text(block.text, encoding="utf-8")
        if block.language not in self._steps:
            raise BrokenBlock(f"{block.place}: nobody knows what to do with `{block.language}`")
        if block.file is not None:
            (self._directory / block.file).write_text(block.text, encoding="utf-8")
        if block.language == "json":
            _values(block)
        elif block.is_server and block.language == "sh":
            self._serve(block)
        elif block.file is None or block.language == "yaml":
            self._steps[block.language](block, file)
        if block.language == "sh" and not block.is_server:
            _check_output(block, self._output(block), expected)

    def _output(self, block: Block) -> str:
        return (self._pasted / f"{block.line}.out").read_text(encoding="utf-8", errors="replace")

    def _fail(self, block: Block, why: str) -> BrokenBlock:
        return BrokenBlock(f"{block.place}: {why}\n{block.text}{'-' * 40}\n{self._output(block)}")

    def _type(self, line: str) -> bool:
        """Whether the terminal lives on after it."""
        assert self._shell.stdin is not None and self._shell.stdout is not None
        self._shell.stdin.write(f"{line}\necho\n")
        self._shell.stdin.flush()
        return self._shell.stdout.readline() != ""

    def _run_sh(self, block: Block, file: Path) -> None:
        output = self._pasted / f"{block.line}.out"
        if not self._type(f"source {file} </dev/null >{output} 2>&1"):
            raise self._fail(block, "a command failed")

    def _serve(self, block: Block) -> None:
        script, log = self._pasted / f"{block.line}.sh", self._pasted / f"{block.line}.out"
        script.write_text(block.text if block.language == "sh" else "carpool serve\n", encoding="utf-8")
        with log.open("wb") as output:
            process = subprocess.Popen(
                ["bash", "-e", str(script)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=self._directory,
                env=self._environment,
                start_new_session=True,
            )
        self._servers.append(Server(process, block.section))
        give_up_at = time.monotonic() + PATIENCE_S
        while not _READY.search(self._output(block)):
            if process.poll() is not None or time.monotonic() > give_up_at:
                raise self._fail(block, "this server did not start")
            time.sleep(0.02)

    def _leave(self, section: tuple[int, ...]) -> None:
        """End the servers of sections that are over, the last first."""
        staying = [server for server in self._servers if section[: len(server.section)] == server.section]
        for server in reversed(self._servers):
            if server not in staying:
                server.end()
        self._servers = staying

    def _load_toml(self, block: Block, file: Path) -> None:
        from carpool.cli import main as carpool_main  # here, for most pages do without it

        printed = io.StringIO()
        where = contextlib.chdir(self._directory)
        with where, contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            status = carpool_main(["config", "--config", str(file)])
        if status:
            raise BrokenBlock(f"{block.place}: {printed.getvalue()}")
        if block.is_server:
            shutil.copy(file, self._directory / "carpool.toml")
            self._serve(block)

    def _run_python(self, block: Block, file: Path) -> None:
        with (self._pasted / f"{block.line}.out").open("wb") as output:
            command = [sys.executable, str(file)]
            done = subprocess.run(
                command, stdout=output, stderr=output, cwd=self._directory, env=self._environment, check=False
            )
        if done.returncode:
            raise self._fail(block, "it failed")

    def _parse_yaml(self, block: Block, file: Path) -> None:
        import yaml

        content = yaml.safe_load(block.text)
        if not isinstance(content, dict):
            raise BrokenBlock(f"{block.place}: these are no settings")
        if "scrape_configs" in content and (promtool := shutil.which("promtool")):
            for rules in content.get("rule_files", ()):
                shutil.copy(ROOT / "deploy" / "prometheus" / rules, file.parent)
            done = subprocess.run([promtool, "check", "config", file], capture_output=True, text=True, check=False)
            if done.returncode:
                raise BrokenBlock(f"{block.place}: {done.stdout}{done.stderr}")


def _values(block: Block) -> list[object]:
    try:
        return json_shown(block.text)
    except ValueError as fault:
        raise BrokenBlock(f"{block.place}: no JSON: {fault}") from None


def _check_output(block: Block, output: str, expected: Block | None) -> None:
    """Commands print what the page shows, and no problem that it does not show."""
    printed = json_printed(output)
    for value in _values(expected) if expected else ():
        if not any(is_like(value, each) for each in printed):
            raise BrokenBlock(f"{block.place}: {value} is not in what this prints:\n{output}")
    shown = expected.text if expected else ""
    for problem in _PROBLEM.findall(output):
        if problem not in shown:
            raise BrokenBlock(f"{block.place}: an error that the page does not tell of:\n{output}")


def _checkout(directory: Path) -> dict[str, str]:
    """Fill the directory; the environment of its terminals."""
    for entry in ROOT.iterdir():
        if not entry.name.startswith("."):
            (directory / entry.name).symlink_to(entry)
    binaries = directory / ".venv" / "bin"
    binaries.mkdir(parents=True)
    for name, module in (("python", ""), ("carpool", " -m carpool"), ("uvicorn", " -m uvicorn")):
        (binaries / name).write_text(f'#!/bin/sh\nexec {sys.executable}{module} "$@"\n')
        (binaries / name).chmod(0o755)
    # Files of the reader's own that pages name.
    for name in ("tracking", "gpu-token", "api-key"):
        (directory / "secrets" / name).parent.mkdir(exist_ok=True)
        (directory / "secrets" / name).write_text("a-secret-of-the-reader\n")
    # Newer than what the environment is made of: `make setup` finds nothing to do.
    (directory / ".venv" / ".ready").touch()
    paths = [ROOT / "src", ROOT / "tests"] + ([] if find_spec("fastapi") else [_OTHERS])
    return (
        CLEAN_ENVIRONMENT
        | _PATIENT
        | {
            "PATH": f"{binaries}:{os.environ['PATH']}",
            "PYTHONPATH": ":".join(map(str, paths)),
            "HOME": str(directory),
            "COLUMNS": "100",
        }
    )


def _kill_all_in(directory: Path) -> None:
    """What is left over, a server that went into the background too: each works in the page's directory."""
    for pid in _pids():
        with contextlib.suppress(OSError):
            if Path(os.readlink(f"/proc/{pid}/cwd")).is_relative_to(directory):
                os.kill(pid, signal.SIGKILL)


def _pids() -> Iterator[int]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            yield int(entry.name)


def _raise_loopback() -> None:
    """In a network of one's own it is there, but off: SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        name, flags = struct.unpack("16sH14x", ioctl(any_socket, 0x8913, struct.pack("16sH14x", b"lo", 0)))
        ioctl(any_socket, 0x8914, struct.pack("16sH14x", name, flags | 1))


def main(page: str, directory: str, *flags: str) -> int:
    """Run it; 1 if a block is broken, and stdout says which."""
    if "--isolated" in flags:
        _raise_loopback()
    try:
        Page(Path(page), Path(directory)).run()
    except BrokenBlock as broken:
        sys.stdout.write(f"{broken}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
