"""The objects of a Kubernetes namespace behind HTTP, as far as the executor asks for them.

Jobs, pods and events are kept as the client sends them; lists know label selectors, and one field selector
of events. What runs the pods is in `kubernetes_cluster`.
"""

from __future__ import annotations

import json
import re
import threading
import time
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import parse_qs, urlsplit

KINDS = {
    "jobs": ("batch/v1", "JobList"),
    "pods": ("v1", "PodList"),
    "events": ("v1", "EventList"),
}
OWN = (
    "counted",
    "began",
    "late",
    "told",
    "ends",
    "orphan",
)  # what the nodes note of a pod, and nobody is told
Object = dict[str, Any]


def now() -> str:
    """This moment as the API writes it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class Refusal(Exception):
    """What the API answers instead: a code, a reason and a message."""

    def __init__(self, code: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.code, self.reason = code, reason


class Store:
    """The objects of one namespace, by kind and name."""

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace
        self.lock = threading.RLock()
        self.objects: dict[str, dict[str, Object]] = {kind: {} for kind in KINDS}

    def add(self, kind: str, given: Object) -> Object:
        """A new object. Raises Refusal where one has its name."""
        meta = given["metadata"]
        with self.lock:
            if meta["name"] in self.objects[kind]:
                raise Refusal(409, "AlreadyExists", f'{kind} "{meta["name"]}" already exists')
            meta |= {"uid": str(uuid.uuid4()), "namespace": self.namespace, "creationTimestamp": now()}
            self.objects[kind][meta["name"]] = given
        return given

    def find(self, kind: str, name: str) -> Object:
        """Raises Refusal where there is none."""
        if name not in self.objects[kind]:
            raise Refusal(404, "NotFound", f'{kind} "{name}" not found')
        return self.objects[kind][name]

    def pods_of(self, job: Object) -> list[Object]:
        """A Job's pods, in the order in which they were made."""
        uid = job["metadata"]["uid"]
        return [p for p in self.objects["pods"].values() if p["metadata"]["ownerReferences"][0]["uid"] == uid]

    def select(self, kind: str, labels: str, fields: str) -> list[Object]:
        """Those that a selector names: `a=b` or `a in (b,c)`, joined by commas, and one field of an event."""
        found = []
        for one in self.objects[kind].values():
            own = one["metadata"].get("labels", {})
            named = one.get("involvedObject", {}).get("name", "")
            if matches(own, labels) and (not fields or fields == f"involvedObject.name={named}"):
                found.append(one)
        return found


def matches(own: dict[str, str], labels: str) -> bool:
    """Whether labels fit a selector."""
    for name, same, several in re.findall(r"([^,=() ]+)(?:=([^,]*)| in \(([^)]*)\))", labels):
        if own.get(name) not in (several.split(",") if several else [same]):
            return False
    return True


