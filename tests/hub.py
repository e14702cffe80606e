"""A model and data set hub on this machine, which the real huggingface_hub client talks to.

It keeps repositories in memory and speaks the part of the protocol that the client uses: file
listings, downloads with ETag and ranges, tokens, private and gated repositories, and uploads by
commit. A test can make it fail, and reads what was asked for.
"""

import base64
import contextlib
import fnmatch
import hashlib
import json
import re
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple
from urllib.parse import parse_qs, quote, unquote, urlsplit

LARGE = (".safetensors", ".bin", ".png", ".jpg", ".parquet", ".tar")  # kept in LFS storage
KINDS = {"models": "", "datasets": "datasets/"}  # {kind: start of a page's address}


@dataclass
class Token:
    """A user's token. gates: gated repositories whose terms the user has accepted."""

    user: str
    can_write: bool = True
    gates: set[str] = field(default_factory=set)


@dataclass
class Repository:
    """commits: {commit: {path: content}}; branches: {revision: commit}; titles: {commit: title}."""

    owner: str
    private: bool = False
    gated: bool = False
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    titles: dict[str, str] = field(default_factory=dict)

    def commit(self, files, revision="main", title="Update README.md"):
        """Make a commit that holds these files alone, and move the revision to it."""
        listed = repr([revision, len(self.commits), sorted(files)])
        commit = hashlib.sha1(listed.encode()).hexdigest()
        self.commits[commit] = files
        self.branches[revision] = commit
        self.titles[commit] = title
        return commit

    def find_last_change(self, path):
        """The last commit that changed a file, whatever its branch."""
        contents = [files.get(path) for files in self.commits.values()]
        changed = [i for i, each in enumerate(contents) if i == 0 or each != contents[i - 1]]
        return [*self.commits][changed[-1]]

    def find(self, revision):
        """The commit of a branch, or the commit itself; None if there is neither."""
        commit = self.branches.get(revision, revision)
        return commit if commit in self.commits else None


class Request(NamedTuple):
    method: str
    path: str
    token: str | None
    range: str | None
    host: str  # "hub" or "storage"


@dataclass
class Fault:
    """What happens to the next `times` requests for a path that matches.

    status: the answer's. cut: the body ends in the middle. seconds: pause in the middle of it.
    then: called before the answer, for example to change a file.
    """

    pattern: str
    method: str = "*"
    times: float = 1
    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    cut: bool = False
    seconds: float = 0
    then: object = None


