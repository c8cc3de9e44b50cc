import pytest

from sipp.experiments.nets import digits_cnn


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the network of the digits recipes a tenth of the work, for tests in which its size decides nothing."""
    monkeypatch.setattr(digits_cnn, "WIDTHS", (4, 8, 8))  # 980 weights
