"""Lightning on several learners, with AdaComp: the callback attaches, logs, and saves.

torchrun --nproc-per-node 2 python/examples/lightning_digits.py
"""

import argparse
import os
from pathlib import Path

import lightning
import torch
from data import drawn
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from adacomp.torch.lightning import AdaCompCallback


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(784, 300), nn.ReLU(), nn.Linear(300, 10))

    def training_step(self, batch, _):
        images, labels = batch
        return cross_entropy(self.net(images), labels)

    def validation_step(self, batch, _):
        images, labels = batch
        self.log("test_error", 100 * (self.net(images).argmax(1) != labels).float().mean(), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.05, momentum=0.9)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=["auto", "on", "off"], default="auto")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path("runs/lightning"), help="where checkpoints and logs go")
    parser.add_argument("--resume", type=Path, help="a checkpoint to go on from, on any number of learners")
    options = parser.parse_args()

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    lightning.seed_everything(1)
    callback = AdaCompCallback(mode=options.mode)
    trainer = lightning.Trainer(
        accelerator="auto",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        strategy=DDPStrategy(process_group_backend="gloo"),
        max_epochs=options.epochs,
        callbacks=[callback],
        logger=CSVLogger(options.folder),
        log_every_n_steps=10,
        default_root_dir=options.folder,
        enable_progress_bar=os.isatty(1),
    )
    train, test = (TensorDataset(*drawn(part)) for part in (True, False))
    trainer.fit(Classifier(), DataLoader(train, 50, shuffle=True), DataLoader(test, 500), ckpt_path=options.resume)
    if trainer.is_global_zero:
        print(f"test error {trainer.callback_metrics['test_error']:.2f}%")
        print(callback.hook)


if __name__ == "__main__":
    main()
