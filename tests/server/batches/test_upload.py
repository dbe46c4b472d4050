"""Files: uploads of every form, and what is refused; lists, contents, deletion, keys, quotas, age, full disks."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import httpx
import pytest

from quire.server.batches.contents import DiskContents
from tests.helpers.live_server import LiveServer, MakeServer
from tests.server.batches.asking import FILES, begun, content_of, ended, headers_of, line, upload, uploaded
from tests.server.checks import check_refused
from tests.server.responses.spec import check

BOUNDARY = "x" * 20
KEYS = {"api_key": ["one", "two"]}


def form(*parts: tuple[str, bytes], end: bool = True) -> bytes:
    """Return the body of a form: headers and content of each part."""
    made = b"".join(b"--%b\r\n%b\r\n\r\n%b\r\n" % (BOUNDARY.encode(), head.encode(), data) for head, data in parts)
    return made + (b"--%b--\r\n" % BOUNDARY.encode() if end else b"")


def send(http: httpx.Client, content: bytes, kind: str = f"multipart/form-data; boundary={BOUNDARY}") -> httpx.Response:
    return http.post(FILES, content=content, headers={"content-type": kind})


PURPOSE = ('Content-Disposition: form-data; name="purpose"', b"batch")
FILE = ('Content-Disposition: form-data; name="file"; filename="a.jsonl"', b"abc")


def test_a_file_is_kept_as_it_was_sent(make_server: MakeServer, tmp_path: Path) -> None:
    live = make_server(data_dir=str(tmp_path), max_body_bytes=1024)
    content = os.urandom(3 * 2**20 + 17)  # larger than any other body may be
    answer = upload(live.http, content)
    assert answer.status_code == 200 and "x-quire-warning" not in answer.headers
    file = answer.json()
    check("OpenAIFile", file)
    assert (file["bytes"], file["filename"], file["purpose"]) == (len(content), "in.jsonl", "batch")
    got = live.http.get(f"{FILES}/{file['id']}/content")
    assert got.content == content
    assert live.http.get(f"{FILES}/{file['id']}").json() == file
    deleted = live.http.delete(f"{FILES}/{file['id']}").json()
    check("DeleteFileResponse", deleted)
    assert list((tmp_path / "files").iterdir()) == []
    for method, path in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
        answer = live.http.request(method, f"{FILES}/{file['id']}{path}")
        check_refused(answer, status=404, code="file_not_found", param="file_id")


def test_without_a_folder_files_are_in_memory_and_the_answer_says_so(make_server: MakeServer) -> None:
    live = make_server(max_body_bytes=4096)
    answer = upload(live.http, b"x" * 4096)
    assert "kept in memory only" in answer.headers["x-quire-warning"]
    assert live.http.get(f"{FILES}/{answer.json()['id']}/content").content == b"x" * 4096
    check_refused(upload(live.http, b"x" * 4097), "4096 bytes", status=413, code="request_too_large", param="file")
    for _ in range(7):
        uploaded(live.http, b"x" * 4096)
    check_refused(upload(live.http, b"x"), "--data-dir", code="file_storage_exceeded", param="file")


def test_parts_come_in_any_order_and_are_bounded(make_server: MakeServer) -> None:
    live = make_server()
    assert send(live.http, form(FILE, PURPOSE)).json()["filename"] == "a.jsonl"
    strange = ('content-disposition: form-data; name="file"; filename="a\\"b\x01\xff.jsonl"', b"")
    assert send(live.http, form(PURPOSE, strange)).json()["filename"].startswith('a"b_')
    expiring = [
        ('Content-Disposition: form-data; name="expires_after[anchor]"', b"created_at"),
        ('Content-Disposition: form-data; name="expires_after[seconds]"', b"3600"),
    ]
    file = send(live.http, form(PURPOSE, FILE, *expiring)).json()
    assert file["expires_at"] == file["created_at"] + 3600


MORE = 'Content-Disposition: form-data; name="{}"'
BAD: dict[str, tuple[bytes, int, str, str | None]] = {
    "nothing": (b"", 400, "invalid_form", None),
    "no form": (b"{}", 400, "invalid_form", None),
    "no end": (form(PURPOSE, FILE, end=False), 400, "invalid_form", None),
    "no name": (form(("X-Y: z", b"")), 400, "invalid_form", None),
    "no file": (form(PURPOSE), 400, "missing_required_parameter", "file"),
    "no purpose": (form(FILE), 400, "missing_required_parameter", "purpose"),
    "other purpose": (form(FILE, (PURPOSE[0], b"vision")), 400, "invalid_value", "purpose"),
    "long purpose": (form(FILE, (PURPOSE[0], b"x" * 2000)), 400, "string_above_max_length", None),
    "twice": (form(PURPOSE, FILE, FILE), 400, "invalid_value", "file"),
    "unknown": (form(PURPOSE, FILE, (MORE.format("secret"), b"")), 400, "unknown_parameter", "secret"),
    "anchor only": (
        form(PURPOSE, FILE, (MORE.format("expires_after[anchor]"), b"created_at")),
        400,
        "missing_required_parameter",
        "expires_after[seconds]",
    ),
    "soon": (
        form(
            PURPOSE,
            FILE,
            (MORE.format("expires_after[anchor]"), b"created_at"),
            (MORE.format("expires_after[seconds]"), b"60"),
        ),
        400,
        "invalid_value",
        "expires_after[seconds]",
    ),
    "long header": (form((PURPOSE[0] + "; x=" + "y" * 5000, b"batch")), 400, "invalid_form", None),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_forms(server: LiveServer, name: str) -> None:
    content, status, code, param = BAD[name]
    check_refused(send(server.http, content), status=status, code=code, param=param)
    assert server.http.get(FILES).json()["data"] == []


@pytest.mark.parametrize(
    "kind", ["application/json", "text/plain", "multipart/form-data", "multipart/mixed; boundary=x"]
)
def test_what_is_no_form(server: LiveServer, kind: str) -> None:
    answer = send(server.http, form(PURPOSE, FILE), kind)
    check_refused(answer, status=400 if kind == "multipart/form-data" else 415)


def test_a_page_of_another_site_cannot_upload(server: LiveServer, make_server: MakeServer) -> None:
    headers = {"content-type": f"multipart/form-data; boundary={BOUNDARY}", "origin": "http://evil.example"}
    answer = server.http.post(FILES, content=form(PURPOSE, FILE), headers=headers)
    check_refused(answer, status=403, code="origin_not_allowed")
    keyed = make_server(api_key=["secret"], allowed_origins=["http://good.example"])
    answer = keyed.http.post(FILES, content=form(PURPOSE, FILE), headers=headers | headers_of("secret"))
    assert answer.status_code == 200


def test_an_upload_that_breaks_off_leaves_nothing(make_server: MakeServer, tmp_path: Path) -> None:
    live = make_server(data_dir=str(tmp_path))
    head = f"POST {FILES} HTTP/1.1\r\nHost: x\r\nContent-Type: multipart/form-data; boundary={BOUNDARY}\r\n"
    body = form(PURPOSE, (FILE[0], b"x" * 3_000_000))
    with live.connect() as connection:
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body[:2_500_000])
        live.wait_until(lambda: (tmp_path / "files").is_dir() and any((tmp_path / "files").iterdir()))
    live.wait_until(lambda: not any((tmp_path / "files").iterdir()))
    assert live.http.get(FILES).json()["data"] == []


def test_lists(make_server: MakeServer) -> None:
    live = make_server()
    names = [uploaded(live.http, b"x" * number) for number in range(5)]
    listed = live.http.get(FILES, params={"limit": 2}).json()
    check("ListFilesResponse", listed)
    assert [file["id"] for file in listed["data"]] == names[:2:-1]
    assert (listed["has_more"], listed["first_id"], listed["last_id"]) == (True, names[4], names[3])
    rest = live.http.get(FILES, params={"after": names[3]}).json()
    assert [file["id"] for file in rest["data"]] == names[2::-1] and not rest["has_more"]
    upwards = live.http.get(FILES, params={"order": "asc", "after": names[3], "purpose": "batch"}).json()
    assert [file["id"] for file in upwards["data"]] == names[4:]
    assert live.http.get(FILES, params={"purpose": "vision"}).json()["data"] == []
    check_refused(live.http.get(FILES, params={"after": "nope"}), status=400, code="invalid_cursor", param="after")
    check_refused(live.http.get(FILES, params={"limit": 0}), code="integer_below_min_value", param="limit")


def test_files_belong_to_their_key(make_server: MakeServer) -> None:
    live = make_server(**KEYS)
    file_id = uploaded(live.http, b"abc", key="one")
    assert [file["id"] for file in live.http.get(FILES, headers=headers_of("one")).json()["data"]] == [file_id]
    assert live.http.get(FILES, headers=headers_of("two")).json()["data"] == []
    for method, path in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
        answer = live.http.request(method, f"{FILES}/{file_id}{path}", headers=headers_of("two"))
        check_refused(answer, status=404, code="file_not_found", param="file_id")


def test_a_key_has_a_quota(make_server: MakeServer, tmp_path: Path) -> None:
    live = make_server(data_dir=str(tmp_path), max_stored_file_bytes=3_000_000, **KEYS)
    kept = uploaded(live.http, b"x" * 2_000_000, key="one")
    answer = upload(live.http, b"x" * 1_500_000, key="one")
    check_refused(answer, "3000000 bytes", code="file_storage_exceeded", param="file")
    uploaded(live.http, b"x" * 1_500_000, key="two")
    live.http.delete(f"{FILES}/{kept}", headers=headers_of("one"))
    uploaded(live.http, b"x" * 1_500_000, key="one")
    assert len(list((tmp_path / "files").iterdir())) == 2


def test_files_have_an_age(make_server: MakeServer, tmp_path: Path) -> None:
    live = make_server(data_dir=str(tmp_path), stored_file_ttl=100.0)
    store = live.context.batches
    now = store.clock()
    store.clock.now = lambda: now
    file_id = uploaded(live.http, b"abc")
    now += 101
    check_refused(live.http.get(f"{FILES}/{file_id}"), status=404, code="file_not_found", param="file_id")
    assert live.http.get(FILES).json()["data"] == []
    live.call(store.expire)
    assert list((tmp_path / "files").iterdir()) == []


class FullDisk:
    """A file that takes so many bytes."""

    def __init__(self, file: IO[bytes], room: int) -> None:
        self.file, self.room = file, room

    def write(self, data: bytes) -> int:
        self.room -= len(data)
        if self.room < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self.file.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


def fill_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    create: Callable[..., IO[bytes]] = DiskContents.create
    monkeypatch.setattr(DiskContents, "create", lambda self, file_id: FullDisk(create(self, file_id), 1000))


def test_a_full_disk(make_server: MakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    live = make_server(data_dir=str(tmp_path))
    fill_disk(monkeypatch)
    answer = upload(live.http, b"x" * 3_000_000)
    check_refused(answer, "No space left", status=503, code="storage_unavailable")
    assert int(answer.headers["retry-after"]) > 0
    assert list((tmp_path / "files").iterdir()) == []
    monkeypatch.undo()
    uploaded(live.http, b"x" * 3_000_000)


def test_a_batch_outlasts_a_full_disk(make_server: MakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files are written as soon as there is room; nothing is run again."""
    monkeypatch.setattr("quire.server.batches.runner.RETRY_SECONDS", 0.01)
    live = make_server(data_dir=str(tmp_path), llm={"reply_text": "hello world"})
    live.do(live.fake_client.hold)
    batch_id = begun(live.http, [line(str(number), n=2) for number in range(20)])
    live.wait_until(lambda: len(live.engine.added) == 20)
    fill_disk(monkeypatch)
    live.do(live.fake_client.resume)
    live.wait_until(lambda: not live.engine.live)
    monkeypatch.undo()
    batch = ended(live.http, batch_id)
    assert batch["request_counts"] == {"total": 20, "completed": 20, "failed": 0}
    assert len(live.engine.added) == 20


def test_a_file_in_use_stays(make_server: MakeServer) -> None:
    live = make_server()
    live.do(live.fake_client.hold)
    batch_id = begun(live.http, [line("a")])
    name = live.http.get(f"/v1/batches/{batch_id}").json()["input_file_id"]
    check_refused(live.http.delete(f"{FILES}/{name}"), status=409, code="file_in_use", param="file_id")
    live.do(live.fake_client.resume)
    ended(live.http, batch_id)
    assert live.http.delete(f"{FILES}/{name}").json()["deleted"] is True
    assert content_of(["a", {"b": 1}]) == b'a\n{"b": 1}'
