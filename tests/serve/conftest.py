import pytest


@pytest.fixture(scope="module")
def ending():
    """Servers that have been told to end; all are waited for at once."""
    servers = []
    yield servers
    for one in servers:
        one.join()


@pytest.fixture
def serve(ending):
    """Starts servers of fake engines, which end with the test."""
    import fake_engine
    import http_server

    running = []

    def start(*, server_options=None, **options):
        running.append(http_server.Running(fake_engine.FakeEngine(**options), **(server_options or {})))
        return running[-1]

    yield start
    for one in running:
        one.end()
    ending += running


@pytest.fixture(scope="module")
def shared():
    """One server for the tests of a module that change nothing."""
    import fake_engine
    import http_server

    one = http_server.Running(fake_engine.FakeEngine())
    yield one
    one.end()
    one.join()
