import pytest
from learners import Learners

_pools = {}


@pytest.fixture
def learners():
    """`learners(4).run(function, *arguments)`: four processes, which other tests may have used before."""

    def get(count):
        if count not in _pools or not _pools[count].alive:
            _pools[count] = Learners(count)
        return _pools[count]

    return get


@pytest.fixture
def own_learners():
    """The same, for tests that do harm to them."""
    made = []

    def get(count):
        made.append(Learners(count))
        return made[-1]

    yield get
    for pool in made:
        pool.kill()


def pytest_sessionfinish():
    for pool in _pools.values():
        pool.kill()
