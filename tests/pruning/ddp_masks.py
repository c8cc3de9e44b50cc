"""Two processes that hold different masks in one DDP network; run as `python ddp_masks.py RANK FILE`."""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from sipp.pruning.masking import hold

rank, path = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
torch.manual_seed(0)
net = DistributedDataParallel(nn.Linear(6, 4))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
masks = {"weight": (torch.arange(24).reshape(4, 6) + rank) % 2 == 0}
hold(net, masks, optimizer=optimizer)
for _ in range(3):
    optimizer.zero_grad()
    net(torch.rand(8, 6) + rank).square().mean().backward()
    optimizer.step()
weights = [torch.zeros(4, 6) for _ in range(2)]
dist.all_gather(weights, net.module.weight.detach())
first = torch.arange(24).reshape(4, 6) % 2 == 0
assert torch.equal(weights[0], weights[1]) and torch.equal(weights[0] != 0, first), weights
dist.barrier()
dist.destroy_process_group()
os._exit(0)  # gloo's threads may outlive the interpreter, which then aborts; what is tested is over
