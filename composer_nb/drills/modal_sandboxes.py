"""Sandboxes of Modal on this machine: what its client needs to start, find, poll and end them, over its own protocol.

    with ModalSandboxes() as cloud: ... cloud.requests, cloud.sandboxes, cloud.kill(name)

Inside, the client of this process and of its children is led here by its own variables (MODAL_SERVER_URL, a token). A
sandbox's command runs as a process in an empty folder with the environment that was sent, and nothing else. Images are
not built: one whose registry's image is not known fails, as it does there. Written from the client's own messages.
"""

from __future__ import annotations

import asyncio
import base64
import os
import shutil
import tempfile
import threading
import time
import uuid
from pathlib import Path
from typing import Any

from .hub_jobs import OVER, Machine

GPUS = ("T4", "L4", "A100-80GB", "H100")
_LETTERS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


def _new_id(kind: str) -> str:
    """Twenty-two letters, of which the client reads the first generation of an object."""
    number, found = uuid.uuid4().int, ""
    while len(found) < 22:
        number, digit = divmod(number, len(_LETTERS))
        found += _LETTERS[digit]
    return f"{kind}-{found}"


class Sandbox:
    """One of them: its machine, and how it is told."""

    def __init__(self, told: dict[str, Any], folder: Path, second: bool) -> None:
        self.id = f"sb-second-{uuid.uuid4().hex}" if second else _new_id("sb")
        self.told, self.created, self.second = told, time.time(), second
        self.machine = Machine(told, folder, 5.0)

    def begin(self, images: tuple[str, ...]) -> None:
        """On its machine, unless it was ended while it waited for one."""
        if not self.over:
            self.machine.begin(images)

    def end(self) -> None:
        if self.machine.stage == "SCHEDULING":
            self.machine.stage = "CANCELED"
        self.machine.cancel()

    @property
    def over(self) -> bool:
        return self.machine.stage in OVER


class _Protocol:
    """Answers in the messages of the client; each method is one of its questions."""

    def __init__(self, owner: ModalSandboxes) -> None:
        from modal_proto import api_pb2

        self.owner, self.messages = owner, api_pb2

    async def ClientHello(self, asked: Any) -> Any:
        return self.messages.ClientHelloResponse(image_builder_version="2025.06")

    async def AuthTokenGet(self, asked: Any) -> Any:
        until = base64.urlsafe_b64encode(b'{"exp": %d}' % (time.time() + 3600)).decode().rstrip("=")
        return self.messages.AuthTokenGetResponse(token=f"e30.{until}.none")

    async def EnvironmentGetOrCreate(self, asked: Any) -> Any:
        settings = self.messages.EnvironmentSettings(image_builder_version="2025.06")
        metadata = self.messages.EnvironmentMetadata(name="main", settings=settings)
        return self.messages.EnvironmentGetOrCreateResponse(environment_id="en-main", metadata=metadata)

    async def AppGetOrCreate(self, asked: Any) -> Any:
        found = self.owner.apps.setdefault(asked.app_name, _new_id("ap"))
        return self.messages.AppGetOrCreateResponse(app_id=found)

    async def SecretGetOrCreate(self, asked: Any) -> Any:
        made = _new_id("st")
        self.owner.secrets[made] = dict(asked.env_dict)
        return self.messages.SecretGetOrCreateResponse(secret_id=made)

    async def ImageGetOrCreate(self, asked: Any) -> Any:
        lines = [line for line in asked.image.dockerfile_commands if line.startswith("FROM ")]
        tag, made = lines[0].partition(" ")[2], _new_id("im")
        statuses, known = self.messages.GenericResult, tag in self.owner.images
        self.owner.built[made] = tag
        status = statuses.GENERIC_STATUS_SUCCESS if known else statuses.GENERIC_STATUS_FAILURE
        said = "" if known else f"Skopeo was not able to fetch {tag}: not found"
        result = self.messages.GenericResult(status=status, exception=said)
        return self.messages.ImageGetOrCreateResponse(image_id=made, result=result)

    async def ImageFromId(self, asked: Any) -> Any:
        if asked.image_id not in self.owner.built:
            raise self.refusal("NOT_FOUND", f"Image {asked.image_id} not found")
        return self.messages.ImageFromIdResponse(image_id=asked.image_id)

    @staticmethod
    def refusal(status: str, words: str) -> Exception:
        from grpclib import GRPCError, Status

        return GRPCError(getattr(Status, status), words)


