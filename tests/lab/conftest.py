import pytest
import shorter


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests in which the size of the network decides nothing."""
    shorter.narrow(monkeypatch)