class Api:
    """What the server answers; `delete` takes a pod and its grace. It can be `away`, or `old`: a server that
    does not know `backoffLimitPerIndex`. `gpus_allowed` is a policy of the cluster for each replica."""

    def __init__(self, store: Store, delete: Callable[[Object, int | None], None]) -> None:
        self.store, self.delete, self.token = store, delete, uuid.uuid4().hex
        self.gpus_allowed, self.away, self.old = 8, False, False
        self.requests: list[str] = []

    def serve(self, verb: str, path: str, query: dict[str, str], body: Object) -> Object:
        """The answer to one request. Raises Refusal."""
        if self.away:
            raise Refusal(503, "ServiceUnavailable", "etcdserver: request timed out")
        parts = [part for part in path.split("/") if part]
        space, rest = parts[parts.index("namespaces") + 1], parts[parts.index("namespaces") + 2 :]
        if space != self.store.namespace:
            who = f'User "me" cannot {verb.lower()} resource "{rest[0]}" in the namespace "{space}"'
            raise Refusal(403, "Forbidden", f"{rest[0]} is forbidden: {who}")
        with self.store.lock:
            found = self._verb(verb, rest, query, body)
            return json.loads(json.dumps(found, default=str))

    def _verb(self, verb: str, rest: list[str], query: dict[str, str], body: Object) -> Object:
        kind, verbs = (
            rest[0],
            {("GET", 1): self._list, ("POST", 1): self._create, ("DELETE", 2): self._delete},
        )
        call: Callable[..., Object] = verbs[verb, len(rest)]
        return call(kind, rest[-1], query, body)

    def _list(self, kind: str, _: str, query: dict[str, str], __: Object) -> Object:
        found = self.store.select(kind, query.get("labelSelector", ""), query.get("fieldSelector", ""))
        items = [{name: value for name, value in one.items() if name not in OWN} for one in found]
        version, name = KINDS[kind]
        return {"apiVersion": version, "kind": name, "metadata": {}, "items": items}

    def _create(self, kind: str, _: str, __: dict[str, str], body: Object) -> Object:
        name = body["metadata"]["name"]
        asked = body["spec"]["template"]["spec"]["containers"][0]["resources"].get("limits", {})
        if int(asked.get("nvidia.com/gpu", 0)) > self.gpus_allowed:
            rule = f"at most {self.gpus_allowed} GPUs for each replica"
            said = f"ValidatingAdmissionPolicy 'gpus' with binding 'all' denied request: {rule}"
            raise Refusal(422, "Invalid", f'{kind} "{name}" is forbidden: {said}')
        self._check(body["spec"])
        body["status"] = {"done": [], "failed": [], "ignored": {}, "conditions": []}
        if self.old:  # fields that a server does not know are dropped
            body["spec"].pop("backoffLimitPerIndex")
        return self.store.add(kind, body)

    def _check(self, spec: Object) -> None:
        """This imitation knows one kind of Job; another would behave differently on a real cluster."""
        pod = spec["template"]["spec"]
        told = (
            spec.get("completionMode"),
            spec.get("backoffLimitPerIndex"),
            spec.get("podReplacementPolicy"),
        )
        known = ("Indexed", 0, "Failed", "Never")
        if (*told, pod.get("restartPolicy")) != known:
            raise Refusal(422, "Invalid", f"not imitated: {(*told, pod.get('restartPolicy'))}, only {known}")

    def _delete(self, kind: str, name: str, query: dict[str, str], body: Object) -> Object:
        found = self.store.find(kind, name)
        if kind == "jobs":
            how = query.get("propagationPolicy", body.get("propagationPolicy", "Orphan"))  # the default there
            if how == "Foreground":
                found["metadata"].setdefault("deletionTimestamp", now())
                return found
            for pod in self.store.pods_of(found) if how == "Orphan" else ():
                pod["orphan"] = True
            self.store.objects[kind].pop(name)
        else:
            grace_s = body.get("gracePeriodSeconds", query.get("gracePeriodSeconds"))
            self.delete(found, None if grace_s is None else int(grace_s))
        return found


class Handler(BaseHTTPRequestHandler):
    """The few paths that are asked for."""

    api: Api
    protocol_version = "HTTP/1.1"

    def answer(self) -> None:
        url, api = urlsplit(self.path), self.api
        query = {name: values[0] for name, values in parse_qs(url.query).items()}
        length = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(length) or b"{}")
        api.requests.append(f"{self.command} {self.path} {json.dumps(body)}")
        try:
            if self.headers.get("Authorization") != f"Bearer {api.token}":
                raise Refusal(401, "Unauthorized", "Unauthorized")
            self.reply(200, api.serve(self.command, url.path, query, body))
        except Refusal as refusal:
            told = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": str(refusal)}
            self.reply(refusal.code, told | {"reason": refusal.reason, "code": refusal.code})

    do_GET = do_POST = do_DELETE = answer

    def reply(self, code: int, content: Object) -> None:
        data = json.dumps(content).encode()
        self.send_response_only(code)
        self.send_header("Date", formatdate(time.time(), usegmt=True))
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Nothing on the screen."""
