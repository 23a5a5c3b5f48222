"""Shows that PyTorch alone damages memory on Gloo: python python/tests/gloo_gathers.py [long|short] [seconds]

It gathers by DTensor's operation, whose name is long, until the process crashes; or by one with a short name, which does not.
See docs/reliability.md.
"""

import sys
import time

import torch
import torch.distributed as dist

AHEAD, SIZES = 64, (1024, 8192, 32768)


def main(form: str = "long", seconds: str = "60") -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    name = dist.group.WORLD.group_name
    gather, wait = torch.ops._c10d_functional.all_gather_into_tensor, torch.ops._c10d_functional.wait_tensor
    end, gathers = time.monotonic() + float(seconds), 0
    while time.monotonic() < end:
        for size in SIZES:
            given = torch.ones(size)
            if form == "long":
                for output in [gather(given, 1, name) for _ in range(AHEAD)]:
                    wait(output)
            else:
                outputs = [torch.empty_like(given) for _ in range(AHEAD)]
                for work in [dist.all_gather_into_tensor(output, given, async_op=True) for output in outputs]:
                    work.wait()
            gathers += AHEAD
    print(f"{gathers} gathers, no crash")


if __name__ == "__main__":
    main(*sys.argv[1:])
