"""Hugging Face Accelerate on several learners, with AdaComp: attach to what `prepare` returns.

torchrun --nproc-per-node 2 python/examples/accelerate_digits.py
"""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from data import drawn
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import adacomp.torch


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=["auto", "on", "off"], default="auto")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path("runs/accelerate"), help="where checkpoints go, to go on from")
    options = parser.parse_args()

    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    torch.manual_seed(1)
    model = nn.Sequential(nn.Flatten(), nn.Linear(784, 300), nn.ReLU(), nn.Linear(300, 10))
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    loader = DataLoader(TensorDataset(*drawn(train=True)), 50, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    hook = adacomp.torch.attach(model, mode=options.mode)
    # Accelerate keeps one copy for all processes.
    accelerator.register_for_checkpointing(hook.consolidated)

    done = sorted(options.folder.glob("epoch-*"))
    if done:
        accelerator.load_state(str(done[-1]))
    for epoch in range(len(done), options.epochs):
        for images, labels in loader:
            optimizer.zero_grad()
            accelerator.backward(cross_entropy(model(images), labels))
            optimizer.step()
        accelerator.save_state(str(options.folder / f"epoch-{epoch + 1:03}"))

    images, labels = (tensor.to(accelerator.device) for tensor in drawn(train=False))
    with torch.no_grad():
        error = 100 * (accelerator.unwrap_model(model)(images).argmax(1) != labels).float().mean()
    accelerator.print(f"test error {error:.2f}%")
    accelerator.print(hook)
    accelerator.end_training()


if __name__ == "__main__":
    main()
