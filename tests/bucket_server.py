"""An S3 server on a free port of this machine. It tells what it was asked, and fails on order."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any
from urllib.parse import parse_qs

from moto.moto_server.werkzeug_app import create_backend_app
from pyarrow import fs
from werkzeug.serving import WSGIRequestHandler, make_server

_NUMBERS = count()


@dataclass(frozen=True, slots=True)
class Request:
    """What was asked of the server."""

    method: str
    bucket: str
    key: str
    options: frozenset[str]

    @property
    def is_put(self) -> bool:
        """True if it gives a key its bytes: a whole one, or the last word of an upload in parts."""
        if self.method == "PUT":
            return bool(self.key) and "partNumber" not in self.options
        return self.method == "POST" and "uploadId" in self.options

    @property
    def is_upload(self) -> bool:
        """True if it brings bytes."""
        return self.method == "PUT" and bool(self.key)


@dataclass(slots=True)
class BucketServer:
    """A running server."""

    address: str
    requests: list[Request] = field(default_factory=list)
    bytes_sent: int = 0
    refuse: Callable[[Request], bool] = lambda request: False
    "Requests that are answered with: access denied."
    delay_seconds: Callable[[Request], float] = lambda request: 0.0

    @property
    def options(self) -> str:
        """What stands in a URI so that this server is meant."""
        return f"?endpoint_override={self.address}&scheme=http"

    def make_bucket(self) -> str:
        """A new bucket, by its name."""
        name = f"bucket-{next(_NUMBERS)}"
        self._files().create_dir(name)
        return name

    def keys(self, bucket: str) -> list[str]:
        """All keys but those that pyarrow leaves where it has deleted."""
        found = self._files().get_file_info(fs.FileSelector(bucket, recursive=True))
        return sorted(info.path.removeprefix(f"{bucket}/") for info in found if info.is_file)

    def read(self, bucket: str, key: str) -> bytes:
        """The bytes of a key."""
        with self._files().open_input_file(f"{bucket}/{key}") as file:
            return bytes(file.read())

    def write(self, bucket: str, key: str, content: bytes = b"") -> None:
        """Gives a key its bytes."""
        with self._files().open_output_stream(f"{bucket}/{key}") as stream:
            stream.write(content)

    def puts(self, bucket: str) -> Counter[str]:
        """How often each key of a bucket was written."""
        return Counter(r.key for r in self.requests if r.bucket == bucket and r.is_put)

    def _files(self) -> fs.S3FileSystem:
        return fs.S3FileSystem(
            endpoint_override=self.address, scheme="http", allow_bucket_creation=True
        )


@contextmanager
def serve_buckets() -> Iterator[BucketServer]:
    """Runs a server in threads of this process."""
    told = BucketServer("")
    server = make_server("127.0.0.1", 0, _watched(told), threaded=True, request_handler=_Quiet)
    server.daemon_threads, server.block_on_close = True, False  # Clients keep connections.
    told.address = f"127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield told
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _watched(told: BucketServer) -> Callable[..., Iterable[bytes]]:
    app = create_backend_app("s3")

    def answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        bucket, _, key = environ["PATH_INFO"].lstrip("/").partition("/")
        options = parse_qs(environ["QUERY_STRING"], keep_blank_values=True)
        request = Request(environ["REQUEST_METHOD"], bucket, key, frozenset(options))
        told.requests.append(request)
        time.sleep(told.delay_seconds(request))
        if told.refuse(request):
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            start_response("403 Forbidden", [("Content-Type", "application/xml")])
            return [b"<Error><Code>AccessDenied</Code><Message>no</Message></Error>"]
        body = list(app(environ, start_response))
        if request.method == "GET":
            told.bytes_sent += sum(map(len, body))
        return body

    return answer


class _Quiet(WSGIRequestHandler):
    protocol_version = "HTTP/1.1"

    def log(self, *arguments: object) -> None:
        """Says nothing."""
