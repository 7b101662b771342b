"""Marks, deadlines and the shared pool of rank processes for every Python test."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

DEADLINE = 120  # seconds, for a test without its own limit; a hang must never block the whole run

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
from limits import patience  # noqa: E402 (found by the line above)

# A shell starts its background programs with SIGINT and SIGQUIT ignored, and nohup with SIGHUP ignored. Children
# inherit that, so without this loop no such signal would end a program that a test starts.
for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGTERM):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)

# Times that one test keeps would change the predictions in another one, and tests must not write to the user's folder.
os.environ["SAGELLM_KEEP_TIMES"] = "0"


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Keeps the folder "dist": pytest ignores folders of that name by default."""
    return False if collection_path == HERE / "dist" else None


def pytest_configure(config: pytest.Config) -> None:
    """Registers the marks."""
    config.addinivalue_line("markers", "quick: part of the daily run")
    config.addinivalue_line("markers", "long: many repetitions; runs only when asked for with -m long")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Gives every test a deadline. Leaves out `long` tests, unless marks were selected on the command line."""
    for item in items:
        named = item.get_closest_marker("timeout")
        item.add_marker(pytest.mark.timeout(patience(named.args[0] if named else DEADLINE)), append=False)
    if not config.getoption("-m"):
        out = [item for item in items if item.get_closest_marker("long")]
        if out:
            config.hook.pytest_deselected(items=out)
            items[:] = [item for item in items if not item.get_closest_marker("long")]


def pytest_collection_finish() -> None:
    """Stores the environment for warm Pythons, after all imports of the tests."""
    if "harness" in sys.modules:
        sys.modules["harness"].BEFORE.update(os.environ)


@pytest.fixture
def say(request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> Callable[[str], None]:
    """Prints a line immediately, although pytest captures the output of tests. For tests that take minutes."""

    def line(text: str) -> None:
        with capsys.disabled():
            print(f"\n{request.node.name}: {text}", end="", flush=True)

    return line


def played(count: int) -> Iterator[list[str]]:
    """Makes `count` hosts, which are network namespaces. Skips the test if this machine cannot make them."""
    import net

    try:
        with net.Network(count) as made:
            yield made.names
    except net.Unavailable as reason:
        pytest.skip(f"network namespaces may not be made here: {reason}")


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """Two connected hosts, by name."""
    yield from played(2)


@pytest.fixture
def three_hosts() -> Iterator[list[str]]:
    """Three connected hosts, by name."""
    yield from played(3)


@pytest.fixture
def four_hosts() -> Iterator[list[str]]:
    """Four connected hosts, by name."""
    yield from played(4)


@pytest.fixture
def lone_host() -> Iterator[str]:
    """A host without neighbours, by name."""
    for names in played(1):
        yield names[0]


@pytest.fixture(scope="session", autouse=True)
def end_of_ranks() -> Iterator[None]:
    """Ends the pool, the zygote and the warm Python when the session ends."""
    yield
    import harness

    harness.Pool.end()
    if harness.Zygote._one is not None:
        harness.Zygote._one.close()
    if harness.Warm._one is not None:
        harness.Warm._one.close()