class _Sandboxes(_Protocol):
    """Of both generations: the first has GPUs."""

    async def create(self, asked: Any, second: bool) -> Sandbox:
        own, gpus = asked.definition, asked.definition.resources.gpu_config
        environment: dict[str, str] = {}
        for source in asked.secret_sources if second else ():
            environment |= dict(source.env.contents) or self.owner.secrets.get(source.secret_id, {})
        for secret in own.secret_ids:
            environment |= self.owner.secrets[secret]
        if gpus.count and gpus.gpu_type not in GPUS:
            raise self.refusal("INVALID_ARGUMENT", f"Invalid GPU type: {gpus.gpu_type}")
        running = [sandbox for sandbox in self.owner.sandboxes.values() if not sandbox.over]
        if len(running) >= self.owner.limit:
            words = f"Workspace limit reached: at most {self.owner.limit} sandboxes at once"
            raise self.refusal("RESOURCE_EXHAUSTED", words)
        if any(own.name and sandbox.told["name"] == own.name for sandbox in running):
            raise self.refusal("ALREADY_EXISTS", f"Sandbox with name {own.name!r} already exists")
        told = {
            "app": asked.app_id, "name": own.name, "tags": {tag.tag_name: tag.tag_value for tag in asked.tags},
            "command": list(own.entrypoint_args), "environment": environment, "timeoutSeconds": own.timeout_secs,
            "dockerImage": self.owner.built[own.image_id], "cpu": own.resources.milli_cpu / 1000,
            "memory": own.resources.memory_mb, "gpu": f"{gpus.gpu_type}:{gpus.count}" if gpus.count else None,
        }  # fmt: skip
        made = Sandbox(told, self.owner.folder, second)
        self.owner.sandboxes[made.id] = made
        asyncio.get_running_loop().call_later(self.owner.late_s, made.begin, self.owner.images)
        await asyncio.sleep(self.owner.late_s)  # who asked may be gone by then
        return made

    def found(self, name: str) -> Sandbox:
        if name not in self.owner.sandboxes:
            raise self.refusal("NOT_FOUND", f"Sandbox {name} not found")
        return self.owner.sandboxes[name]

    def result(self, sandbox: Sandbox) -> Any:
        kinds, machine = self.messages.GenericResult, sandbox.machine
        if not sandbox.over:
            return kinds()
        if machine.stage == "CANCELED":
            return kinds(status=kinds.GENERIC_STATUS_TERMINATED)
        if machine.message == "Job timeout":
            return kinds(status=kinds.GENERIC_STATUS_TIMEOUT)
        if (code := machine.code) == -9 and machine.lost:
            return kinds(status=kinds.GENERIC_STATUS_INTERNAL_FAILURE, exception="The worker was lost.")
        status = kinds.GENERIC_STATUS_FAILURE if code else kinds.GENERIC_STATUS_SUCCESS
        return kinds(status=status, exitcode=128 - code if code < 0 else code)

    async def SandboxCreate(self, asked: Any) -> Any:
        made = await self.create(asked, second=False)
        return self.messages.SandboxCreateResponse(sandbox_id=made.id)

    async def SandboxCreateV2(self, asked: Any) -> Any:
        made = await self.create(asked, second=True)
        return self.messages.SandboxCreateV2Response(sandbox_id=made.id, task_id=f"ta-{made.machine.id}")

    async def SandboxGetTaskId(self, asked: Any) -> Any:
        machine = self.found(asked.sandbox_id).machine
        return self.messages.SandboxGetTaskIdResponse(task_id=f"ta-{machine.id}")

    async def SandboxWait(self, asked: Any) -> Any:
        sandbox, end = self.found(asked.sandbox_id), time.monotonic() + asked.timeout
        while not sandbox.over and time.monotonic() < end:
            await asyncio.sleep(0.02)
        return self.messages.SandboxWaitResponse(result=self.result(sandbox))

    async def SandboxTerminate(self, asked: Any) -> Any:
        self.found(asked.sandbox_id).end()
        return self.messages.SandboxTerminateResponse()

    async def SandboxTagsGet(self, asked: Any) -> Any:
        tags = self.found(asked.sandbox_id).told["tags"]
        told = [self.messages.SandboxTag(tag_name=name, tag_value=value) for name, value in tags.items()]
        return self.messages.SandboxTagsGetResponse(tags=told)

    async def SandboxListV2(self, asked: Any) -> Any:
        wanted, shown = {tag.tag_name: tag.tag_value for tag in asked.tags}, []
        for sandbox in sorted(self.owner.sandboxes.values(), key=lambda one: -one.created):
            earlier = not asked.before_timestamp or sandbox.created < asked.before_timestamp
            ours = wanted.items() <= sandbox.told["tags"].items() and asked.app_id == sandbox.told["app"]
            if ours and earlier and not sandbox.over:
                shown.append(self.messages.SandboxInfo(id=sandbox.id, created_at=sandbox.created))
        return self.messages.SandboxListResponse(sandboxes=shown[:100])

    async def SandboxList(self, asked: Any) -> Any:
        """Of the first generation; the other question is about both."""
        listed = await self.SandboxListV2(asked)
        firsts = [one for one in listed.sandboxes if not self.owner.sandboxes[one.id].second]
        return self.messages.SandboxListResponse(sandboxes=firsts)

    SandboxWaitV2, SandboxTerminateV2, SandboxTagsGetV2 = SandboxWait, SandboxTerminate, SandboxTagsGet


