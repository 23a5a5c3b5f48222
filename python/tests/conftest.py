from learners import kill_all


def pytest_sessionfinish():
    kill_all()
