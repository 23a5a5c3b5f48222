"""What users write, for the type checkers: `cargo xtask test python` checks it, nothing runs it."""

import torch
from torch.nn.parallel import DistributedDataParallel

import adacomp.torch
from adacomp.torch import AdaCompState, Config, LocalAdam, adacomp_hook


def script(ddp: DistributedDataParallel, scaler: torch.amp.GradScaler) -> dict[str, float]:
    hook = adacomp.torch.attach(ddp, mode="on", matrix="dense", conv=64, names={"head.*": "dense", "*.weight": 1000})
    adacomp.torch.attach(torch.compile(ddp), strategy="reduce", scaler=scaler, timeout=30)
    config = Config(vector="dense", matrix=100, local_adam=LocalAdam(betas=(0.9, 0.95)))
    state = AdaCompState(config)
    ddp.register_comm_hook(state, adacomp_hook)
    hook.mode = "off"
    state.load_state_dict([hook.state_dict(), hook.state_dict(consolidate=True)])
    return hook.scalars()