def read_folder(folder):
    paths = [path for path in Path(folder).rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


class Hub:
    """A hub on 127.0.0.1, and the storage of its large files on another host, localhost."""

    def __init__(self):
        self.tokens = {}
        self.repositories = {}
        self.faults = []
        self.requests = []
        self.stored = {}  # {SHA-256: content} of large files
        self.lock = threading.Lock()

    def __enter__(self):
        self.servers = []
        for host, name in {"hub": "127.0.0.1", "storage": "localhost"}.items():
            handler = type("Handler", (Handler,), {"hub": self, "host": host})
            server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
            server.daemon_threads = True
            threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
            self.servers.append(server)
            setattr(self, f"{host}_url", f"http://{name}:{server.server_port}")
        return self

    def __exit__(self, *error):
        for server in self.servers:
            server.shutdown()
            server.server_close()

    def add(self, name, files, kind="models", revision="main", **settings):
        """Add a commit to a repository, which is made if there is none. Returns it.

        files: a folder, or {path: content}.
        """
        files = dict(files) if isinstance(files, dict) else read_folder(files)
        made = Repository(name.split("/")[0], **settings)
        repository = self.repositories.setdefault((kind, name), made)
        repository.commit(files, revision)
        return repository

    def fail(self, pattern, **options):
        """Add a fault; see `Fault`. pattern: of fnmatch, for a path on the hub or the storage."""
        self.faults.append(Fault(pattern, **options))

    def files(self, name, kind="models", revision="main"):
        repository = self.repositories[kind, name]
        return repository.commits[repository.find(revision)]

    def downloads(self):
        """The paths of files whose content was sent, in order, one for each request."""
        gets = [each.path for each in self.requests if each.method == "GET"]
        place = r"/(?:datasets/)?[^/]+/[^/]+/resolve/[^/]+/(.+)|/lfs/[^/]+/(.+)"
        found = [match for path in gets if (match := re.fullmatch(place, path))]
        # a large file is in the storage, to which the hub sends the client
        return [
            small or large
            for small, large in map(re.Match.groups, found)
            if large or not small.endswith(LARGE)
        ]

    def take_fault(self, method, path):
        with self.lock:
            for fault in self.faults:
                fits = fnmatch.fnmatch(path, fault.pattern) and fault.method in ("*", method)
                if fits and fault.times > 0:
                    fault.times -= 1
                    return fault
        return None


class Refusal(Exception):
    def __init__(self, status, code="", message=""):
        super().__init__(status, code, message)
        self.status = status
        self.headers = {"X-Error-Code": code, "X-Error-Message": message} if code else {}
        if message and not code:
            self.headers = {"X-Error-Message": message}
        self.message = message


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def do_GET(self):
        with contextlib.suppress(ConnectionError):
            self.answer()

    do_HEAD = do_POST = do_PUT = do_GET

    def answer(self):
        address = urlsplit(self.path)
        self.query = parse_qs(address.query)
        path = unquote(address.path)
        authorization = self.headers.get("Authorization")
        self.token = authorization and authorization.removeprefix("Bearer ")
        asked = Request(self.command, path, self.token, self.headers.get("Range"), self.host)
        self.hub.requests.append(asked)
        self.body = self.read_body()
        self.fault = self.hub.take_fault(self.command, path) or Fault("")
        if self.fault.then:
            self.fault.then()
        if self.fault.status:
            return self.send(self.fault.status, b"", self.fault.headers)
        try:
            if self.host == "storage":
                return self.answer_storage(path)
            if self.token and self.token not in self.hub.tokens:
                raise Refusal(401, message="Invalid credentials in Authorization header")
            for pattern, function in self.ROUTES:
                if match := re.fullmatch(pattern, path):
                    return function(self, **match.groupdict())
            raise Refusal(404, message="Sorry, we can't find the page you are looking for.")
        except Refusal as error:
            return self.send(error.status, {"error": error.message}, error.headers)

    def read_body(self):
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        chunks = []
        while size := int(self.rfile.readline(), 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(chunks)

    def send(self, status, body=b"", headers=None):
        headers = dict(headers or {})
        if isinstance(body, dict | list):
            body = json.dumps(body).encode()
            headers.setdefault("Content-Type", "application/json")
        self.send_response(status)
        for name, value in {"Content-Length": len(body), **headers}.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command == "HEAD":
            return
        middle = len(body) // 2
        self.wfile.write(body[:middle])
        if self.fault.seconds:
            self.wfile.flush()
            time.sleep(self.fault.seconds)
        if self.fault.cut:
            self.wfile.flush()
            self.close_connection = True
            return
        self.wfile.write(body[middle:])

    def send_content(self, content, headers):
        """Send a file, or the range that is asked for."""
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
        headers = {"Accept-Ranges": "bytes", **headers}
        if not match:
            return self.send(200, content, headers)
        first, last = int(match[1]), int(match[2] or len(content) - 1)
        headers["Content-Range"] = f"bytes {first}-{min(last, len(content) - 1)}/{len(content)}"
        return self.send(206, content[first : last + 1], headers)

    def answer_storage(self, path):
        digest = path.split("/")[2]
        if self.command == "PUT":
            if hashlib.sha256(self.body).hexdigest() != digest:
                raise Refusal(400, message="content does not have this hash")
            self.hub.stored[digest] = self.body
            return self.send(200)
        if digest not in self.hub.stored:
            raise Refusal(404, message="no such object")
        return self.send_content(self.hub.stored[digest], {"ETag": f'"{digest}"'})

    @property
    def user(self):
        return self.hub.tokens.get(self.token)

    def open(self, kind, name):
        """A repository that this token may know of."""
        repository = self.hub.repositories.get((kind, name))
        hidden = repository and repository.private
        hidden = hidden and (self.user is None or self.user.user != repository.owner)
        if repository is None or hidden:
            raise Refusal(404 if self.user else 401, "RepoNotFound", "Repository not found")
        return repository

    def open_revision(self, kind, name, revision):
        """(commit, its files) of a repository."""
        repository = self.open(kind, name)
        commit = repository.find(unquote(revision))
        if commit is None:
            raise Refusal(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return commit, repository.commits[commit]

    def open_to_write(self, kind, name):
        if self.user is None:
            raise Refusal(401, message="Invalid username or password.")
        repository = self.open(kind, name)
        if not self.user.can_write or self.user.user != repository.owner:
            raise Refusal(403, message="You don't have the rights to write to this repository")
        return repository

    def resolve(self, page, name, revision, path):
        kind = "datasets" if page else "models"
        repository = self.open(kind, name)
        if repository.gated and (self.user is None or name not in self.user.gates):
            about = f"Access to {kind[:-1]} {name} is restricted."
            raise Refusal(403 if self.user else 401, "GatedRepo", about)
        commit, files = self.open_revision(kind, name, revision)
        headers = {"X-Repo-Commit": commit}
        if path not in files:
            refusal = Refusal(404, "EntryNotFound", "Entry not found")
            refusal.headers |= headers
            raise refusal
        content = files[path]
        if not path.endswith(LARGE):
            digest = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
            return self.send_content(content, {"ETag": f'"{digest}"', **headers})
        digest = hashlib.sha256(content).hexdigest()
        self.hub.stored[digest] = content
        headers |= {"X-Linked-Size": len(content), "X-Linked-ETag": f'"{digest}"'}
        location = f"{self.hub.storage_url}/lfs/{digest}/{quote(path)}"
        return self.send(302, b"", {"Location": location, **headers})

    def describe(self, kind, name, revision="main"):
        repository = self.open(kind, name)
        commit, files = self.open_revision(kind, name, revision or "main")
        about = {"_id": name, "id": name, "sha": commit, "private": repository.private}
        about |= {"gated": "auto" if repository.gated else False, "tags": [], "downloads": 0}
        about |= {"likes": 0, "lastModified": "2026-01-01T00:00:00.000Z", "disabled": False}
        described = self.describe_paths(files, files)
        about["siblings"] = [{"rfilename": each["path"]} for each in described]
        if "blobs" in self.query:
            for each, sibling in zip(described, about["siblings"], strict=True):
                sibling |= {"size": each["size"], "blobId": each["oid"]}
                if "lfs" in each:
                    sibling["lfs"] = {**each["lfs"], "sha256": each["lfs"]["oid"]}
        return self.send(200, about)

    def list_tree(self, kind, name, revision, folder=None):
        _, files = self.open_revision(kind, name, revision)
        start = f"{folder}/" if folder else ""
        inside = [path for path in sorted(files) if path.startswith(start)]
        if folder and not inside:
            raise Refusal(404, "EntryNotFound", f"{folder} does not exist on {revision}")
        is_recursive = self.query.get("recursive", ["false"])[0].lower() in ("true", "1")
        folders = dict.fromkeys(
            start + "/".join(parts[:depth])
            for path in inside
            for parts in [path.removeprefix(start).split("/")]
            for depth in range(1, len(parts))
            if is_recursive or depth == 1
        )
        here = [path for path in inside if is_recursive or "/" not in path.removeprefix(start)]
        return self.send(200, self.describe_paths(files, [*folders, *here]))

    def list_paths(self, kind, name, revision):
        _, files = self.open_revision(kind, name, revision)
        is_json = self.body[:1] == b"{"
        body = json.loads(self.body) if is_json else parse_qs(self.body.decode())
        described = self.describe_paths(files, body.get("paths", []))
        repository = self.open(kind, name)
        for each in described if "expand" in body else []:
            commit = repository.find_last_change(each["path"])
            about = {"id": commit, "title": repository.titles[commit]}
            each["lastCommit"] = about | {"date": "2026-01-01T00:00:00.000Z"}
        return self.send(200, described)

    def describe_paths(self, files, paths):
        described = []
        for path in paths:
            if path in files:
                content = files[path]
                each = {"type": "file", "path": path, "size": len(content)}
                each["oid"] = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
                if path.endswith(LARGE):
                    digest = hashlib.sha256(content).hexdigest()
                    each["lfs"] = {"oid": digest, "size": len(content), "pointerSize": 130}
                described.append(each)
            elif any(each.startswith(f"{path}/") for each in files):
                described.append({"type": "directory", "path": path, "oid": "0" * 40, "size": 0})
        return described

    def list_refs(self, kind, name):
        branches = self.open(kind, name).branches
        listed = [
            {"name": each, "ref": f"refs/heads/{each}", "targetCommit": commit}
            for each, commit in branches.items()
        ]
        return self.send(200, {"branches": listed, "converts": [], "tags": []})

    def name_user(self):
        if self.user is None:
            raise Refusal(401, message="Invalid username or password.")
        role = "write" if self.user.can_write else "read"
        auth = {"accessToken": {"displayName": "test", "role": role}}
        return self.send(200, {"type": "user", "name": self.user.user, "orgs": [], "auth": auth})

    def create(self):
        if self.user is None:
            raise Refusal(401, message="Invalid username or password.")
        wanted = json.loads(self.body)
        owner = wanted.get("organization") or self.user.user
        name = wanted["name"] if "/" in wanted["name"] else f"{owner}/{wanted['name']}"
        kind = f"{wanted.get('type') or 'model'}s"
        about = {"url": f"{self.hub.hub_url}/{KINDS[kind]}{name}", "name": name, "id": name}
        if not self.user.can_write or name.split("/")[0] != self.user.user:
            raise Refusal(403, message=f"You don't have the rights to create {name}")
        if (kind, name) in self.hub.repositories:
            message = f"You already created this {kind[:-1]} repo"
            return self.send(409, {"error": message, **about})
        private = bool(wanted.get("private")) or wanted.get("visibility") == "private"
        self.hub.add(name, {".gitattributes": b""}, kind, private=private)
        return self.send(200, about)

    def check_upload(self, kind, name, revision):
        self.open_to_write(kind, name)
        files = [
            {"path": each["path"], "shouldIgnore": False, "oid": None}
            | {"uploadMode": "lfs" if each["path"].endswith(LARGE) else "regular"}
            for each in json.loads(self.body)["files"]
        ]
        return self.send(200, {"files": files})

    def start_lfs(self, page, name):
        self.open_to_write("datasets" if page else "models", name)
        objects = []
        for each in json.loads(self.body)["objects"]:
            wanted = {"oid": each["oid"], "size": each["size"]}
            if each["oid"] not in self.hub.stored:  # else it is there already
                href = f"{self.hub.storage_url}/lfs/{each['oid']}"
                wanted["actions"] = {"upload": {"href": href}}
            objects.append(wanted)
        headers = {"Content-Type": "application/vnd.git-lfs+json"}
        return self.send(200, {"transfer": "basic", "objects": objects}, headers)

    def commit(self, kind, name, revision):
        repository = self.open_to_write(kind, name)
        files = dict(repository.commits[repository.find(revision)])
        title = ""
        for line in self.body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "header":
                title = value["summary"]
                parent = value.get("parentCommit")
                if parent and parent != repository.find(revision):
                    raise Refusal(412, message="A commit has happened since. Please refresh.")
            elif entry["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                if value["oid"] not in self.hub.stored:
                    raise Refusal(400, message=f"{value['path']} was not uploaded")
                files[value["path"]] = self.hub.stored[value["oid"]]
            elif entry["key"] == "deletedFile":
                files.pop(value["path"], None)
        commit = repository.commit(files, revision, title)
        url = f"{self.hub.hub_url}/{KINDS[kind]}{name}/commit/{commit}"
        about = {"success": True, "commitOid": commit, "commitUrl": url, "hookOutput": ""}
        return self.send(200, about)

    def check_card(self):
        return self.send(200, {"errors": [], "warnings": []})

    NAME = "(?P<name>[^/]+/[^/]+)"
    API = f"/api/(?P<kind>models|datasets)/{NAME}"
    ROUTES = (
        ("/api/whoami-v2", name_user),
        ("/api/repos/create", create),
        ("/api/validate-yaml", check_card),
        (API, describe),
        (f"{API}/revision/(?P<revision>[^/]+)", describe),
        (f"{API}/tree/(?P<revision>[^/]+)(/(?P<folder>.*))?", list_tree),
        (f"{API}/paths-info/(?P<revision>[^/]+)", list_paths),
        (f"{API}/refs", list_refs),
        (f"{API}/preupload/(?P<revision>[^/]+)", check_upload),
        (f"{API}/commit/(?P<revision>[^/]+)", commit),
        (f"/(?P<page>datasets/)?{NAME}.git/info/lfs/objects/batch", start_lfs),
        (f"/(?P<page>datasets/)?{NAME}/resolve/(?P<revision>[^/]+)/(?P<path>.+)", resolve),
    )


def use_hub(hub, folder, monkeypatch, token=None):
    """Let the libraries of this process talk to the hub, with an empty cache in `folder`.

    They read the environment when they are imported.
    """
    import datasets
    import huggingface_hub
    from huggingface_hub import constants, hf_api
    from huggingface_hub.utils import _http

    hub.env = {
        "HF_ENDPOINT": hub.hub_url,
        "HF_HOME": str(folder),
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "HF_TOKEN": token,
    }
    monkeypatch.setattr(constants, "ENDPOINT", hub.hub_url)
    template = hub.hub_url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(folder / "token"))
    monkeypatch.setattr(hf_api.api, "endpoint", hub.hub_url)
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", hub.hub_url)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "datasets")
    huggingface_hub.HfFileSystem.clear_instance_cache()
    # the client waits for up to 8 s before it asks again
    without_waits = SimpleNamespace(**vars(time) | {"sleep": lambda seconds: None})
    monkeypatch.setattr(_http, "time", without_waits)
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    else:
        monkeypatch.delenv("HF_TOKEN", raising=False)
