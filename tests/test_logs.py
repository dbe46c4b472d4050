"""Log records: no value of them makes a line of its own, and every line of JSON can be read."""

from __future__ import annotations

import io
import json
import logging
import re
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire import logs

logger = logging.getLogger("quire.test")


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    talkative = {name: logging.getLogger(name).level for name in logs.TALKATIVE}
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(False)
    for name, before in talkative.items():
        logging.getLogger(name).setLevel(before)


def setup(style: str, level: str = "info", process: str = "") -> io.StringIO:
    stream = io.StringIO()
    logs.setup(level, style, process=process, stream=stream)
    return stream


def record(message: str, **fields: object) -> logging.LogRecord:
    made = logging.LogRecord("quire.test", logging.INFO, "", 0, "%s", (message,), None)
    made.fields = fields
    return made


@given(st.text(max_size=50))
def test_nothing_forges_a_line(text: str) -> None:
    lines = logs.TextFormatter().format(record(text)).split("\n")
    assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d INFO ", lines[0])
    assert all(line.startswith("    | ") for line in lines[1:])
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029\u202e]", "".join(lines))
    line = logs.JsonFormatter().format(record(text, path=text))
    assert line.isascii() and line.isprintable()
    assert json.loads(line)["message"] == json.loads(line)["path"] == text


def test_lines_of_one_record_are_marked() -> None:
    text = logs.TextFormatter().format(record("stacks\n2026-11-22 02:00:00 ERROR quire: all is lost\n"))
    assert text.split("\n")[1:] == ["    | 2026-11-22 02:00:00 ERROR quire: all is lost"]


def test_terminals_are_told_nothing() -> None:
    assert logs.escape("\x1b[31mred\x7f \x9b2J caf\u00e9 \u202egpj.exe") == (
        r"\x1b[31mred\x7f \x9b2J caf" + "\u00e9" + r" \u202egpj.exe"
    )


def test_fields_and_request_ids() -> None:
    stream = setup("json", process="engine")
    token = logs.request_id.set("abc")
    logger.info("one %d", 1, extra={"fields": {"status": 200, "message": "not this"}})
    logs.request_id.reset(token)
    logger.info("two", extra={"fields": {"request_id": "given"}})
    one, two = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert one["message"] == "one 1" and one["request_id"] == "abc" and one["status"] == 200
    assert one["level"] == "info" and one["logger"] == "quire.test" and one["process"] == "engine"
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", one["time"])
    assert two["request_id"] == "given"


def test_text_tells_the_request_once() -> None:
    stream = setup("text")
    token = logs.request_id.set("abc")
    logger.info("about it")
    logger.info("about abc")
    logs.request_id.reset(token)
    assert [line.rpartition("quire.test: ")[2] for line in stream.getvalue().splitlines()] == [
        "about it [abc]",
        "about abc",
    ]


@pytest.mark.parametrize("style", ["text", "json"])
def test_tracebacks_belong_to_their_record(style: str) -> None:
    stream = setup(style)
    try:
        raise ValueError("bad\n2026-11-22 02:00:00 ERROR quire: forged")
    except ValueError:
        logger.exception("it failed")
    lines = stream.getvalue().splitlines()
    if style == "json":
        [line] = lines
        assert "ValueError: bad" in json.loads(line)["exception"]
    else:
        assert all(line.startswith("    | ") for line in lines[1:]) and "ValueError: bad" in stream.getvalue()


def test_warnings_alike_are_counted() -> None:
    now = [0.0]
    throttle = logs.Throttle(lambda: now[0])

    def passes(message: str, *args: object, level: int = logging.WARNING) -> str | None:
        made = logging.LogRecord("quire.test", level, "", 0, message, args, None)
        return made.getMessage() if throttle.filter(made) else None

    assert passes("lost %d", 1) == "lost 1"
    assert passes("lost %d", 2) is None and passes("lost %d", 3) is None
    assert passes("found %d", 1) == "found 1"
    assert passes("lost %d", 4, level=logging.INFO) == passes("lost %d", 4, level=logging.INFO) == "lost 4"
    now[0] = 1.5
    assert passes("lost %d", 5) == "lost 5 (and 2 more like it)"
    assert passes("lost %d", 6) is None
    now[0] = 3.0
    assert passes("lost %d", 7) == "lost 7 (and 1 more like it)"
    for number in range(2 * logs.MAX_KINDS):
        passes(f"kind {number}")
    assert len(throttle._kinds) <= logs.MAX_KINDS


def test_another_process_can_write_the_same_way() -> None:
    setup("json", "debug")
    assert logs.settings() == {"level": "debug", "style": "json"}
    setup("text", "error")
    assert logs.settings() == {"level": "error", "style": "text"}
    logging.getLogger().setLevel(7)
    assert logs.settings()["level"] == "warning"


def test_setting_up_twice_writes_once() -> None:
    setup("text")
    stream = setup("text")
    logger.info("once")
    assert stream.getvalue().count("once") == 1


class SlowStream(io.StringIO):
    """A stream whose reader pauses until it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.released = threading.Event()

    def write(self, text: str) -> int:
        self.released.wait(20)
        return super().write(text)


def test_a_reader_that_pauses_stops_nobody_and_what_is_lost_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "MAX_UNWRITTEN", 5)
    monkeypatch.setattr(logs, "FLUSH_SECONDS", 0.05)
    stream = SlowStream()
    handler = logs.ThreadHandler(stream)
    handler.setFormatter(logs.TextFormatter())

    def log(number: int) -> None:
        handler.emit(logging.LogRecord("a", logging.INFO, "", 0, f"record {number}.", None, None))

    for number in range(20):
        log(number)
    handler.flush()  # it does not wait for long
    monkeypatch.setattr(logs, "FLUSH_SECONDS", 20)
    stream.released.set()
    handler.flush()
    log(20)
    handler.flush()
    text = stream.getvalue()
    written = [int(word) for word in re.findall(r"record (\d+)\.", text)]
    assert written == [*range(len(written) - 1), 20]
    assert f"{21 - len(written)} records are missing here" in text
