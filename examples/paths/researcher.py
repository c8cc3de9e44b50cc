"""A score of your own beside the built-in methods: masks from your formula, assessed, retrained and certified alike.

python examples/paths/researcher.py
"""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits

import sipp

KEEP = 0.1


def my_score(net, data):
    """The formula under test: magnitude times the standard deviation of the input. {parameter name: tensor}"""
    scores, hidden = {}, data
    for name, layer in net.named_children():
        if isinstance(layer, torch.nn.Linear):
            scores[f"{name}.weight"] = layer.weight.detach().abs() * hidden.std(0)
        hidden = layer(hidden).detach()
    return scores


def best_share(scores, keep):
    """Masks that keep the largest scores of all layers together."""
    values = torch.cat([one.flatten() for one in scores.values()])
    least = values.sort(descending=True).values[int(keep * len(values)) - 1]
    return {name: one >= least for name, one in scores.items()}


def train(net, images, labels, optimizer, steps=150):
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(net(images), labels).backward()
        optimizer.step()


torch.manual_seed(0)
pixels, labels = load_digits(return_X_y=True)
images, labels = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels)
order = torch.randperm(len(labels))
images, labels = images[order], labels[order]
data, new, new_labels = images[:1000], images[1000:], labels[1000:]  # the second part judges only

net = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
train(net, data, labels[:1000], torch.optim.Adam(net.parameters(), lr=3e-3))

found = sipp.compare(net, data, keeps=(0.5, KEEP), methods=("sipp-blend", "magnitude", "wanda"))
print(found)  # the built-in methods on this network; found.rows has the numbers

networks = {
    "mine": sipp.assess(net, best_share(my_score(net, data), KEEP), data),
    "magnitude": sipp.prune(net, data, keep=KEEP, method="magnitude"),
}
for name, pruned in networks.items():
    moved = float((pruned.model(new) - net(new)).norm() / net(new).norm())
    print(f"{name}: kept {pruned.keep:.1%}, the output moved by {moved:.2f} of its size")
    optimizer = torch.optim.Adam(pruned.model.parameters(), lr=3e-3)
    sipp.hold(pruned.model, pruned, optimizer=optimizer)
    train(pruned.model, data, labels[:1000], optimizer, steps=60)
    sipp.release(pruned.model)
    right = float((pruned.model(new).argmax(1) == new_labels).float().mean())
    print(f"{name}: {right:.1%} right after retraining")

networks = {name: sipp.assess(net, pruned.model, data) for name, pruned in networks.items()}  # as they are now
certificate = sipp.certify_accuracy(net, networks["mine"], [(new, new_labels)], calibration=data)
print(certificate.sentence)
sipp.page(networks, certificate, path="page.html", force=True)  # side by side
