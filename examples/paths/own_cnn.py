"""A CNN of your own and its DataLoader: trained, compared, pruned, retrained with the zeros held, certified, stored.

python examples/paths/own_cnn.py
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

import sipp


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Conv2d(1, 16, 3, padding=1)
        self.norm = torch.nn.BatchNorm2d(16)
        self.second = torch.nn.Conv2d(16, 32, 3, padding=1)
        self.head = torch.nn.Linear(32 * 4 * 4, 10)

    def forward(self, images):
        hidden = F.relu(self.norm(self.first(images)))
        hidden = F.max_pool2d(F.relu(self.second(hidden)), 2)
        return self.head(hidden.flatten(1))


def train(net, optimizer, loader, epochs):
    net.train()
    for _ in range(epochs):
        for images, labels in loader:
            optimizer.zero_grad()
            F.cross_entropy(net(images), labels).backward()
            optimizer.step()


def sgd(net):
    return torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)


torch.manual_seed(0)
pixels, labels = load_digits(return_X_y=True)
images, labels = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 8 - 1, torch.tensor(labels)
order = torch.randperm(len(labels))
data = TensorDataset(images[order], labels[order])
loader = DataLoader(torch.utils.data.Subset(data, range(1000)), batch_size=50, shuffle=True)
holdout = DataLoader(torch.utils.data.Subset(data, range(1000, 1797)), batch_size=100)  # never trained on

net = Net()
train(net, sgd(net), loader, epochs=4)

found = sipp.compare(net, loader, keeps=(0.2,), methods=("sipp-blend", "magnitude", "lamp"))
print(found)
pruned = sipp.prune(net, loader, keep=0.2, method=found.best(0.2).method)
print(pruned)

optimizer = sgd(pruned.model)
sipp.hold(pruned.model, pruned, optimizer=optimizer)
train(pruned.model, optimizer, loader, epochs=2)
sipp.release(pruned.model)

certificate = sipp.certify_accuracy(net, pruned.model, holdout, confidence=0.95)
print(certificate.sentence)
assessed = sipp.assess(net, pruned.model, loader)  # training has changed the weights: what holds of these
print(sipp.save(assessed, "net.sipp.safetensors", certificate=certificate))
print(sipp.page(assessed, certificate, path="page.html", force=True))

again = sipp.load("net.sipp.safetensors", into=Net())
print(sipp.sparse(again, next(iter(holdout))[0]))
