"""CIFAR10 with Lightning on several learners, with AdaComp.

    torchrun --nproc-per-node 2 examples/lightning_cifar.py

Lightning's own arguments for communication hooks work on GPUs only. This attaches when training starts, which works everywhere.
"""

import argparse
import os
from pathlib import Path

import lightning
import torch
from data import cifar10, folder_of
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import adacomp.torch


class Classifier(lightning.LightningModule):
    def __init__(self, mode):
        super().__init__()
        self.mode = mode
        self.net = nn.Sequential(
            nn.Conv2d(3, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(32, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(64 * 4 * 4, 10),
        )  # fmt: skip
        self.hook, self.saved = None, None

    def on_fit_start(self):
        # This is the line.
        self.hook = adacomp.torch.attach(self.trainer.strategy.model, mode=self.mode)
        if self.saved:
            self.hook.load_state_dict(self.saved)

    def on_save_checkpoint(self, checkpoint):
        # All learners are here, so one copy of what all keep can be made.
        if self.hook:
            checkpoint["adacomp"] = self.hook.state_dict(consolidate=True)

    def on_load_checkpoint(self, checkpoint):
        self.saved = checkpoint.get("adacomp")

    def training_step(self, batch, _):
        images, labels = batch
        loss = cross_entropy(self.net(images), labels)
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, _):
        images, labels = batch
        wrong = (self.net(images).argmax(1) != labels).float().mean()
        self.log("test_error", 100 * wrong, sync_dist=True, prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01, momentum=0.9)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=["auto", "on", "off"], default="auto")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch", type=int, default=64, help="samples of a step and learner")
    parser.add_argument("--data", type=Path, default=folder_of("cifar10"), help="the folder with CIFAR-10")
    parser.add_argument("--folder", type=Path, default=Path("runs"), help="where checkpoints go")
    parser.add_argument("--resume", type=Path, help="a checkpoint to go on from, on any number of learners")
    options = parser.parse_args()

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    lightning.seed_everything(1)
    train, test = (TensorDataset(*cifar10(options.data, part)) for part in (True, False))
    trainer = lightning.Trainer(
        accelerator="auto",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        strategy=DDPStrategy(process_group_backend="gloo"),
        max_epochs=options.epochs,
        default_root_dir=options.folder,
        enable_progress_bar=os.isatty(1),
        logger=False,
    )
    module = Classifier(options.mode)
    loaders = DataLoader(train, options.batch, shuffle=True), DataLoader(test, 500)
    trainer.fit(module, *loaders, ckpt_path=options.resume)
    if trainer.is_global_zero:
        print(f"test error {trainer.callback_metrics['test_error']:.2f}%")
        print(module.hook)


if __name__ == "__main__":
    main()
