"""A short run with many buckets, from start to exit. Its last line is a checksum of the weights."""

import sys
import zlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

import adacomp.torch

torch.set_num_threads(1)
dist.init_process_group("gloo")
torch.manual_seed(0)
layers = [layer for _ in range(12) for layer in (nn.Linear(64, 64), nn.ReLU())]
model = DistributedDataParallel(nn.Sequential(*layers, nn.Linear(64, 10)), bucket_cap_mb=0.01)
hook = adacomp.torch.attach(model, mode="on", strategy=sys.argv[1])
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
generator = torch.Generator().manual_seed(dist.get_rank())
for _ in range(20):
    optimizer.zero_grad()
    cross_entropy(model(torch.randn(4, 64, generator=generator)), torch.randint(0, 10, (4,), generator=generator)).backward()
    optimizer.step()
assert hook.stats()["steps"]["compressed"] == 20
weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
print(zlib.crc32(weights.numpy().tobytes()))
dist.destroy_process_group()
