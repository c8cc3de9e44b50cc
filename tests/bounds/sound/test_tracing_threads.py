"""While one thread traces a model, others that use it get its own parameters and numbers."""

import threading

import torch
from torch import Tensor, nn

from sipp.bounds.sound.tracing import fx_graph


def test_other_threads_get_parameters_and_outputs_not_proxies() -> None:
    found: list[object] = []

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            other = threading.Thread(target=lambda: found.extend([self.get_parameter("fc.weight"), self.fc(x0)]))
            other.start()
            other.join()
            return self.fc(x)

    model, x0 = Shared(), torch.ones(1, 3)
    graph = fx_graph(model)
    assert len(found) == 2 and found[0] is model.fc.weight
    assert isinstance(found[1], Tensor) and torch.equal(found[1], model.fc(x0))
    assert [node.op for node in graph.graph.nodes] == ["placeholder", "call_module", "output"]