class _Service:
    """The protocol as a server: which question has which answer."""

    def __init__(self, owner: ModalSandboxes) -> None:
        self.owner, self._answers = owner, _Sandboxes(owner)

    def __mapping__(self) -> dict[str, Any]:
        from grpclib.const import Handler
        from modal_proto import api_grpc

        base = api_grpc.ModalClientBase
        every = type("Every", (base,), dict.fromkeys(base.__abstractmethods__, print))()
        found = {}
        for path, known in every.__mapping__().items():
            if hasattr(self._answers, name := path.rpartition("/")[2]):
                answer = self._answered(name, getattr(self._answers, name))
                found[path] = Handler(answer, known.cardinality, known.request_type, known.reply_type)
        return found

    def _answered(self, name: str, answer: Any) -> Any:
        async def on(stream: Any) -> None:
            asked = await stream.recv_message()
            self.owner.requests.append(name if "Create" in name else f"{name} {asked}")  # those hold secrets
            if self.owner.silent.is_set():
                await asyncio.sleep(30)
            who = (stream.metadata.get("x-modal-token-id"), stream.metadata.get("x-modal-token-secret"))
            if who != self.owner.token:
                raise _Protocol.refusal("UNAUTHENTICATED", "Token missing. Could not authenticate client.")
            await stream.send_message(await answer(asked))

        return on


class ModalSandboxes:
    """`limit` sandboxes may run at once."""

    def __init__(self, images: tuple[str, ...] = ("python:3.11",), limit: int = 16) -> None:
        self.images, self.limit = images, limit
        self.token = (f"ak-{uuid.uuid4().hex[:22]}", f"as-{uuid.uuid4().hex[:22]}")
        self.apps: dict[str, str] = {}
        self.secrets: dict[str, dict[str, str]] = {}
        self.built: dict[str, str] = {}
        self.sandboxes: dict[str, Sandbox] = {}
        self.requests: list[str] = []
        self.silent = threading.Event()
        self.late_s = 0.0  # for which a new sandbox waits for its machine
        self.folder = Path(tempfile.mkdtemp(prefix="modal-"))
        self._loop = asyncio.new_event_loop()

    def kill(self, name: str) -> None:
        """The machine of a sandbox is lost, with all that runs on it."""
        for sandbox in self.sandboxes.values():
            if sandbox.told["name"] == name and not sandbox.over:
                sandbox.machine.kill()

    async def _serve(self) -> int:
        from grpclib.server import Server

        self._server = Server([_Service(self)])
        await self._server.start("127.0.0.1", 0)
        return self._server._server.sockets[0].getsockname()[1]

    def __enter__(self) -> ModalSandboxes:
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        port = asyncio.run_coroutine_threadsafe(self._serve(), self._loop).result(30)
        told = {"SERVER_URL": f"http://127.0.0.1:{port}", "TOKEN_ID": self.token[0], "TOKEN_SECRET": self.token[1]}
        self._before = {f"MODAL_{name}": os.environ.get(f"MODAL_{name}") for name in told}
        os.environ.update({f"MODAL_{name}": value for name, value in told.items()})
        self._forget()
        return self

    @staticmethod
    def _forget() -> None:
        """The client keeps its connection for as long as a process lives."""
        import modal

        modal.Client.from_env().close()

    def __exit__(self, *_: object) -> None:
        self._forget()
        for name, value in self._before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})
        for sandbox in self.sandboxes.values():
            sandbox.machine.cancel()
            sandbox.machine.kill()

        async def close() -> None:
            self._server.close()
            await self._server.wait_closed()

        asyncio.run_coroutine_threadsafe(close(), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()
        shutil.rmtree(self.folder, ignore_errors=True)
