"""Settings of a session that several jobs share: set by the first, put back by the last, whatever order they end in."""

from __future__ import annotations

import threading
from contextlib import ExitStack

from floodmark.rows.staging.stage import _BATCH_SIZES, _BIG, _BYTES, _NUMBERS, _ROWS, _SPARK_DEFAULTS, _TEXT


class Session:
    """What is used of a Spark session: its settings."""

    def __init__(self, **chosen: str) -> None:
        self.conf = self
        self.values = {**_SPARK_DEFAULTS, **chosen}

    def get(self, key: str) -> str:
        return self.values[key]

    def set(self, key: str, value: str) -> None:
        self.values[key] = value


def test_the_last_job_puts_back_what_the_first_found() -> None:
    session = Session()
    first, second = ExitStack(), ExitStack()
    first.enter_context(_BATCH_SIZES.held(session, _NUMBERS))
    assert session.values == _NUMBERS
    second.enter_context(_BATCH_SIZES.held(session, _NUMBERS))
    first.close()
    assert session.values == _NUMBERS
    second.close()
    assert session.values == _SPARK_DEFAULTS


def test_the_smallest_limit_of_any_job_holds() -> None:
    session, other = Session(), Session()
    with _BATCH_SIZES.held(session, _NUMBERS):
        with _BATCH_SIZES.held(session, _BIG), _BATCH_SIZES.held(session, _TEXT):
            assert session.values == _BIG
            assert other.values == _SPARK_DEFAULTS
        assert session.values == _NUMBERS
    assert session.values == _SPARK_DEFAULTS


def test_what_somebody_chose_is_left_alone() -> None:
    session = Session(**{_ROWS: "77"})
    with _BATCH_SIZES.held(session, _TEXT):
        assert session.values == {_ROWS: "77", _BYTES: _TEXT[_BYTES]}
    assert session.values == {_ROWS: "77", _BYTES: _SPARK_DEFAULTS[_BYTES]}


def test_threads_leave_nothing_behind() -> None:
    session = Session()

    def work() -> None:
        for wanted in (_NUMBERS, _TEXT, _BIG) * 50:
            with _BATCH_SIZES.held(session, wanted):
                assert int(session.values[_ROWS]) <= int(wanted[_ROWS])

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert session.values == _SPARK_DEFAULTS
